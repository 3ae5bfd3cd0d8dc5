"""A member on NATS: subscriptions, headers, answers. It moves messages between the bus, `Member` and the program."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from moorage.bus.connection import Connection
from moorage.bus.errors import BadSubject, BusError, PayloadTooLarge, PermissionRefused
from moorage.bus.framing import headers_size_bytes
from moorage.bus.subscription import Subscription
from moorage.bus.transport import STATUS_HEADER, Delivery
from moorage.calls.batcher import Batcher, OnFrame
from moorage.calls.batches import Batches
from moorage.calls.call_headers import foreign, line, passed_on, read_into
from moorage.calls.discovery import Discovery
from moorage.calls.held import HeldCalls
from moorage.calls.inputs import BadPart, Inputs, file_name, number_of
from moorage.calls.member import QUIET_S, Call, Member
from moorage.calls.method_search import MethodSearch
from moorage.calls.outbox import RECEIPT_S, Message, Outbox
from moorage.calls.outputs import Outputs
from moorage.calls.program import Link
from moorage.calls.slowest import Slowest
from moorage.calls.streams import Streams
from moorage.calls.wire import FromProgram, ToProgram
from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Refused
from moorage.schemas.held_calls import MEMBER_DIGITS, Holder, last_words
from moorage.schemas.roles import IMPORTED_REPLY, may_answer
from moorage.schemas.served import too_large
from moorage.schemas.service import (
    ASKED_MAX,
    BAD_BATCH,
    BAD_HEADER,
    BUSY,
    CALL_ERRORS,
    CONTENT_TYPE,
    END,
    ENDPOINT,
    ERROR,
    ERROR_CODE,
    EXPIRED,
    FAILED,
    INPUT,
    INPUT_BYTES_DEFAULT,
    MEMBER,
    MEMBER_DIED,
    NO_ENDPOINT,
    NOT_ENDPOINTS,
    OUTPUT_BYTES_DEFAULT,
    OWN_CODES,
    PART,
    PARTS_AHEAD,
    QUEUE,
    RAN_MS,
    REPLY,
    ROOM_QUEUE,
    SEND,
    SEND_TO,
    TOO_LARGE,
    WAITED_MS,
    CallErrorBody,
    Found,
    MemberLoad,
    QueueSpec,
    SlowCall,
    Sought,
    Turn,
)
from moorage.schemas.subjects import ASK, Subjects, asked_of, member_of

#: a member that ends by itself waits so long for a connection over which it can answer
CLOSE_S: Final = 5.0
#: how often it says what it has to do: while that changes, and while it does not
LOAD_S: Final = 1.0
LOAD_QUIET_S: Final = 10.0
#: how long after its program's end a member lets the others fetch what waits here: idle ones do at once, and those that
#: have calls of their own may never, so that callers had better hear it soon and call again
ROOM_S: Final = 1.0
#: a header of W3C's trace context, with the trace's id
_TRACE: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
#: stands for the code of a call whose caller has given up
CANCELLED: Final = 499

_decode_turn: Final = Decoder[Turn](Turn)
_decode_sought: Final = Decoder[Sought](Sought)

log = logging.getLogger("moorage.calls")


class Name(NamedTuple):
    """Which service of which tenant, below which prefix."""

    prefix: str
    tenant: str
    service: str

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.prefix)

    @property
    def subject(self) -> str:
        """The subject of its calls."""
        return self.subjects.call(self.tenant, self.service)


def attempt_of(environment: Mapping[str, str]) -> AttemptName | None:
    """Return the attempt whose variables these are; None if they are of none."""
    tenant, job = environment.get("MOORAGE_TENANT", ""), environment.get("MOORAGE_JOB", "")
    numbers = [environment.get(f"MOORAGE_{name}", "") for name in ("REPLICA", "ATTEMPT", "FENCE")]
    if not all(number.isdecimal() for number in numbers):
        return None
    replica, attempt, fence = map(int, numbers)
    return tenant, job, replica, attempt, fence


class Messenger:
    """One member of a service, over a connection whose inbox is `Subjects.member_inbox`. Call `open`, then `take` once
    its program is ready."""

    def __init__(
        self,
        connection: Connection,
        name: Name,
        places: int,
        attempt: AttemptName | None = None,
        input_bytes: int = INPUT_BYTES_DEFAULT,
        folder: Path | None = None,
        queue: QueueSpec | None = None,
        output_bytes: int = OUTPUT_BYTES_DEFAULT,
        version: str = "",
    ) -> None:
        self.name = name
        self.id = secrets.token_hex(MEMBER_DIGITS // 2)
        queue = queue or QueueSpec()
        self.member = Member(self.id, self, places, queue.most, attempt)
        self._wait_ms = round(queue.wait_s * 1000)
        self.program: Link | None = None
        self._begin_batches: Callable[[], None] = lambda: None
        self._connection = connection
        self._subject = name.subject
        self._discovery = Discovery(
            self.member, name.service, name.tenant, name.subject, lambda: self.endpoints, version
        )
        self._inboxes = f"{name.subjects.member_inbox(name.tenant)}."  # those of all members
        self._inbox = f"{self._inboxes}member.{self.id}"
        self._own_room = f"{self._inbox}.want"
        self._have = name.subjects.member(name.tenant, name.service, "have")
        self._want = name.subjects.member(name.tenant, name.service, "want")
        self._load = name.subjects.member(name.tenant, name.service, "load")
        self._haver = ""  # where to ask the member that has said `have` last
        self._asks_one = False  # the last `want` went there
        self._turn = name.subjects.member(name.tenant, name.service, "turn")
        #: its calls, for who answers them if it is killed
        self.held = HeldCalls()
        self._slowest = Slowest()
        self._outputs = Outputs(self._put_answer, self._on_not_asked)
        self._search = MethodSearch(f"{self._inbox}.found", self._ask_for_method, self._on_searched)
        self._outbox = Outbox(
            connection, self._inbox, self._hold, self._instead, self.held.answered, lambda: self._outputs.waiting_bytes
        )
        self._streams = Streams(self._inbox)
        self._inputs = Inputs(self._on_silence, input_bytes, folder)
        self._output_bytes = output_bytes
        #: the methods of the service that its program has
        self.endpoints: frozenset[str] = frozenset()
        #: by the inbox of the question: calls for a method that the program lacks, until another member says it has it
        connection.on_back(lambda: self._drop_coming(lambda _: True))
        self._calls: list[Subscription] = []
        self._asked_here: Subscription | None = None
        self._room: Subscription | None = None
        self._closing_room: asyncio.TimerHandle | None = None
        self._asking_again: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._ticking = asyncio.Event()
        self._has_emptied = asyncio.Event()
        self._called = asyncio.Event()
        self._turned = asyncio.Event()
        self._may_sleep = False  # it rests, and nothing runs

    async def open(self) -> None:
        """Subscribe to what members say to each other. Raises `PermissionRefused`."""
        subjects, tenant, service = self.name.subjects, self.name.tenant, self.name.service
        await self._connection.subscribe(self._inbox, self._on_given)
        self._asked_here = await self._connection.subscribe(self._own_room, self._on_want)
        await self._connection.subscribe(self._search.subject, self._search.on_answer)
        await self._connection.subscribe(self._streams.asked, self._on_no_responders)
        await self._connection.subscribe(self._turn, self._on_turn)
        await self._connection.subscribe(subjects.call_cancel(tenant, service), self._on_cancel)
        for asked in (asked_of(self._subject), asked_of(self._subject, self.id)):
            await self._connection.subscribe(asked, self._on_sought)
        await self._connection.subscribe(subjects.call_put(tenant, service, self.id, "*"), self._on_put)
        await self._connection.subscribe(self._outbox.receipts, self._outbox.on_untaken)
        self._outbox.open()
        self._tasks = [asyncio.get_running_loop().create_task(self._tick())]

    def hold_in(self, path: Path, most: int) -> None:
        """Keep the calls that are here in this file, at most so many, and answer those that a member which was killed
        has left in it: one before this in the same attempt."""
        holder = Holder(self.name.service, self.id)
        for reply, ran in self.held.open(path, most, self.name.prefix, self.name.tenant, holder):
            self._outbox.answer(reply, *self._failure(*last_words(ran)), age_s=float("inf"))

    def run_in_batches(self, program: Link, batches: Batches) -> OnFrame:
        """Send calls in these batches to the program; return what is to get its frames from now on."""
        batcher = Batcher(program, self.member, batches, self.on_frame, self.held.runs)
        self.program, self._begin_batches = batcher, batcher.begin_due
        return batcher.on_frame

    def as_written(self, refused: PermissionRefused) -> PermissionRefused:
        """Return a refusal with the caller's inbox as that is written: nats-py tells it in small letters."""
        subject = self._outbox.as_written(refused.subject)
        return PermissionRefused(refused.operation, subject) if subject else refused

    async def fetch(self) -> None:
        """Fetch calls that wait at other members, from now on. Raises `PermissionRefused`.

        Not before the program is ready: a call that is sent to none is lost, and keeps its place for ever.
        """
        await self._connection.subscribe(self._have, self._on_have)

    async def take(self) -> None:
        """Fetch calls, and join the queue group: calls come from now on. Raises `PermissionRefused`."""
        await self.fetch()
        for subject in (self._subject, f"{self._subject}.*"):  # also without methods: who calls one hears that
            self._calls.append(await self._connection.subscribe(subject, self._on_call, QUEUE))
        for endpoint in self.endpoints:
            self._calls.append(await self._connection.subscribe(self._method(endpoint), self._on_method, QUEUE))
        with contextlib.suppress(BusError):  # without the right to it, calls come by the queue group alone
            self._calls.append(await self._connection.subscribe(member_of(self._subject, self.id), self._on_own))
        self._tasks.append(asyncio.get_running_loop().create_task(self._send_loads()))
        first, *rest = self._discovery.subjects
        try:
            await self._connection.subscribe(first, self._on_discovery)
        except BusError:  # it is not to be found, and answers calls all the same
            return
        for subject in rest:
            await self._connection.subscribe_ahead(subject, self._on_discovery)

    async def drain(self) -> None:
        """Leave the queue group behind the last call that the server gives, then finish what is here.

        Returns once nothing waits or runs here, and all answers are sent. What waits may be fetched by the others
        meanwhile.
        """
        await self._leave()
        self.member.drain(time.monotonic())
        self._look()
        await self._emptied()
        await self._outbox.let_all_out()

    async def died(self) -> None:
        """The program is over: answer what ran, let the others fetch what waits for `ROOM_S`, refuse the rest."""
        self.member.died(time.monotonic(), self._inputs.drop_incomplete())
        self._look()
        await self._leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_S):
                await self._emptied()
        self.give_up()

    def give_up(self) -> None:
        """Answer what still waits or runs with an error."""
        self._search.give_up()
        for call in self._outputs.drop():
            self._fail(call, MEMBER_DIED, "the member ended before its caller had asked for the whole answer")
        self.member.give_up(time.monotonic(), self._inputs.drop_incomplete())

    async def close(self, within_s: float = CLOSE_S) -> None:
        """Let out what was sent, say last what became of the calls, and end.

        Without a connection, that waits for one so long.
        """
        self._inputs.close()
        if self._closing_room is not None:
            self._closing_room.cancel()
            self._room_is_over()
        if self._asking_again is not None:
            self._asking_again.cancel()
        if self._asked_here is not None:  # who asks from now on hears that nobody is here
            with contextlib.suppress(BusError):
                await self._asked_here.unsubscribe()
        await self._outbox.close(within_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._send_load(self.member.load(time.monotonic()))
        with contextlib.suppress(BusError):
            await self._connection.flush()
        self.held.close()

    async def _leave(self) -> None:
        calls, self._calls = self._calls, []
        for each in calls:
            with contextlib.suppress(BusError):
                await each.drain()

    @property
    def _is_empty(self) -> bool:
        return self.member.is_empty and not self._search and not self._outputs

    async def _emptied(self) -> None:
        while not self._is_empty:
            self._has_emptied.clear()
            await self._has_emptied.wait()

    # -- what comes from NATS

    def _call_of(self, delivery: Delivery) -> Call | None:
        """Return a call; None if there is no inbox to which it may be answered, or its headers say what they cannot."""
        reply, told = delivery.reply, (delivery.headers or {}).get(REPLY, "")
        if not reply and told.startswith(f"{IMPORTED_REPLY}."):
            reply = told
        if not reply or not may_answer(self.name.prefix, self._subject, reply):
            return None
        call = Call(reply, delivery.data, {}, delivery.received_monotonic_s, self._wait_ms)
        try:
            read_into(call, delivery)
        except ValueError as wrong:
            self._fail(call, BAD_HEADER, str(wrong))
            return None
        return call

    def _on_call(self, delivery: Delivery) -> None:
        endpoint = delivery.subject[len(self._subject) + 1 :]
        if endpoint in NOT_ENDPOINTS or endpoint == ASK:  # which all members hear
            return
        call = self._call_of(delivery)
        if call is not None:
            call.endpoint = endpoint
            if endpoint and endpoint not in self.endpoints:
                self._search.begin(call)
            else:
                self._take(call)
            self._look()

    def _on_own(self, delivery: Delivery) -> None:
        """A call whose caller has chosen this member."""
        call = self._call_of(delivery)
        if call is None:
            return
        call.endpoint = (delivery.headers or {}).get(ENDPOINT, "")
        if call.endpoint and call.endpoint not in self.endpoints:
            self._search.begin(call)
        else:
            self.member.on_own(call, time.monotonic())
        self._look()

    def _on_given(self, delivery: Delivery) -> None:
        """The answer to a `want`: a call with its caller's inbox as the reply, or an empty one, or the server's 503."""
        headers = delivery.headers or {}
        call = self._call_of(delivery)
        if call is not None:
            call.endpoint = headers.get(ENDPOINT, "")
        elif self._asks_one:  # its room has been emptied, or it has ended; calls may wait in other rooms
            self._ask(self._want)
            return
        is_any_open = headers.get(STATUS_HEADER) != "503"
        self.member.on_given(call, time.monotonic(), is_any_open=is_any_open)
        if call is not None and self.member.room.has(call):
            self.held.waits(call.reply)
        self._look()

    def _take(self, call: Call) -> None:
        self.member.on_call(call, time.monotonic())
        if self.member.room.has(call):
            self.held.waits(call.reply)

    def _method(self, endpoint: str) -> str:
        """Return the subject on which members have a method, and get calls for it from members that lack it."""
        return self.name.subjects.member(self.name.tenant, self.name.service, f"method.{endpoint}")

    def _ask_for_method(self, call: Call, reply: str) -> None:
        self.held.waits(call.reply)
        self._put(self._method(call.endpoint), b"", reply, None)

    def _on_searched(self, call: Call, is_there: bool | None) -> None:
        """A call whose method the program lacks goes to a member that has it; or to none."""
        if is_there is None:  # the server is away, or this member ends
            self.member.refuse_busy(call)
        elif is_there:
            waited_ms = call.waited(time.monotonic())
            self.held.over(call.reply)
            self._put(self._method(call.endpoint), call.data, call.reply, passed_on(call, waited_ms))
        else:
            there = ", ".join(sorted(self.endpoints)) or "none"
            told = f"{self.name.service} has no method {call.endpoint[:48]!r}; its methods: {there}"
            self._fail(call, NO_ENDPOINT, told)
        self._look()

    def _on_method(self, delivery: Delivery) -> None:
        """Another member lacks a method that the program has: it asks whether any has it, or passes a call on."""
        endpoint = (delivery.headers or {}).get(ENDPOINT)
        if endpoint is None:
            if delivery.reply.startswith(self._inboxes):
                self._put(delivery.reply, b"", "", None)
            return
        call = self._call_of(delivery)
        if call is not None:
            call.endpoint = endpoint
            self._take(call)
            self._look()

    def _on_have(self, delivery: Delivery) -> None:
        if delivery.reply == self._own_room:  # its own, which says nothing of other rooms
            return
        methods = delivery.data.decode(errors="replace").split()
        if methods and self.endpoints.isdisjoint(methods):  # members of another version alone can run these
            return
        if delivery.reply.startswith(self._inboxes):
            self._haver = delivery.reply
        self.member.on_have(time.monotonic())
        self._look()

    def _on_turn(self, delivery: Delivery) -> None:
        """The leader says which member has its GPUs for calls, or has not."""
        try:
            turn = _decode_turn(delivery.data)
        except Refused:
            return
        if turn.member != self.id:
            return
        self.member.on_turn(turn, time.monotonic())
        self._look()

    def _on_want(self, delivery: Delivery) -> None:
        if not delivery.reply:
            return
        self.member.on_want(delivery.reply, time.monotonic(), delivery.data.decode(errors="replace").split())
        self._look()

    def _on_discovery(self, delivery: Delivery) -> None:
        if delivery.reply and may_answer(self.name.prefix, delivery.subject, delivery.reply):
            self._put(delivery.reply, self._discovery.answer(delivery.subject, time.monotonic()), "", None)

    def _on_cancel(self, delivery: Delivery) -> None:
        reply = delivery.data.decode(errors="replace")
        self._outbox.forget(reply)
        self.member.on_cancel(reply, time.monotonic())
        self.held.over(reply)
        self._outputs.drop(reply)
        self._look()

    def _on_sought(self, delivery: Delivery) -> None:
        """A caller asks which of its calls are here. To one in another account, which knows them by other reply
        subjects, it answers with nothing."""
        reply = delivery.reply
        if not reply or not may_answer(self.name.prefix, self._subject, reply):
            return
        try:
            sought = _decode_sought(delivery.data)
        except Refused:
            return
        if reply.startswith(f"{IMPORTED_REPLY}."):
            self._put(reply, b"", "", None)
            return
        asked = sought.calls[:ASKED_MAX]
        here = {*self._search.replies} | self.member.replies(asked) | self._outputs.replies
        for each in asked:
            if self._outbox.has(each):
                self._outbox.send_again(each)
                here.add(each)
        if sought.was_cut:
            self._drop_coming(lambda call: call.reply in here)
        if here or sought.all:
            slow = self._slowest.told(_unix_ms()) if sought.slow else []
            self._put(reply, encode(Found(self.id, [each for each in asked if each in here], slow)), "", None)

    def _drop_coming(self, is_one: Callable[[Call], bool]) -> None:
        """Refuse calls whose data were on their way over a connection that was lost: they may be sent again."""
        for number in [number for number, call in self.member.running.items() if is_one(call)]:
            if self._inputs.forget_coming(number):
                self._end_unrun(number, EXPIRED, "the connection was lost while the data of the call came")

    def _on_put(self, delivery: Delivery) -> None:
        """A part of a call's data, or what asks for more parts of an answer."""
        number = number_of(delivery.subject.rpartition(".")[2]) or 0
        if (upto := (delivery.headers or {}).get(SEND)) is not None:
            self._outputs.send(number, number_of(upto) or 0)
            self._look()
            return
        try:
            coming = self._inputs.take(number, number_of((delivery.headers or {}).get(PART)), delivery.data)
        except BadPart as bad:
            self._end_unrun(number, bad.error, str(bad))
            return
        if coming is None:
            return
        if coming.is_whole:
            assert self.program is not None
            call = coming.call
            if self.member.batches is None:
                self.held.runs(call.reply)
            head = ToProgram(number, 0, call.headers, file_name(coming.path), coming.left_ms, endpoint=call.endpoint)
            self.program.send(head)
            self._look()
        elif coming.parts % (PARTS_AHEAD // 2) == 0:
            self._ask_for(number, coming.call, coming.parts + PARTS_AHEAD)

    def _ask_for(self, number: int, call: Call, upto: int) -> None:
        """Let the caller send parts of its data up to this one."""
        subject = self.name.subjects.call_put(self.name.tenant, self.name.service, self.id, number)
        self._answer(call, b"", {SEND: str(upto), SEND_TO: subject})

    def _on_silence(self, number: int) -> None:
        self._end_unrun(number, EXPIRED, "the caller sent no more of its data")

    def _end_unrun(self, number: int, error: str, why: str) -> None:
        """Answer a call whose data did not come with an error, and free its place."""
        self._inputs.forget(number)
        call = self.member.running.get(number)
        if call is not None and not call.cancelled:
            self._fail(call, error, why)
        elif call is not None:
            self.held.over(call.reply)
        self.member.on_end(number, time.monotonic())
        self._look()

    # -- what comes from the program

    def on_frame(self, head: FromProgram, body: bytes) -> None:
        """A frame of the program; `ready` is not for here."""
        number = head.answer or head.part or head.error
        call = self.member.running.get(number)
        if call is None:
            return
        now_s = time.monotonic()
        if call.cancelled:
            if not head.part:
                self._note(call, now_s, CANCELLED)
                self.held.over(call.reply)
                self._streams.over(number)
                self._inputs.forget(number)
                self.member.on_end(number, now_s)
                self._look()
            return
        if call.started_s < 0:  # its batch has not begun: the program cannot know of it
            return
        if head.part:
            self._on_part(number, call, head, body, now_s)
            return
        parts = self._streams.over(number)
        self._inputs.forget(number)
        headers = {MEMBER: self.id, RAN_MS: str(round((now_s - call.started_s) * 1000))}
        headers[WAITED_MS] = str(call.waited(call.started_s))
        code = 0 if not head.error else head.code or CALL_ERRORS[FAILED][0]
        self._note(call, now_s, code, len(body))
        if wrong := too_large(head.headers):
            self._fail(call, TOO_LARGE, wrong)
        elif head.error:
            self._fail_by_program(call, head)
        else:
            headers = {**foreign(head.headers), **headers}
            if parts or head.in_parts:
                self._answer(call, body, {**headers, END: str(parts)})
            else:
                self._answer_whole(number, call, body, headers)
        self.member.on_end(number, now_s)
        self._look()

    def _on_part(self, number: int, call: Call, head: FromProgram, body: bytes, now_s: float) -> None:
        if wrong := too_large(head.headers):
            self._fail(call, TOO_LARGE, wrong)
            self._end_early(number, call)
            return
        at, reply = self._streams.next(number, now_s, may_ask=not call.reply.startswith(f"{IMPORTED_REPLY}."))
        first = {MEMBER: self.id, WAITED_MS: str(call.waited(call.started_s))} if at == 1 else {}
        self._put(call.reply, body, reply, {**foreign(head.headers), **first, PART: str(at)})

    def _note(self, call: Call, now_s: float, code: int, answer_bytes: int = 0) -> None:
        """Keep a call that has ended, if it is one of the slowest."""
        waited_ms, ran_ms, now_ms = call.waited(call.started_s), round((now_s - call.started_s) * 1000), _unix_ms()
        if not self._slowest.is_one(waited_ms + ran_ms, now_ms):
            return
        size = number_of(call.headers.get(INPUT)) or len(call.data)
        found = _TRACE.fullmatch(call.headers.get("traceparent", ""))
        self._slowest.add(
            SlowCall(now_ms, waited_ms, ran_ms, size, answer_bytes, code, call.endpoint, found[1] if found else "")
        )

    def _answer_whole(self, number: int, call: Call, body: bytes, headers: dict[str, str]) -> None:
        """Answer a call with one value: in parts, if it is too large for a message."""
        most = self._connection.max_payload_bytes
        if len(body) + headers_size_bytes(headers) <= most:
            self._answer(call, body, headers)
            return
        allowed = self._output_bytes if call.output_max is None else min(self._output_bytes, call.output_max)
        if len(body) > allowed:
            takes = "its caller takes" if allowed < self._output_bytes else "the service gives"
            self._fail(call, TOO_LARGE, f"the answer has {len(body)} bytes, {takes} at most {max(allowed, most)}")
            return
        ask_at = self.name.subjects.call_put(self.name.tenant, self.name.service, self.id, number)
        self._outputs.begin(number, call, body, headers, most, ask_at)
        self._outbox.hold_if_full()

    def _put_answer(self, reply: str, body: bytes, headers: dict[str, str]) -> None:
        self._outbox.answer(reply, body, headers, age_s=RECEIPT_S)  # it takes long to send

    def _on_not_asked(self, call: Call) -> None:
        self._fail(call, TOO_LARGE, "its caller asked for no more parts of the answer")
        self._look()

    def _on_no_responders(self, delivery: Delivery) -> None:
        """The server found no subscriber for a part: the caller is gone, without a cancel."""
        number = number_of(delivery.subject.rpartition(".")[2]) or 0
        call = self.member.running.get(number)
        if call is not None and not call.cancelled and (delivery.headers or {}).get(STATUS_HEADER) == "503":
            self._end_early(number, call)

    def _end_early(self, number: int, call: Call) -> None:
        """Stop a call whose answer has failed in its middle, or is heard by nobody: the rest is not sent."""
        call.cancelled = True
        self.stop(number)

    # -- Outside: what the member wants done

    def run(self, number: int, call: Call, left_ms: int) -> None:
        assert self.program is not None
        if number_of(call.headers.get(INPUT)):  # with 0 it is whole as it is
            try:
                self._ask_for(number, call, self._inputs.begin(number, call, left_ms))
            except BadPart as bad:
                # `Member` is in the middle of its own work: the place is free once that is done
                asyncio.get_running_loop().call_soon(self._end_unrun, number, bad.error, str(bad))
            else:
                self.held.waits(call.reply)
            return
        if self.member.batches is None:
            self.held.runs(call.reply)
        else:
            self.held.waits(call.reply)
        head = ToProgram(number, len(call.data), call.headers, wait_ms=left_ms, endpoint=call.endpoint)
        self.program.send(head, call.data)

    def run_next(self, number: int, call: Call, left_ms: int) -> None:
        assert self.program is not None
        self.held.runs(call.reply)  # it may begin at any time
        head = ToProgram(number, len(call.data), call.headers, wait_ms=left_ms, ahead=True, endpoint=call.endpoint)
        self.program.send(head, call.data)

    def take_back(self) -> list[int]:
        assert self.program is not None
        numbers = self.program.take_back()
        for call in map(self.member.running.get, numbers):
            if call is not None and not call.cancelled:
                self.held.waits(call.reply)
        return numbers

    def stop(self, number: int) -> None:
        assert self.program is not None
        if self._inputs.forget_coming(number):  # the program has not heard of it
            asyncio.get_running_loop().call_soon(self._end_unrun, number, EXPIRED, "")
            return
        self.program.send(ToProgram(cancel=number))

    def hand(self, to: str, call: Call | None, waited_ms: int) -> None:
        if call is None:
            self._put(to, b"", "", None)
        else:
            self.held.over(call.reply)
            self._put(to, call.data, call.reply, passed_on(call, waited_ms))

    def have(self) -> None:
        methods = self.member.room.methods
        self._put(self._have, b"" if "" in methods else " ".join(methods).encode(), self._own_room, None)

    def want(self) -> None:
        self._ask(self._haver or self._want)

    def _ask(self, to: str) -> None:
        """Ask for a call: the member that has sent `have` last, or else any in whose room calls wait."""
        self._haver, self._asks_one = "", to != self._want
        self._put(to, " ".join(self.endpoints).encode(), self._inbox, None)

    def want_later(self) -> None:
        if self._asking_again is not None:
            self._asking_again.cancel()
        self._asking_again = asyncio.get_running_loop().call_later(QUIET_S, self._ask_again)

    def _ask_again(self) -> None:
        self.member.ask_again(time.monotonic())
        self._look()

    def gathered(self) -> None:
        self._begin_batches()

    def send_on(self, call: Call, waited_ms: int) -> None:
        subject = f"{self._subject}.{call.endpoint}" if call.endpoint else self._subject
        self.held.over(call.reply)
        self._put(subject, call.data, call.reply, passed_on(call, waited_ms))

    def refuse(self, call: Call, error: str, retry_after_ms: int, why: str = "") -> None:
        if self.member.rests:  # the leader hears of it at once, as of a call that waits
            self._called.set()
        self._fail(call, error, why or CALL_ERRORS[error][2], retry_after_ms=retry_after_ms)

    def open_room(self, is_open: bool) -> None:
        if not is_open:
            later = asyncio.get_running_loop().call_later
            self._closing_room = later(self.member.quiet_s, self._room_is_over)
        elif self._closing_room is not None:
            self._closing_room.cancel()
            self._closing_room = None
        else:  # in the order of what is sent: a `want` that follows a `have` must find the subscription
            self._outbox.let_out(self._open_room)

    def _room_is_over(self) -> None:
        self._closing_room = None
        self._outbox.let_out(self._close_room)

    async def _open_room(self) -> None:
        self._room = await self._connection.subscribe_ahead(self._want, self._on_want, ROOM_QUEUE)

    async def _close_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:  # a `want` that comes behind the last call is still answered: nothing waits
            task = asyncio.get_running_loop().create_task(room.drain())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    # -- sending

    def _fail(self, call: Call, error: str, message: str, *, retry_after_ms: int = 0, kind: str = "") -> None:
        self._answer(call, *self._failure(error, message, retry_after_ms, kind))

    def _fail_by_program(self, call: Call, head: FromProgram) -> None:
        """Answer a call with the error of the program, which may have a code and headers of its own."""
        if head.code not in OWN_CODES:
            self._fail(call, BAD_BATCH if head.bad_batch else FAILED, head.message, kind=head.kind)
            return
        body, headers = self._failure(FAILED, head.message, kind=head.kind, code=head.code)
        own = foreign(head.headers, without=CONTENT_TYPE)
        self._answer(call, body, {**own, **headers, ERROR: line(head.message)})

    def _failure(
        self, error: str, message: str, retry_after_ms: int = 0, kind: str = "", code: int = 0
    ) -> tuple[bytes, dict[str, str]]:
        """Count an answer that is an error, and return its body and its headers. `code` goes before the error's."""
        usual, started, _ = CALL_ERRORS[error]
        code = code or usual
        self.member.meter.failed(code, f"{kind}: {message}" if kind else message)
        body = encode(CallErrorBody(error, message, started, retry_after_ms, kind))
        headers = {ERROR_CODE: str(code), ERROR: error, MEMBER: self.id, CONTENT_TYPE: "application/json"}
        return body, headers

    def _answer(self, call: Call, body: bytes, headers: dict[str, str]) -> None:
        self._outbox.answer(call.reply, body, headers, age_s=call.waited(time.monotonic()) / 1000)

    def _put(self, subject: str, body: bytes, reply: str, headers: dict[str, str] | None) -> None:
        self._outbox.put(subject, body, reply, headers)

    def _hold(self, on: bool) -> None:
        if self.program is not None:
            self.program.hold(on)

    def _instead(self, message: Message, error: PayloadTooLarge | BadSubject) -> Message | None:
        """Return what is said in place of a message that cannot be sent."""
        is_part = PART in (message.headers or ())
        if message.reply and not is_part:  # a call that is passed on, which nobody has run: it may be sent again
            body, headers = self._failure(BUSY, "the call is too large to be passed on to another member")
            return Message(message.reply, body, "", headers)
        if isinstance(error, BadSubject):
            return None
        if is_part:  # its caller, which hears of an error, sends no cancel
            running = self.member.running.items()
            for number, call in [each for each in running if each[1].reply == message.subject]:
                self._end_early(number, call)
        why = f"the answer has {error.size_bytes} bytes, the server takes {error.bytes_max}: answer in parts"
        body, headers = self._failure(TOO_LARGE, why)
        return Message(message.subject, body, "", headers)

    # -- time

    def _look(self) -> None:
        if self._is_empty:
            self._has_emptied.set()
        if not self.member.is_empty:
            self._called.set()
        if self.member.needs_ticks:
            self._ticking.set()
        may_sleep = self.member.rests and not self.member.running
        if may_sleep is not self._may_sleep:
            self._may_sleep = may_sleep
            self._turned.set()
            self._called.set()

    async def _tick(self) -> None:
        while True:
            await self._ticking.wait()
            await asyncio.sleep(self.member.tick_s)
            self.member.tick(time.monotonic())
            self._look()
            if not self.member.needs_ticks:
                self._ticking.clear()

    async def _send_loads(self) -> None:
        said, said_s, by_call = None, 0.0, False
        while True:
            now_s = time.monotonic()
            load = self.member.load(now_s)
            if (load != said or now_s - said_s >= LOAD_QUIET_S) and await self._send_load(load):
                said, said_s = load, now_s
            # who has no calls says the first one at once: it may sleep, and is to be woken. Who gives up its GPUs says
            # at once that nothing runs any more
            if by_call or not self.member.is_empty:
                by_call = False
                await _is_set_within(self._turned, LOAD_S)
            else:
                by_call = await _is_set_within(self._called, LOAD_S)

    async def _send_load(self, load: MemberLoad) -> bool:
        """Send what the member has to do and has done; return False if the server is away."""
        try:
            await self._connection.send([(self._load, encode(load), "")])
        except BusError:
            return False
        return True


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    event.clear()
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _unix_ms() -> int:
    return round(time.time() * 1000)
