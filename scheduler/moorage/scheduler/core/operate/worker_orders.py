"""Operators' orders about workers: cordon, uncordon, drain, and the release of devices."""

from __future__ import annotations

import difflib
import itertools
from typing import Any, Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.effects.outputs import slots_of
from moorage.scheduler.core.events import WorkerOrder
from moorage.scheduler.core.ledger.acts import Window
from moorage.scheduler.core.lifecycle.health import Health
from moorage.scheduler.core.lifecycle.windows import Windows, as_drain, window_of
from moorage.scheduler.core.operate.orders import level_problem
from moorage.scheduler.core.state import State
from moorage.schemas.errors import Problem, problem
from moorage.schemas.operate import Done, DrainAct

#: an unknown name is compared with at most so many workers' names, as this holds up the leader
LOOKED_AT_MAX: Final = 1_000


class WorkerOrders:
    def __init__(self, state: State, windows: Windows, health: Health) -> None:
        self._state = state
        self._windows = windows
        self._health = health

    def act(self, draft: Draft, event: WorkerOrder) -> Any:
        """Write the act into the draft; returns the answer, a problem where it cannot be done."""
        worker = self._state.workers.get(event.worker)
        if worker is None:
            return self._unknown(event.worker)
        members = len(worker.members)
        if event.verb == "release":
            named = sum(1 << slot for slot in set(event.slots))
            slots = self._health.release(draft, worker, named, event.by)
            return Done(event.verb, slots != 0, worker=event.worker, members=members, slots=slots_of(slots))
        if event.verb == "drain":
            act = event.drain or DrainAct(worker=event.worker)
            if act.has_window and not draft.level_allows(Window.LEVEL):
                return level_problem("drains with a time", Window.LEVEL, self._state.level)
            changed = self._windows.drain(draft, worker, act, event.by)
            drain = as_drain(window_of(act, draft.time_ms, event.by))
            return Done(event.verb, changed, worker=event.worker, members=members, drain=drain)
        flag = {"cordon": "cordoned", "uncordon": "open"}[event.verb]
        changed = draft.flag_of(worker) != flag
        self._windows.flag(draft, worker, flag, event.by)
        if flag == "open":
            changed |= self._windows.clear(draft, worker)
        return Done(event.verb, changed, worker=event.worker, members=members)

    def _unknown(self, name: str) -> Problem:
        """Name a similar worker in the message, but not in a command to copy: that could hit a machine nobody meant."""
        near = difflib.get_close_matches(name, itertools.islice(self._state.workers, LOOKED_AT_MAX), n=1, cutoff=0.8)
        besides = f"; {near[0]} has" if near else ""
        return problem("not-found", f"no worker {name} has joined{besides}", found=name, next="moorage fleet")
