"""Passes what workers ask of buckets on to nats-server, and the server answers the worker: see `schemas.passed_on`.

Nothing is kept here, so any scheduler does this for any worker, whether it leads or not. The description of an object
is passed on once the leader has said that the object may be that worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

import msgspec

from moorage.bus.errors import BusError, PermissionRefused
from moorage.bus.transport import Delivery, Transport
from moorage.scheduler.pacing.reminders import Reminders
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Refused
from moorage.schemas.passed_on import NO_LEADER, MayStore, PassedOn, StoreAsked, may_pass
from moorage.schemas.roles import RIGHTS_ANEW, inbox
from moorage.schemas.subjects import Subjects

#: of all schedulers, one takes each message
GROUP: Final = "moorage-buckets"
#: what waits here to be written to the server: behind it, messages are dropped, and their workers hear nothing
WAITING_BYTES_MAX: Final = 256 << 20
#: questions to the leader under way at a time, and how long one waits for its answer: less than the worker does
ASKING_MAX: Final = 1_000
LEADER_S: Final = 4.0
#: what the worker hears in place of the server's answer
_NO_LEADER: Final = b'{"error":{"code":%d,"description":"no leader says whose the object is"}}' % NO_LEADER
_NOT_YOURS: Final = b'{"error":{"code":403,"description":"the leader knows of no such attempt on this worker"}}'

log = logging.getLogger("moorage.scheduler")


class _Answer(msgspec.Struct, frozen=True):
    data: MayStore


_decode: Final[Decoder[_Answer]] = Decoder(_Answer)


class _Waiting(NamedTuple):
    subject: str
    delivery: Delivery


class Passing:
    """What comes on some of the workers' subjects, passed on over the same connection."""

    def __init__(self, connection: Transport, subjects: Subjects, heard: Sequence[str]) -> None:
        """`heard` are the subjects, with their wildcards."""
        self._connection = connection
        self._passed_on = PassedOn(subjects)
        self._may_store = subjects.may_store
        self._heard = heard
        self._waiting = deque[_Waiting]()
        self._waiting_bytes = 0
        self._asking = set[asyncio.Task[None]]()
        self._some = asyncio.Event()
        self._told = Reminders()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Hear the subjects, and pass on what comes while the block runs. Raises `BusError`."""
        subscriptions = [await self._connection.subscribe(each, self._take, GROUP) for each in self._heard]
        passing = asyncio.create_task(self._pass_on())
        try:
            yield
        finally:
            for task in (passing, *self._asking):
                task.cancel()
            await asyncio.wait((passing, *self._asking))
            for subscription in subscriptions:
                await subscription.unsubscribe()

    def _take(self, delivery: Delivery) -> None:
        passed = self._passed_on.of(delivery.subject)
        if passed is None:
            self._say("a message that no worker of this release sends is not passed on")
        elif not delivery.reply.startswith(f"{inbox('worker', passed.worker)}."):
            self._say(f"a question of worker {passed.worker} is not passed on: the reply subject is no inbox of it")
        elif not may_pass(passed.subject, delivery.headers):
            self._say(f"a message of worker {passed.worker} is not passed on: it has other headers than workers send")
        elif self._waiting_bytes > WAITING_BYTES_MAX or len(self._asking) >= ASKING_MAX:
            self._say("workers store more at once than nats-server takes: some messages were dropped")
        elif passed.first is None:
            self._put(passed.subject, delivery)
        else:
            task = asyncio.create_task(self._ask(passed.first, passed.subject, delivery))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    def _put(self, subject: str, delivery: Delivery) -> None:
        self._waiting.append(_Waiting(subject, delivery))
        self._waiting_bytes += len(delivery.data)
        self._some.set()

    async def _ask(self, asked: StoreAsked, subject: str, delivery: Delivery) -> None:
        """Pass a description on if the leader says so, and else refuse it; without its answer the worker is told so."""
        try:
            answer = await self._connection.request(self._may_store, encode(asked, json=True), LEADER_S)
            may = _decode(answer.data).data.may
        except PermissionRefused:
            self._say(f"whose a stored object is was not looked at: {RIGHTS_ANEW}")
            may = True
        except (BusError, Refused) as error:
            self._say(f"what worker {asked.worker} has stored waits for a leader: {error}")
            await self._connection.send([(delivery.reply, _NO_LEADER, "")])
            return
        if may:
            self._put(subject, delivery)
        else:
            if self._told.due(f"may not store: {asked.worker}"):  # a worker may name any object
                words = "worker %s may not store in a bucket of tenant %s: %s is of no attempt that it has"
                log.warning(words, *msgspec.structs.astuple(asked))
            await self._connection.send([(delivery.reply, _NOT_YOURS, "")])

    def _say(self, words: str) -> None:
        if self._told.due(words):
            log.warning("%s", words)

    async def _pass_on(self) -> None:
        while True:
            await self._some.wait()
            while self._waiting:
                subject, delivery = self._waiting.popleft()
                self._waiting_bytes -= len(delivery.data)
                if delivery.headers:
                    await self._connection.publish(subject, delivery.data, delivery.reply, delivery.headers)
                else:
                    await self._connection.send([(subject, delivery.data, delivery.reply)])
            self._some.clear()


@contextlib.asynccontextmanager
async def passing(small: Transport, large: Transport, subjects: Subjects) -> AsyncIterator[None]:
    """Pass on while the block runs: over `large` the pieces of files and checkpoints, so that nothing else waits behind
    them. Raises `BusError`."""
    async with (
        Passing(small, subjects, (subjects.worker_fetch_all, subjects.worker_result_all)).open(),
        Passing(large, subjects, (subjects.worker_store_all,)).open(),
    ):
        log.info("passing on files of workers")
        yield
