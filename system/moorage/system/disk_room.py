"""Limit the output of jobs on the disk of the state folder, because without room for the journal all jobs would end.

The journals of the supervisor and the agent, some MiB, are on the same file system as the jobs' output. A job that
writes without end would fill it up to `output_cap_bytes`, and a disk may be smaller than that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

#: bytes that output leaves free: journals are written anew beside their old ones, some 8 MiB each
RESERVE_BYTES: Final = 64 * 1024**2
#: and no more than this part of the whole: a small disk is to hold some output, too
RESERVE_PART: Final = 8
#: output that is written between two looks at the disk
LOOK_BYTES: Final = 1024**2


def spare_bytes(folder: Path) -> int:
    """Return how many bytes output may still take on the folder's disk; negative if the reserve is in use.

    Raises OSError.
    """
    found = os.statvfs(folder)
    free = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return free * found.f_frsize - min(RESERVE_BYTES, found.f_blocks * found.f_frsize // RESERVE_PART)


class DiskRoom:
    """The bytes that the output of all members of one supervisor may still take. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left = 0

    def take(self, size: int) -> bool:
        """Reserve `size` bytes for output; return False, and reserve none, if the disk lacks the room.

        The disk is checked once in `LOOK_BYTES`; if it cannot be checked, the bytes are reserved.
        """
        if size > self._left:
            try:
                self._left = min(spare_bytes(self._folder), max(size, LOOK_BYTES))
            except OSError:  # whoever writes there says so
                self._left = max(size, LOOK_BYTES)
        if size > self._left:
            return False
        self._left -= size
        return True
