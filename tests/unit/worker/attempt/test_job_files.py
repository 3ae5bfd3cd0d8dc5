"""What a worker makes of the files of jobs on its own disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moorage.system.archives import BadArchive
from moorage.worker.attempt.checkpoint_sets import NotKept, clear
from moorage.worker.attempt.job_files import JobFiles, _make_folders

MIB = 1 << 20


def files_at(state: Path, bytes_max: int = MIB) -> JobFiles:
    """Return files that are never fetched nor sent."""
    files = JobFiles(None, "moorage", state, bytes_max, MIB)  # type: ignore[arg-type]
    files.open()
    return files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (made := tmp_path / "folder").mkdir()
    return made


async def test_a_checkpoint_that_is_not_whole_hides_no_whole_one(tmp_path: Path, folder: Path) -> None:
    (folder / "ck").mkdir()
    (folder / "ck/n").write_text("1")
    os.mkfifo(folder / "ck/pipe")
    with pytest.raises(NotKept, match="without 'ck/pipe'"):
        await files_at(tmp_path).keep_checkpoint("acme", "checkpoint.x.7.0.2", [], str(folder), "ck")


@pytest.mark.parametrize("own", ["x", "x/0"])
def test_a_file_where_kept_files_are_to_be_is_the_jobs_fault(folder: Path, own: str) -> None:
    (folder / own).parent.mkdir(exist_ok=True)
    (folder / own).touch()
    with pytest.raises(BadArchive, match=f"'{own}' is a file among the job's files"):
        _make_folders(str(folder), "x/0", None)


@pytest.mark.parametrize("own", ["out", "out/ck", "out/ck/old"])
def test_a_checkpoint_takes_the_place_of_a_file(folder: Path, own: str) -> None:
    (folder / own).parent.mkdir(parents=True, exist_ok=True)
    (folder / own).touch()
    clear(str(folder), "out/ck")
    (folder / "out/ck").mkdir(parents=True)


async def test_what_takes_more_than_files_bytes_as_a_tar_file_is_not_stored(tmp_path: Path, folder: Path) -> None:
    for number in range(20):
        (folder / f"{number}").write_bytes(b"x" * 1000)
    with pytest.raises(NotKept, match="more than 20480 bytes as a tar file"):
        await files_at(tmp_path, 20480).keep("acme", "x.0.9", str(folder), ["**"])
