"""GPUs handed on to VMs, on a made-up sysfs whose kernel is played: no machine of the tests has an IOMMU."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import msgspec
import pytest

from moorage.worker.drivers.vm import passthrough
from moorage.worker.drivers.vm.passthrough import Function, NotHandedOn, journals, lock, lock_path
from tests.unit.worker.made_up_pci import AUDIO, GPU, Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "root")


def test_the_functions_of_a_card_are_bound_to_vfio_and_given_back_to_what_they_had(host: Host, tmp_path: Path) -> None:
    journal = tmp_path / "state" / "vm" / "j1"
    assert host.take(GPU, journal) == [GPU, AUDIO]
    assert host.drivers() == ("vfio-pci", "vfio-pci")
    assert msgspec.json.decode(journal.read_bytes(), type=list[Function]) == [
        Function(GPU, "nvidia"),
        Function(AUDIO, "snd_hda_intel"),
    ]
    host.give_back(journal)
    assert host.drivers() == ("nvidia", "snd_hda_intel")
    assert not journal.exists()
    host.give_back(journal)  # again does nothing


def test_what_was_changed_is_in_the_journal_before_it_is_changed(host: Host, tmp_path: Path) -> None:
    journal = tmp_path / "j1"

    class Dies(Exception):
        """The runner is killed."""

    class Killed(Host):
        @staticmethod
        def write(path: Path, text: str) -> None:
            raise Dies

    host.__class__ = Killed
    with pytest.raises(Dies):
        host.take(GPU, journal)
    host.__class__ = Host
    host.bind(GPU, "")  # as far as it had come
    host.give_back(journal)
    assert host.drivers() == ("nvidia", "snd_hda_intel")


def test_a_card_of_which_a_part_cannot_be_bound_is_given_back_whole(host: Host, tmp_path: Path) -> None:
    host.fails = AUDIO
    with pytest.raises(NotHandedOn, match=f"{AUDIO} cannot be bound to vfio-pci: No such device"):
        host.take(GPU, tmp_path / "j1")
    assert host.drivers() == ("nvidia", "snd_hda_intel")
    assert not (tmp_path / "j1").exists()


def test_what_an_operator_has_bound_to_vfio_stays_there(host: Host, tmp_path: Path) -> None:
    host.bind(GPU, "vfio-pci")
    host.bind(AUDIO, "")
    host.take(GPU, tmp_path / "j1")
    host.give_back(tmp_path / "j1")
    assert host.drivers() == ("vfio-pci", "")


def test_a_group_with_a_device_of_the_host_is_not_handed_on(host: Host, tmp_path: Path) -> None:
    disk = "0000:18:00.0"
    host.device(disk, "0x010802", "nvme")
    with pytest.raises(NotHandedOn, match=f"{disk} is in the IOMMU group 7 of {GPU}, and nvme uses it"):
        host.take(GPU, tmp_path / "j1")
    assert host.drivers() == ("nvidia", "snd_hda_intel")
    host.bind(disk, "vfio-pci")
    assert host.take(GPU, tmp_path / "j1") == [GPU, AUDIO]


@pytest.mark.parametrize("node", ["/dev/nvidia3", "/dev/dri/renderD128"])
def test_a_card_that_a_process_holds_is_left_alone(host: Host, tmp_path: Path, node: str) -> None:
    about = host.root / "proc/driver/nvidia/gpus" / GPU
    about.mkdir(parents=True)
    (about / "information").write_text("Model: \t NVIDIA L40S\nDevice Minor: \t 3\n")
    (host.root / "sys/bus/pci/devices" / GPU / "drm/renderD128").mkdir(parents=True)
    (host.root / "proc/4711/fd").mkdir(parents=True)
    (host.root / "proc/4711/fd/5").symlink_to(node)
    with pytest.raises(NotHandedOn, match=f"process 4711 has {node} open"):
        host.take(GPU, tmp_path / "j1")


@pytest.mark.parametrize(
    ("remove", "why"),
    [
        ("sys/kernel/iommu_groups", "this host has no IOMMU, or it is off"),
        ("sys/bus/pci/devices/0000:17:00.0/iommu_group", "0000:17:00.0 is in no IOMMU group"),
        ("sys/bus/pci/drivers/vfio-pci", "the kernel's driver vfio-pci is not loaded"),
    ],
)
def test_a_host_that_cannot_says_what_is_missing(host: Host, tmp_path: Path, remove: str, why: str) -> None:
    path = host.root / remove
    path.rename(tmp_path / "gone") if not path.is_symlink() else path.unlink()
    with pytest.raises(NotHandedOn, match=why) as refused:
        host.take(GPU, tmp_path / "j1")
    assert refused.value.code == "failed-precondition"


@pytest.mark.parametrize("address", ["0000:99:00.0", "17:00.0", "../../x", ""])
def test_what_is_no_device_of_the_host_is_refused(host: Host, tmp_path: Path, address: str) -> None:
    with pytest.raises(NotHandedOn, match=r"no PCI device|not a PCI address"):
        host.take(address, tmp_path / "j1")


def test_a_kernel_that_binds_nothing_is_not_waited_for_without_end(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passthrough, "BIND_S", 0.05)
    monkeypatch.setattr(Host, "write", lambda self, path, text: None)
    with pytest.raises(NotHandedOn, match=f"{GPU} has the driver nvidia and not vfio-pci"):
        host.take(GPU, tmp_path / "j1")
    assert not (tmp_path / "j1").exists()


def test_a_card_is_kept_for_a_vm_as_long_as_one_of_its_processes_lives(tmp_path: Path) -> None:
    first = lock(lock_path(tmp_path / "vm", GPU))
    assert first is not None
    qemu = os.dup(first)
    os.close(first)
    assert lock(lock_path(tmp_path / "vm", GPU)) is None
    os.close(qemu)
    again = lock(lock_path(tmp_path / "vm", GPU))
    assert again is not None
    os.close(again)
    assert journals(tmp_path / "vm") == []  # a lock is no journal


def test_a_card_whose_lock_cannot_be_taken_is_not_said_to_belong_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system without locks."""

    def fails(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fails)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No locks available"):
        lock(lock_path(tmp_path / "vm", GPU))
    assert len(os.listdir("/proc/self/fd")) == open_before
