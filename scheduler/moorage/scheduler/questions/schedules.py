"""The verb `schedule` of tenants: questions about schedules, and what changes them.

A time is checked by nats-server before the schedule is offered to the core, so that a wrong one is refused and nothing
of it is recorded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from moorage.bus.errors import BusError
from moorage.scheduler.answers.schedules import schedule_row, schedules_of
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import ScheduleOrder, Submit
from moorage.scheduler.core.operate.schedules import no_schedule
from moorage.scheduler.durable.schedule_keeper import ScheduleKeeper
from moorage.scheduler.durable.schedule_stream import Run
from moorage.scheduler.pacing.answering import Answering
from moorage.scheduler.tflops import resolved
from moorage.schemas.codec import encode
from moorage.schemas.errors import Problem, Refused, refuse
from moorage.schemas.schedules import LABEL, ScheduleAsked, ScheduleList, ScheduleRow

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
        self._answers = Answering("requests about schedules", AT_ONCE_MAX, AT_ONCE_MAX_TENANT)

    async def close(self) -> None:
        await self._answers.close()

    def read(self, tenant: str, asked: ScheduleAsked) -> ScheduleList | ScheduleRow | Problem:
        """Return the answer to `ls` or `show`."""
        state = self._engine.state
        if asked.act == "ls":
            return ScheduleList(schedules=schedules_of(state, tenant))
        row = state.schedule(tenant, asked.name)
        return no_schedule(tenant, asked.name) if row is None else schedule_row(state, row, with_request=True)

    def act(self, tenant: str, asked: ScheduleAsked, reply: str, json: bool, came: str) -> None:
        """Offer a change to the core, or have nats-server asked first; `came` is the way of the request. Raises
        `Refused`."""
        if asked.act == "add":
            submit = self._submit(tenant, asked, came)
            self._keeper.stream.check_server()
            self._begin(tenant, partial(self._add, tenant, asked, submit, reply, json, came), reply, json)
        elif asked.act == "run-now":
            self._begin(tenant, partial(self._run_now, tenant, asked, reply, json), reply, json)
        else:
            self._engine.offer(ScheduleOrder(tenant, asked, None, reply, json, schedule_row, came))
            self._wake()

    def _submit(self, tenant: str, asked: ScheduleAsked, came: str) -> Submit:
        """Return the request with the label of the schedule, and of who added it. Raises `Refused`."""
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
        body = resolved(body, self._engine.config.tflops_file)
        return self._engine.submitted(tenant, body, lambda: name, came=came)

    def _begin(self, tenant: str, work: Callable[[], Awaitable[None]], reply: str, json: bool) -> None:
        """Start what waits for nats-server, if not too much does already; only a refusal is answered here."""
        if (full := self._answers.overloaded(tenant)) is not None:
            raise Refused(full)

        def answer_refusal(refused: Problem | None) -> None:
            if refused is not None and reply:
                self._answer(reply, encode(refused, json=json))

        self._answers.begin(partial(_asking_server, work), answer_refusal, tenant)

    async def _add(self, tenant: str, asked: ScheduleAsked, submit: Submit, reply: str, json: bool, came: str) -> None:
        await self._keeper.stream.ensure(self._engine.state.ran_through)
        await self._keeper.stream.check(asked.cron, asked.tz)
        self._engine.offer(ScheduleOrder(tenant, asked, submit, reply, json, schedule_row, came))
        self._wake()

    async def _run_now(self, tenant: str, asked: ScheduleAsked, reply: str, json: bool) -> None:
        row, key = self._engine.state.schedule(tenant, asked.name), (tenant, asked.name)
        if row is None:
            raise Refused(no_schedule(tenant, asked.name))
        wish, ran_through = row.wish, self._engine.state.ran_through
        await self._keeper.gate.recorded()
        await self._keeper.stream.ensure(ran_through)
        sequence = await self._keeper.stream.make_run(key, wish, once=asked.key)
        self._keeper.offer(Run(key, wish, sequence, 0), reply, json=json)


async def _asking_server(work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except BusError as error:
        why = f"nats-server did not take it: {error.problem.message}"
        raise refuse("overloaded", why, next=error.problem.next, retry_after_s=RETRY_AFTER_S) from None
