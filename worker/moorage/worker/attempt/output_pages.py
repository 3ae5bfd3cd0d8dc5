"""Return a page of an attempt's output file, as text if it is text. It reads files, so run it in a thread."""

from __future__ import annotations

import codecs
import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.codec import encode
from moorage.schemas.frames import LogPage, ReadLog
from moorage.worker.supervisor.capped_output import NOTICE_BYTES_MAX, RING_BYTES, RING_READS_MAX, Ring, cut_at, ring_in

#: how much larger than its bytes a text may be in JSON; beyond that base64 is used. Control characters grow sixfold
_GROWTH_MAX: Final = 2
_CONTINUATION: Final = range(0x80, 0xC0)


def read_page(path: Path, ask: ReadLog, is_over: bool) -> LogPage | None:
    """Return the requested page; None if there is no file. `is_over`: the file was complete before this call.

    Raises OSError for a file that is not regular or cannot be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"{path} is not a plain file")
        if (ring := ring_in(descriptor, about.st_size)) is not None:
            return _ring_page(descriptor, ring, ask, is_over)
        tail_at = max(about.st_size - NOTICE_BYTES_MAX, 0)
        cut = cut_at(os.pread(descriptor, NOTICE_BYTES_MAX, tail_at), tail_at)
        size = about.st_size if cut is None else cut
        offset = _begin(ask, size)
        raw = os.pread(descriptor, min(ask.limit, size - offset), offset)
    finally:
        os.close(descriptor)
    is_empty = is_over and about.st_size == 0  # a file is made with its first byte: there was no room for it
    return _page(ask, offset, raw, size, is_over, is_cut=cut is not None or is_empty)


def _ring_page(descriptor: int, ring: Ring, ask: ReadLog, is_over: bool) -> LogPage:
    """Return a page of a file that holds the beginning and the end of a stream, while it may be written.

    Raises OSError if what is asked for is overwritten again and again.
    """
    for _ in range(RING_READS_MAX):
        offset = min(ask.offset, ring.end) if ask.offset >= 0 else max(ring.end + ask.offset, ring.low)
        is_head = offset < ring.head
        if not is_head and offset <= ring.low:
            offset = ring.low
        count = min(ask.limit, (ring.head if is_head else ring.end) - offset)
        parts = [(offset, count)] if is_head else ring.parts(offset, count)
        raw = b"".join(os.pread(descriptor, size, at) for at, size in parts)
        now = ring_in(descriptor, ring.cap + RING_BYTES)
        if is_head or (now is not None and now.low <= offset):
            break
        ring = now or ring
    else:
        raise OSError("the output is overwritten faster than it can be read")
    if not is_head and offset == ring.low:
        offset, raw = _whole_characters(offset, raw)
    page = _page(ask, offset, raw, ring.end, is_over, is_cut=True)
    return msgspec.structs.replace(page, cut_from=ring.head, cut_to=ring.low)


def page_of(data: bytes, ask: ReadLog, is_over: bool) -> LogPage:
    """Return the page of a stream that is in memory."""
    offset = _begin(ask, len(data))
    return _page(ask, offset, data[offset : offset + ask.limit], len(data), is_over)


def _begin(ask: ReadLog, size: int) -> int:
    return min(ask.offset, size) if ask.offset >= 0 else max(size + ask.offset, 0)


def _page(ask: ReadLog, offset: int, raw: bytes, size: int, is_over: bool, *, is_cut: bool = False) -> LogPage:
    if ask.offset < 0 and offset:  # begin with a whole character
        offset, raw = _whole_characters(offset, raw)
    text, taken = _text(raw, is_over and offset + len(raw) == size)
    if text is None:
        taken = len(raw)
    return LogPage(
        ask.attempt,
        ask.stream,
        offset,
        offset + taken,
        size,
        text or "",
        raw if text is None else None,
        over=is_over and offset + taken == size,
        truncated=is_cut,
    )


def _whole_characters(offset: int, raw: bytes) -> tuple[int, bytes]:
    """Leave out the rest of a character with which the bytes begin."""
    skipped = next((at for at, byte in enumerate(raw[:4]) if byte not in _CONTINUATION), 0)
    return offset + skipped, raw[skipped:]


def _text(raw: bytes, is_last: bool) -> tuple[str | None, int]:
    """Return (text, its number of bytes); (None, 0) for bytes that are not UTF-8, or would grow too much.

    A character that is cut at the end is left to the next page, unless there is nothing else.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        text = decoder.decode(raw, final=is_last)
    except UnicodeDecodeError:
        return None, 0
    left = len(decoder.getstate()[0])
    if raw and left == len(raw):
        return None, 0
    if len(encode(text)) > _GROWTH_MAX * len(raw) + 2:
        return None, 0
    return text, len(raw) - left
