"""Who may use reserved hosts until they are needed (backfill).

That is whoever surely ends before the reservation can start. Beside it, of a batch of which nobody has run yet, one job
is filled in if it ends in time at even odds: a *probe*. Jobs of one shape and workload that come within minutes of each
other mostly run alike, so its end tells whether the rest of its batch surely ends in time. A probe that runs on keeps
the reservation waiting, so there are at most `PROBES_A_HOST` for each host that is held back, and none that ranks below
the job they are held for. Under fair share there are none: who waits with a reservation there is owed the hosts.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple

from moorage.scheduler.core.decide.holding import Holding
from moorage.scheduler.core.decide.lines import Lines
from moorage.scheduler.core.decide.placing import Placing
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.queueing.backfill import DEPTH_MAX, Estimates
from moorage.scheduler.core.queueing.durations import SIBLINGS_MS, workload_of
from moorage.scheduler.core.queueing.queue import REPLICA_BITS, Line, Queue
from moorage.scheduler.core.queueing.reserve import Reservation
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import QUEUED
from moorage.schemas.job import Request

#: probes that one reservation lets in, for each host that is held back for it
PROBES_A_HOST: Final = 2
#: candidates of a pass that are asked about their siblings
ASKED_MAX: Final = 256
#: jobs accepted just before one that are looked at for a sibling that runs
NEIGHBOURS_MAX: Final = 64


class _Candidate(NamedTuple):
    """A job of which an entry waits, with what tells how long it would run."""

    num: int
    tenant: str
    request: Request
    shape: Shape
    accepted_ms: int

    def is_sibling(self, other: _Candidate) -> bool:
        """Whether the two mostly run alike, see `durations`."""
        return (
            self.tenant == other.tenant
            and self.shape is other.shape
            and abs(self.accepted_ms - other.accepted_ms) <= SIBLINGS_MS
            and workload_of(self.request) == workload_of(other.request)
        )


class Filling:
    """Over one engine's queue; places behind the back of the one reservation that `Holding` knows."""

    def __init__(self, queue: Queue, lines: Lines, holding: Holding, placing: Placing, estimates: Estimates) -> None:
        self.fresh: dict[int, tuple[str, Request]] = {}  # while hosts are reserved: jobs that this record accepts
        self._asked = 0  # this pass: candidates that were asked about their siblings
        self._probes: list[_Candidate] = []  # this pass's
        self._queue = queue
        self._lines = lines
        self._holding = holding
        self._placing = placing
        self._estimates = estimates

    def begin(self) -> None:
        """A pass begins."""
        self._asked = 0
        self._probes.clear()

    def fill_in(self, draft: Draft, line: Line, room: float) -> int:
        """Place who waits in a line that a reservation bars, and may run before it. How many replicas.

        `room` is how many GPUs the line's tenant may still lease. Nobody is told of in the record's evidence but who
        came by the order.
        """
        held, shape = self._holding.reservation, line.shape
        if held is None or not self._holding.barred(line.priority, shape, line.tenant):
            return 0
        line.barred = True  # whoever joins it may be short enough
        if held.start_ms is None:
            return 0
        taken = self._holding.taken_back(line.priority, shape, line.tenant)
        placed, need = 0, shape.gpus
        for item in list(islice(line.entries, DEPTH_MAX)):
            if need > room or draft.full:
                break
            found = self._candidate(draft, line, item)
            if found is None:
                continue
            is_probe = not self._surely_ends(found, held.start_ms - draft.time_ms)
            if is_probe and not self._may_probe(draft, line, held, found):
                continue
            if self._placing.place(draft, shape, item, taken) is None:
                if self._lines.left_too_soon(draft, item):
                    continue  # a drain excludes hosts for this job; the next one may have another time limit
                break
            if is_probe:
                held.probes.add(found.num)
                self._probes.append(found)
            self._queue.take(line, [item])
            placed += shape.together
            room -= need
        if placed:
            self._lines.count(draft, line, placed)
        return placed

    def _candidate(self, draft: Draft, line: Line, item: int) -> _Candidate | None:
        """An entry that waits still, and of which it is known what it asks for."""
        if not self._lines.waits(draft, item):
            return None
        num = item >> REPLICA_BITS
        job = draft.state.jobs.get(num)
        if job is not None:
            return _Candidate(num, job.tenant, self._estimates.request_of(job), line.shape, job.accepted_ms)
        fresh = self.fresh.get(num)
        return None if fresh is None else _Candidate(num, *fresh, line.shape, draft.time_ms)

    def _surely_ends(self, found: _Candidate, within_ms: int) -> bool:
        """Whether it ends in so many ms, by its time limit, else by nine of ten such runs."""
        most_ms = self._estimates.most_ms(found.tenant, found.request, found.shape, found.accepted_ms)
        return most_ms is not None and most_ms <= within_ms

    # ---------------------------------------------------------------------------------------------- probes

    def _may_probe(self, draft: Draft, line: Line, held: Reservation, found: _Candidate) -> bool:
        """Whether it may be the one of its batch that goes ahead at even odds."""
        if len(held.probes) >= PROBES_A_HOST * len(held.hosts) or held.start_ms is None:
            return False
        lines = self._lines
        if lines.turns is not None or lines.standing(line) < lines.standing_of(held.priority, held.item):
            return False
        if self._asked >= ASKED_MAX:
            return False
        self._asked += 1
        even_ms = self._estimates.even_ms(found.tenant, found.request, found.shape, found.accepted_ms)
        return even_ms is not None and draft.time_ms + even_ms <= held.start_ms and not self._has_begun(draft, found)

    def _has_begun(self, draft: Draft, found: _Candidate) -> bool:
        """Whether one of its batch runs already, among the jobs that were accepted just before it."""
        if any(found.is_sibling(other) for other in self._probes):  # accepted in this very record, it may be
            return True
        jobs = draft.state.jobs
        for before in range(found.num, found.num - NEIGHBOURS_MAX, -1):
            job = jobs.get(before)
            if job is None or job.over or job.tenant != found.tenant or job.shape is not found.shape:
                continue
            other = _Candidate(before, job.tenant, self._estimates.request_of(job), found.shape, job.accepted_ms)
            if found.is_sibling(other) and any(draft.state_of(replica) != QUEUED for replica in job.replicas):
                return True
        return False
