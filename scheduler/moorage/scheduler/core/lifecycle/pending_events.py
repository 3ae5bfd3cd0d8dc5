"""Events that were offered to the engine and are in no record yet: submits, cancels and the rest, in three queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from moorage.scheduler.core.events import (
    Arrival,
    Ask,
    Cancel,
    Event,
    Order,
    QueueRead,
    Rest,
    ScheduleRun,
    Submit,
    is_urgent,
)
from moorage.scheduler.core.lifecycle.cancels import Cancels


class PendingEvents:
    """The events that wait for a record: three queues by order of arrival, in that of cancels for each tenant alone.

    So no cursor of a durable queue passes a request that is not recorded.
    """

    __slots__ = ("cancels", "rest", "submits", "taken_rest", "taken_submits", "urgent")

    def __init__(self) -> None:
        self.submits: deque[Arrival] = deque()
        self.cancels = Cancels()
        self.rest: deque[Rest] = deque()
        self.urgent = 0  # events in `rest` that must not wait for the next heartbeat
        #: taken for the current record, in order, besides `cancels.taken`
        self.taken_submits: list[Arrival] = []
        self.taken_rest: list[Rest] = []

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
        self.submits.extendleft(reversed(self.taken_submits))
        self.cancels.take_back()
        back = {id(event) for event in self.taken_rest}  # some were put back already
        self.rest = deque([*self.taken_rest, *(event for event in self.rest if id(event) not in back)])
        self.begin_record()
        self.put_back(())

    def remove(self, event: Event) -> None:
        """Drop an event that waits; a `QueueRead` is not dropped."""
        if isinstance(event, Cancel):
            self.cancels.remove(event)
        elif isinstance(event, Submit | ScheduleRun):
            self.submits.remove(event)
        elif not isinstance(event, QueueRead):
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
        orders = [each for each in self.rest if isinstance(each, Order) and (each.operator, each.verb) == (whose, verb)]
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

    def forget_asks(self) -> None:
        self.rest = deque(event for event in self.rest if not isinstance(event, Ask))
        self.urgent = sum(map(is_urgent, self.rest))
