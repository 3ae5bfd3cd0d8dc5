"""The events of a tenant and the frames of the fleet, as async iterators without end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Final, TypeVar

from moorage.bus.transport import Delivery
from moorage.client.follow.budget import Held
from moorage.client.follow.feed import decode_events
from moorage.client.follow.follower import Stories
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Event, FleetFrame

FLEET_FRAMES_MAX: Final = 16

T = TypeVar("T")

_decode_fleet: Final[Decoder[FleetFrame]] = Decoder(FleetFrame)


async def fleet_frames(stories: Stories) -> AsyncGenerator[FleetFrame, None]:
    """Yield the leader's frames of the fleet; see `Fleet.frames`."""
    async with contextlib.aclosing(
        _listen(stories, stories.asks.subjects.fleet_frame, _decode_fleet, FLEET_FRAMES_MAX)
    ) as frames:
        async for frame in frames:
            yield frame


async def tenant_events(stories: Stories) -> AsyncGenerator[Event, None]:
    """Yield the events of the tenant's jobs; see `AsyncClient.events`."""
    subject = stories.asks.subjects.events(stories.asks.tenant)
    async with contextlib.aclosing(_listen(stories, subject, decode_events, None)) as frames:
        async for frame in frames:
            for event in frame.jobs:
                yield event


async def _listen(
    stories: Stories, subject: str, decode: Callable[[bytes], T], most: int | None
) -> AsyncGenerator[T, None]:
    """Yield the frames on a subject. The newest frames wait for the reader, at most `most` of them, and as many as the
    client's budget has room for; invalid frames are skipped."""
    waiting: Held[bytes] = Held(stories.budget)
    some = asyncio.Event()

    def on_frame(delivery: Delivery) -> None:
        waiting.put_and_drop(delivery.data, len(delivery.data))
        if most is not None and len(waiting) > most:
            waiting.take()
        some.set()

    subscription = await stories.asks.subscribe(subject, on_frame)
    stories.endless.add(some)
    try:
        stories.check_open()  # the client may have been closed meanwhile
        while True:
            while waiting:
                try:
                    frame = decode(waiting.take())
                except Refused:
                    continue
                yield frame
            some.clear()
            await some.wait()
            stories.check_open()
    finally:
        stories.endless.discard(some)
        waiting.take_all()
        await subscription.unsubscribe()
