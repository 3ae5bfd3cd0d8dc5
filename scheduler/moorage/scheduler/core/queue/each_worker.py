"""Jobs that run on each worker: a replica has the number of its worker, and is placed nowhere else.

A worker's number is given once, so a replica for each worker to come is one range of numbers that were never placed.
What of them waits is only what a connected worker that fits would run.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import QUEUED, Job, State
from moorage.scheduler.core.queue.queue import Waiting
from moorage.schemas.job import REPLICAS_MAX
from moorage.schemas.ranges import Ranges, is_in, joined

#: for so many workers that join later a job has numbers
LATER_MAX: Final = 1 << 16


def fitting(fleet: Fleet, shape: Shape) -> list[int]:
    """Return the numbers of the connected workers that could run a replica if they were empty, in order."""
    return sorted(
        num for cls, _ in fleet.capable(shape) for num, host in cls.hosts.items() if host.replicas_of(shape, "ever")
    )


def numbers_for(state: State, fleet: Fleet, shape: Shape, *, stands: bool) -> Ranges:
    """Return the numbers of the replicas of a new job: of all workers known and to come, or of those that fit now.

    Without any that fits it is that of the next worker to join.
    """
    following = min(state.next_worker, REPLICAS_MAX - 1)
    if stands:
        return ((0, min(following + LATER_MAX, REPLICAS_MAX - 1)),)
    return joined((num, num) for num in fitting(fleet, shape) or [following] if num < REPLICAS_MAX)


class EachWorker(Waiting):
    """What a job may place that runs on each worker: what waits for a connected worker that fits."""

    __slots__ = ("_fits", "_fleet", "_found", "_inventory", "_seen", "_shape", "_state")

    pins = True

    def __init__(self, job: Job, state: State, fleet: Fleet, shape: Shape, most: int | None) -> None:
        self._state, self._fleet, self._shape = state, fleet, shape
        self._inventory, self._fits = -1, list[int]()
        self._seen: tuple[int, int, int] | None = None  # the job's revision, the fleet's inventory, the ledger ms
        self._found: Ranges = ()
        super().__init__(job, (), most)

    @property
    def fresh(self) -> Ranges:
        job, now_ms = self.job, self._state.time_ms
        if self._inventory != self._fleet.inventory:
            self._inventory, self._fits = self._fleet.inventory, fitting(self._fleet, self._shape)
        seen = job.rev, self._inventory, now_ms if job.back else 0
        if self._seen != seen:
            waits = [num for num in self._fits if is_in(job.fresh, num)]
            rows = ((num, job.rows.get(num)) for num in self._fits) if job.back else ()
            waits += [num for num, row in rows if row is not None and row.state == QUEUED and row.not_before <= now_ms]
            self._seen, self._found = seen, joined((num, num) for num in sorted(waits))
        return self._found

    @property
    def rests(self) -> bool:
        return not self.fresh

    @property
    def others(self) -> frozenset[int]:
        """The workers on which nothing of the job waits."""
        waits = self.fresh
        return frozenset(num for num in self._fleet.hosts if not is_in(waits, num))

    def come_back(self, number: int) -> None:
        """Look anew at what waits: the pause of a replica is over."""
        self._seen = None
