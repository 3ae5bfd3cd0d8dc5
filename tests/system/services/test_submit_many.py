"""Calls that wait on disk, with the rights of a site and its keys: a job calls a service, and keeps its answers."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.errors import BusError
from moorage.client import AsyncClient, ItemFailed, NotFound, NotPermitted, Rejected
from moorage.client.job import AsyncJob
from tests.system.deploy.test_roles_live import Everybody, everybody
from tests.system.services.members import FUNCTIONS, Gate
from tests.waiting import until

ANSWER_S = 90.0


async def serving(client: AsyncClient, function: str) -> AsyncJob:
    """Two members, which come back when they die."""
    argv = [sys.executable, "-m", "moorage.cli", "serve", f"functions:{function}"]
    env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    run = {"argv": argv, "cwd": str(FUNCTIONS.parent), "env": env, "ready": {"call": True}, "restart": "always"}
    body = {"run": run, "service": {"name": function, "concurrency": 4}, "replicas": 2}
    return await client.submit(body, job=f"s-{function}")


@contextlib.asynccontextmanager
async def site(*, key: bool = True, **more: Any) -> AsyncIterator[tuple[Everybody, AsyncClient]]:
    async with (
        everybody(calls=True, callers=("acme.jobs",) if key else (), **more) as made,
        made.client("submitter.acme") as acme,
    ):

        async def has_buckets() -> bool:
            with contextlib.suppress(NotPermitted):
                return bool(await acme.send_files([__file__]))
            return False

        await until(has_buckets, ANSWER_S, "the tenant's buckets")
        yield made, acme


@pytest.mark.slow
async def test_a_job_calls_for_each_item_with_a_key_that_does_nothing_else() -> None:
    async with site() as (made, acme):
        await serving(acme, "mixed")
        gate = Gate(made.folder)
        items: list[Any] = [0, None, "zwölf", {"a": [1, 2.5]}, "fail", "bytes", os.fsdecode(gate.data), *range(7, 40)]
        job = await acme.service("mixed").submit_many(items, job="many", per_replica=10)
        await gate.runs()
        key, *_ = [path for path in (made.folder / "w1").rglob("*.key") if "many.0" in path.name]
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert key.read_bytes().strip() == (made.site.folder / "keys/caller.acme.jobs.nk").read_bytes().strip()
        gate.open()
        answers = [each async for each in job.answers(wait=ANSWER_S, errors="return")]
        failed = answers[4]
        answers[4] = answers[6] = None
        assert answers == [0, b"", "zwölf", {"a": [1, 2.5]}, None, b"\x00\xff", None, *range(7, 40)]
        assert isinstance(failed, ItemFailed)
        assert (failed.item, failed.replica, failed.kind, str(failed).partition("\n")[0].rpartition(": ")[2]) == (
            4,
            0,
            "ValueError",
            "no such",
        )
        ended = {change.replica: change.state for change in (await job.show()).changes}
        assert {number: ended[number] for number in range(4)} == {0: "FAILED"} | dict.fromkeys((1, 2, 3), "SUCCEEDED")
        again = await job.again(failed=True, job="more")
        assert [number async for number, _ in again.answers_as_completed(ANSWER_S, errors="return")] != []
        assert (await again.show()).asked["indices"] == "0"
        await until(lambda: not key.exists(), ANSWER_S, "the key is gone with its attempt")


@pytest.mark.slow
async def test_its_calls_outlive_caller_members_and_server() -> None:
    async with site() as (made, acme):
        await serving(acme, "aheld")
        gate = Gate(made.folder)
        items = [os.fsdecode(gate.data)] * 6
        async with made.client("submitter.acme") as away:
            await away.service("aheld").submit_many(items, job="many", per_replica=3)
        await gate.runs(6)
        for pid in _processes(b"\0serve\0functions:aheld\0"):
            os.kill(pid, signal.SIGKILL)
        await gate.runs(12)
        made.site.stop(0)
        made.site.start(0)
        gate.open()

        async def is_over() -> bool:
            with contextlib.suppress(BusError):
                return (await acme.job("many").show()).state == "SUCCEEDED"
            return False

        await until(is_over, ANSWER_S, "the job is over")
        assert [each async for each in acme.job("many").answers()] == items


@pytest.mark.slow
async def test_a_worker_without_the_key_says_what_is_missing_and_a_wrong_item_is_refused_at_once() -> None:
    async with site(key=False) as (_, acme):
        with pytest.raises(NotFound, match="no live job of tenant acme has the service echo"):
            await acme.service("echo").submit_many(["x"])
        await serving(acme, "echo")
        job = await acme.service("echo").submit_many(["x"], retries_on_lost=0)
        [failed] = [each async for each in job.answers(wait=ANSWER_S, errors="return")]
        assert "secret 'callers/acme'" in str(failed)
        for items, said in ((["a", b"b"], "item 1 is bytes"), ("abc", "a list of values"), ([], "no items")):
            with pytest.raises(Rejected, match=said):
                await acme.service("echo").submit_many(items)
        with pytest.raises(Rejected, match="a call needs time"):
            await acme.service("echo").submit_many(["x"], timeout=0)
        with pytest.raises(Rejected, match="per_replica must be at least 1"):
            await acme.service("echo").submit_many(["x"], per_replica=0)
        with pytest.raises(Rejected, match="cannot call services"):
            await acme.submit({"run": {"driver": "noop", "argv": ["x"], "calls": True}})
        with pytest.raises(Rejected, match="none to call others"):
            await acme.submit({"run": {"argv": ["x"], "calls": True}, "service": {"name": "x"}})


@pytest.mark.slow
@pytest.mark.parametrize("auth", ["nkey", "mtls"])
async def test_a_clients_own_program_calls_in_a_job_and_submits_nothing(auth: str) -> None:
    program = (
        "from moorage.client import Client, NotPermitted\n"
        "with Client() as moorage:\n"
        "    print(moorage.tenant, moorage.call('echo', 'hello', timeout=60))\n"
        "    try:\n"
        "        moorage.submit(['true'])\n"
        "    except NotPermitted:\n"
        "        print('may not submit')\n"
    )
    async with site(auth=auth) as (_, acme):
        await serving(acme, "echo")
        env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
        result = await acme.run([sys.executable, "-c", program], env=env, calls=True, wait=ANSWER_S)
        assert result.stdout.splitlines() == ["acme hello", "may not submit"]


def _processes(words: bytes) -> list[int]:
    found: list[int] = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and words in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found
