"""`moorage page`: the fleet for browsers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import choose_here, print_err
from moorage.cli.framework.interrupts import ENDING
from moorage.cli.framework.listening import address, cannot_listen, host_and_port, no_address
from moorage.cli.framework.options import DEFAULTS, FormatOfLog, Options, client_of, guarded, with_client
from moorage.client.errors import NotPermitted, rejected
from moorage.schemas.errors import MoorageError, problem
from moorage.system.logged import begin_log

if TYPE_CHECKING:
    from moorage.cli.page.doors import Doors
    from moorage.cli.page.source import Source
    from moorage.client.client import AsyncClient

LISTEN_DEFAULT: Final = "127.0.0.1:9480"
#: below that, a secret could be guessed
SECRET_CHARS_MIN: Final = 16
HEADER_DEFAULT: Final = "X-Forwarded-User"


def page(
    *,
    listen: Annotated[
        str, Parameter(help="Where browsers find it; without an address, on 127.0.0.1.", value="[ADDRESS:]PORT")
    ] = LISTEN_DEFAULT,
    output_of: Annotated[
        list[str] | None,
        Parameter(
            help="Show the output of a tenant's jobs, with this context or URL of its key; may be repeated.",
            value="TENANT=WHERE",
        ),
    ] = None,
    operate: Annotated[bool, Parameter(help="Let those who look give an operator's orders, too.")] = False,
    trusted_proxy: Annotated[
        list[str] | None,
        Parameter(help="Believe a proxy at this address who asks; may be repeated.", value="ADDRESS"),
    ] = None,
    name_header: Annotated[
        str, Parameter(help="The header in which a trusted proxy names who asks.", value="NAME")
    ] = HEADER_DEFAULT,
    secret_file: Annotated[
        Path | None, Parameter(help="Keep the link's secret here, so that the link holds after a restart.")
    ] = None,
    log_format: FormatOfLog = "text",
    options: Options = DEFAULTS,
) -> int:
    """Serve the fleet as a page for browsers, which need neither a key nor NATS, until Ctrl-C.

    An observer's key shows the map of the fleet and its health, to everybody who reaches the page. An operator's key
    shows the queue, the history of each job, GPU time and usage, too: to those who open the link that is printed, or
    whom a trusted proxy names. The output of jobs is the tenant's: --output-of shows it. It only reads, unless
    --operate is given. It needs the extra page.
    """

    def act() -> int:
        from moorage.schemas.optional import optional

        host, port = _address(listen)
        proxies = _addresses(trusted_proxy or ())
        outputs = dict(map(_of_tenant, output_of or ()))
        for package in ("starlette", "uvicorn", "jinja2"):
            optional(package, "'moorage[page]'")

        begin_log("INFO", log_format)
        logging.getLogger("uvicorn").setLevel("WARNING")

        async def work(client: AsyncClient) -> None:
            from moorage.cli.page.doors import Doors

            with _listening(host, port) as listener:
                doors = Doors(_secret(secret_file), proxies, name_header, local=ipaddress.ip_address(host).is_loopback)
                await _serve(client, options, listener, outputs, doors, operates=operate)

        return with_client(options, work)

    return guarded(options, act)


async def _serve(
    client: AsyncClient,
    options: Options,
    listener: socket.socket,
    outputs: Mapping[str, str],
    doors: Doors,
    *,
    operates: bool,
) -> None:
    from dataclasses import replace

    from moorage.cli.page.server import Page, serving
    from moorage.cli.page.source import Source
    from moorage.system.notify import managed

    async with contextlib.AsyncExitStack() as stack:
        keys = {
            tenant: await stack.enter_async_context(client_of(replace(options, nats=where, tenant=tenant)))
            for tenant, where in outputs.items()
        }
        source = Source(client, keys)
        await source.open()
        stack.push_async_callback(source.close)
        try:
            await source.feed.first()
        except MoorageError as error:
            if error.problem.fault == "caller":
                raise
            print_err(f"no leader answers yet: {error}")
        else:
            _check_key(source, outputs, operates=operates)
            await _check_outputs(keys)
        choose_here(None, None)  # the commands on the pages are for those who look, with keys of their own
        shown = f"{address(*listener.getsockname()[:2])}/"
        asking = asyncio.create_task(source.keep_asking())
        ready, ended = asyncio.Event(), asyncio.Event()
        for number in ENDING:
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        try:
            async with serving(Page(source, doors, operates=operates), [listener]):
                print_err(f"page at {shown}{f'?key={doors.key}' if source.private else ''}, until Ctrl-C")
                ready.set()
                async with managed(ready):
                    await ended.wait()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


def _check_key(source: Source, outputs: Mapping[str, str], *, operates: bool) -> None:
    """Raise `Rejected` for an option that does nothing with this key."""
    if operates and not source.feed.operates:
        raise rejected(
            "failed-precondition", "--operate takes an operator's key, and this one is none",
            next="start the page with --nats operator.NAME, or without --operate",
        )  # fmt: skip
    if outputs and not source.private:
        raise rejected(
            "failed-precondition", "--output-of is for pages of jobs, which an observer's key does not show",
            next="start the page with --nats operator.NAME, or without --output-of",
        )  # fmt: skip


async def _check_outputs(keys: Mapping[str, AsyncClient]) -> None:
    """Raise `Rejected` for a tenant whose jobs its key may not read."""
    for tenant, key in keys.items():
        try:
            await key._wire.answer("ls", {"limit": 1, "history": False}, tenant)
        except NotPermitted:
            raise rejected(
                "failed-precondition", f"--output-of {tenant} names a key that may not read this tenant's jobs",
                next=f"name the tenant's own: --output-of {tenant}=submitter.{tenant}",
            ) from None  # fmt: skip
        except MoorageError:  # no answer now: the page of a job says why its output is not there
            continue


def _address(listen: str) -> tuple[str, int]:
    """Return address and port of `[ADDRESS:]PORT`. Raises `Rejected`, also for a name of a host."""
    host, port = host_and_port(listen)
    try:
        return str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)), port
    except ValueError:
        raise no_address(listen) from None


def _secret(file: Path | None) -> str:
    """Return the secret that the file has, which is made if it is not there. Raises `MoorageError`."""
    from moorage.cli.page.doors import new_key
    from moorage.system.private_files import create_private

    if file is None:
        return new_key()
    try:
        with contextlib.suppress(FileExistsError):
            create_private(file, new_key().encode())
        kept = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        told = problem("failed-precondition", f"cannot keep the secret: {error}", next="name another --secret-file")
        raise MoorageError(told) from None
    if len(kept) < SECRET_CHARS_MIN:
        told = problem(
            "failed-precondition",
            f"{file} has a secret of {len(kept)} characters, at least {SECRET_CHARS_MIN} are needed",
            next="delete the file: a new one is made",
        )
        raise MoorageError(told)
    return kept


def _addresses(proxies: Sequence[str]) -> list[str]:
    found = []
    for proxy in proxies:
        try:
            found.append(str(ipaddress.ip_address(proxy)))
        except ValueError:
            raise rejected(
                "invalid-argument",
                f"--trusted-proxy {proxy} is no address",
                found=proxy,
                allowed="an address of IPv4 or IPv6, as 127.0.0.1",
                next="name the address from which the proxy asks",
            ) from None
    return found


def _of_tenant(text: str) -> tuple[str, str]:
    tenant, _, where = text.partition("=")
    if tenant and where:
        return tenant, where
    raise rejected(
        "invalid-argument",
        f"--output-of {text} names no key",
        found=text,
        allowed="TENANT=WHERE, WHERE a nats context or a URL",
        next="write it as --output-of vision=submitter.vision",
    )


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that listens. Raises `MoorageError` if the address is taken, or is none of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise cannot_listen(host, port, error) from None
    with listener:
        yield listener
