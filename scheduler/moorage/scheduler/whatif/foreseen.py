"""What one copy of the leader answers to all the questions that came while it had none: a forecast, and fixes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.whatif.fixes import fixes
from moorage.scheduler.whatif.forecast import Forecast, decode_forecast, forecast

#: how long fixes are looked for; the jobs behind those get none
FIXES_S: Final = 3.0

JobName = tuple[str, str]  # tenant, job


class Fixes(msgspec.Struct, frozen=True, array_like=True):
    """What would start a job that waits for a reason."""

    tenant: str
    job: str
    reason: str
    fixes: list[dict[str, Any]]


class Foreseen(msgspec.Struct, frozen=True, array_like=True):
    forecast: Forecast | None
    fixes: list[Fixes]


decode_foreseen: Final = msgspec.msgpack.Decoder(Foreseen).decode


def foresee(engine: Engine, time_ms: int, jobs: Sequence[JobName], *, forecasts: bool) -> bytes:
    """Return a `Foreseen`, encoded, with the fixes of these jobs, and with a forecast if asked for. For a child."""
    made = decode_forecast(forecast(engine, time_ms)) if forecasts else None
    found, ends_s = list[Fixes](), time.monotonic() + FIXES_S
    for tenant, job in jobs:
        if time.monotonic() >= ends_s:
            break
        reason, told = fixes(engine, time_ms, tenant, job)
        if reason:
            found.append(Fixes(tenant, job, reason, told))
    return msgspec.msgpack.encode(Foreseen(made, found))
