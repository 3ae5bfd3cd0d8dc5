"""Answered means recorded: nothing leaves a leader before the append that holds it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping

import msgspec
import pytest

from moorage.bus.connection import Connection, connect
from moorage.bus.jetstream import APPEND_TIMEOUT_S, Ack, JetStream, JsError
from moorage.bus.transport import Delivery, Outgoing
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.outputs.output_writer import InFlight
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


class Scene:
    """A scheduler that leads over two connections, its gated ledger, a client, and what the client heard."""

    running: asyncio.Task[None]

    def __init__(self, world: Connection, ledger_world: Connection, client: Connection, subjects: Subjects) -> None:
        self.world = world
        self.ledger_world = ledger_world
        self.client = client
        self.subjects = subjects
        self.scheduler = Scheduler(world, ledger_world, subjects=subjects)
        self.jetstream = GatedJetStream(ledger_world)
        self.jetstream.gate = asyncio.Event()
        self.jetstream.gate.set()
        self.scheduler.ledger._js = self.jetstream
        self.heard: list[Delivery] = []

    @property
    def engine(self) -> Engine:
        assert self.scheduler.term is not None
        return self.scheduler.term.engine

    def hold(self, job: str) -> bytes:
        """The request of a job, whose records wait at the gate from now on."""
        self.jetstream.gate.clear()
        self.jetstream.held = b'"%s"' % job.encode()
        return SUBMIT.replace(b"held", job.encode())

    async def folded(self) -> InFlight:
        """The record at the gate, once it is in the state."""
        flight: InFlight = await until(
            lambda: self.jetstream.waiting and self.engine._in_flight, what="a record at the gate"
        )
        await until(lambda: flight.outputs, what="it is folded")
        return flight

    async def are_heard(self, *subjects: str) -> None:
        await until(lambda: {delivery.subject for delivery in self.heard} >= set(subjects), what=", ".join(subjects))

    async def unheard(self) -> None:
        """A malformed request needs no record: its refusal comes first, and what left before it is heard by then."""
        refused = await self.client.request(self.subjects.api("acme", "submit"), b'{"job":"bad"}', 5)
        assert msgspec.json.decode(refused.data)["code"] == "invalid-argument"
        await self.world.flush()
        await self.client.flush()
        assert self.heard == [], "an answer, a placement or an event left before its record was acknowledged"


@contextlib.asynccontextmanager
async def leading(nats_server: Server, unique: str) -> AsyncIterator[Scene]:
    world = await connect(nats_server.url, "scheduler")
    ledger_world = await connect(nats_server.ledger_url, "ledger")
    client = await connect(nats_server.url, "client")
    scene = Scene(world, ledger_world, client, Subjects(unique))
    subjects, running = scene.subjects, asyncio.create_task(scene.scheduler.run())
    scene.running = running
    try:
        await asyncio.wait_for(scene.scheduler.leading.wait(), ANSWER_S)
        hello = Hello(
            "w1", "b", drivers=["process"], gpu_pool=[Device(n, "nvidia", "H100", f"GPU-{n}", 81559) for n in range(2)]
        )
        joined = await client.request(subjects.worker("w1", "join"), encode(Join("m", "b", 1, hello)), 5)
        assert msgspec.json.decode(joined.data)["kind"] == "joined"
        for subject in (subjects.worker("w1", "wanted"), subjects.event("acme", "held"), "answer.*"):
            await client.subscribe(subject, scene.heard.append)
        yield scene
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for connection in (client, world, ledger_world):
            await connection.close()


async def test_nothing_leaves_before_the_acknowledgement(nats_server: Server, unique: str) -> None:
    async with leading(nats_server, unique) as scene:
        subjects, client, jetstream = scene.subjects, scene.client, scene.jetstream
        wanted, event = subjects.worker("w1", "wanted"), subjects.event("acme", "held")
        jetstream.gate.clear()
        await until(lambda: jetstream.waiting, what="a heartbeat waits at the gate")
        await client.send([(subjects.api("acme", "submit"), SUBMIT, "answer.here")])
        await scene.unheard()
        jetstream.gate.set()
        await scene.are_heard("answer.here", wanted, event)
        answer = next(msgspec.json.decode(d.data) for d in scene.heard if d.subject == "answer.here")
        assert answer["kind"] == "accepted"
        assert answer["ledger"] <= scene.engine.state.seq

        # its own record waits: it is in the state by then, and nobody is told of it, nor is a question answered
        scene.heard.clear()
        await client.send([(subjects.api("acme", "submit"), scene.hold("held2"), "answer.here")])
        flight = await scene.folded()
        assert flight.outputs is not None
        assert flight.outputs.messages
        assert scene.engine.state.job("acme", "held2") is not None
        await client.send([(subjects.api("acme", "ls"), b"{}", "answer.later")])
        await scene.unheard()
        jetstream.gate.set()
        await scene.are_heard("answer.here", "answer.later", wanted)

        # a queued request stays in its stream, although the cursor in the state has passed it
        asked, queue, stream = JetStream(client), subjects.request("acme", "submit"), subjects.request_stream
        assert scene.scheduler.term is not None
        scene.heard.clear()
        queued = await asked.append(queue, scene.hold("held3"))
        assert isinstance(queued, Ack)
        await scene.folded()
        assert scene.engine.state.tenants["acme"].submit_cursor == queued.seq
        purging = asyncio.create_task(scene.scheduler.term.queue_reader.purge_read())
        await scene.unheard()
        assert (await asked.stream_info(stream)).messages == 1, "it is purged before its record is stored"
        jetstream.gate.set()
        await purging
        assert (await asked.stream_info(stream)).messages == 0


async def test_all_that_a_record_sends_is_made_while_it_is_stored_and_leaves_in_one_write_the_frames_first(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(nats_server, unique) as scene:
        wanted, event = scene.subjects.worker("w1", "wanted"), scene.subjects.event("acme", "held")
        send, batches = scene.world.send, list[list[str]]()

        async def noted(batch: Iterable[Outgoing]) -> int:
            messages = list(batch)
            batches.append([subject for subject, _, _ in messages])
            return await send(messages)

        monkeypatch.setattr(scene.world, "send", noted)
        await scene.client.send([(scene.subjects.api("acme", "submit"), scene.hold("held"), "answer.here")])
        await scene.folded()
        assert scene.scheduler.term is not None
        assert scene.scheduler.term._messages is not None
        scene.jetstream.gate.set()
        await scene.are_heard(wanted, "answer.here", event)
        [batch] = [each for each in batches if wanted in each]
        assert batch[0] == wanted
        assert {"answer.here", event, scene.subjects.events("acme")} < set(batch)


async def test_a_record_that_stands_elsewhere_than_foreseen_ends_the_term_which_begins_again(
    nats_server: Server, unique: str
) -> None:
    """Its attempts would have another fence: nothing of it leaves, and the same scheduler leads again at once."""
    async with leading(nats_server, unique) as scene:
        subjects, epoch = scene.subjects, scene.engine.state.epoch
        await scene.client.send([(subjects.api("acme", "submit"), scene.hold("held"), "answer.here")])
        await scene.folded()
        scene.heard.clear()
        assert isinstance(await JetStream(scene.ledger_world).append(subjects.ledger_record, b"junk"), Ack)
        scene.jetstream.held = b"no more"
        scene.jetstream.gate.set()
        await until(
            lambda: scene.scheduler.leading.is_set() and scene.scheduler.term and scene.engine.state.epoch > epoch,
            what="it leads again",
        )
        assert scene.engine.state.epoch == epoch + 1
        attempt = next(scene.engine.state.attempts())
        assert (attempt.name[:2], attempt.fence) == (("acme", "held"), attempt.replica.job.ledger)
        assert {delivery.subject for delivery in scene.heard} <= {subjects.worker("w1", "wanted")}
        again = await scene.client.request(subjects.api("acme", "submit"), SUBMIT, ANSWER_S)
        assert msgspec.json.decode(again.data)["kind"] == "accepted"


async def test_a_resignation_that_stands_elsewhere_than_foreseen_is_one(
    nats_server: Server, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The process was asked to stop: it leads no further term, and waits for nothing."""
    async with leading(nats_server, unique) as scene:
        subjects, scheduler, ledger_js = scene.subjects, scene.scheduler, JetStream(scene.ledger_world)
        scene.jetstream.gate.clear()
        scene.jetstream.held = b"resign"
        resigning = asyncio.create_task(scheduler.resign())
        await scene.folded()
        assert isinstance(await ledger_js.append(subjects.ledger_record, b"junk"), Ack)
        scene.jetstream.gate.set()
        await asyncio.wait_for(resigning, ANSWER_S)
        assert "could not be written" not in caplog.text
        await asyncio.wait_for(scene.running, ANSWER_S)
        newest = await ledger_js.get_last(subjects.ledger_stream, subjects.ledger_epoch)
        assert newest is not None
        assert newest.seq == 1, "it began another term"
