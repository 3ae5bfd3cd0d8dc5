"""The only door of the core: events in, one record out, and after its acknowledgement everything that may leave.

`offer` takes what came, `build` makes the record of this tick, `commit` folds it and says what leaves. Between build
and commit there is exactly one record in flight (ledger-rules H1); when its fate cannot be told, the engine is thrown
away and made anew from the ledger (H4): it never rolls back.
"""

from __future__ import annotations

import difflib
import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, Final

from moorage.scheduler.core.admission import Admission, NewJob
from moorage.scheduler.core.backfill import Estimates
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import SLACK_BYTES, STEP_BYTES, Draft
from moorage.scheduler.core.durations import LEARNED_AT_START_MAX, LEARNED_MAX, Durations, workload_of
from moorage.scheduler.core.events import (
    Ask,
    Cancel,
    Event,
    FromWorker,
    Operate,
    Order,
    PartKept,
    QueueRead,
    Resign,
    SnapshotTaken,
    Submit,
)
from moorage.scheduler.core.finished import request_digest
from moorage.scheduler.core.fleet import Fleet, Host
from moorage.scheduler.core.fold import Folded, fold
from moorage.scheduler.core.in_flight import InFlight
from moorage.scheduler.core.lifecycle import Lifecycle
from moorage.scheduler.core.orders import Orders, level_problem
from moorage.scheduler.core.outputs import Outputs, WantedFrames, slots_of
from moorage.scheduler.core.plan import Planner
from moorage.scheduler.core.preempting import Preempting
from moorage.scheduler.core.preemption import Preemption
from moorage.scheduler.core.queue import REPLICA_BITS, Queue, entry
from moorage.scheduler.core.rank import RANKERS
from moorage.scheduler.core.records import RECORD_BYTES_MAX, Act, Op, encode_record
from moorage.scheduler.core.sessions import Sessions, lose_bytes
from moorage.scheduler.core.shape import Shape, Shapes
from moorage.scheduler.core.soonest import SAMPLES_SURE, soonest_ms
from moorage.scheduler.core.state import AT_EXITED, AT_RUNNING, QUEUED, Job, Member, Replica, State, Worker, started_ms
from moorage.scheduler.core.telling import Telling
from moorage.scheduler.core.windows import Windows, as_drain, window_of
from moorage.schemas.alike import Asked, Requests
from moorage.schemas.codec import encode
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Accepted, FactFrame, Goodbye, Held, Join, Joined, Load, Renew, Renewed
from moorage.schemas.job import STATES, Request
from moorage.schemas.operate import Done, DrainAct
from moorage.schemas.subjects import Subjects

#: ended jobs that one record compacts at most: some 3 µs each
COMPACT_MAX: Final = 512
#: ended jobs beyond `ended_max` (and at least so many again) that wait for the history; then they go without it
ENDED_SPARE: Final = 1_000
#: a W3C traceparent has 55; what is longer is none
TRACE_CHARS_MAX: Final = 128
#: what a record may hold before it takes no more
DRAFT_BYTES_MAX: Final = RECORD_BYTES_MAX - SLACK_BYTES
#: timers of jobs that are over, and queue entries that no longer wait, before they are cleared out
TIMERS_SPARE: Final = 10_000
QUEUE_SPARE: Final = 1_000
#: renewal intervals after which whoever was not heard in a reign is not waited for
BEHIND_RENEWALS: Final = 1.5
_DEADLINE, _START_WITHIN, _BACKOFF = range(3)


_Rest = Cancel | FromWorker | Operate | Order | Ask | SnapshotTaken | PartKept | Resign


def _presses(event: _Rest) -> bool:
    """Whether an event must not wait for the next heartbeat: renewals alone may."""
    return not (isinstance(event, FromWorker) and isinstance(event.frame, Renew))


class Engine:
    """A leader's decisions over one state. All times passed in are milliseconds.

    `leader` is this process's random number; with the record number it names a record. `state` must hold this
    reign's epoch record already.
    """

    def __init__(self, state: State, config: Config, subjects: Subjects, leader: int, mono_ms: int) -> None:
        self.state = state
        self.config = config
        self.subjects = subjects
        self.leader = leader
        self.fleet = Fleet()
        self.queue = Queue()
        self.requests = Requests()
        self.shapes = Shapes()
        self.durations = Durations()
        self.telling = Telling(state)
        self.lifecycle = Lifecycle(self.fleet, self.request_of, self.shape_of, self._requeue)
        self.estimates = Estimates(self.request_of, self.shape_of, self.durations)
        self.planner = Planner(
            self.fleet, self.queue, RANKERS[config.ranker](), self.estimates, self._preempting(), config.order,
            self._could_ever, config.ages, int(config.reserve_after * 1000),
        )  # fmt: skip
        self.orders = Orders(
            state, self.queue, self.planner, self.lifecycle, self.request_of, self.shape_of, config.half_life_ms
        )
        self.admission = Admission(state, self.fleet, self.lifecycle, config)
        self.admission.soonest_ms = self._soonest_ms
        self.windows = Windows(state, self.fleet, self.lifecycle)
        self.planner.barred_by_limits = self._barred_by_limits
        self.sessions = Sessions(state, self.fleet, self.lifecycle, config)
        self._rows_looked = False  # for such as are to go, in this second
        self._rows_ms = max(
            config.finished_keep_ms, int(config.history_keep * 1000)
        )  # a row says where a history stands, too
        self._rid = 0
        self._began_mono_ms = mono_ms
        self._submits: deque[Submit | QueueRead] = deque()
        self._rest: deque[_Rest] = deque()
        self._timers: list[tuple[int, int, int]] = []  # ledger ms, kind, job number or queue entry
        self._in_flight: InFlight | None = None
        self._accepting: dict[int, Request] = {}  # of the jobs that this record accepts, where their limits matter
        self._pressing = 0  # events in `_rest` that press for a record
        self._looked_ms = 0
        self.reports: dict[int, Renew] = {}  # each worker's last renewal, for audits
        self._built_ms = mono_ms
        self._replan = False  # a worker joined with the last record: somebody may start now
        self._left_queue = 0  # entries of the queue that no longer wait, at most
        #: what the answer to a submit says of a job that has to wait
        self.tell_waiting: Callable[[Job], dict[str, Any] | None] | None = None
        self.history_dropped = 0  # jobs that left memory though their history could not be written
        self._unmatched: set[int] = set()  # jobs with on_no_match reject, accepted before the fleet was heard
        self._resume(mono_ms)

    # ------------------------------------------------------------------------------------------ resume

    def _resume(self, mono_ms: int) -> None:
        """Index a folded state: nobody counts as heard yet, every session as heard of now (ledger-rules H28)."""
        standing = [worker for worker in self.state.worker_by_num if worker.session]
        for worker in standing:
            self.fleet.rules_of(worker.hello)  # whom any rules name, before the first shape is made
        for worker in standing:
            host = self.fleet.join(worker, [(m, self.shape_of(m.replica.job)) for m in worker.members.values()])
            host.last_ms = mono_ms
        for num in islice(self.state.ended, max(0, len(self.state.ended) - LEARNED_AT_START_MAX), None):
            job = self.state.jobs[num]
            self.durations.learn(job, self.shape_of(job), self.workload_of(job))
        for job in self.state.jobs.values():
            job.told = job.rev
            job.own_subject = True  # whom the leader before told of it is not known here
            if not job.over:
                self._index(job, self.request_of(job))
                self.planner.ranker.arrived(self.shape_of(job), len(job.replicas))

    def _index(self, job: Job, request: Request) -> None:
        """Put a live job's waiting replicas in the queue and its times in the timers."""
        shape = self.shape_of(job)
        waiting = [replica for replica in job.replicas if replica.state == QUEUED]
        for replica in waiting[:1] if shape.together > 1 else waiting:
            if replica.not_before > self.state.time_ms:
                self._requeue(replica, replica.not_before)
            elif job.hold is None:
                self._enqueue(job, request, job.priority, entry(job.num, replica.index))
        self._arm(job, request)

    def _enqueue(self, job: Job, request: Request, given: int, item: int) -> None:
        """`given` is the priority that an operator gave it, below 0 for none."""
        self.queue.add(given if given >= 0 else request.priority, self.shape_of(job), item, job.tenant)

    def _arm(self, job: Job, request: Request) -> None:
        if request.deadline_s is not None:
            job.deadline_ms = job.accepted_ms + int(request.deadline_s * 1000)
            heappush(self._timers, (job.deadline_ms, _DEADLINE, job.num))
        if request.start_within_s is not None:
            heappush(self._timers, (job.accepted_ms + int(request.start_within_s * 1000), _START_WITHIN, job.num))
        # a job that something has become of was matched once: it is not rejected for what left the fleet since
        if request.on_no_match == "reject" and job.rev == 1 and not self.admission.could_ever(self.shape_of(job)):
            self._unmatched.add(job.num)

    def request_of(self, job: Job) -> Request:
        """The request of an accepted job, decoded from its body (rare paths only); its `job` may be None."""
        return self.requests.read(job.body)[1].request

    def _preempting(self) -> Preempting:
        config = self.config
        policy = Preemption(self.fleet, self.shape_of, self.priority_of, int(config.preempt_after * 1000), config.ages)
        return Preempting(policy, self.lifecycle, priority=config.preempt_priority, reclaim=config.reclaim)

    def _could_ever(self, shape: Shape) -> bool:
        return self.admission.could_ever(shape)

    def priority_of(self, job: Job) -> int:
        return job.priority if job.priority >= 0 else self.request_of(job).priority

    def shape_of(self, job: Job) -> Shape:
        shape = job.shape
        if shape is None:
            shape = job.shape = self.shape_for(self.shape_of_asked(self.requests.read(job.body)[1]), job.tenant)
            if job.avoid:
                shape = job.shape = self.shapes.avoiding(shape, job.avoid)
        assert isinstance(shape, Shape)
        return shape

    def shape_for(self, shape: Shape, tenant: str) -> Shape:
        """A shape as this tenant asks for it: what workers let it have may be less, or more, than others."""
        return self.shapes.asked_by(shape, tenant) if tenant in self.fleet.named else shape

    def workload_of(self, job: Job) -> str:
        """What it runs, as durations are learned by (see `durations`)."""
        asked = self.requests.read(job.body)[1]
        if not asked.workload:
            asked.workload = workload_of(asked.request)
        return asked.workload

    def shape_of_asked(self, asked: Asked) -> Shape:
        shape = asked.shape
        if shape is None:
            shape = asked.shape = self.shapes.of(asked.request)
        assert isinstance(shape, Shape)
        return shape

    def _barred_by_limits(self, num: int, now_ms: int) -> frozenset[int]:
        """Workers that are to be left before the job's time limit is over."""
        job = self.state.jobs.get(num)
        if job is not None:
            return self.windows.barred_to(self.request_of(job).workload.timeout_s, job.deadline_ms, now_ms)
        request = self._accepting[num]
        deadline_ms = None if request.deadline_s is None else now_ms + int(request.deadline_s * 1000)
        return self.windows.barred_to(request.workload.timeout_s, deadline_ms, now_ms)

    def _requeue(self, replica: Replica, not_before: int) -> None:
        heappush(self._timers, (not_before, _BACKOFF, entry(replica.job.num, replica.index)))

    def _soonest_ms(self, shape: Shape, priority: int) -> int:
        """How soon the fleet could hold a shape, whoever waits before it (see `soonest`)."""
        if not self.admission.all_heard():
            return 0
        return soonest_ms(self.fleet, shape, lambda member: self._least_ms(member, priority))

    def _least_ms(self, member: Member, priority: int) -> int:
        """How long a member lasts at least, by what was seen; 0 where nothing is sure, or where it may be preempted."""
        job = member.replica.job
        if member.phase == AT_EXITED or self.priority_of(job) < priority:
            return 0
        elapsed_ms = max(0, self.state.time_ms - started_ms(job, member)) if member.phase == AT_RUNNING else 0
        found = self.durations.remaining(job.tenant, self.workload_of(job), self.shape_of(job), elapsed_ms)
        return found.least_ms if found is not None and found.samples >= SAMPLES_SURE else 0

    # ------------------------------------------------------------------------------------------- offer

    def offer(self, event: Event) -> None:
        """Take an event for the next record. Never blocks; the caller bounds what it offers."""
        if isinstance(event, Submit | QueueRead):
            self._submits.append(event)
        else:
            self._rest.append(event)
            self._pressing += _presses(event)

    def offer_load(self, worker_id: str, frame: Load, mono_ms: int) -> None:
        """A load frame changes the soft view at once and needs no record."""
        self.sessions.load(worker_id, frame, mono_ms)

    def kept(self, job: Job, sequence: int) -> None:
        """The whole story of a job that is over stands in the history there: memory may let it go."""
        job.kept = sequence

    @property
    def urgent(self) -> bool:
        """Whether something waits that must not wait for the next heartbeat (renewals alone may, a little)."""
        return bool(self._submits or self._pressing or (self._replan and self.queue.size))

    @property
    def waiting(self) -> int:
        """Events offered and not yet in a record."""
        return len(self._submits) + len(self._rest)

    @property
    def next_timer_ms(self) -> float:
        """Ledger time of the next timer, in ms; infinity when there is none."""
        return self._timers[0][0] if self._timers else math.inf

    # ------------------------------------------------------------------------------------------- build

    def build(self, time_ms: int, mono_ms: int) -> bytes:
        """The record of this tick, encoded: what was offered, what is due, what can be placed. At most 512 KiB.

        May be a bare heartbeat. Must be followed by `commit` once its append is acknowledged.
        """
        assert self._in_flight is None, "one append in flight, never two"
        draft = Draft(self.state, max(time_ms, self.state.time_ms))
        flight = self._in_flight = InFlight(draft)
        folded: dict[int, int] = {}
        if mono_ms - self._built_ms > self.config.renew_s * 1000:
            self._slept(mono_ms)
        self._built_ms = mono_ms
        if not self.queue.by_tenant:
            self.orders.resume_turns(draft)
        later: list[FromWorker] = []
        orders: list[Order] = []
        while self._rest and not draft.full:
            event = self._rest.popleft()
            if isinstance(event, FromWorker):
                if not self._has_room(draft, event):
                    self._rest.appendleft(event)
                    break
                if isinstance(event.frame, Join) and any(o.worker == event.worker for o, _ in flight.joined):
                    later.append(event)  # its own first join comes first
                else:
                    self._from_worker(flight, event, folded)
            elif isinstance(event, Cancel):
                flight.replies.append((self.admission.cancel(draft, event), event.reply, event.json))
            elif isinstance(event, Operate):
                flight.replies.append((self._operate(draft, event), event.reply, event.json))
            elif isinstance(event, Order):
                orders.append(event)
            elif isinstance(event, SnapshotTaken):
                self._name_snapshot(draft, event)
            elif isinstance(event, PartKept):
                if event.num in self.state.jobs:
                    draft.acts.append([Act.PART, event.num, event.seq, event.first, event.last])
                    draft.bytes += 64
            elif isinstance(event, Resign):
                draft.acts.append([Act.RESIGN])
            else:
                flight.asks.append(event)
        self._rest.extendleft(reversed(later))
        self._pressing = sum(_presses(left) for left in self._rest)  # hardly ever more than none
        if mono_ms - self._looked_ms >= 1000:
            self._looked_ms = mono_ms
            self._each_second(flight, mono_ms)
        self._due(draft)
        if orders:
            self._take_orders(flight, orders)
        self._take_submits(flight)
        self._left_queue += draft.left_queue
        if self._left_queue > QUEUE_SPARE + self.queue.size // 4:
            self._left_queue = 0
            self.planner.sweep(draft)
        self._replan = False
        draft.settle()
        if self.may_place(draft.time_ms, mono_ms):
            self.planner.plan(draft)
        self._accepting.clear()
        self.planner.fresh.clear()
        self._forget(draft, self._compact(draft))
        self._rid += 1
        record = flight.record = draft.record(self.leader, self._rid)
        return encode_record(record)

    def may_place(self, time_ms: int, mono_ms: int) -> bool:
        """Not while workers may know better than this ledger, and not yet on a restored one.

        What its backup does not know of runs until its worker is heard, or by then is lost: nothing is placed beside
        it (ledger-rules H7).
        """
        state, lost_ms = self.state, self.config.lost_ms
        if self.sessions.ahead and self.sessions.behind(waited=self._waited(mono_ms)) is not False:
            return False
        if state.restored_ms < 0:
            return True
        if state.epoch == state.restored_epoch + 1:  # its first reign counts by its own clock
            return mono_ms - self._began_mono_ms >= lost_ms
        return time_ms >= state.restored_ms + lost_ms

    def standing_draft(self) -> Draft:
        """What stands: the record in flight over the state, an empty one where none is. To be read only."""
        return self._in_flight.draft if self._in_flight is not None else Draft(self.state, self.state.time_ms)

    def _waited(self, mono_ms: int) -> bool:
        """Whether every worker that lives had time to renew in this reign."""
        return mono_ms - self._began_mono_ms > BEHIND_RENEWALS * self.config.renew_s * 1000

    def behind(self, mono_ms: int) -> str:
        """Why this ledger must not be led on: to ask behind each acknowledgement, which proves that nobody newer
        leads by it. Empty where it may be."""
        if not self.sessions.ahead or not self.sessions.behind(waited=self._waited(mono_ms)):
            return ""
        state = self.state
        num, knows = min(self.sessions.ahead.items())
        return (
            f"ledger {state.ledger_id} ends at record {state.seq} in epoch {state.epoch}, and"
            f" {len(self.sessions.ahead)} of its workers know more, {state.worker_by_num[num].id} of {knows}: it is an"
            " older backup"
        )

    def _name_snapshot(self, draft: Draft, event: SnapshotTaken) -> None:
        """Name the newest snapshot and repeat the one before, so that recovery finds both in one record."""
        if self.state.snapshot is not None:
            draft.acts.append([Act.SNAPSHOT, *self.state.snapshot])
        draft.acts.append([Act.SNAPSHOT, event.name, event.seq, event.digest])

    @property
    def names_snapshot(self) -> bool:
        """Whether the record in flight names a snapshot."""
        flight = self._in_flight
        return flight is not None and any(act[0] == Act.SNAPSHOT for act in flight.draft.acts)

    @property
    def in_flight(self) -> bool:
        """Whether a record was built that is not acknowledged yet."""
        return self._in_flight is not None

    @property
    def built_ms(self) -> int:
        """The leader's monotonic time when it built its last record."""
        return self._built_ms

    def forget_callers(self) -> None:
        """A copy that is only asked what would happen answers nobody."""
        self._rest = deque(event for event in self._rest if not isinstance(event, Ask))
        self._pressing = sum(map(_presses, self._rest))
        if self._in_flight is not None:
            self._in_flight.asks.clear()

    @property
    def rid(self) -> int:
        """The number of the record that is in flight."""
        return self._rid

    def _slept(self, mono_ms: int) -> None:
        """This leader was stopped, or nothing was acknowledged for a while: everybody counts as heard now (H28)."""
        for host in self.fleet.hosts.values():
            host.last_ms = max(host.last_ms, mono_ms)
            if host.load_ms >= 0:
                host.load_ms = max(host.load_ms, mono_ms)

    def _from_worker(self, flight: InFlight, event: FromWorker, folded: dict[int, int]) -> None:
        frame, draft = event.frame, flight.draft
        if isinstance(frame, FactFrame):
            flight.replies.append((self.sessions.facts(draft, event, frame, folded), event.reply, event.json))
        elif isinstance(frame, Renew):
            found = self.sessions.renew(draft, event, frame)
            if isinstance(found, Host):
                flight.renewed.append((event, frame, found))
            else:
                flight.replies.append((found, event.reply, event.json))
        elif isinstance(frame, Join):
            session = self.sessions.join(draft, event, frame)
            if isinstance(session, Problem):
                flight.replies.append((session, event.reply, event.json))
            else:
                flight.joined.append((event, session))
        elif isinstance(frame, Goodbye):
            trouble = self.sessions.goodbye(draft, event, frame)
            flight.replies.append((trouble or {"kind": "goodbye"}, event.reply, event.json))

    def _take_submits(self, flight: InFlight) -> None:
        submits, draft = self._submits, flight.draft
        while submits and not draft.full:
            self._submit(flight, submits.popleft())

    def _submit(self, flight: InFlight, event: Submit | QueueRead) -> None:
        draft = flight.draft
        if isinstance(event, QueueRead):
            draft.acts.append([Act.CURSOR, event.tenant, event.which, event.through])
            draft.bytes += 64
            return
        event.shape = self.shape_for(event.shape, event.tenant)
        outcome = self.admission.submit(draft, event, flight.new)
        if not isinstance(outcome, NewJob):
            self._reply_submit(flight, event, outcome)
            return
        flight.new[(event.tenant, event.name)] = outcome
        trace = event.trace if len(event.trace) <= TRACE_CHARS_MAX else ""
        num = draft.accept(event.tenant, event.name, event.body, event.request.replicas, trace)
        if outcome.stillborn is not None:
            with draft.by(outcome.by):
                for index in range(event.request.replicas):
                    draft.step(Op.MOVE, num, index, outcome.stillborn, 0, draft.note(outcome.why))
            return
        if self.state.windows:
            self._accepting[num] = event.request
        if self.planner.reservation is not None:
            self.planner.fresh[num] = (event.tenant, event.request)
        shape, priority = event.shape, event.request.priority
        self.planner.ranker.arrived(shape, event.request.replicas)
        for index in range(1 if shape.together > 1 else event.request.replicas):
            self.queue.add(priority, shape, entry(num, index), event.tenant)

    def _reply_submit(self, flight: InFlight, event: Submit, outcome: Any) -> None:
        if event.batch is None:
            flight.replies.append((outcome, event.reply, event.json))
            return
        batch = event.batch
        batch.answers[event.position] = outcome
        batch.missing -= 1
        if batch.missing == 0:
            flight.replies.append((batch.answers, batch.reply, batch.json))

    def _operate(self, draft: Draft, event: Operate) -> Any:
        worker = self.state.workers.get(event.worker)
        if worker is None:
            near = difflib.get_close_matches(event.worker, self.state.workers, n=1)
            return problem(
                "not-found",
                f"no worker {event.worker} has joined",
                found=event.worker,
                next=f"moorage {event.verb} {near[0]}" if near else "moorage fleet",
            )
        members = len(worker.members)
        if event.verb == "release":
            named = sum(1 << slot for slot in set(event.slots))
            slots = self.sessions.health.release(draft, worker, named, event.by)
            return Done(event.verb, slots != 0, worker=event.worker, members=members, slots=slots_of(slots))
        if event.verb == "drain":
            act = event.drain or DrainAct(worker=event.worker)
            if act.has_window and not draft.may(Act.WINDOW):
                return level_problem("drains with a time", Act.WINDOW, self.state.level)
            changed = self.windows.drain(draft, worker, act, event.by)
            drain = as_drain(window_of(act, draft.time_ms, event.by))
            return Done(event.verb, changed, worker=event.worker, members=members, drain=drain)
        flag = {"cordon": "cordoned", "uncordon": "open"}[event.verb]
        changed = worker.flag != flag
        self.windows.flag(draft, worker, flag, event.by)
        if flag == "open":
            changed |= self.windows.clear(draft, worker)
        return Done(event.verb, changed, worker=event.worker, members=members)

    def _take_orders(self, flight: InFlight, orders: list[Order]) -> None:
        """Each once every pause that is due is over, as `orders` wants it; what has no room left waits."""
        for at, order in enumerate(orders):
            if flight.draft.full:
                self._rest.extendleft(reversed(orders[at:]))
                self._pressing += len(orders) - at
                return
            flight.replies.append((self.orders.act(flight.draft, order), order.reply, order.json))
            self._due(flight.draft)

    # -------------------------------------------------------------------------------- timers and upkeep

    def _each_second(self, flight: InFlight, mono_ms: int) -> None:
        draft = flight.draft
        heard = {host.worker.num for _, _, host in flight.renewed}  # answered with this record
        for worker in self.sessions.silent(mono_ms):
            if worker.num in heard:
                continue
            if not draft.empty and draft.bytes + lose_bytes(worker) > DRAFT_BYTES_MAX:
                break
            self.fleet.leave(worker.num)
            self.lifecycle.lose_worker(draft, worker, "lost", frozenset())
        self._rows_looked = False
        self.windows.pass_time(draft)
        self.admission.forget_cancels(draft)
        if self._unmatched and self.admission.all_heard():
            for num in sorted(self._unmatched):
                job = self.state.jobs.get(num)
                if job is not None:
                    self.admission.reject_unmatched(draft, job, self.shape_of(job))
            self._unmatched.clear()
        if len(self._timers) > 2 * self.state.live + TIMERS_SPARE:
            self._timers = [timer for timer in self._timers if self._is_live(timer)]
            heapify(self._timers)

    def _is_live(self, timer: tuple[int, int, int]) -> bool:
        """Whether a timer can still mean something: jobs end long before their deadlines."""
        job = self.state.jobs.get(timer[2] >> REPLICA_BITS if timer[1] == _BACKOFF else timer[2])
        return job is not None and not job.over

    def _has_room(self, draft: Draft, event: FromWorker) -> bool:
        """Whether this record has room for the most that a frame may bring; an empty one always has."""
        frame, size = event.frame, 0
        if isinstance(frame, FactFrame | Join):
            size = 2 * STEP_BYTES * len(frame.facts)
        if isinstance(frame, Join | Goodbye):
            worker = self.state.workers.get(event.worker)
            size += lose_bytes(worker) if worker is not None else 0
        return size == 0 or draft.empty or draft.bytes + size <= DRAFT_BYTES_MAX

    def _due(self, draft: Draft) -> None:
        timers, state = self._timers, self.state
        while timers and timers[0][0] <= draft.time_ms and not draft.full:
            _, kind, what = heappop(timers)
            if kind == _BACKOFF:
                job = state.jobs.get(what >> REPLICA_BITS)
                if job is not None and not job.over:
                    request = self.request_of(job)
                    late_ms = math.inf if request.start_within_s is None else int(request.start_within_s * 1000)
                    if draft.time_ms - job.accepted_ms >= late_ms:
                        self.lifecycle.expire(draft, job)  # placed when its time passed, and refused since
                    if not draft.is_held(job):
                        self._enqueue(job, request, draft.priority_of(job), what)
                continue
            job = state.jobs.get(what)
            if job is None or job.over:
                continue
            if kind == _DEADLINE:
                self.lifecycle.deadline(draft, job)
            else:
                self.lifecycle.expire(draft, job)

    def _compact(self, draft: Draft) -> int:
        """The oldest ended jobs leave memory once their history stands; their digest stays for idempotence. How many.

        Where the history cannot be written they wait for it, but not without bound: scheduling goes on.
        """
        state, most = self.state, self.config.ended_max
        surplus = min(len(state.ended) - most, COMPACT_MAX)
        if surplus <= 0:
            return 0
        must = len(state.ended) - most - max(most, ENDED_SPARE)
        flat: list[Any] = []
        kept: list[int] = []
        for position in range(surplus):
            job = state.jobs[state.ended[position]]
            if not job.kept:
                if position >= must:
                    break
                self.history_dropped += 1
            name, asked = self.requests.read(job.body)
            flat += (job.num, request_digest(asked.identity(name)))
            kept.append(job.kept)
        if flat:
            draft.acts.append([Act.COMPACT, flat, kept])
            draft.bytes += len(kept) * 30
        return len(kept)

    def _forget(self, draft: Draft, added: int) -> None:
        """Rows of finished jobs go by age and by number: each second, and as fast as this record adds some."""
        if self._rows_looked and not added:
            return
        self._rows_looked = True
        finished, most = self.state.finished, max(COMPACT_MAX, 2 * added)
        old = finished.older_than(draft.time_ms - self._rows_ms, most)
        old = max(old, min(len(finished) + added - self.config.finished_rows, most))
        if old > 0:
            draft.acts.append([Act.EXPIRE, old])

    # ------------------------------------------------------------------------------------------ commit

    def commit(self, seq: int, mono_ms: int) -> Outputs:
        """Fold the record in flight, acknowledged at `seq`; returns everything that may leave now."""
        flight = self._in_flight
        assert flight is not None
        assert flight.record is not None
        self._in_flight = None
        state, out = self.state, Outputs()
        folded = fold(state, flight.record, seq)
        if not flight.draft.empty:
            self.admission.moved_seq = seq
        for job in flight.draft.avoided:
            self._reshape(job)
        out.ended = folded.ended
        for job in folded.ended[:LEARNED_MAX]:
            self.durations.learn(job, self.shape_of(job), self.workload_of(job))
        out.long = list(folded.long.values())
        wanted = WantedFrames(state, self.subjects)
        self._new_jobs(flight, folded.accepted, out)
        self._workers(flight, folded.workers, out, mono_ms)
        wanted.placed(folded.placed)
        for member in folded.touched:
            wanted.add(member)
        for event, frame, host in flight.renewed:
            host.last_ms = mono_ms
            self.reports[host.worker.num] = frame
            renewed = Renewed(frame.n, state.epoch, draining=host.worker.flag == "draining")
            out.answers.append((event.reply, encode(renewed, json=event.json)))
            self._show(wanted, host.worker, frame.held, frame.no)
            if host.worker.well and frame.well_n < host.worker.well_n:
                wanted.well(host.worker)
        for event, session in flight.joined:
            self._answer_join(event, session, wanted, out)
        for answer, reply, json in flight.replies:
            out.answers.append((reply, encode(answer, json=json)))
        self._tell(folded, out)
        for ask in flight.asks:
            answer = ask.answer()
            if answer is not None:
                out.answers.append((ask.reply, encode(answer, json=ask.json)))
        out.messages += wanted.messages()
        out.answers = [answer for answer in out.answers if answer[0]]  # who named no reply subject asked for none
        return out

    def _reshape(self, job: Job) -> None:
        """It asks differently from now on: what waits of it moves to the line of those that ask so."""
        old, job.shape = self.shape_of(job), None
        if job.over or job.hold is not None:
            return  # a release adds it anew
        new, priority = self.shape_of(job), self.priority_of(job)
        for replica in job.replicas[:1] if new.together > 1 else job.replicas:
            item = entry(job.num, replica.index)
            # one that pauses is not in line: its timer puts it there, though its time may have come
            if replica.state == QUEUED and self.queue.remove(priority, old, item, job.tenant):
                self.queue.add(priority, new, item, job.tenant)

    def _tell(self, folded: Folded, out: Outputs) -> None:
        """One event of each job that changed."""
        if folded.workers:
            self.telling.forget()
        tell, events = self.telling.event, out.events
        for job in folded.jobs.values():
            if job.told < job.rev:
                own = job.own_subject
                events.append((job.tenant, job.name, tell(job), self.own_subject(job) if own is None else own))

    def own_subject(self, job: Job) -> bool:
        """Whether this job's events go to its own subject too: its request says `"events": "tenant"` where not."""
        if job.own_subject is None:
            job.own_subject = self.request_of(job).events == "job"
        return job.own_subject

    def _new_jobs(self, flight: InFlight, accepted: list[Job], out: Outputs) -> None:
        seq = self.state.seq
        new = flight.new
        for job in accepted:
            made = new[(job.tenant, job.name)]
            submit = made.submit
            job.shape, job.key = submit.shape, submit.key
            request = submit.request
            # of many that came together the tenant's frames tell, until somebody follows one (`views.show`)
            job.own_subject = request.events == "job" and submit.batch is None
            if request.deadline_s is not None or request.start_within_s is not None or request.on_no_match == "reject":
                self._arm(job, request)
            state = "QUEUED" if made.stillborn is None else STATES[made.stillborn]
            waiting = None
            if job.replicas[-1].state == QUEUED and submit.batch is None and submit.reply and self.tell_waiting:
                waiting = self.tell_waiting(job)
            if (
                submit.batch is None and submit.json and not made.warnings and waiting is None
            ):  # the bytes of `encode(Accepted(…))`
                said = f'{{"kind":"accepted","job":"{job.name}","ledger":{seq},"state":"{state}"}}'
                out.answers.append((submit.reply, said.encode()))
                continue
            answer = Accepted(job.name, seq, state, warnings=made.warnings, waiting=waiting)
            if submit.batch is not None:
                batch = submit.batch
                batch.answers[submit.position] = answer
                batch.missing -= 1
                if batch.missing == 0:
                    out.answers.append((batch.reply, encode(batch.answers, json=batch.json)))
            elif submit.reply:
                out.answers.append((submit.reply, encode(answer, json=submit.json)))

    def _workers(self, flight: InFlight, workers: list[Worker], out: Outputs, mono_ms: int) -> None:
        joined, named = {event.worker for event, _ in flight.joined}, self.fleet.named
        for worker in workers:
            if worker.id in joined and worker.session:
                self.sessions.joined(
                    worker, [(m, self.shape_of(m.replica.job)) for m in worker.members.values()], mono_ms
                )
                joined.discard(worker.id)
                self._replan = True
            elif not worker.session:
                self.fleet.leave(worker.num)
            else:
                host = self.fleet.hosts.get(worker.num)
                if host is not None:
                    host.closed = worker.flag != "open"
                    self.fleet.changes += 1  # a shared device that opens again moves no bucket
                    self.fleet.refresh(host)
        for tenant in sorted((self.fleet.named - named) & self.state.tenants.keys()):  # once in a reign for each
            for job in self.state.tenants[tenant].jobs.values():
                self._reshape(job)

    def _answer_join(self, event: FromWorker, session: str, wanted: WantedFrames, out: Outputs) -> None:
        frame = event.frame
        assert isinstance(frame, Join)
        config, state = self.config, self.state
        joined = Joined(
            session,
            frame.n,
            state.epoch,
            config.renew_s,
            config.lease_s,
            config.grace_s,
            state.ledger_id,
            formerly=state.former_id,
        )
        out.answers.append((event.reply, encode(joined, json=event.json)))
        self._show(wanted, state.workers[event.worker], frame.holding, 0)

    def _show(self, wanted: WantedFrames, worker: Worker, held: list[Held], no: int) -> None:
        again, unknown = self.sessions.differences(worker, held, no)
        for member in again:
            wanted.add(member)
        for entry_ in unknown:
            if entry_.phase != "exited":
                wanted.end_unknown(worker, entry_)
