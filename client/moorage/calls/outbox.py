"""What a member sends, in order, over a connection that may be away; and its answers, until their callers have them.

Nobody says that an answer has come. Where no break can lie between a call and its answer, that goes as it is, without a
byte for a receipt. Else it has a reply subject, on which the server says if nobody listens: then it is sent again until
its caller is back. Each answer is kept for a while longer, for a caller that asks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from moorage.bus.connection import Connection
from moorage.bus.errors import BadSubject, BusError, ConnectionClosed, Disconnected, PayloadTooLarge, RequestTimeout
from moorage.bus.transport import STATUS_HEADER, Delivery
from moorage.calls.inputs import number_of
from moorage.schemas.roles import IMPORTED_REPLY
from moorage.schemas.service import MEMBER, PART, REPLY, WAITED_MS

#: messages that may wait to be sent, and their bytes, before the program waits. So many bytes of answers are kept
OUT_MAX: Final = 2000
OUT_BYTES_MAX: Final = 64 << 20
#: an answer, or a part of one, that finds no connection or no caller is kept for so long in seconds
KEPT_S: Final = 60.0
#: and so long one that was sent, for a caller that lost its connection before it came
SENT_KEPT_S: Final = 15.0
#: what was sent in so many seconds before a connection was lost may not have come
CONFIRM_S: Final = 1.0
#: the caller of a call that came so many seconds ago may have lost its own connection, so the answer has a receipt
RECEIPT_S: Final = 0.1
#: an answer that nobody took is sent again after so many seconds, doubled from the first to the last
AGAIN_S_MIN: Final = 0.05
AGAIN_S_MAX: Final = 0.8
#: all of these make no more bytes a second than so many
AGAIN_BYTES_S: Final = 32 << 20
#: a member that ends so soon after a break, in seconds, waits until callers took their answers
BACK_S: Final = 5.0
#: what a message takes beside its body
MESSAGE_BYTES: Final = 1024

log = logging.getLogger("moorage.calls")


class Message(msgspec.Struct, eq=False, gc=False):
    """A message to send. Times are in seconds of the loop's clock."""

    subject: str
    body: bytes
    reply: str
    headers: dict[str, str] | None  # None for what members say to each other, which is worth nothing later
    made_s: float = 0.0  # of one that was made without a connection; else 0
    receipt: int = 0  # its number among those with a receipt; 0 has none
    over: int = -1  # the number of the connection over which it was sent last; -1 was not sent
    kept_s: float = 0.0  # since when it is kept
    again_s: float = AGAIN_S_MIN  # how long after it is found untaken it is sent again
    is_forgotten: bool = False

    @property
    def is_answer(self) -> bool:
        """Whether it is a whole answer to a call, or the end of one: a call that is passed on runs at most once, and
        who counts parts would count one more."""
        return not self.reply and self.headers is not None and MEMBER in self.headers and PART not in self.headers

    def is_kept_until(self, now_s: float) -> bool:
        return now_s - self.kept_s < (KEPT_S if self.receipt else SENT_KEPT_S)

    @property
    def size_bytes(self) -> int:
        return len(self.body) + MESSAGE_BYTES


Step = Message | Callable[[], Awaitable[None]]


class Outbox:
    """The messages of one member, whose inbox is `inbox`. `open` it, and subscribe `on_untaken` to `receipts` before.

    `hold` is called to have the program wait while too much waits here, and to go on. `instead` returns what is said in
    place of a message that cannot be sent; None if nothing is. `answered` is called with the reply subject of each call
    whose answer was sent. `beside` returns how many bytes wait elsewhere.
    """

    def __init__(
        self,
        connection: Connection,
        inbox: str,
        hold: Callable[[bool], None],
        instead: Callable[[Message, PayloadTooLarge | BadSubject], Message | None],
        answered: Callable[[str], None],
        beside: Callable[[], int],
    ) -> None:
        self.receipts = f"{inbox}.untaken.*"
        self._receipt = f"{inbox}.untaken."
        self._connection = connection
        self._hold = hold
        self._instead = instead
        self._answered = answered
        self._beside = beside
        self._out: deque[Step] = deque()  # what is being sent is in it, too
        self._out_bytes = 0
        self._is_held = False
        self._some_to_send = asyncio.Event()
        self._some_sent = asyncio.Event()
        self._lost_s = 0.0  # since when no message can be sent; 0 if they can
        self._back_s = float("-inf")  # since when they can again, of the monotonic clock
        self._kept_too_long = 0
        self._kept: deque[Message] = deque()  # answers, in the order in which they were made
        self._kept_bytes = 0
        self._by_reply: dict[str, Message] = {}  # of these, the newest for each reply subject
        self._by_receipt: dict[int, Message] = {}
        self._receipts = 0
        self._unconfirmed: deque[Message] = deque()  # in the order in which they were sent
        self._some_unconfirmed = asyncio.Event()
        self._untaken: dict[Message, asyncio.TimerHandle] = {}
        self._untaken_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        connection.on_back(self._on_back)

    def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(each) for each in (self._send_out(), self._confirm())]

    async def close(self, within_s: float) -> None:
        """Let out what is here, within so many seconds, and end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.let_all_out()
        if self._out:
            log.warning("the connection is down: %d messages are not sent", len(self._out))
        for timer in self._untaken.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def let_all_out(self) -> None:
        """Wait until all is sent; where the connection was away just now, also until callers took their answers."""
        while True:
            while self._out:
                await self._sent_some()
            if time.monotonic() - self._back_s > BACK_S:
                return
            with contextlib.suppress(BusError):
                await self._connection.flush()
            await asyncio.sleep(AGAIN_S_MIN)  # until what the server says of receipts is here
            if not self._untaken and not self._out:
                return
            if not self._out:
                await self._sent_some()

    async def _sent_some(self) -> None:
        self._some_sent.clear()
        await self._some_sent.wait()

    # -- what comes in

    def put(self, subject: str, body: bytes, reply: str, headers: dict[str, str] | None) -> None:
        """Send a message. Without headers it is dropped while there is no connection: it would be wrong later."""
        if headers is not None or self._connection.is_connected:
            self._put(Message(subject, body, reply, headers))

    def answer(self, reply: str, body: bytes, headers: dict[str, str], age_s: float) -> None:
        """Answer a call that came to the first member so many seconds ago, or say something before its answer."""
        message = Message(reply, body, "", headers)
        if message.is_answer:
            if age_s >= min(RECEIPT_S, time.monotonic() - self._back_s):
                self._ask_for_receipt(message)
            self._keep(message)
        self._put(message)

    def let_out(self, step: Step) -> None:
        """Do this behind all that is to be sent before."""
        if not self._out:
            self._some_to_send.set()
        self._out.append(step)
        if isinstance(step, Message):
            self._out_bytes += len(step.body)

    def has(self, reply: str) -> bool:
        """Return whether the answer to the call with this reply subject is here."""
        return reply in self._by_reply

    def as_written(self, subject: str) -> str:
        """Return the subject of an answer that is this one in small letters; "" if there is none."""
        return next((message.subject for message in reversed(self._kept) if message.subject.lower() == subject), "")

    def send_again(self, reply: str) -> None:
        """Send an answer once more: its caller asks for it."""
        message = self._by_reply[reply]
        if message.over >= 0:  # else it is on its way
            self._send_again(message)

    def forget(self, reply: str) -> None:
        """Keep no answer for a caller that waits no longer."""
        message = self._by_reply.get(reply)
        if message is not None:
            self._forget(message)

    def on_untaken(self, delivery: Delivery) -> None:
        """The server found nobody that listens to an answer: its caller is away, or gone."""
        message = self._by_receipt.get(number_of(delivery.subject.rpartition(".")[2]) or 0)
        if message is None or message in self._untaken or (delivery.headers or {}).get(STATUS_HEADER) != "503":
            return
        self._untaken_bytes += message.size_bytes
        after_s = max(message.again_s, self._untaken_bytes / AGAIN_BYTES_S)
        message.again_s = min(2 * message.again_s, AGAIN_S_MAX)
        loop = asyncio.get_running_loop()
        self._untaken[message] = loop.call_later(after_s, self._send_untaken, message)

    # -- within

    def _put(self, message: Message) -> None:
        if not self._connection.is_connected:
            message.made_s = asyncio.get_running_loop().time()
        self.let_out(message)
        self.hold_if_full()

    def hold_if_full(self) -> None:
        """Have the program wait if too much waits."""
        if not self._is_held and (len(self._out) > OUT_MAX or self._out_bytes + self._beside() > OUT_BYTES_MAX):
            self._hold_program(True)

    def _hold_program(self, on: bool) -> None:
        """Read no more of the program while too much waits to be sent: it may stream faster than the server takes, or
        there may be no connection."""
        self._is_held = on
        self._hold(on)

    def _go_on_if_free(self) -> None:
        if self._out_bytes + self._beside() < OUT_BYTES_MAX // 2:
            self._hold_program(False)

    async def _send_out(self) -> None:
        out = self._out
        while True:
            if not out:
                self._some_to_send.clear()
                await self._some_to_send.wait()
            step = out[0]
            try:
                if isinstance(step, Message):
                    await self._send(step)
                else:
                    await step()
            except BusError as error:
                log.warning("%s", error)
            except TimeoutError:
                self._kept_too_long += 1
            except Exception:  # one message may not keep all others from being sent
                log.exception("a message of the member could not be sent")
            finally:
                out.popleft()
                if isinstance(step, Message):
                    self._out_bytes -= len(step.body)
                    if step.is_answer:
                        self._answered(step.subject)
                if not out:
                    self._some_sent.set()
                if self._is_held and len(out) < OUT_MAX // 2:
                    self._go_on_if_free()

    async def _send(self, message: Message) -> None:
        if message.headers is None:
            await self._connection.send([(message.subject, message.body, message.reply)])
            return
        try:
            await self._publish(message)
        except (PayloadTooLarge, BadSubject) as error:
            instead = self._instead(message, error)
            if instead is None:
                raise
            self._forget(message)
            await self._publish(instead)

    async def _publish(self, message: Message) -> None:
        """Publish a message, once there is a connection. Raises TimeoutError `KEPT_S` after it was made."""
        assert message.headers is not None
        reply, headers = message.reply, message.headers
        if reply.startswith(f"{IMPORTED_REPLY}."):
            reply, headers = "", {**headers, REPLY: reply}
        if message.made_s and message.is_answer:
            self._ask_for_receipt(message)
        connection = self._connection
        while not await connection.publish(message.subject, message.body, reply or self._receipt_of(message), headers):
            self._lost_s = self._lost_s or asyncio.get_running_loop().time()
            kept_s = max(message.made_s, self._lost_s)
            async with asyncio.timeout_at(kept_s + KEPT_S):
                await connection.regained()
            if message.is_answer:
                self._ask_for_receipt(message)
            before = message.headers.get(WAITED_MS)
            if message.reply and before is not None:  # a call that is passed on has waited here, too
                waited_ms = round((asyncio.get_running_loop().time() - kept_s) * 1000)
                headers = {**headers, WAITED_MS: str(int(before) + waited_ms)}
        self._lost_s = 0.0
        if message.is_answer:
            message.over = connection.reconnects
            if not self._unconfirmed:
                self._some_unconfirmed.set()
            self._unconfirmed.append(message)
        if self._kept_too_long:
            log.warning("the connection was down: %d answers are lost", self._kept_too_long)
            self._kept_too_long = 0

    # -- receipts

    def _ask_for_receipt(self, message: Message) -> None:
        """Give an answer a receipt, unless its caller is in another account: the server forgets such a reply."""
        if not message.receipt and not message.subject.startswith(f"{IMPORTED_REPLY}."):
            self._receipts += 1
            message.receipt = self._receipts
            self._by_receipt[message.receipt] = message

    def _receipt_of(self, message: Message) -> str:
        return f"{self._receipt}{message.receipt}" if message.receipt else ""

    def _keep(self, message: Message) -> None:
        message.kept_s = now_s = asyncio.get_running_loop().time()
        self._kept.append(message)
        self._kept_bytes += message.size_bytes
        self._by_reply[message.subject] = message
        self._drop_old(now_s)

    def _drop_old(self, now_s: float) -> None:
        while self._kept and (self._kept_bytes > OUT_BYTES_MAX or not self._kept[0].is_kept_until(now_s)):
            oldest = self._kept.popleft()
            self._kept_bytes -= oldest.size_bytes
            self._forget(oldest)
            if oldest.over >= 0:  # it may be among those that the server has not confirmed
                oldest.body = b""

    def _forget(self, message: Message) -> None:
        message.is_forgotten = True
        if self._by_reply.get(message.subject) is message:
            del self._by_reply[message.subject]
        self._by_receipt.pop(message.receipt, None)
        self._take_out(message)

    def _take_out(self, message: Message) -> None:
        """Take an answer out of those that nobody took."""
        timer = self._untaken.pop(message, None)
        if timer is not None:
            timer.cancel()
            self._untaken_bytes -= message.size_bytes
            self._some_sent.set()

    def _send_untaken(self, message: Message) -> None:
        self._take_out(message)
        if message.is_kept_until(asyncio.get_running_loop().time()):
            self._send_again(message)
        else:
            self._forget(message)

    def _send_again(self, message: Message) -> None:
        """Send an answer once more. A caller that has it already drops the second."""
        if not message.is_forgotten and message.over >= 0:
            message.over = -1
            self._ask_for_receipt(message)
            self._put(message)

    def _on_back(self) -> None:
        """There is a connection again: what was sent just before it was lost may not have come."""
        self._back_s = time.monotonic()
        sent, self._unconfirmed = self._unconfirmed, deque()
        self._some_unconfirmed.clear()
        for message in sent:
            self._send_again(message)

    async def _confirm(self) -> None:
        """Forget from time to time which answers the server has all the same; and those that are kept for too long."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SENT_KEPT_S if self._kept else None):
                        await self._some_unconfirmed.wait()
                await self._confirm_once()

    async def _confirm_once(self) -> None:
        connection, count = self._connection, len(self._unconfirmed)
        over = connection.reconnects
        self._drop_old(asyncio.get_running_loop().time())
        if not count:
            return
        await asyncio.sleep(CONFIRM_S)
        try:
            await connection.flush()
        except (Disconnected, RequestTimeout):
            await connection.regained()
            return
        if over != connection.reconnects:
            return
        for _ in range(count):
            self._unconfirmed.popleft()
        if not self._unconfirmed:
            self._some_unconfirmed.clear()
