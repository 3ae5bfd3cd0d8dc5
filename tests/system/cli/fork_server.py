"""A process that has imported what its children run, and forks one for each call: run as a script by `forks.py`.

Its arguments are a child's `sys.argv[0]`, the function that a child runs, as `module:function`, and what is imported
for that, a name of `LOADS`. A call comes over the socket that is this process's stdin, with four descriptors: the
child's stdin, stdout and stderr, and a socket for the answer, which is the child's pidfd at once and its status at its
end. The child sets up what an interpreter sets up as it starts, leaves `serve`, and is the main program from there on:
exceptions, `atexit` and the exit code are the interpreter's own.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, Final

#: the command's modules: those of all verbs that need no server, and what commands import as they run
BESIDE_VERBS: Final = (
    "moorage.cli.framework.streams",
    "moorage.cli.help",
    "moorage.client.client",
    "moorage.bus.connection",
    "moorage.testing.sim_fleet",  # with it the scheduler's and the worker's, for simulate and doctor
    "moorage.testing.simulate.trace",
)
#: the modules of a scheduler and of a worker's agent
SERVICES: Final = ("moorage.scheduler.main", "moorage.scheduler.leader.service", "moorage.worker.agent.run")
#: a request's length, and a status
NUMBER: Final = struct.Struct("!i")
DESCRIPTORS: Final = 4


def load_command() -> None:
    from moorage.cli import main, start  # noqa: F401
    from moorage.cli.verbs import OF_SERVER, all_verbs

    for name, verb in all_verbs().items():
        if name not in OF_SERVER:
            verb.load()
    for module in BESIDE_VERBS:
        importlib.import_module(module)


def load_services() -> None:
    for module in SERVICES:
        importlib.import_module(module)


LOADS: Final[dict[str, Callable[[], None]]] = {"command": load_command, "services": load_services}


def interpret() -> None:
    """Do what the interpreter does with `-m MODULE` or `-c PROGRAM`, and the arguments behind it."""
    kind, what, *rest = sys.argv[1:]
    sys.argv[:] = ["-c", *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def serve(calls: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a child for each call. Returns in a child, with its request and streams.

    Returns None once no call will come: then the children are ended.
    """
    answers: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()  # epoll would be one for the children, too
    poll.register(calls, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in answers:
                poll.unregister(ready)
                _tell_end(*answers.pop(ready))
                os.close(ready)
                continue
            header, descriptors, _, _ = socket.recv_fds(calls, NUMBER.size, DESCRIPTORS)
            if not header:
                for pidfd in answers:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return None
            request = json.loads(_read(calls, *NUMBER.unpack(header)))
            answer = socket.socket(fileno=descriptors.pop())
            if (pid := os.fork()) == 0:
                answer.detach()
                calls.detach()
                return request, descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            pidfd = os.pidfd_open(pid)
            answers[pidfd] = pid, answer
            poll.register(pidfd, select.POLLIN)
            socket.send_fds(answer, [NUMBER.pack(pid)], [pidfd])


def _read(calls: socket.socket, length: int) -> bytes:
    read = b""
    while len(read) < length:
        read += calls.recv(length - len(read))
    return read


def _tell_end(pid: int, answer: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    with answer:
        try:
            answer.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
        except OSError:
            pass  # its test has ended without it


def become(request: dict[str, Any], streams: list[int], program: str) -> None:
    """Make this child what a new interpreter is, before it runs `program`."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if request["groups"] != os.getgroups():  # only root may
        os.setgroups(request["groups"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [program, *request["argv"]]
    sys.path[0] = os.getcwd()  # as `python -m` has it; a script has its own folder there
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        before: io.TextIOWrapper = getattr(sys, name)
        is_buffered = not before.write_through  # else by PYTHONUNBUFFERED
        data: Any = open(number, f"{mode}b", -1 if is_buffered or mode == "r" else 0, closefd=False)  # noqa: SIM115
        getattr(data, "raw", data).name = f"<{name}>"
        text: Any = io.TextIOWrapper(
            data, before.encoding, before.errors, newline="\n", write_through=not is_buffered,
            line_buffering=is_buffered and (number == 2 or data.isatty()),
        )  # fmt: skip
        text.mode = mode
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


if __name__ == "__main__":
    import contextlib

    program, where, loads = sys.argv[1:]
    LOADS[loads]()
    # a thread would be in no child, and may hold a lock
    assert len(os.listdir("/proc/self/task")) == 1, "a module starts a thread as it is imported"
    module, _, function = where.partition(":")
    main = getattr(importlib.import_module(module), function)
    call = None
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C of the terminal ends pytest, and this then
        call = serve(socket.socket(fileno=os.dup(0)))
    if call is not None:
        become(*call, program)
        main()
