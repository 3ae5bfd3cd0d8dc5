"""The table of finished jobs, which makes repeated submits idempotent, in at most 40 bytes a row.

A row answers repeated submits for `Config.finished_keep`, and locates the job's history while that is kept, or until
there are `Config.finished_rows` rows: the leader decides in records which rows are dropped, and `ROWS_MAX` is the
table's own bound. Rows are stored in chunks by arrival; an open-addressed index of 32-bit entries finds the newest row
of a (tenant, job) by its hash. There is no Python object for each row, so two million rows take 80 MB and cost the
garbage collector nothing. The index consists of many segments that grow one by one, and chunks are never copied, so no
add causes a long pause.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable
from typing import Final

from moorage.scheduler.core.ledger.digests import number_of

ROWS_MAX: Final = 2_000_000

_ROW: Final = struct.Struct("<12s8sIBIB")  # key, request digest, end in s, state, history sequence in two pieces
ROW_BYTES: Final = _ROW.size
_SEQ: Final = struct.Struct("<IB")
_SEQ_AT: Final = ROW_BYTES - _SEQ.size
_LOW: Final = struct.Struct("<I")  # the first bytes of a key, which is first in its row
KEY_BYTES: Final = 12
DIGEST_BYTES: Final = 8
_SEQ_MAX: Final = 2**40 - 1
_EMPTY: Final = 0
_GROW_AT: Final = 0.66
_SEGMENTS: Final = 256
_SLOTS_FIRST: Final = 1024  # 1 MiB in all; no segment grows below 170,000 rows
_CHUNK_ROWS: Final = 4096
#: an index entry: 11 bits of the key, so that other rows are rarely read, and the row's number modulo `_NUMBERS`, plus
#: 1; 0 is empty
_NUMBER_BITS: Final = 21
_NUMBERS: Final = 2**_NUMBER_BITS - 1
#: where these 11 bits are in a key, read as a number; its lowest bits choose the slot, the last byte the segment
_MARK_AT: Final = 64
_MARK: Final = 0x7FF
_from_bytes: Final = int.from_bytes
_KEYS: Final = hashlib.blake2b(digest_size=KEY_BYTES)
_DIGESTS: Final = hashlib.blake2b(digest_size=DIGEST_BYTES)


def job_key(tenant: str, job: str) -> bytes:
    """Return BLAKE2b-96 of tenant and job: two of 2,000,000 rows collide with a probability below 1e-16."""
    hasher = _KEYS.copy()  # a third cheaper than a new one
    hasher.update(f"{tenant}/{job}".encode())
    return hasher.digest()


def request_digest(canonical: bytes) -> bytes:
    """Return BLAKE2b-64 of a request's canonical form; it is compared only for equal job ids."""
    hasher = _DIGESTS.copy()
    hasher.update(canonical)
    return hasher.digest()


class FinishedTable:
    """A first-in first-out table with look-up by key in constant time."""

    def __init__(self, rows_max: int = ROWS_MAX) -> None:
        self.rows_max = min(rows_max, _NUMBERS)
        self._chunks: list[bytearray] = []
        self._base = 0  # number of the first row of the first chunk
        self._first = 0  # number of the oldest row
        self._end = 0  # number of the next row
        self._segments = [array("I", bytes(4 * _SLOTS_FIRST)) for _ in range(_SEGMENTS)]
        self._filled = [0] * _SEGMENTS
        self.row = 0  # this table's part of the state digest

    def __len__(self) -> int:
        return self._end - self._first

    def find(self, key: bytes) -> tuple[bytes, int, int, int] | None:
        """Return (request digest, end in ledger s, state number, history sequence or 0) of a finished job, or None."""
        segment, bits = self._segments[key[-1]], _from_bytes(key, "little")
        slot = bits & len(segment) - 1
        if segment[slot] == _EMPTY:  # the usual case: the job is new
            return None
        entry = segment[self._probe(segment, slot, bits, key)]
        if entry == _EMPTY:
            return None
        _, digest, seconds, state, low, high = self._unpacked(self._number(entry))
        return digest, seconds, state, high << 32 | low

    def add(self, key: bytes, digest: bytes, time_ms: int, state: int) -> None:
        """Append a row; if the table is full, the oldest is dropped. An older row of the same key is no longer found.

        The first 8 bytes of the digest count.
        """
        self.add_all([(key, digest, time_ms, state)])

    def locate(self, key: bytes, seq: int) -> None:
        """Note that the message `seq` of the history stream has the end of a job's history.

        Does nothing without a row of the key. The ledger does not say it, so only a follower's table knows it.
        """
        segment, slot = self._look(key)
        if segment[slot] != _EMPTY and seq <= _SEQ_MAX:
            at = self._number(segment[slot]) - self._base
            start = at % _CHUNK_ROWS * ROW_BYTES + _SEQ_AT
            _SEQ.pack_into(self._chunks[at // _CHUNK_ROWS], start, seq & 0xFFFFFFFF, seq >> 32)

    def add_all(self, rows: Iterable[tuple[bytes, bytes, int, int] | tuple[bytes, bytes, int, int, int]]) -> None:
        """Add each of these rows (the arguments of `add`) in order; jobs leave memory by the hundred."""
        segments, filled, number, sums = self._segments, self._filled, self._end, self.row
        pack_into, full = _ROW.pack_into, self._first + self.rows_max
        chunk, start = bytearray(), 0
        for key, digest, time_ms, state, *located in rows:
            if number >= full:
                self._end, self.row = number, sums
                self.drop_oldest()
                full, sums = full + 1, self.row
            start += ROW_BYTES
            if start >= len(chunk):  # this row is in the next chunk
                at, row = divmod(number - self._base, _CHUNK_ROWS)
                if at == len(self._chunks):
                    self._chunks.append(bytearray(_CHUNK_ROWS * ROW_BYTES))
                chunk, start = self._chunks[at], row * ROW_BYTES
            seq = located[0] if located else 0
            pack_into(chunk, start, key, digest, time_ms // 1000, state, seq & 0xFFFFFFFF, seq >> 32)
            bits, which = _from_bytes(key, "little"), key[-1]
            segment = segments[which]
            slot = bits & len(segment) - 1
            entry = (bits >> _MARK_AT & _MARK) << _NUMBER_BITS | number % _NUMBERS + 1  # `_entry`
            number += 1
            sums += number_of((key, digest, state))
            if segment[slot] != _EMPTY:
                slot = self._probe(segment, slot, bits, key)
                if segment[slot] != _EMPTY:  # there is an older row of the key
                    segment[slot] = entry
                    continue
            segment[slot] = entry
            count = filled[which] = filled[which] + 1
            if count > len(segment) * _GROW_AT:
                self._grow(which)
        self._end, self.row = number, sums

    def oldest_ms(self) -> int | None:
        """Return the ledger time of the oldest row in ms; None if the table is empty."""
        return self._unpacked(self._first)[2] * 1000 if len(self) else None

    def older_than(self, time_ms: int, at_most: int) -> int:
        """Return how many of the oldest rows, up to `at_most`, are older than a ledger time."""
        count = 0
        while count < min(len(self), at_most) and self._unpacked(self._first + count)[2] * 1000 < time_ms:
            count += 1
        return count

    def drop_oldest(self) -> None:
        key, digest, _, state, _, _ = self._unpacked(self._first)
        self._remove(key, self._first)
        self.row -= number_of((key, digest, state))
        self._first += 1
        if self._first - self._base == _CHUNK_ROWS:
            del self._chunks[0]
            self._base = self._first

    def dump(self) -> bytes:
        """Return all rows, oldest first, in the form of a snapshot."""
        size = _ROW.size
        return b"".join(self._chunks)[(self._first - self._base) * size : (self._end - self._base) * size]

    @classmethod
    def load(cls, rows: bytes, rows_max: int = ROWS_MAX) -> FinishedTable:
        """Return the table of a snapshot. Raises ValueError if the bytes end within a row."""
        table = cls(rows_max)
        if len(rows) % ROW_BYTES:
            raise ValueError(f"{len(rows)} bytes of finished jobs do not make up rows of {ROW_BYTES} bytes")
        table.add_all(
            (key, digest, seconds * 1000, state, high << 32 | low)
            for key, digest, seconds, state, low, high in _ROW.iter_unpack(rows)
        )
        return table

    # ------------------------------------------------------------------ open addressing, linear probing

    def _unpacked(self, number: int) -> tuple[bytes, bytes, int, int, int, int]:
        at = number - self._base
        row: tuple[bytes, bytes, int, int, int, int] = _ROW.unpack_from(
            self._chunks[at // _CHUNK_ROWS], at % _CHUNK_ROWS * _ROW.size
        )
        return row

    def _number(self, entry: int) -> int:
        """Return the row number that an entry of the index names: it is the only one held now that gives this entry."""
        return self._first + ((entry & _NUMBERS) - 1 - self._first) % _NUMBERS

    def _look(self, key: bytes) -> tuple[array[int], int]:
        """Return the segment and slot of a key, or those where it would be added."""
        segment, bits = self._segments[key[-1]], _from_bytes(key, "little")
        slot = bits & len(segment) - 1
        return segment, slot if segment[slot] == _EMPTY else self._probe(segment, slot, bits, key)

    def _probe(self, segment: array[int], slot: int, bits: int, key: bytes) -> int:
        """Return the slot of a key, or where it would be added, searching from its first slot."""
        mask, mark = len(segment) - 1, bits >> _MARK_AT & _MARK
        while (entry := segment[slot]) != _EMPTY:
            if entry >> _NUMBER_BITS == mark and self._unpacked(self._number(entry))[0] == key:
                break
            slot = (slot + 1) & mask
        return slot

    def _home(self, entry: int) -> int:
        """Return the low bits of an entry's key, which give its first slot in a segment of any size."""
        at = self._number(entry) - self._base
        low: int = _LOW.unpack_from(self._chunks[at // _CHUNK_ROWS], at % _CHUNK_ROWS * ROW_BYTES)[0]
        return low

    def _remove(self, key: bytes, number: int) -> None:
        """Remove a row from the index, unless the entry is of a newer row of its key."""
        segment, hole = self._look(key)
        if segment[hole] != _entry(_from_bytes(key, "little"), number):
            return
        # backward-shift deletion keeps probe chains whole without tombstones
        mask = len(segment) - 1
        probe = (hole + 1) & mask
        while segment[probe] != _EMPTY:
            home = self._home(segment[probe]) & mask
            if (probe - home) & mask >= (probe - hole) & mask:
                segment[hole] = segment[probe]
                hole = probe
            probe = (probe + 1) & mask
        segment[hole] = _EMPTY
        self._filled[key[-1]] -= 1

    def _grow(self, which: int) -> None:
        """Double one segment: at two million rows it has some 8,000 entries."""
        old = self._segments[which]
        segment = self._segments[which] = array("I", bytes(8 * len(old)))
        mask = len(segment) - 1
        for entry in old:
            if entry != _EMPTY:
                slot = self._home(entry) & mask
                while segment[slot] != _EMPTY:
                    slot = (slot + 1) & mask
                segment[slot] = entry


def _entry(bits: int, number: int) -> int:
    """Return the index entry of a key's bits and a row's number."""
    return (bits >> _MARK_AT & _MARK) << _NUMBER_BITS | number % _NUMBERS + 1
