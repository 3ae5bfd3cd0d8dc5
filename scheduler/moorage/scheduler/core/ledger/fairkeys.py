"""Fairness inside a tenant: what each of its fair keys (a user, a customer) uses, decayed as the tenant's usage.

Only of a tenant of which a job has named a key: others cost nothing. Jobs without a key share the key "". It is soft: a
new leader begins with what runs, and with the last runs of the jobs in memory. Jobs are named by their soft `fair`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from moorage.scheduler.core.ledger import fairshare
from moorage.scheduler.core.ledger.state import Job, State, Tenant

#: keys of a tenant that are known at once; the keys beyond them share the key of jobs without one
KEYS_MAX: Final = 10_000
#: stands between tenant and key in the owner of a queue group; no tenant and no key has it
_SEPARATOR: Final = "\x1f"


class KeyUse(NamedTuple):
    """What the attempts of a key use, as the same fields of a tenant, and how many they are."""

    usage_base: int = 0
    rate_milli: int = 0
    running: int = 0
    weight: int = 1  # as the key's newest job that names one says


_NONE: Final = KeyUse()


def owner_of(job: Job) -> str:
    """Return whose queue group a job is in: its tenant's, or that of its fair key."""
    return f"{job.tenant}{_SEPARATOR}{job.fair}" if job.fair else job.tenant


def parts_of(owner: str) -> tuple[str, str]:
    """Return the tenant and the key of an owner; "" for no key."""
    tenant, _, key = owner.partition(_SEPARATOR)
    return tenant, key


def know(state: State, tenant: Tenant, job: Job, key: str, weight: int) -> None:
    """Note the key of a job before anything of it is placed, with its weight (0 for none), and begin to count what its
    tenant's keys use."""
    if tenant.keys is None:
        tenant.keys = {}
        for other in tenant.jobs.values():
            for attempt in other.attempts:
                use(state, tenant, other, fairshare.rate_of(attempt), 1)
    keys = tenant.keys
    if key not in keys:
        if len(keys) >= KEYS_MAX:
            idle = next((each for each, used in keys.items() if each and not used.running), None)
            if idle is None or any(other.fair == idle and not other.over for other in tenant.jobs.values()):
                return
            del keys[idle]
        keys[key] = _NONE
    if weight:
        keys[key] = keys[key]._replace(weight=weight)
    job.fair = key


def use(state: State, tenant: Tenant, job: Job, rate_milli: int, count: int) -> None:
    """Change what a job's key uses from now on, and how many attempts it has."""
    assert tenant.keys is not None
    used = tenant.keys.get(job.fair, _NONE)
    base = used.usage_base - rate_milli * state.inflation
    tenant.keys[job.fair] = KeyUse(base, used.rate_milli + rate_milli, used.running + count, used.weight)


def learn(state: State, tenant: Tenant, job: Job, gpu_milli: int) -> None:
    """Let the runs of a job count that ended before this leader's term, as far as they are remembered."""
    if tenant.keys is None or not state.half_life_ms:
        return
    end_ms = job.ended_ms or state.time_ms
    for run_ms in job.ran:
        until, since = (_inflation(state, at_ms) for at_ms in (end_ms, end_ms - run_ms))
        used = tenant.keys.get(job.fair, _NONE)
        tenant.keys[job.fair] = used._replace(usage_base=used.usage_base + gpu_milli * (until - since))
    for attempt in job.attempts:
        since = _inflation(state, attempt.began_ms)
        rate = fairshare.rate_of(attempt)
        used = tenant.keys.get(job.fair, _NONE)
        tenant.keys[job.fair] = used._replace(usage_base=used.usage_base + rate * (state.inflation - since))


def _inflation(state: State, at_ms: int) -> int:
    return fairshare.inflation(max(0, at_ms - state.counts_from_ms), state.half_life_ms)


def score(tenant: Tenant, key: str, at: int) -> int:
    """Return the score of a key among those of its tenant, of which the lowest goes first, as that of tenants."""
    used = _NONE if tenant.keys is None else tenant.keys.get(key, _NONE)
    now = used.rate_milli * at
    return ((used.usage_base + now) * fairshare.PAST_WEIGHT + now) // used.weight


def room(tenant: Tenant, key: str, together: int) -> int:
    """Return how many more replicas, or gangs of `together`, of a key its tenant's limit for each key allows."""
    most = 0 if tenant.limits is None else tenant.limits.running_key
    used = _NONE if tenant.keys is None else tenant.keys.get(key, _NONE)
    return max(0, most - used.running) // together


def is_full(tenant: Tenant, key: str, together: int) -> bool:
    """Return whether a tenant's limit for each key keeps a replica, or a gang, of a key waiting."""
    is_set = tenant.keys is not None and tenant.limits is not None and bool(tenant.limits.running_key)
    return is_set and not room(tenant, key, together)


def live(tenant: Tenant) -> int:
    """Return of how many keys jobs run or wait. It reads all jobs of a tenant that has keys: for questions."""
    if tenant.keys is None:
        return 0
    return len({job.fair for job in tenant.jobs.values() if job.fair and not job.over})
