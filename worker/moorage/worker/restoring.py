"""What an agent that starts anew makes of its journal and of what its drivers still run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from moorage.schemas.codec import decode_request
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Place
from moorage.worker.drivers.base import Driver, Living
from moorage.worker.member_messages import Member, MemberName


@dataclass(slots=True)
class Found:
    """`held` have a phase, an exit code and a reason; `withdrawn` no driver ever heard of; `strays` no journal."""

    held: list[tuple[Member, str, int, str]] = field(default_factory=list)
    withdrawn: list[MemberName] = field(default_factory=list)
    strays: dict[MemberName, tuple[Driver, Living]] = field(default_factory=dict)


def match(
    places: Mapping[MemberName, Place],
    living: Mapping[MemberName, tuple[Driver, Living]],
    drivers: Collection[str],
    now: float,
) -> Found:
    """Match the journal's placements with the drivers' members. `now` is CLOCK_BOOTTIME in seconds."""
    found = Found(strays=dict(living))
    for name, place in places.items():
        member = _member_of(name, place, now)
        _, alive = found.strays.pop(name, (None, None))
        if member is None or member.driver not in drivers:
            found.withdrawn.append(name)
        elif alive is not None:
            found.held.append((member, alive.phase, alive.code, alive.reason))
        elif place.hold:
            found.held.append((member, "claimed", 0, ""))  # held for a gang: START has not come, or comes again
        else:
            found.withdrawn.append(name)  # the driver never heard of it
    return found


def _member_of(name: MemberName, place: Place, now: float) -> Member | None:
    try:
        return Member(name, place, decode_request(place.body), now)
    except Refused:
        return None
