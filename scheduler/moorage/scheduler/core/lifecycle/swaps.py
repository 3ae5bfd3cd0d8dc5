"""How long members that sleep take to leave their GPUs, and to be back: as measured in this term, or by their size."""

from __future__ import annotations

from collections.abc import Container
from typing import Final, Literal, NamedTuple

#: MiB a millisecond between a GPU and the host's RAM, until a swap was measured: as on an H200 (bench/TRIED.md)
OUT_MIB_MS: Final = 1.9
IN_MIB_MS: Final = 5.6
#: the time of a smaller swap is mostly not for its memory, and says nothing of larger ones
TELLING_MIB: Final = 1024
#: a swap that took so many times as long as on an H200 was held up: the next one of another service is not
SLOWER_MAX: Final = 4


class Swap(NamedTuple):
    """The memory of a service's member, and how long it takes both ways; 0 for what is not known."""

    mib: int = 0
    out_ms: int = 0
    in_ms: int = 0


class Wakes(NamedTuple):
    """How often calls woke members of a service in this term, and how often in the time that it names."""

    times: int = 0
    within: int = 0


#: what a member without calls does: it ends, and the next call starts another one; it sleeps; or it stays awake
Rung = Literal["ends", "sleeps", "stays"]


class Swaps:
    """The last swap of each service, by the number of its job."""

    def __init__(self) -> None:
        self._last: dict[int, Swap] = {}
        self._cold: dict[int, tuple[int, int]] = {}  # how long a start took until calls were taken, and of which fence
        self._wakes: dict[int, Wakes] = {}
        self._out_mib_ms = OUT_MIB_MS
        self._in_mib_ms = IN_MIB_MS

    def of(self, num: int) -> Swap:
        """Return what a swap of a service takes; what was not measured follows from its size."""
        swap = self._last.get(num, Swap())
        out_ms = swap.out_ms or round(swap.mib / self._out_mib_ms)
        return Swap(swap.mib, out_ms, swap.in_ms or round(swap.mib / self._in_mib_ms))

    def has(self, num: int, mib: int) -> None:
        """A member has so much memory on its GPUs; 0 if that is not known. A measured swap takes as much longer.

        One with far less than its service had before loads its model.
        """
        last = self._last.get(num, Swap())
        if mib in (0, last.mib) or mib < TELLING_MIB <= last.mib:
            return
        if 0 < last.mib < TELLING_MIB <= mib:
            self._last[num] = Swap(mib)
        else:
            part = mib / last.mib if last.mib else 1
            self._last[num] = Swap(mib, round(last.out_ms * part), round(last.in_ms * part))

    def left(self, num: int, out_ms: int) -> None:
        """A member has left its GPUs within this time."""
        last = self._last[num] = self._last.get(num, Swap())._replace(out_ms=max(1, out_ms))
        if last.mib >= TELLING_MIB:
            self._out_mib_ms = max(last.mib / last.out_ms, OUT_MIB_MS / SLOWER_MAX)

    def came(self, num: int, in_ms: int) -> None:
        """A member has its memory back on its GPUs within this time."""
        last = self._last[num] = self._last.get(num, Swap())._replace(in_ms=max(1, in_ms))
        if last.mib >= TELLING_MIB:
            self._in_mib_ms = max(last.mib / last.in_ms, IN_MIB_MS / SLOWER_MAX)

    def started(self, num: int, fence: int, cold_ms: int) -> None:
        """A member was ready for calls for the first time within this time of its start."""
        if self._cold.get(num, (0, 0))[1] != fence:
            self._cold[num] = max(1, cold_ms), fence

    def woke(self, num: int, took_ms: int, within_ms: int) -> None:
        """A member that a call woke has its GPUs again so long after that call."""
        before = self._wakes.get(num, Wakes())
        self._wakes[num] = Wakes(before.times + 1, before.within + (took_ms <= within_ms))

    def wakes(self, num: int) -> Wakes:
        """Return how often calls woke members of a service."""
        return self._wakes.get(num, Wakes())

    def rung(self, num: int, within_ms: int, *, may_end: bool) -> Rung:
        """Return what a member without calls does that is to be awake within this time after the next one; 0 is any.

        What was not seen yet counts as quick enough for sleep, and not for a start.
        """
        cold_ms = self._cold.get(num, (0, 0))[0]
        if within_ms and may_end and 0 < cold_ms <= within_ms:
            return "ends"
        return "stays" if within_ms and self.of(num).in_ms > within_ms else "sleeps"

    def keep(self, nums: Container[int]) -> None:
        """Forget all jobs but these."""
        if any(num not in nums for num in self._last):
            self._last = {num: swap for num, swap in self._last.items() if num in nums}
        if any(num not in nums for num in (*self._cold, *self._wakes)):
            self._cold = {num: cold for num, cold in self._cold.items() if num in nums}
            self._wakes = {num: wakes for num, wakes in self._wakes.items() if num in nums}
