"""Packs jobs' histories for the history stream; `unpacking` unpacks them. Pure: no I/O.

Rows are written as in the ledger's state, with numbers, and each frame has one table of what the numbers mean: that
takes a tenth of the cost of writing out every transition.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger.state import (
    HISTORY_WORDS,
    RANGE,
    REPLICA,
    REV,
    SLOTS,
    WORKER,
    Job,
    State,
    Transition,
)
from moorage.scheduler.core.outputs.outputs import is_end
from moorage.scheduler.core.request_reader import asked_now
from moorage.schemas.codec import is_json
from moorage.schemas.frames import VERSION, Device, HistoryWorker
from moorage.schemas.waited import WaitedPart

#: of one frame, including the table of its workers; one history always goes in, whatever its size
PACKED_BYTES_MAX: Final = 700 * 1024
#: a longer history is written in parts
HISTORY_BYTES_MAX: Final = 300 * 1024
#: a longer request is left out of the history; the ledger has it as long as the job is in memory. That of several
#: replicas is always written: they are run again by it
REQUEST_BYTES_MAX: Final = 2048

#: bytes of an entry in the table, besides the uuids
_WORKER_BYTES: Final = 110
_GPU_BYTES: Final = 8

_encode: Final = msgspec.json.Encoder().encode
_HEAD_STATES: Final = _encode(list(HISTORY_WORDS))


#: replicas are indexed in blocks of this many numbers: each part of a history lists the blocks that it mentions, so
#: that a reader skips the other parts
BLOCK: Final = 1_024
#: frames with earlier parts of a job's history: sequence, first and last revision, and blocks of replicas
Parts = list[tuple[int, int, int, list[int]]]


def unwritten(job: Job, parts: Parts) -> list[Transition]:
    """Return the transitions in memory that no part in the history contains."""
    history = job.history
    if not parts or not history:
        return history
    return history[max(0, parts[-1][2] - history[0][REV] + 1) :]


class Packed(NamedTuple):
    """What a frame contains of a job: first and last revision, blocks of replicas, whether it is the history's end."""

    job: Job
    first: int
    last: int
    blocks: list[int]
    over: bool


def blocks_of(told: Iterable[tuple[int, int]]) -> list[int]:
    """Return the blocks that transitions tell of, in order; each is of the replicas from a first to a last one."""
    blocks: set[int] = set()
    for first, last in told:
        if first >= 0:
            blocks.update(range(first // BLOCK, last // BLOCK + 1))
    return sorted(blocks)


def _replicas(row: Transition) -> tuple[int, int]:
    """Return the first and last replica of a transition."""
    return row[REPLICA], row[SLOTS] if row[WORKER] == RANGE else row[REPLICA]


class Packing:
    """One frame that is being filled."""

    def __init__(self, state: State, tenant: str, gap: tuple[int, int, int, int] | None = None) -> None:
        """`gap` is what the frame tells of records that nobody read, see `HistoryFrame`."""
        self._state = state
        self._gap = gap
        self._tenant = tenant
        self._rows: list[bytes] = []
        self._slots: dict[int, int] = {}  # worker number -> slots named by histories
        self._gpu_bytes: dict[int, int] = {}  # worker number -> the longest of its devices' table entries
        self._bytes = 0
        self.packed: list[Packed] = []

    def add(self, job: Job, parts: Parts, *, with_request: bool, waited: list[WaitedPart] | None = None) -> bool:
        """Add the unwritten part of a job's history; return False if the frame has no room for it.

        Of a job with very many replicas, these are the ends of attempts, and the acts on the job. `waited` is where
        its waits went, once it is over. Of a part above `HISTORY_BYTES_MAX` only the first transitions are added,
        without the end; see `packed`.
        """
        moves, over = unwritten(job, parts), job.over
        request = _request(job) if over and (with_request or not job.is_listed) else None
        told_last: tuple[object, ...] = (job.peaks, waited or [], job.reported)
        while told_last and not told_last[-1]:
            told_last = told_last[:-1]
        while True:
            name = (job.name, job.rev, job.state, over, job.accepted_ms, job.ledger)
            first, last = (moves[0][REV], moves[-1][REV]) if moves else (job.rev, job.rev)
            told = moves
            if not job.is_listed:  # the rows do not say which revisions they tell of
                told = list(filter(is_end, moves))
                ended = (_ended(job), *told_last) if over else ()
                row = _encode((*name, parts if over else (), told, request, job.used, (first, last), *ended))
            elif over and ((job.bad and job.size > 1) or told_last):
                unwell = _ended(job) if job.bad and job.size > 1 else None
                row = _encode((*name, parts, told, request, job.used, None, unwell, *told_last))
            else:
                used = () if job.used is None else (job.used,)
                row = _encode((*name, parts, told, request, *used) if over else (*name, (), told))
            fresh = self._fresh(told)
            size = len(row)
            if fresh:
                size += sum(map(self._cost, fresh, fresh.values()))
            if size <= HISTORY_BYTES_MAX or len(moves) <= 1:
                break
            over, request = False, None
            moves = moves[: len(moves) // 2]
        if not self._put(row, size, fresh):
            return False
        self.packed.append(Packed(job, first, last, blocks_of(map(_replicas, told)), over))
        return True

    def _put(self, row: bytes, size: int, fresh: dict[int, int]) -> bool:
        if self._rows and self._bytes + size > PACKED_BYTES_MAX:
            return False
        self._bytes += size
        for num, mask in fresh.items():
            self._slots[num] = self._slots.get(num, 0) | mask
        self._rows.append(row)
        return True

    def _fresh(self, moves: list[Transition]) -> dict[int, int]:
        """Return the worker numbers and slots that the frame's table does not contain yet."""
        slots, seen, held = self._slots, -1, -1
        fresh: dict[int, int] = {}
        for move in moves:
            worker, mask = move[WORKER], move[SLOTS]
            if worker != seen or mask != held:  # most transitions of an attempt name the same
                seen, held = worker, mask
                if worker >= 0 and (worker not in slots or mask & ~slots[worker]):
                    fresh[worker] = fresh.get(worker, 0) | mask
        return fresh

    def _cost(self, num: int, mask: int) -> int:
        """Return the most bytes that these slots add to the table."""
        worker, each = self._state.worker_by_num.get(num), self._gpu_bytes.get(num)
        if worker is None:
            return _WORKER_BYTES
        if each is None:
            pools = [worker.inventory.gpu_pool, *(pool.devices for pool in worker.former)]
            longest = max([len(device.uuid) for pool in pools for device in pool], default=0)
            each = self._gpu_bytes[num] = len(pools) * (_GPU_BYTES + longest)
        return _WORKER_BYTES * (1 + len(worker.former)) + each * mask.bit_count()

    def frame(self) -> bytes:
        """Return the frame as JSON, a `HistoryFrame`."""
        workers = {num: _worker(self._state, num, mask) for num, mask in self._slots.items()}
        return b"".join(
            (
                b'{"kind":"history","v":%d,"ledger":%d,"gap":%b,"tenant":'
                % (VERSION, self._state.seq, _encode(self._gap)),
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
    worker = state.worker_by_num.get(num)
    if worker is None:  # it was forgotten since
        return HistoryWorker("")
    former = [(pool.until, _uuids(pool.devices, mask), pool.simulated) for pool in worker.former]
    has = worker.inventory
    return HistoryWorker(worker.id, _uuids(has.gpu_pool, mask), has.simulated, former)


def _uuids(pool: list[Device], mask: int) -> dict[int, str]:
    return {slot: pool[slot].uuid for slot in slots_of(mask) if slot < len(pool)}


def _ended(job: Job) -> dict[int, bytes]:
    """Return which replicas ended without success, by state, as `unpacking.unsuccessful` reads it."""
    return {state: zlib.compress(each) for state, each in (job.bad or {}).items()}


def _request(job: Job) -> msgspec.Raw | None:
    """Return the request as JSON, as it was last changed, if it is short or of several replicas; else None."""
    body = job.body
    if len(body) > REQUEST_BYTES_MAX and job.size == 1:
        return None
    is_as_sent = is_json(body) and not job.bounds and job.priority < 0
    return msgspec.Raw(body if is_as_sent else _encode(asked_now(job)))
