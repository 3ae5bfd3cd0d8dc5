"""AMD, Intel and other devices in made-up trees of sysfs: what is listed, what is read, and who holds what."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.frames import Device
from moorage.worker.devices.readers.base import FREE_TOLERANCE_MIB, DeviceProcess
from moorage.worker.devices.readers.drm import BASELINE_ASSUMED_MIB, DrmInventory, DrmUnavailable, open_drm
from moorage.worker.devices.readers.drm_cards import kfd_gpus
from moorage.worker.devices.readers.drm_clients import HELD_MIB_MIN, find_clients
from moorage.worker.devices.readers.faults import Health
from tests.unit.worker.made_up_sys import MIB, MadeUpMachine
from tests.waiting import until


@pytest.fixture
def machine(tmp_path: Path) -> MadeUpMachine:
    return MadeUpMachine(tmp_path)


async def opened(machine: MadeUpMachine, **more: Any) -> DrmInventory:
    return await open_drm(root=machine.root, **more)


def named(inventory: DrmInventory) -> list[tuple[str, int, str]]:
    return [(device.vendor, device.index, device.uuid) for device in inventory.devices()]


# ------------------------------------------------------------------------------------------------ what is listed


async def test_an_amd_device_is_described(machine: MadeUpMachine) -> None:
    machine.amd(128)
    machine.kfd(128)
    inventory = await opened(machine)
    assert inventory.devices() == [
        Device(
            0,
            "amd",
            "AMD Instinct MI300X OAM",
            "GPU-a1b2c3d4e5f60080",
            196_592,
            "00000000:03:00.0",
            1,
            "gfx942",
        )
    ]
    assert inventory.nodes(0)[0] == "/dev/dri/renderD128"
    assert inventory.faults == []
    assert not inventory.simulated


async def test_a_machine_without_drm_has_no_devices(tmp_path: Path) -> None:
    inventory = await open_drm(root=tmp_path)
    assert inventory.devices() == []
    assert await inventory.sample() == []


async def test_amd_indices_are_rocms_own(machine: MadeUpMachine) -> None:
    """ROCm counts in the order of KFD's topology, also what this container has no device file of."""
    machine.amd(128, "0000:83:00.0")
    machine.amd(129, "0000:03:00.0")
    machine.amd(130, "0000:43:00.0", node=False)
    machine.amd(131, "0000:01:00.0", unique_id=None)  # too old for ROCm
    machine.kfd(130, 128, 129)
    inventory = await opened(machine)
    assert named(inventory) == [
        ("amd", 1, "GPU-a1b2c3d4e5f60080"),
        ("amd", 2, "GPU-a1b2c3d4e5f60081"),
        ("amd", 3, "0000:01:00.0"),
    ]


async def test_without_kfd_the_order_is_that_of_the_addresses(machine: MadeUpMachine) -> None:
    machine.amd(128, "0001:03:00.0", unique_id=None)
    machine.amd(129, "0000:c3:00.0", unique_id=None)
    machine.amd(130, "0000:03:00.0", unique_id=None)
    assert named(await opened(machine)) == [
        ("amd", 0, "0000:03:00.0"),
        ("amd", 1, "0000:c3:00.0"),
        ("amd", 2, "0001:03:00.0"),
    ]


@pytest.mark.parametrize(
    ("text", "uuid"),
    [
        ("51ccd2f89c1b0a7e", "GPU-51ccd2f89c1b0a7e"),
        ("CCD2F89C1B0A7E", "GPU-00ccd2f89c1b0a7e"),
        ("0x51ccd2f89c1b0a7e", "GPU-51ccd2f89c1b0a7e"),
        ("0", "0000:03:00.0"),
        ("", "0000:03:00.0"),
        ("not a number", "0000:03:00.0"),
        (None, "0000:03:00.0"),
    ],
)
async def test_an_amd_uuid_is_as_rocm_prints_it(machine: MadeUpMachine, text: str | None, uuid: str) -> None:
    machine.amd(128, unique_id=text)
    assert (await opened(machine)).devices()[0].uuid == uuid


async def test_a_number_that_two_devices_tell_names_neither(machine: MadeUpMachine) -> None:
    machine.amd(128, "0000:03:00.0", unique_id="77")
    machine.amd(129, "0000:03:02.0", unique_id="77")
    assert [device.uuid for device in (await opened(machine)).devices()] == ["0000:03:00.0", "0000:03:02.0"]


async def test_an_integrated_intel_device_has_no_memory_of_its_own(machine: MadeUpMachine) -> None:
    machine.pci(128, "0000:00:02.0", 0x8086, 0xA780, "i915", numa_node=-1)
    found = (await opened(machine)).devices()
    assert found == [Device(0, "intel", "Intel 8086:a780", "0000:00:02.0", 0, "00000000:00:02.0", -1)]


@pytest.mark.parametrize(
    ("driver", "files", "memory_mib"),
    [
        ("xe", {"tile0__physical_vram_size_bytes": 64 * MIB, "tile1__physical_vram_size_bytes": 64 * MIB}, 128),
        ("i915", {"drm__card0__lmem_total_bytes": 16_288 * MIB}, 16_288),
        ("xe", {}, 0),
    ],
)
async def test_intel_memory_where_a_file_tells_it(
    machine: MadeUpMachine, driver: str, files: dict[str, Any], memory_mib: int
) -> None:
    machine.pci(128, "0000:03:00.0", 0x8086, 0x56A0, driver, **files)
    assert (await opened(machine)).devices()[0].memory_mib == memory_mib


async def test_names_come_from_the_hosts_list(machine: MadeUpMachine) -> None:
    machine.write(
        "usr/share/misc/pci.ids",
        "# a list\n1002  Advanced Micro Devices\n\t744c  Navi 31 [Radeon RX 7900 XTX]\n\t\t1002 744c  A board\n"
        "8086  Intel Corporation\n\t744c  Not this one\n\t56a0  DG2 [Arc A770]\nC 03  Display controller\n\t00  VGA",
    )
    machine.amd(128, "0000:03:00.0", device=0x744C, product_name="")
    machine.pci(129, "0000:04:00.0", 0x8086, 0x56A0, "xe")
    machine.pci(130, "0000:05:00.0", 0x1ED5, 0x0222, "mtgpu")
    machine.pci(131, "0000:06:00.0", 0x1002, 0x9999, "amdgpu")
    assert [device.name for device in (await opened(machine)).devices()] == [
        "AMD Navi 31 [Radeon RX 7900 XTX]",
        "AMD 1002:9999",
        "Intel DG2 [Arc A770]",
        "PCI 1ed5:0222",
    ]


async def test_unknown_vendors_are_plain_render_nodes(machine: MadeUpMachine) -> None:
    machine.pci(128, "0000:05:00.0", 0x1ED5, 0x0222, "mtgpu")
    machine.platform(129, "fb000000.gpu", "panthor", "rockchip,rk3588-mali")
    machine.platform(130, "406400000.gpu", "asahi", "apple,agx-g14x")
    machine.pci(131, "0000:06:00.0", 0x10DE, 0x2204, "nouveau")
    machine.amd(132)
    found = [(device.vendor, device.index, device.uuid, device.pci) for device in (await opened(machine)).devices()]
    assert found == [
        ("amd", 0, "GPU-a1b2c3d4e5f60084", "00000000:03:00.0"),
        ("apple", 0, "406400000.gpu-130", ""),
        ("unknown", 0, "fb000000.gpu-129", ""),
        ("unknown", 1, "0000:05:00.0", "00000000:05:00.0"),
        ("unknown", 2, "0000:06:00.0", "00000000:06:00.0"),
    ]


async def test_what_nvml_lists_is_not_listed_again(machine: MadeUpMachine) -> None:
    machine.pci(128, "0000:17:00.0", 0x10DE, 0x2330, "nvidia")
    machine.pci(129, "0000:18:00.0", 0x10DE, 0x2330, "nvidia")
    machine.amd(130)
    inventory = await opened(machine, listed={"0000:17:00.0"})
    assert [device.vendor for device in inventory.devices()] == ["amd"]
    assert inventory.faults == ["renderD129: 0000:18:00.0 has NVIDIA's driver, and NVML does not list it"]


async def test_displays_of_virtual_machines_and_partitions_are_no_gpus(machine: MadeUpMachine) -> None:
    machine.platform(128, "vgem", "vgem")
    machine.pci(129, "0000:00:04.0", 0x1AF4, 0x1050, "virtio-pci")
    machine.platform(130, "amdgpu_xcp_3", "amdgpu_xcp")
    inventory = await opened(machine)
    assert (inventory.devices(), inventory.faults) == ([], [])


async def test_in_a_container_only_devices_with_a_file_count(machine: MadeUpMachine) -> None:
    machine.amd(128, "0000:03:00.0", node=False)
    machine.pci(129, "0000:00:02.0", 0x8086, 0xA780, "i915", node=False)
    assert (await opened(machine)).devices() == []


async def test_a_node_whose_device_is_gone_is_a_fault(machine: MadeUpMachine) -> None:
    shutil.rmtree(machine.amd(128))
    inventory = await opened(machine)
    assert inventory.devices() == []
    assert inventory.faults == ["renderD128: its device cannot be read"]


@pytest.mark.parametrize(
    ("version", "target"), [(90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100"), (90006, "gfx906"), (0, "")]
)
def test_the_gfx_target(machine: MadeUpMachine, version: int, target: str) -> None:
    machine.kfd(128, gfx=version)
    assert kfd_gpus(machine.root) == [(128, target)]


async def test_sysfs_that_hangs_is_said_to_hang(machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr("moorage.worker.devices.readers.drm.find_cards", lambda root, listed: released.wait(30))
    try:
        with pytest.raises(DrmUnavailable, match=r"no answer within 0\.01 s"):
            await opened(machine, open_timeout_s=0.01)
    finally:
        released.set()


# ------------------------------------------------------------------------------------------------ what is read


async def test_an_amd_reading(machine: MadeUpMachine) -> None:
    folder = machine.amd(128)
    inventory = await opened(machine)
    machine.write(folder / "gpu_busy_percent", 87)
    machine.write(folder / "mem_info_vram_used", 40_000 * MIB + 1)
    [reading] = await inventory.sample()
    assert (reading.util_percent, reading.memory_used_mib, reading.temperature_c) == (87, 40_001, 45)
    assert (reading.health, reading.processes) == ("ok", ())
    assert (reading.power_w, reading.power_limit_w) == (141, 750)
    machine.write(folder / "hwmon/hwmon3/power1_input", "")
    [reading] = await inventory.sample()
    assert (reading.power_w, reading.power_limit_w) == (None, 750)


@pytest.mark.parametrize(
    ("file", "value", "health"),
    [
        ("hwmon/hwmon3/temp1_input", 90_000, "ok"),
        ("hwmon/hwmon3/temp1_input", 91_000, "thermal"),
        ("ras/umc_err_count", "ue: 1\nce: 0", "ecc"),
        ("ras/gfx_err_count", "ue: 2\nce: 0", "ecc"),
        ("ras/umc_err_count", "ue: 0\nce: 900", "ok"),
        ("mem_info_vram_used", "", "unresponsive"),
    ],
)
async def test_health(machine: MadeUpMachine, file: str, value: object, health: Health) -> None:
    folder = machine.amd(128)
    inventory = await opened(machine)
    machine.write(folder / file, value)
    assert (await inventory.sample())[0].health == health


async def test_a_device_that_is_pulled_out_is_unresponsive_and_never_free(machine: MadeUpMachine) -> None:
    folder = machine.amd(128)
    machine.pci(129, "0000:00:02.0", 0x8086, 0xA780, "i915")
    inventory = await opened(machine)
    shutil.rmtree(folder)
    assert [reading.health for reading in await inventory.sample()] == ["unresponsive", "ok"]
    assert not await inventory.memory_is_free(0)
    assert await inventory.memory_is_free(1)


async def test_what_a_card_cannot_tell_is_left_out(machine: MadeUpMachine) -> None:
    folder = machine.amd(128, gpu_busy_percent="n/a", ras__umc_err_count=None, ras__gfx_err_count=None)
    shutil.rmtree(folder / "hwmon")
    [reading] = await (await opened(machine)).sample()
    assert (reading.util_percent, reading.temperature_c, reading.health) == (None, None, "ok")


INTEL_FREQUENCIES = {
    "xe, the busiest of its GTs": (
        "xe",
        {
            "tile0__gt0__freq0__act_freq": 600,
            "tile0__gt0__freq0__max_freq": 2400,
            "tile0__gt1__freq0__act_freq": 650,
            "tile0__gt1__freq0__max_freq": 1300,
        },
        50,
    ),
    "i915": (
        "i915",
        {"drm__card0__gt__gt0__rps_act_freq_mhz": 1550, "drm__card0__gt__gt0__rps_max_freq_mhz": 1550},
        100,
    ),
    "i915 of old": ("i915", {"drm__card0__gt_act_freq_mhz": 300, "drm__card0__gt_max_freq_mhz": 1200}, 25),
    "above its maximum": ("i915", {"drm__card0__gt_act_freq_mhz": 1300, "drm__card0__gt_max_freq_mhz": 1200}, 100),
    "asleep": ("xe", {"tile0__gt0__freq0__act_freq": 0, "tile0__gt0__freq0__max_freq": 2400}, 0),
    "no maximum": ("xe", {"tile0__gt0__freq0__act_freq": 500, "tile0__gt0__freq0__max_freq": 0}, None),
    "no file": ("xe", {}, None),
}


@pytest.mark.parametrize(("driver", "files", "util"), INTEL_FREQUENCIES.values(), ids=INTEL_FREQUENCIES)
async def test_intel_utilisation_is_current_of_maximum_frequency(
    machine: MadeUpMachine, driver: str, files: dict[str, Any], util: int | None
) -> None:
    machine.pci(128, "0000:03:00.0", 0x8086, 0x56A0, driver, **files)
    assert (await (await opened(machine)).sample())[0].util_percent == util


async def test_intel_memory_in_use_and_temperature(machine: MadeUpMachine) -> None:
    machine.pci(
        128,
        "0000:03:00.0",
        0x8086,
        0x56A0,
        "i915",
        drm__card0__lmem_total_bytes=16_000 * MIB,
        drm__card0__lmem_avail_bytes=15_000 * MIB,
        hwmon__hwmon2__temp2_input=52_000,
        hwmon__hwmon2__temp2_label="pkg",
        hwmon__hwmon2__temp3_input=60_000,
        hwmon__hwmon2__temp3_label="vram",
    )
    [reading] = await (await opened(machine)).sample()
    assert (reading.memory_used_mib, reading.temperature_c) == (1000, 52)


async def test_a_read_that_never_comes_back_is_asked_once_and_its_neighbours_answer(machine: MadeUpMachine) -> None:
    hangs = machine.amd(128, "0000:03:00.0") / "mem_info_vram_used"
    machine.amd(129, "0000:04:00.0")
    inventory = await opened(machine, sample_timeout_s=0.05)
    hangs.unlink()
    os.mkfifo(hangs)  # nobody writes: a read of it blocks in the kernel

    async def one_alone() -> bool:  # its neighbour's thread may be late, too
        return [reading.health for reading in await inventory.sample()] == ["unresponsive", "ok"]

    try:
        for _ in range(2):
            await until(one_alone)
            assert not await inventory.memory_is_free(0)
        assert [thread.name for thread in threading.enumerate()].count("drm-sample-128") == 1
    finally:
        hangs.write_text(f"{290 * MIB}\n")
    hangs.unlink()
    machine.write(hangs, 290 * MIB)
    assert await until(lambda: inventory.memory_is_free(0))


async def test_nothing_is_told_after_close(machine: MadeUpMachine) -> None:
    machine.amd(128)
    inventory = await opened(machine)
    inventory.close()
    inventory.close()
    assert [reading.health for reading in await inventory.sample()] == ["unresponsive"]
    assert not await inventory.memory_is_free(0)


# ---------------------------------------------------------------------------------------------- who holds what


async def test_a_process_with_memory_on_the_device_holds_it(machine: MadeUpMachine) -> None:
    machine.amd(128, "0000:03:00.0")
    machine.amd(129, "0000:04:00.0")
    machine.client(
        8812,
        128,
        address="0000:03:00.0",
        comm="train",
        memory_vram="4194304 KiB",
        memory_gtt="2048 KiB",
        engine_gfx="0 ns",
    )
    first, second = await (await opened(machine)).sample()
    assert first.processes == (DeviceProcess(8812, "train", 4096),)
    assert first.foreign(()).startswith("pid 8812 train (user ")
    assert first.foreign({8812}) == ""
    assert second.processes == ()


@pytest.mark.parametrize(
    ("keys", "holds"),
    [
        ({"resident_vram": f"{HELD_MIB_MIN} MiB"}, True),
        ({"resident_vram": f"{HELD_MIB_MIN - 1} MiB"}, False),
        ({"resident_vram0": "0", "total_vram0": "900 MiB"}, False),  # bought but not moved in
        ({"total_local0": "900 MiB"}, True),
        ({"resident_system0": "32 MiB"}, True),  # an integrated device's memory is the host's
        ({"engine_render": "12 ns"}, True),  # tells no memory: then by its work
        ({"engine_render": "0 ns", "engine_capacity_video": "2"}, False),
        ({"cycles_rcs": "28257900", "total_cycles_rcs": "7655183225"}, True),
        ({"total_cycles_rcs": "7655183225"}, False),
    ],
)
async def test_an_open_descriptor_alone_holds_nothing(
    machine: MadeUpMachine, keys: dict[str, Any], holds: bool
) -> None:
    """ROCm and Level Zero open every device of a host to list it."""
    machine.pci(128, "0000:03:00.0", 0x8086, 0x56A0, "xe")
    machine.client(40, 128, address="0000:03:00.0", **keys)
    [reading] = await (await opened(machine)).sample()
    assert bool(reading.processes) == holds


async def test_a_shared_descriptor_counts_once_in_memory_and_names_both_processes(machine: MadeUpMachine) -> None:
    machine.pci(128, "0000:03:00.0", 0x8086, 0x56A0, "xe")
    for pid, descriptor in ((10, 3), (10, 4), (11, 3)):
        machine.client(
            pid,
            128,
            address="0000:03:00.0",
            number=1,
            descriptor=descriptor,
            resident_vram0="600 MiB",
            resident_gtt="1 MiB",
        )
    machine.client(11, 128, address="0000:03:00.0", number=2, descriptor=9, resident_vram0="100 MiB")
    [reading] = await (await opened(machine)).sample()
    assert reading.processes == (DeviceProcess(10, "python", 600), DeviceProcess(11, "python", 700))
    assert reading.memory_used_mib == 700


async def test_a_device_off_the_bus_is_known_by_its_files_name(machine: MadeUpMachine) -> None:
    machine.platform(128, "fb000000.gpu", "panthor", "rockchip,rk3588-mali")
    machine.client(20, 128, number=0, resident_memory="64 MiB")
    machine.client(21, 129, resident_memory="64 MiB")
    [reading] = await (await opened(machine)).sample()
    assert [process.pid for process in reading.processes] == [20]


async def test_a_process_that_ended_is_forgotten_at_once(machine: MadeUpMachine) -> None:
    machine.amd(128)
    machine.client(30, 128, address="0000:03:00.0", resident_vram="64 MiB")
    inventory = await opened(machine)
    assert (await inventory.sample())[0].processes
    shutil.rmtree(machine.root / "proc/30")
    assert (await inventory.sample())[0].processes == ()


def test_processes_that_cannot_be_read_are_left_out(machine: MadeUpMachine) -> None:
    machine.write("proc/1/comm", "init")  # no folder fd: not ours to look at
    machine.write("proc/self", "not a process")
    fdinfo = machine.client(2, 128, resident_vram="1 MiB")
    fdinfo.unlink()
    assert find_clients(machine.root / "proc") == []
    assert find_clients(machine.root / "nowhere") == []


# ------------------------------------------------------------------------------------------------ free is seen free


async def test_memory_is_free_by_the_idle_baseline(machine: MadeUpMachine) -> None:
    folder = machine.amd(128)
    inventory = await opened(machine)
    assert inventory.memory_baseline_mib(0) == 290
    machine.write(folder / "mem_info_vram_used", (290 + FREE_TOLERANCE_MIB) * MIB)
    assert await inventory.memory_is_free(0)
    machine.write(folder / "mem_info_vram_used", (291 + FREE_TOLERANCE_MIB) * MIB)
    assert not await inventory.memory_is_free(0)


async def test_the_baseline_of_a_device_in_use_is_assumed_until_it_is_seen_idle(machine: MadeUpMachine) -> None:
    folder = machine.amd(128, mem_info_vram_used=90_000 * MIB)
    machine.client(50, 128, address="0000:03:00.0", resident_vram="89 GiB")
    inventory = await opened(machine)
    assert inventory.memory_baseline_mib(0) == BASELINE_ASSUMED_MIB
    shutil.rmtree(machine.root / "proc/50")
    machine.write(folder / "mem_info_vram_used", 280 * MIB)
    await inventory.sample()
    assert inventory.memory_baseline_mib(0) == 280


async def test_without_a_counter_memory_is_what_processes_hold(machine: MadeUpMachine) -> None:
    machine.pci(128, "0000:03:00.0", 0x8086, 0x56A0, "xe")
    inventory = await opened(machine)
    assert (inventory.memory_baseline_mib(0), await inventory.memory_is_free(0)) == (0, True)
    machine.client(60, 128, address="0000:03:00.0", resident_vram0="2 GiB")
    assert not await inventory.memory_is_free(0)
    shutil.rmtree(machine.root / "proc/60")
    assert await inventory.memory_is_free(0)
