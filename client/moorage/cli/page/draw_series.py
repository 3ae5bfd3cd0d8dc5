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
from moorage.schemas.waited import ASKED, MEANS, SeriesAnswer
from moorage.schemas.where import POOL

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
HOUR_MS: Final = 3_600_000
#: tenants that the summary names
WAITED_MAX: Final = 5
#: models with a chart of their own
POOLS_MAX: Final = 6
#: what comes before the name of what a job reported
REPORTED: Final = "reported:"
#: units of time, in ms
MS_OF: Final = {"s": 1000, "ms": 1}

Row = Sequence[float | None]


def past(told: SeriesAnswer, span: str, tenant: str = "") -> list[Part]:
    """Return the charts of the fleet, or of a tenant: its GPUs, what of it waited, and for how long."""
    told = _known(told)
    rows = told.series
    charts = []
    if not tenant:
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
        charts += _pools(told)
    charts.append(_waits(told, f"tenant/{tenant}" if tenant else "fleet/"))
    tenants = {
        what: {name.split("/")[1]: row for name, row in rows.items() if _is(name, "tenant", what)}
        for what in ("granted", "waiting")
    }
    of = colours({name for each in tenants.values() for name in each} | {OTHERS})
    for what, title in (("granted", "GPUs granted, by tenant"), ("waiting", "Replicas that waited, by tenant")):
        layers = [(name, row, of.get(name, OTHER)) for name, row in _largest(tenants[what])]
        charts.append(_chart(f"tenants-{what}", title, told, layers, stacked=True))
    spans = [{"span": each, "at": link("past", span=each, tenant=tenant)} for each in SPANS if each != span]
    return [
        _summary(told, tenant),
        part("past", "past", charts=charts, span=span, spans=spans, step=_step(told), left_out=told.left_out),
    ]


def _summary(told: SeriesAnswer, tenant: str) -> Part:
    """Return what the charts say, in a sentence each: was the fleet used well, and whom did it keep waiting."""
    rows = told.series
    there, granted, used = (_mean(rows.get(f"fleet//{what}", [])) for what in ("gpus", "granted", "used"))
    is_used_known = any(value is not None for value in rows.get("fleet//used", []))
    names = {name.split("/")[1] for name in rows if name.startswith("tenant/")}
    waits: list[tuple[str, float, float, float | None]] = []  # tenant, hours, mean, seconds
    for name in names:
        waiting, p90 = rows.get(f"tenant/{name}/waiting", []), rows.get(f"tenant/{name}/wait_p90", [])
        whole = sum(value or 0 for value in waiting) * told.step_ms
        most = max((value for value in p90 if value is not None), default=None)
        if whole or most:
            waits.append((name, whole / HOUR_MS, _mean(waiting), most))
    waits.sort(key=lambda row: -row[1])
    of_causes = [(name.split("/")[1], row) for name, row in rows.items() if name.startswith("cause/")]
    causes = [(name, row) for name, row in of_causes if name not in ASKED]
    cause = max(causes, key=lambda row: sum(value or 0 for value in row[1]), default=("", []))
    return part(
        "past",
        "summary",
        tenant=tenant,
        there=f"{there:.3g}",
        granted=f"{100 * granted / there:.0f}" if there else "",
        used=f"{100 * used / there:.0f}" if there and is_used_known else "",
        of_granted=f"{100 * used / granted:.0f}" if granted and is_used_known else "",
        waits=[
            {
                "tenant": name, "hours": _number(hours, ""), "mean": _number(mean, ""),
                "p90": "-" if p90 is None else _number(p90, "s"),
            }
            for name, hours, mean, p90 in waits[:WAITED_MAX]
        ],
        more=len(waits) - WAITED_MAX,
        cause=MEANS.get(cause[0], cause[0]) if any(cause[1]) else "",
    )  # fmt: skip


def _waits(told: SeriesAnswer, of: str) -> dict[str, Any]:
    bands = [
        ("nine of ten waited at most", told.series.get(f"{of}/wait_p90", []), "s-granted"),
        ("half waited at most", told.series.get(f"{of}/wait_p50", []), "s-used"),
    ]
    return _chart("waits", "How long jobs that started had waited", told, bands, stacked=False, unit="s")


def _pools(told: SeriesAnswer) -> list[dict[str, Any]]:
    """Return a chart for each model of GPUs, where there are several, and for each label `pool` of hosts: those with
    most GPUs first."""
    pools = [name.split("/")[1] for name in told.series if _is(name, "pool", "gpus")]
    named = [pool for pool in pools if pool.startswith(f"{POOL}=")]
    models = [pool for pool in pools if pool not in named]
    found: list[dict[str, Any]] = []
    for of in (models if len(models) > 1 else [], named):
        for pool in sorted(of, key=lambda each: -_mean(told.series[f"pool/{each}/gpus"]))[:POOLS_MAX]:
            bands = [
                (words, told.series.get(f"pool/{pool}/{what}", []), f"s-{kind}")
                for what, words, kind in (
                    ("gpus", "GPUs there", "there"), ("granted", "granted", "granted"), ("used", "used", "used"),
                )
            ]  # fmt: skip
            title = pool.replace(f"{POOL}=", "Pool ", 1) if of is named else pool or "model not known"
            found.append(_chart(f"pool-{len(found)}", title, told, bands, stacked=False))
    return found


def _mean(row: Row) -> float:
    known = [value for value in row if value is not None]
    return sum(known) / len(known) if known else 0.0


def of_host(told: SeriesAnswer) -> Part:
    """Return the charts of a host over a day."""
    told = _known(told)
    rows = _by_what(told)
    bands = [("granted", rows.get("granted", []), "s-granted"), ("used", rows.get("used", []), "s-used")]
    mib = [None if value is None else value / MIB_IN_GIB for value in rows.get("memory_mib", [])]
    charts = [
        _chart("host-gpus", "GPUs granted and used", told, bands, stacked=False),
        _chart("host-memory", "GPU memory used, GiB", told, [("memory", mib, "s-used")], stacked=False),
        _chart(
            "host-heat", "Its hottest GPU, °C", told, [("heat", rows.get("temperature_c", []), "s-line")], line=True
        ),
    ]
    return part(
        "past", "charts", name="host", charts=charts if told.series else [], words="the last day", step=_step(told)
    )


def of_job(told: SeriesAnswer) -> Part:
    """Return the charts of a job over its life: use of its GPUs, their memory, and what it reported of itself."""
    rows = _by_what(told)
    charts = []
    if any(value is not None for value in rows.get("used", [])):
        mib = [None if value is None else value / MIB_IN_GIB for value in rows.get("memory_mib", [])]
        charts = [
            _chart("job-used", "Use of its GPUs, %", told, [("mean of its GPUs", rows["used"], "s-used")], most=100),
            _chart("job-memory", "GPU memory used, GiB", told, [("memory", mib, "s-used")]),
        ]
    for what, row in rows.items():
        if what.startswith(REPORTED):
            name = what.removeprefix(REPORTED)
            charts.append(_chart(f"job-{len(charts)}", name, told, [(name, row, "s-line")], line=True))
    return part("past", "charts", name="life", charts=charts, words="over its life", step=_step(told))


def of_service(told: SeriesAnswer, span: str, at: Sequence[str]) -> Part:
    """Return the charts of a service; `at` are the pieces of its address."""
    told = _known(told)
    rows = _by_what(told)

    def bands(*names: tuple[str, str, str]) -> list[tuple[str, Row, str]]:
        return [(words, rows.get(what, []), kind) for what, words, kind in names]

    calls = bands(("calls", "calls a second", "s-granted"), ("errors", "of them failed", "s-bad"))
    ran = bands(("ran_p95", "19 of 20 calls ran at most", "s-granted"), ("ran_p50", "half ran at most", "s-used"))
    waited = bands(("waited_p95", "19 of 20 calls waited at most", "s-granted"))
    members = bands(("members", "members", "s-granted"), ("running", "calls that run", "s-used"))
    charts = [
        _chart("calls", "Calls a second", told, calls),
        _chart("ran", "How long calls ran", told, ran, unit="ms"),
        _chart("waited", "How long calls waited for a place", told, waited, unit="ms"),
        _chart("members", "Members, and calls that run", told, members),
    ]
    if any((value or 0) > 1 for value in rows.get("batch", [])):
        charts.append(_chart("batch", "Calls a batch", told, bands(("batch", "calls a batch", "s-granted"))))
    spans = [{"span": each, "at": link(*at, span=each)} for each in SPANS if each != span]
    return part("past", "past", charts=charts, span=span, spans=spans, step=_step(told), left_out=told.left_out)


def _by_what(told: SeriesAnswer) -> dict[str, Row]:
    """Return the rows of one host, job or service by what they tell; a name that was reported may have a slash."""
    return {
        REPORTED + name.partition(f"/{REPORTED}")[2] if f"/{REPORTED}" in name else name.rpartition("/")[2]: row
        for name, row in told.series.items()
    }


def _step(told: SeriesAnswer) -> str:
    return age(told.step_ms) if told.series else ""


def is_known(told: SeriesAnswer) -> bool:
    """Return whether there is any number."""
    return any(value is not None for row in told.series.values() for value in row)


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
    stacked: bool = False,
    line: bool = False,
    most: float = 0,
    unit: str = "",
) -> dict[str, Any]:
    """Return a chart: layers over each other (`stacked`), or bands before each other, the largest behind; or a `line`
    between the least and the most. Others begin at zero, and end at `most`, if it is given."""
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
    values = [value for top in tops for value in top if value is not None]
    least = min(values, default=0.0) if line else 0.0
    told_most = most = most or max(values, default=0)
    if line and most == least:
        least, most = least - 1, most + 1
        told_most = most
    most = most or 1  # a chart of zeros has a height, too
    shown = []
    below = [0.0] * count
    for (label, row, kind), top in zip(layers, tops, strict=True):
        known = [value for value in row if value is not None]
        shown.append(
            {
                "label": label, "kind": kind, "path": _line(top, least, most) if line else _area(top, below, most),
                "mean": _number(sum(known) / len(known), unit) if known else "-",
                "least": _number(min(known), unit) if known else "-",
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
    known_any = any(each["path"] for each in shown)
    return {
        "name": name, "title": title, "layers": shown, "marks": marks,
        "most": _number(told_most, unit) if known_any else "",
        "wide": WIDE, "high": HIGH, "known": known_any, "least": _number(least, unit) if line else "",
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


def _line(row: Row, least: float, most: float) -> str:
    """Return the path of a line, broken where nothing is known."""
    count, path, before = len(row), [], False
    for at, value in enumerate(row):
        if value is not None:
            point = _point(at, value - least, count, most - least)
            path.append(f"{'L' if before else 'M'}{point}")
            if at + 1 == count or row[at + 1] is None:
                path.append(f"h{WIDE / count:.1f}")
        before = value is not None
    return "".join(path)


def _point(at: int, value: float, count: int, most: float) -> str:
    return f"{WIDE * at / count:.1f},{HIGH - HIGH * value / most:.1f}"


def _number(value: float, unit: str) -> str:
    if unit in MS_OF:
        return age(int(value * MS_OF[unit])) if value * MS_OF[unit] >= 1000 else f"{value * MS_OF[unit]:.0f} ms"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _when(ms: int, told: SeriesAnswer) -> str:
    return utc(ms)[11:16] if told.until_ms - told.from_ms <= 86_400_000 * 1.1 else utc(ms)[5:10]
