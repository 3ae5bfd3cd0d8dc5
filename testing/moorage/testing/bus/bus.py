"""A simulated NATS in this process: the surface of `connection.Connection` over a faulty network, for tests.

    clock, bus = SimulatedClock(), SimulatedBus(FaultyNetwork(seed=7, delay_ms=(1, 30), drop=0.01))

    async def scene() -> None:
        async with bus.connect("a") as a, bus.connect("b") as b:
            await b.subscribe("greet", lambda message: …)
            …

    clock.run(scene())

The production JetStream helper, `Mux`, and whatever takes a connection run on it as they are. On a plain asyncio loop
it works too, in real time. Every object here says `simulated` where it is shown. What a real server does is checked by
running the same tests on both; not simulated are permissions, clusters and the wire itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from moorage.bus.errors import BadSubject, BusError, ConnectionClosed, HandlerFailed, PayloadTooLarge
from moorage.bus.framing import INBOX_PREFIX_DEFAULT, check_filter, check_line, headers_size_bytes, is_subject
from moorage.bus.health import State
from moorage.bus.inbox import Answers
from moorage.bus.link import Link, OnError, OnState
from moorage.bus.transport import STATUS_HEADER, Delivery, Handler, Outgoing, Wanted
from moorage.testing.bus.clock import SimulatedClock, Stalled
from moorage.testing.bus.network import SERVER, Faults, FaultyNetwork
from moorage.testing.bus.processes import Process, process_of
from moorage.testing.bus.streams import Stream, Streams, last_token

__all__ = ["SERVER", "Faults", "FaultyNetwork", "SimulatedBus", "SimulatedClock", "SimulatedConnection", "Stalled"]

MAX_PAYLOAD_BYTES: Final = 1024 * 1024
#: nats-server's `max_pending`: a client that leaves more unread is cut
PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
#: from when a client sees that it was cut until it is connected again
RECONNECT_S: Final = 0.01
#: longest wait for the last message of a subscription that is drained
DRAIN_S: Final = 5.0
USERS: Final = "users"
API: Final = "$JS.API."
#: parents of subjects whose hearers are kept
BELOW_MAX: Final = 4_096
_NO_RESPONDERS: Final = {STATUS_HEADER: "503"}


class SimulatedSubscription:
    """A standing subscription, whose handler is called as each message arrives. The simulated bus refuses none."""

    refused: None = None
    __slots__ = ("connection", "handler", "lane", "left", "open", "pattern", "prefix", "queue", "subject")

    def __init__(
        self, connection: SimulatedConnection, subject: str, handler: Handler, queue: str, most: int = 0
    ) -> None:
        self.connection = connection
        self.subject = subject
        self.pattern = subject.split(".")
        self.prefix = ".".join(itertools.takewhile(lambda token: token not in ("*", ">"), self.pattern))
        self.handler = handler
        self.queue = queue
        self.left = most or -1  # messages until the server ends it; below 0: never
        self.open = True
        self.lane = connection.new_lane()  # no order holds between two subscriptions

    async def unsubscribe(self) -> None:
        self.connection.forget(self)

    async def drain(self) -> None:
        """Do the same as `Subscription.drain`."""
        await self.connection.retire(self)


class _Account:
    """An account: its subscriptions and its streams."""

    def __init__(self) -> None:
        self.streams = Streams()
        self._by_prefix: dict[str, dict[SimulatedSubscription, None]] = {}  # by what stands before the first wildcard
        # by what stands before the last dot, so that a reply's own token is looked up as its inbox is: who may hear it,
        # and what the last token must be
        self._below: dict[str, list[tuple[SimulatedSubscription, str]]] = {}

    def add(self, subscription: SimulatedSubscription) -> None:
        self._by_prefix.setdefault(subscription.prefix, {})[subscription] = None
        self._below.clear()

    def remove(self, subscription: SimulatedSubscription) -> None:
        of_prefix = self._by_prefix.get(subscription.prefix, {})
        of_prefix.pop(subscription, None)
        if not of_prefix:
            self._by_prefix.pop(subscription.prefix, None)
        self._below.clear()

    def of(self, connection: SimulatedConnection) -> list[SimulatedSubscription]:
        return [each for some in self._by_prefix.values() for each in some if each.connection is connection]

    def receivers(
        self, subject: str, choose: Callable[[list[SimulatedSubscription]], SimulatedSubscription]
    ) -> list[SimulatedSubscription]:
        """Return every plain subscription that matches, and one of each queue group."""
        parent, _, last = subject.rpartition(".")
        below = self._below.get(parent)
        if below is None:
            below = self._look_below(parent)
        plain: list[SimulatedSubscription] = []
        groups: dict[tuple[str, str], list[SimulatedSubscription]] = {}
        for each, wanted in below:
            if (wanted == "*" or wanted == last) and each.connection.is_connected:
                if each.queue:
                    groups.setdefault((each.queue, each.subject), []).append(each)
                else:
                    plain.append(each)
        return plain + [choose(members) for members in groups.values()] if groups else plain

    def _look_below(self, parent: str) -> list[tuple[SimulatedSubscription, str]]:
        tokens = parent.split(".") if parent else []
        heads = ("", *itertools.accumulate(tokens, "{}.{}".format))
        literal = [some for prefix, some in self._by_prefix.items() if prefix.rpartition(".")[0] == parent and prefix]
        candidates = [*(self._by_prefix.get(head, {}) for head in heads), *literal]
        found = [(each, last_token(each.pattern, tokens)) for some in candidates for each in some]
        if len(self._below) >= BELOW_MAX:
            self._below.clear()
        below = self._below[parent] = [(each, wanted) for each, wanted in found if wanted]
        return below


class SimulatedBus:
    """One simulated server. Connections of one account hear each other; each account has its own JetStream.

    It needs a running loop only once something is sent. `network.counters` counts the faults.
    """

    def __init__(
        self,
        network: FaultyNetwork | None = None,
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        pending_bytes_max: int = PENDING_BYTES_MAX,
    ) -> None:
        self.network = network or FaultyNetwork()
        self.max_payload_bytes = max_payload_bytes
        self.pending_bytes_max = pending_bytes_max
        self.connections: list[SimulatedConnection] = []
        self._accounts: dict[str, _Account] = {}
        self._connected = 0

    def __repr__(self) -> str:
        return f"<SimulatedBus simulated, {len(self.connections)} connections, seed {self.network.seed}>"

    def connect(
        self,
        name: str,
        *,
        account: str = USERS,
        inbox_prefix: str = INBOX_PREFIX_DEFAULT,
        on_state: Callable[[State], None] | None = None,
        on_error: Callable[[BusError], None] | None = None,
    ) -> SimulatedConnection:
        """Return a connection, at once. `name` is what faults and partitions call it; two may share one."""
        found = SimulatedConnection(self, name, account, inbox_prefix, on_state, on_error)
        self.connections.append(found)
        return found

    def number(self) -> int:
        """Return a number for the next connection, so that no two connections ever share an inbox."""
        self._connected += 1
        return self._connected

    def streams(self, account: str = USERS) -> dict[str, Stream]:
        """Return the streams of an account by name, for a test to look at."""
        return self.account(account).streams.by_name

    def is_subscribed_outside(self, process: Process, *subjects: str) -> bool:
        """Return whether a subscription of another process takes one of these subjects, in the users' account."""
        account = self.account(USERS)
        found = (each for subject in subjects for each in account.receivers(subject, lambda members: members[0]))
        return any(each.connection.process is not process for each in found)

    # -- the server's side --------------------------------------------------------------------------------------

    def account(self, name: str) -> _Account:
        return self._accounts.setdefault(name, _Account())

    def publish(
        self,
        sender: str,
        account: _Account,
        subject: str,
        payload: bytes,
        reply: str,
        headers: Mapping[str, str] | None,
    ) -> None:
        """Give a message to the network once for each receiver, and for a stream that stores it or the API.

        Without any of these, a message with a reply subject is answered with status 503.
        """
        own = dict(headers) if headers else None
        heard = self._fan_out(sender, account, subject, payload, reply, own)
        stream = account.streams.taking(subject)
        if stream is not None:
            self.network.carry(
                sender, SERVER, partial(self._store, sender, account, stream, subject, payload, reply, own)
            )
        elif subject.startswith(API):
            self.network.carry(sender, SERVER, partial(self._ask, account, subject, payload, reply))
        elif not heard and reply:
            self.network.carry(sender, SERVER, partial(self._answer, account, reply, b"", dict(_NO_RESPONDERS)))

    def _fan_out(
        self, sender: str, account: _Account, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None
    ) -> bool:
        hearers = account.receivers(subject, self.network.random.choice)
        carry = self.network.carry
        for each in hearers:
            receiver = each.connection
            if each.left > 0:
                each.left -= 1
                if not each.left:
                    account.remove(each)
            carry(sender, receiver.name, partial(receiver.deliver, each, subject, payload, reply, headers), each.lane)
        return bool(hearers)

    def _answer(self, account: _Account, reply: str, payload: bytes, headers: dict[str, str] | None) -> None:
        self._fan_out(SERVER, account, reply, payload, "", headers)

    def _store(
        self,
        sender: str,
        account: _Account,
        stream: Stream,
        subject: str,
        payload: bytes,
        reply: str,
        headers: dict[str, str] | None,
    ) -> None:
        answer, stored = account.streams.store(stream, subject, payload, headers)
        if stored and reply and self.network.loses_ack(sender):
            if not self.network.denies_ack(sender):
                return
            answer = account.streams.denial(stream)
        if reply:
            self._answer(account, reply, answer, None)

    def _ask(self, account: _Account, subject: str, payload: bytes, reply: str) -> None:
        replies = account.streams.ask(subject.removeprefix(API), payload)
        if not reply:
            return
        if not replies:
            self._answer(account, reply, b"", dict(_NO_RESPONDERS))
        elif len(replies) == 1:
            self._answer(account, reply, *replies[0])
        else:
            self._answer_batch(account, reply, replies)

    def _answer_batch(self, account: _Account, reply: str, replies: list[tuple[bytes, dict[str, str] | None]]) -> None:
        """Send all messages of a batch or none of them: one TCP connection never loses a part out of the middle."""
        for each in account.receivers(reply, self.network.random.choice):

            def arrive(each: SimulatedSubscription = each) -> None:
                for payload, headers in replies:
                    each.connection.deliver(each, reply, payload, "", headers)

            self.network.carry(SERVER, each.connection.name, arrive, each.lane)


class SimulatedConnection(Link):
    """A connection to a `SimulatedBus`, with the methods of `connection.Connection`. `lose` and `restore` break and
    mend its link."""

    def __init__(
        self,
        bus: SimulatedBus,
        name: str,
        account: str,
        inbox_prefix: str,
        on_state: OnState | None,
        on_error: OnError | None,
    ) -> None:
        answers = Answers(f"{inbox_prefix}.simulated{bus.number()}")
        super().__init__(name, inbox_prefix, answers, State.CONNECTED, on_state, on_error)
        self.max_payload_bytes = bus.max_payload_bytes
        self.server_version = "2.15.0-simulated"
        self._bus = bus
        self._unread_bytes = 0  # that came while its process was stopped
        self._is_overrun = False  # the server has cut it for them, which it sees once it reads
        self._account = bus.account(account)
        self.process = process_of(None)
        if self.process is not None:
            self.process.on_kill.append(self._cut)
        self._connected.set()
        self._tables.append(answers)
        self._inbox = SimulatedSubscription(self, answers.wildcard, answers.deliver, "")
        self._account.add(self._inbox)

    def __repr__(self) -> str:
        return f"<SimulatedConnection simulated {self.name!r} {self.state.value}>"

    # -- the transport ------------------------------------------------------------------------------------------

    async def send(self, batch: Iterable[Outgoing]) -> int:
        """Do the same as `Connection.send`. Messages are dropped and counted while disconnected, if too large, or with
        a blank in the subject."""
        self._check_open()
        handed = 0
        for subject, payload, reply in batch:
            if self.process is not None:
                self.process.acts()
            if not self.is_connected:
                continue
            if len(payload) > self.max_payload_bytes:
                self._report(PayloadTooLarge(subject, len(payload), self.max_payload_bytes))
            elif not is_subject(subject) or (reply and not is_subject(reply)):
                self._report(BadSubject(subject, "no blanks in a subject or reply, and not empty"))
            else:
                try:
                    check_line(subject, reply)
                except BadSubject as error:
                    self._report(error)
                    continue
                self._bus.publish(self.name, self._account, subject, payload, reply, None)
                handed += 1
        return handed

    def _check_sendable(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        """Do the same as `Connection._check_sendable`."""
        self._check_open()
        check_line(subject, reply)
        size_bytes = len(payload) + headers_size_bytes(headers)
        if size_bytes > self.max_payload_bytes:
            raise PayloadTooLarge(subject, size_bytes, self.max_payload_bytes)

    async def publish(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str]) -> bool:
        """Do the same as `Connection.publish`."""
        self._check_sendable(subject, payload, reply, headers)
        if not is_subject(subject) or (reply and not is_subject(reply)):
            raise BadSubject(subject, "no blanks in a subject or reply, and not empty")
        if self.process is not None:
            self.process.acts()
        if not self.is_connected:
            return False
        self._bus.publish(self.name, self._account, subject, payload, reply, dict(headers))
        return True

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> SimulatedSubscription:
        """Do the same as `Connection.subscribe`."""
        subscription = await self.subscribe_ahead(subject, handler, queue)
        try:
            await asyncio.sleep(0)
        except BaseException:
            await subscription.unsubscribe()
            raise
        return subscription

    async def subscribe_ahead(self, subject: str, handler: Handler, queue: str = "") -> SimulatedSubscription:
        """Do the same as `Connection.subscribe_ahead`."""
        self._check_open()
        check_filter(subject)
        subscription = SimulatedSubscription(self, subject, handler, queue)
        self._account.add(subscription)
        return subscription

    async def swap(
        self, ended: Iterable[SimulatedSubscription], wanted: Iterable[Wanted]
    ) -> list[SimulatedSubscription]:
        """Do the same as `Connection.swap`."""
        self._check_open()
        wanted = list(wanted)
        for each in wanted:
            check_filter(each.subject)
        for former in ended:
            self._account.remove(former)  # what is on its way still arrives
        made = [SimulatedSubscription(self, each.subject, each.handler, "", each.most) for each in wanted]
        for new in made:
            self._account.add(new)
        return made

    async def reconnect(self) -> None:
        """Do the same as `Connection.reconnect`."""
        self.lose()
        asyncio.get_running_loop().call_later(RECONNECT_S, self.restore)

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Wait for the connection: the simulated server knows everything at once. Raises as `Connection.flush`."""
        self._check_open()
        await self._await_connected("PING", timeout_s)

    async def close(self) -> None:
        if self.state is State.CLOSED:
            return
        self._move(State.CLOSED)
        self._fail_waits()
        self._cut()
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
        if not is_subject(subject):
            raise BadSubject(subject, "no blanks in a subject, and not empty")
        if not self.is_connected:
            timeout_s = await self._await_connected(subject, timeout_s)
        if self.process is not None:
            self.process.acts()
        self._check_open()
        token, future = answers.open(subject, timeout_s, is_last)
        try:
            self._bus.publish(self.name, self._account, subject, payload, answers.reply_subject(token), headers)
            return await future
        finally:
            answers.abandon(token)

    def new_lane(self) -> float:
        """Return where messages of a new subscription stand among those that arrive at the same time: anywhere."""
        return self._bus.network.random.random()

    # -- faults of its own link ---------------------------------------------------------------------------------

    def lose(self) -> None:
        """Break the link: everything that is awaited fails with `Disconnected`, and messages that arrive meanwhile are
        lost."""
        if not self.is_connected:
            return
        self._lost()

    def restore(self) -> None:
        """Mend the link that `lose` broke: every subscription receives again, but not what was sent meanwhile. Does
        nothing for other links."""
        if self.state is State.RECONNECTING:
            self.reconnects += 1
            self._connected.set()
            self._move(State.CONNECTED)

    # -- what the bus calls -------------------------------------------------------------------------------------

    def deliver(
        self,
        subscription: SimulatedSubscription,
        subject: str,
        payload: bytes,
        reply: str,
        headers: dict[str, str] | None,
    ) -> None:
        """Deliver a message that arrived, unless its receiver has left meanwhile or is cut off.

        While the receiver's process is stopped, the message waits; if too many bytes wait, the connection is cut.
        """
        if self._is_overrun:
            return
        if self.process is not None and (self.process.is_stopped or process_of(None) is not self.process):
            if self.process.is_stopped:
                self._unread_bytes += len(subject) + len(payload) + len(reply)
                if self._unread_bytes > self._bus.pending_bytes_max:
                    self._overrun(self.process)
                    return
            self.process.call(self.deliver, subscription, subject, payload, reply, headers)
            return
        self._unread_bytes = 0  # who reads at all reads everything that waits before anything else comes
        if not subscription.open or not self.is_connected:
            return
        own = dict(headers) if headers else None
        try:
            subscription.handler(Delivery(subject, reply, payload, own, asyncio.get_running_loop().time()))
        except (Exception, asyncio.CancelledError) as error:  # as over nats-py: told, and the subscription goes on
            self._report(HandlerFailed("a subscription", error))

    def _overrun(self, process: Process) -> None:
        """Cut a connection that does not read, as the server does; the messages that wait are lost."""
        self._is_overrun = True
        self._connected.clear()
        process.call(self._see_the_cut)

    def _see_the_cut(self) -> None:
        self._is_overrun, self._unread_bytes = False, 0
        self._lost()
        asyncio.get_running_loop().call_later(RECONNECT_S, self.restore)

    def forget(self, subscription: SimulatedSubscription) -> None:
        subscription.open = False
        self._account.remove(subscription)

    async def retire(self, subscription: SimulatedSubscription) -> None:
        """Have the server send nothing more for it, and forget it behind what is on its way."""
        self._account.remove(subscription)
        last = asyncio.Event()
        self._bus.network.carry_last(self.name, last.set, subscription.lane)
        with contextlib.suppress(TimeoutError):  # a faulty network may lose it
            async with asyncio.timeout(DRAIN_S):
                await last.wait()
        subscription.open = False

    def _cut(self) -> None:
        """Cut the connection at the server: no message reaches it or leaves it any more."""
        for subscription in self._account.of(self):
            self.forget(subscription)
        self._connected.clear()
        self.state = State.CLOSED
        if self in self._bus.connections:
            self._bus.connections.remove(self)

    # -- within -------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.state is State.CLOSED:
            raise ConnectionClosed(self.name)
