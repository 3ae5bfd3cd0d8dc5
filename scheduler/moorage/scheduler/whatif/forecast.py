"""Forecasts when waiting jobs will start, and when those of several replicas will end, from simulated futures (looks).

A forecast is a median, with the interval for eight of ten cases.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Final

import msgspec

from moorage.scheduler.answers.view import View
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.whatif.child import ask_all
from moorage.scheduler.whatif.future import Began, Future, last_of, waits
from moorage.scheduler.whatif.looks import LOOKS, Band, Outcome, band
from moorage.scheduler.whatif.play import Held
from moorage.schemas.answers import jobs

#: The looks do not know the jobs to come, nor that all runs of the next hours may be shorter or longer than those
#: before. So an interval that rests on earlier runs begins earlier and ends later than the looks, by these parts.
#: `bench.forecasts` measures how many starts are within it.
EARLIER: Final = 0.6
LATER: Final = 1.5
#: the same where jobs of several tenants wait: of those to come, the ones of tenants that are owed more go before
LATER_SHARED: Final = 3.0
#: the looks draw from the runs that are known: with fewer of them the interval would be of those, not of all such runs
RUNS_SURE: Final = 20
#: only the first jobs in the queue are forecast
JOBS_MAX: Final = 2_000
#: of all looks together. A client waits for 10 s, perhaps for the end of an earlier copy first, and then for its fixes
LIMIT_S: Final = 4.0


class Start(msgspec.Struct, frozen=True, array_like=True):
    """When a job starts or ends, in ms from the forecast's time, as `looks.Band`, widened where it rests on runs.

    With fewer than `RUNS_SURE` runs there is the median alone, except where time limits bound it.

    `worker` is where the job starts in the median look. `runs` is the number of runs behind the least certain estimate;
    0 if only time limits and graces are involved.
    """

    p10_ms: int
    p50_ms: int
    p90_ms: int
    worker: str = ""
    runs: int = 0

    def as_answer(self, passed_ms: int = 0) -> jobs.Start:
        """Return it as answers have it, `passed_ms` after the forecast: without the times that are unknown."""
        p50_ms = max(0, self.p50_ms - passed_ms)
        return jobs.Start(
            p10_ms=max(0, self.p10_ms - passed_ms) if self.p10_ms >= 0 else None,
            p50_ms=p50_ms,
            p90_ms=max(p50_ms, self.p90_ms - passed_ms) if self.p90_ms >= 0 else None,
            runs=self.runs,
        )


def later_of(engine: Engine) -> float:
    """Return by which part an interval that rests on earlier runs ends later than the looks."""
    return LATER_SHARED if engine.planner.order.is_shared() else LATER


def start_of(found: Band, worker: str, runs: int, later: float) -> Start:
    """Return what the looks say together, and how sure that is; `runs` is as in `Start`, `later` by `later_of`."""
    p10_ms, p50_ms, p90_ms, _ = found
    if runs and p10_ms >= 0:
        is_sure = runs >= RUNS_SURE
        p10_ms, p90_ms = (int(EARLIER * p10_ms), int(later * p90_ms)) if is_sure else (-1, -1)
    return Start(p10_ms, p50_ms, p90_ms, worker, runs)


class Forecast(msgspec.Struct, frozen=True, array_like=True):
    """The forecast as of ledger time `time_ms`; `starts` by tenant and job, without jobs whose start is unknown.

    `ends` is when jobs of several replicas end, those of them that could be simulated so far.
    `late` says, by tenant and job, why a job ends before it would start, if it does in more than half of the looks.
    `unknown_runs` running jobs have an unknown end, as have `unknown_starts` of those that start in the first look.
    `cut` if more jobs wait than were simulated, or a look reached a limit. `cpu_ms` is the CPU time that it took.
    """

    time_ms: int
    starts: dict[str, dict[str, Start]]
    unknown_runs: int = 0
    unknown_starts: int = 0
    cut: bool = False
    cpu_ms: int = 0
    late: dict[str, dict[str, str]] = {}
    ends: dict[str, dict[str, Start]] = {}

    def start(self, tenant: str, job: str) -> Start | None:
        """Return when a job starts; None if that is unknown."""
        return self.starts.get(tenant, {}).get(job)


encode_forecast: Final = msgspec.msgpack.Encoder().encode
decode_forecast: Final = msgspec.msgpack.Decoder(Forecast).decode


class _Look(msgspec.Struct, frozen=True, array_like=True):
    starts: list[tuple[str, str, Began]]
    ends: list[tuple[str, str, Began]]
    unknown_runs: int
    unknown_starts: int
    cut: bool
    late: list[tuple[str, str, str]]


_decode_look: Final = msgspec.msgpack.Decoder(_Look).decode


def forecast(
    engine: Engine, time_ms: int, jobs: Sequence[tuple[str, str]] | None = None, limit_s: float = LIMIT_S
) -> bytes:
    """Return an encoded `Forecast` from `LOOKS` simulated futures, or those of them that ended in time. For a child.

    It is of `jobs`, by tenant and name; of the first `JOBS_MAX` in the queue without. The looks take at most `limit_s`
    seconds together. If fewer than half have ended by then, as on a busy machine, the forecast is empty and `cut`.
    """
    answers = ask_all([partial(_look, engine, time_ms, look, jobs) for look in range(LOOKS)], limit_s)
    looks = [_decode_look(answer) for answer in answers if answer is not None]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_ms = int(1000 * (used.ru_utime + used.ru_stime))
    if len(looks) <= LOOKS // 2:
        return encode_forecast(Forecast(time_ms, {}, cut=True, cpu_ms=cpu_ms))
    later = later_of(engine)
    starts, ends = (_together(rows, later) for rows in ([x.starts for x in looks], [x.ends for x in looks]))
    late: dict[str, dict[str, str]] = {}
    for (tenant, job, why), count in Counter(row for look in looks for row in look.late).items():
        if count > len(looks) // 2:
            late.setdefault(tenant, {})[job] = why
    first = looks[0]
    unknown = first.unknown_runs, first.unknown_starts
    return encode_forecast(Forecast(time_ms, starts, *unknown, first.cut, cpu_ms, late, ends))


def _together(looks: Iterable[list[tuple[str, str, Began]]], later: float) -> dict[str, dict[str, Start]]:
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    for tenant, job, at in chain.from_iterable(looks):
        outcomes.setdefault((tenant, job), []).append(Outcome(at.in_ms, (at.worker, at.runs), at.limited))
    together: dict[str, dict[str, Start]] = {}
    for (tenant, job), found in outcomes.items():
        if (looks_say := band(found)) is not None:
            together.setdefault(tenant, {})[job] = start_of(looks_say, *looks_say.detail, later)
    return together


class _Queue(Future):
    """A look that knows which of the jobs in question have not started, and which have not ended."""

    def __init__(self, engine: Engine, time_ms: int, look: int) -> None:
        self.unstarted: set[tuple[str, str]] = set()
        self.unended: set[tuple[str, str]] = set()
        super().__init__(engine, time_ms, look)

    def on_started(self, held: Held) -> None:
        super().on_started(held)
        self.unstarted.discard(held.name[:2])

    def on_outputs(self, out: Outputs) -> None:
        super().on_outputs(out)
        for job in out.ended:
            self.unstarted.discard((job.tenant, job.name))
            self.unended.discard((job.tenant, job.name))


def _look(engine: Engine, time_ms: int, look: int, asked: Sequence[tuple[str, str]] | None) -> bytes:
    """Return an encoded `_Look`. Uses up the engine."""
    future = _Queue(engine, time_ms, look)
    waiting, more = (asked, False) if asked is not None else _waiting(engine)
    for key in waiting:
        future.started.pop(key, None)
    future.unstarted = set(waiting)
    jobs = {key: engine.state.job(*key) for key in waiting}
    last = {key: last_of(engine, job) for key, job in jobs.items() if job is not None}
    future.pass_time(lambda: not future.unstarted)
    late = [
        (*key, found.why) for key, found in last.items() if key not in future.started and found.at_ms <= future.time_ms
    ]
    found = [(*key, future.started[key]) for key in waiting if key in future.started]
    unknown, cut = (len(future.unknown_runs), len(future.unknown_starts)), more or future.cut
    sweeps = {key for key, job in jobs.items() if job is not None and job.size > 1 and key in future.started}
    future.unended = sweeps - future.ended.keys()
    future.pass_time(lambda: not future.unended)
    over = [(*key, future.ended[key]) for key in waiting if key in sweeps and key in future.ended]
    return msgspec.msgpack.encode(_Look(found, over, *unknown, cut, late))


def _waiting(engine: Engine) -> tuple[list[tuple[str, str]], bool]:
    """Return tenant and name of the first `JOBS_MAX` jobs of the queue by arrival, and whether there are more."""
    nums = View(engine).queued_jobs()
    found = []
    for num in nums[:JOBS_MAX]:
        job = engine.state.jobs.get(num)
        if job is not None and waits(job):
            found.append((job.tenant, job.name))
    return found, len(nums) > JOBS_MAX
