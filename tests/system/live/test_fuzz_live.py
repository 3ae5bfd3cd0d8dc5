"""A bounded round of `python -m tests.release.fuzz.live` at running processes: see tests/release/fuzz/live.py."""

from __future__ import annotations

import pytest

from tests.release.fuzz.live import assault
from tests.servers import Server


@pytest.mark.slow
async def test_nothing_dies_of_frames_that_are_nearly_right(nats_server: Server) -> None:
    outcome = await assault(nats_server, 3_000, 1)
    assert outcome.broke == []
    assert outcome.sent.total() >= 3_000
    assert outcome.answers > 0
