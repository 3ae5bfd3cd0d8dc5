"""The follower: it folds the ledger beside the leader, writes the history of jobs, counts GPU time, notes orders.

It saves the state and what it counted and wrote at a record, and goes on from there after a restart: no record counts
twice, and no transition is written twice. It answers questions about GPU time, operators' orders, and where the
history of a job is. The leader keeps the records behind the older save, up to half of the ledger's bound. If it had to
delete records that the follower had not read, the follower goes on from the ledger's newest snapshot, and tells the
gap.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final

import msgspec

from moorage.bus.errors import BusError
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.durable.queue_streams import info_of
from moorage.scheduler.follower.fleet_past import FleetPast
from moorage.scheduler.follower.history import History
from moorage.scheduler.follower.operators_acts import OperatorsActs
from moorage.scheduler.follower.saves import Overtaken, Saved, Saves, Written
from moorage.scheduler.follower.series import AllSeries
from moorage.scheduler.follower.told import Told
from moorage.scheduler.follower.trace_stream import TraceStream
from moorage.scheduler.follower.usage import Gap, Usage
from moorage.scheduler.follower.waits import Waits
from moorage.scheduler.ledger.evidence import Placements
from moorage.scheduler.ledger.ledger import Ledger, LedgerBroken, LedgerGap
from moorage.scheduler.ledger.snapshots import Snapshots, recover
from moorage.scheduler.pacing.outage import Outage
from moorage.scheduler.pacing.retrying import retry_unanswered
from moorage.schemas.answers.operators import ActRow
from moorage.schemas.errors import Problem, problem
from moorage.schemas.subjects import Subjects
from moorage.system.backoff import Backoff

log = logging.getLogger("moorage.follower")

#: how often the ledger is read while nobody asks: a question waits for no such turn
FOLLOW_EVERY_S: Final = 2.0
#: pause before the ledger is read again, while somebody asks
PAUSE_S: Final = 0.02
#: records folded before other tasks run
FOLD_AT_ONCE: Final = 200
#: pause after a failure
AGAIN_S: Final = 1.0
AGAIN_S_MAX: Final = 30.0
#: how long a question waits for the record at which it was asked, and after which time its asker may try again
ANSWER_S: Final = 2.0
RETRY_AFTER_S: Final = 1.0


class Question(msgspec.Struct, array_like=True):
    """A question, asked when the leader had folded record `seq`.

    `usage` is about the GPU time of a tenant (None: of all), with `waits` about where its waits went, with `series`
    about numbers over time; `acts` about operators' orders, with `events` about the fleet's past; `where` about the
    frames with the history of the `job`; `read` has it note that somebody of the tenant read output, which is no record
    of the ledger; `used` has what is `told`; `written` is answered once the history stream has all histories up to
    that record.
    """

    verb: str
    seq: int
    tenant: str | None
    arguments: dict[str, Any]


class Position(msgspec.Struct, array_like=True):
    """Where a follower stands: the last record that it folded, behind which record it needs all, and its gaps.

    `trouble` is why it cannot go on now, as it is logged, and `next` what to do about it; both are empty if it goes on.
    """

    seq: int = 0
    kept_from: int = 0
    gaps: list[Gap] = []
    waiting: int = 0  # histories that are not written yet
    frames: int = 0  # written since it began
    histories: int = 0
    trouble: str = ""
    next: str = ""


class Follower:
    """One follower. `run` follows the ledger forever; `answer` may be called meanwhile."""

    def __init__(
        self,
        jetstream: JetStream,
        world: JetStream,
        subjects: Subjects,
        config: Config,
        replicas: int,
        save_records: int,
        ceilings: Ceilings = CEILINGS,
    ) -> None:
        """`jetstream` is the ledger's account, `world` the users', which has the history.

        `config` says how long and how large the history is.
        """
        self._ledger = Ledger(jetstream, subjects, 0, replicas=replicas, ceilings=ceilings)
        self._snapshots = Snapshots(jetstream, subjects, replicas, ceilings)
        self._saves = Saves(jetstream, subjects, replicas, ceilings)
        self._save_records = save_records
        self._state = State(ceilings)
        self._usage = Usage(self._state)
        self._waits = Waits(self._state)
        self._series = AllSeries(self._state)
        self._acts = OperatorsActs()
        self._past = FleetPast()
        self._placed = Placements()
        self._history = History(world, subjects, config, replicas, lambda job: self._waits.waited(job))
        self._trace = TraceStream(jetstream, subjects)
        self._saved_seq = 0
        self._trouble, self._next = "", ""
        self._asked = asyncio.Event()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def position(self) -> Position:
        history = self._history
        told = history.waiting, history.frames, history.histories, self._trouble, self._next
        return Position(self._state.seq, self._saves.kept_from, self._usage.gaps, *told)

    # ------------------------------------------------------------------------------------------- following

    async def run(self) -> None:
        """Follow the ledger forever; no failure ends this."""
        begun, backoff, outage = False, Backoff(AGAIN_S, AGAIN_S_MAX), Outage()
        while True:
            try:
                if not begun:
                    await retry_unanswered(self._try_to_begin)
                    begun = True
                await self._catch_up()
                self._wake_folded()
                if self._state.seq - self._saved_seq >= self._save_records:
                    await self._save()
                self._trouble, self._next = "", ""
                if (lasted_s := outage.works()) is not None:
                    log.warning("the ledger is followed again; it could not always be for %.0f s", lasted_s)
                backoff.reset()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._asked.wait(), FOLLOW_EVERY_S)
                self._asked.clear()
                await asyncio.sleep(PAUSE_S)
                continue
            except BusError as error:
                if outage.failed(str(error)):
                    log.warning("the ledger cannot be followed now; jobs are not affected: %s", error)
                self._trouble, self._next = str(error), error.problem.next
            except (Overtaken, LedgerBroken) as error:
                log.warning("the follower of the ledger begins again: %s", error)
                self._trouble, self._next = str(error), ""
                begun = False
            await asyncio.sleep(backoff.next_s())

    async def _try_to_begin(self) -> None:
        """Begin; while that is tried again, for minutes, the position has the failure."""
        try:
            await self._begin()
        except BusError as error:
            self._trouble, self._next = str(error), error.problem.next
            raise

    async def _begin(self) -> None:
        """Read the newest save. If it is none of this ledger, begin at the ledger's newest snapshot."""
        await self._saves.open()
        saved = await self._saves.read()
        written = self._go_on(saved)
        ledger_id = (await self._ledger.last_term()).ledger_id if saved is not None else ""
        if ledger_id and ledger_id != self._state.ledger_id:
            newest = await recover(self._ledger, self._snapshots)
            if newest.follows(self._state.ledger_id):  # it was restored from that one: what was counted stays
                await self._history.begin(self._state, written.last, written.jobs)
                await self._bridge()
                return
            log.warning("what the follower of the ledger has counted is of another ledger, %s", self._state.ledger_id)
            written = self._go_on(None)
        await self._history.begin(self._state, written.last, written.jobs)
        await self._trace.begin(self._state)
        self._saved_seq = self._state.seq if saved is not None else -self._save_records  # the first save is due at once

    def _go_on(self, saved: Saved | None) -> Written:
        """Go on from a save, or begin with nothing; return what of its jobs is in the history."""
        saved = saved or _nothing(self._state.ceilings)
        self._state, self._usage, self._waits, self._acts = saved.state, saved.usage, saved.waits, saved.acts
        self._series, self._past, self._placed = saved.series, saved.past, saved.placed
        self._waits.placed = self._placed
        return saved.history

    async def finish(self) -> None:
        """Read the ledger to its end, and save; do nothing if the newest save is of another ledger.

        Raises `LedgerBroken`, `Overtaken`, `BusError`.
        """
        await self._saves.open()
        saved = await self._saves.read()
        if saved is not None and saved.state.ledger_id != (await self._ledger.last_term()).ledger_id:
            return
        written = self._go_on(saved)
        await self._history.begin(self._state, written.last, written.jobs)
        await self._trace.begin(self._state)
        await self._catch_up()
        await self._save()

    async def _catch_up(self) -> None:
        """Fold the ledger's records up to its present end, and write what they tell.

        Raises `LedgerBroken`, `Overtaken`, `BusError`.
        """
        await self._history.write()
        last = await self._ledger.last_seq()
        if last < self._state.seq:
            raise LedgerBroken(f"the ledger ends at record {last}, before record {self._state.seq}, which was read")
        try:
            await self._fold_through(last)
        except LedgerGap:
            await self._bridge()
            await self._fold_through(last)
        await self._history.write()
        await self._trace.write()

    async def _fold_through(self, last: int) -> None:
        async for seq, record, folded in self._ledger.fold_range(self._state, last):
            self._usage.fold(folded)
            self._placed.fold(record)
            self._waits.fold(folded, decides=bool(record.steps or record.acts or record.accepts))
            self._series.fold(folded, self._waits.waiting())
            self._acts.fold(self._state, record, folded)
            self._past.fold(self._state, record, folded)
            if self._history.take(folded):
                await self._history.write()
            if self._trace.fold(seq, record, folded):
                await self._trace.write()
            if seq % FOLD_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _bridge(self) -> None:
        """Go on from the ledger's newest snapshot, as records before it are gone. Raises `LedgerBroken`, `BusError`."""
        await self._history.write()
        state = await recover(self._ledger, self._snapshots)
        if state.seq <= self._state.seq:
            lost = f"records behind {self._state.seq} are gone, and no snapshot holds them"
            raise LedgerBroken(self._ledger.unread_snapshot or lost)
        told = await self._history.read(state)
        self._state = state
        gap = self._usage.bridge(state)
        self._waits.bridge(state, gap.until_ms)
        self._series.bridge(state)
        self._history.bridge(state, gap, told)
        await self._trace.begin(state)
        if gap.is_restore:
            log.info("a restore: history and GPU time go on behind record %d of the restored ledger", gap.through_seq)
        else:
            log.error(
                "a gap in the history and in GPU time: records %d to %d of the ledger were deleted before they were"
                " read",
                gap.after_seq + 1,
                gap.through_seq,
            )
        await self._save()

    async def _save(self) -> None:
        await self._history.write()
        await self._trace.write(mark=True)
        written = Written(self._history.last, self._history.written_jobs())
        told = self._acts, self._waits, self._series, self._past, self._placed
        await self._saves.write(Saved(self._state, self._usage, written, *told))
        self._saved_seq = self._state.seq

    # ------------------------------------------------------------------------------------------- questions

    def _wake_folded(self) -> None:
        """Wake the questions whose record is folded."""
        for seq, future in self._waiting:
            if seq <= self._state.seq and not future.done():
                future.set_result(None)
        self._waiting = [each for each in self._waiting if not each[1].done()]

    async def answer(self, question: Question) -> dict[str, Any] | Problem:
        """Return the answer once the question's record is folded; the problem `behind` if that takes too long."""
        if question.verb == "used":
            self._series.told_use(msgspec.convert(question.arguments["told"], Told), self._state.time_ms)
            return {}
        if self._state.seq < question.seq or (question.verb == "written" and self._history.waiting):
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((question.seq, future))
            self._asked.set()
            try:
                async with asyncio.timeout(ANSWER_S):
                    await future
            except TimeoutError:
                if question.verb != "read":
                    return behind(max(1, question.seq - self._state.seq))
        if question.verb == "read":
            self._note(question)
            return {}
        if question.verb == "written":
            return {}
        if question.verb == "usage" and question.arguments.get("series"):
            return self._series.answer(question.tenant, question.arguments)
        if question.verb == "usage" and question.arguments.get("waits"):
            gaps = [(gap.from_ms, gap.until_ms) for gap in self._usage.gaps]
            return self._waits.answer(question.tenant, question.arguments, gaps, self._placed)
        if question.verb == "usage":
            return self._usage.answer(question.tenant, question.arguments)
        if question.verb == "acts":
            gaps = [(gap.from_ms, gap.until_ms) for gap in self._usage.gaps]
            table = self._past if question.arguments.get("events") else self._acts
            return table.answer(question.arguments, self._state.time_ms, gaps)
        found = self._history.where(question.tenant or "", question.arguments["job"])
        if found is None:
            return behind(1)
        parts, seq = found
        return {"parts": parts, "seq": seq}

    def _note(self, question: Question) -> None:
        row = ActRow(seq=question.seq, at_ms=self._state.time_ms, tenant=question.tenant or "", **question.arguments)
        self._acts.note(row)


async def count_the_rest(jetstream: JetStream, world: JetStream, subjects: Subjects, replicas: int) -> str:
    """Have GPU time, history and operators' orders go up to the end of a ledger that is about to be deleted.

    No scheduler may run. `replicas` is the number of copies that the streams have. Return why it failed, or "".
    """
    config = Config()
    try:
        history = await info_of(world, subjects.history_stream)
        if history is not None:  # its bounds stay as the schedulers set them
            keep_s, size = history.config["max_age"] / 1e9, history.config["max_bytes"]
            config = msgspec.structs.replace(config, history_keep=keep_s, history_bytes=size)
        await Follower(jetstream, world, subjects, config, replicas, 1).finish()
    except (BusError, LedgerBroken, Overtaken) as error:
        return str(error)
    return ""


def behind(records: int) -> Problem:
    """Return the problem of a follower that has not read so many records yet."""
    return problem(
        "behind",
        f"the history of jobs and the count of GPU time are {records} records of the ledger behind the question",
        found=records,
        next="ask again; moorage doctor says how far it is behind",
        retry_after_s=RETRY_AFTER_S,
    )


def _nothing(ceilings: Ceilings) -> Saved:
    state = State(ceilings)
    return Saved(
        state, Usage(state), Written(), OperatorsActs(), Waits(state), AllSeries(state), FleetPast(), Placements()
    )
