"""Copy an attempt's output: two pipes into two files, each with a cap.

A pipe is always read, past the cap too, because a full pipe would stop the job. Of a stream that exceeds the cap, the
file keeps the first quarter of the cap and the last bytes of the stream, where errors are: behind the first quarter the
file is a ring that is written again and again, and its last line says what it holds. Output that would fill the disk is
counted and dropped, and the file says so once. A file is made with its first byte, so a silent job has no file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import zlib
from pathlib import Path
from typing import Final, NamedTuple

from moorage.system.disk_room import DiskRoom
from moorage.worker.supervisor.protocol import OUTPUT_CHUNK_BYTES_MAX, OUTPUT_FOLDER, Stream

DRAIN_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes read after the tree is gone: more than a pipe has by default (1 MiB at most), so the rest is read."""
NOTICE_BYTES_MAX: Final = 96
"""Most bytes of the line that ends a file with only a part of its stream."""
_NOTICE: Final = re.compile(
    rb"\n\[moorage: std(?:out|err) is cut at (\d{1,16}) bytes(?:, disk full)?; the rest is dropped\]\n\Z"
)


def cut_notice(stream: Stream, kept_bytes: int, *, disk_full: bool = False) -> bytes:
    """Return the last line of a file that has only the first `kept_bytes` of its stream."""
    why = ", disk full" if disk_full else ""
    return f"\n[moorage: {stream} is cut at {kept_bytes} bytes{why}; the rest is dropped]\n".encode()


def cut_at(tail: bytes, offset: int) -> int | None:
    """Return where the stream was cut, from the file's tail, which begins at `offset`; None if it is whole.

    The notice contains the very offset at which it stands, so a job that prints such a line has it at another offset.
    """
    found = _NOTICE.search(tail)
    return offset + found.start() if found is not None and int(found[1]) == offset + found.start() else None


HEAD_PART: Final = 4
"""The first bytes of a long stream take one part in this many of the cap, the last ones the rest."""
RING_BYTES: Final = 160
"""Bytes of the line behind a ring."""
ORDER_BYTES_MAX: Final = 1024 * 1024
"""Most bytes of the file about the order of arrival: some 260,000 changes between the streams."""
ORDER_NUMBER_BYTES: Final = 4
ORDER_NUMBER_MAX: Final = (1 << 8 * ORDER_NUMBER_BYTES) - 1
RING_READS_MAX: Final = 20
"""How often that line is read where it is being written."""
_RING: Final = re.compile(
    rb"\n\[moorage: std(?:out|err) has its first (\d{1,16}) bytes and those from (\d{1,16}) to (\d{1,16});"
    rb" the others are dropped\] #([0-9a-f]{8}) *\n\Z"
)


class Ring(NamedTuple):
    """What the file of a long stream holds: the bytes of the stream up to `head`, and those from `low` up to `end`.

    The byte at the offset `o` from `head` on is in the file at `head + (o - head) % (cap - head)`.
    """

    cap: int
    head: int
    low: int
    end: int

    def parts(self, offset: int, size: int) -> list[tuple[int, int]]:
        """Return where `size` bytes from this offset of the ring on are in the file: position and size of each part."""
        length = self.cap - self.head
        at = self.head + (offset - self.head) % length
        first = min(size, self.cap - at)
        return [(at, first), (self.head, size - first)] if first < size else [(at, first)]

    def line(self, stream: Stream) -> bytes:
        """Return the last line of the file. It has a sum, because readers may see a half of it."""
        said = (
            f"\n[moorage: {stream} has its first {self.head} bytes and those from {self.low} to {self.end};"
            " the others are dropped]"
        ).encode()
        return (said + b" #%08x" % zlib.crc32(said)).ljust(RING_BYTES - 1) + b"\n"


def ring_in(descriptor: int, size: int) -> Ring | None:
    """Return what a file of this size says that it holds; None if it is no ring. Raises OSError."""
    cap = size - RING_BYTES
    for _ in range(RING_READS_MAX if cap > 0 else 0):
        line = os.pread(descriptor, RING_BYTES, cap)
        found = _RING.match(line)
        if found is None:
            return None
        ring = Ring(cap, *(int(number) for number in found.groups()[:3]))
        is_whole = int(found[4], 16) == zlib.crc32(line[: found.start(4) - 2])
        if is_whole and ring.head < cap and ring.head <= ring.low <= ring.end <= ring.low + cap - ring.head:
            return ring
    return None


def key_digest(key: str) -> str:
    """Return a file name that stands for an opaque key."""
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def output_path(state: Path, key: str, stream: Stream) -> Path:
    """Return where the supervisor of this state folder writes an attempt's output; absent if it wrote nothing."""
    return state / OUTPUT_FOLDER / f"{key_digest(key)}.{stream}"


def order_path(state: Path | str, key: str) -> str:
    """Return where the supervisor writes in which order an attempt's output arrived; absent if it did not."""
    return f"{state}/{OUTPUT_FOLDER}/{key_digest(key)}.order"


def output_paths(state: Path, key: str) -> tuple[str, str]:
    """Return the paths of the files for an attempt's stdout and stderr.

    They are text, because a start waits for them, and `Path` is slow.
    """
    base = f"{state}/{OUTPUT_FOLDER}/{key_digest(key)}"
    return f"{base}.stdout", f"{base}.stderr"


class ArrivalOrder:
    """Writes in which order the two streams of an attempt arrive, as `LogsAsked` describes it.

    The file is made once both have arrived, so most jobs have none. It has at most `ORDER_BYTES_MAX`; the order of what
    arrives after that is not known. An error of the disk ends it, too.
    """

    __slots__ = ("_at", "_file", "_held", "_path", "_room", "_run_bytes", "_stream")

    def __init__(self, path: str, room: DiskRoom) -> None:
        self._path = path
        self._room = room
        self._file = -1
        self._held = b""
        self._stream: Stream = "stdout"
        self._run_bytes = 0
        self._at = 0

    def note(self, stream: Stream, size: int) -> None:
        """Record that `size` bytes of a stream arrived now."""
        if self._at < 0:
            return
        if stream != self._stream:
            self._held += _run(self._run_bytes)
            self._stream, self._run_bytes = stream, 0
            if stream == "stdout" or any(self._held):  # both have arrived
                self._write()
        self._run_bytes += size

    def _write(self) -> None:
        held, self._held = self._held, b""
        try:
            if self._at + len(held) > ORDER_BYTES_MAX or not self._room.take(len(held)):
                raise OSError("no room")
            if self._file < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                self._file = os.open(self._path, flags, 0o600)
            self._at += os.write(self._file, held)
        except OSError:
            self.close()

    def close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = self._at = -1


def _run(size: int) -> bytes:
    """Return a number of bytes as it is in the file. One that is too large is several, with none of the other stream
    between them."""
    whole, rest = divmod(size, ORDER_NUMBER_MAX)
    numbers = [ORDER_NUMBER_MAX, 0] * whole + [rest]
    return b"".join(number.to_bytes(ORDER_NUMBER_BYTES, "little") for number in numbers)


class OutputPump:
    """The read end of one pipe, and its file. `written_bytes` are kept of the beginning, until the file is a ring."""

    __slots__ = (
        "_cap_bytes", "_file", "_path", "_ring", "_room", "descriptor", "dropped_bytes", "seen_bytes", "stream",
        "written_bytes",
    )  # fmt: skip

    def __init__(self, descriptor: int, path: str | Path, cap_bytes: int, stream: Stream, room: DiskRoom) -> None:
        self.descriptor = descriptor
        self.stream = stream
        self.seen_bytes = 0
        self.written_bytes = 0
        self.dropped_bytes = 0
        self._cap_bytes = cap_bytes
        self._path = path
        self._room = room
        self._file = -1
        self._ring: Ring | None = None

    def pump(self) -> bytes | None:
        """Move one chunk from pipe to file and return it: empty at the end of the pipe, None if no data waits."""
        try:
            data = os.read(self.descriptor, OUTPUT_CHUNK_BYTES_MAX)
        except BlockingIOError:
            return None
        except OSError:  # EIO: nothing has the terminal any more
            return b""
        if data:
            self.seen_bytes += len(data)
            self._keep(data)
        return data

    def _keep(self, data: bytes) -> None:
        """Store data that was counted in `seen_bytes` already."""
        if self._ring is not None:
            self._overwrite(self._ring, data)
            return
        part = b"" if self.dropped_bytes else data[: max(0, self._cap_bytes - self.written_bytes)]
        kept = self._write(part) if part and self._room.take(len(part)) else 0
        self.written_bytes += kept
        if kept == len(data):
            return
        if not self.dropped_bytes and 0 < self._cap_bytes == self.written_bytes:
            cap, head = self._cap_bytes, self._cap_bytes // HEAD_PART
            self._overwrite(Ring(cap, head, head, cap), data[kept:])
            return
        if not self.dropped_bytes:
            self._write_notice(disk_full=kept < len(part))
        self.dropped_bytes += len(data) - kept

    def _write_notice(self, *, disk_full: bool) -> None:
        """End the file with the notice of a cut. Without room for it, it takes the place of the last bytes; a file that
        is too short for that becomes empty, which says the same, as a silent stream has no file."""
        notice = cut_notice(self.stream, self.written_bytes, disk_full=disk_full)
        if self._write(notice) == len(notice) or self._file < 0:
            return
        kept = max(0, self.written_bytes - len(notice))
        self.dropped_bytes += self.written_bytes - kept
        self.written_bytes = kept
        with contextlib.suppress(OSError):
            if kept:
                notice = cut_notice(self.stream, kept, disk_full=disk_full)
                self._write_at(notice, kept)
            os.ftruncate(self._file, kept + len(notice) if kept else 0)

    def _overwrite(self, ring: Ring, data: bytes) -> None:
        """Write the end of the stream over the oldest bytes of the ring.

        The line says first that these are gone, and then what is there instead: at any moment, also if this process
        dies, what it names is in the file.
        """
        length = ring.cap - ring.head
        last = data[-length:]
        end = self.seen_bytes
        low = max(ring.low, end - length)
        try:
            before = Ring(ring.cap, ring.head, low, max(ring.end, low))
            self._write_at(before.line(self.stream), ring.cap)
            written = 0
            for at, size in ring.parts(end - len(last), len(last)):
                self._write_at(last[written : written + size], at)
                written += size
            ring = Ring(ring.cap, ring.head, low, end)
            self._write_at(ring.line(self.stream), ring.cap)
        except OSError:  # the disk is full, and its file system writes nothing in place: what there is stays
            self._ring = None
            self.dropped_bytes += len(data)
            return
        self._ring, self.dropped_bytes = ring, low - ring.head

    def _write_at(self, data: bytes, at: int) -> None:
        while data:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written

    def _write(self, data: bytes) -> int:
        """Write data to the file; return how much was written, less than all only if the file system refuses."""
        written = 0
        try:
            if self._file < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                self._file = os.open(self._path, flags, 0o600)
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            return written
        return written

    def _go_on(self) -> None:
        """Open the file of an earlier process again and go on behind `seen_bytes`, from where the stream comes again.

        That process may have written more, and in a ring over earlier bytes.
        """
        with contextlib.suppress(OSError):  # the file was deleted meanwhile: the next piece makes it again
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            ring = ring_in(self._file, os.fstat(self._file).st_size)
            if ring is not None and self.seen_bytes > ring.head:
                self._ring = Ring(ring.cap, ring.head, min(ring.low, self.seen_bytes), self.seen_bytes)
            elif ring is not None or not self.dropped_bytes:
                os.ftruncate(self._file, self.written_bytes)
                os.lseek(self._file, 0, os.SEEK_END)

    def close(self) -> None:
        """Close pipe and file. The file's modification time is then the end of its stream, where retention begins."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.utime(self._file)
        for descriptor in (self.descriptor, self._file):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self.descriptor = self._file = -1
