"""Which device nodes are refused to which lease, on made-up hosts: /proc/devices and sysfs are written by the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.schemas.frames import Device
from moorage.system.device_fence import MINOR_MAX, NodeRange, merged
from moorage.worker.devices.readers.nvml import open_nvml
from moorage.worker.devices.refused_nodes import GpuNodes, NodesUnknown
from tests.nvidia.stub import Board, Slice, Stub

DEVICES = """Character devices:
  1 mem
 10 misc
195 nvidia
195 nvidiactl
226 drm
234 nvidia-uvm
235 nvidia-caps
236 vfio
237 kfd

Block devices:
  7 loop
237 device-mapper
"""
A = Device(0, "nvidia", "H100", "GPU-a", pci="00000000:17:00.0")
B = Device(1, "nvidia", "H100", "GPU-b", pci="00000000:2A:00.0")
AMD = Device(0, "amd", "MI300X", "GPU-c", pci="00000000:63:00.0")
NODES = {
    "GPU-a": ["/dev/nvidia3"],  # its minor is not its index
    "GPU-b": ["/dev/nvidia0"],
    "GPU-c": ["/dev/dri/renderD130", "/dev/dri/card2"],
}
CONSOLE = "0000:03:00.0"


def host(root: Path, devices: str = DEVICES) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/devices").write_text(devices)
    cards = [("0000:17:00.0", "0x10de"), ("0000:2a:00.0", "0x10de"), ("0000:63:00.0", "0x1002"), (CONSOLE, "0x1a03")]
    for number, (address, vendor) in enumerate(cards):
        folder = root / "sys/devices/pci" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        for name, minor in ((f"card{number}", number), (f"renderD{128 + number}", 128 + number)):
            node = root / "sys/class/drm" / name
            node.mkdir(parents=True)
            (node / "dev").write_text(f"226:{minor}\n")
            (node / "device").symlink_to(folder)
    (root / "sys/class/drm/card0-DP-1").mkdir()
    return root


def may_open(refused: tuple[NodeRange, ...], major: int, minor: int = 0) -> bool:
    return not any(each.major == major and each.first <= minor <= each.last for each in refused)


@pytest.fixture
def nodes(tmp_path: Path) -> GpuNodes:
    return GpuNodes([A, B, AMD], NODES, host(tmp_path))


def test_a_lease_opens_its_own_gpu_and_what_its_vendor_shares(nodes: GpuNodes) -> None:
    refused = nodes.refused_to([A])
    assert [minor for minor in range(256) if may_open(refused, 195, minor)] == [3, 254, 255]
    assert may_open(refused, 234), "nvidia-uvm"
    assert not may_open(refused, 235, 1), "the rights of MIG, of which it has none"
    assert not may_open(refused, 237), "KFD is AMD's"
    assert [minor for minor in range(256) if not may_open(refused, 226, minor)] == [1, 2, 129, 130]


def test_a_lease_of_another_vendor_opens_nothing_of_nvidias(nodes: GpuNodes) -> None:
    refused = nodes.refused_to([AMD])
    assert not any(may_open(refused, 195, minor) for minor in range(256))
    assert not may_open(refused, 234)
    assert may_open(refused, 237)
    assert [minor for minor in range(256) if not may_open(refused, 226, minor)] == [0, 1, 128, 129]


def test_an_attempt_without_a_gpu_opens_no_node_of_one(nodes: GpuNodes) -> None:
    refused = nodes.refused_to([])
    assert not any(may_open(refused, major) for major in (195, 234, 235, 236, 237))
    assert [minor for minor in range(256) if not may_open(refused, 226, minor)] == [0, 1, 2, 128, 129, 130]


def test_several_gpus_are_several_minors(nodes: GpuNodes) -> None:
    refused = nodes.refused_to([A, B])
    assert [minor for minor in range(254) if may_open(refused, 195, minor)] == [0, 3]


@pytest.mark.parametrize("leased", [[], [A], [AMD], [A, B, AMD]])
def test_vfio_is_refused_to_all_and_other_devices_to_none(nodes: GpuNodes, leased: list[Device]) -> None:
    refused = nodes.refused_to(leased)
    assert not may_open(refused, 236, 7)
    assert not may_open(refused, 10, 196)
    assert may_open(refused, 10, 229), "fuse"
    assert may_open(refused, 1, 3)
    assert may_open(refused, 226, 3), "the console's graphics is no GPU"
    assert merged(refused)


def test_the_majors_are_read_at_each_start(tmp_path: Path) -> None:
    nodes = GpuNodes([A], NODES, host(tmp_path))
    assert may_open(nodes.refused_to([]), 500)
    (tmp_path / "proc/devices").write_text(DEVICES.replace("234 nvidia-uvm", "500 nvidia-uvm"))
    assert not may_open(nodes.refused_to([]), 500)


def test_without_the_driver_loaded_its_fixed_major_is_refused_all_the_same(tmp_path: Path) -> None:
    refused = GpuNodes([AMD], NODES, host(tmp_path, "Character devices:\n  1 mem\n")).refused_to([AMD])
    assert not may_open(refused, 195, 0)


def test_what_cannot_be_told_apart_is_not_refused_by_half(tmp_path: Path) -> None:
    nodes = GpuNodes([A, B], {"GPU-b": ["/dev/nvidia0"]}, host(tmp_path / "a"))
    assert "GPU-a" in nodes.trouble()
    with pytest.raises(NodesUnknown, match="GPU-a"):
        nodes.refused_to([A])
    assert "/proc/devices" in GpuNodes([A], NODES, tmp_path / "none").trouble()
    assert GpuNodes([A, B, AMD], NODES, host(tmp_path / "b")).trouble() == ""


def _rights(proc: Path, gpu: int, slices: dict[int, tuple[int, int]]) -> None:
    for instance, (access, compute) in slices.items():
        folder = proc / f"driver/nvidia/capabilities/gpu{gpu}/mig/gi{instance}"
        (folder / "ci0").mkdir(parents=True)
        (folder / "access").write_text(f"DeviceFileMinor: {access}\nDeviceFileMode: 292\n")
        (folder / "ci0/access").write_text(f"DeviceFileMinor: {compute}\nDeviceFileMode: 292\n")


async def test_a_slice_of_mig_opens_its_gpu_and_its_own_rights_alone(tmp_path: Path) -> None:
    root = host(tmp_path / "root")
    _rights(root / "proc", 0, {0: (3, 4), 3: (30, 31)})
    listed = root / "proc/driver/nvidia-caps/mig-minors"
    listed.parent.mkdir(parents=True)
    listed.write_text("config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi14/ci7/access 139\n")
    with Stub(tmp_path / "stub", Board("GPU-a", slices=[Slice("MIG-a", 0), Slice("MIG-b", 3)])).load():
        inventory = await open_nvml(proc=root / "proc")
        devices = inventory.devices()
        own = {device.uuid: inventory.nodes(slot) for slot, device in enumerate(devices)}
        assert own["MIG-b"] == ("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31")
        nodes = GpuNodes(devices, own, root)
        [_, b] = devices
        refused = nodes.refused_to([b])
        assert nodes.trouble() == ""
        assert [minor for minor in range(140) if may_open(refused, 235, minor)] == [30, 31]
        assert [minor for minor in range(254) if may_open(refused, 195, minor)] == [0]
        listed.unlink()
        assert not may_open(nodes.refused_to([b]), 235, MINOR_MAX)
        inventory.close()


async def test_a_slice_whose_rights_the_driver_does_not_tell_is_trouble(tmp_path: Path) -> None:
    root = host(tmp_path / "root")
    with Stub(tmp_path / "stub", Board("GPU-a", slices=[Slice("MIG-a", 0)])).load():
        inventory = await open_nvml(proc=root / "proc")
        nodes = GpuNodes(inventory.devices(), {"MIG-a": inventory.nodes(0)}, root)
        assert "MIG slice MIG-a" in nodes.trouble()
        inventory.close()
