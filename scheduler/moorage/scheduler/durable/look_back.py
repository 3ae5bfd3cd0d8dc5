"""Finds what an earlier leader refused of the durable queue, and ended before it had stored that as dead letters.

A refusal is of the record that moves the cursor past its request, and its dead letter is stored after that record. So a
request stays in the queue until its letter is stored, and each term looks once at what lies behind the cursors. It
makes no job of that: a job with the same id may have run, and be forgotten by now.

If the letter was stored, and its leader ended before the purge, it is stored again, which the stream of dead letters
drops for two minutes. After a longer outage there may be two, of which each makes the same job if it is resent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moorage.bus.jetstream import JetStream, StoredMessage
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Submit
from moorage.scheduler.durable.queue_streams import QueueStreams, info_of
from moorage.schemas.errors import Problem, Refused, problem
from moorage.schemas.subjects import Subjects

BATCH: Final = 500

#: a tenant's request that may lack its dead letter, and why it was refused
Lost = tuple[str, StoredMessage, Problem]
#: makes a submit of a tenant's message; raises `Refused` for one that cannot be read
Read = Callable[[str, StoredMessage], Submit]


class LookBack:
    """What lies behind the cursors of the submits as a term begins. `tenants` are those that were not looked at yet."""

    def __init__(
        self, jetstream: JetStream, subjects: Subjects, engine: Engine, streams: QueueStreams, read: Read
    ) -> None:
        self._js = jetstream
        self._subjects = subjects
        self._engine = engine
        self._streams = streams
        self._read = read
        rows = list(engine.state.tenants.values())
        self._cursors = {row.name: row.submit_cursor for row in rows}
        self._read_through = {row.name: max(row.submit_cursor, row.cancel_cursor) for row in rows}
        self.tenants = {row.name for row in rows if row.submit_cursor}

    async def look(self) -> list[Lost]:
        """Return what may lack its dead letter, and leave no tenant to look at; may be called again after it raised.

        Raises `BusError`.
        """
        found: list[Lost] = []
        former = await self._streams.former()
        own = {self._streams.of(tenant) for tenant in self.tenants - self._streams.lacking}
        for stream in sorted(own | ({former.name} if former is not None else set())):
            info = await info_of(self._js, stream, self._subjects.request_all)
            if info is None:
                continue
            read = [self._read_through[each] for each in self.tenants if self._streams.of(each) == stream]
            if info.last_seq < max(read, default=0):
                continue  # made anew, and not read yet
            for subject in info.subjects:
                tenant = self._subjects.token(subject, 1)
                if tenant in self.tenants and subject == self._subjects.request(tenant, "submit"):
                    found += await self._behind(tenant, stream, subject)
        self.tenants.clear()
        return found

    async def _behind(self, tenant: str, stream: str, subject: str) -> list[Lost]:
        found: list[Lost] = []
        seq, cursor = 0, self._cursors[tenant]
        while seq < cursor:
            messages = await self._js.direct_get_batch(stream, seq=seq + 1, next_by_subject=subject, batch=BATCH)
            if not messages:
                break
            for message in messages:
                if message.seq <= cursor and (why := self._refusal(tenant, message)) is not None:
                    found.append((tenant, message, why))
            seq = messages[-1].seq
        return found

    def _refusal(self, tenant: str, message: StoredMessage) -> Problem | None:
        """Return why a request that was read made no job; None if it made one, or has its dead letter."""
        try:
            submit = self._read(tenant, message)
        except Refused:
            return None  # of what cannot be read the letter is stored before the cursor passes it
        answer = self._engine.admission.known(submit)
        if answer is not None:
            return answer if isinstance(answer, Problem) else None
        return self._engine.admission.malformed(submit) or problem(
            "internal",
            "the leader that refused this request ended before it stored why, or its job is over and forgotten",
            job=submit.name,
            next="moorage history shows whether there was such a job; if there was none, moorage dlq resend",
        )
