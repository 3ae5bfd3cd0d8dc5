"""One standing subscription, which outlives the nats-py clients below it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from moorage.bus.dialing import quietly
from moorage.bus.errors import PermissionRefused
from moorage.bus.transport import Delivery, Handler

#: seconds before a refused subscription is tried a second time, and the most between two tries
AGAIN_S_MIN: Final = 1.0
AGAIN_S_MAX: Final = 30.0

Forget = Callable[["Subscription"], Awaitable[None]]


class _Receiver(asyncio.Future[Msg]):
    """The future that nats-py gives each message of a subscription to as it reads it: it calls `receive`.

    A subscription with a callback has a queue and a task instead, which take one more turn of the event loop. This
    future is never done, so the subscription goes on.
    """

    def __init__(self, receive: Callable[[Msg], None]) -> None:
        super().__init__()
        self._receive = receive

    def set_result(self, result: Msg, /) -> None:
        self._receive(result)


class Subscription:
    """A standing subscription. It survives reconnects, because `start` puts it on each new client.

    `client` is the one it is on now, None before the first. `forget` is called to end it, `retire` to end it behind its
    last message, `failed` with what its handler raises. `refused` says why a server refused it: the connection tries it
    again from `again_at_s` on, until it holds. After `most` messages the server ends it; 0: never. A reconnect begins
    that count anew.
    """

    __slots__ = (
        "_failed",
        "_forget",
        "_nats",
        "_retire",
        "_wait_s",
        "again_at_s",
        "client",
        "handler",
        "most",
        "queue",
        "refused",
        "subject",
    )

    def __init__(
        self,
        forget: Forget,
        retire: Forget,
        failed: Callable[[BaseException], None],
        subject: str,
        handler: Handler,
        queue: str,
        most: int = 0,
    ) -> None:
        self._forget = forget
        self._retire = retire
        self._failed = failed
        self.client: Client | None = None
        self._nats: NatsSubscription | None = None
        self.subject = subject
        self.handler = handler
        self.queue = queue
        self.most = most
        self.refused: PermissionRefused | None = None
        #: when it is to be tried again, by the event loop's clock, and the wait before that
        self.again_at_s = self._wait_s = 0.0

    async def unsubscribe(self) -> None:
        """End the subscription: its handler gets no more messages."""
        await self._forget(self)

    async def drain(self) -> None:
        """End the subscription behind the last message that the server sends for it: the handler gets that one, too.

        Without a connection there is no such message. Returns when the handler has had it.
        """
        await self._retire(self)

    async def start(self, client: Client) -> None:
        """Subscribe on a new client, which may do what an earlier one might not. Raises errors of nats-py if its socket
        is dead."""
        self.holds()
        await self._subscribe(client)

    def holds(self) -> None:
        """Forget that it was refused."""
        self.refused, self.again_at_s, self._wait_s = None, 0.0, 0.0

    async def again(self, client: Client, now_s: float) -> None:
        """Subscribe once more on a client whose server refused it. `refused` stays until `holds` is called.

        `now_s` is the event loop's time; the next try waits twice as long, `AGAIN_S_MAX` at most.
        """
        self._wait_s = min(max(2 * self._wait_s, AGAIN_S_MIN), AGAIN_S_MAX)
        self.again_at_s = now_s + self._wait_s
        inner, self._nats = self._nats, None
        if inner is not None:  # nats-py keeps what the server has refused
            await quietly(inner.unsubscribe())
        await self._subscribe(client)

    async def _subscribe(self, client: Client) -> None:
        self.client = client

        def receive(msg: Msg) -> None:
            if self.client is client:
                try:
                    self.handler(Delivery(msg.subject, msg.reply, msg.data, msg.headers))
                except (Exception, asyncio.CancelledError) as error:  # the latter, let through, ends nats-py's reader
                    self._failed(error)

        started = await client.subscribe(self.subject, queue=self.queue, future=_Receiver(receive))
        if self.most:
            await quietly(started.unsubscribe(limit=self.most))
        if self.client is client:
            self._nats = started
        else:  # ended meanwhile
            await quietly(started.unsubscribe())

    async def end_at_server(self) -> None:
        """Have the server send nothing more for it; what it has sent is still handled."""
        if self._nats is not None and self.client is not None:
            await quietly(self.client._send_unsubscribe(self._nats._id))

    async def finish(self) -> None:
        """Unsubscribe, and wait for the messages that the server sent before it knew."""
        inner, client = self._nats, self.client
        if inner is not None and client is not None:
            # nats-py's drain sends its PING ahead of its UNSUB: this one is on the server before that PING
            await self.end_at_server()
            await quietly(client.flush())
            await quietly(inner.drain())  # type: ignore[no-untyped-call]  # nats-py has no types for it
        await self.stop()

    async def stop(self) -> None:
        inner, self._nats, self.client = self._nats, None, None
        if inner is not None:
            await quietly(inner.unsubscribe())
