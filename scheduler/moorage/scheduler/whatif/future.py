"""Simulates the future by the leader's estimates: running jobs end as such jobs ended before, and the queue proceeds.

It uses up the engine: run it in a process of its own (see `child`). Each of several looks draws the run times from
known runs (see `looks`). A job without any known run never ends here, so a start that depends on its end stays unknown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final, NamedTuple

from moorage.scheduler.answers.view import View
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.records import GangPhase
from moorage.scheduler.core.ledger.state import (
    AT_CLAIMED,
    AT_EXITED,
    AT_RUNNING,
    FROZEN,
    LEAVING,
    Attempt,
    Job,
)
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.whatif.looks import LOOKS, middle, part_of, somewhere_in
from moorage.scheduler.whatif.play import Held, Play
from moorage.schemas.attempt import AttemptName

#: the most moments of one look; starts not reached by then are unknown
MOMENTS_MAX: Final = 2_000
#: the same in CPU seconds, for fleets and machines where a moment takes long; a look that takes too long is lost
CPU_S_MAX: Final = 1.0
#: time alone is looked at again after one part in so many of the time that a look has passed already: a start in a week
#: needs no minutes, and most moments of a look that has them change nothing
PARTS: Final = 16
#: no estimate reaches further ahead
HORIZON_MS: Final = 366 * 86_400_000


class Began(NamedTuple):
    """When and where a job starts (or when it ends), in ms from the beginning of the look.

    `runs` is the number of runs behind the least certain estimate; 0 if only time limits and graces are involved.
    `limited` says that of some end before it only a time limit is known.
    """

    in_ms: int
    worker: str
    runs: int
    limited: bool


class Future(Play):
    """Simulates look number `look` from ledger time `time_ms` on, with a record in flight taken as acknowledged."""

    def __init__(self, engine: Engine, time_ms: int, look: int) -> None:
        super().__init__(engine, max(time_ms, engine.state.time_ms), engine.built_ms)
        self.began_ms = self.time_ms
        self._moments = 0
        self._ends_s = time.process_time() + CPU_S_MAX
        self.started: dict[tuple[str, str], Began] = {}  # by job
        self.ended: dict[tuple[str, str], Began] = {}  # by job, those that ended in this look
        self.unknown_runs: set[tuple[str, str]] = set()  # running jobs without any estimate
        self.unknown_starts: set[tuple[str, str]] = set()  # jobs started in this look without any estimate
        self.cut = False  # this look reached a limit before everything had happened
        self._runs = 0  # the fewest runs behind an end so far
        self._limited = False  # whether of an end so far only a time limit is known
        #: the number of runs behind the estimate of each running attempt; 0 if that is its time limit
        self._told_by: dict[AttemptName, int] = {}
        self.look = look
        self._told: set[AttemptName] = set()  # attempts that were asked to end
        self._after: dict[AttemptName, int] = {}  # for how long the attempts had run when this began
        self._may_end_ms: list[int] = []  # when running attempts lose their protection from preemption
        engine.forget_callers()
        if engine.in_flight:
            self.commit()
        for worker in engine.state.workers.values():
            for attempt in list(worker.attempts.values()) if worker.session else ():
                self._adopt(attempt)

    def _adopt(self, attempt: Attempt) -> None:
        """Continue with an attempt as its worker would from here."""
        replica, job = attempt.replica, attempt.replica.job
        if attempt.name in self.held:
            return  # of the record in flight, already handled
        held = self.take_over(attempt)
        if attempt.phase == AT_EXITED:
            del self.held[held.name]
            if not attempt.mask & attempt.worker.quarantined:
                self.send_report("freed", held)
            return
        if replica.state in LEAVING:
            self.end_attempt(held)
            return
        if attempt.phase == AT_RUNNING:
            self._after[held.name] = max(0, self.time_ms - attempt.began_ms)
            self._protect(self._after[held.name])
            self.end_in(held, self.runs_ms(held))
            if replica.state == FROZEN and attempt.mask:
                self.send_report("resumed", held, code=attempt.leased)  # its worker is asked already, as below
            elif replica.state != FROZEN and attempt.freeze:
                self.send_report("frozen", held)
            return
        if attempt.phase != AT_CLAIMED:
            self.send_report("claimed", held, f"{held.worker}:29500" if job.gang and not held.replica else "")
        if job.gang == GangPhase.NONE:
            self.start(held)

    def runs_ms(self, held: Held) -> int | None:
        job = self.engine.state.job(held.tenant, held.job)
        found = None if job is None else self._left_ms(job, held)
        if found is None:
            if held.name in self._after:
                self.unknown_runs.add(held.name[:2])
            else:
                self.unknown_starts.add(held.name[:2])
            return None
        ms, self._told_by[held.name] = found
        return ms

    def _left_ms(self, job: Job, held: Held) -> tuple[int, int] | None:
        """Return (how much longer an attempt runs in this look, number of known runs); None if nothing is known."""
        replica = 0 if job.gang else held.replica  # ranks of a gang run alike
        part, elapsed_ms = part_of(self.look, held.tenant, held.job, replica), self._after.get(held.name)
        # for an attempt already running, take the middle of the part, so that what waits for this one gets its
        # quantiles; for later starts draw within the part, since many of them together must differ as such runs do
        of_part = somewhere_in(part, self.look, held.tenant, held.job, replica) if elapsed_ms is None else middle(part)
        return View(self.engine).left_ms(job, elapsed_ms or 0, of_part, held.fence)

    def end_attempt(self, held: Held) -> None:
        """Simulate that an attempt must end: in one look of five it takes its whole grace, in the others none.

        Most programs end at SIGTERM. In which look a job is late depends on its id.
        """
        job = self.engine.state.job(held.tenant, held.job)
        self._told_by.pop(held.name, None)  # it ends by its grace now, not by learned run times
        late = part_of(self.look, held.tenant, held.job) == LOOKS - 1
        if not late or job is None or not held.running:
            super().end_attempt(held)
        elif held.name not in self._told:
            self._told.add(held.name)
            self.end_in(held, int(self.engine.reader.request_of(job).workload.grace_s * 1000))

    def on_left(self, held: Held) -> None:
        runs = self._told_by.pop(held.name, None)
        if runs is not None:
            self._runs = min(self._runs, runs) if self._runs and runs else self._runs or runs
            self._limited |= not runs

    def _protect(self, ran_ms: int) -> None:
        """Remember when an attempt that has run for `ran_ms` loses its protection, to search victims again then."""
        runtime_ms = int(self.engine.config.preempt_after * 1000)
        if self.engine.planner.preempting.allowed() and ran_ms < runtime_ms:
            heappush(self._may_end_ms, self.time_ms + runtime_ms - ran_ms)

    def next_ms(self) -> int | None:
        at = super().next_ms()
        if not self._may_end_ms or View(self.engine).is_idle:
            return at
        return self._may_end_ms[0] if at is None else min(at, self._may_end_ms[0])

    def next_pass_ms(self) -> float:
        return max(super().next_pass_ms(), self.time_ms + (self.time_ms - self.began_ms) // PARTS)

    def go_to(self, time_ms: int) -> None:
        super().go_to(time_ms)
        if self._may_end_ms and self._may_end_ms[0] <= time_ms:
            while self._may_end_ms and self._may_end_ms[0] <= time_ms:
                heappop(self._may_end_ms)
            self.engine.seek_at_once()

    def on_started(self, held: Held) -> None:
        self._protect(0)
        self.started.setdefault(held.name[:2], self._now(held.worker))

    def on_outputs(self, out: Outputs) -> None:
        for job in out.ended:
            self.ended.setdefault((job.tenant, job.name), self._now(""))

    def _now(self, worker: str) -> Began:
        return Began(self.time_ms - self.began_ms, worker, self._runs, self._limited)

    def pass_time(self, until: Callable[[], bool]) -> None:
        """Let time pass until the condition `until` holds, nothing happens any more, or `HORIZON_MS` have passed.

        If the look has taken `MOMENTS_MAX` or `CPU_S_MAX` before, in all its calls together, `cut` is set.
        """
        self.settle()
        while not until():
            if self._moments == MOMENTS_MAX or time.process_time() > self._ends_s:
                self.cut = True
                return
            at = self.next_ms()
            if at is None or at - self.began_ms > HORIZON_MS:
                return
            self._moments += 1
            self.go_to(int(min(at, self.next_pass_ms())))
            self.settle()


class Last(NamedTuple):
    """The ledger time after which a waiting job starts no more, and the field of its request that says so."""

    at_ms: float
    field: str

    @property
    def why(self) -> str:
        """Why a job that has not started by then has no start."""
        return f"{self.field} is over before it would start"


def last_of(engine: Engine, job: Job) -> Last:
    """Return until when a waiting job may start; infinity if its request does not say.

    `start_within_s` of a job that waits for others begins once they have ended.
    """
    within_s, from_ms = engine.reader.request_of(job).start_within_s, job.may_start_ms
    start_ms = math.inf if within_s is None or job.started or job.awaits else from_ms + int(within_s * 1000)
    deadline_ms = math.inf if job.deadline_ms is None else job.deadline_ms
    return min(Last(start_ms, "start_within_s"), Last(deadline_ms, "deadline_s"))


def why_unknown(runs: int, starts: int, *, cut: bool) -> str:
    """Return why a look ahead found no start: unknown run times of running or starting jobs, or its own bound.

    Empty if none of these is the cause.
    """
    if runs:
        jobs = "running job has" if runs == 1 else "running jobs have"
        return f"{runs} {jobs} no time limit and no earlier run of the same command"
    if starts:
        jobs = "job that starts before it has" if starts == 1 else "jobs that start before it have"
        return f"{starts} {jobs} no time limit and no earlier run of the same command"
    return "a look ahead ended before it: that covers so many jobs, and takes so much processor time" if cut else ""


def waits(job: Job) -> bool:
    """Return whether any of the job's replicas is still in the queue."""
    return job.first_waiting is not None
