"""A job's story on its way into the history stream; `told_story` is the way back. Pure: no I/O.

Rows go into a frame as the ledger state holds them, numbers and all, with one table a frame that says what the numbers
mean: that costs a tenth of writing every transition out.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moorage.scheduler.core.effects.outputs import CHANGES_SURE, gpu_names, slots_of
from moorage.scheduler.core.state import REV, SLOTS, STORY_WORDS, WORKER, Job, State, Transition
from moorage.schemas.codec import decode_request, is_json
from moorage.schemas.frames import VERSION, HistoryWorker
from moorage.schemas.job import STATES

#: of one frame, the table of its workers included; at least one story goes in whatever its size
PACKED_BYTES_MAX: Final = 700 * 1024
#: of one story; a longer one is written in parts
STORY_BYTES_MAX: Final = 300 * 1024
#: a longer request is left out of the history: the ledger has it as long as the job is held
REQUEST_BYTES_MAX: Final = 2048

#: in the table, beside the uuids
_WORKER_BYTES: Final = 110
_GPU_BYTES: Final = 8

_encode: Final = msgspec.json.Encoder().encode
_HEAD_STATES: Final = _encode(list(STORY_WORDS))


def unwritten(job: Job) -> list[Transition]:
    """Return the transitions in memory that stand in no part of its history."""
    story = job.story
    if not job.parts or not story:
        return story
    return story[max(0, job.parts[-1][2] - story[0][REV] + 1) :]


#: what a frame holds of a job: the first and the last revision, and whether its story ends there
Packed = tuple[Job, int, int, bool]


class Packing:
    """One frame while it is filled."""

    def __init__(self, state: State, tenant: str) -> None:
        self._state = state
        self._tenant = tenant
        self._rows: list[bytes] = []
        self._slots: dict[int, int] = {}  # worker number -> slots that some story names
        self._gpu_bytes: dict[int, int] = {}  # worker number -> the longest of its devices' entries
        self._bytes = 0
        self.packed: list[Packed] = []

    def add(self, job: Job, *, with_request: bool) -> bool:
        """Put in what is not written of a job's story; False when the frame has no room for it."""
        moves, over = unwritten(job), job.over
        request = _request(job) if over and with_request else None
        while True:
            name = (job.name, job.rev, job.state, over, job.accepted_ms, job.ledger)
            used = () if job.used is None else (job.used,)
            row = _encode((*name, job.parts, moves, request, *used) if over else (*name, (), moves))
            fresh = self._fresh(moves)
            size = len(row)
            if fresh:
                size += sum(map(self._cost, fresh, fresh.values()))
            if size <= STORY_BYTES_MAX or len(moves) <= 1:
                break
            over, request = False, None
            moves = moves[: len(moves) // 2]
        if not self._put(row, size, fresh):
            return False
        first, last = (moves[0][REV], moves[-1][REV]) if moves else (job.rev, job.rev)
        self.packed.append((job, first, last, over))
        return True

    def add_plain(self, jobs: list[Job], *, with_request: bool) -> list[Job]:
        """Put in the stories that are plain, as nearly all are: over, of one replica, of one attempt or none, and never
        so long that they have to go in parts.

        Returns those that are left for `add`: the others, or all where the frame may have no room for the plain ones.
        """
        rows: list[tuple[object, ...]] = []
        fresh: dict[int, int] = {}
        packed: list[Packed] = []
        left: list[Job] = []
        for job in jobs:
            story, replica = job.story, job.replicas[0]
            is_long = job.parts or len(job.replicas) > 1 or not 0 < len(story) <= CHANGES_SURE
            if not job.over or is_long or job.used is not None:
                left.append(job)
                continue
            first = story[0]
            num, attempt = first[WORKER], replica.attempt
            if num >= 0 and attempt == 1:  # of one worker and its slots
                fresh[num] = fresh.get(num, 0) | first[SLOTS]
            elif attempt:
                left.append(job)
                continue
            request = _request(job) if with_request else None
            rows.append(
                (job.name, job.rev, STATES[replica.state], True, job.accepted_ms, job.ledger, (), story, request)
            )
            packed.append((job, first[REV], story[-1][REV], True))
        if not rows:
            return left
        slots = self._slots
        fresh = {num: mask for num, mask in fresh.items() if num not in slots or mask & ~slots[num]}
        text = _encode(rows)
        size = len(text) + sum(map(self._cost, fresh, fresh.values()))
        if self._bytes + size > PACKED_BYTES_MAX:
            return jobs
        self._put(text[1:-1], size, fresh)
        self.packed += packed
        return left

    def _put(self, row: bytes, size: int, fresh: dict[int, int]) -> bool:
        if self._rows and self._bytes + size > PACKED_BYTES_MAX:
            return False
        self._bytes += size
        for num, mask in fresh.items():
            self._slots[num] = self._slots.get(num, 0) | mask
        self._rows.append(row)
        return True

    def _fresh(self, moves: list[Transition]) -> dict[int, int]:
        """Worker numbers and slots that the frame's table does not name yet."""
        slots, seen, held = self._slots, -1, -1
        fresh: dict[int, int] = {}
        for move in moves:
            worker, mask = move[WORKER], move[SLOTS]
            if worker != seen or mask != held:  # an attempt's transitions name the same
                seen, held = worker, mask
                if worker >= 0 and (worker not in slots or mask & ~slots[worker]):
                    fresh[worker] = fresh.get(worker, 0) | mask
        return fresh

    def _cost(self, num: int, mask: int) -> int:
        """At most so many bytes of the table."""
        each = self._gpu_bytes.get(num)
        if each is None:
            pool = self._state.worker_by_num[num].hello.get("gpu_pool", ())
            each = self._gpu_bytes[num] = _GPU_BYTES + max([len(device["uuid"]) for device in pool], default=0)
        return _WORKER_BYTES + each * mask.bit_count()

    def frame(self) -> bytes:
        """Return the frame as JSON, a `HistoryFrame`."""
        workers = {num: _worker(self._state, num, mask) for num, mask in self._slots.items()}
        return b"".join(
            (
                b'{"kind":"history","v":%d,"tenant":' % VERSION,
                _encode(self._tenant),
                b',"states":',
                _HEAD_STATES,
                b',"workers":',
                _encode(workers),
                b',"jobs":[',
                b",".join(self._rows),
                b"]}",
            )
        )


def _worker(state: State, num: int, mask: int) -> HistoryWorker:
    worker = state.worker_by_num[num]
    slots = slots_of(mask)
    gpus = dict(zip(slots, gpu_names(worker, mask), strict=False))
    return HistoryWorker(worker.id, gpus, bool(worker.hello.get("simulated", False)))


def _request(job: Job) -> msgspec.Raw | None:
    """Return the request as JSON, where it is short."""
    body = job.body
    if len(body) > REQUEST_BYTES_MAX:
        return None
    return msgspec.Raw(body if is_json(body) else _encode(decode_request(body)))
