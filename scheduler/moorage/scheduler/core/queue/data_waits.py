"""Which hosts have what a job reads, and which are kept from a job while it waits for one of these (`data_wait`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import Job, State
from moorage.schemas.held_data import held_key
from moorage.schemas.memo import Memo

#: shapes and tenants of which it is known what hosts say that have their data
KNOWN_MAX: Final = 256
_NOWHERE: Final[frozenset[int]] = frozenset()


class DataWaits:
    """The data of one fleet's hosts, as their load frames tell it.

    A job waits for them at most `wait_ms` from when it was accepted, or what it waited for came true; 0: not at all.
    """

    def __init__(self, state: State, fleet: Fleet, shape_of: Callable[[Job], Shape], wait_ms: int) -> None:
        self.waits = wait_ms > 0
        self._state = state
        self._fleet = fleet
        self._shape_of = shape_of
        self._wait_ms = wait_ms
        self._keys: Memo[tuple[int, str], frozenset[str]] = Memo(KNOWN_MAX)
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

    def keys_of(self, shape: Shape, tenant: str) -> frozenset[str]:
        """Return what hosts tell of that have fetched what such jobs of a tenant read."""
        found = self._keys.get((shape.index, tenant))
        if found is None:
            keys = frozenset(held_key(tenant, shape.driver, source) for _, source in shape.data)
            found = self._keys.put((shape.index, tenant), keys)
        return found

    def until_ms(self, job: Job) -> int:
        """Return the ledger ms until which a job may wait for a host with its data."""
        return (job.ready_ms or job.accepted_ms) + self._wait_ms

    def kept_from(self, num: int, closed: frozenset[int], now_ms: int) -> frozenset[int]:
        """Return the hosts that are kept from a waiting job now, as it waits for one that has more of its data.

        None if no host outside `closed` that may hold it has any; a gang waits if those with most could hold all of it.
        """
        job = self._state.jobs[num]
        shape = self._shape_of(job)
        if not shape.data or shape.parts or (until_ms := self.until_ms(job)) <= now_ms:
            return _NOWHERE
        wanted, having = self.keys_of(shape, job.tenant), dict[int, list[int]]()
        for host, _ in self._fleet.usable(shape, closed | shape.refusing):
            if host.data and (count := len(wanted & host.data)) and host.replicas_of(shape, "ever"):
                having.setdefault(count, []).append(host.worker.num)
        hosts = self._fleet.hosts
        most = having.get(max(having, default=0), [])
        if not most or sum(hosts[each].replicas_of(shape, "ever") for each in most) < shape.together:
            return _NOWHERE
        self._until_ms[num] = until_ms
        return frozenset(hosts.keys() - set(most))
