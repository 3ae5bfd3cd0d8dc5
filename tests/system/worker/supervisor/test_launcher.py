"""The launcher by itself: compiled, compiled for a kernel without clone3, and the fork that serves without either."""

from __future__ import annotations

import contextlib
import fcntl
import os
import runpy
import select
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.system.cgroup import CgroupBase
from moorage.worker.supervisor import launcher_client
from moorage.worker.supervisor.child import Child, StartRefused, checked_child
from moorage.worker.supervisor.launcher_client import Launcher, LauncherGone, open_compiled
from moorage.worker.supervisor.protocol import StartAttempt

HAS_COMPILER: Final = shutil.which("cc") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="nobody else may become another user")
BUILD: Final = Path(__file__).resolve().parents[4] / "worker" / "build_launcher.py"
#: `clone`: a kernel that does not know clone3, as under some seccomp filters
FLAGS: Final = {"compiled": ("-Werror",), "clone": ("-Werror", "-DCLONE3=100000")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By kind: the program, from the source as it is now."""
    if not HAS_COMPILER:
        pytest.skip("no C compiler")
    build = runpy.run_path(str(BUILD))["build"]
    made = {kind: tmp_path_factory.mktemp(kind) / "launcher.bin" for kind in FLAGS}
    for kind, path in made.items():
        build(path, *FLAGS[kind])
    return made


@pytest.fixture(params=["forked", *(pytest.param(kind, marks=needs_compiler) for kind in FLAGS)])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    program = -1
    if request.param != "forked":
        program, why = open_compiled(request.getfixturevalue("built")[request.param])
        assert not why
    made = Launcher(program)
    given = os.dup(0)  # as by a shell or a service manager
    os.set_inheritable(given, True)
    groups = os.getgroups()
    if os.geteuid() == 0:
        os.setgroups([*groups, 4321])  # what no child that becomes a user may keep
    if program >= 0:
        made.running()
    yield made
    os.close(given)
    if os.geteuid() == 0:
        os.setgroups(groups)
    end(made)
    if program >= 0:
        os.close(program)


def start(launcher: Launcher, child: Child, confirm: int, stdout: int, stderr: int, *cgroup: int) -> int:
    stdin = os.open(os.devnull, os.O_RDONLY)
    try:
        return launcher.answer(launcher.ask(child, confirm, stdin, stdout, stderr, *cgroup))
    finally:
        os.close(stdin)


def end(launcher: Launcher) -> None:
    launcher.close()
    if launcher.pid is not None:
        os.waitpid(launcher.pid, 0)


@contextlib.contextmanager
def pipes() -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    made = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
    try:
        yield made[0], made[1]
    finally:
        for pair in made:
            for descriptor in pair:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def attempt(*argv: str, **fields: Any) -> StartAttempt:
    return StartAttempt(**({"key": "k", "argv": argv, "env": {"PATH": "/bin:/usr/bin"}} | fields))


def test_a_process_is_our_child_in_its_cgroup(launcher: Launcher) -> None:
    base = CgroupBase.open(f"moorage-test-{os.getpid()}")
    folder = base.create("a", None, None)[0] if base is not None else None
    with pipes() as ((confirm, confirm_write), (out, out_write)):
        script = "cat /proc/self/cgroup; cut -d' ' -f4,6 /proc/$$/stat; ulimit -n; ls /proc/self/fd; cat"
        child = checked_child(attempt("sh", "-c", script), files=(256, 256))
        opened = [os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY)] if folder is not None else []
        pid = start(launcher, child, confirm_write, out_write, out_write, *opened)
        for descriptor in (confirm_write, out_write, *opened):
            os.close(descriptor)
        assert os.read(confirm, 64) == b""
        with open(out, closefd=False) as file:
            text = file.read()
        assert os.waitpid(pid, 0) == (pid, 0)
        if base is not None:
            assert folder is not None
            assert f"0::{folder.path.removeprefix('/sys/fs/cgroup/unified').removeprefix('/sys/fs/cgroup')}\n" in text
            while not base.remove():
                continue
        assert f"\n{os.getpid()} {pid}\n256\n0\n1\n2\n3\n" in text


def test_a_child_that_cannot_exec_says_where_it_failed(launcher: Launcher) -> None:
    failing = {
        b"cwd 2": attempt("/bin/true", cwd="/nowhere"),
        b"exec 2": attempt("nowhere"),
        b"exec 20": attempt("/etc/hostname/x"),
        b"exec 13": attempt("passwd", env={"PATH": "/etc:/nowhere"}),
        b"limits 22": attempt("/bin/true"),
        b"": attempt("/bin/true"),
    }
    for said, asked in failing.items():
        with pipes() as ((confirm, confirm_write), (_, out_write)):
            child = checked_child(asked, files=(9, 8) if said == b"limits 22" else None)
            pid = start(launcher, child, confirm_write, out_write, out_write)
            os.close(confirm_write)
            assert os.read(confirm, 64) == said
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (127 if said else 0)


@needs_root
def test_a_child_has_all_that_was_asked_for_and_nothing_else(launcher: Launcher) -> None:
    script = (
        "id -u; id -G; umask; pwd; ulimit -Sn; ulimit -Hn; echo ${#LARGE} $EMPTY.$SAYS; env | wc -l;"
        "grep -E 'NoNewPrivs|SigIgn|SigBlk' /proc/self/status"
    )
    env = {"PATH": "/bin:/usr/bin", "LARGE": "x" * 100_000, "EMPTY": "", "SAYS": "a=b"}
    asked = attempt("sh", "-c", script, env=env, cwd="/usr", user="54321")
    with pipes() as ((confirm, confirm_write), (out, out_write)):
        pid = start(launcher, checked_child(asked, files=(96, 97)), confirm_write, out_write, out_write)
        os.close(confirm_write)
        os.close(out_write)
        with open(out, closefd=False) as file:
            said = file.read().split()
        assert (os.read(confirm, 64), os.waitpid(pid, 0)) == (b"", (pid, 0))
    # dash adds PWD
    assert said[:10] == ["54321", "54321", "0077", "/usr", "96", "97", "100000", ".a=b", "5", "SigBlk:"]
    theirs = 0b11 << 31  # the C library's own signals, 32 and 33: it lets nobody set them
    assert (int(said[10], 16), int(said[12], 16) & ~theirs, said[14]) == (0, 0, "1")


def test_a_program_that_cannot_be_read_yet_holds_up_no_other(launcher: Launcher, tmp_path: Path) -> None:
    """As on a file system that does not answer: exec waits until the lease on its file is given up (fcntl(2))."""
    program = tmp_path / "held"
    shutil.copy("/bin/echo", program)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    lease = os.open(program, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pipes() as ((confirm, confirm_write), (out, out_write)):
            pids = []
            for argv in ((str(program), "its own"), ("/bin/true", "another's"), ("/bin/true", "another's")):
                pids.append(start(launcher, checked_child(attempt(*argv)), confirm_write, out_write, out_write))
            os.close(confirm_write)
            for pid in pids[1:]:
                assert os.waitpid(pid, 0) == (pid, 0)
            assert os.waitpid(pids[0], os.WNOHANG) == (0, 0)
            os.close(lease)  # and with it the lease
            lease = -1
            assert os.waitpid(pids[0], 0) == (pids[0], 0)
            assert os.read(confirm, 64) == b""
            assert os.read(out, 100) == b"its own\n"
    finally:
        signal.signal(signal.SIGIO, before)
        if lease >= 0:
            os.close(lease)


@needs_compiler
def test_a_launcher_that_dies_or_hangs_is_replaced(built: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = open_compiled(built["compiled"])
    launcher = Launcher(program)
    child = checked_child(attempt("/bin/true"))
    with pipes() as ((_, confirm), (_, out)):
        with monkeypatch.context() as patch:
            patch.setattr(launcher_client, "ANSWER_S", 0.1)  # of the one that is stopped, and of no other
            launcher.running()
        monkeypatch.setattr(launcher_client, "ANSWER_S", 60)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            first = launcher.pid
            assert first is not None
            os.kill(first, number)
            if number == signal.SIGKILL:
                os.waitpid(first, 0)
            else:  # it may still do what it was asked for: nobody can say whether there is a process
                with pytest.raises(LauncherGone, match="did not answer"):
                    start(launcher, child, confirm, out, out)
                assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == -signal.SIGKILL
            pid = start(launcher, child, confirm, out, out)
            assert os.waitpid(pid, 0) == (pid, 0)
            assert launcher.pid != first
    end(launcher)
    os.close(program)


def test_a_child_ends_with_the_process_that_started_it(launcher: Launcher, request: pytest.FixtureRequest) -> None:
    """And not with another thread of it, or with the launcher."""
    script = (
        "import os, sys, threading, time\n"
        "from pathlib import Path\n"
        "from moorage.worker.supervisor.child import checked_child\n"
        "from moorage.worker.supervisor.launcher_client import Launcher, open_compiled\n"
        "from moorage.worker.supervisor.protocol import StartAttempt\n"
        "launcher = Launcher(open_compiled(Path(sys.argv[1]))[0])\n"
        "child = checked_child(StartAttempt(key='k', argv=('/bin/sleep', '600'), env={}))\n"
        "confirm, write = os.pipe()\n"
        "pid = launcher.answer(launcher.ask(child, write, 0, 2, 2))\n"
        "os.close(write)\n"
        "os.read(confirm, 9)\n"
        "other = threading.Thread(target=time.sleep, args=(0.0,))\n"
        "other.start()\nother.join()\n"
        "launcher.close()\n"
        "print(pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    program = "/nowhere" if launcher.pid is None else str(request.getfixturevalue("built")["compiled"])
    words = [sys.executable, "-c", script, program]
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        over = os.pidfd_open(pid)
        try:
            assert select.select([over], [], [], 0.1)[0] == []
            parent.kill()
            assert select.select([over], [], [], 30)[0] == [over]
        finally:
            os.close(over)


# ------------------------------------------------------------------------------------------- the program itself


@needs_compiler
def test_the_installation_has_one() -> None:
    assert open_compiled()[1] == "", "install moorage again: make, or pip install -e ."


def test_without_a_compiler_none_is_built_and_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "launcher.bin"
    program.write_text("built from an older source")
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(SystemExit, match="/nowhere/cc: No such file or directory"):
        runpy.run_path(str(BUILD))["build"](program)
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_a_program_that_is_not_ours_alone_is_not_run(built: dict[str, Path], tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    program = tmp_path / "launcher.bin"
    program.write_text(f"#!/bin/sh\necho ran > {ran}\nexit {launcher_client.CONTRACT}\n")
    if os.geteuid() == 0:
        os.chown(program, -1, 54321)
    for mode in (0o775, 0o757):
        program.chmod(mode)
        if mode & stat.S_IWGRP and program.stat().st_gid == os.geteuid():
            continue  # without root's rights the group stays the own one
        descriptor, why = open_compiled(program)
        assert descriptor == -1
        assert f"can be written by other users (uid {os.geteuid()}, mode {mode:o})" in why
    if os.geteuid() == 0:
        program.chmod(0o755)
        os.chown(program, 54321, 0)
        assert "uid 54321" in open_compiled(program)[1]
    assert not ran.exists()


@needs_compiler
def test_a_program_that_its_owners_own_group_may_write_is_run(built: dict[str, Path], tmp_path: Path) -> None:
    """With a group of one's own the umask is 002, and pip installs files that the group may write."""
    program = tmp_path / "launcher.bin"
    shutil.copy(launcher_client.PROGRAM, program)
    program.chmod(0o775)
    descriptor, why = open_compiled(program)
    assert ("can be written" in why) == (program.stat().st_gid != os.geteuid())
    if descriptor >= 0:
        os.close(descriptor)


@needs_compiler
def test_a_program_of_another_release_or_machine_is_not_used(tmp_path: Path) -> None:
    program = tmp_path / "launcher.bin"
    assert "No such file" in open_compiled(program)[1]
    shutil.copy("/bin/true", program)
    assert "was built from other sources" in open_compiled(program)[1]
    program.write_bytes(b"\x7fELF, but not of this machine")
    assert "does not run here" in open_compiled(program)[1]


# --------------------------------------------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("user", "ids"), [(None, None), ("0", (0, 0)), (54321, (54321, 54321)), ("54321", (54321, 54321))]
)
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's answer differs")
def test_users_are_looked_up(user: str | int | None, ids: tuple[int, int] | None) -> None:
    child = checked_child(attempt("x", user=user))
    assert (child.ids[:2] if child.ids is not None else None) == ids


def test_programs_are_searched_in_the_childs_own_path() -> None:
    assert checked_child(attempt("x", env={"PATH": "/a::/b"})).paths == [b"/a/x", b"./x", b"/b/x"]
    assert checked_child(attempt("./x", env={"PATH": "/a"})).paths == [b"./x"]
    with pytest.raises(StartRefused) as refused:
        checked_child(attempt("x", key=""))
    assert refused.value.stage == "request"
