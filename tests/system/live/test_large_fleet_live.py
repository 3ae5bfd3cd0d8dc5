"""A fleet that is larger than one message: whoever asks for it is answered, with all of it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from moorage.client import AsyncClient
from tests.servers import Server
from tests.system.live.scripted_worker import ScriptedWorker
from tests.system.live.stack import ANSWER_S, caller, stack

#: so many workers with so long a label have more bytes than the server takes in one message
WORKERS = 120
LABEL = "x" * 12_000


@pytest.mark.slow
async def test_a_fleet_that_is_larger_than_a_message_is_told_whole(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made, follows=False) as acme:
        await made.scheduler()
        await acme.leader()
        workers = [ScriptedWorker(acme.nc, made.subjects, f"w{number:03d}", 1) for number in range(WORKERS)]
        for worker in workers:
            worker.hello = msgspec.structs.replace(worker.hello, labels={"note": LABEL})
        await asyncio.gather(*(worker.join() for worker in workers))
        ids = [worker.worker for worker in workers]

        told = await acme.fleet()  # a bare caller has a part, and the name to go on behind
        assert 1 < len(told["workers"]) < WORKERS
        assert told["next"] == told["workers"][-1]["worker"]
        rows = told["workers"]
        while "next" in told:
            told = (await acme.admin("fleet", {"after": told["next"]}))["data"]
            rows += told["workers"]
        assert [row["worker"] for row in rows] == ids
        assert (await acme.admin("fleet", {"after": 3}))["field"] == "$.after"

        async with AsyncClient(nats_server.url, tenant="acme", prefix=unique, timeout=ANSWER_S) as client:
            whole = await client.fleet.show()  # the SDK puts them together
            assert [row.worker for row in whole.workers] == ids
            assert "next" not in whole.data
