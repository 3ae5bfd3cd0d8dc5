"""Compare an earlier agent's journal with the attempts that the drivers still run, at a start. Without I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device, Place, Report
from moorage.worker.driver import CODE_LOST, Driver, Living
from moorage.worker.session.attempt_messages import Attempt

#: why attempts of the journal must end
MOVED: Final = "its devices are not in their slots any more"
UNREADABLE: Final = "this release cannot read its request, or lacks its driver"


@dataclass(slots=True)
class Found:
    """What was found: attempts that are taken over, and others that must end or were never started.

    `held` are the attempts that are taken over, with phase, exit code and reason. `withdrawn` are in the journal, and
    no driver has them: they never started, or an agent ended them as it restored, and was killed before it could join.
    `strays` run, but are not in the journal or must end. `must_end` says why, of those in the journal, and `reports`
    report their ends, for the join that follows once they have ended. `left` are the slots of those that had a whole
    device and are not held: it may still have their memory.
    """

    held: list[tuple[Attempt, str, int, str]] = field(default_factory=list)
    withdrawn: list[AttemptName] = field(default_factory=list)
    strays: dict[AttemptName, tuple[Driver, Living]] = field(default_factory=dict)
    must_end: dict[AttemptName, str] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    reports: list[Report] = field(default_factory=list)


def device_names(devices: Sequence[Device]) -> list[str]:
    """Return a name for each of this host's devices, in slot order."""
    return [f"{device.vendor} {device.uuid or device.index}" for device in devices]


def same_slots(before: Sequence[str], now: Sequence[str]) -> frozenset[int]:
    """Return the slots that have the same device as before."""
    return frozenset(slot for slot, name in enumerate(now) if before[slot : slot + 1] == [name])


def match(
    places: Mapping[AttemptName, Place],
    living: Mapping[AttemptName, tuple[Driver, Living]],
    drivers: Collection[str],
    now: float,
    same: Collection[int],
    quarantined: Collection[AttemptName] = (),
    ended: Mapping[AttemptName, Report] = MappingProxyType({}),
) -> Found:
    """Match the journal's placements with the drivers' attempts. `now` is CLOCK_BOOTTIME in seconds.

    An attempt that was `quarantined` and that no driver has is held as stuck: it may still run, until an operator says
    that it does not. If it had `ended` before, only the memory of its devices was in use: it is held as exited, so that
    they are looked at again.

    An attempt must end if this agent cannot read its request or lacks its driver; and if it has a slot that is not
    among the `same`: its device is in another slot now, where another attempt could be placed.
    """
    found = Found(strays=dict(living))
    for name, place in places.items():
        attempt = _attempt_of(name, place, now, drivers)
        ran = living.get(name)
        alive = ran[1] if ran is not None else None
        same_devices = set(place.slots) <= set(same)
        if alive is not None and alive.phase != "refused" and (attempt is None or not same_devices):
            found.must_end[name] = MOVED if attempt is not None else UNREADABLE
            code, why = (alive.code, alive.reason) if alive.phase == "exited" else (CODE_LOST, "lost")
            found.reports += [Report("exited", *name, code, why), Report("freed", *name)]
        elif attempt is None:
            found.withdrawn.append(name)
        elif alive is not None:
            del found.strays[name]
            attempt.frozen = alive.frozen
            found.held.append((attempt, alive.phase, alive.code, alive.reason))
        elif name in quarantined and same_devices and (end := ended.get(name)) is not None:
            found.held.append((attempt, "exited", end.code, end.detail))
        elif name in quarantined and same_devices:
            found.held.append((attempt, "stuck", 0, ""))
        elif place.hold and same_devices:
            found.held.append((attempt, "claimed", 0, ""))  # held for a gang: START has not come, or comes again
        else:
            found.withdrawn.append(name)
    used = {slot for attempt, *_ in found.held if not attempt.frozen for slot in attempt.slots}
    found.left = _whole_slots(places, found.must_end) | (_whole_slots(places, found.withdrawn) - used)
    return found


def _whole_slots(places: Mapping[AttemptName, Place], names: Iterable[AttemptName]) -> set[int]:
    """Return the slots that these attempts did not share."""
    return {slot for name in names if places[name].mode == "exclusive" for slot in places[name].slots}


def _attempt_of(name: AttemptName, place: Place, now: float, drivers: Collection[str]) -> Attempt | None:
    """Return the attempt of a placement; None if this agent cannot read its request or lacks its driver."""
    try:
        attempt = Attempt(name, place, decode_request(place.body), now)
    except Refused:
        return None
    return attempt if attempt.driver in drivers else None
