"""Three nats-servers of the wheel as one JetStream cluster on loopback, each to kill, stop and start again by itself.

Two accounts, as the embedded server has them: the users' world for everybody, the ledger's for who knows its password.
Every server fsyncs before it acknowledges. Servers tell clients of no other server, so that a client behind a proxy
stays behind it.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import subprocess
from pathlib import Path
from typing import Final

from moorage.bus.connection import connect
from moorage.bus.embedded import ACCOUNT, ACCOUNT_LEDGER, HOST, USER_LEDGER, find_binary
from moorage.bus.errors import BusError
from moorage.bus.jetstream import JetStream
from moorage.bus.own_login import USER
from moorage.system.parentage import die_with_parent
from tests.ports import free_ports
from tests.waiting import until

SERVERS: Final = 3
#: the first election of the cluster's meta leader, on a machine that does other things
READY_S: Final = 90.0

_CONFIG: Final = """\
server_name: "{name}"
listen: "{host}:{port}"
log_file: "{folder}/server.log"
max_payload: 1MB
max_pending: 256MB
ping_interval: "5s"
ping_max: 2
jetstream {{ store_dir: "{folder}/jetstream", sync_interval: always }}
cluster {{ name: "moorage", listen: "{host}:{route}", no_advertise: true, routes: [ {routes} ] }}
accounts {{
  {account}: {{ jetstream: enabled, users: [ {{ user: {user}, password: {password} }}{more} ] }}
  {account_ledger}: {{ jetstream: enabled, users: [ {{ user: {user_ledger}, password: "{password_ledger}" }} ] }}
}}
no_auth_user: {user}
"""


class Node:
    """One server of the cluster, on its own folder and ports."""

    def __init__(self, name: str, folder: Path, port: int) -> None:
        self.name = name
        self.folder = folder
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        with (self.folder / "server.err").open("ab") as err:
            self._process = subprocess.Popen(
                [find_binary(), "-c", str(self.folder / "nats.conf")],
                stdin=subprocess.DEVNULL, stdout=err, stderr=err, start_new_session=True, preexec_fn=die_with_parent(),
            )  # fmt: skip

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; a stopped one dies too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Cluster:
    """Made by `start`; `stop` ends all of it. The URLs name every server."""

    def __init__(self, nodes: list[Node], password: str) -> None:
        self.nodes = nodes
        self._password = password

    @property
    def ports(self) -> list[int]:
        return [node.port for node in self.nodes]

    @property
    def port(self) -> int:
        return self.nodes[0].port

    @property
    def url(self) -> str:
        return self.url_at(self.ports)

    @property
    def ledger_url(self) -> str:
        return self.ledger_url_at(self.ports)

    @staticmethod
    def url_at(ports: list[int]) -> str:
        """The users' URL where the servers are reached on these ports."""
        return ",".join(f"nats://{HOST}:{port}" for port in ports)

    def ledger_url_at(self, ports: list[int]) -> str:
        return ",".join(f"nats://{USER_LEDGER}:{self._password}@{HOST}:{port}" for port in ports)

    @classmethod
    async def start(cls, folder: Path, more_users: str = "") -> Cluster:
        """Start all servers and wait until streams can be made. `more_users` go into the users' account, as text."""
        ports = free_ports(2 * SERVERS)
        clients, routes = ports[:SERVERS], ports[SERVERS:]
        password, nodes = secrets.token_hex(16), []
        for number, (port, route) in enumerate(zip(clients, routes, strict=True)):
            node = Node(f"n{number}", folder / f"n{number}", port)
            node.folder.mkdir(parents=True)
            others = ", ".join(f'"nats-route://{HOST}:{other}"' for other in routes if other != route)
            text = _CONFIG.format(
                name=node.name, host=HOST, port=port, folder=node.folder, route=route, routes=others, account=ACCOUNT,
                user=USER, password=f'"{secrets.token_hex(16)}"', more=more_users, account_ledger=ACCOUNT_LEDGER,
                user_ledger=USER_LEDGER, password_ledger=password,
            )  # fmt: skip
            (node.folder / "nats.conf").write_text(text)
            node.start()
            nodes.append(node)
        cluster = cls(nodes, password)
        try:
            await until(cluster.has_leader, READY_S, "the cluster's JetStream")
        except BaseException:
            await cluster.stop()
            raise
        return cluster

    async def has_leader(self) -> bool:
        """Whether a stream with a copy on each server can be made."""
        probe = "PROBE"
        try:
            async with await connect(self.url, "test", give_up_after_s=1) as connection:
                js = JetStream(connection)
                await js.ensure_stream({"name": probe, "subjects": ["probe"], "num_replicas": SERVERS})
                await js.delete_stream(probe)
                return True
        except BusError:
            return False

    async def leader_of(self, stream: str) -> Node | None:
        """The server that leads a stream of the ledger's account now."""
        try:
            async with await connect(self.ledger_url, "test", give_up_after_s=1) as connection:
                leader = (await JetStream(connection).stream_info(stream)).leader
        except BusError:
            return None
        return next((node for node in self.nodes if node.name == leader), None)

    async def stop(self) -> None:
        for node in self.nodes:
            await asyncio.to_thread(node.kill)
