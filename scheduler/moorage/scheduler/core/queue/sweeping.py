"""Removes from the queue, a part in each record, the entries of replicas that no longer wait.

Cancelled jobs would otherwise fill a group whose first job is blocked.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import Queue

#: entries of jobs that no longer wait are removed once there are more of them than this
QUEUE_SPARE: Final = 1_000
#: the most entries that one record checks
SWEPT_MAX: Final = 8_192


class Sweeping:
    """The sweeps of one queue."""

    def __init__(self, queue: Queue, order: QueueOrder) -> None:
        self._queue = queue
        self._order = order
        self._left = 0  # upper bound of entries whose replicas no longer wait
        self._goes_on = False  # a sweep continues in the next record

    def go_on(self, draft: Draft) -> None:
        """Count the replicas that a record takes out of the queue, and sweep if that is worth it."""
        self._left += draft.left_queue
        spare = self._left - QUEUE_SPARE
        if self._goes_on or (spare > 0 and spare > self._queue.entries // 4):
            if not self._goes_on:
                self._left = 0
            self._goes_on = not self._sweep(draft)

    def _sweep(self, draft: Draft) -> bool:
        """Remove entries that no longer wait; return whether all entries were checked."""
        jobs, fresh = draft.state.jobs, draft.state.next_num

        def is_over(num: int) -> bool:
            job = jobs.get(num)
            return job.over if job is not None else num < fresh

        order = self._order
        return self._queue.sweep(
            is_over, lambda item: order.waits(draft, item), lambda num: order.fresh(draft, num), SWEPT_MAX
        )
