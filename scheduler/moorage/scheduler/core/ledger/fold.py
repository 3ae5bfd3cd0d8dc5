"""`fold(state, record, seq)`: applies a record to the state. No policy, clock, randomness, floats or set order.

The leader folds its own record while the ledger stores it; a standby, a restart and a replay fold the same bytes. A
record of an older epoch changes nothing but the sequence (third line of the fence, ledger-rules H1). `records.Op` has
the meaning of a step's numbers; each act folds itself (`acts`).
"""

from __future__ import annotations

from itertools import islice

from moorage.scheduler.core.ledger import records
from moorage.scheduler.core.ledger.folding import ACCEPT, ACT, MORE_NAMED, Folded, FoldError, Folding
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.records import FORMAT_MIN, STEP_WIDTH
from moorage.scheduler.core.ledger.state import State


def fold(state: State, record: Record, seq: int) -> Folded:
    """Apply one record, and return what it changed. A record of an older epoch changes only the sequence.

    Raises `FoldError` if the record does not fit the state, which must then be thrown away.
    """
    check_format(record, seq)
    if record.epoch < state.epoch:
        state.seq = seq  # a stale leader's record: counted, never applied
        return Folded()
    if record.digest != state.digest:
        raise FoldError(f"record {seq} follows state {record.digest:x}, but this state is {state.digest:x}")
    return begin(state, record, seq).end()


def check_format(record: Record, seq: int) -> None:
    """Raise `FoldError` if this release does not know the record's format: it may mean anything."""
    if not FORMAT_MIN <= record.format <= records.FORMAT:
        other = "a newer" if record.format > records.FORMAT else "an older"
        reads = f"{FORMAT_MIN} to {records.FORMAT}"
        raise FoldError(f"record {seq} has format {record.format}; this release reads {reads}: use {other} release")


def begin(state: State, record: Record, seq: int) -> Folding:
    """Apply all of a record that may not fit the state; `end` of what this returns does the rest, and never fails.

    Raises `FoldError` if it does not fit: the state must then be thrown away.
    """
    folding = Folding(state, seq, record.time, record.epoch, record.format, record.notes)
    try:
        folding.open()
        _run(folding, record)
        folding.weigh()
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise FoldError(f"record {seq} says what cannot be: {error!r}") from error
    return folding


def _run(folding: Folding, record: Record) -> None:
    folding.acts, folding.accepts = iter(record.acts), iter(record.accepts)
    if record.acts or record.accepts:
        acts_first, accepts_first = decided_first(record)
        for act in islice(folding.acts, acts_first):
            act.fold(folding)
        folding.accept_all(islice(folding.accepts, accepts_first))
    if record.epoch != folding.state.epoch:
        raise FoldError(f"record {folding.seq} is of epoch {record.epoch}, which no epoch record before it began")
    if record.steps:
        folding.steps(record.steps, record.actors)
    if record.reports:
        folding.reports(record.reports)


def decided_first(record: Record) -> tuple[int, int]:
    """Return how many of a record's acts, and of its `accepts`, no step names: they come before all steps.

    Raises `FoldError` if the steps name more than there are.
    """
    ops = record.steps[::STEP_WIDTH]
    acts, accepts = len(record.acts) - ops.count(ACT), len(record.accepts)
    if ACCEPT in ops:
        accepts -= sum(record.steps[at * STEP_WIDTH + 3] for at, op in enumerate(ops) if op == ACCEPT)
    if acts < 0 or accepts < 0:
        raise FoldError(MORE_NAMED)
    return acts, accepts
