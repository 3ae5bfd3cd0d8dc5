"""Gangs of no fixed size, and of groups, on real processes: each rank knows its number and its address."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moorage.client import AsyncClient, GpuSpec
from tests.servers import Server
from tests.system.live.stack import QUICK, caller, stack, unique_prefix

NEXT_LEVEL: dict[str, float] = {"moorage.scheduler.core.ledger.records.FORMAT": 2}
SCRIPT = "echo $RANK of $WORLD_SIZE, $PET_NNODES at $MASTER_ADDR >>{out}"


async def test_each_rank_knows_with_how_many_it_started(nats_server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with stack(nats_server, unique_prefix()) as made, caller(made) as asking:
        await made.set_scheduler("s", QUICK, made.url, made.ledger_url, NEXT_LEVEL)
        await made.agent("w", "3xH100", worker="w1")
        await asking.leader()
        await asking.workers_up("w1")
        async with AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix) as client:
            job = await client.submit(
                ["sh", "-c", SCRIPT.format(out=out)], gpu=GpuSpec(scheduling="gang"), replicas={"min": 2, "max": 8}
            )
            await job.result()
            said = sorted(line.partition(" at ")[0] for line in out.read_text().splitlines())
            assert said == [f"{rank} of 3, 2:3" for rank in range(3)]
            groups: list[Mapping[str, Any]] = [
                {"name": "trainer", "replicas": 2, "gpu": {"model": "H100"}},
                {"name": "head", "argv": ["sh", "-c", f"echo head sees $MOORAGE_GROUP_TRAINER_ADDRESS >>{out}"]},
            ]
            out.unlink()
            job = await client.submit(["sh", "-c", SCRIPT.format(out=out)], groups=groups)
            await job.result()
            lines = sorted(out.read_text().splitlines())
            address = lines[-1].removeprefix("head sees ").partition(":")[0]
            assert address
            assert lines[:2] == [f"{rank} of 2, 2 at {address}" for rank in range(2)]
