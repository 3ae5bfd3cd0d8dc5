"""The health of real NVIDIA devices: what a well one says, and that its events can be waited for."""

from __future__ import annotations

import asyncio
import time

import pytest

from moorage.worker.devices.device_health import DeviceHealth
from moorage.worker.devices.readers.nvml import open_nvml

pytestmark = pytest.mark.gpu


async def test_a_well_device_is_well_and_its_events_are_waited_for() -> None:
    found = await open_nvml()
    heard: list[object] = []
    found.watch(lambda slot, fault: heard.append((slot, fault)))
    readings = await found.sample()
    book = DeviceHealth(found.devices(), boot="b", now=0.0)
    for slot, reading in enumerate(readings):
        book.read(slot, reading, 0.0)
    assert book.unwell(0.0) == [], [(reading.faults, reading.uncorrected_errors) for reading in readings]
    await asyncio.sleep(2.5)  # two waits of the event set
    assert heard == []
    began_s = time.monotonic()
    found.close()
    assert time.monotonic() - began_s < 1, "closing waits for nobody"
