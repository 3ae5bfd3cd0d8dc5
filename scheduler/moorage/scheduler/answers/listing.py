"""Which jobs `ls` lists, and the row of each, from memory and from the history alike. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from moorage.scheduler.answers.views import from_history, last_worker_of, request_in, summary
from moorage.scheduler.answers.waiting import held_reason, pause_after, reason_of
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger.state import (
    AT_MS,
    PLACED,
    QUEUED,
    REPLICA,
    SLOTS,
    STATE,
    WORKER,
    Job,
)
from moorage.scheduler.history.unpacking import Found, Frame, changes_in, moves_in
from moorage.schemas import reasons
from moorage.schemas.always import sending
from moorage.schemas.answers.jobs import JobRow
from moorage.schemas.codec import is_json
from moorage.schemas.frames import LsAsked
from moorage.schemas.frames.listing import ANY
from moorage.schemas.job import ON_WORKER, STATE_NUMBER, STATES, TERMINAL, Request, derive_state
from moorage.schemas.unreadable import UNREADABLE

#: how long a reason that was found for a queue group holds, in ledger ms: finding it walks over the fleet
REASON_MS: Final = 2_000
#: queue groups whose reason is remembered
REASONS_MAX: Final = 4_096
HOUR_MS: Final = 3_600_000
#: reasons that belong to one job of a queue group, not to the group
_OF_ONE: Final = frozenset(reason.name for reason in (reasons.BACKOFF, reasons.CONTENDED, reasons.REFUSED))
#: a row of the past is sent with these
_THEN: Final = sending(JobRow, "age_ms", "worker", "leases", "gpu")


class _Noted(msgspec.Struct):
    """The labels of a request; decoding the rest of it for each job that is looked at would cost the leader more."""

    labels: dict[str, str] = {}


class _Labelled(_Noted):
    template: _Noted | None = None


_of_json: Final = msgspec.json.Decoder(_Labelled).decode
_of_msgpack: Final = msgspec.msgpack.Decoder(_Labelled).decode


def labels_in(body: bytes) -> Mapping[str, str]:
    """Return the labels of an encoded request; none of one that cannot be read."""
    try:
        found = _of_json(body) if is_json(body) else _of_msgpack(body)
    except UNREADABLE:
        return {}
    return found.labels if found.template is None else found.labels | found.template.labels


class Pattern:
    """A pattern of ids, in which `*` stands for any characters. Matching takes time linear in the id's length."""

    def __init__(self, text: str) -> None:
        self._first, *rest = text.split(ANY)
        self._last = rest.pop() if rest else None  # None: no `*`, so the whole text
        self._between = [part for part in rest if part]

    def matches(self, name: str) -> bool:
        """Return whether an id matches."""
        if self._last is None:
            return name == self._first
        at, end = len(self._first), len(name) - len(self._last)
        if end < at or not name.startswith(self._first) or not name.endswith(self._last):
            return False
        for part in self._between:
            at = name.find(part, at, end)
            if at < 0:
                return False
            at += len(part)
        return True


class Wanted:
    """The jobs that a question asks for; `tenant` "" is of all tenants."""

    def __init__(self, asked: LsAsked, tenant: str) -> None:
        self.asked = asked
        self.tenant = tenant
        self._ids = [Pattern(each) for each in filter(None, asked.ids.split(","))]

    @property
    def of_history(self) -> bool:
        """Whether jobs in the history can be among them: those have ended, and wait for nothing."""
        asked = self.asked
        ended = not asked.states or any(state in TERMINAL for state in asked.states)
        return asked.history and ended and not asked.reason and not asked.oldest

    def numbers(self, engine: Engine) -> list[int]:
        """Return the numbers of the jobs in memory that may be among them, ascending."""
        state = engine.state
        if self.tenant:
            row = state.tenants.get(self.tenant)
            return sorted(job.num for job in row.jobs.values()) if row is not None else []
        return sorted(state.jobs)

    def counts(self, engine: Engine, job: Job) -> bool:
        """Return whether a job in memory counts: whether it is asked for, whatever its state."""
        asked = self.asked
        if self._ids and not any(each.matches(job.name) for each in self._ids):
            return False
        if asked.worker and not _was_on(engine, job, asked.worker):
            return False
        return not asked.labels or self._labelled(labels_in(job.body))

    def lists(self, engine: Engine, job: Job, reason: Reasons) -> bool:
        """Return whether a job that counts is asked for in its state."""
        asked = self.asked
        if asked.states and job.state not in asked.states:
            return False
        return not asked.reason or (job.state == STATES[QUEUED] and reason.of(job) == asked.reason)

    def _labelled(self, labels: Mapping[str, str]) -> bool:
        return all(key in labels and value in (ANY, labels[key]) for key, value in self.asked.labels.items())

    def row_of_history(self, engine: Engine, frame: Frame, found: Found) -> JobRow | None:
        """Return the row of a job in a frame of the history; None if it is not asked for."""
        asked = self.asked
        if not found.over or (asked.states and found.state not in asked.states):
            return None
        if self._ids and not any(each.matches(found.job) for each in self._ids):
            return None
        labels = labels_in(bytes(found.request))
        if asked.labels and not self._labelled(labels):
            return None
        if asked.worker and all(worker.worker != asked.worker for worker in frame.workers.values()):
            return None
        changes = list(changes_in(frame, found))
        if not changes:
            return None
        row = from_history(engine, frame, found, changes, JobRow, labels=dict(labels))
        return None if asked.worker and row.worker != asked.worker else row


class Reasons:
    """Why jobs wait: found once for all jobs of a queue group, and held for `REASON_MS`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._found: dict[tuple[int, int, str], tuple[int, str]] = {}
        self.searches = 0  # how often the fleet was walked over

    def of(self, job: Job) -> str:
        """Return the name of the reason; "" of a job that does not wait."""
        replica = job.first_waiting
        if replica is None:
            return ""
        engine, now_ms = self._engine, self._engine.state.time_ms
        if (held := held_reason(engine, job)) is not None:
            return held.name
        key = engine.reader.priority_of(job), engine.reader.shape_of(job).index, job.tenant
        at_ms, name = self._found.get(key, (-REASON_MS, ""))
        if now_ms - at_ms >= REASON_MS:
            self.searches += 1
            name = reason_of(engine, job, replica)
            if name in _OF_ONE or job.preempts is not None:
                return name
            if len(self._found) >= REASONS_MAX:
                self._found.clear()
            self._found[key] = now_ms, name
        if name == reasons.PLACING.name and replica.not_before > now_ms:
            return pause_after(job, replica).name
        return name


class Then:
    """Jobs as they were at a moment of the past, from their transitions alone."""

    def __init__(self, at_ms: int) -> None:
        self._at_ms = at_ms
        self.ended: dict[str, int] = {}  # jobs that ended in the hour before, by state

    def of_memory(self, engine: Engine, job: Job) -> JobRow | None:
        """Return the row of a job in memory; None if it was not there, or had ended."""
        names = engine.state.worker_by_num
        moves = [
            (
                row[AT_MS],
                row[REPLICA],
                STATES[row[STATE]],
                names[row[WORKER]].id if row[WORKER] >= 0 else "",
                row[SLOTS],
            )
            for row in job.history
            if 0 <= row[STATE] < len(STATES)
        ]
        ended_ms = job.history[-1][AT_MS] if job.over and job.history else None
        request = engine.reader.request_of(job)
        return self._row(job.tenant, job.name, job.accepted_ms, job.state, ended_ms, moves, request)

    def of_history(self, frame: Frame, found: Found) -> JobRow | None:
        """Return the row of a job in a frame of the history stream, as `of_memory`; a part of a history has none."""
        if not found.over:
            return None
        moves = [
            (move.time_ms, move.replica, frame.states[move.state], frame.workers[move.worker].worker, move.slots)
            if move.worker in frame.workers
            else (move.time_ms, move.replica, frame.states[move.state], "", 0)
            for move in moves_in(found)
        ]
        ended_ms = moves[-1][0] if moves else found.accepted_ms
        request = request_in(found)
        return self._row(frame.tenant, found.job, found.accepted_ms, found.state, ended_ms, moves, request)

    def _row(
        self,
        tenant: str,
        job: str,
        accepted_ms: int,
        state: str,
        ended_ms: int | None,
        moves: list[tuple[int, int, str, str, int]],
        request: Request | None,
    ) -> JobRow | None:
        at_ms = self._at_ms
        if accepted_ms > at_ms:
            return None
        if ended_ms is not None and ended_ms <= at_ms:
            if at_ms - ended_ms < HOUR_MS:
                self.ended[state] = self.ended.get(state, 0) + 1
            return None
        states: dict[int, str] = {}
        held: dict[int, tuple[str, int]] = {}
        for time_ms, replica, name, worker, slots in moves:
            if time_ms > at_ms or name not in STATE_NUMBER:
                continue
            if replica < 0:  # of a gang as a whole
                states = dict.fromkeys(states, name)
                held = held if name in ON_WORKER else {}
                continue
            states[replica] = name
            if name == STATES[PLACED]:
                held[replica] = worker, slots
            elif name not in ON_WORKER:
                held.pop(replica, None)
        leases = [(worker, slots_of(slots)) for worker, slots in held.values() if worker]
        return _THEN(
            job=job,
            tenant=tenant,
            state=derive_state(set(states.values()) or {STATES[QUEUED]}),
            age_ms=at_ms - accepted_ms,
            worker=leases[0][0] if leases else "",
            workers=max(1, len({worker for worker, _ in leases})),
            leases=leases,
            gpu="" if request is None else request.token,
        )


def labelled(engine: Engine, job: Job, reason: str = "") -> JobRow:
    """Return a job's row of `show`, with its labels, and a reason for which it waits."""
    return msgspec.structs.replace(summary(engine, job), labels=engine.reader.request_of(job).labels, reason=reason)


def row_of(engine: Engine, job: Job, reason: Reasons) -> JobRow:
    """Return a job's row of `ls`: that of `show`, with its labels, and why it waits."""
    return labelled(engine, job, reason.of(job) if job.live else "")


def in_memory(engine: Engine, frame: Frame, found: Found) -> bool:
    """Return whether the job of a history is in memory, too."""
    held = engine.state.job(frame.tenant, found.job)
    return held is not None and held.ledger == found.ledger


def _was_on(engine: Engine, job: Job, worker: str) -> bool:
    """Return whether a job has an attempt on a worker now, or, if it is over, whether its last attempt was there."""
    if job.held:
        return any(attempt.worker.id == worker for attempt in job.attempts)
    if job.live:
        return False
    return last_worker_of(engine, job) == worker
