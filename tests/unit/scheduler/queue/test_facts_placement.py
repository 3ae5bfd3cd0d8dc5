"""The source systems' facts on matching and placement, 21 to 36, 44 and 46: a test each, named by its number."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers.views import worker_state
from moorage.scheduler.core.config import Config
from moorage.schemas.gpu import model_matches
from tests.unit.scheduler.driving import Driving, wire


@pytest.mark.parametrize(
    ("pattern", "name", "rank"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", 2),
        ("a100", "NVIDIA H100", 0),
        ("A10", "NVIDIA A100-SXM4-80GB", 0),
        ("~A10", "NVIDIA A100-SXM4-80GB", 1),
        ("~A10", "NVIDIA A10", 2),
        ("A10", "NVIDIA A10", 2),
        ("A10", "NVIDIA A100, NVIDIA A10", 2),
        ("=A10", "NVIDIA A100-SXM4-80GB", 0),
        ("=A10", "NVIDIA A10", 2),
        ("h100", "nvidia h100nvl", 0),
        ("~h100", "nvidia h100nvl", 1),
        ("L4", "NVIDIA L40S", 0),
        ("H200", "NVIDIA GH200 480GB", 0),
        ("~H200", "NVIDIA GH200 480GB", 0),  # another processor architecture
        ("~H200", "NVIDIA GH200, NVIDIA H200NVL", 1),
        ("~B200", "NVIDIA GB200", 0),
        ("~GH", "NVIDIA GH200 480GB", 1),
        ("gh200", "NVIDIA GH200 480GB", 2),
        ("=RTX 4090", "NVIDIA GeForce RTX 4090 D", 2),
    ],
)
def test_fact_21_model_is_whole_words_without_case(pattern: str, name: str, rank: int) -> None:
    assert model_matches(pattern, name) == rank


def test_fact_21_whole_words_go_first_over_workers_and_over_slots() -> None:
    drive = Driving()
    drive.worker("a100s", models=["NVIDIA A100"])
    drive.worker("mixed", models=["NVIDIA A100", "NVIDIA A10"])
    drive.submit("j", gpu={"model": "~A10"})
    assert drive.placed_on("j") == ["mixed"]
    assert drive.slots("j") == [1]
    drive.submit("k", gpu={"model": "~A10"})  # the request's word for it: inside a word is better than waiting
    assert drive.states("k") == ["PLACED"]
    for name, model in (("l", "A10"), ("m", "=A10")):
        drive.submit(name, gpu={"model": model})
        assert drive.states(name) == ["QUEUED"], "another model is never taken without a word"


@pytest.mark.parametrize(
    ("asked", "has", "placed"),
    [
        ({"vendor": "nvidia"}, "nvidia", True),
        ({"vendor": "amd"}, "nvidia", False),
        ({"vendor": "NVIDIA"}, "nvidia", True),  # case is normalised at the edge
        ({}, "amd", False),  # no vendor and no model means nvidia
        ({"vendor": ""}, "amd", True),
        ({"vendor": "nvidi"}, "nvidia", False),  # no substring here
        ({"model": "MI300X"}, "amd", True),  # a model without a vendor: any vendor
    ],
)
def test_fact_22_vendor_is_exact_and_empty_is_any(asked: dict[str, Any], has: str, placed: bool) -> None:
    drive = Driving()
    drive.worker(models=["MI300X"], vendor=has)
    drive.submit("j", gpu=asked)
    assert (drive.states("j") == ["PLACED"]) is placed


def test_fact_23_only_matching_devices_are_counted_and_leased() -> None:
    drive = Driving()
    drive.worker(models=["NVIDIA T4", "NVIDIA H100", "NVIDIA T4", "NVIDIA H100"])
    drive.submit("three", gpu={"model": "H100", "count": 3})
    drive.submit("two", gpu={"model": "H100", "count": 2})
    assert drive.states("three") == ["QUEUED"]
    assert drive.slots("two") == [1, 3]


def test_fact_24_words_of_a_name_not_equality() -> None:
    drive = Driving()
    drive.worker(models=["NVIDIA GeForce RTX 4090"])
    drive.submit("j", gpu={"model": "rtx 4090"})
    assert drive.states("j") == ["PLACED"]


def test_fact_25_exclusive_never_displaces_a_shared_device() -> None:
    drive = Driving()
    drive.worker(gpus=1)
    drive.submit("shared", gpu={"sharing": "mps"})
    drive.submit("whole", gpu={})
    assert (drive.states("shared"), drive.states("whole")) == (["PLACED"], ["QUEUED"])
    drive.settle()
    drive.run_out("w0")
    drive.settle()
    assert drive.states("whole") == ["RUNNING"]


@pytest.mark.parametrize(("mode", "most"), [("mps", 8), ("time-slice", 4)])
def test_fact_26_so_many_sharers_fit_and_one_more_does_not(mode: str, most: int) -> None:
    drive = Driving()
    drive.worker(gpus=1)
    drive.submit("j", replicas=most + 1, gpu={"sharing": mode})
    assert drive.states("j") == ["PLACED"] * most + ["QUEUED"]
    assert all(drive.slots("j", index) == [0] for index in range(most))


def test_a_worker_whose_mode_takes_no_sharer_is_not_asked_for_it() -> None:
    drive = Driving()
    drive.worker("none", models=["NVIDIA A10"], sharers_max={"mps": 0})
    assert "no-match" in drive.submit("j", gpu={"sharing": "mps"})["warnings"][0]
    drive.settle()
    assert drive.job("j").state == "QUEUED"


def test_fact_26_a_worker_may_offer_less_but_not_more() -> None:
    drive = Driving()
    drive.worker("less", models=["NVIDIA A10"], sharers_max={"mps": 2})
    drive.worker("more", models=["NVIDIA T4"], sharers_max={"mps": 100})
    drive.submit("a", replicas=10, gpu={"sharing": "mps", "model": "A10"})
    drive.submit("t", replicas=10, gpu={"sharing": "mps", "model": "T4"})
    assert drive.states("a").count("PLACED") == 2
    assert drive.states("t").count("PLACED") == 8


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("mps", "time-slice"),
        ("mps", "exclusive"),
        ("time-slice", "mps"),
        ("exclusive", "mps"),
        ("exclusive", "time-slice"),
    ],
)
def test_fact_27_no_two_modes_on_one_device_until_fully_released(first: str, second: str) -> None:
    drive = Driving()
    worker = drive.worker(gpus=1)
    holders = 1 if first == "exclusive" else 2
    drive.submit("one", replicas=holders, gpu={"sharing": first})
    drive.settle()
    drive.submit("two", gpu={"sharing": second})
    keys = list(worker.held)
    for key in keys[:-1]:
        worker.finish(key)
        drive.settle()
        assert drive.states("two") == ["QUEUED"]
    worker.finish(keys[-1])
    drive.settle()
    drive.settle()
    assert drive.states("two") == ["RUNNING"]


def test_fact_28_a_replicas_gpus_are_distinct_and_of_one_worker() -> None:
    drive = Driving.with_hosts(2, 2)
    drive.submit("three", gpu={"count": 3})
    assert drive.states("three") == ["QUEUED"]
    for mode in ("exclusive", "mps"):
        drive.submit(mode, gpu={"count": 2, "sharing": mode})
        assert drive.slots(mode) == [0, 1]
    drive.submit("more", gpu={"count": 2, "sharing": "mps"})
    assert drive.slots("more") == [0, 1]
    assert drive.placed_on("more") == drive.placed_on("mps")


def test_fact_29_a_gang_that_does_not_fit_takes_nothing() -> None:
    drive = Driving.with_hosts(1, 1)
    drive.submit("g", replicas=3, gpu={"scheduling": "gang"})
    assert drive.states("g") == ["QUEUED"] * 3
    assert drive.free_gpus() == 2


def test_fact_29_a_gang_that_fits_is_placed_whole() -> None:
    drive = Driving.with_hosts(2, 2)
    drive.submit("g", replicas=4, gpu={"scheduling": "gang"})
    assert drive.states("g") == ["PLACED"] * 4
    assert sorted(drive.placed_on("g")) == ["w0", "w0", "w1", "w1"]


def test_fact_30_rollback_leaves_earlier_placements_alone() -> None:
    drive = Driving.with_hosts(2, cpu_milli=8000, memory_mib=8000)
    drive.submit("before", gpu={"sharing": "mps"}, resources={"cpu_milli": 1000, "memory_mib": 100})
    drive.submit("gang", replicas=20, gpu={"sharing": "mps", "scheduling": "gang"}, resources={"cpu_milli": 1})
    drive.submit("fits", replicas=3, gpu={"scheduling": "gang", "sharing": "mps"})
    assert drive.states("before") == ["PLACED"]
    assert drive.states("gang") == ["QUEUED"] * 20
    assert drive.states("fits") == ["PLACED"] * 3


def test_fact_31_best_effort_places_what_fits_the_third_waits_with_a_reason() -> None:
    from moorage.scheduler.answers.waiting import explain_job

    drive = Driving.with_hosts(1, 1)
    drive.submit("j", replicas=3, gpu={})
    assert drive.states("j") == ["PLACED", "PLACED", "QUEUED"]
    told = wire(explain_job(drive.engine, "t", "j"))
    assert told["reason"] == "busy"
    assert told["waiting_replicas"] == 1


def test_fact_32_spread_lands_on_different_workers() -> None:
    drive = Driving.with_hosts(2, 2, 2)
    drive.submit("j", replicas=3, gpu={"scheduling": "spread"})
    assert sorted(drive.placed_on("j")) == ["w0", "w1", "w2"]
    drive.submit("k", replicas=2, gpu={"scheduling": "best-effort"})  # pack, in contrast
    assert len(set(drive.placed_on("k"))) == 2  # one device is left on each
    other = Driving.with_hosts(2, 2)
    other.submit("packed", replicas=2, gpu={})
    assert len(set(other.placed_on("packed"))) == 1


def test_fact_32_spread_counts_replicas_placed_in_earlier_records() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("j", replicas=3, gpu={"scheduling": "spread"})
    assert drive.placed_on("j") == ["w0", "-", "-"]
    drive.worker("w1", 4)
    assert drive.engine.urgent, "what waits must not wait for a heartbeat when a worker joins"
    drive.tick()
    assert drive.placed_on("j") == ["w0", "w1", "w1"]
    drive.worker("w2", 4)
    drive.submit("k", replicas=2, gpu={"scheduling": "spread"})
    assert sorted(drive.placed_on("k")) == ["w1", "w2"]


def test_fact_33_headroom_prefers_more_free_and_idler_workers() -> None:
    drive = Driving(Config(ranker="headroom"))
    drive.worker("small", 2)
    drive.worker("half", 4)
    drive.worker("big", 4)
    drive.submit("a", gpu={"count": 1})
    first = drive.placed_on("a")
    assert first == ["small"]  # all alike, the stable key decides
    drive.submit("b", gpu={"count": 1})
    assert drive.placed_on("b") == ["half"]  # small is half free now
    drive.submit("c", gpu={"count": 1})
    assert drive.placed_on("c") == ["big"]


def test_fact_33_the_default_packs() -> None:
    drive = Driving()
    drive.worker("big", 4)
    drive.worker("small", 2)
    drive.submit("a", gpu={})
    assert drive.placed_on("a") == ["small"]
    assert drive.engine.planner.placing.ranker.name == "fragments"


def test_fact_33_score_weighs_utilisation_seven_to_three() -> None:
    from moorage.schemas.frames import Load, SlotLoad

    drive = Driving(Config(ranker="headroom"))
    drive.worker("busy", 4)
    drive.worker("idle", 4)
    load = Load("busy", "boot-1", 1, 1, gpu_pool=[SlotLoad(i, util_percent=50) for i in range(4)])
    drive.engine.offer_load("busy", load, drive.now)
    for name in ("a", "b", "c"):  # 100 - 0.3 * 75 = 77.5 on idle still beats 0.7 * 50 + 30 = 65 on busy
        drive.submit(name, gpu={})
        assert drive.placed_on(name) == ["idle"], name


@pytest.mark.parametrize("verb", ["cordon", "drain"])
def test_fact_34_closed_workers_take_nothing_new(verb: str) -> None:
    drive = Driving.with_hosts(2)
    drive.submit("before", gpu={})
    drive.operate(verb, "w0")
    drive.submit("after", gpu={})
    drive.submit("cpu")
    assert (drive.states("before"), drive.states("after"), drive.states("cpu")) == (["PLACED"], ["QUEUED"], ["QUEUED"])
    drive.operate("uncordon", "w0")
    drive.tick()
    assert drive.states("after") == ["PLACED"]


def test_fact_34_the_operators_word_holds_for_its_own_record() -> None:
    drive = Driving.with_hosts(2)
    drive.offer_operate("cordon", "w0")
    drive.submit("j", gpu={})
    assert drive.states("j") == ["QUEUED"]


def test_fact_34_unheard_stale_and_lost_workers_take_nothing() -> None:
    drive = Driving.with_hosts(2)
    drive.load("w0")
    drive.lead()
    drive.submit("unheard", gpu={})
    assert drive.states("unheard") == ["QUEUED"]
    drive.renew("w0")
    drive.tick()
    assert drive.states("unheard") == ["PLACED"]
    drive.load("w0")
    drive.pass_time(7_000)  # renewals go on, load frames are missed
    drive.submit("stale", gpu={})
    assert drive.states("stale") == ["QUEUED"]
    drive.load("w0")
    drive.tick()
    assert drive.states("stale") == ["PLACED"]


@pytest.mark.parametrize(
    ("every_s", "silence_ms", "state"),
    [(2, 5_000, "PLACED"), (2, 8_000, "QUEUED"), (4, 8_000, "PLACED"), (1, 5_000, "QUEUED")],
)
def test_fact_43_three_missed_load_frames_stop_new_placements(every_s: float, silence_ms: int, state: str) -> None:
    """Ours come every 2 s if the worker says nothing else (the source's every 5 s): two missed are nothing, three make
    the worker stale."""
    drive = Driving.with_hosts(1, load_s=every_s)
    drive.load("w0")
    drive.pass_time(silence_ms)
    drive.submit("j", gpu={})
    assert drive.states("j") == [state]


def shown(drive: Driving) -> str:
    """The state of `w0` as the view of the fleet has it."""
    worker = drive.state.workers["w0"]
    return worker_state(worker, drive.engine.fleet.hosts.get(worker.num))


def test_a_worker_that_sends_load_frames_and_no_renewals_takes_nothing() -> None:
    """It may be deaf to its leader: half a lease after its last renewal it refuses placements itself."""
    drive = Driving.with_hosts(1)
    for _ in range(12):
        drive.load("w0")
        drive.pass_time(1_000, renew=False)
    assert shown(drive) == "stale"
    drive.submit("j", gpu={})
    assert drive.states("j") == ["QUEUED"]
    drive.load("w0")
    drive.tick()
    assert drive.states("j") == ["QUEUED"], "another load frame proves nothing"
    drive.renew("w0")
    drive.load("w0")
    drive.tick()
    assert drive.states("j") == ["PLACED"]


def test_a_worker_that_joins_again_and_again_and_never_renews_takes_nothing() -> None:
    drive = Driving()
    worker = drive.worker("w0", 1)
    for _ in range(2):
        drive.join(worker)
    assert shown(drive) == "not-heard"
    drive.submit("j", gpu={})
    assert drive.states("j") == ["QUEUED"]
    drive.renew("w0")
    drive.tick()
    assert drive.states("j") == ["PLACED"]


@pytest.mark.parametrize("trouble", [{"s0": "ecc"}, {"s0": "unresponsive"}, {"s0": "quarantined"}, {"f0": "pid 8812"}])
def test_fact_34_sick_and_foreign_devices_take_nothing(trouble: dict[str, str]) -> None:
    drive = Driving.with_hosts(2)
    drive.load("w0", **trouble)
    drive.submit("j", replicas=2, gpu={})
    assert drive.states("j") == ["PLACED", "QUEUED"]
    assert drive.slots("j") == [1]
    drive.load("w0")
    drive.tick()
    assert drive.states("j") == ["PLACED", "PLACED"]


def test_fact_35_same_input_same_placement() -> None:
    def ledger() -> list[bytes]:
        drive = Driving()
        for index in range(7):
            drive.worker(f"w{index}", 1 + index % 3, labels={"zone": "ab"[index % 2]})
        for index in range(12):
            drive.submit(
                f"j{index}", replicas=1 + index % 3, gpu={"count": 1 + index % 2}, requires={"zone": ["a", "b"]}
            )
        return drive.records

    assert ledger() == ledger()


@pytest.mark.parametrize("trouble", ["leased", "sick", "waiting", "none", "local"])
def test_fact_36_a_request_without_gpu_is_unaffected_by_gpu_state(trouble: str) -> None:
    drive = Driving()
    worker = drive.worker("w0", 0 if trouble == "none" else 1)
    if trouble == "leased":
        drive.submit("holder", gpu={})
    elif trouble == "sick":
        drive.load("w0", s0="ecc")
    elif trouble == "waiting":
        worker.waiting = True
        drive.renew()
    elif trouble == "local":
        worker.local = {0}
        drive.renew()
    drive.submit("gpu", gpu={})
    drive.submit("cpu")
    assert drive.states("gpu") == ["QUEUED"]
    assert drive.states("cpu") == ["PLACED"]


def test_fact_44_a_refusal_requeues_without_counting_twice() -> None:
    drive = Driving()
    worker = drive.worker("w0", 1, auto=False)
    drive.submit("j", gpu={}, retries=0, retries_on_lost=0)
    host = drive.engine.fleet.hosts[0]
    for times in range(1, 30):
        assert drive.states("j") == ["PLACED"], times
        drive.report("refused", "j", detail="device-busy")
        assert drive.states("j") == ["QUEUED"]
        assert (host.held, host.free) == (0, 1)
        worker.local = {0}
        drive.renew()
        drive.pass_time(31_000, step=5_000)
        assert drive.states("j") == ["QUEUED"], "placed where the worker says that it is busy"
        worker.local = set()
        drive.renew()
        drive.tick()
    assert drive.replica("j").refusals == 29
    assert (drive.replica("j").retries, drive.replica("j").losses) == (0, 0)


@pytest.mark.parametrize("end", ["exited", "refused", "lost", "goodbye", "rejoined"])
def test_fact_46_a_holder_that_fails_always_releases(end: str) -> None:
    from moorage.schemas.frames import Goodbye

    drive = Driving()
    worker = drive.worker("w0", 2, auto=False)
    drive.submit("j", gpu={"count": 2}, retries_on_lost=0)
    if end == "refused":
        drive.report("refused", "j")
        drive.renew()
    elif end == "exited":
        drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, ""), ("exited", "j", 0, 1, "exit")])
        assert drive.free_gpus() == 0, "not yet seen free"
        drive.report("freed", "j")
    elif end == "lost":
        drive.report("claimed", "j")
        drive.pass_time(30_000, renew=False)
        assert not drive.state.workers["w0"].session
        drive.join(worker)
    elif end == "goodbye":
        drive.send("w0", Goodbye(worker.session))
        drive.tick()
        drive.join(worker)
    else:
        drive.report("claimed", "j")
        worker.die()
        drive.join(worker)
    assert not list(drive.state.attempts()) or drive.states("j") == ["PLACED"]
    drive.cancel("j")
    held = sum(attempt.mask.bit_count() for attempt in drive.state.attempts())
    assert drive.free_gpus() == 2 - held
