"""The table of finished jobs: what idempotence stands on, in at most 40 bytes a row.

A row answers for idempotence for `KEEP_MS`, and says where the job's history stands as long as that is kept; the oldest
goes when `ROWS_MAX` are held. Rows stand in a ring in the order in which they came; an open-addressed index of 32-bit
positions finds the newest of a (tenant, job) by its hash. No Python object a row, so two million of them cost 80 MB and
the garbage collector nothing.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import Final

KEEP_MS: Final = 24 * 3600 * 1000
ROWS_MAX: Final = 2_000_000

_ROW: Final = struct.Struct("<12s8sIBIB")  # key, request digest, end in s, state, history sequence in two pieces
ROW_BYTES: Final = _ROW.size
_ROW_FIRST: Final = struct.Struct("<12s12sIB")  # as snapshots held it before there was a history
ROW_BYTES_FIRST: Final = _ROW_FIRST.size
KEY_BYTES: Final = 12
DIGEST_BYTES: Final = 8
_SEQ_MAX: Final = 2**40 - 1
_EMPTY: Final = 0
_GROW_AT: Final = 0.66


def job_key(tenant: str, job: str) -> bytes:
    """BLAKE2b-96 of tenant and job: two of 2,000,000 rows collide with a chance below 1e-16."""
    return hashlib.blake2b(f"{tenant}/{job}".encode(), digest_size=KEY_BYTES).digest()


def request_digest(canonical: bytes) -> bytes:
    """BLAKE2b-64 of a request's canonical form: compared with that of the same job id alone."""
    return hashlib.blake2b(canonical, digest_size=DIGEST_BYTES).digest()


class FinishedTable:
    """First in, first out; look-up by key in constant time."""

    def __init__(self, rows_max: int = ROWS_MAX) -> None:
        self.rows_max = rows_max
        self._rows = bytearray()
        self._capacity = 0  # rows that the ring has room for
        self._first = 0  # ring position of the oldest row
        self._count = 0
        self._index = array("I", bytes(4 * 64))
        self.row = 0  # this table's part of the state digest

    def __len__(self) -> int:
        return self._count

    def find(self, key: bytes) -> tuple[bytes, int, int, int] | None:
        """(request digest, end in ledger s, state number, history sequence or 0) of a finished job, or None."""
        position = self._find(key)
        if position < 0:
            return None
        _, digest, seconds, state, low, high = _ROW.unpack_from(self._rows, position * _ROW.size)
        return digest, seconds, state, high << 32 | low

    def add(self, key: bytes, digest: bytes, time_ms: int, state: int, seq: int = 0) -> None:
        """Append a row; the oldest goes when the table is full. An older row of the key is found no more.

        Of the digest the first 8 bytes count: ledgers of older releases hold 12. `seq` is the sequence of the
        message in the history stream, 0 for none.
        """
        digest = digest[:DIGEST_BYTES]
        seq = seq if seq <= _SEQ_MAX else 0
        if self._count >= self.rows_max:
            self.drop_oldest()
        if self._count == self._capacity:
            self._grow()
        if (self._count + 1) > len(self._index) * _GROW_AT:
            self._reindex(len(self._index) * 2)
        position = (self._first + self._count) % self._capacity
        _ROW.pack_into(
            self._rows, position * _ROW.size, key, digest, time_ms // 1000, state, seq & 0xFFFFFFFF, seq >> 32
        )
        self._count += 1
        self._insert(key, position)
        self.row += _row_hash(key, digest, state)

    def oldest_ms(self) -> int | None:
        """Ledger time of the oldest row, in ms."""
        if not self._count:
            return None
        seconds: int = _ROW.unpack_from(self._rows, self._first * _ROW.size)[2]
        return seconds * 1000

    def older_than(self, time_ms: int, at_most: int) -> int:
        """How many of the oldest rows, at most so many, are older than a ledger time."""
        count = 0
        while count < min(self._count, at_most):
            position = (self._first + count) % self._capacity
            if _ROW.unpack_from(self._rows, position * _ROW.size)[2] * 1000 >= time_ms:
                break
            count += 1
        return count

    def drop_oldest(self) -> None:
        key, digest, _, state, _, _ = _ROW.unpack_from(self._rows, self._first * _ROW.size)
        self._remove(key, self._first)
        self.row -= _row_hash(key, digest, state)
        self._first = (self._first + 1) % self._capacity
        self._count -= 1

    def dump(self) -> bytes:
        """All rows, oldest first, as they stand in a snapshot."""
        size = _ROW.size
        end = self._first + self._count
        if end <= self._capacity:
            return bytes(self._rows[self._first * size : end * size])
        return bytes(self._rows[self._first * size :]) + bytes(self._rows[: (end - self._capacity) * size])

    @classmethod
    def load(cls, rows: bytes, rows_max: int = ROWS_MAX, row_bytes: int = ROW_BYTES) -> FinishedTable:
        """The table of a snapshot, whose rows may be as an older release wrote them. Raises ValueError."""
        table = cls(rows_max)
        if row_bytes not in (ROW_BYTES, ROW_BYTES_FIRST) or len(rows) % row_bytes:
            raise ValueError(f"{len(rows)} bytes of finished jobs are no rows of {row_bytes} bytes")
        if row_bytes == ROW_BYTES:
            for key, digest, seconds, state, low, high in _ROW.iter_unpack(rows):
                table.add(key, digest, seconds * 1000, state, high << 32 | low)
        else:
            for key, digest, seconds, state in _ROW_FIRST.iter_unpack(rows):
                table.add(key, digest, seconds * 1000, state)
        return table

    # ------------------------------------------------------------------ open addressing, linear probing

    def _slot(self, key: bytes) -> int:
        return int.from_bytes(key[:8], "little") & (len(self._index) - 1)

    def _key_at(self, position: int) -> bytes:
        start = position * _ROW.size
        return bytes(self._rows[start : start + KEY_BYTES])

    def _find(self, key: bytes) -> int:
        if not self._count:
            return -1
        index, mask, slot = self._index, len(self._index) - 1, self._slot(key)
        while (entry := index[slot]) != _EMPTY:
            if self._key_at(entry - 1) == key:
                return entry - 1
            slot = (slot + 1) & mask
        return -1

    def _insert(self, key: bytes, position: int) -> None:
        index, mask, slot = self._index, len(self._index) - 1, self._slot(key)
        while (entry := index[slot]) != _EMPTY and self._key_at(entry - 1) != key:
            slot = (slot + 1) & mask
        index[slot] = position + 1

    def _remove(self, key: bytes, position: int) -> None:
        """Take a row out of the index, unless a newer one of its key stands there."""
        index, mask, slot = self._index, len(self._index) - 1, self._slot(key)
        while (entry := index[slot]) != position + 1:
            if entry == _EMPTY or self._key_at(entry - 1) == key:
                return
            slot = (slot + 1) & mask
        # backward-shift deletion keeps every probe chain whole without grave stones
        hole, probe = slot, (slot + 1) & mask
        while index[probe] != _EMPTY:
            home = self._slot(self._key_at(index[probe] - 1))
            if (probe - home) & mask >= (probe - hole) & mask:
                index[hole] = index[probe]
                hole = probe
            probe = (probe + 1) & mask
        index[hole] = _EMPTY

    def _grow(self) -> None:
        rows = self.dump()
        self._capacity = min(max(64, self._capacity * 2), max(self.rows_max, 64))
        self._rows = bytearray(rows) + bytearray(self._capacity * _ROW.size - len(rows))
        self._first = 0
        self._reindex(len(self._index))

    def _reindex(self, size: int) -> None:
        self._index = array("I", bytes(4 * size))
        for offset in range(self._count):
            position = (self._first + offset) % self._capacity
            self._insert(self._key_at(position), position)


def _row_hash(key: bytes, digest: bytes, state: int) -> int:
    return hash(
        (int.from_bytes(key[:7], "little"), int.from_bytes(digest[:7], "little"), state)
    )  # ints alone: the same in every process
