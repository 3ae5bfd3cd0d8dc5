"""A worker whose state folder is removed, or that cannot start: what it says, and what it leaves behind."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path

import pytest

from moorage.bus.connection import Connection
from moorage.schemas.errors import Refused, problem
from moorage.schemas.frames import End
from moorage.system import record_file
from moorage.system.proctree import boottime_s
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker import EmbeddedWorker, WorkerSettings
from moorage.worker.agent.agent import Agent
from moorage.worker.agent.fleet_host import FleetHost
from moorage.worker.agent.journal import Journal, JournalUnwritable, is_in_use
from moorage.worker.agent.leader_link import STATE_GONE
from moorage.worker.agent.run import WORKERS_FOLDER, start
from moorage.worker.devices.readers.simulated import SimulatedInventory
from tests.system.worker.agent.test_agent_process import body, name_of, place, settings_of, state_folder
from tests.waiting import until


async def test_a_worker_whose_state_folder_is_removed_says_so_and_starts_nothing(
    nats_url: str, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        worker = await start(settings_of(state, unique), nats_url)
        seat = await leader.joined("w1")
        shutil.rmtree(state / WORKERS_FOLDER)
        await until(lambda: seat.renewals and seat.renewals[-1].unwell, what="a renewal that says so")
        told = seat.renewals[-1].unwell
        assert [(each.slot, each.kind, each.detail) for each in told] == [
            (slot, "state-gone", STATE_GONE) for slot in range(4)
        ]
        name = name_of()
        await leader.want("w1", place(name, body("true"), (0,)))
        assert (await leader.await_report("w1", "refused", name)).detail == STATE_GONE
        assert len([line for line in caplog.messages if "state-gone" in line]) == 1
        await worker.stop()
        assert seat.said_goodbye, "the next agent of this id need not wait for the lease"


async def test_a_driver_whose_engine_does_not_answer_is_in_each_renewal(nats_url: str, unique: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        worker = await start(settings_of(state, unique), nats_url)
        seat = await leader.joined("w1")
        await until(lambda: seat.renewals, what="a renewal")
        assert seat.renewals[-1].down == []
        [driver] = worker.agents[0].drivers.values()
        driver.engine_down = lambda: ("connection refused", boottime_s())  # type: ignore[method-assign]
        await until(lambda: seat.renewals[-1].down, what="a renewal that says so")
        [told] = seat.renewals[-1].down
        assert (told.driver, told.why) == (driver.name, "connection refused")
        await worker.stop()


async def test_a_worker_whose_state_folder_is_gone_ends_its_jobs_with_itself(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    """No later agent could take them over."""
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        worker = await start(settings_of(state, unique), nats_url)
        seat = await leader.joined("w1")
        name = name_of()
        await leader.want("w1", place(name, body("exec sleep 600"), (0,)))
        await leader.await_report("w1", "started", name)
        shutil.rmtree(state / WORKERS_FOLDER)
        await worker.stop()
        assert seat.said_goodbye
        assert seat.kinds(name)[-2:] == ["exited", "freed"]


async def test_a_worker_that_ends_its_jobs_with_itself_lets_members_of_services_go_on_a_while(
    nats_url: str, unique: str
) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        worker = await start(settings_of(state, unique), nats_url)
        seat = await leader.joined("w1")
        name = name_of()
        await leader.want("w1", place(name, body("exec sleep 600", service={"name": "embed"}), (0,)))
        await leader.await_report("w1", "started", name)
        shutil.rmtree(state / WORKERS_FOLDER)
        stopping = asyncio.create_task(worker.stop())
        await until(lambda: seat.renewals[-1].leaving_s is not None, what="a renewal that says so")
        assert "exited" not in seat.kinds(name)
        await leader.want("w1", End(*name, "moved to replica 1"))
        await stopping
        assert seat.said_goodbye


async def test_a_start_that_fails_leaves_nothing_open(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    close_connection, close_inventory = Connection.close, SimulatedInventory.close

    async def closes(self: Connection) -> None:
        closed.append("connection")
        await close_connection(self)

    def closes_inventory(self: SimulatedInventory) -> None:
        closed.append("inventory")
        close_inventory(self)

    async def refuses(self: FleetHost, agent: object) -> None:
        raise Refused(problem("not-permitted", "not here"))

    monkeypatch.setattr(Connection, "close", closes)
    monkeypatch.setattr(SimulatedInventory, "close", closes_inventory)
    monkeypatch.setattr(FleetHost, "add", refuses)
    with pytest.raises(Refused, match="not here"):
        await start(settings_of(tmp_path, unique), nats_url)
    assert closed == ["inventory", "connection"]


@pytest.mark.parametrize("at", ["its last turn", "its close"])
async def test_a_journal_that_cannot_be_written_at_the_end_leaves_nothing_open(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    closed: list[Connection] = []
    close_connection, write = Connection.close, record_file._write_all

    async def closes(self: Connection) -> None:
        closed.append(self)
        await close_connection(self)

    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        worker = await start(WorkerSettings(state, "w1", unique, simulate="2x1xH100"), nats_url)
        for agent in worker.agents:
            await leader.joined(agent.worker)
        journals = [agent.journal for agent in worker.agents if isinstance(agent.journal, Journal)]

        def full(file: int, data: bytes) -> None:
            if file == journals[0]._file._descriptor:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            write(file, data)

        monkeypatch.setattr(record_file, "_write_all", full)
        monkeypatch.setattr(Connection, "close", closes)
        if at == "its close":
            monkeypatch.setattr(Agent, "leave_if_idle", lambda agent: None)
        kind, name = (Journal, "close") if at == "its close" else (Agent, "leave_if_idle")
        ends = getattr(kind, name)

        def ends_behind_a_record(it: Journal | Agent) -> None:
            journals[0].answered(0)  # not before: a turn of the agent would write it
            ends(it)

        monkeypatch.setattr(kind, name, ends_behind_a_record)
        with pytest.raises(JournalUnwritable):
            await worker.stop()
        assert closed == [worker.connection]
        assert [is_in_use(journal.path) for journal in journals] == [False, False]


async def test_a_refused_subscription_closes_the_connection(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_host = FleetHost.open

    async def refuses(self: FleetHost) -> None:
        await open_host(self)
        raise Refused(problem("not-permitted", "not here"))

    closed: list[Connection] = []
    close_connection = Connection.close

    async def closes(self: Connection) -> None:
        closed.append(self)
        await close_connection(self)

    monkeypatch.setattr(Connection, "close", closes)
    monkeypatch.setattr(FleetHost, "open", refuses)
    with pytest.raises(Refused, match="not here"):
        await start(settings_of(tmp_path, unique), nats_url)
    assert len(closed) == 1


async def test_an_embedded_worker_heeds_the_settings_of_a_worker(nats_url: str, unique: str, tmp_path: Path) -> None:
    settings = WorkerSettings(tmp_path / "state", "w1", unique, simulate="1xH100", nats=nats_url)
    worker = EmbeddedWorker(None, settings)
    worker.handler("echo")(lambda context: None)
    async with worker:
        assert (tmp_path / "state").is_dir(), "and the server of the settings let it in"


async def test_an_embedded_worker_refuses_a_state_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    worker = EmbeddedWorker(None, WorkerSettings(tmp_path / "file" / "state", "w1", simulate="1xH100"))
    worker.handler("echo")(lambda context: None)
    with pytest.raises(Refused, match="cannot be used"):
        await worker.open()
