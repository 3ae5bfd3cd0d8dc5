"""Schedules over ten minutes of kills of a real nats-server: each run once."""

from __future__ import annotations

from typing import Final

import pytest

from tests.release.chaos.schedules import run

SECONDS: Final = 600.0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
async def test_each_run_of_a_schedule_is_made_once_while_its_server_is_killed() -> None:
    assert await run(SECONDS, seed=59) == []
