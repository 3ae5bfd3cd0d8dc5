"""Cgroups v2 by their files; the parts that need a writable hierarchy run where there is one."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.system.cgroup import CgroupBase, CgroupFolder, cgroup_of, mount_of, parse_own_path
from tests.first_thread_gone import ARGV, running

HYBRID = """\
30 23 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
32 30 0:28 / /sys/fs/cgroup/unified\\040here rw,relatime shared:9 - cgroup2 cgroup2 rw
"""


@pytest.fixture
def base() -> Iterator[CgroupBase]:
    made = CgroupBase.open(f"moorage-test-{os.getpid()}")
    if made is None:
        pytest.skip("no writable cgroup v2 here")
    yield made
    made.kill()
    while not made.remove():
        made.kill()


def spawn_in(folder: CgroupFolder, *argv: str) -> subprocess.Popen[bytes]:
    script = 'echo 0 > "$0/cgroup.procs" && echo in && exec "$@"'
    process = subprocess.Popen(["/bin/sh", "-c", script, folder.path, *argv], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"in\n"
    process.stdout.close()
    return process


def test_the_mount_is_found_by_its_type() -> None:
    assert mount_of(HYBRID, "cgroup2") == ("/", "/sys/fs/cgroup/unified here")
    assert mount_of("25 20 0:22 /docker/a /sys/fs/cgroup ro - cgroup2 cgroup rw", "cgroup2") == (
        "/docker/a",
        "/sys/fs/cgroup",
    )
    assert mount_of("31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory", "cgroup2") is None
    assert mount_of("", "cgroup2") is None


def test_the_own_path_is_the_line_without_a_controller() -> None:
    assert parse_own_path("4:memory:/a\n0::/b c\n") == "/b c"
    assert parse_own_path("4:memory:/a\n") is None


def test_where_nothing_can_be_written_there_is_no_base(tmp_path: Path) -> None:
    assert CgroupBase.open("x", under=tmp_path) is None


def test_a_group_is_empty_when_it_is_gone(tmp_path: Path) -> None:
    gone = CgroupFolder(str(tmp_path / "gone"))
    gone.kill()
    assert gone.is_empty()
    assert gone.remove()
    assert gone.pids() == []


def test_a_base_that_somebody_removed_is_made_anew(base: CgroupBase) -> None:
    """Every start on the host failed from then on."""
    controllers = base.controllers
    os.rmdir(base.path)
    folder, ignored = base.create("a", None, None)
    assert (ignored, base.controllers) == ([], controllers)
    process = spawn_in(folder, "sleep", "60")
    assert folder.pids() == [process.pid]
    folder.kill()
    assert process.wait() == -signal.SIGKILL


def test_kill_takes_everything_below(base: CgroupBase) -> None:
    folder, ignored = base.create("a", None, None)
    assert ignored == []
    nested = CgroupFolder(folder.path + "/b/c")
    os.makedirs(nested.path)
    processes = [spawn_in(folder, "sleep", "1000"), spawn_in(nested, "setsid", "sleep", "1000")]
    assert not folder.is_empty()
    assert not folder.remove()
    assert sorted(folder.pids()) == sorted(process.pid for process in processes)
    folder.kill()
    for process in processes:
        assert process.wait() == -9
    while not folder.remove():
        continue
    assert not folder.exists()


def test_kill_takes_a_process_whose_first_thread_has_ended(base: CgroupBase) -> None:
    folder, _ = base.create("a", None, None)
    script = 'echo 0 > "$0/cgroup.procs" && exec "$@"'
    with running(["/bin/sh", "-c", script, folder.path, *ARGV]) as process:
        folder.kill()
        assert process.wait(60) == -signal.SIGKILL
    while not folder.remove():
        continue


def test_a_name_is_used_again_only_once_it_is_empty(base: CgroupBase) -> None:
    folder, _ = base.create("a", None, None)
    os.mkdir(folder.path + "/left")
    base.create("a", None, None)
    process = spawn_in(folder, "sleep", "1000")
    with pytest.raises(FileExistsError):
        base.create("a", None, None)
    process.kill()
    process.wait()
    while not folder.remove():
        continue
    base.create("a", None, None)


def test_limits_that_cannot_be_set_are_named(base: CgroupBase) -> None:
    folder, ignored = base.create("a", 1500, 1 << 30)
    assert ("cpu_milli" in ignored) == ("cpu" not in base.controllers)
    assert ("memory_bytes" in ignored) == ("memory" not in base.controllers)
    if "memory" in base.controllers:
        assert Path(folder.path, "memory.max").read_text().strip() == str(1 << 30)
        assert Path(folder.path, "memory.oom.group").read_text().strip() == "1"
        swap = Path(folder.path, "memory.swap.max")
        assert not swap.exists() or swap.read_text().strip() == "0"
    if "cpu" in base.controllers:
        assert Path(folder.path, "cpu.max").read_text().strip() == "150000 100000"


def test_what_a_former_one_left_is_ended(base: CgroupBase) -> None:
    folder, _ = base.create("a", None, None)
    process = spawn_in(folder, "sleep", "1000")
    again = CgroupBase.open(f"moorage-test-{os.getpid()}")
    assert again is not None
    again.kill_former()
    assert process.wait() == -9


def test_the_own_group_holds_this_process() -> None:
    own = cgroup_of()
    if own is None:
        pytest.skip("no cgroup v2 here")
    assert str(os.getpid()) in (own / "cgroup.procs").read_text().split()
