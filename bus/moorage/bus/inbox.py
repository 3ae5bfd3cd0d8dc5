"""Receive answers: one standing inbox, whose requests are numbered by tokens. One frame may have many answers.

`Answers` is the table of awaited answers behind one inbox. `Mux` is the SDK's inbox: its reply subjects carry the
marker `mux`, which tells the scheduler that it may answer all tokens of this inbox in one frame:

    reply given to the server    <prefix>.<random>.mux.<token>
    a single answer              published to that subject
    many answers in one frame    published to <prefix>.<random>.mux.all, msgpack [[token, payload], ...]

A late answer finds its token gone and is counted, never delivered to another request: tokens are not reused. Those of
a connection's own requests are random: who is asked one question cannot answer another one.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

import msgspec

from moorage.bus.errors import BusError, NoResponders, RequestTimeout, TooManyWaiting
from moorage.bus.framing import new_inbox
from moorage.bus.transport import STATUS_HEADER, Delivery, Outgoing, Subscribed
from moorage.schemas.unreadable import UNREADABLE

#: Answers awaited at once on one inbox; beyond it `TooManyWaiting` is raised.
WAITING_MAX: Final = 1_000_000
#: Replies gathered for one `request_many`.
REPLIES_MAX: Final = 100_000
#: Bytes of one coalesced answer frame; a frame that would be larger is split.
MUX_FRAME_BYTES_MAX: Final = 512 * 1024
#: Times of answers that came already are cleared out once there are so many more of them than of those that wait.
DUE_SPARE: Final = 10_000
#: Event loops have no finer timers: what is due within this is due now.
CLOCK_S: Final = 0.001
MUX_MARKER: Final = "mux"
MUX_ALL: Final = "all"
_MUX_END: Final = f".{MUX_MARKER}"
_TOKEN_DIGITS_MAX: Final = 18
_TOKEN_BITS: Final = 59  # as many digits at most
#: msgpack bytes around one [token, payload] pair at most: array 1, uint64 9, bin32 5.
_PAIR_OVERHEAD_BYTES: Final = 15

_encode_pairs = msgspec.msgpack.Encoder().encode
_decode_pairs = msgspec.msgpack.Decoder(list[tuple[int, bytes]]).decode


class _Waiting(msgspec.Struct, eq=False, gc=False):
    """One awaited answer. If `future` is for a list, `is_last` tells of each reply whether it was the last; it is None
    for a single answer. `is_kept` and `in_all` are as in `Answers.open`.

    Nothing that it refers to refers back to it, so the garbage collector has no cycle to look for among a thousand of
    them.
    """

    subject: str
    timeout_s: float
    future: asyncio.Future[list[Delivery]]
    is_last: Callable[[Delivery], bool] | None = None
    is_kept: bool = True
    in_all: bool = False
    gathered: list[Delivery] | None = None  # so far, where more are to come; the newest alone, where none is kept


class Answers:
    """The awaited answers of one inbox `<base>.<token>`.

    All of them share one timer, set for the earliest that may be due: one for each would cost more than all the rest
    of a request, and hardly any is ever due. Its context is `context`; None: the caller's. Used in one event loop.
    `on_late` is called with each reply whose token is gone.

    Counters: `late` replies whose token was gone, `bad_frames` coalesced frames that did not decode and messages on
    subjects without a token.
    """

    def __init__(
        self,
        base: str,
        waiting_max: int = WAITING_MAX,
        context: contextvars.Context | None = None,
        on_late: Callable[[Delivery], None] | None = None,
        *,
        outlives_breaks: bool = False,
        is_guessable: bool = True,
    ) -> None:
        self.base = base
        self.wildcard = f"{base}.*"
        self.waiting_max = waiting_max
        self.late = 0
        self.bad_frames = 0
        #: its waits go on when the connection is lost: who answers keeps the answers until that is back
        self.outlives_breaks = outlives_breaks
        #: who gets messages that answer nothing, by the word that their subjects have in place of a token
        self.on_word: dict[str, Callable[[Delivery], None]] = {}
        self._context = context
        self._on_late = on_late
        self._prefix_chars = len(base) + 1
        self._loop: asyncio.AbstractEventLoop | None = None
        #: whether who was asked one question knows the reply subject of the next one
        self._is_guessable = is_guessable
        self._next_token = 0
        self._waiting: dict[int, _Waiting] = {}
        self._due: list[tuple[float, int]] = []  # a heap of times and tokens, of which most were answered long ago
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    def open(
        self,
        subject: str,
        timeout_s: float,
        is_last: Callable[[Delivery], bool] | None = None,
        *,
        is_kept: bool = True,
        in_all: bool = False,
        first_s: float | None = None,
    ) -> tuple[int, asyncio.Future[list[Delivery]]]:
        """Await an answer to a request on `subject` for `timeout_s` seconds.

        Return the token and the future of the replies: one, or with `is_last` all up to the one for which it is
        true, at most `REPLIES_MAX`. `timeout_s` then is the longest silence before a reply, or with `in_all` the time
        for all of them. `first_s` is that before the first one, if it is another. Without `is_kept` the future has the
        last reply alone, and there may be any number: `is_last` has seen the others. The future fails with
        `RequestTimeout`, `NoResponders`, or as `fail_all` says. Raises `TooManyWaiting`.
        """
        waiting = self._waiting
        if len(waiting) >= self.waiting_max:
            raise TooManyWaiting(self.waiting_max)
        self._next_token = token = self._next_token + 1 if self._is_guessable else secrets.randbits(_TOKEN_BITS)
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        waiting[token] = entry = _Waiting(subject, timeout_s, loop.create_future(), is_last, is_kept, in_all)
        self._look_at(loop, loop.time() + (timeout_s if first_s is None else first_s), token)
        return token, entry.future

    def reply_subject(self, token: int) -> str:
        return f"{self.base}.{token}"

    def abandon(self, token: int) -> None:
        """Stop waiting, e.g. because the caller was cancelled; a later reply is counted as late."""
        waiting = self._waiting.pop(token, None)
        if waiting is not None:
            waiting.future.cancel()

    def fail(self, token: int, error: BusError) -> None:
        """End one wait with this error."""
        waiting = self._waiting.pop(token, None)
        if waiting is not None:
            self._fail(waiting, error)

    def deliver(self, delivery: Delivery) -> None:
        """Handle a message of the subscription on `wildcard`: give it to the request whose token its subject has."""
        tail = delivery.subject[self._prefix_chars :]
        if tail.isascii() and tail.isdigit() and len(tail) <= _TOKEN_DIGITS_MAX:
            self._answer(int(tail), delivery)
        elif tail == MUX_ALL:
            self._deliver_frame(delivery)
        elif (told := self.on_word.get(tail)) is not None:
            told(delivery)
        else:
            self.bad_frames += 1

    def fail_all(self, error: Callable[[str], BusError]) -> None:
        """End every wait with `error(subject)`, e.g. when the connection drops."""
        waiting, self._waiting = self._waiting, {}
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at_s = None, math.inf
        for entry in waiting.values():
            self._fail(entry, error(entry.subject))

    def fail_subject(self, subject_lower: str, error: BusError) -> None:
        """End the waits of the requests that were sent to this subject (compared in lower case), as when a permission
        is refused."""
        doomed = [token for token, entry in self._waiting.items() if entry.subject.lower() == subject_lower]
        for token in doomed:
            self._fail(self._waiting.pop(token), error)

    def _answer(self, token: int, delivery: Delivery) -> None:
        entry = self._waiting.get(token)
        if entry is None:
            self.late += 1
            if self._on_late is not None:
                self._on_late(delivery)
            return
        if _is_no_responders(delivery):
            del self._waiting[token]
            self._fail(entry, NoResponders(entry.subject))
            return
        found = [delivery]
        if entry.is_last is not None:
            if entry.gathered is not None and entry.is_kept:
                entry.gathered.append(delivery)
                found = entry.gathered
            if len(found) < REPLIES_MAX and not entry.is_last(delivery):
                entry.gathered = found  # `_expire` looks at when the last of them came
                return
        del self._waiting[token]
        if not entry.future.done():
            entry.future.set_result(found)

    def _deliver_frame(self, frame: Delivery) -> None:
        try:
            pairs = _decode_pairs(frame.data)
        except UNREADABLE:
            self.bad_frames += 1
            return
        for token, payload in pairs:
            self._answer(token, Delivery(f"{self.base}.{token}", "", payload, None, frame.received_monotonic_s))

    def _look_at(self, loop: asyncio.AbstractEventLoop, at_s: float, token: int) -> None:
        """Look at this time of the loop's clock whether this token still waits."""
        due = self._due
        heappush(due, (at_s, token))
        if at_s < self._timer_at_s:
            self._set_timer(loop, at_s)
        elif len(due) > 2 * len(self._waiting) + DUE_SPARE:
            due[:] = [row for row in due if row[1] in self._waiting]
            heapify(due)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at_s = loop.call_at(at_s, self._expire, context=self._context), at_s

    def _expire(self) -> None:
        """End the waits that are due, and set the timer for the next one."""
        loop, due, waiting = asyncio.get_running_loop(), self._due, self._waiting
        self._timer, self._timer_at_s = None, math.inf
        now_s = loop.time() + CLOCK_S
        while due and (due[0][0] <= now_s or due[0][1] not in waiting):
            _, token = heappop(due)
            entry = waiting.get(token)
            if entry is None:
                continue
            silent_s = now_s
            if entry.gathered and not entry.in_all:
                silent_s = entry.gathered[-1].received_monotonic_s + entry.timeout_s
            if silent_s > now_s:
                heappush(due, (silent_s, token))
                continue
            del waiting[token]
            self._fail(entry, RequestTimeout(entry.subject, entry.timeout_s))
        if due:
            self._set_timer(loop, due[0][0])

    @staticmethod
    def _fail(entry: _Waiting, error: BusError) -> None:
        if not entry.future.done():
            entry.future.set_exception(error)


def _is_no_responders(delivery: Delivery) -> bool:
    headers = delivery.headers
    return headers is not None and not delivery.data and headers.get(STATUS_HEADER) == "503"


class InboxTransport(Protocol):
    """What `Mux` needs of a connection."""

    @property
    def inbox_prefix(self) -> str: ...

    async def open_inbox(self, answers: Answers) -> Subscribed: ...

    async def close_inbox(self, answers: Answers, subscription: Subscribed) -> None: ...

    async def exchange(
        self,
        answers: Answers,
        subject: str,
        payload: bytes,
        timeout_s: float,
        headers: Mapping[str, str] | None,
        is_last: Callable[[Delivery], bool] | None,
    ) -> list[Delivery]: ...


class Mux:
    """An inbox that opts in to coalesced answers.

        mux = await Mux.open(connection)
        answer = await mux.request("moorage.api.team-a.submit", body, timeout_s=5)

    The answers are payloads alone: a coalesced one has no headers.
    """

    def __init__(self, connection: InboxTransport, answers: Answers) -> None:
        self._connection = connection
        self._answers = answers
        self._subscription: Subscribed | None = None

    @classmethod
    async def open(cls, connection: InboxTransport, waiting_max: int = WAITING_MAX) -> Mux:
        """Subscribe the inbox. Raises `PermissionRefused` if the user may not subscribe below its inbox prefix."""
        answers = Answers(f"{new_inbox(connection.inbox_prefix)}.{MUX_MARKER}", waiting_max)
        mux = cls(connection, answers)
        mux._subscription = await connection.open_inbox(answers)
        return mux

    @property
    def late(self) -> int:
        return self._answers.late

    @property
    def waiting(self) -> int:
        return len(self._answers)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Send one request and wait for the payload of its answer.

        Raises `RequestTimeout`, `NoResponders`, `Disconnected` (answer unknown: send the same id again),
        `TooManyWaiting`, `PermissionRefused`, `PayloadTooLarge`, `ConnectionClosed`.
        """
        return (await self._connection.exchange(self._answers, subject, payload, timeout_s, None, None))[0].data

    async def close(self) -> None:
        if self._subscription is not None:
            await self._connection.close_inbox(self._answers, self._subscription)
            self._subscription = None


def split_mux_reply(reply: str) -> tuple[str, int] | None:
    """Return `(inbox, token)` if this reply subject allows many answers in one frame, else None."""
    inbox, _, token = reply.rpartition(".")
    if not inbox.endswith(_MUX_END) or len(token) > _TOKEN_DIGITS_MAX or not (token.isascii() and token.isdigit()):
        return None
    return inbox, int(token)


def mux_frames(
    answers: Mapping[str, list[tuple[int, bytes]]], bytes_max: int = MUX_FRAME_BYTES_MAX
) -> Iterator[Outgoing]:
    """Return the answers as messages for `send`: one frame for each inbox, or several if it would be larger than
    `bytes_max`.

    A single answer goes to its own subject, so that it need not be decoded twice.
    """
    for inbox, pairs in answers.items():
        for part in _split(pairs, bytes_max):
            if len(part) == 1:
                token, payload = part[0]
                yield f"{inbox}.{token}", payload, ""
            else:
                yield f"{inbox}.{MUX_ALL}", _encode_pairs(part), ""


def _split(pairs: list[tuple[int, bytes]], bytes_max: int) -> Iterator[list[tuple[int, bytes]]]:
    if sum([len(payload) for _, payload in pairs]) + _PAIR_OVERHEAD_BYTES * len(pairs) <= bytes_max:
        if pairs:
            yield pairs
        return
    part: list[tuple[int, bytes]] = []
    size_bytes = 0
    for pair in pairs:
        pair_bytes = len(pair[1]) + _PAIR_OVERHEAD_BYTES
        if part and size_bytes + pair_bytes > bytes_max:
            yield part
            part, size_bytes = [], 0
        part.append(pair)
        size_bytes += pair_bytes
    if part:
        yield part
