"""`plan`: what it says is what then happens on the same state, and asking changes nothing."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moorage.scheduler.core.config import Config
from moorage.scheduler.whatif import child
from moorage.scheduler.whatif import plan as plan_module
from moorage.scheduler.whatif.plan import TOO_LATE, PlanAsk, decode_planned, plan
from moorage.schemas.answers.jobs import Fix
from moorage.schemas.frames import Device
from moorage.schemas.plan import Plan, PlannedJobs
from tests.unit.scheduler.driving import H100, Driving
from tests.unit.scheduler.queries.test_fixes import ASKS, HOSTS, world
from tests.unit.scheduler.queries.test_forecast import MINUTE, learned, look_ahead, submit


def planned(drive: Driving, asks: dict[str, Any] | None = None, *, tenant: str = "t", **edits: Any) -> Plan:
    body = {} if asks is None else {"request": {"run": {"driver": "noop"}, **asks}}
    asked = msgspec.convert({**body, **edits}, PlanAsk)
    answer = child.ask(lambda: plan(drive.engine, drive.now + 1, tenant, asked))
    assert answer is not None
    return decode_planned(answer)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(HOSTS, st.lists(ASKS, max_size=5), ASKS)
def test_a_plan_right_before_a_submit_is_what_then_happens_and_changes_nothing(
    hosts: list[tuple[str, int, str, int]], jobs: list[dict[str, Any]], asks: dict[str, Any]
) -> None:
    drive = world(hosts, jobs, {"gpu": {"count": 1}})
    before = (drive.state.digest, drive.state.seq, len(drive.engine.queue), drive.engine.fleet.changes)
    told = planned(drive, asks)
    assert (drive.state.digest, drive.state.seq, len(drive.engine.queue), drive.engine.fleet.changes) == before
    assert told.ledger == drive.state.seq
    drive.submit("x", **json.loads(json.dumps(asks)), if_seq=told.ledger)
    happened = [
        (index, drive.attempt("x", index).worker.id, drive.slots("x", index))
        for index, state in enumerate(drive.states("x"))
        if state == "PLACED"
    ]
    slots = [
        (place.replica, place.worker, [int(gpu.rpartition("-")[2]) for gpu in place.gpus]) for place in told.places
    ]
    assert slots == happened
    assert (told.starts == "now") == bool(happened)


def test_a_plan_whose_first_look_takes_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "LIMIT_S", 0.0)
    drive = Driving()
    assert plan(drive.engine, drive.now, "t", msgspec.convert({"quota": 1}, PlanAsk)) == TOO_LATE


def test_a_search_for_fixes_leaves_time_for_the_look_that_it_is_part_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound of its own it took the whole look's time where tries were slow, and there was no plan."""
    drive = Driving.with_hosts(1)

    def searched(*_: object, within_s: float = math.inf) -> tuple[str, list[Fix]]:
        assert within_s <= plan_module.LIMIT_S / 2
        return "no-match", [Fix(say="searched", request={})]

    monkeypatch.setattr(plan_module, "fixes", searched)
    told = planned(drive, {"gpu": {"count": 2}})
    assert told.waiting is not None
    assert told.waiting.fixes == [Fix(say="searched")]


def waiting() -> Driving:
    """One GPU of two is held by a workload of ten minutes for four minutes already, the other one by nobody knows."""
    drive = Driving.with_hosts(1)
    learned(drive, [10] * 4)
    submit(drive, "runs")
    drive.now += 4 * MINUTE
    drive.renew()
    return drive


def test_a_start_that_too_few_looks_have_found_in_time_is_unknown_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "ask_all", lambda works, limit_s: [None] * len(works))
    told = planned(waiting(), {"gpu": {}})
    assert (told.starts, told.in_ms) == ("unknown", None)
    assert told.waiting is not None
    assert told.waiting.starts_unknown.startswith("a look ahead ended before it")


def test_later_says_when_and_where_and_why_not_now() -> None:
    told = planned(waiting(), {"gpu": {}})
    assert (told.starts, told.on) == ("later", "w0")
    assert told.in_ms is not None
    assert abs(told.in_ms.p50_ms - 6 * MINUTE) < 1_000
    assert (told.in_ms.p10_ms, told.in_ms.p90_ms, told.in_ms.runs) == (None, None, 4)
    assert told.waiting is not None
    assert told.waiting.reason == "busy"


def test_where_some_replicas_start_it_says_how_many_and_why_the_rest_does_not() -> None:
    drive = waiting()
    drive.worker("w1", 3)
    told = planned(drive, {"gpu": {}, "replicas": 5})
    assert (told.starts, told.replicas_now, told.replicas, len(told.places)) == ("now", 3, 5, 3)
    assert told.waiting is not None
    assert (told.waiting.reason, told.waiting.waiting_replicas) == ("busy", 2)
    assert "its own replicas: 3 GPUs" in told.waiting.held_by
    whole = planned(drive, {"gpu": {}, "replicas": 3})
    assert (whole.replicas_now, whole.replicas, whole.waiting) == (3, 3, None)


def test_a_plan_warns_of_a_model_as_a_submit_does() -> None:
    told = planned(waiting(), {"gpu": {"model": "H10"}})
    part = "H10 is only a part of a word in NVIDIA H100 80GB HBM3; ~H10 takes that, too"
    assert told.warnings == [f"no-match: no worker with the driver noop has a GPU of this model; {part}"]
    assert planned(waiting(), {"gpu": {"model": "H100"}}).warnings == []


def test_of_gpus_that_differ_a_plan_says_their_models() -> None:
    """A job that takes either model, where no host has as many of one, has some of each, and nothing said so."""
    drive = Driving()
    drive.worker("w0", models=["NVIDIA L40S", "NVIDIA A100-SXM4-80GB"])
    told = planned(drive, {"gpu": {"count": 2, "model": ["L40S", "A100"]}})
    assert [place.models for place in told.places] == [["NVIDIA L40S", "NVIDIA A100-SXM4-80GB"]]
    alike = planned(drive, {"gpu": {"count": 1, "model": ["L40S", "A100"]}})
    assert [place.models for place in alike.places] == [[]]


def test_never_unknown_and_refused_are_three_things() -> None:
    drive = waiting()
    assert planned(drive, {"gpu": {"count": 2}}).starts == "never"
    refused = planned(drive, {"gpu": {"model": "H200"}, "on_no_match": "reject"})
    assert (refused.starts, refused.problem and refused.problem.code) == ("refused", "failed-precondition")
    fresh = Driving.with_hosts(1)
    submit(fresh, "runs", "new")
    assert planned(fresh, {"gpu": {}}).starts == "unknown"


def test_of_an_id_that_is_taken_it_says_what_its_submit_is_answered() -> None:
    drive = Driving.with_hosts(3, config=Config(ended_max=0, finished_keep=3600.0))
    drive.submit("hog", gpu={}, if_seq=drive.state.seq)
    seq = drive.engine.reader.request_of(drive.job("hog")).if_seq
    told = planned(drive, {"job": "hog", "gpu": {"count": 2}})
    assert (told.starts, told.problem and (told.problem.code, told.problem.job)) == ("refused", ("conflict", "hog"))
    assert planned(drive, {"job": "hog", "gpu": {}}).starts == "refused", "without if_seq it is another request"
    told = planned(drive, {"job": "hog", "gpu": {}, "if_seq": seq})
    assert (told.starts, told.places) == ("none", [])
    assert told.warnings == ["duplicate: a job with this id and content exists already, PLACED"]
    assert planned(drive, {"job": "hog", "gpu": {}}, tenant="u").starts == "now"
    drive.cancel("gone", before=True)
    told = planned(drive, {"job": "gone", "gpu": {}})
    assert (told.starts, told.problem and told.problem.code) == ("refused", "cancelled-before")
    told = planned(drive, {"job": "fresh", "gpu": {"count": 9}})
    assert (told.starts, told.problem) == ("never", None)


def test_an_id_that_is_wanted_again_after_long_is_free_in_a_plan() -> None:
    drive = Driving.with_hosts(1, config=Config(finished_keep=3600.0))
    drive.submit("old", replicas=2)
    drive.cancel("old")
    drive.settle()
    drive.now += 2 * 3600 * 1000
    drive.renew()
    assert drive.job("old").over
    assert planned(drive, {"job": "old", "gpu": {}}).starts == "now"


def test_with_a_host_more_it_would_start_now_and_so_would_those_that_wait() -> None:
    drive = waiting()
    submit(drive, "mine")
    submit(drive, "theirs", tenant="u")
    host = {"devices": msgspec.to_builtins([Device(n, "nvidia", H100, f"SIM-{n}") for n in range(4)])}
    told = planned(drive, {"gpu": {"count": 2}}, add=[host])
    assert (told.starts, told.places[0].worker) == ("now", "plan-0")
    assert told.starting == PlannedJobs(own=["mine"], own_jobs=1, other_jobs=1)
    assert "theirs" not in repr(told)


def test_without_a_worker_it_goes_elsewhere_or_never_and_the_worker_is_empty_in_time() -> None:
    drive = waiting()
    told = planned(drive, drain=["w0"])
    assert told.starts == "none"
    assert told.empty is not None
    assert abs((told.empty["w0"] or 0) - 6 * MINUTE) < 1_000
    assert planned(drive, {"gpu": {}}, drain=["w0"]).starts == "unknown"


def test_under_a_quota() -> None:
    drive = waiting()
    drive.worker("w1", 1)
    assert planned(drive, {"gpu": {}}).starts == "now"
    told = planned(drive, {"gpu": {}}, quota=1)
    assert told.starts == "later"
    assert told.waiting is not None
    assert told.waiting.reason == "limit"
    drive.order("limit", gpus=1)
    assert planned(drive, {"gpu": {}}).starts == "later"
    assert planned(drive, {"gpu": {}}, quota={"t": 0}).starts == "now", "none, as the command says it"


def test_the_edits_of_fleet_quotas_and_shares_count_together() -> None:
    drive = Driving.with_hosts(2, 2)
    submit(drive, "a", tenant="u")
    submit(drive, "b", tenant="u")
    drive.order("limit", tenant="v", gpus=1)
    submit(drive, "c", tenant="v")
    submit(drive, "held-by-limit", tenant="v")
    host = {"devices": msgspec.to_builtins([Device(0, "nvidia", H100, "SIM-0")])}
    edits: dict[str, Any] = {
        "drain": ["w1"],
        "add": [host],
        "quota": {"v": 2},
        "share": {"t": {"weight": 3, "gpus": 2}},
    }
    before = drive.state.digest
    told = planned(drive, {"gpu": {"count": 2}}, **edits)
    assert told.starting == PlannedJobs(own=[], own_jobs=0, other_jobs=1), "the one that waited for its limit"
    assert (told.starts, told.empty) == ("unknown", None)
    assert drive.state.digest == before
    assert planned(drive, drain=["w1"], quota={"v": 2}).starting == PlannedJobs(own=[], own_jobs=0, other_jobs=0)


def test_a_share_decides_who_goes_first() -> None:
    drive = waiting()
    for name in "abcd":
        submit(drive, name, tenant="u")
    told = planned(drive, {"gpu": {}}, share={"t": {"gpus": 1}})
    first = planned(drive, {"gpu": {}})
    assert told.in_ms is not None
    assert first.in_ms is None or first.in_ms.p50_ms > told.in_ms.p50_ms


def test_whom_it_would_preempt_is_told_though_victims_were_looked_for_just_now() -> None:
    drive = Driving.with_hosts(2, config=Config(preempt_priority=80, preempt_after=0))
    submit(drive, "mine")
    submit(drive, "theirs", tenant="u")
    drive.settle()
    drive.submit("other", gpu={"count": 3}, priority=90)  # victims are looked for in vain
    told = planned(drive, {"gpu": {"count": 2}, "priority": 90})
    assert told.preempts == PlannedJobs(own=["mine"], own_jobs=1, other_jobs=1)
    assert (told.starts, told.on) == ("later", "w0")


def test_a_start_behind_a_preemption_reckons_with_the_grace_of_who_is_ended() -> None:
    drive = Driving.with_hosts(1, config=Config(preempt_priority=80, preempt_after=0))
    drive.submit("mine", gpu={}, run={"driver": "noop", "timeout_s": 3600, "grace_s": 40})
    drive.settle()
    told = planned(drive, {"gpu": {}, "priority": 90})
    assert told.preempts == PlannedJobs(own=["mine"], own_jobs=1, other_jobs=0)
    assert told.in_ms is not None
    assert told.in_ms.p50_ms < 1_000
    assert 40_000 <= (told.in_ms.p90_ms or 0) < 42_000


def test_a_start_by_preemption_is_when_the_victims_have_run_in_peace() -> None:
    drive = Driving.with_hosts(2, config=Config(preempt_priority=80, preempt_after=60))
    submit(drive, "first", "nobody-knows")
    drive.pass_time(20_000)
    submit(drive, "second", "nobody-knows")
    drive.pass_time(10_000)
    urgent = {"priority": 90, "gpu": {"count": 2}}
    told = planned(drive, urgent)
    assert (told.starts, told.preempts) == ("later", PlannedJobs(own=["first", "second"], own_jobs=2, other_jobs=0))
    assert told.in_ms is not None
    assert 49_000 < told.in_ms.p50_ms < 52_000, "the second one may be ended then"
    drive.submit("urgent", **urgent)
    waits = look_ahead(drive).starts["t"]["urgent"]
    assert 48_000 < waits.p50_ms < 52_000
    drive.pass_time(waits.p50_ms - 3_000)
    assert drive.states("second") == ["RUNNING"]
    drive.pass_time(5_000)
    assert (drive.states("first"), drive.states("second")) == (["ENDING"], ["ENDING"]), "as foreseen"
    assert planned(drive, {"priority": 70, "gpu": {"count": 2}}).starts == "unknown", "of no right to it"


def test_of_many_that_go_by_one_plan_at_once_the_first_alone_is_taken() -> None:
    drive = waiting()
    drive.worker("w1", 4)
    seq = planned(drive, {"gpu": {}}).ledger
    replies = [drive.offer_submit(f"r{number}", gpu={}, if_seq=seq) for number in range(5)]
    drive.tick()
    answers = [drive.answers[reply] for reply in replies]
    assert [answer.get("code", answer["kind"]) for answer in answers] == ["accepted"] + ["moved-on"] * 4


def test_after_the_ledger_has_moved_on_the_plan_is_refused_and_time_alone_is_no_move() -> None:
    drive = waiting()
    drive.worker("w1", 1)
    seq = planned(drive, {"gpu": {}}).ledger
    for _ in range(3):
        drive.tick(1000)  # heartbeats
    assert drive.submit("a", gpu={}, if_seq=seq)["kind"] == "accepted"
    moved = drive.submit("b", gpu={}, if_seq=seq)
    assert (moved["code"], moved["field"]) == ("moved-on", "$.if_seq")
    assert drive.submit("a", gpu={}, if_seq=seq)["duplicate"], "the same id and content is the same job"
    drive.submit("c", gpu={}, if_seq=seq, sequence=3)
    assert drive.job("c").state == "REJECTED"


def test_a_record_that_is_not_there_was_seen_by_no_plan_of_this_ledger() -> None:
    drive = waiting()
    drive.worker("w1", 1)
    seq = planned(drive, {"gpu": {}}).ledger
    early = drive.submit("a", gpu={}, if_seq=seq + 1)
    assert (early["code"], early["field"]) == ("failed-precondition", "$.if_seq")
    assert drive.submit("b", gpu={}, if_seq=planned(drive, {"gpu": {}}).ledger)["kind"] == "accepted"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"drain": ["w"] * 257},
        {"quota": -1},
        {"quota": {"a": -1}},
        {"quota": {"B!": 1}},
        {"share": {"a": {}}},
        {"colour": 1},
        {"request": {"replicas": 0, "run": {"argv": ["a"]}}},
    ],
)
def test_what_cannot_be_planned(arguments: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(arguments, PlanAsk)


def test_whoever_ends_for_somebody_else_is_not_told_as_preempted_by_the_plan() -> None:
    drive = Driving.with_hosts(2, config=Config(preempt_priority=80, preempt_after=0))
    for name in ("mine", "mine2"):
        drive.submit(name, gpu={})
    drive.settle()
    drive.pass_time(3_000)
    drive.submit("other", tenant="u", gpu={}, priority=90)
    told = planned(drive, {"gpu": {"count": 1}, "priority": 10})
    assert (told.starts, told.preempts) == ("unknown", None)
    assert planned(drive, {"gpu": {"count": 1}, "priority": 95}).preempts is not None
