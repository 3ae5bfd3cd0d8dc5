"""What happened to the fleet, as a follower of the ledger keeps it: the events that the leader told, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.events import Order
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.follower import fleet_past
from moorage.scheduler.follower.fleet_past import FleetPast
from moorage.schemas.errors import Problem
from moorage.schemas.frames import FleetEvent, Goodbye, Unwell
from moorage.schemas.operate import act_of
from tests.unit.scheduler.driving import Driving


def past_of(drive: Driving) -> FleetPast:
    """What one knows that had to begin again halfway from its save."""
    state, made = State(), FleetPast()
    for seq, payload in enumerate(drive.records, 1):
        record = decode_record(payload)
        made.fold(state, record, fold(state, record, seq))
        if seq == len(drive.records) // 2:
            made = FleetPast.load(made.dump())
    return made


def asked(drive: Driving, **arguments: Any) -> dict[str, Any]:
    answer = past_of(drive).answer(arguments, drive.state.time_ms)
    assert not isinstance(answer, Problem)
    return answer


def order(drive: Driving, verb: str, **words: Any) -> None:
    drive.engine.offer(Order(verb, act_of(verb, {"by": "me", **words}), "r", True, {"me": 9}, "ana"))
    drive.tick()
    assert "code" not in drive.answers["r"], drive.answers["r"]


def lived() -> Driving:
    """A fleet with a join, a cordon, a GPU that goes out, a second leader and a goodbye, an hour before the last."""
    drive = Driving()
    worker = drive.worker("w0", 4)
    drive.settle()
    order(drive, "cordon", worker="w0", why="look")
    worker.unwell = [Unwell(1, "xid", "Xid 79", False)]
    drive.send("w0", worker.renew_frame())
    drive.tick()
    drive.lead()
    drive.renew()
    drive.pass_time(3_600_000, step=10_000)
    drive.send("w0", Goodbye(worker.session))
    drive.tick()
    return drive


def test_each_event_is_kept_with_its_time_over_a_save_and_a_new_leader() -> None:
    drive = lived()
    told = asked(drive)
    assert [event["what"] for event in told["events"]] == [
        "leading", "joined", "cordoned", "gpu-out", "leading", "left",
    ]  # fmt: skip
    _, _, cordoned, out, _, left = told["events"]
    assert (cordoned["worker"], cordoned["by"], cordoned["why"]) == ("w0", "operator:ana", "look")
    assert "Xid 79" in out["why"]
    assert "jobs" not in left, "no record tells it"
    assert left["time_ms"] - out["time_ms"] >= 3_600_000
    assert told["left_out"] == 0


def test_a_question_reaches_as_far_back_as_it_asks() -> None:
    drive = lived()
    assert [event["what"] for event in asked(drive, since_s=60)["events"]] == ["left"]
    for wrong in ("1h", -1, True):
        answer = past_of(drive).answer({"since_s": wrong}, 0)
        assert isinstance(answer, Problem)
        assert answer.code == "invalid-argument"


def test_the_newest_are_told_and_how_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_past, "ANSWERED_MAX", 2)
    told = asked(lived())
    assert [event["what"] for event in told["events"]] == ["leading", "left"]
    assert told["left_out"] == 4
    made = FleetPast([FleetEvent("lost", at, 1) for at in range(fleet_past.EVENTS_MAX + 5)])
    answer = made.answer({}, 10**9)
    assert not isinstance(answer, Problem)
    assert answer["from_ms"] == 5, "what was forgotten is said"
