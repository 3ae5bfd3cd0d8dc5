"""The follower as its leader sees it: a process beside it, or, where nothing else could be, a task in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from moorage.scheduler.core.ledger.records import SEQUENCES_AHEAD
from moorage.scheduler.follower.follower import AGAIN_S, AGAIN_S_MAX, ANSWER_S, Follower, Position, Question, behind
from moorage.scheduler.follower.pipe import Asked, Told, decode_told, framed, read_frame
from moorage.scheduler.ledger.snapshot_follower import Command
from moorage.scheduler.pacing.answering import Answering
from moorage.schemas.answers.fleet import FollowerRow
from moorage.schemas.errors import Problem
from moorage.system.backoff import Backoff

log = logging.getLogger("moorage.scheduler")

#: a process that has told nothing for this long is ended, and another one started
SILENT_S_MAX: Final = 60.0
#: questions under way: in all, and of one tenant
QUESTIONS_MAX: Final = 256
QUESTIONS_MAX_TENANT: Final = 64

Then = Callable[[dict[str, Any] | Problem], None]


class FollowerBeside:
    """The follower of one term. `run` keeps it running; `ask` calls back with each answer, unless the term ends."""

    def __init__(self, command: Command | None, make: Callable[[], Follower]) -> None:
        """`command` starts the process; without it, what `make` returns follows in this process."""
        self._command = command
        self._make = make
        self._here: Follower | None = None
        self._position = Position()
        self._asked_seq = 0
        self._trouble = ""  # why there is no process that has begun; empty if there is one
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Told | None]] = {}
        self._answers = Answering("questions about GPU time and the history", QUESTIONS_MAX, QUESTIONS_MAX_TENANT)

    @property
    def position(self) -> Position:
        """Where it stood when it last told."""
        return self._position if self._here is None else self._here.position

    def figures(self, seq: int) -> FollowerRow:
        """Return what the answer to `fleet` contains of it, where the leader has folded record `seq`."""
        position = self.position
        trouble = position.trouble or self._trouble
        return FollowerRow(
            behind=self._records_behind(seq),
            gaps=[[gap.from_ms, gap.until_ms, gap.records] for gap in position.gaps if not gap.is_restore],
            waiting=position.waiting,
            frames=position.frames,
            stories=position.histories,
            trouble=trouble,
            next=position.next if trouble else None,
        )

    def _records_behind(self, seq: int) -> int:
        """Return how many records it has to read up to `seq`; until it has told, those since it was first asked about.

        The sequences that a restore skips are no records.
        """
        if not self.position.seq:
            self._asked_seq = self._asked_seq or seq
        return max(0, seq - (self.position.seq or self._asked_seq)) % SEQUENCES_AHEAD

    # ---------------------------------------------------------------------------------------------- asking

    def ask(self, question: Question, then: Then) -> Problem | None:
        """Ask, and call `then` with the answer, later; return the problem if too many questions are under way."""
        if (full := self._answers.overloaded(question.tenant or "")) is None:
            self._answers.begin(lambda: self.asked(question), then, question.tenant or "")
        return full

    async def asked(self, question: Question) -> dict[str, Any] | Problem:
        """Ask, and return the answer: `behind` if the process is stopped or busy, and has not answered."""
        if self._here is not None:
            return await self._here.answer(question)
        told: Told | None = None
        if self._writer is not None:
            number = next(self._numbers)
            answer: asyncio.Future[Told | None] = asyncio.get_running_loop().create_future()
            self._asked[number] = answer
            self._writer.write(framed(Asked(number, question)))
            try:
                async with asyncio.timeout(2 * ANSWER_S):
                    told = await answer
            except TimeoutError:
                pass
            finally:
                self._asked.pop(number, None)
        if told is None:
            return behind(max(1, self._records_behind(question.seq)))
        answered = told.refused if told.refused is not None else told.data
        assert answered is not None
        return answered

    async def close(self) -> None:
        await self._answers.close()

    # --------------------------------------------------------------------------------------------- running

    async def run(self) -> None:
        """Keep the follower running until this is cancelled."""
        if self._command is None:
            self._here = self._make()
            await self._here.run()
            return
        backoff = Backoff(AGAIN_S, AGAIN_S_MAX)
        while True:
            if await self._one(self._command):
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _one(self, command: Command) -> bool:
        """Run one process to its end; return whether it has told anything."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                env={**os.environ, **command.env},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        except OSError as error:  # no room for a process, or an upgrade replaced Python: the term continues
            self._trouble = f"the follower of the ledger cannot be started: {error}"
            log.warning("no history is written now: %s", self._trouble)
            return False
        assert process.stdin is not None
        assert process.stdout is not None
        self._writer, told = process.stdin, False
        try:
            while True:
                try:
                    async with asyncio.timeout(SILENT_S_MAX):
                        frame = await read_frame(process.stdout)
                except TimeoutError:
                    self._trouble = f"the follower of the ledger said nothing for {SILENT_S_MAX:g} s and is ended"
                    log.warning("%s", self._trouble)
                    return told
                if frame is None:
                    self._trouble = "the follower of the ledger ended; it is started again"
                    log.warning("%s", self._trouble)
                    return told
                told = True
                self._on_answer(frame)
        finally:
            self._writer = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_result(None)

    def _on_answer(self, frame: bytes) -> None:
        answered = decode_told(frame)
        self._position = answered.position
        if answered.position.seq:  # it has begun
            self._trouble = ""
        if (answer := self._asked.get(answered.number)) is not None and not answer.done():
            answer.set_result(answered)
