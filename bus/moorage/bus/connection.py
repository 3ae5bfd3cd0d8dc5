"""One connection to NATS, over nats-py, behind the methods of `transport.Transport`.

What it adds to nats-py, each for a trap met there:
- the first connect is retried and bounded; afterwards it reconnects for ever, even when the client closed itself;
- a stopped server is noticed in seconds (pings), and awaited answers then fail at once as `Disconnected`;
- refused permissions, which the server tells asynchronously, reach the caller they concern, and a standing subscription
  that a reload of the server refused is made again once it may be;
- a flush waits for what nats-py has buffered, too: it sends its PING ahead of that;
- handlers are plain functions, called as the messages are read, in the order in which the server sent them;
- a message over max_payload, or with a subject and a reply over its control line, never leaves: the server would cut
  the connection.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import nats.errors
from nats.aio.client import Client

from moorage.bus.contexts import Context, resolve
from moorage.bus.dialing import DEAD_CLIENT, DRAIN_TIMEOUT_S, Behind, Dialer, quietly
from moorage.bus.errors import (
    BadSubject,
    BusError,
    ConnectionClosed,
    Disconnected,
    HandlerFailed,
    PayloadTooLarge,
    PermissionRefused,
    RequestTimeout,
)
from moorage.bus.framing import INBOX_PREFIX_DEFAULT, check_filter, check_line, headers_size_bytes, new_inbox
from moorage.bus.health import State
from moorage.bus.inbox import Answers
from moorage.bus.leaf_names import leaf_of
from moorage.bus.link import Link, OnError, OnRegained, OnState
from moorage.bus.own_login import with_own_login
from moorage.bus.subscription import Subscription
from moorage.bus.transport import Delivery, Handler, Outgoing, Wanted
from moorage.schemas.roles import RIGHTS_ANEW, has_right

__all__ = ["Connection", "State", "connect"]

GIVE_UP_AFTER_S: Final = 10.0
FLUSH_TIMEOUT_S: Final = 5.0
#: After credentials were refused, as repairing them takes a person.
REFUSED_WAIT_S: Final = 2.0
#: A client can end without a call of ours: when closing itself fails, or waits for a server that reads no more. This
#: finds it.
WATCH_INTERVAL_S: Final = 1.0
#: of nats-py's wait for a PONG. One that comes later would stop its reader, so a round trip ends with its client alone
_PONG_TIMEOUT_S: Final = 1_000_000_000

_PERMISSION = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')


class Connection(Link):
    """Made by `connect`. Use it from one event loop."""

    def __init__(
        self,
        context: Context,
        name: str,
        inbox_prefix: str,
        on_state: OnState | None,
        on_error: OnError | None,
        on_regained: OnRegained | None = None,
    ):
        super().__init__(
            name,
            inbox_prefix,
            Answers(new_inbox(inbox_prefix), is_guessable=False),
            State.CONNECTING,
            on_state,
            on_error,
        )
        self.context = context
        self._dialer = Dialer(context, name, inbox_prefix, self._on_client_error, self._on_lost)
        self._client = Client()
        self._behind = Behind()
        self._closing = False
        self._ending: asyncio.Task[None] | None = None
        self._redialing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._on_regained = on_regained
        self._round_trips: set[asyncio.Task[None]] = set()
        self._subscriptions: dict[Subscription, None] = {}  # in their order; one of thousands ends at once

    def __repr__(self) -> str:
        return f"<Connection {self.name!r} {self.context.safe_url} {self.state.value}>"

    # -- the transport ------------------------------------------------------------------------------------------

    async def send(self, batch: Iterable[Outgoing]) -> int:
        """Publish messages in order; they leave in one write. Returns how many were handed to the socket.

        While disconnected, all are dropped: a stale frame sent after a reconnect does more harm than a lost
        one, and every protocol of moorage repairs loss. A message over max_payload, or with a subject that is
        none, is dropped and reported to `on_error`; the others go. Waits only while SOCKET_BACKLOG_BYTES_MAX wait for
        the socket. Raises `ConnectionClosed`.
        """
        if self._closing:
            raise ConnectionClosed(self.name)
        if not self._connected.is_set():
            return 0
        client, bytes_max = self._client, self.max_payload_bytes
        handed = 0
        try:
            for subject, payload, reply in batch:
                if len(payload) > bytes_max:
                    self._report(PayloadTooLarge(subject, len(payload), bytes_max))
                    continue
                try:
                    check_line(subject, reply)
                    await client.publish(subject, payload, reply)
                except BadSubject as error:
                    self._report(error)
                    continue
                except nats.errors.BadSubjectError:
                    self._report(BadSubject(subject, "no blanks in a subject or reply, and not empty"))
                    continue
                handed += 1
        except DEAD_CLIENT:
            self._on_lost(client)  # while this batch was being written; what is left of it is lost like the rest
        return handed

    def _check_sendable(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        """Raise `ConnectionClosed`, or `PayloadTooLarge` or `BadSubject` for what the server would cut the connection
        for."""
        if self._closing:
            raise ConnectionClosed(self.name)
        check_line(subject, reply)
        size_bytes = len(payload) + headers_size_bytes(headers)
        if size_bytes > self.max_payload_bytes:
            raise PayloadTooLarge(subject, size_bytes, self.max_payload_bytes)

    async def publish(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str]) -> bool:
        """Publish one message with headers; return whether it was handed to the socket. While disconnected it is
        dropped.

        Raises `PayloadTooLarge`, `BadSubject`, `ConnectionClosed`, and ValueError for a header that is none.
        """
        self._check_sendable(subject, payload, reply, headers)
        if not self._connected.is_set():
            return False
        client = self._client
        try:
            await client.publish(subject, payload, reply, headers=dict(headers))
        except nats.errors.BadSubjectError:
            raise BadSubject(subject, "no blanks in a subject or reply, and not empty") from None
        except nats.errors.BadHeaderError as error:
            raise ValueError(str(error)) from None
        except DEAD_CLIENT:
            self._on_lost(client)
            return False
        return True

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        """Call `handler` for each message of the subject, in the order in which the server sent them. Between two
        subscriptions there is no order. The handler may only put messages into a bounded queue.

        Return when the server has taken the subscription. Return without that if there is no connection, or no answer
        of the server, within FLUSH_TIMEOUT_S: then the subscription is made with the next connection. Raises
        `PermissionRefused`, `BadSubject`, `ConnectionClosed`.
        """
        subscription = await self.subscribe_ahead(subject, handler, queue)
        try:
            await self.flush(FLUSH_TIMEOUT_S)
        except (RequestTimeout, Disconnected):
            return subscription
        except BaseException:  # cancelled, or closed: nobody has it, so nobody could end it
            await self._forget(subscription)
            raise
        if subscription.refused is not None:
            await self._forget(subscription)
            raise subscription.refused
        return subscription

    async def subscribe_ahead(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        """Subscribe without waiting for the server's answer: the server takes the subscription before anything that is
        sent later.

        Once something sent later has been answered, `refused` of the result tells whether the server refused it. While
        disconnected, the subscription is made with the next connection. Raises `BadSubject`, `ConnectionClosed`.
        """
        if self._closing:
            raise ConnectionClosed(self.name)
        check_filter(subject)
        subscription = Subscription(self._forget, self._retire, self._on_handler_failed, subject, handler, queue)
        self._subscriptions[subscription] = None
        try:
            if self._connected.is_set():
                await self._behind.run(quietly(subscription.start(self._client)))
        except BaseException:  # cancelled: nobody has it, so nobody could end it
            await self._forget(subscription)
            raise
        return subscription

    async def swap(self, ended: Iterable[Subscription], wanted: Iterable[Wanted]) -> list[Subscription]:
        """End subscriptions and make others in their place, by one write: the server takes both together.

        Handlers of those that end still get what the server has sent. While disconnected, the new ones are made with
        the next connection. Raises `BadSubject`, `ConnectionClosed`.
        """
        if self._closing:
            raise ConnectionClosed(self.name)
        former, wanted = list(ended), list(wanted)
        for each in wanted:
            check_filter(each.subject)
        told = self._forget, self._retire, self._on_handler_failed
        made = [Subscription(*told, each.subject, each.handler, "", each.most) for each in wanted]
        self._subscriptions.update(dict.fromkeys(made))

        async def write() -> None:
            for each in former:
                await each.end_at_server()
            for each in made:
                if each.client is None and self._connected.is_set():
                    await quietly(each.start(self._client))

        await self._behind.run(write())
        for old in former:
            self._behind.spawn(self._retire(old))
        return made

    async def reconnect(self) -> None:
        """Drop this connection to the server, with all that waits there for it, and make another one.

        It ends what is awaited, as a lost connection does. Does nothing while disconnected.
        """
        if self._connected.is_set():
            self._dialer.cut(self._client)

    async def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Wait until everything that was sent before has reached the server. Raises `RequestTimeout`, `Disconnected`,
        `ConnectionClosed`."""
        if self._closing:
            raise ConnectionClosed(self.name)
        timeout_s = await self._await_connected("PING", timeout_s)
        round_trip = self._behind.spawn(flush_all(self._client))
        self._round_trips.add(round_trip)
        round_trip.add_done_callback(self._round_trips.discard)
        done, _ = await asyncio.wait({round_trip}, timeout=timeout_s)
        if not done:
            raise RequestTimeout("PING", timeout_s)
        if round_trip.cancelled() or round_trip.exception() is not None:
            raise ConnectionClosed(self.name) if self._closing else Disconnected("PING")

    async def close(self) -> None:
        """Handle the messages that wait, let out those that were sent, and close. May be called again.

        If the caller is cancelled, this goes on by itself, since a half-closed connection would keep its socket for
        ever.
        """
        if self._ending is None:
            self._closing = True
            self._ending = asyncio.create_task(self._close())
        await asyncio.shield(self._ending)

    async def _close(self) -> None:
        await _end(self._watching)
        await _end(self._redialing)
        self._fail_waits()
        if self._connected.is_set():
            await asyncio.wait({self._behind.spawn(quietly(self._client.drain()))}, timeout=DRAIN_TIMEOUT_S)
        await self._drop(self._client)
        for round_trip in self._round_trips:  # nats-py leaves a PING that was not answered waiting for ever
            round_trip.cancel()
        self._move(State.CLOSED)
        self._set_closed()

    async def exchange(
        self,
        answers: Answers,
        subject: str,
        payload: bytes,
        timeout_s: float,
        headers: Mapping[str, str] | None,
        is_last: Callable[[Delivery], bool] | None,
    ) -> list[Delivery]:
        self._check_sendable(subject, payload, answers.base, headers)
        if not self._connected.is_set():
            timeout_s = await self._await_connected(subject, timeout_s)
        token, future = answers.open(subject, timeout_s, is_last)
        client, reply = self._client, answers.reply_subject(token)
        try:
            try:
                await client.publish(subject, payload, reply, headers=dict(headers) if headers else None)
            except nats.errors.BadSubjectError:
                raise BadSubject(subject, "no blanks in a subject, and not empty") from None
            except nats.errors.BadHeaderError as error:
                raise ValueError(str(error)) from None
            except DEAD_CLIENT:  # known here first; a caller that repeats at once would keep nats-py from telling it
                answers.abandon(token)  # nobody reads this future any more: asyncio would log its error
                self._on_lost(client)
                raise Disconnected(subject) from None
            return await future
        finally:
            answers.abandon(token)

    async def _forget(self, subscription: Subscription) -> None:
        self._subscriptions.pop(subscription, None)
        await self._behind.run(subscription.stop())

    async def _retire(self, subscription: Subscription) -> None:
        self._subscriptions.pop(subscription, None)
        await self._behind.run(subscription.finish())

    # -- connecting ---------------------------------------------------------------------------------------------

    async def _open(self, give_up_after_s: float | None) -> None:
        await self._adopt(await self._dialer.dial(give_up_after_s))
        try:
            await self.open_inbox(self._answers)
        except PermissionRefused as refused:
            raise PermissionRefused(refused.operation, refused.subject, self._whose_key()) from None
        self._watching = asyncio.create_task(self._watch())

    def _whose_key(self) -> str:
        """Return what to do where the key's user may not use the inbox of the context; "" if its file is not known."""
        file, prefix = self.context.nkey or self.context.creds, self.inbox_prefix
        if not file or prefix == INBOX_PREFIX_DEFAULT:
            return ""
        user = prefix.removeprefix(f"{INBOX_PREFIX_DEFAULT}.")
        return f"{file} is not the key of {user}, which the context's inbox_prefix names: put the key of {user} there"

    async def _adopt(self, client: Client) -> None:
        """Make `client` the one in use, with every subscription on it."""
        self._client = client
        while behind := [each for each in self._subscriptions if each.client is not client]:
            for subscription in behind:
                await quietly(subscription.start(client))
        if not client.is_connected:
            return
        self.max_payload_bytes = client.max_payload
        version = client.connected_server_version
        self.server_version = f"{version.major}.{version.minor}.{version.patch}"
        self.asks_for_login = bool(client._server_info.get("auth_required"))
        self.is_clustered = bool(client._server_info.get("cluster"))  # of INFO: the cluster's name
        self.leaf = leaf_of(str(client._server_info.get("server_name", "")))
        self.server_at = client.connected_url.netloc.rpartition("@")[2] if client.connected_url else ""
        if self.state is State.RECONNECTING:
            self.reconnects += 1
        self._connected.set()
        self._move(State.CONNECTED)

    async def _drop(self, client: Client) -> None:
        # Each subscription by itself: closing on a dead socket raises before nats-py has ended their tasks.
        for subscription in list(self._subscriptions):
            if subscription.client is client:
                await subscription.stop()
        await self._dialer.abandon(client)

    async def _redial(self) -> None:
        told = False
        while not (self._connected.is_set() or self._closing):
            try:
                await self._drop(self._client)
                await self._adopt(await self._dialer.dial(None))
            except BusError as error:  # credentials or TLS: tell once, and try on, as the server may be repaired
                if not told:
                    self._report(error)
                told = True
                await asyncio.sleep(REFUSED_WAIT_S)
            except Exception as error:  # whatever nats-py or the event loop makes of a dead socket: dial again
                self._report(HandlerFailed("a reconnect", error))
                await asyncio.sleep(REFUSED_WAIT_S)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._connected.is_set() and not self._client.is_connected:
                self._on_lost(self._client)
            elif self._connected.is_set():
                await self._try_refused(asyncio.get_running_loop().time())

    async def _try_refused(self, now_s: float) -> None:
        """Make those subscriptions again that were refused a while ago; `now_s` is the event loop's time."""
        client = self._client
        due = [each for each in self._subscriptions if each.refused is not None and each.again_at_s <= now_s]
        if not due:
            return
        before = {each: each.refused for each in due}
        for each in due:
            if each.client is client:  # else it has ended meanwhile
                await self._behind.run(quietly(each.again(client, now_s)))
        try:
            await self.flush(FLUSH_TIMEOUT_S)
        except BusError:
            return
        regained = [each for each, refused in before.items() if each.client is client and each.refused is refused]
        for each in regained:
            each.holds()
        if regained and self._on_regained is not None:
            self._on_regained([each.subject for each in regained])

    # -- what the client tells ----------------------------------------------------------------------------------

    def _on_lost(self, client: Client) -> None:
        if client is not self._client or self._closing:
            return
        for round_trip in self._round_trips:
            round_trip.cancel()
        self._lost()
        if self._redialing is None or self._redialing.done():
            self._redialing = asyncio.get_running_loop().create_task(self._redial())

    def _on_client_error(self, client: Client, error: Exception) -> None:
        if found := _PERMISSION.search(str(error)):
            operation, subject = found.groups()
            anew = RIGHTS_ANEW if has_right(self.inbox_prefix, operation, subject) else ""
            self._on_refused(PermissionRefused(operation, subject, anew))

    def _on_handler_failed(self, error: BaseException) -> None:
        self._report(HandlerFailed("a subscription", error))

    def _on_refused(self, refused: PermissionRefused) -> None:
        if refused.operation == "publish":
            for table in self._tables:
                table.fail_subject(refused.subject, refused)
        else:
            concerned = [each for each in self._subscriptions if each.subject.lower() == refused.subject]
            known = [each for each in concerned if each.refused is not None]
            for subscription in concerned:
                subscription.refused = refused
            if concerned and concerned == known:
                return  # a further try
        self._report(refused)


async def flush_all(client: Client) -> None:
    """Wait until the server has what this client sent, by two round trips.

    nats-py writes the PING of the first ahead of what it has buffered, a subscription for example.
    """
    for _ in range(2):
        await client.flush(timeout=_PONG_TIMEOUT_S)


async def connect(
    target: Context | str | None,
    name: str,
    *,
    inbox_prefix: str | None = None,
    on_state: OnState | None = None,
    on_error: OnError | None = None,
    on_regained: OnRegained | None = None,
    give_up_after_s: float | None = GIVE_UP_AFTER_S,
) -> Connection:
    """Connect to `target` (see `contexts.resolve`), retrying for `give_up_after_s` seconds (None: for ever).

    A `moorage up` of this user gets its password, if the target has no login. `name` is shown by the server's
    connection list. `on_state`, `on_error` and `on_regained` are called in the event loop and must not block.
    `on_regained` gets the subjects of standing subscriptions that the server had refused and has taken again: their
    messages meanwhile are lost. Raises `CannotConnect`, and at once `BadContext`, `NotAuthorized`, or
    `PermissionRefused` (the user may not subscribe to its inbox).
    """
    context = with_own_login(resolve(target))
    prefix = context.inbox_prefix if inbox_prefix is None else inbox_prefix
    connection = Connection(context, name, prefix, on_state, on_error, on_regained)
    try:
        await connection._open(give_up_after_s)
    except BaseException:
        await connection.close()
        raise
    return connection


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
