"""Call services: jobs that stay and answer calls. A call passes neither the scheduler nor the ledger.

A call runs at most once: it is sent again only if the answer says that it did not start, or no member was there. What
must not be lost is a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar, Unpack, overload

import msgspec

from moorage.bus.errors import BusError, Disconnected, NoResponders, PayloadTooLarge, PermissionRefused, RequestTimeout
from moorage.bus.framing import new_inbox
from moorage.bus.inbox import REPLIES_MAX, Answers
from moorage.bus.transport import Delivery
from moorage.client.affinity import Affinity
from moorage.client.affinity import checked as checked_affinity
from moorage.client.call_options import CallOptions, Options
from moorage.client.call_values import ANY, Reads, encoded
from moorage.client.durations import Duration, seconds
from moorage.client.errors import (
    CallFailed,
    CallRefused,
    ClientError,
    NotFound,
    NotPermitted,
    Rejected,
    TimedOut,
    Unreachable,
    client_problem,
    not_found,
    read_answer,
    rejected,
    timed_out,
)
from moorage.client.whereabouts import Lost, Whereabouts
from moorage.schemas.errors import Problem
from moorage.schemas.names import SERVICE, is_service
from moorage.schemas.roles import INBOX, inbox
from moorage.schemas.served import NAME_ALLOWED, Answer, is_header, too_large
from moorage.schemas.service import (
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
    INPUT_BYTES_MAX,
    INPUT_REFUSED,
    MEMBER,
    MEMBER_DIED,
    NO_ENDPOINT,
    NOT_ENDPOINTS,
    OF_A_CALL,
    OUTPUT,
    OWN_HEADERS_BYTES_MAX,
    PART,
    PARTS_AHEAD,
    PRIORITY,
    PRIORITY_MAX,
    RAN_MS,
    SEND,
    SEND_TO,
    TIME_MS,
    WAIT_MS,
    WAITED_MS,
    WHOLE_MS,
    CallErrorBody,
)
from moorage.schemas.subjects import member_of
from moorage.schemas.unreadable import UNREADABLE
from moorage.system.backoff import Backoff
from moorage.system.spans import caller_span

if TYPE_CHECKING:
    from moorage.client.connected import Connected
    from moorage.client.fields import Fields
    from moorage.client.job import AsyncJob
    from moorage.client.transport import Link
    from moorage.schemas.answers.jobs import ServiceRow

#: callers that gave up calls whose members may not have heard it yet, the newest
CANCELS_MAX: Final = 1000
#: cancels that waited for a connection are sent once more so much later: members may be connected again by then
CANCEL_AGAIN_S: Final = 2.0
#: bytes of parts that wait for the reader of a stream, with so many more for each part
STREAM_BYTES_MAX: Final = 256 << 20
PART_BYTES: Final = 1024
#: between two tries of a call that did not start: doubled from the first to the last, times 0.5 to 1.5
AGAIN_S_MIN: Final = 0.01
AGAIN_S_MAX: Final = 0.25
#: a try that has less time than this left is not made: it would be told as a call that may have run
TRY_S_MIN: Final = 0.15
#: so much before its caller gives up, a call that still waits is refused, and its caller knows that it did not run; of
#: a short time, half
REFUSED_S: Final = 0.2
#: while nobody serves, the scheduler is asked this often for a member, and whether a job is there at all
WAKE_AGAIN_S: Final = 2.0
#: how long a call that gives up waits for the reason, and for how long one reason is that of others
WHY_S: Final = 2.0
WHY_AGAIN_S: Final = 10.0
NO_SERVICE: Final = "no-service"
NO_MEMBER: Final = "no-member"
_DIGITS_MAX: Final = 9
#: of the largest message, how much a part of a call's data has: the headers need some
INPUT_PART: Final = 0.5
_CODES: Final = {BUSY: "service-busy", EXPIRED: "call-expired", MEMBER_DIED: "member-died", BAD_BATCH: "bad-batch"}

#: headers of an answer that its span has as attributes
_TOLD: Final = ((MEMBER, "moorage.member"), (WAITED_MS, "moorage.waited_ms"), (RAN_MS, "moorage.ran_ms"))
#: codes of a function's own fault: it would fail the same way once more
_FAILS_AGAIN: Final = ("call-failed", "bad-batch")

T = TypeVar("T")

_decode_error: Final = msgspec.json.Decoder(CallErrorBody).decode


class Calls:
    """The calls of one client: one inbox for all their answers, made with the first call."""

    def __init__(self, client: Connected) -> None:
        self._client = client
        self._link: Link | None = None
        self._opening: asyncio.Task[Whereabouts] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancels: dict[str, str] = {}  # those to be sent: the service's subject by the caller's reply subject
        self._cancelled: dict[str, str] = {}  # the same of those that were sent
        self._cancelling = False
        self._wakes: dict[str, _Wake] = {}  # by service: the last question for a member
        self._jobs: dict[str, str] = {}  # by service that nobody served: the job that has it
        self.affinity = Affinity(self._begin)
        self._told: dict[str, tuple[float, asyncio.Task[tuple[str, str]]]] = {}  # why nobody did, and when it was asked

    async def inbox(self) -> Whereabouts:
        """Return the inbox and what is under way, which last as long as the client. Raises PermissionRefused."""
        link = self._client.link
        if self._opening is None or self._link is not link or (self._opening.done() and self._opening.exception()):
            self._link, self._opening = link, asyncio.get_running_loop().create_task(self._open(link))
        return self._opening.result() if self._opening.done() else await asyncio.shield(self._opening)

    async def _open(self, link: Link) -> Whereabouts:
        """Subscribe the inbox. Where the server asks for a login and the context names no inbox, members may have a
        right on that of the tenant's role alone."""
        prefixes = [link.inbox_prefix]
        if link.asks_for_login and link.inbox_prefix == INBOX:
            prefixes.insert(0, inbox("submitter", self._client.tenant))
        while True:
            answers = Answers(new_inbox(prefixes.pop(0)), on_late=self._on_late, outlives_breaks=True)
            try:
                await link.open_inbox(answers)
            except PermissionRefused:
                if not prefixes:
                    raise
            else:
                return Whereabouts(link, answers, self._begin)

    def cancel(self, subject: str, reply: str) -> None:
        """Say that the caller with this reply subject no longer waits, once there is a connection; nobody waits for
        that."""
        _keep(self._cancels, reply, subject)
        if not self._cancelling:
            with contextlib.suppress(RuntimeError):  # the client is closed
                link = self._client.link  # now: a client that is closed right after this still sends it
                self._cancelling = True
                self._begin(self._send_cancels(link))

    async def _send_cancels(self, link: Link) -> None:
        again: dict[str, str] = {}
        try:
            while sending := dict(self._cancels):
                await link.send([(f"{subject}.cancel", reply.encode(), "") for reply, subject in sending.items()])
                if not link.is_connected:
                    again |= sending
                    await link.regained()
                    continue
                for reply, subject in sending.items():
                    self._cancels.pop(reply, None)
                    _keep(self._cancelled, reply, subject)
        except (BusError, RuntimeError):  # the client is closed
            self._cancels.clear()
        finally:
            self._cancelling = False
        if again:
            asyncio.get_running_loop().call_later(CANCEL_AGAIN_S, self._cancel_again, again)

    def _cancel_again(self, cancels: Mapping[str, str]) -> None:
        for reply, subject in cancels.items():
            self.cancel(subject, reply)

    def _on_late(self, delivery: Delivery) -> None:
        """Cancel a call again whose member asks with a part of the answer whether anybody listens: it was cut off."""
        subject = self._cancelled.get(delivery.subject)
        if subject is not None and delivery.reply and _is_part(delivery):
            self.cancel(subject, delivery.subject)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def wake(self, service: str, since_s: float) -> Problem | None:
        """Ask the scheduler for a member of a service that nobody serves, at most each `WAKE_AGAIN_S`; return what it
        said to a question after `since_s`, if no job has the service: then nobody will serve."""
        last, now_s = self._wakes.get(service), time.monotonic()
        if last is not None and last.refused is not None and last.asked_s >= since_s:
            return last.refused
        if last is None or last.refused is not None or now_s - last.asked_s >= WAKE_AGAIN_S:
            asked = self._wakes[service] = _Wake(now_s)
            self._begin(self._wake(service, asked))
        return None

    async def why_none(self, service: str) -> tuple[str, str]:
        """Return the job that has a service which nobody serves, and why none of its members does; "" where that is
        not known. Calls that give up together ask once."""
        now_s = time.monotonic()
        told = self._told.get(service)
        if told is None or now_s - told[0] > WHY_AGAIN_S:
            asking = asyncio.get_running_loop().create_task(self._ask_why(self._jobs.get(service, "")))
            told = self._told[service] = now_s, asking
        return await asyncio.shield(told[1])

    async def _ask_why(self, job: str) -> tuple[str, str]:
        if not job:
            return "", ""
        try:
            async with asyncio.timeout(WHY_S):
                explained = await self._client.explain(job)
        except (ClientError, BusError, RuntimeError, TimeoutError):
            return job, ""
        return job, ": ".join(filter(None, (explained.why or explained.means, explained.because)))

    async def _wake(self, service: str, asked: _Wake) -> None:
        from moorage.schemas.answers.jobs import Woken

        try:
            self._jobs[service] = read_answer(await self._client.read("wake", {"service": service}), Woken).job
        except NotFound as error:
            asked.refused = error.problem
        except (ClientError, BusError, RuntimeError):
            pass  # without a leader nobody knows


class _Wake:
    """A question for a member: when it was asked, on the monotonic clock, and the refusal that answered it, if any."""

    __slots__ = ("asked_s", "refused")

    def __init__(self, asked_s: float) -> None:
        self.asked_s = asked_s
        self.refused: Problem | None = None


def _keep(rows: dict[str, str], reply: str, subject: str) -> None:
    """Add a row; a full table loses its oldest one for it."""
    if len(rows) >= CANCELS_MAX:
        del rows[next(iter(rows))]
    rows[reply] = subject


class _Time(NamedTuple):
    """The time of one try, in seconds: for its whole answer, or where it `streams` for each part; and until it has a
    place."""

    answer_s: float
    start_s: float
    streams: bool = False
    whole_s: float = 0.0  # of all tries, where this is not the first

    @property
    def first_s(self) -> float:
        """How long the answer, or its first part, is waited for."""
        return self.start_s + self.answer_s if self.streams and self.start_s != self.answer_s else self.answer_s

    @property
    def headers(self) -> dict[str, str]:
        """What the member is told of it: it refuses a call that waits for too long before its caller gives up."""
        wait_s = min(self.start_s, self.first_s - min(REFUSED_S, self.first_s / 2))
        told = {WAIT_MS: str(max(1, round(wait_s * 1000)))}
        if self.streams:
            return told
        told[TIME_MS] = str(max(1, round(self.answer_s * 1000)))
        return {**told, WHOLE_MS: str(round(self.whole_s * 1000))} if self.whole_s else told


class _UnderWay:
    """A call that was sent: the future of its answer, and whether there is nothing to cancel any more."""

    __slots__ = ("_input", "answer", "headers", "is_over")

    def __init__(self, answer: asyncio.Future[list[Delivery]], input: _Input) -> None:
        self.answer = answer
        self.is_over = False
        self.headers: Mapping[str, str] = {}  # of the answer
        self._input = input

    def told(self) -> dict[str, str | int]:
        """Return attributes of its span: which member has answered, and how long the call waited and ran there."""
        found = {attribute: self.headers[name] for name, attribute in _TOLD if name in self.headers}
        return {
            name: int(value) if value.isdecimal() and len(value) <= _DIGITS_MAX else value
            for name, value in found.items()
        }

    def value(self, delivery: Delivery, reads: Reads) -> Any:
        """Return the value of an answer, or of a part of it. Raises CallFailed, CallRefused, Rejected."""
        self.headers = delivery.headers or {}
        if (error := _error_of(delivery)) is not None:
            raise error
        value = reads.value(delivery)
        if self._input.was_overlooked:
            problem = client_problem(
                "call-failed",
                "the data of the call go in parts, of which its member took none: it answered without them",
                next_step="start the service's job again with this version of moorage",
            )
            raise CallFailed(problem)
        return value


class AsyncService:
    """A service of the tenant, called through an open client: `client.service("embed")`. A method of one is called the
    same way, by both names: `client.service("text.embed")`.

    With `priority`, 0..100, its calls have a place before those of a lower one that wait at the same member; a call
    without has 50. Each second of waiting counts as 10 points more, so that nobody waits for ever. `headers` go with
    each call; a `Content-Type` among them replaces that of the data. Calls with one `affinity`, a text of 1 to 512
    characters, go to one member while it has a free place: a user, a session, a document.

    `timeout` of each method bounds a call with all its tries: the wait for a place, and the run. It defaults to the
    client's. `start_within` bounds the wait for a place alone, with all tries that found none, and `try_timeout` each
    try; both are as long as `timeout` by default. Data and answers are bytes as they are, text, an array of numpy, or
    anything that JSON can hold, dataclasses and `msgspec.Struct` among them.

    All methods raise `CallRefused` (the call did not start: no job has the service, or none of its members is there in
    time; all are full, or none had a place in time), `CallFailed` (it started: the function raised, or its process
    ended), `TimedOut` (it may have run), `Unreachable` (no member has it any more, as behind a break of a connection:
    it may have run), `NotPermitted`, and `Rejected` for data that are too large or that JSON cannot hold. A call
    outlives a break of the client's connection, and so does a stream of which no part was lost meanwhile.
    """

    def __init__(
        self,
        client: Connected,
        calls: Calls,
        name: str,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        submit: Callable[..., Coroutine[Any, Any, AsyncJob]] | None = None,
        affinity: str | None = None,
    ) -> None:
        service, dot, endpoint = name.partition(".") if isinstance(name, str) else ("", "", "")
        if not is_service(service) or (dot and (not is_service(endpoint) or endpoint in NOT_ENDPOINTS)):
            raise rejected(
                "invalid-argument",
                f"{str(name)[:80]!r} is not the name of a service, or of one and a method",
                found=str(name),
                allowed=f"{SERVICE.pattern}, or two of these with a dot between them",
                next="name the service as its job does",
            )
        if priority is not None and (type(priority) is not int or priority not in range(PRIORITY_MAX + 1)):
            raise rejected(
                "invalid-argument",
                "the priority of a call is no whole number from 0 to 100",
                found=priority,
                allowed=f"0..{PRIORITY_MAX}",
                next="leave it out for 50; the highest has the first free place",
            )
        self.name = name
        self.priority = priority
        self.headers = _own_headers(headers or {})
        self._client = client
        self._calls = calls
        self._submit = submit
        self._service = service
        self._subject = client.subjects.call(client.tenant, service)
        self._called = f"{self._subject}.{endpoint}" if endpoint else self._subject
        self._endpoint = endpoint
        self.affinity = checked_affinity(affinity)
        self._attributes = {"moorage.tenant": client.tenant, "moorage.service": name}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} of {self._client.tenant}>"

    @overload
    async def call(self, data: Any = None, *, returns: type[T], **how: Unpack[CallOptions]) -> T: ...

    @overload
    async def call(self, data: Any = None, *, returns: Any = None, **how: Unpack[CallOptions]) -> Any: ...

    async def call(self, data: Any = None, *, returns: Any = None, **how: Unpack[CallOptions]) -> Any:
        """Call the service once, and return its answer; one in parts as a list of them. `how` are `CallOptions`.

        With `returns`, the answer is one of this type: a dataclass, a `msgspec.Struct`, or what else msgspec reads.

        What did not start is tried again within the time-out. With `idempotent` also what may have run, unless its
        function failed, so also a try without an answer within `try_timeout`: then the call may run more than once. If
        nobody serves, the scheduler is asked for a member (`replicas` with `min` 0); if it says that no job has the
        service, the call is refused at once.
        """
        return (await self.answer(data, returns=returns, **how)).value

    async def answer(self, data: Any = None, *, returns: Any = None, **how: Unpack[CallOptions]) -> Answer:
        """Call the service once as `call`, and return its answer with the headers; those of its end, if it has parts.

        They are the service's own, and those of the member: how long the call waited (`Moorage-Waited-Ms`), for one.
        """
        options, reads = Options.of(how, self._client.timeout_s), Reads(returns)
        payload, about = encoded(data)
        tries = _Tries(self._calls, self._service, options)
        while True:
            try:
                return await self._once(payload, about, tries.time(), reads)
            except (CallRefused, CallFailed, Unreachable, TimedOut) as error:
                await tries.again(error)

    @overload
    def map(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        at_once: int = 64,
        returns: type[T],
        return_exceptions: Literal[False] = False,
        **how: Unpack[CallOptions],
    ) -> AsyncIterator[T]: ...

    @overload
    def map(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        at_once: int = 64,
        returns: Any = None,
        return_exceptions: bool = False,
        **how: Unpack[CallOptions],
    ) -> AsyncIterator[Any]: ...

    async def map(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        at_once: int = 64,
        returns: Any = None,
        return_exceptions: bool = False,
        **how: Unpack[CallOptions],
    ) -> AsyncIterator[Any]:
        """Call the service with each item, and yield the answers in the order of the items.

        At most `at_once` calls wait at the same time. The first error ends the iteration, and the calls that wait. With
        `return_exceptions`, an item whose call failed has its `ClientError` in place of an answer, and the others go
        on. An answer is yielded while the next item has not come: it may rest on that answer. `returns` and `how` are
        those of `call`.
        """
        _check_at_once(at_once)
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(at_once)
        answering = self._answering(returns, return_exceptions, how)
        begun: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue()  # None behind the last one

        async def begin() -> None:
            try:
                async for item in _each(items):
                    await room.acquire()
                    begun.put_nowait(loop.create_task(answering(item)))
            finally:
                begun.put_nowait(None)

        beginning = loop.create_task(begin())
        waiting: asyncio.Task[Any] | None = None
        try:
            while (waiting := await begun.get()) is not None:
                answer = await waiting
                room.release()
                yield answer
            await beginning  # raises what the items raised
        finally:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)
            left = [waiting, *(begun.get_nowait() for _ in range(begun.qsize()))]
            ending = [task for task in left if task is not None]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def submit_many(
        self,
        items: Iterable[Any],
        /,
        *,
        job: str | None = None,
        at_once: int = 64,
        timeout: Duration | None = None,
        per_replica: int | None = None,
        **fields: Unpack[Fields],
    ) -> AsyncJob:
        """Submit a job that calls the service with each item, so that the calls wait on disk, and return its handle.

        `Job.answers` yields the answers in the order of the items. The job survives this process, members and the
        server. Items are what JSON can hold, and are sent as a file. At most `at_once` calls wait at the same time,
        with the priority 10 unless the handle has one, in up to 4 of the job's replicas. Each replica has `per_replica`
        items: a sixteenth of all, but at most 1000, if it is not given. A replica with an item that
        failed has failed; `again` with `failed` calls for all of its items.

        What no member took waits without end, but for a service that no live job has for 5 minutes. What was cut off
        (by `timeout`, 30 s, that a call may wait and then run, by its member's end, or by a break) is called again, 3
        times in all: **a call may run more than once.** A worker needs the tenant's key to call (`nats-config --caller
        TENANT.jobs`), if the server asks for one. Raises `Rejected` for an item that JSON cannot hold, `NotFound` if no
        live job has the service, and what `AsyncClient.submit` raises.
        """
        from moorage.client.many_calls import submit_many

        assert self._submit is not None, "a client has made this handle"
        await self.info()  # a slip in the name would wait for minutes
        named: dict[str, Any] = {**fields}
        return await submit_many(
            self._submit, self.name, items, at_once=at_once, timeout=timeout, priority=self.priority,
            headers=self.headers, per_replica=per_replica, job=job, **named,
        )  # fmt: skip

    async def info(self) -> ServiceRow:
        """Return what the scheduler knows of the service: its job, versions, members, and its calls of about the last
        minute, as `moorage services` shows it. Raises `NotFound` if no live job has it, and what `ls` raises."""
        from moorage.schemas.answers.jobs import ServicesAnswer

        answer = read_answer(await self._client.read("services", {}), ServicesAnswer)
        for row in answer.services:
            if row.service == self._service:
                return row
        told = f"no live job of tenant {self._client.tenant} has the service {self._service}"
        raise not_found(told, next="moorage services")

    def _each(
        self, items: Iterable[Any], at_once: int, returns: Any, return_exceptions: bool, how: CallOptions
    ) -> Iterator[Callable[[], Coroutine[Any, Any, Any]]]:
        """Yield what calls the service with each item, for who awaits it elsewhere."""
        _check_at_once(at_once)
        answering = self._answering(returns, return_exceptions, how)
        for item in items:
            yield partial(answering, item)

    def _answering(
        self, returns: Any, return_exceptions: bool, how: CallOptions
    ) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        """Return what calls the service with an item, and with `return_exceptions` returns why that failed. Raises
        TypeError for an unknown option."""
        Options.of(how, self._client.timeout_s)

        async def answering(item: Any) -> Any:
            try:
                return await self.call(item, returns=returns, **how)
            except ClientError as error:
                if not return_exceptions:
                    raise
                return error

        return answering

    @overload
    def stream(
        self,
        data: Any = None,
        *,
        timeout: Duration | None = None,
        start_within: Duration | None = None,
        returns: type[T],
    ) -> AsyncIterator[T]: ...

    @overload
    def stream(
        self,
        data: Any = None,
        *,
        timeout: Duration | None = None,
        start_within: Duration | None = None,
        returns: Any = None,
    ) -> AsyncIterator[Any]: ...

    async def stream(
        self,
        data: Any = None,
        *,
        timeout: Duration | None = None,
        start_within: Duration | None = None,
        returns: Any = None,
    ) -> AsyncIterator[Any]:
        """Call the service once, and yield the parts of its answer as they come; an answer in one piece is one part.

        `timeout` bounds the wait for each part, and without `start_within` also the wait for a place. What did not
        start is tried again within that. With `returns`, each part is one of this type, as of `call`.
        """
        answering = self.answers(data, timeout=timeout, start_within=start_within, returns=returns)
        async with contextlib.aclosing(answering) as answers:  # type: ignore[type-var]
            async for answer in answers:
                yield answer.value

    async def answers(
        self,
        data: Any = None,
        *,
        timeout: Duration | None = None,
        start_within: Duration | None = None,
        returns: Any = None,
        raw: bool = False,
        ahead_bytes: int | None = None,
        on_overrun: Callable[[], None] | None = None,
    ) -> AsyncIterator[Answer]:
        """Call the service once as `stream`, and yield each part of its answer with the part's headers.

        The first one names the member and how long the call waited. With `raw` each value is bytes, whatever their
        `Content-Type` says, and parts that wait together are one value. Where more than `ahead_bytes` (256 MiB by
        default) wait for a slow reader, it fails; `on_overrun` is called then, as the reader may not come back.
        """
        reads = Reads(returns, raw=raw)
        payload, about = encoded(data)
        timeout_s = self._client.timeout_s if timeout is None else seconds(timeout)
        start_s = timeout_s if start_within is None else seconds(start_within)
        ahead = STREAM_BYTES_MAX if ahead_bytes is None else ahead_bytes
        tries = _Tries(self._calls, self._service, Options(start_s, start_s, start_s))
        while True:
            time_s = _Time(timeout_s, tries.left_s if start_within is not None else timeout_s, streams=True)
            try:
                answering = self._parts(payload, about, time_s, _Parts(ahead, on_overrun), reads)
                async with contextlib.aclosing(answering) as parts:
                    async for part in parts:
                        yield part
                return
            except CallRefused as error:  # so there were no parts
                await tries.again(error)

    # -- within

    async def _parts(
        self, payload: bytes, about: Mapping[str, str], time_s: _Time, parts: _Parts, reads: Reads
    ) -> AsyncGenerator[Answer, None]:
        async with self._under_way(payload, about, time_s, parts.put_last) as call:
            seen, pieces = 0, list[Delivery]()
            while True:
                if parts.is_overrun:
                    raise parts.too_slow
                if not parts:
                    await parts.wait(call.answer)
                    if not parts:
                        call.answer.result()  # raises
                    continue
                delivery = parts.take()
                if not _is_part(delivery):
                    call.is_over = True
                    if pieces and _error_of(delivery) is None:
                        yield Answer(call.value(_joined(pieces, delivery), reads), delivery.headers or {})
                        return
                    is_end = _all_there(delivery, seen)
                    value = call.value(delivery, ANY if is_end else reads)
                    if not is_end:
                        yield Answer(value, delivery.headers or {})
                    return
                seen += 1
                _check_next(delivery, seen)
                if reads.raw:
                    data = [delivery.data]
                    while parts and _is_part(parts.first):
                        seen += 1
                        _check_next(parts.first, seen)
                        data.append(parts.take().data)
                    yield Answer(b"".join(data), delivery.headers or {})
                    continue
                if _is_whole(delivery):
                    pieces.append(delivery)
                    continue
                yield Answer(call.value(delivery, reads), delivery.headers or {})

    @contextlib.asynccontextmanager
    async def _under_way(
        self, payload: bytes, about: Mapping[str, str], time_s: _Time, is_last: Callable[[Delivery], bool]
    ) -> AsyncIterator[_UnderWay]:
        """Send a call. A call that is left before its answer was whole is cancelled.

        Of the parts of a stream none is kept here. Raises CallRefused, CallFailed, TimedOut, Unreachable, also in place
        of what the body lets through of the bus.
        """
        try:
            there = await self._calls.inbox()
        except BusError as error:
            raise self._error(error) from None
        sending = _Input(self._client.link, f"{self._subject}.put.", payload)

        def is_last_of_all(delivery: Delivery) -> bool:
            sending.ask_for_more(delivery)
            return not sending.is_asked(delivery) and is_last(delivery)

        answers = there.answers
        token, answer = answers.open(
            self._called,
            time_s.answer_s,
            is_last_of_all,
            is_kept=not time_s.streams,
            in_all=not time_s.streams,
            first_s=time_s.first_s,
        )
        reply, call = there.send(self._subject, token, answer), _UnderWay(answer, sending)
        member = self._calls.affinity.member(there, self._subject, self.affinity) if self.affinity else ""
        with caller_span(f"call {self.name}", self._attributes, call.told) as headers:
            try:
                told = {**headers, **time_s.headers, **about}
                sending.is_announced = await self._send(payload, reply, told, member)
                yield call
            except BusError as error:
                # a call that was sent may run on, and its member cannot know that the connection was lost
                call.is_over = isinstance(error, NotSent) or not isinstance(error, RequestTimeout | Lost)
                if member and isinstance(error, NoResponders):
                    there.gone(self._subject, member)
                    raise self._member_gone from None
                raise self._error(error, there) from None
            finally:
                sending.stop()
                there.over(reply, call.headers.get(MEMBER, ""))
                answers.abandon(token)
                if answer.done() and not answer.cancelled():
                    answer.exception()  # nobody asks for it where something else was raised first
                if not call.is_over:
                    self._calls.cancel(self._subject, reply)

    async def _once(self, payload: bytes, about: Mapping[str, str], time_s: _Time, reads: Reads) -> Answer:
        """Send the call, and return the answer. Raises CallRefused, CallFailed, TimedOut, Unreachable."""
        async with self._under_way(payload, about, time_s, _is_last) as call:
            *parts, last = [each for each in await call.answer if SEND not in (each.headers or ())]
            if _is_part(last):
                raise CallFailed(
                    client_problem(
                        "call-failed", f"the answer has more than {REPLIES_MAX} parts", next_step="stream it"
                    )
                )
            call.is_over = True
            if _is_whole(last):
                return Answer(call.value(_joined(parts, last), reads), last.headers or {})
            if not _is_end(last):
                return Answer(call.value(last, reads), last.headers or {})
            call.value(last, ANY)
            values = [call.value(part, ANY) for part in parts]
        _all_there(last, len(parts))
        return Answer(reads.converted(values), last.headers or {})

    async def _send(self, payload: bytes, reply: str, headers: dict[str, str], member: str) -> bool:
        """Send the call, to this member or to any, and return whether its data are still to come, in parts."""
        headers |= self.headers
        to = member_of(self._subject, member) if member else self._called
        if member and self._endpoint:
            headers[ENDPOINT] = self._endpoint
        if self.priority is not None:
            headers[PRIORITY] = str(self.priority)
        link, in_parts = self._client.link, False
        try:
            is_sent = await link.publish(to, payload, reply, headers)
        except PayloadTooLarge:
            if len(payload) > INPUT_BYTES_MAX:
                raise
            in_parts = True
            is_sent = await link.publish(to, b"", reply, headers | {INPUT: str(len(payload))})
        if not is_sent:
            raise NotSent(self._subject)
        return in_parts

    @property
    def _member_gone(self) -> CallRefused:
        """The error of a call whose own member has left: the next try goes to another one."""
        told = f"service {self.name} of {self._client.tenant}: the member with its affinity has left"
        return CallRefused(client_problem(NO_MEMBER, told, next_step="call again"))

    def _unheard(self, where: str, timeout_s: float, there: Whereabouts) -> ClientError:
        """Return the exception for a call to members that cannot answer to this inbox."""
        right = inbox("submitter", self._client.tenant)
        told = (
            f"{where}: no answer within {timeout_s:.3g} s. A member is there, but the server takes no message of it to"
            f" your inbox {there.answers.base}: members have no permission for {there.prefix}.>; the call may have run"
        )
        fix = f"name the inbox of your key, as {right}: --inbox-prefix, MOORAGE_INBOX_PREFIX, or inbox_prefix"
        return TimedOut(client_problem("timed-out", told, next_step=fix))

    def _error(self, error: BusError, there: Whereabouts | None = None) -> ClientError:
        """Return the exception for what the bus says, of a call that is sent from `there`."""
        where = f"service {self.name} of {self._client.tenant}"
        if isinstance(error, NoResponders | NotSent):
            gone = isinstance(error, NotSent)
            told = "the connection is down" if gone else "nobody serves it"
            problem = client_problem(NO_SERVICE, f"{where}: {told}", next_step="see that its job runs: moorage ls")
            return CallRefused(problem)
        if isinstance(error, RequestTimeout):
            if there is not None and there.is_unheard(self._subject):
                return self._unheard(where, error.timeout_s, there)
            return timed_out(f"{where}: no answer within {error.timeout_s:.3g} s; the call may have run")
        if isinstance(error, Lost):
            told = f"{where}: no member has the call any more; it may have run"
            return Unreachable(client_problem("unreachable", told, next_step="call again, if it may run twice"))
        if isinstance(error, PermissionRefused):
            return NotPermitted(error.problem)
        if isinstance(error, PayloadTooLarge):
            return rejected(
                "too-large",
                f"the data of a call to {where} have {error.size_bytes} bytes",
                found=error.size_bytes,
                allowed=f"{INPUT_BYTES_MAX} bytes",
                next="put the data where the service can fetch them, and send their address",
            )
        return ClientError(error.problem)


class _Tries:
    """The tries of one call within its time, with pauses between them. A member is asked for where nobody serves."""

    def __init__(self, calls: Calls, service: str, options: Options) -> None:
        self._began_s = time.monotonic()
        self._ends_s = self._began_s + options.timeout_s
        self._starts_s = self._began_s + options.start_s
        self._options = options
        self._calls = calls
        self._service = service
        self._backoff = Backoff(AGAIN_S_MIN, AGAIN_S_MAX)
        self._is_again = False

    @property
    def left_s(self) -> float:
        """For how long the next try may wait for a place."""
        return max(self._starts_s - time.monotonic(), 0.001)

    def time(self) -> _Time:
        """Return the time of the next try."""
        answer_s = min(max(self._ends_s - time.monotonic(), 0.001), self._options.try_s)
        whole_s = self._ends_s - self._began_s if self._is_again else 0.0
        return _Time(answer_s, min(self.left_s, answer_s), whole_s=whole_s)

    async def again(self, error: CallRefused | CallFailed | Unreachable | TimedOut) -> None:
        """Wait until the next try. Raises the error if there is none."""
        is_refused, now_s = isinstance(error, CallRefused), time.monotonic()
        may_again = is_refused or (self._options.idempotent and error.code not in _FAILS_AGAIN)
        if not is_refused:  # the next try waits for a place anew
            self._starts_s = min(now_s + self._options.start_s, self._ends_s)
        told_s = error.retry_after_s if isinstance(error, CallRefused) else 0.0
        after_s = max(self._backoff.next_s(), told_s) * random.uniform(0.5, 1.5)
        if not may_again or now_s + max(after_s, told_s) >= self._starts_s:
            raise await self._with_why(error) from None
        if error.code == NO_SERVICE and (refused := self._calls.wake(self._service, self._began_s)) is not None:
            problem = msgspec.structs.replace(refused, code=NO_SERVICE, fault=error.problem.fault)
            raise CallRefused(problem) from None
        await asyncio.sleep(after_s)
        if self._starts_s - time.monotonic() < TRY_S_MIN:
            raise await self._with_why(error) from None
        self._is_again = True

    async def _with_why(self, error: ClientError) -> ClientError:
        """Return the error of a call that gives up; of one that nobody served, as `no-member` with the job that has the
        service."""
        if error.code != NO_SERVICE:
            return error
        job, why = await self._calls.why_none(self._service)
        if not job:
            return error
        told = error.problem.message + (f" yet; of its job {job}: {why}" if why else f" yet, though job {job} has it")
        problem = msgspec.structs.replace(error.problem, code=NO_MEMBER, message=told, next=f"moorage explain {job}")
        return CallRefused(problem)


class _Input:
    """The data of one call that go in parts, as far as its member asks for them. `is_announced` is set where they do:
    then the call itself went without data."""

    def __init__(self, link: Link, subjects: str, payload: bytes) -> None:
        self.is_announced = False
        self._link = link
        self._subjects = subjects  # what the subjects of parts begin with
        self._payload = payload
        self._upto = 0
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._asking: list[asyncio.Task[None]] = []

    @property
    def was_overlooked(self) -> bool:
        """Whether no member has asked for data which only go in parts."""
        return self.is_announced and self._task is None

    def is_asked(self, delivery: Delivery) -> bool:
        """Return whether a message asks for parts, which then are sent."""
        headers = delivery.headers or {}
        if SEND not in headers:
            return False
        to, upto = headers.get(SEND_TO, ""), headers[SEND]
        if to.startswith(self._subjects) and upto.isdecimal() and len(upto) <= _DIGITS_MAX:
            self._upto = int(upto)
            self._more.set()
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._send(to))
        return True

    def ask_for_more(self, delivery: Delivery) -> None:
        """Let the member send more parts of an answer, if this one says so."""
        headers = delivery.headers or {}
        to, part = headers.get(SEND_TO, ""), headers.get(PART, "")
        if to.startswith(self._subjects) and part.isdecimal() and len(part) <= _DIGITS_MAX:
            asking = self._link.publish(to, b"", "", {SEND: str(int(part) + PARTS_AHEAD)})
            self._asking.append(asyncio.get_running_loop().create_task(_quietly(asking)))
            self._asking = [task for task in self._asking if not task.done()]

    def stop(self) -> None:
        for task in [*self._asking, *([] if self._task is None else [self._task])]:
            task.cancel()

    async def _send(self, to: str) -> None:
        size = int(self._link.max_payload_bytes * INPUT_PART)
        with contextlib.suppress(BusError):  # the member gives up, and the call's own time ends its wait
            for number, at in enumerate(range(0, len(self._payload), size), 1):
                while number > self._upto:
                    self._more.clear()
                    await self._more.wait()
                await self._link.publish(to, self._payload[at : at + size], "", {PART: str(number)})


class _Parts:
    """The parts of a stream that have come, and that its reader has not taken."""

    def __init__(self, bytes_max: int, on_overrun: Callable[[], None] | None) -> None:
        self.is_overrun = False
        self._kept: deque[Delivery] = deque()
        self._bytes = 0
        self._bytes_max = bytes_max
        self._on_overrun = on_overrun
        self._waiter: asyncio.Future[None] | None = None
        self._is_watching = False  # the end of the answer wakes its reader, too

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def first(self) -> Delivery:
        return self._kept[0]

    def take(self) -> Delivery:
        delivery = self._kept.popleft()
        self._bytes -= len(delivery.data) + PART_BYTES
        return delivery

    async def wait(self, answer: asyncio.Future[list[Delivery]]) -> None:
        """Return once a part is here, or the answer is over."""
        if not (self._kept or answer.done()):
            self._waiter = asyncio.get_running_loop().create_future()
            if not self._is_watching:
                self._is_watching = True
                answer.add_done_callback(self._wake)
            await self._waiter

    def _wake(self, *_: object) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def put_last(self, delivery: Delivery) -> bool:
        """Keep a part, and return whether it is the last one; with more than may wait, keep none."""
        self._bytes += len(delivery.data) + PART_BYTES
        if self._bytes > self._bytes_max:
            if self._on_overrun is not None and not self.is_overrun:
                self._on_overrun()
            self.is_overrun = True
            self._kept.clear()
        self._kept.append(delivery)
        self._wake()
        return self.is_overrun or not _is_part(delivery)

    @property
    def too_slow(self) -> CallFailed:
        """The error of a reader that takes too few."""
        mib = self._bytes_max >> 20
        told = f"the parts of the answer came faster than they were read: more than {mib} MiB waited"
        return CallFailed(
            client_problem("call-failed", told, next_step="read the parts faster, or let the service wait")
        )


class NotSent(Disconnected):
    """The connection is down, and the call was not sent."""


def _check_at_once(at_once: int) -> None:
    if at_once < 1:
        raise rejected("invalid-argument", "at_once must be at least 1", found=at_once, next="leave it out")


async def _each(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _own_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that a caller gives its calls. Raises `Rejected`, which shows no value: it may be secret."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        if not is_header(name, value) or name.lower() in OF_A_CALL:
            raise rejected(
                "invalid-argument",
                f"{str(name).partition(':')[0][:80]!r} cannot be a header of a call with this value",
                allowed=f"a name of {NAME_ALLOWED} that is none of moorage's own, and one line of text",
                next="give its time, priority and data as such; all other headers are yours",
            )
        found[CONTENT_TYPE if name.lower() == CONTENT_TYPE.lower() else name] = value
    if wrong := too_large(found, "the call"):
        raise rejected(
            "too-large", wrong, allowed=f"{OWN_HEADERS_BYTES_MAX} bytes", next="put what is large into the data"
        )
    return found


def _is_last(delivery: Delivery) -> bool:
    return not _is_part(delivery)


def _is_whole(delivery: Delivery) -> bool:
    """Return whether a message belongs to an answer that is one value, and has come in parts for its size."""
    return delivery.headers is not None and OUTPUT in delivery.headers and ERROR not in delivery.headers


def _joined(parts: list[Delivery], last: Delivery) -> Delivery:
    """Return the message that these parts are for. Raises CallFailed if some are missing, or come out of order."""
    _all_there(last, len(parts))
    data, said = b"".join(part.data for part in parts), (last.headers or {}).get(OUTPUT)
    if [(part.headers or {}).get(PART) for part in parts] != [str(at) for at in range(1, len(parts) + 1)]:
        raise CallFailed(client_problem("call-failed", "the parts of the answer came out of order"))
    if said != str(len(data)):
        raise CallFailed(client_problem("call-failed", f"{len(data)} of {said} bytes of the answer arrived"))
    return Delivery(last.subject, last.reply, data, last.headers, last.received_monotonic_s)


async def _quietly(sending: Coroutine[Any, Any, bool]) -> None:
    with contextlib.suppress(BusError, RuntimeError):
        await sending


def _is_end(last: Delivery) -> bool:
    """Return whether an answer's last message says how many parts were before it."""
    return last.headers is not None and END in last.headers


def _all_there(last: Delivery, seen: int) -> bool:
    """Return whether an answer came in parts, of which the last message says how many there are. Raises CallFailed if
    some are missing."""
    said = None if last.headers is None else last.headers.get(END)
    if said is None:
        return False
    if said != str(seen):
        raise CallFailed(client_problem("call-failed", f"{seen} of {said} parts of the answer arrived"))
    return True


def _check_next(part: Delivery, number: int) -> None:
    """Raise CallFailed if a part of a stream is another one than this: those before it were lost with a connection."""
    found = (part.headers or {}).get(PART, "")
    if found != str(number):
        told = f"part {number} of the answer was lost with a connection: part {found[:_DIGITS_MAX]} came"
        raise CallFailed(client_problem("call-failed", told, next_step="call again, if it may run twice"))


def _is_part(delivery: Delivery) -> bool:
    return delivery.headers is not None and PART in delivery.headers


def _error_of(delivery: Delivery) -> CallRefused | CallFailed | Rejected | None:
    """Return the error that an answer is; None for an answer."""
    headers = delivery.headers or {}
    name = headers.get(ERROR)
    if name is None:
        return None
    try:
        told = _decode_error(delivery.data)
    except UNREADABLE:  # of a member that is not moorage's own
        started = CALL_ERRORS.get(name, CALL_ERRORS[FAILED])[1]
        told = CallErrorBody(name, delivery.data[:200].decode(errors="replace"), started)
    usual = CALL_ERRORS.get(told.error, CALL_ERRORS[FAILED])[0]
    code = headers.get(ERROR_CODE, "")
    status = int(code) if code.isdecimal() and len(code) <= _DIGITS_MAX else usual
    is_own = told.error == FAILED and status != usual
    message = ": ".join(filter(None, (str(status) if is_own else told.kind, told.message)))
    if told.error == INPUT_REFUSED:
        next_step = "put the data where the service can fetch them, and send their address"
        return rejected("too-large", message, next=next_step)
    if told.error == BAD_HEADER:
        return rejected("invalid-argument", message, next="call it as this version of the service says")
    if told.error == NO_ENDPOINT:
        return Rejected(client_problem("no-endpoint", message, next_step="call one of the methods that it names"))
    problem: Problem = client_problem(_CODES.get(told.error, "call-failed"), message, found="" if is_own else told.kind)
    if told.started:
        return CallFailed(problem, status=status, headers=headers, kind=told.kind)
    return CallRefused(msgspec.structs.replace(problem, retry_after_s=told.retry_after_ms / 1000 or None))
