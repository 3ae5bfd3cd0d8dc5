"""Unpacks jobs' histories from the history stream, see `packing`. Pure: no I/O."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

import msgspec

from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger import bits
from moorage.scheduler.core.ledger.records import start_of
from moorage.scheduler.core.ledger.state import PLACED, RANGE, RUNNING, code_of
from moorage.scheduler.history.packing import Parts, blocks_of
from moorage.schemas.codec import Decoder
from moorage.schemas.frames import Change, HistoryWorker, Moved
from moorage.schemas.job import STATE_NUMBER, STATES
from moorage.schemas.ranges import Ranges
from moorage.schemas.waited import WaitedPart


class Found(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One history of a frame; moves and request stay undecoded, as most histories of a frame are not asked for."""

    job: str
    rev: int
    state: str
    over: bool
    accepted_ms: int
    ledger: int
    parts: Parts
    moves: msgspec.Raw
    request: msgspec.Raw = msgspec.Raw(b"null")
    used: tuple[int, int] | None = None
    revs: tuple[int, int] | None = None
    ended: dict[int, bytes] | None = None
    peaks: tuple[int, int, int, int] | None = None
    waited: list[WaitedPart] = []
    reported: tuple[int, str] | None = None


class Frame(msgspec.Struct, frozen=True, tag_field="kind", tag="history"):
    """A `HistoryFrame`, decoded only as far as needed to find a history."""

    tenant: str
    states: list[str]
    workers: dict[int, HistoryWorker]
    jobs: list[Found]


read_frame: Final = Decoder[Frame](Frame)
_read_moves: Final = msgspec.json.Decoder(list[Moved]).decode


def devices_at(worker: HistoryWorker, fence: int) -> tuple[dict[int, str], bool]:
    """Return the uuids of the devices of an attempt with this fence, by slot, and whether they are simulated."""
    for until, gpus, simulated in worker.former:
        if fence < until:
            return gpus, simulated
    return worker.gpus, worker.simulated


def moves_in(found: Found) -> list[Moved]:
    """Return the transitions of a history, as its frame has them."""
    return _read_moves(found.moves)


def range_in(found: Found) -> tuple[int, int, list[int]]:
    """Return the first and last revision of a history in a frame (without rows, its own), and its blocks."""
    moves = _read_moves(found.moves)
    first, last = found.revs or ((moves[0].rev, moves[-1].rev) if moves else (found.rev, found.rev))
    ranges = [(move.replica, move.slots if move.worker == RANGE else move.replica) for move in moves]
    return first, last, blocks_of(ranges)


def unsuccessful(frame: Frame, found: Found) -> dict[str, Ranges]:
    """Return, by state, which replicas of a job of several ended without success, from the last part of its history."""
    return {
        frame.states[state]: bits.ranges(bytearray(zlib.decompress(each)))
        for state, each in (found.ended or {}).items()
    }


def is_simulated(frame: Frame, change: Change) -> bool:
    """Return whether a transition was on simulated devices."""
    return any(
        devices_at(worker, change.fence)[1] for worker in frame.workers.values() if worker.worker == change.worker
    )


def changes_in(frame: Frame, found: Found) -> Iterator[Change]:
    """Yield the transitions of a history as `show` has them, without ACCEPTED."""
    states, workers = frame.states, frame.workers
    for move in _read_moves(found.moves):
        state = states[move.state]
        by, _, said = move.by.partition(" ")
        worker = workers.get(move.worker)
        if worker is None:
            name = move.rev, move.time_ms, move.replica, move.attempt, state
            through = move.slots if move.worker == RANGE else None
            yield Change(*name, code=move.code or None, why=move.why, by=by, said=said, through=through)
            continue
        placed = state == STATES[PLACED]
        names, _ = devices_at(worker, move.fence)
        gpus = [names[slot] for slot in slots_of(move.slots) if slot in names] if placed else []
        code = code_of(STATE_NUMBER.get(state), move.code)
        address, why = start_of(move.why) if state == STATES[RUNNING] else ("", move.why)
        yield Change(
            move.rev, move.time_ms, move.replica, move.attempt, state, worker.worker, gpus, code,
            why, move.fence, by, said, move.result, address=address,
        )  # fmt: skip


def changes_of(changes: list[Change], index: int) -> list[Change]:
    """Return those of these transitions that are of a replica, alone or among others."""
    return [change for change in changes if change.replica <= index <= (change.through or change.replica)]
