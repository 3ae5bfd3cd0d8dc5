"""A made-up PCI bus with IOMMU groups below a folder, whose kernel is played: no machine of the tests has an IOMMU."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from moorage.worker.drivers.vm.passthrough import Passthrough

GPU: Final = "0000:17:00.0"
AUDIO: Final = "0000:17:00.1"


class Host(Passthrough):
    """A made-up host that does what the kernel does when sysfs is written to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.claims = {GPU: "nvidia", AUDIO: "snd_hda_intel"}
        self.fails = ""
        (root / "proc").mkdir(parents=True, exist_ok=True)
        (root / "sys/bus/pci").mkdir(parents=True)
        (root / "sys/bus/pci/drivers_probe").touch()
        for driver in ("nvidia", "snd_hda_intel", "vfio-pci", "nvme", "pcieport"):
            (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True)
        self.device("0000:16:00.0", "0x060400", "pcieport")
        self.device(GPU, "0x030000", "nvidia")
        self.device(AUDIO, "0x040300", "snd_hda_intel")

    def device(self, address: str, kind: str, driver: str, group: int = 7) -> Path:
        folder = self.root / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "class").write_text(f"{kind}\n")
        self.bind(address, driver)
        devices = self.root / f"sys/kernel/iommu_groups/{group}/devices"
        devices.mkdir(parents=True, exist_ok=True)
        (devices / address).symlink_to(folder)
        (folder / "iommu_group").symlink_to(devices.parent)
        return folder

    def bind(self, address: str, driver: str) -> None:
        link = self.root / "sys/bus/pci/devices" / address / "driver"
        link.unlink(missing_ok=True)
        if driver:
            link.symlink_to(self.root / "sys/bus/pci/drivers" / driver)

    def drivers(self) -> tuple[str, str]:
        return self._driver(GPU), self._driver(AUDIO)

    def write(self, path: Path, text: str) -> None:
        said = text.strip()
        if path.name == "driver_override":
            (path.parent / "override").write_text(said)
        elif path.name == "unbind":
            self.bind(said, "")
        else:
            assert path.name == "drivers_probe"
            override = self.root / "sys/bus/pci/devices" / said / "override"
            driver = override.read_text() if override.exists() else ""
            if self.fails == said and driver == "vfio-pci":
                raise OSError(errno.ENODEV, "No such device")
            self.bind(said, driver or self.claims[said])
