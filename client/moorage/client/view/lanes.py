"""Who had which GPU when: one lane of time for each GPU, kept from the events of jobs. It reads no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from moorage.schemas.frames import Change
from moorage.schemas.job import QUEUED, STATES, TERMINAL

#: how far back a lane goes
KEPT_MS: Final = 3_600_000
#: leases of one GPU that are kept: the oldest go first
LEASES_MAX: Final = 256
#: readings this far apart are of one idle time: workers report every 2 s
_APART_MS: Final = 10_000


class Lease(NamedTuple):
    """A time in which an attempt of a job had a GPU. `until_ms` is None while it goes on."""

    tenant: str
    job: str
    replica: int
    attempt: int
    from_ms: int
    until_ms: int | None


class Lanes:
    """The last hour of each GPU. Times are milliseconds since 1970."""

    def __init__(self) -> None:
        self._lanes: dict[str, list[Lease]] = {}
        self._held: dict[tuple[str, str], dict[int, tuple[int, list[str]]]] = {}  # by job, replica: attempt, its GPUs
        self._idle: dict[tuple[str, int], list[tuple[int, int]]] = {}  # by worker and slot

    @property
    def jobs(self) -> frozenset[tuple[str, str]]:
        """The jobs that have GPUs, as far as was heard."""
        return frozenset(self._held)

    def add(self, tenant: str, job: str, changes: Iterable[Change]) -> None:
        """Take state changes of a job, in their order; those that were taken before change nothing."""
        for change in changes:
            replica, attempt, state, at_ms = change.replica, change.attempt, change.state, change.time_ms
            if replica < 0 or state not in STATES:
                continue
            held, _ = self._held.get((tenant, job), {}).get(replica, (0, []))
            if (gpus := change.gpus) and attempt > held:
                self._close(tenant, job, replica, at_ms)
                lanes = [self._lanes.setdefault(uuid, []) for uuid in gpus]
                if not any(lease[:4] == (tenant, job, replica, attempt) for lease in lanes[0]):
                    self._held.setdefault((tenant, job), {})[replica] = attempt, list(gpus)
                    for lane in lanes:
                        lane.append(Lease(tenant, job, replica, attempt, at_ms, None))
            elif attempt == held and (state == QUEUED or state in TERMINAL):
                self._close(tenant, job, replica, at_ms)

    def keep(self, tenant: str, jobs: Iterable[str], at_ms: int) -> None:
        """Close the leases of a tenant's jobs that are not in `jobs`: their end was not heard."""
        there = set(jobs)
        for of, job in [key for key in self._held if key[0] == tenant and key[1] not in there]:
            for replica in list(self._held[of, job]):
                self._close(of, job, replica, at_ms)

    def idle(self, worker: str, slot: int, at_ms: int) -> None:
        """Take that a GPU which is leased does nothing now."""
        times = self._idle.setdefault((worker, slot), [])
        if times and at_ms - times[-1][1] < _APART_MS:
            times[-1] = times[-1][0], at_ms
        else:
            times.append((at_ms, at_ms))

    def forget(self, before_ms: int) -> None:
        """Drop what ended before a time."""
        for uuid in list(self._lanes):
            kept = [lease for lease in self._lanes[uuid] if lease.until_ms is None or lease.until_ms >= before_ms]
            self._lanes[uuid] = kept[-LEASES_MAX:]
            if not kept:
                del self._lanes[uuid]
        for key in list(self._idle):
            self._idle[key] = [each for each in self._idle[key] if each[1] >= before_ms][-LEASES_MAX:]
            if not self._idle[key]:
                del self._idle[key]

    def leases(self, uuid: str) -> list[Lease]:
        """Return the leases of a GPU, the oldest first."""
        return self._lanes.get(uuid, [])

    def unused(self, worker: str, slot: int) -> list[tuple[int, int]]:
        """Return the times in which a GPU was leased and did nothing, as far as somebody looked."""
        return self._idle.get((worker, slot), [])

    def _close(self, tenant: str, job: str, replica: int, at_ms: int) -> None:
        replicas = self._held.get((tenant, job), {})
        attempt, gpus = replicas.pop(replica, (0, []))
        for uuid in gpus:
            lane = self._lanes.get(uuid, [])
            for at, lease in enumerate(lane):
                if lease[:4] == (tenant, job, replica, attempt):
                    lane[at] = lease._replace(until_ms=at_ms)
        if not replicas:
            self._held.pop((tenant, job), None)
