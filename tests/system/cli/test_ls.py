"""`moorage ls`, and the words and options that choose jobs, against a real node."""

from __future__ import annotations

import pytest

from moorage.cli.jobs.job_rows import COLUMNS
from tests.system.cli.node import Node
from tests.waiting import until

NOOP = ("--driver", "noop", "--gpu", "1xH100")


async def submit(node: Node, tenant: str, job: str, *what: str, label: str = "") -> None:
    flags = ("--label", label) if label else ()
    ran = await node.run("submit", "--job", job, *NOOP, *flags, "--", *what, tenant=tenant)
    assert (ran.code, ran.out) == (0, f"{job}\n"), ran.err


async def is_state(node: Node, tenant: str, job: str, state: str) -> bool:
    return bool((await node.run("show", job, "--json", tenant=tenant)).frame["data"]["state"] == state)


async def test_a_sweep_is_listed_waited_for_read_and_cancelled_by_its_label(node: Node, unique: str) -> None:
    for number in range(3):
        script = f"echo says {number}; exit {number}"
        ran = await node.run(
            *("submit", "--job", f"s{number}", "--gpu", "1xH100", "--label", "sweep=lr", "--", "sh", "-c", script),
            tenant=unique,
        )
        assert ran.code == 0, ran.err
    await submit(node, unique, "other", "hang", label="sweep=wd")
    waited = await node.run("wait", "--label", "sweep=lr", tenant=unique)
    assert (waited.code, len(waited.rows)) == (2, 3), "the newest that failed, s2, ended with code 2"
    listed = await node.run("ls", "--label", "sweep=lr", tenant=unique)
    header, *rows = listed.rows
    assert header == list(COLUMNS)
    assert {row[0]: row[1] for row in rows} == {"s0": "SUCCEEDED", "s1": "FAILED", "s2": "FAILED"}
    assert all(row[header.index("RAN")] != "-" for row in rows)
    assert (await node.run("ls", "s*2", "--format", "{job} {labels}", tenant=unique)).out == 's2 {"sweep":"lr"}\n'
    assert (await node.run("ls", "oth", "--format", "{job}", tenant=unique)).out == "other\n"
    logs = await node.run("logs", "--label", "sweep=lr", tenant=unique)
    assert (sorted(logs.out.splitlines()), logs.code) == (["[s0] says 0", "[s1] says 1", "[s2] says 2"], 2)
    kept = await node.run("logs", "s0,s1", "--no-follow", "--json", tenant=unique)
    assert [(piece["job"], piece["text"]) for piece in kept.frames if piece.get("text")] == [
        ("s0", "says 0\n"),
        ("s1", "says 1\n"),
    ]
    none = await node.run("cancel", "--label", "sweep=lr", tenant=unique)
    assert (none.code, "that has not ended has the label sweep=lr" in none.err) == (3, True), none.err
    ended = await node.run("cancel", "--label", "sweep", "--state", "running,queued,placed,claimed", tenant=unique)
    assert ended.rows[0][0] == "other"
    assert (await node.run("wait", "other", tenant=unique)).rows[0][1] == "CANCELLED"


async def test_jobs_that_run_and_jobs_of_the_last_time_are_listed_alone(node: Node, unique: str) -> None:
    await submit(node, unique, "runs", "hang")
    assert (await node.run("run", "-q", "--job", "over", "--", "true", tenant=unique)).code == 0
    await node.run("submit", "--job", "waits", "--at", "2h", "--", "true", tenant=unique)
    await until(lambda: is_state(node, unique, "runs", "RUNNING"), what="it runs")
    running = await node.run("ls", "--running", "--format", "{job}", tenant=unique)
    assert running.out.split() == ["runs"]
    lately = await node.run("ls", "--since", "1h", "--format", "{job}", tenant=unique)
    assert lately.out.split() == ["waits", "over", "runs"]
    none = await node.run("ls", "--since", "0s", tenant=unique)
    assert (none.code, none.out, none.err) == (0, "", "no such job was submitted within 0s\n")
    for words in (
        ("--running", "--state", "QUEUED"),
        ("--since", "1h", "--watch"),
        ("--since", "90"),
        ("--since", "x"),
    ):
        assert (await node.run("ls", *words, tenant=unique)).code == 2, words
    await node.run("cancel", "runs,waits", tenant=unique)


@pytest.mark.slow
async def test_what_runs_comes_first_however_old_and_what_waits_says_why(node: Node, unique: str) -> None:
    await submit(node, unique, "first", "hang")
    await until(lambda: is_state(node, unique, "first", "RUNNING"), what="first runs")
    for number in range(3):
        ran = await node.run(
            "submit", "--job", f"w{number}", "--gpu", "64xH100", "--on-no-match", "wait", "--", "true", tenant=unique
        )
        assert ran.code == 0, ran.err
    listed = (await node.run("ls", "--limit", "2", tenant=unique)).rows[1:]
    assert [row[0] for row in listed] == ["first", "w2"]
    assert listed[1][-1], "why it waits"
    [reason] = {row["reason"] for row in (await node.run("ls", "w", "--json", tenant=unique)).frame["data"]["jobs"]}
    assert listed[1][-1] == reason
    found = await node.run("ls", "--reason", reason, "--format", "{job}", tenant=unique)
    assert found.out.split() == ["w2", "w1", "w0"]
    wrong = await node.run("ls", "--reason", "lazy", tenant=unique)
    assert (wrong.code, "reason must be one of" in wrong.err) == (2, True)
    nobody = await node.run("ls", "--label", "a=b", "--state", "failed", tenant=unique)
    assert nobody.err == f"no jobs of tenant {unique} in FAILED with --label a=b in memory; --history looks further\n"
    await node.run("cancel", "all", tenant=unique)


@pytest.mark.slow
async def test_an_operator_lists_the_jobs_of_all_tenants_and_of_a_worker(node: Node, unique: str) -> None:
    mine, theirs = f"{unique}-a", f"{unique}-b"
    for tenant in (mine, theirs):
        await submit(node, tenant, "same-id", "hang", label=f"of={unique}")
        await until(lambda tenant=tenant: is_state(node, tenant, "same-id", "RUNNING"), what=f"it runs for {tenant}")
    listed = await node.run("ls", "--label", f"of={unique}", tenant="all")
    header, *rows = listed.rows
    assert header[:2] == ["TENANT", "JOB"]
    assert {(row[0], row[1]) for row in rows} == {(mine, "same-id"), (theirs, "same-id")}
    worker = rows[0][header.index("WORKER")].split()[0]
    words = ("--label", f"of={unique}", "--format", "{tenant}/{job} {worker}")  # jobs of other tests run there, and end
    there = await node.run("ls", "--worker", worker, *words, tenant="all")
    assert f"{rows[0][0]}/same-id {worker}" in there.out.splitlines()
    assert {line.split()[1] for line in there.out.splitlines()} == {worker}
    for tenant in (mine, theirs):
        assert (await node.run("cancel", "same-id", tenant=tenant)).code == 0
