"""What a record has changed, as it was before: so that a leader can take back all of it if it fails to build the rest.

Rows are copied whole before their first change, and so are tables, for their order is part of the state; rows that the
record makes need no copy. Of the tables that may be large only the keys that change are copied. Their order can be made
anew: that of all jobs by the jobs' numbers, that of a job's replicas by `Replica.nth`. It covers what the record's
acts, new jobs and steps change. What `Folding.end` changes behind that is not taken back.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from itertools import islice
from typing import Any, Final

from moorage.scheduler.core.ledger.acts.job import Compact, Freeze, Met, Relocate, Resize, Stored
from moorage.scheduler.core.ledger.acts.ledger import Level
from moorage.scheduler.core.ledger.acts.schedule import AddSchedule, RemoveSchedule
from moorage.scheduler.core.ledger.acts.tenant import ForgetTenants, HalfLife, Hold, Unhold
from moorage.scheduler.core.ledger.acts.worker import Flag, Forget, Known, Shut, Window
from moorage.scheduler.core.ledger.fairshare import rescales
from moorage.scheduler.core.ledger.records import Op, unpacked
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.core.ledger.state import Attempt, Job, Replica, State, Tenant, Worker

_PLACE: Final = int(Op.PLACE)
_LINGERS: Final = frozenset(map(int, (Op.FREE, Op.QUARANTINE)))
_GONE: Final = object()  # stands for a value where a table has no such key
_WHOLE: Final = object()  # stands for a key: the value is a copy of the table
#: fields that no fold changes before `Folding.end`, or that are soft
_STAY: Final = frozenset({
    "num", "tenant", "name", "body", "traceparent", "accepted_ms", "ledger", "key", "told", "folded", "shape", "always",
    "own_subject", "deadline_ms", "over", "index", "nth", "worker", "replica", "home", "mode", "missed",
    "runs_as", "id",
})  # fmt: skip
_Row = Job | Replica | Attempt | Worker | Tenant | Schedule
_FIELDS: Final[dict[type, list[str]]] = {
    each: [name for name in each.__slots__ if name not in _STAY]
    for each in (Job, Replica, Attempt, Worker, Tenant, Schedule)
}


def _reading(fields: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads these fields of a row.

    It is written out: Python then reads slots in a sixth of `attrgetter`'s time. Tuples of more than 30 go by a list.
    """
    parts = [", ".join(f"row.{name}" for name in fields[at : at + 30]) for at in range(0, len(fields), 30)]
    read: Callable[[Any], tuple[Any, ...]] = eval(f"lambda row: {' + '.join(f'({part},)' for part in parts)}")
    return read


_VALUES: Final = {each: _reading(fields) for each, fields in _FIELDS.items()}
#: the tables of the state of which an act may take rows away, or to which it may add some
_TABLES: Final[dict[type, tuple[str, ...]]] = {
    Forget: ("workers", "worker_by_num"),
    Flag: ("shut",),
    Shut: ("shut",),
    Window: ("windows",),
    Hold: ("on_hold",),
    Unhold: ("on_hold",),
    ForgetTenants: ("tenants",),
    AddSchedule: ("schedules",),
    RemoveSchedule: ("schedules",),
}


class Undo:
    """A copy of what a record at ledger time `time_ms` changes; to be told of each change before it is made."""

    __slots__ = ("_bad", "_copied", "_ended", "_fields", "_histories", "_new", "_oldest", "_rows", "_state", "_tables")

    def __init__(self, state: State, time_ms: int) -> None:
        self._state = state
        self._fields = dict(vars(state))
        self._new = state.next_num  # the first number of a job that the record makes
        self._rows: dict[_Row, tuple[Any, ...]] = {}
        #: what tables had, oldest first: a table, a key and its value
        self._tables: list[tuple[MutableMapping[Any, Any], Any, Any]] = []
        self._copied: set[int] = set()  # by `id`, the tables that are copied whole, as the order is part of the state
        self._histories: list[tuple[Job, int]] = []
        self._bad: list[tuple[Job, dict[int, bytearray]]] = []
        self._ended, self._oldest = len(state.ended), list[int]()
        self._table(state.preempting)
        if state.half_life_ms and rescales(state, time_ms):
            self._all_tenants()

    def back(self) -> None:
        """Set the state back. Nothing else may have changed it since."""
        state, before = self._state, self._fields
        for num in range(self._new, state.next_num + 1):
            if (job := state.jobs.pop(num, None)) is not None:
                state.tenants[job.tenant].jobs.pop(job.name, None)
        state.ended.extendleft(reversed(self._oldest[: self._ended - len(state.ended)]))
        for table, key, value in reversed(self._tables):
            if key is _WHOLE:
                table.clear()
                table.update(value)
            elif value is _GONE:
                table.pop(key, None)
            else:
                table[key] = value
        if self._oldest:
            _sort(state.jobs)
            for name in {state.jobs[num].tenant for num in self._oldest}:
                _sort(state.tenants[name].jobs)
        for job, length in self._histories:
            del job.history[length:]
            if len(job.rows) > 1:
                rows = sorted(job.rows.items(), key=_by_nth)
                job.rows.clear()
                job.rows.update(rows)
        for row, values in self._rows.items():
            for name, value in zip(_FIELDS[type(row)], values, strict=True):
                setattr(row, name, value)
        for job, bad in self._bad:
            job.bad = bad
        vars(state).update(before)

    def step(self, op: int, num: int, index: int, a: int) -> None:
        """Copy what a step is about to change."""
        if op == _PLACE:
            self.place(num, index, a)
            return
        if num >= self._new or (job := self._state.jobs.get(num)) is None:
            return
        self._job(job)
        if (replica := job.rows.get(index)) is not None:
            self.replica(job, replica)
        if op in _LINGERS and job.lingering and (attempt := job.lingering.get((index, unpacked(a)))) is not None:
            self._attempt(attempt)

    def place(self, num: int, index: int, worker: int) -> None:
        """Copy what a PLACE of a replica on a worker is about to change."""
        self.worker(worker)
        if num >= self._new or (job := self._state.jobs.get(num)) is None:
            return
        self._job(job)
        if (replica := job.rows.get(index)) is not None:
            self.replica(job, replica)
        else:
            self._tables.append((job.rows, index, _GONE))

    def replica(self, job: Job, replica: Replica) -> None:
        """Copy the row of a replica of a job, of which a step is about to change it."""
        rows = self._rows
        if replica in rows or job.num >= self._new:
            return
        if job not in rows:
            self._job(job)
        rows[replica] = _VALUES[Replica](replica)
        self._tables.append((job.rows, replica.index, replica))
        if (attempt := replica.attempt) is not None:
            self._attempt(attempt)

    def attempt(self, job: Job, attempt: Attempt) -> None:
        """Copy the row of an attempt that is about to leave its worker."""
        if job.num < self._new:
            if job not in self._rows:
                self._job(job)
            self._attempt(attempt)

    def act(self, act: Any) -> None:
        """Copy what an act is about to change."""
        state = self._state
        for table in _TABLES.get(type(act), ()):
            self._table(getattr(state, table))
        if isinstance(act, Compact):
            nums = act.flat[::2]
            copied = len(self._oldest) + len(state.ended) - self._ended  # of those that are still there
            self._oldest += islice(state.ended, copied, copied + len(nums))
            for job in [state.jobs[num] for num in nums if num in state.jobs]:
                self._key(state.jobs, job.num)
                self._key(state.tenants[job.tenant].jobs, job.name)
        elif isinstance(act, Met):
            for job in [state.jobs[num] for num in act.waiting if num in state.jobs]:
                self._job(job)
        elif isinstance(act, HalfLife):
            self._all_tenants()
        elif isinstance(act, Level):
            for worker in state.workers.values():
                self.worker(worker.num)
            for job in state.jobs.values():
                self._job(job)
                for replica in job.rows.values():
                    self.replica(job, replica)
                for attempt in job.attempts:
                    self._attempt(attempt)
        if isinstance(act, Known):
            self._key(state.workers, act.id)
            self._key(state.worker_by_num, act.worker)
            if (known := state.workers.get(act.id)) is not None:
                self.worker(known.num)
        else:
            self.worker(getattr(act, "worker", -1))
        if (of := state.jobs.get(getattr(act, "job", 0))) is not None:
            self._job(of)
            if isinstance(act, Relocate):
                self._key(of.rows, act.new)
            if isinstance(act, Stored) and act.replica in of.rows:
                for row in of.rows.values() if of.gang else (of.rows[act.replica],):
                    self.replica(of, row)
            attempts = act.attempts(of) if isinstance(act, Freeze) else of.attempts if isinstance(act, Resize) else ()
            for attempt in attempts:
                self._attempt(attempt)
        if whose := getattr(act, "tenant", ""):
            self.tenant(whose)
            if (tenant := state.tenants.get(whose)) is not None:
                self._table(tenant.tombstones)
            if (rows := state.schedules.get(whose)) is not None:
                self._table(rows)
                if (schedule := rows.get(getattr(act, "name", ""))) is not None:
                    self._row(schedule)

    def _all_tenants(self) -> None:
        for tenant in self._state.tenants.values():
            self._row(tenant)

    def tenant(self, name: str) -> None:
        """Copy the row of a tenant that gets new jobs."""
        tenant = self._state.tenants.get(name)
        if tenant is None:
            self._key(self._state.tenants, name)
        else:
            self._row(tenant)
            if tenant.keys is not None:
                self._table(tenant.keys)

    def worker(self, num: int) -> None:
        """Copy the row of a worker, of which a report is counted."""
        worker = self._state.worker_by_num.get(num)
        if worker is None or worker in self._rows:
            return
        self._row(worker)
        self._table(worker.attempts)
        self._table(worker.unwell)

    def _attempt(self, attempt: Attempt) -> None:
        if attempt in self._rows:
            return
        self._rows[attempt] = _VALUES[Attempt](attempt)
        if attempt.worker not in self._rows:
            self.worker(attempt.worker.num)

    def _job(self, job: Job) -> None:
        if job in self._rows:
            return
        self._rows[job] = _VALUES[Job](job)
        if (tenant := self._state.tenants[job.tenant]) not in self._rows:
            self._row(tenant)
        if tenant.keys is not None:
            self._table(tenant.keys)
        self._histories.append((job, len(job.history)))
        if job.lingering is not None:
            self._table(job.lingering)
        if job.bad is not None:
            self._bad.append((job, {state: bytearray(each) for state, each in job.bad.items()}))

    def _row(self, row: _Row) -> None:
        if row not in self._rows:
            self._rows[row] = _VALUES[type(row)](row)

    def _key(self, table: MutableMapping[Any, Any], key: Any) -> None:
        self._tables.append((table, key, table.get(key, _GONE)))

    def _table(self, table: MutableMapping[Any, Any]) -> None:
        if id(table) not in self._copied:
            self._copied.add(id(table))
            self._tables.append((table, _WHOLE, dict(table)))


def _by_nth(row: tuple[int, Replica]) -> int:
    return row[1].nth


def _sort(jobs: dict[Any, Job]) -> None:
    """Put jobs into the order of their numbers, in which they came."""
    rows = sorted(jobs.items(), key=lambda row: row[1].num)
    jobs.clear()
    jobs.update(rows)
