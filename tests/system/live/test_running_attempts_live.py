"""What runs gets another time limit, and signals, over the real server and on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.client import AsyncClient, Rejected
from tests.servers import Server
from tests.system.live.stack import QUICK, caller, stack, unique_prefix
from tests.waiting import until

WORKER = "w1"
#: writes a line for each SIGUSR1, and has a child that no signal may end
SCRIPT = "trap 'echo saved >>{out}' USR1; sleep 600 & echo up >>{out}; while :; do wait; done"
NEXT_LEVEL: dict[str, float] = {"moorage.scheduler.core.ledger.records.FORMAT": 2}


async def test_a_running_job_is_signalled_and_its_time_is_changed(nats_server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def lines() -> list[str]:
        return out.read_text().split() if out.exists() else []

    async with stack(nats_server, unique_prefix()) as made, caller(made) as asking:
        await made.set_scheduler("s", QUICK, made.url, made.ledger_url, NEXT_LEVEL)
        await made.agent("w", "1xH100", worker=WORKER)
        await asking.leader()
        await asking.workers_up(WORKER)
        async with AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix) as client:
            job = await client.submit(["sh", "-c", SCRIPT.format(out=out)], gpu=1, job="j", limit="1h", grace_s=0)
            await until(lambda: lines() == ["up"], 60, "it runs")
            await asking.reaches("j", "RUNNING")
            sent = await job.signal("usr1", by="ana")
            assert (sent.signal, sent.replicas) == ("SIGUSR1", [(0, WORKER)])
            await until(lambda: lines() == ["up", "saved"], 60, "its handler has run")
            with pytest.raises(Rejected, match="signal must be one of"):
                await job.signal("KILL")

            assert (await job.change(limit="+1h")).timeout_s == 7200
            assert (await client.admin.time_limit("j", "-30m")).timeout_s == 5400
            with pytest.raises(Rejected, match="no more than -2h"):
                await job.change(limit="-2h")
            changed = await job.change(limit=1, running=True)
            assert (changed.timeout_s, changed.relimited) == (1, True)
            ended = await job.show()

            async def is_over() -> bool:
                nonlocal ended
                ended = await job.show()
                return ended.state == "TIMED_OUT"

            await until(is_over, 60, "it ends by its new limit")
            assert [row.why for row in ended.changes if row.state in ("CHANGED", "EXEC")] == [
                "signal SIGUSR1", "running timeout_s 7200", "running timeout_s 5400", "running timeout_s 1",
            ]  # fmt: skip
