"""One term (here `Term`): the time during which this scheduler leads.

The loop takes what has arrived, lets the engine build a record, appends it to the ledger, and sends the outputs once
the append is acknowledged. Beside the loop it answers questions, publishes the fleet frame and has snapshots written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from itertools import count
from typing import Any, Final

from moorage.bus.errors import BusError
from moorage.bus.transport import Delivery, Handler
from moorage.scheduler.answers.counts import Counts
from moorage.scheduler.answers.over_time import told_now
from moorage.scheduler.answers.view import View
from moorage.scheduler.core.contained_engine import ContainedEngine
from moorage.scheduler.core.events import Resign, SnapshotTaken
from moorage.scheduler.core.ledger.state import Job, State
from moorage.scheduler.core.outputs.outputs import Message, Outputs
from moorage.scheduler.durable.queue_reader import QueueReader
from moorage.scheduler.durable.schedule_keeper import ScheduleKeeper
from moorage.scheduler.durable.schedule_stream import ScheduleStream
from moorage.scheduler.follower.follower import Question
from moorage.scheduler.leader.discovery import Discovery
from moorage.scheduler.leader.door import Door
from moorage.scheduler.leader.fleet_detail import FleetDetails
from moorage.scheduler.leader.fleet_frames import FleetFrames
from moorage.scheduler.leader.gc_schedule import GcSchedule
from moorage.scheduler.leader.hearing import Hearing
from moorage.scheduler.leader.intake import Intake
from moorage.scheduler.leader.outgoing import coalesced, messages_of
from moorage.scheduler.leader.parts import Parts
from moorage.scheduler.ledger.ledger import LedgerOlder
from moorage.scheduler.ledger.recording import RecordedEngine
from moorage.scheduler.ledger.snapshot_follower import SnapshotsGone, take_snapshot
from moorage.scheduler.ledger.state_bytes import BadSnapshot
from moorage.scheduler.pacing.gate import Gate
from moorage.scheduler.pacing.write_stall import StalledRequests
from moorage.scheduler.questions.questions import Questions
from moorage.scheduler.questions.schedules import ScheduleVerb
from moorage.schemas.answers.fleet import AppendFigures, ContainedFailures, FleetAnswer
from moorage.schemas.answers.jobs import Explained
from moorage.schemas.codec import encode
from moorage.schemas.frames import FleetEvent, RollCall
from moorage.schemas.subjects import FLEET

log = logging.getLogger("moorage.scheduler")

FLEET_FRAME_S: Final = 0.5
#: of so many frames for observers, one comes with a frame for operators: workers report use every 2 s
DETAIL_EVERY: Final = 4
#: the follower is told every ten seconds what is done, and is in no record
USE_EVERY: Final = 20
#: a leader that ran so much later than it should was stopped, or its machine had no time for it
PAUSE_S: Final = 3.0
#: what happened to the fleet that is a warning in the log
WARNED: Final = frozenset(("lost", "closed", "gpu-out"))
SNAPSHOT_LOOK_S: Final = 5.0
SNAPSHOT_RETRY_S: Final = 60.0
#: after a record that changed this many jobs, the event loop runs other tasks before the next one is built
LONG_RECORD: Final = 256

#: after a record that is stored elsewhere than foreseen, records are folded once they are stored, for so long: whoever
#: writes into the ledger's stream again and again ends one term, not each
UNFORESEEN_S: Final = 60.0

#: if this many records in a row had no submit, and a submit arrived during the append of each, the next record waits up
#: to SHARE_WAIT_S for a submit, so that both need one append (event loops have no finer timers)
SHARE_AFTER: Final = 3
SHARE_WAIT_S: Final = 0.002


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Term:
    """One term as leader: the engine, and the I/O around it."""

    def __init__(self, scheduler: Parts, state: State, began_ms: int) -> None:
        self._scheduler = scheduler
        self._world = scheduler.world
        self._out = scheduler.out
        self._subjects = scheduler.subjects
        self._config = scheduler.config
        self._began_ms = began_ms
        self._gate = Gate()
        self._skipped_ms = 0  # time that a simulation skipped
        self._began_time_ms = state.time_ms
        begins = (
            state, scheduler.config, scheduler.subjects, scheduler.leader, monotonic_ms(), self._explain_waiting
        )  # fmt: skip
        recorder = scheduler.recorder
        self.engine = ContainedEngine(*begins) if recorder is None else RecordedEngine(recorder, *begins)
        self.engine.explain_woken = self._explain_woken
        self.counts = Counts(self.engine)
        self.queue_reader = QueueReader(
            scheduler.world_js,
            scheduler.subjects,
            self.engine,
            self._wake,
            self.send_soon,
            scheduler.replicas,
            scheduler.queue_streams,
            scheduler.tenant_buckets,
            self._gate,
        )
        self.follower = scheduler.follower()
        stream = ScheduleStream(scheduler.ledger_world, scheduler.subjects, scheduler.replicas)
        self.schedules = ScheduleKeeper(stream, self.engine, self._wake, self._gate)
        self.questions = Questions(
            self,
            scheduler.out,
            scheduler.tenants,
            scheduler.world_js,
            scheduler.subjects,
            scheduler.standings,
            self.queue_reader.letters,
            ScheduleVerb(self.engine, self.schedules, self.answer_now, self._wake),
            forks=scheduler.own_process,
        )
        asked = self.questions
        self.intake = Intake(
            self.engine,
            scheduler.subjects,
            self.answer_now,
            self._refuse_now,
            asked.read,
            asked.admin,
            self.counts.calls.add_load,
            lambda: scheduler.queue_streams.has_keys,
            lambda: scheduler.queue_streams.persons,
            asked.foresight.before_submit,
        )
        self.door = Door(
            "tenant",
            scheduler.tenants,
            scheduler.subjects,
            self.intake.rates,
            self._rows_of_tenant,
            self._known_tenants,
        )
        self.workers_door = Door(
            "worker",
            scheduler.world,
            scheduler.subjects,
            self.intake.worker_rates,
            self._rows_of_worker,
            lambda: self.engine.state.workers,
        )
        self.stalled = StalledRequests(
            scheduler.ledger.appending,
            scheduler.subjects,
            self._fresh_s,
            self._refuse_now,
            self._on_delivery,
            lambda: self.engine.waiting + self.intake.waiting,
        )
        self.hearing = Hearing(scheduler.world, self.intake, self.mono_ms)
        self.gc_schedule = GcSchedule(scheduler.own_process)
        self._kick = asyncio.Event()
        #: until `open` is done, too: who is answered may take it that its other requests are heard as well
        self._draining = True
        self._subscriptions: list[Any] = []
        self._now: list[tuple[str, bytes]] = []
        self._held: list[tuple[str, bytes]] = []  # made while a record is in flight, and sent once it is acknowledged
        self._messages: list[Message] | None = None  # of the record in flight, None until they are made
        self._marked: list[tuple[str, bytes]] = []  # answers of that record which the durable queue's reader waits for
        self._sending_now: asyncio.Task[None] | None = None
        self._sent_ms = began_ms  # when the last acknowledged append was sent: the epoch record, before the engine
        self._built_ms = 0
        self._failed: Exception | None = None
        self.records = 0
        self.recorded_seq = state.seq  # the last record of this term, or before it, that is known to be stored
        self._recorded_snapshots = state.snapshot, state.snapshot_before  # that such records name
        self._purged_through = 0  # records up to it are purged
        self._purged_but = ""  # the newest snapshot when older ones were purged
        self._append_s = 0.0  # how long their appends took, together
        self._submits_delayed = 0  # records in a row without a submit, during whose append a submit arrived
        self.resigned = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def _explain_waiting(self, job: Job) -> dict[str, Any] | None:
        """Return why a job waits, for the answer to its submit; None as in `Foresight.at_submit`."""
        waiting = self.engine.queue.waiting.get(job.num)
        if waiting is not None and waiting.rests:
            return None  # it has begun wherever it can
        return self.questions.foresight.at_submit(job)

    def _explain_woken(self, job: Job) -> Explained | None:
        """Return why a job waits, for the answer to a caller that wakes its service; None as in `Foresight.at_wake`."""
        return self.questions.foresight.at_wake(job)

    # ---------------------------------------------------------------------------------------- in and out

    async def open(self) -> None:
        """Subscribe, then send the roll call, which workers answer with hello and renewal.

        Between connections there is no order. So what arrives meanwhile is answered once all subscriptions are made.
        """
        operators = self._scheduler.operators
        await self.workers_door.open()
        self._subscriptions.append(await operators.subscribe(self._subjects.admin_all, self._on_delivery))
        may_store = self._subjects.may_store, self.questions.on_may_store
        # rights of an earlier release refuse it, until the servers have new ones
        self._subscriptions.append(await self._world.subscribe_ahead(*may_store))
        await self.door.open()
        heard = self._scheduler.ledger_world.subscribe(self._subjects.scheduled_all, self.schedules.on_run)
        self._subscriptions.append(await heard)
        self._subscriptions.append(await self._scheduler.standings.listen())
        state = self.engine.state
        why = self._scheduler.took_over
        leading = FleetEvent("leading", state.time_ms, state.seq, scheduler=self._scheduler.name, why=why)
        roll_call = self._subjects.roll_call, encode(RollCall(state.epoch)), ""
        await self._out.send([roll_call, (self._subjects.events(FLEET), encode(leading), "")])
        state, leader = self.engine.state, f"{self._scheduler.leader:x}-{self.engine.state.epoch}"
        discovery = Discovery(self._subjects, leader, state.leader, self.answer_now, self._stats)
        self._subscriptions += await discovery.open(operators)
        self._loop.call_soon(self._drain)

    async def close(self) -> None:
        self.stalled.close()
        await self.door.close()
        await self.workers_door.close()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        await self.questions.close()
        await self.follower.close()
        await self.queue_reader.letters.close()

    def _known_tenants(self) -> set[str]:
        streams = self._scheduler.queue_streams
        return {*self.engine.state.tenants, *streams.tenants, *streams.buckets_of}

    def _rows_of_tenant(self, tenant: str) -> list[tuple[str, Handler]]:
        subjects = self._subjects
        return [
            (subjects.api(tenant, "*"), self._on_delivery),
            (subjects.member(tenant, "*", "load"), self._on_delivery),
            (subjects.request(tenant, "*"), self._on_queued),
        ]

    def _rows_of_worker(self, worker: str) -> list[tuple[str, Handler]]:
        subjects = self._subjects
        told = [subjects.worker(worker, verb) for verb in ("join", "renew", "fact")]
        rows: list[tuple[str, Handler]] = [(each, self._on_delivery) for each in (*told, subjects.load(worker))]
        return [*rows, (subjects.worker(worker, "looked"), self._on_looked)]

    def _on_looked(self, delivery: Delivery) -> None:
        if self.intake.may_send(self._subjects.token(delivery.subject, 1), delivery):
            self.questions.inspection.on_looked(delivery)

    def _on_queued(self, delivery: Delivery) -> None:
        """Note that the durable queue has a message; it counts for its tenant's rate, and is never refused."""
        self.intake.count_queued(delivery)
        self.queue_reader.hint(delivery)

    def _on_delivery(self, delivery: Delivery) -> None:
        if self.stalled.keeps(delivery):
            return
        self.intake.put(delivery)
        if not self._draining:
            self._draining = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Decode what has arrived, also during an append; a large backlog takes several turns of the event loop."""
        self._draining = not self.intake.drain(self.mono_ms())
        if self._draining:
            self._loop.call_soon(self._drain)
        if self.engine.urgent or self.engine.waiting:
            self._kick.set()

    def _wake(self) -> None:
        self._kick.set()

    def answer_now(self, reply: str, payload: bytes) -> None:
        """Send an answer that needs no record at once, or once the record in flight is acknowledged."""
        self._send_recorded([(reply, payload)])

    def _refuse_now(self, reply: str, payload: bytes) -> None:
        """Send a refusal that says nothing of the state at once, also during an append."""
        self._send_soon([(reply, payload)])

    def _send_recorded(self, messages: list[tuple[str, bytes]]) -> None:
        if self._gate.is_open:
            self._send_soon(messages)
        else:
            self._held += messages

    def _send_soon(self, messages: list[tuple[str, bytes]]) -> None:
        self._now += messages
        if self._sending_now is None:
            self._sending_now = self._loop.create_task(self._send_now())

    async def _send_now(self) -> None:
        try:
            while self._now:
                answers, self._now = self._now, []
                await self._out.send(coalesced(answers, self._out.max_payload_bytes))
        finally:
            self._sending_now = None

    def _stats(self) -> dict[str, Any]:
        """Return what service discovery shows under STATS."""
        engine, state = self.engine, self.engine.state
        return {
            "leader": state.leader,
            "epoch": state.epoch,
            "ledger": state.seq,
            "queued": View(engine).queued(),
            "live_jobs": state.live,
            "records": self.records,
            "follower": self.follower.figures(state.seq),
            "counters": {
                **self.intake.counters,
                "stuck": self.stalled.told,
                "dropped": self.intake.counters["dropped"] + self.stalled.dropped,
            },
        }

    # ---------------------------------------------------------------------------------------------- loop

    async def loop(self) -> None:
        """Write one record after the other, until one resigns; what arrives during an append goes into the next record.

        Raises `Deposed`, `Displaced`, and `LedgerOlder` once workers know of later terms than the ledger.
        """
        engine, view, ledger = self.engine, View(self.engine), self._scheduler.ledger
        while True:
            await self._until_due()
            if self._submits_delayed >= SHARE_AFTER and view.is_idle:
                await self._wait_for_submit()
            now = self.mono_ms()
            if not self._due(now):
                continue
            has_submit = view.has_submit
            after, foresees = engine.state.seq, time.monotonic() - self._scheduler.displaced_s >= UNFORESEEN_S
            payload = self._build(now, folds=foresees)
            self._gate.shut()
            began_s = time.monotonic()
            self._scheduler.ledger_world.after_write(self._prepare_outputs)
            names = engine.names_snapshot
            seq = await ledger.append_record(engine.state, after, engine.rid, payload, names_snapshot=names)
            self._append_s += time.monotonic() - began_s
            if seq != after + 1:
                self._scheduler.displaced_s = time.monotonic()
            self._sent_ms = now
            self.stalled.release()
            self.records += 1
            if not has_submit:
                self._submits_delayed = self._submits_delayed + 1 if view.has_submit else 0
            if self._failed is not None:
                raise self._failed
            outputs = engine.commit(seq, self.mono_ms())
            self.counts.follow(outputs)
            self._open_gate(seq)
            if why := engine.behind(self.mono_ms()):
                await ledger.mark_behind(engine.state, engine.rid + 1, why)
                raise LedgerOlder(why)
            await self._send_outputs(outputs)
            if len(outputs.events) >= LONG_RECORD:
                await asyncio.sleep(0)
            if not engine.state.leader:
                self.resigned.set()
                return

    def _prepare_outputs(self) -> None:
        """Make what is sent for the record in flight, while the append is under way."""
        try:
            outputs = self.engine.prepare_outputs(self.mono_ms())
            if outputs is not None:
                self._messages = self._messages_of(outputs)
        except Exception as raised:  # its tables are half changed: the term ends, once the append is over
            self._failed = raised

    def _open_gate(self, seq: int) -> None:
        state = self.engine.state
        self.recorded_seq = seq
        self._recorded_snapshots = state.snapshot, state.snapshot_before
        self._gate.open()
        if self._held:
            held, self._held = self._held, []
            self._send_soon(held)

    def _build(self, now: int, *, folds: bool) -> bytes:
        if unheard_ms := self.hearing.take_unheard(now):
            self.engine.unheard(unheard_ms, now)
        payload = self.engine.build(self._time_ms(now), now, folds=folds)
        self._built_ms = now
        for told in self.engine.containment.take_unlogged():
            log.error("the scheduler failed, and goes on without it: %s %s\n%s", told.where, told.what, told.trace)
        return payload

    def _messages_of(self, outputs: Outputs) -> list[Message]:
        """Return the messages of the record folded last; keep what the durable queue's reader is told of it."""

        def keep(mark: str, answer: bytes) -> bool:
            self._marked.append((mark, answer))
            return True

        return messages_of(outputs, self._subjects, self.engine.state.seq, keep, self._out.max_payload_bytes)

    async def _send_outputs(self, outputs: Outputs) -> None:
        """Send the outputs of a record that is acknowledged, the workers' frames first."""
        messages, self._messages = self._messages, None
        if messages is None:  # the record was not folded before it was stored
            messages = self._messages_of(outputs)
        # before anything else runs: a request that is refused is not to be purged without its dead letter
        marked, self._marked = self._marked, []
        for mark, answer in marked:
            self.queue_reader.decided(mark, answer)
        if messages:
            await self._out.send(messages)
            await self._out.written()  # else the next record may be built first
        self.queue_reader.made_room()
        self.schedules.follow()
        for event in outputs.fleet:
            log.log(logging.WARNING if event.what in WARNED else logging.INFO, "%s", event.words)
        self.gc_schedule.count_events(len(outputs.events))

    def count_failed_task(self, name: str, raised: Exception) -> None:
        self.engine.containment.note_task(name, raised, self.time_ms())

    def resign(self) -> None:
        self.engine.offer(Resign())
        self._wake()

    def idle_until_s(self) -> float:
        """Return until when, in monotonic seconds, only heartbeats follow if nothing arrives; a time past if busy."""
        if not self._scheduler.standings.lately():
            return 0.0
        left_ms = View(self.engine).idle_until_ms - self.time_ms()
        return (monotonic_ms() + left_ms) / 1000 - self._config.heartbeat_s

    def slept(self, seconds: float) -> None:
        """Note that a simulation skipped this time, in which nothing would have happened; it does not count as silence.

        One heartbeat is written at once, for readers that go by the time of the last record.
        """
        self._skipped_ms += int(seconds * 1000)
        self._built_ms -= int(self._config.heartbeat_s * 1000)
        self._kick.set()
        self._scheduler.standings.slept(seconds)
        self.gc_schedule.slept(seconds)

    def _time_ms(self, now: int) -> int:
        """Return the ledger time: that of the epoch record, plus the monotonic time since that was built."""
        return self._began_time_ms + now + self._skipped_ms - self._began_ms

    def _due(self, now: int) -> bool:
        engine = self.engine
        if engine.urgent:
            return True
        since = now - self._built_ms
        if since >= self._config.heartbeat_s * 1000:
            return True
        if engine.waiting and since >= self._config.renewal_append_s * 1000:
            return True
        return min(engine.next_timer_ms, engine.planner.moment_ms()) <= self._time_ms(now)

    async def _until_due(self) -> None:
        """Sleep until an event arrives, or a timer or the heartbeat is due."""
        if self.engine.urgent:
            self._kick.clear()
            return
        now = self.mono_ms()
        wait_ms = self._built_ms + self._config.heartbeat_s * 1000 - now
        if self.engine.waiting:
            wait_ms = min(wait_ms, self._built_ms + self._config.renewal_append_s * 1000 - now)
        next_ms = min(self.engine.next_timer_ms, self.engine.planner.moment_ms())
        wait_ms = min(wait_ms, next_ms - self._time_ms(now))
        if wait_ms <= 0:
            return
        self._kick.clear()
        handle = self._loop.call_later(wait_ms / 1000, self._kick.set)
        try:
            await self._kick.wait()
        finally:
            handle.cancel()

    async def _wait_for_submit(self) -> None:
        """Let the next record wait up to `SHARE_WAIT_S` for a submit.

        A caller that submits one job after the other would otherwise wait, each time, for the append about its former
        job. After a wait without a submit no record waits for a while, unless a submit comes during the append
        (bench/TRIED.md#a-record-waits-for-a-submit).
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHARE_WAIT_S):
                while not View(self.engine).has_submit:
                    self._kick.clear()
                    await self._kick.wait()

    # --------------------------------------------------------------------------- what questions need to know

    def is_fresh(self) -> bool:
        """Return whether the last acknowledged append is so recent that no other scheduler can lead yet."""
        return self.mono_ms() - self._sent_ms < self._fresh_s * 1000

    @property
    def _fresh_s(self) -> float:
        return self._config.takeover_s - 1

    def mono_ms(self) -> int:
        """Return this process's monotonic time in ms, without the time that a simulation skipped."""
        return monotonic_ms() - self._skipped_ms

    def time_ms(self) -> int:
        """Return the ledger time now."""
        return self._time_ms(self.mono_ms())

    def send_soon(self, messages: list[Message]) -> None:
        """Send messages soon, without waiting until they are sent."""
        self._send_recorded([(subject, payload) for subject, payload, _ in messages])

    def add_figures(self, fleet: FleetAnswer) -> FleetAnswer:
        """Add to the answer `fleet` how the term, the ledger and the queue do."""
        fleet.feature_level, fleet.time_ms = self.engine.state.level, int(time.time() * 1000)
        fleet.schedulers = self._scheduler.standings.rows()
        fleet.contained = ContainedFailures(**self.engine.containment.figures(self.time_ms()))
        fleet.follower = self.follower.figures(self.engine.state.seq)
        fleet.appends = AppendFigures(records=self.records, seconds=round(self._append_s, 6))
        fleet.ledger_copies = self._scheduler.copies.figures()
        fleet.request_queue = self.queue_reader.figures()
        fleet.rates = self.intake.rates.figures() or None
        fleet.buckets = self._scheduler.tenant_buckets.figures()
        return fleet

    # ------------------------------------------------------------------------------------------- reports

    async def report(self) -> None:
        """Publish, forever, the fleet frame for observers twice a second; it contains no tenant's jobs.

        Every 2 s comes the frame for operators, which does. Also collects garbage when that is due.
        """
        frames, details, told = FleetFrames(self.engine), FleetDetails(self.engine, self.counts), False
        for number in count(1):
            due_ms = self.mono_ms() + int(FLEET_FRAME_S * 1000)
            await asyncio.sleep(FLEET_FRAME_S)
            if (late_s := (self.mono_ms() - due_ms) / 1000) > PAUSE_S:
                log.warning(
                    "this leader did not run for %.0f s: it was stopped, or its machine was paused or too busy", late_s
                )
            self.gc_schedule.collect_if_calm(len(self.engine.state.jobs))
            for _ in frames.catch_up():
                await asyncio.sleep(0)
            frame, bytes_max = frames.frame(self._scheduler.copies.figures()), self._out.max_payload_bytes
            if len(frame) > bytes_max and not told:
                said = "observers get no fleet frame: it has %d bytes, and the nats-server takes at most %d"
                log.warning(f"{said}; raise its max_payload", len(frame), bytes_max)
                told = True
            await self._gate.recorded()
            await self._out.send([(self._subjects.fleet_frame, frame, "")])
            if number % DETAIL_EVERY == 0:
                for _ in details.catch_up():
                    await asyncio.sleep(0)
                self.counts.idle.look(self.engine, self.engine.built_ms)
                if number % USE_EVERY == 0:
                    use = {"told": told_now(self.engine, details.jobs, self.counts.calls)}
                    self.follower.ask(Question("used", self.engine.state.seq, None, use), lambda _: None)
                detail = details.frame()
                await self._gate.recorded()
                await self._out.send([(self._subjects.fleet_detail, detail, "")])

    async def snapshot(self) -> None:
        """Have a follower process write a snapshot every `snapshot_records` records, and name it in the ledger.

        Then older records and snapshots are purged (`_shorten`). Returns at once if there is no command for that
        process.
        """
        scheduler, state = self._scheduler, self.engine.state
        if scheduler.snapshot_command is None:
            return
        taken: SnapshotTaken | None = None
        while True:
            await asyncio.sleep(SNAPSHOT_LOOK_S)
            try:
                await self._shorten()
            except BusError as error:
                log.warning("old records of the ledger cannot be deleted now: %s", error)
            newest, _ = self._recorded_snapshots
            if taken is not None and taken.is_refused:
                taken = None
                await asyncio.sleep(SNAPSHOT_RETRY_S)
            elif taken is not None and (newest is None or newest[0] != taken.name):
                continue  # the record that names it is not stored yet
            last = newest[1] if newest is not None else 0
            if state.seq - last >= scheduler.snapshot_records:
                try:
                    taken = await take_snapshot(scheduler.snapshot_command)
                except SnapshotsGone:
                    taken = await self._snapshot_of_memory()
                if taken is None:
                    await asyncio.sleep(SNAPSHOT_RETRY_S)
                else:
                    self.engine.offer(taken)
                    self._wake()

    async def _shorten(self) -> None:
        """Delete the records before the last snapshot but one, and the snapshots before it. Raises `BusError`.

        Only snapshots that acknowledged records name count: a record in flight may wait for the room that this makes.
        Records that the follower of the ledger may read again stay, until the ledger is half full or takes no record.
        """
        ledger, (newest, before) = self._scheduler.ledger, self._recorded_snapshots
        if newest is None or before is None:
            return
        through, kept_from = before[1], self.follower.position.kept_from
        if kept_from < through and not ledger.appending.told and not await ledger.is_half_full():
            through = kept_from
        if through > self._purged_through:
            await ledger.purge_below(through + 1)
            self._purged_through = through
            log.info("snapshot %s counts; the ledger begins behind record %d", newest[0], through)
        if newest[0] != self._purged_but:
            await self._scheduler.snapshots.purge_older(newest[0], before[0])
            self._purged_but = newest[0]

    async def _snapshot_of_memory(self) -> SnapshotTaken | None:
        """Write a snapshot in this process, although that holds up the leader; None if it failed, which is logged.

        Needed when all snapshots were deleted: the purged records are then only in memory, and without a snapshot the
        next leader could not read the ledger.
        """
        log.error("the snapshots of the ledger were deleted: the leader writes a new snapshot of its state")
        snapshots = self._scheduler.snapshots
        try:
            await snapshots.ensure()
            return SnapshotTaken(*await snapshots.write(self.engine.state, self._gate))
        except (BadSnapshot, BusError) as error:
            log.warning("no snapshot of the ledger was written: %s", error)
            return None
