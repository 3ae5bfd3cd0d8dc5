"""Hold and watch a process that need not be a child of this one, by a pidfd (pidfd_open(2))."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
from typing import Final

#: socket(7), since Linux 6.5: a pidfd of the peer. Unlike a pid it cannot come to mean another process
_SO_PEERPIDFD: Final = 77


def open_peer(connection: socket.socket, pid: int) -> int:
    """Return a pidfd of the peer; -1 if none can be opened: it is gone, or not visible in this pid namespace.

    `pid` is opened where the kernel cannot give the pidfd of a connection's peer. Raises OSError if this process or the
    host has no descriptor left.
    """
    try:
        return int(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EOPNOTSUPP):
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return -1
    try:
        return os.pidfd_open(pid)
    except ValueError:
        return -1
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return -1


def has_ended(pidfd: int) -> bool:
    """Return whether the process of a pidfd has ended, reaped or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def until_ended(pidfd: int) -> None:
    """Wait until the process of a pidfd has ended, which makes the pidfd readable (pidfd_open(2))."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
