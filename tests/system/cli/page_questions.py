"""Three questions that the page answers to one who sees it for the first time, by clicks from its first screen.

Which replicas of my sweep failed, and why? Is this service healthy, and since when? Both over a real fleet. Was last
week's fleet used well, and whom did it keep waiting? That over a week that is made here, as no test waits for one.
`python -m tests.system.cli.page_questions` takes the pictures of the docs; `test_three_questions` reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from playwright.async_api import Page, expect

from moorage.cli.page import draw, draw_series
from moorage.cli.page.templates import part
from moorage.client import AsyncClient
from moorage.client.errors import ClientError
from moorage.schemas.waited import SeriesAnswer
from tests.system.cli.browser import WIDE, browser, tab
from tests.system.cli.node import Node, node_on
from tests.system.cli.page_pictures import PICTURES
from tests.system.cli.pages import served

SEEN_MS: Final = 30_000
#: a service is sampled each minute, of what the leader tells each ten seconds
SAMPLED_MS: Final = 180_000
TENANT: Final = "vision"
REPLICAS: Final = 200
FAILS: Final = (
    'if [ $(({item} % 23)) = 7 ]; then echo "ValueError: seed {item} diverged" >&2; exit 3; fi; '
    'test {item} != 111 || { echo "CUDA out of memory" >&2; exit 1; }'
)
SERVES: Final = "def shout(data):\n    return data.upper()\n"
STATIC: Final = Path(draw.__file__).with_name("page.css")
HOURS: Final = 7 * 24
HOUR_MS: Final = 3_600_000
NAMELESS: Final = (
    "document.getElementById('head').innerHTML = document.getElementById('head').innerHTML"
    ".replace(/leader \\S+/, 'leader n01-4711')"
)
#: the Monday with which the week begins
MONDAY_MS: Final = 1_795_392_000_000


@contextlib.asynccontextmanager
async def asked(node: Node) -> AsyncIterator[None]:
    """A sweep that has ended, and a service that is called all the time."""
    async with AsyncClient(node.url, tenant=TENANT) as client:
        items = node.folder / "seeds.txt"
        items.write_text("".join(f"{item}\n" for item in range(REPLICAS)))
        words = "--gpu", "1xH100", "--max-failed", "all", "--each-line", str(items), "--", "sh", "-c", FAILS
        await node.run("submit", "--job", "lr-sweep", *words, tenant=TENANT)
        await node.run("wait", "lr-sweep", tenant=TENANT)
        (node.folder / "voice.py").write_text(SERVES)
        serve = {"argv": [sys.executable, "-m", "moorage.cli", "serve", "voice:shout"], "cwd": str(node.folder)}
        env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
        service = {"run": {**serve, "env": env, "ready": {"call": True}}, "gpu": {"count": 1}}
        await client.submit({**service, "service": {"name": "shout", "concurrency": 2}, "replicas": 2}, job="shout-v2")

        async def call() -> None:
            while True:
                with contextlib.suppress(ClientError):
                    await client.call("shout", "hello")
                await asyncio.sleep(0.05)

        calling = asyncio.create_task(call())
        try:
            yield
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)


async def look(node: Node, folder: Path) -> dict[str, str]:
    """Walk from the first screen to each answer, and return what the first screen of each page said; take pictures."""
    said: dict[str, str] = {}
    async with browser() as running, asked(node), served(env=node.env(TENANT)) as page:
        async with tab(running, page.url, WIDE) as seen:
            await seen.page.goto(page.link)
            await seen.page.locator("#failed").get_by_role("link", name="lr-sweep").click(timeout=SEEN_MS)
            await expect(seen.page.locator("#replicas h2")).to_be_visible(timeout=SEEN_MS)
            said["page-sweep"] = await _first_screen(seen.page, "#replicas")
            await _picture(seen.page, folder, "page-sweep")
            await seen.page.get_by_role("link", name="Fleet").click()
            await seen.page.locator("#services").get_by_role("link", name="shout").click(timeout=SEEN_MS)
            await expect(seen.page.locator("#verdict h2")).to_contain_text("is healthy for", timeout=SAMPLED_MS)
            await expect(seen.page.locator("#past svg[role=img]").first).to_be_visible(timeout=SAMPLED_MS)
            said["page-service"] = await _first_screen(seen.page, "#verdict")
            await _picture(seen.page, folder, "page-service")
            await seen.page.get_by_role("link", name="Past").click()
            await seen.page.locator("#past a", has_text="7d").click(timeout=SEEN_MS)
            await expect(seen.page.locator("#summary")).to_contain_text("waited", timeout=SEEN_MS, ignore_case=True)
            assert seen.wrong == []
        for name, scheme in (("page-past", "light"), ("page-past-dark", "dark")):
            async with tab(running, page.url, WIDE, "dark" if scheme == "dark" else "light") as seen:
                await seen.page.set_content(a_week_drawn())
                said[name] = await _first_screen(seen.page, "#summary")
                await seen.page.screenshot(path=folder / f"{name}.png")
    return said


async def _first_screen(page: Page, part: str) -> str:
    """Return what a part says, which has to begin on the first screen and to end there, too."""
    box = await page.locator(part).bounding_box()
    assert box is not None
    assert box["y"] >= 0
    assert box["y"] + min(box["height"], 1) < (page.viewport_size or {"height": 0})["height"]
    return re.sub(r"\s+", " ", await page.locator(part).inner_text())


async def _picture(page: Page, folder: Path, name: str) -> None:
    """Take a picture, which names no machine that it was taken on: the page may name it again at any moment."""
    is_named = True
    while is_named:
        await page.evaluate(NAMELESS)
        await page.screenshot(path=folder / f"{name}.png")
        is_named = "n01-4711" not in await page.inner_text("#head")


def a_week() -> SeriesAnswer:
    """A week of 64 GPUs: much by day, little by night and at the weekend; one tenant waits on Thursday."""
    rows: dict[str, list[float | None]] = {}

    def put(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    for hour in range(HOURS):
        day, by_day = hour // 24, max(0.0, math.sin(math.pi * (hour % 24 - 6) / 14))
        busy = (0.95 if day < 5 else 0.35) * by_day
        late = 20.0 * by_day if day == 3 else 0.0
        vision, speech = 8 + 30 * busy, 4 + 20 * busy
        put("fleet//gpus", 64 if hour != 50 else 56)
        put("fleet//granted", vision + speech)
        put("fleet//used", 0.8 * vision + 0.55 * speech)
        put("fleet//wait_p50", 4 + 20 * late)
        put("fleet//wait_p90", 20 + 90 * late)
        put("cause/full/waiting", 0.7 * late)
        put("cause/limit/waiting", 0.3 * late)
        for tenant, granted, waiting in (("vision", vision, late), ("speech", speech, late / 10)):
            put(f"tenant/{tenant}/granted", granted)
            put(f"tenant/{tenant}/waiting", waiting)
            put(f"tenant/{tenant}/wait_p90", 20 + 90 * waiting)
    return SeriesAnswer(step_ms=HOUR_MS, from_ms=MONDAY_MS, until_ms=MONDAY_MS + HOURS * HOUR_MS, series=rows)


def a_week_drawn() -> str:
    """The page of that week, whole in one document."""
    tabs = draw.tabs(sees_fleet=True, private=True, operates=True)
    head = part("every", "head", words=["leader n01-4711"], sim="", trouble="", wrong=0, grave=0)
    text = draw.document("/past", [head, *draw_series.past(a_week(), "7d")], tabs=tabs, title="moorage past")
    style = f"<style>{STATIC.read_text()}</style>"
    return re.sub(r"<link[^>]*>|<script[^>]*></script>", "", str(text)).replace("</head>", f"{style}</head>")


async def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as below:
        async with node_on(Path(below) / "up", simulate="4x8xH100") as node:
            await look(node, folder)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES))
