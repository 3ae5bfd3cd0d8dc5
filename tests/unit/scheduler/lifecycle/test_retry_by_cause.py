"""`retry`: which ends are followed by another attempt, how often, and after which pause."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.answers.waiting import explain_job
from moorage.schemas.retrying import Retry, row_of
from tests.levels import know_next
from tests.unit.scheduler.driving import Driving, wire

OOM = "out of memory: it was killed by the kernel, as its host had none left; fix: say --memory"


def running(*rows: dict[str, Any], hosts: int = 1, **fields: Any) -> Driving:
    drive = Driving.with_hosts(*[2] * hosts, auto=False)
    answer = drive.submit("j", gpu={}, retry=list(rows), **fields)
    assert answer["kind"] == "accepted", answer
    start(drive)
    return drive


def start(drive: Driving) -> None:
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")])


def end(drive: Driving, code: int, detail: str = "exit", pass_ms: int = 70_000) -> str:
    """The attempt ends; what the job is once any pause is over."""
    drive.reports([("exited", "j", 0, code, detail), ("freed", "j", 0, 0, "")])
    drive.pass_time(pass_ms)
    state = drive.states("j")[0]
    if state == "PLACED":
        start(drive)
    return state


@pytest.mark.parametrize(
    ("on", "code", "detail"),
    [
        ("oom", -9, OOM),
        ("oom", 1, OOM),
        ("signal", -11, "exit"),
        ("exit:139", -11, "exit"),
        ("exit:139", 139, "exit"),
        ("exit:3", 3, "exit"),
        ("start", 127, "start-failed: exec: no such file"),
        ("lost", -9, "fence"),
        ("failure", 3, "exit"),
        ("failure", 0, "not-ready"),
    ],
)
def test_an_end_is_tried_again_by_its_cause_and_no_other_is(on: str, code: int, detail: str) -> None:
    drive = running({"on": on, "times": 2})
    assert [end(drive, code, detail) for _ in range(3)] == ["PLACED", "PLACED", "FAILED"]
    drive = running({"on": "exit:77", "times": 2})
    assert end(drive, code, detail) == ("PLACED" if on == "lost" else "FAILED")


def test_causes_go_before_codes_and_codes_before_any_failure() -> None:
    rows = [Retry("failure", 1), Retry("exit:137", 2), Retry(["lost", "oom"], 3), Retry(["signal"], 4)]
    assert row_of(rows, {"oom", "signal"}, -9) == 3
    assert row_of(rows, {"signal"}, -9) == 4
    assert row_of(rows, (), 137) == 2
    assert row_of(rows, (), 1) == 1
    assert row_of(rows, {"lost"}, None) == 3
    assert row_of(rows[:2], {"lost"}, None) == 0


def test_each_row_counts_alone_and_show_says_so() -> None:
    drive = running({"on": "exit:2", "times": 0}, {"on": "oom", "times": 1}, {"on": "exit:75", "times": 3})
    assert [end(drive, 75), end(drive, -9, OOM), end(drive, 75)] == ["PLACED"] * 3
    told = wire(views.show(drive.engine, "t", "j"))["replica_states"][0]["tries"]
    assert told == {"exit:2": [0, 0], "oom": [1, 1], "exit:75": [2, 3]}
    assert end(drive, 2) == "FAILED"
    why = wire(explain_job(drive.engine, "t", "j"))["why"]
    assert why == "it ended by itself, with code 2; its retry allows 0 more attempts after exit:2"


def test_the_pause_is_that_of_the_row() -> None:
    drive = running({"on": "exit:75", "times": 3, "pause_s": 30})
    assert end(drive, 75, pass_ms=29_000) == "QUEUED"
    told = wire(explain_job(drive.engine, "t", "j"))
    assert (told["reason"], told["because"]) == (
        "backoff", "attempt 1 ended by itself, with code 75; attempt 1 of 3 after exit:75",
    )  # fmt: skip
    drive.pass_time(2_000)
    assert drive.states("j") == ["PLACED"]


def test_without_a_row_for_it_a_lost_attempt_is_tried_again_three_times() -> None:
    drive = running({"on": "oom", "times": 1})
    assert [end(drive, -9, "lost") for _ in range(4)] == ["PLACED"] * 3 + ["FAILED"]


def test_what_was_drained_or_requeued_counts_for_nothing() -> None:
    drive = running({"on": "lost", "times": 0}, {"on": "failure", "times": 0})
    for _ in range(3):
        drive.order("requeue", job="j")
        assert end(drive, -15, "end") == "PLACED"
    assert end(drive, -9, "lost") == "FAILED"


def test_a_setup_that_failed_is_tried_again_if_a_row_says_so() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", gpu={}, retry=[{"on": "setup", "times": 1}], run={"argv": ["x"], "setup": "pip install x"})
    drive.report("refused", "j", code=1, detail="setup-failed: code 1")
    assert drive.states("j") == ["QUEUED"]
    drive.pass_time(2_000)
    drive.report("refused", "j", code=1, detail="setup-failed: code 1")
    assert drive.states("j") == ["FAILED"]


def test_a_gang_is_tried_again_whole_by_the_cause_of_its_first_failure() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("g", gpu={"scheduling": "gang"}, replicas=2, retry=[{"on": "exit:75", "times": 1}])
    for attempt in (1, 2):
        for kind in ("claimed", "started"):
            drive.reports([(kind, "g", rank, 0, "") for rank in (0, 1)])
        drive.reports([("exited", "g", 1, 75, "exit")])
        drive.reports([("exited", "g", 0, -15, "end")])
        drive.reports([("freed", "g", rank, 0, "") for rank in (0, 1) if drive.states("g")[0] != "FAILED"])
        drive.pass_time(2_000)
        assert drive.states("g") == (["PLACED"] * 2 if attempt == 1 else ["FAILED"] * 2)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("how", ["from the ledger", "from a snapshot"])
def test_a_new_leader_allows_no_more(level: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if level == 2:
        know_next(monkeypatch)
    drive = running({"on": "exit:75", "times": 2})
    assert end(drive, 75) == "PLACED"
    drive.lead_from_snapshot() if how == "from a snapshot" else drive.lead()
    drive.renew()
    assert [end(drive, 75), end(drive, 75)] == ["PLACED", "FAILED"]


@pytest.mark.parametrize(
    "beside", [{"retries": 1}, {"retries_on_lost": 2}, {"run": {"argv": ["x"], "restart": "always"}}]
)
def test_beside_what_says_the_same_it_is_refused(beside: dict[str, Any]) -> None:
    refused = Driving().submit("j", gpu={}, retry=[{"on": "oom", "times": 1}], **beside)
    assert (refused["code"], refused["field"]) == ("invalid-argument", "$.retry")
