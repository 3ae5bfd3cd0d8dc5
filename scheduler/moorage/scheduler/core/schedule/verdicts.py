"""Decides when a pass may skip a queue group that found no room before.

A group's verdict holds until the fleet changes in a way that could help, or until the reserved hosts are no longer
excluded for it. The end of a job changes one host, so only that host is scanned for each waiting shape, not the whole
fleet.
"""

from __future__ import annotations

import math

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import VOID, Group, Verdict, Waits
from moorage.scheduler.core.schedule.reserve import Reserving

#: (change of the fleet at the verdict, priority, shape): groups of one kind all find room, or none does
_Kind = tuple[int, int, int]


class Verdicts:
    """The verdicts on one engine's queue groups. All other memory here belongs to a single pass."""

    def __init__(self, fleet: Fleet, order: QueueOrder, reserving: Reserving) -> None:
        self._fleet = fleet
        self._order = order
        self._reserving = reserving
        self._last = VOID  # the last verdict that was given
        self._opened: dict[int, list[Host] | None] = {}  # hosts that opened since a change; None for all
        #: for a change and a shape: whether none of the hosts opened since can have room
        self._closed: dict[tuple[int, int], bool] = {}
        self._full: set[_Kind] = set()  # kinds without room in this pass although no host was excluded

    def begin(self) -> None:
        """Forget what belongs to the last pass."""
        self._opened.clear()
        self._closed.clear()
        self._full.clear()

    def give(self, group: Group, waits: Waits) -> None:
        """Record that the first job of a queue group found no room just now."""
        last, change = self._last, self._fleet.changes
        if last.change != change or last.waits is not waits:
            last = self._last = Verdict(waits, change)  # shared, because thousands of groups may get the same verdict
        group.verdict = last

    def is_new(self, group: Group) -> bool:
        """Return whether the fleet is unchanged since a queue group got its verdict."""
        return group.verdict.change == self._fleet.changes

    def holds(self, draft: Draft, group: Group) -> bool:
        """Return whether a queue group's verdict still holds at the start of a pass; if so, renew it.

        It is asked only if the fleet has changed since the verdict. The answer is the same for all groups of a shape
        that found no room at the same change. There may be as many shapes as groups, so the hosts opened since are
        checked only by an upper bound, and exactly once the group is served (`finds_none`). A group of a tenant with a
        limit is always served, as serving it records which jobs wait for the limit.
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
        """Return whether a group without room finds none on the hosts opened since its verdict; scans those hosts.

        False if any host may have opened for it.
        """
        hosts = None if self._is_let_in(group) else self._hosts_opened(draft, group)
        return hosts is not None and not any(
            host.may_have_room(group.shape) and host.replicas_of(group.shape, "now") for host in hosts
        )

    def _hosts_opened(self, draft: Draft, group: Group) -> list[Host] | None:
        """Return the hosts that opened since a queue group found no room; None if any host may have.

        With planned drains, excluded hosts differ from job to job, so None is returned.
        """
        at = group.verdict.change
        if at < 0 or draft.state.windows:
            return None
        if at not in self._opened:
            self._opened[at] = self._fleet.opened_since(at)
        return self._opened[at]

    def _is_let_in(self, group: Group) -> bool:
        """Return whether the reserved hosts are now available to this queue group, as its tenant is owed more.

        `Reserving` checks that only once a second; without this check, later jobs could take the hosts before.
        """
        held = self._reserving.reservation
        if held is None or group.verdict.waits is not Waits.RESERVED:
            return False
        return not held.hosts & self._reserving.excluded(group.priority, group.shape, group.tenant)

    # ------------------------------------------------------------------------------------ alike in one pass

    @staticmethod
    def kind_of(group: Group) -> _Kind:
        """Return the kind of a queue group; groups of one kind find room, or none, alike if no host is excluded."""
        return (group.verdict.change, group.priority, group.shape.index)

    def no_room_for(self, draft: Draft, kind: _Kind, group: Group) -> None:
        """Note for this pass that groups of this kind find no room, because this group found none.

        Does nothing if hosts may have been excluded for this group: another one may find room on them.
        """
        held, state = self._reserving.reservation, draft.state
        if state.windows or state.preempting:
            return
        if held is None or self._reserving.passes(group.priority, group.shape, held):
            self._full.add(kind)

    def is_like_full(self, draft: Draft, group: Group) -> bool:
        """Return whether a group of the same kind found no room in this pass; then this group gets that verdict.

        Thousands of tenants may wait for one kind of GPU while one tenant takes each GPU that becomes free.
        """
        if self.kind_of(group) not in self._full or not self._order.may(draft, group):
            return False
        self.give(group, Waits.NO_ROOM)
        return True
