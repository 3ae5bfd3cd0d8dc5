"""`moorage logs`: what a job wrote, as it was written, also once it is over."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from moorage.client import AsyncClient
from tests.system.cli.node import Node, environment, moorage, node_on, on_a_terminal, read_all


@pytest.mark.slow
async def test_logs_of_a_job_that_is_over_are_its_output_and_end_with_its_code(node: Node, unique: str) -> None:
    script = "seq 1 3; echo trouble >&2; exit 7"
    assert (await node.run("run", "--job", "j", "--", "sh", "-c", script, tenant=unique)).code == 7
    every = await node.run("logs", "j", tenant=unique)
    assert (every.code, every.out) == (7, "1\n2\n3\n")
    assert "trouble\n" in every.err
    tail = await node.run("logs", "j", "--tail", "1", "--no-follow", tenant=unique)
    assert (tail.code, tail.out, tail.err) == (0, "3\n", "trouble\n")
    pieces = (await node.run("logs", "j", "--no-follow", "--json", tenant=unique)).frames
    assert [(piece["stream"], piece["text"], piece["end"]) for piece in pieces] == [
        ("out", "1\n2\n3\n", True),
        ("err", "trouble\n", True),
    ]
    shown = dict(row for row in (await node.run("show", "j", tenant=unique)).rows if len(row) == 2)
    assert "on sim-000" in shown["output until"]
    other = await node.run("logs", "j", tenant="other")
    assert (other.code, other.out) == (3, "")
    none = await node.run("logs", "j", "--replica", "4", tenant=unique)
    assert none.code == 2
    assert "has no replica 4" in none.err


@pytest.mark.slow
async def test_binary_output_comes_through_a_pipe_as_it_was_written(node: Node, unique: str, tmp_path: Path) -> None:
    wanted = tmp_path / "wanted"
    script = f"head -c 300000 /dev/urandom | tee {wanted}"
    for argv in (("run", "--job", "j", "--", "sh", "-c", script), ("logs", "j"), ("logs", "j", "--no-follow")):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "moorage.cli", *argv),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment(**node.env(unique)),
        )
        out, _ = await process.communicate()
        assert out == wanted.read_bytes(), argv


async def test_letters_come_through_a_pipe_as_they_were_written_whatever_the_encoding(node: Node, unique: str) -> None:
    env = {**node.env(unique), "PYTHONIOENCODING": "latin-1"}
    for argv in (("run", "--job", "j", "--", "echo", "é 日"), ("logs", "j")):
        ran = await moorage(*argv, env=env)
        assert (ran.code, ran.out) == (0, "é 日\n"), argv


async def test_a_line_of_progress_says_when_it_was_and_not_how_long_one_looks(node: Node, unique: str) -> None:
    ran = await node.run("run", "--job", "j", "--", "true", tenant=unique)
    [ended] = ran.err.splitlines()
    assert re.fullmatch(r"j  SUCCEEDED  on sim-000\d sim  [1-9]\d*[smh]\w*", ended), ended
    assert ["simulated", "yes"] in (await node.run("show", "j", tenant=unique)).rows, "without GPUs, too"
    async with on_a_terminal("logs", "j", env=node.env(unique)) as (process, terminal):
        assert await process.wait() == 0
        drawn = read_all(terminal)
    assert ended in drawn, "on a terminal, and long after its end, the same"


@pytest.mark.slow
async def test_every_reader_of_a_long_output_says_what_is_missing_and_has_its_end(tmp_path: Path) -> None:
    settings = tmp_path / "moorage.toml"
    settings.write_text("[worker]\noutput_cap_bytes = 1000\n")
    settings.chmod(0o600)
    script = "i=0; while [ $i -lt 1000 ]; do echo step $i; i=$((i+1)); done; echo the error; exit 3"
    async with node_on(tmp_path / "node", "--settings", str(settings)) as node:
        await node.run("submit", "--job", "long", "--replicas", "2", "--", "sh", "-c", script, tenant="t")
        await node.run("wait", "long", tenant="t")
        for options in ((), ("--no-follow",), ("--no-follow", "--replica", "0"), ("--attempt", "1")):
            ran = await node.run("logs", "long", *options, tenant="t")
            for replica in (0,) if "--replica" in options else (0, 1):
                label = "" if "--replica" in options else f"[{replica}] "
                assert f"{label}step 0\n" in ran.out
                assert f"{label}the error\n" in ran.out
                assert f"{label}[moorage: 7900 bytes of stdout are dropped here, by output_cap_bytes]\n" in ran.out
                assert f"stdout of replica {replica}, attempt 1 has more bytes than" in ran.err
        tail = await node.run("logs", "long", "--no-follow", "--tail", "1", "--replica", "0", tenant="t")
        assert tail.out == "the error\n"
        assert "7900 bytes between them are dropped" in tail.err
        pieces = await node.run("logs", "long", "--no-follow", "--json", "--replica", "0", tenant="t")
        assert [piece.get("dropped", 0) for piece in pieces.frames if piece["stream"] == "out"] == [0, 7900]
        shown = dict(row for row in (await node.run("show", "long", tenant="t")).rows if len(row) == 2)
        assert shown["output"].endswith(
            "stdout of replica 0 lacks 7900 bytes in its middle, stdout of replica 1 lacks 7900 bytes in its middle"
        )


async def test_logs_have_both_streams_in_the_order_in_which_they_arrived(node: Node, unique: str) -> None:
    """Each line is written once the one before has arrived at the worker: a follower shows it."""
    script = "import sys\nfor at in range(20):\n print(at, file=(sys.stdout, sys.stderr)[at % 2], flush=True); input()"
    wanted = "".join(f"{at}\n" for at in range(20))
    async with AsyncClient(node.url, tenant=unique) as client:
        folder = node.folder / unique
        folder.mkdir()
        os.mkfifo(folder / "go")
        shell = f"exec python3 -c '{script}' <{folder / 'go'}"
        job = await client.submit(["sh", "-c", shell], job="both")
        with (folder / "go").open("w") as go:
            said = ""
            async for piece in job.logs("60s"):
                said += piece.text
                go.write("\n" * piece.text.count("\n"))  # an unbuffered print writes its end of line alone
                go.flush()
                if said == wanted:
                    break
            assert said == wanted
        await job.result("60s")
        assert "".join([piece.text async for piece in job.logs("60s")]) == wanted
        assert "".join([piece.text async for piece in job.logs(follow=False, tail=3)]) == "".join(
            f"{at}\n" for at in range(14, 20)
        )


async def test_all_attempts_are_printed_oldest_first(node: Node, unique: str) -> None:
    script = "echo try $MOORAGE_ATTEMPT; exit $((MOORAGE_ATTEMPT < 3))"
    ran = await node.run("run", "-q", "--job", "tries", "--retries", "2", "--", "sh", "-c", script, tenant=unique)
    assert ran.code == 0, ran.err
    every = await node.run("logs", "tries", "--attempt", "all", tenant=unique)
    assert (every.code, every.out) == (0, "try 1\ntry 2\ntry 3\n"), every.err
    assert [line for line in every.err.splitlines() if line.startswith("attempt")] == [
        f"attempt {number} of 3:" for number in (1, 2, 3)
    ]
    assert (await node.run("logs", "tries", "--attempt", "2", tenant=unique)).out == "try 2\n"
    for words in (("tries", "--attempt", "two"), ("tries", "--attempt", "-1"), ("tries,tries", "--attempt", "9" * 30)):
        wrong = await node.run("logs", *words, tenant=unique)
        assert (wrong.code, "--attempt" in wrong.err) == (2, True), wrong.err
