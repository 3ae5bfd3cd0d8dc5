"""What every screen over a fleet draws: one moment of the fleet as plain values, `moorage top --json` prints it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from moorage.client.durations import age
from moorage.schemas.answers.jobs import JobRow
from moorage.schemas.frames import FailedLately, ServiceLately


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
    """The jobs of one tenant that wait for the same reason, with the oldest of them.

    `more` says that there are more than were listed. `starts_ms` is the median of the forecast, from now; None if
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

    @property
    def count(self) -> str:
        """How many jobs they are: `496+` where there are more than were listed."""
        return f"{self.jobs}+" if self.more else f"{self.jobs}"

    @property
    def starts(self) -> str:
        """When the oldest starts, as far as it is foreseen: `~4m`, `now`, or `-`."""
        return "-" if self.starts_ms is None else f"~{age(self.starts_ms)}" if self.starts_ms else "now"

    @property
    def why(self) -> str:
        """Why the oldest waits: the reason, and the evidence or what the reason means."""
        return ": ".join(filter(None, (self.reason, self.because or self.means))) or "not asked yet"


class Idle(msgspec.Struct, frozen=True):
    """Holders of GPUs that do not use all of them: jobs of a tenant, or a worker where jobs are not told (`tenant`,
    `job` "").

    `gpus` GPUs of those that `jobs` hold do nothing; `job` is the one that has been so for longest, on `worker`.
    `for_ms` is how long that is: as the leader saw it in its term, else as this screen did. `least` and `most` are the
    use of the least and of the most used GPU, in percent.
    """

    tenant: str
    jobs: int
    gpus: int
    job: str
    worker: str
    for_ms: int
    least: int
    most: int

    @property
    def used(self) -> str:
        """The use in percent: of all the same, or from the least to the most used one, `0-97`."""
        return f"{self.least}-{self.most}" if self.least != self.most else f"{self.most}"


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

    def odd(self) -> Iterator[tuple[str, int]]:
        """Yield name and number of what there is besides free and leased GPUs, the gravest first."""
        for name in ("lost", "sick", "closed", "foreign", "shared", "frozen", "not_lent"):
            if number := getattr(self, name):
                yield name.replace("_", " "), number


class View(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="view"):
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
    waits: int  # jobs that wait, in all
    idle: list[Idle]
    workers: list[WorkerCells]
    #: rows of `ls`, of all tenants that the key may read, those that wait longest first
    jobs: list[JobRow]
    live: int = 0  # jobs that are not over, in all: more than `jobs` has where they are very many
    #: the use of a running job's GPUs in the last moments, the mean in percent, oldest first; by tenant and job
    sparks: dict[str, list[int]] = {}
    #: tenants whose jobs failed within the last hour, the last one first
    failed: list[FailedLately] = []
    #: services with members or calls in the last minute: those with errors first, then those with most calls
    services: list[ServiceLately] = []
    #: promised starts that were kept and missed, and long waits without a promise
    promised: tuple[int, int, int] = (0, 0, 0)
    #: of a moment of the past: use and health are not known, and `ended` jobs by state in the hour before it
    past: bool = False
    ended: dict[str, int] = {}
    unseen: list[str]
    own: str = ""  # the tenant whose jobs alone the key shows
    #: numbers of the last hour, oldest first, null where unknown: `granted` and `used` GPUs, `waiting` replicas
    hour: dict[str, list[float | None]] = {}
    sees_fleet: bool = True

    @property
    def ended_words(self) -> str:
        """How jobs ended in the hour before a moment of the past: `12 SUCCEEDED`, or `none`."""
        return ", ".join(f"{number} {state}" for state, number in sorted(self.ended.items())) or "none"
