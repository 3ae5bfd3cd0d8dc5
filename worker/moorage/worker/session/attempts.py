"""The worker's state machine: it keeps the lease session and the attempts, and decides what to do next. Without I/O.

`handle(event, now)` returns commands and has no effect outside: no await, socket, clock or randomness (modelled on
dask's `worker_state_machine`). The leader's orders are level-triggered and idempotent: to place an attempt that is held
or has ended changes nothing (H8, H10, H11). Only reports free a GPU in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from moorage.schemas.capabilities import Capabilities
from moorage.schemas.errors import Problem, in_a_line
from moorage.schemas.frames import VERSION, Held, Joined, Place, Renewed, Report, ReportAck, RollCall, Wanted
from moorage.worker.devices.readers.base import FREE_WAIT_S
from moorage.worker.session.attempt_messages import (
    LEAVE_GRACE_S_MAX,
    LEAVE_S_MAX,
    AnswerRefused,
    CheckpointStored,
    Claims,
    Command,
    Draining,
    Ended,
    Event,
    FreezeAnswered,
    FreezeDue,
    GiveUp,
    HealthChanged,
    HelloChanged,
    IdleSeen,
    LeaseAnswered,
    Leave,
    Log,
    Metered,
    MpsNotAsked,
    NotFree,
    NotStarted,
    OverGrant,
    OverSeen,
    Replaced,
    ReportsAnswered,
    Restored,
    ResumeDue,
    RunCommands,
    SaidWell,
    SayHello,
    SeenFree,
    SeenReady,
    SendGoodbye,
    SendJoin,
    SendRenew,
    SendReports,
    SessionLive,
    SetFence,
    SetsCount,
    Started,
    StartFailed,
    StraysOver,
    Stuck,
    TellSets,
    Tick,
    TurnOver,
    Well,
)
from moorage.worker.session.attempt_table import AttemptTable, Defect
from moorage.worker.session.lease_session import JOINS_UNANSWERED_TOLD, NEVER_S, LeaseSession
from moorage.worker.session.tombstones import TOMBSTONES_MAX

#: a drain's deadline that seems to move by less than this has not moved: renewals take a while
DRAIN_MOVED_S: Final = 5.0
#: if an id is refused for this many times the leader's wait, another living worker has it
ID_FREE_AFTER: Final = 2


class Attempts:
    """The state machine of one worker: its present lease session, and its attempts in `table`. Not thread-safe."""

    def __init__(
        self,
        worker: str,
        drivers: Mapping[str, Capabilities],
        *,
        join_n: int,
        ledger: str = "",
        free_wait_s: float = FREE_WAIT_S,
        tombstones_max: int = TOMBSTONES_MAX,
    ) -> None:
        self.worker = worker
        self.drivers = drivers
        self.session = LeaseSession(join_n, ledger)
        self.table = AttemptTable(drivers, self._join_if_clear, free_wait_s=free_wait_s, tombstones_max=tombstones_max)
        self.held = self.table.held
        self.outbox = self.table.outbox
        self.dropped = self.table.dropped
        self.draining = False
        self._leave_at_s = NEVER_S  # the deadline of the drain
        self._join_reports: list[Report] = []
        self._join_holding: list[Held] = []
        self.leaving = False
        self._leave_by_s = 0.0  # if it leaves: until when the leader may end its attempts
        self._ends_all_s = NEVER_S  # then this worker ends them itself, once
        self._grace_s_max = LEAVE_GRACE_S_MAX  # and gives each so long at most
        self._tells_until_s = NEVER_S  # once nothing of them runs
        self._told_epoch = 0
        self._hello_changed = False  # since the last join was sent
        #: drivers whose attempts must have ended before the next join (None: all drivers); it takes over the others
        self._to_clear: frozenset[str] | None = frozenset()
        self._refused_code = ""
        self._refused_since_s = 0.0
        self._commands: list[Command] = []
        self._now = 0.0
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Wanted: self._on_wanted,
            Claims: self.table.on_claims,
            Started: self.table.on_started,
            Ended: self.table.on_ended,
            StartFailed: self.table.on_start_failed,
            NotStarted: self.table.on_not_started,
            Stuck: self.table.on_stuck,
            MpsNotAsked: self.table.on_mps_not_asked,
            Replaced: self._on_replaced,
            SeenFree: self.table.on_seen_free,
            NotFree: self.table.on_not_free,
            ReportAck: self._on_report_ack,
            Renewed: self._on_renewed,
            Joined: self._on_joined,
            AnswerRefused: self._on_refused,
            RollCall: self._on_roll_call,
            Restored: self._on_restored,
            StraysOver: self._on_strays_over,
            SaidWell: self.table.on_released,
            HealthChanged: self._on_health_changed,
            HelloChanged: self._on_hello_changed,
            OverGrant: self.table.end_over_grant,
            OverSeen: self.table.on_over_seen,
            FreezeAnswered: self.table.on_freeze_answered,
            LeaseAnswered: self.table.on_lease_answered,
            IdleSeen: self.table.on_idle,
            SeenReady: self.table.on_seen_ready,
            CheckpointStored: self.table.on_checkpoint_stored,
            FreezeDue: self._on_freeze_due,
            ResumeDue: self._on_resume_due,
            Metered: self.table.on_metered,
            Tick: self._on_tick,
            TurnOver: self._on_turn_over,
            Leave: self._on_leave,
        }

    # ------------------------------------------------------------------------------------------------- entry point

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle one event at `now` (CLOCK_BOOTTIME seconds), and return the commands to carry out."""
        self._now = now
        commands = self._commands = self.table.begin(now)
        if now >= self.session.over_at_s:  # checked first: after a long pause of the host, the event is stale (H29)
            self._session_over("the lease ran out, because no renewal was answered")
        self._handlers[type(event)](event)
        return commands

    def next_deadline_s(self) -> float:
        """Return the CLOCK_BOOTTIME second at which the next `Tick` is due; infinity: never.

        It is the earliest of the session's deadlines, the attempts' next probe, and the next time to send reports.
        """
        session = self.session
        deadline_s = min(session.renew_at_s, session.join_at_s, session.over_at_s, self.table.next_probe_s())
        deadline_s = min(deadline_s, self._ends_all_s, self._tells_until_s)
        if session.phase == "live":
            sent = self.outbox.in_flight is not None
            deadline_s = min(deadline_s, self.outbox.resend_at_s if sent else self.outbox.due_s)
        return deadline_s

    @property
    def is_idle(self) -> bool:
        """Whether the worker only renews its session: all attempts run, and the leader has all reports."""
        all_run = all(attempt.phase == "running" for attempt in self.held.values())
        return all_run and self.session.phase == "live" and not self.leaving and self.outbox.is_empty

    # ------------------------------------------------------------------------------------------- the leader's orders

    def _on_wanted(self, frame: Wanted) -> None:
        session = self.session
        if frame.v != VERSION:
            return self._drop("other-version")
        if frame.worker != self.worker:
            return self._drop("other-worker")
        if session.phase != "live" or frame.session != session.session:
            return self._drop("other-session")
        if frame.epoch < session.epoch:
            return self._drop("lower-reign")
        # A higher term counts only once an answer names it. On an open server every client can know the session's name,
        # and one frame with a false term would make this worker ignore its leader for good.
        for end in frame.end:  # ends first: an END and a PLACE of the same attempt mean that it has ended (H10)
            self.table.end(end)
        if frame.well:
            self._commands.append(Well(frame.well, frame.well_n))
        if frame.place:
            self._place(frame.place)
        for start in frame.start:
            self.table.start(start)
        if frame.resize:
            self.table.resize(frame.resize)
        for freeze in frame.freeze:
            self.table.freeze(freeze)
        if frame.execs or frame.signals:
            self._commands.append(RunCommands(frame.execs, frame.signals))
        return None

    def _place(self, places: list[Place]) -> None:
        if self.leaving or not self.session.accepts_claims(self._now):
            self.dropped["no-claims-now"] += len(places)  # the leader sends them again, or the lease runs out
            return
        self.table.place(places)

    # ----------------------------------------------------------------------------------------------- the lease session

    def _on_renewed(self, frame: Renewed) -> None:
        if self.session.phase == "live" and self.session.awaits_renewal(frame.n):
            if not self._epoch_holds(frame.epoch):
                return
            self.session.renewed(frame.n)
            self._set_fence()
            if frame.epoch != self._told_epoch:  # below a feature level, an earlier leader alone knew of their sets
                self._told_epoch = frame.epoch
                self._commands.append(TellSets())
            if frame.sets:
                self._commands.append(SetsCount(frame.sets))
            leave_at_s = self._now + frame.drain_s if frame.drain_s is not None else NEVER_S
            is_moved = (
                frame.draining and abs(leave_at_s - self._leave_at_s) > DRAIN_MOVED_S
            )  # two NEVER_S differ by nan
            if frame.draining != self.draining or is_moved:
                self.draining, self._leave_at_s = frame.draining, leave_at_s
                self._commands.append(Draining(frame.draining, frame.drain_s))
        else:
            self._drop("answer-not-awaited")

    def _on_joined(self, frame: Joined) -> None:
        session = self.session
        if session.phase != "joining" or frame.n != session.join_n:
            return self._drop("answer-not-awaited")
        if session.ledger and frame.ledger != session.ledger:
            if (self.held or self._join_reports) and frame.formerly != session.ledger:
                # a ledger restored from a backup may not know what runs here (H7): an operator must look
                self._log("error", "another-ledger", f"the leader has ledger {frame.ledger}, ours was {session.ledger}")
                session.join_refused(self._now)
                return None
            session.epoch = 0
        if frame.epoch < session.epoch:
            # The join named the higher term, and the leader has recorded the session all the same. The ledger knows
            # this worker, so it is not an older backup (H7). So no leader ever had the higher term.
            self._log(
                "warning",
                "false-term",
                f"the leader of term {frame.epoch} has accepted this worker, which had followed term {session.epoch}:"
                " no leader ever had that term",
            )
        session.ledger = frame.ledger
        session.joined(frame)
        self._refused_code = ""
        self.outbox.joined()
        self._join_reports, self._join_holding = [], []
        self._commands.append(SessionLive(frame.n, frame.ledger))
        self.table.forget_reported()
        self._set_fence()
        if self._now >= session.over_at_s:
            self._session_over("the answer to the join came too late")
        else:
            self._renew()
            self._join_anew()
        return None

    def _on_refused(self, event: AnswerRefused) -> None:
        code = event.problem.code
        session = self.session
        if event.verb == "join":
            if session.phase != "joining" or event.number != session.join_n:
                return self._drop("answer-not-awaited")
            if code != "not-leading":
                session.join_refused(self._now)
                if code != self._refused_code:
                    self._log("error", code, f"this worker may not join: {in_a_line(event.problem)}")
                    self._refused_since_s = self._now
                self._refused_code = code
                self._give_up_if_in_vain(event.problem)
                last = event.problem.allowed.removeprefix(">").strip()
                if code == "stale-join" and last.isdigit():  # the journal was lost: go on from the ledger's number
                    session.join_n = max(session.join_n, int(last))
            return None
        if session.phase != "live":
            return self._drop("answer-not-awaited")
        if code == "session-over":
            self._session_over("the leader says that it is over")
        elif code == "gap":
            # the ledger lacks an acknowledged frame, probably because it was restored from a backup: begin a new
            # session with the held attempts
            self._log("warning", code, "the ledger lacks reports that it had acknowledged: a new session begins")
            session.lost(keeps=True)
            self._to_clear = frozenset()
            self._join_if_clear()
        elif code != "not-leading":
            self._log("error", code, f"the leader refused a {event.verb} frame: {in_a_line(event.problem)}")
        return None

    def _give_up_if_in_vain(self, problem: Problem) -> None:
        """Give up if another worker keeps the id, but not while attempts are held: a lost worker has freed it."""
        again_s = problem.retry_after_s
        waited_s = self._now - self._refused_since_s
        if problem.code == "worker-id-in-use" and again_s and waited_s > ID_FREE_AFTER * again_s and not self.held:
            self._commands.append(GiveUp(problem))

    def _on_roll_call(self, frame: RollCall) -> None:
        if frame.v != VERSION:
            return self._drop("other-version")
        if frame.epoch < self.session.epoch:
            if self.session.phase == "live":
                self._renew()  # it names the later term: a leader with an older backup of the ledger must see it (H7)
            return self._drop("lower-reign")
        # a roll call names no session, so any client may have sent it: its term counts only once a leader answers
        self._commands.append(SayHello())
        if self.session.phase == "live":
            self.outbox.hurry(self._now)
            self._renew()
        elif self.session.phase == "joining":
            self._join()
        return None

    def _on_report_ack(self, frame: ReportAck) -> None:
        if self.session.phase == "live" and self.outbox.awaits(frame.no):
            if not self._epoch_holds(frame.epoch):
                return
            self.outbox.answered()
            self._commands.append(ReportsAnswered(frame.no))
            self.table.forget_reported()
        else:
            self._drop("answer-not-awaited")

    def _epoch_holds(self, epoch: int) -> bool:
        """Return whether an answer is of the highest known term or a higher one, and remember the higher one."""
        if epoch < self.session.epoch:
            self._drop("lower-reign")
            self._log(
                "warning",
                "lower-reign",
                f"dropped an answer of term {epoch}: an answer of term {self.session.epoch} was received before",
            )
            return False
        self.session.epoch = epoch
        return True

    def _set_fence(self) -> None:
        self._commands.append(SetFence(self.session.over_at_s, self.session.grace_s))

    def _renew(self) -> None:
        session = self.session
        n = session.renewal(self._now)
        leaving_s = max(0, int(self._leave_by_s - self._now)) if self.leaving else None
        held, resized = self.table.held_list(), self.table.resized_list()
        self._commands.append(SendRenew(session.session, n, self.outbox.answered_no, held, resized, leaving_s))

    def _session_over(self, why: str) -> None:
        """End all attempts that may not outlive a partition. The next join follows once no process of them is left."""
        grace_s = self.session.grace_s
        self.session.lost()
        self._to_clear = None
        self._log("warning", "session-over", why)
        self.table.end_all(grace_s, "fence", keep=True)
        self._join_if_clear()

    def _join_if_clear(self) -> None:
        if self.session.phase != "clearing" or self._is_out_of_time:
            return
        for attempt in self.held.values():
            must_end = self._to_clear is None or attempt.driver in self._to_clear
            if must_end and not (attempt.keep or attempt.stuck or attempt.phase == "exited"):
                return
        if self.session.may_join(self._now):
            self._join()

    def _join(self) -> None:
        again = self.session.join_sent(self._now)
        if self.session.joins_unanswered == JOINS_UNANSWERED_TOLD and not again:
            self._log(
                "warning", "join-unanswered", "no leader answers this worker's joins: it takes no jobs until one does"
            )
        if not again:
            self._hello_changed = False
            self._join_reports, self._join_holding = self.table.start_join()
        self._commands.append(SendJoin(self.session.join_n, self._join_reports, self._join_holding, again))

    # ------------------------------------------------------------------------------------------------------ the rest

    def _on_restored(self, event: Restored) -> None:
        self.table.restore(event)
        if not event.strays:
            self._on_strays_over(StraysOver())

    def _on_replaced(self, event: Replaced) -> None:
        """Handle the death of a driver's supervisor. The new one reports its attempts' ends; then a new session begins.

        The supervisor did not know the driver's attempts that were not started yet, so they are ended here. Attempts of
        other drivers run on, and the new session takes them over.
        """
        session, driver = self.session, event.driver
        if session.phase != "left":
            if session.phase not in ("clearing", "restoring"):
                self._to_clear = frozenset()
            if self._to_clear is not None:
                self._to_clear |= {driver}
            if session.phase != "restoring":  # while restoring, no join is sent before the unknown attempts have ended
                session.lost(keeps=self._to_clear is not None)
            self.table.supervisor_died(driver)
            self.table.end_claimed(driver, "supervisor-died")
            text = f"the supervisor of the driver {driver} died, its jobs with it; a new session begins once they ended"
            self._log("error", "supervisor-died", text)
            self._join_if_clear()

    def _on_health_changed(self, event: HealthChanged) -> None:
        if self.session.phase == "live":
            self._renew()

    def _on_freeze_due(self, event: FreezeDue) -> None:
        """Report running attempts that do not use their devices. The leader then orders to freeze them."""
        for name, seconds in event.items:
            attempt = self.held.get(name)
            if attempt is not None and attempt.phase == "running" and not attempt.frozen and not attempt.freezing:
                self.outbox.gathered.append(Report("freeze-due", *name, seconds))

    def _on_resume_due(self, event: ResumeDue) -> None:
        """Report frozen attempts that need their devices again. The leader then orders to resume them."""
        for name in event.names:
            attempt = self.held.get(name)
            if attempt is not None and attempt.phase == "running" and attempt.frozen and not attempt.freezing:
                self.outbox.gathered.append(Report("resume-due", *name))

    def _on_hello_changed(self, event: HelloChanged) -> None:
        """Send the new hello, and begin a session that records it in the ledger. Running attempts run on."""
        self._commands.append(SayHello())
        self._hello_changed = True
        self._join_anew()

    def _join_anew(self) -> None:
        if self._hello_changed and self.session.phase == "live" and not self.leaving:
            self.session.lost(keeps=True)
            self._to_clear = frozenset()
            self._join_if_clear()

    def _on_strays_over(self, event: StraysOver) -> None:
        if self.session.phase == "restoring":
            self.session.phase = "clearing"
            self._join_if_clear()

    def _on_tick(self, event: Tick) -> None:
        now, session = self._now, self.session
        if now >= self._ends_all_s:
            self._end_all()
        if now >= session.renew_at_s:
            self._renew()
        if now >= session.join_at_s:
            self._join()
        if session.phase == "live":
            frame = self.outbox.resend(now)
            if frame is not None:
                self._commands.append(SendReports(frame, again=True))
        self.table.probe()

    def _on_turn_over(self, event: TurnOver) -> None:
        session = self.session
        if session.phase == "live":
            frame = self.outbox.cut(session.session, self._now)
            if frame is not None:
                self._commands.append(SendReports(frame))
        if self.leaving and session.phase not in ("restoring", "left"):
            self._leave_if_over(lends=event.lends)

    def _leave_if_over(self, *, lends: bool) -> None:
        """Leave once everything is over and told to the leader, or no time is left to tell it."""
        is_live, is_over = self.session.phase == "live", not (self.table.still_ends or lends)
        if self._is_out_of_time and not self.table.runs and self._tells_until_s == NEVER_S:
            self._tells_until_s = self._now + LEAVE_S_MAX
        gives_up = self._is_out_of_time and ((is_over and not is_live) or self._now >= self._tells_until_s)
        is_told = is_over and self.outbox.is_empty
        if not (is_told or gives_up):
            return
        if is_live and is_told and not self.held:
            self._commands.append(SendGoodbye(self.session.session))
        self._ends_all_s = self._tells_until_s = NEVER_S
        self.session.lost()
        self.session.phase = "left"

    def _on_leave(self, event: Leave) -> None:
        self.leaving = True
        self._grace_s_max = event.grace_s_max
        self._leave_by_s = self._ends_all_s = self._now + event.within_s
        if event.within_s <= 0:
            self._end_all()
        elif self.session.phase == "live":
            self._renew()

    def _end_all(self) -> None:
        """End all attempts of a worker that leaves, as its time is over. No leader asked for that, so it is a loss."""
        self._ends_all_s = NEVER_S
        self.table.end_all(self._grace_s_max, "fence", keep=False)

    @property
    def _is_out_of_time(self) -> bool:
        """Whether the worker leaves, and no longer begins a session in which it could say so."""
        return self.leaving and self._ends_all_s == NEVER_S

    def _drop(self, why: str) -> None:
        self.dropped[why] += 1

    def _log(self, level: Any, code: str, text: str) -> None:
        self._commands.append(Log(level, code, text))

    def validate(self) -> None:
        """Raise `Defect` if the state violates an invariant. Cheap enough to run in production after every turn."""
        self.table.validate()
        session = self.session
        if session.phase == "live" and not session.session:
            raise Defect("a live session without a name")
        if session.phase != "live" and session.renew_at_s != NEVER_S:
            raise Defect("a session that is over is renewed")
        if session.phase in ("live", "left") and session.join_at_s != NEVER_S:
            raise Defect("a join is due in a live session, or after the goodbye")
