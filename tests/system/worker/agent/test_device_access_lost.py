"""A running job that the kernel keeps from its own GPU: real processes in a real cgroup, with a made node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Device, Output
from moorage.system.cgroup import CgroupBase
from moorage.system.device_fence import NodeRange, attach
from moorage.worker.agent.device_access_lost import CUT_OFF, NOTE, CutOffWatch
from moorage.worker.devices.device_watch import DeviceWatch
from moorage.worker.devices.pool import GpuPool
from moorage.worker.devices.readers.base import SlotReading
from moorage.worker.driver import Driver
from moorage.worker.session.attempt_messages import Attempt
from tests.system.worker.no_inventory import NoInventory
from tests.unit.worker.attempt_bench import Bench, name_of, place

GPU = Device(0, "nvidia", "NVIDIA H100", "GPU-a", memory_mib=81559)


class Container(Driver):
    """A driver with one container, in a cgroup that the test has made."""

    name = "process"

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid

    def attempts_of(self, pids: Collection[int]) -> dict[int, AttemptName | None]:
        return {pid: name_of("train") for pid in pids if pid == self.pid}


class OneGpu(NoInventory):
    """One GPU, whose file is a node that the test has made."""

    def __init__(self, node: Path) -> None:
        self.node = node

    def devices(self) -> list[Device]:
        return [GPU]

    def nodes(self, slot: int) -> tuple[str, ...]:
        return (str(self.node),)


@pytest.fixture
def base() -> Iterator[CgroupBase]:
    made = CgroupBase.open(f"moorage-cut-off-{os.getpid()}")
    if made is None or os.geteuid() != 0:
        pytest.skip("it takes root and a writable cgroup v2")
    yield made
    made.kill()
    while not made.remove():
        made.kill()


async def test_a_container_that_lost_its_gpu_is_seen_and_its_owner_told_once(base: CgroupBase, tmp_path: Path) -> None:
    node = tmp_path / "nvidia0"
    os.mknod(node, 0o020666, os.makedev(195, 0))
    bench = Bench()
    bench.join()
    name = name_of("train")
    bench.want(place(name))
    held: dict[AttemptName, Attempt] = dict(bench.attempts.held)
    group = base.create("container", None, None)[0]
    program = await asyncio.create_subprocess_exec("/bin/sleep", "600")
    try:
        Path(group.path, "cgroup.procs").write_text(str(program.pid))
        watch = DeviceWatch([GPU], "b", GpuPool([GPU]), 60.0, 0.0, None, lambda slot, pids, is_leased: pids)
        told: list[str] = []

        def publish(to: AttemptName, frame: bytes) -> None:
            told.append(msgspec.json.decode(frame, type=Output).note)

        looks = CutOffWatch(OneGpu(node), {"process": Container(program.pid)}, held, watch, publish)
        held[name].phase = "running"
        await looks.look()
        assert (watch.warning(0, SlotReading()), told) == ("", [])
        attach(group.path, (NodeRange(195, 0, 0),))  # as after a daemon-reload, without the GPU
        await looks.look()
        await looks.look()
        assert (watch.warning(0, SlotReading()), told) == (f"cut-off: {CUT_OFF}", [NOTE])
        held.clear()
        await looks.look()
        assert watch.warning(0, SlotReading()) == "", "the next job's container has it"
    finally:
        program.kill()
        await program.wait()
