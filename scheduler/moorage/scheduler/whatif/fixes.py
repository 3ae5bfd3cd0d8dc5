"""Finds what would start a waiting job now: each change is tried in a copy of the engine, and suggested if it works.

A change of the request is tried with its submit a moment after the job's cancel, when others may have taken the place.
The owner's two messages may also come into one record. What starts a moment later starts then, too: the test with all
policies does what is suggested in both ways.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Final, TypeVar

import msgspec

from moorage.scheduler.answers.view import View
from moorage.scheduler.answers.waiting import explain_job, may_be_cured
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Cancel
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.core.queue.limits import room
from moorage.scheduler.whatif.changes import Change, pairs, singles
from moorage.scheduler.whatif.child import ask
from moorage.scheduler.whatif.play import Held, Play
from moorage.scheduler.whatif.remedies import Remedy, remedies
from moorage.schemas.answers.jobs import Fix
from moorage.schemas.errors import Problem
from moorage.schemas.job import Request
from moorage.schemas.reasons import REASONS, Cure

#: the most fixes in one answer, smallest changes first
FIXES_MAX: Final = 3
#: the most changes tried for one answer, after those without room were left out
TRIED_MAX: Final = 8
#: for each try
LIMIT_S: Final = 2.0
#: ledger ms between the record of a cancel and that of the submit: the scheduler makes a new reservation meanwhile
APART_MS: Final = 1_000
_STARTS: Final = b"starts"
_Fix = TypeVar("_Fix", Remedy, Change)


def fixes(engine: Engine, time_ms: int, tenant: str, name: str, within_s: float = math.inf) -> tuple[str, list[Fix]]:
    """Return why a job waits, and at most `FIXES_MAX` changes that would start it. For a child: it uses up the engine.

    The reason is empty if the job does not wait, or no change can help. With a reason the list may be empty: then none
    of the changes that were tried within `within_s` seconds works.
    """
    now = _Trial(engine, time_ms)  # also commits the record in flight
    told = explain_job(engine, tenant, name)
    job = engine.state.job(tenant, name)
    if job is None or isinstance(told, Problem) or not may_be_cured(told):
        return "", []
    reason = REASONS[told.reason]
    tried = _Tried(engine, now.time_ms, job, time.monotonic() + within_s)
    found: list[Remedy | Change] = []
    for kind in remedies(engine, job, reason):
        found += tried.first_of(kind)
    request = engine.reader.request_of(job)
    # of a job that is no service, a request may be changed only before any of its replicas has left the queue
    changes_it = job.waits == job.size or request.service is not None
    if changes_it and job.hold is None and engine.state.tenants[tenant].hold is None:
        if not job.awaits:
            # those jobs have ended, and may be forgotten by then; the time has come
            request = msgspec.structs.replace(request, after=[], start_after_s=None)
        needed_in_ms = View(engine).needed_in_ms(job) if Cure.TIME_LIMIT in reason.cures else []
        for changes in (singles, pairs):
            before = len(found)
            for each in changes(engine.fleet, request, needed_in_ms):
                if len(found) < FIXES_MAX:
                    found += tried.first_of(change for change in each if _has_room(engine, tenant, change.request))
            if len(found) > before:
                break
    return reason.name, [fix.as_fix() for fix in found[:FIXES_MAX]]


def _has_room(engine: Engine, tenant: str, request: Request) -> bool:
    """Return whether hosts have room now for a request (a gang whole), under its tenant's limit.

    It may still not start: a reservation, a drain or earlier jobs may keep it from those hosts.
    """
    shape, row = engine.reader.shape_asked_by(tenant, request), engine.state.tenants[tenant]
    if room(engine.state, row, shape) < 1:
        return False
    return any(_holds_now(engine, place) for place in engine.fleet.places(shape))


def _holds_now(engine: Engine, shape: Shape) -> bool:
    missing = shape.together
    for host, _ in engine.fleet.usable(shape):
        missing -= host.replicas_of(shape, "now")
        if missing <= 0:
            return True
    return False


class _Tried:
    """Tries changes, each in copies of this process, until the time `ends_s` and up to a limit."""

    def __init__(self, engine: Engine, time_ms: int, job: Job, ends_s: float) -> None:
        self._engine = engine
        self._time_ms = time_ms
        self._job = job
        self._ends_s = ends_s
        self._left = TRIED_MAX

    def first_of(self, fixes: Iterator[_Fix]) -> list[_Fix]:
        """Return the first of these fixes with which the job starts, in a list.

        The list is empty if none works, or if `TRIED_MAX` fixes were tried, or the time was over, before one did.
        """
        for fix in fixes:
            limit_s = min(LIMIT_S, self._ends_s - time.monotonic())
            if not self._left or limit_s <= 0:
                break
            self._left -= 1
            if ask(partial(self._try, fix), limit_s) == _STARTS:
                return [fix]
        return []

    def _try(self, fix: Remedy | Change) -> bytes:
        given = self._engine, self._time_ms, self._job
        return _after_act(*given, fix) if isinstance(fix, Remedy) else _instead(*given, fix.request)


class _Trial(Play):
    """Continues from the engine's current state. Running jobs do not end, unless they are cancelled."""

    def __init__(self, engine: Engine, time_ms: int) -> None:
        super().__init__(engine, max(time_ms, engine.state.time_ms), engine.built_ms)
        engine.forget_callers()
        if engine.in_flight:
            self.commit()

    def runs_ms(self, held: Held) -> None:
        return None


def _instead(engine: Engine, time_ms: int, job: Job, request: Request) -> bytes:
    """Return `_STARTS` if `request` starts when submitted `APART_MS` after the job's cancel, else b""."""
    trial = _Trial(engine, time_ms)
    engine.offer(Cancel(job.tenant, job.name, "explain"))
    trial.record()
    trial.time_ms += APART_MS
    new = trial.submit(job.tenant, "fix", request)
    trial.record()
    found = engine.state.job(job.tenant, new)
    return _STARTS if found is not None and _started(found, found.size) else b""


def _after_act(engine: Engine, time_ms: int, job: Job, remedy: Remedy) -> bytes:
    """Return `_STARTS` if the job starts after an operator's or tenant's act, else b"".

    If the act cancels a job, that job has left its hosts.
    """
    waiting = job.waits
    trial = _Trial(engine, time_ms)
    if isinstance(remedy.event, Cancel):
        cancelled = engine.state.job(remedy.event.tenant, remedy.event.job)
        for replica in cancelled.rows.values() if cancelled is not None else ():
            if replica.attempt is not None:
                trial.take_over(replica.attempt)
    engine.offer(remedy.event)
    trial.record()
    if isinstance(remedy.event, Cancel):
        trial.settle()
    return _STARTS if _started(job, waiting) else b""


def _started(job: Job, waited: int) -> bool:
    """Return whether one of the replicas was placed of which `waited` waited before; a gang is placed as a whole."""
    return job.waits < waited and any(replica.attempt is not None for replica in job.rows.values())
