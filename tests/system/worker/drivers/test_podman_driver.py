"""The driver podman on a real service of podman: what it starts, what it reports, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import stat
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from moorage.bus.contexts import Context
from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request, Resources, Run, Secret
from moorage.schemas.service import ServiceSpec
from moorage.system.proctree import boottime_s, descendants, read_process
from moorage.worker.attempt.call_keys import CallKeys
from moorage.worker.driver import CODE_LOST
from moorage.worker.drivers.container.entry import Entries
from moorage.worker.drivers.container.podman import PodmanDriver, PodmanSettings
from moorage.worker.drivers.container.start import Starter
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.session.attempt_messages import Ended, NotStarted, Started, StartFailed
from moorage.worker.settings import WorkerSettings
from moorage.worker.sharing.limiter import limits
from tests.nvidia.limited import built, put_for_containers, uuid_of
from tests.podmans import PodmanHome, podman_home, why_no_podman
from tests.registries import Registry, large_layer
from tests.system.worker.drivers.container_rig import NO_RULES, WAIT_S, ContainerRig, state_of
from tests.system.worker.limited_containers import limited_containers
from tests.system.worker.supervisor_rig import lives
from tests.waiting import NeverHappened, until

IMAGE: Final = "moorage-test:podman"
#: of podman's disk in the test that fills it: its image fits there twice, for a container is a copy of it
DISK_BYTES: Final = 24 << 20
CALL_KEY: Final = "SUAKEYOFCALLS"
TOKEN: Final = "a secret\nof two lines"


@pytest.fixture(scope="module")
def home() -> Iterator[PodmanHome]:
    if why := why_no_podman():
        pytest.skip(why)
    with podman_home() as made:
        made.make_image(IMAGE)
        yield made


class Rig(ContainerRig):
    driver_name = "podman"
    image = IMAGE

    def __init__(
        self, home: PodmanHome, state: Path, devices: Sequence[Device] = (), limiter: bool = False, daemons: Any = None,
        **own: Any,
    ) -> None:  # fmt: skip
        link = SupervisorLink(state)
        kept = state.parent / "secrets"
        if not kept.exists():
            kept.mkdir(mode=0o700)
            (kept / "token").touch(mode=0o600)
            (kept / "token").write_text(TOKEN)
            (kept / "calls").mkdir(mode=0o700)
            (kept / "calls" / "acme").touch(mode=0o600)
            (kept / "calls" / "acme").write_text(CALL_KEY)
        worker = WorkerSettings(
            state, "w1", output_cap_bytes=1 << 20, secrets_dir=kept, limiter=limiter, limiter_context=0
        )
        fields: dict[str, Any] = {"socket": home.socket, "pull": "never"} | own
        calls = CallKeys(Context(url="nats://h:4222", nkey="/w1.nk"), "moorage", kept, "nats://gateway:4222")
        kit = Kit(
            "w1", worker, NO_RULES, link, len(devices), not devices, PodmanSettings(**fields), mps=daemons, calls=calls
        )
        super().__init__(PodmanDriver.from_kit(kit), link, devices)


def secret_files(state: Path) -> list[Path]:
    """Return the files with secrets of the drivers of this state folder."""
    folder = Entries("w1@podman", (state / "mark").read_text()).folder.path
    return list(folder.iterdir()) if folder.exists() else []


async def nothing_left(home: PodmanHome, state: Path) -> None:
    """Wait until podman knows of no container, no secret is left, and none of its processes runs but its service."""

    left: list[str] = []

    def is_empty() -> bool:  # in a thread, since the driver removes things meanwhile
        served = home.service.pid if home.service is not None else 0
        processes = [pid for pid in home.processes() if pid != served]
        left[:] = [*home.containers(), *map(str, processes), *map(str, secret_files(state))]
        return not left

    try:
        await until(lambda: asyncio.to_thread(is_empty), deadline_s=WAIT_S)
    except NeverHappened:
        raise AssertionError(f"left: {left}") from None


@pytest.mark.slow
async def test_it_is_shut_in_and_has_its_limits(home: PodmanHome, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, Rig(home, state, pids_max=99, shm=3 << 20) as rig:
        limits = Resources(cpu_milli=500, memory_mib=64)
        name = rig.start("j1", "sh", "-c", "cat /proc/self/status; sleep 600", resources=limits)
        await rig.reported(Started, name)
        (container,) = home.containers()
        [told] = msgspec.json.decode(home.podman("inspect", container))
        host = told["HostConfig"]
        assert (host["NanoCpus"], host["Memory"], host["MemorySwap"]) == (500_000_000, 64 << 20, 64 << 20)
        assert host["ShmSize"] == 3 << 20
        asks = rig.start("asks", "cat", "/proc/mounts", shm_mib=5)
        assert await rig.reported(Ended, asks) == (asks, 0, "exit")
        assert [line for line in (await rig.output(asks)).splitlines() if " /dev/shm " in line and "size=5120k" in line]
        assert (host["PidsLimit"], host["Privileged"], host["NetworkMode"]) == (99, False, "none")
        assert (host["PidMode"], host["RestartPolicy"]["Name"], host["PortBindings"]) == ("private", "no", {})
        text = await rig.said(name, "NoNewPrivs:\t1")
        assert "CapEff:\t0000000000000000" in text
        rig.driver.end(name, 0.0, "test")
        assert await rig.reported(Ended, name) == (name, -9, "end")
        await nothing_left(home, state)


@pytest.mark.slow
async def test_no_line_is_lost_that_its_log_had_half_for_a_moment(home: PodmanHome, tmp_path: Path) -> None:
    """Podman's service gives such a half as a line, and goes on at the end of the log (nxadm/tail)."""
    async with state_of(tmp_path) as state, Rig(home, state) as rig:
        name = rig.start("j1", "sleep", "600")
        await rig.reported(Started, name)
        (container,) = home.containers()
        shown = msgspec.json.decode(home.podman("inspect", container))
        log = Path(shown[0]["HostConfig"]["LogConfig"]["Path"])
        stamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}000+00:00"  # as conmon writes it
        with open(os.open(log, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as file:  # noqa: ASYNC230 (a local file)
            file.write(f"{stamp} stdout F whole\n{stamp} stdout F ha".encode())
            await rig.said(name, "whole")
            file.write(f"lf\n{stamp} stdout F more\n".encode())
            await until(lambda: asyncio.to_thread(lambda: "more" in home.podman("logs", container)))
            file.write(f"{stamp} stdout P par\n{stamp} stdout F t\n{stamp} stdout F last\n".encode())
            await rig.said(name, "last")
        rig.driver.end(name, 0.0, "test")
        assert await rig.reported(Ended, name) == (name, -9, "end")
        assert await rig.output(name) == rig.live_output(name) == "whole\nhalf\nmore\npart\nlast\n"
        await nothing_left(home, state)


@pytest.mark.slow
async def test_the_next_agent_goes_on_with_what_runs_and_removes_what_is_left(home: PodmanHome, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state:
        async with Rig(home, state) as first:
            name = first.start("j1", "sh", "-c", "echo a; while ! [ -e go ]; do sleep 0.1; done; echo b; exit 5")
            over = first.start("over", "sh", "-c", "echo up; while ! [ -e go ]; do sleep 0.1; done; echo late; exit 4")
            for each, word in ((name, "a"), (over, "up")):
                await first.reported(Started, each)
                await first.said(each, word)
        folders = state / "folders" / "w1@podman"
        (folders / "acme.over.0.1.7" / "go").touch()
        await until(lambda: asyncio.to_thread(lambda: len(home.podman("ps", "-q").split()) == 1), deadline_s=WAIT_S)
        stray = f"--label=moorage.state={(state / 'mark').read_text()}"
        home.podman("create", stray, "--label=moorage.member=w1@podman|acme/x/0/1/1", "--network=none", IMAGE, "true")
        async with Rig(home, state) as second:
            found = {(each.name, each.phase, each.code) for each in second.living}
            assert found == {(name, "running", 0), (over, "running", 0)}
            assert await second.reported(Ended, over) == (over, 4, "exit")
            removed = "what an agent before has left is removed"
            await until(lambda: asyncio.to_thread(lambda: len(home.containers()) == 1), WAIT_S, removed)
            (folders / "acme.j1.0.1.7" / "go").touch()
            assert await second.reported(Ended, name) == (name, 5, "exit")
            assert await second.output(name) == "a\nb\n"
            assert await second.output(over) == "up\nlate\n"
            await nothing_left(home, state)


@pytest.mark.slow
async def test_the_fence_ends_it_without_agent_and_service(home: PodmanHome, tmp_path: Path) -> None:
    """The service is killed first: what runs then is conmon and the container, in cgroups of podman's choice."""
    async with state_of(tmp_path) as state:
        async with Rig(home, state) as rig:
            name = rig.start("fenced", "sh", "-c", "env -i setsid sleep 600 & echo up; wait")
            await rig.said(name, "up")
            await rig.reported(Started, name)
            inside = inside_of(home)
            assert len(inside) == 2
            assert rig.driver.attempts_of(inside) == dict.fromkeys(inside, name), "known from outside"
            home.kill_service()
            rig.driver.set_fence(boottime_s() + 1.0, 0.0)
            await asyncio.sleep(0)
        try:
            await until(lambda: not any(map(lives, inside)), deadline_s=WAIT_S, what="the fence ends it")
        finally:
            home.serve()
        async with Rig(home, state) as again:
            assert await again.reported(Ended, name) == (name, -9, "fence")
            await nothing_left(home, state)


def inside_of(home: PodmanHome) -> list[int]:
    """Return the processes in its containers, the first ones and all that descends from them."""
    shown = msgspec.json.decode(home.podman("inspect", *home.containers()))
    return descendants([each["State"]["Pid"] for each in shown])


@pytest.mark.slow
async def test_whose_fault_it_is_that_nothing_started(home: PodmanHome, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, Rig(home, state, request_user=True) as rig:
        starts = {
            "none": (rig.start("none", "nope"), 127, "executable file not found"),
            "folder": (rig.start("folder", "/tmp"), 126, "permission denied"),
            "cwd": (rig.start("cwd", "true", cwd="/nowhere"), 126, "/nowhere"),
            "user": (rig.start("user", "true", user="nosuchuser"), 126, "unable to find user"),
        }
        for name, code, word in starts.values():
            _, told, why = await rig.reported(StartFailed, name)
            assert (told, word in why) == (code, True), why
            assert rig.told(Started, name) is None
        image = rig.start("image", "true", image="nowhere.invalid/none:1")
        assert (await rig.reported(NotStarted, image))[1].startswith("not-here: there is no image")
        own = rig.start("own", "sh", "-c", "exit 126")
        assert await rig.reported(Ended, own) == (own, 126, "exit"), "a code of the program's own"
        await nothing_left(home, state)


@pytest.mark.slow
async def test_a_host_that_cannot_sends_the_job_elsewhere(home: PodmanHome, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state:
        async with Rig(home, state, pull="missing") as rig:  # no registry is reached here
            name = rig.start("j1", "true", image="registry.invalid/none:1")
            assert "image registry.invalid/none:1 cannot be pulled" in (await rig.reported(NotStarted, name))[1]
        async with Rig(home, state, mounts=("/nowhere/at/all:/x:ro",)) as rig:
            name = rig.start("j2", "true")
            assert "/nowhere/at/all" in (await rig.reported(NotStarted, name))[1]
            assert rig.told(Started, name) is None
        async with Rig(home, state, socket=tmp_path / "none.sock") as rig:
            name = rig.start("j3", "true")
            assert "the container engine does not answer" in (await rig.reported(NotStarted, name))[1]
        async with Rig(home, state):  # what the drivers before had not removed yet when they were closed
            await nothing_left(home, state)


@contextlib.contextmanager
def trusting(home: PodmanHome, registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a service that asks this registry without TLS."""
    (folder / "registries.conf").write_text(f'[[registry]]\nlocation = "{registry.address}"\ninsecure = true\n')
    with monkeypatch.context() as changed:
        changed.setenv("CONTAINERS_REGISTRIES_CONF", str(folder / "registries.conf"))
        home.kill_service()
        home.serve()
        yield
    home.kill_service()
    home.serve()


@pytest.mark.slow
async def test_an_image_is_pulled_with_the_password_that_the_operator_keeps_and_a_bad_pull_says_whose_fault_it_is(
    home: PodmanHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Registry.serving(login="me:pass:word") as registry, trusting(home, registry, tmp_path, monkeypatch):
        image, logins = f"{registry.address}/box:1", {registry.address: "login"}
        async with state_of(tmp_path) as state, Rig(home, state, pull="missing", registry_secrets=logins) as rig:
            login = tmp_path / "secrets" / "login"
            login.touch(mode=0o600)
            login.write_text("me:pass:word\n")
            absent = rig.start("absent", "true", image=f"{registry.address}/box:2")
            told = (await rig.reported(NotStarted, absent))[1]
            assert told.startswith("not-here: image ")
            assert "cannot be pulled" in told
            name = rig.start("j1", "sh", "-c", "exit 3", image=image)
            assert await rig.reported(Ended, name) == (name, 3, "exit")
            notes = [frame.note for of, frame in rig.frames if of == name and frame.note]
            assert notes[0] == f"pulling the image {image}", "the caller sees it"
            login.write_text("me:wrong\n")
            home.podman("rmi", image)
            refused = rig.start("refused", "true", image=image)
            told = await until(
                lambda: rig.told(NotStarted, refused) or rig.told(StartFailed, refused), deadline_s=WAIT_S, what="it"
            )
            assert "cannot be pulled" in str(told)
            await nothing_left(home, state)


@pytest.mark.slow
async def test_a_disk_that_is_full_while_pulling_sends_the_job_elsewhere_and_keeps_nothing_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := why_no_podman():
        pytest.skip(why)
    with (
        podman_home(disk_bytes=DISK_BYTES) as small,
        Registry.serving(large_layer(2 * DISK_BYTES)) as registry,
        trusting(small, registry, tmp_path, monkeypatch),
    ):
        small.make_image(IMAGE)
        async with state_of(tmp_path) as state, Rig(small, state, pull="missing") as rig:
            name = rig.start("full", "true", image=f"{registry.address}/box:1")
            told = (await rig.reported(NotStarted, name))[1]
            assert "cannot be pulled" in told
            assert "no space left on device" in told
            assert rig.told(Started, name) is None
            assert rig.told(StartFailed, name) is None
            again = rig.start("here", "sh", "-c", "exit 4")
            assert await rig.reported(Ended, again) == (again, 4, "exit"), "the disk has room for what it had"
            await nothing_left(small, state)


@pytest.mark.slow
async def test_a_secret_is_a_variable_of_the_job_and_stands_nowhere_else(home: PodmanHome, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, Rig(home, state) as rig:
        shows = 'echo "$TOKEN"; echo up >&2; while ! [ -e go ]; do sleep 0.1; done'
        name = rig.start("j1", "sh", "-c", shows, env={"TOKEN": Secret("token")})
        missing = rig.start("j2", "true", env={"TOKEN": Secret("no-such")})
        assert (await rig.reported(NotStarted, missing))[1].startswith("not-here: secret 'no-such'")
        assert await rig.said(name, "two lines") == f"{TOKEN}\n"
        await rig.reported(Started, name)
        (container,) = home.containers()
        shown = home.podman("inspect", container).encode()
        for pid in home.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one of podman's that ends just now
                shown += Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert b"two lines" not in shown
        await until(lambda: secret_files(state) == [], WAIT_S, "its file is gone once it has started")
        (state / "folders" / "w1@podman" / "acme.j1.0.1.7" / "go").touch()
        assert await rig.reported(Ended, name) == (name, 0, "exit")
        await nothing_left(home, state)


@pytest.fixture
def spec() -> Iterator[tuple[str, Path]]:
    """A kind of devices that only this test has, and its file where podman 4.3 looks."""
    kind = f"moorage-test-{secrets.token_hex(4)}.com/gpu"
    path = Path("/etc/cdi") / f"{kind.partition('/')[0]}.json"
    path.parent.mkdir(exist_ok=True)
    try:
        yield kind, path
    finally:
        path.unlink(missing_ok=True)


def cdi_of(kind: str, *names: str) -> bytes:
    nodes = {name: [{"path": f"/dev/moorage-test-{name}", "hostPath": "/dev/null"}] for name in names}
    edits = [{"name": name, "containerEdits": {"deviceNodes": node}} for name, node in nodes.items()]
    return msgspec.json.encode({"cdiVersion": "0.5.0", "kind": kind, "devices": edits})


def card(kind: str, name: str) -> Device:
    return Device(0, "nvidia", "made up", f"GPU-{name}", cdi=[f"{kind}={name}"])


@pytest.mark.slow
async def test_a_container_that_answers_calls_has_its_key_and_one_without_a_network_goes_elsewhere(
    home: PodmanHome, tmp_path: Path
) -> None:
    script = """cat $MOORAGE_NATS_CREDS
[ -O $MOORAGE_NATS_CREDS ] && echo mine
echo $MOORAGE_NATS_URL $MOORAGE_CALL_SUBJECT $MOORAGE_CALL_CONCURRENCY $MOORAGE_CALL_GRACE; sleep 600"""
    async with Rig(home, tmp_path / "state", network="bridge") as rig:
        assert rig.driver.can().answers_calls
        name = rig.start("serves", "sh", "-c", script, service=ServiceSpec("embed", 8))
        said = await rig.said(name, "moorage.call.acme.embed")
        assert said.splitlines() == [CALL_KEY, "mine", "nats://gateway:4222 moorage.call.acme.embed 8 10s"]
        [copy] = (tmp_path / "state").rglob("*.key")
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        rig.driver.end(name, 0.0, "cancelled")
        await rig.reported(Ended, name)
        await until(lambda: not copy.exists(), deadline_s=WAIT_S)
    async with Rig(home, tmp_path / "other") as rig:
        assert not rig.driver.can().answers_calls
        name = rig.start("mute", "true", service=ServiceSpec("embed"))
        _, why = await rig.reported(NotStarted, name)
        assert "they have no network" in why


async def test_a_job_gets_the_devices_of_its_lease_by_cdi_and_no_other(
    home: PodmanHome, tmp_path: Path, spec: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, path = spec
    path.write_bytes(cdi_of(kind, "0", "1", "2"))
    async with state_of(tmp_path) as state:
        async with Rig(home, state, [card(kind, "0"), card(kind, "2")]) as rig:
            shows = "ls /dev/moorage-test-*; echo $NVIDIA_VISIBLE_DEVICES $CUDA_VISIBLE_DEVICES"
            name = rig.start("j1", "sh", "-c", shows)
            assert await rig.reported(Ended, name) == (name, 0, "exit")
            told = await rig.output(name)
            assert told == "/dev/moorage-test-0\n/dev/moorage-test-2\nvoid 0,1\n"
            # what podman did not inject, here since the driver counts on a node that no spec has
            monkeypatch.setattr(Starter, "_nodes_due", lambda *_: ["/dev/moorage-test-0", "/dev/moorage-test-9"])
            name = rig.start("j2", "sleep", "600")
            why = (await rig.reported(NotStarted, name))[1]
            assert "the engine has not given /dev/moorage-test-9 to the container" in why
            assert rig.told(Started, name) is None
        monkeypatch.undo()
        async with Rig(home, state, [card(kind, "7")]) as rig:
            name = rig.start("j3", "true")
            assert f"unresolvable CDI devices {kind}=7" in (await rig.reported(NotStarted, name))[1]
        path.write_text('{"cdiVersion": "0.5.0", "kind":')
        async with Rig(home, state, [card(kind, "0")]) as rig:
            name = rig.start("j4", "true")
            why = (await rig.reported(NotStarted, name))[1]
            assert f"unresolvable CDI devices {kind}=0" in why
            assert str(path) in why, "the file that is broken is named"
            await nothing_left(home, state)


#: devices of such a spec, and what an engine says that gives one to a container
STALE: Final = {
    "library": "no such file or directory",
    "hook": "no such file or directory",
    "foreign": "exec format error",
}


def stale_cdi_of(kind: str, folder: Path) -> bytes:
    """Return a spec that is older than the host's driver: its library and a hook are gone, a hook is of no use here."""
    foreign = folder / "foreign"
    foreign.write_bytes(b"\x7fELF\x01\x01\x01" + bytes(57))
    foreign.chmod(0o755)
    gone = "/usr/lib/x86_64-linux-gnu/libcuda.so.535.54.03"
    edits = {
        "library": {"mounts": [{"hostPath": gone, "containerPath": gone, "options": ["ro", "bind"]}]},
        "hook": {"hooks": [{"hookName": "createContainer", "path": "/usr/bin/moorage-test-no-cdi-hook"}]},
        "foreign": {"hooks": [{"hookName": "createContainer", "path": str(foreign)}]},
        "good": {"env": ["MOORAGE_TEST=1"]},
    }
    devices = [{"name": name, "containerEdits": each} for name, each in edits.items()]
    return msgspec.json.encode({"cdiVersion": "0.5.0", "kind": kind, "devices": devices})


async def test_a_spec_that_is_out_of_date_is_the_hosts_fault_and_a_missing_program_the_jobs(
    home: PodmanHome, tmp_path: Path, spec: tuple[str, Path]
) -> None:
    kind, path = spec
    path.write_bytes(stale_cdi_of(kind, tmp_path))
    async with state_of(tmp_path) as state:
        for name, said in STALE.items():
            async with Rig(home, state, [card(kind, name)]) as rig:
                assert said in (await rig.reported(NotStarted, rig.start(name, "true")))[1]
        async with Rig(home, state, [card(kind, "good")]) as rig:
            started = rig.start("good", "moorage-test-no-program")
            assert (await rig.reported(StartFailed, started))[1] == 127
        await nothing_left(home, state)


@pytest.mark.slow
async def test_a_container_with_a_share_is_held_to_it_by_a_segment_of_its_own(
    home: PodmanHome, tmp_path: Path, spec: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, path = spec
    path.write_bytes(cdi_of(kind, "0"))
    device = Device(0, "nvidia", "made up", uuid_of(0), cdi=[f"{kind}=0"])
    monkeypatch.setattr(limits, "LIBRARY", built() / "limiter.bin")
    put_for_containers(tmp_path / "built")
    mounts = (f"{tmp_path}/built:/built:ro",)
    async with state_of(tmp_path) as state:
        async with Rig(home, state, [device], limiter=True, mounts=mounts) as rig:
            await limited_containers(rig, rig.driver.limits)
        await nothing_left(home, state)


@pytest.mark.slow
async def test_fifty_containers_leave_nothing(home: PodmanHome, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, Rig(home, state) as rig:
        before = len(os.listdir("/proc/self/fd"))
        for turn in range(5):
            names = [rig.start(f"j{turn}-{at}", "sh", "-c", f"exit {at}") for at in range(10)]
            for at, name in enumerate(names):
                assert await rig.reported(Ended, name) == (name, at, "exit")
            rig.driver.forget(names)
        await nothing_left(home, state)
        assert not rig.driver._host.attempts
        assert not rig.driver._removal.later
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before, deadline_s=WAIT_S, what="no descriptor is left")
        assert [path.name for path in home.folder.glob("root/vfs-containers/*") if path.is_dir()] == []


# ------------------------------------------------------------------------------------------------- without podman


class Daemons:
    """Of an agent's MPS daemons what a driver asks for: where the one of an attempt is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.joined: list[AttemptName] = []

    async def join(self, name: AttemptName) -> dict[str, str]:
        self.joined.append(name)
        return {
            "CUDA_MPS_PIPE_DIRECTORY": f"{self.folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{self.folder}/log",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        }


@pytest.mark.slow
async def test_a_container_that_shares_by_mps_reaches_its_daemon_and_the_hosts_shared_memory(
    home: PodmanHome, tmp_path: Path, spec: tuple[str, Path]
) -> None:
    kind, path = spec
    path.write_bytes(cdi_of(kind, "0"))
    daemons, mark = Daemons(tmp_path / "mps"), Path("/dev/shm") / f"moorage-test-{secrets.token_hex(8)}"
    for folder in ("pipe", "log"):
        (daemons.folder / folder).mkdir(parents=True)
    (daemons.folder / "pipe/control").touch()
    tmp_path.chmod(0o755)
    async with state_of(tmp_path) as state:
        rig = Rig(home, state, [card(kind, "0")], daemons=daemons, mps_host_ipc=True, user="0:0")
        assert (rig.driver.joins_mps, rig.driver.modes_refused) == (True, ())
        async with rig:
            mark.touch()
            try:
                shows = "cd $CUDA_MPS_PIPE_DIRECTORY; env; ls . /dev/shm; touch x || echo no; sleep 600"
                name = rig.start("j1", "sh", "-c", shows, gpu=GpuSpec(sharing="mps"), env={"TOKEN": Secret("token")})
                said = await rig.said(name, "no\n")
            finally:
                mark.unlink()
            lines = said.splitlines()
            assert {"control", mark.name, f"CUDA_MPS_PIPE_DIRECTORY={daemons.folder}/pipe"} <= {*lines}
            assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25" in lines
            assert daemons.joined == [name]
            (container,) = home.containers()
            [shown] = msgspec.json.decode(home.podman("inspect", container))
            ours = os.readlink("/proc/self/ns/ipc")  # podman 4.3 calls every namespace shareable
            assert os.readlink(f"/proc/{shown['State']['Pid']}/ns/ipc") == ours
            rig.driver.end(name, 0.0, "end")
            await rig.reported(Ended, name)
            other = rig.start("j2", "sh", "-c", "ls /dev/shm; echo end", env={"TOKEN": Secret("token")})
            assert await rig.reported(Ended, other) == (other, 0, "exit")
            assert await rig.output(other) == "end\n", "a container that does not share has a /dev/shm of its own"
            await nothing_left(home, state)


def test_rootless_only_the_agents_own_user_shares_by_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = PodmanDriver.__new__(PodmanDriver)
    driver._policy = NO_RULES
    users: list[int | None] = []
    for euid in (0, 4321):
        monkeypatch.setattr(os, "geteuid", lambda euid=euid: euid)
        for user in ("65534", "0:0"):
            driver._own = PodmanSettings(mps_host_ipc=True, user=user)
            users.append(driver.uid_of("acme", Request(run=Run(driver="podman", image="i", argv=["x"]))))
    assert users == [65534, 0, None, 4321]


@pytest.mark.slow
async def test_a_container_that_is_over_and_runs_by_its_engine_gives_its_devices_back(
    home: PodmanHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What watches the container for the engine dies first, so that the engine does not see the end."""
    monkeypatch.setattr("moorage.worker.drivers.container.follow.WRONG_S_MAX", 1.0)
    async with state_of(tmp_path) as state, Rig(home, state) as rig:
        name = rig.start("j1", "sleep", "600")
        await rig.reported(Started, name)
        init = rig.driver._host.attempts[name].pid
        assert init is not None
        monitor = read_process(init)
        assert monitor is not None
        for pid in (monitor.parent, init):
            os.kill(pid, signal.SIGKILL)
        assert await rig.reported(Ended, name) == (name, CODE_LOST, "lost")
    await nothing_left(home, state)
