"""`moorage page`: what it draws, whom it lets in, and what it lets them do; over a real node, by plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import html
import http.client
import json
import os
import re
import shlex
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlencode

import pytest
from msgspec import structs

from moorage.cli.page import draw, draw_series, draw_service, draw_waits
from moorage.cli.page.doors import Doors
from moorage.cli.page.server import Page
from moorage.cli.page.source import PAGE_ROWS, Source
from moorage.cli.page.templates import Part
from moorage.cli.top.feed import ROUND_S
from moorage.client import AsyncClient
from moorage.client.answers import JobInfo
from moorage.client.errors import FailedReplica, NotFound
from moorage.client.reading import as_struct
from moorage.client.view.lanes import Lanes
from moorage.client.view.view import Trouble, View, WorkerCells
from moorage.schemas.answers.jobs import JobRow
from moorage.schemas.answers.operators import UsageRow
from moorage.schemas.errors import MoorageError
from moorage.schemas.frames import Answer, Device, ServiceLately
from moorage.schemas.optional import install_extra
from moorage.schemas.waited import PlacedWhy, SeriesAnswer, WaitedAnswer, WaitedPart, WaitedRow
from tests.system.cli.node import Node, moorage, node_on
from tests.system.cli.pages import Served, fields_of, served
from tests.system.cli.top_view import a_view
from tests.waiting import until

BAD = '<script>alert("x")</script>'
PUBLIC = "https://fleet.example.com"


def whole(parts: list[Part]) -> str:
    return "".join(part.html for part in parts)


# ------------------------------------------------------------------------------------------------------- drawing


def test_nothing_that_a_host_or_a_tenant_says_becomes_a_part_of_the_page() -> None:
    view = structs.replace(
        a_view(),
        troubles=[Trouble("n00 GPU 3", f"used by pid 1 {BAD}")],
        workers=[WorkerCells("n00", BAD, True, BAD, "#·", [50, None])],
        jobs=[JobRow(tenant="t", job="j", state=BAD, gpu=BAD, worker=BAD, why=BAD, age_ms=1)],
    )
    shown = {
        "job": "j", "tenant": "t", "state": "RUNNING", "request": {"run": {"argv": [BAD]}}, "why": BAD,
        "changes": [{"rev": 1, "time_ms": 1, "replica": 0, "attempt": 1, "state": "PLACED", "worker": BAD, "why": BAD}],
    }  # fmt: skip
    waited = [WaitedPart(cause=BAD, ms=1000)]
    detail = draw.JobDetail(as_struct(JobInfo, shown), None, [], [BAD], waited=WaitedAnswer(parts=waited))
    parts = [draw.head(view, BAD), *draw.fleet(view), *draw.queue(view, "", "")]
    parts += [*draw.worker(view, "n00", [Device(0, "nvidia", BAD, "u")] * 2, None, Lanes(), []), *draw.job(detail, 5)]
    text = whole(parts) + draw.document("/", parts, tabs=[], title=BAD)
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;") > 12


def test_of_very_many_jobs_it_says_how_many_there_are_and_not_how_many_are_listed() -> None:
    view = structs.replace(a_view(), waits=700, live=730, jobs=a_view().jobs * 60)
    view = structs.replace(view, waiting=[structs.replace(row, more=True) for row in view.waiting])
    (*_, waits, _, _) = [part.html for part in draw.fleet(view) if part.id in ("waits", "numbers", "failed")]
    assert "700 jobs of 4 tenants, the oldest 12 listed" in waits
    waiting, live = (part.html for part in draw.queue(view))
    assert ("730 not over, 200 are here" in live, waiting.count(">3+<")) == (True, 4)
    waiting, live = (part.html for part in draw.queue(view, "t1"))
    assert ("at least 60 not over, 60 are here" in live, "3 jobs of the oldest 12" in waiting) == (True, True)
    assert "nobody of the oldest 12" in draw.queue(view, "none")[0].html
    few = structs.replace(a_view(), live=4)
    assert "4 not over<" in draw.queue(few)[1].html
    reasons = [structs.replace(row, tenant="t1", reason=f"r{at}") for at, row in enumerate(few.waiting)]
    used = [UsageRow(gpu_s=at, used_gpu_s=0, tenant=f"t{at}") for at in range(203)]
    assert "and 3 smaller ones" in whole(draw.usage(used, 0, ["tenant"]))
    assert "12 jobs of 1 tenant<" in draw.queue(structs.replace(few, waiting=reasons))[0].html, "each is one row"


def test_a_story_has_each_part_of_the_wait_and_commands_to_paste() -> None:
    shown = {
        "job": "a", "tenant": "t", "state": "SUCCEEDED", "accepted_ms": 1, "ended_ms": 9000, "again": ["a-2"],
        "request": {"run": {"argv": ["sh", "-c", "echo 'x y'"]}, "again_of": "first"},
        "changes": [
            {"rev": 2, "time_ms": 5, "replica": 0, "attempt": 1, "state": "PLACED", "worker": "n1", "gpus": ["u", "v"]},
        ],
    }  # fmt: skip
    parts = [WaitedPart(cause="full", own=False, ms=3000), WaitedPart(cause="limit", ms=1000)]
    why = PlacedWhy(together=3, workers=12, free_left=1)
    html_ = draw_waits.story(as_struct(JobInfo, shown), WaitedAnswer(parts=parts, placed=why)).html
    assert re.findall(r'class="(w-[a-z]+)" x="([0-9.]+)%" width="([0-9.]+)%"', html_) == [
        ("w-full", "0.00", "75.00"), ("w-limit", "75.00", "25.00"),
    ]  # fmt: skip
    for said in (
        "3s all GPUs",
        "(another tenant)",
        "1s a limit",
        "2 GPUs",
        "/worker/n1",
        "why there: of 12 workers known; it kept 1 GPU free, placed with 2 other replicas",
        "/job/t/first",
        "/job/t/a-2",
    ):
        assert said in html_
    copied = [html.unescape(each) for each in re.findall(r'data-copy="([^"]*)"', html_)]
    assert copied == [shlex.join(["sh", "-c", "echo 'x y'"]), "moorage logs a", "moorage again a"]


def test_waits_are_bars_by_week_and_cause_beside_their_hours_in_words() -> None:
    rows = [
        WaitedRow(week_ms=week, cause=cause, wait_s=wait_s, gpu_s=2 * wait_s, jobs=1)
        for week, cause, wait_s in ((0, "full", 3600.0), (0, "limit", 1800.0), (604_800_000, "full", 1800.0))
    ]
    (waits,) = draw_waits.waits(rows, 0)
    assert re.findall(r'class="(w-[a-z]+)" x="([0-9.]+)%" width="([0-9.]+)%"', waits.html)[:2] == [
        ("w-full", "0.00", "33.33"), ("w-full", "0.00", "33.33"),
    ]  # fmt: skip
    assert "full: all GPUs that would do were taken before it came: 1.00 h" in waits.html
    assert "1.50 h" in waits.html


def test_a_day_is_drawn_as_layers_with_their_numbers_in_words_and_what_is_unknown_is_left_open() -> None:
    series: dict[str, list[float | None]] = {
        "fleet//gpus": [8, 8, None, 8],
        "fleet//granted": [4, 8, None, 0],
        "cause/full/waiting": [1, 1, 1, 1],
        f"tenant/{BAD}/granted": [0, 2, 2, 0],
        **{f"tenant/t{at}/granted": [at, 1, 1, 1] for at in range(1, 12)},
    }
    told = SeriesAnswer(step_ms=60_000, from_ms=0, until_ms=240_000, series=series)
    (summary, past) = draw_series.past(told, "1d")
    assert "<script>alert" not in past.html
    (gpus, granted, *_) = re.findall(r'<path class="s-[a-z]+" d="([^"]*)">', past.html)
    assert gpus.count("M") == granted.count("M") == 2, "what is unknown is a gap"
    assert gpus.startswith("M0.0,0.0L250.0,0.0L500.0,0.0L500.0,220.0"), "eight of eight GPUs are at the top"
    assert '<td class="n">4</td><td class="n">8</td><td class="n">0</td>' in past.html, "mean, most and last"
    assert "full: all GPUs" in past.html
    assert "(others)" in past.html, "the smallest of many tenants are one layer"
    (_, own) = draw_series.past(told, "1d", "t1")
    assert "GPUs there" not in own.html
    for said in ("<b>8</b> GPUs there", "<b>50 %</b> granted"):
        assert said in summary.html
    assert "most of all for: all GPUs" in summary.html
    zeros = SeriesAnswer(from_ms=0, until_ms=600_000, step_ms=300_000, series={"fleet//gpus": [0.0, 0.0]})
    assert "up to 0<" in draw_series.past(zeros, "1d")[1].html
    nothing = draw_series.past(SeriesAnswer(), "1d")[1].html
    assert ("nothing so far" in nothing, "a point is" in nothing, "<td" in nothing) == (True, False, False)


def test_the_past_says_whom_the_fleet_kept_waiting_the_longest_first() -> None:
    series: dict[str, list[float | None]] = {
        "fleet//gpus": [8, 8], "fleet//granted": [8, 4], "fleet//used": [2, None],
        "tenant/a/waiting": [0, 0], "tenant/b/waiting": [3, 3], "tenant/b/wait_p90": [120, None],
        "tenant/c/waiting": [5, 5],
    }  # fmt: skip
    told = SeriesAnswer(step_ms=1_800_000, from_ms=0, until_ms=3_600_000, series=series)
    summary, past = draw_series.past(told, "7d")
    rows = re.findall(
        r"<tr><td><a[^>]*>(\w)</a></td>\s*<td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)<", summary.html
    )
    assert rows == [("c", "5", "5", "-"), ("b", "3", "3", "2m")]
    assert "<b>25 %</b> used" in summary.html
    assert "/past?span=1d" in past.html


def a_service(*errors: float, members: float = 2) -> SeriesAnswer:
    """An hour of a service with 10 calls a second, and these of them that failed in each of its minutes."""
    rows: dict[str, list[float | None]] = {
        "calls": [10.0] * len(errors), "errors": [*errors], "members": [members] * len(errors),
        "ran_p50": [20.0] * len(errors), "ran_p95": [None] * len(errors),
    }  # fmt: skip
    named = {f"service/t/s/{name}": row for name, row in rows.items()}
    return SeriesAnswer(step_ms=60_000, from_ms=0, until_ms=len(errors) * 60_000, series=named)


@pytest.mark.parametrize(
    ("errors", "now", "said"),
    [
        ((1, 1, 0, 0, 0.05), 1, "is healthy</span> <small>for 3m, since 1970-01-01 00:02 UTC"),
        ((0, 0, 0, 2, 2), 240, "is failing: 40 % of its calls</span> <small>for 2m, since 1970-01-01 00:03 UTC"),
        ((0, 0), None, "has no member that answers</span>"),
    ],
)
def test_a_service_is_healthy_or_not_since_a_moment(errors: tuple[float, ...], now: int | None, said: str) -> None:
    told = a_service(*errors)
    lately = None if now is None else ServiceLately("t", "s", 2, 4, 1, 0, 600, now, 1, 20, "its-job")
    verdict, charts = draw_service.service("t", "s", draw_service.ServiceDetail(told, [told], lately, None), "1h")
    assert said in re.sub(r"\s+", " ", verdict.html).replace(" </span>", "</span>")
    assert ("/job/t/its-job" in verdict.html) == (now is not None)
    assert "/service/t/s?span=7d" in charts.html
    assert "half ran at most" in charts.html


def test_a_job_has_a_chart_of_each_number_that_it_reported() -> None:
    rows: dict[str, list[float | None]] = {
        "job/a/used": [10, 50, None], "job/a/memory_mib": [1024, 2048, None],
        "job/a/reported:val/loss": [None, 3, -1], f"job/a/reported:{BAD}": [1, 1, 1],
    }  # fmt: skip
    life = draw_series.of_job(SeriesAnswer(step_ms=10_000, from_ms=0, until_ms=30_000, series=rows)).html
    assert "<script>alert" not in life
    assert '<td class="n">1.5</td><td class="n">2</td><td class="n">2</td>' in life, "of memory, in GiB"
    (loss,) = re.findall(r'<path class="s-line" d="([^"]*)"><title>val/loss', life)
    assert loss == "M333.3,0.0L666.7,220.0h333.3", "a line from the most to the least"
    assert "<small>-1 to 3</small>" in life
    assert draw_series.of_job(SeriesAnswer()).html == ""


def test_failures_are_told_by_kind_with_their_items() -> None:
    failed = [FailedReplica(at, "FAILED", 3, "", f"seed-{at}", f"step {at}: nan", "n1") for at in (4, 17)]
    failed.append(FailedReplica(9, "FAILED", 1, "out of memory", "seed-9", "", "n1"))
    assert [(each["count"], each["code"], each["said"], each["of"], each["names"]) for each in draw._kinds(failed)] == [
        (2, 3, "step #: nan", "items", "seed-4, seed-17"), (1, 1, "out of memory", "items", "seed-9"),
    ]  # fmt: skip


def test_a_trouble_leads_to_the_page_of_what_has_it() -> None:
    troubles = [Trouble("n01 GPU 3", "sick"), Trouble("acme/train-42", "fails again"), Trouble("scheduler", "is away")]
    troubles.append(Trouble("10 jobs of acme", "can never run"))
    (verdict, *_) = draw.fleet(structs.replace(a_view(), troubles=troubles))
    assert re.findall(r'href="([^"]*)"', verdict.html) == ["/worker/n01", "/job/acme/train-42", "/queue?tenant=acme"]


def test_a_late_answer_is_said_and_dims_nothing() -> None:
    """The style sheet dims a page whose head has a trouble."""
    heads = [draw.head(a_view(), "some of it is old", late=late).html for late in (True, False)]
    assert ["some of it is old" in html for html in heads] == [True, True]
    assert ['class="trouble"' in html for html in heads] == [False, True]


def test_a_cell_has_a_word_and_a_sign_and_only_a_host_that_changed_is_sent_again() -> None:
    def view(cells: str, use: list[int | None]) -> View:
        workers = [
            WorkerCells("n1", "up", True, "H100", cells, use),
            WorkerCells("n2", "lost", True, "H100", "??", [None] * 2),
        ]
        return structs.replace(a_view(), workers=workers)

    before = {part.id: part for part in draw.fleet(view("#2·!x", [40, 10, None, None, None]))}
    for word in ("GPU 0: leased, used 40 %", "GPU 1: 2 jobs share it, used 10 %", "GPU 2: free", "GPU 3: sick", ">x<"):
        assert word in before["host-n1"].html
    assert 'class="host gone"' in before["host-n2"].html
    after = {part.id: part for part in draw.fleet(view("#2·!x", [0, 10, None, None, None]))}
    changed = {id for id in after if after[id].key != before[id].key}
    assert changed == {"host-n1"}
    assert "unused" in after["host-n1"].html


async def test_a_worker_that_is_not_there_has_no_devices_and_no_task_fails_for_it() -> None:
    """The leader answers with no row. The page's task ended with an IndexError, which nobody read."""

    async def operate(verb: str, asked: Any) -> Answer:
        return Answer(verb, 0, {"workers": []})

    source = Source(cast(AsyncClient, SimpleNamespace(_wire=SimpleNamespace(operate=operate))), {})
    assert await source.devices("nobody") == []
    assert isinstance(source._kept["devices", "nobody"].error, NotFound)


async def test_a_fault_of_the_page_itself_is_logged_once_and_shown_and_it_asks_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its task ended with the first one, and the page stood still without a word."""
    monkeypatch.setattr("moorage.cli.page.source.ROUND_S", 0)
    source = Source(cast(AsyncClient, SimpleNamespace(_wire=SimpleNamespace())), {})
    seen: list[str] = []
    enough = asyncio.Event()

    async def ask() -> None:
        seen.append(source.trouble)
        if len(seen) <= 3:
            raise KeyError("cells")
        if len(seen) == 5:
            enough.set()

    monkeypatch.setattr(source.feed, "ask", ask)
    source.feed.model.sees_fleet = False  # no frame is waited for
    asking = asyncio.create_task(source.keep_asking())
    async with asyncio.timeout(60), source.watching():
        await enough.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    told = "error[internal]: the page failed at a round of questions: KeyError: 'cells'"
    assert seen[:5] == ["", told, told, told, ""]
    assert [(record.levelname, record.exc_info is not None) for record in caplog.records] == [("ERROR", True)]


async def test_after_a_while_unwatched_what_was_listed_before_is_drawn_at_once_and_says_from_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moorage.cli.page.source.ROUND_S", 0)
    source = Source(cast(AsyncClient, SimpleNamespace(_wire=SimpleNamespace())), {})
    may_answer, asked = asyncio.Event(), asyncio.Event()
    may_answer.set()

    async def ask() -> None:
        asked.set()
        await may_answer.wait()
        source.feed.listed, source.feed.listed_s = source.feed.listed + 1, time.monotonic()
        source.feed.heard.set()

    monkeypatch.setattr(source.feed, "ask", ask)
    source.feed.model.sees_fleet = False  # no frame is waited for
    asking = asyncio.create_task(source.keep_asking())
    async with asyncio.timeout(60):
        async with source.watching():
            assert source.feed.listed
            assert not source.told()
        await until(lambda: not source._watched.is_set())
        asked.clear()
        may_answer.clear()
        source.feed.listed_s -= 60
        async with source.watching():
            await asked.wait()
            listed_s = source.view().at_ms / 1000 - 60  # a minute may end between this view and the next one
            minutes = {time.strftime("%H:%M", time.gmtime(listed_s + off_s)) for off_s in (-1, 1)}
            assert source.told()[:-7] in {f"some of this page is as of {minute}" for minute in minutes}, source.told()
            assert not source.told(past=True), "a moment of the past is as it was"
            source.trouble = "no leader"
            assert source.told().startswith("no leader; some of this page is as of ")
            source.trouble = ""
            may_answer.set()
            assert await source.feed.until(lambda: not source.told(), 60)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def test_charts_of_an_answer_stay_as_they_were_drawn_until_the_next_one_comes() -> None:
    page = Page(cast(Source, None), cast(Doors, None), "", operates=False)
    first = SeriesAnswer(until_ms=10_000, step_ms=10_000, series={"fleet//gpus": [4.0]})
    drawn = page._past_of(first, "1h", "")
    assert page._past_of(first, "1h", "") is drawn
    assert page._past_of(first, "1d", "") is not drawn
    after = page._past_of(structs.replace(first, series={"fleet//gpus": [8.0]}), "1h", "")
    assert [part.key for part in after] != [part.key for part in drawn]


async def test_a_page_says_from_when_an_old_answer_is_and_draws_it_until_the_next_one_comes() -> None:
    may_answer = asyncio.Event()
    may_answer.set()

    async def operate(verb: str, asked: Any) -> Answer:
        await may_answer.wait()
        return Answer(verb, 0, {"jobs": []})

    source = Source(cast(AsyncClient, SimpleNamespace(_wire=SimpleNamespace(operate=operate))), {})
    source.feed.operates = True
    with source.ages() as ages:
        await source.ended("", "")
    assert not ages
    may_answer.clear()
    kept = source._kept["ended", "", ""]
    kept.at_s, kept.came_s = kept.at_s - 3600, kept.came_s - 3600
    with source.ages() as ages:
        await asyncio.gather(source.ended("", ""), source.ended("", ""))
    assert ages == [kept.came_s] * 2
    assert source.told(ages, past=True).startswith("some of this page is as of ")
    may_answer.set()
    assert kept.task is not None
    await kept.task
    with source.ages() as ages:
        await source.ended("", "")
    assert not ages


async def test_a_fault_at_one_question_is_shown_there(caplog: pytest.LogCaptureFixture) -> None:
    async def operate(verb: str, asked: Any) -> Answer:
        raise KeyError("cells")

    source = Source(cast(AsyncClient, SimpleNamespace(_wire=SimpleNamespace(operate=operate))), {})
    with pytest.raises(MoorageError, match="the page failed at a question: KeyError"):
        await source.ended("", "")
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize(("behind", "older"), [([], ""), (["old"], "h:0:0")])
async def test_older_jobs_are_offered_where_there_are_some(behind: list[str], older: str) -> None:
    """The leader names a next page wherever the history may have more, and a page of it may be empty."""
    pages = {"": (["new"], "h:0:0"), "h:0:0": ([], "h:7:0"), "h:7:0": (behind, "")}

    async def operate(verb: str, asked: Any) -> Answer:
        jobs, after = pages[asked["after"]]
        rows = [{"tenant": "t", "job": job, "state": "FAILED"} for job in jobs]
        return Answer(verb, 0, {"jobs": rows, "next": after})

    source = Source(cast(AsyncClient, SimpleNamespace(_wire=SimpleNamespace(operate=operate))), {})
    listed = await source.ended("t", "")
    assert ([row.job for row in listed.jobs], listed.next) == (["new"], older)


# ------------------------------------------------------------------------------------------------------ the doors


@pytest.fixture(name="node", scope="module")
def _node(node_of_its_own: Node) -> Node:
    """What is drawn is the whole fleet."""
    return node_of_its_own


async def test_without_the_link_nothing_is_shown_and_with_it_every_page_is(node: Node, unique: str) -> None:
    await node.run("submit", "--gpu", "1xH100", "--job", "runs", "--", "sleep", "600", tenant=unique)
    async with served(env=node.env()) as page:
        for path in ("/", "/queue", f"/job/{unique}/runs", "/live/", "/live/queue"):
            got = await page.get(path)
            assert (got.status, unique in got.text) == (403, False)
            assert "open the link" in got.text
        wrong = await page.get("/?key=guess", Cookie=f"moorage-page-{page.port}=guess.guess")
        assert wrong.status == 403
        opened = await page.get(f"/?key={page.key}")
        assert (opened.status, opened.headers["location"]) == (303, "/")
        assert opened.cookie.startswith(f"moorage-page-{page.port}="), "another page of this host has one of its own"
        assert "HttpOnly" in opened.headers["set-cookie"]
        assert "samesite=strict" in opened.headers["set-cookie"].lower()

        async def shown(path: str) -> str:
            got = await page.get(path, Cookie=opened.cookie)
            assert got.status == 200, got.text
            assert "default-src 'none'" in got.headers["content-security-policy"]
            assert "sim: all GPUs are simulated" in got.text
            assert not re.findall(r'(?:src|href|action)="(?!/|data:,)', got.text)
            assert 'action="/act"' not in got.text, "it only shows"
            return got.text

        assert 'data-worker="sim-0000"' in await shown("/")
        assert f"{unique}/runs" in await shown(f"/queue?tenant={unique}")
        assert "sleep 600" in await shown(f"/job/{unique}/runs")
        assert "sim-0001 3" in await shown("/lanes")
        assert "GPU-H" in await shown("/usage?since=1h&by=tenant")
        assert "NVIDIA H100" in await shown("/worker/sim-0000")
        assert "no job nobody of tenant" in await shown(f"/job/{unique}/nobody")
        assert "no worker nobody" in await shown("/worker/nobody")
        assert "no such page" in (await page.get("/nothing", Cookie=opened.cookie)).text
    await node.run("cancel", "runs", tenant=unique)


async def test_it_answers_under_names_of_this_machine_alone(node: Node) -> None:
    async with served(env=node.env()) as page:
        got = await page.get("/", Host=f"evil.example:{page.port}")
        assert got.status == 421
        assert (await page.get("/", Host=f"localhost:{page.port}")).status == 403


@contextlib.asynccontextmanager
async def proxied(
    node: Node, folder: Path, *more: str, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[Served, str]]:
    """A page that trusts a proxy on this host, and the secret by which that proves itself."""
    file = folder / "proxy.key"
    words = ("--trusted-proxy", address, "--proxy-secret-file", str(file), "--public-url", PUBLIC, *more)
    async with served(*words, env=node.env()) as page:
        yield page, file.read_text()


async def test_a_name_is_believed_from_a_proxy_that_proves_itself_alone(node: Node, tmp_path: Path) -> None:
    async with proxied(node, tmp_path, address="192.0.2.7") as (page, secret):
        assert (await page.get("/", X_Forwarded_User="ana", X_Moorage_Proxy=secret)).status == 403
    async with proxied(node, tmp_path, "--name-header", "X-Who") as (page, secret):
        assert stat.S_IMODE((tmp_path / "proxy.key").stat().st_mode) == 0o600
        assert (await page.get("/", X_Who="ana")).status == 403, "every job of this host asks from that address"
        assert (await page.get("/", X_Who="ana", X_Moorage_Proxy=secret[:-1])).status == 403
        assert (await page.get("/", X_Who="ana", X_Moorage_Proxy="")).status == 403
        assert (await page.get("/", X_Forwarded_User="ana", X_Moorage_Proxy=secret)).status == 403
        assert (await page.get("/", X_Who="ana", X_Moorage_Proxy=secret)).status == 200
        (tmp_path / "proxy.key").write_text("another-secret-of-the-proxy")
        assert (await page.get("/", X_Who="ana", X_Moorage_Proxy=secret)).status == 403
        assert (await page.get("/", X_Who="ana", X_Moorage_Proxy="another-secret-of-the-proxy")).status == 200


async def test_behind_a_proxy_it_answers_under_its_public_name_alone(node: Node, tmp_path: Path) -> None:
    async with proxied(node, tmp_path) as (page, secret):
        shown = {"X_Forwarded_User": "ana", "X_Moorage_Proxy": secret}
        got = await page.get("/", Host="evil.example", **shown)
        assert (got.status, "fleet.example.com" in got.text) == (421, True)
        assert (await page.get("/", Host="[::1", **shown)).status == 421
        for host in ("fleet.example.com", f"127.0.0.1:{page.port}"):
            assert (await page.get("/", Host=host, **shown)).status == 200
    async with served("--public-url", PUBLIC, env=node.env()) as page:
        assert (await page.get("/", Host="evil.example")).status == 421
        assert (await page.get("/", Host="fleet.example.com")).status == 403


async def test_the_cookie_of_a_public_page_needs_tls(node: Node, tmp_path: Path) -> None:
    async with proxied(node, tmp_path) as (page, secret):
        link = f"/?key={page.key}"
        public = await page.get(link, Host="fleet.example.com")
        rewritten = await page.get(link, X_Moorage_Proxy=secret)
        here = await page.get(link)
        assert ["secure" in got.headers["set-cookie"].lower() for got in (public, rewritten, here)] == [
            True,
            True,
            False,
        ]
        assert (await page.get("/", Host="fleet.example.com", Cookie=public.cookie)).status == 200


async def test_logout_ends_every_browser_every_stream_and_the_link(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "page.key"
    async with served("--secret-file", str(file), env=node.env()) as page:
        cookie = await page.entered()
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
        connection.request("GET", "/live/", headers={"Cookie": cookie})
        stream = connection.getresponse()
        assert await asyncio.to_thread(stream.readline)
        ran = await moorage("page", "logout", "--secret-file", str(file), env=node.env())
        assert (ran.code, "page logout --all" in ran.err) == (2, True)
        assert (await page.get("/", Cookie=cookie)).status == 200
        ran = await moorage("page", "logout", "--all", "--secret-file", str(file), env=node.env())
        assert ran.code == 0, ran.err
        await asyncio.to_thread(stream.read)  # it ends
        connection.close()
        assert (await page.get("/", Cookie=cookie)).status == 403
        assert (await page.get(f"/?key={page.key}")).status == 403
        assert f"page at {page.url}/?key={file.read_text()}" in await page.err.until(file.read_text())
        page.key = file.read_text()
        assert (await page.get("/", Cookie=await page.entered())).status == 200
    ran = await moorage("page", "logout", "--all", "--secret-file", str(tmp_path / "none"), env=node.env())
    assert (ran.code, "is no file with the secret" in ran.err) == (1, True), ran.err
    assert not (tmp_path / "none").exists()


async def test_the_secret_of_a_file_holds_after_a_restart(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "page.key"
    async with served("--secret-file", str(file), env=node.env()) as page:
        cookie = await page.entered()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    async with served("--secret-file", str(file), env=node.env(), port=page.port) as page:
        assert page.key == file.read_text()
        assert (await page.get("/", Cookie=cookie)).status == 200
    file.write_text("short")
    ran = await moorage("page", "--listen", "0", "--secret-file", str(file), env=node.env())
    assert ran.code == 1
    assert "delete the file" in ran.err


async def test_orders_need_operate_a_form_of_this_page_and_the_typed_name(node: Node, tmp_path: Path) -> None:
    async def flag() -> str:
        rows = (await node.run("fleet", "sim-0001", "--json")).frame["data"]["workers"]
        return str(rows[0]["flag"])

    order = {"verb": "cordon", "worker": "sim-0001", "typed": "sim-0001", "why": "a new disk"}
    async with served(env=node.env()) as page:
        got = await page.post("/act", order, Cookie=await page.entered())
        assert (got.status, "without --operate" in got.text) == (403, True)
    async with proxied(node, tmp_path, "--operate") as (page, secret):
        cookie = await page.entered()
        fields = {**order, **fields_of((await page.get("/worker/sim-0001", Cookie=cookie)).text)}
        other = fields_of((await page.get("/worker/sim-0001", Cookie=await page.entered())).text)
        assert (await page.post("/act", fields)).status == 403
        assert (await page.post("/act", {**fields, "token": ""}, Cookie=cookie)).status == 403
        assert (await page.post("/act", {**fields, "token": other["token"]}, Cookie=cookie)).status == 403
        assert (await page.post("/act", fields, Cookie=cookie, Origin="http://evil.example")).status == 403
        assert (await page.get(f"/act?{fields['token']}", Cookie=cookie)).status in (404, 405)
        got = await page.post("/act", {**fields, "typed": "sim-0000"}, Cookie=cookie)
        assert (got.status, "fix: go back, and type the name" in got.text) == (409, True)
        got = await page.post("/act", {**fields, "verb": "limit"}, Cookie=cookie)
        assert (got.status, "no such order" in got.text) == (409, True)
        assert await flag() == "open"
        got = await page.post("/act", fields, Cookie=cookie, Origin=page.url)
        assert (got.status, got.headers["location"]) == (303, "/worker/sim-0001")
        assert await flag() == "cordoned"
        path = "/live/worker/sim-0001"
        parts = await asyncio.to_thread(read_until, page, path, cookie, "a new disk")
        assert "cordoned for " in parts["worker"], "who looks at the host reads since when, by whom and why"
        bob = {"X_Forwarded_User": "bob", "X_Moorage_Proxy": secret}
        named = fields_of((await page.get("/worker/sim-0001", **bob)).text)
        undo = {**order, **named, "verb": "uncordon"}
        assert (await page.post("/act", undo, X_Forwarded_User="bob")).status == 403
        assert (await page.post("/act", undo, **{**bob, "X_Forwarded_User": "eve"})).status == 403
        assert (await page.post("/act", undo, Origin="https://evil.example", **bob)).status == 403
        assert (await page.post("/act", undo, Origin=PUBLIC, **bob)).status == 303
        assert await flag() == "open"
        replayed = (await node.run("replay", "--json")).out
        assert '"bob"' in replayed or "bob" in replayed, "the ledger has the name that the proxy gave"


# ------------------------------------------------------------------------------------------------------- the stream


def read_until(page: Served, path: str, cookie: str, wanted: str) -> dict[str, str]:
    """Read a page's stream until a part has `wanted`, and return all parts as a browser has them then."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    parts: dict[str, str] = {}
    try:
        connection.request("GET", path, headers={"Cookie": cookie})
        answer = connection.getresponse()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        while line := answer.readline():
            if line.startswith(b"data: "):
                parts |= json.loads(line[6:])["parts"]
                if any(wanted in html for html in parts.values()):
                    return parts
        raise AssertionError(f"the stream ended without {wanted!r}")
    finally:
        connection.close()


async def test_a_stream_tells_all_parts_and_then_what_changes(node: Node, unique: str) -> None:
    import asyncio

    async with served(env=node.env()) as page:
        cookie = await page.entered()
        first = await asyncio.to_thread(read_until, page, "/live/", cookie, "8</b>free")
        assert {"head", "verdict", "numbers", "map", "unused"} <= first.keys()
        reading = asyncio.create_task(asyncio.to_thread(read_until, page, "/live/", cookie, "GPU 3: leased, used 0 %"))
        await node.run("submit", "--gpu", "4xH100", "--job", "all", "--", "sleep", "600", tenant=unique)
        seen = await reading
        assert any(id.startswith("host-sim-") for id in seen)
        await node.run("cancel", "all", tenant=unique)
        nothing = await page.get("/live/nothing", Cookie=cookie)
        assert nothing.status == 204, "a browser does not ask again"


async def test_jobs_that_are_over_come_in_pages_of_the_leader(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        jobs = [await client.submit(["true"], job=f"over-{at:02d}", gpu="1xH100") for at in range(PAGE_ROWS + 3)]
        await client.wait(jobs, "60s")
    async with served(env=node.env()) as page:
        cookie = await page.entered()
        first = (await page.get(f"/queue?tenant={unique}", Cookie=cookie)).text
        assert len(set(re.findall(r"over-\d\d", first))) == PAGE_ROWS
        (older,) = re.findall(r'href="(/queue\?[^"]*)">older', first)
        second = (await page.get(html.unescape(older), Cookie=cookie)).text
        assert set(re.findall(r"over-\d\d", second)) == {"over-00", "over-01", "over-02"}
        assert f"{unique}/over-{PAGE_ROWS}" in (await page.get("/queue", Cookie=cookie)).text, "of all tenants"
        wrong = (await page.get(f"/queue?tenant={unique}&after=nonsense", Cookie=cookie)).text
        assert "must be the `next` of the page before" in wrong


async def test_a_sweep_has_the_counts_that_the_list_of_jobs_has(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        fails = "test $MOORAGE_INDEX != 2 || { echo out of memory >&2; exit 1; }"
        sweep = await client.submit(["sh", "-c", fails], job="sweep", replicas=4)
        await client.wait([sweep], "60s")
        await (await sweep.again(failed=True)).cancel()
    async with served(env=node.env()) as page:
        cookie = await page.entered()
        assert "done 4 (1 failed: 2)" in (await page.get(f"/queue?tenant={unique}", Cookie=cookie)).text
        text = (await page.get(f"/job/{unique}/sweep", Cookie=cookie)).text
        said = '<td class="below">out of memory</td>'  # where a key may read the output of all tenants
        for words in ("done 4 (1 failed: 2)", "sweep-again-1", "1 of 4 failed", said):
            assert words in text, words


async def test_an_address_may_name_a_moment_of_the_past(node: Node, unique: str) -> None:
    await node.run("submit", "--gpu", "2xH100", "--job", "was", "--", "sleep", "600", tenant=unique)

    async def state() -> str:
        return str((await node.run("show", "was", "--json", tenant=unique)).frame["data"]["state"])

    async def is_in(wanted: str) -> bool:
        return await state() == wanted

    await until(lambda: is_in("RUNNING"), 60, "the job runs")
    then = datetime.now(UTC).isoformat()
    await node.run("cancel", "was", tenant=unique)
    await until(lambda: is_in("CANCELLED"), 60, "the job is over")
    async with served(env=node.env()) as page:
        cookie = await page.entered()

        async def shows_it() -> bool:
            asked = urlencode({"at": then, "tenant": unique})
            return f"{unique}/was" in (await page.get(f"/queue?{asked}", Cookie=cookie)).text.partition("live")[2]

        await until(shows_it, 60, "the history has the job")
        text = (await page.get(f"/?{urlencode({'at': then})}", Cookie=cookie)).text
        assert "as it was at" in text
        assert text.count("leased, use not known") >= 2
        assert "sim: all GPUs are simulated" in text
        assert "Fits now" not in text
        wrong = (await page.get("/?at=nonsense", Cookie=cookie)).text
        assert "error[invalid-argument]" in wrong
        for path in (f"/job/{unique}/was", "/worker/sim-0001", "/usage"):  # they show what is now
            text = (await page.get(f"{path}?{urlencode({'at': then})}", Cookie=cookie)).text
            assert ("shown at / and /queue alone" in text, "as it was at" in text) == (True, False), path


@pytest.mark.slow
async def test_nothing_is_asked_while_nobody_looks(node: Node) -> None:
    asked_s: list[float] = []
    async with AsyncClient(node.url) as client, served(env=node.env()) as page:
        await client._wire.subscribe("moorage.admin.*.fleet", lambda _: asked_s.append(time.monotonic()))
        cookie = await page.entered()
        await until(lambda: not asked_s or time.monotonic() - asked_s[-1] > 3 * ROUND_S, 60, "nobody has looked yet")
        before = len(asked_s)
        assert "8</b>free" in (await page.get("/", Cookie=cookie)).text
        await until(lambda: len(asked_s) > before, 60, "a page that is opened begins with an answer")
        await until(lambda: time.monotonic() - asked_s[-1] > 3 * ROUND_S, 60, "the questions end behind it")


async def test_what_it_cannot_do_is_said_before_it_serves(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (("--listen", "page"), "no address with a port"),
        (("--listen", "host.example:80"), "no address with a port"),
        (("--trusted-proxy", "proxy", "--proxy-secret-file", "x", "--public-url", PUBLIC), "is no address"),
        (("--trusted-proxy", "127.0.0.1"), "takes --proxy-secret-file FILE and --public-url URL too"),
        (("--trusted-proxy", "127.0.0.1", "--public-url", PUBLIC), "takes --proxy-secret-file FILE too"),
        (("--proxy-secret-file", "x"), "is for --trusted-proxy"),
        (("--public-url", "fleet.example.com"), "is no URL of a page"),
        (("--public-url", "https://fleet.example.com/gpus"), "is no URL of a page"),
        (("--public-url", "https://fleet.example.com:x"), "is no URL of a page"),
        (("--output-of", "vision"), "names no key"),
        (("--listen", "203.0.113.9:9480"), "cannot listen"),
    ):
        ran = await moorage("page", *words, env=node.env())
        assert (ran.code != 0, said in ran.err) == (True, True), ran.err
    from moorage.cli.page import verb

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert verb.page() == 1
    assert f"fix: {install_extra('page')}" in capsys.readouterr().err


async def test_while_nobody_leads_the_page_says_so_and_keeps_what_it_had(tmp_path: Path) -> None:
    async with node_on(tmp_path / "up") as node, served("--timeout", "2s", env=node.env()) as page:
        cookie = await page.entered()
        await node.run("submit", "--gpu", "1xH100", "--job", "stays", "--", "sleep", "600")
        kept = {
            "/": 'data-worker="sim-0001"',
            "/queue": "default/stays",
            "/job/default/stays": "sleep 600",
            "/usage": "GPU-H",
        }

        async def texts() -> dict[str, str]:
            return {path: (await page.get(path, Cookie=cookie)).text for path in kept}

        async def has_all() -> bool:
            return all(kept[path] in text and 'class="trouble"' not in text for path, text in (await texts()).items())

        await until(has_all, 60, "each page has what it shows")
        leader = node.up.children["scheduler"]
        os.kill(leader, signal.SIGSTOP)  # it says nothing more, and no worker leaves before

        async def is_told() -> bool:
            found = await texts()
            return "no frame of a leader for" in found["/"] and all(
                'class="trouble"' in each for each in found.values()
            )

        try:
            await until(is_told, 60, "each page says that nobody answers")
            after = await texts()
            assert "The numbers are on their way." in (await page.get("/past", Cookie=cookie)).text
            assert "on their way" not in (await page.get("/past?print", Cookie=cookie)).text
        finally:
            os.kill(leader, signal.SIGCONT)
        await asyncio.to_thread(read_until, page, "/live/past", cookie, 'class="charts"')
        assert [path for path in kept if kept[path] not in after[path]] == [], after
        assert 'class="old"' in after["/"]
