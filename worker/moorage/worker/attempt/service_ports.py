"""Give attempts ports of this host from the worker's range, as long as they live: `run.ports` of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import refuse
from moorage.worker.attempt.environment import LacksHere
from moorage.worker.attempt.rendezvous import is_free_port, own_address

NO_PORTS: Final = "this worker gives its jobs no ports: its setting `ports` is empty"


class ServicePorts:
    """The ports of one worker's attempts, from the range `allowed`.

    `taken` has those of all workers in this process. `address` is this host's for others; None: it is detected.
    Without `probes` no port is tried: a simulated worker has no sockets.
    """

    def __init__(self, allowed: range, taken: set[int], address: str | None, *, probes: bool = True) -> None:
        self._allowed = allowed
        self._taken = taken
        self._address = address
        self._probes = probes
        self._ours: dict[AttemptName, tuple[int, ...]] = {}
        self._next = 0  # ports go round: one that was given back is not given again at once

    def take(self, name: AttemptName, count: int) -> tuple[int, ...]:
        """Return so many free ports, kept until `give_back`. Raises LacksHere without a range, Refused if too few are
        free; then none is kept."""
        if not count:
            return ()
        if not self._allowed:
            raise LacksHere(NO_PORTS, next_step='set ports = "20000-29999" in the worker\'s settings')
        found: list[int] = []
        size = len(self._allowed)
        for step in range(size):
            port = self._allowed[(self._next + step) % size]
            if port not in self._taken and (not self._probes or is_free_port(port)):
                found.append(port)
                if len(found) == count:
                    self._next = (self._next + step + 1) % size
                    self.take_again(name, found)
                    return tuple(found)
        span = f"{self._allowed.start}-{self._allowed.stop - 1}"
        raise refuse(
            "failed-precondition", f"the job needs {count} ports, and {len(found)} of {span} are free", found=len(found)
        )

    def take_again(self, name: AttemptName, ports: Sequence[int]) -> None:
        """Keep the ports that an attempt has already."""
        if ports:
            self._ours[name] = tuple(ports)
            self._taken.update(ports)

    def give_back(self, name: AttemptName) -> None:
        """Release an attempt's ports; do nothing if it has none."""
        self._taken.difference_update(self._ours.pop(name, ()))

    def address(self, ports: Sequence[int]) -> str:
        """Return where these ports are reached, as `10.0.0.5:20000,20001`; "" for none."""
        return f"{self._address or own_address()}:{','.join(map(str, ports))}" if ports else ""
