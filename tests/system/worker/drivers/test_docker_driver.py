"""The driver docker on a real engine: what it starts, what it tells of it, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device, ReadLog, Start
from moorage.schemas.gpu import Distributed, GpuSpec
from moorage.schemas.job import Request, Resources, Run, Secret
from moorage.worker.attempt.rendezvous import own_address
from moorage.worker.driver import Assignment
from moorage.worker.drivers.container import follow, removal
from moorage.worker.drivers.container.docker import Docker, DockerDriver, DockerSettings
from moorage.worker.drivers.container.engine import Engine, EngineDown, Piece, State
from moorage.worker.drivers.container.start import PULLS_MAX, STARTS_MAX
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.policy import Policy
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.session.attempt_messages import Ended, NotStarted, Started, StartFailed, Stuck
from moorage.worker.settings import WorkerSettings
from tests.engines import PATH, DockerEngine, engine, why_no_dockerd
from tests.ports import free_ports
from tests.registries import Registry
from tests.system.worker.drivers.container_rig import NO_RULES, ContainerRig, state_of
from tests.waiting import until

IMAGE: Final = "moorage-test:driver"


@pytest.fixture(scope="module")
def shared() -> Iterator[DockerEngine]:
    if why := why_no_dockerd():
        pytest.skip(why)
    with engine() as made:
        made.make_image(IMAGE)
        yield made


@pytest.fixture
def docker(shared: DockerEngine) -> Iterator[DockerEngine]:
    """An engine without containers: a driver that closes leaves some to the next one, which no other test has."""
    yield shared
    if left := shared.containers():
        shared.docker("rm", "--force", "--volumes", *left, check=False)


class Rig(ContainerRig):
    driver_name = "docker"
    image = IMAGE

    def __init__(
        self,
        state: Path,
        own: DockerSettings,
        policy: Policy = NO_RULES,
        devices: Sequence[Device] = (),
        **settings: Any,
    ) -> None:
        link = SupervisorLink(state)
        worker = WorkerSettings(state, "w1", output_cap_bytes=1 << 20, **settings)
        super().__init__(DockerDriver(Kit("w1", worker, policy, link, len(devices), not devices, own)), link, devices)

    async def use(self, other: Engine) -> None:
        """Give the driver another engine's API, once it has swept what an agent before it left."""
        await asyncio.gather(*self.driver._removal.later)
        await self.driver._host.engine.close()
        self.driver._host.engine = other


def settings(docker: DockerEngine, **fields: Any) -> DockerSettings:
    return DockerSettings(socket=docker.socket, pull=fields.pop("pull", "never"), **fields)


async def no_containers(docker: DockerEngine) -> None:
    """Wait until the engine has none left: one that is slow to remove it is asked again after the end is told."""

    async def none_left() -> bool:  # in a thread: the driver, which is to remove it, runs in this loop
        return await asyncio.to_thread(docker.containers) == []

    await until(none_left, deadline_s=90, what="no container is left")


@pytest.mark.slow
async def test_it_is_shut_in_and_has_its_limits(docker: DockerEngine, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, Rig(state, settings(docker, pids_max=99, shm=3 << 20)) as rig:
        limits = Resources(cpu_milli=500, memory_mib=64)
        name = rig.start("j1", "sh", "-c", "cat /proc/self/status; sleep 600", resources=limits)
        await rig.reported(Started, name)
        (container,) = docker.containers()
        host = docker.inspect(container)["HostConfig"]
        assert (host["NanoCpus"], host["Memory"], host["PidsLimit"]) == (500_000_000, 64 << 20, 99)
        assert (host["ShmSize"], host["Ulimits"]) == (3 << 20, None)
        asks = rig.start("asks", "cat", "/proc/mounts", shm_mib=5)
        assert await rig.reported(Ended, asks) == (asks, 0, "exit")
        assert [line for line in (await rig.output(asks)).splitlines() if " /dev/shm " in line and "size=5120k" in line]
        assert (host["Privileged"], host["PidMode"], host["NetworkMode"]) == (False, "", "none")
        assert (host["RestartPolicy"]["Name"], host["Binds"], host["PortBindings"]) == ("no", [], None)
        takes = "(x=$(seq 99999999))"  # the engine says "OOMKilled" of each of these
        small = Resources(memory_mib=32)
        for code, ends in (
            (0, (0, "exit")),
            (3, (3, "out of memory: a process of it was killed at its limit")),
            (137, (-9, "out of memory: it was killed at its limit")),
        ):
            full = rig.start(f"full-{code}", "sh", "-c", f"{takes}; exit {code}", resources=small)
            assert await rig.reported(Ended, full) == (full, *ends)
        told = await until(lambda: (text := rig.live_output(name)) and "NoNewPrivs:\t1" in text and text)
        assert "CapEff:\t0000000000000000" in told
        rig.driver.end(name, 0.0, "test")
        assert await rig.reported(Ended, name) == (name, -9, "end")


@pytest.mark.slow
async def test_the_next_agent_goes_on_with_what_runs_and_has_all_its_output_once(
    docker: DockerEngine, tmp_path: Path
) -> None:
    waits = "while ! [ -e /tmp/go ]; do sleep 0.1; done"
    words = f'for i in 1 2 3; do echo "a$i"; echo "e$i" >&2; done; {waits}; echo b'
    async with state_of(tmp_path) as state:
        async with Rig(state, settings(docker)) as first:
            name = first.start("j1", "sh", "-c", words)
            await until(lambda: "a3" in first.live_output(name) and "e3" in first.live_output(name, "err"))
            over = first.start("over", "sh", "-c", f"{waits}; echo late; exit 4")
            await first.reported(Started, over)
        (running, ends) = sorted(docker.containers(), key=lambda each: "over" in str(docker.inspect(each)["Config"]))
        docker.docker("exec", ends, "sh", "-c", ": > /tmp/go")
        await until(lambda: sum(docker.inspect(each)["State"]["Running"] for each in docker.containers()) == 1)
        async with Rig(state, settings(docker)) as second:
            assert {(each.name, each.phase) for each in second.living} <= {
                (each, phase) for each in (name, over) for phase in ("running", "starting")
            }
            assert await second.reported(Ended, over) == (over, 4, "exit"), "it ended while there was no agent"
            assert await second.output(over) == "late\n"
            docker.docker("exec", running, "sh", "-c", ": > /tmp/go")
            assert await second.reported(Ended, name) == (name, 0, "exit")
            assert await second.output(name) == "a1\na2\na3\nb\n"
            assert await second.output(name, "err") == "e1\ne2\ne3\n"
            assert second.live_output(name) == "b\n", "what the first agent told is not told again"
        await no_containers(docker)


@pytest.mark.slow
async def test_an_image_is_pulled_by_its_digest_with_the_password_that_the_operator_keeps(
    docker: DockerEngine, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o700)
    (kept / "registry").touch(mode=0o600)
    (kept / "registry").write_text("me:pass:word\n")
    with Registry.serving(login="me:pass:word") as registry:
        address = registry.address
        own = settings(docker, pull="missing", digests_only=True, registry_secrets={address: "registry"})
        async with state_of(tmp_path) as state, Rig(state, own, secrets_dir=kept) as rig:
            name = rig.start("j1", "sh", "-c", "exit 3", image=f"{address}/box@{registry.digest}")
            assert await rig.reported(Ended, name) == (name, 3, "exit")
            notes = [frame.note for of, frame in rig.frames if of == name and frame.note]
            assert notes[0] == f"pulling the image {address}/box@{registry.digest}", "the caller sees it"
            tagged = rig.start("tagged", "sh", image=f"{address}/box:1")
            assert "not named by its digest" in (await rig.reported(NotStarted, tagged))[1]
        own = settings(docker, pull="always")
        async with state_of(tmp_path / "2") as state, Rig(state, own) as rig:
            refused = rig.start("j2", "sh", image=f"{address}/box:1")
            told = await until(lambda: rig.told(NotStarted, refused) or rig.told(StartFailed, refused), deadline_s=90)
            assert "cannot be pulled" in str(told)


@pytest.mark.slow
async def test_it_starts_in_a_folder_of_its_own_that_is_bounded(
    docker: DockerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moorage.worker.attempt.attempt_folders.MEASURE_S", 0.2)
    async with state_of(tmp_path) as state, Rig(state, settings(docker), folder_bytes=1 << 20) as rig:
        name = rig.start("j1", "sh", "-c", "pwd; echo $HOME; ls -A; id -u; echo x > kept")
        assert await rig.reported(Ended, name) == (name, 0, "exit")
        assert await rig.output(name) == "/work\n/work\n65534\n"
        root = state / "folders" / "w1@docker"
        assert root.stat().st_mode & 0o777 == 0o700, "no user of the host passes: the engine mounts it"
        assert (root / "acme.j1.0.1.7" / "kept").read_text() == "x\n", "it stays for a while"
        deep = rig.start("deep", "sh", "-c", "pwd", cwd="/tmp")
        assert await rig.reported(Ended, deep) == (deep, 0, "exit")
        assert await rig.output(deep) == "/tmp\n"
        missing = rig.start("missing", "sh", "-c", "pwd", cwd="src")
        assert (await rig.reported(NotStarted, missing))[1] == "cannot-run: cwd: the job's files have no folder src"
        full = rig.start("full", "sh", "-c", "head -c 4194304 /dev/zero > big; sleep 600")
        _, code, why = await rig.reported(Ended, full)
        assert code < 0
        assert re.fullmatch("disk: its folder takes [1-4] MiB, folder_bytes is 1 MiB", why), "as far as it was filled"


@pytest.mark.slow
async def test_the_folder_belongs_to_the_user_that_the_image_names(docker: DockerEngine, tmp_path: Path) -> None:
    docker.make_image("moorage-test:named", "USER worker", 'CMD ["sh", "-c", "id -u > own; cat own; pwd"]')
    own = settings(docker, user="image")
    async with state_of(tmp_path) as state, Rig(state, own) as rig:
        name = rig.start("j1", "sh", "-c", "id -u > own; cat own", image="moorage-test:named")
        assert await rig.reported(Ended, name) == (name, 0, "exit")
        assert await rig.output(name) == "4321\n"
        assert (state / "folders" / "w1@docker" / "acme.j1.0.1.7" / "own").stat().st_uid == 4321
        unknown = rig.start("none", "true", image=docker.make_image("moorage-test:none", "USER nobody-knows"))
        assert "the image has no user nobody-knows" in (await rig.reported(StartFailed, unknown))[2]


@pytest.mark.slow
async def test_the_engine_shows_no_secret_and_the_job_has_it(docker: DockerEngine, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o700)
    (kept / "token").touch(mode=0o600)
    (kept / "token").write_text("s3cret-of-this-test")
    image = docker.make_image(
        "moorage-test:entry", 'ENTRYPOINT ["sh", "-c"]', 'CMD ["echo by itself $TOKEN; sleep 600"]'
    )
    async with state_of(tmp_path) as state, Rig(state, settings(docker), secrets_dir=kept) as rig:
        env = {"TOKEN": Secret("token"), "PLAIN": "p", "CUDA_VISIBLE_DEVICES": Secret("token")}
        name = rig.start("j1", "sh", "-c", 'echo "$TOKEN $PLAIN [$CUDA_VISIBLE_DEVICES] $$"; exit 7', env=env)
        assert await rig.reported(Ended, name) == (name, 7, "exit")
        assert await rig.output(name) == "s3cret-of-this-test p [] 1\n"
        own = rig.start("own", image=image, env=env)
        await rig.reported(Started, own)
        told = await until(lambda: "by itself" in rig.live_output(own) and rig.live_output(own))
        assert told == "by itself s3cret-of-this-test\n"
        (container,) = await until(lambda: len(docker.containers()) == 1 and docker.containers())
        shown = docker.docker("inspect", container).stdout
        assert "PLAIN=p" in shown
        assert "s3cret-of-this-test" not in shown
        folder = rig.driver._starter.entries.folder.path
        await until(lambda: not folder.exists(), what="its file is gone: the mount holds what it needs")
        rig.driver.end(own, 0.0, "test")
        await rig.reported(Ended, own)
        absent = rig.start("absent", "no-such-program", env=env)
        assert (await rig.reported(Ended, absent))[1:] == (127, "exit")
        unknown = rig.start("unknown", "true", env={"TOKEN": Secret("other")})
        told = (await rig.reported(NotStarted, unknown))[1]
        assert told.startswith("not-here: secret 'other': there is no such file")
        await no_containers(docker)


@pytest.mark.slow
async def test_a_container_is_reached_on_the_port_that_its_caller_is_told(docker: DockerEngine, tmp_path: Path) -> None:
    image = docker.make_image("moorage-test:busybox", programs=("busybox",))
    listens = ("busybox", "sh", "-c", 'echo "$MOORAGE_PORT_8080"; exec busybox nc -l -p 8080 -e echo hello')
    with docker.network() as network:
        own = settings(docker, network=network, ports="42000-42999")
        async with state_of(tmp_path) as state:
            async with Rig(state, own, address="127.0.0.1") as rig:
                name = rig.start("j1", *listens, image=image, ports=[8080])
                await rig.reported(Started, name)
                (told,) = await until(lambda: [f.ports for of, f in rig.frames if of == name and f.ports], 60)
                await until(lambda: told["8080"] in rig.live_output(name), deadline_s=60, what="its own word")
            async with Rig(state, own, address="127.0.0.1") as rig:
                assert (await rig.page(name)).ports == told, "the next agent knows it, too"
                host, _, port = told["8080"].partition(":")
                said = await asyncio.to_thread(hear, host, int(port))
                assert said == b"hello\n"
                assert await rig.reported(Ended, name) == (name, 0, "exit")
                assert (await rig.page(name)).ports == {}
                # rank 1 finds rank 0 at the address of this host, which all ranks are told
                start = Start("acme", "g", 0, 1, 7, own_address(), free_ports(1)[0], 2)
                gpu = GpuSpec(scheduling="gang", distributed=Distributed())
                hears = "busybox nc -l -p $MASTER_PORT -e echo hello from $RANK of $WORLD_SIZE"
                asks = "until busybox nc $MASTER_ADDR $MASTER_PORT | busybox grep of; do busybox sleep 0.1; done"
                ranks = []
                for rank, words in enumerate((hears, asks)):
                    run = Run(driver="docker", image=image, argv=["busybox", "sh", "-c", words])
                    gang = Request(run=run, gpu=gpu, replicas=2)
                    ranks.append(("acme", "g", rank, 1, 7))
                    rig.driver.start([Assignment(ranks[-1], gang, [], "exclusive", start)])
                for each in ranks:
                    assert await rig.reported(Ended, each) == (each, 0, "exit")
                assert await rig.output(ranks[1]) == "hello from 0 of 2\n"
                await no_containers(docker)


def hear(host: str, port: int) -> bytes:
    """Connect until something answers, and return what it says."""
    ends = time.monotonic() + 60.0
    while time.monotonic() < ends:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=60) as found:
            if said := found.makefile("rb").read():
                return said
        time.sleep(0.1)
    raise AssertionError(f"nothing answers at {host}:{port}")


class Dying(Docker):
    """An engine's API at which an agent dies: it comes to a step, and never past it."""

    def __init__(self, socket: Path, step: str) -> None:
        super().__init__(socket)
        self.step = step
        self.has_come = False

    async def create(self, *words: Any) -> str:
        made = await super().create(*words)
        await self._reach("created")
        return made

    async def start(self, container: str) -> None:
        await self._reach("told")
        await super().start(container)
        await self._reach("started")

    async def remove(self, container: str) -> None:
        await self._reach("ended")
        await super().remove(container)

    async def _reach(self, step: str) -> None:
        if step == self.step:
            self.has_come = True
            await asyncio.Event().wait()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["created", "told", "started", "ended"])
async def test_an_agent_that_dies_at_any_step_orphans_nothing(docker: DockerEngine, tmp_path: Path, step: str) -> None:
    async with state_of(tmp_path) as state:
        async with Rig(state, settings(docker)) as first:
            dying = Dying(docker.socket, step)
            await first.use(dying)
            name = first.start("j1", "sh", "-c", "sleep 1; exit 5")
            await until(lambda: dying.has_come, deadline_s=90)
            if step in ("started", "ended"):
                await until(lambda: docker.inspect(docker.containers()[0])["State"]["Status"] == "exited", 90)
        assert len(docker.containers()) == 1
        async with Rig(state, settings(docker)) as second:
            if step == "created":
                assert second.living == [], "nothing of it ever ran, and no driver knows it"
                await no_containers(docker)
                return
            (living,) = second.living
            assert living.name == name
            if step == "told":
                assert (await second.reported(NotStarted, name))[1].endswith("its agent ended before its start")
            else:
                assert await second.reported(Ended, name) == (name, 5, "exit")
            await no_containers(docker)
            assert second.told(Stuck, name) is None


@pytest.mark.slow
async def test_a_container_that_is_made_long_after_its_agent_was_killed_is_removed(
    docker: DockerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "SWEEP_S", 0.1)
    async with state_of(tmp_path) as state, Rig(state, settings(docker)) as rig:
        await asyncio.gather(*rig.driver._removal.later)  # what was left as it began
        name, host = ("acme", "j1", 0, 1, 7), rig.driver._host
        config = {"Image": IMAGE, "Cmd": ["sleep", "1"], "Labels": host.labels(name)}
        await host.engine.create(config, host.container_name(name))
        await no_containers(docker)


@pytest.mark.long
@pytest.mark.slow
async def test_an_engine_that_dies_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := why_no_dockerd():
        pytest.skip(why)
    monkeypatch.setattr(follow, "ENGINE_S", 2.0)
    caplog.set_level("INFO", "moorage.worker")
    with engine() as docker:
        docker.make_image(IMAGE)
        async with state_of(tmp_path) as state, Rig(state, settings(docker)) as rig:
            name, ended = rig.start("j1", "sleep", "600"), rig.start("j2", "sleep", "600")
            exits = rig.start("j3", "sh", "-c", "until [ -e go ]; do sleep 0.1; done; exit 4")
            for each in (name, ended, exits):
                await rig.reported(Started, each)
            assert rig.driver.engine_down() is None
            docker.kill()
            await until(rig.driver.engine_down, what="the driver tells of it")
            refused = rig.start("j4", "true")
            assert "engine" in (await rig.reported(NotStarted, refused))[1]
            rig.driver.end(ended, 0.0, "x")
            assert await rig.reported(Ended, ended) == (ended, -9, "end"), "its end needs no engine"
            # only the engine knows the code of a container that ended meanwhile
            (state / "folders" / "w1@docker" / "acme.j3.0.1.7" / "go").touch()
            await until(lambda: "which knows its exit code" in caplog.text, deadline_s=90, what="it waits for the code")
            assert rig.told(Ended, name) is rig.told(Ended, exits) is None
            docker.start()  # an engine ends what it finds running when it starts
            await rig.reported(Ended, name)
            assert await rig.reported(Ended, exits) == (exits, 4, "exit")
            await until(lambda: rig.driver.engine_down() is None, what="it is back")
            await no_containers(docker)
            again = rig.start("j5", "sh", "-c", "exit 2")
            assert await rig.reported(Ended, again) == (again, 2, "exit")


class Slow(Docker):
    """An engine that answers, and knows of an end long after the kernel does."""

    knows = False

    async def state(self, container: str) -> State | None:
        found = await super().state(container)
        return msgspec.structs.replace(found, is_over=found.is_over and self.knows) if found is not None else None


async def test_an_engine_that_is_slow_to_see_an_end_is_waited_for(
    docker: DockerEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with two cores and twenty tests on them: the job was lost after ten seconds, and its exit code was 0."""
    caplog.set_level("INFO", "moorage.worker")
    monkeypatch.setattr(follow, "ENGINE_S", 0.1)
    async with state_of(tmp_path) as state, Rig(state, settings(docker)) as rig:
        slow = Slow(docker.socket)
        await rig.use(slow)
        name = rig.start("j1", "sh", "-c", "exit 4")
        await until(lambda: "which knows its exit code" in caplog.text, deadline_s=90, what="it waits for the code")
        slow.knows = True
        assert await rig.reported(Ended, name) == (name, 4, "exit")


@pytest.mark.slow
async def test_what_cannot_start_says_whose_fault_it_is(docker: DockerEngine, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, Rig(state, settings(docker, pull="missing")) as rig:
        absent = rig.start("absent", "no-such-program")
        assert (await rig.reported(StartFailed, absent))[1] == 127
        folder = rig.start("folder", "/tmp")
        assert (await rig.reported(StartFailed, folder))[1] == 126
        away = rig.start("away", "true", image="127.0.0.1:9/none:1")
        told = (await rig.reported(NotStarted, away))[1]
        assert told.startswith("start-failed: image 127.0.0.1:9/none:1 cannot be pulled"), "the registry may be back"
        nowhere = rig.start("nowhere", "true", image="nothere.invalid/none:1")
        told = (await rig.reported(NotStarted, nowhere))[1]
        assert "image nothere.invalid/none:1 cannot be pulled" in told
        await no_containers(docker)
    async with state_of(tmp_path / "2") as state, Rig(state, settings(docker)) as rig:
        missing = rig.start("missing", "true", image="nowhere/none:1")
        told = (await rig.reported(NotStarted, missing))[1]
        assert told == "not-here: there is no image nowhere/none:1, and this worker does not pull it"


@pytest.mark.slow
async def test_an_end_before_the_start_is_an_end(
    docker: DockerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moorage.worker.drivers.container.removal.ENGINE_S", 1.0)
    async with state_of(tmp_path) as state, Rig(state, settings(docker)) as rig:
        dying = Dying(docker.socket, "created")
        await rig.use(dying)
        name = rig.start("j1", "sleep", "600")
        await until(lambda: dying.has_come, deadline_s=90)
        rig.driver.end(name, 10.0, "cancelled")
        assert await rig.reported(Ended, name) == (name, -9, "end")
        await no_containers(docker)


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
            assert rig.driver.attempts_of(asked) == told
        async with Rig(state, settings(docker)) as rig:
            assert not rig.driver.can_measure(), "the engine has not told yet which containers they are"
            await until(rig.driver.can_measure, 60)
            assert rig.driver.attempts_of(asked) == told
            for name in names:
                rig.driver.end(name, 0.0, "the test is over")
            for name in names:
                await rig.reported(Ended, name)


def _pid_of(docker: DockerEngine, job: str) -> int:
    found = docker.docker("ps", "--quiet", "--filter", f"label=moorage.job={job}").stdout.split()
    return int(docker.inspect(found[0])["State"]["Pid"])


HOOK: Final = """#!/bin/sh
cat > {folder}/state
echo "$@" > {folder}/words
"""


@pytest.mark.slow
async def test_nvidias_hook_gets_the_leased_gpus_and_without_it_the_job_goes_elsewhere(
    docker: DockerEngine, tmp_path: Path
) -> None:
    """The script stands where the hook of NVIDIA's toolkit would; no GPU is needed to see what is asked of it."""
    cards = [Device(0, "nvidia", "H100", "GPU-11111111-1111-1111-1111-111111111111")]
    async with state_of(tmp_path) as state, Rig(state, settings(docker), devices=cards) as rig:
        name = rig.start("j1", "true")
        assert 'could not select device driver "nvidia"' in (await rig.reported(NotStarted, name))[1]
        await no_containers(docker)
    commands = tmp_path / "commands"
    commands.mkdir()
    for hook in ("nvidia-container-runtime-hook", "nvidia-container-toolkit"):
        (commands / hook).write_text(HOOK.format(folder=tmp_path))
        (commands / hook).chmod(0o755)
    with engine(path=f"{commands}:{PATH}") as made:
        made.make_image(IMAGE)
        async with state_of(tmp_path / "2") as state, Rig(state, settings(made), devices=cards) as rig:
            name = rig.start("j1", "env", env={"NVIDIA_VISIBLE_DEVICES": "all"})
            assert await rig.reported(Ended, name) == (name, 0, "exit")
            told = (await rig.output(name)).splitlines()
            assert f"NVIDIA_VISIBLE_DEVICES={cards[0].uuid}" in told
            assert any(line.startswith("NVIDIA_DRIVER_CAPABILITIES=") and "compute" in line for line in told)
            assert (tmp_path / "words").read_text() == "prestart\n"


class Lame(Docker):
    """An engine that does not answer a start, which may have happened or not."""

    happens = True

    async def start(self, container: str) -> None:
        if self.happens:
            await super().start(container)
        raise EngineDown("no answer")


@pytest.mark.slow
@pytest.mark.parametrize("happens", [True, False])
async def test_a_start_without_an_answer_is_lost_and_over(docker: DockerEngine, tmp_path: Path, happens: bool) -> None:
    async with state_of(tmp_path) as state, Rig(state, settings(docker)) as rig:
        lame = Lame(docker.socket)
        lame.happens = happens
        await rig.use(lame)
        name = rig.start("j1", "sleep", "600")
        assert await rig.reported(Ended, name) == (name, -9, "lost"), "it may have run"
        await no_containers(docker)


class SlowRegistry(Docker):
    """An engine's API, with a registry of which no image ever arrives."""

    pulls = 0

    async def pull(self, image: str, login: tuple[str, str] | None = None) -> AsyncIterator[Mapping[str, Any]]:
        self.pulls += 1
        await asyncio.Event().wait()
        yield {}


async def with_slow_registry(rig: Rig, docker: DockerEngine) -> SlowRegistry:
    slow = SlowRegistry(docker.socket)
    await rig.use(slow)
    return slow


@pytest.mark.slow
async def test_images_that_do_not_arrive_keep_no_container_from_its_start(docker: DockerEngine, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, Rig(state, settings(docker, pull="missing")) as rig:
        slow = await with_slow_registry(rig, docker)
        waiting = [rig.start(f"w{at}", "true", image=f"nowhere/none:{at}") for at in range(STARTS_MAX)]
        await until(lambda: slow.pulls >= PULLS_MAX)
        here = rig.start("here", "sh", "-c", "exit 3")
        assert await rig.reported(Ended, here) == (here, 3, "exit")
        assert slow.pulls == PULLS_MAX, "the registry is not asked for more at once"
        said = [frame.note for _, frame in rig.frames if frame.note]
        assert [note for note in said if note.startswith("waiting to pull the image nowhere/none:")]
        for name in waiting:
            rig.driver.end(name, 0.0, "cancelled")
        for name in waiting:
            assert (await rig.reported(Ended, name))[2] == "end"


@pytest.mark.slow
async def test_an_image_that_does_not_arrive_in_time_sends_the_job_elsewhere(
    docker: DockerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moorage.worker.drivers.container.start.PULL_S_MAX", 0.5)
    async with state_of(tmp_path) as state, Rig(state, settings(docker, pull="missing")) as rig:
        await with_slow_registry(rig, docker)
        name = rig.start("j1", "true", image="nowhere/none:1")
        why = (await rig.reported(NotStarted, name))[1]
        assert "nowhere/none:1 cannot be pulled: the pull did not end within" in why


class SlowOutput(Docker):
    """An engine's API that brings output late and piece by piece, and none at all once it `stalls`."""

    piece_s = 0.0
    stalls = False

    async def output(
        self, container: str, since: str, follow: bool, *, is_terminal: bool = False
    ) -> AsyncIterator[Piece]:
        if self.stalls:
            await asyncio.Event().wait()
        if follow:
            async for _ in super().output(container, since, True):
                pass  # until it is over
        async for piece in super().output(container, since, False):
            await asyncio.sleep(self.piece_s)
            yield piece


@pytest.mark.slow
@pytest.mark.parametrize("stalls", [False, True])
async def test_output_that_comes_slowly_is_waited_for_and_what_does_not_come_is_told(
    docker: DockerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stalls: bool
) -> None:
    monkeypatch.setattr("moorage.worker.drivers.container.follow.ENGINE_S", 4.0)
    async with state_of(tmp_path) as state, Rig(state, settings(docker)) as rig:
        slow = SlowOutput(docker.socket)
        slow.piece_s, slow.stalls = 0.6, stalls
        await rig.use(slow)
        name = rig.start("j1", "seq", "1", "8")
        assert await rig.reported(Ended, name) == (name, 0, "exit")
        ask = ReadLog("s", *name, driver="docker", stream="out", offset=0, limit=1 << 16, ended_ms=1)
        page = await rig.driver.read_log(ask)
        whole = "".join(f"{at}\n" for at in range(1, 9))
        assert (page.text, page.truncated) == (("", True) if stalls else (whole, False))
        await no_containers(docker)


class Bereft(Lame):
    """An engine that does not answer a start, and that has removed the container while there is no supervisor."""

    happens = False

    def __init__(self, socket: Path, link: SupervisorLink) -> None:
        super().__init__(socket)
        self._link = link

    async def remove(self, container: str) -> None:
        await super().remove(container)
        os.kill(self._link.pid, signal.SIGKILL)
        await until(lambda: self._link.pid == 0)


@pytest.mark.slow
async def test_the_next_supervisor_is_told_what_was_removed_while_there_was_none(
    docker: DockerEngine, tmp_path: Path
) -> None:
    async with state_of(tmp_path) as state, Rig(state, settings(docker)) as rig:
        await rig.use(Bereft(docker.socket, rig.link))
        name = rig.start("j1", "sleep", "600")
        assert await rig.reported(Ended, name) == (name, -9, "lost")
        await no_containers(docker)


# -- without an engine


def test_importing_it_does_not_import_the_client_of_the_engine() -> None:
    words = "import sys; import moorage.worker.drivers.container.docker; sys.exit('aiohttp' in sys.modules)"
    subprocess.run([sys.executable, "-c", words], check=True)


def request(**run: Any) -> Request:
    return Request(run=Run(driver="docker", **run))


def driver_of(tmp_path: Path, own: DockerSettings | None = None) -> Any:
    own = own or DockerSettings(socket=tmp_path / "none.sock")
    return Rig(tmp_path, own).driver


async def test_what_no_container_can_have_is_refused_with_a_word(tmp_path: Path) -> None:
    driver = driver_of(tmp_path)
    for wrong, word in (
        (request(argv=["x"]), "needs an image"),
        (request(image="../containers/x"), "not an image name"),
        (request(image="a?b=c"), "not an image name"),
    ):
        with pytest.raises(Refused, match=word) as refused:
            driver.check(wrong)
        assert refused.value.code == "invalid-argument"
    for image in ("a", "a/b:1", "r.example:5000/a/b@sha256:" + "0" * 64):
        driver.check(request(image=image))
    await driver._host.engine.close()


async def test_a_gang_whose_containers_have_no_network_goes_to_another_worker(tmp_path: Path) -> None:
    gang = msgspec.structs.replace(
        request(image="a"), gpu=GpuSpec(scheduling="gang", distributed=Distributed()), replicas=2
    )
    driver = driver_of(tmp_path)
    with pytest.raises(Refused, match="have no network") as refused:
        driver.check(gang)
    assert refused.value.code == "failed-precondition", "another worker may have one"
    driver.check(msgspec.structs.replace(gang, replicas=1))
    await driver._host.engine.close()
    driver = driver_of(tmp_path, DockerSettings(socket=tmp_path / "none.sock", network="ours"))
    driver.check(gang)
    await driver._host.engine.close()


class Silent(Docker):
    """An engine that takes a question and never answers."""

    async def image(self, name: str) -> dict[str, Any] | None:
        await asyncio.Event().wait()
        return None


async def test_closing_waits_for_no_container_that_is_ending(tmp_path: Path) -> None:
    driver = driver_of(tmp_path)
    await driver._host.engine.close()
    driver._host.engine = Silent(tmp_path / "none.sock")
    name = ("acme", "j1", 0, 1, 7)
    driver.start([Assignment(name, request(image="a"), [], "exclusive")])
    attempt = driver._host.attempts[name]
    attempt.is_known = True  # so its end is the supervisor's to report, which is not there
    attempt.is_ending = True
    await asyncio.sleep(0)  # it begins to ask the engine
    closing = asyncio.create_task(driver.close())
    await asyncio.wait((closing,), timeout=60)
    assert closing.done()
    assert attempt.task.done()
