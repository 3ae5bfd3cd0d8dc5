"""Subjects that anybody may listen to, as async iterators without end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Final, TypeVar

from moorage.bus.transport import Delivery
from moorage.client.feed import decode_events
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Event, FleetFrame

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

FLEET_FRAMES_MAX: Final = 16
#: frames of a tenant's events that wait to be taken; beyond it the oldest are dropped
EVENTS_FRAMES_MAX: Final = 10_000

T = TypeVar("T")

_decode_fleet: Final[Decoder[FleetFrame]] = Decoder(FleetFrame)


async def fleet_frames(client: AsyncClient) -> AsyncGenerator[FleetFrame, None]:
    """See `AsyncClient.fleet_frames`."""
    async with contextlib.aclosing(
        _listen(client, client.subjects.fleet_frame, _decode_fleet, FLEET_FRAMES_MAX)
    ) as frames:
        async for frame in frames:
            yield frame


async def tenant_events(client: AsyncClient) -> AsyncGenerator[Event, None]:
    """See `AsyncClient.events`."""
    subject = client.subjects.events(client.tenant)
    async with contextlib.aclosing(_listen(client, subject, decode_events, EVENTS_FRAMES_MAX)) as frames:
        async for frame in frames:
            for event in frame.jobs:
                yield event


async def _listen(
    client: AsyncClient, subject: str, decode: Callable[[bytes], T], most: int
) -> AsyncGenerator[T, None]:
    """The frames on a subject; at most the newest `most` wait here. What cannot be decoded is skipped."""
    waiting: deque[bytes] = deque(maxlen=most)
    some = asyncio.Event()

    def on_frame(delivery: Delivery) -> None:
        waiting.append(delivery.data)
        some.set()

    subscription = await client.subscribe(subject, on_frame)
    client.endless.add(some)
    try:
        while True:
            while waiting:
                try:
                    frame = decode(waiting.popleft())
                except Refused:
                    continue
                yield frame
            some.clear()
            await some.wait()
            _ = client.link  # raises if the client was closed meanwhile: nothing would ever come
    finally:
        client.endless.discard(some)
        await subscription.unsubscribe()
