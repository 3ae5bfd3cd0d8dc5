"""The common parts of folding a record: the rows that it changed, and the result."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from operator import itemgetter

from moorage.scheduler.core.ledger.state import (
    AT_MS,
    LISTED_MAX,
    STORY_MAX,
    STORY_MAX_REPLICA,
    STORY_PART,
    STORY_PART_REPLICA,
    Job,
    Member,
    Replica,
    State,
    Tenant,
    Worker,
    extra_of,
)
from moorage.schemas.ranges import Ranges, count_of


class FoldError(Exception):
    """The record does not fit this state: another ledger, another version, or a defect. Stop; never skip it."""


@dataclass(slots=True, eq=False, repr=False)
class Folded:
    """What a record changed, for the leader's answers, frames and events."""

    accepted: list[Job] = field(default_factory=list)
    jobs: dict[int, Job] = field(default_factory=dict)  # jobs with a new revision
    placed: list[Member] = field(default_factory=list)
    #: members whose wanted state changed: to end, or a gang to start
    touched: list[Member] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    compacted: list[Job] = field(default_factory=list)  # ended ones that left memory
    workers: list[Worker] = field(default_factory=list)  # joined, left or changed
    was_out: dict[Worker, int] = field(default_factory=dict)  # of those, `out` before the record
    forgotten: list[Worker] = field(default_factory=list)


class Folding:
    """A record being folded; collects the changed rows, so that each row is hashed once."""

    __slots__ = (
        "epoch",
        "expired",
        "finished",
        "format",
        "members",
        "notes",
        "out",
        "replicas",
        "rows",
        "seq",
        "state",
        "time",
    )

    def __init__(self, state: State, seq: int, time: int, epoch: int, format: int, notes: list[str]) -> None:
        self.state = state
        self.seq = seq
        self.time = time
        self.epoch = epoch
        self.format = format
        self.notes = notes
        self.out = Folded()
        self.replicas: dict[Replica, None] = {}
        self.members: dict[Member, None] = {}
        self.rows: dict[Worker | Tenant, None] = {}
        self.finished: list[tuple[bytes, bytes, int, int]] = []  # rows that the table of finished jobs gets
        self.expired = 0  # how many of its oldest it loses then

    def worker(self, num: int) -> Worker:
        """Return a worker, marked as changed."""
        worker = self.state.worker_by_num[num]
        self.touch_worker(worker)
        return worker

    def touch_worker(self, worker: Worker) -> None:
        """Mark a worker that is to change."""
        self.rows[worker] = None
        self.out.workers.append(worker)
        self.out.was_out.setdefault(worker, worker.out)

    def tenant(self, name: str) -> Tenant:
        """Return a tenant, marked as changed; it is created if it is not known."""
        tenant = self.state.tenant(name)
        self.rows[tenant] = None
        return tenant

    def job(self, num: int, does: str) -> Job:
        """Return a job; `does` is what the record does to it, for the error if it does not exist."""
        job = self.state.jobs.get(num)
        if job is None:
            raise FoldError(f"record {self.seq} {does} job {num}, which is not there")
        return job

    def ordered(self, num: int, word: int, by: str, why: str, member: Member | None = None) -> Job:
        """Return a job after adding an act on it, or on one member of it, to its story, as a revision of its own."""
        job = self.job(num, "acts on")
        job.rev += 1
        replica, attempt, fence = (-1, 0, 0) if member is None else (member.replica.index, member.attempt, member.fence)
        job.story.append((job.rev, self.time, replica, attempt, word, -1, 0, 0, why, fence, by))
        self.out.jobs[num] = job
        return job

    def renumber(self, job: Job, numbers: Ranges) -> None:
        """Give a job these numbers of replicas instead of those that it has."""
        job.numbers, job.size, before = numbers, count_of(numbers), job.extra
        job.extra = extra_of(job.size, len(job.body))
        self.state.extra += job.extra - before
        self.state.tenants[job.tenant].extra += job.extra - before
        job.derived = 0, ""

    def shorten_story(self, job: Job) -> None:
        """Drop the oldest transitions of a long story; the history has them.

        What this record says stays, and so much before it as a follower of the ledger may still have to write.
        """
        story, replicas = job.story, min(job.size, LISTED_MAX)
        most = STORY_MAX + STORY_MAX_REPLICA * replicas
        if len(story) >= most:
            said = bisect_left(story, self.time, key=itemgetter(AT_MS))
            unwritten = STORY_PART + STORY_PART_REPLICA * replicas
            del story[: max(0, min(len(story) - most * 3 // 4, said - unwritten))]
