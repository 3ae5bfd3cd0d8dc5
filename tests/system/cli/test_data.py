"""`--data` from the command to the process: a folder of this machine is sent once, and shared read-only there."""

from __future__ import annotations

from pathlib import Path

from tests.system.cli.node import Node, moorage
from tests.waiting import until

NOWHERE = ("--requires", "zone=none", "--on-no-match", "wait")


async def test_a_folder_of_this_machine_is_sent_once_and_its_content_is_what_jobs_read(
    node: Node, unique: str, tmp_path: Path
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.csv").write_text("1\n2\n")
    env = node.env(unique)
    script = 'cat "$MOORAGE_DATA_SET/a.csv"'
    words = ("run", "--data", "set=./set", "--job")
    for job in ("first", "second"):
        ran = await moorage(*words, job, "--", "sh", "-c", script, env=env, cwd=tmp_path)
        assert (ran.code, ran.out) == (0, "1\n2\n"), ran.err
    shown = await moorage("show", "second", env=env)
    assert "set=object:" in shown.out
    refused = await moorage(*words, "third", "--data", "m=s3://me:secret@b/k", "--", "true", env=env, cwd=tmp_path)
    assert refused.code == 2
    assert "a source has no password in it" in refused.err
    assert "secret@" not in refused.err.replace("s3://me:secret@b/k", "")
    absent = await moorage("run", "--data", "set=./none", "--", "true", env=env, cwd=tmp_path)
    assert absent.code == 2, absent.err


async def test_what_a_job_has_kept_is_data_of_another_fetched_once_it_has_ended(
    node: Node, unique: str, tmp_path: Path
) -> None:
    env = node.env(unique)
    write = 'mkdir -p out/deep && echo "$MOORAGE_INDEX" > out/deep/index && echo x > out/x'
    made = await moorage(
        "run", "--job", "prep", "--array", "0-1", "--keep", "out/**", "--", "sh", "-c", write, env=env, cwd=tmp_path
    )
    assert made.code == 0, made.err
    read = 'cd "$MOORAGE_DATA_SET" && find . -type f | sort && cat 1/out/deep/index'
    ran = await moorage(
        "run", "--data", "set=job:prep", "--job", "reads", "--", "sh", "-c", read, env=env, cwd=tmp_path
    )
    files = "./0/out/deep/index\n./0/out/x\n./1/out/deep/index\n./1/out/x\n"
    assert (ran.code, ran.out) == (0, f"{files}1\n"), ran.err
    assert "set=job:prep:0-1@" in (await moorage("show", "reads", env=env)).out
    for path, script, out in (
        ("1/out/deep", 'cat "$MOORAGE_DATA_SET/index"', "1\n"),
        ("0/out/x", 'cat "$MOORAGE_DATA_SET/x"', "x\n"),
    ):
        ran = await moorage("run", "--data", f"set=job:prep/{path}", "--", "sh", "-c", script, env=env, cwd=tmp_path)
        assert (ran.code, ran.out) == (0, out), ran.err
    absent = await moorage("run", "--data", "set=job:prep/none", "--", "true", env=env, cwd=tmp_path)
    assert absent.code != 0
    assert "data set: job prep has kept no none" in absent.err


async def test_a_plan_knows_which_host_has_a_folder_of_this_machine(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.csv").write_text(unique)
    env, plan = node.env(unique), ("plan", "--data", "set=./set", "--json", "--", "true")
    first = await moorage(*plan, env=env, cwd=tmp_path)
    (place,) = first.frame["data"]["places"]
    other = "sim-0000" if place["worker"] == "sim-0001" else "sim-0001"
    ran = await moorage("run", "--data", "set=./set", "--on", other, "--", "true", env=env, cwd=tmp_path)
    assert ran.code == 0, ran.err

    async def planned() -> bool:
        told = await moorage(*plan, env=env, cwd=tmp_path)
        return [each["worker"] for each in told.frame["data"]["places"]] == [other]

    await until(planned, what=f"{other} has told that it has the folder")
    absent = await moorage("plan", "--data", "set=./none", "--", "true", env=env, cwd=tmp_path)
    assert absent.code == 2, absent.err
    kept = await moorage("plan", "--data", "set=job:none", "--", "true", env=env)
    assert (kept.code != 0, "no job none of tenant" in kept.err) == (True, True), kept.err


async def test_a_job_that_has_not_ended_or_keeps_nothing_is_refused_as_data(node: Node, unique: str) -> None:
    env = node.env(unique)
    for words in (("later", "--keep", "out"), ("plain",)):
        submitted = await moorage("submit", *NOWHERE, "--job", *words, "--", "true", env=env)
        assert submitted.code == 0, submitted.err
    for source, said in (
        ("job:later", "job later has not ended, and its files are fetched once"),
        ("job:none", "no job none of tenant"),
        ("job:a b", "job: stands before the id of a job"),
        ("job:", "job: stands before the id of a job"),
    ):
        refused = await moorage("submit", "--data", f"m={source}", "--", "true", env=env)
        assert refused.code, refused.out
        assert said in refused.err or "data must name a source" in refused.err, refused.err
    after = await moorage("submit", "--after", "later", "--data", "m=job:later/out", "--", "true", env=env)
    assert after.code == 0, after.err
    plain = await moorage("submit", "--after", "plain", "--data", "m=job:plain", "--", "true", env=env)
    assert "job plain keeps no files" in plain.err
    cron = await moorage("schedule", "add", "s", "@daily", "--data", "m=job:later", "--", "true", env=env)
    assert cron.code, cron.out
    dry = await moorage("submit", "--dry-run", "--data", "m=job:later", "--", "true", env=env)
    assert "which files job later keeps, the scheduler knows" in dry.err
    await node.run("cancel", "all", tenant=unique)  # they would wait for ever
