"""The pictures of `moorage top`, over a fleet in trouble: `python -m tests.system.cli.picture_of_top` draws them.

What they show is what the live screen draws, at 80 columns and at 160.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

from moorage.cli.top.draw import Line, Wishes, draw, panes_at_first
from moorage.cli.top.feed import Feed
from moorage.client import AsyncClient
from moorage.client.view.view import View
from tests.system.cli.picture import svg
from tests.troubled import EACH, troubled
from tests.waiting import until

FOLDER: Final = Path(__file__).resolve().parents[3] / "docs" / "pictures"
LABEL: Final = "moorage top over a fleet of simulated GPUs in trouble: what is wrong, what fits now, who waits and why"
#: the pictures, by name: columns and rows
SIZES: Final = {"top.svg": (80, 24), "top-wide.svg": (160, 50)}
SEEN_S: Final = 60.0
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
    """Return what a screen sees of the fleet in trouble, once it has seen all of it: reasons, use, and causes."""
    async with AsyncClient(url) as client:
        feed = Feed(client)
        await feed.open()
        try:
            await feed.first()

            async def whole() -> View | None:
                await feed.ask()
                view = feed.view()
                reads = all(row.means or row.because for row in view.waiting) and len(view.waiting) >= 6
                used = any(use for worker in view.workers for use in worker.use)
                fails = any("fails again and again" in trouble.what for trouble in view.troubles)
                lasts = bool(view.sparks) and min(map(len, view.sparks.values())) >= EACH // 2
                return view if reads and used and fails and lasts else None

            found: View = await until(whole, SEEN_S, "the screen has seen all of it")
            return found
        finally:
            await feed.close()


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
