"""Who acts, by the word of this machine."""

from __future__ import annotations


def who() -> str:
    """The login name, for acts that say whose they are; empty where there is none."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
