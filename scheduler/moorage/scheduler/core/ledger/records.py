"""The numbers in ledger records: steps, and the meaning of their arguments (`ledger.record` has the record itself).

Every ledger ever written contains them: new numbers may be added at the end, none may change. 13 to 15 are not used:
earlier builds of 0.3 wrote them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from moorage.schemas import actors
from moorage.schemas.errors import ENDED_AS_ASKED, ENDED_FROZEN, UPGRADED
from moorage.schemas.printable import stripped

#: the newest record format, equal to the newest feature level. A leader writes at the ledger's level, which an operator
#: raises once every scheduler can fold the next one. What is prepared for the level behind it (acts whose `LEVEL` that
#: is, fields in `Lasting.later`) is off until a release raises this number, so two builds never differ under one level.
#: It is read as `records.FORMAT`, for tests of the next level
FORMAT: Final = 2
#: the oldest record format that this release folds
FORMAT_MIN: Final = 1
#: how far the records of a restored ledger begin above those of its backup and of the ledger that it replaces: more
#: than any ledger has room for
SEQUENCES_AHEAD: Final = 1 << 32
RECORD_BYTES_MAX: Final = 512 * 1024
STEP_WIDTH: Final = 6
#: stands in place of a job's number in ACT and ACCEPT steps
NO_JOB: Final = -1
#: how a body begins that names its job first: without a blank, as most clients write it, and with one, as Python does
_BEGINS: Final = b'{"job":"'
_BEGINS_WIDE: Final = b'{"job": "'

#: evidence of a decision from feature level `RIGHT_LEVEL` on: by what right it came first, beside how many it placed
RIGHT_LEVEL: Final = 2
BORROWED: Final = 1 << 24
GUARANTEED: Final = 1 << 25
DECIDED_MASK: Final = BORROWED - 1


class Op(IntEnum):
    """The kinds of steps. A step is (op, job number, replica, a, b, c)."""

    PLACE = 0  #: a worker number, b slot mask, c sharing mode, and above it a rate (see `placing`)
    CLAIM = 1  #: a for how many ms it has run already, c note: address of rank 0 of a gang
    START = 2  #: a as CLAIM, b note: what its worker told of how it began, c note: where its ports are reached
    EXIT = 3  #: attempt over, tree gone: a next state and above it a result (see `exiting`), b exit code, c note
    REFUSE = 4  #: attempt over before it began: a next state, b exit code, c note
    WITHDRAW = 5  #: attempt over on our request, never ran: a next state, c note
    LOSE = 6  #: attempt over with its worker's session: a next state, c note
    FREE = 7  #: the devices of an attempt that is over (see `packed`) were seen free
    END = 8  #: a ENDING or CANCELLING, b next state and above it a notice (see `ending`), c note
    MOVE = 9  #: a new state of a replica without an attempt, b code, c note
    #: a not before (ledger ms), b which count grows (see Count), c of restarts: how many in a row; below 0: minus the
    #: number of the row of `retry` that allows it
    BACKOFF = 10
    GANG = 11  #: a phase, b next state of its replicas, c which count grows at the end, and above it a row of `retry`
    QUARANTINE = 12  #: an attempt that is over (see `packed`), b slot mask: these devices did not become free
    FREEZE = 16  #: a FROZEN, without devices from now on, or RUNNING, as its worker reports
    RESUME = 17  #: a 1: a frozen attempt's devices are leased to it again; 0: its worker does not give them, c note
    MOVE_FRESH = 18  #: all replicas from this one on that were never placed: a new state and code, b the last, c note
    READY = 19  #: a 1: its worker reports a running attempt ready for work; 0: it is not any more, c note
    #: of a job that this record accepts: a the number of an earlier job whose end it waits for, b which end (see
    #: `Ends`); or a 0, b the ledger ms before which it may not start
    AWAIT = 20
    RAN = 21  #: CLAIM, START and EXIT of an attempt that succeeded: a as EXIT, b for how many ms it ran
    ACT = 22  #: of no job: the next act of the record stands here
    ACCEPT = 23  #: of no job: the next new jobs of the record stand here, a how many of its `accepts`


#: steps that a worker reported; all others are decisions of the scheduler or of an actor
REPORTED: Final = (Op.CLAIM, Op.START, Op.EXIT, Op.REFUSE, Op.WITHDRAW, Op.FREEZE, Op.READY, Op.RAN)

#: shown as the actor of a transition that a worker reported
BY_WORKER: Final = actors.WORKER
SAID_CHARS_MAX: Final = 64
#: why a session ended: the worker said goodbye
GOODBYE: Final = "goodbye"
#: the reason of attempts lost with their host's supervisor while the machine went on
WITH_SUPERVISOR: Final = "lost with its host's supervisor"
#: how a worker reports ends of attempts that are not the job's doing
NOT_BY_ITSELF: Final = frozenset(
    {ENDED_AS_ASKED, ENDED_FROZEN, UPGRADED, WITH_SUPERVISOR, "lost", "fence", "supervisor-died"}
)
#: how the reason of a cancel begins by which a move ends its member, see `lifecycle.relocating`
MOVED: Final = "moved to replica "


def by_tenant(tenant: str, person: str = "") -> str:
    """Return the actor for a tenant, or for a person of it whose key proves that: `tenant:vision/lena`."""
    return f"tenant:{tenant}/{person}" if person else f"tenant:{tenant}"


def actor(who: str, said: object = "") -> str:
    """Return an actor as written in records: `who` as proven by NATS, a blank, and the name that the caller gave.

    That name loses its unprintable characters and is cut to `SAID_CHARS_MAX`. It is left out if it is empty or no text.
    """
    name = stripped(said, SAID_CHARS_MAX) if isinstance(said, str) else ""
    return f"{who} {name}" if name else who


NOTICE_BITS: Final = 8
#: the longest notice before an end, in seconds
NOTICE_S_MAX: Final = 3600


def ending(becomes: int, notice_s: int) -> int:
    """Return the argument of an END step: the next state, and the seconds from checkpoint signal to end."""
    return notice_s << NOTICE_BITS | becomes


STATE_BITS: Final = 8
STATE_MASK: Final = (1 << STATE_BITS) - 1


def exiting(to: int, result: int | None) -> int:
    """Return the argument of an EXIT step: the next state and the result.

    `result` is the message number of the result, 0 if there is none, None if the worker does not report it.
    """
    return to if result is None else result + 1 << STATE_BITS | to


def start_note(address: str, told: str) -> str:
    """Return what the history has of a start: where its ports are reached, and what its worker told of how it began."""
    return f"{address}; {told}" if told else address


def start_of(note: str) -> tuple[str, str]:
    """Return the two that `start_note` has put together."""
    address, _, told = note.partition("; ")
    return address, told


def moving(to: int, code: int) -> int:
    """Return the argument of a MOVE_FRESH step: the next state, and above it the exit code."""
    return code << STATE_BITS | to


#: the longest run that a record can tell
RAN_MS_MAX: Final = (1 << 31) - 1
#: the most workers that a ledger knows at a time
WORKERS_MAX: Final = 1 << 16
#: below the fence in a value of `packed`
_FENCE_AT: Final = 16


def packed(fence: int) -> int:
    """Return the argument that names, besides job and replica, an attempt that is over and still has its devices."""
    return fence << _FENCE_AT


def unpacked(lingering: int) -> int:
    """Return the fence in a value of `packed`."""
    return lingering >> _FENCE_AT


MODE_BITS: Final = 8


#: beside the sharing mode of a PLACE step: the attempt is preemptible
PREEMPTIBLE: Final = 1 << MODE_BITS - 1


def placing(mode: int, rate_milli: int) -> int:
    """Return the last argument of a PLACE step: the sharing mode, and the attempt's rate in its tenant's fair share.

    The rate is in thousandths of a GPU; 0 stands for one GPU for each device. The mode may have the bit `PREEMPTIBLE`.
    """
    return rate_milli << MODE_BITS | mode


#: bits of a `Count`; above them stands the number of a row of `retry`
COUNT_BITS: Final = 3
KIND: Final = (1 << COUNT_BITS) - 1


class Count(IntEnum):
    """The counter that grows when an attempt ends; a request bounds retries, losses and restarts."""

    NONE = 0
    RETRY = 1
    LOSS = 2
    REFUSAL = 3
    RESTART = 4  #: any end of an attempt of a job that stays, see `Run.restart`


class Ends(IntEnum):
    """Which end of a job another one waits for."""

    SUCCEEDED = 0
    ANY = 1
    FAILED = 2  #: any but SUCCEEDED


ENDS: Final = frozenset(map(int, Ends))


class GangPhase(IntEnum):
    """The phase of a gang's attempt; one record changes it for all ranks."""

    NONE = 0
    HOLDING = 1
    STARTED = 2
    ENDING = 3
    OVER = 4


class Mode(IntEnum):
    """How an attempt holds its devices."""

    NONE = 0
    EXCLUSIVE = 1
    MPS = 2
    TIME_SLICE = 3


MODE_NAMES: Final = ("none", "exclusive", "mps", "time-slice")
MODE_OF: Final = {"exclusive": Mode.EXCLUSIVE, "mps": Mode.MPS, "time-slice": Mode.TIME_SLICE}


def written_id(name: str, body: bytes) -> str:
    """Return the id as a record contains it: empty if `id_of` finds it in the body."""
    id = name.encode() + b'"'
    return "" if body.startswith((_BEGINS + id, _BEGINS_WIDE + id)) else name


def id_of(written: str, body: bytes) -> str:
    """Return the id of an accepted job. Raises ValueError if neither the record nor the start of the body has one."""
    if written:
        return written
    begins = _BEGINS if body.startswith(_BEGINS) else _BEGINS_WIDE
    at = len(begins)
    end = body.find(b'"', at)
    if end <= at or not body.startswith(begins):
        raise ValueError(f"a job is accepted without an id: {body[:80]!r}")
    return body[at:end].decode()
