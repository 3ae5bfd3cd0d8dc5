"""Guests on a worker: members that have the devices of frozen members. Pure functions.

A guest is taken in only while each of its devices is one frozen member's, and that member is not resumed before the
guest is over and its memory seen free. The leader does the same by the ledger; a frame that comes late changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moorage.schemas.frames import Place
from moorage.worker.session.member_messages import Member


def beside(held: Iterable[Member], member: Member) -> list[Member]:
    """Return the frozen members whose devices a guest has; for a member that is no guest, the guests on its devices."""
    slots, guest = member.slots, member.place.guest
    return [each for each in held if each.place.guest is not guest and not set(slots).isdisjoint(each.slots)]


def guests_of(held: Iterable[Member], member: Member) -> list[Member]:
    """Return the guests on a member's devices; [] for a guest."""
    return [] if member.place.guest else beside(held, member)


def why_no_guest(held: Iterable[Member], place: Place) -> str:
    """Return why a guest cannot have its slots; "" where each of them is that of one frozen member and of no guest."""
    free = set(place.slots)
    for member in held:
        if free.isdisjoint(member.slots):
            continue
        taken = ", ".join(map(str, sorted(free.intersection(member.slots))))
        if member.place.guest:
            return f"GPU {taken} has a guest"
        if not (member.frozen and member.phase == "running" and not member.freezing):
            return f"the job on GPU {taken} is not frozen"
    missing = free.difference(*(member.slots for member in held))
    return f"no frozen job has GPU {', '.join(map(str, sorted(missing)))}" if missing else ""


def resumes_to_end(held: Iterable[Member], member: Member) -> bool:
    """Return whether a frozen member that is to end is resumed: it has grace to save its work, which may be on a GPU.

    A member with guests is not resumed.
    """
    return member.frozen and member.phase == "ending" and member.grace_s > 0 and not guests_of(held, member)


def slots_of_guests(held: Iterable[Member], member: Member) -> frozenset[int]:
    """Return all slots of the guests on the devices of a member that is over: the guests go on there.

    The member was frozen when they came and was not resumed since, so it has no memory on its slots among these. They
    are seen free with the guest.
    """
    return frozenset(slot for guest in guests_of(held, member) for slot in guest.slots)


def unfounded(held: Sequence[Member]) -> list[Member]:
    """Return the guests on a device of a member that runs: an earlier agent's record of what is frozen was lost."""
    return [
        guest
        for guest in held
        if guest.place.guest
        and any(owner.phase in ("starting", "running") and not owner.frozen for owner in beside(held, guest))
    ]


def slots_fault(held: Iterable[Member]) -> str:
    """Return a contradiction between the members' slots, as text; "" if there is none."""
    modes: dict[int, list[str]] = {}
    guests: set[int] = set()
    for member in held:
        for slot in member.quarantined or member.slots:
            if not member.place.guest:
                modes.setdefault(slot, []).append(member.place.mode)
            elif slot in guests:
                return f"slot {slot} has two guests"
            else:
                guests.add(slot)
    for slot, found in modes.items():
        if len(set(found)) > 1 or (found[0] == "exclusive" and len(found) > 1):
            return f"slot {slot} is held as {found}"
        if slot in guests and found[0] != "exclusive":
            return f"slot {slot} has a guest beside {found}"
    return ""
