"""What /proc tells, on real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from moorage.system import proctree
from moorage.system.proctree import (
    STATE_MARK,
    all_processes,
    boot_id,
    boottime_s,
    children,
    descendants,
    kill_process,
    kill_trees,
    marks_of,
    read_environ,
    read_process,
    scan_marks,
    stopped_pids,
)
from tests.first_thread_gone import running


@pytest.fixture
def tree() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process, its child and its grandchild, each marked; the pids in that order.

    The grandchild stops itself and becomes no other program, as the environment of a process is empty amid an exec.
    """
    script = "sh -c 'sh -c \"echo \\$\\$; kill -STOP \\$\\$\" & echo $$; wait' & echo $$; wait"
    env = {"PATH": os.environ["PATH"], "MOORAGE_JOB": "tree", "MOORAGE_FENCE": f"{os.getpid()}"}
    process = subprocess.Popen(["/bin/sh", "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = {int(process.stdout.readline()) for _ in range(3)}
    pids = [process.pid]
    while len(pids) < 3:
        (child,) = [pid for pid in found if (now := read_process(pid)) is not None and now.parent == pids[-1]]
        pids.append(child)
    yield process, pids
    kill_trees(pids)
    process.wait()
    process.stdout.close()


def test_the_processes_that_a_signal_has_stopped_are_found(tree: tuple[subprocess.Popen[str], list[int]]) -> None:
    _, pids = tree
    while not (found := stopped_pids()) or pids[-1] not in found:
        pass
    assert set(found) & set(pids) == {pids[-1]}


def test_a_process_is_read_whatever_its_name() -> None:
    script = "import ctypes, sys\nctypes.CDLL(None).prctl(15, b') Z 1 (')\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = read_process(process.pid)
        assert found is not None
        assert (found.parent, found.dead, found.kernel_thread) == (os.getpid(), False, False)
        assert abs(found.start_ticks / proctree.TICKS_PER_S - boottime_s()) < 60


def test_a_process_that_is_gone_is_none() -> None:
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    assert read_process(process.pid) is None
    assert read_environ(process.pid) is None
    assert children(process.pid) == []


def test_descendants_come_after_their_parents(tree: tuple[subprocess.Popen[str], list[int]]) -> None:
    _, pids = tree
    assert descendants([pids[0]]) == pids
    assert children(pids[0]) == [pids[1]]
    assert pids[0] in children(os.getpid())


def test_children_are_found_without_the_kernels_list(
    tree: tuple[subprocess.Popen[str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pids = tree

    def no_such_file(path: str, *arguments: object, **keywords: object) -> object:
        if str(path).endswith("/children"):
            raise FileNotFoundError(path)
        return open(path, *arguments, **keywords)  # type: ignore[call-overload]

    monkeypatch.setattr(proctree, "open", no_such_file, raising=False)
    assert children(pids[0]) == [pids[1]]


def test_a_tree_is_killed_whole(tree: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = tree
    assert kill_trees([pids[0]]) == 3
    assert process.wait() == -signal.SIGKILL
    deadline_s = time.monotonic() + 30
    while any((now := read_process(pid)) is not None and not now.dead for pid in pids):
        assert time.monotonic() < deadline_s


def test_a_pid_of_another_time_is_not_killed(tree: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = tree
    now = read_process(pids[0])
    assert now is not None
    other = proctree.Process(now.pid, now.parent, now.group, now.session, now.state, now.start_ticks - 1, False, 1)
    assert not kill_process(other)
    assert process.poll() is None
    assert kill_process(now)


def test_marks_are_found_in_every_process_of_an_attempt(tree: tuple[subprocess.Popen[str], list[int]]) -> None:
    _, pids = tree
    marks = marks_of({"MOORAGE_JOB": "tree", "MOORAGE_FENCE": str(os.getpid()), "PATH": "x"})
    assert marks == (b"MOORAGE_JOB=tree", f"MOORAGE_FENCE={os.getpid()}".encode())
    others = (b"MOORAGE_JOB=tree", b"MOORAGE_FENCE=0")
    scan = scan_marks({"marks": marks, "others": others, "none": ()}, os.geteuid())
    assert sorted(process.pid for process in scan.marked["marks"]) == sorted(pids)
    assert set(scan.marked) == {"marks"}
    assert set(pids) <= {process.pid for process in scan.others}


def test_a_set_without_a_state_folder_matches_no_process_of_another_supervisor() -> None:
    job = {"MOORAGE_JOB": "a", "MOORAGE_FENCE": "10"}
    process = subprocess.Popen(["/bin/sleep", "1000"], env={**job, STATE_MARK: "/its/own"})
    try:
        deadline_s = time.monotonic() + 30  # until its exec it still shows the environment of this process
        while os.fsencode(f"{STATE_MARK}=/its/own") not in (read_environ(process.pid) or ()):
            assert time.monotonic() < deadline_s
        sets = {"any": marks_of(job), "its own": marks_of({**job, STATE_MARK: "/its/own"})}
        found = scan_marks({**sets, "another": marks_of({**job, STATE_MARK: "/another"})}, os.geteuid()).marked
        assert {name for name, each in found.items() if process.pid in {one.pid for one in each}} == {"its own"}
    finally:
        process.kill()
        process.wait()


def test_an_empty_environment_is_told_as_unreadable() -> None:
    process = subprocess.Popen(["/bin/sleep", "1000"], env={})
    try:
        # Until its exec it still shows the environment of this process.
        deadline_s = time.monotonic() + 30
        while read_environ(process.pid) != frozenset():
            assert time.monotonic() < deadline_s
        scan = scan_marks({"x": (b"MOORAGE_JOB=x",)}, os.geteuid())
        assert process.pid in {found.pid for found in scan.unreadable}
    finally:
        process.kill()
        process.wait()


def test_a_process_lives_while_one_of_its_threads_does() -> None:
    marks = {"MOORAGE_JOB": "threads", "MOORAGE_FENCE": str(os.getpid())}
    with running(env=marks) as process:
        found = read_process(process.pid)
        assert found is not None
        assert (found.state, found.dead) == ("Z", False)
        environ = read_environ(process.pid)
        assert environ is not None
        assert set(marks_of(marks)) <= environ
        scan = scan_marks({"marks": marks_of(marks)}, os.geteuid())
        assert [each.pid for each in scan.marked["marks"]] == [process.pid]
        assert kill_trees([process.pid]) == 1
        assert process.wait(60) == -signal.SIGKILL


def test_zombies_and_kernel_threads_are_known_as_such() -> None:
    process = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    zombie = read_process(process.pid)
    assert zombie is not None
    assert zombie.dead
    process.wait()
    for found in all_processes():
        if found.parent == 2:
            assert found.kernel_thread


def test_the_boot_id_is_one_of_this_boot() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36
