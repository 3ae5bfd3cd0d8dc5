"""The number of copies of what outlives a restored ledger: of every stream that a scheduler opens and checks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import msgspec

from moorage.bus.jetstream import JetStream
from moorage.bus.transport import Delivery
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.ledger.backup import _copy, _own_queues, _streams_of_users
from moorage.schemas.roles import USER_INFO
from moorage.testing.bus.bus import SimulatedBus
from moorage.testing.bus.clock import SimulatedClock
from tests.unit.scheduler.driving import SUBJECTS

if TYPE_CHECKING:
    from moorage.bus.connection import Connection


def test_the_own_stream_of_a_tenant_that_has_submitted_nothing_gets_its_copies_too() -> None:
    idle = SUBJECTS.request_stream_of("idle")
    permissions = {"publish": {"allow": [f"$JS.API.STREAM.CREATE.{idle}"]}}

    async def run() -> None:
        bus = SimulatedBus()
        world, server = bus.connect("restore"), bus.connect("server")
        telling: list[asyncio.Future[bool]] = []

        def tell(asked: Delivery) -> None:
            answer = msgspec.json.encode({"data": {"permissions": permissions}})
            telling.append(asyncio.ensure_future(server.publish(asked.reply, answer, "", {})))

        await server.subscribe(USER_INFO, tell)
        jetstream, told = JetStream(world), list[str]()
        await jetstream.ensure_stream({"name": idle, "subjects": ["idle"], "num_replicas": 1})
        own = await _own_queues(cast("Connection", world), SUBJECTS, State())
        await _copy([(jetstream, each) for each in _streams_of_users(SUBJECTS, own)], 3, told.append)
        assert (await jetstream.stream_info(idle)).replicas == 3
        assert told == [f"copies of {idle}: 3, and not 1"], "and streams that are not there are left out"

    SimulatedClock().run(run())
