"""The supervisor's side of the launcher: start it, send it packets of requests, and read the pids it answers with.

Why a launcher: a `preexec_fn` costs `subprocess` its vfork, and forking the supervisor itself copies its page tables.
The launcher, `launcher.c` or else `launcher.py`, is cheap to clone; its clones are the supervisor's own children.

A packet to it is a count of requests (4 bytes, and 4 of padding), then the requests (see `child.py`), each padded to
8 bytes, together with descriptors: the confirm pipe's, a file in memory, and those whose places the requests name. A
count of 0 says that the packet is in that file, and one of -1 asks for a spare. The answer is as many pids, or negative
error numbers, of 4 bytes. All numbers are in the order of this machine.
"""

import array
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Final

from moorage.worker.proctree import STATE_MARK
from moorage.worker.supervisor import launcher
from moorage.worker.supervisor.child import Request

SPARE: Final = -1
"""In the place of a packet's count."""
PACKET_BODY_BYTES_MAX: Final = 64 * 1024
CONFIRMATION: Final = struct.Struct("=3i")
"""(slot, stage, error number) of a child that could not exec."""
STAGES: Final = {
    launcher.STAGE_CGROUP: "cgroup",
    launcher.STAGE_LIMITS: "limits",
    launcher.STAGE_USER: "user",
    launcher.STAGE_CWD: "cwd",
    launcher.STAGE_EXEC: "exec",
}


class LauncherGone(Exception):
    """The launcher process has ended; what it was asked last may or may not have happened."""


class Launcher:
    """The launcher process and the socket to it."""

    __slots__ = ("_channel", "pid")

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self._channel = channel
        self.pid = pid

    @classmethod
    def start(
        cls, descriptors_soft: int, descriptors_hard: int, state_mark: str = "", program: str | None = None
    ) -> "Launcher":
        """Start it as a child of the calling (main) thread; children get these limits on open files.

        `program` is the compiled one, None for `launcher.py`. Raises `OSError`.
        It carries the state folder's mark, so that another deployment's supervisor does not take it for what a member
        of its own may have become.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [program] if program else [sys.executable, "-I", "-S", str(Path(launcher.__file__))]
            pid = os.posix_spawn(
                words[0],
                [*words, str(descriptors_soft), str(descriptors_hard)],
                {STATE_MARK: state_mark} if state_mark else {},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), launcher.CHANNEL),
                ],
            )
        ours.setblocking(False)
        return cls(ours, pid)

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, requests: list[Request], descriptors: list[int]) -> None:
        """Ask for these children. The first descriptor is the confirm pipe's. Raises `LauncherGone`, `OSError`."""
        body = b"".join((struct.pack("=ii", len(requests), 0), *requests))
        memory = -1
        try:
            if len(body) > PACKET_BODY_BYTES_MAX:
                memory = os.memfd_create("moorage-start", os.MFD_CLOEXEC)
                with open(memory, "wb", closefd=False) as file:
                    file.write(body)
                os.lseek(memory, 0, os.SEEK_SET)
                body = struct.pack("=ii", 0, 0)
            # The second place is always the memory file's, so that the requests' places hold either way.
            self._send(body, [descriptors[0], memory if memory >= 0 else descriptors[0], *descriptors[1:]])
        finally:
            if memory >= 0:
                os.close(memory)

    def send_for_spare(self, descriptors: list[int]) -> None:
        """Ask for a spare (see `spare.py`), which only the compiled one makes. Raises `LauncherGone`, `OSError`."""
        self._send(struct.pack("=ii", SPARE, 0), [descriptors[0], *descriptors])

    def _send(self, body: bytes, descriptors: list[int]) -> None:
        rights = array.array("i", descriptors)
        try:
            self._channel.sendmsg([body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except (BrokenPipeError, ConnectionResetError):
            raise LauncherGone from None

    def receive(self) -> list[int] | None:
        """The answer to the oldest packet: pids, or negative error numbers. None when there is none yet.

        Raises `LauncherGone`.
        """
        try:
            data = self._channel.recv(launcher.PACKET_BYTES_MAX)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data = b""
        if not data:
            raise LauncherGone
        return list(struct.unpack(f"={len(data) // 4}i", data))

    def close(self) -> None:
        self._channel.close()
