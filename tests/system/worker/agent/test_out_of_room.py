"""A worker on a disk that is full, or without a free descriptor: what ends a job needs neither, and a job that cannot
be started for want of room has not failed."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import Refused
from moorage.system.proctree import boottime_s
from moorage.testing.conformance.leader import ScriptedLeader, Seat
from moorage.worker.agent.run import SUPERVISOR_FOLDER, start
from moorage.worker.agent.state_disk import PIECE_BYTES, RESERVE_NAME
from moorage.worker.settings import WorkerSettings
from moorage.worker.supervisor.client import Supervised
from moorage.worker.supervisor.protocol import LOG_NAME, EndAttempt
from tests.disk import fill, mount_small, unmount
from tests.system.worker.agent.test_agent_process import (
    agent_process,
    body,
    name_of,
    place,
    settings_of,
    state_folder,
    supervised,
)
from tests.system.worker.supervisor_rig import arguments_of, lives, poll, rig_at, sh
from tests.waiting import until

DISK_MIB = 8


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of our own, small enough to fill."""
    folder = tmp_path / "disk"
    if not mount_small(folder, DISK_MIB):
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        unmount(folder)


def fill_to_the_log(disk: Path) -> Path:
    """Take all room, that in the log's last block too, as lines before would have; delete what it returns."""
    filler = fill(disk)
    with (disk / "state" / LOG_NAME).open("ab", buffering=0) as log, contextlib.suppress(OSError):
        while log.write(b"#"):
            continue
    return filler


@pytest.mark.parametrize("proof", ["cgroup", "walk"])
async def test_the_fence_ends_attempts_though_the_log_has_no_room(disk: Path, proof: str) -> None:
    async with rig_at(disk / "state", *arguments_of(proof)) as rig:
        await rig.client.start([sh("k", "exec sleep 600")])
        await rig.started("k")
        filler = fill_to_the_log(disk)
        try:
            await rig.client.fence(boottime_s() + 0.2, 0.5)
            ended = await rig.ended("k")
        finally:
            filler.unlink()
        assert (ended.reason, ended.signal) == ("fence", 15)


@pytest.mark.parametrize("proof", ["cgroup", "walk"])
async def test_attempts_end_though_the_supervisor_has_no_free_descriptor(tmp_path: Path, proof: str) -> None:
    """SIGKILL, the look at what is left, and the proof: none may be given up because one of them was refused."""
    async with rig_at(tmp_path / "state", *arguments_of(proof)) as rig:
        deaf = "trap '' TERM; echo up; while :; do sleep 600; done"
        await rig.client.start([sh("a", deaf), sh("b", f"({deaf}) & exit 0"), sh("c", deaf)])
        for key in "abc":
            await rig.started(key)
        for key in "ac":
            await rig.line(key)  # deaf by now
        supervisor = rig.client.identity.pid
        limits = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (4, limits[1]))
        mains = [rig.starts()[key].pid for key in "ac"]
        try:
            await rig.client.end([EndAttempt(key="a", grace_s=0.1)])
            await rig.client.fence(boottime_s() + 0.2, 0.1)
            await poll(lambda: not any(lives(pid) for pid in mains))
        finally:
            resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
        ends = [await rig.ended(key) for key in "abc"]
        assert [(each.reason, each.signal) for each in ends] == [("end", 9), ("exit", None), ("fence", 9)]


@pytest.mark.slow
async def test_what_this_host_has_no_room_to_start_is_refused_and_not_failed(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    """Else one full disk would fail the whole queue, job by job; told after a restart of the agent, too."""
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        room = state / SUPERVISOR_FOLDER
        if not mount_small(room, DISK_MIB):
            pytest.skip("needs the right to mount")
        try:
            async with agent_process(state, nats_url, unique) as agent:
                await leader.joined("w1")
                seat = leader.seat("w1")
                filler = fill(room)
                fence = 10
                while not any(
                    report.kind == "refused" for report in seat.reports
                ):  # a block of its journal has room for some
                    fence += 1
                    name = name_of(fence=fence)
                    await leader.want("w1", place(name, body("exit 0"), (1,)))
                    await until(lambda name=name: {"freed", "refused"} & set(seat.kinds(name)), what="its end")
                refused = await leader.await_report("w1", "refused", name)
                assert "No space left on device" in refused.detail
                assert seat.kinds(name) == ["claimed", "refused"]
                # and one that the agent has not told when it dies: its supervisor tells it again
                untold = name_of(fence=fence + 1)
                leader.mute = {"fact", "renew"}
                await leader.want("w1", place(untold, body("exit 0"), (1,)))
                supervised = await Supervised.connect(room, spawn_if_absent=False)
                await until(lambda: is_over(supervised, untold), what="the supervisor has refused it")
                supervised.close()
                agent.kill()
                await agent.wait()
            filler.unlink()
            leader.mute = set()
            async with agent_process(state, nats_url, unique):
                await leader.joined("w1", joins=2)
                await leader.await_report("w1", "refused", untold)
                assert seat.report("exited", untold) is None
                last = name_of(fence=fence + 2)
                await leader.want("w1", place(last, body("exit 0"), (1,)))
                assert (await leader.await_report("w1", "exited", last)).code == 0
        finally:
            supervised = await Supervised.connect(room)
            await supervised.shutdown(0.0)
            unmount(room)


async def is_over(supervised: Supervised, name: AttemptName) -> bool:
    key = "/".join(map(str, name))
    return any(ended.key.endswith(key) for ended in (await supervised.list()).ended)


async def test_a_full_disk_closes_a_worker_and_its_jobs_run_on(nats_url: str, unique: str, disk: Path) -> None:
    """Its reserve has room for its reports; it opens by itself once there is room again, and has its reserve back."""
    state = disk / "state"
    async with (
        ScriptedLeader(nats_url, unique) as leader,
        supervised(state),
        running(settings_of(state, unique, disk_reserve=PIECE_BYTES), nats_url, leader) as seat,
    ):
        assert (state / RESERVE_NAME).stat().st_size == PIECE_BYTES
        stays, ends = name_of(job="stays"), name_of(job="ends", fence=11)
        go = disk.parent / "go"
        await leader.want("w1", place(stays, body("exec sleep 600"), (0,)))
        await leader.want("w1", place(ends, body(f"while [ ! -e {go} ]; do sleep 0.1; done"), (1,)))
        for name in (stays, ends):
            await leader.await_report("w1", "started", name)
        filler = fill_to_the_journal(disk, state / "workers" / "w1.journal")
        down = await until(lambda: seat.renewals[-1].down, what="it says that its disk is full")
        assert {each.driver for each in down} == {"process"}
        assert down[0].why.startswith(f"disk-full: no room on the disk of {state}")
        late = name_of(job="late", fence=12)
        await leader.want("w1", place(late, body("exit 0"), (2,)))  # sent before the leader knew
        assert (await leader.await_report("w1", "refused", late)).detail == down[0].why
        go.touch()
        assert (await leader.await_report("w1", "exited", ends)).code == 0
        assert (state / RESERVE_NAME).stat().st_size == 0, "what it told stands in the journal"
        renewals = len(seat.renewals)
        await until(lambda: len(seat.renewals) > renewals + 3, what="it renews")
        assert seat.kinds(stays) == ["claimed", "started"]
        filler.unlink()
        await until(lambda: not seat.renewals[-1].down, what="it opens by itself")
        assert (state / RESERVE_NAME).stat().st_size == PIECE_BYTES
        again = name_of(job="again", fence=13)
        await leader.want("w1", place(again, body("exit 0"), (2,)))
        assert (await leader.await_report("w1", "exited", again)).code == 0
        assert seat.kinds(stays) == ["claimed", "started"]


async def test_without_a_reserve_reports_wait_for_room_and_nothing_is_started(
    nats_url: str, unique: str, disk: Path
) -> None:
    state = disk / "state"
    async with (
        ScriptedLeader(nats_url, unique) as leader,
        supervised(state),
        running(settings_of(state, unique, disk_reserve=0), nats_url, leader) as seat,
    ):
        go, name = disk.parent / "go", name_of()
        await leader.want("w1", place(name, body(f"while [ ! -e {go} ]; do sleep 0.1; done"), (0,)))
        await leader.await_report("w1", "started", name)
        filler = fill_to_the_journal(disk, state / "workers" / "w1.journal")
        await until(lambda: seat.renewals[-1].down, what="it says that its disk is full")
        late = name_of(job="late", fence=12)
        await leader.want("w1", place(late, body("exit 0"), (2,)))
        go.touch()
        pool = seat.renewals[-1].generation
        await until(lambda: seat.renewals[-1].generation > pool, what="the job has ended there")
        renewals = len(seat.renewals)
        await until(lambda: len(seat.renewals) > renewals + 5, what="it renews")
        assert seat.kinds(name) == ["claimed", "started"], "its end stands in no journal"
        assert seat.kinds(late) == []
        filler.unlink()
        assert (await leader.await_report("w1", "exited", name)).code == 0
        assert "disk-full" in (await leader.await_report("w1", "refused", late)).detail
        await until(lambda: not seat.renewals[-1].down, what="it opens by itself")


async def test_an_agent_that_starts_on_a_full_disk_takes_its_jobs_over(nats_url: str, unique: str, disk: Path) -> None:
    state = disk / "state"
    async with ScriptedLeader(nats_url, unique) as leader, supervised(state):
        settings = settings_of(state, unique, disk_reserve=PIECE_BYTES)
        name = name_of()
        async with running(settings, nats_url, leader) as seat:
            await leader.want("w1", place(name, body("exec sleep 600"), (0,)))
            await leader.await_report("w1", "started", name)
        filler = fill(disk)
        async with running(settings, nats_url, leader, joins=2) as seat:
            assert [each.job for each in seat.joins[-1].holding] == [name[1]]
            assert await until(lambda: seat.renewals[-1].down, what="it says that its disk is full")
            filler.unlink()
            await until(lambda: not seat.renewals[-1].down, what="it opens by itself")
            assert "exited" not in seat.kinds(name)


async def test_a_nearly_full_disk_is_told_before_it_is_full(
    nats_url: str, unique: str, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = disk / "state"
    async with (
        ScriptedLeader(nats_url, unique) as leader,
        supervised(state),
        running(settings_of(state, unique, disk_reserve=0), nats_url, leader) as seat,
    ):
        filler = fill(disk, leaving=DISK_MIB * 2**20 * 3 // 100)
        load = await until(lambda: next((each for each in seat.loads if each.warning), None), what="it warns")
        assert re.match(r"disk: 9[78] % of the disk of ", load.warning)
        assert not seat.renewals[-1].down
        assert sum("are in use" in line for line in caplog.messages) == 1
        filler.unlink()
        await until(lambda: not seat.loads[-1].warning, what="it has room again")


async def test_a_disk_without_room_for_the_reserve_is_told(
    nats_url: str, unique: str, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filler = fill(disk, leaving=DISK_MIB * 2**20 // 25)
    async with (
        ScriptedLeader(nats_url, unique) as leader,
        supervised(disk / "state"),
        running(settings_of(disk / "state", unique), nats_url, leader) as seat,
    ):
        assert not seat.renewals[-1].down, "and works"
        filler.unlink()
    assert sum("no reserve of 1 MiB at " in line for line in caplog.messages) == 1


@contextlib.asynccontextmanager
async def running(
    settings: WorkerSettings, nats_url: str, leader: ScriptedLeader, joins: int = 1
) -> AsyncIterator[Seat]:
    worker = await start(settings, nats_url)
    try:
        yield await leader.joined("w1", joins=joins)
        if worker.host.failed.done():
            worker.host.failed.result()
    finally:
        await worker.stop()


def fill_to_the_journal(disk: Path, journal: Path) -> Path:
    """Take all room, that in the journal's last block too; delete what it returns."""
    filler = fill(disk)
    size = journal.stat().st_size
    with journal.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0"):  # a torn end, which is left out
            continue
    assert journal.stat().st_size > size
    return filler


@pytest.mark.parametrize("there", ["file", "journal", "full"])
async def test_a_state_folder_that_cannot_be_used_is_refused_by_its_name(
    nats_url: str, unique: str, disk: Path, there: str
) -> None:
    state = disk / "state"
    if there == "file":
        state.touch()
    elif there == "journal":
        (state / "workers" / "w1.journal").mkdir(parents=True)
    else:
        fill(disk)
    with pytest.raises(Refused, match=f"the state folder {state} cannot be used: ") as refused:
        await start(settings_of(state, unique), nats_url)
    assert refused.value.problem.field == "$.state_dir"


async def test_a_folder_of_jobs_folders_that_cannot_be_is_refused_at_the_start(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    settings = msgspec.structs.replace(settings_of(tmp_path / "state", unique), folder_dir=tmp_path / "file" / "jobs")
    with pytest.raises(Refused, match="jobs cannot be used: Not a directory") as refused:
        await start(settings, nats_url)
    assert refused.value.problem.field == "$.folder_dir"
