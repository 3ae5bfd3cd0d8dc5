"""Notice that a machine has other NVIDIA devices than its worker lists, for example after its MIG slices changed."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from moorage.schemas.frames import Device
from moorage.worker.agent.agent import Agent
from moorage.worker.devices.readers.nvml import NvmlUnavailable, open_nvml

#: seconds between two checks of a drained worker without attempts
LOOK_S: Final = 2.0

log = logging.getLogger("moorage.worker")


async def devices_changed(agent: Agent) -> None:
    """Return once the worker is drained and idle, and two checks in a row show the same other devices.

    A worker's list of devices never changes while it runs, so the worker must restart; one that is not drained keeps
    its list.
    """
    listed = _named([device for device in agent.devices if device.vendor == "nvidia"])
    before = listed
    while True:
        await asyncio.sleep(LOOK_S)
        held = agent.attempts.held or any(state.sharers for state in agent.pool.slot_states())
        now = listed if held or not agent.attempts.draining else await _there(listed)
        if now == before != listed:
            log.info("%s: this machine has other GPUs now: the worker restarts", agent.worker)
            return
        before = now


async def _there(otherwise: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return uuid and MiB of each device that NVML lists now; `otherwise` if NVML does not answer without faults."""
    try:
        found = await open_nvml()
    except NvmlUnavailable:
        return otherwise
    try:
        return _named(found.devices()) if found.is_there and not found.faults else otherwise
    finally:
        found.close()


def _named(devices: list[Device]) -> list[tuple[str, int]]:
    return [(device.uuid, device.memory_mib) for device in devices]
