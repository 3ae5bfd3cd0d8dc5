"""A leader's engine, which one request, worker or timer that makes the core raise does not stop.

What raised is taken back from the state (`ledger/undo.py`), what was at hand is set aside, all tables (queue,
reservation, fleet, timers) are made anew from the state, as in a takeover, and the record is built again. What only
this term knows stays, such as the stalls that were reported:

- a request is answered `internal`, or becomes a dead letter. From the second time within a minute on, the same tenant's
  requests of that verb are refused unread for a minute, since the tables cost the time of all tenants;
- of a queue group, the jobs are held with the reason `internal`, until an operator releases them;
- a worker at whose host a second group fails is cordoned in place of that, until an operator says `uncordon`, if the
  group has room on another host. If it fails there, too, it is held instead;
- the ranker gives way to `pack` until the next term;
- a worker's frames are refused, so its session is ended by its own lease, and its reports wait in its journal. It joins
  again after a pause; the second time it is cordoned, and stays out until an operator says `uncordon`. One whose host
  cannot be put into the tables has none until then, and counts as silent;
- a timer, or a step of the record for which none of these was at hand, waits for a pause. Of placing that is the
  reservation or the search for jobs to end, if these failed: jobs are placed without them.

A failure as the state is taken back, or in the part of the fold that is not, ends the term. One after the fold costs
only answers, for which clients ask again, or the frames of one worker, which its renewals have made again. The ledger
has nothing of this but holds and cordons. It depends on the inputs alone, so a recording raises, and goes on, at the
same places.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from typing import Any, Final, NamedTuple

from moorage.scheduler.core.containment import (
    GROUPS_MAX,
    PARTS_OF_PLACING,
    PAUSE_MS,
    PLACING,
    STEP_PAUSE_MS,
    TIMERS,
    Asker,
    failed,
    unread,
)
from moorage.scheduler.core.engine import Engine, HalfFolded
from moorage.scheduler.core.events import (
    Cancel,
    Event,
    FromWorker,
    Order,
    QueueRead,
    ScheduleRun,
    SnapshotTaken,
    Submit,
)
from moorage.scheduler.core.fleet.host import HEARD, Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.state import Attempt, Job, Worker
from moorage.scheduler.core.lifecycle.sessions import KNOWN
from moorage.scheduler.core.lifecycle.stalls import Stall
from moorage.scheduler.core.lifecycle.starts import FailedStarts
from moorage.scheduler.core.outputs.output_writer import InFlight
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.core.queue.queue import Group
from moorage.scheduler.core.rank.checked import asked, ranker_of
from moorage.scheduler.core.rank.ranker import Choice, Pack, Ranker
from moorage.scheduler.core.schedule.plan import Claim
from moorage.scheduler.core.schedule.preempt import Candidate
from moorage.schemas.actors import SCHEDULER
from moorage.schemas.errors import Problem
from moorage.schemas.operate import ReleaseAct
from moorage.schemas.reasons import STARTS_FAIL

#: from so many failures of one record on, groups that fail wait with all others for the next pass
BUILDS_MAX: Final = 16
WHY_HELD: Final = "internal: the scheduler failed as it placed it"
WHY_CORDONED: Final = "internal: the scheduler failed twice on what this worker sends"
WHY_CLOSED: Final = "internal: the scheduler failed twice as it placed jobs on this worker"


class _Known(NamedTuple):
    """What is known of one term beside the ledger, that no worker reports again, as of the end of a record."""

    stalls: dict[int, dict[int, Stall]]
    starts: FailedStarts
    no_guests: dict[int, int]


class ContainedEngine(Engine):
    """The engine of a leader. `containment` has the failures, for the log, the metrics and `doctor`."""

    #: answers to events that were set aside, sent with the next record
    _owed: list[tuple[Any, str, bool]]
    #: by tenant and verb, requests of the durable queue that wait while such requests are refused
    _wait: dict[tuple[str, str], list[Event]]

    def __init__(self, *begins: Any) -> None:
        self._owed, self._wait = [], {}
        super().__init__(*begins)

    def build(self, time_ms: int, mono_ms: int, *, folds: bool = True) -> bytes:
        now_ms, failures, known = max(time_ms, self.state.time_ms), 0, self._known()
        while True:
            self._refuse_unread(now_ms)
            try:
                payload = super().build(time_ms, mono_ms, folds=folds)
            except HalfFolded:
                raise
            except Exception as raised:
                failures += 1
                at_fault = self._at_fault(raised, now_ms, goes_on=failures < BUILDS_MAX)
                if at_fault is None:
                    raise
                self._take_back()
                for event in at_fault:
                    self._refuse(event)
                self._rebuild(mono_ms, self.fleet.left | self.fleet.hosts, known)
                continue
            assert self._in_flight is not None
            self.containment.blamed.clear()
            self._in_flight.replies += self._owed
            self._owed = []
            return payload

    def _take_back(self) -> None:
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            for batch, position in flight.answered:
                batch.take_back(position)
            self.pending.take_back()

    # --------------------------------------------------------------------------------------------- who is at fault

    def _at_fault(self, raised: Exception, now_ms: int, *, goes_on: bool) -> list[Event] | None:
        """Note what was at hand, and return the events that are at fault; None where nothing can be set aside."""
        at, contained, timer = self._at, self.containment, self.timers.at
        if self._ranker_failed(raised):
            return []
        if at in PARTS_OF_PLACING and goes_on and (found := self._group(raised, now_ms)) is not None:
            return found
        if at == TIMERS and timer is not None and ("timer", *timer) not in contained.until:
            contained.note("timer", TIMERS, f"kind {timer[0]} of {timer[1]}", raised, now_ms)
            contained.set_aside(now_ms + PAUSE_MS, "timer", *timer)
        elif not isinstance(at, str):
            self._failed_on(at, raised, now_ms)
            return [at]
        else:
            contained.note("step", at, "", raised, now_ms)
            if not at or ("step", at) in contained.until:  # it is one of them, nobody knows which
                pending = self.pending
                taken = [*pending.taken_submits, *pending.cancels.taken, *pending.taken_rest]
                return [event for event in taken if hasattr(event, "verb")] or None
            contained.set_aside(now_ms + STEP_PAUSE_MS, "step", at)
        return []

    def _group(self, raised: Exception, now_ms: int) -> list[Event] | None:
        """Set aside the group at hand; return the request that has put it into the queue with this record.

        Of a group that was there before, the jobs are held. Where the host at hand is at fault, neither is set aside.
        None if no group was being served.
        """
        contained, planner = self.containment, self.planner
        new = self._in_flight.new if self._in_flight is not None else {}
        group = _group_at_hand(raised, planner.serving)
        at_hand = [*(group.jobs if group is not None else ()), planner.placing.num]
        # an entry of the queue may outlive its job
        nums = {num: None for num in at_hand if num in new or num in self.state.jobs}
        if not nums:
            return None
        asked: Event | None = None
        if made := next((new[num] for num in nums if num in new), None):
            asked = self._asked_for(made.submit)
            if self._host_at_fault(raised, (made.submit.tenant, made.submit.name), nums, made.submit.shape, now_ms):
                return []
        else:
            job = self.state.jobs[next(iter(nums))]
            if self._host_at_fault(raised, (job.tenant, job.name), nums, self.reader.shape_of(job), now_ms):
                return []
            for order in self.pending.taken_rest:
                if isinstance(order, Order) and isinstance(order.act, ReleaseAct) and order.act.tenant == job.tenant:
                    asked = order
        if asked is not None:
            self._failed_on(asked, raised, now_ms)
            return [asked]
        contained.note("job", PLACING, f"job {job.tenant}/{job.name} and {len(nums) - 1} alike", raised, now_ms)
        contained.jobs |= nums
        return []

    def _host_at_fault(
        self, raised: Exception, whose: Asker, nums: Iterable[int], shape: Shape | None, now_ms: int
    ) -> bool:
        """Return whether the host at hand is at fault rather than the group: then its worker is to be cordoned.

        That needs a second group which has room elsewhere. It is tried there with this very record: if it fails there,
        too, it is at fault, and the host is not.
        """
        contained, host = self.containment, _host_at_hand(raised)
        blamed, worker = contained.blamed.pop(whose, ""), "" if host is None else host.worker.id
        if blamed and worker != blamed:
            contained.cordons.pop(blamed, None)
            return False
        if host is None or worker in contained.cordons:
            return False
        failed_here = contained.failed_at.setdefault(worker, {})
        others = [each for each in failed_here if each != whose]
        if len(failed_here) < GROUPS_MAX:
            failed_here[whose] = tuple(nums)
        if not others or not self._has_room_beside(host, shape):
            return False
        contained.note("worker", PLACING, f"worker {worker}", raised, now_ms)
        contained.cordons[worker], contained.blamed[whose] = WHY_CLOSED, worker
        for num in [num for other in others for num in failed_here[other]]:
            contained.jobs.pop(num, None)  # those that no record holds yet
        return True

    def _has_room_beside(self, host: Host, shape: Shape | None) -> bool:
        """Return whether another host has room for a replica of this shape now."""
        others = (other for other in self.fleet.hosts.values() if other is not host and other.usable)
        return shape is not None and any(other.replicas_of(shape, "now") for other in others)

    def _asked_for(self, submit: Submit) -> Submit | ScheduleRun:
        """Return the event that was offered for a new job: its request, or the run of a schedule that made that."""
        runs = (event for event in self.pending.taken_submits if isinstance(event, ScheduleRun))
        made = (submit.tenant, submit.name)
        return next((run for run in runs if (run.tenant, f"{run.name}-{run.sequence}") == made), submit)

    def _set_worker_aside(self, worker_id: str, now_ms: int) -> None:
        contained = self.containment
        contained.set_aside(now_ms + PAUSE_MS, "worker", worker_id)
        if contained.fails_again(now_ms, "worker", worker_id):
            contained.cordons[worker_id] = WHY_CORDONED

    def _failed_on(self, event: Event, raised: Exception, now_ms: int) -> None:
        """Note an event that failed, and who pays for it."""
        contained = self.containment
        if isinstance(event, FromWorker):
            contained.note("worker", type(event.frame).__name__, f"worker {event.worker}", raised, now_ms)
            self._set_worker_aside(event.worker, now_ms)
            return
        whose, verb, job = _asked(event)
        trace = contained.note("request", verb, f"{whose}/{job}", raised, now_ms)
        if isinstance(event, Submit | Cancel) and event.sequence:
            contained.traces[event.reply] = trace
        if contained.fails_again(now_ms, "requests", whose, verb, within_ms=PAUSE_MS):
            contained.set_aside(now_ms + PAUSE_MS, "requests", whose, verb)

    # ------------------------------------------------------------------------------------------- what is set aside

    def _refuse(self, event: Event) -> None:
        """Take an event out of its queue and answer it.

        A worker sends its frame again until it is taken. The mark of how far a durable queue was read is in the next
        one, too.
        """
        self.pending.remove(event)
        _, verb, job = _asked(event)
        self._answer_now(event, failed("frame" if isinstance(event, FromWorker) else verb, job))

    def _answer_now(self, event: Any, answer: Problem) -> None:
        try:
            if isinstance(event, Submit):
                event.answer(answer, self._owed)
            elif isinstance(event, SnapshotTaken):
                event.is_refused = True
            elif hasattr(event, "reply"):
                self._owed.append((answer, event.reply, event.json))
        except Exception as raised:  # it costs that answer
            self.containment.note("output", "a refusal", _asked(event)[1], raised, self.state.time_ms)

    def _refuse_unread(self, now_ms: int) -> None:
        """Refuse what is set aside; requests of the durable queue wait instead, and come back once that is over."""
        contained, pending = self.containment, self.pending
        if not (contained.until or self._wait):
            return
        contained.pass_time(now_ms)
        for whose, verb in [key for key in self._wait if ("requests", *key) not in contained.until]:
            pending.put_first(whose, verb, self._wait.pop((whose, verb)))
        for kind, whose, *rest in list(contained.until):
            if kind == "worker":
                if not self._is_out(self.state.workers.get(whose), whose, now_ms):
                    del contained.until["worker", whose]
                    continue
                for frame in [each for each in pending.rest if isinstance(each, FromWorker) and each.worker == whose]:
                    self._refuse(frame)
            elif kind == "requests":
                for event in pending.take_of(whose, rest[0]):
                    if isinstance(event, QueueRead | ScheduleRun) or bool(getattr(event, "sequence", 0)):
                        self._wait.setdefault((whose, rest[0]), []).append(event)
                    else:
                        self._answer_now(event, unread(_asked(event)[2]))

    def _is_out(self, worker: Worker | None, worker_id: str, now_ms: int) -> bool:
        """Return whether a worker that was set aside still is: for a pause, until its session is over, and while it is
        cordoned for that.

        Such workers end their jobs, and count as lost once nothing can run there any more, like silent workers.
        """
        if self.containment.is_aside(now_ms, "worker", worker_id):
            return True
        return worker is not None and (bool(worker.session) or (worker.flag, worker.by) == ("cordoned", SCHEDULER))

    def _begin_record(self, flight: InFlight) -> None:
        """Hold the jobs that were set aside, and cordon workers, as far as the record has room."""
        contained, draft = self.containment, flight.draft
        if not (contained.jobs or contained.cordons) or not self._begins("aside", draft):
            return
        for num in list(contained.jobs):
            if draft.full:
                break
            job = self.state.jobs.get(num)
            if job is None or job.over or job.hold is not None:
                del contained.jobs[num]
                continue
            draft.add(acts.Hold(job.tenant, num, SCHEDULER, WHY_HELD))
        for worker_id, why in list(contained.cordons.items()):
            worker = self.state.workers.get(worker_id)
            if worker is not None and worker.flag in ("open", STARTS_FAIL.name):
                self.windows.flag(draft, worker, "cordoned", SCHEDULER, why)
                continue
            del contained.cordons[worker_id]
            contained.forgive("worker", worker_id)

    # ----------------------------------------------------------------------------------------------------- ranking

    def _make_ranker(self) -> Ranker:
        if not self.containment.plain_ranker:
            try:
                return ranker_of(self.config.ranker)
            except Exception as raised:
                self._note_ranker("made", "", raised)
        return Pack()

    def _note_ranker(self, where: str, what: str, raised: Exception) -> None:
        self.containment.plain_ranker = True
        where = f"ranker {self.config.ranker}, {where}"
        self.containment.note("ranking", where, what, raised, self.state.time_ms)

    def _ranker_failed(self, raised: Exception) -> bool:
        """Return whether the configured ranker raised: it may have left its tables half written, so the plain one goes
        on.

        What that one raises on is the fault of what it ranks.
        """
        placing, group = self.planner.placing, self.planner.serving
        asks, placing.asks = placing.asks, ""
        if not asks or self.containment.plain_ranker:
            return False
        self._note_ranker(asks, "" if group is None else asked(group.shape), raised)
        placing.ranker = Pack()
        return True

    # ----------------------------------------------------------------------------------------------------- rebuild

    def _known(self) -> _Known:
        return _Known(self.sessions.stalls.told, deepcopy(self.lifecycle.starts.known), dict(self.fleet.no_guests))

    def _rebuild(self, mono_ms: int, hosts: dict[int, Host], known: _Known) -> None:
        """Rebuild all tables from the state and from what this term knows besides: `known`, what workers reported, as
        `hosts` have it, and what was measured.

        All else is reported again within seconds, or costs no more than a search that is made again.
        """
        sessions, moved_seq, swaps = self.sessions, self.admission.moved_seq, self.sleeping.swaps
        self._make_parts()
        self.admission.moved_seq, self.sleeping.swaps = moved_seq, swaps
        self.fleet.no_guests = dict(known.no_guests)
        self.lifecycle.starts.known = deepcopy(known.starts)
        self.sessions.stalls.told = known.stalls
        for name in KNOWN:
            setattr(self.sessions, name, getattr(sessions, name))
        for job in self.state.jobs.values():
            job.shape = None
        self.indexing.resume(mono_ms, again=True)
        for num, was in hosts.items():
            host = self.fleet.hosts.get(num)
            if host is None:
                continue
            for name in HEARD:
                setattr(host, name, getattr(was, name))
            host.closed = host.closed or ("worker", host.worker.id) in self.containment.until
            try:
                self.fleet.refresh(host)
                self.sessions.stalls.on_renewal(host)
            except Exception as raised:
                self._index_failed(host.worker, raised)
        for event in itertools.chain(self.pending.submits, *self._wait.values()):
            if isinstance(event, Submit):
                _, event.request, event.shape = self.reader.read(event.body)
        self._replan = True

    def _index_failed(self, of: Job | Worker, raised: Exception) -> None:
        contained, now_ms = self.containment, self.state.time_ms
        if self._ranker_failed(raised):
            return
        if isinstance(of, Job):
            contained.note("job", "index", f"job {of.tenant}/{of.name}", raised, now_ms)
            self.queue.drop(of.num)  # it may be in, and would be placed although it is held
            if not of.over:
                contained.jobs[of.num] = None
                self.indexing.leave_out(of)
        else:
            with suppress(Exception):  # its host may be half in the tables
                self.fleet.leave(of.num)
            if of.num not in self.sessions.hostless:  # once for a session, however often the tables are made anew
                contained.note("worker", "index", f"worker {of.id}", raised, now_ms)
                self._set_worker_aside(of.id, now_ms)
                self.sessions.hostless[of.num] = self._built_ms

    # ---------------------------------------------------------------------------------------------- after the fold

    def _follow(self, flight: InFlight, folded: Folded, out: Outputs, mono_ms: int) -> None:
        try:
            super()._follow(flight, folded, out, mono_ms)
        except Exception as raised:
            self.containment.note("output", f"after record {self.state.seq}", "", raised, self.state.time_ms)
            self._rebuild(mono_ms, self.fleet.hosts, self._known())

    def _frames_failed(self, of: Worker, raised: Exception) -> None:
        self.containment.note("output", "frames", f"worker {of.id}", raised, self.state.time_ms)

    def _answer(self, flight: InFlight, folded: Folded, out: Outputs) -> None:
        try:
            super()._answer(flight, folded, out)
        except Exception as raised:
            self.containment.note("output", f"answers of record {self.state.seq}", "", raised, self.state.time_ms)
            out.answers = [answer for answer in out.answers if answer[0]]


def _group_at_hand(raised: Exception, serving: Group | None) -> Group | None:
    """Return the queue group that a pass was looking at as it failed: the innermost one in the frames of that.

    As a pass serves a group it looks at others, too. Of several in one frame it is `serving`, the group being served.
    So it is where the pass was looking at a host or at an attempt for it; None without one, as others would look at
    these, too.
    """
    for frame, _ in reversed(list(traceback.walk_tb(raised.__traceback__))):
        values = list(frame.f_locals.values())
        for value in values:
            if isinstance(value, Group) and hasattr(value, "jobs"):  # else it failed as it was made
                return serving if serving is not None and any(each is serving for each in values) else value
            if isinstance(value, Candidate | Claim):
                return value.group
            if isinstance(value, Host | Attempt):
                return serving
    return serving


def _host_at_hand(raised: Exception) -> Host | None:
    """Return the host in the innermost frame of a failure that has one; None if that has several."""
    for frame, _ in reversed(list(traceback.walk_tb(raised.__traceback__))):
        values = [getattr(each, "host", None) if isinstance(each, Choice) else each for each in frame.f_locals.values()]
        if found := {each.worker.num: each for each in values if isinstance(each, Host)}:
            return next(iter(found.values())) if len(found) == 1 else None
    return None


def _asked(event: Any) -> tuple[str, str, str]:
    """Return whose request an event is, its verb and its job or schedule."""
    what = getattr(event, "asked", event)
    whose = event.operator if isinstance(event, Order) else getattr(event, "tenant", SCHEDULER)
    verb = getattr(event, "verb", type(event).__name__)
    return whose, verb, getattr(what, "job", "") or getattr(what, "name", "")
