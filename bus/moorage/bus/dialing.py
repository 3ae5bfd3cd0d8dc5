"""Get one connected nats-py client for a context, or the cause why there is none.

Each client lives for one socket. nats-py's own reconnect leaves a socket open for every handshake that fails (seen with
refused credentials and with a stopped server), keeps frames to send later, and never ends when the client closes
itself. So the first sign of loss is told to `on_lost`, and the connection dials a new client.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Final

import tenacity

from moorage.bus.contexts import Context
from moorage.bus.direct import DirectClient, NotEncrypted
from moorage.bus.errors import BadContext, BusError, CannotConnect, NotAuthorized, NotNats
from moorage.bus.nats_py import Client, load_web_sockets, nats

#: A silent server is noticed within about PING_INTERVAL_S * (PINGS_OUTSTANDING_MAX + 1).
PING_INTERVAL_S: Final = 2
PINGS_OUTSTANDING_MAX: Final = 2
#: Of one socket and handshake.
CONNECT_TIMEOUT_S: Final = 2
#: Between attempts: random, growing to the maximum, so that a fleet does not come back in one instant.
RETRY_WAIT_S_MIN: Final = 0.05
RETRY_WAIT_S_MAX: Final = 1.0
DRAIN_TIMEOUT_S: Final = 5
#: Bytes that wait for the socket before a publish itself waits.
SOCKET_BACKLOG_BYTES_MAX: Final = 8 * 1024 * 1024
#: Longest such wait; without it a publish whose socket dies meanwhile would wait for ever.
BACKLOG_WAIT_S_MAX: Final = 2.0

#: What touching a client without a living socket may raise: asyncio's transports OSError, uvloop's RuntimeError.
DEAD_CLIENT: Final = (nats.errors.Error, OSError, AssertionError, RuntimeError)

_TRUST: Final = "set ca in the context to the authority of the server's certificate, and name the server as that does"

_CERTIFICATE: Final = "set cert and key in the context to a pair that the server's authority has signed"

OnError = Callable[[DirectClient, Exception], None]
OnLost = Callable[[DirectClient], None]


class Dialer:
    """Dials one context again and again. `on_error` and `on_lost` are called for clients that were connected once."""

    def __init__(self, context: Context, name: str, inbox_prefix: str, on_error: OnError, on_lost: OnLost) -> None:
        self._context = context
        self._name = name
        self._inbox_prefix = inbox_prefix
        self._on_error = on_error
        self._on_lost = on_lost
        self._connected: DirectClient | None = None  # the last one that was
        self._gossiped: list[str] = []

    async def dial(self, give_up_after_s: float | None) -> DirectClient:
        """Return a connected client. While no server is reached, tries again for `give_up_after_s` seconds (None: for
        ever).

        Raises `CannotConnect`, and at once `NotAuthorized` and `BadContext`.
        """
        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_never if give_up_after_s is None else tenacity.stop_after_delay(give_up_after_s),
            wait=tenacity.wait_random_exponential(multiplier=RETRY_WAIT_S_MIN, max=RETRY_WAIT_S_MAX),
            retry=tenacity.retry_if_exception_type(CannotConnect),
            reraise=True,
        )
        return await attempts(self._dial_once)

    async def _dial_once(self) -> DirectClient:
        client = DirectClient(encrypted=self._context.tls() is not None)
        causes: list[Exception] = []
        connected = False

        async def on_error(error: Exception) -> None:
            if connected:
                self._on_error(client, error)
            else:
                causes[:] = [error]

        async def on_lost() -> None:
            if connected:
                self._on_lost(client)

        options = _options(self._context)
        servers = self._context.servers
        if any(server.startswith(("ws://", "wss://")) for server in servers):
            load_web_sockets()
        if self._connected is not None:  # its server tells of others as they come, not only at first
            self._gossiped = [uri.geturl() for uri in self._connected.discovered_servers] or self._gossiped
        try:
            await client.connect(
                [*servers, *(url for url in self._gossiped if url not in servers)],
                name=self._name,
                inbox_prefix=self._inbox_prefix,
                error_cb=on_error,
                disconnected_cb=on_lost,
                closed_cb=on_lost,
                **options,
            )
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await abandon(client)
            raise self._why_not(causes[0] if causes else error, client.was_heard) from None
        except BaseException:
            await abandon(client)
            raise
        connected = True
        client.read_at_once()
        self._connected = client
        return client

    def _why_not(self, cause: Exception, was_heard: bool) -> BusError:
        text = str(cause).lower()
        if "authorization violation" in text or "authentication" in text:
            return NotAuthorized(self._context.where, str(cause).removeprefix("nats: "))
        if isinstance(cause, ssl.SSLCertVerificationError):
            return BadContext(f"TLS: {cause.verify_message}", key="ca", next_step=_TRUST)
        if "CERTIFICATE_REQUIRED" in str(cause):
            return BadContext("TLS: the server asks for a certificate of ours", key="cert", next_step=_CERTIFICATE)
        if isinstance(cause, NotEncrypted):
            return BadContext(
                f"TLS: the server at {self._context.where} offers none, and nothing was sent to it",
                key="url",
                next_step="turn TLS on at the server (its tls block); or, to connect without TLS, use a nats:// URL,"
                " and set neither ca nor cert nor tls_first",
            )
        if was_heard and (isinstance(cause, TimeoutError) or "INFO message" in str(cause)):
            return NotNats(self._context.where)
        return CannotConnect(self._context.where, cause)


async def abandon(client: Client) -> None:
    """Close a client that may never have connected, or whose socket is dead; what it had not written is lost."""
    # Private, as nats-py offers no abort: with bytes unsent to a server that reads no more, its close never ends.
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if isinstance(writer, asyncio.StreamWriter):
        # a transport with TLS that was closed twice fails here (CPython before 3.11.4): nothing of it is left to end
        with contextlib.suppress(AttributeError):
            writer.transport.abort()
    try:
        if client.options and not client.is_closed:
            await client.close()
    except DEAD_CLIENT:
        pass  # it had not come as far as a socket, or has none any more


async def quietly(awaitable: Awaitable[object]) -> None:
    """Await something and ignore the errors of a dead connection."""
    try:
        await awaitable
    except DEAD_CLIENT:
        pass


def _options(context: Context) -> dict[str, Any]:
    user, password, token = context.login
    options: dict[str, Any] = {
        "allow_reconnect": True,
        # Only the handshake's: every server is tried twice, then the cause is known.
        "max_reconnect_attempts": 1,
        "reconnect_time_wait": RETRY_WAIT_S_MIN,
        "connect_timeout": CONNECT_TIMEOUT_S,
        "ping_interval": PING_INTERVAL_S,
        "max_outstanding_pings": PINGS_OUTSTANDING_MAX,
        "drain_timeout": DRAIN_TIMEOUT_S,
        "pending_size": SOCKET_BACKLOG_BYTES_MAX,
        "flush_timeout": BACKLOG_WAIT_S_MAX,
        "tls": context.tls(),
        "tls_handshake_first": context.tls_first,
        "user": user or None,
        "password": password if user else None,
        "token": token or None,
    }
    if context.creds or context.nkey or context.user_seed:
        _nkeys()
    if context.creds:
        options["user_credentials"] = context.creds
    elif context.user_jwt:
        options["user_jwt_cb"] = lambda: bytearray(context.user_jwt.encode())
        options["signature_cb"] = lambda nonce: _sign(context.user_seed, nonce)
    elif context.nkey:
        options["nkeys_seed"] = context.nkey
    elif context.user_seed:
        options["nkeys_seed_str"] = context.user_seed
    return options


def _nkeys() -> Any:
    try:
        return importlib.import_module("nkeys")
    except ImportError:
        raise BadContext(
            "creds and nkeys need the package `nkeys`", key="creds", next_step="pip install 'nats-py[nkeys]'"
        ) from None


def _sign(seed: str, nonce: str) -> bytes:
    return base64.b64encode(_nkeys().from_seed(bytearray(seed.encode())).sign(nonce.encode()))
