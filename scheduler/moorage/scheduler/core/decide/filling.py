"""Which jobs may use reserved hosts until they are needed (backfill).

Those are the jobs that surely end before the reservation can start: by their time limit, else by what was learned of
earlier runs.
"""

from __future__ import annotations

from itertools import islice

from moorage.scheduler.core.decide.holding import Holding
from moorage.scheduler.core.decide.lines import Lines
from moorage.scheduler.core.decide.placing import Placing
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.queueing.backfill import DEPTH_MAX, Estimates
from moorage.scheduler.core.queueing.queue import REPLICA_BITS, Line, Queue
from moorage.scheduler.core.shape import Shape
from moorage.schemas.job import Request


class Filling:
    """Over one engine's queue; places jobs on the hosts of the one reservation that `Holding` knows."""

    def __init__(self, queue: Queue, lines: Lines, holding: Holding, placing: Placing, estimates: Estimates) -> None:
        self.fresh: dict[int, tuple[str, Request]] = {}  # while hosts are reserved: jobs that this record accepts
        self._queue = queue
        self._lines = lines
        self._holding = holding
        self._placing = placing
        self._estimates = estimates

    def fill_in(self, draft: Draft, line: Line, room: float) -> int:
        """Place the jobs of a line that a reservation bars and that may run before it. Return how many replicas.

        `room` is how many GPUs the line's tenant may still lease. The record's evidence tells only of jobs that came by
        the order.
        """
        held, shape = self._holding.reservation, line.shape
        if held is None or not self._holding.barred(line.priority, shape, line.tenant):
            return 0
        line.barred = True  # a job that joins it may be short enough
        if held.start_ms is None:
            return 0
        taken = self._holding.taken_back(line.priority, shape, line.tenant)
        placed, need = 0, shape.gpus
        for item in list(islice(line.entries, DEPTH_MAX)):
            if need > room or draft.full:
                break
            if not self._surely_ends(draft, shape, item, held.start_ms - draft.time_ms):
                continue
            if self._placing.place(draft, shape, item, taken) is None:
                if self._lines.left_too_soon(draft, item):
                    continue  # a drain excludes hosts for this job; the next one may have another time limit
                break
            self._queue.take(line, [item])
            placed += shape.together
            room -= need
        if placed:
            self._lines.count(draft, line, placed)
        return placed

    def _surely_ends(self, draft: Draft, shape: Shape, item: int, within_ms: int) -> bool:
        """Whether an entry waits still, and ends in so many ms: by its time limit, else by nine of ten such runs."""
        if not self._lines.waits(draft, item):
            return False
        num = item >> REPLICA_BITS
        job = draft.state.jobs.get(num)
        if job is not None:
            most_ms = self._estimates.most_ms(job.tenant, self._estimates.request_of(job), shape, job.accepted_ms)
        elif num in self.fresh:
            most_ms = self._estimates.most_ms(*self.fresh[num], shape, draft.time_ms)
        else:
            return False
        return most_ms is not None and most_ms <= within_ms
