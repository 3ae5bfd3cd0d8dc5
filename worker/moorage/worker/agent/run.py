"""Put a worker together from its settings and run it: one agent on a real host, many for a simulated fleet."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from moorage.bus.connect_logged import connect_logged
from moorage.bus.connection import Connection, State
from moorage.bus.contexts import Context
from moorage.bus.jetstream import JetStream
from moorage.bus.lend.protocol import SOCKET_NAME
from moorage.bus.own_login import own_login
from moorage.bus.passed_on import through_schedulers
from moorage.schemas.errors import refuse
from moorage.schemas.settings import NO_FILE, SettingsFile
from moorage.schemas.units import many
from moorage.system.collector import leave_what_stays
from moorage.system.notify import managed
from moorage.system.simulated_hosts import SimulatedHost, named_hosts
from moorage.worker.agent.agent import Agent
from moorage.worker.agent.changed_devices import devices_changed
from moorage.worker.agent.fleet_host import FleetHost
from moorage.worker.agent.gpu_checks import check_startable
from moorage.worker.agent.journal import JOURNAL_NAME, Journal, MemoryJournal, is_in_use
from moorage.worker.agent.report_watch import watch_reports
from moorage.worker.agent.state_disk import StateDisk
from moorage.worker.agent.stopped_processes import watch_stopped
from moorage.worker.attempt.attempt_folders import FOLDERS, clear_unknown
from moorage.worker.attempt.call_keys import CallKeys
from moorage.worker.attempt.job_files import JobFiles
from moorage.worker.attempt.job_items import JobItems
from moorage.worker.attempt.orphaned_calls import OrphanedCalls
from moorage.worker.attempt.output_cleaner import OutputBounds
from moorage.worker.attempt.secret_files import trouble_with_secrets
from moorage.worker.devices.readers.base import Inventory
from moorage.worker.devices.readers.host import HostFacts, folder_machine, host_facts
from moorage.worker.devices.readers.machine import open_machine
from moorage.worker.devices.readers.simulated import SimulatedInventory
from moorage.worker.devices.readers.simulated_faults import FILE_NAME as FAULTS_FILE
from moorage.worker.devices.readers.simulated_faults import FaultFile
from moorage.worker.devices.refused_nodes import GpuNodes
from moorage.worker.drivers.data import DATA
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.loading import Found, find
from moorage.worker.drivers.policy import ROOT_FIX, ROOT_OPEN, Policy
from moorage.worker.drivers.setups import SETUPS
from moorage.worker.drivers.supervisor_link import SupervisorLink, owner_of
from moorage.worker.freezing.freezer import Freezer, freezer_for
from moorage.worker.freezing.played import PlayedFreezer
from moorage.worker.interruption import Interruption, leave_s_of
from moorage.worker.lend.lender import LeaseServer
from moorage.worker.session.attempt_messages import LEAVE_GRACE_S_MAX, LEAVE_S_MAX
from moorage.worker.settings import WorkerSettings, mps_folder
from moorage.worker.sharing.compute_modes import FILE_NAME, ComputeModes
from moorage.worker.sharing.mps.managed import ManagedMps
from moorage.worker.sharing.mps.watched import MPS, OperatorsMps
from moorage.worker.supervisor.client import Supervised, SupervisorError

SUPERVISOR_FOLDER: Final = "supervisor"
WORKERS_FOLDER: Final = "workers"
FROZEN_FILE: Final = "frozen.json"
HEALTH_FILE: Final = "devices.health"
#: longest grace of what a worker that leaves still holds at the second signal
HURRIED_GRACE_S: Final = 2.0
#: what a worker has at least to say that it leaves, however long its start took after the first signal
LEFT_S_MIN: Final = 1.0
#: if a process has more workers than this, their joins and leaves are not logged
JOINS_TOLD_MAX: Final = 64

log = logging.getLogger("moorage.worker")


class Worker:
    """The agents of one process, put together by `start`. Callers may watch `host` and read `agents`.

    `lender` is set if the process has one agent, its settings offer leases, and the socket could be opened.
    """

    def __init__(self, host: FleetHost, connection: Connection, agents: list[Agent]) -> None:
        self.host = host
        self.connection = connection
        self.agents = agents
        self.disk: StateDisk | None = None  # of what has a journal on it
        self.lender: LeaseServer | None = None
        self.files: JobFiles | None = None
        self.items: JobItems | None = None
        self.compute_modes: ComputeModes | None = None
        self.orphans: OrphanedCalls | None = None

    def close_unused(self) -> None:
        """After a failed start, close all inventories, and the journals of agents that the host has not taken over."""
        for agent in self.agents:
            if agent.worker not in self.host.agents:
                agent.journal.close()
            agent.inventory.close()

    async def stop(
        self,
        within_s: float = 0.0,
        at_once: asyncio.Event | None = None,
        stops_within: Callable[[float], None] | None = None,
    ) -> None:
        """Close everything. Jobs with a supervisor run on, unless the state folder is gone; other jobs are ended first.

        With `within_s`, all jobs are ended first, those with a supervisor too. Members of services go on until others
        serve in their place, for so many seconds at most; then each has its grace, a minute at most. Once `at_once` is
        set, all that is left is ended within `HURRIED_GRACE_S`. `stops_within` is called with the seconds that this may
        take.

        Each agent without a job or lease says goodbye before that, so that the scheduler need not wait until its
        session is over. If a part raises, the others are closed all the same.
        """
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self.connection.close)
            for part in (self.files, self.items, self.orphans, self.host):
                if part is not None:
                    closing.push_async_callback(part.close)
            for agent in reversed(self.agents):
                closing.callback(agent.inventory.close)
            closing.push_async_callback(self._close_compute_modes)
            if self.lender is not None:
                closing.push_async_callback(self.lender.close)
            await self._leave(within_s, at_once or asyncio.Event(), stops_within)

    async def _leave(
        self, within_s: float, at_once: asyncio.Event, stops_within: Callable[[float], None] | None
    ) -> None:
        """Let the agents say goodbye that may, and take back what is lent."""
        leaving: list[Agent] = []
        staying: list[Agent] = []
        for agent in (agent for agent in self.agents if agent.worker in self.host.agents):
            agent.run()  # an agent that has just started takes up the jobs of an earlier one in its first turn
            must = within_s > 0 or not _can_outlive(agent) or not agent.journal.is_in_place()
            (leaving if must else staying).append(agent)
        served_s = within_s or LEAVE_S_MAX
        for agent in leaving:
            agent.leave(served_s if within_s or _serves(agent) else 0.0)
            if within_s and len(leaving) <= JOINS_TOLD_MAX:
                holds = many(len(agent.attempts.held), "attempt")
                log.info("%s leaves for good within %.0f s: it holds %s", agent.worker, within_s, holds)
        ends_s = served_s + max((agent.longest_grace_s for agent in leaving), default=0.0) + LEAVE_S_MAX
        if leaving and stops_within is not None:
            stops_within(ends_s + HURRIED_GRACE_S + 2 * LEAVE_S_MAX)
        await _first(at_once.wait(), self._over(leaving, served_s), within_s=ends_s)
        if at_once.is_set() and leaving:
            log.info("told to end again: all that is left ends within %g s", HURRIED_GRACE_S)
            for agent in leaving:
                agent.leave(0.0, HURRIED_GRACE_S)
            await _first(_left(leaving), within_s=HURRIED_GRACE_S + LEAVE_S_MAX)
        for agent in staying:
            agent.leave_if_idle()

    async def _over(self, leaving: Sequence[Agent], lent_s: float) -> None:
        """Wait until these agents have left, and what is lent is back or was asked back for so long."""
        if self.lender is not None:
            await self.lender.leave("the agent stops", lent_s)
        await _left(leaving)

    async def _close_compute_modes(self) -> None:
        if self.compute_modes is not None and not any(agent.pool.shared_slots() for agent in self.agents):
            await self.compute_modes.close()


async def _left(agents: Sequence[Agent]) -> None:
    for agent in agents:
        await agent.left.wait()


async def _first(*work: Coroutine[None, None, object], within_s: float | None = None) -> None:
    """Wait until one of these is done, or for so long if that is given, and cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def start(settings: WorkerSettings, target: Context | str | None, file: SettingsFile = NO_FILE) -> Worker:
    """Connect and open everything.

    `target` is a NATS context as in `bus.contexts.resolve`; `file` has the settings of drivers. Raises MoorageError:
    errors of the connection, the journal and the supervisor, failed-precondition for settings that contradict each
    other, bad-settings for those of a driver.
    """
    with used_as_state(settings.state_dir):
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = host_facts(settings.state_dir)
    if settings.folder_dir is not None:
        with _used_as("the folder of the jobs' folders", settings.folder_dir, "folder_dir", "--folder-dir"):
            settings.folder_dir.mkdir(parents=True, exist_ok=True)
    hosts = simulated_of(settings)
    policy = Policy.of(settings)
    policy.check_host()
    check_startable(settings)
    if hosts is None and policy.leaves_root_open:
        log.warning("%s; %s", ROOT_OPEN, ROOT_FIX)
    drivers = find(settings.drivers, file, simulated=hosts is not None)
    if settings.secrets_dir is not None and (trouble := trouble_with_secrets(settings.secrets_dir)):
        log.warning("secrets: %s; a job that needs such a secret fails", trouble)
    if settings.secrets_dir is not None and policy.leaves_secrets_open:
        log.warning("secrets: every tenant may use every secret of this worker: set secrets_for to limit that")

    async with contextlib.AsyncExitStack() as opened:  # closes what was opened, if the start fails
        worker = await _start(settings, target, facts, hosts, drivers, opened)
        opened.pop_all()
    return worker


async def _start(
    settings: WorkerSettings,
    target: Context | str | None,
    facts: HostFacts,
    hosts: list[SimulatedHost] | None,
    drivers: list[Found],
    opened: contextlib.AsyncExitStack,
) -> Worker:
    """Do `start` with checked settings. Parts that must be closed after a failure go into `opened`, step by step."""

    def on_state(state: State) -> None:
        if state is State.CONNECTED and host is not None:
            host.reconnected()

    def on_regained(_: list[str]) -> None:
        if host is not None:
            host.reconnected()

    host: FleetHost | None = None
    name = f"moorage worker {settings.worker or facts.worker}"
    connection = await connect_logged(target, name, log, on_state=on_state, on_regained=on_regained)
    opened.push_async_callback(connection.close)
    host = FleetHost(connection, settings.prefix)
    opened.push_async_callback(host.close)
    await host.open()
    worker = Worker(host, connection, [])
    opened.callback(worker.close_unused)
    if any(each.kind.capabilities.outlives_agent for each in drivers):
        worker.disk = StateDisk(settings.state_dir, settings.disk_reserve)
    bounds = OutputBounds(settings.output_keep, settings.output_bytes, settings.output_members)
    where = connection.context.safe_url if len(hosts or ()) <= JOINS_TOLD_MAX else ""
    link = SupervisorLink(settings.state_dir / SUPERVISOR_FOLDER, bounds=bounds, on_broken=host.broke)
    api = connection.context.api_prefix
    stream = JetStream(through_schedulers(connection, settings.prefix, api), api)
    files = JobFiles(
        stream,
        settings.prefix,
        settings.state_dir,
        settings.files_bytes,
        settings.files_cache,
        settings.checkpoint_bytes,
        settings.checkpoint_rate,
    )
    with used_as_state(settings.state_dir):
        files.open()
    worker.files = files
    worker.items = JobItems(files)
    if hosts is None:
        modes = settings.state_dir / FILE_NAME
        shares = "time-slice" in settings.modes_offered
        worker.compute_modes = ComputeModes(modes, facts.boot, shares=shares)
    own = own_login(msgspec.structs.replace(connection.context, user="", password=""))
    calls = CallKeys(connection.context, settings.prefix, settings.secrets_dir, settings.calls_url, own)
    worker.orphans = OrphanedCalls(calls)
    await _put_agents(worker, settings, facts, hosts, drivers, link, worker.items, calls)
    await link.end_others(lambda name: _is_known(name, worker.agents, settings.state_dir))
    if worker.compute_modes is not None:
        has_mps = isinstance(worker.agents[0].clients.mps, ManagedMps)
        await worker.compute_modes.open(_whole_gpus(worker.agents[0]), has_mps=has_mps)
    if settings.folder_dir is None:
        is_known = functools.partial(_is_known, agents=worker.agents, state=settings.state_dir)
        for folder in (FOLDERS, SETUPS, DATA):
            await asyncio.to_thread(clear_unknown, settings.state_dir / folder, is_known)
    for agent in worker.agents:
        agent.where = where
        await host.add(agent)
    worker.lender = await _opened_lender(worker.agents[0])
    return worker


async def run(
    settings: WorkerSettings,
    target: Context | str | None,
    stop: asyncio.Event,
    file: SettingsFile = NO_FILE,
    at_once: asyncio.Event | None = None,
) -> None:
    """Start a worker and serve until `stop` is set; restart it when it is drained and its machine has other devices.

    A worker that leaves for good (the setting `leave`) ends all that is left soon after `at_once` is set. One whose
    machine is to be interrupted (`notice`) leaves for good, too, and joins no more until that is over. Raises the
    error of a broken agent, and Refused with worker-id-in-use if another worker keeps the only agent's id.
    """
    at_once = at_once or asyncio.Event()
    interruption = Interruption(settings.notice) if settings.notice else None
    if interruption is not None and await asyncio.to_thread(interruption.look) is not None:
        log.warning("this machine is to be interrupted, as %s says: it joins once that is over", settings.notice)
        await _first(stop.wait(), interruption.wait(is_over=True))
        if stop.is_set():
            return
    async with managed(started := asyncio.Event()) as manager:
        again, noticed_s = True, 0.0
        while again:
            again = False
            worker, leave_s = await _started(start(settings, target, file), stop, settings.leave, at_once)
            if worker is None and settings.leave:
                manager.stops_within(LEAVE_GRACE_S_MAX + HURRIED_GRACE_S + 2 * LEAVE_S_MAX)
                await _end_of_earlier(settings.state_dir / SUPERVISOR_FOLDER, at_once)
            if worker is None:
                return
            started.set()
            changes = []
            if len(worker.agents) == 1 and not worker.agents[0].inventory.simulated:
                changes = [asyncio.create_task(devices_changed(worker.agents[0]))]
            looking = [asyncio.create_task(each(worker.agents)) for each in (watch_stopped, watch_reports)]
            ends = [] if interruption is None else [asyncio.create_task(interruption.wait())]
            leave_what_stays()
            try:
                await worker.host.serve(stop, *changes, *ends)
                for end in (each for each in ends if each.done() and not stop.is_set()):
                    grace_s = max((agent.longest_grace_s for agent in worker.agents), default=0.0)
                    noticed_s = leave_s_of(left_s := end.result(), grace_s)
                    log.warning("this machine is to be interrupted in %.0f s: its jobs are told, and move", left_s)
                for change in (each for each in changes if each.done()):
                    change.result()  # raises if the task failed
                    again = not stop.is_set() and not noticed_s
            finally:
                for task in (*looking, *changes, *ends):
                    task.cancel()
                await asyncio.gather(*looking, *changes, *ends, return_exceptions=True)
                await worker.stop(noticed_s or (leave_s if stop.is_set() else 0.0), at_once, manager.stops_within)


async def _started(
    starting: Coroutine[None, None, Worker], stop: asyncio.Event, leave_s: float, at_once: asyncio.Event
) -> tuple[Worker | None, float]:
    """Return the started worker, and what it then has of `leave_s`, the time to leave in.

    It is None if `stop` was set, and the start goes on for as long as that or `LEAVE_S_MAX`. A start may take as long
    as the grace of jobs under a supervisor that it replaces.
    """
    work, stopped = asyncio.create_task(starting), asyncio.create_task(stop.wait())
    hurried = asyncio.create_task(at_once.wait())
    loop = asyncio.get_running_loop()
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped_s = loop.time()
        await asyncio.wait({work, hurried}, timeout=leave_s or LEAVE_S_MAX, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        hurried.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})  # it closes what it has opened
    left_s = max(leave_s + stopped_s - loop.time(), LEFT_S_MIN) if leave_s else 0.0
    return None if work.cancelled() else work.result(), left_s


async def _end_of_earlier(folder: Path, at_once: asyncio.Event) -> None:
    """End what the supervisor in this folder runs for an agent of before: this one could not start to take it up.

    The next agent reports the ends. Each job has its grace, a minute at most; `HURRIED_GRACE_S` once `at_once` is set.
    """
    try:
        supervised = await Supervised.connect(folder, spawn_if_absent=False)
    except (SupervisorError, OSError):
        return
    try:
        ends_s = LEAVE_GRACE_S_MAX + LEAVE_S_MAX
        await _first(supervised.shutdown(LEAVE_GRACE_S_MAX, "fence"), at_once.wait(), within_s=ends_s)
        if at_once.is_set():
            await _first(supervised.shutdown(HURRIED_GRACE_S, "fence"), within_s=HURRIED_GRACE_S + LEAVE_S_MAX)
    finally:
        supervised.close()


@contextlib.contextmanager
def used_as_state(folder: Path) -> Iterator[None]:
    """Turn an error of the disk in the block into Refused, because the setting of the folder is at fault."""
    with _used_as("the state folder", folder, "state_dir", "--state"):
        yield


@contextlib.contextmanager
def _used_as(what: str, folder: Path, setting: str, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refuse(
            "failed-precondition",
            f"{what} {folder} cannot be used: {error.strerror or error}",
            field=f"$.{setting}",
            found=str(error.filename or folder),
            next=f"name a folder that this user may write to, on a disk with room: {flag}",
        ) from error


def simulated_of(settings: WorkerSettings) -> list[SimulatedHost] | None:
    """Return the simulated hosts that the settings name, by word or file; None for a real one. Raises Refused."""
    word = settings.simulate
    if word is None:
        return None
    try:
        return named_hosts(word, settings.worker or "sim")
    except OSError as error:
        why = f"no simulated fleet: {word} cannot be read: {error.strerror}"
        raise refuse("failed-precondition", why, field="$.simulate", found=word) from error
    except ValueError as error:
        raise refuse("failed-precondition", f"no simulated fleet: {error}", field="$.simulate", found=word) from error


def facts_of_simulated(host: SimulatedHost, worker: str, facts: HostFacts) -> HostFacts:
    """Return the facts of a simulated host on this machine: each worker id gets a machine id of its own."""
    return HostFacts(worker, worker, f"{facts.machine}-{worker}", facts.boot, host.cpu_milli, host.memory_mib)


async def _put_agents(
    worker: Worker,
    settings: WorkerSettings,
    facts: HostFacts,
    hosts: list[SimulatedHost] | None,
    drivers: list[Found],
    link: SupervisorLink,
    items: JobItems,
    calls: CallKeys,
) -> None:
    """Add the agents to `worker.agents` one by one, so that they can be closed if a later one fails. Raises Refused."""
    if hosts is None:
        name = settings.worker or facts.worker
        machine = await _devices(name, settings, drivers, facts.machine)
        try:
            modes = worker.compute_modes
            lends = settings.leases
            agent = _agent(worker, name, settings, facts, machine, drivers, link, items, calls, modes, lends=lends)
            worker.agents.append(agent)
        except BaseException:
            machine.close()
            raise
        return
    faults = FaultFile(settings.state_dir / FAULTS_FILE)
    for simulated in hosts:
        name = settings.worker if settings.worker and len(hosts) == 1 else simulated.name
        inventory = SimulatedInventory(simulated, faults, name)
        simulated_facts = facts_of_simulated(simulated, name, facts)
        lends = settings.leases and len(hosts) == 1
        agent = _agent(worker, name, settings, simulated_facts, inventory, drivers, link, items, calls, lends=lends)
        worker.agents.append(agent)


async def _devices(name: str, settings: WorkerSettings, drivers: list[Found], machine: str) -> Inventory:
    """Return the devices of this host, or those that a driver has instead. Raises Refused."""
    for each in drivers:
        found = await each.kind.open_inventory(name, settings, each.own)
        if found is not None and len(drivers) > 1:
            raise refuse(
                "failed-precondition",
                f"the devices of the driver {each.kind.name} are not this host's, so it must be a worker's only driver",
                field="$.drivers",
                found=", ".join(other.kind.name for other in drivers),
                next=f"run a worker with the driver {each.kind.name} alone, and another one for the rest",
            )
        if found is not None:
            return found
    open_host = functools.partial(open_machine, machine, settings.readers)
    for each in drivers:
        if (handing := await each.kind.open_handing(settings, open_host)) is not None:
            return handing
    return await open_host()


def _agent(
    worker: Worker,
    name: str,
    settings: WorkerSettings,
    facts: HostFacts,
    inventory: Inventory,
    found: list[Found],
    link: SupervisorLink,
    items: JobItems,
    calls: CallKeys,
    modes: ComputeModes | None = None,
    *,
    lends: bool,
) -> Agent:
    devices = inventory.devices()
    nodes = {device.uuid: inventory.nodes(slot) for slot, device in enumerate(devices)}
    fenced = settings.device_fence != "off" and devices and not inventory.simulated
    gpu_nodes = GpuNodes(devices, nodes) if fenced else None
    mps = _mps(name, settings, inventory, link, modes, gpu_nodes)
    own_mps = mps if isinstance(mps, ManagedMps) else None
    frozen_file = settings.state_dir / FROZEN_FILE
    if settings.play_freezing:
        frozen_file = settings.state_dir / f"{WORKERS_FOLDER}/{name}.frozen"
        freezer: Freezer | None = PlayedFreezer(frozen_file, inventory.held)
    else:
        freezer = freezer_for(name, inventory, frozen_file)
    kit = Kit(
        name, settings, Policy.of(settings), link, len(devices), inventory.simulated,
        files=items.files, nodes=nodes, inventory=inventory, mps=own_mps, freezer=freezer, gpu_nodes=gpu_nodes,
        calls=calls, orphans=worker.orphans,
    )  # fmt: skip
    drivers = [each.make(kit) for each in found]
    journal: MemoryJournal
    if worker.disk is None:
        journal = MemoryJournal.of_this_start()
    else:
        path = settings.state_dir / (f"{WORKERS_FOLDER}/{name}.journal" if inventory.simulated else JOURNAL_NAME)
        with used_as_state(settings.state_dir):
            machine = folder_machine(facts.machine, settings.state_dir)
            journal = Journal(path, worker.disk.give)
        facts = dataclasses.replace(facts, machine=machine)
    if journal.torn_bytes:
        log.warning(
            "worker %s: the last %d bytes of its journal were incomplete and are removed", name, journal.torn_bytes
        )
    health = settings.state_dir / (f"{WORKERS_FOLDER}/{name}.health" if inventory.simulated else HEALTH_FILE)
    return Agent(
        worker.host, name, settings, facts, inventory, drivers, journal, health, mps, items, worker.disk, lends=lends
    )


def _mps(
    name: str,
    settings: WorkerSettings,
    inventory: Inventory,
    link: SupervisorLink,
    modes: ComputeModes | None,
    gpu_nodes: GpuNodes | None,
) -> ManagedMps | OperatorsMps | None:
    """Return the MPS daemons of the worker, or what watches an operator's; None if it offers no mps."""
    if modes is None or MPS not in settings.modes_offered:
        return None
    if settings.mps != "managed":
        return OperatorsMps()
    return ManagedMps(name, link, inventory.devices(), mps_folder(settings), modes, gpu_nodes)


def _whole_gpus(agent: Agent) -> list[str]:
    """Return the uuids of whole NVIDIA GPUs that jobs may share by time-slice, by their slots' modes.

    MIG slices have no compute mode of their own.
    """
    return [
        device.uuid
        for slot, device in enumerate(agent.devices)
        if slot in agent.pool.lent and device.vendor == "nvidia" and not device.mig
        if not device.modes or "time-slice" in device.modes
    ]


async def _opened_lender(agent: Agent) -> LeaseServer | None:
    """Open the agent's socket for leases and return its server; None if it lends nothing.

    None, with a warning in the log, also if it cannot be opened: jobs do not need it.
    """
    settings, lender = agent.settings, agent.lender
    if lender is None:
        return None
    try:
        await lender.open(settings.lease_socket or settings.state_dir / SOCKET_NAME)
    except OSError as error:
        log.warning("worker %s: processes of this host cannot borrow GPUs: %s", agent.worker, error)
        return None
    return lender


def _is_known(owner: str, agents: list[Agent], state: Path) -> bool:
    """Return whether an owner's attempts belong to one of these agents, or to another agent on this state folder."""
    ours = [agent.journal.path for agent in agents if isinstance(agent.journal, Journal)]
    if any(owner == owner_of(agent.worker, driver) for agent in agents for driver in _owners(agent)):
        return True
    name = owner.partition("@")[0]
    paths = (state / JOURNAL_NAME, state / WORKERS_FOLDER / f"{name}.journal")
    return any(path not in ours and is_in_use(path) for path in paths)


def _owners(agent: Agent) -> list[str]:
    """Return which parts of this agent have attempts at the supervisor: its drivers, and its MPS daemons."""
    return [*agent.drivers, *([MPS] if isinstance(agent.clients.mps, ManagedMps) else [])]


def _serves(agent: Agent) -> bool:
    return any(attempt.request.service is not None for attempt in agent.attempts.held.values())


def _can_outlive(agent: Agent) -> bool:
    return any(driver.capabilities.outlives_agent for driver in agent.drivers.values())
