"""Numbers over a day and a month: what a stopwatch beside the ledger reads, through restarts of the follower."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moorage.cli.page.draw_series import past
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.follower.rings import CLOSE, DAY_MS, LIFE_POINTS, LIFE_STEP_MS, WIDE, Life, Series
from moorage.scheduler.follower.series import (
    JOBS_MAX,
    KEPT,
    POINTS_MAX,
    REPORTED_MAX,
    AllSeries,
)
from moorage.scheduler.follower.told import Told
from moorage.scheduler.follower.usage import Usage
from moorage.scheduler.follower.waits import Waits
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.schemas.codec import FRAME_BYTES_MAX
from moorage.schemas.errors import Problem
from moorage.schemas.waited import SeriesAnswer
from tests.unit.scheduler.driving import H100, Driving

MIB = 1024**2


class Watched(Driving):
    """A fleet whose follower keeps series."""

    series: AllSeries | None = None
    waits: Waits | None = None

    def on_folded(self, folded: Folded) -> None:
        if self.series is None or self.waits is None:
            self.series, self.waits = AllSeries(self.shadow), Waits(self.shadow)
        self.waits.fold(folded)
        self.series.fold(folded, self.waits.waiting())

    def passes(self, ms: int) -> None:
        for _ in range(ms // 1000):
            self.now += 998
            self.renew()
            self.report_all()

    def told(self, tenant: str | None = None, **arguments: Any) -> dict[str, Any]:
        assert self.series is not None
        answer = self.series.answer(tenant, arguments)
        assert not isinstance(answer, Problem), answer
        return answer

    def again(self) -> None:
        """The follower ends, and another one goes on from what the first saved."""
        assert self.series is not None
        assert self.waits is not None
        state = snapshots.load(snapshots.dump(self.shadow))
        self.series = AllSeries.load(self.series.dump(), state)
        self.waits = Waits.load(self.waits.dump(), state)
        self.usage, self.shadow = Usage.load(self.usage.dump(), state), state


def known(row: list[float | None]) -> list[float]:
    return [value for value in row if value is not None]


def test_each_step_has_what_was_granted_used_and_waited() -> None:
    drive = Watched.with_hosts(2, 2)
    drive.now = 10 * DAY_MS
    drive.passes(30_000)
    drive.submit("a", gpu={"count": 2}, run={"driver": "noop"})
    for name in ("b", "c", "d"):
        drive.submit(name, gpu={"count": 1}, tenant="u")
    assert drive.series is not None
    told_now = Told(hosts={"w0": (1.5, 8_000.0, 61.0)}, pools={H100: 1.5})
    drive.series.told_use(told_now, drive.shadow.time_ms)
    drive.passes(10_000)
    drive.again()
    drive.passes(10_000)
    told = drive.told(since_s=60)
    assert told["step_ms"] == CLOSE.fine_ms
    last = {name: known(row)[-1] for name, row in told["series"].items() if known(row)}
    assert (last["fleet//gpus"], last["fleet//granted"], last["fleet//waiting"]) == (4, 4, 1)
    assert last["fleet//used"] == 1.5
    assert [last[f"pool/{H100}/{what}"] for what in ("gpus", "granted", "used")] == [4, 4, 1.5]
    assert (last["tenant/t/granted"], last["tenant/u/granted"], last["tenant/u/waiting"]) == (2, 2, 1)
    assert last["cause/full/waiting"] + last.get("cause/overtaken-share/waiting", 0) == 1
    first = told["series"]["fleet//granted"]
    assert known(first)[0] == 0, "before the jobs came"
    drive.passes(100_000)
    assert told["series"]["fleet//used"] != []
    assert drive.told(since_s=60)["series"]["fleet//used"][-1] is None, "what nobody told is unknown"
    own = drive.told("u", since_s=60)["series"]
    assert set(own) == {"tenant/u/granted", "tenant/u/waiting"}
    of_host = drive.told(since_s=600, worker="w0")["series"]
    assert known(of_host["host/w0/granted"])[-1] == 2
    assert "host/w1/granted" not in of_host


@pytest.mark.parametrize("of", ["tenant", "tenants"])
def test_what_comes_late_in_a_step_was_none_before_so_parts_are_no_more_than_the_fleet(
    monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    monkeypatch.setitem(KEPT, "tenant", (CLOSE, 160 if of == "tenant" else 0))
    drive = Watched.with_hosts(2, 2)
    drive.now = 10 * DAY_MS
    drive.passes(480_000)  # until 180 s of five minutes are over
    for name in ("a", "b", "c"):
        drive.submit(name, gpu={"count": 2}, run={"driver": "noop"})
    drive.passes(130_000)  # until the next five minutes have begun
    told = drive.told()
    assert told["step_ms"] == CLOSE.coarse_ms
    for what, at_end in (("granted", 4), ("waiting", 1)):
        *before, last = known(told["series"][f"tenant/t/{what}"])
        assert set(before) == {0}
        assert at_end * 0.3 < last < at_end * 0.5, "some 12 of 30 samples"
    assert {name[0] for name in drive.series._series if name[1:] == ("t", "granted")} == {of}  # type: ignore[union-attr]
    month = drive.told(since_s=31 * 86_400)["series"]
    assert known(month["tenant/t/granted"])[-1] < 2


def test_hosts_with_one_label_pool_are_summed_and_drawn_by_its_name() -> None:
    drive = Watched()
    drive.now = 10 * DAY_MS
    for name, pool in (("w0", "spot"), ("w1", "spot"), ("w2", "own"), ("w3", "")):
        drive.worker(name, 2, labels={"pool": pool, "name": name} if pool else {})
    drive.submit("a", gpu={"count": 2}, requires={"name": ["w1"]}, run={"driver": "noop"})
    drive.passes(1_000)
    assert drive.series is not None
    drive.series.told_use(Told(hosts={"w1": (0.5, 8_000.0, 61.0)}), drive.shadow.time_ms)
    drive.passes(20_000)
    told = drive.told(since_s=60)
    last = {name: known(row)[-1] for name, row in told["series"].items() if known(row)}
    assert [last[f"pool/pool=spot/{what}"] for what in ("gpus", "granted", "used")] == [4, 2, 0.5]
    assert [last[f"pool/pool=own/{what}"] for what in ("gpus", "granted")] == [2, 0]
    drawn = "".join(part.html for part in past(msgspec.convert(told, SeriesAnswer), "1h"))
    assert re.findall("Pool (?:spot|own)", drawn)[:1] == ["Pool spot"], "the larger one first"
    assert "Pool own" in drawn


def test_a_job_has_its_life_and_a_service_its_calls_and_only_its_own_tenant_asks_for_them() -> None:
    drive = Watched.with_hosts(2)
    drive.now = 10 * DAY_MS
    drive.submit("a", gpu={"count": 1})
    drive.passes(20_000)
    assert drive.series is not None
    for number in range(12):
        loss = {"loss": 1 / (number + 1)} if number > 3 else {}
        told = Told(
            jobs=[("t", "a", (50.0 + number, 1_000.0, 1.0), loss), ("t", "unheard", (1.0, 1.0, 1.0), {})],
            services=[("t", "s", (2.5, 0.5, 3.0, 1.0, 20.0, None, 5.0, 1.5))],
        )
        drive.series.told_use(told, drive.shadow.time_ms)
        drive.passes(10_000)
        if number == 6:
            drive.again()
    life = drive.told("t", job="a")
    assert life["step_ms"] == LIFE_STEP_MS
    used = known(life["series"]["job/a/used"])
    assert used == sorted(used)
    assert used[-1] == 61
    loss_row = life["series"]["job/a/reported:loss"]
    assert len(loss_row) == len(life["series"]["job/a/used"])
    assert loss_row[0] is None, "it had reported nothing so far"
    assert known(loss_row)[-1] == pytest.approx(1 / 12)
    service = drive.told("t", since_s=600, service="s")["series"]
    last = {name.rpartition("/")[2]: known(row)[-1] if known(row) else None for name, row in service.items()}
    assert (last["calls"], last["errors"], last["members"], last["batch"]) == (2.5, 0.5, 3.0, 1.5)
    assert last["ran_p95"] is None
    assert drive.told("u", job="a")["series"] == drive.told("u", service="s")["series"] == {}
    assert drive.told("t", job="unheard")["series"] == {}
    drive.cancel("a")
    drive.passes(60_000)
    assert drive.told("t", job="a")["series"]["job/a/used"] == life["series"]["job/a/used"], "it is there after its end"


def test_the_step_of_a_life_doubles_and_its_means_stay() -> None:
    life = Life(7)
    for at in range(4 * LIFE_POINTS):
        life.put(at * LIFE_STEP_MS, float(at))
    assert (life.step_ms, len(life.values)) == (4 * LIFE_STEP_MS, LIFE_POINTS)
    assert life.over(0, life.step_ms, 2) == [1.5, 5.5]
    assert life.over(0, 4 * life.step_ms, 1) == [7.5]
    assert life.over(0, life.step_ms, LIFE_POINTS + 1)[-1] is None


def test_more_jobs_than_are_kept_are_told_and_the_oldest_that_are_silent_go() -> None:
    drive = Driving()
    series = AllSeries(drive.shadow)
    rows = {f"j{at}": SimpleNamespace(num=at + 1, over=False) for at in range(JOBS_MAX + 1)}
    series._state = SimpleNamespace(job=lambda tenant, job: rows[job])  # type: ignore[assignment]
    for at in range(JOBS_MAX + 1):
        series._live("t", f"j{at}", (1.0, 1.0, 1.0), {}, 0)
    assert (len(series._lives), series.left_out) == (JOBS_MAX, 1)
    series._live("t", f"j{JOBS_MAX}", (1.0, 1.0, 1.0), {}, DAY_MS)
    assert len(series._lives) == JOBS_MAX
    assert ("t", "j0") not in series._lives
    rows["j5"] = SimpleNamespace(num=JOBS_MAX + 9, over=False)
    series._live("t", "j5", (2.0, 1.0, 1.0), {}, DAY_MS)
    assert list(series._lives["t", "j5"][1]["used"].values) == [2.0], "another job of its name"


def test_tenants_beyond_the_first_have_minutes_and_their_steps_stand_beside_finer_ones() -> None:
    drive = Driving()
    series = AllSeries(drive.shadow)
    drive.shadow.time_ms = DAY_MS + 3_600_000
    for number in range(KEPT["tenant"][1]):
        for at_ms in range(DAY_MS, DAY_MS + 120_000, CLOSE.fine_ms):
            for what in ("granted", "waiting"):
                series._put(series._of_tenant(f"t{number}", what), at_ms, 1.0)
    answer = series.answer(None, {"since_s": 3_600})
    assert isinstance(answer, dict)
    assert "left_out" not in answer
    assert len(answer["series"]) == 2 * KEPT["tenant"][1]
    first, last = (answer["series"][f"tenant/t{number}/granted"] for number in (0, KEPT["tenant"][1] - 1))
    assert (sum(known(first)), sum(known(last))) == (6, 6)
    assert series._series["tenants", f"t{KEPT['tenant'][1] - 1}", "granted"].fine.step_ms == WIDE.fine_ms


def test_five_minutes_have_the_quantiles_of_the_waits_that_ended_in_them() -> None:
    drive = Watched.with_hosts(1)
    drive.now = 10 * DAY_MS + 1000
    drive.submit("a", gpu={"count": 1})
    drive.passes(10_000)
    drive.submit("b", gpu={"count": 1})
    drive.passes(60_000)
    drive.cancel("a")
    drive.passes(300_000)
    row = known(drive.told(since_s=600)["series"]["fleet//wait_p90"])
    assert 60 <= row[-1] <= 64
    own = drive.told("t", since_s=600)["series"]
    assert known(own["tenant/t/wait_p90"])[-1] == row[-1]


def test_a_coarse_step_is_the_mean_and_older_steps_go() -> None:
    series = Series(CLOSE)
    for at in range(3 * DAY_MS // CLOSE.fine_ms):
        series.put(at * CLOSE.fine_ms, float(at % 30))
    assert series.step_ms(DAY_MS) == CLOSE.fine_ms
    assert len(series.over(2 * DAY_MS, 3 * DAY_MS, 300_000)) == POINTS_MAX
    assert series.step_ms(3 * DAY_MS) == CLOSE.coarse_ms
    assert set(series.over(0, 3 * DAY_MS, 3 * CLOSE.coarse_ms)) == {14.5}
    assert series.over(0, DAY_MS, 300_000)[0] is None, "of the day before yesterday the means alone are kept"


@pytest.mark.parametrize("seed", range(8))
def test_steps_are_the_means_of_what_was_put_wherever_a_question_begins_and_ends(seed: int) -> None:
    dice, series, put, now_ms = random.Random(seed), Series(CLOSE), dict[int, float](), 40 * DAY_MS
    for _ in range(400):
        now_ms += dice.choice([10_000, 10_000, 10_000, 70_000, 3 * 3_600_000])
        put[now_ms // 10_000] = value = float(dice.randint(0, 9))
        series.put(now_ms, value)
    for _ in range(60):
        until_ms = now_ms - dice.randint(-DAY_MS // 2, DAY_MS // 2)
        from_ms, each_ms = until_ms - dice.randint(60_000, DAY_MS), 10_000 * dice.choice([1, 6, 30])
        first_kept = now_ms // 10_000 - DAY_MS // 10_000 + 1
        told = series.over(from_ms, until_ms, each_ms)
        for at, mean in enumerate(told):
            begin = (from_ms // each_ms + at) * each_ms // 10_000
            steps = [
                put[step] for step in range(begin, begin + each_ms // 10_000) if step in put and step >= first_kept
            ]
            assert mean == (pytest.approx(sum(steps) / len(steps), abs=0.001) if steps else None)


def test_what_is_kept_of_200_hosts_has_a_bound_of_64_mib_and_what_is_left_out_is_told() -> None:
    of = dict.fromkeys(KEPT, 0) | {name: most for name, (_, most) in KEPT.items()} | {"host": 200 * 4}
    lives = JOBS_MAX * (3 + REPORTED_MAX) * LIFE_POINTS * 4
    assert sum(KEPT[name][0].bytes * count for name, count in of.items()) + lives <= 64 * MIB
    assert KEPT["host"][1] >= 1_000 * 4
    series = AllSeries(Driving().shadow)
    for number in range(KEPT["pool"][1] + 5):
        series._put(("pool", f"m{number}", "granted"), 0, 1.0)
    assert len(series._series) == KEPT["pool"][1]
    answer = series.answer(None, {})
    assert isinstance(answer, dict)
    assert answer["left_out"] is True


def test_an_answer_about_very_many_tenants_is_one_frame_with_coarser_steps() -> None:
    """A thousand tenants of a day were too large for a frame, and Past had none of them."""
    drive = Watched.with_hosts(1, 1)
    drive.now = 10 * DAY_MS
    drive.passes(30_000)
    assert drive.series is not None
    few = drive.told()["step_ms"]
    for number in range(1_000):
        drive.series._put(("tenants", f"a-tenant-with-a-long-name-{number}", "granted"), drive.now, 1234.567)
    told = drive.told()
    assert len(msgspec.json.encode(told)) < FRAME_BYTES_MAX
    assert told["step_ms"] > few
    assert len(told["series"]) > 1_000


@pytest.mark.parametrize("since_s", [0, "x", 32 * 86_400, True])
def test_what_cannot_be_asked_is_refused(since_s: Any) -> None:
    answer = AllSeries(Driving().shadow).answer(None, {"since_s": since_s})
    assert isinstance(answer, Problem)
    assert answer.field == "$.since_s"
