"""The durable queue is read in turns: a flood of one tenant hides no neighbour (ledger-rules H16)."""

from __future__ import annotations

import asyncio

from moorage.bus.connection import connect
from moorage.bus.jetstream import Ack, JetStream
from moorage.scheduler.queue_reader import BATCH, QueueReader
from moorage.scheduler.service import Scheduler
from moorage.schemas.subjects import Subjects
from tests.servers import Server
from tests.waiting import until

FLOOD = 3 * BATCH


async def test_a_flood_in_the_queue_does_not_hide_a_neighbour(nats_server: Server, unique: str) -> None:
    subjects = Subjects(unique)
    world = await connect(nats_server.url, "scheduler")
    ledger_world = await connect(nats_server.ledger_url, "ledger")
    jetstream = JetStream(world)
    await jetstream.ensure_stream(QueueReader.stream(subjects, 1))

    async def publish(tenant: str, job: str) -> None:
        body = b'{"job":"%s","run":{"argv":["true"]}}' % job.encode()
        assert isinstance(await jetstream.append(subjects.request(tenant, "submit"), body), Ack)

    try:
        for start in range(0, FLOOD, 100):
            await asyncio.gather(*(publish("acme", f"flood-{number}") for number in range(start, start + 100)))
        await publish("zeta", "alone")  # behind all of it, in the stream and by name
        scheduler = Scheduler(world, ledger_world, subjects=subjects)
        running = asyncio.create_task(scheduler.run())
        try:
            await asyncio.wait_for(scheduler.leading.wait(), 10)
            assert scheduler.reign is not None
            state = scheduler.reign.engine.state
            await until(lambda: state.live == FLOOD + 1, 30, "all are read")
            alone = state.job("zeta", "alone")
            assert alone is not None
            assert alone.num <= BATCH + 1, "one batch of the flood came before it, not all"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await world.close()
        await ledger_world.close()
