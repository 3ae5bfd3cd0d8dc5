"""What a job leaves is stored before its end is told, and no more than it could read itself."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.errors import PermissionRefused
from moorage.bus.object_store import ObjectInfo, ObjectStore
from moorage.client.kept_files import _left_out, _unpacked
from moorage.schemas.errors import reason_of
from moorage.schemas.frames import End
from moorage.schemas.handler import kept_object
from moorage.system.archives import Inflating, unpack
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.run import SUPERVISOR_FOLDER
from moorage.worker.attempt import attempt_files, job_files
from moorage.worker.attempt.attempt_folders import FOLDERS
from moorage.worker.attempt.checkpoint_sets import NotKept
from moorage.worker.attempt.job_files import FilesRefused, FilesUnavailable, JobFiles, LeftOut
from moorage.worker.supervisor.journal import read_journal
from moorage.worker.supervisor.protocol import JOURNAL_NAME
from tests.system.worker.agent.test_agent_process import agent_process, name_of, state_folder, worker
from tests.system.worker.attempt.test_attempt_folders import OTHER_USER, placed
from tests.system.worker.attempt.test_job_files import bringing, bucket, fresh, never_over
from tests.waiting import until


async def kept(store: ObjectStore, name: str, root: Path) -> dict[str, str] | None:
    info = await store.find(name)
    if info is None:
        return None
    with (root / "plain").open("w+b") as plain:
        inflating = Inflating(plain, 1 << 30)
        async for piece in store.get(info):
            inflating.feed(piece)
        inflating.address()
        plain.seek(0)
        into = Path(fresh(root, info.seq))
        unpack(plain, into, 1 << 30)
    return {path.relative_to(into).as_posix(): path.read_text() for path in into.rglob("*") if path.is_file()}


SCRIPT = "mkdir -p out/deep other; echo a > out/a.txt; echo b > out/deep/b; echo c > other/c; echo d > d.log; exit {}"


@pytest.mark.parametrize("code", [0, 3])
async def test_what_matches_is_stored_before_the_end_is_told(
    nats_url: str, unique: str, tmp_path: Path, code: int
) -> None:
    user: dict[str, Any] = {"user": OTHER_USER} if os.geteuid() == 0 else {}
    async with (
        bucket(nats_url, unique) as store,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader) as (_, agent),
    ):
        name = name_of()
        await leader.want("w1", placed(name, SCRIPT.format(code), keep=["out/**", "*.log", "!out/deep/**"], **user))
        assert (await leader.await_report("w1", "exited", name)).code == code
        assert await kept(store, "a.0.10", tmp_path) == {"out/a.txt": "a\n", "d.log": "d\n"}
        folder = agent.settings.state_dir / FOLDERS / "w1"
        await until(lambda: [path.name for path in folder.iterdir()] == ["acme.a.0.1.10"], what="the patterns gone")


async def test_patterns_that_match_nothing_are_named(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with (
        bucket(nats_url, unique) as store,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        name = name_of()
        patterns = ["out/**", "!out/x", "./log//a", "{a,b}", "[a", "./log/./b"]
        await leader.want("w1", placed(name, "mkdir log && touch log/a", keep=patterns))
        exited = await leader.await_report("w1", "exited", name)
        assert (exited.code, exited.detail) == (0, "exit")
        assert await kept(store, "a.0.10", tmp_path) == {"log/a": ""}
        info = await store.find("a.0.10")
        assert info is not None
        assert [line.split("'")[1] for line in _left_out(info, "")] == ["out/**", "{a,b}", "[a", "./log/./b"]


async def test_that_nothing_matched_is_stored_too(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with (
        bucket(nats_url, unique) as store,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        name = name_of()
        await leader.want("w1", placed(name, "true", keep=["out/**"]))
        assert (await leader.await_report("w1", "exited", name)).code == 0
        info = await store.find("a.0.10")
        assert info is not None
        assert len(_left_out(info, "")) == 1


async def test_the_next_attempt_has_the_newest_checkpoint_of_those_before(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    run: dict[str, Any] = {"user": OTHER_USER} if os.geteuid() == 0 else {}
    run |= {"checkpoint": "out/ck", "grace_s": 60.0}
    async with (
        bucket(nats_url, unique, checkpoints=True) as store,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):

        async def attempt(number: int, script: str, text: str, accepted_ms: int = 7) -> None:
            name = ("acme", "a", 0, number, 10 + number)

            def written() -> bool:
                return text == "".join(frame["text"] for _, frame in leader.output if frame["attempt"] == number)

            await leader.want("w1", msgspec.structs.replace(placed(name, script, **run), accepted_ms=accepted_ms))
            if script.endswith("sleep 60"):
                await until(written, what="it has begun")
                await leader.want("w1", End(*name, why="preempted"))
            await leader.await_report("w1", "exited", name)
            await until(written, what="its output")

        async def checkpoints(look: str) -> dict[int, str]:
            (into := tmp_path / look).mkdir()
            found = {each: await kept(store, f"checkpoint.a.7.0.{each}", into) for each in range(1, 6)}
            return {each: files["out/ck/n"] for each, files in found.items() if files}

        await attempt(1, "mkdir -p out/ck; echo 1 > out/ck/n; echo x > out/x; exit 3", "")
        await attempt(2, "cat out/ck/n; ls out; echo 2 > out/ck/n; exit 3", "1\nck\n")
        await attempt(3, "cat out/ck/n; rm -r out; exit 3", "2\n")  # it leaves none
        assert await checkpoints("first") == {1: "1\n", 2: "2\n"}
        await attempt(4, "cat out/ck/n; echo 4 > out/ck/n; echo begun; sleep 60", "2\nbegun\n")
        assert await checkpoints("second") == {2: "2\n", 4: "4\n"}
        await attempt(5, "cat out/ck/n; echo 5 > out/ck/n", "4\n")

        async def none_left() -> bool:
            return [await store.find(f"checkpoint.a.7.0.{each}") for each in range(1, 6)] == [None] * 5

        await until(none_left, what="they go once it has succeeded")
        await attempt(6, "ls; echo none", "none\n", accepted_ms=8)  # a later job of that id


async def test_the_next_attempt_begins_with_no_checkpoint_but_one_that_its_attempt_told_of(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    """Another host stores one under the name of an attempt, whole and sound, before the next attempt is placed."""
    run: dict[str, Any] = {"user": OTHER_USER} if os.geteuid() == 0 else {}
    run |= {"checkpoint": "ck", "grace_s": 60.0}
    (other := tmp_path / "other").mkdir()
    (planted := Path(fresh(tmp_path)) / "ck").mkdir()
    (planted / "n").write_text("planted\n")
    async with (
        bucket(nats_url, unique, checkpoints=True),
        bringing(nats_url, unique, other) as elsewhere,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):

        async def attempt(number: int, script: str, told: list[tuple[int, str]], untold: int | None) -> str:
            name = ("acme", "a", 0, number, 10 + number)
            of = msgspec.structs.replace(placed(name, script, **run), accepted_ms=7, checkpoints=told, untold=untold)
            await leader.want("w1", of)
            report = await leader.await_report("w1", "exited", name)
            assert report.checkpoint is not None
            return report.checkpoint

        async def plant(number: int) -> None:
            await elsewhere.keep_checkpoint("acme", f"checkpoint.a.7.0.{number}", [], str(planted.parent), "ck")

        def said(number: int) -> str:
            return "".join(frame["text"] for _, frame in leader.output if frame["attempt"] == number)

        first = await attempt(1, "mkdir -p ck; echo 1 > ck/n; exit 3", [], 0)
        assert first.startswith("SHA-256=")
        told = [(1, first)]
        assert await attempt(2, "cat ck/n; rm -r ck; exit 3", told, 0) == ""
        await until(lambda: said(2) == "1\n")
        told.append((2, ""))
        for number in (2, 3):  # of one that stored none, and of one that was lost
            await plant(number)
        await attempt(4, "cat ck/n; exit 3", told, 0)
        await until(lambda: said(4) == "1\n")
        await plant(1)
        await attempt(5, "cat ck/n 2>&1 || echo none; exit 3", told, 0)
        await until(lambda: said(5).endswith("none\n"))
        begun = await leader.await_report("w1", "started", ("acme", "a", 0, 5, 15))
        refused = "checkpoint-refused: that of attempt 1 is not the one that its attempt has stored"
        assert begun.detail == f"; {refused}; it began without a checkpoint"
        # where a worker of an earlier release has told nothing, as its name finds it
        await attempt(6, "cat ck/n; exit 3", told, 3)
        await until(lambda: said(6) == "planted\n")


async def test_a_checkpoint_that_is_too_large_for_a_worker_is_brought_by_another(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    (folder := Path(fresh(tmp_path)) / "ck").mkdir()
    (folder / "n").write_bytes(b"1" * 100_000)
    for state in ("large", "small"):
        (tmp_path / state).mkdir()
    async with (
        bucket(nats_url, unique, checkpoints=True),
        bringing(nats_url, unique, tmp_path / "large") as large,
        bringing(nats_url, unique, tmp_path / "small", checkpoint_bytes=50_000) as small,
    ):
        await large.keep_checkpoint("acme", "checkpoint.x.7.0.1", [], str(folder.parent), "ck")
        with pytest.raises(FilesUnavailable, match="checkpoint_bytes here is 50000"):
            await small.bring_checkpoint("acme", {"checkpoint.x.7.0.1": None}, fresh(tmp_path, 1), "ck", None)
        await large.bring_checkpoint("acme", {"checkpoint.x.7.0.1": None}, into := fresh(tmp_path, 2), "ck", None)
        assert (Path(into) / "ck/n").stat().st_size == 100_000


async def test_a_job_brings_nothing_that_an_earlier_job_of_that_id_has_kept(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, into = Path(fresh(tmp_path)), fresh(tmp_path, 1)
    (folder / "loss").write_text("1")
    async with bucket(nats_url, unique), bringing(nats_url, unique, tmp_path) as files:
        await files.keep("acme", "x.0.9", str(folder), ["**"], kept_object("x", 0), 7)
        with pytest.raises(FilesRefused, match="files-gone"):
            await files.bring_kept("acme", {kept_object("x", 0): "x"}, 8, into, None)
        await files.bring_kept("acme", {kept_object("x", 0): "x"}, 7, into, None)
        assert (Path(into) / "x/loss").read_text() == "1"
        monkeypatch.setattr(job_files, "FETCH_S_MAX", 0.0)  # for all replicas together, those without files among them
        with pytest.raises(FilesUnavailable, match="not fetched within 0 s"):
            await files.bring_kept("acme", {kept_object("x", 1): "x/1"}, 7, into, None)


async def test_a_cancelled_job_keeps_what_there_is(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with (
        bucket(nats_url, unique) as store,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        name = name_of()
        await leader.want("w1", placed(name, "echo saved > saved; echo kept; sleep 60", keep=["saved"], grace_s=5.0))
        await until(lambda: leader.text(name) == "kept\n", what="there is something to keep")
        await leader.want("w1", End(*name, why="cancelling"))
        assert (await leader.await_report("w1", "exited", name)).detail == "end"
        assert await kept(store, "a.0.10", tmp_path) == {"saved": "saved\n"}


async def test_a_job_whose_files_cannot_be_stored_has_not_succeeded(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: object) -> None:
        await asyncio.sleep(60)

    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader, files_bytes=1 << 20):
        large, late = name_of(), name_of("late", fence=11)
        await leader.want("w1", placed(large, "head -c 2000000 /dev/zero > big", keep=["big"]))
        exited = await leader.await_report("w1", "exited", large)
        assert exited.code == 1
        assert exited.detail.startswith("not-stored: files: more than")
        monkeypatch.setattr(JobFiles, "keep", slow)
        monkeypatch.setattr(attempt_files, "STORE_S_MAX", 0.3)
        await leader.want("w1", msgspec.structs.replace(placed(late, "touch x", keep=["x"]), slots=[1]))
        exited = await leader.await_report("w1", "exited", late)
        assert (exited.code, exited.detail) == (1, "not-stored: files: not stored within 0.3 s")


async def test_an_end_while_files_are_stored_waits_no_longer_than_its_grace(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = never_over(monkeypatch, "keep")
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        name = name_of()
        await leader.want("w1", placed(name, "touch x", keep=["x"], grace_s=0.2))
        await asyncio.wait_for(reached.wait(), 60)
        await leader.want("w1", End(*name, why="cancelling"))
        exited = await leader.await_report("w1", "exited", name)
        assert (exited.code, exited.detail) == (1, "not-stored: files: the attempt had to end")


async def test_the_next_agent_stores_what_ended_without_one(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with bucket(nats_url, unique) as store, ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        name, go = name_of(), tmp_path / "go"
        async with agent_process(state, nats_url, unique) as agent:
            await leader.joined("w1")
            script = f"while [ ! -e {go} ]; do sleep 0.02; done; echo late > late"
            await leader.want("w1", placed(name, script, keep=["late"]))
            await leader.await_report("w1", "started", name)
            agent.send_signal(signal.SIGKILL)
            await agent.wait()
        go.touch()
        journal = state / SUPERVISOR_FOLDER / JOURNAL_NAME
        await until(lambda: all(left.ended for left in read_journal(journal).values()), what="its end in the journal")
        async with agent_process(state, nats_url, unique):
            assert (await leader.await_report("w1", "exited", name)).code == 0
            assert await kept(store, "a.0.10", tmp_path) == {"late": "late\n"}


async def test_what_the_job_could_not_read_is_not_read_for_it(nats_url: str, unique: str, tmp_path: Path) -> None:
    folder = Path(fresh(tmp_path))
    (folder / "own").write_text("own")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "up").symlink_to("/etc")
    (tmp_path / "elsewhere").write_text("of the same user, but behind a folder that the job cannot enter")
    (folder / "around").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "pipe")
    (tmp_path / "secret").write_text("secret")
    expected = {"own": "own"}
    if os.geteuid() == 0:
        os.link(tmp_path / "secret", folder / "hard")  # another user's
        for path in (folder, folder / "own", folder / "link", folder / "around", tmp_path / "elsewhere"):
            os.chown(path, int(OTHER_USER), int(OTHER_USER), follow_symlinks=False)
    async with bucket(nats_url, unique) as store, bringing(nats_url, unique, tmp_path) as files:
        await files.keep("acme", "j.0.1", str(folder), ["**"])
        assert await kept(store, "j.0.1", tmp_path) == expected
        deeper = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n"
        await asyncio.to_thread(subprocess.run, ["python3", "-c", deeper], cwd=folder, check=True)
        try:
            with pytest.raises(NotKept):
                await files.keep("acme", "j.0.2", str(folder), ["**"])
        finally:  # pytest could not remove it either
            await asyncio.to_thread(subprocess.run, ["rm", "-rf", str(folder)], check=True)


async def test_links_and_empty_folders_are_kept_and_what_is_left_out_is_named(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    folder = Path(fresh(tmp_path))
    for name in ("out/step-1", "out/empty", "full"):
        (folder / name).mkdir(parents=True)
    (folder / "out/step-1/model").write_text("w")
    (folder / "full/other").write_text("no pattern matches it")
    for link, target in (
        ("latest", "step-1"),
        ("best", "step-1/model"),
        ("later", "none"),
        ("abs", "/etc"),
        ("up", "../.."),
    ):
        (folder / "out" / link).symlink_to(target)
    os.mkfifo(folder / "out/pipe")
    (folder / "out" / os.fsdecode(b"caf\xe9")).symlink_to("/etc/passwd")
    async with (
        bucket(nats_url, unique) as store,
        bringing(nats_url, unique, tmp_path) as files,
    ):
        await files.keep("acme", "j.0.1", str(folder), ["out/**", "full/"])
        info = await store.find("j.0.1")
        assert info is not None
        into = tmp_path / "into"
        found = await _unpacked(store, info, into, "")
        names = [path.relative_to(into).as_posix() for path in found]
        assert names == ["full/other", "out/best", "out/empty", "out/later", "out/latest", "out/step-1/model"]
        assert (into / "out/latest/model").read_text() == (into / "out/best").read_text() == "w"
        assert (into / "out/empty").is_dir()
        assert _left_out(info, "") == [
            "out/abs was left out: it is a link that leaves the job's folder",
            "out/caf\ufffd was left out: it is a link that leaves the job's folder",
            "out/pipe was left out: it is neither a file nor a folder nor a link",
            "out/up was left out: it is a link that leaves the job's folder",
        ]
        await files.keep("acme", "j.0.2", str(folder), ["abs"])
        info = await store.find("j.0.2")
        assert info is not None, "it names what is missing"
        assert await _unpacked(store, info, tmp_path / "none", "") == []
        assert len(_left_out(info, "")) == 1


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("*a*a*a*ab", "keep: '\\*a.* has too many stars: a part of a path may have"),
        ("*a*/*a*/*a*/b", "has too many stars"),
        ("[z-a]", "keep: bad character range z-a"),
    ],
)
async def test_a_pattern_that_would_hold_up_the_agent_or_is_none_is_not_matched(
    tmp_path: Path, pattern: str, why: str
) -> None:
    folder = Path(fresh(tmp_path))
    (folder / ("a" * 30)).touch()
    files = JobFiles(None, "moorage", tmp_path, 1 << 20, 1 << 20)  # type: ignore[arg-type]
    files.open()
    with pytest.raises(NotKept, match=why):
        await files.keep("acme", "j.0.1", str(folder), [pattern])


def packed(root: Path, folder: Path, stopped: threading.Event) -> int:
    files = JobFiles(None, "moorage", root, 1 << 20, 1 << 20)  # type: ignore[arg-type]
    return files._pack(io.BytesIO(), str(folder), ["out"], stopped, LeftOut(), files.bucket("acme"))


def test_no_more_entries_are_looked_at_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(fresh(tmp_path))
    for name in ("out", "a", "b"):
        (folder / name).touch()
    (folder / "empty").mkdir()
    monkeypatch.setattr(job_files, "ENTRIES_MAX", 4)
    assert packed(tmp_path, folder, threading.Event()) == 1
    monkeypatch.setattr(job_files, "ENTRIES_MAX", 3)
    with pytest.raises(NotKept, match="more than 3 files and folders"):
        packed(tmp_path, folder, threading.Event())


async def test_packing_ends_with_the_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[threading.Event] = []

    def pack(
        _self: object, _into: object, _folder: str, _patterns: object, stopped: threading.Event, *_: object
    ) -> int:
        given.append(stopped)
        stopped.wait(60)
        return 0

    monkeypatch.setattr(JobFiles, "_pack", pack)
    files = JobFiles(None, "moorage", tmp_path, 1 << 20, 1 << 20)  # type: ignore[arg-type]
    files.open()
    keeping = asyncio.create_task(files.keep("acme", "j.0.1", str(tmp_path), ["out"]))
    await until(lambda: given, what="it packs")
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert given[0].is_set()
    monkeypatch.undo()
    (tmp_path / "out").touch()
    with pytest.raises(NotKept):
        packed(tmp_path, tmp_path, given[0])


async def test_a_checkpoint_that_is_larger_than_its_bucket_drives_out_no_other(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    (folder := Path(fresh(tmp_path)) / "ck").mkdir()
    (folder / "n").write_bytes(os.urandom(100_000))
    (tmp_path / "state").mkdir()
    async with (
        bucket(nats_url, unique, checkpoints=True, max_bytes=500_000) as store,
        bringing(nats_url, unique, tmp_path / "state") as files,
    ):
        await store.make()
        await files.keep_checkpoint("acme", "checkpoint.x.7.0.1", [], str(folder.parent), "ck")
        (folder / "n").write_bytes(os.urandom(600_000))
        with pytest.raises(NotKept, match=r"it takes 60\d+ bytes compressed, and its bucket has room for 3\d+"):
            await files.keep_checkpoint("acme", "checkpoint.y.7.0.1", [], str(folder.parent), "ck")
        assert await store.find("checkpoint.x.7.0.1") is not None


async def test_a_user_hears_that_a_checkpoint_was_not_stored(nats_url: str, unique: str) -> None:
    async with (
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader, checkpoint_bytes=1 << 20),
    ):
        name = name_of()
        large = "mkdir ck && head -c 2000000 /dev/zero > ck/big; exit 3"
        await leader.want("w1", placed(name, large, checkpoint="ck", grace_s=5.0))
        exited = await leader.await_report("w1", "exited", name)
        assert exited.code == 3
        assert exited.detail.startswith("exit; checkpoint-not-stored: files: more than")
        assert reason_of(exited.detail) == "exit"


async def test_rights_of_an_earlier_release_stop_no_attempt(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They have no bucket for checkpoints, and none for schedules."""
    find = ObjectStore.find

    async def refused(self: ObjectStore, name: str) -> ObjectInfo | None:
        if "FILES" not in self.subject(""):
            raise PermissionRefused("publish", self.subject(""))
        return await find(self, name)

    monkeypatch.setattr(ObjectStore, "find", refused)
    (tmp_path / "state").mkdir()
    async with bringing(nats_url, unique, tmp_path / "state") as files:
        await files.bring_checkpoint("acme", {"checkpoint.x.7.0.1": None}, fresh(tmp_path), "ck", None)
        assert "nats-config again" in caplog.text
        with pytest.raises(FilesRefused, match="submit the job again"):
            await files.bring("acme", "a" * 64, fresh(tmp_path, 1), None)
