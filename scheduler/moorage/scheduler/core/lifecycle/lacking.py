"""Decides when a job ends because hosts lack what it needs: a secret, user, folder, program or image.

Each such refusal sends the attempt to another host, at no cost. A job that no host can start must end all the same. So
it ends once `not_here_max` different hosts have refused it, or all that could take it. Among these are hosts that left
less than an hour ago, which may be rebooting. A host that joins later is a new one, and so is one that was restarted.
The count is of the whole job, however many replicas it has. A job that has run somewhere is not ended: that host, or
one like it, can start it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from moorage.scheduler.core.draft import NOTE_CHARS_MAX, Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import CLAIMED, PLACED, Job, Member
from moorage.scheduler.core.lifecycle.refusals import avoids_all

#: how many of the hosts that refused a job its end names
NAMED_MAX: Final = 3
#: a host that left longer ago is not waited for
AWAY_MS_MAX: Final = 3_600_000
#: for so long those that left are kept as they were found, while no host joins or leaves
AWAY_KEPT_MS: Final = 60_000
_NAMES_CHARS_MAX: Final = 100


class Lacking:
    """Counts the hosts of one fleet that lack what a job needs; `most` of them end it."""

    def __init__(self, fleet: Fleet, shape_of: Callable[[Job], Shape], most: int) -> None:
        self._fleet = fleet
        self._shape_of = shape_of
        self._most = most
        self._away = Fleet()
        self._away_at = (-1, -1)  # the fleet's inventory, and the time, of which that is

    def why_over(self, draft: Draft, member: Member, why: str) -> str | None:
        """Return why the job ends with this refusal, which must be in the draft already; None if it does not end.

        That is the refusal's own reason followed by the hosts that lack what the job needs, the last ones by name, cut
        to the bound of a record's notes.
        """
        job = member.replica.job
        lacking = list(dict.fromkeys([*job.lacking, *draft.lacking.get(job.num, ())]))
        if job.started or job in draft.started or self._may_still_start(draft, member, lacking):
            return None
        if len(lacking) < self._most and self._others_could(draft, job, lacking):
            return None
        more = len(lacking) - NAMED_MAX
        last = ", ".join(draft.state.worker_by_num[num].id for num in lacking[-NAMED_MAX:])[:_NAMES_CHARS_MAX]
        tail = f" (refused by {last}{f' and {more} more' if more > 0 else ''})"
        return why[: NOTE_CHARS_MAX - len(tail)] + tail

    @staticmethod
    def _may_still_start(draft: Draft, member: Member, lacking: list[int]) -> bool:
        """Return whether another replica is about to start on a host that has not refused the job."""
        job = member.replica.job
        if job.gang:
            return False  # it ends as a whole
        for peer in job.rows.values() if len(job.rows) > 1 else ():
            row = draft.replica(peer)
            if row.state in (PLACED, CLAIMED) and row.member is not None and row.member.worker.num not in lacking:
                return True
        return False

    def _others_could(self, draft: Draft, job: Job, lacking: list[int]) -> bool:
        """Return whether the hosts that have not refused the job, connected or away, could hold it if empty."""
        out, shape = set(lacking), self._shape_of(job)
        for num, _ in job.avoid:
            if avoids_all(job, draft.state.worker_by_num[num]):
                out.add(num)
        missing = shape.together
        for fleet in self._fleets(draft, shape):
            for cls, _ in fleet.capable(shape):
                for alike in cls.sizes.values():
                    left = len(alike) - sum(num in alike for num in out)
                    missing -= left * next(iter(alike.values())).replicas_of(shape, "ever") if left else 0
                    if missing <= 0:
                        return True
        return False

    def _fleets(self, draft: Draft, shape: Shape) -> Iterator[Fleet]:
        """Yield the fleet, and one of the hosts that left lately, as they were then."""
        yield self._fleet
        at = self._fleet.inventory, draft.time_ms // AWAY_KEPT_MS
        if self._away_at != at:
            self._away_at, self._away = at, Fleet()
            for worker in draft.state.workers.values():
                leaves = bool(worker.session)  # with this very record
                is_lately = leaves or draft.time_ms - worker.left_ms < AWAY_MS_MAX
                if is_lately and worker.hello and worker.num not in self._fleet.hosts:
                    self._away.join(worker, ())
        self._away.tell_apart(shape)
        yield self._away
