"""`moorage again`: jobs once more by their names or labels, on a real node."""

from __future__ import annotations

import asyncio
import re
import shlex

from moorage.cli.jobs.again import Changes
from moorage.cli.jobs.job_flags import JobFlags
from moorage.client import AsyncClient
from moorage.schemas.job import After
from tests.system.cli.node import Node

FAILS: list[str] = ["sh", "-c", "exit $((MOORAGE_INDEX % ${MOD:-2}))"]


def test_each_change_is_a_flag_of_submit() -> None:
    assert vars(Changes()).keys() - {"but"} <= vars(JobFlags()).keys()


async def test_the_jobs_of_a_chain_are_run_again_as_a_chain(node: Node, unique: str) -> None:
    """They were all started at once, the last step first."""
    async with AsyncClient(node.url, tenant=unique) as client:
        await client.submit(["sh", "-c", 'sleep 1; test -n "$OK"'], job="prep", labels={"flow": "x"})
        await client.submit(["true"], job="train", labels={"flow": "x"}, after=["prep"])
        last = await client.submit(["true"], job="eval", labels={"flow": "x"}, after=["train"])
        await client.wait([last], "60s")
        ran = await node.run("again", "--label", "flow=x", "--failed", "--env", "OK=1", tenant=unique)
        assert (ran.code, ran.out.split()) == (0, ["prep-again-1", "train-again-1", "eval-again-1"]), ran.err
        again = {name: (await client.job(f"{name}-again-1").show()).request for name in ("prep", "train", "eval")}
        after = [None if request is None else request.after for request in again.values()]
        assert after == [[], [After("prep-again-1")], [After("train-again-1")]]
        assert (await client.job("eval-again-1").result("60s")).state == "SUCCEEDED"


async def test_what_failed_of_a_sweep_is_run_again(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        one = await client.submit(FAILS, job="one", replicas=4, labels={"sweep": "lr"})
        two = await client.submit(["true"], job="two", labels={"sweep": "lr"})
        await client.wait([one, two], "60s")
        ran = await node.run("again", "one", "--failed", "--env", "MOD=1", "--time-limit", "1h", tenant=unique)
        assert (ran.code, ran.out) == (0, "one-again-1\n"), ran.err
        assert "accepted: 2 replicas of one: 1, 3" in ran.err
        again = client.job("one-again-1")
        assert (await again.result("60s")).state == "SUCCEEDED"
        request = (await again.show()).request
        assert request is not None
        assert (request.workload.timeout_s, request.workload.env, request.labels) == (
            3600,
            {"MOD": "1"},
            {"sweep": "lr"},
        )

        assert ["again of", "one"] in (await node.run("show", "one-again-1", tenant=unique)).rows
        assert ["run again as", "one-again-1"] in (await node.run("show", "one", tenant=unique)).rows

        ran = await node.run("again", "--label", "sweep=lr", "--failed", tenant=unique)
        assert (ran.code, ran.out) == (0, ""), ran.err
        assert "left out: job one was run again before, as one-again-1" in ran.err
        assert "left out: all of job two has succeeded" in ran.err
        assert "0 of 3 jobs run again" in ran.err
        ran = await node.run("again", "--label", "sweep=lr", "--state", "failed", "--json", tenant=unique)
        assert (ran.code, ran.frames) == (0, []), ran.err

        ran = await node.run("again", "one", "--failed", "--replica", "3", "--job", "mine", "--json", tenant=unique)
        assert (ran.code, ran.frame["kind"], ran.frame["job"]) == (0, "accepted", "mine"), ran.err
        assert (await client.job("mine").show()).data["request"]["indices"] == "3"


async def test_those_who_run_it_again_at_once_with_other_changes_all_get_a_job(node: Node, unique: str) -> None:
    await node.run("run", "--job", "one", "--", "false", tenant=unique)
    words = [("again", "one", "--failed", "--env", f"N={number}") for number in range(6)]
    ran = await asyncio.gather(*(node.run(*each, tenant=unique) for each in words))
    assert [each.code for each in ran] == [0] * 6, [each.err for each in ran]
    assert {each.out.strip() for each in ran} == {f"one-again-{number}" for number in range(1, 7)}


async def test_what_cannot_be_run_again_is_told_with_what_to_do(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        await (await client.submit(["true"], job="other")).result("60s")
        await (await client.submit(["true"], job="well")).result("60s")
        for words, said in (
            (("well", "--failed"), "all of job well has succeeded"),
            (("nobody",), "no job nobody"),
            (("well,other", "--job", "x"), "--job names one job"),
            (("well", "--but", "[]"), "an object with fields of the request"),
            (("well", "--replica", "9"), "job well has no replica 9"),
            (("well", "--env", "A"), "--env: the variable A is not set here"),
        ):
            ran = await node.run("again", *words, tenant=unique)
            assert ran.code != 0, words
            assert said in ran.err, (words, ran.err)
        ran = await node.run(
            "again", "well", "--but", '{"labels": {"a": "b"}, "run": {"argv": ["echo", "x"]}}', tenant=unique
        )
        assert (await client.job(ran.out.strip()).result("60s")).state == "SUCCEEDED"
        assert (await client.job(ran.out.strip()).show()).data["request"]["labels"] == {"a": "b"}


async def test_a_job_for_each_worker_is_run_again_on_all_of_them(node: Node, unique: str) -> None:
    await node.run("submit", "--each-worker", "--once", "--job", "check", "--", "false", tenant=unique)
    await node.run("wait", "check", tenant=unique)
    refused = await node.run("again", "check", "--failed", tenant=unique)
    assert (refused.code, "it is run again on all of them" in refused.err) == (1, True), refused.err
    ran = await node.run("again", "check", tenant=unique)
    assert (ran.out, "accepted: each worker of check" in ran.err) == ("check-again-1\n", True), ran.err
    await node.run("wait", "check-again-1", tenant=unique)


async def test_a_job_behind_one_that_has_failed_is_told_to_be_cancelled_at_once_and_what_to_do(
    node: Node, unique: str
) -> None:
    await node.run("run", "--job", "sweep", "--", "false", tenant=unique)
    ran = await node.run("submit", "--job", "eval", "--after", "sweep", "--", "true", tenant=unique)
    assert (ran.code, ran.out) == (0, "eval\n")
    assert "cancelled at once: sweep FAILED\n" in ran.err
    assert "accepted" not in ran.err
    await node.run("again", "sweep", "--but", '{"run": {"argv": ["true"]}}', tenant=unique)
    said = await node.run("explain", "eval", tenant=unique)
    command = """moorage again eval --but '{"after": ["sweep-again-1"]}'"""
    assert f"fix: sweep was run again, as sweep-again-1: {command}\n" in said.err
    ran = await node.run(*shlex.split(command)[1:], tenant=unique)
    assert (await node.run("wait", ran.out.strip(), tenant=unique)).code == 0


async def test_a_submit_says_how_many_replicas_start_and_how_many_wait(node: Node, unique: str) -> None:
    ran = await node.run(
        "submit", "--job", "wide", "--gpu", "1xH100", "--replicas", "100", "--", "sleep", "600", tenant=unique
    )
    await node.run("cancel", "wide", tenant=unique)
    found = re.search(r"^(\d+) start now, (\d+) wait: busy: needs 1 more H100 on one host$", ran.err, re.M)
    assert found is not None, ran.err
    starts, wait = map(int, found.groups())
    assert (starts > 0, starts + wait) == (True, 100)
