"""A leader's engine, which one request, worker or timer that makes the core raise does not stop.

What is at hand when something raises is set aside, and the record is built again without it:

- a request: it is answered `internal`, or becomes a dead letter. From the second time within a minute on, the same
  tenant's requests of that verb are refused unread for a minute;
- a queue group: its jobs are held with the reason `internal`, until an operator releases them;
- the ranker: `pack` takes its place until the next term;
- a worker: its frames are refused, so its session is ended by its own lease, and its reports wait in its journal. It
  joins again after a pause; the second time it stays out until an operator says `uncordon`;
- a timer, or a step of the record for which none of these was at hand, waits for a pause.

Nothing of the failed record stays in the state: all that was folded of it is taken back (`ledger/undo.py`). A failure
within that, or in the part of the fold that is not taken back, ends the term. All tables
(queue, reservation, fleet, timers) are made anew from the state, as in a takeover. A failure after the fold costs only
answers, for which clients ask again. The ledger has nothing of this but the holds. It depends on the inputs alone, so a
recording raises, and goes on, at the same places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, Final

from moorage.scheduler.core.containment import (
    ASIDE,
    PAUSE_MS,
    PLACING,
    STEP_PAUSE_MS,
    STEPS,
    TIMERS,
    Containment,
    Failure,
)
from moorage.scheduler.core.engine import Engine, HalfFolded
from moorage.scheduler.core.events import (
    Arrival,
    Cancel,
    ChangeOrder,
    Event,
    Execute,
    FromWorker,
    Order,
    QueueRead,
    ScheduleOrder,
    ScheduleRun,
    Submit,
    Wake,
)
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.core.outputs.in_flight import InFlight
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.core.rank.falling_back import FallingBack
from moorage.scheduler.core.rank.ranker import Ranker
from moorage.scheduler.core.rank.rankers import ranker_class
from moorage.schemas.actors import SCHEDULER
from moorage.schemas.errors import Problem, problem
from moorage.schemas.operate import ReleaseAct
from moorage.schemas.own_class import is_own
from moorage.schemas.reasons import STARTS_FAIL

#: from so many failures of one record on, groups that fail wait with all others for the next pass
BUILDS_MAX: Final = 16
#: what an event is called in the answer to one that failed
_WHAT: Final[Mapping[type, str]] = {Cancel: "cancel", ChangeOrder: "change", FromWorker: "frame", Wake: "wake"}
WHY_HELD: Final = "internal: the scheduler failed as it placed it"
WHY_CORDONED: Final = "internal: the scheduler failed twice on what this worker sends"


class ContainedEngine(Engine):
    """The engine of a leader. `containment` has the failures, for the log, the metrics and `doctor`."""

    def _begin(self) -> None:
        self.containment = Containment()
        self._now_ms = self.state.time_ms
        self._owed: list[tuple[Any, str, bool]] = []  # answers to events that were set aside, sent with the next record
        #: requests from the durable queue of tenants whose requests of that verb are refused for now
        self._submits_wait: dict[str, deque[Arrival]] = {}
        self._cancels_wait: dict[str, deque[Cancel | QueueRead]] = {}

    # ------------------------------------------------------------------------------------------------ ranking

    def _make_ranker(self) -> Ranker:
        name = self.config.ranker
        make = None if self.containment.plain_ranker else lambda: ranker_class(name)()
        return FallingBack(make, self._ranking_failed, checks=is_own(name))

    def _ranking_failed(self, where: str, asked: str, raised: Exception) -> None:
        self.containment.note("ranking", f"ranker {self.config.ranker}, {where}", asked, raised, self._now_ms)
        self.containment.plain_ranker = True

    # -------------------------------------------------------------------------------------------------- build

    def build(self, time_ms: int, mono_ms: int, *, folds: bool = True) -> bytes:
        self._now_ms = max(time_ms, self.state.time_ms)
        failures = 0
        while True:
            self._begin_at()
            before = self._looked_ms, self._built_ms, self._replan
            try:
                payload = super().build(time_ms, mono_ms, folds=folds)
            except HalfFolded:
                raise
            except Exception as raised:
                failures += 1
                self._looked_ms, self._built_ms, self._replan = before
                if not self._set_aside(raised, goes_on=failures < BUILDS_MAX):
                    raise
                self._rebuild(mono_ms)
            else:
                flight = self._in_flight
                assert flight is not None
                flight.replies += self._owed
                self._owed = []
                return payload

    def _begin_at(self) -> None:
        """Apply what depends on time alone, and answer what is refused unread."""
        contained = self.containment
        if contained.pauses_some:
            contained.pass_time(self._now_ms)
        if contained.refuses_some or self._submits_wait or self._cancels_wait:
            self._refuse_unread()
        if contained.out:
            self._keep_out()

    def _set_aside(self, raised: Exception, *, goes_on: bool) -> bool:
        """Set aside what was at hand, and put everything else back; return False if nothing was."""
        at, contained, now_ms, flight = self._at, self.containment, self._now_ms, self._in_flight
        events: list[Event] = []
        if at == PLACING and goes_on and flight is not None:
            events, found = self._placing(flight, raised), True
        elif at == TIMERS and self.timers.at is not None and self.timers.at not in contained.timers:
            kind, num = self.timers.at
            contained.note("timer", TIMERS, f"kind {kind} of {num}", raised, now_ms)
            contained.put_off_timer((kind, num), now_ms)
            found = True
        elif isinstance(at, str):
            found = at in STEPS and at not in contained.steps
            contained.note("step", at, "", raised, now_ms)
            if found:
                contained.steps[at] = now_ms + STEP_PAUSE_MS
            else:  # it is one of them
                events = self._requests_taken()
                found = bool(events)
        else:
            events, found = [at], True
            self._failed_on(at, raised)
        self._in_flight = None
        if flight is not None:
            for batch, position in flight.answered:
                batch.take_back(position)
            self.pending.take_back()
        for event in events:
            self._refuse(event)
        return found

    def _placing(self, flight: InFlight, raised: Exception) -> list[Event]:
        """Set aside the group being served, and return the request that has put it into the queue with this record.

        Of a group that was there before, the jobs are held. If none was being served, the step is put off.
        """
        contained, planner, now_ms = self.containment, self.planner, self._now_ms
        nums = dict.fromkeys(planner.serving.jobs if planner.serving is not None else ())
        if planner.placing.num >= 0:
            nums[planner.placing.num] = None
        new = [num for num in nums if num >= self.state.next_num]
        if new:
            event = self._asked_for(list(flight.new.values())[new[0] - self.state.next_num].submit)
            self._failed_on(event, raised)
            return [event]
        if not nums:
            contained.note("step", PLACING, "", raised, now_ms)
            contained.steps[PLACING] = now_ms + STEP_PAUSE_MS
            return []
        job = self.state.jobs[next(iter(nums))]
        for order in self._requests_taken():
            if isinstance(order, Order) and isinstance(order.act, ReleaseAct) and order.act.tenant == job.tenant:
                self._failed_on(order, raised)  # it has put them into the queue
                return [order]
        contained.note("job", PLACING, f"job {job.tenant}/{job.name} and {len(nums) - 1} alike", raised, now_ms)
        contained.jobs |= nums
        return []

    def _asked_for(self, submit: Submit) -> Submit | ScheduleRun:
        """Return the event that was offered for a new job: its request, or the run of a schedule that made that."""
        runs = (event for event in self.pending.taken_submits if isinstance(event, ScheduleRun))
        made = (submit.tenant, submit.name)
        return next((run for run in runs if (run.tenant, f"{run.name}-{run.sequence}") == made), submit)

    def _requests_taken(self) -> list[Event]:
        """Return the requests in the record that failed as a whole: it cannot be said which of them it was."""
        pending = self.pending
        taken = [*pending.taken_submits, *pending.cancels.taken, *pending.taken_rest]
        kinds = Submit | Cancel | Order | ChangeOrder | ScheduleOrder | ScheduleRun | Execute | Wake
        return [event for event in taken if isinstance(event, kinds)]

    def _failed_on(self, event: Event, raised: Exception) -> None:
        """Note an event that failed, and who pays for it."""
        contained, now_ms = self.containment, self._now_ms
        if isinstance(event, FromWorker):
            contained.note("worker", type(event.frame).__name__, f"worker {event.worker}", raised, now_ms)
            contained.put_out(event.worker, now_ms)
            return
        whose, verb, job = _asked(event)
        trace = contained.note("request", verb, f"{whose}/{job}", raised, now_ms)
        if isinstance(event, Submit | Cancel) and event.sequence:
            contained.traces[event.reply] = trace
        contained.charge(whose, verb, now_ms)

    def _refuse(self, event: Event) -> None:
        """Take an event out of its queue and answer it. A worker sends its frame again until it is taken."""
        if isinstance(event, QueueRead):
            return
        self.pending.remove(event)
        if isinstance(event, Submit):
            event.answer(_failed("request", event.name), self._owed)
        elif isinstance(event, ChangeOrder | Execute):
            what = _WHAT.get(type(event), "exec")
            self._owed.append((_failed(what, event.asked.job), event.reply, event.json))
        elif isinstance(event, Cancel | Order | ScheduleOrder | ScheduleRun | FromWorker | Wake):
            what = _WHAT.get(type(event), "order")
            job = event.job if isinstance(event, Cancel) else ""
            self._owed.append((_failed(what, job), event.reply, event.json))

    def _begin_record(self, flight: InFlight) -> None:
        """Hold the jobs that were set aside, and cordon the workers that stay out, as far as the record has room."""
        contained, draft = self.containment, flight.draft
        if not (contained.jobs or contained.out) or not self._begins(ASIDE, draft):
            return
        for num in list(contained.jobs):
            if draft.full:
                break
            job = self.state.jobs.get(num)
            if job is None or job.over or job.hold is not None:
                del contained.jobs[num]
                continue
            draft.add(acts.Hold(job.tenant, num, SCHEDULER, WHY_HELD))
        for worker_id, out in contained.out.items():
            worker = self.state.workers.get(worker_id)
            if worker is None or not out.for_good or out.is_cordoned:
                continue
            if worker.flag in ("open", STARTS_FAIL.name):
                self.windows.flag(draft, worker, "cordoned", SCHEDULER, WHY_CORDONED)

    # ---------------------------------------------------------------------------------------------- refused unread

    def _refuse_unread(self) -> None:
        """Refuse the requests of tenants that failed twice with that verb; what came by the durable queue waits."""
        contained, pending, now_ms = self.containment, self.pending, self._now_ms
        for tenant in [name for name in self._submits_wait if not contained.refuses(name, "submit", now_ms)]:
            pending.submits.extendleft(reversed(self._submits_wait.pop(tenant)))  # before those that came after them
        for tenant in [name for name in self._cancels_wait if not contained.refuses(name, "cancel", now_ms)]:
            pending.cancels.put_first(tenant, self._cancels_wait.pop(tenant))
        if not contained.refuses_some:
            return
        submits: deque[Arrival] = deque()
        for event in pending.submits:
            if not contained.refuses(event.tenant, "submit", now_ms):
                submits.append(event)
            elif not isinstance(event, Submit) or event.sequence:
                self._submits_wait.setdefault(event.tenant, deque()).append(event)
            else:
                event.answer(_unread(event.name), self._owed)
        pending.submits = submits
        for tenant in pending.cancels.tenants:
            for cancel in pending.cancels.pull(tenant) if contained.refuses(tenant, "cancel", now_ms) else ():
                if isinstance(cancel, QueueRead) or cancel.sequence:
                    self._cancels_wait.setdefault(tenant, deque()).append(cancel)
                else:
                    self._owed.append((_unread(cancel.job), cancel.reply, cancel.json))
        for order in [event for event in pending.rest if isinstance(event, Order)]:
            if contained.refuses(order.operator, order.verb, now_ms):
                pending.remove(order)
                self._owed.append((_unread(), order.reply, order.json))

    def refuses(self, tenant: str, verb: str) -> Problem | None:
        return _unread() if self.containment.refuses(tenant, verb, self._now_ms) else None

    def _keep_out(self) -> None:
        """Refuse the frames of workers that were set aside, so that their leases run out.

        Such workers end their jobs, and count as lost once nothing can run there any more, like silent workers.
        """
        contained, state = self.containment, self.state
        for worker_id, out in list(contained.out.items()):
            worker = state.workers.get(worker_id)
            if out.for_good and worker is not None:
                if worker.flag != "open":
                    contained.out[worker_id] = out._replace(is_cordoned=True)
                elif out.is_cordoned:
                    contained.let_in(worker_id, forgiven=True)
            elif self._now_ms >= out.until_ms and (worker is None or not worker.session):
                contained.let_in(worker_id, forgiven=False)
        kept = [each for each in self.pending.rest if isinstance(each, FromWorker) and each.worker in contained.out]
        for event in kept:
            self._refuse(event)

    # ------------------------------------------------------------------------------------------------- rebuild

    def _rebuild(self, mono_ms: int) -> None:
        """Rebuild all tables from the state and from what workers reported in this term."""
        contained, hosts, ahead, reports = (
            self.containment,
            self.fleet.hosts,
            self.sessions.ahead,
            self.sessions.reports,
        )
        moved_seq = self.admission.moved_seq
        looked_ms, built_ms = self._looked_ms, self._built_ms
        self._make_parts(mono_ms)
        self.admission.moved_seq = moved_seq
        self._looked_ms, self._built_ms = looked_ms, built_ms
        self.sessions.ahead.update(ahead)
        self.sessions.reports.update(reports)
        for job in self.state.jobs.values():
            job.shape = None
        self._indexing.resume(mono_ms, again=True)
        for num, was in hosts.items():
            host = self.fleet.hosts.get(num)
            if host is None:
                continue
            host.heard, host.last_ms, host.load_ms, host.busy = was.heard, was.last_ms, was.load_ms, was.busy
            host.refused = was.refused
            host.waiting, host.sick, host.stale, host.util_percent = was.waiting, was.sick, was.stale, was.util_percent
            host.troubles, host.down, host.warning = was.troubles, was.down, was.warning
            host.leaves_ms = was.leaves_ms
            host.closed = host.closed or host.worker.id in contained.out
            self.fleet.refresh(host)
        for submits in (self.pending.submits, *self._submits_wait.values()):
            for event in submits:
                if isinstance(event, Submit):
                    _, event.request, event.shape = self.reader.read(event.body)
        self._replan = True

    # --------------------------------------------------------------------------------------------- after the fold

    def _follow(self, flight: InFlight, folded: Folded, first: list[Job], out: Outputs, mono_ms: int) -> None:
        try:
            super()._follow(flight, folded, first, out, mono_ms)
        except Exception as raised:
            self.containment.note("output", f"after record {self.state.seq}", "", raised, self._now_ms)
            self._rebuild(mono_ms)

    def _answer(self, flight: InFlight, folded: Folded, out: Outputs) -> None:
        try:
            super()._answer(flight, folded, out)
        except Exception as raised:
            self.containment.note("output", f"answers of record {self.state.seq}", "", raised, self._now_ms)
            out.answers = [answer for answer in out.answers if answer[0]]

    def _timers_put_off(self) -> Mapping[tuple[int, int], int]:
        return self.containment.timers

    def _jobs_aside(self) -> Collection[int]:
        return self.containment.jobs

    @property
    def puts_off(self) -> bool:
        return bool(self.containment.steps)

    def _put_off_until(self, step: str) -> int:
        return self.containment.steps.get(step, 0)

    def _index_failed(self, job: Job, raised: Exception) -> None:
        self.containment.note("job", "index", f"job {job.tenant}/{job.name}", raised, self._now_ms)
        self.containment.jobs[job.num] = None

    # ------------------------------------------------------------------------------------------------ evidence

    def task_failed(self, name: str, raised: Exception, now_ms: int) -> None:
        """Count a failed task of the shell."""
        self.containment.note_task(name, raised, now_ms)

    def take_unlogged(self) -> list[Failure]:
        """Return the failures since the last call, for the log."""
        return self.containment.take_unlogged() if self.containment.unlogged else []

    def failures(self, now_ms: int) -> dict[str, Any]:
        """Return the figures of all failures, for `doctor` and the metrics."""
        return self.containment.figures(now_ms)

    def evidence_of(self, reply: str) -> str:
        """Return the traceback behind the answer to a request of the durable queue that was set aside, and forget it.

        Empty if there is none for this reply subject.
        """
        return self.containment.traces.pop(reply, "")


def _asked(event: Event) -> tuple[str, str, str]:
    """Return whose request an event is, its verb and its job."""
    match event:
        case Submit():
            return event.tenant, "submit", event.name
        case Cancel():
            return event.tenant, "cancel", event.job
        case Order():
            return event.operator, event.verb, ""
        case ChangeOrder():
            return event.tenant, "change", event.asked.job
        case Execute():
            return event.tenant, "exec", event.asked.job
        case ScheduleOrder():
            return event.tenant, "schedule", event.asked.name
        case ScheduleRun():
            return event.tenant, "schedule", event.name
        case Wake():
            return event.tenant, "wake", ""
        case _:
            return SCHEDULER, type(event).__name__, ""


def _failed(what: str, job: str = "") -> Problem:
    return problem(
        "internal",
        f"the scheduler failed on this {what}: it was set aside, and nothing of it was recorded",
        job=job,
        next="for an operator: the scheduler's log shows where it failed, and `moorage doctor` how often",
    )


def _unread(job: str = "") -> Problem:
    return problem(
        "overloaded",
        "the scheduler failed on earlier requests of this kind, and takes no more of them for now",
        job=job,
        next="send it again later; an operator finds in the scheduler's log where it failed",
        retry_after_s=PAUSE_MS / 1000,
    )
