"""A scheduler process: it stands by until the ledger falls silent, then leads (see `term`) until another one does.

It is crash-only: when it finds another leader's record in place of its own, it drops everything in memory and folds the
ledger again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from contextlib import suppress
from typing import Final

from moorage.bus.errors import BusError
from moorage.scheduler.core.engine import Displaced
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.durable.dead_letters import DeadLetters
from moorage.scheduler.durable.queue_reader import read_through
from moorage.scheduler.follower.history import ensure_history
from moorage.scheduler.leader.beside import keep_running
from moorage.scheduler.leader.parts import Parts
from moorage.scheduler.leader.term import Term, monotonic_ms
from moorage.scheduler.ledger.ledger import Deposed, LedgerBroken, LedgerGap, LedgerOlder, SnapshotsUnread
from moorage.scheduler.ledger.snapshots import recover
from moorage.scheduler.pacing.outage import Outage
from moorage.scheduler.pacing.retrying import retry_unanswered

log = logging.getLogger("moorage.scheduler")

STANDBY_LOOK_S: Final = 0.2
#: a read of the ledger is repeated after this time: a read sent while the stream had no leader is never answered
STANDBY_PATIENCE_S: Final = 2.0
#: how often in a row a gap is bridged with the newest snapshot before the ledger counts as broken
GAPS_MAX: Final = 5
RESIGN_S: Final = 3.0
#: more terms in vain than this make a standby no more patient; the length of a lease bounds that, too
IN_VAIN_MAX: Final = 8


def _told_already(name: str, raised: Exception) -> None:
    """Count nothing: a failure is logged, and it is no term's."""


class Scheduler(Parts):
    """A scheduler process that stands by and leads. See `Parts` for its arguments."""

    term: Term | None = None
    _folded = 0  # the last ledger record that this standby folded
    _displaced = -1  # the epoch of a term of this process that ended because its record stands elsewhere than foreseen
    _resigning = False  # whether `resign` was asked of this process while it led
    _is_new = False  # whether the ledger was empty when this process began

    async def run(self) -> None:
        """Stand by and lead, until `resign` while leading, or cancellation.

        Raises `LedgerBroken` if an operator must act; `BusError` if streams cannot be made or read, and for a refused
        subscription.
        """
        beside = [
            asyncio.create_task(self.standings.announce(self._standing)),
            asyncio.create_task(keep_running("passing on files of workers", self.buckets.run, _told_already)),
        ]
        try:
            await self._run()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    def _standing(self) -> tuple[int, bool]:
        """Return the last folded ledger record, and whether this process leads."""
        term = self.term
        return (self._folded, False) if term is None else (term.recorded_seq, self.leading.is_set())

    async def _make_streams(self) -> None:
        """Create or check the streams of the queue, the dead letters, the snapshots and the history. Raises `BusError`.

        What they reserve goes before the buckets of tenants. Without the history, jobs run all the same: the follower
        says what is wrong with it, and makes it once it can.
        """
        await self.queue_streams.refresh()
        await self.queue_streams.ensure(self._first_request)
        await DeadLetters.ensure(self.world_js, self.subjects, self.replicas, self.config.dead_letters_keep)
        await self.snapshots.ensure()
        with suppress(BusError):
            await ensure_history(self.world_js, self.subjects, self.config, self.replicas)

    async def _first_request(self) -> int:
        """Return the first sequence of a request queue to create: behind all cursors; 1 for a new ledger."""
        if self._is_new:
            return 1
        await self.snapshots.ensure()
        state = await recover(self.ledger, self.snapshots)
        await self.ledger.follow(state)
        return 1 + read_through(state)

    async def _run(self) -> None:
        self._is_new = await self.ledger.ensure() == 0
        await retry_unanswered(self._make_streams)
        state = await recover(self.ledger, self.snapshots)
        gaps = 0
        while True:
            try:
                await self._stand_by(state)
                gaps = 0
            except SnapshotsUnread:
                raise
            except LedgerGap as gap:  # purged before this process read it: the newest snapshot contains it
                gaps += 1
                if gaps > GAPS_MAX:
                    raise LedgerBroken(
                        f"{gap}. Records were deleted that no snapshot holds: bring the nats-server's folder back, or"
                        " stop every scheduler and run `moorage admin restore FILE --replace` with the last backup"
                    ) from None
                log.warning("%s", gap)
                await asyncio.sleep(STANDBY_LOOK_S)
                state = await recover(self.ledger, self.snapshots)
                continue
            if state.behind:
                raise LedgerOlder(state.behind)
            try:
                if await self._lead(state):
                    return
            except Deposed as deposed:  # another scheduler was first to take over
                log.warning("this scheduler no longer leads: %s", deposed)
            except ExceptionGroup as group:
                if (ends := group.subgroup((LedgerBroken, BusError))) is not None:
                    raise ends.exceptions[0] from None
                if group.split((Deposed, Displaced))[1] is not None:
                    raise
                if group.subgroup(Displaced) is not None and self.term is not None:
                    ended = self.term.engine.state
                    self._displaced = ended.epoch
                    if not ended.leader:  # its resignation is stored all the same
                        self.term.resigned.set()
                log.warning("this scheduler no longer leads: %s", group.exceptions[0])
            finally:
                self.leading.clear()
                self.term = None
            if self._resigning:
                return
            state = await recover(self.ledger, self.snapshots)

    async def _stand_by(self, state: State) -> None:
        """Fold the ledger until it has no leader, or its leader is silent for the takeover time plus a random part."""
        began, records = time.monotonic(), await self._catch_up(state)
        self._folded = state.seq
        self.caught_up.set()
        log.info("folded %d records up to %d in %.2f s", records, state.seq, time.monotonic() - began)
        self.took_over = "its leader had resigned" if state.epoch else "the ledger is new"
        if not state.leader:
            return
        if state.epoch == self._displaced:
            self.took_over = "a message of another program stands before a record of its own"
            return
        # the current silence is only a hint, by the server's wall clock: the fence decides which scheduler leads
        apart_s = random.uniform(0, self.config.takeover_s / 8)
        heard = time.monotonic() - max(0.0, await self.ledger.silent_for(state))
        unread = Outage()
        while time.monotonic() - heard < (silence_s := self._silence_s() + apart_s):
            await asyncio.sleep(STANDBY_LOOK_S)
            try:
                if await self.ledger.follow(state, STANDBY_PATIENCE_S):
                    heard = time.monotonic()
                    if not state.leader:
                        return
                self._folded = state.seq
                if (lasted_s := unread.works()) is not None:
                    log.warning("the ledger can be read again; it could not always be read for %.0f s", lasted_s)
            except BusError as error:
                if unread.failed(words := f"the ledger cannot be read now: {error}"):
                    log.warning("%s", words)
                # The silence began at the last record read. But once the ledger is readable again, its leader gets half
                # of the time: it, too, needs a while to find that its append can be stored now.
                heard = max(heard, time.monotonic() - silence_s / 2)
        self.took_over = f"scheduler {state.leader} was silent for {time.monotonic() - heard:.0f} s"

    def _silence_s(self) -> float:
        """Return how long a leader may be silent: twice as long for each term before it that wrote only its epoch.

        A leader builds its tables before its first record, which takes seconds for 100,000 jobs, and longer on a busy
        machine. If that were longer than a standby waits, they would take over from each other for ever.
        """
        takeover_s, in_vain = self.config.takeover_s, min(max(0, self.ledger.epochs_last - 1), IN_VAIN_MAX)
        return max(takeover_s, min(takeover_s * (1 << in_vain), self.config.lease_s))

    async def _catch_up(self, state: State) -> int:
        """Fold the ledger to its end, including records written meanwhile; return how many.

        Otherwise the leader would seem to have been silent for as long as the folding took.
        """
        records = 0
        while True:
            began, more = time.monotonic(), await self.ledger.follow(state)
            records += more
            if not more or time.monotonic() - began < self.config.takeover_s / 4:
                return records

    async def resign(self) -> None:
        """Stop leading with a last record that says so, so that a standby need not wait for silence.

        Waits for that record `RESIGN_S` at most, and logs a timeout. Does nothing if this process does not lead. It
        leads no more, even where the term ends otherwise before.
        """
        term = self.term
        if term is not None:
            self._resigning = True
            term.resign()
            try:
                async with asyncio.timeout(RESIGN_S):
                    await term.resigned.wait()
            except TimeoutError:
                log.warning(
                    "the resignation could not be written to the ledger: a standby takes over only after the "
                    "takeover time"
                )

    async def _lead(self, state: State) -> bool:
        """Lead until `resign` (returns True), or until another scheduler leads.

        Raises `Deposed` for that: alone if the takeover failed, later in an ExceptionGroup.
        """
        began_ms = monotonic_ms()
        wall_s = self.ledger.wall_s()
        await self.ledger.take_over(state, self.name, secrets.token_hex(8), int(wall_s * 1000), wall_s)
        term = self.term = Term(self, state, began_ms)
        log.info("leading epoch %d at ledger record %d: %s", state.epoch, state.seq, self.took_over)
        term.gc_schedule.begin()
        async with asyncio.TaskGroup() as group:
            await term.open()
            try:
                failed, questions = term.count_failed_task, term.questions
                beside = [
                    group.create_task(keep_running(name, work, failed))
                    for name, work in (
                        ("hearing the workers", term.hearing.run),
                        ("rationing tenants", term.door.run),
                        ("rationing workers", term.workers_door.run),
                        ("reading the durable queue", term.queue_reader.run),
                        ("inspecting devices", questions.inspection.run),
                        ("following jobs that wait", questions.foresight.run),
                        ("schedules", term.schedules.run),
                        ("the fleet frame", term.report),
                        ("snapshots", term.snapshot),
                        ("following the ledger", term.follower.run),
                        ("watching the ledger's copies", self.copies.watch),
                    )
                ]
                self.leading.set()
                await term.loop()
                for task in beside:
                    task.cancel()
            finally:
                await term.close()
        return True
