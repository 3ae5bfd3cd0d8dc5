"""Schedulers of one fleet with other numbers, as while a setting is changed one by one."""

from __future__ import annotations

import pytest

from tests.servers import Server
from tests.system.live.stack import BRIEF, QUICK, caller, is_alive, stack
from tests.waiting import until

pytestmark = pytest.mark.any_server

#: a lease far longer than the next leader's, whose settings would have a worker lost after 6 s
LONG = {**QUICK, "lease_s": 12.0, "margin_s": 2.0}


@pytest.mark.slow
async def test_a_shorter_lease_of_the_next_leader_places_nothing_beside_what_still_runs(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        first = await made.scheduler(config=LONG)
        await acme.leader()
        agents = {worker: await made.agent(worker, "1xH100", worker=worker) for worker in ("w1", "w2")}
        await acme.workers_up(*agents)
        pids = made.folder / "pids"
        script = f"echo $$ >> {pids}; exec sleep 600"
        await acme.submit("once", "/bin/sh", "-c", script, run={"grace_s": 0.2})
        runs = (await acme.reaches("once", "RUNNING"))["changes"][-1]["worker"]
        await until(lambda: pids.exists() and pids.read_text().endswith("\n"), what="the first attempt")
        await first.kill()
        await made.scheduler(config=BRIEF)
        await acme.leader(2)
        agents[runs].stop()  # its supervisor goes on, and ends the job once the lease that it was told is over

        async def again() -> bool:
            changes = (await acme.show("once"))["changes"]
            return any(change["attempt"] == 2 and change["state"] == "PLACED" for change in changes)

        await until(again, what="the next attempt")
        assert not is_alive(int(pids.read_text().split()[0]))
        agents[runs].wake()
