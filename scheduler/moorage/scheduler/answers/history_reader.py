"""Reads jobs' transitions from memory and the history stream: for `history`, and for `show` of jobs not in memory.

The ledger's follower knows which messages have a job's history, so a look-up reads only those. Look-ups run beside the
loop, a few at a time; beyond a bound the caller is asked to try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import msgspec

from moorage.bus.errors import BusError, JetStreamRefused
from moorage.bus.jetstream import ERR_STREAM_NOT_FOUND, JetStream, StoredMessage, wall_seconds
from moorage.scheduler.answers import views
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.state import REV, Job
from moorage.scheduler.core.outputs.outputs import accepted, changes_since, fitting, is_end
from moorage.scheduler.follower.follower import behind
from moorage.scheduler.history.packing import BLOCK, Parts
from moorage.scheduler.history.unpacking import Found, Frame, changes_in, changes_of, read_frame
from moorage.scheduler.pacing.answering import RETRY_AFTER_S, Answering
from moorage.schemas.always import sent
from moorage.schemas.answers.jobs import HistoryAnswer, ReplicaInfo, ShownJob
from moorage.schemas.errors import Problem, Refused, refuse
from moorage.schemas.frames import Change
from moorage.schemas.job import Request
from moorage.schemas.ranges import Ranges, numbers_in
from moorage.schemas.subjects import Subjects

log = logging.getLogger("moorage.history")

#: changes in one answer
LIMIT_DEFAULT: Final = 1000
LIMIT_MAX: Final = 2000
#: messages read at a time, waiting questions in all and of one tenant, and frames cached for the next question
READS_MAX: Final = 4
QUESTIONS_MAX: Final = 256
QUESTIONS_MAX_TENANT: Final = 64
FRAMES_KEPT: Final = 16
#: parts of a long history read for one answer; the rest comes with the next
PARTS_MAX: Final = 8
#: replicas of a job that one question may name
REPLICAS_SHOWN_MAX: Final = 1_000


class Gone(Exception):
    """The frame with a job's history is no longer in the stream, never was, or cannot be decoded."""


#: frames with earlier parts of a history (sequence, first and last revision), and the sequence of that with its end or
#: 0
Place = tuple[Parts, int]
#: returns where the history of a tenant's job is; raises `Refused` if the follower cannot say it now
Where = Callable[[str, str], Awaitable[Place]]


class Read(msgspec.Struct, frozen=True):
    """A frame of the history stream, the histories in it by job, and the wall time at which it was stored."""

    frame: Frame
    jobs: dict[str, list[Found]]
    stored_ms: int


class HistoryReader:
    """Answers questions about ended jobs from the history stream.

    `answer` sends the result: verb, data or problem, reply subject, whether as JSON.
    """

    def __init__(
        self,
        jetstream: JetStream,
        subjects: Subjects,
        engine: Engine,
        where: Where,
        answer: Callable[[str, Any, str, bool], None],
    ) -> None:
        self._where = where
        self._js = jetstream
        self._subjects = subjects
        self._engine = engine
        self._answer = answer
        self._frames: OrderedDict[int, asyncio.Task[Read]] = OrderedDict()
        self._slots = asyncio.Semaphore(READS_MAX)
        self._answers = Answering("questions about finished jobs", QUESTIONS_MAX, QUESTIONS_MAX_TENANT)

    async def close(self) -> None:
        """Cancel the reads in progress; their questions get no answer."""
        await self._answers.close()
        reads = list(self._frames.values())
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    # ------------------------------------------------------------------------------------------- questions

    def show(
        self, tenant: str, name: str, reply: str, json: bool, *, follow: bool = True, only: Ranges | None = None
    ) -> ShownJob | Problem | None:
        """Return the answer to `show`; None if it is sent later, once the stream was read.

        `follow` is as in `views.show`. With `only`, `replica_states` has these replicas, whatever their state.
        """
        data = views.show(self._engine, tenant, name, follow=follow)
        if isinstance(data, Problem):
            return data
        missing: list[int] = []
        job = self._engine.state.job(tenant, name)
        rows: list[ReplicaInfo] | None = None
        if only is not None:
            rows, missing = ([], list(numbers_in(only))) if job is None else views.states_of(self._engine, job, only)
            data = sent(data, replica_states=rows)
        if job is not None and not missing:
            return data
        make = partial(self._with_ends, tenant, name, data, rows, missing, in_memory=job is not None)
        return self.later("show", make, reply, json, tenant, name)

    async def _with_ends(
        self,
        tenant: str,
        name: str,
        data: ShownJob,
        rows: list[ReplicaInfo] | None,
        missing: list[int],
        *,
        in_memory: bool,
    ) -> ShownJob:
        """Return the answer of `show` with the ends of these replicas, which the history has, in place of its rows."""
        told = data if in_memory else await self._shown(tenant, name, data)
        if rows is None:
            return told
        for index in missing:
            changes, _ = await self.of_replica(tenant, name, index)
            if of_one := changes_of(changes, index):
                end = of_one[-1]
                ran = end.worker, end.code, end.time_ms, end.why, end.result
                rows.append(views.ended_row(index, end.state, end.attempt, end.fence, *ran))
        return sent(told, replica_states=sorted(rows, key=lambda row: row.replica))

    def history(self, tenant: str, arguments: dict[str, Any], reply: str, json: bool) -> Any:
        """Return the answer to `history`; None if it is sent later, once the stream was read.

        The caller has checked the arguments.
        """
        name = arguments["job"]
        after, limit = check_page(arguments)
        job = self._engine.state.job(tenant, name)
        if job is not None:
            first = job.history[0][REV] if job.history else 2
            if after + 1 >= first or first <= 2:
                return self._of_memory(job, after, limit, [])
            return self.later("history", partial(self._of_parts, job, after, limit), reply, json, tenant, name)
        known = views.show(self._engine, tenant, name, follow=False)
        if isinstance(known, Problem):
            return known
        return self.later("history", partial(self._of_stream, tenant, name, after, limit), reply, json, tenant, name)

    async def last_part(self, tenant: str, name: str) -> tuple[Frame, Found]:
        """Return the last part of the history of a job not in memory, and its frame. Raises `Gone`, `Refused`,
        `BusError`."""
        read, found = await self._history(tenant, name, (await self._where(tenant, name))[1])
        return read.frame, found[-1]

    async def of_replica(self, tenant: str, name: str, index: int) -> tuple[list[Change], Request | None]:
        """Return the transitions of one replica in the newest part of the history that has it, and the request if kept.

        The end of its last attempt is among them. If no part has it, all of the last part is returned. Raises `Refused`
        if the history is gone, cannot be read now, or is not written yet.
        """
        with readable(name):
            parts, seq = await self._where(tenant, name)
            request: Request | None = None
            last: list[Change] = []
            if seq:
                read, found = await self._history(tenant, name, seq)
                parts, request = found[-1].parts, views.request_in(found[-1])
                last = [change for history in found for change in changes_in(read.frame, history)]
                if changes := changes_of(last, index):
                    return changes, request
            for at, _, _, blocks in reversed(parts):
                if index // BLOCK in blocks:
                    read, found = await self._history(tenant, name, at)
                    told = [change for history in found for change in changes_in(read.frame, history)]
                    if changes := changes_of(told, index):
                        return changes, request
        job = self._engine.state.job(tenant, name)
        if job is not None:
            raise Refused(behind(max(1, self._engine.state.seq - job.ledger)))
        return last, request

    def later(
        self, verb: str, make: Callable[[], Awaitable[Any]], reply: str, json: bool, tenant: str, name: str
    ) -> Problem | None:
        """Answer with what `make` returns once the stream was read; return the problem if too many questions wait.

        `make` may raise `Gone`, `Refused` and `BusError`, each of which is answered as a problem.
        """

        async def made() -> Any:
            with readable(name):
                return await make()

        if (full := self._answers.overloaded(tenant, name)) is not None:
            return full
        self._answers.begin(made, lambda data: self._answer(verb, data, reply, json), tenant, name)
        return None

    # --------------------------------------------------------------------------------------------- answers

    def _of_memory(self, job: Job, after: int, limit: int, before: list[Change]) -> HistoryAnswer:
        changes = _merged((before, changes_since(self._engine.state, job, after, is_end)), after)
        name = job.tenant, job.name, job.state, job.rev
        return _page(*name, changes, after, limit, of_many=not job.is_listed)

    async def _of_parts(self, job: Job, after: int, limit: int) -> HistoryAnswer:
        """Return the answer for a job in memory whose older transitions are in the stream."""
        begin = [accepted(job.tenant, job.accepted_ms, job.body)]
        parts, _ = await self._where(job.tenant, job.name)
        before, whole = await self._parts(job.tenant, job.name, parts, after, limit)
        if not whole:
            changes, name = _merged((begin, before), after), (job.tenant, job.name, job.state, job.rev)
            return _page(*name, changes, after, limit, of_many=not job.is_listed)
        return self._of_memory(job, after, limit, begin + before)

    async def _of_stream(self, tenant: str, name: str, after: int, limit: int) -> HistoryAnswer:
        read, found = await self._history(tenant, name, (await self._where(tenant, name))[1])
        last = found[-1]
        before, whole = await self._parts(tenant, name, last.parts, after, limit)
        rest = [change for history in found for change in changes_in(read.frame, history)] if whole else []
        changes = _merged(([accepted(tenant, last.accepted_ms, bytes(last.request))], before, rest), after)
        of_many = last.revs is not None
        data = _page(tenant, name, last.state, last.rev, changes, after, limit, of_many=of_many)
        return msgspec.structs.replace(data, kept_until_ms=self._kept_until(read))

    async def _shown(self, tenant: str, name: str, row: ShownJob) -> ShownJob:
        """Return the job as `show` has it while it is in memory; only `row` if its history cannot be read."""
        try:
            read, found = await self._history(tenant, name, (await self._where(tenant, name))[1])
        except (Gone, Refused):
            return row
        except (BusError, TimeoutError) as error:
            log.warning("the history of jobs cannot be read now: %s", error)
            return row
        last = found[-1]
        changes = [change for history in found for change in changes_in(read.frame, history)]
        if not last.parts:
            changes.insert(0, accepted(tenant, last.accepted_ms, bytes(last.request)))
        shown = views.show_history(self._engine, read.frame, last, changes, row)
        return msgspec.structs.replace(shown, kept_until_ms=self._kept_until(read))

    def _kept_until(self, read: Read) -> int:
        return read.stored_ms + int(self._engine.config.history_keep * 1000)

    async def _parts(self, tenant: str, name: str, parts: Parts, after: int, limit: int) -> tuple[list[Change], bool]:
        """Return the transitions of earlier parts with a revision above `after`; False if a bound ended the reading.

        Parts that are gone are skipped.
        """
        changes: list[Change] = []
        reads = 0
        for seq, _, last, _ in parts:
            if last <= after:
                continue
            if reads >= PARTS_MAX or len(changes) >= limit:
                return changes, False
            try:
                read, found = await self._history(tenant, name, seq)
            except Gone:
                continue  # the answer says that it is incomplete
            reads += 1
            for history in found:
                changes += [change for change in changes_in(read.frame, history) if change.rev > after]
        return changes, True

    # ------------------------------------------------------------------------------------------- the stream

    async def _history(self, tenant: str, name: str, seq: int) -> tuple[Read, list[Found]]:
        """Return the frame at `seq` and the job's histories in it. Raises `Gone`, also for 0, and `BusError`."""
        if seq == 0:
            raise Gone
        known = seq in self._frames
        read = await self._frame(seq)
        if known and name not in read.jobs:  # the stream was deleted since, and counts from 1 again
            self._frames.pop(seq, None)
            read = await self._frame(seq)
        found = read.jobs.get(name)
        if found is None or read.frame.tenant != tenant:
            raise Gone
        return read, found

    async def _frame(self, seq: int) -> Read:
        task = self._frames.get(seq)
        if task is None:
            task = self._frames[seq] = asyncio.get_running_loop().create_task(self._read(seq))
            while len(self._frames) > FRAMES_KEPT and next(iter(self._frames.values())).done():
                self._frames.popitem(last=False)
        self._frames.move_to_end(seq)
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._frames.get(seq) is task:
                del self._frames[seq]  # it may be there next time
            raise

    async def _read(self, seq: int) -> Read:
        async with self._slots:
            message = await self._message(seq)
        try:
            frame = read_frame(message.data)
        except Refused as refused:
            log.warning("message %d of the history of jobs cannot be read: %s", seq, refused)
            raise Gone from None
        if message.subject != self._subjects.history(frame.tenant):
            raise Gone
        jobs: dict[str, list[Found]] = {}
        for found in frame.jobs:
            jobs.setdefault(found.job, []).append(found)
        return Read(frame, jobs, int(wall_seconds(message.stored_at) * 1000))

    async def _message(self, seq: int) -> StoredMessage:
        """Return a message by direct get, or, if a replica lags, from the stream's leader.

        Raises `Gone` if there is no such message or no such stream; `BusError`.
        """
        stream = self._subjects.history_stream
        with contextlib.suppress(JetStreamRefused):  # the leader, asked next, says why
            for message in await self._js.direct_get_batch(stream, seq=seq, batch=1):
                if message.seq == seq:
                    return message
        try:
            found = await self._js.get_message(stream, seq)
        except JetStreamRefused as refused:
            if refused.err_code == ERR_STREAM_NOT_FOUND:
                raise Gone from None
            raise
        if found is None:
            raise Gone
        return found


def check_page(arguments: dict[str, Any]) -> tuple[int, int]:
    """Return `after_rev` (default 0) and `limit` of a question. Raises `Refused` for numbers out of range."""
    return _number(arguments, "after_rev", 0, 0, 2**53), _number(arguments, "limit", LIMIT_DEFAULT, 1, LIMIT_MAX)


def _number(arguments: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = arguments.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        allowed = f"{least}..{most}"
        raise refuse("invalid-argument", f"{name} must be {allowed}", field=f"$.{name}", found=value, allowed=allowed)
    return value


def _merged(lists: Iterable[list[Change]], after: int) -> list[Change]:
    """Return the changes with a revision above `after` in order, each once: a part and memory may both contain one."""
    by_rev = {change.rev: change for changes in lists for change in changes if change.rev > after}
    return [by_rev[rev] for rev in sorted(by_rev)]


def _page(
    tenant: str, name: str, state: str, rev: int, changes: list[Change], after: int, limit: int, *, of_many: bool
) -> HistoryAnswer:
    """Return an answer of at most `limit` changes that fits into a frame.

    Of a job with very many replicas (`of_many`), not every revision is a change in the history.
    """
    found = len(changes)
    changes = changes[:limit]
    changes = changes[: fitting(changes)]
    last = changes[-1].rev if changes else rev
    if of_many and len(changes) == found:
        last = rev
    return HistoryAnswer(
        job=name,
        tenant=tenant,
        state=state,
        rev=rev,
        changes=changes,
        complete=of_many or len(changes) == max(0, last - after),
        more=last < rev,
    )


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Raise `Refused` where the block finds that the history of a job is gone, or that it cannot be read now."""
    try:
        yield
    except Gone:
        raise refuse(
            "history-gone",
            f"the history of {name} is no longer kept, or was never written",
            job=name,
            next="moorage show still knows its state; history_keep and history_bytes say how long the scheduler keeps"
            " it",
        ) from None
    except (BusError, TimeoutError) as error:
        log.warning("the history of jobs cannot be read now: %s", error)
        why = "the history cannot be read now"
        raise refuse("overloaded", why, job=name, next="send again", retry_after_s=RETRY_AFTER_S) from None
