"""Questions that wait for an answer: tenants take turns, renewals and requests come first, and every queue is bounded.

A question is answered from memory, within some µs or within tens of ms: `ls` looks at every job of its tenant. If
questions were answered as they come, a few hundred at once would keep renewals and requests waiting for seconds.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

from moorage.bus.transport import Delivery
from moorage.schemas.errors import Problem, problem
from moorage.schemas.names import is_tenant

#: those that are answered from memory; what else is asked is answered elsewhere, or told to the core
QUESTIONS: Final = frozenset(("show", "ls", "explain", "plan", "history", "logs"))
#: of one tenant; more are answered with `overloaded`
ASKED_MAX: Final = 20_000
#: so long they are answered between two turns of the loop, one at least
QUESTIONS_S: Final = 0.004


T = TypeVar("T")


class InTurn(Generic[T]):
    """A queue for each tenant, and tenants take turns: whoever had a turn comes last in the next round."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, deque[T]] = {}
        self.size = 0

    def put(self, tenant: str, item: T) -> bool:
        """Enqueue; False if so much of this tenant waits already that there is no room for more."""
        mine = self._by_tenant.setdefault(tenant, deque())
        if len(mine) >= ASKED_MAX:
            return False
        mine.append(item)
        self.size += 1
        return True

    def take(self) -> T:
        """The next one. There must be one."""
        tenant = next(iter(self._by_tenant))
        mine = self._by_tenant.pop(tenant)
        if len(mine) > 1:
            self._by_tenant[tenant] = mine
        self.size -= 1
        return mine.popleft()


class Asked(InTurn[Delivery]):
    """Questions as they came."""

    def __init__(self, subject_skip: int) -> None:
        """`subject_skip` is the length of the subjects' prefix and its dot."""
        super().__init__()
        self._skip = subject_skip

    def tenant_of(self, subject: str) -> str:
        """Whose question this is; "" where it is none."""
        skip = self._skip
        if subject[-7:] == ".submit" or subject[skip : skip + 4] != "api.":  # most are requests
            return ""
        tenant, _, verb = subject[skip + 4 :].partition(".")
        return tenant if verb in QUESTIONS and is_tenant(tenant) else ""


def overloaded(tenant: str) -> Problem:
    why = f"{ASKED_MAX} questions of tenant {tenant} wait for their answers"
    return problem("overloaded", why, next="send again", retry_after_s=1.0)
