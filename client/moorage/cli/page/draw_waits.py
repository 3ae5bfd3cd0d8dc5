"""Where waits went, as bars: of one job in its story, and of a fleet or a tenant by week and cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from moorage.cli.framework.render import utc
from moorage.cli.jobs.asked_rows import words
from moorage.cli.jobs.job_rows import code_cell, end_of
from moorage.cli.jobs.spent import part_words
from moorage.cli.page.templates import Part, part
from moorage.client.answers import JobInfo
from moorage.client.durations import age
from moorage.schemas.job import PLACED, QUEUED, TERMINAL
from moorage.schemas.names import word_of
from moorage.schemas.units import many
from moorage.schemas.waited import ASKED, MEANS, Cause, PlacedWhy, WaitedAnswer, WaitedRow

#: the class of a cause's colour in the style sheet: causes with one cure have one colour
COLOURS: Final[dict[str, str]] = {
    **dict.fromkeys((Cause.LIMIT,), "w-limit"),
    **dict.fromkeys((Cause.FULL,), "w-full"),
    **dict.fromkeys((Cause.PRIORITY, Cause.GUARANTEE, Cause.SHARE, Cause.OWN), "w-passed"),
    **dict.fromkeys((Cause.RESERVED,), "w-reserved"),
    **dict.fromkeys((Cause.FRAGMENTED,), "w-fragmented"),
    **dict.fromkeys((Cause.CLOSED, Cause.NO_HOST, Cause.AWAY), "w-closed"),
    **dict.fromkeys(ASKED, "w-asked"),
}
OTHER: Final = "w-other"
#: weeks that are shown
WEEKS_MAX: Final = 8
_HOUR_S: Final = 3600


def story(shown: JobInfo, told: WaitedAnswer) -> Part:
    """Return a job's story: submitted, waited and why, placed where and why there, how it ended; commands to paste."""
    parts = told.parts
    whole = sum(each.ms for each in parts)
    places = [change for change in shown.changes if change.state == PLACED]
    last = places[-1] if places else None
    ended = shown.state in TERMINAL
    facts = [
        ("command", words(shown.run.get("argv", ()))),
        ("again of", shown.asked.get("again_of") or ""),
        ("service", (shown.asked.get("service") or {}).get("name", "")),
    ]
    return part(
        "story",
        "story",
        shown=shown,
        submitted=utc(shown.accepted_ms) if shown.accepted_ms else "",
        waited=age(whole) if whole >= 1000 else "",
        of=_of_replicas(shown),
        pieces_of=stack([(each.cause, each.ms, part_words(each)) for each in parts], age),
        waits=shown.state == QUEUED,
        placed=None
        if last is None
        else {
            "worker": last.worker,
            "at": utc(last.time_ms),
            "gpus": last.gpus,
            "times": len(places),
            "why": "" if told.placed is None else _why_there(told.placed),
            "is_all": shown.changes[0].rev == 1,
        },
        end=" ".join(filter(None, (f"code {code_cell(shown.code)}" if shown.code is not None else "",
                                   end_of(shown)))) if ended else "",
        ended=utc(shown.ended_ms) if ended and shown.ended_ms else "",
        facts=[each for each in facts if each[1]],
        again=list(shown.again),
        commands=_commands(shown),
    )  # fmt: skip


def _why_there(placed: PlacedWhy) -> str:
    others = f", placed with {many(placed.together - 1, 'other replica')}" if placed.together > 1 else ""
    return f"of {many(placed.workers, 'worker')} known; it kept {many(placed.free_left, 'GPU')} free{others}"


def _of_replicas(shown: JobInfo) -> str:
    is_gang = (shown.asked.get("gpu") or {}).get("scheduling") == "gang"
    return "" if is_gang or shown.replicas is None else f"all of its {many(shown.replicas.of, 'replica')} together"


def _commands(shown: JobInfo) -> list[str]:
    """Return what a person does next with a job in this state."""
    name = word_of(shown.job)
    if shown.state == QUEUED:
        return [f"moorage explain {name}", f"moorage cancel {name}"]
    if shown.state in TERMINAL:
        return [f"moorage logs {name}", f"moorage again {name}"]
    return [f"moorage logs {name} --follow", f"moorage use {name}", f"moorage cancel {name}"]


def stack(rows: Sequence[tuple[str, float, str]], amount: Any, most: float = 0) -> list[dict[str, Any]]:
    """Return the pieces of a stacked bar: of each cause its share of `most` in percent, or of the sum, beside its words
    and amount."""
    whole = most or sum(row[1] for row in rows) or 1
    found, x = [], 0.0
    for cause, size, said in rows:
        wide = 100 * size / whole
        found.append(
            {
                "kind": COLOURS.get(cause, OTHER), "x": f"{x:.2f}", "width": f"{wide:.2f}", "words": said,
                "amount": amount(size), "percent": f"{wide:.0f} %", "title": f"{said}: {amount(size)}",
            }
        )  # fmt: skip
        x += wide
    return found


def waits(rows: Sequence[WaitedRow], from_ms: int) -> list[Part]:
    """Return where waits went, a bar a week: in hours of replicas, and of the GPUs that they asked for."""
    weeks = sorted({row.week_ms or 0 for row in rows}, reverse=True)[:WEEKS_MAX]
    most = max((sum(row.wait_s for row in rows if row.week_ms == week) for week in weeks), default=0) or 1
    most_gpus = max((sum(row.gpu_s for row in rows if row.week_ms == week) for week in weeks), default=0) or 1
    shown = []
    for week in weeks:
        of = sorted((row for row in rows if row.week_ms == week), key=lambda row: -row.wait_s)
        for unit, full in (("wait_s", most), ("gpu_s", most_gpus)):
            whole = sum(getattr(row, unit) for row in of)
            pieces = stack([(row.cause or "", getattr(row, unit), _means(row)) for row in of], _hours, full)
            shown.append(
                {
                    "week": utc(week).split("T")[0] if unit == "wait_s" else "",
                    "unit": "replicas" if unit == "wait_s" else "GPUs",
                    "hours": _hours(whole),
                    "pieces": [each for each in pieces if float(each["width"]) > 0],
                }
            )
    causes: dict[str, list[float]] = {}
    for row in rows:
        sums = causes.setdefault(row.cause or "", [0, 0, 0])
        for at, value in enumerate((row.wait_s, row.gpu_s, row.jobs)):
            sums[at] += value
    table = [
        {
            "kind": COLOURS.get(cause, OTHER), "cause": cause, "means": MEANS.get(cause, ""), "hours": _hours(wait_s),
            "gpu_hours": _hours(gpu_s), "jobs": f"{jobs:.0f}",
        }
        for cause, (wait_s, gpu_s, jobs) in sorted(causes.items(), key=lambda row: -row[1][0])
    ]  # fmt: skip
    return [part("usage", "waits", weeks=shown, causes=table, from_ms=from_ms)]


def _means(row: WaitedRow) -> str:
    return f"{row.cause}: {MEANS.get(row.cause or '', '')}"


def _hours(seconds: float) -> str:
    return f"{seconds / _HOUR_S:.2f} h"
