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
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.slots import slots_of
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
    giving = [  # sharers may stay beside each other
        other for other in peers if other.mask & attempt.home and EXCLUSIVE in (attempt.mode, other.mode)
    ]
    given = sum(other.mask.bit_count() for other in giving)
    if tenant.gpus_max and tenant.gpus - given + attempt.home.bit_count() > tenant.gpus_max:
        return True
    return models.is_limited(tenant) and not models.has_room_for(tenant, attempt, devices_of(giving))


def since(member: Attempt) -> int:
    """Return what those that wait for their GPUs are ordered by: the record that gave them to it last."""
    return max(member.fence, member.leased)


def in_the_way(host: Host, attempt: Attempt, lifecycle: Lifecycle) -> list[Attempt]:
    """Return the attempts that give up devices before a frozen one has its own: all that hold one of them.

    Of the sharers of a device only as many do as make room for its share: first those that leave already, then jobs
    that end for it, then the services that sleep, first the one that has had its GPUs for longest.
    """
    shape = lifecycle.shape_of(attempt.replica.job)
    holders = [other for other in host.worker.attempts.values() if other.mask & attempt.home & ~attempt.mask]
    if shape.mode <= EXCLUSIVE:
        return holders
    found = [other for other in holders if other.mode <= EXCLUSIVE]
    for slot, device in host.shared.items():
        sharers = [other for other in holders if other.mask >> slot & 1]
        if host.may_share(device, shape):
            lack = host.lack_on(slot, device, shape)
            for other in sorted(filter(lambda other: _leaves_for(other, attempt, lifecycle), sharers), key=_turn):
                if max(lack) <= 0:
                    break
                beside = lifecycle.shape_of(other.replica.job)
                lack = (lack[0] - 1, lack[1] - beside.share_mib, lack[2] - beside.compute_percent)
                found.append(other)
            if max(lack) <= 0:
                continue
        found += sharers
    return list(dict.fromkeys(found))


def _leaves_for(other: Attempt, attempt: Attempt, lifecycle: Lifecycle) -> bool:
    """Return whether a sharer leaves already, or does for a frozen one."""
    is_guest = other.preemptible and other.fence > attempt.fence
    return is_guest or not lifecycle.is_on_worker(other) or lifecycle.shape_of(other.replica.job).sleeps


def _turn(other: Attempt) -> tuple[bool, bool, int]:
    leaves = other.freeze or other.replica.state in LEAVING or other.phase == AT_EXITED
    return not leaves, bool(other.not_frozen), 0 if other.preemptible else since(other)


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
        awaited = needed = whole = lasting = 0
        kept: dict[int, tuple[int, int]] = {}
        host.ways = {}
        for key, attempt in list(host.frozen.items()):
            if key not in host.worker.attempts or attempt.mask:
                del host.frozen[key]
                continue
            self._leave_closed(draft, host, attempt)
            awaited |= attempt.home
            shape = self._lifecycle.shape_of(attempt.replica.job)
            if shape.mode <= EXCLUSIVE:
                whole |= attempt.home
            for slot in slots_of(attempt.home):
                mib, percent = kept.get(slot, (0, 0))
                kept[slot] = max(mib, shape.share_mib), max(percent, shape.compute_percent)
            if shape.sleeps:
                self._fleet.asleep.setdefault(attempt.replica.job.num, set()).add(host.worker.num)
            else:
                lasting |= attempt.home
            if attempt.phase == AT_EXITED or self._needs(attempt):
                needed |= attempt.home
                self._make_way(draft, host, attempt)
        kept = {slot: each for slot, each in kept.items() if not whole >> slot & 1}
        self._fleet.set_awaited(host, awaited, awaited & ~lasting, needed, kept)
        if not host.frozen:
            self._fleet.with_frozen.pop(host.worker.num, None)

    def _make_way(self, draft: Draft, host: Host, attempt: Attempt) -> None:
        """Note who gives up devices for a frozen attempt, and have the preemptible jobs among them end.

        One that has ended needs them, too: its worker may have resumed it to end, and its memory is not seen free yet.
        """
        if not attempt.home & ~host.free:
            return
        host.ways[attempt.name] = way = tuple(in_the_way(host, attempt, self._lifecycle))
        for other in way if attempt.phase != AT_EXITED else ():
            # who was placed there first goes first: of two that were frozen in turn, the later one waits
            is_guest = other.preemptible and other.fence > attempt.fence
            if is_guest and self._lifecycle.is_on_worker(other):
                self._lifecycle.leave(draft, other, WHY, Count.NONE)

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
        host, shape = self._fleet.hosts[attempt.worker.num], self._lifecycle.shape_of(attempt.replica.job)
        if not host.has_room(shape, attempt.home):
            return False
        draft.resume(attempt.replica, LEASED, leased=True)
        self._fleet.resume(host, attempt, shape)
        return True
