"""The facts of attempts: soft at feature level 1, found once after a snapshot of it, lasting from level 2 on."""

from __future__ import annotations

import pytest

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.acts.ledger import Level
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.scheduler.ledger.invariants import validate
from tests.levels import NEXT, know_next, raise_level
from tests.unit.scheduler.driving import Driving

READY = {"driver": "process", "argv": ["serve"], "ready": {"file": "ok"}}


def facts_of(state: State) -> dict[object, tuple[int, bool]]:
    return {attempt.name: (attempt.began_ms, attempt.ever_ready) for attempt in state.attempts()}


def serving() -> Driving:
    """Two replicas that began at different times, of which one was ready once."""
    drive = Driving()
    drive.worker("w0", 3, auto=False)
    drive.submit("a", replicas=2, gpu={}, run=READY)
    drive.now += 500
    drive.reports([("claimed", "a", 0, 0, ""), ("started", "a", 0, 0, "")])
    drive.now += 700
    drive.reports([("claimed", "a", 1, 0, ""), ("started", "a", 1, 0, "")])
    drive.reports([("ready", "a", 1, 0, "")])
    drive.reports([("not-ready", "a", 1, 0, "")])
    drive.submit("b", gpu={})
    return drive


def test_they_are_found_in_a_snapshot_of_level_1_as_they_were_folded() -> None:
    drive = serving()
    found = facts_of(drive.state)
    assert sorted(found.values()) == [(1_000_503, False), (1_001_204, True), (drive.now, False)]
    again = snapshots.load(snapshots.dump(drive.state))
    assert facts_of(again) == found == facts_of(drive.shadow)


def test_at_level_1_neither_digest_nor_snapshot_has_them() -> None:
    """An older standby, which knows nothing of them, folds the same records and checks the same digests."""
    drive = serving()
    before = snapshots.dump(drive.state)
    for state in (drive.state, drive.shadow):
        for attempt in state.attempts():
            attempt.began_ms, attempt.ever_ready = 7, True
    assert snapshots.dump(drive.state) == before
    drive.tick()
    drive.submit("c", gpu={})


def test_from_the_record_that_raises_the_level_on_they_last(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)
    drive = serving()
    found = facts_of(drive.state)
    standby = snapshots.load(snapshots.dump(drive.state))
    for attempt in standby.attempts():  # as one that began with less of the history
        attempt.began_ms, attempt.ever_ready = 0, False
    at = len(drive.records)
    raise_level(drive)
    validate(drive.state)
    for seq, payload in enumerate(drive.records[at:], at + 1):
        fold(standby, decode_record(payload), seq)
    assert facts_of(standby) == facts_of(drive.state) == found
    assert standby.digest == drive.state.digest
    next(iter(standby.attempts())).began_ms += 1
    assert standby.full_digest() != standby.digest

    drive.lead_from_snapshot()
    assert (facts_of(drive.state), drive.state.level) == (found, NEXT)
    drive.submit("c", gpu={})
    drive.lead()
    assert drive.state.digest == drive.shadow.digest


def test_a_raise_that_is_taken_back_has_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)
    drive = serving()
    for attempt in drive.state.attempts():
        attempt.began_ms, attempt.ever_ready = 7, True
    found, before = facts_of(drive.state), snapshots.dump(drive.state)
    draft = Draft(drive.state, drive.now)
    draft.begin()
    draft.add(Level(NEXT, "me", ""))
    assert facts_of(drive.state) != found
    draft.take_back()
    assert (facts_of(drive.state), snapshots.dump(drive.state)) == (found, before)
