"""Hold the checks; the package's docstring says how to use them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from moorage.bus.embedded import EmbeddedServer
from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import NOT_HERE, RESULT, START_FAILED
from moorage.schemas.settings import NO_FILE, read_file
from moorage.system.loops import loop_factory
from moorage.system.proctree import read_process
from moorage.testing.conformance.bench import OF_THE_AGENT, SECRET, SECRET_NAME, AgentProcess, Bench, open_bench
from moorage.testing.conformance.leader import until
from moorage.worker.agent.run import start
from moorage.worker.settings import WorkerSettings

Job = dict[str, Any]
Check = Callable[[Bench], Coroutine[Any, Any, None]]

#: pytest collects names with this prefix; `dashes` names a check without it
PREFIX: Final = "test_"
#: how many seconds a job that ignores the request to end may run on
GRACE_S: Final = 0.5
#: how often a job is placed and asked to end at once: now and then the two frames do not come together
AT_ONCE: Final = 5
#: a check and all that it starts may take this many times the slack, so that a driver that never closes cannot hang
#: pytest
CHECK_TIMES: Final = 5
#: why a job ended that ended by itself: a driver that returns values may say that there is none
WELL: Final = ("exit", f"{RESULT}0")
WORDS: Final = "words-of-the-check"
#: the signal of a notice, and of a checkpoint
NOTICE_SIGNAL: Final = "SIGUSR1"
#: a worker's lease where its agent is killed, in seconds: long enough for a busy machine to renew it
LEASE_S: Final = 10.0
FENCE_GRACE_S: Final = 1.0
RENEW_S: Final = 0.2
LEFT_OPEN: Final = "the driver left a pipe, a socket, a process or a thread open in its event loop"
#: the memory limit of a job, and how much it tries to use
MEMORY_MIB: Final = 64
MEMORY_TAKEN_MIB: Final = 512


class DriverChecks:
    """The checks of one driver. Derive a class from it in a file that pytest collects."""

    #: the driver, as the worker's setting `drivers` names it
    driver: ClassVar[str] = ""
    #: text of the worker's settings file, if the driver needs one: `[driver.mine]` and so on
    settings: ClassVar[str] = ""
    #: how many seconds a start or an end may take on a busy machine
    slack_s: ClassVar[float] = 20.0
    #: how many jobs `end_during_open` has, one for each place where the driver's `open` waits
    open_jobs: ClassVar[int] = 12
    #: checks that do not apply: the name without `test_`, and the reason
    dashes: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **words: Any) -> None:
        super().__init_subclass__(**words)
        for name, why in cls.dashes.items():
            if name not in CHECKS or not why.strip():
                raise TypeError(
                    f"dashes of {cls.__name__} must name checks, each with a reason: {name!r} is not one of {CHECKS}"
                )
            setattr(cls, PREFIX + name, None)  # pytest skips what it cannot call

    # ---------------------------------------------------------------------- what a job of the driver looks like

    def exits(self, code: int) -> Job:
        """Return a job that soon ends by itself with this code."""
        raise self._undefined("exits")

    def hangs(self) -> Job:
        """Return a job that runs until it is asked to end, and then ends."""
        raise self._undefined("hangs")

    def ignores_the_end(self) -> Job:
        """Return a job that writes a line to its standard output once it is ready to ignore the request to end, and
        then runs on when it is asked to end.
        """
        raise self._undefined("ignores_the_end")

    def prints(self, text: str) -> Job:
        """Return a job that writes this text to its standard output, and ends with code 0."""
        raise self._undefined("prints")

    def shows_environment(self) -> Job:
        """Return a job that writes its variables to its standard output as `env` does, and ends with code 0."""
        raise self._undefined("shows_environment")

    def shows_folder(self) -> Job:
        """Return a job that writes a file into its start folder, and then the folder's path to its standard output.

        If every job sees the same path for its own folder, the job writes the folder's inode number instead.
        """
        raise self._undefined("shows_folder")

    def has_children(self, path: Path) -> Job:
        """Return a job that leaves a process behind in its own session, writes that process's pid to `path`, and runs
        on.
        """
        raise self._undefined("has_children")

    def child(self, path: Path) -> int:
        """Return the pid, on this host, of the process that a job of `has_children` leaves behind; 0 if it is not known
        yet.
        """
        return int((path.exists() and path.read_text().strip()) or 0)

    def leaves_behind(self, path: Path) -> Job:
        """Return a job that leaves a process behind as `has_children` does, one without variables, and soon after ends
        by itself with code 0.
        """
        raise self._undefined("leaves_behind")

    def saves(self, text: str) -> Job:
        """Return a job that writes a line to its standard output once it is ready for SIGUSR1, runs until it gets that
        signal, and then writes this text to its standard output and ends with code 0.
        """
        raise self._undefined("saves")

    def takes_memory(self, mib: int) -> Job:
        """Return a job that uses this much memory, and then ends with code 0."""
        raise self._undefined("takes_memory")

    def command(self, variable: str, code: int) -> list[str]:
        """Return a command that is run in a job, where the driver can: it writes this variable of the job to its
        standard output and what it reads to its standard error, and ends with this code. By default a shell does that.
        """
        return ["/bin/sh", "-c", f'echo "${variable}"; cat >&2; exit {code}']

    def environment(self, output: str) -> dict[str, str]:
        """Return the variables that a job of `shows_environment` wrote."""
        return dict(line.split("=", 1) for line in output.splitlines() if "=" in line)

    @contextlib.asynccontextmanager
    async def serve(self, settings: WorkerSettings, url: str) -> AsyncIterator[None]:
        """Run a worker with these settings. Override it for a driver that the setting `drivers` cannot name."""
        file = NO_FILE
        if self.settings:
            settings.state_dir.mkdir(parents=True, exist_ok=True)
            path = settings.state_dir / "settings.toml"
            path.write_text(self.settings)
            file = read_file(path)
        running = await start(settings, url, file)
        try:
            yield
        finally:
            await running.stop()

    # ------------------------------------------------------------------------------------------------ the checks

    def test_start(self) -> None:
        """The worker reports claimed, started, exited and freed, in this order and once each; then its GPU runs the
        next job.
        """

        async def check(bench: Bench) -> None:
            for _ in range(2):
                name = bench.name()
                await self._place(bench, name, "exits", 0)
                exited = await bench.ended(name)
                assert (exited.code, exited.detail in WELL) == (0, True), exited.detail
                assert bench.seat.kinds(name) == ["claimed", "started", "exited", "freed"]

        self._run(check)

    def test_exit_code(self) -> None:
        """The exit code of a job is reported unchanged."""

        async def check(bench: Bench) -> None:
            name = bench.name()
            await self._place(bench, name, "exits", 3)
            exited = await bench.ended(name)
            assert (exited.code, exited.detail) == (3, "exit")

        self._run(check)

    def test_output(self) -> None:
        """The output of a job is published. If the driver's capabilities say so, it is kept, and its streams end."""

        async def check(bench: Bench) -> None:
            name = bench.name()
            await self._place(bench, name, "prints", WORDS)
            await bench.ended(name)
            await until(lambda: WORDS in bench.leader.text(name), self.slack_s, "the words on the job's log subject")
            if bench.can.ends_streams:
                for stream in ("out", "err"):
                    await until(lambda: bench.was_last(name, stream), self.slack_s, f"the last frame of {stream}")  # noqa: B023
            if bench.can.keeps_output:
                assert WORDS in await bench.kept(name, "out")
                assert WORDS not in await bench.kept(name, "err")

        self._run(check)

    def test_cancel(self) -> None:
        """A job that ends when it is asked to does not wait for its whole grace; asked twice, it ends once."""

        async def check(bench: Bench) -> None:
            name = bench.name()
            await self._place(bench, name, "hangs")
            await bench.await_report("started", name)
            await bench.end(name, 10 * self.slack_s)
            await bench.end(name, 5 * self.slack_s)
            exited = await bench.ended(name)  # within its slack
            assert exited.detail == "end"
            assert bench.seat.kinds(name) == ["claimed", "started", "exited", "freed"]

        self._run(check)

    def test_grace(self) -> None:
        """A job that ignores the request to end keeps its grace, then is ended by force, or its GPU is quarantined."""

        async def check(bench: Bench) -> None:
            name = bench.name()
            await self._place(bench, name, "ignores_the_end")
            await bench.await_report("started", name)
            await self._text(bench, name)  # it is ready
            asked_s = time.monotonic()
            await bench.end(name, GRACE_S)
            over = await until(
                lambda: bench.seat.report("exited", name) or bench.seat.report("quarantined", name),
                GRACE_S + self.slack_s,
                "the forced end of a job that ignores the polite one",
            )
            assert time.monotonic() - asked_s >= GRACE_S, "it was ended before its grace was over"
            if over.kind == "exited":
                assert over.detail == "end"
                await bench.await_report("freed", name)

        self._run(check)

    def test_timeout(self) -> None:
        """A job that runs longer than `run.timeout_s` is ended with the reason `timeout`."""

        async def check(bench: Bench) -> None:
            name = bench.name()
            await self._place(bench, name, "hangs", run={"timeout_s": 0.3, "grace_s": 5.0})
            assert (await bench.ended(name)).detail == "timeout"

        self._run(check)

    def test_children(self) -> None:
        """Check that all processes of a job are over when its end is reported, also one that left its process group."""

        async def check(bench: Bench) -> None:
            name, path = bench.name(), bench.folder / "child"
            await self._place(bench, name, "has_children", path)
            await bench.await_report("started", name)
            pid = await until(lambda: self.child(path), self.slack_s, "the process that a job leaves behind")
            assert is_alive(pid)
            await bench.end(name, GRACE_S)
            await bench.await_report("exited", name)
            assert not is_alive(pid), "the job's end was reported, but a process that the job had started still runs"

        self._run(check)

    def test_proof(self) -> None:
        """A job that ends by itself is reported once nothing that it has left runs, or its GPU is quarantined."""

        async def check(bench: Bench) -> None:
            name, path = bench.name(), bench.folder / "left"
            await self._place(bench, name, "leaves_behind", path)
            await bench.await_report("started", name)
            pid = await until(lambda: self.child(path), self.slack_s, "the process that a job leaves behind")
            over = await until(
                lambda: bench.seat.report("exited", name) or bench.seat.report("quarantined", name),
                self.slack_s,
                "the end of a job that ends by itself",
            )
            if over.kind == "exited":
                assert not is_alive(pid), "the job's end was reported, but a process that it has left behind still runs"
                assert (over.code, over.detail) == (0, "exit")
                await bench.await_report("freed", name)

        self._run(check)

    def test_notice(self) -> None:
        """A job that is to end with a notice gets its checkpoint signal first, and time to save its work."""

        async def check(bench: Bench) -> None:
            name = bench.name()
            await self._place(bench, name, "saves", WORDS, run={"checkpoint_signal": NOTICE_SIGNAL})
            await bench.await_report("started", name)
            await self._text(bench, name)  # it is ready
            await bench.end(name, GRACE_S, 5 * self.slack_s)
            exited = await bench.ended(name)  # within its slack, so that its end was seen once it had saved its work
            assert (exited.code, exited.detail) == (0, "end"), "it was not told to save its work, or not given the time"
            await until(lambda: WORDS in bench.leader.text(name), self.slack_s, "what it writes when it saves its work")

        self._run(check)

    def test_attempts_of(self) -> None:
        """The driver knows which processes of the host are whose, and takes no other process for an attempt's."""

        async def check(bench: Bench) -> None:
            name, path = bench.name(), bench.folder / "child"
            async with AgentProcess(type(self), bench.settings, bench.url, asks=True) as agent:
                await bench.joined()
                await self._place(bench, name, "has_children", path)
                await bench.await_report("started", name)
                pid = await until(lambda: self.child(path), self.slack_s, "the process that a job leaves behind")
                found = await agent.attempts_of([pid, os.getpid()], self.slack_s)
                assert found == {pid: name}, "of the job's process and this one it knows others"
                await bench.end(name, GRACE_S)
                await bench.ended(name)

        self._on_bench(check)

    def test_fence(self) -> None:
        """Nothing of a job runs once the lease of a dead agent is over, unless the driver says that it has no fence."""

        async def check(bench: Bench) -> None:
            name, path = bench.name(), bench.folder / "child"
            sees = "children" not in self.dashes
            bench.leader.numbers = (RENEW_S, LEASE_S, FENCE_GRACE_S)
            async with AgentProcess(type(self), bench.settings, bench.url) as agent:
                await bench.joined()
                if bench.can.fence == "none":
                    return
                await (self._place(bench, name, "has_children", path) if sees else self._place(bench, name, "hangs"))
                await bench.await_report("started", name)
                pid = await until(lambda: self.child(path), self.slack_s, "its process") if sees else 0
                await agent.kill()
            if sees:
                most_s = LEASE_S + FENCE_GRACE_S + self.slack_s
                await until(
                    lambda: not is_alive(pid), most_s, "the end of a job whose agent is dead, and its lease over"
                )
            else:
                await asyncio.sleep(LEASE_S + FENCE_GRACE_S)  # nothing tells the end of what cannot be seen
            await bench.restartable()
            async with self.serve(bench.settings, bench.url):
                await bench.joined(2)
                if any((each.job, each.fence) == (name[1], name[4]) for each in bench.seat.joins[-1].holding):
                    assert (await bench.ended(name)).detail == "fence"

        self._on_bench(check)

    def test_agent_killed(self) -> None:
        """A new agent takes over running attempts if the driver's capabilities say so; else none of them runs on.

        An attempt that was taken over runs on as the same attempt, and ends when it is asked to.
        """

        async def check(bench: Bench) -> None:
            name = bench.name()
            async with AgentProcess(type(self), bench.settings, bench.url) as agent:
                await bench.joined()
                await self._place(bench, name, "hangs")
                await bench.await_report("started", name)
                await agent.kill()
            await bench.restartable()
            async with self.serve(bench.settings, bench.url):
                await bench.joined(2)
                held = [each for each in bench.seat.joins[-1].holding if (each.job, each.fence) == (name[1], name[4])]
                if not bench.can.outlives_agent:
                    assert not held, "the driver does not outlive its agent, but the next agent has an attempt"
                    return
                assert [each.phase for each in held] == ["running"], "the new agent did not take the attempt over"
                assert "exited" not in bench.seat.kinds(name)
                await bench.end(name, GRACE_S)
                assert (await bench.ended(name)).detail == "end"

        self._on_bench(check)

    def test_end_during_open(self) -> None:
        """An attempt that ends while the next agent opens the driver is reported, at whichever step of `open`."""

        async def check(bench: Bench) -> None:
            names = [bench.name(f"job-{at}") for at in range(self.open_jobs)]
            async with AgentProcess(type(self), bench.settings, bench.url) as agent:
                await bench.joined()
                if bench.can.fence != "supervisor" or not bench.can.outlives_agent:
                    return  # the check knows no other way to end an attempt past the agent
                for name in names:
                    await self._place(bench, name, "hangs", slots=())
                for name in names:
                    await bench.await_report("started", name)
                await agent.kill()
            await bench.restartable()
            steps = bench.folder / "steps"
            steps.mkdir()
            left, places = list(names), set[str]()
            async with AgentProcess(type(self), bench.settings, bench.url, steps):
                for step in itertools.count():
                    at, seat = steps / f"at-{step}", bench.seat
                    await until(lambda: at.exists() or len(seat.joins) > 1, self.slack_s, f"step {step} of open")  # noqa: B023
                    if not at.exists():
                        break
                    if left and (place := at.read_text()) not in places:
                        places.add(place)
                        await bench.end_by_supervisor(left.pop())
                    (steps / f"go-{step}").touch()
                await bench.joined(2)
                for name in left:
                    await bench.end(name, GRACE_S)
                for name in names:
                    await bench.ended(name)

        self._on_bench(check)

    def test_end_at_once(self) -> None:
        """A job that is asked to end in the turn in which it starts ends once, and its GPU runs the next job."""

        async def check(bench: Bench) -> None:
            for _ in range(AT_ONCE):
                name = bench.name()
                await self._place(bench, name, "hangs")  # neither waits: both frames are sent at once
                await bench.end(name, GRACE_S)
                assert (await bench.ended(name)).detail == "end"
                assert bench.seat.kinds(name).count("exited") == 1
            name = bench.name()
            await self._place(bench, name, "exits", 0)
            assert (await bench.ended(name)).detail in WELL

        self._run(check)

    def test_double_start(self) -> None:
        """A placement that is sent twice, and once more after the end, starts one attempt once."""

        async def check(bench: Bench) -> None:
            name, other = bench.name(), bench.name("other")
            for _ in range(2):
                await self._place(bench, name, "hangs")
            await bench.await_report("started", name)
            await self._place(bench, other, "hangs")  # on the GPU that the first one has
            await bench.await_report("refused", other)
            await bench.end(name, GRACE_S)
            await bench.ended(name)
            await self._place(bench, name, "hangs")
            behind = bench.name("behind")
            await self._place(bench, behind, "exits", 0)  # on the GPU that a second start would have
            assert (await bench.ended(behind)).detail in WELL
            assert bench.seat.kinds(name).count("started") == 1

        self._run(check)

    def test_environment(self) -> None:
        """A job gets its own variables, moorage's and those of its item, none of the agent's, none of other GPUs."""

        async def check(bench: Bench) -> None:
            claimed = {"SEED": "7", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "MOORAGE_FENCE": "1"}
            name, text = await self._printed(
                bench, "job-a", "shows_environment", run={"env": claimed, "items": [{"lr": 0.5}]}
            )
            found = self.environment(text)
            assert found.get("SEED") == "7"
            assert (found.get("MOORAGE_ITEM"), found.get("MOORAGE_ITEM_LR")) == ('{"lr":0.5}', "0.5")
            own = dict(zip(("TENANT", "JOB", "REPLICA", "ATTEMPT", "FENCE"), map(str, name), strict=True))
            assert {word: found.get(f"MOORAGE_{word}") for word in own} == own
            assert found.get("CUDA_VISIBLE_DEVICES") != claimed["CUDA_VISIBLE_DEVICES"]
            assert OF_THE_AGENT not in found, "a variable of the agent's own process reached the job"

        os.environ[OF_THE_AGENT] = "1"
        try:
            self._run(check)
        finally:
            del os.environ[OF_THE_AGENT]

    def test_devices(self) -> None:
        """A job sees the GPUs of its lease in the lease's order, and a job without GPUs sees none.

        CUDA is told their numbers: of the host, or from 0 where the job can open no other device; or their uuids.
        """

        async def check(bench: Bench) -> None:
            _, text = await self._printed(bench, "two", "shows_environment", slots=(3, 1))
            found = self.environment(text)
            uuids = ",".join(bench.seat.joins[-1].hello.gpu_pool[slot].uuid for slot in (3, 1))
            assert found.get("MOORAGE_GPU_UUIDS") == uuids
            assert found.get("CUDA_VISIBLE_DEVICES") in {"3,1", "0,1", uuids}
            assert found.get("NVIDIA_VISIBLE_DEVICES") == uuids
            _, text = await self._printed(bench, "none", "shows_environment", slots=())
            found = self.environment(text)
            assert found.get("CUDA_VISIBLE_DEVICES") == ""
            assert found.get("NVIDIA_VISIBLE_DEVICES") == "void"

        self._run(check)

    def test_limits(self) -> None:
        """A job cannot use more memory than `resources.memory_mib`."""

        async def check(bench: Bench) -> None:
            name = bench.name()
            limited: Job = {"resources": {"memory_mib": MEMORY_MIB}}
            await self._place(bench, name, "takes_memory", MEMORY_TAKEN_MIB, **limited)
            assert (await bench.ended(name)).code != 0

        self._run(check)

    def test_folder(self) -> None:
        """A job starts in a writable folder that no other attempt has."""

        async def check(bench: Bench) -> None:
            folders = {(await self._printed(bench, f"job-{at}", "shows_folder"))[1].strip() for at in range(2)}
            assert len(folders) == 2
            assert "/" not in folders

        self._run(check)

    def test_secrets(self) -> None:
        """A secret that a request names is a variable of the job, and appears in nothing that the agent reports."""

        async def check(bench: Bench) -> None:
            named = {"env": {"TOKEN": {"secret": SECRET_NAME}}}
            _, text = await self._printed(bench, "a", "shows_environment", run=named)
            assert self.environment(text).get("TOKEN") == SECRET
            seat = bench.seat
            assert SECRET not in repr((seat.reports, seat.joins, seat.hellos, seat.loads, seat.renewals))
            unknown = bench.name("unknown")
            await self._place(bench, unknown, "hangs", run={"env": {"TOKEN": {"secret": "no-such"}}}, slots=(1,))
            over = await until(
                lambda: seat.report("refused", unknown) or seat.report("exited", unknown),
                self.slack_s,
                "the missing secret",
            )
            assert over.detail.startswith(NOT_HERE if over.kind == "refused" else START_FAILED)
            assert "started" not in seat.kinds(unknown)

        self._run(check)

    def test_exec(self) -> None:
        """A command in a running job has the job's variables, and streams and a code of its own, if the driver's
        capabilities say so.
        """

        async def check(bench: Bench) -> None:
            if not bench.can.execs:
                return
            name = bench.name()
            await self._place(bench, name, "hangs", run={"env": {"SEED": "7"}})
            await bench.await_report("started", name)
            ran = await bench.run_command(name, self.command("SEED", 3), WORDS.encode())
            assert (ran.end.code, ran.out, ran.err) == (3, "7\n", WORDS), ran.end
            assert "exited" not in bench.seat.kinds(name), "the job ended with the command that was run in it"
            await bench.end(name, GRACE_S)
            assert (await bench.ended(name)).detail == "end"

        self._run(check)

    def test_terminal(self) -> None:
        """A job whose standard input is a terminal has one that a caller holds, and its output has what that shows, if
        the driver's capabilities say so.
        """

        async def check(bench: Bench) -> None:
            if not bench.can.holds_stdin:
                return
            name, typed = bench.name(), "seen by who types it"
            await self._place(bench, name, "hangs", run={"stdin": "stream"})
            await bench.await_report("started", name)
            holding = asyncio.create_task(bench.run_command(name, [], f"{typed}\n".encode()))
            try:
                shown = "what its terminal shows"
                await until(lambda: holding.done() or typed in bench.leader.text(name), self.slack_s, shown)
                assert not holding.done(), f"its terminal is not held: {holding.result().end}"
                await bench.end(name, GRACE_S)
                ran = await holding
            finally:
                holding.cancel()
            assert typed in ran.out
            assert ran.end.code is not None, ran.end
            assert (await bench.ended(name)).detail == "end"

        self._run(check)

    def test_gang(self) -> None:
        """A rank of a gang starts only after the leader's START, and gets the address where its gang meets."""

        async def check(bench: Bench) -> None:
            name = bench.name("gang", 1)
            gang: Job = {"replicas": 2, "gpu": {"scheduling": "gang"}}
            await self._place(bench, name, "shows_environment", **gang, hold=True)
            await bench.await_report("claimed", name)
            await bench.start_gang(name, "10.0.0.7", 29501, 2)
            await bench.ended(name)
            assert bench.seat.kinds(name) == ["claimed", "started", "exited", "freed"]
            # a rank that starts before the START has no address
            found = self.environment(await self._text(bench, name))
            wanted = {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "10.0.0.7",
                "MASTER_PORT": "29501",
            }
            assert {word: found.get(word) for word in wanted} == wanted

        self._run(check)

    # ---------------------------------------------------------------------------------------------------- inside

    _server: ClassVar[EmbeddedServer]
    _server_folder: ClassVar[tempfile.TemporaryDirectory[str]]

    @classmethod
    def setup_class(cls) -> None:
        """Start the nats-server of these checks."""
        cls._server_folder = tempfile.TemporaryDirectory(prefix="moorage-checks-nats-")
        cls._server = asyncio.run(EmbeddedServer.start(Path(cls._server_folder.name)))

    @classmethod
    def teardown_class(cls) -> None:
        """Stop the nats-server of these checks."""
        asyncio.run(cls._server.stop())
        cls._server_folder.cleanup()

    def _on_bench(self, check: Check) -> None:
        """Run a check on a bench without a running worker, in a loop of the kind that a worker uses."""

        most_s = CHECK_TIMES * self.slack_s

        async def whole() -> None:
            async with asyncio.timeout(most_s), open_bench(self._server.url, self.driver, self.slack_s) as bench:
                await check(bench)

        runner = asyncio.Runner(loop_factory=loop_factory())  # uvloop refuses what asyncio's own loop takes
        try:
            runner.run(whole())
        except TimeoutError:
            raise TimeoutError(f"the check, its worker and its driver were not over within {most_s:g} s") from None
        finally:
            self._close(runner)

    def _close(self, runner: asyncio.Runner) -> None:
        """Close a loop in a thread, since a driver may have left something in it that blocks for ever.

        That is a thread that reads a pipe whose other end is open, or a task that ignores its cancellation. Raises
        AssertionError if the loop is not closed within `slack_s` seconds, or is busy, and any other error of the close.
        """
        failed: list[BaseException] = []

        def close() -> None:
            try:
                runner.close()
            except BaseException as error:
                failed.append(error)

        closing = threading.Thread(target=close, name="closes the loop of a check", daemon=True)
        closing.start()
        closing.join(self.slack_s)
        error = failed[0] if failed else None
        if closing.is_alive() or (isinstance(error, OSError) and error.errno == errno.EBUSY):
            raise AssertionError(LEFT_OPEN) from error
        if error is not None:
            raise error

    def _run(self, check: Check) -> None:
        """Run a check on a bench whose worker has joined."""

        async def served(bench: Bench) -> None:
            async with self.serve(bench.settings, bench.url):
                await bench.joined()
                await check(bench)

        self._on_bench(served)

    async def _place(
        self,
        bench: Bench,
        name: AttemptName,
        kind: str,
        *words: Any,
        slots: tuple[int, ...] = (0,),
        hold: bool = False,
        **fields: Any,
    ) -> None:
        """Place the job that the method `kind` returns, with `fields` of the request over it."""
        job: Job = getattr(self, kind)(*words)
        run = {"grace_s": 5.0} | job.get("run", {}) | fields.pop("run", {}) | {"driver": bench.driver}
        await bench.place(name, job | fields | {"run": run}, slots, hold=hold)

    async def _printed(self, bench: Bench, job: str, kind: str, **fields: Any) -> tuple[AttemptName, str]:
        """Run a job to a successful end; return its name and what it wrote to its standard output."""
        name = bench.name(job)
        await self._place(bench, name, kind, **fields)
        exited = await bench.ended(name)
        assert exited.code == 0, f"{exited.detail} {exited.code}: {bench.leader.text(name, 'err')}"
        return name, await self._text(bench, name)

    async def _text(self, bench: Bench, name: AttemptName) -> str:
        return str(await until(lambda: bench.leader.text(name), self.slack_s, f"the output of {name}"))

    @classmethod
    def _undefined(cls, kind: str) -> TypeError:
        return TypeError(f"{cls.__name__} must define {kind}, or name the checks that need it in `dashes`")


def is_alive(pid: int) -> bool:
    """Return whether a process of this host runs; a zombie does not."""
    process = read_process(pid)
    return process is not None and not process.dead


#: the names of all checks, in their order above
CHECKS: Final = tuple(name.removeprefix(PREFIX) for name in vars(DriverChecks) if name.startswith(PREFIX))
