"""Who is next: priority, then arrival; kept by shape so that what cannot start now is looked at once, not each.

A shape that found no room is blocked until something changed that may let it start. The entries are plain integers
(job number and replica), so a hundred thousand queued jobs cost the garbage collector nothing. A tenant that an
operator has held or limited has lines of its own, so that whether it may start anything is asked once a line; under
fair share every tenant has.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Callable
from heapq import heapify
from typing import Final

from moorage.scheduler.core.shape import Shape

REPLICA_BITS: Final = 10  # 1,024 replicas a job


#: what comes before arrival in the order of lines: less goes first
Head = int | tuple[int, int, int]
_Key = tuple[int, int, str]  # minus the priority, the shape's index, a tenant set apart or nobody


def entry(num: int, replica: int) -> int:
    """One replica in the queue; smaller arrived earlier."""
    return num << REPLICA_BITS | replica


def _head_by(standing: Callable[[int, int], int], priority: int) -> Callable[[int], tuple[int, int]]:
    return lambda item: (-standing(priority, item), item)


class Line:
    """The waiting replicas of one priority and shape, in order of arrival; with `tenant`, of that one alone."""

    __slots__ = ("barred", "blocked_at", "entries", "granted_ms", "priority", "shape", "tenant")

    def __init__(self, priority: int, shape: Shape, tenant: str) -> None:
        self.priority = priority
        self.shape = shape
        self.tenant = tenant
        self.entries: deque[int] = deque()  # ascending: nearly all come in order, and go from the front
        self.blocked_at = -1  # the fleet's change number at which it found no room
        self.barred = False  # a reservation bars it: who joins it may be short enough to end before that
        self.granted_ms = 0  # ledger ms at which hosts were last closed for one of it

    def __hash__(self) -> int:
        return id(self)  # said here, since in compiled code an order takes the inherited one away

    def __lt__(self, other: Line) -> bool:
        """An entry that was moved stands in two lines for a while, which count alike where jobs age."""
        return (self.priority, self.shape.index) > (other.priority, other.shape.index)


class Queue:
    """All lines. Removal is lazy: whoever pops an entry checks that its replica still waits."""

    def __init__(self) -> None:
        self.lines: dict[_Key, Line] = {}
        self.size = 0
        self.by_tenant = False  # every tenant has lines of its own
        self._apart: set[str] = set()
        self.taken: set[tuple[_Key, int]] = set()  # entries that were taken out, and stand in their lines still
        self._unswept: list[_Key] = []  # lines that the sweep under way has still to look at
        self._swept = 0  # entries of the next of them that were kept

    def _key(self, priority: int, shape: Shape, tenant: str) -> _Key:
        return (-priority, shape.index, tenant if self.by_tenant or tenant in self._apart else "")

    def add(self, priority: int, shape: Shape, item: int, tenant: str) -> None:
        key = (-priority, shape.index, tenant if self.by_tenant or tenant in self._apart else "")  # `_key`
        self.size += 1
        if self.taken and (key, item) in self.taken:
            self.taken.remove((key, item))
            return
        line = self.lines.get(key)
        if line is None:
            line = self.lines[key] = Line(priority, shape, key[2])
        if line.barred:
            line.barred, line.blocked_at = False, -1
        entries = line.entries
        if not entries or item > entries[-1]:
            entries.append(item)
        elif item < entries[0]:
            entries.appendleft(item)
        else:  # back from a pause, into the midst of those that came meanwhile
            entries.insert(bisect(entries, item), item)

    def take_out(self, priority: int, shape: Shape, item: int, tenant: str) -> None:
        """An entry that stands in its line counts no more, until it is added again."""
        self.taken.add((self._key(priority, shape, tenant), item))
        self.size -= 1

    def remove(self, priority: int, shape: Shape, item: int, tenant: str) -> bool:
        """An entry leaves its line for good, at the cost of a walk along the line; whether it stood there."""
        line = self.lines.get(self._key(priority, shape, tenant))
        if line is None or item not in line.entries:
            return False
        line.entries.remove(item)
        self.size -= 1
        return True

    def is_taken(self, line: Line, item: int) -> bool:
        return bool(self.taken) and ((-line.priority, line.shape.index, line.tenant), item) in self.taken

    def set_apart(self, tenant: str, is_of: Callable[[int], bool]) -> None:
        """Give a tenant lines of its own for the rest of this reign; `is_of` tells its entries.

        The first time it walks the whole queue, some 0.2 µs an entry: for an operator's act, not for the tick.
        """
        if tenant in self._apart:
            return
        self._apart.add(tenant)
        for key, line in list(self.lines.items()):
            mine = [item for item in line.entries if is_of(item)] if not line.tenant else []
            if not mine:
                continue
            line.entries = deque(item for item in line.entries if not is_of(item))
            own = self.lines[(key[0], key[1], tenant)] = Line(line.priority, line.shape, tenant)
            own.entries = deque(mine)
            own.blocked_at, own.barred = line.blocked_at, line.barred
            for item in mine:
                if (key, item) in self.taken:
                    self.taken.remove((key, item))
                    self.taken.add(((key[0], key[1], tenant), item))

    def part(self, tenant_of: Callable[[int], str]) -> None:
        """Give every tenant lines of its own for the rest of this reign. `tenant_of` an entry; "" where it is over.

        It walks the whole queue once: for an operator's act, not for the tick.
        """
        taken, self.taken = self.taken, set()
        shared = [(key, line) for key, line in self.lines.items() if not line.tenant]
        self.by_tenant = True
        for key, line in shared:
            del self.lines[key]
            for item in line.entries:
                tenant = tenant_of(item)
                if (key, item) in taken:
                    taken.remove((key, item))
                elif tenant:
                    self.size -= 1
                    self.add(line.priority, line.shape, item, tenant)
                else:
                    self.size -= 1
        self.taken |= taken

    def ready(
        self,
        changes: int,
        head: Callable[[Line], Head] | None = None,
        still_full: Callable[[Line], bool] = lambda line: False,
    ) -> list[tuple[Head, int, Line]]:
        """The lines that may find room, as a heap of (head, first entry, line); `head` is minus the priority.

        `still_full` tells of one that found none at an earlier change that what changed since gives it none.
        """
        found: list[tuple[Head, int, Line]] = []
        empty = []
        for key, line in self.lines.items():
            if not line.entries:
                empty.append(key)
            elif line.blocked_at == changes:
                continue
            elif line.blocked_at >= 0 and still_full(line):
                line.blocked_at = changes
            else:
                found.append((key[0] if head is None else head(line), line.entries[0], line))
        for key in empty:
            del self.lines[key]
        heapify(found)
        return found

    def pop(self, line: Line) -> int:
        item = line.entries.popleft()
        if self.taken and self.is_taken(line, item):
            self.taken.remove(((-line.priority, line.shape.index, line.tenant), item))
        else:
            self.size -= 1
        return item

    def put_back(self, line: Line, items: list[int]) -> None:
        """Entries that were popped from a line's front, in order, stand there again."""
        line.entries.extendleft(reversed(items))
        self.size += len(items)

    def sweep(self, is_over: Callable[[int], bool], waits: Callable[[int], bool], most: int) -> bool:
        """Keep only the entries that still wait and were not taken out; of a job that is over, by its number, none.

        Looks at some `most` entries, and goes on from there the next time; whether all were looked at.
        """
        if not self._unswept:
            self._unswept = list(self.lines)
            self._swept = 0
        while self._unswept and most > 0:
            line = self.lines.get(self._unswept[-1])
            if line is not None and self._swept < len(line.entries):
                most -= self._sweep_part(line, is_over, waits, most)
            if line is None or self._swept >= len(line.entries):
                self._unswept.pop()
                self._swept = 0
                most -= 1
        return not self._unswept

    def _sweep_part(self, line: Line, is_over: Callable[[int], bool], waits: Callable[[int], bool], most: int) -> int:
        """The same with some entries of a line, behind those that were kept; how many."""
        entries, key = line.entries, (-line.priority, line.shape.index, line.tenant)
        entries.rotate(-self._swept)
        count = min(most, len(entries) - self._swept)
        kept: list[int] = []
        last, over = -1, False
        for _ in range(count):
            item = entries.popleft()
            num = item >> REPLICA_BITS
            if num != last:
                last, over = num, is_over(num)
            if self.is_taken(line, item):
                self.taken.remove((key, item))
            elif over or not waits(item):
                self.size -= 1
            else:
                kept.append(item)
        entries.extendleft(reversed(kept))
        entries.rotate(self._swept)
        self._swept += len(kept)
        return count

    def line_of(self, priority: int, shape: Shape, tenant: str) -> Line | None:
        """The line that whoever asks so would join, if it is there."""
        return self.lines.get(self._key(priority, shape, tenant))

    def position(self, priority: int, item: int, standing: Callable[[int, int], int] | None = None) -> int:
        """How many entries stand before this one; looks at every line, so it is for questions, not for the tick.

        `standing` is what a priority counts as for an entry, where jobs age: less the later an entry came.
        """
        before = 0
        if standing is not None:
            mine = (-standing(priority, item), item)
            for line in self.lines.values():
                key = _head_by(standing, line.priority)
                before += bisect_left(line.entries, mine, key=key)
            return before
        for line in self.lines.values():
            if line.priority > priority:
                before += len(line.entries)
            elif line.priority == priority:
                before += bisect_left(line.entries, item)
        return before
