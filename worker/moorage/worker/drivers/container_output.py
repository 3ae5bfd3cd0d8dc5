"""The output of a container, from the engine's log into the files where a worker keeps all output.

The engine keeps it, too, so an agent that starts again reads on where the last one ended. A small file beside says how
far that was: for each stream the latest time of a piece, how many pieces were read from there on, and how much is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.schemas.unreadable import UNREADABLE
from moorage.system.disk_room import DiskRoom
from moorage.worker.drivers.container_engine import Piece
from moorage.worker.drivers.output_frames import OutputFrames
from moorage.worker.member_messages import MemberName
from moorage.worker.supervisor.output import OutputPump, cut_notice, member_digest, output_path
from moorage.worker.supervisor.protocol import OUTPUT_FOLDER, Ended, Output, Stream

#: beside the supervisor's own files
FOLDER: Final = "containers"
#: streams write their times each by itself: what was written a little earlier may come a little later
MARGIN_S: Final = 10
_READ_BYTES: Final = 512
#: how long an output is read after its container's end
REST_S_MAX: Final = 600.0
#: pieces of output that are kept before other work has its turn
TURN_PIECES_MAX: Final = 64
#: how long pieces wait for others, to be told in one frame
FLUSH_S: Final = 0.02

log = logging.getLogger("moorage.worker")


class _Mark(msgspec.Struct):
    """How far a stream was read: the latest time of a piece, and how many pieces were read from that one on.

    `low` is the earliest time of either stream since: before `stamp` where the clock was set back.
    """

    stamp: str = ""
    low: str = ""
    count: int = 0
    seen_bytes: int = 0
    written_bytes: int = 0
    dropped_bytes: int = 0


_marks: Final = msgspec.json.Decoder(tuple[_Mark, _Mark])


class _Stream(OutputPump):
    """One stream, and the file behind it; what it has no room for is counted, as for processes."""

    __slots__ = ("_is_there", "_to_skip", "mark")

    def __init__(self, path: Path, cap_bytes: int, stream: Stream, room: DiskRoom, mark: _Mark) -> None:
        super().__init__(-1, path, cap_bytes, stream, room)
        self.mark = mark
        self._to_skip = mark.count
        self._is_there = False
        self.seen_bytes, self.written_bytes, self.dropped_bytes = (
            mark.seen_bytes, mark.written_bytes, mark.dropped_bytes,
        )  # fmt: skip
        if mark.written_bytes and not mark.dropped_bytes:
            with contextlib.suppress(OSError):  # cleared meanwhile: the next piece makes the file anew
                self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                os.ftruncate(self._file, mark.written_bytes)  # what was written and not marked comes again
                os.lseek(self._file, 0, os.SEEK_END)

    def again(self) -> None:
        """The log is read again from a time before the mark."""
        self._to_skip = self.mark.count
        self._is_there = False

    def add(self, piece: Piece) -> bool:
        """Keep a piece; False for one that was read before."""
        mark = self.mark
        if self._to_skip and piece.stamp <= mark.stamp:
            self._is_there |= piece.stamp == mark.stamp
            self._to_skip -= self._is_there  # behind the mark each one was read, whatever its time
            return False
        self._to_skip = 0
        mark.count += 1
        if piece.stamp > mark.stamp:
            mark.stamp, mark.low, mark.count = piece.stamp, piece.stamp, 1
        self.seen_bytes += len(piece.data)
        self._keep(piece.data)
        mark.seen_bytes, mark.written_bytes, mark.dropped_bytes = (
            self.seen_bytes, self.written_bytes, self.dropped_bytes,
        )  # fmt: skip
        return True

    def cut(self) -> None:
        """Have the file end with the notice of a cut, unless it has one."""
        if not self.dropped_bytes:
            self._write(cut_notice(self.stream, self.written_bytes))


class ContainerOutput:
    """Both streams of one container. Its methods block for what writing to a file takes."""

    def __init__(self, state: Path, key: str, cap_bytes: int) -> None:
        """Raises OSError."""
        self._key = key
        (state / FOLDER).mkdir(mode=0o700, exist_ok=True)
        (state / OUTPUT_FOLDER).mkdir(mode=0o700, exist_ok=True)
        self._path = mark_path(state, key)
        out, err = _Mark(), _Mark()
        with contextlib.suppress(FileNotFoundError, *UNREADABLE):
            out, err = _marks.decode(self._path.read_bytes())
        room = DiskRoom(state)
        self._out = _Stream(output_path(state, key, "stdout"), cap_bytes, "stdout", room, out)
        self._err = _Stream(output_path(state, key, "stderr"), cap_bytes, "stderr", room, err)
        self._marked = -1
        self.pieces = 0
        """That the log gave, read before or not."""

    @property
    def since(self) -> str:
        """From when on the log must be read, in seconds of the epoch; nothing is left out, and pieces come again."""
        self._out.again()
        self._err.again()
        last = max(self._out.mark, self._err.mark, key=lambda mark: mark.stamp).low
        if not last:
            return "0"
        with contextlib.suppress(ValueError):
            return str(max(0, int(datetime.fromisoformat(last).timestamp()) - MARGIN_S))
        return "0"

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes that stdout and stderr had so far."""
        return self._out.seen_bytes, self._err.seen_bytes

    def add(self, piece: Piece) -> Output | None:
        """Keep a piece, and return it as it is told; None for one that was read before."""
        self.pieces += 1
        stream = self._err if piece.is_error else self._out
        if not stream.add(piece):
            return None
        for mark in (self._out.mark, self._err.mark):
            mark.low = min(mark.low, piece.stamp)
        offset = stream.seen_bytes - len(piece.data)
        return Output(key=self._key, stream=stream.stream, offset=offset, data=piece.data)

    def cut(self) -> None:
        """Have both files say that there was more, or may have been. No piece may come after it."""
        self._out.cut()
        self._err.cut()

    def mark(self) -> None:
        """Note how far it was read; once after some pieces, since a lost note only means to read them again."""
        text = msgspec.json.encode((self._out.mark, self._err.mark)).ljust(_READ_BYTES)
        with contextlib.suppress(OSError):
            if self._marked < 0:
                self._marked = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.pwrite(self._marked, text, 0)

    def close(self, is_over: bool) -> None:
        """Close the files; once the container is over nothing need be known of how far it was read."""
        self._out.close()
        self._err.close()
        if self._marked >= 0:
            os.close(self._marked)
            self._marked = -1
        if is_over:
            self._path.unlink(missing_ok=True)


class LiveOutput:
    """Keeps the output of one driver's containers as it comes, and publishes it.

    `publish` is set once the driver is attached.
    """

    def __init__(self, publishes: bool) -> None:
        self.publish: Callable[[MemberName, bytes], None] | None = None
        self._publishes = publishes
        self._frames = OutputFrames()
        self._fresh: set[ContainerOutput] = set()
        self._flush: asyncio.TimerHandle | None = None

    async def keep(self, name: MemberName, output: ContainerOutput, pieces: AsyncIterator[Piece]) -> None:
        """Keep and publish all of these pieces of a member's output."""
        count = 0
        async for piece in pieces:
            event = output.add(piece)
            if event is not None and self._publishes:
                self._frames.add(name, event)
            count += 1
            if count % TURN_PIECES_MAX == 0:
                await asyncio.sleep(0)
            self._fresh.add(output)
            if self._flush is None:
                self._flush = asyncio.get_running_loop().call_later(FLUSH_S, self.tell)

    def tell(self) -> None:
        """Publish what waits for more, and note how far each output was read."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        fresh, self._fresh = self._fresh, set()
        for output in fresh:
            output.mark()
        assert self.publish is not None
        for name, payload in self._frames.take():
            self.publish(name, payload)

    def end(self, name: MemberName, output: ContainerOutput, ended: Ended, *, is_whole: bool) -> None:
        """Publish that both streams of a member are over, and close its files."""
        self.tell()  # the rest first: both ends come last
        out, err = output.sizes
        self._frames.end(name, msgspec.structs.replace(ended, stdout_bytes=out, stderr_bytes=err))
        self.tell()
        if not is_whole:
            log.warning("%s: its output is cut: the rest did not come", name[1])
            output.cut()
        output.close(is_over=True)


async def read_out(reading: asyncio.Task[Any], output: ContainerOutput, quiet_s: float) -> None:
    """Wait for the rest of an output as long as some comes within `quiet_s`, read before or not."""
    seen = -1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REST_S_MAX):
            while not reading.done() and output.pieces != seen:
                seen = output.pieces
                await asyncio.wait((reading,), timeout=quiet_s)


def mark_path(state: Path, key: str) -> Path:
    """Return where it stands how far the output of a member was read."""
    return state / FOLDER / f"{_mark_prefix(key.partition('|')[0])}{member_digest(key)}"


def clear_marks(state: Path, owner: str, keys: Collection[str]) -> None:
    """Remove what stands there of other members of this owner; other drivers and workers have theirs beside."""
    kept, prefix = {mark_path(state, key).name for key in keys}, _mark_prefix(owner)
    with contextlib.suppress(OSError):
        for path in (state / FOLDER).iterdir():
            if path.name.startswith(prefix) and path.name not in kept:
                path.unlink()


def _mark_prefix(owner: str) -> str:
    return f"{member_digest(owner)[:16]}-"
