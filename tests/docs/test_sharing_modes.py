"""The table of levels in the docs is what a worker reports, on a stub of NVIDIA's driver."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from moorage.schemas.gpu import SHARING_MODES
from moorage.worker.drivers import BUILT_IN
from moorage.worker.drivers.base import Driver
from moorage.worker.drivers.docker import DockerDriver
from moorage.worker.drivers.handler import HandlerDriver
from moorage.worker.drivers.kubernetes import KubernetesDriver
from moorage.worker.drivers.noop import NoopDriver
from moorage.worker.drivers.podman import PodmanDriver
from moorage.worker.drivers.process import ProcessDriver
from moorage.worker.drivers.vm import VmDriver
from moorage.worker.inventory.base import Inventory
from moorage.worker.inventory.nvml import open_nvml
from moorage.worker.inventory.simulated import SimulatedInventory
from moorage.worker.inventory.simulated_hosts import simulated_hosts
from moorage.worker.member_messages import Event, Log
from moorage.worker.memory_guard import MemoryGuard
from tests.nvidia.stub import Board, Stub

PAGE = Path(__file__).resolve().parents[2] / "docs/explanation/sharing-modes.md"
DRIVERS: tuple[type[Driver], ...] = (
    ProcessDriver, DockerDriver, PodmanDriver, VmDriver, KubernetesDriver, HandlerDriver, NoopDriver,
)  # fmt: skip


class Clock:
    """Of an agent, the little that a guard without members needs."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()

    def now(self) -> float:
        return time.monotonic()

    def post(self, subject: str, payload: bytes, reply: str = "") -> None: ...
    def enqueue(self, event: Event) -> None: ...
    def wake(self) -> None: ...
    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...
    def say(self, line: Log) -> None: ...
    def call_driver(self, driver: Driver, step: Callable[[], object]) -> str:
        step()
        return ""


def documented() -> dict[str, list[str]]:
    """The cells by driver."""
    rows = re.findall(r"^\| `(\w+)` \| (memory .*) \|$", PAGE.read_text(), re.MULTILINE)
    return {driver: cells.split(" | ") for driver, cells in rows}


async def reported(inventory: Inventory) -> dict[str, list[str]]:
    drivers = {driver.name: driver.__new__(driver) for driver in DRIVERS}
    guard = MemoryGuard(Clock(), {}, inventory, drivers, SHARING_MODES, 1.0)
    await guard.open()
    found = {}
    for name, driver in drivers.items():
        levels = [guard.levels(driver)[mode] for mode in ("exclusive", "time-slice", "mps")]
        found[name] = [f"memory {level.memory}, compute {level.compute}" for level in levels]
    return found


def test_the_table_is_what_a_worker_with_nvidia_gpus_reports(tmp_path: Path) -> None:
    assert {driver.name for driver in DRIVERS} == {"handler", *BUILT_IN}, (
        "each driver that comes with moorage has its row"
    )

    async def scene() -> dict[str, list[str]]:
        inventory = await open_nvml()
        try:
            return await reported(inventory)
        finally:
            inventory.close()

    with Stub(tmp_path, Board("GPU-a")).load():
        assert asyncio.run(scene()) == documented()


def test_nothing_is_guarded_on_simulated_gpus() -> None:
    inventory = SimulatedInventory(simulated_hosts("1xH100", name="sim")[0])
    levels = asyncio.run(reported(inventory))
    assert not [cell for cells in levels.values() for cell in cells if "guarded" in cell]
