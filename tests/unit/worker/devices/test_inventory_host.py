"""What a host says of itself: names that stay, and limits of cgroups in both versions."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from moorage.system.proctree import boot_id
from moorage.worker.devices.readers.host import (
    FOLDER_FILE,
    cpu_milli,
    folder_machine,
    host_facts,
    machine_id,
    memory_mib,
)

RAW = "0123456789abcdef0123456789abcdef"
GIB = 1024**3


def put(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def cgroup(root: Path, lines: str, mounts: str) -> None:
    put(root, "proc/self/cgroup", lines)
    put(root, "proc/self/mountinfo", mounts)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, "proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    put(tmp_path, "proc/sys/kernel/random/boot_id", "5f5a1d7e-0000-4000-8000-1234567890ab\n")
    return tmp_path


def test_this_host(tmp_path: Path) -> None:
    facts = host_facts(tmp_path)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", facts.worker)
    assert re.fullmatch(r"[0-9a-f]{32}", facts.machine)
    assert re.fullmatch(r"[0-9a-f-]{36}", facts.boot)
    assert facts.cpu_milli > 0
    assert facts.memory_mib > 0
    assert host_facts(tmp_path) == facts


def test_the_machines_own_id_is_keyed_and_stays(root: Path) -> None:
    put(root, "etc/machine-id", RAW + "\n")
    found = machine_id(root / "state", root)
    assert re.fullmatch(r"[0-9a-f]{32}", found)
    assert found != RAW
    assert machine_id(root / "elsewhere", root) == found
    assert not (root / "state").exists()


@pytest.mark.parametrize("text", ["", "uninitialized\n", "0" * 32 + "\n"])
def test_firmware_names_a_machine_without_an_id(root: Path, text: str) -> None:
    put(root, "etc/machine-id", text)
    put(root, "sys/class/dmi/id/product_uuid", "01234567-89AB-CDEF-0123-456789ABCDEF\n")
    first = machine_id(root / "state", root)
    put(root, "etc/machine-id", RAW)
    assert machine_id(root / "state", root) == first  # the same 128 bits, however they are spelt


def test_a_machine_without_any_name_draws_one_and_keeps_it(root: Path) -> None:
    put(root, "sys/class/dmi/id/product_uuid", "00000000-0000-0000-0000-000000000000\n")
    drawn = machine_id(root / "state", root)
    assert machine_id(root / "state", root) == drawn
    assert machine_id(root / "other", root) != drawn
    kept = root / "state/machine-id"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert os.listdir(root / "state") == ["machine-id"]
    kept.write_text("not an id")
    assert machine_id(root / "state", root) != drawn


def test_a_state_folder_is_a_machine_of_its_own(tmp_path: Path) -> None:
    first = folder_machine("m", tmp_path / "one")
    assert re.fullmatch(r"[0-9a-f]{32}", first)
    assert folder_machine("m", tmp_path / "one") == first
    assert folder_machine("m", tmp_path / "two") != first
    assert folder_machine("n", tmp_path / "one") != first  # the folder on another machine
    assert (tmp_path / "one" / FOLDER_FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / "one" / FOLDER_FILE).write_bytes(b"\xff\xfe no id\n")
    assert folder_machine("m", tmp_path / "one") not in (first, "m")  # drawn anew


def test_the_boot_is_the_kernels(root: Path) -> None:
    assert boot_id(root) == "5f5a1d7e-0000-4000-8000-1234567890ab"


def test_without_cgroups_the_machine_is_the_limit(root: Path) -> None:
    assert memory_mib(root) == 16384
    assert cpu_milli(root) == len(os.sched_getaffinity(0)) * 1000


V2 = "36 25 0:31 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


def test_every_level_of_version_2_limits(root: Path) -> None:
    cgroup(root, "0::/system.slice/moorage.service\n", V2)
    base = "sys/fs/cgroup/system.slice"
    put(root, f"{base}/moorage.service/memory.max", "max\n")
    put(root, f"{base}/moorage.service/cpu.max", "max 100000\n")
    put(root, f"{base}/memory.max", f"{4 * GIB}\n")
    put(root, f"{base}/cpu.max", "50000 100000\n")
    assert memory_mib(root) == 4096
    assert cpu_milli(root) == 500


def test_version_1_and_hybrid_layouts_limit_too(root: Path) -> None:
    cgroup(
        root,
        "5:memory:/box\n4:cpu,cpuacct:/box\n0::/\n",
        "30 25 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "32 25 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )
    put(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{2 * GIB}\n")
    put(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    put(root, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "25000\n")
    put(root, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n")
    put(root, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    assert memory_mib(root) == 2048
    assert cpu_milli(root) == 250


def test_a_path_above_the_mount_counts_from_the_mounts_top(root: Path) -> None:
    cgroup(root, "0::/../../other\n", V2)
    put(root, "sys/fs/cgroup/memory.max", f"{GIB}\n")
    assert memory_mib(root) == 1024


def test_a_useless_quota_is_passed_over(root: Path) -> None:
    cgroup(root, "0::/\n", V2)
    put(root, "sys/fs/cgroup/cpu.max", "50000 0\n")
    assert cpu_milli(root) == len(os.sched_getaffinity(0)) * 1000
