"""MPS daemons that a worker runs: real processes, supervisor and pynvml, with NVML as a stub and the daemon played."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import encode
from moorage.schemas.frames import End, Place
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.agent import Agent
from moorage.worker.agent.journal import JOURNAL_NAME
from moorage.worker.agent.run import Worker, start
from moorage.worker.settings import WorkerSettings
from moorage.worker.sharing.compute_modes import EXCLUSIVE_PROCESS, FILE_NAME
from moorage.worker.sharing.mps import control, managed, watched
from moorage.worker.sharing.mps.watched import OperatorsMps
from moorage.worker.supervisor import client as supervisor_client
from moorage.worker.supervisor import protocol
from tests.nvidia.mps import CLIENT, Played
from tests.nvidia.stub import Board, Stub
from tests.system.worker.agent.test_agent_process import state_folder
from tests.waiting import until

GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-22222222-2222-3333-4444-555555555555"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="jobs of another user need root")


def name_of(job: str) -> AttemptName:
    return ("acme", job, 0, 1, 10)


class Scene:
    """A worker that runs MPS daemons, on the GPUs of a stub, and the leader that places jobs there."""

    def __init__(self, url: str, prefix: str, leader: ScriptedLeader, stub: Stub, played: Played, state: Path) -> None:
        self.url = url
        self.prefix = prefix
        self.leader = leader
        self.stub = stub
        self.played = played
        self.folder = stub.folder
        self.state = state
        self.more: dict[str, Any] = {}
        self.worker: Worker | None = None

    async def start(self, joins: int = 1, **more: Any) -> None:
        self.more = more or self.more
        settings = WorkerSettings(
            self.state, "w1", self.prefix, modes=("exclusive", "mps"), load_s=0.2, leases=False, mps_dir=self.sockets,
            free_wait_s=120, **{"mps": "managed", **self.more},
        )  # fmt: skip
        self.worker = await start(settings, self.url)
        await self.leader.joined("w1", joins)

    async def stop(self) -> None:
        if (worker := self.worker) is not None:
            self.worker = None
            await worker.stop()

    @property
    def agent(self) -> Agent:
        assert self.worker is not None
        return self.worker.agents[0]

    @property
    def sockets(self) -> Path:
        return self.folder / "mps"

    async def place(
        self, job: str, *, slot: int = 0, slots: list[int] | None = None, mode: str = "mps",
        argv: list[str] | None = None, user: str | None = None, env: dict[str, str] | None = None, **gpu: Any,
    ) -> None:  # fmt: skip
        """Place a job that writes the variables of MPS into a file of its name, and stays."""
        file = self.folder / job
        command = argv or ["/bin/sh", "-c", f"env | grep MPS >{file}.part; mv {file}.part {file}; exec sleep 600"]
        run = {"argv": command, "grace_s": 20, "env": env or {}} | ({} if user is None else {"user": user})
        request = {"gpu": ({"sharing": mode} if mode == "mps" else {}) | gpu, "run": run}
        await self.leader.want("w1", Place(*name_of(job), slots or [slot], mode, False, encode(request)))

    async def client(
        self, job: str, mib: int = 4000, percent: int = 25, before: str = "", **more: Any
    ) -> dict[str, str]:
        """As `share`, and the job is a client of its daemon, so that there is a server."""
        argv = [sys.executable, "-IS", "-c", f"{before}\n{CLIENT}", str(self.folder / job)]
        return await self.share(job, mib, percent, argv=argv, **more)

    async def share(self, job: str, mib: int = 4000, percent: int = 25, **more: Any) -> dict[str, str]:
        """Have a job share a GPU; returns the variables of MPS that it has, once it runs."""
        await self.place(job, share={"memory_mib": mib, "compute_percent": percent}, **more)
        file = self.folder / job
        await until(lambda: file.exists() or job in self.exits(), what=f"{job} runs")
        assert file.exists(), self.leader.seat("w1").report("exited", name_of(job))
        return dict(line.split("=", 1) for line in file.read_text().splitlines())

    async def end(self, *jobs: str) -> None:
        await self.leader.want("w1", *(End(*name_of(job), "cancelled") for job in jobs))
        for job in jobs:
            await self.leader.await_report("w1", "freed", name_of(job))

    async def refused(self, job: str) -> str:
        return (await self.leader.await_report("w1", "refused", name_of(job))).detail

    def exits(self) -> dict[str, str]:
        return {report.job: report.detail for report in self.leader.seat("w1").reports if report.kind == "exited"}

    def clients(self) -> dict[int, str]:
        """Return the jobs of the processes that are known to the driver, by pid."""
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]
        found = self.agent.drivers["process"].attempts_of(pids)
        return {pid: name[1] for pid, name in found.items() if name is not None}

    def limits_set(self) -> list[str]:
        """Return the limits of memory that the daemons were told, for servers to come."""
        lines = [line.split() for line in self.played.lines("commands")]
        return [words[2] for words in lines if words[0] == "set_default_device_pinned_mem_limit"]

    @property
    def daemons(self) -> list[int]:
        """Return the pids of the daemons that live."""
        pids = [int(line.split()[0]) for line in self.played.lines("starts")]
        return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]

    @property
    def kept_modes(self) -> list[str]:
        """The GPUs that are written down as a daemon's."""
        file = self.state / FILE_NAME
        return json.loads(file.read_bytes())["of_mps"] if file.exists() else []


@contextlib.asynccontextmanager
async def scene(
    url: str,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    *boards: Board,
    opens: bool = True,
    notice: str = "60",
    **more: Any,
) -> AsyncIterator[Scene]:
    """`opens` says whether the worker is started, `notice` how many seconds an end waits for a daemon's answer."""
    monkeypatch.setattr(watched, "CHECK_S", 1.0)
    for module, name in ((control, "ASK_S"), (managed, "START_S"), (managed, "END_S")):
        monkeypatch.setattr(module, name, 60.0)  # the played program is slow on a busy machine
    spawn = supervisor_client._spawn
    monkeypatch.setattr(supervisor_client, "_spawn", lambda state, words: spawn(state, (*words, "--notice", notice)))
    with tempfile.TemporaryDirectory(prefix="mps-") as name:
        folder = Path(name)
        folder.chmod(0o777)  # jobs of another user write into it
        stub = Stub(folder, *(boards or (Board(GPU), Board(OTHER, pci="00000000:18:00.0"))))
        played = Played(folder / "bin")
        monkeypatch.setenv("PATH", f"{played.folder}:{os.environ['PATH']}")
        # the fence announces the ends that it brings: it is farther away than a notice takes
        async with ScriptedLeader(url, prefix, lease_s=600) as leader, state_folder() as state:
            with stub.load():
                one = Scene(url, prefix, leader, stub, played, state)
                try:
                    if opens:
                        await one.start(**more)
                    yield one
                    if one.worker is not None and one.worker.host.failed.done():
                        one.worker.host.failed.result()
                finally:
                    await one.stop()
            await_gone = one.daemons
        await until(lambda: not [pid for pid in await_gone if os.path.exists(f"/proc/{pid}")], what="no daemon is left")


@pytest.mark.slow
async def test_a_daemon_stands_from_the_first_sharer_to_the_last(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(nats_url, unique, monkeypatch) as one:
        first = await one.client("first", 4000, 25)
        assert one.played.lines("starts") == [f"{one.daemons[0]} {GPU}"]
        assert (one.stub.compute_mode(GPU), one.stub.compute_mode(OTHER)) == (EXCLUSIVE_PROCESS, 0)
        assert first == {
            "CUDA_MPS_PIPE_DIRECTORY": str(one.sockets / "0/pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(one.sockets / "0/log"),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4000M",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        }
        assert one.limits_set() == ["4000M"]
        second = await one.share("second", 9000, 50)
        assert second["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=9000M"
        assert one.limits_set() == ["4000M", "9000M"], "the greatest is the limit of all"
        commands = one.played.lines("commands")
        assert any(line.startswith("set_device_pinned_mem_limit") for line in commands), "the server's, too"
        await one.end("first")
        assert len(one.daemons) == 1, "the second one goes on"
        await one.end("second")
        assert one.daemons == [], "it is gone before the GPU goes back"
        assert (one.stub.compute_mode(GPU), one.kept_modes) == (0, [])
        assert not one.sockets.exists()
        assert "quit -t 2" in one.played.lines("commands")
        await one.place("alone", mode="exclusive", argv=["/bin/true"])
        await one.leader.await_report("w1", "freed", name_of("alone"))


@pytest.mark.slow
@as_root
async def test_what_cannot_share_a_daemon_is_refused_as_a_placement(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(GPU, errors={"set_compute_mode": 4})
    async with scene(nats_url, unique, monkeypatch, board, Board(OTHER, pci="00000000:18:00.0")) as one:
        assert one.leader.seat("w1").joins[0].hello.mps_users == {}, "the scheduler may go by the requests' users"
        await one.share("roots", 4000, 25)
        assert one.stub.compute_mode(GPU) == 0, "it goes on where the mode cannot be set, and the level says so"
        await one.place("anothers", user="65534")
        assert await one.refused("anothers") == "jobs of another user share GPU 0 by mps"
        await one.place("two", slots=[0, 1], count=2)
        assert (await one.refused("two")).startswith("not-here: a daemon serves one GPU")
        await one.place("own", mps_pipe_dir="/tmp/nvidia-mps")
        assert (await one.refused("own")).startswith("not-here: the worker runs the MPS daemons")
        await one.end("roots")
        await one.share("nobodys", user="65534")
        one.played.program.unlink()
        await one.place("late", slot=1)
        assert await one.refused("late") == "not-here: nvidia-cuda-mps-control is not installed"
        assert [state.sharers for state in one.agent.pool.slot_states()] == [1, 0], "what is refused holds nothing"


@pytest.mark.slow
async def test_a_daemon_that_cannot_serve_is_this_hosts_fault_and_leaves_nothing(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(nats_url, unique, monkeypatch) as one:
        for job, mood, why in (
            ("first", "dies", "the daemon ended: exit status 1, signal None"),
            ("second", "deaf", "get_default_device_pinned_mem_limit is nothing where 4000M was set"),
        ):
            one.played.feel(mood)
            await one.place(job, share={"memory_mib": 4000})
            assert (await one.refused(job)).endswith(f": {why}")
            await until(lambda: not one.daemons and one.stub.compute_mode(GPU) == 0, what="all is back")
        one.played.feel("")
        await one.share("third")
        assert one.exits() == {}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "wedged"])
async def test_the_jobs_of_a_daemon_that_fails_are_lost_and_the_next_gets_another(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with scene(nats_url, unique, monkeypatch, notice="8") as one:  # one that is wedged never answers
        await one.client("first")
        [daemon] = one.daemons
        await one.share("elsewhere", slot=1)
        if how == "killed":
            os.kill(daemon, signal.SIGKILL)
        else:
            monkeypatch.setattr(control, "ASK_S", 10.0)
            one.played.feel(f"{how} {daemon}")
        assert (await one.leader.await_report("w1", "exited", name_of("first"), deadline_s=120)).detail == "lost"
        await one.leader.await_report("w1", "freed", name_of("first"))
        one.played.feel("")
        await one.share("second")
        assert daemon not in one.daemons
        assert one.exits() == {"first": "lost"}, "the job on the other GPU goes on"


@pytest.mark.slow
async def test_the_job_whose_process_broke_the_server_ends_by_its_own_fault(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(nats_url, unique, monkeypatch) as one:
        await one.client("guilty")
        await one.client("victim")
        [pid] = [pid for pid, job in one.clients().items() if job == "guilty"]
        log = one.sockets / "0" / "log" / "server.log"
        log.write_text(
            "[2026-11-26 07:00:00.000 Server 11] Client process 1 encountered a fatal GPU error.\n"
            f"[2026-11-26 07:00:00.000 Server 12] Client process {pid} encountered a fatal GPU error.\n"
            "[2026-11-26 07:00:00.001 Server 12] Client process disconnected\n"
        )
        one.played.feel("fault")
        for job in ("guilty", "victim"):
            await one.leader.await_report("w1", "exited", name_of(job), deadline_s=120)
        one.played.feel("")
        told = f"mps-fault: its process {pid} had a fatal GPU error, which ended the MPS server"
        assert one.exits() == {"guilty": told, "victim": "lost"}


@pytest.mark.slow
async def test_a_new_agent_takes_the_daemon_over(nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(nats_url, unique, monkeypatch) as one:
        await one.share("first")
        daemons = one.daemons
        await one.stop()
        assert (one.daemons, one.stub.compute_mode(GPU)) == (daemons, EXCLUSIVE_PROCESS)
        await one.start(joins=2)
        await one.share("second", 9000)
        assert (one.daemons, one.exits()) == (daemons, {})
        await one.end("first", "second")
        assert (one.daemons, one.stub.compute_mode(GPU), one.kept_modes) == ([], 0, [])


@pytest.mark.slow
@pytest.mark.parametrize("mps", ["managed", "operator"])
async def test_what_an_agent_left_behind_is_put_back(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, mps: str
) -> None:
    """A daemon whose sharers ended while no agent was there, or while none ran daemons any more."""
    async with scene(nats_url, unique, monkeypatch) as one:
        await one.share("first")
        await one.stop()
        (one.state / JOURNAL_NAME).unlink()  # nothing tells the next agent of the job
        one.leader.seats.clear()
        await one.start(mps=mps)
        await until(lambda: not one.daemons and not one.kept_modes, what="all is back")
        assert one.stub.compute_mode(GPU) == 0
        await one.place("alone", mode="exclusive", argv=["/bin/true"])
        await one.leader.await_report("w1", "freed", name_of("alone"))


@pytest.mark.slow
async def test_a_clients_work_is_stopped_before_it_is_killed(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(nats_url, unique, monkeypatch) as one:
        await one.client("deaf", before="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
        await one.client("neighbour")
        [pid] = [pid for pid, name in one.clients().items() if name == "deaf"]
        await one.leader.want("w1", End(*name_of("deaf"), "cancelled", grace_s=0.0))
        exited = await one.leader.await_report("w1", "exited", name_of("deaf"))
        told = [line.split()[2] for line in one.played.lines("commands") if line.startswith("terminate_client")]
        assert (told, exited.detail) == ([str(pid)], "end")
        one.played.feel("refuses")
        await one.end("neighbour")
        assert one.exits()["neighbour"] == "end; mps-not-asked: terminate_client: Insufficient privileges"


@pytest.mark.slow
async def test_an_operators_daemon_is_watched_and_told_of_ends_as_one_of_the_workers_own(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(nats_url, unique, monkeypatch, mps="operator") as one:
        pipe, log = one.folder / "pipe", one.folder / "log"
        for folder in (pipe, log):
            folder.mkdir()
        named: dict[str, Any] = {"mps_pipe_dir": str(pipe), "mps_log_dir": str(log)}
        env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
        daemon = await asyncio.create_subprocess_exec(one.played.program, "-f", env=env)
        await until((pipe / "nvidia-cuda-mps-control.pid").exists, what="the operator's daemon listens")
        try:
            kernel = "import os; os.environ['KERNEL'] = '1'"
            for job in ("told", "guilty", "victim"):
                await one.client(job, before=kernel, **named)
            await one.end("told")
            assert (one.played.lines("failed"), one.exits()["told"]) == ([], "end")
            [pid] = [pid for pid, job in one.clients().items() if job == "guilty"]
            (log / "server.log").write_text(f"[Server 12] Client process {pid} encountered a fatal GPU error.\n")
            one.played.feel("fault")
            for job in ("guilty", "victim"):
                await one.leader.await_report("w1", "freed", name_of(job))
            assert (one.exits()["guilty"].partition(":")[0], one.exits()["victim"]) == ("mps-fault", "lost")
            await one.place("next", **named)
            assert "cannot serve: server" in await one.refused("next"), "no sharer until it is ACTIVE"
            one.played.feel("")
            clients = one.agent.clients.mps
            assert isinstance(clients, OperatorsMps)
            await until(lambda: not any(each.why for each in clients._daemons.values()), what="it is well again")
            await one.client("last", **named)
            await one.end("last")
        finally:
            daemon.terminate()
            await daemon.wait()


@pytest.mark.slow
async def test_a_job_that_does_not_share_by_mps_joins_no_daemon(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(nats_url, unique, monkeypatch) as one:
        await one.place("alone", mode="exclusive")
        own = {"CUDA_MPS_PIPE_DIRECTORY": "/own"}
        await one.place("own", mode="exclusive", slot=1, env=own)
        files = [one.folder / "alone", one.folder / "own"]
        await until(lambda: all(file.exists() for file in files), what="both run")
        pipe = Path(files[0].read_text().strip().removeprefix("CUDA_MPS_PIPE_DIRECTORY="))
        attempt = one.agent.drivers["process"].folder_of(name_of("alone"))
        assert (str(pipe.parent), pipe.exists()) == (attempt, False)
        assert files[1].read_text() == "CUDA_MPS_PIPE_DIRECTORY=/own\n"
        await one.end("alone", "own")


@pytest.mark.slow
async def test_sharers_that_never_ran_leave_no_daemon_behind(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(nats_url, unique, monkeypatch) as one:
        one.played.feel("late")
        await one.place("withdrawn")
        await until(lambda: one.daemons, what="its daemon starts")
        await one.leader.want("w1", End(*name_of("withdrawn"), "cancelled"))
        await one.leader.await_report("w1", "exited", name_of("withdrawn"))
        one.played.feel("")
        await one.leader.await_report("w1", "freed", name_of("withdrawn"))
        assert (one.daemons, one.stub.compute_mode(GPU)) == ([], 0)
        closed: list[tuple[int, str]] = []
        quarantine = one.agent.pool.quarantine

        def close(slot: int, reason: str, by: str = "") -> None:
            closed.append((slot, reason))
            quarantine(slot, reason, by)

        monkeypatch.setattr(one.agent.pool, "quarantine", close)
        monkeypatch.setattr(protocol, "FRAME_BYTES_MAX", 5000)
        await one.place("too-large", env={"LARGE": "x" * 6000})
        assert "frame of" in await one.refused("too-large")
        assert closed == [(0, "its MPS daemon ends")], "no other job gets the GPU while its daemon ends"
        await until(lambda: not one.agent.pool.busy_slots(), what="it is open again")
        assert (one.daemons, one.stub.compute_mode(GPU)) == ([], 0)
