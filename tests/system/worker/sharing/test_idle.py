"""Jobs and leases that show no use of their GPUs: warned, then ended where the operator says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.codec import encode
from moorage.schemas.frames import Place, Report
from moorage.worker.devices.readers.base import ProcessUse, SlotReading
from moorage.worker.sharing.idle_watch import Idle, IdleJobs, IdleWatch
from tests.nvidia.stub import Board
from tests.system.worker.sharing.test_memory_guard import GPU, OTHER, scene
from tests.system.worker.sharing.test_usage_meter import NAME, held
from tests.waiting import until

THIRD = "GPU-33333333-2222-3333-4444-555555555555"
STILL = SlotReading(util_percent=0, memory_used_mib=5000)
HOLDER = {"j": ("acme", (0, 1))}


def watched(*readings: tuple[float, SlotReading, SlotReading], warn_s: float = 60, **reclaim_s: int) -> list[Any]:
    """What is found at each of these readings of two devices."""
    watch = IdleWatch[str](warn_s, reclaim_s)
    return [watch.read(HOLDER, [first, second], now_s).get("j") for now_s, first, second in readings]


def still(*times_s: float) -> list[tuple[float, SlotReading, SlotReading]]:
    return [(time_s, STILL, STILL) for time_s in times_s]


def test_a_warning_comes_after_each_period_without_use() -> None:
    found = watched(*still(1000, 1059, 1060, 1061, 1119, 1120))
    assert found == [None, None, Idle(60, 0, False), None, None, Idle(120, 0, False)]


def test_an_end_comes_once_and_is_announced_with_the_warning() -> None:
    found = watched(*still(1000, 1060, 1090, 1091, 1150), acme=90)
    assert found == [None, Idle(60, 90, False), Idle(90, 90, True), None, None]


@pytest.mark.parametrize(
    ("rules", "ends_s"), [({"acme": 0, "*": 90}, 0), ({"other": 90}, 0), ({"*": 90}, 90), ({"acme": 70, "*": 90}, 70)]
)
def test_a_tenants_own_rule_goes_before_that_for_every_other(rules: dict[str, int], ends_s: int) -> None:
    watch = IdleWatch[str](60, rules)
    found = [watch.read(HOLDER, [STILL, STILL], now_s).get("j") for now_s in (1000.0, 1060.0)]
    assert found == [None, Idle(60, ends_s, False)]


@pytest.mark.parametrize(
    "reading",
    [
        SlotReading(util_percent=1, memory_used_mib=5000),
        SlotReading(util_percent=0, memory_used_mib=5000, peak_percent=3),
        SlotReading(util_percent=0, memory_used_mib=5000, used_by={7: ProcessUse(4000, 2)}),
        SlotReading(util_percent=0, memory_used_mib=5100),
        SlotReading(util_percent=None, memory_used_mib=5000),
        SlotReading(util_percent=0, memory_used_mib=5000, health="unresponsive"),
        SlotReading(health="unresponsive"),
    ],
    ids=[
        "it works",
        "it worked between",
        "a process worked",
        "its memory grows",
        "the board does not tell",
        "not to be trusted",
        "it does not answer",
    ],
)
def test_one_device_in_use_or_unknown_begins_the_time_anew(reading: SlotReading) -> None:
    found = watched(*still(1000, 1050), (1055, STILL, reading), *still(1070, 1114, 1130))
    assert found[:5] == [None] * 5
    assert found[5] == Idle(60, 0, False)


def test_of_the_time_between_two_readings_far_apart_nothing_is_known() -> None:
    assert watched(*still(1000, 1500, 1559, 1560))[:3] == [None, None, None]


def test_without_a_period_nothing_is_warned_of() -> None:
    assert watched(*still(1000, 1060, 1110), warn_s=0, acme=100) == [None, None, Idle(110, 100, True)]


@pytest.mark.parametrize("wrong", [{"mode": "time-slice"}, {"phase": "claimed"}, {"phase": "ending"}, {"slots": ()}])
def test_attempts_that_share_do_not_run_or_have_no_gpu_are_not_judged(wrong: dict[str, Any]) -> None:
    jobs = IdleJobs(held(**wrong), 1, {"*": 1})
    assert [jobs.read([STILL], now_s) for now_s in (10.0, 20.0)] == [None, None]


def test_an_attempt_that_runs_alone_is_judged() -> None:
    jobs = IdleJobs(held(), 5, {"*": 10})
    found = [jobs.read([STILL], now_s) for now_s in (10.0, 16.0, 20.0)]
    assert [each and each.items for each in found] == [None, [(NAME, 6, 10, False)], [(NAME, 10, 10, True)]]


@pytest.mark.slow
async def test_an_idle_job_is_warned_or_ended_by_its_tenants_rule_and_one_that_works_goes_on(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    boards = Board(GPU), Board(OTHER), Board(THIRD, more={"util": 5})
    rules: dict[str, Any] = {"idle_warn_s": 1.0, "idle_reclaim_s": {"strict": 1}}
    async with scene(nats_url, unique, tmp_path, *boards, **rules) as one:
        seat, session = one.leader.seat("w1"), one.agent.attempts.session
        await until(lambda: session.phase == "live", what="the answer to the join")
        body = encode({"gpu": {}, "run": {"argv": ["/bin/sleep", "600"], "grace_s": 30}})
        warned, ended, works = ((tenant, "j", 0, 1, 10) for tenant in ("acme", "strict", "busy"))
        for slot, name in enumerate((warned, ended, works)):
            await one.leader.want("w1", Place(*name, [slot], "exclusive", False, body))
        exited = await one.leader.await_report("w1", "exited", ended)
        assert exited.detail.startswith("idle: no use of its GPUs for "), exited
        await one.leader.await_report("w1", "freed", ended)
        report = await one.leader.await_report("w1", "idle", warned)
        assert (report.code >= 1, report.detail) == (True, "")
        one.stub.boards[0].set(errors={"util": 3})  # from now on the board does not tell
        before, looks = 0, 0

        def looked() -> bool:
            return one.stub.calls("nvmlDeviceGetUtilizationRates", GPU) > looks

        for wait in (2, 8):  # a reading that had begun is over; then more than a period passes
            looks = one.stub.calls("nvmlDeviceGetUtilizationRates", GPU) + wait
            await until(looked, what="further looks")
            before = before or reported(seat.reports)
        assert reported(seat.reports) == before, "what is not known counts as use"
        assert {report.tenant for report in seat.reports if report.kind in ("idle", "exited")} == {"acme", "strict"}


def reported(reports: list[Report]) -> int:
    return sum(report.kind == "idle" for report in reports)
