"""What operators ask in pages comes as one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from moorage.client.admin import AsyncAdmin
from moorage.client.connected import Connected
from moorage.client.errors import Rejected
from moorage.schemas.operate import DlqAct


class Pages:
    """Answers `dlq` with two letters a page, as a leader does with as many as its frame holds."""

    def __init__(self, letters: int) -> None:
        self.numbers = range(1, letters + 1)
        self.asked: list[int] = []

    async def operate(self, verb: str, act: DlqAct) -> Any:
        self.asked.append(act.after)
        page = [number for number in self.numbers if number > act.after][:2]
        more = page[-1] if page and page[-1] < len(self.numbers) else 0
        return SimpleNamespace(data={"letters": [{"sequence": number} for number in page], "next": more})


async def test_dead_letters_are_listed_over_all_pages() -> None:
    pages = Pages(5)
    admin = AsyncAdmin(cast(Connected, pages))
    assert [row.sequence async for row in admin.dead_letters()] == [1, 2, 3, 4, 5]
    assert pages.asked == [0, 2, 4]


async def test_a_number_or_a_reason_that_no_dead_letter_takes_is_rejected_like_any_other_mistake() -> None:
    admin = AsyncAdmin(cast(Connected, Pages(1)))
    for wrong in (0, -1, 2**60):
        with pytest.raises(Rejected, match="sequence must be"):
            await admin.dead_letter(wrong)
    for act in (admin.resend, admin.drop):
        with pytest.raises(Rejected, match="why must be at most 200"):
            await act(1, why="w" * 201)
