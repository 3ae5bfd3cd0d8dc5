"""The core's entry point: takes events, builds records of decisions, and returns what to send once they are stored.

`offer` takes an event. `build` makes the next record from the events offered so far; each decision is folded into the
state as it is made.
`prepare_outputs` makes what follows from it while the ledger stores it; once the record is acknowledged, `commit`
returns that to be sent.

Between `build` and `commit` exactly one record is in flight (ledger-rules H1). If its fate is unknown, or its place in
the ledger another than foreseen, the engine is thrown away and rebuilt from the ledger (H4). Only a record that could
not be built, and so was never sent, is taken back. The shell uses only the methods here, `state`, `fleet`, `config`,
`subjects`, and the `View` in `answers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.containment import PLACING, TIMERS, Containment, unread
from moorage.scheduler.core.draft import Draft, steps_to_end
from moorage.scheduler.core.events import (
    Ask,
    Batch,
    ChangeOrder,
    Event,
    Execute,
    FromWorker,
    Order,
    Promising,
    QueueRead,
    Resign,
    ScheduleOrder,
    ScheduleRun,
    SignalOrder,
    SnapshotTaken,
    Submit,
    Wake,
)
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shapes
from moorage.scheduler.core.ledger import acts, fairkeys
from moorage.scheduler.core.ledger.fairkeys import owner_of
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import encode_record
from moorage.scheduler.core.ledger.records import Op, by_tenant
from moorage.scheduler.core.ledger.state import Job, State, Worker
from moorage.scheduler.core.lifecycle.admission import Admission, NewJob
from moorage.scheduler.core.lifecycle.checkpoints import gang_sets
from moorage.scheduler.core.lifecycle.forgetting import Forgetting
from moorage.scheduler.core.lifecycle.frozen import Frozen
from moorage.scheduler.core.lifecycle.lacking import Lacking
from moorage.scheduler.core.lifecycle.max_running import most_of
from moorage.scheduler.core.lifecycle.pending_events import PendingEvents
from moorage.scheduler.core.lifecycle.promising import promise
from moorage.scheduler.core.lifecycle.relocating import Relocating
from moorage.scheduler.core.lifecycle.retention import Retention
from moorage.scheduler.core.lifecycle.scaling import Scaling
from moorage.scheduler.core.lifecycle.services import Services
from moorage.scheduler.core.lifecycle.sessions import Sessions, has_room
from moorage.scheduler.core.lifecycle.sleeping import Sleeping
from moorage.scheduler.core.lifecycle.stale_ledger import StaleLedgerGuard
from moorage.scheduler.core.lifecycle.starts import Starts
from moorage.scheduler.core.lifecycle.timers import Timers
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.lifecycle.unready import Unready
from moorage.scheduler.core.lifecycle.windows import Windows
from moorage.scheduler.core.operate.changing import Changing
from moorage.scheduler.core.operate.copies import Copies
from moorage.scheduler.core.operate.executing import execute, send_signal
from moorage.scheduler.core.operate.orders import Orders
from moorage.scheduler.core.operate.placing_by_name import PlacingByName
from moorage.scheduler.core.operate.relimiting import Relimiting
from moorage.scheduler.core.operate.resizing import Resizing
from moorage.scheduler.core.operate.schedules import Schedules
from moorage.scheduler.core.operate.worker_orders import WorkerOrders
from moorage.scheduler.core.outputs.fleet_events import fleet_events
from moorage.scheduler.core.outputs.output_writer import ExplainWaiting, InFlight, OutputWriter
from moorage.scheduler.core.outputs.outputs import Outputs, WantedFrames
from moorage.scheduler.core.queue.data_waits import DataWaits
from moorage.scheduler.core.queue.each_worker import numbers_for
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import Queue
from moorage.scheduler.core.queue.waiting_room import WaitingRoom
from moorage.scheduler.core.rank.ranker import Ranker
from moorage.scheduler.core.rank.rankers import ranker_class
from moorage.scheduler.core.request_reader import RequestReader
from moorage.scheduler.core.schedule.cycle import Planner
from moorage.scheduler.core.schedule.indexing import Indexing
from moorage.scheduler.core.schedule.preempt import Preempting
from moorage.scheduler.core.schedule.runtime import LEARNED_A_RECORD, LEARNED_MAX, Durations, Estimates
from moorage.scheduler.core.schedule.victims import Preemption
from moorage.schemas import signed
from moorage.schemas.always import sent
from moorage.schemas.answers.jobs import Explained, Woken
from moorage.schemas.codec import encode
from moorage.schemas.errors import Problem, Refused
from moorage.schemas.frames import Accepted, Answer, Goodbye, Join, Load, Renew, Renewed, ReportFrame
from moorage.schemas.ranges import ONE
from moorage.schemas.release import RELEASE
from moorage.schemas.service import MemberLoad, Scale
from moorage.schemas.subjects import Subjects
from moorage.schemas.ways import person_of

#: a W3C traceparent has 55 characters; anything longer than this is ignored
TRACE_CHARS_MAX: Final = 128


class Displaced(Exception):
    """A record is stored, but not in the place for which it was folded: the term ends, and begins again from there."""


class HalfFolded(Exception):
    """The state is half changed by a record that was not sent: the term ends."""


@contextmanager
def _whole() -> Iterator[None]:
    """Raise `HalfFolded` for what is raised inside, where the state changes and nothing can take that back."""
    try:
        yield
    except Exception as raised:
        raise HalfFolded(f"a record is neither folded nor taken back: {raised!r}") from raised


class Engine:
    """Makes the leader's decisions about one state. All times passed in are milliseconds.

    `leader` is a random number of this process; together with the record's number it names a record. `state` must
    already hold this term's epoch record.
    """

    def __init__(
        self,
        state: State,
        config: Config,
        subjects: Subjects,
        leader: int,
        mono_ms: int,
        explain_waiting: ExplainWaiting | None = None,
    ) -> None:
        self._explain_waiting = explain_waiting
        #: explains why a service's job waits, for the answer to a wake; None to leave that out
        self.explain_woken: Callable[[Job], Explained | None] | None = None
        self.state = state
        self.config = config
        self.subjects = subjects
        self.leader = leader
        self.pending = PendingEvents()
        self._rid = 0
        self._in_flight: InFlight | None = None
        self._began_ms = mono_ms
        self._half_life_ms = config.half_life_ms
        self._settings = RELEASE, config.told
        self._at: Event | str = ""  # the event, or the step of `build`, in progress
        self._looked_ms = 0
        self._crowded = False  # frames left no room for what each second ends: that comes first in the next record
        self._built_ms = mono_ms
        self._replan = False  # plan again at once: the last record was full, or a worker joined with it
        self._hurry = False  # the last record had no room for all events offered
        #: what failed, and is set aside: empty unless this is a `ContainedEngine`
        self.containment = Containment()
        #: what was learned of run times, by shapes: both stay as all else is made anew
        self.durations, self._shapes = Durations(), Shapes()
        self._make_parts()
        self.indexing.resume(mono_ms)

    def _make_parts(self) -> None:
        """Create all parts that are derived from the state and the fleet; the ledger holds nothing of them."""
        state, config = self.state, self.config
        self.fleet = Fleet()
        self.queue = Queue(self.fleet.distinguish)
        reader = self.reader = RequestReader(self.fleet, self._shapes)
        self.timers = Timers(state, reader, self.containment)
        self.lifecycle = Lifecycle(
            self.fleet, reader.request_of, reader.shape_of, self.timers.requeue,
            Lacking(self.fleet, reader.shape_of, config.not_here_max),
            Starts(state, self.fleet, config.start_failures_max, reader, self.queue),
        )  # fmt: skip
        self.estimates = Estimates(reader.request_of, reader.shape_of, reader.limit_ms_of, self.durations)
        policy = Preemption(
            self.fleet, reader.shape_of, reader.priority_of, int(config.preempt_after * 1000), config.ages
        )
        self.services = Services(state, self.lifecycle, policy.replacing)
        self.admission = Admission(state, self.fleet, self.lifecycle, config, self.services)
        self.room = WaitingRoom(state, self.lifecycle.cancel)
        self._frozen = Frozen(state, self.fleet, self.lifecycle)
        self.windows = Windows(state, self.fleet)
        self.sleeping = Sleeping(state, self.fleet, self.lifecycle)
        order = self._order()
        self.scaling = Scaling(
            state, self.lifecycle, order, reader.priority_of, config.scale_up_s, config.scale_down_s,
            self.sleeping.refused, self.sleeping.rung,
        )  # fmt: skip
        self.relocating = Relocating(state, self.fleet, self.lifecycle, self.services, self.scaling)
        preempting = Preempting(
            state, policy, self.lifecycle, config.preempt_priority, config.reclaim, self._knows_fleet,
            self.relocating.moves, self.scaling,
        )  # fmt: skip
        self.planner = Planner(
            self.fleet, self.queue, self._make_ranker(), self.estimates, preempting, order,
            self._frozen, self.admission.could_ever, int(config.reserve_after * 1000), self._begins,
        )  # fmt: skip
        self.schedules = Schedules(state, self.admission.malformed)
        self.sessions = Sessions(state, self.fleet, self.lifecycle, config)
        self.retention = Retention(state, reader.requests, config, self.room.telling)
        self.forgetting = Forgetting(state, int(config.history_keep * 1000), self.lifecycle)
        self.unready = Unready(state, self.fleet, self.lifecycle)
        self.indexing: Indexing = Indexing(
            state, reader, self.planner, self.timers, self.admission, self.durations, self.room, self._index_failed,
            self.scaling, self.relocating, self.unready, self.containment,
        )  # fmt: skip
        resizing = Resizing(state, reader, self.fleet, order)
        relimiting = Relimiting(state, reader, self.planner.verdicts, int(config.reserve_after * 1000))
        by_name = PlacingByName(self.fleet, order, reader, self.indexing, self._may_place)
        self.orders = Orders(state, self.indexing, self.lifecycle, reader, resizing, relimiting, by_name)
        copies = Copies(state, self.lifecycle, reader, self.scaling, config.jobs_max)
        self._changing = Changing(state, self.indexing, reader, copies, relimiting)
        explain = self._explain_waiting
        self.output_writer = OutputWriter(state, config, self.sessions, reader.request_of, explain)
        self._worker_orders = WorkerOrders(state, self.windows, self.sessions.health, self.forgetting)
        self.stale_ledger = StaleLedgerGuard(state, self.sessions, config, self._began_ms)

    def _make_ranker(self) -> Ranker:
        return ranker_class(self.config.ranker)()

    # --------------------------------------------------------------------------- callbacks for its parts

    def _knows_fleet(self) -> bool:
        """Return whether every worker was heard from in this term, or had time to renew."""
        return self.admission.all_reported() or self.stale_ledger.waited(self._built_ms)

    def _may_place(self, draft: Draft) -> bool:
        return self.stale_ledger.may_place(draft.time_ms, self._built_ms)

    def _order(self) -> QueueOrder:
        ages, overdue, starts = self.config.ages, self.timers.overdue, self.lifecycle.starts
        return QueueOrder(
            self.state, self.fleet, self.queue, ages, overdue, self._left_too_soon, starts.failed_of,
            starts.has_failed, starts.quick.barred_from,
            DataWaits(self.state, self.fleet, int(self.config.data_wait * 1000)),
        )  # fmt: skip

    def _index_failed(self, of: Job | Worker, raised: Exception) -> None:
        raise raised

    def _left_too_soon(self, num: int, now_ms: int) -> frozenset[int]:
        """Return the workers that are empty by a planned drain before this job's own time limit and grace are over."""
        job = self.state.jobs[num]
        request = self.reader.request_of(job)
        deadline_ms = None if request.deadline_s is None else job.accepted_ms + int(request.deadline_s * 1000)
        run = request.workload
        return self.windows.left_too_soon(run.timeout_s, deadline_ms, run.grace_s, now_ms)

    # ------------------------------------------------------------------------------------------- offer

    def submitted(
        self, tenant: str, body: bytes, unnamed: Callable[[], str], reply: str = "", json: bool = True,
        sequence: int = 0, trace: str = "", batch: Batch | None = None, position: int = 0, came: str = "",
    ) -> Submit:  # fmt: skip
        """Return a request as the event to offer; `unnamed` makes the job's id if the body has none.

        The body then has the person who sent it, as far as the way it `came` proves that; without a way, it keeps what
        it has. Raises Refused if it is not a valid request, has a key twice, names a person itself, or asks for TFLOPS:
        `tflops.resolved` puts percent in their place.
        """
        if person := person_of(came, tenant) if came else "":
            body = signed.signed(body, person)
        name, request, shape = self.reader.read(body)
        if came and request.person != (person or None):
            raise signed.named_itself(request.person)
        if name is None:
            name = unnamed()
        return Submit(
            tenant,
            name,
            body,
            request,
            shape,
            job_key(tenant, name),
            reply,
            json,
            sequence,
            trace,
            batch,
            position,
            came,
        )

    def offer(self, event: Event) -> None:
        """Take an event for the next record. Never blocks; the caller bounds how many events it offers."""
        if type(event) is Submit:  # the most frequent event, without the call of `add`
            self.pending.submits.append(event)
        else:
            self.pending.add(event)

    def offer_load(self, worker_id: str, frame: Load, mono_ms: int) -> None:
        """Apply a load frame to the fleet view at once; load is never recorded in the ledger."""
        self.sessions.load(worker_id, frame, mono_ms)

    def offer_member_load(self, tenant: str, service: str, frame: MemberLoad, mono_ms: int) -> None:
        """Take what a member of a tenant's service has to do, and has done; it is never recorded in the ledger."""
        self.scaling.on_load(tenant, frame, mono_ms)
        self.sleeping.on_load(tenant, frame, mono_ms)

    def refuses(self, tenant: str, verb: str) -> Problem | None:
        """Return with which problem a tenant's requests of this verb are refused unread now; None if they are not.

        Its durable queue then waits.
        """
        if not self.containment.is_aside(self.state.time_ms, "requests", tenant, verb):
            return None
        return unread()

    @property
    def urgent(self) -> bool:
        """Whether events need a record now, not only with the next heartbeat. Renewals alone do not."""
        pending = self.pending
        urgent = pending.submits or pending.cancels.size or pending.urgent or self.indexing.rejects or self.room.is_due
        return bool(
            urgent
            or self._hurry
            or self._crowded
            or self.sleeping.is_called
            or (self._replan and not self.queue.is_empty)
        )

    @property
    def waiting(self) -> int:
        """The number of events offered that are in no record yet, but for those set aside for a while."""
        return len(self.pending)

    @property
    def next_timer_ms(self) -> float:
        """Ledger time of the next timer, in ms; infinity when there is none."""
        return self.timers.next_ms

    # ------------------------------------------------------------------------------------------- build

    def build(self, time_ms: int, mono_ms: int, *, folds: bool = True) -> bytes:
        """Build the next record and return it encoded, at most 512 KiB; `commit` must follow once it is acknowledged.

        The record holds the offered events, due timers and new placements. With nothing to do it is a bare heartbeat.
        It is folded for the next place in the ledger. With `folds` false it may be stored in another one, and `commit`
        then folds it again; until then the state has its decisions, as queue and fleet have, but not its sequence and
        digest. What is raised leaves the state as it was, but for `HalfFolded`: then it must be thrown away.
        """
        assert self._in_flight is None, "one append in flight, never two"
        self.pending.begin_record()
        self._at = ""  # no step that may be left out
        draft = Draft(self.state, max(time_ms, self.state.time_ms))
        flight = self._in_flight = InFlight(draft)
        looked_ms = self._looked_ms
        draft.begin()  # what this raises has changed nothing
        try:
            payload = self._write(flight, mono_ms)
        except BaseException:
            with _whole():
                draft.take_back()
            self._looked_ms = looked_ms
            raise
        if folds:
            with _whole():
                flight.folded = draft.finish()
        self._rid += 1
        return payload

    def _write(self, flight: InFlight, mono_ms: int) -> bytes:
        """Write the record of what was offered and of what is due, and return it encoded.

        Each step reads the state as those before it have left it, so their order is a part of what they decide:

        1. What failed before is held or closed, and a leader's half-life of usage holds: all that follows goes by them.
        2. Workers' frames: what they free is placed in this record. Then each second who was silent, since a renewal in
           this record proves that its worker lives; and what drains, starts that fail and stalls end. Services have as
           many members as are wanted: those that are to start are placed in this record.
        3. Cancels, rejections, timers, and what ends tell those that wait for them, each as far as the bulk part has
           room. They end work, so what they free, and the limits that it counts for, are those of the steps behind.
        4. Orders on jobs and tenants, behind the timers: each replica that waits is in the queue by then, or has a
           timer in the future. A hold keeps what it names from step 7.
        5. Submits, behind the cancels and orders that may refuse them, and behind the ends that make room for them.
        6. What follows from ends, behind all that may end a replica: jobs with too many failures, moves of attempts,
           and the slots that frozen attempts wait for. These change as attempts are to sleep or to run on, and are read
           when jobs are placed.
        7. Placements, with what this record has freed, unless more timers are due: their jobs come first.
        8. Ended jobs leave memory last: no step in this record names them any more.
        """
        draft = flight.draft
        draft.pass_time()
        self.fleet.left.clear()
        self._begin_record(flight)
        if mono_ms - self._built_ms > self.config.renew_s * 1000:
            self.fleet.slept(mono_ms)
        self._built_ms = mono_ms
        if self.state.half_life_ms != self._half_life_ms:
            draft.add(acts.HalfLife(self._half_life_ms))  # a leader counts usage by its own setting
        if self.state.settings != self._settings and draft.may(acts.Settings):
            draft.add(acts.Settings(self._settings[0], dict(self._settings[1])))
        looks, crowded, self._crowded = mono_ms - self._looked_ms >= 1000, self._crowded, False
        orders = self._gather(flight, mono_ms, 0 if crowded else self.state.ceilings.events)
        looks = (looks or crowded) and self._begins("each second", draft)
        if looks:
            self._looked_ms, draft.is_short = mono_ms, False
            self._each_second(flight, mono_ms)
            self._crowded = draft.is_short and not crowded
        draft.begin_bulk()
        self._take_cancels(flight)
        if self._begins("unmatched", draft):
            self.indexing.reject_unmatched(draft)
        if self._begins(TIMERS, draft):
            self.timers.due(draft, self.lifecycle, self.indexing.come_back, self.room.time_came)
        if self.room.is_due and self._begins("telling", draft):
            self.room.write_due(draft, self.indexing.enter)
        if orders:
            self._take_orders(flight, orders)
        self._take_submits(flight)
        self.lifecycle.failing |= draft.failed
        if self.lifecycle.failing and self._begins("giving up", draft):
            self.lifecycle.give_up(draft)
        if looks:
            self._at = "each second"
            self.relocating.pass_time(draft)  # behind all that may end an attempt or its job in this record
        self._settle_frozen(draft)
        is_called, self.sleeping.is_called = self.sleeping.is_called, False
        if (looks or is_called or draft.turned) and self._begins("scaling", draft):
            self.sleeping.pass_time(draft, mono_ms)
            self._settle_frozen(draft)
        self._replan = False
        if self._may_place(draft) and not self.timers.more_are_due() and self._begins(PLACING, draft):
            self.indexing.let_follow(draft)
            self.planner.plan(draft)
            self._replan = self.planner.is_done(draft)
            if draft.ends:
                self._settle_frozen(draft)  # one that was asked to end may need its devices
        self.planner.order.end()
        self.planner.preempting.asked_to_end(draft.ends)
        if self._begins("retention", draft):
            self.retention.forget(draft, self.retention.compact(draft))
        self._at = ""
        flight.record = draft.record(self.leader, self._rid + 1)
        return encode_record(flight.record)

    def _settle_frozen(self, draft: Draft) -> None:
        if self.fleet.with_frozen and self._begins("frozen", draft):
            self._frozen.settle(draft)

    def _begin_record(self, flight: InFlight) -> None:
        """Write what comes before all events in a record; for subclasses."""

    def _begins(self, step: str, draft: Draft) -> bool:
        """Return whether to run this step of `build` now; a step that failed is skipped for a while."""
        self._at = step
        return not self.containment.is_aside(draft.time_ms, "step", step)

    def _gather(self, flight: InFlight, mono_ms: int, most: int) -> list[Order | ChangeOrder | SignalOrder | Execute]:
        """Take offered events other than submits and cancels; return the operators' orders, not carried out yet.

        Orders on jobs and tenants run later because they must see the queue after the backoffs that end in this record.
        They are at most so many (`most`).
        """
        draft, rest = flight.draft, self.pending.rest
        folded: dict[int, int] = {}  # by worker number, the number of its last report frame in this record
        orders: list[Order | ChangeOrder | SignalOrder | Execute] = []
        later: list[FromWorker] = []
        joined: set[str] = set()
        taken = self.pending.taken_rest
        for _ in range(most):
            if not rest or draft.full:
                break
            event = rest.popleft()
            taken.append(event)
            self._at = event
            if isinstance(event, FromWorker):
                if not has_room(self.state, draft, event):
                    rest.appendleft(taken.pop())
                    break
                if isinstance(event.frame, Join) and event.worker in joined:
                    later.append(event)  # one join of a worker in a record: the second waits for the next
                else:
                    self._from_worker(flight, event, folded)
                    if len(flight.joined) > len(joined):
                        joined.add(event.worker)
            elif isinstance(event, ChangeOrder | SignalOrder | Execute) or (
                isinstance(event, Order) and not event.worker
            ):
                orders.append(event)
            else:
                self._take_in(flight, event, mono_ms)
        self._hurry = bool(rest)
        self.pending.put_back(later)
        return orders

    def _take_in(
        self,
        flight: InFlight,
        event: Order | ScheduleOrder | SnapshotTaken | Resign | Ask | Wake | Promising,
        mono_ms: int,
    ) -> None:
        draft, mark = flight.draft, flight.draft.mark()
        if isinstance(event, Order):
            flight.replies.append((self._worker_orders.act(draft, event), event.reply, event.json))
        elif isinstance(event, ScheduleOrder):
            flight.replies.append((self.schedules.act(draft, event), event.reply, event.json))
        elif isinstance(event, Wake):
            jobs = self.services.live(event.tenant, event.service)
            woken = self.scaling.wake(draft, event, jobs, mono_ms) or self.services.answer(event)
            flight.asks.append(Ask(partial(self._woken, event.tenant, woken), event.reply, event.json))
        elif isinstance(event, Promising):
            promise(draft, event)
        elif isinstance(event, SnapshotTaken):
            self._name_snapshot(draft, event)
        elif isinstance(event, Resign):
            draft.add(acts.Resign())
        else:
            flight.asks.append(event)
        draft.came(getattr(event, "came", ""), mark)

    def _woken(self, tenant: str, answer: Answer | Problem) -> Answer | Problem:
        """Return the answer to a caller that found no attempt, with the reason if none has a place on a host now, or
        its devices there."""
        if isinstance(answer, Problem):
            return answer
        woken: Woken = answer.data
        job, explain = self.state.job(tenant, woken.job), self.explain_woken
        if job is None or job.over or any(attempt.mask == attempt.home for attempt in job.attempts):
            explain = None
        if explain is not None and job is not None and (told := explain(job)):
            woken = sent(woken, why=": ".join(filter(None, (told.why or told.means, told.because))))
        return msgspec.structs.replace(answer, ledger=self.state.seq, data=woken)

    def _name_snapshot(self, draft: Draft, event: SnapshotTaken) -> None:
        """Record the newest snapshot and repeat the previous one, so that recovery finds both in one record."""
        if self.state.snapshot is not None:
            draft.add(acts.Snapshot(*self.state.snapshot))
        draft.add(acts.Snapshot(event.name, event.seq, event.digest))

    @property
    def names_snapshot(self) -> bool:
        """Whether the record in flight names a snapshot."""
        flight = self._in_flight
        return flight is not None and any(isinstance(act, acts.Snapshot) for act in flight.draft.acts)

    def unheard(self, ms: int, mono_ms: int) -> None:
        """Note that no worker could be heard for `ms` more, up to now: a lease does not run out by that."""
        self.fleet.unheard(ms, mono_ms)

    def behind(self, mono_ms: int) -> str:
        """Return why this ledger is an older backup, "" if it is not known to be. Call it after an acknowledgement."""
        return self.stale_ledger.behind(mono_ms)

    def look_at_once(self) -> None:
        """Do in the next record what is done once a second."""
        self._looked_ms = -1000

    def seek_at_once(self) -> None:
        """Search in the next record for jobs to end for others, and not once a second only."""
        self.planner.preempting.seek_at_once()

    @property
    def in_flight(self) -> bool:
        """Whether a record was built and is not acknowledged yet."""
        return self._in_flight is not None

    @property
    def seq_in_flight(self) -> int:
        """The sequence that the record in flight has, or is foreseen to have; that of the state if there is none."""
        flight = self._in_flight
        return self.state.seq + (flight is not None and flight.folded is None)

    @property
    def built_ms(self) -> int:
        """The leader's monotonic time when it built its last record."""
        return self._built_ms

    def forget_callers(self) -> None:
        """Drop all pending questions: a copy of the engine that only simulates must not answer clients."""
        self.pending.forget_asks()
        if self._in_flight is not None:
            self._in_flight.asks.clear()

    @property
    def rid(self) -> int:
        """The number of the record in flight, or else of the last one built in this term; 0 before the first."""
        return self._rid

    def _from_worker(self, flight: InFlight, event: FromWorker, folded: dict[int, int]) -> None:
        frame, draft = event.frame, flight.draft
        if isinstance(frame, ReportFrame):
            flight.replies.append((self.sessions.reports(draft, event, frame, folded), event.reply, event.json))
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

    def _take_cancels(self, flight: InFlight) -> None:
        draft, cancels = flight.draft, self.pending.cancels
        if draft.full:
            return
        coming: set[tuple[str, str]] | None = None
        for event in cancels.take(draft):
            self._at = event
            if isinstance(event, QueueRead):
                draft.add(acts.Cursor(event.tenant, event.which, event.through))
                continue
            mark = draft.mark()
            answer = self.admission.cancel(draft, event)
            draft.came(event.came, mark)
            if answer is None:
                cancels.goes_on(event)
                return
            if isinstance(answer, Problem) and answer.code == "not-found":
                if coming is None:
                    coming = {(each.tenant, each.name) for each in self.pending.submits if isinstance(each, Submit)}
                if (event.tenant, event.job) in coming and not event.lifts:
                    cancels.put_off(event)  # a caller may send a submit and its cancel in one breath
                    continue
            flight.replies.append((answer, event.reply, event.json))

    def _take_submits(self, flight: InFlight) -> None:
        submits, taken, draft = self.pending.submits, self.pending.taken_submits, flight.draft
        tenants, held_up = self.state.tenants, self.pending.held_up
        while submits and not draft.full:
            self._at = event = submits[0]
            if held_up and event.tenant in held_up:
                held_up[event.tenant].append(submits.popleft())  # a tenant's requests stay in their order
            elif isinstance(event, Submit):
                known = tenants.get(event.tenant)
                job = known.jobs.get(event.name) if known is not None else None
                if job is not None and self.retention.holds_up(job):
                    held_up[event.tenant] = [submits.popleft()]
                    continue
                taken.append(submits.popleft())
                mark = draft.mark()
                self._submit(flight, event)
                draft.came(event.came, mark)
            elif isinstance(event, QueueRead):
                taken.append(submits.popleft())
                draft.add(acts.Cursor(event.tenant, event.which, event.through))
            else:
                taken.append(submits.popleft())
                self._run_schedule(flight, event)
        self.pending.put_back_held_up()

    def _run_schedule(self, flight: InFlight, event: ScheduleRun) -> None:
        """Make the job of a schedule's run, or note why there is none."""
        schedules, draft = self.schedules, flight.draft
        begun = schedules.begin(draft, event)
        if begun is None:
            answer = schedules.answer_to(schedules.row(event.tenant, event.name), event)
        elif isinstance(begun, str):
            answer = schedules.end(draft, event, begun)
        else:
            name = f"{event.name}-{event.sequence}"
            try:
                submit = self.submitted(event.tenant, begun, lambda: name)
            except Refused as refused:  # an upgrade may refuse what was accepted when it was added
                outcome: NewJob | Accepted | Problem = refused.problem
            else:
                outcome = self._submit(flight, submit)
            why = f"{outcome.code}: {outcome.message}" if isinstance(outcome, Problem) else ""
            if isinstance(outcome, Accepted):
                why = f"there was a job {name} before"
            answer = schedules.end(draft, event, why)
        flight.replies.append((answer, event.reply, event.json))

    def _submit(self, flight: InFlight, event: Submit) -> NewJob | Accepted | Problem:
        """Decide about a request; return the new job, or the answer in its stead."""
        draft, tenant, name, request, planner = flight.draft, event.tenant, event.name, event.request, self.planner
        if tenant in self.fleet.named:
            event.shape = self.reader.shapes.asked_by(event.shape, tenant, request)
        shape = event.shape
        if shape.by_name or shape.same:
            self.fleet.distinguish(shape)
        outcome = self.admission.submit(draft, event, flight.new.values())
        if not isinstance(outcome, NewJob):
            flight.reply_submit(event, outcome)
            return outcome
        trace = event.trace if len(event.trace) <= TRACE_CHARS_MAX else ""
        copies = request.copies
        numbers = ONE if copies == 1 and request.indices is None else request.numbers
        if request.each_worker:
            numbers = numbers_for(self.state, self.fleet, shape, stands=request.stands)
        job = draft.accept(tenant, name, event.body, numbers, trace)
        job.shape, job.key = shape, event.key
        num = job.num
        flight.new[num] = outcome
        if request.fair_key:
            fairkeys.know(self.state, self.state.tenants[tenant], job, request.fair_key, request.fair_weight)
        if outcome.stillborn is not None:
            with draft.by(outcome.by):
                if job.is_listed:
                    draft.moved += job.size
                for first, last in numbers:
                    draft.step(Op.MOVE_FRESH, num, first, outcome.stillborn, last, draft.note(outcome.why))
            return outcome
        planner.placing.arrived(shape, copies)
        if request.hold:
            draft.add(acts.Hold(tenant, num, by_tenant(tenant), "as submitted"))
        if outcome.awaits:
            for other, which in outcome.awaits:
                draft.step(Op.AWAIT, num, 0, other, which)
            flight.awaiting.append(num)
            return outcome
        if not shape.is_gang and (numbers is not ONE or isinstance(request.replicas, Scale)):
            self.indexing.note(job, request, most_of(job, request))
        if self.indexing.why_unqueued(job) is None:
            self.queue.enter(num, (request.priority, shape, owner_of(job) if job.fair else tenant))
        return outcome

    def _take_orders(self, flight: InFlight, orders: list[Order | ChangeOrder | SignalOrder | Execute]) -> None:
        """Carry out orders, each after the backoffs that are due; orders without room wait for the next record."""
        for at, order in enumerate(orders):
            if flight.draft.full or self.timers.more_are_due():
                self.pending.put_back(orders[at:])
                return
            self._at, mark = order, flight.draft.mark()
            if isinstance(order, Execute | SignalOrder):
                self._execute(flight, order)
            elif isinstance(order, ChangeOrder):
                flight.replies.append((self._changing.change(flight.draft, order), order.reply, order.json))
            else:
                flight.replies.append((self.orders.act(flight.draft, order), order.reply, order.json))
            flight.draft.came(order.came, mark)
            self._at = TIMERS
            self.timers.due(flight.draft, self.lifecycle, self.indexing.come_back, self.room.time_came)

    def _execute(self, flight: InFlight, event: Execute | SignalOrder) -> None:
        carried_out = execute if isinstance(event, Execute) else send_signal
        found = carried_out(flight.draft, self.state, event, self.reader.request_of)  # type: ignore[arg-type]
        if isinstance(found, Problem):
            flight.replies.append((found, event.reply, event.json))
        else:
            flight.execs += found.orders
            flight.replies.append((Answer(event.verb, 0, found.given), event.reply, event.json))

    # -------------------------------------------------------------------------------- timers and upkeep

    def _each_second(self, flight: InFlight, mono_ms: int) -> None:
        draft = flight.draft
        silent = self.sessions.silent(mono_ms)
        # of workers whose renewal this record answers, or a later one will
        heard = {(host.worker.id, host.worker.session) for _, _, host in flight.renewed}
        if silent:
            heard |= self.pending.renewing()
        for worker in silent:
            if (worker.id, worker.session) in heard:
                continue
            if not draft.has_room(steps_to_end(worker.attempts.values()), 1):
                break
            self.fleet.leave(worker.num)
            self.lifecycle.lose_worker(draft, worker, "lost", frozenset())
        self.retention.rows_looked = False
        self.forgetting.pass_time(draft)
        self.windows.pass_time(draft)
        self.relocating.end_due(draft)
        self.lifecycle.starts.pass_time(draft)
        self.sessions.stalls.pass_time(draft)
        self.unready.pass_time(draft)
        self.services.pass_time(draft, self.scaling)
        self.admission.forget_cancels(draft)
        self.indexing.queue_rejections()
        self.timers.clear_out()
        if self._begins("scaling", draft):
            self.scaling.pass_time(draft, mono_ms)

    # ------------------------------------------------------------------------------------------ commit

    def prepare_outputs(self, mono_ms: int) -> Outputs | None:
        """Make what is sent once the record in flight is acknowledged, and return it.

        None if no record is in flight that was folded, or it was made before. What this raises ends the term.
        """
        flight = self._in_flight
        if flight is None or flight.folded is None or flight.outputs is not None:
            return None
        return self._make_outputs(flight, flight.folded, mono_ms)

    def commit(self, seq: int, mono_ms: int) -> Outputs:
        """Return what to send now that the record in flight is acknowledged at `seq`.

        Raises `Displaced` if it was folded for another place.
        """
        flight = self._in_flight
        assert flight is not None
        if flight.folded is None:
            flight.folded = self._folded_at(flight, seq)
        elif self.state.seq != seq:
            raise Displaced(f"a record was folded as record {self.state.seq}, and stored as {seq}")
        outputs = flight.outputs or self._make_outputs(flight, flight.folded, mono_ms)
        self._in_flight = None
        heard = [event for event, _, _ in flight.renewed] + [event for event, _ in flight.joined]
        for event in heard:  # a lease is counted from the acknowledgement
            worker = self.state.workers.get(event.worker)
            if worker is not None and (host := self.fleet.hosts.get(worker.num)) is not None:
                host.last_ms = mono_ms
        return outputs

    def _folded_at(self, flight: InFlight, seq: int) -> Folded:
        """Finish a record that may be stored in another place than foreseen: in that, it is folded anew."""
        if flight.draft.seq == seq:
            return flight.draft.finish()
        assert flight.record is not None
        flight.draft.take_back()
        folded = fold(self.state, flight.record, seq)
        for job in folded.accepted:
            submit = flight.new[job.num].submit
            job.shape, job.key = submit.shape, submit.key
            if (waiting := self.queue.waiting.get(job.num)) is not None:
                waiting.job = job
        return folded

    def _make_outputs(self, flight: InFlight, folded: Folded, mono_ms: int) -> Outputs:
        out = flight.outputs = Outputs()
        out.started, out.ended, out.woken = flight.draft.started, folded.ended, flight.draft.woken
        self._follow(flight, folded, out, mono_ms)
        self._answer(flight, folded, out)
        return out

    def _follow(self, flight: InFlight, folded: Folded, out: Outputs, mono_ms: int) -> None:
        """Derive outputs and soft state from the record just folded."""
        state, writer, seq = self.state, self.output_writer, self.state.seq
        if not flight.draft.empty:
            self.admission.moved_seq = seq
        for more in flight.draft.enlarged:
            self.indexing.enter_more(more)
        for scaled in flight.draft.rescaled:
            self.indexing.let_have(scaled)
        for num in flight.awaiting:
            self.room.add(state.jobs[num])
        has_waiting, several = bool(self.room.jobs), self.queue.waiting
        for changed in folded.jobs.values():
            if has_waiting and not changed.live:
                self.room.on_end(changed)
            if (waiting := several.get(changed.num)) is not None:
                self.indexing.follow(changed, waiting)
        for num in flight.draft.avoided:
            if (job := state.jobs.get(num)) is not None:
                self.indexing.reshape(job)
                self.sessions.health.avoids(job)
        if flight.draft.left_queue:
            self.indexing.ended(folded.ended)
        for job, runs in islice(folded.ran.items(), LEARNED_MAX):
            self.durations.learn(job, self.reader.shape_of(job), self.reader.workload_of(job), runs[:LEARNED_A_RECORD])
        wanted = WantedFrames(state, self.subjects, self._frames_failed)
        self.indexing.arm_new(folded.accepted, flight.new)
        writer.answer_submits(flight, folded.accepted, out)
        self._workers(flight, folded, mono_ms)
        wanted.placed(folded.placed)
        for attempt in dict.fromkeys(folded.touched):
            wanted.add(attempt)
        for event, frame, host in flight.renewed:
            try:
                self._renewed(event, frame, host.worker, wanted, out)
            except Exception as raised:
                self._frames_failed(host.worker, raised)
        for event, session in flight.joined:
            writer.answer_join(event, session, wanted, out)
        for attempt, order in flight.execs:
            wanted.execs(attempt.worker, order)
        out.messages += wanted.messages()

    def _renewed(self, event: FromWorker, frame: Renew, worker: Worker, wanted: WantedFrames, out: Outputs) -> None:
        """Answer a renewal, and want again what the worker's list lacks."""
        state, window, is_draining = self.state, worker.window, worker.flag == "draining"
        left_s = None if window is None else max(0.0, (window.leave_ms - state.time_ms) / 1000)
        sets = [gang_sets(attempt) for attempt in worker.attempts.values() if attempt.replica.sets]
        renewed = Renewed(
            frame.n, state.epoch, draining=is_draining, drain_s=left_s if is_draining else None, sets=sets
        )
        out.answers.append((event.reply, encode(renewed, json=event.json)))
        unknown = self.output_writer.want_differences(wanted, worker, frame.held, frame.no, frame.resized)
        self.sessions.note_unknown(worker, unknown)
        if worker.well and frame.well_n < worker.well_n:
            wanted.well(worker)

    def _frames_failed(self, of: Worker, raised: Exception) -> None:
        raise raised

    def _answer(self, flight: InFlight, folded: Folded, out: Outputs) -> None:
        """Add the remaining answers and all events to the outputs of the record just folded."""
        for answer, reply, json in flight.replies:
            if isinstance(answer, Answer):
                answer = msgspec.structs.replace(answer, ledger=self.state.seq)
            out.answers.append((reply, encode(answer, json=json)))
        self.output_writer.add_events(folded, out)
        self.output_writer.add_idle(flight.draft.idle, out)
        self.output_writer.add_stalls(flight.draft.stalls, out)
        for ask in flight.asks:
            answer = ask.answer()
            if answer is not None:
                out.answers.append((ask.reply, encode(answer, json=ask.json)))
        for tenant, service, turn in flight.draft.turns:
            out.turns.append((self.subjects.member(tenant, service, "turn"), encode(turn), ""))
        if flight.draft.acts or folded.was_out:
            out.fleet = fleet_events(self.state, flight.draft.acts, flight.draft.jobs_left, folded.was_out)
        out.answers = [answer for answer in out.answers if answer[0]]  # no reply subject: no answer is wanted

    def _workers(self, flight: InFlight, folded: Folded, mono_ms: int) -> None:
        joined, named = {event.worker for event, _ in flight.joined}, self.fleet.named
        for worker in folded.workers:
            if worker.id in joined and worker.session:
                self.fleet.rules_of(worker.inventory)  # before the hosts are made below
        for tenant in sorted((self.fleet.named - named) & self.state.tenants.keys()):  # once in a term for each tenant
            for job in self.state.tenants[tenant].jobs.values():
                self.indexing.reshape(job)
        for worker in folded.forgotten:
            self.sessions.forget(worker.num)
            self.fleet.forget(worker.num)
        for worker in folded.workers:
            if worker.id in joined and worker.session:
                self.sessions.joined(
                    worker, [(m, self.reader.shape_of_attempt(m)) for m in worker.attempts.values()], mono_ms
                )
                joined.discard(worker.id)
                self._replan = True
            elif not worker.session:
                self.fleet.leave(worker.num)
            else:
                host = self.fleet.hosts.get(worker.num)
                if host is not None:
                    host.closed = worker.flag != "open"
                    self.fleet.opens(worker.num)  # `refresh` misses a shared device that reopens
                    self.fleet.refresh(host)
        for group in self.queue.groups.values() if flight.joined else ():
            self.fleet.distinguish(group.shape)
        self.indexing.follow_fleet()
