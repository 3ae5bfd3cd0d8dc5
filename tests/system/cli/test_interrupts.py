"""Ctrl-C, `kill` and a terminal that is closed: in order, told how to go on, no stack trace, nothing left behind."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from moorage.client import AsyncClient
from tests.system.cli.node import (
    COMMAND,
    Lines,
    Node,
    Ran,
    environment,
    on_a_terminal,
    processes_of,
    start,
    until_shown,
)
from tests.waiting import until, until_state

#: SIGINT comes at the moment at which the command's own code is looked for
WHILE_IT_LOADS = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "moorage.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["moorage", "ls"]
from moorage.cli.start import main
main()
"""

#: the signal BY comes while the first request of the verb AT waits for its answer
WHILE_IT_ASKS = """
import asyncio, os
from moorage.client.connected import Connected
ask = Connected._request
async def interrupted(self, subject, *arguments):
    if subject.endswith("." + os.environ["AT"]):
        os.kill(os.getpid(), int(os.environ["BY"]))
        await asyncio.sleep(60)
    return await ask(self, subject, *arguments)
Connected._request = interrupted
from moorage.cli.start import main
main()
"""


async def interrupted(node: Node, tenant: str, at: str, by: signal.Signals, *argv: str) -> Ran:
    """The command, with this signal while its first request of this verb waits for its answer."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WHILE_IT_ASKS, *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=environment(**node.env(tenant), AT=at, BY=str(int(by))),
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


def test_while_it_loads_it_ends_without_a_word() -> None:
    ran = subprocess.run([sys.executable, "-c", WHILE_IT_LOADS], capture_output=True, timeout=30, env=environment())
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, b"", b"")


async def test_before_the_answer_it_says_what_may_be(nats_url: str, unique: str) -> None:
    for verb in ("submit", "run"):
        process = await start(verb, "--nats", nats_url, "--tenant", unique, "--timeout", "30s", "--", "true")
        err = Lines(process.stderr)
        await err.until("no scheduler answers yet")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        await err.until("cancel: moorage cancel")
        [job] = re.findall(
            r"^interrupted before the scheduler answered: job (\w+) may have been accepted$", err.text, re.MULTILINE
        )
        # if it never arrived, the id alone could be the beginning of another
        word = f"'={job}' --nats {nats_url} --tenant {unique}"
        assert f"check: moorage show {word}   cancel: moorage cancel --before {word}\n" in err.text


async def test_on_a_terminal_it_says_so_below_the_terminals_own_sign(nats_url: str, unique: str) -> None:
    words = ("--nats", nats_url, "--tenant", unique, "--timeout", "30s", "--", "true")
    for verb in ("run", "submit"):
        async with on_a_terminal(verb, *words, env={}) as (process, terminal):
            shown = await until_shown(terminal, "again for up to 30s\r\n")
            process.send_signal(signal.SIGINT)
            shown += await until_shown(terminal, "may have been accepted")
            assert "30s\r\n\r\ninterrupted before" in shown
            assert await process.wait() == 130


async def test_of_trials_it_says_under_which_id_to_submit_them_again(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    """It named the ids in a file of requests, and that of the trials was made up and told nowhere."""
    (items := tmp_path / "items.csv").write_text("lr\n0.1\n0.2\n")
    words = ("--hosts", "2", "--gpu", "1", "--each", str(items), "--", "train", "{lr}")
    process = await start("submit", "--nats", nats_url, "--tenant", unique, "--timeout", "30s", *words)
    err = Lines(process.stderr)
    await err.until("no scheduler answers yet")
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130
    await err.until("no job is then created twice")
    assert "any of the 2 jobs may have been accepted" in err.text
    of = f"--nats {nats_url} --tenant {unique}"
    assert re.search(rf"check: moorage ls --label sweep=(\w+) {of}; submit again with --job \1:", err.text), err.text
    assert "follow" not in err.text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_one_that_comes_while_jobs_are_run_again_ends_all_of_it(
    node: Node, unique: str, number: signal.Signals, code: int
) -> None:
    """It once ended the first submit alone: the others were made, and the command ended with 0."""
    async with AsyncClient(node.url, tenant=unique) as client:
        await client.wait([await client.submit(["true"], job=f"x{at}") for at in range(3)])
        ran = await interrupted(node, unique, "submit", number, "again", "x*")
        assert (ran.code, ran.out) == (code, ""), ran.err
        assert "interrupted before the scheduler answered: job x2-again-1 may have been accepted" in ran.err
        assert "0 of 3 jobs run again" in ran.err
        ran = await interrupted(node, unique, "again", number, "again", "x*")
        assert ran.code == code, ran.err
        assert "may have been accepted" not in ran.err, "nothing was submitted"
        assert len((await client.ls()).jobs) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_one_that_comes_while_a_job_takes_the_place_of_another_loses_no_request(
    node: Node, unique: str, number: signal.Signals
) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        old = await client.submit(["true"], gpu="1xT4", on_no_match="wait")
        words = ("submit", "--instead-of", old.job, "--priority", "60")
        for at, says in (
            ("plan", None),
            ("cancel", f"job {old.job} may have been cancelled, and job "),
            ("submit", f"job {old.job} was cancelled; whether job "),
        ):
            ran = await interrupted(node, unique, at, number, *words)
            assert (ran.code, ran.out) == (128 + number, ""), ran.err
            if says is None:
                assert "priority" not in ran.err, "nothing was changed"
            else:
                assert says in ran.err
                assert msgspec.json.decode(ran.err.splitlines()[-1])["priority"] == 60
            assert (await old.show()).state == ("CANCELLED" if at == "submit" else "QUEUED")


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "first"), [("events", "RUNNING"), ("logs", "begun")])
async def test_a_second_one_ends_it_at_once_and_without_a_trace(node: Node, unique: str, verb: str, first: str) -> None:
    await node.run("submit", "--job", "long", "--", "sh", "-c", "echo begun; sleep 600", tenant=unique)
    async with AsyncClient(node.url, tenant=unique) as client:
        await until_state(client.job("long"), "RUNNING")
    process = await start(verb, "long", env=node.env(unique))
    await Lines(process.stdout).until(first)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode in (130, -signal.SIGINT)
    assert b"Traceback" not in err
    assert b"never" not in err, "a future or a coroutine that was cut off"
    await node.run("cancel", "long", tenant=unique)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG])
async def test_a_signal_of_users_reaches_the_job_of_a_run_and_no_job_that_is_only_looked_at(
    node: Node, unique: str, number: signal.Signals
) -> None:
    """It ended the command with 138 without a word."""
    job = f"on-{number.name.lower()}"
    script = f"trap 'echo saved; exit 7' {number.name.removeprefix('SIG')}; echo begun; while :; do sleep 0.05; done"
    process = await start("run", "--job", job, "--", "sh", "-c", script, env=node.env(unique))
    out = Lines(process.stdout)
    await out.until("begun")
    looks = await start("logs", job, env=node.env(unique))
    await Lines(looks.stdout).until("begun")
    looks.send_signal(number)
    await Lines(looks.stderr).until(f"{number.name} stays here: no job gets it; moorage signal JOB {number.name}")
    process.send_signal(number)
    await out.until("saved")
    assert (await process.wait(), await looks.wait()) == (7, 7)


async def test_a_signal_for_a_job_that_does_not_run_yet_is_said_to_reach_none(node: Node, unique: str) -> None:
    process = await start("run", "--job", "held", "--hold", "--", "true", env=node.env(unique))
    err = Lines(process.stderr)
    await err.until("held")
    process.send_signal(signal.SIGUSR1)
    await err.until("SIGUSR1 reaches no job: ")
    await node.run("cancel", "held", tenant=unique)
    await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
async def test_a_run_that_another_signal_ends_says_that_its_job_goes_on(
    node: Node, unique: str, number: signal.Signals, code: int
) -> None:
    process = await start("run", "--job", "on", "--", "sh", "-c", "echo begun; sleep 600", env=node.env(unique))
    await Lines(process.stdout).until("begun")
    for verb in ("logs", "wait"):
        other = await start(verb, "on", env=node.env(unique))
        if verb == "logs":
            await Lines(other.stdout).until("begun")
        else:
            await until(functools.partial(_handles, other.pid, number), what="it handles the signal")
        other.send_signal(number)
        _, told = await other.communicate()
        assert other.returncode == code
        assert b"go on" in told or b"goes on" in told
    process.send_signal(number)
    _, err = await process.communicate()
    assert process.returncode == code
    assert b"no longer follows job on, which goes on" in err
    assert b"cancel the job: moorage cancel on\n" in err
    assert b"Traceback" not in err
    async with AsyncClient(node.url, tenant=unique) as client:
        assert (await client.job("on").show()).state == "RUNNING"
        await client.job("on").cancel()


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for this signal."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(line.split()[1], 16) >> number - 1 & 1)


async def test_data_on_stdin_that_no_job_gets_is_warned_of(node: Node, unique: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_text("data")
    for verb in ("run", "submit"):
        told = {}
        for name, redirected in (("pipe", "echo data |"), ("file", f"<{data}"), ("null", "</dev/null")):
            line = f'{redirected} "$@"'
            process = await asyncio.create_subprocess_exec(
                "sh", "-c", line, "sh", *COMMAND, verb, "--", "cat", stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, env=environment(**node.env(unique)),
            )  # fmt: skip
            _, err = await process.communicate()
            assert process.returncode == 0, err
            told[name] = b"stdin is not passed on" in err
        assert told == {"pipe": True, "file": True, "null": False}


async def test_who_was_started_to_ignore_it_does(node: Node, unique: str) -> None:
    """As behind `nohup`, and behind `&` in a script."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "events", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=environment(**node.env(unique)), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    out = Lines(process.stdout)
    await _until_heard(node, unique, out, "before")
    process.send_signal(signal.SIGINT)
    await _until_heard(node, unique, out, "behind")
    process.terminate()
    await process.wait()


async def _until_heard(node: Node, tenant: str, out: Lines, name: str) -> None:
    """Submit until one of its jobs is told: what came before it listened is not."""
    heard = asyncio.create_task(out.until(f"{name}-"))
    number = 0
    while not heard.done():
        await node.run("submit", "--job", f"{name}-{number}", "--", "true", tenant=tenant)
        number += 1
    await heard


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_demo_that_is_ended_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = await start("demo", env={"TMPDIR": str(tmp_path)})
    err = Lines(process.stderr)
    await err.until("running")  # jobs of it run
    process.send_signal(number)
    process.send_signal(number)  # whoever is impatient does not leave jobs behind either
    await process.communicate()
    assert process.returncode == code
    # a copy of the scheduler that forecasts ends by itself a moment after it
    await until(lambda: not processes_of(str(tmp_path)), what="the last of it has gone")
    assert list(tmp_path.glob("moorage-demo-*")) == []


@pytest.mark.slow
async def test_up_ends_in_order_where_nobody_reads_what_it_says(tmp_path: Path) -> None:
    """The terminal was closed: it is told so by SIGHUP, and each word to that terminal fails."""
    folder = tmp_path / "up"
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "up", "--simulate", "1xH100", "--data", str(folder), "--port", "0", "--open",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=write, env=environment(),
    )  # fmt: skip
    os.close(write)
    said = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(said), os.fdopen(read, "rb")
    )
    node = Node(folder, process)
    try:
        await Lines(said).until("Ctrl-C ends the server, the scheduler, the worker and its jobs")
        await node.run("submit", "--job", "long", "--", "sleep", "31417")
        async with AsyncClient(node.url) as client:
            await until_state(client.job("long"), "RUNNING")
        transport.close()
        assert await node.stop(signal.SIGHUP) == 0
    finally:
        await node.stop(signal.SIGKILL)
    await until(lambda: not processes_of(str(folder)), what="the last of it has gone")
