"""Where waits went: the causes, and what `usage` with `waits` answers."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from moorage.schemas.always import always


class Cause(StrEnum):
    """Why something waits. Of several that hold at once, the first of this list that alone would keep it waiting."""

    AFTER = "after"
    NOT_BEFORE = "not-before"
    HELD = "held"
    MAX_RUNNING = "max-running"
    BACKOFF = "backoff"
    AWAY = "away"
    LIMIT = "limit"
    PLACING = "placing"
    UNEXPLAINED = "unexplained"
    RESERVED = "reserved"
    NO_HOST = "no-host"
    CLOSED = "closed"
    FRAGMENTED = "fragmented"
    PRIORITY = "overtaken-priority"
    GUARANTEE = "overtaken-guarantee"
    SHARE = "overtaken-share"
    OWN = "overtaken-own"
    FULL = "full"
    STARTING = "starting"
    UNKNOWN = "unknown"
    REST = "rest"


#: waits that a job, its owner or its own attempts asked for: no fleet would have ended them
ASKED: Final = frozenset({Cause.AFTER, Cause.NOT_BEFORE, Cause.HELD, Cause.MAX_RUNNING, Cause.BACKOFF})

#: what each means, as in "40m: its tenant's limit"
MEANS: Final[dict[str, str]] = {
    Cause.AFTER: "other jobs had to end first",
    Cause.NOT_BEFORE: "its time had not come",
    Cause.HELD: "held by an order",
    Cause.MAX_RUNNING: "as many of it ran as it may, or as its calls need",
    Cause.BACKOFF: "pauses after attempts that failed or were refused",
    Cause.AWAY: "no scheduler led",
    Cause.LIMIT: "a limit of its tenant",
    Cause.PLACING: "placed at once, or with the next record",
    Cause.UNEXPLAINED: "room by the ledger, yet not placed",
    Cause.RESERVED: "hosts reserved for other jobs",
    Cause.NO_HOST: "no host that has it even when empty",
    Cause.CLOSED: "hosts with room that were closed, lost or unwell",
    Cause.FRAGMENTED: "enough GPUs free, but not on one host",
    Cause.PRIORITY: "later jobs of a higher priority",
    Cause.GUARANTEE: "later jobs within their tenant's guarantee",
    Cause.SHARE: "later jobs of tenants owed more, or that fitted sooner",
    Cause.OWN: "later jobs of its own tenant that fitted sooner",
    Cause.FULL: "all GPUs that would do were taken before it came",
    Cause.STARTING: "placed, not running yet",
    Cause.UNKNOWN: "nobody counted",
    Cause.REST: "other causes",
}


class WaitedPart(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A part of what a job waited."""

    cause: str
    own: bool | None = None  # whether jobs of its own tenant were the cause; left out if no job was
    ms: int = always(int)  # added up over its replicas; of a gang once


class WaitedRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A sum of waits. It has those of tenant, model, week, cause and holder by which the question sums.

    The holder is the tenant whose jobs were the cause; a tenant gets its own name, or `(others)`.
    """

    tenant: str | None = None
    model: str | None = None  # the models asked for, as `H100|A100`; `any`, or `none` of jobs without GPUs
    week_ms: int | None = None  # the Monday on which the week begins, ms since 1970, in UTC
    cause: str | None = None
    holder: str | None = None
    wait_s: float = always(float)  # each replica counts, a gang once
    gpu_s: float = always(float)  # the same for each GPU that was asked for
    jobs: int = always(int)  # jobs that are over and had waited so; each in the week of its end


class PlacedWhy(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """On what evidence a job was placed last."""

    together: int = always(int)  # replicas that this decision placed
    workers: int = always(int)  # workers that were known
    free_left: int = always(int)  # GPUs that stayed free on the chosen one


class WaitedAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Where waits went, over whole weeks, including what waits now. With a job in the question, its parts alone."""

    rows: list[WaitedRow] = always(list[WaitedRow])
    parts: list[WaitedPart] = []  # of the job that was asked about
    placed: PlacedWhy | None = None  # of that job; left out if it is not remembered
    from_ms: int = always(int)  # begin of the first week, or when counting began
    until_ms: int = always(int)  # the ledger time now
    gaps: list[list[int]] = []  # times (from, until) of which nothing was counted
    next: list[str | int] = []  # the last key of this page, if there are more rows: ask again with it as `after`


class SeriesAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Numbers over time, as `OF/NAME/WHAT`. A number is the mean of a step; null is unknown.

    - the fleet: `fleet//gpus`, `granted`, `used`, `waiting` (without waits that jobs asked for, as for other jobs),
      and `wait_p50`, `wait_p90` in seconds; `cause/CAUSE/waiting`; `pool/MODEL/gpus`, `granted`, `used`
    - a tenant: `granted`, `waiting`, `wait_p50`, `wait_p90`
    - a host: `granted`, `used`, `memory_mib`, `temperature_c` of its hottest GPU
    - a job, over its life: `used` in percent of its `gpus`, `memory_mib`, and `reported:NAME` of what it reports
    - a service: `calls` and `errors` a second, `members`, calls that are `running`, `ran_p50`, `ran_p95`, `waited_p95`
      in ms, and calls a `batch`
    """

    step_ms: int = always(int)  # of each number; longer where more than a day was asked for, or a job lives long
    from_ms: int = always(int)  # begin of the first step
    until_ms: int = always(int)
    series: dict[str, list[float | None]] = always(dict[str, list[float | None]])
    left_out: bool = False  # whether there were more tenants, hosts, services or jobs than are kept
