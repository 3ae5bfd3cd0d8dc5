"""Random sites with schedules: nats-server publishes runs late, twice and again after a crash, and leaders change.

A reference decides each run, too. Every due time makes one job at most, and a run is left out only while the last one
lives. Of a schedule whose runs may not overlap, one job lives at a time.
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from moorage.scheduler.core.events import ScheduleRun
from moorage.scheduler.core.ledger.schedules import Schedule
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.scheduled import offer_ask

SCHEDULES_FROM: Final = 800_000
NAMES: Final = ("a", "b", "c")
TENANTS: Final = ("t", "u")
PERIOD_MS: Final = 60_000
ACTS: Final = (
    "due", "due", "due", "due", "by hand", "crash", "reread", "old", "add", "add", "pause", "resume", "remove",
    "cancel", "work", "work", "lead", "snapshot",
)  # fmt: skip
Key = tuple[str, str]


class Published(NamedTuple):
    """A message of the stream: a run for a wish, which says when the next one is due; 0 if it was asked for."""

    key: Key
    wish: int
    sequence: int
    next_ms: int


class Schedules(Driving):
    """A site of one seed."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        super().__init__()
        self.stream: list[Published] = []
        self.decided: dict[Key, set[tuple[int, int]]] = {}  # the wishes and next times of runs that a record has
        for number in range(2):
            self.worker(f"w{number}", 2)

    def run(self) -> None:
        for _ in range(self.dice.randint(40, 120)):
            self.act()
            self.look()
        self.hear(self.stream)  # whatever is read again changes nothing now
        self.look()

    def act(self) -> None:
        """Do one thing, in a record of its own."""
        dice, what = self.dice, self.dice.choice(ACTS)
        key = tenant, name = dice.choice(TENANTS), dice.choice(NAMES)
        row = self.state.schedule(tenant, name)
        if what == "add":
            request = {"run": {"argv": ["true"]}, "gpu": dice.choice([{}, {"count": 2}])}
            offer_ask(self, "add", name, tenant, overlap=dice.choice(["skip", "queue"]), request=request)
            self.tick()
        elif what in ("pause", "resume", "remove"):
            offer_ask(self, what, name, tenant)
            self.tick()
        elif what in ("due", "by hand"):
            fresh = [self.published(each, by_hand=what == "by hand") for each in self.some(row, key)]
            self.hear([each for each in fresh if each is not None])
        elif what in ("crash", "old") and self.stream:  # the same run under another number
            last = dice.choice(self.stream[-3:] if what == "crash" else self.stream)
            self.hear([self.put(last._replace(sequence=self.next_sequence()))])
        elif what == "reread":
            self.hear(self.stream[-dice.randint(1, 5) :])
        elif what == "cancel" and row is not None and self.state.job(tenant, row.job) is not None:
            self.cancel(row.job, tenant=tenant)
        elif what == "work":
            self.settle()
            self.run_out(f"w{dice.randint(0, 1)}", dice.choice([0, 0, 1]))
        elif what == "lead":
            self.lead()
            self.renew()
            self.hear([each for each in self.stream if each.sequence > self.state.ran_through])
        elif what == "snapshot":
            self.take_snapshot()
        self.tick(dice.choice([1, 1_000, PERIOD_MS]))

    def some(self, row: Schedule | None, key: Key) -> list[Schedule]:
        """Of one schedule a run is due, or of several at once."""
        if self.dice.random() < 0.3:
            return [row for rows in self.state.schedules.values() for row in rows.values() if self.dice.random() < 0.7]
        return [row] if row is not None else []

    def next_sequence(self) -> int:
        return max(self.stream[-1].sequence if self.stream else 0, self.state.ran_through) + self.dice.randint(1, 2)

    def published(self, row: Schedule, *, by_hand: bool) -> Published | None:
        if row.paused and not by_hand:
            return None
        next_ms = 0 if by_hand else (self.state.time_ms // PERIOD_MS + 1) * PERIOD_MS
        return self.put(Published((row.tenant, row.name), row.wish, self.next_sequence(), next_ms))

    def put(self, run: Published) -> Published:
        self.stream.append(run)
        return run

    def hear(self, runs: list[Published]) -> None:
        """The leader reads these in one record; look what it decides of each."""
        wanted: dict[Key, tuple[int, int]] = {}
        through = dict[Key, tuple[int, int]]()
        lives = dict[Key, bool]()
        for run in runs:
            (tenant, name), row = run.key, self.state.schedule(*run.key)
            self.engine.offer(ScheduleRun(tenant, name, run.wish, run.sequence, run.next_ms, reply="run"))
            if row is None or row.wish != run.wish:
                continue
            last, next_ms = through.get(run.key, (row.through, row.next_ms))
            if run.sequence <= last or 0 < run.next_ms <= next_ms:
                continue
            through[run.key] = run.sequence, run.next_ms or next_ms
            job = self.state.job(tenant, row.job)
            skips = row.overlap == "skip" and lives.get(run.key, job is not None and job.live > 0)
            lives[run.key] = True
            made, skipped = wanted.get(run.key, (row.runs, row.skipped))
            wanted[run.key] = made + (not skips), skipped + skips
            if run.next_ms:
                due = self.decided.setdefault(run.key, set())
                assert (run.wish, run.next_ms) not in due, f"{run} is decided twice"
                due.add((run.wish, run.next_ms))
        self.tick()
        for key, counts in wanted.items():
            row = self.state.schedule(*key)
            assert row is not None
            assert (row.runs, row.skipped) == counts, f"{key}: {row.runs} runs, {row.skipped} left out, not {counts}"

    def look(self) -> None:
        """What holds after every record."""
        for rows in self.state.schedules.values():
            for row in rows.values():
                tenant = self.state.tenants.get(row.tenant)
                jobs = list(tenant.jobs.values()) if tenant is not None else []
                of_it = [job for job in jobs if job.name.startswith(f"{row.name}-") and job.accepted_ms >= row.since_ms]
                live = [job.name for job in of_it if job.live and (row.overlap == "skip" or job.state != "QUEUED")]
                assert len(live) <= 1, f"{row.name} is to run once at a time: {live}"
