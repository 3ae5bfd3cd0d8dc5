"""Keeps the process beside this scheduler that passes on what workers ask of buckets, where the site's rights ask for
it; or does so in this process, where nothing else could."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Final

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError
from moorage.scheduler.buckets.passing import passing
from moorage.scheduler.durable.queue_streams import user_info
from moorage.scheduler.ledger.snapshot_follower import Command
from moorage.schemas.subjects import Subjects
from moorage.system.backoff import Backoff

log = logging.getLogger("moorage.scheduler")

#: how often the rights are looked at while they do not ask for it
LOOK_S: Final = 10.0
#: the pause before a process that ended is started again, which doubles each time that it ends before it has begun
AGAIN_S: Final = 1.0
AGAIN_S_MAX: Final = 60.0
#: a process that has told nothing for this long is ended, and another one started
SILENT_S_MAX: Final = 60.0


class BucketsBeside:
    """`command` starts the process; without it, a task of this process passes on, over `world`."""

    def __init__(self, world: Connection, subjects: Subjects, command: Command | None) -> None:
        self._world = world
        self._subjects = subjects
        self._command = command

    async def run(self) -> None:
        """Keep passing on, whenever the rights ask for it, until this is cancelled."""
        backoff = Backoff(AGAIN_S, AGAIN_S_MAX)
        while True:
            if not await self._is_asked():
                await asyncio.sleep(LOOK_S)
            elif self._command is None:
                await self._here()
                await asyncio.sleep(AGAIN_S)
            else:
                if await self._one(self._command):
                    backoff.reset()
                await asyncio.sleep(backoff.next_s())

    async def _is_asked(self) -> bool:
        try:
            return (await user_info(self._world)).passes_on(self._subjects)
        except BusError:
            return False

    async def _here(self) -> None:
        try:
            async with passing(self._world, self._world, self._subjects):
                await self._world.closed.wait()
        except BusError as error:
            log.warning("workers cannot store or fetch files now: %s", error)

    async def _one(self, command: Command) -> bool:
        """Run one process to its end; return whether it has begun to pass on."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                env={**os.environ, **command.env},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        except OSError as error:  # no room for a process, or an upgrade replaced Python
            log.warning("workers cannot store or fetch files now: the process cannot be started: %s", error)
            return False
        assert process.stdout is not None
        told = False
        try:
            while True:
                try:
                    async with asyncio.timeout(SILENT_S_MAX):
                        sign = await process.stdout.read(4096)
                except TimeoutError:
                    log.warning("the process that passes on files said nothing for %g s and is ended", SILENT_S_MAX)
                    return told
                if not sign:
                    log.warning("the process that passes on files of workers ended; it is started again")
                    return told
                told = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
