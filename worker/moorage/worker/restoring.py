"""Compare an earlier agent's journal with the members that the drivers still run, at a start. Without I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from moorage.schemas.codec import decode_request
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device, Fact, Place
from moorage.worker.drivers.base import CODE_LOST, Driver, Living
from moorage.worker.member_messages import Member, MemberName


@dataclass(slots=True)
class Found:
    """What was found: members that are taken over, and others that must end or were never started.

    `held` are the members that are taken over, with phase, exit code and reason. `withdrawn` are in the journal, but no
    driver knows them, or this agent cannot read their request or lacks their driver. `strays` run, but are not in the
    journal or must end. `moved` are the strays whose slots now have other devices, and `left` are their former slots,
    whose devices may still have their memory. `facts` report the ends of the moved ones, for the join that follows once
    they have ended.
    """

    held: list[tuple[Member, str, int, str]] = field(default_factory=list)
    withdrawn: list[MemberName] = field(default_factory=list)
    strays: dict[MemberName, tuple[Driver, Living]] = field(default_factory=dict)
    moved: set[MemberName] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    facts: list[Fact] = field(default_factory=list)


def device_names(devices: Sequence[Device]) -> list[str]:
    """Return a name for each of this host's devices, in slot order."""
    return [f"{device.vendor} {device.uuid or device.index}" for device in devices]


def same_slots(before: Sequence[str], now: Sequence[str]) -> frozenset[int]:
    """Return the slots that have the same device as before; all slots if the former devices are unknown."""
    return frozenset(slot for slot, name in enumerate(now) if not before or before[slot : slot + 1] == [name])


def match(
    places: Mapping[MemberName, Place],
    living: Mapping[MemberName, tuple[Driver, Living]],
    drivers: Collection[str],
    now: float,
    same: Collection[int],
) -> Found:
    """Match the journal's placements with the drivers' members. `now` is CLOCK_BOOTTIME in seconds.

    A member with a slot that is not among the `same` must end: its device is in another slot now, where another member
    could be placed.
    """
    found = Found(strays=dict(living))
    for name, place in places.items():
        member = _member_of(name, place, now)
        ran = found.strays.pop(name, None)
        alive = ran[1] if ran is not None else None
        if member is None or member.driver not in drivers:
            found.withdrawn.append(name)
        elif alive is not None and alive.phase == "refused":
            found.held.append((member, alive.phase, 0, alive.reason))
        elif ran is not None and alive is not None and not set(place.slots) <= set(same):
            found.strays[name] = ran
            found.moved.add(name)
            if place.mode == "exclusive":
                found.left |= set(place.slots)
            code, why = (alive.code, alive.reason) if alive.phase == "exited" else (CODE_LOST, "lost")
            found.facts += [Fact("exited", *name, code, why), Fact("freed", *name)]
        elif alive is not None:
            member.frozen = alive.frozen
            found.held.append((member, alive.phase, alive.code, alive.reason))
        elif place.hold and set(place.slots) <= set(same):
            found.held.append((member, "claimed", 0, ""))  # held for a gang: START has not come, or comes again
        else:
            found.withdrawn.append(name)  # the driver never got it
    return found


def _member_of(name: MemberName, place: Place, now: float) -> Member | None:
    try:
        return Member(name, place, decode_request(place.body), now)
    except Refused:
        return None
