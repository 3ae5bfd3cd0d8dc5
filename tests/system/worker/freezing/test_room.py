"""Whether the memory of a frozen process fits into its host's RAM, and into what its job may use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.system.cgroup import CgroupBase
from moorage.worker.freezing.room import MARGIN_MIB, room_fault

PID = 4711
MIB = 1 << 20
V2 = "36 25 0:31 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "30 25 0:26 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, "proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {(MARGIN_MIB + 4000) * 1024} kB\n")
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def memory(folder: str, limit: str, used_mib: int, root: Path, *, cache_mib: int = 0) -> None:
    """Describe a cgroup of version 2."""
    put(root, f"{folder}/memory.max", f"{limit}\n")
    put(root, f"{folder}/memory.current", f"{used_mib * MIB}\n")
    put(root, f"{folder}/memory.stat", f"anon 1\ninactive_file {cache_mib * MIB}\nactive_file 0\nshmem 9999999999\n")


def test_the_host_keeps_a_margin(root: Path) -> None:
    assert room_fault(PID, 4000, root) == ""
    why = room_fault(PID, 4001, root)
    assert all(word in why for word in ("4001 MiB", f"{MARGIN_MIB + 4000} MiB", f"{MARGIN_MIB} MiB"))


def test_where_the_free_ram_is_not_known_the_driver_is_asked(tmp_path: Path) -> None:
    assert room_fault(PID, 10**9, tmp_path) == ""


def test_it_counts_for_the_jobs_own_limit(root: Path) -> None:
    """The kernel killed the job for being frozen."""
    put(root, "proc/self/mountinfo", V2)
    put(root, f"proc/{PID}/cgroup", "0::/moorage/m-1\n")
    memory("sys/fs/cgroup/moorage/m-1", str(2000 * MIB), 1500, root)
    assert room_fault(PID, 500, root) == ""
    why = room_fault(PID, 501, root)
    assert all(word in why for word in ("501 MiB", "2000 MiB", "500 MiB", "more memory"))


def test_files_that_the_kernel_gives_up_count_as_room(root: Path) -> None:
    put(root, "proc/self/mountinfo", V2)
    put(root, f"proc/{PID}/cgroup", "0::/moorage/m-1\n")
    memory("sys/fs/cgroup/moorage/m-1", str(2000 * MIB), 1990, root, cache_mib=1000)
    assert room_fault(PID, 1010, root) == ""
    assert room_fault(PID, 1011, root)


def test_every_level_counts(root: Path) -> None:
    put(root, "proc/self/mountinfo", V2)
    put(root, f"proc/{PID}/cgroup", "0::/moorage/m-1\n")
    memory("sys/fs/cgroup/moorage/m-1", "max", 100, root)
    memory("sys/fs/cgroup/moorage", str(1000 * MIB), 900, root)
    assert room_fault(PID, 100, root) == ""
    assert room_fault(PID, 101, root)


def test_version_1_counts_too(root: Path) -> None:
    put(root, "proc/self/mountinfo", V1)
    put(root, f"proc/{PID}/cgroup", "4:memory:/docker/x/m-1\n0::/\n")
    folder = "sys/fs/cgroup/memory/m-1"
    put(root, f"{folder}/memory.limit_in_bytes", f"{1000 * MIB}\n")
    put(root, f"{folder}/memory.usage_in_bytes", f"{900 * MIB}\n")
    put(root, f"{folder}/memory.stat", f"total_inactive_file {50 * MIB}\n")
    assert room_fault(PID, 150, root) == ""
    assert room_fault(PID, 151, root)


@pytest.fixture
def limited() -> Iterator[Path]:
    """A cgroup with a real limit of 64 MiB, of version 2 or 1, whichever has the memory controller here."""
    name, limit = f"room-{os.getpid()}", str(64 * MIB)
    base = CgroupBase.open(name)
    if base is not None and "memory" in base.controllers:
        folder, ignored = base.create("one", None, 64 * MIB)
        assert ignored == []
        yield Path(folder.path)
        folder.remove()
        base.remove()
        return
    if base is not None:
        base.remove()
    path = Path("/sys/fs/cgroup/memory", name)
    path.mkdir()
    (path / "memory.limit_in_bytes").write_text(limit)
    yield path
    path.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes cgroups with a limit")
def test_a_real_process_below_a_real_limit_has_no_room_beyond_it(limited: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (limited / "cgroup.procs").write_text(str(child.pid))
        assert room_fault(child.pid, 32) == ""
        assert "64 MiB" in room_fault(child.pid, 65)
    finally:
        child.kill()
        child.communicate()
