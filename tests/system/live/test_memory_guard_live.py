"""The guard and the levels through everything: a real scheduler, worker and jobs, over stubs of NVIDIA's libraries."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.system.live.one_gpu import one_gpu
from tests.waiting import until


@pytest.mark.slow
async def test_an_offender_fails_its_neighbour_goes_on_and_a_fallen_level_is_told(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with one_gpu(nats_server, unique, tmp_path) as it:
        acme, stub = it.acme, it.stub

        def asks(job: str, mib: int) -> dict[str, Any]:
            gpu = {"sharing": "time-slice", "share": {"memory_mib": 4000}, "enforce": {"memory": "guarded"}}
            return {"gpu": gpu, "run": it.holding(job, mib)}

        async def enforced(job: str) -> str:
            return str((await acme.show(job))["replica_states"][0].get("enforced", {}).get("memory", ""))

        await acme.submit("fits", **asks("fits", 3000))
        await until((tmp_path / "fits").exists, what="the neighbour holds its memory")
        await acme.submit("greedy", **asks("greedy", 9000))
        await until((tmp_path / "greedy").exists, what="the offender holds its memory")
        began_s = time.monotonic()
        shown = await acme.reaches("greedy", "FAILED")
        print(f"the offender was over {time.monotonic() - began_s:.1f} s after it held the memory")
        assert shown["why"] == "over-memory: it holds 9300 MiB of GPU 0, 4000 are granted"
        assert (await acme.state("fits"), await enforced("fits")) == ("RUNNING", "guarded")

        sub = await acme.nc.subscribe(acme.subjects.event("acme", "fits"))
        stub.boards[0].set(errors={"processes": 999})
        await until(lambda: _is(enforced("fits"), "advisory"), what="the level falls")
        event = msgspec.json.decode((await sub.next_msg(60)).data)
        assert event["enforced"] == {"memory": "advisory", "compute": "advisory"}
        assert await acme.state("fits") == "RUNNING"
        await acme.submit("next", **asks("next", 100))
        assert (await acme.api("explain", {"job": "next"}))["data"]["reason"] == "enforce"
        await acme.api("cancel", {"job": "next"})
        await acme.api("cancel", {"job": "fits"})
        await acme.reaches("fits", "CANCELLED")


async def _is(found: Any, wanted: str) -> bool:
    return bool(await found == wanted)
