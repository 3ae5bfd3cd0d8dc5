"""Queues of questions: tenants take turns, and each tenant's queue is bounded.

A question is answered from memory in some µs to tens of ms, as `ls` reads every job of its tenant. Answered on arrival,
a few hundred at once would delay renewals and requests for seconds. So renewals and requests go first, and questions
get a slice of each turn of the event loop.
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
QUESTIONS: Final = frozenset(
    ("show", "ls", "explain", "plan", "history", "again", "logs", "use", "reports", "rescue", "usage", "services")
)
#: the most waiting questions of one tenant; further ones are answered with `overloaded`
ASKED_MAX: Final = 20_000
#: the most items of all tenants together in one queue
ASKED_ALL_MAX: Final = 100_000
#: the slice of one turn of the event loop; at least one question is answered in it
QUESTIONS_S: Final = 0.004


T = TypeVar("T")


def contained(answer: Callable[[], Any]) -> Any:
    """Return the answer, or a problem in its place: a failing question must not end the term or other answers."""
    try:
        return answer()
    except Refused as refused:
        return refused.problem
    except Exception:
        log.exception("a request that only reads could not be answered")
        return problem("internal", "moorage failed on this question")


class RoundRobin(Generic[T]):
    """One queue for each tenant, served in turns: after each item the next tenant's queue is next."""

    def __init__(self, most: int | None = None, most_of_all: int | None = None) -> None:
        """Bound the items of one tenant (default ASKED_MAX), and of all together (default ASKED_ALL_MAX)."""
        self._most = most
        self._most_of_all = most_of_all
        self._by_tenant: dict[str, deque[T]] = {}
        self._turns: deque[tuple[str, deque[T]]] = deque()  # tenants with items, in the order of their turns
        self.size = 0

    def put(self, tenant: str, item: T) -> bool:
        """Enqueue an item; return False if the tenant's queue, or the total, is full."""
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
    """The questions that wait, as undecoded messages; tenants take turns."""

    def __init__(self, subject_skip: int) -> None:
        """`subject_skip` is the length of the subjects' prefix and its dot."""
        super().__init__()
        self._skip = subject_skip

    def tenant_of(self, subject: str) -> str:
        """Return the tenant of a question's subject; "" if it is not a question."""
        skip = self._skip
        if subject[-7:] == ".submit" or subject[skip : skip + 4] != "api.":  # most messages are requests
            return ""
        tenant, _, verb = subject[skip + 4 :].partition(".")
        return tenant if verb in QUESTIONS and is_tenant(tenant) else ""


def overloaded(tenant: str) -> Problem:
    why = f"{ASKED_MAX} questions of tenant {tenant}, or {ASKED_ALL_MAX} of all tenants, wait for their answers"
    return problem("overloaded", why, next="send again", retry_after_s=1.0)
