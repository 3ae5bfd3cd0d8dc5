"""Ends of MPS clients are announced to their daemon, which is played: else its other clients fail."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moorage.bus.lend.client import AskedBack
from moorage.calls.program import Program
from moorage.cli.jobs.lease import _end_once_asked
from moorage.cli.local.mps_ends import announce_end
from moorage.system.proctree import boottime_s
from moorage.worker.sharing.mps.control import MpsControl, daemon_of
from moorage.worker.supervisor.command_client import RunningCommand
from moorage.worker.supervisor.commands import Execute
from moorage.worker.supervisor.protocol import EndAttempt, MpsDaemon, StartAttempt
from tests.nvidia.mps import CLIENT, Played
from tests.system.services.members import member
from tests.system.worker.supervisor_rig import Rig, lives, poll, rig_at, sh

HANDLER = "import signal; signal.signal(signal.SIGTERM, lambda *_: signal.pause())"
PATIENT = ("--notice", "60")  # the played program is slow on a busy machine
#: its main process ends once the client is there, which it leaves
LEAVES = '"$@" & for last; do :; done; while ! [ -e "$last" ]; do sleep 0.01; done'


class Scene:
    """A supervisor, a played daemon, and a client of it that is no attempt: the neighbour."""

    def __init__(self, rig: Rig, played: Played, control: MpsControl, folder: Path) -> None:
        self.rig = rig
        self.played = played
        self.control = control
        self.folder = folder

    @property
    def failed(self) -> list[str]:
        """The clients that have failed by the end of another one."""
        return self.played.lines("failed")

    @property
    def terminated(self) -> list[str]:
        """The clients whose ends were announced."""
        return [line.split()[2] for line in self.played.lines("commands") if line.startswith("terminate_client")]

    async def begin(self, key: str, before: str = "", script: str = 'exec "$@"', **more: Any) -> int:
        """Start an attempt whose kernel runs; return its pid once it does."""
        file = self.folder / key
        argv = (sys.executable, "-IS", "-c", f"{before}\n{CLIENT}", str(file))
        await self.rig.client.start([self.attempt(key, script, *argv, **more)])
        await poll(file.exists)
        return (await self.rig.started(key)).pid

    def attempt(self, key: str, script: str, *argv: str, **more: Any) -> StartAttempt:
        """Return an attempt that runs this script, with these arguments, where clients find the daemon."""
        attempt = sh(key, script)
        env = {**attempt.env, **self.control.environment, "KERNEL": "1"}
        fields: dict[str, Any] = {"mps": daemon_of(self.control.environment), "grace_s": 120.0, **more}
        return StartAttempt(key=key, argv=(*attempt.argv, "sh", *argv), env=env, **fields)

    async def run(self, key: str, before: str) -> RunningCommand:
        """Run a command in an attempt whose kernel runs; return it once it does."""
        file, nothing = self.folder / f"{key}.command", os.open(os.devnull, os.O_RDWR)
        argv = (sys.executable, "-IS", "-c", f"{before}\n{CLIENT}", str(file))
        command = await RunningCommand.begin(self.rig.state, Execute(key=key, argv=argv), [nothing] * 3)
        os.close(nothing)
        await poll(file.exists)
        return command

    async def end(self, key: str, grace_s: float) -> None:
        await self.rig.client.end([EndAttempt(key=key, grace_s=grace_s)])


@asynccontextmanager
async def scene(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> AsyncIterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="mps-") as name:
        folder = Path(name)
        played = Played(folder / "bin")
        monkeypatch.setenv("PATH", f"{played.folder}:{os.environ['PATH']}")
        control = MpsControl(str(played.program), folder / "pipe", folder / "log")
        control.pipe.mkdir()
        control.log.mkdir()
        words = [str(played.program), "-f"]
        daemon = await asyncio.create_subprocess_exec(*words, env={**os.environ, **control.environment})
        await poll((control.pipe / "nvidia-cuda-mps-control.pid").exists)
        words = [sys.executable, "-IS", "-c", CLIENT, str(folder / "neighbour")]
        neighbour = await asyncio.create_subprocess_exec(*words, env=control.environment)
        await poll((folder / "neighbour").exists)
        try:
            async with rig_at(folder / "state", *arguments) as rig:
                yield Scene(rig, played, control, folder)
        finally:
            neighbour.kill()
            await neighbour.wait()
            played.feel("")
            await control.quit(1)
            await daemon.wait()


async def test_a_neighbour_of_a_client_that_is_killed_without_a_word_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the daemon plays, so that the other tests can fail."""
    async with scene(monkeypatch, *PATIENT) as one:
        await one.begin("untold", mps=None)
        await one.end("untold", 60.0)
        assert (await one.rig.ended("untold")).signal == 15
        await poll(lambda: len(one.failed) == 1)


@pytest.mark.parametrize("how", ["cancel", "kill", "handler", "guard", "timeout", "fence", "left"])
async def test_each_end_is_announced_first(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async with scene(monkeypatch, *PATIENT) as one:
        before = HANDLER if how in ("handler", "guard") else ""
        times: dict[str, dict[str, Any]] = {"timeout": {"timeout_s": 3.0}, "left": {"script": LEAVES}}
        await one.begin(how, before, **times.get(how, {}))
        if how == "fence":
            await one.rig.client.fence(boottime_s(), 60.0)
        elif how not in ("timeout", "left"):
            await one.end(how, {"cancel": 120.0, "guard": 0.5}.get(how, 0.0))
        ended = await one.rig.ended(how)
        assert (one.failed, ended.mps_not_asked, len(one.terminated)) == ([], "", 1)
        assert how != "cancel" or ended.signal == 15, "it was asked, and not only killed"


@pytest.mark.parametrize("how", ["caller", "job", "asked job"])
async def test_the_end_of_a_command_is_announced_first(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """It ends with its caller, and with its job, whether that ends by itself or is asked to."""
    async with scene(monkeypatch, *PATIENT) as one:
        await one.rig.client.start([one.attempt("job", "trap 'exit 3' TERM; while :; do sleep 0.01; done")])
        main = (await one.rig.started("job")).pid
        command = await one.run("job", before=HANDLER)
        if how == "caller":
            command.close()
            await poll(lambda: not lives(command.pid))
            assert lives(main)
        elif how == "job":
            os.kill(main, signal.SIGKILL)
            await one.rig.ended("job")
        else:
            await one.end("job", 120.0)
            assert (await one.rig.ended("job")).exit_code == 3
        assert not lives(command.pid)
        command.close()
        assert (one.failed, one.terminated) == ([], [str(command.pid)])


@pytest.mark.parametrize("before", ["", HANDLER], ids=["SIGTERM", "SIGKILL"])
async def test_the_end_of_a_program_whose_lease_is_asked_back_is_announced_first(
    monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    monkeypatch.setattr("moorage.worker.supervisor.mps_notice.NOTICE_S", 60.0)
    async with scene(monkeypatch, *PATIENT) as one:
        file, env = one.folder / "lent", one.control.environment
        argv = (sys.executable, "-IS", "-c", f"{before}\n{CLIENT}", str(file))
        process = await asyncio.create_subprocess_exec(*argv, env={**env, "KERNEL": "1"})
        await poll(file.exists)
        held: Any = SimpleNamespace(mode="mps", environment=env, lost=False)
        asked = AskedBack("the worker is drained", boottime_s() + (120.0 if not before else 0.0))
        held.wait_asked_back = lambda: asyncio.sleep(0, asked)
        ending = asyncio.create_task(_end_once_asked(process, held, 0.0))
        assert await process.wait() == -(signal.SIGKILL if before else signal.SIGTERM)
        ending.cancel()
        assert (one.failed, {*one.terminated}) == ([], {str(process.pid)})


#: a program of `moorage serve` that does not end when it is told to, or breaks the protocol
SERVED = """
import os, socket, sys, threading, time
link = socket.socket(fileno=int(os.environ["MOORAGE_CALL_FD"]))
def say():
    while not os.path.exists(sys.argv[1]): time.sleep(0.01)
    link.sendall(%r)
threading.Thread(target=say, daemon=True).start()
"""


@pytest.mark.parametrize("said", [b'{"ready": 1}\n', b"nonsense\n"], ids=["overdue", "nonsense"])
async def test_the_end_of_a_served_program_is_announced_before_its_sigkill(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr("moorage.worker.supervisor.mps_notice.NOTICE_S", 60.0)
    async with scene(monkeypatch, *PATIENT) as one:
        env = one.control.environment
        told = asyncio.Event()
        program = Program(lambda *_: told.set(), lambda _: told.set(), lambda pid, _: announce_end(pid, env, 60.0))
        argv = (sys.executable, "-IS", "-c", SERVED % said + CLIENT, str(one.folder / "served"))
        await program.start(argv, 1, {**env, "KERNEL": "1"})
        await told.wait()
        assert await program.finish(0.0 if b"ready" in said else 600.0) == -signal.SIGKILL
        assert (one.failed, {*one.terminated}) == ([], {str(program.pid)})


async def test_moorage_serve_announces_the_end_of_its_program(
    monkeypatch: pytest.MonkeyPatch, nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with scene(monkeypatch, *PATIENT) as one:
        env = {**one.control.environment, "KERNEL": "1"}
        argv = (sys.executable, "-IS", "-c", SERVED % b'{"ready": 1}\n' + CLIENT, str(one.folder / "served"))
        async with member(nats_url, tmp_path, "--name", "x", "--", *argv, prefix=unique, env=env) as serving:
            await serving.ready()
            pid = str(serving.program())
            serving.process.terminate()
            assert await serving.ended() == 0
        # its daemon has a second, which the played one may need more of on a busy machine
        assert pid in one.terminated or "mps-not-asked: no answer within 1 s" in serving.said


#: handles SIGTERM, and lets its client finish: a program of `moorage serve`, or one that ignores the signal
LAUNCHERS = {
    "served": "start_new_session=True, env={**os.environ, 'MOORAGE_CALL_FD': '3'}",
    "ignored": "preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)",
}
LAUNCHER = (
    "import os, signal, subprocess, sys; signal.signal(signal.SIGTERM, lambda *_: {asked});"
    " client = subprocess.Popen(sys.argv[1:], {how}); client.wait()"
)


@pytest.mark.parametrize("grace_s", [120.0, 60.0], ids=["longer than a notice", "no longer"])
@pytest.mark.parametrize("how", LAUNCHERS)
async def test_what_no_sigterm_ends_computes_until_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, how: str, grace_s: float
) -> None:
    async with scene(monkeypatch, *PATIENT) as one:
        launcher = LAUNCHER.format(how=LAUNCHERS[how], asked="open(sys.argv[-1] + '.asked', 'w')")
        await one.begin("a", script=f'exec {sys.executable} -IS -c "{launcher}" "$@"')
        await one.end("a", grace_s)
        await poll((one.folder / "a.asked").exists)
        assert one.terminated == []
        await one.end("a", 0.0)
        await one.rig.ended("a")
        assert len(one.terminated) == 1
        assert one.failed == []


@pytest.mark.parametrize(
    ("how", "asked", "code"),
    [
        ("start_new_session=True", "client.terminate()", 0),
        ("start_new_session=True", "os._exit(4)", 4),
        (LAUNCHERS["served"], "os._exit(4)", 4),
    ],
    ids=["passes it on", "leaves it", "leaves what is served"],
)
async def test_what_its_launcher_ends_or_leaves_gets_sigterm_once_that_is_announced(
    monkeypatch: pytest.MonkeyPatch, how: str, asked: str, code: int
) -> None:
    async with scene(monkeypatch, *PATIENT) as one:
        launcher = LAUNCHER.format(how=how, asked=asked)
        await one.begin("a", script=f'exec {sys.executable} -IS -c "{launcher}" "$@"')
        await one.end("a", 120.0)
        ended = await one.rig.ended("a")
        assert (ended.exit_code, len({*one.terminated}), one.failed, ended.mps_not_asked) == (code, 1, [], "")


@pytest.mark.parametrize("is_ending", [False, True])
async def test_a_short_end_by_the_fence_is_announced_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, is_ending: bool
) -> None:
    async with scene(monkeypatch, "--notice", "3600") as one:
        pid = await one.begin("job", HANDLER if is_ending else "", grace_s=0.0)
        if is_ending:
            await one.end("job", 9000.0)
        await one.rig.client.fence(boottime_s() + 3000.0, 0.0)
        await poll(lambda: one.terminated == [str(pid)])
        assert "job" not in one.rig.ends()
        await one.rig.client.fence(boottime_s(), 0.0)
        assert ((await one.rig.ended("job")).signal, one.failed, len(one.terminated)) == (9, [], 1)


@pytest.mark.parametrize(
    ("mood", "said"), [("wedged", "no answer within 1 s"), ("refuses", "terminate_client: Insufficient privileges")]
)
async def test_a_daemon_that_does_not_do_it_holds_no_end_up(
    monkeypatch: pytest.MonkeyPatch, mood: str, said: str
) -> None:
    async with scene(monkeypatch, *(() if mood == "wedged" else PATIENT)) as one:
        await one.begin("job")
        one.played.feel(mood)
        await one.end("job", 60.0)
        ended = await one.rig.ended("job")
        assert (ended.signal, ended.mps_not_asked) == (15, said)


async def test_without_the_program_an_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(monkeypatch, *PATIENT) as one:
        await one.begin("job", mps=MpsDaemon(program="", pipe="/p", log="/l"))
        await one.end("job", 60.0)
        assert "is not on the worker's PATH" in (await one.rig.ended("job")).mps_not_asked
