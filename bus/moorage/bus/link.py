"""What every connection has, to a real server or to a simulated one: its state, and the answers it awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Self

from moorage.bus.errors import BusError, ConnectionClosed, Disconnected, RequestTimeout
from moorage.bus.health import STATE_MOVES, State
from moorage.bus.inbox import Answers
from moorage.bus.transport import Delivery, Handler, Subscribed

OnState = Callable[[State], None]
OnError = Callable[[BusError], None]
OnRegained = Callable[[list[str]], None]


class Link:
    """The part of a connection that does not depend on what carries its messages.

    `closed` is set by `close` alone, and stays set: a lost connection is always made again.
    """

    def __init__(
        self,
        name: str,
        inbox_prefix: str,
        answers: Answers,
        state: State,
        on_state: OnState | None,
        on_error: OnError | None,
    ) -> None:
        self.name = name
        self.state = state
        self.closed = asyncio.Event()
        #: how often it was connected again
        self.reconnects = 0
        self.max_payload_bytes = 0
        #: whether that server asks who connects: then it may have permissions, for others too
        self.leaf = ""
        self.asks_for_login = False
        #: of the server connected last, e.g. `2.15.1`
        self.server_version = ""
        #: its host and port; "" before there was one
        self.server_at = ""
        #: whether it says that it is one of a cluster, also while it is the only one that runs
        self.is_clustered = False
        self._inbox_prefix = inbox_prefix
        self._answers = answers
        self._tables: list[Answers] = []
        self._connected = asyncio.Event()
        self._on_state = on_state
        self._on_error = on_error
        self._on_back: list[Callable[[], None]] = []

    @property
    def inbox_prefix(self) -> str:
        return self._inbox_prefix

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    @property
    def late_answers(self) -> int:
        """Replies that came after their request had ended; they were dropped."""
        return self._answers.late + sum(table.late for table in self._tables if table is not self._answers)

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Delivery:
        """Send one message and wait for one answer, which comes to this connection's own standing inbox.

        While disconnected, waits for the connection, within `timeout_s`. Raises `NoResponders`, `RequestTimeout`,
        `Disconnected` (sent, answer unknown), `PermissionRefused`, `PayloadTooLarge`, `BadSubject`, `TooManyWaiting`,
        `ConnectionClosed`.
        """
        return (await self.exchange(self._answers, subject, payload, timeout_s, headers, None))[0]

    async def request_many(
        self, subject: str, payload: bytes, idle_timeout_s: float, is_last: Callable[[Delivery], bool]
    ) -> list[Delivery]:
        """Send one message and return its answers, up to the first for which `is_last` is true, that one included.

        `idle_timeout_s` is the longest silence before an answer. Raises as `request`: `RequestTimeout` also if some
        answers have come and the last one has not.
        """
        return await self.exchange(self._answers, subject, payload, idle_timeout_s, None, is_last)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- what carries the messages --------------------------------------------------------------------------------

    def after_read(self, call: Callable[[], None]) -> None:
        """Call a function in the next turn of the loop: the handlers have then had all messages that were read together
        with the present one. The function may not raise.
        """
        asyncio.get_running_loop().call_soon(call)

    def after_write(self, call: Callable[[], None]) -> None:
        """Call a function once what is sent in this turn of the loop is with the socket: nats-py writes in the next
        turn, and this is the one behind it. The function may not raise.
        """
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, call)

    async def written(self) -> None:
        """Wait until what was sent in this turn of the loop is with the socket, as `after_write`."""
        await asyncio.sleep(0)

    def on_back(self, call: Callable[[], None]) -> None:
        """Call a function each time this is connected again, ahead of all that is sent from then on. It may not
        raise."""
        self._on_back.append(call)

    async def regained(self) -> None:
        """Wait until connected. Raises `ConnectionClosed` once this connection is closed."""
        await self._connected.wait()
        if self.closed.is_set():
            raise ConnectionClosed(self.name)

    async def publish(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str]) -> bool:
        raise NotImplementedError

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscribed:
        raise NotImplementedError

    async def subscribe_ahead(self, subject: str, handler: Handler, queue: str = "") -> Subscribed:
        raise NotImplementedError

    async def exchange(
        self,
        answers: Answers,
        subject: str,
        payload: bytes,
        timeout_s: float,
        headers: Mapping[str, str] | None,
        is_last: Callable[[Delivery], bool] | None,
    ) -> list[Delivery]:
        """Publish with a numbered reply subject, await the replies to that number, and return them.

        They are one reply, or with `is_last` all up to the first for which it is true. Raises as `request`.
        """
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    # -- inboxes (see inbox.py) ---------------------------------------------------------------------------------

    async def open_inbox(self, answers: Answers) -> Subscribed:
        """Subscribe the inbox of `answers`. Unless they outlive it, its waits end with an error when this connection is
        lost."""
        subscription = await self.subscribe(answers.wildcard, answers.deliver)
        self._tables.append(answers)
        return subscription

    async def close_inbox(self, answers: Answers, subscription: Subscribed) -> None:
        answers.fail_all(lambda _: ConnectionClosed(self.name))
        if answers in self._tables:
            self._tables.remove(answers)
        await subscription.unsubscribe()

    # -- within -------------------------------------------------------------------------------------------------

    async def _await_connected(self, subject: str, timeout_s: float) -> float:
        """Wait until connected, and return what is left of `timeout_s`.

        Raises `RequestTimeout`, and `ConnectionClosed` as soon as this connection is closed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        except TimeoutError:
            raise RequestTimeout(subject, timeout_s) from None
        if self.closed.is_set():
            raise ConnectionClosed(self.name)
        return max(deadline - loop.time(), 0.001)

    def _lost(self) -> None:
        """End everything that is awaited, with `Disconnected`, but for what outlives this."""
        self._connected.clear()
        for table in self._tables:
            if not table.outlives_breaks:
                table.fail_all(Disconnected)
        self._move(State.RECONNECTING)

    def _fail_waits(self) -> None:
        for table in self._tables:
            table.fail_all(lambda _: ConnectionClosed(self.name))

    def _set_closed(self) -> None:
        self.closed.set()
        self._connected.set()  # wakes those that wait for a connection
        self._connected.clear()

    def _report(self, error: BusError) -> None:
        if self._on_error is not None:
            self._on_error(error)

    def _move(self, state: State) -> None:
        if state is self.state:
            return
        if state not in STATE_MOVES[self.state]:
            raise RuntimeError(f"connection {self.name!r}: no move from {self.state.value} to {state.value}")
        before, self.state = self.state, state
        if self._on_state is not None:
            self._on_state(state)
        if before is State.RECONNECTING and state is State.CONNECTED:
            for each in self._on_back:
                each()
