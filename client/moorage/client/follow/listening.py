"""The events of a tenant and the frames of the fleet, as async iterators without end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Final, TypeVar

from moorage.bus.transport import Delivery
from moorage.client.follow.feed import decode_events
from moorage.client.follow.stories import Stories
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Event, FleetFrame

FLEET_FRAMES_MAX: Final = 16
#: most frames of a tenant's events that wait for the reader; beyond it the oldest are dropped
EVENTS_FRAMES_MAX: Final = 10_000

T = TypeVar("T")

_decode_fleet: Final[Decoder[FleetFrame]] = Decoder(FleetFrame)


async def fleet_frames(stories: Stories) -> AsyncGenerator[FleetFrame, None]:
    """Yield the leader's frames of the fleet; see `AsyncClient.fleet_frames`."""
    async with contextlib.aclosing(
        _listen(stories, stories.asks.subjects.fleet_frame, _decode_fleet, FLEET_FRAMES_MAX)
    ) as frames:
        async for frame in frames:
            yield frame


async def tenant_events(stories: Stories) -> AsyncGenerator[Event, None]:
    """Yield the events of the tenant's jobs; see `AsyncClient.events`."""
    subject = stories.asks.subjects.events(stories.asks.tenant)
    async with contextlib.aclosing(_listen(stories, subject, decode_events, EVENTS_FRAMES_MAX)) as frames:
        async for frame in frames:
            for event in frame.jobs:
                yield event


async def _listen(stories: Stories, subject: str, decode: Callable[[bytes], T], most: int) -> AsyncGenerator[T, None]:
    """Yield the frames on a subject. The newest `most` frames wait for the reader; invalid frames are skipped."""
    waiting: deque[bytes] = deque(maxlen=most)
    some = asyncio.Event()

    def on_frame(delivery: Delivery) -> None:
        waiting.append(delivery.data)
        some.set()

    subscription = await stories.asks.subscribe(subject, on_frame)
    stories.endless.add(some)
    try:
        stories.check_open()  # the client may have been closed meanwhile
        while True:
            while waiting:
                try:
                    frame = decode(waiting.popleft())
                except Refused:
                    continue
                yield frame
            some.clear()
            await some.wait()
            stories.check_open()
    finally:
        stories.endless.discard(some)
        await subscription.unsubscribe()
