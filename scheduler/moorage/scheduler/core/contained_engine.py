"""A leader's engine that contains failures: a request, worker or timer that makes the core raise affects only itself.

A record that could not be built is built again without the event that failed. All tables (queue, reservation, fleet,
ranker) are rebuilt from the state, as in a takeover, and the event is set aside. If the ranker failed, the plain ranker
takes over. The ledger contains nothing of this, but `set_aside` and the failed calls of the ranker are inputs, so a
recording contains and replays them. A failure after the acknowledgement costs only answers, for which clients ask
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from moorage.scheduler.core.containment import PLACING, REBUILT_A_MS, STEPS, TIMERS, Containment, Failure
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Ask, Cancel, Event, FromWorker, Order, QueueRead, Submit
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.core.outputs.in_flight import InFlight
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.core.queue.queue import REPLICA_BITS
from moorage.scheduler.core.rank.falling_back import FallingBack
from moorage.scheduler.core.rank.ranker import Ranker
from moorage.scheduler.core.rank.rankers import maker_of
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Renew
from moorage.schemas.own_class import is_own
from moorage.schemas.reasons import STARTS_FAIL

#: how often one record is rebuilt before the term ends
BUILDS_MAX: Final = 64
#: a record that takes more CPU time than this to build counts as a failure of the ranker
BUILD_MS_MAX: Final = 250
RETRY_AFTER_S: Final = 1.0
#: for how long a leader is careful after its predecessors died; whatever killed them has arrived by then
SAFE_MS: Final = 15_000
BY_SCHEDULER: Final = "scheduler"
CORDON: Final = "cordon"


class ContainedEngine(Engine):
    """The engine of a leader. `containment` has the failures, for the log, the metrics and `doctor`."""

    def _begin(self) -> None:
        self.containment = Containment()
        self._now_ms = self.state.time_ms
        self._owed: list[tuple[Any, str, bool]] = []  # answers to events that were set aside, sent with the next record
        # requests from the durable queue, by tenants in debt
        self._kept_waiting: dict[str, deque[Submit | QueueRead]] = {}
        self._ranker: FallingBack | None = None
        self.failed_builds = 0  # how often the last record was rebuilt
        self.cost_ms = 0  # the time of one rebuild, as measured by the caller of `build`

    # ------------------------------------------------------------------------------------------------ ranking

    def _make_ranker(self) -> Ranker:
        contained = self.containment
        is_plain = contained.is_paused("ranking", self._now_ms) or self._now_ms < contained.safe_until_ms
        name = self.config.ranker
        make = None if is_plain else lambda: maker_of(name)()
        made = self._ranker = FallingBack(make, self._ranking_failed, checks=is_own(name))
        return made

    def _ranking_failed(self, where: str, asked: str, raised: Exception) -> None:
        self.containment.note("ranking", f"ranker {self.config.ranker}, {where}", asked, raised, self._now_ms)
        self.containment.pause("ranking", self._now_ms)

    @property
    def ranker(self) -> FallingBack:
        assert self._ranker is not None
        return self._ranker

    def built_in(self, took_ms: int) -> None:
        """Note the CPU time, in ms, for which the last record was built.

        If it was rebuilt because something failed, the cost of one rebuild is computed from that. Else more than
        `BUILD_MS_MAX` count as a failure of the ranker.
        """
        if self.failed_builds:
            self.cost_ms = took_ms // self.failed_builds
        elif took_ms > BUILD_MS_MAX:
            self.was_slow(took_ms)

    def was_slow(self, took_ms: int) -> None:
        """Use the plain ranker for a while, because a record took too long: a failure of the configured ranker."""
        self.containment.counts["slow"] += 1
        self.ranker.give_up(TimeoutError(f"a record took {took_ms} ms to build"))

    def begin_safe_mode(self) -> None:
        """Use the plain ranker and one event a record for `SAFE_MS`, because earlier leaders died."""
        self.containment.safe_until_ms = self._now_ms + SAFE_MS
        self.alone = True
        self._rebuild(self.built_ms, self._soft())

    # -------------------------------------------------------------------------------------------------- build

    def build(self, time_ms: int, mono_ms: int) -> bytes:
        self._begin_at(time_ms)
        if self.ranker.main is None and self._may_rank():
            self._rebuild(mono_ms, self._soft())
        for left in range(BUILDS_MAX, 0, -1):
            before = self._looked_ms, self._built_ms, self._replan
            try:
                payload = super().build(time_ms, mono_ms)
            except Exception as raised:
                self._looked_ms, self._built_ms, self._replan = before
                aside = self._aside(raised)
                if left == 1 or not aside:
                    raise
                self.set_aside(aside, time_ms, mono_ms, self._soft())
            else:
                flight = self._in_flight
                assert flight is not None
                flight.replies += self._owed
                self._owed = []
                self.failed_builds = BUILDS_MAX - left
                return payload
        raise AssertionError

    def _may_rank(self) -> bool:
        contained, now_ms = self.containment, self._now_ms
        return now_ms >= contained.safe_until_ms and not contained.is_paused("ranking", now_ms)

    def _begin_at(self, time_ms: int) -> None:
        """Apply what depends on time alone; calling it twice changes nothing more."""
        now_ms = self._now_ms = max(time_ms, self.state.time_ms)
        contained = self.containment
        self.alone = now_ms < contained.safe_until_ms or now_ms < contained.alone_until_ms
        if contained.in_debt or self._kept_waiting:
            contained.forget_paid(now_ms)
            self._hold_back(now_ms)
        if contained.failing:
            self._refuse_failing()

    def _aside(self, raised: Exception) -> list[Any]:
        """Return the input of `set_aside` for an exception; empty if it cannot be attributed."""
        at, contained, now_ms, flight = self._at, self.containment, self._now_ms, self._in_flight
        draft = flight.draft if flight is not None else None
        event: Event | None = None if isinstance(at, str) else at
        if at == PLACING and draft is not None and flight is not None:
            group = self.planner.serving
            nums = [] if group is None else list(dict.fromkeys(item >> REPLICA_BITS for item in group.entries))
            if self.planner.placing.item >= 0:
                nums.insert(0, self.planner.placing.item >> REPLICA_BITS)
            new = [num for num in nums if num >= self.state.next_num]
            if new:
                event = list(flight.new.values())[new[0] - self.state.next_num].submit
            elif nums and not contained.is_paused(f"job {nums[0]}", now_ms):
                what = f"job {self._named(nums[0])} and {len(nums) - 1} that ask alike"
                contained.note("job", "placing", what, raised, now_ms)
                return ["jobs", sorted(set(nums))]
        elif at == TIMERS and (timer := self.timers.at) is not None:
            name = f"timer {timer[0]} {timer[1]}"
            if not contained.is_paused(name, now_ms):
                contained.note("timer", TIMERS, f"kind {timer[0]} of {timer[1]}", raised, now_ms)
                return ["timer", name]
        # a step already skipped cannot be what failed
        if event is None and (at not in STEPS or contained.is_paused(at, now_ms)):
            event = self._only_event() if self.alone else None
            if event is None:
                contained.note("step", str(at), "found out by one event a record", raised, now_ms)
                left = [step for step in STEPS if not contained.is_paused(step, now_ms)]
                return ["step", left[0]] if self.alone and left else [] if self.alone else ["alone"]
        if event is None:
            contained.note("step", str(at), "", raised, now_ms)
            return ["step", str(at)]
        return self._aside_of(event, raised)

    def _named(self, num: int) -> str:
        job = self.state.jobs.get(num)
        return str(num) if job is None else f"{job.tenant}/{job.name}"

    def _only_event(self) -> Event | None:
        pending = self.pending
        taken: list[Event] = [*pending.taken_submits, *pending.cancels.taken, *pending.taken_rest]
        found = [event for event in taken if not isinstance(event, QueueRead | Ask)]
        urgent = [event for event in found if not (isinstance(event, FromWorker) and isinstance(event.frame, Renew))]
        return next(iter(urgent or found), None)

    def _aside_of(self, event: Event, raised: Exception) -> list[Any]:
        """Return the input of `set_aside` for an event, naming it by its place in its queue before it was taken."""
        pending, contained, now_ms = self.pending, self.containment, self._now_ms
        if isinstance(event, Submit):
            trace = contained.note("request", "submit", f"{event.tenant}/{event.name}", raised, now_ms)
            if event.sequence:
                contained.traces[event.reply] = trace
            return ["submit", _index(pending.taken_submits, event)]
        if isinstance(event, Cancel):
            trace = contained.note("request", "cancel", f"{event.tenant}/{event.job}", raised, now_ms)
            if event.sequence:
                contained.traces[event.reply] = trace
            mine = [each for each in pending.cancels.taken if each.tenant == event.tenant]
            return ["cancel", event.tenant, _index(mine, event)]
        if isinstance(event, FromWorker):
            contained.note("worker", type(event.frame).__name__, f"worker {event.worker}", raised, now_ms)
        else:
            contained.note("request", type(event).__name__, "", raised, now_ms)
        return ["rest", _index([each for each in pending.taken_rest if not isinstance(each, Ask)], event)]

    # ---------------------------------------------------------------------------------------------- set aside

    def set_aside(self, aside: list[Any], time_ms: int, mono_ms: int, soft: dict[str, Any]) -> None:
        """Continue without what failed, from rebuilt tables. An input of the engine, like `offer`."""
        flight, pending, contained = self._in_flight, self.pending, self.containment
        self._in_flight = None
        self.cost_ms = soft.get("cost_ms", 0)  # measured, so it is part of the input
        if flight is not None:  # None in a replay, which does not build the failed record
            for batch, position in flight.answered:
                batch.take_back(position)
            pending.take_back()
        self._begin_at(time_ms)
        kind, now_ms = aside[0], self._now_ms
        if kind == "submit":
            self._refuse_submit(pending.submits[aside[1]])
        elif kind == "cancel":
            self._refuse(pending.cancels.of(aside[1])[aside[2]])
        elif kind == "rest":
            self._refuse([each for each in pending.rest if not isinstance(each, Ask)][aside[1]])
        elif kind == "jobs":
            for num in aside[1]:
                contained.pause(f"job {num}", now_ms)
        elif kind == "timer":
            contained.pause(aside[1], now_ms)
        elif kind == "step":
            self.put_off_steps[aside[1]] = contained.pause(aside[1], now_ms)
        else:
            contained.alone_until_ms = now_ms + 1_000
            self.alone = True
        self._rebuild(mono_ms, soft)

    def _refuse_submit(self, event: Submit | QueueRead) -> None:
        assert isinstance(event, Submit)
        self.pending.remove(event)
        failed = _failed("request", event.name)
        event.answer(failed, self._owed)
        self._charge(event.tenant)
        self._hold_back(self._now_ms)

    def _refuse(self, event: Event) -> None:
        self.pending.remove(event)
        if isinstance(event, Cancel):
            self._owed.append((_failed("cancel", event.job), event.reply, event.json))
            self._charge(event.tenant)
        elif isinstance(event, FromWorker):
            self._owed.append((_failed("frame"), event.reply, event.json))
            self.containment.worker_failed(event.worker, self._now_ms)
        elif isinstance(event, Order):
            self._owed.append((_failed("order"), event.reply, event.json))

    def _charge(self, tenant: str) -> None:
        """Charge a tenant for its last failure: at least an estimate, since the first failure is not measured."""
        estimate_ms = 1 + (len(self.state.jobs) + len(self.fleet.hosts)) // REBUILT_A_MS
        self.containment.charge(tenant, max(self.cost_ms, estimate_ms), self._now_ms)

    def _soft(self) -> dict[str, Any]:
        """Return what the tables contain that no record implies; a rebuild keeps it."""
        hosts = [
            [
                num, host.heard, host.last_ms, host.load_ms, host.busy, host.waiting, host.sick, host.stale,
                host.util_percent, [[slot, *trouble] for slot, trouble in host.troubles.items()], dict(host.down),
            ]
            for num, host in self.fleet.hosts.items()
        ]  # fmt: skip
        ahead = sorted(self.sessions.ahead.items())
        return {"hosts": hosts, "ahead": ahead, "ranking": self.containment.ranking(), "cost_ms": self.cost_ms}

    def _rebuild(self, mono_ms: int, soft: dict[str, Any]) -> None:
        """Rebuild all tables from the state and from what workers reported in this term."""
        contained, now_ms = self.containment, self._now_ms
        moved_seq, ranking = self.admission.moved_seq, soft["ranking"]
        looked_ms, built_ms = self._looked_ms, self._built_ms
        if ranking[0]:
            contained.set_ranking(ranking[0], ranking[1])
        self._make_parts(mono_ms)
        self.admission.moved_seq = moved_seq
        self._looked_ms, self._built_ms = looked_ms, built_ms
        self.sessions.ahead.update((num, knows) for num, knows in soft["ahead"])
        self.timers.put_off = contained.put_off_timers(now_ms)
        self._indexing.put_off.update(contained.paused("job", now_ms))
        for job in self.state.jobs.values():
            job.shape = None
        self._indexing.resume(mono_ms, again=True)
        for num, heard, last_ms, load_ms, busy, waiting, sick, stale, util_percent, troubles, down in soft["hosts"]:
            host = self.fleet.hosts.get(num)
            if host is None:
                continue
            host.heard, host.last_ms, host.load_ms, host.busy, host.waiting = heard, last_ms, load_ms, busy, waiting
            host.sick, host.stale, host.util_percent = sick, stale, util_percent
            host.troubles = {slot: (health, detail) for slot, health, detail in troubles}
            host.down = {driver: (why, for_s) for driver, (why, for_s) in down.items()}
            host.closed = host.closed or host.worker.id in contained.failing
            self.fleet.refresh(host)
        for event in self.pending.submits:
            if isinstance(event, Submit):
                self._read_again(event)
        for waiting_events in self._kept_waiting.values():
            for event in waiting_events:
                if isinstance(event, Submit):
                    self._read_again(event)
        self._replan = True

    def _read_again(self, event: Submit) -> None:
        _, event.request, event.shape = self.read(event.body)

    # ------------------------------------------------------------------------------------- tenants and workers

    def _hold_back(self, now_ms: int) -> None:
        """Hold back the submits of tenants in debt: those from the durable queue wait, others are refused.

        Those that waited go on once their tenant is no longer in debt. Other tenants' submits are unaffected.
        """
        contained, pending, waiting = self.containment, self.pending, self._kept_waiting
        for tenant in list(waiting):
            if not contained.wait_ms(tenant, now_ms):
                pending.submits.extendleft(reversed(waiting.pop(tenant)))  # before those that came after them
        in_debt = {event.tenant for event in pending.submits if contained.wait_ms(event.tenant, now_ms)}
        if not in_debt:
            return
        left: deque[Submit | QueueRead] = deque()
        for event in pending.submits:
            if event.tenant not in in_debt:
                left.append(event)
            elif isinstance(event, QueueRead) or event.sequence:
                waiting.setdefault(event.tenant, deque()).append(event)
            else:
                wait_s = contained.wait_ms(event.tenant, now_ms) / 1000
                event.answer(_in_debt(event, wait_s), self._owed)
        pending.submits = left

    def task_failed(self, name: str, raised: Exception, now_ms: int) -> None:
        """Count a failed task of the shell."""
        self.containment.note_task(name, raised, now_ms)

    def take_unlogged(self) -> list[Failure]:
        """Return the failures since the last call, for the log."""
        return self.containment.take_unlogged() if self.containment.unlogged else []

    def failures(self, now_ms: int) -> dict[str, Any]:
        """Return the figures of all failures, for `doctor` and the metrics."""
        return self.containment.figures(now_ms)

    def fail_ranking_at(self, calls: Iterable[int]) -> None:
        """Make the ranker fail at these calls in the next record, as it did when that record was recorded."""
        self.ranker.fails_at.update(calls)

    def evidence_of(self, reply: str) -> str:
        """Return the traceback behind the answer to a request of the durable queue that was set aside, and forget it.

        Empty if there is none for this reply subject.
        """
        return self.containment.traces.pop(reply, "")

    def holds_back(self, tenant: str) -> bool:
        """Return whether queued submits of this tenant wait because its earlier requests made the scheduler fail."""
        return tenant in self._kept_waiting

    def _refuse_failing(self) -> None:
        """Refuse the frames of workers on which the scheduler failed repeatedly, so that their leases run out.

        Such workers end their jobs, and count as lost once nothing can run there any more, like silent workers.
        """
        failing, rest = self.containment.failing, self.pending.rest
        for worker_id in list(failing):
            worker = self.state.workers.get(worker_id)
            if worker is None or not worker.session:
                del failing[worker_id]
        refused = [event for event in rest if isinstance(event, FromWorker) and event.worker in failing]
        for event in refused:
            self.pending.remove(event)
            self._owed.append((_failed("frame"), event.reply, event.json))

    def _begin_record(self, flight: InFlight) -> None:
        """Cordon the hosts of failing workers, until an operator reopens them."""
        for worker_id in self.containment.failing:
            worker = self.state.workers[worker_id]
            if worker.flag in ("open", STARTS_FAIL.name) and self._begins(CORDON, flight.draft):
                self.windows.flag(flight.draft, worker, "cordoned", BY_SCHEDULER)

    # -------------------------------------------------------------------------------- after the acknowledgement

    def _follow(self, flight: InFlight, folded: Folded, first: list[Job], out: Outputs, mono_ms: int) -> None:
        try:
            super()._follow(flight, folded, first, out, mono_ms)
        except Exception as raised:
            self.containment.note("output", f"after record {self.state.seq}", "", raised, self._now_ms)
            self.mend(mono_ms, self._soft())

    def complete(self, out: Outputs) -> None:
        try:
            super().complete(out)
        except Exception as raised:
            self.containment.note("output", f"answers of record {self.state.seq}", "", raised, self._now_ms)
            out.answers = [answer for answer in out.answers if answer[0]]

    def mend(self, mono_ms: int, soft: dict[str, Any]) -> None:
        """Rebuild all tables after an exception broke off the work behind a record. An input, like `offer`."""
        self._rebuild(mono_ms, soft)

    def _index_failed(self, what: str, raised: Exception) -> None:
        self.containment.note("job", "index", what, raised, self._now_ms)


def _index(events: Sequence[Event], event: Event) -> int:
    return next(at for at, each in enumerate(events) if each is event)


def _failed(what: str, job: str = "") -> Problem:
    return problem(
        "internal",
        f"the scheduler failed on this {what}: it was set aside, and nothing of it was recorded",
        job=job,
        next="for an operator: the scheduler's log shows where it failed, and `moorage doctor` how often",
    )


def _in_debt(event: Submit, wait_s: float) -> Problem:
    return problem(
        "overloaded",
        f"the scheduler failed on requests of tenant {event.tenant}, so it takes that tenant's next ones one at a time",
        job=event.name,
        next="send again after retry_after_s; for an operator: `moorage doctor`, and the scheduler's log",
        retry_after_s=max(RETRY_AFTER_S, wait_s),
    )
