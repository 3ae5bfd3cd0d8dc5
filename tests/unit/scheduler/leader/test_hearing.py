"""For how long a leader could not hear its workers: by a cut connection, by a backlog, by what is not decoded yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from moorage.bus.connection import Connection
from moorage.scheduler.leader.hearing import BEHIND_S, ROUND_TRIP_EVERY_S, Hearing
from moorage.scheduler.leader.intake import Intake
from moorage.testing.bus.bus import SimulatedBus, SimulatedClock, SimulatedConnection


class Frames:
    """What the intake counts of workers' frames."""

    frames_came = frames_taken = 0


Scene = Callable[[Hearing, SimulatedConnection, Frames, Callable[[], int]], Awaitable[None]]


def played(scene: Scene) -> None:
    clock = SimulatedClock()

    async def main() -> None:
        link, frames = SimulatedBus().connect("leader"), Frames()

        def now_ms() -> int:
            return int(clock.now_s * 1000)

        hearing = Hearing(cast(Connection, link), cast(Intake, frames), now_ms)
        running = asyncio.ensure_future(hearing.run())
        await asyncio.sleep(10)
        assert hearing.take_unheard(now_ms()) == 0
        await scene(hearing, link, frames, now_ms)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    clock.run(main())


def test_a_short_cut_counts_from_the_last_round_trip_before_it_to_the_first_behind_it() -> None:
    async def scene(hearing: Hearing, link: SimulatedConnection, _: Frames, now_ms: Callable[[], int]) -> None:
        link.lose()
        await asyncio.sleep(BEHIND_S / 2)
        link.restore()
        await asyncio.sleep(2 * ROUND_TRIP_EVERY_S)
        unheard_ms = hearing.take_unheard(now_ms())
        assert BEHIND_S * 500 <= unheard_ms <= BEHIND_S * 500 + 2 * ROUND_TRIP_EVERY_S * 1000
        assert hearing.take_unheard(now_ms()) == 0, "it counts once"

    played(scene)


def test_a_long_cut_counts_while_it_lasts_and_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(hearing: Hearing, link: SimulatedConnection, _: Frames, now_ms: Callable[[], int]) -> None:
        link.lose()
        counted_ms = 0
        for _second in range(60):
            await asyncio.sleep(1)
            counted_ms += hearing.take_unheard(now_ms())
        assert 60_000 <= counted_ms <= 60_000 + ROUND_TRIP_EVERY_S * 1000
        link.restore()
        await asyncio.sleep(2 * ROUND_TRIP_EVERY_S)
        counted_ms += hearing.take_unheard(now_ms())
        assert counted_ms <= 60_000 + 3 * ROUND_TRIP_EVERY_S * 1000
        await asyncio.sleep(60)
        assert hearing.take_unheard(now_ms()) == 0

    played(scene)
    behind, again = (record.message for record in caplog.records if record.name == "moorage.scheduler")
    assert "no lease runs out" in behind
    assert "heard again" in again


def test_frames_that_were_read_and_not_decoded_are_not_heard() -> None:
    async def scene(hearing: Hearing, _: SimulatedConnection, frames: Frames, now_ms: Callable[[], int]) -> None:
        frames.frames_came = 1
        await asyncio.sleep(30)
        assert hearing.take_unheard(now_ms()) >= 29_000
        frames.frames_taken = 1
        await asyncio.sleep(2 * ROUND_TRIP_EVERY_S)
        assert hearing.take_unheard(now_ms()) == 0, "they were late, and are heard now"

    played(scene)
