"""Reads a ledger for who writes a trace of it: from the oldest record that can be folded, or from a moment on.

Where the ledger does not go back that far, the stream of traces comes first, if it is kept, and the ledger's records
behind what it has: each record counts once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from moorage.bus.connection import connect
from moorage.bus.jetstream import COPIES_FOLLOW, JetStream
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.durable.queue_streams import info_of
from moorage.scheduler.ledger.ledger import Ledger, LedgerGap
from moorage.scheduler.ledger.snapshots import Snapshots, recover
from moorage.scheduler.ledger.state_bytes import dump, load
from moorage.scheduler.ledger.trace_events import Batch, TraceEvents
from moorage.schemas.subjects import Subjects

_decode: Final = msgspec.json.Decoder(Batch).decode


class Reader(Protocol):
    """Who takes the events of records, batch by batch."""

    def take(self, batch: Batch) -> None: ...


R = TypeVar("R", bound=Reader)


class Kept(NamedTuple):
    """What the stream of traces has without a gap: where a base begins in it, its time, the last record; whether
    there is a gap behind older ones."""

    first: int
    begin_ms: int
    through: int
    is_cut: bool


class Told(NamedTuple):
    """What is said of a trace besides itself: whether the stream of traces has a gap that it begins behind."""

    from_stream: bool = False
    is_cut: bool = False


async def read_trace(
    target: str | None, prefix: str, make: Callable[[Batch], R], since_ms: int | None
) -> tuple[R, Told]:
    """Return what `make` returns for the base with which the trace begins, once it has taken all records behind.

    With `since_ms` the trace begins so long before the last record, or with the newest base of the stream of traces
    before that; without it, or if less is there, with the first record if it is still there, else with the oldest base
    of the stream, else with the older of the two snapshots. Raises `LedgerBroken`, `BusError`.
    """
    subjects = Subjects(prefix)
    async with await connect(target, "moorage-trace") as connection:
        jetstream = JetStream(connection)
        ledger = Ledger(jetstream, subjects, 0, replicas=1)
        last = await ledger.last_seq()
        try:
            return await _read(ledger, State(), last, make, since_ms), Told()
        except LedgerGap:
            state = await recover(ledger, Snapshots(jetstream, subjects, 1), oldest=True)
        begin_ms = 0
        if since_ms is not None:
            begin_ms = await _end_ms(ledger, state, last) - since_ms
        kept = None
        if state.time_ms > begin_ms:
            kept = await _kept(jetstream, subjects, state.ledger_id, begin_ms)
        if kept is None or kept.begin_ms >= state.time_ms or kept.through < state.seq:
            return await _read(ledger, state, last, make, since_ms), Told(
                is_cut=kept is not None and (kept.is_cut or kept.through < state.seq)
            )
        reader: R | None = None
        async for _, batch in _numbered(jetstream, subjects, kept.first):
            if reader is None:
                reader = make(batch)
            elif batch.through <= kept.through:
                reader.take(batch)
        assert reader is not None
        async for batch in _of_ledger(ledger, state, last):
            if batch.through > kept.through:
                reader.take(batch)
        return reader, Told(from_stream=True, is_cut=kept.is_cut)


async def _read(ledger: Ledger, state: State, last: int, make: Callable[[Batch], R], since_ms: int | None) -> R:
    """Fold the records behind `state`, and let a reader take them from the first on, or from the moment on."""
    cut_ms = 0
    if since_ms is not None:
        cut_ms = await _end_ms(ledger, state, last) - since_ms
    reader: R | None = make(TraceEvents(state).base()) if state.seq and not cut_ms else None
    async for batch in _of_ledger(ledger, state, last):
        if reader is not None:
            reader.take(batch)
        elif state.time_ms >= cut_ms:  # the first record of a ledger names it, and no more
            reader = make(TraceEvents(state).base())
    return reader if reader is not None else make(TraceEvents(state).base())


async def _of_ledger(ledger: Ledger, state: State, last: int) -> AsyncIterator[Batch]:
    events = TraceEvents(state)
    async for seq, record, folded in ledger.fold_range(state, last):
        rows = [(state.time_ms, events.follow(record, folded))]
        yield Batch(state.ledger_id, seq - 1, seq, state.time_ms, rows)


async def _end_ms(ledger: Ledger, state: State, last: int) -> int:
    """Return the time of the last record."""
    ends = load(dump(state)) if state.seq else State()
    async for _ in ledger.fold_range(ends, last):
        pass
    return ends.time_ms


async def _numbered(jetstream: JetStream, subjects: Subjects, first: int) -> AsyncIterator[tuple[int, Batch]]:
    """Yield each batch with the sequence of its first message."""
    whole: Batch | None = None
    begun = 0
    async for message in jetstream.read_range(subjects.trace_stream, subjects.trace_events, first):
        batch = _decode(message.data)
        if batch.part == 0:
            whole, begun = batch, message.seq
        elif whole is not None and (whole.through, whole.part + 1) == (batch.through, batch.part):
            whole = msgspec.structs.replace(batch, rows=whole.rows + batch.rows)
        else:
            whole = None
        if whole is not None and not batch.more:
            yield begun, whole
            whole = None


async def _kept(jetstream: JetStream, subjects: Subjects, ledger_id: str, begin_ms: int) -> Kept | None:
    """Return where a trace from `begin_ms` on can begin in the stream of traces; None if there is none."""
    if await info_of(jetstream, subjects.trace_stream) is None:
        return None
    found: tuple[int, int] | None = None
    through, is_cut = 0, False
    async for seq, batch in _numbered(jetstream, subjects, 1):
        if batch.ledger != ledger_id or batch.after != through:
            is_cut = is_cut or found is not None
            found = None
        if batch.ledger != ledger_id:
            continue
        if batch.base and (found is None or batch.at_ms <= begin_ms):
            found = seq, batch.at_ms
        through = batch.through
    return Kept(*found, through, is_cut) if found is not None else None


async def keep(target: str | None, prefix: str, size: int) -> str:
    """Make the stream of traces with so many bytes, or change its size; with 0 bytes delete it. Return its name.

    It has as many copies as the ledger, which has to be there. Raises `BusError`.
    """
    subjects = Subjects(prefix)
    async with await connect(target, "moorage-trace") as connection:
        jetstream = JetStream(connection)
        if not size:
            if await info_of(jetstream, subjects.trace_stream) is not None:
                await jetstream.delete_stream(subjects.trace_stream)
            return subjects.trace_stream
        copies = (await jetstream.stream_info(subjects.ledger_stream)).replicas
        config: dict[str, Any] = {
            "name": subjects.trace_stream,
            "subjects": [subjects.trace_events],
            "storage": "file",
            "retention": "limits",
            "discard": "old",
            "max_bytes": size,
            "allow_direct": True,
            "num_replicas": copies,
        }
        await jetstream.ensure_stream(config, frozenset({"max_bytes", *COPIES_FOLLOW}))
        return subjects.trace_stream
