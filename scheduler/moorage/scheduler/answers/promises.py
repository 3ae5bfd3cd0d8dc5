"""Promises waiting jobs by when they start, and scores what came of it.

A promise is one time: nine of ten such jobs are to start by then. It is the forecast's bound for nine of ten cases,
moved by what the last promises came to (one-sided conformal prediction): the score of a promise is the logarithm of its
wait, beside that of its bound, and the time is moved by the score within which nine of ten of the last `SCORES_MAX`
were. A promise that is missed counts the moment its time passes, as short waits would report first.

Promised are jobs that still wait after `AFTER_MS`, at most one a second; all others that wait for long are counted as
not told. The counts begin in each term; the scores begin with the promises that are in memory.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import Final, Protocol

from moorage.scheduler.answers.waited import OTHERS, TENANTS_MAX
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Promising
from moorage.scheduler.core.ledger.records import by_tenant
from moorage.scheduler.core.ledger.state import AT_MS, BY, CHANGED, HELD, PRIORITY, RUNNING, STATE, Job
from moorage.schemas.answers.operators import PromiseRow, PromisesAnswer

#: jobs that wait for so long are promised a start, those that wait longer than `LATE_MS` are not
AFTER_MS: Final = 10_000
LATE_MS: Final = 70_000
#: at most one promise in so many ms
EACH_MS: Final = 1_000
#: promises are whole times of so many ms: a job that ends at its limit is gone, and the next one starts, a little later
ROUND_MS: Final = 10_000
#: a forecast that is older is none
FORECAST_MS: Final = 30_000
#: waits below a minute are alike, and are not scored
ALIKE_MS: Final = 60_000
#: in how many of a hundred cases a promise is to be kept
ASKED_PERCENT: Final = 90
#: by how many of the last promises, and with fewer than how many none is moved
SCORES_MAX: Final = 100
SCORES_MIN: Final = 20
#: remembered: scores, jobs that may be promised a start, and promises that are open
KEPT_MAX: Final = 2_000
CANDIDATES_MAX: Final = 10_000
OPEN_MAX: Final = 10_000
#: one part in so many of a CPU's time may go into forecasts for promises, and at most one is asked for in so many ms
FORECAST_SHARE: Final = 20
FORECAST_EACH_MS: Final = 5_000
#: what a tenant does to its job makes a promise void
_OWN: Final = frozenset((CHANGED, HELD, PRIORITY))


class Start(Protocol):
    """When a job starts, as a forecast has it."""

    @property
    def p50_ms(self) -> int: ...
    @property
    def p90_ms(self) -> int: ...
    @property
    def runs(self) -> int: ...


class Foreseen(Protocol):
    """A forecast: as of when, what it cost, and the starts by tenant and job."""

    @property
    def time_ms(self) -> int: ...
    @property
    def cpu_ms(self) -> int: ...
    def start(self, tenant: str, job: str) -> Start | None: ...


class Promises:
    """The promises of a term, and the scores of those that are over."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next_num = engine.state.next_num
        self._candidates: deque[tuple[int, int]] = deque()  # accepted at, job
        self._open: dict[int, Job] = {}
        self._late: set[int] = set()  # of those: the time has passed
        self._scores: OrderedDict[int, tuple[str, bool, float]] = OrderedDict()  # by job: tenant, sweep, score
        self._counts: dict[str, list[int]] = {}  # by tenant: kept, missed, void, not told
        self._promised_ms = 0
        self._wanted_ms = 0

    def begin(self) -> None:
        """Begin with the promises that the term found in memory."""
        for job in self._engine.state.jobs.values():
            if job.promised is None:
                continue
            started_ms = next((row[AT_MS] for row in job.history if row[STATE] == RUNNING), None)
            if started_ms is not None:
                self._score(job, started_ms)
            elif not job.over and not job.started:
                self._open[job.num] = job

    # ------------------------------------------------------------------------------------------- promising

    def look(self, now_ms: int) -> None:
        """Follow the jobs that came, and count promises whose time has passed."""
        state = self._engine.state
        for num in range(max(self._next_num, state.next_num - CANDIDATES_MAX), state.next_num):
            job = state.jobs.get(num)
            if job is not None and not job.started and not job.over:
                self._candidates.append((job.may_start_ms, num))
        self._next_num = state.next_num
        while len(self._candidates) > CANDIDATES_MAX:
            self._candidates.popleft()
        for num, job in list(self._open.items()):
            promise = job.promised
            if promise is None:  # its record was not written, or not yet
                if job.started or job.over:
                    del self._open[num]
            elif job.over and not job.started:
                del self._open[num]
                if num not in self._late:
                    self._count(job.tenant, 2)
            elif now_ms > promise.by_ms and num not in self._late and not job.started and not _is_void(job):
                self._late.add(num)
                self._count(job.tenant, 1)
                self._score(job, now_ms)
        self._late &= self._open.keys()

    def choose(self, forecast: Foreseen | None, now_ms: int) -> Promising | None:
        """Return the promise to make now: to the job that has waited longest of those that the forecast has."""
        if forecast is None or now_ms - forecast.time_ms > FORECAST_MS or now_ms - self._promised_ms < EACH_MS:
            return None
        left = deque[tuple[int, int]]()
        found: Promising | None = None
        while self._candidates and found is None:
            since_ms, num = self._candidates.popleft()
            job = self._engine.state.jobs.get(num)
            if job is None or job.over or job.started or job.promised is not None or now_ms - since_ms > LATE_MS:
                continue
            if now_ms - since_ms < AFTER_MS:
                left.append((since_ms, num))
                break
            start = forecast.start(job.tenant, job.name)
            if start is None or start.p90_ms < 0 or len(self._open) >= OPEN_MAX:
                left.append((since_ms, num))  # perhaps the next one has it
                continue
            passed_ms = max(0, now_ms - forecast.time_ms)
            p50_ms, p90_ms = max(0, start.p50_ms - passed_ms), max(0, start.p90_ms - passed_ms)
            by_ms = -(-(now_ms + self.within_ms(job.tenant, p90_ms, is_sweep=_is_sweep(job))) // ROUND_MS) * ROUND_MS
            found = Promising(num, by_ms, p50_ms, p90_ms, start.runs)
            self._open[num] = job
            self._promised_ms = now_ms
        self._candidates.extendleft(reversed(left))
        return found

    def wants(self, forecast: Foreseen | None, now_ms: int) -> bool:
        """Return whether to make a forecast for the sake of a job that may be promised a start."""
        jobs = self._engine.state.jobs
        while self._candidates and (
            now_ms - self._candidates[0][0] > LATE_MS
            or (job := jobs.get(self._candidates[0][1])) is None
            or job.over
            or job.started
        ):
            self._candidates.popleft()
        if not self._candidates or now_ms - self._candidates[0][0] < AFTER_MS:
            return False
        if now_ms - self._wanted_ms < FORECAST_EACH_MS:
            return False
        if forecast is not None and now_ms - forecast.time_ms < max(FORECAST_EACH_MS, FORECAST_SHARE * forecast.cpu_ms):
            return False
        self._wanted_ms = now_ms
        return True

    def within_ms(self, tenant: str, p90_ms: int, *, is_sweep: bool = False) -> int:
        """Return within how many ms nine of ten such jobs start whose forecast has this bound."""
        scores = self._of(tenant, is_sweep)
        if len(scores) < SCORES_MIN:
            return p90_ms
        at = min(math.ceil(ASKED_PERCENT / 100 * (len(scores) + 1)), len(scores)) - 1
        return max(0, round((p90_ms + ALIKE_MS) * math.exp(sorted(scores)[at])) - ALIKE_MS)

    def _of(self, tenant: str, is_sweep: bool) -> list[float]:
        """Return the last scores of such jobs: of this tenant once there are enough, else of all."""
        alike = [(whose, score) for whose, swept, score in self._scores.values() if swept == is_sweep]
        own = [score for whose, score in alike if whose == tenant]
        found = own if len(own) >= SCORES_MAX else [score for _, score in alike]
        return found[-SCORES_MAX:]

    # --------------------------------------------------------------------------------------------- scoring

    def started(self, job: Job, now_ms: int) -> None:
        """Score a job's first start."""
        was_open = self._open.pop(job.num, None) is not None
        waited_ms = now_ms - job.may_start_ms
        if job.promised is None or not was_open:
            if waited_ms >= ALIKE_MS:
                self._count(job.tenant, 3)
            return
        is_late = job.num in self._late
        self._late.discard(job.num)
        if not is_late and _is_void(job):
            self._count(job.tenant, 2)
        elif is_late or waited_ms >= ALIKE_MS:
            if not is_late:
                self._count(job.tenant, int(now_ms > job.promised.by_ms))
            self._score(job, now_ms)

    def _score(self, job: Job, at_ms: int) -> None:
        promise = job.promised
        if promise is None or at_ms - job.may_start_ms < ALIKE_MS:
            return
        wait_ms = max(0, at_ms - promise.told_ms)
        score = math.log(wait_ms + ALIKE_MS) - math.log(promise.p90_ms + ALIKE_MS)
        self._scores[job.num] = job.tenant, _is_sweep(job), score
        if len(self._scores) > KEPT_MAX:
            self._scores.popitem(last=False)

    def _count(self, tenant: str, what: int) -> None:
        name = tenant if tenant in self._counts or len(self._counts) < TENANTS_MAX else OTHERS
        self._counts.setdefault(name, [0, 0, 0, 0])[what] += 1

    @property
    def sums(self) -> tuple[int, int, int]:
        """How many were kept and missed in this term, and how many long waits had none."""
        rows = list(self._counts.values())
        return sum(row[0] for row in rows), sum(row[1] for row in rows), sum(row[3] for row in rows)

    @property
    def rows(self) -> list[PromiseRow]:
        """What became of promises in this term, by tenant."""
        return [
            PromiseRow(tenant=tenant, kept=kept, missed=missed, void=void, not_told=not_told)
            for tenant, (kept, missed, void, not_told) in sorted(self._counts.items())
        ]

    def answer(self, tenant: str | None) -> PromisesAnswer:
        """Return the row of a tenant, or all rows."""
        return PromisesAnswer(rows=[row for row in self.rows if tenant in (None, row.tenant)])


def _is_sweep(job: Job) -> bool:
    return job.size > 1 and not job.gang


def _is_void(job: Job) -> bool:
    """Return whether its tenant has changed or held it since."""
    who = by_tenant(job.tenant)
    promise = job.promised
    return promise is not None and any(
        row[AT_MS] >= promise.told_ms and row[STATE] in _OWN and str(row[BY]).startswith(who) for row in job.history
    )
