"""A machine that has a join token and no key yet: it asks for one before its worker starts."""

from __future__ import annotations

from typing import Final

import msgspec

from moorage.bus.contexts import Context
from moorage.bus.join_tokens import join
from moorage.schemas.where import POOL
from moorage.worker.agent.run import simulated_of, used_as_state
from moorage.worker.devices.readers.machine import open_machine
from moorage.worker.settings import WorkerSettings

#: of the state folder: the key that a token gave
JOINED: Final = "joined"


async def joined(settings: WorkerSettings) -> tuple[WorkerSettings, Context]:
    """Return the settings with the id and the pool that a machine has by its join token, and whom it connects as.

    The key is kept in the state folder, and asked for once. Raises MoorageError, OSError.
    """
    assert settings.join is not None
    with used_as_state(settings.state_dir):
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        worker, context = await join(settings.join, settings.state_dir / JOINED, await _gpus(settings))
    labels = {POOL: worker.rpartition("-")[0], **settings.labels}
    return msgspec.structs.replace(settings, worker=worker, labels=labels), context


async def _gpus(settings: WorkerSettings) -> int:
    simulated = simulated_of(settings)
    if simulated is not None:
        return sum(len(host.devices) for host in simulated)
    inventory = await open_machine("", settings.readers)
    try:
        return len(inventory.devices())
    finally:
        inventory.close()
