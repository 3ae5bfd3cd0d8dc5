"""The verb `schedule` of tenants: questions about schedules, and what changes them.

A time is checked by nats-server before the schedule is offered to the core, so that a wrong one is refused and nothing
of it is recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

from moorage.bus.errors import BusError
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import ScheduleOrder, Submit
from moorage.scheduler.core.operate.schedules import no_schedule
from moorage.scheduler.core.outputs.schedules import schedule_row, schedules_of
from moorage.scheduler.durable.schedule_keeper import ScheduleKeeper
from moorage.scheduler.durable.schedule_stream import Run
from moorage.schemas.codec import encode
from moorage.schemas.errors import Problem, Refused, problem, refuse
from moorage.schemas.schedules import LABEL, ScheduleAsked

log = logging.getLogger("moorage.schedules")

#: what tenants ask of nats-server at once, in all and one tenant
AT_ONCE_MAX: Final = 64
AT_ONCE_MAX_TENANT: Final = 8
RETRY_AFTER_S: Final = 1.0


class ScheduleVerb:
    """Answers the verb in one term; `wake` has the next record built."""

    def __init__(
        self, engine: Engine, keeper: ScheduleKeeper, answer: Callable[[str, bytes], None], wake: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._keeper = keeper
        self._answer = answer
        self._wake = wake
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: Counter[str] = Counter()

    async def close(self) -> None:
        """Cancel what waits for nats-server; it gets no answer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def read(self, tenant: str, asked: ScheduleAsked) -> dict[str, Any] | Problem:
        """Return the answer to `ls` or `show`."""
        state = self._engine.state
        if asked.act == "ls":
            return {"schedules": schedules_of(state, tenant)}
        row = state.schedule(tenant, asked.name)
        return no_schedule(tenant, asked.name) if row is None else schedule_row(state, row, with_request=True)

    def act(self, tenant: str, asked: ScheduleAsked, reply: str, json: bool) -> None:
        """Offer a change to the core, or have nats-server asked first. Raises `Refused`."""
        if asked.act == "add":
            submit = self._submit(tenant, asked)
            self._keeper.stream.check_server()
            self._begin(tenant, self._add(tenant, asked, submit, reply, json), reply, json)
        elif asked.act == "run-now":
            self._begin(tenant, self._run_now(tenant, asked, reply, json), reply, json)
        else:
            self._engine.offer(ScheduleOrder(tenant, asked, None, reply, json))
            self._wake()

    def _submit(self, tenant: str, asked: ScheduleAsked) -> Submit:
        """Return the request with the label of the schedule. Raises `Refused`."""
        request, name = asked.request or {}, asked.name
        labels = request.get("labels") or {}
        if not isinstance(labels, dict) or labels.get(LABEL, name) != name:
            raise refuse(
                "invalid-argument",
                f"the label {LABEL} names the schedule of a job",
                field="$.request.labels",
                found=str(labels)[:80],
                allowed=f"no label {LABEL}",
            )
        body = encode({**request, "labels": {**labels, LABEL: name}})
        return self._engine.submitted(tenant, body, lambda: name)

    def _begin(self, tenant: str, work: Coroutine[Any, Any, None], reply: str, json: bool) -> None:
        """Start what waits for nats-server, if not too much does already."""
        if len(self._tasks) >= AT_ONCE_MAX or self._asking[tenant] >= AT_ONCE_MAX_TENANT:
            work.close()
            raise refuse(
                "overloaded",
                f"{len(self._tasks)} requests about schedules are under way, {self._asking[tenant]} of tenant {tenant}",
                allowed=f"{AT_ONCE_MAX} in all, {AT_ONCE_MAX_TENANT} of a tenant",
                retry_after_s=RETRY_AFTER_S,
            )
        self._asking[tenant] += 1
        task = asyncio.get_running_loop().create_task(self._contained(tenant, work, reply, json))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _contained(self, tenant: str, work: Coroutine[Any, Any, None], reply: str, json: bool) -> None:
        trouble: Problem | None = None
        try:
            await work
        except Refused as refused:
            trouble = refused.problem
        except BusError as error:
            trouble = problem(
                "overloaded", f"nats-server did not take it: {error.problem.message}", next=error.problem.next,
                retry_after_s=RETRY_AFTER_S,
            )  # fmt: skip
        except Exception:  # a defect of moorage must not leave a caller without an answer
            log.exception("what tenant %s asked of a schedule failed", tenant)
            trouble = problem("internal", "moorage failed on this request; nothing of it was recorded")
        finally:
            self._asking[tenant] -= 1
            if not self._asking[tenant]:
                del self._asking[tenant]
        if trouble is not None and reply:
            self._answer(reply, encode(trouble, json=json))

    async def _add(self, tenant: str, asked: ScheduleAsked, submit: Submit, reply: str, json: bool) -> None:
        await self._keeper.stream.ensure(self._engine.state.ran_through)
        await self._keeper.stream.check(asked.cron, asked.tz)
        self._engine.offer(ScheduleOrder(tenant, asked, submit, reply, json))
        self._wake()

    async def _run_now(self, tenant: str, asked: ScheduleAsked, reply: str, json: bool) -> None:
        row, key = self._engine.state.schedule(tenant, asked.name), (tenant, asked.name)
        if row is None:
            raise Refused(no_schedule(tenant, asked.name))
        wish = row.wish
        await self._keeper.stream.ensure(self._engine.state.ran_through)
        sequence = await self._keeper.stream.run_now(key, wish, asked.key)
        self._keeper.offer(Run(key, wish, sequence, 0), reply, json=json)
