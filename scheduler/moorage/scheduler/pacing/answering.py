"""Answers that take time: made beside the leader's loop, a bounded number at once, in all and for one tenant."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from moorage.schemas.errors import MoorageError, Problem, problem

log = logging.getLogger("moorage.scheduler")

RETRY_AFTER_S: Final = 0.5


class Answering:
    """The answers of one kind that are under way in a term; `what` are the questions, in words."""

    def __init__(self, what: str, most: int, most_tenant: int | None = None) -> None:
        """`most` is the bound in all, `most_tenant` that of one tenant, and of operators; None: `most`."""
        self._what = what
        self._most = most
        self._most_tenant = most_tenant
        self._tasks: set[asyncio.Task[None]] = set()
        self._of: Counter[str] = Counter()

    def overloaded(self, tenant: str = "", job: str = "") -> Problem | None:
        """Return the problem to answer with if too many are under way; None if there is room for one more."""
        size, most, mine = len(self._tasks), self._most, self._of[tenant]
        if size < most and mine < (most if self._most_tenant is None else self._most_tenant):
            return None
        why, allowed = f"{size} {self._what} are under way", f"{most} in all"
        if self._most_tenant is not None:
            whose = f"tenant {tenant}" if tenant else "operators"
            why, allowed = f"{why}, {mine} of {whose}", f"{allowed}, {self._most_tenant} of a tenant"
        return problem("overloaded", why, allowed=allowed, job=job, next="send again", retry_after_s=RETRY_AFTER_S)

    def begin(
        self, make: Callable[[], Awaitable[Any]], tell: Callable[[Any], None], tenant: str = "", job: str = ""
    ) -> None:
        """Pass what `make` returns to `tell`, or a problem where it raises; nothing if `close` comes first."""
        task = asyncio.get_running_loop().create_task(self._run(make, tell, job))
        self._of[tenant] += 1
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._over(done, tenant))

    def _over(self, task: asyncio.Task[None], tenant: str) -> None:
        self._tasks.discard(task)
        self._of[tenant] -= 1
        if not self._of[tenant]:
            del self._of[tenant]

    async def _run(self, make: Callable[[], Awaitable[Any]], tell: Callable[[Any], None], job: str) -> None:
        try:
            answer = await make()
        except MoorageError as error:
            answer = error.problem
        except Exception:  # a defect of moorage must not leave a caller without an answer
            log.exception("%s: one could not be answered", self._what)
            answer = problem("internal", "moorage failed on this question; nothing of it was recorded", job=job)
        tell(answer)

    async def close(self) -> None:
        """Cancel what is under way; it gets no answer."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
