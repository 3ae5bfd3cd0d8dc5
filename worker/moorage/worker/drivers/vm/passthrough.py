"""Hand a GPU on to a VM by VFIO, and give it back to its former driver.

The kernel hands on whole IOMMU groups, because a device of a group could reach the memory of the others. So every PCI
function of the group must belong to the GPU, or be used by nothing else on the host. All paths are below a root, so
that tests can make one up. Sources: the kernel's documents on VFIO and on sysfs for PCI (`driver_override`, `unbind`,
`drivers_probe`).

`take` first writes into a journal what it will change. An agent that finds that file gives the GPU back, unless a VM
still has the lock of that GPU (see `lock`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.errors import Refused, problem
from moorage.system.private_files import replace_private

VFIO: Final = "vfio-pci"
#: how long the kernel may take to bind a function to a driver
BIND_S: Final = 10.0
#: the class of a bridge: bridges stay on the host and need not be handed on
_BRIDGE: Final = "0x06"
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class NotHandedOn(Refused):
    """This host cannot hand this GPU on, or cannot give it back to its former driver.

    The host is at fault, so the job is tried again on another host.
    """

    def __init__(self, why: str, next_step: str = "") -> None:
        super().__init__(problem("failed-precondition", f"passthrough: {why}", next=next_step))


class Function(msgspec.Struct, frozen=True):
    """A PCI function, and the driver that it had before it was handed on; "" for none."""

    address: str
    driver: str


class Passthrough:
    """The PCI devices of one host. `root` has its `sys` and `proc`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root: Final = root
        self._bus = root / "sys/bus/pci"

    def check_host(self) -> None:
        """Raise NotHandedOn if this host cannot hand on any device."""
        groups = self.root / "sys/kernel/iommu_groups"
        if not groups.is_dir() or not any(groups.iterdir()):
            raise NotHandedOn("this host has no IOMMU, or it is off", "turn it on: intel_iommu=on or amd_iommu=on")
        if not (self._bus / "drivers" / VFIO).is_dir():
            raise NotHandedOn(f"the kernel's driver {VFIO} is not loaded", f"modprobe {VFIO}")
        if not os.access(self._bus / "drivers_probe", os.W_OK):
            raise NotHandedOn("this user may not bind devices to drivers", "run the worker as root")

    def functions(self, address: str, spared: int = 0) -> list[Function]:
        """Return the GPU's own functions, the GPU first, if its whole group may be handed on; else raise NotHandedOn.

        It may not be while a process has the GPU's device files open, unless its pid is `spared`.
        """
        self.check_host()
        folder = self._folder(address)
        if not folder.is_dir():
            raise NotHandedOn(f"there is no PCI device {address}")
        if not (folder / "iommu_group").exists():
            raise NotHandedOn(f"{address} is in no IOMMU group")
        group = (folder / "iommu_group").resolve()
        own: list[Function] = []
        for name in sorted(os.listdir(group / "devices")):
            driver = self._driver(name)
            if self._read(name, "class").startswith(_BRIDGE):
                continue
            if name.rpartition(".")[0] == address.rpartition(".")[0]:
                own.append(Function(name, driver))
            elif driver not in ("", VFIO):
                raise NotHandedOn(
                    f"{name} is in the IOMMU group {group.name} of {address}, and {driver} uses it",
                    "put the card into another slot, or unbind that device as well",
                )
        for pid, node in self._holders(own):
            if pid == spared:
                continue
            raise NotHandedOn(f"process {pid} has {node} open", "end it; it may be a driver's persistence daemon")
        return sorted(own, key=lambda each: each.address != address)

    def take(self, address: str, journal: Path) -> list[str]:
        """Bind the GPU's functions to vfio-pci; return their addresses, the GPU's first. Raises NotHandedOn.

        The changes are written into the journal first; raises OSError if that fails. If not all functions can be bound,
        the bound ones are given back.
        """
        own = self.functions(address)
        write_synced(journal, msgspec.json.encode(own))
        try:
            for each in own:
                self._bind(each.address, VFIO)
        except NotHandedOn:
            self.give_back(journal)
            raise
        return [each.address for each in own]

    def give_back(self, journal: Path) -> None:
        """Bind the functions in a journal to their former drivers, and remove the journal. Raises NotHandedOn.

        Does nothing if there is no journal. One that cannot be decoded is removed, because nothing was changed yet. No
        process may use the functions any more.
        """
        try:
            own = msgspec.json.decode(journal.read_bytes(), type=list[Function])
        except FileNotFoundError:
            return
        except msgspec.DecodeError:  # the file was cut short, so nothing was changed yet
            own = []
        for each in own:
            if each.driver != VFIO:
                self._bind(each.address, each.driver)
        journal.unlink(missing_ok=True)

    def is_handed_on(self, address: str) -> bool:
        """Return whether vfio-pci has this function now."""
        return self._driver(address) == VFIO

    def _bind(self, address: str, driver: str) -> None:
        """Bind a function to this driver ("" for none) and wait until it is bound. Raises NotHandedOn."""
        folder = self._folder(address)
        try:
            if self._driver(address) != driver:
                self.write(folder / "driver_override", f"{driver if driver == VFIO else ''}\n")
                if self._driver(address):
                    self.write(folder / "driver/unbind", address)
                if driver:
                    self.write(self._bus / "drivers_probe", address)
            elif driver != VFIO:
                self.write(folder / "driver_override", "\n")
        except OSError as error:
            raise NotHandedOn(f"{address} cannot be bound to {driver or 'nothing'}: {error.strerror}") from None
        ends_s = time.monotonic() + BIND_S
        while self._driver(address) != driver:
            if time.monotonic() >= ends_s:
                raise NotHandedOn(f"{address} has the driver {self._driver(address) or 'none'} and not {driver}")
            time.sleep(0.02)

    def write(self, path: Path, text: str) -> None:
        """Write to a file of sysfs. Raises OSError."""
        with path.open("w") as file:
            file.write(text)

    def _folder(self, address: str) -> Path:
        if not _ADDRESS.fullmatch(address):
            raise NotHandedOn(f"{address[:40]!r} is not a PCI address")
        return self._bus / "devices" / address

    def _driver(self, address: str) -> str:
        link = self._folder(address) / "driver"
        try:
            return os.path.basename(os.readlink(link))
        except FileNotFoundError:  # it has no driver now
            return ""

    def _read(self, address: str, name: str) -> str:
        try:
            return (self._folder(address) / name).read_text().strip()
        except OSError:
            return ""

    def _holders(self, own: list[Function]) -> Iterator[tuple[int, str]]:
        """Yield the pid of each process that has a device file of these functions open, and the path of that file.

        In the kernel, unbinding the driver waits for such processes.
        """
        nodes = set(self._nodes(own))
        for process in (self.root / "proc").iterdir() if nodes else ():
            if not process.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                for descriptor in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        if (target := os.readlink(descriptor)) in nodes:
                            yield int(process.name), target

    def _nodes(self, own: list[Function]) -> Iterator[str]:
        for each in own:
            with contextlib.suppress(OSError):
                yield from (f"/dev/dri/{node}" for node in os.listdir(self._folder(each.address) / "drm"))
            about = self.root / "proc/driver/nvidia/gpus" / each.address / "information"
            with contextlib.suppress(OSError):
                if minor := re.search(r"^Device Minor:\s*(\d+)", about.read_text(), re.MULTILINE):
                    yield f"/dev/nvidia{minor[1]}"


def lock_path(folder: Path, address: str) -> Path:
    """Return the file that a VM locks while it may use this GPU; `folder` is where the journals are."""
    return folder / f"{address}.lock"


def lock(path: Path) -> int | None:
    """Return a descriptor that locks a GPU while a process has it open; None if another VM has the GPU.

    Raises OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def journals(folder: Path) -> list[str]:
    """Return the addresses of the GPUs that have a journal: they are handed on, or must still be given back."""
    names = os.listdir(folder) if folder.is_dir() else ()
    return sorted(name for name in names if _ADDRESS.fullmatch(name))


def write_synced(path: Path, data: bytes) -> None:
    """Write a file atomically into this folder, which is made if it is missing. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_private(path, data)
