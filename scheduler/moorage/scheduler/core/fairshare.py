"""Weighted fair share between tenants: what each has used, decayed by a half-life, and who of them is next.

All of it is integers over ledger time, so that folding the same records gives the same numbers. Usage decays forward
(Cormode et al., "Forward Decay", ICDE 2009): a GPU second counts the more the later it is, by `inflation`, and what
was counted is never touched again. A tenant's usage is then `usage_base + rate_milli · inflation(now)`: two additions
when a member comes or goes, and nothing for those who merely run on or wait.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Final

from moorage.scheduler.core.records import MODE_NAMES, Mode
from moorage.scheduler.core.state import INFLATION_ONE
from moorage.schemas.gpu import SHARERS_MAX
from moorage.schemas.memo import Memo

if TYPE_CHECKING:
    from moorage.scheduler.core.fleet import Fleet
    from moorage.scheduler.core.shape import Shape
    from moorage.scheduler.core.state import Member, State, Tenant

#: a whole GPU, in the unit of rates
GPU_MILLI: Final = 1_000
ONE: Final = INFLATION_ONE
#: so many half-lives after that moment the count begins anew, so that numbers stay short
HALF_LIVES_MAX: Final = 32
#: shapes of which `Rates` remembers the rate; beyond it all are forgotten, and found again as they are asked for
RATES_MAX: Final = 16_384
#: a tenant's weight where nobody set one
WEIGHT_DEFAULT: Final = 1
#: what scores are divided by a weight after, so that whole numbers tell them apart
_FINE: Final = 1 << 10
#: how much more the past counts than the present
PAST_WEIGHT: Final = 128
_STEPS: Final = 256


def _power(step: int) -> int:
    """2^(step / 256) in units of 1 / ONE: the 256th root by eight square roots, each exact to the integer below."""
    value = 1 << 32 * _STEPS + step
    for _ in range(8):
        value = isqrt(value)
    return value


_POWERS: Final = tuple(_power(step) for step in range(_STEPS + 1))


def inflation(elapsed_ms: int, half_life_ms: int) -> int:
    """2^(elapsed / half-life) in units of 1 / ONE, by straight lines between 256 points: never off by over 1 ppm."""
    whole, rest = divmod(elapsed_ms, half_life_ms)
    step, beyond = divmod(rest * _STEPS, half_life_ms)
    low = _POWERS[step]
    return low + (_POWERS[step + 1] - low) * beyond // half_life_ms << whole


def rate_of(member: Member) -> int:
    """Return what a member uses, in thousandths of a GPU: its dominant resource, as the record that placed it says."""
    return member.rate_milli or GPU_MILLI * member.mask.bit_count()


def sharer_milli(mode: str, compute_percent: int) -> int:
    """Return the thousandths of a device that a sharer counts: its share, or as one of so many as there may be."""
    return max(GPU_MILLI * compute_percent // 100, GPU_MILLI // SHARERS_MAX[mode])


class Rates:
    """The dominant resource of a shape over the capacity of the fleet, as thousandths of a GPU; kept by shape.

    A job that takes a tenth of all processors counts like a tenth of all GPUs (Ghodsi et al., "Dominant Resource
    Fairness", NSDI 2011). A sharer counts by its share, or as one of so many as there may be.
    """

    def __init__(self, fleet: Fleet, known_max: int = RATES_MAX) -> None:
        self._fleet = fleet
        self._inventory = -1
        self._total = (0, 0, 0)  # devices, cpu_milli, memory_mib
        self._known: Memo[int, int] = Memo(known_max)

    def of(self, shape: Shape) -> int:
        if self._inventory != self._fleet.inventory:
            hosts = self._fleet.hosts.values()
            self._inventory = self._fleet.inventory
            self._total = (
                sum(host.lent.bit_count() for host in hosts),
                sum(host.cpu_milli for host in hosts),
                sum(host.memory_mib for host in hosts),
            )
            self._known.clear()
        rate = self._known.get(shape.index)
        if rate is None:
            rate = self._known.put(shape.index, self._of(shape))
        return rate

    def _of(self, shape: Shape) -> int:
        devices, cpu_milli, memory_mib = self._total
        whole = GPU_MILLI * max(1, devices)
        each = sharer_milli(MODE_NAMES[shape.mode], shape.compute_percent) if shape.mode > Mode.EXCLUSIVE else GPU_MILLI
        rate = each * shape.count
        if cpu_milli:
            rate = max(rate, shape.cpu_milli * whole // cpu_milli)
        if memory_mib:
            rate = max(rate, shape.memory_mib * whole // memory_mib)
        return min(rate, whole)


# ----------------------------------------------------------------------------------------------- usage in the state


def begin(state: State, half_life_ms: int) -> None:
    """Count usage from now on, or by another half-life: what was counted keeps its meaning."""
    if state.half_life_ms:
        before = state.inflation
        for tenant in state.tenants.values():
            used = tenant.usage_base + tenant.rate_milli * before
            tenant.usage_base = used * ONE // before - tenant.rate_milli * ONE
    else:
        for member in state.members():
            tenant = state.tenants[member.replica.job.tenant]
            tenant.rate_milli += rate_of(member)
            tenant.usage_base -= rate_of(member) * ONE
    state.half_life_ms, state.counts_from_ms = half_life_ms, state.time_ms
    state.inflation = ONE


def advance(state: State) -> bool:
    """Let the ledger's time go on to `state.time_ms`; true where every tenant's row changed with it."""
    half_life_ms = state.half_life_ms
    halves = (state.time_ms - state.counts_from_ms) // half_life_ms
    again = halves >= HALF_LIVES_MAX
    if again:
        state.counts_from_ms += halves * half_life_ms
        for tenant in state.tenants.values():
            tenant.usage_base >>= halves
    state.inflation = inflation(state.time_ms - state.counts_from_ms, half_life_ms)
    return again


def use(state: State, tenant: Tenant, rate_milli: int) -> None:
    """From now on a tenant uses so much more, or less; what it has used until now stays."""
    tenant.rate_milli += rate_milli
    tenant.usage_base -= rate_milli * state.inflation


def usage_milli(state: State, tenant: Tenant) -> int:
    """Return a tenant's decayed usage as the thousandths of a GPU that it would have come to if used all the time."""
    if not state.half_life_ms:
        return 0
    return (tenant.usage_base + tenant.rate_milli * state.inflation) // state.inflation


# -------------------------------------------------------------------------------------------------- who is next


def score(state: State, tenant: Tenant | None, at: int, more_milli: int) -> int:
    """Less goes first: usage so far and, as if it lasted, what the tenant uses now, over its weight.

    `at` is the inflation now, `more_milli` what this tick has placed beside the state. Usage of a steady rate comes to
    that rate, so tenants that keep the GPUs full settle at the ratio of their weights. The past has more weight, so
    that what whole GPUs cannot divide is made up for within minutes; the present has some, so that many GPUs that are
    free at once are shared out. Whoever comes back after a long time has used nothing, so at most 1 / (2 ln 2) = 0.72
    half-lives of the whole fleet are made up for.
    """
    if tenant is None:
        return more_milli * at * _FINE
    used = tenant.usage_base + tenant.rate_milli * at
    now = (tenant.rate_milli + more_milli) * at
    return (used * PAST_WEIGHT + now) * _FINE // (tenant.weight or WEIGHT_DEFAULT)


def places_until(behind: int, weight: int, rate_milli: int, at: int) -> int:
    """How many members of a rate may be placed one after the other before a score that is so far behind is reached."""
    each = rate_milli * at * _FINE // (weight or WEIGHT_DEFAULT)
    return behind // each if each else 1 << 30
