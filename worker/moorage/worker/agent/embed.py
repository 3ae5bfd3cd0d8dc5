"""Run a worker inside a service's own process: the scheduler calls the service's functions on the GPUs of its pool.

    worker = EmbeddedWorker("nats://127.0.0.1:4222", WorkerSettings(Path("state"), "transcoder-1"))

    @worker.handler("transcode")
    async def transcode(context: HandlerContext) -> bytes: ...

    async with worker:
        lease = await worker.pool.claim()  # for the service's own work; None if the host has no GPU
        await worker.serve(stop)

Jobs reach the function by `"run": {"driver": "handler", "argv": ["transcode", ...]}` together with `"requires":
{"handler.transcode": ["1"]}`, the label under which this worker offers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from moorage.bus.connect_logged import Refusals
from moorage.bus.connection import Connection, State, connect
from moorage.bus.contexts import Context
from moorage.bus.jetstream import JetStream
from moorage.bus.passed_on import through_schedulers
from moorage.bus.results import ResultStore
from moorage.bus.target import find_context
from moorage.schemas.errors import refuse
from moorage.schemas.handler import HANDLER_NAME
from moorage.schemas.optional import need_server
from moorage.worker.agent.agent import Agent
from moorage.worker.agent.fleet_host import FleetHost
from moorage.worker.agent.journal import MemoryJournal
from moorage.worker.agent.run import HEALTH_FILE, facts_of_simulated, simulated_of, used_as_state
from moorage.worker.devices.pool import GpuPool
from moorage.worker.devices.readers.base import Inventory
from moorage.worker.devices.readers.host import HostFacts, host_facts
from moorage.worker.devices.readers.machine import open_machine
from moorage.worker.devices.readers.simulated import SimulatedInventory
from moorage.worker.drivers.handler.call import Handler
from moorage.worker.drivers.handler.context import HandlerContext
from moorage.worker.drivers.handler.driver import LABEL_PREFIX, HandlerDriver
from moorage.worker.drivers.policy import Policy
from moorage.worker.settings import WorkerSettings

HANDLERS_MAX: Final = 32
#: seconds for the last reports and the goodbye, after the longest grace of the running jobs
LEAVE_S_MAX: Final = 5.0
_Function = TypeVar("_Function", bound=Handler)

log = logging.getLogger("moorage.worker")


class EmbeddedWorker:
    """One worker that calls functions. Register them, then enter it. It is used once, in one event loop.

    `target` is a URL or a nats context's name; with None it is `settings.nats`, else the server that `AsyncClient`
    finds, so that both use the same fleet. `settings.worker` is required: an id that differs from that of the machine's
    plain worker. `settings.drivers` and the socket for leases are not used, nor settings for processes only: their
    user, programs and output.

    The devices are this machine's, or those of `settings.simulate` (one host), or those of `inventory`; devices outside
    `settings.lent_slots` are for the service alone. A device must belong to one worker: if this machine's plain worker
    offered the same devices, both would lend them.

    A client's installation has no part of this: without the extra `server`, it raises MoorageError with the command
    that installs it.

    `on_overdue` is called in the event loop for a function that does not stop when asked. Nothing outlives the process:
    the jobs of a killed service are lost, and are placed again as often as their `retries_on_lost` allows.
    """

    def __init__(
        self,
        target: Context | str | None,
        settings: WorkerSettings,
        *,
        inventory: Inventory | None = None,
        on_overdue: Callable[[HandlerContext], None] | None = None,
    ) -> None:
        need_server("EmbeddedWorker")
        self._target = target
        self._settings = settings
        self._inventory = inventory
        self._on_overdue = on_overdue
        self._handlers: dict[str, Handler] = {}
        self._opened = False
        self._agent: Agent | None = None
        self._driver: HandlerDriver | None = None
        self._host: FleetHost | None = None
        self._connection: Connection | None = None

    def handler(self, name: str) -> Callable[[_Function], _Function]:
        """Offer the decorated function under `name` (`[a-z0-9_.-]{1,48}`).

        A coroutine function runs in the event loop, any other in a thread of its own. It gets a `HandlerContext`; its
        return value is the job's result: bytes, text, any JSON value, or None for no result. An exception fails the job
        with code 1. Raises Refused for a bad name, for a name that is in use, beyond `HANDLERS_MAX` names, and once the
        worker is open, because the scheduler learns the names when the worker joins.
        """
        if self._opened:
            raise refuse("failed-precondition", "handlers must be registered before the worker is opened", found=name)
        if not HANDLER_NAME.fullmatch(name):
            raise refuse("invalid-argument", "not a name for a handler", found=name, allowed="[a-z0-9_.-]{1,48}")
        if name in self._handlers or len(self._handlers) >= HANDLERS_MAX:
            raise refuse(
                "invalid-argument",
                f"a worker has at most {HANDLERS_MAX} handlers, each with a name of its own",
                found=name,
            )

        def register(function: _Function) -> _Function:
            self._handlers[name] = function
            return function

        return register

    @property
    def pool(self) -> GpuPool:
        """The GPUs, for the service's own claims; a waiting claim has priority over every placement.

        Raises Refused unless the worker is open.
        """
        return self._opened_agent.pool

    @property
    def is_live(self) -> bool:
        """Whether the worker has joined the fleet and its lease session is valid now.

        Raises Refused unless the worker is open.
        """
        return self._opened_agent.attempts.session.phase == "live"

    @property
    def running(self) -> list[HandlerContext]:
        """The functions that run for jobs now."""
        return [] if self._driver is None else self._driver.running()

    async def open(self) -> None:
        """Connect, open the devices, and ask to join; do not wait until the worker has joined (see `is_live`).

        Raises MoorageError of the connection, and Refused for invalid settings, without handlers, and if called twice.
        """
        if self._opened:
            raise refuse("failed-precondition", "an embedded worker is opened once; make another one")
        settings, worker = self._settings, self._settings.worker
        if worker is None:
            raise refuse("failed-precondition", "an embedded worker needs an id of its own", field="$.worker")
        if not self._handlers:
            raise refuse("failed-precondition", "no handler is registered", next='@worker.handler("name")')
        Policy.of(settings).check_host()
        self._opened = True
        with used_as_state(settings.state_dir):
            settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts, inventory = await self._machine(worker)

        refusals = Refusals(log)

        def on_state(state: State) -> None:
            if state is State.CONNECTED and self._host is not None:
                self._host.reconnected()

        def on_regained(subjects: list[str]) -> None:
            refusals.on_regained(subjects)
            if self._host is not None:
                self._host.reconnected()

        try:
            context = find_context(settings.nats if self._target is None else self._target)
            self._connection = await connect(
                context,
                f"moorage service {worker}",
                on_state=on_state,
                on_error=refusals.on_error,
                on_regained=on_regained,
            )
            host = self._host = FleetHost(self._connection, settings.prefix)
            await host.open()
            self._driver = HandlerDriver(
                self._handlers,
                ResultStore(
                    JetStream(
                        through_schedulers(self._connection, settings.prefix, context.api_prefix), context.api_prefix
                    ),
                    settings.prefix,
                    settings.result_keep,
                    settings.result_bytes,
                ),
                secrets_dir=settings.secrets_dir,
                interface=settings.interface,
                simulated=inventory.simulated,
                on_overdue=self._on_overdue,
                policy=Policy.of(settings),
            )
            labels = settings.labels | {f"{LABEL_PREFIX}{name}": "1" for name in self._handlers}
            journal = MemoryJournal.of_this_start()
            settings = msgspec.structs.replace(settings, labels=labels)
            health = settings.state_dir / HEALTH_FILE
            self._agent = Agent(host, worker, settings, facts, inventory, [self._driver], journal, health)
            await host.add(self._agent)
        except BaseException:
            await self._close(inventory)
            raise

    async def serve(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set. Raises the error that broke the worker, and Refused if it is not open."""
        host = self._host
        if host is None:
            raise refuse("failed-precondition", "the worker is not open")
        await host.serve(stop)

    async def close(self) -> None:
        """Ask running functions to stop, each within its grace (at most a minute), then leave and disconnect.

        Does nothing if the worker is not open.
        """
        agent = self._agent
        if agent is None:
            return
        try:
            if self._host is not None and agent.worker in self._host.agents:  # a broken agent cannot say goodbye
                agent.leave()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(agent.longest_grace_s + LEAVE_S_MAX):
                        await agent.left.wait()
            for context in self.running:
                log.error("%r still runs: it ends only with this process", context)
        finally:  # this task may be cancelled while it waits
            await self._close(agent.inventory)

    async def __aenter__(self) -> EmbeddedWorker:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _opened_agent(self) -> Agent:
        if self._agent is None:
            raise refuse("failed-precondition", "the worker is not open")
        return self._agent

    async def _machine(self, worker: str) -> tuple[HostFacts, Inventory]:
        """Return this worker's host facts and devices. Raises Refused, NvmlUnavailable."""
        settings = self._settings
        facts = host_facts(settings.state_dir)
        hosts = simulated_of(settings)
        if hosts is None:
            if self._inventory is not None:
                return facts, self._inventory
            return facts, await open_machine(facts.machine, settings.readers)
        if len(hosts) != 1 or self._inventory is not None:
            raise refuse(
                "failed-precondition",
                "an embedded worker takes either simulate with exactly one host, or an inventory",
                field="$.simulate",
            )
        return facts_of_simulated(hosts[0], worker, facts), SimulatedInventory(hosts[0])

    async def _close(self, inventory: Inventory) -> None:
        self._agent = None
        inventory.close()
        if self._host is not None:
            await self._host.close()
        if self._connection is not None:
            await self._connection.close()
