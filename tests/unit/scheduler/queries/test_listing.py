"""Which jobs `ls` lists, and their rows; pages of jobs in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from moorage.scheduler.answers.listing import Pattern, Reasons, Wanted, labels_in, row_of
from moorage.scheduler.answers.waiting import reason_of
from moorage.scheduler.questions import job_lists
from moorage.scheduler.questions.job_lists import JobLists, jobs_asked
from moorage.schemas.errors import Refused
from tests.unit.scheduler.driving import SUBJECTS, Driving


def listed(drive: Driving, *, tenant: str = "", **asked: Any) -> list[str]:
    """The ids of the jobs that a question lists, newest first."""
    wanted = Wanted(jobs_asked(asked, operator=True), tenant)
    engine, reasons = drive.engine, Reasons(drive.engine)
    jobs = [engine.state.jobs[num] for num in reversed(wanted.numbers(engine))]
    return [job.name for job in jobs if wanted.counts(engine, job) and wanted.lists(engine, job, reasons)]


def test_an_id_matches_a_pattern_only_if_the_whole_of_it_does() -> None:
    for pattern, names, others in (
        ("train-*", ("train-", "train-42"), ("rain-42", "train")),
        ("*-r1", ("a-r1", "-r1"), ("a-r12", "r1")),
        ("a*b*c", ("abc", "axbxc", "abbcc"), ("ab", "acb", "xabc")),
        ("aa*aa", ("aaaa", "aa-aa"), ("aaa", "aa")),
        ("*", ("", "x"), ()),
        ("exact", ("exact",), ("exactly", "exac")),
        ("a**b", ("ab", "a-b"), ("a",)),
    ):
        found = Pattern(pattern)
        assert [name for name in names if not found.matches(name)] == []
        assert [name for name in others if found.matches(name)] == []


def test_labels_are_those_of_the_request_and_of_its_template_in_either_encoding() -> None:
    request = {"gpu": {}, "labels": {"a": "1"}, "template": {"labels": {"b": "2"}}}
    for body in (msgspec.json.encode(request), msgspec.msgpack.encode(request)):
        assert labels_in(body) == {"a": "1", "b": "2"}
    for nothing in (b"", b"null", b"[", b'{"labels": 7}', b"\xc1"):
        assert labels_in(nothing) == {}


def test_jobs_are_found_by_tenant_state_worker_label_and_id() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("sweep-1", gpu={}, labels={"sweep": "lr", "user": "ann"})
    drive.worker("w1", 1, auto=False)
    drive.submit("sweep-2", gpu={}, labels={"sweep": "lr"})
    drive.submit("sweep-3", gpu={}, labels={"sweep": "wd"})
    drive.submit("other", tenant="u", gpu={})
    assert listed(drive) == ["other", "sweep-3", "sweep-2", "sweep-1"], "newest first"
    assert listed(drive, tenant="u") == ["other"]
    assert listed(drive, labels={"sweep": "lr"}) == ["sweep-2", "sweep-1"]
    assert listed(drive, labels={"sweep": "*"}) == ["sweep-3", "sweep-2", "sweep-1"]
    assert listed(drive, labels={"sweep": "lr", "user": "ann"}) == ["sweep-1"]
    assert listed(drive, ids="*-1") == ["sweep-1"]
    assert listed(drive, states=["QUEUED"]) == ["other", "sweep-3"]
    [on_w0] = listed(drive, worker="w0")
    [on_w1] = listed(drive, worker="w1")
    assert {on_w0, on_w1} == {"sweep-1", "sweep-2"}
    assert listed(drive, worker="w2") == []


def test_an_ended_job_is_of_the_worker_where_its_last_attempt_was() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={})
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")])
    drive.reports([("exited", "j", 0, 0, "exit"), ("freed", "j", 0, 0, "")])
    assert drive.states("j") == ["SUCCEEDED"]
    assert listed(drive, worker="w0") == ["j"]


def test_a_job_that_ended_as_it_waited_to_be_tried_again_has_the_worker_where_it_ran() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={}, retries=1)
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")])
    drive.reports([("exited", "j", 0, 1, "exit"), ("freed", "j", 0, 0, "")])
    drive.order("hold", job="j", why="check")
    drive.cancel("j")
    assert drive.states("j") == ["CANCELLED"]
    assert listed(drive, worker="w0") == ["j"]
    (job,) = drive.engine.state.jobs.values()
    assert row_of(drive.engine, job, Reasons(drive.engine)).worker == "w0"


def test_jobs_are_found_by_the_reason_for_which_they_wait_each_group_searched_once() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("runs", gpu={})
    for number in range(3):
        drive.submit(f"busy-{number}", gpu={})
    drive.submit("never", gpu={"model": ["TPU"]}, on_no_match="wait")
    drive.submit("held", gpu={})
    drive.order("hold", job="held", why="check")
    assert listed(drive, reason="model") == ["never"]
    assert listed(drive, reason="held") == ["held"]
    assert listed(drive, reason="busy") == ["busy-2", "busy-1", "busy-0"]
    reasons = Reasons(drive.engine)
    rows = [row_of(drive.engine, job, reasons) for job in drive.engine.state.jobs.values()]
    assert {row.job: row.reason for row in rows} == {
        "runs": "", "busy-0": "busy", "busy-1": "busy", "busy-2": "busy", "never": "model", "held": "held",
    }  # fmt: skip
    assert reasons.searches == 2, "one for the three that are alike, one for the model that is not there"


def test_a_row_says_how_long_its_newest_attempt_runs_or_ran() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={}, retries=1)

    def ran() -> Any:
        return row_of(drive.engine, drive.job("j"), Reasons(drive.engine)).ran_ms

    drive.report("claimed", "j")
    assert ran() is None
    drive.report("started", "j")
    drive.pass_time(5_000)
    assert ran() == pytest.approx(5_000, abs=1_100)
    drive.reports([("exited", "j", 0, 1, "exit"), ("freed", "j", 0, 0, "")])
    assert drive.states("j") == ["QUEUED"]
    assert ran() is None, "it waits for its second attempt"
    drive.cancel("j")
    assert drive.states("j") == ["CANCELLED"]
    assert ran() == pytest.approx(5_000, abs=1_100)
    drive.submit("k", gpu={}, run={"driver": "process", "argv": ["x"], "restart": "always"})
    drive.reports([(kind, "k", 0, 0, "") for kind in ("claimed", "started")])
    drive.reports([("exited", "k", 0, 1, "exit"), ("freed", "k", 0, 0, "")])
    drive.pass_time(500, step=500)
    drive.cancel("k")
    row = row_of(drive.engine, drive.job("k"), Reasons(drive.engine))
    assert row.state == "CANCELLED"
    assert row.ran_ms == pytest.approx(0, abs=100), "the wait for the next is no run"


def test_a_wrong_question_is_refused_by_its_field() -> None:
    for wrong, field in (
        ({"states": ["NO"]}, "states"),
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"ids": "a b"}, "ids"),
        ({"reason": "lazy"}, "reason"),
        ({"worker": "a.b"}, "worker"),
        ({"after": "7"}, "after"),
        ({"labels": {str(number): "" for number in range(17)}}, "labels"),
        ({"labels": {"a": 1}}, "labels"),
        ({"lables": {}}, "lables"),
    ):
        with pytest.raises(Refused) as refused:
            jobs_asked(wrong, operator=True)
        told = refused.value.problem
        assert (told.code, field in f"{told.field} {told.message}") == ("invalid-argument", True), told
    with pytest.raises(Refused, match="tenant"):
        jobs_asked({"tenant": "other"}, operator=False)


async def test_a_list_of_many_jobs_is_made_in_short_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving.with_hosts(1, auto=False)
    for number in range(3_000):
        drive.offer_submit(f"j{number}", gpu={"count": 1 + number % 8}, labels={"n": str(number % 7)})
    while drive.engine.state.live < 3_000:
        drive.tick()
    answers: list[Any] = []
    done = Counter[str]()  # in one turn

    def counted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            done[name] += 1
            return work(*arguments)

        return counting

    monkeypatch.setattr(Wanted, "counts", counted("jobs", Wanted.counts))
    monkeypatch.setattr(job_lists, "row_of", counted("rows", row_of))
    monkeypatch.setattr("moorage.scheduler.answers.listing.reason_of", counted("searches", reason_of))
    nothing: Any = None
    lists = JobLists(nothing, SUBJECTS, drive.engine, nothing, lambda *answer: answers.append(answer))
    assert (
        lists.ask("", "", jobs_asked({"limit": 1000, "labels": {"n": "3"}}, operator=True), "_INBOX.x", json=True)
        is None
    )
    turns: list[Counter[str]] = []
    while not answers:
        done.clear()
        await asyncio.sleep(0)
        turns.append(done.copy())
    [(_, data, _, _)] = answers
    assert len(data.jobs) == data.counts.get("QUEUED", 0) + data.counts.get("PLACED", 0) == 429
    total = sum(turns, Counter[str]())
    assert (total["jobs"], total["rows"]) == (3_000, 429)
    assert total["searches"] > job_lists.SEARCHES_AT_ONCE
    assert max(turn["jobs"] for turn in turns) <= job_lists.AT_ONCE
    assert max(turn["searches"] for turn in turns) <= job_lists.SEARCHES_AT_ONCE
    await lists.close()


async def test_the_lists_of_one_tenant_leave_room_for_others_and_for_operators() -> None:
    nothing: Any = None
    lists = JobLists(nothing, SUBJECTS, Driving().engine, nothing, nothing)
    for _ in range(job_lists.LISTS_MAX_TENANT):
        assert lists.ask("t", "t", jobs_asked({}, operator=False), "_INBOX.x", json=True) is None
    full = lists.ask("t", "t", jobs_asked({}, operator=False), "_INBOX.x", json=True)
    assert full is not None
    assert full.code == "overloaded"
    assert lists.ask("u", "u", jobs_asked({}, operator=False), "_INBOX.x", json=True) is None
    assert lists.ask("", "t", jobs_asked({}, operator=True), "_INBOX.x", json=True) is None
    await lists.close()
