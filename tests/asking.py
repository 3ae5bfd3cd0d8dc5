"""Ask over plain nats-py until somebody answers, as the protocol says: the same content again."""

from __future__ import annotations

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.waiting import until


async def answered(nc: Client, subject: str, payload: bytes, deadline_s: float, try_s: float) -> Msg:
    """The answer; a try waits `try_s`. Raises `NeverHappened` when none came within `deadline_s`.

    That a scheduler does not lead, or cannot write its ledger now, is none: the same is asked again.
    """

    async def once() -> Msg | None:
        try:
            answer = await nc.request(subject, payload, timeout=try_s)
            return None if b"not-leading" in answer.data else answer
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError):
            return None

    answer: Msg = await until(once, deadline_s, f"an answer on {subject}")
    return answer
