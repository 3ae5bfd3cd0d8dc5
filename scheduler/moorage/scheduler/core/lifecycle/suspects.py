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
from moorage.scheduler.core.ledger.state import AT_EXITED, RUNNING, Attempt
from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.frames import SUSPECT_S, Report

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
        repeated = [attempt for attempt in suspects if attempt.replica.deaths]
        if len({_group(attempt) for attempt in repeated}) == 1:
            suspects = repeated
        else:
            suspects = [attempt for attempt in suspects if attempt.replica.deaths >= DEATHS_MAX]
    return frozenset(suspects)


def _ran_ms(draft: Draft, attempt: Attempt) -> int:
    if attempt.replica.state != RUNNING:
        return 0  # the report of its start comes with these
    return draft.time_ms - attempt.began_ms


def _group(attempt: Attempt) -> tuple[int, int]:
    """Return the unit that is charged together: a gang, else one replica."""
    job = attempt.replica.job
    return (job.num, -1 if job.gang else attempt.replica.index)
