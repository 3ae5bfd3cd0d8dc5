"""The supervisor ends containers that an engine started, without the engine and without the agent (H29)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from moorage.system.proctree import boottime_s
from moorage.worker.supervisor.client import Supervised, SupervisorRefused
from moorage.worker.supervisor.containers import LOOK_S_MAX, processes_of
from moorage.worker.supervisor.protocol import EndAttempt, Ended, StartAttempt
from tests.engines import DockerEngine, engine, why_no_dockerd
from tests.system.worker.pushed_supervisor import pushed_rig
from tests.system.worker.supervisor_rig import Rig, lives, rig_at
from tests.waiting import until

pytestmark = pytest.mark.slow

IMAGE: Final = "moorage-test:fence"


@pytest.fixture(scope="module")
def docker() -> Iterator[DockerEngine]:
    if why := why_no_dockerd():
        pytest.skip(why)
    with engine() as made:
        made.make_image(IMAGE)
        yield made


def created(docker: DockerEngine, *argv: str, image: str = IMAGE) -> str:
    return docker.docker("create", "--network=none", image, *argv).stdout.strip()


def attempt(key: str, **fields: object) -> StartAttempt:
    return StartAttempt(key=key, argv=(), env={}, **fields)  # type: ignore[arg-type]


def pids(container: str) -> list[int]:
    return [process.pid for process in processes_of([container]).get(container, [])]


async def runs(rig: Rig, docker: DockerEngine, key: str, *argv: str, **fields: object) -> str:
    """A container that the supervisor knows and has seen."""
    container = created(docker, *argv)
    await rig.client.contain(attempt(key, **fields), container)
    docker.docker("start", container)
    await rig.client.ran(key, docker.inspect(container)["State"]["Pid"])
    started = await rig.started(key)
    assert started.pid in pids(container)
    return container


async def test_the_fence_ends_it_with_agent_and_engine_killed(tmp_path: Path) -> None:
    if why := why_no_dockerd():
        pytest.skip(why)
    with engine() as docker:
        docker.make_image(IMAGE)
        async with rig_at(tmp_path / "s") as rig:
            container = await runs(rig, docker, "k", "sh", "-c", "sleep 600 & sleep 600")
            kept = await runs(rig, docker, "kept", "sleep", "600", on_partition="keep")
            await until(lambda: len(pids(container)) >= 2)
            found = pids(container)
            await rig.client.fence(boottime_s() + 1.5, 0.0)
            rig.client.close()  # the agent is gone
            docker.kill()
            await until(lambda: not any(map(lives, found)))
            again = await rig.connect(spawn_if_absent=False)

            async def ended() -> dict[str, Ended]:
                return {each.key: each for each in (await again.list()).ended}

            over = await until(lambda: with_key(ended, "k"))
            assert (over.reason, over.proof) == ("fence", "container"), "it outlived agent and engine"
            assert pids(container) == []
            assert len(pids(kept)) == 1, "it may live through a partition"
            with pytest.raises(SupervisorRefused, match="fenced"):
                await again.contain(attempt("late"), "0" * 64)
            await again.end([EndAttempt(key="kept", grace_s=0.0)])
            await rig.ended("kept")


async def test_what_may_still_be_started_is_not_over_until_the_engine_has_removed_it(
    docker: DockerEngine, tmp_path: Path
) -> None:
    async with pushed_rig(tmp_path / "s") as (rig, clock):
        late, never = created(docker, "sleep", "600"), created(docker, "sleep", "600")
        for key, container in (("late", late), ("never", never)):
            await rig.client.contain(attempt(key), container)
        await rig.client.fence(boottime_s(), 0.0)
        await clock.push(LOOK_S_MAX, 20)
        await rig.client.list()
        assert rig.ends() == {}, "nothing of it is there, and its engine may be about to start it"
        docker.docker("start", late, check=False)  # what an engine does that had stood still
        ended = await rig.ended("late")
        assert (ended.reason, ended.proof) == ("fence", "container")
        docker.docker("rm", never)
        await rig.client.removed(["never"])
        assert ((await rig.ended("never")).proof, rig.ends()["never"].reason) == ("never-ran", "fence")


async def test_the_next_supervisor_ends_what_the_last_one_left(docker: DockerEngine, tmp_path: Path) -> None:
    async with rig_at(tmp_path / "s") as rig:
        container = await runs(rig, docker, "k", "sleep", "600")
        waiting = created(docker, "sleep", "600")
        await rig.client.contain(attempt("waiting"), waiting)
        os.kill(rig.client.identity.pid, signal.SIGKILL)
        await rig.client.wait_gone()
        assert len(pids(container)) == 1
        again = await rig.connect()

        async def ended() -> dict[str, Ended]:
            return {each.key: each for each in (await again.list()).ended}

        found = await until(lambda: with_key(ended, "k"))
        assert (found.reason, found.proof) == ("supervisor-died", "container")
        assert pids(container) == []
        assert await with_key(ended, "waiting") is None
        with pytest.raises(SupervisorRefused, match="unproven"):
            await again.contain(attempt("waiting"), waiting)
        docker.docker("rm", waiting)
        await again.removed(["waiting"])
        assert (await until(lambda: with_key(ended, "waiting"))).proof == "never-ran"


async def with_key(ended: object, key: str) -> Ended | None:
    found: dict[str, Ended] = await ended()  # type: ignore[operator]
    return found.get(key)


async def test_a_key_is_taken_on_once_and_what_is_no_container_never(docker: DockerEngine, tmp_path: Path) -> None:
    async with rig_at(tmp_path / "s") as rig:
        container = await runs(rig, docker, "k", "sleep", "600")
        for key, named, word in (("k", container, "known"), ("x", "../../etc", "invalid-argument")):
            with pytest.raises(SupervisorRefused, match=word):
                await rig.client.contain(attempt(key), named)


async def test_a_pid_of_the_engine_counts_only_once_the_process_was_seen_in_the_container(
    docker: DockerEngine, tmp_path: Path
) -> None:
    async with rig_at(tmp_path / "s") as rig:
        other = await runs(rig, docker, "other", "sleep", "600")
        (foreign,) = pids(other)
        for key, pid in (("own", os.getpid()), ("foreign", foreign), ("gone", 1 << 22)):
            container = created(docker, "sleep", "600")
            await rig.client.contain(attempt(key), container)
            await rig.client.ran(key, pid)
            ended = await rig.ended(key)
            assert (ended.pid, ended.proof) == (None, "container"), "nothing of it runs, and no other process is it"
        assert pids(other) == [foreign]
        container = created(docker, "sh", "-c", "exit 0")
        await rig.client.contain(attempt("short"), container)
        docker.docker("start", "--attach", container)
        await rig.client.ran("short", docker.inspect(container)["State"]["Pid"])
        ended = await rig.ended("short")
        assert (ended.reason, ended.proof) == ("exit", "container"), "it was over before anybody could see it"


async def test_an_idle_supervisor_stays_while_a_container_runs(docker: DockerEngine, tmp_path: Path) -> None:
    async with pushed_rig(tmp_path / "s", "--linger", "100") as (rig, clock):
        container = await runs(rig, docker, "k", "sleep", "600")
        assert not await rig.client.shutdown_if_idle()
        rig.client.close()
        await clock.push(1000)
        last = await Supervised.connect(tmp_path / "s", spawn_if_absent=False)
        await last.shutdown(0.0)
        assert pids(container) == []
