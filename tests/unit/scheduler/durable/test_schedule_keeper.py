"""The stream of schedules, kept like the ledger on the session's nats-server."""

from __future__ import annotations

import pytest

from moorage.bus.connection import connect
from moorage.scheduler.durable import schedule_keeper
from moorage.scheduler.durable.schedule_stream import ScheduleStream
from moorage.scheduler.pacing.gate import Gate
from moorage.schemas.subjects import Subjects
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.scheduled import offer_ask


async def test_runs_are_due_from_the_record_of_a_schedule_on_and_not_only_once_the_server_has_it(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that goes away between the two may not publish the first run: the leader then knows that it was due."""
    wall_ms = 1_000
    monkeypatch.setattr(schedule_keeper, "_wall_ms", lambda: wall_ms)
    drive = Driving()
    offer_ask(drive, "add", "nightly", "t")
    drive.tick()
    async with await connect(nats_url, "test") as world:
        stream = ScheduleStream(world, Subjects(unique), 1)
        keeper = schedule_keeper.ScheduleKeeper(stream, drive.engine, lambda: None, Gate())
        keeper.follow()
        wall_ms = 61_000
        await keeper._keep()
        assert [wish.since_ms for wish in (await stream.wishes()).values()] == [1_000]
