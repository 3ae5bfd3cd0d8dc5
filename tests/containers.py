"""The image of `deploy/nats` as a server for the tests, through testcontainers.

Needs a Docker engine on this host and no registry: the image is built from the wheel's nats-server, and testcontainers'
own helper container (which would come from one) is not used, so whatever is started here is removed here. Containers
use the host's network: an engine without a bridge will do, and a port stays the same through a kill and a start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")

from moorage.bus.embedded import HOST, USER_LEDGER
from moorage.bus.own_login import USER
from tests.ports import free_ports

ROOT: Final = Path(__file__).resolve().parents[1]
ENGINE_S: Final = 60.0
READY_S: Final = 90.0


@functools.cache
def why_no_docker() -> str:
    """Empty where a Docker engine answers, else one line that says why not."""
    try:
        asked = subprocess.run(["docker", "version"], capture_output=True, text=True, timeout=ENGINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no Docker engine: {error}"
    return "" if asked.returncode == 0 else f"no Docker engine: {asked.stderr.strip()}"


@contextlib.contextmanager
def built_image() -> Iterator[str]:
    """The image of `deploy/nats`, built as its README says, under a tag of its own; removed at the end."""
    tag = f"moorage-nats:test-{secrets.token_hex(6)}"
    _run([str(ROOT / "deploy" / "nats" / "build"), tag])
    try:
        yield tag
    finally:
        _run(["docker", "image", "rm", tag])


def _run(command: list[str]) -> None:
    """One at a time among the processes of a test run: a removal takes layers that another's build may count on."""
    with (Path(tempfile.gettempdir()) / f"moorage-nats-image-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr}")


class ContainerServer:
    """nats-server in a container, on a volume of its own. `kill` and `start` keep its data and its port."""

    def __init__(self, image: str) -> None:
        from testcontainers.core.container import DockerContainer  # takes long, and few runs need it

        [self.port] = free_ports(1)
        self._password = f"p{secrets.token_hex(16)}"
        self._container = (
            DockerContainer(image)
            .with_envs(MOORAGE_PASSWORD=self._password, MOORAGE_LEDGER_PASSWORD=self._password[::-1] + "p")
            .with_command(f"-c /etc/nats/server.conf --addr {HOST} --port {self.port}")
            .with_kwargs(network_mode="host")
        )
        try:
            self._container.start()
            self._wait_ready()
        except BaseException:
            self.remove()
            raise

    @property
    def url(self) -> str:
        return f"nats://{USER}:{self._password}@{HOST}:{self.port}"

    @property
    def ledger_url(self) -> str:
        return f"nats://{USER_LEDGER}:{self._password[::-1]}p@{HOST}:{self.port}"

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        await asyncio.to_thread(self._end, "SIGKILL")

    async def stop(self) -> None:
        """SIGTERM, and wait until it has ended by itself."""
        await asyncio.to_thread(self._end, "SIGTERM")

    async def start(self) -> None:
        """The same container again, with its volume."""
        await asyncio.to_thread(self._start)

    def remove(self) -> None:
        """End it and remove it with its volume."""
        self._container.stop()

    def logs(self) -> str:
        return b"".join(self._container.get_logs()).decode(errors="replace")

    def _end(self, signal: str) -> None:
        container = self._container.get_wrapped_container()
        container.kill(signal)
        container.wait(timeout=READY_S)

    def _start(self) -> None:
        self._container.get_wrapped_container().start()
        self._wait_ready()

    def _wait_ready(self) -> None:
        """Until it greets a client, which it does once JetStream has recovered."""
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 1) as client:
                if client.recv(5) == b"INFO ":
                    return
            container = self._container.get_wrapped_container()
            container.reload()
            if container.status == "exited" or time.monotonic() > deadline:
                raise RuntimeError(f"nats-server in a container is {container.status}:\n{self.logs()}")
            time.sleep(0.01)
