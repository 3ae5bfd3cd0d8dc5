"""Adds jobs to the fleet's view, the queue and the timers.

At the start of a term that is done for all jobs of the folded state; later for each new job and each job whose shape
changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from itertools import islice

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.state import QUEUED, Job, State
from moorage.scheduler.core.lifecycle.admission import Admission
from moorage.scheduler.core.lifecycle.timers import Timers
from moorage.scheduler.core.queue.queue import entry
from moorage.scheduler.core.request_reader import RequestReader
from moorage.scheduler.core.schedule.cycle import Planner
from moorage.scheduler.core.schedule.runtime import LEARNED_AT_START_MAX, Durations
from moorage.schemas.job import Request


class Indexing:
    """Indexes the jobs of one engine's state; `requests` decodes their requests.

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
        failed: Callable[[Job, Exception], None],
    ) -> None:
        self.state = state
        self.fleet = requests.fleet
        self.queue = planner.queue
        self.planner = planner
        self.timers = timers
        self.admission = admission
        self.durations = durations
        self.request_of, self.priority_of = requests.request_of, requests.priority_of
        self.shape_of, self.workload_of = requests.shape_of, requests.workload_of
        self.aside: Collection[int] = ()  # numbers of jobs that are to be held, and are not put into the queue
        self._failed = failed
        # jobs with `on_no_match` reject that were accepted before all workers were heard from
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
            host = self.fleet.join(worker, [(m, self.shape_of(m.replica.job)) for m in worker.members.values()])
            host.last_ms = mono_ms
        for num in islice(self.state.ended, max(0, len(self.state.ended) - LEARNED_AT_START_MAX), None):
            job = self.state.jobs[num]
            self.durations.learn(job, self.shape_of(job), self.workload_of(job))
        for job in self.state.jobs.values():
            if not again:
                job.told = job.rev
                job.own_subject = True  # a client may follow the job's own subject, as only the previous leader knew
            if job.over:
                continue
            try:
                self._index(job, self.request_of(job))
                self.planner.placing.ranker.arrived(self.shape_of(job), len(job.replicas))
            except Exception as raised:
                self._failed(job, raised)

    def _index(self, job: Job, request: Request) -> None:
        """Put a live job's waiting replicas into the queue, and its deadlines into the timers.

        Of a gang, one entry stands for all replicas. A replica in backoff gets a timer, and one of a held job is left
        out.
        """
        shape = self.shape_of(job)
        self.fleet.tell_apart(shape)
        waiting = [replica for replica in job.replicas if replica.state == QUEUED]
        for replica in waiting[:1] if shape.together > 1 else waiting:
            if replica.not_before > self.state.time_ms:
                self.timers.requeue(replica, replica.not_before)
            elif job.hold is None and job.num not in self.aside:
                self.enqueue(job, request, job.priority, entry(job.num, replica.index))
        self.arm(job, request)

    def enqueue(self, job: Job, request: Request, given: int, item: int) -> None:
        """Put an entry into the queue. `given` is the priority that an operator gave its job, below 0 for none."""
        self.queue.add(given if given >= 0 else request.priority, self.shape_of(job), item, job.tenant)

    def arm(self, job: Job, request: Request) -> None:
        """Set a job's timers, and remember it if it may have to be rejected once all workers were heard from."""
        self.timers.arm(job, request)
        # a job with a later revision was matched before: workers that have left since are no reason to reject it
        if job.rev == 1 and self.admission.ends_unmatched(request, self.shape_of(job)):
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
                self.admission.reject_unmatched(draft, job, self.shape_of(job))

    def reshape(self, job: Job) -> None:
        """Compute a job's shape again, and move its waiting replicas to the queue group of the new shape."""
        old, job.shape = self.shape_of(job), None
        if job.over or job.hold is not None:
            return  # its release adds it with the new shape
        new, priority = self.shape_of(job), self.priority_of(job)
        waiting = [
            entry(job.num, replica.index)
            for replica in (job.replicas[:1] if new.together > 1 else job.replicas)
            if replica.state == QUEUED
        ]
        # a replica in backoff is not in the queue: its timer will put it there
        self.queue.add_all(priority, new, self.queue.remove(priority, old, waiting, job.tenant), job.tenant)
