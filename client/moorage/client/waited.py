"""Where the waits of a job went, as the ledger's follower counts them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import msgspec

from moorage.client.errors import ClientError
from moorage.schemas.waited import WaitedAnswer, WaitedPart

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo
    from moorage.client.client import AsyncClient

#: how long an answer about something else waits for this one
WAITED_S_MAX: Final = 2.0


async def waited_of(client: AsyncClient, shown: JobInfo, tenant: str | None = None) -> list[WaitedPart]:
    """Return where the waits of a job went, the largest part first; nothing while the follower is behind."""
    return (await told_of(client, shown, tenant)).parts


async def told_of(client: AsyncClient, shown: JobInfo, tenant: str | None = None) -> WaitedAnswer:
    """Return where the waits of a job went, and on what evidence it was placed last; nothing while the follower is
    behind."""
    if shown.waited or shown.compacted:
        return WaitedAnswer(parts=shown.waited)
    with contextlib.suppress(ClientError, TimeoutError):
        async with asyncio.timeout(WAITED_S_MAX):
            answer = await client._wire.answer("usage", {"waits": True, "job": shown.job}, tenant)
            return msgspec.convert(answer.data, WaitedAnswer)
    return WaitedAnswer()
