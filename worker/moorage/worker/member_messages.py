"""Define the messages into the worker's state machine (events) and out of it (commands).

The leader's frames are events unchanged: `Wanted`, `RollCall`, `Joined`, `Renewed`, `FactAck`. All times are seconds of
CLOCK_BOOTTIME, which goes on in a suspended machine (clock_gettime(2)); slots are positions in hello's `gpu_pool`.
Events and commands have lists, so that a turn with a thousand members needs only a few objects.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from moorage.schemas.errors import Problem
from moorage.schemas.frames import (
    Fact,
    FactAck,
    FactFrame,
    Held,
    Joined,
    Place,
    Renewed,
    Resized,
    RollCall,
    Start,
    Wanted,
)
from moorage.schemas.job import Request

#: (tenant, job, replica, attempt, fence): the name of a member in all of the worker
MemberName = tuple[str, str, int, int, int]
#: the frames of a worker that the leader answers
AnswerVerb = Literal["join", "renew", "fact"]

#: the phases of a member; an "over" one is not held any more, only its tombstone is
MemberPhase = Literal["claimed", "starting", "running", "ending", "exited", "over"]
#: the legal next phases
PHASES: Final[dict[MemberPhase, frozenset[MemberPhase]]] = {
    "claimed": frozenset({"starting", "over"}),
    "starting": frozenset({"running", "ending", "exited", "over"}),
    "running": frozenset({"ending", "exited"}),
    "ending": frozenset({"ending", "exited", "over"}),
    "exited": frozenset({"over"}),
    "over": frozenset(),
}
#: the phase that a renewal reports; a starting member counts as not running until its driver reports the start
HELD_PHASE: Final[dict[MemberPhase, str]] = {
    "claimed": "claimed",
    "starting": "claimed",
    "running": "running",
    "ending": "ending",
    "exited": "exited",
}


#: the phase of an earlier agent's member, by its journal or driver; the reports of an ended member go on from it
RESTORED_AS: Final[dict[str, MemberPhase]] = {
    "claimed": "claimed",
    "starting": "starting",
    "refused": "starting",
    "running": "running",
    "exited": "running",
    "ending": "ending",
}


class Member:
    """One held member (an attempt of a replica). Only the state machine changes it.

    `job` names it, not `request.job`.
    """

    __slots__ = (
        "attempt",
        "code",
        "driver",
        "ends_at_s",
        "fence",
        "free_by_s",
        "freezing",
        "frozen",
        "grace_s",
        "job",
        "keep",
        "left",
        "name",
        "notice_s",
        "phase",
        "place",
        "probe_at_s",
        "quarantined",
        "replica",
        "request",
        "slots",
        "start",
        "stuck",
        "tenant",
        "used",
        "why",
    )

    def __init__(self, name: MemberName, place: Place, request: Request, now: float) -> None:
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
        self.phase: MemberPhase = "claimed"
        self.start: Start | None = None
        self.code = 0
        self.why = ""
        self.probe_at_s = 0.0
        self.free_by_s = 0.0
        self.ends_at_s = None if place.ends_in_s is None else now + place.ends_in_s  # the job's deadline, by our clock
        self.notice_s = 0.0
        self.quarantined: tuple[int, ...] = ()
        self.stuck = False
        self.left: frozenset[int] = frozenset()  # slots that a guest still has when this member ends
        self.frozen = False  # whether its processes are frozen, while it is running or ending
        self.freezing = False  # its driver was asked to freeze or to resume it, and has not answered
        self.used: tuple[int, int] | None = None  # its use of devices, as in `Metered`, since this agent's start

    @property
    def master_port_wanted(self) -> int:
        """The rendezvous port for rank 0 of a gang, 0 for other members."""
        if not self.place.hold or self.replica != 0:
            return 0
        gpu = self.request.gpu
        return gpu.distributed.master_port if gpu is not None and gpu.distributed is not None else MASTER_PORT_DEFAULT


MASTER_PORT_DEFAULT: Final = 29500


# ------------------------------------------------------------------------------------------------------- events


class Claims(msgspec.Struct, frozen=True):
    """The pool's answer to `TryClaim`: granted with the rendezvous `address:port` or "", refused with the reason."""

    granted: list[tuple[Member, str]]
    refused: list[tuple[Member, str]]


class Started(msgspec.Struct, frozen=True):
    names: list[MemberName]


class Ended(msgspec.Struct, frozen=True):
    """The process tree of each is proven gone. (name, code, reason); code is minus the signal if one ended it."""

    items: list[tuple[MemberName, int, str]]


class StartFailed(msgspec.Struct, frozen=True):
    """Nothing runs. (name, code as a shell gives it: 126 or 127, the reason in one line)."""

    items: list[tuple[MemberName, int, str]]


class NotStarted(msgspec.Struct, frozen=True):
    """Nothing runs, because of this host: (name, the reason in one line). The member is refused, not failed."""

    items: list[tuple[MemberName, str]]


class Stuck(msgspec.Struct, frozen=True):
    """Members that were killed and still exist (state D), or whose end cannot be proven: their devices stay
    quarantined.
    """

    names: list[MemberName]


class Replaced(msgspec.Struct, frozen=True):
    """The process that runs a driver's members (a supervisor, an engine) died and was replaced.

    The driver's former members are over, or are reported as stuck. The driver's `boot` is new.
    """

    driver: str


class SeenFree(msgspec.Struct, frozen=True):
    """The memory of every device of these members was seen free after their end."""

    names: list[MemberName]


class NotFree(msgspec.Struct, frozen=True):
    """Members whose memory is still in use: (name, the slots)."""

    items: list[tuple[MemberName, tuple[int, ...]]]


class AnswerRefused(msgspec.Struct, frozen=True):
    """The leader answered a join, renewal or fact frame with an error frame."""

    verb: AnswerVerb
    number: int
    problem: Problem


class Tick(msgspec.Struct, frozen=True):
    """The time that `next_deadline_s` returned has come."""


class TurnOver(msgspec.Struct, frozen=True):
    """No event is left in this turn of the loop: send the collected facts in one frame."""


class HealthChanged(msgspec.Struct, frozen=True):
    """A device became unwell, or well: send a renewal now that reports it."""


class HelloChanged(msgspec.Struct, frozen=True):
    """The worker's hello has changed: a new session must put it into the ledger."""


class OverGrant(msgspec.Struct, frozen=True):
    """Members that must end: (name, the reason in one line), for exceeding their part of a shared device, or `LOST`."""

    items: list[tuple[MemberName, str]]


class FreezeAnswered(msgspec.Struct, frozen=True):
    """Members that were asked to freeze or resume: (name, "frozen", "running" or "broken", the reason in one line).

    A broken one has a process that can neither run on nor be frozen, so the attempt is lost.
    """

    items: list[tuple[MemberName, str, str]]


class IdleSeen(msgspec.Struct, frozen=True):
    """Members whose devices show no use: (name, seconds without use, seconds that are allowed (0: any), ends now)."""

    items: list[tuple[MemberName, int, int, bool]]


class FreezeDue(msgspec.Struct, frozen=True):
    """Members that are to be frozen, the first one first: (name, for how many seconds its devices show no use)."""

    items: list[tuple[MemberName, int]]


class ResumeDue(msgspec.Struct, frozen=True):
    """Frozen members of which a process waits to use its devices."""

    names: list[MemberName]


class Metered(msgspec.Struct, frozen=True):
    """What members used since the last reading: (name, milliseconds of a GPU at work, MiB milliseconds).

    The first number is UNKNOWN_MS if no device reports it.
    """

    items: list[tuple[MemberName, int, int]]


class SaidWell(msgspec.Struct, frozen=True):
    """An operator says that these slots are well: slots quarantined because of a member are free."""

    slots: list[int]


class Leave(msgspec.Struct, frozen=True):
    """Leave the fleet for good: end all jobs, report their ends, say goodbye."""


class Restored(msgspec.Struct, frozen=True):
    """The first event of a restarted agent.

    `held` has (member, phase, code, detail) for every member that the journal and the supervisor know. For "exited",
    code and detail are its exit code and reason; for a member that waits for its gang, detail is the `address:port`.
    `facts` are the journal's unanswered ones. `withdrawn` were journalled but never started. `strays` is set if an
    unknown member still runs and was asked to end: the join waits for `StraysOver`, because a member that the join does
    not list must not live.
    """

    held: list[tuple[Member, str, int, str]]
    facts: list[Fact]
    withdrawn: list[MemberName]
    strays: bool = False


class StraysOver(msgspec.Struct, frozen=True):
    """The unknown members that ran here are proven gone."""


#: every event of the state machine: the leader's frames, reports of drivers and the pool, and the agent's own events
Event = (
    Wanted
    | FactAck
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
    | Replaced
    | SeenFree
    | NotFree
    | Restored
    | StraysOver
    | SaidWell
    | HealthChanged
    | HelloChanged
    | OverGrant
    | FreezeAnswered
    | IdleSeen
    | FreezeDue
    | ResumeDue
    | Metered
    | Tick
    | TurnOver
    | Leave
)


# ----------------------------------------------------------------------------------------------------- commands


class TryClaim(msgspec.Struct, frozen=True):
    """Claim the slots of each member now, all of a member's or none; the next event must be `Claims`."""

    members: list[Member]


class StartMembers(msgspec.Struct, frozen=True):
    driver: str
    members: list[Member]


class EndMember(msgspec.Struct, frozen=True):
    """Ask it to end.

    With `notice_s`, a member with a checkpoint signal gets that signal first, and is asked that much later.
    """

    member: Member
    grace_s: float
    why: str
    notice_s: float = 0.0


class ResizeMembers(msgspec.Struct, frozen=True):
    """Journal the new parts in these members' places, and make the members keep to them."""

    members: list[Member]


class FreezeMember(msgspec.Struct, frozen=True):
    """Freeze a member, or resume it if `on` is false; `FreezeAnswered` follows."""

    member: Member
    on: bool


class Release(msgspec.Struct, frozen=True):
    """Give the devices of these members back to the pool."""

    members: list[Member]


class ProbeFree(msgspec.Struct, frozen=True):
    """Check whether the devices are free of these members' memory; `SeenFree` or `NotFree` follows."""

    members: list[Member]


class Quarantine(msgspec.Struct, frozen=True):
    """Keep these slots of the member out of the pool; its other slots are freed."""

    member: Member
    slots: tuple[int, ...]


class Forget(msgspec.Struct, frozen=True):
    """Have the driver forget these members: their ends are in the ledger."""

    members: list[Member]


class SendFacts(msgspec.Struct, frozen=True):
    """Journal the frame (unless `again`), then send it."""

    frame: FactFrame
    again: bool = False


class FactsAnswered(msgspec.Struct, frozen=True):
    """Record in the journal that the frames up to `no` are in the ledger."""

    no: int


class SendRenew(msgspec.Struct, frozen=True):
    """Send a renewal; the shell adds the pool's generation, local claimers, and whether one waits."""

    session: str
    n: int
    no: int
    held: list[Held]
    resized: list[Resized] = []


class SendJoin(msgspec.Struct, frozen=True):
    """Journal `n` and the facts, then ask for a session. With `again`, send exactly the same frame as before."""

    n: int
    facts: list[Fact]
    holding: list[Held]
    again: bool = False


class SessionLive(msgspec.Struct, frozen=True):
    """Journal that the facts of the join are answered, and the ledger's id."""

    n: int
    ledger: str


class SetFence(msgspec.Struct, frozen=True):
    """Set the supervisor's deadline: without a later one it ends the jobs at `deadline_s`, within `grace_s` (H29)."""

    deadline_s: float
    grace_s: float


class SayHello(msgspec.Struct, frozen=True):
    pass


class Draining(msgspec.Struct, frozen=True):
    """An operator began to drain this worker, or cancelled the drain."""

    draining: bool


class Well(msgspec.Struct, frozen=True):
    """An operator's order, numbered `n`, that these slots are well; `SaidWell` follows if it is new."""

    slots: list[int]
    n: int


class SendGoodbye(msgspec.Struct, frozen=True):
    session: str


class Log(msgspec.Struct, frozen=True):
    """One log line. `code` is stable; repeated lines may be left out."""

    level: Literal["info", "warning", "error"]
    code: str
    text: str


class GiveUp(msgspec.Struct, frozen=True):
    """The worker may not join, and waiting longer will not change that."""

    problem: Problem


Command = (
    TryClaim
    | StartMembers
    | EndMember
    | ResizeMembers
    | FreezeMember
    | Release
    | ProbeFree
    | Quarantine
    | Forget
    | SendFacts
    | FactsAnswered
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
