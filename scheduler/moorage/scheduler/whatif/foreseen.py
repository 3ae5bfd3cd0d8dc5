"""The answer of one copy of the leader to all waiting questions about the future: a forecast, and fixes for jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.whatif.fixes import fixes
from moorage.scheduler.whatif.forecast import Forecast, decode_forecast, forecast
from moorage.schemas.answers.jobs import Fix

#: for how long fixes are searched; jobs not reached by then get none
FIXES_S: Final = 2.0

JobName = tuple[str, str]  # tenant, job


class Fixes(msgspec.Struct, frozen=True, array_like=True):
    """Changes that would start a waiting job, and the reason for which it waits."""

    tenant: str
    job: str
    reason: str
    fixes: list[Fix]


class Foreseen(msgspec.Struct, frozen=True, array_like=True):
    forecast: Forecast | None
    fixes: list[Fixes]


decode_foreseen: Final = msgspec.msgpack.Decoder(Foreseen).decode


def foresee(engine: Engine, time_ms: int, jobs: Sequence[JobName], *, forecasts: bool) -> bytes:
    """Return an encoded `Foreseen` with fixes for these jobs, and a forecast if asked for. For a child.

    There is no entry for a job that does not wait or cannot be helped, or that is not reached within `FIXES_S`.
    """
    made = decode_forecast(forecast(engine, time_ms)) if forecasts else None
    found, ends_s = list[Fixes](), time.monotonic() + FIXES_S
    for tenant, job in jobs:
        if (within_s := ends_s - time.monotonic()) <= 0:
            break
        reason, told = fixes(engine, time_ms, tenant, job, within_s)
        if reason:
            found.append(Fixes(tenant, job, reason, told))
    return msgspec.msgpack.encode(Foreseen(made, found))
