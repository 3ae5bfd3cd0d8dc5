"""Conditions about workers' labels: who passes them, and why a job waits for one that does."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers.waiting import explain_job
from moorage.schemas.where import condition, is_condition, version_of
from tests.unit.scheduler.driving import Driving, wire


@pytest.mark.parametrize(
    ("text", "passes", "fails"),
    [
        ("gpu.driver>=570", ["570", "570.86.10", "1000"], ["569.99", "57", "new", None, "570a"]),
        ("gpu.driver>570", ["570.1"], ["570", "570.0", None]),
        ("gpu.cuda<13.1", ["13.0", "12.9", "9"], ["13.1", "13.10", "", None]),
        ("gpu.cuda<=12.8", ["12.8", "12.8.0", "12"], ["12.10"]),
        ("zone!=b", ["a", "", "bb", None], ["b"]),
        ("zone!=", ["a", None], [""]),
    ],
)
def test_a_condition_compares_versions_or_words(text: str, passes: list[Any], fails: list[Any]) -> None:
    asked = condition(text)
    assert str(asked) == text
    assert [each for each in passes if not asked.holds(each)] == []
    assert [each for each in fails if asked.holds(each)] == []


def test_what_is_no_condition_is_a_label_with_a_value() -> None:
    assert not any(map(is_condition, ("zone=a", "zone=>a", "zone==!=b", "zone", "a b!=c", "!=b")))
    assert version_of("570.0.0") == version_of("570")


def three() -> Driving:
    drive = Driving()
    for name, zone, driver in ("w0", "a", "550.54"), ("w1", "b", "570.86"), ("w2", "b", "580.1"):
        drive.worker(name, 1, labels={"host.name": name, "zone": zone, "gpu.driver": driver})
    drive.worker("w3", 1, labels={"host.name": "w3"})
    return drive


def on(drive: Driving, job: str, **fields: Any) -> list[str]:
    """The workers that a sweep of four replicas runs on."""
    drive.submit(job, replicas=4, gpu={}, **fields)
    drive.settle()
    return sorted(attempt.worker.id for attempt in drive.state.job("t", job).attempts)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("where", "workers"),
    [
        (["gpu.driver>=570"], ["w1", "w2"]),
        (["gpu.driver>=570", "host.name!=w2"], ["w1"]),
        (["zone!=b"], ["w0", "w3"]),
        (["host.name!=w0", "host.name!=w3"], ["w1", "w2"]),
        (["gpu.driver<580"], ["w0", "w1"]),
        ([], ["w0", "w1", "w2", "w3"]),
    ],
)
def test_jobs_run_where_all_conditions_hold(where: list[str], workers: list[str]) -> None:
    assert on(three(), "j", where=where) == workers


def test_a_worker_that_joins_later_with_a_value_that_none_had_is_found() -> None:
    drive = three()
    drive.submit("j", gpu={}, where=["gpu.driver>=600"])
    told = wire(explain_job(drive.engine, "t", "j"))
    assert told["reason"] == "label"
    assert [fix["say"] for fix in told.get("fixes", [])] in ([], ["without gpu.driver>=600"])
    drive.worker("w4", 1, labels={"gpu.driver": "610.2"})
    drive.settle()
    assert [attempt.worker.id for attempt in drive.state.job("t", "j").attempts] == ["w4"]  # type: ignore[union-attr]


def test_a_request_that_no_worker_passes_is_refused_with_what_the_fleet_has() -> None:
    drive = three()
    answer = drive.submit("j", gpu={}, where=["gpu.driver>=600"], on_no_match="reject")
    said = str(answer)
    assert "gpu.driver>=600" in said
    assert "550.54" in said
