"""`moorage usage` against a real node: a table, CSV and JSON, of a tenant and of all."""

from __future__ import annotations

import csv

import pytest

from tests.system.cli.node import Node


@pytest.mark.slow
async def test_what_a_job_had_is_told_as_table_csv_and_json(node: Node, unique: str) -> None:
    empty = await node.run("usage", tenant=unique)
    assert (empty.code, empty.out) == (0, "")
    assert empty.err.startswith("no GPU time has been counted since ")
    ran = await node.run("run", "--gpu", "1xH100", "--job", "j", "--", "sleep", "1", tenant=unique)
    assert ran.code == 0, ran.err
    told = await node.run("usage", "--by", "tenant,model", "--csv", tenant=unique)
    (row,) = csv.DictReader(told.out.splitlines())
    assert (row["tenant"], "H100" in row["model"], float(row["gpu_s"]) >= 1) == (unique, True, True)
    assert float(row["memory_mib_s"]) > float(row["gpu_s"]) * 70_000
    frame = (await node.run("usage", "--all", "--by", "tenant", "--json", tenant=unique)).frame["data"]
    assert {row["tenant"]: row["gpu_s"] for row in frame["rows"]}[unique] == float(row["gpu_s"])
    table = await node.run("usage", tenant=unique)
    assert table.rows[0] == ["TENANT", "MODEL", "GPU-H", "GIB-H", "USED-GPU-H", "USED-GIB-H"]
    assert table.rows[1][0] == unique
    shown = (await node.run("show", "j", "--json", tenant=unique)).frame["data"]
    assert shown["usage"]["gpu_s"] == float(row["gpu_s"])
    wrong = await node.run("usage", "--by", "user", tenant=unique)
    assert "error[invalid-argument]" in wrong.err
