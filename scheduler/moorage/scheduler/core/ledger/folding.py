"""What is common to all that folds a record: what it has in hand, what it has touched, and what came of it."""

from __future__ import annotations

from moorage.scheduler.core.records import Record
from moorage.scheduler.core.state import (
    STORY_MAX,
    STORY_MAX_REPLICA,
    STORY_PART,
    STORY_PART_REPLICA,
    Job,
    Member,
    Replica,
    State,
    Tenant,
    Transition,
    Worker,
)


class FoldError(Exception):
    """The record cannot follow this state: another ledger, another version, or a defect. Stop; never skip."""


class Folded:
    """What a record changed, for whoever acts on it: the leader's answers, frames and events."""

    __slots__ = ("accepted", "ended", "jobs", "long", "placed", "touched", "workers")

    def __init__(self) -> None:
        self.accepted: list[Job] = []
        self.jobs: dict[int, Job] = {}  # jobs with a new revision
        self.placed: list[Member] = []
        self.touched: list[Member] = []  # members whose wanted state changed: to end, or a gang to start
        self.ended: list[Job] = []
        self.long: dict[int, Job] = {}  # jobs of which a part should stand in the history before memory lets it go
        self.workers: list[Worker] = []  # joined or gone


class Folding:
    """One record being folded; keeps the rows it touches so that the digest is renewed once a row."""

    __slots__ = ("members", "out", "record", "replicas", "rows", "seq", "state", "time")

    def __init__(self, state: State, record: Record, seq: int, out: Folded) -> None:
        self.state = state
        self.record = record
        self.seq = seq
        self.out = out
        self.time = record.time
        self.replicas: dict[Replica, None] = {}
        self.members: dict[Member, None] = {}
        self.rows: dict[Worker | Tenant, None] = {}

    def _tell(self, job: Job, transition: Transition) -> None:
        story = job.story
        if len(story) >= STORY_PART:
            self._long(job)
        story.append(transition)

    def _long(self, job: Job) -> None:
        story, replicas = job.story, len(job.replicas)
        if len(story) >= STORY_MAX + STORY_MAX_REPLICA * replicas:
            del story[: len(story) // 4]
        if len(story) >= STORY_PART + STORY_PART_REPLICA * replicas:
            self.out.long[job.num] = job

    def _touch_worker(self, worker: Worker) -> None:
        self.rows[worker] = None
        self.out.workers.append(worker)
