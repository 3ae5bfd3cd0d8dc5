"""The worker's state machine on a bench: events in, and what came of each."""

from __future__ import annotations

from typing import Any, TypeVar

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import KNOWN
from moorage.schemas.codec import encode
from moorage.schemas.frames import End, Joined, Place, Report, ReportAck, Start, Wanted
from moorage.worker.session.attempt_messages import (
    Claims,
    Command,
    Event,
    Restored,
    SendReports,
    Started,
    TryClaim,
    TurnOver,
)
from moorage.worker.session.attempts import Attempts
from moorage.worker.session.lease_session import NEVER_S

C = TypeVar("C")

RENEW_S, LEASE_S, GRACE_S = 2.0, 20.0, 5.0


def body(**fields: Any) -> bytes:
    run = {"driver": "process", "argv": ["true"], "grace_s": 10.0} | fields.pop("run", {})
    return encode({"gpu": {}, "run": run, **fields})


def name_of(job: str = "a", replica: int = 0, attempt: int = 1, fence: int = 10) -> AttemptName:
    return ("acme", job, replica, attempt, fence)


def place(
    name: AttemptName, slots: tuple[int, ...] = (0,), *, hold: bool = False, request: bytes | None = None
) -> Place:
    return Place(*name, list(slots), "exclusive" if slots else "none", hold, body() if request is None else request)


class Bench:
    """A state machine with a pool that grants what is not in `refuse`, and a journal of what left it."""

    def __init__(self, *, tombstones_max: int = 100, join_n: int = 0) -> None:
        drivers = {name: KNOWN[name] for name in ("process", "noop")}
        self.attempts = Attempts("w1", drivers, join_n=join_n, tombstones_max=tombstones_max, free_wait_s=10)
        self.now = 100.0
        self.refuse: dict[AttemptName, str] = {}
        self.log: list[Command] = []
        self.session = ""
        self.epoch = 1

    @property
    def phase(self) -> str:
        return self.attempts.session.phase

    def do(self, event: Event) -> list[Command]:
        commands = list(self.attempts.handle(event, self.now))
        for command in list(commands):
            if isinstance(command, TryClaim):
                granted = [(attempt, "") for attempt in command.attempts if attempt.name not in self.refuse]
                refused = [(m, self.refuse[m.name]) for m in command.attempts if m.name in self.refuse]
                commands += self.do_quietly(Claims(granted, refused))
        self.attempts.validate()
        self.log += commands
        return commands

    def do_quietly(self, event: Event) -> list[Command]:
        return self.attempts.handle(event, self.now)

    def join(self, session: str = "S1", *, epoch: int = 1, ledger: str = "L") -> list[Command]:
        if self.attempts.session.phase == "restoring":
            self.do(Restored([], [], []))
        self.session, self.epoch = session, epoch
        commands = self.do(Joined(session, self.attempts.session.join_n, epoch, RENEW_S, LEASE_S, GRACE_S, ledger))
        self.now += 1
        return commands

    def want(self, *items: Place | Start | End, session: str | None = None, **fields: Any) -> list[Command]:
        frame = Wanted(
            fields.get("worker", "w1"),
            self.session if session is None else session,
            fields.get("epoch", self.epoch),
            fields.get("v", 1),
            [item for item in items if isinstance(item, Place)],
            [item for item in items if isinstance(item, Start)],
            [item for item in items if isinstance(item, End)],
        )
        return self.do(frame)

    def reports(self) -> list[Report]:
        """What leaves at the end of the turn, answered at once; claims alone leave a moment later."""
        if self.attempts.outbox.due_s < NEVER_S:
            self.now = max(self.now, self.attempts.outbox.due_s)
        sent = of(SendReports, self.do(TurnOver()))
        if not sent:
            return []
        self.do(ReportAck(sent[0].frame.no, self.epoch))
        return sent[0].frame.reports

    def kinds(self) -> list[str]:
        return [report.kind for report in self.reports()]

    def run(self, name: AttemptName | None = None, **fields: Any) -> AttemptName:
        """An attempt that runs, all reports of it answered."""
        name = name or name_of()
        self.want(place(name, **fields))
        self.do(Started([name]))
        assert self.kinds() == ["claimed", "started"]
        return name


def of(kind: type[C], commands: list[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]
