"""Jobs that stay, such as services: when an attempt is ready, and which ports it has."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from moorage.schemas.trouble import Trouble, quoted

#: most ports of one replica
PORTS_MAX: Final = 16
#: most further attempts that `max_restarts` may allow
RESTARTS_MAX: Final = 1_000_000
PATH_CHARS_MAX: Final = 1024
EVERY_S_MIN: Final = 1.0
EVERY_S_MAX: Final = 3600.0
WITHIN_S_MAX: Final = 86400.0
FOR_S_MAX: Final = 3600.0
#: of a job that replaces another one: seconds for which a replica has to be ready before it counts, if nothing says so
FOR_S_DEFAULT: Final = 5.0
#: how a worker tells the end of an attempt that was not ready in time
NOT_READY: Final = "not-ready"

_PORT: Final = re.compile(r"PORT(?:_(0|[1-9][0-9]?))?|0*([0-9]{1,5})")
_PORT_WORDS: Final = "PORT, PORT_1 and so on (its own ports, see run.ports), or a number 1..65535"


def port_range(text: str, name: str = "ports", example: str = "20000-29999") -> range:
    """Return the range of ports in a setting such as `20000-29999`; empty for "". Raises ValueError."""
    first, dash, last = text.partition("-")
    if not text:
        return range(0)
    if not (dash and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16):
        raise ValueError(f"{name} must look like {example}, found {text!r}")
    return range(int(first), int(last) + 1)


def port_variable(number: int) -> str:
    """Return the name of the variable that has an attempt's port of this number, from 0."""
    return f"PORT_{number}" if number else "PORT"


def own_port(word: str) -> int | None:
    """Return the number, from 0, of the attempt's own port that a word such as `PORT_1` names; None for any other."""
    found = _PORT.fullmatch(word)
    return int(found[1] or 0) if found is not None and found[2] is None else None


class Ready(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """How a worker finds out that a running attempt is ready for work: exactly one of the first four fields.

    The worker looks soon after the start and then every `every_s`, from its own host. An answer later than that counts
    as none. An attempt that is not ready `within_s` after its start ends as `not-ready`, which counts as a failure; one
    that was ready and is not any more is told as NOT_READY, and lives on; see `run.restart_unready_s`.
    """

    #: something listens on this port: `PORT`, `PORT_1` and so on are the attempt's own (see `run.ports`), or a number
    tcp: str | int | None = None
    #: GET is answered with a status of 200 to 399: a port as above and a path, as `PORT/health` or `8000/health`
    http: str | None = None
    file: str | None = None  # this path exists, below the attempt's own folder
    call: bool = False  # `moorage serve` answers calls: its program is there and has loaded
    within_s: float = 120.0  # seconds from the start in which it must be ready once
    every_s: float = 5.0  # seconds between two looks once it was ready, 1..3600
    #: seconds for which an attempt has to be ready before another one ends because it serves in its place, 0..3600;
    #: null: 5 of a job with `instead_of`, else 0. A look that fails does not begin them anew if the worker tells within
    #: 2 s that it is ready again
    for_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.within_s <= WITHIN_S_MAX:
            raise ValueError(f"within_s must be above 0 and at most {WITHIN_S_MAX:.0f} seconds, found {self.within_s}")
        if not EVERY_S_MIN <= self.every_s <= EVERY_S_MAX:
            raise ValueError(f"every_s must be {EVERY_S_MIN:.0f}..{EVERY_S_MAX:.0f} seconds, found {self.every_s}")
        if self.for_s is not None and not 0 <= self.for_s <= FOR_S_MAX:
            raise ValueError(f"for_s must be 0..{FOR_S_MAX:.0f} seconds, found {self.for_s}")

    def for_ms(self, *, replaces: bool) -> int:
        """Return for how many ms an attempt has to be ready before it counts; `replaces`: its job replaces another."""
        default_s = FOR_S_DEFAULT if replaces else 0.0
        return round((default_s if self.for_s is None else self.for_s) * 1000)

    @property
    def words(self) -> str:
        """The check, as --ready has it."""
        found = (("tcp", self.tcp), ("http", self.http), ("file", self.file))
        return next((f"{name}:{value}" for name, value in found if value is not None), "call")

    @property
    def port(self) -> str:
        """The word for the port that is looked at; "" if none is."""
        if self.tcp is not None:
            return str(self.tcp)
        return "" if self.http is None else self.http.partition("/")[0]

    @property
    def path(self) -> str:
        """What is asked of that port by HTTP, with its first slash."""
        return "/" + (self.http or "").partition("/")[2]

    def trouble(self, ports: int, *, serves: bool) -> Trouble | None:
        """Return what is wrong with it for an attempt with so many ports; `serves`: it answers calls."""
        said = [name for name, value in self._ways.items() if value]
        if len(said) != 1:
            message = "ready needs exactly one of tcp, http, file and call"
            return Trouble("run.ready", message, ", ".join(said) or "none", "one of tcp, http, file, call")
        name = said[0]
        if name == "call":
            needs = 'ready by call needs service: {"name": …}, and a program that moorage serve runs'
            return None if serves else Trouble("run.ready.call", needs, "no service", "a service, or tcp, http, file")
        if name == "file":
            return self._file_trouble
        return self._port_trouble(f"run.ready.{name}", ports)

    @property
    def _ways(self) -> dict[str, bool]:
        return {
            "tcp": self.tcp is not None,
            "http": self.http is not None,
            "file": self.file is not None,
            "call": self.call,
        }

    @property
    def _file_trouble(self) -> Trouble | None:
        path = self.file or ""
        if path and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path:
            return None if len(path) <= PATH_CHARS_MAX else self._too_long("run.ready.file", path)
        message = "file must be a path below the attempt's folder"
        return Trouble("run.ready.file", message, quoted(path), "a path without .., as out/ready")

    def _port_trouble(self, field: str, ports: int) -> Trouble | None:
        found = _PORT.fullmatch(self.port)
        if found is None or (found[2] is not None and not 1 <= int(found[2]) <= 65535):
            return Trouble(field, "it must name a port", quoted(self.port), _PORT_WORDS)
        own = own_port(self.port)
        if own is not None and own >= ports:
            message = f"{self.port} needs ports: at least {own + 1}, found {ports}"
            return Trouble(field, message, self.port, f"run.ports {own + 1} or more, or a port's number")
        if self.http is not None and not (self.path.isascii() and self.path.isprintable() and " " not in self.path):
            return Trouble(field, "the path must be as it stands in a request", quoted(self.path), "as PORT/health")
        return None if len(self.path) <= PATH_CHARS_MAX else self._too_long(field, self.path)

    @staticmethod
    def _too_long(field: str, text: str) -> Trouble:
        return Trouble(field, f"a path has at most {PATH_CHARS_MAX} characters", len(text), f"1..{PATH_CHARS_MAX}")
