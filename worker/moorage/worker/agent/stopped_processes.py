"""Find processes of running attempts that a signal has stopped: such a job holds its GPUs and does nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.system.proctree import stopped_pids
from moorage.worker.agent.agent import Agent

#: seconds between two looks at the processes of this host
LOOK_S: Final = 10.0

log = logging.getLogger("moorage.worker")


async def watch_stopped(agents: Sequence[Agent]) -> None:
    """Count the stopped processes of the agents' attempts, for their renewals, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        await look(agents)


async def look(agents: Sequence[Agent]) -> None:
    """Count them once. Without an attempt nothing is read."""
    try:
        holds = any(agent.attempts.held for agent in agents)
        pids = await asyncio.to_thread(stopped_pids) if holds else []
        for agent in agents:
            agent.reporter.stopped = _of_attempts(agent, pids) if pids else {}
    except Exception as error:  # no thread or descriptor is left, or a foreign driver fails
        log.warning("stopped processes cannot be looked for now: %s: %s", type(error).__name__, error)


def _of_attempts(agent: Agent, pids: Sequence[int]) -> dict[AttemptName, int]:
    found = Counter(name for driver in agent.drivers.values() for name in driver.attempts_of(pids).values())
    held = agent.attempts.held
    return {name: count for name, count in found.items() if name in held and held[name].phase == "running"}
