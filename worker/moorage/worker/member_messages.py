"""What goes into the worker's state machine (events) and what comes out of it (commands).

Frames of the leader are events as they are: `Wanted`, `RollCall`, `Joined`, `Renewed`, `FactAck`. All times are
seconds of CLOCK_BOOTTIME, which goes on in a suspended machine (clock_gettime(2)); slots are positions in hello's
`gpu_pool`. Events and commands hold lists, so that a turn with a thousand members costs a handful of objects.
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

#: (tenant, job, replica, attempt, fence): the name of a member everywhere
MemberName = tuple[str, str, int, int, int]
#: the frames of a worker that the leader answers
AnswerVerb = Literal["join", "renew", "fact"]

#: the phases of a member here; "over" is none of them but the tombstone that is left
MemberPhase = Literal["claimed", "starting", "running", "ending", "exited", "over"]
#: where each may go
PHASES: Final[dict[MemberPhase, frozenset[MemberPhase]]] = {
    "claimed": frozenset({"starting", "over"}),
    "starting": frozenset({"running", "ending", "exited", "over"}),
    "running": frozenset({"ending", "exited"}),
    "ending": frozenset({"ending", "exited", "over"}),
    "exited": frozenset({"over"}),
    "over": frozenset(),
}
#: how a phase is told in a renewal; a member that is starting does not run before its driver says so
HELD_PHASE: Final[dict[MemberPhase, str]] = {
    "claimed": "claimed",
    "starting": "claimed",
    "running": "running",
    "ending": "ending",
    "exited": "exited",
}


class Member:
    """One member that is held here. Mutable: only the state machine changes it. `job` names it, not `request.job`."""

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
        self.ends_at_s = None if place.ends_in_s is None else now + place.ends_in_s  # the job's deadline, as we know
        self.notice_s = 0.0
        self.quarantined: tuple[int, ...] = ()
        self.stuck = False
        self.frozen = False  # its processes are, while it is running or ending
        self.freezing = False  # its driver was asked to freeze or to resume it, and has not answered
        self.used: tuple[int, int] | None = None  # of its devices, as `Metered` has it; since this agent's start

    @property
    def master_port_wanted(self) -> int:
        """The rendezvous port of a gang's rank 0, 0 for anything else."""
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
    """The process tree of each is proven gone. (name, code, reason); code is minus the signal where one ended it."""

    items: list[tuple[MemberName, int, str]]


class StartFailed(msgspec.Struct, frozen=True):
    """Nothing runs. (name, code as a shell gives it: 126 or 127, one line why)."""

    items: list[tuple[MemberName, int, str]]


class NotStarted(msgspec.Struct, frozen=True):
    """Nothing runs, and it is this host that could not start it: (name, one line why). It is refused, not failed."""

    items: list[tuple[MemberName, str]]


class Stuck(msgspec.Struct, frozen=True):
    """Asked to end, killed, and still there (state D), or its end cannot be proven: the device stays quarantined."""

    names: list[MemberName]


class Replaced(msgspec.Struct, frozen=True):
    """What runs a driver's members (a supervisor, an engine) died and another one took its place.

    What ran of this driver is over, or is reported as stuck. The driver's `boot` is new.
    """

    driver: str


class SeenFree(msgspec.Struct, frozen=True):
    """The memory of every device of these members was seen free after their end."""

    names: list[MemberName]


class NotFree(msgspec.Struct, frozen=True):
    """(name, the slots whose memory is still taken)."""

    items: list[tuple[MemberName, tuple[int, ...]]]


class AnswerRefused(msgspec.Struct, frozen=True):
    """The leader answered a join, renewal or fact frame with an error frame."""

    verb: AnswerVerb
    number: int
    problem: Problem


class Tick(msgspec.Struct, frozen=True):
    """A moment that `next_deadline_s` named has come."""


class TurnOver(msgspec.Struct, frozen=True):
    """Nothing else is waiting in this turn of the loop: gathered facts leave now, in one frame."""


class HealthChanged(msgspec.Struct, frozen=True):
    """A device became unwell, or well: the next renewal tells it, and leaves now."""


class HelloChanged(msgspec.Struct, frozen=True):
    """What the worker says of itself is otherwise from now on: a new session tells the ledger."""


class OverGrant(msgspec.Struct, frozen=True):
    """(name, one line why) of members that are to end: over their grant of a shared device, or `LOST`."""

    items: list[tuple[MemberName, str]]


class FreezeAnswered(msgspec.Struct, frozen=True):
    """(name, "frozen", "running" or "broken", one line why) of members that were to be frozen or resumed.

    Of a broken one some process can neither run on nor be frozen, so the attempt is lost.
    """

    items: list[tuple[MemberName, str, str]]


class IdleSeen(msgspec.Struct, frozen=True):
    """Members whose devices show no use: (name, for how many seconds, after how many it ends, 0: never, ends now)."""

    items: list[tuple[MemberName, int, int, bool]]


class FreezeDue(msgspec.Struct, frozen=True):
    """Members that are to be frozen, the first one first: (name, for how many seconds its devices show no use)."""

    items: list[tuple[MemberName, int]]


class ResumeDue(msgspec.Struct, frozen=True):
    """Frozen members of which a process waits to use its devices."""

    names: list[MemberName]


class Metered(msgspec.Struct, frozen=True):
    """(name, milliseconds of a GPU at work, MiB milliseconds) that members have used since the reading before.

    The first is UNKNOWN_MS where no device tells it.
    """

    items: list[tuple[MemberName, int, int]]


class SaidWell(msgspec.Struct, frozen=True):
    """An operator says that these slots are well: what is kept from use on them for a member's sake is free."""

    slots: list[int]


class Leave(msgspec.Struct, frozen=True):
    """Leave the fleet for good: end what runs, tell it, say goodbye."""


class Restored(msgspec.Struct, frozen=True):
    """A restarted agent's first event.

    `held`: (member, phase, code, detail) of all that the journal and the supervisor know. Code is for "exited", detail
    its reason, and for a member that holds for its gang the `address:port`. `facts`: the unanswered ones of the
    journal. `withdrawn`: journalled but never started. `strays`: something unknown runs still and was told to end; the
    join waits for `StraysOver`, since nothing of what it does not list may live.
    """

    held: list[tuple[Member, str, int, str]]
    facts: list[Fact]
    withdrawn: list[MemberName]
    strays: bool = False


class StraysOver(msgspec.Struct, frozen=True):
    """What ran here unknown to the journal is proven gone."""


#: all that the state machine takes: frames of the leader, what drivers and the pool report, and the agent's own words
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
    """Claim the named slots of each, all or nothing, now; `Claims` must be the next event."""

    members: list[Member]


class StartMembers(msgspec.Struct, frozen=True):
    driver: str
    members: list[Member]


class EndMember(msgspec.Struct, frozen=True):
    """Ask it to end; with `notice_s` one that has a checkpoint signal gets that first, and is asked so much later."""

    member: Member
    grace_s: float
    why: str
    notice_s: float = 0.0


class ResizeMembers(msgspec.Struct, frozen=True):
    """Journal the new part of their devices that these members' places name, and have them keep to it."""

    members: list[Member]


class FreezeMember(msgspec.Struct, frozen=True):
    """Freeze it, or with `on` false have it run on; `FreezeAnswered` follows."""

    member: Member
    on: bool


class Release(msgspec.Struct, frozen=True):
    """Give the devices of these members back to the pool."""

    members: list[Member]


class ProbeFree(msgspec.Struct, frozen=True):
    """Look whether the devices are free of these members' memory; `SeenFree` or `NotFree` follows."""

    members: list[Member]


class Quarantine(msgspec.Struct, frozen=True):
    """Keep these slots of the member out of the pool; its others go back."""

    member: Member
    slots: tuple[int, ...]


class Forget(msgspec.Struct, frozen=True):
    """The ledger has the end of these members: the driver need not remember them."""

    members: list[Member]


class SendFacts(msgspec.Struct, frozen=True):
    """Journal (unless `again`), then send."""

    frame: FactFrame
    again: bool = False


class FactsAnswered(msgspec.Struct, frozen=True):
    """For the journal: the frames up to `no` are in the ledger."""

    no: int


class SendRenew(msgspec.Struct, frozen=True):
    """The shell adds what only it knows: the pool's generation, local claimers, and whether one waits."""

    session: str
    n: int
    no: int
    held: list[Held]
    resized: list[Resized] = []


class SendJoin(msgspec.Struct, frozen=True):
    """Journal `n` and the facts, then ask for a session. `again`: the same frame, byte for byte, as before."""

    n: int
    facts: list[Fact]
    holding: list[Held]
    again: bool = False


class SessionLive(msgspec.Struct, frozen=True):
    """Journal that the facts of the join are answered, and the ledger's id."""

    n: int
    ledger: str


class SetFence(msgspec.Struct, frozen=True):
    """Tell the supervisor: without another word, end the jobs at `deadline_s` within `grace_s` (H29)."""

    deadline_s: float
    grace_s: float


class SayHello(msgspec.Struct, frozen=True):
    pass


class Draining(msgspec.Struct, frozen=True):
    """An operator began to drain this worker, or took it back."""

    draining: bool


class Well(msgspec.Struct, frozen=True):
    """An operator's word, numbered `n`, that these slots are well; `SaidWell` follows where it is news."""

    slots: list[int]
    n: int


class SendGoodbye(msgspec.Struct, frozen=True):
    session: str


class Log(msgspec.Struct, frozen=True):
    """One line for the operator. `code` is stable; the shell may thin out repeated ones."""

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
