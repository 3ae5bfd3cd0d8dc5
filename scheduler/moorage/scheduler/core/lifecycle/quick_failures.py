"""Finds hosts that eat jobs: on them jobs fail within seconds of their start that do well elsewhere.

Such a host is free again at once, and would be given the next job. That a job fails says nothing, as its code may be at
fault. So a quick failure counts only once what the job runs has succeeded, or run for a minute, on another host. What
runs alike is one workload: the same tenant, program, arguments and settings. An attempt that does well on a host clears
it of all failures before it began. A workload that has failed quickly on more hosts of late than may be marked says
nothing of any of them: some of its items are at fault, as in a sweep.

- *A job's own rule.* A job that failed quickly on a host is tried on any other one with room first. Its last attempt
  waits for another host, if one could hold it: so one host fails no job for good that may be tried again.
- *Marked.* One such failure marks a host for `MARKED_MS`: jobs are tried on other hosts with room first, and no job of
  that workload starts there that another open host could hold.
- *Avoided.* Once `AVOIDED_MIN` workloads count, no job at all starts there that another could hold, and people are
  told: one alone is as likely a program that was mended between two runs.
- *Closed.* Failures of `most` different workloads close it for a while, as failed starts do.

At most a tenth of the hosts, at least one, is marked or closed so. The evidence is in the rows of jobs, replicas and
workers, so each leader finds the same; what is here is found in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.records import COUNT_BITS, Count
from moorage.scheduler.core.ledger.state import AT_RUNNING, SEVERAL, WELL_MS, Attempt, Job, Replica, State, Worker
from moorage.scheduler.core.lifecycle.retrying import row_in, with_row
from moorage.scheduler.core.queue.queue import Queue
from moorage.scheduler.core.request_reader import RequestReader
from moorage.schemas.memo import Memo
from moorage.schemas.reasons import STARTS_FAIL
from moorage.schemas.units import many

#: for how long a host is marked, from its last such failure on
MARKED_MS: Final = 10 * 60_000
#: workloads that have to count before every job avoids the host
AVOIDED_MIN: Final = 2
#: one host in so many may be marked or closed, at least one
PART: Final = 10
#: workloads of which is remembered where they did well; and the most ended jobs that are looked at for it
WORKLOADS_MAX: Final = 16_384
ENDED_MAX: Final = 2_000
_NOWHERE: Final[frozenset[int]] = frozenset()
#: what a job runs: its tenant, and a digest
_Workload = tuple[str, bytes]


class QuickFailures:
    """The hosts of one fleet on which jobs failed within seconds.

    `queue` knows which replica a job places next; `close` closes a host for a while, for a reason.
    """

    def __init__(
        self,
        state: State,
        fleet: Fleet,
        most: int,
        reader: RequestReader,
        queue: Queue,
        close: Callable[[Draft, Worker, str], bool],
    ) -> None:
        self._state = state
        self._fleet = fleet
        self._most = most
        self._reader = reader
        self._queue = queue
        self._close = close
        self.marked = _NOWHERE  # the numbers of workers
        #: workers on which a job failed quickly, and nothing has done well since
        self.standing: dict[int, Worker] = {}
        self._counted: dict[int, tuple[int, int]] = {}  # by worker: how many workloads count, and the last ledger ms
        self._fell: dict[_Workload, set[int]] = {}  # the workers on which a workload failed quickly
        #: when a workload last failed quickly on a worker, whatever did well there since. A new leader finds it anew.
        self._failed: Memo[_Workload, dict[int, int]] = Memo(WORKLOADS_MAX)
        self._has_begun = False
        self._well: Memo[_Workload, int] | None = None  # as `Job.well_on`; None until the first such failure is seen
        self._could_hold: dict[tuple[int, frozenset[int]], bool] = {}
        self._usable = 0  # how many hosts were usable when that was found

    # ------------------------------------------------------------------------------------------ what happens

    def ended(self, draft: Draft, attempt: Attempt) -> None:
        """Judge by the end of an attempt, which this draft has."""
        worker, job = attempt.worker, attempt.replica.job
        if worker.quick and worker.quick[-1] == (job.num, draft.time_ms):
            self._look()
            self._stand(worker, job)
            workload = self._workload(job)
            hosts = self._failed.get(workload) or self._failed.put(workload, {})
            cap, before = self._cap(), len(hosts)
            hosts[worker.num] = draft.time_ms
            if before <= cap < len(hosts):  # from now on it says nothing of the others either
                self._judge_where_it_fell(draft, workload)
            else:
                self._judge(draft, worker)
        elif self._well is not None and job.well_on in (SEVERAL, worker.num + 1):
            self._did_well(draft, job, worker)

    def pass_time(self, draft: Draft) -> None:
        """Take what time alone changes; to be called once a second."""
        self._begin()
        if self._well is None:
            return
        for worker in list(self.standing.values()):
            for num, _ in worker.quick:
                self._look_where_it_runs(draft, worker, num)
            if self._state.worker_by_num.get(worker.num) is not worker or not self._rows(worker, draft.time_ms):
                del self.standing[worker.num]
                self._counted.pop(worker.num, None)
                self._fleet.opens(worker.num)
        for hosts in self._failed.values():
            for num in [num for num, at_ms in hosts.items() if draft.time_ms - at_ms >= MARKED_MS]:
                del hosts[num]
        for workload in [workload for workload, hosts in self._failed.items() if not hosts]:
            del self._failed[workload]
        for workload, nums in list(self._fell.items()):
            nums &= self.standing.keys()
            if not nums:
                del self._fell[workload]
        usable = sum(host.usable for host in self._fleet.hosts.values())
        self._could_hold.clear()
        if usable < self._usable:  # what waited for another host may have none left
            for num in self.standing:
                self._fleet.opens(num)
        self._usable = usable
        self._mark(draft.time_ms)

    def _look_where_it_runs(self, draft: Draft, worker: Worker, num: int) -> None:
        """Note that a job which failed quickly on a worker has run for a minute on another one."""
        job = self._state.jobs.get(num)
        if job is None or self._is_well_elsewhere(self._workload(job), worker.num):
            return
        for attempt in job.attempts:
            is_long = attempt.phase == AT_RUNNING and draft.time_ms - attempt.began_ms >= WELL_MS
            if is_long and attempt.worker is not worker:
                self._did_well(draft, job, attempt.worker)
                return

    def _did_well(self, draft: Draft, job: Job, on: Worker) -> None:
        workload = self._workload(job)
        if self._note(workload, on.num + 1):
            self._judge_where_it_fell(draft, workload)

    def _judge_where_it_fell(self, draft: Draft, workload: _Workload) -> None:
        for num in sorted(self._fell.get(workload, ())):
            if (worker := self.standing.get(num)) is not None:
                self._judge(draft, worker)

    def _note(self, workload: _Workload, where: int) -> bool:
        """Note where a workload did well; return whether that is news."""
        assert self._well is not None
        known = self._well.get(workload) or 0
        now = where if known in (0, where) else SEVERAL
        if now != known:
            self._well.put(workload, now)
        return now != known

    def _stand(self, worker: Worker, job: Job) -> None:
        self.standing[worker.num] = worker
        self._fell.setdefault(self._workload(job), set()).add(worker.num)

    def _begin(self) -> None:
        """Find what an earlier leader knew, at the first question of a term."""
        if not self._has_begun:
            self._has_begun = True
            if any(worker.quick for worker in self._state.workers.values()):
                self._look()
                self._mark(self._state.time_ms)

    def _look(self) -> None:
        """Find in the rows where workloads did well and where they failed quickly, once."""
        if self._well is not None:
            return
        self._well, jobs = Memo(WORKLOADS_MAX), self._state.jobs
        ended = islice(self._state.ended, max(0, len(self._state.ended) - ENDED_MAX), None)
        for job in (jobs[num] for num in [*ended, *(num for num, job in jobs.items() if not job.over)]):
            if job.well_on:
                self._note(self._workload(job), job.well_on)
        for worker in self._state.workers.values():
            for num, _ in worker.quick:
                if (failed := jobs.get(num)) is not None:
                    self._stand(worker, failed)
            if worker.num in self.standing:
                self._count(worker)

    def _workload(self, job: Job) -> _Workload:
        return job.tenant, self._reader.run_of(job)

    # --------------------------------------------------------------------------------------------- judged

    def _rows(self, worker: Worker, now_ms: int) -> list[tuple[int, int]]:
        """Return the quick failures on a worker since anything did well there, or has run for a minute by now."""
        runs = (attempt.began_ms for attempt in worker.attempts.values() if attempt.phase == AT_RUNNING)
        well_ms = max([worker.well_ms, *(began_ms for began_ms in runs if now_ms - began_ms >= WELL_MS)])
        return [row for row in worker.quick if row[1] > well_ms]

    def _is_well_elsewhere(self, workload: _Workload, num: int) -> bool:
        where = (self._well.get(workload) if self._well is not None else None) or 0
        return where not in (0, num + 1)

    def _is_at_fault(self, workload: _Workload, cap: int) -> bool:
        """Return whether a workload has failed quickly on more hosts of late than may be marked, which are `cap`."""
        return len(self._failed.get(workload, ())) > cap

    def _count(self, worker: Worker) -> int:
        """Count the workloads that failed quickly on a worker, and did well elsewhere."""
        jobs, cap, found = self._state.jobs, self._cap(), dict[_Workload, int]()
        for num, at_ms in self._rows(worker, self._state.time_ms):
            if (job := jobs.get(num)) is None or self._is_at_fault(of := self._workload(job), cap):
                continue
            if self._is_well_elsewhere(of, worker.num):
                found[of] = at_ms
        if found:
            self._counted[worker.num] = len(found), max(found.values())
        else:
            self._counted.pop(worker.num, None)
        return len(found)

    def _judge(self, draft: Draft, worker: Worker) -> None:
        count = self._count(worker)
        is_new = count and self._counted[worker.num][1] > worker.flag_ms
        if count >= self._most and is_new and self._closed() < self._cap() and not draft.full:
            why = f"jobs of {many(count, 'workload')} failed within seconds of their start here, and did well elsewhere"
            self._close(draft, worker, why)
        self._mark(draft.time_ms)

    def _cap(self) -> int:
        return max(1, sum(bool(host.worker.session) for host in self._fleet.hosts.values()) // PART)

    def _closed(self) -> int:
        """Return how many of the hosts on which jobs failed quickly are closed."""
        return sum(worker.flag == STARTS_FAIL.name for worker in self.standing.values())

    def _mark(self, now_ms: int) -> None:
        if not self._counted and not self.marked:
            return
        found = [
            (-count, -last_ms, num)
            for num, (count, last_ms) in self._counted.items()
            if now_ms - last_ms < MARKED_MS and self.standing[num].flag == "open"
        ]
        marked = frozenset(num for _, _, num in sorted(found)[: max(0, self._cap() - self._closed())])
        for num in self.marked - marked:
            self._fleet.opens(num)
        self.marked = marked

    # -------------------------------------------------------------------------------------- who may not start

    def failed_of(self, num: int) -> frozenset[int]:
        """Return the workers that are marked, or on which the next replica of a waiting job failed quickly (of a gang
        any rank) and nothing has done well since, by number.
        """
        self._begin()
        if not self.standing:
            return _NOWHERE
        return self.marked.union(worker for replica in self._next(num) for worker in self._of(replica))

    def barred_from(self, num: int) -> frozenset[int]:
        """Return the workers on which a waiting job is not to start now, as another open host could hold it."""
        self._begin()
        if not self.standing:
            return _NOWHERE
        job = self._state.jobs[num]
        barred = {worker for each in self._next(num) if self._is_last_try(each) for worker in self._of(each)}
        if self.marked:
            fell = self._fell.get(self._workload(job), ())
            barred |= {each for each in self.marked if each in fell or self.is_avoided(each)}
        if barred and self._others_could(self._reader.shape_of(job), found := frozenset(barred)):
            return found
        return _NOWHERE

    def is_avoided(self, worker: int) -> bool:
        """Return whether every job avoids a worker (by number) on which several workloads failed quickly."""
        return worker in self.marked and self._counted[worker][0] >= AVOIDED_MIN

    def _next(self, num: int) -> Iterable[Replica]:
        """Return the row of the replica of a job that is placed next, if it was placed before; of a gang all."""
        job = self._state.jobs.get(num)
        if job is None or not job.back:
            return ()
        if job.gang or job.size == 1:
            return job.rows.values()
        waiting = self._queue.waiting.get(num)
        if waiting is None or not waiting.back:
            return ()
        row = job.rows.get(waiting.first)
        return () if row is None else (row,)

    def _of(self, replica: Replica) -> list[int]:
        """Return the workers on which a replica failed quickly, and nothing has done well since."""
        standing = self.standing
        return [num for num, at_ms in replica.failed_on if num in standing and at_ms > standing[num].well_ms]

    def _is_last_try(self, replica: Replica) -> bool:
        """Return whether a replica fails for good if its next attempt ends as the last one did."""
        job = replica.job
        request, of = self._reader.request_of(job), next(iter(job.rows.values())) if job.gang else replica
        if request.workload.stays:
            return False
        code, why = (of.ended.code, of.ended.why) if of.ended is not None else (1, "")
        count = with_row(request, Count.RETRY, code, why)
        if (row := row_in(request, count)) is not None:
            return of.tries_of(count >> COUNT_BITS) >= row.times
        return of.retries >= request.retries

    def _others_could(self, shape: Shape, barred: frozenset[int]) -> bool:
        """Return whether hosts that take jobs now could hold the shape without those `barred`, if they were empty."""
        key = shape.index, barred
        if (known := self._could_hold.get(key)) is not None:
            return known
        found = self._could_hold[key] = any(self._holds(place, barred) for place in self._fleet.places(shape))
        return found

    def _holds(self, shape: Shape, barred: frozenset[int]) -> bool:
        missing = shape.together
        for cls, _ in self._fleet.capable(shape):
            for num, host in cls.hosts.items():
                if host.usable and num not in barred and num not in shape.refusing:
                    missing -= host.replicas_of(shape, "ever")
                if missing <= 0:
                    return True
        return False
