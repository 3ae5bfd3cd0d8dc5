"""The worker's state machine against tables of its events and commands: attempts and their reports."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import FRAME_BYTES_MAX, decode_request, encode
from moorage.schemas.frames import End, Peaks, Place, Renewed, Report, ReportAck, Resized, RollCall, Start, Wanted
from moorage.schemas.gpu import Share
from moorage.worker.session.attempt_messages import (
    PHASES,
    Attempt,
    EndAttempt,
    Ended,
    Event,
    Forget,
    Log,
    Metered,
    NotFree,
    NotStarted,
    OverSeen,
    ProbeFree,
    Quarantine,
    Release,
    ResizeAttempts,
    SeenFree,
    SendJoin,
    SendRenew,
    SendReports,
    StartAttempts,
    Started,
    StartFailed,
    Stuck,
    Tick,
    TryClaim,
    TurnOver,
)
from moorage.worker.session.attempt_table import AttemptTable, Defect
from moorage.worker.session.report_outbox import END_WAIT_S, REPORTS_WAITING_MAX, START_WAIT_S
from tests.unit.worker.attempt_bench import LEASE_S, Bench, body, name_of, of, place

# -------------------------------------------------------------------------------- what counts as said


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"session": "S0"}, "other-session"),
        ({"session": ""}, "other-session"),
        ({"worker": "w2"}, "other-worker"),
        ({"epoch": 0}, "lower-reign"),
        ({"v": 2}, "other-version"),
    ],
)
def test_a_frame_that_is_not_for_this_session_changes_nothing(bench: Bench, fields: dict[str, Any], why: str) -> None:
    bench.want(place(name_of()), **fields)
    assert not bench.attempts.held
    assert bench.attempts.dropped == {why: 1}


def test_a_higher_term_silences_the_former_leader(bench: Bench) -> None:
    bench.do(Renewed(1, 7))
    bench.want(place(name_of()))
    assert bench.attempts.dropped == {"lower-reign": 1}
    (asked,) = of(SendRenew, bench.do(RollCall(6)))
    bench.do(Renewed(asked.n, 6))
    assert bench.attempts.dropped == {"lower-reign": 3}
    assert [log.code for log in of(Log, bench.log)] == ["lower-reign"]


# -------------------------------------------------------------------------------- a life of an attempt


def test_a_placement_is_claimed_started_exited_freed(bench: Bench) -> None:
    name = name_of()
    commands = bench.want(place(name, (0, 1)))
    assert [type(c) for c in commands] == [TryClaim, StartAttempts]
    bench.do(Started([name]))
    assert bench.kinds() == ["claimed", "started"]
    (probe,) = of(ProbeFree, bench.do(Ended([(name, 3, "exit")])))
    assert [m.name for m in probe.attempts] == [name]
    assert bench.reports() == [Report("exited", *name, 3, "exit")]
    (release,) = of(Release, bench.do(SeenFree([name])))
    assert release.attempts[0].name == name
    assert bench.kinds() == ["freed"]
    assert of(Forget, bench.log)[0].attempts[0].name == name
    assert not bench.attempts.held


def test_reports_that_are_true_at_once_leave_in_one_frame(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name, request=body(run={"driver": "noop"})))
    bench.do(Started([name]))
    bench.now += 1.5
    bench.do(Ended([(name, 3, "exit")]))
    assert [(report.kind, report.code, report.detail, report.ran_ms) for report in bench.reports()] == [
        ("ran", 3, "exit", 1500),
        ("freed", 0, "", 0),
    ]


def test_what_it_had_at_most_is_told_once_its_devices_are_free(bench: Bench) -> None:
    name = bench.run(slots=(0,))
    for mib in (100, 900, 300):
        bench.do(Metered([(name, 10, mib * 1000, mib)]))
    bench.do(Ended([(name, 0, "exit")], peaks={name: Peaks(memory_mib=50, cpu_ms=7)}))
    bench.do(SeenFree([name]))
    [freed] = [report for report in bench.reports() if report.kind == "freed"]
    assert freed.peaks == Peaks(50, -1, 900, 7)


@pytest.mark.parametrize(
    ("slots", "job", "code", "later_s", "is_told"),
    [
        ((0, 1), "b", 1, 60, True),
        ((0, 1), "b", -9, 0, True),
        ((0, 1), "b", 0, 0, False),  # it ended well
        ((0, 1), "b", 1, 61, False),  # long ago
        ((0,), "b", 1, 0, False),  # on another GPU
        ((0, 1), "greedy", 1, 0, False),
    ],
)
def test_a_job_that_fails_hears_that_a_sharer_of_its_gpu_held_too_much(
    bench: Bench, slots: tuple[int, ...], job: str, code: int, later_s: float, is_told: bool
) -> None:
    for at, (each, where) in enumerate({"b": slots, "greedy": (1,)}.items()):
        name = name_of(each, fence=10 + at)
        bench.want(msgspec.structs.replace(place(name, where), mode="time-slice"))
        bench.do(Started([name]))
    names = {name[1]: name for name in bench.attempts.held}
    bench.do(OverSeen([(names["greedy"], 1)]))
    bench.now += later_s
    bench.do(Ended([(names[job], code, "exit")]))
    behind = "; neighbour-over-memory: another job on GPU 1 held more memory than its share"
    assert bench.attempts.held[names[job]].why == f"exit{behind if is_told else ''}"


def test_an_attempt_without_devices_is_freed_with_its_exit(bench: Bench) -> None:
    name = bench.run(slots=())
    bench.do(Ended([(name, 0, "exit")]))
    assert bench.kinds() == ["exited", "freed"]


def test_a_start_that_this_host_had_no_room_for_is_refused_also_while_it_is_ended(bench: Bench) -> None:
    for name, ends in ((name_of(), False), (name_of("b", fence=11), True)):
        bench.want(place(name))
        if ends:
            bench.want(End(*name, "cancelled"))
        bench.do(NotStarted([(name, "no room")]))
        assert [(f.kind, f.detail) for f in bench.reports()][-1] == ("refused", "start-failed: no room")
        assert not bench.attempts.held
        bench.do(NotStarted([(name, "no room")]))
        assert not [each for each in bench.want(place(name)) if isinstance(each, StartAttempts)], "it is over"


def test_a_start_that_failed_ends_the_attempt(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name))
    bench.do(StartFailed([(name, 127, "no such file")]))
    bench.do(SeenFree([name]))
    reports = bench.reports()
    assert [(f.kind, f.code) for f in reports] == [("claimed", 0), ("exited", 127), ("freed", 0)]
    assert reports[1].detail == "start-failed: no such file"
    again = name_of("b", fence=11)
    bench.want(place(again))
    bench.do(StartFailed([(again, 126, "start-failed: a driver that says the word itself")]))
    assert (
        next(report for report in bench.reports() if report.job == "b" and report.kind == "exited").detail.count(
            "start"
        )
        == 1
    )


def test_a_busy_slot_is_refused_and_the_refusal_is_final(bench: Bench) -> None:
    name = name_of()
    bench.refuse[name] = "leased 0"
    bench.want(place(name))
    assert bench.reports() == [Report("refused", *name, 0, "leased 0")]
    bench.refuse.clear()
    assert not of(TryClaim, bench.want(place(name)))  # a refused attempt must not come alive later
    assert bench.kinds() == ["refused"]
    bench.want(place(name_of(fence=11, attempt=1)))
    assert bench.kinds() == ["claimed"]


@pytest.mark.parametrize(
    ("request_body", "word"),
    [
        (b"\x80", "run is missing"),
        (b"\x01", "malformed"),
        (body(run={"driver": "docker"}), "no driver docker"),
    ],
)
def test_a_body_that_cannot_run_here_is_refused_with_the_reason(bench: Bench, request_body: bytes, word: str) -> None:
    bench.want(place(name_of(), request=request_body))
    (report,) = bench.reports()
    assert report.kind == "refused"
    assert word in report.detail


# -------------------------------------------------------------------------------- level-triggered, both ways


def test_a_placement_of_what_is_held_changes_nothing(bench: Bench) -> None:
    name = bench.run()
    assert bench.want(place(name), place(name)) == []
    assert bench.kinds() == []


def test_a_placement_of_what_is_over_is_answered_with_its_end(bench: Bench) -> None:
    name = bench.run()
    bench.do(Ended([(name, 4, "exit")]))
    bench.do(SeenFree([name]))
    assert bench.want(place(name)) == []
    assert bench.kinds() == ["exited", "freed"]  # once: the answer was on its way
    bench.want(place(name))
    assert bench.reports() == [Report("exited", *name, 4, "exit"), Report("freed", *name)]


def test_an_older_fence_of_an_ended_replica_is_withdrawn(bench: Bench) -> None:
    bench.want(End(*name_of(fence=20), "cancelled"))
    assert bench.kinds() == ["withdrawn"]
    bench.want(place(name_of(fence=12)))
    assert bench.reports() == [Report("withdrawn", *name_of(fence=12))]
    assert not bench.attempts.held


def test_an_end_before_its_placement_wins(bench: Bench) -> None:
    name = name_of()
    bench.want(End(*name, "cancelled"))
    bench.want(place(name))
    assert bench.kinds() == ["withdrawn"]
    assert not bench.attempts.held


def test_an_end_and_a_placement_in_one_frame_mean_that_it_is_over(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name), End(*name, "cancelled"))
    assert bench.kinds() == ["withdrawn"]
    assert not bench.attempts.held


def test_an_end_of_what_is_claimed_releases_it(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name, hold=True))
    assert of(Release, bench.want(End(*name, "cancelled")))
    assert bench.kinds() == ["claimed", "withdrawn"]


def test_an_end_of_what_runs_uses_the_jobs_grace_unless_it_is_given_less(bench: Bench) -> None:
    name = bench.run()
    (end,) = of(EndAttempt, bench.want(End(*name, "cancelled")))
    assert (end.grace_s, end.why) == (10.0, "cancelled")
    assert not of(EndAttempt, bench.want(End(*name, "cancelled")))
    assert not of(EndAttempt, bench.want(End(*name, "cancelled", 30)))
    (sooner,) = of(EndAttempt, bench.want(End(*name, "cancelled", 1)))
    assert sooner.grace_s == 1
    bench.do(Ended([(name, -15, "end")]))
    assert bench.reports() == [Report("exited", *name, -15, "end")]


def test_a_start_that_was_overtaken_by_an_end_is_still_told(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name))
    assert of(EndAttempt, bench.want(End(*name, "cancelled")))
    bench.do(Started([name]))
    bench.do(Ended([(name, -15, "end")]))
    bench.do(SeenFree([name]))
    assert bench.kinds() == ["ran", "freed"]


# -------------------------------------------------------------------------------- gangs


def start(name: AttemptName) -> Start:
    return Start(*name, "10.0.0.1", 29500, 4)


def test_a_gangs_attempt_holds_until_it_is_started(bench: Bench) -> None:
    name = name_of(replica=1)
    assert not of(StartAttempts, bench.want(place(name, hold=True)))
    assert [held.phase for held in bench.attempts.table.held_list()] == ["claimed"]
    (command,) = of(StartAttempts, bench.want(start(name)))
    assert command.attempts[0].start == start(name)
    assert bench.want(start(name)) == []


def test_a_start_for_what_is_not_held_is_answered_once_and_kept(bench: Bench) -> None:
    name = name_of()
    bench.want(start(name))
    bench.want(start(name))
    assert bench.kinds() == ["not-held"]
    bench.want(place(name, hold=True))  # the other attempts have heard that this one is not there
    assert bench.kinds() == ["not-held"]
    assert not bench.attempts.held


def test_only_rank_0_of_a_gang_wants_a_port() -> None:
    bench = Bench()
    bench.join()
    gang = body(gpu={"scheduling": "gang", "distributed": {"master_port": 4000}}, replicas=2)
    names = [name_of(replica=0), name_of(replica=1)]
    bench.want(*(place(n, (n[2],), hold=True, request=gang) for n in names), place(name_of("b"), (2,)))
    assert [m.master_port_wanted for m in bench.attempts.held.values()] == [4000, 0, 0]


# -------------------------------------------------------------------------------- reports in flight


def test_a_frame_of_reports_is_cut_by_bytes(bench: Bench) -> None:
    """4,096 reports with the longest details are over the server's 1 MiB: such a frame would be sent again for ever."""
    reports = [Report("exited", *name_of(f"{'j' * 90}-{n}", fence=n), 1, "é" * 200) for n in range(4096)]
    bench.attempts.outbox.gathered = list(reports)
    sent: list[Report] = []
    while bench.attempts.outbox.gathered:
        (frame,) = (command.frame for command in of(SendReports, bench.do(TurnOver())))
        assert len(encode(frame, json=False)) <= FRAME_BYTES_MAX
        sent += frame.reports
        bench.do(ReportAck(frame.no, 1))
    assert sent == reports


def test_a_join_with_many_reports_fits_into_a_frame(bench: Bench) -> None:
    names = [name_of(f"{'j' * 26}-{n}", fence=n) for n in range(2048)]
    reports = [
        Report(kind, *name, 1, "é" * 200) for name in names for kind in ("claimed", "started", "exited", "freed")
    ]
    bench.attempts.outbox.gathered = reports
    bench.now += LEASE_S
    (join,) = of(SendJoin, bench.do(Tick()))
    assert [report.kind for report in join.reports] == ["exited", "freed"] * len(names)
    assert len(encode(join.reports, json=False)) <= FRAME_BYTES_MAX


def test_no_more_attempts_are_held_than_a_renewal_can_list(bench: Bench) -> None:
    for at in range(0, 6000, 500):
        names = [name_of(f"{'j' * 90}-{n}", fence=n + 1) for n in range(at, at + 500)]
        bench.want(*(place(name, ()) for name in names))
        while bench.reports():
            pass
    held = bench.attempts.table.held_list()
    assert 2000 < len(held) < 6000
    assert len(encode(held, json=False)) <= 512 * 1024


def test_one_frame_is_in_flight_and_the_next_carries_all_that_gathered(bench: Bench) -> None:
    names = [name_of(str(number)) for number in range(3)]
    bench.want(place(names[0]))
    bench.now += START_WAIT_S
    (first,) = of(SendReports, bench.do(TurnOver()))
    for slot, name in enumerate(names[1:], 1):
        bench.want(place(name, (slot,)))
        assert not of(SendReports, bench.do(TurnOver()))
    bench.now += START_WAIT_S
    bench.do(ReportAck(first.frame.no, 1))
    (second,) = of(SendReports, bench.do(TurnOver()))
    assert second.frame.no == first.frame.no + 1
    assert [report.job for report in second.frame.reports] == ["1", "2"]


def test_an_unanswered_frame_is_sent_again_with_the_same_number(bench: Bench) -> None:
    bench.want(place(name_of()))
    bench.now += START_WAIT_S
    (first,) = of(SendReports, bench.do(TurnOver()))
    waits: list[float] = []
    for _ in range(4):
        sent_s = bench.now
        bench.now = bench.attempts.outbox.resend_at_s
        bench.do(Renewed(bench.attempts.session.renew_n, 1))
        waits.append(bench.now - sent_s)
        (again,) = of(SendReports, bench.do(Tick()))
        assert again.again
        assert again.frame == first.frame
    assert waits == [1, 2, 4, 4]


def test_a_claim_leaves_with_the_news_of_its_start(bench: Bench) -> None:
    bench.want(place(name_of()))
    assert not of(SendReports, bench.do(TurnOver()))
    assert bench.attempts.next_deadline_s() == pytest.approx(bench.now + START_WAIT_S)
    bench.do(Started([name_of()]))
    assert not of(SendReports, bench.do(TurnOver()))
    assert bench.attempts.next_deadline_s() == pytest.approx(bench.now + END_WAIT_S)
    bench.now += END_WAIT_S
    bench.do(Tick())
    (sent,) = of(SendReports, bench.do(TurnOver()))
    assert [report.kind for report in sent.frame.reports] == ["claimed", "started"]
    assert bench.attempts.next_deadline_s() > bench.now + START_WAIT_S


def test_a_short_attempts_start_leaves_with_its_end(bench: Bench) -> None:
    bench.want(place(name_of()))
    bench.do(Started([name_of()]))
    assert not of(SendReports, bench.do(TurnOver()))
    bench.do(Ended([(name_of(), 0, "exit")]))
    (sent,) = of(SendReports, bench.do(TurnOver()))
    assert [report.kind for report in sent.frame.reports] == ["ran"]


def test_a_start_that_has_left_is_followed_by_the_exit_alone(bench: Bench) -> None:
    bench.want(place(name_of()))
    bench.do(Started([name_of()]))
    assert bench.kinds() == ["claimed", "started"]
    bench.do(Ended([(name_of(), 0, "exit")]))
    assert bench.kinds() == ["exited"]


def test_a_claim_that_has_left_is_followed_by_a_whole_run(bench: Bench) -> None:
    bench.want(place(name_of()))
    assert bench.kinds() == ["claimed"]
    bench.do(Started([name_of()]))
    bench.do(Ended([(name_of(), 0, "exit")]))
    assert bench.kinds() == ["ran"]


def test_a_start_waits_no_longer_than_its_claim_may(bench: Bench) -> None:
    bench.want(place(name_of()))
    began_s = bench.now
    bench.now += START_WAIT_S - END_WAIT_S / 2
    bench.do(Started([name_of()]))
    assert not of(SendReports, bench.do(TurnOver()))
    assert bench.attempts.next_deadline_s() == pytest.approx(began_s + START_WAIT_S)


def test_a_claim_whose_start_takes_its_time_is_told_alone(bench: Bench) -> None:
    bench.want(place(name_of()))
    began_s = bench.now
    bench.now += START_WAIT_S / 2
    bench.want(place(name_of("b"), (1,)))  # a second one does not lengthen the wait of the first
    assert not of(SendReports, bench.do(TurnOver()))
    bench.now = bench.attempts.next_deadline_s()
    assert bench.now == pytest.approx(began_s + START_WAIT_S)
    bench.do(Tick())
    (sent,) = of(SendReports, bench.do(TurnOver()))
    assert [report.kind for report in sent.frame.reports] == ["claimed", "claimed"]


def test_a_gangs_claim_waits_for_nothing_and_no_other_report_for_a_claim(bench: Bench) -> None:
    bench.want(place(name_of(), hold=True))
    (sent,) = of(SendReports, bench.do(TurnOver()))
    assert [report.kind for report in sent.frame.reports] == ["claimed"]
    bench.do(ReportAck(sent.frame.no, 1))
    bench.want(place(name_of("b"), (1,)))
    assert not of(SendReports, bench.do(TurnOver()))
    bench.want(End(*name_of("c"), why="end"))
    (sent,) = of(SendReports, bench.do(TurnOver()))
    assert {report.kind for report in sent.frame.reports} == {"claimed", "withdrawn"}


def test_claims_that_gathered_behind_a_frame_wait_no_longer_than_others(bench: Bench) -> None:
    bench.want(place(name_of()))
    bench.now += START_WAIT_S
    (first,) = of(SendReports, bench.do(TurnOver()))
    bench.want(place(name_of("b"), (1,)))
    bench.now += START_WAIT_S
    bench.do(ReportAck(first.frame.no, 1))
    (second,) = of(SendReports, bench.do(TurnOver()))
    assert [report.kind for report in second.frame.reports] == ["claimed"]


def test_a_duplicate_answer_is_dropped(bench: Bench) -> None:
    bench.want(place(name_of()))
    assert bench.kinds() == ["claimed"]
    bench.do(ReportAck(1, 1))
    assert bench.attempts.dropped == {"answer-not-awaited": 1}


def test_no_new_placement_while_the_reports_are_full(bench: Bench) -> None:
    bench.attempts.outbox.gathered = [Report("started", *name_of("x"))] * REPORTS_WAITING_MAX
    bench.want(place(name_of()))
    assert bench.attempts.dropped == {"facts-full": 1}
    assert not bench.attempts.held


# -------------------------------------------------------------------------------- seen to be free


def test_memory_that_stays_is_quarantined_and_freed_when_it_goes(bench: Bench) -> None:
    name = bench.run(slots=(0, 1, 2))
    bench.do(Ended([(name, 0, "exit")]))
    probes = 1
    bench.do(NotFree([(name, (0, 2))]))
    while not of(Quarantine, bench.log):
        assert probes < 100
        bench.now = bench.attempts.next_deadline_s()
        bench.do(Renewed(bench.attempts.session.renew_n, 1))
        if of(ProbeFree, bench.do(Tick())):
            probes += 1
            bench.do(NotFree([(name, (0, 2))]))
    assert of(Quarantine, bench.log)[0].slots == (0, 2)
    assert [(f.kind, f.detail) for f in bench.reports()] == [("exited", "exit"), ("quarantined", "0,2")]
    assert [held.phase for held in bench.attempts.table.held_list()] == ["exited"]
    bench.do(SeenFree([name]))
    assert bench.kinds() == ["freed"]


def test_what_cannot_be_ended_is_quarantined_until_it_is_over(bench: Bench) -> None:
    name = bench.run(slots=(1,))
    bench.want(End(*name, "cancelled"))
    bench.do(Stuck([name]))
    bench.do(Stuck([name]))
    assert [(f.kind, f.detail) for f in bench.reports()] == [("quarantined", "1")]
    bench.do(Ended([(name, -9, "end")]))
    bench.do(SeenFree([name]))
    assert bench.kinds() == ["exited", "freed"]


# -------------------------------------------------------------------------------- bounds


def test_forgotten_ends_are_still_over() -> None:
    bench = Bench(tombstones_max=4)
    bench.join()
    names = [name_of(f"j{number}", fence=10 + number) for number in range(12)]
    for name in names:
        bench.want(place(name, request=body(run={"driver": "noop"})))
        bench.do(Started([name]))
        bench.do(Ended([(name, 0, "exit")]))
        bench.reports()
    assert len(bench.attempts.table.tombstones) <= 5
    bench.want(place(names[0], request=body(run={"driver": "noop"})))
    assert bench.reports() == [Report("withdrawn", *names[0], 0, "forgotten")]
    bench.want(place(name_of("new", fence=40)))
    assert bench.kinds() == ["claimed"]


@pytest.mark.parametrize(
    "late",
    [
        Started([name_of()]),
        Ended([(name_of(), 0, "exit")]),
        StartFailed([(name_of(), 127, "x")]),
        NotStarted([(name_of(), "x")]),
        Stuck([name_of()]),
        SeenFree([name_of()]),
        NotFree([(name_of(), (0,))]),
    ],
)
def test_what_a_driver_says_of_an_unknown_attempt_changes_nothing(bench: Bench, late: Event) -> None:
    assert bench.do(late) == []
    assert bench.kinds() == []


# -------------------------------------------------------------------------------------------- another part of a device


def _shared(name: AttemptName, percent: int, n: int) -> Place:
    gpu = {"sharing": "time-slice", "share": {"compute_percent": percent, "memory_mib": 100 * percent}}
    return Place(*name, [0], "time-slice", False, body(gpu=gpu), resized=n)


def _resize(bench: Bench, *places: Place) -> list[Attempt]:
    commands = bench.do(Wanted("w1", bench.session, bench.epoch, resize=list(places)))
    return [attempt for command in of(ResizeAttempts, commands) for attempt in command.attempts]


def test_a_running_attempt_takes_another_part_and_the_renewal_shows_it(bench: Bench) -> None:
    name = name_of()
    bench.want(_shared(name, 20, 0))
    bench.do(Started([name]))
    (attempt,) = _resize(bench, _shared(name, 40, 7))
    gpu = attempt.request.gpu
    assert gpu is not None
    assert gpu.share == Share(4_000, 40)
    assert attempt.place.body == _shared(name, 40, 7).body, "the journal gets it: the next agent knows the part"
    assert bench.attempts.table.resized_list() == [Resized(*name, 7)]
    (renewal,) = of(SendRenew, bench.do(RollCall(1)))
    assert renewal.resized == [Resized(*name, 7)]
    assert not _resize(bench, _shared(name, 40, 7)), "sent again"
    assert not _resize(bench, _shared(name, 20, 6)), "an older order that comes late"


def test_an_attempt_that_is_starting_takes_its_part_once_it_runs(bench: Bench) -> None:
    name = name_of()
    bench.want(_shared(name, 20, 0))
    assert not _resize(bench, _shared(name, 40, 7))
    assert not bench.attempts.table.resized_list(), "so the leader sends it again"
    bench.do(Started([name]))
    assert _resize(bench, _shared(name, 40, 7))


def test_another_part_starts_nothing_that_is_not_held(bench: Bench) -> None:
    assert not _resize(bench, _shared(name_of(), 40, 7))
    assert not bench.attempts.held
    name = bench.run()
    bench.do(Ended([(name, 0, "exit")]))
    assert not _resize(bench, _shared(name, 40, 7))


def test_a_part_that_cannot_be_read_changes_nothing(bench: Bench) -> None:
    name = bench.run()
    assert not _resize(bench, msgspec.structs.replace(_shared(name, 40, 7), body=b"{"))
    assert bench.attempts.held[name].place.resized == 0


def test_an_attempt_takes_the_steps_of_the_table_and_no_others() -> None:
    for before, after in PHASES.items():
        for phase in PHASES:
            attempt = Attempt(name_of(), place(name_of()), decode_request(body()), 0.0)
            attempt.phase = before
            if phase in after:
                AttemptTable._enter(attempt, phase)
                assert attempt.phase == phase
            else:
                with pytest.raises(Defect, match=f"no step from {before} to {phase}"):
                    AttemptTable._enter(attempt, phase)
