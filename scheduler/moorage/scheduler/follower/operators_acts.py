"""The newest orders of operators, and what tenants did that an auditor asks for. Pure: no I/O, no clock.

Orders and commands in running jobs are from each record of the ledger. That somebody read the output of another
person's job is told by the leader once a worker has answered; it is in no record, and lost with a follower that has not
saved it yet.

A drain that begins or ends by its own window is in the ledger again, as of the operator who asked for it: that is no
further order, and not listed. Orders that changed nothing are in no record.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from moorage.scheduler.core.ledger import acts, limits
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.records import STEP_WIDTH
from moorage.scheduler.core.ledger.state import (
    ADMITTED,
    AT_MS,
    BY,
    FORGOTTEN,
    FREEZE,
    PLACED,
    REPLICA,
    STATE,
    WHY,
    WORKER,
    State,
    told_flag,
)
from moorage.scheduler.core.ledger.ways import ACTS as ACTS_AT
from moorage.scheduler.core.ledger.ways import STEPS, way_of
from moorage.scheduler.core.lifecycle.health import CORDONED
from moorage.scheduler.core.outputs.outputs import gpu_names
from moorage.scheduler.follower.since import trouble_of_since
from moorage.schemas import actors
from moorage.schemas.answers.operators import ActRow, ActsAnswer
from moorage.schemas.errors import Problem, problem
from moorage.schemas.operate import ACTS
from moorage.schemas.units import many

#: orders that are remembered, and as many other rows: tenants do far more than operators
ACTS_MAX: Final = 10_000
#: pages of one job's output that one person reads within this time are one row
READ_MS: Final = 600_000
#: what tenants do, beside the verbs of operators
OF_TENANTS: Final = ("exec", "logs", "rescue")
#: orders in one answer
ANSWERED_MAX: Final = 500
_NEXT: Final = "moorage admin acts --help"
_REQUEUED: Final = "requeued"
#: the verb of an order, by the flag that it gives a worker
_FLAGS: Final = {
    "open": "uncordon",
    "cordoned": "cordon",
    "draining": "drain",
    FORGOTTEN: "forget",
    ADMITTED: "admit",
}

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[ActRow]).decode
#: a time in ledger ms, and how many rows of it were given
_CURSOR: Final = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?").fullmatch


class OperatorsActs:
    """The orders of the records that were folded into `state`, the oldest first."""

    def __init__(self, rows: Sequence[ActRow] = ()) -> None:
        self._rows: deque[ActRow] = deque(rows)
        orders_ms = [row.at_ms for row in rows if row.verb not in OF_TENANTS]
        self._of_tenants = len(rows) - len(orders_ms)
        #: ledger ms up to which orders are no longer remembered
        self._lost_ms = orders_ms[0] if len(orders_ms) >= ACTS_MAX else 0
        self._read_ms: dict[tuple[str, ...], int] = {}

    def fold(self, state: State, record: Record, folded: Folded) -> None:
        """Take the orders of a record that has just been folded into `state`."""
        if record.acts or record.actors:
            for row in _orders(state, record, folded):
                self._add(row)

    def note(self, row: ActRow) -> None:
        """Take a row that no record has; of one person and job only the first of `READ_MS`."""
        key = row.by, row.verb, row.tenant, row.job
        if row.at_ms - self._read_ms.get(key, -READ_MS) >= READ_MS:
            if len(self._read_ms) >= ACTS_MAX:
                self._read_ms.clear()
            self._read_ms[key] = row.at_ms
            self._add(row)

    def _add(self, row: ActRow) -> None:
        rows = self._rows
        rows.append(row)
        is_mine = row.verb in OF_TENANTS
        self._of_tenants += is_mine
        if (self._of_tenants if is_mine else len(rows) - self._of_tenants) > ACTS_MAX:
            oldest = next(at for at, each in enumerate(rows) if (each.verb in OF_TENANTS) == is_mine)
            if not is_mine:
                self._lost_ms = rows[oldest].at_ms
            del rows[oldest]
            self._of_tenants -= is_mine

    def dump(self) -> bytes:
        return _encode(list(self._rows))

    @classmethod
    def load(cls, saved: bytes) -> OperatorsActs:
        """Return what `dump` has written; b"" is nothing. Raises msgspec's errors for other bytes."""
        return cls(_decode(saved) if saved else ())

    def answer(
        self, arguments: Mapping[str, Any], now_ms: int, gaps: Sequence[tuple[int, int]] = ()
    ) -> dict[str, Any] | Problem:
        """Return the newest orders of the last `since_s` seconds, by one operator, of one verb; without these, all.

        An operator without a key of its own is found by the name that it gave. With `after`, the `next` of an earlier
        answer or "0", they are the oldest behind that. `gaps` are times (from, until), in ledger ms, whose records
        nobody read.
        """
        since_s, by, verb, after = (arguments.get(name) for name in ("since_s", "by", "verb", "after"))
        if since_s is not None and (trouble := trouble_of_since(since_s, _NEXT)):
            return trouble
        if by is not None and not isinstance(by, str):
            said = "by must be the name of an operator"
            return problem("invalid-argument", said, field="$.by", found=str(by)[:80], next=_NEXT)
        if verb is not None and (not isinstance(verb, str) or verb not in (*ACTS, *OF_TENANTS)):
            said = f"verb must be one of {', '.join(sorted((*ACTS, *OF_TENANTS)))}"
            return problem("invalid-argument", said, field="$.verb", found=str(verb)[:80], next=_NEXT)
        cursor = None if after is None else _CURSOR(after if isinstance(after, str) else "")
        if after is not None and cursor is None:
            said = "after must be the `next` of an earlier answer, or 0"
            return problem("invalid-argument", said, field="$.after", found=str(after)[:80], next=_NEXT)
        from_ms = 0 if since_s is None else now_ms - int(since_s * 1000)
        behind = (0, 0) if cursor is None else (int(cursor[1]), int(cursor[2] or 0))
        found = [
            (place, row)
            for place, row in self._placed()
            if place >= behind and row.at_ms >= from_ms and verb in (None, row.verb) and (by is None or _is_by(row, by))
        ]
        told = found[-ANSWERED_MAX:] if cursor is None else found[:ANSWERED_MAX]
        (last_ms, count), _ = told[-1] if told else ((behind[0], behind[1] - 1), None)
        answer = ActsAnswer(
            acts=[row for _, row in told],
            left_out=len(found) - len(told),
            from_ms=max(from_ms, self._lost_ms),
            until_ms=now_ms,
            gaps=[[begin, end] for begin, end in gaps if end >= from_ms],
            next=f"{last_ms}.{count + 1}",
        )
        plain: dict[str, Any] = msgspec.to_builtins(answer)
        return plain

    def _placed(self) -> Iterator[tuple[tuple[int, int], ActRow]]:
        """Yield each row with its place: its time, and how many rows of that time are before it."""
        at_ms, count = -1, 0
        for row in self._rows:
            at_ms, count = row.at_ms, count + 1 if row.at_ms == at_ms else 0
            yield (at_ms, count), row


def _is_by(row: ActRow, name: str) -> bool:
    if row.by == actors.OPERATOR:
        return name in (row.by, row.said)
    return name in (row.by, row.by.partition(":")[2])


def _orders(state: State, record: Record, folded: Folded) -> Iterator[ActRow]:
    windows = {act.worker: act for act in record.acts if isinstance(act, acts.Window)}
    for at, act in enumerate(record.acts):
        actor = getattr(act, "by", "")
        if isinstance(act, acts.Exec):
            by, said = actors.split(actor)
            came = way_of(record.ways, record.notes, ACTS_AT, at)
            what = f"replica {act.replica}: {act.why}"
            told: dict[str, Any] = {"verb": "exec", "what": what, "came": came, **_job(state, act.job)}
            yield ActRow(seq=state.seq, at_ms=state.time_ms, by=by, said=said, **told)
            continue
        if isinstance(act, acts.Health) and act.ailment in ("", CORDONED) and act.detail.startswith("by "):
            said, _, why = act.detail.removeprefix("by ").partition(": ")
            gpus = gpu_names(state.worker_by_num[act.worker], 1 << act.slot, state.seq)
            about: dict[str, Any] = {
                "worker": _worker(state, folded, act.worker),
                "what": ", ".join(gpus),
                "why": why,
                "said": said,
            }
            verb = "cordon" if act.ailment else "uncordon"
            came = way_of(record.ways, record.notes, ACTS_AT, at)
            yield ActRow(seq=state.seq, at_ms=state.time_ms, by=actors.OPERATOR, verb=verb, came=came, **about)
            continue
        if _is_operator(actor) and (order := _verb_of(state, folded, act, windows)):
            by, said = actors.split(actor)
            came, why = way_of(record.ways, record.notes, ACTS_AT, at), getattr(act, "why", "")
            yield ActRow(seq=state.seq, at_ms=state.time_ms, by=by, said=said, came=came, **{"why": why, **order})
    for first, end, note in zip(record.actors[::3], record.actors[1::3], record.actors[2::3], strict=True):
        actor = record.notes[note - 1]
        if _is_operator(actor):
            nums = dict.fromkeys(record.steps[first + 1 : end : STEP_WIDTH])
            for num in nums:
                came = way_of(record.ways, record.notes, STEPS, first)
                yield from _of_steps(state, folded, num, actor, came)


def _is_operator(actor: str) -> bool:
    return actors.split(actor)[0].partition(":")[0] == actors.OPERATOR


def _verb_of(state: State, folded: Folded, act: Any, windows: Mapping[int, acts.Window]) -> dict[str, Any]:
    """Return the verb of an order and what it is about; {} if it is a part of another one."""
    match act:
        case acts.Hold() | acts.Unhold():
            verb = "hold" if isinstance(act, acts.Hold) else "release"
            return {"verb": verb, **(_job(state, act.job) if act.job else {"tenant": act.tenant})}
        case acts.Limit():
            what = f"{_most(act.gpus, 'GPU')}, {_most(act.jobs, 'job')}"
            return {"verb": "limit", "tenant": act.tenant, "what": what}
        case acts.Limits():
            found = limits.Limits.of(act.limits, act.gpus_of, act.weights)
            return {"verb": "limit", "tenant": act.tenant, "what": _limits(found)}
        case acts.Counter():
            per = " for each tenant" if act.of_tenant else ""
            return {"verb": "counter", "what": f"{act.name}: {act.most}{per}" if act.most else f"{act.name}: none"}
        case acts.Share():
            what = f"weight {act.weight or 1}, {many(act.gpus, 'GPU')} guaranteed"
            return {"verb": "share", "tenant": act.tenant, "what": what}
        case acts.Priority():
            return {"verb": "priority", **_job(state, act.job), "what": str(act.priority)}
        case acts.Resize():
            what = f"{act.compute_percent} % of compute" + (f", {act.memory_mib} MiB" if act.memory_mib else "")
            return {"verb": "resize", **_job(state, act.job), "what": what}
        case acts.Relimit():
            return {"verb": "time-limit", **_job(state, act.job), "what": f"{act.timeout_ms / 1000:g} s"}
        case acts.Freeze():
            return {"verb": "freeze" if act.word == FREEZE else "resume", **_job(state, act.job)}
        case acts.Level():
            return {"verb": "feature-level", "what": str(act.level)}
        case acts.Unquarantine():
            worker = state.worker_by_num.get(act.worker)
            gpus = gpu_names(worker, act.slots, state.seq) if worker is not None else []
            return {"verb": "release", "worker": _worker(state, folded, act.worker), "what": ", ".join(gpus)}
        case acts.Window():
            times = {"from_ms": act.from_ms, "leave_ms": act.leave_ms, "until_ms": act.until_ms}
            about = {"verb": "drain" if act.leave_ms else "uncordon", "worker": _worker(state, folded, act.worker)}
            return {**about, **times}
        case acts.Flag():
            window, worker = windows.get(act.worker), state.worker_by_num.get(act.worker)
            if window is not None and (window.by or act.flag == "open"):
                return {}  # the window says it, or has ended by itself
            if window is None and act.flag == "draining" and worker is not None and worker.window is not None:
                return {}  # its window begins
            flag, why = told_flag(act.flag, act.why)
            return {"verb": _FLAGS[flag], "why": why, "worker": _worker(state, folded, act.worker)}
    return {"verb": act.tag, **_job(state, getattr(act, "job", 0))} if act.tag in ACTS else {}


def _of_steps(state: State, folded: Folded, num: int, actor: str, came: str) -> Iterator[ActRow]:
    """Yield the order of which a job's steps are all that a record has: to requeue it, or to place it."""
    job = state.jobs.get(num)
    rows = [row for row in job.history if row[AT_MS] == state.time_ms and row[BY] == actor] if job is not None else []
    if rows:
        by, said = actors.split(actor)
        placed = [row for row in rows if row[STATE] == PLACED]
        if placed:
            what = f"{many(len(placed), 'replica')} on {_worker(state, folded, placed[0][WORKER])}"
            place: dict[str, Any] = {"verb": "place", "what": what, "came": came, **_job(state, num)}
            yield ActRow(seq=state.seq, at_ms=state.time_ms, by=by, said=said, **place)
        rows = [row for row in rows if row[STATE] != PLACED]
        if not rows:
            return
        why = rows[0][WHY].removeprefix(_REQUEUED).removeprefix(": ")
        what = many(len({row[REPLICA] for row in rows}), "replica")
        told: dict[str, Any] = {"verb": "requeue", "what": what, "came": came, **_job(state, num)}
        yield ActRow(seq=state.seq, at_ms=state.time_ms, by=by, said=said, why=why, **told)


def _job(state: State, num: int) -> dict[str, str]:
    job = state.jobs.get(num)
    return {"tenant": job.tenant, "job": job.name} if job is not None else {}


def _worker(state: State, folded: Folded, num: int) -> str:
    worker = state.worker_by_num.get(num) or next((each for each in folded.forgotten if each.num == num), None)
    return worker.id if worker is not None else ""


def _limits(found: limits.Limits) -> str:
    """Return a tenant's limits beside GPUs and jobs, those that are set."""
    hours = f"{found.budget_ms / 3_600_000:g} GPU-hours a {limits.PERIODS[found.period]}"
    parts = [
        f"{found.cores_milli / 1000:g} cores" if found.cores_milli else "",
        f"{found.memory_mib} MiB of memory" if found.memory_mib else "",
        f"{many(found.running, 'replica')} at once" if found.running else "",
        f"{many(found.running_key, 'replica')} at once of each fair key" if found.running_key else "",
        f"{many(found.job_gpus, 'GPU')} a job" if found.job_gpus else "",
        f"{found.time_limit_ms / 1000:g} s of time limit" if found.time_limit_ms else "",
        hours if found.budget_ms else "",
        *(f"{model} counts {milli / 1000:g}" for model, milli in found.weights),
        *(f"{many(most, model + ' GPU')}" for model, most in found.gpus_of),
    ]
    return ", ".join(part for part in parts if part) or "no other limit"


def _most(bound: int, what: str) -> str:
    return many(bound, what) if bound else f"no limit of {what}s"
