"""Where a command listens that serves something: `--listen [ADDRESS:]PORT`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from moorage.cli.framework.console import print_err
from moorage.cli.framework.interrupts import ENDING
from moorage.client.errors import rejected
from moorage.schemas.errors import MoorageError, problem
from moorage.system.notify import managed

#: where it listens without an address
HERE: Final = "127.0.0.1"
#: connections that wait until they are taken
WAITING_MAX: Final = 1024
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


def own_address(listen: str) -> tuple[str, int]:
    """Return address and port of `[ADDRESS:]PORT`. Raises `Rejected`, also for a name of a host."""
    host, port = host_and_port(listen)
    try:
        return str(ipaddress.ip_address(HERE if host == "localhost" else host)), port
    except ValueError:
        raise no_address(listen) from None


@contextlib.contextmanager
def listening(host: str, port: int, opened: str = "") -> Iterator[socket.socket]:
    """Yield a socket that listens there; or the one that `opened` numbers, which does so already. Raises `MoorageError`
    if the address is taken, or is none of this machine."""
    if opened.isdecimal():
        listener = socket.socket(fileno=int(opened))
    else:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=WAITING_MAX)
        except OSError as error:
            raise cannot_listen(host, port, error) from None
    with listener:
        yield listener


def until_ended() -> Callable[[str], Awaitable[None]]:
    """Take the signals that end a server from here on. Return what says that it serves, to whoever started it too, and
    waits for one of them. The same signal again ends the process at once."""
    loop, ended, ready = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def end(number: int) -> None:
        ended.set()
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)  # else asyncio leaves Python's own for Ctrl-C, which raises

    for number in ENDING:
        loop.add_signal_handler(number, end, number)

    async def serve(said: str) -> None:
        print_err(f"{said} (until Ctrl-C)")
        ready.set()
        async with managed(ready):
            await ended.wait()

    return serve


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
