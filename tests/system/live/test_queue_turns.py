"""The durable queue is read in turns: a flood of one tenant hides no neighbour (ledger-rules H16)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import Ack, JetStream
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.durable.queue_reader import BATCH
from moorage.scheduler.durable.queue_streams import stream_config
from moorage.scheduler.leader.service import Scheduler
from moorage.schemas.subjects import Subjects
from tests.servers import ANSWER_S, Server
from tests.waiting import until

FLOOD = 3 * BATCH


@dataclass
class Queued:
    """A scheduler in this process, and whoever publishes to its durable queue."""

    subjects: Subjects
    jetstream: JetStream
    scheduler: Scheduler

    async def publish(self, tenant: str, job: str) -> None:
        body = b'{"job":"%s","run":{"argv":["true"]}}' % job.encode()
        assert isinstance(await self.jetstream.append(self.subjects.request(tenant, "submit"), body), Ack)

    async def flood(self) -> None:
        for start in range(0, FLOOD, 100):
            await asyncio.gather(*(self.publish("acme", f"flood-{number}") for number in range(start, start + 100)))

    @contextlib.asynccontextmanager
    async def leads(self) -> AsyncIterator[State]:
        running = asyncio.create_task(self.scheduler.run())
        try:
            await asyncio.wait_for(self.scheduler.leading.wait(), ANSWER_S)
            assert self.scheduler.term is not None
            yield self.scheduler.term.engine.state
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def queued(server: Server, prefix: str, config: Config | None = None) -> AsyncIterator[Queued]:
    subjects = Subjects(prefix)
    async with await connect(server.url, "scheduler") as world, await connect(server.ledger_url, "ledger") as ledger:
        jetstream = JetStream(world)
        await jetstream.ensure_stream(stream_config(subjects, 1))
        yield Queued(subjects, jetstream, Scheduler(world, ledger, config=config, subjects=subjects))


@pytest.mark.slow
async def test_a_flood_in_the_queue_does_not_hide_a_neighbour(nats_server: Server, unique: str) -> None:
    async with queued(nats_server, unique) as made:
        await made.flood()
        await made.publish("zeta", "alone")  # behind all of it, in the stream and by name
        async with made.leads() as state:
            await until(lambda: state.live == FLOOD + 1, 90, "all are read")
            alone = state.job("zeta", "alone")
            assert alone is not None
            assert alone.num <= BATCH + 1, "one batch of the flood came before it, not all"


async def test_a_flood_that_fills_memory_leaves_room_for_a_neighbour(nats_server: Server, unique: str) -> None:
    async with queued(nats_server, unique, Config(jobs_max=500)) as made:
        await made.flood()
        async with made.leads() as state:
            await until(lambda: state.live == 450, 60, "all but the last tenth of it is full")
            await made.publish("zeta", "alone")
            await until(lambda: state.job("zeta", "alone"), 60, "the neighbour's is read")
            assert state.tenants["acme"].live == 450, "and the flood waits"
