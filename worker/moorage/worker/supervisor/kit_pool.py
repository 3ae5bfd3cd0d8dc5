"""A small pool of kits: the pipes and the cgroup that a member needs before it is launched, made in advance.

Making a kit takes 0.1 ms, which a job would have to wait for. So a new one is made whenever a member has ended, when
nothing else is urgent; in all that is no more work than before. A start that finds the pool empty makes its own kit.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
from dataclasses import dataclass
from typing import Final

from moorage.worker.cgroup import CgroupBase, CgroupFolder

KITS_MAX: Final = 4
#: the pool is filled again when no start has come for so long
REFILL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Kit:
    """Two pipes (read end, write end), whose read ends do not block, and a cgroup with its open folder, if any."""

    stdout: tuple[int, int]
    stderr: tuple[int, int]
    cgroup: CgroupFolder | None
    folder: int

    def close(self) -> None:
        """Release a kit that was not used."""
        for descriptor in (*self.stdout, *self.stderr, *((self.folder,) if self.folder >= 0 else ())):
            os.close(descriptor)
        if self.cgroup is not None:
            with contextlib.suppress(OSError):
                self.cgroup.remove()


class KitPool:
    """Hands out the oldest kit first. Create it inside the running loop."""

    def __init__(self, cgroups: CgroupBase | None, kits_max: int = KITS_MAX) -> None:
        self._cgroups = cgroups
        self._kits_max = kits_max
        self._kits: list[Kit] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # No cgroup may get a name that a former supervisor used: what that one left is killed by those names.
        self._prefix = f"m-{secrets.token_hex(6)}"
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._kits)

    def take(self) -> Kit:
        """A kit, for one member alone. Raises `OSError`."""
        while self._kits:
            kit = self._kits.pop(0)
            if kit.cgroup is None or kit.cgroup.exists():
                return kit
            kit.close()  # its cgroup looked unused, and somebody removed it
        return self._make()

    def add(self) -> None:
        """Make one more kit unless the pool is full."""
        if len(self._kits) < self._kits_max:
            with contextlib.suppress(OSError):  # `take` will raise it for the start that needs a kit
                self._kits.append(self._make())

    def fill(self) -> None:
        """Make kits until the pool is full."""
        for _ in range(self._kits_max - len(self._kits)):
            self.add()

    def fill_later(self) -> None:
        """Fill the pool once nothing has been started for a while."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(REFILL_S, self.fill) if len(self._kits) < self._kits_max else None

    def close(self) -> None:
        """Release the kits that are left."""
        if self._timer is not None:
            self._timer.cancel()
        self._kits_max = 0
        while self._kits:
            self._kits.pop().close()

    def _make(self) -> Kit:
        pairs: list[tuple[int, int]] = []
        cgroup: CgroupFolder | None = None
        try:
            for _ in range(2):
                pairs.append(os.pipe2(os.O_CLOEXEC))
                os.set_blocking(pairs[-1][0], False)
            folder = -1
            if self._cgroups is not None:
                cgroup = self._cgroups.create(f"{self._prefix}-{next(self._numbers)}", None, None)[0]
                folder = os.open(cgroup.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except BaseException:
            for descriptor in itertools.chain(*pairs):
                os.close(descriptor)
            if cgroup is not None:
                cgroup.remove()
            raise
        return Kit(pairs[0], pairs[1], cgroup, folder)
