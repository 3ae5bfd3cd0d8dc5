"""What every inventory answers, and how readings become words of a load frame."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from moorage.schemas.frames import Device
from moorage.schemas.printable import in_one_line
from moorage.worker.inventory.faults import Fault, Health

#: A device hotter than this throttles.
THERMAL_C: Final = 90
#: What an idle device's used memory may differ from its baseline, in MiB: less than the smallest CUDA context, more
#: than what a driver's own bookkeeping moves by.
FREE_TOLERANCE_MIB: Final = 64
#: how long a device may keep the memory of whoever is gone before it is quarantined
FREE_WAIT_S: Final = 10.0
#: between two looks at a device that is not seen free yet
PROBE_S: Final = 0.25
PROBE_QUARANTINED_S: Final = 5.0
PROCESSES_MAX: Final = 256
#: comm of NVIDIA MPS's daemon and server: the kernel cuts it at 15 characters
MPS_COMM: Final = "nvidia-cuda-mps"
_NAME_CHARS_MAX: Final = 64


class HeldUnknown(Exception):
    """What processes hold of a device cannot be told; `reason` is one line."""

    def __init__(self, reason: str) -> None:
        self.reason: Final = reason
        super().__init__(reason)


ReportFault = Callable[[int, Fault], None]


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that holds a device: host pid, short name (its comm), the name or number of its user.

    Pid 0 is of a holder that is no process of this host, by its name.

    `memory_mib` None where the driver does not tell.
    """

    pid: int
    name: str = ""
    memory_mib: int | None = None
    user: str = field(default="", compare=False)


class ProcessUse(NamedTuple):
    """What one process uses of a device; `percent` of its time, None where the driver does not tell."""

    memory_mib: int
    percent: int | None


@dataclass(frozen=True, slots=True)
class SlotReading:
    """One device at one moment. An unresponsive one has no other values than its health."""

    util_percent: int | None = None  # None where the board does not tell
    memory_used_mib: int = 0
    temperature_c: int | None = None
    health: Health = "ok"
    processes: tuple[DeviceProcess, ...] = field(default=())
    #: what lasts and is wrong with it, beside what `uncorrected_errors` says
    faults: tuple[Fault, ...] = ()
    #: uncorrected memory errors since the driver was loaded
    uncorrected_errors: int = 0
    #: a VM has it: the host cannot read it, and it is neither lost nor free
    handed_on: bool = False
    #: what each process uses, by pid; None where the driver does not tell that of each that is there
    used_by: Mapping[int, ProcessUse] | None = field(default=None, compare=False)

    def foreign(self, ours: Container[int]) -> str:
        """The first holder that is none of `ours` (pids), as "pid 8812 python (user bob)"; empty for none.

        The daemon and server of NVIDIA MPS hold every device that they serve, whoever leases it: they are nobody's.
        """
        for process in self.processes:
            if process.pid not in ours and not process.name.startswith(MPS_COMM):
                who = f" (user {process.user})" if process.user else ""
                pid = f"pid {process.pid} " if process.pid else ""
                return f"{pid}{in_one_line(process.name)}".rstrip() + who
        return ""


class Inventory(Protocol):
    """The devices of one machine. The list never changes while it is open; what is read of them does."""

    @property
    def simulated(self) -> bool:
        """True where nothing here is real: every frame that says so carries the flag."""
        ...

    def devices(self) -> list[Device]:
        """The devices in slot order."""
        ...

    def nodes(self, slot: int) -> tuple[str, ...]:
        """Return the files in /dev that this device alone has, such as /dev/nvidia3; none where that is not known."""
        ...

    async def sample(self) -> list[SlotReading]:
        """One reading a slot, in slot order. Bounded in time; never raises for a device that does not answer."""
        ...

    async def memory_is_free(self, slot: int) -> bool:
        """Whether the device's memory is seen back at its idle baseline. No answer is no."""
        ...

    def memory_baseline_mib(self, slot: int) -> int:
        """The memory in use on the idle device, in MiB."""
        ...

    async def held(self, slot: int) -> dict[int, int]:
        """The MiB of the device that each process holds, by pid, its CUDA contexts with it.

        Bounded in time. Raises HeldUnknown where that cannot be told of every process that is there.
        """
        ...

    def watch(self, report: ReportFault) -> None:
        """Call `report(slot, fault)` in the running loop for what devices say by themselves, from now until closed."""
        ...

    def close(self) -> None:
        """Give the driver back. Nothing is asked afterwards; again does nothing."""
        ...


def health_of(temperature_c: int | None, uncorrected_errors: int) -> Health:
    """ECC before temperature: a hot device recovers by itself, one with uncorrected errors does not."""
    if uncorrected_errors > 0:
        return "ecc"
    return "thermal" if temperature_c is not None and temperature_c > THERMAL_C else "ok"


def is_free(reading: SlotReading, baseline_mib: int) -> bool:
    """The rule of every inventory: the device answers, and uses its idle memory and at most the tolerance more."""
    if reading.handed_on:
        return False
    return reading.health != "unresponsive" and reading.memory_used_mib <= baseline_mib + FREE_TOLERANCE_MIB


def bounded(processes: Sequence[DeviceProcess]) -> tuple[DeviceProcess, ...]:
    """One entry a pid, lowest first, at most `PROCESSES_MAX`, names cut: other people choose these."""
    by_pid = {process.pid: process for process in reversed(processes)}
    kept = sorted(by_pid.values(), key=lambda process: process.pid)[:PROCESSES_MAX]
    return tuple(DeviceProcess(each.pid, _clean(each.name), each.memory_mib, _clean(each.user)) for each in kept)


def user_of(pid: int, proc: Path) -> str:
    """Who runs a process: a name, or the uid where it has none; empty where there is no such process here."""
    try:
        uid = os.stat(proc / str(pid)).st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _clean(text: str) -> str:
    return "".join(char for char in text[:_NAME_CHARS_MAX] if char.isprintable())
