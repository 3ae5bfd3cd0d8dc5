"""Run containers through podman's service: what of `driver.py` is podman's own, and the requests of its libpod API.

Podman's other API, which is compatible with Docker's, is not used: it takes a request for CDI devices, and ignores it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec

from moorage.schemas.driver_config import PodmanBlock
from moorage.schemas.job import Request
from moorage.schemas.settings import setting
from moorage.worker.devices.readers.cdi import folders
from moorage.worker.drivers.container.config import ContainerSettings
from moorage.worker.drivers.container.driver import ContainerDriver
from moorage.worker.drivers.container.engine import About, Engine, EngineError, Piece
from moorage.worker.drivers.container.log_file import LogFile
from moorage.worker.drivers.kit import Kit

#: upper bounds of a container's limits; the agent's own limits count if they are lower
_ULIMITS: Final = (("nofile", resource.RLIMIT_NOFILE, 1 << 20), ("nproc", resource.RLIMIT_NPROC, 32768))
#: how often a followed log is looked at of which the service says nothing
LOOK_S: Final = 1.0
_UNLIMITED: Final = (1 << 64) - 1
_CPU_PERIOD_US: Final = 100_000
#: networks of podman that are no names of networks
_MODES: Final = ("none", "host", "bridge")


class PodmanSettings(ContainerSettings, frozen=True):
    """Settings of the driver `podman`: those of all container drivers, and the socket of its service."""

    user: Annotated[
        str,
        setting(
            "User of the processes in a container, as UID or UID:GID; image is the image's own, maybe root. Empty: "
            "65534:65534, or rootless 0:0, which is the agent's user on the host."
        ),
    ] = ""
    socket: Annotated[
        Path | None,
        setting(
            "UNIX socket of podman's service on this host; by default CONTAINER_HOST's, else that of podman.socket: "
            "/run/podman/podman.sock, or rootless $XDG_RUNTIME_DIR/podman/podman.sock."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.user:
            super().__post_init__()
        else:
            msgspec.structs.replace(self, user=default_user())  # this checks all other settings

    @property
    def engine(self) -> Path:
        """The socket of the service, which must be on this host."""
        scheme, _, path = os.environ.get("CONTAINER_HOST", "").partition("://")
        if self.socket is not None or scheme == "unix":
            return self.socket or Path(path)
        run = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}") if os.geteuid() else "/run"
        return Path(run) / "podman" / "podman.sock"


def default_user() -> str:
    """Return the default user of containers: 65534:65534; rootless, the agent's own user as its containers see it."""
    return "0:0" if os.geteuid() else "65534:65534"


class Libpod(Engine):
    """Podman's own API."""

    root = "/v4.0.0/libpod"
    starts = (
        "start podman's service (systemctl enable --now podman.socket; rootless: systemctl --user enable --now "
        "podman.socket), or name its socket in the driver's settings"
    )
    pull_at = ("images/pull", "reference")
    removes: ClassVar[Mapping[str, str]] = {"force": "true", "v": "true", "timeout": "0"}
    only_cdi = True
    frames_terminals = True
    gives_folders = True
    _limits: frozenset[str] = frozenset()

    def about_of(self, info: Mapping[str, Any]) -> About:
        self._limits = frozenset(info["host"].get("cgroupControllers") or ())
        return About(
            is_rootless=bool(info["host"]["security"]["rootless"]),
            maps_users=False,  # rootless, only some: see `PodmanDriver.uid_of`
            limits=self._limits,
            cdi_folders=tuple(map(str, folders())),
        )

    async def output(
        self, container: str, since: str, follow: bool, *, is_terminal: bool = False
    ) -> AsyncIterator[Piece]:
        shown = await self._answer("GET", f"containers/{container}/json")
        if shown is None:
            return
        # what the service says of a log that it follows may lack lines: here it says only that there is more
        said = super().output(container, str(int(time.time())), follow=True) if follow else None
        with LogFile(shown["HostConfig"]["LogConfig"]["Path"]) as file, _of_log():
            async for _ in _ticks(said):
                for piece in file.read():
                    yield piece

    def body_of(self, config: Mapping[str, Any], name: str) -> tuple[dict[str, str], dict[str, Any]]:
        return {}, spec_of(config, name, self._limits)


async def _ticks(said: AsyncIterator[Piece] | None) -> AsyncIterator[None]:
    """Yield at each piece of output, and each second, until it is over; then once more. Without it, yield once."""
    if said is not None:
        more = asyncio.Event()

        async def hear(said: AsyncIterator[Piece]) -> None:
            async for _ in said:
                more.set()

        hearing = asyncio.get_running_loop().create_task(hear(said))
        hearing.add_done_callback(lambda _: more.set())
        try:
            while not hearing.done():
                more.clear()
                yield
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await more.wait()
            hearing.result()
        finally:
            hearing.cancel()
            await asyncio.wait((hearing,))
    yield


@contextlib.contextmanager
def _of_log() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(500, f"its log cannot be read: {error}") from None


def spec_of(config: Mapping[str, Any], name: str, limits: Collection[str]) -> dict[str, Any]:
    """Return libpod's form of a configuration of `config_of`; `limits` are those that podman can set here."""
    host = config["HostConfig"]
    network = host["NetworkMode"]
    body: dict[str, Any] = {
        "name": name,
        "image": config["Image"],
        "env": dict(each.partition("=")[::2] for each in config["Env"]),
        "labels": config["Labels"],
        "netns": {"nsmode": network if network in _MODES else "bridge"},
        "pidns": {"nsmode": "private"},
        "ipcns": {"nsmode": host["IpcMode"]},
        "cgroupns": {"nsmode": "private"},
        "cap_drop": host["CapDrop"],
        "no_new_privileges": True,
        "restart_policy": "no",
        "systemd": "false",
        "mounts": [*map(_folder, host["Binds"]), *map(_mount, host["Mounts"])],
        "devices": [{"path": path} for path in _devices(host)],
        "portmappings": _published(host.get("PortBindings", {})),
        "r_limits": [*_limits_here(), *map(_limit, host.get("Ulimits", ()))],
        "resource_limits": _resources(host, limits),
        "log_configuration": {"driver": "k8s-file", "size": int(host["LogConfig"]["Config"]["max-size"]) * 2},
    }
    if config.get("Tty"):
        body |= {"terminal": True, "stdin": True}
    if network not in _MODES:
        body["networks"] = {network: {}}
    for theirs, ours in (("Cmd", "command"), ("Entrypoint", "entrypoint"), ("WorkingDir", "work_dir")):
        if theirs in config:
            body[ours] = config[theirs]
    if config["User"]:
        body["user"] = config["User"]
    if "ShmSize" in host:
        body["shm_size"] = host["ShmSize"]
    return body


def _resources(host: Mapping[str, Any], limits: Collection[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "pids" in limits:
        found["pids"] = {"limit": host["PidsLimit"]}
    if "cpu" in limits and "NanoCpus" in host:
        quota_us = host["NanoCpus"] * _CPU_PERIOD_US // 1_000_000_000
        found["cpu"] = {"period": _CPU_PERIOD_US, "quota": quota_us}
    if "memory" in limits and "Memory" in host:
        found["memory"] = {"limit": host["Memory"], "swap": host["MemorySwap"]}
    return found


def _devices(host: Mapping[str, Any]) -> list[str]:
    return [
        *(name for each in host.get("DeviceRequests", ()) for name in each["DeviceIDs"]),
        *(each["PathOnHost"] for each in host.get("Devices", ())),
    ]


def _folder(bind: str) -> dict[str, Any]:
    """Return the mount of an operator's folder, /host/path:/path:ro or :rw."""
    source, target, mode = bind.split(":")
    return {"type": "bind", "source": source, "destination": target, "options": ["rbind", mode]}


def _mount(mount: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mount of the driver's own.

    A writable one is given to the container's user: only podman knows its uid on the host.
    """
    options = ["rbind", "ro" if mount.get("ReadOnly") else "U"]
    return {"type": "bind", "source": mount["Source"], "destination": mount["Target"], "options": options}


def _published(bindings: Mapping[str, Sequence[Mapping[str, str]]]) -> list[dict[str, Any]]:
    return [
        {
            "container_port": int(own.partition("/")[0]),
            "protocol": own.partition("/")[2],
            "host_ip": each["HostIp"],
            "host_port": int(each["HostPort"]),
        }
        for own, places in bindings.items()
        for each in places
    ]


def _limit(limit: Mapping[str, Any]) -> dict[str, Any]:
    soft, hard = (_UNLIMITED if limit[each] < 0 else limit[each] for each in ("Soft", "Hard"))
    return {"type": limit["Name"], "soft": soft, "hard": hard}


def _limits_here() -> list[dict[str, Any]]:
    """Return the limits of a container: the agent's own, up to the bounds of `_ULIMITS`.

    A service without CAP_SYS_RESOURCE cannot set podman's defaults.
    """
    found = []
    for name, kind, most in _ULIMITS:
        soft, hard = (most if each == resource.RLIM_INFINITY else min(each, most) for each in resource.getrlimit(kind))
        found.append({"type": name, "soft": soft, "hard": hard})
    return found


class PodmanDriver(ContainerDriver):
    """The driver `podman`, as root or rootless."""

    name = "podman"
    settings = PodmanSettings
    config = PodmanBlock
    api = Libpod

    @classmethod
    def from_kit(cls, kit: Kit) -> PodmanDriver:
        own: PodmanSettings = kit.own
        return cls(kit._replace(own=msgspec.structs.replace(own, user=own.user or default_user())))

    def uid_of(self, tenant: str, request: Request) -> int | None:
        uid = super().uid_of(tenant, request)
        if not os.geteuid():
            return uid
        return os.geteuid() if uid == 0 else None  # rootless, a container's other users have other uids on the host
