"""Rows of a tenant's limits beside those of GPUs, of what it holds and has spent, and of operators' counters."""

from __future__ import annotations

from typing import Final, NamedTuple

from moorage.scheduler.core.ledger.digests import number_of

#: cores in thousandths, memory in MiB, and replicas on workers, of which a gang counts as one
Held = tuple[int, int, int]
NOTHING_HELD: Final[Held] = (0, 0, 0)
PERIODS: Final = ("day", "week", "month")
ON_SPENT: Final = ("wait", "refuse", "preemptible")
WAIT, REFUSE, AS_PREEMPTIBLE = range(len(ON_SPENT))


#: patterns of models, and a number for each
ByModel = tuple[tuple[str, int], ...]


class Limits(NamedTuple):
    """A tenant's limits beside those of GPUs and jobs; 0 for none."""

    cores_milli: int = 0
    memory_mib: int = 0
    running: int = 0
    job_gpus: int = 0  # of one job at once
    time_limit_ms: int = 0  # the longest of a job, which has to name one
    budget_ms: int = 0  # milliseconds of a leased GPU in a period
    period: int = 0  # in `PERIODS`
    refuses: int = 0  # what becomes of jobs with GPUs once the budget is spent, in `ON_SPENT`
    running_key: int = 0  # replicas on workers of each fair key
    gpus_of: ByModel = ()  # GPUs at once of devices whose names match a pattern of models
    weights: ByModel = ()  # thousandths of a GPU that such a device counts in the budget; others count 1,000

    @property
    def numbers(self) -> list[int]:
        """All but the last two, as an act has them."""
        return [value for value in self if isinstance(value, int)]

    @classmethod
    def of(cls, numbers: list[int], gpus_of: ByModel, weights: ByModel) -> Limits:
        """Return the limits of an act."""
        return cls._make([*numbers[:NUMBERS], gpus_of, weights])


#: how many of the fields of `Limits` are numbers
NUMBERS: Final = len(Limits._fields) - 2


class Needs(NamedTuple):
    """What a replica holds beside GPUs: cores in thousandths, memory in MiB, counters; and whether it is of a gang."""

    cores_milli: int
    memory_mib: int
    is_gang: bool
    uses: tuple[tuple[str, int], ...]


class Spent(NamedTuple):
    """What a tenant has spent of its budget up to a ledger ms, since the beginning of a period."""

    from_ms: int
    gpu_ms: int
    at_ms: int


class Counter(NamedTuple):
    """A counter of an operator: how many there are, for the fleet or (1) for each tenant; and the order that set it."""

    most: int
    of_tenant: int
    by: str
    why: str
    since_ms: int


#: names of counters, and how many of each are in use
Used = dict[str, int]


def counter_row(name: str, counter: Counter | None) -> int:
    """Return the part of a counter in the state's digest; 0 for one that is not there."""
    return 0 if counter is None else number_of(("counter", name, counter))


def counter_rows(counters: dict[str, Counter]) -> int:
    """Return the sum of these parts."""
    return sum(counter_row(name, counter) for name, counter in counters.items())
