"""Check a request for a container, and make the container's configuration, by settings and the worker's policy."""

from __future__ import annotations

import fnmatch
import os
import pwd
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from moorage.schemas.errors import Refused, refuse
from moorage.schemas.frames import NOT_PERMITTED, OTHERS, START_FAILED, Device
from moorage.schemas.handler import CHECKPOINT_NOW_FILE, CHECKPOINT_NOW_VARIABLE, REPORT_FILE, REPORT_VARIABLE
from moorage.schemas.held_calls import HELD_FILE, HELD_VARIABLE
from moorage.schemas.job import Request, data_variable
from moorage.schemas.names import CDI_UUID
from moorage.schemas.reserved_variables import MPS_DIRECTORIES
from moorage.schemas.service import READY_FILE, READY_VARIABLE
from moorage.schemas.settings import setting
from moorage.schemas.staying import port_range
from moorage.system.device_environment import (
    JobEnvironment,
    SharingUnavailable,
    apart_from_mps,
    apply_tf_paths_over,
)
from moorage.worker.attempt.environment import PATH_DEFAULT, UNBUFFERED, LacksHere, lay_over
from moorage.worker.devices.readers.cdi import KINDS, Registry
from moorage.worker.devices.readers.device_nodes import device_nodes
from moorage.worker.driver import Assignment
from moorage.worker.drivers.container.entry import mounts_of, words_of
from moorage.worker.drivers.container.ports import Published, is_ipv4, ports_wanted
from moorage.worker.drivers.policy import Policy
from moorage.worker.settings import check_rules
from moorage.worker.sharing.limiter.limits import ContainerLimit

MPS: Final = "mps"
_MIB: Final = 1 << 20
#: where a container finds the file that its job names as `gpu.time_slicing_config_path`
TIME_SLICING_AT: Final = "/etc/nvidia/gpu-time-slicing.yaml"
#: where a container has the folder of its attempt
FOLDER_AT: Final = "/work"
#: where a container has the folder of its job's setup
SETUP_AT: Final = "/setup"
DATA_AT: Final = "/moorage/data"
#: where a container that answers calls finds its key
CALL_KEY_AT: Final = "/run/moorage-calls.key"
#: -1 means no change of user
_ID_MAX: Final = (1 << 32) - 1
#: networks of the host, or of another container
_SHARED_NETWORKS: Final = ("host", "container:", "ns:")
_PORTS_EXAMPLE: Final = "30000-30999"
#: networks on which an engine publishes no ports
_UNPUBLISHED: Final = ("none", "host")


class Image(NamedTuple):
    """The program of an image: its entry point, command, user and variables, empty if it names none; and its id."""

    entry_point: Sequence[str] = ()
    command: Sequence[str] = ()
    user: str = ""
    variables: Mapping[str, str] = MappingProxyType({})
    id: str = ""

    @classmethod
    def of(cls, inspected: Mapping[str, Any]) -> Image:
        """Return the program of an image from an engine's inspection of it."""
        config = inspected.get("Config") or {}
        variables = dict(each.partition("=")[::2] for each in config.get("Env") or ())
        words = config.get("Entrypoint") or (), config.get("Cmd") or ()
        return cls(*words, config.get("User") or "", variables, inspected.get("Id") or "")


class ImageSettings(msgspec.Struct, frozen=True):
    """Settings of a driver that runs images. A job cannot change them, except the user if `request_user` is set."""

    gpu_enabled: Annotated[bool, setting("Whether its jobs may have GPUs.")] = True
    user: Annotated[
        str, setting("User of the processes in a container, as UID or UID:GID; image is the image's own, maybe root.")
    ] = "65534:65534"
    request_user: Annotated[bool, setting("Whether a job may name its user (`run.user`), root included.")] = False
    images: Annotated[tuple[str, ...], setting("Images that jobs may run, * in them; empty: any.")] = ()
    images_for: Annotated[
        dict[str, str],
        setting("Images that a tenant may run instead of images, split by blanks; * is every other tenant."),
    ] = {}
    pull: Annotated[Literal["missing", "always", "never"], setting("When an image is pulled from its registry.")] = (
        "missing"
    )
    digests_only: Annotated[bool, setting("Whether an image must be named by its digest: NAME@sha256:...")] = False
    shm: Annotated[int, setting("Size of /dev/shm.", unit="bytes", ge=_MIB, le=1 << 42)] = 64 * _MIB
    nvidia_capabilities: Annotated[
        str, setting("NVIDIA_DRIVER_CAPABILITIES of containers with NVIDIA GPUs, separated by commas.")
    ] = "compute,utility"

    def __post_init__(self) -> None:
        check_rules("images_for", self.images_for)
        if self.user != "image" and not re.fullmatch(r"[0-9]+(:[0-9]+)?", self.user):
            raise ValueError(f"user must be UID, UID:GID or image, found {self.user!r}")


class ContainerSettings(ImageSettings, frozen=True):
    """Settings of a driver whose containers run on this host."""

    registry_secrets: Annotated[
        dict[str, str],
        setting("Secret with USER:PASSWORD for a registry, by the registry's name in the images' names."),
    ] = {}
    network: Annotated[str, setting("Network of containers: none, bridge, or the name of one; never the host's.")] = (
        "none"
    )
    network_for: Annotated[
        dict[str, str], setting("Network of a tenant's containers instead of network; * is every other tenant.")
    ] = {}
    gangs_on_host: Annotated[
        tuple[str, ...],
        setting("Tenants, or *, whose gangs use the host's network, so that their ranks reach each other."),
    ] = ()
    ports: Annotated[
        str,
        setting("Ports of this host that containers may publish, as 30000-30999; empty: none. Needs a network."),
    ] = ""
    ports_for: Annotated[
        dict[str, str], setting("Ports for a tenant's containers instead of ports; * is every other tenant.")
    ] = {}
    mounts: Annotated[
        tuple[str, ...], setting("Folders of this host for every container, each as /host/path:/path:ro or :rw.")
    ] = ()
    mounts_for: Annotated[
        dict[str, str], setting("More folders for a tenant's containers, split by blanks; * is every other tenant.")
    ] = {}
    time_slicing_configs: Annotated[
        tuple[str, ...],
        setting("Files of this host that a job may name as gpu.time_slicing_config_path: full paths, * allowed."),
    ] = ()
    pids_max: Annotated[int, setting("Processes and threads of a container.", ge=1, le=1 << 22)] = 4096
    memlock: Annotated[bool, setting("Whether containers may lock any amount of memory, as RDMA needs.")] = False
    mps_host_ipc: Annotated[
        bool,
        setting("Whether containers may share GPUs by mps: they then have the host's IPC namespace and /dev/shm."),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, networks in (("network", [self.network]), ("network_for", self.network_for.values())):
            for network in networks:
                if not network or network.startswith(_SHARED_NETWORKS):
                    raise ValueError(f"{name} must be none, bridge or the name of a network, found {network!r}")
        for name, texts in (("ports", [self.ports]), ("ports_for", self.ports_for.values())):
            for text in texts:
                port_range(text, name, _PORTS_EXAMPLE)
        for name in ("network_for", "ports_for", "mounts_for"):
            check_rules(name, getattr(self, name))
        mounts_for = [word for words in self.mounts_for.values() for word in words.split()]
        for name, mounts in (("mounts", self.mounts), ("mounts_for", mounts_for)):
            for mount in mounts:
                if not re.fullmatch(r"/[^:]*:/[^:]+:(ro|rw)", mount):
                    raise ValueError(f"{name} must look like /host/path:/path:ro or :rw, found {mount!r}")


def check_image(request: Request) -> None:
    """Raise Refused (`invalid-argument`) for a request that names no image, or one that is not an image name."""
    if (trouble := request.image_trouble) is not None:
        field, message, found, allowed = trouble
        raise _wrong(message, f"$.{field}", found, allowed)


def check_request(request: Request, settings: ContainerSettings) -> None:
    """Raise Refused for a request that can never run as a container here; `invalid-argument` if it can run nowhere."""
    check_image(request)
    run = request.workload
    if (gpu := request.gpu) is not None and gpu.effective_sharing == MPS:
        if not settings.mps_host_ipc:
            why = f"its containers do not get the host's IPC namespace (mps_host_ipc of driver.{run.driver})"
            raise SharingUnavailable(MPS, why)
        if path := gpu.mps_pipe_dir or gpu.mps_log_dir:
            raise SharingUnavailable(MPS, "a container cannot use a directory that its request names", path)
    networks = {settings.network, *settings.network_for.values()}
    if is_gang(request) and not settings.gangs_on_host and networks == {"none"}:
        raise refuse(
            "failed-precondition",
            "the ranks of a gang cannot meet: containers of this worker have no network",
            field="$.gpu.scheduling",
            found="gang",
            allowed="a worker whose driver has a network on which its hosts reach each other (network, gangs_on_host)",
        )

    if ports_wanted(request) and not any((settings.ports, *settings.ports_for.values())):
        raise refuse(
            "failed-precondition",
            "this worker's containers publish no ports of its host",
            field=f"$.driver_config.{request.workload.driver}.ports",
            found=", ".join(map(str, ports_wanted(request))),
            allowed="a worker whose driver has ports, or ports_for the tenant",
        )


def check_host_ipc(settings: ContainerSettings, *, has_limiter: bool) -> None:
    """Raise Refused if containers of this worker would reach the limiter's segments in the host's /dev/shm."""
    if settings.mps_host_ipc and has_limiter:
        raise refuse(
            "failed-precondition",
            "the limiter has its segments in /dev/shm, and containers that share by mps would get the same /dev/shm",
            field="$.mps_host_ipc",
            found="mps_host_ipc and limiter",
            allowed="mps_host_ipc, or limiter",
            next="remove limiter: an MPS daemon that the worker runs limits its clients by itself",
        )


def check_network(tenant: str, request: Request, settings: ContainerSettings) -> None:
    """Raise LacksHere if a gang, or a request that publishes ports, gets a network here on which it cannot."""
    network = network_of(tenant, request, settings)
    if is_gang(request) and network == "none":
        raise LacksHere(f"the ranks of a gang of {tenant} cannot meet: its containers have no network")
    if request.service is not None and network == "none":
        raise LacksHere(f"containers of {tenant} cannot answer calls: they have no network (see network)")
    if request.workload.calls and network == "none":
        raise LacksHere(f"containers of {tenant} cannot call services: they have no network (see network)")
    if ports_wanted(request) and network in _UNPUBLISHED:
        raise LacksHere(f"containers of {tenant} cannot publish ports: their network is {network}")


def _wrong(message: str, field: str, found: object, allowed: str) -> Refused:
    return refuse("invalid-argument", message, field=field, found=found, allowed=allowed)


def check_policy(tenant: str, request: Request, settings: ImageSettings, policy: Policy) -> None:
    """Raise Refused (`not-permitted`) for a request that this worker does not allow the tenant."""
    run, image = request.workload, request.image
    if settings.digests_only and "@sha256:" not in image:
        raise _forbidden(f"image {image} is not named by its digest", image, "NAME@sha256:DIGEST")
    images = _for(tenant, settings.images_for)
    patterns = settings.images if images is None else images.split()
    if (patterns or images is not None) and not any(fnmatch.fnmatchcase(image, pattern) for pattern in patterns):
        raise _forbidden(f"image {image} may not run on this worker", image, ", ".join(patterns[:5]))
    if run.user is not None and not settings.request_user and policy.user_of(tenant) is None:
        raise _forbidden("a job may not name its user on this worker", run.user, "no user")
    if run.argv:
        policy.check_program(tenant, run)
        return
    policy.check_user(tenant, run)
    if policy.has_programs:
        raise _forbidden(f"tenant {tenant} must name its program on this worker", "none", "a program")


def check_container_policy(tenant: str, request: Request, settings: ContainerSettings, policy: Policy) -> None:
    """Do `check_policy`, and check what only containers of this host need. Raises Refused (`not-permitted`)."""
    check_policy(tenant, request, settings, policy)
    if (ports := ports_wanted(request)) and not ports_of(tenant, settings):
        found = ", ".join(map(str, ports))
        raise _forbidden(f"containers of {tenant} may not publish ports of this worker", found, "no ports")
    path = _time_slicing(request)
    is_plain = path is not None and os.path.normpath(path) == path and "," not in path  # podman's words have commas
    if path and not (is_plain and any(fnmatch.fnmatchcase(path, each) for each in settings.time_slicing_configs)):
        raise _forbidden(f"{path} may not be mounted on this worker", path, ", ".join(settings.time_slicing_configs))


def _time_slicing(request: Request) -> str | None:
    return request.gpu.time_slicing_config_path if request.gpu is not None else None


def is_gang(request: Request) -> bool:
    """Return whether the request has ranks that must reach each other."""
    return bool(request.groups) or (request.copies > 1 and request.gpu is not None and request.gpu.scheduling == "gang")


def _for(tenant: str, rules: Mapping[str, str]) -> str | None:
    return rules.get(tenant, rules.get(OTHERS))


def has_network(settings: ContainerSettings) -> bool:
    """Return whether containers of some tenant have a network, on which they may reach the server."""
    return {settings.network, *settings.network_for.values()} != {"none"}


def network_of(tenant: str, request: Request, settings: ContainerSettings) -> str:
    """Return the network of a tenant's container: the host's only for ranks of a gang, if the operator allows it."""
    if is_gang(request) and not {tenant, OTHERS}.isdisjoint(settings.gangs_on_host):
        return "host"
    return _for(tenant, settings.network_for) or settings.network


def ports_of(tenant: str, settings: ContainerSettings) -> range:
    """Return the ports of this host that a tenant's containers may publish; an empty range for none."""
    ports = _for(tenant, settings.ports_for)
    return port_range(settings.ports if ports is None else ports, "ports", _PORTS_EXAMPLE)


def registry_of(image: str) -> str:
    """Return the registry at the start of an image's name; "" if the name has none."""
    first, slash, _ = image.partition("/")
    return first if slash and (first == "localhost" or "." in first or ":" in first) else ""


def _forbidden(message: str, found: str, allowed: str) -> Refused:
    allowed = allowed or "none"
    text = f"{NOT_PERMITTED}{message} (allowed: {allowed})"
    return refuse("not-permitted", text, found=found, allowed=allowed, next="ask the operator of the worker")


def config_of(
    assignment: Assignment,
    settings: ContainerSettings,
    policy: Policy,
    specs: Registry | None,
    image: Image = Image(),  # noqa: B008
    *,
    labels: Mapping[str, str],
    log_bytes: int,
    folder: str = "",
    variables: Path | None = None,
    published: Published | None = None,
    limit: ContainerLimit | None = None,
    nodes: Mapping[str, Sequence[str]] = MappingProxyType({}),
    interface: str | None = None,
    simulated: bool = False,
    mps: Mapping[str, str] | None = None,
    calls: Mapping[str, str] = MappingProxyType({}),
    key: str = "",
) -> dict[str, Any]:
    """Return the configuration of a container, in the form of an engine's API.

    `specs` are the CDI specs that the engine reads, None for an engine without CDI; `image` is needed with `variables`,
    `limit` or paths to add. `folder` is the attempt's own folder on this host, `variables` the file of its secrets
    (container_entry.py), and `limit` the limiter's part of the container. `nodes` are the files of devices, from
    `Kit.nodes`. `mps` are the variables of an MPS daemon that the worker runs for this container; None if it runs
    none. `calls` are those of a container that answers calls, and `key` is the file of its key on this host.

    Raises SharingUnavailable. Raises Refused for a device without a file in /dev, and for
    `variables` if neither the job nor its image names a program.
    """
    tenant, request, run = assignment.name[0], assignment.request, assignment.run
    network = network_of(tenant, request, settings)
    # only on the host's network does a container see the host's interfaces
    seen = interface if network == "host" else None
    ours = assignment.environment(
        interface=seen, simulated=simulated, has_own_mps=mps is not None, sees_only_its_own=not simulated
    )
    ours |= {**(mps or {}), **calls}
    if not simulated:  # an image or a mount of the operator's may have a daemon's default directory
        ours |= apart_from_mps(assignment.devices, assignment.mode, FOLDER_AT if folder else "/run/moorage")
    if folder and run.ready is not None and run.ready.call:
        ours[READY_VARIABLE] = f"{FOLDER_AT}/{READY_FILE}"
    if folder and run.checkpoint is not None and run.checkpoint_every_s:
        ours[CHECKPOINT_NOW_VARIABLE] = f"{FOLDER_AT}/{CHECKPOINT_NOW_FILE}"
    if folder:
        ours[REPORT_VARIABLE] = f"{FOLDER_AT}/{REPORT_FILE}"
    if folder and request.service is not None:
        ours[HELD_VARIABLE] = f"{FOLDER_AT}/{HELD_FILE}"
    host: dict[str, Any] = {
        "NetworkMode": network,
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "Privileged": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "PidsLimit": settings.pids_max,
        "ShmSize": _shm_bytes(request) or settings.shm,
        "Binds": [*settings.mounts, *(_for(tenant, settings.mounts_for) or "").split()],
        "Mounts": [{"Type": "bind", "Source": os.path.abspath(folder), "Target": FOLDER_AT}] if folder else [],
        "LogConfig": {"Type": "local", "Config": {"max-size": f"{max(_MIB, log_bytes)}", "max-file": "2"}},
    }
    if key:  # writable, so that podman gives it to the container's user
        host["Mounts"].append({"Type": "bind", "Source": os.path.abspath(key), "Target": CALL_KEY_AT})
    if assignment.setup:
        source, is_job = os.path.abspath(assignment.setup), not assignment.is_setup
        host["Mounts"].append({"Type": "bind", "Source": source, "Target": SETUP_AT, "ReadOnly": is_job})
    for name, source in assignment.data.items():
        at = f"{DATA_AT}/{name}"
        host["Mounts"].append({"Type": "bind", "Source": os.path.abspath(source), "Target": at, "ReadOnly": True})
        ours[data_variable(name)] = at
    if path := _time_slicing(request):
        host["Mounts"].append({"Type": "bind", "Source": path, "Target": TIME_SLICING_AT, "ReadOnly": True})
    if assignment.mode == MPS and not simulated:
        _join_daemon(host, ours)
    if settings.memlock:
        host["Ulimits"] = [{"Name": "memlock", "Soft": -1, "Hard": -1}]
    if (resources := request.resources) is not None:
        if resources.cpu_milli:
            host["NanoCpus"] = resources.cpu_milli * 1_000_000
        if resources.memory_mib:
            host["Memory"] = host["MemorySwap"] = resources.memory_mib * _MIB
    if assignment.devices and not simulated:
        asked, shown = devices_of(assignment.devices, settings, specs, nodes)
        host |= asked
        ours |= shown
    if bindings := _bindings(assignment, network, published):
        host["PortBindings"] = bindings
    if published is not None:
        ours |= published.variables
    base = UNBUFFERED | ({"HOME": FOLDER_AT} if folder else {})
    env = lay_over(base | {name: value for name, value in run.env.items() if isinstance(value, str)}, ours)
    env = JobEnvironment(apply_tf_paths_over({"PATH": PATH_DEFAULT} | dict(image.variables), env))
    env = assignment.with_setup(env, SETUP_AT, image.variables.get("PATH", PATH_DEFAULT))
    if limit is not None:
        env = JobEnvironment(limit.laid_over(env, image.variables.get("LD_PRELOAD", "")))
        host["Mounts"] += limit.mounts
    config: dict[str, Any] = {
        "Image": request.image,
        "Env": [f"{name}={value}" for name, value in env.items()],
        "Labels": dict(labels),
        "User": _user(policy.user_of(tenant) or run.user, settings),
        "HostConfig": host,
    }
    if bindings:
        config["ExposedPorts"] = {port: {} for port in bindings}
    if run.stdin == "stream":
        config |= {"Tty": True, "OpenStdin": True}
    if assignment.is_setup:  # a shell command, whatever program the image starts by itself
        config |= {"Entrypoint": list(run.argv[:-1]), "Cmd": list(run.argv[-1:])}
    elif run.argv:
        config["Cmd"] = list(run.argv)
    if variables is not None:
        entry_point = () if assignment.is_setup else image.entry_point
        words = [*entry_point, *(run.argv or image.command)]
        if not words:
            raise refuse("invalid-argument", "neither the job nor its image names a program", field="$.run.argv")
        config |= words_of(words)
        host["Mounts"] += mounts_of(variables)
    if run.cwd or (folder and run.argv):  # an image's own command starts in the image's own folder
        config["WorkingDir"] = os.path.join(FOLDER_AT if folder else "/", run.cwd or "")
    return config


def _shm_bytes(request: Request) -> int:
    """Return the size of /dev/shm that a request asks for; 0 if it asks for none."""
    block = request.blocks.get(request.workload.driver)
    return int((block.get("shm_mib") if isinstance(block, dict) else None) or 0) * _MIB


def _join_daemon(host: dict[str, Any], ours: Mapping[str, str]) -> None:
    """Give a container the sockets and the shared memory of the MPS daemon of these variables.

    The directories have the same paths as on the host, because daemon and clients may exchange paths. They are mounted
    read-only: clients can still use the sockets, but root in the container cannot replace them.
    """
    host["IpcMode"] = "host"
    del host["ShmSize"]  # the host's /dev/shm keeps its own size
    for name in MPS_DIRECTORIES:
        host["Mounts"].append({"Type": "bind", "Source": ours[name], "Target": ours[name], "ReadOnly": True})


def _bindings(assignment: Assignment, network: str, published: Published | None) -> dict[str, list[dict[str, str]]]:
    """Return which ports of the host are bound to which ports of the container.

    Rank 0 of a gang on a container network is reached at the address that the worker gave the leader: its host's.
    """
    pairs = [] if published is None else [(own, port, published.bind) for own, port in published.ports.items()]
    if network not in _UNPUBLISHED:
        pairs += [(port, port, "") for port in assignment.ports]
    start = assignment.start
    if start is not None and start.world_size > 1 and assignment.rank == 0 and network not in _UNPUBLISHED:
        bind = start.master_addr if is_ipv4(start.master_addr) else ""
        pairs.append((start.master_port, start.master_port, bind))
    found: dict[str, list[dict[str, str]]] = {}
    for own, port, address in pairs:
        found.setdefault(f"{own}/tcp", []).append({"HostIp": address, "HostPort": str(port)})
    return found


def _user(wanted: str | None, settings: ContainerSettings) -> str:
    """Return the user of a container: a user of the host as numbers, a name that the host does not know as it is.

    `wanted` None is the user of the settings; "" is the image's own.
    """
    if wanted is None:
        return "" if settings.user == "image" else settings.user
    try:
        entry = pwd.getpwnam(wanted)
    except KeyError:
        return f"{wanted}:{wanted}" if wanted.isdecimal() else wanted
    return f"{entry.pw_uid}:{entry.pw_gid}"


def uid_of(tenant: str, request: Request, settings: ContainerSettings, policy: Policy) -> int | None:
    """Return the uid of a tenant's container on the host, for an engine that does not map users.

    Return None if only the image knows its user.
    """
    user = _user(policy.user_of(tenant) or request.workload.user, settings)
    ids = ids_of(user) if user else None
    return None if ids is None else ids[0]


def ids_of(user: str) -> tuple[int, int] | None:
    """Return uid and gid of a container's user; None if the user is a name, which only the image knows.

    The user "" is root. The gid is 0 if there is none, or if it is a name.
    """
    uid, _, gid = user.partition(":")
    if user and not (uid.isdecimal() and int(uid) < _ID_MAX):
        return None
    return int(uid or 0), int(gid) if gid.isdecimal() and int(gid) < _ID_MAX else 0


def ids_in(passwd: bytes, user: str) -> tuple[int, int] | None:
    """Return uid and gid of a user from an image's /etc/passwd; None if it has no such user."""
    for line in passwd.splitlines():
        words = line.split(b":")
        if len(words) > 3 and words[0].decode(errors="replace") == user.partition(":")[0]:
            return ids_of(b":".join(words[2:4]).decode(errors="replace"))
    return None


def devices_of(
    devices: Sequence[Device],
    settings: ContainerSettings,
    specs: Registry | None,
    own: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the part of a container's configuration that requests these devices, and the variables for them.

    `own` are the files in /dev of each device alone, by uuid. NVIDIA devices are requested by CDI if the engine's specs
    have all of them, else by NVIDIA's hook, which knows them by their uuids; all others by their nodes. So a slice of
    MIG that is younger than the specs is found. Raises Refused for a device without a node of its own.
    """
    asked: dict[str, Any] = {}
    variables: dict[str, str] = {}
    if nvidia := [device for device in devices if device.vendor == "nvidia"]:
        words = [word for word in settings.nvidia_capabilities.split(",") if word]
        variables["NVIDIA_DRIVER_CAPABILITIES"] = ",".join(words)
        names = [] if specs is None else [cdi_name(device, specs) for device in nvidia]
        if specs is not None and (all(name in specs.devices for name in names) or any(map(_is_known_by_cdi, nvidia))):
            asked["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": names}]
            variables["NVIDIA_VISIBLE_DEVICES"] = "void"  # the image may set "all", and NVIDIA's hook may be active too
        else:
            asked["DeviceRequests"] = [
                {"Driver": "nvidia", "DeviceIDs": [each.uuid for each in nvidia], "Capabilities": [["gpu", *words]]}
            ]
    else:
        variables.setdefault("NVIDIA_VISIBLE_DEVICES", "void")  # as above, next to cards of another vendor
    nodes = [
        node for device in devices if device.vendor != "nvidia" for node in _nodes(device, own.get(device.uuid, ()))
    ]
    if nodes:
        asked["Devices"] = [
            {"PathOnHost": node, "PathInContainer": node, "CgroupPermissions": "rw"} for node in dict.fromkeys(nodes)
        ]
        for vendor, name in (("amd", "ROCR_VISIBLE_DEVICES"), ("intel", "ZE_AFFINITY_MASK")):
            if count := sum(device.vendor == vendor for device in devices):
                variables[name] = ",".join(map(str, range(count)))  # it sees only these nodes
    return asked, variables


def cdi_name(device: Device, specs: Registry) -> str:
    """Return the device's name in these specs; if they do not have it, the name that it should have there."""
    names = [*device.cdi, f"{KINDS['nvidia']}={device.uuid}"]
    return next((name for name in names if name in specs.devices), names[0])


def _is_known_by_cdi(device: Device) -> bool:
    """Return whether only CDI knows the device, since this host has no NVML."""
    return device.uuid.startswith(CDI_UUID)


def _nodes(device: Device, own: Sequence[str]) -> list[str]:
    """Return the files in /dev of a device that is not NVIDIA's. Raises Refused if none of `own` exists."""
    found, warnings = device_nodes(device.vendor, own)
    if not any(node in found for node in own):
        why = f"no file in /dev is known to be that of {device.uuid}: {'; '.join(warnings)}"
        raise refuse("failed-precondition", f"{START_FAILED}: {why}", found=device.pci)
    return found
