"""Guests: jobs on devices of frozen jobs. Which slots take a guest, and which guests end for a job that resumes.

Both follow from the members' states at the end of each record, so no event has to report a change of them.
"""

from __future__ import annotations

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.ledger.beside import needs_its_devices
from moorage.scheduler.core.ledger.records import Count
from moorage.scheduler.core.ledger.state import AT_EXITED, FREEZE, FROZEN, Member
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.schemas.gpu import mig_profile

#: the reason of a guest's end; it does not name the frozen job, which may be another tenant's
WHY = "guest: the frozen job that its GPUs belong to needs them"


class Guests:
    """Decides for the hosts of one fleet which slots take guests, and asks guests to end."""

    def __init__(self, fleet: Fleet, lifecycle: Lifecycle) -> None:
        self._fleet = fleet
        self._lifecycle = lifecycle

    def settle(self, draft: Draft) -> None:
        """Note the slots that take guests, and ask the guests to end whose devices their owners need.

        To be called for each record before anything is placed.
        """
        for host in list(self._fleet.lending.values()):
            self._settle(draft, host)

    def _settle(self, draft: Draft, host: Host) -> None:
        frozen = needed = 0
        for member in host.worker.members.values():
            if member.guest or member.mode != EXCLUSIVE or member in draft.gone or draft.phase_of(member) == AT_EXITED:
                continue
            state = draft.replica(member.replica).state
            if state == FROZEN and stays_frozen(draft, member):
                frozen |= member.mask
            elif state == FROZEN or (member.mask & host.guests and needs_its_devices(member, state)):
                needed |= member.mask
        for member in list(host.worker.members.values()) if needed & host.guests else ():
            if member.guest and member.mask & needed and self._lifecycle.is_on_worker(draft, member):
                self._lifecycle.leave(draft, member, WHY, Count.NONE)
        self._fleet.set_frozen(host, frozen & ~_slices(host))
        if not (frozen | needed | host.guests):  # one that is to be resumed may stay frozen by another order
            self._fleet.lending.pop(host.worker.num, None)


def stays_frozen(draft: Draft, member: Member) -> bool:
    """Return whether a member is to be frozen after the orders of this record."""
    for act in reversed(draft.freezes.get(member.replica.job.num, ())):
        if act.replica in (-1, member.replica.index):
            return act.word == FREEZE
    return member.freeze


def _slices(host: Host) -> int:
    """Return the slots that are MIG slices, which take no guests."""
    return sum(1 << slot for slot, device in enumerate(host.cls.devices) if mig_profile(device[2]))
