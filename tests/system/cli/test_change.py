"""`moorage change`: a job changed in place, by the command."""

from __future__ import annotations

from tests.system.cli.node import Node

SWEEP = ("submit", "--job", "j", "--array", "0-3", "--max-running", "1", "--driver", "noop", "--", "hang")


async def test_a_sweep_is_changed_in_place_and_stays_the_job_that_was_submitted(node: Node, unique: str) -> None:
    await node.run(*SWEEP, tenant=unique)
    ran = await node.run("change", "j", "--max-running", "3", "--priority", "60", "--time-limit", "2h", tenant=unique)
    assert (ran.code, ran.rows[0][:1]) == (0, ["j"]), ran.err
    assert "now: at most 3 at once, priority 60, time limit 2h" in ran.out
    again = await node.run("change", "j", "--max-running", "3", tenant=unique)
    assert "unchanged: at most 3 at once" in again.out
    assert "exists already" in (await node.run(*SWEEP, tenant=unique)).err
    await node.run(*SWEEP[:2], "k", *SWEEP[3:], tenant=unique)
    both = await node.run("change", "j,k", "last", "--priority", "61", tenant=unique)
    assert ([row[0] for row in both.rows], both.code) == (["j", "k"], 0), both.err
    fewer = await node.run("change", "j", "--replicas", "3", tenant=unique)
    assert fewer.code == 0, fewer.err
    await node.run("cancel", "k", tenant=unique)
    await node.run("wait", "k", tenant=unique)
    live = await node.run("change", "*", "--priority", "62", tenant=unique)
    assert ([row[0] for row in live.rows], live.code) == (["j"], 0), live.err
    await node.run("cancel", "j", tenant=unique)
    await node.run("wait", "j", tenant=unique)
    for words, code, says in (
        (("--priority", "60"), 2, "no job is named"),
        (("j",), 2, "name --replicas, --max-running, --priority, --time-limit, --hold or --release"),
        (("j", "--priority", "101"), 2, "0..100"),
        (("nosuch", "--priority", "1"), 3, "not-found"),
        (("*", "--priority", "1"), 3, "that has not ended"),
    ):
        refused = await node.run("change", *words, tenant=unique)
        assert (refused.code, says in refused.err) == (code, True), refused.err
