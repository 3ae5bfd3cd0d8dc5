"""Answered means recorded: nothing leaves a leader before the append that holds it is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import APPEND_TIMEOUT_S, Ack, JetStream, JsError
from moorage.bus.transport import Delivery
from moorage.scheduler.leader.service import Scheduler
from moorage.schemas.codec import encode
from moorage.schemas.frames import Device, Hello, Join
from moorage.schemas.subjects import Subjects
from tests.servers import ANSWER_S, Server
from tests.waiting import until

pytestmark = pytest.mark.any_server

SUBMIT = b'{"job":"held","gpu":{},"run":{"argv":["true"]}}'


class GatedJetStream(JetStream):
    """The real one behind a gate: while it is shut, appends with `held` in them wait before they are sent."""

    gate: asyncio.Event
    held = b""
    waiting = 0

    async def append(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = APPEND_TIMEOUT_S,
    ) -> Ack | JsError:
        self.waiting += 1
        if self.held in payload:
            await self.gate.wait()
        self.waiting -= 1
        return await super().append(subject, payload, headers, timeout_s)


async def test_nothing_leaves_before_the_acknowledgement(nats_server: Server, unique: str) -> None:
    subjects = Subjects(unique)
    world = await connect(nats_server.url, "scheduler")
    ledger_world = await connect(nats_server.ledger_url, "ledger")
    client = await connect(nats_server.url, "client")
    scheduler = Scheduler(world, ledger_world, subjects=subjects)
    jetstream = GatedJetStream(ledger_world)
    jetstream.gate = asyncio.Event()
    jetstream.gate.set()
    scheduler.ledger._js = jetstream
    running = asyncio.create_task(scheduler.run())
    heard: list[Delivery] = []
    try:
        await asyncio.wait_for(scheduler.leading.wait(), ANSWER_S)
        hello = Hello(
            "w1", "b", drivers=["process"], gpu_pool=[Device(n, "nvidia", "H100", f"GPU-{n}", 81559) for n in range(2)]
        )
        joined = await client.request(subjects.worker("w1", "join"), encode(Join("m", "b", 1, hello)), 5)
        assert msgspec.json.decode(joined.data)["kind"] == "joined"
        for subject in (subjects.worker("w1", "wanted"), subjects.event("acme", "held"), "answer.*"):
            await client.subscribe(subject, heard.append)

        jetstream.gate.clear()
        await until(lambda: jetstream.waiting, what="a heartbeat waits at the gate")
        await client.send([(subjects.api("acme", "submit"), SUBMIT, "answer.here")])
        # a malformed request needs no record: its refusal, asked for later, comes first
        refused = await client.request(subjects.api("acme", "submit"), b'{"job":"bad"}', 5)
        assert msgspec.json.decode(refused.data)["code"] == "invalid-argument"
        await client.flush()
        assert heard == [], "an answer, a placement or an event left before its record was acknowledged"

        jetstream.gate.set()
        await until(lambda: len({delivery.subject for delivery in heard}) == 3, what="answer, placement and event")
        answer = next(msgspec.json.decode(d.data) for d in heard if d.subject == "answer.here")
        assert answer["kind"] == "accepted"
        assert scheduler.reign is not None
        assert answer["ledger"] <= scheduler.reign.engine.state.seq

        # its own record waits: what it will place is known by then, and said to nobody
        heard.clear()
        jetstream.gate.clear()
        jetstream.held = b'"held2"'
        await client.subscribe(subjects.event("acme", "held2"), heard.append)
        await client.send([(subjects.api("acme", "submit"), SUBMIT.replace(b'"held"', b'"held2"'), "answer.here")])
        flight = await until(lambda: jetstream.waiting and scheduler.reign and scheduler.reign.engine._in_flight)
        await until(lambda: flight.early[1], what="its placement is foreseen")
        # so do questions, which may be answered with the record in the state: a question asked, and then a refusal
        await client.send([(subjects.api("acme", "ls"), b"{}", "answer.later")])
        refused = await client.request(subjects.api("acme", "submit"), b'{"job":"bad"}', 5)
        assert msgspec.json.decode(refused.data)["code"] == "invalid-argument"
        await world.flush()
        await client.flush()
        assert heard == [], "something left while the record that holds it was appended"
        jetstream.gate.set()
        await until(lambda: len({delivery.subject for delivery in heard}) == 4, what="answers, placement and event")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for connection in (client, world, ledger_world):
            await connection.close()
