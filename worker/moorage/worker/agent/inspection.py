"""Compare a worker's devices with its leases: find processes and memory where moorage has no job.

Without I/O: it gets readings, and the pool's slots before and after them; a slot that changed meanwhile is not judged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from moorage.schemas.frames import Device, Finding
from moorage.worker.devices.pool import SlotState
from moorage.worker.devices.readers.base import MPS_COMM, SlotReading, is_free

FINDINGS_MAX: Final = 256


def inspect(
    devices: Sequence[Device],
    before: Sequence[SlotState],
    after: Sequence[SlotState],
    readings: Sequence[SlotReading],
    baselines_mib: Sequence[int],
) -> tuple[list[Finding], int]:
    """Return the findings in slot order, at most `FINDINGS_MAX`, and how many more there were.

    Left out are slots that changed meanwhile, slots in quarantine, whose use is known, and slots that are not lent,
    whose use is the service's own. This process itself is not foreign: it may keep its context on every device.
    """
    found: list[Finding] = []
    for slot, device in enumerate(devices):
        state, reading = after[slot], readings[slot]
        if before[slot] != state or state.quarantine or not state.lent:
            continue
        if state.sharers:
            if reading.health == "unresponsive":
                found.append(Finding("nvml-missing", slot, device.uuid))
            continue
        others = [one for one in reading.processes if one.pid != os.getpid() and not one.name.startswith(MPS_COMM)]
        found += [Finding("nvml-foreign", slot, device.uuid, one.pid, one.name, one.memory_mib or 0) for one in others]
        if not reading.processes and reading.health != "unresponsive" and not is_free(reading, baselines_mib[slot]):
            held_mib = reading.memory_used_mib - baselines_mib[slot]
            found.append(Finding("nvml-memory", slot, device.uuid, memory_mib=held_mib))
    return found[:FINDINGS_MAX], max(0, len(found) - FINDINGS_MAX)
