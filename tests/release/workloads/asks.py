"""Random sites of teams that ask much of one queue at once; each promise is judged from requests and reports alone.

Nothing here asks the scheduler how it decides: `Attempts` counts ends by the words of the requests.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Final

from moorage.scheduler.core.ledger.state import Job
from moorage.schemas.attempt import AttemptName
from moorage.schemas.job import STATES
from tests.unit.scheduler.driving import Driving

ASKS_FROM: Final = 9_100_000
TENANTS: Final = ("t", "u", "v")
#: how an attempt may end by itself: code, the worker's word, and the causes that fit, most exact first
ENDS: Final = (
    (0, "exit", ()),
    (1, "exit", ("exit:1", "failure")),
    (75, "exit", ("exit:75", "failure")),
    (-11, "exit", ("signal", "exit:139", "failure")),
    (-9, "out of memory: it was killed by the kernel", ("oom signal", "exit:137", "failure")),
    (127, "start-failed: exec: no such file", ("start", "exit:127", "failure")),
    (-9, "lost", ("lost",)),
    (-15, "end", ()),  # what was asked to end counts for nothing
)
ROWS: Final[tuple[dict[str, Any], ...]] = (
    {"on": ["exit:75", "oom"], "times": 2},
    {"on": "failure", "times": 1, "pause_s": 3},
    {"on": "exit:1", "times": 0},
    {"on": ["signal"], "times": 3, "pause_s": 0},
    {"on": "lost", "times": 1},
    {"on": ["start", "exit:137"], "times": 1},
)


class Attempts:
    """What the ends of one replica's attempts allow: counted by the rows of its request."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.used = Counter[int]()
        self.losses = 0

    def allows(self, causes: tuple[str, ...]) -> bool:
        """Take one end with these causes; return whether another attempt follows it."""
        for fits in causes:
            for at, row in enumerate(self.rows):
                if not set(fits.split()).isdisjoint([row["on"]] if isinstance(row["on"], str) else row["on"]):
                    self.used[at] += 1
                    return self.used[at] <= int(row["times"])
        self.losses += causes == ("lost",)
        return causes == ("lost",) and self.losses <= 3


class Asks(Driving):
    """A site of one seed."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        super().__init__()
        self.hosts = [f"w{number}" for number in range(dice.randint(1, 4))]
        for host in self.hosts:
            self.worker(host, dice.choice([2, 4]), cpu_milli=32_000, memory_mib=64_000)
        self.jobs: dict[tuple[str, str], dict[str, Any]] = {}
        self.attempts: dict[tuple[str, str, int], Attempts] = {}
        self.fails: set[tuple[str, str, int]] = set()  # replicas of which no other attempt may follow
        self.ends = Counter[str]()  # of attempts by what followed: a world in which nothing ends shows nothing

    def run(self) -> None:
        for _ in range(self.dice.randint(40, 120)):
            self.act()
            self.settle()
            self.look()
        self.pass_time(90_000)
        self.look()

    # ------------------------------------------------------------------------------------------------- acts

    def act(self) -> None:
        """Do one thing."""
        what = self.dice.choice(("submit", "submit", "submit", "end", "end", "end", "end", "requeue", "lead", "time"))
        if what == "submit":
            self._submit()
        elif what == "end":
            self._end()
        elif what == "requeue" and self.jobs:
            tenant, job = self.dice.choice(sorted(self.jobs))
            self.order("requeue", tenant=tenant, job=job)
        elif what == "lead":
            self.dice.choice((self.lead, self.lead_from_snapshot))()
            self.renew()
        elif what == "time":
            self.pass_time(self.dice.choice((1_000, 5_000, 61_000)), step=1_000)

    def _submit(self) -> None:
        dice, tenant, job = self.dice, self.dice.choice(TENANTS), f"j{len(self.jobs)}"
        rows = dice.sample(ROWS, dice.randint(0, 3))
        fields: dict[str, Any] = {"gpu": {"count": dice.choice([1, 1, 2])}, "replicas": dice.choice([1, 1, 3])}
        if rows:
            fields["retry"] = rows
        answer = self.submit(job, tenant=tenant, **fields)
        assert answer["kind"] == "accepted", answer
        self.jobs[tenant, job] = fields

    def running(self) -> list[tuple[str, AttemptName]]:
        """The attempts that run, with their worker."""
        return [
            (host, name)
            for host in self.hosts
            for name, held in self.workers[host].held.items()
            if held.phase == "running" and STATES[self.job(name[1], name[0]).rows[name[2]].state] == "RUNNING"
        ]

    def _end(self) -> None:
        running = self.running()
        if not running:
            return
        host, name = self.dice.choice(running)
        code, detail, causes = self.dice.choice(ENDS[:-1])
        key = name[:3]
        rows = self.jobs[name[0], name[1]].get("retry", [])
        if code or detail != "exit":
            allowed = self.attempts.setdefault(key, Attempts(rows)).allows(causes)
            self.ends["again" if allowed else "failed"] += 1
            if not allowed:
                self.fails.add(key)
        self.workers[host].finish(name, code, detail)

    # ------------------------------------------------------------------------------------------------- looks

    def look(self) -> None:
        """Judge the state from what was asked."""
        for job in self.state.jobs.values():
            self._judge_ends(job)

    def _judge_ends(self, job: Job) -> None:
        for index in range(job.size):
            key, state = (job.tenant, job.name, index), STATES[job.state_of(index) or 0]
            failed = state == "FAILED"
            assert failed == (key in self.fails), f"{key} is {state}, and {'may' if failed else 'may not'} go on"
