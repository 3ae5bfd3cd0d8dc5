"""Commands in running attempts: their streams, their end, and that none outlives its caller, attempt or supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moorage.worker.supervisor.client import SupervisorGone, SupervisorRefused
from moorage.worker.supervisor.command_client import RunningCommand
from moorage.worker.supervisor.commands import Execute
from moorage.worker.supervisor.protocol import EndAttempt
from tests.system.worker.supervisor_rig import Rig, arguments_of, lives, poll, rig_at, sh

PROOFS = ["cgroup", "walk", "forked"]


class Ran:
    """A command with the outer ends of its pipes."""

    def __init__(self, command: RunningCommand, stdin: int, stdout: int) -> None:
        self.command = command
        self.stdin = stdin
        self.stdout = stdout

    async def line(self) -> str:
        """The next line of its output."""
        return await asyncio.to_thread(self._line)

    def _line(self) -> str:
        found = b""
        while not found.endswith(b"\n"):
            read = os.read(self.stdout, 1)
            assert read, f"the output ended after {found!r}"
            found += read
        return found.decode().rstrip()


@contextlib.asynccontextmanager
async def ran(rig: Rig, key: str, *argv: str) -> AsyncIterator[Ran]:
    inner_in, stdin = os.pipe()
    stdout, inner_out = os.pipe()
    try:
        asked = Execute(key=key, argv=argv)
        command = await RunningCommand.begin(rig.state, asked, (inner_in, inner_out, inner_out))
        os.close(inner_out)
        os.close(inner_in)
        inner_in = inner_out = -1
        yield Ran(command, stdin, stdout)
        command.close()
    finally:
        for each in (inner_in, inner_out, stdin, stdout):
            with contextlib.suppress(OSError):
                os.close(each)


@pytest.mark.parametrize("proof", PROOFS)
async def test_a_command_has_the_attempts_environment_folder_and_streams(proof: str, tmp_path: Path) -> None:
    async with rig_at(tmp_path, *arguments_of(proof)) as rig:
        attempt = sh("m", "exec sleep 600", cwd=str(tmp_path))
        attempt.env["COLOUR"] = "green"
        await rig.client.start([attempt])
        await rig.started("m")
        async with ran(rig, "m", "sh", "-c", 'echo $COLOUR $(pwd); read word; echo "got $word"; exit 7') as it:
            assert await it.line() == f"green {tmp_path}"
            os.write(it.stdin, b"this\n")
            assert await it.line() == "got this"
            assert await it.command.wait() == 7
        assert "m" not in rig.ends()


@pytest.mark.parametrize("proof", PROOFS)
async def test_a_command_ends_with_its_attempt_and_keeps_it_from_no_end(proof: str, tmp_path: Path) -> None:
    async with rig_at(tmp_path, *arguments_of(proof)) as rig:
        await rig.client.start([sh("m", "read x < /dev/zero || true; sleep 600 & wait", grace_s=600.0)])
        main = (await rig.started("m")).pid
        deaf = "trap '' TERM HUP; sleep 600 & echo $!; while :; do sleep 600; done"
        async with ran(rig, "m", "sh", "-c", deaf) as it:
            child = int(await it.line())
            os.kill(main, signal.SIGKILL)
            ended = await rig.ended("m")
            assert (ended.signal, ended.proof) == (signal.SIGKILL, "cgroup" if proof == "cgroup" else "walk")
            assert not lives(child)
            assert not lives(it.command.pid)
            assert await it.command.wait() == -signal.SIGKILL


@pytest.mark.parametrize("proof", PROOFS)
async def test_an_attempt_that_is_asked_to_end_does_not_wait_for_its_commands(proof: str, tmp_path: Path) -> None:
    async with rig_at(tmp_path, *arguments_of(proof)) as rig:
        await rig.client.start([sh("m", "trap 'exit 3' TERM; echo; while :; do sleep 0.01; done", grace_s=600.0)])
        await rig.line("m")
        async with ran(rig, "m", "sh", "-c", "trap '' TERM HUP; echo; while :; do sleep 600; done") as it:
            await it.line()
            await rig.client.end([EndAttempt(key="m", grace_s=600.0)])
            assert (await rig.ended("m")).exit_code == 3
            assert not lives(it.command.pid)


@pytest.mark.parametrize("proof", PROOFS)
async def test_a_connection_that_ends_kills_the_command_and_not_the_attempt(proof: str, tmp_path: Path) -> None:
    async with rig_at(tmp_path, *arguments_of(proof)) as rig:
        await rig.client.start([sh("m", "exec sleep 600")])
        main = (await rig.started("m")).pid
        script = "trap '' TERM HUP; (trap '' HUP; sleep 600 & echo $!); while :; do sleep 600; done"
        async with ran(rig, "m", "sh", "-c", script) as it:
            child, pid = int(await it.line()), it.command.pid
            it.command.close()
            await poll(lambda: not lives(pid) and not lives(child))
        assert lives(main)
        assert "m" not in rig.ends()


@pytest.mark.parametrize("proof", PROOFS)
async def test_a_supervisor_that_dies_takes_the_command_with_it(proof: str, tmp_path: Path) -> None:
    async with rig_at(tmp_path, *arguments_of(proof)) as rig:
        await rig.client.start([sh("m", "exec sleep 600")])
        await rig.started("m")
        async with ran(rig, "m", "sh", "-c", "echo; exec sleep 600") as it:
            await it.line()
            os.kill(rig.client.identity.pid, signal.SIGKILL)
            with pytest.raises(SupervisorGone):
                await it.command.wait()
            await poll(lambda: not lives(it.command.pid))
        await rig.client.wait_gone()
        await rig.connect()
        assert (await rig.client.list()).living == [] or (await rig.ended("m")).reason == "supervisor-died"


async def test_a_command_has_a_terminal_of_its_own(tmp_path: Path) -> None:
    async with rig_at(tmp_path) as rig:
        await rig.client.start([sh("m", "exec sleep 600")])
        await rig.started("m")
        outer, inner = pty.openpty()
        try:
            argv = ("sh", "-c", 'tty; sh -c \'echo "$TERM" > /dev/tty\'; read x; echo "got $x"')
            command = await RunningCommand.begin(rig.state, Execute(key="m", argv=argv, term="vt100"), (inner,) * 3)
            name = os.ttyname(inner)
            os.close(inner)
            it = Ran(command, outer, outer)
            assert await it.line() == name
            assert await it.line() == "vt100"
            os.write(outer, b"\x03")  # Ctrl-C reaches what runs in the terminal's foreground
            assert await command.wait() == -signal.SIGINT
            command.close()
        finally:
            os.close(outer)


async def test_a_signal_reaches_the_command(tmp_path: Path) -> None:
    async with rig_at(tmp_path) as rig:
        await rig.client.start([sh("m", "exec sleep 600")])
        await rig.started("m")
        async with ran(rig, "m", "sh", "-c", "trap 'exit 9' USR1; echo; while :; do sleep 0.01; done") as it:
            await it.line()
            it.command.signal(signal.SIGUSR1)
            assert await it.command.wait() == 9


async def test_what_cannot_run_is_refused_with_its_reason(tmp_path: Path) -> None:
    async with rig_at(tmp_path) as rig:
        with pytest.raises(SupervisorRefused, match="does not run here"):
            async with ran(rig, "nobody", "true"):
                pass
        await rig.client.start([sh("m", "exec sleep 600")])
        await rig.started("m")
        with pytest.raises(SupervisorRefused, match="no program nothing-of-this-name in PATH"):
            async with ran(rig, "m", "nothing-of-this-name"):
                pass
        with pytest.raises(SupervisorRefused, match="descriptors"):
            await RunningCommand.begin(rig.state, Execute(key="m", argv=("true",)))
