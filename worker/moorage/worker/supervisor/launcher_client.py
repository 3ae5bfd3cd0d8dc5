"""Start processes through the launcher: find the compiled one, run it, and send it requests.

Without a compiled launcher the supervisor forks itself (forked.py). In both cases a process is a child of the calling
thread. That must be the main thread, because the parent-death signal is sent when that thread ends.
"""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

from moorage.system.proctree import STATE_MARK
from moorage.worker.supervisor import forked
from moorage.worker.supervisor.child import Child

PROGRAM: Final = Path(__file__).with_name("launcher.bin")
"""Where the build hook (worker/build_hook.py) puts the compiled launcher."""
CONTRACT: Final = 104
"""As in launcher.c."""
ANSWER_S: Final = 2
"""A launcher that takes longer for a clone is killed; the next start makes a new one."""
_PROBE_S: Final = 5.0


class LauncherGone(Exception):
    """The launcher ended, or did not answer within `ANSWER_S`: the requested start may or may not have happened."""


def open_compiled(program: Path = PROGRAM, contract: int = CONTRACT) -> tuple[int, str]:
    """Return the descriptor of a compiled program and "", or -1 and why it cannot be used.

    `contract` is its exit status without arguments, by which it is known to be built from these sources.

    The descriptor keeps the same file when a newer release is installed over it.
    """
    descriptor = -1
    try:
        descriptor = os.open(program, os.O_RDONLY | os.O_CLOEXEC)
        about, command = os.fstat(descriptor), [f"/proc/self/fd/{descriptor}"]
        # a group with the user's own number has no other user: such systems use umask 002, and pip installs with mode
        # 775
        foreign = stat.S_IWOTH | (stat.S_IWGRP if about.st_gid != about.st_uid else 0)
        if about.st_uid not in (0, os.geteuid()) or about.st_mode & foreign:
            why = (
                f"can be written by other users (uid {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}): remove that"
                " permission with chmod go-w"
            )
        elif subprocess.run(command, pass_fds=[descriptor], timeout=_PROBE_S, check=False).returncode != contract:
            why = "was built from other sources"
        else:
            return descriptor, ""
    except (OSError, subprocess.SubprocessError) as error:
        why = f"does not run here: {error}"
    if descriptor >= 0:
        os.close(descriptor)
    return -1, f"{program} {why}"


class Launcher:
    """The launcher process. `program` is a descriptor from `open_compiled`, or -1.

    The launcher carries the state folder's mark, so that another deployment's supervisor does not mistake it for a
    process of its own attempts.
    """

    def __init__(self, program: int = -1, state_mark: str = "") -> None:
        self.pid: int | None = None
        self._program = program
        self._environ = {STATE_MARK: state_mark}
        self._channel: socket.socket | None = None

    def ask(
        self, child: Child, confirm: int, stdin: int, stdout: int, stderr: int, *cgroup: int
    ) -> socket.socket | int:
        """Request a process; return what `answer` needs. `cgroup` is a descriptor of the cgroup's folder, if any.

        Without a compiled launcher, the process is made here. Raises `OSError` if no process will be made.
        """
        if self._program < 0:
            return forked.start(child, confirm, stdin, stdout, stderr, *cgroup)
        request = child.request()
        message = len(request).to_bytes(4, sys.byteorder) + request
        with contextlib.suppress(OSError):
            return self._send(message, [confirm, stdin, stdout, stderr, *cgroup])
        # the launcher did not read the whole request, so it has begun nothing
        return self._send(message, [confirm, stdin, stdout, stderr, *cgroup])

    def answer(self, asked: socket.socket | int) -> int:
        """Wait for the pid of the requested process and return it; call it in the order of the requests.

        Raises `OSError` if no process could be made, and `LauncherGone`.
        """
        if isinstance(asked, int):
            return asked
        answer, why = b"", "the launcher process ended"
        try:
            answer = asked.recv(4)
        except TimeoutError:
            why = f"the launcher process did not answer within {ANSWER_S} s"
        except OSError:
            pass
        if not answer:
            if asked is self._channel:
                self.close()
            raise LauncherGone(why)
        pid = int.from_bytes(answer, sys.byteorder, signed=True)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def reaped(self, pid: int) -> None:
        """Record that a child with this pid has ended; if it was the launcher, the next start makes a new one."""
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
                os.kill(self.pid, signal.SIGKILL)  # not reaped, so the pid cannot belong to another process

    def _send(self, message: bytes, descriptors: list[int]) -> socket.socket:
        channel = self.running()
        try:
            sent = socket.send_fds(channel, [message], descriptors)
            if sent < len(message):
                channel.sendall(message[sent:])
        except OSError:
            self.close()
            raise
        return channel

    def running(self) -> socket.socket:
        """Return the channel to the launcher process; start the process if there is none. Raises `OSError`."""
        if self._channel is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                kept = theirs.fileno()
                self.pid = os.posix_spawn(
                    f"/proc/self/fd/{self._program}",
                    ["moorage-launcher", str(os.getpid()), str(kept)],
                    self._environ,
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, kept, kept),  # makes it a descriptor that exec leaves open
                    ],
                    setsigmask=(),
                    setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
                )
            ours.settimeout(ANSWER_S)  # by Python's clock: the kernel's time-out starts again with each signal
            self._channel = ours
        return self._channel
