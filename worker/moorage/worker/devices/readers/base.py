"""Define what every inventory offers, and how readings become values of a load frame."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from moorage.schemas.frames import Device
from moorage.schemas.printable import in_one_line, stripped
from moorage.worker.devices.readers.faults import Fault, Health

#: A device hotter than this throttles.
THERMAL_C: Final = 90
#: How much an idle device's used memory may exceed its baseline, in MiB: less than the smallest CUDA context, more than
#: the changes by a driver's own bookkeeping.
FREE_TOLERANCE_MIB: Final = 64
#: how long a device may keep the memory of an ended job or lease before it is quarantined
FREE_WAIT_S: Final = 10.0
#: between two checks of a device that is not free yet
PROBE_S: Final = 0.25
PROBE_QUARANTINED_S: Final = 5.0
PROCESSES_MAX: Final = 256
#: comm of NVIDIA MPS's daemon and server: the kernel cuts it at 15 characters
MPS_COMM: Final = "nvidia-cuda-mps"
_NAME_CHARS_MAX: Final = 64
_ONLY_NVIDIA: Final = "only NVIDIA's driver reports what processes use of a GPU"


class HeldUnknown(Exception):
    """How much memory of a device its processes use is unknown; `reason` says in one line why."""

    def __init__(self, reason: str) -> None:
        self.reason: Final = reason
        super().__init__(reason)


ReportFault = Callable[[int, Fault], None]


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that uses a device: host pid, short name (its comm), the name or number of its user.

    With pid 0 the user of the device is no process of this host, and `name` says what it is. `memory_mib` is None if
    the driver does not report it. `user` is empty if unknown.
    """

    pid: int
    name: str = ""
    memory_mib: int | None = None
    user: str = field(default="", compare=False)


class ProcessUse(NamedTuple):
    """What one process uses of a device. `percent` is of the device's time; None if the driver does not report it."""

    memory_mib: int
    percent: int | None


@dataclass(frozen=True, slots=True)
class SlotReading:
    """One device at one moment. A reading of an unresponsive device has only `health` and `faults`."""

    #: the greatest of compute, encoder and decoder; None if the board does not report it
    util_percent: int | None = None
    memory_used_mib: int = 0
    temperature_c: int | None = None
    health: Health = "ok"
    processes: tuple[DeviceProcess, ...] = field(default=())
    #: lasting faults, beside those in `uncorrected_errors`
    faults: tuple[Fault, ...] = ()
    #: uncorrected memory errors since the driver was loaded
    uncorrected_errors: int = 0
    encoder_percent: int = 0
    decoder_percent: int = 0
    #: the greatest of compute, encoder and decoder in the driver's samples since the reading before; 0 if it keeps none
    peak_percent: int = 0
    power_w: int | None = None  # None if the board does not report it
    power_limit_w: int | None = None  # the most that it may draw now; None if the board does not report it
    #: a VM has it: the host cannot read it, and it is neither missing nor free
    handed_on: bool = False
    #: what each process uses, by pid; None unless the driver reports it for every process
    used_by: Mapping[int, ProcessUse] | None = field(default=None, compare=False)

    @property
    def shows_use(self) -> bool:
        """Whether the device worked since the reading before, as far as its driver tells; True if that is unknown."""
        by_processes = any(use.percent for use in (self.used_by or {}).values())
        return self.util_percent != 0 or self.peak_percent > 0 or by_processes or self.health == "unresponsive"

    def foreign(self, ours: Container[int]) -> str:
        """Return the first process that is not in `ours` (pids), as "pid 8812 python (user bob)"; empty for none.

        The daemon and server of NVIDIA MPS use every device that they serve, so they are never foreign.
        """
        for process in self.processes:
            if process.pid not in ours and not process.name.startswith(MPS_COMM):
                who = f" (user {process.user})" if process.user else ""
                pid = f"pid {process.pid} " if process.pid else ""
                return f"{pid}{in_one_line(process.name)}".rstrip() + who
        return ""


class Host(NamedTuple):
    """Where a reader looks for devices.

    `root` is the root of the file systems, `machine` the machine's id (`HostFacts`), for devices without a uuid.
    `listed` are the PCI addresses, as sysfs has them, of devices that readers before it have found.
    """

    root: Path
    machine: str
    listed: frozenset[str] = frozenset()


class Inventory:
    """The devices of one machine. The list never changes while the inventory is open; the readings do.

    Every inventory has `devices`, `sample` and `memory_is_free`. The others answer for devices of which that is not
    known: one that knows more has its own. A class that is a reader has `open`.
    """

    #: devices that are there and cannot be offered, each as a line for the log
    faults: Sequence[str] = ()
    #: labels that it gives its worker: versions of the GPUs' driver
    versions: Mapping[str, str] = {}

    @classmethod
    async def open(cls, host: Host) -> Inventory:
        """Return the devices that this reader finds on a host: none where it has none, or another reader listed them.

        Bounded in time. Raises Refused where devices are there and cannot be read: the worker does not start then.
        """
        raise NotImplementedError(f"{cls.__name__} is no reader: it has no `open`")

    @property
    def simulated(self) -> bool:
        """Whether the devices are simulated: frames about them say so."""
        return False

    def devices(self) -> list[Device]:
        """Return the devices in slot order."""
        raise NotImplementedError

    def nodes(self, slot: int) -> tuple[str, ...]:
        """Return the files in /dev that belong to this device alone, such as /dev/nvidia3; none if unknown."""
        return ()

    async def sample(self) -> list[SlotReading]:
        """Return one reading per slot, in slot order.

        Bounded in time; never raises for a device that does not answer.
        """
        raise NotImplementedError

    async def memory_is_free(self, slot: int) -> bool:
        """Return whether the device's memory is back at its idle baseline; False if the device does not answer."""
        raise NotImplementedError

    def memory_baseline_mib(self, slot: int) -> int:
        """Return the memory in use on the idle device, in MiB.

        It is an assumed upper bound until the device was seen idle, and 0 if the memory cannot be read.
        """
        return 0

    async def held(self, slot: int) -> dict[int, int]:
        """Return the MiB of the device that each process uses, by pid, CUDA contexts included; asked after this call.

        NVIDIA MPS's own processes are left out, and processes that only do graphics if the driver does not report their
        memory. A device that a VM has gives an empty dict. Bounded in time. Raises HeldUnknown unless the memory of
        every compute process is known.
        """
        raise HeldUnknown(_ONLY_NVIDIA)

    async def worked(self, slot: int) -> dict[int, int]:
        """Return the percent of the device's time that each process had of late, by pid; one without an entry had none.

        Bounded in time. Raises HeldUnknown unless the driver reports it for each process.
        """
        raise HeldUnknown(_ONLY_NVIDIA)

    def watch(self, report: ReportFault) -> None:
        """Call `report(slot, fault)` in the running loop for faults that devices report by themselves, until closed."""
        return

    def close(self) -> None:
        """Release the driver; no method but `closed` is called afterwards. A second call does nothing."""
        return

    async def closed(self) -> None:
        """Return once the driver is released; call `close` before. Raises TimeoutError where it is held on to."""
        return


def health_of(temperature_c: int | None, uncorrected_errors: int) -> Health:
    """Return a device's health. Errors outrank heat: a hot device recovers by itself, one with errors does not."""
    if uncorrected_errors > 0:
        return "ecc"
    return "thermal" if temperature_c is not None and temperature_c > THERMAL_C else "ok"


def is_free(reading: SlotReading, baseline_mib: int) -> bool:
    """Return whether a device answers, no VM has it, and it uses at most its baseline plus `FREE_TOLERANCE_MIB`."""
    if reading.handed_on:
        return False
    return reading.health != "unresponsive" and reading.memory_used_mib <= baseline_mib + FREE_TOLERANCE_MIB


def bounded(processes: Sequence[DeviceProcess]) -> tuple[DeviceProcess, ...]:
    """Return the first entry of each pid, lowest pid first, at most `PROCESSES_MAX`.

    Other users choose the names, so names are cut and keep only printable characters.
    """
    by_pid = {process.pid: process for process in reversed(processes)}
    kept = sorted(by_pid.values(), key=lambda process: process.pid)[:PROCESSES_MAX]
    return tuple(
        DeviceProcess(
            each.pid, stripped(each.name, _NAME_CHARS_MAX), each.memory_mib, stripped(each.user, _NAME_CHARS_MAX)
        )
        for each in kept
    )


def user_of(pid: int, proc: Path) -> str:
    """Return the user of a process: a name, or the uid without one; empty if the process is not visible here."""
    try:
        uid = os.stat(proc / str(pid)).st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
