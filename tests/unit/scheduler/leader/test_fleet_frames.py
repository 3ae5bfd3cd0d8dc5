"""What observers see of the fleet twice a second: kept row by row, and always what a fresh look would say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.leader import fleet_frames
from moorage.scheduler.leader.fleet_frames import FleetFrames
from moorage.schemas.frames import LedgerCopies
from tests.unit.scheduler.driving import Driving


def _seen(frames: FleetFrames) -> dict[str, Any]:
    for _ in frames.catch_up():
        pass
    seen: dict[str, Any] = msgspec.json.decode(frames.frame(LedgerCopies()))
    return seen


def _fresh(drive: Driving) -> list[dict[str, Any]]:
    hosts = drive.engine.fleet.hosts
    return [
        {
            "worker": worker.id,
            "state": views.worker_state(worker, hosts.get(worker.num)),
            "cells": views.cells(hosts.get(worker.num), len(worker.hello["gpu_pool"])),
            "simulated": False,
        }
        for worker in views.by_name(drive.engine)
    ]


def test_rows_follow_every_change_and_stand_by_name() -> None:
    drive = Driving()
    for name in ("m", "z", "a"):
        drive.worker(name, 2)
    frames = FleetFrames(drive.engine)
    seen = _seen(frames)
    assert [row["worker"] for row in seen["workers"]] == ["a", "m", "z"]
    assert seen["workers"] == _fresh(drive)
    drive.submit("j", gpu={"count": 2})
    drive.settle()
    drive.worker("k", 1)  # it joins behind the others, and stands between them
    seen = _seen(frames)
    assert seen["workers"] == _fresh(drive)
    assert [row["worker"] for row in seen["workers"]] == ["a", "k", "m", "z"]
    assert (seen["running"], "queued" in seen) == (1, False)
    assert sum(row["cells"] == "##" for row in seen["workers"]) == 1
    drive.run_out(drive.placed_on("j")[0])
    drive.operate("cordon", "m")
    seen = _seen(frames)
    assert seen["workers"] == _fresh(drive)
    assert seen["workers"][2]["state"] == "cordoned"
    drive.workers["z"].session = ""  # it renews no more
    drive.pass_time(drive.engine.config.lost_ms + 2_000)
    seen = _seen(frames)
    assert seen["workers"] == _fresh(drive)
    assert seen["workers"][3]["state"] == "lost"


def test_what_a_load_frame_says_of_a_device_is_seen_though_it_stays_closed() -> None:
    drive = Driving()
    drive.worker("w", 1)
    frames = FleetFrames(drive.engine)
    drive.load("w", s0="ecc")
    assert _seen(frames)["workers"][0]["cells"] == "!"
    drive.load("w", f0="pid 7")
    assert _seen(frames)["workers"][0]["cells"] == "x"
    assert _seen(frames)["workers"] == _fresh(drive)


def test_a_large_fleet_is_caught_up_with_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_frames, "AT_ONCE", 2)
    drive = Driving.with_hosts(*[1] * 5)
    frames = FleetFrames(drive.engine)
    assert sum(1 for _ in frames.catch_up()) == 2, "five rows, two a turn"
    assert msgspec.json.decode(frames.frame(LedgerCopies()))["workers"] == _fresh(drive)
