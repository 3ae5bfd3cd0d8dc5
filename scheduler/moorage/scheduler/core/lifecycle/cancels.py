"""Cancels that wait for a record: tenants alternate, each with its oldest, and one record takes a bounded number."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Cancel, QueueRead

#: taken by one record; most write nothing, or one step
CANCELS_MAX: Final = 1_024


class Cancels:
    """The queue of cancels. It also holds marks of how far a durable queue was read, each behind its cancels."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, deque[Cancel | QueueRead]] = {}  # in the order of the tenants' turns
        self.size = 0
        self.taken: list[Cancel | QueueRead] = []  # for the current record, in order
        self._put_off: list[Cancel] = []  # those of them that the next record is to take

    def add(self, event: Cancel | QueueRead) -> None:
        self._by_tenant.setdefault(event.tenant, deque()).append(event)
        self.size += 1

    def take(self, draft: Draft) -> Iterator[Cancel | QueueRead]:
        """Yield the events for which the record has room, tenant by tenant, and move each to `taken`.

        They are at most `CANCELS_MAX`. The caller writes each before it asks for the next.
        """
        turns = self._by_tenant
        for _ in range(CANCELS_MAX):
            if not turns or draft.bulk_full:
                return
            tenant = next(iter(turns))
            mine = turns.pop(tenant)
            event = mine.popleft()
            if mine:
                turns[tenant] = mine
            self.size -= 1
            self.taken.append(event)
            yield event

    def put_off(self, event: Cancel) -> None:
        """Have the next record take an event that was just taken."""
        self._put_off.append(event)
        self.size += 1

    def begin_record(self) -> None:
        """Forget what was taken for the record before, but for what was put off."""
        self.taken.clear()
        again, self._put_off = self._put_off, []
        self.size -= len(again)
        for event in again:
            self.add(event)

    def take_back(self) -> None:
        """Put back what was taken for a record that is not written, with the tenants' turns as before."""
        turns = deque(self._by_tenant)
        for event in reversed(self.taken):
            mine = self._by_tenant.get(event.tenant)
            if mine is None:
                mine = self._by_tenant[event.tenant] = deque()
            else:
                turns.pop()  # its turn had moved to the end
            mine.appendleft(event)
            turns.appendleft(event.tenant)
        self._by_tenant = {tenant: self._by_tenant[tenant] for tenant in turns}
        self.size += len(self.taken) - len(self._put_off)
        self.taken.clear()
        self._put_off.clear()

    def pull(self, tenant: str) -> deque[Cancel | QueueRead]:
        """Take all of a tenant's events out of the queue, and return them in their order."""
        mine = self._by_tenant.pop(tenant, deque())
        self.size -= len(mine)
        return mine

    def put_first(self, tenant: str, events: Sequence[Cancel | QueueRead]) -> None:
        """Put events back that were pulled, before those of the tenant that came since."""
        self._by_tenant.setdefault(tenant, deque()).extendleft(reversed(events))
        self.size += len(events)

    def remove(self, event: Cancel) -> None:
        mine = self._by_tenant[event.tenant]
        mine.remove(event)
        self.size -= 1
        if not mine:
            del self._by_tenant[event.tenant]
