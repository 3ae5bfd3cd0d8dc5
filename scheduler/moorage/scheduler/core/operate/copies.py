"""Changes of the number of replicas of a job that waits or runs: more are added, too many are taken away.

New ones have numbers behind the highest that a replica of the job ever had. Of too many, those that wait are cancelled
first, the highest numbers before others, then those on workers: of a service first what is not ready. Their numbers
are the job's until they have ended.
"""

from __future__ import annotations

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import ChangeOrder
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.state import LEAVING, QUEUED, Job, State, extra_of
from moorage.scheduler.core.lifecycle.max_running import top_of, wanted_of
from moorage.scheduler.core.lifecycle.scaling import Scaling
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.request_reader import RequestReader
from moorage.schemas.errors import Problem, problem
from moorage.schemas.job import REPLICAS_MAX, Request
from moorage.schemas.names import word_of
from moorage.schemas.ranges import Ranges, both, count_of, joined, ranges_of, without
from moorage.schemas.service import Scale


class Copies:
    """Gives jobs other numbers of replicas. `jobs_max` bounds what all live jobs count towards the memory."""

    def __init__(
        self, state: State, lifecycle: Lifecycle, reader: RequestReader, scaling: Scaling, jobs_max: int
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._reader = reader
        self._scaling = scaling
        self._jobs_max = jobs_max

    def changed(self, draft: Draft, job: Job, request: Request, asked: int | Scale) -> Request | Problem:
        """Return a job's request with this number of replicas, or why it cannot have that."""
        if asked == request.replicas:
            return request
        if request.gpu is not None and request.gpu.effective_scheduling == "gang":
            return self._fixed(job, "the ranks of a gang start together, and know how many they are")
        if request.each_worker:
            return self._fixed(job, "it has one replica for each worker")
        if request.workload.items is not None:
            return self._fixed(job, "each of its replicas has an item, so its items say how many there are")
        if not draft.may(acts.Replicas):
            return problem(
                "failed-precondition",
                f"the ledger is at feature level {self._state.level}, and the number of replicas of a job can be"
                f" changed from level {acts.Replicas.LEVEL} on",
                field="$.replicas",
                job=job.name,
                next="an operator raises it once all schedulers can: moorage admin feature-level",
            )
        least, most = (asked.min, asked.max) if isinstance(asked, Scale) else (-1, asked)
        has = _count(job, request)
        ended = job.size - job.live
        if most < ended:
            return problem(
                "failed-precondition",
                f"{ended} replicas of job {job.name} have ended, so it cannot have fewer",
                field="$.replicas",
                found=most,
                allowed=f"{ended}..{REPLICAS_MAX}",
                job=job.name,
                next=f"moorage cancel {word_of(job.name)} ends all of it",
            )
        if top_of(job, request) + max(0, most - has) >= REPLICAS_MAX or self._is_too_much(job, most):
            return problem(
                "queue-full",
                f"there is no room for {most} replicas of job {job.name}",
                field="$.replicas",
                found=most,
                job=job.name,
                next="change it once other jobs have ended, or submit another job for them",
            )
        return request.with_copies(least, most)

    def record(self, draft: Draft, job: Job, wanted: Request, event: ChangeOrder) -> None:
        """Write a number of replicas that `changed` has allowed, and what follows from it."""
        has = _count(job, self._reader.request_of(job))
        least, most = (-1, wanted.copies) if wanted.scale is None else (wanted.scale.min, wanted.copies)
        before = wanted_of(job, self._reader.request_of(job))
        leaving = self._leaving(job, max(0, has - most))
        flat = [number for each in leaving for number in each]
        said = f"replicas {most}" if wanted.scale is None else f"replicas {least}-{most}"
        why = f"{said}: {event.asked.reason}" if event.asked.reason else said
        top = top_of(job, self._reader.request_of(job))
        draft.add(acts.Replicas(job.num, least, most, top, max(0, most - has), flat, event.by, why))
        self._follow(draft, job, wanted, before, why)
        if most > has:
            draft.enlarged.append(job)
        if leaving:
            self._lifecycle.cancel(draft, job, why, leaving)

    def _follow(self, draft: Draft, job: Job, wanted: Request, before: int, why: str) -> None:
        """Let as many members be wanted as are asked for now; of a service that follows its calls, as many as before,
        as far as its bounds allow."""
        self._scaling.add(job, wanted)
        if wanted.scale is not None:
            self._scaling.want(draft, job, min(max(before, wanted.scale.min), wanted.scale.max), why)
        elif job.scaled is not None:
            lent = job.lent[0]  # it may have lent more than it is to have
            self._scaling.want(draft, job, max(0, wanted.copies - lent), why)

    def _leaving(self, job: Job, count: int) -> Ranges:
        """Return the numbers of so many replicas that go: those that wait, the last ones first, then others."""
        taken: set[int] = set(job.relocating or ())
        fresh = without(job.fresh, joined(sorted((number, number) for number in taken)))
        fresh = without(fresh, job.leaving)
        found: list[tuple[int, int]] = []
        for first, last in reversed(fresh):
            if count > 0:
                found.append((max(first, last - count + 1), last))
                count -= found[-1][1] - found[-1][0] + 1
        rows = [row for row in job.rows.values() if row.index not in taken and row.state not in LEAVING]
        rows = [row for row in rows if not both(((row.index, row.index),), job.leaving)]

        order = sorted(
            rows,
            key=lambda row: (row.state != QUEUED, row.attempt is not None and row.attempt.ready, -row.index),
        )
        more = ranges_of(sorted(row.index for row in order[: max(0, count)]))
        return joined(sorted((*found, *more)))

    def _is_too_much(self, job: Job, most: int) -> bool:
        more = extra_of(most, len(job.body)) - job.extra
        return more > 0 and more > self._state.room(self._jobs_max, job.tenant)

    @staticmethod
    def _fixed(job: Job, why: str) -> Problem:
        return problem(
            "failed-precondition",
            f"job {job.name} keeps its number of replicas: {why}",
            field="$.replicas",
            job=job.name,
            next="submit another job with the number that you want",
        )


def _count(job: Job, request: Request) -> int:
    """Return how many replicas a job keeps: without those that are taken away, one after a move among them."""
    has = count_of(without(job.numbers, job.leaving))
    return has - (job.relocating is not None and has > request.copies)
