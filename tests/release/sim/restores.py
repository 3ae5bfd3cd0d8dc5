"""Operators who back the ledger up and restore it: any backup, once or several times, under other faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.follower.follower import count_the_rest
from moorage.scheduler.ledger import backup as backups
from moorage.scheduler.ledger.ledger import Deposed, Ledger, LedgerBroken
from moorage.scheduler.ledger.state_bytes import BadSnapshot, dump, load
from moorage.schemas.errors import MoorageError
from moorage.schemas.subjects import Subjects
from tests.release.sim.cluster import REORDER_MS, Cluster

PREFIX: Final = Subjects().prefix
RESTORES_MAX: Final = 3
TRY_AGAIN_S: Final = 2.0
#: nothing that was sent comes later than this
LATE_S: Final = max(REORDER_MS) / 1000 + 1


class Restores:
    """`back_up` and `restore` are accidents. While one is under way, no scheduler comes up.

    `began` is called as one begins, `forgot` with the tenant and the job that one has taken back.
    """

    def __init__(self, world: Cluster, began: Callable[[], None], forgot: Callable[[str, str], None]) -> None:
        self._world = world
        self._began = began
        self._forgot = forgot
        self._files: list[Path] = []
        self._under_way: asyncio.Task[None] | None = None
        self.done = 0

    def patched(self, patches: contextlib.ExitStack) -> None:
        patches.enter_context(mock.patch.object(backups, "connect", self._connect))
        # the world knows that nobody leads; a clock that was set back would keep the operator waiting for an hour
        patches.enter_context(mock.patch.object(backups, "SILENT_S", float("-inf")))
        begin = Ledger.begin_restored

        async def begin_restored(ledger: Ledger, state: State, *args: Any) -> None:
            self._begins(load(dump(state)))
            await begin(ledger, state, *args)

        patches.enter_context(mock.patch.object(Ledger, "begin_restored", begin_restored))

    async def _connect(self, target: str | None, name: str) -> Connection:
        return self._world.connect("operator", account=str(target))

    def back_up(self) -> None:
        self._world.spawn(self._back_up())

    async def _back_up(self) -> None:
        file = self._world.folder / f"{len(self._files)}-{asyncio.get_running_loop().time():.3f}.backup"
        try:
            self._files.append((await backups.backup("ledger", PREFIX, file))[0])
        except (BusError, MoorageError, LedgerBroken, BadSnapshot, OSError):
            self._world.did["a backup failed"] += 1

    def restore(self) -> None:
        if self._files and self._under_way is None and self.done < RESTORES_MAX:
            self.done += 1
            self._under_way = asyncio.create_task(self._restore(self._world.rng.choice(self._files)))

    async def _restore(self, file: Path) -> None:
        world = self._world
        world.kept_down.update(world.schedulers)
        for name in world.schedulers:
            world.processes[name].kill()
        # until every answer has come that was sent before: what it says may be forgotten now
        await asyncio.sleep(LATE_S + world.rng.choice((0.0, 5.0, 30.0)))
        self._began()
        self._taken_seq = backups.read(file)[0].seq
        while True:
            try:
                await backups.restore(
                    "ledger", "users", PREFIX, self._world.replicas, file, replace=True, say=lambda _: None,
                    count_the_rest=count_the_rest,
                )  # fmt: skip
                break
            except backups.BackupRefused as refused:
                world.judge.violated(f"the restore of {file.name} is refused: {refused}", refused)
            except (BusError, Deposed, BadSnapshot):
                world.did["a restore was done again"] += 1
                await asyncio.sleep(TRY_AGAIN_S)
        for tenant, job in self._forgotten:
            self._forgot(tenant, job)
        self._under_way = None
        world.start_again(world.schedulers)

    def _begins(self, state: State) -> None:
        self._forgotten = self._world.judge.restored(state, self._taken_seq)
