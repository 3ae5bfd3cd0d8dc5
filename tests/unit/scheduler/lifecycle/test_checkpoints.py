"""Which checkpoint an attempt has stored is told to the next one by the ledger, or below its level by this leader."""

from __future__ import annotations

import pytest

from moorage.scheduler.core.ledger.acts import Stored
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import STORED_MAX
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.schemas.answers.jobs import CheckpointInfo
from moorage.schemas.frames import Report, ReportKind
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.fleet.test_capabilities import shown

RUN = {"driver": "process", "argv": ["train"], "checkpoint": "ck"}
DIGEST = "SHA-256=" + "x" * 43 + "="
OTHER = "SHA-256=" + "y" * 43 + "="


@pytest.fixture(autouse=True)
def _next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def running(*, level: bool = True) -> Driving:
    drive = Driving()
    drive.worker("w0", 1, auto=False)
    if level:
        raise_level(drive)
    drive.submit("a", gpu={}, run=RUN, retries=40, retries_on_lost=40)
    drive.pass_time(1_000)
    return drive


def placed(drive: Driving) -> tuple[int, list[tuple[int, str]], int | None]:
    """The number of the newest attempt, and what its placement says of those before it."""
    place = [place for frame in drive.wanted for place in frame.place][-1]
    return place.attempt, place.checkpoints, place.untold


def ends(
    drive: Driving, checkpoint: str | None, kind: ReportKind = "exited", detail: str = "exit", code: int = 3
) -> None:
    attempt, worker = drive.attempt("a", 0), drive.workers["w0"]
    name = ("t", "a", 0, attempt.no, attempt.fence)
    worker.gathered += [Report(kind, *name, code, detail, checkpoint=checkpoint), Report("freed", *name)]
    frame = worker.report_frame()
    assert frame is not None
    drive.send("w0", frame)
    worker.report_answered(frame.no)
    drive.tick()
    drive.pass_time(600_000, step=20_000)


def stored(drive: Driving) -> list[Stored]:
    return [act for record in map(decode_record, drive.records) for act in record.acts if isinstance(act, Stored)]


def test_the_next_attempt_is_told_which_checkpoint_its_worker_reported_also_by_the_next_leader() -> None:
    drive = running()
    assert placed(drive) == (1, [], 0)
    ends(drive, DIGEST)
    assert placed(drive) == (2, [(1, DIGEST)], 0)
    ends(drive, "")
    assert placed(drive) == (3, [(1, DIGEST), (2, "")], 0)
    assert [(act.attempt, act.digest) for act in stored(drive)] == [(1, DIGEST), (2, "")]
    drive.lead()
    drive.renew()
    ends(drive, DIGEST)
    assert placed(drive) == (4, [(1, DIGEST), (2, ""), (3, DIGEST)], 0)
    drive.lead_from_snapshot()
    drive.renew()
    ends(drive, "")
    assert placed(drive)[1:] == ([(1, DIGEST), (2, ""), (3, DIGEST), (4, "")], 0)


def test_of_what_an_earlier_release_ends_its_name_may_find_a_checkpoint_and_of_nothing_else() -> None:
    drive = running()
    ends(drive, None)
    assert placed(drive) == (2, [], 1)
    ends(drive, None, "refused", "no room")  # nothing of it ran
    assert placed(drive) == (3, [], 1)
    ends(drive, None, detail="start-failed: no such file")
    assert placed(drive) == (4, [(3, "")], 1)
    ends(drive, None, detail="lost")
    assert placed(drive) == (5, [(3, ""), (4, "")], 1)
    ends(drive, "x" * 10_000)  # no digest
    assert placed(drive) == (6, [(3, ""), (4, ""), (5, "")], 1)


def test_at_level_1_the_leader_that_heard_it_tells_it() -> None:
    drive = running(level=False)
    ends(drive, DIGEST)
    assert placed(drive) == (2, [(1, DIGEST)], 0)
    assert stored(drive) == []
    drive.lead()
    drive.renew()
    ends(drive, "")
    assert placed(drive) == (3, [(2, "")], 1), "a later leader lets its name find the first one's"
    raise_level(drive)
    drive.pass_time(600_000, step=20_000)
    ends(drive, DIGEST)
    assert placed(drive) == (4, [(3, DIGEST)], 3)


def start(drive: Driving) -> None:
    drive.report("claimed", "a")
    drive.report("started", "a")


def lose(drive: Driving) -> None:
    """Its host falls silent, and another one renews."""
    drive.worker("w1", 1, auto=False)
    drive.workers["w0"].session = ""
    drive.pass_time(600_000)


def runs(drive: Driving, checkpoint: str, step: int = 0, detail: str = "") -> None:
    """The worker tells of the attempt that runs what it has stored meanwhile."""
    attempt, worker = drive.attempt("a", 0), drive.workers["w0"]
    report = Report("started", "t", "a", 0, attempt.no, attempt.fence, step, detail, checkpoint=checkpoint)
    worker.gathered.append(report)
    frame = worker.report_frame()
    assert frame is not None
    drive.send("w0", frame)
    worker.report_answered(frame.no)
    drive.tick()


def checkpoint(drive: Driving) -> CheckpointInfo | None:
    [row] = shown(drive, "a").replica_states
    return row.checkpoint


@pytest.mark.parametrize("level", [True, False])
def test_what_an_attempt_stored_while_it_ran_counts_when_its_host_is_lost(level: bool) -> None:
    drive = running(level=level)
    start(drive)
    assert checkpoint(drive) is None
    runs(drive, OTHER, step=10)
    first_ms = drive.state.time_ms
    drive.pass_time(1_000)
    runs(drive, DIGEST, step=20)
    runs(drive, DIGEST, step=20)  # its worker repeats what was not answered
    at_ms = drive.state.time_ms
    assert first_ms < at_ms
    info = checkpoint(drive)
    assert info is not None
    assert (info.from_ms, info.step, info.not_stored) == (None, 20, "")
    assert [act.digest for act in stored(drive)] == ([OTHER, DIGEST] if level else [])
    runs(drive, DIGEST, detail="checkpoint-not-stored: no room")
    assert (info := checkpoint(drive)) is not None
    assert (info.step, info.not_stored) == (20, "no room")
    ends(drive, None, detail="lost")
    assert placed(drive)[:2] == (2, [(1, DIGEST)])
    assert (info := checkpoint(drive)) is not None
    assert (info.from_attempt, info.from_step, info.stored_ms, info.not_stored) == (1, 20, None, "")
    assert info.from_ms is not None


def test_an_end_that_stores_none_leaves_what_was_stored_before_and_another_one_takes_its_place() -> None:
    drive = running()
    start(drive)
    runs(drive, OTHER)
    ends(drive, "")
    assert placed(drive)[:2] == (2, [(1, OTHER)])
    start(drive)
    runs(drive, OTHER)
    ends(drive, DIGEST)
    assert placed(drive)[:2] == (3, [(1, OTHER), (2, DIGEST)])
    start(drive)
    runs(drive, "x" * 10_000)  # no digest
    assert drive.attempt("a", 0).replica.stored_by(3) == ""


def test_what_a_lost_attempt_told_an_earlier_leader_is_found_by_its_name_at_level_1_alone() -> None:
    for level, untold in ((False, 1), (True, 0)):
        drive = running(level=level)
        start(drive)
        runs(drive, DIGEST)
        drive.lead()
        lose(drive)
        assert placed(drive)[1:] == ([] if not level else [(1, DIGEST)], untold)


def test_no_more_are_remembered_than_an_attempt_looks_for() -> None:
    drive = running()
    for _ in range(STORED_MAX + 3):
        ends(drive, DIGEST)
    attempt, checkpoints, untold = placed(drive)
    assert attempt == STORED_MAX + 4
    assert [each for each, _ in checkpoints] == [*range(4, STORED_MAX + 4)]
    assert untold == 0


@pytest.mark.parametrize("address", ["", "10.0.0.5:20000,20001"])
@pytest.mark.parametrize("level", [1, 2])
def test_what_a_worker_tells_of_the_beginning_is_in_the_jobs_history_also_that_of_the_next_leader(
    address: str, level: int
) -> None:
    drive = running(level=level > 1)
    attempt, worker = drive.attempt("a", 0), drive.workers["w0"]
    told = "checkpoint-refused: that of attempt 1 is damaged; it began without a checkpoint"
    worker.gathered.append(Report("started", "t", "a", 0, attempt.no, attempt.fence, 0, f"{address}; {told}"))
    frame = worker.report_frame()
    assert frame is not None
    drive.send("w0", frame)
    worker.report_answered(frame.no)
    drive.tick()
    for _ in range(2):
        attempt = drive.attempt("a", 0)
        assert attempt.address == address
        job = attempt.replica.job
        begun = next(change for change in changes_since(drive.state, job, 0) if change.state == "RUNNING")
        assert (begun.address, begun.why) == (address, told)
        drive.lead()
        drive.renew()
