"""What was offered to the engine and is in no record yet: requests, cancels, and all the rest, each in a line."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from moorage.scheduler.core.events import Ask, Cancel, Event, QueueRead, Rest, Submit, presses, tells_ends
from moorage.scheduler.core.life.cancels import Cancels

#: events of which it is worth a look whether all of them are such as may wait for company
ENDS_MAX: Final = 64


class Offered:
    """Each line in the order of its coming, so that the cursor of a durable queue never overtakes what it counts."""

    __slots__ = ("cancels", "pressing", "rest", "submits")

    def __init__(self) -> None:
        self.submits: deque[Submit | QueueRead] = deque()
        self.cancels = Cancels()
        self.rest: deque[Rest] = deque()
        self.pressing = 0  # events in `rest` that press for a record

    def __len__(self) -> int:
        return len(self.submits) + self.cancels.size + len(self.rest)

    def add(self, event: Event) -> None:
        if isinstance(event, Cancel) or (isinstance(event, QueueRead) and event.which == "cancel"):
            self.cancels.add(event)
        elif isinstance(event, Submit | QueueRead):
            self.submits.append(event)
        else:
            self.rest.append(event)
            self.pressing += presses(event)

    def put_back(self, events: Sequence[Rest]) -> None:
        """Events that a record has no room for come first in the next. To be called once `rest` was taken from, too."""
        self.rest.extendleft(reversed(events))
        self.pressing = sum(map(presses, self.rest))  # hardly ever more than none

    def forget_asks(self) -> None:
        self.rest = deque(event for event in self.rest if not isinstance(event, Ask))
        self.pressing = sum(map(presses, self.rest))

    @property
    def only_ends(self) -> bool:
        """Whether all that presses is news of a few members that are over."""
        if self.submits or self.cancels.size or not 0 < self.pressing <= len(self.rest) <= ENDS_MAX:
            return False
        return all(tells_ends(event) for event in self.rest if presses(event))
