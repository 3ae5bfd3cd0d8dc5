"""The HTTP door of a `moorage up`: it listens at once, and its process starts with the first caller."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from moorage.cli.framework.listening import FD_VARIABLE, HERE, address
from moorage.cli.local.children import Child, ChildFailed, Say

PORT_DEFAULT: Final = 9490


class LocalDoor:
    """Where programs of this machine call services by HTTP, without a key. `url` is "" where its package is missing."""

    def __init__(self, folder: Path, env: Mapping[str, str], say: Say) -> None:
        self.url = ""
        self._folder = folder
        self._env = env
        self._say = say
        self._listener: socket.socket | None = None
        self._child: Child | None = None
        self._stopped = False
        if find_spec("aiohttp") is not None:
            with contextlib.suppress(OSError):
                self._listener = _listening()
                self.url = f"{address(*self._listener.getsockname())}/v1"

    async def keep(self, url: str) -> None:
        """Wait for the first caller, then keep the door's process alive. One that cannot live ends alone."""
        if self._listener is None:
            return
        loop, called, file = asyncio.get_running_loop(), asyncio.Event(), self._listener.fileno()
        loop.add_reader(file, called.set)
        try:
            await called.wait()
        finally:
            if not self._stopped:  # else the number may be another descriptor's by now
                loop.remove_reader(file)
        if self._stopped:
            return
        argv = [sys.executable, "-m", "moorage.cli", "door", "--nats", url]
        env = {**self._env, FD_VARIABLE: str(file)}
        self._child = Child("door", argv, self._folder / "door.log", env, self._say, pass_fds=(file,))
        try:
            await self._child.keep(lambda: None)
        except ChildFailed as failed:
            self._say(f"{failed}: there is no door until the next moorage up")

    async def stop(self) -> None:
        """Listen no more, and end the door's process."""
        self._stopped = True
        if self._listener is not None:
            # a closed descriptor that the loop still watches: the next one of its number is never read
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        if self._child is not None:
            await self._child.stop()

    def kill(self) -> None:
        """Send SIGKILL to the door's process at once."""
        if self._child is not None:
            self._child.kill()


def _listening() -> socket.socket:
    for port in (PORT_DEFAULT, 0):
        made = socket.socket()
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((HERE, port))
            made.listen(128)
            made.setblocking(False)
            return made
        except OSError:
            made.close()
    raise OSError("no port is free")
