"""Frozen attempts: which slots they wait for, which jobs end for them, and when they get their devices again.

A frozen attempt holds no devices, and comes back to those on which it was placed. Until it has ended these take
preemptible jobs alone; once it is to run on, or to end with a grace, these jobs end for it. All of this follows from
the attempts' states at the end of each record, so no event has to report a change of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.ledger.holding import devices_of
from moorage.scheduler.core.ledger.records import Count
from moorage.scheduler.core.ledger.state import AT_EXITED, FROZEN, LEAVING, Attempt, State, Tenant
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.queue import models
from moorage.schemas.attempt import AttemptName

#: the reason of the end of a preemptible job; it does not name the frozen job, which may be another tenant's
WHY: Final = "preempted: the frozen job that waits for its GPUs needs them"
#: the reason of the transition by which a frozen job has its GPUs again, before its worker has resumed it
LEASED: Final = "it has its GPUs again"


def is_over_limit(tenant: Tenant, attempt: Attempt) -> bool:
    """Return whether the limit of its tenant keeps a frozen attempt from its devices.

    What its tenant's own attempts have of them they give up.
    """
    if not tenant.gpus_max and not models.is_limited(tenant):
        return False
    peers = [
        other for other in attempt.worker.attempts.values() if other.replica.job.tenant == attempt.replica.job.tenant
    ]
    giving = [other for other in peers if other.mask & attempt.home]
    given = sum(other.mask.bit_count() for other in giving)
    if tenant.gpus_max and tenant.gpus - given + attempt.home.bit_count() > tenant.gpus_max:
        return True
    return models.is_limited(tenant) and not models.has_room_for(tenant, attempt, devices_of(giving))


class Frozen:
    """Decides for the frozen attempts on the hosts of one fleet."""

    def __init__(self, state: State, fleet: Fleet, lifecycle: Lifecycle) -> None:
        self._state = state
        self._fleet = fleet
        self._lifecycle = lifecycle
        #: the attempts that the last pass did not resume because an earlier job waits for the limit of their tenant
        self.refused = set[AttemptName]()

    def settle(self, draft: Draft) -> None:
        """Note which slots frozen attempts wait for, and ask the preemptible jobs to end on those that they need.

        To be called for each record before anything is placed.
        """
        self._fleet.asleep.clear()
        if self.refused:
            self.refused &= {name for host in self._fleet.with_frozen.values() for name in host.frozen}
        for host in list(self._fleet.with_frozen.values()):
            self._settle(draft, host)

    def _settle(self, draft: Draft, host: Host) -> None:
        awaited = needed = kept = 0
        needing: list[Attempt] = []
        for key, attempt in list(host.frozen.items()):
            if key not in host.worker.attempts or attempt.mask:
                del host.frozen[key]
                continue
            self._leave_closed(draft, host, attempt)
            awaited |= attempt.home
            if self._lifecycle.shape_of(attempt.replica.job).sleeps:
                self._fleet.asleep.setdefault(attempt.replica.job.num, set()).add(host.worker.num)
            else:
                kept |= attempt.home
            if attempt.phase == AT_EXITED:
                needed |= attempt.home  # its worker may have resumed it to end: its memory is not seen free yet
            elif self._needs(attempt):
                needed |= attempt.home
                needing.append(attempt)
        for other in list(host.worker.attempts.values()) if needed & ~host.free else ():
            # who was placed there first goes first: of two that were frozen in turn, the later one waits
            mask = other.mask if other.preemptible else 0
            is_beside = any(mask & attempt.home and other.fence > attempt.fence for attempt in needing)
            if is_beside and self._lifecycle.is_on_worker(other):
                self._lifecycle.leave(draft, other, WHY, Count.NONE)
        self._fleet.set_awaited(host, awaited, awaited & ~kept, needed)
        if not host.frozen:
            self._fleet.with_frozen.pop(host.worker.num, None)

    def _leave_closed(self, draft: Draft, host: Host, attempt: Attempt) -> None:
        """Have a frozen attempt end whose device jobs do not get any more."""
        closed = attempt.home & ~host.lent
        if closed and self._lifecycle.is_on_worker(attempt):
            slot = (closed & -closed).bit_length() - 1
            why = f"GPU {slot} of {host.worker.id}, which the frozen job waits for, is not lent any more"
            self._lifecycle.leave(draft, attempt, why, Count.NONE)

    def _needs(self, attempt: Attempt) -> bool:
        """Return whether a frozen attempt is to run on and may, or has a grace to save its work on its devices."""
        state = attempt.replica.state
        if state in LEAVING:
            if self._lifecycle.shape_of(attempt.replica.job).sleeps_itself:
                return False  # its program ends as it sleeps
            return self._lifecycle.request_of(attempt.replica.job).workload.grace_s > 0
        return state == FROZEN and not attempt.freeze and self._may_run(attempt)

    def _may_run(self, attempt: Attempt) -> bool:
        """Return whether an attempt may have its devices once they are free: nobody gives them up for one on hold.

        Nor if some of them are in other use, unwell or in quarantine, or if an earlier job of its tenant is to start.
        """
        if attempt.name in self.refused or attempt.home & self._fleet.hosts[attempt.worker.num].shut:
            return False
        job = attempt.replica.job
        tenant = self._state.read_tenant(job.tenant)
        if job.hold is not None or tenant.hold is not None:
            return False
        return not is_over_limit(tenant, attempt)

    def waiting(self) -> Iterator[Attempt]:
        """Yield the frozen attempts that are to run on, as soon as their devices are theirs again."""
        for host in self._fleet.with_frozen.values():
            for attempt in host.frozen.values() if host.heard and not host.stale else ():
                row = attempt.replica  # a later attempt of this replica may be frozen, too
                is_frozen = row.state == FROZEN and row.attempt is attempt and not attempt.mask
                if is_frozen and not attempt.freeze:
                    yield attempt

    def resume(self, draft: Draft, attempt: Attempt) -> bool:
        """Lease a frozen attempt its devices again if all of them are free; return whether that was done."""
        host = self._fleet.hosts[attempt.worker.num]
        if host.waiting or attempt.home & ~(host.free & ~host.shut):
            return False
        draft.resume(attempt.replica, LEASED, leased=True)
        self._fleet.resume(host, attempt)
        return True
