"""What a ledger record may say: outcomes, never causes, so that folding needs no policy.

A record holds every transition of one tick. Transitions are flat integers (`STEP_WIDTH` each) because a record may
hold thousands of them; rare acts are tagged lists. Numbers here are in every ledger ever written: append only.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import msgspec

#: the newest record format, which is the newest feature level: 1 is all up to release 0.2, 2 is 0.3. A release folds
#: this one and the one before; a leader writes the ledger's level, which an operator raises once every scheduler can
FORMAT: Final = 2
RECORD_BYTES_MAX: Final = 512 * 1024
STEP_WIDTH: Final = 6


class Op(IntEnum):
    """A step is (op, job number, replica, a, b, c)."""

    PLACE = 0  #: a worker number, b slot mask, c sharing mode, and above it a rate (see `placing`)
    CLAIM = 1  #: c note: address of rank 0 of a gang
    START = 2
    EXIT = 3  #: attempt over, tree gone: a next state, b exit code, c note
    REFUSE = 4  #: attempt over before it began: a next state, c note
    WITHDRAW = 5  #: attempt over on our request, never ran: a next state, c note
    LOSE = 6  #: attempt over with its worker's session: a next state, c note
    FREE = 7  #: a member that lingers (see `packed`): its devices were seen free
    END = 8  #: a ENDING or CANCELLING, b what it becomes then and above it a notice (see `ending`), c note
    MOVE = 9  #: a new state of a replica that holds nothing, b code, c note
    BACKOFF = 10  #: a not before (ledger ms), b which count grows (see Count)
    GANG = 11  #: a phase, b what its replicas become, c count that grows at the end
    QUARANTINE = 12  #: a member that lingers (see `packed`), b slot mask: the device did not come back
    # what one record brings of one member at once, in a step instead of several
    BEGIN = 13  #: CLAIM and START
    DONE = 14  #: EXIT and FREE: a next state, b exit code, c note
    RUN = 15  #: CLAIM, START, EXIT and FREE: a next state, b exit code, c note


#: ops that say what a worker reported; all others are the scheduler's decision, or the act of an actor
REPORTED: Final = (Op.CLAIM, Op.START, Op.EXIT, Op.REFUSE, Op.WITHDRAW, Op.BEGIN, Op.DONE, Op.RUN)

#: who did a transition, beside an actor: the worker that it names reported it
BY_WORKER: Final = "worker"
BY_OPERATOR: Final = "operator"
SAID_CHARS_MAX: Final = 64
#: why a session is gone whose worker took its leave
GOODBYE: Final = "goodbye"


def by_tenant(tenant: str) -> str:
    return f"tenant:{tenant}"


def actor(who: str, said: object = "") -> str:
    """An actor as a record writes it: `who` as NATS proves it, a blank, and the name that the caller said of itself."""
    name = "".join(char for char in said if char.isprintable())[:SAID_CHARS_MAX] if isinstance(said, str) else ""
    return f"{who} {name}" if name else who


NOTICE_BITS: Final = 8
#: the longest notice before an end, in seconds
NOTICE_S_MAX: Final = 3600


def ending(becomes: int, notice_s: int) -> int:
    """What an END step says of its member: the state that follows, and the seconds it is told before it is asked to."""
    return notice_s << NOTICE_BITS | becomes


#: a ledger has numbers for so many workers
WORKERS_MAX: Final = 1 << 16


def packed(fence: int, worker_num: int) -> int:
    """A member that lingers after its attempt, in one integer: where to look, and which fence."""
    return fence * WORKERS_MAX + worker_num


def unpacked(lingering: int) -> tuple[int, int]:
    """(fence, worker number) of a member that lingers, see `packed`."""
    return divmod(lingering, WORKERS_MAX)


MODE_BITS: Final = 8


def placing(mode: int, rate_milli: int) -> int:
    """The last number of a PLACE step: how it holds its devices, and what that counts in its tenant's fair share.

    Without a rate, thousandths of a GPU, each of its devices counts as a whole one.
    """
    return rate_milli << MODE_BITS | mode


class Count(IntEnum):
    """Which bound an attempt that is over counts against."""

    NONE = 0
    RETRY = 1
    LOSS = 2
    REFUSAL = 3


class GangPhase(IntEnum):
    """The phase of a whole gang attempt; changed by one record for all its members."""

    NONE = 0
    HOLDING = 1
    STARTED = 2
    ENDING = 3
    OVER = 4


class Mode(IntEnum):
    """How a member holds its devices."""

    NONE = 0
    EXCLUSIVE = 1
    MPS = 2
    TIME_SLICE = 3


MODE_NAMES: Final = ("none", "exclusive", "mps", "time-slice")
MODE_OF: Final = {"exclusive": Mode.EXCLUSIVE, "mps": Mode.MPS, "time-slice": Mode.TIME_SLICE}


class Act:
    """Tags of the rare acts; each is a list [tag, …] in `Record.acts`."""

    EPOCH: Final = "epoch"  # ledger id, scheduler name, wall seconds
    WORKER: Final = "worker"  # worker number, id, machine
    JOIN: Final = "join"  # worker number, boot, n, session, fact number, hello as a map, in it lost_ms
    GONE: Final = "gone"  # worker number, why (lost, `GOODBYE`, joined-anew)
    FLAG: Final = "flag"  # worker number, open|cordoned|draining, by
    CURSOR: Final = "cursor"  # tenant, submit|cancel, stream sequence
    TOMBSTONE: Final = "tombstone"  # tenant, job, queue sequence or 0
    UNTOMB: Final = "untomb"  # tenant, job
    COMPACT: Final = "compact"  # flat: job number, request digest; then where each one's history stands, 0 for nowhere
    PART: Final = "part"  # job number, history sequence, first and last revision: so much of its story stands there
    EXPIRE: Final = "expire"  # how many of the oldest finished rows go
    SNAPSHOT: Final = "snapshot"  # name, sequence it stands at, blake2b digest of its bytes
    RESIGN: Final = "resign"  # the leader stops for good: nobody need wait for its silence
    UNQUARANTINE: Final = "unquarantine"  # worker number, slot mask, by
    #: worker number, slot, kind (empty: well again), detail, 1 where what ran on it is asked to leave
    HEALTH: Final = "health"
    WELL: Final = "well"  # worker number, slots that an operator says are well (0: the worker has taken it), by
    AVOID: Final = "avoid"  # job number, worker number, slots that failed under it (0: it may use them again)
    #: worker number, ledger ms from which nothing is placed, at which jobs leave, of its end (0: none); by, why.
    #: All 0: there is none any more
    WINDOW: Final = "window"
    HOLD: Final = "hold"  # tenant, job number or 0 for its whole queue, actor, why
    UNHOLD: Final = "unhold"  # tenant, job number or 0, actor, why
    PRIORITY: Final = "priority"  # job number, priority, actor, why
    LIMIT: Final = "limit"  # tenant, GPUs, jobs (0: none), actor, why
    LEVEL: Final = "level"  # the feature level from this record on, actor, why
    BEHIND: Final = "behind"  # why this ledger is an older backup that nobody may lead
    RESTORED: Final = "restored"  # the id that this ledger had before it was restored from a backup
    SHARE: Final = "share"  # tenant, weight, GPUs guaranteed (0: none set), actor, why
    PREEMPT: Final = "preempt"  # job number, workers held for it, numbers of the jobs that end for it; none: given up
    HALF_LIFE: Final = "half-life"  # ms: from now on usage is counted, and decays so


#: beside the acts: the notice that stands in an END step
NOTICE: Final = "notice"
#: the feature level from which on each of these may stand in a ledger: a scheduler that knows the level before alone
#: could not follow it. What is not named always may
LEVEL_OF: Final[dict[str, int]] = {
    NOTICE: 2,
    Act.HEALTH: 2,
    Act.WELL: 2,
    Act.AVOID: 2,
    Act.WINDOW: 2,
    Act.SHARE: 2,
    Act.HALF_LIFE: 2,
    Act.PREEMPT: 2,
}


class Record(msgspec.Struct, array_like=True, gc=False):
    """One tick's outcomes. `digest` is that of the state before this record; `time` is ledger milliseconds.

    `format` is the ledger's feature level. (`leader`, `rid`) is the record's own name, by which a leader knows it again
    after an unclear answer. `accepts` is [tenant, [job, body, replicas, traceparent, …]]: job numbers in order;
    `facts` is flat: worker number, fact number folded through. `evidence` is flat per decision, see `plan.py`.
    `actors` is flat: first entry of `steps`, entry behind the last, note; who did those steps (see `actor`). Steps of
    no actor are the worker's own where their op is in `REPORTED`, else the scheduler's.
    """

    format: int
    epoch: int
    leader: int
    rid: int
    time: int
    digest: int
    accepts: list[tuple[str, list[Any]]] = []
    steps: list[int] = []
    facts: list[int] = []
    notes: list[str] = []
    acts: list[list[Any]] = []
    evidence: list[int] = []
    actors: list[int] = []


encode_record: Final = msgspec.msgpack.Encoder().encode
decode_record: Final = msgspec.msgpack.Decoder(Record).decode
