"""The variables a job gets: for its GPUs, its gang and itself; and how the request's own are laid under them.

Nothing of the agent's environment is inherited. What decides which devices a job can see is ours alone: a request's
own value for such a name is dropped, also where we set none.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from moorage.schemas.errors import MoorageError, Refused, problem
from moorage.schemas.frames import Device
from moorage.schemas.gpu import Distributed, GpuSpec, Sharing

#: where the daemon of an MPS host keeps its sockets and logs unless the request says otherwise
MPS_PIPE_DIRECTORY: Final = "/tmp/nvidia-mps"
MPS_LOG_DIRECTORY: Final = "/tmp/nvidia-log"
#: the variables that lead a client to a daemon's directories
MPS_DIRECTORIES: Final = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
#: how a start that did not happen begins in an attempt's `why`
START_FAILED: Final = "start-failed"
PATH_DEFAULT: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Names that decide what a job can see or whom it shares with: never the request's own.
RESERVED: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "NVIDIA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "ZE_AFFINITY_MASK",
        "ZE_ENABLE_PCI_ID_DEVICE_ORDER",
        "ZE_FLAT_DEVICE_HIERARCHY",
        *MPS_DIRECTORIES,
    }
)
RESERVED_PREFIX: Final = "MOORAGE_"

#: the interface's variable by backend of the gang; any other backend has none
_INTERFACE_NAMES: Final = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}
#: a uuid as ROCm's runtime takes it; a device without one shows GPU-XX
_ROCM_UUID: Final = re.compile(r"GPU-[0-9a-fA-F]{16}")
_TF_PATHS: Final = ("PATH", "LD_PRELOAD", "LD_LIBRARY_PATH")  # these three and no others
#: what extends which, and whether before it
_TF_SOURCES: Final = {
    **{f"TF_{target}": (target, False) for target in _TF_PATHS},
    **{f"TF_PREPEND_{target}": (target, True) for target in _TF_PATHS},
}


def start_failed(why: str) -> str:
    """Return why an attempt did not start, with the word that such reasons begin with."""
    return why if why.startswith(START_FAILED) else f"{START_FAILED}: {why}"


def without_prefix(error: MoorageError) -> str:
    """Return why something did not start, without the word that such reasons begin with."""
    return error.problem.message.removeprefix(f"{START_FAILED}: ")


class HostAtFault(Refused):
    """This host cannot start an attempt. The job is not at fault, so it is tried again elsewhere."""

    def __init__(self, why: str, *, found: object = None, next_step: str = "") -> None:
        told = problem("failed-precondition", f"{START_FAILED}: {why}", found=found, next=next_step)
        super().__init__(msgspec.structs.replace(told, fault="fleet"))


class SharingUnavailable(HostAtFault):
    """This host cannot offer the sharing `mode` asked for: `path` is missing or of the wrong kind, or not this GPU."""

    def __init__(self, mode: Sharing, message: str, path: str = "") -> None:
        self.mode: Final[Sharing] = mode
        self.path: Final = path
        words = f"{mode} is unavailable on {os.uname().nodename}: {message}"
        super().__init__(words, found=path or None)


@dataclass(frozen=True, slots=True)
class Gang:
    """How the ranks of a gang meet, as START said it; `interface` only where hello names one."""

    world_size: int
    master_addr: str
    master_port: int
    interface: str | None = None


class JobEnvironment(dict[str, str]):
    """Names to values, some of them secret: its repr shows the names alone."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<JobEnvironment {' '.join(sorted(self))}>"

    __str__ = __repr__


# ------------------------------------------------------------------------------------------------ what we set


def gpu_environment(
    devices: Sequence[Device],
    *,
    tenant: str,
    job: str,
    replica: int,
    attempt: int,
    fence: int,
    mode: Sharing = "exclusive",
    gpu_spec: GpuSpec | None = None,
    gang: Gang | None = None,
    traceparent: str = "",
    simulated: bool = False,
    has_own_mps: bool = False,
) -> JobEnvironment:
    """The variables of one member: those of `device_environment`, its own name, and how it meets its gang.

    Raises SharingUnavailable.
    """
    spec = gpu_spec or GpuSpec()
    environment = device_environment(devices, mode, spec, simulated=simulated, has_own_mps=has_own_mps)
    environment |= {
        "MOORAGE_JOB": job,
        "MOORAGE_TENANT": tenant,
        "MOORAGE_REPLICA": str(replica),
        "MOORAGE_ATTEMPT": str(attempt),
        "MOORAGE_FENCE": str(fence),
    }
    if gang is not None:
        environment.update(_gang_variables(gang, replica, (spec.distributed or Distributed()).backend))
    if traceparent:
        environment["TRACEPARENT"] = traceparent
    return environment


def device_environment(
    devices: Sequence[Device], mode: Sharing, spec: GpuSpec, *, simulated: bool = False, has_own_mps: bool = False
) -> JobEnvironment:
    """The variables that show a process exactly the `devices` of its lease, in the lease's order.

    A lease without devices says that there are none: libraries that find no variable would use every GPU of the
    host. Shared modes are checked against this host: raises SharingUnavailable where an MPS directory is missing, the
    time-slicing file is not a regular file, or the lease is not the device that `time_slice_index` names. Simulated
    workers offer every mode and have no daemon, so nothing is checked for them. With `has_own_mps` the worker runs the
    MPS daemons, whose variables `ManagedMps.join` gives.
    """
    environment = JobEnvironment(
        MOORAGE_GPU_UUIDS=",".join(device.uuid for device in devices),
        MOORAGE_GPU_INDICES=_indices(devices),
        **_visible_devices(devices),
    )
    if devices and mode == "mps" and not has_own_mps:
        environment.update(_mps_directories(spec, must_exist=not simulated))
    if devices and mode == "time-slice":
        _check_time_slice(spec, devices, must_exist=not simulated)
    return environment


def _indices(devices: Sequence[Device]) -> str:
    return ",".join(str(device.index) for device in devices)


def _visible_devices(devices: Sequence[Device]) -> dict[str, str]:
    """Each vendor's own variables. Sources: CUDA's environment variables, ROCm's GPU isolation, Level Zero.

    NVIDIA by uuid, since indices depend on the driver's order; HIP counts after ROCR has filtered, so 0..n-1.
    Level Zero knows devices by index alone, so what it counts is fixed beside the mask: cards and not their tiles (by
    default index 1 of two cards with two tiles is a half of the first), in the order of their PCI addresses.
    """
    if not devices:
        return {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": ""}
    variables: dict[str, str] = {}
    if nvidia := [device for device in devices if device.vendor == "nvidia"]:
        uuids = ",".join(device.uuid for device in nvidia)
        variables |= {"CUDA_VISIBLE_DEVICES": uuids, "NVIDIA_VISIBLE_DEVICES": uuids}
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if amd := [device for device in devices if device.vendor == "amd"]:
        variables["ROCR_VISIBLE_DEVICES"] = ",".join(
            device.uuid if _ROCM_UUID.fullmatch(device.uuid) else str(device.index) for device in amd
        )
        variables["HIP_VISIBLE_DEVICES"] = ",".join(map(str, range(len(amd))))
    if intel := [device for device in devices if device.vendor == "intel"]:
        variables["ZE_AFFINITY_MASK"] = _indices(intel)
        variables |= {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
    return variables


def check_sharing(spec: GpuSpec, *, has_own_mps: bool = False) -> None:
    """Raise SharingUnavailable where this host has not what a sharing mode needs: MPS's directories, or the file."""
    if spec.effective_sharing == "mps":
        if not has_own_mps:
            _mps_directories(spec, must_exist=True)
    elif spec.effective_sharing == "time-slice":
        _check_config(spec)


def _mps_directories(spec: GpuSpec, *, must_exist: bool) -> dict[str, str]:
    pipes = spec.mps_pipe_dir or MPS_PIPE_DIRECTORY
    logs = spec.mps_log_dir or MPS_LOG_DIRECTORY
    for path in (pipes, logs):
        # A client that finds no daemon runs without MPS and without limits, silently: so look first.
        if must_exist and not os.path.isdir(path):
            raise SharingUnavailable("mps", f"the directory {path} of a running daemon is missing", path)
    return dict(zip(MPS_DIRECTORIES, (pipes, logs), strict=True))


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


def _gang_variables(gang: Gang, rank: int, backend: str) -> dict[str, str]:
    """One rank a replica: a member sees only its own devices, so its local world is 1."""
    variables = {
        "WORLD_SIZE": str(gang.world_size),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": gang.master_addr,
        "MASTER_PORT": str(gang.master_port),
    }
    name = _INTERFACE_NAMES.get(backend)
    if name and gang.interface:
        variables[name] = gang.interface
    return variables


# ------------------------------------------------------------------------------------- the request's, and ours over it


def lay_over(requested: Mapping[str, str], ours: Mapping[str, str]) -> JobEnvironment:
    """The request's variables with ours over them; reserved names are ours alone, also where we set none."""
    kept = {
        name: value
        for name, value in requested.items()
        if name not in RESERVED and not name.startswith(RESERVED_PREFIX)
    }
    return JobEnvironment({**kept, **ours})


def process_environment(
    requested: Mapping[str, str],
    ours: Mapping[str, str],
    *,
    user: str | None = None,
    cwd: str | None = None,
    folder: str = "",
) -> JobEnvironment:
    """The whole environment of a plain process: a small base, the request's over it, ours over both, paths applied.

    `HOME` is the attempt's own `folder`; without one the job user's, or `cwd`, or `/`. `requested` holds resolved
    secrets already.
    """
    base = {"PATH": PATH_DEFAULT, "HOME": folder or _home(user) or cwd or "/", "LANG": "C.UTF-8"}
    return JobEnvironment(apply_tf_paths({**base, **lay_over(requested, ours)}))


def _home(user: str | None) -> str:
    if user is None:
        return ""
    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except (KeyError, ValueError, OverflowError):  # unknown, or no name at all: it may hold a NUL
        return ""  # whoever starts the process refuses such a user; a home is not worth an error of its own
    return entry.pw_dir


def child_environment(own: Mapping[str, str], ours: Mapping[str, str]) -> JobEnvironment:
    """Return the environment for a process that this one starts for some devices: ours over its own, paths applied.

    Names that decide which devices are seen are ours alone, also where we set none.
    """
    kept = {name: value for name, value in own.items() if name not in RESERVED}
    return JobEnvironment(apply_tf_paths({**kept, **ours}))


def apply_tf_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """Extend PATH, LD_PRELOAD and LD_LIBRARY_PATH by `TF_<name>` (behind) and `TF_PREPEND_<name>` (before).

    Component by component: what is there already stays where it is, empty components are skipped, so applying it twice
    changes nothing. LD_PRELOAD is split at spaces too, as ld.so(8) does. Facts 52 and 53.
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
