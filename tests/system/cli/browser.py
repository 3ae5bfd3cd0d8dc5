"""A real browser without a screen: Debian's Chromium, driven by Playwright. It can reach this machine alone."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from typing import Any, Final, Literal

import pytest
from playwright.async_api import Browser, Page, async_playwright

#: without these, Chromium asks its maker's servers at every start
_QUIET: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
OVER: Final = """Math.max(document.documentElement.scrollWidth - innerWidth,
  ...[...document.querySelectorAll(".card")].map(each => each.scrollWidth - each.clientWidth))"""
WIDE: Final = 1400
PHONE: Final = 420
HIGH: Final = 900


def need_chromium() -> str:
    """Return the browser's path; without it the test is skipped, in CI it fails."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed")
    return path


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    path = need_chromium()
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=path, args=list(_QUIET))
        try:
            yield running
        finally:
            await running.close()


class Tab:
    """A tab with all that went wrong in it: what a script raised, what the console shows, what was asked elsewhere."""

    def __init__(self, page: Page, own: str) -> None:
        self.page = page
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(f"raised: {error}"))
        page.on("console", lambda line: self.wrong.append(f"{line.type}: {line.text}"))
        page.on("request", lambda asked: self._asked(asked.url, own))

    def _asked(self, url: str, own: str) -> None:
        if not url.startswith((own, "data:")):
            self.wrong.append(f"asked {url}")

    async def overflow(self) -> Any:
        """Return by how many pixels the page is wider than the screen, or what is in a card wider than the card."""
        return await self.page.evaluate(OVER)


@contextlib.asynccontextmanager
async def tab(
    running: Browser, own: str, wide: int = WIDE, scheme: Literal["light", "dark"] = "light"
) -> AsyncIterator[Tab]:
    """A tab of its own, as wide as said, of a person with this taste; `own` is the address that it may ask."""
    context = await running.new_context(viewport={"width": wide, "height": HIGH}, color_scheme=scheme)
    try:
        yield Tab(await context.new_page(), own)
    finally:
        await context.close()
