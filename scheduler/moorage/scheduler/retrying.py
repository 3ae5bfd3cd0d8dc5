"""Repeat a JetStream call until it is answered: a cluster that elects a stream's leader, or is starting, does not."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_random_exponential

from moorage.bus.errors import Disconnected, JetStreamRefused, RequestTimeout

log = logging.getLogger("moorage.ledger")

#: one request to the JetStream API times out after up to 10 s, and an election takes some seconds
RETRY_FOR_S: Final = 30.0
RETRY_WAIT_S: Final = 0.05
RETRY_WAIT_S_MAX: Final = 1.0

T = TypeVar("T")


async def retry_unanswered(make: Callable[[], Awaitable[T]]) -> T:
    """Call `make` again and again until it is answered, for `RETRY_FOR_S` at most; it must be safe to repeat.

    Raises what the last call raised.
    """

    async def once() -> T:  # tenacity awaits what an `async def` returns, and no other function's
        return await make()

    tries = AsyncRetrying(
        retry=retry_if_exception(_may_pass),
        after=_tell,
        wait=wait_random_exponential(multiplier=RETRY_WAIT_S, max=RETRY_WAIT_S_MAX),
        stop=stop_after_delay(RETRY_FOR_S),
        reraise=True,
    )
    return await tries(once)


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, JetStreamRefused):
        return error.servers_missing
    return isinstance(error, RequestTimeout | Disconnected)


def _tell(tried: RetryCallState) -> None:
    """In the log, once: who starts a cluster wants to know for what it waits."""
    error = tried.outcome.exception() if tried.outcome is not None else None
    if tried.attempt_number == 1 and isinstance(error, JetStreamRefused):
        log.warning("%s; trying for %g s: %s", error, RETRY_FOR_S, error.problem.next)
