"""Make the variables of a job: those for its GPUs, its gang and itself, laid over the request's own.

A job inherits nothing of the agent's environment. Moorage alone decides which devices a job can see: a request's own
value for such a variable is dropped, even if moorage sets none.
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
from moorage.schemas.frames import ABOUT_THE_JOB, NOT_HERE, START_FAILED, Device
from moorage.schemas.gpu import Distributed, GpuSpec, Sharing
from moorage.schemas.names import CDI_UUID
from moorage.schemas.reserved_variables import MPS_DIRECTORIES, RESERVED, is_reserved

#: where an operator's MPS daemon keeps its sockets and logs, unless the request names other directories
MPS_PIPE_DIRECTORY: Final = "/tmp/nvidia-mps"
MPS_LOG_DIRECTORY: Final = "/tmp/nvidia-log"
PATH_DEFAULT: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Every driver of processes and containers sets it unless the request does: Python's prints are seen as they come, and
#: those of a program that is killed are not lost.
UNBUFFERED: Final = {"PYTHONUNBUFFERED": "1"}

#: the variable that names the network interface, by backend of the gang; other backends have none
_INTERFACE_NAMES: Final = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}
#: a uuid that ROCm's runtime accepts; a device without a uuid shows GPU-XX
_ROCM_UUID: Final = re.compile(r"GPU-[0-9a-fA-F]{16}")
_TF_PATHS: Final = ("PATH", "LD_PRELOAD", "LD_LIBRARY_PATH")  # only these three
#: each source variable: which variable it extends, and whether at the front
_TF_SOURCES: Final = {
    **{f"TF_{target}": (target, False) for target in _TF_PATHS},
    **{f"TF_PREPEND_{target}": (target, True) for target in _TF_PATHS},
}


def start_failed(why: str) -> str:
    """Return why an attempt did not start, with the prefix of such reasons, unless it says whose fault it is."""
    return why if why.startswith((START_FAILED, *ABOUT_THE_JOB)) else f"{START_FAILED}: {why}"


def without_prefix(error: MoorageError) -> str:
    """Return why an attempt did not start, without the prefix of such reasons."""
    return error.problem.message.removeprefix(f"{START_FAILED}: ")


class HostAtFault(Refused):
    """This host cannot start an attempt. The job is not at fault, so it is tried again on another host."""

    def __init__(self, why: str, *, found: object = None, next_step: str = "") -> None:
        told = problem("failed-precondition", f"{START_FAILED}: {why}", found=found, next=next_step)
        super().__init__(msgspec.structs.replace(told, fault="fleet"))


class LacksHere(Refused):
    """This host lacks something that an attempt needs: a secret, user, folder, program or image.

    The job goes to another host, at no cost, and ends if enough hosts lack it.
    """

    def __init__(self, why: str, *, found: object = None, next_step: str = "") -> None:
        super().__init__(problem("failed-precondition", why, found=found, next=next_step))


def not_here(error: MoorageError) -> str:
    """Return the reason of a refusal with which the job goes to another host; "" if the job itself is at fault.

    This host lacks what the job needs, or its own rules do not let the job have it.
    """
    if isinstance(error, LacksHere) or error.problem.code == "not-permitted":
        return f"{NOT_HERE}{error.problem.message}"
    return ""


class SharingUnavailable(HostAtFault):
    """This host cannot offer the sharing `mode`, for example because a directory or file is missing.

    `path` is that directory or file; "" if there is another reason.
    """

    def __init__(self, mode: Sharing, message: str, path: str = "") -> None:
        self.mode: Final[Sharing] = mode
        self.path: Final = path
        words = f"{mode} is unavailable on {os.uname().nodename}: {message}"
        super().__init__(words, found=path or None)


@dataclass(frozen=True, slots=True)
class Gang:
    """How the ranks of a gang meet, from START. `interface` is set only if hello names one."""

    world_size: int
    master_addr: str
    master_port: int
    interface: str | None = None


class JobEnvironment(dict[str, str]):
    """Environment variables, some of them secret: its repr shows the names only."""

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
    by_uuid: bool = False,
    sees_only_its_own: bool = False,
) -> JobEnvironment:
    """Return the variables of one member: those of `device_environment`, its name, and how it meets its gang.

    Raises SharingUnavailable as `device_environment` does.
    """
    spec = gpu_spec or GpuSpec()
    environment = device_environment(
        devices, mode, spec,
        simulated=simulated, has_own_mps=has_own_mps, by_uuid=by_uuid, sees_only_its_own=sees_only_its_own,
    )  # fmt: skip
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
        limits["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{at}={share.memory_mib}M" for at in range(gpus))
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


def _gang_variables(gang: Gang, rank: int, backend: str) -> dict[str, str]:
    """Return the variables for one rank per replica: a member sees only its devices, so its local world size is 1."""
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
    """Return the request's variables with ours over them, without the request's reserved names, even if we set none."""
    kept = {name: value for name, value in requested.items() if not is_reserved(name)}
    return JobEnvironment({**kept, **ours})


def process_environment(
    requested: Mapping[str, str],
    ours: Mapping[str, str],
    *,
    user: str | None = None,
    cwd: str | None = None,
    folder: str = "",
) -> JobEnvironment:
    """Return the whole environment of a plain process: a small base, the request's over it, ours over both, paths
    applied.

    `HOME` is the attempt's own `folder`; without one the job user's home, or `cwd`, or `/`. Secrets in `requested` are
    resolved already.
    """
    base = {"PATH": PATH_DEFAULT, "HOME": folder or _home(user) or cwd or "/", "LANG": "C.UTF-8", **UNBUFFERED}
    return JobEnvironment(apply_tf_paths({**base, **lay_over(requested, ours)}))


def _home(user: str | None) -> str:
    if user is None:
        return ""
    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except (KeyError, ValueError, OverflowError):  # an unknown user, or an invalid name: it may contain a NUL
        return ""  # the start of the process refuses such a user with a better error
    return entry.pw_dir


def child_environment(own: Mapping[str, str], ours: Mapping[str, str]) -> JobEnvironment:
    """Return the environment for a child process that uses some devices: ours over its own, paths applied.

    Its own values for reserved names are dropped, even if we set none.
    """
    kept = {name: value for name, value in own.items() if name not in RESERVED}
    return JobEnvironment(apply_tf_paths({**kept, **ours}))


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
