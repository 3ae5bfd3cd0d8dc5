"""The leader's subscriptions for tenants: one for all, and while a tenant floods, one for each.

A leader reads every message that the server delivers to it, also those that it refuses. So while a tenant sends more
than the leader can read, or far more than its rate, each known tenant has subscriptions of its own, and those of the
flooding tenant take a ration: the server itself ends them after so many messages, until the leader makes them again.
Other tenants are served as before. A tenant that was never heard of is not, until the flood is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from moorage.bus.connection import Connection
from moorage.bus.subscription import Subscription
from moorage.bus.transport import Delivery, Handler, Wanted
from moorage.scheduler.leader.tenant_rates import TenantRates
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


class _Ration:
    """The subscriptions of a flooding tenant, which end after `most` messages each."""

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


class TenantDoor:
    """The subscriptions of one term. `on_request` gets requests and loads of members, `on_hint` what is stored in the
    durable queue. `known` returns the tenants that the scheduler knows of, whether they were heard or not."""

    def __init__(
        self,
        tenants: Connection,
        subjects: Subjects,
        rates: TenantRates,
        on_request: Handler,
        on_hint: Handler,
        known: Callable[[], Iterable[str]],
    ) -> None:
        self._tenants = tenants
        self._rates = rates
        self._on_request = on_request
        self._on_hint = on_hint
        self._known = known
        self._subjects = subjects
        self._for_all: list[Subscription] = []
        self._own: dict[str, list[Subscription]] = {}  # by tenant, while one floods
        self._is_parted = False  # whether each tenant has subscriptions of its own
        self._rations: dict[str, _Ration] = {}
        self._rationed_s = 0.0  # when the last rations were given, monotonic
        self._round_trip: asyncio.Task[None] | None = None
        self._began_s = 0.0

    async def open(self) -> None:
        """Subscribe for all tenants. Raises `BusError`."""
        for subject, handler in self._rows("*"):
            self._for_all.append(await self._tenants.subscribe(subject, handler))

    async def close(self) -> None:
        if self._round_trip is not None:
            self._round_trip.cancel()
            await asyncio.wait({self._round_trip})
        rationed = [ration.subscriptions for ration in self._rations.values()]
        for subscriptions in (self._for_all, *self._own.values(), *rationed):
            for subscription in subscriptions:
                await subscription.unsubscribe()

    def _rows(self, tenant: str) -> list[tuple[str, Handler]]:
        subjects = self._subjects
        return [
            (subjects.api(tenant, "*"), partial(self._unless_rationed, self._on_request)),
            (subjects.member(tenant, "*", "load"), partial(self._unless_rationed, self._on_request)),
            (subjects.request(tenant, "*"), partial(self._unless_rationed, self._on_hint)),
        ]

    def _unless_rationed(self, handler: Handler, delivery: Delivery) -> None:
        """Handle a message, but not what had come of a tenant before it was rationed."""
        if not self._rations or self._subjects.token(delivery.subject, 1) not in self._rations:
            handler(delivery)

    async def run(self) -> None:
        """Ration tenants while they flood, for ever."""
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
                    "what waits on the connection for tenants is %.1f s old: it is dropped, and who waits asks again",
                    late_s,
                )
                await self._tenants.reconnect()
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
            self._round_trip = asyncio.create_task(self._tenants.flush(ROUND_TRIP_S))
            self._began_s = time.monotonic()
        if not self._tenants.is_connected:
            self._began_s = time.monotonic()
        return time.monotonic() - self._began_s

    async def _part(self) -> None:
        """Give each tenant subscriptions of its own."""
        tenants = sorted({*self._rates.heard(), *self._known()})
        wanted = [Wanted(*row) for tenant in tenants for row in self._rows(tenant)]
        former, self._for_all, self._is_parted = self._for_all, [], True
        made = iter(await self._tenants.swap(former, wanted))
        self._own = {tenant: [next(made) for _ in self._rows(tenant)] for tenant in tenants}

    async def _join(self) -> None:
        """Give all tenants the same subscriptions again."""
        former = [each for subscriptions in self._own.values() for each in subscriptions]
        self._own, self._is_parted = {}, False
        self._for_all = await self._tenants.swap(former, [Wanted(*row) for row in self._rows("*")])

    async def _begin_rations(self, flooding: list[str]) -> None:
        if not self._is_parted:
            await self._part()
        for tenant in flooding:
            ration = self._rations[tenant] = _Ration()
            ration.subscriptions = self._own.pop(tenant, [])
            self._rates.rationed = frozenset(self._rations)
            await self._renew(tenant, ration)
            log.warning(
                "tenant %s floods the leader: until it sends less, %d of its messages a second are read",
                tenant,
                ration.most,
            )
        self._rationed_s = time.monotonic()

    async def _next_rations(self) -> None:
        """Give each rationed tenant the next ration, or its own subscriptions if it floods no more."""
        self._rationed_s = time.monotonic()
        for tenant, ration in list(self._rations.items()):
            ration.calm = ration.calm + 1 if ration.heard < ration.most else 0
            if ration.calm < CALM:
                await self._renew(tenant, ration)
                continue
            del self._rations[tenant]
            self._rates.rationed = frozenset(self._rations)
            self._own[tenant] = await self._tenants.swap(
                ration.subscriptions, [Wanted(*row) for row in self._rows(tenant)]
            )
            log.warning("tenant %s floods no more", tenant)

    async def _renew(self, tenant: str, ration: _Ration) -> None:
        ration.heard, ration.most = 0, self._rates.ration_of(tenant)
        wanted = [
            Wanted(subject, ration.count(handler), ration.most)
            for (subject, _), handler in zip(
                self._rows(tenant), (self._on_request, self._on_request, self._on_hint), strict=True
            )
        ]
        ration.subscriptions = await self._tenants.swap(ration.subscriptions, wanted)
