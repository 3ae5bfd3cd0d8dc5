"""Combine pieces of an attempt's output into frames of text for its log subject."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable
from typing import Any, Final

from moorage.schemas import frames
from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import encode
from moorage.schemas.printable import shortened
from moorage.worker.supervisor.protocol import Ended, Output

#: most bytes of output in one frame
OUTPUT_FRAME_BYTES_MAX: Final = 64 * 1024
#: from this number of frames on, both streams of an attempt have one frame each, in whatever order their pieces came
IN_ORDER_MAX: Final = 256
#: seconds between two notes about one attempt, and the length of a note
NOTE_S: Final = 1.0
NOTE_CHARS_MAX: Final = 400
_STREAMS: Final[dict[str, frames.StreamName]] = {"stdout": "out", "stderr": "err"}


class Notes:
    """Publishes notes about an attempt beside its output: the progress of its start, and the addresses of its ports.

    Only clients that follow the attempt now get them. Without `publish` no client does.
    """

    def __init__(self, publish: Callable[[AttemptName, bytes], None] | None) -> None:
        self._publish = publish
        self._said: dict[AttemptName, tuple[float, str]] = {}

    def publish_note(self, name: AttemptName, note: str) -> None:
        """Publish what is being done for an attempt.

        Drop the note if it is the last one again, or the last one is less than `NOTE_S` seconds old.
        """
        now_s = time.monotonic()
        said_s, before = self._said.get(name, (-NOTE_S, ""))
        if note != before and now_s - said_s >= NOTE_S:
            self._said[name] = now_s, note
            self._send(name, note=shortened(note, NOTE_CHARS_MAX))

    def started(self, name: AttemptName, ports: dict[str, str]) -> None:
        """Record that an attempt has started; publish where it is reached, if it publishes ports."""
        self._said.pop(name, None)
        if ports:
            self._send(name, ports=ports)

    def forget(self, name: AttemptName) -> None:
        self._said.pop(name, None)

    def _send(self, name: AttemptName, **fields: Any) -> None:
        if self._publish is not None:
            self._publish(name, encode(frames.Output(name[3], "err", 0, "", **fields)))


class OutputFrames:
    """Pieces of output, combined by attempt and stream. Half a character waits for its other half.

    Pieces may be missing between two others: what waits then is sent alone, at its own offset.
    """

    def __init__(self) -> None:
        self._halves: dict[tuple[AttemptName, str], tuple[int, bytes]] = {}  # offset, and the bytes that wait
        self._pieces: dict[tuple[AttemptName, str], tuple[int, list[bytes], int]] = {}
        self._frames: list[tuple[AttemptName, bytes]] = []

    def add(self, name: AttemptName, event: Output) -> None:
        at = (name, event.stream)
        other = (name, "stderr" if event.stream == "stdout" else "stdout")
        if other in self._pieces and len(self._frames) < IN_ORDER_MAX:
            self._cut(other)  # it arrived before
        offset, pieces, size = self._pieces.get(at, (event.offset, [], 0))
        if pieces and (offset + size != event.offset or size + len(event.data) > OUTPUT_FRAME_BYTES_MAX):
            self._cut(at)
            offset, pieces, size = event.offset, [], 0
        pieces.append(event.data)
        self._pieces[at] = (offset, pieces, size + len(event.data))

    def end(self, name: AttemptName, event: Ended) -> None:
        for stream, size in (("stdout", event.stdout_bytes), ("stderr", event.stderr_bytes)):
            at = (name, stream)
            self._cut(at)
            raw = self._half_before(at, size)
            self._publish_piece(name, stream, size - len(raw), raw.decode(errors="replace"), raw, end=True)

    def take(self) -> list[tuple[AttemptName, bytes]]:
        for at in list(self._pieces):
            self._cut(at)
        frames, self._frames = self._frames, []
        return frames

    def _cut(self, at: tuple[AttemptName, str]) -> None:
        found = self._pieces.pop(at, None)
        if found is None:
            return
        offset, pieces, _ = found
        half = self._half_before(at, offset)
        raw = half + b"".join(pieces)
        offset -= len(half)
        text, taken = codecs.utf_8_decode(raw, "replace")
        if taken < len(raw):
            self._halves[at] = (offset + taken, raw[taken:])
        self._publish_piece(at[0], at[1], offset, text, raw[:taken])

    def _half_before(self, at: tuple[AttemptName, str], offset: int) -> bytes:
        """Return the bytes that wait, and end where this offset begins; send others alone."""
        begin, half = self._halves.pop(at, (offset, b""))
        if begin + len(half) == offset:
            return half
        self._publish_piece(at[0], at[1], begin, half.decode(errors="replace"), half)
        return b""

    def _publish_piece(
        self, name: AttemptName, stream: str, offset: int, text: str, raw: bytes, *, end: bool = False
    ) -> None:
        offset = max(offset, 0)
        data = raw if "\ufffd" in text and text.encode() != raw else None
        behind = offset + len(raw)
        frame = frames.Output(name[3], _STREAMS[stream], offset, text, end=end, next=behind, data=data)
        self._frames.append((name, encode(frame)))
