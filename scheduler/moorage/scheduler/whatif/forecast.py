"""When those that wait will start: two looks ahead, by the medians and by the ninetieth percentiles of durations."""

from __future__ import annotations

from typing import Final

import msgspec

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.queueing.queue import REPLICA_BITS
from moorage.scheduler.whatif.child import ask
from moorage.scheduler.whatif.future import Future, Quantile, waits

#: jobs of the queue that one forecast is made for, the ones that came first; of more nothing is said
JOBS_MAX: Final = 2_000
#: of the look ahead that runs beside the other one
LIMIT_S: Final = 9.0


class Start(msgspec.Struct, frozen=True, array_like=True):
    """When a job starts: with even odds within `p50_ms`, nine times in ten within `p90_ms`; -1 is unknown. `runs` is
    how many runs the least known of the estimates rests on; 0: they are time limits and graces alone."""

    p50_ms: int
    p90_ms: int
    worker: str = ""
    runs: int = 0


class Forecast(msgspec.Struct, frozen=True, array_like=True):
    """As of ledger time `time_ms`; `starts` by tenant and job. `unknown_runs` end nobody knows when."""

    time_ms: int
    starts: dict[str, dict[str, Start]]
    unknown_runs: int = 0


encode_forecast: Final = msgspec.msgpack.Encoder().encode
decode_forecast: Final = msgspec.msgpack.Decoder(Forecast).decode


class _Look(msgspec.Struct, frozen=True, array_like=True):
    starts: list[tuple[str, str, int, str, int]]
    unknown: int


_decode_look: Final = msgspec.msgpack.Decoder(_Look).decode


def forecast(engine: Engine, time_ms: int) -> bytes:
    """A `Forecast`, encoded. Destroys the engine: for a child."""
    late = ask(lambda: _look(engine, time_ms, "p90"), LIMIT_S)
    soon = _decode_look(_look(engine, time_ms, "p50"))
    worst = {} if late is None else {(t, j): ms for t, j, ms, *_ in _decode_look(late).starts}
    starts: dict[str, dict[str, Start]] = {}
    for tenant, job, ms, worker, runs in soon.starts:
        p90 = worst.get((tenant, job), -1)
        # a later end of somebody may by chance be an earlier start of another: the band is in order all the same
        starts.setdefault(tenant, {})[job] = Start(ms, p90 if p90 < 0 else max(ms, p90), worker, runs)
    return encode_forecast(Forecast(time_ms, starts, soon.unknown))


def _look(engine: Engine, time_ms: int, quantile: Quantile) -> bytes:
    future = Future(engine, time_ms, quantile)
    waiting = _waiting(engine)
    for key in waiting:
        future.started.pop(key, None)
    left = set(waiting)

    def done() -> bool:
        left.difference_update(future.started)
        return not left

    future.pass_time(done)
    found = [(*key, *future.started[key]) for key in waiting if key in future.started]
    return msgspec.msgpack.encode(_Look(found, future.unknown))


def _waiting(engine: Engine) -> list[tuple[str, str]]:
    """The first jobs of the queue by number, that is by their coming."""
    nums = sorted({item >> REPLICA_BITS for line in engine.queue.lines.values() for item in line.entries})
    found = []
    for num in nums[:JOBS_MAX]:
        job = engine.state.jobs.get(num)
        if job is not None and waits(job):
            found.append((job.tenant, job.name))
    return found
