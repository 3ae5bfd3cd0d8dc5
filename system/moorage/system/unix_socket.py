"""UNIX sockets in our own folders: listening, and the kernel's credentials of the connected process."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

#: connections that the kernel keeps until they are accepted
BACKLOG_MAX: Final = 64
#: Arguments for every server on a socket of `listen`. From Python 3.13 on asyncio and uvloop look the socket's name up,
#: to remove it when the server closes. This name leads through a descriptor that is closed by then or another file's,
#: and the next process that listens there owns it.
SERVER_OPTIONS: Final[dict[str, Any]] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
_CREDENTIALS: Final = struct.Struct("3i")


class Peer(NamedTuple):
    """The process at the other end of a socket, as the kernel reports it (SO_PEERCRED of unix(7))."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[str]:
    """Yield a short path of the folder, usable until the block ends: the path of a UNIX socket has at most 107
    bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def listen(path: Path, gid: int | None = None, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Return a listening socket of mode 0600, or 0660 for a group `gid`; a file of that name is replaced.

    `kind` is `SOCK_SEQPACKET` where each message is one packet.

    A server on it is made with `SERVER_OPTIONS`. The caller has to know that no other process listens there. Raises
    `OSError`.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        with open_folder(path.parent) as folder:
            name = f"{folder}/{path.name}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            umask = os.umask(0o177)  # from its first moment on it is ours alone
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
