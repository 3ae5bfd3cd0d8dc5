"""A job that writes without end leaves the journals beside its output their room, and what was written before goes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.system.disk_room import LOOK_BYTES, DiskRoom, spare_bytes
from moorage.worker.attempt.output_cleaner import OutputBounds, OutputCleaner
from moorage.worker.attempt.output_pages import read_page
from moorage.worker.supervisor.capped_output import OutputPump, cut_at, output_path
from moorage.worker.supervisor.protocol import OUTPUT_FOLDER
from tests.disk import fill, mount_small, unmount
from tests.unit.worker.attempt.test_output_pages import ask

MIB = 1024**2
LARGE = 1 << 40


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder on a file system of 40 MiB, two of which output leaves free."""
    folder = tmp_path / "disk"
    if not mount_small(folder, 40):
        pytest.skip("no right to mount a file system of our own")
    (folder / OUTPUT_FOLDER).mkdir()
    yield folder
    unmount(folder)


def write(state: Path, key: str, size: int, room: DiskRoom) -> Path:
    """What a job of this name wrote, as its supervisor keeps it."""
    path, (reading, writing) = output_path(state, key, "stdout"), os.pipe()
    os.set_blocking(reading, False)
    pump = OutputPump(reading, path, LARGE, "stdout", room)
    for _ in range(size // 4096):
        os.write(writing, b"x" * 4096)
        assert pump.pump()
    os.close(writing)
    assert pump.pump() == b""
    pump.close()
    return path


def test_a_job_that_writes_without_end_leaves_room_for_the_journals(state: Path) -> None:
    room = DiskRoom(state)
    path = write(state, "endless", 44 * MIB, room)
    free = os.statvfs(state).f_bfree * os.statvfs(state).f_frsize
    assert MIB <= free <= 3 * MIB
    assert abs(spare_bytes(state)) < LOOK_BYTES
    tail_at = path.stat().st_size - 90
    tail = path.read_bytes()[tail_at:]
    assert b", disk full; the rest is dropped]" in tail
    assert cut_at(tail, tail_at) is not None
    other = write(state, "other", MIB, room)  # its notice alone: what it wrote is not lost in silence
    page = read_page(other, ask(), True)
    assert page is not None
    assert (page.text, page.truncated, page.over) == ("", True, True)


def test_what_finished_jobs_wrote_goes_before_the_disk_is_full(state: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moorage.worker")
    room = DiskRoom(state)
    keeper = OutputCleaner(state, OutputBounds(3600.0, LARGE, 100))
    keeper.begin({}, [])
    paths = []
    for number in range(4):
        keeper.started(f"j{number}")
        paths.append(write(state, f"j{number}", 9 * MIB, room))
        keeper.ended(f"j{number}")
    assert asyncio.run(keeper.sweep()) == 0
    filler = state / "of-somebody-else"
    filler.write_bytes(b"\0" * (3 * MIB))
    assert asyncio.run(keeper.sweep()) == 1
    assert [path.exists() for path in paths] == [False, True, True, True], "the oldest alone"
    assert "full" not in caplog.text
    for left in (2, 1, 0, 0, 0):  # somebody else takes all the room that there is, again and again
        fill(state)
        asyncio.run(keeper.sweep())
        assert sum(path.exists() for path in paths) == left
    assert caplog.text.count("is nearly full: output of jobs is not stored") == 1
    filler.unlink()
    asyncio.run(keeper.sweep())
    asyncio.run(keeper.sweep())
    assert caplog.text.count("has space again") == 1
