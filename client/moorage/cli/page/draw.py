"""Draws the pages: a `View`, lanes and the leader's answers in, parts of HTML out. It sends no questions."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

from moorage.cli.framework.render import utc
from moorage.cli.jobs.explain import explained_rows, fix_lines
from moorage.cli.jobs.job_rows import after_rows, code_cell, ended_by_itself, why_cell
from moorage.cli.jobs.replica_words import shown_words
from moorage.cli.jobs.use import use_cell
from moorage.cli.page.html import Html, Part, join, part, tag, text
from moorage.cli.top.draw import about, fit_words, matches
from moorage.client.durations import age, seconds
from moorage.client.view.bars import Bar, bars
from moorage.client.view.lanes import Lanes
from moorage.client.view.model import SILENT_MS, is_leased
from moorage.client.view.view import Trouble, View, Waiting, WorkerCells
from moorage.schemas.answers.operators import UsageRow
from moorage.schemas.cells import STATES as SIGNS
from moorage.schemas.frames import Device, Load
from moorage.schemas.job import TERMINAL
from moorage.schemas.units import many

#: troubles on one page, rows of a table, bars of a job, GPUs in lanes
TROUBLES_MAX: Final = 30
WAITING_FIRST: Final = 5
ROWS_MAX: Final = 200
BARS_MAX: Final = 64
LANES_MAX: Final = 128
#: how far back lanes may go
SPANS: Final = ("5m", "15m", "1h")
#: a GPU in the map, and how many of them stand in one row
_CELL: Final = 16
_HIGH: Final = 20
_IN_ROW: Final = 8
_HOUR_S: Final = 3600
_GONE: Final = frozenset({"lost", "stale", "not-heard", "left"})
_OPEN: Final = frozenset({"up", "claimed-locally"})
LEGEND: Final = (
    "a cell is a GPU: filled from below by use; amber: leased and unused; 2-9 sharers; ! sick; x used by others;"
    " f frozen; - not lent; ? lost"
)
OUTPUT_IS_ITS: Final = "output is the tenant's"


class Tab(NamedTuple):
    """A page in the bar at the top. `private` ones are not shown to an observer's key."""

    path: str
    name: str
    private: bool


TABS: Final = (
    Tab("/", "Fleet", private=False),
    Tab("/queue", "Queue", private=True),
    Tab("/lanes", "Time", private=True),
    Tab("/usage", "Usage", private=True),
)

NOTHING: Final = Html("")
_HATCH: Final = Html(
    '<svg width="0" height="0" aria-hidden="true"><pattern id="hatch" width="5" height="5"'
    ' patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2.5" height="5" fill="#fff" fill-opacity=".75"/></pattern></svg>'
)


def link(*path: str, **query: str) -> str:
    """Return the address of a page of this server."""
    asked = urlencode({name: value for name, value in query.items() if value})
    return "/" + "/".join(quote(each, safe="") for each in path) + (f"?{asked}" if asked else "")


def document(at: str, parts: Iterable[Part], *, title: str, private: bool, fixed: Html = NOTHING) -> Html:
    """Return a whole page: the bar, the parts, and what is `fixed` above them, which keeps what was typed into it."""
    own = list(parts)
    head = next(each for each in own if each.id == "head")
    tabs = join(
        tag("a", tab.name, href=tab.path, aria_current="page" if tab.path == at else None)
        for tab in TABS
        if private or not tab.private
    )
    body = join(
        [
            tag("header", tag("b", "moorage"), tag("nav", tabs), tag("span", head.html, id="head")),
            _HATCH,
            tag(
                "main",
                fixed,
                *(tag("div", each.html, id=each.id) for each in own if not each.inside and each.id != "head"),
            ),
            tag("script", src="/static/page.js"),
        ]
    )
    meta = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        '<link rel="stylesheet" href="/static/page.css">'
    )
    return Html(f"{meta}{tag('title', title)}</head>{tag('body', body)}</html>")


def head(view: View, trouble: str = "") -> Part:
    """Return what stands at the top of every page: whether GPUs are simulated, who leads, and what this is as of."""
    words = [f"leader {view.leader or 'unknown'}", f"epoch {view.epoch}"] if view.sees_fleet else []
    sim = {"all": "sim: all GPUs are simulated", "some": "sim: some GPUs are simulated"}.get(view.simulated)
    shown = [tag("span", sim, class_="sim"), Html(" ")] if sim else []
    if view.past:
        words = ["as it was at", utc(view.at_ms)[:10]]
    if trouble:
        shown += [tag("b", trouble, class_="trouble"), Html(" ")]
    return part("head", join([*shown, "  ".join([*words, f"{utc(view.at_ms)[11:19]} UTC"])]))


# ------------------------------------------------------------------------------------------------------- the fleet


def fleet(view: View, wanted: str = "") -> list[Part]:
    """Return the fleet: what is wrong, what fits now, a block a host with a cell a GPU, who holds without using."""
    parts = [_verdict(view)]
    if not view.sees_fleet:
        return parts
    workers = [worker for worker in view.workers if worker.state != "left" and matches(about(worker), wanted)]
    waits = view.waiting[:WAITING_FIRST]
    if waits:
        all_ = tag("a", "all", href=link("queue"))
        title = tag("h2", "Waits", tag("small", f"{_waits_words(view, view.waiting)}  ", all_))
        parts.append(part("waits", tag("div", title, _waiting(waits), class_="card")))
    parts += [_numbers(view), *_map(view, workers), _unused(view)]
    return parts


def _verdict(view: View) -> Part:
    notes = [tag("p", f"not shown: {what}", class_="dim") for what in view.unseen]
    if view.past:
        told = f"Ended in the hour before: {view.ended_words}."
        told += " What was wrong then, and how GPUs were used, was not kept."
        return part("verdict", tag("div", told, class_="card"))
    if view.sees_fleet and view.heard_ms_ago is None and not view.troubles:
        return part("verdict", tag("div", "waiting for the first frame of the leader", class_="card"))
    if not view.troubles:
        calm = [tag("b", "Nothing is wrong.")] if view.sees_fleet else []
        return part("verdict", tag("div", *calm, *notes, class_="card well", data_troubles=0))
    grave = sum(trouble.grave for trouble in view.troubles)
    more = len(view.troubles) - TROUBLES_MAX
    hosts = {worker.worker for worker in view.workers}
    rows = [_trouble(trouble, hosts) for trouble in view.troubles[:TROUBLES_MAX]]
    rows += [tag("li", f"and {more} more", class_="dim")] if more > 0 else []
    title = tag(
        "h2",
        f"{many(len(view.troubles), 'thing')} wrong",
        tag("small", f"{grave} keep{'s' if grave == 1 else ''} jobs from running" if grave else ""),
    )
    kind = "grave" if grave else "ill"
    return part(
        "verdict", tag("div", title, tag("ul", *rows), *notes, class_=f"card {kind}", data_troubles=len(view.troubles))
    )


def _trouble(trouble: Trouble, hosts: Collection[str]) -> Html:
    name, where = trouble.where.partition(" GPU ")[0], tag("b", trouble.where)
    if "/" in name:
        where = tag("a", where, href=link("job", *name.split("/", 1)))
    elif " jobs of " in name:
        where = tag("a", where, href=link("queue", tenant=name.rpartition(" ")[2]))
    elif name in hosts:
        where = tag("a", where, href=link("worker", name))
    return tag("li", where, f"  {trouble.what}", class_="grave" if trouble.grave else "ill")


def _numbers(view: View) -> Part:
    counts = view.counts
    shown = [("GPUs", counts.gpus), ("free", counts.free), ("leased", counts.leased)]
    shown += counts.odd()
    pieces = [tag("span", tag("b", number), name, data_count=name) for name, number in shown]
    if view.use is not None:
        pieces.append(tag("span", tag("b", f"{view.use} %"), "used of what is leased"))
    pieces += [tag("span", tag("b", view.running), "running"), tag("span", tag("b", view.queued), "queued replicas")]
    fits = [tag("span", tag("b", most), free) for most, free in fit_words(view.fits)]
    return part(
        "numbers",
        tag(
            "div",
            tag("div", *pieces, class_="numbers"),
            tag("h2", "Fits now", tag("small", "the most that one job gets on one host")),
            tag("div", *fits, class_="numbers"),
            class_="card",
        ),
    )


def _map(view: View, workers: Sequence[WorkerCells]) -> list[Part]:
    """Return the map; each host is a part inside it, so that a host that changed is all that is sent."""
    old = view.heard_ms_ago is None or view.heard_ms_ago > SILENT_MS
    order = sorted(workers, key=lambda worker: worker.model)
    groups = [(model, list(of)) for model, of in groupby(order, key=lambda worker: worker.model)]
    hosts = {worker.worker: Html(_host(worker)) for worker in order}
    blocks = []
    for model, of in groups:
        gpus = sum(len(each.cells) for each in of)
        blocks.append(tag("h2", model or "model not known", tag("small", f"{many(len(of), 'host')}, {gpus} GPUs")))
        blocks.append(
            tag("div", *(tag("div", hosts[each.worker], id=f"host-{each.worker}") for each in of), class_="hosts")
        )
    names = "" if blocks else "no host matches"
    whole = tag(
        "div",
        *(blocks or [tag("p", names, class_="dim")]),
        tag("p", LEGEND, class_="legend"),
        class_="old" if old else None,
    )
    key = json.dumps([old, [[model, [(each.worker, len(each.cells)) for each in of]] for model, of in groups]])
    return [
        Part("map", whole, key),
        *(Part(f"host-{name}", html, html, inside=True) for name, html in hosts.items()),
    ]


def _host(worker: WorkerCells) -> str:
    return _drawn_host(worker.worker, worker.state, worker.cells, tuple(worker.use))


@lru_cache(maxsize=8192)
def _drawn_host(name: str, state: str, cells: str, use: tuple[int | None, ...]) -> str:
    """Return the block of a host. A thousand of them change a few at a time, so those that did not are kept."""
    kind = "" if state in _OPEN else " gone" if state in _GONE else " shut"
    said = "" if state in _OPEN else tag("span", state, class_="state")
    return tag(
        "a",
        tag("span", tag("b", name), said, class_="name"),
        _cells(cells, use),
        href=link("worker", name),
        class_=f"host{kind}",
        data_worker=name,
        data_state=state,
        data_cells=cells,
    )


def _cells(cells: str, use: Sequence[int | None]) -> Html:
    rows = max(1, -(-len(cells) // _IN_ROW))
    wide, high = _IN_ROW * _CELL, rows * _HIGH
    said = f"{len(cells)} GPUs: {text(cells)}"
    drawn = "".join(_cell(at, sign, used) for at, (sign, used) in enumerate(zip(cells, use, strict=True)))
    return Html(f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{said}">{drawn}</svg>')


def _cell(at: int, sign: str, used: int | None) -> str:
    x, y = at % _IN_ROW * _CELL + 1, at // _IN_ROW * _HIGH + 1
    leased = is_leased(sign)
    state = SIGNS.get(sign, "shared")
    kind = "unused" if leased and used == 0 else state
    said = f"GPU {at}: {sign} jobs share it" if sign.isdigit() else f"GPU {at}: {state}"
    if leased:
        said += ", use not known" if used is None else f", used {used} %"
    shape = f'<g><title>{said}</title><rect class="c {kind}" x="{x}" y="{y}" width="13" height="17" rx="2"/>'
    if leased and used:
        tall = max(1, round(used * 0.17, 1))
        shape += f'<rect class="u" x="{x}" y="{y + 17 - tall:g}" width="13" height="{tall:g}" rx="1"/>'
    if sign not in "·#":
        shape += f'<text x="{x + 6.5}" y="{y + 12.5}">{text(sign)}</text>'
    elif leased and used == 0:
        shape += f'<text x="{x + 6.5}" y="{y + 12.5}">_</text>'
    return shape + "</g>"


def _unused(view: View) -> Part:
    if not view.idle:
        return part("unused", NOTHING)
    rows = [
        [
            _job(row.tenant, row.job) if row.job else tag("a", row.worker, href=link("worker", row.worker)),
            row.jobs or "-",
            row.gpus,
            f"{row.used} %",
            age(row.for_ms),
        ]
        for row in view.idle[:ROWS_MAX]
    ]
    names = ("LONGEST", "JOBS", "GPUS", "USED", "FOR")
    return part(
        "unused",
        tag(
            "div",
            tag(
                "h2",
                "Holds without using",
                tag("small", f"{many(sum(row.gpus for row in view.idle), 'GPU')} of {many(len(view.idle), 'holder')}"),
            ),
            _table(names, rows, ("JOBS", "GPUS", "USED", "FOR")),
            class_="card",
        ),
    )


def worker(
    view: View,
    name: str,
    devices: Sequence[Device],
    load: Load | None,
    kept: Lanes,
    jobs: Sequence[Mapping[str, Any]],
) -> list[Part]:
    """Return one host: its GPUs, and the jobs on it that this key shows."""
    found = next((each for each in view.workers if each.worker == name), None)
    if found is None:
        return [part("worker", tag("div", f"no worker {name} is in the leader's frame", class_="card ill"))]
    models = [device.name for device in devices] if len(devices) == len(found.cells) else []
    slots = load.gpu_pool if load is not None and len(load.gpu_pool) == len(found.cells) else []
    rows = []
    for at, sign in enumerate(found.cells):
        slot = slots[at] if slots else None
        bad = slot is not None and (
            slot.detail or slot.foreign or slot.warning or (slot.health if slot.health != "ok" else "")
        )
        rows.append(
            [
                at,
                models[at] if models else found.model,
                f"{sign} share it" if sign.isdigit() else SIGNS.get(sign, sign),
                join(_holders(kept, devices[at].uuid) if models else ()),
                "-" if slot is None else f"{slot.util_percent} %",
                "-" if slot is None else f"{slot.memory_used_mib} MiB",
                "-" if slot is None or slot.temperature_c is None else f"{slot.temperature_c} °C",
                "-" if slot is None or slot.power_w is None else f"{slot.power_w} W",
                bad or "",
            ]
        )
    names = ("GPU", "MODEL", "STATE", "HELD BY", "USED", "MEMORY", "HEAT", "POWER", "TROUBLE")
    table = _table(names, rows, ("GPU", "USED", "MEMORY", "HEAT", "POWER"), hide=("MODEL", "HEAT", "POWER"))
    about_it = [trouble for trouble in view.troubles if trouble.where.partition(" GPU ")[0] == name]
    return [
        part(
            "worker",
            tag(
                "div",
                tag("h2", name, tag("small", f"{found.state}{'  simulated' if found.simulated else ''}")),
                tag("ul", *(_trouble(trouble, [name]) for trouble in about_it)),
                table,
                class_="card" + (" grave" if any(each.grave for each in about_it) else " ill" if about_it else ""),
            ),
        ),
        part("jobs", tag("div", tag("h2", "Jobs on it"), _jobs(jobs), class_="card") if jobs else NOTHING),
    ]


def _holders(kept: Lanes, uuid: str) -> Iterator[Html]:
    """Yield links to the jobs that have a device now."""
    for lease in kept.leases(uuid):
        if lease.until_ms is None:
            yield join([_job(lease.tenant, lease.job), " "])


# ------------------------------------------------------------------------------------------------------- the queue


def queue(view: View, tenant: str = "", wanted: str = "", ended: Html | None = None) -> list[Part]:
    """Return who waits and why, the jobs that are not over, and a page of those that are."""
    waiting = [row for row in view.waiting if not tenant or row.tenant == tenant]
    jobs = [
        row
        for row in view.jobs
        if (not tenant or row["tenant"] == tenant)
        and matches(" ".join(str(row.get(name, "")) for name in ("tenant", "job", "state", "gpu", "worker")), wanted)
    ]
    more = f", the first {ROWS_MAX} are here" if len(jobs) > ROWS_MAX else ""
    parts = [
        part(
            "waiting",
            tag("div", tag("h2", "Waits", tag("small", _waits_words(view, waiting))), _waiting(waiting), class_="card"),
        ),
        part(
            "live",
            tag(
                "div",
                tag("h2", "Jobs", tag("small", f"{len(jobs)} not over{more}")),
                _jobs(jobs[:ROWS_MAX]),
                class_="card",
            ),
        ),
    ]
    return [*parts, *([part("ended", ended)] if ended is not None else [])]


def _waits_words(view: View, waiting: Sequence[Waiting]) -> str:
    if waiting:
        return f"{many(sum(row.jobs for row in waiting), 'job')} of {many(len(waiting), 'tenant')}"
    return f"{many(view.queued, 'replica')}, of jobs that have begun or are not listed" if view.queued else "nobody"


def _waiting(waiting: Sequence[Waiting]) -> Html:
    if not waiting:
        return NOTHING
    rows = [
        [
            tag("a", row.tenant, href=link("queue", tenant=row.tenant)),
            row.jobs,
            (">" if row.more else "") + age(row.oldest_ms),
            _job(row.tenant, row.job, short=True),
            row.asks,
            row.starts,
            row.why,
        ]
        for row in waiting
    ]
    names = ("TENANT", "JOBS", "OLDEST", "JOB", "ASKS", "STARTS", "WHY THE OLDEST WAITS")
    return _table(names, rows, ("JOBS", "OLDEST", "STARTS"), hide=("JOBS", "ASKS", "STARTS"))


def _jobs(jobs: Sequence[Mapping[str, Any]]) -> Html:
    if not jobs:
        return tag("p", "none", class_="dim")
    rows = [
        [
            _job(row["tenant"], row["job"]),
            _state(row["state"]),
            row.get("gpu", ""),
            row.get("worker", "") + (f" +{row['workers'] - 1}" if row.get("workers", 1) > 1 else ""),
            use_cell(dict(row)),
            age(row["age_ms"]) if "age_ms" in row else "",
            why_cell(dict(row)) or ("held" if row.get("hold") else ""),
        ]
        for row in jobs
    ]
    return _table(
        ("JOB", "STATE", "ASKS", "WORKER", "USED", "AGE", "WHY"), rows, ("USED", "AGE"), hide=("WORKER", "USED")
    )


def ended(tenant: str, data: Mapping[str, Any]) -> Html:
    """Return a page of the jobs that are over, of a tenant or of all, with the way to the next page."""
    rows = data["jobs"]
    more = (
        tag("p", tag("a", "older", href=link("queue", tenant=tenant, after=str(data["next"]))))
        if data.get("next")
        else ""
    )
    words = ", ".join(f"{number} {state}" for state, number in data.get("counts", {}).items() if state in TERMINAL)
    return tag(
        "div",
        tag("h2", "Over", tag("small", f"{tenant or 'all tenants'}: {words or 'none in memory'}")),
        _jobs(rows),
        more,
        class_="card",
    )


# ----------------------------------------------------------------------------------------------------------- a job


class Story(NamedTuple):
    """What the leader answers about one job. `why` and `use` are empty of a job that is over; `output` are lines."""

    shown: Mapping[str, Any]
    why: Mapping[str, Any]
    use: Sequence[Mapping[str, Any]]
    output: Sequence[str]


def job(story: Story, now_ms: int) -> list[Part]:
    """Return a job: facts, why it waits and what would help, its attempts as bars, its use, its output, its changes."""
    shown = story.shown
    request = shown.get("request") or {}
    facts = [
        ("tenant", tag("a", shown["tenant"], href=link("queue", tenant=shown["tenant"]))),
        ("asks", shown.get("gpu")),
        ("command", " ".join(request.get("run", {}).get("argv", []))),
        ("priority", shown.get("priority")),
        ("age", age(shown["age_ms"]) if "age_ms" in shown else ""),
        ("ended", utc(shown["ended_ms"]) if shown.get("ended_ms") else ""),
        ("replicas", shown_words(shown)),
        ("again of", request.get("again_of")),
        ("run again as", ", ".join(shown.get("again", ()))),
        *after_rows(dict(shown)),
        ("code", code_cell(shown.get("code"))),
        ("why", ended_by_itself(shown["state"], shown.get("code"), shown.get("why") or "")),
        ("use", use_cell(dict(shown)) if shown.get("use") else ""),
    ]
    title = tag(
        "h2", shown["job"], " ", _state(shown["state"]), tag("small", "simulated" if shown.get("simulated") else "")
    )
    ill = shown["state"] in TERMINAL and shown["state"] != "SUCCEEDED"
    parts = [part("facts", tag("div", title, _facts(facts), class_="card" + (" ill" if ill else "")))]
    if "reason" in story.why:
        rows = [(name, value) for name, value in explained_rows(dict(story.why)) if value]
        fixes = [tag("li", line) for line in fix_lines(dict(story.why))]
        parts.append(
            part("why", tag("div", tag("h2", "Why it waits"), _facts(rows), tag("ul", *fixes), class_="card ill"))
        )
    else:
        parts.append(part("why", NOTHING))
    attempts = bars(shown.get("changes", ()), now_ms)
    parts.append(part("attempts", _attempts(attempts)))
    if story.use:
        parts.append(part("use", _use(story.use)))
    parts.append(part("output", tag("div", tag("h2", "Output"), tag("pre", "\n".join(story.output)), class_="card")))
    parts.append(part("changes", _changes(shown.get("changes", ()))))
    return parts


def _facts(rows: Iterable[tuple[str, Any]]) -> Html:
    return tag(
        "table",
        *(tag("tr", tag("th", name), tag("td", value)) for name, value in rows if value not in (None, "")),
        class_="facts",
    )


def _attempts(attempts: Sequence[Bar]) -> Html:
    if not attempts:
        return NOTHING
    shown = attempts[-BARS_MAX:]
    left = min(span.from_ms for bar in shown for span in bar.spans or ()) if any(bar.spans for bar in shown) else 0
    right = max((span.until_ms for bar in shown for span in bar.spans), default=left + 1)
    rows = []
    for bar in shown:
        spans = [
            _rect(
                span.state,
                left,
                right,
                span.from_ms,
                span.until_ms,
                f"{span.state} for {age(span.until_ms - span.from_ms)}",
            )
            for span in bar.spans
        ]
        end = " ".join(
            filter(None, (bar.end or "goes on", "" if bar.code is None else f"code {code_cell(bar.code)}", bar.why))
        )
        rows.append([f"{bar.replica}/{bar.attempt}", bar.worker or "-", tag("svg", *spans, class_="bar"), end])
    hidden = f"the last {BARS_MAX} of {len(attempts)}, " if len(attempts) > BARS_MAX else ""
    small = tag("small", f"{hidden}replica/attempt; yellow waits, blue is placed, green runs, violet ends")
    return tag(
        "div",
        tag("h2", "Attempts", small),
        _table(("AT", "WORKER", "OVER TIME", "END"), rows, (), {"OVER TIME": "wide-bar"}, hide=("WORKER",)),
        class_="card",
    )


def _rect(kind: str, left: int, right: int, from_ms: int, until_ms: int, title: str) -> Html:
    full = max(right - left, 1)
    x, wide = 100 * (from_ms - left) / full, max(100 * (until_ms - from_ms) / full, 0.4)
    return tag("rect", tag("title", title), class_=kind, x=f"{x:.2f}%", width=f"{wide:.2f}%", y=1, height=12)


def _use(rows: Sequence[Mapping[str, Any]]) -> Html:
    cells = [
        [
            f"{row['replica']}/{row['index']}",
            row["worker"],
            _spark(row["percent"], 100),
            _newest(row["percent"], f" % shared by {row['shared_by']}" if row.get("shared_by") else " %"),
            _spark(row["memory_mib"], row["memory_total_mib"] or 1),
            _newest(row["memory_mib"], " MiB"),
            _newest(row["power_w"], " W"),
        ]
        for row in rows
    ]
    names = ("AT", "WORKER", "USED", "NOW", "MEMORY", "HELD", "POWER")
    small = tag("small", "each GPU over the last ten minutes")
    return tag(
        "div",
        tag("h2", "Use", small),
        _table(names, cells, ("NOW", "HELD", "POWER"), hide=("WORKER", "POWER")),
        class_="card",
    )


def _spark(numbers: Sequence[int | None], full: int) -> Html:
    read = [(at, number) for at, number in enumerate(numbers) if number is not None]
    path = "".join(
        f"{'L' if at else 'M'}{x},{20 - 18 * min(number / full, 1):.1f}" for at, (x, number) in enumerate(read)
    )
    if len(read) == 1:
        path += "h.5"
    wide = max(len(numbers) - 1, 1)
    return (
        tag("svg", tag("path", d=path), class_="spark", viewBox=f"0 0 {wide} 22", preserveAspectRatio="none")
        if read
        else text("-")
    )


def _newest(numbers: Sequence[int | None], unit: str) -> str:
    number = next((each for each in reversed(numbers) if each is not None), None)
    return "-" if number is None else f"{number}{unit}"


def _changes(changes: Sequence[Mapping[str, Any]]) -> Html:
    if not changes:
        return NOTHING
    began = changes[0]["time_ms"]
    rows = [
        [
            age(change["time_ms"] - began),
            "-" if change["replica"] < 0 else f"{change['replica']}/{change['attempt']}",
            _state(change["state"]),
            change.get("worker", ""),
            "" if change.get("code") is None else change["code"],
            " ".join(filter(None, (change.get("why", ""), f"by {change['by']}" if change.get("by") else ""))),
        ]
        for change in changes[-ROWS_MAX:]
    ]
    names = ("AFTER", "AT", "STATE", "WORKER", "CODE", "WHY")
    return tag(
        "div",
        tag("h2", "Story", tag("small", f"since {utc(began)}")),
        _table(names, rows, ("AFTER", "CODE"), hide=("WORKER",)),
        class_="card",
    )


# ------------------------------------------------------------------------------------------------- time and usage


def hosts_of_lanes(view: View, first: str, wanted: str) -> tuple[list[WorkerCells], str]:
    """Return the hosts on this page of lanes, from the one called `first` on, and the first of the next page, or ""."""
    matching = sorted((each for each in view.workers if matches(about(each), wanted)), key=lambda each: each.worker)
    shown: list[WorkerCells] = []
    lanes_shown = 0
    for found in matching:
        if found.worker < first:
            continue
        lanes_shown += len(found.cells)
        if shown and lanes_shown > LANES_MAX:
            return shown, found.worker
        shown.append(found)
    return shown, ""


def lanes(
    view: View,
    kept: Lanes,
    hosts: Sequence[tuple[WorkerCells, Sequence[Device]]],
    after: str = "",
    wanted: str = "",
    span: str = SPANS[-1],
) -> list[Part]:
    """Return a lane of time for each GPU of these hosts, by tenant; hatched where it was leased and did nothing. `span`
    is how far back the lanes go."""
    right = view.at_ms
    left = right - int(1000 * seconds(span))
    rows: list[list[Any]] = []
    tenants: set[str] = set()
    for found, devices in hosts:
        for slot, device in enumerate(devices):
            drawn = [_rect("lane", 0, 1, 0, 1, "free")]
            for lease in kept.leases(device.uuid):
                until = right if lease.until_ms is None else lease.until_ms
                if until > left:
                    tenants.add(lease.tenant)
                    title = f"{lease.tenant}/{lease.job} for {age(until - lease.from_ms)}"
                    rect = _rect(colour(lease.tenant), left, right, max(lease.from_ms, left), until, title)
                    drawn.append(tag("a", rect, href=link("job", lease.tenant, lease.job)))
            for from_ms, until_ms in kept.unused(found.worker, slot):
                if until_ms > left:
                    title = f"leased and unused for {age(until_ms - from_ms)}"
                    drawn.append(_rect("idle", left, right, max(from_ms, left), until_ms, title))
            rows.append([f"{found.worker} {slot}", tag("svg", *drawn, class_="bar")])
    keys = [
        join([tag("svg", tag("rect", class_=colour(tenant), width="100%", height="100%"), class_="key"), tenant])
        for tenant in sorted(tenants)
    ]
    more = (
        tag("p", tag("a", "further hosts", href=link("lanes", **{"from": after, "filter": wanted, "span": span})))
        if after
        else ""
    )
    spans = [
        join([tag("a", each, href=link("lanes", span=each, filter=wanted)), " "]) for each in SPANS if each != span
    ]
    small = tag("small", f"the last {span}, now at the right; hatched: leased and unused; empty: free  ", *spans)
    return [
        part(
            "lanes",
            tag(
                "div",
                tag("h2", "GPU time", small),
                tag("p", *keys, class_="legend"),
                _table(("GPU", "LEASED BY"), rows, (), {"LEASED BY": "lanes"})
                if rows
                else tag("p", "no GPU was heard of so far", class_="dim"),
                more,
                class_="card",
            ),
        )
    ]


def colour(tenant: str) -> str:
    """Return the class of a tenant's colour: the same on every page and in every browser."""
    return f"t{sum(tenant.encode()) % 8}"


def usage(rows: Sequence[UsageRow], from_ms: int, by: Sequence[str]) -> list[Part]:
    """Return the GPU time that was granted, as bars, and what was used of it."""
    order = sorted(rows, key=lambda row: -row.gpu_s)[:ROWS_MAX]
    most = max((row.gpu_s for row in order), default=1) or 1
    cells = [
        [
            *(
                utc(row.hour_ms or 0)[:16] if word == "hour" else row.tenant if word == "tenant" else row.model
                for word in by
            ),
            tag(
                "svg",
                tag("rect", width=f"{100 * row.gpu_s / most:.2f}%", y=1, height=12),
                tag("rect", class_="used", width=f"{100 * row.used_gpu_s / most:.2f}%", y=1, height=12),
                class_="bar",
            ),
            f"{row.gpu_s / _HOUR_S:.2f}",
            f"{row.used_gpu_s / _HOUR_S:.2f}",
            f"{100 * row.used_gpu_s / row.gpu_s:.0f} %" if row.gpu_s else "-",
        ]
        for row in order
    ]
    names = (*map(str.upper, by), "USED OVER GRANTED", "GPU-H", "USED GPU-H", "USED")
    small = tag("small", f"since {utc(from_ms)}; what is used is measured once an attempt is over")
    table = _table(
        names, cells, ("GPU-H", "USED GPU-H", "USED"), {"USED OVER GRANTED": "wide-bar"}, hide=("MODEL", "USED GPU-H")
    )
    shown = table if cells else tag("p", "no GPU time was granted", class_="dim")
    return [part("usage", tag("div", tag("h2", "Usage", small), shown, class_="card"))]


# ----------------------------------------------------------------------------------------------------------- pieces


def _job(tenant: str, name: str, *, short: bool = False) -> Html:
    return tag("a", name if short else f"{tenant}/{name}", href=link("job", tenant, name))


def _state(state: str) -> Html:
    return tag("span", state, class_=f"state-{state}")


def _table(
    names: Sequence[str],
    rows: Iterable[Sequence[Any]],
    numbers: Sequence[str],
    classes: Mapping[str, str] | None = None,
    hide: Sequence[str] = (),
) -> Html:
    """Return a table. Columns of `numbers` stand to the right; those of `hide` are left out on a phone."""
    kinds = [
        " ".join(
            filter(
                None, ("n" if name in numbers else "", "wide" if name in hide else "", (classes or {}).get(name, ""))
            )
        )
        or None
        for name in names
    ]
    return tag(
        "table",
        tag("thead", tag("tr", *(tag("th", name, class_=kind) for name, kind in zip(names, kinds, strict=True)))),
        tag(
            "tbody",
            *(
                tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
                for row in rows
            ),
        ),
    )
