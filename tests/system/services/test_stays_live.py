"""Jobs that stay, on a real scheduler, worker and server: they are ready, end, start again, and are found."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.request import urlopen

import pytest

from moorage.client import AsyncClient, JobFailed
from moorage.client.job import AsyncJob
from moorage.schemas.frames import Change
from tests.system.deploy.test_roles_live import everybody
from tests.system.services.members import FUNCTIONS

ANSWER_S: Final = 90.0
#: answers on its first port with the number of its attempt; asked for /die it ends with code 3
SERVER: Final = """
import http.server, os

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(3)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.environ['MOORAGE_ATTEMPT']} {os.environ['PORT_1']}".encode())

http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


async def get(address: str, path: str = "/") -> str:
    host, _, port = address.partition(",")[0].rpartition(":")
    assert host

    def read() -> str:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=ANSWER_S) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(read)


class Following:
    """The changes of one job, in their order."""

    def __init__(self, job: AsyncJob) -> None:
        self._changes = self._of(job)
        self.words: list[str] = []

    @staticmethod
    async def _of(job: AsyncJob) -> AsyncIterator[Change]:
        async for event in job.events():
            for change in event.changes:
                yield change

    async def until(self, word: str) -> Change:
        """The next change to this word."""
        async with asyncio.timeout(ANSWER_S):
            async for change in self._changes:
                self.words.append(change.state)
                if change.state == word:
                    return change
        raise AssertionError(f"it ended: {self.words}")


async def server(client: AsyncClient, **run: Any) -> AsyncJob:
    return await client.submit(
        {
            "run": {
                "argv": [sys.executable, "-c", SERVER], "ports": 2,
                "ready": {"http": "PORT/", "every_s": 1}, "restart": "on-failure", **run,
            }
        },
        job="server",
    )  # fmt: skip


@pytest.mark.slow
async def test_a_server_is_ready_is_found_by_its_address_and_starts_again() -> None:
    async with everybody() as made, made.client("submitter.acme") as acme:
        job = await server(acme)
        following = Following(job)
        address = (await following.until("RUNNING")).address
        ready = await following.until("READY")
        assert (ready.replica, ready.attempt, ready.by) == (0, 1, "worker")
        first, second = address.rpartition(":")[2].split(",")
        assert await get(address) == f"1 {second}"
        assert 20000 <= int(first) <= 29999
        [row] = (await acme._wire.answer("show", {"job": "server"})).data["replica_states"]
        assert (row["ready"], row["address"]) == (True, address)

        with pytest.raises(ConnectionError):
            await get(address, "/die")
        assert (await following.until("QUEUED")).code == 3
        address = (await following.until("RUNNING")).address
        assert (await following.until("READY")).attempt == 2
        assert (await get(address)).startswith("2 ")

        await made.restart("worker")  # the job lives on, and its next agent looks at it
        with pytest.raises(ConnectionError):
            await get(address, "/die")
        address = (await following.until("RUNNING")).address
        assert (await following.until("READY")).attempt == 3
        data = (await acme._wire.answer("show", {"job": "server"})).data
        assert (data["replica_states"][0]["restarts"], data["ready"]) == (2, 1)
        await job.cancel()
        await following.until("CANCELLED")


@pytest.mark.slow
async def test_what_never_is_ready_has_failed() -> None:
    async with everybody() as made, made.client("submitter.acme") as acme:
        job = await acme.submit(
            {"run": {"argv": ["sleep", "600"], "ports": 1, "ready": {"tcp": "PORT", "within_s": 0.3}}}
        )
        with pytest.raises(JobFailed) as failed:
            await job.result(wait=ANSWER_S)
        result = failed.value.result
        assert (result.state, result.code) == ("FAILED", -15)
        assert result.why.startswith("not-ready: nothing listens on port 2")
        assert result.why.endswith(", 0.3 s after its start")


@pytest.mark.slow
async def test_a_service_is_ready_once_it_takes_calls() -> None:
    async with everybody(calls=True) as made, made.client("submitter.acme") as acme:
        argv = [sys.executable, "-m", "moorage.cli", "serve", "functions:echo"]
        env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
        run = {"argv": argv, "cwd": str(FUNCTIONS.parent), "env": env, "ready": {"call": True}, "restart": "always"}
        job = await acme.submit({"run": run, "service": {"name": "echo"}})
        following = Following(job)
        await following.until("READY")
        assert await acme.call("echo", b"hello") == b"hello"
        await job.cancel()
        await following.until("CANCELLED")
        assert "NOT_READY" not in following.words
