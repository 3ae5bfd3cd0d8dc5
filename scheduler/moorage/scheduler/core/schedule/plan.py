"""The plan: for which job that waits too long hosts are reserved, which hosts, and from when on it may start there.

A stream of small jobs must not starve a big one. So the first in order of the jobs that have waited longer than
`reserve_after` gets the hosts on which it will fit soonest: they are excluded for all other jobs until it starts, but
for those that surely end before (backfill; Lifka, "The ANL/IBM SP Scheduling System", 1995). A job of higher priority
is first once it is overdue itself, and then has the reservation.

`plan` is computed from nothing: from the queue, the fleet, what runs there and the time. So it can be made again at any
moment and by any leader, and who asks why finds the whole answer here. The answer before it only says which job is
looked at in any case, which gang keeps what it has, and for how long a job has fitted nowhere.

*A minute for a job that fits nowhere.* A worker that restarts, or a small job of unknown end on an emptied host, must
not undo what was emptied. So a job keeps the hosts that it had, for a minute, and a later job of its order gets none.

*Gangs keep what they have.* Several hosts are seldom empty together. Under fair share a gang over several hosts would
lose them each time to a tenant that is owed more at that moment. So it keeps the reservation against all of its class.

*Whole hosts first.* Requests that need whole hosts get room only through a reservation; for smaller ones room appears
by itself. So of equal jobs those that need whole hosts go first. A smaller one goes before them once it has waited as
many times as long as the first of them as the fleet has hosts, and before those that came a week later, however many
come.

*Those that have waited alike.* On a loaded fleet nearly all that waits is overdue, and by shares alone a large job of a
tenant that uses its share would never be first. So a job is passed over while it has waited less than four fifths as
long as another of its class that needs whole hosts, or none, as it does.

*Many hosts a little later.* Hosts reserved for a gang stand idle until the last of them is free. So a gang that needs n
of H hosts, and became first a time t after `reserve_after`, lets others use the hosts for another 3/2 t (n - 1) / H. It
became first when the last job for whole hosts that goes before it started, as what runs tells; if a job of its shape
started before that, t counts from then, so that gangs that came together start at even intervals. It is the slack that
Talby and Feitelson give to all jobs ("Supporting Priorities and Improving Utilization of the IBM SP Scheduler Using
Slack-Based Backfilling", 1999), in proportion to what a reservation costs. Where tenants have shares there is none: the
tenants that went before a gang have had more than their share already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from heapq import nsmallest
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.core.queue.limits import is_limited
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import Group, Key
from moorage.scheduler.core.schedule.runtime import Estimates
from moorage.scheduler.core.schedule.soonest import soonest

#: ledger ms between two plans, and for each host of the fleet if that is more, since each plan walks the fleet
STEP_MS: Final = 1_000
STEP_MS_A_HOST: Final = 1
#: while nothing else happens, a reservation is looked at again after this part of the time until its start
LATER_PART: Final = 8
#: under fair share it is looked at again each time usage has decayed by one such part of its half-life
OWED_PART: Final = 512
#: a job that fits nowhere keeps the hosts that it had, and is not passed over for a later one, for so many ms
SHORT_MS: Final = 60_000
#: of a `Key`: before any tenant's score
MOST_OWED: Final = -1
#: a smaller job goes before those for whole hosts that came so many ms later
PASSED_MS: Final = 7 * 86_400_000
#: a job is passed over while it has waited less than this part of the wait of another one
ALIKE: Final = (4, 5)
#: the slack of a gang: its wait, times the idle share of the fleet, times 3/2
LETS_ON: Final = (3, 2)
#: the most queue groups that are scanned for overdue jobs, and again for those that need whole hosts
GROUPS_MAX: Final = 512
#: the most kinds of overdue jobs whose hosts are searched for one plan: half of them the first in order, half in turn
SEARCHES_MAX: Final = 8


class Reservation(NamedTuple):
    """Hosts kept free for a job's next replica, and for jobs of its priority and shape, of which the first goes first.

    They are expected to hold it at the ledger ms `start_ms`. Since `short_ms` they could not; 0 if they can.
    """

    num: int
    replica: int
    tenant: str
    priority: int
    shape: Shape
    hosts: frozenset[int]
    start_ms: int
    short_ms: int = 0
    owner: str = ""  # of its job's queue group

    @property
    def is_wide(self) -> bool:
        """Whether it is for a gang over several hosts."""
        return self.shape.is_gang and len(self.hosts) > 1


class Answer(NamedTuple):
    """A plan: the reservation, and the ledger ms from which on time alone may give another one; infinity for never.

    `had` are, by job number, the reservations that waiting jobs had last, and those that fit nowhere, perhaps without
    hosts. `then` is the claim that comes next, of jobs that are not equal to the reserved one. With `is_held_up`, a job
    would have got hosts if an earlier one had not been given a minute.
    """

    reservation: Reservation | None
    until_ms: float
    had: Mapping[int, Reservation] = {}
    then: Claim | None = None
    is_held_up: bool = False


class Known(NamedTuple):
    """What a plan is computed from, besides the record that is being built."""

    fleet: Fleet
    order: QueueOrder
    estimates: Estimates
    could_ever: Callable[[Shape], bool]
    priority_of: Callable[[Job], int]
    patience_ms: int

    @property
    def step_ms(self) -> int:
        """Ledger ms between two plans."""
        return max(STEP_MS, STEP_MS_A_HOST * len(self.fleet.hosts))


class Claim(NamedTuple):
    """The first job of a queue group, which is overdue. The smallest claim goes first."""

    key: Key
    later: bool  # needs no whole host
    num: int
    since_ms: int  # the ledger ms from which its waiting counts
    group: Group
    leaving: frozenset[int]  # hosts that drains exclude for it


NOTHING: Final = Answer(None, math.inf)


def plan(known: Known, draft: Draft, last: Reservation | None, last_had: Mapping[int, Reservation]) -> Answer:
    """Return the reservation for the first overdue job, in order, that some hosts will hold at a known time.

    `last` is the reservation now, and `last_had` what the answer before had. `QueueOrder` has begun the pass.
    """
    now_ms = draft.time_ms
    keeps = last.num if last is not None and last.is_wide else -1
    claims, until_ms = _claims(known, draft, last, keeps)
    claims, later_ms = _alike(known, claims, last_had, keeps, now_ms)
    until_ms = min(until_ms, later_ms)
    searched, in_turns = _searched(known, claims, last, now_ms)
    if draft.state.windows or in_turns:
        until_ms = min(until_ms, now_ms + STEP_MS)
    had = {claim.num: last_had[claim.num] for claim in claims if claim.num in last_had}
    short = set[Key]()  # of claims that fit nowhere, and have their minute
    over_ms = math.inf  # when the first of these minutes is over
    for at, claim in enumerate(searched):
        with known.fleet.avoiding(claim.group.shape.avoid):
            found = _hosts_for(known, claim, had.get(claim.num), now_ms)
        if found.short_ms:
            had[claim.num] = found
            if now_ms - found.short_ms >= SHORT_MS:
                continue
        elif claim.num in had and had[claim.num].short_ms:
            had[claim.num] = had[claim.num]._replace(short_ms=0)
        if not found.hosts:
            if at < SEARCHES_MAX // 2 or not in_turns:
                short.add(claim.key)
                over_ms = min(over_ms, found.short_ms + SHORT_MS)
            continue
        if claim.key in short:
            return Answer(None, min(until_ms, over_ms), had, is_held_up=True)
        due_ms = _due_ms(known, claim)
        if due_ms > now_ms:
            return Answer(None, min(until_ms, due_ms), had)
        again_ms = STEP_MS if found.short_ms else max(STEP_MS, (found.start_ms - now_ms) // LATER_PART)
        if known.order.is_shared():
            again_ms = min(again_ms, max(STEP_MS, draft.state.half_life_ms // OWED_PART))
        had[claim.num] = found
        return Answer(found, min(until_ms, now_ms + again_ms), had, _next(claims, claim, had, now_ms))
    return Answer(None, min(until_ms, over_ms), had)


def _next(claims: list[Claim], first: Claim, had: Mapping[int, Reservation], now_ms: int) -> Claim | None:
    """Return the claim that comes after the first one, but those of its equals, and those that are passed over."""
    for claim in claims:
        is_equal = claim.group.shape is first.group.shape and claim.group.priority == first.group.priority
        short_ms = had[claim.num].short_ms if claim.num in had else 0
        if claim > first and not is_equal and not (short_ms and now_ms - short_ms >= SHORT_MS):
            return claim
    return None


def _claims(known: Known, draft: Draft, last: Reservation | None, keeps: int) -> tuple[list[Claim], float]:
    """Return the overdue first jobs of the queue groups, in order, and when the next job becomes overdue.

    `last` is the last reservation. The job `keeps`, a gang over several hosts that has it, goes before those of its
    class that are owed more.
    """
    order, found, next_ms = known.order, list[Claim](), math.inf
    whole: dict[Key, int] = {}  # since when the first that needs whole hosts waits
    needing: dict[int, bool] = {}  # by shape, whether it needs whole hosts
    least = _smallest_host(known.fleet)
    for group in _likely(known, last):
        job = draft.state.jobs.get(group.jobs[0]) if order.prune(group) else None
        if job is None:
            continue
        since_ms = job.waits_from_ms
        overdue_ms = since_ms + known.patience_ms + 1
        if overdue_ms > draft.time_ms:
            next_ms = min(next_ms, overdue_ms)
        elif order.may(group):
            key, shape = order.key(group), group.shape
            if job.num == keeps:
                key = (*key[:2], MOST_OWED)
            if (needs := needing.get(shape.index)) is None:
                needs = needing[shape.index] = shape.gpus >= least and fills_hosts(known.fleet, shape)
            later = not needs
            barred = order.barred_from(draft, job.num, shape) | order.closed_by_limits(group.tenant, shape)
            found.append(Claim(key, later, job.num, since_ms, group, barred))
            if not later:
                whole[key] = min(whole.get(key, since_ms), since_ms)
    for at, claim in enumerate(found):
        if claim.later and _has_been_passed(known, claim, whole.get(claim.key), draft.time_ms):
            found[at] = claim._replace(later=False)
    return sorted(found), next_ms


def _alike(
    known: Known, claims: list[Claim], last_had: Mapping[int, Reservation], keeps: int, now_ms: int
) -> tuple[list[Claim], float]:
    """Return the claims but those that have not waited `ALIKE` as long as others, and when the first of these has.

    Others are of the same class, and need whole hosts alike. Those that are passed over do not count, nor those of a
    tenant with a limit: for that they may have waited. No lower class gets what it leaves: before one, they all stand.
    """
    if len(claims) < 2:
        return claims, math.inf
    since = dict[tuple[int, ...], int]()
    for claim in claims:
        kind, since_ms = (*claim.key[:2], claim.later), claim.since_ms
        if since_ms < since.get(kind, math.inf) and _counts(known, claim, last_had.get(claim.num), now_ms):
            since[kind] = since_ms
    found, waiting, next_ms = list[Claim](), list[Claim](), math.inf
    for claim in claims:
        alike_ms = claim.since_ms
        first_ms = since.get((*claim.key[:2], claim.later), alike_ms)
        if first_ms < alike_ms:
            alike_ms += (alike_ms - first_ms) * ALIKE[0] // (ALIKE[1] - ALIKE[0])
        if waiting and claim.key[:2] != waiting[-1].key[:2]:
            found += waiting
            waiting.clear()
        if alike_ms <= now_ms or claim.num == keeps:
            found.append(claim)
        else:
            waiting.append(claim)
            next_ms = min(next_ms, alike_ms)
    return found, next_ms


def _counts(known: Known, claim: Claim, had: Reservation | None, now_ms: int) -> bool:
    """Return whether others are passed over for a claim that has waited longer."""
    is_passed = had is not None and had.short_ms and now_ms - had.short_ms >= SHORT_MS
    tenant = known.order.state.read_tenant(claim.group.tenant)
    return not is_passed and not is_limited(tenant) and known.could_ever(claim.group.shape)


def _has_been_passed(known: Known, claim: Claim, whole_ms: int | None, now_ms: int) -> bool:
    """Return whether a claim that needs no whole host goes before those that do; the first waits since `whole_ms`."""
    if whole_ms is None:
        return False
    waited_ms, others_ms = (now_ms - since - known.patience_ms for since in (claim.since_ms, whole_ms))
    return whole_ms - claim.since_ms > PASSED_MS or waited_ms > len(known.fleet.hosts) * others_ms


def _likely(known: Known, last: Reservation | None) -> list[Group]:
    """Return the queue groups whose first job may be the first claim.

    All of them; if there are more than `GROUPS_MAX`, the first ones in order, plus the first ones that need whole
    hosts, and that of the last reservation. With as many shapes as jobs, a scan of all groups each second would hold up
    the leader.
    """
    queue = known.order.queue
    if len(queue.groups) <= GROUPS_MAX:
        return list(queue.groups.values())
    rows = [(known.order.key(group), group.jobs[0], group) for group in queue.groups.values() if group.jobs]
    least = _smallest_host(known.fleet)
    whole = [row for row in rows if row[2].shape.gpus >= least]
    likely = nsmallest(GROUPS_MAX, rows) + nsmallest(GROUPS_MAX, whole)
    found = {group: None for _, _, group in likely}
    had = None if last is None else queue.group_of(last.priority, last.shape, last.owner)
    return list(found if had is None else found | {had: None})


def _smallest_host(fleet: Fleet) -> int:
    """Return how many GPUs the hosts with the fewest have; 0 if none has any. Less fills no host."""
    return min((len(cls.devices) for cls in fleet.classes.values() if cls.devices), default=0)


def _searched(known: Known, claims: list[Claim], last: Reservation | None, now_ms: int) -> tuple[list[Claim], bool]:
    """Return the claims whose hosts are searched, one of each kind, and whether others have their turn later.

    Of too many kinds these are the first, and some in turn. Jobs that no hosts could hold must neither hide nor delay a
    later one for ever. They have no turn: what could hold them comes with an event.
    """
    kinds: dict[tuple[int, frozenset[int]], Claim] = {}
    for claim in claims:
        if known.could_ever(claim.group.shape):
            kinds.setdefault((claim.group.shape.index, claim.leaving), claim)
    found, half = list(kinds.values()), SEARCHES_MAX // 2
    if len(found) <= SEARCHES_MAX:
        return found, False
    rest, at = found[half:], now_ms // known.step_ms * half
    turn = {rest[(at + more) % len(rest)].num for more in range(half)}
    if last is not None:
        turn.add(last.num)
    return found[:half] + [claim for claim in rest if claim.num in turn], True


def _hosts_for(known: Known, claim: Claim, had: Reservation | None, now_ms: int) -> Reservation:
    """Return the reservation of a job where it fits soonest; without a place for it now, where it was, if anywhere."""
    group, shape = claim.group, claim.group.shape
    excluded = claim.leaving | shape.refusing
    found, short_ms = _soonest(known, shape, excluded, now_ms, claim.num, had), 0
    if found is None:
        is_same = had is not None and had.shape is shape and had.priority == group.priority
        found = (had.hosts, had.start_ms) if had is not None and is_same else (frozenset(), now_ms)
        short_ms = had.short_ms or now_ms if had is not None and is_same else now_ms
    first = known.order.queue.first(claim.num)
    return Reservation(claim.num, first, group.tenant, group.priority, shape, *found, short_ms, group.owner)


def _soonest(
    known: Known, shape: Shape, excluded: frozenset[int], now_ms: int, num: int, had: Reservation | None
) -> tuple[frozenset[int], int] | None:
    """Return `soonest`; of a gang that stays in one place, for the place where that is first.

    The place that it had is left only for one where it starts in less than half the time: jobs that outlive their
    estimates would send it to and fro for ever.
    """
    best: tuple[int, frozenset[int], int] | None = None
    for place in known.fleet.places(shape):
        found = soonest(known.fleet, place, excluded, known.estimates, now_ms, num)
        if found is not None:
            hosts, start_ms = found
            wait_ms = start_ms - now_ms
            had_it = had is not None and had.shape is shape and bool(had.hosts & hosts)
            if best is None or wait_ms // (1 + had_it) < best[0]:
                best = wait_ms // (1 + had_it), hosts, start_ms
    return None if best is None else best[1:]


def _due_ms(known: Known, claim: Claim) -> int:
    """Return from when on hosts are reserved for the first claim: later than now for a gang that lets others go on."""
    needed, of = hosts_needed(known.fleet, claim.group.shape)
    if known.order.is_shared() or not 1 < needed <= of:
        return known.order.state.time_ms
    overdue_ms = claim.since_ms + known.patience_ms
    starts = list(_starts_before(known, claim))
    first_ms = max((at for at, _ in starts), default=overdue_ms)
    alike_ms = max((at for at, is_alike in starts if is_alike and at < first_ms), default=overdue_ms)
    waited_ms, (times, by) = max(0, first_ms - max(overdue_ms, alike_ms)), LETS_ON
    return first_ms - (-waited_ms * (needed - 1) * times // (of * by))


def _starts_before(known: Known, claim: Claim) -> Iterator[tuple[int, bool]]:
    """Yield when each running job for whole hosts that goes before a claim started, and whether it asks alike."""
    num, group = claim.num, claim.group
    for host in known.fleet.hosts.values():
        for attempt in host.worker.attempts.values():
            job = attempt.replica.job
            if job.num < num and known.priority_of(job) >= group.priority:
                runs_as = known.estimates.runs_as(attempt)
                if runs_as.shape.gpus >= len(host.cls.devices):
                    yield attempt.began_ms, runs_as.shape is group.shape


def _sizes(fleet: Fleet, shape: Shape) -> Iterator[tuple[int, int]]:
    """Yield (GPUs of a host, number of hosts) for each class that could run the shape."""
    for cls, _ in fleet.capable(shape):
        yield len(cls.devices), len(cls.hosts)


def fills_hosts(fleet: Fleet, shape: Shape) -> bool:
    """Return whether the shape asks for as many GPUs at once as the largest host that could run it has, or more."""
    most = max((gpus for gpus, _ in _sizes(fleet, shape)), default=0)
    return 0 < most <= shape.gpus


def needs_whole_hosts(fleet: Fleet, shape: Shape) -> bool:
    """Return whether a shape needs whole hosts: the smallest host is not too large for it, and `fills_hosts`."""
    return shape.gpus >= _smallest_host(fleet) and fills_hosts(fleet, shape)


def hosts_needed(fleet: Fleet, shape: Shape) -> tuple[int, int]:
    """Return how many empty hosts the shape needs at least, and how many hosts could run it; zeros if none could."""
    each = max((cls.rooms(fit.mask, shape) for cls, fit in fleet.capable(shape)), default=0)
    return (-(-shape.together // each) if each else 0), sum(hosts for _, hosts in _sizes(fleet, shape))
