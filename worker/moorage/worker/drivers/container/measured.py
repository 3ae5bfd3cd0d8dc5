"""What a container had at most, as the kernel counts its cgroup: memory and CPU time.

An engine removes the cgroup as the container ends, so it is read while the container runs. What changed after the last
look is not known.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from moorage.schemas.frames import NO_PEAKS, UNKNOWN, Peaks
from moorage.system.cgroup import CgroupFolder, cgroup_of

#: seconds between two looks
LOOK_S: Final = 1.0


class Measured:
    """Reads the cgroup of a container, by the pid of its first process."""

    def __init__(self) -> None:
        self.peaks = NO_PEAKS

    async def watch(self, pid: int, over: asyncio.Future[Any]) -> None:
        """Look once each `LOOK_S` until the container is `over`.

        Returns at once where it has no cgroup of its own that can be read.
        """
        folder = _own(pid)
        while folder is not None and self.look(folder) and not over.done():
            await asyncio.wait((over,), timeout=LOOK_S)

    def look(self, folder: Path) -> bool:
        """Note what the kernel has counted so far; return whether there is anything to be read."""
        group = CgroupFolder(str(folder))
        memory, cpu_ms = group.memory(), group.cpu_ms()
        if memory is None and cpu_ms is None:
            return False
        held = 0 if memory is None else memory.peak_bytes or group.memory_now()
        self.peaks = Peaks(
            memory_mib=max(self.peaks.memory_mib, math.ceil(held / (1 << 20)) if held else UNKNOWN),
            cpu_ms=max(self.peaks.cpu_ms, UNKNOWN if cpu_ms is None else cpu_ms),
        )
        return True


def _own(pid: int) -> Path | None:
    """Return the folder of a container's cgroup; None if it has none but that of its worker."""
    with suppress(OSError):
        folder, mine = cgroup_of(pid), cgroup_of()
        if folder is not None and (mine is None or not mine.is_relative_to(folder)):
            return folder
    return None
