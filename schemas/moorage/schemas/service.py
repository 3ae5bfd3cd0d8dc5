"""Calls of a service: the field of a request, and what callers and members of the service put into headers.

A service is a job that stays and answers calls. A call is a NATS request on the service's subject: it passes neither
the scheduler nor the ledger, and runs at most once. Each attempt of the job is a *member* of the service.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moorage.schemas.http_service import HttpSpec, SleepBy, models_trouble
from moorage.schemas.names import SERVICE, is_service
from moorage.schemas.trouble import NONE, Trouble, quoted

#: the queue group of a service's members
QUEUE: Final = "calls"
#: the queue group of the members in whose rooms calls wait
ROOM_QUEUE: Final = "room"
#: most calls that one member runs at the same time
CONCURRENCY_MAX: Final = 4096
#: most calls in a batch, and the longest time that the first of them waits for others
BATCH_MAX: Final = 1024
BATCH_WAIT_MS_MAX: Final = 10_000

#: most attempts of a service whose number follows its calls, and the longest wait that it may aim at
MEMBERS_MAX: Final = 1024
WAIT_TARGET_MS_MAX: Final = 60_000
WAIT_TARGET_MS: Final = 200

#: code and text of an error, as NATS services have them (ADR-32)
ERROR_CODE: Final = "Nats-Service-Error-Code"
ERROR: Final = "Nats-Service-Error"
#: of a call: the milliseconds after which its caller no longer waits for it to start
WAIT_MS: Final = "Moorage-Wait-Ms"
#: of a call: the milliseconds after which its caller waits no longer for the answer. A call that has waited until less
#: than a run takes is left does not begin
TIME_MS: Final = "Moorage-Time-Ms"
#: the same of a call that is sent again: the milliseconds that its caller gave it with all its tries
WHOLE_MS: Final = "Moorage-Whole-Ms"
#: of a call for one of the service's methods that a member hands to another: which one
ENDPOINT: Final = "Moorage-Endpoint"
#: words behind a service's name in a subject that are no methods of it
NOT_ENDPOINTS: Final = ("cancel", "put")
#: behind the inbox of an SDK, whose message has the subject of a service: a member of that has ended
ENDED: Final = "ended"
#: most calls that one question names
ASKED_MAX: Final = 1000
#: of a call: how soon it has a place among those that wait, 0..100, the highest first
PRIORITY: Final = "Moorage-Priority"
PRIORITY_DEFAULT: Final = 50
PRIORITY_MAX: Final = 100
#: of a call: for whom of its tenant it is, as a customer. Calls of several keys that wait at a member have turns there
FAIR_KEY: Final = "Moorage-Fair-Key"
FAIR_KEY_CHARS_MAX: Final = 64
#: of a call that a full member has sent on: how often; and how many milliseconds it has waited in rooms
HOPS: Final = "Moorage-Hops"
WAITED_MS: Final = "Moorage-Waited-Ms"
#: of a call that a member passes on: where it is answered, if its caller is in another account. A server lets clients
#: answer on the subject that it has made for that, and takes no message from them that has it as its reply
REPLY: Final = "Moorage-Reply"
#: of an answer: the member that gave it, and how long it took
MEMBER: Final = "Moorage-Member"
RAN_MS: Final = "Moorage-Ran-Ms"
#: of an answer that comes in several messages: its number from 1; the last one has the header `END`
PART: Final = "Moorage-Part"
END: Final = "Moorage-End"
#: of a call whose data come in parts, and which has none itself: how many bytes these are in all
INPUT: Final = "Moorage-Input"
#: of a message to such a caller: the subject for the parts, and the number of the last one that it may send now
SEND: Final = "Moorage-Send"
SEND_TO: Final = "Moorage-Send-To"
#: of an answer that comes in parts and is one value: how many bytes it has in all. Of a call: how many bytes its caller
#: takes in parts, 0 for none
OUTPUT: Final = "Moorage-Output"
#: parts of data that may be under way to a member
PARTS_AHEAD: Final = 16
#: most bytes of data of a call in parts: by default, and what a service may allow
INPUT_BYTES_DEFAULT: Final = 64 << 20
INPUT_BYTES_MAX: Final = 1 << 30
INPUT_VARIABLE: Final = "MOORAGE_CALL_INPUT_BYTES"
#: the same of answers that are one value
OUTPUT_BYTES_DEFAULT: Final = 64 << 20
OUTPUT_BYTES_MAX: Final = 1 << 30
OUTPUT_VARIABLE: Final = "MOORAGE_CALL_OUTPUT_BYTES"
#: the variable of how many calls wait and how long, as `200,30`
QUEUE_VARIABLE: Final = "MOORAGE_CALL_QUEUE"
#: variables of an attempt that answers calls: how many it runs at the same time, how they make batches, as `32,5`, and
#: how long they may take at its end
CONCURRENCY_VARIABLE: Final = "MOORAGE_CALL_CONCURRENCY"
BATCH_VARIABLE: Final = "MOORAGE_CALL_BATCH"
GRACE_VARIABLE: Final = "MOORAGE_CALL_GRACE"
#: the variable that says of which version of a service an attempt is, as `3f2a9c…,2.1.0`: the digest of its job's
#: request, and the job's label `version`
VERSION_VARIABLE: Final = "MOORAGE_CALL_VERSION"
VERSION_LABEL: Final = "version"
#: the variable of a program that `moorage serve` has started: its end of a socket, as the number of an open file
FD_VARIABLE: Final = "MOORAGE_CALL_FD"
#: its pipe with the numbers of the calls that it has ahead
AHEAD_VARIABLE: Final = "MOORAGE_CALL_AHEAD_FD"
#: the variable that names the file which `moorage serve` keeps while it takes calls, for `run.ready.call`; and that
#: file, in the attempt's own folder
READY_VARIABLE: Final = "MOORAGE_READY"
READY_FILE: Final = ".moorage-ready"
#: the folders of these keys in a worker's folder of secrets: to answer calls, and to make them
CALL_SECRETS: Final = "calls"
CALLER_SECRETS: Final = "callers"
#: the own name of the caller whose key jobs get that call services: with its tenant's, as in `vision.jobs`
CALLER_OF_JOBS: Final = "jobs"
CONTENT_TYPE: Final = "Content-Type"
#: a full member sends a call on this often; then it answers `busy`
HOPS_MAX: Final = 2
#: longest wait for a place in seconds, for callers that name none; and what a service may say instead
WAIT_S_DEFAULT: Final = 30.0
WAIT_S_MAX: Final = 86_400.0
#: longest time without calls until a member sleeps, the same in which it is awake at least, and the usual one
SLEEP_AFTER_S_MAX: Final = 2_592_000
AWAKE_S_MAX: Final = 86_400
AWAKE_S_DEFAULT: Final = 30
#: most calls that wait at one member, where its service says nothing of it and they begin soon
ROOM_MAX: Final = 256
#: the same, where its service says how many
QUEUE_MAX: Final = 10_000

#: upper bounds of the classes in which a member counts its calls by their times, in milliseconds; one more is above all
CALL_MS: Final = (1, 5, 20, 50, 100, 250, 500, 1_000, 2_500, 10_000, 60_000)
#: the same for its batches by their calls
BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: codes of errors that are counted one by one, the first ones; calls with another one count as `OTHER_CODES`
CALL_CODES_MAX: Final = 16
OTHER_CODES: Final = "(others)"

BUSY: Final = "busy"
EXPIRED: Final = "expired"
MEMBER_DIED: Final = "member-died"
FAILED: Final = "failed"
BAD_BATCH: Final = "bad-batch"
TOO_LARGE: Final = "too-large"
INPUT_REFUSED: Final = "input-refused"
BAD_HEADER: Final = "bad-header"
NO_ENDPOINT: Final = "no-endpoint"
#: error -> (its number in `ERROR_CODE`, whether the call may have started, what it means)
CALL_ERRORS: Final[dict[str, tuple[int, bool, str]]] = {
    BUSY: (503, False, "all members that were asked are full"),
    EXPIRED: (504, False, "the call found no free place within its caller's time"),
    MEMBER_DIED: (502, True, "the service's process ended during the call"),
    FAILED: (500, True, "the service's function raised an error"),
    BAD_BATCH: (500, True, "the service's function returned no list with an answer for each call of its batch"),
    INPUT_REFUSED: (413, False, "the data of the call have more bytes than the service takes, or cannot be kept"),
    NO_ENDPOINT: (404, False, "the service has no method of this name"),
    BAD_HEADER: (400, False, "a header of the call has a value that it cannot have"),
    TOO_LARGE: (500, True, "the answer, a part of it or its headers are larger than they may be"),
}
#: codes that a service may give its own errors
OWN_CODES: Final = range(400, 600)
#: most bytes of the names and values of the headers that a service gives one answer
OWN_HEADERS_BYTES_MAX: Final = 32 * 1024
#: headers with which the server itself answers: an empty message with `Status: 503` means that nobody listens
SERVER_HEADERS: Final = ("Status", "Description")
#: headers, in small letters, that neither a program nor a caller sets: members do, and the server
RESERVED_HEADERS: Final = frozenset(
    name.lower()
    for name in (
        HOPS,
        WAITED_MS,
        REPLY,
        ENDPOINT,
        MEMBER,
        RAN_MS,
        PART,
        END,
        OUTPUT,
        SEND,
        SEND_TO,
        ERROR,
        ERROR_CODE,
        *SERVER_HEADERS,
    )
)

#: headers of a call, in small letters, that follow from how it is called: from its time, priority and data
OF_A_CALL: Final = frozenset(name.lower() for name in (WAIT_MS, TIME_MS, WHOLE_MS, PRIORITY, INPUT, OUTPUT))


class BatchSpec(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """How a member takes calls together: its function gets a list of them, and answers with a list."""

    most: int  # most calls in a batch, 1..1024
    wait_ms: int = 0  # longest time in milliseconds that a call waits for others, 0..10000; 0 takes what waits already

    @property
    def trouble(self) -> Trouble | None:
        """What is wrong with it; None if nothing is."""
        if not 1 <= self.most <= BATCH_MAX:
            return Trouble("service.batch.most", f"most must be 1..{BATCH_MAX}", self.most, f"1..{BATCH_MAX}")
        if not 0 <= self.wait_ms <= BATCH_WAIT_MS_MAX:
            message = f"wait_ms must be 0..{BATCH_WAIT_MS_MAX}"
            return Trouble("service.batch.wait_ms", message, self.wait_ms, f"0..{BATCH_WAIT_MS_MAX}")
        return None

    def __str__(self) -> str:
        """As `BATCH_VARIABLE` has it."""
        return f"{self.most},{self.wait_ms}"


class QueueSpec(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """The calls that wait at one member of a service for a place. More than that are refused as `busy`."""

    #: most calls that wait at one member, 0..10000; null is twice its places, or as many as begin within 50 ms, or
    #: within the time that a caller says it waits
    most: int | None = None
    wait_s: float = WAIT_S_DEFAULT  # seconds that a call waits whose caller says no time, 0..86400

    @property
    def trouble(self) -> Trouble | None:
        """What is wrong with it; None if nothing is."""
        if self.most is not None and not 0 <= self.most <= QUEUE_MAX:
            return Trouble("service.queue.most", f"most must be 0..{QUEUE_MAX}", self.most, f"0..{QUEUE_MAX}")
        if not 0 <= self.wait_s <= WAIT_S_MAX:
            allowed = f"0..{WAIT_S_MAX:g}"
            return Trouble("service.queue.wait_s", f"wait_s must be {allowed}", self.wait_s, allowed)
        return None

    def __str__(self) -> str:
        """As `QUEUE_VARIABLE` has it."""
        return f"{'' if self.most is None else self.most},{self.wait_s:g}"


def queue_of(variable: str) -> QueueSpec:
    """Return what `QUEUE_VARIABLE` says. Raises ValueError for what it cannot be."""
    most, _, wait_s = variable.partition(",")
    return QueueSpec(int(most) if most else None, float(wait_s) if wait_s else WAIT_S_DEFAULT)


class ServiceSpec(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """The service whose calls each attempt of the job answers."""

    name: str  # last word of the subject of its calls, `[a-z0-9_-]{1,48}`
    concurrency: int = 1  # calls, or batches of them, that one attempt runs at the same time, 1..4096
    pack: bool = False  # attempts go where the ranker puts other jobs', not to the hosts with the fewest of them
    input_bytes: int = INPUT_BYTES_DEFAULT  # most bytes of data of a call that come in parts, 1..1073741824
    output_bytes: int = OUTPUT_BYTES_DEFAULT  # most bytes of an answer that is one value, 1..1073741824
    batch: BatchSpec | None = None  # calls are taken together, as `{"most": 32, "wait_ms": 5}`; null: each by itself
    #: calls that wait for a place, as `{"most": 200, "wait_s": 30}`; null is the same as {}
    queue: QueueSpec | None = None
    #: seconds without a call after which a member sleeps, 0..2592000: its GPU memory is in the host's RAM until the
    #: next call. Where its driver cannot do that, and replicas.min is 0, the last member ends. 0 is never
    sleep_after_s: float = 0
    #: seconds for which a member that was woken keeps its GPUs, though another one that sleeps is called, 0..86400
    awake_s: float = AWAKE_S_DEFAULT
    #: seconds in which a call is to have a member awake, 0..86400; 0 is any time. While no calls come, a member is
    #: ended, sleeps or stays awake: the first of these from which it was seen to come back in that time
    wake_within_s: float = 0
    #: requests that put its members' HTTP server to sleep and wake it, where no driver has to freeze it, as
    #: `{"sleep": {"path": "/sleep?level=1"}, "wake": {"path": "/wake_up"}}`; null: its driver freezes it
    sleep_by: SleepBy | None = None
    #: its members' program is an HTTP server, as `{"health": "/health"}`; null for one that `moorage serve` speaks with
    http: HttpSpec | None = None
    #: names of what it serves, by which callers of the HTTP door reach it; each is of one service of the tenant
    models: tuple[str, ...] = ()

    @property
    def sleeps_itself(self) -> bool:
        """Whether a request to its program puts a member to sleep, so that no driver has to freeze it."""
        return self.sleep_by is not None

    @property
    def trouble(self) -> Trouble | None:
        """What is wrong with it, whatever runs it; None if nothing is."""
        if not is_service(self.name):
            return Trouble("service.name", "a service needs a name", quoted(self.name), SERVICE.pattern)
        if not 1 <= self.concurrency <= CONCURRENCY_MAX:
            message = f"concurrency must be 1..{CONCURRENCY_MAX}"
            return Trouble("service.concurrency", message, self.concurrency, f"1..{CONCURRENCY_MAX}")
        if not 1 <= self.input_bytes <= INPUT_BYTES_MAX:
            message = f"input_bytes must be 1..{INPUT_BYTES_MAX}"
            return Trouble("service.input_bytes", message, self.input_bytes, f"1..{INPUT_BYTES_MAX}")
        if not 1 <= self.output_bytes <= OUTPUT_BYTES_MAX:
            message = f"output_bytes must be 1..{OUTPUT_BYTES_MAX}"
            return Trouble("service.output_bytes", message, self.output_bytes, f"1..{OUTPUT_BYTES_MAX}")
        if not 0 <= self.sleep_after_s <= SLEEP_AFTER_S_MAX:
            message = f"sleep_after_s must be 0..{SLEEP_AFTER_S_MAX}"
            return Trouble("service.sleep_after_s", message, self.sleep_after_s, f"0..{SLEEP_AFTER_S_MAX}")
        if not 0 <= self.awake_s <= AWAKE_S_MAX:
            return Trouble("service.awake_s", f"awake_s must be 0..{AWAKE_S_MAX}", self.awake_s, f"0..{AWAKE_S_MAX}")
        if self.awake_s != AWAKE_S_DEFAULT and not self.sleep_after_s:
            message = "awake_s says how long a member stays awake at least, and without sleep_after_s none sleeps"
            return Trouble("service.awake_s", message, self.awake_s, f"{NONE} awake_s without sleep_after_s")
        if self.queue is not None and (wrong := self.queue.trouble) is not None:
            return wrong
        if wrong := (None if self.http is None else self.http.trouble) or models_trouble(self.models):
            return wrong
        if not 0 <= self.wake_within_s <= AWAKE_S_MAX:
            message = f"wake_within_s must be 0..{AWAKE_S_MAX}"
            return Trouble("service.wake_within_s", message, self.wake_within_s, f"0..{AWAKE_S_MAX}")
        if self.wake_within_s and not self.sleep_after_s:
            message = (
                "wake_within_s says how soon a member that sleeps is to be awake, and without sleep_after_s none does"
            )
            return Trouble(
                "service.wake_within_s", message, self.wake_within_s, f"{NONE} wake_within_s without sleep_after_s"
            )
        if self.sleep_by is not None:
            if not self.sleep_after_s:
                message = "its members sleep after some time without a call, and sleep_after_s says none"
                return Trouble(
                    "service.sleep_by",
                    message,
                    quoted(self.sleep_by.sleep.path),
                    f"{NONE} sleep_by without sleep_after_s",
                )
            if wrong := self.sleep_by.trouble:
                return wrong
        if self.http is not None and self.batch is not None:
            return Trouble(
                "service.batch", "a service over HTTP takes each call by itself", str(self.batch), "no batch"
            )
        return None if self.batch is None else self.batch.trouble or too_many(self.concurrency, self.batch)


def too_many(concurrency: int, batch: BatchSpec) -> Trouble | None:
    """Return what is wrong with so many batches at the same time; None if nothing is."""
    if concurrency * batch.most <= CONCURRENCY_MAX:
        return None
    message = f"{concurrency} batches of {batch.most} calls are too many at the same time"
    return Trouble("service.concurrency", message, concurrency, f"1..{CONCURRENCY_MAX // batch.most}")


def batch_of(variable: str) -> BatchSpec | None:
    """Return what `BATCH_VARIABLE` says; None for "". Raises ValueError for what it cannot be."""
    if not variable:
        return None
    most, wait_ms = variable.split(",")
    return BatchSpec(int(most), int(wait_ms))


def call_secret(tenant: str) -> str:
    """Return the path, in a worker's folder of secrets, of the key with which jobs of this tenant answer calls."""
    return f"{CALL_SECRETS}/{tenant}"


class Scale(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """How many attempts a job with a service has: as many as its calls need, within these bounds.

    With `min` 0 none runs while no calls come. A caller of the library then wakes it; any other hears that no member
    answers. Of a gang it is how many ranks it starts with: as many as have room, at least `min`.
    """

    max: int  # most attempts, 1..1024
    min: int = 1  # fewest, 0..max
    #: a call that has waited longer for a place asks for one attempt more, 1..60000
    wait_target_ms: int = WAIT_TARGET_MS

    def __post_init__(self) -> None:
        if not 1 <= self.max <= MEMBERS_MAX:
            raise ValueError(f"replicas.max must be 1..{MEMBERS_MAX}, found {self.max}")
        if not 0 <= self.min <= self.max:
            raise ValueError(f"replicas.min must be 0..{self.max}, as max says, found {self.min}")
        if not 1 <= self.wait_target_ms <= WAIT_TARGET_MS_MAX:
            raise ValueError(f"replicas.wait_target_ms must be 1..{WAIT_TARGET_MS_MAX}, found {self.wait_target_ms}")

    def __str__(self) -> str:
        return f"{self.min}-{self.max}"


class CallErrorBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of an answer with an error. `started`: the call may have run, in part or whole."""

    error: str  # one of `CALL_ERRORS`
    message: str
    started: bool
    retry_after_ms: int = 0  # milliseconds until a place may be free; 0 if that is not known
    kind: str = ""  # name of the exception that the function raised


class Sought(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a caller asks the members of a service: which of its calls they have."""

    calls: list[str]  # their reply subjects, at most `ASKED_MAX`
    all: bool = False  # members that have none of them answer, too
    was_cut: bool = False  # the caller's connection was lost meanwhile: data that it sent in parts may have been, too
    slow: bool = False  # members say their slowest calls, too


class SlowCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the slowest calls of a member, as it ended."""

    at_ms: int  # when it ended, by the member's clock
    waited_ms: int  # for a place, in all rooms
    ran_ms: int
    data_bytes: int = 0  # of the call; of data in parts, as its caller announced them
    answer_bytes: int = 0  # of an answer in parts, its last message's
    code: int = 0  # of its error; 0 for none, 499 where its caller had given up
    endpoint: str = ""  # the method that was called
    trace: str = ""  # the trace's id of its `traceparent`


class Found(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of one member. Before it, it sends those answers again that it has for these calls."""

    member: str  # its id
    calls: list[str] = []  # those that it has: they wait, run or are answered
    slow: list[SlowCall] = []  # the slowest calls of the last hour, at most 100, the slowest first
    ended: bool = False  # it has ended, as its worker says: what it had not read when it was killed is lost


class CallCounts(msgspec.Struct, frozen=True, gc=False):
    """What a member has counted from its start, in classes; see `CALL_MS` and `BATCH_SIZES` for their bounds."""

    errors: dict[str, int] = {}  # calls answered with an error, by its code; at most `CALL_CODES_MAX` and the others
    waited: tuple[int, ...] = ()  # calls that have begun, by how long they had waited
    ran: tuple[int, ...] = ()  # calls that have ended, by how long they ran
    batches: tuple[int, ...] = ()  # batches given to the service, by their calls
    batched: int = 0  # calls in these


class MemberLoad(msgspec.Struct, frozen=True):
    """What a member of a service says of itself: once a second while it has calls, and each 10 s while it has none.

    The first call after a second without any is said at once.

    `refused` and those behind it count from its start, but for the four that name the attempt which it is.
    """

    member: str  # its id
    places: int  # calls that it runs at the same time
    running: int  # calls that run
    waiting: int  # calls that wait in its room
    oldest_ms: int  # how long the oldest of these has waited
    draining: bool  # it takes no more calls
    refused: int  # calls that it answered with `busy`
    expired: int  # calls that it answered with `expired`
    handed: int  # calls that another member fetched from its room
    ended: int  # calls that it answered otherwise
    waited_ms: int  # milliseconds for which those waited in rooms
    ran_ms: int  # milliseconds for which those ran
    job: str = ""  # the job of which it is an attempt; "" for none
    replica: int = 0
    fence: int = 0
    attempt: int = 0  # 0 of members of a release that says none
    counts: CallCounts = CallCounts()
    rests: bool = False  # it begins no call until it has its GPUs again, as the last `Turn` said
    last_error: str = ""  # the last one that it answered with, as `500:ValueError: no such word`, cut to 200 characters


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the leader tells a member of a service that sleeps: whether it has its GPUs for calls.

    It is sent at each change, and again about each 4 s while the member rests and reports a load.
    """

    member: str  # its id, as in its load
    awake: bool  # it may begin calls; else they wait in its room, or other members fetch them
    in_ms: int = 0  # about how many milliseconds after a call it has its GPUs for it; 0 if that is not known
    why: str = ""  # what its calls wait for
    stuck: bool = False  # nothing tells when it has its GPUs, so its callers are refused at once
