"""Look for what running attempts report of themselves, for the renewals."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.worker.agent.agent import Agent

#: seconds between two looks, and the largest part of all time that they may take
LOOK_S: Final = 1.0
LOOK_PART: Final = 0.05

log = logging.getLogger("moorage.worker")


async def watch_reports(agents: Sequence[Agent]) -> None:
    """Read what is new in the folders of the agents' running attempts, until cancelled."""
    while True:
        began_s = time.monotonic()
        try:
            for agent in agents:
                await asyncio.to_thread(agent.reporter.reports.look, _folders(agent))
        except Exception as error:  # no thread or descriptor is left, or a foreign driver fails
            log.warning("what jobs report cannot be read now: %s: %s", type(error).__name__, error)
        await asyncio.sleep(max(LOOK_S, (time.monotonic() - began_s) * (1 / LOOK_PART - 1)))


def _folders(agent: Agent) -> dict[AttemptName, str]:
    found: dict[AttemptName, str] = {}
    for name, attempt in agent.attempts.held.items():
        if attempt.phase in ("running", "ending") and (folder := agent.drivers[attempt.driver].folder_of(name)):
            found[name] = folder
    return found
