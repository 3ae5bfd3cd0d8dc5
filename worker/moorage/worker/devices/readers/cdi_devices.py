"""Find devices in CDI specs: their names there, and NVIDIA devices on a host without NVML.

The index in a CDI name depends on the spec's author: NVML, CUDA and a spec may count differently. So a device is found
in the specs by its uuid, else by the file in /dev that belongs to it alone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from moorage.schemas.frames import Device
from moorage.schemas.names import CDI_UUID
from moorage.system.daemon_threads import Question
from moorage.worker.devices.readers.base import DeviceProcess, Inventory, SlotReading, bounded, user_of
from moorage.worker.devices.readers.cdi import (
    ALL,
    KINDS,
    Registry,
    folders,
    read_registry,
    read_spec,
    spec_files,
)
from moorage.worker.devices.readers.cdi_spec import CdiError
from moorage.worker.devices.readers.faults import Fault, Gravity

NAMES_MAX: Final = 8
_MACHINE_CHARS: Final = 12
SAMPLE_TIMEOUT_S: Final = 2.0
#: how a spec of NVIDIA's devices is made, and where it usually is
MAKES_SPEC: Final = "nvidia-ctk cdi generate --output="
SPEC_USUAL: Final = Path("/etc/cdi/nvidia.yaml")
#: files in /dev that belong to one GPU alone; NVIDIA's specs list a render node as well
_OF_ONE_NVIDIA: Final = re.compile(r"/dev/nvidia[0-9]+")
_OF_ONE: Final = re.compile(r"/dev/dri/renderD[0-9]+")
#: a name that identifies a device; a name with a colon, such as 0:1, is a part of a device
_UUID: Final = re.compile(r"(GPU|MIG)-.+")
#: the one device of a Windows host, in its Linux (WSL2)
DXG: Final = "/dev/dxg"


def cdi_names(devices: Sequence[Device], nodes: Sequence[Sequence[str]], specs: Registry) -> list[list[str]]:
    """Return the CDI names of each device, the preferred one first; none for a device that is in no spec.

    `nodes` are each device's own files in /dev. The name with its uuid comes first, unless the spec gives that name the
    file of another device: then the order of the cards has changed since the spec was written.
    """
    return [_names_of(device, frozenset(own), specs) for device, own in zip(devices, nodes, strict=True)]


def _names_of(device: Device, own: frozenset[str], specs: Registry) -> list[str]:
    kind = KINDS.get(device.vendor)
    found: list[str] = []
    if kind is None:
        return found
    of_one = _OF_ONE_NVIDIA if device.vendor == "nvidia" else _OF_ONE
    for name in specs.names(kind):
        files = frozenset(filter(of_one.fullmatch, specs.own_nodes(f"{kind}={name}")))
        if name == device.uuid and (not files or not own or files <= own):
            found.insert(0, f"{kind}={name}")
        elif device.profile:  # a name with the GPU's file is the whole GPU, not its slice
            continue
        elif name != ALL and ":" not in name and files and files <= own and not _UUID.fullmatch(name):
            found.append(f"{kind}={name}")
    return found[:NAMES_MAX]


class SpecWatch:
    """Whether the CDI specs of a host have all of its NVIDIA devices; they are read again when a file has changed.

    Specs that are older than the devices lack slices of MIG that were made since, or a GPU that was put in: an engine
    finds such a device by no name. A host without any spec of NVIDIA's GPUs does not use CDI, and lacks nothing.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        nodes: Sequence[Sequence[str]],
        root: Path = Path("/"),
        timeout_s: float = SAMPLE_TIMEOUT_S,
    ) -> None:
        self._devices = devices
        self._nodes = nodes
        self._where = folders(root)
        self._read: tuple[tuple[str, int, int], ...] | None = None
        self._faults: dict[int, Fault] = {}
        self._look: Question[None] = Question("cdi-specs", self._look_again, timeout_s)

    async def faults(self) -> dict[int, Fault]:
        """Return the fault of each device, by slot, that no spec has; what was last seen if the disk does not answer.

        Such a device is not closed: jobs reach it without CDI.
        """
        with contextlib.suppress(TimeoutError, OSError):
            await self._look.answer()
        return self._faults

    def _look_again(self) -> None:
        files = [path for folder in self._where for path in spec_files(folder)]
        state = tuple((str(path), about.st_mtime_ns, about.st_size) for path in files for about in [path.stat()])
        if state == self._read:
            return
        specs, kind = read_registry(self._where), KINDS["nvidia"]
        fault = Fault("cdi", Gravity.NOTE, f"no CDI spec names it: {MAKES_SPEC}{spec_of(files, kind)}")
        names = cdi_names(self._devices, self._nodes, specs) if specs.names(kind) else []
        found = zip(self._devices, names, strict=False)
        self._faults = {slot: fault for slot, (device, own) in enumerate(found) if _is_lacking(device, own)}
        self._read = state


def _is_lacking(device: Device, names: list[str]) -> bool:
    is_divided = device.mig and not device.profile  # no container can use it whole, so specs have its slices alone
    return device.vendor == "nvidia" and not names and not is_divided


def spec_of(files: Sequence[Path], kind: str) -> Path:
    """Return the file of these that has devices of this kind, the last in precedence; `SPEC_USUAL` if none has."""
    for path in reversed(files):
        with contextlib.suppress(CdiError, OSError):
            if read_spec(path).kind == kind:
                return path
    return SPEC_USUAL


class CdiInventory(Inventory):
    """NVIDIA's devices from the specs of a host without NVML, such as a container or WSL2.

    Their memory and health cannot be read. A device is in use while a process has its file open, as far as this user
    may see.
    """

    def __init__(
        self, specs: Registry, machine: str, root: Path = Path("/"), timeout_s: float = SAMPLE_TIMEOUT_S
    ) -> None:
        """`machine` is the id of this machine: names of specs are the same on every host, and uuids are not."""
        found = _devices(specs, machine, root)
        self._devices = [device for device, _ in found]
        self._nodes = [node for _, node in found]
        self._holders: Question[dict[str, list[DeviceProcess]]] = Question(
            "cdi-holders", lambda: _holders(frozenset(self._nodes), root / "proc"), timeout_s
        )

    def devices(self) -> list[Device]:
        return list(self._devices)

    def nodes(self, slot: int) -> tuple[str, ...]:
        """Return the device's own file in /dev."""
        return (self._nodes[slot],)

    async def sample(self) -> list[SlotReading]:
        if not self._devices:
            return []
        try:
            found = await self._holders.answer()
        except (TimeoutError, OSError):
            return [SlotReading(health="unresponsive") for _ in self._devices]
        return [SlotReading(processes=bounded(found.get(node, []))) for node in self._nodes]

    async def memory_is_free(self, slot: int) -> bool:
        node = self._nodes[slot]
        try:
            return not (await self._holders.fresh_answer()).get(node)
        except (TimeoutError, OSError):
            return False


def _devices(specs: Registry, machine: str, root: Path) -> list[tuple[Device, str]]:
    """Return the devices whose file exists, each with its file, by its number; else the one device of WSL2, if any."""
    kind = KINDS["nvidia"]
    names: dict[str, list[str]] = {}
    for name in specs.names(kind):
        files = [file for file in specs.own_nodes(f"{kind}={name}") if _OF_ONE_NVIDIA.fullmatch(file)]
        if len(files) == 1 and name != ALL and not name.startswith("MIG-") and ":" not in name:
            names.setdefault(files[0], []).append(name)
    found = [
        (_device(int(re.sub(r"\D", "", file)), known, machine), file)
        for file, known in names.items()
        if (root / file.lstrip("/")).exists()
    ]
    if not found and f"{kind}={ALL}" in specs.devices and (root / DXG.lstrip("/")).exists():
        found = [(_device(0, [ALL], machine), DXG)]
    return sorted(found, key=lambda each: each[0].index)


def _device(index: int, names: list[str], machine: str) -> Device:
    kind = KINDS["nvidia"]
    made_up = f"{CDI_UUID}{machine[:_MACHINE_CHARS]}-{names[0]}"
    uuid = next((name for name in names if _UUID.fullmatch(name)), made_up)
    return Device(index, "nvidia", "NVIDIA GPU", uuid, cdi=[f"{kind}={name}" for name in names][:NAMES_MAX])


# ------------------------------------------------------------------------------------------------- in the thread


def _holders(nodes: frozenset[str], proc: Path) -> dict[str, list[DeviceProcess]]:
    """Return the processes that have these files open, by file. Processes that this user may not read are missing."""
    found: dict[str, list[DeviceProcess]] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        pid = int(folder.name)
        try:
            links = {os.readlink(link) for link in (folder / "fd").iterdir()}
        except OSError:
            continue
        for node in nodes & links:
            name = ""
            try:
                name = (folder / "comm").read_text(errors="replace").strip()
            except OSError:
                pass
            found.setdefault(node, []).append(DeviceProcess(pid, name, None, user_of(pid, proc)))
    return found
