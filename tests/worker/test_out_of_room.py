"""A supervisor on a disk that is full, down to its log, or without a free descriptor: what ends a job needs neither."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.worker.proctree import boottime_s
from moorage.worker.supervisor.protocol import LOG_NAME, EndMember
from tests.disk import fill, mount_small, unmount
from tests.worker.supervisor_rig import arguments_of, lives, poll, rig_at, run, sh

DISK_MIB = 4


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
            await rig.line("a")
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
