"""What questions and forecasts may ask of an engine beside its state and its fleet; it changes nothing.

The only place outside the engine that reads its parts. Some of it walks over all queue groups: for questions, not for
each record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.lifecycle.sessions import Report
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import REPLICA_BITS, Group, entry
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import AT_RUNNING, QUEUED, RUNNING, Job

#: with more entries than the first number, those of jobs that have left the queue of late count too, which is cheaper;
#: with more than the second, the entries are counted, not the jobs
COUNTED_MAX: Final = 512
GLANCED_MAX: Final = 8_192


class Ahead(NamedTuple):
    """An entry that has to start before a job may: its job, what its priority has come to by its age."""

    job: Job
    aged: int


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
    def next_pass_ms(self) -> float:
        """Ledger time from which on a pass may place more though nothing happens before; infinity where none may."""
        return self._engine.planner.next_ms(self._engine.standing_draft())

    @property
    def idle_until_ms(self) -> float:
        """Ledger time until which only heartbeats follow if nothing but renewals is offered; 0 where that is open.

        Then every member runs, nothing is under way, and what waits in the queue waits for an event or a known time.
        """
        engine = self._engine
        failed = engine.alone or engine.put_off_steps or engine.put_off_jobs or engine.sessions.ahead
        if engine.in_flight or engine.urgent or failed or self._state.windows or not engine.admission.all_heard():
            return 0
        for worker in self._state.worker_by_num:
            if any(m.phase != AT_RUNNING or m.replica.state != RUNNING for m in worker.members.values()):
                return 0
        return min(engine.next_timer_ms, self.next_pass_ms)

    @property
    def preempts(self) -> bool:
        """Whether jobs may be ended for others at all."""
        return self._engine.planner.preempting.allowed

    @property
    def stories_dropped(self) -> int:
        """Jobs that left memory though their history could not be written."""
        return self._engine.retention.dropped

    @property
    def waits(self) -> dict[str, Any]:
        """How long jobs waited for their start in this reign, by class."""
        return self._engine.waited.as_data()

    def lent_twice(self) -> list[dict[str, str]]:
        """Return the GPUs that two workers lend at once."""
        return self._engine.sessions.lending.lent_twice()

    def report_of(self, worker_num: int) -> Report | None:
        """Return what a worker's last renewal in this reign said, for audits."""
        return self._engine.reports.get(worker_num)

    def put_off_until_ms(self, job: Job) -> int:
        """Return the ledger time until which a job waits as this scheduler failed on it; 0 if it did not."""
        return self._engine.put_off_jobs.get(job.num, 0)

    def left_ms(self, job: Job, elapsed_ms: int, percent: int) -> tuple[int, int] | None:
        """Return in how many ms so many percent of such runs have ended, and how many runs tell that, if any does."""
        engine, limit_s = self._engine, self._engine.request_of(job).workload.timeout_s
        limit_ms = None if limit_s is None else int(limit_s * 1000)
        workload, shape = engine.workload_of(job), engine.shape_of(job)
        return engine.durations.left_ms(job.tenant, workload, shape, elapsed_ms, limit_ms, percent)

    # ------------------------------------------------------------------------------------------- the queue

    def queued(self) -> int:
        """Count the entries of the queue."""
        return len(self._engine.queue)

    def queued_jobs(self) -> list[int]:
        """Return the numbers of the jobs in the queue, ascending: in the order in which they came."""
        groups = self._engine.queue.groups.values()
        return sorted({item >> REPLICA_BITS for group in groups for item in group.entries})

    # ------------------------------------------------------------------------------------ hosts held back

    def excluded(self, priority: int, shape: Shape, tenant: str) -> frozenset[int]:
        """Return the hosts, by number, that are reserved or were preempted for other jobs than those that ask so."""
        return self._engine.planner.reserving.excluded(priority, shape, tenant)

    def left_too_soon(self, num: int) -> frozenset[int]:
        """Return the hosts, by number, that a drain to come keeps a waiting job from."""
        return self._order.left_too_soon_of(num, self._state.time_ms)

    def reserved_for(self, hosts: frozenset[int]) -> Job | None:
        """Return the job that some of these hosts are reserved for."""
        held = self._engine.planner.reserving.reservation
        return None if held is None or not held.hosts & hosts else self._state.jobs.get(held.num)

    def needed_in_ms(self, job: Job) -> list[int]:
        """Return in how many ms hosts are needed for a reservation or left for a drain, the longest time first."""
        now_ms, held = self._state.time_ms, self._engine.planner.reserving.reservation
        found = [
            worker.window.leave_ms - now_ms for worker in self._state.windows.values() if worker.window is not None
        ]
        if held is not None and held.start_ms is not None and held.num != job.num:
            found.append(held.start_ms - now_ms)
        return sorted((ms for ms in set(found) if ms > 0), reverse=True)

    # --------------------------------------------------------------------------------------- its place

    def place_of(self, job: Job) -> dict[str, Any]:
        """Return how many jobs wait, and which of them this one is; of a very long queue count replicas instead."""
        priority, item, order = self._engine.priority_of(job), _first_waiting(job), self._order
        aged = order.standing_of if order.ageing is not None else None
        size = len(self._engine.queue)
        if size > GLANCED_MAX:
            position = 1 + self._engine.queue.position(priority, item, aged)
            return {"position": position, "queued": max(size, position), "queued_of": "replicas"}
        own = (-(priority if aged is None else aged(priority, item)), item)
        draft, jobs = self._engine.standing_draft(), self._state.jobs
        before: set[int] = set()
        waiting: set[int] = set()
        for group in self._engine.queue.groups.values():
            head = -group.priority
            for other in group.entries:
                num = other >> REPLICA_BITS
                if num == job.num or not (order.waits(draft, other) if size <= COUNTED_MAX else num in jobs):
                    continue
                waiting.add(num)
                if (head if aged is None else -aged(group.priority, other), other) < own:
                    before.add(num)
        return {"position": 1 + len(before), "queued": 1 + len(waiting), "queued_of": "jobs"}

    def counts_as(self, job: Job) -> int:
        """Return the priority that a job counts as by its age."""
        return self._order.standing_of(self._engine.priority_of(job), entry(job.num, 0))

    def turn_of(self, tenant: str) -> tuple[int, int] | None:
        """Return whose turn a tenant is, 1 for the next, and of how many tenants; None where they have no turns."""
        return self._order.turn_of(self._engine.standing_draft(), tenant)

    # ------------------------------------------------------------------------------------ what goes before

    def first_for_limit(self, tenant: str) -> Job | None:
        """Return the job of a tenant that was the first to find no room under its limit."""
        num = self._order.waits_for_limit(tenant)
        return None if num is None else self._state.jobs.get(num)

    def ahead_of(self, job: Job) -> list[Ahead]:
        """In strict order, return the first job of each queue group that has to start before this one, in order."""
        if not self._order.is_strict:
            return []
        draft, found = self._engine.standing_draft(), list[tuple[int, int, Ahead]]()
        for group in self._engine.queue.groups.values():
            item = next(self._before(draft, group, job), None)
            if item is None or not self._order.may(draft, group) or not self._engine.planner.could_ever(group.shape):
                continue
            other = self._state.jobs.get(item >> REPLICA_BITS)
            if other is not None:
                aged = self._order.aged_of(group.priority, item)
                found.append((-self._order.standing_of(group.priority, item), item, Ahead(other, aged)))
        return [ahead for _, _, ahead in sorted(found, key=lambda row: row[:2])]

    def gpus_before(self, job: Job) -> int:
        """Return how many GPUs the waiting jobs of its own tenant that go before it ask for."""
        draft = self._engine.standing_draft()
        return sum(
            group.shape.gpus * sum(1 for _ in self._before(draft, group, job))
            for group in self._engine.queue.groups.values()
            if group.tenant == job.tenant and self._engine.planner.could_ever(group.shape)
        )

    def _before(self, draft: Draft, group: Group, job: Job) -> Iterator[int]:
        """Return the waiting entries of a queue group that go before a job, in order."""
        order, priority, mine = self._order, self._engine.priority_of(job), _first_waiting(job)
        counts = order.standing_of(priority, mine)
        for item in group.entries:
            if item >> REPLICA_BITS == job.num or not order.waits(draft, item):
                continue
            theirs = order.standing_of(group.priority, item)
            if counts <= order.aged_of(group.priority, item):
                theirs = max(theirs, counts)  # it comes up to this class once there is a job in it
            if theirs < counts or (theirs == counts and item > mine):
                return  # those behind it have waited less
            yield item


def _first_waiting(job: Job) -> int:
    """Return the entry of its first replica that waits."""
    return entry(job.num, next(replica.index for replica in job.replicas if replica.state == QUEUED))
