"""From the next feature level on the ledger tells by which settings its leader decides, and a trace has them."""

from __future__ import annotations

import msgspec
import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.acts import Settings
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.ledger.trace_events import TraceEvents
from moorage.schemas.release import RELEASE
from moorage.testing.simulate.from_ledger import TraceWriter
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving


def told(drive: Driving) -> list[Settings]:
    return [act for payload in drive.records for act in decode_record(payload).acts if isinstance(act, Settings)]


def test_settings_are_told_once_as_the_level_is_raised_and_in_a_term_that_has_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    know_next(monkeypatch)
    drive = Driving(Config(reserve_after=60.0, reclaim=True, tflops_file="/tmp/x"))
    drive.worker("w0", 1)
    drive.settle()
    assert told(drive) == []
    raise_level(drive)
    drive.pass_time(5_000)
    wanted = Settings(RELEASE, {"reclaim": "true", "reserve_after": "60.0"})
    assert told(drive) == [wanted]
    assert drive.shadow.settings == (RELEASE, (("reclaim", "true"), ("reserve_after", "60.0")))
    drive.lead()
    drive.pass_time(5_000)
    assert told(drive) == [wanted], "the next leader has the same"
    head = msgspec.json.decode(next(TraceWriter(TraceEvents(drive.shadow).base()).lines()))
    assert (head["release"], head["settings"]) == (RELEASE, dict(wanted.values))


def test_below_the_level_nothing_is_told() -> None:
    drive = Driving(Config(reserve_after=60.0))
    drive.worker("w0", 1)
    drive.pass_time(5_000)
    assert told(drive) == []
    assert "settings" not in msgspec.json.decode(next(TraceWriter(TraceEvents(drive.shadow).base()).lines()))


def test_only_what_is_not_the_default_is_told() -> None:
    assert Config().told == ()
    assert Config(ageing=0.5, jobs_max=7).told == (("ageing", "0.5"), ("jobs_max", "7"))
