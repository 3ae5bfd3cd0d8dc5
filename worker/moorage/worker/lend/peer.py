"""Open the lease socket, and notice the end of the process at the other end of a connection."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

from moorage.system.unix_socket import listen, open_folder


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
