"""GPUs that VMs have, under the real inventories: a made sysfs with a played kernel, and the stub of NVML."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from moorage.schemas.frames import Device
from moorage.worker.agent.inspection import inspect
from moorage.worker.devices.device_health import UNRESPONSIVE_S
from moorage.worker.devices.device_watch import HANDED_ON, DeviceWatch
from moorage.worker.devices.pool import GpuPool
from moorage.worker.devices.readers.faults import Fault
from moorage.worker.devices.readers.machine import CombinedInventory, open_machine
from moorage.worker.drivers.vm import driver_changes
from moorage.worker.drivers.vm.driver_changes import DriverChanges
from moorage.worker.drivers.vm.handed_on import MOVED, HandingInventory, open_handing
from moorage.worker.drivers.vm.passthrough import NotHandedOn, Passthrough, journals, lock, lock_path
from tests.nvidia.stub import Board, Stub
from tests.unit.worker.made_up_pci import AUDIO, GPU, Host
from tests.unit.worker.made_up_sys import MadeUpMachine
from tests.waiting import until

OTHER = "0000:18:00.0"
#: nvml.h: NVML_ERROR_LIBRARY_NOT_FOUND
NO_LIBRARY = "fail call=nvmlInitWithFlags code=12"


class Amd(Host):
    """Two cards of AMD. What amdgpu is not bound to has no files of DRM."""

    def __init__(self, root: Path) -> None:
        self.made = MadeUpMachine(root)
        super().__init__(root)
        (root / "sys/bus/pci/drivers/amdgpu").mkdir()
        self.device(OTHER, "0x030000", "amdgpu", group=8)
        for minor, address in enumerate((GPU, OTHER), 128):
            self.made.amd(minor, address)
            self.claims[address] = "amdgpu"
        self.bind(GPU, "amdgpu")

    def bind(self, address: str, driver: str) -> None:
        super().bind(address, driver)
        link = {GPU: "renderD128", OTHER: "renderD129"}.get(address, "none")
        for path in (f"sys/devices/pci0000:00/{address}", f"sys/class/drm/{link}"):
            there, away = self.root / path, self.root / f"away/{path}"
            away.parent.mkdir(parents=True, exist_ok=True)
            if driver == "amdgpu" and (away.exists() or away.is_symlink()):
                away.rename(there)
            elif driver != "amdgpu" and (there.exists() or there.is_symlink()):
                there.rename(away)


def opens(host: Host) -> Callable[[], Awaitable[CombinedInventory]]:
    return partial(open_machine, "f00d" * 8, root=host.root)


async def opened(host: Host, folder: Path) -> HandingInventory:
    return await open_handing(folder, passthrough=host, open_inner=opens(host))


def names(inventory: HandingInventory) -> list[str]:
    return [device.uuid for device in inventory.devices()]


@pytest.fixture
def amd(tmp_path: Path) -> Amd:
    return Amd(tmp_path / "root")


# ------------------------------------------------------------------------------------------------ what is said of it


async def test_a_gpu_that_a_vm_has_is_neither_lost_nor_foreign_nor_free(amd: Amd, tmp_path: Path) -> None:
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        inventory = await opened(amd, tmp_path / "vm")
        card, other = inventory.devices()
        pool = GpuPool(inventory.devices())
        lease = pool.try_claim_slots([0], "exclusive", "j1")
        watch = DeviceWatch(inventory.devices(), "boot", pool, 600.0, 0.0, None, lambda slot, pids, is_leased: pids)
        assert await inventory.hand_on(card) == [GPU, AUDIO]
        plain = await open_machine("f00d" * 8, root=amd.root)  # what an inventory says that does not know of it
        assert [device.uuid for device in plain.devices()] == [other.uuid]

        for now in (1.0, 2.0 + UNRESPONSIVE_S, 100.0 + UNRESPONSIVE_S):
            readings = await inventory.sample()
            assert not watch.seen(readings, now)
        assert [reading.health for reading in readings] == ["ok", "ok"]
        [state, _] = pool.slot_states()
        assert watch.shown(state, readings[0], now) == ("ok", "", HANDED_ON)
        assert inspect(inventory.devices(), pool.slot_states(), pool.slot_states(), readings, [0, 290]) == ([], 0)
        assert [await inventory.memory_is_free(slot) for slot in (0, 1)] == [False, True]
        assert await inventory.held(0) == {}

        assert await inventory.take_back() == []
        assert amd.drivers() == ("amdgpu", "snd_hda_intel")
        assert names(inventory) == [card.uuid, other.uuid]
        assert [reading.memory_used_mib for reading in await inventory.sample()] == [290, 290]
        assert await inventory.memory_is_free(0)
        lease.release()
        inventory.close()
        plain.close()


async def test_an_agent_that_starts_while_a_vm_has_a_gpu_finds_it_in_its_slot(amd: Amd, tmp_path: Path) -> None:
    folder = tmp_path / "vm"
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        first = await opened(amd, folder)
        before = first.devices()
        await first.hand_on(before[0])
        vm = lock(lock_path(folder, GPU))
        assert vm is not None
        first.close()

        second = await opened(amd, folder)
        assert second.devices() == before
        assert [second.nodes(slot) for slot in (0, 1)] == [first.nodes(slot) for slot in (0, 1)]
        assert [reading.handed_on for reading in await second.sample()] == [True, False]
        assert await second.take_back() == []
        assert amd.drivers() == ("vfio-pci", "vfio-pci")  # the VM runs
        os.close(vm)
        assert await second.take_back([GPU]) == []
        assert await DriverChanges(amd, folder).give_back([GPU]) == ({GPU}, [])
        assert amd.drivers() == ("vfio-pci", "vfio-pci")  # the VM of another job is about to lock it
        assert await second.take_back() == []
        assert amd.drivers() == ("amdgpu", "snd_hda_intel")
        assert [reading.memory_used_mib for reading in await second.sample()] == [290, 290]
        second.close()


async def test_what_an_agent_left_handed_on_without_a_vm_is_given_back_by_the_next(amd: Amd, tmp_path: Path) -> None:
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        first = await opened(amd, tmp_path / "vm")
        before = first.devices()
        await first.hand_on(before[0])
        first.close()
        second = await opened(amd, tmp_path / "vm")
        assert amd.drivers() == ("amdgpu", "snd_hda_intel")
        assert (second.devices(), second.away) == (before, set())
        second.close()


async def test_what_cannot_be_given_back_stays_in_the_journal_and_is_told(tmp_path: Path) -> None:
    host = Host(tmp_path / "root")
    host.take(GPU, tmp_path / "vm" / GPU)
    (tmp_path / "root/sys/bus/pci/drivers/nvidia").rmdir()
    host.claims[GPU] = ""
    host.root.joinpath("sys/bus/pci/devices", GPU, "driver_override").mkdir()  # nothing can be written to it
    away, [fault] = await DriverChanges(Broken(host.root), tmp_path / "vm").give_back()
    assert away == {GPU}
    assert fault == f"{GPU} cannot be given back: passthrough: {GPU} cannot be bound to nvidia: Is a directory"


class Blocked(Amd):
    """Unbinding waits in the kernel until `goes_on`, as for a process that has the card open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.goes_on, self.waits = threading.Event(), threading.Event()

    def write(self, path: Path, text: str) -> None:
        if path.name == "unbind":
            self.waits.set()
            self.goes_on.wait()
        super().write(path, text)


@pytest.mark.parametrize("way", ["on", "back", "at the start"])
async def test_a_card_that_the_kernel_does_not_let_go_of_blocks_no_reading_of_the_others(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Blocked(tmp_path / "root")
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        inventory = await opened(host, tmp_path / "vm")
        card, _ = inventory.devices()
        if way != "on":
            host.goes_on.set()
            await inventory.hand_on(card)
            host.goes_on.clear()
            host.waits.clear()
        monkeypatch.setattr(driver_changes, "CHANGE_S", 0.2)  # of a change that waits, and of no other
        if way == "on":
            with pytest.raises(NotHandedOn, match=f"the kernel has not changed the driver of {GPU} within 0.2 s"):
                await inventory.hand_on(card)
        elif way == "back":
            assert "has not changed" in (await inventory.take_back())[0]
        else:
            inventory.close()
            inventory = await opened(host, tmp_path / "vm")
            assert inventory.devices()[0] == card
        assert host.waits.is_set()
        assert [reading.health for reading in await inventory.sample()] == ["ok", "ok"]
        assert [await inventory.memory_is_free(slot) for slot in (0, 1)] == [False, True]
        assert "still changing" in (await inventory.take_back())[0]
        with pytest.raises(NotHandedOn, match="handed on already, or could not be given back"):
            await inventory.hand_on(card)
        host.goes_on.set()
        monkeypatch.setattr(driver_changes, "CHANGE_S", 20.0)
        while faults := await inventory.take_back():  # once the late change is over, the next one gives the card back
            assert "still changing" in faults[0]
            await asyncio.sleep(0)
        assert host.drivers() == ("amdgpu", "snd_hda_intel")
        assert await inventory.memory_is_free(0)
        inventory.close()


class Broken(Passthrough):
    """A host without a kernel that is played: files of sysfs are written as they are."""


# ------------------------------------------------------------------------------------------------------ what is refused


async def test_a_gpu_is_handed_on_once(amd: Amd, tmp_path: Path) -> None:
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        inventory = await opened(amd, tmp_path / "vm")
        card = inventory.devices()[0]
        await inventory.hand_on(card)
        with pytest.raises(NotHandedOn, match="handed on already"):
            await inventory.hand_on(card)
        inventory.close()


async def test_a_state_folder_that_cannot_be_written_to_is_the_hosts_fault(amd: Amd, tmp_path: Path) -> None:
    (tmp_path / "vm").touch()
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        inventory = await opened(amd, tmp_path / "vm")
        with pytest.raises(NotHandedOn, match="/vm: "):
            await inventory.hand_on(inventory.devices()[0])
        assert amd.drivers() == ("amdgpu", "snd_hda_intel")
        assert not any(reading.handed_on for reading in await inventory.sample())
        inventory.close()


async def test_an_error_without_a_file_names_none(amd: Amd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("moorage.worker.drivers.vm.handed_on.write_synced", full)
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        inventory = await opened(amd, tmp_path / "vm")
        with pytest.raises(NotHandedOn, match=r"^passthrough: No space left on device$"):
            await inventory.hand_on(inventory.devices()[0])
        inventory.close()


async def test_where_jobs_know_gpus_by_number_none_is_handed_on(amd: Amd, tmp_path: Path) -> None:
    """With one gone, the runtime of these cards would count the others anew, and show a job a device not its own."""
    for address in (GPU, OTHER):
        (amd.root / "sys/devices/pci0000:00" / address / "unique_id").unlink()
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        inventory = await opened(amd, tmp_path / "vm")
        with pytest.raises(NotHandedOn, match="only by its number"):
            await inventory.hand_on(inventory.devices()[0])
        assert amd.drivers() == ("amdgpu", "snd_hda_intel")
        inventory.close()


async def test_a_gpu_that_comes_back_with_another_file_is_not_given_out(amd: Amd, tmp_path: Path) -> None:
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        inventory = await opened(amd, tmp_path / "vm")
        await inventory.hand_on(inventory.devices()[0])
        away = amd.root / "away/sys/class/drm"
        (away / "renderD128").rename(amd.root / "away/sys/class/drm/renderD130")
        for path in (amd.root / "away/sys/devices/pci0000:00" / GPU / "drm").glob("renderD128"):
            path.rename(path.with_name("renderD130"))
        (away / "renderD130").unlink()
        (amd.root / "sys/class/drm/renderD130").symlink_to(f"../../devices/pci0000:00/{GPU}/drm/renderD130")
        (amd.root / "dev/dri/renderD130").touch()
        assert await inventory.take_back() == []
        readings = await inventory.sample()
        assert [MOVED in reading.faults for reading in readings] == [True, False]
        inventory.close()


def test_a_host_that_can_hand_on_nothing_says_why(tmp_path: Path) -> None:
    host = Host(tmp_path / "root")
    host.check_host()
    (host.root / "sys/kernel/iommu_groups").rename(tmp_path / "gone")
    with pytest.raises(NotHandedOn, match="this host has no IOMMU, or it is off"):
        host.check_host()


# ------------------------------------------------------------------------------------------------------------- NVIDIA


class Nvidia(Host):
    """A host whose NVML lists a card as long as NVIDIA's driver has it; the driver waits for NVML to be closed."""

    def __init__(self, root: Path, stub: Stub) -> None:
        super().__init__(root)
        self._stub = stub
        self._all = stub.boards
        self.device(OTHER, "0x030000", "nvidia", group=8)
        self.claims[OTHER] = "nvidia"

    def bind(self, address: str, driver: str) -> None:
        had = self._driver(address)
        super().bind(address, driver)
        if address == GPU and hasattr(self, "_stub"):
            if had == "nvidia":  # else the kernel would wait for NVML
                assert self._stub.calls("nvmlInitWithFlags") == self._stub.calls("nvmlShutdown")
            self._stub.boards = self._all if driver == "nvidia" else self._all[1:]
            self._stub.write()


@pytest.mark.slow
async def test_nvml_is_closed_while_a_card_changes_its_driver_and_all_else_goes_on(tmp_path: Path) -> None:
    boards = Board("GPU-a", used_mib=7), Board("GPU-b", pci="00000000:18:00.0", used_mib=9)
    stub = Stub(tmp_path / "stub", *boards)
    with stub.load():
        host = Nvidia(tmp_path / "root", stub)
        inventory = await opened(host, tmp_path / "vm")
        told: list[tuple[int, Fault]] = []
        inventory.watch(lambda slot, fault: told.append((slot, fault)))
        assert await inventory.hand_on(inventory.devices()[0]) == [GPU, AUDIO]
        assert names(inventory) == ["GPU-a", "GPU-b"]
        first, second = await inventory.sample()
        assert (first.handed_on, second.memory_used_mib, second.handed_on) == (True, 9, False)
        stub.event("GPU-b", 8, 79)
        await until(lambda: told, deadline_s=30, what="an event of the other card")
        assert [slot for slot, _ in told] == [1]
        asked = asyncio.create_task(inventory.sample())
        assert await inventory.take_back() == []
        await asked
        assert [reading.memory_used_mib for reading in await inventory.sample()] == [7, 9]
        inventory.close()


async def test_nvml_is_not_closed_for_a_card_that_cannot_be_handed_on(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "stub", Board("GPU-a"))
    with stub.load():
        host = Nvidia(tmp_path / "root", stub)
        (host.root / "sys/kernel/iommu_groups").rename(tmp_path / "gone")
        inventory = await opened(host, tmp_path / "vm")
        assert inventory.why_not() == "passthrough: this host has no IOMMU, or it is off"
        with pytest.raises(NotHandedOn, match="no IOMMU"):
            await inventory.hand_on(inventory.devices()[0])
        assert (stub.calls("nvmlShutdown"), inventory.away, journals(tmp_path / "vm")) == (0, set(), [])
        inventory.close()


async def test_an_agents_own_nvml_is_no_reason_against_it_and_another_process_is(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "stub", Board("GPU-a"))
    with stub.load():
        host = Nvidia(tmp_path / "root", stub)
        about = host.root / "proc/driver/nvidia/gpus" / GPU
        about.mkdir(parents=True)
        (about / "information").write_text("Device Minor: \t 0\n")
        (host.root / "proc/4711/fd").mkdir(parents=True)
        (host.root / "proc/4711/fd/5").symlink_to("/dev/nvidia0")
        assert host.functions(GPU, 4711)
        inventory = await opened(host, tmp_path / "vm")
        with pytest.raises(NotHandedOn, match="process 4711 has /dev/nvidia0 open"):
            await inventory.hand_on(inventory.devices()[0])
        assert stub.calls("nvmlShutdown") == 0
        inventory.close()


async def test_slices_of_a_card_are_not_handed_on(amd: Amd, tmp_path: Path) -> None:
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        inventory = await opened(amd, tmp_path / "vm")
        device = inventory.devices()[0]
        part = Device(index=0, vendor=device.vendor, name="slice", uuid="MIG-1", memory_mib=1, pci=device.pci)
        with pytest.raises(NotHandedOn, match="is divided into slices"):
            await inventory.hand_on(part)
        inventory.close()
