"""Events that were offered to the engine and are in no record yet: submits, cancels and the rest, in three queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import (
    Arrival,
    Ask,
    Cancel,
    ChangeOrder,
    Event,
    Execute,
    FromWorker,
    Order,
    QueueRead,
    Rest,
    ScheduleOrder,
    ScheduleRun,
    SignalOrder,
    Submit,
    Wake,
    is_urgent,
)
from moorage.schemas.frames import Renew

#: taken by one record; most write nothing, or one step
CANCELS_MAX: Final = 1_024


class PendingEvents:
    """The events that wait for a record: three queues by order of arrival, in that of cancels for each tenant alone.

    So no cursor of a durable queue passes a request that is not recorded.
    """

    __slots__ = ("cancels", "held_up", "rest", "submits", "taken_rest", "taken_submits", "urgent")

    def __init__(self) -> None:
        self.submits: deque[Arrival] = deque()
        self.cancels = Cancels()
        self.rest: deque[Rest] = deque()
        self.urgent = 0  # events in `rest` that must not wait for the next heartbeat
        #: taken for the current record, in order, besides `cancels.taken`
        self.taken_submits: list[Arrival] = []
        self.taken_rest: list[Rest] = []
        #: by tenant, what this record leaves for later, as the first of it waits until its id is free
        self.held_up: dict[str, list[Arrival]] = {}

    def __len__(self) -> int:
        return len(self.submits) + self.cancels.size + len(self.rest)

    def add(self, event: Event) -> None:
        if isinstance(event, Submit | ScheduleRun):
            self.submits.append(event)
        elif isinstance(event, Cancel) or (isinstance(event, QueueRead) and event.which == "cancel"):
            self.cancels.add(event)
        elif isinstance(event, QueueRead):
            self.submits.append(event)
        else:
            self.rest.append(event)
            self.urgent += is_urgent(event)

    def begin_record(self) -> None:
        """Begin another record: forget what was taken for the previous one."""
        self.taken_submits.clear()
        self.taken_rest.clear()
        self.cancels.begin_record()

    def take_back(self) -> None:
        """Put back everything taken for a record that is not written."""
        self.put_back_held_up()
        self.submits.extendleft(reversed(self.taken_submits))
        self.cancels.take_back()
        back = {id(event) for event in self.taken_rest}  # some were put back already
        self.rest = deque([*self.taken_rest, *(event for event in self.rest if id(event) not in back)])
        self.begin_record()
        self.put_back(())

    def remove(self, event: Event) -> None:
        """Drop an event that waits."""
        if isinstance(event, Cancel) or (isinstance(event, QueueRead) and event.which == "cancel"):
            self.cancels.remove(event)
        elif isinstance(event, Submit | ScheduleRun | QueueRead):
            self.submits.remove(event)
        else:
            self.rest.remove(event)
            self.put_back(())

    def take_of(self, whose: str, verb: str) -> list[Event]:
        """Take the requests of this verb out of the queues that wait of a tenant, or of an operator; with the marks of
        how far their durable queue was read."""
        if verb == "cancel":
            return list(self.cancels.pull(whose))
        if verb == "submit":
            mine: list[Event] = [event for event in self.submits if event.tenant == whose]
            self.submits = deque(event for event in self.submits if event.tenant != whose)
            return mine
        orders = [each for each in self.rest if _asked_by(each, verb) == whose]
        for order in orders:
            self.remove(order)
        return list[Event](orders)

    def put_first(self, whose: str, verb: str, events: Sequence[Any]) -> None:
        """Put such events back, before those that came since."""
        if verb == "cancel":
            self.cancels.put_first(whose, events)
        else:
            self.submits.extendleft(reversed(events))

    def put_back(self, events: Sequence[Rest]) -> None:
        """Put events for which this record has no room back to the front, for the next one.

        Must also be called (without events) after events were taken from `rest`, as it recounts `urgent`.
        """
        self.rest.extendleft(reversed(events))
        self.urgent = sum(map(is_urgent, self.rest))  # `rest` is nearly always empty here

    def put_back_held_up(self) -> None:
        """Put back what waits until an id is free, for the next record."""
        for mine in self.held_up.values():
            self.submits.extendleft(reversed(mine))
        self.held_up.clear()

    def renewing(self) -> set[tuple[str, str]]:
        """Return worker and session of each renewal that waits for a later record."""
        return {
            (event.worker, event.frame.session)
            for event in self.rest
            if isinstance(event, FromWorker) and isinstance(event.frame, Renew)
        }

    def forget_asks(self) -> None:
        self.rest = deque(event for event in self.rest if not isinstance(event, Ask))
        self.urgent = sum(map(is_urgent, self.rest))


def _asked_by(event: Rest, verb: str) -> str | None:
    """Return which operator or tenant asks this verb with an event; None if it is another one, or no request."""
    if not isinstance(event, Order | ChangeOrder | SignalOrder | ScheduleOrder | Execute | Wake) or event.verb != verb:
        return None
    return event.operator if isinstance(event, Order) else event.tenant


class Cancels:
    """The queue of cancels: tenants alternate, each with its oldest, and one record takes a bounded number.

    It also holds marks of how far a durable queue was read, each behind its cancels."""

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

    def goes_on(self, event: Cancel) -> None:
        """Have the next record go on with the event that was just taken, before all others of its tenant."""
        self.taken.pop()
        self.put_first(event.tenant, (event,))

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

    def remove(self, event: Cancel | QueueRead) -> None:
        mine = self._by_tenant[event.tenant]
        mine.remove(event)
        self.size -= 1
        if not mine:
            del self._by_tenant[event.tenant]
