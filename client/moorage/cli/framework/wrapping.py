"""How wide text is on a terminal; cuts and wraps it to a terminal's columns."""

from __future__ import annotations

import shutil
from functools import cache
from typing import TextIO


def columns_of(text: str) -> int:
    """Return how many columns the text takes on a terminal: two for each wide letter, as those of Chinese."""
    return len(text) if text.isascii() else sum(map(_columns_of_letter, text))


def fitting(text: str, columns: int) -> str:
    """Return the longest beginning of the text that takes at most so many columns."""
    if text.isascii():
        return text[: max(columns, 0)]
    for at, letter in enumerate(text):
        columns -= _columns_of_letter(letter)
        if columns < 0:
            return text[:at]
    return text


def cut_off(text: str, columns: int) -> str:
    """Return the text, or as much of it as fits before an ellipsis if it takes more than so many columns."""
    return text if columns_of(text) <= columns else fitting(text, columns - 1) + ("…" if columns else "")


def padded(text: str, columns: int, *, right: bool = False) -> str:
    """Return the text with blanks behind it, or before it if it is aligned to the right, up to so many columns."""
    blanks = " " * (columns - columns_of(text))
    return blanks + text if right else text + blanks


@cache
def _columns_of_letter(letter: str) -> int:
    import unicodedata

    return 0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def in_lines(text: str, room: int, *, breaks: bool = False) -> list[str]:
    """Return the text in lines of at most `room` columns. A longer word is broken if `breaks` is set, and is too long
    otherwise."""
    if columns_of(text) <= room:
        return [text]
    import textwrap

    lines = textwrap.wrap(text, room, break_long_words=breaks, break_on_hyphens=False)
    return [part for line in lines for part in _broken(line, room)] if breaks else lines


def _broken(line: str, room: int) -> list[str]:
    """Return a line of at most `room` letters in lines of at most `room` columns."""
    parts = []
    while columns_of(line) > room > 1:
        parts.append(fitting(line, room))
        line = line[len(parts[-1]) :]
    return [*parts, line]


def folded(text: str, stream: TextIO) -> str:
    """Return the text with lines that a terminal does not wrap within a word. In a pipe nothing changes."""
    if not stream.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.splitlines() for part in in_lines(line, columns) or [""])
