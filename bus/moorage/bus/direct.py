"""nats-py's client, but a message goes to its handler where it is read.

nats-py puts each message in its subscription's queue, of which a task takes it in a later turn of the loop and awaits
a coroutine: nearly half of what receiving costs, and a turn of delay. Handlers of ours only enqueue
(`transport.Handler`), so that they may run at once. The hook is a private method of nats-py; where a release of it has
none of that name, the queue and the task do their work as before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from moorage.bus.transport import Delivery, Handler


def callback_of(handler: Handler) -> Callable[[Msg], Awaitable[None]]:
    """What to subscribe with: `DirectClient` calls the handler itself, any other client by this coroutine."""

    async def on_message(msg: Msg) -> None:
        handler(Delivery(msg.subject, msg.reply, msg.data, msg.headers))

    on_message.handler = handler  # type: ignore[attr-defined]
    return on_message


class DirectClient(Client):
    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handler: Handler | None = getattr(getattr(self._subs.get(sid), "_cb", None), "handler", None)
        if handler is None:  # the subscription has ended, or is nats-py's own
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            found: Any = await self._process_headers(headers) if headers else None
            handler(Delivery(subject.decode(), reply.decode(), data, found))
        except Exception as error:  # as nats-py tells of a callback that fails
            await self._error_cb(error)
