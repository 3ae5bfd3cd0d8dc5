"""Saves: the ledger's state at a record, with what the follower has counted up to it; two are kept.

A save is written in chunks, then the record of its name. Each message names the stream's last sequence, so that of two
followers, as after a takeover, one writes, and the other drops all and reads what the first wrote. A crash at any point
leaves chunks that nothing names; the save after the next one deletes them.
"""

from __future__ import annotations

import logging
import zlib
from typing import Any, Final, NamedTuple

import msgspec

from moorage.bus.jetstream import COPIES_FOLLOW, EXPECTED_LAST_SEQUENCE, Ack, JetStream
from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.follower.fleet_past import FleetPast
from moorage.scheduler.follower.operators_acts import OperatorsActs
from moorage.scheduler.follower.series import AllSeries
from moorage.scheduler.follower.usage import Usage
from moorage.scheduler.follower.waits import Waits
from moorage.scheduler.history.packing import Parts
from moorage.scheduler.ledger.evidence import Placements
from moorage.scheduler.ledger.state_bytes import BadSnapshot, dump, load, snapshot_digest
from moorage.schemas.subjects import Subjects
from moorage.schemas.unreadable import UNREADABLE

log = logging.getLogger("moorage.follower")

CHUNK_BYTES: Final = 512 * 1024


class Overtaken(Exception):
    """Another follower has written to the stream."""


class Written(msgspec.Struct, array_like=True):
    """What the history had when a save was made: its last sequence; and of jobs in memory, by number, the parts of
    their histories and the sequence of their end."""

    last: int = 0
    jobs: list[tuple[int, Parts, int]] = []


class Save(msgspec.Struct, frozen=True, array_like=True):
    """Where a save is in the stream, and the ledger's sequence that it ends at."""

    first: int  # sequences of its first and last chunk
    last: int
    digest: str
    seq: int


class _Named(msgspec.Struct, array_like=True):
    newest: Save
    before: Save | None


class _Body(msgspec.Struct, array_like=True):
    state: bytes
    usage: bytes
    history: Written
    acts: bytes = b""
    waits: bytes = b""
    series: bytes = b""
    past: bytes = b""
    placed: bytes = b""


class Saved(NamedTuple):
    """What a save has: the state, what was counted up to it, what of its jobs was written to the history, the
    newest orders of operators, where waits went, numbers over time, events of the fleet, and why jobs were placed."""

    state: State
    usage: Usage
    history: Written
    acts: OperatorsActs
    waits: Waits
    series: AllSeries
    past: FleetPast
    placed: Placements


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Body).decode
_decode_named: Final = msgspec.msgpack.Decoder(_Named).decode


class Saves:
    """The stream of saves, as one follower reads and writes it."""

    def __init__(
        self, jetstream: JetStream, subjects: Subjects, replicas: int = 1, ceilings: Ceilings = CEILINGS
    ) -> None:
        self._ceilings = ceilings
        self._js = jetstream
        self._subjects = subjects
        self._replicas = replicas
        self._last = 0  # the stream's last sequence
        self._named: _Named | None = None

    @property
    def kept_from(self) -> int:
        """The ledger's sequence behind which all records are needed, as the older save ends there; 0: all are."""
        return self._named.before.seq if self._named is not None and self._named.before is not None else 0

    async def open(self) -> None:
        """Create the stream, or check it, and read which saves it names. Raises `BusError`."""
        config: dict[str, Any] = {
            "name": self._subjects.follower_stream,
            "subjects": [self._subjects.follower_all],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "allow_direct": True,
            "num_replicas": self._replicas,
        }
        self._last = (await self._js.ensure_stream(config, COPIES_FOLLOW)).last_seq
        self._named = None
        message = await self._js.get_last(self._subjects.follower_stream, self._subjects.follower_saved)
        if message is not None:
            try:
                self._named = _decode_named(message.data)
            except UNREADABLE:
                log.warning("the name of the follower's last save cannot be read: it begins anew")

    async def read(self) -> Saved | None:
        """Return the newest save that can be read; None if there is none. Raises `BusError`."""
        for save in (self._named.newest, self._named.before) if self._named is not None else ():
            if save is None:
                continue
            found = self._js.read_range(
                self._subjects.follower_stream, self._subjects.follower_chunk, save.first, to_seq=save.last
            )
            data = b"".join([message.data async for message in found])
            if snapshot_digest(data) != save.digest:
                log.warning("the follower's save of record %d has %d other bytes", save.seq, len(data))
                continue
            try:
                body = _decode(data)
                state = load(body.state, self._ceilings)
                usage, acts = Usage.load(body.usage, state), OperatorsActs.load(body.acts)
                waits, series = Waits.load(body.waits, state), AllSeries.load(body.series, state)
                past, placed = FleetPast.load(body.past), Placements.load(body.placed)
                return Saved(state, usage, body.history, acts, waits, series, past, placed)
            except (BadSnapshot, *UNREADABLE, LookupError, TypeError, zlib.error) as error:
                log.warning("the follower's save of record %d cannot be read: %r", save.seq, error)
        return None

    async def write(self, saved: Saved) -> None:
        """Write a save and delete those older than the one before. Raises `Overtaken`, `BusError`."""
        state, seq = saved.state, saved.state.seq
        tables = (saved.acts, saved.waits, saved.series, saved.past, saved.placed)
        data = _encode(_Body(dump(state), saved.usage.dump(), saved.history, *(table.dump() for table in tables)))
        first = self._last + 1
        for start in range(0, len(data), CHUNK_BYTES):
            await self._append(self._subjects.follower_chunk, data[start : start + CHUNK_BYTES])
        save = Save(first, self._last, snapshot_digest(data), seq)
        named = _Named(save, self._named.newest if self._named is not None else None)
        await self._append(self._subjects.follower_saved, _encode(named))
        self._named = named
        oldest = first if named.before is None else named.before.first
        await self._js.purge(self._subjects.follower_stream, below_seq=oldest)

    async def _append(self, subject: str, payload: bytes) -> None:
        answer = await self._js.append(subject, payload, {EXPECTED_LAST_SEQUENCE: str(self._last)})
        if not isinstance(answer, Ack):
            raise Overtaken(f"the follower's save was not stored: {answer}")
        self._last = answer.seq
