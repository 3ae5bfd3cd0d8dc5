"""The live screen of `moorage top`, driven by its keys over a real node: without a terminal, and once with one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from moorage.cli.top.app import JobPage, Page, Picture, TopApp
from moorage.cli.top.draw import as_text
from moorage.cli.top.feed import Feed
from moorage.client import AsyncClient
from tests.cli.node import Node, processes_of
from tests.cli.terminal import need_tmux, terminal
from tests.waiting import until


@pytest.fixture(name="node", scope="module")
def _node(node_of_its_own: Node) -> Node:
    """What is drawn is the whole fleet."""
    return node_of_its_own


def text(app: TopApp) -> str:
    """What the picture shows."""
    return "\n".join(as_text(line) for line in app.screen_stack[0].query_one(Picture).lines)


@contextlib.asynccontextmanager
async def on(node: Node, tenant: str, size: tuple[int, int] = (80, 24)) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    async with AsyncClient(node.url, tenant=tenant) as client:
        feed = Feed(client)
        await feed.open()
        app = TopApp(client, feed)
        try:
            async with app.run_test(size=size) as pilot:
                yield app, pilot
        finally:
            await feed.close()


def arguments(pid: int) -> list[bytes]:
    return (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")


async def test_the_keys_show_parts_filter_rows_and_open_a_job(node: Node, unique: str) -> None:
    words = ("--gpu", "4xH100", "--job", "one", "--", "sh", "-c", "echo it-began; sleep 600")
    await node.run("submit", *words, tenant=unique)
    await node.run("submit", "--gpu", "8xH100", "--job", "never", "--on-no-match", "wait", "--", "true", tenant=unique)
    async with on(node, unique) as (app, pilot):
        await until(lambda: "never" in text(app) and "4 fleet: 2" in text(app), what="the waiting job is shown")
        assert "sim: all GPUs are simulated" in text(app)
        assert "5 jobs:" not in text(app)
        await pilot.press("5")
        assert "5 jobs:" in text(app)
        await pilot.press("1")
        assert "1 wrong:" not in text(app)
        await pilot.press("slash", *unique[-6:])
        assert f"with {unique[-6:]}" in text(app)
        await pilot.press("enter", "down", "enter")
        page = app.screen
        assert isinstance(page, JobPage)
        await until(lambda: "fix:" in page.text or "WAITS" in page.text, what="why it waits is shown")
        assert "never" in page.text
        await pilot.press("escape", "escape")
        assert "with " not in text(app)
        await pilot.press("question_mark")
        assert type(app.screen) is Page
        await pilot.press("escape")
        assert app.screen is app.screen_stack[0]
        await pilot.press("q")
    assert app.return_code == 0
    await node.run("cancel", "one,never", tenant=unique)


async def test_a_running_job_is_opened_with_its_story_and_the_tail_of_its_output(node: Node, unique: str) -> None:
    words = ("--gpu", "1xH100", "--job", "talks", "--", "sh", "-c", "echo it-began; sleep 600")
    await node.run("submit", *words, tenant=unique)
    async with on(node, unique, (160, 50)) as (app, pilot):
        await until(lambda: "talks" in text(app), what="the job is shown")
        await pilot.press("slash", *unique[-6:], "enter")
        await until(lambda: "talks" in text(app) and "RUNNING" in text(app), what="it runs")
        await pilot.press("down", "enter")
        page = app.screen
        assert isinstance(page, JobPage)
        await until(lambda: "it-began" in page.text, what="the output is shown")
        assert "RUNNING" in page.text
        assert "simulated" in page.text
    await node.run("cancel", "talks", tenant=unique)


@pytest.mark.slow
async def test_on_a_terminal_it_ends_by_q_by_ctrl_c_and_by_a_signal(node: Node) -> None:
    need_tmux()
    async with terminal() as screen:
        screen.window()
        for end in ("q", "C-c", "TERM"):
            screen.type(f"MOORAGE_HOME={node.folder} moorage top")
            shown = await screen.shows("sim: all GPUs are simulated", "4 fleet:", "q quit")
            assert len(shown.splitlines()) == 24
            if end == "TERM":
                (pid,) = [pid for pid in processes_of(f"MOORAGE_HOME={node.folder}\0") if b"top" in arguments(pid)]
                os.kill(pid, signal.SIGTERM)
            else:
                screen.key(end)
            assert "4 fleet:" not in await screen.ended(), "the terminal is as it was"
        screen.type(f"NO_COLOR=1 MOORAGE_HOME={node.folder} moorage top --ascii")
        shown = await screen.shows("sim: all GPUs are simulated", "4 fleet:", "q quit")
        assert shown.isascii()
        assert "[3" not in screen.coloured().replace("\x1b[39m", ""), "no colour was asked for"
        screen.key("q")
        await screen.ended()
