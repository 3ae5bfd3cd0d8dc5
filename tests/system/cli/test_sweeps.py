"""Sweeps from the command to the processes, against a real node: items of stdin, of a large file, of a file of jobs."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from moorage.client import AsyncClient, FailedReplica, JobFailed
from tests.system.cli.node import Node, moorage
from tests.waiting import until


async def test_each_line_of_stdin_is_a_replica(node: Node, unique: str) -> None:
    script = 'echo "$MOORAGE_INDEX $MOORAGE_ITEM $0"'
    ran = await node.run(
        "run", "--each-line", "-", "--", "sh", "-c", script, "<{item}>", tenant=unique, stdin="a b\nc\n"
    )
    assert ran.code == 0, ran.err
    assert sorted(ran.out.splitlines()) == ["[0] 0 a b <a b>", "[1] 1 c <c>"]


async def test_items_of_a_large_file_come_among_the_files(node: Node, unique: str, tmp_path: Path) -> None:
    rows = "".join(f"{number / 10},{number}\n" for number in range(5_000))
    (tmp_path / "sweep.csv").write_text(f"lr,seed\n{rows}")
    words = ("--", "sh", "-c", 'wc -l < sweep.csv; echo "$MOORAGE_ITEM_LR" {seed}')
    ran = await moorage("run", "--each", "sweep.csv", "--array", "0,4999%1", *words, env=node.env(unique), cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert sorted(ran.out.splitlines()) == ["[0] 0.0 0", "[0] 5001", "[4999] 499.9 4999", "[4999] 5001"]
    refused = await moorage(
        "run", "--each", "sweep.csv", "--array", "0-5000", *words, env=node.env(unique), cwd=tmp_path
    )
    assert (refused.code, "replica 5000 has no item, as there are 5000" in refused.err) == (2, True)


async def test_a_file_of_jobs_is_submitted_with_its_files(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "lrs.txt").write_text("0.1\n0.2\n")
    (tmp_path / "train.sh").write_text('mkdir out; echo "$1" > out/lr')
    (tmp_path / "sweep.yaml").write_text(
        "job: lrs\neach-line: lrs.txt\nwith: [train.sh]\nkeep: [out/**]\ncommand: sh train.sh {item}\n"
    )
    env = node.env(unique)
    assert (await moorage("submit", "-f", "sweep.yaml", env=env, cwd=tmp_path)).out == "lrs\n"
    assert (await moorage("wait", "lrs", env=env)).code == 0
    got = await moorage("get", "lrs", "--out", "got", env=env, cwd=tmp_path)
    assert got.code == 0, got.err
    assert sorted(path.read_text() for path in (tmp_path / "got").rglob("lr")) == ["0.1\n", "0.2\n"]
    (tmp_path / "again.json").write_text(json.dumps({"job": "one", "run": {"argv": ["sh", "train.sh", "0.3"]}}))
    files = ("--with", "train.sh", "--keep", "out/**")
    assert (await moorage("submit", "-f", "again.json", *files, env=env, cwd=tmp_path)).out == "one\n"
    assert (await moorage("wait", "one", env=env)).code == 0
    assert (await moorage("get", "one", "--out", "one", env=env, cwd=tmp_path)).code == 0
    assert [path.read_text() for path in (tmp_path / "one").rglob("lr")] == ["0.3\n"]


async def test_the_failed_of_a_sweep_are_named_by_their_items_run_again_and_merged(
    node: Node, unique: str, tmp_path: Path
) -> None:
    """It takes some 5 s."""
    rows = "".join(f"{number / 10},{'x' * 700}\n" for number in range(30))  # a file among the job's files
    (tmp_path / "lrs.csv").write_text(f"lr,text\n{rows}")
    env = node.env(unique)
    script = 'echo "$RUN" > out; echo "diverged at $MOORAGE_ITEM_LR" >&2; exit $((MOORAGE_INDEX != 0 && RUN == 1))'
    ran = await moorage(
        "submit", "--job", "lrs", "--each", "lrs.csv", "--max-running", "4", "--keep", "out", "--env", "RUN=1",
        "--", "sh", "-c", script, env=env, cwd=tmp_path,
    )  # fmt: skip
    stops = "stops once 20 of {} replicas have failed; --max-failed all goes on"
    assert stops.format(30) in ran.err
    assert (await moorage("wait", "lrs", env=env)).code == 1
    failed = await moorage("show", "lrs", "--failed", env=env)
    header, first, *_ = failed.out.splitlines()
    assert header == "REPLICA\tITEM\tSTATE\tCODE\tLAST LINE"
    assert first.startswith("1\tlr=0.1 text=xxx")
    assert first.endswith("\tFAILED\t1\tdiverged at 0.1")
    assert "moorage again lrs --failed --max-failed all" in failed.err
    assert "moorage again lrs --failed --max-failed all" in (await moorage("explain", "lrs", env=env)).err
    logs = await moorage("logs", "lrs", "--failed", env=env)
    assert "[1] diverged at 0.1\n" in logs.err
    assert "[0]" not in logs.err
    assert (await moorage("logs", "lrs", "--failed", "--replica", "1", env=env)).code == 2
    assert (await moorage("get", "lrs", "--out", "got", env=env, cwd=tmp_path)).code == 0
    again = await moorage("again", "lrs", "--failed", "--max-failed", "all", "--env", "RUN=2", env=env)
    assert again.code == 0, again.err
    assert "stops once" not in again.err
    assert (await moorage("wait", "lrs-again-1", env=env)).code == 0
    assert stops.format(29) in (await moorage("again", "lrs", "--failed", "--job", "third", env=env)).err
    assert "--merge" in (await moorage("get", "lrs-again-1", "--out", "got", env=env, cwd=tmp_path)).err
    got = await moorage("get", "lrs-again-1", "--out", "got", "--merge", env=env, cwd=tmp_path)
    assert got.code == 0, got.err
    assert [(tmp_path / "got" / str(number) / "out").read_text() for number in range(30)] == ["1\n"] + ["2\n"] * 29


async def test_a_failed_job_of_the_sdk_has_the_items_that_failed(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await client.map(
            ["sh", "-c", "echo no {lr} >&2; exit {code}"], [{"lr": 1, "code": 0}, {"lr": 2, "code": 3}]
        )
        with pytest.raises(JobFailed) as failed:
            await job.result()
        assert failed.value.failed == (FailedReplica(1, "FAILED", 3, "", {"lr": 2, "code": 3}, "no 2", "sim-0000"),)
        assert "replica 1 ({'lr': 2, 'code': 3}), code 3: no 2" in failed.value.__notes__


async def test_a_table_has_items_ends_and_kept_values_over_the_reruns(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "grid.csv").write_text('lr,note\n0.5,"a, b"\n1,c\n2,d\n')
    script = (
        'test "$MOORAGE_ITEM_LR" != 2 -o -n "$FIX" || exit 3; mkdir out; '
        'echo "{\\"loss\\": $MOORAGE_ITEM_LR, \\"lr\\": \\"$MOORAGE_ITEM_LR\\", \\"best\\": {\\"step\\": 7}}" '
        "> out/loss.json; "
        "echo nonsense > out/other.json"
    )
    words = ("--each", "grid.csv", "--keep", "out/**", "--job", f"t{unique}", "--", "sh", "-c", script)
    ran = await moorage("submit", *words, env=node.env(unique), cwd=tmp_path)
    assert ran.code == 0, ran.err
    await node.run("wait", f"t{unique}", tenant=unique)
    again = await node.run("again", f"t{unique}", "--failed", "--env", "FIX=1", tenant=unique)
    await node.run("wait", again.out.strip(), tenant=unique)
    file = tmp_path / "table.csv"
    wrote = await node.run("get", f"t{unique}", "out/loss.json", "--table", str(file), tenant=unique)
    assert (wrote.code, wrote.out) == (0, "")
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    assert [(row["replica"], row["lr"], row["note"], row["state"], row["code"], row["loss"], row["best.step"])
            for row in rows] == [
        ("0", "0.5", "a, b", "SUCCEEDED", "0", "0.5", "7"), ("1", "1", "c", "SUCCEEDED", "0", "1", "7"),
        ("2", "2", "d", "SUCCEEDED", "0", "2", "7"),
    ]  # fmt: skip
    assert [row["job"] for row in rows] == [f"t{unique}", f"t{unique}", again.out.strip()]
    looked = await node.run("get", f"t{unique}", "--table", "-", "--json", tenant=unique)
    assert [json.loads(line)["loss"] for line in looked.out.splitlines()] == [0.5, 1, 2]
    assert "other.json is no JSON" in looked.err
    refused = await node.run("get", f"t{unique}", "--table", "-", "--merge", tenant=unique)
    assert (refused.code, "--table writes no files" in refused.err) == (2, True)
    for name in ("table.parquet", "table.xlsx", "table"):
        refused = await node.run("get", f"t{unique}", "--table", str(tmp_path / name), tenant=unique)
        assert (refused.code, "--table writes CSV or lines of JSON" in refused.err) == (2, True)
        assert not (tmp_path / name).exists()


async def test_values_of_a_mapped_function_are_columns_of_its_table(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await client.map(lambda n: {"half": n / 2}, [1, 2], how="cloudpickle", python=sys.executable)
        assert [answer async for answer in job.answers()] == [{"half": 0.5}, {"half": 1.0}]
        rows = await client.table(job.job)
        assert [(row["item"], row["half"], row["state"]) for row in rows] == [
            (1, 0.5, "SUCCEEDED"), (2, 1.0, "SUCCEEDED"),
        ]  # fmt: skip


async def test_what_a_job_kept_is_listed_and_nothing_is_written(node: Node, unique: str) -> None:
    script = "mkdir -p out/deep out/none; printf 12 >out/a; printf 12345 >'out/deep/b c'; ln -s a out/link"
    ran = await node.run("run", "-q", "--job", "kept", "--keep", "out/**", "--", "sh", "-c", script, tenant=unique)
    assert ran.code == 0, ran.err
    listed = await node.run("get", "kept", "--list", tenant=unique)
    assert listed.rows == [
        ["BYTES", "PATH"],
        ["2", "out/a"],
        ["5", "out/deep/b c"],
        ["1", "out/link"],
        ["0", "out/none/"],
    ]
    assert "4 files of job kept, 8 bytes" in listed.err
    some = (await node.run("get", "kept", "out/deep", "--list", "--json", tenant=unique)).frame
    assert some["files"] == [{"path": "out/deep/b c", "bytes": 5}]
    for words in (("--out", "x"), ("--merge",), ("--table", "-")):
        assert (await node.run("get", "kept", "--list", *words, tenant=unique)).code == 2, words
    assert (await node.run("get", "kept", "nope", "--list", tenant=unique)).code == 3


async def test_what_replicas_report_is_in_show_ls_tables_and_rows_while_they_run_and_later(
    node: Node, unique: str, tmp_path: Path
) -> None:
    script = (
        'for n in 1 2 3; do echo "{\\"step\\": $n, \\"loss\\": 0.$MOORAGE_ITEM$n}" >> "$MOORAGE_REPORT"; done; '
        'echo "{\\"loss\\": NaN}" >> "$MOORAGE_REPORT"; while [ ! -e "$GO" ]; do sleep 0.1; done'
    )
    go = tmp_path / "go"
    (tmp_path / "items").write_text("4\n5\n")
    words = ("--each-line", "items", "--env", f"GO={go}", "--job", "grid", "--", "sh", "-c", script)
    ran = await moorage("submit", *words, env=node.env(unique), cwd=tmp_path)
    assert ran.code == 0, ran.err

    async def has_both() -> bool:
        return len([each for each in (await client.job("grid").show()).replica_states if each.reported]) == 2

    rows = [
        {"replica": replica, "step": step, "loss": float(f"0.{replica + 4}{step}")}
        for replica in (0, 1)
        for step in (1, 2, 3)
    ]
    async with AsyncClient(node.url, tenant=unique) as client:
        await until(has_both, 60, "a renewal has told what both report")
        assert await client.reports("grid") == rows
        listed = await node.run("ls", "grid", "--metrics", tenant=unique)
        assert [each for at, each in enumerate(listed.rows[1]) if at != 2] == ["grid", "RUNNING", "3", "0.43"]
        shown = await node.run("show", "grid", tenant=unique)
        assert "step=3 loss=0.43 (of its first replica that reports)" in shown.out
        assert "loss is nan, not a finite number" in shown.out
        go.touch()
        assert (await node.run("wait", "grid", tenant=unique)).code == 0
        assert await client.reports("grid") == rows
        table = await client.table("grid")
        assert [(row["item"], row["step"], row["loss"], row["state"]) for row in table] == [
            ("4", 3, 0.43, "SUCCEEDED"), ("5", 3, 0.53, "SUCCEEDED"),
        ]  # fmt: skip
        assert (await client.job("grid").show()).reported == {"step": 3, "loss": 0.43}
        assert "<td" in (await client.ls("grid"))._repr_html_()
        assert "step=3 loss=0.43" in (await client.ls("grid"))._repr_html_()
