"""Cancels in the durable queue: those of unknown jobs are remembered for a while, and wait while there is no room."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from moorage.bus.jetstream import Ack, StoredMessage
from moorage.client import AsyncClient
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.state import State, Tenant
from moorage.scheduler.durable import queue_reader
from tests.servers import ANSWER_S, Server
from tests.system.live import test_queue_turns
from tests.system.live.test_queue_turns import Queued
from tests.waiting import until

ROOM = 20


class Publisher:
    """Of tenant acme, for a scheduler that leads with this state."""

    def __init__(self, made: Queued, state: State) -> None:
        self.state = state
        self.subjects = made.subjects
        self.jetstream = made.jetstream

    async def publish(self, verb: str, body: bytes) -> int:
        stored = await self.jetstream.append(self.subjects.request("acme", verb), body)
        assert isinstance(stored, Ack)
        return stored.seq

    async def cancel(self, first: int, count: int) -> int:
        """Cancel jobs that nobody has submitted; returns the sequence of the last cancel."""
        return [await self.publish("cancel", b'{"job":"c%d"}' % number) for number in range(first, first + count)][-1]

    async def read(self, through: int) -> Tenant:
        def has_read() -> bool:
            tenant = self.state.tenants.get("acme")
            return tenant is not None and tenant.cancel_cursor == through

        await until(has_read, what=f"the cancels are read up to message {through}")
        return self.state.tenants["acme"]


@contextlib.asynccontextmanager
async def queued(server: Server, prefix: str, config: Config) -> AsyncIterator[Publisher]:
    async with test_queue_turns.queued(server, prefix, config) as made, made.leads() as state:
        yield Publisher(made, state)


@pytest.mark.slow
async def test_cancels_wait_while_there_is_no_room_and_a_submit_ends_what_came_before_it(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_reader, "SWEEP_EVERY_S", 3600.0)
    async with queued(nats_server, unique, Config(tombstones_max=ROOM)) as queue:
        tenant = await queue.read(through := await queue.cancel(0, ROOM))
        assert len(tenant.tombstones) == ROOM
        waits = await queue.publish("cancel", b'{"job":"later"}')
        # two records later it has been looked at for sure, and still waits unread
        seq = queue.state.seq
        await until(lambda: queue.state.seq >= seq + 2, what="two heartbeats")
        assert tenant.cancel_cursor == through
        # a submit behind them: the tombstones before it have done their work, and the cursor goes on
        await queue.publish("submit", b'{"job":"c3","run":{"argv":["true"]}}')
        await queue.read(waits)
        job = queue.state.job
        await until(lambda: (found := job("acme", "c3")) is not None and found.state == "CANCELLED", what="c3")


async def test_a_message_that_is_stored_behind_its_hint_is_read_soon(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the stream may lag behind the leader that stored the message: played by a first read that is empty."""
    monkeypatch.setattr(queue_reader, "SWEEP_EVERY_S", 3600.0)
    read, lagging = queue_reader.QueueReader._next, list[str]()

    async def lag(self: queue_reader.QueueReader, tenant: str, verb: str, seq: int, most: int) -> list[StoredMessage]:
        if verb in lagging:
            lagging.remove(verb)
            return []
        return await read(self, tenant, verb, seq, most)

    monkeypatch.setattr(queue_reader.QueueReader, "_next", lag)
    async with queued(nats_server, unique, Config()) as queue:
        await queue.publish("submit", b'{"job":"early","run":{"argv":["true"]}}')
        await until(lambda: queue.state.job("acme", "early") is not None, ANSWER_S, "the first sweep is over")
        lagging.append("submit")
        await queue.publish("submit", b'{"job":"late","run":{"argv":["true"]}}')
        await until(lambda: queue.state.job("acme", "late") is not None, ANSWER_S, "the job")
        assert not lagging


@pytest.mark.slow
async def test_cancels_of_a_tenant_that_queues_no_submits_are_all_read_though_there_is_room_for_few(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its submits come by the endpoint, say: nothing else moves the cursor that forgets the cancels."""
    monkeypatch.setattr(queue_reader, "SWEEP_EVERY_S", 0.05)
    async with queued(nats_server, unique, Config(tombstones_max=ROOM)) as queue:
        tenant = await queue.read(await queue.cancel(0, 5 * ROOM))
        assert len(tenant.tombstones) <= ROOM


@pytest.mark.slow
async def test_a_cancel_is_forgotten_after_a_while_and_not_before_its_submit_is_read(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_reader, "SWEEP_EVERY_S", 0.05)
    monkeypatch.setattr(queue_reader, "REMEMBERED_S", 3600.0)
    async with queued(nats_server, unique, Config()) as queue:
        tenant = await queue.read(await queue.cancel(0, 2))
        await queue.publish("submit", b'{"job":"c0","run":{"argv":["true"]}}')
        job = queue.state.job
        await until(lambda: (found := job("acme", "c0")) is not None and found.state == "CANCELLED", what="c0")
        through = await queue.cancel(2, 3)
        await queue.read(through)
        assert set(tenant.tombstones) == {"c2", "c3", "c4"}
        monkeypatch.setattr(queue_reader, "REMEMBERED_S", 0.0)
        await until(lambda: not tenant.tombstones, what="they are forgotten")
        assert tenant.submit_cursor >= through
        await queue.publish("submit", b'{"job":"c2","run":{"argv":["true"]}}')
        await until(lambda: (found := job("acme", "c2")) is not None and found.state == "QUEUED", what="c2")


@pytest.mark.slow
async def test_a_verb_that_no_scheduler_reads_goes_to_the_dead_letters(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_reader, "SWEEP_EVERY_S", 0.05)
    async with (
        queued(nats_server, unique, Config()) as queue,
        AsyncClient(nats_server.url, prefix=unique, timeout=ANSWER_S) as ana,
    ):
        for verb in ("sumbit", "submit.now"):
            await queue.publish(verb, b'{"job":"j","run":{"argv":["true"]}}')

        async def buried() -> bool:
            return len([row async for row in ana.admin.dead_letters()]) == 2

        await until(buried, ANSWER_S, "two dead letters")
        rows = [row async for row in ana.admin.dead_letters(tenant="acme")]
        assert {(row.code, row.subject) for row in rows} == {
            ("unknown-verb", queue.subjects.request("acme", verb)) for verb in ("sumbit", "submit.now")
        }
        info = await queue.jetstream.stream_info(queue.subjects.request_stream)
        assert info.messages == 0
