"""`moorage door`: an HTTP door to services."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import urlsplit

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err
from moorage.cli.framework.listening import FD_VARIABLE, address, listening, own_address, until_ended
from moorage.cli.framework.options import DEFAULTS, FormatOfLog, Options, client_of, guarded, with_client
from moorage.client.durations import seconds
from moorage.client.errors import rejected
from moorage.schemas.units import size_bytes
from moorage.system.logged import begin_log

if TYPE_CHECKING:
    from moorage.cli.door.keys import Keyring
    from moorage.cli.door.server import Limits
    from moorage.client.client import AsyncClient

LISTEN_DEFAULT: Final = "127.0.0.1:9490"


class _Made(NamedTuple):
    """What the options say."""

    keyring: Keyring | None
    others: dict[str, str]
    origins: list[str]
    limits: Limits
    tls: ssl.SSLContext | None


def door(
    *,
    listen: Annotated[
        str, Parameter(help="Where callers find it; without an address, on 127.0.0.1.", value="[ADDRESS:]PORT")
    ] = LISTEN_DEFAULT,
    keys: Annotated[
        Path | None,
        Parameter(
            help="The file of callers' keys, which moorage door key add makes. Without one it only listens here."
        ),
    ] = None,
    tenant_key: Annotated[
        list[str] | None,
        Parameter(
            help="Call another tenant's services for its keys, with this context or URL; may be repeated.",
            value="TENANT=WHERE",
        ),
    ] = None,
    origin: Annotated[
        list[str] | None,
        Parameter(help="Pages of this origin may call, from browsers; may be repeated.", value="URL"),
    ] = None,
    tls_cert: Annotated[
        Path | None, Parameter(help="Answer by TLS, with this certificate and its chain (PEM).")
    ] = None,
    tls_key: Annotated[Path | None, Parameter(help="The key of the certificate (PEM).")] = None,
    start: Annotated[
        str, Parameter(help="How long a call may wait for a place, or for its service to start.", value="DURATION")
    ] = "5m",
    idle: Annotated[str, Parameter(help="How long an answer may pause between two parts.", value="DURATION")] = "10m",
    body: Annotated[str, Parameter(help="The largest body that it takes.", value="SIZE")] = "64MiB",
    log_format: FormatOfLog = "text",
    options: Options = DEFAULTS,
) -> int:
    """Let clients of OpenAI's API, and any of HTTP, call the services of a tenant, until Ctrl-C.

    POST /v1/chat/completions, /v1/embeddings and the like go to the service that serves the body's model, as submit
    --models names them. /v1/models lists those. /svc/NAME/PATH reaches any path that the service NAME lets callers
    reach. Streams pass as they come; a caller that leaves ends its call. Without --keys it answers on this machine
    alone. It holds no state: run as many doors as needed. It needs the extra http.
    """

    def act() -> int:
        from moorage.schemas.optional import optional

        host, port = own_address(listen)
        origins = [_origin(each) for each in origin or ()]
        tls = _tls(tls_cert, tls_key)
        optional("aiohttp", extra="http")
        from moorage.cli.door.keys import Keyring
        from moorage.cli.door.server import Limits

        keyring = None if keys is None else Keyring(keys)
        if keyring is None and not ipaddress.ip_address(host).is_loopback:
            raise rejected(
                "failed-precondition", f"without keys a door listens on this machine alone, not at {host}",
                found=listen, next="make keys: moorage door key add NAME --keys FILE; and start it with --keys FILE",
            )  # fmt: skip
        others = dict(_of_tenant(each) for each in tenant_key or ())
        limits = Limits(seconds(start), seconds(idle), _size(body))
        made = _Made(keyring, others, origins, limits, tls)
        begin_log("INFO", log_format)
        logging.getLogger("aiohttp").setLevel("WARNING")
        logging.getLogger("aiohttp.server").setLevel("CRITICAL")  # it logs a traceback of each request that is none

        async def work(client: AsyncClient) -> None:
            with listening(host, port, os.environ.get(FD_VARIABLE, "")) as listener:
                own = address(*listener.getsockname()[:2])
                shown = own.replace("http:", "https:", 1) if tls is not None else own
                await _serve(client, options, made, listener, shown)

        return with_client(options, work)

    return guarded(options, act)


async def _serve(client: AsyncClient, options: Options, made: _Made, listener: socket.socket, shown: str) -> None:
    from dataclasses import replace

    from moorage.cli.door.models import Models
    from moorage.cli.door.server import Door, serving

    async with contextlib.AsyncExitStack() as stack:
        models = {client._wire.tenant: Models(client)}
        for tenant, where in made.others.items():
            other = await stack.enter_async_context(client_of(replace(options, nats=where, tenant=tenant)))
            models[tenant] = Models(other)
        serve = until_ended()
        opened = Door(models, made.keyring, made.origins, made.limits)
        async with serving(opened, [listener], made.tls):
            if made.keyring is not None and not made.keyring.tenants:
                print_err("warning: the file has no keys, so nobody may call: moorage door key add NAME")
            await serve(f"door at {shown}/v1")
            if opened.requests:
                print_err(f"calls that run, which may end within a minute: {opened.requests} (again ends them)")


def _origin(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.netloc and parts.path in ("", "/") and not parts.query:
        return f"{parts.scheme}://{parts.netloc}"
    raise rejected(
        "invalid-argument", f"--origin {url} is no origin of pages", found=url, allowed="https://HOST or http://HOST:PORT",
        next="name the pages' scheme, host and port; * is none",
    )  # fmt: skip


def _of_tenant(text: str) -> tuple[str, str]:
    tenant, equals, where = text.partition("=")
    if not (tenant and equals and where):
        raise rejected(
            "invalid-argument", f"--tenant-key {text} names no tenant with its key", found=text, allowed="TENANT=WHERE",
            next="for example --tenant-key vision=caller.vision.door1",
        )  # fmt: skip
    return tenant, where


def _size(text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError as error:
        raise rejected("invalid-argument", f"--body: {error}", found=text, next="for example --body 256MiB") from None


def _tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise rejected("invalid-argument", "TLS takes both --tls-cert and --tls-key", next="name both files")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise rejected(
            "failed-precondition", f"{cert} and {key} are no certificate and its key: {error}", next="name PEM files"
        ) from None
    return context
