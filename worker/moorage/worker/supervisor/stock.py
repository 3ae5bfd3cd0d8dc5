"""What a member's start needs before the launcher is asked: pipes and a cgroup, a few of them made beforehand.

They take 0.1 ms, which a job would wait for. One is made where a member has ended, when there is time for it, so that
the stock costs no work that was not done before; a start that finds it empty makes its own.
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
RESTOCK_S: Final = 0.05
"""After a start that nothing has followed, the stock is filled again."""


@dataclass(frozen=True, slots=True)
class Kit:
    """Two pipes (read end, write end), whose read ends do not block, and a cgroup with its open folder, if any."""

    stdout: tuple[int, int]
    stderr: tuple[int, int]
    cgroup: CgroupFolder | None
    folder: int

    def close(self) -> None:
        """Give it back unused."""
        for descriptor in (*self.stdout, *self.stderr, *((self.folder,) if self.folder >= 0 else ())):
            os.close(descriptor)
        if self.cgroup is not None:
            with contextlib.suppress(OSError):
                self.cgroup.remove()


class Stock:
    """Kits by the order of their making. Make it inside the running loop."""

    def __init__(self, cgroups: CgroupBase | None, kits_max: int = KITS_MAX) -> None:
        self._cgroups = cgroups
        self._kits_max = kits_max
        self._kits: list[Kit] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # No group may have a name that a former supervisor has used: whatever it left is killed under that.
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
            kit.close()  # somebody has cleared away what looked unused
        return self._make()

    def add(self) -> None:
        """Make one more, unless there are enough."""
        if len(self._kits) < self._kits_max:
            with contextlib.suppress(OSError):  # the start that needs it will say so
                self._kits.append(self._make())

    def fill(self) -> None:
        """Make as many as there may be."""
        for _ in range(self._kits_max - len(self._kits)):
            self.add()

    def fill_later(self) -> None:
        """Once nothing has been started for a while."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(RESTOCK_S, self.fill) if len(self._kits) < self._kits_max else None

    def close(self) -> None:
        """Give back what is left."""
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
