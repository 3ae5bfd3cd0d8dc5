"""Run containers through Docker: what of `driver.py` is Docker's own, and the requests of its API."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from moorage.schemas.driver_config import DockerBlock
from moorage.schemas.settings import setting
from moorage.worker.drivers.container.config import ContainerSettings
from moorage.worker.drivers.container.driver import ContainerDriver
from moorage.worker.drivers.container.engine import About, Engine


class DockerSettings(ContainerSettings, frozen=True):
    """Settings of the driver `docker`: those of all container drivers, and the socket of its engine."""

    socket: Annotated[
        Path | None,
        setting("UNIX socket of the engine on this host; by default DOCKER_HOST's, else /var/run/docker.sock."),
    ] = None

    @property
    def engine(self) -> Path:
        """The socket of the engine. It must be on this host, because this host's kernel ends the containers."""
        scheme, _, path = os.environ.get("DOCKER_HOST", "").partition("://")
        return self.socket or Path(path if scheme == "unix" else "/var/run/docker.sock")


class Docker(Engine):
    """Docker's API. A configuration of `config_of` has its form."""

    root = ""
    starts = "start the engine (systemctl enable --now docker), or name its socket in the driver's settings"
    pull_at = ("images/create", "fromImage")

    def body_of(self, config: Mapping[str, Any], name: str) -> tuple[dict[str, str], dict[str, Any]]:
        return {"name": name}, dict(config)

    def about_of(self, info: Mapping[str, Any]) -> About:
        words = " ".join(info.get("SecurityOptions") or ())
        limits = {"memory": "MemoryLimit", "cpu": "CpuCfsQuota", "pids": "PidsLimit"}
        folders = info.get("CDISpecDirs")
        return About(
            is_rootless="rootless" in words,
            maps_users="rootless" in words or "userns" in words,
            limits=frozenset(name for name, key in limits.items() if info.get(key, True)),
            cdi_folders=tuple(folders) if folders else None,
        )


class DockerDriver(ContainerDriver):
    """The driver `docker`."""

    name = "docker"
    settings = DockerSettings
    config = DockerBlock
    api = Docker
