"""Snapshots of the ledger go on after one that the core failed to name."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

import pytest

from moorage.bus.connection import Connection
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import SnapshotTaken
from moorage.scheduler.leader import term
from moorage.scheduler.leader.service import Scheduler
from moorage.scheduler.ledger.ledger import Ledger
from moorage.scheduler.ledger.snapshot_follower import Command
from moorage.scheduler.ledger.snapshots import Snapshots, recover
from moorage.schemas.subjects import Subjects
from moorage.testing.bus.bus import FaultyNetwork, SimulatedBus, SimulatedClock
from tests.waiting import until

SUBJECTS: Final = Subjects("t")


def test_a_snapshot_that_the_core_fails_to_name_is_not_the_last_one_of_its_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader waited for the record that names it, so the ledger was not shortened any more."""
    bus, clock, failures = SimulatedBus(FaultyNetwork(3)), SimulatedClock(), list[str]()

    async def take(_: Command) -> SnapshotTaken:
        jetstream = JetStream(cast("Connection", bus.connect("follower", account="ledger")))
        ledger, snapshots = Ledger(jetstream, SUBJECTS, 0), Snapshots(jetstream, SUBJECTS)
        state = await recover(ledger, snapshots)
        await ledger.follow(state)
        return SnapshotTaken(*await snapshots.write(state))

    names = Engine._name_snapshot

    def fails_once(self: Engine, draft: Any, event: SnapshotTaken) -> None:
        if not failures:
            failures.append(event.name)
            raise KeyError(event.name)
        names(self, draft, event)

    monkeypatch.setattr(Engine, "_name_snapshot", fails_once)
    monkeypatch.setattr(term, "take_snapshot", take)

    async def scene() -> None:
        scheduler = Scheduler(
            cast("Connection", bus.connect("one")), cast("Connection", bus.connect("one", account="ledger")),
            subjects=SUBJECTS, snapshot_command=Command(["in this process"], {}), snapshot_records=5,
        )  # fmt: skip
        running = asyncio.ensure_future(scheduler.run())
        await until(scheduler.leading.is_set, 60)
        assert scheduler.term is not None
        state = scheduler.term.engine.state
        await until(lambda: state.snapshot_before is not None, 600)
        assert len(failures) == 1
        assert state.snapshot is not None
        assert state.snapshot[0] not in failures
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    clock.run(scene())
