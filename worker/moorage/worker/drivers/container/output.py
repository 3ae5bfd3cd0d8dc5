"""Copy the output of a container from the engine's log into the files where a worker keeps all output.

The engine keeps the log, too, so a restarted agent reads on where the last one stopped. A small file next to the output
has that position: for each stream the latest time of a piece, how many pieces were read from that time on, and how many
bytes are stored.
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

from moorage.schemas.attempt import AttemptName
from moorage.schemas.unreadable import UNREADABLE
from moorage.system.disk_room import DiskRoom
from moorage.worker.drivers.container.engine import Piece
from moorage.worker.drivers.output_frames import OutputFrames
from moorage.worker.supervisor.capped_output import (
    ArrivalOrder,
    OutputPump,
    cut_notice,
    key_digest,
    order_path,
    output_path,
)
from moorage.worker.supervisor.protocol import OUTPUT_FOLDER, Ended, Output, Stream

#: next to the supervisor's own files
FOLDER: Final = "containers"
#: each stream is timed by itself: a piece with an earlier time may come a little later
MARGIN_S: Final = 10
_READ_BYTES: Final = 512
#: how long an output is read after its container's end
REST_S_MAX: Final = 600.0
#: how often output files are tried that cannot be opened
OPEN_AGAIN_S: Final = 5.0
#: pieces that are stored before other work gets a turn
TURN_PIECES_MAX: Final = 64
#: how long pieces wait for others, to be published in one frame
FLUSH_S: Final = 0.02

log = logging.getLogger("moorage.worker")


class _Mark(msgspec.Struct):
    """The position in a stream: the latest time of a piece, and how many pieces were read from that time on.

    `low` is the earliest time of either stream since then: earlier than `stamp` if the clock was set back.
    """

    stamp: str = ""
    low: str = ""
    count: int = 0
    seen_bytes: int = 0
    written_bytes: int = 0
    dropped_bytes: int = 0


_marks: Final = msgspec.json.Decoder(tuple[_Mark, _Mark])


class _Stream(OutputPump):
    """One stream and its file; bytes without room are counted, as for processes."""

    __slots__ = ("_is_there", "_to_skip", "mark")

    def __init__(self, path: Path, cap_bytes: int, stream: Stream, room: DiskRoom, mark: _Mark) -> None:
        super().__init__(-1, path, cap_bytes, stream, room)
        self.mark = mark
        self._to_skip = mark.count
        self._is_there = False
        self.seen_bytes, self.written_bytes, self.dropped_bytes = (
            mark.seen_bytes, mark.written_bytes, mark.dropped_bytes,
        )  # fmt: skip
        if mark.written_bytes:
            self._go_on()

    def again(self) -> None:
        """Prepare to read the log again from a time before the mark."""
        self._to_skip = self.mark.count
        self._is_there = False

    def add(self, piece: Piece) -> bool:
        """Store a piece; return False if it was read before."""
        mark = self.mark
        if self._to_skip and piece.stamp <= mark.stamp:
            self._is_there |= piece.stamp == mark.stamp
            self._to_skip -= self._is_there  # after the mark, each piece was read before, whatever its time
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
        """Make the file end with the notice of a cut, unless it has one."""
        if not self.dropped_bytes:
            self._write(cut_notice(self.stream, self.written_bytes))


async def opened(state: Path, key: str, cap_bytes: int) -> ContainerOutput:
    """Return a container's output once its files can be opened: without it a container is not followed to its end."""
    while True:
        try:
            return ContainerOutput(state, key, cap_bytes)
        except OSError as error:  # no descriptor left, or a full disk
            log.warning("the output files of %s cannot be opened now: %s", key, error)
        await asyncio.sleep(OPEN_AGAIN_S)


class ContainerOutput:
    """Both streams of one container. Its methods block while they write to a file."""

    def __init__(self, state: Path, key: str, cap_bytes: int) -> None:
        """Open the files and read the last position. Raises OSError."""
        self._key = key
        (state / FOLDER).mkdir(mode=0o700, exist_ok=True)
        (state / OUTPUT_FOLDER).mkdir(mode=0o700, exist_ok=True)
        self._path, self._left = mark_path(state, key), left_path(state, key)
        out, err = _Mark(), _Mark()
        with contextlib.suppress(FileNotFoundError, *UNREADABLE):
            out, err = _marks.decode(self._path.read_bytes())
        room = DiskRoom(state)
        self._out = _Stream(output_path(state, key, "stdout"), cap_bytes, "stdout", room, out)
        self._err = _Stream(output_path(state, key, "stderr"), cap_bytes, "stderr", room, err)
        # an agent that goes on with the output of another does not know where that one's record of the order ends
        is_new = not (out.seen_bytes or err.seen_bytes)
        self._order = ArrivalOrder(order_path(state, key), room) if is_new else None
        self._marked = -1
        self.pieces = 0
        """How many pieces the log gave, new ones or not."""

    @property
    def since(self) -> str:
        """Return the time, in seconds of the epoch, from which to read the log now; "0" is from its beginning.

        Nothing is left out, but pieces come again. Both streams then expect that, so read this once for each reading.
        """
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
        """How many bytes stdout and stderr had so far."""
        return self._out.seen_bytes, self._err.seen_bytes

    def add(self, piece: Piece) -> Output | None:
        """Store a piece, and return the event to publish; None for a piece that was read before."""
        self.pieces += 1
        stream = self._err if piece.is_error else self._out
        if not stream.add(piece):
            return None
        for mark in (self._out.mark, self._err.mark):
            mark.low = min(mark.low, piece.stamp)
        if self._order is not None:
            self._order.note(stream.stream, len(piece.data))
        offset = stream.seen_bytes - len(piece.data)
        return Output(key=self._key, stream=stream.stream, offset=offset, data=piece.data)

    def cut(self) -> None:
        """Mark both files as incomplete. No piece may come after it."""
        self._out.cut()
        self._err.cut()

    def mark(self) -> None:
        """Save the position; an error is ignored.

        Do it once after several pieces, because a lost position only means to read them again.
        """
        text = msgspec.json.encode((self._out.mark, self._err.mark)).ljust(_READ_BYTES)
        with contextlib.suppress(OSError):
            if self._marked < 0:
                self._marked = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.pwrite(self._marked, text, 0)

    def close(self, is_over: bool) -> None:
        """Close the files; when the container is over, its position is no longer needed and is deleted."""
        self._out.close()
        self._err.close()
        if self._order is not None:
            self._order.close()
        if self._marked >= 0:
            os.close(self._marked)
            self._marked = -1
        if is_over:
            self._path.unlink(missing_ok=True)
            self._left.unlink(missing_ok=True)


class LiveOutput:
    """Stores the output of one driver's containers while they run, and publishes it.

    Without `streams` it publishes the ends of the streams alone.
    """

    def __init__(self, publish: Callable[[AttemptName, bytes], None], *, streams: bool) -> None:
        self._publish = publish
        self._streams = streams
        self._frames = OutputFrames()
        self._fresh: set[ContainerOutput] = set()
        self._flush: asyncio.TimerHandle | None = None

    async def keep(self, name: AttemptName, output: ContainerOutput, pieces: AsyncIterator[Piece]) -> None:
        """Store all of these pieces of an attempt's output, and publish them if the worker does that."""
        count = 0
        async for piece in pieces:
            event = output.add(piece)
            if event is not None and self._streams:
                self._frames.add(name, event)
            count += 1
            if count % TURN_PIECES_MAX == 0:
                await asyncio.sleep(0)
            self._fresh.add(output)
            if self._flush is None:
                self._flush = asyncio.get_running_loop().call_later(FLUSH_S, self.publish_pieces)

    def publish_pieces(self) -> None:
        """Save the position in each output that has new pieces, then publish the collected pieces."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        fresh, self._fresh = self._fresh, set()
        for output in fresh:
            output.mark()
        for name, payload in self._frames.take():
            self._publish(name, payload)

    def end(self, name: AttemptName, output: ContainerOutput, ended: Ended, *, is_whole: bool) -> None:
        """Publish that both streams of an attempt are over, and close its files, with a notice if some is missing."""
        self.publish_pieces()  # the collected pieces first: the ends of the streams come last
        out, err = output.sizes
        self._frames.end(name, msgspec.structs.replace(ended, stdout_bytes=out, stderr_bytes=err))
        self.publish_pieces()
        if not is_whole:
            log.warning("job %s: its output is incomplete: the engine did not send the rest", name[1])
            output.cut()
        output.close(is_over=True)


async def read_out(reading: asyncio.Task[Any], output: ContainerOutput, quiet_s: float) -> None:
    """Wait until `reading` is done, no piece, new or not, has come for `quiet_s`, or `REST_S_MAX` is over."""
    seen = -1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REST_S_MAX):
            while not reading.done() and output.pieces != seen:
                seen = output.pieces
                await asyncio.wait((reading,), timeout=quiet_s)


def mark_path(state: Path, key: str) -> Path:
    """Return the file with the position in an attempt's output."""
    return state / FOLDER / f"{_mark_prefix(key.partition('|')[0])}{key_digest(key)}"


def left_path(state: Path, key: str) -> Path:
    """Return the file that is there while a caller has left an attempt's terminal by its own will."""
    return state / FOLDER / f"{mark_path(state, key).name}-left"


def clear_marks(state: Path, owner: str, keys: Collection[str]) -> None:
    """Remove this owner's files here except those of these keys; other owners have theirs in the same folder."""
    prefix = _mark_prefix(owner)
    kept = {path(state, key).name for key in keys for path in (mark_path, left_path)}
    with contextlib.suppress(OSError):
        for path in (state / FOLDER).iterdir():
            if path.name.startswith(prefix) and path.name not in kept:
                path.unlink()


def _mark_prefix(owner: str) -> str:
    return f"{key_digest(owner)[:16]}-"
