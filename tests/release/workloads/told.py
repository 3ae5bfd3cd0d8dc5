"""Confirms what `explain` tells of each job that waits in rest: the reason, and whether the fleet could ever run it."""

from __future__ import annotations

from typing import Final

from moorage.scheduler.answers.waiting import explain_job
from moorage.schemas.errors import Problem
from moorage.schemas.reasons import REASONS
from tests.release.workloads.reference import Waiting, World, could_ever, marked, reserved, starts, taken_back

#: what `explain` may say of a job that the fleet could run, and for which there is no room
NO_ROOM: Final = {
    "busy",
    "fragmented",
    "overtaken",
    "sick",
    "foreign",
    "lent",
    "just-refused",
    "frozen-here",
    "closed",
    "starts-fail",
    "jobs-fail",
    "host-busy",
    "gang",
    "contended",
}
#: by the reference's reason what `explain` may say; where there is no room either, that may go before
TOLD: Final = {
    "held": {"held"},
    "limit": {"limit"},
    "limit of another": {"limit", "reserved", "leaving", *NO_ROOM},
    "no room": NO_ROOM,
    "no room for all of it": {"reserved", "leaving", *NO_ROOM},  # of a gang, some hosts have room for a part
    "leaving": {"leaving", "reserved"},
    "taken back": {"reserved", "leaving"},  # one host is reserved, the other to be drained: either is true
    "marked": {"jobs-fail", "reserved", "leaving", *NO_ROOM},  # all that others could hold has no room, in some way
    "reserved": {"reserved", "leaving"},
}


def confirm(world: World, found: dict[str, list[Waiting]]) -> list[str]:
    """What is told wrongly, of the first replica of each job that waits."""
    wrong, seen = [], set[int]()
    for reason, waiting in found.items():
        for who in waiting:
            if who.job.num in seen or _is_behind_its_own(who):
                continue
            seen.add(who.job.num)
            data = explain_job(world.drive.engine, who.job.tenant, who.job.name)
            assert not isinstance(data, Problem), data
            said = data.reason
            never = REASONS[said].is_never
            if said == "held":
                ok = reason == "held"
            elif said == "refused":
                ok = bool(who.job.avoid)
            elif never or not could_ever(world, who, avoiding=False):
                ok = never and reason != "held" and not could_ever(world, who, avoiding=False)
            elif said == "reserved" and who.together == 1:
                closed = taken_back(world, who) | reserved(world, who, for_good=False) | marked(world, who)
                ok = reason != "no room" and not starts(world, who, closed)
            elif said == "placing":  # time alone may let another tenant in: the next record places it
                held = world.drive.engine.planner.verdicts.reservation
                ok = reason == "reserved" and held is not None and held.tenant != who.job.tenant
            else:
                ok = said in TOLD["no room for all of it" if who.together > 1 and reason == "no room" else reason]
            if not ok:
                wrong.append(f"{who.name} waits, {reason}, and is told {said}")
    return wrong


def _is_behind_its_own(who: Waiting) -> bool:
    """Whether another replica of its job waits before it: that one is explained."""
    return any(each.state == who.replica.state and each.index < who.replica.index for each in who.job.replicas)
