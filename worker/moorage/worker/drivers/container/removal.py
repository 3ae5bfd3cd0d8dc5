"""Remove containers from their engine, now or once it answers, so that none is left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, Final

from moorage.schemas.attempt import AttemptName
from moorage.system.backoff import Backoff
from moorage.worker.drivers.container.engine import EngineDown, EngineError
from moorage.worker.drivers.container.host import ENGINE_S, RETRY_S, Attempt, ContainerHost

#: between two looks for containers that nobody removes: an engine may make one long after its agent was killed
SWEEP_S: Final = 300.0

log = logging.getLogger("moorage.worker")


class Removal:
    """Removes the containers of one driver.

    Removals in the background go on until they succeed or the driver closes.
    """

    def __init__(self, host: ContainerHost) -> None:
        self._host = host
        self.later: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin to run `work` in the background; `later` has it until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self.later.add(task)
        task.add_done_callback(self.later.discard)

    async def remove(self, attempt: Attempt) -> None:
        """Remove an attempt's container, if it has one, and inform the supervisor. Retry until that succeeds.

        Once no process of the container is left, return even if it is not removed: the removal goes on in the
        background, and the supervisor is not informed.
        """
        backoff = Backoff(RETRY_S, ENGINE_S)
        while attempt.container:
            try:
                await self._host.engine.remove(attempt.container)
                break
            except (EngineDown, EngineError) as error:
                log.warning("the container of job %s cannot be removed yet: %s", attempt.name[1], error)
                if attempt.over.done():
                    self.begin(self._retry(attempt.container))
                    return
                await asyncio.wait((attempt.over,), timeout=backoff.next_s())
        self.removed(attempt)

    def removed(self, attempt: Attempt) -> None:
        """Record that the engine has removed the container, and inform the supervisor."""
        attempt.is_removed = True
        self._host.link.removed(self._host.key(attempt.name))

    async def remove_unknown(self, name: AttemptName) -> None:
        """Remove, after `ENGINE_S` seconds, a container that an engine may have created although it did not answer."""
        while True:
            await asyncio.sleep(ENGINE_S)
            with contextlib.suppress(EngineDown, EngineError):
                if container := await self._host.container_of(name):
                    await self._host.engine.remove(container)
                return

    async def sweep(self) -> None:
        """Remove containers that an earlier agent created without the supervisor's knowledge, or did not come to
        remove.
        """
        while True:
            try:
                found = await self._host.left_behind()
                break
            except (EngineDown, EngineError):
                await asyncio.sleep(ENGINE_S)
        for container in found:
            log.info("removing the container %s, which an earlier agent left", container[:12])
            try:
                await self._host.engine.remove(container)
            except (EngineDown, EngineError):
                self.begin(self._retry(container))

    async def sweep_again(self) -> None:
        """Sweep each `SWEEP_S`."""
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep()

    async def _retry(self, container: str) -> None:
        """Remove a container of which nothing runs, once the engine answers."""
        while True:
            await asyncio.sleep(ENGINE_S)
            with contextlib.suppress(EngineDown, EngineError):
                await self._host.engine.remove(container)
                return
