"""`moorage admin`: an operator's acts on jobs and tenants against a real node, each said and each undone."""

from __future__ import annotations

import pytest

from moorage.cli.fleet.admin import beyond_fleet
from moorage.client import AsyncClient, Rejected
from moorage.schemas.answers.fleet import WorkerInfo
from tests.system.cli.node import Node
from tests.waiting import until


@pytest.mark.slow
async def test_a_job_is_held_moved_up_released_and_requeued(node: Node, unique: str) -> None:
    async def admin(*argv: str) -> str:
        ran = await node.run("admin", *argv, tenant=unique)
        assert ran.code == 0, ran.err
        return ran.out.strip()

    assert await admin("hold", "--queue", "--why", "month end") != ""
    submitted = await node.run("submit", "--gpu", "1xH100", "--job", "j", "--", "sleep", "600", tenant=unique)
    assert (submitted.code, "tenant-held" in submitted.err) == (0, True), submitted.err
    explained = await node.run("explain", "j", tenant=unique)
    found = dict(row[:2] for row in explained.rows)
    assert found["reason"].startswith("held: ")
    assert found["because"].startswith(f"the queue of tenant {unique} is held by operator, unverified (says ")
    assert found["because"].endswith(": month end")
    assert (await admin("hold", "j", "--why", "bad data")).endswith(": bad data, the job is QUEUED")
    assert "on hold already by " in await admin("hold", "j")
    other = await node.run("submit", "--gpu", "1xH100", "--job", "k", "--", "true", tenant=unique)
    assert other.code == 0, other.err
    held = await node.run("admin", "hold", "j,k", tenant=unique)
    assert held.err.splitlines()[-1] == f"undo: moorage admin release k --tenant {unique}", "not j, held before"
    assert await admin("priority", "j", "--to", "90") == "j\tpriority 90, the job is QUEUED"
    assert (await admin("release", "--queue")) == f"tenant {unique}\tqueue released"
    assert await admin("release", "j") == "j\treleased, the job is QUEUED"
    async with AsyncClient(node.url, tenant=unique) as client:
        job = client.job("j")
        await until(lambda: _is(job, "RUNNING"), what="it runs")
        refused = await node.run("admin", "freeze", "j", tenant=unique)
        assert (refused.code, "freezes no jobs" in refused.err) == (1, True), refused.err
        assert await admin("resume", "j") == "j\tunchanged, the job was RUNNING"
        done = await client.admin.requeue("j", why="wrong host")
        assert (done.changed, done.members, done.state) == (True, 1, "RUNNING")
        await until(lambda: _is(job, "RUNNING", attempt=2), what="it runs again")
        shown = await job.show()
        told = [(change.state, change.by) for change in shown.changes if change.by == "operator"]
        assert [state for state, _ in told] == ["HELD", "PRIORITY", "RELEASED", "ENDING"]
        assert shown.priority == 90
        await job.cancel()
        await until(lambda: _is(job, "CANCELLED"), what="it is over")
        over = await node.run("admin", "requeue", "j", tenant=unique)
        assert (over.code, over.err.startswith("error[failed-precondition]: ")) == (1, True)
        assert "moorage again j " in over.err


async def _is(job: object, state: str, attempt: int = 0) -> bool:
    shown = await job.show()  # type: ignore[attr-defined]
    return bool(shown.state == state and shown.attempt >= attempt)


async def test_a_job_is_started_on_a_cordoned_worker_by_name_and_no_other_is(node: Node, unique: str) -> None:
    flags = ("--on", "sim-0001", "--gpu", "1xH100")
    try:
        assert (await node.run("cordon", "sim-0001", "--why", "new fan")).code == 0
        for name in ("first", "check"):
            submitted = await node.run("submit", *flags, "--job", name, "--", "true", tenant=unique)
            assert (submitted.code, "closed" in submitted.err) == (0, True), submitted.err
        explained = await node.run("explain", "check", tenant=unique)
        assert f"moorage admin place check --on WORKER --tenant {unique}" in explained.err
        placed = await node.run("admin", "place", "check", "--on", "sim-0001", tenant=unique)
        assert placed.rows == [["check", "1 replica placed on sim-0001, the job was QUEUED"]], placed.err
        async with AsyncClient(node.url, tenant=unique) as client:
            assert (await client.job("check").result("60s")).state == "SUCCEEDED"
            told = [(change.state, change.by) for change in (await client.job("check").show()).changes]
            assert ("PLACED", "operator") in told
            ran = await node.run("run", *flags, "--place", "--job", "at-once", "--", "echo", "well", tenant=unique)
            assert (ran.code, ran.out) == (0, "well\n"), ran.err
            wide = ("--on", "sim-0001", "--gpu", "4xH100", "--job")
            kept = await node.run("submit", *wide, "keeps", "--place", "--", "sleep", "600", tenant=unique)
            assert (kept.code, "1 replica placed on sim-0001" in kept.err) == (0, True), kept.err
            full = await node.run("submit", *wide, "full", "--place", "--", "true", tenant=unique)
            assert (full.code, full.out) == (1, "full\n")
            assert "job full stays accepted: moorage cancel full ends it" in full.err
            assert "job full cannot start on sim-0001: the worker has no room for it now" in full.err
            assert (await client.job("first").show()).state == "QUEUED"
        acts = (await node.run("admin", "acts", "--since", "1h", "--verb", "place", "--json")).frame["data"]["acts"]
        assert next(row for row in acts if row["tenant"] == unique)["what"] == "1 replica on sim-0001"
    finally:
        await node.run("cancel", "all", tenant=unique)
        await node.run("uncordon", "sim-0001")


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ([], ""),
        (["--on", "a", "--on", "b"], "a b"),
        (["--on", "a", "--dry-run"], "a --dry-run"),
        (["--on", "a", "--instead-of", "j"], "a --instead-of"),
    ],
)
async def test_who_has_a_job_placed_names_one_worker_for_one_job(node: Node, flags: list[str], found: str) -> None:
    refused = await node.run("submit", "--place", *flags, "--", "true")
    assert (refused.code, refused.err.startswith("error[invalid-argument]: --place starts one job on one")) == (2, True)
    assert f"found {found}," in refused.err or not found
    assert "moorage admin place JOB --on WORKER" in refused.err


@pytest.mark.slow
async def test_a_limit_bounds_a_tenant_and_is_told(node: Node, unique: str) -> None:
    limited = await node.run("admin", "limit", "--gpus", "1", "--jobs", "2", "--why", "trial", tenant=unique)
    assert (limited.code, limited.rows) == (0, [[f"tenant {unique}", "at most 1 GPU, 2 jobs"]])
    assert f"note: tenant {unique} has no jobs now" in limited.err, "its name may be mistyped"
    try:
        for name in ("a", "b"):
            flags = ("--gpu", "1xH100", "--job", name)
            assert (await node.run("submit", *flags, "--", "sleep", "600", tenant=unique)).code == 0
        refused = await node.run("submit", "--gpu", "1xH100", "--job", "c", "--", "true", tenant=unique)
        assert (refused.code, refused.err.startswith("error[failed-precondition]: ")) == (1, True)
        huge = await node.run("submit", "--gpu", "2xH100", "--job", "d", "--", "true", tenant=unique)
        assert f"the limit of tenant {unique} is 1" in huge.err
        explained = await node.run("explain", "b", "--json", tenant=unique)
        assert explained.frame["data"]["reason"] == "limit"
        assert explained.frame["data"]["held_by"] == ["job a: 1 GPU"]
        zero = await node.run("admin", "limit", "--gpus", "0", tenant=unique)
        assert (zero.code, f"fix: moorage admin hold --queue --tenant {unique} " in zero.err) == (2, True), zero.err
        nobodys = await node.run("admin", "limit", "--gpus", "none")
        assert (nobodys.code, "--tenant NAME" in nobodys.err) == (2, True), nobodys.err
        assert (await node.run("plan", "--quota", f"{unique}=0", "--gpu", "1")).code == 2
        rows = {row[0]: row for row in (await node.run("admin", "tenants")).rows}
        assert rows[unique][1:4] == ["2", "1", "at most 1 GPU, 2 jobs"]
        listed = (await node.run("admin", "tenants", "--json")).frame["data"]["tenants"]
        assert next(row for row in listed if row["tenant"] == unique)["limit"]["why"] == "trial"
        acts = (await node.run("admin", "acts", "--since", "1h", "--verb", "limit", "--json")).frame["data"]["acts"]
        assert next(row for row in acts if row.get("tenant") == unique)["why"] == "trial"
        rows = {row[4].partition(" ")[0]: row for row in (await node.run("admin", "acts")).rows}
        assert rows[unique][3:] == ["limit", f"{unique} 1 GPU, 2 jobs", "trial"]
    finally:
        await node.run("cancel", "all", tenant=unique)
        lifted = await node.run("admin", "limit", "--gpus", "none", "--jobs", "none", "--json", tenant=unique)
    assert (lifted.frame["kind"], lifted.frame["changed"], "limit" in lifted.frame) == ("done", True, False)


@pytest.mark.slow
async def test_a_share_is_set_told_and_listed(node: Node, unique: str) -> None:
    given = await node.run("admin", "share", "--weight", "3", "--gpus", "2", "--why", "trial", tenant=unique)
    assert (given.code, given.rows) == (0, [[f"tenant {unique}", "weight 3, 2 GPUs guaranteed"]])
    again = await node.run("admin", "share", "--weight", "3", tenant=unique)
    assert again.rows == [[f"tenant {unique}", "weight 3, 2 GPUs guaranteed already"]]
    listed = (await node.run("admin", "tenants", "--json")).frame["data"]["tenants"]
    share = next(row for row in listed if row["tenant"] == unique)["share"]
    assert (share["weight"], share["gpus"], share["why"]) == (3, 2, "trial")
    rows = {row[0]: row for row in (await node.run("admin", "tenants")).rows}
    assert "weight 3, 2 GPUs guaranteed" in rows[unique]
    taken = await node.run("admin", "share", "--weight", "0", "--gpus", "0", "--json", tenant=unique)
    assert (taken.frame["changed"], "share" in taken.frame) == (True, False)
    refused = await node.run("admin", "share", tenant=unique)
    assert (refused.code, refused.err.startswith("error[invalid-argument]: ")) == (2, True)


@pytest.mark.slow
async def test_what_is_ambiguous_is_told_and_does_nothing(node: Node, unique: str) -> None:
    for argv in (("hold",), ("release",), ("hold", "x", "--queue"), ("release", "x", "--worker", "w"), ("limit",)):
        ran = await node.run("admin", *argv, tenant=unique)
        assert (ran.code, ran.err.startswith("error[invalid-argument]: ")) == (2, True), (argv, ran.err)
        assert "fix: " in ran.err
    nobody = await node.run("admin", "hold", "nobody", tenant=unique)
    assert (nobody.code, "error[not-found]" in nobody.err) == (3, True)
    released = await node.run("admin", "release", "--worker", "sim-0000")
    assert (released.code, released.rows) == (0, [["sim-0000", "has no unhealthy GPU to release"]])
    async with AsyncClient(node.url, tenant=unique) as client:
        with pytest.raises(Rejected) as refused:
            await client.admin.hold("j", why="x" * 500)
        assert refused.value.problem.field == "$.why"


def test_a_guarantee_above_the_fleet_is_warned_of() -> None:
    fleet = [WorkerInfo(worker=name, state="up", gpus=16) for name in ("a", "b")]
    assert beyond_fleet(200, fleet) == "warning[share]: 200 GPUs guaranteed, but the fleet has only 32"
    assert beyond_fleet(32, fleet) == ""
