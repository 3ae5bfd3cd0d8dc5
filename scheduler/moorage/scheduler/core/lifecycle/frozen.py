"""Frozen members: which slots they wait for, which jobs end for them, and when they get their devices again.

A frozen member holds no devices, and comes back to those on which it was placed. Until it has ended these take
preemptible jobs alone; once it is to run on, or to end with a grace, these jobs end for it. All of this follows from
the members' states at the end of each record, so no event has to report a change of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.ledger.records import Count
from moorage.scheduler.core.ledger.state import AT_EXITED, FROZEN, LEAVING, Member, State, Tenant
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.schemas.attempt import AttemptName

#: the reason of the end of a preemptible job; it does not name the frozen job, which may be another tenant's
WHY: Final = "preempted: the frozen job that waits for its GPUs needs them"
#: the reason of the transition by which a frozen job has its GPUs again, before its worker has resumed it
LEASED: Final = "it has its GPUs again"


def is_over_limit(tenant: Tenant, member: Member) -> bool:
    """Return whether the limit of its tenant keeps a frozen member from its devices.

    What its tenant's own members have of them they give up.
    """
    if not tenant.gpus_max:
        return False
    peers = [other for other in member.worker.members.values() if other.replica.job.tenant == member.replica.job.tenant]
    given = sum(other.mask.bit_count() for other in peers if other.mask & member.home)
    return tenant.gpus - given + member.home.bit_count() > tenant.gpus_max


class Frozen:
    """Decides for the frozen members on the hosts of one fleet."""

    def __init__(self, state: State, fleet: Fleet, lifecycle: Lifecycle) -> None:
        self._state = state
        self._fleet = fleet
        self._lifecycle = lifecycle
        #: the members that the last pass did not resume because an earlier job waits for the limit of their tenant
        self.refused = set[AttemptName]()

    def settle(self, draft: Draft) -> None:
        """Note which slots frozen members wait for, and ask the preemptible jobs to end on those that they need.

        To be called for each record before anything is placed.
        """
        self._fleet.asleep.clear()
        if self.refused:
            self.refused &= {name for host in self._fleet.with_frozen.values() for name in host.frozen}
        for host in list(self._fleet.with_frozen.values()):
            self._settle(draft, host)

    def _settle(self, draft: Draft, host: Host) -> None:
        awaited = needed = kept = 0
        needing: list[Member] = []
        for key, member in list(host.frozen.items()):
            if key not in host.worker.members or member.mask:
                del host.frozen[key]
                continue
            self._leave_closed(draft, host, member)
            awaited |= member.home
            if self._lifecycle.shape_of(member.replica.job).sleeps:
                self._fleet.asleep.setdefault(member.replica.job.num, set()).add(host.worker.num)
            else:
                kept |= member.home
            if member.phase == AT_EXITED:
                needed |= member.home  # its worker may have resumed it to end: its memory is not seen free yet
            elif self._needs(member):
                needed |= member.home
                needing.append(member)
        for other in list(host.worker.members.values()) if needed & ~host.free else ():
            # who was placed there first goes first: of two that were frozen in turn, the later one waits
            mask = other.mask if other.preemptible else 0
            is_beside = any(mask & member.home and other.fence > member.fence for member in needing)
            if is_beside and self._lifecycle.is_on_worker(other):
                self._lifecycle.leave(draft, other, WHY, Count.NONE)
        self._fleet.set_awaited(host, awaited, awaited & ~kept, needed)
        if not host.frozen:
            self._fleet.with_frozen.pop(host.worker.num, None)

    def _leave_closed(self, draft: Draft, host: Host, member: Member) -> None:
        """Have a frozen member end whose device jobs do not get any more."""
        closed = member.home & ~host.lent
        if closed and self._lifecycle.is_on_worker(member):
            slot = (closed & -closed).bit_length() - 1
            why = f"GPU {slot} of {host.worker.id}, which the frozen job waits for, is not lent any more"
            self._lifecycle.leave(draft, member, why, Count.NONE)

    def _needs(self, member: Member) -> bool:
        """Return whether a frozen member is to run on and may, or has a grace to save its work on its devices."""
        state = member.replica.state
        if state in LEAVING:
            return self._lifecycle.request_of(member.replica.job).workload.grace_s > 0
        return state == FROZEN and not member.freeze and self._may_run(member)

    def _may_run(self, member: Member) -> bool:
        """Return whether a member may have its devices once they are free: nobody gives them up for one on hold.

        Nor if some of them are in other use, unwell or in quarantine, or if an earlier job of its tenant is to start.
        """
        if member.name in self.refused or member.home & self._fleet.hosts[member.worker.num].shut:
            return False
        job = member.replica.job
        tenant = self._state.read_tenant(job.tenant)
        if job.hold is not None or tenant.hold is not None:
            return False
        return not is_over_limit(tenant, member)

    def waiting(self) -> Iterator[Member]:
        """Yield the frozen members that are to run on, as soon as their devices are theirs again."""
        for host in self._fleet.with_frozen.values():
            for member in host.frozen.values() if host.heard and not host.stale else ():
                row = member.replica  # a later attempt of this replica may be frozen, too
                is_frozen = row.state == FROZEN and row.member is member and not member.mask
                if is_frozen and not member.freeze:
                    yield member

    def resume(self, draft: Draft, member: Member) -> bool:
        """Lease a frozen member its devices again if all of them are free; return whether that was done."""
        host = self._fleet.hosts[member.worker.num]
        if host.waiting or member.home & ~(host.free & ~host.shut):
            return False
        draft.resume(member.replica, LEASED, leased=True)
        self._fleet.resume(host, member)
        return True
