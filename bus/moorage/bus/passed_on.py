"""JetStream as a worker with a key has it: a scheduler passes its questions on to nats-server, which answers it.

See `schemas.passed_on`. Where the site's rights are of an earlier release, the worker asks the server itself, as it did
then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from moorage.bus.errors import Disconnected, NoResponders, PermissionRefused, RequestTimeout
from moorage.bus.jetstream import ERR_TOO_MANY, MESSAGE_ID, Asked, JsError
from moorage.bus.jetstream_answers import read_ack
from moorage.bus.link import Link
from moorage.bus.transport import Delivery
from moorage.schemas.names import is_worker
from moorage.schemas.passed_on import API, NO_LEADER, OBJECTS, PassedOn
from moorage.schemas.roles import RIGHTS_ANEW, inbox
from moorage.schemas.subjects import Subjects

#: pieces of one worker that are under way at a time, each of another object: they pass through one connection of a
#: scheduler, which the server cuts off if too much waits for it
PIECES_MAX: Final = 4
#: how often a message to store is sent: again if no answer comes, or the server has too much to store
TRIES_MAX: Final = 8
#: for how long it is sent again while no leader says whose an object is: its attempt's end could not be told either
LEADERLESS_S: Final = 600.0
#: the longest pause if the server has too much to store, or did not come to what was asked
BUSY_S: Final = 4.0
#: how often a question is asked in all, if no whole answer comes
READS_MAX: Final = 4
#: the longest silence in a batch that is read: it waits in the server behind those of all other workers
BATCH_S: Final = 30.0
#: how long a worker waits for a scheduler that passes on, and how often it looks
PATIENCE_S: Final = 60.0
AGAIN_S: Final = 0.5
#: what to do where the worker has rights by which schedulers pass on, and none does
_NO_SCHEDULER: Final = (
    "is a scheduler running? Files, results and checkpoints pass through a scheduler of this release or a later one"
)

T = TypeVar("T")

log = logging.getLogger("moorage.worker")


def through_schedulers(connection: Link, prefix: str, api: str = API) -> Asked:
    """Return what `JetStream` of a worker is to ask.

    It is the connection itself for a user without a worker's inbox, as where there are no keys, and where JetStream is
    asked by another prefix than its own (`api`): `nats-config` writes none for workers.
    """
    if api != API:
        return connection
    worker = connection.inbox_prefix.removeprefix(inbox("worker", ""))
    if worker == connection.inbox_prefix or not is_worker(worker):
        return connection
    return _ThroughSchedulers(connection, worker, PassedOn(Subjects(prefix)))


class _ThroughSchedulers:
    """Asks through schedulers; or the server itself while it refuses that, as with rights of an earlier release."""

    def __init__(self, connection: Link, worker: str, passed_on: PassedOn) -> None:
        self._connection = connection
        self._worker = worker
        self._passed_on = passed_on
        self._is_direct = False
        self._pieces = asyncio.Semaphore(PIECES_MAX)
        #: one for each object that is being stored: its pieces must not pass each other, on their way through several
        #: schedulers or when one is sent again
        self._in_order = WeakValueDictionary[str, asyncio.Lock]()

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Delivery:
        """Ask as `Link.request`, and again if no answer comes: the scheduler that was to pass it on may have ended. A
        message to store is stored once, and sent again also while no leader says whose an object is."""
        if not subject.startswith(f"{OBJECTS}."):
            return await self._read(subject, lambda of: self._connection.request(of, payload, timeout_s, headers))
        marked = {**(headers or {}), MESSAGE_ID: secrets.token_hex(8)}

        def store(of: str) -> Awaitable[Delivery]:
            return self._connection.request(of, payload, timeout_s, marked)

        if self._passed_on.is_small(subject):
            return await self._stored(subject, store)
        async with self._pieces, self._in_order.setdefault(subject, asyncio.Lock()):
            return await self._stored(subject, store)

    async def _stored(self, subject: str, store: Callable[[str], Awaitable[Delivery]]) -> Delivery:
        loop = asyncio.get_running_loop()
        left, until_s = TRIES_MAX, loop.time() + LEADERLESS_S
        while True:
            try:
                stored = await self._ask(subject, store)
            except (RequestTimeout, Disconnected):
                left -= 1
                if not left:
                    raise
                continue
            answer = read_ack(stored.data)
            if isinstance(answer, JsError) and answer.code == NO_LEADER and loop.time() < until_s:
                await asyncio.sleep(AGAIN_S)
            elif isinstance(answer, JsError) and answer.err_code == ERR_TOO_MANY and left > 1:
                left -= 1
                await asyncio.sleep(random.uniform(0, BUSY_S))
            else:
                return stored

    async def request_many(
        self, subject: str, payload: bytes, idle_timeout_s: float, is_last: Callable[[Delivery], bool]
    ) -> list[Delivery]:
        """Ask as `Link.request_many`, but for the silence that is borne, and again if no whole answer comes: the server
        cuts off who reads too slowly, too."""
        patience_s = max(idle_timeout_s, BATCH_S)
        return await self._read(subject, lambda of: self._connection.request_many(of, payload, patience_s, is_last))

    async def _read(self, subject: str, ask: Callable[[str], Awaitable[T]]) -> T:
        for _ in range(READS_MAX - 1):
            with contextlib.suppress(RequestTimeout, Disconnected):
                return await self._ask(subject, ask)
            await asyncio.sleep(random.uniform(0, BUSY_S))
        return await self._ask(subject, ask)

    async def _ask(self, subject: str, ask: Callable[[str], Awaitable[T]]) -> T:
        through = self._passed_on.asked(self._worker, subject)
        if through is None:  # no worker may do that, and the server would log that one tried
            raise PermissionRefused("publish", subject.lower())
        if self._is_direct:
            try:
                return await ask(subject)
            except PermissionRefused:  # the site has newer rights by now
                self._is_direct = False
        try:
            return await self._patiently(through, ask)
        except PermissionRefused as error:
            refused = error
        try:
            answer = await ask(subject)
        except PermissionRefused:
            raise refused from None
        self._is_direct = True
        log.warning("files, results and checkpoints go past the schedulers: %s", RIGHTS_ANEW)
        return answer

    async def _patiently(self, through: str, ask: Callable[[str], Awaitable[T]]) -> T:
        """Ask, and again for a while if there is no scheduler: without one, the job's end could not be told either."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + PATIENCE_S
        while True:
            try:
                return await ask(through)
            except NoResponders:
                if loop.time() > until_s:
                    raise NoResponders(through, _NO_SCHEDULER) from None
            await asyncio.sleep(AGAIN_S)
