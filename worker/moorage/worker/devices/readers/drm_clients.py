"""Find which processes have a DRM device open, and how much of its memory they use, from their file descriptors.

Source: the kernel's document on DRM client usage stats (`drm-*` keys of /proc/PID/fdinfo/FD), and proc_pid_fdinfo(5).
Only processes whose descriptors this user may read are seen; root sees all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moorage.worker.devices.readers.base import DeviceProcess, bounded, user_of

#: Most descriptors of DRM devices in one scan.
CLIENTS_MAX: Final = 4096
#: A client with less memory than this does not use the device. Compute runtimes open every device of a host to list it,
#: even those that a variable hides from them, so an open descriptor alone proves nothing.
HELD_MIB_MIN: Final = 16
_FDINFO_BYTES_MAX: Final = 64 * 1024
_NODES: Final = "/dev/dri/"
_MIB: Final = 1024 * 1024
_UNITS: Final = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
#: Names of a driver's memory regions on the device: amdgpu has vram, xe vram0, i915 local0.
_ON_DEVICE: Final = ("vram", "local")
#: Keys with a region's memory, the best first; drm-memory is amdgpu's older name for resident.
_MEMORY_KEYS: Final = ("drm-resident-", "drm-memory-", "drm-total-")


@dataclass(frozen=True, slots=True)
class DrmClient:
    """One open descriptor of a DRM device. `number` identifies the client, so that a shared descriptor counts once.

    `node` is the device file's name, `address` the PCI address or empty. `memory_bytes` is the client's memory in all
    regions, `vram_bytes` the part on the device; both are None if the driver does not report them. `engine_ns` is the
    time that engines worked for the client, in cycles on xe.
    """

    pid: int
    name: str
    node: str
    address: str
    number: int
    memory_bytes: int | None
    vram_bytes: int | None
    engine_ns: int
    user: str = field(default="", compare=False)

    @property
    def holds(self) -> bool:
        """Whether the client uses the device, rather than only having listed it."""
        if self.memory_bytes is None:
            return self.engine_ns > 0
        return self.memory_bytes >= HELD_MIB_MIN * _MIB


def find_clients(proc: Path) -> list[DrmClient]:
    """Return the clients of every process that this user may read, at most `CLIENTS_MAX`."""
    found: list[DrmClient] = []
    for pid in _pids(proc):
        for number, node in _descriptors(proc / str(pid)):
            client = _client(proc / str(pid), pid, number, node)
            if client is not None:
                found.append(client)
            if len(found) >= CLIENTS_MAX:
                return found
    return found


def holders(clients: Iterable[DrmClient]) -> tuple[DeviceProcess, ...]:
    """Return the processes of these clients of one device that use it, with their memory on it if that is known."""
    by_pid: dict[int, list[DrmClient]] = {}
    for client in clients:
        by_pid.setdefault(client.pid, []).append(client)
    found = []
    for pid, own in by_pid.items():
        if any(client.holds for client in own):
            told = any(client.vram_bytes is not None for client in own)
            found.append(DeviceProcess(pid, own[0].name, memory_mib(own) if told else None, own[0].user))
    return bounded(found)


def memory_mib(clients: Iterable[DrmClient]) -> int:
    """Return the memory of these clients on the device, in MiB, rounded up; each client counts once."""
    by_number = {client.number: client.vram_bytes or 0 for client in clients}
    return -(-sum(by_number.values()) // _MIB)


# -------------------------------------------------------------------------------------------------------- /proc


def _pids(proc: Path) -> Iterator[int]:
    try:
        names = os.listdir(proc)
    except OSError:
        return
    yield from sorted(int(name) for name in names if name.isdigit())


def _descriptors(process: Path) -> Iterator[tuple[str, str]]:
    """Yield descriptors of DRM device files, by their links: cheaper than reading each one's fdinfo."""
    try:
        numbers = os.listdir(process / "fd")
    except OSError:
        return  # the process has ended, or may not be read
    for number in numbers:
        try:
            target = os.readlink(process / "fd" / number)
        except OSError:
            continue
        if target.startswith(_NODES):
            yield number, target.removeprefix(_NODES)


def _client(process: Path, pid: int, number: str, node: str) -> DrmClient | None:
    try:
        with open(process / "fdinfo" / number, "rb") as file:
            text = file.read(_FDINFO_BYTES_MAX).decode(errors="replace")
        name = (process / "comm").read_text(errors="replace").strip()
    except OSError:
        return None
    values = dict(_pairs(text))
    memory = _memory(values)
    return DrmClient(
        pid,
        name,
        node,
        values.get("drm-pdev", "").lower(),
        _number(values.get("drm-client-id", "")) or -1 - pid,  # older drivers give no id: then a process is one client
        sum(memory.values()) if memory else None,
        sum(size for region, size in memory.items() if region.startswith(_ON_DEVICE)) if memory else None,
        sum(_number(value) for key, value in values.items() if _is_engine(key)),
        user_of(pid, process.parent),
    )


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.startswith("drm-"):
            yield key, value.strip()


def _memory(values: dict[str, str]) -> dict[str, int]:
    """Return bytes by region."""
    found: dict[str, int] = {}
    for prefix in _MEMORY_KEYS:
        for key, value in values.items():
            if key.startswith(prefix) and not key.startswith("drm-total-cycles-"):
                found.setdefault(key.removeprefix(prefix), _number(value))
    return found


def _is_engine(key: str) -> bool:
    """Return whether a key is the time or cycles that an engine worked for the client (xe counts cycles)."""
    return key.startswith(("drm-engine-", "drm-cycles-")) and not key.startswith("drm-engine-capacity-")


def _number(value: str) -> int:
    """Return the number in `6044 KiB`, `0` or `28257900 ns`, in base units; 0 if there is none."""
    count, _, unit = value.partition(" ")
    return int(count) * _UNITS.get(unit.strip(), 1) if count.isdigit() else 0
