"""How many replicas wait for which reason, for monitors."""

from __future__ import annotations

import pytest

from moorage.scheduler.core.queries import waiting
from tests.scheduler.fleet.test_slot_modes import fleet


def test_waiting_replicas_are_counted_by_the_reason_of_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = fleet(w0=("", ""))
    assert waiting.waiting_by_reason(drive.engine) == {}
    drive.submit("runs", gpu={"count": 2})
    drive.submit("many", gpu={"count": 1}, replicas=3)
    drive.submit("large", gpu={"count": 64})
    drive.settle()
    told = waiting.waiting_by_reason(drive.engine)
    assert told == {drive.explained("many")["reason"]: 3, drive.explained("large")["reason"]: 1}
    monkeypatch.setattr(waiting, "LOOKED_MAX", 0)
    assert waiting.waiting_by_reason(drive.engine) == {drive.explained("many")["reason"]: 3, waiting.OTHERS: 1}
