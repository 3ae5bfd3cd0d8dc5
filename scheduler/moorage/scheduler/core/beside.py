"""Members on one device: a frozen one and its guest."""

from __future__ import annotations

from moorage.scheduler.core.state import AT_RUNNING, FROZEN, Member


def beside(member: Member) -> list[Member]:
    """Return the members that have a device of a guest as well; of a member that is no guest, its guests."""
    return [m for m in member.worker.members.values() if m.mask & member.mask and m.guest is not member.guest]


def is_at_rest(member: Member) -> bool:
    """Return whether a member is frozen and to stay so."""
    return member.freeze and member.replica.state == FROZEN and member.phase == AT_RUNNING
