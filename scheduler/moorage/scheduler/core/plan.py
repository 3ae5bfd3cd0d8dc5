"""One pass: queue → rank → place, over consistent state; a gang whole or not at all.

Whoever has waited longest beyond `PATIENCE_MS` gets a reservation: the hosts on which it would fit soonest are closed
to everybody else until it starts, so that a stream of small jobs cannot starve a big one (promise 11).
"""

from __future__ import annotations

from heapq import heappop, heapreplace
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet import EXCLUSIVE, Fleet, Host
from moorage.scheduler.core.queue import REPLICA_BITS, Line, Queue
from moorage.scheduler.core.rank import Choice, Ranker
from moorage.scheduler.core.records import GangPhase
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import QUEUED

PATIENCE_MS: Final = 30_000
_REPLICA_MASK: Final = (1 << REPLICA_BITS) - 1
_NO_PEERS: Final[dict[int, int]] = {}
_NOBODY: Final[frozenset[int]] = frozenset()
#: evidence, flat a decision: first job number, how many were placed, hosts known, free devices left on the last host
EVIDENCE_WIDTH: Final = 4


class Reservation:
    """Hosts held back for one entry of the queue."""

    __slots__ = ("hosts", "inventory", "item", "priority")

    def __init__(self, item: int, priority: int, hosts: frozenset[int], inventory: int) -> None:
        self.item = item
        self.priority = priority
        self.hosts = hosts
        self.inventory = inventory


class Planner:
    """Places what fits now, in order of priority and arrival."""

    def __init__(self, fleet: Fleet, queue: Queue, ranker: Ranker) -> None:
        self.fleet = fleet
        self.queue = queue
        self.ranker = ranker
        self.reservation: Reservation | None = None
        self._looked_ms = -PATIENCE_MS
        self._spread: dict[int, dict[int, int]] = {}  # this pass: job number -> its replicas by worker

    def plan(self, draft: Draft) -> int:
        """Write placements into the draft; returns how many replicas were placed."""
        if not self.queue.size:
            return 0
        self._reserve(draft)
        self._spread.clear()
        fleet, queue, placed_all = self.fleet, self.queue, 0
        ready = queue.ready(fleet.changes)
        while ready and not draft.full:
            priority, _, line = ready[0]
            placed, first = 0, 0
            last: Choice | None = None
            while line.entries and not draft.full:
                item = line.entries[0]
                if not self._waits(draft, item):
                    queue.pop(line)
                    continue
                choice = self._place(draft, line, item)
                if choice is None:
                    line.blocked_at = fleet.changes
                    break
                queue.pop(line)
                last, first = choice, first or item >> REPLICA_BITS
                placed += line.shape.together
                if len(ready) > 1 and line.entries and (priority, line.entries[0]) > (ready[1][0], ready[1][1]):
                    break
            if last is not None:
                draft.evidence += (first, placed, len(fleet.hosts), last.left)
                placed_all += placed
            if line.entries and line.blocked_at != fleet.changes:
                heapreplace(ready, (priority, line.entries[0], line))
            else:
                heappop(ready)
        return placed_all

    def _waits(self, draft: Draft, item: int) -> bool:
        """Whether this entry still waits (removal from the queue is lazy)."""
        num = item >> REPLICA_BITS
        if num >= draft.state.next_num:
            return True  # accepted in this very record
        job = draft.state.jobs.get(num)
        if job is None:
            return False
        replica = job.replicas[item & _REPLICA_MASK]
        return draft.state_of(replica) == QUEUED and replica.not_before <= draft.time_ms

    def _place(self, draft: Draft, line: Line, item: int) -> Choice | None:
        shape, num = line.shape, item >> REPLICA_BITS
        barred = self._barred(item)
        if shape.together > 1:
            return self._place_gang(draft, shape, num, barred)
        avoid = self._peers(draft, num) if shape.spread else _NO_PEERS
        choice = self.ranker.choose(self.fleet, shape, avoid, barred)
        if choice is not None:
            self.fleet.take(choice.host, shape, choice.mask)
            if shape.spread:
                avoid[choice.host.worker.num] = avoid.get(choice.host.worker.num, 0) + 1
            draft.placed(num, item & _REPLICA_MASK, choice.host.worker.num, choice.mask, shape.mode)
        return choice

    def _place_gang(self, draft: Draft, shape: Shape, num: int, barred: frozenset[int]) -> Choice | None:
        fleet = self.fleet
        taken: list[Choice] = []
        for _ in range(shape.together):
            choice = self.ranker.choose(fleet, shape, _NO_PEERS, barred)
            if choice is None:
                before = fleet.changes
                for done in taken:  # of its own alone (fact 30)
                    fleet.give(done.host, shape, done.mask)
                fleet.changes = before  # nothing changed: whoever was blocked still is
                return None
            fleet.take(choice.host, shape, choice.mask)
            taken.append(choice)
        for index, choice in enumerate(taken):
            draft.placed(num, index, choice.host.worker.num, choice.mask, shape.mode)
        draft.step_gang(num, GangPhase.HOLDING)
        return taken[-1]

    def _peers(self, draft: Draft, num: int) -> dict[int, int]:
        """How many replicas of this job each worker has, those placed in this pass too."""
        used = self._spread.get(num)
        if used is None:
            used = self._spread[num] = {}
            job = draft.state.jobs.get(num)
            for replica in job.replicas if job is not None else ():
                member = draft.held_by(replica)
                if member is not None:
                    used[member.worker.num] = used.get(member.worker.num, 0) + 1
        return used

    # ------------------------------------------------------------------------------------- reservation

    def _barred(self, item: int) -> frozenset[int]:
        held = self.reservation
        return _NOBODY if held is None or held.item == item else held.hosts

    def _reserve(self, draft: Draft) -> None:
        """Give up a reservation that is used or void; look once a second for somebody out of patience."""
        held = self.reservation
        if held is not None and (not self._waits(draft, held.item) or held.inventory != self.fleet.inventory):
            self.reservation = None
            self.fleet.changes += 1  # its hosts are open again
        if self.reservation is not None or draft.time_ms - self._looked_ms < 1000:
            return
        self._looked_ms = draft.time_ms
        oldest: tuple[int, int, Line] | None = None
        for line in self.queue.lines.values():
            while line.entries and not self._waits(draft, line.entries[0]):
                self.queue.pop(line)
            if line.entries and (oldest is None or (-line.priority, line.entries[0]) < oldest[:2]):
                job = draft.state.jobs.get(line.entries[0] >> REPLICA_BITS)
                if job is not None and draft.time_ms - job.accepted_ms > PATIENCE_MS:
                    oldest = (-line.priority, line.entries[0], line)
        if oldest is None:
            return
        line = oldest[2]
        hosts = self._soonest(line.shape)
        if hosts:
            self.reservation = Reservation(line.entries[0], line.priority, hosts, self.fleet.inventory)

    def _soonest(self, shape: Shape) -> frozenset[int]:
        """The hosts whose capacity holds the whole gang, those that are least used first; empty if there are none."""
        capable = [
            host
            for cls, _ in self.fleet.capable(shape)
            for host in cls.hosts.values()
            if host.usable and host.could_ever(shape)
        ]
        capable.sort(key=lambda host: (self._to_be_freed(host, shape), host.worker.num))
        chosen, left = [], shape.together
        for host in capable:
            chosen.append(host.worker.num)
            left -= self._capacity(host, shape)
            if left <= 0:
                return frozenset(chosen)
        return _NOBODY

    @staticmethod
    def _to_be_freed(host: Host, shape: Shape) -> int:
        return max(0, shape.count - (host.open & host.cls.fit(shape).mask).bit_count())

    @staticmethod
    def _capacity(host: Host, shape: Shape) -> int:
        if not shape.count:
            return 1
        slots = (host.lent & host.cls.fit(shape).mask).bit_count()
        return slots // shape.count * (1 if shape.mode <= EXCLUSIVE else host.cls.sharers(shape.mode))
