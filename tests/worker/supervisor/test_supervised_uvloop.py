"""The supervisor's client under uvloop, whose transports and pipes are not asyncio's."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from moorage.worker.supervisor.client import Supervised
from moorage.worker.supervisor.protocol import Ended, StartMember

uvloop = pytest.importorskip("uvloop")


def test_a_supervisor_is_started_and_runs_a_member() -> None:
    async def main(state: Path) -> None:
        supervised = await asyncio.wait_for(Supervised.connect(state), 30)
        try:
            await supervised.start([StartMember(key="j", argv=("/bin/sh", "-c", "exit 3"), env={})])
            async with asyncio.timeout(60):
                ended: list[Ended] = []
                while not ended:
                    ended = [event for event in await supervised.next_events() if isinstance(event, Ended)]
            assert [(each.key, each.exit_code) for each in ended] == [("j", 3)]
        finally:
            await supervised.shutdown(0.0)

    with (
        tempfile.TemporaryDirectory(prefix="moorage-uvloop-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(main(Path(folder) / "state"))
