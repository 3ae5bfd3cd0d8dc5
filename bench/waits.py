"""`python -m bench.waits`: whether each wait of 10,000 jobs is explained to the ms, by what, and what that costs.

Six virtual clusters of the Philly trace are six tenants of one fleet of 96 hosts. Limits, a guarantee, holds, cordons,
drains, lost hosts, requeues, preemptions, cancels, sweeps and gangs are drawn beside them; a new leader takes over now
and then, and the follower is killed and goes on from its save. The ledger's own bytes are folded, as a follower does.

Printed are: the jobs whose parts differ from a stopwatch beside the ledger; the share of each cause; how often
`explain` gives the same reason at the same moment; and the time that a record takes to fold, of which `--groups` has
64 groups that wait on 1,000 full hosts. Takes some ten minutes. Exit code 1 if a part differs or a bound is broken.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from typing import Any, Final

import msgspec

from bench.queueing import TRACE
from moorage.scheduler.answers.waiting import explain_job
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import FromWorker
from moorage.scheduler.core.ledger import records
from moorage.scheduler.core.ledger.acts import Epoch
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import Record, decode_record, encode_record
from moorage.scheduler.core.ledger.state import Job, State
from moorage.scheduler.follower.waits import Waits
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Renew
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import STATES, Request, Run
from moorage.schemas.reasons import REASONS
from moorage.schemas.subjects import Subjects
from moorage.schemas.waited import Cause
from moorage.testing.simulate.philly import read_philly
from moorage.testing.simulate.trace import SimHost, TraceEvent, TraceJob, uniform_host
from moorage.testing.simulate.world import BEGIN_MS, World

TENANTS: Final = ("6c71a0", "b436b2", "6214e9", "11cb48", "0e4a51", "103959")
HOSTS: Final = 96
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
#: bounds: of all that waited, the share that nobody explained; the moments at which both say the same; a record
UNTOLD_MAX: Final = 0.005
#: moments at which `explain` is asked
MOMENTS: Final = 1_000
#: steps between two leaders, and records between two followers
LEADER_STEPS: Final = 9_001
FOLLOWER_RECORDS: Final = 7_001
_WAITING: Final = frozenset(("QUEUED", "PLACED", "CLAIMED"))
_OF_THE_FLEET: Final = frozenset(
    {Cause.FULL, Cause.PRIORITY, Cause.GUARANTEE, Cause.SHARE, Cause.OWN, Cause.FRAGMENTED, Cause.CLOSED}
)
#: what `explain` may say of a cause, where the names differ
_SAME: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys(("busy", "overtaken", "fragmented", "host-busy", "gang"), _OF_THE_FLEET),
    "budget": frozenset({Cause.LIMIT}),
    "counter": frozenset({Cause.LIMIT}),
    "preempting": frozenset({Cause.RESERVED}),
    "leaving": frozenset({Cause.CLOSED}),
    "contended": frozenset({Cause.BACKOFF}),
    **{name: frozenset({Cause.NO_HOST}) for name, reason in REASONS.items() if reason.is_never},
}


class Stopwatch:
    """Reads beside the ledger what of each job waits, a gang as one."""

    def __init__(self) -> None:
        self.waited_ms = Counter[int]()
        self._units: dict[int, tuple[int, int]] = {}  # by job: what waits, and since when

    def fold(self, folded: Folded, now_ms: int) -> None:
        for job in {*folded.jobs.values(), *folded.accepted, *folded.ended}:
            units, since_ms = self._units.pop(job.num, (0, 0))
            self.waited_ms[job.num] += units * (now_ms - since_ms)
            waiting = 0 if job.over else sum(STATES[replica.state] in _WAITING for replica in job.replicas)
            if waiting:
                self._units[job.num] = (1 if b'"gang"' in job.body else waiting), now_ms

    def shows(self, num: int, now_ms: int) -> int:
        units, since_ms = self._units.get(num, (0, now_ms))
        return self.waited_ms[num] + units * (now_ms - since_ms)


class Followed(World):
    """A world whose ledger is followed, record by record, from its bytes."""

    def __init__(self, hosts: list[SimHost], jobs: list[TraceJob], config: Config, events: list[TraceEvent]) -> None:
        self.shadow, self.clock = State(), Stopwatch()
        first = Record(records.FORMAT, 1, 1, 0, BEGIN_MS, 0, acts=[Epoch("simulated", "simulate", 0.0)])
        fold(self.shadow, first, 1)
        self.waits = Waits(self.shadow)
        self.waits.from_ms = 0
        self.wrong: list[str] = []
        self.checked = self.steps = self.follower = self.fold_ns = 0
        self.moments, self.unlike = 0, Counter[tuple[str, str]]()
        self.rng = random.Random(1)
        super().__init__(hosts, jobs, config, events=events)

    def record(self) -> bool:
        self._read(self.engine.build(self.time_ms, self._mono_ms))
        return self.commit()

    def _read(self, payload: bytes) -> None:
        record = decode_record(payload)
        folded = fold(self.shadow, record, self.shadow.seq + 1)
        began = time.thread_time_ns()
        self.waits.fold(folded, decides=bool(record.steps or record.acts or record.accepts))
        self.fold_ns += time.thread_time_ns() - began
        self.clock.fold(folded, self.shadow.time_ms)
        for job in folded.ended:
            self.check(job)
        if self.shadow.seq % FOLLOWER_RECORDS == 0:
            state = snapshots.load(snapshots.dump(self.shadow))
            self.waits, self.shadow = Waits.load(self.waits.dump(), state), state
            self.follower += 1

    def check(self, job: Job) -> None:
        self.checked += 1
        counted, shown = (
            sum(part.ms for part in self.waits.parts_of(job)),
            self.clock.shows(job.num, self.shadow.time_ms),
        )
        if counted != shown:
            self.wrong.append(f"{job.tenant}/{job.name}: {counted} ms counted, {shown} ms waited")

    def step(self) -> bool:
        self.steps += 1
        if self.steps % LEADER_STEPS == 0:
            self.take_over_by_another()
        return super().step()

    def take_over_by_another(self) -> None:
        """A minute later another leader takes over, and hears all hosts."""
        self.time_ms += 60_000
        old = self.engine
        state = snapshots.load(snapshots.dump(old.state))
        leader = state.epoch + 1
        epoch = Record(
            state.level, leader, leader, 0, self.time_ms, state.digest, acts=[Epoch(state.ledger_id, "x", 0.0)]
        )
        fold(state, epoch, state.seq + 1)
        self._read(encode_record(epoch))
        self.engine = Engine(state, old.config, Subjects(), leader, int(self._mono_ms))
        for worker in state.workers.values():
            if worker.session:
                self.engine.offer(FromWorker(worker.id, Renew(worker.session, leader, worker.no), "", False))
        self.settle()

    def ask(self, among: int) -> None:
        """Compare what `explain` and the fold say of some job that waits now."""
        waiting = [num for num, row in self.waits._rows.items() if row.job.waits and not row.job.attempts]
        if not waiting or self.rng.randrange(among):
            return
        self.waits._look()
        job = self.engine.state.jobs[self.rng.choice(waiting)]
        told = explain_job(self.engine, job.tenant, job.name)
        causes = {clock.why[0] for clock, (units, _) in self.waits._rows[job.num].places.items() if units}
        if isinstance(told, Problem) or not told.reason:
            return
        self.moments += 1
        if not causes & _SAME.get(told.reason, frozenset({told.reason})):
            self.unlike[told.reason, ", ".join(sorted(causes))] += 1


def scenario(jobs_max: int, seed: int) -> tuple[list[SimHost], list[TraceJob], list[TraceEvent]]:
    """Return the fleet, the jobs, and what operators, users and hosts do beside them."""
    rng, jobs = random.Random(seed), list[TraceJob]()
    for cluster in TENANTS:
        jobs += [changed(job, rng) for job in read_philly(TRACE, cluster)]
    jobs = sorted(jobs, key=lambda job: job.at_ms)[:jobs_max]
    last_ms = jobs[-1].at_ms
    hosts = [uniform_host(f"n{number:03}", 8, "V100") for number in range(HOSTS)]
    events: list[tuple[int, str, dict[str, Any]]] = []

    def order(at_ms: int, verb: str, **fields: Any) -> None:
        events.append((at_ms, "order", {"verb": verb, **fields}))

    order(0, "limit", tenant="6214e9", gpus=160)
    order(0, "share", tenant="b436b2", weight=1, gpus=128)
    order(6 * DAY_MS, "limit", tenant="6214e9", gpus=224)
    order(last_ms // 2, "limit", tenant="6214e9", gpus=320)
    for number in range(1, 40):
        at_ms, host = last_ms * number // 40, f"n{rng.randrange(HOSTS):03}"
        what = number % 5
        if what == 0:
            events.append((at_ms, "leave", {"host": host}))
            joins: dict[str, Any] = msgspec.to_builtins(uniform_host(f"late{number}", 8, "V100"))
            events.append((at_ms + 6 * HOUR_MS, "join", joins))
        elif what in (1, 2):
            order(at_ms, "cordon" if what == 1 else "drain", worker=host, why="memory")
            order(at_ms + DAY_MS, "uncordon", worker=host)
        else:
            tenant = rng.choice(TENANTS)
            order(at_ms, "hold", tenant=tenant)
            order(at_ms + HOUR_MS, "release", tenant=tenant)
    for job in jobs:
        roll, name, later = rng.random(), job.request.job, job.at_ms + rng.randrange(1, 6 * HOUR_MS)
        if roll < 0.02:
            events.append((later, "cancel", {"tenant": job.tenant, "job": name}))
        elif roll < 0.04:
            order(later, "requeue", tenant=job.tenant, job=name, why="again")
        elif roll < 0.05:
            order(job.at_ms + 1000, "hold", tenant=job.tenant, job=name)
            order(job.at_ms + 1000 + HOUR_MS, "release", tenant=job.tenant, job=name)
    events.sort(key=lambda event: event[0])
    return hosts, jobs, [TraceEvent(*event) for event in events]


def changed(job: TraceJob, rng: random.Random) -> TraceJob:
    """Return a job with a priority, perhaps a time limit, retries, more replicas that follow each other."""
    request, count = job.request, job.request.effective_gpu.count if job.request.effective_gpu else 0
    priority = rng.choices((50, 70, 30, 90), (16, 2, 2, 1))[0]
    timeout = float(round(job.runs_ms / 1000 * rng.uniform(1.2, 4)) + 60) if rng.random() < 0.33 else None
    request = msgspec.structs.replace(
        request,
        priority=priority,
        labels={"workload": f"w{rng.randrange(12)}"},
        run=Run(driver="noop", timeout_s=timeout),
        retries=rng.choice((0, 2)),
        retries_on_lost=3,
    )
    attempts = {"0/1": (max(1, job.runs_ms // 3), 1)} if request.retries and rng.random() < 0.1 else {}
    if request.copies == 1 and count <= 2 and rng.random() < 0.08:
        most = rng.choice((None, 2))
        request = msgspec.structs.replace(request, replicas=rng.randrange(2, 9), max_running=most)
    return msgspec.structs.replace(job, request=request, attempts=attempts)


def history(jobs_max: int, seed: int) -> bool:
    """Play the whole history, print what came, and return whether the bounds hold."""
    hosts, jobs, events = scenario(jobs_max, seed)
    world = Followed(hosts, jobs, Config(preempt_priority=90, preempt_after=600, reserve_after=30), events)
    began, among = time.perf_counter(), max(1, len(jobs) * 3 // MOMENTS)
    while world.step():
        world.ask(among)
    for job in world.shadow.jobs.values():
        if not job.over:
            world.check(job)
    sums = Counter[str]()
    for row in world.waits.totals():
        sums[row.cause or ""] += round(row.wait_s * 1000)
    every = sum(sums.values())
    untold = (sums[Cause.PLACING] + sums[Cause.UNEXPLAINED]) / every
    acts = Counter(event.data.get("verb", event.kind) for event in events)
    print(f"{len(jobs)} jobs, {world.shadow.seq} records, {time.perf_counter() - began:.0f} s; {dict(acts)}")
    print(f"leaders: {world.shadow.epoch}; follower went on from its save {world.follower} times")
    print(
        f"jobs whose parts are their wait: {world.checked - len(world.wrong)} of {world.checked}",
        *world.wrong[:5],
        sep="\n  ",
    )
    for cause, ms in sums.most_common():
        print(f"  {cause:22} {ms / HOUR_MS:12.1f} h {ms / every:8.2%}")
    print(f"placing and unexplained: {untold:.2%} (at most {UNTOLD_MAX:.1%} at level 2)")
    unlike = sum(world.unlike.values())
    print(f"explain says the same: {world.moments - unlike} of {world.moments} moments; {dict(world.unlike)}")
    print(f"fold: {world.fold_ns / 1000 / world.shadow.seq:.0f} us a record")
    return not world.wrong and (untold <= UNTOLD_MAX or records.FORMAT < 2)


def groups(records_max: int = 3_000, hosts: int = 1_000, tenants: int = 8, counts: int = 8) -> None:
    """Print what a record costs while 64 groups wait on a full fleet, at three paces of records."""
    for each_ms in (1000, 100, 10):
        rng, jobs = random.Random(3), list[TraceJob]()
        for number in range(hosts * 6):  # for each one that ends, about each `each_ms`, another one comes
            request = Request(job=f"j{number}", gpu=GpuSpec(count=1 + number % counts), run=Run(driver="noop"))
            at_ms, tenant = max(0, number - 4 * hosts) * each_ms, f"t{rng.randrange(tenants)}"
            jobs.append(TraceJob(at_ms, rng.randrange(each_ms, 4 * hosts * each_ms), tenant, request))
        world = Followed([uniform_host(f"n{n}", 8, "V100") for n in range(hosts)], jobs, Config(), [])
        while world.step() and world.now_ms < each_ms:
            pass
        began_ns, before = world.fold_ns, world.shadow.seq
        while world.shadow.seq - before < records_max and world.step():
            pass
        count = world.shadow.seq - before
        waiting = len([group for group in world.waits._groups.values() if group.nums])
        print(
            f"{hosts} hosts, {waiting} groups, a job each {each_ms} ms:"
            f" {(world.fold_ns - began_ns) / 1000 / count:.0f} us a record ({count} records)",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--level", type=int, choices=(1, 2), default=2, help="feature level of the ledger")
    parser.add_argument("--groups", action="store_true", help="only what a record costs")
    options = parser.parse_args()
    records.FORMAT = options.level  # type: ignore[misc]  # the level of a ledger that begins here
    if options.groups:
        groups()
        return 0
    return 0 if history(options.jobs, options.seed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
