"""Operators' orders about workers: cordon, uncordon, drain, forget, and the release of devices."""

from __future__ import annotations

import difflib
import itertools
from typing import Final

from msgspec.structs import replace

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Order
from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.records import WORKERS_MAX
from moorage.scheduler.core.ledger.state import ADMITTED, FORGOTTEN, LEAVING, State, Window, Worker, why_unlisted
from moorage.scheduler.core.lifecycle.forgetting import Forgetting
from moorage.scheduler.core.lifecycle.health import CORDONED, Health
from moorage.scheduler.core.lifecycle.windows import Windows, as_drain, window_of
from moorage.schemas.errors import Problem, problem
from moorage.schemas.operate import AdmitAct, CordonAct, Done, DrainAct, ForgetAct, ReleaseAct, Replaced, UncordonAct
from moorage.schemas.units import many

#: an unknown name is compared with at most this many names, as that holds up the leader
LOOKED_AT_MAX: Final = 1_000


class WorkerOrders:
    def __init__(self, state: State, windows: Windows, health: Health, forgetting: Forgetting) -> None:
        self._state = state
        self._windows = windows
        self._health = health
        self._forgetting = forgetting

    def act(self, draft: Draft, event: Order) -> Done | Problem:
        """Carry out an order in the draft; return the answer, or a problem."""
        act, name, worker = event.act, event.worker, self._state.workers.get(event.worker)
        if isinstance(act, AdmitAct):
            return self._admit(draft, act, worker, event.by)
        if worker is None or worker.is_unlisted:
            return self._unknown(name)
        by, attempts = event.by, worker.attempts
        ending = sum(m.replica.attempt is m and m.replica.state in LEAVING for m in attempts.values())
        done = Done(event.verb, False, worker=name, members=len(attempts), ending=ending)
        if isinstance(act, ReleaseAct):
            named = sum(1 << slot for slot in set(act.slots or ()))
            slots = self._health.release(draft, worker, named, by, act.why)
            return replace(done, changed=slots != 0, slots=slots_of(slots))
        stood, window = (worker.flag, worker.why), worker.window
        if isinstance(act, DrainAct):
            if act.if_idle and not self._windows.is_idle(worker):
                return problem(
                    "failed-precondition",
                    f"worker {name} is not idle",
                    found=f"{many(len(attempts), 'attempt')} there, or a process of its host has or wants its GPUs",
                    next="moorage admin demand lists the hosts that are idle",
                )
            changed = self._windows.drain(draft, worker, act, by)
            drain = as_drain(window_of(act, draft.time_ms, by))
            return _told(replace(done, changed=changed, drain=drain), worker, stood, window)
        if isinstance(act, ForgetAct):
            if worker.session or worker.attempts:
                return _in_use(worker)
            self._windows.order(draft, worker, "cordoned", by, why_unlisted(FORGOTTEN, act.why))
            self._windows.clear(draft, worker, "", "")
            self._forgetting.look_soon()
            return replace(done, changed=True)
        if isinstance(act, CordonAct | UncordonAct) and act.slots is not None:
            return self._devices(draft, worker, act, by, done)
        flag = "cordoned" if isinstance(act, CordonAct) else "open"
        changed = self._windows.order(draft, worker, flag, by, act.why)
        if flag == "open":
            changed |= self._windows.clear(draft, worker, by, act.why)
            self._health.lifecycle.starts.left(worker)
            self._health.ask_anew(draft, worker)
        return _told(replace(done, changed=changed), worker, stood, window)

    def _devices(
        self, draft: Draft, worker: Worker, act: CordonAct | UncordonAct, by: str, done: Done
    ) -> Done | Problem:
        """Cordon or open some devices of a worker."""
        has = len(worker.inventory.gpu_pool)
        if beyond := [slot for slot in act.slots or () if slot >= has]:
            return problem(
                "not-found",
                f"worker {worker.id} has no GPU {beyond[0]}",
                field="$.slots",
                found=beyond[0],
                allowed=f"0..{has - 1}" if has else "none: it has no GPUs",
                next=f"moorage fleet {worker.id}",
            )
        named = sum(1 << slot for slot in set(act.slots or ()))
        opens = isinstance(act, UncordonAct)
        changed = self._health.cordon(draft, worker, named, by, act.why, opens=opens)
        return replace(done, changed=changed != 0, slots=slots_of(changed))

    def _admit(self, draft: Draft, act: AdmitAct, worker: Worker | None, by: str) -> Done | Problem:
        """Record who gets a worker's key: the worker is known from then on, and listed once it joins."""
        if worker is not None and (worker.session or worker.attempts):
            return _in_use(worker)
        if worker is None:
            if len(self._state.workers) >= WORKERS_MAX:
                return problem("failed-precondition", f"the ledger knows {WORKERS_MAX:,} worker ids, which is the most")
            draft.add(acts.Known(self._state.next_worker, act.worker, ""))
        why = f"token {act.token} of pool {act.pool}" + (f", on {act.host}" if act.host else "")
        changed = self._windows.order(
            draft, self._state.workers[act.worker], "cordoned", by, why_unlisted(ADMITTED, why)
        )
        return Done("admit", changed, worker=act.worker)

    def _unknown(self, name: str) -> Problem:
        """Return the error for an unknown worker. It names a similar worker, but not in a command to copy.

        A copied command could affect a machine that the operator did not mean.
        """
        near = difflib.get_close_matches(name, itertools.islice(self._state.workers, LOOKED_AT_MAX), n=1, cutoff=0.8)
        besides = f"; {near[0]} has" if near else ""
        return problem("not-found", f"no worker {name} has joined{besides}", found=name, next="moorage fleet")


def _told(done: Done, worker: Worker, stood: tuple[str, str], window: Window | None) -> Done:
    """Return the answer with what the order has ended or replaced: the flag that stood, its reason, and the drain.

    Of an order that leaves the worker open it has the devices too that stay cordoned.
    """
    was, why = stood if stood[0] != "open" and stood != (worker.flag, worker.why) else ("", "")
    shut = [slot for slot, (kind, *_) in sorted(worker.unwell.items()) if kind == CORDONED]
    told = Replaced(
        was, why, as_drain(window) if window != worker.window else None, shut if worker.flag == "open" else []
    )
    return done if told == Replaced() else replace(done, replaced=told)


def _in_use(worker: Worker) -> Problem:
    """Return the error for a worker that may not be forgotten, as it is there, or jobs wait for it."""
    if worker.session:
        found = "it has a session"
        cure = f"stop it first; one that does not answer is lost once its lease of {worker.lost_ms / 1000:g} s is over"
    else:
        found = f"{many(len(worker.attempts), 'attempt')} may still run there (on_partition keep)"
        cure = "if the machine is gone for good: moorage admin requeue, or cancel, the jobs that are LOST_KEPT"
    return problem(
        "failed-precondition", f"worker {worker.id} is in use: {found}", found=found, next=cure,
    )  # fmt: skip
