"""`moorage top`: what is drawn, and one picture of a real node; the live screen is in `test_top_app.py`."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from msgspec import structs, to_builtins
from rich.cells import cell_len

from moorage.cli.page import draw as page
from moorage.cli.top.draw import (
    AT_FIRST,
    JOBS,
    WAITS,
    Line,
    Target,
    Wishes,
    as_text,
    draw,
    draw_all,
    panes_at_first,
    shared_out,
)
from moorage.cli.top.feed import Feed
from moorage.client import AsyncClient
from moorage.client.view.view import View
from moorage.schemas.frames import FailedLately, ServiceLately
from moorage.schemas.optional import install_extra
from tests.system.cli.node import Node, moorage
from tests.system.cli.top_view import a_view
from tests.waiting import until


@pytest.fixture(name="node", scope="module")
def _node(node_of_its_own: Node) -> Node:
    """What is drawn is the whole fleet."""
    return node_of_its_own


def texts(lines: list[Line]) -> list[str]:
    return [as_text(line) for line in lines]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (160, 50), (60, 16), (200, 24)])
@pytest.mark.parametrize("size", [0, 1, 16, 125])
def test_a_picture_is_never_wider_or_higher_than_the_terminal(columns: int, rows: int, size: int) -> None:
    view = a_view(size, size, size, size)
    lines = texts(draw(view, columns, rows, Wishes(frozenset(range(1, 6)), live=True)).lines)
    assert len(lines) == rows
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (161, 50)])
def test_a_picture_with_wide_letters_is_as_wide_as_any(columns: int, rows: int) -> None:
    view = a_view()
    why = "用了太多的显卡而且没有人知道为什么" * 10
    view = structs.replace(
        view,
        troubles=[structs.replace(view.troubles[0], what=why)],
        waiting=[structs.replace(each, because=why) for each in view.waiting],
    )
    wishes = Wishes(frozenset(range(1, 6)), live=True, cursor=Target("t1", "job-1"))
    lines = texts(draw(view, columns, rows, wishes).lines)
    wide = [line for line in lines if "用了" in line]
    assert len(wide) >= 4
    assert max(map(cell_len, lines)) <= columns
    assert len({cell_len(line.partition(" │ ")[0]) for line in lines if " │ " in line}) <= 1
    assert all(cell_len(line) >= columns // 2 - 2 for line in wide), "they are cut no shorter than they must be"


def test_eighty_by_twenty_four_answers_the_four_questions_without_a_key() -> None:
    text = "\n".join(texts(draw(a_view(), 80, 24, Wishes()).lines))
    assert "sim: all GPUs are simulated" in text
    assert "1 wrong: 3, 1 grave" in text
    assert "n00 GPU 3  xid: Xid 79, since 4m" in text
    assert "2 waits: 12 jobs of 4 tenants" in text
    assert "4xH100 (5 of 64 free)  no L40S (0 of 64 free)" in text
    assert "t0         3      1m  job-0  8xH100     ~4s  busy: 8 more on one host" in text
    assert "t0         3     6      0  12m  idle-0 on n01" in text
    assert "n00 _▄█2··!#" in text


def test_a_tenants_key_has_its_jobs_first_and_a_line_has_the_last_hour() -> None:
    hour: dict[str, list[float | None]] = {"granted": [None] * 90 + [0.0] * 30 + [8.0] * 60, "waiting": [2.0] * 180}
    view = structs.replace(a_view(), own="t0", hour=hour)
    lines = texts(draw(view, 80, 40, Wishes()).lines)
    (said,) = [line for line in lines if line.startswith("last hour")]
    assert said == "last hour  granted       ▁▁████ 8 of 8  waiting ████████████ 2 of 2"
    at = {word: next(at for at, line in enumerate(lines) if word in line) for word in ("5 jobs", "1 wrong", "2 waits")}
    assert min(at, key=at.__getitem__) == "5 jobs"
    assert not any(line.startswith("last hour") for line in texts(draw(a_view(), 80, 24, Wishes()).lines))


def test_a_line_has_what_failed_lately_and_one_the_calls_of_as_many_services_as_have_room() -> None:
    rows = [ServiceLately("acme", f"s{at}", 2, 8, 1, 0, 740, 0, 5, 20) for at in range(5)]
    failing = structs.replace(rows[0], service="embed", errors=3)
    view = structs.replace(a_view(), services=[failing, *rows])
    (line,) = [line for line in texts(draw(view, 80, 24, Wishes()).lines) if line.startswith("calls/min")]
    assert line == "calls/min  acme/embed 740 (3 failed) of 2 members  +5 more"
    (line,) = [line for line in texts(draw(view, 160, 24, Wishes()).lines) if line.startswith("calls/min")]
    assert line.endswith("acme/s2 740 of 2 members  +2 more")
    assert len(line) <= 160
    failed = [FailedLately("vision", 3, "train-42", "TIMED_OUT", 240_000), FailedLately("nlp", 1, "a", "FAILED", 5_000)]
    ill = structs.replace(view, failed=failed)
    lines = texts(draw(ill, 80, 24, Wishes()).lines)
    assert "failed  vision 3, train-42 TIMED_OUT 4m ago  nlp 1, a FAILED 5s ago" in lines
    assert len(lines) == 24
    (html,) = [part.html for part in page.fleet(ill) if part.id == "failed"]
    assert '<a href="/job/vision/train-42"' in html
    (services,) = [part.html for part in page.fleet(view) if part.id == "services"]
    assert services.count("<tr>") == 1 + len(view.services)
    assert "acme/embed" in services
    slow = structs.replace(failing, ran_ms=None, waited_ms=0)
    (services,) = [part.html for part in page.fleet(structs.replace(view, services=[slow])) if part.id == "services"]
    assert '<td class="n">-</td><td class="n">over 1m</td>' in " ".join(services.split()).replace("> <", "><")


def test_what_has_no_room_is_counted_and_each_part_keeps_some_of_it() -> None:
    lines = texts(draw(a_view(125, 40, 40, 40), 80, 24, Wishes()).lines)
    assert any(line.startswith("─ 1 wrong: 40, 1 grave, 32 not shown") for line in lines)
    assert sum("8 more on one host" in line for line in lines) >= 2
    assert shared_out([1, 9, 9], 9) == [1, 4, 4]
    assert shared_out([1, 1], 9) == [1, 1]


def test_of_many_workers_those_with_a_trouble_have_room_first() -> None:
    view = a_view(125, 0, 0, 0)
    well = [structs.replace(worker, cells="···", use=[None] * 3) for worker in view.workers]
    well[99] = structs.replace(well[99], state="draining")
    well[120] = structs.replace(well[120], cells="·!·")
    lines = texts(draw(structs.replace(view, workers=well), 80, 24, Wishes()).lines)
    (first,) = [line for line in lines if "n99" in line]
    assert first.startswith("n99/")
    assert "·!·" in first
    few = structs.replace(view, workers=well[90:100])
    assert any("n99 draining ···" in line for line in texts(draw(few, 80, 24, Wishes()).lines))


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (160, 50), (40, 10)])
def test_several_fleets_have_a_line_each_and_a_column_in_each_part(columns: int, rows: int) -> None:
    quiet = structs.replace(a_view(2, 0, 1, 0), use=None)
    fleets: list[tuple[str, View | str]] = [("lyon", a_view()), ("nats://hall:4222", "cannot reach NATS"), ("b", quiet)]
    wishes = Wishes(frozenset(range(1, 6)), live=True, cursor=Target("t0", "job-0", "b"))
    drawn = draw_all(fleets, columns, rows, wishes)
    lines = texts(drawn.lines)
    assert (len(lines), max(map(cell_len, lines)) <= columns) == (rows, True)
    assert lines[0].startswith("moorage  2 of 3 fleets answer")
    assert [line.split()[0] for line in lines[1:5]] == ["FLEET", "lyon", "nats://hall:4222", "b"]
    assert "cannot reach NATS"[: columns - 18] in lines[3]
    assert lines[2].split()[1:4] == ["128", "20", "100"]
    if rows == 50:
        assert {Target("t0", "job-0", "lyon"), Target("t0", "job-0", "b")} <= set(drawn.targets)
        assert any(line.startswith("FLEET  TENANT  JOBS") for line in lines)
        assert any("lyon n00" in line and "2··!" in line for line in lines)
        marked = [text for line in drawn.lines for text, style in line if style == "reverse"]
        assert len(marked) == 2, "in the part of who waits, and in the list of jobs"
    none = texts(draw_all([("a", "connecting"), ("b", "connecting")], columns, rows, wishes).lines)
    assert none[0] == "moorage  0 of 2 fleets answer"


def test_ascii_has_no_other_sign_and_a_filter_leaves_the_rows_that_match() -> None:
    lines = texts(draw(a_view(), 80, 24, Wishes(ascii=True)).lines)
    assert all(line.isascii() for line in lines)
    assert any("n00 _##2..!#" in line for line in lines)
    drawn = draw(a_view(), 80, 24, Wishes(AT_FIRST, "T1"))
    assert drawn.targets == [Target("t1", "job-1"), Target("t1", "idle-1")]
    without = draw(a_view(), 80, 24, Wishes({WAITS}, "!t1"))
    assert without.targets == [Target("t0", "job-0"), Target("t2", "job-2"), Target("t3", "job-3")]
    (line,) = [line for line in texts(draw(a_view(), 80, 24, Wishes(AT_FIRST, "n07")).lines) if "!#" in line]
    assert line.startswith("n07 ")


def test_a_larger_terminal_shows_more_and_the_cursor_is_on_one_job() -> None:
    assert JOBS not in panes_at_first(80, 24)
    assert JOBS in panes_at_first(160, 50)
    drawn = draw(a_view(), 160, 50, Wishes(panes_at_first(160, 50), cursor=Target("t2", "job-2")))
    assert drawn.targets.count(Target("t2", "job-2")) == 1
    marked = [text for line in drawn.lines for text, style in line if style == "reverse"]
    assert len(marked) == 2, "in the part of who waits, and in the list of jobs"
    assert all("job-2" in text for text in marked)


def test_with_nothing_wrong_one_line_says_so_and_a_moment_of_the_past_says_what_is_not_known() -> None:
    well = structs.replace(a_view(), troubles=[])
    lines = texts(draw(well, 80, 24, Wishes()).lines)
    assert lines.count("nothing is wrong") == 1
    assert not any("1 wrong" in line for line in lines)
    past = structs.replace(well, past=True, ended={"FAILED": 2, "SUCCEEDED": 40}, use=None)
    text = "\n".join(texts(draw(past, 80, 24, Wishes()).lines))
    assert "as it was at 2023-11-14 22:13:20 UTC" in text
    assert "ended in the hour before: 2 FAILED, 40 SUCCEEDED" in text
    assert "use and health of then are not known" in text
    assert "holds GPUs" not in text
    assert "fits now" not in text


@pytest.mark.parametrize("sees_fleet", [True, False])
def test_what_a_key_does_not_show_is_named_in_whole_sentences(sees_fleet: bool) -> None:
    unseen = [
        "jobs, and why they wait: that takes an operator's key, or a tenant's",
        "what is wrong with schedulers, the durable queue and the history: that takes an operator's key",
    ]
    lines = texts(draw(structs.replace(a_view(), unseen=unseen, sees_fleet=sees_fleet), 80, 24, Wishes()).lines)
    assert all(len(line) <= 80 for line in lines)
    text = " ".join(" ".join(lines).split())
    assert all(f"not shown: {what}" in text for what in unseen)


async def test_once_prints_the_fleet_of_a_running_node(node: Node, unique: str) -> None:
    for name in ("one", "two", "three"):
        await node.run("submit", "--gpu", "4xH100", "--job", name, "--", "sleep", "600", tenant=unique)

    async def waits() -> bool:
        frame = (await node.run("top", "--json")).frame
        rows = {row["tenant"]: row for row in frame["waiting"]}
        return unique in rows and "reason" in rows[unique]

    await until(waits, deadline_s=60, what="the third job waits and is explained")
    await is_told_for_how_long(node, unique)
    ran = await node.run("top", "--once")
    assert "? lost" in ran.out.splitlines()[-1], "all signs have room in 80 columns"
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert len(lines) <= 24
    assert all(lines), "no blank lines where nothing has to be at the bottom"
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("moorage  sim: all GPUs are simulated  leader ")
    assert any(line.startswith("fits now") and "H100" in line for line in lines)
    assert any(line.startswith(unique[:12]) and "busy" in line for line in lines), ran.out
    frame = (await node.run("top", "--json")).frame
    assert (frame["kind"], frame["simulated"]) == ("view", "all")
    assert frame["counts"]["gpus"] == 8
    assert {row["worker"] for row in frame["workers"]} >= {"sim-0000", "sim-0001"}
    before = await node.run("top", "--once", "--at", "1h", tenant=unique)
    assert "as it was at" in before.out
    assert "0 of 8 GPUs leased" in before.out
    later = await node.run("top", "--once", "--at", "2999-01-01T00:00")
    assert (later.code, "not a time in the past" in later.err) == (2, True)
    words = await node.run("top", "--once", "--at", "yesterday")
    assert (words.code, "allowed 14:03, 2026-11-21T14:03" in words.err) == (2, True), words.err
    none = await node.run("top", "--once", "--filter", "no-such-thing")
    assert "with no-such-thing: 0" in none.out
    await node.run("cancel", "one,two,three", tenant=unique)


async def is_told_for_how_long(node: Node, tenant: str) -> None:
    """The leader tells it every two seconds: a picture that did not wait for it said `now`."""

    def lasts(rows: list[dict[str, Any]]) -> bool:
        return any(row["for_ms"] >= 1000 for row in rows if row["tenant"] == tenant)

    async with AsyncClient(node.url) as client:
        feed = Feed(client)
        await feed.open()
        heard = await feed.until(lambda: lasts(to_builtins(feed.view().idle)), 60)
        await feed.close()
    assert heard
    assert lasts((await node.run("top", "--once", "--json")).frame["idle"])


async def test_without_a_terminal_or_a_scheduler_it_says_what_to_do(node: Node, nats_url: str) -> None:
    ran = await node.run("top")
    assert ran.code == 1
    assert "fix: print one picture: moorage top --once" in ran.err
    away = await moorage("top", "--once", "--nats", nats_url, "--timeout", "500ms")
    assert away.code == 5
    assert "no-scheduler" in away.err


def test_without_the_package_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moorage.cli.top import verb

    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.setattr(verb, "is_live", lambda _: True)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert verb.top() == 1
    assert f"fix: {install_extra('top')}" in capsys.readouterr().err
