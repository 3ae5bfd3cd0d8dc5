"""Wait for a condition in a test: poll with a deadline, never sleep and hope."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pytest

    from moorage.client import AsyncJob

#: a condition is looked at so soon again at first, and as a wait lasts ever later: a look may ask three processes
_POLL_S: Final = 0.005
_POLL_S_MAX: Final = 0.05


class NeverHappened(AssertionError):
    """The condition stayed false until the deadline."""


async def until(
    condition: Callable[[], Any] | Callable[[], Awaitable[Any]], deadline_s: float = 60, what: str = ""
) -> Any:
    """Poll `condition` (plain or async) until it is truthy and return its value.

    Raises `NeverHappened` after `deadline_s` seconds, naming `what` and the last value seen.
    """
    began = time.monotonic()
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        waited_s = time.monotonic() - began
        if waited_s > deadline_s:
            name = what or getattr(condition, "__name__", "condition")
            raise NeverHappened(f"{name}: not within {deadline_s:g} s (last value {value!r})")
        await asyncio.sleep(min(max(_POLL_S, waited_s / 20), _POLL_S_MAX))


def skip_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the clock of the running loop forward: what is due within so many seconds is due now.

    So a long time-out ends at an event of the test's own, and never before it.
    """
    loop = asyncio.get_running_loop()
    now_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: now_s() + seconds)


async def until_state(job: AsyncJob, state: str, deadline_s: float = 60) -> None:
    """Until the scheduler shows the job in this state."""

    async def is_there() -> bool:
        return bool((await job.show()).state == state)

    await until(is_there, deadline_s, f"{job.job} is {state}")
