"""An engine for the time before a trace's beginning: what ran then stands where it stood, nothing else is placed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.records import PREEMPTIBLE, GangPhase
from moorage.scheduler.core.outputs.output_writer import InFlight
from moorage.scheduler.core.request_reader import workload_of
from moorage.schemas.codec import canonical
from moorage.testing.simulate.trace import Ran


class Stands(NamedTuple):
    """Replicas of a job that run, or all ranks of a gang: for each its host, and a mask of its slots there."""

    tenant: str
    job: str
    at: dict[int, tuple[str, int]]


class StandingEngine(Engine):
    """Places what it is told to by `stand`; from `open` on it decides as every engine does."""

    is_open = False
    _stands: Stands | None = None

    def stand(self, stands: Stands) -> None:
        """Place this with the next record; what cannot stand there waits: its host is gone, or it asks for another."""
        self._stands = stands

    def learn(self, ran: Ran, begin_ms: int) -> None:
        """Learn from attempts that ended before the beginning, which is at this ledger ms."""
        _, request, shape = self.reader.read(canonical(ran.request))
        accepted_ms = begin_ms - int(ran.accepted_s * 1000)
        if self.state.job(ran.tenant, request.job or "") is None:
            self.planner.placing.arrived(shape, request.copies)
        for ran_s in ran.ran_s:
            self.durations.observe(ran.tenant, workload_of(request), shape, int(ran_s * 1000), accepted_ms)

    def open(self, usage: Mapping[str, int]) -> None:
        """Decide from now on. `usage` is what each tenant has used of late, in thousandths of a GPU."""
        self.is_open = True
        for name, milli in usage.items():
            tenant = self.state.tenant(name)
            tenant.usage_base = (milli - tenant.rate_milli) * self.state.inflation

    def _may_place(self, draft: Draft) -> bool:
        return self.is_open and super()._may_place(draft)

    def _begin_record(self, flight: InFlight) -> None:
        if self._stands is not None:
            self._place(flight.draft, self._stands)
            self._stands = None

    def _place(self, draft: Draft, stands: Stands) -> None:
        job = self.state.job(stands.tenant, stands.job)
        if job is None or not self.planner.order.waits(job.num):
            return  # it was refused, or is on hold
        shape, workers = self.reader.shape_of(job), self.state.workers
        group = self.queue.group_of(*self.reader.kind_of(job))
        rows: list[tuple[int, Host, Shape, int]] = []
        for index, (worker, mask) in sorted(stands.at.items()):
            host = self.fleet.hosts.get(workers[worker].num) if worker in workers else None
            asked = [part for part in shape.parts if part.first <= index][-1].shape if shape.parts else shape
            if host and mask.bit_count() == asked.count and host.fits_host(asked) and host.has_room(asked, mask):
                self.fleet.take(host, asked, mask)
                rows.append((index, host, asked, mask))
        if group is None or (shape.is_gang and len(rows) < max(shape.together, len(stands.at))):
            for _, host, asked, mask in rows:
                self.fleet.give(host, asked, mask)
            return
        for index, host, asked, mask in rows:
            mode = self.planner.order.rates.mode(asked) | (PREEMPTIBLE if asked.preemptible else 0)
            draft.placed(job.num, index, host.worker.num, mask, mode)
        if shape.most > shape.together:
            draft.takes_ranks(job, len(rows))
        if shape.is_gang:
            draft.gang(job, GangPhase.HOLDING)
        if rows:
            self.queue.placed(group, job.num, draft.time_ms)
