"""A tenant's limits of GPUs by model: which hosts take its jobs, who waits, and who is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from moorage.schemas.errors import Refused
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving

H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"


@pytest.fixture(autouse=True)
def next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def site(**limits: Any) -> Driving:
    """Two hosts of 4 H100 and one of 4 L4, and tenant `t` with these limits."""
    drive = Driving()
    for name, model in (("h0", H100), ("h1", H100), ("l0", L4)):
        drive.worker(name, 4, model)
    raise_level(drive)
    done = drive.order("limit", **limits)
    assert done["changed"], done
    return drive


def has(drive: Driving, tenant: str = "t") -> Counter[str]:
    """How many GPUs of each host a tenant's attempts hold."""
    found = Counter[str]()
    for attempt in drive.state.attempts():
        if attempt.name[0] == tenant:
            found[attempt.worker.id[0]] += attempt.mask.bit_count()
    return found


def test_no_more_gpus_of_a_model_are_leased_and_other_models_are() -> None:
    drive = site(gpus_of={"H100": 3})
    for number in range(5):
        drive.submit(f"h{number}", gpu={"model": "H100"})
        drive.submit(f"l{number}", gpu={"model": "L4"})
    drive.submit("other", tenant="u", gpu={"model": "H100"})
    drive.settle()
    assert (has(drive), has(drive, "u")) == ({"h": 3, "l": 4}, {"h": 1})
    told = drive.explained("h4")
    assert (told["reason"], told["because"]) == ("limit", "tenant t has 3 of 3 GPUs of H100 leased, and this needs 1")
    assert told["limit"]["gpus_of"] == {"H100": 3}
    assert drive.explained("l4")["reason"] == "busy"
    assert drive.fixes("h4")[0]["command"] == "moorage admin limit --tenant t --gpus-of H100=5"
    drive.order("limit", gpus_of={"H100": 5})
    drive.settle()
    assert has(drive)["h"] == 5


def test_what_may_run_anywhere_goes_where_no_limit_keeps_it_out() -> None:
    drive = site(gpus_of={"H100": 2})
    for number in range(7):
        drive.submit(f"j{number}", gpu={})
    drive.settle()
    assert has(drive) == {"h": 2, "l": 4}
    told = drive.explained("j6")
    assert told["because"] == (
        "tenant t has 2 of 2 GPUs of H100 leased, and this needs 1; hosts without them have no room for it"
    )
    drive.run_out("l0")
    drive.settle()
    assert has(drive) == {"h": 2, "l": 1}


def test_a_sweep_stops_at_the_limit_in_one_record_too() -> None:
    drive = site(gpus_of={"H100": 3})
    drive.submit("sweep", replicas=20, gpu={"model": ["H100", "L4"]})
    drive.settle()
    assert has(drive) == {"h": 3, "l": 4}
    drive.run_out("h0")
    drive.run_out("h1")
    drive.settle()
    assert has(drive) == {"h": 3, "l": 4}


@pytest.mark.parametrize("is_open", [False, True])
def test_a_gang_counts_as_if_all_of_it_came_on_the_model(is_open: bool) -> None:
    drive = site(gpus_of={"H100": 8 if is_open else 5})
    drive.submit("g", gpu={"scheduling": "gang", "count": 2}, replicas=3)
    drive.settle()
    assert has(drive).total() == 6 * is_open
    assert drive.states("g") == (["RUNNING"] * 3 if is_open else ["QUEUED"] * 3)


def test_groups_of_a_gang_count_together() -> None:
    drive = site(gpus_of={"H100": 4})
    groups = [
        {"name": "a", "replicas": 1, "gpu": {"model": "H100", "count": 3}},
        {"name": "b", "replicas": 2, "gpu": {"model": "H100"}},
    ]
    drive.submit("g", gpu=None, groups=groups)
    drive.settle()
    assert drive.explained("g")["reason"] == "limit"
    drive.order("limit", gpus_of={"H100": 5})
    drive.settle()
    assert has(drive) == {"h": 5}


def test_a_job_that_needs_more_than_is_left_of_a_model_is_not_passed_for_ever() -> None:
    drive = site(gpus_of={"H100": 4})
    drive.submit("first", gpu={"model": "H100", "count": 2}, run={"driver": "noop", "timeout_s": 600})
    drive.submit("big", gpu={"model": "H100", "count": 4})
    drive.submit("small", gpu={"model": "H100"})
    drive.submit("else", gpu={"model": "L4"})
    drive.settle()
    assert [drive.states(job)[0] for job in ("first", "big", "small", "else")] == [
        "RUNNING", "QUEUED", "QUEUED", "RUNNING",
    ]  # fmt: skip
    assert "job big, which goes first, needs 4" in drive.explained("small")["because"]
    drive.run_out(drive.attempt("first").worker.id)
    drive.settle()
    assert (drive.states("big"), drive.states("small")) == (["RUNNING"], ["QUEUED"])


def test_a_running_service_of_the_tenant_lets_later_ones_pass_a_job_that_may_never_start() -> None:
    drive = site(gpus_of={"H100": 4})
    drive.submit("endless", gpu={"model": "H100"})
    drive.submit("big", gpu={"model": "H100", "count": 4})
    drive.submit("small", gpu={"model": "H100"})
    drive.settle()
    assert [drive.states(job)[0] for job in ("big", "small")] == ["QUEUED", "RUNNING"]


def test_what_could_never_start_is_refused_with_its_field() -> None:
    drive = site(gpus_of={"H100": 2})
    refused = drive.submit("j", gpu={"model": "H100", "count": 3})
    assert (refused["code"], refused["field"]) == ("failed-precondition", "$.gpu.count"), refused
    assert drive.submit("any", gpu={"count": 3})["kind"] == "accepted"
    drive.settle()
    assert has(drive) == {"l": 3}


def test_limits_of_models_are_set_one_by_one_outlast_a_leader_and_are_removed() -> None:
    drive = site(gpus_of={"H100": 2})
    assert drive.order("limit", gpus_of={"L4": 1})["limit"]["gpus_of"] == {"H100": 2, "L4": 1}
    for number in range(6):
        drive.submit(f"j{number}", gpu={})
    drive.settle()
    drive.lead_from_snapshot()
    drive.renew()
    drive.settle()
    assert has(drive) == {"h": 2, "l": 1}
    assert drive.order("limit", gpus_of={"H100": 0})["limit"]["gpus_of"] == {"L4": 1}
    drive.settle()
    assert has(drive) == {"h": 5, "l": 1}
    drive.order("limit", gpus_of=None)
    assert drive.state.tenants["t"].limit is None


def test_another_devices_model_in_a_slot_counts_from_the_next_placement() -> None:
    drive = site(gpus_of={"H100": 1})
    drive.submit("j", gpu={"model": "L4"})
    drive.settle()
    worker = drive.workers["l0"]
    worker.hello.gpu_pool[:] = drive.workers["h0"].hello.gpu_pool
    drive.join(worker)
    drive.submit("k", gpu={"model": "H100"})
    drive.settle()
    assert drive.states("k") == ["RUNNING"], "job j has an L4, whatever is in its slot by now"


@pytest.mark.parametrize("bad", [{}, {"": 1}, {"=": 1}, {"H100": -1}, {"H100": 10**7}, {f"m{n}": 1 for n in range(33)}])
def test_odd_limits_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(Refused, match="gpus_of"):
        site(gpus_of=bad)


def test_gpus_of_a_model_count_in_a_budget_by_its_weight() -> None:
    drive = site(gpu_hours=100, period="month", gpu_weights={"L4": 0.25, "NVIDIA H100": 2})
    drive.submit("l", gpu={"model": "L4", "count": 4})
    drive.settle()
    drive.pass_time(3_600_000, step=60_000)
    drive.submit("h", gpu={"model": "H100", "count": 2})
    drive.settle()
    drive.pass_time(3_600_000, step=60_000)
    drive.lead_from_snapshot()
    drive.renew()
    limit = drive.order("limit", gpu_weights={"L4": 0})["limit"]
    assert limit["spent_hours"] == pytest.approx(4 * 0.25 * 2 + 2 * 2, abs=0.1)
    assert limit["gpu_weights"] == {"NVIDIA H100": 2}
    drive.pass_time(3_600_000, step=60_000)
    drive.run_out("l0")
    drive.run_out("h0")
    drive.run_out("h1")
    drive.pass_time(3_600_000, step=60_000)
    limit = drive.order("limit", gpu_weights=None)["limit"]
    assert limit["spent_hours"] == pytest.approx(6 + 4 + 2 * 2, abs=0.1), "what was spent stays"
    assert "gpu_weights" not in limit


def test_of_patterns_that_match_a_model_the_longest_weighs() -> None:
    drive = site(gpu_hours=100, gpu_weights={"NVIDIA": 9, "NVIDIA L4": 0.5, "L4": 7})
    drive.submit("l", gpu={"model": "L4"})
    drive.settle()
    drive.pass_time(3_600_000, step=60_000)
    assert drive.order("limit", jobs=9)["limit"]["spent_hours"] == pytest.approx(0.5, abs=0.05)
