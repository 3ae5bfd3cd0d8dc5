"""`moorage simulate`, as one types it: tables, files, and what is wrong with a trace or a fleet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from moorage.cli.study.simulate import whole
from moorage.schemas.reasons import REASONS
from tests.system.cli.node import Node, moorage, on_a_terminal, read_all

LINES = '{"at_s": 0, "runs_s": 60, "request": {"job": "a", "gpu": {}}}\n{"at_s": 1, "runs_s": 60}\n'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "jobs.jsonl"
    file.write_text(LINES)
    return file


@pytest.mark.slow
async def test_a_run_each_ranker_in_table_json_files_and_picture(trace: Path, tmp_path: Path) -> None:
    files = ("--plot", str(tmp_path / "p.svg"), "--jobs-csv", str(tmp_path / "j.csv"))
    ran = await moorage("simulate", str(trace), "--fleet", "1x2xH100", "--ranker", "pack,headroom", *files)
    assert ran.code == 0, ran.err
    assert ran.out.count("JOBS OF\tJOBS\tSTARTED") == 2
    assert "pack: 2 of 2 jobs ended" in ran.err
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert (tmp_path / "j-1.csv").read_text().splitlines()[1] == "default,a,1 GPU,1.0,0.0,0.0,60.0,0.0,SUCCEEDED,1"
    assert (tmp_path / "j-2.csv").exists()
    as_json = await moorage("simulate", str(trace), "--fleet", "1x2xH100", "--json")
    report = json.loads(as_json.out)
    assert (report["kind"], report["jobs"], report["ended"]) == ("simulation", 2, 2)


@pytest.mark.slow
async def test_the_picture_names_the_cluster_of_a_trace_of_several(tmp_path: Path) -> None:
    file, picture = tmp_path / "philly.csv", tmp_path / "p.svg"
    file.write_text("vc,job,arrival_s,duration_s,num_gpu\na,a-1,0,5,1\nb,b-1,0,5,1\n")
    ran = await moorage("simulate", str(file), "--cluster", "b", "--fleet", "1x2xH100", "--plot", str(picture))
    assert ran.code == 0, ran.err
    assert "philly.csv, cluster b" in picture.read_text()


async def test_the_clock_stops_where_it_is_told_to(trace: Path) -> None:
    ran = await moorage("simulate", str(trace), "--fleet", "1x2xH100", "--until", "2s", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["cut_at_h"] is not None


@pytest.mark.slow
async def test_limits_and_shares_of_tenants_hold_from_the_beginning(tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text(
        "".join(
            f'{{"at_s": 0, "runs_s": 600, "tenant": "{"ab"[at % 2]}", "request": {{"gpu": {{}}}}}}\n'
            for at in range(96)
        )
    )

    async def started(*rights: str) -> dict[str, int]:
        ran = await moorage("simulate", str(file), "--fleet", "1x8xH100", "--until", "50m", "--json", *rights)
        assert ran.code == 0, ran.err
        report = json.loads(ran.out)
        assert {f"--{name}" for name in report["settings"]} == set(rights[::2]), "the report says what held"
        return {name: waits["started"] for name, waits in report["tenants"].items()}

    assert await started() == {"a": 24, "b": 24}
    assert await started("--quota", "b=1") == {"a": 42, "b": 6}, "one in each of six waves"
    assert await started("--share", "a=3") == {"a": 36, "b": 12}
    assert await started("--share", "a=1:8") == {"a": 48, "b": 0}, "guaranteed to it, and never idle"


#: so many that their list would not fit into memory
MANY_RUNS = [f"--set={key}={','.join(map(str, range(1, 101)))}" for key in (
    "renew_s", "lease_s", "grace_s", "margin_s", "takeover_s", "heartbeat_s"
)]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), "no hosts to simulate"),
        (("--fleet", "2yH100"), "2yH100"),
        (("--fleet", "nosuch.toml"), "nosuch.toml cannot be read: there is no such file"),
        (("--fleet", "x" * 5_000), "error[invalid-argument]: not a simulated host"),
        (("--fleet", "1xH100", "--cluster", "a"), "is not a philly trace, so --cluster has nothing to choose from"),
        (("--fleet", "1xH100", "--quota", "3"), "--quota 3 names no tenant"),
        (("--fleet", "1xH100", "--quota", "a=0"), "allowed 1..1000000 GPUs, or none for no limit"),
        (("--fleet", "1xH100", "--share", "a"), "--share a is not a tenant with a weight"),
        (("--fleet", "1xH100", "--ranker", "nosuch"), "error[bad-settings]: ranker must be"),
        (("--fleet", "1xH100", "--ranker", "nosuch"), "fix: give --ranker another value"),
        (("--fleet", "1xH100", "--ranker", "nosuch:Best"), "nosuch:Best: there is no module 'nosuch'"),
        (("--fleet", "1xH100", "--ranker", "pathlib:Path"), "pathlib:Path: it is no Ranker"),
        (("--fleet", "1xH100", "--set", "nosuch=1"), "nosuch"),
        (
            ("--fleet", "1xH100", "--set", "jobs_max=x"),
            "found 'x', from --set jobs_max\nfix: for example --set jobs_max=",
        ),
        (
            ("--fleet", "1xH100", "--set", "lease_s=1s"),
            "fix: give --set lease_s or renew_s (--set renew_s) or takeover_s",
        ),
        (("--fleet", "1xH100", "--set", "ranker"), "needs key=value"),
        (("--fleet", "1xH100", "--set", "renew_s=1,2,3,4,5,6,7,8"), "8 runs in one call"),
        (("--fleet", "1xH100", *MANY_RUNS), "1000000000000 runs in one call"),
        (("--fleet", "1xH100", "--format", "philly", "--cluster", "x"), "invalid-argument"),
        (("--fleet", "1xH100", "--until", "soon"), "soon"),
        (("--fleet", "1xH100", "--plot", "/nosuch/p.svg"), "/nosuch/p.svg cannot be written: No such folder"),
        (("--fleet", "1xH100", "--jobs-csv", "/proc"), "/proc cannot be written: Is a directory"),
    ],
)
async def test_what_is_wrong_is_said(trace: Path, arguments: tuple[str, ...], found: str) -> None:
    ran = await moorage("simulate", str(trace), *arguments)
    assert ran.code == 2, ran.err
    assert found in ran.err
    assert "jobs ended" not in ran.err, "it is said before anything is run"
    assert "Traceback" not in ran.err


async def test_a_file_that_takes_nothing_more_is_told(trace: Path) -> None:
    ran = await moorage("simulate", str(trace), "--fleet", "1xH100", "--timeline-csv", "/dev/full")
    assert ran.code == 1
    assert "/dev/full cannot be written: No space left on device" in ran.err
    assert "2 of 2 jobs ended" in ran.err, "what was found out is told all the same"


@pytest.mark.slow
async def test_who_never_starts_is_told(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("at_s,runs_s,tenant,gpu\n0,10,t,16\n1,10,t,1\n")
    ran = await moorage("simulate", str(file), "--fleet", "1x8xH100")
    assert "1 of 2 jobs ended" in ran.err
    assert "1 never started" in ran.err
    assert f"  t/job-1 never started: count: {REASONS['count'].means} (it asks for 16xany)" in ran.err
    told = json.loads((await moorage("simulate", str(file), "--fleet", "1x8xH100", "--json")).out)
    assert list(told["never"]) == ["t/job-1"]


async def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    """`tests/unit/scheduler/simulate/test_strange_traces.py` has what may be wrong within a trace."""
    file = tmp_path / "x.txt"
    for text, says in (
        (b"hello\n", "is not a trace in a known format"),
        (b"at_s,runs_s,job\n1,2,caf\xe9\n", r"x.txt line 2: job is b'caf\xe9', which is not UTF-8"),
    ):
        file.write_bytes(text)
        ran = await moorage("simulate", str(file), "--fleet", "1xH100")
        assert (ran.code, says in ran.err, "\nfix: " in ran.err, ran.out) == (2, True, True, ""), ran.err
    ran = await moorage("simulate", str(tmp_path / "none"), "--fleet", "1xH100")
    assert (ran.code, "cannot be read" in ran.err) == (2, True)


async def test_of_an_error_its_fields_are_told(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("at_s,runs_s,gpu,gang\n1,2,1xH100,yes\n")
    ran = await moorage("simulate", str(file), "--fleet", "1x4xH100", "--json")
    told = json.loads(ran.out)
    assert (told["code"], told["found"], told["allowed"]) == ("invalid-argument", "yes", "0, 1, true or false")


async def test_a_byte_order_mark_hides_no_format(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_bytes(b"\xef\xbb\xbfat_s,runs_s,gpu\n1,2,1xH100\n")
    ran = await moorage("simulate", str(file), "--fleet", "1x4xH100")
    assert (ran.code, "1 of 1 jobs ended" in ran.out + ran.err) == (0, True)


@pytest.mark.slow
async def test_on_a_terminal_it_tells_how_far_it_is_and_nothing_of_that_goes_to_a_pipe(trace: Path) -> None:
    file = trace.with_name("many.csv")
    file.write_text("at_s,runs_s,tenant,gpu\n" + "".join(f"{at},90,t,1\n" for at in range(4000)))
    words = ("simulate", str(file), "--fleet", "4x8xH100", "--jobs-csv", str(trace.with_name("out.csv")))
    async with on_a_terminal(*words, env={}) as (process, terminal):
        text = ""
        while " of the jobs have ended" not in text:
            text += (await asyncio.to_thread(os.read, terminal, 4096)).decode()
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        text += read_all(terminal)
    assert ", stopped at " in text
    assert "Traceback" not in text
    assert sorted(path.name for path in trace.parent.iterdir()) == ["jobs.jsonl", "many.csv", "out.csv"]
    piped = await moorage("simulate", str(trace), "--fleet", "1x2xH100")
    assert "\r" not in piped.err


def test_a_file_that_is_not_written_to_its_end_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("as it was")

    def interrupted() -> None:
        with whole(file) as part:
            part.write_text("half of")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.csv"]
    assert file.read_text() == "as it was"


@pytest.mark.slow
async def test_a_trace_of_a_running_ledger_is_proven_and_changed(node: Node, unique: str, tmp_path: Path) -> None:
    file = str(tmp_path / "t.jsonl")
    for name in ("a", "b"):
        assert (await node.run("run", "--gpu", "1xH100", "--job", name, "--", "true", tenant=unique)).code == 0
    written = await node.run("admin", "trace", file)
    assert written.code == 0, written.err
    assert " records from record " in written.err
    proven = (await node.run("simulate", file, "--prove", "--json")).out.splitlines()[0]
    told = json.loads(proven)
    assert told["kind"] == "proof"
    assert told["placements"] >= 2
    unknown = await node.run("simulate", file, "--without", "nobody")
    assert (unknown.code, "no host nobody joins" in unknown.err) == (2, True)
    unknown = await node.run("simulate", file, "--quota", "nobody=1@0s")
    assert (unknown.code, "no job of tenant nobody" in unknown.err) == (2, True)
    (tmp_path / "rules.toml").write_text(
        f'[[rule]]\ntenant = "nobody"\nmax_wait_s = 1\n[[rule]]\ntenant = "{unique}"\nmax_wait_s = 900\n'
    )
    judged = await node.run("policy", "test", str(tmp_path / "rules.toml"), "--trace", file)
    assert [row[1] for row in judged.rows[1:]] == ["no job", "kept"], judged.out
    assert "no job of which tenant nobody: max_wait_s 1 says anything" in judged.err
    again = await node.run("admin", "trace", file)
    assert (again.code, "File exists" in again.err) == (1, True)
    text = (await node.run("admin", "trace", "-", "--anonymous")).out
    assert unique not in text
    assert '"placed"' in text
