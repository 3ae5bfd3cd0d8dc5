"""The supervisor's side of the launcher: find the compiled one, run it, and start processes by it.

Where it was not compiled the supervisor forks itself (forked.py). Either way a process is a child of the thread that
asks: that must be the main one, since the parent-death signal comes as that thread ends.
"""

import contextlib
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

from moorage.worker.proctree import STATE_MARK
from moorage.worker.supervisor import forked
from moorage.worker.supervisor.child import Child

PROGRAM: Final = Path(__file__).with_name("launcher.bin")
"""Where the build hook (worker/build_hook.py) puts the compiled one."""
CONTRACT: Final = 101
"""As in launcher.c."""
ANSWER_S: Final = 2
"""A launcher that takes longer for a clone is killed, and replaced with the next start."""
_PROBE_S: Final = 5.0


class LauncherGone(Exception):
    """The launcher ended before it answered: what it was asked for may or may not have happened."""


def open_compiled(program: Path = PROGRAM) -> tuple[int, str]:
    """The compiled launcher's descriptor and "", or -1 and why there is none that can be used.

    By its descriptor it stays the same file when a newer release is installed over it.
    """
    descriptor = -1
    try:
        descriptor = os.open(program, os.O_RDONLY | os.O_CLOEXEC)
        about, command = os.fstat(descriptor), [f"/proc/self/fd/{descriptor}"]
        if about.st_uid not in (0, os.geteuid()) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = f"can be written by other users (uid {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o})"
        elif subprocess.run(command, pass_fds=[descriptor], timeout=_PROBE_S, check=False).returncode != CONTRACT:
            why = "was built from other sources"
        else:
            return descriptor, ""
    except (OSError, subprocess.SubprocessError) as error:
        why = f"does not run here: {error}"
    if descriptor >= 0:
        os.close(descriptor)
    return -1, f"{program} {why}"


class Launcher:
    """`program` is a descriptor from `open_compiled`, or -1.

    The launcher carries the state folder's mark, so that another deployment's supervisor does not take it for what a
    member of its own may have become.
    """

    def __init__(self, program: int = -1, state_mark: str = "") -> None:
        self.pid: int | None = None
        self._program = program
        self._environ = {STATE_MARK: state_mark}
        self._channel: socket.socket | None = None

    def start(self, child: Child, confirm: int, stdout: int, stderr: int, *cgroup: int) -> int:
        """Start a process with these descriptors, and return its pid; `cgroup` is the folder of its group, if any.

        Raises `OSError` where there is no process, and `LauncherGone`.
        """
        if self._program < 0:
            return forked.start(child, confirm, stdout, stderr, *cgroup)
        with open(os.memfd_create("moorage-start", os.MFD_CLOEXEC), "wb") as file:
            file.write(child.request())
            file.flush()
            return self._ask([confirm, file.fileno(), stdout, stderr, *cgroup])

    def prepare(self) -> None:
        """Run the launcher, so that the first start need not wait for it. Raises `OSError`."""
        if self._program >= 0:
            self._running()

    def reaped(self, pid: int) -> None:
        """A child of that pid has ended; if that was the launcher, the next start makes another."""
        if pid == self.pid:
            self.pid = None
            self.close()

    def close(self) -> None:
        """End the launcher process, if there is one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # not reaped, so that the number is surely its own

    def _ask(self, descriptors: list[int]) -> int:
        try:
            socket.send_fds(self._running(), [b"\0"], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self.close()  # it ended before it was asked
            socket.send_fds(self._running(), [b"\0"], descriptors)
        try:
            answer = self._running().recv(4)
        except (BlockingIOError, ConnectionResetError):
            answer = b""
        if not answer:
            self.close()
            raise LauncherGone("the launcher process ended")
        pid = int.from_bytes(answer, sys.byteorder, signed=True)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def _running(self) -> socket.socket:
        """The channel to the launcher process, which is started if there is none. Raises `OSError`."""
        if self._channel is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                kept = theirs.fileno()
                self.pid = os.posix_spawn(
                    f"/proc/self/fd/{self._program}",
                    ["moorage-launcher", str(os.getpid()), str(kept)],
                    self._environ,
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, kept, kept),  # which makes it one that exec leaves open
                    ],
                    setsigmask=(),
                    setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
                )
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", ANSWER_S, 0))
            self._channel = ours
        return self._channel
