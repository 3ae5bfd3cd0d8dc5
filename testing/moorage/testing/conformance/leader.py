"""A minimal leader over plain nats-py, for tests of agents and drivers: it sends the answers that a test sets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.codec import Decoder, encode, is_json
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import (
    End,
    Exec,
    Freeze,
    GangSets,
    Goodbye,
    Hello,
    Join,
    Joined,
    Load,
    Place,
    Renew,
    Renewed,
    Report,
    ReportAck,
    ReportFrame,
    ReportKind,
    Start,
    Wanted,
)
from moorage.schemas.subjects import Subjects
from moorage.testing.conformance import plain_nats

_POLL_S: Final = 0.005

decode_join = Decoder[Join | Goodbye](Join | Goodbye)
decode_renew = Decoder[Renew](Renew)
decode_reports = Decoder[ReportFrame](ReportFrame)
decode_hello = Decoder[Hello](Hello)
decode_load = Decoder[Load](Load)


@dataclass
class Seat:
    """What the leader knows of one worker."""

    session: str = ""
    no: int = 0
    joins: list[Join] = field(default_factory=list)
    renewals: list[Renew] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    frames: list[ReportFrame] = field(default_factory=list)
    hellos: list[Hello] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    said_goodbye: bool = False
    is_json: bool = False  # the form of its join, in which it is addressed

    def take(self, reports: Sequence[Report]) -> None:
        """Keep what a worker reports; a `ran` as the reports that it stands for."""
        for report in reports:
            if report.kind == "ran":
                before = self.kinds(name_in(report))
                begun: list[ReportKind] = [kind for kind in ("claimed", "started") if kind not in before]
                self.reports += [replace(report, kind=kind, code=0, detail="", ran_ms=0) for kind in begun]
                report = replace(report, kind="exited", ran_ms=0)
            self.reports.append(report)

    def kinds(self, name: AttemptName) -> list[str]:
        return [report.kind for report in self.reports if name_in(report) == name]

    def report(self, kind: str, name: AttemptName) -> Report | None:
        return next((f for f in self.reports if f.kind == kind and name_in(f) == name), None)


class NeverHappened(AssertionError):
    """Raised by `until`: the condition was still false at the deadline."""


async def until(condition: Callable[[], Any], deadline_s: float = 60, what: str = "") -> Any:
    """Poll `condition` until it is truthy, and return its value. Raises `NeverHappened` after `deadline_s` seconds."""
    ends = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > ends:
            raise NeverHappened(f"{what or condition}: not within {deadline_s:g} s (last value {value!r})")
        await asyncio.sleep(_POLL_S)
    return value


class ScriptedLeader:
    """Stands in for the scheduler that leads, as workers see it: it answers their joins, renewals and reports.

    A test scripts it: verbs (`join`, `renew`, `fact`) in `mute` get no answer, those in `refuse` get the error there.
    """

    def __init__(self, url: str, prefix: str, *, renew_s: float = 0.2, lease_s: float = 20, grace_s: float = 1) -> None:
        self.url = url
        self.subjects = Subjects(prefix)
        self.numbers = (renew_s, lease_s, grace_s)
        self.epoch = 1
        self.sets: list[GangSets] = []
        self.ledger = "ledger-1"
        self.seats: dict[str, Seat] = {}
        self.mute: set[str] = set()
        self.refuse: dict[str, Problem] = {}
        self.output: list[tuple[str, dict[str, Any]]] = []
        self.on_join: Callable[[Join], object] = lambda join: None
        #: called with the worker, the verb and the bytes of each question, before it is read or answered
        self.on_asked: Callable[[str, str, bytes], object] = lambda worker, verb, data: None
        self._nc: Client | None = None
        self._asked: list[Subscription] = []

    async def __aenter__(self) -> ScriptedLeader:
        self._nc = nc = await plain_nats.connect(self.url, reconnect_time_wait=0.1)
        subjects = self.subjects
        await self.lead()
        await nc.subscribe(subjects.hello_all, cb=self._on_hello)
        await nc.subscribe(subjects.load_all, cb=self._on_load)
        await nc.subscribe(f"{subjects.prefix}.log.>", cb=self._on_output)
        for _ in range(2):  # nats-py sends the first PING ahead of the subscriptions
            await nc.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._nc is not None
        await self._nc.close()

    async def lead(self) -> None:
        """Answer the workers, as from the start."""
        subjects = self.subjects
        answers = {
            subjects.worker_join_all: self._on_join,
            subjects.worker_renew_all: self._on_renew,
            subjects.worker_fact_all: self._on_report,
        }
        self._asked = [await self.nc.subscribe(subject, cb=answer) for subject, answer in answers.items()]
        await self.nc.flush()

    async def stop_leading(self) -> None:
        """Be there for no worker, so that the server tells each that nobody answers."""
        for subscription in self._asked:
            await subscription.unsubscribe()
        await self.nc.flush()

    @property
    def nc(self) -> Client:
        assert self._nc is not None
        return self._nc

    def seat(self, worker: str) -> Seat:
        return self.seats.setdefault(worker, Seat())

    async def joined(self, worker: str, joins: int = 1, deadline_s: float = 60) -> Seat:
        """Wait until a worker has joined that often and renews its present session, and so takes orders of it."""
        seat = self.seat(worker)

        def renews() -> bool:
            return len(seat.joins) >= joins and bool(seat.renewals) and seat.renewals[-1].session == seat.session

        await until(renews, deadline_s, f"{worker} joined")
        return seat

    async def want(
        self,
        worker: str,
        *items: Place | Start | End | Freeze | Exec,
        session: str | None = None,
        resize: Sequence[Place] = (),
    ) -> None:
        frame = Wanted(
            worker,
            self.seat(worker).session if session is None else session,
            self.epoch,
            place=[item for item in items if isinstance(item, Place)],
            start=[item for item in items if isinstance(item, Start)],
            end=[item for item in items if isinstance(item, End)],
            resize=list(resize),
            freeze=[item for item in items if isinstance(item, Freeze)],
            execs=[item for item in items if isinstance(item, Exec)],
        )
        await self.nc.publish(self.subjects.worker(worker, "wanted"), encode(frame, json=self.seat(worker).is_json))

    async def await_report(self, worker: str, kind: str, name: AttemptName, deadline_s: float = 60) -> Report:
        seat = self.seat(worker)
        try:
            found = await until(lambda: seat.report(kind, name), deadline_s)
        except NeverHappened:
            raise NeverHappened(f"{kind} of {name}: not within {deadline_s:g} s, but {seat.reports}") from None
        assert isinstance(found, Report)
        return found

    def text(self, name: AttemptName, stream: str = "out") -> str:
        """Return the output that was published so far for an attempt's replica, by all of its attempts."""
        subject = self.subjects.log(*name[:3])
        frames = [frame for at, frame in self.output if at == subject and frame["stream"] == stream]
        return "".join(frame["text"] for frame in sorted(frames, key=lambda frame: frame["offset"]))

    # -- answers

    async def _answer(self, msg: Msg, verb: str, frame: object) -> bool:
        if verb in self.mute:
            return False
        if verb in self.refuse:
            await msg.respond(encode(self.refuse[verb]))
            return False
        await msg.respond(encode(frame, json=is_json(msg.data)))
        return True

    def _worker(self, msg: Msg, verb: str) -> str:
        worker = self.subjects.token(msg.subject, 1)
        self.on_asked(worker, verb, msg.data)
        return worker

    async def _on_join(self, msg: Msg) -> None:
        seat = self.seat(self._worker(msg, "join"))
        join = decode_join(msg.data)
        if isinstance(join, Goodbye):
            seat.said_goodbye = join.session == seat.session
            return
        session = f"session-{join.n}"
        joined = Joined(session, join.n, self.epoch, *self.numbers, self.ledger)
        if await self._answer(msg, "join", joined) and (not seat.joins or seat.joins[-1].n != join.n):
            self.on_join(join)
            seat.is_json = is_json(msg.data)
            seat.joins.append(join)
            seat.take(join.reports)
            seat.session, seat.no = session, 0

    async def _on_renew(self, msg: Msg) -> None:
        seat = self.seat(self._worker(msg, "renew"))
        renew = decode_renew(msg.data)
        if renew.session != seat.session:
            await msg.respond(encode(problem("session-over", "another session stands")))
        elif await self._answer(msg, "renew", Renewed(renew.n, self.epoch, sets=self.sets)):
            seat.renewals.append(renew)

    async def _on_report(self, msg: Msg) -> None:
        seat = self.seat(self._worker(msg, "fact"))
        frame = decode_reports(msg.data)
        if frame.session != seat.session:
            await msg.respond(encode(problem("session-over", "another session stands")))
        elif frame.no > seat.no + 1:
            await msg.respond(encode(problem("gap", f"frame {seat.no + 1} is missing")))
        elif await self._answer(msg, "fact", ReportAck(frame.no, self.epoch)) and frame.no == seat.no + 1:
            seat.no = frame.no
            seat.frames.append(frame)
            seat.take(frame.reports)

    async def _on_hello(self, msg: Msg) -> None:
        self.seat(self.subjects.token(msg.subject, 1)).hellos.append(decode_hello(msg.data))

    async def _on_load(self, msg: Msg) -> None:
        self.seat(self.subjects.token(msg.subject, 1)).loads.append(decode_load(msg.data))

    async def _on_output(self, msg: Msg) -> None:
        self.output.append((msg.subject, msgspec.json.decode(msg.data)))
