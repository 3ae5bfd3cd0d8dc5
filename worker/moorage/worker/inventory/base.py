"""What every inventory answers, and how readings become words of a load frame."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from moorage.schemas.frames import Device

Health = Literal["ok", "thermal", "ecc", "unresponsive"]

#: A device hotter than this throttles.
THERMAL_C: Final = 90
#: What an idle device's used memory may differ from its baseline, in MiB: less than the smallest CUDA context, more
#: than what a driver's own bookkeeping moves by.
FREE_TOLERANCE_MIB: Final = 64
PROCESSES_MAX: Final = 256
_NAME_CHARS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that holds a device: host pid, short name; `memory_mib` None where the driver does not tell."""

    pid: int
    name: str = ""
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True)
class SlotReading:
    """One device at one moment. An unresponsive one has no other values than its health."""

    util_percent: int = 0
    memory_used_mib: int = 0
    temperature_c: int | None = None
    health: Health = "ok"
    processes: tuple[DeviceProcess, ...] = field(default=())

    def foreign(self, ours: Container[int]) -> str:
        """The first holder that is none of `ours` (pids of jobs), as "pid 8812 python"; empty where there is none."""
        for process in self.processes:
            if process.pid not in ours:
                return f"pid {process.pid} {process.name}".rstrip()
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

    async def sample(self) -> list[SlotReading]:
        """One reading a slot, in slot order. Bounded in time; never raises for a device that does not answer."""
        ...

    async def memory_is_free(self, slot: int) -> bool:
        """Whether the device's memory is seen back at its idle baseline (promise 10). No answer is no."""
        ...

    def memory_baseline_mib(self, slot: int) -> int:
        """The memory in use on the idle device, in MiB."""
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
    return reading.health != "unresponsive" and reading.memory_used_mib <= baseline_mib + FREE_TOLERANCE_MIB


def bounded(processes: Sequence[DeviceProcess]) -> tuple[DeviceProcess, ...]:
    """One entry a pid, lowest first, at most `PROCESSES_MAX`, names cut: other people choose these."""
    by_pid = {process.pid: process for process in reversed(processes)}
    kept = sorted(by_pid.values(), key=lambda process: process.pid)[:PROCESSES_MAX]
    return tuple(DeviceProcess(each.pid, each.name[:_NAME_CHARS_MAX], each.memory_mib) for each in kept)
