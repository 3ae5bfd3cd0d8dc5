"""Watches the disk of the server that `moorage up` started. When it is full, no record can be stored, and no log says
why, because logs are on it, too."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

#: free bytes below which a server of our own is out of order: it may stop storing at any record
DISK_FREE_MIN: Final = 16 * 1024**2
#: so much more than that is room again, so that a disk at the bound is not told of at every look
ROOM_AGAIN: Final = 2 * DISK_FREE_MIN
#: statvfs(3) tells nobody when its answer changes, so it is asked
LOOK_S: Final = 2.0
#: what helps, for whoever asks meanwhile
ROOM: Final = "free disk space there; moorage up then accepts jobs again without a restart, and no accepted job is lost"


class Disk(NamedTuple):
    """The bytes that this user may still write to a disk, and the size of the disk in bytes."""

    free: int
    size: int

    def text(self, folder: Path) -> str:
        return f"{self.free >> 20:,} of {self.size >> 20:,} MiB are free at {folder}"


def disk_of(folder: Path) -> Disk:
    """Return the free space and the size of the disk that the folder is on. Raises OSError."""
    found = os.statvfs(folder)
    return Disk(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def full_disk_of(message: str) -> str | None:
    """Return that the disk of `moorage up` is full, in words; None if it is not, or if the message is about another
    server than that of this folder."""
    from moorage.bus.target import find_home, read_up

    folder = find_home()
    up = read_up(folder)
    if up is None or up.url not in message:
        return None
    try:
        disk = disk_of(folder)
    except OSError:
        return None
    return f"the disk of moorage up is full: {disk.text(folder)}" if disk.free < DISK_FREE_MIN else None


async def watch_disk(folder: Path, say: Callable[[str], None], room_again: Callable[[], None]) -> None:
    """Print a line when the disk is full and when it has room again, for ever. `room_again` is called when it has room
    again."""
    is_full = False
    while True:
        try:
            disk = disk_of(folder)
        except OSError:  # the folder was removed below us: whoever writes there says so
            disk = Disk(ROOM_AGAIN, ROOM_AGAIN)
        if not is_full and disk.free < DISK_FREE_MIN:
            is_full = True
            say(f"the disk of moorage up is full: {disk.text(folder)}")
            say(
                "the scheduler accepts no job until the disk has space; no accepted job is lost. Free space "
                "there: no restart is needed"
            )
        elif is_full and disk.free >= ROOM_AGAIN:
            is_full = False
            say(f"the disk of moorage up has space again, and the scheduler accepts jobs again: {disk.text(folder)}")
            room_again()
        await asyncio.sleep(LOOK_S)
