"""What a worker makes of the files of jobs on its own disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moorage.worker.job.job_files import JobFiles, NotKept

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
