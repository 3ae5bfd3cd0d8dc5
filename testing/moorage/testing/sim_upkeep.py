"""Decide when the clock of a `SimFleet` may skip time: while scheduler and workers only exchange heartbeats.

The scheduler and the agents run in one simulated process, so the loop can tell their timers from others. Scripts and
handlers run outside of that process, as all other code of a test: none of their timers is ever skipped.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping
from typing import Any, Final

from moorage.client.follow.follower import REPAIR_S
from moorage.scheduler.leader.term import Term
from moorage.schemas.subjects import Subjects
from moorage.testing.bus.bus import SimulatedBus
from moorage.testing.bus.processes import Process, process_of
from moorage.worker.agent.agent import Agent
from moorage.worker.agent.fleet_host import FleetHost
from moorage.worker.driver import Driver

#: by then each follower has asked for an event that may have been lost
REPAIRED_S: Final = 2 * REPAIR_S


class SimAgent(Agent):
    """An agent in the simulated process of its fleet. Its drivers run outside of that process."""

    def __init__(self, process: Process, outside: contextvars.Context, *args: Any) -> None:
        self._process = process
        self._outside = outside
        super().__init__(*args)

    def enqueue(self, event: Any) -> None:
        if process_of(None) is self._process:
            super().enqueue(event)
        else:
            self._process.call(super().enqueue, event)

    def call_driver(self, driver: Driver, step: Callable[[], object]) -> str:
        return self._outside.copy().run(super().call_driver, driver, step)


class Upkeep:
    """The `Sleeper` of one fleet. `workers` are the running workers; `term` returns the term of the leader."""

    def __init__(
        self,
        process: Process,
        bus: SimulatedBus,
        subjects: Subjects,
        workers: Mapping[str, FleetHost],
        term: Callable[[], Term | None],
    ) -> None:
        self.process = process
        self._bus = bus
        self._subjects = subjects
        self._workers = workers
        self._term = term
        self._seen = 1, 0
        self._repaired_s = 0.0

    def idle_until_s(self) -> float:
        """Return until when (loop time) the fleet will only write heartbeats, renew leases and report load; 0: now."""
        term = self._term()
        if term is None or not self._bus.network.is_reliable or self._is_observed():
            return 0.0
        if self._may_miss_events(term):
            return 0.0
        state = term.engine.state
        live = {worker.id: len(worker.attempts) for worker in state.workers.values() if worker.session}
        agents = [agent for host in self._workers.values() for agent in host.agents.values()]
        idle = {agent.worker: len(agent.attempts.held) for agent in agents if agent.is_idle}
        return term.idle_until_s() if live == idle else 0.0  # else a worker is joining, or about to be lost

    def _may_miss_events(self, term: Term) -> bool:
        """Return whether a client that follows a job may have missed an event, and may not have asked for it yet.

        Events are lost with messages, and with a leader that ends after its last record and before the record's events.
        """
        counters, now_s = self._bus.network.counters, asyncio.get_running_loop().time()
        seen = term.engine.state.epoch, counters["dropped"] + counters["cut"]
        if seen != self._seen:
            self._seen, self._repaired_s = seen, now_s + REPAIRED_S
        return now_s < self._repaired_s

    def _is_observed(self) -> bool:
        """Return whether a test subscribes to the periodic frames of the fleet or of the workers' load."""
        subjects = self._subjects
        return self._bus.is_subscribed_outside(self.process, subjects.fleet_frame, *map(subjects.load, self._workers))

    def slept(self, seconds: float) -> None:
        """Tell the leader and the workers how much time was skipped, so that it does not count as silence."""
        term = self._term()
        if term is not None:
            term.slept(seconds)
        for host in self._workers.values():
            host.slept(seconds)
