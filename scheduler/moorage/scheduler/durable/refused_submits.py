"""Why the durable queue refused submits of which no job was made, as `show` tells their tenants."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from moorage.schemas.errors import Problem

#: of all tenants; beyond it the oldest of the tenant with most are forgotten
REFUSED_MAX: Final = 10_000
#: of one tenant, whose oldest are forgotten beyond it
REFUSED_MAX_TENANT: Final = 1_000


class RefusedSubmits:
    """The newest refusals of each tenant, of one term."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[str, Problem]] = {}  # by tenant and job id
        self._count = 0

    def note(self, tenant: str, job: str, why: Problem) -> None:
        """Keep a refusal as the newest of its tenant."""
        jobs = self._of.setdefault(tenant, OrderedDict())
        self._count += job not in jobs
        jobs[job] = why
        jobs.move_to_end(job)
        if len(jobs) > REFUSED_MAX_TENANT:
            self._forget(tenant)
        elif self._count > REFUSED_MAX:
            self._forget(max(self._of, key=lambda name: len(self._of[name])))

    def why(self, tenant: str, job: str) -> Problem | None:
        jobs = self._of.get(tenant)
        return None if jobs is None else jobs.get(job)

    def _forget(self, tenant: str) -> None:
        """Forget the oldest refusal of a tenant."""
        jobs = self._of[tenant]
        jobs.popitem(last=False)
        self._count -= 1
        if not jobs:
            del self._of[tenant]
