"""The login name of the user on this machine."""

from __future__ import annotations


def who() -> str:
    """Return the login name, which operators' acts record; empty where there is none."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
