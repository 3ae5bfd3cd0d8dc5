"""Drivers in the agent itself give what runs another time limit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from moorage.client import AsyncClient
from moorage.testing import Ran, SimFleet, SimulatedClock, Task
from moorage.worker.drivers.process.driver import ProcessDriver
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.supervisor.protocol import TAKES
from tests.levels import know_next

if TYPE_CHECKING:
    from moorage.worker.supervisor.client import Supervised


@pytest.mark.parametrize(("limits", "lasted_s"), [(("1h", "+1h"), 7_200), (("1h", "-30m"), 1_800), (("1h",), 3_600)])
def test_the_simulated_driver_ends_at_the_newest_limit(
    limits: tuple[str, ...], lasted_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_next(monkeypatch)

    async def body() -> None:
        async with SimFleet("1xH100", script=_hangs) as fleet, AsyncClient(transport=fleet) as client:
            job = await client.submit(["x"], gpu=1, limit=limits[0])
            await asyncio.sleep(60)
            for limit in limits[1:]:
                assert (await job.change(limit=limit)).relimited
            await asyncio.sleep(lasted_s - 65)
            assert (await job.show()).state == "RUNNING"
            await asyncio.sleep(20)
            assert (await job.show()).state == "TIMED_OUT"

    SimulatedClock().run(body())


def _hangs(_: Task) -> Any:
    return Ran(seconds=1_000_000)


def test_a_supervisor_of_an_earlier_release_is_asked_for_neither(tmp_path: Path) -> None:
    link = SupervisorLink(tmp_path)
    link._supervised = cast("Supervised", SimpleNamespace(takes=()))
    assert not link.here(ProcessDriver.capabilities).relimits
    link._supervised = cast("Supervised", SimpleNamespace(takes=TAKES))
    assert link.here(ProcessDriver.capabilities) == ProcessDriver.capabilities
