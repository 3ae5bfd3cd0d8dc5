"""The protocol page is enough for a worker, too: one that speaks JSON alone runs jobs, also under the next leader."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.system.live.plain_worker import PlainWorker
from tests.system.live.stack import QUICK, caller, request, stack

WORKER: Final = Path(__file__).with_name("plain_worker.py")


def test_the_worker_knows_nothing_of_ours() -> None:
    for node in ast.walk(ast.parse(WORKER.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert all(name.split(".")[0] in {*sys.stdlib_module_names, "nats"} for name in names), names


@pytest.mark.slow
async def test_a_worker_that_joined_in_json_gets_every_frame_in_json(nats_server: EmbeddedServer, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as one:
        scheduler = await made.scheduler(config=QUICK)
        await one.leader()
        async with PlainWorker(made.url, unique, "w1") as worker:
            await one.submit("plain", "echo", "hello")
            await one.reaches("plain", "SUCCEEDED")
            page = (await one.api("logs", {"job": "plain"}))["data"]
            assert (page["text"], page["over"], page["worker"]) == ("echo hello", True, "w1")
            await one.submit("gang", replicas=1, gpu={"scheduling": "gang"})
            await one.reaches("gang", "SUCCEEDED")
            await one.submit("long", "wait")
            await one.reaches("long", "RUNNING")

            await scheduler.kill()  # the next leader has the form from the ledger
            await made.scheduler(config=QUICK)
            await one.leader(epoch=2)
            await one.api("cancel", {"job": "long"})
            await one.reaches("long", "CANCELLED")
            body = msgspec.msgpack.encode(request("packed", "echo", "again"))
            await one.queue("submit", body)
            await one.reaches("packed", "SUCCEEDED")
            assert worker.requests[-1]["run"]["argv"] == ["echo", "again"]
            page = (await one.api("logs", {"job": "packed"}))["data"]
            assert page["text"] == "echo again"
        assert [row["state"] for row in (await one.fleet())["workers"]] != ["up"]
