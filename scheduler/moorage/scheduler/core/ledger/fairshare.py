"""Weighted fair share between tenants: what each tenant has used, decayed by a half-life, and which tenant is next.

All values are integers over ledger time, so that folding the same records gives the same numbers. Usage decays forward
(Cormode et al., "Forward Decay", ICDE 2009): later GPU seconds count more, by `inflation`, and counted ones are never
changed. A tenant's usage is then `usage_base + rate_milli · inflation(now)`: two additions when an attempt comes or
goes, and none while attempts run on.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Final

from moorage.scheduler.core.ledger.state import INFLATION_ONE
from moorage.schemas.gpu import SHARERS_MAX

if TYPE_CHECKING:
    from moorage.scheduler.core.ledger.state import Attempt, State, Tenant

#: a whole GPU in the unit of rates
GPU_MILLI: Final = 1_000
ONE: Final = INFLATION_ONE
#: after this many half-lives all counts are rescaled, so that numbers stay short
HALF_LIVES_MAX: Final = 32
#: a tenant's weight if none was set
WEIGHT_DEFAULT: Final = 1
#: scores are multiplied by this before the division by a weight, so that integers stay distinct
_FINE: Final = 1 << 10
#: the weight of past usage against current usage
PAST_WEIGHT: Final = 128
_STEPS: Final = 256


def _power(step: int) -> int:
    """Return 2^(step / 256) in units of 1 / ONE: the 256th root by eight square roots, each rounded down exactly."""
    value = 1 << 32 * _STEPS + step
    for _ in range(8):
        value = isqrt(value)
    return value


_POWERS: Final = tuple(_power(step) for step in range(_STEPS + 1))


def inflation(elapsed_ms: int, half_life_ms: int) -> int:
    """Return 2^(elapsed / half-life) in units of 1 / ONE, interpolated between 256 points: off by at most 1 ppm."""
    whole, rest = divmod(elapsed_ms, half_life_ms)
    step, beyond = divmod(rest * _STEPS, half_life_ms)
    low = _POWERS[step]
    return low + (_POWERS[step + 1] - low) * beyond // half_life_ms << whole


def rate_of(attempt: Attempt, mask: int | None = None) -> int:
    """Return what an attempt counts as using, in thousandths of a GPU, as of its placement or its job's last resize.

    `mask` are the slots that it holds, None for those that the state says; a frozen one holds none.
    """
    held = attempt.mask if mask is None else mask
    return (attempt.rate_milli or GPU_MILLI * held.bit_count()) if held or not attempt.home else 0


def sharer_milli(mode: str, compute_percent: int) -> int:
    """Return what a sharer counts in thousandths of a device: its share, at least 1 / (the most sharers)."""
    return max(GPU_MILLI * compute_percent // 100, GPU_MILLI // SHARERS_MAX[mode])


# ----------------------------------------------------------------------------------------------- usage in the state


def begin(state: State, half_life_ms: int) -> None:
    """Start counting usage, or change its half-life; what was counted keeps its meaning."""
    if state.half_life_ms:
        before = state.inflation
        for tenant in state.tenants.values():
            used = tenant.usage_base + tenant.rate_milli * before
            tenant.usage_base = used * ONE // before - tenant.rate_milli * ONE
            if tenant.keys is not None:  # their past is not kept: they are soft, see `fairkeys`
                keys = tenant.keys.items()
                tenant.keys = {key: each._replace(usage_base=-each.rate_milli * ONE) for key, each in keys}
    else:
        for attempt in state.attempts():
            tenant = state.tenants[attempt.replica.job.tenant]
            tenant.rate_milli += rate_of(attempt)
            tenant.usage_base -= rate_of(attempt) * ONE
    state.half_life_ms, state.counts_from_ms = half_life_ms, state.time_ms
    state.inflation = ONE


def rescales(state: State, time_ms: int) -> bool:
    """Return whether every tenant's row changes when usage is advanced to a ledger time."""
    return (time_ms - state.counts_from_ms) // state.half_life_ms >= HALF_LIVES_MAX


def advance(state: State) -> bool:
    """Advance usage to the ledger time `state.time_ms`; return whether every tenant's row changed."""
    half_life_ms, again = state.half_life_ms, rescales(state, state.time_ms)
    if again:
        halves = (state.time_ms - state.counts_from_ms) // half_life_ms
        state.counts_from_ms += halves * half_life_ms
        for tenant in state.tenants.values():
            tenant.usage_base >>= halves
            if tenant.keys is not None:
                keys = tenant.keys.items()
                tenant.keys = {key: each._replace(usage_base=each.usage_base >> halves) for key, each in keys}
    state.inflation = inflation(state.time_ms - state.counts_from_ms, half_life_ms)
    return again


def usage_milli(state: State, tenant: Tenant) -> int:
    """Return the constant rate, in thousandths of a GPU, that would give a tenant's decayed usage; 0 if not counted."""
    if not state.half_life_ms:
        return 0
    return (tenant.usage_base + tenant.rate_milli * state.inflation) // state.inflation


# -------------------------------------------------------------------------------------------------- which is next


def score(tenant: Tenant | None, at: int) -> int:
    """Return a tenant's score, of which the lowest goes first: (past usage, plus some current usage) / weight.

    `at` is the inflation now. Usage at a steady rate
    converges to that rate, so tenants that keep the GPUs full settle at the ratio of their weights. The past has more
    weight, so that what whole GPUs cannot divide is made up for within minutes; the present has some, so that many GPUs
    that become free at once are shared out. A tenant that returns after a long time has used nothing, so at most 1 / (2
    ln 2) = 0.72 half-lives of the whole fleet are made up for.
    """
    if tenant is None:
        return 0
    used = tenant.usage_base + tenant.rate_milli * at
    return (used * PAST_WEIGHT + tenant.rate_milli * at) * _FINE // (tenant.weight or WEIGHT_DEFAULT)


def places_until(behind: int, weight: int, rate_milli: int, at: int) -> int:
    """Return how many attempts of this rate may be placed in a row before the score rises by `behind`."""
    each = rate_milli * at * _FINE // (weight or WEIGHT_DEFAULT)
    return behind // each if each else 1 << 30
