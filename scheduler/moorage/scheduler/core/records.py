"""The format of ledger records. They hold outcomes and never causes, so that folding them needs no policy.

A record holds all transitions of one tick: the steps. There may be thousands, so each is `STEP_WIDTH` plain integers in
one flat list; rare events are acts, which are tagged lists. The numbers here are in every ledger ever written: new ones
may be added at the end, none may change.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import msgspec

#: the newest record format, which is the newest feature level: 1 up to release 0.2, 2 from 0.3 on. A release can fold
#: this format and the one before. A leader writes the ledger's level, which an operator raises once every scheduler
#: can fold the next one
FORMAT: Final = 2
RECORD_BYTES_MAX: Final = 512 * 1024
STEP_WIDTH: Final = 6


class Op(IntEnum):
    """A step is (op, job number, replica, a, b, c)."""

    PLACE = 0  #: a worker number, b slot mask, c sharing mode, and above it a rate (see `placing`)
    CLAIM = 1  #: c note: address of rank 0 of a gang
    START = 2
    EXIT = 3  #: attempt over, tree gone: a next state, b exit code, c note
    REFUSE = 4  #: attempt over before it began: a next state, b exit code, c note
    WITHDRAW = 5  #: attempt over on our request, never ran: a next state, c note
    LOSE = 6  #: attempt over with its worker's session: a next state, c note
    FREE = 7  #: a member whose attempt is over (see `packed`): its devices were seen free
    END = 8  #: a ENDING or CANCELLING, b next state and above it a notice (see `ending`), c note
    MOVE = 9  #: a new state of a replica without a member, b code, c note
    BACKOFF = 10  #: a not before (ledger ms), b which count grows (see Count)
    GANG = 11  #: a phase, b next state of its replicas, c which count grows at the end
    QUARANTINE = 12  #: a member whose attempt is over (see `packed`), b slot mask: the device did not become free
    # several of the steps above about one member, in one step
    BEGIN = 13  #: CLAIM and START
    DONE = 14  #: EXIT and FREE: a next state, b exit code, c note
    RUN = 15  #: CLAIM, START, EXIT and FREE: a next state, b exit code, c note


#: ops for what a worker reported; all others are decisions of the scheduler or of an actor
REPORTED: Final = (Op.CLAIM, Op.START, Op.EXIT, Op.REFUSE, Op.WITHDRAW, Op.BEGIN, Op.DONE, Op.RUN)

#: shown in place of an actor for a transition that a worker reported
BY_WORKER: Final = "worker"
BY_OPERATOR: Final = "operator"
SAID_CHARS_MAX: Final = 64
#: the reason of a session that ended with the worker's goodbye
GOODBYE: Final = "goodbye"


def by_tenant(tenant: str) -> str:
    return f"tenant:{tenant}"


def actor(who: str, said: object = "") -> str:
    """An actor as it is in records: `who` as proven by NATS, a blank, and the name that the caller gave itself."""
    name = "".join(char for char in said if char.isprintable())[:SAID_CHARS_MAX] if isinstance(said, str) else ""
    return f"{who} {name}" if name else who


NOTICE_BITS: Final = 8
#: the longest notice before an end, in seconds
NOTICE_S_MAX: Final = 3600


def ending(becomes: int, notice_s: int) -> int:
    """The argument of an END step: the next state, and the seconds between the checkpoint signal and the end."""
    return notice_s << NOTICE_BITS | becomes


#: a ledger has numbers for so many workers
WORKERS_MAX: Final = 1 << 16


def packed(fence: int, worker_num: int) -> int:
    """Names a member whose attempt is over, but whose devices are not free yet, in one integer."""
    return fence * WORKERS_MAX + worker_num


def unpacked(lingering: int) -> tuple[int, int]:
    """The (fence, worker number) of `packed`."""
    return divmod(lingering, WORKERS_MAX)


MODE_BITS: Final = 8


def placing(mode: int, rate_milli: int) -> int:
    """The last argument of a PLACE step: the sharing mode, and what the member counts in its tenant's fair share.

    The rate is in thousandths of a GPU; 0 stands for one GPU for each device.
    """
    return rate_milli << MODE_BITS | mode


class Count(IntEnum):
    """The count that grows with an attempt that is over; a request bounds retries and losses."""

    NONE = 0
    RETRY = 1
    LOSS = 2
    REFUSAL = 3


class GangPhase(IntEnum):
    """The phase of a gang's attempt; one record changes it for all members."""

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

    EPOCH: Final = "epoch"  # ledger id, scheduler name, wall seconds, the name of the digests' hash (`digests`)
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


#: not acts, but in `LEVEL_OF` like them: the notice in an END step, LOSE with LOST_KEPT of what is ENDING, and a job
#: that is accepted without its id
NOTICE: Final = "notice"
KEPT_WHILE_ENDING: Final = "kept-while-ending"
ID_IN_BODY: Final = "id-in-body"
#: the feature level that the ledger must have before a record may hold one of these, as schedulers that know only the
#: level before could not fold it. All others are always allowed
LEVEL_OF: Final[dict[str, int]] = {
    NOTICE: 2,
    KEPT_WHILE_ENDING: 2,
    ID_IN_BODY: 2,
    Act.HEALTH: 2,
    Act.WELL: 2,
    Act.AVOID: 2,
    Act.WINDOW: 2,
    Act.SHARE: 2,
    Act.HALF_LIFE: 2,
    Act.PREEMPT: 2,
}


class Record(msgspec.Struct, array_like=True, gc=False):
    """The outcomes of one tick. `digest` is that of the state before this record; `time` is ledger milliseconds.

    - `format` is the ledger's feature level.
    - (`leader`, `rid`) is the record's name, by which its leader recognizes it after an unclear answer.
    - `accepts` has for each tenant a flat list: job, body, replicas, traceparent, …; jobs are numbered in this order.
      The job's id is empty where the body begins with it (see `ids_in_bodies`).
    - `facts` is flat: worker number, number of its last fact frame that is folded with this record.
    - `evidence` is flat, four numbers for each decision: the first job, how many were placed, the hosts
      known, and the free devices left on the last host.
    - `actors` is flat: the steps from one index of `steps` up to another, and the note that names their actor (see
      `actor`). Steps without an actor are the worker's where their op is in `REPORTED`, else the scheduler's.
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
