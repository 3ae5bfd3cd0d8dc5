"""A fork of the command's process is as a process that was started for it: what a program finds, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.leftover import ends_with_the_test
from tests.system.cli import forks
from tests.system.cli.node import environment

#: all of a process that a program can ask for, but what `forks.py` names
PROBE: Final = """
import asyncio, atexit, gc, json, os, signal, sys, threading, warnings

def stream(file):
    return [file.encoding, file.errors, file.name, file.mode, file.line_buffering, file.write_through, file.isatty(),
            file.newlines, file.buffer.name, file.buffer.mode, type(file.buffer).__name__, file.fileno()]

def main():
    atexit.register(lambda: print("at its end"))
    try:
        asyncio.get_running_loop()
        loop = True
    except RuntimeError:
        loop = False
    umask = os.umask(0)
    os.umask(umask)
    print(json.dumps({
        "argv": sys.argv, "env": sorted(os.environ.items()), "cwd": os.getcwd(), "path": sys.path,
        "streams": [stream(file) for file in (sys.stdin, sys.stdout, sys.stderr)],
        "same": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        "open": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
        "kinds": [os.stat(fd).st_mode for fd in range(3)],
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "group": [os.getpgrp(), os.getsid(0)], "umask": umask, "ids": os.getresuid() + os.getresgid(),
        "groups": os.getgroups(),
        "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
        "loop": loop, "gc": gc.isenabled(), "flags": list(sys.flags), "warnings": sys.warnoptions,
        "stdin": sys.stdin.read(),
    }, default=str))
    print("to stderr", file=sys.stderr)
    ends = sys.argv[1]
    if ends == "exception":
        raise ValueError("of the program")
    if ends == "signal":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(int(ends) if ends.isdecimal() else ends)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("program") / "probe.py"
    file.write_text(PROBE)
    return file


@pytest.fixture(scope="module", params=["command", "services"])
def server(program: Path, request: pytest.FixtureRequest) -> Iterator[tuple[forks.ForkServer, tuple[str, ...]]]:
    """A server, and what it needs to be given before the program's own arguments."""
    env = environment(PYTHONPATH=os.pathsep.join([str(program.parent), forks.ROOTS]), OTHER="that one")
    if request.param == "command":
        running, begins = forks.ForkServer(env, program, "probe:main"), tuple[str, ...]()
    else:
        running, begins = forks.ForkServer(env, "-c", "fork_server:interpret", "services"), ("-m", "probe")
    yield running, begins
    running.end()


@pytest.fixture
def other_groups(server: object) -> Iterator[None]:
    """Groups that the server was not started with, where that is allowed."""
    groups = os.getgroups()
    if os.geteuid() == 0:
        os.setgroups([*groups, 4321])
    yield
    if os.geteuid() == 0:
        os.setgroups(groups)


@pytest.mark.usefixtures("other_groups")
@pytest.mark.parametrize("ends", ["0", "7", "in words", "exception", "signal"])
async def test_a_program_finds_in_a_fork_what_it_finds_in_a_new_process(
    program: Path, server: tuple[forks.ForkServer, tuple[str, ...]], tmp_path: Path, ends: str
) -> None:
    running, begins = server
    env = environment(
        PYTHONPATH=os.pathsep.join([str(program.parent), forks.ROOTS]), ONLY="this one", NOT_UTF8="\udce9"
    )
    process = ends_with_the_test(
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "probe", ends, "ä \udce9", env=env, cwd=tmp_path,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
    )  # fmt: skip
    given = b"words\n" * 100_000  # more than a pipe takes
    out, err = await process.communicate(given)
    assert running.can(env)
    code, forked_out, forked_err = await forks.run(running, (*begins, ends, "ä \udce9"), env, tmp_path, given)
    new, *behind = out.splitlines()
    forked, *forked_behind = forked_out.splitlines()
    assert json.loads(forked) == json.loads(new)
    assert (code, forked_behind) == (process.returncode, behind)
    assert behind == ([] if ends == "signal" else [b"at its end"])
    assert forked_err.splitlines()[:1] == err.splitlines()[:1] == [b"to stderr"]
    assert forked_err.splitlines()[-1] == err.splitlines()[-1]
