"""Whose turn it is under fair share: guaranteed GPUs before borrowed ones, then priority, then the least score.

Asked by the planner for each line it looks at. What this tick has placed counts at once, so that many free GPUs are
shared out within one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fairshare import GPU_MILLI, Rates, inflation, places_until, score
from moorage.scheduler.core.queueing.queue import Head, Line
from moorage.scheduler.core.records import placing
from moorage.scheduler.core.shape import Shape

UNBOUNDED: Final = 1 << 30


class Turns:
    """One pass: the order of lines, and what a placement does to it."""

    __slots__ = ("_at", "_draft", "_rates", "_scores", "_standing", "_tenants")

    def __init__(self, draft: Draft, rates: Rates, standing: Callable[[Line], int] | None = None) -> None:
        """`standing` is the priority of a line's first with its age, where jobs age."""
        state = draft.state
        self._draft = draft
        self._rates = rates
        self._at = inflation(draft.time_ms - state.counts_from_ms, state.half_life_ms)
        self._standing = standing
        self._scores: dict[str, int] = {}
        self._tenants = state.tenants

    def head(self, line: Line) -> Head:
        """What comes before arrival in the order of lines: 0 where the next one stays within its tenant's guarantee.

        Asked of each line whenever tenants are put in order, 20,000 of them at a time, so that it calls little.
        """
        draft, name = self._draft, line.tenant
        priority = line.priority if self._standing is None else self._standing(line)
        points = self._scores.get(name)
        if points is None:
            points = self._score(name)
        tenant = draft.tenant(name)
        within = tenant.guaranteed and tenant.gpus + line.shape.gpus <= tenant.guaranteed
        return (0 if within else 1, -priority, points)

    def is_owed(self, name: str, other: str) -> bool:
        """Whether more is owed to a tenant than to another: it has less of what its weight comes to."""
        return name != other and self._score(name) < self._score(other)

    def _score(self, name: str) -> int:
        known = self._scores.get(name)
        if known is None:
            tenant = self._tenants.get(name)
            more = self._draft.tenant(name).rate_milli - (tenant.rate_milli if tenant is not None else 0)
            known = self._scores[name] = score(self._draft.state, tenant, self._at, more)
        return known

    def mode(self, shape: Shape) -> int:
        """How a placement of this shape is written: its rate only where that is not its devices."""
        rate = self._rates.of(shape)
        return shape.mode if rate == GPU_MILLI * shape.count else placing(shape.mode, rate)

    def took(self, line: Line, count: int) -> None:
        """So many replicas of a line were placed."""
        self._draft.change_tenant(line.tenant).rate_milli += self._rates.of(line.shape) * count
        self._scores.pop(line.tenant, None)

    def most(self, line: Line, others: tuple[Head, int] | None) -> int:
        """How many more of a line may be placed in a row before somebody else's turn comes."""
        borrows, priority, mine = self._parts(self.head(line))
        if others is None:
            return UNBOUNDED
        draft, shape = self._draft, line.shape
        theirs = self._parts(others[0])
        if (borrows, priority) < theirs[:2]:
            if borrows or not shape.count:
                return UNBOUNDED
            return (draft.tenant(line.tenant).guaranteed - draft.tenant(line.tenant).gpus) // (shape.gpus)
        weight = draft.tenant(line.tenant).weight
        return places_until(theirs[2] - mine, weight, self._rates.of(shape) * shape.together, self._at)

    @staticmethod
    def _parts(head: Head) -> tuple[int, int, int]:
        assert isinstance(head, tuple)
        return head
