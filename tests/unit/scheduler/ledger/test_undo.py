"""A record that cannot be folded leaves nothing behind: real records, and each of them spoiled in one number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from moorage.scheduler.core import engine
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Cancel
from moorage.scheduler.core.ledger import acts, fairshare
from moorage.scheduler.core.ledger.fold import begin, fold
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.record import Record, decode_record
from moorage.scheduler.core.ledger.records import BY_WORKER, STEP_WIDTH, Op
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.core.ledger.state import FAILED, FREEZE, SUCCEEDED, Attempt, Replica, State
from moorage.scheduler.core.ledger.undo import Undo
from moorage.schemas.frames import ReportKind
from moorage.schemas.job import STATES
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.ledger.test_acts import written
from tests.unit.scheduler.picture import picture


def driven() -> list[bytes]:
    """Jobs, a gang, retries, cancels, a limit, a drain, refusals and a lost worker."""
    drive = Driving.with_hosts(2, 2, 2)
    drive.worker("slow", 1, model="slow", auto=False)
    for number in range(8):
        drive.submit(f"j{number}", gpu={}, retries=1)
    drive.submit("gang", replicas=2, gpu={"scheduling": "gang"})
    drive.submit("s", gpu={"model": "slow"})
    for report in (("claimed", 0, ""), ("started", 0, ""), ("exited", 1, "exit")):
        if drive.replica("s").attempt is not None:
            drive.reports([(report[0], "s", 0, report[1], report[2])])
    drive.settle()
    drive.order("limit", gpus=3)
    drive.cancel("j1")
    drive.cancel("never came", before=True)
    drive.run_out("w1", code=1)
    drive.operate("drain", "w0")
    drive.order("hold", job="j7")
    drive.pass_time(5_000)
    drive.pass_time(drive.config.lost_ms + 5_000, renew=False)
    return drive.records


def spoiled(record: Record, rng: random.Random) -> Record:
    """The record with one number of it changed."""
    fields = [name for name in ("steps", "reports") if getattr(record, name)]
    name = rng.choice(fields)
    flat = list(getattr(record, name))
    at = rng.randrange(len(flat))
    flat[at] = rng.choice([flat[at] + 1, flat[at] - 1, 0, 1, 3, 7, 15, 16, 10**6, -1, rng.randrange(40)])
    if rng.random() < 0.2 and name == "steps":
        at -= at % 6
        flat[at : at + 6] = [] if rng.random() < 0.5 else flat[at : at + 6] * 2
    return msgspec.structs.replace(record, **{name: flat})


def copied(state: State, record: Record) -> Undo:
    """What taking back needs, copied before all of the record; a leader copies it before each change."""
    undo = Undo(state, record.time)
    for act in record.acts:
        undo.act(act)
    for name, _ in record.accepts:
        undo.tenant(name)
    for at in range(0, len(record.steps), STEP_WIDTH):
        undo.step(*record.steps[at : at + 4])
    for num in record.reports[::2]:
        undo.worker(num)
    return undo


def undone(state: State, record: Record) -> bool:
    """Begin to fold a record and take it back; return whether it could be folded."""
    before, undo = picture(state), copied(state, record)
    try:
        begin(state, record, state.seq + 1)
    except FoldError:
        folds = False
    else:
        folds = True
    undo.back()
    assert picture(state) == before, record
    return folds


@pytest.mark.parametrize("records", [driven, lambda: written()[1]], ids=["driven", "every act"])
def test_a_record_that_was_taken_back_leaves_the_state_as_it_was(records: Callable[[], list[bytes]]) -> None:
    rng, state, spoils, caught = random.Random(7), State(), 0, 0
    for seq, payload in enumerate(records(), 1):
        record = decode_record(payload)
        assert undone(state, record)
        for _ in range(10 if record.steps or record.reports else 0):
            spoils += 1
            caught += not undone(state, spoiled(record, rng))
        last = [*record.steps, Op.BACKOFF, 10**6, 0, 0, 0, 0]
        assert not undone(state, msgspec.structs.replace(record, steps=last)), "it fails behind all else"
        fold(state, record, seq)
        assert state.digest == state.full_digest()
    assert spoils > 100
    assert caught > 20


def test_a_tenants_tables_are_copied_once_however_many_acts_name_it() -> None:
    state = State()
    state.schedules["t"] = {f"s{n}": Schedule("t", f"s{n}", "* * * * *", "UTC", "skip", b"", "") for n in range(8)}
    state.tenant("t").tombstones = {f"j{number}": -1 for number in range(100)}
    named: list[Any] = [acts.Untomb("t", f"j{number}") for number in range(8)]
    named += [acts.Ran("t", f"s{number}", 1, "", 0) for number in range(8)]
    record = Record(1, 0, 7, 0, 1, state.digest, acts=named)
    whole = [rows for _, _, rows in copied(state, record)._tables if isinstance(rows, dict)]
    assert sum(map(len, whole)) == 108
    kept = list(state.tenants["t"].tombstones)
    assert undone(state, record)
    assert list(state.tenants["t"].tombstones) == kept, "in order of the last cancel"


def test_a_record_that_fails_before_it_is_whole_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is folded as it is decided: reports, a lost worker, a gang, orders, cancels, new jobs, placements."""
    drive = Driving.with_hosts(2, 2)
    for number in range(5):
        drive.submit(f"j{number}", gpu={}, retries=1, priority=50)
    drive.submit("several", replicas=3, max_running=1)
    drive.settle()
    exits: tuple[tuple[ReportKind, str, int], ...] = (
        ("exited", "j0", 1),
        ("exited", "j1", 0),
        ("exited", "several", 0),
    )
    drive.reports([*((kind, job, 0, code, "exit") for kind, job, code in exits), ("freed", "j1", 0, 0, "")], tick=False)
    drive.offer_submit("gang", replicas=2, gpu={"scheduling": "gang"}, priority=90)
    drive.offer_submit("new", gpu={})
    drive.engine.offer(Cancel("t", "j4", "tenant:t"))
    before = picture(drive.state)

    def fails(record: Record) -> bytes:
        assert len(record.steps) > 6 * STEP_WIDTH
        raise RuntimeError("no room")

    monkeypatch.setattr(engine, "encode_record", fails)
    with pytest.raises(RuntimeError, match="no room"):
        drive.engine.build(drive.now + 1, drive.now + 1)
    assert picture(drive.state) == before


def test_a_record_that_fails_as_it_begins_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving()
    drive.order("share", weight=2)
    before = picture(drive.state)

    def fails(state: State) -> bool:
        raise RuntimeError("no usage")

    monkeypatch.setattr(fairshare, "advance", fails)
    with pytest.raises(RuntimeError, match="no usage"):
        drive.engine.build(drive.now + 1, drive.now + 1)
    assert picture(drive.state) == before


def test_a_job_has_the_state_that_it_has_and_not_one_that_was_taken_back() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", replicas=2, gpu={})
    kinds: tuple[ReportKind, ...] = ("claimed", "started")
    drive.reports([(kind, "j", index, 0, "") for index in range(2) for kind in kinds])
    job = drive.job("j")
    for to in (FAILED, SUCCEEDED):
        draft = Draft(drive.state, drive.now)
        draft.begin()
        draft.pass_time()
        for replica in list(job.rows.values()):
            draft.exit(replica, to, 0, "")
        assert job.state == STATES[to]
        draft.take_back()


def test_the_ranks_of_a_gang_and_the_jobs_in_memory_keep_their_order() -> None:
    """The first rank counts the retries of a gang."""
    drive = Driving.with_hosts(3)
    for name in ("first", "second"):
        drive.submit(name, gpu={})
        drive.settle()
        drive.run_out("w0")
    drive.submit("gang", replicas=3, gpu={"scheduling": "gang"})
    drive.settle()
    gang, before = drive.job("gang"), picture(drive.state)
    draft = Draft(drive.state, drive.now)
    draft.begin()
    draft.pass_time()
    for replica in list(gang.rows.values()):
        draft.exit(replica, FAILED, 1, "")
    draft.add(acts.Compact([drive.job("first").num, b"", drive.job("second").num, b""]))
    draft.take_back()
    assert list(gang.rows) == [0, 1, 2]
    assert list(drive.state.tenants["t"].jobs) == ["first", "second", "gang"]
    assert picture(drive.state) == before


def test_what_a_worker_says_of_one_replica_copies_that_one_alone() -> None:
    drive = Driving.with_hosts(8)
    drive.submit("sweep", replicas=8, gpu={})
    drive.settle()
    of_one = acts.Freeze(drive.job("sweep").num, 3, FREEZE, BY_WORKER, "")
    undo = Undo(drive.state, drive.now)
    undo.act(of_one)
    assert [row for row in undo._rows if isinstance(row, Attempt)] == [drive.attempt("sweep", 3)]
    undo.act(msgspec.structs.replace(of_one, replica=-1))
    assert len([row for row in undo._rows if isinstance(row, Attempt)]) == 8


def test_a_record_about_one_replica_of_a_sweep_copies_no_row_of_the_others() -> None:
    drive = Driving.with_hosts(8)
    drive.submit("sweep", replicas=8, gpu={})
    drive.settle()
    sweep, before = drive.job("sweep"), picture(drive.state)
    first, third = sweep.rows[0], sweep.rows[3]
    draft = Draft(drive.state, drive.now)
    draft.begin()
    draft.pass_time()
    draft.exit(third, FAILED, 1, "")
    copies = [rows for _, _, rows in draft._undo._tables if isinstance(rows, dict)]
    assert not any(isinstance(row, Replica) for rows in copies for row in rows.values())
    assert [row for row in draft._undo._rows if isinstance(row, Replica)] == [third]
    draft.exit(first, FAILED, 1, "")
    draft.take_back()
    assert list(sweep.rows) == list(range(8))
    assert picture(drive.state) == before
