"""Numbers over a day, a week and a month, as charts: SVG that is made here needs no library, and prints as it is.

Each chart has a table of its means and peaks beside it: what a picture says, words say, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from moorage.cli.framework.render import utc
from moorage.cli.page.draw_waits import COLOURS, OTHER
from moorage.cli.page.templates import Part, colours, link, part
from moorage.client.durations import age
from moorage.schemas.waited import MEANS, SeriesAnswer

#: how far back a page may look
SPANS: Final = {"1h": 3_600, "1d": 86_400, "7d": 7 * 86_400, "31d": 31 * 86_400}
#: layers of a stacked chart; the smallest others are one
LAYERS_MAX: Final = 8
#: size of a chart's own units, and marks of time
WIDE: Final = 1000
HIGH: Final = 220
MARKS: Final = 6
OTHERS: Final = "(others)"
MIB_IN_GIB: Final = 1024

Row = Sequence[float | None]


def past(told: SeriesAnswer, span: str, *, whole: bool) -> list[Part]:
    """Return the charts of the fleet; of a tenant (not `whole`) its own GPUs and what of it waited."""
    told = _known(told)
    rows = told.series
    charts = []
    if whole:
        bands = [
            ("GPUs there", rows.get("fleet//gpus", []), "s-there"),
            ("granted", rows.get("fleet//granted", []), "s-granted"),
            ("used", rows.get("fleet//used", []), "s-used"),
        ]
        charts.append(_chart("gpus", "GPUs there, granted, used", told, bands, stacked=False))
        causes = {name.split("/")[1]: row for name, row in rows.items() if name.startswith("cause/")}
        layers = [
            (f"{cause}: {MEANS.get(cause, '')}" if cause in MEANS else cause, row, COLOURS.get(cause, OTHER))
            for cause, row in _largest(causes)
        ]
        charts.append(_chart("waiting", "Replicas that waited, by cause", told, layers, stacked=True))
        waits = [
            ("nine of ten waited at most", rows.get("fleet//wait_p90", []), "s-granted"),
            ("half waited at most", rows.get("fleet//wait_p50", []), "s-used"),
        ]
        charts.append(_chart("waits", "How long jobs that started had waited", told, waits, stacked=False, unit="s"))
    tenants = {
        what: {name.split("/")[1]: row for name, row in rows.items() if _is(name, "tenant", what)}
        for what in ("granted", "waiting")
    }
    of = colours({name for each in tenants.values() for name in each} | {OTHERS})
    for what, title in (("granted", "GPUs granted, by tenant"), ("waiting", "Replicas that waited, by tenant")):
        layers = [(name, row, of.get(name, OTHER)) for name, row in _largest(tenants[what])]
        charts.append(_chart(f"tenants-{what}", title, told, layers, stacked=True))
    spans = [{"span": each, "at": link("past", span=each)} for each in SPANS if each != span]
    return [part("past", "past", charts=charts, span=span, spans=spans, step=age(told.step_ms), left_out=told.left_out)]


def of_host(told: SeriesAnswer) -> Part:
    """Return the chart of a host over a day."""
    told = _known(told)
    rows = {name.rpartition("/")[2]: row for name, row in told.series.items()}
    bands = [("granted", rows.get("granted", []), "s-granted"), ("used", rows.get("used", []), "s-used")]
    mib = [None if value is None else value / MIB_IN_GIB for value in rows.get("memory_mib", [])]
    charts = [
        _chart("host-gpus", "GPUs granted and used", told, bands, stacked=False),
        _chart("host-memory", "GPU memory used, GiB", told, [("memory", mib, "s-used")], stacked=False),
    ]
    return part("past", "host", charts=charts if told.series else [], step=age(told.step_ms))


def _known(told: SeriesAnswer) -> SeriesAnswer:
    """Return the answer from the first step on of which anything is known: a young fleet fills its charts."""
    firsts = [next((at for at, value in enumerate(row) if value is not None), len(row)) for row in told.series.values()]
    first = min(firsts, default=0)
    series = {name: row[first:] for name, row in told.series.items()}
    return msgspec.structs.replace(told, from_ms=told.from_ms + first * told.step_ms, series=series)


def _is(name: str, of: str, what: str) -> bool:
    return name.startswith(f"{of}/") and name.endswith(f"/{what}")


def _largest(rows: Mapping[str, Row]) -> list[tuple[str, Row]]:
    """Return the layers with the largest sums, the largest first, and the others as one; none that is all zero."""
    order = sorted(rows.items(), key=lambda row: -sum(value or 0 for value in row[1]))
    found = [(name, row) for name, row in order if any(row)]
    if len(found) <= LAYERS_MAX:
        return found
    rest = [row for _, row in found[LAYERS_MAX - 1 :]]
    joined = [
        None if all(value is None for value in at) else sum(value or 0 for value in at)
        for at in zip(*rest, strict=False)
    ]
    return [*found[: LAYERS_MAX - 1], (OTHERS, joined)]


def _chart(
    name: str,
    title: str,
    told: SeriesAnswer,
    layers: Sequence[tuple[str, Row, str]],
    *,
    stacked: bool,
    unit: str = "",
) -> dict[str, Any]:
    """Return a chart: layers over each other (`stacked`), or bands before each other, the largest behind."""
    count = max((len(row) for _, row, _ in layers), default=0)
    base = [0.0] * count
    tops: list[list[float | None]] = []
    for _, row, _ in layers:
        top = [
            None if value is None else (base[at] + value if stacked else value)
            for at, value in enumerate([*row, *[None] * (count - len(row))])
        ]
        tops.append(top)
        if stacked:
            base = [base[at] if value is None else value for at, value in enumerate(top)]
    most = max((value for top in tops for value in top if value is not None), default=0) or 1
    shown = []
    below = [0.0] * count
    for (label, row, kind), top in zip(layers, tops, strict=True):
        known = [value for value in row if value is not None]
        shown.append(
            {
                "label": label, "kind": kind, "path": _area(top, below, most),
                "mean": _number(sum(known) / len(known), unit) if known else "-",
                "most": _number(max(known), unit) if known else "-",
                "now": _number(known[-1], unit) if known else "-",
            }
        )  # fmt: skip
        if stacked:
            below = [below[at] if value is None else value for at, value in enumerate(top)]
    until_ms = told.from_ms + count * told.step_ms
    marks = [
        {"x": round(WIDE * at / MARKS), "words": _when(told.from_ms + (until_ms - told.from_ms) * at // MARKS, told)}
        for at in range(MARKS)
    ]
    is_known = any(each["path"] for each in shown)
    return {
        "name": name, "title": title, "layers": shown, "most": _number(most, unit) if is_known else "-", "marks": marks,
        "wide": WIDE, "high": HIGH, "known": is_known,
    }  # fmt: skip


def _area(top: Row, below: Sequence[float], most: float) -> str:
    """Return the path of an area between two lines; what is unknown is left open."""
    count, path = len(top), []
    at = 0
    while at < count:
        if top[at] is None:
            at += 1
            continue
        end = at
        while end < count and top[end] is not None:
            end += 1
        upper = [_point(each, top[each] or 0, count, most) for each in range(at, end)]
        lower = [_point(each, below[each], count, most) for each in reversed(range(at, end))]
        last = f"{WIDE * end / count:.1f},"
        path.append(
            f"M{'L'.join(upper)}L{last}{upper[-1].partition(',')[2]}L{last}{lower[0].partition(',')[2]}L{'L'.join(lower)}Z"
        )
        at = end
    return "".join(path)


def _point(at: int, value: float, count: int, most: float) -> str:
    return f"{WIDE * at / count:.1f},{HIGH - HIGH * value / most:.1f}"


def _number(value: float, unit: str) -> str:
    if unit == "s":
        return age(int(value * 1000))
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _when(ms: int, told: SeriesAnswer) -> str:
    return utc(ms)[11:16] if told.until_ms - told.from_ms <= 86_400_000 * 1.1 else utc(ms)[5:10]
