"""Who is next: priority, then arrival; kept by shape so that what cannot start now is looked at once, not each.

A shape that found no room is blocked until something changed that may let it start. The entries are plain integers
(job number and replica), so a hundred thousand queued jobs cost the garbage collector nothing.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from heapq import heapify
from typing import Final

from moorage.scheduler.core.shape import Shape

REPLICA_BITS: Final = 10  # 1,024 replicas a job


def entry(num: int, replica: int) -> int:
    """One replica in the queue; smaller arrived earlier."""
    return num << REPLICA_BITS | replica


class Line:
    """The waiting replicas of one priority and shape, in order of arrival."""

    __slots__ = ("blocked_at", "entries", "priority", "shape")

    def __init__(self, priority: int, shape: Shape) -> None:
        self.priority = priority
        self.shape = shape
        self.entries: deque[int] = deque()  # ascending: nearly all come in order, and go from the front
        self.blocked_at = -1  # the fleet's change number at which it found no room


class Queue:
    """All lines. Removal is lazy: whoever pops an entry checks that its replica still waits."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, int], Line] = {}
        self.size = 0

    def add(self, priority: int, shape: Shape, item: int) -> None:
        key = (-priority, shape.index)
        line = self.lines.get(key)
        if line is None:
            line = self.lines[key] = Line(priority, shape)
        entries = line.entries
        if not entries or item > entries[-1]:
            entries.append(item)
        elif item < entries[0]:
            entries.appendleft(item)
        else:  # back from a pause, into the midst of those that came meanwhile
            entries.insert(bisect(entries, item), item)
        self.size += 1

    def ready(self, changes: int) -> list[tuple[int, int, Line]]:
        """The lines that may find room, as a heap of (-priority, first entry, line)."""
        found = []
        empty = []
        for key, line in self.lines.items():
            if not line.entries:
                empty.append(key)
            elif line.blocked_at != changes:
                found.append((key[0], line.entries[0], line))
        for key in empty:
            del self.lines[key]
        heapify(found)
        return found

    def pop(self, line: Line) -> int:
        self.size -= 1
        return line.entries.popleft()

    def position(self, priority: int, item: int) -> int:
        """How many entries stand before this one; counts every line, so it is for questions, not for the tick."""
        before = 0
        for line in self.lines.values():
            if line.priority > priority:
                before += len(line.entries)
            elif line.priority == priority:
                before += sum(1 for other in line.entries if other < item)
        return before
