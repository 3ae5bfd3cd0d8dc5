"""Copy a member's output: two pipes into two files, each with a cap.

A pipe is always read, past the cap too, because a full pipe would stop the job. Output that exceeds the cap, or would
fill the disk, is counted and dropped, and the file says so once. A file is made with its first byte, so a silent job
has no file.
"""

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Final

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


def member_digest(key: str) -> str:
    """Return a file name that stands for an opaque key."""
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def output_path(state: Path, key: str, stream: Stream) -> Path:
    """Return where the supervisor of this state folder writes a member's output; absent if it wrote nothing."""
    return state / OUTPUT_FOLDER / f"{member_digest(key)}.{stream}"


def output_paths(state: Path, key: str) -> tuple[str, str]:
    """Return the paths of the files for a member's stdout and stderr.

    They are text, because a start waits for them, and `Path` is slow.
    """
    base = f"{state}/{OUTPUT_FOLDER}/{member_digest(key)}"
    return f"{base}.stdout", f"{base}.stderr"


class OutputPump:
    """The read end of one pipe, and its file."""

    __slots__ = (
        "_cap_bytes", "_file", "_path", "_room", "descriptor", "dropped_bytes", "seen_bytes", "stream", "written_bytes",
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

    def pump(self) -> bytes | None:
        """Move one chunk from pipe to file and return it: empty at the end of the pipe, None if no data waits."""
        try:
            data = os.read(self.descriptor, OUTPUT_CHUNK_BYTES_MAX)
        except BlockingIOError:
            return None
        if data:
            self.seen_bytes += len(data)
            self._keep(data)
        return data

    def _keep(self, data: bytes) -> None:
        part = b"" if self.dropped_bytes else data[: max(0, self._cap_bytes - self.written_bytes)]
        kept = self._write(part) if part and self._room.take(len(part)) else 0
        self.written_bytes += kept
        if kept == len(data):
            return
        if not self.dropped_bytes:
            self._write(cut_notice(self.stream, self.written_bytes, disk_full=kept < len(part)))
        self.dropped_bytes += len(data) - kept

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
