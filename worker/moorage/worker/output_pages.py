"""Return a page of a member's output file, as text if it is text. It reads files, so run it in a thread."""

from __future__ import annotations

import codecs
import os
import stat
from pathlib import Path
from typing import Final

from moorage.schemas.codec import encode
from moorage.schemas.frames import LogPage, ReadLog
from moorage.worker.supervisor.output import NOTICE_BYTES_MAX, cut_at

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
        tail_at = max(about.st_size - NOTICE_BYTES_MAX, 0)
        cut = cut_at(os.pread(descriptor, NOTICE_BYTES_MAX, tail_at), tail_at)
        size = about.st_size if cut is None else cut
        offset = _begin(ask, size)
        raw = os.pread(descriptor, min(ask.limit, size - offset), offset)
    finally:
        os.close(descriptor)
    return _page(ask, offset, raw, size, is_over, is_cut=cut is not None)


def page_of(data: bytes, ask: ReadLog, is_over: bool) -> LogPage:
    """Return the page of a stream that is in memory."""
    offset = _begin(ask, len(data))
    return _page(ask, offset, data[offset : offset + ask.limit], len(data), is_over)


def _begin(ask: ReadLog, size: int) -> int:
    return min(ask.offset, size) if ask.offset >= 0 else max(size + ask.offset, 0)


def _page(ask: ReadLog, offset: int, raw: bytes, size: int, is_over: bool, *, is_cut: bool = False) -> LogPage:
    if ask.offset < 0 and offset:  # begin with a whole character
        skipped = next((at for at, byte in enumerate(raw[:4]) if byte not in _CONTINUATION), 0)
        offset, raw = offset + skipped, raw[skipped:]
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
