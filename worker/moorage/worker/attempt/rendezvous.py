"""Reserve the place where the ranks of a gang meet: an address and port of this host, until rank 0 is over.

A single replica that asks to be distributed is rank 0 of 1, and meets itself at the local address.
"""

from __future__ import annotations

import socket
from typing import Final

from moorage.schemas.attempt import AttemptName

PORT_TRIES_MAX: Final = 256
LOCAL_ADDRESS: Final = "127.0.0.1"


class Rendezvous:
    """Ports of one worker; `ports` has the reserved ports of all workers in this process.

    `address` is in the results of `reserve`; None for the address that other hosts reach.
    """

    def __init__(self, ports: set[int], address: str | None) -> None:
        self._taken = ports
        self._address = address
        self._ours: dict[AttemptName, int] = {}

    def reserve(self, name: AttemptName, wanted: int) -> str:
        """Return `address:port` with the first free port from `wanted` on, see `reserve_port`; "" if `wanted` is 0."""
        return f"{self._address or own_address()}:{self.reserve_port(name, wanted)}" if wanted else ""

    def reserve_port(self, name: AttemptName, wanted: int) -> int:
        """Return the first free port from `wanted` on, reserved for this attempt until it is over.

        If none of `PORT_TRIES_MAX` is free, returns `wanted`, which is not reserved.
        """
        for port in range(wanted, min(wanted + PORT_TRIES_MAX, 65536)):
            if port not in self._taken and is_free_port(port):
                self._ours[name] = port
                self._taken.add(port)
                return port
        return wanted  # none is free: the error of the job's own bind explains it best

    def release(self, name: AttemptName) -> None:
        """Release an attempt's port; do nothing if it has none."""
        if self._ours:
            self._taken.discard(self._ours.pop(name, 0))


def is_free_port(port: int, address: str = "") -> bool:
    """Return whether this TCP port of an address of this host is free to listen on; "" for all addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def own_address() -> str:
    """Return this host's address as other hosts see it; 127.0.0.1 without a route. Sends nothing.

    Connecting a datagram socket only looks up the route (udp(7)); 192.0.2.1 is for documentation (RFC 5737).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return LOCAL_ADDRESS
