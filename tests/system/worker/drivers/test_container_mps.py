"""Containers as clients of MPS daemons: a real engine, a real worker, NVML as a stub and the daemon played."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import pytest

from moorage.schemas.codec import encode
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device, End, Exec, Mark, Place, Terminal
from moorage.schemas.gpu import GpuSpec, Sharing
from moorage.schemas.job import Request, Run
from moorage.system.device_environment import SharingUnavailable
from moorage.worker.driver import Assignment, Executes
from moorage.worker.drivers.container.config import FOLDER_AT, check_host_ipc, check_request, config_of, uid_of
from moorage.worker.drivers.container.docker import DockerSettings
from moorage.worker.drivers.container.entry import Entries
from moorage.worker.drivers.container.podman import PodmanSettings, spec_of
from moorage.worker.drivers.policy import Policy
from tests.engines import PROGRAMS, DockerEngine, engine, path_26, why_no_docker_26
from tests.nvidia.stub import Board
from tests.system.worker.sharing.test_managed_mps import GPU, Scene, name_of, scene
from tests.waiting import until

IMAGE: Final = "moorage-test:mps"
NO_RULES: Final = Policy({}, {}, {}, None, {})
CARD: Final = Device(0, "nvidia", "made up", GPU)
DAEMON: Final = MappingProxyType(
    {"CUDA_MPS_PIPE_DIRECTORY": "/m/0/pipe", "CUDA_MPS_LOG_DIRECTORY": "/m/0/log", "L": "1"}
)
SECRET: Final = "s3cret-of-another-job"
#: a client, which says what it has and what it sees in /dev/shm, and stays
CLIENT: Final = r"""
$| = 1; $SIG{TERM} = sub {};
socket(S, 1, 1, 0) && connect(S, pack("Sa*", 1, "$ENV{CUDA_MPS_PIPE_DIRECTORY}/control")) or die "no daemon: $!";
syswrite(S, "CLIENT\n"); sysread(S, $answer, 10) == 3 or die "no answer";
print map {"$_=$ENV{$_}\n"} grep {/MPS/} sort keys %ENV;
print "replaced\n" if unlink("$ENV{CUDA_MPS_PIPE_DIRECTORY}/control");
@paths = ("/dev/shm");
while ($path = shift @paths) {
    print "$path\n";
    if (opendir(D, $path)) { push @paths, map {"$path/$_"} grep {!/^\.\.?$/} readdir(D); }
    elsif (-s $path < 99999 && open(F, $path)) { print map({tr/ -~\n//cdr} <F>), "\n"; }
}
print "ready\n";
sleep 600 while 1;
"""


def request_of(sharing: Sharing = "mps", driver: str = "docker", user: str | None = None) -> Request:
    run = Run(driver=driver, image="i:1", argv=["x"], user=user)
    return Request(run=run, gpu=GpuSpec(sharing=sharing))


def config(request: Request, mode: str = "mps", mps: Any = DAEMON, **more: Any) -> dict[str, Any]:
    assignment = Assignment(("acme", "j", 0, 1, 1), request, [CARD], mode)
    own = DockerSettings(mps_host_ipc=True)
    return config_of(assignment, own, NO_RULES, None, labels={}, log_bytes=0, mps=mps, **more)


def test_containers_share_by_mps_only_where_the_operator_has_said_so() -> None:
    request = request_of()
    with pytest.raises(SharingUnavailable, match=r"the host's IPC namespace \(mps_host_ipc of driver.docker\)"):
        check_request(request, DockerSettings())
    check_request(request, DockerSettings(mps_host_ipc=True))
    check_request(request_of("time-slice"), DockerSettings())
    for named in (GpuSpec(sharing="mps", mps_pipe_dir="/etc"), GpuSpec(sharing="mps", mps_log_dir="/etc")):
        with pytest.raises(SharingUnavailable, match="cannot use a directory that its request names"):
            check_request(msgspec.structs.replace(request, gpu=named), DockerSettings(mps_host_ipc=True))


def test_a_client_has_the_daemons_directories_its_variables_and_the_hosts_ipc_namespace() -> None:
    made = config(request_of())
    host = made["HostConfig"]
    assert (host["IpcMode"], "ShmSize" in host) == ("host", False)
    assert {"CUDA_MPS_PIPE_DIRECTORY=/m/0/pipe", "CUDA_MPS_LOG_DIRECTORY=/m/0/log", "L=1"} <= {*made["Env"]}
    wanted = [{"Type": "bind", "Source": each, "Target": each, "ReadOnly": True} for each in ("/m/0/pipe", "/m/0/log")]
    assert host["Mounts"] == wanted
    alone = config(request_of("exclusive"), "exclusive", None, folder="/attempt")
    assert f"CUDA_MPS_PIPE_DIRECTORY={FOLDER_AT}/mps" in alone["Env"], "another container joins no daemon"
    podman = request_of(driver="podman")
    spec = spec_of(config(podman), "c", ())
    assert spec["ipcns"] == {"nsmode": "host"}
    assert "shm_size" not in spec, "podman refuses both at once"
    mount = {"type": "bind", "source": "/m/0/pipe", "destination": "/m/0/pipe", "options": ["rbind", "ro"]}
    assert mount in spec["mounts"]


def test_no_other_container_has_the_hosts_ipc_namespace() -> None:
    modes: tuple[Sharing, ...] = ("exclusive", "time-slice")
    for sharing in modes:
        host = config(request_of(sharing), sharing, None)["HostConfig"]
        assert (host["IpcMode"], host["Mounts"]) == ("private", [])
        assert host["ShmSize"] > 0


def test_a_container_reaches_the_daemon_that_an_operator_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    monkeypatch.setattr("moorage.system.device_environment.MPS_PIPE_DIRECTORY", str(pipe))
    monkeypatch.setattr("moorage.system.device_environment.MPS_LOG_DIRECTORY", str(log))
    with pytest.raises(SharingUnavailable, match="of a running daemon is missing"):
        config(request_of(), mps=None)
    pipe.mkdir()
    log.mkdir()
    assert [each["Source"] for each in config(request_of(), mps=None)["HostConfig"]["Mounts"]] == [str(pipe), str(log)]


def test_the_user_of_a_container_is_known_before_its_start_or_it_shares_with_nobody() -> None:
    own = DockerSettings(mps_host_ipc=True)
    assert uid_of("acme", request_of(), own, NO_RULES) == 65534
    assert uid_of("acme", request_of(user="4321"), own, NO_RULES) == 4321
    assert uid_of("acme", request_of(), own, Policy({}, {}, {"acme": "41001"}, None, {})) == 41001
    assert uid_of("acme", request_of(user="of-the-image"), own, NO_RULES) is None
    assert uid_of("acme", request_of(), DockerSettings(user="image"), NO_RULES) is None


def test_the_limiters_segments_and_the_hosts_ipc_namespace_are_not_together() -> None:
    check_host_ipc(DockerSettings(mps_host_ipc=True), has_limiter=False)
    check_host_ipc(PodmanSettings(), has_limiter=True)
    with pytest.raises(Refused, match="the limiter has its segments in /dev/shm"):
        check_host_ipc(PodmanSettings(mps_host_ipc=True), has_limiter=True)


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerEngine]:
    if why := why_no_docker_26():
        pytest.skip(why)
    specs = tmp_path_factory.mktemp("cdi")
    edits = {"containerEdits": {"deviceNodes": [{"path": "/dev/moorage-test-0", "hostPath": "/dev/null"}]}}
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": GPU} | edits]}
    (specs / "gpu.json").write_bytes(msgspec.json.encode(spec))
    with engine(config={"features": {"cdi": True}, "cdi-spec-dirs": [str(specs)]}, path=path_26()) as made:
        made.make_image(IMAGE, programs=(*PROGRAMS, "perl"))
        yield made


class Containers:
    """Jobs of the driver docker on the worker of a scene."""

    def __init__(self, one: Scene, docker: DockerEngine) -> None:
        self.one = one
        self.docker = docker

    async def place(self, job: str, *argv: str, sharing: str = "mps", **run: Any) -> None:
        run = {"driver": "docker", "image": IMAGE, "argv": list(argv or ("perl", "-e", CLIENT))} | run
        share = {"share": {"memory_mib": 4000, "compute_percent": 25}} if sharing != "exclusive" else {}
        request = {"gpu": {"sharing": sharing} | share, "run": run}
        await self.one.leader.want("w1", Place(*name_of(job), [0], sharing, False, encode(request)))

    async def command(self, job: str) -> Any:
        """Run a client as a command in a job's container; return it once it is one."""
        asked = Exec(*name_of(job), "5e55", ["perl", "-e", CLIENT], False, "")
        driver = self.one.agent.drivers["docker"]
        assert isinstance(driver, Executes)
        command: Any = await driver.execute(request_of(), asked, Terminal(24, 80))
        command.pid, said = command._guard.pid, asyncio.Queue[bytes]()

        async def take(mark: Mark, data: bytes) -> None:
            said.put_nowait(data)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            reading = group.create_task(command.run(take))
            text = b""
            while b"ready" not in text:
                text += await said.get()
            reading.cancel()
        return command

    @property
    def terminated(self) -> list[str]:
        """The clients whose ends were announced."""
        return [line.split()[2] for line in self.one.played.lines("commands") if line.startswith("terminate_client")]

    async def started(self, job: str, word: str = "ready") -> dict[str, Any]:
        """Wait until a job has said this, and return what the engine says of its container, and what the job said."""

        def look() -> dict[str, Any]:
            found = self.docker.docker("ps", "--quiet", "--filter", f"label=moorage.job={job}").stdout.split()
            if not found:
                return {}
            said = self.docker.docker("logs", found[0], check=False).stdout
            return self.docker.inspect(found[0]) | {"said": said} if word in said.split() else {}

        def failed() -> list[str]:
            reports = self.one.leader.seat("w1").reports
            return [report.detail for report in reports if report.job == job and report.kind in ("refused", "exited")]

        async def seen() -> dict[str, Any]:
            assert failed() == []
            return await asyncio.to_thread(look)

        found: dict[str, Any] = await until(seen, 120, f"{job} says {word}")
        return found


@contextlib.asynccontextmanager
async def containers(
    docker: DockerEngine, url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, **own: str
) -> AsyncIterator[Containers]:
    for name, value in {"socket": str(docker.socket), "pull": "never", **own}.items():
        monkeypatch.setenv(f"MOORAGE_DRIVER_DOCKER_{name.upper()}", value)
    async with scene(url, prefix, monkeypatch, Board(GPU), drivers=("process", "docker")) as one:
        yield Containers(one, docker)


@pytest.mark.slow
async def test_a_container_is_a_client_of_the_daemon_and_sees_no_secret_of_another_job(
    docker: DockerEngine, nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = Path("/dev/shm") / f"moorage-test-{secrets.token_hex(8)}"
    other = Entries("another@docker", unique)
    own = {"mps_host_ipc": "true", "user": "0:0"}  # root of a container is the most that a job can be
    async with containers(docker, nats_url, unique, monkeypatch, **own) as jobs:
        one = jobs.one
        told = one.leader.seat("w1").joins[0].hello.capabilities["docker"]
        assert {*told.enforced} == {"exclusive", "mps"}
        assert told.resizes["mps"] == "next-attempt"
        try:
            mark.write_text("of the host")
            other.write("key", {"TOKEN": SECRET})
            await jobs.place("client")
            found = await jobs.started("client")
        finally:
            mark.unlink()
            other.clear()
        lines = found["said"].splitlines()
        assert found["HostConfig"]["IpcMode"] == "host"
        assert lines[:4] == [
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
            f"CUDA_MPS_LOG_DIRECTORY={one.sockets}/0/log",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4000M",
            f"CUDA_MPS_PIPE_DIRECTORY={one.sockets}/0/pipe",
        ]
        mounts = {each["Destination"]: each["RW"] for each in found["Mounts"]}
        assert [mounts[f"{one.sockets}/0/{name}"] for name in ("pipe", "log")] == [False, False]
        assert "replaced" not in lines, "root of a container cannot put another daemon there"
        assert {str(mark), "of the host"} <= {*lines}, "it sees the host's /dev/shm"
        assert SECRET not in found["said"]
        assert one.played.lines("starts") == [f"{one.daemons[0]} {GPU}"]
        await jobs.place("neighbour")
        await jobs.started("neighbour")
        command = await jobs.command("client")
        await command.close()
        await until(lambda: len(jobs.terminated) == 1, 60, "the end of a command is announced")
        await one.leader.want("w1", End(*name_of("client"), "cancelled", grace_s=0.0))
        await one.leader.await_report("w1", "freed", name_of("client"))
        assert jobs.terminated == [str(command.pid), str(found["State"]["Pid"])], "by their numbers on the host"
        await one.end("neighbour")
        assert one.daemons == []
        await jobs.place("alone", "sh", "-c", "echo ready; exec sleep 600", sharing="exclusive")
        alone = await jobs.started("alone")
        mounted = [each["Destination"] for each in alone["Mounts"]]
        assert (alone["HostConfig"]["IpcMode"], mounted) == ("private", ["/work"])
        await one.end("alone")


@pytest.mark.slow
async def test_without_the_setting_nothing_of_it_is_offered(
    docker: DockerEngine, nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with containers(docker, nats_url, unique, monkeypatch) as jobs:
        told = jobs.one.leader.seat("w1").joins[0].hello.capabilities
        assert {*told["docker"].enforced} == {"exclusive"}
        assert {*told["process"].enforced} == {"exclusive", "mps"}
        await jobs.place("client")
        assert "mps_host_ipc of driver.docker" in await jobs.one.refused("client")
        assert (jobs.one.daemons, docker.containers()) == ([], [])


@pytest.mark.slow
async def test_containers_and_processes_share_a_daemon_as_one_user_alone(
    docker: DockerEngine, nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"mps_host_ipc": "true", "request_user": "true"}
    async with containers(docker, nats_url, unique, monkeypatch, **own) as jobs:
        one = jobs.one
        await jobs.place("client")
        await jobs.started("client")
        await one.place("roots")
        assert await one.refused("roots") == "jobs of another user share GPU 0 by mps"
        await one.share("nobodys", user="65534")
        assert len(one.daemons) == 1
        await jobs.place("images", user="of-the-image")
        assert "their user is not known before they start" in await one.refused("images")
        await one.end("client", "nobodys")
        assert one.daemons == []


@pytest.mark.slow
async def test_an_engine_whose_users_are_others_runs_no_client(
    docker: DockerEngine, nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with containers(docker, nats_url, unique, monkeypatch, mps_host_ipc="true") as jobs:
        driver: Any = jobs.one.agent.drivers["docker"]
        driver._starter.about = msgspec.structs.replace(driver._starter.about, maps_users=True)
        await jobs.place("client")
        assert "rootless, or userns-remap" in await jobs.one.refused("client")
        assert (jobs.one.daemons, docker.containers()) == ([], [])
