"""A worker that is started again with other settings on the state folder of before, while its jobs run on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.schemas.errors import refuse
from moorage.schemas.frames import End
from moorage.schemas.job import Request
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.agent import Agent
from moorage.worker.agent.run import start
from moorage.worker.devices.readers.simulated import SimulatedInventory
from moorage.worker.session import restoring
from moorage.worker.session.restoring import same_slots
from moorage.worker.settings import WorkerSettings
from tests.system.worker.agent.test_agent_process import (
    body,
    is_alive,
    name_of,
    pid_of,
    place,
    settings_of,
    state_folder,
)
from tests.waiting import until


@contextlib.asynccontextmanager
async def running(settings: WorkerSettings, url: str) -> AsyncIterator[Agent]:
    worker = await start(settings, url)
    try:
        yield worker.agents[0]
        if worker.host.failed.done():
            worker.host.failed.result()
    finally:
        await worker.stop()


def sleeper(pid_file: Path) -> bytes:
    return body(f"echo $$ > {pid_file}; exec sleep 600")


@pytest.mark.parametrize("change", [{"lent_slots": (0, 1)}, {"sharers_max": {"mps": 0}}, {}])
async def test_what_runs_keeps_its_devices_whatever_the_pool_may_lend_now(
    nats_url: str, unique: str, tmp_path: Path, change: dict[str, Any]
) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        settings = settings_of(state, unique)
        name = name_of()
        async with running(settings, nats_url):
            await leader.joined("w1")
            mode = "mps" if "sharers_max" in change else "exclusive"
            await leader.want("w1", place(name, sleeper(tmp_path / "pid"), (2, 3), mode=mode))
            await leader.await_report("w1", "started", name)
        async with running(msgspec.structs.replace(settings, **change), nats_url) as agent:
            await leader.joined("w1", joins=2)
            assert [each.sharers for each in agent.pool.slot_states()] == [0, 0, 1, 1]
            # as a process of this host does over the socket for leases: it waits, as they are not free
            claiming = asyncio.create_task(agent.pool.claim({2, 3}))
            await asyncio.sleep(0)
            claiming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claiming
            await leader.want("w1", End(*name, "cancelled", 0))
            await leader.await_report("w1", "freed", name)
            assert [each.sharers for each in agent.pool.slot_states()] == [0, 0, 0, 0]
            agent.pool.validate()


async def test_a_mode_without_sharers_is_not_offered(nats_url: str, unique: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        settings = msgspec.structs.replace(settings_of(state, unique), sharers_max={"mps": 0, "time-slice": 2})
        async with running(settings, nats_url):
            hello = (await leader.joined("w1")).joins[0].hello
            assert "mps" in settings.modes
            assert "mps" not in hello.modes
            assert hello.sharers_max == {"time-slice": 2}


async def test_a_job_on_a_device_that_is_gone_ends_before_the_join_and_the_others_go_on(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    """The leader would refuse the join for as long as it ran, and the fence would end the others with it."""
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        settings = settings_of(state, unique)
        gone, stays, held = name_of(), name_of("stays", fence=11), name_of("held", fence=12)
        async with running(settings, nats_url):
            await leader.joined("w1")
            await leader.want(
                "w1",
                place(gone, sleeper(tmp_path / "gone"), (1, 3)),
                place(stays, sleeper(tmp_path / "stays"), (0,)),
                place(held, body("true", replicas=2), (2,), hold=True),
            )
            await leader.await_report("w1", "claimed", held)
            pids = [await pid_of(tmp_path / "gone"), await pid_of(tmp_path / "stays")]
        alive_at_join: list[list[bool]] = []
        leader.on_join = lambda join: alive_at_join.append([is_alive(pid) for pid in pids])
        async with running(msgspec.structs.replace(settings, simulate="2xH100"), nats_url) as agent:
            seat = await leader.joined("w1", joins=2)
            assert alive_at_join == [[False, True]]
            assert [each.job for each in seat.joins[-1].holding] == ["stays"]
            exited = await leader.await_report("w1", "exited", gone)
            assert (exited.code, exited.detail) == (-9, "lost")
            assert seat.kinds(gone)[-2:] == ["exited", "freed"]
            assert seat.kinds(held)[-1] == "withdrawn"
            assert [each.sharers for each in agent.pool.slot_states()] == [1, 0]
            agent.pool.validate()
        async with running(msgspec.structs.replace(settings, simulate="2xH100"), nats_url):
            seat = await leader.joined("w1", joins=3)
            assert [each.job for each in seat.joins[-1].holding] == ["stays"]


@pytest.mark.slow
async def test_a_device_that_moved_is_in_use_again_once_the_memory_of_what_ran_there_is_seen_free(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job is no attempt of the next agent: it ended as lost, and whoever came next met its memory."""
    kept = {1}
    look = SimulatedInventory.memory_is_free

    async def memory_is_free(inventory: SimulatedInventory, slot: int) -> bool:
        return slot not in kept and await look(inventory, slot)

    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        settings = settings_of(state, unique)
        gone, other = name_of(), name_of("other", fence=11)
        early, late = name_of("early", fence=12), name_of("late", fence=13)
        async with running(settings, nats_url):
            await leader.joined("w1")
            mps = place(other, sleeper(tmp_path / "other"), (0, 2), mode="mps")
            await leader.want("w1", place(gone, sleeper(tmp_path / "gone"), (1, 3)), mps)
            pids = [await pid_of(tmp_path / job) for job in ("gone", "other")]
        monkeypatch.setattr(SimulatedInventory, "memory_is_free", memory_is_free)
        async with running(msgspec.structs.replace(settings, simulate="2xH100"), nats_url) as agent:
            seat = await leader.joined("w1", joins=2)
            assert not any(map(is_alive, pids))
            assert agent.pool.busy_slots() == [1], "of sharers nothing is awaited but their end"
            await leader.want("w1", place(early, body("true"), (1,)))
            assert (await leader.await_report("w1", "refused", early)).detail.startswith("quarantined")
        async with running(msgspec.structs.replace(settings, simulate="1xH100"), nats_url):
            await leader.joined("w1", joins=3)
        async with running(msgspec.structs.replace(settings, simulate="2xH100"), nats_url) as agent:
            seat = await leader.joined("w1", joins=4)
            assert agent.pool.busy_slots() == [1], "nor do the next agents forget it, one that cannot see it neither"
            kept.clear()
            await until(lambda: not agent.pool.busy_slots(), what="the device is in use again")
            await leader.want("w1", place(late, body("true"), (1,)))
            await leader.await_report("w1", "freed", late)
            assert seat.kinds(late)[0] == "claimed"


@pytest.mark.parametrize("reads", [False, True])
async def test_a_job_whose_request_cannot_be_read_ends_before_the_join_and_its_device_is_closed_until_seen_free(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """A newer release started it. It ran on unlisted, and its device was free for the next job."""
    kept = {1}
    look = SimulatedInventory.memory_is_free

    async def memory_is_free(inventory: SimulatedInventory, slot: int) -> bool:
        return slot not in kept and await look(inventory, slot)

    def refused(data: bytes) -> Request:
        raise refuse("unknown-version", "a request of a newer release")

    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        settings = settings_of(state, unique)
        name = name_of()
        async with running(settings, nats_url):
            await leader.joined("w1")
            await leader.want("w1", place(name, sleeper(tmp_path / "pid"), (1,)))
            pid = await pid_of(tmp_path / "pid")
        alive_at_join: list[bool] = []
        leader.on_join = lambda join: alive_at_join.append(is_alive(pid))
        monkeypatch.setattr(SimulatedInventory, "memory_is_free", memory_is_free)
        if not reads:
            monkeypatch.setattr(restoring, "decode_request", refused)
        async with running(settings, nats_url) as agent:
            seat = await leader.joined("w1", joins=2)
            assert alive_at_join == [reads]
            assert [each.job for each in seat.joins[-1].holding] == ["a"] * reads
            if not reads:
                await leader.await_report("w1", "freed", name)
                assert seat.kinds(name)[-2:] == ["exited", "freed"]
                assert agent.pool.busy_slots() == [1]
                kept.clear()
                await until(lambda: not agent.pool.busy_slots(), what="the device is in use again")


def test_slots_are_the_same_where_they_show_the_same_device() -> None:
    assert same_slots(["nvidia a", "nvidia b", "nvidia c"], ["nvidia a", "nvidia c"]) == {0}
    assert same_slots([], ["nvidia a", "nvidia b"]) == set()
    assert same_slots(["nvidia a"], []) == set()


@pytest.mark.parametrize("change", [{"worker": "w2"}, {"drivers": ("noop",)}])
async def test_what_the_new_settings_know_nothing_of_is_ended_before_the_join(
    nats_url: str, unique: str, tmp_path: Path, change: dict[str, Any]
) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        settings = settings_of(state, unique)
        async with running(settings, nats_url):
            await leader.joined("w1")
            await leader.want("w1", place(name_of(), sleeper(tmp_path / "pid"), (1,)))
            pid = await pid_of(tmp_path / "pid")
        assert is_alive(pid)
        alive_at_join: list[bool] = []
        leader.on_join = lambda join: alive_at_join.append(is_alive(pid))
        async with running(msgspec.structs.replace(settings, **change), nats_url) as agent:
            await leader.joined(agent.worker, joins=1 if agent.worker == "w2" else 2)
            assert alive_at_join == [False]


@pytest.mark.slow
async def test_a_look_at_the_devices_that_breaks_is_no_look_and_not_the_last(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        ScriptedLeader(nats_url, unique) as leader,
        state_folder() as state,
        running(settings_of(state, unique, free_wait_s=0), nats_url) as agent,
    ):
        await leader.joined("w1")
        name, looks = name_of(), 0
        sound = agent.inventory.memory_is_free

        async def breaks(slot: int) -> bool:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise OSError("the driver of the devices is being replaced")
            return await sound(slot)

        monkeypatch.setattr(agent.inventory, "memory_is_free", breaks)
        await leader.want("w1", place(name, body("exit 0"), (1,)))
        await leader.await_report("w1", "freed", name)
        assert leader.seat("w1").kinds(name) == ["claimed", "started", "exited", "quarantined", "freed"]
        assert [each.sharers for each in agent.pool.slot_states()] == [0, 0, 0, 0]
        agent.pool.validate()
