"""Where the jobs of a folded state stand: in the fleet, in line, and with the times that they must keep.

In a new reign for all that the ledger holds; then for each job that comes, and for one that asks differently from now
on.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from moorage.scheduler.core.decide.plan import Planner
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.life.admission import Admission
from moorage.scheduler.core.life.timers import Timers
from moorage.scheduler.core.line.durations import LEARNED_AT_START_MAX, Durations
from moorage.scheduler.core.line.queue import entry
from moorage.scheduler.core.line.request_reader import RequestReader
from moorage.scheduler.core.state import QUEUED, Job, State
from moorage.schemas.job import Request


class Indexing:
    """Over one engine's state; `reading` tells what its jobs ask for."""

    def __init__(
        self,
        state: State,
        reading: RequestReader,
        planner: Planner,
        timers: Timers,
        admission: Admission,
        durations: Durations,
    ) -> None:
        self.state = state
        self.fleet = reading.fleet
        self.queue = planner.queue
        self.planner = planner
        self.timers = timers
        self.admission = admission
        self.durations = durations
        self.request_of, self.priority_of = reading.request_of, reading.priority_of
        self.shape_of, self.workload_of = reading.shape_of, reading.workload_of
        self._unmatched: set[int] = set()  # jobs with on_no_match reject, accepted before the fleet was heard
        self.rejects: deque[int] = deque()  # of them, once it was

    def resume(self, mono_ms: int) -> None:
        """Index a folded state: nobody counts as heard yet, every session as heard of now (ledger-rules H28)."""
        standing = [worker for worker in self.state.worker_by_num if worker.session]
        for worker in standing:
            self.fleet.rules_of(worker.hello)  # whom any rules name, before the first shape is made
        for worker in standing:
            host = self.fleet.join(worker, [(m, self.shape_of(m.replica.job)) for m in worker.members.values()])
            host.last_ms = mono_ms
        for num in islice(self.state.ended, max(0, len(self.state.ended) - LEARNED_AT_START_MAX), None):
            job = self.state.jobs[num]
            self.durations.learn(job, self.shape_of(job), self.workload_of(job))
        for job in self.state.jobs.values():
            job.told = job.rev
            job.own_subject = True  # whom the leader before told of it is not known here
            if not job.over:
                self._index(job, self.request_of(job))
                self.planner.placing.ranker.arrived(self.shape_of(job), len(job.replicas))

    def _index(self, job: Job, request: Request) -> None:
        """Put a live job's waiting replicas in the queue and its times in the timers."""
        shape = self.shape_of(job)
        if shape.requires:
            self.fleet.tell_apart(shape.requires)
        waiting = [replica for replica in job.replicas if replica.state == QUEUED]
        for replica in waiting[:1] if shape.together > 1 else waiting:
            if replica.not_before > self.state.time_ms:
                self.timers.requeue(replica, replica.not_before)
            elif job.hold is None:
                self.enqueue(job, request, job.priority, entry(job.num, replica.index))
        self.arm(job, request)

    def enqueue(self, job: Job, request: Request, given: int, item: int) -> None:
        """Put an entry in line. `given` is the priority that an operator gave its job, below 0 for none."""
        self.queue.add(given if given >= 0 else request.priority, self.shape_of(job), item, job.tenant)

    def arm(self, job: Job, request: Request) -> None:
        """A job's times, and whether it waits for the fleet to be heard before it may be rejected."""
        self.timers.arm(job, request)
        # a job that something has become of was matched once: it is not rejected for what left the fleet since
        if request.on_no_match == "reject" and job.rev == 1 and not self.admission.could_ever(self.shape_of(job)):
            self._unmatched.add(job.num)

    def count_unmatched(self) -> None:
        """Once every session was heard: who asked to be rejected where no worker could ever run it, is to be now."""
        if self._unmatched and self.admission.all_heard():
            self.rejects.extend(sorted(self._unmatched))
            self._unmatched.clear()

    def reject_unmatched(self, draft: Draft) -> None:
        """As many of them as one record has room for."""
        while self.rejects and not draft.bulk_full:
            job = self.state.jobs.get(self.rejects.popleft())
            if job is not None:
                self.admission.reject_unmatched(draft, job, self.shape_of(job))

    def reshape(self, job: Job) -> None:
        """It asks differently from now on: what waits of it moves to the line of those that ask so."""
        old, job.shape = self.shape_of(job), None
        self.planner.holding.forget(job.num)
        if job.over or job.hold is not None:
            return  # a release adds it anew
        new, priority = self.shape_of(job), self.priority_of(job)
        for replica in job.replicas[:1] if new.together > 1 else job.replicas:
            item = entry(job.num, replica.index)
            # one that pauses is not in line: its timer puts it there, though its time may have come
            if replica.state == QUEUED and self.queue.remove(priority, old, item, job.tenant):
                self.queue.add(priority, new, item, job.tenant)
