"""Cancels that wait for a record: tenants in turn, each in its order, never so many that others wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Cancel, QueueRead

#: that one record takes in: most write nothing or one step
CANCELS_MAX: Final = 1_024


class Cancels:
    """With the marks of how far the cancels of the durable queue were read, each behind those it counts."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, deque[Cancel | QueueRead]] = {}  # whose turn it is, first
        self.size = 0

    def add(self, event: Cancel | QueueRead) -> None:
        self._by_tenant.setdefault(event.tenant, deque()).append(event)
        self.size += 1

    def take(self, draft: Draft) -> Iterator[Cancel | QueueRead]:
        """Those for which this record has room, to be written before the next one is asked for."""
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
            yield event
