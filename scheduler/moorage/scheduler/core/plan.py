"""One pass: queue → rank → place, over consistent state; a gang whole or not at all.

Whoever has waited longest beyond `PATIENCE_MS` gets a reservation: the hosts on which it would fit soonest are closed
to everybody else until it starts, so that a stream of small jobs cannot starve a big one (promise 11).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heapreplace
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet import EXCLUSIVE, Fleet
from moorage.scheduler.core.queue import REPLICA_BITS, Line, Queue
from moorage.scheduler.core.rank import Choice, Ranker
from moorage.scheduler.core.records import GangPhase
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import QUEUED

PATIENCE_MS: Final = 30_000
#: entries of a line that are passed over in a pass as they could not end before a drain
ASIDE_MAX: Final = 64
_REPLICA_MASK: Final = (1 << REPLICA_BITS) - 1
_NO_PEERS: Final[dict[int, int]] = {}
_NOBODY: Final[frozenset[int]] = frozenset()


class Reservation:
    """Hosts held back for one entry of the queue and its line: those ask alike, and the first goes first."""

    __slots__ = ("hosts", "item", "line", "priority", "shape")

    def __init__(self, item: int, line: Line, hosts: frozenset[int]) -> None:
        self.item = item
        self.line = line
        self.priority = line.priority
        self.shape = line.shape
        self.hosts = hosts


class Planner:
    """Places what fits now, in order of priority and arrival."""

    def __init__(self, fleet: Fleet, queue: Queue, ranker: Ranker) -> None:
        self.fleet = fleet
        self.queue = queue
        self.ranker = ranker
        self.reservation: Reservation | None = None
        self._looked_ms = -PATIENCE_MS
        self._spread: dict[int, dict[int, int]] = {}  # this pass: job number -> its replicas by worker
        #: workers on which a job (by its number, at ledger ms) must not be placed, as they are to be left too soon
        self.barred_by_limits: Callable[[int, int], frozenset[int]] = lambda num, now_ms: _NOBODY
        self._full: set[str] = set()  # this pass: tenants of which somebody waits for the tenant's limit

    def plan(self, draft: Draft) -> int:
        """Write placements into the draft; returns how many replicas were placed."""
        if not self.queue.size:
            return 0
        self._reserve(draft)
        self._spread.clear()
        self._full.clear()
        fleet, queue, placed_all = self.fleet, self.queue, 0
        ready = queue.ready(fleet.changes)
        while ready and not draft.full:
            priority, _, line = ready[0]
            placed, first, over = 0, 0, False
            last: Choice | None = None
            aside: list[int] = []
            need, room = line.shape.count * line.shape.together, self._room(draft, line)
            others = min(ready[1:3])[:2] if len(ready) > 1 else None  # the heap's root aside, its least
            while line.entries and not draft.full:
                item = line.entries[0]
                if queue.is_taken(line, item) or not self._waits(draft, item):
                    queue.pop(line)
                    continue
                if others is not None and not aside and (priority, item) > others:
                    break
                if need > room:
                    over = True
                    break
                choice = self._place(draft, line, item)
                if choice is None and self._waits_out_a_drain(draft, item) and len(aside) < ASIDE_MAX:
                    aside.append(queue.pop(line))
                    continue
                if choice is None:
                    line.blocked_at = fleet.changes
                    break
                queue.pop(line)
                last, first = choice, first or item >> REPLICA_BITS
                placed += line.shape.together
                room -= need
                if line.entries and room >= need:
                    most = len(line.entries) if room == math.inf or not need else int(room // need)
                    more, last = self._place_more(draft, line, choice, most, priority, others)
                    placed += more
                    room -= more * need
            if aside:
                queue.put_back(line, aside)
            if last is not None:
                # flat, four a decision: first job, how many were placed, hosts known, free devices left on the last
                draft.evidence += (first, placed, len(fleet.hosts), last.left)
                placed_all += placed
                if line.tenant:
                    draft.gpus[line.tenant] = draft.gpus.get(line.tenant, 0) + line.shape.count * placed
            if over:
                self._over_limit(draft, line)
                heappop(ready)
            elif line.entries and not aside and line.blocked_at != fleet.changes:
                heapreplace(ready, (priority, line.entries[0], line))
            else:
                heappop(ready)
        return placed_all

    def _room(self, draft: Draft, line: Line) -> float:
        """How many GPUs the line's tenant may still lease; below 0 where nothing of it may be placed at all."""
        if not line.tenant:
            return math.inf
        if draft.is_tenant_held(line.tenant):
            return -1
        gpus_max, _ = draft.limits_of(line.tenant)
        if not gpus_max:
            return math.inf
        return 0 if line.tenant in self._full else max(0, gpus_max - draft.leased_by(line.tenant))

    def _over_limit(self, draft: Draft, line: Line) -> None:
        """What comes later of this tenant waits behind it, else small jobs would starve a big one under the limit."""
        if line.shape.count * line.shape.together <= draft.limits_of(line.tenant)[0]:
            self._full.add(line.tenant)

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

    def _waits_out_a_drain(self, draft: Draft, item: int) -> bool:
        """Whether its own time limit keeps it from a worker: who stands behind it may have another."""
        return bool(draft.state.windows and self.barred_by_limits(item >> REPLICA_BITS, draft.time_ms))

    def _place(self, draft: Draft, line: Line, item: int) -> Choice | None:
        if not line.shape.avoid:
            return self._choose(draft, line, item)
        with self.fleet.avoiding(line.shape.avoid):
            return self._choose(draft, line, item)

    def _choose(self, draft: Draft, line: Line, item: int) -> Choice | None:
        shape, num = line.shape, item >> REPLICA_BITS
        barred = self.barred(line.priority, shape)
        if draft.state.windows:
            barred |= self.barred_by_limits(num, draft.time_ms)
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

    def _place_more(
        self, draft: Draft, line: Line, choice: Choice, most: int, priority: int, others: tuple[int, int] | None
    ) -> tuple[int, Choice]:
        """At most so many who wait behind in line and would be put on the very same host, without asking for each.

        Returns how many, and the last choice: what one by one would have come to.
        """
        shape, entries, host = line.shape, line.entries, choice.host
        taken = 0
        if shape.avoid or host.worker.window is not None:
            return 0, choice  # others that ask alike may have other time limits; on these devices it may not be
        masks = self.ranker.again(choice, shape, min(most, len(entries)))
        for mask in masks:
            while entries and (self.queue.is_taken(line, entries[0]) or not self._waits(draft, entries[0])):
                self.queue.pop(line)
            if not entries or draft.full or (others is not None and (priority, entries[0]) > others):
                break
            item = self.queue.pop(line)
            draft.placed(item >> REPLICA_BITS, item & _REPLICA_MASK, host.worker.num, mask, shape.mode)
            taken += 1
        if taken:
            self.fleet.take_all(host, shape, masks[:taken])
            choice = Choice(host, masks[taken - 1], host.open.bit_count())
        return taken, choice

    def _place_gang(self, draft: Draft, shape: Shape, num: int, barred: frozenset[int]) -> Choice | None:
        fleet = self.fleet
        if not self._may_fit(shape):
            return None
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

    def _may_fit(self, shape: Shape) -> bool:
        """A bound from the buckets alone, so that a gang that cannot fit costs no walk for every rank."""
        if shape.mode != EXCLUSIVE:
            return True
        room = sum(
            free // shape.count * len(bucket)
            for cls, _ in self.fleet.capable(shape)
            for free, bucket in enumerate(cls.buckets)
        )
        return room >= shape.together

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

    def barred(self, priority: int, shape: Shape) -> frozenset[int]:
        """The hosts that are held back for somebody else than the line of this priority and shape."""
        held = self.reservation
        if held is None or (held.priority == priority and held.shape is shape):
            return _NOBODY
        return held.hosts

    def _reserve(self, draft: Draft) -> None:
        """Give up a reservation that is used or void; look once a second for somebody out of patience."""
        held = self.reservation
        if held is not None and not (self._waits(draft, held.item) and self._may(draft, held.line)):
            self._give_up()
        if draft.time_ms - self._looked_ms < 1000:
            return
        self._looked_ms = draft.time_ms
        if self.reservation is not None and not self._holds(self.reservation):
            self._give_up()
        if self.reservation is not None:
            return
        impatient: list[tuple[int, int, Line]] = []
        for line in self.queue.lines.values():
            while line.entries and not (
                self._waits(draft, line.entries[0]) and not self.queue.is_taken(line, line.entries[0])
            ):
                self.queue.pop(line)
            if line.entries and self._may(draft, line):
                job = draft.state.jobs.get(line.entries[0] >> REPLICA_BITS)
                if job is not None and draft.time_ms - job.accepted_ms > PATIENCE_MS:
                    impatient.append((-line.priority, line.entries[0], line))
        for _, item, line in sorted(impatient):  # what no host could hold must not hide who could be helped
            hosts = self._soonest(line.shape)
            if hosts:
                self.reservation = Reservation(item, line, hosts)
                return

    def _may(self, draft: Draft, line: Line) -> bool:
        """Whether its tenant may start it: hosts are held back for nobody who may not."""
        return line.shape.count * line.shape.together <= self._room(draft, line)

    def waits_for_limit(self, tenant: str) -> bool:
        """Whether somebody of this tenant found no room under its limit in the last pass."""
        return tenant in self._full

    def forget(self, num: int) -> None:
        """An operator has held or moved a job: nothing is held back for it as it stood."""
        if self.reservation is not None and self.reservation.item >> REPLICA_BITS == num:
            self._give_up()

    def _give_up(self) -> None:
        self.reservation = None
        self.fleet.changes += 1  # its hosts are open again

    def _holds(self, held: Reservation) -> bool:
        """Whether the hosts held back could still hold it, once ours have left them."""
        hosts = [self.fleet.hosts[num] for num in held.hosts if num in self.fleet.hosts]
        room = sum(host.replicas_of(held.shape, "emptied") for host in hosts if host.usable)
        return room >= held.shape.together

    def _soonest(self, shape: Shape) -> frozenset[int]:
        """The hosts whose capacity holds the whole gang, those that are least used first; empty if there are none."""
        capable = [
            (host.replicas_of(shape, "now"), host.replicas_of(shape, "emptied"), host.worker.num)
            for cls, _ in self.fleet.capable(shape)
            for host in cls.hosts.values()
            if host.usable
        ]
        # most of what it needs is free first; of hosts alike the one with the least in the way
        capable.sort(key=lambda row: (-min(row[0], shape.together), row[1] - row[0], row[2]))
        chosen, left = [], shape.together
        for _, room, num in capable:
            if room > 0:
                chosen.append(num)
                left -= room
            if left <= 0:
                return frozenset(chosen)
        return _NOBODY

    def sweep(self, draft: Draft) -> None:
        """Take out of the queue what no longer waits: cancels would else fill a line whose head is blocked."""
        self.queue.sweep(lambda item: self._waits(draft, item))
