"""What accepted jobs ask for, read from their bodies: what was asked alike before is decoded and shaped once."""

from __future__ import annotations

from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.line.durations import workload_of
from moorage.scheduler.core.shape import Shape, Shapes
from moorage.scheduler.core.state import Job
from moorage.schemas.alike import Asked, Requests
from moorage.schemas.job import Request


class Reading:
    """`fleet` knows whose rules name tenants."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.requests = Requests()
        self.shapes = Shapes()

    def request_of(self, job: Job) -> Request:
        """The request of an accepted job, decoded from its body (rare paths only); its `job` may be None."""
        return self.requests.read(job.body)[1].request

    def priority_of(self, job: Job) -> int:
        return job.priority if job.priority >= 0 else self.request_of(job).priority

    def shape_of(self, job: Job) -> Shape:
        shape = job.shape
        if shape is None:
            shape = job.shape = self.shape_for(self.shape_of_asked(self.requests.read(job.body)[1]), job.tenant)
            if job.avoid:
                shape = job.shape = self.shapes.avoiding(shape, job.avoid)
        assert isinstance(shape, Shape)
        return shape

    def shape_for(self, shape: Shape, tenant: str) -> Shape:
        """A shape as this tenant asks for it: what workers let it have may be less, or more, than others."""
        return self.shapes.asked_by(shape, tenant) if tenant in self.fleet.named else shape

    def workload_of(self, job: Job) -> str:
        """What it runs, as durations are learned by (see `durations`)."""
        asked = self.requests.read(job.body)[1]
        if not asked.workload:
            asked.workload = workload_of(asked.request)
        return asked.workload

    def shape_of_asked(self, asked: Asked) -> Shape:
        shape = asked.shape
        if shape is None:
            shape = asked.shape = self.shapes.of(asked.request)
        assert isinstance(shape, Shape)
        return shape
