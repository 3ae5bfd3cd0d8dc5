"""Computes what a job adds to the sums of GPU time and memory (see `usage_table`).

A job is added to the sums in the ledger when it leaves memory, which happens once (act `Usage`). Jobs in memory are
summed for each question. So nothing is counted twice, and placements and ends cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from moorage.scheduler.core.ledger.fairshare import GPU_MILLI, sharer_milli
from moorage.scheduler.core.ledger.state import (
    AT_MS,
    FENCE,
    PLACED,
    REPLICA,
    REV,
    SLOTS,
    STATE,
    STORY_KEPT,
    UNENDED,
    WORKER,
    Job,
    State,
    Transition,
)
from moorage.scheduler.core.ledger.usage_table import SUMS, Key, Sums
from moorage.schemas.codec import decode_request
from moorage.schemas.job import Request

HOUR_MS: Final = 3_600_000
#: of a longer run, only the last hours count
JOB_HOURS_MAX: Final = 24 * 62
MODEL_CHARS_MAX: Final = 64
UNKNOWN_MODEL: Final = "unknown"


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


Span = tuple[int, int, int, int, int]  # worker number, slots, fence, and from and until which ledger ms


def parts_of(job: Job, request: Request) -> list[tuple[int, Part]]:
    """Return what a job gets of each device, and from which ledger ms on, in order of time."""
    if not job.resizes:
        return [(0, part_of(request))]
    asked = decode_request(job.body)
    return [(0, part_of(asked)), *((each.since_ms, part_of(asked.with_part(each[2:]))) for each in job.resizes)]


def spans(job: Job, until_ms: int) -> Iterator[Span]:
    """Yield which devices a job held, and when: from each placement to the end of the attempt, up to `until_ms`.

    If the beginning of its story has left memory, only the later part: the earlier part was counted when it left. A
    span that begins after `until_ms` has a length of 0 or less.
    """
    story = job.story
    if len(job.replicas) == 1 and job.replicas[0].attempt == 1 and story:
        first, last = story[0], story[-1]
        if first[STATE] == PLACED and last[WORKER] >= 0 and last[STATE] not in UNENDED:  # nearly all jobs: one attempt
            yield first[WORKER], first[SLOTS], first[FENCE], first[AT_MS], min(last[AT_MS], until_ms)
            return
    from_ms = story[0][AT_MS] if story and story[0][REV] > 2 else -1  # revision 1 is ACCEPTED, 2 is the first row
    opened: dict[int, Transition] = {}
    seen: set[int] = set()
    for row in story:
        index = row[REPLICA]
        if index < 0:
            continue
        before = opened.pop(index, None)
        if before is not None:
            yield before[WORKER], before[SLOTS], before[FENCE], before[AT_MS], min(row[AT_MS], until_ms)
        elif from_ms >= 0 and index not in seen and row[WORKER] >= 0 and row[STATE] != PLACED:
            yield row[WORKER], row[SLOTS], row[FENCE], from_ms, min(row[AT_MS], until_ms)
        seen.add(index)
        if row[WORKER] >= 0 and row[STATE] in UNENDED:
            opened[index] = row
    for row in opened.values():
        yield row[WORKER], row[SLOTS], row[FENCE], row[AT_MS], until_ms
    if from_ms >= 0:
        for replica in job.replicas:
            member = replica.member
            if member is not None and replica.index not in seen:
                yield member.worker.num, member.mask, member.fence, from_ms, until_ms


def rows_that_leave(job: Job, last: int) -> int:
    """Return how many transitions leave memory once the history holds all up to the revision `last`."""
    story = job.story
    return max(0, min(len(story) - STORY_KEPT, last - story[0][REV] + 1)) if story else 0


class Tally:
    """The usage of some jobs by tenant, model and hour, counting current attempts until `until_ms`.

    `fine` has the sums in thousandths, so that many short spans lose nothing to rounding.
    """

    def __init__(self, state: State, until_ms: int, request_of: Callable[[Job], Request]) -> None:
        self.fine: dict[Key, list[int]] = {}
        self._state = state
        self._until_ms = until_ms
        self._request_of = request_of
        #: by worker, slots and `Pool.until`: (model, number of devices, their memory)
        self._devices: dict[tuple[int, int, int], list[tuple[str, int, int]]] = {}

    def add(self, job: Job) -> None:
        """Count a job in memory. Its measured use is spread over the hours and models of what it was granted."""
        if job.used is None:
            self._count(job, spans(job, self._until_ms))
            return
        alone = Tally(self._state, self._until_ms, self._request_of)
        alone._count(job, spans(job, self._until_ms))
        total = sum(sums[0] for sums in alone.fine.values())
        for key, (milli_ms, mib_ms, _, _) in alone.fine.items():
            into = self.fine.setdefault(key, [0] * SUMS)
            into[0] += milli_ms
            into[1] += mib_ms
            into[2] += max(0, job.used[0]) * GPU_MILLI * milli_ms // max(1, total)
            into[3] += job.used[1] * 1000 * milli_ms // max(1, total)

    def add_leaving(self, job: Job, last: int) -> None:
        """Count the transitions that leave memory when the history holds a job's story up to the revision `last`."""
        self.add_oldest(job, rows_that_leave(job, last))

    def add_oldest(self, job: Job, count: int) -> None:
        """Count the oldest `count` transitions of a job, which leave memory; others stay."""
        if count:
            self._count(job, spans(job, job.story[count][AT_MS]))

    def _count(self, job: Job, held: Iterable[Span]) -> None:
        parts: list[tuple[int, Part]] = []
        for worker, mask, fence, from_ms, until_ms in held:
            if not mask or until_ms <= from_ms:
                continue
            parts = parts or parts_of(job, self._request_of(job))
            ends = [*(since_ms for since_ms, _ in parts[1:]), until_ms]
            for (since_ms, part), end_ms in zip(parts, ends, strict=True):
                begin_ms, end_ms = max(from_ms, since_ms), min(until_ms, end_ms)
                for model, devices, memory_mib in self._of(worker, mask, fence) if begin_ms < end_ms else ():
                    mib = memory_mib * part.milli // GPU_MILLI if part.memory_mib is None else part.memory_mib * devices
                    self._spread(job.tenant, model, begin_ms, end_ms, devices * part.milli, mib)

    def _spread(self, tenant: str, model: str, from_ms: int, until_ms: int, milli: int, mib: int) -> None:
        """Add a span to each hour in which it lies; of a longer span only the last `JOB_HOURS_MAX` hours count."""
        at, last = from_ms // HOUR_MS, (until_ms - 1) // HOUR_MS
        at = max(at, last - JOB_HOURS_MAX + 1)
        begin = max(from_ms, at * HOUR_MS)
        while at <= last:
            end = min(until_ms, (at + 1) * HOUR_MS)
            sums = self.fine.setdefault((tenant, model, at), [0] * SUMS)
            sums[0] += (end - begin) * milli
            sums[1] += (end - begin) * mib
            at, begin = at + 1, end

    def _of(self, worker: int, mask: int, fence: int) -> list[tuple[str, int, int]]:
        """Return the models of an attempt's slots, each with the number of devices and their memory."""
        until, pool, _ = self._state.worker_by_num[worker].pool_at(fence)
        found = self._devices.get((worker, mask, until))
        if found is None:
            by_model: dict[str, tuple[int, int]] = {}
            for slot in range(mask.bit_length()):
                if mask >> slot & 1:
                    device = pool[slot] if slot < len(pool) else {}
                    model = str(device.get("name", ""))[:MODEL_CHARS_MAX] or UNKNOWN_MODEL
                    count, memory = by_model.get(model, (0, 0))
                    by_model[model] = count + 1, memory + int(device.get("memory_mib", 0))
            found = [(model, count, memory) for model, (count, memory) in by_model.items()]
            self._devices[worker, mask, until] = found
        return found

    def sums(self) -> Iterator[tuple[Key, Sums]]:
        for key, (milli_ms, mib_ms, used_milli_ms, used_mib_ms) in sorted(self.fine.items()):
            yield key, (milli_ms // GPU_MILLI, mib_ms // 1000, used_milli_ms // GPU_MILLI, used_mib_ms // 1000)

    def rows(self) -> list[tuple[str, str, list[int]]]:
        """Return the sums in the form of the act: (tenant, model, flat list of hours with their sums)."""
        found: dict[tuple[str, str], list[int]] = {}
        for (tenant, model, hour), sums in self.sums():
            found.setdefault((tenant, model), []).extend((hour, *sums))
        return [(*key, flat) for key, flat in found.items()]
