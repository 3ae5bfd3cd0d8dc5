"""`wait`, `events` and `ls --watch`, against a real node: what they print, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import msgspec
import pytest

from moorage.cli.framework.options import RowOptions
from moorage.cli.jobs import ls_watch
from moorage.cli.jobs.listing import Listing
from moorage.client import AsyncClient, NoScheduler
from moorage.client.errors import Overloaded, client_problem
from moorage.schemas.errors import problem
from moorage.schemas.frames import Answer
from moorage.testing import SimFleet
from tests.system.cli.node import Lines, Node, node_on, on_a_terminal, start, until_shown
from tests.waiting import until, until_state


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [(["exit", "0"], 0), (["exit", "3"], 3), (["exit", "-15"], 143)])
async def test_a_wait_ends_with_the_jobs_own_code(node: Node, unique: str, words: list[str], code: int) -> None:
    submitted = await node.run("submit", "--driver", "noop", "--", *words, tenant=unique)
    ran = await node.run("wait", submitted.out.strip()[:12], tenant=unique)
    assert ran.code == code, ran.err
    assert ran.rows[0][:2] == [submitted.out.strip(), "SUCCEEDED" if code == 0 else "FAILED"]


@pytest.mark.slow
async def test_of_several_the_first_named_that_failed_decides(node: Node, unique: str) -> None:
    for name, words in (("a", ("sleep", "0.2", "5")), ("b", ("exit", "0")), ("c", ("exit", "7"))):
        await node.run("submit", "--job", name, "--driver", "noop", "--", *words, tenant=unique)
    ran = await node.run("wait", "b,a", "c", tenant=unique)
    assert ran.code == 5, ran.err
    assert sorted(row[0] for row in ran.rows) == ["a", "b", "c"]
    assert "3 jobs ended, 2 of them not SUCCEEDED" in ran.err
    shown = await node.run("wait", "last", "--json", tenant=unique)
    assert (shown.frame["verb"], shown.frame["data"]["job"], shown.code) == ("show", "c", 7)


async def test_the_end_of_several_replicas_is_told_with_how_many_failed_and_why(node: Node, unique: str) -> None:
    script = 'test "$MOORAGE_INDEX" -lt 2 && exit 7; sleep 600'
    await node.run(
        "submit", "--job", "few", "--replicas", "3", "--max-failed", "2", "--", "sh", "-c", script, tenant=unique
    )
    for _ in ("while it runs", "once it has ended"):
        ran = await node.run("wait", "few", tenant=unique)
        why = "2 of 3 failed, 1 cancelled: 2 replicas failed, and max_failed is 2"
        assert (ran.code, ran.rows) == (7, [["few", "FAILED", "7", why]]), ran.err


@pytest.mark.slow
async def test_a_wait_that_is_too_long_is_exit_code_6_and_no_job_is_3(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "long", "--driver", "noop", "--", "hang", tenant=unique)
    ran = await node.run("wait", "all", "--at-most", "200ms", tenant=unique)
    assert (ran.code, ran.err.startswith("error[timed-out]: 1 of 1 jobs")) == (6, True)
    assert (await node.run("wait", "nobody", tenant=unique)).code == 3
    assert (await node.run("cancel", "all", tenant=unique)).rows == [["long", "cancelling, the job was RUNNING"]]
    assert (await node.run("wait", "long", tenant=unique)).code != 0
    over = await node.run("wait", "all", tenant=unique)
    assert (over.code, over.out, "all its jobs have ended" in over.err) == (0, "", True)


@pytest.mark.slow
async def test_ctrl_c_ends_the_waiting_and_no_job(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "a", "--driver", "noop", "--", "exit", "0", tenant=unique)
    await node.run("submit", "--job", "b", "--driver", "noop", "--", "hang", tenant=unique)
    process = await start("wait", "a,b", env=node.env(unique))
    await Lines(process.stdout).until("SUCCEEDED")
    process.send_signal(signal.SIGINT)
    await Lines(process.stderr).until("the jobs go on")
    assert await process.wait() == 130
    async with AsyncClient(node.url, tenant=unique) as client:
        await until_state(client.job("b"), "RUNNING")
    await node.run("cancel", "b", tenant=unique)


@pytest.mark.slow
async def test_an_explanation_is_watched_until_the_job_is_over(node: Node, unique: str) -> None:
    await node.run(
        "submit", "--job", "w", "--gpu", "1xZ9000", "--on-no-match", "wait", "--driver", "noop", tenant=unique
    )
    process = await start("explain", "w", "--watch", env=node.env(unique))
    lines = Lines(process.stdout)
    await lines.until("model: ")
    await node.run("cancel", "w", "--reason", "enough", tenant=unique)
    await lines.until("CANCELLED")
    assert await process.wait() == 0
    rows = [line.split("\t") for line in lines.text.splitlines()]
    assert [row[:2] for row in (rows[0], rows[-1])] == [["w", "QUEUED"], ["w", "CANCELLED"]]
    again = await node.run("explain", "w", "--watch", "--json", tenant=unique)
    assert again.frame["data"]["state"] == "CANCELLED"


@pytest.mark.slow
async def test_the_tenants_events_are_heard_as_lines_and_as_frames(node: Node, unique: str) -> None:
    text = await start("events", env=node.env(unique))
    frames = await start("events", "--json", env=node.env(unique))
    lines, json_lines = Lines(text.stdout), Lines(frames.stdout)
    heard = asyncio.gather(lines.until("SUCCEEDED"), json_lines.until("SUCCEEDED"))
    assert text.stderr is not None
    said = f"telling the state changes of tenant {unique} from now on; Ctrl-C ends it\n"
    assert (await text.stderr.readline()).decode() == said
    at = 0
    while not heard.done():  # they say so before they listen
        at += 1
        await node.run("submit", "--job", f"e{at}", "--driver", "noop", tenant=unique)
    await heard
    row = lines.text.splitlines()[0].split("\t")
    assert (row[0][-1], row[1][0], len(row)) == ("Z", "e", 9)
    frame = msgspec.json.decode(json_lines.text.splitlines()[0])
    assert (frame["kind"], frame["tenant"]) == ("event", unique)
    for process in (text, frames):
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130


@pytest.mark.slow
async def test_the_tenants_events_say_where_the_connection_was_lost(tmp_path: Path) -> None:
    """What happened meanwhile was left out, and nothing told of it."""
    async with node_on(tmp_path / "up", simulate="1xH100") as node:
        process = await start("events", env=node.env())
        said = Lines(process.stderr)
        await said.until("Ctrl-C ends it")
        server = node.up.children["nats-server"]
        os.kill(server, signal.SIGKILL)
        await until(lambda: node.up.children["nats-server"] not in (0, server), what="another server")
        at = 0
        while "the connection was lost meanwhile" not in said.text:  # until it listens again
            at += 1
            await node.run("submit", "--job", f"after-{at}", "--driver", "noop", "--timeout", "60s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await said.until("the connection was lost meanwhile")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130


@pytest.mark.slow
async def test_one_jobs_events_are_its_whole_history_and_end(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "history", "--gpu", "1xH100", "--driver", "noop", tenant=unique)
    ran = await node.run("events", "hist", tenant=unique)
    assert [row[4] for row in ran.rows] == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
    assert ran.rows[1][5].endswith(" sim")


@pytest.mark.slow
async def test_a_watched_list_tells_each_change_once(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "seen", "--driver", "noop", "--", "hang", tenant=unique)
    process = await start("ls", "--watch", env=node.env(unique))
    lines = Lines(process.stdout)
    await lines.until("RUNNING")
    await node.run("cancel", "seen", tenant=unique)
    await lines.until("CANCELLED")
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130
    rows = [line.split("\t") for line in lines.text.splitlines()]
    states = [row[1] for row in rows if row[0] == "seen"]
    assert len(states) == len(set(states))
    assert states[-1] == "CANCELLED"


async def test_a_change_is_one_line_of_a_pipe_whatever_its_reason_has(node: Node, unique: str) -> None:
    await node.run(
        "submit", "--job", "w", "--gpu", "1xZ9000", "--on-no-match", "wait", "--driver", "noop", tenant=unique
    )
    await node.run("cancel", "w", "--reason", "one\ntwo\tthree", tenant=unique)
    process = await start("ls", "--watch", env=node.env(unique))
    listed = await Lines(process.stdout).until("\n")
    process.send_signal(signal.SIGINT)
    await process.wait()
    explained = await node.run("explain", "w", "--watch", tenant=unique)
    shown = await node.run("show", "w", "--watch", tenant=unique)
    for rows, cells in ((listed.splitlines(), 11), (explained.out.splitlines(), 4), (shown.out.splitlines()[-1:], 9)):
        [row] = rows
        assert (len(row.split("\t")), "one two three" in row) == (cells, True), row


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_watched_list_in_a_pipe_tells_what_fell_into_a_lost_connection(
    node: Node, unique: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    monkeypatch.setattr(ls_watch, "ASK_AGAIN_S", 0.1)
    monkeypatch.setattr(ls_watch, "APART_S", 0.0)
    asked = 0

    class Counted(Listing):
        async def ask(self, *, runs_first: bool = False) -> Answer:
            nonlocal asked
            asked += 1
            if asked == 3:
                raise NoScheduler(client_problem("no-scheduler", "away"))
            return await super().ask(runs_first=runs_first)

    async with AsyncClient(node.url, tenant=unique) as client:
        hear = client._wire.subscribe
        monkeypatch.setattr(client._wire, "subscribe", lambda _, told: hear(f"nothing.{unique}", told))
        job = await client.submit({"job": "seen", "run": {"driver": "noop", "argv": ["hang"]}})
        await until_state(job, "RUNNING")
        options = RowOptions(json=as_json)
        watching = asyncio.create_task(ls_watch.watch_jobs(client, Counted(client, {"history": False}), options))
        await until(lambda: asked > 5, what="it is asked again without an event, and outlasts a leader that is away")
        assert capsys.readouterr().out.count("seen") == 1, "told once"
        await job.cancel()
        await until_state(job, "CANCELLED")
        asked = 10
        await until(lambda: asked > 12, what="it is asked again")
        told = capsys.readouterr().out
        assert (told.count("seen"), "CANCELLED" in told) == (1, True)
        watching.cancel()
        await asyncio.wait({watching})


async def test_a_watched_list_in_a_pipe_says_once_that_there_is_no_job_and_outlasts_a_busy_leader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ls_watch, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(ls_watch, "APART_S", 0.0)
    asked, enough = 0, asyncio.Event()

    class Scripted(Listing):
        async def ask(self, *, runs_first: bool = False) -> Answer:
            nonlocal asked
            asked += 1
            if asked in (2, 3):
                code = "overloaded" if asked == 2 else "behind"
                raise Overloaded(problem(code, "ask again"))
            if asked == 6:
                enough.set()
            return Answer("ls", 1, {"jobs": []})

    async with AsyncClient(transport=SimFleet("1xH100"), tenant="t") as client:
        watching = asyncio.create_task(ls_watch.watch_jobs(client, Scripted(client, {"history": False}), RowOptions()))
        heard = asyncio.create_task(enough.wait())
        await asyncio.wait({watching, heard}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert heard.done(), watching
        watching.cancel()
        await asyncio.wait({watching})
    assert capsys.readouterr().err.count("each change of a job prints a row") == 1


@pytest.mark.slow
async def test_a_watched_list_is_redrawn_on_a_terminal(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "seen", "--driver", "noop", "--", "hang", tenant=unique)
    async with on_a_terminal("ls", "--watch", env=node.env(unique)) as (process, terminal):
        await until_shown(terminal, "1 RUNNING")
        await node.run("cancel", "seen", tenant=unique)
        assert "\x1b[3F\x1b[J" in await until_shown(terminal, "1 CANCELLED")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130


async def test_a_watched_list_of_one_reason_counts_no_others(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "runs", "--driver", "noop", "--", "hang", tenant=unique)
    await node.run(
        "submit", "--job", "waits", "--gpu", "1xZ9000", "--on-no-match", "wait", "--driver", "noop", tenant=unique
    )
    shown = await _told(node, unique, "ls", "--watch", "--reason", "model", until="1 RUNNING")
    assert "waits" in shown
    assert "more" not in shown
    await node.run("cancel", "runs", "waits", tenant=unique)


async def _told(node: Node, unique: str, *words: str, until: str) -> str:
    """What the command draws on a terminal up to `until`; then it is interrupted."""
    async with on_a_terminal(*words, env=node.env(unique) | {"COLUMNS": "120"}) as (process, terminal):
        text = await until_shown(terminal, until)
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()
        return text


@pytest.mark.slow
async def test_a_wait_on_a_terminal_tells_how_it_stands(node: Node, unique: str) -> None:
    # jobs that other tests left waiting on this node stand behind it
    words = (
        "submit",
        "--job",
        "stuck",
        "--gpu",
        "1xZ9000",
        "--on-no-match",
        "wait",
        "--driver",
        "noop",
        "--priority",
        "90",
    )
    await node.run(*words, tenant=unique)
    told = await _told(node, unique, "wait", "stuck", until="\x1b[Kstuck  QUEUED  1st of ")
    assert "model: no remaining worker has a GPU" in told
    await node.run("cancel", "stuck", tenant=unique)


@pytest.mark.slow
async def test_events_on_a_terminal_stand_under_a_header(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "e", "--driver", "noop", "--", "exit", "0", tenant=unique)
    text = await _told(node, unique, "events", "e", until="SUCCEEDED")
    head, first, *_ = text.replace("\r", "").splitlines()
    assert head.split() == ["UTC", "JOB", "REPLICA", "TRY", "STATE", "WORKER", "CODE", "GPUS", "WHY"]
    assert first.split()[1:5] == ["e", "-", "0", "ACCEPTED"]
    assert head.index("STATE") == first.index("ACCEPTED")


@pytest.mark.slow
async def test_several_jobs_are_shown_by_one_command(node: Node, unique: str) -> None:
    for name in ("one", "two"):
        await node.run(
            "submit", "--job", name, "--gpu", "1xZ9000", "--on-no-match", "wait", "--driver", "noop", tenant=unique
        )
    shown = await node.run("show", "one,two", "--json", tenant=unique)
    assert [frame["data"]["job"] for frame in shown.frames] == ["one", "two"]
    assert (await node.run("explain", "on", tenant=unique)).rows[0] == ["job", "one"]
    assert sum(row == [""] for row in (await node.run("show", "all", tenant=unique)).rows) >= 3
    await node.run("cancel", "one,two", tenant=unique)
