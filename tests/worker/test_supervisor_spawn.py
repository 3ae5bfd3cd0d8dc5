"""The launcher by itself: the compiled and the interpreted one, with the newer and the older way to clone."""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.worker.cgroup import CgroupBase, CgroupFolder
from moorage.worker.proctree import read_process
from moorage.worker.supervisor import compiled_launcher
from moorage.worker.supervisor import launcher as launcher_file
from moorage.worker.supervisor.child import StartRefused, judge
from moorage.worker.supervisor.launcher_client import CONFIRMATION, Launcher, LauncherGone
from moorage.worker.supervisor.protocol import StartMember

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
#: no assembly, as on other machines; and a kernel that does not know clone3, as under some seccomp filters
BUILDS = {"compiled": (), "compiled portable": ("-DPORTABLE",), "compiled clone": ("-DCLONE3=100000",)}


@pytest.fixture(params=["clone3", "clone", *(pytest.param(name, marks=NEEDS_COMPILER) for name in BUILDS)])
def launcher(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """`clone`: a launcher whose kernel does not know clone3, as under some seccomp filters."""
    program = None
    if request.param in BUILDS:
        program = str(tmp_path / "launcher")
        flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", *BUILDS[request.param]]
        subprocess.run(["cc", *flags, "-o", program, compiled_launcher.SOURCE], check=True)
    if request.param == "clone":
        source = Path(launcher_file.__file__).read_text()
        older = tmp_path / "launcher.py"
        older.write_text(source.replace("_SYS_CLONE3 = 435", "_SYS_CLONE3 = 100_000"))
        assert older.read_text() != source
        monkeypatch.setattr(launcher_file, "__file__", str(older))
    groups = os.getgroups()
    if os.geteuid() == 0:
        os.setgroups([*groups, 4321])  # what no child that becomes a user may keep
    started = Launcher.start(256, 256, program=program)
    if os.geteuid() == 0:
        os.setgroups(groups)
    yield started
    started.close()
    os.waitpid(started.pid, 0)


@contextlib.contextmanager
def pipes(count: int) -> Iterator[list[tuple[int, int]]]:
    made = [os.pipe2(os.O_CLOEXEC) for _ in range(count)]
    try:
        yield made
    finally:
        for pair in made:
            for descriptor in pair:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def answer(launcher: Launcher) -> list[int]:
    select.select([launcher], [], [], 30)
    pids = launcher.receive()
    assert pids is not None
    return pids


def group() -> tuple[CgroupBase | None, CgroupFolder | None]:
    base = CgroupBase.open(f"moorage-test-{os.getpid()}")
    return base, base.create("a", None, None)[0] if base is not None else None


def test_a_clone_is_our_child_in_its_cgroup(launcher: Launcher) -> None:
    base, folder = group()
    with pipes(2) as ((confirm, confirm_write), (out, out_write)):
        script = "cat /proc/self/cgroup; cut -d' ' -f4,6 /proc/$$/stat; ulimit -n; ls /proc/self/fd"
        child = judge(StartMember(key="k", argv=("sh", "-c", script), env={"PATH": "/bin:/usr/bin"}))
        passed = [confirm_write, out_write, out_write]
        if folder is not None:
            passed.append(os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY))
        launcher.send([child.request(0, 2, 3, 4 if folder is not None else -1)], passed)
        for descriptor in passed[:2] + passed[3:]:
            os.close(descriptor)
        (pid,) = answer(launcher)
        assert os.read(confirm, CONFIRMATION.size) == b""
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
    with pipes(2) as ((confirm, confirm_write), (_, out_write)):
        members = [
            StartMember(key="a", argv=("/bin/true",), env={}, cwd="/nowhere"),
            StartMember(key="b", argv=("/bin/true",), env={}),
            StartMember(key="c", argv=("/nowhere",), env={}),
        ]
        requests = [judge(member).request(slot, 2, 2, -1) for slot, member in enumerate(members)]
        launcher.send(requests, [confirm_write, out_write])
        os.close(confirm_write)
        pids = answer(launcher)
        said = set()
        while data := os.read(confirm, CONFIRMATION.size):
            said.add(CONFIRMATION.unpack(data))
        assert said == {(0, launcher_file.STAGE_CWD, 2), (2, launcher_file.STAGE_EXEC, 2)}
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [127, 0, 127]


@pytest.mark.skipif(os.geteuid() != 0, reason="nobody else may become another user")
def test_a_child_has_all_that_was_asked_for_and_nothing_else(launcher: Launcher) -> None:
    script = (
        "id -u; id -G; umask; pwd; ulimit -Sf; ulimit -Hf; echo ${#LARGE} $EMPTY.$SAYS; env | wc -l;"
        "grep -E 'NoNewPrivs|SigIgn|SigBlk' /proc/self/status"
    )
    env = {"PATH": "/bin:/usr/bin", "LARGE": "x" * 100_000, "EMPTY": "", "SAYS": "a=b"}
    member = StartMember(
        key="k", argv=("sh", "-c", script), env=env, cwd="/usr", user="54321", limits={"fsize": (512, -1)}
    )
    with pipes(2) as ((confirm, confirm_write), (out, out_write)):
        launcher.send([judge(member).request(0, 2, 2, -1)], [confirm_write, out_write])
        os.close(confirm_write)
        os.close(out_write)
        (pid,) = answer(launcher)
        with open(out, closefd=False) as file:
            said = file.read().split()
        assert (os.read(confirm, CONFIRMATION.size), os.waitpid(pid, 0)) == (b"", (pid, 0))
    # dash adds PWD
    assert said[:10] == ["54321", "54321", "0077", "/usr", "1", "unlimited", "100000", ".a=b", "5", "SigBlk:"]
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
        with pipes(2) as ((confirm, confirm_write), (out, out_write)):
            pids = []
            for argv in ((str(program), "its own"), ("/bin/true", "another's"), ("/bin/true", "another's")):
                child = judge(StartMember(key="k", argv=argv, env={}))
                launcher.send([child.request(0, 2, 2, -1)], [confirm_write, out_write])
                pids += answer(launcher)
            os.close(confirm_write)
            for pid in pids[1:]:
                assert os.waitpid(pid, 0) == (pid, 0)
            assert os.waitpid(pids[0], os.WNOHANG) == (0, 0)
            os.close(lease)  # and with it the lease
            lease = -1
            assert os.waitpid(pids[0], 0) == (pids[0], 0)
            assert os.read(confirm, CONFIRMATION.size) == b""
            assert os.read(out, 100) == b"its own\n"
    finally:
        signal.signal(signal.SIGIO, before)
        if lease >= 0:
            os.close(lease)


def test_a_launcher_that_is_gone_is_told(launcher: Launcher) -> None:
    process = read_process(launcher.pid)
    assert process is not None
    os.kill(launcher.pid, 9)
    select.select([launcher], [], [], 30)
    with pytest.raises(LauncherGone):
        launcher.receive()


@pytest.mark.parametrize(
    ("user", "ids"), [(None, None), ("0", (0, 0)), (54321, (54321, 54321)), ("54321", (54321, 54321))]
)
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's answer differs")
def test_users_are_looked_up(user: str | int | None, ids: tuple[int, int] | None) -> None:
    child = judge(StartMember(key="k", argv=("x",), env={}, user=user))
    assert (child.ids[:2] if child.ids is not None else None) == ids


def test_programs_are_searched_in_the_childs_own_path() -> None:
    assert judge(StartMember(key="k", argv=("x",), env={"PATH": "/a::/b"})).paths == [b"/a/x", b"./x", b"/b/x"]
    assert judge(StartMember(key="k", argv=("./x",), env={"PATH": "/a"})).paths == [b"./x"]
    with pytest.raises(StartRefused) as refused:
        judge(StartMember(key="", argv=("x",), env={}))
    assert refused.value.stage == "request"
