"""The other end of a lease's socket: which process it is, when it is gone, and the socket itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from pathlib import Path
from typing import Final, NamedTuple

from moorage.worker.supervisor.server import open_folder

BACKLOG_MAX: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
#: socket(7), since Linux 6.5: a pidfd of the peer, which unlike its pid cannot have become another process's
_SO_PEERPIDFD: Final = 77


class Peer(NamedTuple):
    """As the kernel tells it of the process that connected (SO_PEERCRED of unix(7))."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


def open_pidfd(connection: socket.socket, pid: int) -> int:
    """A pidfd of the peer; -1 where it is gone, or is no process that this namespace shows."""
    try:
        return int(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except (OSError, ValueError):
        return -1


def watch(pidfd: int) -> asyncio.Future[None]:
    """Done when the process is gone (pidfd_open(2): it becomes readable)."""
    loop = asyncio.get_running_loop()
    dead: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        loop.remove_reader(pidfd)
        if not dead.done():
            dead.set_result(None)

    loop.add_reader(pidfd, on_readable)
    return dead


def listen(path: Path, gid: int | None) -> socket.socket:
    """A listening socket in place of one that nobody listens on. Raises OSError: EADDRINUSE where somebody does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with open_folder(path.parent) as folder:
            name = f"{folder}/{path.name}"
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(name) == 0:
                    raise OSError(errno.EADDRINUSE, "another agent lends from this socket", str(path))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            umask = os.umask(0o177)
            try:
                listener.bind(name)
            finally:
                os.umask(umask)
            if gid is not None:
                os.chown(name, -1, gid)
                os.chmod(name, 0o660)
        listener.listen(BACKLOG_MAX)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
