"""Which hosts have what a job reads, and which are kept from a job that waits for one of these.

A source that is fetched may be fetched anywhere: a job waits for a host that has it at most for `data_wait`. A path
below a worker's `data_dirs` is nowhere else: while hosts tell that they have it, a job takes none but these.
"""

from __future__ import annotations

import math
from typing import Final

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import Job, State
from moorage.schemas.held_data import keys_of
from moorage.schemas.memo import Memo

#: shapes and tenants of which it is known what hosts say that have their data
KNOWN_MAX: Final = 256
_NOWHERE: Final[frozenset[int]] = frozenset()


class DataWaits:
    """The data of one fleet's hosts, as their load frames tell it.

    A job waits for them at most `wait_ms` from when it was accepted, or what it waited for came true; 0: not at all.
    """

    def __init__(self, state: State, fleet: Fleet, wait_ms: int) -> None:
        self._state = state
        self._fleet = fleet
        self._wait_ms = wait_ms
        self._keys: Memo[tuple[int, str], dict[str, frozenset[str]]] = Memo(KNOWN_MAX)
        self._until_ms: dict[int, int] = {}  # by job that hosts were kept from: until when

    def begin(self, now_ms: int) -> None:
        """Begin a pass: all hosts are open to the jobs that have waited for long enough."""
        over = [num for num, until_ms in self._until_ms.items() if until_ms <= now_ms or num not in self._state.jobs]
        for num in over:
            del self._until_ms[num]
        if over:
            self._fleet.opens()

    def next_ms(self) -> float:
        """Return the ledger ms at which the next job waits no more for its data; infinity for none."""
        return min(self._until_ms.values(), default=math.inf)

    def waiting(self, num: int) -> bool:
        """Return whether hosts were kept from a job, by number, for its data: no other job ends for it meanwhile."""
        return num in self._until_ms

    def on(self, host: Host, shape: Shape, tenant: str) -> list[str]:
        """Return the names of the data of a tenant's job that a host has."""
        if not host.data:
            return []
        found = self._keys.get((shape.index, tenant))
        if found is None:
            keys = {name: keys_of(tenant, shape.driver, source) for name, source in shape.data}
            found = self._keys.put((shape.index, tenant), keys)
        return [name for name, keys in found.items() if keys & host.data]

    def until_ms(self, job: Job) -> int:
        """Return the ledger ms until which a job may wait for a host with its data."""
        return (job.ready_ms or job.accepted_ms) + self._wait_ms

    def is_bound(self, job: Job, shape: Shape, now_ms: int) -> bool:
        """Return whether it is for paths of hosts that hosts are kept from a waiting job, and not for `data_wait`."""
        return bool(shape.paths) and self.until_ms(job) <= now_ms

    def kept_from(self, num: int, shape: Shape, closed: frozenset[int], now_ms: int) -> frozenset[int]:
        """Return the hosts that are kept from a waiting job now, as it waits for one that has more of its data.

        None if no host outside `closed` that may hold it has any; a gang waits if those with most could hold all of it.
        """
        job = self._state.jobs[num]
        until_ms = self.until_ms(job)
        if shape.parts or (until_ms <= now_ms and not shape.paths):
            return _NOWHERE
        out = {*job.refused, *job.lacking}
        having = dict[tuple[int, int], list[Host]]()
        for host, _ in self._fleet.usable(shape, closed | shape.refusing):
            names = self.on(host, shape, job.tenant)
            count = len(shape.paths.intersection(names)), len(names) if until_ms > now_ms else 0
            if any(count) and host.worker.num not in out and host.replicas_of(shape, "ever"):
                having.setdefault(count, []).append(host)
        most = having.get(max(having, default=(0, 0)), [])
        if not most or sum(host.replicas_of(shape, "ever") for host in most) < shape.together:
            return _NOWHERE
        if until_ms > now_ms:
            self._until_ms[num] = until_ms
        return frozenset(self._fleet.hosts.keys() - {host.worker.num for host in most})
