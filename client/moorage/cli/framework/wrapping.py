"""Wraps text between words, to the columns of a terminal."""

from __future__ import annotations

import shutil
from typing import TextIO


def in_lines(text: str, room: int, *, breaks: bool = False) -> list[str]:
    """Return the text in lines of at most `room` characters. A longer word is broken if `breaks` is set, and is too
    long otherwise."""
    if len(text) <= room:
        return [text]
    import textwrap

    return textwrap.wrap(text, room, break_long_words=breaks, break_on_hyphens=False)


def folded(text: str, stream: TextIO) -> str:
    """Return the text with lines that a terminal does not wrap within a word. In a pipe nothing changes."""
    if not stream.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.splitlines() for part in in_lines(line, columns) or [""])
