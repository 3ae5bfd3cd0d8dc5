"""`moorage run`: the job's output and code are the command's own, and Ctrl-C lets go of it."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import pytest

from moorage.client import AsyncClient
from tests.system.cli.node import (
    COMMAND,
    Lines,
    Node,
    environment,
    moorage,
    on_a_terminal,
    read_all,
    start,
    until_shown,
)


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -TERM $$", 143), ("exec /no/such/tool", 127)]
)
async def test_the_jobs_own_code(node: Node, unique: str, script: str, code: int) -> None:
    ran = await node.run("run", "--gpu", "1xH100", "--", "sh", "-c", script, tenant=unique)
    assert ran.code == code, ran.err


async def test_a_keep_pattern_that_matched_nothing_is_named_by_run_wait_and_show(node: Node, unique: str) -> None:
    words = ("--keep", "out/**", "--keep", "out/{a,b}", "--", "sh", "-c", "mkdir out && touch out/a")
    ran = await node.run("run", "--job", "k", *words, tenant=unique)
    said = "nothing matched 'out/{a,b}' of keep"
    assert (ran.code, ran.err.count(said), ran.err.count("nothing matched")) == (0, 1, 1), ran.err
    assert said in (await node.run("wait", "k", tenant=unique)).err
    assert said in (await node.run("show", "k", tenant=unique)).out
    ran = await node.run("run", "--replicas", "2", "--keep", "none", "--", "true", tenant=unique)
    assert ran.err.splitlines()[-1].endswith("begins at the attempt's folder: replica 0, 1")


@pytest.mark.parametrize("verb", ["run", "wait"])
async def test_of_a_gang_the_code_of_the_rank_that_failed_first(node: Node, unique: str, verb: str) -> None:
    script = "[ $RANK = 1 ] && exit 7; exec sleep 60"
    flags = ("--job", "gang", "--gpu", "2x1xH100", "--gang", "--grace", "1s", "--", "sh", "-c", script)
    if verb == "wait":
        await node.run("submit", *flags, tenant=unique)
    ran = await (node.run("run", *flags, tenant=unique) if verb == "run" else node.run("wait", "gang", tenant=unique))
    assert ran.code == 7, ran.err
    assert "code 7" in (ran.err if verb == "run" else ran.out)


async def test_a_gang_in_a_pipe_is_one_line_once_it_has_ended(node: Node, unique: str) -> None:
    ran = await node.run("run", "--job", "g", "--gpu", "2x1xH100", "--gang", "--", "true", tenant=unique)
    assert ran.code == 0, ran.err
    assert re.fullmatch(r"g  SUCCEEDED  done 2  \w+\n", ran.err), ran.err
    listed = await node.run("ls", tenant=unique)
    assert "\tsim-" in listed.out  # where it ran, though its last change is of no worker


async def test_each_rank_of_a_gang_on_two_hosts_has_its_own_and_a_third_host_is_refused(
    node: Node, unique: str
) -> None:
    script = ("--gpu", "1xH100", "--", "sh", "-c", "echo $MOORAGE_WORKER")
    ran = await node.run("run", "--job", "apart", "--no-prefix", "--hosts", "2", *script, tenant=unique)
    assert (ran.code, sorted(ran.out.split())) == (0, ["sim-0000", "sim-0001"]), ran.err
    assert ["hosts", "one for each replica"] in (await node.run("show", "apart", tenant=unique)).rows
    ran = await node.run("run", "--hosts", "3", *script, tenant=unique)
    assert "the whole fleet would hold 2 of its 3 replicas at once, each on a host of its own" in ran.err


@pytest.mark.slow
async def test_output_of_replicas_names_them_in_run_and_logs_unless_asked_not_to(node: Node, unique: str) -> None:
    script = ("sh", "-c", "echo of $RANK; printf half; sleep 0.1; echo ' a line'; printf end")
    ran = await node.run("run", "--job", "r", "--gpu", "2x1xH100", "--gang", "--", *script, tenant=unique)
    lines = sorted(f"[{at}] {text}" for at in (0, 1) for text in (f"of {at}", "half a line", "end"))
    assert sorted(ran.out.splitlines()) == lines
    for words in ((), ("--no-follow",)):
        ran = await node.run("logs", "r", *words, tenant=unique)
        assert sorted(ran.out.splitlines()) == lines, words
    one = await node.run("logs", "r", "--replica", "1", "--no-follow", tenant=unique)
    assert one.out == "of 1\nhalf a line\nend"
    bare = await node.run("logs", "r", "--no-prefix", "--no-follow", tenant=unique)
    assert bare.out == "of 0\nhalf a line\nendof 1\nhalf a line\nend"
    frames = (await node.run("logs", "r", "--json", "--no-follow", tenant=unique)).frames
    assert {frame["text"] for frame in frames if frame["text"]} == {f"of {at}\nhalf a line\nend" for at in (0, 1)}


@pytest.mark.slow
async def test_a_signal_is_one_number_for_people_and_another_on_the_wire(node: Node, unique: str) -> None:
    ran = await node.run("run", "--job", "s", "--", "sh", "-c", "kill -TERM $$", tenant=unique)
    assert ran.code == 143
    assert "code 143" in ran.err
    for words in (("ls",), ("show", "s"), ("explain", "s"), ("events", "s"), ("wait", "s")):
        told = await node.run(*words, tenant=unique)
        assert ("143" in told.out, "-15" in told.out) == (True, False), told.out
    assert (await node.run("show", "s", "--json", tenant=unique)).frame["data"]["code"] == -15


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
async def test_at_a_terminal_a_second_ctrl_c_cancels_what_the_first_has_let_go(
    node: Node, unique: str, again: bool
) -> None:
    words = ("run", "--job", "long", "--", "sh", "-c", "echo begun; exec sleep 600")
    async with on_a_terminal(*words, env=node.env(unique)) as (process, terminal):
        await until_shown(terminal, "begun")
        process.send_signal(signal.SIGINT)
        await until_shown(terminal, "Ctrl-C again within 2 s")
        if again:
            process.send_signal(signal.SIGINT)
            await until_shown(
                terminal, "cancelling job long, which was "
            )  # output may come before the ledger says RUNNING
        assert await process.wait() == 130
    async with AsyncClient(node.url, tenant=unique) as client:
        if again:
            [result] = await client.wait([client.job("long")])
            assert result.state == "CANCELLED"
        else:
            assert (await client.job("long").show()).state == "RUNNING"
            await client.job("long").cancel()


async def test_in_a_pipe_stderr_is_the_jobs_own_and_one_line_at_its_end(node: Node, unique: str) -> None:
    """With -q it is the job's own alone, and so it is in `logs` of a job that has ended."""
    script = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; echo oh >&2")
    ran = await node.run("run", "--job", "j", "--gpu", "2xH100", "--", *script, tenant=unique)
    assert (ran.code, len(ran.out.strip().split(","))) == (0, 2)
    assert re.fullmatch(r"oh\nj  SUCCEEDED  on sim-000\d sim  \w+\n", ran.err), ran.err
    quiet = await node.run("run", "-q", "--gpu", "2xH100", "--", *script, tenant=unique)
    again = await node.run("logs", "j", tenant=unique)
    assert (quiet.code, quiet.err, again.err, again.out) == (0, "oh\n", "oh\n", ran.out)


async def test_quiet_leaves_answers_and_errors(node: Node, unique: str) -> None:
    ran = await node.run(
        "submit", "-q", "--job", "j", "--gpu", "1xZ9000", "--on-no-match", "wait", "--", "true", tenant=unique
    )
    assert (ran.code, ran.out, ran.err) == (0, "j\n", "")
    ran = await node.run("show", "none", "--quiet", tenant=unique)
    assert (ran.code, ran.err.splitlines()[0]) == (3, f"error[not-found]: no job none of tenant {unique}")


async def test_a_flood_of_output_comes_whole(node: Node, unique: str) -> None:
    ran = await node.run("run", "--", "sh", "-c", "seq 1 50000; exit 5", tenant=unique)
    assert ran.code == 5
    assert ran.out == "".join(f"{number}\n" for number in range(1, 50001))


async def test_json_is_frames_alone(node: Node, unique: str) -> None:
    ran = await node.run("run", "--json", "--gpu", "1", "--", "sh", "-c", "echo hi", tenant=unique)
    assert (ran.code, ran.err) == (0, "")
    kinds = [frame["kind"] for frame in ran.frames]
    assert kinds[0] == "accepted"
    assert set(kinds) == {"accepted", "event", "log"}
    assert "hi\n" in [frame.get("text") for frame in ran.frames]


@pytest.mark.slow
async def test_a_command_that_is_not_there_is_told(node: Node, unique: str) -> None:
    ran = await node.run("run", "--gpu", "1", "--", "/no/such/tool", tenant=unique)
    assert ran.code == 127
    assert "not-here: no /no/such/tool on the worker" in ran.err
    ran = await node.run("run", "--gpu", "1", "--", "nosuchtool", tenant=unique)
    assert "fix: give its full path, or bring it with --with and write ./NAME\n" in ran.err
    ran = await node.run("run", "--gpu", "1", "--", "echo hi", tenant=unique)
    assert "no program 'echo hi' in PATH …" in ran.err
    assert "one word" in ran.err
    ran = await node.run("run", "--gpu", "1", "--cwd", "../up", "--", "true", tenant=unique)
    assert (ran.code, ran.out) == (2, "")
    assert "error[invalid-argument]" in ran.err
    assert "absolute" in ran.err


async def test_a_file_that_is_not_brought_is_warned_of_once(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("echo trained\n")
    words, env = ("--", "sh", "train.sh"), node.env(unique)
    warning = (
        "warning[files]: train.sh is a file on this machine, but not in the folder in which the job starts: "
        "add --with train.sh"
    )
    ran = await moorage("run", "--json", *words, env=env, cwd=tmp_path)
    assert (ran.code != 0, ran.err.splitlines().count(warning), warning in ran.out) == (True, 1, False), ran.err
    submitted = await moorage("submit", *words, env=env, cwd=tmp_path)
    assert (submitted.code, warning in submitted.err) == (0, True)
    submitted = await moorage("submit", "--", "./train.sh", env=env, cwd=tmp_path)
    assert (submitted.code, warning.replace("]: ", "]: ./", 1) in submitted.err) == (0, True), submitted.err
    brought = await moorage("run", "--with", "train.sh", *words, env=env, cwd=tmp_path)
    assert (brought.code, brought.out, "warning" in brought.err) == (0, "trained\n", False)


async def test_a_file_without_an_x_bit_is_warned_of_and_is_the_reason_of_the_end(
    node: Node, unique: str, tmp_path: Path
) -> None:
    (tmp_path / "work.sh").write_text("#!/bin/sh\necho worked\n")
    words, env = ("--with", "work.sh", "--", "./work.sh"), node.env(unique)
    ran = await moorage("run", "--job", "j", *words, env=env, cwd=tmp_path)
    assert (ran.code, "fails with code 126: chmod +x work.sh, or name what reads it first" in ran.err) == (126, True)
    shown = dict(row for row in (await node.run("show", "j", tenant=unique)).rows if len(row) == 2)
    assert shown["why"] == "cannot-run: ./work.sh: Permission denied"
    assert shown["files"] == "work.sh"  # by name, and not the archive's address
    (tmp_path / "work.sh").chmod(0o755)
    ran = await moorage("run", *words, env=env, cwd=tmp_path)
    assert (ran.code, ran.out, "warning" in ran.err) == (0, "worked\n", False)


async def test_a_time_limit_ends_it(node: Node, unique: str) -> None:
    ran = await node.run("run", "--time-limit", "300ms", "--grace", "1s", "--", "sleep", "60", tenant=unique)
    assert ran.code != 0
    assert "TIMED_OUT" in ran.err
    assert "an attempt ran for 0.3 s, its time limit (timeout_s)" in ran.err
    assert "fix: allow more: --time-limit, in a request timeout_s" in ran.err


@pytest.mark.slow
async def test_ctrl_c_detaches_and_says_how_to_go_on(node: Node, unique: str) -> None:
    process = await start(
        "run", "--job", "long", "--gpu", "1xH100", "--", "sh", "-c", "echo begun; sleep 60", env=node.env(unique)
    )
    out, err = Lines(process.stdout), Lines(process.stderr)
    await out.until("begun")
    process.send_signal(signal.SIGINT)
    await err.until("moorage cancel long")
    assert await process.wait() == 130
    assert "moorage logs long" in err.text
    async with AsyncClient(node.url, tenant=unique) as client:
        assert (await client.job("long").show()).state == "RUNNING"
    attached = await start("logs", "long", env=node.env(unique))
    out, err = Lines(attached.stdout), Lines(attached.stderr)
    await out.until("begun")
    assert (await node.run("cancel", "long", "--reason", "enough", tenant=unique)).code == 0
    await err.until("CANCELLED")
    assert await attached.wait() == 128 + signal.SIGTERM


@pytest.mark.slow
async def test_while_it_waits_the_reason_is_told(node: Node, unique: str) -> None:
    process = await start(
        "run", "--job", "never", "--gpu", "1xZ9000", "--on-no-match", "wait", "--", "true", env=node.env(unique)
    )
    err = Lines(process.stderr)
    await err.until("model: ")
    assert "warning[no-match]" in err.text
    await node.run("cancel", "never", tenant=unique)
    await err.until("job-cancelled")
    assert await process.wait() == 1


async def test_on_a_terminal_progress_is_one_rewritten_line(node: Node, unique: str) -> None:
    words = ("run", "--gpu", "1xH100", "--", "sh", "-c", "echo hello")
    async with on_a_terminal(*words, env=node.env(unique)) as (process, terminal):
        assert await process.wait() == 0
        text = read_all(terminal)
    assert "\r\x1b[K" in text
    assert "hello" in text  # output and events are two subjects: either may be shown last
    assert any("SUCCEEDED" in line for line in text.splitlines())


async def test_a_pipe_that_closes_early_is_no_error(node: Node, unique: str) -> None:
    process = await asyncio.create_subprocess_shell(
        f"{' '.join(COMMAND)} run -- seq 1 200000 | head -n 1",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**node.env(unique)),
    )
    out, err = await process.communicate()
    assert out == b"1\n"
    assert b"Traceback" not in err
    assert b"moorage cancel j" in err  # the job goes on, and nothing else says which one
