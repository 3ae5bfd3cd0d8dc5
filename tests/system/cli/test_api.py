"""`moorage api`: one frame as it is, and the answer as it came."""

from __future__ import annotations

import msgspec
import pytest

from moorage.schemas.answers.fleet import FleetAnswer, WorkerInfo
from moorage.schemas.described import notes
from moorage.schemas.plan import Plan
from tests.system.cli.node import Node, moorage

FRAME = '{"job": "raw", "run": {"driver": "noop", "argv": ["exit", "0"]}}'


@pytest.mark.slow
async def test_a_frame_is_sent_as_it_is_and_its_answer_is_printed_as_it_came(node: Node, unique: str) -> None:
    ran = await node.run("api", "submit", FRAME, tenant=unique)
    assert (ran.code, ran.err, ran.frame["kind"], ran.frame["job"]) == (0, "", "accepted", "raw")
    again = await node.run("api", "submit", "-", tenant=unique, stdin=FRAME)
    assert again.frame["duplicate"] is True
    many = await node.run("api", "submit", f"[{FRAME}, {FRAME.replace('raw', 'raw2')}]", tenant=unique)
    assert [frame["job"] for frame in msgspec.json.decode(many.out)] == ["raw", "raw2"]
    listed = await node.run("api", "ls", tenant=unique)
    assert {row["job"] for row in listed.frame["data"]["jobs"]} == {"raw", "raw2"}
    fleet = await node.run("api", "admin.fleet")
    assert {"fits_now", "workers"} <= fleet.frame["data"].keys()


@pytest.mark.slow
async def test_the_protocol_page_names_what_fleet_and_plan_answer(node: Node, unique: str) -> None:
    fleet = (await node.run("api", "admin.fleet")).frame["data"]
    assert fleet.keys() <= set(FleetAnswer.__struct_fields__)
    assert {"fits_now", "workers", "schedulers"} <= fleet.keys()
    assert {key for worker in fleet["workers"] for key in worker} <= set(WorkerInfo.__struct_fields__)
    asked = '{"request": {"gpu": {"count": 2}, "run": {"argv": ["true"]}}}'
    plan = (await node.run("api", "plan", asked, tenant=unique)).frame["data"]
    assert plan.keys() <= {name for name, note in notes(Plan).items() if note}
    assert plan["starts"] == "now"


@pytest.mark.slow
async def test_an_error_is_printed_and_has_the_exit_code_of_other_verbs(node: Node, unique: str) -> None:
    for words, code, told in (
        (("show", '{"job": "nobody"}'), 3, "not-found"),
        (("submit", '{"run": {}, "rum": 1}'), 2, "invalid-argument"),
        (("submit", "{oops"), 2, "invalid-argument"),
    ):
        ran = await node.run("api", *words, tenant=unique)
        assert (ran.code, ran.frame["kind"], ran.frame["code"], ran.err) == (code, "error", told, ""), words
    odd = await node.run("api", "no such.verb", tenant=unique)
    assert (odd.code, odd.out) == (2, "")
    assert odd.err.startswith("error[invalid-argument]: 'no such.verb' is not a verb")


async def test_where_nobody_answers_it_is_not_sent_again(nats_url: str) -> None:
    ran = await moorage("api", "ls", "--nats", nats_url, "--timeout", "5s")
    assert (ran.code, ran.out) == (5, "")
    assert "no scheduler listens" in ran.err
