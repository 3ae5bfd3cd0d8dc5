"""How long output is kept: the oldest finished go first, a running job's never, whatever restarts and jumps."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.worker.attempt import output_cleaner
from moorage.worker.attempt.output_cleaner import MARK, OutputBounds, OutputCleaner
from moorage.worker.supervisor.capped_output import output_path
from moorage.worker.supervisor.protocol import OUTPUT_FOLDER

HOUR_S = 3600.0
BLOCK = 4096
LARGE = 1 << 40


class Clock:
    """CLOCK_BOOTTIME as the keeper sees it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(output_cleaner, "boottime_s", made)
    return made  # type: ignore[return-value]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / OUTPUT_FOLDER).mkdir()
    return tmp_path


def wrote(state: Path, key: str, size: int = BLOCK, *, ended_s_ago: float = 0.0, err: bool = False) -> Path:
    path = output_path(state, key, "stderr" if err else "stdout")
    path.write_bytes(b"x" * size)
    at = time.time() - ended_s_ago
    os.utime(path, (at, at))
    return path


def keeper_on(state: Path, bounds: OutputBounds, living: tuple[str, ...] = ()) -> OutputCleaner:
    keeper = OutputCleaner(state, bounds)
    keeper.begin(keeper.scan(), living)
    return keeper


def sweep(keeper: OutputCleaner) -> int:
    return asyncio.run(keeper.sweep())


def left(state: Path) -> set[str]:
    return {path.name for path in (state / OUTPUT_FOLDER).iterdir()}


def test_output_goes_when_it_is_too_old_and_both_streams_together(state: Path, clock: Clock) -> None:
    old, err = wrote(state, "old", ended_s_ago=2 * HOUR_S), wrote(state, "old", ended_s_ago=2 * HOUR_S, err=True)
    young = wrote(state, "young", ended_s_ago=HOUR_S / 2)
    keeper = keeper_on(state, OutputBounds(HOUR_S, LARGE, 100))
    assert sweep(keeper) == 1
    assert (old.exists(), err.exists(), young.exists()) == (False, False, True)
    clock.now_s += HOUR_S / 2 - 1
    assert sweep(keeper) == 0
    clock.now_s += 2
    assert sweep(keeper) == 1
    assert left(state) == set()


def test_beyond_the_room_the_one_that_finished_first_goes_first(state: Path, clock: Clock) -> None:
    for number in range(5):
        wrote(state, f"j{number}", ended_s_ago=100 - number)
    keeper = keeper_on(state, OutputBounds(HOUR_S, 3 * BLOCK, 100))
    assert sweep(keeper) == 2
    assert left(state) == {output_path(state, f"j{number}", "stdout").name for number in (2, 3, 4)}
    wrote(state, "late", 2 * BLOCK)
    keeper.ended("late")
    assert sweep(keeper) == 2
    assert left(state) == {output_path(state, name, "stdout").name for name in ("j4", "late")}


def test_beyond_the_number_the_oldest_goes(state: Path, clock: Clock) -> None:
    for number in range(4):
        wrote(state, f"j{number}", 1, ended_s_ago=100 - number)
    assert sweep(keeper_on(state, OutputBounds(HOUR_S, LARGE, 3))) == 1
    assert output_path(state, "j0", "stdout").name not in left(state)


def test_a_running_attempts_output_is_never_cleared(state: Path, clock: Clock) -> None:
    """Neither for its age, nor for the room that it takes, however the finished ones make way for it."""
    running = wrote(state, "running", 100 * BLOCK, ended_s_ago=100 * HOUR_S)
    wrote(state, "finished", ended_s_ago=1)
    keeper = keeper_on(state, OutputBounds(HOUR_S, 10 * BLOCK, 0), living=("running",))
    later = wrote(state, "started-later", BLOCK, ended_s_ago=100 * HOUR_S)
    keeper.started("started-later")
    for _ in range(3):
        sweep(keeper)
        clock.now_s += 10 * HOUR_S
    assert running.exists()
    assert later.exists()
    assert not output_path(state, "finished", "stdout").exists()
    keeper.ended("running")
    assert sweep(keeper) == 1
    assert not running.exists()


def test_an_attempt_that_starts_between_the_look_and_the_list_is_no_candidate(state: Path, clock: Clock) -> None:
    keeper = OutputCleaner(state, OutputBounds(0.0, 0, 0))
    scanned = keeper.scan()
    started = wrote(state, "in-between", ended_s_ago=HOUR_S)
    keeper.begin(scanned, ())
    sweep(keeper)
    assert started.exists()


def test_a_crash_in_the_middle_of_clearing_leaves_the_rest_for_the_next(state: Path, clock: Clock) -> None:
    for number in range(6):
        wrote(state, f"j{number}", ended_s_ago=2 * HOUR_S)
        wrote(state, f"j{number}", ended_s_ago=2 * HOUR_S, err=True)
    living = wrote(state, "living", ended_s_ago=2 * HOUR_S)
    unlink, count = os.unlink, 0

    class Killed(BaseException):
        pass

    def dies(path: Path) -> None:
        nonlocal count
        count += 1
        if count > 5:
            raise Killed
        unlink(path)

    bounds = OutputBounds(HOUR_S, LARGE, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", dies)
        first = keeper_on(state, bounds, ("living",))
        doomed = first._over_bounds(0, LARGE)
        with pytest.raises(Killed):
            first._clear(doomed)
    assert len(left(state)) == 13 - 4  # j0 has no third file, about the order of its streams
    # the mark was there before the first file went: nobody takes what is gone for a job that said nothing
    assert OutputCleaner(state, bounds).is_cleared(int((time.time() - 2 * HOUR_S) * 1000))
    assert sweep(keeper_on(state, bounds, ("living",))) == 4
    assert left(state) == {living.name}


def test_a_clock_that_jumps_while_it_runs_clears_nothing_early_and_nothing_late(
    state: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = keeper_on(state, OutputBounds(HOUR_S, LARGE, 100))
    path = wrote(state, "j", ended_s_ago=-7 * 24 * HOUR_S)  # written while the clock was a week ahead
    keeper.ended("j")
    assert sweep(keeper) == 0
    for jump_s in (30 * 24 * HOUR_S, -30 * 24 * HOUR_S):
        with monkeypatch.context() as patch:
            now_s = time.time() + jump_s
            patch.setattr(time, "time", lambda now_s=now_s: now_s)
            assert sweep(keeper) == 0
            keeper.begin(keeper.scan(), ())  # and the supervisor is asked again
            assert sweep(keeper) == 0
    assert path.exists()
    clock.now_s += HOUR_S + 1
    assert sweep(keeper) == 1


def test_a_file_from_the_future_is_as_young_as_can_be(state: Path, clock: Clock) -> None:
    wrote(state, "j", ended_s_ago=-1e9)
    keeper = keeper_on(state, OutputBounds(HOUR_S, LARGE, 100))
    assert sweep(keeper) == 0
    clock.now_s += HOUR_S + 1
    assert sweep(keeper) == 1


def test_a_silent_job_is_told_from_one_that_is_cleared(state: Path, clock: Clock) -> None:
    now_ms = int(time.time() * 1000)
    keeper = keeper_on(state, OutputBounds(HOUR_S, LARGE, 100))
    assert not keeper.is_cleared(now_ms)
    wrote(state, "old", ended_s_ago=2 * HOUR_S)
    keeper = keeper_on(state, OutputBounds(HOUR_S, LARGE, 100))
    sweep(keeper)
    assert keeper.is_cleared(now_ms - int(2 * HOUR_S * 1000))
    assert not keeper.is_cleared(now_ms)
    assert OutputCleaner(state, OutputBounds(0.0, LARGE, 100)).is_cleared(now_ms)
    before = os.stat(state / MARK).st_mtime
    wrote(state, "older", ended_s_ago=9 * HOUR_S)
    sweep(keeper_on(state, OutputBounds(HOUR_S, LARGE, 100)))
    assert os.stat(state / MARK).st_mtime == before  # it only grows


def test_what_is_not_ours_stays(state: Path, clock: Clock) -> None:
    folder = state / OUTPUT_FOLDER
    (folder / "notes.txt").write_text("mine")
    (folder / ("a" * 32 + ".stdout.bak")).write_text("mine")
    (folder / ("b" * 32 + ".stdout")).symlink_to(folder / "notes.txt")
    sweep(keeper_on(state, OutputBounds(0.0, 0, 0)))
    assert len(left(state)) == 3


def test_an_unreadable_folder_is_told_and_tried_again(state: Path, clock: Clock) -> None:
    keeper = keeper_on(state, OutputBounds(0.0, 0, 0))
    path = wrote(state, "j")
    keeper.ended("j")
    with pytest.MonkeyPatch.context() as patch:

        def fails(*_: object, **__: object) -> os.stat_result:
            raise PermissionError(13, "no")

        patch.setattr(os, "stat", fails)
        assert sweep(keeper) == 0
    clock.now_s += 1
    assert sweep(keeper) == 1
    assert not path.exists()


def test_output_that_could_not_be_deleted_is_found_by_the_next_sweep(
    state: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        wrote(state, f"j{number}", ended_s_ago=100 - number)
    keeper = keeper_on(state, OutputBounds(HOUR_S, LARGE, 1))

    def fails(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)  # of the mark
        assert sweep(keeper) == 0
    assert len(left(state)) == 3
    assert sweep(keeper) == 2
    assert left(state) == {output_path(state, "j2", "stdout").name}


def test_a_file_that_cannot_be_deleted_keeps_no_younger_one_and_is_tried_again(
    state: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = wrote(state, "j0", ended_s_ago=100)
    wrote(state, "j1", ended_s_ago=99)
    keeper, unlink = keeper_on(state, OutputBounds(0.0, LARGE, 9)), os.unlink

    def fails(path: Path) -> None:
        if path == kept:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fails)
        assert sweep(keeper) == 1
    assert left(state) == {kept.name}
    assert sweep(keeper) == 1
    assert left(state) == set()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_bounds_hold_and_running_output_stays(seed: int, state: Path, clock: Clock) -> None:
    chance = random.Random(seed)
    room = chance.choice([0, 8, 64]) * BLOCK
    bounds = OutputBounds(chance.choice([0.0, 60.0, HOUR_S]), room, chance.choice([0, 3, 50]))
    keeper, running, finished = keeper_on(state, bounds), set[str](), dict[str, float]()
    for number in range(60):
        key = f"j{number}"
        keeper.started(key)
        running.add(key)
        wrote(state, key, chance.choice([1, BLOCK, 5 * BLOCK]), err=chance.random() < 0.3)
        for over in [each for each in running if chance.random() < 0.3]:
            running.discard(over)
            keeper.ended(over)
            finished[over] = clock.now_s
        clock.now_s += chance.random() * 40
        if chance.random() < 0.1:
            keeper = keeper_on(state, bounds, tuple(running))
        if chance.random() < 0.5:
            sweep(keeper)
            names = left(state)
            for key in running:
                assert any(output_path(state, key, stream).name in names for stream in ("stdout", "stderr"))
            kept = [key for key in finished if any(output_path(state, key, s).exists() for s in ("stdout", "stderr"))]
            assert len(kept) <= bounds.attempts_max
            taken = sum(os.stat(state / OUTPUT_FOLDER / name).st_blocks * 512 for name in names)
            assert taken <= bounds.bytes_max or not kept
