"""How long a takeover takes in virtual time, where what is waited for is a server and no processor."""

from __future__ import annotations

import asyncio
import json
from typing import Final, cast

import msgspec

from moorage.bus.connection import Connection
from moorage.scheduler.core.config import CLUSTER_DEFAULTS, Config
from moorage.scheduler.leader.service import Scheduler
from moorage.schemas.subjects import Subjects
from moorage.testing.bus.bus import SERVER, FaultyNetwork, SimulatedBus, SimulatedClock
from tests.waiting import until

CLUSTER: Final = msgspec.structs.replace(Config(), **CLUSTER_DEFAULTS)
SUBJECTS: Final = Subjects("t")
#: how long no server leads the ledger's stream
GAP_S: Final = 3.0
#: what may pass after it until the standby can read again, and begins to count
READS_S: Final = 3.0


#: how long no server answers a leader that goes on: its append is given up within it, and asked for in vain
LONG_GAP_S: Final = 6.5
#: and how soon it goes on then: a look that is given up, and the append again
GOES_ON_S: Final = 5.0


def test_a_leader_goes_on_soon_after_servers_that_were_away() -> None:
    """Looking for its last append it was not answered, and waited ten seconds for that: a third of every lease."""
    bus, clock = SimulatedBus(FaultyNetwork(3, delay_ms=(0.2, 3))), SimulatedClock()

    async def scene() -> float:
        world, ledger = bus.connect("one"), bus.connect("one", account="ledger")
        one = Scheduler(
            cast("Connection", world), cast("Connection", ledger), config=CLUSTER, subjects=SUBJECTS, name="one"
        )
        running = asyncio.ensure_future(one.run())
        await until(one.leading.is_set, 60)
        asked = bus.connect("caller")
        bus.network.partition({"one"}, {"caller", SERVER})
        await asyncio.sleep(LONG_GAP_S)
        bus.network.partition({"one", "caller", SERVER})
        began_s = clock.now_s
        body = json.dumps({"job": "j", "gpu": {}, "run": {"argv": ["true"]}}).encode()
        answer = json.loads((await asked.request(SUBJECTS.api("acme", "submit"), body, 30)).data)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert answer["kind"] == "accepted"
        return clock.now_s - began_s

    assert clock.run(scene()) < GOES_ON_S


def test_a_look_that_nobody_answered_while_no_server_led_is_asked_again() -> None:
    """Both leaders die right after a record that the standby has not read: it counts from when it could read again.

    A look that waited for ten seconds, long after the stream had a leader again, once made it 22 s and more.
    """
    bus, clock = SimulatedBus(FaultyNetwork(3, delay_ms=(0.2, 3))), SimulatedClock()

    def scheduler(name: str) -> Scheduler:
        world, ledger = bus.connect(name), bus.connect(name, account="ledger")
        links = cast("Connection", world), cast("Connection", ledger)
        return Scheduler(*links, config=CLUSTER, subjects=SUBJECTS, name=name)

    async def scene() -> float:
        one, two = scheduler("one"), scheduler("two")
        running = [asyncio.ensure_future(one.run())]
        await until(one.leading.is_set, 60)
        running.append(asyncio.ensure_future(two.run()))
        await asyncio.sleep(5)
        body = json.dumps({"job": "j", "gpu": {}, "run": {"argv": ["true"]}}).encode()
        await bus.connect("caller").request(SUBJECTS.api("acme", "submit"), body, 5)
        began_s = clock.now_s
        bus.network.partition({"one"}, {"two"}, {SERVER})
        await asyncio.sleep(GAP_S)
        bus.network.partition({"one"}, {"two", SERVER})
        await until(two.leading.is_set, 60)
        took_s = clock.now_s - began_s
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return took_s

    assert clock.run(scene()) < GAP_S + READS_S + CLUSTER.takeover_s * 9 / 8
