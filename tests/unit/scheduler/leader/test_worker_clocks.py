"""A worker whose wall clock is wrong is told, once two of its load frames in a row say so."""

from __future__ import annotations

import logging
import time

import pytest

from moorage.scheduler.leader.worker_clocks import WorkerClocks
from moorage.schemas.frames import Load

NOW_S = 1_800_000_000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW_S)


def told(clocks: WorkerClocks, off_s: float, worker: str = "w0", warning: str = "") -> str:
    time_ms = int((NOW_S + off_s) * 1000)
    return clocks.checked(worker, Load(worker, "boot", 1, 1, warning=warning, time_ms=time_ms)).warning


@pytest.mark.parametrize(
    ("offs", "words"),
    [
        ((3600, 3600), "clock: 3600 s ahead of the leader's"),
        ((-60, -61), "clock: 60 s behind the leader's"),
        ((4.9, 4.9), ""),
        ((-30, 0), ""),  # one frame came late
        ((-9, -30), "clock: 9 s behind the leader's"),  # the second one came late, too
        ((60, 60, 61.5), "clock: 60 s ahead of the leader's"),  # it does not change with every frame
        ((60, 60, 80, 80), "clock: 80 s ahead of the leader's"),
        ((60, 60, 1), ""),  # it is right again
    ],
)
def test_a_wrong_clock_is_told_by_the_better_of_two_frames(offs: tuple[float, ...], words: str) -> None:
    clocks = WorkerClocks(lambda _: True)
    assert [told(clocks, off_s) for off_s in offs][-1] == words


def test_it_is_logged_once_and_stands_beside_what_else_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    clocks = WorkerClocks(lambda worker: worker == "w0")
    with caplog.at_level(logging.WARNING, "moorage.scheduler"):
        found = [told(clocks, 60, warning="disk: full") for _ in range(4)]
    assert found[1:] == ["disk: full; clock: 60 s ahead of the leader's"] * 3
    assert caplog.messages == ["the clock of worker w0 is 60 s ahead of the leader's: run chrony or ntpd on both hosts"]
    assert [told(clocks, 60, "none") for _ in range(2)] == ["", ""]  # nothing is kept of workers that never joined


def test_a_worker_that_tells_no_time_has_no_wrong_clock() -> None:
    clocks = WorkerClocks(lambda _: True)
    assert [clocks.checked("w0", Load("w0", "boot", n, 1)).warning for n in range(2)] == ["", ""]
