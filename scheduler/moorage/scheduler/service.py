"""The loop: events in, record out, acknowledged, commands out. A scheduler stands by until the ledger falls silent,
then leads until somebody newer does.

Crash-only: when a record's fate is that of another reign, everything in memory is dropped and folded again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError
from moorage.bus.jetstream import JetStream
from moorage.bus.transport import Delivery
from moorage.scheduler.core import views
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Ask, Operate, Order, Resign, SnapshotTaken
from moorage.scheduler.core.outputs import Message
from moorage.scheduler.core.state import State
from moorage.scheduler.dead_letters import DeadLetters
from moorage.scheduler.discovery import Discovery
from moorage.scheduler.foresight import Foresight
from moorage.scheduler.history import History
from moorage.scheduler.history_reader import HistoryReader, check_page
from moorage.scheduler.inspection import Inspection, device_drift
from moorage.scheduler.intake import Intake
from moorage.scheduler.ledger import Deposed, Ledger, LedgerBroken, LedgerGap, LedgerOlder
from moorage.scheduler.logs import LogRelay, logs_asked
from moorage.scheduler.outgoing import coalesced, messages_of
from moorage.scheduler.queue_reader import QueueReader
from moorage.scheduler.recording import RecordedEngine, Recorder
from moorage.scheduler.settings import RECORDS_BETWEEN
from moorage.scheduler.snapshots import FOLLOWER_TIMEOUT_S, Snapshots, recover
from moorage.scheduler.standing import Standings
from moorage.schemas.codec import encode
from moorage.schemas.errors import Problem, Refused, refuse
from moorage.schemas.frames import Answer, FleetFrame, Looked, RollCall
from moorage.schemas.operate import ACTS, FeatureLevelAct, ReleaseAct, act_of, drain_of
from moorage.schemas.subjects import Subjects

log = logging.getLogger("moorage.scheduler")

STANDBY_LOOK_S: Final = 0.2
#: a look that came while no server led the ledger's stream is never answered, and asked again after this
STANDBY_PATIENCE_S: Final = 2.0
#: holes in the ledger met in a row, each with the newest snapshot read again, before it counts as broken
GAPS_MAX: Final = 5
FLEET_FRAME_S: Final = 0.5
RESIGN_S: Final = 3.0
SNAPSHOT_LOOK_S: Final = 5.0
SNAPSHOT_RETRY_S: Final = 60.0
#: jobs that one record has changed beyond which making the next one waits a turn: some 5 ms
LONG_RECORD: Final = 256
#: jobs that end leave nothing for the collector: so it looks seldom, and at few objects at once
GC_THRESHOLDS: Final = (100_000, 50, 100)


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Scheduler:
    """One scheduler process: `world` reaches the users, `ledger_world` the schedulers' own account."""

    def __init__(
        self,
        world: Connection,
        ledger_world: Connection,
        *,
        config: Config | None = None,
        subjects: Subjects | None = None,
        replicas: int = 1,
        name: str = "",
        snapshot_command: list[str] | None = None,
        snapshot_records: int = RECORDS_BETWEEN,
        forks: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """`snapshot_command` starts the follower that writes a snapshot; None writes none. `forks` says that this
        process may copy itself to answer what would happen; without it nobody is told when a job starts."""
        self.forks = forks
        self.recorder = recorder
        self.snapshot_command = snapshot_command
        self.snapshot_records = snapshot_records
        self.config = config or Config()
        self.subjects = subjects or Subjects()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self._world = world
        self._replicas = replicas
        self._leader = secrets.randbits(62)
        self._js = JetStream(world)
        self.ledger = Ledger(JetStream(ledger_world), self.subjects, self._leader, replicas=replicas)
        self.snapshots = Snapshots(JetStream(ledger_world), self.subjects, replicas)
        self.standings = Standings(world, self.subjects, self.name)
        self.reign: Reign | None = None
        self.leading = asyncio.Event()
        self._folded = 0  # the ledger record that a standby has come to

    async def run(self) -> None:
        """Stand by and lead until `resign`, or cancellation. Raises `LedgerBroken` when an operator must look."""
        saying = asyncio.create_task(self.standings.say(self._stands))
        try:
            await self._run()
        finally:
            saying.cancel()

    def _stands(self) -> tuple[int, bool]:
        reign = self.reign
        return (self._folded, False) if reign is None else (reign.engine.state.seq, self.leading.is_set())

    async def _run(self) -> None:
        await self.ledger.ensure()
        await QueueReader.ensure(self._js, self.subjects, self._replicas)
        await DeadLetters.ensure(self._js, self.subjects, self._replicas, self.config.dead_letters_keep)
        await self.snapshots.ensure()
        state = await recover(self.ledger, self.snapshots)
        gaps = 0
        while True:
            try:
                await self._stand_by(state)
                gaps = 0
            except LedgerGap as gap:  # it was slower than the leader's snapshots: the newest holds what it missed
                gaps += 1
                if gaps > GAPS_MAX:
                    raise
                log.warning("%s", gap)
                await asyncio.sleep(STANDBY_LOOK_S)
                state = await recover(self.ledger, self.snapshots)
                continue
            if state.behind:
                raise LedgerOlder(state.behind)
            try:
                if await self._lead(state):
                    return
            except Deposed as deposed:  # before it led: somebody else took over first
                log.warning("deposed: %s", deposed)
            except ExceptionGroup as group:
                if (broken := group.subgroup(LedgerBroken)) is not None:
                    raise broken.exceptions[0] from None
                if group.split(Deposed)[1] is not None:
                    raise
                log.warning("deposed: %s", group.exceptions[0])
            finally:
                self.leading.clear()
                self.reign = None
            state = await recover(self.ledger, self.snapshots)

    async def _stand_by(self, state: State) -> None:
        """Fold the ledger until its leader resigned, or was silent for the takeover time and a little by chance."""
        began, records = time.monotonic(), await self.ledger.follow(state)
        self._folded = state.seq
        log.info("folded %d records up to %d in %.2f s", records, state.seq, time.monotonic() - began)
        if not state.leader:
            return
        # how long it has been silent already is told by wall clocks, a hint alone: a needless takeover is harmless
        silence_s = self.config.takeover_s + random.uniform(0, self.config.takeover_s / 8)
        heard = time.monotonic() - max(0.0, await self.ledger.silent_for(state))
        while time.monotonic() - heard < silence_s:
            await asyncio.sleep(STANDBY_LOOK_S)
            try:
                if await self.ledger.follow(state, STANDBY_PATIENCE_S):
                    heard = time.monotonic()
                    if not state.leader:
                        return
                self._folded = state.seq
            except BusError as error:
                log.warning("the ledger cannot be read now: %s", error)
                # It counts from the last record that was read, yet not before it was readable for half of the time:
                # its leader needs a while, too, to find that its append can be stored again.
                heard = max(heard, time.monotonic() - silence_s / 2)

    async def resign(self) -> None:
        """Stop leading with a last record that says so, so that nobody waits for silence; at most a few seconds."""
        reign = self.reign
        if reign is not None:
            reign.resign()
            try:
                async with asyncio.timeout(RESIGN_S):
                    await reign.resigned.wait()
            except TimeoutError:
                log.warning("the ledger did not take the resignation: the next leader waits for silence")

    async def _lead(self, state: State) -> bool:
        """Lead until deposed (raises `Deposed`) or resigned (returns True)."""
        began_ms = monotonic_ms()
        wall_s = time.time()
        await self.ledger.take_over(state, self.name, secrets.token_hex(8), int(wall_s * 1000), wall_s)
        reign = self.reign = Reign(self, state, began_ms)
        log.info("leading epoch %d at ledger record %d", state.epoch, state.seq)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        async with asyncio.TaskGroup() as group:
            await reign.open()
            try:
                work = (
                    reign.queue_reader.run(),
                    reign.history.run(),
                    reign.inspection.run(),
                    reign.foresight.run(),
                    reign.report(),
                    reign.snapshot(),
                )
                beside = [group.create_task(each) for each in work]
                self.leading.set()
                await reign.loop()
                for task in beside:
                    task.cancel()
            finally:
                await reign.close()
        return True

    @property
    def replicas(self) -> int:
        return self._replicas

    @property
    def world(self) -> Connection:
        return self._world

    @property
    def world_js(self) -> JetStream:
        return self._js

    @property
    def leader(self) -> int:
        return self._leader


class Reign:
    """One epoch of leading: the engine, and the I/O around it."""

    def __init__(self, scheduler: Scheduler, state: State, began_ms: int) -> None:
        self._scheduler = scheduler
        self._world = scheduler.world
        self._subjects = scheduler.subjects
        self._config = scheduler.config
        self._began_ms = began_ms
        self._began_time_ms = state.time_ms
        given = (state, scheduler.config, scheduler.subjects, scheduler.leader, monotonic_ms())
        recorder = scheduler.recorder
        self.engine = Engine(*given) if recorder is None else RecordedEngine(*given, recorder)
        self.intake = Intake(self.engine, scheduler.subjects, self._answer_now, self._read, self._admin)
        self.queue_reader = QueueReader(scheduler.world_js, scheduler.subjects, self.engine, self._wake)
        self.history = History(scheduler.world_js, scheduler.subjects, self.engine, scheduler.replicas, self._wake)
        self.history_reader = HistoryReader(scheduler.world_js, scheduler.subjects, self.engine, self._answer_read)
        self.relay = LogRelay(self._world, self._subjects, self.engine, self.history_reader, self._answer_now)
        self.inspection = Inspection(scheduler.world, scheduler.subjects, self._to_inspect, state.epoch)
        self.foresight = Foresight(
            self.engine,
            lambda: self._time_ms(monotonic_ms()),
            self._ask_explain,
            self._say,
            self._answer_plain,
            forks=scheduler.forks,
        )
        self._kick = asyncio.Event()
        self._draining = False
        self._subscriptions: list[Any] = []
        self._now: list[tuple[str, bytes]] = []
        self._sending_now: asyncio.Task[None] | None = None
        self._sent_ms = monotonic_ms()  # when the newest acknowledged append was sent
        self._built_ms = 0
        self.records = 0
        self.resigned = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    # ---------------------------------------------------------------------------------------- in and out

    async def open(self) -> None:
        """Subscribe, then call the roll: workers answer with hello and a renewal."""
        for subject in (
            self._subjects.api_all,
            self._subjects.admin_all,
            self._subjects.worker_join_all,
            self._subjects.worker_renew_all,
            self._subjects.worker_fact_all,
            self._subjects.hello_all,
            self._subjects.load_all,
        ):
            self._subscriptions.append(await self._world.subscribe(subject, self._on_delivery))
        looked = self._subjects.worker_looked_all
        self._subscriptions.append(await self._world.subscribe(looked, self.inspection.on_looked))
        self._subscriptions.append(await self._world.subscribe(self._subjects.request_all, self.queue_reader.hint))
        self._subscriptions.append(await self._scheduler.standings.listen())
        await self._world.send([(self._subjects.roll_call, encode(RollCall(self.engine.state.epoch)), "")])
        state, leader = self.engine.state, f"{self._scheduler.leader:x}-{self.engine.state.epoch}"
        discovery = Discovery(self._subjects, leader, state.leader, self._answer_now, self._facts)
        self._subscriptions += await discovery.open(self._world)

    async def close(self) -> None:
        self.foresight.close()
        await self.relay.close()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        await self.history_reader.close()
        await self.queue_reader.letters.close()

    def _on_delivery(self, delivery: Delivery) -> None:
        self.intake.put(delivery)
        if not self._draining:
            self._draining = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Decode what came in this turn of the loop, also while an append is in flight."""
        self._draining = False
        self.intake.drain(monotonic_ms())
        if self.engine.urgent or self.engine.waiting:
            self._kick.set()

    def _wake(self) -> None:
        self._kick.set()

    def _answer_now(self, reply: str, payload: bytes) -> None:
        """An answer that needs no record (a refusal, a question) leaves at once, also while an append is in flight."""
        self._now.append((reply, payload))
        if self._sending_now is None:
            self._sending_now = self._loop.create_task(self._send_now())

    async def _send_now(self) -> None:
        try:
            while self._now:
                answers, self._now = self._now, []
                await self._world.send(coalesced(answers))
        finally:
            self._sending_now = None

    def _facts(self) -> dict[str, Any]:
        """What STATS of the discovery shows."""
        engine, state = self.engine, self.engine.state
        return {
            "leader": state.leader,
            "epoch": state.epoch,
            "ledger": state.seq,
            "queued": engine.queue.size,
            "live_jobs": state.live,
            "records": self.records,
            "history": self.history.figures(),
            "counters": dict(self.intake.counters),
        }

    # ---------------------------------------------------------------------------------------------- loop

    async def loop(self) -> None:
        """One append in flight; what came meanwhile makes the next record."""
        engine, ledger = self.engine, self._scheduler.ledger
        while True:
            await self._until_due()
            now = monotonic_ms()
            if not self._due(now):
                continue
            payload = engine.build(self._time_ms(now), now)
            self._built_ms = now
            seq = await ledger.append_record(engine.state, engine.rid, payload, names_snapshot=engine.names_snapshot)
            self._sent_ms = now
            self.records += 1
            outputs = engine.commit(seq, monotonic_ms())
            if engine.sessions.ahead and (why := engine.behind(monotonic_ms())):
                await ledger.mark_behind(engine.state, engine.rid + 1, why)
                raise LedgerOlder(why)
            self.history.take(outputs)
            self.queue_reader.made_room()
            decided = self.queue_reader.decided
            await self._world.send(messages_of(outputs, self._subjects, seq, decided))
            if len(outputs.events) >= LONG_RECORD:
                await asyncio.sleep(0)  # a turn for the others: what was sent leaves, and what came is read
            if not engine.state.leader:
                self.resigned.set()
                return

    def resign(self) -> None:
        self.engine.offer(Resign())
        self._wake()

    def _time_ms(self, now: int) -> int:
        """Ledger time: the epoch record's time plus this leader's own monotonic time since it was built."""
        return self._began_time_ms + now - self._began_ms

    def _due(self, now: int) -> bool:
        engine = self.engine
        if engine.urgent:
            return True
        since = now - self._built_ms
        if since >= self._config.heartbeat_s * 1000:
            return True
        if engine.waiting and since >= self._config.renewal_append_s * 1000:
            return True
        return engine.next_timer_ms <= self._time_ms(now)

    async def _until_due(self) -> None:
        """Sleep until something came, a timer is due or the heartbeat is."""
        if self.engine.urgent:
            self._kick.clear()
            return
        now = monotonic_ms()
        wait_ms = self._built_ms + self._config.heartbeat_s * 1000 - now
        if self.engine.waiting:
            wait_ms = min(wait_ms, self._built_ms + self._config.renewal_append_s * 1000 - now)
        wait_ms = min(wait_ms, self.engine.next_timer_ms - self._time_ms(now))
        if wait_ms <= 0:
            return
        self._kick.clear()
        handle = self._loop.call_later(wait_ms / 1000, self._kick.set)
        try:
            await self._kick.wait()
        finally:
            handle.cancel()

    # --------------------------------------------------------------------------------------------- reads

    def _fresh(self) -> bool:
        """Whether the newest acknowledged append was sent so lately that nobody else can lead yet."""
        return monotonic_ms() - self._sent_ms < (self._config.takeover_s - 1) * 1000

    def _read(self, tenant: str, verb: str, arguments: dict[str, Any], reply: str, json: bool) -> None:
        engine = self.engine
        if verb == "logs":
            self._logs(tenant, arguments, reply, json)
            return
        if verb == "plan":
            # of a reign that is proven only: a plan of an old leader would be a plan of another ledger
            self._ask(verb, lambda: self._plan(tenant, arguments, reply, json), reply, json)
            return
        job = arguments.get("job")
        answer: Callable[[], Any]
        if verb == "ls":
            answer = lambda: views.ls(engine, tenant, arguments)  # noqa: E731
        elif verb in ("show", "explain", "history"):
            if not isinstance(job, str):
                raise refuse("invalid-argument", f"{verb} needs a job id", field="$.job", found=job)
            if verb == "show":
                follow = arguments.get("events") != "tenant"
                answer = lambda: self.history_reader.show(tenant, job, reply, json, follow=follow)  # noqa: E731
            elif verb == "history":
                check_page(arguments)
                answer = lambda: self.history_reader.history(tenant, arguments, reply, json)  # noqa: E731
            else:
                answer = lambda: self.foresight.explain(tenant, job, reply, json)  # noqa: E731
            if engine.state.job(tenant, job) is None:
                # "unknown" only as of a record acknowledged after the question came
                engine.offer(Ask(lambda: self._framed(verb, answer()), reply, json))
                return
        else:
            raise refuse(
                "unknown-verb",
                f"{verb} is not served by this release",
                found=verb,
                allowed="show, ls, explain, plan, history, logs",
            )
        self._ask(verb, answer, reply, json)

    def _logs(self, tenant: str, arguments: dict[str, Any], reply: str, json: bool) -> None:
        """Asked of the worker that keeps it, in a task of its own."""
        asked = logs_asked(arguments)
        if not reply:
            return

        def begin() -> None:
            self.relay.ask(tenant, asked, reply, json)

        if self._fresh() and self.engine.state.job(tenant, asked.job) is not None:
            begin()
        else:  # after a record that is acknowledged from now on, and without an answer of its own
            self.engine.offer(Ask(begin, "", json))

    def _ask(self, verb: str, answer: Callable[[], Any], reply: str, json: bool) -> None:
        if self._fresh():
            self._answer_read(verb, answer(), reply, json)
        else:
            self.engine.offer(Ask(lambda: self._framed(verb, answer()), reply, json))

    def _plan(self, tenant: str, arguments: dict[str, Any], reply: str, json: bool) -> Problem | None:
        try:
            self.foresight.plan(tenant, arguments, reply, json)
        except Refused as refused:
            return refused.problem
        return None

    def _answer_plain(self, reply: str, frame: Any, json: bool) -> None:
        if reply:
            self._answer_now(reply, encode(frame, json=json))

    def _ask_explain(self, answer: Callable[[], Any], reply: str, json: bool) -> None:
        self._ask("explain", answer, reply, json)

    def _say(self, messages: list[Message]) -> None:
        """Messages that nobody waits for."""
        self._now += [(subject, payload) for subject, payload, _ in messages]
        if self._sending_now is None:
            self._sending_now = self._loop.create_task(self._send_now())

    def _answer_read(self, verb: str, data: Any, reply: str, json: bool) -> None:
        if data is not None and reply:
            self._answer_now(reply, encode(self._framed(verb, data), json=json))

    def _framed(self, verb: str, data: Any) -> Any:
        return Answer(verb, self.engine.state.seq, data) if isinstance(data, dict) else data

    def _admin(self, verb: str, arguments: dict[str, Any], reply: str, json: bool) -> None:
        engine = self.engine
        if verb == "fleet":
            more = {
                "history": self.history.figures(),
                "feature_level": engine.state.level,
                "schedulers": self._scheduler.standings.rows(),
            }
            self._ask(verb, lambda: views.fleet(engine, monotonic_ms()) | more, reply, json)
        elif verb == "audit":
            self._audit(reply, json)
        elif verb == "dlq":
            self.queue_reader.letters.ask(arguments, self._answer_now, reply, json)
        elif verb == "tenants":
            self._ask(verb, lambda: views.tenants(engine), reply, json)
        elif verb in ACTS:
            act = act_of(verb, arguments)
            if isinstance(act, FeatureLevelAct):
                engine.orders.announced = {said.scheduler: said.level for said in self._scheduler.standings.lately()}
            if isinstance(act, ReleaseAct) and act.worker is not None:
                engine.offer(Operate(verb, act.worker, act.by or "operator", reply, json, slots=act.slots or ()))
            else:
                engine.offer(Order(verb, act, reply, json))
        elif verb == "drain":
            drain = drain_of(arguments)
            engine.offer(Operate(verb, drain.worker, drain.by or "operator", reply, json, drain=drain))
        elif verb in ("cordon", "uncordon"):
            worker = arguments.get("worker")
            if not isinstance(worker, str):
                raise refuse("invalid-argument", f"{verb} needs a worker id", field="$.worker", found=worker)
            engine.offer(Operate(verb, worker, str(arguments.get("by") or "operator")[:64], reply, json))
        else:
            raise refuse("unknown-verb", f"{verb} is not served by this release", found=verb)

    def _to_inspect(self) -> set[str]:
        """The workers that can be asked to look at their devices."""
        return {host.worker.id for host in self.engine.fleet.hosts.values() if host.heard and host.worker.session}

    def _audit(self, reply: str, json: bool) -> None:
        """The ledger against the workers' last renewals, and their devices against their leases as they find them."""

        def told(answers: dict[str, Looked], silent: list[str]) -> None:
            def answer() -> dict[str, Any]:
                data = views.audit(self.engine, self.engine.reports)
                data["drift"] += device_drift(answers)
                left_out = sum(frame.more for frame in answers.values())
                return {**data, "looked": len(answers), "not_looked": silent, "left_out": left_out}

            self._ask("audit", answer, reply, json)

        self.inspection.ask(told)

    # ------------------------------------------------------------------------------------------- reports

    async def report(self) -> None:
        """The fleet frame for observers, twice a second: no tenant's job in it."""
        while True:
            await asyncio.sleep(FLEET_FRAME_S)
            await self._world.send([(self._subjects.fleet_frame, encode(self.fleet_frame()), "")])

    async def snapshot(self) -> None:
        """Have a follower write a snapshot now and then, name it, and drop what lies below the last but one."""
        scheduler, state = self._scheduler, self.engine.state
        if scheduler.snapshot_command is None:
            return
        purged = state.snapshot
        while True:
            await asyncio.sleep(SNAPSHOT_LOOK_S)
            try:
                if state.snapshot != purged and state.snapshot is not None and state.snapshot_before is not None:
                    await scheduler.ledger.purge_below(state.snapshot_before[1] + 1)
                    await scheduler.snapshots.purge_all_but({state.snapshot[0], state.snapshot_before[0]})
                    purged = state.snapshot
                    log.info("snapshot %s counts; the ledger begins behind %s", purged[0], state.snapshot_before[0])
            except BusError as error:
                log.warning("the ledger cannot be shortened now: %s", error)
            last = state.snapshot[1] if state.snapshot is not None else 0
            if state.seq - last >= scheduler.snapshot_records:
                taken = await take_snapshot(scheduler.snapshot_command)
                if taken is None:
                    await asyncio.sleep(SNAPSHOT_RETRY_S)
                else:
                    self.engine.offer(taken)
                    self._wake()

    def fleet_frame(self) -> FleetFrame:
        engine = self.engine
        workers = [
            {
                "worker": worker.id,
                "state": views.worker_state(worker, engine.fleet.hosts.get(worker.num)),
                "cells": views.cells(engine.fleet.hosts.get(worker.num), len(worker.hello.get("gpu_pool", ()))),
                "simulated": bool(worker.hello.get("simulated", False)),
            }
            for worker in engine.state.worker_by_num
        ]
        running = sum(len(worker.members) for worker in engine.state.worker_by_num)
        return FleetFrame(
            engine.state.epoch, engine.state.seq, workers=workers, queued=engine.queue.size, running=running
        )


async def take_snapshot(command: list[str]) -> SnapshotTaken | None:
    """Run the follower; None when it failed (its own words are in the log), and nothing was named."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(FOLLOWER_TIMEOUT_S):
            out, err = await process.communicate()
    except BaseException as error:
        process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            log.warning("the snapshot took over %g s and was given up", FOLLOWER_TIMEOUT_S)
            return None
        raise
    words = out.decode().split()
    if process.returncode != 0 or len(words) != 3:
        log.warning("no snapshot: %s", err.decode(errors="replace").strip()[-500:])
        return None
    return SnapshotTaken(words[0], int(words[1]), words[2])
