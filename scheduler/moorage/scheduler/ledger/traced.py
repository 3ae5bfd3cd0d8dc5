"""Reads a ledger for who writes a trace of it: from the oldest record that can be folded, or from a moment on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.ledger.ledger import Ledger, LedgerGap
from moorage.scheduler.ledger.snapshots import Snapshots, recover
from moorage.scheduler.ledger.state_bytes import dump, load
from moorage.schemas.subjects import Subjects


class Reader(Protocol):
    """Who reads the records, each after it was folded."""

    def follow(self, record: Record, folded: Folded) -> None: ...


R = TypeVar("R", bound=Reader)


async def read_trace(target: str | None, prefix: str, make: Callable[[State], R], since_ms: int | None) -> R:
    """Return what `make` returns for the state at which the trace begins, once it has read all records behind.

    With `since_ms` the trace begins so long before the last record; without it, or if less is there, with the first
    record if it is still there, else with the older of the two snapshots. Raises `LedgerBroken`, `BusError`.
    """
    subjects = Subjects(prefix)
    async with await connect(target, "moorage-trace") as connection:
        jetstream = JetStream(connection)
        ledger = Ledger(jetstream, subjects, 0, replicas=1)
        last = await ledger.last_seq()
        try:
            return await _read(ledger, State(), last, make, since_ms)
        except LedgerGap:
            state = await recover(ledger, Snapshots(jetstream, subjects, 1), oldest=True)
            return await _read(ledger, state, last, make, since_ms)


async def _read(ledger: Ledger, state: State, last: int, make: Callable[[State], R], since_ms: int | None) -> R:
    """Fold the records behind `state`, and let a reader follow them from the first on, or from the moment on."""
    cut_ms = 0
    if since_ms is not None:
        ends = load(dump(state)) if state.seq else State()
        await _fold(ledger, ends, last)
        cut_ms = ends.time_ms - since_ms
    reader: R | None = make(state) if state.seq and not cut_ms else None
    async for _, record, folded in ledger.fold_range(state, last):
        if reader is not None:
            reader.follow(record, folded)
        elif state.time_ms >= cut_ms:  # the first record of a ledger names it, and no more
            reader = make(state)
    return reader if reader is not None else make(state)


async def _fold(ledger: Ledger, state: State, last: int) -> None:
    async for _ in ledger.fold_range(state, last):
        pass
