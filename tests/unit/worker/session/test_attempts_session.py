"""The worker's state machine: its lease session, joining, and what it takes up after a restart."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import problem
from moorage.schemas.frames import SUSPECT_S, End, Joined, Renewed, Report, ReportAck, RollCall, Start
from moorage.worker.session.attempt_messages import (
    LEAVE_S_MAX,
    AnswerRefused,
    Attempt,
    Draining,
    EndAttempt,
    Ended,
    GiveUp,
    Leave,
    Log,
    NotFree,
    Release,
    Replaced,
    Restored,
    SayHello,
    SeenFree,
    SendGoodbye,
    SendJoin,
    SendRenew,
    SendReports,
    SetFence,
    Started,
    StraysOver,
    Stuck,
    Tick,
    TurnOver,
)
from moorage.worker.session.lease_session import NEVER_S
from moorage.worker.session.report_outbox import START_WAIT_S
from tests.unit.worker.attempt_bench import GRACE_S, LEASE_S, RENEW_S, Bench, body, name_of, of, place

# -------------------------------------------------------------------------------- the lease session


def test_the_lease_counts_from_when_the_answered_renewal_was_sent(bench: Bench) -> None:
    bench.now = 102.0
    (renew,) = of(SendRenew, bench.do(Tick()))
    bench.now = 109.0
    (fence,) = of(SetFence, bench.do(Renewed(renew.n, 1)))
    assert fence == SetFence(102.0 + LEASE_S, GRACE_S)


def test_a_drain_is_passed_on_with_its_deadline_and_again_only_when_that_moves(bench: Bench) -> None:
    def renewed(draining: bool, drain_s: float | None) -> list[Draining]:
        bench.now += 2.0
        (renew,) = of(SendRenew, bench.do(Tick()))
        return of(Draining, bench.do(Renewed(renew.n, 1, draining=draining, drain_s=drain_s)))

    assert renewed(True, 600.0) == [Draining(True, 600.0)]
    assert renewed(True, 597.5) == []
    assert renewed(True, 60.0) == [Draining(True, 60.0)], "it is moved"
    assert renewed(True, None) == [Draining(True)], "it is gone"
    assert renewed(True, None) == renewed(True, None) == []
    assert renewed(False, None) == [Draining(False)]
    assert renewed(False, None) == []
    assert renewed(True, None) == [Draining(True)]


def test_an_older_answer_after_a_newer_one_does_not_move_the_lease(bench: Bench) -> None:
    numbers = []
    for second in (102.0, 104.0):
        bench.now = second
        numbers += [command.n for command in of(SendRenew, bench.do(Tick()))]
    bench.do(Renewed(numbers[1], 1))
    assert not of(SetFence, bench.do(Renewed(numbers[0], 1)))
    assert bench.attempts.session.over_at_s == 104.0 + LEASE_S


def test_renewals_leave_every_renew_s_and_carry_what_is_held(bench: Bench) -> None:
    name = bench.run()
    bench.now = 102.0
    (renew,) = of(SendRenew, bench.do(Tick()))
    assert (renew.session, renew.n, renew.no) == ("S1", 2, 1)
    assert [(held.job, held.phase) for held in renew.held] == [(name[1], "running")]
    assert not of(SendRenew, bench.do(Tick()))
    bench.now = 104.0
    assert of(SendRenew, bench.do(Tick()))[0].n == 3


def test_no_new_claim_in_the_second_half_of_the_lease(bench: Bench) -> None:
    bench.now += LEASE_S / 2
    assert bench.want(place(name_of())) == []
    assert bench.attempts.dropped == {"no-claims-now": 1}
    assert of(EndAttempt, bench.want(End(*name_of(), "x"))) == []
    assert bench.kinds() == ["withdrawn"]


def test_at_the_end_of_the_lease_everything_ends_but_what_may_stay(bench: Bench) -> None:
    runs = bench.run()
    keeps = bench.run(name_of("k"), slots=(1,), request=body(on_partition="keep"))
    held = name_of("h")
    bench.want(place(held, (2,), hold=True))
    bench.now += LEASE_S
    commands = bench.do(Tick())
    (end,) = of(EndAttempt, commands)
    assert (end.attempt.name, end.grace_s, end.why) == (runs, GRACE_S, "fence")
    assert [m.name for m in of(Release, commands)[0].attempts] == [held]
    assert not of(SendJoin, commands)  # clearing is not proven yet
    (join,) = of(SendJoin, bench.do(Ended([(runs, -9, "fence")])))
    assert join.n == 2
    assert [(f.kind, f.job) for f in join.reports] == [("claimed", "h"), ("withdrawn", "h"), ("exited", "a")]
    assert [(h.job, h.phase) for h in join.holding] == [("a", "exited"), ("k", "running")]
    assert keeps in bench.attempts.held


def test_a_frame_received_after_the_lease_ran_out_is_stale(bench: Bench) -> None:
    """A stopped agent wakes up and finds a placement in its socket (H8, H29)."""
    bench.now += LEASE_S + 1
    commands = bench.want(place(name_of()))
    assert not bench.attempts.held
    assert of(SendJoin, commands)
    assert bench.attempts.dropped == {"other-session": 1}


def test_a_leader_that_says_the_session_is_over_ends_it(bench: Bench) -> None:
    name = bench.run()
    commands = bench.do(AnswerRefused("renew", 1, problem("session-over", "over")))
    assert of(EndAttempt, commands)[0].attempt.name == name
    assert bench.attempts.session.phase == "clearing"


def test_a_leader_that_does_not_lead_is_asked_again(bench: Bench) -> None:
    assert bench.do(AnswerRefused("renew", 1, problem("not-leading", "no"))) == []
    assert bench.attempts.session.phase == "live"


def test_a_gap_leads_to_a_new_session_that_carries_on(bench: Bench) -> None:
    name = bench.run()
    commands = bench.do(AnswerRefused("fact", 3, problem("gap", "frame 1 is missing")))
    assert not of(EndAttempt, commands)
    assert [held.job for held in of(SendJoin, commands)[0].holding] == [name[1]]
    assert [line.level for line in of(Log, commands)] == ["warning"], "after a restore that is as it should be"


def test_reports_that_nobody_answered_travel_with_the_join_in_order(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name))
    bench.now += START_WAIT_S
    bench.do(TurnOver())  # in flight, unanswered
    bench.do(Started([name]))  # gathered
    bench.now += LEASE_S
    bench.do(Tick())
    (join,) = of(SendJoin, bench.do(Ended([(name, -9, "fence")])))
    assert [f.kind for f in join.reports] == ["claimed", "ran"]
    bench.join("S2")
    bench.do(SeenFree([name]))
    (sent,) = of(SendReports, bench.do(TurnOver()))
    assert (sent.frame.session, sent.frame.no, [f.kind for f in sent.frame.reports]) == ("S2", 1, ["freed"])


# -------------------------------------------------------------------------------- joining


def test_a_join_is_repeated_word_for_word_and_then_asked_anew() -> None:
    bench = Bench(join_n=41)
    (first,) = of(SendJoin, bench.do(Restored([], [Report("started", *name_of())], [])))
    assert (first.n, first.again) == (42, False)
    seen = []
    while bench.now < 120:
        bench.now = bench.attempts.next_deadline_s()
        seen += [(command.n, command.again) for command in of(SendJoin, bench.do(Tick()))]
    assert (42, True) in seen
    assert (43, False) in seen
    assert [again for n, again in seen if n == 42] == [True] * len([n for n, _ in seen if n == 42])
    assert [f.kind for f in of(SendJoin, bench.log)[-1].reports] == ["started"]  # never lost on the way


def test_an_answer_to_an_earlier_join_is_dropped() -> None:
    bench = Bench(join_n=5)
    bench.do(Restored([], [], []))
    bench.do(Joined("S", 5, 1, RENEW_S, LEASE_S, GRACE_S, "L"))
    assert bench.attempts.session.phase == "joining"


@pytest.mark.parametrize("code", ["worker-id-in-use", "stale-join", "gpu-lent-twice"])
def test_a_refused_join_is_logged_once_and_tried_with_patience(code: str) -> None:
    bench = Bench()
    bench.do(Restored([], [], []))
    waits = []
    for _ in range(6):
        bench.do(AnswerRefused("join", bench.attempts.session.join_n, problem(code, "no", allowed="> 70")))
        waits.append(bench.attempts.next_deadline_s() - bench.now)
        bench.now = bench.attempts.next_deadline_s()
        bench.do(Tick())
    assert [log.code for log in of(Log, bench.log)] == [code]
    assert waits == sorted(waits)
    assert waits[-1] == 30
    assert bench.attempts.session.join_n == (76 if code == "stale-join" else 7)


def _refused(bench: Bench, code: str, retry_after_s: float | None) -> list[Any]:
    told = problem(code, "no", retry_after_s=retry_after_s)
    commands = bench.do(AnswerRefused("join", bench.attempts.session.join_n, told))
    bench.now = bench.attempts.next_deadline_s()
    bench.do(Tick())
    return commands


@pytest.mark.parametrize(("code", "gives_up"), [("worker-id-in-use", True), ("gpu-lent-twice", False)])
def test_an_id_that_stays_in_use_longer_than_a_lost_worker_has_it_is_given_up(code: str, gives_up: bool) -> None:
    bench = Bench()
    bench.do(Restored([], [], []))
    began = bench.now
    while bench.now <= began + 2 * 28:
        assert not of(GiveUp, _refused(bench, code, 28.0))
    assert bool(of(GiveUp, _refused(bench, code, 28.0))) is gives_up
    assert not of(GiveUp, _refused(bench, code, None)), "of a leader that names no time"


def test_a_refused_join_says_what_was_found_where_and_what_to_do() -> None:
    bench = Bench()
    bench.do(Restored([], [], []))
    told = problem(
        "gpu-lent-twice",
        "w0 lends it",
        field="$.hello.gpu_pool[1].uuid",
        found="GPU-1",
        allowed="another",
        next="stop it",
    )
    bench.do(AnswerRefused("join", bench.attempts.session.join_n, told))
    (line,) = of(Log, bench.log)
    assert line.text == (
        "this worker may not join: w0 lends it; at $.hello.gpu_pool[1].uuid, found GPU-1, allowed another; stop it"
    )


def test_another_ledger_is_not_trusted_with_what_runs_here(bench: Bench) -> None:
    name = bench.run(slots=(0,), request=body(on_partition="keep"))
    bench.now += LEASE_S
    bench.do(Tick())
    bench.join("S2", ledger="M")
    assert bench.attempts.session.phase == "joining"
    assert "another-ledger" in [log.code for log in of(Log, bench.log)]
    bench.do(Ended([(name, 0, "exit")]))
    bench.do(SeenFree([name]))


def test_a_new_ledger_is_taken_up_by_a_worker_that_holds_nothing(bench: Bench) -> None:
    bench.do(Renewed(1, 9))
    bench.now += LEASE_S
    bench.do(Tick())
    bench.join("S2", epoch=1, ledger="M")
    assert bench.attempts.session.phase == "live"
    assert bench.attempts.session.epoch == 1


def test_a_roll_call_is_answered_with_hello_and_a_renewal(bench: Bench) -> None:
    commands = bench.do(RollCall(3))
    assert [type(c) for c in commands] == [SayHello, SendRenew]


def test_a_roll_call_of_a_false_term_silences_nobody(bench: Bench) -> None:
    """It names no session, so anybody who reaches its subject may have said it: the true leader is still heard."""
    bench.do(RollCall(2**53))
    assert bench.attempts.session.epoch == 1
    bench.do(Renewed(1, 1))
    assert bench.want(place(name_of()))
    assert bench.attempts.dropped == {}


def test_a_frame_of_a_false_term_silences_no_leader(bench: Bench) -> None:
    """The session's name is no secret on an open server: a `wanted` frame may come from anybody."""
    bench.want(epoch=2**31)
    assert bench.attempts.session.epoch == 1
    bench.do(Renewed(1, 1))
    assert bench.attempts.session.base_s > 100.0 - 1, "the lease moves on"
    assert bench.want(place(name_of()))
    assert bench.attempts.dropped == {}


@pytest.mark.parametrize("answer", [Renewed(77, 2**31), ReportAck(77, 2**31)])
def test_an_answer_to_nothing_raises_no_term(bench: Bench, answer: Renewed | ReportAck) -> None:
    bench.do(answer)
    assert bench.attempts.session.epoch == 1
    assert bench.attempts.dropped == {"answer-not-awaited": 1}


def test_a_false_term_is_over_with_the_leaders_answer_to_the_next_join(bench: Bench) -> None:
    """The leader hears the term in the join. Its record of the session proves that it leads all the same."""
    bench.do(Renewed(1, 2**31))
    bench.now += LEASE_S
    bench.do(Tick())
    bench.join("S2")
    assert (bench.attempts.session.phase, bench.attempts.session.epoch) == ("live", 1)
    assert [log.code for log in of(Log, bench.log)] == ["session-over", "false-term"]
    assert bench.want(place(name_of()))


def test_a_worker_that_no_leader_answers_says_so_once_in_its_log() -> None:
    bench = Bench()
    bench.do(Restored([], [], []))
    for _ in range(20):
        bench.now = max(bench.now, bench.attempts.next_deadline_s())
        bench.do(Tick())
    assert [log.code for log in of(Log, bench.log)] == ["join-unanswered"]
    bench.join()
    assert bench.want(place(name_of()))


def test_a_roll_call_hurries_the_reports_that_the_old_leader_did_not_answer(bench: Bench) -> None:
    bench.want(place(name_of()))
    sent = of(SendReports, bench.do(TurnOver()))
    assert not of(SendReports, bench.do(Tick())), "its answer is not overdue yet"
    bench.do(RollCall(3))
    again = of(SendReports, bench.do(Tick()))
    assert [(c.frame, c.again) for c in again] == [(c.frame, True) for c in sent]


# -------------------------------------------------------------------------------- restarts and farewell


def restored(name: AttemptName, request: bytes | None = None) -> Attempt:
    placed = place(name, request=request)
    return Attempt(name, placed, decode_request(placed.body), 0.0)


def test_a_restarted_agent_adopts_what_lives_and_tells_what_ended() -> None:
    bench = Bench(join_n=7)
    lives, ended = restored(name_of("lives")), restored(name_of("ended"))
    ended.place = place(ended.name, (1,))
    ended.slots = [1]
    held = [(lives, "running", 0, ""), (ended, "exited", 3, "exit")]
    commands = bench.do(Restored(held, [Report("started", *ended.name)], [name_of("never")]))
    (join,) = of(SendJoin, commands)
    assert join.n == 8
    assert [(f.kind, f.job) for f in join.reports] == [
        ("started", "ended"),
        ("claimed", "lives"),  # may have died with the agent, unjournalled
        ("started", "lives"),
        ("exited", "ended"),
        ("withdrawn", "never"),
    ]
    assert [(h.job, h.phase) for h in join.holding] == [("lives", "running"), ("ended", "exited")]
    assert not of(EndAttempt, commands)
    bench.join()
    bench.do(Ended([(lives.name, 0, "exit")]))
    assert bench.kinds() == ["exited"]


def test_a_stray_keeps_the_worker_out_until_it_is_gone() -> None:
    bench = Bench()
    assert not of(SendJoin, bench.do(Restored([], [], [], strays=True)))
    bench.do(RollCall(1))
    assert not of(SendJoin, bench.log)
    assert of(SendJoin, bench.do(StraysOver()))


def test_a_stray_keeps_the_worker_out_also_where_a_supervisor_dies_meanwhile() -> None:
    bench = Bench()
    bench.do(Restored([], [], [], strays=True))
    assert not of(SendJoin, bench.do(Replaced("process")))
    assert of(SendJoin, bench.do(StraysOver()))


def test_a_dead_supervisor_takes_its_jobs_and_the_session(bench: Bench) -> None:
    name = bench.run()
    assert not of(SendJoin, bench.do(Replaced("process")))
    (join,) = of(SendJoin, bench.do(Ended([(name, -9, "lost")])))
    assert [(f.kind, f.code, f.detail) for f in join.reports] == [("exited", -9, "lost")]


def test_a_rank_that_waits_for_its_gang_does_not_keep_the_worker_out_when_the_supervisor_dies(bench: Bench) -> None:
    name = name_of("gang")
    bench.want(place(name, hold=True))
    (join,) = of(SendJoin, bench.do(Replaced("process")))
    assert ("withdrawn", "supervisor-died") in [(f.kind, f.detail) for f in join.reports]
    assert join.holding == []


def test_an_unproven_attempt_does_not_keep_the_worker_out(bench: Bench) -> None:
    name = bench.run()
    bench.do(Replaced("process"))
    (join,) = of(SendJoin, bench.do(Stuck([name])))
    assert [(f.kind, f.detail) for f in join.reports] == [("quarantined", "0")]
    assert [h.phase for h in join.holding] == ["ending"]


def both_lost_with_their_supervisor(bench: Bench) -> tuple[AttemptName, AttemptName]:
    """The next attempts of two jobs, in a new session, after the supervisor died under both."""
    one, two = bench.run(name_of("one"), slots=(0,)), bench.run(name_of("two"), slots=(1,))
    bench.do(Replaced("process"))
    bench.do(Ended([(one, -9, "lost"), (two, -9, "lost")]))
    bench.do(SeenFree([one, two]))
    bench.join("S2")
    bench.reports()
    return name_of("one", attempt=2, fence=20), name_of("two", attempt=2, fence=21)


def test_those_that_may_have_killed_the_supervisor_run_one_after_another(bench: Bench) -> None:
    one, two = both_lost_with_their_supervisor(bench)
    bench.want(place(one, (0,)), place(two, (1,)), place(name_of("third"), (2,)))
    assert sorted(name[1] for name in bench.attempts.held) == ["one", "third"]
    (refused,) = [report for report in bench.reports() if report.kind == "refused"]
    assert (refused.job, refused.detail) == ("two", "job one runs alone first: the supervisor died while both ran")
    bench.do(Started([one, name_of("third")]))
    bench.want(place((*two[:4], 25), (1,)))
    assert len(bench.attempts.held) == 2, "the first one has only begun"
    for _ in range(int(SUSPECT_S / RENEW_S) + 1):
        bench.now += RENEW_S
        (renewal,) = of(SendRenew, bench.do(Tick()))
        bench.do(Renewed(renewal.n, 1))
    two = (*two[:4], 31)
    bench.want(place(two, (1,)))
    assert two in bench.attempts.held, "the first one has run long enough beside others"


def test_a_suspect_that_ends_by_itself_is_none_any_more(bench: Bench) -> None:
    one, two = both_lost_with_their_supervisor(bench)
    bench.want(place(one, (0,)))
    bench.do(Started([one]))
    bench.do(Ended([(one, 0, "exit")]))
    bench.do(SeenFree([one]))
    bench.want(place(two, (1,)), place(name_of("one", attempt=3, fence=30), (0,)))
    assert sorted(name[1] for name in bench.attempts.held) == ["one", "two"]


def test_the_ranks_of_one_gang_are_no_suspects_of_each_other(bench: Bench) -> None:
    ranks = [name_of("gang", replica=rank) for rank in (0, 1)]
    bench.want(*(place(name, (name[2],), hold=True) for name in ranks))
    bench.want(*(Start(*name, "10.0.0.7", 29501, 2) for name in ranks))
    bench.do(Started(ranks))
    bench.do(Replaced("process"))
    bench.do(Ended([(name, -9, "lost") for name in ranks]))
    bench.do(SeenFree(ranks))
    bench.join("S2")
    again = [name_of("gang", replica=rank, attempt=2, fence=20) for rank in (0, 1)]
    bench.want(*(place(name, (name[2],), hold=True) for name in again))
    assert list(bench.attempts.held) == again


def test_a_worker_that_leaves_ends_all_tells_it_and_says_goodbye(bench: Bench) -> None:
    name = bench.run()
    assert of(EndAttempt, bench.do(Leave()))
    bench.want(place(name_of("late")))
    assert bench.attempts.dropped == {"no-claims-now": 1}
    bench.do(Ended([(name, -15, "end")]))
    bench.do(SeenFree([name]))
    assert bench.kinds() == ["exited", "freed"]
    assert of(SendGoodbye, bench.do(TurnOver()))
    assert bench.attempts.session.phase == "left"


def test_a_worker_that_leaves_within_a_time_says_so_and_lets_its_leader_end_what_it_holds(bench: Bench) -> None:
    name = bench.run()
    [renewal] = of(SendRenew, bench.do(Leave(30.0)))
    assert (renewal.leaving_s, bench.attempts.held[name].phase) == (30, "running")
    bench.want(place(name_of("late")))
    assert bench.attempts.dropped == {"no-claims-now": 1}
    bench.now += 12.5
    [renewal] = of(SendRenew, bench.do(Tick()))
    assert renewal.leaving_s == 17
    assert of(EndAttempt, bench.want(End(*name, "moved to replica 1")))
    bench.do(Ended([(name, -15, "end")]))
    bench.do(SeenFree([name]))
    assert bench.kinds() == ["exited", "freed"]
    assert of(SendGoodbye, bench.do(TurnOver()))


def test_a_worker_that_leaves_ends_all_itself_once_its_time_is_over(bench: Bench) -> None:
    bench.run()
    bench.do(Leave(3.0))
    assert bench.attempts.next_deadline_s() <= bench.now + 3.0
    bench.now += 3.0
    commands = bench.do(Tick())
    [end] = of(EndAttempt, commands)
    assert end.why == "fence", "that no leader has ended it before is not its own failure"
    assert of(SendRenew, commands)[0].leaving_s == 0
    assert not of(EndAttempt, bench.do(Tick())), "once"
    assert bench.attempts.session.phase == "live", "until the ends are reported"


def test_a_worker_that_leaves_ends_all_with_a_short_grace_if_it_is_told_again(bench: Bench) -> None:
    running, ending = bench.run(), bench.run(name_of("b", fence=11), slots=(1,))
    bench.do(Leave(30.0))
    bench.want(End(*ending, "moved to replica 1"))
    ends = of(EndAttempt, bench.do(Leave(grace_s_max=2.0)))
    assert [(end.attempt.name, end.grace_s, end.why) for end in ends] == [
        (running, 2.0, "fence"),
        (ending, 2.0, "fence"),
    ]


def test_what_a_leaving_worker_ends_has_its_own_grace_within_a_minute(bench: Bench) -> None:
    short, long = bench.run(), bench.run(name_of("b", fence=11), slots=(1,), request=body(run={"grace_s": 900.0}))
    bench.do(Leave(5.0))
    bench.want(End(*long, "w1 was told to end"))
    bench.now += 5
    ends = of(EndAttempt, bench.do(Tick()))
    assert [(end.attempt.name, end.grace_s) for end in ends] == [(short, 10.0), (long, 60.0)]


@pytest.mark.parametrize("asked", [True, False])
def test_what_a_leaving_worker_ends_unasked_is_a_loss_whatever_its_driver_says(bench: Bench, asked: bool) -> None:
    """A container that is just starting, or a driver that knows nothing of it."""
    name = bench.run()
    bench.do(Leave(5.0))
    if asked:
        bench.want(End(*name, "w1 was told to end"))
    bench.now += 5
    bench.do(Tick())
    bench.do(Ended([(name, -15, "end")]))
    (exited,) = bench.reports()
    assert exited.detail == ("end" if asked else "fence")


@pytest.mark.parametrize("why", ["session-over", "no answer"])
def test_a_worker_that_leaves_without_a_session_joins_to_say_so(bench: Bench, why: str) -> None:
    """Its leader is away at the signal, or goes away later."""
    keeps = bench.run(request=body(on_partition="keep"))
    if why == "session-over":
        bench.do(AnswerRefused("renew", 1, problem("session-over", "over")))
        bench.do(Leave(60.0))
    else:
        bench.do(Leave(60.0))
        bench.now += LEASE_S
        bench.do(Tick())
    assert (bench.phase, bench.attempts.held[keeps].phase) == ("joining", "running")
    bench.now += 5.0
    (renewal,) = of(SendRenew, bench.join("S2"))
    assert renewal.leaving_s == (55 if why == "session-over" else 60 - 5 - int(LEASE_S))
    bench.want(place(name_of("late")))
    assert bench.attempts.dropped["no-claims-now"] == 1
    bench.want(End(*keeps, "moved to replica 1"))
    bench.do(Ended([(keeps, -15, "end")]))
    bench.do(SeenFree([keeps]))
    assert bench.kinds() == ["exited", "freed"]
    assert of(SendGoodbye, bench.do(TurnOver()))


def test_a_worker_that_leaves_and_never_joins_ends_all_at_the_end_of_its_time(bench: Bench) -> None:
    keeps = bench.run(request=body(on_partition="keep"))
    bench.do(AnswerRefused("renew", 1, problem("session-over", "over")))
    bench.do(Leave(60.0))
    bench.now += 59
    bench.do(Tick())
    bench.do(TurnOver())
    assert bench.attempts.held[keeps].phase == "running"
    bench.now += 1
    (end,) = of(EndAttempt, bench.do(Tick()))
    bench.do(TurnOver())
    assert (end.why, end.grace_s) == ("fence", 10.0)
    assert bench.phase == "joining", "it waits for the end of its attempts"
    bench.do(Ended([(keeps, -15, "fence")]))
    bench.do(SeenFree([keeps]))
    bench.do(TurnOver())
    assert bench.phase == "left"
    assert bench.attempts.next_deadline_s() == NEVER_S


def test_a_worker_that_leaves_tries_to_tell_an_end_for_as_long_as_it_has(bench: Bench) -> None:
    name = bench.run()
    bench.do(Leave(3600.0))
    bench.now += LEASE_S + 1
    assert of(EndAttempt, bench.do(Tick())), "the lease is over"
    (join,) = of(SendJoin, bench.do(Ended([(name, -15, "fence")])))
    assert [report.kind for report in join.reports] == ["exited"]
    bench.do(SeenFree([name]))
    bench.do(TurnOver())
    assert bench.phase == "joining"
    bench.now += 3600.0
    bench.do(Tick())
    bench.do(TurnOver())
    assert bench.phase == "left"
    assert bench.attempts.next_deadline_s() == NEVER_S


@pytest.mark.parametrize("waits_for", ["its leader", "its device"])
def test_a_worker_that_leaves_waits_a_moment_once_nothing_of_it_runs(bench: Bench, waits_for: str) -> None:
    name = bench.run()
    bench.do(Leave())
    bench.do(Ended([(name, -15, "end")]))
    if waits_for == "its leader":
        bench.do(SeenFree([name]))
        bench.do(TurnOver())
    else:
        assert bench.kinds() == ["exited"]
    bench.now += LEAVE_S_MAX - 0.1
    bench.do(Tick())
    bench.do(TurnOver())
    assert bench.phase == "live"
    assert bench.attempts.next_deadline_s() <= bench.now + 0.1
    bench.now += 0.1
    bench.do(Tick())
    assert not of(SendGoodbye, bench.do(TurnOver()))
    assert bench.phase == "left"
    assert bench.attempts.next_deadline_s() == NEVER_S


def test_a_worker_that_leaves_stays_while_a_process_of_its_host_has_a_device(bench: Bench) -> None:
    (renewal,) = of(SendRenew, bench.do(Leave(30.0)))
    assert renewal.leaving_s == 30
    assert not of(SendGoodbye, bench.do(TurnOver(lends=True)))
    assert bench.phase == "live"
    assert of(SendGoodbye, bench.do(TurnOver()))
    assert bench.phase == "left"


def test_a_worker_that_leaves_and_has_nothing_to_tell_waits_for_no_leader(bench: Bench) -> None:
    bench.do(AnswerRefused("renew", 1, problem("session-over", "over")))
    bench.do(Leave(3600.0))
    bench.do(TurnOver())
    assert bench.phase == "left"


@pytest.mark.parametrize("given_up", ["its memory stays", "it cannot be ended"])
def test_a_worker_that_leaves_waits_for_nothing_that_it_has_given_up_and_says_no_goodbye(
    bench: Bench, given_up: str
) -> None:
    name = bench.run()
    bench.do(Leave(3600.0))
    bench.want(End(*name, "w1 was told to end"))
    if given_up == "it cannot be ended":
        bench.do(Stuck([name]))
    else:
        bench.do(Ended([(name, -15, "end")]))
        bench.now += 10
        bench.do(NotFree([(name, (0,))]))
    assert bench.kinds()[-1] == "quarantined"
    commands = bench.do(TurnOver())
    assert bench.phase == "left"
    assert not of(SendGoodbye, commands), "its id is not free yet"


def test_a_worker_that_is_told_to_leave_as_it_starts_takes_its_jobs_up_first(bench: Bench) -> None:
    bench = Bench()
    attempt = Attempt(name_of(), place(name_of()), decode_request(body()), bench.now)
    bench.do(Restored([(attempt, "running", 0, "")], [], [], strays=True))
    bench.do(Leave(60.0))
    bench.do(TurnOver())
    assert (bench.phase, attempt.phase) == ("restoring", "running")
    assert of(SendJoin, bench.do(StraysOver()))
    (renewal,) = of(SendRenew, bench.join())
    assert renewal.leaving_s == 60


def with_another_driver(bench: Bench) -> tuple[AttemptName, AttemptName]:
    """An attempt of the driver process and one of noop, both running."""
    noop = body(run={"driver": "noop", "argv": ["hang"]})
    return bench.run(name_of("process")), bench.run(name_of("other", fence=11), slots=(), request=noop)


def test_a_dead_supervisor_takes_the_jobs_of_its_driver_alone(bench: Bench) -> None:
    name, other = with_another_driver(bench)
    bench.want(place(name_of("gang", fence=12), (1,), hold=True))
    bench.do(Replaced("process"))
    (join,) = of(SendJoin, bench.do(Ended([(name, -9, "lost")])))
    assert [held.job for held in join.holding if held.phase == "running"] == ["other"]
    assert ("withdrawn", "gang") in [(report.kind, report.job) for report in join.reports]
    bench.join("S2")
    assert other in bench.attempts.held
    assert not bench.attempts.table._with_supervisor, "no end of another driver's attempt tells of the supervisor"


def test_the_replaced_engine_of_another_driver_leaves_the_jobs_of_the_supervisor(bench: Bench) -> None:
    name, other = with_another_driver(bench)
    bench.do(Replaced("noop"))
    (join,) = of(SendJoin, bench.do(Ended([(other, -9, "lost")])))
    assert [held.job for held in join.holding] == ["process"]
    assert name in bench.attempts.held


def test_what_a_new_session_is_to_take_over_ends_with_the_old_lease(bench: Bench) -> None:
    name, other = with_another_driver(bench)
    bench.do(Replaced("process"))
    bench.do(Ended([(name, -9, "lost")]))
    assert bench.attempts.next_deadline_s() < bench.now + LEASE_S
    bench.now += LEASE_S
    (end,) = of(EndAttempt, bench.do(Tick()))
    assert (end.attempt.name, end.why) == (other, "fence")


def test_all_must_be_over_where_the_session_was_over_before_the_supervisor_died(bench: Bench) -> None:
    name, other = with_another_driver(bench)
    bench.now += LEASE_S
    bench.do(Tick())
    bench.do(Replaced("process"))
    assert not of(SendJoin, bench.do(Ended([(name, -9, "lost")])))
    assert of(SendJoin, bench.do(Ended([(other, -15, "fence")])))
