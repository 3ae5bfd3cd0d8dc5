"""Streams are made, or found, with patience: a cluster that elects a stream's leader gives no answer meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from moorage.bus.errors import Disconnected, RequestTimeout

#: a request to the JetStream API takes up to 10 s to time out, and an election some seconds
PATIENCE_S: Final = 30.0
RETRY_WAIT_S: Final = 0.05
RETRY_WAIT_S_MAX: Final = 1.0

T = TypeVar("T")


async def patiently(make: Callable[[], Awaitable[T]]) -> T:
    """What `make` returns; called again while nobody answers, so twice must do no harm. Raises what it raises last."""

    async def once() -> T:  # tenacity awaits what an `async def` returns, and no other function's
        return await make()

    tries = AsyncRetrying(
        retry=retry_if_exception_type((RequestTimeout, Disconnected)),
        wait=wait_random_exponential(multiplier=RETRY_WAIT_S, max=RETRY_WAIT_S_MAX),
        stop=stop_after_delay(PATIENCE_S),
        reraise=True,
    )
    return await tries(once)
