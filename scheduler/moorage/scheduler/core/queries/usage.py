"""The verb `usage`: GPU time by tenant, model and hour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.fairshare import GPU_MILLI
from moorage.scheduler.core.ledger.state import RESIZED, STORY_WORDS, UNENDED
from moorage.scheduler.core.ledger.usage import HOUR_MS, Tally, part_of
from moorage.scheduler.core.ledger.usage_table import SUMS, Key
from moorage.scheduler.core.outputs.told_story import Found
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import UNKNOWN_MS, Change
from moorage.schemas.job import STATES, Request

#: the most rows in one answer; more rows come in further pages
ROWS_MAX: Final = 4_000
SINCE_S_DEFAULT: Final = 7 * 86_400
SINCE_S_MAX: Final = 366 * 86_400
BY: Final = ("tenant", "model", "hour")
_NEXT: Final = "moorage usage --help"
_RESIZED: Final = STORY_WORDS[RESIZED]
_HELD: Final = frozenset(STATES[state] for state in UNENDED)


def usage(engine: Engine, tenant: str | None, arguments: dict[str, Any]) -> dict[str, Any] | Problem:
    """Return the usage of one tenant, or of all, over whole hours, including jobs still in memory.

    The first hour is that of `since_s` seconds ago (7 days without it); `by` lists what to group by (without it tenant
    and model); `after` is the `next` of the page before. Without a `tenant` it is of all tenants. A job that waits for
    a new attempt is left out until it is placed again or has ended.
    """
    since_s, by, after = (arguments.get(name) for name in ("since_s", "by", "after"))
    since_s = SINCE_S_DEFAULT if since_s is None else since_s
    by = ["tenant", "model"] if by is None else by
    if isinstance(since_s, bool) or not isinstance(since_s, int | float) or not 0 <= since_s <= SINCE_S_MAX:
        said = f"since_s must be a number of seconds, 0..{SINCE_S_MAX}"
        return problem("invalid-argument", said, field="$.since_s", found=since_s, next=_NEXT)
    if not isinstance(by, list) or not by or not all(word in BY for word in by):
        said = f"by must be a list of some of {', '.join(BY)}"
        return problem("invalid-argument", said, field="$.by", found=str(by)[:80], allowed=", ".join(BY), next=_NEXT)
    if after is not None and not _is_key(after):
        said = "after must be the `next` of the previous page"
        return problem("invalid-argument", said, field="$.after", found=str(after)[:80], next=_NEXT)
    now_ms = engine.state.time_ms
    from_hour = max(0, now_ms - int(since_s * 1000)) // HOUR_MS
    last = None if after is None else tuple(after)
    summed = _summed(engine, tenant, from_hour, by)
    found = sorted(key for key in summed if last is None or key > last)
    return {
        "rows": [_row(by, key, summed[key]) for key in found[:ROWS_MAX]],
        "from_ms": from_hour * HOUR_MS,
        "until_ms": now_ms,
        **({"next": list(found[ROWS_MAX - 1])} if len(found) > ROWS_MAX else {}),
    }


def usage_of_story(found: Found, changes: Sequence[Change], request: Request) -> dict[str, Any]:
    """Return the GPU time that a job was granted, and what it used, from its history; {} if none or if resized.

    The memory that it was granted is left out, because the history does not say how much its GPUs have.
    """
    if any(change.state == _RESIZED for change in changes):
        return {}  # the story does not say which part of a device it had at which time
    held: dict[int, tuple[int, int]] = {}  # by replica: (since when, number of devices)
    gpu_ms = 0
    for change in changes:
        since_ms, gpus = held.pop(change.replica, (change.time_ms, 0))
        gpu_ms += (change.time_ms - since_ms) * gpus
        if change.worker and change.state in _HELD:
            held[change.replica] = change.time_ms, len(change.gpus) or gpus
    if not gpu_ms:
        return {}
    return {"usage": {"gpu_s": gpu_ms * part_of(request).milli / GPU_MILLI / 1000, **used_of_job(found.used)}}


def used_of_job(used: tuple[int, int] | None) -> dict[str, float | None]:
    """Return what a job used in the form of an answer; None for what no worker has measured yet."""
    gpu_ms, memory_mib_s = used or (UNKNOWN_MS, None)
    return {"used_gpu_s": None if gpu_ms == UNKNOWN_MS else gpu_ms / 1000, "used_memory_mib_s": memory_mib_s}


def _is_key(after: Any) -> bool:
    kinds = (str, str, int)
    return isinstance(after, list) and len(after) == len(kinds) and all(map(isinstance, after, kinds))


def _summed(engine: Engine, tenant: str | None, from_hour: int, by: list[str]) -> dict[Key, list[int]]:
    """Return the sums grouped by the words of `by`; other parts of the key are "" or -1."""
    by_tenant, by_model, by_hour = (word in by for word in BY)
    state = engine.state
    tally = Tally(state, state.time_ms, engine.request_of)
    jobs = {member.replica.job.num: member.replica.job for member in state.members()}
    jobs.update((num, state.jobs[num]) for num in state.ended)
    for job in jobs.values():
        if tenant is None or job.tenant == tenant:
            tally.add(job)
    found: dict[Key, list[int]] = {}
    for rows in (state.usage.rows(from_hour, tenant), tally.sums()):
        for (name, model, hour), sums in rows:
            if hour < from_hour:
                continue
            key = (name if by_tenant else "", model if by_model else "", hour if by_hour else -1)
            into = found.get(key)
            if into is None:
                into = found[key] = [0] * SUMS
            for column, value in enumerate(sums):
                into[column] += value
    return found


def _row(by: list[str], key: Key, sums: list[int]) -> dict[str, Any]:
    names = {"tenant": ("tenant", key[0]), "model": ("model", key[1]), "hour": ("hour_ms", key[2] * HOUR_MS)}
    return {**dict(names[word] for word in by), **as_row(sums)}


def as_row(sums: Sequence[int]) -> dict[str, float]:
    """Return sums in the form of an answer."""
    gpu_ms, mib_s, used_gpu_ms, used_mib_s = sums
    return {
        "gpu_s": gpu_ms / 1000,
        "memory_mib_s": mib_s,
        "used_gpu_s": used_gpu_ms / 1000,
        "used_memory_mib_s": used_mib_s,
    }
