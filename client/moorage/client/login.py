"""The login name of the user on this machine."""

from __future__ import annotations


def who() -> str:
    """Return the login name, which the orders of operators record; empty if there is none."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
