"""Draws lines in place again and again, for `--watch` on a terminal: never wider or higher than the terminal."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from typing import Final, TextIO

from moorage.cli.framework.console import is_live, plain
from moorage.cli.framework.wrapping import columns_of, cut_off

#: what changes closer together is shown together
APART_S: Final = 0.5
_STYLED: Final = re.compile(r"(\x1b\[[0-9;]*m)")


class Screen:
    """A part of the terminal that is drawn again and again. `live` says whether the stream is a terminal that can do
    this; otherwise do not call `draw`."""

    def __init__(self, stream: TextIO) -> None:
        self.live = is_live(stream)
        self._stream = stream
        self._drawn = 0

    def draw(self, lines: Sequence[str], *, tail: Sequence[str] = (), unseen: int = 0) -> None:
        """Draw these lines in place of those before.

        If they do not fit, the last of `lines` are left out, and never `tail`; a line says how many, `unseen` more
        included.
        """
        columns, rows = shutil.get_terminal_size()
        room = max(rows - 1 - len(tail), 1)
        shown = list(lines)
        if len(shown) + (unseen > 0) > room:
            unseen += len(shown) - room + 1
            del shown[room - 1 :]
        if unseen > 0:
            shown.append(f"… and {unseen:,} more")
        shown += tail
        back = f"\x1b[{self._drawn}F\x1b[J" if self._drawn else ""
        self._stream.write(back + "".join(cut(plain(line), columns) + "\n" for line in shown))
        self._stream.flush()
        self._drawn = len(shown)


def cut(line: str, columns: int) -> str:
    """Return the line cut to `columns` of a terminal, its color codes not counted. If it is cut, its colors are
    ended."""
    left, out = columns, []
    for part in _STYLED.split(line):
        if part.startswith("\x1b"):
            out.append(part)
        elif (wide := columns_of(part)) <= left:
            out.append(part)
            left -= wide
        else:
            out.append(cut_off(part, left) + ("\x1b[0m" if len(out) > 1 else ""))
            break
    return "".join(out)
