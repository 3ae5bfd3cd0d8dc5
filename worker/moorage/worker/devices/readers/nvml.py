"""Read NVIDIA devices through NVML (`pynvml`, loaded when first needed).

Sources: the NVML API reference, and nvidia-smi, whose answers this module must match (`tests/release/gpu`). A missing
library or driver means no GPUs and is no error. NVML can hang in the kernel, for one device or for all, so every
reading is made in a thread of its own (`threads`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import re
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from moorage.schemas.frames import Device
from moorage.schemas.gpu import mig_profile
from moorage.schemas.where import GPU_CUDA, GPU_DRIVER
from moorage.system.daemon_threads import Question, in_thread, start_thread
from moorage.worker.devices.readers.base import (
    MPS_COMM,
    DeviceProcess,
    HeldUnknown,
    Host,
    Inventory,
    ProcessUse,
    ReportFault,
    SlotReading,
    bounded,
    health_of,
    is_free,
    user_of,
)
from moorage.worker.devices.readers.cdi import folders, read_registry
from moorage.worker.devices.readers.cdi_devices import CdiInventory
from moorage.worker.devices.readers.faults import (
    GPU_LOST,
    RESET_REQUIRED,
    SLOWED_DOWN,
    UNRESPONSIVE,
    Fault,
    of_fabric,
    of_recovery_action,
    of_rows,
)
from moorage.worker.devices.readers.nvml_events import NvmlEvents

OPEN_TIMEOUT_S: Final = 30.0  # a first nvmlInit without persistence mode loads the driver: seconds for each device
SAMPLE_TIMEOUT_S: Final = 2.0
SHUT_DOWN_TIMEOUT_S: Final = 10.0
DEVICES_MAX: Final = 64
#: minimum time span of the samples of processes' work: the driver makes a sample at least once a second
SAMPLES_OF_S: Final = 1.0
AHEAD_S_MAX: Final = 1.0
"""A sample of a process's work that says to be taken later than this from now is left out."""
SAMPLES_OF_S_MAX: Final = 60.0  # and the maximum
#: Linux gives no greater number to a process (PID_MAX_LIMIT)
PID_MAX: Final = 1 << 22
#: The baseline of a device that was in use when first seen: the most that an idle one uses, with reserved memory.
BASELINE_ASSUMED_MIB: Final = 1024
_MIB: Final = 1024 * 1024
#: nvml.h: nvmlClocksEventReasonHwThermalSlowdown
_HW_THERMAL_SLOWDOWN: Final = 0x40

T = TypeVar("T")


class NvmlUnavailable(RuntimeError):
    """NVML is installed and does not work: it failed or did not answer. `reason` is its error."""

    def __init__(self, reason: str) -> None:
        self.reason: Final = reason
        super().__init__(f"NVML does not work on this host: {reason}")


@dataclass(slots=True)
class _Handle:
    """A device's handle, and what the load frame does not have."""

    raw: Any
    memory_version: Any
    baseline_mib: int
    whole: Any  # the GPU of a MIG slice, which reports its health; else the same as `raw`
    uuid: str  # the uuid of `whole`
    minor: int | None = None  # N of /dev/nvidiaN, which may differ from the index; for a MIG slice, its GPU's
    caps: tuple[str, ...] = ()  # the files with a MIG slice's access rights
    asked_s: float = 0.0  # when it was last asked for samples of processes, by CLOCK_MONOTONIC
    read_s: float = 0.0  # when it was last asked for samples of its own, by CLOCK_MONOTONIC


class NvmlInventory(Inventory):
    """NVIDIA's devices; make it with `open_nvml`. Without library or driver `is_there` is False.

    `faults` says which devices did not answer at the start, and so are no slots.
    """

    def __init__(
        self,
        api: Any,
        devices: list[Device],
        handles: list[_Handle],
        faults: list[str],
        proc: Path,
        timeout_s: float,
        is_there: bool = True,
    ) -> None:
        self._api = api
        self._devices = devices
        self._handles = handles
        self._questions = [
            Question("nvml-sample", partial(_read_device, api, handle, proc), timeout_s) for handle in handles
        ]
        self._holders = [Question("nvml-held", partial(_held, api, handle.raw, proc), timeout_s) for handle in handles]
        self._workers = [
            Question("nvml-worked", partial(_worked, api, handle.raw, proc, SAMPLES_OF_S), timeout_s)
            for handle in handles
        ]
        self.is_there = is_there
        self._closed = False
        self._events: NvmlEvents | None = None
        self._is_shut = threading.Event()
        self.faults = faults

    @classmethod
    async def open(cls, host: Host) -> Inventory:
        """Open NVIDIA's devices: those of NVML, and without library or driver those of the host's CDI specs."""
        found = await open_nvml(sysfs=host.root / "sys", proc=host.root / "proc")
        if found.is_there:
            return found
        specs = await in_thread("cdi-open", lambda: read_registry(folders(host.root)))
        return CdiInventory(specs, host.machine, host.root)

    def devices(self) -> list[Device]:
        return list(self._devices)

    def nodes(self, slot: int) -> tuple[str, ...]:
        """Return the device's own files in /dev: of a MIG slice, its GPU's file and those with its access rights.

        None if the driver does not report the number.
        """
        minor = self._handles[slot].minor
        return () if minor is None else (f"/dev/nvidia{minor}", *self._handles[slot].caps)

    def memory_baseline_mib(self, slot: int) -> int:
        """Return the baseline: recorded at open, and lowered by every later reading without a process on the device.

        A device that had a process at open starts with `BASELINE_ASSUMED_MIB`.
        """
        return self._handles[slot].baseline_mib

    async def sample(self) -> list[SlotReading]:
        slots = range(len(self._handles))
        return list(await asyncio.gather(*(self._reading(slot, self._questions[slot].answer) for slot in slots)))

    async def memory_is_free(self, slot: int) -> bool:
        reading = await self._reading(slot, self._questions[slot].fresh_answer)
        return is_free(reading, self._handles[slot].baseline_mib)

    async def held(self, slot: int) -> dict[int, int]:
        return await self._known(self._holders[slot].fresh_answer)

    async def worked(self, slot: int) -> dict[int, int]:
        return await self._known(self._workers[slot].answer)

    async def _known(self, ask: Callable[[], Awaitable[dict[int, int]]]) -> dict[int, int]:
        try:
            return await ask()
        except TimeoutError:
            raise HeldUnknown("NVML does not answer") from None
        except (self._api.NVMLError, AttributeError) as error:
            raise HeldUnknown(f"NVML does not report what processes use: {error}") from None

    def watch(self, report: ReportFault) -> None:
        if self._handles and self._events is None and not self._closed:
            self._events = NvmlEvents(
                self._api, [handle.whole for handle in self._handles], [handle.uuid for handle in self._handles]
            )
            self._events.start(report)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._events is not None:
            self._events.stop()
        if self._handles:
            self._shut_down_unused()

    def _shut_down_unused(self) -> None:
        """Shut NVML down, in a thread, once no call uses it; if one never returns, the end of the process does it."""
        asked: list[Question[Any]] = [*self._questions, *self._holders, *self._workers]
        pending = [each.pending for each in asked if each.pending is not None]
        if pending:
            asyncio.gather(*pending, return_exceptions=True).add_done_callback(lambda _: self._shut_down_unused())
        else:
            start_thread("nvml-shutdown", self._shut_down)

    def _shut_down(self) -> None:
        if self._events is not None:
            self._events.join()
        _ignore_errors(self._api, self._api.nvmlShutdown)
        self._is_shut.set()

    async def closed(self) -> None:
        """Return once NVML is shut down; call `close` before.

        Raises TimeoutError after `SHUT_DOWN_TIMEOUT_S` if a call has not returned: then NVML stays open until it does.
        """
        if self._handles and not await in_thread("nvml-closed", partial(self._is_shut.wait, SHUT_DOWN_TIMEOUT_S)):
            raise TimeoutError

    async def _reading(self, slot: int, ask: Callable[[], Awaitable[SlotReading]]) -> SlotReading:
        if self._closed:
            return SlotReading(health="unresponsive")
        try:
            reading = await ask()
        except (TimeoutError, self._api.NVMLError) as error:
            return SlotReading(health="unresponsive", faults=_faults_of_error(self._api, error))
        handle = self._handles[slot]
        if not reading.processes:
            handle.baseline_mib = min(handle.baseline_mib, reading.memory_used_mib)
        return reading


async def open_nvml(
    *,
    sysfs: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    open_timeout_s: float = OPEN_TIMEOUT_S,
    sample_timeout_s: float = SAMPLE_TIMEOUT_S,
) -> NvmlInventory:
    """Open all NVIDIA devices, with their baselines; none without library or driver.

    Whole GPUs come first, then MIG slices, each in NVML's order.

    Raises NvmlUnavailable if NVML is there and fails or hangs: a host whose GPUs cannot be read must not look like a
    host without GPUs.
    """
    nvml = import_pynvml()
    is_there = True
    try:
        async with asyncio.timeout(open_timeout_s):
            found = await in_thread("nvml-open", lambda: _open(nvml, sysfs, proc))
            versions = await in_thread("nvml-versions", lambda: _versions(nvml)) if found[0] else {}
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        found, is_there, versions = ([], [], []), False, {}
    except TimeoutError:
        raise NvmlUnavailable(f"no answer within {open_timeout_s:g} s") from None
    except nvml.NVMLError as error:
        raise NvmlUnavailable(str(error)) from error
    opened = NvmlInventory(nvml, *found, proc, sample_timeout_s, is_there)
    opened.versions = versions
    return opened


def import_pynvml() -> Any:
    """Return the module of the bindings, loaded when first needed."""
    with warnings.catch_warnings():
        # The distribution is nvidia-ml-py. If one named pynvml is installed too, it warns about its own name.
        warnings.simplefilter("ignore", FutureWarning)
        return importlib.import_module("pynvml")


# ------------------------------------------------------------------------- in the thread: only NVML and files below


def _open(api: Any, sysfs: Path, proc: Path) -> tuple[list[Device], list[_Handle], list[str]]:
    api.nvmlInit()
    whole: list[tuple[Device, _Handle]] = []
    slices: list[tuple[Device, _Handle]] = []
    faults: list[str] = []
    for index in range(min(api.nvmlDeviceGetCount(), DEVICES_MAX)):
        try:
            raw = api.nvmlDeviceGetHandleByIndex(index)
            device = _describe(api, raw, index, sysfs)
            parts = _slices(api, raw, device) if device.mig else []
            for each, part in parts or [(device, raw)]:
                (slices if parts else whole).append((each, _handle(api, part, raw, device.uuid, proc)))
        except api.NVMLError as error:
            faults.append(f"device {index}: {error}")  # without a uuid it cannot be a slot
    # whole GPUs come first, so that making and removing slices does not change their positions
    devices = [device for device, _ in whole + slices]
    handles = [handle for _, handle in whole + slices]
    linked = [_linked_devices(api, devices, handles, position) for position in range(len(devices))]
    devices = [msgspec.structs.replace(device, peers=peers) for device, peers in zip(devices, linked, strict=True)]
    return devices, handles, faults


def _versions(api: Any) -> dict[str, str]:
    """Return the versions of the driver, and of CUDA as far as it supports it; one that NVML does not tell is left
    out."""
    found: dict[str, str] = {}
    with contextlib.suppress(api.NVMLError):
        found[GPU_DRIVER] = str(api.nvmlSystemGetDriverVersion())
    with contextlib.suppress(api.NVMLError):
        cuda = int(api.nvmlSystemGetCudaDriverVersion())
        found[GPU_CUDA] = f"{cuda // 1000}.{cuda % 1000 // 10}"
    return found


def _handle(api: Any, raw: Any, whole: Any, uuid: str, proc: Path) -> _Handle:
    minor = _optional(api, lambda: int(api.nvmlDeviceGetMinorNumber(whole)), None)
    caps = _caps(api, raw, minor, proc) if raw is not whole else ()
    handle = _Handle(raw, _memory_version(api, raw), BASELINE_ASSUMED_MIB, whole, uuid, minor, caps)
    reading = _read_device(api, handle, proc)
    if not reading.processes:
        handle.baseline_mib = reading.memory_used_mib
    return handle


def _caps(api: Any, part: Any, minor: int | None, proc: Path) -> tuple[str, ...]:
    """Return the files in /dev with a MIG slice's access rights; none if the driver does not tell which they are."""
    instance = _optional(api, lambda: int(api.nvmlDeviceGetGpuInstanceId(part)), None)
    compute = _optional(api, lambda: int(api.nvmlDeviceGetComputeInstanceId(part)), None)
    folder = proc / f"driver/nvidia/capabilities/gpu{minor}/mig/gi{instance}"
    found = []
    for path in (folder / "access", folder / f"ci{compute}/access"):
        try:
            number = re.search(r"^DeviceFileMinor:\s*([0-9]+)", path.read_text(), re.MULTILINE)
        except OSError:
            return ()
        if number is None:
            return ()
        found.append(f"/dev/nvidia-caps/nvidia-cap{number[1]}")
    return tuple(found)


def _slices(api: Any, raw: Any, whole: Device) -> list[tuple[Device, Any]]:
    """Return the MIG slices of a GPU. The GPU itself is not offered beside its slices."""
    found: list[tuple[Device, Any]] = []
    for index in range(_optional(api, lambda: int(api.nvmlDeviceGetMaxMigDeviceCount(raw)), 0)):
        part = _optional(api, partial(api.nvmlDeviceGetMigDeviceHandleByIndex, raw, index), None)
        if part is None:
            continue
        name, uuid = _text(api.nvmlDeviceGetName(part)), _text(api.nvmlDeviceGetUUID(part))
        memory_mib = int(api.nvmlDeviceGetMemoryInfo(part).total) // _MIB
        device = msgspec.structs.replace(whole, name=name, uuid=uuid, memory_mib=memory_mib, profile=mig_profile(name))
        found.append((device, part))
    return found


def _describe(api: Any, raw: Any, index: int, sysfs: Path) -> Device:
    pci = _text(api.nvmlDeviceGetPciInfo(raw).busId)
    compute = _optional(api, lambda: "{}.{}".format(*api.nvmlDeviceGetCudaComputeCapability(raw)), "")
    mig = _optional(api, lambda: api.nvmlDeviceGetMigMode(raw)[0] == api.NVML_DEVICE_MIG_ENABLE, False)
    return Device(
        index=index,
        vendor="nvidia",
        name=_text(api.nvmlDeviceGetName(raw)),
        uuid=_text(api.nvmlDeviceGetUUID(raw)),
        memory_mib=int(api.nvmlDeviceGetMemoryInfo(raw).total) // _MIB,
        pci=pci,
        numa=_numa_node(pci, sysfs),
        compute=compute,
        mig=mig,
    )


def _linked_devices(api: Any, devices: list[Device], handles: list[_Handle], position: int) -> list[int]:
    """Return the indices of devices reached over NVLink, directly or through a switch."""

    def linked(other: int) -> bool:
        status = api.nvmlDeviceGetP2PStatus(handles[position].raw, handles[other].raw, api.NVML_P2P_CAPS_INDEX_NVLINK)
        return bool(status == api.NVML_P2P_STATUS_OK)

    if devices[position].profile:
        return []  # no slice reaches another device
    others = [other for other in range(len(devices)) if other != position and not devices[other].profile]
    # A device that fails here fails again when it is read; its links are not essential.
    return [devices[other].index for other in others if _ignore_errors(api, partial(linked, other))]


def _numa_node(pci: str, sysfs: Path) -> int:
    """Return the NUMA node from sysfs, which writes the domain with four digits, not eight; -1 if there is none."""
    domain, _, rest = pci.lower().partition(":")
    try:
        return int((sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _memory_version(api: Any, raw: Any) -> Any:
    """Return version 2 of the memory call, which excludes reserved memory as nvidia-smi does; None on older drivers."""
    version = getattr(api, "nvmlMemory_v2", None)
    if version is not None and _optional(api, lambda: api.nvmlDeviceGetMemoryInfo(raw, version=version), None) is None:
        return None
    return version


def _read_device(api: Any, handle: _Handle, proc: Path) -> SlotReading:
    """Return a reading. Raises NVMLError if the device does not answer; values that a board lacks keep their defaults.

    Memory and processes of a MIG slice are its own; the rest is its GPU's.
    """
    raw, version = handle.raw, handle.memory_version
    memory = api.nvmlDeviceGetMemoryInfo(raw, version=version) if version else api.nvmlDeviceGetMemoryInfo(raw)
    raw = handle.whole
    temperature = _optional(api, lambda: int(api.nvmlDeviceGetTemperature(raw, api.NVML_TEMPERATURE_GPU)), None)
    errors = _optional(
        api,
        lambda: int(
            api.nvmlDeviceGetTotalEccErrors(raw, api.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, api.NVML_VOLATILE_ECC)
        ),
        0,
    )
    compute = _optional(api, lambda: int(api.nvmlDeviceGetUtilizationRates(raw).gpu), None)
    encoder = min(_optional(api, lambda: int(api.nvmlDeviceGetEncoderUtilization(raw)[0]), 0), 100)
    decoder = min(_optional(api, lambda: int(api.nvmlDeviceGetDecoderUtilization(raw)[0]), 0), 100)
    video = max(encoder, decoder)
    util_percent = max(compute or 0, video) if video else compute
    return SlotReading(
        util_percent=util_percent,
        encoder_percent=encoder,
        decoder_percent=decoder,
        peak_percent=_peak(api, handle),
        power_w=_optional(api, lambda: int(api.nvmlDeviceGetPowerUsage(raw)) // 1000, None),
        power_limit_w=_optional(api, lambda: int(api.nvmlDeviceGetEnforcedPowerLimit(raw)) // 1000, None),
        memory_used_mib=int(memory.used) // _MIB,
        temperature_c=temperature,
        health=health_of(temperature, errors),
        processes=_processes(api, handle.raw, proc),
        used_by=_used_by(api, handle, util_percent, proc),
        faults=_faults(api, raw),
        uncorrected_errors=errors,
    )


def _faults(api: Any, raw: Any) -> tuple[Fault, ...]:
    """Return lasting faults: row remapping, what the driver recommends, the NVLink fabric, throttling for heat."""
    found: list[Fault | None] = []
    rows = _optional(api, lambda: api.nvmlDeviceGetRemappedRows(raw), None)
    if rows is not None:
        found.append(of_rows(bool(rows[2]), bool(rows[3])))
    found.append(of_recovery_action(_optional(api, lambda: _recovery_action(api, raw), 0)))
    found.append(_fabric(api, raw))
    throttled = _optional(api, lambda: int(api.nvmlDeviceGetCurrentClocksThrottleReasons(raw)), 0)
    if throttled & _HW_THERMAL_SLOWDOWN:
        found.append(SLOWED_DOWN)
    return tuple(fault for fault in found if fault is not None)


def _fabric(api: Any, raw: Any) -> Fault | None:
    """Return the fault of the NVLink fabric; None without such a fabric, and with a driver that reports none."""

    def ask() -> Fault | None:
        try:
            info = api.c_nvmlGpuFabricInfo_v2_t()
            api.nvmlDeviceGetGpuFabricInfoV(raw, ctypes.byref(info))
            return of_fabric(info.state, info.status, info.healthMask)
        except (api.NVMLError_FunctionNotFound, api.NVMLError_NotSupported, AttributeError):  # an older driver
            info = api.c_nvmlGpuFabricInfo_t()
            api.nvmlDeviceGetGpuFabricInfo(raw, ctypes.byref(info))
            return of_fabric(info.state, info.status, 0)

    return _optional(api, ask, None)


def _recovery_action(api: Any, raw: Any) -> int:
    """Return the driver's recommended action; 0 if it has none or reports none."""
    [value] = api.nvmlDeviceGetFieldValues(raw, [api.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return int(value.value.uiVal) if value.nvmlReturn == api.NVML_SUCCESS else 0


def _faults_of_error(api: Any, error: BaseException) -> tuple[Fault, ...]:
    """Return the faults for an error of NVML: a time-out may pass, but a lost device does not come back."""
    if isinstance(error, api.NVMLError_GpuIsLost):
        return (GPU_LOST,)
    return (RESET_REQUIRED,) if isinstance(error, api.NVMLError_ResetRequired) else (UNRESPONSIVE,)


def _processes(api: Any, raw: Any, proc: Path) -> tuple[DeviceProcess, ...]:
    """Return compute, MPS and graphics processes by host pid; names are from /proc, which needs no permission."""
    found: list[DeviceProcess] = []
    for name in (
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetMPSComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
    ):
        for entry in _optional(api, partial(_call, api, name, raw), list[Any]()):
            used, pid = entry.usedGpuMemory, int(entry.pid)
            memory_mib = None if used is None else used // _MIB
            found.append(DeviceProcess(pid, _name_of(pid, proc), memory_mib, user_of(pid, proc)))
    return bounded(found)


def _held(api: Any, raw: Any, proc: Path) -> dict[int, int]:
    """Return the MiB of each process by pid, without MPS's own; of a pid in several lists, the largest number.

    A process that only does graphics is left out if the driver does not report its memory: a desktop may be one, and
    must not end the guarding of the others. Raises HeldUnknown if that of a compute process is not reported, NVMLError,
    AttributeError.
    """
    found: dict[int, int] = {}
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
        for entry in getattr(api, name)(raw):
            pid, used = int(entry.pid), entry.usedGpuMemory
            if used is None:
                raise HeldUnknown(f"NVML does not tell what pid {pid} {_name_of(pid, proc)}".rstrip() + " holds")
            if not _name_of(pid, proc).startswith(MPS_COMM):
                found[pid] = max(found.get(pid, 0), int(used) // _MIB)
    for entry in _optional(api, partial(_call, api, "nvmlDeviceGetGraphicsRunningProcesses", raw), list[Any]()):
        if entry.usedGpuMemory is not None:
            found[int(entry.pid)] = max(found.get(int(entry.pid), 0), int(entry.usedGpuMemory) // _MIB)
    return found


def _used_by(api: Any, handle: _Handle, util_percent: int | None, proc: Path) -> dict[int, ProcessUse] | None:
    """Return what each compute process uses; None if the driver does not report the memory of all of them.

    None for a MIG slice, too: the driver reports work for whole GPUs only.
    """
    if handle.whole is not handle.raw:
        return None
    try:
        held = _held(api, handle.raw, proc)
    except (api.NVMLError, AttributeError, HeldUnknown):
        return None
    worked: dict[int, int] | None = {}
    now_s = time.monotonic()
    window_s, handle.asked_s = max(SAMPLES_OF_S, min(now_s - handle.asked_s, SAMPLES_OF_S_MAX)), now_s
    try:
        worked = _worked(api, handle.raw, proc, window_s) if held else {}
    except (api.NVMLError, AttributeError, HeldUnknown):
        worked = None
    if worked is not None and util_percent and not any(worked.values()):
        worked = None  # the device works, but no process is reported for it
    return {pid: ProcessUse(mib, None if worked is None else worked.get(pid, 0)) for pid, mib in held.items()}


def _peak(api: Any, handle: _Handle) -> int:
    """Return the greatest percent in the driver's samples since the last call; 0 if it has none.

    A reading is of one moment. The driver keeps samples of some seconds up to a minute, by its board: short work
    between two readings is in them.
    """
    now_s, late_us = time.monotonic(), int((time.time() + AHEAD_S_MAX) * 1e6)
    window_s, handle.read_s = max(SAMPLES_OF_S, min(now_s - handle.read_s, SAMPLES_OF_S_MAX)), now_s
    since_us = int((time.time() - window_s) * 1e6)
    peak = 0
    for kind in (api.NVML_GPU_UTILIZATION_SAMPLES, api.NVML_ENC_UTILIZATION_SAMPLES, api.NVML_DEC_UTILIZATION_SAMPLES):
        try:
            _, samples = api.nvmlDeviceGetSamples(handle.whole, kind, since_us)
        except (api.NVMLError, AttributeError):  # it has none; the other calls tell what is wrong with a device
            continue
        for sample in samples:
            if since_us < sample.timeStamp <= late_us:  # as in `_worked`, some are from the future
                peak = max(peak, min(int(sample.sampleValue.uiVal), 100))
    return peak


def _worked(api: Any, raw: Any, proc: Path, window_s: float) -> dict[int, int]:
    """Return the percent of the device's time by pid, from each process's latest sample of the last `window_s` seconds.

    A process without an entry has done nothing. Raises HeldUnknown if the driver reports the work of an MPS server:
    that is its clients', and the driver does not say whose. Raises NVMLError, AttributeError.
    """
    late_us, since_us = int((time.time() + AHEAD_S_MAX) * 1e6), int((time.time() - window_s) * 1e6)
    # a sample from the future is not one: some drivers fill their buffer with such (NVIDIA/go-nvml issue 11)
    samples = [
        each
        for each in _samples(api, raw, since_us)
        if 0 < each.pid <= PID_MAX and since_us < each.timeStamp <= late_us
    ]
    samples.sort(key=lambda each: each.timeStamp)
    worked = {int(each.pid): min(max(each.smUtil, each.encUtil, each.decUtil), 100) for each in samples}
    if any(_name_of(pid, proc).startswith(MPS_COMM) for pid in worked):
        raise HeldUnknown("NVML does not tell which client of an MPS server worked")
    return worked


def _samples(api: Any, raw: Any, since_us: int) -> list[Any]:
    """Return the driver's samples of processes. Raises NVMLError, AttributeError."""
    asked = ["nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"]  # some have the newer alone
    while True:
        try:
            found: list[Any] = getattr(api, asked.pop(0))(raw, since_us)
            return found
        except api.NVMLError as error:
            value = getattr(error, "value", None)
            if value in (api.NVML_SUCCESS, api.NVML_ERROR_NOT_FOUND):  # the bindings raise SUCCESS if there are none
                return []
            if value != api.NVML_ERROR_NOT_SUPPORTED or not asked:
                raise


def _call(api: Any, name: str, raw: Any) -> list[Any]:
    found: list[Any] = getattr(api, name)(raw)  # an older library lacks some; the caller handles that
    return found


def _name_of(pid: int, proc: Path) -> str:
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""  # ended meanwhile, or in another pid namespace


def _optional(api: Any, ask: Callable[[], T], otherwise: T) -> T:
    """Return the value that `ask` returns, or `otherwise` if board, driver or permission lacks it.

    Any other error is the device's and is raised.
    """
    try:
        return ask()
    except (
        api.NVMLError_NotSupported,
        api.NVMLError_NotFound,
        api.NVMLError_NoPermission,
        api.NVMLError_FunctionNotFound,
        AttributeError,  # a library older than the call
    ):
        return otherwise


def _ignore_errors(api: Any, ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except api.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
