"""What will come, by the leader's own estimates: what runs ends when such runs ended, and the queue goes on from there.

Destroys the engine that it plays: to be run in a process of its own (see `child`). Half of such runs are over by
`p50`, nine of ten by `p90`; what nothing is known of never ends here, so a start that needs its end stays unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.queueing.durations import Estimate
from moorage.scheduler.core.records import GangPhase
from moorage.scheduler.core.state import (
    AT_CLAIMED,
    AT_EXITED,
    AT_RUNNING,
    CANCELLING,
    ENDING,
    QUEUED,
    Job,
    Member,
    started_ms,
)
from moorage.scheduler.whatif.play import LOOK_MS, Held, MemberName, Play

#: moments and processor seconds that one look ahead may take; what did not start by then is unknown
MOMENTS_MAX: Final = 20_000
CPU_S_MAX: Final = 0.5
#: nobody waits longer for an estimate to come true
HORIZON_MS: Final = 366 * 86_400_000

Quantile = Literal["p50", "p90"]


class Began(NamedTuple):
    """When a job starts and where: by estimates the least known of which rests on so many `runs` (0: on none, but on
    time limits and graces)."""

    in_ms: int
    worker: str
    runs: int


class Future(Play):
    """Begins at ledger time `time_ms`, with a record that is in flight taken as acknowledged."""

    def __init__(self, engine: Engine, time_ms: int, quantile: Quantile = "p50") -> None:
        super().__init__(engine, max(time_ms, engine.state.time_ms), engine.built_ms)
        self.began_ms = self.time_ms
        self.started: dict[tuple[str, str], Began] = {}  # by job
        self.unknown = 0  # members that run and of which nothing is known
        self._runs = 0  # the fewest that an end before now was told by
        self._told_by: dict[MemberName, int] = {}  # the runs behind the estimate of who has not ended yet
        self._quantile = quantile
        self._told: set[MemberName] = set()  # those that were told to end
        self._after: dict[tuple[str, str, int, int], int] = {}  # how long those have run that run already
        engine.forget_callers()
        if engine.in_flight:
            self.commit()
        for worker in engine.state.worker_by_num:
            for member in list(worker.members.values()) if worker.session else ():
                self._adopt(member)

    def _adopt(self, member: Member) -> None:
        """Go on with a member as its worker would from here."""
        replica, job = member.replica, member.replica.job
        held = Held(
            job.tenant,
            job.name,
            replica.index,
            member.attempt,
            member.fence,
            member.worker.id,
            [],
            member.phase == AT_RUNNING,
        )
        if held.name in self.held:
            return  # of the record that was in flight
        if member.phase == AT_EXITED:
            if not member.mask & member.worker.quarantined:
                self.say("freed", held)
            return
        self.held[held.name] = held
        if replica.state in (ENDING, CANCELLING):
            self.told_to_end(held)
            return
        if member.phase == AT_RUNNING:
            self._after[held.name] = max(0, self.time_ms - started_ms(job, member))
            self.end_in(held, self.runs_ms(held))
            return
        if member.phase != AT_CLAIMED:
            self.say("claimed", held, f"{held.worker}:29500" if job.gang and not held.replica else "")
        if job.gang == GangPhase.NONE:
            self.start(held)

    def runs_ms(self, held: Held) -> int | None:
        job = self.engine.state.job(held.tenant, held.job)
        found = None if job is None else remaining(self.engine, job, self._after.get(held.name, 0))
        if found is None:
            self.unknown += 1
            return None
        if found.samples:
            self._told_by[held.name] = found.samples
        return found.p50_ms if self._quantile == "p50" else found.p90_ms

    def told_to_end(self, held: Held) -> None:
        """With even odds at once; nine of ten within their grace, as if it began now."""
        job = self.engine.state.job(held.tenant, held.job)
        self._told_by.pop(held.name, None)  # it ends by its grace, not by what was learned
        if self._quantile == "p50" or job is None or not held.running:
            super().told_to_end(held)
        elif held.name not in self._told:
            self._told.add(held.name)
            self.end_in(held, int(self.engine.request_of(job).workload.grace_s * 1000))

    def on_left(self, held: Held) -> None:
        runs = self._told_by.pop(held.name, 0)
        self._runs = min(self._runs, runs) if self._runs and runs else self._runs or runs

    def on_started(self, held: Held) -> None:
        self.started.setdefault(held.name[:2], Began(self.time_ms - self.began_ms, held.worker, self._runs))

    def pass_time(self, until: Callable[[], bool]) -> None:
        """Let time go by until something is so, or nothing happens any more, or a bound is met."""
        ends_s = time.process_time() + CPU_S_MAX
        self.settle()
        for _ in range(MOMENTS_MAX):
            if until() or time.process_time() > ends_s:
                return
            at = self.next_ms()
            if at is None or at - self.began_ms > HORIZON_MS:
                return
            if self.engine.queue.size:
                at = min(at, self.time_ms + LOOK_MS)
            self.go_to(at)
            self.settle()


def waits(job: Job) -> bool:
    """Whether any of its replicas is still in the queue."""
    return any(replica.state == QUEUED for replica in job.replicas)


def remaining(engine: Engine, job: Job, elapsed_ms: int) -> Estimate | None:
    """How much longer a member of a job runs that has run so long; None where nothing is known."""
    limit_s = engine.request_of(job).workload.timeout_s
    limit_ms = None if limit_s is None else int(limit_s * 1000)
    return engine.durations.remaining(job.tenant, engine.workload_of(job), engine.shape_of(job), elapsed_ms, limit_ms)
