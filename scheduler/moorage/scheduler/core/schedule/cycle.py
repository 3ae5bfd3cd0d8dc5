"""One pass: queue → rank → place, over consistent state; a gang whole or not at all.

Who is next is `Lines`, whose hosts are held back `Holding`, who may use those meanwhile `Filling`, where it goes
`Placing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, auto
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from moorage.scheduler.core.ageing import Ageing
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import Host
from moorage.scheduler.core.queue.order import Lines
from moorage.scheduler.core.queue.queue import REPLICA_BITS, Head, Line, Queue
from moorage.scheduler.core.rank.ranker import Choice, Ranker
from moorage.scheduler.core.schedule.placing import Placing
from moorage.scheduler.core.schedule.preempt import Preempting
from moorage.scheduler.core.schedule.reserve import PATIENCE_MS, Filling, Holding
from moorage.scheduler.core.schedule.runtime import Estimates
from moorage.scheduler.core.shape import Shape

#: choices that one pass makes, as they hold up the leader: then the record goes, and the next one goes on
CHOICES_MAX: Final = 192
#: lines that find no room, each of which counts `A_LOOK` times where the ranker had to look: many lines that all ask
#: for something else are looked at over several records
IN_VAIN_MAX: Final = 1_024
#: entries of a line that are passed over in a pass as they could not end before a drain
ASIDE_MAX: Final = 64
#: of the lines that a pass has still to look at, the part that is passed over one by one before all such go at once
SWEEP_PART: Final = 16
#: entries of the queue that one record looks at for jobs that wait no longer
SWEPT_MAX: Final = 8_192
_NEVER: Final = -2  # no change number: a line that found no room is looked at, too


class End(Enum):
    """Why a pass leaves a line."""

    ALL_LOOKED_AT = auto()
    OTHERS_FIRST = auto()  # another line's first comes before whoever is first here now
    OVER_LIMIT = auto()  # the tenant's
    NO_ROOM = auto()


class Served(NamedTuple):
    """What a pass did for one line: replicas placed, in their turn or filled in, and what its first counts as now."""

    placed: int
    end: End
    head: Head


class Planner:
    """Places what fits now, in order of priority, of fair share where shares are set, and of arrival.

    `order` is that of `Config`; `could_ever` says whether the fleet could hold a shape if it were empty.
    """

    def __init__(
        self,
        fleet: Fleet,
        queue: Queue,
        ranker: Ranker,
        estimates: Estimates,
        preempting: Preempting,
        order: str = "fair",
        could_ever: Callable[[Shape], bool] = lambda shape: True,
        ageing: Ageing | None = None,
        patience_ms: int = PATIENCE_MS,
    ) -> None:
        self.fleet = fleet
        self.queue = queue
        self.estimates = estimates
        self.preempting = preempting
        self.could_ever = could_ever
        self.lines = Lines(fleet, queue, order, ageing)
        self.holding = Holding(fleet, self.lines, estimates, preempting, patience_ms)
        self.placing = Placing(fleet, self.lines, ranker)
        self.filling = Filling(queue, self.lines, self.holding, self.placing, estimates)
        #: this pass: the hosts that have opened since a line found no room at that change, None for any
        self._opened: dict[int, list[Host] | None] = {}
        #: whether lines of a shape that found no room at that change find none still, before anybody is placed
        self._still_full: dict[tuple[int, int], bool] = {}
        #: this pass: lines like one that found no room, with all hosts open to them; see `_kind_of`
        self._full: set[tuple[int, int, int]] = set()
        self._unprepared = False  # the ranker is not ready to choose
        self.serving: Line | None = None  # the line that a pass is at, for when it fails
        self._in_vain_max = IN_VAIN_MAX
        self._waiting = 0  # lines that the last pass had to look at

    def is_done(self, draft: Draft) -> bool:
        """Whether nothing more may be placed in this record; who still waits is looked at in the next."""
        placing = self.placing
        if self._unprepared:
            return True
        return placing.spent > CHOICES_MAX or placing.in_vain > self._in_vain_max or draft.full

    def plan(self, draft: Draft) -> int:
        """Write placements into the draft; returns how many replicas were placed."""
        cut = self.placing.in_vain > self._in_vain_max
        self.placing.begin()
        self.serving, self._unprepared = None, False
        if self.queue.is_empty:
            self.queue.lines.clear()
            self.holding.give_up()
            return 0
        self.lines.begin(draft)
        self.holding.begin(draft)
        if not self.placing.ranker.prepare(self.fleet):
            self._unprepared = True
            return 0
        self._opened.clear()
        self._still_full.clear()
        self._full.clear()
        lines, fleet, placed, passed = self.lines, self.fleet, 0, 0
        strict, head_of = lines.order == "fifo", lines.head_of()
        if strict:
            ready = self.queue.ready(_NEVER, head_of)
        else:
            ready = self.queue.ready(fleet.changes, head_of, lambda line: self._passes_over(draft, line))
        self._bound(cut, len(ready))
        while ready and not self.is_done(draft):
            head, first, line = ready[0]
            self.serving = line
            if self._is_like_full(draft, line):
                heappop(ready)
                passed += self.lines.room(draft, line) == math.inf
                if passed * SWEEP_PART >= len(ready):
                    ready, passed = self._without_full(draft, ready), 0
                continue
            if head_of is not None and (now := head_of(line)) != head:
                heapreplace(ready, (now, line.entries[0], line))
                continue
            if strict and line.blocked_at == fleet.changes and lines.may(draft, line):
                if lines.prune(draft, line) and line.entries[0] == first:
                    served = Served(0, End.NO_ROOM, head)  # as when it was asked last
                else:  # whoever stood there has gone, and stops nobody
                    heappop(ready)
                    if line.entries:
                        if line.barred:  # by a time limit of its own
                            line.barred, line.blocked_at = False, -1
                        heappush(ready, (head_of(line) if head_of is not None else head, line.entries[0], line))
                    continue
            else:
                others = min(ready[1:3])[:2] if len(ready) > 1 else None  # the heap's root aside, its least
                kind = self._kind_of(line)
                served = self._serve(draft, line, head, others)
                if served.end is End.NO_ROOM and not strict and self._is_open_to(draft, line):
                    self._full.add(kind)
            placed += served.placed
            if strict and served.end is End.NO_ROOM and self.could_ever(line.shape):
                break  # nobody passes whoever is first
            if served.end is End.OTHERS_FIRST:
                heapreplace(ready, (served.head, line.entries[0], line))
            else:
                heappop(ready)
            if served.end is End.OVER_LIMIT and self.could_ever(line.shape):
                lines.over_limit(draft, line)
        self.serving = None
        if self.preempting.allowed and not draft.full:
            self.preempting.seek(draft, lambda: self._eligible(draft), lambda line: self._closed_to(draft, line))
        return placed

    def _bound(self, cut: bool, waiting: int) -> None:
        """How often this pass may look in vain, of so many lines, after one that did so as often as it might.

        Who found no room is not looked at again, so each pass comes further; where it does not, as the whole fleet has
        changed meanwhile, it may look twice as often: nobody waits for ever to be looked at.
        """
        further = not cut or waiting < self._waiting
        self._in_vain_max = max(IN_VAIN_MAX, self._in_vain_max // 2) if further else 2 * self._in_vain_max
        self._waiting = waiting

    def _is_full(self, draft: Draft, line: Line) -> bool:
        """Whether a line that found no room finds none still, by the hosts alone that have opened since.

        So a job's end costs a look at its host for each kind of request that waits, and not one at the whole fleet.
        Before a drain each entry has hosts of its own.
        """
        hosts = None if self._passes_by_now(line) else self._hosts_opened(draft, line)
        return hosts is not None and not any(
            host.may_have_room(line.shape) and host.replicas_of(line.shape, "now") for host in hosts
        )

    def _hosts_opened(self, draft: Draft, line: Line) -> list[Host] | None:
        """The hosts that have opened since a line found no room; None for any."""
        at = line.blocked_at
        if at < 0 or draft.state.windows:
            return None
        if at not in self._opened:
            self._opened[at] = self.fleet.opened_since(at)
        return self._opened[at]

    def _passes_by_now(self, line: Line) -> bool:
        """Whether time alone has opened the reserved hosts to this queue group: its tenant is owed more by now.

        `Holding` scans for such groups once a second. A group that is served before must not wait for that.
        """
        held = self.holding.reservation
        if held is None or not line.barred:
            return False
        return not held.hosts & self.holding.barred(line.priority, line.shape, line.tenant)

    def _passes_over(self, draft: Draft, line: Line) -> bool:
        """Whether a line need not be served: it is full, and nobody of its tenant waits behind it for a limit.

        Asked before anybody is placed: then it is the same for all of a shape that found no room at one change. No
        exact look, as there may be as many shapes as lines: who might have room is looked at in its turn.
        """
        if self._passes_by_now(line):
            return False
        key = (line.blocked_at, line.shape.index)
        full = self._still_full.get(key)
        if full is None:
            hosts = self._hosts_opened(draft, line)
            full = hosts is not None and not any(host.may_have_room(line.shape) for host in hosts)
            self._still_full[key] = full
        return full and self.lines.room(draft, line) == math.inf

    @staticmethod
    def _kind_of(line: Line) -> tuple[int, int, int]:
        """Lines that find room, or none, like each other where no host is held back from them."""
        return (line.blocked_at, line.priority, line.shape.index)

    def _is_open_to(self, draft: Draft, line: Line) -> bool:
        """Whether no host is held back, for any reason, from any line of this priority and shape."""
        held, state = self.holding.reservation, draft.state
        if state.windows or state.preempting:
            return False
        return held is None or self.holding.passes(line.priority, line.shape, held)

    def _is_like_full(self, draft: Draft, line: Line) -> bool:
        """Whether another tenant's line like it found no room in this pass; then it counts as looked at, too.

        Thousands of tenants may wait for one kind of GPU, and one of them gets what comes free.
        """
        if self._kind_of(line) not in self._full or not self.lines.may(draft, line):
            return False
        line.blocked_at = self.fleet.changes
        return True

    def _without_full(self, draft: Draft, ready: list[tuple[Head, int, Line]]) -> list[tuple[Head, int, Line]]:
        """The lines that are still to be looked at; whether one is over its tenant's limit by then, its turn tells."""
        room = self.lines.room
        left = [row for row in ready if room(draft, row[2]) != math.inf or not self._is_like_full(draft, row[2])]
        heapify(left)
        return left

    def _serve(self, draft: Draft, line: Line, head: Head, others: tuple[Head, int] | None) -> Served:
        """Place from one line's front until another line's first, which is `others`, comes before it."""
        lines, queue, placing, turns = self.lines, self.queue, self.placing, self.lines.turns
        aged = lines.head_of() if lines.ageing is not None else None
        placed, filled, first, end = 0, 0, 0, End.ALL_LOOKED_AT
        last: Choice | None = None
        aside: list[int] = []
        need, room = line.shape.gpus, lines.room(draft, line)
        while lines.prune(draft, line) and not self.is_done(draft):
            item = line.entries[0]
            if aged is not None:
                head = aged(line)  # who comes later has waited less
            if others is not None and not aside and (head, item) > others:
                end = End.OTHERS_FIRST
                break
            if need > room:
                end = End.OVER_LIMIT
                break
            choice = self._place_first(draft, line)
            if choice is None:
                if self._stands_aside(draft, line, aside):
                    continue
                filled, end = self.filling.fill_in(draft, line, room), End.NO_ROOM
                break
            last, first = choice, first or item >> REPLICA_BITS
            placed += line.shape.together
            room -= need
            most = len(line.entries) if room == math.inf or not need else int(room // need)
            if turns is not None:
                lines.count(draft, line, line.shape.together)
                head, most = turns.head(line), min(most, turns.most(line, others))
            if line.entries and room >= need and most > 0:
                more, last = placing.place_more(draft, line, choice, most, head, others, aged)
                placed += more
                room -= more * need
                if turns is not None:
                    lines.count(draft, line, more)
                    head = turns.head(line)
        if last is not None:
            # flat, four a decision: first job, how many were placed, hosts known, free devices left on the last
            draft.evidence += (first, placed, len(self.fleet.hosts), last.left)
            if turns is None:
                lines.count(draft, line, placed)
        if aside:
            queue.put_back(line, aside)
            filled += 0 if end is End.NO_ROOM else self.filling.fill_in(draft, line, room)
        return Served(placed + filled, end, head)

    def _place_first(self, draft: Draft, line: Line) -> Choice | None:
        """The first of a line; None where it finds no room, and stays."""
        if self.lines.order != "fifo" and self._is_full(draft, line):
            self.placing.in_vain += 1
            return None
        barred = self.holding.barred(line.priority, line.shape, line.tenant)
        choice = self.placing.place(draft, line.shape, line.entries[0], barred)
        if choice is not None:
            self.queue.pop(line)
        return choice

    def _stands_aside(self, draft: Draft, line: Line, aside: list[int]) -> bool:
        """Whether the first of a line, which finds no room, lets others of it go first; it is among `aside` then.

        So where a drain keeps it from hosts, as it could not end before: who stands behind it may have another time
        limit. Else the line is not looked at again until something changes.
        """
        strict, limited = self.lines.order == "fifo", bool(self.lines.left_too_soon(draft, line.entries[0]))
        if limited and not strict and len(aside) < ASIDE_MAX:
            aside.append(self.queue.pop(line))
            return True
        line.blocked_at = self.fleet.changes
        line.barred = line.barred or (strict and limited)
        return False

    # ---------------------------------------------------------------------------------------- preemption

    def _eligible(self, draft: Draft) -> list[tuple[Head, int, Line]]:
        """The lines that found no room, or whose first waits out a drain, and which their tenants may start."""
        changes, lines, head_of = self.fleet.changes, self.lines, self.lines.head_of()
        return [
            (head_of(line) if head_of is not None else -line.priority, line.entries[0], line)
            for line in self.queue.lines.values()
            if lines.prune(draft, line)
            and (line.blocked_at == changes or lines.left_too_soon(draft, line.entries[0]))
            and lines.may(draft, line)
        ]

    def _closed_to(self, draft: Draft, line: Line) -> frozenset[int]:
        """The hosts on which the first of a line may not start, whoever leaves them."""
        return self.holding.barred(line.priority, line.shape, line.tenant) | self.lines.left_too_soon(
            draft, line.entries[0]
        )

    def sweep(self, draft: Draft) -> bool:
        """Take out of the queue what no longer waits: cancels would else fill a line whose head is blocked.

        Some thousands of entries a record; whether all were looked at.
        """
        jobs, fresh = draft.state.jobs, draft.state.next_num

        def is_over(num: int) -> bool:
            job = jobs.get(num)
            return job.over if job is not None else num < fresh

        return self.queue.sweep(is_over, lambda item: self.lines.waits(draft, item), SWEPT_MAX)
