"""Answers `ls`, a tenant's and an operator's, beside the loop: pages of jobs, newest first.

First come the jobs in memory, then, on pages of their own, those that only the history has. Between two pages a job may
leave memory: it then comes twice, but no job is left out that was accepted before the first page.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable
from typing import Any, Final

from moorage.bus.errors import JetStreamRefused
from moorage.bus.jetstream import ERR_STREAM_NOT_FOUND, JetStream, StoredMessage, wall_seconds
from moorage.scheduler.answers.history_reader import readable
from moorage.scheduler.answers.listing import HOUR_MS, Reasons, Then, Wanted, in_memory, labelled, row_of
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.history.unpacking import read_frame
from moorage.scheduler.pacing.answering import Answering
from moorage.schemas.always import sent
from moorage.schemas.answers.jobs import JobRow, JobsAnswer
from moorage.schemas.codec import encode
from moorage.schemas.decode_errors import asked_as
from moorage.schemas.errors import Problem, Refused, refuse
from moorage.schemas.frames import LsAsked
from moorage.schemas.subjects import Subjects

log = logging.getLogger("moorage.scheduler")

#: jobs looked at, rows made, or histories unpacked before the event loop runs other tasks
AT_ONCE: Final = 64
#: searches for a reason before that: each walks over the fleet
SEARCHES_AT_ONCE: Final = 4
#: bytes of rows in a page: a server takes 1 MiB, and other answers may share the frame
PAGE_BYTES: Final = 640 * 1024
#: frames of the history that are read for one page, and at a time
FRAMES_MAX: Final = 64
FRAMES_AT_ONCE: Final = 8
#: questions under way: in all, and of one tenant
LISTS_MAX: Final = 64
LISTS_MAX_TENANT: Final = 16
LS_HELP: Final = "moorage ls --help"

#: what sends an answer: verb, data or problem, reply subject, whether as JSON
Answer = Callable[[str, Any, str, bool], None]


def jobs_asked(arguments: dict[str, Any], *, operator: bool) -> LsAsked:
    """Return the checked arguments of `ls`. Raises `Refused`, naming the field."""
    asked = asked_as(LsAsked, arguments, LS_HELP)
    if asked.tenant and not operator:
        why = "a tenant's own ls takes no tenant: its subject names it"
        raise refuse("invalid-argument", why, field="$.tenant", found=asked.tenant, next="leave it out")
    if asked.jobs is not None and operator and not asked.tenant:
        raise refuse("invalid-argument", "jobs are named with their tenant", field="$.tenant", next="name the tenant")
    return asked


class JobLists:
    """The questions of one term."""

    def __init__(
        self,
        jetstream: JetStream,
        subjects: Subjects,
        engine: Engine,
        is_written: Callable[[], Awaitable[Problem | None]],
        answer: Answer,
    ) -> None:
        """`is_written` waits until the history has all that left memory; it returns the problem if that takes long."""
        self._js = jetstream
        self._subjects = subjects
        self._engine = engine
        self._is_written = is_written
        self._answer = answer
        self._reasons = Reasons(engine)
        self._answers = Answering("lists of jobs", LISTS_MAX, LISTS_MAX_TENANT)

    def ask(self, asker: str, tenant: str, asked: LsAsked, reply: str, json: bool) -> Problem | None:
        """Answer later; return the problem if too many questions are under way.

        `tenant` "" is of all tenants. `asker` is the tenant that asks, "" for an operator.
        """
        if not reply:
            return None
        full = self._answers.overloaded(asker)
        if full is None:
            wanted = Wanted(asked, tenant)
            self._answers.begin(lambda: self._page(wanted), lambda data: self._answer("ls", data, reply, json), asker)
        return full

    async def close(self) -> None:
        await self._answers.close()

    async def _page(self, wanted: Wanted) -> JobsAnswer | Problem:
        asked = wanted.asked
        if asked.jobs is not None:
            return self._named(wanted.tenant, asked.jobs)
        if not asked.after.startswith("h:"):
            return await self._of_memory(wanted)
        refused = await self._is_written()
        if refused is not None:
            return refused
        with readable(""):
            return await self._of_history(wanted)

    def _named(self, tenant: str, names: list[str]) -> JobsAnswer:
        row = self._engine.state.tenants.get(tenant)
        jobs = {} if row is None else row.jobs
        return JobsAnswer(jobs=[labelled(self._engine, jobs[name]) for name in names if name in jobs])

    # -------------------------------------------------------------------------------------------- from memory

    async def _of_memory(self, wanted: Wanted) -> JobsAnswer:
        """Return a page of the jobs in memory; the first page also counts all of them that are asked for."""
        asked, state = wanted.asked, self._engine.state
        left = wanted.numbers(self._engine)
        behind = int(asked.after.removeprefix("m:")) if asked.after else None
        if behind is not None:
            left = left[bisect_right(left, behind) :] if asked.oldest else left[: bisect_left(left, behind)]
        page, counts, last, is_more = _Page(asked.limit), dict[str, int](), 0, False
        then = Then(asked.at_ms) if asked.at_ms else None
        searches = self._reasons.searches
        for looked, num in enumerate(left if asked.oldest else reversed(left), 1):
            if looked % AT_ONCE == 0 or self._reasons.searches - searches >= SEARCHES_AT_ONCE:
                await asyncio.sleep(0)
                searches = self._reasons.searches
            job = state.jobs.get(num)
            if job is None or not wanted.counts(self._engine, job):
                continue
            row = None
            if then is not None:
                row = then.of_memory(self._engine, job)
            else:
                counts[job.state] = counts.get(job.state, 0) + 1
                if not is_more and wanted.lists(self._engine, job, self._reasons):
                    row = row_of(self._engine, job, self._reasons)
            if row is None:
                continue
            if page.add(row):
                last = num
                continue
            is_more = True
            if then is not None or behind is not None:
                break  # else the first page goes on, to count
        after = f"m:{last}" if is_more else "h:0:0" if wanted.of_history else ""
        answer = JobsAnswer(jobs=page.rows, next=after)
        if then is not None:
            return sent(answer, ended=then.ended)
        return answer if behind is not None else sent(answer, counts=counts, finished_kept=len(state.finished))

    # ------------------------------------------------------------------------------------------- from the history

    async def _of_history(self, wanted: Wanted) -> JobsAnswer:
        """Return a page of the jobs that only the history has, from frame to frame backwards.

        A page can have fewer jobs than it may, or none, and still a `next`: so one question reads only so much.
        """
        _, seq_text, at_text = wanted.asked.after.split(":")
        seq, before = int(seq_text), int(at_text)
        page = _Page(wanted.asked.limit)
        then = Then(wanted.asked.at_ms) if wanted.asked.at_ms else None

        def answer(after: str = "") -> JobsAnswer:
            told = JobsAnswer(jobs=page.rows, next=after)
            return told if then is None else sent(told, ended=then.ended)

        try:
            info = await self._js.stream_info(self._subjects.history_stream)
        except JetStreamRefused as refused:
            if refused.err_code != ERR_STREAM_NOT_FOUND:
                raise
            return answer()
        seq = seq or info.last_seq
        for _ in range(FRAMES_MAX // FRAMES_AT_ONCE):
            if seq < max(info.first_seq, 1):
                return answer()
            first = max(info.first_seq, 1, seq - FRAMES_AT_ONCE + 1)
            found = await self._messages(first, seq)
            for message in reversed(found):
                if then is not None and wall_seconds(message.stored_at) * 1000 < wanted.asked.at_ms - HOUR_MS:
                    return answer()  # what is stored before had ended before
                full_at = await self._from_frame(wanted, message, before if message.seq == seq else 0, page, then)
                if full_at is not None:
                    return answer(f"h:{message.seq}:{full_at}")
            seq, before = first - 1, 0
        return answer(f"h:{seq}:0" if seq >= max(info.first_seq, 1) else "")

    async def _messages(self, first: int, last: int) -> list[StoredMessage]:
        """Return the messages of these sequences, in order. Those that were deleted are left out."""
        found: list[StoredMessage] = []
        while first <= last:
            got = await self._js.direct_get_batch(self._subjects.history_stream, seq=first, batch=last - first + 1)
            got = [message for message in got if first <= message.seq <= last]
            if not got:
                break
            found += got
            first = got[-1].seq + 1
        return found

    async def _from_frame(
        self, wanted: Wanted, message: StoredMessage, before: int, page: _Page, then: Then | None
    ) -> int | None:
        """Add the jobs of a frame to the page, the last one first, below position `before` (0: all).

        Returns the position at which the page was full; None if it has room left.
        """
        if wanted.tenant and message.subject != self._subjects.history(wanted.tenant):
            return None
        try:
            frame = read_frame(message.data)
        except Refused as refused:
            log.warning("message %d of the history of jobs cannot be read: %s", message.seq, refused)
            return None
        if message.subject != self._subjects.history(frame.tenant):
            return None
        for at in range((before or len(frame.jobs)) - 1, -1, -1):
            if at % AT_ONCE == 0:
                await asyncio.sleep(0)
            if in_memory(self._engine, frame, frame.jobs[at]):
                continue
            if then is None:
                row = wanted.row_of_history(self._engine, frame, frame.jobs[at])
            else:
                row = then.of_history(frame, frame.jobs[at])
            if row is not None and not page.add(row):
                return at + 1
        return None


class _Page:
    """Rows, as many as a page may have and a server takes."""

    def __init__(self, limit: int) -> None:
        self.rows: list[JobRow] = []
        self._limit = limit
        self._bytes = 0

    def add(self, row: JobRow) -> bool:
        """Add a row; return False if it does not fit."""
        size = len(encode(row))
        if len(self.rows) >= self._limit or (self.rows and self._bytes + size > PAGE_BYTES):
            return False
        self.rows.append(row)
        self._bytes += size
        return True
