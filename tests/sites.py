"""A site as `moorage admin nats-config` writes it, on real nats-servers: connections by identity, and witnesses.

A witness is a user that the site does not have: one in each account, with every right in it, who hears what arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.bus.connection import Connection, connect
from moorage.bus.contexts import Context, load_context
from moorage.bus.embedded import find_binary
from moorage.bus.errors import BusError, CannotConnect, NotAuthorized
from moorage.bus.server_users import SYSTEM_ACCOUNT
from moorage.bus.site import MONITOR_BEHIND, ROUTES_BEHIND, Identity, Server, Site, server_name
from moorage.bus.transport import Delivery
from moorage.cli.fleet.nats_config import CONTEXTS, _context, _write_context, write
from moorage.schemas.subjects import Subjects
from tests.waiting import until

READY_S: Final = 90.0
HOST: Final = "127.0.0.1"
RELOADED: Final = "Reloaded server configuration"


class RunningSite:
    """Servers of a site, and who may connect to them."""

    def __init__(
        self, site: Site, folder: Path, passwords: dict[str, str], witness: str, ending: contextlib.ExitStack
    ) -> None:
        self.site = site
        self.folder = folder
        self._passwords = passwords
        self._witness = witness
        self.processes: list[subprocess.Popen[bytes]] = []
        self._ending = ending

    @property
    def environment(self) -> dict[str, str]:
        """For processes: with it the contexts of the site are found by name."""
        return {"XDG_CONFIG_HOME": str(self.folder)}

    def context(self, key: str) -> Context:
        """The context of a key. A worker of a pool has none before its join token makes it: it is made here."""
        if not (self.folder / CONTEXTS / f"{key}.json").exists():
            named = {identity.key: identity for identity in self.site.identities}
            if key in named:
                _write_context(self.folder, key, _context(self.site, named[key], self.folder))
        return load_context(key, self.environment)

    async def connect(self, key: str, **more: Any) -> Connection:
        return await connect(self.context(key), f"test {key}", **more)

    def witness_context(self, account: str) -> Context:
        """One with every right in an account. Not where users show certificates."""
        scheme = "tls" if self.site.encrypts else "nats"
        url = ",".join(f"{scheme}://{account}:{self._witness}@{each.host}:{each.port}" for each in self.site.servers)
        return Context(url=url, source="test", ca=str(self.folder / "tls/ca.pem") if self.site.encrypts else "")

    async def witness(self, account: str) -> Connection:
        return await connect(self.witness_context(account), f"witness of {account}")

    async def reload(self) -> None:
        """As `nats-server --signal reload` does, until each server says that it has read its files."""
        for at, process in enumerate(self.processes):
            log = self.folder / f"server-{at}.log"
            before = log.read_text().count(RELOADED)
            signalling = await asyncio.create_subprocess_exec(find_binary(), "--signal", f"reload={process.pid}")
            assert await signalling.wait() == 0
            await until(lambda log=log, n=before: log.read_text().count(RELOADED) > n, what="the server has reloaded")

    def start(self, at: int) -> None:
        """Start a server, or start it anew: by the file that is there now."""
        log = self.folder / f"server-{at}.log"
        started = self._ending.enter_context(_server(self.folder / server_name(self.site, at), log, self._passwords))
        if at < len(self.processes):
            self.processes[at] = started
        else:
            self.processes.append(started)

    def stop(self, at: int) -> None:
        self.processes[at].terminate()
        self.processes[at].wait()

    @property
    def accounts(self) -> list[str]:
        return list(dict.fromkeys(map(self.site.account_of, self.site.identities)))

    async def _ready(self) -> None:
        """Until every server takes clients, and JetStream of the ledger's account answers."""
        key = Identity("ledger", self.site.schedulers[0]).key

        async def answers() -> bool:
            try:
                async with await self.connect(key, give_up_after_s=1) as connection:
                    info = msgspec.json.decode((await connection.request("$JS.API.INFO", b"", 2.0)).data)
                    return "error" not in info
            except NotAuthorized:
                raise
            except (CannotConnect, BusError):
                return False

        await until(answers, READY_S, "JetStream of the site")


def free_servers(count: int, host: str = HOST) -> tuple[Server, ...]:
    """Ports that nobody has now, with those of their routes."""
    found: list[Server] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while len(found) < count:
        port = 20_000 + secrets.randbelow(9_000)
        with contextlib.suppress(OSError), socket.socket(family) as one, socket.socket(family) as other:
            one.bind((host, port))
            other.bind((host, port + ROUTES_BEHIND))
            with socket.socket() as third:
                third.bind((HOST, port + MONITOR_BEHIND))
            if all(abs(port - each.port) not in (0, ROUTES_BEHIND, MONITOR_BEHIND) for each in found):
                found.append(Server(host, port))
    return tuple(found)


@contextlib.asynccontextmanager
async def running(
    *,
    servers: int | tuple[Server, ...] = 1,
    host: str = HOST,
    started: int | None = None,
    small: int | None = None,
    room: str = "",
    pending: int = 0,
    leaf_port: int = 0,
    **of: Any,
) -> AsyncIterator[RunningSite]:
    """The servers of a site with these settings, and nothing left of them at the end.

    With `started`, only so many of its servers ever run. The server number `small`, from 0, has little room; with
    `room`, each lets its streams reserve so much. With `pending`, each cuts a client for which so many bytes wait. With
    `leaf_port`, leaf nodes connect to that port of the first one.
    """
    site = Site(**{"tenants": ("acme", "beta"), "workers": ("w1", "w2"), "operators": ("ana",), "observers": ("graf",),
                   "servers": free_servers(servers, host) if isinstance(servers, int) else servers, **of})  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="moorage-site-") as name, contextlib.ExitStack() as ending:
        folder, witness = Path(name), f"w{secrets.token_hex(8)}"
        write(site, folder)
        passwords = {each.variable: f"p{secrets.token_hex(12)}" for each in site.identities}
        if site.auth == "env":
            assert not site.encrypts, "its contexts name no authority"
            _contexts(site, folder, passwords)
        accounts = folder / "accounts.conf"
        if site.auth != "mtls":
            accounts.write_text(_with_witnesses(accounts.read_text(), witness))
        made = RunningSite(site, folder, passwords, witness, ending)
        for at in range(len(site.servers) if started is None else started):
            if most := "300MB" if at == small else room:
                file = folder / server_name(site, at)
                file.write_text(file.read_text().replace("jetstream {", f"jetstream {{\n  max_file_store: {most}"))
            if pending:
                file = folder / server_name(site, at)
                file.write_text(re.sub(r"max_pending: \d+", f"max_pending: {pending}", file.read_text()))
            if leaf_port and not at:
                with (folder / server_name(site, at)).open("a") as configuration:
                    own = f'cert_file: "{folder}/tls/server.1.pem", key_file: "{folder}/tls/server.1.key"'
                    tls = f", tls {{ {own} }}" if site.encrypts else ""
                    configuration.write(f'leafnodes {{ listen: "{HOST}:{leaf_port}"{tls} }}\n')
            made.start(at)
        try:
            await made._ready()
        except BaseException:
            print(*(log.read_text()[-3000:] for log in sorted(folder.glob("*.log"))), sep="\n---\n")
            raise
        yield made


@contextlib.contextmanager
def _server(configuration: Path, log: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        process = subprocess.Popen(
            [find_binary(), "-c", str(configuration)], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            env={**os.environ, **variables},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _with_witnesses(accounts: str, password: str) -> str:
    """A witness in every account, called as it is; SYS in the servers' own."""
    own = f'  "{SYSTEM_ACCOUNT}" {{\n'
    accounts = accounts.replace(own, f"{own}    users: [{{ user: SYS, password: {password} }}]\n")
    return re.sub(
        r'^  "(\w[\w-]*)" \{\n((?:    jetstream: enabled\n)?)    users: \[',
        lambda found: f'{found[0]}\n      {{ user: "{found[1]}", password: {password} }}',
        accounts,
        flags=re.MULTILINE,
    )


def _contexts(site: Site, folder: Path, passwords: dict[str, str]) -> None:
    """What a person writes where passwords are given by the environment: a context a user."""
    urls = ",".join(f"nats://{each.host}:{each.port}" for each in site.servers)
    for each in site.identities:
        fields = {"url": urls, "user": each.key, "password": passwords[each.variable]}
        if own := site.inbox_of(each):
            fields["inbox_prefix"] = own
        (folder / CONTEXTS / f"{each.key}.json").write_bytes(msgspec.json.encode(fields))


async def allows_all(scheduler: Connection) -> None:
    """Answer as a leader by which each worker has each attempt."""

    def answer(asked: Delivery) -> None:
        asyncio.get_running_loop().create_task(scheduler.send([(asked.reply, b'{"data":{"may":true}}', "")]))

    await scheduler.subscribe(Subjects().may_store, answer)


async def settled(*connections: Connection) -> None:
    """What each has sent has reached the server, and what that had for them has reached them."""
    for connection in connections:
        await connection.flush()
    for connection in connections:
        await connection.flush()
    await asyncio.sleep(0)
