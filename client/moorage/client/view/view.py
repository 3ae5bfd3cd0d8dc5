"""What every screen over a fleet draws: one moment of the fleet as plain values, `moorage top --json` prints it."""

from __future__ import annotations

from typing import Any

import msgspec


class Trouble(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that somebody should look at: where it is, and what.

    `grave` says that jobs cannot run because of it; without, that something is kept from use.
    """

    where: str
    what: str
    grave: bool = False


class Fit(msgspec.Struct, frozen=True):
    """The GPUs of one model, how many are free, and the most that one request could have now on one host.

    `model` is "" where the frames that were heard do not say the models.
    """

    model: str
    gpus: int
    free: int
    largest: int


class Waiting(msgspec.Struct, frozen=True, omit_defaults=True):
    """The waiting jobs of one tenant, with the oldest of them and why it waits.

    `more` says that older ones may wait than were listed. `starts_ms` is the median of the forecast, from now; None if
    there is none.
    """

    tenant: str
    jobs: int
    job: str
    asks: str
    oldest_ms: int
    more: bool = False
    reason: str = ""
    means: str = ""
    because: str = ""
    starts_ms: int | None = None


class Idle(msgspec.Struct, frozen=True, omit_defaults=True):
    """A holder of GPUs that does not use all of them: a job, or a worker where jobs are not told (`tenant`, `job` "").

    `for_ms` is how long this screen has seen it so: 0 at its first look. `least` and `most` are the use of the least
    and of the most used GPU, in percent.
    """

    tenant: str
    job: str
    worker: str
    gpu: str
    for_ms: int
    least: int
    most: int


class WorkerCells(msgspec.Struct, frozen=True):
    """A worker with a sign for each GPU (see `cells`), and the use of each in percent, None where it is not known."""

    worker: str
    state: str
    simulated: bool
    model: str
    cells: str
    use: list[int | None]


class Counts(msgspec.Struct, frozen=True):
    """How many GPUs there are, and how many of them in each state of `cells.STATES`; `shared` ones are leased, too.

    `closed` ones are free, on workers that take no jobs now: cordoned, draining, or without a sign of life.
    """

    gpus: int = 0
    free: int = 0
    leased: int = 0
    shared: int = 0
    frozen: int = 0
    sick: int = 0
    foreign: int = 0
    not_lent: int = 0
    lost: int = 0
    closed: int = 0


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a fleet. `at_ms` is the wall clock's, since 1970; `heard_ms_ago` the age of the leader's frame,
    None before the first.

    `simulated` is "all", "some" or "": how many of the GPUs are. `use` is the mean use of leased GPUs in percent.
    `unseen` says in words what the key in use does not show. Without `sees_fleet`, that is all but `waiting`, `idle`
    and `jobs`: what is empty then is not known.
    """

    at_ms: int
    leader: str
    epoch: int
    heard_ms_ago: int | None
    simulated: str
    queued: int
    running: int
    counts: Counts
    use: int | None
    troubles: list[Trouble]
    fits: list[Fit]
    waiting: list[Waiting]
    idle: list[Idle]
    workers: list[WorkerCells]
    #: rows of `ls`, of all tenants that the key may read, those that wait longest first
    jobs: list[dict[str, Any]]
    unseen: list[str]
    sees_fleet: bool = True
