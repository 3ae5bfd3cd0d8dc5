"""Assign ports of this host to attempts from the range of their tenant.

Each attempt has a file below the supervisor's state folder with its ports. The next agent reads it, and the drivers of
this host that share the folder assign no port twice.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.job import Request
from moorage.system.device_environment import HostAtFault
from moorage.worker.attempt.rendezvous import is_free_port, own_address
from moorage.worker.supervisor.capped_output import key_digest

#: below the state folder
FOLDER: Final = "ports"
#: prefix of the variables that tell a container how its ports are reached
VARIABLE: Final = "MOORAGE_PORT_"


class Published(msgspec.Struct, frozen=True):
    """Where a container is reached: `ports` has the host's port for each of the container's own ports.

    `address` is for other hosts; `bind` is the same host's IPv4 address for the engine.
    """

    address: str
    bind: str
    ports: dict[int, int]

    @property
    def addresses(self) -> dict[str, str]:
        """`address:port` by the container's own port."""
        return {str(own): f"{self.address}:{port}" for own, port in self.ports.items()}

    @property
    def variables(self) -> dict[str, str]:
        """The variables that tell a container where it is reached."""
        return {f"{VARIABLE}{own}": where for own, where in self.addresses.items()}


class Ports:
    """The ports of one driver, `owner`. `address` is this host's address for other hosts; None: it is detected."""

    def __init__(self, state: Path, owner: str, address: str | None) -> None:
        self._folder = state / FOLDER
        self._prefix = f"{key_digest(owner)[:16]}-"
        self._address = address

    def begin(self, known: Iterable[str]) -> None:
        """Release the ports of all attempts of this driver except those with these keys."""
        paths = {self._path(key) for key in known}
        for path in self._folder.glob(f"{self._prefix}*"):
            if path not in paths:
                path.unlink(missing_ok=True)

    def take(self, key: str, wanted: Sequence[int], allowed: range) -> Published:
        """Return a free port of the range for each wanted port, kept until `give_back`.

        Raises HostAtFault, also if too few ports are free; then none is kept.
        """
        address = self._address or own_address()
        bind = address if is_ipv4(address) else own_address()  # engines accept no host name
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            others = [_read(path) for path in self._folder.iterdir() if path != self._path(key)]
            taken = {port for each in others if each is not None for port in each.ports.values()}
            free = (port for port in allowed if port not in taken and is_free_port(port, bind))
            found = Published(address, bind, dict(zip(wanted, free, strict=False)))
            if len(found.ports) < len(wanted):
                span = f"{allowed.start}-{allowed.stop - 1}"
                raise HostAtFault(f"the job needs {len(wanted)} ports, and {len(found.ports)} of {span} are free")
            self._path(key).write_bytes(msgspec.json.encode(found))
        except OSError as error:
            raise HostAtFault(f"ports: {error.strerror or error}") from None
        return found

    def of(self, key: str) -> dict[str, str]:
        """Return where an attempt is reached, by its own ports; empty if it publishes none, or is over."""
        found = _read(self._path(key))
        return found.addresses if found is not None else {}

    def give_back(self, key: str) -> None:
        """Release the ports of an attempt of which nothing runs."""
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{self._prefix}{key_digest(key)}"


def _read(path: Path) -> Published | None:
    """Return the content of a file; None if it cannot be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=Published)
    return None


def ports_wanted(request: Request) -> tuple[int, ...]:
    """Return the container's own ports that a request wants to publish; empty for none."""
    block = request.blocks.get(request.workload.driver)
    ports = block.get("ports") if isinstance(block, dict) else None
    return tuple(ports) if isinstance(ports, list) else ()


def is_ipv4(address: str) -> bool:
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        return False
    return True
