"""Define the messages into the worker's state machine (events) and out of it (commands).

The leader's frames are events too: `Wanted`, `RollCall`, `Joined`, `Renewed`, `ReportAck`. All times are seconds of
CLOCK_BOOTTIME, which also advances while the machine is suspended (clock_gettime(2)). Slots are positions in hello's
`gpu_pool`. Events and commands have lists, so that a turn with a thousand attempts needs only a few objects.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import Problem
from moorage.schemas.frames import (
    NO_PEAKS,
    Exec,
    GangSets,
    Held,
    Joined,
    Peaks,
    Place,
    Renewed,
    Report,
    ReportAck,
    ReportFrame,
    Resized,
    RollCall,
    Signal,
    Start,
    Values,
    Wanted,
)
from moorage.schemas.job import Request

#: longest grace of what a worker that leaves ends itself
LEAVE_GRACE_S_MAX: Final = 60.0
#: how long it then tries to tell its leader of the last ends, and to see its devices free
LEAVE_S_MAX: Final = 5.0
#: the frames of a worker that the leader answers
AnswerVerb = Literal["join", "renew", "fact"]

#: the phases of an attempt; in phase "over" it is no longer held, and only its tombstone is kept
AttemptPhase = Literal["claimed", "starting", "running", "ending", "exited", "over"]
#: the legal next phases
PHASES: Final[dict[AttemptPhase, frozenset[AttemptPhase]]] = {
    "claimed": frozenset({"starting", "over"}),
    "starting": frozenset({"running", "ending", "exited", "over"}),
    "running": frozenset({"ending", "exited"}),
    "ending": frozenset({"ending", "exited", "over"}),
    "exited": frozenset({"over"}),
    "over": frozenset(),
}
#: the phase that a renewal reports; a starting attempt counts as not running until its driver reports the start
HELD_PHASE: Final[dict[AttemptPhase, str]] = {
    "claimed": "claimed",
    "starting": "claimed",
    "running": "running",
    "ending": "ending",
    "exited": "exited",
}


#: the phases through which an earlier agent's attempt is taken over, by its phase in the journal or driver. Its further
#: steps are reported from the last of them on
RESTORED_BY: Final[dict[str, tuple[AttemptPhase, ...]]] = {
    "claimed": (),
    "starting": ("starting",),
    "refused": ("starting",),
    "running": ("starting", "running"),
    "exited": ("starting", "running"),
    "ending": ("starting", "ending"),
}


#: the `config` of an attempt whose request this agent's driver has not checked: an earlier agent's did
UNCHECKED: Final = object()


class Attempt:
    """One held attempt of a replica. Only the state machine changes it.

    Its job's name is `job`; `request.job` may be the name of another job with an equal request. `config` is what its
    driver read from the request (`Driver.read_config`) as it checked that.
    """

    __slots__ = (
        "address",
        "attempt",
        "began_s",
        "code",
        "config",
        "driver",
        "ends_at_s",
        "fence",
        "free_by_s",
        "freezes",
        "freezing",
        "frozen",
        "grace_s",
        "job",
        "keep",
        "leased",
        "mps_not_asked",
        "name",
        "notice_s",
        "peaks",
        "phase",
        "place",
        "ports",
        "probe_at_s",
        "quarantined",
        "ready",
        "refused",
        "replica",
        "reported",
        "request",
        "resumes",
        "slots",
        "squeezed",
        "start",
        "stuck",
        "tenant",
        "used",
        "was_ready",
        "why",
    )

    def __init__(self, name: AttemptName, place: Place, request: Request, now: float) -> None:
        run = request.run
        assert run is not None  # every request has a workload: Request.__post_init__
        self.name = name
        self.tenant, self.job, self.replica, self.attempt, self.fence = name
        self.place = place
        self.request = request
        self.driver = run.driver
        self.grace_s = run.grace_s
        self.keep = request.on_partition == "keep"
        self.slots = place.slots
        self.phase: AttemptPhase = "claimed"
        self.start: Start | None = None
        self.config: Any = UNCHECKED
        self.code = 0
        self.why = ""
        self.mps_not_asked = ""  # why its MPS daemon was not told of its end
        self.squeezed: tuple[int, float] | None = None  # the device of which a sharer held too much last, and when
        self.began_s = now  # when its start was reported
        self.probe_at_s = 0.0
        self.free_by_s = 0.0
        self.ends_at_s = None if place.ends_in_s is None else now + place.ends_in_s  # the job's deadline, by our clock
        self.notice_s = 0.0
        self.quarantined: tuple[int, ...] = ()
        self.stuck = False
        self.frozen = False  # whether its processes are frozen, while it is running or ending
        self.freezes = 0  # how often this agent has frozen them
        self.freezing = False  # its driver was asked to freeze or to resume it, and has not answered
        self.leased = True  # it has its devices; a frozen attempt gives them up once their memory was seen free
        self.resumes = 0  # the number of the order to resume it that is carried out, 0 for none
        self.refused = 0  # the number of the last such order for which the pool did not give its devices
        self.ports: tuple[int, ...] = ()  # of this host, for `run.ports`
        self.address = ""  # where they are reached, as a `started` report says it
        self.ready: bool | None = None  # what this agent has reported of `run.ready`; None: nothing yet
        self.was_ready = False  # it was ready once, so that it does not end for not being so
        self.peaks = NO_PEAKS  # what it had at most
        self.reported: Values | None = None  # the newest values that it reported of itself, once it has ended
        self.used: tuple[int, int] | None = None  # its use of devices, as in `Metered`, since this agent's start

    @property
    def sleeps_itself(self) -> bool:
        """Whether a request to its own program puts it to sleep, and wakes it."""
        return self.request.service is not None and self.request.service.sleeps_itself

    @property
    def master_port_wanted(self) -> int:
        """The rendezvous port for rank 0 of a gang, 0 for other attempts."""
        groups = self.request.groups
        first = self.request.group_of(self.replica)[1] if groups else 0
        if not self.place.hold or self.replica != first:
            return 0
        gpu = self.request.gpu
        return gpu.distributed.master_port if gpu is not None and gpu.distributed is not None else MASTER_PORT_DEFAULT


MASTER_PORT_DEFAULT: Final = 29500


# ------------------------------------------------------------------------------------------------------- events


class Claims(msgspec.Struct, frozen=True):
    """Answer `TryClaim` for the pool: `granted` has each attempt with its rendezvous `address:port` or "", `refused`
    has each attempt with the reason, and `lacking` those for which this host lacks something that they need."""

    granted: list[tuple[Attempt, str]]
    refused: list[tuple[Attempt, str]]
    lacking: list[tuple[Attempt, str]] = []


class Started(msgspec.Struct, frozen=True):
    """Report attempts that run. `begun` has a line of those that did not begin as they were to."""

    names: list[AttemptName]
    begun: dict[AttemptName, str] = {}


class Ended(msgspec.Struct, frozen=True):
    """Report attempts of which no process is left: (name, code, reason). After a signal, code is minus its number.

    `checkpoints` has the digests of the checkpoints that were stored, "" where none was, and `peaks` what is known of
    the memory and CPU time of each. `reported` are the newest values of those that reported any.
    """

    items: list[tuple[AttemptName, int, str]]
    checkpoints: dict[AttemptName, str] = {}
    peaks: dict[AttemptName, Peaks] = {}
    reported: dict[AttemptName, Values] = {}


class CheckpointStored(msgspec.Struct, frozen=True):
    """Report that a running attempt has stored a checkpoint with this digest, of that step if it is known.

    With `why`, the newest one could not be stored; `digest` is then that of the last one, "" for none.
    """

    name: AttemptName
    digest: str
    step: int | None = None
    why: str = ""


class StartFailed(msgspec.Struct, frozen=True):
    """Report attempts whose command could not be started: (name, code as of a shell: 126 or 127, reason in one line).

    Nothing of them runs.
    """

    items: list[tuple[AttemptName, int, str]]


class NotStarted(msgspec.Struct, frozen=True):
    """Report attempts that this host could not start: (name, the reason in one line). They are refused, not failed.

    The reason may begin with a word of `ABOUT_THE_JOB` that says what is at fault; `code` is then the exit code that
    the job gets if no host can start it (126 or 127 as of a shell). Nothing of them runs.
    """

    items: list[tuple[AttemptName, str]]
    code: int = 0


class Stuck(msgspec.Struct, frozen=True):
    """Report attempts of which processes are left (in state D, although killed), or may be left.

    Their devices stay in quarantine.
    """

    names: list[AttemptName]


class MpsNotAsked(msgspec.Struct, frozen=True):
    """Report attempts that end, or have ended, without a word to the MPS daemon of which they are clients, and why."""

    items: list[tuple[AttemptName, str]]


class Replaced(msgspec.Struct, frozen=True):
    """Report that the process that runs a driver's attempts (a supervisor, an engine) died and was replaced.

    The driver's former attempts have ended, or are reported as stuck. The driver has a new `boot`.
    """

    driver: str


class SeenFree(msgspec.Struct, frozen=True):
    """Report attempts that have ended, and whose devices were all seen free."""

    names: list[AttemptName]


class NotFree(msgspec.Struct, frozen=True):
    """Report attempts that have ended, but whose devices were not all seen free: (name, the slots in use)."""

    items: list[tuple[AttemptName, tuple[int, ...]]]


class AnswerRefused(msgspec.Struct, frozen=True):
    """Report that the leader answered a join, renewal or report frame with an error frame."""

    verb: AnswerVerb
    number: int
    problem: Problem


class Tick(msgspec.Struct, frozen=True):
    """The time that `next_deadline_s` returned has come."""


class TurnOver(msgspec.Struct, frozen=True):
    """No event is left in this turn of the loop: send the collected reports in one frame.

    With `lends`, processes of this host hold devices: a worker that leaves stays until these are back.
    """

    lends: bool = False


class HealthChanged(msgspec.Struct, frozen=True):
    """Report that a device became unwell, or well, or that the agent stops: a renewal must report it now."""


class HelloChanged(msgspec.Struct, frozen=True):
    """Report that the worker's hello has changed: a new session must put it into the ledger."""


class OverGrant(msgspec.Struct, frozen=True):
    """Have attempts end: (name, the reason in one line). They exceed their part of a device, made its MPS server
    fail, or are `LOST`."""

    items: list[tuple[AttemptName, str]]


class OverSeen(msgspec.Struct, frozen=True):
    """Report which attempts hold more than their part of which device now: (name, the device's position)."""

    items: list[tuple[AttemptName, int]]


class FreezeAnswered(msgspec.Struct, frozen=True):
    """Report the state of attempts that were to be frozen or resumed: (name, state, the reason in one line).

    The state is "frozen", "running" or "broken"; the reason is "" if the order was carried out.

    A broken attempt has a process that can neither run on nor be frozen, so the attempt is lost.
    """

    items: list[tuple[AttemptName, str, str]]


class LeaseAnswered(msgspec.Struct, frozen=True):
    """Answer `TryLease` for the pool: the attempt has its devices again, or not, with the reason in one line."""

    attempt: Attempt
    why: str = ""


class IdleSeen(msgspec.Struct, frozen=True):
    """Report attempts that do not use their devices: (name, seconds without use, allowed seconds, whether it is to
    end).

    Allowed seconds of 0 are no limit.
    """

    items: list[tuple[AttemptName, int, int, bool]]


class SeenReady(msgspec.Struct, frozen=True):
    """Report what a look at running attempts found: (name, why it is not ready in one line or "" if it is, whether it
    is to end, because it was not ready in time)."""

    items: list[tuple[AttemptName, str, bool]]


class FreezeDue(msgspec.Struct, frozen=True):
    """Report attempts that should be frozen, in this order: (name, seconds without use of its devices)."""

    items: list[tuple[AttemptName, int]]


class ResumeDue(msgspec.Struct, frozen=True):
    """Report frozen attempts that have a process which waits to use its devices."""

    names: list[AttemptName]


class Metered(msgspec.Struct, frozen=True):
    """Report the attempts' use of devices since the last reading: (name, GPU milliseconds, MiB milliseconds, MiB now).

    The first number is UNKNOWN_MS if a device or process does not report its load.
    """

    items: list[tuple[AttemptName, int, int, int]]


class SaidWell(msgspec.Struct, frozen=True):
    """Report that an operator states that these slots are well: the memory of quarantined slots is free."""

    slots: list[int]


class Leave(msgspec.Struct, frozen=True):
    """Leave the fleet for good: end all jobs, report their ends, say goodbye.

    Jobs go on for `within_s` seconds at most: the leader is told, and asks each to end when it may. Then the rest is
    ended, each job with its grace or `grace_s_max`, whichever is shorter. A later event replaces an earlier one.
    """

    within_s: float = 0.0
    grace_s_max: float = LEAVE_GRACE_S_MAX


class Restored(msgspec.Struct, frozen=True):
    """Report what a starting agent found of an earlier one. It is the first event.

    `held` has (attempt, phase, code, detail) for every attempt that the journal and the supervisor know. In phase
    "exited", code and detail are its exit code and reason. For an attempt that waits for its gang, detail is the
    `address:port`. `reports` are the journal's unanswered reports. `withdrawn` attempts were journalled but never
    started. `strays` is set if an unknown attempt still runs and was asked to end. The join then waits for
    `StraysOver`, because no attempt may run that the join does not list.
    """

    held: list[tuple[Attempt, str, int, str]]
    reports: list[Report]
    withdrawn: list[AttemptName]
    strays: bool = False


class StraysOver(msgspec.Struct, frozen=True):
    """Report that no process is left of the unknown attempts that ran here."""


#: every event of the state machine: the leader's frames, reports of drivers and the pool, and the agent's own events
Event = (
    Wanted
    | ReportAck
    | Renewed
    | Joined
    | RollCall
    | AnswerRefused
    | Claims
    | Started
    | Ended
    | StartFailed
    | NotStarted
    | Stuck
    | MpsNotAsked
    | CheckpointStored
    | Replaced
    | SeenFree
    | NotFree
    | Restored
    | StraysOver
    | SaidWell
    | HealthChanged
    | HelloChanged
    | OverGrant
    | OverSeen
    | FreezeAnswered
    | LeaseAnswered
    | IdleSeen
    | SeenReady
    | FreezeDue
    | ResumeDue
    | Metered
    | Tick
    | TurnOver
    | Leave
)


# ----------------------------------------------------------------------------------------------------- commands


class TryClaim(msgspec.Struct, frozen=True):
    """Claim the slots of each attempt now, either all slots of an attempt or none. The next event must be `Claims`."""

    attempts: list[Attempt]


class StartAttempts(msgspec.Struct, frozen=True):
    driver: str
    attempts: list[Attempt]


class EndAttempt(msgspec.Struct, frozen=True):
    """Ask an attempt to end, with `grace_s` between SIGTERM and SIGKILL.

    With `notice_s`, an attempt with a checkpoint signal gets that signal first, and SIGTERM `notice_s` later.
    """

    attempt: Attempt
    grace_s: float
    why: str
    notice_s: float = 0.0


class WatchReady(msgspec.Struct, frozen=True):
    """Look whether a running attempt is ready, as its request says; `SeenReady` follows."""

    attempt: Attempt


class NoteKept(msgspec.Struct, frozen=True):
    """Journal the ports of an attempt, and that it was ready: the next agent must know both."""

    attempt: Attempt


class ResizeAttempts(msgspec.Struct, frozen=True):
    """Journal the new parts of these attempts, and enforce them."""

    attempts: list[Attempt]


class FreezeAttempt(msgspec.Struct, frozen=True):
    """Freeze an attempt, or resume it if `on` is false; `FreezeAnswered` follows."""

    attempt: Attempt
    on: bool


class RunCommands(msgspec.Struct, frozen=True):
    """Run these commands in running attempts, for callers, and send their processes these signals."""

    execs: list[Exec]
    signals: list[Signal] = []


class Unlease(msgspec.Struct, frozen=True):
    """Return the devices of a frozen attempt to the pool; all else of it stays."""

    attempt: Attempt


class TryLease(msgspec.Struct, frozen=True):
    """Claim the slots of a frozen attempt again, all or none. The next event must be `LeaseAnswered`."""

    attempt: Attempt


class Release(msgspec.Struct, frozen=True):
    """Return the devices of these attempts to the pool."""

    attempts: list[Attempt]


class ProbeFree(msgspec.Struct, frozen=True):
    """Check whether these attempts' devices have free memory again; `SeenFree` or `NotFree` follows."""

    attempts: list[Attempt]


class Quarantine(msgspec.Struct, frozen=True):
    """Put these slots of an attempt into quarantine, and free its other slots unless it is stuck."""

    attempt: Attempt
    slots: tuple[int, ...]


class Forget(msgspec.Struct, frozen=True):
    """Have the driver forget these attempts: their ends are in the ledger."""

    attempts: list[Attempt]


class SetsCount(msgspec.Struct, frozen=True):
    """Tell drivers which sets of these ranks of gangs the ledger remembers."""

    items: list[GangSets]


class TellSets(msgspec.Struct, frozen=True):
    """Have drivers report the sets of all ranks of gangs again: there is a new leader."""


class CheckpointsNoted(msgspec.Struct, frozen=True):
    """Tell the driver that what was last reported of these attempts' checkpoints is in the ledger."""

    attempts: list[Attempt]


class SendReports(msgspec.Struct, frozen=True):
    """Journal the frame (unless `again`), then send it."""

    frame: ReportFrame
    again: bool = False


class ReportsAnswered(msgspec.Struct, frozen=True):
    """Record in the journal that the frames up to `no` are in the ledger."""

    no: int


class SendRenew(msgspec.Struct, frozen=True):
    """Send a renewal. The shell adds the pool's generation, the local leases, and whether a local request waits."""

    session: str
    n: int
    no: int
    held: list[Held]
    resized: list[Resized] = []
    leaving_s: int | None = None


class SendJoin(msgspec.Struct, frozen=True):
    """Journal `n` and the reports, then ask for a session. With `again`, send the same frame as before."""

    n: int
    reports: list[Report]
    holding: list[Held]
    again: bool = False


class SessionLive(msgspec.Struct, frozen=True):
    """Record in the journal that the reports of the join were answered, and the ledger's id."""

    n: int
    ledger: str


class SetFence(msgspec.Struct, frozen=True):
    """Set the fence: without a later one, the supervisor ends the jobs at `deadline_s`, within `grace_s` (H29)."""

    deadline_s: float
    grace_s: float


class SayHello(msgspec.Struct, frozen=True):
    pass


class Draining(msgspec.Struct, frozen=True):
    """An operator began to drain this worker, moved the drain's deadline, or cancelled the drain.

    `within_s` is the time that is left; None: the drain has no deadline.
    """

    draining: bool
    within_s: float | None = None


class Well(msgspec.Struct, frozen=True):
    """Handle an operator's order, numbered `n`, that these slots are well; `SaidWell` follows if the order is new."""

    slots: list[int]
    n: int


class SendGoodbye(msgspec.Struct, frozen=True):
    session: str


class Log(msgspec.Struct, frozen=True):
    """Log one line. `code` is stable; repeated lines may be left out."""

    level: Literal["info", "warning", "error"]
    code: str
    text: str


class GiveUp(msgspec.Struct, frozen=True):
    """Stop the agent: the worker may not join, and waiting longer will not change that."""

    problem: Problem


Command = (
    TryClaim
    | StartAttempts
    | EndAttempt
    | WatchReady
    | NoteKept
    | ResizeAttempts
    | FreezeAttempt
    | RunCommands
    | Unlease
    | TryLease
    | Release
    | ProbeFree
    | Quarantine
    | Forget
    | CheckpointsNoted
    | SetsCount
    | TellSets
    | SendReports
    | ReportsAnswered
    | SendRenew
    | SendJoin
    | SessionLive
    | SetFence
    | SayHello
    | GiveUp
    | Draining
    | Well
    | SendGoodbye
    | Log
)
