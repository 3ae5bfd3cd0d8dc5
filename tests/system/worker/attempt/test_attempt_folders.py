"""The folder that each attempt has: where a job starts, whose it is, how much it may take, and that nothing stays."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Place
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.run import start
from moorage.worker.attempt import attempt_folders
from moorage.worker.attempt.attempt_folders import (
    DISK,
    FOLDERS,
    AttemptFolders,
    FolderUnavailable,
    NoFolder,
    clear_unknown,
)
from moorage.worker.settings import WorkerSettings
from tests.system.worker.agent.test_agent_process import body, name_of, place, settings_of, state_folder, worker
from tests.waiting import until

OTHER_USER = "65534"


def placed(name: AttemptName, script: str, **run: Any) -> Place:
    return place(name, body(script, run=run))


def folders(state: Path, **settings: Any) -> AttemptFolders:
    return AttemptFolders(WorkerSettings(state, **settings), "w1")


def names(count: int) -> list[AttemptName]:
    return [("acme", f"j{number}", 0, 1, number) for number in range(count)]


async def test_a_job_starts_in_a_folder_of_its_own_which_goes_with_it(nats_url: str, unique: str) -> None:
    script = 'pwd; echo "$HOME"; stat -c %a .; ls -A'
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        name = name_of()
        await leader.want("w1", placed(name, script))
        assert (await leader.await_report("w1", "exited", name)).code == 0
        root = agent.settings.state_dir / FOLDERS / "w1"
        folder = root / "acme.a.0.1.10"
        await until(lambda: leader.text(name) == f"{folder}\n{folder}\n700\n", what="where it ran")
        await until(lambda: list(root.iterdir()) == [], what="it goes with its job")


async def test_a_refused_start_on_a_full_disk_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made, (name,) = folders(tmp_path), names(1)
    made.begin([])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(FolderUnavailable):
            made.make(name, 1.0, ["out/"])
    made.attempt_ended(name)
    await made.sweep()
    assert os.listdir(made.root) == []


async def test_a_cwd_is_absolute_or_below_the_folder(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        absolute, relative = name_of(), name_of("b", fence=11)
        await leader.want("w1", placed(absolute, 'pwd; echo "$HOME"', cwd=str(tmp_path)))
        await leader.want("w1", msgspec.structs.replace(placed(relative, "true", cwd="src"), slots=[1]))
        assert (await leader.await_report("w1", "exited", absolute)).code == 0
        failed = await leader.await_report("w1", "refused", relative)
        assert failed.code == 126
        assert failed.detail.startswith("cannot-run: no folder ")  # nothing was brought there, nor would be elsewhere
        folder = agent.settings.state_dir / FOLDERS / "w1" / "acme.a.0.1.10"
        await until(lambda: leader.text(absolute) == f"{tmp_path}\n{folder}\n", what="where it ran")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
async def test_the_folder_belongs_to_the_jobs_user_and_no_other_user_sees_it(nats_url: str, unique: str) -> None:
    script = 'echo kept > "$HOME/file" && stat -c "%u %a" "$HOME" && ls "$HOME/.." || echo unseen'
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        name = name_of()
        await leader.want("w1", placed(name, script, user=OTHER_USER))
        assert (await leader.await_report("w1", "exited", name)).code == 0
        await until(lambda: leader.text(name) == f"{OTHER_USER} 700\nunseen\n", what="whose it is")
        assert (agent.settings.state_dir / FOLDERS / "w1" / "acme.a.0.1.10" / "file").read_text() == "kept\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
def test_a_place_that_other_users_cannot_reach_is_the_hosts_fault(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    ours = folders(tmp_path / "state", folder_dir=closed)
    (name,) = names(1)
    ours.make(name, 1.0)
    assert not ours.lets_users(), "the worker tells it as it joins"
    with pytest.raises(NoFolder) as refused:
        ours.give(name, OTHER_USER)
    assert f"{closed} lets no other user enter" in refused.value.problem.message
    assert closed.stat().st_mode & 0o777 == 0o700


async def test_an_attempt_whose_folder_takes_too_much_is_ended(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_folders, "MEASURE_S", 0.05)
    script = "trap 'exit 0' TERM; head -c 3000000 /dev/zero > big; while :; do sleep 0.1; done"
    small = (
        "head -c 500000 /dev/zero > small; ln small again; ln small third; while [ ! -e ../go ]; do sleep 0.05; done"
    )
    async with (
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader, folder_bytes=1 << 20, folder_keep=0.0) as (_, agent),
    ):
        name, other = name_of(), name_of("b", fence=11)
        await leader.want("w1", placed(name, script), msgspec.structs.replace(placed(other, small), slots=[1]))
        exited = await leader.await_report("w1", "exited", name)
        # also where it ended well by itself when it was asked to: what it was to write is not whole
        # the size is that of a look, which may come while it still writes
        assert re.fullmatch(f"{DISK}: its folder takes [12] MiB, folder_bytes is 1 MiB", exited.detail)
        assert exited.code == 0
        root = agent.settings.state_dir / FOLDERS / "w1"
        (root / "go").touch()
        assert (await leader.await_report("w1", "exited", other)).detail == "exit"
        (root / "go").unlink()
        await until(lambda: not list(root.iterdir()), what="no folder left")


async def test_folders_of_an_earlier_agent_are_found_and_removed(nats_url: str, unique: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        root = state / FOLDERS
        for folder in ("w1/acme.dead.0.1.5", "w1/acme.old.0.1.6", "of-a-worker-that-is-gone/acme.x.0.1.1"):
            (root / folder).mkdir(parents=True)
            (root / folder / "file").touch()
        old = time.time() - 3600
        os.utime(root / "w1/acme.old.0.1.6", (old, old))
        running = await start(settings_of(state, unique, folder_keep=60.0), nats_url)
        try:
            await leader.joined("w1")
            await until(lambda: not (root / "w1/acme.old.0.1.6").exists(), what="the stray gone")
            assert (root / "w1/acme.dead.0.1.5/file").exists()  # its time is not over
            assert not (root / "of-a-worker-that-is-gone").exists()
        finally:
            await running.stop()


@pytest.mark.slow
async def test_of_ten_thousand_folders_none_is_left(tmp_path: Path) -> None:
    ours = folders(tmp_path, folder_keep=0.0)
    for at, name in enumerate(names(10_000)):
        path = ours.make(name, 1.0)
        if at % 4 == 0:
            Path(path, "file").touch()
        ours.attempt_ended(name)
    await until(lambda: len(os.listdir(ours.root)) == 2500, what="the empty ones gone")
    assert await ours.sweep() == 2500
    assert list(ours.root.iterdir()) == []
    assert await ours.sweep() == 0
    assert await ours.measure() == []


async def test_a_slow_removal_does_not_hold_up_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ext4 one takes milliseconds; the loop went through a job's end and its report in less."""
    ours, may_go, rmdir = folders(tmp_path), threading.Event(), os.rmdir

    def slow(path: Path) -> None:
        assert may_go.wait(60)
        rmdir(path)

    monkeypatch.setattr(os, "rmdir", slow)
    for name in names(3):
        ours.make(name, 1.0)
        ours.attempt_ended(name)
        await asyncio.sleep(0)  # the loop goes on
    assert len(os.listdir(ours.root)) == 3
    may_go.set()
    await until(lambda: os.listdir(ours.root) == [], what="they are gone")


async def test_no_more_folders_stay_than_a_thousand_nor_any_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_folders, "KEPT_MAX", 3)
    ours = folders(tmp_path, folder_keep=3600.0)
    for name in names(5):
        Path(ours.make(name, 1.0), "file").touch()
        ours.attempt_ended(name)
    assert await ours.sweep() == 2
    assert sorted(path.name for path in ours.root.iterdir()) == [f"acme.j{at}.0.1.{at}" for at in (2, 3, 4)]
    monkeypatch.setattr(attempt_folders, "spare_bytes", lambda folder: 0)
    assert await ours.sweep() == 3
    assert list(ours.root.iterdir()) == []


async def test_folders_that_could_not_be_removed_are_found_by_the_next_sweep_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no process can be made now, as for want of descriptors."""
    monkeypatch.setattr(attempt_folders, "AT_ONCE", 2)
    ours = folders(tmp_path, folder_keep=0.0)
    for name in names(5):
        Path(ours.make(name, 1.0), "file").touch()
        ours.attempt_ended(name)
    remove, calls = attempt_folders.remove, list[list[str]]()

    def fails_once(paths: list[str]) -> None:
        calls.append([path.rsplit("/", 1)[1].split(".")[1] for path in paths])
        if len(calls) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        remove(paths)

    monkeypatch.setattr(attempt_folders, "remove", fails_once)
    with pytest.raises(OSError, match="Too many open files"):
        await ours.sweep()
    assert await ours.sweep() == 3
    assert calls == [["j0", "j1"], ["j2", "j3"], ["j2", "j3"], ["j4"]]
    assert list(ours.root.iterdir()) == []


async def test_a_folder_is_removed_whatever_a_job_left_there(tmp_path: Path) -> None:
    ours = folders(tmp_path, folder_keep=0.0)
    (name,) = names(1)
    path = ours.make(name, 1.0)
    deeper = "import os\nfor _ in range(3000):\n    os.mkdir('deeper')\n    os.chdir('deeper')\n"
    await asyncio.to_thread(subprocess.run, ["python3", "-c", deeper], cwd=path, check=True)
    Path(path, "out").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    ours.attempt_ended(name)
    assert await ours.sweep() == 1
    assert list(ours.root.iterdir()) == []
    assert (tmp_path / "other").is_dir()


def test_a_folder_that_is_there_already_is_made_anew(tmp_path: Path) -> None:
    (name,) = names(1)
    Path(folders(tmp_path).make(name, 1.0), "file").touch()
    assert os.listdir(folders(tmp_path).make(name, 1.0)) == []


def test_folders_of_workers_that_are_here_stay(tmp_path: Path) -> None:
    for worker_id in ("here", "gone"):
        (tmp_path / worker_id).mkdir()
    clear_unknown(tmp_path, lambda name: name == "here")
    clear_unknown(tmp_path / "no-such-folder", lambda name: False)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


async def test_the_folder_of_an_attempt_that_starts_again_is_not_swept(tmp_path: Path) -> None:
    (name,) = names(1)
    Path(folders(tmp_path).make(name, 1.0, ["*"]), "file").touch()
    next_agent = folders(tmp_path, folder_keep=0.0)
    next_agent.begin([])
    path = Path(next_agent.make(name, 1.0, ["*"]))
    assert await next_agent.sweep() == 0
    assert path.is_dir()
    assert path.with_name(path.name + ".keep").exists()
