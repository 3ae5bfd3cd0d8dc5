"""The answers of `ls`, which come page by page: each says where the next one begins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from moorage.schemas.frames import Answer

if TYPE_CHECKING:
    from moorage.schemas.answers.jobs import JobsAnswer


async def pages(
    ask: Callable[[Mapping[str, Any]], Awaitable[Answer]], asked: Mapping[str, Any]
) -> AsyncIterator[JobsAnswer]:
    """Yield each page of jobs, from the first one on. The next page is asked for once the reader goes on."""
    from moorage.client.errors import read_answer
    from moorage.schemas.answers.jobs import JobsAnswer

    after = ""
    while True:
        page = read_answer((await ask({**asked, "after": after} if after else asked)).data, JobsAnswer)
        yield page
        after = page.next
        if not after:
            return
