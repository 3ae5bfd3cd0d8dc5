"""One standing subscription, which outlives the nats-py clients below it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from moorage.bus.dialing import quietly
from moorage.bus.direct import DirectClient, DirectSubscription, callback_of
from moorage.bus.errors import PermissionRefused
from moorage.bus.nats_py import Client
from moorage.bus.nats_py import Subscription as NatsSubscription
from moorage.bus.transport import Handler

Forget = Callable[["Subscription"], Awaitable[None]]


class Subscription:
    """A standing subscription. It survives reconnects, because `start` puts it on each new client.

    `client` is the one it is on now, None before the first. `forget` is called to end it. `refused` says why a server
    refused it.
    """

    __slots__ = ("_forget", "_nats", "client", "handler", "queue", "refused", "subject")

    def __init__(self, forget: Forget, subject: str, handler: Handler, queue: str) -> None:
        self._forget = forget
        self.client: Client | None = None
        self._nats: NatsSubscription | None = None
        self.subject = subject
        self.handler = handler
        self.queue = queue
        self.refused: PermissionRefused | None = None

    async def unsubscribe(self) -> None:
        """End the subscription: its handler gets no more messages."""
        await self._forget(self)

    async def start(self, client: Client) -> None:
        self.client, self.refused = client, None
        if not self.queue and isinstance(client, DirectClient):
            self._nats = client.listen(self.subject, self.handler)
            if self._nats is not None:
                return
        self._nats = await client.subscribe(self.subject, queue=self.queue, cb=callback_of(self.handler))

    async def stop(self) -> None:
        inner, self._nats, self.client = self._nats, None, None
        if isinstance(inner, DirectSubscription):
            inner.end()
        elif inner is not None:
            await quietly(inner.unsubscribe())
