"""Members on one device: a frozen one and its guest."""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.ledger.records import Mode
from moorage.scheduler.core.ledger.state import AT_EXITED, AT_RUNNING, CANCELLING, ENDING, FROZEN, Member
from moorage.schemas.request_cache import RequestCache

_MAY_WAIT: Final = frozenset({FROZEN, ENDING, CANCELLING})
_read_request: Final = RequestCache().read


def beside(member: Member) -> list[Member]:
    """Return the guests on a member's devices; of a guest, the members whose devices it has. Sharers are left out."""
    return [m for m in member.worker.members.values() if m.mask & member.mask and m.guest is not member.guest]


def is_at_rest(member: Member) -> bool:
    """Return whether a member is frozen and must stay frozen."""
    return member.freeze and member.replica.state == FROZEN and member.phase == AT_RUNNING


def waits_for_guests(member: Member) -> bool:
    """Return whether a frozen member that is to be resumed has to wait for a guest on its devices.

    A frozen member is resumed to run on, or to save its work in the grace of its end. The end does not wait for guests
    that have ended and whose devices are quarantined: then the job is ended while frozen.
    """
    state = member.replica.state
    # for most members the answer is here, without reading the other members of the worker: there may be thousands
    if member.guest or not member.mask or member.mode != Mode.EXCLUSIVE or state not in _MAY_WAIT:
        return False
    if not (guests := beside(member)):
        return False
    if state == FROZEN:
        return not member.freeze
    stuck = member.worker.quarantined
    return needs_its_devices(member, state) and any(g.phase != AT_EXITED or not g.mask & stuck for g in guests)


def needs_its_devices(member: Member, state: int) -> bool:
    """Return whether a frozen member in this state is resumed to end: it has a grace in which to save its work."""
    return state in (ENDING, CANCELLING) and _read_request(member.replica.job.body)[1].request.workload.grace_s > 0
