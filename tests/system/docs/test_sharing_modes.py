"""The table of levels in the docs is what a worker reports, on a stub of NVIDIA's driver."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.gpu import SHARING_MODES, GpuSpec, Sharing
from moorage.schemas.job import Request, Run
from moorage.schemas.settings import NO_FILE
from moorage.system.simulated_hosts import simulated_hosts
from moorage.worker.devices.readers.base import Inventory
from moorage.worker.devices.readers.nvml import open_nvml
from moorage.worker.devices.readers.simulated import SimulatedInventory
from moorage.worker.driver import Driver
from moorage.worker.drivers import BUILT_IN
from moorage.worker.drivers.container.docker import DockerDriver, DockerSettings
from moorage.worker.drivers.container.podman import PodmanDriver, PodmanSettings
from moorage.worker.drivers.handler.driver import HandlerDriver
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.kubernetes.driver import KubernetesDriver
from moorage.worker.drivers.loading import find
from moorage.worker.drivers.noop import NoopDriver
from moorage.worker.drivers.policy import Policy
from moorage.worker.drivers.process.driver import ProcessDriver
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.drivers.vm.driver import VmDriver, VmSettings
from moorage.worker.session.attempt_messages import Event, Log
from moorage.worker.settings import WorkerSettings
from moorage.worker.sharing.memory_guard import MemoryGuard
from tests.named_tests import missing
from tests.nvidia.stub import Board, Stub
from tests.release.mutants.files import read_mutants

PAGE = Path(__file__).resolve().parents[3] / "docs/explanation/sharing-modes.md"
PROMISES = PAGE.parents[1] / "promises.md"
IMAGES = ("docker", "podman", "kubernetes")
HOST_IPC = "mps_host_ipc"
MODES: tuple[Sharing, ...] = ("exclusive", "time-slice", "mps")
DRIVERS: tuple[type[Driver], ...] = (
    ProcessDriver, DockerDriver, PodmanDriver, VmDriver, KubernetesDriver, HandlerDriver, NoopDriver,
)  # fmt: skip


class Clock:
    """Of an agent, the little that a guard without attempts needs."""

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
    """The cells by driver, and by driver and setting."""
    rows = re.findall(r"^\| (`\w+`[^|]*) \| ((?:memory|refused).*) \|$", PAGE.read_text(), re.MULTILINE)
    return {row.replace("`", ""): cells.split(" | ") for row, cells in rows}


@pytest.fixture(autouse=True)
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster for the driver kubernetes, which is not asked for anything here."""
    file = tmp_path / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "n"}}
    users = [{"name": "u", "user": {"token": "t"}}]
    config = {"clusters": [cluster], "contexts": [context], "users": users, "current-context": "c"}
    file.write_bytes(msgspec.json.encode(config))
    monkeypatch.setenv("KUBECONFIG", str(file))


def made(folder: Path, *, simulated: bool) -> dict[str, Driver]:
    """Every driver that comes with moorage, as a worker makes it."""
    settings = WorkerSettings(folder, "w1")
    link = SupervisorLink(folder / "supervisor")
    kit = Kit("w1", settings, Policy.of(settings), link, 1, simulated=True)  # it looks for no directory of MPS
    found = find([kind.name for kind in DRIVERS if kind is not HandlerDriver], NO_FILE, simulated=True)
    drivers = {each.kind.name: each.make(kit) for each in found}
    drivers[f"docker, {HOST_IPC}"] = DockerDriver.from_kit(kit._replace(own=DockerSettings(mps_host_ipc=True)))
    drivers[f"podman, {HOST_IPC}"] = PodmanDriver.from_kit(kit._replace(own=PodmanSettings(mps_host_ipc=True)))
    drivers["handler"] = handler = HandlerDriver.__new__(HandlerDriver)
    handler._handlers = {"x": cast(Any, print)}
    if not simulated:
        drivers["vm"] = VmDriver.from_kit(kit._replace(simulated=False, own=VmSettings()))
    return drivers


def refuses(driver: Driver, mode: Sharing, *, simulated: bool) -> bool:
    """Whether no job of the driver has a GPU in this mode, whatever the host has."""
    argv = ["sleep", "1"] if driver.name == "noop" else ["x"]
    run = Run(driver=driver.name, argv=argv, image="i" if driver.name in IMAGES else None)
    try:
        driver.check(Request(run=run, gpu=GpuSpec(sharing=mode)))
    except Refused:
        return True
    return not driver.capabilities.gpu_enabled or (driver.capabilities.simulated_only and not simulated)


async def reported(inventory: Inventory, folder: Path) -> dict[str, list[str]]:
    drivers = made(folder, simulated=inventory.simulated)
    guard = MemoryGuard(Clock(), {}, inventory, drivers, SHARING_MODES, 1.0)
    await guard.open()
    found = {}
    for name, driver in drivers.items():
        levels = guard.levels(driver)
        refused = {mode for mode in MODES if refuses(driver, mode, simulated=inventory.simulated)}
        assert {*driver.modes_refused} <= refused
        found[name] = [
            "refused" if mode in refused else f"memory {levels[mode].memory}, compute {levels[mode].compute}"
            for mode in MODES
        ]
    for name, driver in drivers.items():
        if name.startswith("docker"):
            await driver.close()
    return found


def test_the_table_is_what_a_worker_with_nvidia_gpus_offers_refuses_and_reports(tmp_path: Path) -> None:
    assert {driver.name for driver in DRIVERS} == {"handler", *BUILT_IN}, (
        "each driver that comes with moorage has its row"
    )

    async def scene() -> dict[str, list[str]]:
        inventory = await open_nvml()
        try:
            return await reported(inventory, tmp_path)
        finally:
            inventory.close()

    with Stub(tmp_path, Board("GPU-a")).load():
        assert asyncio.run(scene()) == documented()


def test_nothing_is_guarded_on_simulated_gpus(tmp_path: Path) -> None:
    inventory = SimulatedInventory(simulated_hosts("1xH100", name="sim")[0])
    levels = asyncio.run(reported(inventory, tmp_path))
    assert not [cell for cells in levels.values() for cell in cells if "guarded" in cell]


def rows(page: Path, cells: str) -> list[tuple[str, ...]]:
    """The rows that say how each level is kept: mode, part, level, then the groups of `cells`."""
    row = rf"^\| ([\w-]+(?:, [^|]*)?) \| ([a-z, ]+) \| (hard|guarded|advisory|refused) \| {cells} \|$"
    return re.findall(row, page.read_text(), re.MULTILINE)


def shown() -> list[tuple[str, ...]]:
    return rows(PAGE, r"[^|]+ \| [^|]+")


def proven() -> list[tuple[str, ...]]:
    return rows(PROMISES, r"`(tests/[^`|]+)` \| \*([^*|]+)\*")


def test_each_level_that_is_reported_has_a_row_that_says_how_it_is_kept() -> None:
    told = set()
    for cells in documented().values():
        for mode, cell in zip(MODES, cells, strict=True):
            told |= {(mode, *part.split(" ")) for part in cell.split(", ") if cell != "refused"}
    kept = {(mode.split(",")[0], each, level) for mode, parts, level in shown() for each in parts.split(", ")}
    assert {row for row in kept if row[2] != "refused"} == told


def test_each_row_has_a_test_that_catches_what_would_break_it() -> None:
    assert shown() == [row[:3] for row in proven()]
    caught = {(mutant["name"], test) for mutant in read_mutants() for test in mutant["tests"]}
    wrong = [why for *_, test, _ in proven() if (why := missing(test))]
    wrong += [
        f"{defect}: no mutant of this name is caught by {test}"
        for *_, test, defect in proven()
        if not {(defect, test), (defect, test.partition("::")[0])} & caught
    ]
    assert wrong == []
