"""Who stands by: schedulers that went make room for those that live."""

from __future__ import annotations

import asyncio

from moorage.bus.simulated import SimulatedBus
from moorage.bus.simulated_clock import SimulatedClock
from moorage.scheduler.standing import HEARD_S, KNOWN_MAX, Standings
from moorage.schemas.codec import encode
from moorage.schemas.frames import Standing
from moorage.schemas.release import RELEASE
from tests.scheduler.driving import SUBJECTS


def test_whoever_lives_is_known_however_many_went() -> None:
    async def play() -> None:
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

    SimulatedClock().run(play())
