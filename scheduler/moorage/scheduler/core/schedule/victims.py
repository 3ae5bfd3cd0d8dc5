"""Chooses which running jobs to end so that a job with a better right can start: as few as possible, gangs whole.

Preemptible jobs end for any other; all else only where a setting allows it. Freed hosts belong to the job for which
they were freed (see `Verdicts.taken_back`); the ledger records that in `Job.preempts` before the first victim is asked
to end. Shared devices are left alone, and no job gets a share by preemption: ending one sharer frees no whole device.

Members of a service above its `min` end for any job that comes before it in the queue, and members of an old version
for the next one: these also where devices are shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from typing import Final, NamedTuple

from moorage.scheduler.core.ageing import Ageing
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import FROZEN, LEAVING, MAY_END, RUNS, Attempt, Job, State

#: how many hosts are compared by lost work when all of them have victims of the lowest priority; those with the most
#: open devices. Hosts with victims of a lower priority are always found
COMPARED_MAX: Final = 256
#: how many changed hosts one search reads; the rest count as last read, and follow with the next searches. A new leader
#: preempts nothing before it has read every host once
READ_MAX: Final = 2_048
#: a job that has not started this long after its victims ended loses its reserved hosts
VOID_MS: Final = 10_000
#: the priority that a preemptible job defends: any other job's is higher
LOWEST: Final = -1
#: what a member of a service above its `min` defends against a job that comes first: it ends before preemptible jobs
ABOVE: Final = -2
_NONE: Final[Mapping[int, int]] = {}


class Right(NamedTuple):
    """Why a job may end others: a higher priority, or GPUs guaranteed to its tenant that others borrow.

    With `spares`, it takes no other tenant below that tenant's guarantee: those GPUs would be taken back at once. A
    guarantee is of GPUs: a job without any is spared by none, and ends for the processors and memory that it has.
    `yields` are services behind it in the queue, with the number of their members above `min`. `only` is the job that
    it replaces: members of that job alone end.
    """

    job: Job
    priority: int
    reclaims: bool
    spares: bool = False
    yields: Mapping[int, int] = _NONE
    only: Job | None = None


class Victim:
    """What ends together: one attempt, or a whole gang.

    `cost` is the GPU milliseconds of work lost. A frozen attempt, which is not in use, costs nothing.
    """

    __slots__ = ("attempts", "cost", "gpus", "job", "priority")

    def __init__(self, attempts: tuple[Attempt, ...], priority: int, lost_ms: list[int]) -> None:
        self.attempts = attempts
        self.job = attempts[0].replica.job
        self.priority = priority
        self.gpus = sum(attempt.home.bit_count() for attempt in attempts)
        self.cost = sum(max(1, m.home.bit_count()) * max(0, ms) for m, ms in zip(attempts, lost_ms, strict=True))

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """The sort key of victims: lowest priority first, then least work lost, then number; of a service the last."""
        index = self.attempts[0].replica.index
        return (self.priority, self.cost, self.job.num, -index if self.priority == ABOVE else index)


class Choice(NamedTuple):
    """The victims, the hosts to reserve for the job that they end for, and how many of its replicas these hold."""

    victims: list[Victim]
    hosts: frozenset[int]
    replicas: int


class Preemption:
    """Chooses victims in one fleet. A job that has run for less than `runtime_ms` is no victim.

    `priority_of` is a job's own priority, without age. With `ageing`, a victim defends the effective priority with
    which it started; no job preempts by its age.
    """

    def __init__(
        self,
        fleet: Fleet,
        shape_of: Callable[[Job], Shape],
        priority_of: Callable[[Job], int],
        runtime_ms: int,
        ageing: Ageing | None = None,
    ) -> None:
        self.fleet = fleet
        self.shape_of = shape_of
        self.priority_of = priority_of
        self.runtime_ms = runtime_ms
        self.ageing = ageing
        self.compared_max = COMPARED_MAX
        self.read_max = READ_MAX
        self.ending: set[Attempt] = set()  # members of services that end already, once others serve
        # by worker number; departed hosts are removed once there are more entries than hosts
        self._read: dict[int, _Read] = {}
        self.lags = False  # whether the last search left changed hosts for the next one
        self._next = 0  # the worker number at which the next search begins to read changed hosts

    def defended(self, attempt: Attempt, began_ms: int) -> int:
        """Return the priority that another job has to exceed to end an attempt that started at `began_ms`."""
        if attempt.preemptible:
            return LOWEST
        job = attempt.replica.job
        priority = self.priority_of(job)
        return priority if self.ageing is None else self.ageing.of(priority, began_ms - job.may_start_ms)

    def read_again(self, job: Job) -> None:
        """Have the hosts read again on which a job runs, whose priority may have changed."""
        for attempt in job.attempts:
            self._read.pop(attempt.worker.num, None)

    def read(self, draft: Draft) -> dict[int, _Read] | None:
        """Return by worker number what may be ended on each host; None until every host was read once.

        At most `read_max` changed hosts are read now; others are as of their last read.
        """
        hosts = self.fleet.hosts
        if len(self._read) > len(hosts):
            self._read = {num: read for num, read in self._read.items() if num in hosts}
        read = self._read
        changed = [
            num
            for num, host in hosts.items()
            if (found := read.get(num)) is None
            or not found.settled
            or found.version != host.version
            or found.host is not host
        ]
        self.lags = len(changed) > self.read_max
        if self.lags:  # those never read first, then in turns
            changed.sort(key=lambda num: (num in read, num < self._next, num))
            changed = changed[: self.read_max]
            self._next = changed[-1] + 1
        for num in changed:
            read[num] = self._read_anew(hosts[num])
        return None if any(num not in read for num in hosts) else read

    def next_ms(self, state: State) -> float:
        """Return the ledger ms at which the next job has run for long enough to be a victim; infinity for never."""
        ends = (_began_ms(attempt, state.time_ms) + self.runtime_ms for attempt in state.attempts())
        return min((end_ms for end_ms in ends if end_ms > state.time_ms), default=math.inf)

    def _read_anew(self, host: Host) -> _Read:
        settled, found = True, dict[tuple[int, str], tuple[int, int]]()
        for attempt in host.worker.attempts.values():
            job = attempt.replica.job
            if attempt.mode > EXCLUSIVE:
                continue
            if attempt.replica.state not in RUNS:
                settled = settled and attempt.replica.state in LEAVING
                continue
            began = attempt.began_ms
            priority = self.priority_of(job) if job.gang else self.defended(attempt, began)
            key = (priority, job.tenant)
            mask, first = found.get(key, (0, began))
            found[key] = (mask | attempt.home, min(first, began))
        return _Read(host, settled, sorted((*key, *row) for key, row in found.items()))

    def choose(
        self,
        draft: Draft,
        shape: Shape,
        right: Right,
        excluded: frozenset[int],
        ending: Mapping[str, int],
        wanted: int = 1,
    ) -> Choice | None:
        """Return the cheapest victims; None if no victims make room, none are needed, or not every host was read yet.

        They make room for a gang, or for up to `wanted` replicas of another job. `ending` are GPUs by tenant that are
        ending already: still leased, but they cannot be taken back again.
        """
        if shape.mode > EXCLUSIVE and right.priority != ABOVE + 1:
            return None
        read = self.read(draft) if right.only is None else {}
        if read is None:
            return None
        wanted = max(wanted, shape.together)
        if not shape.same:
            return _Search(self, draft, shape, right, excluded, ending, wanted).run(read)
        places = self.fleet.places(shape)
        searches = [_Search(self, draft, place, right, excluded, ending, wanted) for place in places]
        if any(search.room >= shape.together for search in searches):
            return None  # there is room in one place already
        found = [choice for search in searches if (choice := search.run(read)) is not None]
        return min(found, key=_cost, default=None)

    def replacing(self, draft: Draft, new: Job, old: Job) -> list[Attempt] | None:
        """Return the members of the old version of a service whose end makes room for a replica of the new one.

        None if it could not start then either; none are needed if there is room for it.
        """
        shape, right = self.shape_of(new), Right(new, ABOVE + 1, reclaims=False, only=old)
        with self.fleet.avoiding(shape.avoid):
            found = self.choose(draft, shape, right, shape.refusing, {})
        return None if found is None else [victim.attempts[0] for victim in found.victims]


def _cost(choice: Choice) -> tuple[int, int]:
    """Return the highest priority and the lost work of victims, by which the cheapest are chosen."""
    return max(victim.priority for victim in choice.victims), sum(victim.cost for victim in choice.victims)


class _Read:
    """What may be ended on a host, as sorted rows (priority, tenant, devices, start).

    No attempt of a row defends a lower priority, and none started earlier. A `settled` read holds while the host has
    this version; others are read again with the next search.
    """

    __slots__ = ("host", "rows", "settled", "version")

    def __init__(self, host: Host, settled: bool, rows: list[tuple[int, str, int, int]]) -> None:
        self.host = host
        self.version = host.version
        self.settled = settled
        self.rows = rows


def _began_ms(attempt: Attempt, now_ms: int) -> int:
    """Return since when an attempt runs; one that does not would begin now."""
    return attempt.began_ms if attempt.replica.state in RUNS else now_ms


class _Search:
    """One search: adds one replica at a time on the host where that costs least, so that no job ends without need.

    `_level` quickly computes, for every host, the least priority that its victims could have. `_offer` then chooses
    actual victims on the hosts that may be best.
    """

    def __init__(
        self,
        policy: Preemption,
        draft: Draft,
        shape: Shape,
        right: Right,
        excluded: frozenset[int],
        ending: Mapping[str, int],
        wanted: int,
    ) -> None:
        self.policy = policy
        self.wanted = wanted
        self.draft = draft
        self.shape = shape
        self.right = right
        usable = policy.fleet.usable(shape, excluded)
        self.hosts = {host.worker.num: host for host, _ in usable if shape.driver not in host.down}
        self.given = self._given()
        if right.only is not None:
            self.hosts = {num: self.hosts[num] for num in self.given}
        self.borrowed: dict[str, int] = {}  # by tenant, GPUs that may be taken back, before this search
        self.known: dict[tuple[int, int], Victim | None] = {}
        self.chosen: dict[tuple[int, int], Victim] = {}
        self.chosen_on: dict[int, dict[tuple[int, int], Victim]] = {}  # the same by worker number
        self.taken = dict(ending)  # by tenant, GPUs that are ending
        #: whether it may lack processors or memory, so that the end of jobs without GPUs may help it
        self._lacks_more = bool(shape.cpu_milli or shape.memory_mib)
        self.rooms = {  # replicas that would fit, by worker number
            num: self._room(host, ()) if host.open or not shape.count else 0 for num, host in self.hosts.items()
        }
        self.room = sum(self.rooms.values())

    def _given(self) -> dict[int, int]:
        """Return by worker number the devices of the attempts that end whatever they defend; 0 for no devices."""
        given, jobs = dict[int, int](), [self.draft.state.jobs[num] for num in self.right.yields]
        for job in jobs if self.right.only is None else [self.right.only]:
            for attempt in job.attempts:
                host = self.hosts.get(attempt.worker.num)
                if host is not None:
                    given[host.worker.num] = given.get(host.worker.num, 0) | attempt.home
        return given

    def run(self, read: Mapping[int, _Read]) -> Choice | None:
        if self.room >= self.shape.together:  # what keeps it from starting will pass
            return None if self.right.only is None else Choice([], frozenset(), 0)
        order, scanned = self._order(read), 0
        heap: list[tuple[tuple[int, int], int, list[Victim]]] = []
        while self.room < self.wanted:
            while scanned < len(order) and (not heap or self._may_be_better(order[scanned][0], heap[0][0][0], scanned)):
                offer = self._offer(order[scanned][2])
                scanned += 1
                if offer is not None:
                    heappush(heap, offer)
            if not heap:
                break
            rank, num, _ = heappop(heap)
            now = self._offer(num)
            if now is None or now[0] != rank:  # the end of a gang has changed it meanwhile
                if now is not None:
                    heappush(heap, now)
                continue
            for victim in now[2]:
                self._take(victim)
            again = self._offer(num)
            if again is not None:
                heappush(heap, again)
        if self.room < self.shape.together:
            return None
        self.wanted = min(self.wanted, self.room)
        self._spare()
        victims = sorted(self.chosen.values(), key=lambda victim: victim.rank)
        return Choice(victims, self._held(), max(1, self.wanted // self.shape.together))

    def _may_be_better(self, level: int, best: int, scanned: int) -> bool:
        """Return whether a host may have better victims than the best so far, after `scanned` hosts."""
        return level < best or (level == best and scanned < self.policy.compared_max)

    def _order(self, read: Mapping[int, _Read]) -> list[tuple[int, int, int]]:
        """Return the hosts whose victims may make room, best first: (`_level`, minus open devices, worker number)."""
        given = {num: [(ABOVE, "", mask, 0)] for num, mask in self.given.items()}
        levels = (
            (self._level(host, [*given.get(num, ()), *(read[num].rows if read else ())]), host)
            for num, host in self.hosts.items()
        )
        return sorted((level, -host.open.bit_count(), host.worker.num) for level, host in levels if level is not None)

    def _level(self, host: Host, rows: list[tuple[int, str, int, int]]) -> int | None:
        """Return the least possible highest priority of victims that free devices for one more replica on a host.

        None if all of them free too few. Ignores whether the CPU and memory that they free are enough, and whether a
        gang may end as a whole.
        """
        shape = self.shape
        free = fit = may = 0
        rooms = -1
        for priority, tenant, mask, began in rows:
            if not self._allows(tenant, priority, began):
                continue
            if self._spares(tenant) and self._borrowed(tenant) <= 0:
                if not self._lacks_more:
                    continue
                mask = 0  # it may have jobs without GPUs
            if not shape.count:
                return priority
            if rooms < 0:
                if host.waiting:
                    return None
                fit, may = host.cls.fit(shape).mask, host.lent & ~host.shut
                free = host.open & fit
                rooms = min(host.cls.rooms(free, shape), self.rooms[host.worker.num])  # CPU may be what it lacks
            free |= mask & may & fit  # at most: frozen jobs may wait for some of them
            if host.cls.rooms(free, shape) > rooms:
                return priority
        return None

    def _allows(self, tenant: str, priority: int, began_ms: int) -> bool:
        """Return whether an attempt of this tenant with this defended priority and start may be ended."""
        if priority == ABOVE or self.right.only is not None:
            return priority == ABOVE
        if priority == LOWEST:
            return not self.right.reclaims and self.right.priority > LOWEST
        if self.draft.time_ms - began_ms < self.policy.runtime_ms:
            return False
        if self.right.reclaims:
            return tenant != self.right.job.tenant
        return priority < self.right.priority

    def _spares(self, tenant: str) -> bool:
        """Return whether this tenant may lose no more than it has borrowed."""
        return self.right.reclaims or (self.right.spares and tenant != self.right.job.tenant)

    def _borrowed(self, tenant: str) -> int:
        """Return the GPUs that a tenant has beyond its guarantee, less those that are ending."""
        found = self.borrowed.get(tenant)
        if found is None:
            found = self.borrowed[tenant] = self._beyond_guarantee(tenant)
        return found

    def _beyond_guarantee(self, tenant: str) -> int:
        """Return the same, computed anew. What its frozen attempts wait for counts: no other job gets that."""
        row, hosts = self.draft.state.read_tenant(tenant), self.policy.fleet.with_frozen.values()
        frozen = (attempt for host in hosts for attempt in host.frozen.values() if attempt.replica.job.tenant == tenant)
        waits = sum(attempt.home.bit_count() for attempt in frozen)
        return row.gpus + waits - row.guaranteed - self.taken.get(tenant, 0)

    def _room(self, host: Host, victims: Iterable[Victim]) -> int:
        """Return how many replicas fit on a host once these victims have left it."""
        shape, mine = self.shape, [m for v in victims for m in v.attempts if m.worker is host.worker]
        room = 1 << 30
        if shape.count:
            freed, fit = 0, host.cls.fit(shape).mask
            for attempt in mine:
                freed |= attempt.mask
            if shape.mode > EXCLUSIVE:  # what a sharer leaves on a device is enough for another one, as far as is known
                slots = fit & host.lent & ~host.shut
                room = sum(bool(attempt.home & slots) for attempt in mine)
            else:
                for slot, device in host.shared.items() if freed else ():
                    if sum(attempt.mask >> slot & 1 for attempt in mine) < device.users:
                        freed &= ~(1 << slot)
                room = host.cls.rooms(fit & host.opened_by(mine, freed), shape)
        if shape.cpu_milli and host.cpu_milli:
            cpu = host.cpu_left(shape, map(self._asked_by, mine))
            room = min(room, cpu // shape.cpu_milli)
        if shape.memory_mib and host.memory_mib:
            memory = host.memory_free + sum(
                self.policy.shape_of(m.replica.job).of_rank(m.replica.index).memory_mib for m in mine
            )
            room = min(room, memory // shape.memory_mib)
        return min(max(0, room), self.wanted)

    def _asked_by(self, attempt: Attempt) -> Shape:
        return self.policy.shape_of(attempt.replica.job).of_rank(attempt.replica.index)

    def _refresh(self, victim: Victim) -> None:
        for num in {attempt.worker.num for attempt in victim.attempts} & self.hosts.keys():
            self.room -= self.rooms[num]
            self.rooms[num] = self._room(self.hosts[num], self.chosen_on.get(num, {}).values())
            self.room += self.rooms[num]

    def _offer(self, num: int) -> tuple[tuple[int, int], int, list[Victim]] | None:
        """Return ((highest priority, cost), host, victims) for one more replica on a host; None if impossible."""
        host, chosen = self.hosts[num], list(self.chosen_on.get(num, {}).values())
        room = self._room(host, chosen)
        able = [v for attempt in host.worker.attempts.values() if (v := self._victim(attempt)) is not None]
        more: list[Victim] = []
        for victim in sorted({id(v): v for v in able}.values(), key=lambda victim: victim.rank):
            if _key(victim) in self.chosen or not self._may_take(victim, more):
                continue
            more.append(victim)
            if self._room(host, [*chosen, *more]) > room:
                break
        else:
            return None
        for victim in sorted(more, key=lambda victim: victim.rank, reverse=True):
            rest = [other for other in more if other is not victim]
            if self._room(host, [*chosen, *rest]) > room:
                more = rest
        return (max(v.priority for v in more), sum(v.cost for v in more)), num, more

    def _victim(self, attempt: Attempt) -> Victim | None:
        job = attempt.replica.job
        key = (job.num, -1 if job.gang else attempt.replica.index)
        if key not in self.known:
            self.known[key] = self._may_end(job, attempt)
        return self.known[key]

    def _may_end(self, job: Job, attempt: Attempt) -> Victim | None:
        draft, right, policy = self.draft, self.right, self.policy
        attempts = tuple(r.attempt for r in job.rows.values() if r.attempt is not None) if job.gang else (attempt,)
        if job is right.job or not attempts or attempt in policy.ending:
            return None
        is_given = job is right.only or job.num in right.yields
        states = MAY_END if is_given else RUNS
        if any(
            m.replica.attempt is not m or m.replica.state not in states or (m.mode > EXCLUSIVE and not is_given)
            for m in ((*attempts, attempt) if job.gang else attempts)
        ):
            return None  # it has ended, is ending, or shares a device
        lasted_ms = [draft.time_ms - _began_ms(m, draft.time_ms) for m in attempts]
        priority = ABOVE if is_given else policy.defended(attempt, draft.time_ms - max(lasted_ms))
        if not self._allows(job.tenant, priority, draft.time_ms - min(lasted_ms)):
            return None
        if is_given:
            lasted_ms = [1 for _ in attempts]  # calls are no work that is lost: as few as possible end
        elif attempt.replica.state == FROZEN:  # a gang is never frozen
            lasted_ms = [0]
        return Victim(attempts, priority, lasted_ms)

    def _may_take(self, victim: Victim, beside: Iterable[Victim]) -> bool:
        """Return whether a victim may end with those `beside`: its service keeps `min`, its tenant its guarantee."""
        if (most := self.right.yields.get(victim.job.num)) is not None:
            of_job = [each for each in (*self.chosen.values(), *beside) if each.job is victim.job]
            if len(of_job) >= most:
                return False
        name = victim.job.tenant
        if not self._spares(name) or not victim.gpus:
            return True  # no guarantee covers processors and memory
        return self._beyond_guarantee(name) - sum(v.gpus for v in beside if v.job.tenant == name) >= victim.gpus

    def _take(self, victim: Victim) -> None:
        self._choose(victim)
        name = victim.job.tenant
        self.taken[name] = self.taken.get(name, 0) + victim.gpus

    def _choose(self, victim: Victim) -> None:
        key = _key(victim)
        self.chosen[key] = victim
        for attempt in victim.attempts:
            self.chosen_on.setdefault(attempt.worker.num, {})[key] = victim
        self._refresh(victim)

    def _leave_out(self, victim: Victim) -> None:
        key = _key(victim)
        del self.chosen[key]
        for num in {attempt.worker.num for attempt in victim.attempts}:
            del self.chosen_on[num][key]
        self._refresh(victim)

    def _spare(self) -> None:
        """Drop victims that turned out not to be needed: the end of a gang may have freed enough."""
        for victim in sorted(self.chosen.values(), key=lambda victim: victim.rank, reverse=True):
            self._leave_out(victim)
            if self.room < self.wanted:
                self._choose(victim)

    def _held(self) -> frozenset[int]:
        """Return the hosts to reserve: as few as hold the job, those with most room first."""
        rooms = sorted(((room, num) for num, room in self.rooms.items()), key=lambda row: (-row[0], row[1]))
        held, left = [], self.wanted
        for room, num in rooms:
            if left > 0 and room:
                held.append(num)
                left -= room
        return frozenset(held)


def _key(victim: Victim) -> tuple[int, int]:
    return (victim.job.num, -1 if victim.job.gang else victim.attempts[0].replica.index)
