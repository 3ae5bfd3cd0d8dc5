"""One job from its submit to its end, with its output: what `AsyncClient.run` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from moorage.client.errors import JobFailed
from moorage.client.job import Outcome, Result
from moorage.client.output import Captured
from moorage.client.stored_output import Piece
from moorage.client.watch import Watch
from moorage.schemas.job import SUCCEEDED, Request

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient


async def run(client: AsyncClient, request: Request, timeout_s: float) -> Result:
    """Watch first, then submit, so that nothing of the output is missed. Raises as `AsyncClient.run`."""
    assert request.job is not None
    outcome, captured = Outcome(request.job), Captured()
    async with Watch(client, request.job, past=True, request=request, ahead=True) as watch:
        await client.submit(request)
        async for item in watch.follow(timeout_s):
            outcome.take(item)
            if isinstance(item, Piece):
                captured.take(item)
    result = msgspec.structs.replace(
        outcome.result(watch.shown),
        stdout=captured.text("out"),
        stderr=captured.text("err"),
        lost_bytes=captured.lost_bytes,
    )
    if result.state != SUCCEEDED:
        raise JobFailed(result, await outcome.tail_or_kept(client))
    return result
