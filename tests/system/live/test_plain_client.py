"""The protocol page is enough: a client that imports nothing of ours submits, follows, explains, cancels, queues."""

from __future__ import annotations

import ast
import asyncio
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.system.live.plain_client import Plain
from tests.system.live.stack import caller, stack

LINES_MAX: Final = 60
CLIENT: Final = Path(__file__).with_name("plain_client.py")


def test_the_client_is_short_and_knows_nothing_of_ours() -> None:
    text = CLIENT.read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= LINES_MAX
    for node in ast.walk(ast.parse(text)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert all(name.split(".")[0] in sys.stdlib_module_names for name in names), names


@pytest.mark.slow
async def test_it_does_everything_that_a_service_needs(nats_server: EmbeddedServer, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made, "vision") as watcher:
        scheduler = await made.scheduler()
        await watcher.leader()
        await made.agent("w", "2xH100", worker="w1")
        await watcher.workers_up("w1")
        await asyncio.to_thread(use, nats_server.port, unique, made.folder)
        await scheduler.kill()
        unnamed = await asyncio.to_thread(queue, nats_server.port, unique)
        following = asyncio.create_task(asyncio.to_thread(follow, nats_server.port, unique, "train-1"))
        await made.scheduler()
        assert (await following)[-1] == "SUCCEEDED"
        for job in ("q-named", unnamed):
            await watcher.reaches(job, "SUCCEEDED")
        await watcher.reaches("q-cancelled", "CANCELLED")
        for job in ("train-1", "q-named", unnamed):
            assert (await watcher.check_history(job))["attempt"] == 1
        await watcher.all_free()


def use(port: int, prefix: str, folder: Path) -> None:
    """Blocking on purpose, as the simplest service is."""
    plain = Plain("127.0.0.1", port, prefix, timeout_s=60)

    def api(verb: str, **body: Any) -> Any:
        return plain.ask(f"api.vision.{verb}", body)

    train: dict[str, Any] = {
        "job": "train-1",
        "gpu": {"count": 2},
        "run": {"argv": ["/bin/sh", "-c", f"> {folder}/ran"]},
    }
    assert api("submit", **train)["kind"] == "accepted"
    assert api("submit", **train)["duplicate"] is True
    assert api("submit", **{**train, "priority": 1})["code"] == "conflict"
    history = list(plain.follow("vision", "train-1"))
    assert [change["state"] for change in history] == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
    assert [change["rev"] for change in history] == [1, 2, 3, 4, 5]
    assert len(history[1]["gpus"]) == 2
    assert (folder / "ran").exists()

    accepted = api("submit", job="wait-1", gpu={"model": "B200"}, run={"argv": ["true"]})
    assert accepted["warnings"][0].startswith("no-match")
    explained = api("explain", job="wait-1")["data"]
    assert (explained["state"], explained["reason"]) == ("QUEUED", "model")
    assert [row["job"] for row in api("ls", states=["QUEUED"])["data"]["jobs"]] == ["wait-1"]
    assert api("cancel", job="wait-1", reason="superseded")["data"]["cancelled"] is True
    assert [change["state"] for change in plain.follow("vision", "wait-1")] == ["ACCEPTED", "CANCELLED"]

    api("submit", job="long-1", gpu={}, run={"argv": ["sleep", "600"]})
    following = plain.follow("vision", "long-1")
    assert "RUNNING" in (change["state"] for change in following)
    api("cancel", job="long-1")
    assert [change["state"] for change in following] == ["CANCELLING", "CANCELLED"]

    refused = api("submit", job="bad-1", gpu={"count": 0}, run={"argv": ["true"]})
    assert (refused["kind"], refused["code"], refused["field"], refused["found"]) == (
        "error", "invalid-argument", "$.gpu.count", "0",
    )  # fmt: skip
    assert api("show", job="never")["code"] == "not-found"
    fleet = plain.ask("admin._.fleet", {})["data"]
    assert [row["worker"] for row in fleet["workers"]] == ["w1"]
    plain.socket.close()


def queue(port: int, prefix: str) -> str:
    """The durable door, open while no scheduler runs; returns the name of the request that had none."""
    plain = Plain("127.0.0.1", port, prefix, timeout_s=60)
    body: dict[str, Any] = {"gpu": {}, "run": {"argv": ["true"]}}
    first = plain.ask("request.vision.submit", {**body, "job": "q-named"})
    second = plain.ask("request.vision.submit", body)
    assert second["seq"] > first["seq"]
    plain.ask("request.vision.submit", {**body, "job": "q-cancelled", "run": {"argv": ["sleep", "600"]}})
    plain.ask("request.vision.cancel", {"job": "q-cancelled"})
    plain.socket.close()
    return f"q{second['seq']}"


def follow(port: int, prefix: str, job: str) -> list[str]:
    """Begun while nobody leads: asks until somebody does."""
    plain = Plain("127.0.0.1", port, prefix, timeout_s=90)
    states = [change["state"] for change in plain.follow("vision", job)]
    plain.socket.close()
    return states
