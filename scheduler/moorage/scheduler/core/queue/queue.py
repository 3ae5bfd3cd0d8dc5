"""The queue: groups of jobs of one priority, shape and tenant, by arrival. Each group is tried only once a pass.

A group that found no room is skipped until something changes that may help it. Entries are plain integers (job number
and replica), so a hundred thousand queued jobs cost the garbage collector nothing. Limits, holds and shares are a
tenant's, so they are checked once for each group.
"""

from __future__ import annotations

from bisect import bisect, bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from moorage.scheduler.core.fleet.shape import Shape

REPLICA_BITS: Final = 10  # 1,024 replicas a job


#: the sort key of queue groups, see `order`: smaller goes first
Key = tuple[int, int, int]
_Name = tuple[int, int, str]  # (minus the priority, the shape's index, the tenant)


def entry(num: int, replica: int) -> int:
    """Return the queue entry of one replica; a smaller one arrived earlier."""
    return num << REPLICA_BITS | replica


def _head_by(standing: Callable[[int, int], int], priority: int) -> Callable[[int], tuple[int, int]]:
    return lambda item: (-standing(priority, item), item)


class Verdict(NamedTuple):
    """That the first job of a queue group found no room; `schedule.verdicts` gives it, and says when it is void."""

    change: int  # the change number of the fleet at which it found none; -1: void
    plan: int = -1  # the number of the plans that keep it from reserved hosts with room; -1: none does
    turn: int = -1  # the plan at which some of its entries had their turn at backfill; -1: all were tried


VOID: Final = Verdict(-1)


class Group:
    """The waiting replicas of one priority, shape and tenant, by arrival."""

    __slots__ = ("entries", "has_more", "priority", "shape", "tenant", "verdict")

    def __init__(self, priority: int, shape: Shape, tenant: str) -> None:
        self.priority = priority
        self.shape = shape
        self.tenant = tenant
        self.entries: deque[int] = deque()  # ascending; nearly all entries arrive in order and leave from the front
        self.verdict = VOID
        self.has_more = False  # entries were added since the verdict

    def __lt__(self, other: Group) -> bool:
        """Return whether this group comes before another with an equal key: a fixed order.

        With ageing, an entry that was moved stands in two groups with equal keys for a while.
        """
        return (self.priority, self.shape.index) > (other.priority, other.shape.index)


class Queue:
    """All queue groups. A replica that is placed, or held by an operator, leaves its group at once.

    The entry of a replica that ended while queued stays until a pass or a sweep removes it. So a caller that takes the
    first entry of a group must check that its replica still waits.
    """

    def __init__(self, new_shape: Callable[[Shape], None] | None = None) -> None:
        #: called with the shape of each new group, before it is asked where that fits
        self._new_shape = new_shape
        self.groups: dict[_Name, Group] = {}
        self._unswept: list[_Name] = []  # groups that the current sweep has not finished
        self._swept = -1  # the last entry checked in the last group of `_unswept`

    def __len__(self) -> int:
        """Return the number of entries. It reads all queue groups: for questions, not for each record."""
        return sum(len(group.entries) for group in self.groups.values())

    @property
    def is_empty(self) -> bool:
        """Whether no entry is queued; stops at the first group that has one."""
        return not any(group.entries for group in self.groups.values())

    def add(self, priority: int, shape: Shape, item: int, tenant: str) -> None:
        """Put one entry into its queue group, at its place in the order of arrival."""
        key = (-priority, shape.index, tenant)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(priority, shape, tenant)
            if self._new_shape is not None:
                self._new_shape(shape)
        group.has_more = True
        entries = group.entries
        if not entries or item > entries[-1]:
            entries.append(item)
        elif item < entries[0]:
            entries.appendleft(item)
        else:  # back from a backoff, among entries that came meanwhile
            entries.insert(bisect(entries, item), item)

    def add_all(self, priority: int, shape: Shape, items: list[int], tenant: str) -> None:
        """Add entries of one job, in ascending order, to their queue group, in one walk along the group."""
        for item in items[:1]:
            self.add(priority, shape, item, tenant)
        entries, rest = self.groups[(-priority, shape.index, tenant)].entries if items else deque[int](), items[1:]
        if not rest:
            return
        at = bisect(entries, items[0])
        entries.rotate(-at)
        while entries and items[0] < entries[0] <= items[-1]:  # other replicas of the job
            insort(rest, entries.popleft())
        entries.extendleft(reversed(rest))
        entries.rotate(at)

    def remove(self, priority: int, shape: Shape, items: list[int], tenant: str) -> list[int]:
        """Remove entries of one job, in ascending order, from their queue group; return those that were there.

        It walks along the group once, however many they are.
        """
        group = self.groups.get((-priority, shape.index, tenant))
        if group is None or not items:
            return []
        return self.take(group, items)

    @staticmethod
    def take(group: Group, items: list[int]) -> list[int]:
        """Remove entries from this queue group as `remove` does; `items` must not be empty."""
        entries, wanted = group.entries, set(items)
        at = bisect_left(entries, items[0])
        entries.rotate(-at)
        found: list[int] = []
        others: list[int] = []
        while entries and items[0] <= entries[0] <= items[-1]:
            item = entries.popleft()
            (found if item in wanted else others).append(item)
        entries.extendleft(reversed(others))
        entries.rotate(at)
        return found

    def waiting(self) -> list[Group]:
        """Return the queue groups that have entries; empty groups are removed."""
        found = [group for group in self.groups.values() if group.entries]
        if len(found) < len(self.groups):
            self.groups = {name: group for name, group in self.groups.items() if group.entries}
        return found

    @staticmethod
    def pop(group: Group) -> int:
        """Remove and return the first entry of a queue group."""
        return group.entries.popleft()

    @staticmethod
    def put_back(group: Group, items: list[int]) -> None:
        """Put entries that were popped in order back to the front of their queue group."""
        group.entries.extendleft(reversed(items))

    def sweep(self, is_over: Callable[[int], bool], waits: Callable[[int], bool], most: int) -> bool:
        """Remove entries that no longer wait. Return whether all entries have been checked.

        One call checks about `most` entries, and the next call goes on behind them. `is_over` is called with a job's
        number, `waits` with an entry.
        """
        if not self._unswept:
            self._unswept = list(self.groups)
        while self._unswept and most > 0:
            group = self.groups.get(self._unswept[-1])
            if group is not None:
                most -= self._sweep_part(group, is_over, waits, most)
            if group is None or not group.entries or self._swept >= group.entries[-1]:
                self._unswept.pop()
                self._swept = -1
                most -= 1
        return not self._unswept

    def _sweep_part(self, group: Group, is_over: Callable[[int], bool], waits: Callable[[int], bool], most: int) -> int:
        """Sweep one group from where the last call stopped; return how many entries were checked."""
        entries = group.entries
        at = bisect(entries, self._swept)
        entries.rotate(-at)
        count = min(most, len(entries) - at)
        kept: list[int] = []
        last, over = -1, False
        for _ in range(count):
            item = self._swept = entries.popleft()
            num = item >> REPLICA_BITS
            if num != last:
                last, over = num, is_over(num)
            if not over and waits(item):
                kept.append(item)
        entries.extendleft(reversed(kept))
        entries.rotate(at)
        return count

    def group_of(self, priority: int, shape: Shape, tenant: str) -> Group | None:
        """Return the queue group that a job of this priority, shape and tenant would join; None if there is none."""
        return self.groups.get((-priority, shape.index, tenant))

    def position(self, priority: int, item: int, standing: Callable[[int, int], int] | None = None) -> int:
        """Return how many entries come before this one. Reads every group: for questions, not for each record.

        With ageing, `standing` returns the effective priority of an entry from its own priority and the entry; it falls
        with later arrival.
        """
        before = 0
        if standing is not None:
            mine = (-standing(priority, item), item)
            for group in self.groups.values():
                key = _head_by(standing, group.priority)
                before += bisect_left(group.entries, mine, key=key)
            return before
        for group in self.groups.values():
            if group.priority > priority:
                before += len(group.entries)
            elif group.priority == priority:
                before += bisect_left(group.entries, item)
        return before
