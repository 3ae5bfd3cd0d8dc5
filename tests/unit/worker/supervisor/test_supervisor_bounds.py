"""A supervisor at a bound: one that is full refuses an attempt, one without a descriptor kills a container later."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from moorage.system.proctree import Process, read_process
from moorage.worker.supervisor import commands, containers, jobs
from moorage.worker.supervisor.attempt import State
from moorage.worker.supervisor.launcher_client import Launcher
from moorage.worker.supervisor.protocol import Ended, Event, StartAttempt


def jobs_of(state: Path, emit: Callable[[Event], None]) -> jobs.Jobs:
    return jobs.Jobs(
        state=state,
        state_mark="",
        boot_id="boot",
        cgroups=None,
        fences=None,
        descriptors=(64, 64),
        emit=emit,
        record=lambda record: None,
        write_ahead=lambda records: None,
        launcher=Launcher(),
    )


@pytest.mark.parametrize(("bound", "message"), [("RUNNING_MAX", "runs 0 attempts"), ("HELD_MAX", "holds 0 attempts")])
async def test_an_attempt_beyond_a_bound_is_told_which_one_it_was(
    bound: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, bound, 0)
    events: list[Event] = []
    full = jobs_of(tmp_path, events.append)
    full.start((StartAttempt(key="one", argv=("true",), env={}),))
    [ended] = events
    assert isinstance(ended, Ended)
    assert (ended.reason, ended.message) == ("start-failed", f"the supervisor {message}")


async def test_a_container_for_which_there_was_no_descriptor_is_killed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = read_process(os.getpid())
    assert me is not None
    refusals, killed = [OSError(errno.EMFILE, "Too many open files")], asyncio.Event()

    def kill_process(process: Process) -> None:
        if refusals:
            raise refusals.pop()
        killed.set()

    monkeypatch.setattr(containers, "kill_process", kill_process)
    monkeypatch.setattr(containers, "processes_of", lambda ids: {each: [me] for each in ids})
    short = jobs_of(tmp_path, lambda event: None)
    monkeypatch.setattr(short, "reap", lambda: None)  # this process has other children
    short.contain(StartAttempt(key="one", argv=(), env={}), "a" * 64)
    attempt = short.attempts["one"]
    attempt.pid = me.pid
    attempt.go(State.RUNNING)
    short.end("one", "end", 0.0, "cancelled")
    async with asyncio.timeout(30):
        await killed.wait()
    assert refusals == []


async def test_a_caller_whose_terminal_cannot_be_held_for_want_of_a_descriptor_is_told(tmp_path: Path) -> None:
    def hold(key: str, out: int, over: Callable[[int], None]) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.setblocking(False)
        theirs.setblocking(False)
        commands._Connection(cast(jobs.Jobs, SimpleNamespace(hold=hold)), theirs, lambda _: None).begin()
        socket.send_fds(ours, [commands.encode(commands.Attach(key="m"))], [ours.fileno()])
        async with asyncio.timeout(30):
            said = await asyncio.get_running_loop().sock_recv(ours, 4096)
    assert commands.decode_answer(said) == commands.Refused(
        stage="request", errno=errno.EMFILE, message="Too many open files"
    )
