"""A worker on a disk that is full, or without a free descriptor: what ends a job needs neither, and a job that cannot
be started for want of room has not failed."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.errors import Refused
from moorage.system.proctree import boottime_s
from moorage.worker.agent.journal import JournalUnwritable
from moorage.worker.agent.run import SUPERVISOR_FOLDER, start
from moorage.worker.drivers.base import Assignment, Driver
from moorage.worker.drivers.conformance.leader import ScriptedLeader
from moorage.worker.session.member_messages import Ended, Started
from moorage.worker.supervisor.client import Supervised
from moorage.worker.supervisor.protocol import LOG_NAME, EndMember
from tests.disk import fill, mount_small, unmount
from tests.system.worker.agent.test_agent_process import agent_process, body, name_of, place, settings_of, state_folder
from tests.system.worker.supervisor_rig import arguments_of, lives, poll, rig_at, run, sh
from tests.waiting import until

DISK_MIB = 4


class Keeps(Driver):
    """Runs nothing; its agent has a journal, as with any driver whose members may outlive it."""

    name = "keeps"
    capabilities = Capabilities(uses_devices=False, outlives_agent=True)
    closed = False

    def start(self, assignments: list[Assignment]) -> None:
        names = [assignment.name for assignment in assignments]
        self.report(Started(names))
        self.report(Ended([(name, 0, "exit") for name in names]))

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        return

    async def close(self) -> None:
        type(self).closed = True


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
def test_the_fence_ends_members_though_the_log_has_no_room(disk: Path, proof: str) -> None:
    async def scenario() -> None:
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

    run(scenario())


@pytest.mark.parametrize("proof", ["cgroup", "walk"])
def test_members_end_though_the_supervisor_has_no_free_descriptor(tmp_path: Path, proof: str) -> None:
    """SIGKILL, the look at what is left, and the proof: none may be given up because one of them was refused."""

    async def scenario() -> None:
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
                await rig.client.end([EndMember(key="a", grace_s=0.1)])
                await rig.client.fence(boottime_s() + 0.2, 0.1)
                await poll(lambda: not any(lives(pid) for pid in mains))
            finally:
                resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
            ends = [await rig.ended(key) for key in "abc"]
            assert [(each.reason, each.signal) for each in ends] == [("end", 9), ("exit", None), ("fence", 9)]

    run(scenario())


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
                    fact.kind == "refused" for fact in seat.facts
                ):  # a block of its journal has room for some
                    fence += 1
                    name = name_of(fence=fence)
                    await leader.want("w1", place(name, body("exit 0"), (1,)))
                    await until(lambda name=name: {"freed", "refused"} & set(seat.kinds(name)), what="its end")
                refused = await leader.heard("w1", "refused", name)
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
                await leader.heard("w1", "refused", untold)
                assert seat.fact("exited", untold) is None
                last = name_of(fence=fence + 2)
                await leader.want("w1", place(last, body("exit 0"), (1,)))
                assert (await leader.heard("w1", "exited", last)).code == 0
        finally:
            supervised = await Supervised.connect(room)
            await supervised.shutdown(0.0)
            unmount(room)


async def is_over(supervised: Supervised, name: AttemptName) -> bool:
    key = "/".join(map(str, name))
    return any(ended.key.endswith(key) for ended in (await supervised.list()).ended)


async def test_an_agent_whose_journal_cannot_be_written_stops_and_says_which(
    nats_url: str, unique: str, disk: Path
) -> None:
    async with ScriptedLeader(nats_url, unique) as leader:
        settings = settings_of(disk / "state", unique, drivers=("tests.system.worker.agent.test_out_of_room:Keeps",))
        worker = await start(settings, nats_url)
        await leader.joined("w1")
        fill(disk)
        fence = 10
        while not worker.host.failed.done():
            fence += 1
            name = name_of(fence=fence)
            await leader.want("w1", place(name, body("exit 0", run={"driver": "keeps"}), ()))
            await until(lambda name=name: worker.host.failed.done() or leader.seat("w1").kinds(name))
        with pytest.raises(JournalUnwritable, match=r"w1\.journal cannot be written: No space left on device"):
            worker.host.failed.result()
        await worker.stop()
        assert Keeps.closed, "what broke is closed, too"


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
