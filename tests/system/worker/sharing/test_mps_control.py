"""The commands of the MPS control daemon: the played one of the tests and NVIDIA's own are asked the same."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from moorage.worker.sharing.mps import control
from moorage.worker.sharing.mps.control import Limits, MpsControl, MpsFault, shows
from tests.nvidia.mps import CLIENT, Played, real_program
from tests.nvidia.stub import Board, Stub
from tests.waiting import until

GPU = "GPU-11111111-2222-3333-4444-555555555555"
KINDS = ["played", pytest.param("real", marks=[pytest.mark.slow, pytest.mark.downloads])]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The played program is slow on a busy machine."""
    monkeypatch.setattr(control, "ASK_S", 30.0)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder that every user may pass, with a path short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def program_of(kind: str, folder: Path) -> str:
    if kind == "played":
        return str(Played(folder / "bin").program)
    program, why = real_program()
    if why:
        pytest.skip(f"no MPS control daemon of NVIDIA's: {why}")
    return program


def begin(it: MpsControl) -> subprocess.Popen[bytes]:
    env = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": GPU, **it.environment}
    return subprocess.Popen(
        [it.program, "-f"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def run_client(it: MpsControl, file: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-IS", "-c", CLIENT, str(file)], env=it.environment)


def as_nobody(argv: list[str], said: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        argv, input=said, env=env, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, timeout=30,
        cwd="/",
    )  # fmt: skip
    return done.stdout


@contextlib.asynccontextmanager
async def daemon(kind: str, folder: Path) -> AsyncIterator[MpsControl]:
    it = MpsControl(program_of(kind, folder), folder / "pipe", folder / "log")
    it.pipe.mkdir()
    it.log.mkdir()
    with pytest.raises(MpsFault, match="Cannot find MPS control daemon process"):
        await it.servers()
    process = begin(it)

    async def answers() -> bool:
        with contextlib.suppress(MpsFault):
            await it.servers()
            return True
        return False

    try:
        await until(answers, what="the daemon answers")
        yield it
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its server, too
        process.wait()


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_daemon_answers_without_a_client(kind: str, short: Path) -> None:
    async with daemon(kind, short) as it:
        assert await it.servers() == []
        assert await it.clients(1) == []
        assert await it.ask("get_server_status 1") == ["Server 1 not found"]
        assert await it.ask("terminate_client 1 2") == ["Server 1 not found", "Server 1 not found!", "1"]
        assert await it.ask("nonsense") == ['Unknown command "nonsense"'], "and its exit status is 0"
        assert await it.ask("get_default_device_pinned_mem_limit 0") == []
        assert (it.pipe / "control").stat().st_mode & 0o777 == 0o666
        assert not (it.pipe / "control_privileged").stat().st_mode & 0o022
        assert begin(it).wait(60) == 1, "there is one already"
        await it.quit(1)
        with pytest.raises(MpsFault, match="Cannot find"):
            await it.servers()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_limits_are_set_and_read_back(kind: str, short: Path) -> None:
    async with daemon(kind, short) as it:
        for limits, shown in (
            (Limits(512, 25), "512M"),
            (Limits(4000, 33), "3G"),  # it shows whole GiB from one on
            (Limits(81559, 50), "79G"),
        ):
            await it.limit(limits)
            assert await it.ask("get_default_device_pinned_mem_limit 0") == [shown]
            assert await it.ask("get_default_active_thread_percentage") == [str(float(limits.percent))]
        for bad in (0, 101):  # silently ignored, with exit status 0: so what is set is read back
            with pytest.raises(MpsFault, match=r"get_default_active_thread_percentage is 50\.0 where"):
                await it.limit(Limits(4000, bad))
        assert await it.ask("set_default_device_pinned_mem_limit 0 70") == []
        assert await it.ask("get_default_device_pinned_mem_limit 0") == ["70M"], "a number without a unit is of MiB"
        with pytest.raises(MpsFault, match="would be no limit"):
            await it.limit(Limits(0, 50))


#: says the free and the total MiB of its GPU once its context is there, and whether 1,000 MiB more fit
MEMORY = """
import ctypes
cuda, context, at = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
print(free.value >> 20, total.value >> 20, cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(1000 << 20)) == 0)
"""


async def test_a_clients_own_limit_lowers_the_daemons_and_never_raises_it(short: Path) -> None:
    """As an H200 showed on 2026-11-27. A context of the stub takes 300 MiB."""
    stub = Stub(short / "stub", Board(GPU))

    def client(**own: str) -> list[str]:
        env = {**stub.environment, **it.environment, **own}
        return subprocess.run([sys.executable, "-IS", "-c", MEMORY], env=env, stdout=-1, text=True).stdout.split()

    async with daemon("played", short) as it:
        assert client() == [str(81559 - 300 - 1), "81559", "True"], "no limit, and 1 MiB of the device is its own"
        await it.limit(Limits(3072, 50))
        assert client() == ["2772", "81559", "True"], "CUDA tells the limit as free, and the device as total"
        assert client(**Limits(5120, 50).environment) == ["2772", "81559", "True"]
        assert client(**Limits(1024, 50).environment) == ["724", "81559", "False"]


@pytest.mark.parametrize(
    ("line", "wanted", "same"),
    [
        ("25.0", "25.0", True),
        ("25", "25.0", True),
        ("25.00%", "25.0", True),
        ("50.0", "25.0", False),
        ("3G", "4000M", True),
        ("4000M", "4000M", True),
        ("4000 MB", "4000M", True),
        ("4096000K", "4000M", True),
        ("3.90625G", "4000M", True),
        ("4G", "4000M", False),
        ("512M", "513M", False),
        ("25", "25M", False),
        ("Server 1 not found", "25.0", False),
    ],
)
def test_a_limit_is_read_back_by_its_number(line: str, wanted: str, same: bool) -> None:
    assert shows(line, wanted) is same


async def test_clients_and_faults_of_a_server(short: Path) -> None:
    async with daemon("played", short) as it:
        client = run_client(it, short / "client")
        try:
            await until((short / "client").exists, what="the client is there")
            [server] = await it.servers()
            assert await it.clients(server) == [client.pid]
            assert not await it.is_faulty(server)
            (short / "bin/mood").write_text("fault")
            assert await it.is_faulty(server)
        finally:
            client.kill()
            client.wait()


async def test_limits_that_do_not_take_are_a_fault(short: Path) -> None:
    async with daemon("played", short) as it:
        (short / "bin/mood").write_text("deaf")
        with pytest.raises(MpsFault, match="get_default_device_pinned_mem_limit is nothing where 4000M was set"):
            await it.limit(Limits(4000, 25))


async def test_a_wedged_daemon_is_a_fault_in_time_and_leaves_no_process(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon("played", short) as it:
        (short / "bin/mood").write_text("slow")
        assert await it.servers() == []
        (short / "bin/mood").write_text("wedged")
        made: list[asyncio.subprocess.Process] = []
        begin = asyncio.create_subprocess_exec

        async def kept(*words: str, **more: object) -> asyncio.subprocess.Process:
            made.append(await begin(*words, **more))  # type: ignore[arg-type]
            return made[-1]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", kept)
        with pytest.raises(MpsFault, match=r"no answer to get_server_list within 0\.2 s"):
            async with asyncio.timeout(60):
                await it.ask("get_server_list", timeout_s=0.2)
        assert made[0].returncode is not None


async def test_a_program_that_is_not_there_is_a_fault(short: Path) -> None:
    with pytest.raises(MpsFault, match="cannot be started: No such file"):
        await MpsControl(str(short / "none"), short, short).servers()


@pytest.mark.downloads
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="runs the daemon as root and a client as another user")
async def test_another_user_cannot_change_the_real_daemons_limits(short: Path) -> None:
    """A job of another user is a client and no operator."""
    async with daemon("real", short) as it:
        await it.limit(Limits(4000, 25))
        mine = short / "client"
        mine.write_bytes(Path(it.program).read_bytes())
        mine.chmod(0o755)
        for command in ("set_default_device_pinned_mem_limit 0 70G", "set_default_active_thread_percentage 99"):
            said = as_nobody([str(mine)], f"{command}\n", it.environment)
            assert "Insufficient privileges" in said
        assert await it.ask("get_default_device_pinned_mem_limit 0") == ["3G"]
        assert await it.ask("get_default_active_thread_percentage") == ["25.0"]


async def test_a_daemon_that_answers_without_an_end_is_a_failed_one(tmp_path: Path) -> None:
    """A job may play the daemon at the folder that its request names: the agent keeps none of it."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec yes\n")
    program.chmod(0o755)
    with pytest.raises(MpsFault, match="answers with more than 65536 bytes"):
        await MpsControl(str(program), tmp_path, tmp_path).servers()


def test_a_log_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A job may have put it into the folder that its request names; opening it would stop the agent."""
    os.mkfifo(tmp_path / control.SERVER_LOG)
    assert MpsControl("", tmp_path, tmp_path).blamed() == []
    os.unlink(tmp_path / control.SERVER_LOG)
    os.symlink("/dev/zero", tmp_path / control.SERVER_LOG)
    assert MpsControl("", tmp_path, tmp_path).blamed() == []
    os.unlink(tmp_path / control.SERVER_LOG)
    (tmp_path / control.SERVER_LOG).write_text("Client process 7 encountered a fatal GPU error\n")
    assert MpsControl("", tmp_path, tmp_path).blamed() == [7]
