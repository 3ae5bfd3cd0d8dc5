"""What questions and forecasts may read of an engine besides its state and fleet; nothing here changes the engine.

Readers outside the core ask here for what follows from several of the engine's parts; single parts they read
themselves. Some methods walk over all queue groups: for questions, not for each record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import AT_RUNNING, RUNNING, Job, Replica
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import Group
from moorage.scheduler.core.schedule.plan import Reservation
from moorage.scheduler.core.schedule.runtime import groups_of
from moorage.schemas import reasons

#: with more jobs than this, those that ended while queued may be counted too, which is cheaper
COUNTED_MAX: Final = 512


class View:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._state = engine.state

    @property
    def _order(self) -> QueueOrder:
        return self._engine.planner.order

    # --------------------------------------------------------------------------------- of the engine's parts

    @property
    def is_idle(self) -> bool:
        """Whether no job waits in the queue."""
        return self._engine.queue.is_empty

    @property
    def has_submit(self) -> bool:
        """Whether a submit waits for its record."""
        return bool(self._engine.pending.submits)

    @property
    def idle_until_ms(self) -> float:
        """The ledger time until which nothing but heartbeats follows if only renewals arrive; 0 if unknown.

        If not 0, every attempt runs, nothing is in progress, and queued jobs wait for an event or a known time.
        """
        engine = self._engine
        failed = engine.containment.until or engine.sessions.ahead or engine.sessions.stalls.watches
        failed = failed or engine.forgetting.is_due
        if engine.in_flight or engine.urgent or failed or self._state.windows or not engine.admission.all_reported():
            return 0
        for worker in self._state.workers.values():
            if any(m.phase != AT_RUNNING or m.replica.state != RUNNING for m in worker.attempts.values()):
                return 0
        return min(engine.next_timer_ms, engine.planner.next_ms())

    def preempts_later(self, job: Job, hosts: Iterable[Host]) -> str:
        """Return by what right jobs on these hosts will be ended for this job, once they have run long enough; empty
        for none."""
        preempting, tenant = self._engine.planner.preempting, self._state.tenants[job.tenant]
        priority_of, after_s = preempting.policy.priority_of, preempting.policy.runtime_ms / 1000
        others = [attempt.replica.job for host in hosts for attempt in host.worker.attempts.values()]
        own, soon = priority_of(job), f"once they have run for {after_s:g} s, if that makes room"
        if preempting.reclaim and 0 < self._engine.reader.shape_of(job).gpus <= tenant.guaranteed - tenant.gpus:
            return f"its tenant is guaranteed these GPUs: jobs of tenants that borrow them are preempted, {soon}"
        if own >= preempting.priority and any(priority_of(other) < own for other in others):
            return f"jobs of a lower priority than {own} are preempted for it {soon}"
        return ""

    def left_ms(self, job: Job, elapsed_ms: int, percent: int, fence: int) -> tuple[int, int] | None:
        """Return (ms until `percent` of the runs of the same command have ended, number of runs known).

        `fence` is the attempt's, which keeps the time limit of its placement. With 0 runs it is that limit, an upper
        bound; None without one. Runs of other commands, which the backfill takes where it knows no better, say nothing
        to a person.
        """
        engine, limit_ms = self._engine, self._engine.reader.limit_ms_of(job, fence)
        groups = groups_of(job.tenant, engine.reader.workload_of(job), engine.reader.shape_of(job))[:2]
        return engine.durations.left_ms(groups, elapsed_ms, limit_ms, percent=percent)

    # ------------------------------------------------------------------------------------------- the queue

    def queued(self) -> int:
        """Count the replicas that wait, for whatever reason."""
        return sum(tenant.waits for tenant in self._state.tenants.values())

    def queued_jobs(self) -> list[int]:
        """Return the numbers of the jobs in the queue, and of those that wait for others or for their own replicas.

        In order of arrival. A service that has as many members as its calls need waits for nothing.
        """
        groups = self._engine.queue.groups.values()
        indexing = self._engine.indexing
        waiting = [job for job in indexing.unqueued() if job.waits]
        full = {job.num for job in waiting if indexing.why_unqueued(job) is reasons.MAX_RUNNING}
        return sorted({num for group in groups for num in group.jobs} | self._engine.room.jobs.keys() | full)

    def heads(self) -> list[tuple[Replica, int]]:
        """Return the first waiting replica of each queue group, and how many wait in it; the largest group first."""
        found = []
        for group in self._engine.queue.groups.values():
            jobs = map(self._state.jobs.get, group.jobs)
            waiting = (each for job in jobs if job is not None and (each := job.first_waiting) is not None)
            if (first := next(waiting, None)) is not None:
                found.append((first, self._engine.queue.size(group) * group.shape.together))
        return sorted(found, key=lambda row: -row[1])

    # ------------------------------------------------------------------------------------ reserved hosts

    @property
    def _held(self) -> Reservation | None:
        """The reservation, if its job may start after what the last record did; the next pass drops it else."""
        verdicts = self._engine.planner.verdicts
        return verdicts.reservation if verdicts.still_waits() else None

    def excluded(self, priority: int, shape: Shape, tenant: str) -> frozenset[int]:
        """Return the numbers of the hosts that jobs of this priority, shape and tenant may not use.

        They are reserved for other jobs, or other jobs ended there for them.
        """
        verdicts = self._engine.planner.verdicts
        found = (verdicts.taken_back if self._held is None else verdicts.excluded)(priority, shape, tenant)
        return found - self._order.closed_by_limits(tenant, shape) if self._state.by_model or shape.counts else found

    def left_too_soon(self, num: int) -> frozenset[int]:
        """Return the numbers of the hosts that a waiting job cannot use because of a planned drain."""
        return self._order.left_too_soon_of(num, self._state.time_ms)

    def reserved_for(self, hosts: frozenset[int]) -> Job | None:
        """Return the job with the reservation if it is for some of these hosts; else None, as for preempted hosts."""
        held = self._held
        return None if held is None or not held.hosts & hosts else self._state.jobs.get(held.num)

    def needed_in_ms(self, job: Job) -> list[int]:
        """Return in how many ms hosts are needed for a reservation or leave for a drain, the longest time first."""
        now_ms, held = self._state.time_ms, self._held
        found = [
            worker.window.leave_ms - now_ms for worker in self._state.windows.values() if worker.window is not None
        ]
        if held is not None and held.num != job.num:
            found.append(held.start_ms - now_ms)
        return sorted((ms for ms in set(found) if ms > 0), reverse=True)

    # --------------------------------------------------------------------------------------- its place

    def place_of(self, job: Job) -> tuple[int, int]:
        """Return a waiting job's place in the queue, 1 for the first, and how many jobs wait, it among them.

        For more than `COUNTED_MAX` jobs some that have just ended may be among these.
        """
        priority, num, order, queue = self._engine.reader.priority_of(job), job.num, self._order, self._engine.queue
        size = queue.jobs
        if size > COUNTED_MAX:
            position = 1 + queue.before(priority, num, order.standing_of)
            return position, max(size, position)
        own = (-order.standing_of(priority, num), num)
        before, waiting = 0, 1
        for group in queue.groups.values():
            for other in group.jobs:
                if other != num and order.waits(other):
                    waiting += 1
                    before += (-order.standing_of(group.priority, other), other) < own
        return 1 + before, waiting

    def counts_as(self, job: Job) -> int:
        """Return a job's effective priority."""
        return self._order.standing_of(self._engine.reader.priority_of(job), job.num)

    # ------------------------------------------------------------------------------------ what goes before

    def first_for_limit(self, tenant: str) -> Job | None:
        """Return the first job of a tenant that its limit kept waiting in the last pass; None if there is none."""
        num = self._order.waits_for_limit(tenant)
        return None if num is None else self._state.jobs.get(num)

    def gpus_before(self, job: Job) -> int:
        """Return how many GPUs the tenant's waiting jobs before this one ask for."""
        return sum(shape.gpus * count for shape, count in self.shapes_before(job))

    def shapes_before(self, job: Job) -> Iterator[tuple[Shape, int]]:
        """Yield the shapes of the tenant's waiting jobs before this one, each with how many replicas, or gangs."""
        for group in self._engine.queue.groups.values():
            if group.tenant == job.tenant and self._engine.planner.could_ever(group.shape):
                yield group.shape, sum(map(self._engine.queue.may, self._before(group, job)))

    def _before(self, group: Group, job: Job) -> Iterator[int]:
        """Yield the numbers of the waiting jobs of a queue group that go before a job, in order."""
        order, priority, mine = self._order, self._engine.reader.priority_of(job), job.num
        counts = order.standing_of(priority, mine)
        for num in group.jobs:
            if num == mine or not order.waits(num):
                continue
            theirs = order.standing_of(group.priority, num)
            if counts <= order.aged_of(group.priority, num):
                theirs = max(theirs, counts)  # it is lifted to this priority once a job with this priority waits
            if theirs < counts or (theirs == counts and num > mine):
                return  # jobs behind it have waited less
            yield num
