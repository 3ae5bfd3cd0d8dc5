"""A stream whose leader is being elected answers nothing for a while: a scheduler that starts then asks again."""

from __future__ import annotations

import pytest

from moorage.bus.errors import BusError, Disconnected, RequestTimeout
from moorage.scheduler.pacing.retrying import retry_unanswered


@pytest.mark.parametrize("error", [RequestTimeout("$JS.API.STREAM.INFO.X", 10.0), Disconnected("gone")])
async def test_what_nobody_answered_is_asked_again(error: BusError) -> None:
    tries = 0

    async def make() -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise error
        return "made"

    assert await retry_unanswered(lambda: make()) == "made"  # a plain function of a coroutine, as callers write it
    assert tries == 3


async def test_what_was_refused_is_not_asked_again() -> None:
    tries = 0

    async def make() -> None:
        nonlocal tries
        tries += 1
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        await retry_unanswered(lambda: make())
    assert tries == 1
