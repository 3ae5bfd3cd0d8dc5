"""The events that the engine takes, already decoded.

`reply` is the subject to answer on (empty: no answer wanted), and `json` says whether to answer in JSON. Requests have
a `verb`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.records import actor, by_tenant
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.core.ledger.state import State
from moorage.schemas.actors import NO_OPERATOR, by_operator
from moorage.schemas.errors import Problem
from moorage.schemas.frames import ExecAsked, Goodbye, Join, Renew, ReportFrame
from moorage.schemas.job import Request
from moorage.schemas.operate import Act, ChangeAsked, SignalAsked
from moorage.schemas.ranges import Ranges
from moorage.schemas.schedules import ScheduleAsked, ScheduleRow
from moorage.schemas.ways import person_of


class Batch:
    """A submit frame with several requests; it is answered once all of them are decided."""

    __slots__ = ("answers", "json", "missing", "reply")

    def __init__(self, reply: str, json: bool, size: int) -> None:
        self.reply = reply
        self.json = json
        self.missing = size
        self.answers: list[Any] = [None] * size

    def decide(self, position: int, answer: Any) -> bool:
        """Store the answer to one request. Return whether all are decided, so that the batch can be answered."""
        self.answers[position] = answer
        self.missing -= 1
        return self.missing == 0

    def take_back(self, position: int) -> None:
        """Remove an answer, because the record with that decision was not written."""
        self.answers[position] = None
        self.missing += 1


class Submit(msgspec.Struct, eq=False, gc=False):
    """One request, made by `Engine.submitted`. `sequence` is its place in the durable queue; 0 if it came to the API
    endpoint.

    `name` is the job's; `request.job` may be None, as equal requests share one decoded object. `key` is
    `finished.job_key`.
    """

    verb: ClassVar[str] = "submit"
    tenant: str
    name: str
    body: bytes
    request: Request
    shape: Shape
    key: bytes
    reply: str = ""
    json: bool = True
    sequence: int = 0
    trace: str = ""
    batch: Batch | None = None
    position: int = 0
    came: str = ""

    def answer(self, answer: Any, replies: list[tuple[Any, str, bool]]) -> None:
        """Add the answer to `replies` (frame, reply subject, json); a batch is answered once all its requests are."""
        batch = self.batch
        if batch is None:
            replies.append((answer, self.reply, self.json))
        elif batch.decide(self.position, answer):
            replies.append((batch.answers, batch.reply, batch.json))


class Cancel(msgspec.Struct, eq=False):
    """A cancel of a job, or of some of its `replicas`; `by` is its actor as `records.actor` writes it.

    With `before`, that of an unknown id is remembered, as its submit may be on its way. With `lifts`, this is no
    cancel: a remembered one is forgotten.
    """

    verb: ClassVar[str] = "cancel"
    tenant: str
    job: str
    why: str
    by: str = ""
    reply: str = ""
    json: bool = True
    sequence: int = 0
    replicas: Ranges | None = None
    before: bool = False
    lifts: bool = False
    came: str = ""

    def __post_init__(self) -> None:
        self.by = self.by or by_tenant(self.tenant)


class QueueRead(msgspec.Struct, eq=False):
    """A tenant's durable queue was read up to a sequence; offered after the requests up to there."""

    tenant: str
    which: str
    through: int


class FromWorker(msgspec.Struct, eq=False):
    """A frame of a worker; the worker id is from the subject. `fresh` is a random id, used if it gets a new session."""

    worker: str
    frame: Join | Goodbye | ReportFrame | Renew
    reply: str
    json: bool
    fresh: str = ""


class Order(msgspec.Struct, eq=False):
    """An operator's order about a job, a tenant, a worker or the ledger's feature level.

    `operator` is as its subject names it. For `feature-level`, `announced` has the newest level that each scheduler
    knows.
    """

    verb: str
    act: Act
    reply: str
    json: bool
    announced: dict[str, int] = {}
    operator: str = NO_OPERATOR
    came: str = ""

    @property
    def by(self) -> str:
        """Its actor, as `records.actor` writes it."""
        return actor(by_operator(self.operator), self.act.by)

    @property
    def worker(self) -> str:
        """The worker that the order is about; empty for none."""
        return getattr(self.act, "worker", None) or ""


class Execute(msgspec.Struct, eq=False):
    """A command to run in a running attempt of a job; `stream` is a random id for its bytes."""

    verb: ClassVar[str] = "exec"
    tenant: str
    asked: ExecAsked
    stream: str
    reply: str
    json: bool
    came: str = ""

    @property
    def by(self) -> str:
        """Its actor, as `records.actor` writes it."""
        return actor(by_tenant(self.tenant, person_of(self.came, self.tenant)), self.asked.by)


class SignalOrder(msgspec.Struct, eq=False):
    """A signal for the processes of a tenant's own job."""

    verb: ClassVar[str] = "signal"
    tenant: str
    asked: SignalAsked
    reply: str = ""
    json: bool = True
    came: str = ""

    @property
    def by(self) -> str:
        """Its actor, as `records.actor` writes it."""
        return actor(by_tenant(self.tenant, person_of(self.came, self.tenant)), self.asked.by)


class ChangeOrder(msgspec.Struct, eq=False):
    """A tenant's change of its own job in place."""

    verb: ClassVar[str] = "change"
    tenant: str
    asked: ChangeAsked
    reply: str = ""
    json: bool = True
    came: str = ""

    @property
    def by(self) -> str:
        """Its actor, as `records.actor` writes it."""
        return actor(by_tenant(self.tenant, person_of(self.came, self.tenant)), self.asked.by)


class ScheduleOrder(msgspec.Struct, eq=False):
    """A tenant's `add`, `pause`, `resume` or `remove` of a schedule.

    `submit` is the request of `add`, decoded, with the label of the schedule; None for the others. `shown` makes the
    row of the answer, None to leave that out.
    """

    verb: ClassVar[str] = "schedule"
    tenant: str
    asked: ScheduleAsked
    submit: Submit | None = None
    reply: str = ""
    json: bool = True
    shown: Callable[[State, Schedule], ScheduleRow] | None = None
    came: str = ""

    @property
    def by(self) -> str:
        """Its actor, as `records.actor` writes it."""
        return actor(by_tenant(self.tenant, person_of(self.came, self.tenant)), self.asked.by)


class ScheduleRun(msgspec.Struct, eq=False):
    """A run of a schedule, as nats-server published it under the number `sequence`, for the wish of record `wish`.

    `next_ms` is when the server will publish the next one (wall-clock milliseconds), 0 if it did not say. A next run
    that is noted for later than `latest_ms` was noted by a wrong clock; 0 if that is not known. Only somebody who asked
    for the run waits for an answer.
    """

    verb: ClassVar[str] = "schedule"
    tenant: str
    name: str
    wish: int
    sequence: int
    next_ms: int
    latest_ms: int = 0
    reply: str = ""
    json: bool = True


class Ask(msgspec.Struct, eq=False):
    """A question that may only be answered once a record built after its arrival is acknowledged.

    `answer` returns None if it sends its answer itself.
    """

    answer: Callable[[], Any | Problem | None]
    reply: str
    json: bool


class Wake(msgspec.Struct, eq=False):
    """A caller found no member of its tenant's service, and asks for one."""

    verb: ClassVar[str] = "wake"
    tenant: str
    service: str
    reply: str = ""
    json: bool = True
    came: str = ""


class Promising(msgspec.Struct, eq=False):
    """A job that waits is told by when it starts; see `acts.Promised`."""

    job: int
    by_ms: int
    p50_ms: int
    p90_ms: int
    runs: int


class SnapshotTaken(msgspec.Struct, eq=False):
    """A follower has written a snapshot of the state at `seq`; the next record names it, unless the core refuses it."""

    name: str
    seq: int
    digest: str
    is_refused: bool = False


class Resign(msgspec.Struct, eq=False):
    """The leader is stopping; its last record says so."""


#: what is taken in the order of arrival with submits
Arrival = Submit | QueueRead | ScheduleRun
#: all events except these and cancels
Rest = (
    FromWorker | Order | ChangeOrder | SignalOrder | ScheduleOrder | Execute | Ask | Wake | Promising | SnapshotTaken
    | Resign
)  # fmt: skip
Event = Arrival | Cancel | Rest


def is_urgent(event: Rest) -> bool:
    """Return whether an event must not wait for the next heartbeat; only renewals may."""
    return not (isinstance(event, FromWorker) and isinstance(event.frame, Renew))
