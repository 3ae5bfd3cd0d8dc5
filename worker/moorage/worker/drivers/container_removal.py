"""Removing containers from their engine, now or once it answers; none is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from moorage.worker.drivers.container_engine import EngineDown, EngineError
from moorage.worker.drivers.container_host import ENGINE_S, RETRY_S, ContainerHost, Member
from moorage.worker.member_messages import MemberName

log = logging.getLogger("moorage.worker")


class Removal:
    """Removes the containers of one driver. What it does later it does until it is done or closed."""

    def __init__(self, host: ContainerHost) -> None:
        self._host = host
        self.later: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this beside all else."""
        task = asyncio.get_running_loop().create_task(work)
        self.later.add(task)
        task.add_done_callback(self.later.discard)

    async def remove(self, member: Member) -> None:
        """Have the engine remove it, until it has or the supervisor has proven the end; then the supervisor knows."""
        delay_s = RETRY_S
        while member.container:
            try:
                await self._host.engine.remove(member.container)
                break
            except (EngineDown, EngineError) as error:
                log.warning("%s: its container cannot be removed yet: %s", member.name[1], error)
                if member.over.done():
                    self.begin(self._retry(member.container))
                    return
                await asyncio.wait((member.over,), timeout=delay_s)
                delay_s = min(2 * delay_s, ENGINE_S)
        self.removed(member)

    def removed(self, member: Member) -> None:
        """The engine has it no more."""
        member.is_removed = True
        self._host.link.removed(self._host.key(member.name))

    async def remove_unknown(self, name: MemberName) -> None:
        """The engine may have created a container of which nothing was heard: remove it."""
        while True:
            await asyncio.sleep(ENGINE_S)
            with contextlib.suppress(EngineDown, EngineError):
                if container := await self._host.container_of(name):
                    await self._host.engine.remove(container)
                return

    async def sweep(self) -> None:
        """Remove what an agent before created without telling the supervisor, or did not come to remove."""
        while True:
            try:
                found = await self._host.left_behind()
                break
            except (EngineDown, EngineError):
                await asyncio.sleep(ENGINE_S)
        for container in found:
            log.info("removing the container %s, which an agent before this one left", container[:12])
            try:
                await self._host.engine.remove(container)
            except (EngineDown, EngineError):
                self.begin(self._retry(container))

    async def _retry(self, container: str) -> None:
        """Nothing of it runs; the engine is to drop what it knows of it, once it answers."""
        while True:
            await asyncio.sleep(ENGINE_S)
            with contextlib.suppress(EngineDown, EngineError):
                await self._host.engine.remove(container)
                return
