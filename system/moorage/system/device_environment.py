"""Make the variables with which a process sees the devices of its lease and no others: of a job, or of a program that
borrows GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from moorage.schemas.errors import Refused, problem
from moorage.schemas.frames import START_FAILED, Device
from moorage.schemas.gpu import GpuSpec, Sharing
from moorage.schemas.names import CDI_UUID
from moorage.schemas.reserved_variables import MPS_DIRECTORIES, RESERVED

#: where an operator's MPS daemon keeps its sockets and logs, unless the request names other directories
MPS_PIPE_DIRECTORY: Final = "/tmp/nvidia-mps"
MPS_LOG_DIRECTORY: Final = "/tmp/nvidia-log"
#: the variable that limits the memory of an MPS client from its start on
MPS_MEMORY_LIMIT: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"

#: a uuid that ROCm's runtime accepts; a device without a uuid shows GPU-XX
_ROCM_UUID: Final = re.compile(r"GPU-[0-9a-fA-F]{16}")
_TF_PATHS: Final = ("PATH", "LD_PRELOAD", "LD_LIBRARY_PATH")  # only these three
#: each source variable: which variable it extends, and whether at the front
_TF_SOURCES: Final = {
    **{f"TF_{target}": (target, False) for target in _TF_PATHS},
    **{f"TF_PREPEND_{target}": (target, True) for target in _TF_PATHS},
}


class HostAtFault(Refused):
    """This host cannot start an attempt. The job is not at fault, so it is tried again on another host."""

    def __init__(self, why: str, *, found: object = None, next_step: str = "") -> None:
        told = problem("failed-precondition", f"{START_FAILED}: {why}", found=found, next=next_step)
        super().__init__(msgspec.structs.replace(told, fault="fleet"))


class SharingUnavailable(HostAtFault):
    """This host cannot offer the sharing `mode`, for example because a directory or file is missing.

    `path` is that directory or file; "" if there is another reason.
    """

    def __init__(self, mode: Sharing, message: str, path: str = "") -> None:
        self.mode: Final[Sharing] = mode
        self.path: Final = path
        words = f"{mode} is unavailable on {os.uname().nodename}: {message}"
        super().__init__(words, found=path or None)


class JobEnvironment(dict[str, str]):
    """Environment variables, some of them secret: its repr shows the names only."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<JobEnvironment {' '.join(sorted(self))}>"

    __str__ = __repr__


def device_environment(
    devices: Sequence[Device],
    mode: Sharing,
    spec: GpuSpec,
    *,
    simulated: bool = False,
    has_own_mps: bool = False,
    by_uuid: bool = False,
    sees_only_its_own: bool = False,
) -> JobEnvironment:
    """Return the variables that show a process exactly the `devices` of its lease, in the lease's order.

    Without devices, variables hide every NVIDIA and AMD GPU of the host; Level Zero has no value that hides all.
    Libraries that find no variable would use every GPU. Shared modes are checked against this host: raises
    SharingUnavailable if an MPS directory is missing, if the time-slicing file is not a regular file, or if the lease
    is not of the device that `time_slice_index` names. With `simulated` no directory and no file is checked, since
    simulated workers have no daemons. With `has_own_mps` the worker runs the MPS daemons, and `ManagedMps.join` gives
    their variables; else the share of each device is set as the limits of a client of the operator's daemon.

    `CUDA_VISIBLE_DEVICES` has numbers, because many programs read it and understand nothing else: those of NVML on this
    host, or 0 to n-1 with `sees_only_its_own`, where nothing but the lease's devices can be opened (a container, a
    guest, a fence of the kernel). A client of the worker's MPS daemon sees what that daemon serves, and counts so, too.
    It has uuids with `by_uuid`, and for slices of MIG, which have no numbers.
    """
    counts_its_own = sees_only_its_own or (mode == "mps" and has_own_mps)
    environment = JobEnvironment(
        MOORAGE_GPU_UUIDS=",".join(device.uuid for device in devices),
        MOORAGE_GPU_INDICES=_indices(devices),
        **_visible_devices(devices, by_uuid=by_uuid, counts_its_own=counts_its_own),
    )
    if devices and mode == "mps" and not has_own_mps:
        environment.update(_mps_directories(spec, must_exist=not simulated) | _mps_limits(spec, len(devices)))
    if devices and mode == "time-slice":
        _check_time_slice(spec, devices, must_exist=not simulated)
    return environment


def apart_from_mps(devices: Sequence[Device], mode: str, folder: str) -> dict[str, str]:
    """Return the variable that keeps a job that does not share by mps from joining an MPS daemon.

    Without it CUDA looks for a daemon in the default place. A client could not be frozen, and would share a server's
    faults. The directory is in the attempt's own `folder` and does not exist: there CUDA runs without MPS (seen on an
    H200, 2026-11-27), and a daemon that the job itself starts works.
    """
    if mode == "mps" or not any(device.vendor == "nvidia" for device in devices):
        return {}
    return {MPS_DIRECTORIES[0]: f"{folder}/mps"}


def _indices(devices: Sequence[Device]) -> str:
    return ",".join(str(device.index) for device in devices)


def _visible_devices(devices: Sequence[Device], *, by_uuid: bool, counts_its_own: bool) -> dict[str, str]:
    """Return each vendor's own variables. Sources: CUDA's environment variables, ROCm's GPU isolation, Level Zero.

    CUDA counts as NVML does once `CUDA_DEVICE_ORDER` is set. HIP counts after ROCR has filtered,
    so it gets 0..n-1. Level Zero knows devices by index only, so two more variables fix what it counts: cards, not
    their tiles (by default index 1 of two cards with two tiles is a half of the first card), in the order of their PCI
    addresses.
    """
    if not devices:
        # an empty HIP_VISIBLE_DEVICES hides no GPU (ROCm/hip issue 3001), but an empty one of the runtime below it does
        return {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    variables: dict[str, str] = {}
    if nvidia := [device for device in devices if device.vendor == "nvidia"]:
        uuids = ",".join(device.uuid for device in nvidia)
        variables |= {"NVIDIA_VISIBLE_DEVICES": uuids, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if (shown := _shown_to_cuda(nvidia, by_uuid=by_uuid, counts_its_own=counts_its_own)) is not None:
            variables["CUDA_VISIBLE_DEVICES"] = shown
    if amd := [device for device in devices if device.vendor == "amd"]:
        variables["ROCR_VISIBLE_DEVICES"] = ",".join(
            device.uuid if _ROCM_UUID.fullmatch(device.uuid) else str(device.index) for device in amd
        )
        variables["HIP_VISIBLE_DEVICES"] = ",".join(map(str, range(len(amd))))
    if intel := [device for device in devices if device.vendor == "intel"]:
        variables["ZE_AFFINITY_MASK"] = _indices(intel)
        variables |= {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
    return variables


def _shown_to_cuda(devices: Sequence[Device], *, by_uuid: bool, counts_its_own: bool) -> str | None:
    """Return the value of `CUDA_VISIBLE_DEVICES`; None to leave it unset.

    Where NVML is missing, the numbers in a container are not known, and it has these devices alone. The one device of
    WSL2 is all that Windows has.
    """
    is_from_specs = any(device.uuid.startswith(CDI_UUID) for device in devices)
    if is_from_specs and (counts_its_own or any(device.uuid.endswith("-all") for device in devices)):
        return None
    if any(device.profile for device in devices) or (by_uuid and not is_from_specs):
        return ",".join(device.uuid for device in devices)
    return ",".join(map(str, range(len(devices)))) if counts_its_own else _indices(devices)


def check_sharing(spec: GpuSpec, *, has_own_mps: bool = False) -> None:
    """Raise SharingUnavailable if this host lacks what the spec's sharing mode needs.

    For mps these are the directories of a daemon, unless the worker runs its own daemons (`has_own_mps`). For
    time-slice it is the configuration file, if the spec names one. Other modes need nothing.
    """
    if spec.effective_sharing == "mps":
        if not has_own_mps:
            _mps_directories(spec, must_exist=True)
    elif spec.effective_sharing == "time-slice":
        _check_config(spec)


def _mps_directories(spec: GpuSpec, *, must_exist: bool) -> dict[str, str]:
    pipes = spec.mps_pipe_dir or MPS_PIPE_DIRECTORY
    logs = spec.mps_log_dir or MPS_LOG_DIRECTORY
    for path in (pipes, logs):
        # A client that finds no daemon silently runs without MPS and without limits, so check first.
        if must_exist and not os.path.isdir(path):
            raise SharingUnavailable("mps", f"the directory {path} of a running daemon is missing", path)
    return dict(zip(MPS_DIRECTORIES, (pipes, logs), strict=True))


def _mps_limits(spec: GpuSpec, gpus: int) -> dict[str, str]:
    """Return the variables that keep each process to its share: a client counts its own devices from 0.

    They can only lower the limits of the operator's daemon.
    """
    share, limits = spec.share, {}
    if share is not None and share.memory_mib:
        limits[MPS_MEMORY_LIMIT] = ",".join(f"{at}={share.memory_mib}M" for at in range(gpus))
    if share is not None and share.compute_percent < 100:
        limits["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share.compute_percent)
    return limits


def _check_time_slice(spec: GpuSpec, devices: Sequence[Device], *, must_exist: bool) -> None:
    wanted = spec.time_slice_index
    if wanted is not None and [device.index for device in devices] != [wanted]:
        raise SharingUnavailable("time-slice", f"the lease is of device {_indices(devices)}, not of {wanted}")
    if must_exist:
        _check_config(spec)


def _check_config(spec: GpuSpec) -> None:
    path = spec.time_slicing_config_path
    if path is not None and not os.path.isfile(path):
        raise SharingUnavailable("time-slice", f"{path} is not a regular file", path)


def child_environment(own: Mapping[str, str], ours: Mapping[str, str]) -> JobEnvironment:
    """Return the environment for a child process that uses some devices: ours over its own, paths applied.

    Its own values for reserved names are dropped, even if we set none.
    """
    kept = {name: value for name, value in own.items() if name not in RESERVED}
    return JobEnvironment(apply_tf_paths({**kept, **ours}))


def apply_tf_paths_over(base: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables laid over those of an image, with paths applied; of `base` only what is extended is in it."""
    known = {name: base[name] for name in _TF_PATHS if name in base}
    found = apply_tf_paths({**known, **environment})
    return {name: value for name, value in found.items() if name in environment or value != known.get(name)}


def apply_tf_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with PATH, LD_PRELOAD and LD_LIBRARY_PATH extended.

    `TF_<name>` is added at the end, `TF_PREPEND_<name>` at the front. Existing components keep their place and are not
    added again, and empty components are skipped, so applying it twice changes nothing. LD_PRELOAD is split at spaces
    too, as ld.so(8) does. Facts 52 and 53.
    """
    result = dict(environment)
    if result.keys().isdisjoint(_TF_SOURCES):
        return result
    for source, (target, before) in _TF_SOURCES.items():
        if not result.get(source):
            continue
        current = result.get(target, "")
        present = _components(current, target)
        added = [part for part in _components(result[source], target) if part not in present]
        if not added:
            continue
        joined = ":".join(dict.fromkeys(added))
        if not present:
            result[target] = joined
        else:
            result[target] = f"{joined}:{current}" if before else f"{current}:{joined}"
    return result


def _components(value: str, target: str) -> list[str]:
    return [part for part in re.split(r"[: ]" if target == "LD_PRELOAD" else ":", value) if part]
