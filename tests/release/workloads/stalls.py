"""Random sites with attempts that hang and move again: sweeps, gangs and single jobs, several of one record on a host.

Each second the workers say for how long each attempt has been still. What the leader shows as stalled, tells once,
takes back or ends must be these attempts and no other: replicas that one record placed have one fence. Of a gang, all
ranks or none.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Final

from moorage.scheduler.answers import views
from moorage.scheduler.core.ledger.state import RUNNING
from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import AttemptUse, DeviceUse
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.honest_worker import HeldAttempt

STALLS_FROM: Final = 900_000
GANG: Final = -1
ACTS: Final = ("submit", "submit", "hang", "hang", "hang", "hang job", "move", "over", "cancel", "lead", "wait", "wait")
#: a job and one of its replicas, or all of a gang, with its attempts
Stalled = dict[tuple[str, int], frozenset[AttemptName]]


class Stalls(Driving):
    """A site of one seed."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        super().__init__()
        self.hosts = [f"w{number}" for number in range(dice.randint(1, 3))]
        for host in self.hosts:
            self.worker(host, 4)
        self.hangs = dict[AttemptName, int]()  # and for how many seconds
        self.stalled: Stalled = {}
        self.jobs = 0
        self.ended = 0  # attempts that were ended as they stalled

    def run(self) -> None:
        for _ in range(self.dice.randint(20, 60)):
            self.act()
            for _ in range(self.dice.randint(1, 8)):
                self.pass_second()

    def running(self) -> list[HeldAttempt]:
        return [held for host in self.hosts for held in self.workers[host].held.values() if held.phase == "running"]

    def act(self) -> None:
        """Do one thing."""
        dice, what, running = self.dice, self.dice.choice(ACTS), self.running()
        if what == "submit":
            self.jobs += 1
            run = {"driver": "noop", "stall_s": dice.choice([3, 10]), "on_stall": dice.choice(["warn", "warn", "end"])}
            gang = {"scheduling": "gang"} if dice.random() < 0.4 else {}
            fields = {"gpu": {"count": dice.choice([1, 1, 2]), **gang}, "replicas": dice.randint(1, 4)}
            self.submit(f"j{self.jobs}", **fields, run=run, retries=dice.choice([0, 5]))
        elif what == "hang" and running:
            self.hangs.setdefault(dice.choice(running).name, 0)
        elif what == "hang job" and running:
            job = dice.choice(running).place.job
            self.hangs |= {held.name: 0 for held in running if held.place.job == job and held.name not in self.hangs}
        elif what == "move" and self.hangs:
            del self.hangs[dice.choice(sorted(self.hangs))]
        elif what == "over" and running:
            held = dice.choice(running)
            worker = next(self.workers[host] for host in self.hosts if held.name in self.workers[host].held)
            worker.finish(held.name, dice.choice([0, 1]))
        elif what == "cancel" and self.jobs:
            self.cancel(f"j{dice.randint(1, self.jobs)}")
        elif what == "lead":
            self.lead()
            self.renew()
            self.tick(1_000)  # a new leader tells anew what stalls
            self.stalled = self.due()[0]

    def pass_second(self) -> None:
        """Workers report, then renew; what stalls by then is told by the end of that second."""
        self.report_all()
        self.settle()
        names = {held.name for held in self.running()}
        self.hangs = {name: for_s + 1 for name, for_s in self.hangs.items() if name in names}
        for host in self.hosts:
            worker = self.workers[host]
            worker.use = [
                AttemptUse(held.place.fence, [DeviceUse(0, 0, 10, 70, 700)], self.hangs.get(name, 0), *name[:4])
                for name, held in worker.held.items()
            ]
        due, ends = self.due()
        self.events.clear()
        self.renew()
        self.tick(1_000)
        self.look(due, ends)

    def due(self) -> tuple[Stalled, Stalled]:
        """What stalls now: what is to be told, and what is to be ended."""
        told: Stalled = {}
        ended: Stalled = {}
        for job in self.state.jobs.values():
            run = self.engine.reader.request_of(job).workload
            rows = [row for row in job.rows.values() if row.state == RUNNING and row.attempt is not None]
            still = [
                (row.index, row.attempt.name)
                for row in rows
                if row.attempt is not None and self.hangs.get(row.attempt.name, 0) >= (run.stall_s or 0)
            ]
            found = told if run.on_stall == "warn" else ended
            if job.gang and len(still) == job.size:
                found[job.name, GANG] = frozenset(name for _, name in still)
            elif not job.gang:
                found.update({(job.name, index): frozenset([name]) for index, name in still})
        return told, ended

    def look(self, due: Stalled, ends: Stalled) -> None:
        """Compare what the leader shows, tells and ends with what stalls."""
        for job in self.state.jobs.values():
            shown = views.summary(self.engine, job).stalled
            keys = {(job.name, GANG if job.gang else row.replica) for row in shown}
            wanted = {key for key in due if key[0] == job.name}
            assert keys == wanted, f"{job.name}: {sorted(keys)} are shown as stalled, not {sorted(wanted)}"
        begun = Counter(key[0] for key, attempts in due.items() if self.stalled.get(key) != attempts)
        told = Counter(event["job"] for event in self.events if event.get("stalled", {}).get("seconds"))
        assert told == begun, f"{told} are told to stall, not {begun}"
        over = Counter(key[0] for key, attempts in self.stalled.items() if key not in due and self.all_run(attempts))
        moves = Counter(event["job"] for event in self.events if event.get("stalled", {}).get("seconds") == 0)
        assert moves == over, f"{moves} are told to move again, not {over}"
        for event in self.events:
            for change in event.get("changes", ()):
                if (change.get("why") or "").startswith("stalled: "):
                    which = GANG if self.job(event["job"]).gang else change["replica"]
                    assert (event["job"], which) in ends, f"{event['job']}/{which} is ended and did not stall"
        for name, which in ends:
            rows = [row for row in self.job(name).rows.values() if which in (GANG, row.index)]
            assert all(row.state != RUNNING for row in rows), f"{name}/{which} stalls, and goes on"
            self.ended += 1
        self.stalled = due

    def all_run(self, attempts: frozenset[AttemptName]) -> bool:
        found = [
            row.attempt.name
            for job in self.state.jobs.values()
            for row in job.rows.values()
            if row.attempt is not None and row.state == RUNNING
        ]
        return attempts <= set(found)
