"""Match a lease request to a host's devices, and refuse a request that the host can never meet."""

from __future__ import annotations

from collections.abc import Sequence

from moorage.schemas.errors import MoorageError, problem
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec, capability_of, format_token, mig_profile, model_matches, takes_part


def matches(spec: GpuSpec, device: Device) -> bool:
    """Return whether one device has what a spec asks of each: vendor, model, sharing mode, compute capability, MIG
    profile, memory, and for `time_slice_index` the index.
    """
    if spec.time_slice_index is not None and device.index != spec.time_slice_index:
        return False
    if spec.effective_vendor and device.vendor.lower() != spec.effective_vendor:
        return False
    if spec.models and not any(model_matches(pattern, device.name) for pattern in spec.models):
        return False
    if device.modes and spec.effective_sharing not in device.modes:
        return False
    if capability_of(device.compute) < capability_of(spec.min_compute_capability or ""):
        return False
    return takes_part(spec.slice_profile, mig_profile(device.name)) and device.memory_mib >= (spec.min_memory_mib or 0)


def matching(spec: GpuSpec, devices: Sequence[Device]) -> set[int]:
    """Return the slots of the devices that meet a spec."""
    return {slot for slot, device in enumerate(devices) if matches(spec, device)}


def check(spec: GpuSpec, devices: Sequence[Device], modes: Sequence[str]) -> None:
    """Raise MoorageError for a request that a host with these devices and sharing modes can never meet.

    A spec with a `share` is refused, too, because a lease does not limit its sharers.
    """
    if (trouble := spec.trouble) is not None:
        field, message, found, allowed = trouble
        raise MoorageError(problem("invalid-argument", message, field=f"$.{field}", found=found, allowed=allowed))
    if spec.effective_sharing not in modes:
        raise MoorageError(
            problem(
                "failed-precondition",
                f"this worker does not share its devices by {spec.effective_sharing}",
                field="$.gpu.sharing",
                found=spec.effective_sharing,
                allowed=", ".join(modes),
                next="ask for whole devices, or let the worker's modes name it",
            )
        )
    if spec.share is not None:
        raise MoorageError(
            problem(
                "failed-precondition",
                "shares of a lease are not limited: a lease only counts its sharers",
                field="$.gpu.share",
                next=f"ask for @{spec.effective_sharing} alone",
            )
        )
    count = len(matching(spec, devices))
    if count < spec.count:
        have = ", ".join(sorted({device.name for device in devices})) or "no GPU"
        raise MoorageError(
            problem(
                "no-match",
                f"this host has {count} of {len(devices)} GPUs that match {format_token(spec)}",
                field="$.gpu",
                found=spec.count,
                allowed=have,
                next="submit it as a job, which may start on another host",
            )
        )
