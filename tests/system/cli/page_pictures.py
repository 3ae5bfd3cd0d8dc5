"""The pictures of the page in the docs: a fleet with a hundred jobs in trouble of ten kinds, in a real browser.

`python -m tests.system.cli.page_pictures` draws them; `test_pictures_of_trouble` plays it again, and reads what a
person would see.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from socket import gethostname
from typing import Final, Literal, NamedTuple

from tests.system.cli.browser import PHONE, WIDE, browser, tab
from tests.system.cli.node import Node
from tests.system.cli.pages import served
from tests.troubled import LOST, troubled

PICTURES: Final = Path(__file__).resolve().parents[3] / "docs" / "pictures"
#: what each kind of trouble is called on the first page
KINDS: Final = {
    "a GPU has fallen off its bus": "Xid 79",
    "a GPU has memory errors": "memory error",
    "a GPU is too hot": "thermal",
    "a GPU does not answer": "missing",
    "somebody uses a GPU beside moorage": "used by pid 8812 python (user bob)",
    "a host is lost": LOST,
    "a host is drained": "draining",
    "a host takes nothing new": "cordoned",
    "a tenant has reached its limit": "limit",
    "a model is taken": "busy",
    "a holder does nothing": "Holds without using",
}


class Shot(NamedTuple):
    """A picture: its name, the address, the size and the taste of who looks."""

    name: str
    path: str
    wide: int
    scheme: Literal["light", "dark"]
    full: bool = False


SHOTS: Final = (
    Shot("page-fleet", "/", WIDE, "light"),
    Shot("page-fleet-dark", "/", WIDE, "dark"),
    Shot("page-phone", "/", PHONE, "dark"),
    Shot("page-phone-light", "/", PHONE, "light"),
    Shot("page-queue", "/queue", WIDE, "light"),
    Shot("page-job", "/job/vision/fails-0", WIDE, "dark", full=True),
    Shot("page-time", "/lanes?span=5m", WIDE, "light"),
    Shot("page-usage", "/usage", WIDE, "dark"),
    Shot("page-job-phone", "/job/vision/fails-0", PHONE, "light"),
    Shot("page-queue-phone", "/queue", PHONE, "dark"),
)
#: the ones that the docs show
SHOWN: Final = frozenset({"page-fleet", "page-fleet-dark", "page-phone", "page-job"})


async def take(node: Node, folder: Path) -> dict[str, str]:
    """Take all pictures, and return what each page said, by the picture's name; also how much wider it was than the
    screen, and what went wrong in the browser, if anything."""
    said: dict[str, str] = {}
    async with browser() as running, served(env=node.env()) as page:
        for shot in SHOTS:
            async with tab(running, page.url, shot.wide, shot.scheme) as seen:
                await seen.page.goto(page.link)
                if shot.path == "/":
                    await seen.page.get_by_text(LOST, exact=False).first.wait_for(timeout=60_000)
                    await seen.page.get_by_text("limit", exact=False).first.wait_for(timeout=60_000)
                    await seen.page.locator("#unused h2").wait_for(timeout=60_000)
                    await seen.page.locator("#host-n01 .u").first.wait_for(timeout=60_000)
                else:
                    await seen.page.goto(page.url + shot.path)
                    await seen.page.locator("main h2").first.wait_for(timeout=60_000)
                said[shot.name] = await seen.page.inner_text("body")
                found = await seen.overflow(), seen.wrong
                assert found == (0, []), f"{shot.name}: pixels beyond the screen, and what went wrong: {found}"
                # a picture in the docs names no machine that it was taken on
                await seen.page.evaluate(
                    "host => document.body.innerHTML = document.body.innerHTML.replaceAll(host, 'leader n01-')",
                    f"leader {gethostname()}-",
                )
                await seen.page.evaluate(  # the story and the attempts say the same, shorter
                    "for (const each of document.querySelectorAll('details'))"
                    " if (each.innerText.startsWith('History')) each.open = false"
                )
                await seen.page.screenshot(path=folder / f"{shot.name}.png", full_page=shot.full)
    return said


async def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as below:
        async with troubled(Path(below) / "up") as made:
            await take(made.node, folder)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    with tempfile.TemporaryDirectory() as all_:
        asyncio.run(main(Path(all_)))
        for file in Path(all_).iterdir():
            if target != PICTURES or file.stem in SHOWN:
                (target / file.name).write_bytes(file.read_bytes())
