"""Acts on jobs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

from moorage.scheduler.core.finished import job_key
from moorage.scheduler.core.ledger.acts.base import Act
from moorage.scheduler.core.ledger.folding import Checking, FoldError, Folding
from moorage.scheduler.core.state import AT_MS, AVOID_MAX, PARTS_MAX, PRIORITY, REV, STORY_KEPT
from moorage.schemas.job import STATES


class OfJob(Act):
    """An act on a job that is in memory."""

    job: int

    def check(self, checking: Checking) -> None:
        if self.job not in checking.state.jobs:
            raise FoldError(f"act {self.tag} of job {self.job}, which is not there")


class Avoid(OfJob, tag="avoid"):
    """A job is not placed on these slots of a worker, which failed under it; none lifts that."""

    LEVEL: ClassVar[int] = 2
    IS_DECISION: ClassVar[bool] = True
    worker: int
    slots: int

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "avoids a device for")
        avoid = dict(job.avoid)
        avoid[self.worker] = avoid.get(self.worker, 0) | self.slots
        if not self.slots:
            del avoid[self.worker]
        job.avoid = tuple(sorted(avoid.items())[-AVOID_MAX:])
        folding.out.jobs[job.num] = job


class Preempt(OfJob, tag="preempt"):
    """Workers are reserved for a job, and these jobs end for it; without workers that is given up."""

    LEVEL: ClassVar[int] = 2
    IS_DECISION: ClassVar[bool] = True
    workers: list[int]
    victims: list[int]

    def fold(self, folding: Folding) -> None:
        job, preempting = folding.job(self.job, "preempts for"), folding.state.preempting
        preempting.pop(job.num, None)
        job.preempts = (tuple(self.workers), tuple(self.victims)) if self.workers else None
        if self.workers:
            preempting[job.num] = job
        folding.out.jobs[job.num] = job


class Priority(OfJob, tag="priority"):
    """An operator gives a job another priority."""

    IS_DECISION: ClassVar[bool] = True
    priority: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        said = f"{self.priority}: {self.why}" if self.why else str(self.priority)
        folding.ordered(self.job, PRIORITY, self.by, said).priority = self.priority
        folding.state.reprioritized += 1


class Part(OfJob, tag="part"):
    """Revisions `first` to `last` of a job stand in the history at `seq`: memory keeps what is newer, and the last."""

    seq: int
    first: int
    last: int

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "holds a part of")
        job.parts = (*job.parts, (self.seq, self.first, self.last))[-PARTS_MAX:]
        story = job.story
        if story:
            del story[: max(0, min(len(story) - STORY_KEPT, self.last - story[0][REV] + 1))]


class Compact(Act, tag="compact"):
    """The oldest jobs that are over leave memory.

    `flat` has for each its number and its request's digest, `kept` where its history stands, 0 for nowhere.
    """

    flat: list[int | bytes]
    kept: list[int]

    def check(self, checking: Checking) -> None:
        jobs, nums = checking.state.jobs, self.flat[::2]
        at = checking.compacted
        if nums != list(islice(checking.state.ended, at, at + len(nums))):
            raise FoldError("jobs that are not the oldest ended ones leave memory")
        checking.compacted += len(nums)
        checking.gone.update((job.tenant, job.name) for job in [jobs[int(num)] for num in nums])

    def fold(self, folding: Folding) -> None:
        state = folding.state
        ended, jobs, tenants = state.ended, state.jobs, state.tenants
        digest, before = state.digest, state.finished.row
        rows: list[tuple[bytes, bytes, int, int, int]] = []
        pairs: Iterator[Any] = iter(self.flat)
        for num, request, where in zip(pairs, pairs, self.kept, strict=True):
            if not ended or ended.popleft() != num:
                raise FoldError(f"record {folding.seq}: job {num} is not the oldest ended one")
            job = jobs.pop(num)
            tenant, name, story, replicas = job.tenant, job.name, job.story, job.replicas
            if job.extra:
                state.extra -= job.extra
                state.extra_ended -= job.extra
            del tenants[tenant].jobs[name]
            final = replicas[0].state if len(replicas) == 1 else STATES.index(job.state)
            ended_ms = story[-1][AT_MS] if story else folding.time
            rows.append((job.key or job_key(tenant, name), request, ended_ms, final, where))
            digest -= job.row
            for replica in replicas:
                digest -= replica.row
                del replica.job  # they point at each other: so they go at once, and leave the collector nothing
        state.finished.add_all(rows)
        state.digest = (digest + state.finished.row - before) & 0xFFFFFFFFFFFFFFFF


class Expire(Act, tag="expire"):
    """So many of the oldest rows of finished jobs go."""

    rows: int

    def check(self, checking: Checking) -> None:
        checking.expired += self.rows
        if checking.expired > len(checking.state.finished) + checking.compacted:
            raise FoldError(f"{checking.expired} rows of finished jobs expire, which are not there")

    def fold(self, folding: Folding) -> None:
        state = folding.state
        before = state.finished.row
        for _ in range(self.rows):
            state.finished.drop_oldest()
        state.digest = (state.digest + state.finished.row - before) & 0xFFFFFFFFFFFFFFFF


JobAct = Avoid | Preempt | Priority | Part | Compact | Expire
