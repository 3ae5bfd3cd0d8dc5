"""The order of the queue: whether a job still waits, its sort key, and what its tenant may start.

The key is the priority, with ageing the effective priority. Guaranteed GPUs come before borrowed ones, then the
priority, then the tenant that is owed most. Equal keys are served by arrival. Placements of the current record are part
of a tenant's usage at once, so that many free GPUs are shared out in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import islice
from typing import Final

from moorage.scheduler.core.ageing import Ageing
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger import fairkeys
from moorage.scheduler.core.ledger.fairshare import GPU_MILLI, inflation, places_until, score, sharer_milli
from moorage.scheduler.core.ledger.records import MODE_NAMES, Mode, placing
from moorage.scheduler.core.ledger.state import QUEUED, Attempt, Job, Replica, State
from moorage.scheduler.core.queue import limits, models
from moorage.scheduler.core.queue.data_waits import DataWaits
from moorage.scheduler.core.queue.queue import UNBOUNDED, Group, Key, Queue
from moorage.schemas.memo import Memo
from moorage.schemas.ranges import count_of

#: the most shapes whose rate is cached; beyond it the cache is emptied
RATES_MAX: Final = 16_384


class Rates:
    """What a shape counts in thousandths of a GPU, by the resource of which it takes the largest part of the fleet.

    A job that takes a tenth of all CPU counts like a tenth of all GPUs (Ghodsi et al., "Dominant Resource Fairness",
    NSDI 2011). A sharer counts its share of compute, at least 1 / (the most sharers of its mode); its share of the
    GPU's memory does not count. Cached by shape.
    """

    def __init__(self, fleet: Fleet, known_max: int = RATES_MAX) -> None:
        self._fleet = fleet
        self._inventory = -1
        self._total = (0, 0, 0)  # devices, cpu_milli, memory_mib
        self._known: Memo[int, int] = Memo(known_max)

    def of(self, shape: Shape) -> int:
        if self._inventory != self._fleet.inventory:
            hosts = self._fleet.hosts.values()
            self._inventory = self._fleet.inventory
            self._total = (
                sum(host.lent.bit_count() for host in hosts),
                sum(host.cpu_milli for host in hosts),
                sum(host.memory_mib for host in hosts),
            )
            self._known.clear()
        rate = self._known.get(shape.index)
        if rate is None:
            rate = self._known.put(shape.index, self._of(shape))
        return rate

    def mode(self, shape: Shape) -> int:
        """Return the mode of a PLACE step; it includes the rate only where that differs from the number of devices."""
        rate = self.of(shape)
        return shape.mode if rate == GPU_MILLI * shape.count else placing(shape.mode, rate)

    def _of(self, shape: Shape) -> int:
        devices, cpu_milli, memory_mib = self._total
        whole = GPU_MILLI * max(1, devices)
        each = sharer_milli(MODE_NAMES[shape.mode], shape.compute_percent) if shape.mode > Mode.EXCLUSIVE else GPU_MILLI
        rate = each * shape.count
        if cpu_milli:
            rate = max(rate, shape.cpu_milli * whole // cpu_milli)
        if memory_mib:
            rate = max(rate, shape.memory_mib * whole // memory_mib)
        return min(rate, whole)


class Turns:
    """The order of queue groups under fair share in one pass; placements change it."""

    __slots__ = ("_at", "_rates", "_scores", "_standing", "_state", "_tenants")

    def __init__(self, state: State, rates: Rates, standing: Callable[[Group], int] | None = None) -> None:
        """`standing` returns the effective priority of a group's first job; None without ageing."""
        self._state = state
        self._rates = rates
        self._at = inflation(state.time_ms - state.counts_from_ms, state.half_life_ms)
        self._standing = standing
        self._scores: dict[str, int] = {}
        self._tenants = state.tenants

    def key(self, group: Group) -> Key:
        """Return the sort key of a queue group; it begins with 0 if its first job stays within its tenant's guarantee.

        Called for up to 20,000 groups whenever the order is made, so it makes few calls itself.
        """
        name = group.tenant
        priority = group.priority if self._standing is None else self._standing(group)
        tenant = self._state.read_tenant(name)
        points = self._scores.get(name)
        if points is None:
            points = self._score_of(name)
        within = tenant.guaranteed and tenant.gpus + group.shape.gpus <= tenant.guaranteed
        if tenant.keys is not None:
            return (0 if within else 1, -priority, points, fairkeys.score(tenant, group.fair, self._at))
        return (0 if within else 1, -priority, points)

    def borrows(self, name: str, shape: Shape) -> int:
        """Return what the key of such a group of the tenant begins with: 0 if it stays within its guarantee, else 1."""
        tenant = self._state.read_tenant(name)
        return 0 if tenant.guaranteed and tenant.gpus + shape.gpus <= tenant.guaranteed else 1

    def is_owed(self, name: str, other: str) -> bool:
        """Return whether a tenant has used less for its weight than another tenant."""
        return name != other and self._score(name) < self._score(other)

    def _score(self, name: str) -> int:
        known = self._scores.get(name)
        return self._score_of(name) if known is None else known

    def _score_of(self, name: str) -> int:
        found = self._scores[name] = score(self._tenants.get(name), self._at)
        return found

    def count(self, group: Group) -> None:
        """Let placed replicas of a group count in what their tenant uses."""
        self._scores.pop(group.tenant, None)

    def most(self, group: Group, others: tuple[Key, int] | None) -> int:
        """Return how many more replicas, or gangs, of a group may be placed in a row before `others`, another group.

        `others` is the key and first job of the group that is next; with None, `UNBOUNDED` is returned. 0 or less
        stands for none.
        """
        if others is None:
            return UNBOUNDED
        borrows, priority, mine = self.key(group)[:3]
        tenant, shape = self._state.read_tenant(group.tenant), group.shape
        theirs = others[0]
        if (borrows, priority) < theirs[:2]:
            if borrows or not shape.count:
                return UNBOUNDED
            return (tenant.guaranteed - tenant.gpus) // shape.gpus
        return places_until(theirs[2] - mine, tenant.weight, self._rates.of(shape) * shape.together, self._at)


_NOBODY: Final[frozenset[int]] = frozenset()


class QueueOrder:
    """The queue as one pass sees it.

    `overdue` are numbers of queued jobs whose deadline or latest start has passed. `left_too_soon_of` returns the
    workers whose drain would end a job (by number, at a ledger ms) too soon, `failed_of` those on which it failed to
    start; `has_failed` says whether any job failed to on a worker (by number). `barred_by_failures` returns the workers
    on which it is not to start, as jobs that do well elsewhere fail there. `data` has which wait for their data.
    """

    def __init__(
        self,
        state: State,
        fleet: Fleet,
        queue: Queue,
        ageing: Ageing | None,
        overdue: Container[int],
        left_too_soon_of: Callable[[int, int], frozenset[int]],
        failed_of: Callable[[int], frozenset[int]],
        has_failed: Callable[[int], bool],
        barred_by_failures: Callable[[int], frozenset[int]],
        data: DataWaits,
    ) -> None:
        self.state = state
        self.queue = queue
        self.ageing = ageing
        self.overdue = overdue
        self.left_too_soon_of = left_too_soon_of
        self.failed_of = failed_of
        self.has_failed = has_failed
        self.barred_by_failures = barred_by_failures
        self.data = data
        self._fleet = fleet
        self.turns: Turns  # in this pass
        #: the sort key of queue groups in this pass; equal keys are ordered by arrival
        self.key: Callable[[Group], Key]
        self.rates = Rates(fleet)
        self._ages_from: dict[int, int] = {}  # in this pass, by job: since when it waits, as the pass first saw it
        self._classes: list[int] = []  # in this pass, with ageing: the priorities of waiting jobs
        #: in this pass, by tenant: the group whose first job waits for the tenant's limit, and that job's number
        self._full: dict[str, tuple[Group, int, frozenset[int]]] = {}

    def begin(self) -> None:
        """Begin a pass with no placements counted; before the first one there are neither turns nor keys."""
        self._ages_from.clear()
        standing = None
        if self.ageing is not None:
            standing = self.standing
            self._classes = sorted({group.priority for group in self.queue.groups.values() if group.jobs})
        self.turns = Turns(self.state, self.rates, standing)
        self.key = self.turns.key

    def end(self) -> None:
        """End a pass: what it has placed counts in the ages of jobs from now on."""
        self._ages_from.clear()

    def forget_limits(self) -> None:
        """Forget which jobs wait for their tenants' limits; the pass finds that out again."""
        self._full.clear()

    def is_shared(self) -> bool:
        """Return whether jobs of several tenants wait, which fair share then orders."""
        groups = iter(self.queue.groups.values())
        first = next(groups, None)
        return first is not None and any(group.tenant != first.tenant for group in groups)

    # ------------------------------------------------------------------------------------ what still waits

    def waits(self, num: int) -> bool:
        """Return whether a job may place a replica now: none of those that ended, and none of an overdue job."""
        waiting = self.queue.waiting.get(num)
        job = self.state.jobs.get(num)
        if job is None or num in self.overdue:
            return False
        if waiting is None:
            replica = job.rows.get(0)
            return bool(job.fresh) if replica is None else self._is_due(replica)
        waiting.prune(self.state.time_ms)  # some may end in this record
        return waiting.may_any

    def to_place(self, num: int, most: int) -> int:
        """Return how many replicas, or gangs, a job that `waits` may place now; counted up to `most`."""
        waiting = self.queue.waiting.get(num)
        if waiting is None:
            return 1
        most, job = min(most, waiting.room), self.state.jobs.get(num)
        if job is None:
            return 0
        rows = (job.rows.get(index) for index in waiting.back)  # some may end in this record
        due = sum(1 for _ in islice((row for row in rows if row is not None and self._is_due(row)), most))
        return min(most, due + count_of(waiting.fresh))

    def _is_due(self, replica: Replica) -> bool:
        return replica.state == QUEUED and replica.not_before <= self.state.time_ms

    def prune(self, group: Group) -> bool:
        """Remove jobs that no longer wait from the front of a queue group. Return whether any job is left."""
        jobs = group.jobs
        while jobs and not self.waits(jobs[0]):
            jobs.popleft()
        return bool(jobs)

    def kept_from(self, draft: Draft, num: int, shape: Shape) -> frozenset[int]:
        """Return the workers excluded for this job alone now; jobs behind it in its group may start there.

        It is `barred_from` them, or sleeps there already and has no room beside that.
        """
        return self.barred_from(draft, num, shape) | self._fleet.closed_to(num, shape)

    def barred_from(self, draft: Draft, num: int, shape: Shape) -> frozenset[int]:
        """Return the workers excluded for this job alone whatever becomes free there.

        They are drained before its time limit is over, jobs fail there that do well elsewhere, its job avoids them from
        this record on, or it waits for hosts that have its data. Of a job for each worker, nothing waits for them.
        """
        if (waiting := self.queue.waiting.get(num)) is not None and waiting.pins:
            found = waiting.others  # a replica that failed where it belongs can run nowhere else
        else:
            found = self.barred_by_failures(num)
        if draft.state.windows:
            found |= self.left_too_soon_of(num, draft.time_ms)
        if draft.avoided:
            found = found.union(draft.avoided.get(num, ()))
        if shape.data and not shape.each_worker:
            found |= self.data.kept_from(num, shape, found | self.failed_of(num), draft.time_ms)
        return found

    # ------------------------------------------------------------------------------- what comes before arrival

    def standing(self, group: Group) -> int:
        """Return the effective priority of a group's first job."""
        return self.standing_of(group.priority, group.jobs[0]) if group.jobs else group.priority

    def standing_of(self, priority: int, num: int) -> int:
        """Return the effective priority of one job."""
        if self.ageing is None:
            return priority
        job = self.state.jobs.get(num)
        waited_ms = 0 if job is None else self._waited_ms(job)
        return self.ageing.standing(self._classes, priority, waited_ms)

    def next_ms(self) -> float:
        """Return the ledger ms at which age alone next lifts the first job of a group, or a budget begins anew.

        Infinity for never.
        """
        anew_ms = limits.anew_ms(self.state)
        if self.ageing is None:
            return anew_ms
        groups = [group for group in self.queue.groups.values() if group.jobs]
        classes, now_ms = sorted({group.priority for group in groups}), self.state.time_ms
        found = anew_ms
        for group in groups if len(classes) > 1 else ():
            if (job := self.state.jobs.get(group.jobs[0])) is not None:
                from_ms = job.waits_from_ms
                found = min(found, from_ms + self.ageing.rises_ms(classes, group.priority, now_ms - from_ms))
        return found

    def aged_of(self, priority: int, num: int) -> int:
        """Return a job's priority with age, even if no waiting job has exactly that priority."""
        if self.ageing is None:
            return priority
        job = self.state.jobs.get(num)
        return priority if job is None else self.ageing.of(priority, self._waited_ms(job))

    def _waited_ms(self, job: Job) -> int:
        """Return for how long a job has waited; what it places in a pass does not take its age for the next ones."""
        return self.state.time_ms - self._ages_from.setdefault(job.num, job.waits_from_ms)

    def turn_of(self, tenant: str) -> tuple[int, int] | None:
        """Return (place, number of tenants) of a tenant among those with waiting jobs; place 1 is next.

        None before a leader's first record, which begins to count usage, or if the tenant has no queued job. Reads
        every group, so it is for questions, not for each record.
        """
        if not self.state.half_life_ms:
            return None
        turns = Turns(self.state, self.rates, self.standing if self.ageing is not None else None)
        firsts: dict[str, tuple[Key, int]] = {}
        for group in self.queue.groups.values():
            if group.jobs:
                key = turns.key(group), group.jobs[0]
                firsts[group.tenant] = min(key, firsts.get(group.tenant, key))
        mine = firsts.get(tenant)
        return None if mine is None else (1 + sum(first < mine for first in firsts.values()), len(firsts))

    # ------------------------------------------------------------------------------------ limits of tenants

    def room(self, group: Group) -> float:
        """Return how many placements of this queue group its tenant's limits allow: infinity without a limit of them,
        -1 if it is held.

        It is 0 while an earlier job of the tenant waits for a limit of what these need too: otherwise small jobs would
        starve a big one.
        """
        full = self._full.get(group.tenant)
        room = self.room_of(group.tenant, group.shape, group.fair)
        if full is None or not full[0].jobs or self._comes_before(group, full[0]):
            return room
        needs = limits.needs(group.shape)
        held_up = any(needs[part] for part in full[2] if part < limits.BUDGET)
        return min(room, 0) if held_up or self._wants_alike(group, full[0], full[2]) else room

    def _wants_alike(self, group: Group, first: Group, parts: frozenset[int]) -> bool:
        """Return whether a group needs GPUs of a model of which the first one waits for more under its limit."""
        if limits.MODELS not in parts:
            return False
        short = models.short(self._fleet, self.state.read_tenant(first.tenant), first.shape)
        return models.must_take(self._fleet, group.shape, short)

    def room_of(self, tenant: str, shape: Shape, key: str = "") -> float:
        """Return how many placements of a shape a tenant's limits allow, ignoring jobs that wait for them.

        Infinity without a limit of them, -1 if the tenant is held.
        """
        row = self.state.read_tenant(tenant)
        if row.hold is not None:
            return -1
        room = limits.room(self.state, row, shape)
        if self.state.by_model:
            room = min(room, models.room(self._fleet, row, shape))
        if row.limits is not None and row.limits.running_key and row.keys is not None:
            return min(room, fairkeys.room(row, key, shape.ranks))
        return room

    def most_ranks(self, num: int, shape: Shape) -> int:
        """Return how many ranks a gang that takes as many as have room may have under its tenant's limits now."""
        job = self.state.jobs[num]
        tenant = self.state.read_tenant(job.tenant)
        found = limits.most_ranks(self.state, tenant, shape, job.fair)
        return int(min(found, models.most_ranks(self._fleet, tenant, shape))) if models.is_limited(tenant) else found

    def is_by_model(self, tenant: str) -> bool:
        """Return whether a tenant has a limit of GPUs of a model, which each placement may come under or not."""
        return tenant in self.state.by_model

    def closed_by_limits(self, tenant: str, shape: Shape) -> frozenset[int]:
        """Return the hosts with models of which a tenant's limits leave too few for a shape, and those with too few of
        the counters that it takes of its host."""
        lacking = self._fleet.lacking(shape) if shape.counts else _NOBODY
        if tenant not in self.state.by_model:
            return lacking
        return models.closed(self._fleet, self.state.read_tenant(tenant), shape) | lacking

    def short_of_models(self, tenant: str, shape: Shape) -> dict[str, int]:
        """Return of which models that a shape must have its tenant's limits leave too few, with what it needs."""
        if tenant not in self.state.by_model:
            return {}
        short = models.short(self._fleet, self.state.read_tenant(tenant), shape)
        return short if short and models.must_take(self._fleet, shape, short) else {}

    def short_of(self, tenant: str, shape: Shape) -> list[int]:
        """Return of which parts of its limits a tenant has too little left for a placement of a shape."""
        return limits.short(self.state, self.state.read_tenant(tenant), shape)

    def goes_first(self, group: Group) -> bool:
        """Return whether no earlier job of the tenant waits for GPUs under its limit."""
        full = self._full.get(group.tenant)
        is_held_up = full is not None and full[0].jobs and limits.GPUS in full[2]
        return not is_held_up or full is None or self._comes_before(group, full[0])

    def _comes_before(self, group: Group, other: Group) -> bool:
        if not group.jobs:
            return False
        return (self.key(group), group.jobs[0]) < (self.key(other), other.jobs[0])

    def may(self, group: Group) -> bool:
        """Return whether the tenant may start the first job of its group now."""
        return self.room(group) >= 1

    def may_lease(self, tenant: str, gpus: int, attempt: Attempt) -> bool:
        """Return whether a tenant may lease so many GPUs more for an attempt that is frozen."""
        row = self.state.read_tenant(tenant)
        if row.hold is not None or (row.gpus_max and row.gpus + gpus > row.gpus_max):
            return False
        return not models.is_limited(row) or models.has_room_for(row, attempt, {})

    def over_limit(self, group: Group) -> None:
        """Remember a queue group whose first job waits for its tenant's limit and holds up the tenant's later jobs.

        Only the first such group of a tenant in a pass is remembered, with the parts of which it needs more than is
        left.
        """
        parts = limits.HOLDING_UP.intersection(self.short_of(group.tenant, group.shape))
        if not parts:
            by_model = self.short_of_models(group.tenant, group.shape)
            parts = frozenset((limits.MODELS if by_model else limits.GPUS,))
        self._full.setdefault(group.tenant, (group, group.jobs[0], parts))

    def waits_for_limit(self, tenant: str) -> int | None:
        """Return the number of the tenant's first job that its limit kept waiting in the last pass; None for none."""
        full = self._full.get(tenant)
        return full[1] if full is not None else None
