"""Change the drivers of this host's GPUs, each change in a thread of its own and within a time limit.

In the kernel, unbinding a driver waits for the processes that have the device open, perhaps for ever. A change that is
late goes on by itself; its device is left alone until it is over, and everything else goes on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from moorage.system.daemon_threads import in_thread
from moorage.worker.drivers.vm.passthrough import NotHandedOn, Passthrough, journals, lock, lock_path

T = TypeVar("T")
#: seconds that the caller waits for one change; no device can be read meanwhile
CHANGE_S: Final = 20.0


class DriverChanges:
    """The changes of one agent; `folder` has the journals."""

    def __init__(self, passthrough: Passthrough, folder: Path) -> None:
        self._passthrough = passthrough
        self._folder = folder
        self._late: set[str] = set()

    async def take(self, address: str) -> list[str]:
        """Bind a GPU's functions to vfio-pci, as `Passthrough.take` does.

        Raises NotHandedOn also if that takes too long, and OSError.
        """
        return await self._limited(address, partial(self._passthrough.take, address, self._folder / address))

    async def give_back(self, spared: Collection[str] = ()) -> tuple[set[str], list[str]]:
        """Give back all GPUs that no VM has locked, except the PCI addresses in `spared`.

        Return the addresses of all GPUs that are not given back, and one line for each whose return failed or is late.
        """
        faults: list[str] = []
        for address in journals(self._folder):
            if address in spared:
                continue
            try:
                await self._limited(address, partial(self._give_back_unlocked, address))
            except NotHandedOn as error:
                faults.append(f"{address} cannot be given back: {error.problem.message}")
            except OSError as error:
                faults.append(f"{address} cannot be given back: {error.strerror or error}")
        return set(journals(self._folder)), faults

    def _give_back_unlocked(self, address: str) -> None:
        descriptor = lock(lock_path(self._folder, address))
        if descriptor is None:
            return
        try:
            self._passthrough.give_back(self._folder / address)
        finally:
            os.close(descriptor)

    async def _limited(self, address: str, change: Callable[[], T]) -> T:
        if address in self._late:
            raise NotHandedOn(f"the kernel is still changing the driver of {address}", "end the processes that use it")
        changing = in_thread("passthrough", change)
        await asyncio.wait((changing,), timeout=CHANGE_S)
        if changing.done():
            return changing.result()
        self._late.add(address)
        changing.add_done_callback(lambda _: self._late.discard(address))
        raise NotHandedOn(
            f"the kernel has not changed the driver of {address} within {CHANGE_S:g} s",
            "end the processes that use it; it may be a driver's persistence daemon",
        )
