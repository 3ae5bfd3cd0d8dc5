"""Who did it: every transition names the tenant, the operator or the worker whose doing it was, also after a replay."""

from __future__ import annotations

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.arguments import cancel_of
from moorage.scheduler.core.events import Order
from moorage.scheduler.core.ledger.records import SAID_CHARS_MAX, actor, by_tenant
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.schemas import actors
from moorage.schemas.actors import NO_OPERATOR, by_operator
from moorage.schemas.operate import act_of
from tests.unit.scheduler.driving import Driving


def told(state: State, job: str, tenant: str = "t") -> list[tuple[str, str, str]]:
    found = state.job(tenant, job)
    assert found is not None
    return [(change.state, change.by, change.said) for change in changes_since(state, found, 0)]


def cancelled() -> Driving:
    drive = Driving.with_hosts(1)
    drive.submit("a")
    drive.settle()
    drive.submit("waits", start_within_s=5)
    drive.engine.offer(cancel_of("t", {"job": "a", "by": "ann lee", "reason": "enough"}))
    drive.tick()
    drive.settle()
    return drive


def test_a_cancel_is_the_tenants_and_what_follows_the_workers() -> None:
    assert told(cancelled().state, "a") == [
        ("ACCEPTED", "tenant:t", ""),
        ("PLACED", "", ""),
        ("CLAIMED", "worker", ""),
        ("RUNNING", "worker", ""),
        ("CANCELLING", "tenant:t", "ann lee"),
        ("CANCELLED", "worker", ""),
    ]


def test_what_the_scheduler_does_by_itself_is_nobodys() -> None:
    drive = Driving()
    drive.submit("waits", start_within_s=5)
    drive.now += 6_000
    drive.tick()
    assert told(drive.state, "waits")[-1] == ("EXPIRED", "", "")


def test_one_record_tells_the_acts_of_several_apart() -> None:
    drive = Driving()
    for tenant in ("t", "u"):
        drive.submit("a", tenant=tenant, replicas=2)
    drive.submit("late", start_within_s=5)
    drive.engine.offer(cancel_of("t", {"job": "a", "by": "ann"}))
    drive.engine.offer(cancel_of("u", {"job": "a"}))
    drive.now += 6_000
    drive.tick()
    assert told(drive.state, "a")[1:] == [("CANCELLED", "tenant:t", "ann")] * 2
    assert told(drive.state, "a", "u")[1:] == [("CANCELLED", "tenant:u", "")] * 2
    assert told(drive.state, "late")[1:] == [("EXPIRED", "", "")]


def test_a_cancel_before_the_submit_is_the_tenants() -> None:
    drive = Driving()
    drive.cancel("a", sequence=7)
    drive.offer_submit("a", sequence=6)
    drive.tick()
    assert told(drive.state, "a")[1:] == [("CANCELLED", "tenant:t", "")]


def test_an_order_is_the_operators_that_its_subject_names() -> None:
    """Whatever the client says of itself; without keys (`_`) nothing is proven."""
    drive = Driving.with_hosts(1)
    said: list[tuple[str, str, str]] = []
    for job, operator in (("keyed", "ana"), ("open", NO_OPERATOR)):
        drive.submit(job)
        hold = act_of("hold", {"tenant": "t", "job": job, "by": "operator:mallory"})
        drive.engine.offer(Order("hold", hold, "r", True, {}, operator))
        drive.tick()
        said += told(drive.state, job)[-1:]
        assert drive.answers["r"]["hold"]["by"] == by_operator(operator)
    assert said == [("HELD", "operator:ana", "operator:mallory"), ("HELD", "operator", "operator:mallory")]
    drain = act_of("drain", {"worker": "w0", "by": "scheduler", "within_s": 60, "why": "disk"})
    drive.engine.offer(Order("drain", drain, "r", True, {}, "ben"))
    drive.tick()
    row = views.fleet(drive.engine, drive.now).workers[0]
    assert (row.by, row.said, row.drain and row.drain.by) == ("operator:ben", "scheduler", "operator:ben")


@pytest.mark.parametrize(
    ("actor", "words"),
    [
        ("operator:ana", "operator:ana"),
        ("operator:ana ana", "operator:ana"),
        ("operator:ana root", "operator:ana (says root)"),
        ("operator root", "operator, unverified (says root)"),
        ("operator", "operator, unverified"),
        ("tenant:t ann lee", "tenant:t (says ann lee)"),
        ("scheduler", "scheduler"),
        ("", ""),
    ],
)
def test_an_actor_on_a_screen_says_what_is_proven(actor: str, words: str) -> None:
    assert actors.words(*actors.split(actor)) == words


def test_a_name_that_is_said_is_bounded_and_cannot_pass_for_another() -> None:
    assert actor(by_tenant("t"), "x" * 1000) == "tenant:t " + "x" * SAID_CHARS_MAX
    assert actor("operator", None) == actor("operator", 7) == actor("operator", "\n\x00") == "operator"
    assert actor(by_tenant("t"), "tenant:u\n") == "tenant:t tenant:u"
