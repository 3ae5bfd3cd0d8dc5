"""Folders for secrets on their way into containers: in memory, the agent's own, and where no container looks."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moorage.worker.attempt import memory_folder
from moorage.worker.attempt.memory_folder import SHARED, MemoryFolder, NoMemory
from moorage.worker.drivers.container.entry import Entries, NoEntry

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root alone mounts, and becomes another user")
NOBODY = 65534
LINGER = "set XDG_RUNTIME_DIR to a folder on a tmpfs: loginctl enable-linger makes one"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of this test's own in /dev/shm, which every user may write to."""
    folder = SHARED / f"moorage-test-{secrets.token_hex(8)}"
    folder.mkdir()
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        for mount in mounts_below(folder):
            subprocess.run(["umount", mount], check=True)
        for left in sorted(folder.rglob("*"), reverse=True):
            left.rmdir() if left.is_dir() else left.unlink()
        folder.rmdir()


def mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(f"{folder}/")]


def as_nobody(work: Callable[[], object]) -> str:
    """Do this in a process of the user nobody, and return what was raised there; "" for nothing."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        why = ""
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            work()
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
        os.write(write, why.encode())
        os._exit(0)
    os.close(write)
    with open(read) as said:
        text = said.read()
    os.waitpid(pid, 0)
    return text


@as_root
@pytest.mark.parametrize("base", ["a disk", "what containers share"])
def test_root_mounts_memory_where_its_folder_would_not_be_on_its_own(
    base: str, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shared if base != "a disk" else tmp_path
    monkeypatch.setattr(memory_folder, "RUN", run)
    folder = MemoryFolder("own")
    path = folder.open()
    try:
        about = path.stat()
        assert (stat.S_IMODE(about.st_mode), about.st_uid) == (0o700, 0)
        assert about.st_dev not in (run.stat().st_dev, SHARED.stat().st_dev)
        assert memory_folder._kind_of(about.st_dev) == "tmpfs"
        (path / "one").touch()
        assert folder.open() == path, "again, with what is in it"
        assert mounts_below(run) == [str(path)], "and no second mount"
        folder.close()
        assert (path / "one").exists(), "what is in use stays"
        (path / "one").unlink()
        folder.close()
        found = mounts_below(run)
    finally:
        for mount in mounts_below(run):
            subprocess.run(["umount", mount], check=True)
    assert (found, path.exists()) == ([], False)


@as_root
def test_root_uses_run_as_it_is_where_that_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "moorage-test", run], check=True)
    try:
        monkeypatch.setattr(memory_folder, "RUN", run)
        folder = MemoryFolder("own")
        assert stat.S_IMODE(folder.open().stat().st_mode) == 0o700
        assert mounts_below(run) == []
        folder.close()
        assert list(run.iterdir()) == []
    finally:
        subprocess.run(["umount", run], check=True)


@as_root
def test_another_users_runtime_folder_has_to_be_in_memory(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path("/run") / f"moorage-test-{secrets.token_hex(8)}"
    run.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=0700,uid={NOBODY}", "moorage-test", run], check=True)
    try:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
        assert as_nobody(lambda: MemoryFolder("own").open()) == ""
        assert [path.name for path in run.iterdir()] == ["own"]
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
        said = as_nobody(lambda: MemoryFolder("own").open())
        assert said.startswith(f"NoMemory: {shared}/own is on the file system of /dev/shm, which containers may have")
        disk = run.parent / f"{run.name}-disk"
        if memory_folder._kind_of(run.parent.stat().st_dev) != "tmpfs":
            disk.mkdir()
            disk.chmod(0o777)
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(disk))
            said = as_nobody(lambda: MemoryFolder("own").open())
            (disk / "own").rmdir()
            disk.rmdir()
            assert said == f"NoMemory: {disk}/own is on no tmpfs; {LINGER}"
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        said = as_nobody(lambda: MemoryFolder("own").open())
        assert said.startswith(f"NoMemory: /run/user/{NOBODY}/own: No such file or directory")
    finally:
        subprocess.run(["umount", run], check=True)
        run.rmdir()


@pytest.mark.parametrize("how", ["readable", "a link", pytest.param("another's", marks=as_root)])
def test_a_folder_that_is_not_the_agents_own_gets_no_secret(
    how: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_folder, "RUN", shared)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    entries = Entries("w1@docker", "mark")
    path = entries.folder.path
    if how == "a link":
        (shared / "there").mkdir(mode=0o700)
        path.symlink_to(shared / "there")
    else:
        path.mkdir(mode=0o700)
        os.chown(path, *((NOBODY, NOBODY) if how == "another's" else (-1, -1)))
        path.chmod(0o755 if how == "readable" else 0o700)
    with pytest.raises(NoEntry, match=r"a job with secrets needs a folder in memory: .* is not the agent's own folder"):
        entries.write("key", {"TOKEN": "t"})
    with pytest.raises(NoMemory):
        entries.folder.open()
    assert mounts_below(shared) == []


@as_root
def test_no_secret_lies_in_dev_shm_and_drivers_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_folder, "RUN", tmp_path)
    one, two = Entries("w1@docker", "mark"), Entries("w1@podman", "mark")
    paths = [each.write("key", {"TOKEN": "t"}) for each in (one, two)]
    try:
        for path in paths:
            assert path.read_bytes() == b"TOKEN=t\0"
            assert path.stat().st_dev != SHARED.stat().st_dev
        Entries("w1@docker", "mark").clear()  # the next agent's
        assert not paths[0].parent.exists()
        assert paths[1].exists()
    finally:
        one.clear()
        two.remove("key")
    assert list(tmp_path.iterdir()) == []
