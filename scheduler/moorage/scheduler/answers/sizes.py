"""Counts what workloads use of the memory that they ask for, from the peaks that workers report with ends.

Soft state: it begins in each term with the ended jobs in memory of which peaks are known. Bounded by `ROWS_MAX`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.fleet.spelling import short_name
from moorage.scheduler.core.ledger.state import PLACED, RANGE, SLOTS, STATE, WORKER, Job
from moorage.scheduler.core.request_reader import STAYS, workload_of
from moorage.schemas.frames import UNKNOWN
from moorage.schemas.gpu import format_token
from moorage.schemas.job import SUCCEEDED, Request
from moorage.schemas.sizes import SizedRow, SizesAnswer

#: workloads that are kept, and those of one answer: with the newest ends
ROWS_MAX: Final = 1_000
ANSWERED_MAX: Final = 200
#: a GPU in place of another one has so many percent of what was used
ROOM_PERCENT: Final = 120
#: GPUs that are named in place of one
INSTEAD_MAX: Final = 3
#: ended jobs in memory that are read as a term begins
BEGUN_MAX: Final = 1_000

Key = tuple[str, str, str]


class _Sums:
    __slots__ = (
        "gpu_jobs", "gpu_mib", "gpu_used_mib", "jobs", "memory_jobs", "memory_mib", "memory_of_one", "memory_used_mib",
        "request",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.jobs = self.gpu_jobs = self.memory_jobs = 0
        self.memory_of_one = False
        self.gpu_mib = self.gpu_used_mib = self.memory_mib = self.memory_used_mib = 0


class Sizes:
    """The peaks of a term, by tenant, workload and what was asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rows: OrderedDict[Key, _Sums] = OrderedDict()
        self.from_ms = engine.state.time_ms

    def begin(self) -> None:
        """Count what the term found in memory, once."""
        engine = self._engine
        over = [job for job in engine.state.jobs.values() if job.state == SUCCEEDED and job.peaks is not None]
        for job in over[-BEGUN_MAX:]:
            self._count(job)
            self.from_ms = min(self.from_ms, job.ended_ms)

    def add(self, ended: Iterable[Job]) -> None:
        """Count jobs that have just ended: their last devices are free, and peaks come with these at the latest."""
        for job in ended:
            if job.state == SUCCEEDED and job.peaks is not None:
                self._count(job)

    def _count(self, job: Job) -> None:
        assert job.peaks is not None
        request = self._engine.reader.request_of(job)
        workload = self._engine.reader.workload_of(job)
        if workload == STAYS:
            return
        key = job.tenant, workload, format_token(request.effective_gpu)
        sums = self._rows.setdefault(key, _Sums(request))
        self._rows.move_to_end(key)
        if len(self._rows) > ROWS_MAX:
            self._rows.popitem(last=False)
        memory_mib, largest_mib, gpu_mib, _ = job.peaks
        sums.jobs += 1
        sums.request = request
        had_mib = self._had_mib(job, request)
        if gpu_mib != UNKNOWN and had_mib:
            sums.gpu_mib = min(sums.gpu_mib or had_mib, had_mib)
            sums.gpu_used_mib = max(sums.gpu_used_mib, gpu_mib)
            sums.gpu_jobs += 1
        asked_mib = 0 if request.resources is None else request.resources.memory_mib
        used_mib = memory_mib if memory_mib != UNKNOWN else largest_mib
        if asked_mib and used_mib != UNKNOWN:
            sums.memory_mib = asked_mib
            sums.memory_used_mib = max(sums.memory_used_mib, used_mib)
            sums.memory_of_one |= memory_mib == UNKNOWN
            sums.memory_jobs += 1

    def _had_mib(self, job: Job, request: Request) -> int:
        """Return the GPU memory that an attempt of a job could use: its shares, or its last devices whole."""
        gpu = request.effective_gpu
        if gpu is None:
            return 0
        if gpu.share is not None:
            return gpu.share.memory_mib * gpu.count
        row = next((row for row in reversed(job.history) if row[STATE] == PLACED and row[WORKER] != RANGE), None)
        worker = None if row is None else self._engine.state.worker_by_num.get(row[WORKER])
        if row is None or worker is None:
            return 0
        pool = worker.inventory.gpu_pool
        return sum(pool[slot].memory_mib for slot in slots_of(row[SLOTS]) if slot < len(pool))

    # -------------------------------------------------------------------------------------------- answers

    def answer(self, tenant: str | None) -> SizesAnswer:
        """Return the rows of a tenant, or of all."""
        keys = [key for key in reversed(self._rows) if tenant is None or key[0] == tenant]
        rows = [self._row(key) for key in keys[:ANSWERED_MAX]]
        left = len(keys) - len(rows)
        return SizesAnswer(rows=rows, from_ms=self.from_ms, until_ms=self._engine.state.time_ms, left_out=left)

    def of(self, tenant: str, request: Request) -> SizedRow | None:
        """Return the row of jobs that ask for the same as a request and run its workload; None if there is none."""
        key = tenant, workload_of(request), format_token(request.effective_gpu)
        return self._row(key) if key in self._rows else None

    def _row(self, key: Key) -> SizedRow:
        sums = self._rows[key]
        return SizedRow(
            tenant=key[0],
            workload=key[1],
            asks=key[2],
            jobs=sums.jobs,
            gpu_mib=sums.gpu_mib if sums.gpu_jobs else None,
            gpu_used_mib=sums.gpu_used_mib if sums.gpu_jobs else None,
            gpu_jobs=sums.gpu_jobs,
            memory_mib=sums.memory_mib if sums.memory_jobs else None,
            memory_used_mib=sums.memory_used_mib if sums.memory_jobs else None,
            memory_jobs=sums.memory_jobs,
            memory_of_one=sums.memory_of_one,
            instead=self._instead(sums),
        )

    def _instead(self, sums: _Sums) -> list[str]:
        """Return smaller GPUs of the fleet on which such a job could run, as tokens. Of several GPUs none: how what was
        used is spread over them is not known."""
        gpu = sums.request.effective_gpu
        request = sums.request
        if gpu is None or gpu.count != 1 or gpu.share is not None or not sums.gpu_jobs:
            return []
        if request.requires or request.where or request.device_ids or gpu.min_compute_capability:
            return []  # what else it needs of a host may be on none of those
        needs_mib = -(-sums.gpu_used_mib * ROOM_PERCENT // 100)
        smaller: dict[str, int] = {}
        shapes, classes = self._engine.reader.shapes, list(self._engine.fleet.classes.values())
        for cls in classes:
            for _, _, name, memory_mib, _ in cls.devices:
                if needs_mib <= memory_mib < sums.gpu_mib:
                    smaller[short_name(name)] = memory_mib
        found: list[str] = []
        for model in sorted(smaller, key=lambda model: (smaller[model], model)):
            asked = msgspec.structs.replace(gpu, model=model, min_memory_mib=None)
            changed = msgspec.structs.replace(request, gpu=asked, resource_requirements=None)
            if not changed.trouble and any(not cls.fit(shapes.of(changed)).reason for cls in classes):
                found.append(format_token(asked))
        return found[:INSTEAD_MAX]
