"""The view model behind `moorage top`: what it makes of frames and answers as they come over the wire."""

from __future__ import annotations

from typing import Any

from moorage.client.view.model import SILENT_MS, Model
from moorage.client.view.view import Counts, Fit, Idle, Trouble
from moorage.schemas.frames import FleetFrame, Hello, Load, Standing
from moorage.schemas.frames.fleet import Device, SlotLoad

AT_MS = 1_700_000_000_000


def frame(*workers: tuple[str, str, str], epoch: int = 3, queued: int = 0, simulated: bool = False) -> FleetFrame:
    rows: list[dict[str, Any]] = [
        {"worker": name, "state": state, "cells": cells, "simulated": simulated} for name, state, cells in workers
    ]
    return FleetFrame(epoch, 100, workers=rows, queued=queued, running=2)


def hello(worker: str, *models: str) -> Hello:
    pool = [Device(at, "nvidia", model, f"GPU-{worker}-{at}") for at, model in enumerate(models)]
    return Hello(worker, "boot", gpu_pool=pool)


def load(worker: str, *slots: SlotLoad) -> Load:
    return Load(worker, "boot", 1, 1, gpu_pool=list(slots))


def job(tenant: str, name: str, state: str, age_ms: int, **more: Any) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "job": name,
        "state": state,
        "age_ms": age_ms,
        "gpu": "2xH100",
        "worker": "",
        "simulated": False,
        **more,
    }


def listed(*rows: dict[str, Any]) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["state"]] = counts.get(row["state"], 0) + 1
    return {"jobs": list(rows), "counts": counts}


def used(least: int, most: int) -> dict[str, int]:
    return {"devices": 2, "percent": most, "percent_min": least, "percent_max": most, "memory_mib": 1}


def test_each_sign_is_counted_once_and_sharers_are_leased_too() -> None:
    model = Model(0)
    model.hear(frame(("n1", "up", "··##13f!x-?g"), ("n2", "left", "··"), ("n3", "draining", "·#·")), 0)
    assert model.view(0, AT_MS).counts == Counts(
        gpus=15, free=2, leased=5, shared=1, frozen=2, sick=1, foreign=1, not_lent=1, lost=1, closed=2
    )


def test_without_a_first_frame_the_view_says_after_a_while_that_nobody_leads() -> None:
    assert Model(0).view(SILENT_MS, AT_MS).troubles == [], "two frames come a second: it has only just begun"
    view = Model(0).view(SILENT_MS + 1, AT_MS)
    assert [(trouble.where, trouble.grave) for trouble in view.troubles] == [("scheduler", True)]
    assert view.heard_ms_ago is None
    assert view.counts == Counts()


def test_a_leader_that_is_silent_is_a_grave_trouble_and_the_picture_stays() -> None:
    model = Model(0)
    model.hear(frame(("n1", "up", "··#")), 1_000)
    model.hear(Standing("s1", "0.3.0", 1, 100, leads=True), 1_000)
    assert model.view(1_000 + SILENT_MS, AT_MS).troubles == []
    assert model.view(2_000, AT_MS).leader == "s1"
    late = model.view(1_001 + SILENT_MS, AT_MS)
    assert late.troubles[0].grave
    assert late.counts.gpus == 3, "what was seen last is still there"
    assert model.view(60_000, AT_MS).leader == ""


def test_a_deposed_leaders_last_frame_changes_nothing() -> None:
    model = Model(0)
    model.hear(frame(("n1", "up", "##"), epoch=4), 0)
    model.hear(frame(("n1", "up", "··"), epoch=3), 10)
    assert model.view(20, AT_MS).counts.leased == 2


def test_with_public_frames_alone_it_tells_troubles_fits_and_idle_workers() -> None:
    model = Model(0)
    model.hear(hello("n1", "NVIDIA H100", "NVIDIA H100", "NVIDIA H100"), 0)
    model.hear(frame(("n1", "up", "·#!"), ("n2", "lost", "??"), ("n3", "left", "??"), ("n4", "up", "x·")), 0)
    model.hear(
        load("n1", SlotLoad(0), SlotLoad(1, leased=True), SlotLoad(2, health="xid", detail="Xid 79: fallen off")), 0
    )
    model.hear(load("n4", SlotLoad(0, foreign="pid 8 python (user bob)"), SlotLoad(1)), 0)
    view = model.view(0, AT_MS)
    assert view.troubles == [
        Trouble("n2", "lost", grave=True),
        Trouble("n1 GPU 2", "xid: Xid 79: fallen off"),
        Trouble("n4 GPU 0", "used by pid 8 python (user bob)"),
    ]
    assert view.counts.gpus == 7, "n3 was stopped in order: its GPUs are no part of the fleet"
    assert view.fits == [Fit("", 4, 1, 1), Fit("NVIDIA H100", 3, 1, 1)]
    assert view.idle == [Idle("", "", "n1", "1 of 1", 0, 0, 0)]
    assert view.use == 0
    assert view.workers[0].use == [0, 0, 0]
    assert model.view(20_000, AT_MS).workers[0].use == [None] * 3, "an old load is not shown as if it were new"


def test_who_holds_without_using_is_seen_for_as_long_as_this_screen_saw_it() -> None:
    model = Model(0)
    model.hear(frame(("n1", "up", "####")), 0)
    rows = job("a", "partly", "RUNNING", 9, use=used(0, 97)), job("a", "busy", "RUNNING", 9, use=used(50, 97))
    model.told_jobs("a", listed(*rows))
    assert [(row.job, row.for_ms, row.least, row.most) for row in model.view(100, AT_MS).idle] == [("partly", 0, 0, 97)]
    assert [row.for_ms for row in model.view(5_100, AT_MS).idle] == [5_000]
    model.told_jobs("a", listed(job("a", "partly", "RUNNING", 9, use=used(3, 97))))
    assert model.view(6_000, AT_MS).idle == []
    model.told_jobs("a", listed(rows[0]))
    assert [row.for_ms for row in model.view(7_000, AT_MS).idle] == [0], "it begins anew"


def test_the_oldest_waiting_job_of_each_tenant_is_the_one_to_explain_and_says_why() -> None:
    model = Model(0)
    model.hear(frame(("n1", "up", "##"), queued=4), 0)
    model.told_jobs(
        "a", listed(job("a", "new", "QUEUED", 5), job("a", "old", "QUEUED", 50), job("a", "r", "RUNNING", 90))
    )
    model.told_jobs("b", {"jobs": [job("b", "b1", "QUEUED", 70)], "counts": {"QUEUED": 300}})
    assert model.oldest() == [("b", "b1"), ("a", "old")]
    model.told_why("a", {"job": "old", "reason": "busy", "means": "jobs lease it", "starts": {"p50_ms": 4_000}})
    waiting = model.view(0, AT_MS).waiting
    assert [(row.tenant, row.jobs, row.job, row.more) for row in waiting] == [
        ("b", 300, "b1", True),
        ("a", 2, "old", False),
    ]
    assert (waiting[1].reason, waiting[1].means, waiting[1].starts_ms) == ("busy", "jobs lease it", 4_000)
    model.told_jobs("a", listed(job("a", "new", "QUEUED", 5)))
    assert model.oldest() == [("b", "b1"), ("a", "new")]
    assert model.view(0, AT_MS).waiting[1].reason == "", "another job's reason is not shown for this one"
    model.keep_tenants(["b"])
    assert [row.tenant for row in model.view(0, AT_MS).waiting] == ["b"]


def test_the_leaders_answer_tells_causes_and_what_fits() -> None:
    model = Model(0)
    model.hear(frame(("n1", "draining", "·!"), ("n2", "up", "··"), simulated=True), 0)
    worker = {"models": ["NVIDIA H100"], "heard_ms_ago": 500, "by": "operator:ana"}
    model.told_fleet(
        {
            "leader": "s1",
            "used_now": [{"model": "NVIDIA H100", "read": 4, "at_work": 1.0, "idle": 3}],
            "fits_now": [{"model": "NVIDIA H100", "gpus": 4, "free": 3, "largest": 2}],
            "workers": [
                {
                    **worker,
                    "worker": "n1",
                    "state": "up",
                    "drain": {"why": "new fan"},
                    "troubles": [{"slot": 1, "kind": "xid", "detail": "Xid 79", "since_ms": 240_000}],
                },
                {**worker, "worker": "n2", "state": "up", "starts_fail": {"why": "no such user", "opens_in_ms": 1}},
            ],
        }
    )
    view = model.view(0, AT_MS)
    assert view.troubles == [
        Trouble("n2", "jobs fail to start: no such user", grave=True),
        Trouble("n1", "draining (by operator:ana: new fan)"),
        Trouble("n1 GPU 1", "xid: Xid 79, since 4m"),
    ]
    assert (view.leader, view.use, view.simulated) == ("s1", 25, "all")
    assert view.fits == [Fit("NVIDIA H100", 4, 3, 2)]


def test_a_tenants_key_hears_no_frame_and_is_told_of_its_own_jobs_alone() -> None:
    model = Model(0)
    model.sees_fleet = False
    model.told_jobs("a", listed(job("a", "r", "RUNNING", 90, worker="sim-0000", simulated=True)))
    view = model.view(60_000, AT_MS)
    assert (view.sees_fleet, view.troubles, view.simulated) == (False, [], "all")
