"""What the worker's state machine reports of readiness, and of the ports of its attempts."""

from __future__ import annotations

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import decode_request
from moorage.schemas.frames import End, Report
from moorage.worker.session.attempt_messages import (
    Attempt,
    EndAttempt,
    Ended,
    NoteKept,
    Restored,
    SeenReady,
    Started,
    WatchReady,
)
from tests.unit.worker.attempt_bench import Bench, body, name_of, of, place

LOOKED_AT = body(run={"ready": {"tcp": 80, "within_s": 30}, "grace_s": 7.0})


def running(bench: Bench) -> AttemptName:
    return bench.run(request=LOOKED_AT)


def test_an_attempt_is_looked_at_from_its_start_on(bench: Bench) -> None:
    name = name_of()
    assert not of(WatchReady, bench.want(place(name, request=LOOKED_AT)))
    (watch,) = of(WatchReady, bench.do(Started([name])))
    assert watch.attempt.name == name
    bench.reports()
    bench.run(name_of("b", fence=11), slots=(1,))
    assert len(of(WatchReady, bench.log)) == 1, "the other one has no check"


def test_what_changes_is_told_once(bench: Bench) -> None:
    name = running(bench)
    bench.do(SeenReady([(name, "nothing listens", False)]))
    assert bench.reports() == [], "it was never ready"
    (noted,) = of(NoteKept, bench.do(SeenReady([(name, "", False)])))
    assert noted.attempt.was_ready
    bench.do(SeenReady([(name, "", False)]))
    assert bench.reports() == [Report("ready", *name)]
    bench.do(SeenReady([(name, "nothing listens", False)]))
    bench.do(SeenReady([(name, "nothing listens", False)]))
    assert bench.reports() == [Report("not-ready", *name, 0, "nothing listens")]
    assert not of(NoteKept, bench.do(SeenReady([(name, "", False)]))), "the journal knows that it was ready"
    assert bench.reports() == [Report("ready", *name)]


def test_readiness_leaves_behind_the_start(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name, request=LOOKED_AT))
    bench.do(Started([name]))
    bench.do(SeenReady([(name, "", False)]))
    assert bench.kinds() == ["claimed", "started", "ready"]


def test_one_that_is_not_ready_in_time_ends_for_that_reason(bench: Bench) -> None:
    name = running(bench)
    (end,) = of(EndAttempt, bench.do(SeenReady([(name, "nothing listens, 30 s after its start", True)])))
    assert (end.grace_s, end.why) == (7.0, "not-ready: nothing listens, 30 s after its start")
    bench.do(Ended([(name, -15, "end")]))
    assert bench.reports()[0] == Report("exited", *name, -15, "not-ready: nothing listens, 30 s after its start")


def test_one_that_ends_is_not_looked_at_any_more(bench: Bench) -> None:
    name = running(bench)
    bench.want(End(*name, "cancelling"))
    assert bench.do(SeenReady([(name, "", False)])) == []
    bench.do(Ended([(name, 0, "end")]))
    assert bench.do(SeenReady([(name, "", True)])) == []
    assert bench.reports()[0] == Report("exited", *name, 0, "end")


def restored(bench: Bench, *, was_ready: bool) -> Attempt:
    new = place(name_of(), request=LOOKED_AT)
    attempt = Attempt(name_of(), new, decode_request(new.body), bench.now)
    attempt.was_ready, attempt.ports, attempt.address = was_ready, (20000,), "h:20000"
    bench.do(Restored([(attempt, "running", 0, "")], [], []))
    bench.join()
    return attempt


def test_one_of_an_earlier_agent_is_looked_at_anew_and_says_where_it_is() -> None:
    bench = Bench()
    attempt = restored(bench, was_ready=True)
    (watch,) = of(WatchReady, bench.log)
    assert watch.attempt is attempt
    reports = bench.attempts.outbox.unanswered()
    assert [report for report in reports if report.kind == "started"] in (
        [],
        [Report("started", *attempt.name, 0, "h:20000")],
    )
    bench.do(SeenReady([(attempt.name, "nothing listens", False)]))
    assert bench.reports()[-1] == Report("not-ready", *attempt.name, 0, "nothing listens"), (
        "the ledger may think otherwise"
    )
