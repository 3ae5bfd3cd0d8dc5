"""Which jobs to end so that a job of more right may start: as few as free what it needs, gangs whole.

Off unless the settings allow it. What is freed belongs to the job that it was freed for (see `Reserving.taken_back`),
and the ledger says so before the first victim is asked to end: `Job.preempts`. Devices that are shared are left alone,
and no job gets a share by preemption: the end of one sharer frees no whole device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from typing import Final, NamedTuple

from moorage.scheduler.core.ageing import Ageing
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import EXCLUSIVE, Host
from moorage.scheduler.core.schedule.runtime import began_ms
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import AT_MS, CANCELLING, ENDING, FENCE, PLACED, REPLICA, RUNNING, STATE, Job, Member

#: hosts whose victims are compared by the work that is lost, where all of them have the lowest priority that there is;
#: those with most devices open. Hosts with victims of a lower priority are found wherever they are
COMPARED_MAX: Final = 256
#: hosts whose members are read anew in one search, of those that changed; the others of those count as they were, and
#: are read with the next searches. A new leader ends no job for another before it has read every host once
READ_MAX: Final = 2_048
#: a job that has not started so long after its victims ended gives the hosts up
VOID_MS: Final = 10_000
_LEAVING: Final = frozenset((ENDING, CANCELLING))


class Right(NamedTuple):
    """What lets a job end others: a priority above theirs, or GPUs guaranteed to its tenant that others borrow.

    A tenant that `borrows` takes no other one below its guarantee by priority: that one would take it back at once.
    """

    job: Job
    priority: int
    reclaims: bool
    borrows: bool = False  # its tenant would have more than its guarantee, and those may be taken back


class Victim:
    """What ends together: a member, or all of a gang. `cost` is the GPU milliseconds of work that are lost."""

    __slots__ = ("cost", "gpus", "job", "members", "priority")

    def __init__(self, members: tuple[Member, ...], priority: int, lasted_ms: list[int]) -> None:
        self.members = members
        self.job = members[0].replica.job
        self.priority = priority
        self.gpus = sum(member.mask.bit_count() for member in members)
        self.cost = sum(max(1, m.mask.bit_count()) * max(0, ms) for m, ms in zip(members, lasted_ms, strict=True))

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """Return the key by which victims are chosen: the lowest priority, then the least work lost, then by number."""
        return (self.priority, self.cost, self.job.num, self.members[0].replica.index)


class Choice(NamedTuple):
    """The victims, and the hosts that are held for the job that they end for."""

    victims: list[Victim]
    hosts: frozenset[int]


class Preemption:
    """Over one fleet. `priority_of` is a job's own or an operator's, `runtime_ms` what everybody may run in peace.

    With `ageing` a victim defends the priority that it counted with when it began; no job preempts by its age.
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
        self._read: dict[int, _Read] = {}  # by worker number; hosts that are gone are left out once there are more
        self._reprioritized = -1
        self._next = 0  # the worker number from which on changed hosts are read next

    def defended(self, job: Job, began_ms: int) -> int:
        """The priority that another has to exceed to end a job that began then."""
        priority = self.priority_of(job)
        return priority if self.ageing is None else self.ageing.of(priority, began_ms - job.accepted_ms)

    def read(self, draft: Draft) -> dict[int, _Read] | None:
        """What runs on each host by priority, of hosts that changed since as it was; None until all were read once."""
        hosts = self.fleet.hosts
        if self._reprioritized != draft.state.reprioritized:
            self._reprioritized = draft.state.reprioritized
            for known in self._read.values():
                known.settled = False
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
        if len(changed) > self.read_max:  # those never read first, then in turns
            changed.sort(key=lambda num: (num in read, num < self._next, num))
            changed = changed[: self.read_max]
            self._next = changed[-1] + 1
        begins = _Begins(draft.time_ms)
        for num in changed:
            read[num] = self._read_anew(draft, hosts[num], begins)
        return None if any(num not in read for num in hosts) else read

    def _read_anew(self, draft: Draft, host: Host, begins: _Begins) -> _Read:
        known, seq = self._read.get(host.worker.num), draft.state.seq
        # what a record changes is in the fleet before it is in the ledger's members: it is read again with a later one
        settled = known is not None and known.host is host and known.version == host.version and known.seq < seq
        found: dict[tuple[int, str], tuple[int, int]] = {}
        for member in host.worker.members.values():
            job = member.replica.job
            if member.mode > EXCLUSIVE or member.mask & host.twice:
                continue  # the end of a guest leaves its devices with the frozen job
            if member.replica.state != RUNNING:
                settled = settled and member.replica.state in _LEAVING
                if draft.replica(member.replica).state != RUNNING:  # else it begins to run with this record
                    continue
            began = begins.of(member)
            key = (self.priority_of(job) if job.gang else self.defended(job, began), job.tenant)
            mask, first = found.get(key, (0, began))
            found[key] = (mask | member.mask, min(first, began))
        return _Read(host, seq, settled, sorted((*key, *row) for key, row in found.items()))

    def choose(
        self, draft: Draft, shape: Shape, right: Right, excluded: frozenset[int], ending: Mapping[str, int]
    ) -> Choice | None:
        """The cheapest victims found; None where even all of them would not make room, or none is needed.

        `ending` are the GPUs by tenant that end for others already: still leased, and no more to be taken back.
        """
        if shape.mode > EXCLUSIVE:
            return None
        read = self.read(draft)
        if read is None:
            return None
        search = _Search(self, draft, shape, right, excluded, ending)
        return search.run(read)


class _Read:
    """What may end on a host as of a record: rows of a priority, a tenant, devices and a beginning, in order.

    The priority is at most the one that these members defend; they began at that ledger ms or later. It holds while the
    host has this version if it is `settled`: else it is read again with the next search.
    """

    __slots__ = ("host", "rows", "seq", "settled", "version")

    def __init__(self, host: Host, seq: int, settled: bool, rows: list[tuple[int, str, int, int]]) -> None:
        self.host = host
        self.version = host.version
        self.seq = seq
        self.settled = settled
        self.rows = rows


class _Begins:
    """As `began_ms`, of many members that run: the story of a job of several replicas is read once for all of them.

    A member that begins to run with the record in hand begins now: the ledger's story does not tell it yet.
    """

    __slots__ = ("_now_ms", "_of_job")

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self._of_job: dict[int, dict[tuple[int, int], int]] = {}

    def of(self, member: Member) -> int:
        job = member.replica.job
        if member.replica.state != RUNNING:
            return self._now_ms
        if len(job.replicas) == 1:
            return began_ms(member, self._now_ms)
        found = self._of_job.get(job.num)
        if found is None:
            found = self._of_job[job.num] = {
                (row[REPLICA], row[FENCE]): row[AT_MS]
                for row in job.story
                if row[STATE] == RUNNING or row[STATE] == PLACED
            }
        return found.get((member.replica.index, member.fence), self._now_ms)


class _Search:
    """One replica more on one host after the other, where that costs least, so that no job ends without need.

    Every host is scanned for the least priority that its victims could have (`_level`), which is quick; the victims
    themselves are chosen (`_offer`) on as many hosts as may have the best.
    """

    def __init__(
        self,
        policy: Preemption,
        draft: Draft,
        shape: Shape,
        right: Right,
        excluded: frozenset[int],
        ending: Mapping[str, int],
    ) -> None:
        self.policy = policy
        self.draft = draft
        self.shape = shape
        self.right = right
        self.hosts = {
            num: host
            for cls, _ in policy.fleet.capable(shape)
            for bucket in cls.buckets
            for num, host in bucket.items()
            if num not in excluded
        }
        self.begins = _Begins(draft.time_ms)
        self.borrowed: dict[str, int] = {}  # GPUs by tenant that may be taken back, before this search
        self.known: dict[tuple[int, int], Victim | None] = {}
        self.chosen: dict[tuple[int, int], Victim] = {}
        self.chosen_on: dict[int, dict[tuple[int, int], Victim]] = {}  # the same, by the hosts that they leave
        self.taken = dict(ending)  # GPUs that end of each tenant
        self.rooms = {  # replicas that would fit
            num: self._room(host, ()) if host.open or not shape.count else 0 for num, host in self.hosts.items()
        }
        self.room = sum(self.rooms.values())

    def run(self, read: Mapping[int, _Read]) -> Choice | None:
        if self.room >= self.shape.together:
            return None  # it fits as things are: what keeps it from there will be gone
        order, scanned = self._order(read), 0
        heap: list[tuple[tuple[int, int], int, list[Victim]]] = []
        while self.room < self.shape.together:
            while scanned < len(order) and (not heap or self._may_be_better(order[scanned][0], heap[0][0][0], scanned)):
                offer = self._offer(order[scanned][2])
                scanned += 1
                if offer is not None:
                    heappush(heap, offer)
            if not heap:
                break
            rank, num, _ = heappop(heap)
            now = self._offer(num)
            if now is None or now[0] != rank:  # the end of a gang has changed it
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
        self._spare()
        return Choice(sorted(self.chosen.values(), key=lambda victim: victim.rank), self._held())

    def _may_be_better(self, level: int, best: int, scanned: int) -> bool:
        """Whether a host may have better victims than the best found on so many hosts before it."""
        return level < best or (level == best and scanned < self.policy.compared_max)

    def _order(self, read: Mapping[int, _Read]) -> list[tuple[int, int, int]]:
        """The hosts where some victims may make room: (their `_level`, devices open negated, worker number)."""
        levels = ((self._level(host, read[num].rows), host) for num, host in self.hosts.items())
        return sorted((level, -host.open.bit_count(), host.worker.num) for level, host in levels if level is not None)

    def _level(self, host: Host, rows: list[tuple[int, str, int, int]]) -> int | None:
        """The least that the highest priority of victims can be which free devices for one replica more on a host.

        None where all of them free too few. Processors and memory are left out, and whether all of a gang may end.
        """
        shape = self.shape
        free = needed = fit = may = 0
        for priority, tenant, mask, began in rows:
            if not self._allows(tenant, priority, began) or (self._spares(tenant) and self._borrowed(tenant) <= 0):
                continue
            if not shape.count:
                return priority
            if not needed:
                if host.waiting:
                    return None
                fit, may, free = host.cls.fit(shape).mask, host.lent & ~host.shut, host.open
                needed = ((free & fit).bit_count() // shape.count + 1) * shape.count
            free |= mask & may
            if (free & fit).bit_count() >= needed:
                return priority
        return None

    def _allows(self, tenant: str, priority: int, began_ms: int) -> bool:
        """Whether what runs since then for this tenant, and defends this priority, may be ended."""
        if self.draft.time_ms - began_ms < self.policy.runtime_ms:
            return False
        if self.right.reclaims:
            return tenant != self.right.job.tenant
        return priority < self.right.priority

    def _spares(self, tenant: str) -> bool:
        """Whether a tenant loses no more than it has borrowed."""
        return self.right.reclaims or (self.right.borrows and tenant != self.right.job.tenant)

    def _borrowed(self, tenant: str) -> int:
        """GPUs that a tenant has beyond those guaranteed to it, less those that end already."""
        found = self.borrowed.get(tenant)
        if found is None:
            draft = self.draft
            found = draft.tenant(tenant).gpus - draft.tenant(tenant).guaranteed - self.taken.get(tenant, 0)
            self.borrowed[tenant] = found
        return found

    def _room(self, host: Host, victims: Iterable[Victim]) -> int:
        """How many replicas fit on a host once so many have left it."""
        shape, mine = self.shape, [m for v in victims for m in v.members if m.worker is host.worker]
        room = 1 << 30
        if shape.count:
            freed = 0
            for member in mine:
                freed |= member.mask
            devices = host.cls.fit(shape).mask & (host.open | (0 if host.waiting else freed & host.lent & ~host.shut))
            room = devices.bit_count() // shape.count
        if shape.cpu_milli and host.cpu_milli:
            cpu = host.cpu_free + sum(self.policy.shape_of(m.replica.job).cpu_milli for m in mine)
            room = min(room, cpu // shape.cpu_milli)
        if shape.memory_mib and host.memory_mib:
            memory = host.memory_free + sum(self.policy.shape_of(m.replica.job).memory_mib for m in mine)
            room = min(room, memory // shape.memory_mib)
        return min(max(0, room), shape.together)

    def _refresh(self, victim: Victim) -> None:
        for num in {member.worker.num for member in victim.members} & self.hosts.keys():
            self.room -= self.rooms[num]
            self.rooms[num] = self._room(self.hosts[num], self.chosen_on.get(num, {}).values())
            self.room += self.rooms[num]

    def _offer(self, num: int) -> tuple[tuple[int, int], int, list[Victim]] | None:
        """What one replica more on a host takes: (highest priority, cost), host, victims; None if it cannot be."""
        host, chosen = self.hosts[num], list(self.chosen_on.get(num, {}).values())
        room = self._room(host, chosen)
        able = [v for member in host.worker.members.values() if (v := self._victim(member)) is not None]
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

    def _victim(self, member: Member) -> Victim | None:
        job = member.replica.job
        key = (job.num, -1 if job.gang else member.replica.index)
        if key not in self.known:
            self.known[key] = self._may_end(job, member)
        return self.known[key]

    def _may_end(self, job: Job, member: Member) -> Victim | None:
        draft, right, policy = self.draft, self.right, self.policy
        members = tuple(r.member for r in job.replicas if r.member is not None) if job.gang else (member,)
        if job is right.job or not members:
            return None
        if any(
            draft.replica(m.replica).member is not m or m.mode > EXCLUSIVE or draft.replica(m.replica).state != RUNNING
            for m in ((*members, member) if job.gang else members)
        ):
            return None  # it lingers, is about to end, or shares
        lasted_ms = [draft.time_ms - self.begins.of(m) for m in members]
        priority = policy.defended(job, draft.time_ms - max(lasted_ms))
        if not self._allows(job.tenant, priority, draft.time_ms - min(lasted_ms)):
            return None
        return Victim(members, priority, lasted_ms)

    def _may_take(self, victim: Victim, beside: Iterable[Victim]) -> bool:
        """Whether what is taken from its tenant is no more than that has borrowed, where it keeps the rest."""
        name = victim.job.tenant
        if not self._spares(name) or not (self.right.reclaims or victim.gpus):
            return True
        borrowed = self.draft.tenant(name).gpus - self.draft.tenant(name).guaranteed - self.taken.get(name, 0)
        return borrowed - sum(v.gpus for v in beside if v.job.tenant == name) >= victim.gpus

    def _take(self, victim: Victim) -> None:
        self._choose(victim)
        name = victim.job.tenant
        self.taken[name] = self.taken.get(name, 0) + victim.gpus

    def _choose(self, victim: Victim) -> None:
        key = _key(victim)
        self.chosen[key] = victim
        for member in victim.members:
            self.chosen_on.setdefault(member.worker.num, {})[key] = victim
        self._refresh(victim)

    def _leave_out(self, victim: Victim) -> None:
        key = _key(victim)
        del self.chosen[key]
        for num in {member.worker.num for member in victim.members}:
            del self.chosen_on[num][key]
        self._refresh(victim)

    def _spare(self) -> None:
        """Leave out victims that are not needed after all: the end of a gang may have freed as much."""
        for victim in sorted(self.chosen.values(), key=lambda victim: victim.rank, reverse=True):
            self._leave_out(victim)
            if self.room < self.shape.together:
                self._choose(victim)

    def _held(self) -> frozenset[int]:
        """The hosts that it will start on, as few as hold it; those with most room first."""
        rooms = sorted(((room, num) for num, room in self.rooms.items()), key=lambda row: (-row[0], row[1]))
        held, left = [], self.shape.together
        for room, num in rooms:
            if left > 0 and room:
                held.append(num)
                left -= room
        return frozenset(held)


def _key(victim: Victim) -> tuple[int, int]:
    return (victim.job.num, -1 if victim.job.gang else victim.members[0].replica.index)
