"""Find jobs and leases that have GPUs and do not use them, from the readings for load frames.

Which jobs are frozen for that is in freezing/unused.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import OTHERS
from moorage.worker.devices.readers.base import FREE_TOLERANCE_MIB, SlotReading
from moorage.worker.session.attempt_messages import Attempt, IdleSeen

#: if two readings are further apart, the use between them is unknown
PAUSE_S_MAX: Final = 120.0

K = TypeVar("K", bound=Hashable)


class Idle(NamedTuple):
    """`seconds` without use so far; with `ends` they have reached what the operator allows, `ends_s` (0: no limit)."""

    seconds: int
    ends_s: int
    ends: bool


class _Still:
    """Since when something shows no use, with the memory of its devices then."""

    def __init__(self, now_s: float, memory_mib: list[int]) -> None:
        self.since_s = now_s
        self.memory_mib = memory_mib
        self.warned = 0  # how many multiples of `warn_s` have been reported
        self.ended = False


class IdleWatch(Generic[K]):
    """Finds the holders whose devices show no use, to warn about them or to end them.

    `warn_s` are the seconds between warnings, 0 for none. `reclaim_s` are the seconds after which a holder is to end,
    by tenant, with `*` for every other tenant; 0 or no entry: never. A device shows use if its compute, encoder or
    decoder worked since the reading before (`SlotReading.shows_use`), or when its memory has changed since it went
    idle. A holder is never idle while one of its devices shows use, does not report its utilization, or does not
    answer.
    """

    def __init__(self, warn_s: float, reclaim_s: Mapping[str, int]) -> None:
        self._warn_s = warn_s
        self._reclaim_s = reclaim_s
        self._still: dict[K, _Still] = {}
        self._read_s = 0.0

    def read(
        self, holders: Mapping[K, tuple[str, Sequence[int]]], readings: Sequence[SlotReading], now_s: float
    ) -> dict[K, Idle]:
        """Handle a reading of each slot, and return the holders to warn about or to end. `now_s` is in seconds.

        `holders` have their devices alone; each has its tenant and slots. A holder is returned after each `warn_s`
        without use, once when it is to end, and not again after that.
        """
        paused = now_s - self._read_s > PAUSE_S_MAX
        self._read_s = now_s
        still: dict[K, _Still] = {}
        found: dict[K, Idle] = {}
        for key, (tenant, slots) in holders.items():
            seen = [readings[slot] for slot in slots]
            if not seen or any(each.shows_use for each in seen):
                continue
            memory_mib = [each.memory_used_mib for each in seen]
            since = self._still.get(key)
            if since is None or paused or _moved(since.memory_mib, memory_mib):
                since = _Still(now_s, memory_mib)
            still[key] = since
            if (idle := self._judged(since, int(now_s - since.since_s), tenant)) is not None:
                found[key] = idle
        self._still = still
        return found

    def _judged(self, still: _Still, seconds: int, tenant: str) -> Idle | None:
        ends_s = self._reclaim_s.get(tenant, self._reclaim_s.get(OTHERS, 0))
        if ends_s and seconds >= ends_s:
            if still.ended:
                return None
            still.ended = True
            return Idle(seconds, ends_s, True)
        warned = int(seconds // self._warn_s) if self._warn_s else 0
        if warned <= still.warned:
            return None
        still.warned = warned
        return Idle(seconds, ends_s, False)


def _moved(before: Sequence[int], now: Sequence[int]) -> bool:
    """Return whether a device's memory changed by more than a driver's own bookkeeping."""
    return any(abs(was - is_) > FREE_TOLERANCE_MIB for was, is_ in zip(before, now, strict=True))


class IdleJobs:
    """The attempts of one worker that have their devices alone; `held` are all of its attempts."""

    def __init__(self, held: Mapping[AttemptName, Attempt], warn_s: float, reclaim_s: Mapping[str, int]) -> None:
        self._held = held
        self._watch = IdleWatch[AttemptName](warn_s, reclaim_s)

    def read(self, readings: Sequence[SlotReading], now_s: float) -> IdleSeen | None:
        """Handle a reading of each slot. Return the attempts to warn about or to end; None if there are none."""
        alone = {
            name: (attempt.tenant, attempt.slots)
            for name, attempt in self._held.items()
            if attempt.place.mode == "exclusive" and attempt.phase == "running" and not attempt.frozen
        }
        found = self._watch.read(alone, readings, now_s)
        return IdleSeen([(name, *idle) for name, idle in found.items()]) if found else None
