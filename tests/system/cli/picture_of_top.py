"""The pictures of `moorage top`, over a fleet in trouble: `python -m tests.system.cli.picture_of_top` draws them.

What they show is what the live screen draws, at 80 columns and at 160.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path
from typing import Final

from moorage.cli.top.draw import Line, Wishes, as_text, draw, panes_at_first
from moorage.cli.top.feed import Feed
from moorage.client import AsyncClient
from moorage.client.view.view import View
from tests.system.cli.picture import svg
from tests.troubled import EACH, LOST, troubled
from tests.waiting import NeverHappened, until

FOLDER: Final = Path(__file__).resolve().parents[3] / "docs" / "pictures"
LABEL: Final = "moorage top over a fleet of simulated GPUs in trouble: what is wrong, what fits now, who waits and why"
#: the pictures, by name: columns and rows
SIZES: Final = {"top.svg": (80, 24), "top-wide.svg": (160, 50)}
SEEN_S: Final = 60.0
#: what names each kind of trouble, on the wide screen
NAMED: Final = {
    "never": r"10 jobs of audio +can never run as the fleet is",
    "gang": r"llm +10 .* 2x8xH100 ",
    "busy": r"bio +10 .* 8xA100 .*busy",
    "limit": r"search +6 .*limit",
    "held": r"ops +10 .*held",
    "fails": r"10 jobs of vision +fails again and again",
    "idle": r"notebooks +10 +10 +0 ",
    # a GPU that fails may have been one of theirs
    "stalled": r"([5-9]|10) jobs of train +stalled for ",
    "leaves": r"n\d\d +draining .*new disks",
    "lost": rf"{LOST} +(lost|stale).* with \d+ jobs of render",
}
#: and each fault of a GPU
FAULTS: Final = {
    "xid": r"n03 GPU 1 +xid",
    "heat": r"n14 GPU 0 +thermal",
    "taken": r"n08 GPU 7 +used by pid 8812",
    "cordoned": r"n12 +cordoned",
}
#: the small screen has room for so many of them
SMALL_MIN: Final = 7
_SGR: Final = {
    "": "",
    "dim": "2",
    "bold": "1",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
    "reverse": "1",
}


async def view_of(url: str) -> View:
    """Return what a screen sees of the fleet in trouble, once the wide one names all of it, and the small one what it
    has room for."""
    async with AsyncClient(url) as client:
        feed = Feed(client)
        await feed.open()
        try:
            await feed.first()
            missing: list[str] = []

            async def whole() -> View | None:
                await feed.ask()
                view = feed.view()
                missing[:] = unnamed(view)
                return None if missing else view

            try:
                found: View = await until(whole, SEEN_S, "the screens name all of it")
            except NeverHappened as error:
                wide = "\n".join(as_text(line) for line in drawn(feed.view(), *SIZES["top-wide.svg"]))
                raise NeverHappened(f"{error}: not {', '.join(missing)}, in\n{wide}") from None
            return found
        finally:
            await feed.close()


def unnamed(view: View) -> list[str]:
    """Return what of the trouble the screens do not name."""
    small, wide = ("\n".join(as_text(line) for line in drawn(view, *size)) for size in SIZES.values())
    missing = [kind for kind, pattern in (NAMED | FAULTS).items() if not re.search(pattern, wide)]
    missing += [f"why {row} waits" for row in view.waiting if not (row.means or row.because)]
    missing += [] if any(use for worker in view.workers for use in worker.use) else ["use of GPUs"]
    missing += [] if view.sparks and min(map(len, view.sparks.values())) >= EACH // 2 else ["a line of use"]
    named = sum(bool(re.search(pattern, small)) for pattern in (NAMED | FAULTS).values())
    if named < SMALL_MIN or not re.search(NAMED["lost"], small):
        missing.append(f"{SMALL_MIN} of it and {LOST} on the small screen, which names {named}")
    return missing


def drawn(view: View, columns: int, rows: int) -> list[Line]:
    """Return the lines of the live screen."""
    return draw(view, columns, rows, Wishes(panes_at_first(columns, rows), live=True)).lines


def picture(view: View, columns: int, rows: int) -> str:
    """Return the screen as an SVG."""
    lines = [
        "".join(f"\x1b[{_SGR[style]}m{text}\x1b[0m" if style else text for text, style in line)
        for line in drawn(view, columns, rows)
    ]
    return svg("\n".join(lines), LABEL, columns)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with troubled(Path(folder) / "fleet") as made:
            view = await view_of(made.node.url)
    for name, size in SIZES.items():
        (FOLDER / name).write_text(picture(view, *size))
        print(FOLDER / name)


if __name__ == "__main__":
    asyncio.run(main())
