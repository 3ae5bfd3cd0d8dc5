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
