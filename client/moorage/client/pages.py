"""Answers that come page by page, as those of `ls`: each says where the next one begins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any


async def pages(
    ask: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]], asked: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the data of each page, from the first one on. The next page is asked for once the reader goes on."""
    after = ""
    while True:
        data = await ask({**asked, "after": after} if after else asked)
        yield data
        after = data.get("next", "")
        if not after:
            return
