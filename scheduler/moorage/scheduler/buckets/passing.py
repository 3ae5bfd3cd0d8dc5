"""Passes what workers ask of buckets on to nats-server, and the server answers the worker: see `schemas.passed_on`.

Nothing is kept here, so any scheduler does this for any worker, whether it leads or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

from moorage.bus.transport import Delivery, Transport
from moorage.scheduler.pacing.reminders import Reminders
from moorage.schemas.passed_on import PassedOn, may_pass
from moorage.schemas.roles import inbox
from moorage.schemas.subjects import Subjects

#: of all schedulers, one takes each message
GROUP: Final = "moorage-buckets"
#: what waits here to be written to the server: behind it, messages are dropped, and their workers hear nothing
WAITING_BYTES_MAX: Final = 256 << 20

log = logging.getLogger("moorage.scheduler")


class _Waiting(NamedTuple):
    subject: str
    delivery: Delivery


class Passing:
    """What comes on some of the workers' subjects, passed on over the same connection."""

    def __init__(self, connection: Transport, subjects: Subjects, heard: Sequence[str]) -> None:
        """`heard` are the subjects, with their wildcards."""
        self._connection = connection
        self._passed_on = PassedOn(subjects)
        self._heard = heard
        self._waiting = deque[_Waiting]()
        self._waiting_bytes = 0
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
            passing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await passing
            for subscription in subscriptions:
                await subscription.unsubscribe()

    def _take(self, delivery: Delivery) -> None:
        passed = self._passed_on.of(delivery.subject)
        if passed is None:
            self._say("a message that no worker of this release sends is not passed on")
        elif not delivery.reply.startswith(f"{inbox('worker', passed.worker)}."):
            self._say(f"a question of worker {passed.worker} is not passed on: the reply subject is no inbox of it")
        elif not may_pass(delivery.headers):
            self._say(f"a message of worker {passed.worker} is not passed on: it has other headers than workers send")
        elif self._waiting_bytes > WAITING_BYTES_MAX:
            self._say("workers store more at once than nats-server takes: some messages were dropped")
        else:
            self._waiting.append(_Waiting(passed.subject, delivery))
            self._waiting_bytes += len(delivery.data)
            self._some.set()

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
