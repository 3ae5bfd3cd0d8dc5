"""A leader whose machine starts no process more for it: it says so, answers what it can, and leads on."""

from __future__ import annotations

import resource

import pytest

from tests.servers import Server
from tests.system.live.stack import caller, request, stack
from tests.waiting import until


@pytest.mark.slow
async def test_a_leader_that_can_start_no_process_leads_on(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        settings = {"snapshot_records": 100.0, "heartbeat_s": 0.2}
        scheduler = await made.set_scheduler("one", settings, made.url, made.ledger_url)
        await acme.leader()
        await made.agent("worker", "1xH100", worker="w0")
        await acme.workers_up("w0")
        await acme.submit("runs", "sleep", "600")
        await acme.submit("waits")
        assert (await acme.api("plan", {"request": request(None)}))["kind"] == "answer"
        few, most = resource.prlimit(scheduler.pid, resource.RLIMIT_NOFILE)
        # its first descriptors are open for as long as it runs: no new one is below this
        resource.prlimit(scheduler.pid, resource.RLIMIT_NOFILE, (4, most))
        for number in range(100):  # records enough for a snapshot
            await acme.submit(f"j{number}")
        refused = await acme.api("plan", {"request": request(None)})
        assert (refused["code"], "no room for another process" in refused["message"]) == ("overloaded", True)
        assert (await acme.api("explain", {"job": "waits"}))["data"]["reason"] == "busy"
        # who follows a job is looked after meanwhile, every 2 s
        await until(lambda: "its process cannot be started" in scheduler.words(), 90, "a snapshot is due")
        assert scheduler.words().count("no forecast process can be started") == 1
        assert (await acme.fleet())["epoch"] == 1
        resource.prlimit(scheduler.pid, resource.RLIMIT_NOFILE, (few, most))
        assert (await acme.api("plan", {"request": request(None)}))["kind"] == "answer"
        assert "Traceback" not in scheduler.words()
