"""What runs have taken so far, as their events say: by this the reference reckons which job surely ends in time."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from moorage.scheduler.core.ledger.state import Job, State
from moorage.schemas.job import Request

#: the states of an event that end a run by itself
ENDED: Final = ("SUCCEEDED", "FAILED", "TIMED_OUT", "EXITED")
#: how long a device may take to be free once its job's grace is over
FREED_MS: Final = 2_000


class Run(NamedTuple):
    """One run: of a replica, or of all of a gang. `ms` is when it began, and once it has ended how long it took."""

    tenant: str
    job: str
    gpus: int
    ms: int


class Asks(Protocol):
    """A job that waits, see `reference.Waiting`."""

    @property
    def job(self) -> Job: ...
    @property
    def request(self) -> Request: ...
    @property
    def gpus(self) -> int: ...


class Ran:
    """The runs of a case; one that was frozen, or was asked to end, says nothing.

    `forgets`: the scheduler's table of them is so small that it may have forgotten any.
    """

    def __init__(self, *, forgets: bool) -> None:
        self._forgets = forgets
        self._running: dict[tuple[str, str, int], Run] = {}
        self._frozen: set[tuple[str, str, int]] = set()
        self._runs: list[Run] = []

    def see(self, name: tuple[str, str, int], state: str, gpus: int, now_ms: int) -> None:
        """Take one change of an event about a replica, named by tenant, job and index."""
        run = self._running.pop(name, None)
        if state == "PLACED":
            self._frozen.discard(name)
        elif state == "FROZEN":
            self._frozen.add(name)
        elif state == "RUNNING" and name not in self._frozen:
            self._running[name] = Run(*name[:2], gpus, now_ms)
        elif run is not None and state in ENDED:
            self._runs.append(run._replace(ms=now_ms - run.ms))

    def forget(self, state: State) -> None:
        """Another scheduler leads: it knows of the jobs that are still in the state alone."""
        self._runs = [run for run in self._runs if state.job(run.tenant, run.job) is not None]

    def of(self, state: State, tenant: str) -> list[Run]:
        """The runs of a tenant's jobs that are over."""
        jobs = [(run, state.job(tenant, run.job)) for run in self._runs if run.tenant == tenant]
        return [run for run, job in jobs if job is None or job.over]

    def has_end(self, state: State, who: Asks) -> bool:
        """Whether anybody may know when such a job ends: replicas that have ended tell of those that still run."""
        return who.request.workload.timeout_s is not None or any(run.tenant == who.job.tenant for run in self._runs)

    def longest_ms(self, state: State, who: Asks) -> int | None:
        """How long such a job surely holds its devices at most; None where nobody knows.

        By its time limit. Without one, a run of its tenant with as many GPUs must have ended, and no run of the tenant
        took longer: whichever of them the job is taken to be like.
        """
        request, tenant = who.request, who.job.tenant
        after_ms = int(request.workload.grace_s * 1000) + FREED_MS
        if request.workload.timeout_s is not None:
            return int(request.workload.timeout_s * 1000) + after_ms
        runs = self.of(state, tenant)
        if self._forgets or not any(run.gpus == who.gpus for run in runs):
            return None
        return max(run.ms for run in runs) + after_ms
