"""Keep the attempts of one worker: their phases, their ends, and their reports.

Without I/O. `attempts.Attempts` decides when placements may be accepted and when all attempts must end. The reports of
each attempt form exactly one of these chains: refused | claimed withdrawn | claimed refused (this host could not start
it) | claimed started exited [quarantined] freed. An attempt may be frozen and resumed between started and exited;
frozen, it has no devices, and the pool decides whether it gets them again. One report, ran, stands for claimed, started
and exited, or for the last two, if started has not left before the exit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.errors import (
    CHECKPOINT_NOT_STORED,
    ENDED_AS_ASKED,
    ENDED_FROZEN,
    MPS_NOT_ASKED,
    NEIGHBOUR_OVER,
    Refused,
)
from moorage.schemas.frames import (
    SUSPECT_S,
    UNKNOWN_MS,
    End,
    Freeze,
    Held,
    Place,
    Report,
    ReportKind,
    Resized,
    Start,
    sum_known,
    used_detail,
)
from moorage.schemas.printable import shortened
from moorage.schemas.request_cache import RequestCache
from moorage.schemas.staying import NOT_READY
from moorage.worker.attempt.environment import start_failed
from moorage.worker.devices.readers.base import FREE_WAIT_S, PROBE_QUARANTINED_S, PROBE_S
from moorage.worker.driver import CODE_LOST, LOST
from moorage.worker.session.attempt_messages import (
    HELD_PHASE,
    PHASES,
    RESTORED_BY,
    Attempt,
    AttemptPhase,
    CheckpointsNoted,
    CheckpointStored,
    Claims,
    Command,
    EndAttempt,
    Ended,
    Forget,
    FreezeAnswered,
    FreezeAttempt,
    IdleSeen,
    LeaseAnswered,
    Log,
    Metered,
    MpsNotAsked,
    NoteKept,
    NotFree,
    NotStarted,
    OverGrant,
    OverSeen,
    ProbeFree,
    Quarantine,
    Release,
    ResizeAttempts,
    Restored,
    SaidWell,
    SeenFree,
    SeenReady,
    StartAttempts,
    Started,
    StartFailed,
    Stuck,
    TryClaim,
    TryLease,
    Unlease,
    WatchReady,
)
from moorage.worker.session.lease_session import NEVER_S
from moorage.worker.session.report_outbox import ReportOutbox
from moorage.worker.session.tombstones import TOMBSTONES_MAX, Tombstones
from moorage.worker.start_codes import CODE_CANNOT_START

#: most attempts at once; further placements are refused
ATTEMPTS_MAX: Final = 16_384
#: bound of the list of held attempts in a renewal or join: one frame also has room for the reports of a join
HELD_BYTES_MAX: Final = 300 * 1024
#: size of an attempt in that list, without its names
HELD_BYTES: Final = 28
DETAIL_CHARS_MAX: Final = 200
#: longest grace (SIGTERM to SIGKILL) of an attempt that uses more memory than its share: the other sharers need it
OVER_GRANT_GRACE_S: Final = 0.5
#: prefix of the reason of such an end
OVER_GRANT: Final = "over-memory: "
#: for so many seconds after a sharer of its device held too much, an attempt that fails is told so
SQUEEZED_S: Final = 60.0
#: prefix likewise, of the attempt whose process made the MPS server fail that it shares
MPS_FAULT: Final = "mps-fault: "
#: prefix of the reason for an attempt whose devices showed no use for too long
IDLE: Final = "idle: "
#: ends for these reasons are the worker's own decisions, and are reported in its words
_OWN_REASONS: Final = (OVER_GRANT, MPS_FAULT, IDLE, NOT_READY)
#: most replicas that are suspected of having killed a supervisor; further ones are not suspected
SUSPECTS_MAX: Final = 4_096
_read_request: Final = RequestCache().read


class Defect(AssertionError):
    """The state violates an invariant, or an attempt was to take an illegal step to another phase."""


class AttemptTable:
    """The held attempts, and tombstones of attempts that have ended. It adds what the worker has to do to `commands`.

    `on_attempt_over` is called whenever an attempt has exited, is stuck or is removed: after the end of a lease session
    the worker joins the next one only when its attempts are over.
    """

    def __init__(
        self,
        drivers: Mapping[str, Capabilities],
        on_attempt_over: Callable[[], None],
        *,
        free_wait_s: float = FREE_WAIT_S,
        tombstones_max: int = TOMBSTONES_MAX,
    ) -> None:
        self.drivers = drivers
        self.outbox = ReportOutbox()
        self.tombstones = Tombstones(self.outbox, tombstones_max)
        self.held: dict[AttemptName, Attempt] = {}
        self.dropped: Counter[str] = Counter()
        self.commands: list[Command] = []
        self._on_attempt_over = on_attempt_over
        self._free_wait_s = free_wait_s
        self._now = 0.0
        #: attempts that have ended, or are frozen, and whose devices are not seen free yet
        self._freeing: dict[AttemptName, Attempt] = {}
        self._unleased: dict[AttemptName, Attempt] = {}  # frozen attempts without devices
        #: replicas (tenant, job, replica) that may have killed a supervisor, and when their last attempt started
        self._suspects: dict[tuple[str, str, int], float] = {}
        self._with_supervisor: set[AttemptName] = set()  # attempts that ran when their supervisor died
        self._held_bytes = 0  # size of `held_list` in a frame
        self._to_forget: deque[tuple[int, Attempt]] = deque()
        #: attempts whose checkpoints were reported, with the frame that has the report
        self._to_note: deque[tuple[int, Attempt]] = deque()

    def begin(self, now: float) -> list[Command]:
        """Begin to handle an event at `now` (CLOCK_BOOTTIME seconds). Return the list that its commands go to."""
        self._now = now
        self.commands = []
        return self.commands

    def held_list(self) -> list[Held]:
        return [
            Held(
                *attempt.name, "frozen" if attempt.frozen and attempt.phase == "running" else HELD_PHASE[attempt.phase]
            )
            for attempt in self.held.values()
        ]

    @property
    def still_ends(self) -> bool:
        """Whether the end of an attempt, or of its memory on a device, is still to come; not of what is given up."""
        return any(not (attempt.stuck or attempt.quarantined) for attempt in self.held.values())

    @property
    def runs(self) -> bool:
        """Whether an attempt runs, other than those that cannot be ended."""
        return any(not attempt.stuck and attempt.phase != "exited" for attempt in self.held.values())

    @property
    def longest_grace_s(self) -> float:
        """The longest grace of a held attempt; 0 without one."""
        return max((attempt.grace_s for attempt in self.held.values()), default=0.0)

    # ----------------------------------------------------------------------------------------- the leader's orders

    def place(self, places: Sequence[Place]) -> None:
        """Claim devices for new attempts, or refuse them; report ends again. Drop all while too many reports wait."""
        if self.outbox.is_full:
            self.dropped["facts-full"] += len(places)
            return
        held, tombstones = self.held, self.tombstones
        wanted: list[Attempt] = []
        room = ATTEMPTS_MAX - len(held)
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
            attempt = Attempt(name, place, request, self._now)
            if attempt.driver not in self.drivers:
                self._refuse(name, f"no driver {attempt.driver}")
            elif (other := self._suspect_beside(attempt)) is not None:
                self._refuse(name, f"job {other.job} runs alone first: the supervisor died while both ran")
            elif len(wanted) >= room or self._held_bytes > HELD_BYTES_MAX:
                self._refuse(name, f"this worker has {len(held)} attempts, as many as a frame can list")
            else:
                self._hold(attempt)
                wanted.append(attempt)
        if wanted:
            self.commands.append(TryClaim(wanted))

    def on_claims(self, claims: Claims) -> None:
        to_start: dict[str, list[Attempt]] = {}
        reports = self.outbox.gathered
        for attempt, address in claims.granted:
            report = Report("claimed", *attempt.name, 0, address)
            if not attempt.place.hold:
                self.outbox.claimed(report, self._now)
                self._enter(attempt, "starting")
                to_start.setdefault(attempt.driver, []).append(attempt)
            else:
                reports.append(report)
        for attempt, why in claims.refused:
            self._unhold(attempt)
            self._refuse(attempt.name, why)
        for attempt, why in claims.lacking:
            self._unhold(attempt)
            self.tombstones.report(attempt.name, "refused", CODE_CANNOT_START, shortened(why, DETAIL_CHARS_MAX))
        for driver, attempts in to_start.items():
            self.commands.append(StartAttempts(driver, attempts))

    def resize(self, places: Sequence[Place]) -> None:
        """Give held attempts a new part of their shared devices, unless it is old or the attempt is just starting.

        The leader repeats its orders.
        """
        resized = []
        for place in places:
            attempt = self.held.get(name_in(place))
            if (
                attempt is None
                or attempt.phase not in ("claimed", "running", "ending")
                or place.resized <= attempt.place.resized
            ):
                continue
            try:
                attempt.request = _read_request(place.body)[1].request
            except Refused:  # of a scheduler that is upgraded first
                self.dropped["resize-unreadable"] += 1
                continue
            attempt.place = replace(attempt.place, body=place.body, resized=place.resized)
            resized.append(attempt)
        if resized:
            self.commands.append(ResizeAttempts(resized))

    def resized_list(self) -> list[Resized]:
        return [
            Resized(*attempt.name, attempt.place.resized) for attempt in self.held.values() if attempt.place.resized
        ]

    def _suspect_beside(self, attempt: Attempt) -> Attempt | None:
        """Return a held suspect outside this suspect's gang, as suspects run one by one; None to start it now."""
        suspects = self._suspects
        if attempt.name[:3] not in suspects:
            return None
        for other in self.held.values():
            since_s = suspects.get(other.name[:3])
            is_gang = other.place.hold and other.name[:2] == attempt.name[:2]
            if since_s is not None and self._now < since_s + SUSPECT_S and not is_gang:
                return other
        return None

    def supervisor_died(self, driver: str) -> None:
        """Note the driver's running attempts. They become suspects once they are reported as lost with it."""
        self._with_supervisor |= {
            name
            for name, attempt in self.held.items()
            if attempt.driver == driver and attempt.phase not in ("claimed", "exited")
        }

    def _judge(self, name: AttemptName, reason: str) -> None:
        """Make an attempt a suspect if it was lost with its supervisor, and clear it if it ended in another way."""
        if name not in self._with_supervisor or reason != "lost":
            self._suspects.pop(name[:3], None)
        elif len(self._suspects) < SUSPECTS_MAX:
            self._suspects[name[:3]] = NEVER_S  # its next attempt has not begun
        self._with_supervisor.discard(name)

    def _hold(self, attempt: Attempt) -> None:
        self.held[attempt.name] = attempt
        self._held_bytes += HELD_BYTES + len(attempt.tenant) + len(attempt.job)

    def _unhold(self, attempt: Attempt) -> None:
        del self.held[attempt.name]
        self._unleased.pop(attempt.name, None)
        self._held_bytes -= HELD_BYTES + len(attempt.tenant) + len(attempt.job)

    def _refuse(self, name: AttemptName, why: str) -> None:
        self.tombstones.report(name, "refused", 0, shortened(why, DETAIL_CHARS_MAX))

    def start(self, start: Start) -> None:
        """Start a gang's attempt that has claimed its devices. If it is not held, report that, or how it ended."""
        name = name_in(start)
        attempt = self.held.get(name)
        if attempt is None:
            tombstones = self.tombstones
            if (tombstone := tombstones.of(name)) is not None:
                tombstones.report_again(name, tombstone)
            elif tombstones.is_forgotten(name):
                tombstones.report(name, "withdrawn", 0, "forgotten")
            else:
                tombstones.report(name, "not-held", 0, "")
        elif attempt.phase == "claimed":
            attempt.start = start
            self._enter(attempt, "starting")
            self.commands.append(StartAttempts(attempt.driver, [attempt]))

    def end(self, end: End) -> None:
        """End an attempt, or withdraw it before its start. If it is not held, report its end (withdrawn if unknown)."""
        name = name_in(end)
        attempt = self.held.get(name)
        if attempt is not None:
            grace_s = attempt.grace_s if end.grace_s is None else end.grace_s
            self._end_attempt(attempt, grace_s, end.why or "end", end.notice_s)
        elif (tombstone := self.tombstones.of(name)) is not None:
            self.tombstones.report_again(name, tombstone)
        else:
            self.tombstones.report(name, "withdrawn", 0, shortened(end.why, DETAIL_CHARS_MAX))

    def end_all(self, grace_s_max: float, why: str, *, keep: bool) -> None:
        """End all attempts; with `keep`, except those that run and may outlive a partition."""
        for attempt in list(self.held.values()):
            if attempt.phase == "claimed" or not (keep and attempt.keep):
                self._end_attempt(attempt, min(attempt.grace_s, grace_s_max), why)

    def end_claimed(self, driver: str, why: str) -> None:
        """End the driver's attempts that have claimed devices and were not started yet."""
        for attempt in list(self.held.values()):
            if attempt.driver == driver and attempt.phase == "claimed":
                self._end_attempt(attempt, 0.0, why)

    def end_over_grant(self, event: OverGrant) -> None:
        """End attempts that use more memory of a shared device than their share, or whose MPS daemon failed."""
        for name, why in event.items:
            attempt = self.held.get(name)
            if attempt is not None and attempt.phase in ("starting", "running", "ending"):
                self._end_attempt(attempt, min(attempt.grace_s, OVER_GRANT_GRACE_S), why)

    def on_over_seen(self, event: OverSeen) -> None:
        """Note of the other attempts on these devices that a sharer holds too much there."""
        over = {name for name, _ in event.items}
        for slot in {slot for _, slot in event.items}:
            for name, attempt in self.held.items():
                if slot in attempt.slots and name not in over:
                    attempt.squeezed = slot, self._now

    def on_idle(self, event: IdleSeen) -> None:
        """Report attempts that do not use their devices. End those past their limit."""
        for name, seconds, ends_s, ends in event.items:
            attempt = self.held.get(name)
            if attempt is None or attempt.phase != "running":
                continue
            if ends:
                self._end_attempt(
                    attempt, attempt.grace_s, f"{IDLE}no use of its GPUs for {seconds} s, {ends_s} are allowed"
                )
            else:
                self.outbox.gathered.append(Report("idle", *name, seconds, str(ends_s) if ends_s else ""))

    def freeze(self, freeze: Freeze) -> None:
        """Freeze or resume a running attempt, or report that it is in that state, or cannot be brought into it.

        Nothing happens while an earlier order is under way: the leader asks again.
        """
        attempt = self.held.get(name_in(freeze))
        if attempt is None or attempt.phase != "running" or attempt.freezing or self._is_looked_at(attempt):
            return
        reports = self.outbox.gathered
        if not attempt.frozen and not freeze.on:
            reports.append(Report("resumed", *attempt.name, freeze.n))
        elif not attempt.frozen:
            can = self.drivers[attempt.driver]
            freezes = can.sleeps_engines if attempt.sleeps_itself else can.freezes
            if freezes and attempt.place.mode != "mps":  # its daemon keeps the GPU for its clients
                self._freeze(attempt, on=True)
            else:
                reports.append(Report("not-frozen", *attempt.name, 0, "this worker cannot freeze it"))
        elif attempt.leased:  # its devices are not seen free yet
            if not freeze.on:
                self._freeze(attempt, on=False, resumes=freeze.n)
        elif freeze.on or not freeze.n:
            reports.append(Report("frozen", *attempt.name))
        elif freeze.n <= attempt.refused:
            reports.append(Report("not-resumed", *attempt.name, freeze.n, "its devices were in use"))
        else:
            attempt.resumes = freeze.n
            self.commands.append(TryLease(attempt))

    def on_lease_answered(self, event: LeaseAnswered) -> None:
        """Resume a frozen attempt that has its devices again; else report that it waits on, unless it is to end."""
        attempt, why = event.attempt, event.why
        if not why:
            attempt.leased = True
            self._unleased.pop(attempt.name, None)
            self._freeze(attempt, on=False, resumes=attempt.resumes)
        elif attempt.phase == "running":
            self._not_resumed(attempt, why)

    def _not_resumed(self, attempt: Attempt, why: str) -> None:
        attempt.refused, attempt.resumes = attempt.resumes, 0
        self.outbox.gathered.append(
            Report("not-resumed", *attempt.name, attempt.refused, shortened(why, DETAIL_CHARS_MAX))
        )

    def _freeze(self, attempt: Attempt, *, on: bool, resumes: int = 0) -> None:
        self._freeing.pop(attempt.name, None)
        attempt.freezing, attempt.resumes = True, resumes
        self.commands.append(FreezeAttempt(attempt, on))

    def _is_looked_at(self, attempt: Attempt) -> bool:
        """Return whether a look at the attempt's devices is under way: what it sees must not be about another state."""
        return attempt.name in self._freeing and attempt.probe_at_s == NEVER_S

    def on_freeze_answered(self, event: FreezeAnswered) -> None:
        """Report whether attempts were resumed; look at the devices of those that were frozen, and report these later.

        An attempt that is broken is lost, and is ended.
        """
        for name, now, why in event.items:
            attempt = self.held.get(name)
            if attempt is None or attempt.phase not in ("running", "ending"):
                continue
            was, attempt.frozen, attempt.freezing = attempt.frozen, now == "frozen", False
            attempt.freezes += attempt.frozen and not was
            if not attempt.frozen:
                self._freeing.pop(name, None)
                self._unleased.pop(name, None)
            if now == "broken":
                self.commands.append(Log("error", "not-resumed", f"{attempt.name} is lost while it is frozen: {why}"))
                self._end_attempt(attempt, 0.0, LOST)
            elif attempt.frozen and attempt.phase == "ending" and not was:
                self._resume_to_end(attempt)
            elif attempt.frozen:
                self._look_at_frozen(attempt, self._free_wait_s)
            elif not attempt.leased:  # the record of an earlier agent said that it was, and another may have a slot
                self._end_attempt(attempt, 0.0, LOST)
            elif attempt.phase == "running":
                kind: ReportKind = "resumed" if attempt.resumes else "not-frozen"
                self.outbox.gathered.append(Report(kind, *name, attempt.resumes, shortened(why, DETAIL_CHARS_MAX)))

    def _look_at_frozen(self, attempt: Attempt, wait_s: float) -> None:
        attempt.probe_at_s, attempt.free_by_s = NEVER_S, self._now + wait_s
        self._freeing[attempt.name] = attempt
        self.commands.append(ProbeFree([attempt]))

    def _give_up_devices(self, attempt: Attempt) -> None:
        """End the lease of a frozen attempt, whose devices were seen free, and report that it is frozen."""
        del self._freeing[attempt.name]
        attempt.leased = False
        self._unleased[attempt.name] = attempt
        self.commands.append(Unlease(attempt))
        if attempt.resumes:
            self._not_resumed(attempt, "its processes did not run on")
        else:
            self.outbox.gathered.append(Report("frozen", *attempt.name))
        self._lease_to_end()

    def _lease_to_end(self) -> None:
        """Have frozen attempts that are to end claim their devices, since others have left some."""
        for attempt in list(self._unleased.values()):
            self._resume_to_end(attempt)

    def _resume_to_end(self, attempt: Attempt) -> None:
        """Resume a frozen attempt that is to end as soon as it has its devices: it may have work there to save.

        Its grace goes on meanwhile. A look at its devices that is under way comes to an end first. A program that
        sleeps by itself ends as it is.
        """
        if (
            attempt.sleeps_itself
            or attempt.phase != "ending"
            or not attempt.frozen
            or attempt.freezing
            or attempt.grace_s <= 0
        ):
            return
        if not attempt.leased:
            self.commands.append(TryLease(attempt))
        elif not self._is_looked_at(attempt):
            self._freeze(attempt, on=False)

    def on_metered(self, event: Metered) -> None:
        """Add to the attempts' use of their devices."""
        for name, gpu_ms, mib_ms, mib in event.items:
            attempt = self.held.get(name)
            if attempt is not None:
                before = attempt.used or (UNKNOWN_MS, 0)
                attempt.used = sum_known(before[0], gpu_ms), before[1] + mib_ms
                attempt.peaks = replace(attempt.peaks, gpu_memory_mib=max(attempt.peaks.gpu_memory_mib, mib))

    def _end_attempt(self, attempt: Attempt, grace_s: float, why: str, notice_s: float = 0.0) -> None:
        if attempt.phase == "claimed":
            self.commands.append(Release([attempt]))
            self._remove(attempt, "withdrawn", 0, why)
        elif attempt.phase in ("starting", "running"):
            self._enter(attempt, "ending")
            attempt.grace_s = grace_s
            attempt.notice_s = notice_s
            attempt.why = why
            self.commands.append(EndAttempt(attempt, grace_s, why, notice_s))
            self._resume_to_end(attempt)
        elif attempt.phase == "ending" and (grace_s < attempt.grace_s or notice_s < attempt.notice_s):
            # a second END may shorten the wait, but never lengthen it
            attempt.grace_s = min(grace_s, attempt.grace_s)
            attempt.notice_s = min(notice_s, attempt.notice_s)
            self.commands.append(EndAttempt(attempt, attempt.grace_s, why, attempt.notice_s))

    # -------------------------------------------------------------------------------------- reports of the drivers

    def on_started(self, event: Started) -> None:
        held, outbox = self.held, self.outbox
        for name in event.names:
            attempt = held.get(name)
            if attempt is None or attempt.phase not in ("starting", "ending"):
                continue
            if attempt.phase == "starting":  # otherwise it was asked to end before its start was reported
                self._enter(attempt, "running")
            attempt.began_s = self._now
            if name[:3] in self._suspects:
                self._suspects[name[:3]] = self._now
            told = event.begun.get(name, "")
            detail = f"{attempt.address}; {told}" if told else attempt.address
            outbox.started(Report("started", *name, 0, detail), self._now, told=bool(told))
            self._watch_ready(attempt)

    def _watch_ready(self, attempt: Attempt) -> None:
        if attempt.phase == "running" and attempt.request.workload.ready is not None:
            self.commands.append(WatchReady(attempt))

    def on_seen_ready(self, event: SeenReady) -> None:
        """Report attempts that are ready, and those that are not any more; end those that never were in time."""
        for name, why, ends in event.items:
            attempt = self.held.get(name)
            if attempt is None or attempt.phase != "running":
                continue
            is_ready = not why
            if ends:
                self._end_attempt(attempt, attempt.grace_s, f"{NOT_READY}: {why}")
            elif attempt.ready is not is_ready and (is_ready or attempt.was_ready):
                kind: ReportKind = "ready" if is_ready else "not-ready"
                self.outbox.gathered.append(Report(kind, *name, 0, shortened(why, DETAIL_CHARS_MAX)))
                attempt.ready = is_ready
                if not attempt.was_ready:
                    attempt.was_ready = True
                    self.commands.append(NoteKept(attempt))

    def on_checkpoint_stored(self, event: CheckpointStored) -> None:
        """Report the checkpoint of an attempt that runs. Its end tells it otherwise."""
        attempt = self.held.get(event.name)
        if attempt is None or attempt.phase not in ("running", "ending"):
            return
        detail = shortened(f"{CHECKPOINT_NOT_STORED}: {event.why}", DETAIL_CHARS_MAX) if event.why else attempt.address
        report = Report("started", *event.name, max(event.step or 0, 0), detail, checkpoint=event.digest)
        self.outbox.gathered.append(report)
        if not event.why:
            self._to_note.append((self.outbox.next_no, attempt))

    def on_ended(self, event: Ended) -> None:
        for name, code, reason in event.items:
            attempt = self.held.get(name)
            if attempt is not None and name in event.peaks:
                attempt.peaks = attempt.peaks.beside(event.peaks[name])
            if attempt is not None:
                attempt.reported = event.reported.get(name)
            self._exited(name, code, reason, event.checkpoints.get(name))

    def on_start_failed(self, event: StartFailed) -> None:
        for name, code, why in event.items:
            self._exited(name, code, start_failed(why))

    def on_not_started(self, event: NotStarted) -> None:
        """Report these attempts as refused: the leader places them again, and this costs no retry."""
        for name, why in event.items:
            attempt = self.held.get(name)
            if attempt is not None and attempt.phase == "running":  # its start was reported before it failed after all
                self._exited(name, event.code or CODE_CANNOT_START, why)
                continue
            if attempt is None or attempt.phase not in ("starting", "ending"):
                self.dropped["end-of-nothing"] += 1
                continue
            self.commands.append(Release([attempt]))
            self._remove(attempt, "refused", event.code, shortened(start_failed(why), DETAIL_CHARS_MAX))

    def _exited(self, name: AttemptName, code: int, reason: str, checkpoint: str | None = None) -> None:
        attempt = self.held.get(name)
        if attempt is None or attempt.phase in ("claimed", "exited"):
            self.dropped["end-of-nothing"] += 1
            return
        self._enter(attempt, "exited")
        self._unleased.pop(name, None)
        reason, behind, unstored = reason.partition(f"; {CHECKPOINT_NOT_STORED}: ")
        if reason == ENDED_AS_ASKED and (attempt.why.startswith(_OWN_REASONS) or attempt.why in (LOST, "fence")):
            reason = attempt.why
        elif reason == ENDED_AS_ASKED and attempt.frozen:
            reason = ENDED_FROZEN
        asked = f"; {MPS_NOT_ASKED}: {attempt.mps_not_asked}" if attempt.mps_not_asked and reason != "exit" else ""
        attempt.code = code
        told = f"{self._squeezed(attempt, reason)}{asked}{behind}{unstored}"
        attempt.why = shortened(f"{shortened(reason, DETAIL_CHARS_MAX)}{told}", DETAIL_CHARS_MAX)
        self._judge(name, reason)
        report = Report("exited", *name, code, attempt.why, checkpoint=checkpoint)
        self.outbox.exited(report, round(1000 * (self._now - attempt.began_s)))
        self._await_free(attempt)
        self._on_attempt_over()

    def _squeezed(self, attempt: Attempt, reason: str) -> str:
        """Return what is told behind the reason of a failure of its own: that a sharer held too much. Else ""."""
        if attempt.squeezed is None or reason != "exit" or attempt.code == 0:
            return ""
        slot, seen_s = attempt.squeezed
        told = f"; {NEIGHBOUR_OVER}: another job on GPU {slot} held more memory than its share"
        return told if self._now <= seen_s + SQUEEZED_S else ""

    def on_mps_not_asked(self, event: MpsNotAsked) -> None:
        """Record why an MPS daemon was not asked: the reason of the end says so, unless it is that daemon's failure."""
        for name, why in event.items:
            attempt = self.held.get(name)
            if attempt is not None and attempt.why != LOST and not attempt.why.startswith(MPS_FAULT):
                self.commands.append(Log("warning", MPS_NOT_ASKED, f"{name}: its MPS daemon: {why}"))
                attempt.mps_not_asked = why

    def on_stuck(self, event: Stuck) -> None:
        for name in event.names:
            attempt = self.held.get(name)
            if attempt is None or attempt.stuck or attempt.phase not in ("starting", "running", "ending"):
                continue
            attempt.stuck = True
            self._enter(attempt, "ending")
            self._quarantine(attempt, tuple(attempt.slots) if attempt.leased else ())
        self._on_attempt_over()

    def restore(self, event: Restored) -> None:
        """Take over the attempts of an earlier agent.

        Reports that the earlier agent had not journalled are lost. So send all that the ledger may lack; the leader
        drops those that it has.
        """
        reports = self.outbox.gathered
        reports += event.reports
        known = {(report.kind, report.tenant, report.job, report.replica, report.fence) for report in event.reports}
        for attempt, phase, _, detail in event.held:
            self._hold(attempt)
            for step in RESTORED_BY[phase]:
                self._enter(attempt, step)
            base = (attempt.tenant, attempt.job, attempt.replica, attempt.fence)
            if phase not in ("exited", "refused") and ("claimed", *base) not in known:
                reports.append(Report("claimed", *attempt.name, 0, detail))
            if phase == "running" and ("started", *base) not in known:
                reports.append(Report("started", *attempt.name, 0, attempt.address))
            self._watch_ready(attempt)
        for attempt, phase, code, detail in event.held:
            if phase == "exited":
                self._exited(attempt.name, code, detail)
            elif phase == "refused":
                self.on_not_started(NotStarted([(attempt.name, detail)], code))
        for name in event.withdrawn:
            self.tombstones.report(name, "withdrawn", 0, "never started")
        for attempt in list(self.held.values()):
            if (
                not attempt.frozen and not attempt.leased
            ):  # the record of what is frozen was lost, and another has a slot
                self._end_attempt(attempt, 0.0, LOST)
            elif attempt.frozen and attempt.leased:
                self._look_at_frozen(attempt, NEVER_S)
            elif attempt.frozen:
                self._unleased[attempt.name] = attempt
                reports.append(Report("frozen", *attempt.name))

    # ----------------------------------------------------------------------------------- the devices after the end

    def _await_free(self, attempt: Attempt) -> None:
        if not (attempt.slots and attempt.leased and self.drivers[attempt.driver].uses_devices):
            self._freed(attempt)
            return
        attempt.probe_at_s = NEVER_S  # until this probe is answered
        attempt.free_by_s = self._now + self._free_wait_s
        self._freeing[attempt.name] = attempt
        self.commands.append(ProbeFree([attempt]))

    def next_probe_s(self) -> float:
        """Return when `probe` is due: CLOCK_BOOTTIME seconds, infinity for never."""
        return min((attempt.probe_at_s for attempt in self._freeing.values()), default=NEVER_S)

    def probe(self) -> None:
        """Check the devices again whose next check is due."""
        due = [attempt for attempt in self._freeing.values() if self._now >= attempt.probe_at_s]
        if due:
            for attempt in due:
                attempt.probe_at_s = NEVER_S
            self.commands.append(ProbeFree(due))

    def on_seen_free(self, event: SeenFree) -> None:
        for name in event.names:
            attempt = self._freeing.get(name)
            if attempt is not None and attempt.phase == "exited":
                self._freed(attempt)
            elif attempt is not None and attempt.phase == "ending" and attempt.sleeps_itself:
                del self._freeing[attempt.name]
            elif attempt is not None and attempt.phase == "ending":
                self._freeze(attempt, on=False)
            elif attempt is not None:
                self._give_up_devices(attempt)

    def on_not_free(self, event: NotFree) -> None:
        for name, slots in event.items:
            attempt = self._freeing.get(name)
            if attempt is None:
                continue
            if attempt.phase == "ending" and attempt.sleeps_itself:
                del self._freeing[name]
                continue
            if attempt.phase == "ending" or (attempt.phase == "running" and self._now >= attempt.free_by_s):
                self._freeze(attempt, on=False, resumes=attempt.resumes)  # it cannot be frozen, as its memory stays
                continue
            if self._now >= attempt.free_by_s and not attempt.quarantined:
                self._quarantine(attempt, slots)
            attempt.probe_at_s = self._now + (PROBE_QUARANTINED_S if attempt.quarantined else PROBE_S)

    def on_released(self, event: SaidWell) -> None:
        """Treat attempts as ended if all of their quarantined slots are among these: an operator released them."""
        slots = set(event.slots)
        for attempt in [attempt for attempt in self.held.values() if attempt.quarantined]:
            if not set(attempt.quarantined) <= slots:
                continue
            if attempt.phase != "exited":
                over = f"{attempt.name} cannot be ended; it counts as ended, because an operator released its GPUs"
                self.commands.append(Log("warning", "said-over", over))
                self._enter(attempt, "exited")
                attempt.code, attempt.why = CODE_LOST, "lost"
                self.outbox.exited(Report("exited", *attempt.name, CODE_LOST, "lost"), 0)
            self._freed(attempt)

    def _quarantine(self, attempt: Attempt, slots: tuple[int, ...]) -> None:
        attempt.quarantined = slots
        self.outbox.gathered.append(Report("quarantined", *attempt.name, 0, ",".join(map(str, slots))))
        self.commands.append(Quarantine(attempt, slots))

    def _freed(self, attempt: Attempt) -> None:
        self._freeing.pop(attempt.name, None)
        used = "" if attempt.used is None else used_detail(attempt.used[0], attempt.used[1] // 1000)
        peaks = attempt.peaks if attempt.peaks.is_known else None
        self.outbox.gathered.append(Report("freed", *attempt.name, 0, used, peaks=peaks, reported=attempt.reported))
        self.commands.append(Release([attempt]))
        self._remove(attempt, "exited", attempt.code, attempt.why)

    # ----------------------------------------------------------------------------------- attempts that have ended

    def _remove(self, attempt: Attempt, kind: ReportKind, code: int, detail: str) -> None:
        """Remove an attempt that has ended from the table, and keep a tombstone of it."""
        self._unhold(attempt)
        self._enter(attempt, "over")
        if kind == "exited":
            self.tombstones.remember(attempt.name, kind, code, detail)
        else:
            self.tombstones.report(attempt.name, kind, code, detail)
        if kind != "withdrawn" and self.drivers[attempt.driver].outlives_agent:
            self._to_forget.append((self.outbox.next_no, attempt))
        if self._unleased:
            self._lease_to_end()
        self._on_attempt_over()

    def forget_reported(self) -> None:
        """Make drivers forget attempts whose ends the leader has acknowledged, in a join or in a frame of reports."""
        forget: list[Attempt] = []
        while self._to_forget and self._to_forget[0][0] <= self.outbox.answered_no:
            forget.append(self._to_forget.popleft()[1])
        if forget:
            self.commands.append(Forget(forget))
        noted: list[Attempt] = []
        while self._to_note and self._to_note[0][0] <= self.outbox.answered_no:
            noted.append(self._to_note.popleft()[1])
        if noted:
            self.commands.append(CheckpointsNoted(noted))

    def start_join(self) -> tuple[list[Report], list[Held]]:
        """Return the content of a join: all unacknowledged reports, and the held attempts.

        The tombstones are cleared, because the join reports all ends so far.
        """
        reports = self.outbox.start_join()
        self.tombstones.clear()
        self._to_forget = deque((0, attempt) for _, attempt in self._to_forget)
        self._to_note = deque((0, attempt) for _, attempt in self._to_note)
        return reports, self.held_list()

    @staticmethod
    def _enter(attempt: Attempt, phase: AttemptPhase) -> None:
        if phase not in PHASES[attempt.phase]:
            raise Defect(f"{attempt.name}: no step from {attempt.phase} to {phase}")
        attempt.phase = phase

    def validate(self) -> None:
        """Raise `Defect` if the table violates an invariant."""
        for name, attempt in self.held.items():
            if name != attempt.name or attempt.phase == "over":
                raise Defect(f"{name} is held as {attempt.name} in phase {attempt.phase}")
            if self.tombstones.holds(name):
                raise Defect(f"{name} is held and over")
            if name in self._freeing and attempt.phase != "exited" and not attempt.frozen:
                raise Defect(f"{name} waits for its memory in phase {attempt.phase}")
            if (name in self._unleased) is not (attempt.frozen and not attempt.leased and attempt.phase != "exited"):
                raise Defect(f"{name} is frozen: {attempt.frozen}, has its devices: {attempt.leased}")
        if fault := _slots_fault(self.held.values()):
            raise Defect(fault)
        if self._held_bytes != sum(HELD_BYTES + len(name[0]) + len(name[1]) for name in self.held):
            raise Defect(f"{len(self.held)} attempts are held, counted as {self._held_bytes} bytes")
        for name in self._freeing:
            if name not in self.held:
                raise Defect(f"{name} waits for its memory and is not held")


def _slots_fault(held: Iterable[Attempt]) -> str:
    """Return a contradiction between the slots of the attempts that have devices, as text; "" if there is none."""
    modes: dict[int, list[str]] = {}
    for attempt in held:
        for slot in attempt.quarantined or (attempt.slots if attempt.leased else ()):
            modes.setdefault(slot, []).append(attempt.place.mode)
    for slot, found in modes.items():
        if len(set(found)) > 1 or (found[0] == "exclusive" and len(found) > 1):
            return f"slot {slot} is held as {found}"
    return ""
