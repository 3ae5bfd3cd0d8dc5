"""Get one connected nats-py client for a context, or the cause why there is none.

Each client lives for one socket (`allow_reconnect=False`): nats-py's own reconnect keeps frames to send later, leaves a
socket open for every handshake that fails, and never ends when the client closes itself. So the first sign of loss is
told to `on_lost`, and the connection dials a new client.

A cancelled caller interrupts no call of nats-py, which swallows cancellations in places: the call goes on in the
background (`Behind`), and what it made is closed there.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import nats.errors
import tenacity
from nats.aio.client import Client

from moorage.bus.contexts import Context
from moorage.bus.errors import BadContext, BusError, CannotConnect, NotAuthorized, NotNats
from moorage.bus.reading import Reading

#: A silent server is noticed within about PING_INTERVAL_S * (PINGS_OUTSTANDING_MAX + 1).
PING_INTERVAL_S: Final = 2
PINGS_OUTSTANDING_MAX: Final = 2
#: Of one socket and handshake.
CONNECT_TIMEOUT_S: Final = 2
#: Between attempts: random, growing to the maximum, so that a fleet does not come back in one instant.
RETRY_WAIT_S_MIN: Final = 0.05
RETRY_WAIT_S_MAX: Final = 1.0
DRAIN_TIMEOUT_S: Final = 5
#: How often a handshake is begun with a server that answers it in the open. With `handshake_first: auto` it does so to
#: a client whose first bytes come later than 50 ms, as on a busy machine.
HANDSHAKES_MAX: Final = 4
#: How long a close is waited for. With bytes unsent to a server that reads no more it ends only with the socket.
CLOSE_TIMEOUT_S: Final = 1.0
#: Bytes that wait for the socket before a publish itself waits.
SOCKET_BACKLOG_BYTES_MAX: Final = 8 * 1024 * 1024
#: Longest such wait; without it a publish whose socket dies meanwhile would wait for ever.
BACKLOG_WAIT_S_MAX: Final = 2.0

#: What touching a client without a living socket may raise: asyncio's transports OSError, uvloop's RuntimeError, and
#: from Python 3.12 to 3.13.6 `writelines` of a lost socket TypeError.
DEAD_CLIENT: Final = (nats.errors.Error, OSError, AssertionError, RuntimeError, TypeError)

#: what asyncio warns of at the end of each connection that `start_tls` encrypted, as nats-py's readers do not know that
_END_OF_TLS: Final = "returning true from eof_received() has no effect when using ssl"
logging.getLogger("asyncio").addFilter(lambda record: record.msg != _END_OF_TLS)


def _shorten(record: logging.LogRecord) -> bool:
    """Make one line of how nats-py's reader ended where its socket was gone, as after a pause of this process: the
    traceback says nothing of moorage, and that the connection is lost is logged beside it."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, DEAD_CLIENT):
        record.msg, record.args, record.exc_info = "%s, as its socket was gone: %s", (record.getMessage(), error), None
    return True


logging.getLogger("nats.aio.client").addFilter(_shorten)

_TRUST: Final = "set ca in the context to the authority of the server's certificate, and name the server as that does"

#: OpenSSL's words for an answer that is no TLS
_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})

_HANDSHAKE_FIRST: Final = (
    "set `handshake_first: auto` in the tls block of the server, which needs nats-server 2.10 or newer; or, to connect"
    " without TLS, use a nats:// URL, and set neither ca nor cert nor tls_first"
)

_CERTIFICATE: Final = "set cert and key in the context to a pair that the server's authority has signed"

OnError = Callable[[Client, Exception], None]
OnLost = Callable[[Client], None]
T = TypeVar("T")


class AnsweredInTheOpen(BadContext):
    """The server answered the beginning of TLS in the open."""


class Behind:
    """Calls of nats-py that no cancellation of their callers interrupts."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a call. It goes on whatever becomes of the caller; what it raises is for those who await it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a call; if the caller is cancelled, the call goes on in the background."""
        return await asyncio.shield(self.spawn(work))

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio warns of exceptions that nobody has asked for


class Dialer:
    """Dials one context again and again. `on_error` and `on_lost` are called for clients that were connected once."""

    def __init__(self, context: Context, name: str, inbox_prefix: str, on_error: OnError, on_lost: OnLost) -> None:
        self._context = context
        self._name = name
        self._inbox_prefix = inbox_prefix
        self._on_error = on_error
        self._on_lost = on_lost
        self._connected: Client | None = None  # the last one that was
        self._gossiped: list[str] = []
        self._behind = Behind()

    async def dial(self, give_up_after_s: float | None) -> Client:
        """Return a connected client. While no server is reached, tries again for `give_up_after_s` seconds (None: for
        ever).

        Raises `CannotConnect`, and at once `NotAuthorized` and `BadContext`; that the server offers no TLS at the start
        is asked for `HANDSHAKES_MAX` times.
        """
        in_the_open = 0

        def may_pass(error: BaseException) -> bool:
            nonlocal in_the_open
            if isinstance(error, AnsweredInTheOpen):
                in_the_open += 1
                return in_the_open < HANDSHAKES_MAX
            return isinstance(error, CannotConnect)

        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_never if give_up_after_s is None else tenacity.stop_after_delay(give_up_after_s),
            wait=tenacity.wait_random_exponential(multiplier=RETRY_WAIT_S_MIN, max=RETRY_WAIT_S_MAX),
            retry=tenacity.retry_if_exception(may_pass),
            reraise=True,
        )
        return await attempts(self._dial_once)

    async def _dial_once(self) -> Client:
        client = Reading()
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

        servers = self._context.servers
        if self._connected is not None:  # its server tells of others as they come, not only at first
            self._gossiped = [uri.geturl() for uri in self._connected.discovered_servers] or self._gossiped
        connecting = self._behind.spawn(
            client.connect(
                [*servers, *(url for url in self._gossiped if url not in servers)],
                name=self._name,
                inbox_prefix=self._inbox_prefix,
                error_cb=on_error,
                disconnected_cb=on_lost,
                closed_cb=on_lost,
                **_options(self._context),
            )
        )
        try:
            await asyncio.wait({connecting})
        except asyncio.CancelledError:  # no caller will close this client, and the event loop may end next
            await asyncio.wait({self._behind.spawn(self._give_up(client, connecting))}, timeout=2 * CLOSE_TIMEOUT_S)
            raise
        # nats-py lets out cancellations of tasks of its own that it awaits
        error = ConnectionError("nats-py gave up") if connecting.cancelled() else connecting.exception()
        if isinstance(error, nats.errors.Error | OSError | TimeoutError):
            await self.abandon(client)
            # a server that cannot be reached is told to `on_error` alone; what is raised then is that none is left
            was_heard = not isinstance(error, nats.errors.NoServersError)
            raise self._why_not(causes[0] if causes else error, was_heard) from None
        if error is not None:
            raise error
        connected = True
        self._connected = client
        return client

    def cut(self, client: Client) -> None:
        """End a client's connection to the server at once; it tells of that as of a lost one."""
        writer = getattr(client._transport, "_bare_io_writer", None)  # None over WebSockets
        if writer is not None:
            writer.transport.abort()
        else:
            self._on_lost(client)

    async def abandon(self, client: Client) -> None:
        """Close a client that may never have connected, or whose socket is dead; takes CLOSE_TIMEOUT_S at most."""
        await asyncio.wait({self._behind.spawn(_close(client))})

    async def _give_up(self, client: Client, connecting: asyncio.Task[None]) -> None:
        while not connecting.done():
            connecting.cancel()  # again, as `wait_for` of Python 3.11 loses one that comes with an answer
            await asyncio.wait({connecting}, timeout=0.1)
        await self.abandon(client)

    def _why_not(self, cause: Exception, was_heard: bool) -> BusError:
        text = str(cause).lower()
        if "authorization violation" in text or "authentication" in text:
            why = str(cause).removeprefix("nats: ")
            return NotAuthorized(self._context.where, why, has_login=self._context.has_login)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return BadContext(f"TLS: {cause.verify_message}", key="ca", next_step=_TRUST)
        if "CERTIFICATE_REQUIRED" in str(cause):
            return BadContext("TLS: the server asks for a certificate of ours", key="cert", next_step=_CERTIFICATE)
        if isinstance(cause, ssl.SSLError) and cause.reason in _NOT_TLS:
            return AnsweredInTheOpen(
                f"TLS: the server at {self._context.where} offers none at the start of a connection,"
                " and nothing was sent to it",
                key="url",
                next_step=_HANDSHAKE_FIRST,
            )
        if was_heard and (isinstance(cause, TimeoutError) or "INFO message" in str(cause)):
            # a first line in the open that comes before nats-py begins to encrypt is lost, and both sides wait
            return NotNats(self._context.where, _HANDSHAKE_FIRST if _encrypts_first(self._context) else "")
        return CannotConnect(self._context.where, cause)


async def _close(client: Client) -> None:
    """Close a client, and its socket whatever nats-py makes of that: it may stop halfway, or wait for a server that
    reads no more."""
    transport: Any = client._transport
    writer = getattr(transport, "_bare_io_writer", None)  # None over WebSockets
    if writer is not None and client._reading_task is None:
        client._transport = None  # never connected: nats-py would wait for ever for the end of a failed TLS handshake
    try:
        if client.options and not client.is_closed:
            await quietly(asyncio.wait_for(client.close(), CLOSE_TIMEOUT_S))
    finally:
        if writer is not None:
            writer.transport.abort()


async def quietly(awaitable: Awaitable[object]) -> None:
    """Await something and ignore the errors of a dead connection."""
    try:
        await awaitable
    except DEAD_CLIENT:
        pass


def _over_web_sockets(context: Context) -> bool:
    return any(server.startswith(("ws://", "wss://")) for server in context.servers)


def _encrypts_first(context: Context) -> bool:
    return context.tls() is not None and not _over_web_sockets(context)


def _options(context: Context) -> dict[str, Any]:
    """Return what nats-py is told of a context. Raises `BadContext` for a key or certificate that cannot be used."""
    context.check_login()
    user, password, token = context.login
    options: dict[str, Any] = {
        "allow_reconnect": False,
        # of the first connect: every server that cannot be reached is tried twice, then the cause is known
        "max_reconnect_attempts": 1,
        "reconnect_time_wait": RETRY_WAIT_S_MIN,
        "connect_timeout": CONNECT_TIMEOUT_S,
        "ping_interval": PING_INTERVAL_S,
        "max_outstanding_pings": PINGS_OUTSTANDING_MAX,
        "drain_timeout": DRAIN_TIMEOUT_S,
        "pending_size": SOCKET_BACKLOG_BYTES_MAX,
        "flush_timeout": BACKLOG_WAIT_S_MAX,
        "tls": context.tls(),
        # without it nats-py encrypts only if the first line of the server says so, and that line can be forged
        "tls_handshake_first": _encrypts_first(context),
        "user": user or None,
        "password": password if user else None,
        "token": token or None,
    }
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


def _sign(seed: str, nonce: str) -> bytes:
    import nkeys  # loads libsodium, which most connections do not need

    return base64.b64encode(nkeys.from_seed(bytearray(seed.encode())).sign(nonce.encode()))
