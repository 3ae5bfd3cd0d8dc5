"""Some of the real worlds of `tests/release/breaks`: calls through breaks of servers and links."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.release.breaks.real import play


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(7, marks=pytest.mark.slow)]
)
async def test_calls_on_real_servers_are_answered_behind_a_break_and_none_of_the_sdk_hangs(
    seed: int, tmp_path: Path
) -> None:
    world = await asyncio.to_thread(play, seed, tmp_path)
    assert world.wrong == []
    assert world.kinds["sdk right"] > 0
