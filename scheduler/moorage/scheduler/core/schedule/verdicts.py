"""When the verdict of a queue group is void: the one rule by which a pass leaves out what would find no room again.

A verdict holds until the fleet changes in a way that could help, or until the hosts that are reserved for another job
are no longer closed to the group. A job's end changes one host, so it costs a scan of that host for each kind of
request that waits, and not one of the whole fleet.
"""

from __future__ import annotations

import math

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import Host
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import VOID, Group, Verdict, Waits
from moorage.scheduler.core.schedule.reserve import Reserving

#: the change at which it found no room, its priority and its shape: such groups find room, or none, like each other
_Kind = tuple[int, int, int]


class Verdicts:
    """The verdicts of one engine's queue groups. What it remembers beside those is of one pass."""

    def __init__(self, fleet: Fleet, order: QueueOrder, reserving: Reserving) -> None:
        self._fleet = fleet
        self._order = order
        self._reserving = reserving
        self._last = VOID  # the last verdict that was given
        self._opened: dict[int, list[Host] | None] = {}  # the hosts that have opened since a change; None for any
        #: for a change and a shape: whether none of the hosts that have opened since may have room
        self._closed: dict[tuple[int, int], bool] = {}
        self._full: set[_Kind] = set()  # found no room in this pass, with no host excluded

    def begin(self) -> None:
        """Begin a pass."""
        self._opened.clear()
        self._closed.clear()
        self._full.clear()

    def give(self, group: Group, waits: Waits) -> None:
        """The first job of a queue group found no room just now."""
        last, change = self._last, self._fleet.changes
        if last.change != change or last.waits is not waits:
            last = self._last = Verdict(waits, change)  # thousands of groups may get the same one
        group.verdict = last

    def is_new(self, group: Group) -> bool:
        """Return whether nothing in the fleet has changed since a queue group got its verdict."""
        return group.verdict.change == self._fleet.changes

    def holds(self, draft: Draft, group: Group) -> bool:
        """Whether the verdict of a queue group holds though the fleet has changed, before anything is placed in a pass.

        It is the same then for all groups of a shape that found no room at one change. There may be as many shapes as
        groups, so the hosts that have opened are not scanned here, but when its turn comes (`finds_none`). A group is
        not left out while jobs of its tenant wait behind it for the tenant's limit.
        """
        verdict = group.verdict
        if verdict.waits is Waits.RESERVED and self._is_let_in(group):
            return False
        key = (verdict.change, group.shape.index)
        closed = self._closed.get(key)
        if closed is None:
            hosts = self._hosts_opened(draft, group)
            closed = hosts is not None and not any(host.may_have_room(group.shape) for host in hosts)
            self._closed[key] = closed
        if not closed or self._order.room(draft, group) != math.inf:
            return False
        self.give(group, verdict.waits)
        return True

    def finds_none(self, draft: Draft, group: Group) -> bool:
        """Whether a queue group that found no room finds none on the hosts that have opened since: they are scanned."""
        hosts = None if self._is_let_in(group) else self._hosts_opened(draft, group)
        return hosts is not None and not any(
            host.may_have_room(group.shape) and host.replicas_of(group.shape, "now") for host in hosts
        )

    def _hosts_opened(self, draft: Draft, group: Group) -> list[Host] | None:
        """Return the hosts that have opened since a queue group found no room; None for any.

        Before a drain each job has hosts of its own.
        """
        at = group.verdict.change
        if at < 0 or draft.state.windows:
            return None
        if at not in self._opened:
            self._opened[at] = self._fleet.opened_since(at)
        return self._opened[at]

    def _is_let_in(self, group: Group) -> bool:
        """Return whether the reserved hosts are open to this queue group by now: its tenant is owed more.

        `Reserving` scans for such groups once a second; in a pass before that, whoever comes later could take them.
        """
        held = self._reserving.reservation
        if held is None or group.verdict.waits is not Waits.RESERVED:
            return False
        return not held.hosts & self._reserving.excluded(group.priority, group.shape, group.tenant)

    # ------------------------------------------------------------------------------------ alike in one pass

    @staticmethod
    def kind_of(group: Group) -> _Kind:
        """Return what groups have in common that find room, or none, like each other where no host is excluded."""
        return (group.verdict.change, group.priority, group.shape.index)

    def no_room_for(self, draft: Draft, kind: _Kind, group: Group) -> None:
        """A queue group that was of this kind found no room: if no host is excluded, no group of this kind does."""
        held, state = self._reserving.reservation, draft.state
        if state.windows or state.preempting:
            return
        if held is None or self._reserving.passes(group.priority, group.shape, held):
            self._full.add(kind)

    def is_like_full(self, draft: Draft, group: Group) -> bool:
        """Return whether a group like it found no room in this pass, of whatever tenant; then it has the same verdict.

        Thousands of tenants may wait for one kind of GPU, and one of them gets what comes free.
        """
        if self.kind_of(group) not in self._full or not self._order.may(draft, group):
            return False
        self.give(group, Waits.NO_ROOM)
        return True
