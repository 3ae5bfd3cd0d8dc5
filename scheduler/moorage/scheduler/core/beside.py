"""Members on one device: a frozen one and its guest."""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.state import AT_RUNNING, CANCELLING, ENDING, FROZEN, Member
from moorage.schemas.request_cache import RequestCache

_read_request: Final = RequestCache().read


def beside(member: Member) -> list[Member]:
    """Return the members that have a device of a guest as well; of a member that is no guest, its guests."""
    return [m for m in member.worker.members.values() if m.mask & member.mask and m.guest is not member.guest]


def is_at_rest(member: Member) -> bool:
    """Return whether a member is frozen and to stay so."""
    return member.freeze and member.replica.state == FROZEN and member.phase == AT_RUNNING


def needs_its_devices(member: Member, state: int) -> bool:
    """Whether a frozen member in this state is to end and resumed for that: it has a grace to save its work in."""
    return state in (ENDING, CANCELLING) and _read_request(member.replica.job.body)[1].request.workload.grace_s > 0
