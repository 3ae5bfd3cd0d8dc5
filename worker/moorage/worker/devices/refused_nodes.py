"""Choose the device nodes that the kernel refuses to an attempt: those of GPUs that it does not lease.

The numbers are those of the drivers: NVIDIA's major is 195, with a minor for each GPU, 254 for modeset and 255 for
nvidiactl; the majors of its other parts, of KFD and of VFIO are given out as the drivers are loaded, and are read from
/proc/devices. A GPU has nodes of DRM too, found by its PCI address. Sources: the kernel's devices.txt; NVIDIA's
documents on MIG device nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from moorage.schemas.frames import Device
from moorage.system.device_fence import MINOR_MAX, NodeRange
from moorage.worker.devices.readers.machine import sysfs_address

NVIDIA_MAJOR: Final = 195
#: the greatest minor of a GPU; modeset and nvidiactl come behind it
NVIDIA_GPU_MAX: Final = 253
#: majors of NVIDIA's driver that every program on one of its GPUs may need
NVIDIA_SHARED: Final = ("nvidia-uvm", "nvidia-nvlink", "nvidia-nvswitch", "nvidia-caps-imex-channels")
#: the major of the access rights of MIG, one minor for each
NVIDIA_CAPS: Final = "nvidia-caps"
KFD: Final = "kfd"
#: /dev/vfio/vfio, of the major for single devices
VFIO_CONTROL: Final = NodeRange(10, 196, 196)
#: PCI vendors whose display devices are GPUs: a server's own graphics for its console is none
GPU_VENDORS: Final = frozenset({"0x10de", "0x1002", "0x8086"})
DRM_NODES_MAX: Final = 256
_NVIDIA_NODE: Final = re.compile(r"/dev/nvidia([0-9]+)")
_CAP_NODE: Final = re.compile(r"/dev/nvidia-caps/nvidia-cap([0-9]+)")
_DRM_NODE: Final = re.compile(r"(card|renderD)[0-9]+")


class NodesUnknown(Exception):
    """Which nodes belong to a leased device is not known, so the others cannot be refused."""


class GpuNodes:
    """The device nodes of the GPUs of this host."""

    def __init__(self, devices: Sequence[Device], nodes: Mapping[str, Sequence[str]], root: Path = Path("/")) -> None:
        """`nodes` maps the uuid of each device to the files in /dev that belong to it alone."""
        self._devices = devices
        self._nodes = nodes
        self._root = root

    def trouble(self) -> str:
        """Return why the nodes of some device are not known; "" if all are."""
        try:
            for device in self._devices:
                self.refused_to([device])
        except NodesUnknown as error:
            return str(error)
        return ""

    def refused_to(self, leased: Sequence[Device]) -> tuple[NodeRange, ...]:
        """Return the character devices that an attempt with a lease of these devices may not open; () has no lease.

        Raises NodesUnknown. Reads /proc/devices and DRM's folder in sysfs.
        """
        majors = self._majors()
        own = {device.uuid: tuple(self._nodes.get(device.uuid, ())) for device in leased}
        for device in leased:
            if not own[device.uuid]:
                raise NodesUnknown(f"it is not known which files in /dev are those of {device.vendor} {device.uuid}")
        vendors = {device.vendor for device in leased}
        files = [file for each in own.values() for file in each]
        refused = [VFIO_CONTROL, *self._nvidia(majors, leased, files)]
        refused += [NodeRange(major) for name, major in majors if name.startswith("vfio")]
        if "amd" not in vendors:
            refused += [NodeRange(major) for name, major in majors if name == KFD]
        return tuple(refused + self._drm({sysfs_address(device.pci) for device in leased}, files))

    def _nvidia(
        self, majors: Iterable[tuple[str, int]], leased: Sequence[Device], files: Sequence[str]
    ) -> list[NodeRange]:
        caps = [major for name, major in majors if name == NVIDIA_CAPS]
        slices = [device for device in leased if device.profile]
        if not any(device.vendor == "nvidia" for device in leased):
            shared = [major for name, major in majors if name in NVIDIA_SHARED]
            return [NodeRange(NVIDIA_MAJOR), *map(NodeRange, shared), *map(NodeRange, caps)]
        refused = [NodeRange(NVIDIA_MAJOR, *pair) for pair in _without(_minors(_NVIDIA_NODE, files), NVIDIA_GPU_MAX)]
        if not slices:
            return refused + [NodeRange(major) for major in caps]
        for each in slices:
            if caps and not _minors(_CAP_NODE, self._nodes.get(each.uuid, ())):
                raise NodesUnknown(f"the access rights of the MIG slice {each.uuid} are not known")
        pairs = _without(_minors(_CAP_NODE, files), self._cap_max())
        return refused + [NodeRange(major, *pair) for major in caps for pair in pairs]

    def _cap_max(self) -> int:
        """Return the greatest minor of an access right of MIG; every one, if the driver does not list them."""
        try:
            text = (self._root / "proc/driver/nvidia-caps/mig-minors").read_text()
        except OSError:
            return MINOR_MAX
        return max(map(int, re.findall(r" ([0-9]+)$", text, re.MULTILINE)), default=MINOR_MAX)

    def _majors(self) -> list[tuple[str, int]]:
        """Return (name, major) of the character devices of all drivers that are loaded. Raises NodesUnknown."""
        try:
            text = (self._root / "proc/devices").read_text()
        except OSError as error:
            raise NodesUnknown(f"/proc/devices cannot be read: {error.strerror}") from None
        lines = text.partition("Block devices:")[0].splitlines()
        return [(words[1], int(words[0])) for line in lines if len(words := line.split()) == 2 and words[0].isdigit()]

    def _drm(self, addresses: set[str], files: Sequence[str]) -> list[NodeRange]:
        """Return DRM's nodes of the GPUs that are not at these PCI addresses, or among these files."""
        refused = []
        found = sorted((self._root / "sys/class/drm").glob("*"))
        for node in [each for each in found if _DRM_NODE.fullmatch(each.name)][:DRM_NODES_MAX]:
            try:
                device = (node / "device").resolve(strict=True)
                vendor = (device / "vendor").read_text().strip()
                major, minor = map(int, (node / "dev").read_text().split(":"))
            except (OSError, ValueError):
                continue  # of no PCI device
            if vendor in GPU_VENDORS and device.name not in addresses and f"/dev/dri/{node.name}" not in files:
                refused.append(NodeRange(major, minor, minor))
        return refused


def _minors(pattern: re.Pattern[str], files: Iterable[str]) -> set[int]:
    return {int(found[1]) for file in files if (found := pattern.fullmatch(file))}


def _without(kept: Iterable[int], last: int) -> list[tuple[int, int]]:
    """Return 0 to `last` without these numbers, as pairs of first and last."""
    pairs, first = [], 0
    for each in sorted(kept):
        if first < each:
            pairs.append((first, each - 1))
        first = each + 1
    return [*pairs, (first, last)] if first <= last else pairs
