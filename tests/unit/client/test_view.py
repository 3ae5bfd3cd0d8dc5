"""The view model behind `moorage top`: what it makes of frames and answers as they come over the wire."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import convert
from msgspec.structs import replace

from moorage.cli.doctor.checks_fleet import of_fleet
from moorage.client.view.closed import closed_words, planned_words
from moorage.client.view.model import GONE_MAX, LOAD_MS, SILENT_MS, Model
from moorage.client.view.past import past_view
from moorage.client.view.view import Counts, Fit, Idle, Trouble
from moorage.schemas.answers.fleet import DrainTimes, FleetAnswer, StalledJob, WorkerInfo
from moorage.schemas.answers.jobs import Explained, JobRow, Start
from moorage.schemas.frames import FleetDetail, FleetFrame, FleetRow, Hello, LedgerCopies, Load, Standing, UsedJob
from moorage.schemas.frames.fleet import Device, SlotLoad
from moorage.schemas.reasons import REASONS

AT_MS = 1_700_000_000_000


def frame(*workers: tuple[str, str, str], epoch: int = 3, queued: int = 0, simulated: bool = False) -> FleetFrame:
    rows = [FleetRow(name, state, cells, simulated) for name, state, cells in workers]
    return FleetFrame(epoch, 100, workers=rows, queued=queued, running=2)


def hello(worker: str, *models: str) -> Hello:
    pool = [Device(at, "nvidia", model, f"GPU-{worker}-{at}") for at, model in enumerate(models)]
    return Hello(worker, "boot", gpu_pool=pool)


def load(worker: str, *slots: SlotLoad) -> Load:
    return Load(worker, "boot", 1, 1, gpu_pool=list(slots))


def job(tenant: str, name: str, state: str, age_ms: int, **more: Any) -> JobRow:
    known = {"tenant": tenant, "job": name, "state": state, "age_ms": age_ms, "gpu": "2xH100"}
    return convert({**known, **more}, JobRow)


def told(model: Model, *rows: JobRow, waits: int | None = None) -> None:
    """Tell the model these jobs; `waits` in all, more than were listed."""
    listed = sum(row.state == "QUEUED" for row in rows)
    counts = {"QUEUED": listed if waits is None else waits, "RUNNING": len(rows) - listed, "FAILED": 9}
    model.take_jobs(list(rows), counts, more=waits is not None)


def used(least: int, most: int) -> dict[str, int]:
    return {"devices": 2, "percent": most, "percent_min": least, "percent_max": most, "memory_mib": 1}


def test_each_sign_is_counted_once_and_sharers_are_leased_too() -> None:
    model = Model(0)
    model.take_frame(frame(("n1", "up", "··##13f!x-?"), ("n2", "left", "··"), ("n3", "draining", "·#·")), 0)
    assert model.view(0, AT_MS).counts == Counts(
        gpus=14, free=2, leased=5, shared=1, frozen=1, sick=1, foreign=1, not_lent=1, lost=1, closed=2
    )


def test_without_a_first_frame_the_view_says_after_a_while_that_nobody_leads() -> None:
    assert Model(0).view(SILENT_MS, AT_MS).troubles == [], "two frames come a second: it has only just begun"
    view = Model(0).view(SILENT_MS + 1, AT_MS)
    assert [(trouble.where, trouble.grave) for trouble in view.troubles] == [("scheduler", True)]
    assert view.heard_ms_ago is None
    assert view.counts == Counts()


def test_a_leader_that_is_silent_is_a_grave_trouble_and_the_picture_stays() -> None:
    model = Model(0)
    model.take_frame(frame(("n1", "up", "··#")), 1_000)
    model.take_frame(Standing("s1", "0.3.0", 1, 100, leads=True), 1_000)
    assert model.view(1_000 + SILENT_MS, AT_MS).troubles == []
    assert model.view(2_000, AT_MS).leader == "s1"
    late = model.view(1_001 + SILENT_MS, AT_MS)
    assert late.troubles[0].grave
    assert late.counts.gpus == 3, "what was seen last is still there"
    assert model.view(60_000, AT_MS).leader == ""


def test_a_deposed_leaders_last_frame_changes_nothing() -> None:
    model = Model(0)
    model.take_frame(frame(("n1", "up", "##"), epoch=4), 0)
    model.take_frame(frame(("n1", "up", "··"), epoch=3), 10)
    assert model.view(20, AT_MS).counts.leased == 2


def test_workers_that_are_gone_are_forgotten_however_many_come() -> None:
    model = Model(0)
    for at in range(5 * GONE_MAX):
        model.take_frame(hello(f"w{at}", "H100"), at * LOAD_MS)
        model.take_frame(load(f"w{at}", SlotLoad(0, util_percent=9)), at * LOAD_MS)
        model.take_frame(frame((f"w{at}", "up", "#")), at * LOAD_MS)
    assert model.view((5 * GONE_MAX - 1) * LOAD_MS, AT_MS).use == 9
    assert len(model.loads) <= GONE_MAX + 2
    assert (model.hello_of("w1"), model.hello_of(f"w{5 * GONE_MAX - 1}") is None) == (None, False)


def test_a_fleet_that_begins_a_new_ledger_is_shown_once_the_old_one_is_silent() -> None:
    model = Model(0)
    model.take_frame(frame(("n1", "up", "##"), epoch=40), 0)
    model.take_frame(frame(("n1", "up", "··"), epoch=1), SILENT_MS + 1)
    view = model.view(SILENT_MS + 2, AT_MS)
    assert (view.epoch, view.counts.free, view.heard_ms_ago, view.troubles) == (1, 2, 1, [])


def test_with_public_frames_alone_it_tells_troubles_fits_and_idle_workers() -> None:
    model = Model(0)
    model.take_frame(hello("n1", "NVIDIA H100", "NVIDIA H100", "NVIDIA H100"), 0)
    model.take_frame(frame(("n1", "up", "·#!"), ("n2", "lost", "??"), ("n3", "left", "??"), ("n4", "up", "x·")), 0)
    model.take_frame(
        load("n1", SlotLoad(0), SlotLoad(1, leased=True), SlotLoad(2, health="xid", detail="Xid 79: fallen off")), 0
    )
    model.take_frame(load("n4", SlotLoad(0, foreign="pid 8 python (user bob)"), SlotLoad(1)), 0)
    view = model.view(0, AT_MS)
    assert view.troubles == [
        Trouble("n2", "lost", grave=True),
        Trouble("n1 GPU 2", "xid: Xid 79: fallen off"),
        Trouble("n4 GPU 0", "used by pid 8 python (user bob)"),
    ]
    assert view.counts.gpus == 7, "n3 was stopped in order: its GPUs are no part of the fleet"
    assert view.fits == [Fit("", 4, 1, 1), Fit("NVIDIA H100", 3, 1, 1)]
    assert view.idle == [Idle("", 0, 1, "", "n1", 0, 0, 0)]
    assert view.use == 0
    assert view.workers[0].use == [0, 0, 0]
    assert model.view(20_000, AT_MS).workers[0].use == [None] * 3, "an old load is not shown as if it were new"


def test_a_service_that_rests_is_none_that_waits() -> None:
    model = Model(0)
    rests = job("a", "rests", "QUEUED", 9, reason="scaled", replicas={"of": 4, "states": {"QUEUED": 4}})
    some = job("a", "some", "RUNNING", 9, reason="scaled", waiting=3)
    model.take_frame(frame(("n1", "up", "#·"), queued=8), 0)
    told(model, rests, some, job("a", "waits", "QUEUED", 5, reason="busy"))
    view = model.view(0, AT_MS)
    assert ([(row.job, row.jobs, row.reason) for row in view.waiting], view.waits) == ([("waits", 1, "busy")], 1)
    assert view.queued == 1, "the frame counts each replica that does not run"
    assert model.oldest() == [("a", "waits")]
    assert {row.job for row in view.jobs} == {"rests", "some", "waits"}, "they are listed as jobs"
    told(model, rests)
    assert (model.view(0, AT_MS).waiting, model.view(0, AT_MS).waits) == ([], 0)


def test_who_holds_without_using_is_seen_for_as_long_as_this_screen_saw_it() -> None:
    model = Model(0)
    model.take_frame(frame(("n1", "up", "####")), 0)
    rows = job("a", "partly", "RUNNING", 9, use=used(0, 97)), job("a", "busy", "RUNNING", 9, use=used(50, 97))
    told(model, *rows)
    assert model.view(100, AT_MS).idle == [Idle("a", 1, 1, "partly", "", 0, 0, 97)], "one of its two"
    assert [row.for_ms for row in model.view(5_100, AT_MS).idle] == [5_000]
    told(model, job("a", "partly", "RUNNING", 9, use=used(3, 97)))
    assert model.view(6_000, AT_MS).idle == []
    told(model, rows[0])
    assert [row.for_ms for row in model.view(7_000, AT_MS).idle] == [0], "it begins anew"


def test_an_operator_is_told_by_the_leader_for_how_long_gpus_do_nothing() -> None:
    model = Model(0)
    held = {"worker": "n1", "gpu": "1xH100", "devices": 1, "percent": 0, "percent_min": 0, "percent_max": 0}
    told_of = [
        {"tenant": "a", "job": "new", "idle_ms": 2_000, **held},
        {"tenant": "a", "job": "old", "idle_ms": 700_000, **held},
        {"tenant": "b", "job": "works", **held, "percent": 80, "percent_min": 70, "percent_max": 90},
    ]
    rows = convert(told_of, list[UsedJob])
    model.take_detail(FleetDetail(3, 100, jobs=rows))
    model.take_detail(FleetDetail(3, 100, jobs=[*rows[:2], replace(rows[2], percent=60)]))
    told(model)
    view = model.view(0, AT_MS)
    assert view.idle == [Idle("a", 2, 2, "old", "n1", 700_000, 0, 0)]
    assert view.sparks == {"a/new": [0, 0], "a/old": [0, 0], "b/works": [80, 60]}
    model.take_detail(FleetDetail(3, 100, jobs=rows[:1]))
    assert list(model.view(0, AT_MS).sparks) == ["a/new"], "what has ended is forgotten"


def test_of_gpus_that_are_held_those_count_that_do_nothing() -> None:
    model = Model(0)
    held = {"gpu": "4xH100", "devices": 4, "percent": 40, "percent_min": 0, "percent_max": 90}
    rows = convert(
        [{"tenant": "a", "job": name, "idle": idle, **held} for name, idle in (("j", 3), ("k", 1))], list[UsedJob]
    )
    model.take_detail(FleetDetail(3, 100, jobs=rows))
    told(model)
    assert [row.gpus for row in model.view(0, AT_MS).idle] == [4]


def test_the_oldest_waiting_job_of_each_tenant_and_reason_is_the_one_to_explain_and_says_why() -> None:
    model = Model(0)
    model.take_frame(frame(("n1", "up", "##"), queued=4), 0)
    mine = [job("a", "new", "QUEUED", 5), job("a", "old", "QUEUED", 50), job("a", "r", "RUNNING", 90)]
    held = job("a", "kept", "QUEUED", 20, reason="held")
    told(model, *mine, held, job("b", "b1", "QUEUED", 70), waits=300)
    assert model.oldest() == [("b", "b1"), ("a", "old"), ("a", "kept")]
    why = Explained(job="old", tenant="a", state="QUEUED", reason="busy", means="jobs lease it")
    model.take_why("a", replace(why, starts=Start(p50_ms=4_000)))
    view = model.view(0, AT_MS)
    assert [(row.tenant, row.jobs, row.job, row.reason, row.more) for row in view.waiting] == [
        ("b", 1, "b1", "", True),
        ("a", 2, "old", "busy", True),
        ("a", 1, "kept", "held", True),
    ]
    assert (view.waits, view.live, len(view.jobs)) == (300, 301, 5)
    assert [row.count for row in view.waiting] == ["1+", "2+", "1+"]
    assert (view.waiting[1].means, view.waiting[1].starts_ms) == ("jobs lease it", 4_000)
    assert view.waiting[2].means, "what a reason means is known without asking"
    told(model, job("a", "new", "QUEUED", 5))
    assert model.oldest() == [("a", "new")]
    assert model.view(0, AT_MS).waiting[0].reason == "", "another job's reason is not shown for this one"


def test_a_running_job_waits_as_long_as_some_of_its_replicas_do() -> None:
    model = Model(0)
    told(model, job("a", "new", "QUEUED", 5), job("a", "half", "RUNNING", 50, waiting=3))
    assert model.oldest() == [("a", "half")]
    assert [(row.jobs, row.job) for row in model.view(0, AT_MS).waiting] == [(2, "half")]


ONE_COPY = {"wanted": 1, "lacking": [], "holder": "a", "servers": ["a", "b", "c"]}
#: figures of the leader's answer `fleet` of which doctor warns, by the name of its check
WARNED: dict[str, dict[str, Any]] = {
    "copies": {"ledger_copies": ONE_COPY},
    "schedulers": {
        "schedulers": [
            {"scheduler": "s1", "leads": True, "settings": {}},
            {"scheduler": "s2", "settings": {"jobs_max": 5}},
        ]
    },
    "queue-room": {"request_queue": {"messages": 9, "bytes": 95, "bytes_max": 100}},
    "buckets": {"buckets": {"tenants": ["a", "b"], "trouble": "insufficient storage"}},
    "failures": {"contained": {"counts": {"request": 2}, "plain_ranker": False, "refused": [], "workers": []}},
    "follower": {"follower": {"behind": 0, "gaps": [], "trouble": "its stream is full"}},
}


@pytest.mark.parametrize("name", WARNED)
def test_what_doctor_warns_of_in_the_leaders_answer_is_a_trouble(name: str) -> None:
    model = Model(0)
    model.take_frame(frame(("n1", "up", "##")), 0)
    calm = {"leader": "s1", "epoch": 1, "ledger": 1, "fits_now": [], "workers": []}
    answer = convert(calm | WARNED[name], FleetAnswer)
    model.take_fleet(answer, 0)
    [warned] = [check for check in of_fleet(answer) if check.verdict != "ok" and check.name != "workers"]
    assert (warned.name, model.view(0, AT_MS).troubles) == (name, [Trouble(name, warned.found)])
    model.take_fleet(convert(calm, FleetAnswer), 0)
    assert model.view(0, AT_MS).troubles == []


def test_an_observer_hears_of_a_ledger_with_one_copy_and_of_a_fleet_without_a_worker() -> None:
    model = Model(0)
    model.take_frame(FleetFrame(4, 9, workers=[], ledger_copies=convert(ONE_COPY, LedgerCopies)), 0)
    troubles = model.view(0, AT_MS).troubles
    assert [(trouble.where, trouble.grave) for trouble in troubles] == [("fleet", True), ("copies", False)]
    assert troubles[0].what == "no worker has joined"
    assert "the ledger has one copy, on a" in troubles[1].what


def test_jobs_that_stall_fail_again_and_again_or_can_never_run_are_troubles_by_tenant() -> None:
    model = Model(0)
    model.take_frame(frame(("n1", "up", "##")), 0)
    stalled = [{"tenant": "b", "job": "hung", "seconds": 600, "why": "1 GPU at 0 %"}]
    model.take_fleet(FleetAnswer(leader="s1", stalled=convert(stalled, list[StalledJob])), 0)
    assert model.view(0, AT_MS).troubles == [Trouble("b/hung", "stalled for 10m: 1 GPU at 0 %")]
    rows = [{"replica": replica, "seconds": 60 * replica, "why": "2 GPUs at 0 %"} for replica in (1, 2)]
    told(
        model,
        job("a", "wide", "RUNNING", 900, stalled=rows),
        job("a", "hung", "RUNNING", 900, stalled=rows[:1]),
        job("c", "loops", "QUEUED", 5, attempt=7, why="start-failed: no program x in PATH"),
        job("c", "new", "QUEUED", 5, attempt=1),
        *(job("d", f"never-{at}", "QUEUED", 5, attempt=0, reason="model") for at in range(3)),
        job("d", "busy", "QUEUED", 5, attempt=0, reason="busy"),
    )
    assert [(trouble.where, trouble.what) for trouble in model.view(0, AT_MS).troubles] == [
        ("2 jobs of a", "stalled for 2m: 2 GPUs at 0 %"),
        ("b/hung", "stalled for 10m: 1 GPU at 0 %"),
        ("c/loops", "fails again and again, try 7: start-failed: no program x in PATH"),
        ("3 jobs of d", f"can never run as the fleet is: {REASONS['model'].means}"),
    ]


def test_a_service_whose_replicas_crash_again_and_again_is_a_trouble_while_others_of_them_run() -> None:
    model = Model(0)
    model.take_frame(frame(("n1", "up", "##")), 0)
    looping = {"attempt": 9, "waiting": 1, "reason": "backoff", "why": "RUNNING by exit 1"}
    told(
        model,
        job("a", "half", "RUNNING", 90, ready=3, **looping),
        job("b", "never", "RUNNING", 90, ready=0, attempt=4),
        job("c", "begins", "RUNNING", 90, ready=0, attempt=1),
        job("c", "serves", "RUNNING", 90, ready=1, attempt=8),
        job("c", "trains", "RUNNING", 90, attempt=8),
        job("c", "busy", "RUNNING", 90, ready=1, attempt=8, waiting=1, reason="busy"),
    )
    assert [(trouble.where, trouble.what) for trouble in model.view(0, AT_MS).troubles] == [
        ("a/half", "fails again and again, try 9: RUNNING by exit 1"),
        ("b/never", "fails again and again, try 4, none is ready"),
    ]


def test_a_service_that_was_woken_often_and_rests_is_no_trouble() -> None:
    model = Model(0)
    model.take_frame(frame(("n1", "up", "··")), 0)
    told(model, job("a", "api", "QUEUED", 90, ready=0, attempt=7, reason="scaled"))
    assert model.view(0, AT_MS).troubles == []


def test_a_moment_of_the_past_has_leases_queue_and_outcomes_and_nothing_of_use_and_health() -> None:
    rows = [
        job("a", "ran", "RUNNING", 90, leases=[["n1", [0, 1]], ["gone", [2]]]),
        job("a", "shares", "RUNNING", 80, leases=[["n1", [1]]]),
        job("b", "waited", "QUEUED", 50, leases=[]),
    ]
    workers = [{"worker": "n1", "state": "up", "gpus": 4, "models": ["NVIDIA H100"], "simulated": True}]
    view = past_view(AT_MS, rows, {"FAILED": 2}, convert(workers, list[WorkerInfo]))
    assert [(worker.worker, worker.cells) for worker in view.workers] == [("gone", "··#"), ("n1", "#2··")]
    assert all(set(worker.use) == {None} for worker in view.workers)
    assert (view.past, view.troubles, view.idle, view.use, view.ended) == (True, [], [], None, {"FAILED": 2})
    assert [(row.tenant, row.jobs, row.job) for row in view.waiting] == [("b", 1, "waited")]
    assert (view.counts.leased, view.running, view.queued) == (3, 3, 1)


def test_the_leaders_answer_tells_causes_and_what_fits() -> None:
    model = Model(0)
    model.take_frame(frame(("n1", "draining", "·!"), ("n2", "up", "··"), simulated=True), 0)
    worker = {"models": ["NVIDIA H100"], "heard_ms_ago": 500, "by": "operator:ana", "flag": "open", "members": 0}
    drained = {"flag": "draining", "members": 3, "why": "new fan", "since_ms": 7_800_000}
    told(model, job("a", "there", "LOST_KEPT", 9, worker="n3"), job("b", "too", "LOST_KEPT", 9, worker="n3"))
    told_fleet = convert(
        {
            "leader": "s1",
            "used_now": [{"model": "NVIDIA H100", "read": 4, "at_work": 1.0, "idle": 3}],
            "fits_now": [{"model": "NVIDIA H100", "gpus": 4, "free": 3, "largest": 2}],
            "workers": [
                {
                    **worker,
                    **drained,
                    "worker": "n1",
                    "state": "up",
                    "troubles": [{"slot": 1, "kind": "xid", "detail": "Xid 79", "since_ms": 240_000}],
                },
                {**worker, "worker": "n2", "state": "up", "starts_fail": {"why": "no such user", "opens_in_ms": 1}},
                {**worker, "worker": "n3", "state": "lost", "heard_ms_ago": None},
            ],
        },
        FleetAnswer,
    )
    model.take_fleet(told_fleet, 0)
    view = model.view(0, AT_MS)
    assert view.troubles == [
        Trouble("n2", "jobs fail to start: no such user", grave=True),
        Trouble("n3", "lost, with 2 jobs of a, b", grave=True),
        Trouble("n1", "draining for 2h10m, 3 attempts on it: new fan (by operator:ana)"),
        Trouble("n1 GPU 1", "xid: Xid 79, since 4m"),
    ]
    assert (view.leader, view.use, view.simulated) == ("s1", 25, "all")
    assert view.fits == [Fit("NVIDIA H100", 4, 3, 2)]


def test_an_order_to_a_worker_has_one_line_with_its_times() -> None:
    row = WorkerInfo(worker="n1", state="up", by="operator", said="ana", flag="open")
    assert (closed_words(row), planned_words(row)) == ("", "")
    closed = replace(row, since_ms=90_000, why="")
    bounded = DrainTimes(leave_in_ms=60_000, ends_in_ms=7_200_000, by="operator:bob", why="fans")
    drained = replace(closed, flag="draining", members=1, drain=bounded)
    assert closed_words(drained) == (
        "draining for 1m30s, 1 attempt on it, empty in 1m, open again in 2h (by operator, unverified (says ana))"
    )
    planned = replace(closed, flag="cordoned", drain=replace(bounded, begins_in_ms=30_000))
    assert closed_words(planned) == "cordoned for 1m30s, no attempt on it (by operator, unverified (says ana))"
    assert planned_words(planned) == "drained in 30s, empty in 1m, open again in 2h: fans (by operator:bob)"
    assert planned_words(drained) == "", "it began"


def test_a_tenants_key_hears_no_frame_and_is_told_of_its_own_jobs_alone() -> None:
    model = Model(0)
    model.sees_fleet = False
    told(model, job("a", "r", "RUNNING", 90, worker="sim-0000", simulated=True))
    view = model.view(60_000, AT_MS)
    assert (view.sees_fleet, view.troubles, view.simulated) == (False, [], "all")
