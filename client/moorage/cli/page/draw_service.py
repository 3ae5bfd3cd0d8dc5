"""The page of a service: is it well and since when, who answers now, and its calls over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from moorage.cli.framework.render import utc
from moorage.cli.page.draw_series import of_service
from moorage.cli.page.templates import Part, part
from moorage.client.durations import age
from moorage.schemas.answers.jobs import ServiceRow
from moorage.schemas.frames import ServiceLately
from moorage.schemas.service import CALL_MS
from moorage.schemas.waited import SeriesAnswer

#: a service fails while this part of its calls does
FAILING: Final = 0.01
#: steps of which nothing is known that end what was before them: a new leader hears members within a minute
UNKNOWN_MAX: Final = 2


class ServiceDetail(NamedTuple):
    """What is known of a service: its numbers over the span that is shown, and over an hour, a day and a month.

    `lately` is what the leader's frame has of it now, `row` what its own tenant is answered.
    """

    shown: SeriesAnswer
    spans: Sequence[SeriesAnswer]
    lately: ServiceLately | None
    row: ServiceRow | None


def service(tenant: str, name: str, detail: ServiceDetail, span: str) -> list[Part]:
    """Return the page of a service."""
    charts = of_service(detail.shown, span, ("service", tenant, name))
    return [_verdict(tenant, name, detail), charts]


def _verdict(tenant: str, name: str, detail: ServiceDetail) -> Part:
    now, use = detail.lately, detail.row.use if detail.row is not None else None
    if now is not None and now.members:
        state = "fails" if now.errors >= max(1, FAILING * now.calls) else "well"
    else:
        state = "away"
    since_ms = None
    for told in detail.spans:
        begin_ms = _since(state, told)
        since_ms = begin_ms if begin_ms is not None else since_ms
        if begin_ms is None or begin_ms > told.from_ms + told.step_ms:
            break
    facts: list[tuple[str, Any]] = []
    if now is not None:
        facts = [
            ("members", f"{now.members}, with {now.places} places: {now.running} in use, {now.waiting} calls wait"),
            ("last minute", f"{now.calls} calls, {now.errors} of them failed"),
            ("nine of ten", f"waited at most {_ms(now.waited_ms)}, ran at most {_ms(now.ran_ms)}" if now.calls else ""),
        ]
    job = now.job if now is not None and now.job else detail.row.job if detail.row is not None else ""
    if use is not None:
        errors = ", ".join(f"{code} {number}" for code, number in sorted(use.errors.items(), key=lambda each: -each[1]))
        facts += [("errors", errors), ("last error", use.last_error)]
    until_ms = detail.spans[0].until_ms
    return part(
        "service",
        "verdict",
        name=name,
        state=state,
        since=utc(since_ms)[:16].replace("T", " ") if since_ms is not None else "",
        lasted=age(until_ms - since_ms) if since_ms is not None and until_ms > since_ms else "",
        percent=f"{100 * now.errors / now.calls:.0f}" if now is not None and now.calls else "",
        tenant=tenant,
        job=job,
        facts=facts,
    )


def _ms(ms: int | None) -> str:
    return f"over {age(CALL_MS[-1])}" if ms is None else f"{ms} ms"


def _since(state: str, told: SeriesAnswer) -> int | None:
    """Return the begin of the newest steps that are all in this state, ms since 1970; None if the newest is not."""
    rows = {name.rpartition("/")[2]: row for name, row in told.series.items()}
    members, calls, errors = (rows.get(what, []) for what in ("members", "calls", "errors"))
    since_ms, unknown = None, 0
    for at in reversed(range(len(members))):
        found = _state(members, calls, errors, at)
        if found is None:
            unknown += 1
            if unknown > UNKNOWN_MAX and since_ms is not None:
                break
        elif found == state:
            since_ms, unknown = told.from_ms + at * told.step_ms, 0
        else:
            break
    return since_ms


def _state(
    members: Sequence[float | None], calls: Sequence[float | None], errors: Sequence[float | None], at: int
) -> str | None:
    if members[at] is None:
        return None
    failed, of = (errors[at] or 0), (calls[at] or 0)
    if failed and failed >= FAILING * of:
        return "fails"
    return "well" if members[at] else "away"
