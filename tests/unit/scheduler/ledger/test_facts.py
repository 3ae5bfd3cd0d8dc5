"""The facts of attempts: soft at feature level 1, found once after a snapshot of it, lasting from level 2 on."""

from __future__ import annotations

import ast
import base64
import json
from pathlib import Path
from typing import Final

import pytest

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger import fold as fold_module
from moorage.scheduler.core.ledger.acts.ledger import Level
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.follower.usage import Usage
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.scheduler.ledger.invariants import validate
from tests.levels import NEXT, know_next, raise_level
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.faulty_world import FaultyWorld

CORE: Final = Path(fold_module.__file__).parents[1]
FILE: Final = Path(__file__).parents[1].joinpath("level_1.jsonl")

READY = {"driver": "process", "argv": ["serve"], "ready": {"file": "ok"}}


def facts_of(state: State) -> dict[object, tuple[int, bool]]:
    return {attempt.name: (attempt.began_ms, attempt.ever_ready) for attempt in state.attempts()}


#: what lasts from the next level on, and no history has: which checkpoints attempts have stored, what they had at most,
#: where they did well and where they failed within seconds
IN_NO_HISTORY: Final = {
    "stored", "untold", "saved", "peaks", "reported", "promised", "sets", "begun", "well_on", "failed_on", "quick",
    "well_ms",
}  # fmt: skip


def every_fact(state: State) -> list[tuple[object, ...]]:
    """All that lasts from the next level on and that histories have, of all rows."""
    found: list[tuple[object, ...]] = []
    for row in state.rows():
        fields = getattr(row.LASTING, "later", {}).get(NEXT, {})
        found.append((type(row).__name__, *(getattr(row, name) for name in fields if name not in IN_NO_HISTORY)))
    return found


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


def test_a_ledger_of_before_is_folded_led_on_raised_and_folded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`level_1.jsonl` was written by code that knows no facts: a snapshot of its middle, and all of its records."""
    head, *lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    drive = Driving(FaultyWorld(14).drive.config)
    drive.records = [base64.b64decode(line) for line in lines]
    drive.shadow = State()
    for seq, payload in enumerate(drive.records, 1):
        fold(drive.shadow, decode_record(payload), seq)
    drive.usage = Usage(drive.shadow)
    assert drive.shadow.digest == head["digest"]
    middle = snapshots.load(base64.b64decode(head["snapshot"]))
    assert middle.seq == head["at"]
    for seq, payload in enumerate(drive.records[middle.seq :], middle.seq + 1):
        fold(middle, decode_record(payload), seq)
    assert middle.digest == head["digest"]

    drive.now = drive.shadow.time_ms + 1_000
    drive.lead()
    drive.worker("new", 2)
    drive.submit("led-on", gpu={}, run=READY)
    assert drive.state.level == 1
    for seq, payload in enumerate(drive.records[middle.seq :], middle.seq + 1):
        fold(middle, decode_record(payload), seq)
    know_next(monkeypatch)
    at = len(drive.records)
    raise_level(drive)
    drive.pass_time(5_000)
    for seq, payload in enumerate(drive.records[at:], at + 1):
        fold(middle, decode_record(payload), seq)
    assert (middle.digest, middle.level) == (drive.state.digest, NEXT)
    assert every_fact(middle) == every_fact(drive.state)
    drive.lead()  # from the first record on
    drive.lead_from_snapshot()
    validate(drive.state)


def test_what_is_found_in_a_history_is_what_was_folded() -> None:
    drive = serving()
    drive.submit("sweep", replicas=4)
    drive.reports([("exited", "a", 1, 1, "exit"), ("freed", "a", 1, 0, "")])
    for index in range(2):
        drive.reports([(kind, "sweep", index, 0, "") for kind in ("claimed", "started")])
        drive.now += 5_000
        drive.reports([("exited", "sweep", index, index, "exit"), ("freed", "sweep", index, 0, "")])
    assert (drive.job("sweep").ran, drive.job("sweep").left_ms > 0) == ((5_001, 5_001), True)
    assert every_fact(snapshots.load(snapshots.dump(drive.state))) == every_fact(drive.state)


def test_the_history_is_for_answers_alone() -> None:
    """Who reads it in the core: the fold that writes it, what is found in it once, and what is told of it."""
    readers = {
        file.relative_to(CORE).as_posix()
        for file in CORE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "history" and not isinstance(node.ctx, ast.Store)
        if getattr(node.value, "id", getattr(node.value, "attr", "")) != "ceilings"
    }
    assert readers == {
        "ledger/facts.py", "ledger/folding.py", "ledger/state.py", "ledger/undo.py",
        "lifecycle/forgetting.py",  # a worker that an answer would name stays known
        "outputs/outputs.py",
    }  # fmt: skip
