"""Reserve a state folder for one supervisor by a lock, and give its children a mark to recognize them by."""

import contextlib
import fcntl
import os
import secrets
import string
from pathlib import Path
from typing import Final

from moorage.system.private_files import replace_private
from moorage.worker.supervisor.protocol import LOCK_NAME, MARK_NAME

EXIT_HELD: Final = 73
"""The exit status of a supervisor whose state folder has another supervisor (EX_CANTCREAT of sysexits.h)."""
MARK_BYTES: Final = 16


class Held(Exception):
    """Another supervisor has the state folder."""

    def __init__(self, state: Path, holder: str) -> None:
        super().__init__(f"another supervisor (pid {holder or 'unknown'}) holds {state}")


def state_mark(state: Path) -> str:
    """Return this folder's random mark, made with the folder's first supervisor. Raises `OSError`.

    The caller has the folder's lock. A file without a valid mark is replaced; earlier attempts keep their mark, which
    the journal has.
    """
    path = state / MARK_NAME
    with contextlib.suppress(FileNotFoundError):
        found = path.read_bytes()[: MARK_BYTES * 2].decode("ascii", "replace")
        if len(found) == MARK_BYTES * 2 and all(char in string.hexdigits for char in found):
            return found
    mark = secrets.token_hex(MARK_BYTES)
    replace_private(path, mark, is_synced=False)
    return mark


def take_lock(state: Path) -> int:
    """Return the descriptor of the locked file; the lock lasts until it is closed. Raises `Held`, `OSError`."""
    descriptor = os.open(state / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise Held(state, holder) from None
    return descriptor
