"""Hosts that die at random moments under trainings in virtual time, on the core alone: thousands of deaths.

Each next attempt is placed with a set that was whole and that the ledger knew, and that is no older at the death than
the time between two sets, the time that one takes to store, and the time between two saves.

    python -m tests.release.checkpoints.virtual_deaths --deaths 2000 --seed 1
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import pytest

from moorage.schemas.frames import Report
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving

EVERY_MS: Final = 600_000
UPLOAD_MS_MAX: Final = 90_000
SAVES_MS: Final = 30_000
#: a host dies so long after its attempt began, at most; some before anything is stored
MOMENT_MS: Final = 2_000_000
TICK_MS: Final = 10_000


class Outcome(msgspec.Struct):
    """How many hosts died, under how many of them nothing of the job was stored before, and what was lost, in ms."""

    deaths: int = 0
    nothing_stored: int = 0
    leaders: int = 0
    lost_ms: list[int] = msgspec.field(default_factory=list)


class _Training:
    def __init__(self, rng: random.Random) -> None:
        self.outcome = Outcome()
        self._rng = rng
        self._drive = Driving()
        self._hosts = 0
        self._sets: dict[str, int] = {}  # by digest: how far the training was, in ms of work
        self._host()
        raise_level(self._drive)
        run = {"driver": "process", "argv": ["train"], "checkpoint": "ck"}
        self._drive.submit("a", gpu={}, run=run, retries_on_lost=1_000)
        self._drive.pass_time(1_000)

    def _host(self) -> None:
        self._drive.worker(f"h{self._hosts}", 1, auto=False)
        self._hosts += 1

    def _tell(self, kind: str, digest: str | None = None) -> None:
        attempt = self._drive.attempt("a", 0)
        worker = self._drive.workers[attempt.worker.id]
        worker.gathered.append(Report(kind, "t", "a", 0, attempt.no, attempt.fence, 0, "", checkpoint=digest))  # type: ignore[arg-type]
        frame = worker.report_frame()
        assert frame is not None
        self._drive.send(worker.id, frame)
        worker.report_answered(frame.no)
        self._drive.tick()

    def attempt(self, begins_ms: int) -> int:
        """Let an attempt train until its host dies; return where the next one begins. Raises AssertionError."""
        drive, rng = self._drive, self._rng
        attempt = drive.attempt("a", 0)
        self._tell("claimed")
        self._tell("started")
        dies_ms, done_ms, due_ms, whole_ms = rng.randrange(MOMENT_MS), 0, EVERY_MS, -1
        upload_ms, taken_ms = rng.randrange(UPLOAD_MS_MAX), 0
        while done_ms < dies_ms:
            drive.pass_time(TICK_MS)
            done_ms += TICK_MS
            if whole_ms < 0 and done_ms >= due_ms:  # what was saved last is read now, and is there once it is sent
                taken_ms, whole_ms = begins_ms + done_ms // SAVES_MS * SAVES_MS, done_ms + upload_ms
            if 0 <= whole_ms <= done_ms:
                digest = f"SHA-256={len(self._sets):043}="
                self._sets[digest] = taken_ms
                self._tell("started", digest)
                due_ms, whole_ms, upload_ms = done_ms + EVERY_MS, -1, rng.randrange(UPLOAD_MS_MAX)
            if rng.random() < 0.002:
                drive.lead()
                drive.renew()
                self.outcome.leaders += 1
        drive.workers[attempt.worker.id].session = ""
        self._host()
        for _ in range(200):
            drive.pass_time(TICK_MS)
            if (place := self._placed(attempt.no + 1)) is not None:
                break
        else:
            raise AssertionError(f"attempt {attempt.no + 1} is not placed")
        found = [digest for _, digest in place if digest]
        at_ms = self._sets[found[-1]] if found else 0
        assert at_ms == max(self._sets.values(), default=0), "it is not the newest that was told"
        lost_ms = begins_ms + done_ms - at_ms
        assert lost_ms <= EVERY_MS + UPLOAD_MS_MAX + SAVES_MS + 3 * TICK_MS, f"{lost_ms} ms are lost"
        self.outcome.deaths += 1
        self.outcome.nothing_stored += not found
        self.outcome.lost_ms.append(lost_ms)
        return at_ms

    def _placed(self, number: int) -> list[tuple[int, str]] | None:
        row = self._drive.state.jobs[next(iter(self._drive.state.jobs))].rows[0]
        if row.attempt is None or row.attempt.no != number:
            return None
        places = [place for frame in self._drive.wanted for place in frame.place if place.attempt == number]
        return places[-1].checkpoints if places else None


def world(seed: int, deaths: int) -> Outcome:
    """Run so many deaths of hosts under one training that never ends. Raises AssertionError."""
    training, at_ms = _Training(random.Random(seed)), 0
    for _ in range(deaths):
        at_ms = training.attempt(at_ms)
    return training.outcome


@contextmanager
def next_level() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        know_next(patch)
        yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deaths", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    told, left, seed = parser.parse_args(), 0, 0
    with next_level():
        found, left, seed = Outcome(), told.deaths, told.seed
        while left > 0:
            one = world(seed, min(left, 100))
            found.deaths += one.deaths
            found.nothing_stored += one.nothing_stored
            found.leaders += one.leaders
            found.lost_ms += one.lost_ms
            left, seed = left - 100, seed + 1
    lost = sorted(found.lost_ms)
    print(
        f"{found.deaths} deaths, {found.leaders} new leaders, {found.nothing_stored} with nothing stored before; lost "
        f"s of work: median {lost[len(lost) // 2] / 1000:.0f}, most {lost[-1] / 1000:.0f}, of at most "
        f"{(EVERY_MS + UPLOAD_MS_MAX + SAVES_MS) / 1000:.0f} and three ticks"
    )


if __name__ == "__main__":
    main()
