"""Limit the output of jobs on the disk of the state folder, because without room for the journal nothing can start.

The journals of the supervisor and the agent, some MiB, are on the same file system as the jobs' output. A job that
writes without end would fill it up to `output_cap_bytes`, and a disk may be smaller than that.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final, NamedTuple

#: the errors of a write that a disk has no room for
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
#: a disk is nearly full once less than this part of it is free, and has room again once twice as much is
FREE_PART: Final = 1 / 20
#: and of a large disk no more than this: bytes
FREE_BYTES_MAX: Final = 1024**3
#: output that is written between two looks at the disk
LOOK_BYTES: Final = 1024**2


class Disk(NamedTuple):
    """A folder's file system: the bytes that this user may still write, and those beside them that are in use."""

    free: int
    used: int

    @property
    def low_bytes(self) -> int:
        """How many bytes are free where it is nearly full."""
        return min(int((self.free + self.used) * FREE_PART), FREE_BYTES_MAX)

    @property
    def percent(self) -> int:
        """How much of it is in use, as df(1) says it: rounded up."""
        return -(-100 * self.used // max(1, self.free + self.used))


def disk_of(folder: Path) -> Disk:
    """Return the disk that a folder is on. Raises OSError."""
    found = os.statvfs(folder)
    free = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return Disk(free * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize)


def spare_bytes(folder: Path) -> int:
    """Return how many bytes output may still take on the folder's disk; not positive if it is nearly full.

    Raises OSError.
    """
    disk = disk_of(folder)
    return disk.free - disk.low_bytes


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
