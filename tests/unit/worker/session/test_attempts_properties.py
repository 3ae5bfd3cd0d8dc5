"""The state machine in a world that loses, repeats and reorders, stops and kills: what holds after every step.

The world has a leader that folds reports as the ledger does, a driver that keeps the fence as the supervisor does, a
real pool, and a real journal in memory. Hypothesis plays the network, the jobs, the clock and the crashes.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import KNOWN
from moorage.schemas.codec import decode_request, encode
from moorage.schemas.errors import problem
from moorage.schemas.frames import (
    Device,
    End,
    Joined,
    Place,
    Renewed,
    Report,
    ReportAck,
    ReportFrame,
    RollCall,
    Start,
    Wanted,
)
from moorage.worker.agent.journal import MemoryJournal
from moorage.worker.devices.pool import GpuPool, PoolLease, SlotsRefused
from moorage.worker.session.attempt_messages import (
    AnswerRefused,
    Attempt,
    Claims,
    Command,
    EndAttempt,
    Ended,
    Event,
    Forget,
    Leave,
    NotFree,
    NotStarted,
    ProbeFree,
    Quarantine,
    Release,
    ReportsAnswered,
    Restored,
    SeenFree,
    SendGoodbye,
    SendJoin,
    SendRenew,
    SendReports,
    SessionLive,
    SetFence,
    StartAttempts,
    Started,
    StartFailed,
    Tick,
    TryClaim,
    TurnOver,
)
from moorage.worker.session.attempts import Attempts
from moorage.worker.session.lease_session import NEVER_S

SLOTS = 4
RENEW_S, LEASE_S, GRACE_S = 2.0, 20.0, 5.0
BODIES = {
    "plain": encode({"gpu": {}, "run": {"argv": ["x"]}}),
    "keep": encode({"gpu": {}, "run": {"argv": ["x"]}, "on_partition": "keep"}),
}
#: What may be reported of one attempt, in the ledger's order, each letter a report; `ran` is two in one. An agent that
#: was killed may have taken `claimed` and `started` with it: `exited` implies them. A stale frame of what is over may
#: be answered `withdrawn`.
CHAIN = re.compile(r"(c?r|n|c?s?(e(qf?|f)?)?)?w?")
LETTER = {
    "refused": "r",
    "withdrawn": "w",
    "not-held": "n",
    "claimed": "c",
    "started": "s",
    "exited": "e",
    "ran": "se",
    "quarantined": "q",
    "freed": "f",
}


class World(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 1000.0
        self.journal = MemoryJournal()
        self.devices = [Device(index, "nvidia", "H100", f"uuid-{index}") for index in range(SLOTS)]
        # the driver and the devices: they outlive the agent
        self.processes: dict[AttemptName, str] = {}  # starting, running, or how it ended and is not forgotten
        self.keeps: set[AttemptName] = set()
        self.on_device: dict[int, set[AttemptName]] = {slot: set() for slot in range(SLOTS)}
        self.fence_s = NEVER_S
        self.started: Counter[AttemptName] = Counter()
        # the leader and the wires
        self.epoch = 1
        self.session = ""
        self.join_n = 0
        self.no = 0
        self.ledger: list[Report] = []
        self.to_leader: list[object] = []
        self.to_worker: list[Event | tuple[str, Event]] = []
        self.said: list[Wanted] = []
        self.wanted: dict[AttemptName, Place] = {}
        self.ended: set[AttemptName] = set()
        self.fence = 0
        self.boot()
        self.the_wires_are_calm()

    # -- the shell, as far as it matters

    def boot(self) -> None:
        self.pool = GpuPool(self.devices)
        self.leases: dict[AttemptName, PoolLease] = {}
        self.quarantined: dict[int, set[AttemptName]] = {}
        self.probing: list[Attempt] = []
        state = self.journal.state
        self.attempts = Attempts(
            "w1", {"process": KNOWN["process"]}, join_n=state.join_n, ledger=state.ledger, tombstones_max=8
        )
        held: list[tuple[Attempt, str, int, str]] = []
        withdrawn: list[AttemptName] = []
        for name, place in state.places.items():
            attempt = Attempt(name, place, decode_request(place.body), 0.0)
            phase = self.processes.get(name)
            if phase is None and not place.hold:
                withdrawn.append(name)
                continue
            try:
                self.leases[name] = self.pool.try_claim_slots(place.slots, "exclusive", name[1])
            except SlotsRefused:  # it is over, which died unjournalled, and its slots went on
                attempt.leased = False
            if phase is None:
                held.append((attempt, "claimed", 0, ""))
            elif phase in ("starting", "running"):
                held.append((attempt, phase, 0, ""))
            elif phase == "no-room":
                held.append((attempt, "refused", 0, phase))
            else:
                held.append((attempt, "exited", 0, phase))
        for name in [name for name in self.processes if name not in state.places]:
            del self.processes[name]
            for on_device in self.on_device.values():
                on_device.discard(name)
        self.handle(Restored(held, state.unanswered, withdrawn))
        self.handle(TurnOver())

    def handle(self, event: Event) -> None:
        self.do(self.attempts.handle(event, self.now))
        self.attempts.validate()
        self.pool.validate()
        if type(event) is TurnOver and self.attempts.session.phase == "left":
            self.boot()  # its service manager starts it again

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case TryClaim():
                    self.claim(command.attempts)
                case StartAttempts():
                    for attempt in command.attempts:
                        assert attempt.name not in self.processes, "started twice"
                        assert attempt.name not in self.ended or attempt.name in self.wanted
                        self.started[attempt.name] += 1
                        if self.now < self.fence_s:  # a supervisor past its fence starts nothing
                            self.processes[attempt.name] = "starting"
                            if attempt.keep:
                                self.keeps.add(attempt.name)
                            for slot in attempt.slots:
                                self.on_device[slot].add(attempt.name)
                        else:
                            self.processes[attempt.name] = "fence"
                case EndAttempt():
                    pass  # the rule `job_ends` ends it some time
                case Release():
                    for attempt in command.attempts:
                        lease = self.leases.pop(attempt.name, None)
                        if lease is not None:
                            lease.release()
                        for slot in attempt.quarantined:
                            self.quarantined[slot].discard(attempt.name)
                            if not self.quarantined[slot]:
                                self.pool.unquarantine(slot)
                case Quarantine():
                    for slot in command.slots:
                        self.quarantined.setdefault(slot, set()).add(command.attempt.name)
                        self.pool.quarantine(slot, "kept")
                    if command.attempt.name in self.leases:
                        self.leases[command.attempt.name].release()
                case ProbeFree():
                    self.probing += command.attempts
                case Forget():
                    for attempt in command.attempts:
                        self.processes.pop(attempt.name, None)
                case SendReports():
                    if not command.again:
                        self.journal.reports(command.frame)
                    self.to_leader.append(command.frame)
                case ReportsAnswered():
                    self.journal.answered(command.no)
                case SendJoin():
                    if not command.again:
                        self.journal.join(command.n, command.reports)
                    self.to_leader.append(command)
                case SessionLive():
                    self.journal.live(command.ledger)
                case SendRenew():
                    self.to_leader.append(command)
                case SendGoodbye():
                    assert not {"starting", "running"} & set(self.processes.values()), "a job runs on"
                    self.to_leader.append(command)
                case SetFence():
                    self.fence_s = command.deadline_s
                case _:
                    pass

    def claim(self, attempts: list[Attempt]) -> None:
        granted: list[tuple[Attempt, str]] = []
        refused: list[tuple[Attempt, str]] = []
        for attempt in attempts:
            try:
                self.leases[attempt.name] = self.pool.try_claim_slots(attempt.slots, "exclusive", attempt.job)
            except SlotsRefused as no:
                refused.append((attempt, no.reason))
                continue
            granted.append((attempt, ""))
            for slot in attempt.slots:
                assert not self.on_device[slot], "a device was given away with a job's memory on it"
        if granted:
            assert self.now < self.attempts.session.base_s + LEASE_S / 2, "claimed in the second half of the lease"
            self.journal.placed([attempt.place for attempt, _ in granted])
        self.do(self.attempts.handle(Claims(granted, refused), self.now))

    # -- the leader

    def say(self, *items: Place | Start | End) -> None:
        frame = Wanted(
            "w1",
            self.session,
            self.epoch,
            place=[item for item in items if isinstance(item, Place)],
            start=[item for item in items if isinstance(item, Start)],
            end=[item for item in items if isinstance(item, End)],
        )
        self.said.append(frame)
        self.to_worker.append(frame)

    @rule(
        job=st.sampled_from("abc"),
        slots=st.sets(st.integers(0, SLOTS - 1), max_size=2),
        hold=st.booleans(),
        kind=st.sampled_from(sorted(BODIES)),
    )
    def leader_places(self, job: str, slots: set[int], hold: bool, kind: str) -> None:
        self.fence += 1
        name = ("acme", job, 0, self.fence, self.fence)
        self.wanted[name] = Place(*name, sorted(slots), "exclusive", hold, BODIES[kind])
        self.say(self.wanted[name])

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def leader_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        self.ended.add(name)
        self.say(End(*name, "cancelled", data.draw(st.sampled_from([None, 0.0, 3.0]))))

    @precondition(lambda self: self.claimed())
    @rule(data=st.data())
    def leader_starts(self, data: st.DataObject) -> None:
        """As a gang is started: once the ledger has the claims of its attempts."""
        name = data.draw(st.sampled_from(self.claimed()))
        self.say(Start(*name, "10.0.0.1", 29500, 2))

    @precondition(lambda self: self.wanted)
    @rule()
    def leader_says_all_it_wants(self) -> None:
        ends = [End(*name, "cancelled") for name in sorted(self.ended & self.wanted.keys())]
        self.say(*self.wanted.values(), *ends)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def an_old_frame_comes_again(self, data: st.DataObject) -> None:
        self.to_worker.append(data.draw(st.sampled_from(self.said)))

    @precondition(lambda self: self.epoch < 4)
    @rule()
    def another_leader_calls_the_roll(self) -> None:
        self.epoch += 1
        self.to_worker.append(RollCall(self.epoch))

    @precondition(lambda self: self.session and self.now >= self.fence_s + GRACE_S)
    @rule()
    def leader_declares_it_lost(self) -> None:
        self.session = ""

    @precondition(lambda self: self.to_leader)
    @rule(data=st.data(), again=st.booleans())
    def leader_hears(self, data: st.DataObject, again: bool) -> None:
        at = data.draw(st.integers(0, len(self.to_leader) - 1))
        message = self.to_leader[at] if again else self.to_leader.pop(at)
        self.leader_answers(message)

    def leader_answers(self, message: object) -> None:
        over = problem("session-over", "over")
        match message:
            case SendJoin():
                if message.n > self.join_n:
                    self.join_n, self.no, self.session = message.n, 0, f"session-{message.n}"
                    self.fold(message.reports)
                    holding = {(h.tenant, h.job, h.replica, h.attempt, h.fence) for h in message.holding}
                    self.wanted = {name: place for name, place in self.wanted.items() if name in holding}
                elif message.n < self.join_n or not self.session:
                    self.to_worker.append(AnswerRefused("join", message.n, problem("stale-join", "old")))
                    return
                joined = Joined(self.session, message.n, self.epoch, RENEW_S, LEASE_S, GRACE_S, "L")
                self.to_worker.append(joined)
            case SendGoodbye():
                if message.session == self.session:
                    self.session = ""
                    self.wanted.clear()
            case SendRenew():
                if message.session == self.session:
                    self.to_worker.append((self.session, Renewed(message.n, self.epoch)))
                else:
                    self.to_worker.append((message.session, AnswerRefused("renew", message.n, over)))
            case ReportFrame():
                if message.session != self.session:
                    self.to_worker.append((message.session, AnswerRefused("fact", message.no, over)))
                    return
                assert message.no <= self.no + 1, "a gap"
                if message.no == self.no + 1:
                    self.no = message.no
                    self.fold(message.reports)
                self.to_worker.append((self.session, ReportAck(message.no, self.epoch)))

    def claimed(self) -> list[AttemptName]:
        return sorted(self.wanted.keys() & {_name(report) for report in self.ledger if report.kind == "claimed"})

    def fold(self, reports: list[Report]) -> None:
        self.ledger += reports
        for report in reports:
            if report.kind in ("exited", "ran", "withdrawn", "refused", "not-held"):
                self.wanted.pop(_name(report), None)

    # -- the wires

    @precondition(lambda self: self.to_worker)
    @rule(data=st.data(), again=st.booleans())
    def worker_hears(self, data: st.DataObject, again: bool) -> None:
        at = data.draw(st.integers(0, len(self.to_worker) - 1))
        self.worker_takes(self.to_worker[at] if again else self.to_worker.pop(at))

    def worker_takes(self, message: Event | tuple[str, Event]) -> None:
        if isinstance(message, tuple):  # the reply subject names the session that was asked in
            session, message = message
            if session != self.attempts.session.session:
                return
        self.handle(message)
        self.handle(TurnOver())

    @rule()
    def the_wires_are_calm(self) -> None:
        """Everything arrives, in order."""
        for _ in range(20):
            while self.to_leader:
                self.leader_answers(self.to_leader.pop(0))
            while self.to_worker:
                self.worker_takes(self.to_worker.pop(0))

    @rule()
    def the_wires_are_cut(self) -> None:
        self.to_leader.clear()
        self.to_worker.clear()

    # -- jobs, devices, clock

    @precondition(lambda self: any(phase == "starting" for phase in self.processes.values()))
    @rule(data=st.data(), to=st.sampled_from(["running", "start-failed", "no-room"]))
    def job_starts(self, data: st.DataObject, to: str) -> None:
        starting = sorted(name for name, phase in self.processes.items() if phase == "starting")
        name = data.draw(st.sampled_from(starting))
        if to == "running":
            self.processes[name] = "running"
            self.handle(Started([name]))
            return
        self.job_is_over(name, to)
        if to == "start-failed":
            self.handle(StartFailed([(name, 127, "start-failed")]))
        else:  # nothing of it was ever on a device
            for on_device in self.on_device.values():
                on_device.discard(name)
            self.handle(NotStarted([(name, "no room")]))

    @precondition(lambda self: any(phase == "running" for phase in self.processes.values()))
    @rule(data=st.data(), told=st.booleans())
    def job_ends(self, data: st.DataObject, told: bool) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, phase in self.processes.items() if phase == "running")))
        self.job_is_over(name, "exit")
        if told:
            self.handle(Ended([(name, 0, "exit")]))
            self.handle(TurnOver())
        else:
            self.restart()  # the agent died before it heard

    def job_is_over(self, name: AttemptName, reason: str) -> None:
        self.processes[name] = reason

    @precondition(lambda self: self.probing)
    @rule(memory_stays=st.booleans())
    def devices_are_probed(self, memory_stays: bool) -> None:
        attempts, self.probing = self.probing, []
        for attempt in attempts:
            if memory_stays:
                self.handle(NotFree([(attempt.name, tuple(attempt.quarantined or attempt.slots))]))
            else:
                for slot in attempt.slots:
                    self.on_device[slot].discard(attempt.name)
                self.handle(SeenFree([attempt.name]))
        self.handle(TurnOver())

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.3, 0.5, 0.5, 1.0, 2.0, 2.0, 9.0, 21.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.fence_s:
            for name, phase in list(self.processes.items()):
                if phase in ("starting", "running") and name not in self.keeps:
                    self.job_is_over(name, "fence")
                    self.handle(Ended([(name, -9, "fence")]))
        if self.now >= self.attempts.next_deadline_s():
            self.handle(Tick())
        self.handle(TurnOver())

    @rule(within_s=st.sampled_from([0.0, 3.0, 30.0]))
    def worker_is_told_to_leave(self, within_s: float) -> None:
        self.handle(Leave(within_s))
        self.handle(TurnOver())

    @rule()
    def restart(self) -> None:
        """kill -9 and start again: pool and machine are gone; the supervisor, devices and journal are not."""
        self.boot()

    # -- what always holds

    @invariant()
    def no_job_outlives_its_fence(self) -> None:
        for name, phase in self.processes.items():
            assert phase not in ("starting", "running") or name in self.keeps or self.now < self.fence_s

    @invariant()
    def each_attempt_runs_at_most_once(self) -> None:
        assert all(count == 1 for count in self.started.values())

    @invariant()
    def every_attempt_leaves_one_chain_of_reports(self) -> None:
        chains: dict[AttemptName, str] = {}
        for report in [*self.ledger, *self.attempts.outbox.unanswered()]:
            name = (report.tenant, report.job, report.replica, report.attempt, report.fence)
            chains[name] = chains.get(name, "") + LETTER[report.kind]
        # a frame that the ledger has and whose answer was lost stands in both
        for name, chain in chains.items():
            told = _without_repeats(chain)
            assert CHAIN.fullmatch(told), f"{name}: {chain}"

    def teardown(self) -> None:
        """The world heals: everything comes to rest, and ledger and worker agree."""
        if not hasattr(self, "attempts"):
            return
        for _ in range(400):
            for name, phase in list(self.processes.items()):
                if phase in ("starting", "running"):
                    if phase == "starting":
                        self.handle(Started([name]))
                    self.job_is_over(name, "exit")
                    self.handle(Ended([(name, 0, "exit")]))
            self.devices_heal()
            for name in sorted(self.wanted):
                if name in self.attempts.held and self.attempts.held[name].phase == "claimed" and self.session:
                    self.say(End(*name, "over"))
            self.handle(TurnOver())
            while self.to_leader:
                self.leader_answers(self.to_leader.pop(0))
            while self.to_worker:
                self.worker_takes(self.to_worker.pop(0))
            at_rest = not self.attempts.held and self.attempts.outbox.is_empty
            if at_rest and self.attempts.session.phase == "live":
                break
            self.now = max(self.now + 0.01, min(self.attempts.next_deadline_s(), self.now + 2))
            if self.now >= self.attempts.next_deadline_s():
                self.handle(Tick())
        else:
            raise AssertionError(f"never at rest: {self.attempts.session.phase} {self.attempts.held}")
        assert not any(state.holders for state in self.pool.slot_states())
        assert not any(state.quarantine for state in self.pool.slot_states())
        freed = {_name(report) for report in self.ledger if report.kind in ("freed", "refused")}
        assert self.started.keys() <= freed, "a job was started, and nobody said that its devices are free"

    def devices_heal(self) -> None:
        attempts, self.probing = self.probing, []
        for attempt in attempts:
            for slot in attempt.slots:
                self.on_device[slot].discard(attempt.name)
            self.handle(SeenFree([attempt.name]))


def _name(report: Report) -> AttemptName:
    return (report.tenant, report.job, report.replica, report.attempt, report.fence)


def _without_repeats(chain: str) -> str:
    """Reports that were folded and whose answer was lost come again: keep the first of each, and words said again."""
    seen = ""
    for letter in chain:
        if letter not in seen:
            seen += letter
    return seen


TestWorld = World.TestCase
TestWorld.settings = settings(
    max_examples=40, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestMoreWorlds(World.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(TestWorld.settings, max_examples=100)
