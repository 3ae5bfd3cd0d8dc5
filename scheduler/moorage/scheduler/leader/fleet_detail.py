"""The frame for operators, every 2 s: tenants with their counts, how jobs use their GPUs, and how jobs ended."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Final

import msgspec

from moorage.scheduler.answers.counts import Counts
from moorage.scheduler.answers.use import use_of_job
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.state import Job
from moorage.schemas.codec import encode
from moorage.schemas.frames import LISTED_MAX, FleetDetail, TenantDetail, UsedJob

#: attempts read before the event loop runs other tasks
AT_ONCE: Final = 512


class FleetDetails:
    """Remembers since when a GPU of which job does nothing; that lasts as long as the leader's term."""

    def __init__(self, engine: Engine, counts: Counts) -> None:
        self._engine = engine
        self._counts = counts
        self._idle_since: dict[int, int] = {}  # by job number: ledger ms
        self.jobs: list[UsedJob] = []  # those whose use was read last

    def catch_up(self) -> Iterator[None]:
        """Read the use of all jobs that run; yields where the event loop should run other tasks."""
        found: dict[int, Job] = {}
        read, state = 0, self._engine.state
        for host in list(self._engine.fleet.hosts.values()):
            if not host.use:
                continue
            for attempt in host.worker.attempts.values():
                if attempt.name in host.use:
                    found[attempt.replica.job.num] = attempt.replica.job
            read += len(host.use)
            if read >= AT_ONCE:
                yield
                read = 0
        rows, since, now_ms = [], dict[int, int](), state.time_ms
        for count, (num, job) in enumerate(found.items(), 1):
            if count % AT_ONCE == 0:
                yield
            used = use_of_job(self._engine, job)
            if used is None:
                continue
            if not used.percent_min:
                since[num] = self._idle_since.get(num, now_ms)
            rows.append(
                UsedJob(
                    tenant=job.tenant,
                    job=job.name,
                    worker=_worker_of(job),
                    gpu=self._token(job),
                    idle_ms=now_ms - since[num] if num in since else None,
                    **msgspec.structs.asdict(used),
                )
            )
        rows.sort(key=attrgetter("percent_min", "percent", "tenant", "job"))
        self.jobs, self._idle_since = rows, since

    def frame(self) -> bytes:
        """Return the frame; current once `catch_up` has ended."""
        state, counts = self._engine.state, self._counts
        tenants = [
            TenantDetail(tenant=row.name, jobs=row.live, gpus=row.gpus, waiting=row.waits, held=row.hold is not None)
            for row in state.tenants.values()
            if row.live or row.gpus
        ]
        tenants.sort(key=lambda row: (-row.gpus, -row.jobs, row.tenant))
        jobs = self.jobs
        return encode(
            FleetDetail(
                state.epoch,
                state.seq,
                tenants=tenants[:LISTED_MAX],
                tenants_of=len(tenants),
                jobs=jobs[:LISTED_MAX],
                jobs_of=len(jobs),
                ended=counts.outcomes.as_data(),
                failed=counts.outcomes.failed_lately(state.time_ms)[:LISTED_MAX],
                services=counts.calls.lately(self._engine.built_ms),
                promised=counts.promises.sums,
            )
        )

    def _token(self, job: Job) -> str:
        request = self._engine.reader.request_of(job)
        return request.token


def _worker_of(job: Job) -> str:
    return next((attempt.worker.id for attempt in job.attempts), "")
