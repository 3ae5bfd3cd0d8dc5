"""`moorage plan` against a real leader: now, later, never; with edits; and a submit that goes by it."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest

from moorage.client import AsyncClient, AsyncJob
from moorage.client.errors import Rejected
from tests.system.cli.node import Node, Ran


@pytest.mark.slow
async def test_now_never_and_with_other_hosts(node: Node, unique: str) -> None:
    await node.until_free()
    now = await node.run("plan", "--gpu", "2xH100", "--", "true", tenant=unique)
    assert now.code == 0, now.err
    shown = dict(row[:2] for row in now.rows)
    assert shown["starts"] == "now"
    assert re.fullmatch(r"sim-000\d  2 GPUs", shown["on"])
    assert "--if-seq" in now.err
    unnamed = await node.run("plan", "--gpu", "2", "--replicas", "2", tenant=unique)
    assert (unnamed.code, dict(row[:2] for row in unnamed.rows)["starts"]) == (0, "now"), "without a command"
    assert (await node.run("plan", "--gpu", "2", "--driver", "noop", tenant=unique)).code == 0
    never = await node.run("plan", "--gpu", "8xH100", "--", "true", tenant=unique)
    assert (never.code, dict(row[:2] for row in never.rows)["starts"]) == (8, "never on this fleet")
    added = await node.run("plan", "--gpu", "8xH100", "--add", "1x8xH100", "--json", "--", "true", tenant=unique)
    assert (added.code, added.frame["data"]["starts"]) == (0, "now")
    imagined = await node.run("plan", "--gpu", "8xH100", "--add", "1x8xH100", tenant=unique)
    assert "--if-seq" not in imagined.err, "no submit would do that"
    assert added.frame["data"]["places"][0]["worker"] == "plan-0"
    mixed = await node.run("plan", "--gpu", "2xL40S|L4", "--add", "1xL40S,1xL4", tenant=unique)
    assert dict(row[:2] for row in mixed.rows)["on"] == "plan-0  2 GPUs, which differ: NVIDIA L40S, NVIDIA L4"
    drained = await node.run("plan", "--drain", "sim-0000", "--json", tenant=unique)
    assert drained.frame["data"]["empty"] == {"sim-0000": 0}
    assert ["empty", "sim-0000 now"] in (await node.run("plan", "--drain", "sim-0000", tenant=unique)).rows
    fleet = await node.run("fleet", "--json")
    assert {row["flag"] for row in fleet.frame["data"]["workers"]} == {"open"}, "nothing was drained"


@pytest.mark.slow
async def test_a_part_that_starts_now_is_told_as_a_part(node: Node, unique: str) -> None:
    await node.until_free()
    part = await node.run("plan", "--gpu", "4xH100", "--replicas", "3", tenant=unique)
    shown = dict(row[:2] for row in part.rows)
    assert part.code == 7, "as for what waits"
    assert shown["starts"] == "2 of 3 replicas start now; the rest wait: busy: needs 4 more H100 on one host"
    assert shown["waiting"] == "1 replica"
    told = await node.run("plan", "--gpu", "4xH100", "--replicas", "3", "--json", tenant=unique)
    assert (told.frame["data"]["replicas_now"], told.frame["data"]["replicas"]) == (2, 3)
    near = await node.run("plan", "--gpu", "1xh100_80gb", tenant=unique)
    assert "H100:80G instead of h100_80gb" in near.out + near.err
    warned = await node.run("plan", "--gpu", "1xH10", tenant=unique)
    assert "H10 is only a part of a word in NVIDIA H100 80GB HBM3; ~H10 takes that, too" in warned.out + warned.err


async def test_other_gpus_where_no_worker_could_ever_give_the_first(node: Node, unique: str) -> None:
    instead = ("--gpu", "1xZ9000", "--or-gpu", "9xH100", "--or-gpu", "1xH100@time-slice=10G", "--driver", "noop")
    ran = await node.run("submit", "--job", "i", *instead, "--", "exit", "0", tenant=unique)
    assert (ran.code, ran.out) == (0, "i\n"), ran.err
    assert "1xZ9000, or a limit refuses it; the job asks for 1xH100@time-slice=10G instead" in ran.err
    shown = await node.run("show", "i", "--json", tenant=unique)
    assert shown.frame["data"]["request"]["gpu"]["sharing"] == "time-slice"
    first = await node.run("plan", "--gpu", "1xZ9000", "--or-gpu", "9xH100", tenant=unique)
    assert (first.code, "Z9000" in first.out + first.err) == (8, True), "none could: as it was asked for"
    supposed = await node.run("plan", *instead, "--add", "1x9xH100", "--json", tenant=unique)
    assert [place["worker"] for place in supposed.frame["data"]["places"]] == ["plan-0"], "one could, if it were there"
    again = await node.run("submit", "--job", "i", *instead, "--", "exit", "0", tenant=unique)
    assert (again.code, "exists already" in again.err) == (0, True), again.err
    changed = await node.run("submit", "--instead-of", "i", *instead, tenant=unique)
    assert (changed.code, "--or-gpu and several drivers are for new jobs" in changed.err) == (2, True)


async def test_an_id_that_is_taken_is_told_as_its_submit_would_be(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "hog", "--driver", "noop", "--", "exit", "0", tenant=unique)
    refused = await node.run("plan", "--job", "hog", "--", "true", tenant=unique)
    assert (refused.code, "conflict" in refused.err) == (1, True), refused.err
    repeat = await node.run("plan", "--job", "hog", "--driver", "noop", "--", "exit", "0", tenant=unique)
    assert (repeat.code, ["starts", "it is a job already"] in [row[:2] for row in repeat.rows]) == (0, True), repeat.out
    assert "warning[duplicate]: a job with this id and content exists already, " in repeat.err
    await node.run("cancel", "--before", "gone", tenant=unique)
    gone = await node.run("plan", "--job", "gone", "--", "true", tenant=unique)
    assert (gone.code, "cancelled-before" in gone.err) == (1, True), gone.err
    assert "moorage uncancel gone" in gone.err


async def test_a_wish_that_only_waits_is_kept(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        wish, other = client.request(["true"], "4xH100"), client.request(["true"], "1xH100")
        busy = [await client.submit(["sleep", "60"], gpu="4xH100", limit=60) for _ in range(2)]
        assert (await client.plan(wish)).starts != "now"
        assert await client.first_possible([wish, other]) == wish
        never = client.request(["true"], "1xZ9000", fields={"on_no_match": "reject"})
        assert await client.first_possible([never, other]) == other
        assert await client.first_possible([never]) == never
        await client.admin.limit(gpus=2, tenant=unique)
        assert await client.first_possible([wish, other]) == other, "the limit refuses four GPUs, and not one"
        assert await client.first_possible([wish]) == wish, "its submit says why it is refused"
        await client.admin.limit(gpus=0, tenant=unique)
        with pytest.raises(Rejected, match="no request to choose from"):
            await client.first_possible([])
        for job in busy:
            await job.cancel()


async def test_not_now_says_when_and_a_submit_goes_by_the_plan(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        jobs: list[AsyncJob] = []
        while not jobs:  # what an earlier test left may still be written
            seq = (await client.plan(["sleep", "60"], gpu="4xH100")).ledger
            with contextlib.suppress(Rejected):
                jobs.append(await client.submit(["sleep", "60"], gpu="4xH100", if_seq=seq, limit=60))
        late = await node.run("submit", "--gpu", "4xH100", "--if-seq", str(seq), "--", "sleep", "60", tenant=unique)
        assert late.code == 1
        assert "error[moved-on]" in late.err
        jobs.append(await client.submit(["sleep", "60"], gpu="4xH100", limit=60))
        told = await node.run("plan", "--gpu", "1xH100", "--json", "--", "true", tenant=unique)
        assert (told.code, told.frame["data"]["starts"]) == (7, "later")
        assert 0 < told.frame["data"]["in_ms"]["p50_ms"] <= 60_000
        assert (await client.ls()).counts.keys() <= {"RUNNING", "CLAIMED", "PLACED"}, "nothing was submitted"
        for job in jobs:
            await job.cancel()


async def test_of_submits_that_race_by_one_plan_exactly_one_is_taken(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as one, AsyncClient(node.url, tenant=f"{unique}-b") as other:
        clients = [client for client in (one, other) for _ in range(4)]
        taken: list[AsyncJob] = []
        while not taken:  # the fleet is everybody's: what somebody else did since then may make all of them late
            planned = await one.plan(["true"], gpu="1xH100", quota={f"{unique}-b": 4}, share={unique: (3, 2)})
            if planned.starts != "now":
                continue  # other tests' jobs have the GPUs
            racing = [client.submit(["true"], gpu="1xH100", if_seq=planned.ledger) for client in clients]
            outcomes = await asyncio.gather(*racing, return_exceptions=True)
            lost = [outcome for outcome in outcomes if isinstance(outcome, Rejected)]
            taken = [outcome for outcome in outcomes if isinstance(outcome, AsyncJob)]
            assert len(lost) + len(taken) == 8
            assert {error.code for error in lost} == {"moved-on"}
            assert len(taken) <= 1, outcomes
        await taken[0].result("90s")


@pytest.mark.slow
async def test_what_cannot_be_planned_is_said(node: Node, unique: str) -> None:
    for words, found in (
        (("plan",), "nothing to plan"),
        (("plan", "--add", "2y"), "2y"),
        (("plan", "--quota", "acme"), "acme"),
        (("plan", "--share", "acme=x"), "acme=x"),
    ):
        ran = await node.run(*words, tenant=unique)
        assert (ran.code, found in ran.err) == (2, True), ran.err
    ran = await node.run("plan", "--drain", "sim-0O", tenant=unique)
    assert (ran.code, "no worker sim-0O" in ran.err) == (3, True)
    assert (await node.run("plan", "--quota", f"{unique}=none", "--gpu", "1xH100", tenant=unique)).code == 0


@pytest.mark.slow
async def test_a_job_that_is_not_expected_to_start_in_time_is_refused_if_it_asks_for_that(
    node: Node, unique: str
) -> None:
    assert (await node.run("admin", "limit", "--gpus", "1", tenant=unique)).code == 0

    async def submit(job: str, *flags: str) -> Ran:
        return await node.run("submit", "--gpu", "1xH100", *flags, "--job", job, "--", "sleep", "60", tenant=unique)

    first = await submit("first", "--time-limit", "2m", "--or-refuse")
    assert first.code == 0, "it starts now" + first.err
    late = await submit("late", "--start-within", "30s", "--or-refuse")
    assert (late.code, "error[failed-precondition]" in late.err, "in half of the cases" in late.err) == (1, True, True)
    assert (await node.run("show", "late", tenant=unique)).code != 0, "nothing of it was written"
    surely = await submit("surely", "--start-within", "30s", "--or-refuse", "0.9")
    assert "in nine of ten cases" in surely.err
    fine = await submit("fine", "--start-within", "10m", "--or-refuse")
    assert fine.code == 0, fine.err
    assert "starts so in 5 of 10 cases" in (await node.run("show", "fine", tenant=unique)).out
    again = await submit("fine", "--start-within", "10m", "--or-refuse")
    assert again.code == 0, "the same id and content is no second job" + again.err
    await node.run("cancel", "first", "fine", tenant=unique)
