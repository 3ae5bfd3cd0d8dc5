"""The checks of what the leader's answer `fleet` tells of the ledger, the schedulers and the durable queue.

`moorage doctor` prints them all. What it warns of is a trouble on every screen over the fleet, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from moorage.client.durations import age, utc
from moorage.schemas.answers.fleet import ContainedFailures, FleetAnswer, SchedulerRow, TenantBucketsRow, WorkerInfo
from moorage.schemas.frames import FleetRow, LedgerCopies
from moorage.schemas.units import many

#: names in one line
NAMES_MAX: Final = 3
#: the label that says in which place a worker is
SITE: Final = "site"
#: states of workers that are not heard now
SILENT: Final = ("stale", "not-heard", "lost")
#: states of workers that do not run
AWAY: Final = ("lost", "left")
#: the part of its bytes at which the durable queue is nearly full
FULL_PERCENT: Final = 80
#: records that the ledger's follower may be behind: a restarted one has read more within seconds
BEHIND_MAX: Final = 100_000
#: a standby's clock against the leader's: its announcement may come late by less
STANDBY_OFF_S_MAX: Final = 5.0
SERVERS_NEEDED: Final = "the ledger accepts records only while more than half of the servers run"

Verdict = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="check"):
    """One line of the doctor's answer. `fix` says what to do if the verdict is not ok.

    `fail` means that moorage cannot work here; `warn`, that a worker or an operator on this machine would miss
    something, or that the fleet lacks something.
    """

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def of_leader(figures: FleetAnswer) -> Iterator[Check]:
    """Yield what is well and what is not of the ledger, the schedulers and the durable queue.

    `figures` are those of the leader's answer `fleet`; what it leaves out is not checked.
    """
    if figures.ledger_copies is not None:
        yield _copies(figures.ledger_copies)
    if (schedulers := _schedulers(figures.schedulers or [])) is not None:
        yield schedulers
    if (builds := _builds(figures)) is not None:
        yield builds
    if (clocks := _clocks(figures.schedulers or [])) is not None:
        yield clocks
    if (ranking := _ranking(figures.schedulers or [])) is not None:
        yield ranking
    if (queue := figures.request_queue) is not None:
        yield _filled(queue.messages, queue.bytes, queue.bytes_max, queue.tenant)
    if (buckets := figures.buckets) is not None:
        yield _buckets(buckets)
    if figures.contained is not None:
        yield contained_failures(figures.contained)
    if (follower := figures.follower) is not None:
        yield follows(follower.behind, follower.gaps, follower.trouble, follower.next or "")


def warnings(figures: FleetAnswer) -> list[Check]:
    """Return those checks of `of_leader` of which doctor warns: they are troubles of the fleet, too."""
    return [check for check in of_leader(figures) if check.verdict != "ok"]


def places_away(workers: Sequence[WorkerInfo]) -> list[str]:
    """Return a line for each place, by the label `site`, of which no worker is heard."""
    by_place: dict[str, list[WorkerInfo]] = {}
    for worker in workers:
        if worker.state != "left" and (place := worker.labels.get(SITE)):
            by_place.setdefault(place, []).append(worker)
    lines = []
    for place, rows in sorted(by_place.items()):
        if len(by_place) + (len(rows) < len(workers)) > 1 and all(row.state in SILENT for row in rows):
            ago = [row.heard_ms_ago for row in rows if row.heard_ms_ago is not None]
            since = f" for {age(min(ago))}" if ago else ""
            lines.append(
                f"site {place}: none of its workers is heard{since} ({many(len(rows), 'worker')}): the link of its leaf"
                " node is cut, or all of that place is away"
            )
    return lines


def no_worker_is_up(workers: Sequence[WorkerInfo | FleetRow]) -> str:
    """Return that no job can run, as no worker is up; "" if one is. `workers` are rows with a `state`."""
    if not workers:
        return "no worker has joined"
    return "" if any(row.state == "up" for row in workers) else "no worker is up"


def _copies(copies: LedgerCopies) -> Check:
    """Check that all copies of a ledger are up to date. Otherwise the loss of one more server may stop every
    scheduler, as the loss of its server does with one copy: on a cluster there could be more."""
    wanted, lacking, seen_ms_ago = copies.wanted, copies.lacking, copies.seen_ms_ago
    if lacking:
        found = f"copies of the ledger that are not up to date: {len(lacking)} of {wanted}, on {', '.join(lacking)}"
        fix = (
            "check that these nats-servers run and reach the other nats-servers; restart a server whose disk was "
            f"full: {SERVERS_NEEDED}"
        )
        return Check("copies", "warn", found, fix)
    if wanted > 1:
        ago = "" if seen_ms_ago is None else f", as seen {age(seen_ms_ago)} ago"
        return Check("copies", "ok", f"all {wanted} copies of the ledger are up to date{ago}")
    on = f", on {holder}" if (holder := copies.holder) else ""
    servers = copies.servers or []
    if len(servers) < 2:
        return Check("copies", "ok", f"the ledger has one copy{on}")
    found = (
        f"the ledger has one copy{on}, of the cluster's servers {', '.join(servers)}: while that server is away nothing"
        " is accepted, and after the lease all jobs end"
    )
    fix = (
        "for a copy on each of three servers: moorage admin backup FILE, stop every scheduler, moorage admin restore "
        "FILE --replace --replicas 3, and start them with replicas = 3 under [scheduler] of moorage.toml"
    )
    return Check("copies", "warn", found, fix)


def _filled(messages: int, size: int, size_max: int, tenant: str) -> Check:
    """Check how full the durable queue is (the shared one, or a tenant's): at its bound it refuses messages."""
    percent = size * 100 // size_max if size_max else 0
    of = f" of tenant {tenant}" if tenant else ""
    found = f"the durable queue{of} holds {many(messages, 'message')} and is {percent} % full (of {size_max >> 20} MiB)"
    if percent < FULL_PERCENT:
        return Check("queue-room", "ok", found)
    fix = (
        "moorage admin tenants shows which tenants are at their limit of jobs: "
        "raise that limit, or let that tenant submit less"
    )
    refused = "new requests of this tenant" if tenant else "new requests of every tenant"
    return Check("queue-room", "warn", f"{found}: when it is full, it refuses {refused}", fix)


def _schedulers(rows: Sequence[SchedulerRow]) -> Check | None:
    """Check that all schedulers have the same settings: a standby that takes over would apply its own.

    Return None without a leader or a standby.
    """
    leader = next((row for row in rows if row.leads), None)
    if leader is None or len(rows) < 2:
        return None
    ours = leader.settings
    if all(row.settings == ours for row in rows):
        return Check(
            "schedulers",
            "ok",
            f"{many(len(rows), 'scheduler')}, no standby with other settings; {leader.scheduler} leads",
        )
    told = []
    for row in rows:
        theirs = row.settings
        if theirs != ours:
            names = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
            told.append(f"{row.scheduler} ({', '.join(names[:NAMES_MAX])})")
    found = f"scheduler {leader.scheduler} leads; these standbys have other settings: {', '.join(told[:NAMES_MAX])}"
    return Check(
        "schedulers",
        "warn",
        found,
        "give all schedulers the same settings file, and restart the standbys with other settings; else "
        "those settings hold after a takeover",
    )


def running_builds(figures: FleetAnswer) -> dict[str, list[str]]:
    """Return who runs each build: schedulers, then workers that are neither lost nor left, by their names.

    Workers that are not moorage's own name none, and are left out.
    """
    found: dict[str, list[str]] = {}
    workers = [(row.worker, row.release) for row in figures.workers if row.state not in AWAY]
    for name, build in [*((row.scheduler, row.release) for row in figures.schedulers or []), *workers]:
        if build:
            found.setdefault(build, []).append(name)
    return found


def _builds(figures: FleetAnswer) -> Check | None:
    """Check that all of a fleet runs one build, as it does between two upgrades. Return None if it does."""
    found = running_builds(figures)
    if len(found) < 2:
        return None
    leads = next((row.release for row in figures.schedulers or [] if row.leads), "")
    first = f"scheduler {figures.leader} leads with {leads}; " if leads else ""
    others = [f"{build} on {_some(names)}" for build, names in found.items() if build != leads]
    more = f" and {len(others) - NAMES_MAX} further builds" if len(others) > NAMES_MAX else ""
    return Check(
        "builds",
        "warn",
        f"{first}{'other builds run' if leads else 'several builds run'}: {'; '.join(others[:NAMES_MAX])}{more}",
        "end the upgrade: first every scheduler, then the workers; moorage --version is the build of a host",
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return f"{' '.join(names[:NAMES_MAX])}{more}"


def _clocks(rows: Sequence[SchedulerRow]) -> Check | None:
    """Check that the standbys have the leader's time: the next leader continues ledger time from its host's clock.

    Return None if all of them have it, or without a standby.
    """
    wrong = [row for row in rows if abs(row.clock_off_s) > STANDBY_OFF_S_MAX]
    if not wrong:
        return None
    told = [f"{row.scheduler} is {off_by(row.clock_off_s)}" for row in wrong[:NAMES_MAX]]
    found = f"the clocks of standby schedulers differ from the leader's: {', '.join(told)}"
    return Check("clocks", "warn", found, "run chrony or ntpd on the hosts of all schedulers and nats-servers")


def off_by(seconds: float) -> str:
    """Return how much a clock differs, as text: `3s ahead`, `2h behind`."""
    return f"{age(abs(seconds) * 1000)} {'ahead' if seconds > 0 else 'behind'}"


def _buckets(row: TenantBucketsRow) -> Check:
    """What doctor says of tenants without their buckets."""
    named = ", ".join(row.tenants[:NAMES_MAX]) + (", …" if len(row.tenants) > NAMES_MAX else "")
    found = f"no bucket for files, results or checkpoints can be made now for {named}: {row.trouble}"
    return Check("buckets", "warn", found, row.next or "the log of the scheduler says more")


def follows(behind: int, gaps: list[list[int]], trouble: str = "", fix: str = "") -> Check:
    """Check that what follows the ledger has read it; `gaps` are from and until when, in ms, it missed how many
    records. With a `trouble` it cannot go on now; `fix` is what to do then."""
    log = "the log of the scheduler says what stopped the follower of the ledger, or what kept it from saving"
    if trouble:
        return Check("follower", "warn", f"no history is written and no GPU time counted now: {trouble}", fix or log)
    if gaps:
        from_ms, until_ms, records = gaps[-1]
        since = f"from {utc(from_ms)} to {utc(until_ms)}" if from_ms else f"up to {utc(until_ms)}"
        found = (
            f"no history was written and no GPU time counted {since}: {many(records, 'record')} of the ledger had to "
            f"be deleted before they were read (such gaps: {len(gaps)})"
        )
        return Check("follower", "warn", found, f"{log}; moorage usage names each gap")
    if behind > BEHIND_MAX:
        found = f"history and GPU time are {behind} records behind the ledger, which keeps them until it is half full"
        return Check("follower", "warn", found, log)
    return Check("follower", "ok", "history is written and GPU time counted, without a gap")


def _ranking(rows: Sequence[SchedulerRow]) -> Check | None:
    """Say that the leader ranks hosts by `pack`, which it does without being told where the default is missing."""
    leader = next((row for row in rows if row.leads), None)
    if leader is None or leader.settings.get("ranker") != "pack":
        return None
    found = f"scheduler {leader.scheduler} ranks hosts by pack: its settings say so, or it has no package"
    return Check("ranking", "ok", f"{found} moorage.ranking with numpy for the default, fragments: its log says which")


def contained_failures(contained: ContainedFailures) -> Check:
    """Return the check of the inputs that made the leader fail, and of what it has switched off because of them."""
    told = [
        (
            "until the next term the leader ranks hosts by pack, not by the ranker that the settings name",
            contained.plain_ranker,
        ),
        (
            f"for now the leader refuses requests as those that made it fail "
            f"({', '.join(contained.refused[:NAMES_MAX])})",
            contained.refused,
        ),
        (
            "the leader refuses messages of workers whose messages made it fail "
            f"({', '.join(contained.workers[:NAMES_MAX])}), and those that failed twice until moorage uncordon",
            contained.workers,
        ),
    ]
    doing = [text for text, is_so in told if is_so]
    if not contained.counts and not doing:
        return Check("failures", "ok", "no request or report has made the leader fail")
    failed_on = ", ".join(f"{count} {what}" for what, count in contained.counts.items())
    found = "; ".join(
        [*([f"inputs on which the leader failed: {failed_on}; the leader goes on"] if contained.counts else []), *doing]
    )
    if contained.last is not None:
        found += f"; last failure: {contained.last}"
    return Check(
        "failures",
        "warn",
        found,
        "report the tracebacks in the scheduler's log as a defect of moorage; moorage dlq list shows the "
        "refused requests",
    )
