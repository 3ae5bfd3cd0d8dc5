"""Choose what a driver without a pool of moorage asks its runtime for: the runtime's next devices, or a count of them.

The drivers of moorage lease devices and name them. A driver whose runtime chooses the device, or that runs without a
scheduler, takes the next device in turn, as OpenShell's drivers do. Without I/O and without a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from moorage.schemas.errors import refuse
from moorage.schemas.gpu import GpuSpec
from moorage.worker.devices.readers.cdi import ALL, KINDS

NVIDIA: Final = KINDS["nvidia"]


class NextGpu:
    """Hands out the devices of one kind in a cycle. A device may come again while it is still in use.

    `names` are qualified CDI names, such as `nvidia.com/gpu=0`; names of other kinds are ignored. If some devices have
    numbers, only those are handed out, else those with other names. With `wsl2`, a host that has only the device `all`
    hands out that as one device; otherwise `all` is ignored.
    """

    def __init__(self, names: Iterable[str] = (), *, wsl2: bool = False, kind: str = NVIDIA) -> None:
        self._prefix = f"{kind}="
        self._wsl2 = wsl2
        self._names: list[str] = []
        self._at = 0
        self.refresh(names)

    def refresh(self, names: Iterable[str]) -> None:
        """Replace the devices by those that exist now. The position stays, so it may be at another device."""
        own = {name.strip() for name in names}
        found = sorted(name.removeprefix(self._prefix) for name in own if name.startswith(self._prefix))
        numbers = sorted((name for name in found if name.isascii() and name.isdecimal()), key=int)
        named = [name for name in found if name != ALL and name not in numbers]
        everything = [ALL] if self._wsl2 and ALL in found else []
        self._names = [self._prefix + name for name in numbers or named or everything]

    def peek(self, count: int) -> list[str]:
        """Return what `next` would return, without advancing the position.

        Raises Refused with failed-precondition if `count` is below 1, or there are fewer devices.
        """
        if not 1 <= count <= len(self._names):
            raise refuse(
                "failed-precondition",
                f"{count} GPUs are requested, and {len(self._names)} are available",
                field="$.gpu.count",
                found=count,
                allowed=f"1..{len(self._names)}" if self._names else "none: the host has no GPU that can be requested",
            )
        return [self._names[(self._at + step) % len(self._names)] for step in range(count)]

    def next(self, count: int) -> list[str]:
        """Return the next `count` devices, each once, and advance the position. Raises Refused as `peek` does."""
        found = self.peek(count)
        self._at = (self._at + count) % len(self._names)
        return found


def kubernetes_limits(gpu: GpuSpec, resource: str = NVIDIA) -> dict[str, str]:
    """Return the resource limits of a container in a cluster that chooses the devices: their count, as text."""
    return {resource: str(gpu.count)}
