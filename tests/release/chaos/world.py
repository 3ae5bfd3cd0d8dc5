"""What a fault run breaks: nats-servers, schedulers and workers as real processes, each behind a proxy of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any, Final, Protocol

from moorage.bus.embedded import HOST, USER_LEDGER, EmbeddedServer
from moorage.worker.agent.run import SUPERVISOR_FOLDER, WORKERS_FOLDER
from moorage.worker.supervisor.client import Supervised, SupervisorError
from moorage.worker.supervisor.protocol import JOURNAL_NAME
from tests.cluster import Cluster
from tests.release.chaos.proxy import Proxy
from tests.release.chaos.records import AgentJournal, Hold, SupervisorJournal
from tests.system.live.stack import Caller, RealProcess, Stack
from tests.waiting import until

SCHEDULERS: Final = 3
WORKERS: Final = 4
GPUS: Final = 4
#: short numbers that keep the rule between them (lease > renewal + takeover + 1 + server gap + margin)
ONE_NODE: Final[dict[str, float]] = {
    "renew_s": 0.4, "takeover_s": 2.0, "heartbeat_s": 0.15, "renewal_append_s": 0.05, "margin_s": 0.4,
    "grace_s": 0.6, "lease_s": 4.0, "snapshot_records": 400,
}  # fmt: skip
#: a JetStream leader change takes its 4 to 8 s whatever we set: that part cannot be short
THREE_NODES: Final[dict[str, float]] = {
    "renew_s": 1.0, "takeover_s": 9.0, "heartbeat_s": 0.3, "renewal_append_s": 0.1, "margin_s": 1.0,
    "grace_s": 1.0, "lease_s": 21.0, "server_gap_s": 8.0, "snapshot_records": 400, "replicas": 3,
}  # fmt: skip
READY_S: Final = 60.0
#: how often the workers' journals are read: they are replaced at 4 MiB, and at a supervisor's start
FOLLOW_S: Final = 0.05


class Servers(Protocol):
    """One nats-server or three: `count` of them, to kill, start, stop and continue by number."""

    count: int

    def ports(self) -> list[int]: ...
    def url_at(self, ports: list[int]) -> str: ...
    def ledger_url_at(self, ports: list[int]) -> str: ...
    async def kill(self, number: int) -> None: ...
    async def start(self, number: int) -> None: ...
    def send(self, number: int, what: signal.Signals) -> None: ...
    async def leads(self, stream: str) -> int: ...
    async def stop(self) -> None: ...


class OneServer:
    """An embedded server, started again on its folder and port."""

    count = 1

    def __init__(self, embedded: EmbeddedServer) -> None:
        self._embedded = embedded
        self._password = (embedded.data_dir / "ledger-password").read_text().strip()

    def ports(self) -> list[int]:
        return [self._embedded.port]

    def url_at(self, ports: list[int]) -> str:
        return f"nats://{HOST}:{ports[0]}"

    def ledger_url_at(self, ports: list[int]) -> str:
        return f"nats://{USER_LEDGER}:{self._password}@{HOST}:{ports[0]}"

    async def kill(self, number: int) -> None:
        await self._embedded.kill()

    async def start(self, number: int) -> None:
        self._embedded = await EmbeddedServer.start(self._embedded.data_dir, port=self._embedded.port)

    def send(self, number: int, what: signal.Signals) -> None:
        os.kill(self._embedded.pid, what)

    async def leads(self, stream: str) -> int:
        return 0

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send(0, signal.SIGCONT)
        await self._embedded.stop()


class ThreeServers:
    """A cluster whose streams have three copies."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.count = len(cluster.nodes)

    def ports(self) -> list[int]:
        return self._cluster.ports

    def url_at(self, ports: list[int]) -> str:
        return self._cluster.url_at(ports)

    def ledger_url_at(self, ports: list[int]) -> str:
        return self._cluster.ledger_url_at(ports)

    async def kill(self, number: int) -> None:
        await asyncio.to_thread(self._cluster.nodes[number].kill)

    async def start(self, number: int) -> None:
        self._cluster.nodes[number].start()

    def send(self, number: int, what: signal.Signals) -> None:
        self._cluster.nodes[number].send(what)

    async def leads(self, stream: str) -> int:
        """The number of the server that leads a stream of the ledger's account; the first where nobody knows."""
        node = await self._cluster.leader_of(stream)
        return self._cluster.nodes.index(node) if node is not None else 0

    async def stop(self) -> None:
        await self._cluster.stop()


class Behind:
    """A process of ours and the proxies through which alone it reaches the servers."""

    def __init__(self, name: str, servers: Servers) -> None:
        self.name = name
        self.process: RealProcess | None = None
        self._servers = servers
        self._proxies = [Proxy(port) for port in servers.ports()]

    async def open(self) -> None:
        for proxy in self._proxies:
            await proxy.open()

    @property
    def url(self) -> str:
        return self._servers.url_at([proxy.port for proxy in self._proxies])

    @property
    def ledger_url(self) -> str:
        return self._servers.ledger_url_at([proxy.port for proxy in self._proxies])

    def cut(self) -> None:
        for proxy in self._proxies:
            proxy.cut()

    def heal(self) -> None:
        for proxy in self._proxies:
            proxy.heal()

    async def close(self) -> None:
        for proxy in self._proxies:
            await proxy.close()


class World:
    """Schedulers and workers on servers. `open` it; faults act on its parts; `close` leaves nothing behind."""

    def __init__(self, made: Stack, servers: Servers, numbers: dict[str, float], disk: Path | None = None) -> None:
        """`disk` is the small file system that the server's data lies on, if it does."""
        self.disk = disk
        self.made = made
        self.servers = servers
        self.numbers = numbers
        self.schedulers = [Behind(f"s{n}", servers) for n in range(SCHEDULERS)]
        self.workers = [Behind(f"w{n}", servers) for n in range(WORKERS)]
        self.holds: list[Hold] = []
        self._agents = [
            AgentJournal(each.name, self._folder(each) / WORKERS_FOLDER / f"{each.name}.journal")
            for each in self.workers
        ]
        self.supervisors = [
            SupervisorJournal(each.name, self._folder(each) / SUPERVISOR_FOLDER / JOURNAL_NAME) for each in self.workers
        ]
        self._following: asyncio.Task[None] | None = None

    def _folder(self, worker: Behind) -> Path:
        return self.made.folder / worker.name

    async def open(self, caller: Caller) -> None:
        for each in (*self.schedulers, *self.workers):
            await each.open()
        await asyncio.gather(*map(self.start_scheduler, self.schedulers), *map(self.start_worker, self.workers))
        self._following = asyncio.create_task(self._follow())
        await caller.leader()
        await caller.workers_up(*(worker.name for worker in self.workers))

    async def start_scheduler(self, scheduler: Behind) -> None:
        scheduler.process = await self.made.set_scheduler(
            scheduler.name, self.numbers, scheduler.url, scheduler.ledger_url
        )

    async def start_worker(self, worker: Behind) -> None:
        worker.process = await self.made.agent(
            worker.name, f"{GPUS}xH100", url=worker.url, worker=worker.name, load_s=0.5, output_members=200
        )

    async def supervisor_of(self, worker: Behind) -> Supervised | None:
        """A connection to a worker's supervisor; None where none answers now."""
        with contextlib.suppress(SupervisorError, OSError):
            return await self.made.supervisor(worker.name)
        return None

    async def leader(self, caller: Caller) -> Behind:
        """Wait for a leader that answers, and lives; which scheduler it is."""

        async def leads() -> Behind | None:
            fleet: dict[str, Any] = await caller.fleet()
            found = [each for each in self.schedulers if each.name == fleet["leader"] and each.process is not None]
            return found[0] if found else None

        found = await until(leads, READY_S, "a leader")
        assert isinstance(found, Behind)
        return found

    async def _follow(self) -> None:
        while True:
            self.read_journals()
            await asyncio.sleep(FOLLOW_S)

    def read_journals(self) -> None:
        for journal in self._agents:
            self.holds += journal.read()
        for supervisor in self.supervisors:
            supervisor.read()

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        for journal in self._agents:
            journal.close()
        for supervisor in self.supervisors:
            supervisor.close()
        for each in (*self.schedulers, *self.workers):
            each.heal()
        await self.made.end()
        for each in (*self.schedulers, *self.workers):
            await each.close()
