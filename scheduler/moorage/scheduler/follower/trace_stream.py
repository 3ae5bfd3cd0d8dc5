"""The stream of traces, of a ledger that is not kept that long: the follower appends what each record tells a trace.

The stream is there if an operator made it (`moorage admin trace --keep`), and is bounded: its oldest messages go. So a
base, from which a trace can begin, comes each day. Each message names the stream's last sequence, so of two followers
one writes. A follower that reads records again, behind its save, leaves out what is in the stream.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import msgspec

from moorage.bus.jetstream import EXPECTED_LAST_SEQUENCE, Ack, JetStream
from moorage.bus.jetstream_answers import JsError
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.durable.queue_streams import info_of
from moorage.scheduler.follower.saves import Overtaken
from moorage.scheduler.ledger.trace_events import Batch, Event, TraceEvents
from moorage.schemas.subjects import Subjects
from moorage.schemas.unreadable import UNREADABLE

log = logging.getLogger("moorage.follower")

#: how often it is looked whether there is a stream, while there is none
LOOK_EVERY_S: Final = 10.0
#: ledger time between two bases
BASE_EVERY_MS: Final = 86_400_000
#: events of one message; each is some 100 bytes, that of a host up to 10 KB
EVENTS_MAX: Final = 1_000
#: bytes of one message
BYTES_MAX: Final = 512 * 1024
#: what the server answers where the last sequence is another one
ERR_WRONG_LAST: Final = frozenset((10071, 10164))

encode: Final = msgspec.json.Encoder().encode
decode: Final = msgspec.json.Decoder(Batch).decode


class TraceStream:
    """Appends to the stream of traces, if there is one. `begin` comes first, and `fold` with each record."""

    def __init__(self, jetstream: JetStream, subjects: Subjects) -> None:
        self._js = jetstream
        self._subjects = subjects
        self._state = State()
        self._events: TraceEvents | None = None  # None: there is no stream
        self._last = 0  # the stream's last sequence
        self._through = 0  # the last record whose events are in the stream
        self._base_ms = 0  # time of the newest base; 0: none
        self._is_cut = False  # records behind those in the stream were not read, or are not read again
        self._rows: list[tuple[int, list[Event]]] = []
        self._count = 0
        self._looked_s = 0.0

    async def begin(self, state: State) -> None:
        """Go on with the records behind `state`, which the caller folds. Raises `BusError`."""
        self._state, self._looked_s = state, 0.0
        self._stop()
        await self._look()

    def _stop(self) -> None:
        self._events, self._rows, self._count = None, [], 0

    async def _look(self) -> None:
        """Look now and then for a stream, while there is none."""
        if self._looked_s and time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        info = await info_of(self._js, self._subjects.trace_stream)
        if info is None:
            return
        self._last, self._through, self._base_ms = info.last_seq, 0, 0
        message = await self._js.get_last(self._subjects.trace_stream, self._subjects.trace_events)
        if message is not None:
            try:
                told = decode(message.data)
            except UNREADABLE:
                log.warning("the last message of the stream of traces cannot be read: a gap, and a new base")
            else:
                if told.ledger == self._state.ledger_id:
                    self._through, self._base_ms = told.after if told.more else told.through, told.base_ms
        self._is_cut = self._through < self._state.seq
        self._events = TraceEvents(self._state)

    def fold(self, seq: int, record: Record, folded: Folded) -> bool:
        """Take a record that has just been folded; return whether it is time to write."""
        if self._events is None:
            return False
        events = self._events.follow(record, folded)
        if events and seq > self._through:
            self._rows.append((self._state.time_ms, events))
            self._count += len(events)
        return self._count >= EVENTS_MAX

    async def write(self, *, mark: bool = False) -> None:
        """Append the events of the records up to now; with `mark` also if there are none, as before a save.

        Raises `Overtaken`, `BusError`.
        """
        if self._events is None:
            await self._look()
        state = self._state
        if self._events is None or not state.ledger_id or state.seq < self._through:
            return
        due = self._is_cut or not self._base_ms or state.time_ms - self._base_ms >= BASE_EVERY_MS
        if not self._is_cut and (self._rows or ((mark or due) and state.seq > self._through)):
            batch = Batch(state.ledger_id, self._through, state.seq, state.time_ms, self._rows)
            await self._append(batch)
        self._rows, self._count = [], 0
        if due and self._events is not None:
            await self._append(self._events.base())

    async def _append(self, batch: Batch) -> None:
        """Append a batch, in parts that fit into a message."""
        base_ms = batch.at_ms if batch.base else self._base_ms
        parts: list[list[tuple[int, list[Event]]]] = [[]]
        room = BYTES_MAX
        for at_ms, events in batch.rows:
            parts[-1].append((at_ms, []))
            for event in events:
                room -= len(encode(event)) + 1
                if room < 0:
                    parts.append([(at_ms, [])])
                    room = BYTES_MAX
                parts[-1][-1][1].append(event)
        for number, rows in enumerate(parts):
            more = number < len(parts) - 1
            part = msgspec.structs.replace(batch, rows=rows, part=number, more=more, base_ms=base_ms)
            fence = {EXPECTED_LAST_SEQUENCE: str(self._last)}
            answer = await self._js.append(self._subjects.trace_events, encode(part), fence)
            if not isinstance(answer, Ack):
                await self._refused(answer)
                return
            self._last = answer.seq
        self._through, self._base_ms, self._is_cut = batch.through, base_ms, False

    async def _refused(self, answer: JsError) -> None:
        """Stop where there is no stream any more, or no room for it. Raises `Overtaken`, `BusError`."""
        there = await info_of(self._js, self._subjects.trace_stream) is not None
        if there and (answer.nobody_listens or answer.err_code in ERR_WRONG_LAST):
            raise Overtaken(f"what the ledger tells a trace was not stored: {answer}")
        if there:
            log.warning("a gap in the stream of traces, as nothing is stored there: %s", answer.description)
        self._stop()
