"""An operator's `resize`: another share of each device that a job has, and of those that it gets later.

The fleet counts the new share from this record on, so that the record places no sharer into the room that it takes. The
worker gets it with the record (`core.outputs`), and again until it has applied it.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.fairshare import GPU_MILLI
from moorage.scheduler.core.ledger.records import MODE_NAMES
from moorage.scheduler.core.ledger.state import AT_EXITED, Attempt, Job, State
from moorage.scheduler.core.outputs.outputs import takes_parts
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.request_reader import RequestReader
from moorage.schemas.capabilities import (
    COUNTED,
    LIVE,
    NEXT_ATTEMPT,
    level_number,
    memory_and_compute,
    mode_enforced,
)
from moorage.schemas.errors import Problem, problem
from moorage.schemas.gpu import Share
from moorage.schemas.operate import ResizeAct, Resized

_WHILE_IT_WAITS: Final = "hold the job, requeue it, resize it while it waits, and release it"
_SMALLER: Final = f"give it a smaller part; or {_WHILE_IT_WAITS}"


class Resizing:
    """Decides whether a job may have another share, and counts it."""

    def __init__(self, state: State, reader: RequestReader, fleet: Fleet, order: QueueOrder) -> None:
        self._state = state
        self._reader = reader
        self._fleet = fleet
        self._order = order

    def resize(self, draft: Draft, job: Job, asked: ResizeAct, by: str) -> Resized | Problem:
        """Give a job another share; return its share now, or a refusal. If it has that share already, nothing changes.

        The job's shape and what the fleet counts are new at once, not only when the record is folded.
        """
        if (fixed := self._reader.why_fixed(job)) is not None:
            return fixed
        request = self._reader.request_of(job)
        gpu = request.effective_gpu
        if gpu is None or gpu.effective_sharing == "exclusive":
            return _refused(
                job,
                "it shares no GPU, so there is no part to change",
                gpu and "exclusive",
                "mps or time-slice",
                "submit another job that asks for a part of a GPU, as 1xH100@mps=50%",
            )
        share = gpu.share or Share()
        before = job.part or (share.memory_mib, share.compute_percent)
        part = (
            before[0] if asked.memory_mib is None else asked.memory_mib,
            before[1] if asked.compute_percent is None else asked.compute_percent,
        )
        attempts = job.attempts
        counts = self._counts(job, attempts, asked)
        if part == before:
            return Resized(*part, job.resizes[-1].since_ms if job.resizes else 0, counts)
        old = self._reader.shape_of(job)
        new = self._reader.shape_with(job, request.with_part(part))
        refused = self._fixed(job, attempts, before, part) or self._too_large(job, attempts, old, new)
        if refused is not None:
            return refused
        for attempt in attempts:
            host = self._fleet.hosts.get(attempt.worker.num)
            if host is not None:
                self._fleet.give(host, old, attempt.mask)
                self._fleet.take(host, new, attempt.mask)
        rate_milli = self._order.rates.of(new)
        written = 0 if rate_milli == GPU_MILLI * new.count else rate_milli
        draft.add(acts.Resize(job.num, *part, written, by, asked.why))
        job.shape = new
        return Resized(*part, draft.time_ms, counts)

    def _fixed(
        self, job: Job, attempts: list[Attempt], before: tuple[int, int], part: tuple[int, int]
    ) -> Problem | None:
        """Return a refusal if a worker cannot change the share of an attempt that it has, or is not connected."""
        for attempt in attempts:
            if attempt.phase == AT_EXITED:
                continue
            name = attempt.worker.id
            if attempt.worker.num not in self._fleet.hosts:
                return _refused(
                    job,
                    f"worker {name} is not connected, so it is not known what room its GPUs have",
                    name,
                    "connected workers",
                    "resize it again when moorage fleet shows that worker as up",
                )
            if not takes_parts(attempt):
                why = f"worker {name} is of a release that cannot change the part of a running attempt"
                return _refused(job, why, name, "workers of release 0.3", _WHILE_IT_WAITS)
            driver = self._reader.request_of(job).workload.driver
            memory = mode_enforced(attempt.worker.inventory.capabilities, driver, MODE_NAMES[attempt.mode]).memory
            by_mps = memory_and_compute(takes_parts(attempt))[0] == NEXT_ATTEMPT
            fixed = by_mps or level_number(memory) == level_number("hard")
            if fixed and part[0] != before[0]:
                message = f"MPS sets the memory of an attempt on {name} when the attempt starts"
                return _refused(job, message, f"{part[0]} MiB", f"{before[0]} MiB while it runs", _WHILE_IT_WAITS)
        return None

    def _too_large(self, job: Job, attempts: list[Attempt], old: Shape, new: Shape) -> Problem | None:
        """Return a refusal if the new share does not fit beside the other sharers. A smaller share always fits."""
        count: dict[tuple[int, int], int] = {}
        for attempt in attempts:
            for slot in slots_of(attempt.mask):
                count[attempt.worker.num, slot] = count.get((attempt.worker.num, slot), 0) + 1
        for (num, slot), times in count.items():
            host = self._fleet.hosts.get(num)
            device = host.shared.get(slot) if host is not None else None
            if host is None or device is None:
                continue  # its worker is gone; what it held is not yet reported free
            memory_mib = host.cls.devices[slot][3]
            where = f"GPU {host.cls.devices[slot][0]} of {host.worker.id}"
            percent = (100 - device.percent) // times + old.compute_percent
            if new.compute_percent > max(old.compute_percent, percent):
                found, room = f"{new.compute_percent} %", f"at most {max(0, percent)} %"
                return _refused(job, f"{where} has not that much compute free", found, room, _SMALLER)
            mib = (memory_mib - device.memory_mib) // times + old.share_mib
            if new.share_mib > max(old.share_mib, mib):
                room = f"at most {max(0, mib)} MiB"
                return _refused(job, f"{where} has not that much memory free", f"{new.share_mib} MiB", room, _SMALLER)
        return None

    def _counts(self, job: Job, attempts: list[Attempt], asked: ResizeAct) -> dict[str, int]:
        """Return how many attempts take the new share, by the way in which they do: two words for memory and compute
        if both were asked for and differ.

        One that started without a share has no limiter, so its new share is only counted.
        """
        gpu = self._reader.requests.read(job.body)[1].request.effective_gpu
        first = 0 if gpu and gpu.share else job.resizes[0].seq if job.resizes else self._state.seq + 1
        found: dict[str, int] = {}
        for attempt in attempts:
            if attempt.phase == AT_EXITED:
                continue
            pool = attempt.worker.inventory.gpu_pool
            words = memory_and_compute(takes_parts(attempt))
            parts = (asked.memory_mib, asked.compute_percent)
            own = [word for word, part in zip(words, parts, strict=True) if part is not None]
            if attempt.fence <= first or any(pool[slot].vendor != "nvidia" for slot in slots_of(attempt.mask)):
                own = [COUNTED if word == LIVE else word for word in own]
            how = " ".join(dict.fromkeys(own))
            found[how] = found.get(how, 0) + 1
        return found


def resized_of(job: Job) -> Resized:
    """Return the share that an operator gave a job, which must have one; only the operator's answer has attempts."""
    row = job.resizes[-1]
    return Resized(row.memory_mib, row.compute_percent, row.since_ms)


def _refused(job: Job, why: str, found: object, allowed: str, next_step: str) -> Problem:
    return problem(
        "failed-precondition",
        f"job {job.name} cannot be resized: {why}",
        found=found,
        allowed=allowed,
        job=job.name,
        next=next_step,
    )
