"""Which attempts may have ended their host's supervisor, and which are its victims.

A job that runs as the agent's user can kill the supervisor, and with it every other job of the host. No signal says
which one did it. So a loss of this kind is not charged to `retries_on_lost` while several attempts may be guilty; the
worker then runs these one after another, and the next death leaves fewer. The guilty job cannot go round for ever: an
attempt that is the only suspect is charged, and so is every suspect after `DEATHS_MAX` such losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.state import AT_EXITED, REPLICA, RUNNING, WHY, Member, MemberKey, Replica, started_ms
from moorage.schemas.frames import SUSPECT_S, Fact

#: why an attempt is over that was lost with its host's supervisor, while the machine went on
WITH_SUPERVISOR: Final = "lost with its host's supervisor"
#: losses with a supervisor that are not charged to one replica
DEATHS_MAX: Final = 3


def lost_with_supervisor(draft: Draft, members: Mapping[MemberKey, Member], facts: list[Fact]) -> frozenset[Member]:
    """The members that these facts report as lost; the facts come with the join that follows a supervisor's death."""
    lost: set[Member] = set()
    for fact in facts:
        if fact.kind != "exited" or fact.detail != "lost":
            continue
        member = members.get((fact.tenant, fact.job, fact.replica, fact.fence))
        if member is not None and member not in draft.gone and draft.phase_of(member) != AT_EXITED:
            lost.add(member)
    return frozenset(lost)


def charged(draft: Draft, lost: frozenset[Member]) -> frozenset[Member]:
    """Those of the `lost` members whose loss counts against their request's `retries_on_lost`."""
    suspects = [member for member in lost if _ran_ms(draft, member) < SUSPECT_S * 1000] or list(lost)
    if len({_group(member) for member in suspects}) > 1:
        repeated = [member for member in suspects if deaths(member.replica)]
        if len({_group(member) for member in repeated}) == 1:
            suspects = repeated
        else:
            suspects = [member for member in suspects if deaths(member.replica) >= DEATHS_MAX]
    return frozenset(suspects)


def deaths(replica: Replica) -> int:
    """How many attempts of a replica were lost with a supervisor, as far as the job's story is in memory."""
    return sum(row[REPLICA] == replica.index and row[WHY] == WITH_SUPERVISOR for row in replica.job.story)


def _ran_ms(draft: Draft, member: Member) -> int:
    job = member.replica.job
    if member.replica.state != RUNNING:
        return 0  # its start comes with these facts
    return draft.time_ms - started_ms(job, member)


def _group(member: Member) -> tuple[int, int]:
    """What is charged together: a gang, else one replica."""
    job = member.replica.job
    return (job.num, -1 if job.gang else member.replica.index)
