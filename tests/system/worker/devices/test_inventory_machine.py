"""NVML and DRM as one inventory: one order of slots, each question to the part that has the device."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import msgspec
import pytest

from moorage.schemas.errors import Refused
from moorage.system.simulated_hosts import simulated_hosts
from moorage.worker import EmbeddedWorker, WorkerSettings
from moorage.worker.agent import embed
from moorage.worker.devices.device_health import DeviceHealth
from moorage.worker.devices.pool import GpuPool
from moorage.worker.devices.readers import GROUP
from moorage.worker.devices.readers.faults import Fault, Gravity
from moorage.worker.devices.readers.machine import DEVICES_MAX, CombinedInventory, open_machine, sysfs_address
from moorage.worker.devices.readers.nvml import NvmlUnavailable
from moorage.worker.devices.readers.simulated import SimulatedInventory
from tests.nvidia.stub import Board, Stub
from tests.system.worker.no_inventory import NoInventory
from tests.unit.docs.markdown import DOCS, page
from tests.unit.worker.made_up_sys import MIB, MadeUpMachine

#: nvml.h: NVML_ERROR_GPU_IS_LOST
GPU_IS_LOST = 15
HOW_TO = DOCS / "how-to" / "write-your-own-driver.md"


def simulated(word: str, name: str) -> SimulatedInventory:
    return SimulatedInventory(simulated_hosts(word, name)[0])


async def test_nvidia_comes_first_and_each_vendor_counts_for_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = MadeUpMachine(tmp_path)
    machine.pci(128, "0000:17:00.0", 0x10DE, 0x2330, "nvidia")
    machine.pci(129, "0000:18:00.0", 0x10DE, 0x2330, "nvidia")
    folder = machine.amd(130, "0000:03:00.0")
    machine.pci(131, "0000:00:02.0", 0x8086, 0xA780, "i915")
    stub = Stub(tmp_path / "stub", Board("GPU-a", used_mib=7), Board("GPU-b", errors={"handle": GPU_IS_LOST}))
    with stub.load():
        await one_of_each(tmp_path, machine, folder, caplog)


async def one_of_each(tmp_path: Path, machine: MadeUpMachine, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    inventory = await open_machine("f00d" * 8, root=tmp_path)
    found = [(device.vendor, device.index, device.uuid) for device in inventory.devices()]
    assert found == [("nvidia", 0, "GPU-a"), ("amd", 0, "GPU-a1b2c3d4e5f60082"), ("intel", 0, "0000:00:02.0")]
    GpuPool(inventory.devices()).validate()
    assert not inventory.simulated
    assert [inventory.memory_baseline_mib(slot) for slot in range(3)] == [7, 290, 0]
    machine.write(folder / "mem_info_vram_used", 900 * MIB)
    assert [reading.memory_used_mib for reading in await inventory.sample()] == [7, 900, 0]
    assert [await inventory.memory_is_free(slot) for slot in range(3)] == [True, False, True]
    faults = [record.getMessage() for record in caplog.records]
    assert len(faults) == 2
    assert faults[0].startswith("a device is not offered to jobs: device 1: ")
    assert faults[1] == (
        "a device is not offered to jobs: renderD129: 0000:18:00.0 has NVIDIA's driver, and NVML does not list it"
    )
    inventory.close()
    assert {reading.health for reading in await inventory.sample()} == {"unresponsive"}


async def test_an_embedded_worker_has_the_devices_of_all_vendors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = MadeUpMachine(tmp_path)
    machine.amd(130, "0000:03:00.0")
    machine.pci(131, "0000:00:02.0", 0x8086, 0xA780, "i915")
    monkeypatch.setattr(embed, "open_machine", partial(open_machine, root=tmp_path))
    with Stub(tmp_path / "stub", Board("GPU-a")).load():
        _, inventory = await EmbeddedWorker(None, WorkerSettings(tmp_path, "w1"))._machine("w1")
        assert [device.vendor for device in inventory.devices()] == ["nvidia", "amd", "intel"]
        inventory.close()


async def test_a_cdi_spec_that_is_older_than_the_devices_is_seen_until_it_is_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "etc/cdi/nvidia.json"
    file.parent.mkdir(parents=True)

    def write(*names: str) -> None:
        devices = [{"name": name, "containerEdits": {"env": ["A=b"]}} for name in names]
        file.write_bytes(msgspec.json.encode({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}))

    with Stub(tmp_path / "stub", Board("GPU-a"), Board("GPU-b")).load():
        inventory = await open_machine("f00d" * 8, root=tmp_path)
        try:
            assert [reading.faults for reading in await inventory.sample()] == [(), ()], "a host without CDI"
            write("GPU-a", "all")
            told = Fault("cdi", Gravity.NOTE, f"no CDI spec names it: nvidia-ctk cdi generate --output={file}")
            readings = await inventory.sample()
            assert [reading.faults for reading in readings] == [(), (told,)]
            health = DeviceHealth(inventory.devices(), boot="b", now=0.0)
            health.read(1, readings[1], 0.0)
            assert health.verdict(1, 0.0).kind == "ok", "jobs without CDI use it"
            write("GPU-a", "GPU-b", "all")
            assert [reading.faults for reading in await inventory.sample()] == [(), ()]
        finally:
            inventory.close()


async def test_a_machine_without_gpus_is_no_error(tmp_path: Path) -> None:
    with Stub(tmp_path / "stub", extra=("fail call=nvmlInitWithFlags code=12",)).load():  # no library
        inventory = await open_machine("f00d" * 8, root=tmp_path)
        assert (inventory.devices(), await inventory.sample()) == ([], [])


async def test_a_driver_that_fails_is_an_error_also_where_others_answer(tmp_path: Path) -> None:
    MadeUpMachine(tmp_path).amd(128)
    with (
        Stub(tmp_path / "stub", extra=("fail call=nvmlInitWithFlags code=999",)).load(),
        pytest.raises(NvmlUnavailable),
    ):
        await open_machine("f00d" * 8, root=tmp_path)


async def test_a_package_offers_a_reader_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = [each for each in page(HOW_TO).blocks if each.title == "accels.py"]
    (line,) = [each for each in page(HOW_TO).blocks if "moorage.readers" in each.body]
    package = tmp_path / "package"
    (package / "accels-1.0.dist-info").mkdir(parents=True)
    (package / "accels.py").write_text(example.body)
    (name, value) = re.findall(r'^(\w+) = "(.*)"$', line.body, re.M)[0]
    (package / "accels-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: accels\nVersion: 1.0\n")
    (package / "accels-1.0.dist-info/entry_points.txt").write_text(f"[{GROUP}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(package)
    root = tmp_path / "host"
    for number, pci in enumerate(("0000:19:00.0", "0000:03:00.0")):
        device = root / "sys/devices" / pci
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1da3\n")
        (device / "device").write_text("0x1020\n")
        folder = root / f"sys/class/accel/accel{number}"
        folder.mkdir(parents=True)
        (folder / "device").symlink_to(device)
    MadeUpMachine(root).amd(130, "0000:03:00.0")  # a card that another reader lists
    with Stub(tmp_path / "stub", Board("GPU-a")).load():
        inventory = await open_machine("f00d" * 8, ("nvidia", "drm", name), root=root)
        try:
            found = [(device.vendor, device.index, device.name) for device in inventory.devices()]
            assert found[0][0] == "nvidia"
            assert found[1][0] == "amd"
            assert found[2:] == [("accel", 0, "accel 1da3-1020")]
            assert inventory.nodes(2) == ("/dev/accel/accel0",)
            assert await inventory.memory_is_free(2)
            (root / "sys/class/accel/accel0").rename(root / "gone")
            assert [reading.health for reading in await inventory.sample()][2] == "unresponsive"
        finally:
            inventory.close()
        with pytest.raises(Refused, match="no reader of devices accel") as refused:
            await open_machine("f00d" * 8, ("accel",), root=root)
        assert refused.value.problem.allowed == "nvidia, drm, accels, module:Class of your own"
        (root / "sys/class/accel/accel1/device/vendor").unlink()
        with pytest.raises(Refused, match="the reader of devices accels failed: FileNotFoundError"):
            await open_machine("f00d" * 8, (name,), root=root)


async def test_slots_that_are_not_there(tmp_path: Path) -> None:
    inventory = CombinedInventory((NoInventory(), simulated("2xH100", "a")))
    for slot in (-1, 2):
        with pytest.raises(IndexError):
            inventory.memory_baseline_mib(slot)
        with pytest.raises(IndexError):
            await inventory.memory_is_free(slot)


async def test_no_more_devices_than_a_worker_has_slots() -> None:
    inventory = CombinedInventory((simulated("40xH100", "a"), simulated("40xL4", "b")))
    assert inventory.simulated
    assert len(inventory.devices()) == len(await inventory.sample()) == DEVICES_MAX
    with pytest.raises(IndexError):
        inventory.memory_baseline_mib(DEVICES_MAX)


def test_a_device_is_listed_once() -> None:
    with pytest.raises(ValueError, match="the same device"):
        CombinedInventory((simulated("2xH100", "a"), simulated("2xH100", "a")))


@pytest.mark.parametrize(
    ("nvml", "sysfs"),
    [("00000000:17:00.0", "0000:17:00.0"), ("00010000:E1:00.1", "10000:e1:00.1"), ("0000:03:00.0", "0000:03:00.0")],
)
def test_addresses(nvml: str, sysfs: str) -> None:
    assert sysfs_address(nvml) == sysfs
