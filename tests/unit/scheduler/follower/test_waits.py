"""Where waits went: the parts of each wait are the wait, to the ms, and each case has its cause."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.follower.causes import _decides
from moorage.scheduler.follower.usage import Usage
from moorage.scheduler.follower.waited_table import OTHERS, WEEK_MS, WaitedTable, begin_of, week_of
from moorage.scheduler.follower.waits import Waits
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.scheduler.ledger.evidence import Placements
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Goodbye
from moorage.schemas.job import STATES
from moorage.schemas.waited import MEANS
from tests.levels import NEXT, know_next, raise_level
from tests.turns import turns
from tests.unit.scheduler.driving import H100, Driving
from tests.unit.scheduler.faulty_world import FaultyWorld

YEAR_S = 366 * 86_400
WAITING = {"QUEUED", "PLACED", "CLAIMED"}


def units_of(job: Job) -> int:
    """What of a job waits or starts: replicas, or a gang as one."""
    waiting = sum(STATES[replica.state] in WAITING for replica in job.replicas)
    return min(1, waiting) if b'"gang"' in job.body else waiting


class Waiting(Driving):
    """A stopwatch for each job beside the ledger, and a follower that counts waits."""

    def __init__(self, config: Config | None = None) -> None:
        self.units: dict[int, int] = {}
        self.waited_ms = Counter[int]()  # by job number
        self.tenants: dict[int, str] = {}
        self.names: dict[int, str] = {}
        self.parts: dict[int, int] = {}  # by job number: the sum of the parts, as last told
        self.read_ms = 0
        self.waits: Waits | None = None
        self.placed = Placements()
        super().__init__(config)

    def on_folded(self, folded: Folded) -> None:
        state = self.shadow
        for num, units in self.units.items():
            self.waited_ms[num] += units * (state.time_ms - self.read_ms)
        self.read_ms = state.time_ms
        self.units = {num: units_of(job) for num, job in state.jobs.items() if not job.over}
        self.tenants |= {num: job.tenant for num, job in state.jobs.items()}
        self.names |= {num: job.name for num, job in state.jobs.items()}
        if self.waits is None:
            self.waits = Waits(state)
            self.waits.from_ms = 0
            self.waits.placed = self.placed
        self.placed.fold(decode_record(self.records[-1]))
        self.waits.fold(folded)
        for job in (*folded.ended, *state.jobs.values()):
            if job.num in state.jobs:
                self.parts[job.num] = sum(part.ms for part in self.waits.parts_of(job))

    def again(self) -> None:
        """The follower ends, and another one goes on from what the first saved."""
        assert self.waits is not None
        state = snapshots.load(snapshots.dump(self.shadow))
        self.waits = Waits.load(self.waits.dump(), state)
        self.waits.placed = self.placed
        self.usage, self.shadow = Usage.load(self.usage.dump(), state), state

    def check_waits(self) -> None:
        assert self.waits is not None
        for num, ms in self.parts.items():
            assert ms == self.waited_ms[num], (self.names[num], ms, self.waited_ms[num])
        causes, workers = self.waits._causes, self.shadow.worker_by_num
        known = {num: seen[0] for num, seen in causes._seen.items() if num not in causes._changed}
        assert known == {num: _decides(workers[num]) for num in known}, "a host that has changed is looked at"
        told = {row["tenant"]: row["wait_s"] for row in self.rows(None, by=["tenant"])}
        sums = Counter[str]()
        for num, ms in self.waited_ms.items():
            sums[self.tenants[num]] += ms
        assert {name: round(s * 1000) for name, s in told.items() if s} == {name: ms for name, ms in sums.items() if ms}

    def rows(self, tenant: str | None = "t", **arguments: Any) -> list[dict[str, Any]]:
        assert self.waits is not None
        answer = self.waits.answer(tenant, {"since_s": YEAR_S, **arguments})
        assert not isinstance(answer, Problem), answer
        found: list[dict[str, Any]] = answer["rows"]
        return found

    def causes(self, name: str, tenant: str = "t") -> dict[str, int]:
        """The parts of a job in memory by cause, in ms."""
        assert self.waits is not None
        answer = self.waits.answer(tenant, {"job": name})
        assert not isinstance(answer, Problem), answer
        return {part["cause"]: part["ms"] for part in answer["parts"]}

    def passes(self, ms: int) -> None:
        """Time passes, with a record a second; workers renew and report."""
        for _ in range(ms // 1000):
            self.now += 998
            self.renew()
            self.report_all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", turns(range(12), often=3, more=3))
def test_the_parts_of_each_wait_are_what_a_stopwatch_says(seed: int) -> None:
    world = FaultyWorld(seed, workers=2 + seed % 3, driving=Waiting)
    drive = world.drive
    assert isinstance(drive, Waiting)
    for number in range(20):
        world.run(10)
        drive.check_waits()
        if number % 3 == 2:
            drive.again()
            drive.check_waits()
    assert drive.waited_ms.total() > 0
    assert {row["cause"] for row in drive.rows(None)} <= set(MEANS)


def hold_all(drive: Waiting, gpus: int = 1, tenant: str = "t", **fields: Any) -> None:
    drive.submit("holder", tenant=tenant, gpu={"count": gpus}, **fields)
    drive.passes(2000)


def test_a_full_fleet_has_a_holder_and_one_who_came_later_is_a_pass() -> None:
    drive = Waiting.with_hosts(1)
    hold_all(drive, tenant="u")
    drive.submit("a", gpu={"count": 1})
    drive.passes(5000)
    assert set(drive.causes("a")) == {"placing", "full"}
    holders = {row["holder"] for row in drive.rows(None, by=["cause", "holder"]) if row["cause"] == "full"}
    assert holders == {"u"}
    drive.submit("b", gpu={"count": 1}, priority=90, tenant="u")
    drive.cancel("holder", tenant="u")
    drive.passes(5000)
    assert drive.job("b", "u").state == "RUNNING"
    assert drive.causes("a")["overtaken-priority"] > 3000
    drive.check_waits()


def test_jobs_older_than_the_one_that_makes_room_were_passed_and_no_others() -> None:
    drive = Waiting.with_hosts(1)
    hold_all(drive)
    drive.submit("older", gpu={"count": 1}, priority=10)
    drive.passes(3000)
    drive.submit("passes", gpu={"count": 1}, priority=50)
    drive.submit("newer", gpu={"count": 1}, priority=10)
    drive.cancel("holder")
    drive.passes(6000)
    assert drive.job("passes").state == "RUNNING"
    assert drive.causes("older")["overtaken-priority"] > 3000
    assert "overtaken-priority" not in drive.causes("newer")
    assert drive.causes("newer")["full"] > 3000
    drive.check_waits()


@pytest.mark.parametrize(
    ("cause", "order"),
    [("held", {"verb": "hold", "tenant": "t"}), ("limit", {"verb": "limit", "tenant": "t", "gpus": 1})],
)
def test_an_order_is_the_cause_as_long_as_it_stands(cause: str, order: dict[str, Any]) -> None:
    drive = Waiting.with_hosts(4)
    drive.submit("first", gpu={"count": 1})
    drive.order(**order)
    drive.submit("a", gpu={"count": 1})
    drive.passes(10_000)
    assert drive.causes("a")[cause] >= 8000
    undo = {"verb": "release", "tenant": "t"} if cause == "held" else {**order, "gpus": 0}
    drive.order(**undo)
    drive.passes(3000)
    ms = drive.causes("a")
    drive.passes(10_000)
    assert drive.causes("a") == ms, "it runs"


def test_enough_gpus_on_no_one_host_is_fragmented_and_a_cordoned_host_is_closed() -> None:
    drive = Waiting()
    for name in ("w0", "w1", "w2"):
        drive.worker(name, gpus=2, labels={"n": name})
    drive.operate("cordon", "w2")
    for name in ("w0", "w1"):
        drive.submit(f"on-{name}", gpu={"count": 1}, requires={"n": [name]})
    drive.passes(2000)
    drive.submit("p", gpu={"count": 2})
    drive.passes(4000)
    assert drive.causes("p")["closed"] > 2000
    drive.submit("q", gpu={"count": 2})
    drive.operate("uncordon", "w2")
    drive.passes(4000)
    assert drive.job("p").state == "RUNNING"
    assert drive.causes("q")["fragmented"] > 1000
    drive.check_waits()


def test_a_host_that_is_cordoned_while_a_job_waits_is_closed() -> None:
    drive = Waiting.with_hosts(1)
    hold_all(drive, tenant="u")
    drive.submit("a", gpu={"count": 1})
    drive.passes(3000)
    drive.operate("cordon", "w0")
    drive.cancel("holder", tenant="u")
    drive.passes(5000)
    assert drive.causes("a")["closed"] >= 3000, drive.causes("a")
    assert "unexplained" not in drive.causes("a")


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_host_that_left_is_no_closed_one_and_one_that_was_lost_is_for_an_hour(says_goodbye: bool) -> None:
    drive = Waiting.with_hosts(1, 1)
    hold_all(drive, tenant="u")
    left = next(name for name, worker in drive.workers.items() if not worker.held)
    if says_goodbye:
        drive.send(left, Goodbye(drive.workers.pop(left).session))
        drive.tick()
    else:
        drive.workers.pop(left)
        drive.passes(60_000)
    drive.submit("a", gpu={"count": 1})
    drive.passes(10_000)
    assert ("closed" in drive.causes("a")) == (not says_goodbye)
    drive.passes(3_700_000)
    before = drive.causes("a")
    drive.passes(20_000)
    after = drive.causes("a")
    assert after["full"] - before.get("full", 0) >= 19_000, "it is known by now that the host is gone"
    drive.check_waits()


@pytest.mark.parametrize("level", [1, 2])
def test_hosts_that_are_reserved_are_told_from_level_two_on(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if level == 2:
        know_next(monkeypatch)
    drive = Waiting.with_hosts(2, config=Config(reserve_after=1))
    if level == 2:
        raise_level(drive)
    hold_all(drive, run={"driver": "noop", "timeout_s": 600})
    drive.submit("large", gpu={"count": 2}, tenant="u", priority=60)
    drive.passes(3000)
    drive.submit("small", gpu={"count": 1})
    drive.passes(5000)
    assert drive.job("small").state == "QUEUED"
    assert ("reserved" in drive.causes("small"), "unexplained" in drive.causes("small")) == (level == 2, level == 1)
    drive.check_waits()


def test_what_no_host_has_and_what_a_job_bounds_itself_are_told_apart() -> None:
    drive = Waiting.with_hosts(2)
    drive.submit("none", gpu={"count": 4})
    drive.submit("sweep", replicas=5, gpu={"count": 1}, max_running=1)
    drive.passes(5000)
    assert drive.causes("none")["no-host"] > 3000
    assert drive.causes("sweep")["max-running"] > 4 * 3000
    drive.check_waits()


def test_a_gang_that_stays_in_one_rack_waits_for_that_and_not_for_a_host_that_the_fleet_has() -> None:
    drive = Waiting()
    for number, rack in enumerate("aab"):
        drive.worker(f"w{number}", 2, labels={"rack": rack})
    drive.submit("holds", gpu={"count": 2}, replicas=2, requires={"rack": ["a"]})
    drive.passes(2000)
    gang: dict[str, Any] = {"gpu": {"count": 2, "scheduling": "gang"}, "replicas": 2}
    drive.submit("waits", **gang, same=["rack"])
    drive.submit("never", **(gang | {"replicas": 3}), same=["rack"])
    drive.passes(5000)
    assert drive.causes("waits")["full"] > 3000
    assert drive.causes("never")["no-host"] > 3000
    drive.check_waits()


@pytest.mark.parametrize("level", [1, NEXT])
def test_a_job_that_came_first_by_a_guarantee_did_so_though_its_tenant_borrows_by_now(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level == NEXT:
        know_next(monkeypatch)
    drive = Waiting.with_hosts(2)
    if level == NEXT:
        raise_level(drive)
    for name in ("first", "second"):
        drive.submit(name, tenant="v", gpu={"count": 1})
    drive.passes(2000)
    drive.submit("older", gpu={"count": 2})
    drive.order("share", tenant="u", gpus=1, weight=1)
    for name, priority, gone in (("within", 50, "first"), ("beyond", 90, "second")):
        drive.submit(name, gpu={"count": 1}, tenant="u", priority=priority)
        drive.cancel(gone, tenant="v")
        drive.passes(3000)
    assert [drive.job(name, "u").state for name in ("within", "beyond")] == ["RUNNING", "RUNNING"]
    drive.order("priority", tenant="t", job="older", priority=95)
    before = drive.causes("older").get("overtaken-guarantee", 0)
    drive.passes(4000)
    after = drive.causes("older").get("overtaken-guarantee", 0)
    assert (after - before >= 3000) == (level == NEXT), drive.causes("older")


def test_time_without_a_leader_is_away() -> None:
    drive = Waiting.with_hosts(1)
    hold_all(drive)
    drive.submit("a", gpu={"count": 1})
    drive.passes(2000)
    drive.now += 60_000
    drive.lead()
    assert drive.causes("a")["away"] == 60_000


def test_a_gap_is_never_spread() -> None:
    drive = Waiting.with_hosts(1)
    hold_all(drive)
    drive.submit("a", gpu={"count": 1})
    drive.passes(3000)
    assert drive.waits is not None
    waits = Waits.load(drive.waits.dump(), snapshots.load(snapshots.dump(drive.shadow)))
    before = {part.cause: part.ms for part in waits.parts_of(drive.shadow.jobs[drive.job("a").num])}
    drive.passes(7000)
    waits.bridge(state := snapshots.load(snapshots.dump(drive.shadow)), state.time_ms)
    after = {part.cause: part.ms for part in waits.parts_of(state.jobs[drive.job("a").num])}
    assert after == {**before, "unknown": 7000}
    assert sum(sums[0] for _, sums in waits._rows_from(0)) < sum(row["wait_s"] for row in drive.rows(None)) * 1000


def test_a_tenant_never_has_the_name_of_another() -> None:
    drive = Waiting.with_hosts(1)
    hold_all(drive, tenant="rivals")
    drive.submit("a", gpu={"count": 1})
    drive.passes(5000)
    rows = drive.rows("t", by=["tenant", "cause", "holder"])
    assert {row["holder"] for row in rows if row["cause"] == "full"} == {OTHERS}
    assert "rivals" not in str(rows)
    assert "rivals" in str(drive.rows(None, by=["holder"]))


def test_a_week_has_what_waited_in_it_while_it_still_waits() -> None:
    drive = Waiting.with_hosts(1)
    drive.now = begin_of(week_of(5 * WEEK_MS)) - 10_000
    hold_all(drive)
    drive.submit("a", gpu={"count": 1})
    drive.passes(20_000)
    drive.check_waits()
    rows = [row for row in drive.rows(by=["week"]) if row["wait_s"] > 1]
    assert [row["week_ms"] for row in rows] == [begin_of(week_of(5 * WEEK_MS) + at) for at in (-1, 0)]


@pytest.mark.parametrize("wrong", [{"since_s": -1}, {"since_s": "x"}, {"by": []}, {"by": ["user"]}, {"after": 3}])
def test_what_cannot_be_asked_is_refused(wrong: dict[str, Any]) -> None:
    answer = Waits(Driving().shadow).answer("t", wrong)
    assert isinstance(answer, Problem)
    assert (answer.code, answer.field) == ("invalid-argument", f"$.{next(iter(wrong))}")


def test_the_table_has_a_bound_the_oldest_weeks_go_and_what_was_counted_ever_stays() -> None:
    table = WaitedTable(rows_max=10, week_max=4)
    for week in range(8):
        for tenant in range(6):
            table.add((week, f"t{tenant}", H100, "full", ""), 1, 2, 1)
    kept = list(table.rows(0))
    assert len(kept) <= 10
    assert {key[0] for key, _ in kept} == {6, 7}
    assert sum(ms for _, (ms, _, _) in kept) + sum(sums[0] for sums in table.before.values()) == 48
    assert WaitedTable.load(table.dump()).dump() == table.dump()
