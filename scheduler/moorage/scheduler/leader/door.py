"""The leader's subscriptions for tenants, or for workers: one for all, and while one of them floods, one for each.

A leader reads every message that the server delivers to it, also those that it refuses. So while a sender, a tenant or
a worker, sends more than the leader can read, or far more than its rate, each known one has subscriptions of its own.
Those of the flooding sender take a ration: the server itself ends them after so many messages, until the leader makes
them again. Others are served as before. One that was never heard of is not, until the flood is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Literal

from moorage.bus.connection import Connection
from moorage.bus.subscription import Subscription
from moorage.bus.transport import Delivery, Handler, Wanted
from moorage.scheduler.leader.sender_rates import SenderRates
from moorage.schemas.subjects import Subjects

log = logging.getLogger("moorage.scheduler")

#: the time between two rations, in seconds; after so many in a row that were not used up, a tenant floods no more
RATION_EVERY_S: Final = 1.0
CALM: Final = 3
#: the time between two looks; a round trip that takes longer says that the leader is behind; and one after which it
#: drops what waits
LOOK_S: Final = 0.1
BEHIND_S: Final = 0.3
DROP_S: Final = 2.0
ROUND_TRIP_S: Final = 30.0


#: the subjects of a sender, or of all for `*`, each with its handler; the sender's name is their first token
Rows = Callable[[str], list[tuple[str, Handler]]]


class _Ration:
    """The subscriptions of a flooding sender, which end after `most` messages each."""

    def __init__(self) -> None:
        self.most = 0
        self.calm = 0  # rations in a row that were not used up
        self.heard = 0
        self.subscriptions: list[Subscription] = []

    def count(self, handler: Handler) -> Handler:
        def counted(delivery: Delivery) -> None:
            self.heard += 1
            handler(delivery)

        return counted


class Door:
    """The subscriptions of one term, on the `connection` for such senders. `known` returns those of whom the scheduler
    knows, whether they were heard or not."""

    def __init__(
        self,
        kind: Literal["tenant", "worker"],
        connection: Connection,
        subjects: Subjects,
        rates: SenderRates,
        rows: Rows,
        known: Callable[[], Iterable[str]],
    ) -> None:
        self._kind = kind
        self._connection = connection
        self._rates = rates
        self._rows_of = rows
        self._known = known
        self._subjects = subjects
        self._for_all: list[Subscription] = []
        self._own: dict[str, list[Subscription]] = {}  # by sender, while one floods
        self._is_parted = False  # whether each sender has subscriptions of its own
        self._rations: dict[str, _Ration] = {}
        self._rationed_s = 0.0  # when the last rations were given, monotonic
        self._round_trip: asyncio.Task[None] | None = None
        self._began_s = 0.0

    async def open(self) -> None:
        """Subscribe for all of them. Raises `BusError`."""
        for subject, handler in self._rows("*"):
            self._for_all.append(await self._connection.subscribe(subject, handler))

    async def close(self) -> None:
        if self._round_trip is not None:
            self._round_trip.cancel()
            await asyncio.wait({self._round_trip})
        rationed = [ration.subscriptions for ration in self._rations.values()]
        for subscriptions in (self._for_all, *self._own.values(), *rationed):
            for subscription in subscriptions:
                await subscription.unsubscribe()

    def _rows(self, sender: str) -> list[tuple[str, Handler]]:
        return [(subject, partial(self._unless_rationed, handler)) for subject, handler in self._rows_of(sender)]

    def _unless_rationed(self, handler: Handler, delivery: Delivery) -> None:
        """Handle a message, but not what had come of a sender before it was rationed."""
        if not self._rations or self._subjects.token(delivery.subject, 1) not in self._rations:
            handler(delivery)

    async def run(self) -> None:
        """Ration senders while they flood, for ever."""
        while True:
            if not self._is_parted:
                await self._rates.some.wait()
            await asyncio.sleep(LOOK_S)
            late_s = self._late_s()
            if flooding := self._rates.look(time.monotonic(), is_behind=late_s > BEHIND_S):
                await self._begin_rations(flooding)
            if self._rations and time.monotonic() - self._rationed_s >= RATION_EVERY_S:
                await self._next_rations()
            if self._rations and late_s > DROP_S:
                log.warning(
                    "what waits on the connection for %ss is %.1f s old: it is dropped, and who waits asks again",
                    self._kind,
                    late_s,
                )
                await self._connection.reconnect()
                self._began_s = time.monotonic()
            if self._is_parted and not self._rations:
                await self._join()

    def _late_s(self) -> float:
        """Return for how long the present round trip on the connection is under way; begin the next one after it.

        The answer to a PING comes behind all that the server has for this connection.
        """
        if self._round_trip is None or self._round_trip.done():
            if self._round_trip is not None:
                self._round_trip.exception()  # of a connection that was lost: the next one says more
            self._round_trip = asyncio.create_task(self._connection.flush(ROUND_TRIP_S))
            self._began_s = time.monotonic()
        if not self._connection.is_connected:
            self._began_s = time.monotonic()
        return time.monotonic() - self._began_s

    async def _part(self) -> None:
        """Give each sender subscriptions of its own."""
        senders = sorted({*self._rates.heard(), *self._known()})
        wanted = [Wanted(*row) for sender in senders for row in self._rows(sender)]
        former, self._for_all, self._is_parted = self._for_all, [], True
        made = iter(await self._connection.swap(former, wanted))
        self._own = {sender: [next(made) for _ in self._rows(sender)] for sender in senders}

    async def _join(self) -> None:
        """Give all of them the same subscriptions again."""
        former = [each for subscriptions in self._own.values() for each in subscriptions]
        self._own, self._is_parted = {}, False
        self._for_all = await self._connection.swap(former, [Wanted(*row) for row in self._rows("*")])

    async def _begin_rations(self, flooding: list[str]) -> None:
        if not self._is_parted:
            await self._part()
        for sender in flooding:
            ration = self._rations[sender] = _Ration()
            ration.subscriptions = self._own.pop(sender, [])
            self._rates.rationed = frozenset(self._rations)
            await self._renew(sender, ration)
            log.warning(
                "%s %s floods the leader: until it sends less, %d of its messages a second are read",
                self._kind,
                sender,
                ration.most,
            )
        self._rationed_s = time.monotonic()

    async def _next_rations(self) -> None:
        """Give each rationed sender the next ration, or its own subscriptions if it floods no more."""
        self._rationed_s = time.monotonic()
        for sender, ration in list(self._rations.items()):
            ration.calm = ration.calm + 1 if ration.heard < ration.most else 0
            if ration.calm < CALM:
                await self._renew(sender, ration)
                continue
            del self._rations[sender]
            self._rates.rationed = frozenset(self._rations)
            self._own[sender] = await self._connection.swap(
                ration.subscriptions, [Wanted(*row) for row in self._rows(sender)]
            )
            log.warning("%s %s floods no more", self._kind, sender)

    async def _renew(self, sender: str, ration: _Ration) -> None:
        ration.heard, ration.most = 0, self._rates.ration_of(sender)
        wanted = [Wanted(subject, ration.count(handler), ration.most) for subject, handler in self._rows_of(sender)]
        ration.subscriptions = await self._connection.swap(ration.subscriptions, wanted)
