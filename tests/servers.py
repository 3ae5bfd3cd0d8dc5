"""The servers that a test may run on: the wheel's own, and the image of `deploy/nats` in a container.

A test that is marked `any_server` and asks for `nats_server`, `nats_url` or `mortal_server` runs on both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

import msgspec
import pytest

from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import BusError, JetStreamRefused, RequestTimeout
from moorage.bus.jetstream import JetStream
from tests.ports import free_ports
from tests.waiting import until

ANSWER_S: Final = 30.0
#: the values of a parametrized server fixture
KINDS: Final = ("wheel", pytest.param("container", marks=[pytest.mark.docker, pytest.mark.slow]))


class Server(Protocol):
    """Where a real nats-server listens. The URLs hold credentials where an account needs them."""

    @property
    def url(self) -> str: ...

    @property
    def ledger_url(self) -> str: ...

    @property
    def port(self) -> int: ...


class MortalServer(Server, Protocol):
    """A server of a test's own, to end and to start again on the same data and the same port."""

    async def kill(self) -> None: ...

    async def stop(self) -> None: ...

    async def start(self) -> None: ...


async def stream_is_there(connection: Connection, stream: str) -> None:
    """Wait for a stream that a process beside the scheduler makes, as that of the history."""

    async def there() -> bool:
        # a server of a cluster may have no answer, too, while the stream is being made
        with contextlib.suppress(JetStreamRefused, RequestTimeout):
            await JetStream(connection).stream_info(stream)
            return True
        return False

    await until(there, 120, f"the stream {stream}")


async def delete_streams(urls: Iterable[str], unique: str) -> None:
    """All streams of a test's prefix, and of the tenant of that name: each keeps its bound reserved, and those of many
    tests fill a small disk.

    Quiet where the server is gone.
    """
    for url in urls:
        with contextlib.suppress(BusError):
            async with await connect(url, "test", give_up_after_s=0) as connection:
                answer = await connection.request("$JS.API.STREAM.NAMES", b"", ANSWER_S)
                for name in msgspec.json.decode(answer.data)["streams"] or ():
                    if name.startswith(unique.upper()) or name.endswith(f"_{unique}"):
                        await JetStream(connection).delete_stream(name)


class WheelServer:
    """An embedded server that can be started again."""

    def __init__(self, embedded: EmbeddedServer) -> None:
        self._embedded = embedded
        self.port = embedded.port
        self.url = embedded.url
        self.ledger_url = embedded.ledger_url

    @classmethod
    async def on(cls, data_dir: Path) -> WheelServer:
        return cls(await EmbeddedServer.start(data_dir, port=free_ports(1)[0]))

    async def kill(self) -> None:
        await self._embedded.kill()

    async def stop(self) -> None:
        await self._embedded.stop()

    async def start(self) -> None:
        self._embedded = await EmbeddedServer.start(self._embedded.data_dir, port=self.port)
