"""`SimFleet`: the real scheduler and real worker agents in this process, for the tests of your own service.

    async def test_it_asks_for_two_gpus() -> None:
        async with AsyncClient(transport=SimFleet("2x8xH100+4xL40S")) as moorage:
            result = await moorage.run(["python", "train.py"], gpu="2xH100")
            assert result.changes[-1].worker == "sim-0000"

    SimulatedClock().run(test_it_asks_for_two_gpus())    # in virtual time; `asyncio.run` takes real time

The scheduler is real, with its ledger code and its placement. The agents, their pools, leases and fences, the SDK, and
every frame between them are real too. NATS is not: `moorage.testing.bus` replaces it, JetStream included. So the ledger
is a list in the memory of this process, and is lost with it. The GPUs and the commands of jobs are not real: nothing is
executed, and a function of yours says how each job ends. Your handlers (see `EmbeddedWorker`) are called, and their
results kept. Frames that name a worker or a GPU say `simulated`, and uuids begin with `SIM-`. Leases for running
processes, permissions, clusters and the speed of a network are not simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from moorage.bus.errors import BusError
from moorage.bus.health import State
from moorage.bus.jetstream import JetStream
from moorage.bus.results import ResultStore
from moorage.client.client import AsyncClient
from moorage.client.errors import rejected, timed_out
from moorage.client.tenant import TENANT_DEFAULT
from moorage.client.transport import Link
from moorage.scheduler.answers.views import worker_state
from moorage.scheduler.core.config import Config
from moorage.scheduler.leader.service import Scheduler
from moorage.scheduler.leader.term import Term
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.handler import HANDLER_NAME
from moorage.schemas.subjects import PREFIX_DEFAULT, Subjects
from moorage.system.simulated_hosts import SimulatedHost, simulated_hosts
from moorage.testing.bus.bus import FaultyNetwork, SimulatedBus
from moorage.testing.bus.clock import let_sleep
from moorage.testing.bus.processes import Process
from moorage.testing.sim_driver import Ran, Script, ScriptedDriver, Task, succeed
from moorage.testing.sim_service import SimService, served_by
from moorage.testing.sim_upkeep import SimAgent, Upkeep
from moorage.worker.agent.fleet_host import FleetHost
from moorage.worker.agent.journal import MemoryJournal
from moorage.worker.devices.readers.host import HostFacts
from moorage.worker.devices.readers.simulated import SimulatedInventory
from moorage.worker.driver import Driver
from moorage.worker.drivers.handler.call import Handler
from moorage.worker.drivers.handler.driver import LABEL_PREFIX, HandlerDriver
from moorage.worker.drivers.noop import NoopDriver
from moorage.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from moorage.bus.connection import Connection

__all__ = ["Ran", "SimFleet", "Task"]

#: most hosts of one fleet. Each has a connection of its own, so that it can be cut off alone
HOSTS_MAX: Final = 256
READY_S_MAX: Final = 60.0
#: how often the fleet's state is checked at the start, as no event announces that it is ready
LOOK_S: Final = 0.005
START_AGAIN_S: Final = 0.5
MODES: Final = ("exclusive", "mps", "time-slice")

log = logging.getLogger("moorage.sim_fleet")


class SimFleet:
    """A simulated fleet: the `transport` of clients, and an async context manager for a fleet that outlives them.

    `fleet` describes the hosts, as for `moorage up --simulate`: `8xH100` is one host, `4x8xH100+2x4xL40S` are six, and
    `8xH100,2xL40S` is one host with two models. Workers are named `sim-0000` and so on. `script` says how each attempt
    ends (default: at once, with code 0). It may be a coroutine function, which is cancelled when its attempt is ended.
    The workers also have the driver `noop`. `handlers` are functions by name, as for `EmbeddedWorker.handler`; every
    worker offers them. They run in this event loop, so a plain function cannot be stopped while it runs. `config` has
    the scheduler's settings, `network` the faults between all parties.

    The first client opens the fleet and the last one closes it, or `async with` does. It belongs to one event loop.
    """

    def __init__(
        self,
        fleet: str = "8xH100",
        *,
        script: Script = succeed,
        handlers: Mapping[str, Handler] | None = None,
        config: Config | None = None,
        network: FaultyNetwork | None = None,
        prefix: str = PREFIX_DEFAULT,
    ) -> None:
        """Make the fleet; nothing is started yet. Raises `Rejected` for an invalid `fleet` or handler name."""
        try:
            self._hosts = {host.name: host for host in simulated_hosts(fleet)}
        except ValueError as error:
            raise rejected("invalid-argument", str(error), found=fleet, next="for example 8xH100 or 4x8xH100") from None
        if len(self._hosts) > HOSTS_MAX:
            raise rejected(
                "invalid-argument",
                f"a SimFleet has at most {HOSTS_MAX} hosts, found {len(self._hosts)}",
                found=fleet,
                allowed=f"1..{HOSTS_MAX} hosts",
                next="moorage up --simulate takes more",
            )
        for name in handlers or ():
            if not HANDLER_NAME.fullmatch(name):
                raise rejected(
                    "invalid-argument",
                    f"{name[:80]!r} is not a valid handler name",
                    found=name,
                    allowed="[a-z0-9_.-]{1,48}",
                )
        self.word = fleet
        self.network = network or FaultyNetwork()
        self.scheduler: Scheduler | None = None
        self._script = script
        self._services: dict[tuple[str, str], SimService] = {}
        self._handlers = dict(handlers or {})
        self._config = config
        self._subjects = Subjects(prefix)
        self._bus = SimulatedBus(self.network)
        self._process = Process(f"fleet {fleet}")
        self._stay_awake: Callable[[], None] = lambda: None
        self._workers: dict[str, FleetHost] = {}
        self._leading: asyncio.Task[None] | None = None
        self._schedulers = 0
        self._boots = 0
        self._holders = 0
        self._opening: asyncio.Lock | None = None

    def __repr__(self) -> str:
        return f"<SimFleet simulated {self.word}, {len(self._workers)} of {len(self._hosts)} workers>"

    # -- as a transport -----------------------------------------------------------------------------------------

    @property
    def where(self) -> str:
        return f"simulated:{self.word}"

    @property
    def upkeep(self) -> contextvars.Context:
        """The context of the fleet's process, so that the clock may skip the clients' timers together with its own."""
        return self._process.context()

    async def connect(self, name: str, on_state: Callable[[State], None], on_error: Callable[[BusError], None]) -> Link:
        await self._hold()
        return cast("Link", self._bus.connect(name, on_state=on_state, on_error=on_error))

    async def release(self, link: Link) -> None:
        await link.close()
        await self._let_go()

    async def __aenter__(self) -> SimFleet:
        await self._hold()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._let_go()

    # -- services -----------------------------------------------------------------------------------------------

    async def serve(
        self,
        service: str,
        function: Callable[..., Any],
        *,
        replicas: int | Mapping[str, int] = 1,
        concurrency: int = 1,
        batch: Mapping[str, int] | None = None,
        queue: Mapping[str, float] | None = None,
        load_s: float = 0.0,
        gpu: GpuSpec | str | int | None = None,
        tenant: str = TENANT_DEFAULT,
    ) -> SimService:
        """Submit a job, named as the service, whose members answer calls with this function, as `moorage serve` does.

        The function runs in this event loop: one that takes time is a coroutine function, which sleeps. `replicas` may
        be `{"min": 0, "max": 4}`; with `min` 0 the first call starts a member. Each member needs `load_s` seconds
        before it takes calls. With `batch`, as `{"most": 32, "wait_ms": 5}`, it gets a list and returns a list.
        `queue` says how many calls wait at each, and how long, as `{"most": 200, "wait_s": 30}`.
        The fleet must be open. Raises `Rejected`, and `CannotServe` for what is no function.
        """
        made = served_by(function, self._subjects.prefix, tenant, service, load_s)
        self._services[tenant, service] = made
        request = {
            "service": {"name": service, "concurrency": concurrency, "batch": batch, "queue": queue},
            "replicas": replicas,
            "run": {"argv": ["serve", service], "restart": "always"},
        }
        async with AsyncClient(transport=self, tenant=tenant, prefix=self._subjects.prefix) as client:
            await client.submit(request, gpu, service)
        return made

    def _run(self, task: Task) -> Ran | Awaitable[Ran]:
        """Run an attempt: as a member, if the test serves its service, else as the script says."""
        spec = task.request.service
        service = None if spec is None else self._services.get((task.tenant, spec.name))
        return self._script(task) if service is None else service.run(task, self._bus)

    # -- what a test may do to it -------------------------------------------------------------------------------

    @property
    def workers(self) -> list[str]:
        """The ids of the running workers."""
        return list(self._workers)

    async def kill_scheduler(self) -> None:
        """Kill the leader without a goodbye, and start another scheduler at once.

        The new one takes over once the leader has been silent for the takeover time.
        """
        await self._end_scheduler()
        self._start_scheduler()

    async def kill_worker(self, worker: str) -> None:
        """Kill a worker with its jobs. The scheduler notices when its lease runs out. Raises KeyError if it does not
        run."""
        if worker not in self._workers:
            raise KeyError(f"no worker {worker} runs, but {', '.join(self._workers) or 'none'}")
        await self._end_worker(self._workers.pop(worker))

    async def start_worker(self, worker: str) -> None:
        """Start a worker of this fleet again, as after a reboot. Raises KeyError if it is unknown or running."""
        if worker in self._workers:
            raise KeyError(f"worker {worker} runs already")
        await self._start_worker(self._hosts[worker])

    def cut_off(self, *workers: str) -> None:
        """Drop all messages between these workers and everything else, until `reconnect`.

        That also holds for connections that are opened later, and besides workers that were cut off before.
        """
        self.network.isolate(*workers)

    def reconnect(self) -> None:
        """Deliver all messages between all parties again; the faults of `network` end, too."""
        self.network.heal()

    # -- inside -------------------------------------------------------------------------------------------------

    async def _hold(self) -> None:
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._holders == 0:
                try:
                    await self._open()
                except BaseException:
                    await self._close()
                    raise
            self._holders += 1

    async def _let_go(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._opening = None  # the next time may be in another event loop
            await self._close()

    async def _open(self) -> None:
        self._bus, self._process = SimulatedBus(self.network), Process(f"fleet {self.word}")
        self._stay_awake = let_sleep(Upkeep(self._process, self._bus, self._subjects, self._workers, self._term))
        self._start_scheduler()
        for host in self._hosts.values():
            await self._start_worker(host)
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + READY_S_MAX
        while not self._is_ready():
            if self._leading is not None and self._leading.done():
                self._leading.result()
            if loop.time() > ends_s:
                raise timed_out(
                    f"the simulated fleet {self.word} is not ready after {READY_S_MAX:g} s",
                    next_step="give it a network that is less faulty",
                )
            await asyncio.sleep(LOOK_S)

    def _is_ready(self) -> bool:
        """Return whether there is a leader to which every worker has reported."""
        term = self._term()
        if term is None:
            return False
        known = term.engine.state.workers
        hosts = term.engine.fleet.hosts
        return all(
            name in known and worker_state(known[name], hosts.get(known[name].num)) == "up" for name in self._hosts
        )

    def _term(self) -> Term | None:
        """Return the `Term` (the term) of the scheduler that leads now; None before it leads."""
        scheduler = self.scheduler
        return scheduler.term if scheduler is not None and scheduler.leading.is_set() else None

    def _start_scheduler(self) -> None:
        self._leading = self._process.run(self._keep_scheduler())

    async def _keep_scheduler(self) -> None:
        """Run the scheduler, and start it again when it loses NATS, as a service manager would."""
        while True:
            self._schedulers += 1
            name = f"scheduler-{self._schedulers}"
            links = [self._bus.connect(name), self._bus.connect(name, account="ledger")]
            # the surface of Connection over the simulated bus, as the scheduler's own tests use it
            world, ledger = (cast("Connection", link) for link in links)
            self.scheduler = Scheduler(
                world, ledger, config=self._config, subjects=self._subjects, name=f"simulated {name}"
            )
            try:
                await self.scheduler.run()
            except* BusError as failed:
                log.warning("the simulated %s ended, and another one is started: %s", name, failed.exceptions[0])
            finally:
                for link in links:
                    await link.close()
            await asyncio.sleep(START_AGAIN_S)

    async def _end_scheduler(self) -> None:
        """Stop the scheduler. Raises the error with which it failed, if it did."""
        leading, self._leading = self._leading, None
        if leading is None:
            return
        leading.cancel()
        try:
            await leading
        except asyncio.CancelledError:
            if not leading.cancelled():
                raise

    async def _start_worker(self, host: SimulatedHost) -> None:
        await self._process.run(self._add_worker(host, contextvars.copy_context()))

    async def _add_worker(self, host: SimulatedHost, outside: contextvars.Context) -> None:
        self._boots += 1
        link = self._bus.connect(host.name)
        fleet_host = FleetHost(link, self._subjects.prefix)
        labels = {f"{LABEL_PREFIX}{name}": "1" for name in self._handlers}
        settings = WorkerSettings(Path("unused"), host.name, self._subjects.prefix, labels=labels, modes=MODES)
        drivers: list[Driver] = [ScriptedDriver(host.name, self._run), NoopDriver()]
        if self._handlers:
            store = ResultStore(JetStream(link), self._subjects.prefix)
            drivers.append(HandlerDriver(self._handlers, store, simulated=True, threads=False))
        facts = HostFacts(
            host.name, host.name, f"simulated-{host.name}", f"boot-{self._boots}", host.cpu_milli, host.memory_mib
        )
        agent = SimAgent(
            self._process,
            outside,
            fleet_host,
            host.name,
            settings,
            facts,
            SimulatedInventory(host),
            drivers,
            MemoryJournal(join_n=int(time.time()) + self._boots),
        )
        await fleet_host.open()
        self._workers[host.name] = fleet_host
        await fleet_host.add(agent)

    async def _end_worker(self, host: FleetHost) -> None:
        """Stop a worker. Raises the error with which its agent failed, if it did."""
        broke = host.failed.exception() if host.failed.done() and not host.failed.cancelled() else None
        await host.close()
        await host.transport.close()
        if broke is not None:
            raise broke

    async def _close(self) -> None:
        """Stop all parts. Raises the error of a scheduler or worker that failed, so that the test fails too."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._stay_awake)
            self._stay_awake = lambda: None
            stack.push_async_callback(self._close_links)
            for service in self._services.values():
                stack.push_async_callback(service.close)
            stack.push_async_callback(self._end_scheduler)
            for host in self._workers.values():
                stack.push_async_callback(self._end_worker, host)
            self._workers.clear()

    async def _close_links(self) -> None:
        for connection in list(self._bus.connections):
            await connection.close()
        self.scheduler = None
