"""What all that checks or folds a record has in common: the record in hand, what it has touched, what came of it."""

from __future__ import annotations

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

    __slots__ = ("epoch", "format", "members", "notes", "out", "replicas", "rows", "seq", "state", "time")

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

    def worker(self, num: int) -> Worker:
        """Return a worker that this record changes."""
        worker = self.state.worker_by_num[num]
        self.touch_worker(worker)
        return worker

    def touch_worker(self, worker: Worker) -> None:
        self.rows[worker] = None
        self.out.workers.append(worker)

    def tenant(self, name: str) -> Tenant:
        """Return a tenant that this record changes."""
        tenant = self.state.tenant(name)
        self.rows[tenant] = None
        return tenant

    def job(self, num: int, does: str) -> Job:
        """Return a job; `does` is what the record does to it, for the error where there is none."""
        job = self.state.jobs.get(num)
        if job is None:
            raise FoldError(f"record {self.seq} {does} job {num}, which is not there")
        return job

    def ordered(self, num: int, word: int, by: str, why: str) -> Job:
        """Return a job on which an operator acts: the act is a revision of its own in the job's story."""
        job = self.job(num, "acts on")
        job.rev += 1
        self.add_transition(job, (job.rev, self.time, -1, 0, word, -1, 0, 0, why, 0, by))
        self.out.jobs[num] = job
        return job

    def add_transition(self, job: Job, transition: Transition) -> None:
        story = job.story
        if len(story) >= STORY_PART:
            self.note_long_story(job)
        story.append(transition)

    def note_long_story(self, job: Job) -> None:
        """Note that a job's story is long; drop its oldest part where no history has taken it."""
        story, replicas = job.story, len(job.replicas)
        if len(story) >= STORY_MAX + STORY_MAX_REPLICA * replicas:
            del story[: len(story) // 4]
        if len(story) >= STORY_PART + STORY_PART_REPLICA * replicas:
            self.out.long[job.num] = job


class Checking:
    """What a record's acts leave, as `check` follows them without changing the state."""

    __slots__ = ("compacted", "expired", "gone", "ids", "state", "workers")

    def __init__(self, state: State) -> None:
        self.state = state
        self.workers = len(state.worker_by_num)  # known with this record
        self.ids: set[str] = set()  # workers that this record makes known
        self.compacted = 0  # jobs that leave memory
        self.expired = 0  # rows of finished jobs that expire
        self.gone: set[tuple[str, str]] = set()  # tenant and name of the jobs that leave memory
