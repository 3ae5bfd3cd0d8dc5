"""The bound of the processors' latency: said when a job comes, lifted after the last, and gone with who said it.

A pipe takes the device's place, so that what is written can be read; the loop's clock is a simulated one.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from moorage.bus.connection import Connection
from moorage.bus.cpu_latency import DEVICE, LINGER_S, CpuLatency
from moorage.bus.simulated import SimulatedBus
from moorage.bus.simulated_clock import SimulatedClock
from moorage.bus.simulated_network import FaultyNetwork
from moorage.scheduler.service import Scheduler
from moorage.schemas.errors import Refused
from moorage.schemas.subjects import Subjects
from tests.waiting import until

NO_BOUND_US = 2_000_000_000


class Device:
    """The other end of the pipe."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def said(self) -> list[int]:
        """The bounds that were said since it was asked last, in µs."""
        try:
            words = os.read(self._end, 4096)
        except BlockingIOError:
            return []
        return [word for (word,) in struct.iter_unpack("=i", words)]

    @property
    def is_open(self) -> bool:
        """Whether somebody holds it, who has said nothing since `said`."""
        try:
            return os.read(self._end, 1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        os.close(self._end)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path / "cpu_dma_latency")
    yield made
    made.close()


def test_it_is_said_once_and_lifted_after_the_last_call(device: Device) -> None:
    async def scene() -> None:
        latency = CpuLatency(7, device.path)
        assert device.said() == [], "nothing is bounded by opening it"
        latency.hold()
        assert device.said() == [7]
        for _ in range(3):
            await asyncio.sleep(LINGER_S * 0.6)
            latency.hold()
        assert device.said() == [], "it holds still"
        await asyncio.sleep(LINGER_S * 0.6)
        assert latency.holds
        await asyncio.sleep(LINGER_S)
        assert (device.said(), latency.holds) == ([NO_BOUND_US], False)
        latency.hold()
        assert device.said() == [7]
        latency.close()
        latency.close()
        assert not device.is_open, "the kernel lifts what is said over a file that is closed"
        latency.hold()
        assert not latency.holds

    SimulatedClock().run(scene())


def test_where_it_cannot_be_said_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        CpuLatency(0, tmp_path / "nothing")
    problem = refused.value.problem
    assert problem.message == f"cpu_latency_us needs {tmp_path / 'nothing'}: No such file or directory"
    assert "run as root" in problem.next


def test_the_kernel_takes_it_or_says_why_not() -> None:
    async def scene() -> int:
        latency = CpuLatency(0)
        latency.hold()
        found = struct.unpack("=i", DEVICE.read_bytes()[:4])[0]
        latency.close()
        return int(found)

    if os.access(DEVICE, os.R_OK | os.W_OK):
        assert asyncio.run(scene()) == 0
    else:
        with pytest.raises(Refused):
            CpuLatency(0)


def test_a_scheduler_holds_it_for_a_submit_and_for_nothing_else(device: Device) -> None:
    bus, subjects = SimulatedBus(FaultyNetwork(3, delay_ms=(0.2, 0.4))), Subjects()

    async def scene() -> None:
        world, ledger = bus.connect("one"), bus.connect("one", account="ledger")
        latency = CpuLatency(0, device.path)
        scheduler = Scheduler(
            cast("Connection", world), cast("Connection", ledger), subjects=subjects, name="one", cpu_latency=latency
        )
        running = asyncio.ensure_future(scheduler.run())
        await until(scheduler.leading.is_set, 60)
        caller = bus.connect("caller")
        await caller.request(subjects.api("acme", "ls"), b"{}", 30)
        await asyncio.sleep(5)
        assert device.said() == [], "questions and heartbeats start nothing"
        body = json.dumps({"job": "j", "gpu": {}, "run": {"argv": ["true"]}}).encode()
        await caller.request(subjects.api("acme", "submit"), body, 30)
        assert device.said() == [0], "before its record was written"
        await asyncio.sleep(1)
        assert device.said() == [NO_BOUND_US]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        latency.close()

    SimulatedClock().run(scene())
