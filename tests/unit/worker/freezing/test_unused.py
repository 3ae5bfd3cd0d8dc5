"""Which jobs are frozen for want of use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.job import QOS, Qos
from moorage.worker.devices.readers.base import SlotReading
from moorage.worker.freezing.unused import UnusedJobs
from moorage.worker.settings import settings_from
from tests.system.worker.sharing.test_usage_meter import NAME, held

STILL = SlotReading(util_percent=0, memory_used_mib=5000)


def unused(after_s: dict[Qos, int], wakes: bool = True, **wrong: Any) -> UnusedJobs:
    return UnusedJobs(held(**wrong), lambda qos: after_s.get(qos, 0), lambda attempt: wakes)


def due(jobs: UnusedJobs, *times_s: float) -> list[Any]:
    return [found and found.items for found in (jobs.read([STILL], time_s) for time_s in times_s)]


def test_fact_60_a_job_without_use_for_so_long_is_frozen_once() -> None:
    assert due(unused({"medium": 30}), 1000, 1029, 1030, 1031, 1100) == [None, None, [(NAME, 30)], None, None]


def test_after_its_resume_the_time_without_use_begins_anew() -> None:
    attempts = held()
    jobs = UnusedJobs(attempts, lambda qos: 30, lambda attempt: True)
    assert due(jobs, 1000, 1030) == [None, [(NAME, 30)]]
    attempts[NAME].frozen = True
    assert due(jobs, 1040, 1100) == [None, None], "frozen time does not count"
    attempts[NAME].frozen = False
    assert due(jobs, 1101, 1130, 1131) == [None, None, [(NAME, 30)]]


def test_a_freeze_and_a_resume_between_two_readings_count_as_well() -> None:
    attempts = held()
    jobs = UnusedJobs(attempts, lambda qos: 30, lambda attempt: True)
    assert due(jobs, 1000, 1030) == [None, [(NAME, 30)]]
    attempts[NAME].freezes = 1
    assert due(jobs, 1031, 1060, 1061) == [None, None, [(NAME, 30)]]


def test_a_job_that_could_not_be_frozen_is_not_asked_again_until_it_was_used() -> None:
    attempts = held()
    jobs = UnusedJobs(attempts, lambda qos: 30, lambda attempt: True)
    assert due(jobs, 1000, 1030) == [None, [(NAME, 30)]]
    attempts[NAME].freezing = True
    assert due(jobs, 1031) == [None]
    attempts[NAME].freezing = False
    assert due(jobs, 1032, 1100) == [None, None]
    assert jobs.read([SlotReading(util_percent=5, memory_used_mib=5000)], 1101) is None
    assert due(jobs, 1102, 1132) == [None, [(NAME, 30)]]


def test_the_lowest_quality_of_service_is_frozen_first() -> None:
    attempts = {}
    for name, qos in (("a", "high"), ("b", "low"), ("c", "medium"), ("d", "critical")):
        (attempt,) = held().values()
        attempt.request = msgspec.structs.replace(attempt.request, qos=qos)
        attempts[("acme", name, 0, 1, 10)] = attempt
    jobs = UnusedJobs(attempts, lambda qos: 0 if qos == "critical" else 30, lambda attempt: True)
    assert jobs.read([STILL], 1000) is None
    found = jobs.read([STILL], 1030)
    assert found is not None
    assert [name[1] for name, _ in found.items] == ["b", "c", "a"]


@pytest.mark.parametrize("wrong", [{"mode": "time-slice"}, {"phase": "ending"}])
def test_a_job_that_shares_or_that_nothing_would_resume_is_not_frozen(wrong: dict[str, Any]) -> None:
    assert due(unused({"medium": 1}, **wrong), 10, 20) == [None, None]
    assert due(unused({"medium": 1}, wakes=False), 10, 20) == [None, None]


def test_fact_60_only_where_the_settings_say_so_and_after_five_minutes(tmp_path: Path) -> None:
    words = {"state_dir": str(tmp_path), "limiter": True}
    off, on = settings_from(words), settings_from(words | {"auto_freeze": True})
    own = settings_from(words | {"auto_freeze": True, "auto_freeze_s": {"low": 60, "critical": 900, "high": 0}})
    assert [off.freezes_after_s(qos) for qos in QOS] == [0, 0, 0, 0]
    assert [on.freezes_after_s(qos) for qos in QOS] == [300, 300, 300, 0]
    assert [own.freezes_after_s(qos) for qos in QOS] == [60, 300, 0, 900]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"auto_freeze": True}, "auto_freeze needs limiter = true"),
        ({"auto_freeze_s": {"High": 1}}, "auto_freeze_s must name low, medium, high, critical, found 'High'"),
        ({"auto_freeze_s": {"low": -1}}, "auto_freeze_s must be 0"),
    ],
)
def test_settings_that_would_leave_a_job_frozen_are_refused(tmp_path: Path, words: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        settings_from({"state_dir": str(tmp_path), **words})
