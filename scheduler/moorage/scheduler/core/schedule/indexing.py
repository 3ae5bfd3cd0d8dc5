"""Adds jobs to the fleet's view, the queue and the timers.

At the start of a term that is done for all jobs of the folded state; later for each new job and each job whose shape
changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from moorage.scheduler.core.containment import Containment
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger import fairkeys, fairshare
from moorage.scheduler.core.ledger.state import QUEUED, TIME, Job, State, Worker
from moorage.scheduler.core.lifecycle.admission import Admission, NewJob
from moorage.scheduler.core.lifecycle.max_running import most_of
from moorage.scheduler.core.lifecycle.relocating import Relocating
from moorage.scheduler.core.lifecycle.scaling import Scaling
from moorage.scheduler.core.lifecycle.timers import Timers
from moorage.scheduler.core.lifecycle.unready import Unready
from moorage.scheduler.core.queue.each_worker import EachWorker
from moorage.scheduler.core.queue.queue import Kind, Waiting
from moorage.scheduler.core.queue.waiting_room import WaitingRoom
from moorage.scheduler.core.request_reader import RequestReader
from moorage.scheduler.core.schedule.cycle import Planner
from moorage.scheduler.core.schedule.runtime import LEARNED_AT_START_MAX, Durations
from moorage.schemas import reasons
from moorage.schemas.actors import SCHEDULER
from moorage.schemas.job import Request
from moorage.schemas.ranges import ONE
from moorage.schemas.reasons import Reason


def _full_until_ms(job: Job, most: int) -> int:
    """Return the ledger ms until which so many replicas were on workers at once; 0 if that is now, or was not so since
    the last placement: then its waiting counts from that."""
    return job.left_ms if job.on_workers < most <= job.placed_many else 0


def _most(job: Job, request: Request) -> int | None:
    """Return how many replicas of a job of several, or of a service, may run at once; None for all of them."""
    return most_of(job, request) if job.size > 1 or job.scaled is not None or request.scale is not None else None


def _is_armed(request: Request) -> bool:
    """Return whether `Indexing.arm` does anything for a new job with this request."""
    run = request.workload
    has_time = request.deadline_s is not None or request.start_within_s is not None or bool(request.start_after_s)
    may_be_rejected = request.on_no_match == "reject" or run.user is not None
    return has_time or request.service is not None or run.restart_unready_s is not None or may_be_rejected


class Indexing:
    """Indexes the jobs of one engine's state; `requests` decodes their requests.

    Jobs that are to be held, as `containment` says, are not put into the queue.

    At the start of a term, `failed` is called for a job or a worker that cannot be indexed, with the exception; if it
    returns, that one is left out: a job until its hold is released.
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
        failed: Callable[[Job | Worker, Exception], None],
        scaling: Scaling,
        relocating: Relocating,
        unready: Unready,
        containment: Containment,
    ) -> None:
        self.state = state
        self.fleet = requests.fleet
        self.queue = planner.queue
        self.planner = planner
        self.timers = timers
        self.scaling = scaling
        self.relocating = relocating
        self.unready = unready
        self.admission = admission
        self.durations = durations
        self.room = room
        self.requests = requests
        self._containment = containment
        self._failed = failed
        # jobs with `on_no_match` reject that were accepted in this term before all workers were heard from
        self._unmatched: set[int] = set()
        #: numbers of jobs that could not be indexed, or only in part
        self.left_out: set[int] = set()
        self._inventory = -1  # of the fleet, at the last `follow_fleet`
        self.rejects: deque[int] = deque()  # jobs of `_unmatched` to reject, now that all workers were heard from

    def resume(self, mono_ms: int, *, again: bool = False) -> None:
        """Index a folded state: its workers, jobs and earlier run times.

        No worker was heard from yet; the silence of each is measured from `mono_ms` on (H28). `again` if this leader
        has indexed the state before: then it knows which events it has sent.
        """
        standing = [worker for worker in self.state.workers.values() if worker.session]
        for worker in standing:
            with suppress(Exception):  # it fails again below
                self.fleet.rules_of(worker.inventory)  # rules come first: shapes depend on which tenants have rules
        for worker in standing:
            try:
                host = self.fleet.join(
                    worker, [(m, self.requests.shape_of_attempt(m)) for m in worker.attempts.values()]
                )
            except Exception as raised:
                self._failed(worker, raised)
            else:
                host.last_ms = mono_ms
        self._know_keys()
        if not again:
            self._learn()
        for job in self.state.jobs.values():
            if not again:
                job.told = job.rev
                job.own_subject = True  # a client may follow the job's own subject, as only the previous leader knew
            if job.over:
                continue
            try:
                if job.awaits:
                    self.room.add(job)  # first: ends are told also to a job that is left out
                request = self.requests.request_of(job)
                self._index(job, request)
                self.planner.placing.arrived(self.requests.shape_of(job), request.copies)  # as when it was submitted
            except Exception as raised:
                self._failed(job, raised)

    def _learn(self) -> None:
        """Learn from the last runs of the newest ended jobs, then from those of all that have not ended."""
        ended = islice(self.state.ended, max(0, len(self.state.ended) - LEARNED_AT_START_MAX), None)
        for num in [*ended, *(num for num, job in self.state.jobs.items() if not job.over)]:
            job = self.state.jobs[num]
            if not job.ran:
                continue
            try:
                self.durations.learn(job, self.requests.shape_of(job), self.requests.workload_of(job), job.ran)
            except Exception as raised:
                self._failed(job, raised)

    def _know_keys(self) -> None:
        """Count what the fair keys of tenants use, from what runs and from the last runs of the jobs in memory."""
        keyed = list[tuple[Job, str, int]]()
        for job in self.state.jobs.values():
            if b"fair_key" in job.body:
                with suppress(Exception):  # it fails again where it is indexed
                    request = self.requests.request_of(job)
                    if key := request.fair_key:
                        keyed.append((job, key, request.fair_weight))
                        job.fair = key
        names = {job.tenant for job, _, _ in keyed}
        for name in names:
            self.state.tenants[name].keys = None
        for job, key, weight in keyed:
            fairkeys.know(self.state, self.state.tenants[job.tenant], job, key, weight)
        for name in names:
            tenant = self.state.tenants[name]
            for job in tenant.jobs.values():
                with suppress(Exception):
                    gpu_milli = fairshare.GPU_MILLI * self.requests.shape_of(job).count
                    fairkeys.learn(self.state, tenant, job, gpu_milli)

    def leave_out(self, job: Job) -> None:
        """Leave out a job that cannot be indexed; its timers end it all the same."""
        self.left_out.add(job.num)
        with suppress(Exception):  # its request may be what fails
            self.timers.forget(job.num)
            self.timers.arm(job, self.requests.request_of(job))

    def _index_again(self, job: Job) -> None:
        """Index a job that was left out."""
        self.left_out.discard(job.num)
        self.timers.forget(job.num)
        if job.awaits and job.num not in self.room.jobs:
            self.room.add(job)
        self._index(job, self.requests.request_of(job))

    def _index(self, job: Job, request: Request) -> None:
        """Put a live job into the queue if it may place something; set its timers."""
        shape = self.requests.shape_of(job)
        self.fleet.distinguish(shape)
        if job.failed:  # its former leader may not have come to it
            self.admission.lifecycle.failing[job] = None
        came_back = [replica for replica in job.rows.values() if replica.state == QUEUED] if job.back else []
        for replica in came_back[:1] if shape.is_gang else came_back:
            if replica.not_before > self.state.time_ms:
                self.timers.requeue(replica, replica.not_before)
        self._enter(job, request)
        if job.num in self.queue.waiting and (most := _most(job, request)) is not None:
            job.since_ms = max(job.since_ms, _full_until_ms(job, most))
        self.arm(job, request)

    def _enter(self, job: Job, request: Request) -> None:
        """Let a job wait in the queue, with what of it waits if that may be more than the replica number 0."""
        is_first = not job.fresh and job.rows.keys() == {0} if job.rows else job.fresh == ONE
        is_plain = is_first and not request.each_worker and request.scale is None and job.scaled is None
        if not is_plain and not self.requests.shape_of(job).is_gang:
            self._note(job, request)
        self.look(job)

    def _note(self, job: Job, request: Request) -> Waiting:
        """Note for the queue what of a job waits."""
        rows = job.rows.values() if job.back else ()
        due = (row.index for row in rows if row.state == QUEUED and row.not_before <= self.state.time_ms)
        return self.note(job, request, _most(job, request), sorted(due))

    def note(self, job: Job, request: Request, most: int | None, due: Iterable[int] = ()) -> Waiting:
        """Note for the queue what of a job waits: besides what was never placed, what came back (`due`)."""
        shape = self.requests.shape_of(job)
        own = EachWorker(job, self.state, self.fleet, shape, most) if request.each_worker else Waiting(job, due, most)
        self.queue.waiting[job.num] = own
        return own

    def follow_fleet(self) -> None:
        """Let jobs that run on each worker wait for those that are here now."""
        if self._inventory != self.fleet.inventory:
            for num in [num for num, waiting in self.queue.waiting.items() if waiting.pins]:
                job = self.state.jobs[num]
                self.fleet.distinguish(self.requests.shape_of(job))
                self.look(job)
            self._inventory = self.fleet.inventory

    def why_unqueued(self, job: Job) -> Reason | None:
        """Return why a live job of which something waits is in no queue group; None if it is in one, or pauses."""
        if job.awaits:
            return reasons.AFTER if any(num != TIME for num, _ in job.awaits) else reasons.NOT_BEFORE
        if job.hold is not None:
            return reasons.SCHEDULER_FAILED if job.hold.actor == SCHEDULER else reasons.HELD
        if job.num in self._containment.jobs:
            return reasons.SCHEDULER_FAILED
        if self.requests.later and job.num in self.requests.later:
            return reasons.LATER_RELEASE
        waiting = self.queue.waiting.get(job.num)
        if waiting is not None and waiting.room <= 0:
            request = self.requests.request_of(job)
            gives_way = job.scaled is not None and job.scaled.wanted < request.copies
            return reasons.SCALED if request.scale is not None or gives_way else reasons.MAX_RUNNING
        return reasons.EACH_WORKER if waiting is not None and waiting.rests else None

    def unqueued(self) -> list[Job]:
        """Return the jobs for which `why_unqueued` has a reason, and some that wait no more; for questions."""
        full = {num for num, waiting in self.queue.waiting.items() if waiting.room <= 0 or waiting.rests}
        out = self.state.on_hold.keys() | self._containment.jobs.keys() | self.requests.later.keys()
        nums = self.room.jobs.keys() | out | full
        return [job for num in sorted(nums) if (job := self.state.jobs.get(num)) is not None]

    def look(self, job: Job) -> None:
        """Put a job into its queue group, or take it out, by where it stands."""
        if self.left_out and job.num in self.left_out:
            if job.hold is None and job.num not in self._containment.jobs:
                self._index_again(job)
            return
        kind = self.requests.kind_of(job)
        if self.why_unqueued(job) is None and self.planner.order.waits(job.num):
            self.queue.enter(job.num, kind)
        else:
            self.queue.leave(job.num, kind)

    def follow(self, job: Job, waiting: Waiting) -> None:
        """Follow a folded record that has changed this job: what of it waits, and how many more it may place."""
        if job.over:
            del self.queue.waiting[job.num]
            return
        if waiting.back:
            rows = job.rows
            waiting.back = [n for n in waiting.back if (row := rows.get(n)) is not None and row.state == QUEUED]
        self.let_place(job)

    def let_place(self, job: Job) -> None:
        """Let a job of several replicas place as many as it may; if it could place none, it waits from now on."""
        waiting = self.queue.waiting.get(job.num)
        if waiting is None:
            return  # it waits for other jobs
        waiting.most = _most(job, self.requests.request_of(job))
        if waiting.opens():
            job.since_ms = self.state.time_ms
        self.look(job)

    def let_have(self, job: Job) -> None:
        """Let a service have as many members as are wanted from now on: more may start with the record that says so."""
        if job.over:
            return
        request = self.requests.request_of(job)
        waiting = self.queue.waiting.get(job.num) or self._note(job, request)
        waiting.most = _most(job, request)
        waiting.opens()
        self.look(job)

    def let_follow(self, draft: Draft) -> None:
        """Let jobs place as many more replicas as this record takes off their workers.

        With the next record others would have what these have left.
        """
        for job in draft.rescaled:
            self.let_have(job)
        several = self.queue.waiting
        for job in [job for num, job in draft.changed.items() if num in several and several[num].most is not None]:
            self.let_place(job)

    def enter_more(self, job: Job) -> None:
        """Let a replica wait that a job has got beyond those of its request, with the record just folded."""
        self._note(job, self.requests.request_of(job))
        self.look(job)

    def come_back(self, job: Job, number: int) -> None:
        """Let a replica wait again whose pause is over."""
        if (waiting := self.queue.waiting.get(job.num)) is not None:
            waiting.come_back(number)
        self.look(job)

    def enter(self, job: Job) -> None:
        """Let a job wait that waits for nothing but a host from now on."""
        if job.num in self.left_out:
            self.look(job)
            return
        request = self.requests.request_of(job)
        job.since_ms = self.state.time_ms
        self.timers.arm_start(job, request, self.state.time_ms)
        self._enter(job, request)

    def ended(self, jobs: Iterable[Job]) -> None:
        """Follow a folded record with which jobs have ended that were in the queue, among others."""
        for job in jobs:
            self.queue.ended(self.requests.kind_of(job), self._is_live)

    def _is_live(self, num: int) -> bool:
        job = self.state.jobs.get(num)
        return job is not None and not job.over

    def arm_new(self, accepted: Sequence[Job], new: Mapping[int, NewJob]) -> None:
        """Take note of the jobs that a record accepted."""
        of: Request | None = None  # equal requests share one object
        has_timers = always = False
        for job in accepted:
            request = new[job.num].submit.request
            if request is not of:
                of, always, has_timers = request, request.workload.restart == "always", _is_armed(request)
            job.always = always
            if has_timers:
                self.arm(job, request)

    def arm(self, job: Job, request: Request) -> None:
        """Set a job's timers and take note of its service; remember it if it may have to be rejected once all workers
        were heard from."""
        self.timers.arm(job, request)
        self.admission.services.add(job, request)
        self.scaling.add(job, request)
        self.relocating.add(job)
        self.unready.add(job, request)
        # one of an earlier term, or with a later revision, may have matched a worker that is away now
        may_end = job.rev == 1 and job.ledger > self.state.epoch_seq
        if may_end and self.admission.ends_unmatched(request, self.requests.shape_of(job)):
            self._unmatched.add(job.num)

    def queue_rejections(self) -> None:
        """Once all workers were heard from, queue the rejections of jobs that no worker could ever run."""
        if self._unmatched and self.admission.all_reported():
            self.rejects.extend(sorted(self._unmatched))
            self._unmatched.clear()

    def reject_unmatched(self, draft: Draft) -> None:
        """Reject the jobs of `rejects` that still match no worker, as many as one record has room for."""
        while self.rejects and not draft.bulk_full:
            job = self.state.jobs.get(self.rejects.popleft())
            if job is not None:
                self.admission.reject_unmatched(draft, job, self.requests.shape_of(job))

    def reshape(self, job: Job) -> None:
        """Compute a job's shape again, and move it to the queue group of the new shape."""
        before, job.shape = self.requests.kind_of(job), None
        self.regroup(job, before)

    def regroup(self, job: Job, before: Kind) -> None:
        """Move a job whose priority or shape was that of `before` to the queue group that it belongs to now."""
        self.queue.leave(job.num, before)
        self.planner.preempting.policy.read_again(job)
        if not job.over:
            self.look(job)
