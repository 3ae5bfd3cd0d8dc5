"""Who stands by: schedulers that went make room for those that live."""

from __future__ import annotations

import asyncio
import time

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.questions.standing import HEARD_S, KNOWN_MAX, SAY_S, Standings
from moorage.schemas.codec import encode
from moorage.schemas.frames import Standing
from moorage.schemas.release import RELEASE
from moorage.testing.bus.bus import SimulatedBus
from tests.scenes import in_virtual_time
from tests.unit.scheduler.driving import SUBJECTS


@in_virtual_time
async def test_live_standby_schedulers_are_known_however_many_have_left() -> None:
    bus = SimulatedBus()
    others, standings = bus.connect("others"), Standings(bus.connect("scheduler"), SUBJECTS, "me")
    await standings.listen()

    async def say(name: str) -> None:
        await others.send([(SUBJECTS.standing, encode(Standing(name, RELEASE, 1, 0, False)), "")])
        await asyncio.sleep(0.01)

    for number in range(KNOWN_MAX + 1):
        await say(f"gone-{number:02d}")
    assert len(standings.lately()) == KNOWN_MAX
    await asyncio.sleep(HEARD_S + 1)
    await say("lives")
    assert [said.scheduler for said in standings.lately()] == ["lives"]


@in_virtual_time
async def test_a_leader_names_whose_clock_is_wrong_by_more_than_an_announcement_may_come_late(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = SimulatedBus()
    ours, others = Standings(bus.connect("a"), SUBJECTS, "a"), bus.connect("others")
    await ours.listen()
    announcing = asyncio.create_task(ours.announce(lambda: (1, True)))
    off_s = {"ahead": (3_600, 3_600, 3_600), "behind": (-60, -60, -60), "late": (0, -60, 0), "old": (0, 0, 0)}
    for each in range(3):
        for name, by_s in off_s.items():
            time_ms = 0 if name == "old" else int((time.time() + by_s[each]) * 1000)
            said = Standing(name, RELEASE, 1, 0, time_ms=time_ms)
            await others.send([(SUBJECTS.standing, encode(said), "")])
        await asyncio.sleep(2 * SAY_S)
    assert [record.getMessage() for record in caplog.records] == [
        "the clock of standby ahead is 3600 s ahead of this leader's: run chrony or ntpd on both hosts",
        "the clock of standby behind is 60 s behind this leader's: run chrony or ntpd on both hosts",
    ]
    rows = {row.scheduler: round(row.clock_off_s) for row in ours.rows()}
    assert rows == {"a": 0, "ahead": 3_600, "behind": -60, "late": 0, "old": 0}
    announcing.cancel()


@in_virtual_time
async def test_a_leader_names_a_standby_with_other_settings(caplog: pytest.LogCaptureFixture) -> None:
    """Order and limits changed with each takeover, and nobody said why."""
    bus, leads = SimulatedBus(), True
    ours = Standings(bus.connect("a"), SUBJECTS, "a", Config(ranker="pack", reserve_after=60.0))
    await ours.listen()
    same, other = bus.connect("b"), bus.connect("c")
    speaking = [
        asyncio.create_task(ours.announce(lambda: (1, leads))),
        asyncio.create_task(
            Standings(same, SUBJECTS, "b", Config(ranker="pack", reserve_after=60.0)).announce(lambda: (1, False))
        ),
        asyncio.create_task(Standings(other, SUBJECTS, "c", Config(ranker="pack")).announce(lambda: (1, False))),
    ]
    await asyncio.sleep(5 * SAY_S)
    told = [record.getMessage() for record in caplog.records]
    text = "standby c has other settings, which would hold after a takeover: reserve_after = 30.0 (the leader: 60.0)"
    assert told == [text], "once, and of nobody else"
    rows = {row.scheduler: row.settings for row in ours.rows()}
    assert (rows["a"], rows["c"]) == ({"ranker": "pack", "reserve_after": 60.0}, {"ranker": "pack"})
    leads = False
    for task in speaking:
        task.cancel()
