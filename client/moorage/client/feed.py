"""One subscription to the tenant's event frames for all watches of a client.

A job's own subject costs the leader and the server a message for every change, and this process a subscription. The
tenant's frame of each tick is sent anyway, so a client that follows many jobs listens to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from moorage.bus.transport import Delivery, Subscribed
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Event, Events

if TYPE_CHECKING:
    from moorage.client.connected import Connected

#: with so many watches open on a client, further ones listen to the tenant's frames together
CROWD: Final = 16

decode_events: Final[Decoder[Events]] = Decoder(Events)

Hear = Callable[[Event], None]
Refresh = Callable[[], None]


class Feed:
    """Subscribed while anybody listens."""

    def __init__(self, client: Connected) -> None:
        self._client = client
        self._listeners: dict[str, list[tuple[Hear, Refresh]]] = {}
        self._subscription: Subscribed | None = None
        self._changing = asyncio.Lock()  # one subscribes or leaves at a time

    async def join(self, job: str, hear: Hear, refresh: Refresh) -> None:
        """From now on call `hear` with each event of `job`, and `refresh` when a frame cannot be decoded.

        Both run in the read path and may only enqueue. Raises `NotPermitted`.
        """
        self._listeners.setdefault(job, []).append((hear, refresh))
        try:
            async with self._changing:
                if self._subscription is None:
                    subject = self._client.subjects.events(self._client.tenant)
                    self._subscription = await self._client.subscribe(subject, self._on_frame)
        except BaseException:
            self._remove(job, hear, refresh)
            raise

    async def leave(self, job: str, hear: Hear, refresh: Refresh) -> None:
        """Undo a `join` with the same arguments; the last one ends the subscription."""
        self._remove(job, hear, refresh)
        async with self._changing:
            subscription = self._subscription
            if subscription is not None and not self._listeners:
                self._subscription = None
                await subscription.unsubscribe()

    def _remove(self, job: str, hear: Hear, refresh: Refresh) -> None:
        of_job = self._listeners[job]
        of_job.remove((hear, refresh))
        if not of_job:
            del self._listeners[job]

    def _on_frame(self, delivery: Delivery) -> None:
        listeners = self._listeners
        try:
            events = decode_events(delivery.data).jobs
        except Refused:
            for of_job in listeners.values():
                for _, refresh in of_job:
                    refresh()
            return
        for event in events:
            for hear, _ in listeners.get(event.job, ()):
                hear(event)
