"""The compute mode of GPUs while an MPS daemon has them: EXCLUSIVE_PROCESS, so that nobody can use them beside it.

A client that misses the daemon runs without it and without limits, silently. In EXCLUSIVE_PROCESS the server alone can
open the GPU, so such a client fails. What the mode was before stands in a file until it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from moorage.system.private_files import replace_private
from moorage.worker.inventory.nvml import import_pynvml
from moorage.worker.inventory.threads import in_thread
from moorage.worker.mps.control import MpsFault

#: nvml.h: NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
EXCLUSIVE_PROCESS: Final = 3
_ASK_S: Final = 10.0

log = logging.getLogger("moorage.worker")

T = TypeVar("T")


class MpsComputeModes:
    """The compute modes that one worker changes. `file` has those of before, by uuid."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._before = _read(file)

    @property
    def changed(self) -> list[str]:
        """The uuids of GPUs that are not in their former mode yet."""
        return list(self._before)

    async def close(self, uuid: str) -> None:
        """Have the daemon's server alone use a GPU; what its mode was is written down first. Raises MpsFault."""
        if uuid not in self._before:
            self._keep(self._before | {uuid: await _of_gpu(uuid, lambda api, gpu: api.nvmlDeviceGetComputeMode(gpu))})
        await self._set(uuid, EXCLUSIVE_PROCESS)

    async def restore(self, uuid: str) -> None:
        """Put a GPU back into the mode of before; nothing where it was not changed. Raises MpsFault."""
        if uuid in self._before:
            await self._set(uuid, self._before[uuid])
            self._keep({each: mode for each, mode in self._before.items() if each != uuid})

    async def restore_all(self) -> None:
        """Put all GPUs back, where the worker runs no daemons any more; what fails is logged, and stays in the file."""
        for uuid in self.changed:
            try:
                await self.restore(uuid)
            except MpsFault as fault:
                log.error("GPU %s is not back in its compute mode: %s", uuid, fault)

    @staticmethod
    async def _set(uuid: str, mode: int) -> None:
        def set_it(api: Any, handle: Any) -> int:
            if api.nvmlDeviceGetComputeMode(handle) != mode:  # else there is nothing that a right is needed for
                api.nvmlDeviceSetComputeMode(handle, mode)
            return int(api.nvmlDeviceGetComputeMode(handle))

        if (found := await _of_gpu(uuid, set_it)) != mode:
            raise MpsFault(f"the compute mode of {uuid} is {found} where {mode} was set")

    def _keep(self, before: dict[str, int]) -> None:
        try:
            replace_private(self._file, msgspec.json.encode(before).decode())
        except OSError as error:
            raise MpsFault(f"{self._file} cannot be written: {error.strerror or error}") from None
        self._before = before


async def _of_gpu(uuid: str, ask: Callable[[Any, Any], T]) -> T:
    """Ask NVML in a thread of its own, as it can hang. Raises MpsFault."""
    api = import_pynvml()

    def asked() -> T:
        api.nvmlInit()
        try:
            return ask(api, api.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            api.nvmlShutdown()

    try:
        async with asyncio.timeout(_ASK_S):
            return await in_thread("nvml-compute-mode", asked)
    except TimeoutError:
        raise MpsFault("NVML does not answer") from None
    except (api.NVMLError, AttributeError) as error:
        raise MpsFault(f"the compute mode cannot be set: {error}") from None


def _read(file: Path) -> dict[str, int]:
    """Return what the file has; one that cannot be read is no reason not to start: the default is what GPUs have."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return {}
