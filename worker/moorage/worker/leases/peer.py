"""Open the lease socket, and notice the end of the process at the other end of a connection."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path
from typing import Final

from moorage.system.unix_socket import listen, open_folder

#: socket(7), since Linux 6.5: a pidfd of the peer. Unlike a pid it cannot come to mean another process
_SO_PEERPIDFD: Final = 77


def open_pidfd(connection: socket.socket, pid: int) -> int:
    """Return a pidfd of the peer; -1 if none can be opened: it is gone, or not visible in this pid namespace.

    `pid` is opened where the kernel cannot give the pidfd of a connection's peer. Raises OSError if this process or the
    host has no descriptor left.
    """
    try:
        return int(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except ValueError:
        return -1
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return -1


def watch(pidfd: int) -> asyncio.Future[None]:
    """Return a future that is done when the process of `pidfd` is gone (pidfd_open(2): the pidfd becomes readable).

    Until then the event loop reads `pidfd`: remove that reader before closing it.
    """
    loop = asyncio.get_running_loop()
    dead: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        loop.remove_reader(pidfd)
        if not dead.done():
            dead.set_result(None)

    loop.add_reader(pidfd, on_readable)
    return dead


def listen_alone(path: Path, gid: int | None) -> socket.socket:
    """Return a socket that listens on `path`, and replace an abandoned one there.

    `gid` is the group that may connect besides this user; None for this user alone. Raises OSError: EADDRINUSE if an
    agent listens there.
    """
    with open_folder(path.parent) as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(f"{folder}/{path.name}") in (0, errno.EAGAIN):  # EAGAIN: its queue of connections is full
            raise OSError(errno.EADDRINUSE, "another agent lends from this socket", str(path))
    return listen(path, gid)
