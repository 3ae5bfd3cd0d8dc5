"""A leader whose workers know more of its ledger than the ledger itself (ledger-rules H7): what counts as evidence."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.lifecycle.sessions import MISSED_MAX
from moorage.schemas.frames import Held, Renew, ReportFrame
from tests.unit.scheduler.driving import Driving


def led_anew(workers: int) -> Driving:
    """Workers that joined under the term before; nobody is heard in this one yet."""
    drive = Driving.with_hosts(*[1] * workers)
    drive.lead()
    return drive


def ask(drive: Driving, name: str, frame: Renew | ReportFrame) -> dict[str, Any]:
    reply = drive.send(name, frame)
    drive.tick()
    return dict(drive.answers[reply])


def renew(drive: Driving, name: str, *, epoch: int = 0, no: int = 0, fence: int = 0) -> str:
    """The kind or the code of what the renewal is answered with."""
    worker = drive.workers[name]
    worker.renewals += 1
    held = [Held("t", "lost", 0, 1, fence, "running")] if fence else []
    answer = ask(drive, name, Renew(worker.session, worker.renewals, no, held=held, epoch=epoch))
    return str(answer.get("code", answer["kind"]))


def behind(drive: Driving) -> str:
    return drive.engine.stale_ledger.behind(drive.now)


@pytest.mark.parametrize("knows", [{"epoch": 9}, {"no": 4}, {"fence": 10_000}])
def test_a_worker_that_knows_more_when_first_heard_is_not_answered_and_is_evidence(knows: dict[str, int]) -> None:
    drive = led_anew(1)
    assert renew(drive, "w0", **knows) == "not-leading"
    assert "older backup" in behind(drive)
    assert "w0" in behind(drive)


def test_a_report_frame_behind_reports_that_are_not_here_is_evidence_too() -> None:
    drive = led_anew(1)
    answer = ask(drive, "w0", ReportFrame(drive.workers["w0"].session, 3, []))
    assert answer["code"] == "not-leading"
    assert "knows 2 answered frames of its reports" in behind(drive)


def test_who_followed_this_term_before_is_no_evidence() -> None:
    drive = led_anew(1)
    assert renew(drive, "w0") == "renewed"
    assert renew(drive, "w0", epoch=9) == "renewed"
    assert ask(drive, "w0", ReportFrame(drive.workers["w0"].session, 3, []))["code"] == "gap"
    assert behind(drive) == ""


def test_one_of_many_is_not_believed_and_nothing_is_placed_before_that_is_clear() -> None:
    drive = led_anew(3)
    assert renew(drive, "w0", epoch=9) == "not-leading"
    assert behind(drive) == "", "two are not heard yet"
    drive.submit("j", gpu={})
    assert drive.states("j") == ["QUEUED"]
    assert renew(drive, "w1") == "renewed"
    assert behind(drive) == ""
    assert renew(drive, "w2") == "renewed"
    assert behind(drive) == ""
    drive.tick()
    assert drive.states("j") == ["PLACED"]


def test_more_of_them_than_not_are_believed() -> None:
    drive = led_anew(3)
    renew(drive, "w0", epoch=9)
    renew(drive, "w1")
    assert behind(drive) == ""
    renew(drive, "w2", epoch=9)
    assert "2 of its workers know more" in behind(drive)


def test_who_is_not_heard_for_a_while_is_not_waited_for() -> None:
    drive = led_anew(3)
    renew(drive, "w0", epoch=9)
    assert behind(drive) == ""
    drive.pass_time(4_000, renew=False)
    assert "older backup" in behind(drive)


def test_a_worker_that_comes_round_is_no_evidence_any_more() -> None:
    drive = led_anew(2)
    renew(drive, "w0", epoch=9)
    assert renew(drive, "w0") == "renewed"  # its agent was started again
    assert renew(drive, "w1") == "renewed"
    assert behind(drive) == ""


def test_renewals_from_before_a_placement_came_end_no_attempt() -> None:
    """They waited while leader or server were slow, and then counted as if the worker had lost the attempt."""
    drive = Driving()
    drive.worker("w0", auto=False)
    drive.submit("j", gpu={})
    before = drive.state.workers["w0"].no
    for _ in range(MISSED_MAX):
        assert renew(drive, "w0", no=before) == "renewed"
    for kind in ("claimed", "started"):
        drive.report(kind, "j")
    assert renew(drive, "w0", no=before) == "renewed"
    assert [end for frame in drive.wanted for end in frame.end] == []


@pytest.mark.parametrize("told_since", [0, 3])
def test_what_ended_since_the_backup_that_a_ledger_was_restored_from_is_asked_for(told_since: int) -> None:
    """Its worker was answered then, holds it no more and has nothing to add: it ran in the ledger for ever, and its
    GPU was nobody's."""
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    drive.submit("j", gpu={})
    for kind in ("claimed", "started"):
        drive.report(kind, "j")
    drive.lead()
    drive.state.restored_ms, drive.state.restored_epoch = drive.state.time_ms, drive.state.epoch - 1
    for _ in range(MISSED_MAX):
        assert drive.wanted == [], "it may be on its way"
        assert renew(drive, "w0", no=drive.state.workers["w0"].no + told_since) == "renewed"
    assert [(end.job, end.fence) for frame in drive.wanted for end in frame.end] == [("j", drive.attempt("j").fence)]
    ended = ReportFrame(worker.session, drive.state.workers["w0"].no + told_since + 1, [])
    assert ask(drive, "w0", ended)["kind" if told_since == 0 else "code"] == ("recorded" if told_since == 0 else "gap")
