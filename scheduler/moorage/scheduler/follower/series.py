"""The fleet over a day and a month: numbers at fixed steps, folded from the ledger. Pure: no I/O, no clock.

A sample is what stood at the end of a step. Each series has two rings: 10 s for a day and 5 min for 31 days; those of
hosts have a minute for a day and an hour for 31 days. What is coarser is the mean of what is finer. Only what GPUs do
is not in the ledger: the leader tells it (`told_use`), and what nobody told is unknown.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.state import State
from moorage.schemas.errors import Problem, problem
from moorage.schemas.waited import Cause, SeriesAnswer

DAY_MS: Final = 86_400_000
KEPT_MS: Final = 31 * DAY_MS
#: ms of a step, of the last day and of the days before
STEPS: Final = (10_000, 300_000)
STEPS_HOST: Final = (60_000, 3_600_000)
#: what GPUs do is unknown once the leader has not told it for so long
USE_MS: Final = 30_000
#: series that are kept; those of hosts are counted apart. Further tenants and hosts have none, which an answer says
SERIES_MAX: Final = 500
HOST_SERIES_MAX: Final = 3_000
#: points of an answer, and waits of one step whose quantiles are taken
POINTS_MAX: Final = 288
WAITS_MAX: Final = 4_096
UNKNOWN: Final = math.nan
_NEXT: Final = "moorage usage --help"

#: what it is of (`fleet`, `cause`, `tenant`, `host`), which one, and what
Name = tuple[str, str, str]


class Ring:
    """Numbers at fixed steps of ledger time; those older than its span are gone."""

    __slots__ = ("last", "step_ms", "values")

    def __init__(self, step_ms: int, span_ms: int) -> None:
        self.step_ms = step_ms
        self.values: array[float] = array("f", (UNKNOWN,)) * (span_ms // step_ms)
        self.last = -1  # the step of the newest number; negative: none

    def put(self, step: int, value: float) -> None:
        size = len(self.values)
        for gone in range(max(self.last + 1, step - size + 1), step):
            self.values[gone % size] = UNKNOWN
        self.values[step % size] = value
        self.last = step

    def at(self, step: int) -> float:
        return self.values[step % len(self.values)] if self.last - len(self.values) < step <= self.last else UNKNOWN


class Series:
    """A number over time: fine for a day, its means for a month."""

    __slots__ = ("coarse", "count", "fine", "sum")

    def __init__(self, steps: tuple[int, int]) -> None:
        self.fine, self.coarse = Ring(steps[0], DAY_MS), Ring(steps[1], KEPT_MS)
        self.sum, self.count = 0.0, 0

    def put(self, at_ms: int, value: float) -> None:
        step, wide = at_ms // self.fine.step_ms, at_ms // self.coarse.step_ms
        if self.fine.last >= 0 and self.fine.last * self.fine.step_ms // self.coarse.step_ms != wide:
            self.sum, self.count = 0.0, 0
        self.fine.put(step, value)
        if not math.isnan(value):
            self.sum, self.count = self.sum + value, self.count + 1
            self.coarse.put(wide, self.sum / self.count)

    def over(self, from_ms: int, until_ms: int, points: int) -> tuple[int, list[float | None]]:
        """Return the ms of a step, and the numbers of the steps from the first to the last; None for an unknown one."""
        ring = self.fine if until_ms - from_ms <= DAY_MS else self.coarse
        first, last = from_ms // ring.step_ms, until_ms // ring.step_ms
        each = max(1, -(-(last - first) // points))
        found: list[float | None] = []
        for at in range(first // each * each, last, each):
            known = [value for step in range(at, at + each) if not math.isnan(value := ring.at(step))]
            found.append(round(sum(known) / len(known), 3) if known else None)
        return each * ring.step_ms, found


class _SavedSeries(msgspec.Struct, array_like=True):
    name: Name
    fine: bytes
    fine_last: int
    coarse: bytes
    coarse_last: int
    sum: float
    count: int


class _Saved(msgspec.Struct, array_like=True):
    series: list[_SavedSeries]
    at_ms: int
    left_out: int


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Saved).decode


class AllSeries:
    """All series up to the record at which `state` stands; `state` is folded by the caller."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._series: dict[Name, Series] = {}
        self._at_ms = state.time_ms
        self._used: dict[str, tuple[float, float]] = {}  # by host: GPUs' worth at work, and MiB that are used
        self._used_ms = 0
        self._waited: deque[int] = deque(maxlen=WAITS_MAX)  # ms, of jobs that began in this step
        self._begun = {num for num, job in state.jobs.items() if job.started}
        self.left_out = 0

    def told_use(self, used: Mapping[str, Iterable[float]], at_ms: int) -> None:
        """Note what the GPUs of hosts do, as the leader has heard it: GPUs' worth at work, MiB that are used."""
        self._used = {name: (row[0], row[1]) for name, each in used.items() if len(row := list(each)) == 2}
        self._used_ms = at_ms

    def fold(self, folded: Folded, waiting: Iterable[tuple[str, str, int]]) -> None:
        """Follow a record; `waiting` has tenant, cause and number of what waits, and is read at the end of a step."""
        state = self._state
        for job in folded.jobs.values():
            if job.started and job.num not in self._begun:
                self._begun.add(job.num)
                self._waited.append(state.time_ms - job.may_start_ms)
        for job in folded.compacted:
            self._begun.discard(job.num)
        step_ms = STEPS[0]
        if state.time_ms // step_ms != self._at_ms // step_ms:
            self._sample(state.time_ms // step_ms * step_ms - step_ms, waiting)
        self._at_ms = state.time_ms

    def _sample(self, at_ms: int, waiting: Iterable[tuple[str, str, int]]) -> None:
        """Put what stands into the step that begins at `at_ms`."""
        known, is_minute = at_ms - self._used_ms <= USE_MS, at_ms % STEPS_HOST[0] == 0
        there = granted = 0
        used = 0.0
        for worker in self._state.worker_by_num.values():
            leased = 0
            for attempt in worker.attempts.values():
                leased |= attempt.mask
            has = len(worker.hello.get("gpu_pool", ())) if worker.session else 0
            there, granted = there + has, granted + leased.bit_count()
            at_work, mib = self._used.get(worker.id, (UNKNOWN, UNKNOWN)) if known else (UNKNOWN, UNKNOWN)
            used += 0 if math.isnan(at_work) else at_work
            if is_minute and worker.session:
                for what, value in (("granted", leased.bit_count()), ("used", at_work), ("memory_mib", mib)):
                    self._put(("host", worker.id, what), at_ms, value, STEPS_HOST)
        self._put(("fleet", "", "gpus"), at_ms, there)
        self._put(("fleet", "", "granted"), at_ms, granted)
        self._put(("fleet", "", "used"), at_ms, used if known else UNKNOWN)
        causes, tenants = Counter[str](), Counter[str]()
        own = Counter[tuple[str, str]]()
        for tenant, cause, units in waiting:
            if cause != Cause.STARTING:
                causes[cause] += units
                tenants[tenant] += units
                own[tenant, cause] += units
        self._put(("fleet", "", "waiting"), at_ms, causes.total())
        for cause in {*causes, *(name for of, name, _ in self._series if of == "cause")}:
            self._put(("cause", cause, "waiting"), at_ms, causes[cause])
        for row in self._state.tenants.values():
            if row.gpus or tenants[row.name] or ("tenant", row.name, "granted") in self._series:
                self._put(("tenant", row.name, "granted"), at_ms, row.gpus)
                self._put(("tenant", row.name, "waiting"), at_ms, tenants[row.name])
        if at_ms // STEPS[1] != (at_ms + STEPS[0]) // STEPS[1]:  # the last of five minutes
            waits = sorted(self._waited)
            for name, part in (("wait_p50", 0.5), ("wait_p90", 0.9)):
                value = waits[min(len(waits) - 1, int(part * len(waits)))] / 1000 if waits else UNKNOWN
                for back in range(STEPS[1] // STEPS[0]):
                    self._put(("fleet", "", name), at_ms - STEPS[1] + (back + 1) * STEPS[0], value)
            self._waited.clear()

    def _put(self, name: Name, at_ms: int, value: float, steps: tuple[int, int] = STEPS) -> None:
        series = self._series.get(name)
        if series is None:
            of_hosts = sum(of == "host" for of, _, _ in self._series)
            most = HOST_SERIES_MAX if name[0] == "host" else SERIES_MAX
            if (of_hosts if name[0] == "host" else len(self._series) - of_hosts) >= most and not self._make_room(name):
                self.left_out += 1
                return
            series = self._series[name] = Series(steps)
        series.put(at_ms, value)

    def _make_room(self, name: Name) -> bool:
        """Forget one series that had no number for a day; return whether there was one."""
        for known, series in self._series.items():
            old = self._at_ms - series.fine.last * series.fine.step_ms > DAY_MS
            if old and (known[0] == "host") == (name[0] == "host"):
                del self._series[known]
                return True
        return False

    def bridge(self, state: State) -> None:
        """Go on from a later state; the steps in between are unknown."""
        self._state = state
        self._at_ms = state.time_ms
        self._begun = {num for num, job in state.jobs.items() if job.started}
        self._waited.clear()

    # ----------------------------------------------------------------------------------------------- saves

    def dump(self) -> bytes:
        """Return all series, as msgpack."""
        rows = [
            _SavedSeries(
                name, zlib.compress(each.fine.values.tobytes(), 1), each.fine.last,
                zlib.compress(each.coarse.values.tobytes(), 1), each.coarse.last, each.sum, each.count,
            )
            for name, each in self._series.items()
        ]  # fmt: skip
        return _encode(_Saved(rows, self._at_ms, self.left_out))

    @classmethod
    def load(cls, saved: bytes, state: State) -> AllSeries:
        """Return the series of a save. Raises ValueError, zlib.error or msgspec's errors for other bytes."""
        found = cls(state)
        if not saved:
            return found
        told = _decode(saved)
        found._at_ms, found.left_out = told.at_ms, told.left_out
        for row in told.series:
            series = Series(STEPS_HOST if row.name[0] == "host" else STEPS)
            for ring, values, last in (
                (series.fine, row.fine, row.fine_last),
                (series.coarse, row.coarse, row.coarse_last),
            ):
                numbers = array("f", zlib.decompress(values))
                if len(numbers) != len(ring.values):
                    raise ValueError(f"{len(numbers)} numbers of {row.name} are not {len(ring.values)}")
                ring.values, ring.last = numbers, last
            series.sum, series.count = row.sum, row.count
            found._series[row.name] = series
        return found

    # ------------------------------------------------------------------------------------------- questions

    def answer(self, tenant: str | None, arguments: dict[str, Any]) -> dict[str, Any] | Problem:
        """Return the series of the fleet, or with `worker` of a host; a tenant gets its own alone.

        `since_s` (a day without it) is at most 31 days; beyond a day the steps are coarser.
        """
        since_s, host = arguments.get("since_s"), arguments.get("worker")
        since_s = DAY_MS / 1000 if since_s is None else since_s
        if isinstance(since_s, bool) or not isinstance(since_s, int | float) or not 60 <= since_s <= KEPT_MS / 1000:
            said = f"since_s of series must be a number of seconds, 60..{KEPT_MS // 1000}"
            return problem("invalid-argument", said, field="$.since_s", found=since_s, next=_NEXT)
        until_ms = self._state.time_ms
        from_ms = max(0, until_ms - int(since_s * 1000))
        if tenant is not None:
            wanted = [name for name in self._series if name[:2] == ("tenant", tenant)]
        elif host is not None:
            wanted = [name for name in self._series if name[:2] == ("host", host)]
        else:
            wanted = [name for name in self._series if name[0] != "host"]
        answer = SeriesAnswer(from_ms=from_ms, until_ms=until_ms, left_out=self.left_out > 0)
        for name in sorted(wanted):
            answer.step_ms, answer.series["/".join(name)] = self._series[name].over(from_ms, until_ms, POINTS_MAX)
        if answer.step_ms:
            answer.from_ms = from_ms // answer.step_ms * answer.step_ms
        plain: dict[str, Any] = msgspec.to_builtins(answer)
        return plain
