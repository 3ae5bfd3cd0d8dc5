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
from moorage.schemas.actors import NO_OPERATOR, by_operator
from moorage.schemas.errors import Problem
from moorage.schemas.frames import ExecAsked, FactFrame, Goodbye, Join, Renew
from moorage.schemas.job import Request
from moorage.schemas.operate import Act, ChangeAsked
from moorage.schemas.ranges import Ranges
from moorage.schemas.schedules import ScheduleAsked


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

    def answer(self, answer: Any, replies: list[tuple[Any, str, bool]]) -> None:
        """Add the answer to `replies` (frame, reply subject, json); a batch is answered once all its requests are."""
        batch = self.batch
        if batch is None:
            replies.append((answer, self.reply, self.json))
        elif batch.decide(self.position, answer):
            replies.append((batch.answers, batch.reply, batch.json))


class Cancel:
    """A cancel of a job, or of some of its `replicas`; `by` is its actor as `records.actor` writes it.

    With `before`, that of an unknown id is remembered, as its submit may be on its way. With `lifts`, this is no
    cancel: a remembered one is forgotten.
    """

    verb: ClassVar[str] = "cancel"
    __slots__ = ("before", "by", "job", "json", "lifts", "replicas", "reply", "sequence", "tenant", "why")

    def __init__(
        self, tenant: str, job: str, why: str, *, by: str = "", reply: str = "", json: bool = True, sequence: int = 0,
        replicas: Ranges | None = None, before: bool = False, lifts: bool = False,
    ) -> None:  # fmt: skip
        self.tenant = tenant
        self.job = job
        self.why = why
        self.by = by or by_tenant(tenant)
        self.reply = reply
        self.json = json
        self.sequence = sequence
        self.replicas = replicas
        self.before = before
        self.lifts = lifts


class QueueRead:
    """A tenant's durable queue was read up to a sequence; offered after the requests up to there."""

    __slots__ = ("tenant", "through", "which")

    def __init__(self, tenant: str, which: str, through: int) -> None:
        self.tenant = tenant
        self.which = which
        self.through = through


class FromWorker:
    """A frame of a worker; the worker id is from the subject. `fresh` is a random id, used if it gets a new session."""

    __slots__ = ("frame", "fresh", "json", "reply", "worker")

    def __init__(
        self, worker: str, frame: Join | Goodbye | FactFrame | Renew, reply: str, json: bool, fresh: str = ""
    ) -> None:
        self.worker = worker
        self.frame = frame
        self.reply = reply
        self.json = json
        self.fresh = fresh


class Order:
    """An operator's order about a job, a tenant, a worker or the ledger's feature level."""

    __slots__ = ("act", "announced", "by", "json", "operator", "reply", "verb")

    def __init__(
        self,
        verb: str,
        act: Act,
        reply: str,
        json: bool,
        announced: dict[str, int] | None = None,
        operator: str = NO_OPERATOR,
    ) -> None:
        """Create an order of the operator that its subject names.

        For `feature-level`, `announced` has the newest level that each scheduler knows.
        """
        self.operator = operator
        self.by = actor(by_operator(operator), act.by)
        self.announced = announced or {}
        self.verb = verb
        self.act = act
        self.reply = reply
        self.json = json

    @property
    def worker(self) -> str:
        """The worker that the order is about; empty for none."""
        return getattr(self.act, "worker", None) or ""


class Execute:
    """A command to run in a running attempt of a job; `stream` is a random id for its bytes."""

    verb: ClassVar[str] = "exec"
    __slots__ = ("asked", "by", "json", "reply", "stream", "tenant")

    def __init__(self, tenant: str, asked: ExecAsked, stream: str, reply: str, json: bool) -> None:
        self.tenant = tenant
        self.asked = asked
        self.stream = stream
        self.by = actor(by_tenant(tenant), asked.by)
        self.reply = reply
        self.json = json


class ChangeOrder:
    """A tenant's change of its own job in place."""

    verb: ClassVar[str] = "change"
    __slots__ = ("asked", "by", "json", "reply", "tenant")

    def __init__(self, tenant: str, asked: ChangeAsked, reply: str = "", json: bool = True) -> None:
        self.tenant = tenant
        self.asked = asked
        self.by = actor(by_tenant(tenant), asked.by)
        self.reply = reply
        self.json = json


class ScheduleOrder:
    """A tenant's `add`, `pause`, `resume` or `remove` of a schedule.

    `submit` is the request of `add`, decoded, with the label of the schedule; None for the others.
    """

    verb: ClassVar[str] = "schedule"
    __slots__ = ("asked", "by", "json", "reply", "submit", "tenant")

    def __init__(
        self, tenant: str, asked: ScheduleAsked, submit: Submit | None = None, reply: str = "", json: bool = True
    ) -> None:
        self.tenant = tenant
        self.asked = asked
        self.submit = submit
        self.by = actor(by_tenant(tenant), asked.by)
        self.reply = reply
        self.json = json


class ScheduleRun:
    """A run of a schedule, as nats-server published it under the number `sequence`, for the wish of record `wish`.

    `next_ms` is when the server will publish the next one (wall-clock milliseconds), 0 if it did not say. Only somebody
    who asked for the run waits for an answer.
    """

    verb: ClassVar[str] = "schedule"
    __slots__ = ("json", "name", "next_ms", "reply", "sequence", "tenant", "wish")

    def __init__(
        self, tenant: str, name: str, wish: int, sequence: int, next_ms: int, reply: str = "", json: bool = True
    ) -> None:
        self.tenant = tenant
        self.name = name
        self.wish = wish
        self.sequence = sequence
        self.next_ms = next_ms
        self.reply = reply
        self.json = json


class Ask:
    """A question that may only be answered once a record built after its arrival is acknowledged.

    `answer` returns None if it sends its answer itself.
    """

    __slots__ = ("answer", "json", "reply")

    def __init__(self, answer: Callable[[], Any | Problem | None], reply: str, json: bool) -> None:
        self.answer = answer
        self.reply = reply
        self.json = json


class Wake:
    """A caller found no member of its tenant's service, and asks for one."""

    verb: ClassVar[str] = "wake"
    __slots__ = ("json", "reply", "service", "tenant")

    def __init__(self, tenant: str, service: str, reply: str = "", json: bool = True) -> None:
        self.tenant = tenant
        self.service = service
        self.reply = reply
        self.json = json


class SnapshotTaken:
    """A follower has written a snapshot of the state at `seq`; the next record names it."""

    __slots__ = ("digest", "name", "seq")

    def __init__(self, name: str, seq: int, digest: str) -> None:
        self.name = name
        self.seq = seq
        self.digest = digest


class Resign:
    """The leader is stopping; its last record says so."""

    __slots__ = ()


#: what is taken in the order of arrival with submits
Arrival = Submit | QueueRead | ScheduleRun
#: all events except these and cancels
Rest = FromWorker | Order | ChangeOrder | ScheduleOrder | Execute | Ask | Wake | SnapshotTaken | Resign
Event = Arrival | Cancel | Rest


def is_urgent(event: Rest) -> bool:
    """Return whether an event must not wait for the next heartbeat; only renewals may."""
    return not (isinstance(event, FromWorker) and isinstance(event.frame, Renew))
