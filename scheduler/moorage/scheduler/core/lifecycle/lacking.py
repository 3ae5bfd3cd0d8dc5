"""Decides when a job ends because hosts lack what it needs: a secret, user, folder, program or image.

Each such refusal sends the attempt to another host, at no cost. A job that no host can start must end all the same. So
it ends once `not_here_max` different hosts have refused it, or all that could take it: one that reads a path of
`data_dirs`, which few hosts may have, once `AVOID_MAX` have. A host that joins later is a new one, and so is one that
was restarted. The count is of the whole job, however many replicas it has. A job that has run somewhere is not ended:
that host, or one like it, can start it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moorage.scheduler.core.draft import NOTE_CHARS_MAX, Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import AVOID_MAX, STARTING, Attempt, Job
from moorage.scheduler.core.lifecycle.refusals import avoids_all
from moorage.schemas.printable import shortened

#: how many of the hosts that refused a job its end names
NAMED_MAX: Final = 3
_NAMES_CHARS_MAX: Final = 100


class Lacking:
    """Counts the hosts of one fleet that lack what a job needs; `most` of them end it."""

    def __init__(self, fleet: Fleet, shape_of: Callable[[Job], Shape], most: int) -> None:
        self._fleet = fleet
        self._shape_of = shape_of
        self._most = most

    def why_over(self, draft: Draft, attempt: Attempt, why: str) -> str | None:
        """Return why the job ends with this refusal, which is recorded already; None if it does not end.

        That is the refusal's own reason followed by the hosts that lack what the job needs, the last ones by name, cut
        to the bound of a record's notes.
        """
        job = attempt.replica.job
        lacking = list(job.lacking)
        if job.started or self._may_still_start(job, lacking):
            return None
        most = AVOID_MAX if self._shape_of(job).paths else self._most
        if len(lacking) < most and self._others_could(draft, job, lacking):
            return None
        more = len(lacking) - NAMED_MAX
        last = ", ".join(draft.state.worker_by_num[num].id for num in lacking[-NAMED_MAX:])[:_NAMES_CHARS_MAX]
        tail = f" (refused by {last}{f' and {more} more' if more > 0 else ''})"
        return shortened(why, NOTE_CHARS_MAX - len(tail)) + tail

    @staticmethod
    def _may_still_start(job: Job, lacking: list[int]) -> bool:
        """Return whether another replica is about to start on a host that has not refused the job."""
        if job.gang:
            return False  # it ends as a whole
        for peer in job.rows.values() if len(job.rows) > 1 else ():
            if peer.state in STARTING and peer.attempt is not None and peer.attempt.worker.num not in lacking:
                return True
        return False

    def _others_could(self, draft: Draft, job: Job, lacking: list[int]) -> bool:
        """Return whether the hosts that have not refused the job could hold it, if they were empty."""
        out, shape = set(lacking), self._shape_of(job)
        for num, _ in job.avoid:
            if avoids_all(job, draft.state.worker_by_num[num]):
                out.add(num)
        return any(self._could_hold(place, out) for place in self._fleet.places(shape))

    def _could_hold(self, shape: Shape, out: set[int]) -> bool:
        missing = shape.together
        for cls, _ in self._fleet.capable(shape):
            for alike in cls.sizes.values():
                left = len(alike) - sum(num in alike for num in out)
                missing -= left * next(iter(alike.values())).replicas_of(shape, "ever") if left else 0
                if missing <= 0:
                    return True
        return False
