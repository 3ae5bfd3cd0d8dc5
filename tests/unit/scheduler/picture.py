"""A picture of a state: what is taken back must leave nothing behind."""

from __future__ import annotations

from collections import deque
from typing import Any

from moorage.scheduler.core.ledger.finished import FinishedTable
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.core.ledger.state import Attempt, Job, Replica, State, Tenant, Worker


def picture(state: State) -> dict[int, Any]:
    """All that can be reached from a state, in its order: of each row, by identity, all fields but two soft ones."""
    rows: dict[int, Any] = {}

    def seen(value: Any) -> Any:
        if isinstance(value, FinishedTable):
            return value.dump(), value.row
        if isinstance(value, dict):
            return [(key, seen(each)) for key, each in value.items()]
        if isinstance(value, bytearray):
            return bytes(value)
        if isinstance(value, (list, deque)):
            return [seen(each) for each in value]
        if isinstance(value, (Job, Replica, Attempt, Worker, Tenant, Schedule)) and id(value) not in rows:
            rows[id(value)] = None
            if isinstance(value, Job):
                assert value.state, "from now on it is known by its revision"
            fields = (name for name in type(value).__slots__ if name not in ("always", "runs_as"))
            rows[id(value)] = [seen(getattr(value, name)) for name in fields]
        return id(value) if id(value) in rows else value

    rows[0] = seen(vars(state))
    return rows
