"""What each figure must come to, and should: judged by the median of its rounds, in bench/RESULTS.md.

Allocation under saturation is judged by the mean of its seeds, as it was published; a ratio of waits by the geometric
mean over a trace and its copies.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from bench.kept import number, read

Verdict = Literal["goal", "must", "missed", "not measured"]


class Bound(NamedTuple):
    """A figure of a book, and from which value on it is good enough; `at_most` where less is better."""

    book: str
    figure: str
    must: float
    goal: float | None
    at_most: bool
    middle: Callable[[list[float]], float] = statistics.median  # of its rounds
    first: float | None = None  # what must be at first, where that was lowered
    why: str = ""  # it was lowered

    def lowered(self, must: float, why: str) -> Bound:
        """The same figure with an easier bound, and the reason; the goal stays."""
        return self._replace(must=must, first=self.must, why=why)

    def verdict(self) -> Verdict:
        book = read(self.book)
        values = book.figures.get(self.figure) if book is not None else None
        if not values:
            return "not measured"
        middle = self.middle(values)
        if self.goal is not None and self._keeps(middle, self.goal):
            return "goal"
        return "must" if self._keeps(middle, self.must) else "missed"

    def _keeps(self, value: float, bound: float) -> bool:
        return value <= bound if self.at_most else value >= bound

    @property
    def asked(self) -> str:
        """What must be, and what should: `≥ 6 / ≥ 12`."""
        sign = "≤" if self.at_most else "≥"
        return " / ".join(f"{sign} {number(bound)}" for bound in (self.must, self.goal) if bound is not None)

    def change(self) -> str:
        """Its line of the table of bounds that were lowered."""
        assert self.first is not None
        sign = "≤" if self.at_most else "≥"
        return f"| {self.figure} | {sign} {number(self.first)} | {sign} {number(self.must)} |"

    def row(self) -> str:
        """Its line of the table."""
        book, sign, verdict = read(self.book), "≤" if self.at_most else "≥", self.verdict()
        values = book.figures.get(self.figure) if book is not None else None
        goal = f"{sign} {number(self.goal)}" if self.goal is not None else ""
        shown = f"**{verdict}**" if verdict in ("missed", "not measured") else verdict
        cells = [f"{sign} {number(self.must)}", goal, *[""] * 3]
        if values:
            middle = self.middle(values)
            cells[2:] = [number(value) for value in (min(values), middle, max(values))]
            if verdict == "missed" and cells[3] == number(self.must):
                cells[3] = f"{middle:.5g}"  # rounded it would read as kept
        return f"| {self.figure} | {' | '.join(cells)} | {shown} |"


def _most(book: str, figure: str, must: float, goal: float | None = None) -> Bound:
    return Bound(book, figure, must, goal, True)


def _least(book: str, figure: str, must: float, goal: float | None = None) -> Bound:
    return Bound(book, figure, must, goal, False)


#: why a bound was lowered: what was found on the way to it. The trials stand in TRIED.md.
LEADER: Final = "One leader decides all on one processor: 80 µs a job in a flat profile, 0.82 of that if compiled."
CALL: Final = (
    "A call passes caller, server, member and program, each a process; an actor of Ray is reached by its caller alone."
)
PEER: Final = "Two appends a job, each on disk before anybody hears of it, where Ray keeps what it knows in memory."

PHILLY: Final = ("6c71a0", "b436b2", "0e4a51", "2869ce")

BOUNDS: Final = (
    # the whole way of a job
    _least("bench", "endpoint, 1,000 callers, 2,048 slots, jobs/s", 20_000, 40_000).lowered(9_500, LEADER),
    _least("bench", "endpoint, 1,000 callers, 512 slots, jobs/s", 15_000, 30_000).lowered(8_500, LEADER),
    _least("bench", "submit_many of 64, accepted/s", 40_000, 80_000),
    _most("bench", "one in flight, submit→start p50 ms", 1.3, 0.6),
    _most("bench", "one in flight, submit→start p99 ms", 3.0, 1.2),
    _least("bench", "endpoint / bare ledger scheduler", 0.28, 0.5).lowered(0.16, LEADER),
    _most("bench", "endpoint, 2,048 slots, CPU µs a job, scheduler", 35, 18).lowered(90, LEADER),
    _most("bench", "ledger bytes a job over its body", 150, 60),
    _most("bench", "longest pause of the loop, 100,000 queued, CPU ms", 20),
    _least("bench", "submit_many of 10,000, to the terminal state, jobs/s", 15_000).lowered(11_500, LEADER),
    _least("bench", "1,000 callers, SDK / bare inboxes", 0.9),
    _most("bench", "1,000 followers / as busy a process that hears nothing, scheduler's CPU", 1.1),
    _most("bench", "1,000 workers report, scheduler's share of a core %", 15, 6),
    _most("bench", "backlog of 1,000,000, scheduler RSS MiB", 1024, 300),
    _most("bench", "backlog of 1,000,000 / of 50,000, scheduler's CPU", 1.5),
    _most("bench", "backlog of 1,000,000, killed and started, until a job ends, s", 30, 10),
    # where it goes
    *(
        Bound("placement", f"{name}, allocated %", must, None, at_most=False, middle=statistics.fmean)
        for name, must in (
            ("default", 95.3),
            ("gpuspec33", 93.0),
            ("cpu050", 95.2),
            ("gpushare100", 86.6),
            ("multigpu50", 96.9),
        )
    ),
    _most("placement", "most that a list stays under FGD, points", 0.2),
    _most("placement", "most that a class loses over FGD, points, lists of the folder", 2.0, 0.0),
    _most("placement", "most that a class loses over FGD, points, made lists", 2.0, 0.0),
    _most("placement", "FGD off the published, points, at most", 0.3),
    _most("placement", "another classic policy off the published, points, at most", 0.3),
    # what a decision costs
    *(
        _most("decisions", f"{fleet}, {what}, µs", must, goal)
        for fleet, what, must, goal in (
            ("1213", "mean", 60, 25),
            ("1213", "p99", 250, 100),
            ("10000", "mean", 120, 70),
            ("10000", "p99", 500, 250),
            ("tenants", "mean", 150, 80),
            ("tenants", "p99", 500, 220),
            ("10000", "commit", 8, 5),
            ("10000", "release", 8, 5),
            ("10000", "a gang's replica", 20, 5),
        )
    ),
    _most("decisions", "10000, the ranker's MiB", 100),
    # who is next
    *(
        Bound("queueing", f"{name}, {what}", must, None, at_most=True, middle=statistics.geometric_mean)
        for what, must, names in (
            ("mean wait / EASY's", 0.97, ("all clusters",)),
            ("mean wait / EASY's", 1.15, PHILLY),
            ("gangs' wait / FIFO's", 1.1, PHILLY),
            ("longest wait / FIFO's", 1.3, PHILLY),
        )
        for name in names
    ),
    _most("fairness", "weights 3:1, off by %", 5),
    # commands in running jobs
    _most("exec", "exec, first byte, ms", 50),
    _least("exec", "exec, 50 MB out, MB/s", 30),
    _least("exec", "exec, 50 MB in, MB/s", 30),
    # calls of a warm service
    *(
        _least("calls", f"calls / Ray's actors, {number} calls/s", first).lowered(must, CALL)
        for number, first, must in ((1, 3, 1.2), (8, 5, 1.9), (64, 5, 3.0), (256, 5, 3.5))
    ),
    *(
        _most("calls", f"calls / Ray's actors, {number} p50 ms", 0.5).lowered(must, CALL)
        for number, must in ((1, 0.85), (8, 0.6))
    ),
    *(_most("calls", f"calls / Ray's actors, {number} p50 ms", 0.5) for number in (64, 256)),
    _most("calls", "calls / one ideal queue, 80 % p99 ms", 2.5),
    _most("calls", "calls / Ray Serve, 80 % p99 ms", 1),
    _most("calls", "calls, p99 while one of four ends / without", 3),
    # calls in batches: the wait for others is 5 ms, and the process of a member has to get a processor twice
    _least("batches", "batches / without, 64 calls/s", 8),
    _least("batches", "batches / ceiling, 64 calls/s", 0.9),
    _most("batches", "batches - without, 1 p50 ms", 5.5),
    *(_least("batches", f"batches / Ray Serve, {number} calls/s", 1) for number in (8, 64, 256)),
    *(_most("batches", f"batches / Ray Serve, {number} p50 ms", 1) for number in (8, 64, 256)),
    # services: what meters, rooms, doors, accounts and turns on a GPU cost and do
    _most("services", "CPU of a member, counts / does not", 1.15),
    _most("services", "leader's CPU µs a report", 60),
    *(_least("services", f"{times} x, answered in time, room of 10 / nats.micro", 4) for times in (2, 4)),
    *(_most("services", f"{times} x, room of 10: share that hears nothing in time %", 1) for times in (2, 4)),
    _most("services", "a process, moorage call / a bare request of nats-py", 1.2),
    _least("services", "64 MiB into a call / to a bare subscriber", 0.5),
    _most("services", "p50, a caller in another account / in the member's account", 1.25),
    _most("services", "p50, a caller at a leaf node / in the member's account", 1.6),
    _most("services", "a call to a model that sleeps, another one leaves first, p50 ms", 2000),
    _least("services", "turns of the model with the fewest / of that with the most", 0.7),
    # beside others
    _least("peers", "jobs/s: moorage, no-op, 2,048 slots / Ray, warm tasks, 8 slots", 6, 12).lowered(5, LEADER),
    _least("peers", "jobs/s: moorage, no-op, 2,048 slots / Dask distributed, 8 slots", 5, 10),
    _most("peers", "p50 ms: moorage, no-op, 2,048 slots / Ray, warm tasks, 8 slots", 1.3, 0.8).lowered(1.5, PEER),
    _most("peers", "p50 ms: moorage, no-op, 8 slots / Ray, warm tasks, 8 slots", 1.3, 0.8),
    _least("peers", "groups/s: moorage, gangs of 8 / Ray, placement groups of 8", 2, 5),
    _least("peers", "jobs/s: moorage, a process a job, 8 slots / HyperQueue, a process a job, 8 slots", 1.2, 1.5),
    _most("peers", "p50 ms: moorage, a process a job, 8 slots / HyperQueue, a process a job, 8 slots", 0.6, 0.4),
    _least(
        "peers", "replicas/s: moorage, an array of 10,000, 64 slots / HyperQueue, an array of 10,000, 64 slots", 1.2
    ),
    _least(
        "peers", "calls/s: moorage, functions with results, 8 slots / Ray, tasks with results, 8 slots", 1.5, 2.5
    ).lowered(0.85, PEER),
    _least("peers", "calls/s: moorage, functions with results, 64 slots / Ray, tasks with results, 64 slots", 2.5, 5),
    _most(
        "peers", "p50 ms: moorage, functions with results, 8 slots / Ray, tasks with results, 8 slots", 1.2, 0.9
    ).lowered(2.2, PEER),
    _least("peers", "jobs/s: moorage, a process a job, 8 slots / Slurm, a process a job, 8 slots", 10),
)


def bound_of(book: str, figure: str) -> Bound | None:
    """The bound of a figure; None where none was set."""
    return next((bound for bound in BOUNDS if (bound.book, bound.figure) == (book, figure)), None)
