"""What is done for many at once comes to what would be done one by one: placements, and steps of the ledger."""

from __future__ import annotations

import random

import msgspec
import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record, encode_record
from moorage.scheduler.core.ledger.records import Op
from moorage.scheduler.core.ledger.state import AT_MS, REPLICA, STATE, State
from moorage.scheduler.core.rank.ranker import Choice, Pack
from moorage.scheduler.ledger.invariants import validate
from moorage.schemas.frames import Report, ReportFrame, ReportKind
from moorage.schemas.job import STATES
from tests.turns import turns
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.faulty_world import FaultyWorld

# ---------------------------------------------------------------------------------------------- placements

MODELS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA A10")  # A10 is found inside A100, too
#: one has twice the share, one a few GPUs at most, one a few for sure
TENANTS: dict[str, tuple[str, dict[str, int]]] = {
    "t": ("share", {"weight": 1}),
    "twice": ("share", {"weight": 2}),
    "few": ("limit", {"gpus": 3}),
    "sure": ("share", {"gpus": 4}),
    "u": ("share", {"weight": 1}),
}

Places = dict[str, tuple[str, list[int]]]


class Counted(Pack):
    """Counts how often it looks for a host."""

    asked = 0

    def _best_fit(self, fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> Choice | None:
        self.asked += 1
        return super()._best_fit(fleet, shape, excluded)


class OneByOne(Counted):
    """Is asked for every single replica."""

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        return []


def world(seed: int, ranker: Pack) -> tuple[Driving, list[Places]]:
    """A random life of a fleet, and where everybody was after each record."""
    chance = random.Random(seed)
    drive = Driving(Config())
    drive.engine.planner.placing.ranker = ranker
    for number in range(6):
        models = [chance.choice(MODELS) for _ in range(chance.choice((1, 4, 8)))]
        drive.worker(
            f"w{number}",
            models=models,
            cpu_milli=chance.choice((0, 4_000, 64_000)),
            memory_mib=chance.choice((0, 16_384)),
            labels={"zone": chance.choice("ab")},
        )
    for tenant, (verb, limits) in TENANTS.items():
        drive.order(verb, tenant=tenant, **limits)
    seen = []
    for tick in range(25):
        asker = chance.choice([*TENANTS])
        for number in range(chance.randrange(9)):
            gpu: dict[str, object] = {"count": chance.choice((1, 1, 1, 2, 3))}
            if chance.random() < 0.5:
                gpu["model"] = chance.choice(("A100", "A10", "H100", ["H100", "A100"]))
            gpu["sharing"] = chance.choice(("exclusive", "exclusive", "time-slice"))
            gpu["scheduling"] = chance.choice(("best-effort", "best-effort", "best-effort", "spread", "gang"))
            drive.offer_submit(
                f"j{tick}-{number}",
                tenant=asker if number == 0 else chance.choice([*TENANTS]),
                gpu=gpu,
                replicas=chance.choice((1, 4, 12)),
                priority=chance.choice((50, 50, 90)),
                resources={"cpu_milli": chance.choice((0, 1_500)), "memory_mib": chance.choice((0, 4_096))},
                requires=chance.choice(({}, {"zone": ["a"]})),
            )
        drive.tick(chance.choice((1, 100)))
        if chance.random() < 0.3:
            drive.offer_cancel(f"j{tick}-0", tenant=asker)
        for name in chance.sample(sorted(drive.workers), 2):
            drive.run_out(name)
        seen.append(places(drive))
    return drive, seen


def places(drive: Driving) -> Places:
    """Where each replica is now, by its name."""
    return {
        f"{job.name}/{replica.index}": (replica.attempt.worker.id, drive.slots(job.name, replica.index, job.tenant))
        for job in drive.state.jobs.values()
        for replica in job.replicas
        if replica.attempt is not None
    }


@pytest.mark.parametrize("seed", turns(range(12), often=1, more=2))
def test_groups_are_placed_as_one_by_one(seed: int) -> None:
    together, singly = Counted(), OneByOne()
    grouped, seen = world(seed, together)
    single, expected = world(seed, singly)
    assert seen == expected
    assert sum(map(len, seen)) > 50
    assert grouped.state.digest == single.state.digest
    assert together.asked <= singly.asked


def crowd(seed: int, ranker: Pack) -> tuple[Driving, list[Places]]:
    """Tenants that all want the same, on large hosts, and where everybody was after each record."""
    chance = random.Random(seed)
    drive = Driving(Config(ageing=seed % 2))
    drive.engine.planner.placing.ranker = ranker
    for tenant, (verb, limits) in TENANTS.items():
        drive.order(verb, tenant=tenant, **limits)
    for number in range(8):
        drive.worker(f"w{number}", 8)
    seen = []
    for tick in range(12):
        for number in range(chance.randrange(50)):
            drive.offer_submit(
                f"j{tick}-{number}",
                tenant=chance.choice([*TENANTS]),
                gpu={"count": chance.choice((1, 1, 1, 1, 2))},
                replicas=chance.choice((1, 1, 1, 5)),
                priority=chance.choice((50, 50, 50, 90)),
            )
        drive.tick(chance.choice((1, 100, 60_000)))
        seen.append(places(drive))
        for name in chance.sample(sorted(drive.workers), 5):
            drive.run_out(name)
    return drive, seen


@pytest.mark.parametrize("seed", turns(range(3, 15), often=1, more=2))
def test_tenants_that_want_the_same_take_turns_on_a_host_as_one_by_one(seed: int) -> None:
    together, singly = Counted(), OneByOne()
    grouped, seen = crowd(seed, together)
    single, expected = crowd(seed, singly)
    assert seen == expected
    assert grouped.state.digest == single.state.digest


def test_a_full_host_asks_once() -> None:
    drive = Driving.with_hosts(8)
    ranker = drive.engine.planner.placing.ranker = Counted()
    drive.submit("j", gpu={}, replicas=20)
    assert drive.states("j").count("PLACED") == 8
    assert ranker.asked == 2  # for the host, and once more in vain


def test_two_tenants_that_take_turns_on_a_host_ask_for_it_once() -> None:
    drive = Driving.with_hosts(8)
    ranker = drive.engine.planner.placing.ranker = Counted()
    for number in range(12):
        drive.offer_submit(f"j{number}", gpu={}, tenant="tu"[number % 2])
    drive.tick()
    running = [job.tenant for job in drive.state.jobs.values() if job.state == "PLACED"]
    assert sorted(running) == [*"tttt", *"uuuu"]
    assert ranker.asked == 2  # for the host, and once more in vain


# -------------------------------------------------------------------------------------------------- reports

RUN: tuple[ReportKind, ...] = ("claimed", "started", "exited")


def frames_of(seed: int, names: list[tuple[str, str, int, int, int]]) -> list[Report]:
    """All reports of all attempts, in an agent's order, and then perhaps something that is not so."""
    chance = random.Random(seed)
    if chance.random() < 0.2:
        names = [*names, names[0]]
    order: tuple[ReportKind, ...] = ("ran", "freed")
    reports = [
        Report(kind, *name, 0, chance.choice(("exit", "", "result:0", "result:7")) if kind == "ran" else "")
        for name in names
        for kind in order
    ]
    at, other = chance.randrange(len(reports)), chance.randrange(len(reports))
    match chance.randrange(6):
        case 0:
            reports[at], reports[other] = reports[other], reports[at]
        case 1:
            reports[at] = reports[other]
        case 2:
            del reports[at]
        case 3:
            reports = [msgspec.structs.replace(f, code=3) if f.kind == "ran" and f.job == "j1" else f for f in reports]
        case 4:
            reports[at] = msgspec.structs.replace(reports[at], fence=reports[at].fence + chance.randrange(2))
    return reports


def in_full(report: Report) -> list[Report]:
    """The reports that one stands for."""
    if report.kind != "ran":
        return [report]
    name = (report.tenant, report.job, report.replica, report.attempt, report.fence)
    return [Report("claimed", *name), Report("started", *name), Report("exited", *name, report.code, report.detail)]


@pytest.mark.parametrize("seed", turns(range(60), often=3, more=6))
def test_one_report_for_a_whole_run_comes_to_what_its_three_reports_do(seed: int) -> None:
    def life(*, whole: bool) -> Driving:
        drive = Driving.with_hosts(4, auto=False)
        for number in range(4):
            drive.offer_submit(f"j{number}", gpu={})
        drive.tick()
        names = [("t", f"j{n}", 0, 1, drive.attempt(f"j{n}").fence) for n in range(4)]
        session, chance = drive.workers["w0"].session, random.Random(seed)
        before = [Report(kind, *names[0]) for kind in RUN[: chance.randrange(3)]]
        drive.send("w0", ReportFrame(session, 1, before))
        if chance.random() < 0.5:
            drive.tick()
        if chance.random() < 0.2:
            drive.offer_cancel("j1")
        reports = frames_of(seed, names)
        drive.send(
            "w0",
            ReportFrame(session, 2, reports if whole else [each for report in reports for each in in_full(report)]),
        )
        drive.tick()
        drive.offer_submit("next", gpu={"count": 2})
        drive.tick()
        return drive

    whole, single = life(whole=True), life(whole=False)
    assert whole.state.digest == single.state.digest
    assert whole.free_gpus() == single.free_gpus()
    assert [event for event in whole.events if event["job"] != "next"] == [
        event for event in single.events if event["job"] != "next"
    ]


def times(drive: Driving, job: str, replica: int = 0) -> dict[str, int]:
    """When a replica came into each state, in ms before now."""
    return {STATES[row[STATE]]: drive.now - row[AT_MS] for row in drive.job(job).history if row[REPLICA] == replica}


@pytest.mark.parametrize("freed", [True, False])
def test_a_whole_run_begins_and_ends_at_its_own_times(freed: bool) -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={})
    drive.tick(500)
    attempt = drive.attempt("j")
    name = ("t", "j", 0, attempt.no, attempt.fence)
    reports = [Report("ran", *name, 0, "exit", 120), *([Report("freed", *name)] if freed else [])]
    drive.send("w0", ReportFrame(drive.workers["w0"].session, 1, reports))
    drive.tick()
    assert drive.states("j") == ["SUCCEEDED"]
    assert times(drive, "j") == {"PLACED": 501, "CLAIMED": 120, "RUNNING": 120, "SUCCEEDED": 0}


def test_each_run_of_a_record_began_when_it_did_and_none_before_its_placement() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", gpu={}, replicas=2, retries=1)
    drive.tick(50)
    names = [("t", "j", at, 1, drive.attempt("j", at).fence) for at in range(2)]
    reports = [Report("ran", *names[1], -15, "exit", 10**18), Report("ran", *names[0], 0, "exit", 30)]
    drive.send("w0", ReportFrame(drive.workers["w0"].session, 1, reports))
    drive.tick()
    assert times(drive, "j", 1)["RUNNING"] == 51, "when it was placed"
    assert times(drive, "j")["RUNNING"] == 30, "though the end of replica 1 is written before it"
    assert drive.replica("j", 1).retries == 1


# -------------------------------------------------------------------------------------------------- steps


def one_by_one(payload: bytes) -> bytes:
    """The record with every step that says several things written as several steps."""
    record = decode_record(payload)
    steps: list[int] = []
    for at in range(0, len(record.steps), 6):
        op, num, index, a, b, c = step = record.steps[at : at + 6]
        if op == Op.RAN:
            step = [Op.CLAIM, num, index, b, 0, 0, Op.START, num, index, b, 0, 0, Op.EXIT, num, index, a, 0, c]
        steps += map(int, step)
    record.steps = steps
    return encode_record(record)


@pytest.mark.parametrize("seed", turns((0, 1, 2, 3, 4, 6, 7), often=1, more=2))  # 5 has no such step
def test_steps_that_say_several_things_fold_as_the_several_do(seed: int) -> None:
    world = FaultyWorld(seed)
    world.run(200)
    short, long = State(), State()
    combined = 0
    for seq, payload in enumerate(world.drive.records, 1):
        # actors name positions among the steps, so their records stay as they are
        written = payload if decode_record(payload).actors else one_by_one(payload)
        combined += written != payload
        fold(short, decode_record(payload), seq)
        fold(long, decode_record(written), seq)
        assert (short.digest, short.transitions) == (long.digest, long.transitions)
    assert combined
    validate(long)
    assert [(job.name, job.rev, job.history) for job in short.jobs.values()] == [
        (job.name, job.rev, job.history) for job in long.jobs.values()
    ]
    assert short.finished.dump() == long.finished.dump()
