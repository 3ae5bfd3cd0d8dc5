"""Who is asked for kept output: from the state alone, and only for jobs of the tenant who asks."""

from __future__ import annotations

import pytest

from moorage.scheduler.answers.logs import Kept, find_log
from moorage.scheduler.answers.views import fleet, show
from moorage.scheduler.core.config import Config
from moorage.scheduler.questions.relay import page_asked
from moorage.schemas.errors import Problem, Refused
from moorage.schemas.frames import LogPage, LogsAsked, ReadLog, Rescue, RescueAsked
from tests.unit.scheduler.driving import Driving, wire


def ran(drive: Driving, job: str = "j") -> None:
    drive.submit(job, gpu={})
    drive.settle()
    drive.run_out("w0")
    drive.settle()


def test_a_job_that_is_over_is_found_with_the_worker_the_fence_and_the_end() -> None:
    drive = Driving.with_hosts(1)
    ran(drive)
    found = find_log(drive.engine, "t", LogsAsked("j", offset=5, limit=7, stream="err"))
    assert isinstance(found, Kept)
    assert isinstance(found.ask, ReadLog)
    row = drive.state.jobs[1].history[-1]
    assert (found.worker.id, found.ask.session) == ("w0", drive.state.workers["w0"].session)
    assert (found.ask.tenant, found.ask.job, found.ask.attempt, found.ask.fence) == ("t", "j", 1, row[9])
    assert (found.ask.offset, found.ask.limit, found.ask.stream, found.ask.ended_ms) == (5, 7, "err", row[1])
    drive.lead()  # and by the next leader, too
    assert isinstance(find_log(drive.engine, "t", LogsAsked("j")), Kept)


def test_a_running_one_has_no_end_and_a_waiting_one_is_empty() -> None:
    drive = Driving()
    drive.submit("j", gpu={})
    drive.tick()
    assert find_log(drive.engine, "t", LogsAsked("j")) == LogPage(0, "out")
    drive.worker("w0")
    drive.settle()
    found = find_log(drive.engine, "t", LogsAsked("j"))
    assert isinstance(found, Kept)
    assert isinstance(found.ask, ReadLog)
    assert found.ask.ended_ms == 0
    drive.submit("k", gpu={"model": "H999"})
    drive.cancel("k")
    assert find_log(drive.engine, "t", LogsAsked("k")) == LogPage(0, "out", over=True)


@pytest.mark.parametrize(
    ("tenant", "asked", "code"),
    [
        ("other", LogsAsked("j"), "not-found"),
        ("t", LogsAsked("none"), "not-found"),
        ("t", LogsAsked("j", replica=1), "invalid-argument"),
        ("t", LogsAsked("j", attempt=2), "not-found"),
        ("other", RescueAsked("j"), "not-found"),
        ("t", RescueAsked("j", attempt=2), "not-found"),
    ],
)
def test_nobody_is_asked_for_what_is_not_there_or_not_theirs(
    tenant: str, asked: LogsAsked | RescueAsked, code: str
) -> None:
    drive = Driving.with_hosts(1)
    ran(drive)
    found = find_log(drive.engine, tenant, asked)
    assert isinstance(found, Problem)
    assert found.code == code


def test_the_folder_of_an_attempt_is_rescued_once_it_has_ended() -> None:
    drive = Driving()
    drive.submit("j", gpu={})
    drive.tick()
    waits = find_log(drive.engine, "t", RescueAsked("j"))
    drive.worker("w0")
    drive.settle()
    runs = find_log(drive.engine, "t", RescueAsked("j"))
    assert [each.code for each in (waits, runs) if isinstance(each, Problem)] == ["not-kept", "failed-precondition"]
    drive.run_out("w0")
    drive.settle()
    found = find_log(drive.engine, "t", RescueAsked("j", path="out"))
    assert isinstance(found, Kept)
    session, fence = drive.state.workers["w0"].session, drive.state.jobs[1].history[-1][9]
    assert found.ask == Rescue(session, "t", "j", 0, 1, fence, "noop", "out")


def test_the_time_of_a_loss_is_known_to_whoever_folds_it() -> None:
    drive = Driving.with_hosts(1)
    ran(drive)
    assert drive.state.workers["w0"].left_ms == 0
    for _ in range(drive.config.lost_ms // 1000 + 2):
        drive.tick(1000)
    worker = drive.state.workers["w0"]
    assert not worker.session
    assert 0 < worker.left_ms <= drive.state.time_ms


def test_show_says_until_when_it_is_kept_and_fleet_how_long() -> None:
    drive = Driving.with_hosts(1, config=Config(finished_keep=3600, history_keep=7200, history_bytes=1 << 30))
    ran(drive)
    job = drive.state.jobs[1]
    ended_ms = job.history[-1][1]
    shown = wire(show(drive.engine, "t", "j"))
    assert shown["kept"]["job_ms"] == ended_ms + 3_600_000
    assert shown["kept"]["history_ms"] == ended_ms + 7_200_000
    keeps = fleet(drive.engine, drive.now).keeps
    assert (keeps.finished_keep, keeps.history_keep, keeps.history_bytes) == (3600, 7200, 1 << 30)
    drive.submit("live", gpu={"model": "H999"})
    live = wire(show(drive.engine, "t", "live"))
    assert "kept" not in live


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"job": "../x"},
        {"job": "j", "limit": 0},
        {"job": "j", "limit": 1 << 20},
        {"job": "j", "x": 1},
        {"job": None},
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(Refused) as refused:
        page_asked("logs", arguments)
    assert refused.value.code == "invalid-argument"
    assert refused.value.problem.field
