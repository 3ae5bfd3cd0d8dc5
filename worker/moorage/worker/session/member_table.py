"""Keep the members of one worker (attempts of replicas): their phases, their ends, and their facts (reports).

Without I/O. `members.Members` decides when placements may be accepted and when all members must end. The facts of each
member form exactly one of these chains: refused | claimed withdrawn | claimed refused (this host could not start it) |
claimed started exited [quarantined] freed. A member may be frozen and resumed between started and exited; frozen, it
has no devices, and the pool decides whether it gets them again. One fact, ran, stands for claimed, started and exited,
or for the last two, if started has not left before the exit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.errors import CHECKPOINT_NOT_STORED, ENDED_AS_ASKED, ENDED_FROZEN, MPS_NOT_ASKED, Refused
from moorage.schemas.frames import (
    SUSPECT_S,
    UNKNOWN_MS,
    End,
    Fact,
    FactKind,
    Freeze,
    Held,
    Place,
    Resized,
    Start,
    sum_known,
    used_detail,
)
from moorage.schemas.request_cache import RequestCache
from moorage.schemas.staying import NOT_READY
from moorage.worker.attempt.environment import start_failed
from moorage.worker.devices.readers.base import FREE_WAIT_S, PROBE_QUARANTINED_S, PROBE_S
from moorage.worker.drivers.base import CODE_LOST, LOST
from moorage.worker.drivers.start_codes import CODE_CANNOT_START
from moorage.worker.session.fact_outbox import FactOutbox
from moorage.worker.session.lease_session import NEVER_S
from moorage.worker.session.member_messages import (
    HELD_PHASE,
    PHASES,
    RESTORED_BY,
    Claims,
    Command,
    Ended,
    EndMember,
    Forget,
    FreezeAnswered,
    FreezeMember,
    IdleSeen,
    LeaseAnswered,
    Log,
    Member,
    MemberPhase,
    Metered,
    MpsNotAsked,
    NoteKept,
    NotFree,
    NotStarted,
    OverGrant,
    ProbeFree,
    Quarantine,
    Release,
    ResizeMembers,
    Restored,
    SaidWell,
    SeenFree,
    SeenReady,
    Started,
    StartFailed,
    StartMembers,
    Stuck,
    TryClaim,
    TryLease,
    Unlease,
    WatchReady,
)
from moorage.worker.session.tombstones import TOMBSTONES_MAX, Tombstones

#: most members at once; further placements are refused
MEMBERS_MAX: Final = 16_384
#: bound of the list of held members in a renewal or join: one frame also has room for the facts of a join
HELD_BYTES_MAX: Final = 300 * 1024
#: size of a member in that list, without its names
HELD_BYTES: Final = 28
DETAIL_CHARS_MAX: Final = 200
#: longest grace (SIGTERM to SIGKILL) of a member that uses more memory than its share: the other sharers need it
OVER_GRANT_GRACE_S: Final = 0.5
#: prefix of the reason of such an end
OVER_GRANT: Final = "over-memory: "
#: likewise, of the member whose process made the MPS server fail that it shares
MPS_FAULT: Final = "mps-fault: "
#: prefix of the reason for a member whose devices showed no use for too long
IDLE: Final = "idle: "
#: ends for these reasons are the worker's own decisions, and are told in its words
_OWN_REASONS: Final = (OVER_GRANT, MPS_FAULT, IDLE, NOT_READY)
#: most replicas that are suspected of having killed a supervisor; further ones are not suspected
SUSPECTS_MAX: Final = 4_096
_read_request: Final = RequestCache().read


class Defect(AssertionError):
    """The state violates an invariant, or a member was to take an illegal step to another phase."""


class MemberTable:
    """The held members, and tombstones of members that have ended. It adds what the worker has to do to `commands`.

    `on_member_over` is called whenever a member has exited, is stuck or is removed: after the end of a lease session
    the worker joins the next one only when its members are over.
    """

    def __init__(
        self,
        drivers: Mapping[str, Capabilities],
        on_member_over: Callable[[], None],
        *,
        free_wait_s: float = FREE_WAIT_S,
        tombstones_max: int = TOMBSTONES_MAX,
    ) -> None:
        self.drivers = drivers
        self.outbox = FactOutbox()
        self.tombstones = Tombstones(self.outbox, tombstones_max)
        self.held: dict[AttemptName, Member] = {}
        self.dropped: Counter[str] = Counter()
        self.commands: list[Command] = []
        self._on_member_over = on_member_over
        self._free_wait_s = free_wait_s
        self._now = 0.0
        #: members that have ended, or are frozen, and whose devices are not seen free yet
        self._freeing: dict[AttemptName, Member] = {}
        self._unleased: dict[AttemptName, Member] = {}  # frozen members without devices
        #: replicas (tenant, job, replica) that may have killed a supervisor, and when their last attempt started
        self._suspects: dict[tuple[str, str, int], float] = {}
        self._with_supervisor: set[AttemptName] = set()  # members that ran when their supervisor died
        self._held_bytes = 0  # size of `held_list` in a frame
        self._to_forget: deque[tuple[int, Member]] = deque()

    def begin(self, now: float) -> list[Command]:
        """Begin to handle an event at `now` (CLOCK_BOOTTIME seconds). Return the list that its commands go to."""
        self._now = now
        self.commands = []
        return self.commands

    def held_list(self) -> list[Held]:
        return [
            Held(*member.name, "frozen" if member.frozen and member.phase == "running" else HELD_PHASE[member.phase])
            for member in self.held.values()
        ]

    @property
    def still_ends(self) -> bool:
        """Whether the end of a member, or of its memory on a device, is still to come; not of what is given up."""
        return any(not (member.stuck or member.quarantined) for member in self.held.values())

    @property
    def runs(self) -> bool:
        """Whether a member runs, other than those that cannot be ended."""
        return any(not member.stuck and member.phase != "exited" for member in self.held.values())

    @property
    def longest_grace_s(self) -> float:
        """The longest grace of a held member; 0 without one."""
        return max((member.grace_s for member in self.held.values()), default=0.0)

    # ----------------------------------------------------------------------------------------- the leader's orders

    def place(self, places: Sequence[Place]) -> None:
        """Claim devices for new members, or refuse them; report ends again. Drop all while too many facts wait."""
        if self.outbox.is_full:
            self.dropped["facts-full"] += len(places)
            return
        held, tombstones = self.held, self.tombstones
        wanted: list[Member] = []
        room = MEMBERS_MAX - len(held)
        for place in places:
            name = name_in(place)
            if name in held:
                continue
            if (tombstone := tombstones.of(name)) is not None:
                tombstones.report_again(name, tombstone)
                continue
            if tombstones.is_forgotten(name):
                tombstones.report(name, "withdrawn", 0, "forgotten")
                continue
            try:
                request = _read_request(place.body)[1].request
            except Refused as refused:
                self._refuse(name, refused.problem.message)
                continue
            member = Member(name, place, request, self._now)
            if member.driver not in self.drivers:
                self._refuse(name, f"no driver {member.driver}")
            elif (other := self._suspect_beside(member)) is not None:
                self._refuse(name, f"job {other.job} runs alone first: the supervisor died while both ran")
            elif len(wanted) >= room or self._held_bytes > HELD_BYTES_MAX:
                self._refuse(name, f"this worker has {len(held)} attempts, as many as a frame can list")
            else:
                self._hold(member)
                wanted.append(member)
        if wanted:
            self.commands.append(TryClaim(wanted))

    def on_claims(self, claims: Claims) -> None:
        to_start: dict[str, list[Member]] = {}
        facts = self.outbox.gathered
        for member, address in claims.granted:
            fact = Fact("claimed", *member.name, 0, address)
            if not member.place.hold:
                self.outbox.claimed(fact, self._now)
                self._enter(member, "starting")
                to_start.setdefault(member.driver, []).append(member)
            else:
                facts.append(fact)
        for member, why in claims.refused:
            self._unhold(member)
            self._refuse(member.name, why)
        for member, why in claims.lacking:
            self._unhold(member)
            self.tombstones.report(member.name, "refused", CODE_CANNOT_START, why[:DETAIL_CHARS_MAX])
        for driver, members in to_start.items():
            self.commands.append(StartMembers(driver, members))

    def resize(self, places: Sequence[Place]) -> None:
        """Give held members a new part of their shared devices, unless it is old or the member is just starting.

        The leader repeats its orders.
        """
        resized = []
        for place in places:
            member = self.held.get(name_in(place))
            if (
                member is None
                or member.phase not in ("claimed", "running", "ending")
                or place.resized <= member.place.resized
            ):
                continue
            try:
                member.request = _read_request(place.body)[1].request
            except Refused:  # of a scheduler that is upgraded first
                self.dropped["resize-unreadable"] += 1
                continue
            member.place = replace(member.place, body=place.body, resized=place.resized)
            resized.append(member)
        if resized:
            self.commands.append(ResizeMembers(resized))

    def resized_list(self) -> list[Resized]:
        return [Resized(*member.name, member.place.resized) for member in self.held.values() if member.place.resized]

    def _suspect_beside(self, member: Member) -> Member | None:
        """Return a held suspect outside this suspect's gang, as suspects run one by one; None to start it now."""
        suspects = self._suspects
        if member.name[:3] not in suspects:
            return None
        for other in self.held.values():
            since_s = suspects.get(other.name[:3])
            is_gang = other.place.hold and other.name[:2] == member.name[:2]
            if since_s is not None and self._now < since_s + SUSPECT_S and not is_gang:
                return other
        return None

    def supervisor_died(self, driver: str) -> None:
        """Note the driver's running members. They become suspects once they are reported as lost with it."""
        self._with_supervisor |= {
            name
            for name, member in self.held.items()
            if member.driver == driver and member.phase not in ("claimed", "exited")
        }

    def _judge(self, name: AttemptName, reason: str) -> None:
        """Make a member a suspect if it was lost with its supervisor, and clear it if it ended in another way."""
        if name not in self._with_supervisor or reason != "lost":
            self._suspects.pop(name[:3], None)
        elif len(self._suspects) < SUSPECTS_MAX:
            self._suspects[name[:3]] = NEVER_S  # its next attempt has not begun
        self._with_supervisor.discard(name)

    def _hold(self, member: Member) -> None:
        self.held[member.name] = member
        self._held_bytes += HELD_BYTES + len(member.tenant) + len(member.job)

    def _unhold(self, member: Member) -> None:
        del self.held[member.name]
        self._unleased.pop(member.name, None)
        self._held_bytes -= HELD_BYTES + len(member.tenant) + len(member.job)

    def _refuse(self, name: AttemptName, why: str) -> None:
        self.tombstones.report(name, "refused", 0, why[:DETAIL_CHARS_MAX])

    def start(self, start: Start) -> None:
        """Start a gang's member that has claimed its devices. If it is not held, report that, or how it ended."""
        name = name_in(start)
        member = self.held.get(name)
        if member is None:
            tombstones = self.tombstones
            if (tombstone := tombstones.of(name)) is not None:
                tombstones.report_again(name, tombstone)
            elif tombstones.is_forgotten(name):
                tombstones.report(name, "withdrawn", 0, "forgotten")
            else:
                tombstones.report(name, "not-held", 0, "")
        elif member.phase == "claimed":
            member.start = start
            self._enter(member, "starting")
            self.commands.append(StartMembers(member.driver, [member]))

    def end(self, end: End) -> None:
        """End a member, or withdraw it before its start. If it is not held, report its end (withdrawn if unknown)."""
        name = name_in(end)
        member = self.held.get(name)
        if member is not None:
            grace_s = member.grace_s if end.grace_s is None else end.grace_s
            self._end_member(member, grace_s, end.why or "end", end.notice_s)
        elif (tombstone := self.tombstones.of(name)) is not None:
            self.tombstones.report_again(name, tombstone)
        else:
            self.tombstones.report(name, "withdrawn", 0, end.why[:DETAIL_CHARS_MAX])

    def end_all(self, grace_s_max: float, why: str, *, keep: bool) -> None:
        """End all members; with `keep`, except those that run and may outlive a partition."""
        for member in list(self.held.values()):
            if member.phase == "claimed" or not (keep and member.keep):
                self._end_member(member, min(member.grace_s, grace_s_max), why)

    def end_claimed(self, driver: str, why: str) -> None:
        """End the driver's members that have claimed devices and were not started yet."""
        for member in list(self.held.values()):
            if member.driver == driver and member.phase == "claimed":
                self._end_member(member, 0.0, why)

    def end_over_grant(self, event: OverGrant) -> None:
        """End members that use more memory of a shared device than their share, or whose MPS daemon failed."""
        for name, why in event.items:
            member = self.held.get(name)
            if member is not None and member.phase in ("starting", "running", "ending"):
                self._end_member(member, min(member.grace_s, OVER_GRANT_GRACE_S), why)

    def on_idle(self, event: IdleSeen) -> None:
        """Report members that do not use their devices. End those past their limit."""
        for name, seconds, ends_s, ends in event.items:
            member = self.held.get(name)
            if member is None or member.phase != "running":
                continue
            if ends:
                self._end_member(
                    member, member.grace_s, f"{IDLE}no use of its GPUs for {seconds} s, {ends_s} are allowed"
                )
            else:
                self.outbox.gathered.append(Fact("idle", *name, seconds, str(ends_s) if ends_s else ""))

    def freeze(self, freeze: Freeze) -> None:
        """Freeze or resume a running member, or report that it is in that state, or cannot be brought into it.

        Nothing happens while an earlier order is under way: the leader asks again.
        """
        member = self.held.get(name_in(freeze))
        if member is None or member.phase != "running" or member.freezing or self._is_looked_at(member):
            return
        facts = self.outbox.gathered
        if not member.frozen and not freeze.on:
            facts.append(Fact("resumed", *member.name, freeze.n))
        elif not member.frozen:
            if self.drivers[member.driver].freezes and member.place.mode == "exclusive":
                self._freeze(member, on=True)
            else:
                facts.append(Fact("not-frozen", *member.name, 0, "this worker cannot freeze it"))
        elif member.leased:  # its devices are not seen free yet
            if not freeze.on:
                self._freeze(member, on=False, resumes=freeze.n)
        elif freeze.on or not freeze.n:
            facts.append(Fact("frozen", *member.name))
        elif freeze.n <= member.refused:
            facts.append(Fact("not-resumed", *member.name, freeze.n, "its devices were in use"))
        else:
            member.resumes = freeze.n
            self.commands.append(TryLease(member))

    def on_lease_answered(self, event: LeaseAnswered) -> None:
        """Resume a frozen member that has its devices again; else report that it waits on, unless it is to end."""
        member, why = event.member, event.why
        if not why:
            member.leased = True
            self._unleased.pop(member.name, None)
            self._freeze(member, on=False, resumes=member.resumes)
        elif member.phase == "running":
            self._not_resumed(member, why)

    def _not_resumed(self, member: Member, why: str) -> None:
        member.refused, member.resumes = member.resumes, 0
        self.outbox.gathered.append(Fact("not-resumed", *member.name, member.refused, why[:DETAIL_CHARS_MAX]))

    def _freeze(self, member: Member, *, on: bool, resumes: int = 0) -> None:
        self._freeing.pop(member.name, None)
        member.freezing, member.resumes = True, resumes
        self.commands.append(FreezeMember(member, on))

    def _is_looked_at(self, member: Member) -> bool:
        """Return whether a look at the member's devices is under way: what it sees must not be about another state."""
        return member.name in self._freeing and member.probe_at_s == NEVER_S

    def on_freeze_answered(self, event: FreezeAnswered) -> None:
        """Report whether members were resumed; look at the devices of those that were frozen, and report these later.

        A member that is broken is lost, and is ended.
        """
        for name, now, why in event.items:
            member = self.held.get(name)
            if member is None or member.phase not in ("running", "ending"):
                continue
            was, member.frozen, member.freezing = member.frozen, now == "frozen", False
            member.freezes += member.frozen and not was
            if not member.frozen:
                self._freeing.pop(name, None)
                self._unleased.pop(name, None)
            if now == "broken":
                self.commands.append(Log("error", "not-resumed", f"{member.name} is lost while it is frozen: {why}"))
                self._end_member(member, 0.0, LOST)
            elif member.frozen and member.phase == "ending" and not was:
                self._resume_to_end(member)
            elif member.frozen:
                self._look_at_frozen(member, self._free_wait_s)
            elif not member.leased:  # the record of an earlier agent said that it was, and another may have a slot
                self._end_member(member, 0.0, LOST)
            elif member.phase == "running":
                kind: FactKind = "resumed" if member.resumes else "not-frozen"
                self.outbox.gathered.append(Fact(kind, *name, member.resumes, why[:DETAIL_CHARS_MAX]))

    def _look_at_frozen(self, member: Member, wait_s: float) -> None:
        member.probe_at_s, member.free_by_s = NEVER_S, self._now + wait_s
        self._freeing[member.name] = member
        self.commands.append(ProbeFree([member]))

    def _give_up_devices(self, member: Member) -> None:
        """End the lease of a frozen member, whose devices were seen free, and report that it is frozen."""
        del self._freeing[member.name]
        member.leased = False
        self._unleased[member.name] = member
        self.commands.append(Unlease(member))
        if member.resumes:
            self._not_resumed(member, "its processes did not run on")
        else:
            self.outbox.gathered.append(Fact("frozen", *member.name))
        self._lease_to_end()

    def _lease_to_end(self) -> None:
        """Have frozen members that are to end claim their devices, since others have left some."""
        for member in list(self._unleased.values()):
            self._resume_to_end(member)

    def _resume_to_end(self, member: Member) -> None:
        """Resume a frozen member that is to end as soon as it has its devices: it may have work there to save.

        Its grace goes on meanwhile. A look at its devices that is under way comes to an end first.
        """
        if member.phase != "ending" or not member.frozen or member.freezing or member.grace_s <= 0:
            return
        if not member.leased:
            self.commands.append(TryLease(member))
        elif not self._is_looked_at(member):
            self._freeze(member, on=False)

    def on_metered(self, event: Metered) -> None:
        """Add to the members' use of their devices."""
        for name, gpu_ms, mib_ms in event.items:
            member = self.held.get(name)
            if member is not None:
                before = member.used or (UNKNOWN_MS, 0)
                member.used = sum_known(before[0], gpu_ms), before[1] + mib_ms

    def _end_member(self, member: Member, grace_s: float, why: str, notice_s: float = 0.0) -> None:
        if member.phase == "claimed":
            self.commands.append(Release([member]))
            self._remove(member, "withdrawn", 0, why)
        elif member.phase in ("starting", "running"):
            self._enter(member, "ending")
            member.grace_s = grace_s
            member.notice_s = notice_s
            member.why = why
            self.commands.append(EndMember(member, grace_s, why, notice_s))
            self._resume_to_end(member)
        elif member.phase == "ending" and (grace_s < member.grace_s or notice_s < member.notice_s):
            # a second END may shorten the wait, but never lengthen it
            member.grace_s = min(grace_s, member.grace_s)
            member.notice_s = min(notice_s, member.notice_s)
            self.commands.append(EndMember(member, member.grace_s, why, member.notice_s))

    # -------------------------------------------------------------------------------------- reports of the drivers

    def on_started(self, event: Started) -> None:
        held, outbox = self.held, self.outbox
        for name in event.names:
            member = held.get(name)
            if member is None or member.phase not in ("starting", "ending"):
                continue
            if member.phase == "starting":  # otherwise it was asked to end before its start was reported
                self._enter(member, "running")
            member.began_s = self._now
            if name[:3] in self._suspects:
                self._suspects[name[:3]] = self._now
            outbox.started(Fact("started", *name, 0, member.address), self._now)
            self._watch_ready(member)

    def _watch_ready(self, member: Member) -> None:
        if member.phase == "running" and member.request.workload.ready is not None:
            self.commands.append(WatchReady(member))

    def on_seen_ready(self, event: SeenReady) -> None:
        """Report members that are ready, and those that are not any more; end those that never were in time."""
        for name, why, ends in event.items:
            member = self.held.get(name)
            if member is None or member.phase != "running":
                continue
            is_ready = not why
            if ends:
                self._end_member(member, member.grace_s, f"{NOT_READY}: {why}")
            elif member.ready is not is_ready and (is_ready or member.was_ready):
                kind: FactKind = "ready" if is_ready else "not-ready"
                self.outbox.gathered.append(Fact(kind, *name, 0, why[:DETAIL_CHARS_MAX]))
                member.ready = is_ready
                if not member.was_ready:
                    member.was_ready = True
                    self.commands.append(NoteKept(member))

    def on_ended(self, event: Ended) -> None:
        for name, code, reason in event.items:
            self._exited(name, code, reason)

    def on_start_failed(self, event: StartFailed) -> None:
        for name, code, why in event.items:
            self._exited(name, code, start_failed(why))

    def on_not_started(self, event: NotStarted) -> None:
        """Report these members as refused: the leader places them again, and this costs no retry."""
        for name, why in event.items:
            member = self.held.get(name)
            if member is not None and member.phase == "running":  # its start was reported before it failed after all
                self._exited(name, event.code or CODE_CANNOT_START, why)
                continue
            if member is None or member.phase not in ("starting", "ending"):
                self.dropped["end-of-nothing"] += 1
                continue
            self.commands.append(Release([member]))
            self._remove(member, "refused", event.code, start_failed(why)[:DETAIL_CHARS_MAX])

    def _exited(self, name: AttemptName, code: int, reason: str) -> None:
        member = self.held.get(name)
        if member is None or member.phase in ("claimed", "exited"):
            self.dropped["end-of-nothing"] += 1
            return
        self._enter(member, "exited")
        self._unleased.pop(name, None)
        reason, behind, unstored = reason.partition(f"; {CHECKPOINT_NOT_STORED}: ")
        if reason == ENDED_AS_ASKED and (member.why.startswith(_OWN_REASONS) or member.why in (LOST, "fence")):
            reason = member.why
        elif reason == ENDED_AS_ASKED and member.frozen:
            reason = ENDED_FROZEN
        asked = f"; {MPS_NOT_ASKED}: {member.mps_not_asked}" if member.mps_not_asked and reason != "exit" else ""
        member.code, member.why = code, f"{reason[:DETAIL_CHARS_MAX]}{asked}{behind}{unstored}"[:DETAIL_CHARS_MAX]
        self._judge(name, reason)
        self.outbox.exited(Fact("exited", *name, code, member.why), round(1000 * (self._now - member.began_s)))
        self._await_free(member)
        self._on_member_over()

    def on_mps_not_asked(self, event: MpsNotAsked) -> None:
        """Record why an MPS daemon was not asked: the reason of the end says so, unless it is that daemon's failure."""
        for name, why in event.items:
            member = self.held.get(name)
            if member is not None and member.why != LOST and not member.why.startswith(MPS_FAULT):
                self.commands.append(Log("warning", MPS_NOT_ASKED, f"{name}: its MPS daemon: {why}"))
                member.mps_not_asked = why

    def on_stuck(self, event: Stuck) -> None:
        for name in event.names:
            member = self.held.get(name)
            if member is None or member.stuck or member.phase not in ("starting", "running", "ending"):
                continue
            member.stuck = True
            self._enter(member, "ending")
            self._quarantine(member, tuple(member.slots) if member.leased else ())
        self._on_member_over()

    def restore(self, event: Restored) -> None:
        """Take over the members of an earlier agent.

        Facts that the earlier agent had not journalled are lost. So report all facts that the ledger may lack; the
        leader drops those that it has.
        """
        facts = self.outbox.gathered
        facts += event.facts
        known = {(fact.kind, fact.tenant, fact.job, fact.replica, fact.fence) for fact in event.facts}
        for member, phase, _, detail in event.held:
            self._hold(member)
            for step in RESTORED_BY[phase]:
                self._enter(member, step)
            base = (member.tenant, member.job, member.replica, member.fence)
            if phase not in ("exited", "refused") and ("claimed", *base) not in known:
                facts.append(Fact("claimed", *member.name, 0, detail))
            if phase == "running" and ("started", *base) not in known:
                facts.append(Fact("started", *member.name, 0, member.address))
            self._watch_ready(member)
        for member, phase, code, detail in event.held:
            if phase == "exited":
                self._exited(member.name, code, detail)
            elif phase == "refused":
                self.on_not_started(NotStarted([(member.name, detail)], code))
        for name in event.withdrawn:
            self.tombstones.report(name, "withdrawn", 0, "never started")
        for member in list(self.held.values()):
            if not member.frozen and not member.leased:  # the record of what is frozen was lost, and another has a slot
                self._end_member(member, 0.0, LOST)
            elif member.frozen and member.leased:
                self._look_at_frozen(member, NEVER_S)
            elif member.frozen:
                self._unleased[member.name] = member
                facts.append(Fact("frozen", *member.name))

    # ----------------------------------------------------------------------------------- the devices after the end

    def _await_free(self, member: Member) -> None:
        if not (member.slots and member.leased and self.drivers[member.driver].uses_devices):
            self._freed(member)
            return
        member.probe_at_s = NEVER_S  # until this probe is answered
        member.free_by_s = self._now + self._free_wait_s
        self._freeing[member.name] = member
        self.commands.append(ProbeFree([member]))

    def next_probe_s(self) -> float:
        """Return when `probe` is due: CLOCK_BOOTTIME seconds, infinity for never."""
        return min((member.probe_at_s for member in self._freeing.values()), default=NEVER_S)

    def probe(self) -> None:
        """Check the devices again whose next check is due."""
        due = [member for member in self._freeing.values() if self._now >= member.probe_at_s]
        if due:
            for member in due:
                member.probe_at_s = NEVER_S
            self.commands.append(ProbeFree(due))

    def on_seen_free(self, event: SeenFree) -> None:
        for name in event.names:
            member = self._freeing.get(name)
            if member is not None and member.phase == "exited":
                self._freed(member)
            elif member is not None and member.phase == "ending":
                self._freeze(member, on=False)
            elif member is not None:
                self._give_up_devices(member)

    def on_not_free(self, event: NotFree) -> None:
        for name, slots in event.items:
            member = self._freeing.get(name)
            if member is None:
                continue
            if member.phase == "ending" or (member.phase == "running" and self._now >= member.free_by_s):
                self._freeze(member, on=False, resumes=member.resumes)  # it cannot be frozen, as its memory stays
                continue
            if self._now >= member.free_by_s and not member.quarantined:
                self._quarantine(member, slots)
            member.probe_at_s = self._now + (PROBE_QUARANTINED_S if member.quarantined else PROBE_S)

    def on_said_well(self, event: SaidWell) -> None:
        """Treat members as ended if all of their quarantined slots are among these: an operator released them."""
        slots = set(event.slots)
        for member in [member for member in self.held.values() if member.quarantined]:
            if not set(member.quarantined) <= slots:
                continue
            if member.phase != "exited":
                over = f"{member.name} cannot be ended; it counts as ended, because an operator released its GPUs"
                self.commands.append(Log("warning", "said-over", over))
                self._enter(member, "exited")
                member.code, member.why = CODE_LOST, "lost"
                self.outbox.exited(Fact("exited", *member.name, CODE_LOST, "lost"), 0)
            self._freed(member)

    def _quarantine(self, member: Member, slots: tuple[int, ...]) -> None:
        member.quarantined = slots
        self.outbox.gathered.append(Fact("quarantined", *member.name, 0, ",".join(map(str, slots))))
        self.commands.append(Quarantine(member, slots))

    def _freed(self, member: Member) -> None:
        self._freeing.pop(member.name, None)
        used = "" if member.used is None else used_detail(member.used[0], member.used[1] // 1000)
        self.outbox.gathered.append(Fact("freed", *member.name, 0, used))
        self.commands.append(Release([member]))
        self._remove(member, "exited", member.code, member.why)

    # ----------------------------------------------------------------------------------- members that have ended

    def _remove(self, member: Member, kind: FactKind, code: int, detail: str) -> None:
        """Remove a member that has ended from the table, and keep a tombstone of it."""
        self._unhold(member)
        self._enter(member, "over")
        if kind == "exited":
            self.tombstones.remember(member.name, kind, code, detail)
        else:
            self.tombstones.report(member.name, kind, code, detail)
        if kind != "withdrawn" and self.drivers[member.driver].outlives_agent:
            self._to_forget.append((self.outbox.next_no, member))
        if self._unleased:
            self._lease_to_end()
        self._on_member_over()

    def forget_reported(self) -> None:
        """Have drivers forget the members whose ends the leader has acknowledged, in a join or in a frame of facts."""
        forget: list[Member] = []
        while self._to_forget and self._to_forget[0][0] <= self.outbox.answered_no:
            forget.append(self._to_forget.popleft()[1])
        if forget:
            self.commands.append(Forget(forget))

    def start_join(self) -> tuple[list[Fact], list[Held]]:
        """Return the content of a join: all unacknowledged facts, and the held members.

        The tombstones are cleared, because the join reports all ends so far.
        """
        facts = self.outbox.start_join()
        self.tombstones.clear()
        self._to_forget = deque((0, member) for _, member in self._to_forget)
        return facts, self.held_list()

    @staticmethod
    def _enter(member: Member, phase: MemberPhase) -> None:
        if phase not in PHASES[member.phase]:
            raise Defect(f"{member.name}: no step from {member.phase} to {phase}")
        member.phase = phase

    def validate(self) -> None:
        """Raise `Defect` if the table violates an invariant."""
        for name, member in self.held.items():
            if name != member.name or member.phase == "over":
                raise Defect(f"{name} is held as {member.name} in phase {member.phase}")
            if self.tombstones.holds(name):
                raise Defect(f"{name} is held and over")
            if name in self._freeing and member.phase != "exited" and not member.frozen:
                raise Defect(f"{name} waits for its memory in phase {member.phase}")
            if (name in self._unleased) is not (member.frozen and not member.leased and member.phase != "exited"):
                raise Defect(f"{name} is frozen: {member.frozen}, has its devices: {member.leased}")
        if fault := _slots_fault(self.held.values()):
            raise Defect(fault)
        if self._held_bytes != sum(HELD_BYTES + len(name[0]) + len(name[1]) for name in self.held):
            raise Defect(f"{len(self.held)} members are held, counted as {self._held_bytes} bytes")
        for name in self._freeing:
            if name not in self.held:
                raise Defect(f"{name} waits for its memory and is not held")


def _slots_fault(held: Iterable[Member]) -> str:
    """Return a contradiction between the slots of the members that have devices, as text; "" if there is none."""
    modes: dict[int, list[str]] = {}
    for member in held:
        for slot in member.quarantined or (member.slots if member.leased else ()):
            modes.setdefault(slot, []).append(member.place.mode)
    for slot, found in modes.items():
        if len(set(found)) > 1 or (found[0] == "exclusive" and len(found) > 1):
            return f"slot {slot} is held as {found}"
    return ""
