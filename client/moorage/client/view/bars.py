"""A job's attempts as bars over time, from its state changes; without I/O and without a clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from moorage.schemas.frames import Change
from moorage.schemas.job import QUEUED, STATES, TERMINAL


class Span(NamedTuple):
    """A time in one state, in milliseconds since 1970."""

    state: str
    from_ms: int
    until_ms: int


class Bar(NamedTuple):
    """One attempt of a replica: where it was, the states that it went through, and how it ended.

    `attempt` 0 is the wait before the first attempt. `end` is the state after the last span, "" while it goes on.
    """

    replica: int
    attempt: int
    worker: str
    spans: list[Span]
    end: str
    code: int | None
    why: str


def bars(changes: Iterable[Change], now_ms: int) -> list[Bar]:
    """Return the attempts in the order of their replicas; the last span of what goes on ends at `now_ms`.

    A change that queues a replica again ends its attempt, and the wait that follows belongs to the next one.
    """
    by_replica: dict[int, list[Change]] = {}
    accepted_ms = None
    for change in changes:
        if change.replica < 0:
            accepted_ms = change.time_ms if accepted_ms is None else accepted_ms
        elif change.state in STATES:  # an operator's order is no state
            by_replica.setdefault(change.replica, []).append(change)
    found = []
    for replica, own in sorted(by_replica.items()):
        began_ms = own[0].time_ms if accepted_ms is None else accepted_ms
        worker, spans, state, attempt = "", list[Span](), QUEUED, 0
        for change in own:
            if change.time_ms > began_ms or state != QUEUED:
                spans.append(Span(state, began_ms, change.time_ms))
            began_ms, state = change.time_ms, change.state
            worker = change.worker or worker
            attempt = change.attempt or attempt
            if state == QUEUED or state in TERMINAL:
                found.append(Bar(replica, attempt, worker, spans, state, change.code, change.why))
                worker, spans = "", []
        if state not in TERMINAL:
            spans.append(Span(state, began_ms, max(now_ms, began_ms)))
            found.append(Bar(replica, attempt + (state == QUEUED), worker, spans, "", None, ""))
    return found
