"""How many members a service has: as many as its calls need, between the bounds of its request.

Members say about once a second what they have to do (`MemberLoad`). From that follows how many are wanted; the ledger
gets each change of the number (`acts.Scale`), and nothing of the loads. Replicas beyond the number are parked in the
queue, as those beyond `max_running` are. So a new leader goes on with the number that it finds, and waits until it has
heard the members before it takes one away.

*Wanted* are as many as the calls (those that run and wait, as a mean, and what was refused) fill to 70 to 80 % of their
places, and one more than there are while calls wait longer than the request says, or are refused. One step up each
`scale_up_s`, once all members that are wanted answer calls: those that start will help. One step down each
`scale_down_s`, once fewer would have done for so long. A member above `min` also ends, one each `scale_up_s`, while
another job waits for what it has, and comes before this one in the queue: by priority, its tenant's turn, or arrival.
It ends only if that, with the other members above `min` on its host that would end for that job too, makes room for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import reduce
from heapq import nsmallest
from itertools import islice
from operator import or_
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Wake
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, MEMBERS_MAX, Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.acts import Scale
from moorage.scheduler.core.ledger.records import Count
from moorage.scheduler.core.ledger.state import Job, Member, State
from moorage.scheduler.core.lifecycle.max_running import wanted_of
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import VOID, Group, Key, entry
from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Answer
from moorage.schemas.job import Request
from moorage.schemas.service import MemberLoad
from moorage.schemas.units import many

#: the part of all places that calls fill on average: above the first one member more is wanted; one less, if the others
#: would then be below the second
FULL: Final = 0.8
FILLED: Final = 0.7
#: over about this long the calls are averaged
MEAN_MS: Final = 10_000
#: a member that was not heard for so long does not answer calls
SILENT_MS: Final = 25_000
#: of the groups of the queue that found no place, so many are compared with each service: the first ones
STUCK_MAX: Final = 16
#: less than this is no call at a time
_NO_CALLS: Final = 0.01


class _Heard:
    """What one member has said: its last frame, and means of what it does."""

    __slots__ = ("at_ms", "busy", "load", "refused_s", "run_s")

    def __init__(self, load: MemberLoad, mono_ms: int) -> None:
        self.load = load
        self.at_ms = mono_ms
        #: calls that run and wait here. It begins at 0: as fast as it rises, those fall from which a member takes them
        self.busy = 0.0
        self.refused_s = 0.0  # calls that it refuses in a second
        self.run_s = 0.0  # mean time of a run

    def take(self, load: MemberLoad, mono_ms: int) -> bool:
        """Take the next frame; return whether there were calls since the last one."""
        before, passed_ms = self.load, max(1, mono_ms - self.at_ms)
        part = min(1.0, passed_ms / MEAN_MS)
        ran_ms, waited_ms = max(0, load.ran_ms - before.ran_ms), max(0, load.waited_ms - before.waited_ms)
        refused, ended = max(0, load.refused - before.refused), max(0, load.ended - before.ended)
        busy = float(load.running + load.waiting)
        if ended and ran_ms <= ended * passed_ms:  # of calls that are short the time that they took says more
            busy = (ran_ms + waited_ms) / passed_ms
        self.busy += part * (busy - self.busy)
        self.refused_s += part * (refused * 1000 / passed_ms - self.refused_s)
        if ended:
            run_s = ran_ms / ended / 1000
            self.run_s = run_s if not self.run_s else self.run_s + part * (run_s - self.run_s)
        self.load, self.at_ms = load, mono_ms
        return bool(ended or refused or load.running or load.waiting)


class _Service:
    """What is known of one job whose number of members follows its calls. Times are monotonic milliseconds."""

    __slots__ = ("called_ms", "heard", "low_ms", "moved_ms", "pressed", "stuck_ms")

    def __init__(self) -> None:
        self.heard: dict[AttemptName, _Heard] = {}
        self.called_ms: int | None = None  # when there was a call last
        self.low_ms: int | None = None  # since when fewer members would do
        self.moved_ms = -1  # ledger ms of the last step that was written
        self.pressed = ""  # what went wrong since the last step: calls waited too long, or were refused
        self.stuck_ms: int | None = None  # when another job last waited for what a member has


class _Stuck(NamedTuple):
    """A group of the queue that found no place; smaller ones come first."""

    key: Key
    item: int
    group: Group


class _Room(NamedTuple):
    """What a host has for other jobs once some members have left it."""

    slots: int
    cpu_milli: int
    memory_mib: int


class Scaling:
    """Follows the calls of services. `bound(job, request, wanted)` lets the queue place as many replicas as are wanted.

    `up_s` and `down_s` are the least seconds between two steps up, and down. `woken(tenant, service, mono_ms)` is
    called when a caller has the first member of a service started.
    """

    def __init__(
        self,
        state: State,
        fleet: Fleet,
        lifecycle: Lifecycle,
        order: QueueOrder,
        priority_of: Callable[[Job], int],
        bound: Callable[[Job, Request, int], None],
        up_s: float,
        down_s: float,
        woken: Callable[[str, str, int], None],
    ) -> None:
        self._state = state
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._order = order
        self._priority_of = priority_of
        self._bound = bound
        self._up_ms = int(up_s * 1000)
        self._down_ms = int(down_s * 1000)
        self._woken = woken
        self._services: dict[int, _Service] = {}  # by job number
        # in this pass, by worker number: the members above `min`, and what hosts have once these have left
        self._leaving: dict[int, set[Member]] = {}
        self._rooms: dict[int, _Room] = {}
        # and by first entry of a group that waits: once those have left that end for it
        self._rooms_for: dict[tuple[int, int], _Room] = {}
        #: where services stand in the queue, by job number
        self._standings: dict[int, tuple[Key, int]] = {}
        #: numbers of jobs that another one replaces: these get no more members, whose places the other one may need
        self.replaced: Collection[int] = ()

    def __contains__(self, num: int) -> bool:
        return num in self._services

    def add(self, job: Job, request: Request) -> None:
        """Follow the calls of a live job, if its number of members depends on them."""
        if request.scale is None or request.service is None or job.num in self._services:
            return
        self._services[job.num] = _Service()

    def heard(self, tenant: str, load: MemberLoad, mono_ms: int) -> None:
        """Take what a member says; a frame of no member of such a service is ignored."""
        job = self._state.job(tenant, load.job)
        service = self._services.get(job.num) if job is not None else None
        if job is None or service is None:
            return
        row = job.rows.get(load.replica)
        member = None if row is None else row.member
        if member is None or member.fence != load.fence or load.attempt not in (0, member.attempt):
            return
        known = service.heard.get(member.name)
        if known is None:
            service.heard[member.name] = _Heard(load, mono_ms)
            called = bool(load.running or load.waiting or load.ended or load.refused)
        else:
            if load.refused > known.load.refused:
                service.pressed = f"{many(load.refused - known.load.refused, 'call')} refused"
            called = known.take(load, mono_ms)
        if called:
            service.called_ms = mono_ms
        scale = self._lifecycle.request_of(job).scale
        if scale is not None and load.oldest_ms > scale.wait_target_ms:
            service.pressed = f"a call waited {load.oldest_ms} ms"

    def wake(self, draft: Draft, asked: Wake, jobs: Iterable[Job], mono_ms: int) -> Answer | None:
        """Let a service without members have one; `jobs` are its live jobs. Return None if none of them is followed
        here."""
        for job in jobs:
            service = self._services.get(job.num)
            if service is None:
                continue
            request = self._lifecycle.request_of(job)
            service.called_ms = mono_ms
            wanted = wanted_of(job, request)
            if not wanted and service.moved_ms < draft.time_ms:
                wanted = 1
                self._move(draft, job, request, service, wanted, "woken by a caller")
                self._woken(asked.tenant, asked.service, mono_ms)
            data = {"service": asked.service, "job": job.name, "wanted": max(1, wanted)}
            return Answer("wake", 0, data)
        return None

    def pass_time(self, draft: Draft, mono_ms: int) -> bool:
        """Take the steps that are due, behind the placements of a record; return whether any was taken.

        To be called about once a second.
        """
        if not self._services:
            return False
        stuck, moved = self._stuck(), False
        self._leaving, self._rooms_for, self._standings = {}, {}, {}
        self._rooms = self._find_rooms(draft) if stuck else {}
        for num, service in list(self._services.items()):
            job = self._state.jobs.get(num)
            if job is None or job.over:
                del self._services[num]
            elif job.hold is None and not draft.full:
                moved |= self._look(draft, job, service, stuck, mono_ms)
        return moved

    def begin_with(self, draft: Draft, job: Job, count: int, why: str) -> bool:
        """Let a job begin with so many members, as far as its bounds allow; return whether that changes anything."""
        request = self._lifecycle.request_of(job)
        scale, service = request.scale, self._services.get(job.num)
        if scale is None or service is None or job.scaled is not None:
            return False
        count = min(max(count, scale.min), scale.max)
        if count == scale.min:
            return False
        self._move(draft, job, request, service, count, why)
        return True

    def helping(self, draft: Draft, job: Job, shape: Shape, most: int) -> list[Member]:
        """Return the members of a job of which each makes room for another job of this shape by its end: alone, or with
        others of the job on its host that end after it, `most` in all."""
        hosts, found, members = self._fleet.hosts, list[Member](), list(self._members(draft, job))
        for member in members:
            host = hosts.get(member.worker.num)
            if host is None or not host.usable:
                continue
            others = (each for each in members if each.worker is member.worker and each is not member)
            leaving = [member, *islice(others, most - 1)]
            if self._helps(shape, member, self._room(draft, host, leaving, shape)):
                found.append(member)
        return found

    def count(self, draft: Draft, job: Job) -> int:
        """Return how many members a job has on workers that were not asked to end."""
        return sum(1 for _ in self._members(draft, job))

    def give_way(self, draft: Draft, job: Job, why: str, helping: list[Member]) -> None:
        """End one of the members that help the job that replaces this one; it waits until `come_back`."""
        request, service = self._lifecycle.request_of(job), self._services.get(job.num)
        if service is not None:
            count = self.count(draft, job)
            self._end_fewest(draft, service, helping, 1, why)
            self._move(draft, job, request, service, count - 1, why)
            return
        last = max(helping, key=lambda member: member.replica.index)
        self._lifecycle.leave(draft, last, why, Count.NONE)
        self._want(draft, job, request, wanted_of(job, request) - 1, why)

    def come_back(self, draft: Draft, job: Job, why: str) -> None:
        """Let a job that gave way have all of its replicas again; one that follows its calls has what these need."""
        if job.scaled is None or job.over or not draft.is_live(job):
            return
        request = self._lifecycle.request_of(job)
        if request.scale is None and job.scaled.wanted < request.copies:
            self._want(draft, job, request, request.copies, why)

    # ---------------------------------------------------------------------------------------------- within

    def _look(self, draft: Draft, job: Job, service: _Service, stuck: Collection[_Stuck], mono_ms: int) -> bool:
        """Take the step of one service that is due, if any."""
        request = self._lifecycle.request_of(job)
        scale = request.scale
        assert scale is not None
        wanted = wanted_of(job, request)
        moved_ms = max(service.moved_ms, job.scaled.since_ms if job.scaled is not None else job.accepted_ms)
        since_ms = draft.time_ms - moved_ms
        members = list(self._members(draft, job))
        if len(members) > wanted:  # one that was asked to end, and cut off before it did, has come back
            self._end_fewest(draft, service, members, len(members) - wanted, f"more than the {wanted} that are wanted")
            return True
        if stuck:
            first = self._first_for(draft, job, members, stuck)
            if first is not None:
                service.stuck_ms = mono_ms
                if len(members) > scale.min and since_ms >= self._up_ms:
                    self._yield_to(draft, job, request, service, members, first)
                    return True
        if not members and wanted:
            service.low_ms = None
            return False
        needs, why, answering = self._needs(request, service, members, wanted, mono_ms)
        if needs >= wanted or answering < len(members):  # of those that are silent nothing is known
            service.low_ms = None
        elif service.low_ms is None:
            service.low_ms = mono_ms
        is_stuck = service.stuck_ms is not None and mono_ms - service.stuck_ms < self._up_ms
        is_kept_back = is_stuck or job.num in self.replaced
        if needs > wanted and since_ms >= self._up_ms and answering >= wanted and not is_kept_back:
            self._move(draft, job, request, service, wanted + 1, why)
            return True
        low_ms = 0 if service.low_ms is None else mono_ms - service.low_ms
        if needs < wanted and low_ms >= self._down_ms and since_ms >= self._down_ms:
            self._end_fewest(draft, service, members, len(members) - wanted + 1, f"scaled to {wanted - 1}: {why}")
            self._move(draft, job, request, service, wanted - 1, why)
            return True
        return False

    def _needs(
        self, request: Request, service: _Service, members: list[Member], wanted: int, mono_ms: int
    ) -> tuple[int, str, int]:
        """Return how many members the calls need, what is said of that, and how many answer calls now.

        `wanted` is how many are wanted now.
        """
        scale, spec = request.scale, request.service
        assert scale is not None
        assert spec is not None
        current = {member.name for member in members}
        service.heard = {
            name: heard
            for name, heard in service.heard.items()
            if name in current and mono_ms - heard.at_ms < SILENT_MS
        }
        heard = service.heard.values()
        answering = sum(not each.load.draining for each in heard)
        busy = sum(each.busy for each in heard) + sum(each.refused_s * each.run_s for each in heard)
        places = max(1.0, sum(each.load.places for each in heard) / len(heard)) if heard else float(spec.concurrency)
        full, filled = (math.ceil(busy / (places * part)) if busy > _NO_CALLS else 0 for part in (FULL, FILLED))
        needs = max(full, min(filled, wanted))
        why = f"{busy:.1f} calls at a time, and a member runs {places:g}"
        if service.called_ms is not None and mono_ms - service.called_ms < self._down_ms:
            needs = max(1, needs)
        if service.pressed:
            if answering >= wanted:  # else the members that start will help
                needs = max(needs, answering + 1)
                why = f"{service.pressed}; {why}"
            service.pressed = ""
        return min(max(needs, scale.min), scale.max), why, answering

    def _members(self, draft: Draft, job: Job) -> Iterator[Member]:
        """Yield the members of a job on workers that were not asked to end, without one that is to replace another."""
        old, new = job.relocating or (-1, -1)
        leaves = job.rows.get(old)
        if leaves is None or leaves.member is None or not self._lifecycle.is_on_worker(draft, leaves.member):
            new = -1  # it has done so
        for replica in job.rows.values():
            member = replica.member
            if member is not None and replica.index != new and self._lifecycle.is_on_worker(draft, member):
                yield member

    def _move(self, draft: Draft, job: Job, request: Request, service: _Service, wanted: int, why: str) -> None:
        service.moved_ms, service.low_ms = draft.time_ms, None
        self._want(draft, job, request, wanted, why)

    def _want(self, draft: Draft, job: Job, request: Request, wanted: int, why: str) -> None:
        draft.add(Scale(job.num, wanted, why))
        self._bound(job, request, wanted)

    def _end_fewest(self, draft: Draft, service: _Service, members: list[Member], count: int, why: str) -> None:
        """Ask so many members to end: those that answer no calls yet, then those with the fewest calls."""

        def calls(member: Member) -> tuple[int, int]:
            heard = service.heard.get(member.name)
            return (-1 if heard is None else heard.load.running + heard.load.waiting, -member.replica.index)

        for member in sorted(members, key=calls)[: max(0, count)]:
            self._lifecycle.leave(draft, member, why, Count.NONE)

    def _yield_to(
        self, draft: Draft, job: Job, request: Request, service: _Service, members: list[Member], first: _Stuck
    ) -> None:
        """End one member for a job that waits, and comes before this one."""
        mine = first.group.tenant == job.tenant
        whom = "an earlier or more urgent job" if mine else f"tenant {first.group.tenant}"
        why = f"{whom} waits for what a member has, and comes first"
        helping = [member for member in members if self._helps_as_others_end(draft, first, member)]
        self._end_fewest(draft, service, helping, 1, f"scaled to {len(members) - 1}: {why}")
        self._move(draft, job, request, service, len(members) - 1, why)

    def _stuck(self) -> list[_Stuck]:
        """Return the first groups of the queue that found no place, in order."""
        groups = (group for group in self._order.queue.groups.values() if group.entries and group.verdict is not VOID)
        key = self._order.key
        first = nsmallest(STUCK_MAX, (_Stuck(key(group), group.entries[0], group) for group in groups))
        return [each for each in first if self._could_hold(each.group.shape)]

    def _first_for(self, draft: Draft, job: Job, members: list[Member], stuck: Collection[_Stuck]) -> _Stuck | None:
        """Return the first group that waits for what some member of the job has, and comes before the job itself."""
        standing = self._standing(draft, job)
        for each in stuck:
            if (each.key, each.item) >= standing:
                return None
            if not self._yields(draft, job, each) or not self._order.may(draft, each.group):
                continue
            if any(self._helps_as_others_end(draft, each, member) for member in members):
                return each
        return None

    def _standing(self, draft: Draft, job: Job) -> tuple[Key, int]:
        """Return where a service stands in the queue."""
        found = self._standings.get(job.num)
        if found is None:
            mine, item = Group(self._priority_of(job), self._lifecycle.shape_of(job), job.tenant), entry(job.num, 0)
            mine.entries.append(item)
            key, tenant = self._order.key(mine), draft.tenant(job.tenant)
            if 0 < tenant.gpus <= tenant.guaranteed:
                key = (0, *key[1:])  # what it has is its tenant's own
            found = self._standings[job.num] = key, item
        return found

    def _yields(self, draft: Draft, job: Job, stuck: _Stuck) -> bool:
        """Return whether members of a service end for this group: it comes first, and none would preempt it again."""
        again = stuck.group.shape.preemptible and not self._lifecycle.shape_of(job).preemptible
        return not again and (stuck.key, stuck.item) < self._standing(draft, job)

    def _helps_as_others_end(self, draft: Draft, stuck: _Stuck, member: Member) -> bool:
        """Return whether a member has what this group may use, and its host has room once those above `min` have left
        it that end for this group."""
        shape, num = stuck.group.shape, member.worker.num
        if not self._helps(shape, member, self._rooms.get(num)):
            return False  # nor if all end
        exact = (stuck.item, num)
        if exact not in self._rooms_for:
            leaving = [each for each in self._leaving[num] if self._yields(draft, each.replica.job, stuck)]
            self._rooms_for[exact] = self._room(draft, self._fleet.hosts[num], leaving, shape)
        return self._helps(shape, member, self._rooms_for[exact])

    def _could_hold(self, shape: Shape) -> bool:
        """Return whether the fleet, if empty, would hold a gang. Any other job is looked at host by host."""
        return shape.together == 1 or self._fleet.lack(shape, shape.together) <= 0

    def _find_rooms(self, draft: Draft) -> dict[int, _Room]:
        """Return what the hosts of services have that take jobs once as many members of each have left as it has above
        `min`."""
        leaving = self._leaving
        for num in self._services:
            job = self._state.jobs.get(num)
            if job is None:
                continue
            members, scale = list(self._members(draft, job)), self._lifecycle.request_of(job).scale
            spare = len(members) - scale.min if scale is not None and job.hold is None else 0
            seen = Counter[int]()
            for member in members:
                here = leaving.setdefault(member.worker.num, set())
                if seen[member.worker.num] < spare:
                    here.add(member)
                seen[member.worker.num] += 1
        hosts = self._fleet.hosts
        return {
            num: self._room(draft, hosts[num], members, None)
            for num, members in leaving.items()
            if num in hosts and hosts[num].usable
        }

    def _room(self, draft: Draft, host: Host, leaving: Collection[Member], shape: Shape | None) -> _Room:
        """Return what a host has once these members have left it, with those that are ending, and those that a job of
        this shape preempts; None for any shape."""
        preempts, lifecycle = shape is None or not shape.preemptible, self._lifecycle
        gone = [
            member
            for member in host.worker.members.values()
            if member in leaving
            or (member.preemptible and preempts)
            or not (lifecycle.is_on_worker(draft, member) or lifecycle.lingers(draft, member))
        ]
        masks = [draft.mask_of(member) for member in gone if member not in draft.gone]
        shapes = [self._lifecycle.shape_of(member.replica.job) for member in gone if member not in draft.gone]
        freed = reduce(or_, masks, 0)
        for slot, device in host.shared.items():
            if sum(mask >> slot & 1 for mask in masks) < device.users:
                freed &= ~(1 << slot)
        cpu_milli = host.cpu_free + sum(shape.cpu_milli for shape in shapes)
        return _Room(host.opened_by(gone, freed), cpu_milli, host.memory_free + sum(s.memory_mib for s in shapes))

    def _helps(self, shape: Shape, member: Member, room: _Room | None) -> bool:
        """Return whether a member has what a job of this shape may use, and that job fits into this room of its host.

        For a sharer only the slot counts.
        """
        num = member.worker.num
        host = self._fleet.hosts.get(num)
        if host is None or room is None or num in shape.refusing or shape.driver in host.down:
            return False
        fit = host.cls.fit(shape)
        slots = fit.mask & ~dict(shape.avoid).get(num, 0) if shape.avoid else fit.mask
        most = MEMBERS_MAX
        if shape.count and shape.mode == EXCLUSIVE:
            most = (room.slots & slots).bit_count() // shape.count
        if most <= 0 or fit.reason or host.within(shape, most, room.cpu_milli, room.memory_mib) <= 0:
            return False
        if shape.count:
            return bool(member.home & slots & host.lent & ~host.shut)
        has = self._lifecycle.shape_of(member.replica.job)
        return bool((shape.cpu_milli and has.cpu_milli) or (shape.memory_mib and has.memory_mib))
