"""A scheduler whose wall clock is wrong, as after a restart without a network: the nats-server's stands beside it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.config import Config
from moorage.scheduler.leader.service import Scheduler
from moorage.scheduler.ledger.backup import BackupRefused, backup, restore
from moorage.scheduler.ledger.ledger import Ledger
from moorage.schemas.subjects import Subjects
from tests.servers import Server
from tests.system.live.stack import QUICK, Stack, caller, stack
from tests.waiting import until

DAYS_S: Final = 2 * 86_400.0
#: between two readings of right clocks, and what a busy machine does in between
NEAR_S: Final = 600.0


@contextlib.asynccontextmanager
async def one_here(made: Stack, config: Config) -> AsyncIterator[Scheduler]:
    """A scheduler in this process, to see into; it does not resign."""
    async with await connect(made.url, "here") as world, await connect(made.ledger_url, "here ledger") as ledger:
        scheduler = Scheduler(world, ledger, config=config, subjects=made.subjects)
        running = asyncio.create_task(scheduler.run())
        try:
            yield scheduler
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def set_forward(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """This process's wall clock, from now on; the server and every other process keep theirs."""
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + seconds)


async def test_ledger_time_goes_on_from_the_earlier_of_two_clocks(nats_server: Server, unique: str) -> None:
    subjects = Subjects(unique)
    async with await connect(nats_server.ledger_url, "ledger") as connection:
        jetstream, ledger = JetStream(connection), Ledger(JetStream(connection), subjects, 1)
        await ledger.ensure()
        try:
            info = await jetstream.stream_info(subjects.ledger_stream)
        finally:
            await jetstream.delete_stream(subjects.ledger_stream)
    right_s = time.time()
    assert abs(ledger.wall_s() - right_s) < NEAR_S
    for off_s, found_s in ((-DAYS_S, right_s - DAYS_S), (DAYS_S, right_s)):
        ledger.note(msgspec.structs.replace(info, now=datetime.fromtimestamp(right_s + off_s, UTC).isoformat()))
        assert abs(ledger.server_s() - right_s - off_s) < NEAR_S
        assert abs(ledger.wall_s() - found_s) < NEAR_S


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [DAYS_S, -DAYS_S])
async def test_a_leader_whose_clock_is_wrong_ends_no_deadline(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    began_s = time.time()
    async with stack(nats_server, unique) as made, caller(made) as acme:
        first = await made.scheduler(config=QUICK)
        await acme.leader()
        await acme.submit("waits", "true", start_within_s=86_400, deadline_s=86_400)
        await first.kill()
        set_forward(monkeypatch, ahead_s)
        async with one_here(made, msgspec.convert(QUICK, Config)):
            await acme.leader(2)
            await acme.submit("later", "true", start_within_s=86_400)
            assert [await acme.state(job) for job in ("waits", "later")] == ["QUEUED", "QUEUED"]
            accepted = [(await acme.show(job))["changes"][0]["time_ms"] / 1000 for job in ("waits", "later")]
            assert began_s <= accepted[0] <= accepted[1] < began_s + NEAR_S


@pytest.mark.slow
async def test_a_standby_whose_clock_is_ahead_deposes_nobody(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        set_forward(monkeypatch, DAYS_S)
        # it waits longer than a leader on a busy machine is ever silent
        async with one_here(made, Config(takeover_s=60.0, lease_s=120.0)) as standby:
            seen = await until(lambda: standby._folded, what="what stood there, folded")
            await until(lambda: standby._folded > seen + 3 or standby.leading.is_set(), what="the leader, followed")
            assert not standby.leading.is_set()
        assert (await acme.fleet())["epoch"] == 1


@pytest.mark.slow
async def test_no_ledger_is_replaced_under_its_leader_because_a_clock_is_ahead(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        file, _ = await backup(made.ledger_url, unique, tmp_path)
        set_forward(monkeypatch, DAYS_S)
        with pytest.raises(BackupRefused, match="a scheduler may lead the ledger"):
            await restore(made.ledger_url, made.url, unique, 1, file, replace=True, say=lambda _: None)
        assert (await acme.submit("goes-on", "true"))["kind"] == "accepted"
