"""Hosts that cannot start jobs, with real agents: a queue loses nothing to one, and what no host can start ends."""

from __future__ import annotations

import pytest

from tests.servers import Server
from tests.system.live.stack import caller, stack


@pytest.mark.slow
async def test_what_no_host_can_start_ends_with_its_reason_and_the_hosts(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler()
        await made.agent("a", "1xT4", worker="a")
        await made.agent("b", "1xT4", worker="b")
        await acme.leader()
        await acme.workers_up("a", "b")
        for job, run, code, why in (
            ("folder", {"argv": ["true"], "cwd": "/no/such"}, 126, "not-here: no folder /no/such (refused by "),
            ("program", {"argv": ["nosuch"]}, 127, "not-here: no program nosuch in PATH"),
            ("own", {"argv": ["./nosuch"]}, 127, "cannot-run: no ./nosuch in "),
        ):
            await acme.submit(job, run=run, retries=5)
            last = (await acme.reaches(job, "FAILED"))["changes"][-1]
            assert (last["code"], last["why"][: len(why)]) == (code, why), last
        # no other user may enter the folder of these agents' jobs, which they say as they join
        answer = await acme.submit("user", run={"argv": ["true"], "user": "daemon"})
        assert (answer["kind"], answer["code"]) == ("error", "failed-precondition")
        assert "may run its jobs as another user" in answer["message"]
        await acme.all_free()
