"""The worker's state machine against tables of what it hears and what it must say."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from moorage.schemas.codec import decode_request, encode
from moorage.schemas.errors import problem
from moorage.schemas.frames import End, Fact, FactAck, Joined, Place, Renewed, RollCall, Start, Wanted
from moorage.worker.fact_outbox import FACTS_WAITING_MAX, START_WAIT_S
from moorage.worker.leases.session import NEVER_S
from moorage.worker.member_messages import (
    AnswerRefused,
    Claims,
    Command,
    Ended,
    EndMember,
    Forget,
    Leave,
    Log,
    Member,
    MemberName,
    NotFree,
    ProbeFree,
    Quarantine,
    Release,
    Restored,
    SayHello,
    SeenFree,
    SendFacts,
    SendGoodbye,
    SendJoin,
    SendRenew,
    SetFence,
    Started,
    StartFailed,
    StartMembers,
    StraysOver,
    Stuck,
    SupervisorReplaced,
    Tick,
    Traits,
    TryClaim,
    TurnOver,
)
from moorage.worker.members import Members

C = TypeVar("C")

RENEW_S, LEASE_S, GRACE_S = 2.0, 20.0, 5.0


def body(**fields: Any) -> bytes:
    run = {"driver": "process", "argv": ["true"], "grace_s": 10.0} | fields.pop("run", {})
    return encode({"gpu": {}, "run": run, **fields})


def name_of(job: str = "a", replica: int = 0, attempt: int = 1, fence: int = 10) -> MemberName:
    return ("acme", job, replica, attempt, fence)


def place(
    name: MemberName, slots: tuple[int, ...] = (0,), *, hold: bool = False, request: bytes | None = None
) -> Place:
    return Place(*name, list(slots), "exclusive" if slots else "none", hold, body() if request is None else request)


class Bench:
    """A state machine with a pool that grants what is not in `refuse`, and a journal of what left it."""

    def __init__(self, *, tombstones_max: int = 100, join_n: int = 0) -> None:
        drivers = {"process": Traits(), "noop": Traits(uses_devices=False, remembers=False)}
        self.members = Members("w1", drivers, join_n=join_n, tombstones_max=tombstones_max, free_wait_s=10)
        self.now = 100.0
        self.refuse: dict[MemberName, str] = {}
        self.log: list[Command] = []
        self.session = ""
        self.reign = 1

    def do(self, event: object) -> list[Command]:
        commands = list(self.members.handle(event, self.now))
        for command in list(commands):
            if isinstance(command, TryClaim):
                granted = [(member, "") for member in command.members if member.name not in self.refuse]
                refused = [(m, self.refuse[m.name]) for m in command.members if m.name in self.refuse]
                commands += self.do_quietly(Claims(granted, refused))
        self.members.validate()
        self.log += commands
        return commands

    def do_quietly(self, event: object) -> list[Command]:
        return self.members.handle(event, self.now)

    def join(self, session: str = "S1", *, reign: int = 1, ledger: str = "L") -> list[Command]:
        if self.members.session.phase == "restoring":
            self.do(Restored([], [], []))
        self.session, self.reign = session, reign
        commands = self.do(Joined(session, self.members.session.join_n, reign, RENEW_S, LEASE_S, GRACE_S, ledger))
        self.now += 1
        return commands

    def want(self, *items: Place | Start | End, session: str | None = None, **fields: Any) -> list[Command]:
        frame = Wanted(
            fields.get("worker", "w1"),
            self.session if session is None else session,
            fields.get("reign", self.reign),
            fields.get("v", 1),
            [item for item in items if isinstance(item, Place)],
            [item for item in items if isinstance(item, Start)],
            [item for item in items if isinstance(item, End)],
        )
        return self.do(frame)

    def facts(self) -> list[Fact]:
        """What leaves at the end of the turn, answered at once; claims alone leave a moment later."""
        if self.members.outbox.due_s < NEVER_S:
            self.now = max(self.now, self.members.outbox.due_s)
        sent = of(SendFacts, self.do(TurnOver()))
        if not sent:
            return []
        self.do(FactAck(sent[0].frame.no, self.reign))
        return sent[0].frame.facts

    def kinds(self) -> list[str]:
        return [fact.kind for fact in self.facts()]

    def run(self, name: MemberName | None = None, **fields: Any) -> MemberName:
        """A member that runs, all facts of it answered."""
        name = name or name_of()
        self.want(place(name, **fields))
        self.do(Started([name]))
        assert self.kinds() == ["claimed", "started"]
        return name


def of(kind: type[C], commands: list[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


@pytest.fixture
def bench() -> Bench:
    found = Bench()
    found.join()
    return found


# -------------------------------------------------------------------------------- what counts as said


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"session": "S0"}, "other-session"),
        ({"session": ""}, "other-session"),
        ({"worker": "w2"}, "other-worker"),
        ({"reign": 0}, "lower-reign"),
        ({"v": 2}, "other-version"),
    ],
)
def test_a_frame_that_is_not_for_this_session_changes_nothing(bench: Bench, fields: dict[str, Any], why: str) -> None:
    bench.want(place(name_of()), **fields)
    assert not bench.members.held
    assert bench.members.dropped == {why: 1}


def test_a_higher_reign_silences_the_former_leader(bench: Bench) -> None:
    bench.want(reign=7)
    bench.want(place(name_of()))
    assert bench.members.dropped == {"lower-reign": 1}
    bench.do(RollCall(6))
    bench.do(Renewed(1, 6))
    assert bench.members.dropped == {"lower-reign": 3}


# -------------------------------------------------------------------------------- a life of a member


def test_a_placement_is_claimed_started_exited_freed(bench: Bench) -> None:
    name = name_of()
    commands = bench.want(place(name, (0, 1)))
    assert [type(c) for c in commands] == [TryClaim, StartMembers]
    bench.do(Started([name]))
    assert bench.kinds() == ["claimed", "started"]
    (probe,) = of(ProbeFree, bench.do(Ended([(name, 3, "exit")])))
    assert [m.name for m in probe.members] == [name]
    assert bench.facts() == [Fact("exited", *name, 3, "exit")]
    (release,) = of(Release, bench.do(SeenFree([name])))
    assert release.members[0].name == name
    assert bench.kinds() == ["freed"]
    assert of(Forget, bench.log)[0].members[0].name == name
    assert not bench.members.held


def test_facts_that_are_true_at_once_leave_in_one_frame(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name, request=body(run={"driver": "noop"})))
    bench.do(Started([name]))
    bench.do(Ended([(name, 0, "exit")]))
    assert bench.kinds() == ["claimed", "started", "exited", "freed"]


def test_a_member_without_devices_is_freed_with_its_exit(bench: Bench) -> None:
    name = bench.run(slots=())
    bench.do(Ended([(name, 0, "exit")]))
    assert bench.kinds() == ["exited", "freed"]


def test_a_start_that_failed_ends_the_attempt(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name))
    bench.do(StartFailed([(name, 127, "start-failed: no such file")]))
    bench.do(SeenFree([name]))
    facts = bench.facts()
    assert [(f.kind, f.code) for f in facts] == [("claimed", 0), ("exited", 127), ("freed", 0)]
    assert facts[1].detail.startswith("start-failed")


def test_a_busy_slot_is_refused_and_the_refusal_is_final(bench: Bench) -> None:
    name = name_of()
    bench.refuse[name] = "leased 0"
    bench.want(place(name))
    assert bench.facts() == [Fact("refused", *name, 0, "leased 0")]
    bench.refuse.clear()
    assert not of(TryClaim, bench.want(place(name)))  # a refused member must not come alive later
    assert bench.kinds() == ["refused"]
    bench.want(place(name_of(fence=11, attempt=1)))
    assert bench.kinds() == ["claimed"]


@pytest.mark.parametrize(
    ("request_body", "word"),
    [
        (b"\x80", "run is missing"),
        (b"\x01", "object"),
        (body(run={"driver": "docker"}), "no driver docker"),
    ],
)
def test_a_body_that_cannot_run_here_is_refused_with_the_reason(bench: Bench, request_body: bytes, word: str) -> None:
    bench.want(place(name_of(), request=request_body))
    (fact,) = bench.facts()
    assert fact.kind == "refused"
    assert word in fact.detail


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
    assert bench.facts() == [Fact("exited", *name, 4, "exit"), Fact("freed", *name)]


def test_an_older_fence_of_an_ended_replica_is_withdrawn(bench: Bench) -> None:
    bench.want(End(*name_of(fence=20), "cancelled"))
    assert bench.kinds() == ["withdrawn"]
    bench.want(place(name_of(fence=12)))
    assert bench.facts() == [Fact("withdrawn", *name_of(fence=12))]
    assert not bench.members.held


def test_an_end_before_its_placement_wins(bench: Bench) -> None:
    name = name_of()
    bench.want(End(*name, "cancelled"))
    bench.want(place(name))
    assert bench.kinds() == ["withdrawn"]
    assert not bench.members.held


def test_an_end_and_a_placement_in_one_frame_mean_that_it_is_over(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name), End(*name, "cancelled"))
    assert bench.kinds() == ["withdrawn"]
    assert not bench.members.held


def test_an_end_of_what_is_claimed_releases_it(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name, hold=True))
    assert of(Release, bench.want(End(*name, "cancelled")))
    assert bench.kinds() == ["claimed", "withdrawn"]


def test_an_end_of_what_runs_uses_the_jobs_grace_unless_it_is_given_less(bench: Bench) -> None:
    name = bench.run()
    (end,) = of(EndMember, bench.want(End(*name, "cancelled")))
    assert (end.grace_s, end.why) == (10.0, "cancelled")
    assert not of(EndMember, bench.want(End(*name, "cancelled")))
    assert not of(EndMember, bench.want(End(*name, "cancelled", 30)))
    (sooner,) = of(EndMember, bench.want(End(*name, "cancelled", 1)))
    assert sooner.grace_s == 1
    bench.do(Ended([(name, -15, "end")]))
    assert bench.facts() == [Fact("exited", *name, -15, "end")]


def test_a_start_that_was_overtaken_by_an_end_is_still_told(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name))
    assert of(EndMember, bench.want(End(*name, "cancelled")))
    bench.do(Started([name]))
    bench.do(Ended([(name, -15, "end")]))
    bench.do(SeenFree([name]))
    assert bench.kinds() == ["claimed", "started", "exited", "freed"]


# -------------------------------------------------------------------------------- gangs


def start(name: MemberName) -> Start:
    return Start(*name, "10.0.0.1", 29500, 4)


def test_a_gangs_member_holds_until_it_is_started(bench: Bench) -> None:
    name = name_of(replica=1)
    assert not of(StartMembers, bench.want(place(name, hold=True)))
    assert [held.phase for held in bench.members.table.held_list()] == ["claimed"]
    (command,) = of(StartMembers, bench.want(start(name)))
    assert command.members[0].start == start(name)
    assert bench.want(start(name)) == []


def test_a_start_for_what_is_not_held_is_answered_once_and_kept(bench: Bench) -> None:
    name = name_of()
    bench.want(start(name))
    bench.want(start(name))
    assert bench.kinds() == ["not-held"]
    bench.want(place(name, hold=True))  # the other members have heard that this one is not there
    assert bench.kinds() == ["not-held"]
    assert not bench.members.held


def test_only_rank_0_of_a_gang_wants_a_port() -> None:
    bench = Bench()
    bench.join()
    gang = body(gpu={"scheduling": "gang", "distributed": {"master_port": 4000}}, replicas=2)
    names = [name_of(replica=0), name_of(replica=1)]
    bench.want(*(place(n, (n[2],), hold=True, request=gang) for n in names), place(name_of("b"), (2,)))
    assert [m.master_port_wanted for m in bench.members.held.values()] == [4000, 0, 0]


# -------------------------------------------------------------------------------- facts in flight


def test_one_frame_is_in_flight_and_the_next_carries_all_that_gathered(bench: Bench) -> None:
    names = [name_of(str(number)) for number in range(3)]
    bench.want(place(names[0]))
    bench.now += START_WAIT_S
    (first,) = of(SendFacts, bench.do(TurnOver()))
    for slot, name in enumerate(names[1:], 1):
        bench.want(place(name, (slot,)))
        assert not of(SendFacts, bench.do(TurnOver()))
    bench.now += START_WAIT_S
    bench.do(FactAck(first.frame.no, 1))
    (second,) = of(SendFacts, bench.do(TurnOver()))
    assert second.frame.no == first.frame.no + 1
    assert [fact.job for fact in second.frame.facts] == ["1", "2"]


def test_an_unanswered_frame_is_sent_again_with_the_same_number(bench: Bench) -> None:
    bench.want(place(name_of()))
    bench.now += START_WAIT_S
    (first,) = of(SendFacts, bench.do(TurnOver()))
    waits: list[float] = []
    for _ in range(4):
        sent_s = bench.now
        bench.now = bench.members.outbox.resend_at_s
        bench.do(Renewed(bench.members.session.renew_n, 1))
        waits.append(bench.now - sent_s)
        (again,) = of(SendFacts, bench.do(Tick()))
        assert again.again
        assert again.frame == first.frame
    assert waits == [1, 2, 4, 4]


def test_a_claim_leaves_with_the_news_of_its_start(bench: Bench) -> None:
    bench.want(place(name_of()))
    assert not of(SendFacts, bench.do(TurnOver()))
    assert bench.members.next_deadline_s() == pytest.approx(bench.now + START_WAIT_S)
    bench.do(Started([name_of()]))
    (sent,) = of(SendFacts, bench.do(TurnOver()))
    assert [fact.kind for fact in sent.frame.facts] == ["claimed", "started"]
    assert bench.members.next_deadline_s() > bench.now + START_WAIT_S


def test_a_claim_whose_start_takes_its_time_is_told_alone(bench: Bench) -> None:
    bench.want(place(name_of()))
    began_s = bench.now
    bench.now += START_WAIT_S / 2
    bench.want(place(name_of("b"), (1,)))  # a second one does not lengthen the wait of the first
    assert not of(SendFacts, bench.do(TurnOver()))
    bench.now = bench.members.next_deadline_s()
    assert bench.now == pytest.approx(began_s + START_WAIT_S)
    bench.do(Tick())
    (sent,) = of(SendFacts, bench.do(TurnOver()))
    assert [fact.kind for fact in sent.frame.facts] == ["claimed", "claimed"]


def test_a_gangs_claim_waits_for_nothing_and_no_other_fact_for_a_claim(bench: Bench) -> None:
    bench.want(place(name_of(), hold=True))
    (sent,) = of(SendFacts, bench.do(TurnOver()))
    assert [fact.kind for fact in sent.frame.facts] == ["claimed"]
    bench.do(FactAck(sent.frame.no, 1))
    bench.want(place(name_of("b"), (1,)))
    assert not of(SendFacts, bench.do(TurnOver()))
    bench.want(End(*name_of("c"), why="end"))
    (sent,) = of(SendFacts, bench.do(TurnOver()))
    assert {fact.kind for fact in sent.frame.facts} == {"claimed", "withdrawn"}


def test_claims_that_gathered_behind_a_frame_wait_no_longer_than_others(bench: Bench) -> None:
    bench.want(place(name_of()))
    bench.do(Started([name_of()]))
    (first,) = of(SendFacts, bench.do(TurnOver()))
    bench.want(place(name_of("b"), (1,)))
    bench.now += START_WAIT_S
    bench.do(FactAck(first.frame.no, 1))
    (second,) = of(SendFacts, bench.do(TurnOver()))
    assert [fact.kind for fact in second.frame.facts] == ["claimed"]


def test_a_duplicate_answer_is_dropped(bench: Bench) -> None:
    bench.want(place(name_of()))
    assert bench.kinds() == ["claimed"]
    bench.do(FactAck(1, 1))
    assert bench.members.dropped == {"answer-not-awaited": 1}


def test_no_new_placement_while_the_facts_are_full(bench: Bench) -> None:
    bench.members.outbox.gathered = [Fact("started", *name_of("x"))] * FACTS_WAITING_MAX
    bench.want(place(name_of()))
    assert bench.members.dropped == {"facts-full": 1}
    assert not bench.members.held


# -------------------------------------------------------------------------------- seen to be free


def test_memory_that_stays_is_quarantined_and_freed_when_it_goes(bench: Bench) -> None:
    name = bench.run(slots=(0, 1, 2))
    bench.do(Ended([(name, 0, "exit")]))
    probes = 1
    bench.do(NotFree([(name, (0, 2))]))
    while not of(Quarantine, bench.log):
        assert probes < 100
        bench.now = bench.members.next_deadline_s()
        bench.do(Renewed(bench.members.session.renew_n, 1))
        if of(ProbeFree, bench.do(Tick())):
            probes += 1
            bench.do(NotFree([(name, (0, 2))]))
    assert of(Quarantine, bench.log)[0].slots == (0, 2)
    assert [(f.kind, f.detail) for f in bench.facts()] == [("exited", "exit"), ("quarantined", "0,2")]
    assert [held.phase for held in bench.members.table.held_list()] == ["exited"]
    bench.do(SeenFree([name]))
    assert bench.kinds() == ["freed"]


def test_what_cannot_be_ended_is_quarantined_until_it_is_over(bench: Bench) -> None:
    name = bench.run(slots=(1,))
    bench.want(End(*name, "cancelled"))
    bench.do(Stuck([name]))
    bench.do(Stuck([name]))
    assert [(f.kind, f.detail) for f in bench.facts()] == [("quarantined", "1")]
    bench.do(Ended([(name, -9, "end")]))
    bench.do(SeenFree([name]))
    assert bench.kinds() == ["exited", "freed"]


# -------------------------------------------------------------------------------- the lease session


def test_the_lease_counts_from_when_the_answered_renewal_was_sent(bench: Bench) -> None:
    bench.now = 102.0
    (renew,) = of(SendRenew, bench.do(Tick()))
    bench.now = 109.0
    (fence,) = of(SetFence, bench.do(Renewed(renew.n, 1)))
    assert fence == SetFence(102.0 + LEASE_S, GRACE_S)


def test_an_older_answer_after_a_newer_one_does_not_move_the_lease(bench: Bench) -> None:
    numbers = []
    for second in (102.0, 104.0):
        bench.now = second
        numbers += [command.n for command in of(SendRenew, bench.do(Tick()))]
    bench.do(Renewed(numbers[1], 1))
    assert not of(SetFence, bench.do(Renewed(numbers[0], 1)))
    assert bench.members.session.over_at_s == 104.0 + LEASE_S


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
    assert bench.members.dropped == {"no-claims-now": 1}
    assert of(EndMember, bench.want(End(*name_of(), "x"))) == []
    assert bench.kinds() == ["withdrawn"]


def test_at_the_end_of_the_lease_everything_ends_but_what_may_stay(bench: Bench) -> None:
    runs = bench.run()
    keeps = bench.run(name_of("k"), slots=(1,), request=body(on_partition="keep"))
    held = name_of("h")
    bench.want(place(held, (2,), hold=True))
    bench.now += LEASE_S
    commands = bench.do(Tick())
    (end,) = of(EndMember, commands)
    assert (end.member.name, end.grace_s, end.why) == (runs, GRACE_S, "fence")
    assert [m.name for m in of(Release, commands)[0].members] == [held]
    assert not of(SendJoin, commands)  # clearing is not proven yet
    (join,) = of(SendJoin, bench.do(Ended([(runs, -9, "fence")])))
    assert join.n == 2
    assert [(f.kind, f.job) for f in join.facts] == [("claimed", "h"), ("withdrawn", "h"), ("exited", "a")]
    assert [(h.job, h.phase) for h in join.holding] == [("a", "exited"), ("k", "running")]
    assert keeps in bench.members.held


def test_what_is_heard_after_the_lease_ran_out_is_stale(bench: Bench) -> None:
    """A stopped agent wakes up and finds a placement in its socket (H8, H29)."""
    bench.now += LEASE_S + 1
    commands = bench.want(place(name_of()))
    assert not bench.members.held
    assert of(SendJoin, commands)
    assert bench.members.dropped == {"other-session": 1}


def test_a_leader_that_says_the_session_is_over_ends_it(bench: Bench) -> None:
    name = bench.run()
    commands = bench.do(AnswerRefused("renew", 1, problem("session-over", "over")))
    assert of(EndMember, commands)[0].member.name == name
    assert bench.members.session.phase == "clearing"


def test_a_leader_that_does_not_lead_is_asked_again(bench: Bench) -> None:
    assert bench.do(AnswerRefused("renew", 1, problem("not-leading", "no"))) == []
    assert bench.members.session.phase == "live"


def test_a_gap_leads_to_a_new_session_that_carries_on(bench: Bench) -> None:
    name = bench.run()
    commands = bench.do(AnswerRefused("fact", 3, problem("gap", "frame 1 is missing")))
    assert not of(EndMember, commands)
    assert [held.job for held in of(SendJoin, commands)[0].holding] == [name[1]]


def test_facts_that_nobody_answered_travel_with_the_join_in_order(bench: Bench) -> None:
    name = name_of()
    bench.want(place(name))
    bench.do(TurnOver())  # in flight, unanswered
    bench.do(Started([name]))  # gathered
    bench.now += LEASE_S
    bench.do(Tick())
    (join,) = of(SendJoin, bench.do(Ended([(name, -9, "fence")])))
    assert [f.kind for f in join.facts] == ["claimed", "started", "exited"]
    bench.join("S2")
    bench.do(SeenFree([name]))
    (sent,) = of(SendFacts, bench.do(TurnOver()))
    assert (sent.frame.session, sent.frame.no, [f.kind for f in sent.frame.facts]) == ("S2", 1, ["freed"])


# -------------------------------------------------------------------------------- joining


def test_a_join_is_repeated_word_for_word_and_then_asked_anew() -> None:
    bench = Bench(join_n=41)
    (first,) = of(SendJoin, bench.do(Restored([], [Fact("started", *name_of())], [])))
    assert (first.n, first.again) == (42, False)
    seen = []
    while bench.now < 120:
        bench.now = bench.members.next_deadline_s()
        seen += [(command.n, command.again) for command in of(SendJoin, bench.do(Tick()))]
    assert (42, True) in seen
    assert (43, False) in seen
    assert [again for n, again in seen if n == 42] == [True] * len([n for n, _ in seen if n == 42])
    assert [f.kind for f in of(SendJoin, bench.log)[-1].facts] == ["started"]  # never lost on the way


def test_an_answer_to_an_earlier_join_is_dropped() -> None:
    bench = Bench(join_n=5)
    bench.do(Restored([], [], []))
    bench.do(Joined("S", 5, 1, RENEW_S, LEASE_S, GRACE_S, "L"))
    assert bench.members.session.phase == "joining"


@pytest.mark.parametrize("code", ["worker-id-in-use", "stale-join", "gpu-lent-twice"])
def test_a_refused_join_is_logged_once_and_tried_with_patience(code: str) -> None:
    bench = Bench()
    bench.do(Restored([], [], []))
    waits = []
    for _ in range(6):
        bench.do(AnswerRefused("join", bench.members.session.join_n, problem(code, "no", allowed="> 70")))
        waits.append(bench.members.next_deadline_s() - bench.now)
        bench.now = bench.members.next_deadline_s()
        bench.do(Tick())
    assert [log.code for log in of(Log, bench.log)] == [code]
    assert waits == sorted(waits)
    assert waits[-1] == 30
    assert bench.members.session.join_n == (76 if code == "stale-join" else 7)


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
    bench.do(AnswerRefused("join", bench.members.session.join_n, told))
    (line,) = of(Log, bench.log)
    assert line.text == (
        "this worker may not join: w0 lends it; at $.hello.gpu_pool[1].uuid, found GPU-1, allowed another; stop it"
    )


def test_another_ledger_is_not_trusted_with_what_runs_here(bench: Bench) -> None:
    name = bench.run(slots=(0,), request=body(on_partition="keep"))
    bench.now += LEASE_S
    bench.do(Tick())
    bench.join("S2", ledger="M")
    assert bench.members.session.phase == "joining"
    assert "another-ledger" in [log.code for log in of(Log, bench.log)]
    bench.do(Ended([(name, 0, "exit")]))
    bench.do(SeenFree([name]))


def test_a_new_ledger_is_taken_up_by_a_worker_that_holds_nothing(bench: Bench) -> None:
    bench.want(reign=9)
    bench.now += LEASE_S
    bench.do(Tick())
    bench.join("S2", reign=1, ledger="M")
    assert bench.members.session.phase == "live"
    assert bench.members.session.reign == 1


def test_a_roll_call_is_answered_with_hello_and_a_renewal(bench: Bench) -> None:
    commands = bench.do(RollCall(3))
    assert [type(c) for c in commands] == [SayHello, SendRenew]


def test_a_roll_call_of_a_false_reign_silences_nobody(bench: Bench) -> None:
    """It names no session, so anybody who reaches its subject may have said it: the true leader is still heard."""
    bench.do(RollCall(2**53))
    assert bench.members.session.reign == 1
    bench.do(Renewed(1, 1))
    assert bench.want(place(name_of()))
    assert bench.members.dropped == {}


def test_a_roll_call_hurries_the_facts_that_the_old_leader_did_not_answer(bench: Bench) -> None:
    bench.want(place(name_of()))
    sent = of(SendFacts, bench.do(TurnOver()))
    assert not of(SendFacts, bench.do(Tick())), "its answer is not overdue yet"
    bench.do(RollCall(3))
    again = of(SendFacts, bench.do(Tick()))
    assert [(c.frame, c.again) for c in again] == [(c.frame, True) for c in sent]


# -------------------------------------------------------------------------------- restarts and farewell


def restored(name: MemberName, request: bytes | None = None) -> Member:
    placed = place(name, request=request)
    return Member(name, placed, decode_request(placed.body), 0.0)


def test_a_restarted_agent_adopts_what_lives_and_tells_what_ended() -> None:
    bench = Bench(join_n=7)
    lives, ended = restored(name_of("lives")), restored(name_of("ended"))
    ended.place = place(ended.name, (1,))
    ended.slots = [1]
    held = [(lives, "running", 0, ""), (ended, "exited", 3, "exit")]
    commands = bench.do(Restored(held, [Fact("started", *ended.name)], [name_of("never")]))
    (join,) = of(SendJoin, commands)
    assert join.n == 8
    assert [(f.kind, f.job) for f in join.facts] == [
        ("started", "ended"),
        ("claimed", "lives"),  # may have died with the agent, unjournalled
        ("started", "lives"),
        ("exited", "ended"),
        ("withdrawn", "never"),
    ]
    assert [(h.job, h.phase) for h in join.holding] == [("lives", "running"), ("ended", "exited")]
    assert not of(EndMember, commands)
    bench.join()
    bench.do(Ended([(lives.name, 0, "exit")]))
    assert bench.kinds() == ["exited"]


def test_a_stray_keeps_the_worker_out_until_it_is_gone() -> None:
    bench = Bench()
    assert not of(SendJoin, bench.do(Restored([], [], [], strays=True)))
    bench.do(RollCall(1))
    assert not of(SendJoin, bench.log)
    assert of(SendJoin, bench.do(StraysOver()))


def test_a_dead_supervisor_takes_its_jobs_and_the_session(bench: Bench) -> None:
    name = bench.run()
    assert not of(SendJoin, bench.do(SupervisorReplaced()))
    (join,) = of(SendJoin, bench.do(Ended([(name, -9, "lost")])))
    assert [(f.kind, f.code, f.detail) for f in join.facts] == [("exited", -9, "lost")]


def test_a_rank_that_waits_for_its_gang_does_not_keep_the_worker_out_when_the_supervisor_dies(bench: Bench) -> None:
    name = name_of("gang")
    bench.want(place(name, hold=True))
    (join,) = of(SendJoin, bench.do(SupervisorReplaced()))
    assert ("withdrawn", "supervisor-died") in [(f.kind, f.detail) for f in join.facts]
    assert join.holding == []


def test_an_unproven_member_does_not_keep_the_worker_out(bench: Bench) -> None:
    name = bench.run()
    bench.do(SupervisorReplaced())
    (join,) = of(SendJoin, bench.do(Stuck([name])))
    assert [(f.kind, f.detail) for f in join.facts] == [("quarantined", "0")]
    assert [h.phase for h in join.holding] == ["ending"]


def test_a_worker_that_leaves_ends_all_tells_it_and_says_goodbye(bench: Bench) -> None:
    name = bench.run()
    assert of(EndMember, bench.do(Leave()))
    bench.want(place(name_of("late")))
    assert bench.members.dropped == {"no-claims-now": 1}
    bench.do(Ended([(name, -15, "end")]))
    bench.do(SeenFree([name]))
    assert bench.kinds() == ["exited", "freed"]
    assert of(SendGoodbye, bench.do(TurnOver()))
    assert bench.members.session.phase == "left"


# -------------------------------------------------------------------------------- bounds


def test_forgotten_ends_are_still_over() -> None:
    bench = Bench(tombstones_max=4)
    bench.join()
    names = [name_of(f"j{number}", fence=10 + number) for number in range(12)]
    for name in names:
        bench.want(place(name, request=body(run={"driver": "noop"})))
        bench.do(Started([name]))
        bench.do(Ended([(name, 0, "exit")]))
        bench.facts()
    assert len(bench.members.table.tombstones) <= 5
    bench.want(place(names[0], request=body(run={"driver": "noop"})))
    assert bench.facts() == [Fact("withdrawn", *names[0], 0, "forgotten")]
    bench.want(place(name_of("new", fence=40)))
    assert bench.kinds() == ["claimed"]


@pytest.mark.parametrize(
    "late",
    [
        Started([name_of()]),
        Ended([(name_of(), 0, "exit")]),
        StartFailed([(name_of(), 127, "x")]),
        Stuck([name_of()]),
        SeenFree([name_of()]),
        NotFree([(name_of(), (0,))]),
    ],
)
def test_what_a_driver_says_of_an_unknown_member_changes_nothing(bench: Bench, late: object) -> None:
    assert bench.do(late) == []
    assert bench.kinds() == []
