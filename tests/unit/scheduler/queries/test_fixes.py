"""Fixes: each one that is told really starts the job on the same state, and what is smallest comes first."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moorage.scheduler.core.fleet.spelling import short_name
from moorage.scheduler.whatif import fixes as fixes_module
from moorage.scheduler.whatif.changes import pairs, singles
from moorage.scheduler.whatif.fixes import FIXES_MAX, TRIED_MAX
from moorage.schemas.capabilities import Capabilities, Enforced
from moorage.schemas.frames import Device
from moorage.schemas.gpu import parse_token
from moorage.schemas.job import Request
from tests.unit.scheduler.driving import H100, Driving

L40S, A100 = "NVIDIA L40S", "NVIDIA A100-SXM4-40GB"
MEMORY = {H100: 81_559, L40S: 46_068, A100: 40_960}


def fixes(drive: Driving, job: str, tenant: str = "t") -> list[dict[str, Any]]:
    return drive.fixes(job, tenant)


def fleet() -> Driving:
    drive = Driving()
    drive.checks = False
    drive.worker("h", 2, H100)
    drive.worker("l", 2, L40S, gpu_memory_mib=MEMORY[L40S])
    drive.submit("runs", gpu={"model": "H100"})
    drive.settle()
    return drive


def said(drive: Driving, **asks: Any) -> list[str]:
    drive.submit("j", **asks)
    assert drive.states("j")[0] == "QUEUED"
    return [fix["say"] for fix in fixes(drive, "j")]


@pytest.mark.parametrize(
    ("host", "asks", "told"),
    [
        (None, {"gpu": {"count": 2, "model": "H100"}}, ["accept L40S too", "1 GPU instead of 2"]),
        (None, {"gpu": {"count": 2, "min_memory_mib": 50_000}}, ["45 GiB instead of 48.8 GiB"]),
        ({"cpu_milli": 8_500}, {"gpu": {}, "resources": {"cpu_milli": 9_000}}, ["8 cores instead of 9"]),
        ({"labels": {"zone": "a"}}, {"gpu": {}, "requires": {"zone": ["b"]}}, ["without the label zone"]),
        ({"modes": ["exclusive"]}, {"gpu": {"sharing": "mps"}}, ["a whole GPU"]),
    ],
    ids=["another model", "less memory", "fewer cores", "a label less", "another mode"],
)
def test_the_smallest_change_is_told_first(host: dict[str, Any] | None, asks: dict[str, Any], told: list[str]) -> None:
    """On one host of this kind, or beside a job on a fleet of two models."""
    drive = fleet() if host is None else Driving()
    if host is not None:
        drive.worker("w", 2, **host)
    assert said(drive, **asks)[: len(told)] == told


@pytest.mark.parametrize("limit", [0, 2])
def test_a_service_and_a_tenant_at_its_limit_of_jobs_are_told_what_others_are(limit: int) -> None:
    drive = Driving()
    drive.checks = False
    calls = {"process": Capabilities(answers_calls=True, reaches=True)}
    for name, model in (("h", H100), ("l", L40S)):
        drive.worker(name, 2, model, gpu_memory_mib=MEMORY[model], capabilities=calls)
    drive.submit("runs", gpu={"model": "H100"})
    drive.settle()
    if limit:
        drive.order("limit", jobs=limit)
    service = {} if limit else {"service": {"name": "embed"}}
    run = {"driver": "process", "argv": ["serve"]}
    assert said(drive, gpu={"count": 2, "model": "H100"}, run=run, **service) == [
        "accept L40S too",
        "1 GPU instead of 2",
    ]


@pytest.mark.parametrize("model", ["4090", "3090 Ti", "H100:80G", "{x}", "\0", "A|B", "-x"])
def test_a_model_that_no_token_can_name_is_explained_without_one(model: str) -> None:
    drive = fleet()
    drive.submit("j", gpu={"count": 2, "model": ["H100", model]})
    [first, *_] = fixes(drive, "j")
    assert first["say"] == "accept L40S too"
    assert first["request"]["gpu"]["model"] == ["H100", model, "L40S"]
    if "gpu" in first:  # told only where it says the same
        assert parse_token(first["gpu"])[1].model == first["request"]["gpu"]["model"]


@pytest.mark.parametrize(
    ("model", "told"),
    [("l40_s", ["L40S instead of l40_s"]), ("L40S-40GB", ["L40S:40G instead of L40S-40GB"]), ("A100", []), ("L40", [])],
)
def test_a_model_that_the_fleet_has_not_is_answered_by_its_spelling_alone(model: str, told: list[str]) -> None:
    """Another model is not what was asked for: it may not do the work, or not run the program."""
    assert said(fleet(), gpu={"model": model}) == told


def test_a_request_of_which_something_has_begun_is_not_to_be_changed() -> None:
    """`--instead-of` refuses a sweep of which a replica has left the queue."""
    drive = fleet()
    drive.submit("j", gpu={"model": "H100"}, replicas=3, priority=60)
    assert drive.states("j") == ["PLACED", "QUEUED", "QUEUED"]
    found = fixes(drive, "j")
    assert [fix["say"] for fix in found if "request" in fix] == []
    assert fixes(fleet_and(drive, "k"), "k") != [], "of one that waits as a whole it is"


def fleet_and(drive: Driving, job: str) -> Driving:
    drive.submit(job, gpu={"model": "H100"})
    return drive


def test_another_processor_architecture_is_no_fix() -> None:
    drive = Driving()
    drive.checks = False
    drive.worker("h", 1, "NVIDIA H200")
    drive.worker("g", 1, "NVIDIA GH200 480GB")
    drive.submit("runs", gpu={"model": "H200"})
    drive.settle()
    assert "accept GH200 too" not in said(drive, gpu={"model": "H200"})


def test_of_a_gang_best_effort_or_fewer() -> None:
    drive = Driving()
    for name in "abc":
        drive.worker(name, 2, modes=["exclusive"])
    found = said(drive, replicas=5, gpu={"count": 2, "scheduling": "gang"})
    assert found[:2] == ["best effort: what fits starts now, the rest later", "3 replicas instead of 5"]


def eight_hosts() -> Driving:
    return Driving.with_hosts(*[8] * 8, modes=["exclusive"])


def test_more_gpus_than_a_host_has_are_had_by_a_gang_on_several() -> None:
    drive = eight_hosts()
    drive.submit("j", gpu={"count": 64, "model": "H100"})
    assert drive.explained("j")["reason"] == "count"
    gang, fewer = fixes(drive, "j")
    assert gang["say"] == "8 replicas of 8 GPUs as a gang instead of 64 GPUs on one host"
    assert (gang["gpu"], gang["gang"], gang["request"]["replicas"]) == ("8x8xH100", True, 8)
    assert (gang["request"]["gpu"]["scheduling"], fewer["say"]) == ("gang", "8 GPUs instead of 64")


@pytest.mark.parametrize(
    ("asks", "first"),
    [
        ({"gpu": {"count": 12}}, "2 replicas of 6 GPUs as a gang instead of 12 GPUs on one host"),
        (
            {"gpu": {"count": 16, "scheduling": "gang"}, "replicas": 2},
            "4 replicas of 8 GPUs as a gang instead of 16 GPUs on one host",
        ),
        ({"gpu": {"count": 11}}, "8 GPUs instead of 11"),
        ({"gpu": {"count": 16}, "replicas": 2}, "8 GPUs instead of 16"),
    ],
)
def test_a_gang_in_place_of_one_host_has_as_many_gpus_as_were_asked_for(asks: dict[str, Any], first: str) -> None:
    assert said(eight_hosts(), **asks)[0] == first


def test_for_gpus_that_one_host_has_no_gang_is_proposed() -> None:
    drive = eight_hosts()
    drive.submit("ones", gpu={"scheduling": "spread"}, replicas=8)
    drive.settle()
    assert not [say for say in said(drive, gpu={"count": 8}) if "gang" in say]


def slices(worker: str, *profiles: str) -> list[Device]:
    """Devices of a worker: a slice of each profile, a whole H100 for an empty one."""
    return [
        Device(
            slot, "nvidia", f"{H100} MIG {profile}" if profile else H100, f"GPU-{worker}-{slot}",
            1024 * int(profile.partition(".")[2].removesuffix("gb")) if profile else MEMORY[H100],
            mig=bool(profile), profile=profile,
        )
        for slot, profile in enumerate(profiles)
    ]  # fmt: skip


def test_another_slice_or_a_whole_gpu_in_place_of_a_slice() -> None:
    drive = Driving()
    drive.worker("w0", gpu_pool=slices("w0", "1g.10gb", "1g.20gb", "3g.40gb", ""))
    drive.submit("runs", gpu={"profile": "1g.20gb"})
    whole = "a whole GPU instead of a slice 1g.20gb"
    assert said(drive, gpu={"profile": "1g.20gb"}) == ["a slice 3g.40gb instead of 1g.20gb", whole]
    drive.submit("more", gpu={"profile": "3g.40gb"})
    assert [fix["say"] for fix in fixes(drive, "j")] == ["a slice 1g.10gb instead of 1g.20gb", whole]
    drive.submit("most", gpu={"profile": "1g.10gb"})
    [fix] = fixes(drive, "j")
    assert (fix["say"], fix["request"]) == (whole, {"gpu": {}})


def test_a_lower_level_or_a_whole_gpu() -> None:
    drive = Driving()
    guarded = {"noop": Capabilities(enforced={"mps": Enforced("guarded", "advisory")})}
    drive.worker("w0", 1, capabilities=guarded)
    asks = {"sharing": "mps", "share": {"memory_mib": 1_000}, "enforce": {"memory": "hard"}}
    assert said(drive, gpu=asks) == ["a whole GPU", "memory guarded instead of hard"]
    drive.submit("t", gpu=asks | {"sharing": "time-slice"})
    assert [fix["say"] for fix in fixes(drive, "t")] == ["a whole GPU", "memory advisory instead of hard"]


def test_a_whole_gpu_comes_without_what_only_sharers_may_ask() -> None:
    drive = Driving.with_hosts(1, modes=["exclusive"])
    assert said(drive, gpu={"sharing": "mps", "prefer": "spread", "mps_pipe_dir": "/tmp/pipe"}) == ["a whole GPU"]


@pytest.mark.parametrize(
    "gpu",
    [
        {"profile": "1g.20gb"},
        {"sharing": "mps", "prefer": "spread", "mps_pipe_dir": "/tmp/pipe"},
        {"enforce": {"memory": "guarded"}},
        {"sharing": "mps", "share": {"memory_mib": 1_000}, "enforce": {"memory": "hard"}},
    ],
)
def test_no_change_is_tried_that_would_be_refused_as_it_stands(gpu: dict[str, Any]) -> None:
    drive = Driving()
    drive.worker("w0", gpu_pool=slices("w0", "1g.10gb", ""))
    request = msgspec.convert({"gpu": gpu, "run": {"driver": "noop"}}, Request)
    assert request.trouble is None
    changes = [*singles(drive.engine.fleet, request, []), *pairs(drive.engine.fleet, request, [])]
    assert [change.say for kind in changes for change in kind if change.request.trouble is not None] == []


def test_two_changes_at_once_where_none_helps_alone() -> None:
    drive = fleet()
    drive.submit("too", gpu={"model": "H100"})
    drive.settle()
    found = said(drive, gpu={"count": 3, "model": "H100"})
    assert all(", " in say for say in found), found
    assert found[0].startswith("accept L40S too, ")


def test_nothing_is_told_that_somebody_else_has_to_cure() -> None:
    drive = fleet()
    drive.order("hold")
    drive.submit("j", gpu={"count": 2})
    assert fixes(drive, "j") == []


def test_under_a_limit_only_what_is_within_it() -> None:
    drive = fleet()
    drive.order("limit", gpus=2)
    assert said(drive, gpu={"count": 2}) == [
        "ask your operator for 3 GPUs",
        "cancel runs, which has 1 GPU of your limit",
        "1 GPU instead of 2",
    ]


def test_asking_changes_nothing() -> None:
    drive = fleet()
    drive.submit("j", gpu={"count": 2, "model": "H100"}, replicas=2)
    before = (drive.state.digest, drive.engine.fleet.changes, len(drive.engine.queue))
    order = [list(bucket) for cls in drive.engine.fleet.classes.values() for bucket in cls.buckets]
    fixes(drive, "j")
    assert (drive.state.digest, drive.engine.fleet.changes, len(drive.engine.queue)) == before
    assert order == [list(bucket) for cls in drive.engine.fleet.classes.values() for bucket in cls.buckets]


def test_a_short_name_is_what_one_would_write() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "H100",
        "Tesla V100-SXM2-16GB": "V100",
        "NVIDIA A100-SXM4-80GB": "A100",
        "AMD Instinct MI300X": "MI300X",
        "NVIDIA L40S": "L40S",
        "Tesla T4": "T4",
        "card": "card",
    }
    assert {name: short_name(name) for name in names} == names


# ------------------------------------------------------------------------------------- the proof of each fix

HOSTS = st.lists(
    st.tuples(st.sampled_from([H100, L40S, A100]), st.integers(1, 4), st.sampled_from(["a", "b"]), st.integers(2, 8)),
    min_size=1,
    max_size=4,
)
GPU = st.fixed_dictionaries(
    {"count": st.integers(1, 4)},
    optional={
        "model": st.sampled_from(["H100", "L40S", "A100", "=H200", ["H100", "A100"]]),
        "min_memory_mib": st.sampled_from([20_000, 45_000, 70_000, 100_000]),
        "scheduling": st.sampled_from(["gang", "spread", "best-effort"]),
        "sharing": st.sampled_from(["mps", "time-slice"]),
    },
)
ASKS = st.fixed_dictionaries(
    {"gpu": GPU},
    optional={
        "replicas": st.integers(1, 4),
        "resources": st.fixed_dictionaries({"cpu_milli": st.sampled_from([1_000, 4_000, 9_000])}),
        "requires": st.just({"zone": ["a"]}),
        "priority": st.sampled_from([20, 50, 80]),
    },
)


def world(hosts: list[tuple[str, int, str, int]], jobs: list[dict[str, Any]], asks: dict[str, Any]) -> Driving:
    drive = Driving()
    drive.checks = False
    for number, (model, gpus, zone, cores) in enumerate(hosts):
        labels, cpu = {"zone": zone}, cores * 1000
        drive.worker(f"w{number}", gpus, model, gpu_memory_mib=MEMORY[model], labels=labels, cpu_milli=cpu)
    for number, job in enumerate(jobs):
        drive.submit(f"o{number}", tenant="t" if number % 2 else "u", **job)
    drive.submit("j", **asks)
    drive.settle()
    return drive


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(HOSTS, st.lists(ASKS, max_size=6), ASKS)
def test_every_fix_starts_the_job_on_the_same_state(
    hosts: list[tuple[str, int, str, int]], jobs: list[dict[str, Any]], asks: dict[str, Any]
) -> None:
    told = fixes(world(hosts, jobs, asks), "j") if world(hosts, jobs, asks).states("j")[0] == "QUEUED" else []
    assert len(told) <= FIXES_MAX
    for fix in told:
        drive = world(hosts, jobs, asks)
        drive.cancel("j")
        body = {"run": {"driver": "noop"}, **asks}
        changed = {name: value for name, value in {**body, **fix["request"]}.items() if value is not None}
        drive.submit("fixed", **json.loads(msgspec.json.encode(changed)))
        states = drive.states("fixed")
        gang = changed["gpu"].get("scheduling") == "gang"
        assert "PLACED" in states if not gang else set(states) == {"PLACED"}, (fix, states)


@settings(max_examples=50, deadline=None)
@given(HOSTS, st.lists(ASKS, max_size=4), ASKS)
def test_whatever_is_asked_few_changes_are_tried(
    hosts: list[tuple[str, int, str, int]], jobs: list[dict[str, Any]], asks: dict[str, Any]
) -> None:
    drive, tried = world(hosts, jobs, asks), list[Any]()

    def none_helps(work: Any, limit_s: float) -> None:
        tried.append(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixes_module, "ask", none_helps)
        assert fixes_module.fixes(drive.engine, drive.now, "t", "j")[1] == []
    assert len(tried) <= TRIED_MAX


def test_what_no_host_has_room_for_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving()
    drive.worker("w", 1)
    drive.submit("runs", gpu={})
    drive.settle()
    drive.submit("j", gpu={})
    tried = list[Any]()

    def ask(work: Any, limit_s: float) -> None:
        tried.append(work)

    monkeypatch.setattr(fixes_module, "ask", ask)
    assert fixes_module.fixes(drive.engine, drive.now, "t", "j") == ("busy", [])
    assert tried == []


def test_no_change_is_tried_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    drive, tried = fleet(), list[float]()
    drive.submit("j", gpu={"count": 2, "model": "H100", "scheduling": "gang"}, replicas=9)

    def ask(work: Any, limit_s: float) -> None:
        tried.append(limit_s)

    monkeypatch.setattr(fixes_module, "ask", ask)
    assert fixes_module.fixes(drive.engine, drive.now, "t", "j", 0.0)[1] == []
    assert tried == []
    fixes_module.fixes(drive.engine, drive.now, "t", "j")
    assert set(tried) == {fixes_module.LIMIT_S}


def test_no_ranks_of_a_gang_are_told_to_share_a_gpu() -> None:
    drive = fleet()
    found = said(drive, gpu={"count": 2, "model": "H100", "scheduling": "gang"}, replicas=2)
    assert not [say for say in found if say.startswith("mode ")]
