"""Choose what a driver without a pool of moorage asks its runtime for: the runtime's next devices, or a count of them.

The drivers of moorage lease devices and name them. A driver whose runtime chooses the device, or that runs without a
scheduler, takes the next device in turn, as OpenShell's drivers do. Without I/O and without a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from moorage.schemas.errors import refuse
from moorage.schemas.gpu import GpuSpec
from moorage.worker.inventory.cdi import ALL, KINDS

NVIDIA: Final = KINDS["nvidia"]


class NextGpu:
    """The devices of one kind in turn. It does not know which are in use: a device in use may come again.

    `names` are qualified CDI names, such as `nvidia.com/gpu=0`; names of other kinds are ignored. `wsl2` means that
    this host can have only the device `all`, which counts as one.
    """

    def __init__(self, names: Iterable[str] = (), *, wsl2: bool = False, kind: str = NVIDIA) -> None:
        self._prefix = f"{kind}="
        self._wsl2 = wsl2
        self._names: list[str] = []
        self._at = 0
        self.refresh(names)

    def refresh(self, names: Iterable[str]) -> None:
        """Replace the devices by those that exist now. The position stays, so another device may be next."""
        own = {name.strip() for name in names}
        found = sorted(name.removeprefix(self._prefix) for name in own if name.startswith(self._prefix))
        numbers = sorted((name for name in found if name.isascii() and name.isdecimal()), key=int)
        named = [name for name in found if name != ALL and name not in numbers]
        everything = [ALL] if self._wsl2 and ALL in found else []
        self._names = [self._prefix + name for name in numbers or named or everything]

    def peek(self, count: int) -> list[str]:
        """Return what `next` would, and take nothing. Raises Refused, failed-precondition, if there are too few."""
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
        """Return the next devices, each once, and advance the turn. Raises Refused as `peek` does."""
        found = self.peek(count)
        self._at = (self._at + count) % len(self._names)
        return found


def kubernetes_limits(gpu: GpuSpec, resource: str = NVIDIA) -> dict[str, str]:
    """Return the limits of a container in a cluster that chooses the devices: a count, as text."""
    return {resource: str(gpu.count)}
