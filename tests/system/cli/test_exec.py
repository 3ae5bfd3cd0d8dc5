"""`moorage exec` and `moorage shell` as a user types them: pipes, a terminal, exit codes."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
from collections.abc import Iterator

import pytest

from tests.system.cli.node import COMMAND, Node, environment, start
from tests.waiting import until


@pytest.fixture
def job(node: Node, node_loop: asyncio.AbstractEventLoop, request: pytest.FixtureRequest) -> Iterator[str]:
    """A job that runs until the end of the test."""
    name = f"exec-{abs(hash(request.node.name)) % 10**8}"

    async def begin() -> None:
        ran = await node.run("submit", "--gpu", "--job", name, "--env", "COLOUR=green", "--", "sleep", "600")
        assert ran.code == 0, ran.err

        async def runs() -> bool:
            shown = await node.run("show", name, "--json")
            return bool(shown.frame["data"]["state"] == "RUNNING")

        await until(runs, 60.0, "the job runs")

    node_loop.run_until_complete(begin())
    yield name
    node_loop.run_until_complete(node.run("cancel", name))


def test_pipes_and_exit_code_are_the_commands_own(node: Node, node_loop: asyncio.AbstractEventLoop, job: str) -> None:
    async def work() -> None:
        ran = await node.run("exec", job, "--", "sh", "-c", "echo $COLOUR; echo bad >&2; cat; exit 7", stdin="words")
        assert (ran.code, ran.out, ran.err) == (7, "green\nwords", "bad\n")
        ran = await node.run("exec", f"{job}/0", "--", "sh", "-c", "kill -9 $$")
        assert ran.code == 128 + signal.SIGKILL
        for program, code, fix in (
            ("no-such-program", 127, "give its full path"),
            ("./not-there", 127, "name a program that is where the job runs"),
            ("/nonexistent", 127, "name a program that is where the job runs"),
            ("/etc/hostname", 126, "name a program that the job's user may run"),
        ):
            ran = await node.run("exec", job, "--", program)
            assert (ran.code, "error[failed-precondition]" in ran.err) == (code, True), program
            assert f"fix: {fix}" in ran.err
        ran = await node.run("exec", f"{job}/4", "--", "true")
        assert ran.code == 3
        assert "has no replica 4" in ran.err
        ran = await node.run("exec", f"{job}/x", "--", "true")
        assert "'x' is no replica" in ran.err
        ran = await node.run("exec", job)
        assert (ran.code, "argv must name a command, found none" in ran.err) == (2, True)
        shown = await node.run("show", job)
        assert "EXEC" in shown.out
        assert "echo $COLOUR" in shown.out

    node_loop.run_until_complete(work())


def test_a_shell_whose_commands_come_from_a_pipe_prints_what_they_print_alone(
    node: Node, node_loop: asyncio.AbstractEventLoop, job: str
) -> None:
    async def work() -> None:
        ran = await node.run("shell", job, stdin="echo $COLOUR\nexit 5\n")
        assert (ran.code, ran.out, ran.err) == (5, "green\n", "")

    node_loop.run_until_complete(work())


def test_ctrl_c_reaches_a_command_without_a_terminal(
    node: Node, node_loop: asyncio.AbstractEventLoop, job: str
) -> None:
    async def work() -> None:
        script = "trap 'exit 9' INT; echo; while :; do sleep 0.01; done"
        calling = await start("exec", job, "--", "sh", "-c", script, env=node.env())
        assert calling.stdout is not None
        await calling.stdout.readline()
        calling.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(calling.wait(), 60.0) == 9

    node_loop.run_until_complete(work())


def test_a_shell_has_a_terminal_of_the_same_size_and_acts_on_keys(
    node: Node, node_loop: asyncio.AbstractEventLoop, job: str
) -> None:
    async def work() -> None:
        ours, theirs = pty.openpty()
        os.set_blocking(ours, False)
        import fcntl
        import struct
        import termios

        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 97, 0, 0))
        calling = await asyncio.create_subprocess_exec(
            *COMMAND, "shell", job, stdin=theirs, stdout=theirs, stderr=theirs,
            env=environment(**node.env(), TERM="xterm"), start_new_session=True,
        )  # fmt: skip
        text = ""

        async def shows(wanted: str) -> None:
            nonlocal text

            def there() -> bool:
                nonlocal text
                try:
                    text += os.read(ours, 65536).decode(errors="replace")
                except BlockingIOError:
                    pass
                return wanted in text

            try:
                await until(there, 60.0, wanted)
            except BaseException:
                print(text)
                raise
            text = text.partition(wanted)[2]

        try:
            os.write(ours, b"stty size; echo $TERM $COLOUR\n")
            await shows("31 97")
            await shows("xterm green")
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 50, 0, 0))
            calling.send_signal(signal.SIGWINCH)
            os.write(ours, b"until stty size | grep -q '^20 50'; do sleep 0.05; done; echo re''sized\n")
            await shows("resized")
            os.write(ours, b"PS1='ready> '; sh -c \"echo be''gun; exec sleep 600\"\n")
            await shows("begun")
            os.write(ours, b"\x03")
            await shows("ready> ")  # what is typed before may go with what it interrupts
            os.write(ours, b"echo in''terrupted\n")
            await shows("interrupted")
            os.write(ours, b"exit 5\n")
            assert await asyncio.wait_for(calling.wait(), 60.0) == 5
            assert termios.tcgetattr(theirs)[3] & termios.ECHO, "the terminal is as it was"
        finally:
            if calling.returncode is None:
                calling.kill()
                await calling.wait()
            os.close(ours)
            os.close(theirs)

    node_loop.run_until_complete(work())
