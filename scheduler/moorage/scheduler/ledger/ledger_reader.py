"""Reads past decisions from a ledger: folds its records one by one, and shows what each changed and on what evidence.

This only reads, and may run beside a leader. However long the ledger is, memory holds one folded state and one record.
Records before the last snapshots are deleted; of those only the outcome is known, and the reader says so. Records also
contain lease sessions and inventories, which are not shown.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger.acts import AnyAct
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.state import PLACED, Job, State
from moorage.scheduler.core.ledger.ways import ACCEPTS, ACTS, way_of
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.scheduler.ledger.evidence import Evidence, evidence_of
from moorage.scheduler.ledger.ledger import Ledger, LedgerGap
from moorage.scheduler.ledger.snapshots import Snapshots
from moorage.scheduler.ledger.state_bytes import BadSnapshot
from moorage.schemas.errors import MoorageError, problem
from moorage.schemas.job import STATES
from moorage.schemas.subjects import Subjects

#: fields of acts that are not shown
_HIDDEN: Final = ("wall_s", "body")


class CannotShow(MoorageError):
    """What was asked for is not in this ledger, or no longer; the problem says what is."""


class FoldedRecord(NamedTuple):
    """A record and what folding it changed. `state` is the state after this record; folding the next one changes it."""

    seq: int
    record: Record
    folded: Folded
    state: State


class LedgerReader:
    """Reads one ledger as a process that does not lead it."""

    def __init__(self, jetstream: JetStream, subjects: Subjects) -> None:
        self._js = jetstream
        self._subjects = subjects
        self._ledger = Ledger(jetstream, subjects, 0)
        self._snapshots = Snapshots(jetstream, subjects)
        self.base_seq = 0  # sequence of the snapshot that reading began with; 0 without one
        self.before: list[dict[str, Any]] = []  # the transitions of the job in question in that snapshot

    async def records(self, at: int | None = None, job: str | None = None) -> AsyncIterator[FoldedRecord]:
        """Yield every record that can still be read, or only record `at`; invalid records are left out.

        Once the first record is yielded, `before` has the transitions of `job` in the snapshot that reading began with.
        Raises CannotShow if `at` is not in the ledger or nothing can be read; LedgerBroken, BusError.
        """
        last = (await self._js.stream_info(self._subjects.ledger_stream)).last_seq
        if at is not None and not 1 <= at <= last:
            raise _cannot(f"there is no record {at}", at, f"1..{last}", "leave out --at to see every record")
        found, cut = False, ""
        async for base in self._bases(at):
            self.base_seq = base.seq
            self.before = [row for row in transitions_in(base) if concerns(row, job)] if job is not None else []
            try:
                async for record in self._from(base, at or last):
                    found = True
                    if at in (None, record.seq):
                        yield record
            except LedgerGap as gap:
                if found and at is None:
                    raise
                cut = str(gap)
                continue
            return
        first = await self.first()
        why = f"record {at} can no longer be shown: older records were purged after a snapshot" if at else cut
        raise _cannot(
            why or "the ledger holds no record",
            at,
            f"records {first} to {last}",
            "moorage events JOB has what happened to a job, while it is kept; a backup from that time has the state",
        )

    async def first(self) -> int:
        """Return the sequence of the first record that can be shown."""
        if await self._is_whole():
            return 1
        return 1 + min((seq for _, seq, _ in await self._ledger.named_snapshots()), default=0)

    async def _is_whole(self) -> bool:
        stream = self._subjects.ledger_stream
        last = (await self._js.stream_info(stream)).last_seq
        return all([await self._js.get_message(stream, seq) is not None for seq in range(1, min(last, 2) + 1)])

    async def _bases(self, at: int | None) -> AsyncIterator[State]:
        """Yield the states to begin with: for one record the nearest before it first, else the oldest first."""
        named = [row for row in await self._ledger.named_snapshots() if at is None or row[1] < at]
        whole = await self._is_whole()
        if whole and at is None:
            yield State()
        for name, _, digest in named if at is not None else reversed(named):
            try:
                yield await self._snapshots.read(name, digest)
            except BadSnapshot:
                continue
        if whole and at is not None:
            yield State()

    async def _from(self, state: State, through: int) -> AsyncIterator[FoldedRecord]:
        for job in state.jobs.values():
            job.told = job.rev
        async for seq, record, folded in self._ledger.fold_range(state, through):
            yield FoldedRecord(seq, record, folded, state)
            for job in folded.jobs.values():
                job.told = job.rev


def _cannot(message: str, found: object, allowed: str, next_step: str) -> CannotShow:
    return CannotShow(problem("failed-precondition", message, found=found, allowed=allowed, next=next_step))


# ------------------------------------------------------------------------------------------------------ rows to show


def rows(of: FoldedRecord) -> Iterator[dict[str, Any]]:
    """Yield a record's decisions as plain rows: first the transitions with their evidence, then the acts."""
    seq, record, folded, state = of
    evidence = evidence_of(record)
    came = {job.num: way_of(record.ways, record.notes, ACCEPTS, at) for at, job in enumerate(folded.accepted)}
    for job in {**folded.jobs, **{job.num: job for job in folded.accepted}}.values():
        for at, row in enumerate(_transitions(state, job, job.told)):
            placed = row["state"] == "PLACED"
            why = evidence.get((job.num, row["replica"])) if placed else None
            known = {} if why is None else _evidence_row(why)
            waited = {"waited_ms": record.time - job.accepted_ms} if placed else {}
            way = {"came": came[job.num]} if not at and came.get(job.num) else {}
            yield {"kind": "decision", "ledger": seq, "epoch": record.epoch, **row, **waited, **known, **way}
    for number, act in enumerate(record.acts):
        if act.IS_DECISION:
            way = {"came": found} if (found := way_of(record.ways, record.notes, ACTS, number)) else {}
            yield {"kind": "act", "ledger": seq, "epoch": record.epoch, "time_ms": record.time, **_act(of, act), **way}


def transitions_in(state: State) -> Iterator[dict[str, Any]]:
    """Yield the transitions in a state whose records can no longer be read, so without evidence."""
    for job in state.jobs.values():
        for row in _transitions(state, job, 0):
            yield {"kind": "decision", "recorded": False, "ledger": row["fence"] or None, **row}


def placements_in(state: State, at: int | None) -> Iterator[dict[str, Any]]:
    """Return the placements that record `at` made, or, for None, those that hold GPUs in this state.

    They are from a state, so without evidence.
    """
    jobs = state.jobs.values() if at is not None else {attempt.replica.job for attempt in state.attempts()}
    found = []
    for job in jobs:
        held = {(index, row.attempt.fence) for index, row in job.rows.items() if row.attempt is not None}
        for row in _transitions(state, job, 0):
            is_asked = row["fence"] == at if at is not None else (row["replica"], row["fence"]) in held
            if row["state"] == STATES[PLACED] and is_asked:
                found.append({"kind": "decision", "recorded": False, "ledger": row["fence"], **row})
    return iter(sorted(found, key=lambda row: (row["ledger"], row["job"], row["replica"])))


def _transitions(state: State, job: Job, rev: int) -> Iterator[dict[str, Any]]:
    for change in changes_since(state, job, rev):
        row = msgspec.to_builtins(change)
        yield {
            "tenant": job.tenant,
            "job": job.name,
            "time_ms": change.time_ms,
            **_named(row, change.replica, change.fence),
        }


def _named(row: dict[str, Any], replica: int, fence: int) -> dict[str, Any]:
    kept = {
        name: row.get(name)
        for name in ("state", "attempt", "worker", "gpus", "code", "why", "by", "said")
        if row.get(name)
    }
    return {"replica": replica, "fence": fence, **kept}


def _evidence_row(of: Evidence) -> dict[str, int]:
    return {"workers_known": of.known, "free_left": of.left, "placed_together": of.together}


def _act(of: FoldedRecord, act: AnyAct) -> dict[str, Any]:
    """Return an act with names in place of the numbers of jobs and workers."""
    state = of.state
    known = ChainMap({worker.num: worker for worker in of.folded.forgotten}, state.worker_by_num)
    said = {name: getattr(act, name) for name in act.__struct_fields__ if name not in _HIDDEN}
    for name, value in said.items():
        if name == "worker":
            said[name] = known[value].id
        elif name == "workers":
            said[name] = [known[num].id for num in value]
        elif name in ("victims", "waiting"):
            said[name] = [_job_name(state, num) for num in value]
        elif name in ("job", "ended"):
            said[name] = _job_name(state, value) if value else ""
        elif name == "slots":
            said[name] = slots_of(value)
    return {"act": act.tag, **said}


def _job_name(state: State, num: int) -> str:
    job = state.jobs.get(num)
    return f"{job.tenant}/{job.name}" if job is not None else str(num)


def concerns(row: dict[str, Any], job: str) -> bool:
    """Return whether a row is about a job, given by name or as tenant/job."""
    if row["kind"] == "act":
        named = [row.get("job", ""), row.get("ended", ""), *row.get("victims", ()), *row.get("waiting", ())]
        return any(name and job in (name, name.partition("/")[2]) for name in named)
    return job in (row["job"], f"{row['tenant']}/{row['job']}")
