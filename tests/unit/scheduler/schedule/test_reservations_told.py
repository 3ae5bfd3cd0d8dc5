"""The ledger tells reservations from feature level 2 on, so that who reads it can judge them without the rule."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from bench.queueing import COPIES, jobs_of
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Order
from moorage.scheduler.core.ledger.acts import Epoch, Reserves
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import Record, decode_record
from moorage.scheduler.core.ledger.records import FORMAT
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.schedule.verdicts import TOLD_MS
from moorage.schemas.operate import act_of
from moorage.testing.simulate.philly import CLUSTERS, hosts_of
from moorage.testing.simulate.world import BEGIN_MS, World
from tests.levels import NEXT, know_next, raise_level
from tests.turns import seeds
from tests.unit.scheduler.driving import PATIENCE_MS, Driving
from tests.unit.scheduler.reservations_judge import ReservationsJudge


@pytest.fixture(autouse=True)
def _next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def limited(timeout_s: float | None) -> dict[str, Any]:
    return {"driver": "noop", "timeout_s": timeout_s, "grace_s": 1}


def told(drive: Driving, since: int = 0) -> list[Reserves]:
    records = map(decode_record, drive.records[since:])
    return [act for record in records for act in record.acts if isinstance(act, Reserves)]


def waiting(*, level: bool = True) -> Driving:
    """A host of eight, four of them leased for ten minutes, and a job for eight that has waited too long."""
    drive = Driving.with_hosts(8)
    if level:
        raise_level(drive)
    drive.submit("runs", gpu={"count": 4}, run=limited(600))
    drive.settle()
    drive.submit("large", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.reservation.start_ms
    return drive


def test_a_reservation_is_told_once_and_again_when_it_ends() -> None:
    drive = waiting()
    drive.pass_time(60_000)
    held = drive.reservation
    assert told(drive) == [Reserves(held.num, sorted(held.hosts), held.start_ms)]
    assert drive.shadow.reserved == (held.num, tuple(sorted(held.hosts)), held.start_ms)
    since = len(drive.records)
    drive.cancel("large")
    drive.pass_time(2_000)
    assert told(drive, since) == [Reserves(held.num, [], 0)]
    assert drive.state.reserved is drive.shadow.reserved is None


def test_it_is_told_again_once_the_start_has_moved_by_more_than_a_minute() -> None:
    """The job that runs there outlives its time limit."""
    drive = waiting()
    since = len(drive.records)
    drive.pass_time(900_000)
    starts = [act.start_ms for act in told(drive, since)]
    assert starts
    assert all(late - early > TOLD_MS for early, late in itertools.pairwise(starts))
    assert abs(drive.reservation.start_ms - starts[-1]) <= TOLD_MS


def test_at_level_1_no_reservation_is_written_as_older_schedulers_could_not_fold_it() -> None:
    drive = waiting(level=False)
    assert told(drive) == []
    assert drive.state.reserved is None
    raise_level(drive)
    drive.pass_time(2_000)
    assert [act.job for act in told(drive)] == [drive.reservation.num]


def test_a_gang_over_several_hosts_keeps_its_reservation_through_a_takeover() -> None:
    """The new leader's first plan knows from the ledger who had it; by the shares of the moment it is another's."""
    drive = Driving.with_hosts(8, 8)
    raise_level(drive)
    drive.submit("past", tenant="a", gpu={"count": 8}, replicas=2)
    drive.settle()
    drive.pass_time(600_000, step=20_000)
    for name in ("w0", "w1"):
        drive.run_out(name)
    drive.submit("runs", tenant="z", gpu={"count": 7}, replicas=2, run=limited(7_200))
    drive.settle()
    gang = {"count": 8, "scheduling": "gang"}
    drive.submit("gang", tenant="a", replicas=2, gpu=gang)
    drive.pass_time(PATIENCE_MS + 3_000)
    drive.submit("other", tenant="c", replicas=2, gpu=gang)
    drive.pass_time(300_000, step=2_000)  # by then it has waited nearly as long
    assert drive.state.jobs[drive.reservation.num].name == "gang"
    drive.lead()
    drive.renew()
    drive.pass_time(3_000)
    assert drive.state.jobs[drive.reservation.num].name == "gang"


def begun() -> State:
    """The state with which a simulated ledger begins."""
    state = State()
    fold(state, Record(FORMAT, 1, 1, 0, BEGIN_MS, 0, acts=[Epoch("simulated", "simulate", 0.0)]), 1)
    return state


def judged(drive: Driving) -> ReservationsJudge:
    """The judge of a ledger that a drive has written."""
    judge = ReservationsJudge(State())
    for payload in drive.records:
        judge.record(payload)
    return judge


def stream(seed: int) -> Driving:
    """Jobs of one tenant come and go in a small fleet, most with a time limit, which some run into."""
    chance = random.Random(seed)
    drive = Driving(Config(reserve_after=chance.choice([0, 5])))
    drive.checks = False
    for number in range(chance.choice([1, 2, 3])):
        drive.worker(f"w{number}", 8)
    raise_level(drive)
    ends = dict[object, int]()  # by attempt, when it exits
    for number in range(80):
        limit_s = chance.choice([None, 30, 120, 120, 600, 3_600])
        run = {"driver": "noop", "argv": [chance.choice("abc")], "timeout_s": limit_s, "grace_s": chance.choice([0, 5])}
        gpu: dict[str, Any] = {"count": chance.choice([1, 1, 2, 3, 6, 8, 8])}
        replicas = chance.choice([1] * 6 + [2])
        if replicas > 1:
            gpu = {"count": 4, "scheduling": "gang"}
        drive.offer_submit(f"j{number}", priority=chance.choice([50] * 8 + [60]), run=run, gpu=gpu, replicas=replicas)
        for _ in range(chance.choice([1, 1, 3, 12])):
            drive.pass_time(chance.choice([300, 1_000, 4_000, 20_000]), step=2_000)
            for worker in drive.workers.values():
                for key, held in list(worker.held.items()):
                    if held.phase != "running":
                        continue
                    job = drive.state.job(key[0], key[1])
                    most_s = None if job is None else drive.engine.reader.request_of(job).workload.timeout_s
                    lasts = chance.choice([200, 5_000, 60_000, 400_000])
                    lasts = lasts if most_s is None else min(lasts, int(most_s * 1000))
                    if drive.now >= ends.setdefault(key, drive.now + lasts):
                        worker.finish(key)
            drive.settle()
    return drive


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_no_job_with_a_time_limit_is_let_in_beyond_the_start_that_was_told(seed: int) -> None:
    """Where only an estimate says that it ends before, so many ran that it is one."""
    judged(stream(seed))


def test_some_streams_let_jobs_in() -> None:
    found = Counter[str]()
    for seed in range(4):
        found += judged(stream(seed)).let_in
    assert found["in time"] > 10


def let_in(cluster: str, copy: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how many jobs of a Philly trace, or of a copy of it, were let in on reserved hosts, by why."""
    records, build = list[bytes](), Engine.build

    def kept(engine: Engine, *now_ms: int) -> bytes:
        records.append(build(engine, *now_ms))
        return records[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "build", kept)
        act = act_of("feature-level", {"level": NEXT, "by": "ana"})
        order = Order("feature-level", act, "raise", True, {"simulate": NEXT})
        world = World(hosts_of(CLUSTERS[cluster]), jobs_of(cluster, copy), Config(), orders=[order])
        while world.step():
            pass
    judge = ReservationsJudge(begun())
    for payload in records:
        judge.record(payload)
    return judge.let_in


@pytest.mark.slow
@pytest.mark.long
def test_of_the_philly_jobs_that_are_let_in_by_an_estimate_few_outlive_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One trace lets in 15 to 38, so the trace and its copies are judged together.

    It is so in this cluster. In 0e4a51 two of five outlive it: 43 of the 101 that the six let in.
    """
    found = Counter[str]()
    for copy in range(COPIES + 1):
        found += let_in("2869ce", copy, monkeypatch)
    assert found["estimated"] > 100
    assert found["overrun"] <= 0.12 * found["estimated"], found
