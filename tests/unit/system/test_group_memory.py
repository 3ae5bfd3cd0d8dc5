"""What the kernel says of a group's memory, read from its files; played as files here."""

from __future__ import annotations

from pathlib import Path

from moorage.system.cgroup import CgroupFolder, GroupMemory

EVENTS = "low 0\nhigh 0\nmax 42\noom 1\noom_kill 3\noom_group_kill 1\n"


def test_kills_limit_and_peak_are_read(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text(EVENTS)
    (tmp_path / "memory.peak").write_text("1073741824\n")
    (tmp_path / "memory.max").write_text("2147483648\n")
    assert CgroupFolder(str(tmp_path)).memory() == GroupMemory(3, True, 1 << 30, 2 << 30)


def test_an_older_kernel_has_no_peak_and_a_group_may_have_no_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("oom 0\noom_kill 1\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert CgroupFolder(str(tmp_path)).memory() == GroupMemory(1, False, 0, 0)


def test_where_memory_is_not_counted_nothing_is_known(tmp_path: Path) -> None:
    assert CgroupFolder(str(tmp_path)).memory() is None
    assert CgroupFolder(str(tmp_path / "gone")).memory() is None
    (tmp_path / "memory.events").write_text("broken")
    assert CgroupFolder(str(tmp_path)).memory() is None


def test_its_cpu_time_is_read_with_or_without_that_controller(tmp_path: Path) -> None:
    group = CgroupFolder(str(tmp_path))
    assert group.cpu_ms() is None
    (tmp_path / "cpu.stat").write_text("usage_usec 7250499\nuser_usec 7000000\nsystem_usec 250499\n")
    assert group.cpu_ms() == 7250
    (tmp_path / "cpu.stat").write_text("")
    assert group.cpu_ms() is None
