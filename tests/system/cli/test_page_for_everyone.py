"""Each view of the page, at three widths and in both schemes: axe-core finds nothing serious, nothing is cut off."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from playwright.async_api import expect

from tests.system.cli.browser import browser, tab
from tests.system.cli.node import node_on
from tests.system.cli.pages import served
from tests.system.docs.driver import skip_without
from tests.unit.docs.markdown import DOCS, page

pytestmark = [pytest.mark.slow, pytest.mark.long]
INSTALL: Final = ("npm", "install", "--no-audit", "--no-fund", "--silent", "axe-core@4")
WIDTHS: Final = (390, 1024, 1600)
SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
#: what axe-core says of a page, without what is a matter of taste
FOUND: Final = """axe.run().then(told => told.violations
  .filter(each => ["serious", "critical"].includes(each.impact))
  .map(each => `${each.id}: ${each.nodes.slice(0, 3).map(node => node.target.join(" ")).join(", ")}`))"""


async def test_axe_finds_nothing_serious_on_any_view(tmp_path: Path) -> None:
    skip_without(page(DOCS / "examples" / "worker.mjs", "<!-- needs: node npm -->"))
    folder = tmp_path / "npm"
    folder.mkdir()
    await asyncio.to_thread(subprocess.run, INSTALL, cwd=folder, check=True, timeout=300)
    axe = (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()
    async with node_on(tmp_path / "node", simulate="2x4xH100") as node:

        async def submit(job: str, *command: str, gpu: str = "4xH100", more: tuple[str, ...] = ()) -> None:
            ran = await node.run("submit", "--gpu", gpu, "--job", job, *more, "--", *command, tenant="vision")
            assert ran.code == 0, ran.err

        assert (await node.run("admin", "limit", "--gpus", "4", tenant="vision")).code == 0
        await submit("sweep", "sh", "-c", "exit $((MOORAGE_REPLICA % 2))", gpu="1xH100", more=("--replicas", "6"))
        assert (await node.run("wait", "sweep", tenant="vision")).code != 0
        await submit("runs", "sleep", "600")
        await submit("waits", "sleep", "600")
        await submit("web", "sleep", "600", gpu="1xH100", more=("--service", "web", "--priority", "60"))
        jobs = [f"/job/vision/{job}" for job in ("sweep", "runs", "waits", "web")]
        paths = "/", "/queue", *jobs, "/service/vision/web", "/lanes", "/past", "/past?tenant=vision", "/usage"
        wrong: list[Any] = []
        async with browser() as running, served(env=node.env()) as shown:
            for wide in WIDTHS:
                for scheme in SCHEMES:
                    async with tab(running, shown.url, wide, scheme) as seen:
                        await seen.page.goto(shown.link)
                        for path in (*paths, "/worker/sim-0000"):
                            await seen.page.goto(shown.url + path)
                            await expect(seen.page.locator("main h2").first).to_be_visible(timeout=30_000)
                            await seen.page.evaluate(axe)
                            wrong += [(path, wide, scheme, each) for each in await seen.page.evaluate(FOUND)]
                            if (over := await seen.overflow()) > 0:
                                wrong.append((path, wide, scheme, f"{over} px too wide"))
                        wrong += seen.wrong
        assert wrong == []
