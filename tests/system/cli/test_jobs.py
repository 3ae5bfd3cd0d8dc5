"""The verbs of a job's daily life, against a real node: what they print, and how they end."""

from __future__ import annotations

import re
import shlex

import msgspec
import pytest

from tests.system.cli.node import Node
from tests.waiting import until


@pytest.mark.slow
async def test_after_last_is_the_newest_job_which_is_named(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "prepare", "--", "true", tenant=unique)
    ran = await node.run("submit", "--job", "a", "--after", "last:any", "--", "true", tenant=unique)
    assert (ran.code, "--after last is job prepare" in ran.err) == (0, True), ran.err
    shown = await node.run("show", "a", "--json", tenant=unique)
    assert shown.frame["data"]["request"]["after"] == [{"job": "prepare", "when": "any"}]
    for verb, code in (("run", 0), ("plan", 0)):
        ran = await node.run(verb, "--after", "last:any", "--", "true", tenant=unique)
        assert (ran.code, "--after last is job" in ran.err) == (code, True), ran.err
    ran = await node.run("submit", "--after", "prep", "--", "true", tenant=unique)
    assert "name it by its id in full" in ran.err


async def test_a_wait_for_a_job_that_was_cancelled_before_it_ran_does_not_end_with_0(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "big", "--gpu", "64xH100", "--on-no-match", "wait", "--", "true", tenant=unique)
    assert (await node.run("cancel", "big", tenant=unique)).code == 0
    assert (await node.run("wait", "big", tenant=unique)).code == 1


async def test_a_submit_prints_the_id_and_the_same_again_is_the_same_job(node: Node, unique: str) -> None:
    flags = ("submit", "--job", "one", "--gpu", "1xH100", "--driver", "noop", "--", "hang")
    first = await node.run(*flags, tenant=unique)
    assert (first.code, first.out) == (0, "one\n")
    assert "moorage logs one" in first.err
    again = await node.run("submit", "--json", *flags[1:], tenant=unique)
    assert (again.frame["kind"], again.frame["job"], again.frame["duplicate"]) == ("accepted", "one", True)
    other = await node.run(*flags[:-1], "exit", "1", tenant=unique)
    assert other.code == 1
    assert other.err.startswith("error[conflict]: ")
    await node.run("cancel", "one", tenant=unique)


@pytest.mark.slow
async def test_requests_come_from_a_file_or_stdin(node: Node, unique: str) -> None:
    one = {"job": "f1", "gpu": {"count": 2}, "run": {"driver": "noop"}}
    ran = await node.run("submit", "-f", "-", tenant=unique, stdin=msgspec.json.encode(one).decode())
    assert (ran.code, ran.out) == (0, "f1\n")
    file = node.folder / f"{unique}.json"
    file.write_bytes(msgspec.json.encode([one, {**one, "gpu": {}}, {**one, "job": "f2"}]))
    many = await node.run("submit", "-f", str(file), "--json", tenant=unique)
    assert [frame["kind"] for frame in many.frames] == ["accepted", "error", "accepted"]
    assert (many.code, many.frames[1]["code"]) == (1, "conflict")
    assert many.err.startswith("error[conflict]: ")
    file.write_bytes(b"\xef\xbb\xbf" + msgspec.json.encode({**one, "job": "f3"}))
    marked = await node.run("submit", "-f", str(file), tenant=unique)
    assert (marked.code, marked.out) == (0, "f3\n")


async def test_a_file_may_have_a_request_a_line_and_a_malformed_one_stops_no_other(node: Node, unique: str) -> None:
    good = '{"job": "%s", "run": {"driver": "noop"}}'
    lines = [good % "l1", "", '{"job": "l2", "run": {"argv": []}}', good % "l3"]
    ran = await node.run("submit", "-f", "-", tenant=unique, stdin="\n".join(lines))
    assert (ran.code, ran.out.split()) == (2, ["l1", "l3"])
    assert "at $[1].run" in ran.err
    assert ran.err.splitlines()[-1] == "2 of 3 jobs accepted"
    broken = await node.run("submit", "-f", "-", tenant=unique, stdin=f"{good % 'l4'}\n{{oops")
    assert (broken.code, broken.out) == (2, "")
    assert broken.err.startswith("error[invalid-argument]: line 2 of stdin is not JSON")


@pytest.mark.slow
async def test_show_ls_and_explain_are_the_wire_with_json_and_tables_in_a_pipe(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "s1", "--gpu", "2xH100:80G", "--driver", "noop", "--", "hang", tenant=unique)
    await until(lambda: _is(node, unique, "s1", "RUNNING"), what="s1 runs")
    shown = await node.run("show", "s1", "--json", tenant=unique)
    assert (shown.frame["kind"], shown.frame["verb"]) == ("answer", "show")
    assert shown.frame["data"]["request"]["gpu"]["min_memory_mib"] > 70_000
    text = await node.run("show", "s1", tenant=unique)
    fields = dict(row for row in text.rows if len(row) == 2)
    assert (fields["job"], fields["state"], fields["gpu"], fields["simulated"]) == (
        "s1",
        "RUNNING",
        "2xH100:80G",
        "yes",
    )
    assert ["REV", "AFTER", "REPLICA", "TRY", "STATE", "WORKER", "CODE", "GPUS", "WHY"] in text.rows
    listed = await node.run("ls", tenant=unique)
    header, row = listed.rows
    cells = dict(zip(header, row, strict=True))
    assert (cells["JOB"], cells["STATE"], cells["GPU"]) == ("s1", "RUNNING", "2xH100:80G")
    assert cells["WORKER"].endswith(" sim")
    assert "\x1b" not in listed.out + text.out
    assert (await node.run("ls", "--json", tenant=unique)).frame["data"]["counts"] == {"RUNNING": 1}
    explained = await node.run("explain", "s1", "--json", tenant=unique)
    assert explained.frame["data"]["state"] == "RUNNING"
    ended = await node.run("cancel", "s1", "--reason", "enough", tenant=unique)
    assert (ended.code, ended.rows) == (0, [["s1", "cancelling, the job was RUNNING"]])


@pytest.mark.parametrize("job", ["last", "all", "-abc", "gang", "not-found", "timed-out"])
async def test_the_commands_that_name_a_job_mean_it_whatever_its_id_reads_like(
    node: Node, unique: str, job: str
) -> None:
    submitted = await node.run("submit", f"--job={job}", "--", "sh", "-c", "echo mine; exit 3", tenant=unique)
    follow, why = submitted.err.splitlines()[-1].removeprefix("follow: moorage ").split("   why: moorage ")
    other = await node.run("submit", "--job", "other", "--driver", "noop", "--", "hang", tenant=unique)
    assert other.code == 0, other.err
    followed = await node.run(*shlex.split(follow), tenant=unique)
    assert (followed.code, followed.out) == (3, "mine\n"), followed.err
    explained = await node.run(*shlex.split(why), tenant=unique)
    assert ["job", job] in explained.rows
    logs = await node.run(*shlex.split(explained.err.removeprefix("fix: moorage ")), tenant=unique)
    assert (logs.code, logs.out) == (3, "mine\n"), logs.err
    await node.run("cancel", "other", tenant=unique)


async def test_a_range_is_cancelled_and_the_rest_of_the_sweep_goes_on(node: Node, unique: str) -> None:
    sleeps = ("submit", "--job", "sweep", "--array", "0-9%4", "--", "sleep", "600")
    assert (await node.run(*sleeps, tenant=unique)).code == 0
    ended = await node.run("cancel", "sweep", "--replica", "7-9", "--reason", "not needed", tenant=unique)
    assert (ended.code, ended.rows[0][1]) == (0, "cancelling what goes on of replica 7-9, the job was RUNNING"), ended
    shown = dict(row for row in (await node.run("show", "sweep", tenant=unique)).rows if len(row) == 2)
    assert (shown["state"], shown.get("why")) == ("RUNNING", None)
    assert "3 cancelled: 7-9" in shown["replicas"]
    ended = await node.run("cancel", "sweep", "--replica", "7-8", tenant=unique)
    assert ended.rows == [["sweep", "unchanged, nothing goes on of replica 7-8, the job was RUNNING"]]
    wrong = await node.run("cancel", "sweep", "--replica", "8-12", tenant=unique)
    assert (wrong.code, "job sweep has no replica 10-12" in wrong.err, "fix: moorage show sweep" in wrong.err) == (
        2,
        True,
        True,
    ), wrong.err
    await node.run("cancel", "sweep", tenant=unique)
    assert (await node.run("wait", "sweep", tenant=unique)).code != 0


@pytest.mark.slow
async def test_what_no_worker_could_run_is_refused_or_waits_and_is_explained_with_a_fix(
    node: Node, unique: str
) -> None:
    ran = await node.run(
        "submit",
        "--job",
        "w",
        "--gpu",
        "1xZ9000",
        "--on-no-match",
        "wait",
        "--driver",
        "noop",
        "--",
        "hang",
        tenant=unique,
    )
    assert ran.code == 0
    missing = "no worker with the driver noop has a GPU of this model; the fleet has NVIDIA H100"
    assert f"warning[no-match]: no known worker could run this job: {missing}" in ran.err
    why = await node.run("explain", "w", tenant=unique)
    shown = dict(why.rows)
    assert shown["reason"].startswith("model: ")
    assert shown["asks"] == "1xZ9000"
    assert "fix: " in why.err
    body = '{"gpu": {"model": "Z9000"}, "run": {"argv": ["x"]}}'
    for words, stdin in ((("run", "--gpu", "1xZ9000", "--", "x"), ""), (("submit", "-f", "-"), body)):
        refused = await node.run(*words, tenant=unique, stdin=stdin)
        assert (refused.code, refused.err.startswith("error[failed-precondition]: ")) == (1, True)
        assert "--on-no-match wait" in refused.err
    await node.run("cancel", "w", tenant=unique)


@pytest.mark.slow
async def test_a_job_that_failed_is_explained_with_its_code_why_and_where_to_look(node: Node, unique: str) -> None:
    for job, argv in (("bad", ("sh", "-c", "exit 9")), ("none", ("no-such-program",))):
        await node.run("run", "--job", job, "--", *argv, tenant=unique)
    bad = await node.run("explain", "bad", tenant=unique)
    assert dict(bad.rows) == {"job": "bad", "state": "FAILED", "code": "9", "why": "it ended by itself, with code 9"}
    assert bad.err == "fix: moorage logs bad\n"
    none = await node.run("explain", "none", tenant=unique)
    assert dict(none.rows)["why"].startswith("not-here: no program no-such-program in PATH ")
    assert none.err == "fix: give its full path, or bring it with --with and write ./NAME\n"
    kept = await node.run("logs", "none", "--no-follow", tenant=unique)
    assert (kept.code, kept.out) == (0, "")
    assert kept.err.startswith("no output of job none, which is FAILED: not-here: no program no-such-program in PATH ")
    assert (await node.run("errors", "start-failed")).code == 0


async def test_where_a_new_attempt_has_written_nothing_yet_the_output_of_the_last_one_is_found(
    node: Node, unique: str
) -> None:
    """It read as if the job, which failed again and again, had never said why."""
    words = "test $MOORAGE_ATTEMPT = 1 && { echo broken; exit 1; }; sleep 600"
    await node.run("submit", "--job", "again", "--retries", "1", "--", "sh", "-c", words, tenant=unique)

    async def is_second() -> bool:
        return "\t2\tRUNNING" in (await node.run("show", "again", tenant=unique)).out

    await until(is_second, what="the second attempt runs")
    kept = await node.run("logs", "again", "--no-follow", tenant=unique)
    assert kept.out == ""
    [fix] = [line for line in kept.err.splitlines() if line.startswith("fix: ")]
    assert "--attempt all" in fix
    before = await node.run("logs", "again", "--attempt", "all", tenant=unique)
    assert "broken" in before.out
    await node.run("cancel", "again", tenant=unique)


async def test_a_printed_command_names_the_server_and_the_tenant_that_the_line_named(node: Node, unique: str) -> None:
    """It was of the default tenant, and so of no job."""
    of = f"--nats {node.url} --tenant {unique}"
    asks = ("--job", "big", "--gpu", "64xH100", "--on-no-match", "wait", "--", "true")
    ran = await node.run("submit", *of.split(), *asks)
    assert ran.code == 0, ran.err
    assert f"follow: moorage logs big {of}   why: moorage explain big {of}\n" in ran.err
    assert (await node.run("explain", "big", *of.split())).code == 0
    held = await node.run("admin", "hold", "big", *of.split())
    assert f"undo: moorage admin release big --tenant {unique} --nats {node.url}\n" in held.err
    await node.run("cancel", "big", *of.split())


@pytest.mark.slow
async def test_a_job_that_is_called_like_a_code_is_explained_by_a_pattern_and_watched(node: Node, unique: str) -> None:
    assert (await node.run("run", "--job", "gang", "--", "true", tenant=unique)).code == 0
    assert (await node.run("explain", "gang", tenant=unique)).out.startswith("gang: ")
    for words in (("gang*",), ("gang", "--watch")):
        assert "SUCCEEDED" in (await node.run("explain", *words, tenant=unique)).out


@pytest.mark.slow
async def test_cancel_says_what_it_met(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "over", "--driver", "noop", tenant=unique)
    await until(lambda: _is(node, unique, "over", "SUCCEEDED"), what="over is over")
    ran = await node.run("cancel", "unheard-of", "over", tenant=unique)
    assert ran.code == 3
    assert ran.rows == [["over", "unchanged, the job had ended before: SUCCEEDED"]], "the others are told all the same"
    assert f"error[not-found]: no job unheard-of of tenant {unique}, so nothing is cancelled" in ran.err
    assert "moorage cancel --before unheard-of" in ran.err
    assert ran.err.endswith("1 job\n"), "what is not known is not counted"
    assert (await node.run("submit", "--job", "unheard-of", "--driver", "noop", tenant=unique)).code == 0
    frames = (await node.run("cancel", "over", "--json", tenant=unique)).frames
    assert [frame["data"]["was"] for frame in frames] == ["SUCCEEDED"]


@pytest.mark.slow
async def test_a_cancel_before_its_submit_is_lifted_by_uncancel(node: Node, unique: str) -> None:
    submit = ("submit", "--job", "late", "--driver", "noop")
    ran = await node.run("cancel", "--before", "late", tenant=unique)
    assert (ran.code, ran.rows) == (0, [["late", "no such job yet; its submit is refused for 1d"]]), ran.err
    assert "lift it: moorage uncancel late" in ran.err
    late = await node.run(*submit, tenant=unique)
    assert (late.code, "error[cancelled-before]: " in late.err) == (1, True), late.err
    assert "moorage uncancel late" in late.err
    lifted = await node.run("uncancel", "late", tenant=unique)
    assert (lifted.code, lifted.rows) == (0, [["late", "its submit is accepted again"]]), lifted.err
    assert (await node.run(*submit, tenant=unique)).code == 0
    again = await node.run("uncancel", "late", tenant=unique)
    assert (again.code, again.rows) == (0, [["late", "unchanged, nothing is in its way"]]), again.err


@pytest.mark.parametrize("verb", ["show", "explain", "logs"])
async def test_a_job_nobody_knows_is_exit_code_3(node: Node, unique: str, verb: str) -> None:
    ran = await node.run(verb, "nobody", tenant=unique)
    assert ran.code == 3
    assert ran.err.startswith("error[not-found]: ")
    assert "fix: moorage ls" in ran.err


async def test_an_empty_list_says_where_it_looked(node: Node, unique: str) -> None:
    ran = await node.run("ls", "--state", "claimed,running", tenant=unique)
    assert (ran.code, ran.out) == (0, "")
    assert f"tenant {unique} in CLAIMED, RUNNING" in ran.err
    bad = await node.run("ls", "--state", "lost", tenant=unique)
    assert (bad.code, bad.err.splitlines()[0][:24]) == (2, "error[invalid-argument]:")


async def test_show_watch_is_a_stream_of_frames(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "seen", "--driver", "noop", "--", "sleep", "0.4", tenant=unique)
    ran = await node.run("show", "seen", "--watch", "--json", tenant=unique)
    assert ran.code == 0
    assert {frame["kind"] for frame in ran.frames} == {"event"}
    changes = [change for frame in ran.frames for change in frame.get("changes", [])]
    assert [change["rev"] for change in changes] == list(range(1, len(changes) + 1))
    assert changes[-1]["state"] == "SUCCEEDED"


async def test_show_watch_prints_a_line_of_whole_cells_for_each_change(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "seen", "--driver", "noop", "--", "sleep", "0.1", tenant=unique)
    ran = await node.run("show", "seen", "--watch", tenant=unique)
    rows = [line.split("\t") for line in ran.out.splitlines() if line[0].isdigit()]
    assert [row[0] for row in rows] == [str(rev) for rev in range(1, len(rows) + 1)]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row[1]) for row in rows), rows
    assert {row[6] for row in rows} == {"-", "0"}


async def _is(node: Node, tenant: str, job: str, state: str) -> bool:
    return bool((await node.run("show", job, "--json", tenant=tenant)).frame["data"]["state"] == state)
