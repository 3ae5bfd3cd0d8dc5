"""Whom to end so that somebody of more right may start: the least that frees what is needed, gangs whole.

Off unless the settings allow it. What is freed belongs to whoever it was freed for (see `Planner.barred`), and the
ledger says so before the first of them is told to end: `Job.preempts`. Devices that are shared are left alone, and
nobody shares by preemption: of one sharer's end no whole device comes free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from moorage.scheduler.core.ageing import Ageing
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import EXCLUSIVE, Host
from moorage.scheduler.core.queueing.backfill import began_ms
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import RUNNING, Job, Member

#: hosts that are looked at for one preemption: those with most devices open
HOSTS_MAX: Final = 512
#: after its victims are gone, whoever still has not started gives the hosts up
VOID_MS: Final = 10_000


class Right(NamedTuple):
    """What lets a job end others: a priority above theirs, or GPUs guaranteed to its tenant that others borrow."""

    job: Job
    priority: int
    reclaims: bool


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
        """Who goes first: the lowest priority, the least lost; then by name."""
        return (self.priority, self.cost, self.job.num, self.members[0].replica.index)


class Choice(NamedTuple):
    """The victims, and the hosts that are held for whoever they end for."""

    victims: list[Victim]
    hosts: frozenset[int]


class Preemption:
    """Over one fleet. `priority_of` is a job's own or an operator's, `runtime_ms` what everybody may run in peace.

    With `ageing` a victim defends the priority that it counted with when it began; nobody preempts by age.
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

    def defended(self, job: Job, began_ms: int) -> int:
        """The priority that another has to exceed to end a job that began then."""
        priority = self.priority_of(job)
        return priority if self.ageing is None else self.ageing.of(priority, began_ms - job.accepted_ms)

    def choose(
        self, draft: Draft, shape: Shape, right: Right, barred: frozenset[int], ending: Mapping[str, int]
    ) -> Choice | None:
        """The cheapest victims found; None where even all of them would not make room, or none is needed.

        `ending` are the GPUs by tenant that end for others already: still leased, and no more to be taken back.
        """
        if shape.mode > EXCLUSIVE:
            return None
        search = _Search(self, draft, shape, right, barred, ending)
        return search.run()


class _Search:
    """One replica more on one host after the other, where that costs least; then nobody is ended in vain."""

    def __init__(
        self,
        policy: Preemption,
        draft: Draft,
        shape: Shape,
        right: Right,
        barred: frozenset[int],
        ending: Mapping[str, int],
    ) -> None:
        self.policy = policy
        self.draft = draft
        self.shape = shape
        self.right = right
        self.hosts = {host.worker.num: host for host in self._hosts() if host.worker.num not in barred}
        self.known: dict[tuple[int, int], Victim | None] = {}
        self.chosen: dict[tuple[int, int], Victim] = {}
        self.chosen_on: dict[int, dict[tuple[int, int], Victim]] = {}  # the same, by the hosts that they leave
        self.taken = dict(ending)  # GPUs that end of each tenant
        self.rooms = {num: self._room(host, ()) for num, host in self.hosts.items()}  # replicas that would fit
        self.room = sum(self.rooms.values())

    def run(self) -> Choice | None:
        if self.room >= self.shape.together:
            return None  # it fits as things are: whoever bars it will be gone
        heap = [entry for num in self.hosts if (entry := self._offer(num)) is not None]
        heapify(heap)
        while self.room < self.shape.together and heap:
            rank, num, _ = heappop(heap)
            now = self._offer(num)
            if now is None or (now[0] != rank and heap and now > heap[0]):
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

    def _hosts(self) -> Iterable[Host]:
        found: list[Host] = []
        for cls, _ in self.policy.fleet.capable(self.shape):
            for bucket in reversed(cls.buckets):
                found += bucket.values()
                if len(found) >= HOSTS_MAX:
                    break
        found.sort(key=lambda host: (-host.open.bit_count(), host.worker.num))
        return found[:HOSTS_MAX]

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
            draft.held_by(m.replica) is not m or m.mode > EXCLUSIVE or draft.state_of(m.replica) != RUNNING
            for m in ((*members, member) if job.gang else members)
        ):
            return None  # it lingers, is about to end, or shares
        lasted_ms = [draft.time_ms - began_ms(m, draft.time_ms) for m in members]
        if min(lasted_ms) < policy.runtime_ms:
            return None
        priority = policy.defended(job, draft.time_ms - max(lasted_ms))
        if right.reclaims:
            if job.tenant == right.job.tenant:
                return None
        elif priority >= right.priority:
            return None
        return Victim(members, priority, lasted_ms)

    def _may_take(self, victim: Victim, beside: Iterable[Victim]) -> bool:
        """Whether what is taken back from its tenant is no more than that has borrowed."""
        if not self.right.reclaims:
            return True
        name = victim.job.tenant
        borrowed = self.draft.leased_by(name) - self.draft.share_of(name)[1] - self.taken.get(name, 0)
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
        """Leave out whoever is not needed after all: a gang's end may have freed what was chosen before."""
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
