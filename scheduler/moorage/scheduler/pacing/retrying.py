"""Repeats a JetStream call until it is answered; a cluster that is starting or electing a leader does not answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_random_exponential

from moorage.bus.errors import Disconnected, JetStreamRefused, RequestTimeout

log = logging.getLogger("moorage.ledger")

#: a request to the JetStream API times out after up to 10 s, an election takes some seconds, and the servers of a
#: cluster are started one after the other
RETRY_FOR_S: Final = 120.0
RETRY_WAIT_S: Final = 0.05
RETRY_WAIT_S_MAX: Final = 1.0

T = TypeVar("T")


async def retry_unanswered(make: Callable[[], Awaitable[T]]) -> T:
    """Return what `make` returns, calling it again, for `RETRY_FOR_S` at most, while servers are missing or silent.

    `make` must be safe to repeat. Raises the last such error; any other exception at once.
    """
    is_told = False

    def log_once(tried: RetryCallState) -> None:
        """Log the failure once, so that an operator who starts a cluster knows what is missing."""
        nonlocal is_told
        error = tried.outcome.exception() if tried.outcome is not None else None
        if isinstance(error, JetStreamRefused) and not is_told:
            is_told = True
            log.warning("%s; still trying: %s", error, error.problem.next)

    async def once() -> T:  # tenacity awaits only functions made with `async def`
        return await make()

    tries = AsyncRetrying(
        retry=retry_if_exception(_may_pass),
        before_sleep=log_once,
        wait=wait_random_exponential(multiplier=RETRY_WAIT_S, max=RETRY_WAIT_S_MAX),
        stop=stop_after_delay(RETRY_FOR_S),
        reraise=True,
    )
    return await tries(once)


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, JetStreamRefused):
        return error.servers_missing
    return isinstance(error, RequestTimeout | Disconnected)
