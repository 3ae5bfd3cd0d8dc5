"""The base of every client: one connection, and requests over it that are sent again until they are answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeVar

import msgspec

from moorage.bus import errors as bus
from moorage.bus.contexts import Context, with_inbox
from moorage.bus.errors import BusError, CannotConnect, HandlerFailed, NotAuthorized, PermissionRefused
from moorage.bus.health import State
from moorage.bus.inbox import Mux
from moorage.bus.own_fleets import own_fleet
from moorage.bus.target import find_context
from moorage.bus.transport import Handler, Subscribed
from moorage.client.asking import Asking, decode_act, decode_answer
from moorage.client.durations import Duration, seconds
from moorage.client.errors import BadContext, NotPermitted, no_server, rejected
from moorage.client.patience import Patience, of_client
from moorage.client.tenant import TENANT_DEFAULT, find_tenant, named_tenant
from moorage.schemas.actors import NO_OPERATOR
from moorage.schemas.codec import encode
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Answer
from moorage.schemas.names import TENANT, is_tenant
from moorage.schemas.ranges import Ranges, format_ranges
from moorage.schemas.roles import INBOX, inbox, operator_of
from moorage.schemas.subjects import READ_VERBS, Subjects

if TYPE_CHECKING:
    from moorage.bus.own_fleets import Fleet
    from moorage.client.answers import Explanation, JobInfo
    from moorage.client.follow.follower import Histories
    from moorage.client.follow.job_history import JobHistory
    from moorage.client.transport import ClientTransport, Link
    from moorage.schemas.operate import Act, Done

CONNECT_TIMEOUT_S_DEFAULT: Final = 5.0
WAIT_S_DEFAULT: Final = 24 * 3600.0
NOT_OPEN: Final = "the client is not open, or was closed: use it within `with` (an AsyncClient: `async with`)"
CLOSED_MEANWHILE: Final = "the client was closed while it was opened"

log = logging.getLogger("moorage.client")

T = TypeVar("T")


class Connected:
    """The connection of an `AsyncClient`, which says what the arguments mean and what their defaults are, and its
    requests as on the wire."""

    def __init__(
        self,
        target: Context | str | None,
        *,
        tenant: str | None,
        prefix: str,
        timeout: Duration | None,
        connect_timeout: Duration,
        wait: Duration,
        name: str,
        on_wait: Callable[[], None] | None,
        transport: ClientTransport | None,
        inbox_prefix: str | None = None,
    ) -> None:
        if inbox_prefix is not None and transport is None:
            try:
                target = with_inbox(find_context(target), prefix=inbox_prefix)
            except bus.BadContext as error:
                raise BadContext(error.problem) from None
        if target is not None and transport is not None:
            raise TypeError("a target and a transport exclude each other: the transport replaces NATS")
        self.tenant = (
            find_tenant(tenant, target=target) if transport is None else (named_tenant(tenant) or TENANT_DEFAULT)
        )
        if not is_tenant(self.tenant):
            raise rejected(
                "invalid-argument",
                f"{self.tenant!r} is not a valid name of a tenant",
                found=self.tenant,
                allowed=TENANT.pattern,
                next="name one with --tenant or MOORAGE_TENANT" + _as_tenant(self.tenant),
            )
        self.subjects = Subjects(prefix)
        self.patience: Patience = of_client
        if timeout is not None:
            given_s = seconds(timeout)
            self.patience = lambda _verb, _is_clustered: given_s
        self.wait_s = seconds(wait)
        self._following: Histories | None = None
        self.context: Context | None = None
        self.found: Fleet | None = None  # taken because nothing is named, and nothing answers at the default address
        self.reads_found = False  # whether such a fleet is only read, as of a command
        self._target = target
        self._transport = transport
        self._connect_timeout_s = seconds(connect_timeout)
        self._name = name
        self._asking = Asking(on_wait=on_wait)
        self._loop: asyncio.AbstractEventLoop | None = None  # where it is open
        self._opening: object | None = None  # of the last `open`, until it is closed
        self._beside: set[asyncio.Task[None]] = set()
        self._connection: Link | None = None
        self._mux: Mux | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._asking.where or 'not connected'} tenant {self.tenant}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be sent to another process: open one there, and get the job by client.job(id)")

    @property
    def where(self) -> str:
        """The server's name, without secrets; "" before the first connection."""
        return self._asking.where

    @property
    def server_at(self) -> str:
        """Host and port of the server connected last; else its name, as `where`."""
        return (self._connection.server_at if self._connection is not None else "") or self.where

    @property
    def timeout_s(self) -> float:
        """How long an answer is waited for, retries included, where `_timeout_s` has nothing else for the verb."""
        return self._timeout_s("")

    def _timeout_s(self, verb: str) -> float:
        return self.patience(verb, self._connection is not None and self._connection.is_clustered)

    @property
    def asked(self) -> str:
        """The verb of the request that was sent last; "" before the first."""
        return self._asking.asked

    @property
    def put_off(self) -> Problem | None:
        """Why there is no answer: the server refuses the key at reconnects, or "not now" was answered; else None."""
        refused = self._asking.refused
        return self._asking.put_off if refused is None else refused.problem

    @property
    def unclear(self) -> bool:
        """Whether a request was sent whose answer did not come: it may have been served."""
        return self._asking.unclear

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect. Raises `Unreachable`, `NotPermitted`, `BadContext`, and RuntimeError if the client is open, or is
        closed meanwhile."""
        if self._loop is not None:
            raise RuntimeError("the client is open already")
        self._loop = asyncio.get_running_loop()
        opening = self._opening = object()
        try:
            connection = await self._connect()
            if self._opening is not opening:
                await self._release(connection)
                raise RuntimeError(CLOSED_MEANWHILE)
            self._connection, self._asking.leaf = connection, connection.leaf
            mux = await Mux.open(connection)
            if self._opening is not opening:
                await mux.close()
                raise RuntimeError(CLOSED_MEANWHILE)
            self._mux = mux
        except BaseException as error:
            if self._opening is not opening:  # `close` was called, and perhaps `open` again: leave that alone
                if isinstance(error, BusError):
                    raise RuntimeError(CLOSED_MEANWHILE) from None
                raise
            await self.close()
            if isinstance(error, CannotConnect):
                raise no_server(error) from None
            if isinstance(error, NotAuthorized | PermissionRefused):
                raise NotPermitted(error.problem) from None
            if isinstance(error, bus.BadContext):
                raise BadContext(error.problem) from None
            raise

    async def _connect(self) -> Link:
        if self._transport is not None:
            self._asking.where = self._transport.where
            return await self._transport.connect(self._name, self._on_state, self._on_error)
        from moorage.bus.connection import connect  # imports nats-py, which is slow

        self.context, self.found = own_fleet(find_context(self._target))
        self._asking.where = self.context.where
        try:
            return await self._connect_as(connect, self.context)
        except PermissionRefused as refused:
            theirs = inbox("submitter", self.tenant)
            if self.context.inbox_prefix != INBOX or not refused.subject.startswith(f"{INBOX}.".lower()):
                raise
            try:
                context = with_inbox(self.context, prefix=theirs)
                connection = await self._connect_as(connect, context)
            except PermissionRefused:
                told = f"may have no inbox: the server refuses {INBOX}.> and {theirs}.>"
                raise PermissionRefused("subscription", f"{INBOX}.>", told=told) from None
            self.context = context
            return connection

    async def _connect_as(self, connect: Callable[..., Awaitable[Link]], context: Context) -> Link:
        return await connect(
            context,
            self._name,
            on_state=self._on_state,
            on_error=self._on_error,
            on_regained=self._on_regained,
            give_up_after_s=self._connect_timeout_s,
        )

    async def close(self) -> None:
        """Close the connection; jobs go on. Calls that still wait for a job or for events raise RuntimeError or
        `ConnectionClosed`, and an `open` that still connects raises RuntimeError."""
        mux, connection, following = self._mux, self._connection, self._following
        self._following = self._mux = self._connection = self._loop = self._opening = None
        if following is not None:
            following.close()
        try:
            if mux is not None:
                await mux.close()
        finally:
            if connection is not None:
                await self._release(connection)

    async def _release(self, connection: Link) -> None:
        await (connection.close() if self._transport is None else self._transport.release(connection))

    @property
    def operator(self) -> str:
        """The operator's name in the inbox of the context's key, which alone may act as it; `_` without such a key."""
        return operator_of(self.context.inbox_prefix) if self.context is not None else NO_OPERATOR

    def _admin_subject(self, verb: str) -> str:
        return self.subjects.admin(verb, self.operator)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in this client's loop, beside what its callers await. Do nothing if the client is closed."""
        if self._loop is None:
            work.close()
            return
        task = self._loop.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    @property
    def _histories(self) -> Histories:
        """The jobs that this client follows. Raises RuntimeError if the client is not open."""
        if self._following is None:
            from moorage.client.follow.follower import Histories  # most commands follow no job

            self._opened()
            self._following = Histories(self, None if self._transport is None else self._transport.upkeep)
        return self._following

    def _expect(self, job: str | None) -> JobHistory | None:
        """Return `Histories.expect` of this job; None if this client follows no job yet, or if `job` is None."""
        return None if self._following is None or job is None else self._following.expect(job)

    def _on_error(self, error: BusError) -> None:
        if isinstance(error, NotAuthorized):  # at a reconnect: the user's key was changed or revoked
            self._asking.refused = error
        elif isinstance(error, PermissionRefused):  # the caller sees it, if it still waits for that subject
            log.info("%s", error)
        else:
            log.error("%s", error, exc_info=error.cause if isinstance(error, HandlerFailed) else None)

    def _on_regained(self, subjects: list[str]) -> None:
        for subject in subjects:
            log.info("the NATS server takes the subscription to %s again", subject)
        if self._following is not None:
            self._following.refresh()  # what was said meanwhile is lost

    def _on_state(self, state: State) -> None:
        if state is State.CONNECTED:
            self._asking.refused = None
            if self._following is not None:
                self._following.refresh()

    # ---------------------------------------------------------------------------------------------------- asking

    async def read(self, verb: str, arguments: Mapping[str, Any], tenant: str | None = None) -> dict[str, Any]:
        """Send a request as `answer` does, and return only the `data` of the answer frame."""
        data: dict[str, Any] = (await self.answer(verb, arguments, tenant)).data
        return data

    async def show(self, job: str, replicas: Ranges | None = None, tenant: str | None = None) -> JobInfo:
        """Return the answer of `show` about a job, with the rows of these replicas if some are named."""
        from moorage.client.answers import JobInfo  # slow to import, and most clients need it late or never
        from moorage.client.reading import as_struct

        asked = {"job": job} if replicas is None else {"job": job, "replicas": format_ranges(replicas)}
        return as_struct(JobInfo, await self.read("show", asked, tenant))

    async def explain(self, job: str, tenant: str | None = None) -> Explanation:
        """Return the answer of `explain` about a job."""
        from moorage.client.answers import Explanation
        from moorage.client.reading import as_struct

        return as_struct(Explanation, await self.read("explain", {"job": job}, tenant))

    async def answer(self, verb: str, arguments: Mapping[str, Any], tenant: str | None = None) -> Answer:
        """Send a request of this tenant that reads (or `cancel`), and return the whole answer frame.

        Another `tenant` may be read by operators (`OPERATOR_READS`). Raises what `AsyncClient.submit` raises, and
        `NotFound`.
        """
        subject = self.subjects.api(self.tenant if tenant is None else tenant, verb)
        return await self._request(subject, encode(arguments), decode_answer)

    async def operate(self, verb: str, asked: Any = None) -> Answer:
        """Send an operator's request that is answered with data, and return the whole answer frame.

        The workers of a large fleet (verb `fleet` without `asked`) arrive in several frames, which are joined here.
        """
        subject, payload = self._admin_subject(verb), b"{}" if asked is None else encode(asked)
        answer: Answer = await self._request(subject, payload, decode_answer)
        while verb == "fleet" and asked is None and (after := answer.data.pop("next", "")):
            page = await self._request(subject, encode({"after": after}), decode_answer)
            workers = answer.data["workers"] + page.data["workers"]
            answer = msgspec.structs.replace(page, data={**page.data, "workers": workers})
        return answer

    async def act(self, verb: str, act: Act) -> Done:
        """Send an operator's order (see `schemas.operate`). `admin` has a method for each, which raises the same."""
        return await self._request(self._admin_subject(verb), encode(act), decode_act)

    def _ask(self, verb: str, payload: bytes, decode: Callable[[bytes], T | Problem]) -> Coroutine[Any, Any, T]:
        return self._request(self.subjects.api(self.tenant, verb), payload, decode)

    def _request(self, subject: str, payload: bytes, decode: Callable[[bytes], T | Problem]) -> Coroutine[Any, Any, T]:
        verb = subject.rpartition(".")[2]
        if verb not in READ_VERBS:
            self.refuse_found()
        return self._asking.ask(self._opened(), subject, payload, decode, self._timeout_s(verb))

    def refuse_found(self) -> None:
        """Raise `Rejected` where the fleet was not named and is not this folder's, and may only be read."""
        if self.reads_found and self.found is not None:
            raise rejected(
                "failed-precondition",
                f"no fleet is named, and the one of yours that was found is that of {self.found.folder}",
                next=f"name it: --nats {self.found.up.url}; or type this in its folder",
            )

    def _opened(self) -> Mux:
        """Return the inbox for requests. Raises RuntimeError if this client is not open in this event loop."""
        if self._mux is None:
            raise RuntimeError(NOT_OPEN)
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("this client was opened in another event loop: open one client in each loop")
        return self._mux

    async def again(self, once: Callable[[], Awaitable[T]]) -> T:
        """Call `once`, and again for at most `timeout` if no answer came. `once` must be idempotent.

        Raises the SDK's errors in place of the bus's; other errors pass at once.
        """
        return await self._asking.again(once, self.timeout_s)

    def check_connected(self) -> None:
        """Raise `Unreachable` while the connection is lost, and `NotPermitted` if the server refuses the key since."""
        if not self.link.is_connected:
            if (refused := self._asking.refused) is not None:
                raise NotPermitted(refused.problem)
            raise no_server(CannotConnect(self._asking.where, None))

    @property
    def link(self) -> Link:
        """The connection, for requests that have no method here. Raises RuntimeError if the client is not open."""
        if self._connection is None:
            raise RuntimeError(NOT_OPEN)
        return self._connection

    async def subscribe(self, subject: str, handler: Handler) -> Subscribed:
        """Subscribe to a subject; the handler must not block, and should only enqueue. Raises `NotPermitted`."""
        try:
            return await self.link.subscribe(subject, handler)
        except PermissionRefused as error:
            raise NotPermitted(error.problem) from None

    async def subscribe_ahead(self, subject: str, handler: Handler) -> Subscribed:
        """Subscribe without a round trip: `refused` of the subscription is valid once a later request is answered."""
        return await self.link.subscribe_ahead(subject, handler)


def _as_tenant(name: str) -> str:
    """Return ": " and the name in the form of a tenant's name; "" if it has none."""
    slug = "-".join("".join(char if char.isascii() and char.isalnum() else " " for char in name.lower()).split())
    return f": {slug}" if is_tenant(slug) else ""
