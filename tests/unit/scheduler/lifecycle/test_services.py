"""A service's name is one live job's of a tenant; two only while one replaces the other."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.events import Wake
from moorage.schemas.service import MemberLoad
from tests.unit.scheduler.driving import Driving

SERVICE = {"name": "embed"}
READY = {"driver": "process", "argv": ["serve"], "ready": {"call": True}}


def serve(drive: Driving, job: str, **fields: Any) -> dict[str, Any]:
    return drive.submit(job, **{"gpu": {}, "service": SERVICE, "run": READY, **fields})


def served(gpus: int = 4, **fields: Any) -> Driving:
    """A worker that the test speaks for, and the running job `a` of the service, each of its replicas ready; with
    `replicas` 0 the worker alone."""
    drive = Driving()
    can = {"answers_calls": True, "reaches": True}
    drive.worker("w0", gpus, auto=False, capabilities={"process": can})
    assert not fields.get("replicas", 1) or serve(drive, "a", **fields)["kind"] == "accepted"
    for index in range(fields.get("replicas", 1)):
        becomes_ready(drive, "a", index)
    return drive


def becomes_ready(drive: Driving, job: str, index: int = 0) -> None:
    drive.reports([(kind, job, index, 0, "") for kind in ("claimed", "started", "ready")])


def ends(drive: Driving, job: str, index: int = 0) -> None:
    drive.reports([("exited", job, index, 0, "end"), ("freed", job, index, 0, "")])


def settles(drive: Driving, job: str, index: int = 0) -> None:
    """A member is ready, for as long as one of a next version has to be."""
    becomes_ready(drive, job, index)
    drive.pass_time(5_000, step=500)


def second(drive: Driving) -> list[str]:
    """Let a second pass; the states of the job that is replaced."""
    drive.pass_time(1_000, step=500)
    return drive.states("a")


def test_a_second_job_of_a_service_is_refused_while_the_first_lives() -> None:
    drive = served()
    refused = serve(drive, "b")
    assert (refused["code"], refused["field"], refused["found"]) == ("service-taken", "$.service.name", "a")
    assert "instead_of a" in refused["next"]
    assert serve(drive, "a")["duplicate"] is True, "the same request again is the same job"
    assert serve(drive, "c", service={"name": "other"})["kind"] == "accepted"
    assert serve(drive, "b", tenant="u")["kind"] == "accepted", "of another tenant"
    drive.cancel("a")
    assert serve(drive, "b")["code"] == "service-taken", "it has not ended yet"
    ends(drive, "a")
    assert drive.states("a") == ["CANCELLED"]
    assert serve(drive, "b")["kind"] == "accepted"


def test_a_model_is_one_services_of_a_tenant_until_its_job_has_ended() -> None:
    drive = served(service={"name": "embed", "models": ["tiny", "tiny-lora"]})
    other = {"name": "other", "models": ["large", "tiny-lora"]}
    refused = serve(drive, "b", service=other)
    assert (refused["code"], refused["field"], refused["found"]) == (
        "served-elsewhere",
        "$.service.models",
        "tiny-lora",
    )
    assert "is served by the service embed" in refused["message"]
    assert serve(drive, "b", tenant="u", service=other)["kind"] == "accepted", "of another tenant"
    twice = [drive.offer_submit(job, service={"name": job, "models": ["new"]}, run=READY) for job in ("x", "y")]
    drive.tick()
    assert [drive.answers[reply].get("code") for reply in twice] == [None, "served-elsewhere"], "in one record"
    drive.cancel("a")
    ends(drive, "a")
    assert serve(drive, "b", service=other)["kind"] == "accepted"


def test_two_in_one_record_are_one_too_many() -> None:
    drive = Driving()
    replies = [drive.offer_submit(job, service=SERVICE, run=READY) for job in ("a", "b")]
    drive.tick()
    assert [drive.answers[reply].get("code") for reply in replies] == [None, "service-taken"]


def test_from_the_durable_queue_it_becomes_a_job_that_is_rejected() -> None:
    drive = served()
    drive.submit("b", gpu={}, service=SERVICE, run=READY, sequence=1)
    assert drive.states("b") == ["REJECTED"]


@pytest.mark.parametrize("is_durable", [False, True])
def test_one_that_is_cancelled_in_the_same_record_has_it_no_more(is_durable: bool) -> None:
    drive = served(1, replicas=0)
    drive.submit("full", gpu={})
    serve(drive, "a")
    drive.offer_cancel("a", sequence=1 if is_durable else 0)
    drive.offer_submit("b", service=SERVICE, run=READY, gpu={}, sequence=2 if is_durable else 0)
    second_of_it = drive.offer_submit("c", service=SERVICE, run=READY, gpu={})
    drive.tick()
    assert (drive.states("a"), drive.states("b")) == (["CANCELLED"], ["QUEUED"])
    assert drive.answers[second_of_it]["found"] == "b", "it is one job's again"
    assert woken(drive) == "b"


def test_one_that_is_asked_to_end_in_the_same_record_still_has_it() -> None:
    drive = served()
    drive.offer_cancel("a")
    reply = drive.offer_submit("b", service=SERVICE, run=READY, gpu={})
    drive.tick()
    assert (drive.states("a"), drive.answers[reply]["code"]) == (["CANCELLING"], "service-taken")


def test_the_next_leader_knows_who_has_it() -> None:
    drive = served()
    drive.lead_from_snapshot()
    assert serve(drive, "b")["code"] == "service-taken"


def test_the_new_one_is_ready_before_the_old_one_ends() -> None:
    drive = served()
    assert serve(drive, "b", instead_of="a")["kind"] == "accepted"
    assert serve(drive, "c", instead_of="a")["code"] == "service-taken", "one at a time"
    assert second(drive) == ["RUNNING"]
    drive.reports([("claimed", "b", 0, 0, ""), ("started", "b", 0, 0, "")])
    for _ in range(20):
        assert second(drive) == ["RUNNING"], "it runs, and is not ready"
    drive.report("ready", "b")
    for _ in range(4):
        assert second(drive) == ["RUNNING"], "it is not ready for long enough"
    second(drive)
    assert second(drive) == ["CANCELLING"]
    ends(drive, "a")
    assert drive.states("a") == ["CANCELLED"]
    assert [
        change["why"] for event in drive.events for change in event["changes"] if change["state"] == "CANCELLING"
    ] == ["replaced by job b"]
    assert (drive.states("b"), second(drive)) == (["RUNNING"], ["CANCELLED"])
    assert serve(drive, "c", instead_of="a")["code"] == "service-taken", "the name is that of b now"
    assert serve(drive, "c", instead_of="b")["kind"] == "accepted"


def test_replica_by_replica() -> None:
    drive = served(8, replicas=4)
    serve(drive, "b", replicas=2, instead_of="a")
    assert second(drive) == ["RUNNING"] * 4
    settles(drive, "b", 0)
    assert second(drive) == ["RUNNING"] * 3 + ["ENDING"]
    assert second(drive) == ["RUNNING"] * 3 + ["ENDING"]
    settles(drive, "b", 1)
    assert second(drive) == ["CANCELLING"] * 4


def test_without_room_the_old_one_makes_room_one_by_one() -> None:
    drive = served(2, replicas=2)
    serve(drive, "b", replicas=2, instead_of="a")
    for _ in range(4):
        assert second(drive) == ["RUNNING", "RUNNING"], "it may still find a place"
    second(drive)
    assert second(drive) == ["RUNNING", "ENDING"]
    for _ in range(10):
        assert second(drive) == ["RUNNING", "ENDING"], "one alone"
    ends(drive, "a", 1)
    drive.pass_time(10_000)
    assert drive.states("b") == ["PLACED", "QUEUED"]
    assert drive.states("a") == ["RUNNING", "QUEUED"]
    assert drive.explained("a")["reason"] == "scaled"
    becomes_ready(drive, "b", 0)
    drive.pass_time(15_000)
    assert drive.states("a") == ["ENDING", "QUEUED"]
    ends(drive, "a", 0)
    drive.pass_time(1_000)
    assert drive.states("b") == ["RUNNING", "PLACED"]


NEVER: list[dict[str, Any]] = [
    {"gpu": {"model": "B300"}},
    {"gpu": {"count": 2}},
    {"resources": {"cpu_milli": 64_000}},
    {"requires": {"zone": ["x"]}},
]


@pytest.mark.parametrize("fields", NEVER)
@pytest.mark.parametrize("replicas", [1, {"min": 1, "max": 3}])
def test_none_ends_for_a_new_one_that_its_place_is_not_enough_for(fields: dict[str, Any], replicas: Any) -> None:
    drive = Driving()
    can = {"answers_calls": True, "reaches": True}
    drive.worker("w0", 1, auto=False, cpu_milli=8_000, capabilities={"process": can})
    serve(drive, "a", replicas=replicas)
    becomes_ready(drive, "a")
    serve(drive, "b", instead_of="a", replicas=replicas, **fields)
    drive.pass_time(30_000)
    assert drive.states("a")[0] == "RUNNING"


def test_none_ends_while_the_new_one_could_not_start_in_its_place() -> None:
    drive = served(1)
    drive.operate("cordon", "w0")
    serve(drive, "b", instead_of="a")
    drive.pass_time(30_000)
    assert drive.states("a") == ["RUNNING"], "its worker takes no job"
    drive.order("hold")
    drive.operate("uncordon", "w0")
    drive.pass_time(30_000)
    assert drive.states("a") == ["RUNNING"], "the tenant is held"
    drive.order("release")
    drive.order("limit", gpus=1)
    drive.pass_time(2_000)
    assert drive.states("a") == ["ENDING"], "its end makes room for the other one, under the limit too"


def test_the_one_whose_place_the_new_one_can_have_ends() -> None:
    drive = Driving()
    can = {"process": {"answers_calls": True, "reaches": True}}
    for name, model in (("w0", "NVIDIA A100"), ("w1", "NVIDIA L40S")):
        drive.worker(name, 1, model, auto=False, capabilities=can)
    serve(drive, "a", replicas=2)
    for index in (0, 1):
        becomes_ready(drive, "a", index)
    assert drive.placed_on("a") == ["w0", "w1"] or drive.placed_on("a") == ["w1", "w0"]
    first = drive.placed_on("a").index("w0")
    serve(drive, "b", instead_of="a", replicas=2, gpu={"model": "A100"})
    drive.pass_time(7_000)
    assert drive.states("a")[first] == "ENDING"
    assert drive.states("a")[1 - first] == "RUNNING"


def test_a_new_one_that_fails_again_and_again_ends_nothing() -> None:
    drive = served(2)
    serve(drive, "b", run={**READY, "restart": "always"}, instead_of="a")
    for _ in range(12):
        drive.reports([("claimed", "b", 0, 0, ""), ("started", "b", 0, 0, ""), ("exited", "b", 0, 1, "exit")])
        drive.report("freed", "b")
        while drive.states("b") == ["QUEUED"]:
            drive.pass_time(1_000, step=1_000)
            assert drive.states("a") == ["RUNNING"]


def test_a_new_one_that_is_cancelled_leaves_the_old_one() -> None:
    drive = served(2)
    serve(drive, "b", instead_of="a")
    drive.cancel("b")
    drive.report("withdrawn", "b")
    drive.pass_time(20_000)
    assert (drive.states("a"), drive.states("b")) == (["RUNNING"], ["CANCELLED"])


def test_one_that_is_cancelled_before_it_has_a_place_leaves_the_old_one_its_own() -> None:
    drive = served(2, replicas=2)
    serve(drive, "b", replicas=2, instead_of="a")
    drive.pass_time(7_000)
    assert drive.states("a") == ["RUNNING", "ENDING"]
    drive.cancel("b")
    assert set(drive.states("b")) == {"CANCELLED"}, "at once, as it only waited"
    ends(drive, "a", 1)
    drive.pass_time(2_000)
    assert drive.states("a") == ["RUNNING", "PLACED"]


def test_an_old_one_that_has_ended_needs_no_replacing() -> None:
    drive = served()
    drive.cancel("a")
    ends(drive, "a")
    assert serve(drive, "b", instead_of="a")["kind"] == "accepted"


def test_what_does_not_say_when_it_is_ready_replaces_nothing() -> None:
    """It would count as ready as soon as it runs, and end what serves before it has loaded, or failed to."""
    drive = served()
    refused = serve(drive, "b", run={"driver": "process", "argv": ["serve"]}, instead_of="a")
    assert (refused["code"], refused["field"]) == ("invalid-argument", "$.run.ready")


GOES_ON = ("QUEUED", "RUNNING", "CANCELLED")
FOLLOWS = {"replicas": {"min": 0, "max": 4}}


def woken(drive: Driving) -> str:
    """A caller finds nobody; the job that is to serve it."""
    drive.engine.offer(Wake("t", "embed", "woken", True))
    drive.tick()
    job: str = drive.answers["woken"]["data"]["job"]
    return job


def runs(drive: Driving, job: str) -> int:
    return sum(state in ("PLACED", "CLAIMED", "RUNNING") for state in drive.states(job))


def become_ready(drive: Driving, job: str) -> None:
    for index, state in enumerate(drive.states(job)):
        if state == "PLACED":
            becomes_ready(drive, job, index)


def following(gpus: int, **fields: Any) -> Driving:
    """A worker, and the job `a`, of whose members two are wanted."""
    drive = served(gpus, replicas=0)
    assert serve(drive, "a", **fields)["kind"] == "accepted"
    if fields == FOLLOWS:
        assert woken(drive) == "a"
        become_ready(drive, "a")
        drive.pass_time(6_000)
        member = drive.attempt("a")
        busy = MemberLoad("m", 1, 1, 0, 300, False, 0, 0, 0, 0, 0, 0, "a", 0, member.fence)
        for _ in range(2):
            drive.engine.offer_member_load("t", "s", busy, drive.now)
            drive.pass_time(1_000)
    become_ready(drive, "a")
    assert runs(drive, "a") == 2
    return drive


def test_one_that_sleeps_is_replaced_at_once() -> None:
    drive = served(replicas=0)
    serve(drive, "a", **FOLLOWS)
    serve(drive, "b", instead_of="a", **FOLLOWS)
    drive.pass_time(2_000)
    assert drive.states("a") == ["CANCELLED"] * 4
    assert runs(drive, "b") == 0, "nobody calls"
    assert woken(drive) == "b"
    assert runs(drive, "b") == 1


@pytest.mark.parametrize(("old", "new"), [(FOLLOWS, FOLLOWS), ({"replicas": 2}, FOLLOWS), (FOLLOWS, {"replicas": 2})])
def test_one_that_follows_its_calls_begins_with_as_many_members_as_it_replaces(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    drive = following(8, **old)
    serve(drive, "b", instead_of="a", **new)
    drive.pass_time(10_000)
    assert (runs(drive, "a"), runs(drive, "b")) == (2, 2)
    settles(drive, "b", 0)
    drive.pass_time(2_000)
    assert runs(drive, "a") == 1
    settles(drive, "b", 1)
    drive.pass_time(2_000)
    assert set(drive.states("a")) <= {"CANCELLING", "CANCELLED"}


@pytest.mark.parametrize(("old", "new"), [(FOLLOWS, FOLLOWS), ({"replicas": 2}, FOLLOWS), (FOLLOWS, {"replicas": 2})])
def test_without_room_one_that_follows_its_calls_gives_way_one_by_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    drive = following(2, **old)
    serve(drive, "b", instead_of="a", **new)
    for left in (1, 0):
        drive.pass_time(17_000)
        assert runs(drive, "a") == left
        [at] = [at for at, state in enumerate(drive.states("a")) if state not in GOES_ON]
        drive.pass_time(20_000)
        assert runs(drive, "a") == left, "one alone"
        ends(drive, "a", at)
        drive.pass_time(10_000)
        assert (runs(drive, "a"), runs(drive, "b")) == (left, 2 - left)
        become_ready(drive, "b")
    drive.pass_time(7_000)
    assert set(drive.states("a")) == {"CANCELLED"}


def grown(**fields: Any) -> Driving:
    """A worker with four GPUs, and the job `a`, that has grown to four members of one GPU each."""
    drive = served(4, replicas=0)
    assert serve(drive, "a", replicas={"min": 1, "max": 4}, **fields)["kind"] == "accepted"
    become_ready(drive, "a")
    for _ in range(60):
        for index, state in enumerate(drive.states("a")):
            if state == "RUNNING":
                fence = drive.attempt("a", index).fence
                load = MemberLoad(f"m{index}", 1, 1, 2, 900, False, 0, 0, 0, 0, 0, 0, "a", index, fence)
                drive.engine.offer_member_load("t", "s", load, drive.now)
        drive.pass_time(1_000)
        become_ready(drive, "a")
    assert runs(drive, "a") == 4
    return drive


@pytest.mark.parametrize("limit", [0, 4])
def test_a_larger_one_gets_the_places_of_several_and_no_more(limit: int) -> None:
    drive = grown()
    if limit:
        drive.order("limit", gpus=limit)
    serve(drive, "b", instead_of="a", gpu={"count": 2})
    for left in (3, 2):
        drive.pass_time(8_000)
        assert runs(drive, "a") == left, "one after the other has left"
        [at] = [at for at, state in enumerate(drive.states("a")) if state == "ENDING"]
        ends(drive, "a", at)
    drive.pass_time(20_000)
    assert (runs(drive, "a"), runs(drive, "b")) == (2, 1)
    settles(drive, "b")
    drive.pass_time(2_000)
    assert set(drive.states("a")) <= {"CANCELLING", "CANCELLED"}


def test_a_member_that_shares_its_gpu_gives_way_too() -> None:
    share = {"sharing": "mps", "share": {"compute_percent": 50}}
    drive = served(1, replicas=2, gpu=share)
    serve(drive, "b", instead_of="a", replicas=2, gpu=share)
    drive.pass_time(8_000)
    assert drive.states("a") == ["RUNNING", "ENDING"]


def test_a_preemptible_one_ends_none_for_room_that_it_may_not_preempt() -> None:
    drive = served(2, replicas=2, preemptible=True)
    serve(drive, "b", instead_of="a", preemptible=True, gpu={"count": 2})
    drive.pass_time(30_000)
    assert drive.states("a") == ["RUNNING"] * 2


def test_one_that_is_being_replaced_takes_no_place_that_the_other_waits_for() -> None:
    drive = following(3, **FOLLOWS)
    serve(drive, "b", instead_of="a", **FOLLOWS)
    drive.pass_time(2_000)
    assert (runs(drive, "a"), runs(drive, "b")) == (2, 1)
    load = MemberLoad("m", 1, 1, 2, 900, False, 0, 0, 0, 0, 0, 0, "a", 0, drive.attempt("a").fence)
    for _ in range(20):
        drive.engine.offer_member_load("t", "s", load, drive.now)
        drive.pass_time(1_000)
    assert drive.explained("b")["scaled"]["wanted"] == 2
    assert drive.explained("a")["scaled"]["wanted"] == 2


@pytest.mark.parametrize("kept_by", ["after", "start_after_s", "hold"])
def test_until_the_new_one_may_start_the_old_one_follows_its_calls(kept_by: str) -> None:
    drive = following(8, **FOLLOWS)
    drive.submit("tests", gpu={"model": "B300"})
    waits: dict[str, Any] = {"after": {"after": ["tests"]}, "start_after_s": {"start_after_s": 3_600}, "hold": {}}
    assert serve(drive, "b", instead_of="a", **waits[kept_by], **FOLLOWS)["kind"] == "accepted"
    if kept_by == "hold":
        drive.order("hold", job="b")
    for _ in range(20):
        for index in (0, 1):
            load = MemberLoad(
                f"m{index}", 1, 1, 2, 900, False, 0, 0, 0, 0, 0, 0, "a", index, drive.attempt("a", index).fence
            )
            drive.engine.offer_member_load("t", "s", load, drive.now)
        drive.pass_time(1_000)
    assert drive.explained("a")["scaled"]["wanted"] == 3
    become_ready(drive, "a")
    if kept_by == "after":
        drive.cancel("tests")
    elif kept_by == "hold":
        drive.order("release", job="b")
    drive.pass_time(5_000)
    assert runs(drive, "a") == 3
    if kept_by == "hold":
        assert runs(drive, "b") == 3, "as many as the old one has by then"


@pytest.mark.parametrize("fields", [{"service": None}, {"instead_of": "a b"}, {"instead_of": ""}])
def test_what_replaces_nothing_is_refused(fields: dict[str, Any]) -> None:
    refused = serve(Driving(), "b", **{"instead_of": "a", **fields})
    assert (refused["code"], refused["field"]) == ("invalid-argument", "$.instead_of")


def test_the_next_leader_goes_on_replacing() -> None:
    drive = served()
    serve(drive, "b", instead_of="a")
    drive.reports([("claimed", "b", 0, 0, ""), ("started", "b", 0, 0, "")])
    drive.lead()
    drive.renew()
    drive.report("ready", "b")
    drive.pass_time(3_000)
    drive.lead()
    drive.renew()
    assert second(drive) == ["RUNNING"]
    drive.pass_time(2_000)
    assert drive.states("a") == ["CANCELLING"]


def test_a_service_is_listed_with_its_versions_and_how_many_of_their_members_are_ready() -> None:
    drive = served(replicas=2, labels={"version": "1.0.0"})
    serve(drive, "b", instead_of="a", replicas=2, labels={"version": "2.0.0"})
    drive.reports([(kind, "b", 0, 0, "") for kind in ("claimed", "started")])
    [row] = drive.engine.services.listed("t").services
    assert (row.service, row.job) == ("embed", "b")
    told = [(each.job, each.label, each.members, each.running, each.ready) for each in row.versions]
    assert told == [("a", "1.0.0", 2, 2, 2), ("b", "2.0.0", 2, 1, 0)]
    assert drive.engine.services.listed("u").services == []
