"""Writes the history stream: the transitions of jobs, kept for days after the jobs left memory.

A job's history is written once the job is over, or in parts while it grows long. Each frame names the stream's last
sequence, so that of two followers one writes, and the ledger's record up to which it goes. A follower that goes on from
a save first reads the frames behind it: what they contain it does not write again. While the stream takes nothing, no
further record is folded; the ledger holds what is not written yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from moorage.bus.errors import JetStreamRefused
from moorage.bus.jetstream import COPIES_FOLLOW, ERR_WRONG_LAST_SEQUENCE, EXPECTED_LAST_SEQUENCE, Ack, JetStream
from moorage.bus.jetstream_answers import StreamInfo
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.state import LISTED_MAX, PARTS_MAX, Job, State
from moorage.scheduler.follower.saves import Overtaken
from moorage.scheduler.history.packing import Packing, Parts
from moorage.scheduler.history.unpacking import Frame, range_in, read_frame
from moorage.schemas.errors import Refused
from moorage.schemas.subjects import Subjects
from moorage.schemas.waited import WaitedPart

log = logging.getLogger("moorage.history")

#: histories packed before the event loop runs other tasks
PACK_AT_ONCE: Final = 100
#: with more waiting histories, a tenant's histories are written without requests: transitions come first
WITH_REQUEST_MAX: Final = 1000
#: histories that wait before no further record is folded
WAITING_MAX: Final = 2_000
#: the smallest stream that is tried if the server has no room for the configured size
BYTES_MIN: Final = 4 * 1024**2

#: after and through which sequence of the ledger, and from and until which ledger ms nothing is known
Missing = tuple[int, int, int, int]
#: a frame's sequence, and what it has of a job: the first and last revision, of which blocks, and whether its end
Told = tuple[int, int, int, list[int], bool]


def stream_config(subjects: Subjects, config: Config, replicas: int) -> dict[str, Any]:
    """Return the stream's settings; the oldest messages are dropped at either bound."""
    return {
        "name": subjects.history_stream,
        "subjects": [subjects.history_all],
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "max_age": int(config.history_keep * 1e9),
        "max_bytes": config.history_bytes,
        "allow_direct": True,
        "num_replicas": replicas,
    }


async def ensure_history(jetstream: JetStream, subjects: Subjects, config: Config, replicas: int) -> StreamInfo:
    """Create the stream, smaller than configured if the server lacks room, or update it. Raises `BusError`."""
    settings = stream_config(subjects, config, replicas)
    return await jetstream.ensure_stream_with_room(
        settings, frozenset({"max_age", "max_bytes", *COPIES_FOLLOW}), BYTES_MIN
    )


class History:
    """The writer of one follower. `take` is called after each folded record, `write` when something waits."""

    def __init__(
        self,
        jetstream: JetStream,
        subjects: Subjects,
        config: Config,
        replicas: int,
        waited: Callable[[Job], list[WaitedPart]],
    ) -> None:
        """`waited` returns where the waits of a job in memory went."""
        self._waited = waited
        self._js = jetstream
        self._subjects = subjects
        self._config = config
        self._replicas = replicas
        self._waiting: dict[str, deque[Job]] = {}  # by tenant, in the order in which the jobs ended
        self._gaps: dict[str, Missing] = {}  # by tenant: what its next frame tells
        self._state = State()
        #: by job number: the frames with earlier parts of its history, and with its end (0: not written yet)
        self._parts: dict[int, Parts] = {}
        self._kept: dict[int, int] = {}
        #: by number: where the waits of jobs went that are over and not written yet, as they may leave memory before
        self._waited_of: dict[int, list[WaitedPart]] = {}
        #: by tenant, job and accepting record: what frames behind the save contain of it, as parts and whether its end
        self._found: dict[tuple[str, str, int], list[Told]] = {}
        self.last = 0  # the stream's last sequence
        self.frames = 0
        self.histories = 0

    @property
    def waiting(self) -> int:
        """How many histories wait to be written."""
        return sum(map(len, self._waiting.values())) + len(self._gaps)

    @property
    def is_full(self) -> bool:
        """Whether what waits must be written before another record is folded."""
        return bool(self._waiting) and self.waiting >= WAITING_MAX

    # --------------------------------------------------------------------------------------- begin, save

    async def ensure(self) -> None:
        """Create the stream, or update it: see `ensure_history`. Raises `BusError`."""
        self.last = (await ensure_history(self._js, self._subjects, self._config, self._replicas)).last_seq

    async def begin(self, state: State, after: int, told: list[tuple[int, Parts, int]]) -> None:
        """Begin at a state, of which `told` says what was written when the stream ended at sequence `after`.

        Reads the frames behind. Raises `BusError`.
        """
        self._state = state
        self._waiting.clear()
        self._waited_of.clear()
        self._gaps.clear()
        self._found.clear()
        self._parts = {num: parts for num, parts, _ in told if parts}
        self._kept = {num: kept for num, _, kept in told if kept}
        await self.ensure()
        begin = after + 1 if after <= self.last else 1  # the stream was deleted since, and counts from 1 again
        async for seq, frame in self._frames(begin):
            for history in frame.jobs:
                key = frame.tenant, history.job, history.ledger
                self._found.setdefault(key, []).append((seq, *range_in(history), history.over))

    async def _frames(self, begin: int) -> AsyncGenerator[tuple[int, Frame], None]:
        """Yield the stream's frames from a sequence on, with theirs."""
        stream, subjects = self._subjects.history_stream, self._subjects.history_all
        async for message in self._js.read_range(stream, subjects, begin, to_seq=self.last):
            try:
                yield message.seq, read_frame(message.data)
            except Refused:
                continue  # no follower has written it

    def written_jobs(self) -> list[tuple[int, Parts, int]]:
        """Return what was written of jobs in memory, for a save. Nothing may wait."""
        nums = self._parts.keys() | self._kept.keys()
        return [(num, self._parts.get(num, []), self._kept.get(num, 0)) for num in sorted(nums)]

    async def read(self, state: State) -> list[tuple[Job, Told]]:
        """Return what the whole stream tells of a state's jobs in memory, in order, and note in its table of finished
        jobs where the ends of these are. Raises `BusError`."""
        await self.ensure()
        found: list[tuple[Job, Told]] = []
        async for seq, frame in self._frames(1):
            for history in frame.jobs:
                job = state.job(frame.tenant, history.job)
                if job is not None:
                    if job.ledger == history.ledger:
                        found.append((job, (seq, *range_in(history), history.over)))
                elif history.over:
                    key = job_key(frame.tenant, history.job)
                    row = state.finished.find(key)
                    if (
                        row is not None and history.accepted_ms // 1000 <= row[1]
                    ):  # else it is of a later job of the name
                        state.finished.locate(key, seq)
        return found

    def bridge(self, state: State, missing: Missing, told: list[tuple[Job, Told]]) -> None:
        """Go on from another state, as the records before it are gone: each tenant's next frame tells the gap.

        `told` is what `read` has found of it. A restore may go back and forth between the states of several backups, so
        only the stream knows what was written of a job.
        """
        self._state = state
        self._parts.clear()
        self._kept.clear()
        self._found.clear()
        for job, (seq, first, last, blocks, over) in told:
            self._note(job, seq, first, last, blocks, over=over)
        self._gaps.update(dict.fromkeys(state.tenants, missing))
        for num in state.ended:
            if num not in self._kept:
                self._add(state.jobs[num])

    # --------------------------------------------------------------------------------------------- taking

    def take(self, folded: Folded) -> bool:
        """Note what a record leaves to be written; return whether it must be written before the next record is folded.

        That is so for a long history, of which the fold drops the oldest transitions.
        """
        is_long, ceilings = False, self._state.ceilings
        for job in folded.jobs.values():
            part = ceilings.part + ceilings.part_each * min(job.size, LISTED_MAX)
            if not job.over and job.rev - self._written(job) >= part:
                self._add(job)
                is_long = True
        for job in folded.ended:
            self._add(job)
        for job in folded.compacted:
            if kept := self._kept.pop(job.num, 0):  # else its end still waits
                self._parts.pop(job.num, None)
                self._state.finished.locate(job_key(job.tenant, job.name), kept)
        return is_long or self.is_full

    def _written(self, job: Job) -> int:
        parts = self._parts.get(job.num)
        return parts[-1][2] if parts else 1

    def _add(self, job: Job) -> None:
        """Let a job's history wait, unless a frame behind the save has what is to be written of it."""
        found = self._found.get(_named(job))
        while found and found[0][2] <= job.rev and (job.over or not found[0][4]):
            seq, first, last, blocks, over = found.pop(0)
            self._note(job, seq, first, last, blocks, over=over)
        if found is not None and not found:
            del self._found[_named(job)]
        if job.num not in self._kept if job.over else self._written(job) < job.rev:
            self._waiting.setdefault(job.tenant, deque()).append(job)
            if job.over and (waited := self._waited(job)):
                self._waited_of[job.num] = waited

    def _note(self, job: Job, seq: int, first: int, last: int, blocks: list[int], *, over: bool) -> None:
        """Note where a part of a history, or its end, is."""
        if not over:
            parts = self._parts.setdefault(job.num, [])
            parts.append((seq, first, last, blocks))
            del parts[:-PARTS_MAX]
        elif job.num in self._state.jobs:
            self._kept[job.num] = seq
        else:  # it left memory before this was stored
            self._parts.pop(job.num, None)
            self._state.finished.locate(job_key(job.tenant, job.name), seq)

    def where(self, tenant: str, name: str) -> tuple[Parts, int] | None:
        """Return the frames with earlier parts of a job's history, and the one with its end; None while that waits.

        ([], 0) if nothing of it is written or known.
        """
        job = self._state.job(tenant, name)
        if job is not None:
            kept = self._kept.get(job.num, 0)
            return None if job.over and not kept else (self._parts.get(job.num, []), kept)
        row = self._state.finished.find(job_key(tenant, name))
        if row is not None and not row[3] and any(job.name == name for job in self._waiting.get(tenant, ())):
            return None
        return [], row[3] if row is not None else 0

    # --------------------------------------------------------------------------------------------- writing

    async def write(self) -> None:
        """Write all that waits. Raises `Overtaken`, `BusError`: then the rest still waits."""
        for tenant in [*self._waiting, *(self._gaps.keys() - self._waiting.keys())]:
            while tenant in self._waiting or tenant in self._gaps:
                await self._write(tenant)

    async def _write(self, tenant: str) -> None:
        queue = self._waiting.get(tenant) or deque[Job]()
        packing = Packing(self._state, tenant, self._gaps.get(tenant))
        with_request = len(queue) <= WITH_REQUEST_MAX
        whole = 0
        for count, job in enumerate(queue, 1):
            waited = self._waited_of.get(job.num)
            if not packing.add(job, self._parts.get(job.num, []), with_request=with_request, waited=waited):
                break
            if job.over and not packing.packed[-1].over:
                break  # a long end: the rest of it is in the next frame
            whole += 1
            if count % PACK_AT_ONCE == 0:
                await asyncio.sleep(0)
        seq = await self._append(tenant, packing.frame())
        self._gaps.pop(tenant, None)
        for job, first, last, blocks, over in packing.packed:
            self._note(job, seq, first, last, blocks, over=over)
            self.histories += over
            if over:
                self._waited_of.pop(job.num, None)
        for _ in range(whole):
            queue.popleft()
        if not queue:
            self._waiting.pop(tenant, None)

    async def _append(self, tenant: str, frame: bytes) -> int:
        headers = {EXPECTED_LAST_SEQUENCE: str(self.last)}
        answer = await self._js.append(self._subjects.history(tenant), frame, headers)
        if isinstance(answer, Ack):
            self.last = answer.seq
            self.frames += 1
            return answer.seq
        if answer.err_code == ERR_WRONG_LAST_SEQUENCE:
            raise Overtaken("the history was written to by another follower")
        if answer.nobody_listens:  # the stream no longer exists
            await self.ensure()
        raise JetStreamRefused(f"append to the history of {tenant}", answer.code, answer.err_code, answer.description)


def _named(job: Job) -> tuple[str, str, int]:
    return job.tenant, job.name, job.ledger
