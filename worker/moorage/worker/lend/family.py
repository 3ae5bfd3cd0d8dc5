"""Know a borrower's processes also after the borrower has died."""

from __future__ import annotations

import asyncio
from typing import Final

from moorage.system.proctree import descendants, read_process

#: seconds between two looks at a living borrower's processes. One whose parent dies sooner than that, and before the
#: borrower, is not known
LOOK_S: Final = 1.0


class Family:
    """A process and those that descend from it. The caller sees to it that it lives when this is made.

    What a dead process leaves gets another parent, so its processes are known only if they were seen below it before.
    Each is kept by its pid and start time, because a pid alone is used again.
    """

    __slots__ = ("_starts",)

    def __init__(self, pid: int) -> None:
        self._starts: dict[int, int] = {pid: process.start_ticks} if (process := read_process(pid)) is not None else {}
        self.look()

    def look(self) -> None:
        """Add the processes that descend from a known one, and forget those that have ended."""
        roots = [pid for pid, ticks in self._starts.items() if _start_of(pid) == ticks]
        found = {pid: _start_of(pid) for pid in descendants(roots)}
        self._starts = {pid: ticks for pid, ticks in found.items() if ticks is not None}

    def has(self, pid: int) -> bool:
        """Return whether this process is one of them, as of the last look."""
        return pid in self._starts and self._starts[pid] == _start_of(pid)

    async def follow(self) -> None:
        """Look every `LOOK_S` seconds until canceled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()


def _start_of(pid: int) -> int | None:
    process = read_process(pid)
    return process.start_ticks if process is not None else None
