"""What a container is made of: the engine's form of a member, by the operator's settings and the worker's policy."""

from __future__ import annotations

import fnmatch
import pwd
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from moorage.schemas.errors import Refused, refuse
from moorage.schemas.frames import NOT_PERMITTED, Device
from moorage.schemas.job import Request
from moorage.schemas.settings import setting
from moorage.worker.drivers.base import Assignment
from moorage.worker.environment import START_FAILED, SharingUnavailable, lay_over
from moorage.worker.policy import Policy

_MIB: Final = 1 << 20
#: as engines name images: what else stands there could lead a request to the engine astray
_IMAGE: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(?::[0-9]+)?(?:[/][A-Za-z0-9._-]+)*(?::[A-Za-z0-9._-]+)?(?:@sha256:[0-9a-f]{64})?"
)
#: a kind of one letter ends dockerd 26 where it reads such a name
_CDI: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*[A-Za-z0-9]/[A-Za-z][A-Za-z0-9_.-]+=[A-Za-z0-9][A-Za-z0-9_.:-]*")
#: networks that are the host's, or another container's
_SHARED_NETWORKS: Final = ("host", "container:", "ns:")


class ContainerSettings(msgspec.Struct, frozen=True):
    """Settings of a driver of containers. A job can change none of them, but for the user with `request_user`."""

    gpu_enabled: Annotated[bool, setting("Whether its jobs may have GPUs.")] = True
    user: Annotated[
        str, setting("User of the processes in a container, as UID or UID:GID; image is the image's own, maybe root.")
    ] = "65534:65534"
    request_user: Annotated[bool, setting("Whether a job may name its user (`run.user`), root included.")] = False
    images: Annotated[tuple[str, ...], setting("Images that jobs may run, * in them; empty: any.")] = ()
    pull: Annotated[Literal["missing", "always", "never"], setting("When an image is pulled from its registry.")] = (
        "missing"
    )
    digests_only: Annotated[bool, setting("Whether an image must be named by its digest: NAME@sha256:...")] = False
    network: Annotated[str, setting("Network of containers: none, bridge, or the name of one; never the host's.")] = (
        "none"
    )
    mounts: Annotated[
        tuple[str, ...], setting("Folders of this host for every container, each as /host/path:/path:ro or :rw.")
    ] = ()
    pids_max: Annotated[int, setting("Processes and threads of a container.", ge=1, le=1 << 22)] = 4096
    shm: Annotated[int, setting("Size of /dev/shm.", unit="bytes", ge=_MIB, le=1 << 42)] = 64 * _MIB
    nvidia_capabilities: Annotated[
        str, setting("NVIDIA_DRIVER_CAPABILITIES of containers with NVIDIA GPUs, commas between.")
    ] = "compute,utility"

    def __post_init__(self) -> None:
        if self.network.startswith(_SHARED_NETWORKS):
            raise ValueError(f"network must be none, bridge or the name of a network, found {self.network!r}")
        if self.user != "image" and not re.fullmatch(r"[0-9]+(:[0-9]+)?", self.user):
            raise ValueError(f"user must be UID, UID:GID or image, found {self.user!r}")
        for mount in self.mounts:
            if not re.fullmatch(r"/[^:]*:/[^:]+:(ro|rw)", mount):
                raise ValueError(f"mounts must be as /host/path:/path:ro, found {mount!r}")


def check_request(request: Request, settings: ContainerSettings) -> None:
    """Raise Refused for what can never run as a container here: `invalid-argument` where no other host could either."""
    image = request.image
    if not image:
        raise _wrong(
            f"a job of the driver {request.workload.driver} needs an image", "$.run.image", None, "the name of an image"
        )
    if not _IMAGE.fullmatch(image):
        raise _wrong("this is no name of an image", "$.run.image", image, "NAME, NAME:TAG or NAME@sha256:DIGEST")
    if request.gpu is not None and request.gpu.effective_sharing == "mps":
        raise SharingUnavailable("mps", "containers share by time-slice alone")
    if settings.network == "none" and request.replicas > 1 and request.gpu and request.gpu.scheduling == "gang":
        raise refuse(
            "failed-precondition",
            "the ranks of a gang cannot meet: containers of this worker have no network",
            field="$.gpu.scheduling",
            found="gang",
            allowed="a worker whose setting network of the driver is a network on which its hosts reach each other",
        )


def _wrong(message: str, field: str, found: str | None, allowed: str) -> Refused:
    return refuse("invalid-argument", message, field=field, found=found, allowed=allowed)


def check_policy(tenant: str, request: Request, settings: ContainerSettings, policy: Policy) -> None:
    """Raise Refused (`not-permitted`) for what this worker does not let the tenant do."""
    run, image = request.workload, request.image
    if settings.digests_only and "@sha256:" not in image:
        raise _forbidden(f"image {image} is not named by its digest", image, "NAME@sha256:DIGEST")
    if settings.images and not any(fnmatch.fnmatchcase(image, pattern) for pattern in settings.images):
        raise _forbidden(f"image {image} may not run on this worker", image, ", ".join(settings.images[:5]))
    if run.user is not None and not settings.request_user and policy.user_of(tenant) is None:
        raise _forbidden("a job may not name its user on this worker", run.user, "no user")
    if run.argv:
        policy.check_program(tenant, run)
    elif policy.has_programs:
        raise _forbidden(f"tenant {tenant} must name its program on this worker", "none", "a program")


def _forbidden(message: str, found: str, allowed: str) -> Refused:
    text = f"{NOT_PERMITTED}{message} (allowed: {allowed})"
    return refuse("not-permitted", text, found=found, allowed=allowed, next="ask who runs the worker")


def config_of(
    assignment: Assignment,
    settings: ContainerSettings,
    policy: Policy,
    info: Mapping[str, Any],
    *,
    labels: Mapping[str, str],
    log_bytes: int,
    interface: str | None = None,
    simulated: bool = False,
) -> dict[str, Any]:
    """Return what the engine is to create. Raises SharingUnavailable, and Refused for a device that has no name."""
    request, run = assignment.request, assignment.run
    ours = assignment.environment(interface=interface, simulated=simulated)
    host: dict[str, Any] = {
        "NetworkMode": settings.network,
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "Privileged": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "PidsLimit": settings.pids_max,
        "ShmSize": settings.shm,
        "Binds": list(settings.mounts),
        "LogConfig": {"Type": "local", "Config": {"max-size": f"{max(_MIB, log_bytes)}", "max-file": "2"}},
    }
    if (resources := request.resources) is not None:
        if resources.cpu_milli:
            host["NanoCpus"] = resources.cpu_milli * 1_000_000
        if resources.memory_mib:
            host["Memory"] = host["MemorySwap"] = resources.memory_mib * _MIB
    if assignment.devices and not simulated:
        asked, variables = devices_of(assignment.devices, settings, info)
        host |= asked
        ours |= variables
    env = lay_over({name: value for name, value in run.env.items() if isinstance(value, str)}, ours)
    config: dict[str, Any] = {
        "Image": request.image,
        "Env": [f"{name}={value}" for name, value in env.items()],
        "Labels": dict(labels),
        "User": _user(policy.user_of(assignment.name[0]) or run.user, settings),
        "HostConfig": host,
    }
    if run.argv:
        config["Cmd"] = list(run.argv)
    if run.cwd:
        config["WorkingDir"] = run.cwd
    return config


def _user(wanted: str | None, settings: ContainerSettings) -> str:
    """A user of the host by its numbers; names of the image are the image's affair."""
    if wanted is None:
        return "" if settings.user == "image" else settings.user
    try:
        entry = pwd.getpwnam(wanted)
    except KeyError:
        return f"{wanted}:{wanted}" if wanted.isdecimal() else wanted
    return f"{entry.pw_uid}:{entry.pw_gid}"


def devices_of(
    devices: Sequence[Device], settings: ContainerSettings, info: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return how these devices are asked for, and the variables that go with it.

    NVIDIA's by CDI where the engine tells that it has that, else by NVIDIA's hook; all others by their nodes.
    """
    asked: dict[str, Any] = {}
    variables: dict[str, str] = {}
    if nvidia := [device for device in devices if device.vendor == "nvidia"]:
        words = [word for word in settings.nvidia_capabilities.split(",") if word]
        variables["NVIDIA_DRIVER_CAPABILITIES"] = ",".join(words)
        if info.get("CDISpecDirs"):
            names = [_cdi_name(device) for device in nvidia]
            asked["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": names}]
            variables["NVIDIA_VISIBLE_DEVICES"] = "void"  # an image may say "all", and the hook may be there as well
        else:
            asked["DeviceRequests"] = [
                {"Driver": "nvidia", "DeviceIDs": [each.uuid for each in nvidia], "Capabilities": [["gpu", *words]]}
            ]
    else:
        variables.setdefault("NVIDIA_VISIBLE_DEVICES", "void")  # the same, beside cards of another vendor
    nodes = [node for device in devices if device.vendor != "nvidia" for node in _nodes(device)]
    if nodes:
        asked["Devices"] = [
            {"PathOnHost": node, "PathInContainer": node, "CgroupPermissions": "rw"} for node in dict.fromkeys(nodes)
        ]
        for vendor, name in (("amd", "ROCR_VISIBLE_DEVICES"), ("intel", "ZE_AFFINITY_MASK")):
            if count := sum(device.vendor == vendor for device in devices):
                variables[name] = ",".join(map(str, range(count)))  # it has these nodes and no others
    return asked, variables


def _cdi_name(device: Device) -> str:
    name = device.cdi[0] if device.cdi else f"nvidia.com/gpu={device.uuid}"
    if not _CDI.fullmatch(name):
        raise refuse("failed-precondition", f"{START_FAILED}: {name[:80]!r} is no CDI name", found=name[:80])
    return name


def _nodes(device: Device, root: Path = Path("/")) -> list[str]:
    """The files of a device that is no NVIDIA one: its render node, and AMD's one for computing."""
    folder = root / "sys/bus/pci/devices" / device.pci.lower() / "drm"
    names = sorted(path.name for path in folder.glob("renderD*")) if device.pci else []
    if not names:
        raise refuse("failed-precondition", f"{START_FAILED}: no render node of {device.uuid}", found=device.pci)
    return [*(["/dev/kfd"] if device.vendor == "amd" else []), f"/dev/dri/{names[0]}"]
