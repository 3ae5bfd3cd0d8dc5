"""The driver `process` on a GPU host: the kernel keeps each job to its lease, or the driver does not start it.

The GPUs are made up; their nodes have the numbers of NVIDIA's driver, which is not here: a node that a job may open is
ENXIO, one that it may not is EPERM.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.capabilities import KERNEL, VARIABLE
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request, Run
from moorage.worker.devices.refused_nodes import GpuNodes
from moorage.worker.driver import Assignment
from moorage.worker.drivers.process.driver import ProcessDriver
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.session.attempt_messages import Ended, NotStarted
from tests.system.worker.supervisor_rig import arguments_of
from tests.unit.worker.drivers.process_kit import kit_of
from tests.waiting import until

GPUS = [Device(index, "nvidia", "H100", f"GPU-{index}") for index in range(2)]
NODES = {f"GPU-{index}": [f"/dev/nvidia{index}"] for index in range(2)}
#: exits with the two errors as one number: that of nvidia0 ten times, that of nvidia1 once, 1 for EPERM, 6 for ENXIO
OPENS = """
import os, sys
code = 0
for path in sys.argv[1:]:
    try:
        os.open(path, os.O_RDWR)
    except OSError as error:
        code = 10 * code + error.errno
sys.exit(code)
"""


@pytest.fixture
def nodes(tmp_path: Path) -> list[str]:
    for index in range(2):
        try:
            os.mknod(tmp_path / f"nvidia{index}", 0o020666, os.makedev(195, index))
        except PermissionError:
            pytest.skip("device nodes can be made by root only")
    return [str(tmp_path / f"nvidia{index}") for index in range(2)]


class Site:
    """One driver with its supervisor, and what it has reported."""

    def __init__(self, driver: ProcessDriver) -> None:
        self.driver = driver
        self.reports: list[Any] = []
        driver.attach(self.reports.append, lambda *_: None)

    async def ended(self, argv: list[str], leased: list[Device]) -> int:
        """Run a job to its end; return its exit code."""
        name = ("acme", "job", 0, 1, len(self.reports) + 1)
        gpu = GpuSpec() if leased else None
        mode = "exclusive" if leased else "none"
        self.driver.start([Assignment(name, Request(gpu=gpu, run=Run(argv=argv)), leased, mode)])
        found: list[int] = []

        def is_over() -> bool:
            ends = [each for report in self.reports if isinstance(report, Ended) for each in report.items]
            found[:] = [code for other, code, _ in ends if other == name]
            return bool(found)

        await until(is_over)
        return found[0]


@asynccontextmanager
async def site(tmp_path: Path, proof: str = "cgroup", **fields: Any) -> AsyncIterator[Site]:
    link = SupervisorLink(tmp_path / "s", arguments_of(proof))
    driver = ProcessDriver(kit_of(link, **fields))
    try:
        await driver.open()
        yield Site(driver)
    finally:
        await driver.close()


def opens(nodes: list[str]) -> list[str]:
    return [sys.executable, "-c", OPENS, *nodes]


@pytest.mark.parametrize("proof", ["cgroup", "walk"])
async def test_a_job_opens_the_nodes_of_its_lease_alone(tmp_path: Path, nodes: list[str], proof: str) -> None:
    async with site(tmp_path, proof, gpu_nodes=GpuNodes(GPUS, NODES), device_fence="require") as here:
        assert here.driver.can().devices == KERNEL
        assert await here.ended(opens(nodes), [GPUS[0]]) == 61
        assert await here.ended(opens(nodes), [GPUS[1]]) == 16
        assert await here.ended(opens(nodes), GPUS) == 66
        assert await here.ended(opens(nodes), []) == 11


async def test_without_a_fence_a_variable_alone_names_its_gpus(tmp_path: Path, nodes: list[str]) -> None:
    async with site(tmp_path) as here:
        assert here.driver.can().devices == VARIABLE
        assert await here.ended(opens(nodes), [GPUS[0]]) == 66


async def test_what_cannot_be_fenced_is_told_and_required_not_to_start(tmp_path: Path) -> None:
    unknown = GpuNodes(GPUS, {"GPU-0": ["/dev/nvidia0"]})
    async with site(tmp_path / "auto", gpu_nodes=unknown) as here:
        assert here.driver.can().devices == VARIABLE
        assert await here.ended(["true"], [GPUS[0]]) == 0
    with pytest.raises(Refused, match=r"cannot keep jobs to their GPUs here: .*GPU-1") as refused:
        async with site(tmp_path / "require", gpu_nodes=unknown, device_fence="require"):
            pass
    assert refused.value.problem.field == "$.device_fence"


class Changing(GpuNodes):
    """A host on which something changes once the worker runs."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        super().__init__(GPUS, NODES)
        self._answer = answer
        self.runs = False

    def refused_to(self, leased: Any) -> Any:
        return self._answer() if self.runs else super().refused_to(leased)


async def test_a_fence_that_fails_at_a_start_refuses_the_placement_with_the_reason(tmp_path: Path) -> None:
    host = Changing(lambda: ((195, 3, 2),))
    async with site(tmp_path, gpu_nodes=host) as here:
        host.runs = True
        name = ("acme", "job", 0, 1, 1)
        here.driver.start([Assignment(name, Request(run=Run(argv=["true"])), [], "none")])
        async with asyncio.timeout(60):
            await until(lambda: any(isinstance(each, NotStarted) for each in here.reports))
        [report] = here.reports
        [(told, why)] = report.items
        assert (told, report.code) == (name, 0)
        assert why.startswith("start-failed: devices: ")
        assert "not a range of devices" in why
