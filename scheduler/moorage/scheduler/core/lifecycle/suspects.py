"""Decides which attempts may have killed their host's supervisor, and which are its victims.

A job that runs as the agent's user can kill the supervisor, and with it every other job of the host. No signal says
which job did it. So such a loss is not charged to `retries_on_lost` while several attempts are suspects. The worker
then runs these one after another, and the next death leaves fewer suspects. The guilty job cannot continue for ever: an
attempt that is the only suspect is charged, and so is every suspect after `DEATHS_MAX` such losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.began import began_ms
from moorage.scheduler.core.ledger.state import AT_EXITED, REPLICA, RUNNING, WHY, Attempt, Replica
from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.frames import SUSPECT_S, Report

#: the reason of attempts lost with their host's supervisor while the machine went on
WITH_SUPERVISOR: Final = "lost with its host's supervisor"
#: losses with a supervisor that are not charged to one replica
DEATHS_MAX: Final = 3


def lost_with_supervisor(attempts: Mapping[AttemptName, Attempt], reports: list[Report]) -> frozenset[Attempt]:
    """Return the attempts that these reports call lost. The reports come with the join after a supervisor's death."""
    lost: set[Attempt] = set()
    for report in reports:
        if report.kind not in ("exited", "ran") or report.detail != "lost":
            continue
        attempt = attempts.get(name_in(report))
        if attempt is not None and attempt.phase != AT_EXITED:
            lost.add(attempt)
    return frozenset(lost)


def charged(draft: Draft, lost: frozenset[Attempt]) -> frozenset[Attempt]:
    """Return those of the `lost` attempts whose loss counts against their request's `retries_on_lost`."""
    suspects = [attempt for attempt in lost if _ran_ms(draft, attempt) < SUSPECT_S * 1000] or list(lost)
    if len({_group(attempt) for attempt in suspects}) > 1:
        repeated = [attempt for attempt in suspects if deaths(attempt.replica)]
        if len({_group(attempt) for attempt in repeated}) == 1:
            suspects = repeated
        else:
            suspects = [attempt for attempt in suspects if deaths(attempt.replica) >= DEATHS_MAX]
    return frozenset(suspects)


def deaths(replica: Replica) -> int:
    """Return how many attempts of a replica were lost with a supervisor, in the part of the history in memory."""
    return sum(row[REPLICA] == replica.index and row[WHY] == WITH_SUPERVISOR for row in replica.job.history)


def _ran_ms(draft: Draft, attempt: Attempt) -> int:
    job = attempt.replica.job
    if attempt.replica.state != RUNNING:
        return 0  # the report of its start comes with these
    return draft.time_ms - began_ms(attempt, job.accepted_ms)


def _group(attempt: Attempt) -> tuple[int, int]:
    """Return the unit that is charged together: a gang, else one replica."""
    job = attempt.replica.job
    return (job.num, -1 if job.gang else attempt.replica.index)
