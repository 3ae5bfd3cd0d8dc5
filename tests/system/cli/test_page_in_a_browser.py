"""`moorage page` in a real browser, over a real node: what a person sees change, and what they see when it stops."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final, Literal

import pytest
from playwright.async_api import expect

from tests.system.cli.browser import PHONE, WIDE, browser, tab
from tests.system.cli.node import Node, node_on
from tests.system.cli.pages import served

pytestmark = pytest.mark.slow
#: what a browser waits for
SEEN_MS = 30_000
#: a browser opens six connections to a host at most
TABS: Final = 7
#: a browser without a screen calls all of its tabs seen
LOOKED_AT: Final = """is_seen => {
  Object.defineProperty(document, "hidden", {configurable: true, value: !is_seen});
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture(name="node", scope="module")
def _node(node_of_its_own: Node) -> Node:
    """What is drawn is the whole fleet."""
    return node_of_its_own


async def test_the_map_changes_by_itself_and_every_address_is_a_page_of_its_own(node: Node, unique: str) -> None:
    async with browser() as running, served(env=node.env()) as page, tab(running, page.url) as seen:
        await seen.page.goto(page.link)
        assert seen.page.url == f"{page.url}/", "the secret does not stay in the address"
        await expect(seen.page.locator("#numbers [data-count=free] b")).to_have_text("8", timeout=SEEN_MS)
        await node.run(
            "submit", "--gpu", "4xH100", "--job", "four", "--", "sh", "-c", "echo here; sleep 600", tenant=unique
        )
        for name in ("one", "two"):
            await node.run("submit", "--gpu", "4xH100", "--job", name, "--", "sleep", "600", tenant=unique)
        await expect(seen.page.locator("#numbers [data-count=free] b")).to_have_text("0", timeout=SEEN_MS)
        await expect(seen.page.locator("#waits")).to_contain_text("busy", timeout=SEEN_MS)
        await expect(seen.page.locator("#unused")).to_contain_text(f"{unique}/four", timeout=SEEN_MS)
        await seen.page.get_by_role("link", name="Queue").click()
        await expect(seen.page.locator("#live")).to_contain_text("QUEUED", timeout=SEEN_MS)
        await seen.page.locator("input[name=filter]").fill("four")
        await seen.page.get_by_role("button", name="show").click()
        assert seen.page.url == f"{page.url}/queue?filter=four&at="
        await expect(seen.page.locator("#live tbody tr")).to_have_count(1, timeout=SEEN_MS)
        await seen.page.get_by_role("link", name=f"{unique}/four").click()
        assert seen.page.url == f"{page.url}/job/{unique}/four"
        await expect(seen.page.locator("#output")).to_contain_text("here", timeout=SEEN_MS)
        await expect(seen.page.locator("#attempts .RUNNING")).to_have_count(1)
        await expect(seen.page.locator("#use svg.spark").first).to_be_visible(timeout=SEEN_MS)
        await node.run("cancel", "four", tenant=unique)
        await expect(seen.page.locator("#facts")).to_contain_text("CANCELLED", timeout=SEEN_MS)
        await seen.page.goto(f"{page.url}/queue?tenant={unique}")
        await expect(seen.page.locator("#ended")).to_contain_text(f"{unique}/four", timeout=SEEN_MS)
        await seen.page.goto(f"{page.url}/lanes")
        await expect(seen.page.locator(f"#lanes a[href='/job/{unique}/four']").first).to_be_attached(timeout=SEEN_MS)
        assert seen.wrong == []
    await node.run("cancel", "one,two", tenant=unique)


#: widths, the taste of who looks, and the colour of the paper
SCREENS: Final[tuple[tuple[int, Literal["light", "dark"], str], ...]] = (
    (WIDE, "light", "rgb(247, 248, 249)"),
    (PHONE, "dark", "rgb(20, 24, 27)"),
)


async def test_no_page_is_wider_than_the_screen(node: Node, unique: str) -> None:
    job = "evaluate-large-model-with-a-long-name-43"
    words = ["--", "sh", "-c", f"echo {'a-long-line-without-a-blank' * 20}; sleep 600"]
    await node.run("submit", "--gpu", "2xH100", "--job", job, *words, tenant=unique)
    paths = "/", "/queue", f"/queue?tenant={unique}", f"/job/{unique}/{job}", "/lanes", "/usage", "/worker/sim-0000"
    async with browser() as running, served("--operate", env=node.env()) as page:
        for wide, taste, paper in SCREENS:
            async with tab(running, page.url, wide, taste) as seen:
                await seen.page.goto(page.link)
                assert await seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
                for path in paths:
                    await seen.page.goto(page.url + path)
                    await expect(seen.page.locator("#head")).to_contain_text("sim: all GPUs are simulated")
                    assert await seen.overflow() <= 0, path
                assert seen.wrong == []
    await node.run("cancel", job, tenant=unique)


async def test_an_order_is_given_with_the_typed_name(node: Node) -> None:
    async with browser() as running, served("--operate", env=node.env()) as page, tab(running, page.url) as seen:
        await seen.page.goto(page.link)
        await seen.page.locator("a[data-worker=sim-0001]").click()
        await seen.page.locator("select[name=verb]").select_option("drain")
        await seen.page.locator("input[name=why]").fill("a new disk")
        await seen.page.locator("input[name=typed]").fill("sim-0001")
        await seen.page.get_by_role("button", name="do it").click()
        await expect(seen.page.locator("#worker")).to_contain_text("drain", timeout=SEEN_MS)
        await seen.page.locator("select[name=verb]").select_option("uncordon")
        await seen.page.locator("input[name=typed]").fill("sim-0001")
        await seen.page.get_by_role("button", name="do it").click()
        await expect(seen.page.locator("#worker small")).to_contain_text("up", timeout=SEEN_MS)
        assert seen.wrong == []


async def test_what_is_not_heard_any_more_is_dimmed_and_comes_back(tmp_path: Path) -> None:
    secret = str(tmp_path / "page.key")
    async with node_on(tmp_path / "up") as node, browser() as running:
        serving = served("--secret-file", secret, env=node.env())
        async with serving as page, tab(running, page.url) as seen:
            await seen.page.goto(page.link)
            hosts = seen.page.locator("a[data-worker]")
            await expect(hosts).to_have_count(2, timeout=SEEN_MS)
            os.kill(node.up.children["scheduler"], signal.SIGSTOP)
            try:
                await expect(seen.page.locator("#verdict")).to_contain_text("no frame of a leader", timeout=SEEN_MS)
                await expect(seen.page.locator("#map .old")).to_have_count(1, timeout=SEEN_MS)
                await expect(hosts).to_have_count(2)
            finally:
                os.kill(node.up.children["scheduler"], signal.SIGCONT)
            await expect(seen.page.locator("#map .old")).to_have_count(0, timeout=SEEN_MS)
            page.process.send_signal(signal.SIGINT)
            await page.process.communicate()
            await expect(seen.page.locator("body.away")).to_have_count(1, timeout=SEEN_MS)
            await expect(hosts).to_have_count(2)
            async with served("--secret-file", secret, env=node.env(), port=page.port):
                await expect(seen.page.locator("body.away")).to_have_count(0, timeout=SEEN_MS)
                await expect(hosts).to_have_count(2)


async def test_a_person_may_have_more_tabs_than_a_browser_opens_connections_to_a_host(node: Node, unique: str) -> None:
    async with browser() as running, served(env=node.env()) as page, tab(running, page.url) as seen:
        await seen.page.goto(page.link)
        tabs = [seen.page]
        for _ in range(TABS):
            await tabs[-1].evaluate(LOOKED_AT, False)
            tabs.append(await seen.page.context.new_page())
            await tabs[-1].goto(f"{page.url}/queue?tenant={unique}", timeout=SEEN_MS)
        await node.run("submit", "--gpu", "1xH100", "--job", "seen", "--", "sleep", "600", tenant=unique)
        await expect(tabs[-1].locator("#live")).to_contain_text("seen", timeout=SEEN_MS)
        await expect(tabs[1].locator("#live")).not_to_contain_text("seen")
        await tabs[1].evaluate(LOOKED_AT, True)
        await expect(tabs[1].locator("#live")).to_contain_text("seen", timeout=SEEN_MS)
        assert seen.wrong == []
    await node.run("cancel", "seen", tenant=unique)


async def test_nothing_stays_on_a_page_that_it_no_longer_has(node: Node, unique: str, tmp_path: Path) -> None:
    secret = str(tmp_path / "page.key")
    async with browser() as running:
        async with served("--secret-file", secret, env=node.env()) as page:
            context = await running.new_context()
            seen = await context.new_page()
            await seen.goto(page.link)
            await seen.goto(f"{page.url}/job/{unique}/later")
            await expect(seen.locator("#trouble")).to_contain_text("later", timeout=SEEN_MS)
        await node.run("submit", "--gpu", "1xH100", "--job", "later", "--", "sleep", "600", tenant=unique)
        async with served("--secret-file", secret, env=node.env(), port=page.port):
            await expect(seen.locator("#facts")).to_contain_text(unique, timeout=SEEN_MS)
            await expect(seen.locator("#trouble")).to_have_count(0)
            ids = await seen.locator("main > div[id]").evaluate_all("all => all.map(each => each.id)")
            assert ids == ["facts", "why", "story", "replicas", "attempts", "use", "charts", "output", "changes"]
    await node.run("cancel", "later", tenant=unique)


async def test_a_sweep_is_a_grid_with_its_failures_first(node: Node, unique: str, tmp_path: Path) -> None:
    words = ["--", "sh", "-c", "test $MOORAGE_INDEX != 7 || (echo no luck >&2; exit 3)"]
    items = tmp_path / "items.txt"
    items.write_text("".join(f"seed-{at}\n" for at in range(40)))
    await node.run("submit", "--job", "grid", "--each-line", str(items), *words, tenant=unique)
    await node.run("wait", "grid", tenant=unique)
    env = node.env() | {"MOORAGE_TENANT": unique}
    async with browser() as running, served(env=env) as page, tab(running, page.url) as seen:
        await seen.page.goto(page.link)
        await seen.page.goto(f"{page.url}/job/{unique}/grid")
        rows = seen.page.locator("#replicas tbody tr")
        await expect(rows).to_have_count(1, timeout=SEEN_MS)
        told = await rows.first.locator("td").all_inner_texts()
        assert told[:4] == ["7", "seed-7", "3", "no luck"]
        await expect(seen.page.locator("#replicas code")).to_have_text("moorage again grid --failed")
        grid = seen.page.locator("#replicas canvas")
        assert await grid.get_attribute("data-letters") == "." * 7 + "F" + "." * 32
        await grid.focus()
        for _ in range(8):
            await seen.page.keyboard.press("ArrowRight")
        of_cell = seen.page.locator(".grid-words")
        await expect(of_cell).to_have_text(f"replica 7: failed, seed-7, code 3, no luck, {told[4]}")
        await seen.page.keyboard.press("ArrowRight")
        await expect(of_cell).to_have_text("replica 8: succeeded")
        failed = seen.page.locator("button[data-letter=F]")
        await failed.click()
        await expect(failed).to_have_attribute("aria-pressed", "true")
        history = seen.page.locator("#history-of")
        was = await history.get_attribute("open")
        await history.locator("summary").click()
        assert await history.get_attribute("open") != was
        assert await seen.overflow() <= 0
        assert seen.wrong == []


async def test_a_tab_tells_what_is_wrong_and_keys_lead_to_it(tmp_path: Path) -> None:
    async with (
        node_on(tmp_path / "up") as node,
        browser() as running,
        served(env=node.env()) as page,
        tab(running, page.url) as seen,
    ):
        await seen.page.goto(page.link)
        await expect(seen.page).to_have_title("moorage fleet", timeout=SEEN_MS)
        well = await seen.page.locator("link[rel=icon]").get_attribute("href")
        assert (await node.run("cordon", "sim-0000")).code == 0
        await expect(seen.page).to_have_title("1 wrong · moorage fleet", timeout=SEEN_MS)
        assert await seen.page.locator("link[rel=icon]").get_attribute("href") != well
        await seen.page.keyboard.press("j")
        assert await seen.page.evaluate("document.activeElement.getAttribute('href')") == "/worker/sim-0000"
        await seen.page.keyboard.press("/")
        assert await seen.page.evaluate("document.activeElement.name") == "filter"
        await seen.page.locator("h2").first.click()
        await seen.page.keyboard.press("?")
        await expect(seen.page.locator("dialog")).to_be_visible()
        assert seen.wrong == []
