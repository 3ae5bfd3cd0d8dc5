"""A port of this machine that leads to a port of a running job.

The connections are channels of one command in the job: a relay (relay.py) that the job's own python3 runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from moorage.client import relay
from moorage.client.command import Command
from moorage.client.errors import rejected

if TYPE_CHECKING:
    from moorage.client.connected import Connected

HOST: Final = "127.0.0.1"
PORT_MAX: Final = 65535
#: of what the relay writes to standard error, so much is kept
_SAID_BYTES_MAX: Final = 64 * 1024


class AsyncForward:
    """A port here that leads to a port of a job, while the block runs: `async with job.forward(8888) as forward: …`.

    Made by `Job.forward`. It listens on 127.0.0.1 alone. `port` is the port here, 0 before the block.
    """

    def __init__(self, client: Connected, job: str, port: int | str, local: int, replica: int, by: str) -> None:
        remote = str(port)
        is_port = remote.isascii() and remote.isdigit() and len(remote) <= 5 and 0 < int(remote) <= PORT_MAX
        if not is_port and not (remote.isascii() and remote.isidentifier()):
            raise rejected(
                "invalid-argument", "that is no port of a job", found=port, field="port",
                allowed=f"1..{PORT_MAX}, or a variable of the job that has one, as PORT of --ports",
            )  # fmt: skip
        if not 0 <= local <= PORT_MAX:
            raise rejected(
                "invalid-argument", "that is no port of this machine", found=local, field="local",
                allowed=f"1..{PORT_MAX}, or 0 for a free one",
            )  # fmt: skip
        self.port = 0
        self._client = client
        self._job = job
        self._remote = remote
        self._local = local
        self._replica = replica
        self._by = by
        self._said = bytearray()
        #: called with each text that the relay writes to its standard error: why connections are closed, for one
        self.on_said: Callable[[str], object] | None = None
        self._command: Command | None = None
        self._carrying: asyncio.Task[int] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._remote} of job {self._job} at {self.address}>"

    @property
    def address(self) -> str:
        """`127.0.0.1:PORT`, of the port here."""
        return f"{HOST}:{self.port}"

    @property
    def said(self) -> str:
        """What the relay in the job has written to its standard error, up to 64 KiB: why it ended early, for one."""
        return self._said.decode(errors="replace")

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> Self:
        """Start the relay and listen, and return this forward.

        Raises what `Job.exec` raises, and `Rejected` for a port that is in use.
        """
        # its first line says to who looks at the job's processes, or at its history, what this is
        source = f"# moorage forward {self._remote}\n{Path(relay.__file__).read_text()}"
        argv = ("python3", "-c", source, self._remote)
        command = Command.of(self._client, self._job, argv, replica=self._replica, by=self._by)
        channels = relay.Channels(
            command.write, tell=lambda why: self._on_data(f"port {self.port} here: {why}\n".encode())
        )
        await command.__aenter__()
        try:
            server = await asyncio.start_server(channels.accept, HOST, self._local)
        except OSError as error:
            await command.__aexit__()
            raise rejected(
                "invalid-argument", f"port {self._local} of this machine: {os.strerror(error.errno or 0)}",
                found=self._local, next="name another port here, or 0 for a free one",
            ) from None  # fmt: skip
        except BaseException:
            await command.__aexit__()
            raise
        self.port = int(server.sockets[0].getsockname()[1])
        self._command = command
        self._carrying = asyncio.get_running_loop().create_task(self._carry(command, channels, server))
        self._carrying.add_done_callback(lambda _: server.close())  # also of one that is closed before it began
        return self

    async def close(self) -> None:
        """Listen no more, and end all connections and the relay. Does nothing if it is closed."""
        command, carrying = self._command, self._carrying
        if command is None or carrying is None:
            return
        self._command = self._carrying = None
        carrying.cancel()
        await asyncio.wait((carrying,))
        if not carrying.cancelled():
            carrying.exception()  # so that it counts as seen
        await command.__aexit__()

    async def wait(self) -> int:
        """Wait until the relay is over, as it is with the job, and return its exit code: minus the signal, if that is
        below 0.

        Raises `ClientError` if the worker is lost, or the stream has lost bytes.
        """
        if self._carrying is None:
            raise RuntimeError("the forward is not open: use it in `async with job.forward(port) as forward:`")
        return await asyncio.shield(self._carrying)

    def _on_data(self, data: bytes) -> None:
        self._said += data[: max(0, _SAID_BYTES_MAX - len(self._said))]
        if self.on_said is not None:
            self.on_said(data.decode(errors="replace"))

    async def _carry(self, command: Command, channels: relay.Channels, server: asyncio.Server) -> int:
        try:
            while (found := await command.read()) is not None:
                stream, data = found
                if stream == "out":
                    await channels.received(data)
                else:
                    self._on_data(data)
            return await command.wait()
        finally:
            server.close()
            await channels.close()
