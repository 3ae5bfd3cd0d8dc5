"""A driver for the pure core: owns an engine, drives honest workers, and checks every promise after every record.

`Driving.tick` builds a record, folds it (the engine) and folds its bytes again into a second state (the standby), then
validates both, the fleet's soft view and the workers' own pools. Times are milliseconds; ledger time and the leader's
monotonic time are one clock here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Final, Self

import msgspec

from moorage.scheduler.answers.counts import Counts
from moorage.scheduler.answers.views import listed
from moorage.scheduler.answers.waiting import explain_job
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.containment import RESERVING
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Batch, Cancel, FromWorker, Order
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import Record, decode_record, encode_record
from moorage.scheduler.core.ledger.records import RECORD_BYTES_MAX
from moorage.scheduler.core.ledger.state import Attempt, Job, Replica, State
from moorage.scheduler.core.lifecycle.max_running import most_of
from moorage.scheduler.core.lifecycle.timers import BACKOFF, of_replica
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.core.schedule.plan import Reservation
from moorage.scheduler.follower.usage import Usage
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.scheduler.ledger.invariants import validate
from moorage.scheduler.whatif.child import ask
from moorage.scheduler.whatif.fixes import fixes
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.codec import Decoder, is_json
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Goodbye, Hello, Join, Renew, Report, ReportFrame, ReportKind, Wanted
from moorage.schemas.job import STATES
from moorage.schemas.operate import act_of
from moorage.schemas.ranges import numbers_in, without
from moorage.schemas.service import Turn
from moorage.schemas.subjects import Subjects
from tests.unit.scheduler.honest_worker import Worker, devices

SUBJECTS: Final = Subjects()
#: after how long a job is overdue, by the setting's default
PATIENCE_MS: Final = int(Config().reserve_after * 1000)
H100: Final = "NVIDIA H100 80GB HBM3"
_decode_wanted: Final = Decoder[Wanted](Wanted)
_decode_turn: Final = Decoder[Turn](Turn)


def wire(answer: Any) -> dict[str, Any]:
    """Return an answer as a client has it that reads JSON."""
    assert not isinstance(answer, Problem), answer
    data: dict[str, Any] = msgspec.to_builtins(answer)
    return data


class CheckedEngine(Engine):
    """An engine whose fleet is checked before each pass: that reads what the record has changed so far."""

    def _begins(self, step: str, draft: Draft) -> bool:
        if step == RESERVING:  # a pass has begun, and decides next
            self.fleet.validate()
        return super()._begins(step, draft)


class Driving:
    """One leader at a time over one ledger kept in memory; `records` are the ledger's bytes."""

    #: those of each world that is made, see `tests.ceilings`
    ceilings: Ceilings = CEILINGS

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self.ceilings = type(self).ceilings
        self.now = 1_000_000
        self.records: list[bytes] = []
        self.snapshot: bytes | None = None
        self.workers: dict[str, Worker] = {}
        self.answers: dict[str, Any] = {}
        self.turns = dict[str, Turn]()  # the last one of each member
        self.events: list[dict[str, Any]] = []
        self.wanted: list[Wanted] = []
        self.sizes: list[int] = []
        self._replies = 0
        self._sessions = 0
        self.checks = True
        self.json_workers = False  # whether workers send JSON, else msgpack
        #: why a new job waits, for the answer to its submit
        self.explain_waiting: Callable[[Job], dict[str, Any] | None] | None = None
        self.state = State(self.ceilings)
        self.shadow = State(self.ceilings)
        self.usage = Usage(self.shadow)  # what a follower of the ledger counts
        self.engine: Engine
        self.lead()

    @classmethod
    def with_hosts(cls, *gpus: int, config: Config | None = None, **more: Any) -> Self:
        """One with the hosts `w0`, `w1`, … of so many GPUs each; `more` is the same of all of them, see `worker`."""
        drive = cls(config)
        for number, count in enumerate(gpus):
            drive.worker(f"w{number}", count, **more)
        return drive

    # ------------------------------------------------------------------------------------------- leading

    def lead(self) -> None:
        """A new term, in which nobody counts as heard: the ledger is folded, from the snapshot if there is one."""
        snapshot, ceilings = self.snapshot, self.ceilings
        state = State(ceilings) if snapshot is None else snapshots.load(snapshot, ceilings)
        for seq, payload in enumerate(self.records[state.seq :], state.seq + 1):
            fold(state, decode_record(payload), seq)
        if self.records:
            validate(state)
            assert state.digest == self.shadow.digest
        epoch = Record(
            state.level,
            state.epoch + 1,
            7 + state.epoch,
            0,
            max(self.now, state.time_ms),
            state.digest,
            acts=[acts.Epoch(state.ledger_id or "ledger-1", "me", 0.0)],
        )
        self.store(encode_record(epoch))
        fold(state, epoch, len(self.records))
        self.state = state
        self.engine = self.make_engine(state)
        self.term_counts = Counts(self.engine)

    def make_engine(self, state: State) -> Engine:
        return CheckedEngine(state, self.config, SUBJECTS, 7 + state.epoch, self.now, self._explain)

    def another(self) -> Driving:
        """A new leader over a copy of the state, with the same workers; nothing that it does reaches this one."""
        new = Driving(self.config)
        new.ceilings = self.ceilings
        new.now, new.records, new.snapshot = self.now, list(self.records), snapshots.dump(self.state)
        new.shadow = snapshots.load(new.snapshot, self.ceilings)
        new.usage = Usage(new.shadow)
        new.workers = {name: copy(worker) for name, worker in self.workers.items()}
        new.checks = False
        new.lead()
        return new

    def _explain(self, job: Job) -> dict[str, Any] | None:
        return self.explain_waiting(job) if self.explain_waiting is not None else None

    def take_snapshot(self) -> None:
        """The state as bytes; the next leader begins there."""
        self.snapshot = snapshots.dump(self.state)
        again = snapshots.load(self.snapshot, self.ceilings)
        validate(again)
        assert snapshots.dump(again) == self.snapshot

    def lead_from_snapshot(self) -> None:
        """A new term, whose leader begins with a snapshot of now."""
        self.take_snapshot()
        self.lead()

    @property
    def reservation(self) -> Reservation:
        """The reservation of the last plan, which there is."""
        held = self.engine.planner.verdicts.reservation
        assert held is not None
        return held

    def store(self, payload: bytes) -> int:
        assert len(payload) <= RECORD_BYTES_MAX, f"record of {len(payload)} bytes"
        self.sizes.append(len(payload))
        self.records.append(payload)
        folded = fold(self.shadow, decode_record(payload), len(self.records))
        self.usage.fold(folded)
        self.on_folded(folded)
        return len(self.records)

    def on_folded(self, folded: Folded) -> None:
        """What a follower does with each record besides; some tests have one."""

    def tick(self, ms: int = 1, *, obey: bool = True) -> Outputs:
        """One record; then the workers do as they are told, their reports wait for the next record."""
        self.now += ms
        out = self.record()
        self.term_counts.follow(out)
        if self.checks:
            self.check()
        for reply, payload in out.answers:
            self.answers[reply] = json.loads(payload) if is_json(payload) else msgspec.msgpack.decode(payload)
        self.events += [json.loads(payload) for _, _, payload, _ in out.events]
        self.wanted = [_decode_wanted(payload) for _, payload, _ in out.messages]
        for _, payload, _ in out.turns:
            turn = _decode_turn(payload)
            self.turns[turn.member] = turn
        if obey:
            for frame in self.wanted:
                worker = self.workers[frame.worker]
                if worker.auto:
                    worker.obey(frame)
        return out

    def record(self) -> Outputs:
        """Build a record, store it, and return what is sent then."""
        payload = self.engine.build(self.now, self.now)
        self.engine.prepare_outputs(self.now)
        return self.engine.commit(self.store(payload), self.now)

    def check(self) -> None:
        validate(self.state)
        validate(self.shadow)
        assert self.state.digest == self.shadow.digest
        self.engine.fleet.validate()
        self.check_counters()
        self.check_queue()
        self.check_reservation()
        for worker in self.workers.values():
            worker.validate()

    def check_queue(self) -> None:
        """Who waits stands in the queue once, or in one backoff timer: never lost, never doubled, not while held."""
        engine = self.engine
        queue = engine.queue
        found: dict[int, list[int]] = {}  # the priorities of a job's groups
        for line in queue.groups.values():
            assert list(line.jobs) == sorted(set(line.jobs)), "a job stands twice in a group, or out of order"
            for num in line.jobs:
                found.setdefault(num, []).append(line.priority)
        assert queue.is_empty == (not found), f"the queue says {queue.is_empty}, and has {len(found)} jobs"
        pauses = Counter(what for _, kind, what in engine.timers.rows if kind == BACKOFF)
        self.check_room()
        for job in self.state.jobs.values():
            if job.over:
                assert job.num not in queue.waiting, f"{job.name} is over"
            elif job.num not in engine.timers.overdue:
                self._check_queued(job, found.get(job.num, []), pauses)

    def _check_queued(self, job: Job, places: list[int], pauses: Counter[int]) -> None:
        """A job is in its group if it may place something; each of its replicas that came back waits, or pauses."""
        engine, waiting = self.engine, self.engine.queue.waiting.get(job.num)
        came_back = [row for row in job.rows.values() if STATES[row.state] == "QUEUED"]
        came_back = came_back[:1] if engine.reader.shape_of(job).is_gang else came_back
        pausing = {row.index: pauses[of_replica(job.num, row.index)] for row in came_back}
        due = sorted(index for index, count in pausing.items() if not count)
        assert all(count <= 1 for count in pausing.values()), f"{job.name} waits out {pausing}"
        if waiting is not None:
            most = most_of(job, engine.reader.request_of(job))
            counts = most is not None and (job.size > 1 or job.num in engine.scaling or job.scaled is not None)
            if waiting.pins:
                due = [index for index in due if index in engine.fleet.hosts]
                here = [*numbers_in(without(waiting.fresh, job.fresh))]
                assert {*here} <= {*due}, f"{job.name}: {here} wait, not {due}"
            assert waiting.pins or due == waiting.back, f"{job.name}: {due} wait, not {waiting.back}"
            assert waiting.job is job, f"{job.name}: another row waits"
            assert not counts or waiting.most == most, job.name
            assert waiting.is_full == (waiting.room <= 0), job.name
        may = bool(due or job.fresh) if waiting is None else waiting.may_any
        is_failed = job.num in engine.containment.jobs  # the next record holds it
        is_out = is_failed or job.num in engine.reader.later
        is_in = may and job.hold is None and not job.awaits and not is_out
        assert places == ([engine.reader.priority_of(job)] if is_in else []), f"{job.name} is in {places}, {is_in}"

    def check_room(self) -> None:
        """The waiting room has the live jobs that wait for something, each behind what it waits for."""
        room, jobs, left_out = self.engine.room, self.state.jobs, self.engine.indexing.left_out
        waiting = {num: job for num, job in jobs.items() if job.awaits and job.live}
        waiting = {num: job for num, job in waiting.items() if num in room.jobs or num not in left_out}
        assert room.jobs == {num: job.size for num, job in waiting.items()}
        assert all(num in jobs for num in room.telling), (
            "a job whose end is still to be written for others has left memory"
        )
        behind = {(other, num) for num, job in waiting.items() for other, _ in job.awaits if other}
        known = {(other, num) for other, nums in room._behind.items() for num in nums}
        told = {(num, each) for num, end in room.telling.items() for each in end.behind if each in waiting}
        assert known | told == behind, "a job is not told of an end that it waits for"
        assert not known & told

    def check_reservation(self) -> None:
        """Hosts are reserved only for a job that may start, and for one that was placed in this very record."""
        engine = self.engine
        held = engine.planner.verdicts.reservation
        if held is None or not engine.stale_ledger.may_place(self.now, self.now) or engine.timers.more_are_due():
            return
        job = self.state.jobs[held.num]
        tenant = self.state.tenants[job.tenant]
        is_scaled = job.scaled is not None and job.scaled.since_ms == self.state.time_ms
        if engine.reader.shape_of(job) is not held.shape or is_scaled:
            return  # by what this very record did; the next pass drops it
        states = {STATES[replica.state] for replica in job.replicas}
        assert states & {"QUEUED", "PLACED"}, f"hosts are reserved for {job.name}, which is {states}"
        assert job.hold is None, f"hosts are reserved for {job.name}, which is on hold"
        assert tenant.hold is None, f"hosts are reserved for {job.name}, whose tenant is on hold"
        assert not tenant.gpus_max or held.shape.gpus <= tenant.gpus_max, f"{job.name} is over its tenant's limit"
        if "PLACED" not in states:
            line = engine.queue.group_of(held.priority, held.shape, held.owner)
            assert line is not None, f"{job.name} waits under another priority or shape than its reservation"
            assert held.num in line.jobs

    def check_counters(self) -> None:
        """The soft view's sums are those of the ledger's attempts: CPU, memory, slots, sharers."""
        for host in self.engine.fleet.hosts.values():
            cpu, memory, free, users = host.cpu_milli, host.memory_mib, host.lent, Counter[int]()
            rest = host.cpu_milli - host.cpu_kept
            mib, percent = Counter[int](), Counter[int]()
            frozen = [attempt for attempt in host.worker.attempts.values() if attempt.mask != attempt.home]
            for attempt in host.worker.attempts.values():
                shape = self.engine.reader.shape_of_attempt(attempt)
                cpu -= shape.cpu_milli
                rest -= 0 if shape.count else shape.cpu_milli
                memory -= shape.memory_mib
                free &= ~attempt.mask
                if attempt.mode > 1:
                    for slot in [slot for slot in range(64) if attempt.mask >> slot & 1]:
                        users[slot] += 1
                        mib[slot] += shape.share_mib
                        percent[slot] += shape.compute_percent
            missing = [attempt.name for attempt in frozen if host.frozen.get(attempt.name) is not attempt]
            assert not missing, f"{host.worker.id} does not know that {missing} wait for their GPUs"
            assert host.held == len(host.worker.attempts)
            assert (host.cpu_free, host.cpu_rest, host.memory_free) == (cpu, rest, memory), host.worker.id
            assert host.free == free, f"{host.worker.id}: {host.free:b} is not {free:b}"
            assert {slot: device.users for slot, device in host.shared.items()} == users, host.worker.id
            assert {slot: device.memory_mib for slot, device in host.shared.items()} == mib, host.worker.id
            assert {slot: device.percent for slot, device in host.shared.items()} == percent, host.worker.id

    # -------------------------------------------------------------------------------------------- workers

    def worker(
        self,
        name: str = "w0",
        gpus: int = 1,
        model: str = H100,
        *,
        models: list[str] | None = None,
        auto: bool = True,
        vendor: str = "nvidia",
        gpu_memory_mib: int = 81_559,
        **hello: Any,
    ) -> Worker:
        """A worker that has joined. `hello` fields override: labels, drivers, modes, cpu_milli, memory_mib, …"""
        pool = devices(name, models if models is not None else [model] * gpus, vendor, gpu_memory_mib)
        fields: dict[str, Any] = {
            "drivers": ["noop", "process"],
            "capabilities": dict.fromkeys(("noop", "process"), Capabilities(reaches=True)),
            "ports": 1_000,
            "modes": ["exclusive", "mps", "time-slice"],
            "gpu_pool": pool,
            **hello,
        }
        worker = Worker(name, Hello(name, "boot-1", **fields), f"machine-{name}", auto)
        self.workers[name] = worker
        answer = self.join(worker)
        assert answer["kind"] == "joined", answer
        return worker

    def send(self, worker: str, frame: Join | Renew | ReportFrame | Goodbye) -> str:
        self._replies += 1
        self._sessions += 1
        reply = f"r{self._replies}"
        self.engine.offer(FromWorker(worker, frame, reply, self.json_workers, f"{self._sessions:032x}"))
        return reply

    def join(self, worker: Worker, frame: Join | None = None) -> dict[str, Any]:
        frame = frame or worker.join_frame()
        reply = self.send(worker.id, frame)
        self.tick()
        answer: dict[str, Any] = self.answers[reply]
        if answer["kind"] == "joined":
            worker.joined(answer["session"], len(frame.reports))
        return answer

    def renew(self, *names: str) -> list[dict[str, Any]]:
        replies = [self.send(name, self.workers[name].renew_frame()) for name in names or self.workers]
        self.tick()
        return [self.answers[reply] for reply in replies]

    def report_all(self, *names: str) -> None:
        """Every worker's gathered reports, in one record; answered."""
        sent = []
        for name in names or self.workers:
            frame = self.workers[name].report_frame() if self.workers[name].session else None
            if frame is not None:
                sent.append((self.workers[name], self.send(name, frame)))
        self.tick()
        while any(reply not in self.answers for _, reply in sent) and self.engine.waiting:
            self.tick()  # this record had no room for all of them
        for worker, reply in sent:
            assert self.answers[reply]["kind"] == "recorded", self.answers[reply]
            worker.report_answered(self.answers[reply]["no"])

    def settle(self, records: int = 20) -> None:
        """Reports and orders go to and fro until nothing is left to say."""
        for _ in range(records):
            self.report_all()
            if not any(worker.gathered or worker.flying for worker in self.workers.values()):
                return

    def report(
        self, kind: ReportKind, job: str, replica: int = 0, *, code: int = 0, detail: str = "", tenant: str = "t"
    ) -> None:
        """Speak for a worker that is not `auto`: one report of the attempt in question, in a frame of its own."""
        self.reports([(kind, job, replica, code, detail)], tenant=tenant)

    def reports(
        self, many: list[tuple[ReportKind, str, int, int, str]], *, tenant: str = "t", tick: bool = True
    ) -> None:
        """Reports of several attempts, one frame a worker, all in one record: the next one, unless `tick` is False."""
        frames: dict[str, list[Report]] = {}
        for kind, job, replica, code, detail in many:
            attempt = self.attempt(job, replica, tenant)
            name = (tenant, job, replica, attempt.no, attempt.fence)
            frames.setdefault(attempt.worker.id, []).append(Report(kind, *name, code, detail))
        for worker_id, reports in frames.items():
            worker = self.workers[worker_id]
            worker.gathered += reports
            frame = worker.report_frame()
            assert frame is not None
            self.send(worker_id, frame)
            worker.report_answered(frame.no)
        if tick:
            self.tick()

    def run_out(self, name: str, code: int = 0) -> None:
        """All that runs on a worker exits, its devices are seen free."""
        worker = self.workers[name]
        for key in [key for key, held in worker.held.items() if held.phase == "running"]:
            worker.finish(key, code)
        self.settle()

    def load(self, name: str, **sick: str) -> None:
        self.engine.offer_load(name, self.workers[name].load_frame(**sick), self.now)

    # --------------------------------------------------------------------------------------------- callers

    def offer_submit(
        self,
        job: str,
        *,
        tenant: str = "t",
        sequence: int = 0,
        body: bytes | None = None,
        batch: Batch | None = None,
        position: int = 0,
        trace: str = "",
        reply: str | None = None,
        came: str = "",
        **fields: Any,
    ) -> str:
        fields.setdefault("run", {"driver": "noop"})
        data = body if body is not None else json.dumps({"job": job, **fields}).encode()
        self._replies += 1
        name = reply if reply is not None else f"r{self._replies}"
        if sequence or batch is not None:
            name = ""
        engine = self.engine
        submit = engine.submitted(tenant, data, lambda: job, name, True, sequence, trace, batch, position, came)
        engine.offer(submit)
        return name

    def submit(self, job: str, **fields: Any) -> dict[str, Any]:
        """Submit and tick once; returns the answer (or {} for one of the durable queue)."""
        reply = self.offer_submit(job, **fields)
        self.tick()
        answer: dict[str, Any] = self.answers.get(reply, {})
        return answer

    def cancel(self, job: str, **fields: Any) -> dict[str, Any]:
        reply = self.offer_cancel(job, **fields)
        self.tick()
        answer: dict[str, Any] = self.answers.get(reply, {})
        return answer

    def offer_cancel(
        self, job: str, *, tenant: str = "t", sequence: int = 0, why: str = "cancelled", before: bool = False,
        lifts: bool = False,
    ) -> str:  # fmt: skip
        self._replies += 1
        reply = "" if sequence else f"r{self._replies}"
        cancel = Cancel(tenant, job, why, reply=reply, sequence=sequence, before=before, lifts=lifts)
        self.engine.offer(cancel)
        return reply

    def uncancel(self, job: str, *, tenant: str = "t") -> dict[str, Any]:
        return self.cancel(job, tenant=tenant, lifts=True)

    def operate(self, verb: str, worker: str, *, slots: Sequence[int] = (), **drain: Any) -> dict[str, Any]:
        """An operator's act on a worker, answered; `drain` are the fields of `DrainAct`."""
        reply = self.offer_operate(verb, worker, slots=slots, **drain)
        self.tick()
        answer: dict[str, Any] = self.answers[reply]
        return answer

    def offer_operate(self, verb: str, worker: str, *, slots: Sequence[int] = (), **drain: Any) -> str:
        self._replies += 1
        reply = f"r{self._replies}"
        named = {"slots": list(slots)} if slots else {}
        self.engine.offer(Order(verb, act_of(verb, {"worker": worker, "by": "me", **named, **drain}), reply, True))
        return reply

    def order(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """An operator's act on a job or a tenant (`t` unless said), answered."""
        reply = self.offer_order(verb, **arguments)
        self.tick()
        answer: dict[str, Any] = self.answers[reply]
        return answer

    def offer_order(self, verb: str, **arguments: Any) -> str:
        self._replies += 1
        reply = f"r{self._replies}"
        self.engine.offer(Order(verb, act_of(verb, {"tenant": "t", "by": "ana", **arguments}), reply, True))
        return reply

    # ---------------------------------------------------------------------------------------------- looking

    def job(self, name: str, tenant: str = "t") -> Job:
        job = self.state.job(tenant, name)
        assert job is not None, f"no job {name}"
        return job

    def replica(self, name: str, index: int = 0, tenant: str = "t") -> Replica:
        return next(replica for replica in listed(self.job(name, tenant)) if replica.index == index)

    def attempt(self, name: str, index: int = 0, tenant: str = "t") -> Attempt:
        """The replica's attempt, or the one that lingers after its exit."""
        job = self.job(name, tenant)
        if index in job.rows and (attempt := job.rows[index].attempt) is not None:
            return attempt
        lingering = [m for m in self.state.attempts() if m.replica.job is job and m.replica.index == index]
        assert lingering, f"{name}/{index} holds nothing"
        return lingering[-1]

    def explained(self, name: str, tenant: str = "t") -> dict[str, Any]:
        """Why it is where it is, as `explain` answers; without fixes."""
        found = explain_job(self.engine, tenant, name)
        return wire(found)

    def fixes(self, name: str, tenant: str = "t") -> list[dict[str, Any]]:
        """What would start a waiting job, as a copy of this process finds it."""
        answer = ask(lambda: msgspec.msgpack.encode(fixes(self.engine, self.now, tenant, name)))
        assert answer, "the copy failed"
        reason, found = msgspec.msgpack.decode(answer, type=tuple[str, list[dict[str, Any]]])
        assert reason or not found
        return found

    def states(self, name: str, tenant: str = "t") -> list[str]:
        return [STATES[replica.state] for replica in self.job(name, tenant).replicas]

    def placed_on(self, name: str, tenant: str = "t") -> list[str]:
        """The worker of each replica, `-` where it holds nothing."""
        return [r.attempt.worker.id if r.attempt is not None else "-" for r in self.job(name, tenant).replicas]

    def slots(self, name: str, index: int = 0, tenant: str = "t") -> list[int]:
        mask = self.attempt(name, index, tenant).mask
        return [slot for slot in range(64) if mask >> slot & 1]

    def free_gpus(self) -> int:
        return sum(host.open.bit_count() for host in self.engine.fleet.hosts.values())

    def pass_time(self, ms: int, *, step: int = 1000, renew: bool = True) -> None:
        """Time goes by in steps; workers with a session renew unless told not to."""
        end = self.now + ms
        while self.now < end:
            if renew:
                for name, worker in self.workers.items():
                    if worker.session:
                        self.send(name, worker.renew_frame())
            self.tick(min(step, end - self.now))
