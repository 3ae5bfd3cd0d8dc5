"""Tells what becomes of a tenant's jobs, each end at least once, from where an earlier run of the same stopped.

Events say which jobs to look at, and may be lost; so all jobs are also listed at the start and every `SCAN_S`, and of
each that has moved on the verb `history` is asked from the revision that was told last. Of the jobs in memory that is
all of them; behind those, the history is listed back to the time of the last whole list.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.client.errors import ClientError, NotFound, NotPermitted, Rejected, read_answer
from moorage.client.pages import pages
from moorage.client.replicas import failed_words
from moorage.schemas.answers.jobs import HistoryAnswer, JobRow, JobsAnswer
from moorage.schemas.exit_words import exit_words
from moorage.schemas.frames import Change
from moorage.schemas.job import TERMINAL

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

#: a whole list of the jobs after this time at the latest
SCAN_S: Final = 30.0
#: so long events are gathered before the jobs that they name are looked at
GATHER_S: Final = 0.2
#: time between two calls of `save` while one thing after the other is told
SAVE_S: Final = 1.0
#: time between two tries while no scheduler answers
RETRY_S: Final = 2.0
#: the history is listed from so long before the last whole list: clocks differ
MARGIN_MS: Final = 10 * 60_000
PAGE: Final = 1000


class Told(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="told"):
    """What became of a job: its end, or a replica's way into another state.

    `rev` and `job` name it: what is told twice has the same. `text` is a line for people. `replica` is -1 for the job
    as a whole; the end of a job of several replicas has the exit code with which the first of them ended so.
    """

    tenant: str
    job: str
    rev: int
    state: str
    text: str
    time_ms: int = 0
    replica: int = -1
    attempt: int = 0
    worker: str = ""
    code: int | None = None
    why: str = ""
    labels: dict[str, str] = {}


class Reached(msgspec.Struct):
    """How far a `Telling` has come: what a state file holds. `jobs` has of each job the revision up to which was told,
    and whether the job was over; `seen_ms` is when the last whole list began, 0 before the first one.

    What is chosen stands beside it, because to another choice it would say the wrong thing.
    """

    tenant: str
    ids: str = ""
    labels: dict[str, str] = {}
    states: list[str] = []
    seen_ms: int = 0
    jobs: dict[str, tuple[int, bool]] = {}


class Telling:
    """Tells of the jobs that `reached` chooses: each of the `states` that one of them comes to.

    `tell` gets one thing after the other, and returns once it was taken; `save` is called behind it, at most once a
    second. Before the first whole list nothing is told: what a job was then is where it begins.
    """

    def __init__(
        self,
        client: AsyncClient,
        reached: Reached,
        tell: Callable[[Told], Awaitable[None]],
        save: Callable[[Reached], None],
    ) -> None:
        self._client = client
        self._reached = reached
        self._tell = tell
        self._save = save
        self._wanted = frozenset(reached.states)
        self._ends_only = self._wanted <= TERMINAL
        self._saved_s = 0.0
        self._named: set[str] = set()
        self._wake = asyncio.Event()

    async def run(self, began: Callable[[], None], trouble: Callable[[ClientError], None]) -> None:
        """Tell without end. `began` is called after the first whole list, and `trouble` with what kept it from asking,
        before it tries again. Raises `NotPermitted` and `Rejected`."""
        listening, is_first = asyncio.create_task(self._listen()), True
        try:
            while True:
                try:
                    await self._scan()
                    if is_first:
                        is_first = False
                        began()
                    await self._follow(time.monotonic() + SCAN_S, listening)
                except (NotPermitted, Rejected):
                    raise
                except ClientError as error:
                    trouble(error)
                    await asyncio.sleep(RETRY_S)
        finally:
            self._save_now()
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def _listen(self) -> None:
        """Note the jobs of all events that may be of interest."""
        async for event in self._client.events():
            if event.state in self._wanted or any(change.state in self._wanted for change in event.changes):
                self._named.add(event.job)
                self._wake.set()

    async def _follow(self, until_s: float, listening: asyncio.Task[None]) -> None:
        """Look at the jobs that events name, until this monotonic time. Raises what `_listen` raises."""
        while (left_s := until_s - time.monotonic()) > 0:
            waiting = asyncio.create_task(self._wake.wait())
            done, _ = await asyncio.wait({waiting, listening}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if listening in done:
                listening.result()
            if waiting not in done:
                return
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            named, self._named = sorted(self._named), set()
            for first in range(0, len(named), PAGE):
                for row in (await self._ls({"jobs": named[first : first + PAGE]})).jobs:
                    if self._chooses(row):
                        await self._look(row)
            self._save_now()

    # ------------------------------------------------------------------------------------------------------ lists

    async def _scan(self) -> None:
        """Look at all jobs: those in memory, and those that left it since the last whole list. The first scan only
        notes them."""
        reached, began_ms = self._reached, int(time.time() * 1000)
        is_first, seen = not reached.seen_ms, set[str]()
        async for page in self._pages((reached.seen_ms or began_ms) - MARGIN_MS):
            for row in reversed(page):
                seen.add(row.job)
                if is_first:  # a job that leaves memory meanwhile comes again, at its end, which is then to be told
                    reached.jobs.setdefault(row.job, (row.rev, row.state in TERMINAL))
                else:
                    await self._look(row)
        reached.jobs = {job: known for job, known in reached.jobs.items() if job in seen}
        reached.seen_ms = began_ms
        self._save_now()

    async def _pages(self, oldest_ms: int) -> AsyncIterator[list[JobRow]]:
        reached = self._reached
        asked: dict[str, Any] = {"limit": PAGE, "history": True, "ids": reached.ids, "labels": reached.labels}
        if self._ends_only:
            asked["states"] = reached.states
        given = {name: value for name, value in asked.items() if value != ""}
        async for page in pages(partial(self._client._wire.answer, "ls"), given):
            rows = [row for row in page.jobs if not row.ended_ms or row.ended_ms >= oldest_ms]
            yield rows
            if len(rows) < len(page.jobs):
                return

    async def _ls(self, asked: Mapping[str, Any]) -> JobsAnswer:
        return read_answer(await self._client._wire.read("ls", asked), JobsAnswer)

    def _chooses(self, row: JobRow) -> bool:
        """Return whether the row of a job that an event named is one of those that are told of."""
        reached, labels = self._reached, row.labels
        if any(value not in ("*", labels.get(key)) or key not in labels for key, value in reached.labels.items()):
            return False
        return fnmatchcase(row.job, reached.ids or "*")  # an id has no character that would mean more here

    # ------------------------------------------------------------------------------------------------------- a job

    async def _look(self, row: JobRow) -> None:
        """Tell what a job has come to since it was told of last."""
        job, jobs = row.job, self._reached.jobs
        is_over = row.state in TERMINAL
        rev, was_over = jobs.get(job, (0, False))
        if was_over and not is_over:
            rev = 0  # another job with the id of one that was forgotten
        elif was_over or 0 < row.rev <= rev:
            return
        last: Change | None = None
        state, end = row.state, row.rev or rev
        while True:
            try:
                data = await self._client._wire.read("history", {"job": job, "after_rev": rev, "limit": PAGE})
            except (NotFound, Rejected) as error:
                if error.code not in ("not-found", "history-gone"):
                    raise
                break  # its transitions are no longer kept: its end is all that is known
            page = read_answer(data, HistoryAnswer)
            for change in page.changes:
                if change.state in self._wanted - TERMINAL:
                    await self._say(row, change.rev, change.state, change, whole=False)
                    self._mark(job, change.rev, over=False)
                last = change
            state, end = page.state, page.rev
            if not page.more or not page.changes:
                break
            rev = page.changes[-1].rev
        if state in TERMINAL and state in self._wanted:
            if not is_over:  # it has ended since it was listed
                row = await self._newer(row, state)
            await self._say(row, end, state, last, whole=True)
        self._mark(job, end, over=state in TERMINAL)

    async def _newer(self, row: JobRow, state: str) -> JobRow:
        """Return the row of a job that has ended since it was listed; if it has left memory, what of it lasts."""
        newer = (await self._ls({"jobs": [row.job]})).jobs
        lasting = msgspec.structs.replace(row, state=state, replicas=None, code=None, why="")
        return next((each for each in newer if each.state in TERMINAL), lasting)

    def _mark(self, job: str, rev: int, *, over: bool) -> None:
        self._reached.jobs[job] = rev, over
        if time.monotonic() - self._saved_s >= SAVE_S:
            self._save_now()

    def _save_now(self) -> None:
        if self._reached.seen_ms:
            self._save(self._reached)
            self._saved_s = time.monotonic()

    async def _say(self, row: JobRow, rev: int, state: str, change: Change | None, *, whole: bool) -> None:
        code = change.code if change is not None else None
        why = change.why if change is not None else ""
        if whole:
            code, why = code if row.code is None else row.code, row.why or why
        replica = -1 if whole or change is None else change.replica
        of_many = row.replicas is not None
        words = [row.job, *([f"replica {replica}"] if replica > 0 or (replica == 0 and of_many) else []), state]
        words += [exit_words(code)] if code else []
        words += [f"on {change.worker}"] if change is not None and change.worker and not (whole and of_many) else []
        text = ": ".join(filter(None, (" ".join(words), failed_words(row.replicas) if whole else "", why)))
        await self._tell(
            Told(
                self._client.tenant,
                row.job,
                rev,
                state,
                " ".join(text.split()),  # a reason may have several lines
                time_ms=change.time_ms if change is not None else row.ended_ms,
                replica=replica,
                attempt=change.attempt if change is not None else 0,
                worker=change.worker if change is not None else row.worker,
                code=code,
                why=why,
                labels=row.labels,
            )
        )


def states_wanted(names: Sequence[str]) -> list[str]:
    """Return these states sorted; all ends where none is named."""
    return sorted(set(names) or TERMINAL)
