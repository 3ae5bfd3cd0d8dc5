"""Cancels in the durable queue wait there, in order, while there is no room to remember them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.scheduler.core.config import Config
from moorage.scheduler.queue_reader import BATCH
from moorage.scheduler.service import Scheduler
from moorage.schemas.subjects import Subjects
from tests.servers import ANSWER_S, Server
from tests.waiting import until

pytestmark = pytest.mark.any_server

FIRST = 20


@pytest.mark.slow
async def test_the_cancel_cursor_waits_while_the_tombstones_are_full(nats_server: Server, unique: str) -> None:
    subjects = Subjects(unique)
    world = await connect(nats_server.url, "scheduler")
    ledger_world = await connect(nats_server.ledger_url, "ledger")
    client = await connect(nats_server.url, "client")
    # room for one batch beside a few: after the first cancels no further batch is read
    scheduler = Scheduler(world, ledger_world, subjects=subjects, config=Config(tombstones_max=BATCH + FIRST - 1))
    running = asyncio.create_task(scheduler.run())

    async def publish(verb: str, body: bytes) -> int:
        ack = msgspec.json.decode((await client.request(subjects.request("acme", verb), body, ANSWER_S)).data)
        return int(ack["seq"])

    try:
        await asyncio.wait_for(scheduler.leading.wait(), ANSWER_S)
        assert scheduler.reign is not None
        state = scheduler.reign.engine.state
        for number in range(FIRST):
            through = await publish("cancel", b'{"job":"c%d"}' % number)
        await until(lambda: "acme" in state.tenants and state.tenants["acme"].cancel_cursor == through, what="read")
        tenant = state.tenants["acme"]
        assert len(tenant.tombstones) == FIRST
        waits = await publish("cancel", b'{"job":"later"}')
        # two records later it has been looked at for sure, and still waits unread
        seq = state.seq
        await until(lambda: state.seq >= seq + 2, what="two heartbeats")
        assert tenant.cancel_cursor == through
        assert "later" not in tenant.tombstones
        # a submit behind them: the tombstones before it have done their work, and the cursor goes on
        await publish("submit", b'{"job":"c3","run":{"argv":["true"]}}')
        await until(lambda: tenant.cancel_cursor == waits, what="the cursor goes on")
        await until(lambda: (job := state.job("acme", "c3")) is not None and job.state == "CANCELLED", what="c3")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for connection in (client, world, ledger_world):
            await connection.close()
