"""Reads what accepted jobs ask for from their bodies; equal requests are decoded, and their shape made, only once.

A *workload* is what a request runs, as far as that tells how long it takes: its label `workload` if there is one, else
the driver, the container image if `driver_config` names one, the base name of `argv[0]`, and `argv[1]` unless it is an
option (`python train.py`, `handler encode`). Later arguments are left out: a sweep is one workload. What stays, a
service or a job that always starts again, is `STAYS`: how long such attempts ran says nothing of when one ends.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.ledger.fairkeys import owner_of
from moorage.scheduler.core.ledger.state import Attempt, Job
from moorage.schemas import signed
from moorage.schemas.codec import decode_accepted, named_twice, refuse_twice
from moorage.schemas.errors import Problem, problem, refuse
from moorage.schemas.job import Request
from moorage.schemas.release import RELEASE
from moorage.schemas.request_cache import CachedRequest, RequestCache

WORKLOAD_CHARS_MAX: Final = 128
#: the label that names a request's workload
WORKLOAD_LABEL: Final = "workload"
#: the workload of jobs without an end; no label says it
STAYS: Final = "\0stays"


def workload_of(request: Request) -> str:
    """Return a request's workload in at most 128 characters, as described above."""
    if request.service is not None or request.workload.restart == "always":
        return STAYS
    named = request.labels.get(WORKLOAD_LABEL)
    if named:
        return named[:WORKLOAD_CHARS_MAX]
    run = request.workload
    words = [run.driver]
    if image := request.image:
        words.append(image)
    if run.argv:
        words.append(run.argv[0].rpartition("/")[2])
        if len(run.argv) > 1 and not run.argv[1].startswith("-"):
            words.append(run.argv[1])
    return " ".join(words)[:WORKLOAD_CHARS_MAX]


def asked_now(job: Job) -> Request:
    """Return the request of an accepted job with what `change` and `priority` have put in its place since.

    It lacks fields that only a later release knows.
    """
    request = decode_accepted(job.body)
    if job.bounds:
        request = request.with_bounds(*job.bounds_at())
    return request if job.priority < 0 else msgspec.structs.replace(request, priority=job.priority)


def later_words(field: str) -> str:
    """Return what is so with a job that has this field, which only a later release knows."""
    name = field.removeprefix("$.")
    return f"its request has the field {name}, which this scheduler's release {RELEASE} does not know"


class RequestReader:
    """Decodes requests into `shapes`; `fleet` knows which tenants the rules of some worker name."""

    def __init__(self, fleet: Fleet, shapes: Shapes) -> None:
        self.fleet = fleet
        self.requests = RequestCache()
        self.shapes = shapes
        #: by number, jobs whose request has a field that only a later release knows: they are not placed, as that
        #: field may be about where or how. It is filled as their shape is made
        self.later: dict[int, str] = {}

    def read(self, body: bytes) -> tuple[str | None, Request, Shape]:
        """Return the job id in a request's body (None if it has none), the request, and its shape for any tenant.

        Raises Refused if the body is not a valid request, has a key twice, or asks for TFLOPS.
        """
        name, asked = self.requests.read(body)
        if asked.twice is None:
            asked.twice = named_twice(body)
        if asked.twice == signed.FIELD:
            raise signed.named_itself(None)
        if asked.twice:
            refuse_twice(body)
        return name, asked.request, asked.shape or self.shape_of_asked(asked)

    def request_of(self, job: Job) -> Request:
        """Return the request of an accepted job, with the share that an operator gave it and its tenant's changes; its
        `job` may be None. It lacks fields that only a later release knows: such a job is in `later`, and is not placed.

        It is decoded from the body: for rare paths only.
        """
        request = self.requests.read_accepted(job.body)[1].request.with_part(job.part)
        request = request.with_bounds(*job.bounds_at()) if job.bounds else request
        return request.with_copies(*job.wants[:2]) if job.wants is not None else request

    def limit_ms_of(self, job: Job, fence: int) -> int | None:
        """Return the time limit in ms of an attempt with this fence; None without one."""
        _, limit_ms = job.bounds_at(fence)
        limit_s = (
            self.requests.read_accepted(job.body)[1].request.workload.timeout_s if limit_ms < 0 else limit_ms / 1000
        )
        return None if limit_s is None else int(limit_s * 1000)

    def priority_of(self, job: Job) -> int:
        return job.priority if job.priority >= 0 else self.request_of(job).priority

    def why_fixed(self, job: Job) -> Problem | None:
        """Return why a job's request cannot be changed by this release; None if it can."""
        field = self.requests.read_accepted(job.body)[1].later
        if not field:
            return None
        return problem(
            "failed-precondition",
            f"job {job.name} cannot be changed: {later_words(field)}",
            field=field,
            job=job.name,
            next="change it once a scheduler of a newer release leads",
        )

    def kind_of(self, job: Job) -> tuple[int, Shape, str]:
        """Return the kind of a job's queue group: its priority, its shape and its owner (see `fairkeys`)."""
        return self.priority_of(job), self.shape_of(job), owner_of(job) if job.fair else job.tenant

    def shape_of(self, job: Job) -> Shape:
        shape = job.shape
        if shape is None:
            asked = self.requests.read_accepted(job.body)[1]
            if asked.later:
                self.later[job.num] = asked.later
            if job.resizes or (job.wants is not None and asked.request.ranks is not None):
                shape = job.shape = self.shape_with(job, self.request_of(job))
                return shape
            shape = job.shape = self.shape_for(self.shape_of_asked(asked), job.tenant, asked.request)
            if job.avoid:
                shape = job.shape = self.shapes.avoiding(shape, job.avoid, asked.request)
        assert isinstance(shape, Shape)
        return shape

    def shape_of_attempt(self, attempt: Attempt) -> Shape:
        """Return what an attempt asks of its host: of a gang with groups what its rank does."""
        shape = self.shape_of(attempt.replica.job)
        return shape.of_rank(attempt.replica.index) if shape.parts else shape

    def shape_with(self, job: Job, request: Request) -> Shape:
        """Return the shape that a job would have with this request."""
        shape = self.shape_asked_by(job.tenant, request)
        return self.shapes.avoiding(shape, job.avoid, request) if job.avoid else shape

    def shape_for(self, shape: Shape, tenant: str, request: Request) -> Shape:
        """Return the shape of this request for this tenant: workers' rules may treat tenants differently."""
        return self.shapes.asked_by(shape, tenant, request) if tenant in self.fleet.named else shape

    def shape_asked_by(self, tenant: str, request: Request) -> Shape:
        """Return the shape of a tenant's request that is not submitted."""
        return self.shape_for(self.shapes.of(request), tenant, request)

    def workload_of(self, job: Job) -> str:
        """Return a job's workload, by which run times are learned (see `runtime`)."""
        asked = self.requests.read_accepted(job.body)[1]
        if not asked.workload:
            asked.workload = workload_of(asked.request)
        return asked.workload

    def run_of(self, job: Job) -> bytes:
        """Return a digest of what a job runs, with its arguments and settings: equal for requests that run alike."""
        asked = self.requests.read_accepted(job.body)[1]
        if not asked.run:
            run = msgspec.msgpack.encode(asked.request.workload, order="deterministic")
            asked.run = blake2b(run, digest_size=8).digest()
        return asked.run

    def shape_of_asked(self, asked: CachedRequest) -> Shape:
        shape = asked.shape
        if shape is None:
            gpu = asked.request.gpu
            if gpu is not None and gpu.share is not None and gpu.share.tflops is not None:
                raise refuse("invalid-argument", "tflops are not resolved here", field="$.gpu.share.tflops")
            shape = asked.shape = self.shapes.of(asked.request)
        assert isinstance(shape, Shape)
        return shape
