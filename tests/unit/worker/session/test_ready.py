"""What the worker's state machine says of readiness, and of the ports of its members."""

from __future__ import annotations

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import decode_request
from moorage.schemas.frames import End, Fact
from moorage.worker.session.member_messages import (
    Ended,
    EndMember,
    Member,
    NoteKept,
    Restored,
    SeenReady,
    Started,
    WatchReady,
)
from tests.unit.worker.member_bench import Bench, body, name_of, of, place

LOOKED_AT = body(run={"ready": {"tcp": 80, "within_s": 30}, "grace_s": 7.0})


def running(bench: Bench) -> AttemptName:
    return bench.run(request=LOOKED_AT)


def test_a_member_is_looked_at_from_its_start_on(bench: Bench) -> None:
    name = name_of()
    assert not of(WatchReady, bench.want(place(name, request=LOOKED_AT)))
    (watch,) = of(WatchReady, bench.do(Started([name])))
    assert watch.member.name == name
    bench.facts()
    bench.run(name_of("b", fence=11), slots=(1,))
    assert len(of(WatchReady, bench.log)) == 1, "the other one has no check"


def test_what_changes_is_told_once(bench: Bench) -> None:
    name = running(bench)
    bench.do(SeenReady([(name, "nothing listens", False)]))
    assert bench.facts() == [], "it was never ready"
    (noted,) = of(NoteKept, bench.do(SeenReady([(name, "", False)])))
    assert noted.member.was_ready
    bench.do(SeenReady([(name, "", False)]))
    assert bench.facts() == [Fact("ready", *name)]
    bench.do(SeenReady([(name, "nothing listens", False)]))
    bench.do(SeenReady([(name, "nothing listens", False)]))
    assert bench.facts() == [Fact("not-ready", *name, 0, "nothing listens")]
    assert not of(NoteKept, bench.do(SeenReady([(name, "", False)]))), "the journal knows that it was ready"
    assert bench.facts() == [Fact("ready", *name)]


def test_readiness_leaves_behind_the_start(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name, request=LOOKED_AT))
    bench.do(Started([name]))
    bench.do(SeenReady([(name, "", False)]))
    assert bench.kinds() == ["claimed", "started", "ready"]


def test_one_that_is_not_ready_in_time_ends_for_that_reason(bench: Bench) -> None:
    name = running(bench)
    (end,) = of(EndMember, bench.do(SeenReady([(name, "nothing listens, 30 s after its start", True)])))
    assert (end.grace_s, end.why) == (7.0, "not-ready: nothing listens, 30 s after its start")
    bench.do(Ended([(name, -15, "end")]))
    assert bench.facts()[0] == Fact("exited", *name, -15, "not-ready: nothing listens, 30 s after its start")


def test_one_that_ends_is_not_looked_at_any_more(bench: Bench) -> None:
    name = running(bench)
    bench.want(End(*name, "cancelling"))
    assert bench.do(SeenReady([(name, "", False)])) == []
    bench.do(Ended([(name, 0, "end")]))
    assert bench.do(SeenReady([(name, "", True)])) == []
    assert bench.facts()[0] == Fact("exited", *name, 0, "end")


def restored(bench: Bench, *, was_ready: bool) -> Member:
    new = place(name_of(), request=LOOKED_AT)
    member = Member(name_of(), new, decode_request(new.body), bench.now)
    member.was_ready, member.ports, member.address = was_ready, (20000,), "h:20000"
    bench.do(Restored([(member, "running", 0, "")], [], []))
    bench.join()
    return member


def test_one_of_an_earlier_agent_is_looked_at_anew_and_says_where_it_is() -> None:
    bench = Bench()
    member = restored(bench, was_ready=True)
    (watch,) = of(WatchReady, bench.log)
    assert watch.member is member
    facts = bench.members.outbox.unanswered()
    assert [fact for fact in facts if fact.kind == "started"] in ([], [Fact("started", *member.name, 0, "h:20000")])
    bench.do(SeenReady([(member.name, "nothing listens", False)]))
    assert bench.facts()[-1] == Fact("not-ready", *member.name, 0, "nothing listens"), "the ledger may think otherwise"
