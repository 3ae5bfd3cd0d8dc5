"""`moorage usage` against a real node: a table, CSV and JSON, of a tenant and of all."""

from __future__ import annotations

import csv
import re
import sys

import pytest

from moorage.cli.fleet.usage import SECONDS, by_days
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


@pytest.mark.slow
async def test_where_a_wait_went_is_told_of_the_job_and_of_the_tenant(node: Node, unique: str) -> None:
    assert (await node.run("admin", "limit", "--gpus", "1", tenant=unique)).code == 0
    for name, command in (("first", "3"), ("second", "0")):
        asked = ("submit", "--gpu", "1xH100", "--job", name, "--", "sleep", command)
        assert (await node.run(*asked, tenant=unique)).code == 0
    assert (await node.run("wait", "first", "second", tenant=unique)).code == 0
    told = await node.run("usage", "--waits", "--by", "cause,holder", "--csv", tenant=unique)
    rows = {row["cause"]: row for row in csv.DictReader(told.out.splitlines())}
    assert float(rows["limit"]["wait_s"]) >= 1, told.out
    assert (rows["limit"]["holder"], rows["limit"]["jobs"]) == ("", "1")
    shown = await node.run("show", "second", tenant=unique)
    (waited,) = [line for line in shown.out.splitlines() if line.startswith("waited")]
    assert "a limit of its tenant" in waited
    table = await node.run("usage", "--waits", tenant=unique)
    assert table.code == 0, table.err
    assert table.rows[0][:4] == ["CAUSE", "WAIT-H", "GPU-H", "JOBS"]
    of_all = (await node.run("usage", "--waits", "--all", "--by", "tenant", "--json", tenant=unique)).frame["data"]
    sums = {row["tenant"]: row["wait_s"] for row in of_all["rows"]}
    assert sums[unique] == pytest.approx(sum(float(row["wait_s"]) for row in rows.values()), abs=1)
    wrong = await node.run("usage", "--waits", "--by", "person", tenant=unique)
    assert "error[invalid-argument]" in wrong.err
    series = (await node.run("metrics")).out
    assert f'moorage_waited_seconds_total{{cause="limit",model="H100",tenant="{unique}"}}' in series


def test_days_are_sums_of_their_hours() -> None:
    hour_ms, day_ms = 3_600_000, 86_400_000
    of = dict.fromkeys(SECONDS, 2.5)
    rows = [{"tenant": tenant, "hour_ms": at * hour_ms, **of} for tenant in ("a", "b") for at in (0, 23, 24, 47, 48)]
    days = by_days(rows)
    assert [(row["tenant"], row["hour_ms"] // day_ms, row["gpu_s"], row["used_memory_mib_s"]) for row in days] == [
        (tenant, day, total, total) for tenant in ("a", "b") for day, total in ((0, 5.0), (1, 5.0), (2, 2.5))
    ]


async def test_usage_is_summed_by_days(node: Node, unique: str) -> None:
    ran = await node.run("usage", "--by", "tenant,day", "--csv", tenant=unique)
    assert (ran.code, ran.out.splitlines()[0].split(",")[:2]) == (0, ["tenant", "day"]), ran.err
    both = await node.run("usage", "--by", "day,hour", tenant=unique)
    assert (both.code, "not both" in both.err) == (2, True)


async def test_usage_of_all_has_the_fleets_capacity_beside_it(node: Node, unique: str) -> None:
    ran = await node.run("run", "--gpu", "1xH100", "--", "true", tenant=unique)
    assert ran.code == 0, ran.err
    told = await node.run("usage", "--all", "--by", "tenant,day,person", tenant=unique)
    gpus = int(re.findall(r"the fleet has (\d+) GPUs now: [\d,.]+ GPU-hours since then, [\d.]+ % granted", told.err)[0])
    at = told.rows[0].index("FLEET-GPU-H")
    assert {row[at] for row in told.rows[1:]} == {f"{24 * gpus}.0"}
    own = await node.run("usage", "--by", "tenant,day,person", tenant=unique)
    assert "FLEET-GPU-H" not in own.out


async def test_a_workload_that_asks_for_more_memory_than_it_uses_is_told_so(node: Node, unique: str) -> None:
    asks = ("--gpu", "1xH100", "--memory", "4Gi", "--label", "workload=eval")
    takes = ("--", sys.executable, "-S", "-c", "b'x' * 60_000_000")
    ran = await node.run("submit", *asks, "--job", "j0", *takes, tenant=unique)
    assert ran.code == 0, ran.err
    assert "--memory" not in ran.err, "never in a submit's answer"
    for number in range(1, 5):
        assert (await node.run("submit", *asks, "--job", f"j{number}", *takes, tenant=unique)).code == 0
    assert (await node.run("wait", *(f"j{number}" for number in range(5)), tenant=unique)).code == 0
    told = await node.run("advise", tenant=unique)
    assert "eval: 4.0 GiB memory asked, at most " in told.out, told.out + told.err
    assert " used by one process in 5 of 5 jobs: --memory 128Mi has room" in told.out
    planned = await node.run("plan", *asks, *takes, tenant=unique)
    assert "note: eval: 4.0 GiB memory asked, at most " in planned.err
    other = await node.run("plan", "--memory", "4Gi", "--label", "workload=eval", *takes, tenant=unique)
    assert "memory asked" not in other.err
    of_all = (await node.run("advise", "--all", "--json", tenant=unique)).frame["data"]["rows"]
    assert [row["jobs"] for row in of_all if row["tenant"] == unique] == [5]
    again = await node.run("submit", *asks, "--job", "again", *takes, tenant=unique)
    assert "memory asked" not in again.err + again.out
