"""The leader's answers and events, for clients that submit and follow jobs."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.schemas.actors import words
from moorage.schemas.capabilities import Enforced
from moorage.schemas.frames.version import VERSION
from moorage.schemas.units import many


class Accepted(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="accepted"):
    """The request is in the ledger, at sequence `ledger`. `duplicate`: it was already there, with the same content."""

    job: str
    ledger: int  # number of the ledger record that holds the request
    state: str
    duplicate: bool = False
    warnings: list[str] = []  # warnings, such as `no-match`: no known worker could run it
    v: int = VERSION
    #: why the job waits, in the format of `explain`; left out for a job that starts, and if the leader has more urgent
    #: work
    waiting: dict[str, Any] | None = None


class Change(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One transition of one replica. `rev` is the job's own revision number, without gap or double.

    - `by` is who caused it: `tenant:<tenant>` or `operator` as the subject proves it, `tenant:<tenant>/<person>` where
      the key does, `worker` for the one in `worker`, or "" for the scheduler itself (a placement, a deadline, a loss).
    - `said` is the name that the tenant or operator gave, at most 64 characters. It is not proven.
    - `result` is the sequence of the message in the tenant's stream of results that has what the attempt returned; 0 if
      it returned nothing. Null if this was not reported: an object of the attempt's name may exist all the same.
    """

    rev: int
    time_ms: int  # ms since 1970, by the ledger's clock
    replica: int  # number of the replica, from 0; -1 is the whole job
    attempt: int  # number of the attempt, from 1; 0 before the first
    state: str  # new state of the replica, or an entry beside it: READY, NOT_READY, and acts as HELD or FREEZE
    worker: str = ""
    gpus: list[str] = []  # uuids of its GPUs, with its placement
    code: int | None = None  # the exit code; -15 and so on for a signal
    why: str = ""
    fence: int = 0  # number of the record that placed it; it grows with every attempt
    by: str = ""
    said: str = ""
    result: int | None = None
    #: the last of several replicas, from `replica` on, that were never placed and end alike; null for one replica
    through: int | None = None
    #: with RUNNING: where the ports are reached that its worker gave it, as `10.0.0.5:20000,20001`
    address: str = ""


class Replicas(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The replicas of a job with more than 1,024 of them: how many are in which state.

    `after` is the revision behind which an event's `changes` begin.
    """

    of: int
    states: dict[str, int]
    after: int = 0


class Idle(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The GPUs of a replica have shown no use for this number of `seconds`. Its worker ends the replica after `ends_s`
    seconds without use (0: never)."""

    seconds: int
    ends_s: int = 0
    replica: int = 0


class Stalled(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A replica has stalled for this number of `seconds`, as its request's `stall_s` defines it; 0: it moves again.

    `why` says in a line what its GPUs do. Of a gang, `replica` is the rank that differs from the others (-1: none
    does), and `why` names it. With `ends` the attempt is ended now.
    """

    seconds: int
    replica: int = 0
    why: str = ""
    ends: bool = False


class Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="event"):
    """What a ledger record changed for one job: its state now, and the transitions since the previous event.

    An event without transitions has `waiting`, `enforced`, `idle` or `stalled` instead. For a job with more than 1,024
    replicas it has `replicas`, and of the transitions only the exceptions: acts on the job, and ends without success.
    Such an event begins behind revision `replicas.after`: who knows less of the job asks `show` for what was missed.
    """

    tenant: str
    job: str
    rev: int  # revision of the last change
    state: str  # the job's state now
    ledger: int
    changes: list[Change] = []
    why: str = ""
    simulated: bool = False
    v: int = VERSION
    #: the new reason for waiting, in the format of `explain`; only in events without changes
    waiting: dict[str, Any] | None = None
    #: how a replica that shares its GPU is kept to its part: with its placement, and without changes if its worker
    #: enforces it in another way from now on. For several replicas it is the weakest; a replica that has its GPU alone
    #: is kept hard
    enforced: Enforced | None = None
    #: a replica that has its GPUs alone and shows no use of them, as its worker sees it; only in events without
    #: changes
    idle: Idle | None = None
    #: a replica or gang that has stalled, once for each stall, or that moves again; only in events without changes
    stalled: Stalled | None = None
    #: for a job with more than 1,024 replicas: the state of all of them now, and behind which revision `changes` begin
    replicas: Replicas | None = None


class Events(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="events"):
    """A frame with every change of a tenant's jobs in one tick of the scheduler."""

    tenant: str
    ledger: int
    jobs: list[Event]
    v: int = VERSION


class Answer(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="answer"):
    """The answer to a verb. `data` depends on the verb, and is as of ledger record `ledger`."""

    verb: str
    ledger: int  # number of the record that holds a cancel; only in the answer to one
    data: Any
    v: int = VERSION


class FleetEvent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="fleet-event"):
    """Something that happened to the fleet, for operators, on `moorage.events._fleet`.

    - `what`: a worker `joined`, `left`, or was `lost`; it is `cordoned`, `draining`, `open`, `forgotten`, `admitted` or
      `closed` since starts fail there, and a drain is `planned`; its `gpu` is `gpu-out` or `gpu-back`; a scheduler is
      `leading`.
    - `by` is the operator of an order, as in `Change`; "" for what happens by itself.
    """

    what: str
    time_ms: int  # ms since 1970, by the ledger's clock
    ledger: int  # number of the record that has it
    worker: str = ""
    gpu: str = ""  # uuid
    jobs: int | None = None  # with lost and left: jobs that were placed or ran there
    scheduler: str = ""  # with leading
    by: str = ""
    said: str = ""
    why: str = ""
    v: int = VERSION

    @property
    def words(self) -> str:
        """The event in one line, without its time."""
        whose = f"worker {self.worker}" if self.worker else f"scheduler {self.scheduler}"
        did = f"GPU {self.gpu} {self.what[4:]}" if self.gpu else self.what
        jobs = "" if self.jobs is None else f", {many(self.jobs, 'job')} on it"
        actor = f" by {words(self.by, self.said)}" if self.by else ""
        return f"{whose}: {did}{jobs}{actor}{f': {self.why}' if self.why else ''}"
