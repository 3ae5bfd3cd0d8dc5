"""The pages of one answer to `usage`, about GPU time or about waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.frames import Answer


async def all_pages(client: AsyncClient, asked: dict[str, Any], *, of_all: bool) -> Answer:
    """Return all pages as one answer."""
    rows: list[dict[str, Any]] = []
    while True:
        answer = await (client._wire.operate("usage", asked) if of_all else client._wire.answer("usage", asked))
        rows += answer.data["rows"]
        if not (after := answer.data.pop("next", None)):
            answer.data["rows"] = rows
            return answer
        asked = {**asked, "after": after}
