"""Run many agents in one process over one connection: one write per turn of the loop, one timer, one inbox for all.

A real worker is a host with one agent. A simulated fleet is a host with hundreds, so neither jobs nor workers have a
task of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections.abc import Callable
from typing import Any, Final

from moorage.bus.framing import new_inbox
from moorage.bus.transport import Delivery, Handler, Outgoing, Subscribed, Transport
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import MoorageError, Problem, Refused
from moorage.schemas.frames import Look, RollCall
from moorage.schemas.subjects import PREFIX_DEFAULT, Subjects
from moorage.system.proctree import boottime_s
from moorage.worker.agent.agent import Agent
from moorage.worker.session.lease_session import NEVER_S

AGENTS_MAX: Final = 10_000
#: most messages waiting for the socket; further ones are dropped and counted, because each is sent again later
OUTGOING_MAX: Final = 262_144
OUTGOING_BYTES_MAX: Final = 64 * 1024 * 1024
_TIMER_S_MIN: Final = 0.001
#: the loop's timers stop while the machine is suspended (CLOCK_MONOTONIC), so check at least this often
_TIMER_S_MAX: Final = 5.0

log = logging.getLogger("moorage.worker")

_decode_for_all: Final = Decoder[RollCall | Look](RollCall | Look)


class FleetHost:
    """The shared part of a process's agents.

    `open`, then `add` agents; `failed` gets the exception of a broken agent.
    """

    def __init__(self, transport: Transport, prefix: str = PREFIX_DEFAULT) -> None:
        self.transport = transport
        self.subjects = Subjects(prefix)
        self.inbox = new_inbox(transport.inbox_prefix)
        self.ports: set[int] = set()
        self.agents: dict[str, Agent] = {}
        self.dropped = 0
        self._broken: list[Agent] = []  # they get no more turns, and are closed with the host
        self._inbox_dots = self.inbox.count(".") + 1
        self._subscriptions: list[Subscribed] = []
        self._wanted: dict[str, Subscribed] = {}
        self._logs: dict[str, Subscribed] = {}
        self._outgoing: list[Outgoing] = []
        self._outgoing_bytes = 0
        self._sending: asyncio.Task[None] | None = None
        self._dirty: dict[Agent, None] = {}
        self._turn_due = False
        self._timers: list[tuple[float, int, Agent]] = []
        self._timer_count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = NEVER_S
        self._closing = False

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._subscriptions.append(await self.transport.subscribe(f"{self.inbox}.>", self._on_answer))
        for subject in (self.subjects.roll_call, self.subjects.look):
            self._subscriptions.append(await self.transport.subscribe(subject, self._on_word_to_all))

    async def add(self, agent: Agent) -> None:
        """Subscribe for the agent and open it.

        Raises ValueError beyond `AGENTS_MAX` or for an id that is in use here, and what `Agent.open` raises: then the
        agent must still be removed.
        """
        if agent.worker in self.agents:
            raise ValueError(f"an agent with the id {agent.worker} runs in this process already")
        if len(self.agents) >= AGENTS_MAX:
            raise ValueError(f"a process has at most {AGENTS_MAX} agents")
        self.agents[agent.worker] = agent
        subject = self.subjects.worker(agent.worker, "wanted")
        self._wanted[agent.worker] = await self.transport.subscribe(subject, agent.on_wanted)
        await agent.open()
        subject = self.subjects.worker(agent.worker, "logs")
        self._logs[agent.worker] = await self.transport.subscribe(subject, agent.output.on_asked)

    async def remove(self, agent: Agent) -> None:
        """Close the agent; jobs that can outlive it run on. Does nothing for an agent that is not or no longer here."""
        if self.agents.pop(agent.worker, None) is not None:
            await self._let_go(agent)

    async def _let_go(self, agent: Agent) -> None:
        for heard in (self._wanted, self._logs):
            if agent.worker in heard:  # missing if it did not open, or if the server refused the subscription
                await heard.pop(agent.worker).unsubscribe()
        self._dirty.pop(agent, None)
        await agent.close()

    async def serve(self, stop: asyncio.Event, *others: asyncio.Task[Any]) -> None:
        """Wait until `stop` is set or one of the `others` is done. Raises the exception of a broken agent.

        Exceptions of the `others` are not raised.
        """
        stopped = self._loop.create_task(stop.wait())
        ends: list[asyncio.Future[Any]] = [stopped, self.failed, *others]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                self.failed.result()
        finally:
            stopped.cancel()

    def give_up(self, problem: Problem) -> None:
        """Make `serve` raise Refused with this problem of an agent, unless there are others, or an earlier error."""
        if len(self.agents) <= 1 and not self.failed.done():
            self.failed.set_exception(Refused(problem))

    async def close(self) -> None:
        """Remove all agents and send the queued messages. Then raise the error of an agent that did not close."""
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._end)
            for agent in self.agents.values():
                closing.push_async_callback(self.remove, agent)

    async def _end(self) -> None:
        for agent in self._broken:
            try:
                await self._let_go(agent)
            except Exception as error:  # the error that broke it is reported already
                log.error("%s: %s", agent.worker, error)
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            await self._sending
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()
        else:
            self.failed.cancel()

    def reconnected(self) -> None:
        """Have every agent say hello: a lost connection or a refused subscription is back. Each renews or joins when
        that is due."""
        for agent in self.agents.values():
            agent.reporter.publish_hello()

    # ------------------------------------------------------------------------------------------- what agents use

    def now(self) -> float:
        return boottime_s()

    def post(self, subject: str, payload: bytes, reply: str = "") -> None:
        self._outgoing_bytes += len(payload)
        if len(self._outgoing) >= OUTGOING_MAX or self._outgoing_bytes > OUTGOING_BYTES_MAX:
            self._outgoing_bytes -= len(payload)
            self.dropped += 1
            return
        self._outgoing.append((subject, payload, reply))
        if self._sending is None:
            self._sending = self._loop.create_task(self._send())

    async def subscribe(self, subject: str, handler: Handler) -> Subscribed:
        return await self.transport.subscribe(subject, handler)

    def wake(self, agent: Agent) -> None:
        self._dirty[agent] = None
        if not self._turn_due:
            self._turn_due = True
            self.transport.after_read(self._turn)

    # ------------------------------------------------------------------------------------------------------ turns

    def _turn(self) -> None:
        for agent in list(self._dirty):
            if agent.worker in self.agents:
                self._guard(agent, agent.run)
        # after what the turn began, so that a device that answers at once is still in this turn's frame
        self._loop.call_soon(self._finish)

    def _finish(self) -> None:
        self._turn_due = False
        agents = list(self._dirty)
        self._dirty = {}
        for agent in agents:
            if agent.worker not in self.agents:
                continue
            self._guard(agent, agent.run)
            self._guard(agent, agent.finish)
            deadline_s = agent.next_deadline_s()
            if deadline_s < agent.scheduled_s:
                self._schedule(agent, deadline_s)

    def _guard(self, agent: Agent, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # a defect: report it through `serve`, without harm to the other agents
            if self.agents.pop(agent.worker, None) is not None:
                self._broken.append(agent)
            self.broke(error)

    def broke(self, error: BaseException) -> None:
        """Make `serve` raise this error of a part that agents share, unless an earlier error is to be raised."""
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _send(self) -> None:
        try:
            while self._outgoing:
                batch, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
                await self.transport.send(batch)
        except MoorageError:  # the connection was closed first, so there is no receiver
            self._closing = True
        finally:
            self._sending = None

    # ------------------------------------------------------------------------------------------------------ timers

    def slept(self, seconds: float) -> None:
        """Move the timers by time that a simulation skipped; all agents were idle and would have gone on as before."""
        self._timers = [(deadline_s + seconds, count, agent) for deadline_s, count, agent in self._timers]
        self._timer_s += seconds
        for agent in self.agents.values():
            agent.scheduled_s += seconds
            agent.slept(seconds)

    def _schedule(self, agent: Agent, deadline_s: float) -> None:
        agent.scheduled_s = deadline_s
        self._timer_count += 1
        heapq.heappush(self._timers, (deadline_s, self._timer_count, agent))
        if deadline_s < self._timer_s:
            self._set_timer(deadline_s)

    def _set_timer(self, deadline_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_s = deadline_s
        if deadline_s == NEVER_S or self._closing:
            return
        delay_s = min(max(deadline_s - self.now(), _TIMER_S_MIN), _TIMER_S_MAX)
        self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        now = self.now()
        timers = self._timers
        while timers and timers[0][0] <= now:
            deadline_s, _, agent = heapq.heappop(timers)
            if deadline_s != agent.scheduled_s:
                continue  # replaced by an earlier timer
            agent.scheduled_s = NEVER_S
            if agent.worker not in self.agents:
                continue
            deadline_s = agent.next_deadline_s()
            if deadline_s <= now:
                agent.on_timer()
            elif deadline_s != NEVER_S:  # its reason has gone, for example a short job has ended: no turn is needed
                self._schedule(agent, deadline_s)
        self._set_timer(timers[0][0] if timers else NEVER_S)

    # ------------------------------------------------------------------------------------------------- what comes in

    def _on_answer(self, delivery: Delivery) -> None:
        parts = delivery.subject.split(".")[self._inbox_dots :]
        agent = self.agents.get(parts[0]) if len(parts) == 4 else None
        if agent is None:
            self.dropped += 1
            return
        agent.on_answer(parts[1], parts[2], parts[3], delivery)

    def _on_word_to_all(self, delivery: Delivery) -> None:
        try:
            frame = _decode_for_all(delivery.data)
        except Refused:
            self.dropped += 1
            return
        for agent in self.agents.values():
            if isinstance(frame, Look):
                agent.reporter.look(frame)
            else:
                agent.enqueue(frame)
