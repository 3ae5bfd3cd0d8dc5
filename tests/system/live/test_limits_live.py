"""A tenant's limits over a real server: the durable queue waits where the endpoint refuses, across a killed leader."""

from __future__ import annotations

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.system.live.stack import caller, request, stack
from tests.waiting import until

NAMES = [f"q{number}" for number in range(6)]


@pytest.mark.slow
async def test_the_durable_queue_waits_at_the_limit_and_loses_nothing(nats_server: EmbeddedServer, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        leader = await made.scheduler()
        await acme.leader()
        limit = {"tenant": "acme", "jobs": 2, "gpus": 1, "by": "ana"}
        assert (await acme.admin("limit", limit))["changed"]
        for name in NAMES:
            await acme.queue("submit", request(name, "sleep", "600"))

        async def live() -> list[str]:
            jobs = (await acme.api("ls", {}))["data"]["jobs"]
            return sorted(row["job"] for row in jobs if row["state"] not in ("CANCELLED", "REJECTED"))

        async def two() -> bool:
            return len(await live()) == 2

        await until(two, what="as many jobs as may be")
        refused = await acme.api("submit", request("direct", "true"))
        assert (refused["code"], refused["found"]) == ("failed-precondition", "2")
        await leader.kill()
        await made.scheduler()
        await acme.leader(2)
        await made.agent("state", "4xH100", worker="w1")
        await acme.workers_up("w1")
        seen: set[str] = set()
        while len(seen) < len(NAMES):
            now = await until(live, what="the next of them")
            assert len(now) <= 2
            tenant = next(row for row in (await acme.admin("tenants"))["data"]["tenants"] if row["tenant"] == "acme")
            assert tenant.get("gpus", 0) <= 1
            for name in now:
                seen.add(name)
                await acme.api("cancel", {"job": name})
        assert seen == set(NAMES)
        assert not (await acme.admin("limit", limit))["changed"], "the limit outlived its leader"
