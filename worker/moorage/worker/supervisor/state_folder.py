"""What makes a state folder one supervisor's: the lock that it holds, and the mark by which its children are known."""

import contextlib
import fcntl
import os
import secrets
import string
from pathlib import Path
from typing import Final

from moorage.worker.supervisor.protocol import LOCK_NAME, MARK_NAME

EXIT_HELD: Final = 73
"""The exit status of a supervisor that finds another on its state folder (EX_CANTCREAT of sysexits.h)."""
MARK_BYTES: Final = 16


class Held(Exception):
    """Another supervisor holds the state folder."""

    def __init__(self, state: Path, holder: str) -> None:
        super().__init__(f"another supervisor (pid {holder or 'unknown'}) holds {state}")


def state_mark(state: Path) -> str:
    """This folder's random mark, made with the folder's first supervisor. Raises `OSError`.

    The caller holds the folder's lock. A file that holds no mark is replaced; members started before keep theirs, which
    the journal has.
    """
    path = state / MARK_NAME
    with contextlib.suppress(FileNotFoundError):
        found = path.read_bytes()[: MARK_BYTES * 2].decode("ascii", "replace")
        if len(found) == MARK_BYTES * 2 and all(char in string.hexdigits for char in found):
            return found
    mark = secrets.token_hex(MARK_BYTES)
    fresh = path.with_name(MARK_NAME + ".new")
    fresh.write_text(mark)
    os.rename(fresh, path)
    return mark


def take_lock(state: Path) -> int:
    """The descriptor of the locked file; the lock lives as long as it. Raises `Held`, `OSError`."""
    descriptor = os.open(state / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise Held(state, holder) from None
    return descriptor
