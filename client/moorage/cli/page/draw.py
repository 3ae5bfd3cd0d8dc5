"""What the pages say: a `View`, lanes and the leader's answers in, parts of HTML out. It sends no questions."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from moorage.cli.framework.render import utc
from moorage.cli.jobs.asked_rows import asked_rows, service_words, words
from moorage.cli.jobs.explain import explained_rows, fix_lines
from moorage.cli.jobs.job_rows import after_rows, code_cell, end_of, why_cell
from moorage.cli.jobs.replica_words import shown_words
from moorage.cli.jobs.show import item_cell, refused_words, setup_words
from moorage.cli.jobs.spent import spent_rows
from moorage.cli.jobs.use import UseRow, use_cell
from moorage.cli.page import templates
from moorage.cli.page.draw_series import of_job
from moorage.cli.page.draw_waits import story
from moorage.cli.page.templates import Part, colours, drawn, link, part
from moorage.cli.top.draw import about, fit_words, matches, waits_words
from moorage.client.answers import JobInfo
from moorage.client.durations import age, seconds
from moorage.client.errors import FailedReplica
from moorage.client.failures import FAILURES
from moorage.client.reported_words import reported_words
from moorage.client.view.bars import Bar, Span, bars
from moorage.client.view.grid import WORDS, grid
from moorage.client.view.lanes import Lanes
from moorage.client.view.model import SILENT_MS, is_leased
from moorage.client.view.view import Trouble, View, WorkerCells
from moorage.schemas.answers.jobs import Explained, JobRow, JobsAnswer
from moorage.schemas.answers.operators import UsageRow
from moorage.schemas.cells import STATES as SIGNS
from moorage.schemas.frames import Device, Load, ServiceLately
from moorage.schemas.job import TERMINAL
from moorage.schemas.names import is_tenant, word_of
from moorage.schemas.service import CALL_MS
from moorage.schemas.units import many
from moorage.schemas.waited import SeriesAnswer, WaitedAnswer

#: troubles on one page, rows of a table, bars of a job, GPUs in lanes
TROUBLES_MAX: Final = 30
WAITING_FIRST: Final = 5
ROWS_MAX: Final = 200
BARS_MAX: Final = 64
LANES_MAX: Final = 128
#: replicas that are named of one kind of failure
KINDS_NAMED: Final = 12
_NUMBER: Final = re.compile(r"\d+")
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
    """A page that the bar leads to."""

    path: str
    name: str


def tabs(*, sees_fleet: bool, private: bool, operates: bool) -> list[Tab]:
    """Return the pages that a key shows: the map to who sees the fleet, jobs to tenants, all to operators."""
    shown = {
        Tab("/", "Fleet"): sees_fleet,
        Tab("/queue", "Queue"): private,
        Tab("/lanes", "Time"): operates,
        Tab("/past", "Past"): private,
        Tab("/usage", "Usage"): private,
    }
    return [tab for tab, is_shown in shown.items() if is_shown]


def document(at: str, parts: Sequence[Part], *, tabs: Sequence[Tab], title: str, fixed: Markup | None = None) -> Markup:
    """Return a whole page: the bar, the parts, and what is `fixed` above them, which keeps what was typed into it."""
    return templates.document(
        at=at,
        title=title,
        tabs=tabs,
        head=next(each for each in parts if each.id == "head"),
        fixed=fixed,
        parts=[each for each in parts if not each.inside and each.id != "head"],
    )


def head(view: View, trouble: str = "", *, late: bool = False) -> Part:
    """Return what stands at the top of every page: whether GPUs are simulated, who leads, and what this is as of. A
    trouble dims the page, but for one that is answers that come `late`."""
    words = [f"leader {view.leader or 'unknown'}", f"epoch {view.epoch}"] if view.sees_fleet else []
    if view.past:
        words = ["as it was at", utc(view.at_ms)[:10]]
    sim = {"all": "sim: all GPUs are simulated", "some": "sim: some GPUs are simulated"}.get(view.simulated, "")
    return part(
        "every",
        "head",
        words=[*words, f"{utc(view.at_ms)[11:19]} UTC"],
        sim=sim,
        trouble=trouble,
        late=late,
        wrong=len(view.troubles),
        grave=sum(each.grave for each in view.troubles),
    )


def trouble(words: str) -> Part:
    """Return what stands in the place of a page that cannot be shown."""
    return part("every", "trouble", words=words)


def to_come() -> Part:
    """Return what stands in the place of numbers that have not come so far."""
    return part("every", "to_come")


# ------------------------------------------------------------------------------------------------------- the fleet


def fleet(view: View, wanted: str = "") -> list[Part]:
    """Return the fleet: what is wrong, what fits now, a block a host with a cell a GPU, who holds without using."""
    rows = _troubles(view.troubles[:TROUBLES_MAX], {worker.worker for worker in view.workers})
    parts = [part("fleet", "verdict", view=view, rows=rows, more=len(view.troubles) - TROUBLES_MAX)]
    if not view.sees_fleet:
        return parts
    workers = [worker for worker in view.workers if worker.state != "left" and matches(about(worker), wanted)]
    if waits := view.waiting[:WAITING_FIRST]:
        parts.append(part("fleet", "waits", words=waits_words(view), rows=waits))
    parts.append(part("fleet", "failed", rows=view.failed[:WAITING_FIRST], tenants=len(view.failed)))
    parts += [part("fleet", "numbers", view=view, fits=fit_words(view.fits)), *_map(view, workers)]
    parts.append(part("fleet", "services", rows=[_service(row) for row in view.services[:ROWS_MAX]]))
    return [*parts, part("fleet", "unused", view=view, rows=view.idle[:ROWS_MAX])]


def _service(row: ServiceLately) -> dict[str, Any]:
    def within(ms: int | None) -> str:
        return f"over {age(CALL_MS[-1])}" if ms is None else f"{ms} ms" if ms else "-"

    return {
        "tenant": row.tenant,
        "service": row.service,
        "has_page": is_tenant(row.tenant),
        "members": row.members,
        "running": f"{row.running} of {row.places}",
        "waiting": row.waiting,
        "calls": row.calls,
        "errors": row.errors,
        "waited": within(row.waited_ms),
        "ran": within(row.ran_ms),
    }


def _troubles(troubles: Sequence[Trouble], hosts: Collection[str]) -> list[dict[str, Any]]:
    return [
        {"where": each.where, "at": _page_of(each, hosts), "what": each.what, "grave": each.grave} for each in troubles
    ]


def _page_of(trouble: Trouble, hosts: Collection[str]) -> str:
    """Return the address of what has a trouble, "" if it has no page."""
    name = trouble.where.partition(" GPU ")[0]
    if "/" in name:
        return link("job", *name.split("/", 1))
    if " jobs of " in name:
        return link("queue", tenant=name.rpartition(" ")[2])
    return link("worker", name) if name in hosts else ""


def _map(view: View, workers: Sequence[WorkerCells]) -> list[Part]:
    """Return the map, and each host as a part inside it, so that a host that changed is all that is sent."""
    old = view.heard_ms_ago is None or view.heard_ms_ago > SILENT_MS
    order = sorted(workers, key=lambda worker: worker.model)
    hosts = [
        Part(f"host-{each.worker}", html, html, inside=True)
        for each in order
        for html in [_host(each.worker, each.state, each.cells, tuple(each.use))]
    ]
    groups = [
        {
            "model": model,
            "gpus": sum(len(worker.cells) for worker, _ in of),
            "hosts": [host for _, host in of],
            "key": [(worker.worker, len(worker.cells)) for worker, _ in of],
        }
        for model, pairs in groupby(zip(order, hosts, strict=True), key=lambda pair: pair[0].model)
        for of in [list(pairs)]
    ]
    key = json.dumps([old, [(group["model"], group["key"]) for group in groups]])
    return [Part("map", drawn("fleet", "map", groups=groups, old=old, legend=LEGEND), key), *hosts]


@lru_cache(maxsize=8192)
def _host(name: str, state: str, cells: str, use: tuple[int | None, ...]) -> Markup:
    """Return the block of a host. A thousand of them change a few at a time, so those that did not are kept."""
    kind = "" if state in _OPEN else " gone" if state in _GONE else " shut"
    high = max(1, -(-len(cells) // _IN_ROW)) * _HIGH
    shown = [_cell(at, sign, used) for at, (sign, used) in enumerate(zip(cells, use, strict=True))]
    return drawn("fleet", "host", name=name, state=state, kind=kind, cells=cells, drawn=shown, high=high)


def _cell(at: int, sign: str, used: int | None) -> dict[str, Any]:
    """Return a GPU of the map: where it stands, how high its use is filled, and its words and sign."""
    leased = is_leased(sign)
    state = SIGNS.get(sign, "shared")
    is_unused = leased and used == 0
    words = f"GPU {at}: {sign} jobs share it" if sign.isdigit() else f"GPU {at}: {state}"
    if leased:
        words += ", use not known" if used is None else f", used {used} %"
    y = at // _IN_ROW * _HIGH + 1
    used_high = max(1, round(used * 0.17, 1)) if leased and used else 0
    return {
        "words": words,
        "kind": "unused" if is_unused else state,
        "sign": sign if sign not in "·#" else "_" if is_unused else "",
        "x": at % _IN_ROW * _CELL + 1,
        "y": y,
        "used": bool(used_high),
        "used_y": f"{y + 17 - used_high:g}",
        "used_high": f"{used_high:g}",
    }


def worker(
    view: View,
    name: str,
    devices: Sequence[Device],
    load: Load | None,
    kept: Lanes,
    jobs: Sequence[JobRow],
) -> list[Part]:
    """Return one host: its GPUs, and the jobs on it that this key shows."""
    found = next((each for each in view.workers if each.worker == name), None)
    if found is None:
        return [trouble(f"no worker {name} is in the leader's frame")]
    known = len(devices) == len(found.cells)
    slots = load.gpu_pool if load is not None and len(load.gpu_pool) == len(found.cells) else [None] * len(found.cells)
    rows = [
        {
            "model": devices[at].name if known else found.model,
            "state": f"{sign} share it" if sign.isdigit() else SIGNS.get(sign, sign),
            "leases": [each for each in kept.leases(devices[at].uuid) if each.until_ms is None] if known else [],
            "slot": slot,
            "trouble": ""
            if slot is None
            else slot.detail or slot.foreign or slot.warning or ("" if slot.health == "ok" else slot.health),
        }
        for at, (sign, slot) in enumerate(zip(found.cells, slots, strict=True))
    ]
    troubles = [each for each in view.troubles if each.where.partition(" GPU ")[0] == name]
    kind = " grave" if any(each.grave for each in troubles) else " ill" if troubles else ""
    return [
        part("worker", "worker", host=found, kind=kind, troubles=_troubles(troubles, [name]), rows=rows),
        part("worker", "jobs", rows=_jobs(jobs)),
    ]


# ------------------------------------------------------------------------------------------------------- the queue


def queue(view: View, tenant: str = "", wanted: str = "", ended: Part | None = None) -> list[Part]:
    """Return who waits and why, the jobs that are not over, and a page of those that are."""
    waiting = [row for row in view.waiting if not tenant or row.tenant == tenant]
    jobs = [
        row
        for row in view.jobs
        if (not tenant or row.tenant == tenant)
        and matches(" ".join((row.tenant, row.job, row.state, row.gpu, row.worker)), wanted)
    ]
    parts = [
        part("queue", "waiting", words=waits_words(view, tenant), rows=waiting),
        part("queue", "live", words=_live_words(view, len(jobs)), rows=_jobs(jobs[:ROWS_MAX])),
    ]
    return [*parts, *([ended] if ended is not None else [])]


def _live_words(view: View, jobs: int) -> str:
    """Return how many jobs are not over, of which so many are chosen, and how many of these are shown."""
    unlisted = view.live - len(view.jobs)
    if jobs == len(view.jobs):
        words = f"{max(view.live, jobs)} not over"
    else:
        words = f"{'at least ' if unlisted > 0 else ''}{jobs} not over"
    return words + (f", {min(jobs, ROWS_MAX)} are here" if jobs > ROWS_MAX or unlisted > 0 else "")


def ended(tenant: str, page: JobsAnswer) -> Part:
    """Return a page of the jobs that are over, of a tenant or of all, with the way to the next page."""
    words = ", ".join(f"{number} {state}" for state, number in page.counts.items() if state in TERMINAL)
    older = link("queue", tenant=tenant, after=page.next) if page.next else ""
    return part("queue", "ended", tenant=tenant, words=words, rows=_jobs(page.jobs), older=older)


def _jobs(jobs: Sequence[JobRow]) -> list[dict[str, Any]]:
    return [
        {
            "tenant": row.tenant,
            "job": row.job,
            "state": row.state,
            "asks": row.gpu,
            "worker": row.worker + (f" +{row.workers - 1}" if row.workers > 1 else ""),
            "used": use_cell(row.use),
            "age": age(row.age_ms),
            "why": why_cell(row) or ("held" if row.hold is not None else ""),
        }
        for row in jobs
    ]


# ----------------------------------------------------------------------------------------------------------- a job


class JobDetail(NamedTuple):
    """What the leader answers about one job. A job that is over has no `why` and no `use`; `output` are lines, and
    `failed` is of a job of several replicas."""

    shown: JobInfo
    why: Explained | None
    use: Sequence[UseRow]
    output: Sequence[str]
    failed: Sequence[FailedReplica] = ()
    waited: WaitedAnswer = WaitedAnswer()
    life: SeriesAnswer = SeriesAnswer()


def job(detail: JobDetail, now_ms: int) -> list[Part]:
    """Return a job: facts, why it waits and what would help, its attempts as bars, its use, its output, its changes."""
    shown = detail.shown
    facts = facts_of(shown)
    why, fixes = [], []
    if detail.why is not None and detail.why.reason:
        why = [(name, value) for name, value in explained_rows(detail.why) if value]
        fixes = fix_lines(detail.why)
    attempts, changes = bars(shown.changes, now_ms), shown.changes
    is_ill = shown.state in TERMINAL and shown.state != "SUCCEEDED"
    replicas = part("job", "replicas", **_replicas(detail))
    first = [replicas] if detail.failed else []  # which ones failed, and why, is what a person comes for
    return [
        *first,
        part("job", "facts", shown=shown, ill=is_ill, rows=facts),
        part("job", "why", rows=why, fixes=fixes),
        story(shown, detail.waited),
        *([] if first else [replicas]),
        part("job", "attempts", rows=_attempts(attempts[-BARS_MAX:]), hidden=max(0, len(attempts) - BARS_MAX)),
        part("job", "use", rows=[_use(row) for row in detail.use]),
        of_job(detail.life),
        part("job", "output", lines=detail.output),
        part(
            "job",
            "changes",
            rows=changes[-ROWS_MAX:][::-1],
            began_ms=changes[0].time_ms if changes else 0,
            older=shown.rev - min(len(changes), ROWS_MAX),
        ),
    ]


def _replicas(detail: JobDetail) -> dict[str, Any]:
    """Return the grid of a job's replicas, a cell each, and those that failed; no letters for a job of one."""
    shown = detail.shown
    drawn = grid(shown)
    if drawn is None:
        return {
            "letters": "",
            "numbers": "",
            "each": 1,
            "key": [],
            "words": "",
            "title": "",
            "kinds": [],
            "unread": False,
            "rows": [],
            "more": 0,
            "again": "",
        }
    failures = 0 if shown.replicas is None else sum(shown.replicas.states.get(state, 0) for state in FAILURES)
    rows = [
        {
            "replica": row.replica,
            "item": item_cell(row.item),
            "state": row.state,
            "code": code_cell(row.code),
            "said": row.stderr or row.why,
            "worker": row.worker,
        }
        for row in detail.failed
    ]
    return {
        "letters": drawn.letters,
        "numbers": ",".join(f"{first}-{last}" for first, last in drawn.numbers),
        "each": drawn.each,
        "key": [(letter, WORDS[letter]) for letter in drawn.counts],
        "words": shown_words(shown.replicas),
        "title": f"{shown.job}: {many(failures, 'replica')} of {shown.replicas.of} failed"
        if rows and shown.replicas
        else "",
        "kinds": _kinds(detail.failed),
        "unread": detail.output[0] == OUTPUT_IS_ITS if rows and detail.output else False,
        "rows": rows,
        "more": failures - len(rows) if rows else 0,
        "again": f"moorage again {word_of(shown.job)} --failed" if failures else "",
    }


def _kinds(failed: Sequence[FailedReplica]) -> list[dict[str, Any]]:
    """Return the failures by their code and last line, numbers in it aside: the most frequent first."""
    kinds: dict[tuple[int | None, str], list[str]] = {}
    has_items = all(item_cell(row.item) not in ("", "-") for row in failed)
    for row in failed:
        name = item_cell(row.item) if has_items else str(row.replica)
        kinds.setdefault((code_cell(row.code), _NUMBER.sub("#", row.stderr or row.why)), []).append(name)
    return [
        {
            "count": len(names),
            "code": code,
            "said": said,
            "of": "items" if has_items else "replicas",
            "names": ", ".join(names[:KINDS_NAMED]) + (", …" if len(names) > KINDS_NAMED else ""),
        }
        for (code, said), names in sorted(kinds.items(), key=lambda each: -len(each[1]))
    ]


def facts_of(shown: JobInfo) -> list[tuple[str, Any]]:
    """Return what a job's page says of its request and its state, in rows."""
    request = shown.asked
    return [
        ("asks", shown.gpu),
        ("command", words(shown.run.get("argv", ()))),
        ("service", service_words(request.get("service"))),
        ("priority", shown.priority),
        *asked_rows(request),
        ("setup", setup_words(shown)),
        ("age", age(shown.age_ms) if shown.rev else ""),
        *spent_rows(shown),
        ("replicas", shown_words(shown.replicas)),
        ("again of", request.get("again_of")),
        ("run again as", ", ".join(shown.again)),
        *after_rows(shown),
        ("code", code_cell(shown.code)),
        ("why", end_of(shown)),
        ("use", use_cell(shown.use) if shown.use is not None else ""),
        ("reported", reported_words(shown.reported, of_several=shown.replicas is not None)),
        ("not reported", refused_words(shown)),
    ]


def _attempts(attempts: Sequence[Bar]) -> list[dict[str, Any]]:
    spans = [span for bar in attempts for span in bar.spans]
    left = min((span.from_ms for span in spans), default=0)
    right = max((span.until_ms for span in spans), default=left + 1)

    def rect(span: Span) -> dict[str, str]:
        words = f"{span.state} for {age(span.until_ms - span.from_ms)}"
        return _rect(span.state, left, right, span.from_ms, span.until_ms, words)

    return [
        {
            "replica": bar.replica,
            "attempt": bar.attempt,
            "worker": bar.worker,
            "spans": [rect(span) for span in bar.spans],
            "end": " ".join(
                filter(None, (bar.end or "goes on", "" if bar.code is None else f"code {code_cell(bar.code)}", bar.why))
            ),
        }
        for bar in attempts
    ]


def _rect(kind: str, left: int, right: int, from_ms: int, until_ms: int, title: str) -> dict[str, str]:
    """Return a piece of a bar over the time from `left` to `right`, in percent of it."""
    full = max(right - left, 1)
    x, width = 100 * (from_ms - left) / full, max(100 * (until_ms - from_ms) / full, 0.4)
    return {"kind": kind, "x": f"{x:.2f}", "width": f"{width:.2f}", "title": title}


def _use(row: UseRow) -> dict[str, Any]:
    line = row.line
    return {
        "at": f"{row.replica}/{line.index}",
        "worker": row.page.worker,
        "used": _spark(line.percent, 100),
        "now": _newest(line.percent, f" % shared by {line.shared_by}" if line.shared_by else " %"),
        "memory": _spark(line.memory_mib, line.memory_total_mib or 1),
        "held": _newest(line.memory_mib, " MiB"),
        "power": _newest(line.power_w, " W"),
    }


def _spark(numbers: Sequence[int | None], full: int) -> dict[str, Any]:
    """Return the path of a line through what was read; "" if nothing was."""
    read = [(at, number) for at, number in enumerate(numbers) if number is not None]
    path = "".join(
        f"{'L' if at else 'M'}{x},{20 - 18 * min(number / full, 1):.1f}" for at, (x, number) in enumerate(read)
    )
    return {"path": path + ("h.5" if len(read) == 1 else ""), "wide": max(len(numbers) - 1, 1)}


def _newest(numbers: Sequence[int | None], unit: str) -> str:
    number = next((each for each in reversed(numbers) if each is not None), None)
    return "-" if number is None else f"{number}{unit}"


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
    seen = [lease for _, devices in hosts for device in devices for lease in kept.leases(device.uuid)]
    of_tenant = colours(lease.tenant for lease in seen if lease.until_ms is None or lease.until_ms > left)

    def leases(device: Device) -> Iterator[dict[str, Any]]:
        for lease in kept.leases(device.uuid):
            until = right if lease.until_ms is None else lease.until_ms
            if until > left:
                words = f"{lease.tenant}/{lease.job} for {age(until - lease.from_ms)}"
                piece = _rect(of_tenant[lease.tenant], left, right, max(lease.from_ms, left), until, words)
                yield {"at": link("job", lease.tenant, lease.job), "span": piece}

    def unused(name: str, slot: int) -> Iterator[dict[str, str]]:
        for from_ms, until_ms in kept.unused(name, slot):
            if until_ms > left:
                words = f"leased and unused for {age(until_ms - from_ms)}"
                yield _rect("idle", left, right, max(from_ms, left), until_ms, words)

    rows = [
        {
            "name": f"{found.worker} {slot}",
            "free": _rect("lane", 0, 1, 0, 1, "free"),
            "leases": list(leases(device)),
            "unused": list(unused(found.worker, slot)),
        }
        for found, devices in hosts
        for slot, device in enumerate(devices)
    ]
    spans = [{"span": each, "at": link("lanes", span=each, filter=wanted)} for each in SPANS if each != span]
    further = link("lanes", **{"from": after, "filter": wanted, "span": span}) if after else ""
    return [part("lanes", "lanes", rows=rows, colours=of_tenant, span=span, spans=spans, further=further)]


def usage(rows: Sequence[UsageRow], from_ms: int, by: Sequence[str]) -> list[Part]:
    """Return the GPU time that was granted, as bars, and what was used of it."""
    order = sorted(rows, key=lambda row: -row.gpu_s)[:ROWS_MAX]
    most = max((row.gpu_s for row in order), default=1) or 1
    shown = [
        {
            "of": [
                utc(row.hour_ms or 0)[:16] if word == "hour" else row.tenant if word == "tenant" else row.model
                for word in by
            ],
            "granted": f"{100 * row.gpu_s / most:.2f}",
            "used": f"{100 * row.used_gpu_s / most:.2f}",
            "gpu_h": f"{row.gpu_s / _HOUR_S:.2f}",
            "used_gpu_h": f"{row.used_gpu_s / _HOUR_S:.2f}",
            "percent": f"{100 * row.used_gpu_s / row.gpu_s:.0f} %" if row.gpu_s else "-",
        }
        for row in order
    ]
    return [part("usage", "usage", names=list(by), rows=shown, more=len(rows) - len(order), from_ms=from_ms)]
