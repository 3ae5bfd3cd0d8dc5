"""FastStream's own broker over JetStream: a message becomes one job, whatever comes again, and is acknowledged then."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from nats.js.api import ConsumerConfig

from moorage.client import AsyncClient
from tests.system.cli.node import Node, node_on
from tests.waiting import until

framework = pytest.importorskip("faststream.nats")
job_route = pytest.importorskip("moorage.contrib.faststream_route").job_route

WAIT_S: Final = 100.0


def task(body: Any) -> Sequence[str] | Mapping[str, Any]:
    """A shell's command, or a request as it stands."""
    return body if isinstance(body, dict) and "run" in body else ["sh", "-c", body["do"]]


@pytest.mark.slow
async def test_a_message_of_a_stream_is_one_job_though_it_is_delivered_again(tmp_path: Path, unique: str) -> None:
    """The jobs outlast `ack_wait` by far, the scheduler is killed, and the message is published twice."""
    async with (
        node_on(tmp_path / "home", simulate="1x4xH100") as node,
        AsyncClient(node.url, tenant=unique) as client,
    ):
        stream = framework.JStream(f"WORK-{unique}", subjects=[f"work.{unique}"])
        config = ConsumerConfig(ack_wait=0.5, max_deliver=-1)
        options: dict[str, Any] = {"stream": stream, "durable": "gpu", "config": config, "pull_sub": True}
        route = job_route(client, f"work.{unique}", task, "1xH100", fields={"limit": "5m"}, **options)
        broker = framework.NatsBroker(node.url, routers=[framework.NatsRouter(handlers=[route])])
        async with broker:
            await broker.start()
            run = f"echo began >> {tmp_path}/began; until [ -e {tmp_path}/go ]; do sleep 0.05; done"
            os.kill(node.up.children["scheduler"], signal.SIGKILL)
            for _ in range(2):
                await broker.publish({"do": run}, f"work.{unique}", headers={"Moorage-Job": "epoch-7"})
            await broker.publish({"do": "echo one"}, f"work.{unique}")
            await broker.publish("not what the task reads", f"work.{unique}")
            await broker.publish({"run": {"argv": []}}, f"work.{unique}")
            await until((tmp_path / "began").exists, WAIT_S, "the job began")
            js = broker.config.connection_state.stream

            async def all_are_acknowledged() -> bool:
                info = await js.consumer_info(stream.name, "gpu")
                return (info.num_ack_pending, info.num_pending) == (0, 0)

            await until(all_are_acknowledged, WAIT_S, "each message is acknowledged or terminated")
            (tmp_path / "go").touch()
            assert (await client.job("epoch-7").result(wait=WAIT_S)).code == 0
            rows = (await client.ls(limit=100)).jobs
            made = [row.job for row in rows if row.job != "epoch-7"]
            assert len(made) == 1, rows
            assert made[0].startswith(f"WORK-{unique}"[:32])
            await client.wait([client.job(made[0])], WAIT_S)
    assert (tmp_path / "began").read_text() == "began\n"


@pytest.mark.slow
async def test_a_request_is_answered_with_its_job(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        broker = framework.NatsBroker(
            node.url, routers=[framework.NatsRouter(handlers=[job_route(client, f"ask.{unique}", task)])]
        )
        async with broker:
            await broker.start()
            answer = await broker.request({"do": "exit 3"}, f"ask.{unique}", timeout=WAIT_S)
            job = json.loads(answer.body)["job"]
        [ended] = await asyncio.wait_for(client.wait([client.job(job)]), WAIT_S)
    assert (ended.state, ended.code) == ("FAILED", 3)
