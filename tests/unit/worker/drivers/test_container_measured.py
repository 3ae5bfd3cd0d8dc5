"""The peaks of a container are read in its cgroup while it runs, here a played one, as its engine removes it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from moorage.schemas.frames import NO_PEAKS, Peaks
from moorage.worker.drivers.container import measured
from moorage.worker.drivers.container.measured import Measured


def play(folder: Path, *, cpu_us: int, **memory: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "memory.events").write_text("low 0\noom 0\noom_kill 0\n")
    (folder / "cpu.stat").write_text(f"usage_usec {cpu_us}\nuser_usec 1\n")
    for name in ("peak", "current"):
        (folder / f"memory.{name}").unlink(missing_ok=True)
    for name, count in memory.items():
        (folder / f"memory.{name}").write_text(f"{count}\n")


def test_the_peak_of_the_kernel_counts_and_stays_as_the_group_goes(tmp_path: Path) -> None:
    seen = Measured()
    play(tmp_path / "c", cpu_us=1_500_000, peak=3 << 30, current=1 << 20)
    assert seen.look(tmp_path / "c")
    play(tmp_path / "c", cpu_us=4_000_999, peak=(5 << 30) + 1, current=1 << 20)
    assert seen.look(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    assert not seen.look(tmp_path / "c")
    assert seen.peaks == Peaks(memory_mib=5121, cpu_ms=4000)


def test_an_older_kernel_has_the_highest_of_what_was_seen(tmp_path: Path) -> None:
    seen = Measured()
    for held in (2 << 20, 7 << 20, 3 << 20):
        play(tmp_path / "c", cpu_us=0, current=held)
        seen.look(tmp_path / "c")
    assert seen.peaks == Peaks(memory_mib=7, cpu_ms=0)


async def test_a_container_in_the_group_of_its_worker_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path / "worker", cpu_us=9, peak=1 << 30)
    monkeypatch.setattr(measured, "cgroup_of", lambda pid=None: tmp_path / "worker")
    seen = Measured()
    await seen.watch(1, asyncio.get_running_loop().create_future())
    assert seen.peaks is NO_PEAKS
