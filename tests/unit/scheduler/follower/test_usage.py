"""What GPUs gave to tenants, by model and hour: what the sums say is what a stopwatch beside every attempt says."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from moorage.scheduler.answers.views import show
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import (
    QUEUED,
)
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.follower.granted import HOUR_MS, JOB_HOURS_MAX
from moorage.scheduler.follower.usage import GAPS_MAX, Usage
from moorage.scheduler.follower.usage_table import OTHERS, UsageTable
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Report
from tests.turns import turns
from tests.unit.scheduler.driving import H100, Driving, wire
from tests.unit.scheduler.faulty_world import FaultyWorld

HOUR_S = HOUR_MS // 1000
#: of the device of `Driving.worker`
MIB = 81_559
#: thousandths of a device that an attempt counts: alone, as one of eight with mps, as one of four with time-slice
PART = {0: 0, 1: 1000, 2: 125, 3: 250}
#: of the one share of compute that the world asks for
PERCENT = b'"compute_percent": 40'
NOTHING_KEPT = Config(ended_max=0)


class Timed(Driving):
    """A stopwatch for each attempt, beside the ledger: at each record, what was held since the record before."""

    def __init__(self, config: Config | None = None) -> None:
        self.gpu_ms: dict[str, int] = {}  # in thousandths
        self.read_ms = 0
        super().__init__(config)

    def tick(self, ms: int = 1, *, obey: bool = True) -> Outputs:
        held = [
            (
                job.tenant,
                replica.attempt.mask.bit_count() * (400 if PERCENT in job.body else PART[replica.attempt.mode]),
            )
            for job in self.state.jobs.values()
            for replica in job.replicas
            if replica.attempt is not None
        ]
        out = super().tick(ms, obey=obey)
        for tenant, gpus in held:
            self.gpu_ms[tenant] = self.gpu_ms.get(tenant, 0) + gpus * (self.state.time_ms - self.read_ms)
        self.read_ms = self.state.time_ms
        return out


def rows(drive: Driving, tenant: str | None = "t", **arguments: Any) -> list[dict[str, Any]]:
    arguments.setdefault("since_s", 300 * 86_400)
    answer = drive.usage.answer(tenant, arguments)
    assert not isinstance(answer, Problem), answer
    found: list[dict[str, Any]] = answer["rows"]
    return found


def runs(drive: Driving, name: str, ms: int, **fields: Any) -> None:
    """A job that holds its devices for so long, and ends."""
    fields.setdefault("gpu", {"count": 1})
    drive.submit(name, **fields)
    start_ms = drive.state.time_ms
    drive.settle()
    drive.now = start_ms + ms - 1
    worker = drive.workers["w0"]
    for key in list(worker.held):
        worker.finish(key, 0)
    drive.report_all()
    assert drive.state.time_ms == start_ms + ms


@pytest.mark.slow
@pytest.mark.parametrize("seed", turns(range(8), often=2, more=2))
def test_the_sums_are_what_a_stopwatch_beside_each_attempt_says(seed: int) -> None:
    world = FaultyWorld(seed, workers=2 + seed % 3, driving=Timed)
    drive = world.drive
    assert isinstance(drive, Timed)
    for _ in range(20):
        world.run(10)
        granted = {row["tenant"]: row["gpu_s"] for row in rows(drive, None, by=["tenant"])}
        for tenant, gpu_ms in drive.gpu_ms.items():
            assert granted.get(tenant, 0) == pytest.approx(gpu_ms / 1e6, abs=0.001 * len(drive.records))
    world.heal()
    drive.settle()
    granted = {row["tenant"]: row["gpu_s"] for row in rows(drive, None, by=["tenant"])}
    rounding = 0.001 * len(drive.records)
    for tenant, gpu_ms in drive.gpu_ms.items():
        assert granted.get(tenant, 0) == pytest.approx(gpu_ms / 1e6, abs=rounding)


def test_a_long_history_counts_as_its_beginning_leaves_memory() -> None:
    drive = Timed()
    drive.worker("w0", gpus=1, auto=False)
    drive.submit("a", gpu={"count": 1}, retries=40)
    while drive.job("a").state != "FAILED":
        while drive.replica("a").attempt is None:  # it waits longer after each failure
            drive.now += 5_000
            drive.report_all()
        drive.reports([("claimed", "a", 0, 0, ""), ("started", "a", 0, 0, "")])
        drive.now += 60_000
        drive.reports([("exited", "a", 0, 1, ""), ("freed", "a", 0, 0, "")])
    assert len(drive.job("a").history) < drive.job("a").rev - 1, "the beginning of it has left memory"
    (row,) = rows(drive)
    assert row["gpu_s"] == pytest.approx(drive.gpu_ms["t"] / 1e6, abs=0.001 * len(drive.records))
    assert row["gpu_s"] > 40 * 60


def test_a_run_counts_in_each_hour_that_it_is_in_and_after_it_has_left_memory() -> None:
    drive = Driving.with_hosts(2, config=NOTHING_KEPT)
    drive.now = 10 * HOUR_MS - 60_000
    runs(drive, "a", HOUR_MS + 90_000, gpu={"count": 2})
    drive.tick()
    assert not drive.state.jobs, "it has left memory"
    found = rows(drive, by=["hour", "model"])
    assert [(row["hour_ms"] // HOUR_MS, row["model"], row["gpu_s"]) for row in found] == [
        (9, H100, 120 - 0.002),  # placed with the record of the submit, 1 ms after
        (10, H100, 2 * HOUR_S),
        (11, H100, 60 + 0.002),
    ]
    assert [row["memory_mib_s"] for row in found] == pytest.approx([MIB * row["gpu_s"] for row in found], abs=200)
    assert rows(drive, "u") == []


def test_what_runs_now_counts_until_now() -> None:
    drive = Driving.with_hosts(2)
    drive.submit("a", gpu={"count": 1})
    began_ms = drive.state.time_ms
    drive.settle()
    drive.tick(60_000)
    assert rows(drive)[0]["gpu_s"] == (drive.state.time_ms - began_ms) / 1000
    drive.lead()
    assert rows(drive)[0]["gpu_s"] == (drive.state.time_ms - began_ms) / 1000, "the next leader counts it too"


@pytest.mark.parametrize(
    ("gpu", "part", "mib"),
    [
        ({"sharing": "time-slice"}, 0.25, MIB // 4),
        ({"sharing": "mps"}, 0.125, MIB // 8),
        ({"sharing": "mps", "share": {"memory_mib": 4_000, "compute_percent": 50}}, 0.5, 4_000),
        ({"sharing": "time-slice", "share": {"memory_mib": 4_000}}, 0.25, 4_000),
    ],
)
def test_a_sharer_counts_its_share(gpu: dict[str, Any], part: float, mib: int) -> None:
    drive = Driving.with_hosts(1, config=NOTHING_KEPT)
    runs(drive, "a", 100_000, gpu=gpu)
    drive.tick()
    (row,) = rows(drive)
    assert row["gpu_s"] == 100 * part
    assert row["memory_mib_s"] == pytest.approx(mib * 100, rel=0.001)


def test_pages_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage.scheduler.follower.usage.ROWS_MAX", 10)
    drive = Driving()
    for hour in range(25):
        drive.usage.table.add("t", H100, hour, (1, 0, 0, 0))
    found: list[dict[str, Any]] = []
    after, pages = None, 0
    while True:
        answer = drive.usage.answer(None, {"by": ["hour"], "after": after})
        assert not isinstance(answer, Problem)
        found, pages = found + answer["rows"], pages + 1
        if (after := answer.get("next")) is None:
            break
    assert (pages, [row["hour_ms"] // HOUR_MS for row in found]) == (3, list(range(25)))


@pytest.mark.parametrize(
    "wrong",
    [{"since_s": -1}, {"since_s": "x"}, {"by": []}, {"by": ["user"]}, {"by": ["tenant", "tenant"]}, {"after": 3}],
)
def test_what_cannot_be_asked_is_refused(wrong: dict[str, Any]) -> None:
    answer = Driving().usage.answer("t", wrong)
    assert isinstance(answer, Problem)
    assert (answer.code, answer.field) == ("invalid-argument", f"$.{next(iter(wrong))}")


def test_the_table_has_a_bound_in_rows_and_the_oldest_hours_go() -> None:
    table = UsageTable(rows_max=100)
    for hour in range(50):
        for tenant in range(10):
            table.add(f"t{tenant}", H100, hour, (1, 2, 3, 4))
    assert table.count == 100
    assert {hour for (_, _, hour), _ in table.rows(0)} == set(range(40, 50))
    assert UsageTable.load(table.dump()).dump() == table.dump()
    table.add("t0", H100, 3, (1, 0, 0, 0))
    assert table.count == 100


def test_further_tenants_and_models_count_together() -> None:
    table = UsageTable(series_max=20)
    for tenant in range(25):
        table.add(f"t{tenant}", H100, 1, (1, 0, 0, 0))
    assert len(table.series) == 21
    assert dict(table.rows(0, OTHERS)) == {(OTHERS, OTHERS, 1): (5, 0, 0, 0)}


def test_usage_is_summed_by_the_person_who_submitted() -> None:
    drive = Driving()
    drive.worker("w0", gpus=4)
    for name, person, ms in (("a", "lena", 1000), ("b", "omar", 3000), ("c", None, 5000), ("d", "lena", 7000)):
        runs(drive, name, ms, came="subject" if person is None else f"import A U t/{person}")
    assert {row["person"]: row["gpu_s"] for row in rows(drive, by=["person"])} == {"": 5, "lena": 8, "omar": 3}
    assert [row["gpu_s"] for row in rows(drive, by=["tenant"])] == [16]
    assert [(row["tenant"], row["person"]) for row in rows(drive, None, by=["tenant", "person"])] == [
        ("t", ""), ("t", "lena"), ("t", "omar"),
    ]  # fmt: skip
    again = Usage.load(drive.usage.dump(), drive.state)
    assert again.answer("t", {"by": ["person"]}) == drive.usage.answer("t", {"by": ["person"]})


def test_beyond_a_bound_further_persons_count_for_their_tenant() -> None:
    table = UsageTable(series_max=2, persons_max=3)
    for person in range(5):
        table.add(f"t/p{person}", H100, 1, (1, 0, 0, 0))
    table.add("u", H100, 1, (1, 0, 0, 0))
    assert dict(table.rows(0, "t"))["t", H100, 1] == (2, 0, 0, 0)
    assert dict(table.rows(0, "u")) == {("u", H100, 1): (1, 0, 0, 0)}, "persons take no place of tenants"


def calls_of(run: Callable[[], Any]) -> int:
    """How many functions `run` calls, Python's and C's."""
    calls = 0

    def count(_frame: FrameType, event: str, _what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.slow
def test_a_week_of_a_million_jobs_is_answered_in_few_steps_a_row_and_takes_five_mib() -> None:
    week, tenants, models = 7 * 24, 60, 4
    drive = Driving.with_hosts(8)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    table = drive.usage.table
    for hour in range(week):
        for tenant in range(tenants):
            for model in range(models):  # 25 jobs each, as the records of a leader sum them up
                table.add(
                    f"tenant-{tenant}",
                    f"NVIDIA model {model}",
                    hour,
                    (25_000_000, 81_559_000 * 25, 20_000_000, 40_000_000 * 25),
                )
    bytes_held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert bytes_held <= 5 * 1024**2
    drive.shadow.time_ms = week * HOUR_MS
    calls = calls_of(lambda: drive.usage.answer(None, {"by": ["tenant", "model", "hour"]}))
    assert calls < 10 * week * tenants * models
    assert sum(row["gpu_s"] for row in rows(drive, None)) == week * tenants * models * 25


def used(drive: Driving, job: str, detail: str) -> None:
    """A job that runs on a worker which speaks for itself ends, and its devices are free."""
    drive.reports([(kind, job, 0, 0, detail if kind == "freed" else "") for kind in ("exited", "freed")])


def test_what_a_worker_measured_is_spread_over_what_was_granted() -> None:
    drive = Driving.with_hosts(1, config=NOTHING_KEPT, auto=False)
    drive.now = 5 * HOUR_MS - 600_001
    drive.submit("a", gpu={"count": 1})
    drive.reports([("claimed", "a", 0, 0, ""), ("started", "a", 0, 0, "")])
    drive.now = 5 * HOUR_MS + 1_800_000 - 1
    used(drive, "a", "used:1200000,240000")
    shown = wire(show(drive.engine, "t", "a"))
    assert (shown["usage"]["gpu_s"], shown["usage"]["used_gpu_s"]) == (2400, 1200)
    before = rows(drive, by=["hour"])
    assert [(row["gpu_s"], row["used_gpu_s"], row["used_memory_mib_s"]) for row in before] == [
        (600, 300, 60_000),
        (1800, 900, 180_000),
    ]
    assert drive.job("a").used == (1_200_000, 240_000)
    drive.take_snapshot()
    assert snapshots.load(snapshots.dump(drive.state)).job("t", "a").used == (1_200_000, 240_000)  # type: ignore[union-attr]
    for _ in range(2):
        drive.tick()
    assert not drive.state.jobs
    assert rows(drive, by=["hour"]) == before


def test_work_that_no_device_tells_is_unknown_until_one_does() -> None:
    drive = Driving.with_hosts(1, config=NOTHING_KEPT, auto=False)
    drive.submit("a", gpu={"count": 1})

    def shown() -> tuple[Any, Any]:
        found = wire(show(drive.engine, "t", "a"))
        return found["usage"]["used_gpu_s"], found["usage"]["used_memory_mib_s"]

    drive.reports([("claimed", "a", 0, 0, ""), ("started", "a", 0, 0, "")])
    drive.now += HOUR_MS
    drive.tick()
    assert shown() == (None, None)
    used(drive, "a", "used:-1,240000")
    assert shown() == (None, 240_000)
    before = rows(drive)
    assert [row["used_gpu_s"] for row in before] == [0]
    drive.take_snapshot()
    assert snapshots.load(snapshots.dump(drive.state)).job("t", "a").used == (-1, 240_000)  # type: ignore[union-attr]
    for _ in range(2):
        drive.tick()
    assert rows(drive) == before


@pytest.mark.parametrize(("first", "both"), [("used:-1,10", (1_000, 20)), ("used:1000,10", (2_000, 20))])
def test_what_one_of_two_attempts_does_not_report_is_left_out(first: str, both: tuple[int, int]) -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("a", gpu={"count": 1}, retries=1)
    for detail in (first, "used:1000,10"):
        drive.now += 2_000
        drive.tick()
        drive.reports([("claimed", "a", 0, 0, ""), ("started", "a", 0, 0, ""), ("exited", "a", 0, 1, "")])
        drive.reports([("freed", "a", 0, 0, detail)])
    assert drive.job("a").used == both


@pytest.mark.parametrize("detail", ["", "used:", "used:x,1", "used:1"])
def test_a_worker_that_measures_nothing_reports_nothing(detail: str) -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("a", gpu={"count": 1})
    drive.reports([("claimed", "a", 0, 0, ""), ("started", "a", 0, 0, "")])
    used(drive, "a", detail)
    assert drive.job("a").state == "SUCCEEDED"
    assert drive.job("a").used is None


def test_what_two_attempts_used_is_added_and_a_report_that_comes_twice_counts_once() -> None:
    drive = Driving()
    worker = drive.worker("w0", gpus=1, auto=False)
    drive.submit("a", gpu={"count": 1}, retries=1)
    for no in (1, 2):
        drive.now += 2_000
        drive.tick()
        assert drive.replica("a").attempt_no == no
        drive.reports([("claimed", "a", 0, 0, ""), ("started", "a", 0, 0, ""), ("exited", "a", 0, 1, "")])
        attempt = drive.attempt("a")
        drive.reports([("freed", "a", 0, 0, "used:1000,10")])
        worker.gathered.append(Report("freed", *attempt.name, 0, "used:1000,10"))
        drive.report_all()
    assert drive.job("a").state == "FAILED"
    assert drive.job("a").used == (2_000, 20)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_history_that_memory_drops_is_counted(replicas: int) -> None:
    drive = Timed()
    drive.worker("w0", gpus=2, auto=False)
    drive.submit("a", gpu={"count": 1}, retries=60, replicas=replicas)
    while drive.job("a").state != "FAILED":
        while (waits := drive.job("a").replicas[0]).attempt is None and waits.state == QUEUED:
            drive.now += 5_000
            drive.report_all()
        at = [replica.index for replica in drive.job("a").replicas if replica.attempt is not None]
        drive.reports([(kind, "a", index, 0, "") for index in at for kind in ("claimed", "started")])
        drive.now += 60_000
        drive.reports([(kind, "a", index, 1, "") for index in at for kind in ("exited", "freed")])
    assert len(drive.job("a").history) < drive.job("a").rev - 1
    (row,) = rows(drive)
    assert row["gpu_s"] == pytest.approx(drive.gpu_ms["t"] / 1e6, abs=0.001 * len(drive.records))
    assert row["gpu_s"] > 60 * 60 * replicas


def again(drive: Driving) -> None:
    """The follower ends, and another one goes on from what the first saved."""
    state = snapshots.load(snapshots.dump(drive.shadow))
    drive.usage, drive.shadow = Usage.load(drive.usage.dump(), state), state


def test_a_run_of_months_counts_its_last_hours() -> None:
    drive = Driving.with_hosts(1, config=NOTHING_KEPT)
    drive.checks = False
    runs(drive, "a", 3_000 * HOUR_MS)
    found = rows(drive, by=["hour"])
    assert JOB_HOURS_MAX <= len(found) <= JOB_HOURS_MAX + 1
    assert sum(row["gpu_s"] for row in found) == pytest.approx(JOB_HOURS_MAX * HOUR_S, abs=HOUR_S)


@pytest.mark.slow
@pytest.mark.parametrize("seed", turns(range(8, 16), often=2, more=2))
def test_a_follower_that_begins_again_anywhere_counts_nothing_twice(seed: int) -> None:
    world = FaultyWorld(seed, workers=2, driving=Timed)
    drive = world.drive
    whole = Usage(state := snapshots.load(snapshots.dump(drive.shadow)))
    for number in range(20):
        world.run(10)
        for seq, payload in enumerate(drive.records[state.seq :], state.seq + 1):
            whole.fold(fold(state, decode_record(payload), seq))
        everything = {"by": ["tenant", "model", "hour"], "since_s": 86_400}
        assert drive.usage.answer(None, everything) == whole.answer(None, everything), number
        again(drive)


def test_what_nobody_read_is_a_gap_and_nothing_else_is() -> None:
    drive = Driving.with_hosts(3, config=NOTHING_KEPT, auto=False)
    for name in ("before", "through"):
        drive.submit(name, gpu={"count": 1})
        drive.reports([("claimed", name, 0, 0, ""), ("started", name, 0, 0, "")])
    drive.tick(60_000)
    used(drive, "before", "used:30000,1000")
    from_ms = drive.state.time_ms
    counted = rows(drive)[0]["gpu_s"]
    after_seq = drive.state.seq
    usage = Usage.load(drive.usage.dump(), snapshots.load(snapshots.dump(drive.shadow)))  # it reads nothing from here
    drive.submit("within", gpu={"count": 1})
    drive.reports([("claimed", "within", 0, 0, ""), ("started", "within", 0, 0, "")])
    drive.tick(3_600_000)
    used(drive, "within", "used:1000,1000")
    drive.submit("out", gpu={"count": 1})
    until_ms = drive.state.time_ms
    usage.bridge(state := snapshots.load(snapshots.dump(drive.shadow)))
    drive.usage, drive.shadow = usage, state
    assert usage.gaps == [(after_seq, drive.state.seq, from_ms, until_ms)]
    drive.reports([("claimed", "out", 0, 0, ""), ("started", "out", 0, 0, "")])
    drive.tick(10_000)
    for name in ("through", "out"):
        used(drive, name, "used:2000,3000")
    held_ms = drive.state.time_ms - until_ms
    answer = usage.answer("t", {})
    assert isinstance(answer, dict)
    assert answer["gaps"] == [[from_ms, until_ms]]
    assert answer["rows"][0]["gpu_s"] == pytest.approx(counted + 2 * held_ms / 1000, abs=0.005)
    assert answer["rows"][0]["used_gpu_s"] == pytest.approx(30 + 2 + 2, abs=0.01)
    again(drive)
    assert drive.usage.answer("t", {}) == answer, "a save has the gap"


def test_a_restore_is_no_gap_and_what_it_goes_back_over_counts_once() -> None:
    """A job that runs on through a restore counted twice from the backup to the restore."""
    drive = Driving.with_hosts(3, config=NOTHING_KEPT, auto=False)
    drive.submit("through", gpu={"count": 1})
    drive.reports([("claimed", "through", 0, 0, ""), ("started", "through", 0, 0, "")])
    restored = snapshots.load(snapshots.dump(drive.shadow))
    backup_ms = drive.state.time_ms
    drive.tick(60_000)
    until_ms, counted, after_seq = drive.state.time_ms, rows(drive)[0]["gpu_s"], drive.state.seq
    restored.seq = after_seq + (1 << 32)  # as a restore numbers its records
    drive.usage.bridge(restored)
    restored.time_ms = until_ms + 10_000  # the next leader's first record
    answer = drive.usage.answer("t", {})
    assert isinstance(answer, dict)
    assert backup_ms < until_ms
    assert answer["gaps"] == answer["restores"] == [[until_ms, until_ms]]
    assert answer["rows"][0]["gpu_s"] == pytest.approx(counted + 10, abs=0.005)


def test_gaps_have_a_bound() -> None:
    drive = Driving()
    for number in range(40):
        drive.tick(1000)
        drive.usage.bridge(drive.shadow)
        assert len(drive.usage.gaps) == min(number + 1, GAPS_MAX)
    assert drive.usage.gaps[0].after_seq < drive.usage.gaps[-1].after_seq
