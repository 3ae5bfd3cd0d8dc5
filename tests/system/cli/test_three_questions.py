"""One who sees the page for the first time finds three answers by clicks from its first screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.cli.browser import need_chromium
from tests.system.cli.node import node_on
from tests.system.cli.page_pictures import PICTURES
from tests.system.cli.page_questions import look

NAMES = ("page-past", "page-past-dark", "page-service", "page-sweep")
PICTURE_BYTES_MAX = 200_000


@pytest.mark.long
@pytest.mark.slow
async def test_what_failed_what_is_healthy_and_who_waited_is_said_at_first_sight(tmp_path: Path) -> None:
    need_chromium()
    async with node_on(tmp_path / "up", simulate="4x8xH100") as node:
        said = await look(node, tmp_path)
    sweep = said["page-sweep"]
    assert "lr-sweep: 10 replicas of 200 failed" in sweep
    assert "9 × code 3 ValueError: seed # diverged items 7, 30, 53" in sweep
    assert "1 × code 1 CUDA out of memory items 111" in sweep
    assert "moorage again lr-sweep --failed" in sweep
    assert "shout is healthy for " in said["page-service"]
    assert ", since 20" in said["page-service"]
    for name in ("page-past", "page-past-dark"):
        for words in (
            "64 GPUs there",
            "41 % granted",
            "29 % used",
            "71 % of what was granted",
            "Who waited",
            "vision",
            "most of all for: all GPUs",
        ):
            assert words in said[name], words
        assert said[name].index("vision") < said[name].index("speech")
    for name in NAMES:
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000, name


def test_the_pictures_of_the_three_questions_are_small() -> None:
    for name in NAMES:
        size = (PICTURES / f"{name}.png").stat().st_size
        assert size < PICTURE_BYTES_MAX, f"{name} has {size} bytes: python -m tests.system.cli.page_questions"
