"""Run one job from its submit to its end, with its output. `AsyncClient.run` calls this."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from moorage.client.errors import JobFailed
from moorage.client.follow.captured import Captured, Tail
from moorage.client.follow.output import Piece
from moorage.client.follow.result import Result
from moorage.client.follow.stories import Following, Stories
from moorage.client.follow.watch import Watch
from moorage.schemas.frames import Accepted
from moorage.schemas.job import SUCCEEDED, Request


async def run(
    stories: Stories, job: str, asked: Request, submit: Callable[[], Awaitable[Accepted]], timeout_s: float
) -> Result:
    """Submit a job, and return its result with its output. The watch opens first, so that no output is missed.

    Raises as `AsyncClient.run`.
    """
    captured, tail = Captured(stories.budget), Tail()
    watch = Watch(Following(stories, job, to_submit=asked, ahead=True, at_end=True), past=True)
    await watch.open()
    try:
        await submit()
        if asked.events == "tenant" and stories.feed.is_refused:  # a watch that asks first turns on the job's subject
            await watch.close()
            watch = Watch(Following(stories, job, ahead=True), past=True)
            await watch.open()
        async for item in watch.follow(timeout_s):
            if isinstance(item, Piece):
                captured.take(item)
                tail.take(item)
    finally:
        captured.close()
        await watch.close()
    result = msgspec.structs.replace(
        watch.result(),
        stdout=captured.text("out"),
        stderr=captured.text("err"),
        lost_bytes=captured.lost_bytes,
    )
    if result.state != SUCCEEDED:
        raise JobFailed(result, await tail.or_kept(stories.asks, result), asked)
    return result
