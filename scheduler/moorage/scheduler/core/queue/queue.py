"""The queue: groups of jobs of one priority, shape and tenant, by arrival. Each group is tried only once a pass.

A group that found no room is skipped until something changes that may help it. Entries are plain integers (job number
and replica), so a hundred thousand queued jobs cost the garbage collector nothing. All replicas of a job that were
never placed have one entry, that of the first of them; once it leaves, the next one takes its place. Limits, holds and
shares are a tenant's, so they are checked once for each group.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import Member
from moorage.schemas.ranges import NOTHING, Ranges, both, count_of, is_in

REPLICA_BITS: Final = 20  # 1,000,000 replicas a job
REPLICA_MASK: Final = (1 << REPLICA_BITS) - 1


#: the sort key of queue groups, see `order`: smaller goes first
Key = tuple[int, int, int]
_Name = tuple[int, int, str]  # (minus the priority, the shape's index, the tenant)
#: the entries of one job in order, and its part of `Group.rest`
Entries = tuple[list[int], tuple[int, Ranges] | None]


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

    __slots__ = ("entries", "has_more", "priority", "rest", "resumes", "shape", "tenant", "verdict")

    def __init__(self, priority: int, shape: Shape, tenant: str) -> None:
        self.priority = priority
        self.shape = shape
        self.tenant = tenant
        self.entries: deque[int] = deque()  # ascending; nearly all entries arrive in order and leave from the front
        #: by job: the entry that stands for all its replicas which were never placed, and the numbers behind it
        self.rest: dict[int, tuple[int, Ranges]] = {}
        self.verdict = VOID
        self.has_more = False  # entries were added since the verdict
        self.resumes: Member | None = None  # a frozen member that is to be resumed: its only entry

    @property
    def size(self) -> int:
        """The number of replicas that wait, and of gangs."""
        count = len(self.entries)
        return count + sum(count_of(rest) for _, rest in self.rest.values()) if self.rest else count

    def behind(self, item: int) -> int:
        """Return how many more replicas an entry stands for."""
        at, rest = self.rest.get(item >> REPLICA_BITS, (-1, NOTHING))
        return count_of(rest) if at == item else 0

    def following(self, item: int, still: Ranges | None = None) -> int | None:
        """Return the entry that takes the place of one that leaves; None for none.

        `still` are the replicas of its job that wait, where some behind it may have ended.
        """
        num = item >> REPLICA_BITS
        found = self.rest.get(num)
        if found is None or found[0] != item:
            return None
        rest = found[1] if still is None else both(found[1], still)
        if not rest:
            del self.rest[num]
            return None
        first, last = rest[0]
        rest = ((first + 1, last), *rest[1:]) if first < last else rest[1:]
        following = entry(num, first)
        if rest:
            self.rest[num] = following, rest
        else:
            del self.rest[num]
        return following

    def __lt__(self, other: Group) -> bool:
        """Return whether this group comes before another with an equal key: a fixed order.

        With ageing, an entry that was moved stands in two groups with equal keys for a while.
        """
        return (self.priority, self.shape.index) > (other.priority, other.shape.index)


class Parked:
    """A job that may place nothing now: it runs as many replicas as its request lets run at once."""

    __slots__ = ("items", "priority", "rest", "shape", "tenant")

    def __init__(
        self, priority: int, shape: Shape, tenant: str, items: list[int], rest: tuple[int, Ranges] | None
    ) -> None:
        self.priority = priority
        self.shape = shape
        self.tenant = tenant
        self.items = items  # its entries, in order
        self.rest = rest  # its part of `Group.rest`


class Queue:
    """All queue groups. A replica that is placed, or held by an operator, leaves its group at once.

    The entry of a replica that ended while queued stays until a pass or a sweep removes it. So a caller that takes the
    first entry of a group must check that its replica still waits.

    A job with a bound of its own (`rooms`) leaves its group when it has placed as many as it may, and is parked until
    some of them end: it waits for nothing then, so no other job is kept from hosts for it.
    """

    def __init__(self, new_shape: Callable[[Shape], None] | None = None) -> None:
        #: called with the shape of each new group, before it is asked where that fits
        self._new_shape = new_shape
        self.groups: dict[_Name, Group] = {}
        self.rooms: dict[int, int] = {}  # by job with such a bound: how many more replicas it may place now
        self.parked: dict[int, Parked] = {}  # by job
        #: jobs of which so many replicas came back that no new one is placed: their entries for these are left out
        self.closed: set[int] = set()
        self._unswept: list[_Name] = []  # groups that the current sweep has not finished
        self._swept = -1  # the last entry checked in the last group of `_unswept`

    def __len__(self) -> int:
        """Return the number of replicas and gangs that wait. It reads all queue groups: for questions."""
        return sum(group.size for group in self.groups.values())

    @property
    def entries(self) -> int:
        """The number of entries, of which one may stand for many replicas. It reads all queue groups."""
        return sum(len(group.entries) for group in self.groups.values())

    @property
    def is_empty(self) -> bool:
        """Whether no entry is queued; stops at the first group that has one."""
        return not any(group.entries for group in self.groups.values())

    def add(self, priority: int, shape: Shape, item: int, tenant: str) -> None:
        """Put one entry into its queue group, at its place in the order of arrival."""
        if self.rooms and self.rooms.get(item >> REPLICA_BITS, 1) <= 0:
            parked = self.parked.setdefault(item >> REPLICA_BITS, Parked(priority, shape, tenant, [], None))
            parked.items.insert(bisect(parked.items, item), item)
            return
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

    def add_fresh(self, priority: int, shape: Shape, num: int, fresh: Ranges, tenant: str) -> None:
        """Put in the entry of a job's replicas that were never placed; of a gang, it stands for all ranks."""
        if not fresh or num in self.closed:
            return
        first, last = fresh[0]
        item = entry(num, first)
        self.add(priority, shape, item, tenant)
        rest = ((first + 1, last), *fresh[1:]) if first < last else fresh[1:]
        if not rest or shape.together > 1:
            return
        if num in self.parked:
            self.parked[num].rest = item, rest
        else:
            self.groups[(-priority, shape.index, tenant)].rest[num] = item, rest

    def bound(self, num: int, room: int, key: tuple[int, Shape, str]) -> bool:
        """Set how many more replicas a job may place now; `key` is its priority, shape and tenant.

        It is parked, or put back into its group. Return whether it was put back.
        """
        self.rooms[num] = room
        parked = self.parked.get(num)
        if room <= 0 and parked is None:
            self._park(num, *key)
        elif room > 0 and parked is not None:
            del self.parked[num]
            self._put(num, (parked.priority, parked.shape, parked.tenant), parked.items, parked.rest)
            return True
        return False

    def unbound(self, num: int) -> None:
        """Forget a job that is over."""
        self.rooms.pop(num, None)
        self.parked.pop(num, None)
        self.closed.discard(num)

    def close(self, num: int, key: tuple[int, Shape, str], fresh: Ranges) -> None:
        """Leave out a job's replicas that were never placed (`fresh`), until `open`."""
        items, _ = self.remove(*key[:2], num, key[2])
        self._put(num, key, [item for item in items if not is_in(fresh, item & REPLICA_MASK)], None)
        self.closed.add(num)

    def open(self, num: int, key: tuple[int, Shape, str], fresh: Ranges) -> None:
        """Put in a job's replicas that were never placed, which `close` has left out."""
        self.closed.discard(num)
        self.add_fresh(*key[:2], num, fresh, key[2])

    def _park(self, num: int, priority: int, shape: Shape, tenant: str) -> None:
        items, rest = self.remove(priority, shape, num, tenant)
        if items:
            self.parked[num] = Parked(priority, shape, tenant, items, rest)

    def _count(self, group: Group, item: int) -> None:
        """Count a replica that is placed now, if its job has a bound."""
        num = item >> REPLICA_BITS
        room = self.rooms.get(num)
        if room is not None:
            self.rooms[num] = room - 1
            if room <= 1:
                self._park(num, group.priority, group.shape, group.tenant)

    def remove(self, priority: int, shape: Shape, num: int, tenant: str) -> Entries:
        """Remove a job from its queue group; return its entries in order, and its part of `Group.rest`."""
        if num in self.parked:
            parked = self.parked.pop(num)
            return parked.items, parked.rest
        group = self.groups.get((-priority, shape.index, tenant))
        if group is None:
            return [], None
        entries, found = group.entries, list[int]()
        at = bisect_left(entries, entry(num, 0))
        entries.rotate(-at)
        while entries and entries[0] >> REPLICA_BITS == num:
            found.append(entries.popleft())
        entries.rotate(at)
        return found, group.rest.pop(num, None)

    def move(self, num: int, tenant: str, old: tuple[int, Shape], new: tuple[int, Shape]) -> None:
        """Move a job from the group of its old priority and shape to that of the new ones, in one walk along each."""
        items, rest = self.remove(*old, num, tenant)
        self._put(num, (*new, tenant), items, rest)

    def _put(self, num: int, key: tuple[int, Shape, str], items: list[int], rest: tuple[int, Ranges] | None) -> None:
        """Put entries of one job that were removed in order into a group, or park them there."""
        if not items:
            return
        if self.rooms and self.rooms.get(num, 1) <= 0:
            self.parked[num] = Parked(*key, items, rest)
            return
        self.add(*key[:2], items[0], key[2])
        group = self.groups[(-key[0], key[1].index, key[2])]
        entries, at = group.entries, bisect(group.entries, items[0])
        entries.rotate(-at)
        entries.extendleft(reversed(items[1:]))
        entries.rotate(at)
        if rest is not None:
            group.rest[num] = rest

    def take(self, group: Group, item: int) -> int | None:
        """Remove an entry that is placed from its group, wherever it is; return that which took its place, if any."""
        entries = group.entries
        at = bisect_left(entries, item)
        if at == len(entries) or entries[at] != item:
            return None
        following = group.following(item)
        if following is None:
            del entries[at]
        else:
            entries[at] = following
        if self.rooms:
            self._count(group, item)
            if item >> REPLICA_BITS in self.parked:
                return None
        return following

    def waiting(self) -> list[Group]:
        """Return the queue groups that have entries; empty groups are removed."""
        found = [group for group in self.groups.values() if group.entries]
        if len(found) < len(self.groups):
            self.groups = {name: group for name, group in self.groups.items() if group.entries}
        return found

    @staticmethod
    def pop(group: Group) -> int:
        """Remove and return the first entry of a queue group."""
        item = group.entries.popleft()
        if group.rest and (following := group.following(item)) is not None:
            group.entries.appendleft(following)
        return item

    def place_first(self, group: Group) -> int:
        """Remove and return the first entry of a queue group, which is placed."""
        item = self.pop(group)
        if self.rooms:
            self._count(group, item)
        return item

    @staticmethod
    def skip(group: Group, still: Ranges) -> None:
        """Remove the first entry of a queue group, which waits no more; of its job's never placed, `still` do."""
        item = group.entries.popleft()
        if group.rest and (following := group.following(item, still)) is not None:
            group.entries.appendleft(following)

    @staticmethod
    def put_back(group: Group, jobs: list[Entries]) -> None:
        """Put jobs that were removed in order back to the front of their queue group."""
        for items, rest in reversed(jobs):
            group.entries.extendleft(reversed(items))
            if rest is not None:
                group.rest[items[0] >> REPLICA_BITS] = rest

    def sweep(
        self,
        is_over: Callable[[int], bool],
        waits: Callable[[int], bool],
        still: Callable[[int], Ranges],
        most: int,
    ) -> bool:
        """Remove entries that no longer wait. Return whether all entries have been checked.

        One call checks about `most` entries, and the next call goes on behind them. `is_over` and `still` (for the
        replicas that were never placed, and wait) are called with a job's number, `waits` with an entry.
        """
        if not self._unswept:
            self._unswept = list(self.groups)
        while self._unswept and most > 0:
            group = self.groups.get(self._unswept[-1])
            if group is not None:
                most -= self._sweep_part(group, is_over, waits, still, most)
            if group is None or not group.entries or self._swept >= group.entries[-1]:
                self._unswept.pop()
                self._swept = -1
                most -= 1
        return not self._unswept

    def _sweep_part(
        self,
        group: Group,
        is_over: Callable[[int], bool],
        waits: Callable[[int], bool],
        still: Callable[[int], Ranges],
        most: int,
    ) -> int:
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
            elif (following := group.following(item, NOTHING if over else still(num))) is not None:
                kept.append(following)
        entries.extendleft(reversed(kept))
        entries.rotate(at)
        return count

    def group_of(self, priority: int, shape: Shape, tenant: str) -> Group | None:
        """Return the queue group that a job of this priority, shape and tenant would join; None if there is none."""
        return self.groups.get((-priority, shape.index, tenant))

    def position(self, priority: int, item: int, standing: Callable[[int, int], int]) -> int:
        """Return how many replicas come before this entry. Reads every group: for questions, not for each record.

        `standing` returns the effective priority of an entry from its own priority and the entry; within a group it
        never rises with later arrival.
        """
        mine, before = (-standing(priority, item), item), 0
        for group in self.groups.values():
            key = _head_by(standing, group.priority)
            before += bisect_left(group.entries, mine, key=key)
            before += sum(group.behind(at) for at, _ in group.rest.values() if key(at) < mine)
        return before
