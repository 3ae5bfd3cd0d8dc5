"""The tenant's frames, heard once for all who follow jobs on one client.

A job's own subject costs the leader a message for every change of it, the server as many, and this process a
subscription. The tenant's frame of a tick is sent anyway, whoever listens: who follows many jobs hears that.
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

#: followers on one client from which on those that come hear the tenant's frames together
CROWD: Final = 16

_decode_events: Final[Decoder[Events]] = Decoder(Events)


Hear = Callable[[Event], None]
Refresh = Callable[[], None]


class Feed:
    """One subscription while anybody is listening, none otherwise."""

    def __init__(self, client: Connected) -> None:
        self._client = client
        self._listeners: dict[str, list[tuple[Hear, Refresh]]] = {}
        self._subscription: Subscribed | None = None
        self._changing = asyncio.Lock()  # one subscribes or leaves at a time

    async def join(self, job: str, hear: Hear, refresh: Refresh) -> None:
        """Have `hear` called with what is said of `job` after this returns; `refresh` where a frame cannot be read.

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
        """What `join` was called with; the last one ends the subscription."""
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
            events = _decode_events(delivery.data).jobs
        except Refused:
            for of_job in listeners.values():
                for _, refresh in of_job:
                    refresh()
            return
        for event in events:
            for hear, _ in listeners.get(event.job, ()):
                hear(event)
