"""A year of ledger time: whatever is put into a table is taken out again, and each table of the state is listed here.

Each week other pods come as workers, other tenants submit other jobs, and operators give orders and take them back. At
the end all of that is gone, and so must be what was remembered of it: in the state, and in the soft tables of the core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import ChangeOrder, QueueRead
from moorage.scheduler.core.ledger.ceilings import CEILINGS
from moorage.scheduler.core.ledger.state import (
    AVOID_MAX,
    POOLS_MAX,
    QUICK_MAX,
    State,
)
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames import Device, Goodbye, Unwell
from moorage.schemas.operate import ChangeAsked
from tests.release.workloads.tables import Tables, small_bounds
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.honest_worker import Worker, devices
from tests.unit.scheduler.scheduled import offer_ask, offer_run

DAY_MS = 86_400_000
WEEKS = 52
ENDED = 20
CAN = {"noop": Capabilities(freezes=True, resizes={"time-slice": "live"})}


class Table(NamedTuple):
    """A container of the state: what puts an entry in, what takes it out, and the most that it may ever have.

    `rest` is the most once all jobs have ended, all workers are gone and no order stands, for as long as is remembered.
    """

    puts: str
    takes: str
    most: int
    rest: int = 0


#: jobs, workers and tenants that may be known at a time in this world: those of a few weeks
KNOWN = 60
TABLES = {
    "State.jobs": Table("a submit", "Compact, once more than ended_max have ended", KNOWN + 2 * ENDED, ENDED),
    "State.ended": Table("the end of a job", "Compact, as above", KNOWN + 2 * ENDED, ENDED),
    "State.finished": Table("Compact", "Expire, after history_keep or beyond finished_rows", 3 * KNOWN, KNOWN),
    "State.tenants": Table("a submit, a cancel, an order", "ForgetTenants, once the row holds nothing", KNOWN, ENDED),
    "State.schedules": Table("schedule add", "schedule remove", 1),
    "State.workers": Table("a first join", "Forget, after history_keep and once no job names it", KNOWN, ENDED),
    "State.worker_by_num": Table("a first join", "Forget, as above", KNOWN, ENDED),
    "State.preempting": Table("Preempt", "Preempt without workers, PLACE, the end of the job", 4),
    "State.on_hold": Table("hold of a job", "release, the end of the job", 4),
    "State.shut": Table("starts that fail on a worker", "the end of its time, uncordon", 2),
    "State.windows": Table("a drain with a time", "its end, or uncordon", 4),
    "Job.numbers": Table("a submit", "Compact of the job", 4, 4),
    "Job.fresh": Table("a submit", "PLACE, MOVE_FRESH", 4),
    "Job.awaits": Table("a submit with `after` or a time to start at", "Met, that time, Compact of the job", 4, 1),
    "Job.rows": Table("PLACE", "the end of the replica", 4),
    "Job.bad": Table("the end of a replica that did not succeed, by state", "Compact of the job", 8, 8),
    "Job.history": Table(
        "a transition", "the fold, beyond Ceilings.history", CEILINGS.history + 4 * CEILINGS.history_each + 64, 200
    ),
    "Job.avoid": Table(
        "a refusal, a failed device", "a release, a new start of the worker; AVOID_MAX", AVOID_MAX, AVOID_MAX
    ),
    "Job.refused": Table("a refusal by a host", "a start; Compact of the job", AVOID_MAX, AVOID_MAX),
    "Job.ran": Table("an end of an attempt", "Compact of the job", CEILINGS.history, CEILINGS.history),
    "Replica.ended": Table("an end of an attempt", "the next start; Compact of the job", 16, 16),
    "Job.lacking": Table("a refusal for what the host lacks", "as Job.avoid", AVOID_MAX, 1),
    "Job.resizes": Table("a resize", "the oldest goes beyond RESIZES_MAX; Compact of the job", 64, 64),
    "Job.bounds": Table("a change", "the oldest goes beyond BOUNDS_MAX; Compact of the job", 16, 16),
    "Job.lingering": Table("EXIT without FREE", "FREE, LOSE", 4),
    "Tenant.jobs": Table("a submit", "Compact of the job", KNOWN + ENDED, ENDED),
    "Tenant.tombstones": Table("the cancel of an unknown job", "its submit, its age, a cursor past it", 8),
    "Worker.hello": Table("a join", "Forget of the worker", 40, 40),
    "Worker.unwell": Table("Health", "Health, Well, a join with another device; Forget of the worker", 4, 4),
    "Worker.attempts": Table("PLACE", "FREE, REFUSE, WITHDRAW, LOSE", 16),
    "Worker.quick": Table("a failure within seconds", "what does well there; QUICK_MAX", QUICK_MAX, QUICK_MAX),
    "Replica.failed_on": Table("a failure within seconds", "QUICK_OF_REPLICA_MAX; the end of the replica", 16, 16),
    "Worker.former": Table("a join with other devices", "POOLS_MAX; Forget of the worker", POOLS_MAX, POOLS_MAX),
}
#: tuples of a fixed length, and what the rows refer to
FIXED = {
    "Replica.stored",  # one for each stream of its checkpoint; no worker here stores one
    "Replica.sets",  # at most four, of a rank of a gang; no worker here stores one
    "Replica.saved",  # as many as SAVED_MAX, of its checkpoints
    "Replica.tries",  # one for each row of its request's `retry`; no request here has one
    "State.snapshot", "State.snapshot_before", "State.reserved", "State.settings", "Job.preempts", "Job.used",
    "Job.derived", "Job.lent",
    "Job.peaks", "Job.promised", "Job.reported", "Job.shape", "Job.relimit",
    "Attempt.name", "Attempt.begun",
    "Job.hold", "Tenant.hold", "Tenant.limit", "Tenant.limits", "Tenant.spent", "Tenant.held", "Tenant.devices",
    "Tenant.used",
    "Tenant.keys",  # at most `KEYS_MAX`; no job here names one
    "State.counters", "State.used",  # no operator here sets a counter, and no job uses one
    "Tenant.share", "Job.needs", "Worker.window", "Worker.pool", "Worker.pool_of",
    "Attempt.runs_as",
}  # fmt: skip


def rows_of(state: State) -> Iterator[object]:
    yield state
    yield from state.workers.values()
    yield from state.tenants.values()
    yield from state.attempts()
    for job in state.jobs.values():
        yield job
        yield from job.rows.values()


def sizes(state: State) -> dict[str, int]:
    """The size of each container of the state; of those that rows have, the largest."""
    found: dict[str, int] = {"State.finished": len(state.finished)}
    for row in rows_of(state):
        names = list(vars(row)) if hasattr(row, "__dict__") else list(type(row).__slots__)  # type: ignore[attr-defined]
        for name in names:
            value, key = getattr(row, name, None), f"{type(row).__name__}.{name}"
            if isinstance(value, dict | list | set | tuple | deque) and key not in FIXED:
                found[key] = max(found.get(key, 0), len(value))
    return found


class Year(Driving):
    """A year of a fleet; `largest` is the most that each table ever had."""

    def __init__(self) -> None:
        self.largest: dict[str, int] = {}
        super().__init__(
            Config(ended_max=ENDED, tombstones_max=8, preempt_priority=50, preempt_after=0, fair_share_half_life=3600)
        )
        self.checks = False
        self.week = 0

    def note(self) -> None:
        for name, size in sizes(self.state).items():
            self.largest[name] = max(self.largest.get(name, 0), size)

    def tick(self, ms: int = 1, *, obey: bool = True) -> Any:
        out = super().tick(ms, obey=obey)
        self.note()
        return out

    def passes(self, ms: int) -> None:
        """Much time goes by, in which nobody is silent."""
        self.now += ms
        self.engine.fleet.slept(self.now)
        self.renew()
        self.pass_time(4_000)

    def goes(self, worker: Worker) -> None:
        del self.workers[worker.id]
        self.send(worker.id, Goodbye(worker.session))
        self.tick()

    def comes_back(self, worker: Worker, pool: list[Device]) -> None:
        worker.boot += "+"
        worker.hello = msgspec.structs.replace(worker.hello, gpu_pool=pool)
        assert self.join(worker)["kind"] == "joined"
        self.renew(worker.id)


def a_week(drive: Year, number: int) -> None:
    tenant, zone = f"team-{number}", {"zone": f"z{number}"}
    one, two, odd = [
        drive.worker(f"pod-{number}-{at}", 2, f"GPU {number % 7}", labels=zone | {"pod": f"{number}-{at}"},
                     capabilities=CAN, auto=at < 2)
        for at in range(3)
    ]  # fmt: skip
    drive.cancel("never-came", tenant=tenant, before=True)
    drive.cancel("queued", tenant="queues", sequence=10 * number + 5)
    drive.engine.offer(QueueRead("queues", "cancel", 10 * number + 5))
    offer_ask(drive, "add", "nightly", tenant)
    drive.tick()
    offer_run(drive, number + 1, "nightly", tenant)
    drive.tick()
    drive.order("share", tenant=tenant, weight=3)
    drive.order("limit", tenant=tenant, gpus=6)
    # what runs, is frozen and resized, fails and is tried again, lingers, is preempted
    drive.submit("plain", tenant=tenant, gpu={}, requires={"pod": [f"{number}-0"]})
    drive.submit("part", tenant=tenant, gpu={"sharing": "time-slice"}, requires={"pod": [f"{number}-1"]})
    drive.submit("gang", tenant=tenant, gpu={"scheduling": "gang"}, replicas=2)
    drive.submit("behind", tenant=tenant, gpu={}, after=[{"job": "plain", "when": "any"}])
    drive.settle()
    drive.cancel("behind", tenant=tenant)
    drive.order("freeze", tenant=tenant, job="plain")
    drive.order("resize", tenant=tenant, job="part", compute_percent=20)
    drive.engine.offer(ChangeOrder(tenant, ChangeAsked(job="part", timeout_s=3600)))
    drive.settle()
    drive.order("resume", tenant=tenant, job="plain")
    drive.settle()
    # starts of two tenants that fail on one worker, for what that host lacks
    for at in range(3):
        whose = ("boss", tenant)[at % 2]
        drive.submit(f"lacking-{at}", tenant=whose, gpu={}, requires={"pod": [f"{number}-2"]})
        drive.settle()
        drive.report("refused", f"lacking-{at}", detail="not-here: no folder /data", code=126, tenant=whose)
    for at in range(3):
        drive.cancel(f"lacking-{at}", tenant=("boss", tenant)[at % 2])
    drive.operate("uncordon", odd.id)
    drive.settle()
    drive.submit("fails", tenant=tenant, gpu={}, retries=60, requires={"pod": [f"{number}-2"]})
    for _ in range(61 if number % 13 == 5 else 2):
        while drive.replica("fails", tenant=tenant).attempt is None:
            drive.now += 60_000
            drive.renew()
        drive.reports([(kind, "fails", 0, 1, "") for kind in ("claimed", "started", "exited")], tenant=tenant)
        drive.report("freed", "fails", tenant=tenant)
    drive.submit("refused", tenant=tenant, gpu={"count": 2}, requires={"pod": [f"{number}-2"]})
    drive.cancel("fails", tenant=tenant)
    drive.pass_time(2_000)
    if drive.replica("refused", tenant=tenant).attempt is not None:
        drive.report("refused", "refused", detail="not-permitted: tenant may not", tenant=tenant)
    drive.submit("urgent", tenant="boss", gpu={"count": 2}, priority=90, requires={"pod": [f"{number}-0"]})
    drive.pass_time(2_000)
    drive.settle()
    drive.order("hold", tenant=tenant, job="refused")
    drive.order("priority", tenant=tenant, job="refused", priority=3)
    # the fleet: other devices, an unhealthy one, a window, a cordon
    drive.operate("drain", odd.id, from_s=30 * 86_400)
    odd.unwell = [Unwell(0, "xid", "79")]
    drive.renew()
    for name in list(drive.workers):
        drive.run_out(name)
    drive.operate("cordon", one.id)
    for job in ("plain", "part", "gang", "refused"):
        drive.cancel(job, tenant=tenant)
    drive.cancel("urgent", tenant="boss")
    drive.cancel(f"nightly-{number + 1}", tenant=tenant)
    offer_ask(drive, "remove", "nightly", tenant)
    drive.settle()
    for at in range(2):
        drive.comes_back(two, devices(f"n{number}-{at}", ["NVIDIA L4"] * 2))
    drive.passes(DAY_MS)
    # and all is taken back
    drive.operate("uncordon", one.id)
    drive.operate("uncordon", odd.id)
    drive.operate("release", odd.id)
    drive.order("limit", tenant=tenant, gpus=None)
    drive.order("share", tenant=tenant, weight=None)
    drive.engine.offer(QueueRead("queues", "submit", 10 * number + 6))
    for worker in (one, two, odd):
        drive.goes(worker)
    drive.passes(6 * DAY_MS)


@pytest.mark.slow
def test_a_year_leaves_nothing_behind_in_any_table() -> None:
    with small_bounds():
        drive = Year()
        steady = drive.worker("steady", 1)
        tables = Tables(drive.engine)
        for drive.week in range(WEEKS):
            a_week(drive, drive.week)
            tables.look()
            tables.confirm(drive.state)
            if drive.week % 13 == 12:
                drive.check()
                drive.take_snapshot()
        assert drive.state.time_ms > 360 * DAY_MS
        drive.goes(steady)
        for _ in range(4):
            drive.passes(8 * DAY_MS)
        drive.check()
        tables.look()
        tables.confirm(drive.state)
    assert set(drive.largest) == set(TABLES), "each table of the state says what puts in and what takes out"
    last = sizes(drive.state)
    for name, table in TABLES.items():
        assert drive.largest[name], f"{name} never had an entry: nothing here is {table.puts}"
        assert drive.largest[name] <= table.most, f"{name} had {drive.largest[name]}; nothing was {table.takes}"
        assert last.get(name, 0) <= table.rest, f"{name} still has {last[name]}; nothing was {table.takes}"
    assert len(drive.state.workers) + len(drive.state.tenants) <= ENDED
