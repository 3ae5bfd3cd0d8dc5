"""What the findings about NATS share: a nats-server of the wheel on loopback, raw requests, and the verdict.

It uses nothing of moorage. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client

from findings.verdict import verdict

#: Bounds a start, a reconnection and the wait for a state.
WAIT_S = 20.0
POLL_S = 0.05
ANSWER_S = 5.0
_DEATH_SIGNAL = 1

_clients: list[Client] = []
_servers: list[Server] = []

logging.getLogger("nats").setLevel(logging.CRITICAL)  # lost connections are part of what is looked at


def free_port() -> int:
    """Return a TCP port of loopback that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Server:
    """A nats-server in a folder of its own; `settings` are lines of its configuration, `room` its bound for files."""

    def __init__(self, settings: str = "", *, jetstream: bool = True, room: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.port = free_port()
        self._jetstream = jetstream
        self._room = f", max_file_store: {room}" if room else ""
        self._process: subprocess.Popen[bytes] | None = None
        self.configure(settings)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def configure(self, settings: str) -> None:
        store = f'jetstream: {{store_dir: "{self.folder}/store"{self._room}}}\n' if self._jetstream else ""
        (self.folder / "server.conf").write_text(f"listen: 127.0.0.1:{self.port}\n{store}{settings}\n")

    def start(self) -> Server:
        """Start it. It ends with this process, however that ends."""
        program = Path(sys.executable).with_name("nats-server")
        die_with_us = ctypes.CDLL(None).prctl
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(program), "-c", str(self.folder / "server.conf")],
                stdout=log,
                stderr=log,
                preexec_fn=lambda: die_with_us(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0),
            )
        _servers.append(self)
        return self

    def reload(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(WAIT_S)
            self._process = None


async def until(true: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str, within_s: float = WAIT_S) -> None:
    """Wait until `true()` holds. Raises TimeoutError that says what did not come."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + within_s
    while True:
        held = true()
        if held if isinstance(held, bool) else await held:
            return
        if loop.time() > ends_s:
            raise TimeoutError(what)
        await asyncio.sleep(POLL_S)


async def connect(server: Server, **options: Any) -> Client:
    """Return a connection, which comes back by itself after 0.1 s when it is lost."""
    heard: list[Exception] = []

    async def hear(error: Exception) -> None:
        heard.append(error)

    def is_open() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", server.port)) == 0

    await until(is_open, "the server does not listen")
    options = {"error_cb": hear, "reconnect_time_wait": 0.1, "max_reconnect_attempts": -1, **options}
    client = await nats.connect(server.url, **options)
    _clients.append(client)
    return client


async def settle(client: Client) -> None:
    """Return when the server has what was sent before, new subscriptions too: the second PING leaves after them."""
    await client.flush()
    await client.flush()


async def api(client: Client, verb: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask the JetStream API and return the answer, errors included."""
    body = b"" if request is None else json.dumps(request).encode()
    answer: dict[str, Any] = json.loads((await client.request(f"$JS.API.{verb}", body, timeout=ANSWER_S)).data)
    return answer


async def make_stream(client: Client, name: str, subject: str, **settings: Any) -> dict[str, Any]:
    """Create a stream on file; return the answer, which has `error` if it was refused."""
    base = {"name": name, "subjects": [subject], "storage": "file", "retention": "limits"}
    return await api(client, f"STREAM.CREATE.{name}", {**base, **settings})


async def state(client: Client, stream: str, subjects: str = "") -> dict[str, Any]:
    """Return the `state` of the stream's info; with a filter it has the count of each subject."""
    asked = {"subjects_filter": subjects} if subjects else None
    found: dict[str, Any] = (await api(client, f"STREAM.INFO.{stream}", asked))["state"]
    return found


async def append(client: Client, subject: str, body: bytes = b"x", **headers: str | int) -> dict[str, Any]:
    """Publish to a stream and return its answer; `Nats_Msg_Id="1"` is the header Nats-Msg-Id."""
    lines = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    answer: dict[str, Any] = json.loads(
        (await client.request(subject, body, timeout=ANSWER_S, headers=lines or None)).data
    )
    return answer


def run(look: Coroutine[Any, Any, tuple[bool, Mapping[str, object]]]) -> None:
    """Run `look`, which returns whether it is as described and what was seen; then close everything."""

    async def looked() -> tuple[bool, Mapping[str, object]]:
        try:
            return await look
        finally:
            for client in _clients:
                await client.close()
            for server in _servers:
                server.stop()

    verdict(*asyncio.run(looked()))


async def cluster(name: str, room: str = "") -> tuple[list[Server], list[Client]]:
    """Start three servers of one cluster, each with this room for files; return them and a connection to each, once
    JetStream has a leader."""
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = [
        Server(
            f'server_name: n{number}\ncluster {{ name: {name}, listen: "127.0.0.1:{port}", routes: [{routes}] }}',
            room=room,
        ).start()
        for number, port in enumerate(ports)
    ]
    clients = [await connect(server, allow_reconnect=False) for server in servers]

    async def can_make_streams() -> bool:
        try:
            made = await make_stream(clients[0], "PROBE", "probe", num_replicas=3)
        except (TimeoutError, nats.errors.NoRespondersError):
            return False
        return "error" not in made

    await until(can_make_streams, "the cluster has no leader", 2 * WAIT_S)
    return servers, clients


async def leader(client: Client, stream: str) -> int:
    """Return the number of the server that leads the stream's group."""
    name: str = (await api(client, f"STREAM.INFO.{stream}"))["cluster"]["leader"]
    return int(name.removeprefix("n"))
