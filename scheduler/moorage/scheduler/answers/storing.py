"""Tells which objects a worker may store in the buckets of a tenant: by their names, those of attempts that it has."""

from __future__ import annotations

from collections.abc import Container

from moorage.scheduler.core.ledger.state import AT_EXITED, State
from moorage.schemas.handler import checkpoint_object, kept_object, reported_object, result_object
from moorage.schemas.passed_on import MayStore, StoreAsked


def may_store(state: State, rescues: Container[StoreAsked], asked: StoreAsked) -> MayStore:
    """Return whether the object is of an attempt that the worker has and whose end it has not reported, or one of the
    `rescues` that it was asked for."""
    return MayStore(asked in rescues or _has_it(state, asked))


def _has_it(state: State, asked: StoreAsked) -> bool:
    worker = state.workers.get(asked.worker)
    if worker is None:
        return False
    words = asked.object.split(".", 2)[:2]
    for (tenant, job, replica, no, fence), attempt in worker.attempts.items():
        if tenant == asked.tenant and job in words and attempt.phase != AT_EXITED:
            checkpoint = checkpoint_object(job, attempt.replica.job.accepted_ms, replica, no)
            own = result_object(job, replica, fence), kept_object(job, replica), reported_object(job, replica, fence)
            if asked.object in (*own, checkpoint):
                return True
            if asked.object.startswith(f"{checkpoint}."):  # a part of it
                return True
    return False
