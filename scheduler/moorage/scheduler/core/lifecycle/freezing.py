"""Handles reports of freezing: an attempt is frozen or runs again, cannot be frozen, or is due to freeze or resume."""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.draft import NOTE_CHARS_MAX, Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.acts import Freeze
from moorage.scheduler.core.ledger.records import BY_WORKER, GangPhase
from moorage.scheduler.core.ledger.state import FREEZE, FROZEN, NOT_FROZEN, RESUME, RUNNING, RUNS, Attempt, Worker
from moorage.schemas.frames import Report
from moorage.schemas.job import Request
from moorage.schemas.printable import shortened, shown

FREEZING: Final = frozenset({"frozen", "resumed", "not-resumed", "not-frozen", "freeze-due", "resume-due"})
#: a longer time without use is not reported
IDLE_S_MAX: Final = 10**9


def on_freezing(draft: Draft, fleet: Fleet, attempt: Attempt, shape: Shape, report: Report) -> None:
    """Write what follows from a report of a kind in `FREEZING`.

    Do nothing if the report does not fit the attempt's state.
    """
    kind, replica = report.kind, attempt.replica
    state, host = replica.state, fleet.hosts.get(attempt.worker.num)
    answers = state == FROZEN and attempt.mask != 0 and report.code == attempt.leased
    if kind == "frozen":
        if state == RUNNING:
            draft.freeze(replica, FROZEN)
            if host is not None:
                fleet.freeze(host, attempt, shape)
    elif kind == "resumed":
        if answers:
            draft.freeze(replica, RUNNING)
    elif kind == "not-resumed":
        if answers:
            draft.resume(replica, f"not resumed: {report.detail}", leased=False)
            if host is not None:
                host.keep(attempt.home)
                fleet.freeze(host, attempt, shape)
    elif kind == "not-frozen":
        if state == RUNNING and attempt.freeze:
            write_freeze(draft, attempt, NOT_FROZEN, shortened(shown(report.detail), NOTE_CHARS_MAX))
    elif kind == "freeze-due":
        if state == RUNNING and not attempt.freeze and replica.job.gang == GangPhase.NONE:
            write_freeze(draft, attempt, FREEZE, f"idle for {min(max(report.code, 0), IDLE_S_MAX)} s")
    elif state in RUNS and attempt.wakes:
        write_freeze(draft, attempt, RESUME, "it is used again")


def can_freeze(worker: Worker, request: Request) -> bool:
    """Return whether members or replicas of a request are frozen on a worker: by its driver, or by a request to their
    own program."""
    can = worker.can(request.workload.driver)
    sleeps_itself = request.service is not None and request.service.sleeps_itself
    return can.freezes or (sleeps_itself and can.sleeps_engines)


def write_freeze(draft: Draft, attempt: Attempt, word: int, why: str) -> None:
    """Write, in the name of its worker, that an attempt is to be frozen (FREEZE), to run again, or cannot be frozen."""
    replica = attempt.replica
    draft.add(Freeze(replica.job.num, replica.index, word, BY_WORKER, why))
