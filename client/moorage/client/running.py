"""One job from its submit to its end, with its output: what `AsyncClient.run` does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from moorage.client.errors import JobFailed
from moorage.client.job import Outcome, Result
from moorage.client.output import Captured
from moorage.client.stored_output import Piece
from moorage.client.watch import Watch
from moorage.schemas.frames import Accepted
from moorage.schemas.job import SUCCEEDED, Request

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient


async def run(
    client: AsyncClient, job: str, asked: Request, submit: Callable[[], Awaitable[Accepted]], timeout_s: float
) -> Result:
    """Watch first, then submit, so that nothing of the output is missed. Raises as `AsyncClient.run`."""
    outcome, captured = Outcome(job), Captured()
    watch = Watch(client, job, past=True, request=asked, ahead=True, at_end=True)
    await watch.open()
    try:
        await submit()
        if asked.events == "tenant" and client.feed.is_refused:  # its own subject may be heard, once it was asked for
            await watch.close()
            watch = Watch(client, job, past=True, ahead=True)
            await watch.open()
        async for item in watch.follow(timeout_s):
            outcome.take(item)
            if isinstance(item, Piece):
                captured.take(item)
    finally:
        await watch.close()
    result = msgspec.structs.replace(
        outcome.result(watch.shown),
        stdout=captured.text("out"),
        stderr=captured.text("err"),
        lost_bytes=captured.lost_bytes,
    )
    if result.state != SUCCEEDED:
        raise JobFailed(result, await outcome.tail_or_kept(client))
    return result
