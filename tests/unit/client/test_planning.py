"""What a plan is asked, from what a caller says."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from moorage.bus.errors import RequestTimeout
from moorage.client import Rejected
from moorage.client.asking import PLAN_TRY_S, TRY_S, Asking
from moorage.client.planning import first_possible, plan_arguments
from moorage.schemas.errors import Problem
from moorage.schemas.job import Request
from moorage.schemas.plan import Plan


def test_hosts_alike_are_one_entry_with_how_many_there_are() -> None:
    asked = plan_arguments(None, (), "2x8xH100+1x4xL40S+1x8xH100", None, None)
    assert [(entry["count"], len(entry["devices"])) for entry in asked["add"]] == [(3, 8), (1, 4)]


def test_a_share_is_a_weight_or_that_and_gpus_of_its_own() -> None:
    asked = plan_arguments(None, ("n07",), None, {"acme": 16}, {"acme": 3, "vision": (2, 8)})
    assert asked == {
        "drain": ["n07"],
        "add": [],
        "quota": {"acme": 16},
        "share": {"acme": {"weight": 3}, "vision": {"weight": 2, "gpus": 8}},
    }
    assert plan_arguments(b"{}", (), None, 4, None) == {"drain": [], "add": [], "quota": 4, "request": {}}


@pytest.mark.parametrize("add", ["lots", "2000x8xH100"])
def test_what_is_no_host_is_refused(add: str) -> None:
    with pytest.raises(Rejected):
        plan_arguments(None, (), add, None, None)


def test_the_first_possible_is_found_whatever_its_job_id_is() -> None:
    async def plan(request: Request) -> Plan:
        if request.job is not None:
            return Plan("refused", 0, problem=Problem("conflict", "this id is taken"))
        return Plan("never" if request.gpu is not None else "later", 0)

    bodies = ({"job": "i", "gpu": {}, "run": {"argv": ["x"]}}, {"job": "i", "run": {"argv": ["x"]}})
    wishes = [msgspec.convert(body, Request) for body in bodies]
    assert asyncio.run(first_possible(plan, wishes)) is wishes[1]


@pytest.mark.parametrize(
    ("code", "field", "chosen"),
    [
        ("failed-precondition", "$.gpu.count", 1),  # more than the tenant's limit
        ("failed-precondition", "", 0),  # too many jobs of the tenant
        ("queue-full", "", 0),
        ("invalid-argument", "$.gpu.share", 0),
    ],
)
def test_only_a_refusal_of_the_gpus_leaves_it_to_the_next_choice(code: str, field: str, chosen: int) -> None:
    """Any other would refuse the next one as well, or is a mistake that its submit tells."""
    bodies = ({"gpu": {"count": 4}, "run": {"argv": ["x"]}}, {"gpu": {"count": 2}, "run": {"argv": ["x"]}})
    wishes = [msgspec.convert(body, Request) for body in bodies]

    async def plan(request: Request) -> Plan:
        if request.gpu == wishes[0].gpu:
            return Plan("refused", 0, problem=Problem(code, "not allowed", field=field))
        return Plan("now", 0)

    assert asyncio.run(first_possible(plan, wishes)) is wishes[chosen]


def test_a_plan_of_nothing_is_refused() -> None:
    with pytest.raises(Rejected, match="nothing to plan"):
        plan_arguments(None, (), None, None, None)


def test_one_worker_to_drain_may_be_named_alone() -> None:
    assert plan_arguments(None, "n07", None, None, None)["drain"] == ["n07"]


class Silent:
    """A server that answers the second try."""

    def __init__(self) -> None:
        self.tries_s: list[float] = []

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        self.tries_s.append(timeout_s)
        if len(self.tries_s) == 1:
            raise RequestTimeout(subject, timeout_s)
        return b"answer"


@pytest.mark.parametrize(("verb", "try_s"), [("show", TRY_S), ("plan", PLAN_TRY_S)])
async def test_a_try_of_plan_waits_for_what_is_computed(verb: str, try_s: float) -> None:
    """It began anew every 3 s, and no try was as long as the answer took."""
    server = Silent()
    assert await Asking().ask(server, f"moorage.api.t.{verb}", b"{}", lambda answer: answer, 60.0) == b"answer"
    assert server.tries_s == [try_s, try_s]
