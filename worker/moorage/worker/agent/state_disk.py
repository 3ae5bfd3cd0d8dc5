"""Watch the disk of the state folder, and keep a reserve there for the journals alone.

A full disk ends nothing: a journal that finds no room is given a piece of the reserve, and the worker starts no more
jobs until the disk has room. Its jobs run on, and it renews for them.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from moorage.schemas.frames import DISK_FULL
from moorage.system.disk_room import Disk, disk_of
from moorage.system.proctree import boottime_s

RESERVE_NAME: Final = "journal.reserve"
#: on a small disk the reserve is this part of it
RESERVE_PART: Final = 8
#: given up at a time: others write to this disk, too, and what is free is anybody's
PIECE_BYTES: Final = 1024**2
#: below so many free bytes nothing is started: the supervisor's journal has no reserve
START_BYTES_MIN: Final = 8 * 1024**2
#: and on a small disk below this part of it
START_PART_MIN: Final = 100
#: statvfs(3) tells nobody when its answer changes, so it is asked
LOOK_S: Final = 2.0

log = logging.getLogger("moorage.worker")


class StateDisk:
    """The disk of one state folder, shared by the agents of a process. Not thread-safe.

    While it `is_full`, nothing is started, since `full_since_s` (CLOCK_BOOTTIME). `warning` is one line for operators,
    or "".
    """

    def __init__(self, folder: Path, reserve_bytes: int) -> None:
        """Make the reserve; without room for it, log that there is none."""
        self.is_full = False
        self.warning = ""
        self.full_since_s = 0.0
        self._folder = folder
        self._path = folder / RESERVE_NAME
        self._whole_bytes = min(reserve_bytes, _bytes_of(folder) // RESERVE_PART)
        self._has_bytes = self._found_bytes()
        self._look_at_s = 0.0
        if self._has_bytes == self._whole_bytes:
            return
        was_given = self._path.exists()  # the agent before needed it
        if why := self._made_whole(room=1):
            self.is_full = was_given
            log.warning(
                "no reserve of %d MiB at %s: %s; should the disk be full, the ends of jobs are not reported until it"
                " has room", self._whole_bytes >> 20, self._path, why,
            )  # fmt: skip

    @property
    def why(self) -> str:
        """Why nothing is started here, in one line, after its kind."""
        return f"{DISK_FULL}: no room on the disk of {self._folder}: free some; it takes jobs again by itself"

    def give(self) -> bool:
        """Note that a journal finds no room, and give up a piece of the reserve; return False if none is left."""
        self._fill()
        if self._has_bytes <= 0:
            return False
        self._has_bytes = max(0, self._has_bytes - PIECE_BYTES)
        try:
            os.truncate(self._path, self._has_bytes)
        except OSError:
            self._has_bytes = 0  # somebody has removed it
            return False
        return True

    def look(self) -> None:
        """See how full the disk is, every `LOOK_S` seconds, and take the reserve back once there is room for it."""
        if (now_s := boottime_s()) < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        try:
            disk = disk_of(self._folder)
        except OSError:  # whoever writes there says so
            return
        if self.is_full:
            if not self._made_whole(room=2):
                self.is_full = False
                log.warning("the disk of %s has room again: jobs are started again", self._folder)
        elif disk.free < min(START_BYTES_MIN, (disk.free + disk.used) // START_PART_MIN):
            self._fill()
        self._warn(disk)

    def _fill(self) -> None:
        if not self.is_full:
            self.is_full, self.full_since_s = True, boottime_s()
            log.error("%s; running jobs go on", self.why)

    def _warn(self, disk: Disk) -> None:
        if disk.free <= disk.low_bytes:
            said = f"disk: {disk.percent} % of the disk of {self._folder} are in use: output and kept files are dropped"
            if not self.warning:
                log.warning("%s; make room there", said)
            self.warning = said
        elif self.warning and disk.free >= 2 * disk.low_bytes:
            self.warning = ""

    def _made_whole(self, *, room: int) -> str:
        """Make the reserve whole, if `room` times what a nearly full disk has is free beside it; return why not."""
        lacking = self._whole_bytes - self._has_bytes
        try:
            disk = disk_of(self._folder)
            if disk.free - lacking < room * disk.low_bytes:
                return f"{disk.percent} % of the disk are in use"
            if lacking:
                self._allocate()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _allocate(self) -> None:
        """Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._whole_bytes)
        except OSError:
            os.ftruncate(descriptor, self._has_bytes)
            raise
        finally:
            os.close(descriptor)
        self._has_bytes = self._whole_bytes

    def _found_bytes(self) -> int:
        """Return the size of the reserve that an earlier agent has left, which is cut to the size wanted now."""
        try:
            size = os.stat(self._path, follow_symlinks=False).st_size
            if size > self._whole_bytes:
                os.truncate(self._path, size := self._whole_bytes)
            if not self._whole_bytes:
                self._path.unlink()
        except OSError:
            return 0
        return size


def _bytes_of(folder: Path) -> int:
    """Return the size of a folder's disk; 0 if it cannot be read."""
    try:
        disk = disk_of(folder)
    except OSError:
        return 0
    return disk.free + disk.used
