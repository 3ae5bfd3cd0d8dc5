"""`moorage page`: the fleet for browsers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import choose_here, print_err
from moorage.cli.framework.listening import address, listening, own_address, until_ended
from moorage.cli.framework.options import DEFAULTS, FormatOfLog, Options, client_of, guarded, with_client
from moorage.client.errors import NotPermitted, rejected
from moorage.schemas.errors import MoorageError
from moorage.system.logged import begin_log

if TYPE_CHECKING:
    from moorage.cli.page.doors import Doors
    from moorage.cli.page.source import Source
    from moorage.client.client import AsyncClient

LISTEN_DEFAULT: Final = "127.0.0.1:9480"
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
        Parameter(
            help="Believe a proxy at this address who asks; may be repeated. It takes --proxy-secret-file and "
            "--public-url.",
            value="ADDRESS",
        ),
    ] = None,
    proxy_secret_file: Annotated[
        Path | None,
        Parameter(
            help="The secret by which a trusted proxy proves itself, in the header X-Moorage-Proxy; made if missing."
        ),
    ] = None,
    public_url: Annotated[
        str | None,
        Parameter(
            help="Where browsers reach the page behind a proxy: no other name is answered, and with https the cookie "
            "needs TLS.",
            value="URL",
        ),
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

        host, port = own_address(listen)
        public = _public(public_url) if public_url is not None else ""
        proxies = _addresses(trusted_proxy or ())
        _check_proxy(trusted_proxy or (), proxy_secret_file, public)
        outputs = dict(map(_of_tenant, output_of or ()))
        for package in ("starlette", "uvicorn", "jinja2"):
            optional(package, extra="page")

        begin_log("INFO", log_format)
        logging.getLogger("uvicorn").setLevel("WARNING")

        async def work(client: AsyncClient) -> None:
            from moorage.cli.page.doors import Doors, Proxy
            from moorage.cli.page.secret import Secret

            with listening(host, port) as listener:
                proxy = Proxy(proxies, name_header, Secret(proxy_secret_file)) if proxies else None
                doors = Doors(Secret(secret_file), proxy, public, local=ipaddress.ip_address(host).is_loopback)
                own = address(*listener.getsockname()[:2])
                if public:
                    print_err(f"serving {public} at {own}")
                shown = f"{public or own}/"
                await _serve(client, options, listener, outputs, doors, shown, operates=operate)

        return with_client(options, work)

    return guarded(options, act)


async def _serve(
    client: AsyncClient,
    options: Options,
    listener: socket.socket,
    outputs: Mapping[str, str],
    doors: Doors,
    shown: str,
    *,
    operates: bool,
) -> None:
    from dataclasses import replace

    from moorage.cli.page.server import Page, serving
    from moorage.cli.page.source import Source

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
        made = Page(source, doors, shown, operates=operates)
        asking = asyncio.create_task(source.keep_asking())
        serve = until_ended()
        try:
            async with serving(made, [listener]):
                await serve(f"page at {made.link}")
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


def _public(url: str) -> str:
    """Return the public URL without a final slash. Raises `Rejected` unless it is http or https, a host and a port."""
    parts = urlsplit(url)
    try:
        is_plain = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
        if parts.scheme in ("http", "https") and parts.hostname and is_plain and parts.port != 0:
            return f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        pass
    raise rejected(
        "invalid-argument", f"--public-url {url} is no URL of a page", found=url,
        allowed="http or https, a host, a port if it is another one, and no path",
        next="write it as --public-url https://fleet.example.com",
    )  # fmt: skip


def _check_proxy(trusted: Sequence[str], secret_file: Path | None, public: str) -> None:
    """Raise `Rejected` if a trusted proxy lacks what it proves itself with, or the other way round."""
    missing = [
        option
        for option, given in (("--proxy-secret-file FILE", secret_file), ("--public-url URL", public))
        if not given
    ]
    if trusted and missing:
        raise rejected(
            "invalid-argument",
            f"--trusted-proxy takes {' and '.join(missing)} too: every user and job of the proxy's host asks from its "
            "address, and could name anybody",
            next="--proxy-secret-file /var/lib/moorage/proxy.key (made if missing): the proxy sends its content in the "
            "header X-Moorage-Proxy; --public-url https://fleet.example.com: the name under which browsers come",
        )
    if secret_file is not None and not trusted:
        raise rejected(
            "invalid-argument", "--proxy-secret-file is for --trusted-proxy, which is not given",
            next="name the address from which the proxy asks: --trusted-proxy 127.0.0.1",
        )  # fmt: skip


def _addresses(proxies: Sequence[str]) -> frozenset[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found = set()
    for proxy in proxies:
        try:
            found.add(ipaddress.ip_address(proxy))
        except ValueError:
            raise rejected(
                "invalid-argument",
                f"--trusted-proxy {proxy} is no address",
                found=proxy,
                allowed="an address of IPv4 or IPv6, as 127.0.0.1",
                next="name the address from which the proxy asks",
            ) from None
    return frozenset(found)


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
