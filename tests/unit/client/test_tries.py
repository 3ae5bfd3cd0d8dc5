"""How long one try of a request waits."""

from __future__ import annotations

import pytest

from moorage.bus.errors import RequestTimeout
from moorage.client.asking import PLAN_TRY_S, TRY_S, Asking


class Silent:
    """A server that answers the second try."""

    def __init__(self) -> None:
        self.tries_s: list[float] = []

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        self.tries_s.append(timeout_s)
        if len(self.tries_s) == 1:
            raise RequestTimeout(subject, timeout_s)
        return b"answer"


@pytest.mark.parametrize(("verb", "try_s"), [("show", TRY_S), ("plan", PLAN_TRY_S)])
async def test_a_try_of_plan_waits_for_what_is_computed(verb: str, try_s: float) -> None:
    """It began anew every 3 s, and no try was as long as the answer took."""
    server = Silent()
    assert await Asking().ask(server, f"moorage.api.t.{verb}", b"{}", lambda answer: answer, 60.0) == b"answer"
    assert server.tries_s == [try_s, try_s]
