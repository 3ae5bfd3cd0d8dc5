"""The picture of the first page: a session at a real terminal as an SVG. `python -m tests.system.cli.picture` draws it.

`test_picture` plays the session again and compares the text of the picture, but for what differs from run to run.
"""

from __future__ import annotations

import asyncio
import html
import re
from pathlib import Path
from typing import Final

from tests.system.cli.terminal import COLUMNS, terminal

PICTURE: Final = Path(__file__).resolve().parents[3] / "docs" / "pictures" / "session.svg"
#: rows of the terminal: all that is typed, and its answers, fit on it
ROWS: Final = 34
#: pixels of a character, and around the text
WIDE, HIGH, MARGIN = 8.4, 19, 16
PAPER: Final = "#10151c"
INK: Final = "#d7dee8"
#: what SGR 30 to 37 and 90 to 97 stand for
COLOURS: Final = ("#5c6773", "#ff7b72", "#7ee787", "#e3b341", "#79c0ff", "#d2a8ff", "#76e3ea", "#d7dee8")
SESSION: Final = "a terminal: a job runs, another one takes all GPUs, and a third one says why it waits"
_SGR: Final = re.compile(r"\x1b\[([0-9;]*)m")


async def first_screen() -> str:
    """Return the screen after a job that runs, one that takes all GPUs, and one that waits: with its colours."""
    async with terminal(ROWS) as screen:
        screen.type("moorage up --simulate 4x8xH100", window=0)
        await screen.shows("Ctrl-C ends the server, the scheduler, the worker and its jobs", window=0)
        screen.window()
        screen.type("true")  # leaves an empty screen and a prompt
        await screen.ended()
        for line in (
            "moorage run --gpu 2xH100 --job hello -- sh -c 'echo two GPUs for $MOORAGE_JOB'",
            "moorage submit --gpu 8xH100 --replicas 4 --job hog -- sleep 600",
            "moorage submit --gpu 2xH100 --job small -- true",
            "moorage explain small",
        ):
            screen.type(line, clear=False)
            await screen.ended()
        coloured = screen.coloured()
        screen.interrupt(window=0)
        await screen.ended(window=0)
        return coloured


def svg(coloured: str, label: str = SESSION, columns: int = COLUMNS) -> str:
    """Return a screen, with its escape sequences, as an SVG that loads nothing from elsewhere; `label` says what it
    shows."""
    lines = coloured.splitlines()
    width, height = columns * WIDE + 2 * MARGIN, len(lines) * HIGH + 2 * MARGIN
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + HIGH * number + 14}" xml:space="preserve">{_spans(line)}</text>'
        for number, line in enumerate(lines)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img"',
            f'  aria-label="{html.escape(label)}">',
            "<style>text { font: 14px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>',
            f'<g fill="{INK}">',
            *rows,
            "</g>",
            "</svg>",
            "",
        ]
    )


def _spans(line: str) -> str:
    """Return a line of the screen as SVG text, a `tspan` for each piece that has a look of its own."""
    made, at, style = [], 0, ""
    for found in [*_SGR.finditer(line), None]:
        piece = html.escape(line[at : found.start() if found else len(line)], quote=False)
        made.append(f"<tspan {style}>{piece}</tspan>" if piece and style else piece)
        if found is not None:
            at = found.end()
            style = _style(style, found[1] or "")
    return "".join(made)


def _style(now: str, codes: str) -> str:
    """Return the attributes of the text behind an escape sequence for colour or weight."""
    for code in codes.split(";"):
        number = int(code or 0)
        if number == 0:
            now = ""
        elif number == 1:
            now += ' font-weight="bold"'
        elif number == 2:
            now += ' opacity="0.7"'
        elif number in range(30, 38) or number in range(90, 98):
            now += f' fill="{COLOURS[number % 10]}"'
    return now.strip()


def text_of(picture: str) -> str:
    """Return the text that a picture shows, line by line."""
    rows = re.findall(r"<text [^>]*>(.*)</text>", picture)
    return "\n".join(html.unescape(re.sub(r"<[^>]+>", "", row)).rstrip() for row in rows)


if __name__ == "__main__":
    PICTURE.write_text(svg(asyncio.run(first_screen())))
