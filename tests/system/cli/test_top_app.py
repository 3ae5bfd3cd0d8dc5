"""The live screen of `moorage top`, driven by its keys over a real node: without a terminal, and once with one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec import structs
from textual.pilot import Pilot

from moorage.cli.top.app import AskedPage, Page, Picture, TopApp
from moorage.cli.top.commands import Act, Command, command_of
from moorage.cli.top.draw import Target, as_text
from moorage.cli.top.feed import Feed
from moorage.cli.top.watched import Watched
from moorage.client import AsyncClient
from moorage.schemas.answers.jobs import JobRow
from tests.system.cli.node import Node, processes_of
from tests.system.cli.terminal import need_tmux, terminal
from tests.system.cli.top_view import a_view
from tests.waiting import until


@pytest.fixture(name="node", scope="module")
def _node(node_of_its_own: Node) -> Node:
    """What is drawn is the whole fleet."""
    return node_of_its_own


def text(app: TopApp) -> str:
    """What the picture shows."""
    return "\n".join(as_text(line) for line in app.screen_stack[0].query_one(Picture).lines)


def jobs_of(app: TopApp) -> list[JobRow]:
    feed = app._fleets[0].feed
    assert feed is not None
    return feed.view().jobs


@contextlib.asynccontextmanager
async def on(
    node: Node, tenant: str, size: tuple[int, int] = (80, 24), *, operates: bool = False
) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    async with AsyncClient(node.url, tenant=tenant) as client:
        feed = Feed(client)
        await feed.open()
        app = TopApp([Watched(client, feed)], operates=operates)
        try:
            async with app.run_test(size=size) as pilot:
                await until(lambda: list(app.screen_stack[0].query(Picture)), what="the picture is there to be asked")
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
        await until(lambda: f"with {unique[-6:]}" in text(app), what="its rows alone")
        await pilot.press("enter", "down", "enter")
        await until(lambda: isinstance(app.screen, AskedPage), what="its page")
        page = app.screen
        assert isinstance(page, AskedPage)
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


async def test_a_running_job_is_opened_with_its_history_and_the_tail_of_its_output(node: Node, unique: str) -> None:
    words = ("--gpu", "1xH100", "--job", "talks", "--", "sh", "-c", "echo it-began; sleep 600")
    await node.run("submit", *words, tenant=unique)
    async with on(node, unique, (160, 50)) as (app, pilot):
        await until(lambda: "talks" in text(app), what="the job is shown")
        await pilot.press("slash", *unique[-6:], "enter")
        await until(lambda: "talks" in text(app) and "RUNNING" in text(app), what="it runs")
        await pilot.press("down", "enter")
        await until(lambda: isinstance(app.screen, AskedPage), what="its page")
        page = app.screen
        assert isinstance(page, AskedPage)
        await until(lambda: "it-began" in page.text, what="the output is shown")
        assert "RUNNING" in page.text
        assert "simulated" in page.text
    await node.run("cancel", "talks", tenant=unique)


async def typed(pilot: Pilot[None], line: str) -> None:
    """Type a line behind `:`, and Enter."""
    names = {" ": "space", "-": "minus", "/": "slash", ":": "colon"}
    await pilot.press("colon", *(names.get(sign, sign) for sign in line), "enter")


async def test_a_colon_goes_to_a_worker_a_job_a_tenant_and_a_time(node: Node, unique: str) -> None:
    job = f"{unique}-job"
    await node.run("submit", "--gpu", "1xH100", "--job", job, "--", "sleep", "600", tenant=unique)
    async with on(node, unique, (160, 50)) as (app, pilot):
        await until(lambda: job in text(app) and "RUNNING" in text(app), what="the job is shown")
        await typed(pilot, job)
        await until(lambda: isinstance(app.screen, AskedPage), what="the job's page")
        await pilot.press("escape")
        worker = next(row.worker for row in jobs_of(app) if row.job == job)
        await typed(pilot, worker)
        await until(lambda: isinstance(page := app.screen, AskedPage) and job in page.text, what="whose jobs it has")
        await pilot.press("escape")
        await typed(pilot, unique)
        await until(lambda: f"filter {unique}" in text(app), what="its rows alone")
        await pilot.press("escape")
        await typed(pilot, "jobs")
        await until(lambda: "4 fleet:" not in text(app), what="the jobs alone")
        await pilot.press("s")
        await until(lambda: "jobs by wait" in text(app), what="the next order")
        await typed(pilot, "no-such-thing")
        await until(lambda: "no job, worker, tenant or part here is called no-such-thing" in text(app), what="a word")
        await typed(pilot, "at 1h")
        await until(lambda: "as it was at" in text(app), what="the past is shown")
        await typed(pilot, "now")
        await until(lambda: "as it was at" not in text(app), what="the present is shown")
        await typed(pilot, f"cordon {worker}")
        await until(lambda: "this screen only reads" in text(app), what="a refusal")
    await node.run("cancel", job, tenant=unique)


async def test_an_operators_act_takes_the_name_typed_again(node: Node, unique: str) -> None:
    async with on(node, unique, operates=True) as (app, pilot):
        await until(lambda: "sim-0001" in text(app), what="the workers are shown")
        await typed(pilot, "cordon sim-0001")
        await pilot.press(*"sim", "enter")
        await until(lambda: "not done: sim is not sim-0001" in text(app), what="a refusal")
        await typed(pilot, "cordon sim-0001")
        await pilot.press(*"sim", "minus", *"0001", "enter")
        await until(lambda: "cordon sim-0001: done" in text(app), what="it is done")
        await until(lambda: "cordoned" in text(app), what="it is seen")
        await typed(pilot, "uncordon sim-0001")
        await pilot.press(*"sim", "minus", *"0001", "enter")
        await until(lambda: "uncordon sim-0001: done" in text(app), what="it is undone")


def test_what_a_line_behind_the_colon_means() -> None:
    jobs = [JobRow(tenant=tenant, job="train-1", state="RUNNING") for tenant in "ab"]
    view = structs.replace(a_view(3, 0, 2, 0), jobs=jobs)
    for line, meant in {
        "n01": Command(worker="n01"),
        "a/train-1": Command(job=Target("a", "train-1")),
        "b": Command(tenant="b"),
        "jobs": Command(pane=5),
        "3": Command(pane=3),
        "at 14:03": Command(at="14:03"),
        "now": Command(now=True),
        "drain n02 new disks": Command(act=Act("drain", "n02", "new disks")),
        "hold a/train-1": Command(act=Act("hold", "a/train-1", "")),
    }.items():
        assert command_of(line, view) == meant, line
    for line in ("", "n", "train-1", "at", "drain", "drain n99", "hold train-1", "nothing"):
        assert command_of(line, view).trouble, line


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
