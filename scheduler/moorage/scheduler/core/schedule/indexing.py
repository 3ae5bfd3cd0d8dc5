"""Adds jobs to the fleet's view, the queue and the timers.

At the start of a term that is done for all jobs of the folded state; later for each new job and each job whose shape
changes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from itertools import islice
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.state import AT_MS, FENCE, ON_WORKER, PLACED, QUEUED, STATE, Job, State
from moorage.scheduler.core.lifecycle.admission import Admission
from moorage.scheduler.core.lifecycle.max_running import most_of
from moorage.scheduler.core.lifecycle.relocating import Relocating
from moorage.scheduler.core.lifecycle.scaling import Scaling
from moorage.scheduler.core.lifecycle.timers import Timers
from moorage.scheduler.core.queue.queue import entry
from moorage.scheduler.core.queue.waiting_room import WaitingRoom
from moorage.scheduler.core.request_reader import RequestReader
from moorage.scheduler.core.schedule.cycle import Planner
from moorage.scheduler.core.schedule.runtime import LEARNED_AT_START_MAX, Durations
from moorage.schemas.job import Request

#: with so many replicas of a job that came back at once, no new one is placed until some of them have been
BACK_MAX: Final = 1_000


def _full_until_ms(job: Job, most: int) -> int:
    """Return the ledger ms until which so many replicas were on workers at once; 0 if that is now, or in no story."""
    count = job.on_workers
    for row in reversed(job.story) if count < most else ():
        if row[STATE] == PLACED:
            count -= 1
        elif row[FENCE] and row[STATE] >= 0 and row[STATE] not in ON_WORKER:  # an attempt's end
            count += 1
            if count >= most:
                return row[AT_MS]
    return 0


class Indexing:
    """Indexes the jobs of one engine's state; `requests` decodes their requests.

    `aside` are the numbers of jobs that are to be held, and are not put into the queue.

    At the start of a term, `failed` is called for a job that cannot be indexed, with the job and the exception;
    if it returns, that job is left out.
    """

    def __init__(
        self,
        state: State,
        requests: RequestReader,
        planner: Planner,
        timers: Timers,
        admission: Admission,
        durations: Durations,
        room: WaitingRoom,
        failed: Callable[[Job, Exception], None],
        scaling: Scaling,
        relocating: Relocating,
        aside: Collection[int] = (),
    ) -> None:
        self.state = state
        self.fleet = requests.fleet
        self.queue = planner.queue
        self.planner = planner
        self.timers = timers
        self.scaling = scaling
        self.relocating = relocating
        self.admission = admission
        self.durations = durations
        self.room = room
        self.requests = requests
        self._aside = aside
        self._failed = failed
        # jobs with `on_no_match` reject that were accepted in this term before all workers were heard from
        self._unmatched: set[int] = set()
        self.rejects: deque[int] = deque()  # jobs of `_unmatched` to reject, now that all workers were heard from

    def resume(self, mono_ms: int, *, again: bool = False) -> None:
        """Index a folded state: its workers, jobs and earlier run times.

        No worker was heard from yet; the silence of each is measured from `mono_ms` on (H28). `again` if this leader
        has indexed the state before: then it knows which events it has sent.
        """
        standing = [worker for worker in self.state.workers.values() if worker.session]
        for worker in standing:
            self.fleet.rules_of(worker.hello)  # rules come first: shapes depend on which tenants have rules
        for worker in standing:
            host = self.fleet.join(
                worker, [(m, self.requests.shape_of(m.replica.job)) for m in worker.members.values()]
            )
            host.last_ms = mono_ms
        for num in islice(self.state.ended, max(0, len(self.state.ended) - LEARNED_AT_START_MAX), None):
            job = self.state.jobs[num]
            self.durations.learn(job, self.requests.shape_of(job), self.requests.workload_of(job))
        for job in self.state.jobs.values():
            if not again:
                job.told = job.rev
                job.own_subject = True  # a client may follow the job's own subject, as only the previous leader knew
            if job.over:
                continue
            try:
                self._index(job, self.requests.request_of(job))
                self.planner.placing.ranker.arrived(self.requests.shape_of(job), job.size)
            except Exception as raised:
                self._failed(job, raised)

    def _index(self, job: Job, request: Request) -> None:
        """Put a live job's waiting replicas into the queue, and its deadlines into the timers.

        Of a gang, one entry stands for all replicas. A replica in backoff gets a timer, and one of a held job is left
        out. A job that waits for something else than a host goes into the waiting room instead.
        """
        shape = self.requests.shape_of(job)
        self.fleet.tell_apart(shape)
        self.bound(job, request)
        if job.bad:
            self.admission.lifecycle.failing.add(job)  # its former leader may not have come to it
        may_start = job.hold is None and job.num not in self._aside
        waiting = [replica for replica in job.rows.values() if replica.state == QUEUED]
        for replica in waiting[:1] if shape.together > 1 else waiting:
            if replica.not_before > self.state.time_ms:
                self.timers.requeue(replica, replica.not_before)
            elif may_start:
                self.enqueue(job, request, job.priority, entry(job.num, replica.index))
        if job.awaits:
            self.room.add(job)
        elif may_start and job.fresh:
            self.queue.add_fresh(self.requests.priority_of(job), shape, job.num, job.fresh, job.tenant)
        self.arm(job, request)

    def bound(self, job: Job, request: Request) -> None:
        """Keep a job in the queue as far as its own bounds let it place replicas: how many run, and how many came back.

        To be called for each job with replicas beyond one whenever some were placed, or have left their workers.
        """
        queue, num, most = self.queue, job.num, most_of(job, request)
        if job.over:
            queue.unbound(num)
            return
        if (job.back >= BACK_MAX) != (num in queue.closed):
            key = self.requests.priority_of(job), self.requests.shape_of(job), job.tenant
            if job.back >= BACK_MAX:
                queue.close(num, key, job.fresh)
            elif job.hold is None:
                queue.open(num, key, job.fresh)
            else:
                queue.closed.discard(num)  # its release puts them in
        if most is not None and (job.size > 1 or request.scale is not None or job.scaled is not None):
            if num not in queue.rooms:  # a new leader's first look at it
                job.since_ms = max(job.since_ms, _full_until_ms(job, most))
            self._let_place(job, most - job.on_workers, self.state.time_ms)

    def bound_by(self, draft: Draft) -> None:
        """Let jobs with such a bound place as many more replicas as this record takes off their workers.

        Once it is folded, others would have what these have left.
        """
        for num, count in Counter(draft.leaving()).items() if self.queue.rooms else ():
            if num in self.queue.rooms:
                self._let_place(self.state.jobs[num], self.queue.rooms[num] + count, draft.time_ms)

    def _let_place(self, job: Job, room: int, now_ms: int) -> None:
        """Let a job with such a bound place so many more replicas; if it could place none, it waits from now on."""
        was_full = self.queue.rooms.get(job.num, room) <= 0
        self.queue.bound(job.num, room, (self.requests.priority_of(job), self.requests.shape_of(job), job.tenant))
        if was_full and room > 0:
            job.since_ms = now_ms

    def bound_to(self, job: Job, request: Request, wanted: int) -> None:
        """Let a service have this many members from now on, before the record that says so is folded."""
        key = self.requests.priority_of(job), self.requests.shape_of(job), job.tenant
        self.queue.bound(job.num, wanted + (job.relocating is not None) - job.on_workers, key)

    def enter_more(self, job: Job, number: int) -> None:
        """Put a replica that a job has got beyond those of its request into the queue, unless the job is held."""
        if job.hold is None and job.num not in self._aside:
            shape, fresh = self.requests.shape_of(job), ((number, number),)
            self.queue.add_fresh(self.requests.priority_of(job), shape, job.num, fresh, job.tenant)

    def enqueue(self, job: Job, request: Request, given: int, item: int) -> None:
        """Put an entry into the queue. `given` is the priority that an operator gave its job, below 0 for none."""
        self.queue.add(given if given >= 0 else request.priority, self.requests.shape_of(job), item, job.tenant)

    def enter(self, draft: Draft, job: Job) -> None:
        """Put a job that waits for nothing but a host from now on into the queue, unless it is held."""
        request, row = self.requests.request_of(job), draft.job(job)
        job.since_ms = draft.time_ms
        self.timers.arm_start(job, request, draft.time_ms)
        if row.hold is None and job.num not in self._aside:
            priority = row.priority if row.priority >= 0 else request.priority
            self.queue.add_fresh(priority, self.requests.shape_of(job), job.num, row.fresh, job.tenant)

    def arm(self, job: Job, request: Request) -> None:
        """Set a job's timers and take note of its service; remember it if it may have to be rejected once all workers
        were heard from."""
        self.timers.arm(job, request)
        self.admission.services.add(job, request)
        self.scaling.add(job, request)
        self.relocating.add(job)
        # one of an earlier term, or with a later revision, may have matched a worker that is away now
        may_end = job.rev == 1 and job.ledger > self.state.epoch_seq
        if may_end and self.admission.ends_unmatched(request, self.requests.shape_of(job)):
            self._unmatched.add(job.num)

    def queue_rejections(self) -> None:
        """Once all workers were heard from, queue the rejections of jobs that no worker could ever run."""
        if self._unmatched and self.admission.all_heard():
            self.rejects.extend(sorted(self._unmatched))
            self._unmatched.clear()

    def reject_unmatched(self, draft: Draft) -> None:
        """Reject the jobs of `rejects` that still match no worker, as many as one record has room for."""
        while self.rejects and not draft.bulk_full:
            job = self.state.jobs.get(self.rejects.popleft())
            if job is not None:
                self.admission.reject_unmatched(draft, job, self.requests.shape_of(job))

    def reshape(self, job: Job) -> None:
        """Compute a job's shape again, and move its waiting replicas to the queue group of the new shape."""
        old, job.shape = self.requests.shape_of(job), None
        if job.over or job.hold is not None:
            return  # its release adds it with the new shape
        new, priority = self.requests.shape_of(job), self.requests.priority_of(job)
        # a replica in backoff is not in the queue: its timer will put it there
        self.queue.move(job.num, job.tenant, (priority, old), (priority, new))
