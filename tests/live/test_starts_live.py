"""Hosts that cannot start jobs, with real agents: a queue loses nothing to one, and what no host can start ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.live.stack import ANSWER_S, caller, stack
from tests.servers import Server
from tests.waiting import until


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 2])
async def test_one_host_without_a_secret_fails_no_job_of_a_queue(
    nats_server: Server, unique: str, tmp_path: Path, retries: int
) -> None:
    """19 of 20 failed there in seconds, and with two retries 17, since each retry went to the same host."""
    kept = tmp_path / "secrets"
    kept.mkdir(mode=0o700)
    (kept / "token").write_text("hf_abc")
    (kept / "token").chmod(0o600)
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler()
        await made.agent("bad", "1xT4", worker="bad")
        await made.agent("keeper", "1xT4", worker="keeper", secrets_dir=str(kept))
        await acme.leader()
        await acme.workers_up("bad", "keeper")
        run: dict[str, Any] = {"argv": ["sh", "-c", 'test -n "$T"'], "env": {"T": {"secret": "token"}}}
        jobs = [f"j{number}" for number in range(12)]
        for job in jobs:
            await acme.submit(job, run=run, retries=retries)
        for job in jobs:
            shown = await acme.reaches(job, "SUCCEEDED")
            assert shown["worker"] == "keeper"

        async def closed() -> dict[str, Any] | None:
            fleet = (await acme.fleet())["workers"]
            return next((row for row in fleet if row["worker"] == "bad" and row["state"] == "starts-fail"), None)

        row = await until(closed, ANSWER_S, "the host that is closed")
        assert row["starts_fail"]["why"].startswith("not-here: secret 'token': ")


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
