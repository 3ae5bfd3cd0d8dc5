"""Read all transitions of a job that has ended. `show` answers with the last ones only if they are many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from moorage.client.errors import NoOutput, NotFound, Rejected
from moorage.client.follow.job_history import LISTED_MAX, Reads, behind
from moorage.schemas.errors import problem
from moorage.schemas.frames import Change

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo
    from moorage.client.connected import Connected


async def history_after(read: Reads, job: str, rev: int) -> tuple[int, list[Change]]:
    """Return the newest revision in a job's history, and the transitions after revision `rev`, as far as it is kept.

    Raises `Unreachable`.
    """
    from moorage.schemas.answers.jobs import HistoryAnswer

    found: list[Change] = []
    after, newest, more = rev, rev, True
    while more:
        try:
            page = msgspec.convert(await read("history", {"job": job, "after_rev": after}), HistoryAnswer)
        except (Rejected, NotFound):  # expired: there are no more transitions
            break
        told = behind(after, page.changes)
        found += told
        newest, more = max(newest, page.rev), page.more and bool(told)
        after = told[-1].rev if told else after
    return newest, found


async def last_attempts(client: Connected, shown: JobInfo, replicas: int) -> dict[int, Change]:
    """Return the last transition with a fence of each replica of a job.

    If `show` does not have all of them, the history is read page by page. A replica that was never placed is missing in
    the result. Raises `NoOutput` if the history no longer has the transitions of a replica, and `Unreachable`.
    """
    changes = {change.rev: change for change in shown.changes}
    job, rev = shown.job, shown.rev
    if len(_by_replica(changes)) < replicas and len(changes) < rev:
        changes |= {change.rev: change for change in (await history_after(client.read, job, 0))[1]}
    found = _by_replica(changes)
    if len(found) < replicas <= LISTED_MAX and (len(changes) < rev or not rev):
        raise NoOutput(
            problem(
                "not-kept",
                f"the attempts of {replicas - len(found)} of the {replicas} replicas of job {job} are no longer known:"
                " its history is gone, or a part of it",
                job=job,
                next="the setting history_keep of the scheduler says how long it is kept",
            )
        )
    return found


def _by_replica(changes: Mapping[int, Change]) -> dict[int, Change]:
    return {changes[rev].replica: changes[rev] for rev in sorted(changes) if changes[rev].fence}
