"""Whose the processes of containers are, which a worker asks to measure what sharers use: on a real engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.worker.session.member_messages import Ended, Started
from tests.engines import DockerEngine, engine, why_no_dockerd
from tests.waiting import until
from tests.worker.drivers.test_docker_driver import IMAGE, Rig, settings, state_of


@pytest.fixture
def docker() -> Iterator[DockerEngine]:
    if why := why_no_dockerd():
        pytest.skip(why)
    with engine() as made:
        made.make_image(IMAGE)
        yield made


@pytest.mark.slow
async def test_a_process_in_a_container_is_its_jobs_also_for_the_next_agent(
    docker: DockerEngine, tmp_path: Path
) -> None:
    async with state_of(tmp_path) as state:
        async with Rig(state, settings(docker)) as rig:
            names = [rig.start(job, "sleep", "600") for job in ("j1", "j2")]
            for name in names:
                await rig.reported(Started, name)
            pids = {name: _pid_of(docker, name[1]) for name in names}
            asked = [*pids.values(), os.getpid(), 2**22 + 1]  # the last is above the kernel's greatest pid
            told = {pid: name for name, pid in pids.items()}
            assert rig.driver.can_measure()
            assert rig.driver.members_of(asked) == told
        async with Rig(state, settings(docker)) as rig:
            assert not rig.driver.can_measure(), "the engine has not told yet which containers they are"
            await until(rig.driver.can_measure, 60)
            assert rig.driver.members_of(asked) == told
            for name in names:
                rig.driver.end(name, 0.0, "the test is over")
            for name in names:
                await rig.reported(Ended, name)


def _pid_of(docker: DockerEngine, job: str) -> int:
    found = docker.docker("ps", "--quiet", "--filter", f"label=moorage.job={job}").stdout.split()
    return int(docker.inspect(found[0])["State"]["Pid"])
