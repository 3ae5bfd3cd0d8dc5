"""One standing subscription over the nats-py clients that come and go below it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.aio.subscription import Subscription as NatsSubscription

from moorage.bus.dialing import quietly
from moorage.bus.direct import callback_of
from moorage.bus.transport import Handler

Forget = Callable[["Subscription"], Awaitable[None]]


class Subscription:
    """A standing subscription; survives reconnects, as `start` puts it on each new client.

    `client` is the one it is on now. `dropped` counts what its full queue threw away. `forget` is called to end it.
    """

    __slots__ = ("_forget", "_nats", "bytes_max", "client", "dropped", "handler", "messages_max", "queue", "subject")

    def __init__(
        self, forget: Forget, subject: str, handler: Handler, queue: str, messages_max: int, bytes_max: int
    ) -> None:
        self._forget = forget
        self.client: Client | None = None
        self._nats: NatsSubscription | None = None
        self.subject = subject
        self.handler = handler
        self.queue = queue
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.dropped = 0

    async def unsubscribe(self) -> None:
        """Stop; messages still queued are thrown away."""
        await self._forget(self)

    async def start(self, client: Client) -> None:
        self.client = client
        self._nats = await client.subscribe(
            self.subject,
            queue=self.queue,
            cb=callback_of(self.handler),
            pending_msgs_limit=self.messages_max,
            pending_bytes_limit=self.bytes_max,
        )

    async def stop(self) -> None:
        inner, self._nats, self.client = self._nats, None, None
        if inner is not None:
            await quietly(inner.unsubscribe())

    def is_of(self, inner: NatsSubscription) -> bool:
        return self._nats is inner
