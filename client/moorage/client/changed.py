"""An asyncio event for a stream of changes: set after each, and once they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def changed(
    changes: Callable[[], AsyncIterator[object]],
) -> AsyncIterator[tuple[asyncio.Event, asyncio.Task[None]]]:
    """Listen to `changes`, and give the event, and the task that ends with them: its `result` raises what they raised.

    A reader clears the event before it asks for what has changed. What the task raises is no error of this manager.
    """
    event = asyncio.Event()

    async def listen() -> None:
        async for _ in changes():
            event.set()

    listening = asyncio.create_task(listen())
    listening.add_done_callback(lambda _: event.set())
    try:
        yield event, listening
    finally:
        listening.cancel()
        await asyncio.wait({listening})
        if not listening.cancelled():
            listening.exception()
