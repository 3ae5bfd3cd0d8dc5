"""The production ledger and schedulers on the simulated bus, through its faults, in virtual time."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from moorage.bus.connection import Connection
from moorage.bus.errors import RequestTimeout
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.record import Record, decode_record, encode_record
from moorage.scheduler.core.ledger.records import FORMAT
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.leader.service import Scheduler
from moorage.scheduler.ledger.ledger import Deposed, Ledger
from moorage.schemas.subjects import Subjects
from moorage.testing.bus.bus import SERVER, Faults, SimulatedBus
from tests.bus.test_simulated import simulate
from tests.waiting import until


def epoch_record(state: State, leader: int) -> Record:
    return Record(FORMAT, state.epoch + 1, leader, 0, 1, state.digest, acts=[acts.Epoch("L", "s", 1.0)])


@pytest.mark.parametrize("seed", range(20))
def test_the_ledger_stores_each_record_once_through_every_fault(seed: int) -> None:
    subjects = Subjects("t")

    async def scene(bus: SimulatedBus) -> None:
        connection = bus.connect("leader")
        ledger, state = Ledger(JetStream(connection), subjects, 7), State()
        await ledger.ensure()
        bus.network.faults = Faults(drop=0.1, duplicate=0.1, reorder=0.1, delay_ms=(0, 20), lose_ack=0.3)
        await ledger.take_over(state, "s", "L", 1, 1.0)
        for rid in range(1, 20):
            record = Record(FORMAT, state.epoch, 7, rid, rid, state.digest, acts=[])
            ledger.fold_message(state, await stored(ledger, state, connection, subjects, record))
        messages = bus.streams()[subjects.ledger_stream].messages
        assert [decode_record(message.data).rid for message in messages.values()] == list(range(20))

    simulate(scene, seed=seed)


async def stored(ledger: Ledger, state: State, connection: Any, subjects: Subjects, record: Record) -> Any:
    seq = await ledger.append_record(state, record.rid, encode_record(record))
    js = JetStream(connection)

    async def read() -> Any:
        try:
            return await js.get_message(subjects.ledger_stream, seq)
        except RequestTimeout:
            return None

    return await until(read, 300)


def test_a_stale_leader_is_deposed_by_its_next_append() -> None:
    subjects = Subjects("t")

    async def scene(bus: SimulatedBus) -> None:
        old, new = (Ledger(JetStream(bus.connect(name)), subjects, n) for n, name in enumerate(("old", "new"), 1))
        await old.ensure()
        state, other = State(), State()
        await old.take_over(state, "old", "L", 1, 1.0)
        await new.follow(other)
        bus.network.partition({"old"}, {"new", SERVER})
        stale = asyncio.ensure_future(
            old.append_record(state, 1, encode_record(Record(FORMAT, 1, 1, 1, 2, state.digest, acts=[])))
        )
        await asyncio.sleep(10)
        await new.take_over(other, "new", "L", 2, 2.0)
        bus.network.heal()
        with pytest.raises(Deposed):
            await stale
        assert bus.streams()[subjects.ledger_stream].last_seq == 2

    simulate(scene)


def test_two_production_schedulers_and_a_partition_in_virtual_time() -> None:
    subjects = Subjects("t")

    async def scene(bus: SimulatedBus) -> None:
        def scheduler(name: str) -> Scheduler:
            world, ledger = bus.connect(name), bus.connect(name, account="ledger")
            return Scheduler(cast("Connection", world), cast("Connection", ledger), subjects=subjects, name=name)

        one, two = scheduler("one"), scheduler("two")
        running = [asyncio.ensure_future(one.run())]
        await until(one.leading.is_set, 60)
        running.append(asyncio.ensure_future(two.run()))
        caller = bus.connect("caller")
        body = json.dumps({"job": "j", "gpu": {}, "run": {"argv": ["true"]}}).encode()
        accepted = json.loads((await caller.request(subjects.api("acme", "submit"), body, 5)).data)
        assert (accepted["kind"], accepted["state"]) == ("accepted", "QUEUED")
        bus.network.partition({"one"}, {"two", "caller", SERVER})
        await until(two.leading.is_set, 60)
        again = json.loads((await caller.request(subjects.api("acme", "submit"), body, 5)).data)
        assert again["duplicate"] is True
        bus.network.heal()
        await until(lambda: not one.leading.is_set(), 60)
        assert two.reign is not None
        assert two.reign.engine.state.epoch == 2
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    simulate(scene, delay_ms=(0.2, 3))
