"""`moorage simulate` on files that are no good traces, as one types it: one error, and the exit code of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.cli.node import moorage

PHILLY = b"vc,job,arrival_s,duration_s,num_gpu\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PHILLY + b"x,a,0,10,0\n", "jobs.csv line 2: num_gpu is '0', allowed: a whole number 1..8192"),
        (PHILLY + b"x,,0,10,1\n", "jobs.csv line 2: job is '', allowed: [A-Za-z0-9_-]{1,64}"),
        (PHILLY + b"x,a\xe9,0,10,1\n", r"jobs.csv line 2: job is b'a\xe9', which is not UTF-8"),
        (b"at_s,runs_s,job\n1,2," + b"9" * 200_000, "jobs.csv line 2: the line is too long"),
        (
            b"name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time\na b,1,1,0,0,0,10\n",
            "jobs.csv line 2: name is 'a b', allowed: [A-Za-z0-9_-]{1,64}",
        ),
    ],
    ids=["no GPUs", "no name", "no UTF-8", "a long line", "no job id"],
)
async def test_a_strange_trace_is_one_error_with_where_and_what(tmp_path: Path, text: bytes, says: str) -> None:
    file = tmp_path / "jobs.csv"
    file.write_bytes(text)
    chosen = ["--cluster", "x"] if text.startswith(PHILLY) else []
    ran = await moorage("simulate", str(file), "--fleet", "1x4xH100", *chosen)
    assert ran.err.startswith(f"error[invalid-argument]: {says}\n")
    assert "\nfix: " in ran.err
    assert (ran.code, ran.out, "Traceback" in ran.err) == (2, "", False)


async def test_of_an_error_its_fields_are_told(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("at_s,runs_s,gpu,gang\n1,2,1xH100,yes\n")
    ran = await moorage("simulate", str(file), "--fleet", "1x4xH100", "--json")
    told = json.loads(ran.out)
    assert (told["code"], told["found"], told["allowed"]) == ("invalid-argument", "yes", "0, 1, true or false")


async def test_a_node_list_that_is_wrong_is_told_by_line_and_column(tmp_path: Path) -> None:
    trace, nodes = tmp_path / "jobs.csv", tmp_path / "nodes.csv"
    trace.write_text("at_s,runs_s\n1,2\n")
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\nn,1,1,many,T4\n")
    ran = await moorage("simulate", str(trace), "--fleet", str(nodes))
    assert ran.err.startswith(
        "error[invalid-argument]: nodes.csv line 2: gpu is 'many', allowed: a whole number 0..64\n"
    )
    assert ran.code == 2


async def test_a_fleet_that_is_no_name_of_a_file_either_is_told_as_one(tmp_path: Path) -> None:
    trace = tmp_path / "jobs.csv"
    trace.write_text("at_s,runs_s,gpu\n0,60,1\n")
    ran = await moorage("simulate", str(trace), "--fleet", "x" * 5_000)
    assert ran.code == 2
    assert ran.err.startswith("error[invalid-argument]: not a simulated host")


async def test_a_byte_order_mark_hides_no_format(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_bytes(b"\xef\xbb\xbfat_s,runs_s,gpu\n1,2,1xH100\n")
    ran = await moorage("simulate", str(file), "--fleet", "1x4xH100")
    assert ran.code == 0
    assert "1 of 1 jobs ended" in ran.out + ran.err
