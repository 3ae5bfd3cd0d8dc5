"""Computes which GPU time and memory a job was granted, from its transitions.

A job holds devices from each placement to the end of the attempt. What it measured of their use is spread over the
hours and models of what it was granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from moorage.scheduler.core.ledger.fairshare import GPU_MILLI, sharer_milli
from moorage.scheduler.core.ledger.state import (
    AT_MS,
    FENCE,
    ON_WORKER,
    REPLICA,
    SLOTS,
    STATE,
    WORKER,
    Job,
    State,
    Transition,
)
from moorage.schemas.codec import decode_accepted
from moorage.schemas.job import Request

HOUR_MS: Final = 3_600_000
#: of a longer run, only the last hours count
JOB_HOURS_MAX: Final = 24 * 62
MODEL_CHARS_MAX: Final = 64
UNKNOWN_MODEL: Final = "unknown"

#: thousandths of GPU ms granted, MiB ms granted, thousandths of GPU ms used, MiB ms used
SUMS: Final = 4
Sums = tuple[int, int, int, int]
#: model, hour since the epoch
Where = tuple[str, int]


class Part(NamedTuple):
    """The part of each device that a job gets: thousandths of it, and MiB (None: the same part of its memory)."""

    milli: int
    memory_mib: int | None


ALL: Final = Part(GPU_MILLI, None)


def part_of(request: Request) -> Part:
    """Return the part of a device that a request asks for. A sharer counts as in fair share."""
    gpu = request.effective_gpu
    if gpu is None or gpu.effective_sharing == "exclusive":
        return ALL
    share = gpu.share
    percent = share.compute_percent if share and share.compute_percent < 100 else 0
    return Part(sharer_milli(gpu.effective_sharing, percent), share.memory_mib or None if share else None)


def parts_of(job: Job, request: Request) -> list[tuple[int, Part]]:
    """Return what a job gets of each device, and from which ledger ms on, in order of time."""
    if not job.resizes:
        return [(0, part_of(request))]
    asked = decode_accepted(job.body)
    return [(0, part_of(asked)), *((each.since_ms, part_of(asked.with_part(each[2:]))) for each in job.resizes)]


class Granted:
    """What a job was granted, by model and hour: thousandths of GPU ms, and MiB ms."""

    __slots__ = ("held", "sums", "used")

    def __init__(self, used: tuple[int, int] | None = None) -> None:
        """`used` is what of the job's measured use is counted elsewhere, in GPU ms and MiB seconds."""
        self.used = (0, 0) if used is None else (max(0, used[0]), used[1])
        #: by replica: the transition since which it holds devices, and is counted up to it
        self.held: dict[int, Transition] = {}
        self.sums: dict[Where, list[int]] = {}


class Counting:
    """Adds up what jobs were granted, from the ledger's state."""

    def __init__(self, state: State, request_of: Callable[[Job], Request]) -> None:
        self._state = state
        self._request_of = request_of
        #: by worker, slots and `Pool.until`: (model, number of devices, their memory)
        self._devices: dict[tuple[int, int, int], list[tuple[str, int, int]]] = {}

    def add(self, granted: Granted, job: Job, rows: Iterable[Transition]) -> None:
        """Count a job's next transitions, in order: what they end, and what they begin to hold."""
        held = granted.held
        for row in rows:
            index = row[REPLICA]
            if index < 0 or row[STATE] < 0:  # of the whole job, or beside its states
                continue
            before = held.get(index)
            goes_on = row[WORKER] >= 0 and row[STATE] in ON_WORKER
            if before is not None:
                if goes_on and (row[FENCE], row[SLOTS]) == (before[FENCE], before[SLOTS]):
                    continue  # else it is another attempt, or one that was frozen or resumed
                self._span(granted.sums, job, before, row[AT_MS])
                del held[index]
            if goes_on:
                held[index] = row

    def until(self, granted: Granted, job: Job, until_ms: int) -> dict[Where, list[int]]:
        """Return what a job was granted and has used up to a ledger time, as rows of four sums."""
        sums = {where: list(each) for where, each in granted.sums.items()}
        for row in granted.held.values():
            self._span(sums, job, row, until_ms)
        return _with_used(sums, job, granted.used)

    def _span(self, into: dict[Where, list[int]], job: Job, row: Transition, until_ms: int) -> None:
        from_ms, mask = row[AT_MS], row[SLOTS]
        if not mask or until_ms <= from_ms:
            return
        parts = parts_of(job, self._request_of(job))
        ends = [*(since_ms for since_ms, _ in parts[1:]), until_ms]
        for (since_ms, part), end_ms in zip(parts, ends, strict=True):
            begin_ms, end_ms = max(from_ms, since_ms), min(until_ms, end_ms)
            for model, devices, memory_mib in self._of(row[WORKER], mask, row[FENCE]) if begin_ms < end_ms else ():
                mib = memory_mib * part.milli // GPU_MILLI if part.memory_mib is None else part.memory_mib * devices
                _spread(into, model, begin_ms, end_ms, devices * part.milli, mib)

    def _of(self, worker: int, mask: int, fence: int) -> list[tuple[str, int, int]]:
        """Return the models of an attempt's slots, each with the number of devices and their memory."""
        until, pool, _ = self._state.worker_by_num[worker].pool_at(fence)
        found = self._devices.get((worker, mask, until))
        # of the present devices only the object itself says which they are: a join brings others
        if found is None or not until:
            by_model: dict[str, tuple[int, int]] = {}
            for slot in range(mask.bit_length()):
                if mask >> slot & 1:
                    device = pool[slot] if slot < len(pool) else None
                    model = (device.name[:MODEL_CHARS_MAX] if device is not None else "") or UNKNOWN_MODEL
                    count, memory = by_model.get(model, (0, 0))
                    by_model[model] = count + 1, memory + (device.memory_mib if device is not None else 0)
            found = [(model, count, memory) for model, (count, memory) in by_model.items()]
            if until:
                self._devices[worker, mask, until] = found
        return found


def _spread(into: dict[Where, list[int]], model: str, from_ms: int, until_ms: int, milli: int, mib: int) -> None:
    """Add a span to each hour in which it lies; of a longer span only the last `JOB_HOURS_MAX` hours count."""
    at, last = from_ms // HOUR_MS, (until_ms - 1) // HOUR_MS
    at = max(at, last - JOB_HOURS_MAX + 1)
    begin = max(from_ms, at * HOUR_MS)
    while at <= last:
        end = min(until_ms, (at + 1) * HOUR_MS)
        sums = into.setdefault((model, at), [0, 0])
        sums[0] += (end - begin) * milli
        sums[1] += (end - begin) * mib
        at, begin = at + 1, end


def _with_used(sums: dict[Where, list[int]], job: Job, elsewhere: tuple[int, int]) -> dict[Where, list[int]]:
    """Return the sums of what was granted with those of what was measured: its part of each hour and model."""
    gpu_ms, mib_s = (max(0, job.used[0]) - elsewhere[0], job.used[1] - elsewhere[1]) if job.used is not None else (0, 0)
    total = max(1, sum(milli_ms for milli_ms, _ in sums.values()))
    return {
        where: [milli_ms, mib_ms, gpu_ms * GPU_MILLI * milli_ms // total, mib_s * 1000 * milli_ms // total]
        for where, (milli_ms, mib_ms) in sums.items()
    }


def granted_to(state: State, job: Job, request_of: Callable[[Job], Request]) -> list[int] | None:
    """Return the four sums of a job in memory, as far as its transitions are; None if it was granted nothing."""
    counting, granted = Counting(state, request_of), Granted()
    counting.add(granted, job, job.history)
    found = counting.until(granted, job, state.time_ms)
    return [sum(column) for column in zip(*found.values(), strict=True)] if found else None


def in_seconds(sums: Iterable[int]) -> dict[str, float]:
    """Return four sums in the form of an answer, in seconds of GPUs and whole MiB seconds."""
    milli_ms, mib_ms, used_milli_ms, used_mib_ms = sums
    return {
        "gpu_s": milli_ms // GPU_MILLI / 1000,
        "memory_mib_s": mib_ms // 1000,
        "used_gpu_s": used_milli_ms // GPU_MILLI / 1000,
        "used_memory_mib_s": used_mib_ms // 1000,
    }
