"""Backfill: places jobs on reserved hosts if they surely end before the job of the reservation is expected to start."""

from __future__ import annotations

from collections import deque
from itertools import islice

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import Group
from moorage.scheduler.core.schedule.placing import Placing
from moorage.scheduler.core.schedule.plan import STEP_MS
from moorage.scheduler.core.schedule.runtime import DEPTH_MAX, Estimates
from moorage.scheduler.core.schedule.verdicts import Verdicts


class Backfilling:
    """Backfills the queue groups of one engine."""

    def __init__(self, order: QueueOrder, verdicts: Verdicts, placing: Placing, estimates: Estimates) -> None:
        self._order = order
        self._verdicts = verdicts
        self._placing = placing
        self._estimates = estimates

    def backfill(self, draft: Draft, group: Group, room: float) -> int:
        """Place jobs of a group that end before the reservation starts. Return the number of replicas.

        At most `DEPTH_MAX` jobs are tried, and as many replicas or gangs are placed. `room` is how many of them
        the limits of the group's tenant allow. The record's evidence covers only jobs placed in order.
        """
        held, shape = self._verdicts.reservation, group.shape
        if held is None:
            return 0
        taken = self._verdicts.taken_back(group.priority, shape, group.tenant)
        placed, tried = 0, deque(_tried(group, draft.time_ms))
        while tried and room >= 1 and not draft.full and placed < DEPTH_MAX * shape.together:
            num = tried.popleft()
            if not self._surely_ends(shape, num, held.start_ms - draft.time_ms):
                continue
            self._verdicts.tell(draft)  # the start for which it is let in
            if self._placing.place(draft, shape, num, taken) is None:
                if self._order.kept_from(draft, num, shape):
                    continue  # a drain excludes hosts for this job; the next one may have another time limit
                break
            if self._order.queue.placed(group, num, draft.time_ms):
                tried.appendleft(num)
            placed += shape.together
            room -= 1
        if placed:
            self._order.turns.count(group)
        return placed

    def _surely_ends(self, shape: Shape, num: int, within_ms: int) -> bool:
        """Return whether a job still waits and surely ends within `within_ms` ms.

        That is judged by its time limit, else by how long nine of ten such runs took.
        """
        if within_ms <= 0 or not self._order.waits(num):
            return False
        estimates, job = self._estimates, self._order.state.jobs[num]
        most_ms = estimates.most_ms(job.tenant, estimates.request_of(job), shape, job.accepted_ms)
        return most_ms is not None and most_ms <= within_ms


def _tried(group: Group, now_ms: int) -> list[int]:
    """Return the jobs to try: the first of a group, and of a long group some of the others in turn."""
    jobs, half = group.jobs, DEPTH_MAX // 2
    if len(jobs) <= DEPTH_MAX:
        return list(jobs)
    at = half + now_ms // STEP_MS * half % (len(jobs) - half)
    return [*islice(jobs, half), *islice(jobs, at, at + half)]
