"""What is stored of an attempt's folder by how it ended, and whose failure counts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.checkpoint_manifest import Manifest
from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Rescue, Rescued
from moorage.worker.attempt import attempt_folders
from moorage.worker.attempt.attempt_files import AttemptFiles
from moorage.worker.attempt.attempt_folders import AttemptFolders
from moorage.worker.attempt.checkpoint_sets import NotKept
from moorage.worker.attempt.job_files import JobFiles
from moorage.worker.settings import WorkerSettings

NAME: AttemptName = ("acme", "j", 0, 2, 9)


class Recording(JobFiles):
    """Notes what is to be stored; `keep` fails, or a checkpoint never comes to its end."""

    def __init__(self, root: Path, fails: str = "") -> None:
        super().__init__(None, "moorage", root, 1 << 20, 1 << 20)  # type: ignore[arg-type]
        self.fails = fails
        self.stored: list[str] = []
        self.dropped: list[str] = []
        self.begun = asyncio.Event()

    async def keep(self, tenant: str, name: str, *_: Any, **__: Any) -> None:
        if self.fails == "keep":
            raise NotKept("no room")
        self.stored.append(name)

    async def keep_checkpoint(self, tenant: str, name: str, earlier: Sequence[str], *_: Any) -> str:
        self.begun.set()
        if self.fails == "checkpoint":
            await asyncio.Event().wait()
        self.stored.append(name)
        return f"digest of {name}"

    async def drop_checkpoints(
        self, tenant: str, names: Sequence[str], but: int = 0, live: Sequence[Manifest] = ()
    ) -> None:
        self.dropped += names


def of(root: Path, fails: str = "", *, goes_on: bool = True) -> tuple[Recording, AttemptFiles]:
    folders = AttemptFolders(WorkerSettings(root), "w1")
    folders.make(NAME, 60.0, ["out"], "ck", 5, goes_on=goes_on)
    files = Recording(root, fails)
    return files, AttemptFiles(folders, files)


@pytest.mark.parametrize(
    ("fails", "code", "stored", "told"),
    [
        ("", 0, ["j.0.9", "checkpoint.j.5.0.2"], 0),  # another attempt follows if it is to start always
        ("", 3, ["checkpoint.j.5.0.2", "j.0.9"], 3),
        ("keep", 0, ["checkpoint.j.5.0.2"], 1),  # it is retried, and goes on from here
    ],
)
async def test_a_checkpoint_is_stored_after_every_end(
    tmp_path: Path, fails: str, code: int, stored: list[str], told: int
) -> None:
    files, attempts = of(tmp_path, fails)
    assert (await attempts.store(NAME, code, "exit", False))[0] == told
    assert files.stored == stored


@pytest.mark.parametrize(("code", "dropped"), [(0, ["checkpoint.j.5.0.1"]), (3, [])])
async def test_checkpoints_of_a_replica_that_succeeded_go_once_the_ledger_has_its_end(
    tmp_path: Path, code: int, dropped: list[str]
) -> None:
    files, attempts = of(tmp_path, goes_on=False)
    await attempts.store(NAME, code, "exit", False)
    assert files.dropped == []
    attempts.forget([NAME])
    await attempts.settled()
    assert files.dropped == dropped
    assert ("checkpoint.j.5.0.2" in files.stored) == bool(code), "none is stored that nobody needs"


async def test_a_checkpoint_that_is_not_stored_fails_no_job_that_ended_well(tmp_path: Path) -> None:
    files, attempts = of(tmp_path, "checkpoint")
    over = asyncio.ensure_future(attempts.store(NAME, 0, "exit", False))
    await files.begun.wait()
    attempts.hurry(NAME, 0.0)
    assert await over == (0, "exit")
    assert files.stored == ["j.0.9"]


@pytest.mark.parametrize(
    ("written", "keep", "told"),
    [(b'["out/**"]', ["out/**"], ""), (b'{"keep":["a"],"checkpoint":"ck"}', ["a"], ""), (b'{"ke', [], "not be stored")],
)
def test_what_an_earlier_build_wrote_is_stored_and_what_cannot_be_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: bytes, keep: list[str], told: str
) -> None:
    path = Path(AttemptFolders(WorkerSettings(tmp_path), "w1").make(NAME, 60.0, ["out"]))
    path.with_name(path.name + ".keep").write_bytes(written)
    after = AttemptFolders(WorkerSettings(tmp_path), "w1")
    after.begin([NAME])
    assert after.keep(NAME) == keep
    assert told in caplog.text


def test_the_next_agent_gives_an_attempt_the_grace_of_its_own_for_its_checkpoint(tmp_path: Path) -> None:
    AttemptFolders(WorkerSettings(tmp_path), "w1").make(NAME, 120.0, (), "ck")
    after = AttemptFolders(WorkerSettings(tmp_path), "w1")
    after.begin([NAME])
    assert after.grace_s(NAME) == 120.0


LEFT = Rescue("s", *NAME, "process")


async def left_behind(root: Path) -> tuple[Recording, AttemptFiles, AttemptFolders]:
    """Return the files of a worker on which an attempt has ended that kept nothing, and left a file."""
    folders = AttemptFolders(WorkerSettings(root, folder_keep=0.0), "w1")
    (Path(folders.make(NAME, 60.0)) / "log").touch()
    files = Recording(root)
    folders.attempt_ended(NAME)
    return files, AttemptFiles(folders, files), folders


async def outcome(rescuing: AttemptFiles, ask: Rescue) -> Rescued:
    await rescuing.rescue(ask)
    await asyncio.sleep(0)  # it is stored in one step
    return await rescuing.rescue(ask)


async def test_what_an_attempt_left_is_rescued_once_for_each_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def remove(paths: Sequence[str]) -> None:
        for path in paths:
            shutil.rmtree(path)

    monkeypatch.setattr(attempt_folders, "remove", remove)
    files, rescuing, folders = await left_behind(tmp_path)
    assert (await rescuing.rescue(LEFT)) == Rescued(2, "rescued.j.0.9")
    assert await folders.sweep() == 0  # it stays while it is read, though its time is over
    assert (await outcome(rescuing, LEFT)).object == "rescued.j.0.9"
    other = await outcome(rescuing, msgspec.structs.replace(LEFT, path="log"))
    assert files.stored == ["rescued.j.0.9", other.object]
    assert other.object.startswith("rescued.j.0.9.")
    assert await folders.sweep() == 1
    with pytest.raises(Refused, match="attempt 2 of replica 0 has left nothing here, or it is gone"):
        await rescuing.rescue(LEFT)


async def test_a_rescue_that_fails_is_told_and_tried_again_when_it_is_asked_for_again(tmp_path: Path) -> None:
    files, rescuing, _ = await left_behind(tmp_path)
    files.fails = "keep"
    with pytest.raises(NotKept, match="no room"):
        await outcome(rescuing, LEFT)
    files.fails = ""
    assert (await outcome(rescuing, LEFT)).stored


async def test_few_folders_are_rescued_at_once_and_one_of_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rescuing, folders = await left_behind(tmp_path)
    others = [("acme", "j", each, 2, 9) for each in (1, 2)]
    for name in others:
        (Path(folders.make(name, 60.0)) / "log").touch()
        folders.attempt_ended(name)
    monkeypatch.setattr(Recording, "keep", lambda *_, **__: asyncio.Event().wait())
    await rescuing.rescue(LEFT)
    with pytest.raises(Refused) as busy:
        await rescuing.rescue(msgspec.structs.replace(LEFT, path="log"))
    await rescuing.rescue(Rescue("s", *others[0], "process"))
    with pytest.raises(Refused) as full:
        await rescuing.rescue(Rescue("s", *others[1], "process"))
    assert [each.value.problem.code for each in (busy, full)] == ["overloaded"] * 2
    await rescuing.close()


async def test_two_that_ask_while_folders_are_looked_at_have_one_rescue(tmp_path: Path) -> None:
    files, rescuing, _ = await left_behind(tmp_path)
    told = await asyncio.gather(rescuing.rescue(LEFT), rescuing.rescue(LEFT))
    assert [each.stored for each in told] == [False, False]
    await asyncio.sleep(0)  # it is stored in one step
    assert files.stored == ["rescued.j.0.9"]
    assert (await rescuing.rescue(LEFT)).stored


async def test_what_a_living_attempt_writes_is_not_rescued(tmp_path: Path) -> None:
    _, rescuing = of(tmp_path)
    with pytest.raises(Refused, match="has left nothing here"):
        await rescuing.rescue(LEFT)
