"""Ports for what a test starts by itself, and starts again on the same port."""

from __future__ import annotations

import contextlib
import secrets
import socket
from typing import Final

#: the kernel gives ports above to connections: one of them would be taken between two starts of a server
_BELOW: Final = 32_000
_FROM: Final = 10_000


def free_ports(count: int) -> list[int]:
    """Return so many ports that nobody listens on and that the kernel gives to no connection."""
    found: set[int] = set()
    while len(found) < count:
        port = _FROM + secrets.randbelow(_BELOW - _FROM)
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("", port))
            found.add(port)
    return list(found)
