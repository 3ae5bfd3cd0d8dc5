"""A real leader that records: jobs from submit to end, a takeover, and every decision comes out byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.cli.framework.exit_codes import EXIT_PIPE_CLOSED
from moorage.client.client import AsyncClient
from moorage.scheduler.ledger.recording import replay
from tests.servers import Server
from tests.system.cli.node import moorage, unread
from tests.system.live.stack import ANSWER_S, caller, stack


@pytest.mark.slow
async def test_decisions_of_a_real_leader_come_out_byte_for_byte(
    nats_server: Server, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "leader.rec"
    monkeypatch.setenv("MOORAGE_RECORD", str(path))
    async with stack(nats_server, unique) as made:
        first = await made.scheduler()
        await made.agent("worker", "2x4xH100")
        async with caller(made, "acme") as one:
            await one.leader()
            await one.workers_up("sim-0000", "sim-0001")
            async with AsyncClient(nats_server.url, tenant="acme", prefix=unique, timeout=ANSWER_S) as client:
                many = [{"gpu": {"count": 1 + number % 4}, "run": {"argv": ["true"]}} for number in range(40)]
                await client.wait(await client.submit_many(many), "120s")
                gang = await client.submit(["true"], gpu="3x2xH100", priority=70)
                await client.wait([gang], "120s")
                await first.terminate()
                second = await made.scheduler()
                await one.leader()
                await client.wait([await client.submit(["true"], gpu="2xH100")], "120s")
                await second.terminate()
    found = list(replay(path))
    assert len(found) > 20
    assert {one.state.epoch for one in found} == {1, 2}
    assert all(one.same for one in found)
    ran = await moorage("replay", str(path), "--job", f"acme/{gang.job}")
    assert ran.code == 0, ran.err
    assert len(ran.rows) == 3
    assert "byte for byte" in ran.err
    gone = await unread("replay", str(path))
    assert (gone.code, gone.err) == (EXIT_PIPE_CLOSED, "")
