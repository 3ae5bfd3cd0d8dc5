"""Numbers over a day and a month: what a stopwatch beside the ledger reads, through restarts of the follower."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.follower.series import (
    DAY_MS,
    HOST_SERIES_MAX,
    POINTS_MAX,
    SERIES_MAX,
    STEPS,
    STEPS_HOST,
    AllSeries,
    Series,
)
from moorage.scheduler.follower.usage import Usage
from moorage.scheduler.follower.waits import Waits
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.schemas.errors import Problem
from tests.unit.scheduler.driving import Driving

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
    drive.series.told_use({"w0": (1.5, 8_000)}, drive.shadow.time_ms)
    drive.passes(10_000)
    drive.again()
    drive.passes(10_000)
    told = drive.told(since_s=60)
    assert told["step_ms"] == STEPS[0]
    last = {name: known(row)[-1] for name, row in told["series"].items() if known(row)}
    assert (last["fleet//gpus"], last["fleet//granted"], last["fleet//waiting"]) == (4, 4, 1)
    assert last["fleet//used"] == 1.5
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


def test_a_coarse_step_is_the_mean_and_older_steps_go() -> None:
    series = Series(STEPS)
    for at in range(3 * DAY_MS // STEPS[0]):
        series.put(at * STEPS[0], float(at % 30))
    step, day = series.over(2 * DAY_MS, 3 * DAY_MS, POINTS_MAX)
    assert (step, len(day)) == (300_000, 288)
    step, three = series.over(0, 3 * DAY_MS, POINTS_MAX)
    assert (step % STEPS[1], set(three)) == (0, {14.5})
    assert series.over(0, DAY_MS, POINTS_MAX)[1][0] is None, "of the day before yesterday the means alone are kept"


def test_what_is_kept_has_a_bound_of_64_mib_and_what_is_left_out_is_told() -> None:
    fine, coarse = DAY_MS // STEPS[0], 31 * DAY_MS // STEPS[1]
    hosts = DAY_MS // STEPS_HOST[0] + 31 * DAY_MS // STEPS_HOST[1]
    assert 4 * (SERIES_MAX * (fine + coarse) + HOST_SERIES_MAX * hosts) <= 64 * MIB
    assert HOST_SERIES_MAX >= 200 * 3
    series = AllSeries(Driving().shadow)
    for number in range(SERIES_MAX + 5):
        series._put(("tenant", f"t{number}", "granted"), 0, 1.0)
    assert len(series._series) == SERIES_MAX
    answer = series.answer(None, {})
    assert isinstance(answer, dict)
    assert answer["left_out"] is True


@pytest.mark.parametrize("since_s", [0, "x", 32 * 86_400, True])
def test_what_cannot_be_asked_is_refused(since_s: Any) -> None:
    answer = AllSeries(Driving().shadow).answer(None, {"since_s": since_s})
    assert isinstance(answer, Problem)
    assert answer.field == "$.since_s"
