"""Where a command listens that serves something: `--listen [ADDRESS:]PORT`."""

from __future__ import annotations

from typing import Final

from moorage.client.errors import rejected
from moorage.schemas.errors import MoorageError, problem

#: where it listens without an address
HERE: Final = "127.0.0.1"
#: the variable that names a socket which listens already, as the number of an open file
FD_VARIABLE: Final = "MOORAGE_LISTEN_FD"


def host_and_port(listen: str) -> tuple[str, int]:
    """Return host and port of `[ADDRESS:]PORT`. An address of IPv6 may stand in brackets. Raises `Rejected`."""
    host, _, port = listen.rpartition(":")
    if port.isdecimal() and int(port) <= 65_535:
        return host.removeprefix("[").removesuffix("]") or HERE, int(port)
    raise no_address(listen)


def no_address(listen: str) -> MoorageError:
    """Return the error for a `--listen` that cannot be read."""
    return rejected(
        "invalid-argument",
        f"--listen {listen} is no address with a port",
        found=listen,
        allowed="9480, 0.0.0.0:9480, [::1]:9480",
        next="name a port, and an address of this machine; port 0 takes any free one",
    )


def cannot_listen(host: str, port: int, error: OSError) -> MoorageError:
    """Return the error for an address that is taken, or is none of this machine."""
    return MoorageError(
        problem(
            "failed-precondition",
            f"cannot listen at {host}, port {port}: {error.strerror}",
            next="name another port with --listen, or 0 for any that is free",
        )
    )


def address(host: str, port: int) -> str:
    """Return where others find it: `http://127.0.0.1:9480`, `http://[::1]:9480`."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
