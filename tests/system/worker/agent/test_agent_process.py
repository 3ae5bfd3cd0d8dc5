"""The agent with its real supervisor and real processes on simulated devices, over a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.codec import encode
from moorage.schemas.frames import End, Place, Start
from moorage.system.proctree import read_process
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.agent import Agent
from moorage.worker.agent.run import SUPERVISOR_FOLDER, Worker, run, start
from moorage.worker.devices.readers.simulated import SimulatedInventory
from moorage.worker.settings import WorkerSettings
from moorage.worker.supervisor.client import Supervised, SupervisorError
from moorage.worker.supervisor.journal import open_journal, read_journal, records_of
from moorage.worker.supervisor.protocol import JOURNAL_NAME
from tests.system.cli import forks
from tests.system.cli.node import environment
from tests.waiting import until

AGENT = """
import asyncio, signal, sys
import msgspec
from moorage.worker.agent.run import run
from moorage.worker.settings import settings_from

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run(settings_from(msgspec.json.decode(sys.argv[1])), sys.argv[2], stop)

asyncio.run(main())
"""


def body(script: str, **fields: Any) -> bytes:
    run = {"argv": ["/bin/sh", "-c", script], "grace_s": 0.5} | fields.pop("run", {})
    return encode({"gpu": {}, "run": run, **fields})


def name_of(job: str = "a", replica: int = 0, fence: int = 10) -> AttemptName:
    return ("acme", job, replica, 1, fence)


def place(name: AttemptName, request: bytes, slots: tuple[int, ...] = (0,), **fields: Any) -> Place:
    mode = fields.get("mode", "exclusive" if slots else "none")
    return Place(*name, list(slots), mode, fields.get("hold", False), request, fields.get("traceparent", ""))


def settings_of(state: Path, prefix: str, **fields: Any) -> WorkerSettings:
    return WorkerSettings(state, "w1", prefix, simulate="4xH100", modes=("exclusive", "mps"), **fields)


@contextlib.asynccontextmanager
async def supervised(state: Path) -> AsyncIterator[None]:
    """Whatever runs in a state folder meanwhile is ended: its supervisor, with all that it ran."""
    try:
        yield
    finally:
        with contextlib.suppress(SupervisorError, OSError):
            left = await Supervised.connect(state / SUPERVISOR_FOLDER, spawn_if_absent=False)
            await left.shutdown(0.0)


@contextlib.asynccontextmanager
async def state_folder() -> AsyncIterator[Path]:
    """A state folder, whose supervisor is gone at the end with all that it ran."""
    with tempfile.TemporaryDirectory(prefix="moorage-agent-") as folder:
        async with supervised(Path(folder)):
            yield Path(folder)


@contextlib.asynccontextmanager
async def worker(url: str, prefix: str, leader: ScriptedLeader, **fields: Any) -> AsyncIterator[tuple[Worker, Agent]]:
    async with state_folder() as state:
        running = await start(settings_of(state, prefix, **fields), url)
        try:
            await leader.joined("w1")
            yield running, running.agents[0]
            if running.host.failed.done():
                running.host.failed.result()
        finally:
            await running.stop()


@contextlib.asynccontextmanager
async def agent_process(
    state: Path, url: str, prefix: str
) -> AsyncIterator[asyncio.subprocess.Process | forks.Service]:
    """An agent in a process of its own, to kill or stop."""
    table = {"state_dir": str(state), "id": "w1", "prefix": prefix, "simulate": "4xH100"}
    with os.fdopen(os.dup(2), "wb") as out:
        process = await forks.python("-c", AGENT, msgspec.json.encode(table).decode(), url, env=os.environ, out=out)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def is_alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.dead


async def pid_of(path: Path) -> int:
    text = await until(lambda: path.exists() and path.read_text().strip(), what=f"{path} with a pid")
    return int(text)


async def test_a_job_finds_its_gpus_runs_and_frees_them(nats_url: str, unique: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        name = name_of()
        request = body("env; echo problem >&2; exit 3", run={"env": {"SEED": "7", "CUDA_VISIBLE_DEVICES": "0"}})
        await leader.want("w1", place(name, request, (1, 3), traceparent="00-abc-def-01"))
        exited = await leader.await_report("w1", "exited", name)
        assert (exited.code, exited.detail) == (3, "exit")
        await leader.await_report("w1", "freed", name)
        assert leader.seat("w1").kinds(name) == ["claimed", "started", "exited", "freed"]
        await until(lambda: any(frame.get("end") for _, frame in leader.output), what="the end of the output")
        found = dict(line.split("=", 1) for line in leader.text(name).splitlines() if "=" in line)
        uuids = ",".join(agent.devices[slot].uuid for slot in (1, 3))
        assert found["NVIDIA_VISIBLE_DEVICES"] == found["MOORAGE_GPU_UUIDS"] == uuids
        assert found["CUDA_VISIBLE_DEVICES"] == found["MOORAGE_GPU_INDICES"] == "1,3"
        assert (found["MOORAGE_FENCE"], found["MOORAGE_JOB"], found["MOORAGE_WORKER"]) == ("10", "a", "w1")
        assert found["SEED"] == "7"
        assert found["TRACEPARENT"] == "00-abc-def-01"
        assert leader.text(name, "err") == "problem\n"
        await until(lambda: not agent.attempts.held, what="nothing held")
        assert [state.sharers for state in agent.pool.slot_states()] == [0, 0, 0, 0]


async def test_a_gangs_rank_gets_its_place_from_start(nats_url: str, unique: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        name = name_of(replica=1)
        script = "echo $RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $LOCAL_RANK"
        await leader.want("w1", place(name, body(script, replicas=2), hold=True))
        await leader.await_report("w1", "claimed", name)
        assert not leader.text(name)
        await leader.want("w1", Start(*name, "10.0.0.7", 29501, 2))
        await leader.await_report("w1", "freed", name)
        await until(lambda: leader.text(name) == "1 2 10.0.0.7 29501 0\n", what="the rank's words")


async def test_one_replica_that_is_distributed_is_rank_0_of_1_on_its_own_host(nats_url: str, unique: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT; sleep 600"
        request = body(script, gpu={"distributed": {"backend": "gloo", "master_port": 41500}})
        names = [name_of(job, fence=fence) for fence, job in enumerate(("one", "two"), 10)]
        for slot, name in enumerate(names):
            await leader.want("w1", place(name, request, (slot,)))
            await until(lambda: leader.text(name).endswith("\n"), what=f"the words of {name}")  # noqa: B023
        ports = []
        for name in names:
            rank, world, local, address, port = leader.text(name).split()
            assert (rank, world, local, address) == ("0", "1", "0", "127.0.0.1")
            ports.append(int(port))
        assert 41500 <= min(ports) < max(ports), "each meets itself at a port of its own"


@pytest.mark.parametrize(
    ("run", "code", "why"),
    [
        ({"argv": ["/no/such/program"]}, 127, "not-here: no /no/such/program on the worker"),
        ({"argv": ["no-such-program"]}, 127, "not-here: no program no-such-program in PATH"),
        ({"argv": ["/etc/passwd"]}, 126, "not-here: /etc/passwd: Permission denied"),
        ({"argv": ["./train.py"]}, 127, "cannot-run: no ./train.py in "),
        ({"argv": ["./train.py"], "cwd": "/"}, 127, "not-here: no ./train.py in / "),
        ({"argv": ["true"], "cwd": "src"}, 126, "cannot-run: no folder "),
        ({"argv": ["true"], "cwd": "/no/such"}, 126, "not-here: no folder /no/such"),
        ({"argv": ["true"], "user": "no such user"}, 126, "not-here: user: no such user: no such user"),
        ({"argv": ["true"], "env": {"TOKEN": {"secret": "hf"}}}, 126, "not-here: secret 'hf': the worker's folder of"),
    ],
)
async def test_what_a_host_lacks_is_refused_and_what_the_request_lacks_fails(
    nats_url: str, unique: str, run: dict[str, Any], code: int, why: str
) -> None:
    """A secret, a user, a folder or a program that one host lacks failed the job, though another host had it."""
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        await leader.want("w1", place(name_of(), body("", run=run)))
        refused = await leader.await_report("w1", "refused", name_of())
        assert (refused.code, refused.detail[: len(why)]) == (code, why)
        assert leader.seat("w1").kinds(name_of())[-1] == "refused"
        assert "started" not in leader.seat("w1").kinds(name_of())
        await leader.want("w1", place(name_of("b", fence=99), body("true")))
        assert (await leader.await_report("w1", "exited", name_of("b", fence=99))).code == 0, "its GPU is free"


async def test_whatever_a_request_names_as_its_user_ends_no_agent(nats_url: str, unique: str) -> None:
    users = ("nobody\0", "²", "9" * 40, "no such user", "")
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        for fence, user in enumerate(users, 10):
            name = name_of(f"u{fence}", fence=fence)
            await leader.want("w1", place(name, body("true", run={"user": user})))
            refused = await leader.await_report("w1", "refused", name)
            assert (refused.code, refused.detail.split(":")[0]) == (126, "not-here")
        await leader.want("w1", place(name_of("b", fence=99), body("true")))
        assert (await leader.await_report("w1", "exited", name_of("b", fence=99))).code == 0


@pytest.mark.slow
async def test_a_job_is_told_once_to_save_itself_whatever_becomes_of_its_agent(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    """Killed and started anew between the start and the signal: the supervisor has the timer."""
    saved, up = tmp_path / "saved", tmp_path / "up"
    script = f"trap 'echo saved >> {saved}' USR1; echo $$ > {up}; while :; do sleep 0.01; done"
    run = {"timeout_s": 8, "checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 6}
    name = name_of()
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        async with agent_process(state, nats_url, unique):
            await leader.joined("w1")
            await leader.want("w1", place(name, body(script, run=run)))
            await leader.await_report("w1", "started", name)
            await pid_of(up)
        async with agent_process(state, nats_url, unique):
            await leader.joined("w1", 2)
            await until(saved.exists, what="told to save itself")
            exited = await leader.await_report("w1", "exited", name)
    assert exited.detail == "timeout"
    assert saved.read_text() == "saved\n"


async def test_a_jobs_deadline_is_a_time_to_save_itself_too(nats_url: str, unique: str, tmp_path: Path) -> None:
    saved, up = tmp_path / "saved", tmp_path / "up"
    script = f"trap 'echo saved >> {saved}; exit 0' USR1; echo $$ > {up}; while :; do sleep 0.01; done"
    run = {"checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 600}
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        name = name_of()
        placed = msgspec.structs.replace(place(name, body(script, run=run, deadline_s=3600)), ends_in_s=599.0)
        await leader.want("w1", placed)
        exited = await leader.await_report("w1", "exited", name)
    assert (exited.code, exited.detail, saved.read_text()) == (0, "exit", "saved\n")


@pytest.mark.slow
async def test_memory_that_does_not_come_back_is_quarantined(nats_url: str, unique: str) -> None:
    async with (
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader, free_wait_s=0.3) as (_, agent),
    ):
        name = name_of()
        inventory = agent.inventory
        assert isinstance(inventory, SimulatedInventory)
        inventory.keep_memory(1, 5000)
        await leader.want("w1", place(name, body("true"), (0, 1)))
        assert (await leader.await_report("w1", "quarantined", name)).detail == "1"
        assert leader.seat("w1").kinds(name) == ["claimed", "started", "exited", "quarantined"]
        await leader.want("w1", place(name_of("b", fence=11), body("true"), (0,)))
        await leader.await_report("w1", "freed", name_of("b", fence=11))
        await leader.want("w1", place(name_of("c", fence=12), body("true"), (1,)))
        assert (await leader.await_report("w1", "refused", name_of("c", fence=12))).detail == "quarantined 1"
        seat = leader.seat("w1")
        await until(lambda: seat.loads[-1].gpu_pool[1].health == "quarantined", what="a load that shows it")
        inventory.set_reading(1, None)
        await leader.await_report("w1", "freed", name)
        await leader.want("w1", place(name_of("d", fence=13), body("true"), (1,)))
        await leader.await_report("w1", "freed", name_of("d", fence=13))


async def test_a_job_in_quarantine_takes_no_gpu_of_another_job_at_a_restart(nats_url: str, unique: str) -> None:
    ended, runs = name_of(), name_of("b", fence=11)
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        settings = settings_of(state, unique, free_wait_s=0.3)
        first = await start(settings, nats_url)
        try:
            await leader.joined("w1")
            inventory = first.agents[0].inventory
            assert isinstance(inventory, SimulatedInventory)
            inventory.keep_memory(1, 5000)
            await leader.want("w1", place(ended, body("true"), (0, 1)))
            await leader.await_report("w1", "quarantined", ended)
            await leader.want("w1", place(runs, body("exec sleep 600"), (0,)))
            await leader.await_report("w1", "started", runs)
        finally:
            await first.stop()
        second = await start(settings, nats_url)  # its simulated GPUs keep no memory
        try:
            await leader.await_report("w1", "freed", ended)
            await leader.want("w1", place(name_of("c", fence=12), body("true"), (0,)))
            assert (await leader.await_report("w1", "refused", name_of("c", fence=12))).detail == "leased 0"
            assert set(leader.seat("w1").kinds(runs)) == {"claimed", "started"}
        finally:
            await second.stop()


@pytest.mark.slow
async def test_after_a_reboot_what_ran_is_told_lost_with_the_join(nats_url: str, unique: str, tmp_path: Path) -> None:
    """A reboot ends every process; the journal names another boot, which is proof enough."""
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        name, path = name_of(), tmp_path / "pid"
        running = await start(settings_of(state, unique), nats_url)
        await leader.joined("w1")
        await leader.want("w1", place(name, body(f"echo $$ > {path}; exec sleep 600")))
        await leader.await_report("w1", "started", name)
        pid, boot = await pid_of(path), leader.seat("w1").joins[-1].boot
        supervised = await Supervised.connect(state / SUPERVISOR_FOLDER, spawn_if_absent=False)
        await running.stop()
        supervised.kill()
        await until(lambda: not is_alive(pid), what="everything gone, as after a reboot")
        journal = state / SUPERVISOR_FOLDER / JOURNAL_NAME
        left = read_journal(journal)
        for entry in left.values():
            assert entry.starting is not None
            entry.starting = msgspec.structs.replace(entry.starting, boot_id="of-before", cgroup="")
        open_journal(journal, records_of(left)).close()
        again = await start(settings_of(state, unique), nats_url)
        try:
            seat = await leader.joined("w1", joins=2)
            assert seat.joins[-1].boot != boot
            exited = await leader.await_report("w1", "exited", name)
            assert (exited.code, exited.detail) == (-9, "lost")
            await leader.await_report("w1", "freed", name)
            await leader.want("w1", place(name_of("b", fence=11), body("true")))
            await leader.await_report("w1", "freed", name_of("b", fence=11))
        finally:
            await again.stop()


@pytest.mark.slow
async def test_a_worker_that_is_stopped_says_goodbye_only_where_nothing_of_it_goes_on(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        idle = await start(settings_of(state, unique), nats_url)
        await leader.joined("w1")
        await idle.stop()
        seat = leader.seat("w1")
        await until(lambda: seat.said_goodbye, what="a goodbye of who holds nothing")
        seat.said_goodbye = False
        again = await start(settings_of(state, unique), nats_url)
        await leader.joined("w1", 2)
        name, path = name_of(), tmp_path / "pid"
        await leader.want("w1", place(name, body(f"echo $$ > {path}; exec sleep 600")))
        await leader.await_report("w1", "started", name)
        pid = await pid_of(path)
        await again.stop()
        last = await until(lambda: seat.renewals[-1].down and seat.renewals[-1], what="word that it starts nothing")
        assert [(each.driver, each.why.partition(":")[0]) for each in last.down] == [("process", "agent-stopped")]
        assert [name_in(each) for each in last.held] == [name]
        third = await start(settings_of(state, unique), nats_url)
        try:
            await leader.joined("w1", 3)  # behind whatever the one before had to say
            assert not seat.said_goodbye
            await until(lambda: not seat.renewals[-1].down, what="word of the next agent that it starts jobs")
            assert is_alive(pid)
            assert "exited" not in seat.kinds(name)
        finally:
            await third.stop()


@contextlib.asynccontextmanager
async def leaving(
    url: str, prefix: str, state: Path, log: Path, leave: str
) -> AsyncIterator[asyncio.subprocess.Process | forks.Service]:
    """The command of a worker with --leave."""
    words = ["worker", "--nats", url, "--prefix", prefix, "--id", "w1", "--simulate", "1x4xH100"]
    words += ["--drivers", "process", "--state", str(state), "--leave", leave]
    with log.open("wb") as out:
        process = await forks.python("-m", "moorage.cli", *words, env=environment(), out=out)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


#: says in the file whose path follows that it was asked to end, and goes on
STAYS: Final = "trap 'echo asked > {}' TERM; while :; do sleep 0.05; done"


@pytest.mark.slow
async def test_a_worker_that_leaves_for_good_ends_all_soon_after_the_second_signal(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    path = tmp_path / "asked"
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        async with leaving(nats_url, unique, state, tmp_path / "log", "1h") as process:
            seat = await leader.joined("w1")
            name = name_of()
            await leader.want("w1", place(name, body(STAYS.format(path), run={"grace_s": 600.0}), (0,)))
            await leader.await_report("w1", "started", name)
            process.terminate()
            await until(lambda: seat.renewals[-1].leaving_s is not None, what="a renewal that says so")
            assert "exited" not in seat.kinds(name)
            process.terminate()
            assert await process.wait() == 0, (tmp_path / "log").read_text()
        assert path.read_text() == "asked\n", "it had a short grace"
        told = (tmp_path / "log").read_text()
        assert "w1 leaves for good within 3600 s: it holds 1 attempt" in told
        assert "told to end again: all that is left ends within 2 s" in told
        exited = await leader.await_report("w1", "exited", name)
        assert exited.detail == "fence", "no leader has asked for it, so it is a loss, not its own failure"
        assert seat.kinds(name)[-2:] == ["exited", "freed"]
        assert seat.said_goodbye


@pytest.mark.slow
async def test_a_worker_that_leaves_for_good_waits_for_the_grace_of_what_it_ends(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "asked"
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        async with leaving(nats_url, unique, state, tmp_path / "log", "1s") as process:
            seat = await leader.joined("w1")
            name = name_of()
            await leader.want("w1", place(name, body(STAYS.format(path), run={"grace_s": 8.0}), (0,)))
            await leader.await_report("w1", "started", name)
            process.terminate()
            assert await process.wait() == 0, (tmp_path / "log").read_text()
        assert path.read_text() == "asked\n"
        assert (await leader.await_report("w1", "exited", name)).code == -9, "at the end of its grace"
        assert seat.said_goodbye
    with systemd:
        said = iter(lambda: systemd.recv(200).decode(), "STOPPING=1")
        extended = [words for words in said if words.startswith("STOPPING=1\nEXTEND_TIMEOUT_USEC=")]
    assert len(extended) == 1
    assert int(extended[0].rpartition("=")[2]) >= 9_000_000, "its second, and the grace of the job"


@pytest.mark.slow
@pytest.mark.parametrize("server", ["answers", "is away"])
async def test_a_worker_that_is_told_to_leave_for_good_as_it_starts_ends_the_jobs_of_the_one_before(
    nats_url: str, unique: str, tmp_path: Path, server: str
) -> None:
    name, path = name_of(), tmp_path / "asked"
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        async with agent_process(state, nats_url, unique):
            await leader.joined("w1")
            await leader.want("w1", place(name, body(STAYS.format(path), run={"grace_s": 2.0})))
            await leader.await_report("w1", "started", name)
        stop = asyncio.Event()
        stop.set()
        if server == "answers":
            await run(settings_of(state, unique, leave=1.0), nats_url, stop)
        else:
            with socket.create_server(("127.0.0.1", 0)) as silent:
                url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
                await run(settings_of(state, unique, leave=1.0), url, stop)
            again = await start(settings_of(state, unique), nats_url)
            await leader.joined("w1", joins=2)
            await again.stop()
        assert path.read_text() == "asked\n", "it had its grace"
        exited = await leader.await_report("w1", "exited", name)
        assert (exited.code, exited.detail) == (-9, "fence")


async def test_a_dead_supervisor_is_replaced_and_its_jobs_are_lost(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        name, path = name_of(), tmp_path / "pid"
        await leader.want("w1", place(name, body(f"echo $$ > {path}; exec sleep 600")))
        await leader.await_report("w1", "started", name)
        pid, boot = await pid_of(path), agent.boot
        supervised = await Supervised.connect(agent.settings.state_dir / SUPERVISOR_FOLDER, spawn_if_absent=False)
        supervised.kill()
        exited = await leader.await_report("w1", "exited", name)
        assert (exited.code, exited.detail) == (-9, "lost")
        assert not is_alive(pid)
        seat = await leader.joined("w1", joins=2)
        assert seat.joins[1].boot == agent.boot != boot
        await leader.want("w1", place(name_of("b", fence=11), body("true")))
        await leader.await_report("w1", "freed", name_of("b", fence=11))


@pytest.mark.slow
async def test_an_agent_that_was_killed_adopts_what_lives_and_tells_what_ended(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    lives, ends, held = name_of("lives"), name_of("ends"), name_of("held")
    go = tmp_path / "go"
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        async with agent_process(state, nats_url, unique) as agent:
            await leader.joined("w1")
            await leader.want(
                "w1",
                place(lives, body(f"echo $$ > {tmp_path}/pid; while [ ! -e {go} ]; do sleep 0.02; done"), (0,)),
                place(ends, body("sleep 0.3; exit 5"), (1,)),
                place(held, body("true", replicas=2), (2,), hold=True),
            )
            for name in (lives, ends):
                await leader.await_report("w1", "started", name)
            await leader.await_report("w1", "claimed", held)
            pid = await pid_of(tmp_path / "pid")
            agent.kill()
            await agent.wait()
        assert is_alive(pid)
        async with agent_process(state, nats_url, unique):
            seat = await leader.joined("w1", joins=2)
            assert {h.job: h.phase for h in seat.joins[1].holding}["lives"] == "running"
            assert {h.job: h.phase for h in seat.joins[1].holding}["held"] == "claimed"
            assert (await leader.await_report("w1", "exited", ends)).code == 5
            await leader.await_report("w1", "freed", ends)
            await leader.want("w1", place(name_of("b", fence=11), body("true"), (0,)))
            assert (await leader.await_report("w1", "refused", name_of("b", fence=11))).detail == "leased 0"
            go.touch()
            assert (await leader.await_report("w1", "exited", lives)).code == 0
            await leader.await_report("w1", "freed", lives)
            await leader.want("w1", Start(*held, "127.0.0.1", 29500, 2))
            await leader.await_report("w1", "freed", held)
            kinds = seat.kinds(
                lives
            )  # an adopted attempt's first reports are sent again: they may have died unjournalled
            assert kinds[:2] == ["claimed", "started"]
            assert set(kinds[2:-2]) == {"claimed", "started"}
            assert kinds[-2:] == ["exited", "freed"]


async def test_a_request_is_written_down_once(nats_url: str, unique: str, tmp_path: Path) -> None:
    """By the agent: its supervisor keeps no copy, neither where the job runs nor where it has ended."""
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        word = f"word-{unique}"
        for job, script in (("runs", f"echo $$ > {tmp_path}/pid; : {word}; exec sleep 600"), ("ends", f": {word}")):
            name = name_of(job, fence=10 + len(job))
            await leader.want("w1", place(name, body(script), ()))
        await leader.await_report("w1", "freed", name)
        await pid_of(tmp_path / "pid")
        files = [each for each in agent.settings.state_dir.rglob("*") if each.is_file()]
        assert [each.name for each in files if word.encode() in each.read_bytes()] == ["w1.journal"]


@pytest.mark.slow
async def test_what_runs_unknown_to_a_lost_journal_is_ended_before_the_join(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        async with agent_process(state, nats_url, unique) as agent:
            await leader.joined("w1")
            await leader.want("w1", place(name_of(), body(f"echo $$ > {tmp_path}/pid; exec sleep 600")))
            pid = await pid_of(tmp_path / "pid")
            agent.kill()
            await agent.wait()
        (state / "workers" / "w1.journal").unlink()
        seat = leader.seat("w1")
        alive_at_join: list[bool] = []
        seat.joins.clear()
        leader.on_join = lambda join: alive_at_join.append(is_alive(pid))
        async with agent_process(state, nats_url, unique):
            await leader.joined("w1")
            assert alive_at_join == [False]
            assert seat.joins[0].holding == []


@pytest.mark.slow
async def test_a_stopped_agent_cannot_keep_its_jobs_beyond_the_lease(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with (
        ScriptedLeader(nats_url, unique, lease_s=4.0, grace_s=0.5) as leader,
        state_folder() as state,
        agent_process(state, nats_url, unique) as agent,
    ):
        await leader.joined("w1")
        kill, keep = name_of("kill"), name_of("keep")
        await leader.want(
            "w1",
            place(kill, body(f"echo $$ > {tmp_path}/kill; exec sleep 600"), (0,)),
            place(keep, body(f"echo $$ > {tmp_path}/keep; exec sleep 600", on_partition="keep"), (1,)),
        )
        killed, kept = await pid_of(tmp_path / "kill"), await pid_of(tmp_path / "keep")
        await leader.await_report("w1", "started", keep)
        agent.send_signal(signal.SIGSTOP)
        await until(lambda: not is_alive(killed), what="the job ended while its agent was stopped")
        assert is_alive(kept)
        agent.send_signal(signal.SIGCONT)
        seat = await leader.joined("w1", joins=2)
        assert (await leader.await_report("w1", "exited", kill)).detail == "fence"
        assert [(h.job, h.phase) for h in seat.joins[-1].holding if h.job == "keep"] == [("keep", "running")]
        await leader.want("w1", End(*keep, "cancelled", 0))
        await leader.await_report("w1", "freed", keep)
