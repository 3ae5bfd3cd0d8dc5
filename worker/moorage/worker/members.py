"""The worker's state machine: which members are held, what was said of them, and what to do next. Pure.

`handle(event, now)` returns commands and does nothing else: no await, socket, clock or chance (after dask's
`worker_state_machine`). Everything the leader says is level-triggered and idempotent by member: a placement of what
is held, or was, changes nothing (H8, H10, H11). Facts are the only thing that frees a GPU in the ledger, so each
member leaves exactly one chain of them: refused | claimed withdrawn | claimed started exited [quarantined] freed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from moorage.schemas.alike import Requests
from moorage.schemas.errors import Refused
from moorage.schemas.frames import (
    VERSION,
    End,
    Fact,
    FactAck,
    FactKind,
    Held,
    Joined,
    Place,
    Renewed,
    RollCall,
    Start,
    Wanted,
)
from moorage.worker.fact_outbox import FactOutbox
from moorage.worker.leases.session import NEVER_S, LeaseSession
from moorage.worker.member_messages import (
    HELD_PHASE,
    PHASES,
    AnswerRefused,
    Claims,
    Command,
    Draining,
    Ended,
    EndMember,
    FactsAnswered,
    Forget,
    HealthChanged,
    Leave,
    Log,
    Member,
    MemberName,
    NotFree,
    ProbeFree,
    Quarantine,
    Release,
    Restored,
    SaidWell,
    SayHello,
    SeenFree,
    SendFacts,
    SendGoodbye,
    SendJoin,
    SendRenew,
    SessionLive,
    SetFence,
    Started,
    StartFailed,
    StartMembers,
    StraysOver,
    Stuck,
    SupervisorReplaced,
    Tick,
    Traits,
    TryClaim,
    TurnOver,
    Well,
)

#: held at once; a placement beyond it is refused
MEMBERS_MAX: Final = 16_384
#: remembered ends; beyond it the oldest answered ones become the floor below which everything is over
TOMBSTONES_MAX: Final = 65_536
DETAIL_CHARS_MAX: Final = 200
FREE_WAIT_S: Final = 10.0
PROBE_S: Final = 0.25
PROBE_QUARANTINED_S: Final = 5.0
#: minus SIGKILL: how the end of a member is told that nobody could see
CODE_LOST: Final = -9

_Base = tuple[str, str, int]
_read_request: Final = Requests().read


class Tombstone(NamedTuple):
    """What is left of the newest member over here of one replica: fences up to `fence` are dead."""

    fence: int
    attempt: int
    kind: FactKind
    code: int
    detail: str
    #: the fact frame that says so
    no: int


class Defect(AssertionError):
    """`validate` found the state to contradict itself."""


class Members:
    """All members of one worker in one lease session after the other. Not thread-safe."""

    def __init__(
        self,
        worker: str,
        drivers: Mapping[str, Traits],
        *,
        join_n: int,
        ledger: str = "",
        free_wait_s: float = FREE_WAIT_S,
        tombstones_max: int = TOMBSTONES_MAX,
    ) -> None:
        self.worker = worker
        self.drivers = drivers
        self.session = LeaseSession(join_n, ledger)
        self.outbox = FactOutbox()
        self.held: dict[MemberName, Member] = {}
        self.dropped: Counter[str] = Counter()
        self.draining = False
        self._free_wait_s = free_wait_s
        self._tombstones_max = tombstones_max
        self._tombstones: dict[_Base, Tombstone] = {}
        self._floor_fence = -1
        self._freeing: dict[MemberName, Member] = {}
        self._to_forget: deque[tuple[int, Member]] = deque()
        self._join_facts: list[Fact] = []
        self._join_holding: list[Held] = []
        self._leaving = False
        self._refused_code = ""
        self._commands: list[Command] = []
        self._now = 0.0
        self._table: dict[type, Callable[[Any], None]] = {
            Wanted: self._on_wanted,
            Claims: self._on_claims,
            Started: self._on_started,
            Ended: self._on_ended,
            StartFailed: self._on_start_failed,
            Stuck: self._on_stuck,
            SupervisorReplaced: self._on_supervisor_replaced,
            SeenFree: self._on_seen_free,
            NotFree: self._on_not_free,
            FactAck: self._on_fact_ack,
            Renewed: self._on_renewed,
            Joined: self._on_joined,
            AnswerRefused: self._on_refused,
            RollCall: self._on_roll_call,
            Restored: self._on_restored,
            StraysOver: self._on_strays_over,
            SaidWell: self._on_said_well,
            HealthChanged: self._on_health_changed,
            Tick: self._on_tick,
            TurnOver: self._on_turn_over,
            Leave: self._on_leave,
        }

    # ------------------------------------------------------------------------------------------------- the one door

    def handle(self, event: object, now: float) -> list[Command]:
        """Take one event at `now` (CLOCK_BOOTTIME seconds) and say what to do. Raises KeyError for a foreign type."""
        self._now = now
        commands: list[Command] = []
        self._commands = commands
        if now >= self.session.over_at_s:  # before anything else: what was read after a long stop is stale (H29)
            self._session_over("the lease ran out unanswered")
        self._table[type(event)](event)
        return commands

    def next_deadline_s(self) -> float:
        """When `Tick` is due: CLOCK_BOOTTIME seconds, infinity for never."""
        session = self.session
        deadline_s = min(session.renew_at_s, session.join_at_s, session.over_at_s)
        if self.outbox.in_flight is not None and session.phase == "live":
            deadline_s = min(deadline_s, self.outbox.resend_at_s)
        for member in self._freeing.values():
            deadline_s = min(deadline_s, member.probe_at_s)
        return deadline_s

    def held_list(self) -> list[Held]:
        return [Held(*member.name, HELD_PHASE[member.phase]) for member in self.held.values()]

    # ------------------------------------------------------------------------------------------------ what is wanted

    def _on_wanted(self, frame: Wanted) -> None:
        session = self.session
        if frame.v != VERSION:
            return self._drop("other-version")
        if frame.worker != self.worker:
            return self._drop("other-worker")
        if session.phase != "live" or frame.session != session.session:
            return self._drop("other-session")
        if frame.reign < session.reign:
            return self._drop("lower-reign")
        session.reign = frame.reign
        for end in frame.end:  # ends first: an END and a PLACE of one member mean that it is over (H10)
            self._end(end)
        if frame.well:
            self._commands.append(Well(frame.well, frame.well_n))
        if frame.place:
            self._place_all(frame.place)
        for start in frame.start:
            self._start(start)
        return None

    def _place_all(self, places: list[Place]) -> None:
        if self._leaving or not self.session.accepts_claims(self._now):
            self.dropped["no-claims-now"] += len(places)  # it is sent again, or the lease runs out
            return
        held, tombstones, floor = self.held, self._tombstones, self._floor_fence
        wanted: list[Member] = []
        room = MEMBERS_MAX - len(held)
        if self.outbox.is_full:
            self.dropped["facts-full"] += len(places)
            return
        for place in places:
            tenant, job, replica, attempt, fence = place.tenant, place.job, place.replica, place.attempt, place.fence
            name = (tenant, job, replica, attempt, fence)
            if name in held:
                continue
            tombstone = tombstones.get((tenant, job, replica))
            if tombstone is not None and fence <= tombstone.fence:
                self._say_again(name, tombstone)
                continue
            if fence <= floor:
                self._bury(name, "withdrawn", 0, "forgotten")
                continue
            try:
                request = _read_request(place.body)[1].request
            except Refused as refused:
                self._refuse(name, refused.problem.message)
                continue
            member = Member(name, place, request, self._now)
            if member.driver not in self.drivers:
                self._refuse(name, f"no driver {member.driver}")
            elif len(wanted) >= room:
                self._refuse(name, f"this worker holds {MEMBERS_MAX} members already")
            else:
                held[name] = member
                wanted.append(member)
        if wanted:
            self._commands.append(TryClaim(wanted))

    def _on_claims(self, claims: Claims) -> None:
        to_start: dict[str, list[Member]] = {}
        facts = self.outbox.gathered
        for member, address in claims.granted:
            facts.append(Fact("claimed", *member.name, 0, address))
            if not member.place.hold:
                member.phase = "starting"
                to_start.setdefault(member.driver, []).append(member)
        for member, why in claims.refused:
            del self.held[member.name]
            self._refuse(member.name, why)
        for driver, members in to_start.items():
            self._commands.append(StartMembers(driver, members))

    def _refuse(self, name: MemberName, why: str) -> None:
        self._bury(name, "refused", 0, why[:DETAIL_CHARS_MAX])

    def _start(self, start: Start) -> None:
        name = (start.tenant, start.job, start.replica, start.attempt, start.fence)
        member = self.held.get(name)
        if member is None:
            tombstone = self._tombstones.get(name[:3])
            if tombstone is not None and start.fence <= tombstone.fence:
                self._say_again(name, tombstone)
            elif start.fence <= self._floor_fence:
                self._bury(name, "withdrawn", 0, "forgotten")
            else:
                self._bury(name, "not-held", 0, "")
        elif member.phase == "claimed":
            member.start = start
            member.phase = "starting"
            self._commands.append(StartMembers(member.driver, [member]))

    def _end(self, end: End) -> None:
        name = (end.tenant, end.job, end.replica, end.attempt, end.fence)
        member = self.held.get(name)
        if member is not None:
            grace_s = member.grace_s if end.grace_s is None else end.grace_s
            self._end_member(member, grace_s, end.why or "end", end.notice_s)
            return
        tombstone = self._tombstones.get(name[:3])
        if tombstone is not None and end.fence <= tombstone.fence:
            self._say_again(name, tombstone)
        else:
            self._bury(name, "withdrawn", 0, end.why[:DETAIL_CHARS_MAX])

    def _end_member(self, member: Member, grace_s: float, why: str, notice_s: float = 0.0) -> None:
        if member.phase == "claimed":
            self._commands.append(Release([member]))
            self._over(member, "withdrawn", 0, why)
        elif member.phase in ("starting", "running"):
            self._enter(member, "ending")
            member.grace_s = grace_s
            member.notice_s = notice_s
            member.why = why
            self._commands.append(EndMember(member, grace_s, why, notice_s))
        elif member.phase == "ending" and (grace_s < member.grace_s or notice_s < member.notice_s):
            # a second word may shorten the wait, never lengthen it
            member.grace_s = min(grace_s, member.grace_s)
            member.notice_s = min(notice_s, member.notice_s)
            self._commands.append(EndMember(member, member.grace_s, why, member.notice_s))

    # ------------------------------------------------------------------------------------------ what the drivers say

    def _on_started(self, event: Started) -> None:
        held, facts = self.held, self.outbox.gathered
        for name in event.names:
            member = held.get(name)
            if member is not None and member.phase == "starting":
                member.phase = "running"
                facts.append(Fact("started", *name))
            elif member is not None and member.phase == "ending":  # told to end before it said that it runs
                facts.append(Fact("started", *name))

    def _on_ended(self, event: Ended) -> None:
        for name, code, reason in event.items:
            self._exited(name, code, reason)

    def _on_start_failed(self, event: StartFailed) -> None:
        for name, code, reason in event.items:
            self._exited(name, code, reason)

    def _exited(self, name: MemberName, code: int, reason: str) -> None:
        member = self.held.get(name)
        if member is None or member.phase in ("claimed", "exited"):
            self.dropped["end-of-nothing"] += 1
            return
        member.phase = "exited"
        member.code, member.why = code, reason[:DETAIL_CHARS_MAX]
        self.outbox.gathered.append(Fact("exited", *name, code, member.why))
        self._await_free(member)
        self._join_if_clear()

    def _await_free(self, member: Member) -> None:
        if not member.slots or not self.drivers[member.driver].uses_devices:
            self._freed(member)
            return
        member.probe_at_s = NEVER_S  # until this probe is answered
        member.free_by_s = self._now + self._free_wait_s
        self._freeing[member.name] = member
        self._commands.append(ProbeFree([member]))

    def _on_stuck(self, event: Stuck) -> None:
        for name in event.names:
            member = self.held.get(name)
            if member is None or member.stuck or member.phase not in ("starting", "running", "ending"):
                continue
            member.stuck = True
            self._enter(member, "ending")
            self._quarantine(member, tuple(member.slots))
        self._join_if_clear()

    def _on_supervisor_replaced(self, event: SupervisorReplaced) -> None:
        """A new boot: the ends of what ran come, then a new session. Nobody tells the end of what only waits here."""
        if self.session.phase != "left":
            self.session.lost()
            for member in [member for member in self.held.values() if member.phase == "claimed"]:
                self._end_member(member, 0.0, "supervisor-died")
            self._log(
                "error", "supervisor-died", "the supervisor died, its jobs with it; joining anew once all is clear"
            )
            self._join_if_clear()

    def _on_seen_free(self, event: SeenFree) -> None:
        for name in event.names:
            member = self._freeing.get(name)
            if member is not None:
                self._freed(member)

    def _on_not_free(self, event: NotFree) -> None:
        for name, slots in event.items:
            member = self._freeing.get(name)
            if member is None:
                continue
            if self._now >= member.free_by_s and not member.quarantined:
                self._quarantine(member, slots)
            member.probe_at_s = self._now + (PROBE_QUARANTINED_S if member.quarantined else PROBE_S)

    def _on_said_well(self, event: SaidWell) -> None:
        """Somebody has looked: what lingers on these slots is over, whatever is seen of it here."""
        slots = set(event.slots)
        for member in [member for member in self.held.values() if member.quarantined]:
            if not set(member.quarantined) <= slots:
                continue
            if member.phase != "exited":
                self._log("warning", "said-over", f"{member.name} cannot be ended: over by an operator's word")
                member.phase = "exited"
                member.code, member.why = CODE_LOST, "lost"
                self.outbox.gathered.append(Fact("exited", *member.name, CODE_LOST, "lost"))
            self._freed(member)

    def _on_health_changed(self, event: HealthChanged) -> None:
        if self.session.phase == "live":
            self._renew()

    def _quarantine(self, member: Member, slots: tuple[int, ...]) -> None:
        member.quarantined = slots
        self.outbox.gathered.append(Fact("quarantined", *member.name, 0, ",".join(map(str, slots))))
        self._commands.append(Quarantine(member, slots))

    def _freed(self, member: Member) -> None:
        self._freeing.pop(member.name, None)
        self.outbox.gathered.append(Fact("freed", *member.name))
        self._commands.append(Release([member]))
        self._over(member, "exited", member.code, member.why)

    # --------------------------------------------------------------------------------------------- what is left behind

    def _over(self, member: Member, kind: FactKind, code: int, detail: str) -> None:
        """A held member is over: gone from the table, remembered as a tombstone."""
        del self.held[member.name]
        self._enter(member, "over")
        no = self.outbox.next_no
        if kind == "exited":
            self._remember(member.name, Tombstone(member.fence, member.attempt, kind, code, detail, no))
            if self.drivers[member.driver].remembers:
                self._to_forget.append((no, member))
        else:
            self._bury(member.name, kind, code, detail)
        self._join_if_clear()

    def _bury(self, name: MemberName, kind: FactKind, code: int, detail: str) -> None:
        """Say that a member is over and remember it."""
        self.outbox.gathered.append(Fact(kind, *name, code, detail))
        self._remember(name, Tombstone(name[4], name[3], kind, code, detail, self.outbox.next_no))

    def _remember(self, name: MemberName, tombstone: Tombstone) -> None:
        base = name[:3]
        tombstones = self._tombstones
        if base in tombstones:
            if tombstones[base].fence > tombstone.fence:
                return
            del tombstones[base]  # to the young end
        tombstones[base] = tombstone
        if len(tombstones) > self._tombstones_max:
            oldest = next(iter(tombstones))
            if tombstones[oldest].no <= self.outbox.answered_no:
                # safe at the bound: a placement up to this fence that is not held is answered `withdrawn`, which
                # is true for ever in this session and costs the leader no retry
                self._floor_fence = max(self._floor_fence, tombstones.pop(oldest).fence)

    def _say_again(self, name: MemberName, tombstone: Tombstone) -> None:
        """Answer for what is over, unless that answer is on its way."""
        if tombstone.fence != name[4]:
            self.outbox.gathered.append(Fact("withdrawn", *name))
            return
        if tombstone.no > self.outbox.answered_no:
            return
        self.outbox.gathered.append(Fact(tombstone.kind, *name, tombstone.code, tombstone.detail))
        if tombstone.kind == "exited":
            self.outbox.gathered.append(Fact("freed", *name))
        self._tombstones[name[:3]] = tombstone._replace(no=self.outbox.next_no)

    # ----------------------------------------------------------------------------------------------- the lease session

    def _on_renewed(self, frame: Renewed) -> None:
        if not self._reign_holds(frame.reign):
            return
        if self.session.phase == "live" and self.session.renewed(frame.n):
            self._set_fence()
            if frame.draining != self.draining:
                self.draining = frame.draining
                self._commands.append(Draining(frame.draining))
        else:
            self._drop("answer-not-awaited")

    def _on_joined(self, frame: Joined) -> None:
        session = self.session
        if session.phase != "joining" or frame.n != session.join_n:
            return self._drop("answer-not-awaited")
        if session.ledger and frame.ledger != session.ledger:
            if (self.held or self._join_facts) and frame.formerly != session.ledger:
                # a ledger restored from a backup does not know what runs here (H7): an operator must say which is true
                self._log("error", "another-ledger", f"the leader has ledger {frame.ledger}, ours was {session.ledger}")
                session.join_refused(self._now)
                return None
            session.reign = 0
        if not self._reign_holds(frame.reign):
            return None
        session.ledger = frame.ledger
        session.joined(frame)
        self._refused_code = ""
        self.outbox.joined()
        self._join_facts, self._join_holding = [], []
        self._commands.append(SessionLive(frame.n, frame.ledger))
        self._forget_through(0)
        self._set_fence()
        if self._now >= session.over_at_s:
            self._session_over("the answer to the join came too late")
        else:
            self._renew()
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
                    told = "; ".join(text for text in (event.problem.message, event.problem.next) if text)
                    self._log("error", code, f"this worker may not join: {told}")
                self._refused_code = code
                last = event.problem.allowed.removeprefix(">").strip()
                if code == "stale-join" and last.isdigit():  # the journal was lost: go on from the ledger's number
                    session.join_n = max(session.join_n, int(last))
            return None
        if session.phase != "live":
            return self._drop("answer-not-awaited")
        if code == "session-over":
            self._session_over("the leader says that it is over")
        elif code == "gap":
            # the ledger lacks a frame that was answered: a new session carries on from what is held here
            self._log("error", code, event.problem.message)
            session.lost()
            self._join_if_clear(adopt=True)
        elif code != "not-leading":
            self._log("error", code, f"the leader refused a {event.verb} frame: {event.problem.message}")
        return None

    def _on_roll_call(self, frame: RollCall) -> None:
        if frame.v != VERSION:
            return self._drop("other-version")
        if frame.reign < self.session.reign:
            if self.session.phase == "live":
                self._renew()  # it tells of the newer reign: who leads by an older backup of the ledger must know (H7)
            return self._drop("lower-reign")
        # It names no session, so anybody may have said it: the answer to what it makes us ask tells who reigns.
        self._commands.append(SayHello())
        if self.session.phase == "live":
            self.outbox.hurry(self._now)
            self._renew()
        elif self.session.phase == "joining":
            self._join()
        return None

    def _on_fact_ack(self, frame: FactAck) -> None:
        if not self._reign_holds(frame.reign):
            return
        if self.session.phase == "live" and self.outbox.answered(frame.no):
            self._commands.append(FactsAnswered(frame.no))
            self._forget_through(self.outbox.answered_no)
        else:
            self._drop("answer-not-awaited")

    def _reign_holds(self, reign: int) -> bool:
        if reign < self.session.reign:
            self._drop("lower-reign")
            return False
        self.session.reign = reign
        return True

    def _set_fence(self) -> None:
        self._commands.append(SetFence(self.session.over_at_s, self.session.grace_s))

    def _renew(self) -> None:
        session = self.session
        n = session.renewal(self._now)
        self._commands.append(SendRenew(session.session, n, self.outbox.answered_no, self.held_list()))

    def _session_over(self, why: str) -> None:
        """End everything but what may outlive a partition; the join follows once that is proven gone."""
        grace_s = self.session.grace_s
        self.session.lost()
        self._log("warning", "session-over", why)
        self._end_all(grace_s, "fence", keep=True)
        self._join_if_clear()

    def _end_all(self, grace_s_max: float, why: str, *, keep: bool) -> None:
        for member in list(self.held.values()):
            if member.phase == "claimed" or not (keep and member.keep):
                self._end_member(member, min(member.grace_s, grace_s_max), why)

    def _join_if_clear(self, *, adopt: bool = False) -> None:
        if self.session.phase != "clearing" or self._leaving:
            return
        if not adopt:
            for member in self.held.values():
                if not (member.keep or member.stuck or member.phase == "exited"):
                    return
        if self.session.may_join(self._now):
            self._join()

    def _join(self) -> None:
        again = self.session.join_sent(self._now)
        if not again:
            self._join_facts = self.outbox.start_join()
            self._join_holding = self.held_list()
            # whoever is over by now is told with the join; who ends behind it is remembered in the new session
            self._tombstones.clear()
            self._floor_fence = -1
            self._to_forget = deque((0, member) for _, member in self._to_forget)
        self._commands.append(SendJoin(self.session.join_n, self._join_facts, self._join_holding, again))

    def _forget_through(self, no: int) -> None:
        """`no` 0: what came with the join."""
        forget: list[Member] = []
        while self._to_forget and self._to_forget[0][0] <= no:
            forget.append(self._to_forget.popleft()[1])
        if forget:
            self._commands.append(Forget(forget))

    # ------------------------------------------------------------------------------------------------------ the rest

    def _on_restored(self, event: Restored) -> None:
        """Take up what lives. Facts that were gathered and not yet journalled died with the agent before: say again
        what the ledger may lack; it drops what it has."""
        facts = self.outbox.gathered
        facts += event.facts
        known = {(fact.kind, fact.tenant, fact.job, fact.replica, fact.fence) for fact in event.facts}
        for member, phase, _, detail in event.held:
            self.held[member.name] = member
            member.phase = "running" if phase == "exited" else phase
            base = (member.tenant, member.job, member.replica, member.fence)
            if phase != "exited" and ("claimed", *base) not in known:
                facts.append(Fact("claimed", *member.name, 0, detail))
            if phase == "running" and ("started", *base) not in known:
                facts.append(Fact("started", *member.name))
        for member, phase, code, detail in event.held:
            if phase == "exited":
                self._exited(member.name, code, detail)
        for name in event.withdrawn:
            self._bury(name, "withdrawn", 0, "never started")
        if not event.strays:
            self._on_strays_over(StraysOver())

    def _on_strays_over(self, event: StraysOver) -> None:
        if self.session.phase == "restoring":
            self.session.phase = "clearing"
            self._join_if_clear(adopt=True)

    def _on_tick(self, event: Tick) -> None:
        now, session = self._now, self.session
        if now >= session.renew_at_s:
            self._renew()
        if now >= session.join_at_s:
            self._join()
        if session.phase == "live":
            frame = self.outbox.resend(now)
            if frame is not None:
                self._commands.append(SendFacts(frame, again=True))
        due = [member for member in self._freeing.values() if now >= member.probe_at_s]
        if due:
            for member in due:
                member.probe_at_s = NEVER_S
            self._commands.append(ProbeFree(due))

    def _on_turn_over(self, event: TurnOver) -> None:
        session = self.session
        if session.phase != "live":
            return
        frame = self.outbox.cut(session.session, self._now)
        if frame is not None:
            self._commands.append(SendFacts(frame))
        elif self._leaving and not self.held and self.outbox.is_empty:
            self._commands.append(SendGoodbye(session.session))
            session.lost()
            session.phase = "left"

    def _on_leave(self, event: Leave) -> None:
        self._leaving = True
        self._end_all(NEVER_S, "end", keep=False)
        if self.session.phase != "live":
            self.session.lost()
            self.session.phase = "left"

    def _drop(self, why: str) -> None:
        self.dropped[why] += 1

    def _log(self, level: Any, code: str, text: str) -> None:
        self._commands.append(Log(level, code, text))

    @staticmethod
    def _enter(member: Member, phase: str) -> None:
        if phase not in PHASES[member.phase]:
            raise Defect(f"{member.name}: no step from {member.phase} to {phase}")
        member.phase = phase

    def validate(self) -> None:
        """Raise `Defect` if the state contradicts itself. Cheap enough to run in production after every turn."""
        sharers: dict[int, list[str]] = {}
        for name, member in self.held.items():
            if name != member.name or member.phase == "over":
                raise Defect(f"{name} is held as {member.name} in phase {member.phase}")
            tombstone = self._tombstones.get(name[:3])
            if tombstone is not None and tombstone.fence == member.fence:
                raise Defect(f"{name} is held and over")
            if name in self._freeing and member.phase != "exited":
                raise Defect(f"{name} waits for its memory in phase {member.phase}")
            for slot in member.quarantined or member.slots:
                sharers.setdefault(slot, []).append(member.place.mode)
        for slot, modes in sharers.items():
            if len(set(modes)) > 1 or (modes[0] == "exclusive" and len(modes) > 1):
                raise Defect(f"slot {slot} is held as {modes}")
        for name in self._freeing:
            if name not in self.held:
                raise Defect(f"{name} waits for its memory and is not held")
        session = self.session
        if session.phase == "live" and not session.session:
            raise Defect("a live session without a name")
        if session.phase != "live" and session.renew_at_s != NEVER_S:
            raise Defect("a session that is over is renewed")
        if session.phase in ("live", "left") and session.join_at_s != NEVER_S:
            raise Defect("a join is due in a live session, or after the goodbye")
