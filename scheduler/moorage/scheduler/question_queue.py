"""Questions that wait for their answers: tenants take turns, and the queue of each is bounded.

A question is answered from memory, and takes from a few µs to tens of ms, as `ls` looks at every job of its tenant. If
questions were answered as they arrive, a few hundred at once would hold up renewals and requests for seconds. So
those go first, and questions get a slice of each turn of the event loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from moorage.bus.transport import Delivery
from moorage.schemas.errors import Problem, Refused, problem
from moorage.schemas.names import is_tenant

log = logging.getLogger("moorage.scheduler")

#: the verbs that only read; all others change something and go to the core
QUESTIONS: Final = frozenset(("show", "ls", "explain", "plan", "history", "logs", "usage"))
#: questions of one tenant that may wait; the next one is answered with `overloaded`
ASKED_MAX: Final = 20_000
#: items of all tenants together that may wait in one queue
ASKED_ALL_MAX: Final = 100_000
#: the slice of one turn of the event loop, in which at least one question is answered
QUESTIONS_S: Final = 0.004


T = TypeVar("T")


def contained(answer: Callable[[], Any]) -> Any:
    """The answer, or a problem in its place: a question that fails must end neither the reign nor others' answers."""
    try:
        return answer()
    except Refused as refused:
        return refused.problem
    except Exception:
        log.exception("a question could not be answered")
        return problem("internal", "moorage failed on this question")


class RoundRobin(Generic[T]):
    """One queue for each tenant, served in turns: after each item the next tenant's queue is next."""

    def __init__(self, most: int | None = None, most_of_all: int | None = None) -> None:
        """At most so many of one tenant, else ASKED_MAX, and of all tenants together, else ASKED_ALL_MAX."""
        self._most = most
        self._most_of_all = most_of_all
        self._by_tenant: dict[str, deque[T]] = {}
        self._turns: deque[tuple[str, deque[T]]] = deque()  # the tenants with items, and these; whose turn it is first
        self.size = 0

    def put(self, tenant: str, item: T) -> bool:
        """Enqueue; False where the tenant's queue is full, or all of them together are."""
        if self.size >= (self._most_of_all or ASKED_ALL_MAX):
            return False
        mine = self._by_tenant.get(tenant)
        if mine is None:
            mine = self._by_tenant[tenant] = deque()
            self._turns.append((tenant, mine))
        elif len(mine) >= (self._most or ASKED_MAX):
            return False
        mine.append(item)
        self.size += 1
        return True

    def take(self) -> T:
        """Remove and return the next item; there must be one."""
        self.size -= 1
        turn = self._turns.popleft()
        item = turn[1].popleft()
        if turn[1]:
            self._turns.append(turn)
        else:
            del self._by_tenant[turn[0]]
        return item


class QuestionQueue(RoundRobin[Delivery]):
    """The questions as they were received."""

    def __init__(self, subject_skip: int) -> None:
        """`subject_skip` is the length of the subjects' prefix and its dot."""
        super().__init__()
        self._skip = subject_skip

    def tenant_of(self, subject: str) -> str:
        """Return the tenant whose question is on this subject; "" if it is no question."""
        skip = self._skip
        if subject[-7:] == ".submit" or subject[skip : skip + 4] != "api.":  # most are requests
            return ""
        tenant, _, verb = subject[skip + 4 :].partition(".")
        return tenant if verb in QUESTIONS and is_tenant(tenant) else ""


def overloaded(tenant: str) -> Problem:
    why = f"{ASKED_MAX} questions of tenant {tenant}, or {ASKED_ALL_MAX} of all tenants, wait for their answers"
    return problem("overloaded", why, next="send again", retry_after_s=1.0)
