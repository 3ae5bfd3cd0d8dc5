"""A record is folded before it is stored: what leaves then is the same as if it were folded once it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.scheduler.answers.view import View
from moorage.scheduler.core.engine import Displaced
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.ledger.recording import RecordedEngine, Recorder, replay
from tests.unit.scheduler.driving import SUBJECTS, Driving


def with_a_record(ahead_ms: int) -> Driving:
    """A leader with a record in flight: a renewal, and a new job with a place; folded ahead unless that is 0."""
    drive = Driving()
    worker = drive.worker("w0", 2)
    drive.settle()
    drive.send("w0", worker.renew_frame())
    drive.offer_submit("a", gpu={}, deadline_s=60.0)
    drive.store(drive.engine.build(drive.now + 1, drive.now + 1, folds=bool(ahead_ms)))
    drive.engine.prepare_outputs(drive.now + ahead_ms)  # of one that is not folded it makes none
    return drive


def test_a_record_folded_ahead_says_what_one_folded_behind_says() -> None:
    ahead, behind = with_a_record(2), with_a_record(0)
    outs = [drive.engine.commit(len(drive.records), drive.now + 900) for drive in (ahead, behind)]
    assert outs[0].messages
    for of in ("messages", "answers", "events", "fleet"):
        assert getattr(outs[0], of) == getattr(outs[1], of)
    assert ahead.state.digest == behind.state.digest == ahead.shadow.digest
    for drive in (ahead, behind):
        assert drive.engine.fleet.hosts[0].last_ms == drive.now + 900, "a lease is counted from the acknowledgement"
        drive.engine.prepare_outputs(drive.now)  # late: no record is in flight
        drive.tick()


@pytest.mark.parametrize("folds", [True, False])
@pytest.mark.parametrize("place", [1, 3])
def test_a_question_beside_a_record_in_flight_takes_nothing_from_the_queue(folds: bool, place: int) -> None:
    """The queue has what the record says. So has the state, though the record may be stored in another place."""
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", replicas=2, gpu={}, retries=1)
    drive.reports([(kind, "j", index, 1, "") for index in range(2) for kind in ("claimed", "started", "exited")])
    drive.submit("before", gpu={}, priority=90)
    back_ms = min(row.not_before for row in drive.job("j").rows.values())
    drive.now = back_ms
    drive.offer_submit("new", gpu={})
    payload = drive.engine.build(drive.now, drive.now, folds=folds)
    assert View(drive.engine).place_of(drive.job("before"))[1] == 3
    assert drive.explained("j")["reason"] == "busy"
    if place == 1 or not folds:
        drive.shadow.seq += place - 1
        drive.records += [b""] * (place - 1)
        drive.engine.commit(drive.store(payload), drive.now)
        drive.check()


def test_a_record_that_was_stored_elsewhere_says_nothing() -> None:
    drive = with_a_record(2)
    with pytest.raises(Displaced, match="stored as"):
        drive.engine.commit(len(drive.records) + 1, drive.now + 3)


class Recorded(Driving):
    """Each of its terms is written to a recording."""

    checks = False

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        super().__init__()

    def make_engine(self, state: State) -> RecordedEngine:
        return RecordedEngine(self.recorder, state, self.config, SUBJECTS, 7 + state.epoch, self.now, None)


def test_a_recording_is_replayed_past_a_record_that_was_stored_elsewhere(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recording")
    drive = Recorded(recorder)
    drive.worker("w0", 2)
    drive.settle()
    drive.offer_submit("a", gpu={})
    drive.store(drive.engine.build(drive.now + 1, drive.now + 1))
    drive.engine.prepare_outputs(drive.now + 2)
    elsewhere = len(drive.records) + 1
    with pytest.raises(Displaced):
        drive.engine.commit(elsewhere, drive.now + 3)
    drive.lead()
    drive.settle()
    recorder.close()
    replayed = [(one.seq, one.same, one.record.epoch) for one in replay(tmp_path / "recording")]
    at = replayed.index((elsewhere, True, 1))
    assert {epoch for _, _, epoch in replayed[: at + 1]} == {1}
    assert {(same, epoch) for _, same, epoch in replayed[at + 1 :]} == {(True, 2)}
