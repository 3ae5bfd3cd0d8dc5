"""Which replicas' stored output is given if the caller names none: of few all, of very many some."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from moorage.client.errors import ClientError
from moorage.client.follow.job_history import Reads, replicas_in
from moorage.schemas.job import FAILED, SUCCEEDED, TERMINAL, TIMED_OUT
from moorage.schemas.ranges import format_ranges, numbers_in, parse_told, ranges_of

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo, ReplicaInfo

#: replicas that have ended, of a job of more than 1,024, whose stored output is given
ENDED_MAX: Final = 100
#: the states of ended replicas that may have run, those that tell most first
_RAN: Final = (FAILED, TIMED_OUT, SUCCEEDED)


async def attempts_to_read(read: Reads, shown: JobInfo) -> tuple[dict[int, int | None], int]:
    """Return each replica's newest attempt, and how many replicas that have ended are left out.

    Of a job of more than 1,024 replicas these are the ones on workers and `ENDED_MAX` of the others: those that failed,
    then the first ones. None of them where the scheduler cannot say now which attempts they had.
    """
    counts = shown.replicas
    if counts is None or replicas_in(shown) is None:
        return newest_attempts(shown), 0
    live = {row.replica: row.attempt for row in shown.replica_states if row.state not in TERMINAL}
    some = [shown.numbers]
    some += [parse_told(counts.ended[state])[0] for state in _RAN if state in counts.ended]
    asked = {number for numbers in some for number in islice(numbers_in(numbers), ENDED_MAX)}
    rows: list[ReplicaInfo] = []
    if asked:
        from moorage.client.answers import JobInfo
        from moorage.client.reading import as_struct

        try:
            data = await read("show", {"job": shown.job, "replicas": format_ranges(ranges_of(asked))})
            rows = as_struct(JobInfo, data).replica_states
        except ClientError:
            pass  # the history is behind, or gone: what runs is given all the same
    ran = [row for row in rows if row.state in _RAN and row.attempt]
    ran.sort(key=lambda row: (row.state == SUCCEEDED, row.replica))
    chosen = {row.replica: row.attempt for row in ran[:ENDED_MAX]}
    count = sum(counts.states.get(state, 0) for state in _RAN)
    return dict(sorted((chosen | live).items())), max(0, count - len(chosen))


def newest_attempts(shown: JobInfo) -> dict[int, int | None]:
    """Return each replica's newest attempt, from an answer of `show`: 0 before the first, None if unknown."""
    if shown.replica_states:
        return {row.replica: row.attempt for row in shown.replica_states}
    newest: dict[int, int | None] = {}
    for change in shown.changes:  # the job is no longer in the scheduler's memory
        if change.replica >= 0:
            newest[change.replica] = max(newest.get(change.replica) or 0, change.attempt)
    # `show` has the last transitions only, if they are many: for the other replicas the scheduler finds the attempt
    every: dict[int, int | None] = dict.fromkeys(numbers_in(shown.numbers))
    return every | newest
