"""What a running job uses of its GPU, from the driver's stub to its tenant: in `show`, in `ls`, and over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.system.live.one_gpu import one_gpu
from tests.waiting import until


@pytest.mark.slow
async def test_what_a_running_job_uses_is_seen_by_its_tenant_alone(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with one_gpu(nats_server, unique, tmp_path) as it:
        acme, board = it.acme, it.stub.boards[0]
        await acme.submit("busy", gpu={}, run={"argv": ["sleep", "600"]})
        await acme.reaches("busy", "RUNNING")
        board.set(used_mib=5000, more={"util": 87, "power": 350})

        async def used() -> list[dict[str, Any]]:
            return list((await acme.show("busy"))["replica_states"][0].get("use", []))

        async def shown() -> bool:
            return any(row["percent"] == 87 for row in await used())

        await until(shown, what="a renewal brings the reading")
        (row,) = await used()
        assert (row["index"], row["percent"], row["memory_total_mib"]) == (0, 87, 81559)
        assert row["memory_mib"] >= 5000
        (listed,) = (await acme.api("ls", {}))["data"]["jobs"]
        assert {key: listed["use"][key] for key in ("devices", "percent", "percent_min", "percent_max")} == {
            "devices": 1,
            "percent": 87,
            "percent_min": 87,
            "percent_max": 87,
        }

        async def over_time() -> bool:
            page = (await acme.api("use", {"job": "busy", "last_s": 20, "points": 20}))["data"]
            return [line for line in page["devices"][0]["percent"] if line is not None][-2:] == [87, 87]

        await until(over_time, what="two seconds of it")
        assert (await acme.api("use", {"job": "busy", "replica": 1}))["code"] == "invalid-argument"
        assert (await acme.api("use", {"job": "other"}))["code"] == "not-found"
        await acme.api("cancel", {"job": "busy"})
        await acme.reaches("busy", "CANCELLED")
        assert (await acme.api("use", {"job": "busy"}))["code"] == "failed-precondition"
        assert "use" not in (await acme.show("busy"))["replica_states"][0]
