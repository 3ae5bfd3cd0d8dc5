"""A whole moorage in virtual time under faults: schedulers, workers, callers, and what must hold whatever happens.

Production code throughout: `Scheduler` with its ledger code, `Agent` with `ProcessDriver`, `SupervisorLink` and the
journal as a file. Simulated are NATS (`bus.simulated`), the clock, and the machines (`machine.py`). One seed decides
everything: `run` raises `Violated` at the first moment at which a promise does not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import os
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol, cast
from unittest import mock

import msgspec

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import SnapshotTaken
from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.leader import service, term
from moorage.scheduler.leader.service import Scheduler
from moorage.scheduler.ledger.ledger import Ledger, LedgerBroken
from moorage.scheduler.ledger.snapshot_follower import Command
from moorage.scheduler.ledger.snapshots import Snapshots, recover
from moorage.scheduler.ledger.state_bytes import BadSnapshot
from moorage.scheduler.questions import foresight, standing
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import MoorageError
from moorage.schemas.subjects import Subjects
from moorage.system.simulated_hosts import simulated_hosts
from moorage.testing.bus.bus import FaultyNetwork, SimulatedBus
from moorage.testing.bus.clock import SimulatedClock, Stalled
from moorage.testing.bus.processes import Process
from moorage.worker.agent.agent import Agent
from moorage.worker.agent.fleet_host import FleetHost
from moorage.worker.devices.readers.host import HostFacts
from moorage.worker.drivers.policy import Policy
from moorage.worker.drivers.process.driver import ProcessDriver
from moorage.worker.settings import WorkerSettings
from tests.release.sim.callers import Callers
from tests.release.sim.claimers import Claimers
from tests.release.sim.devices import MachineInventory
from tests.release.sim.disk import SimulatedJournal
from tests.release.sim.judge import Judge, Violated
from tests.release.sim.machine import Machine, MachineFreezer, MachineKit, SimulatedLink

SUBJECTS: Final = Subjects()
FLEETS: Final = ("4xH100+2xL40S", "2xH100+2xH100+1xL40S", "8xH100+2xL40S+cpu", "1xH100+1xH100")
CONFIG: Final = Config(ended_max=20, jobs_max=80, tombstones_max=30)
#: from this priority on jobs end others, in the worlds where they may
PREEMPT_PRIORITY: Final = 80
#: virtual seconds of faults, and after them until everything must be over
FAULTY_S: Final = 120.0
HEALED_S: Final = 900.0
#: milliseconds by which a message comes late at most
REORDER_MS: Final = (20, 500, 4_000, 12_000)
#: after the last fault nothing that was sent before it comes later than this
LATE_S: Final = max(REORDER_MS) / 1000 + 1
SNAPSHOT_RECORDS: Final = 60
PROBATION_S: Final = 10.0
#: how often freezing or resuming a job fails
FREEZE_FAULTS: Final = 0.2
#: what production does so often that it would be most of what happens when nothing does: module, setting, seconds here
SELDOM: Final = (
    (term, "FLEET_FRAME_S", 10.0),
    (service, "STANDBY_LOOK_S", 0.5),
    (standing, "SAY_S", 10.0),
    (foresight, "FOLLOW_S", 10.0),
)


class Hazards(Protocol):
    """What goes wrong in a cluster. `run` until cancelled, then `heal`, and `take_back` what is still wrong."""

    async def run(self) -> None: ...

    def heal(self) -> None: ...

    def take_back(self) -> None: ...

    def snapshots_were_lost(self) -> bool: ...

    def spawn(self, work: Coroutine[Any, Any, object]) -> None: ...


class Cluster:
    """`run` once. `faults` scales how much goes wrong, 0 for nothing; `_hazards` says what."""

    #: those of each world that is made, see `tests.ceilings`
    ceilings: Ceilings = CEILINGS

    def __init__(self, seed: int, *, faults: float = 1.0, schedulers: int = 2, jobs: int = 40) -> None:
        self.ceilings = type(self).ceilings
        self.seed = seed
        self.replicas = 1 if seed % 2 else 3
        self.rng = random.Random(seed)
        self.faults = faults
        self.jobs = jobs
        self.network = FaultyNetwork(self.rng.randrange(2**32), delay_ms=(0.1, 2))
        self.bus = SimulatedBus(self.network)
        self.clock = SimulatedClock()
        self.did: Counter[str] = Counter()
        #: what workers' settings say of jobs that do not use their devices
        self.freezing: dict[str, Any] = {}
        self.lease_s: dict[str, float] = {}  # that a worker asks for
        self.has_claimers = faults > 0 and self.rng.random() < 0.5
        self.config = self._policy() if faults > 0 else CONFIG
        self.judge = Judge(self.config, self.ceilings)
        self.schedulers = [f"scheduler-{n}" for n in range(schedulers)]
        self.hosts = {host.name: host for host in simulated_hosts(self.rng.choice(FLEETS), name="w")}
        self.machines: dict[str, Machine] = {}
        self.processes: dict[str, Process] = {}
        self.agents: dict[str, tuple[FleetHost, Agent]] = {}  # that started last
        self.leaders: dict[str, Scheduler] = {}
        self.kept_down: set[str] = set()  # who does not come back by itself
        self._opened: set[tuple[int, int, int]] = set()  # job, worker, slots: what an operator has opened to it again
        self._flapping: set[int] = set()  # workers of which an operator has said that their devices are well

    def _policy(self) -> Config:
        """Two of three worlds preempt, by priority or to take back what is guaranteed; in some, priorities age."""
        rng = self.rng
        return msgspec.structs.replace(
            CONFIG,
            preempt_priority=rng.choice((PREEMPT_PRIORITY, PREEMPT_PRIORITY, 101)),
            preempt_after=rng.choice((0.0, 5.0)),
            reclaim=rng.random() < 0.5,
            ageing=rng.choice((0.0, 0.0, 600.0)),
        )

    def run(self) -> None:
        """Raises `Violated`."""
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with (
            tempfile.TemporaryDirectory(dir=memory) as folder,
            _quietly(),
            _collecting_seldom(),
            contextlib.ExitStack() as patches,
        ):
            self.folder = Path(folder)
            for name in self.hosts:
                rng = random.Random(self.rng.random())
                machine = self.machines[name] = Machine(name, self.folder / name, rng, faults=self.faults)
                machine.state.mkdir()
                machine.on_start = self.judge.started
                machine.on_resume = self.judge.resumed
            self.judge.machines = list(self.machines.values())
            self.judge.watch(self.bus)
            self._patch(patches)
            try:
                self.clock.run(self._live())
            except Stalled as stalled:
                raise Violated(f"nothing can happen any more: {stalled}") from None

    def _patch(self, patches: contextlib.ExitStack) -> None:
        """Chance comes from the seed alone, and the follower that writes snapshots runs in the leader's process."""
        rng = random.Random(self.rng.random())
        state = random.getstate()
        patches.callback(random.setstate, state)
        random.seed(self.seed)
        patches.enter_context(mock.patch.object(term, "take_snapshot", self._take_snapshot))
        for module, name, seconds in SELDOM:
            patches.enter_context(mock.patch.object(module, name, seconds))
        patches.enter_context(mock.patch.object(os, "urandom", rng.randbytes))
        patches.enter_context(mock.patch.object(secrets, "randbits", rng.getrandbits))
        patches.enter_context(mock.patch.object(secrets, "token_hex", lambda size: rng.randbytes(size).hex()))
        patches.enter_context(mock.patch.object(secrets, "token_urlsafe", lambda size: rng.randbytes(size).hex()))

    async def _live(self) -> None:
        self._outside = contextvars.copy_context()
        self.callers = Callers(self.connect("callers"), self.rng, self.judge, self.jobs, FAULTY_S)
        self.accidents = self._hazards()
        await self._begin()
        for name in (*self.schedulers, *self.hosts):
            self._start(name)
        scene = asyncio.create_task(self._scene())
        self.judge.on_violated = scene.cancel
        try:
            await asyncio.gather(scene, return_exceptions=True)
        finally:
            for task in self.callers.asked:
                task.cancel()
            await asyncio.gather(*self.callers.asked, return_exceptions=True)
            await self._end()
            for process in self.processes.values():
                await asyncio.gather(*process.kill(), return_exceptions=True)
            for machine in self.machines.values():
                machine.kill_supervisor()
        self.judge.finish()
        scene.result()

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        self.accidents.spawn(work)

    # what worlds have of their own: see `world.py` and `wide.py`

    def _hazards(self) -> Hazards:
        raise NotImplementedError

    async def _begin(self) -> None:
        """Before anybody starts."""

    async def _end(self) -> None:
        """Before all processes end."""

    def config_of(self, name: str) -> Config:
        """The settings that a scheduler is started with."""
        return self.config

    async def _scene(self) -> None:
        accidents = asyncio.create_task(self.accidents.run())
        try:
            await self.callers.run()
        finally:
            accidents.cancel()
        await asyncio.gather(accidents, return_exceptions=True)
        self.callers.healed_s = asyncio.get_running_loop().time()
        self.accidents.heal()
        await asyncio.gather(*self.callers.asked)
        if self.faults:
            late_s = self.callers.healed_s + LATE_S - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, late_s))
            self.accidents.take_back()
            await asyncio.gather(*self.callers.asked)
        await self._until_over()

    # ------------------------------------------------------------------------------------------ processes

    def _start(self, name: str) -> None:
        process = self.processes[name] = Process(name)
        main = self._worker(name, process) if name in self.hosts else self._scheduler(name)
        process.run(self._kept_up(name, process, main))

    async def _kept_up(self, name: str, process: Process, main: Coroutine[Any, Any, None]) -> None:
        """What an init system does: a process that ends by itself is started again."""
        try:
            await main
        except LedgerBroken as broken:
            if self.accidents.snapshots_were_lost():
                self.did["ended: LedgerBroken"] += 1  # what the ledger had before is nowhere now: it says so, and waits
            else:
                self.judge.violated(f"{name} cannot follow the ledger: {broken}")
        except Exception as error:
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if isinstance(first, (MoorageError, BusError, OSError)):
                self.did[f"ended: {type(first).__name__}"] += 1
            elif not process.is_dead:
                self.judge.violated(f"{name} broke: {first!r}", first)
        if not process.is_dead:
            process.kill()
            self.later(1.0, self._restart, name, process)

    def kill(self, name: str, back_s: float) -> None:
        self.kill_process(name, self.processes[name], back_s)

    def kill_process(self, name: str, process: Process, back_s: float) -> None:
        process.kill()
        self.later(back_s, self._restart, name, process)

    def _restart(self, name: str, process: Process) -> None:
        if self.processes[name] is process and name not in self.kept_down:
            self._start(name)

    def start_again(self, names: Iterable[str]) -> None:
        """Start those that are dead, kept down or not."""
        self.kept_down.difference_update(names)
        for name in names:
            if self.processes[name].is_dead:
                self._start(name)

    async def _scheduler(self, name: str) -> None:
        world, ledger = self.connect(name), self.connect(name, account="ledger")
        scheduler = self.leaders[name] = Scheduler(
            world,
            ledger,
            config=self.config_of(name),
            name=name,
            replicas=self.replicas,
            snapshot_command=Command(["in this process"], {}),
            snapshot_records=SNAPSHOT_RECORDS,
            ceilings=self.ceilings,
        )
        await scheduler.run()

    async def _worker(self, name: str, process: Process) -> None:
        host, machine = self.hosts[name], self.machines[name]
        journal = SimulatedJournal(machine, process)
        fleet_host = FleetHost(self.connect(name))
        settings = WorkerSettings(
            machine.state,
            name,
            modes=("exclusive", "mps", "time-slice"),
            probation=PROBATION_S,
            lease_s=self.lease_s.get(name, 0.0),
            **self.freezing,
        )
        facts = HostFacts(name, name, machine.identity, machine.boot, host.cpu_milli, host.memory_mib)
        driver = ProcessDriver(
            MachineKit(
                name,
                msgspec.structs.replace(settings, stream_output=False),
                Policy.of(settings),
                SimulatedLink(machine, process),
                len(host.devices),
                simulated=True,
                freezer=MachineFreezer(machine, FREEZE_FAULTS),
            )
        )
        inventory = machine.inventory = MachineInventory(host, machine.memory, is_metered=bool(self.freezing))
        agent = Agent(fleet_host, name, settings, facts, inventory, [driver], journal)
        self.agents[name] = fleet_host, agent
        await fleet_host.open()
        await fleet_host.add(agent)
        if self.has_claimers and host.devices:
            process.on_kill.append(machine.local.clear)
            claimers = Claimers(machine, agent.pool, self.judge, random.Random(machine.rng.random()))
            service = asyncio.create_task(claimers.run(FAULTY_S))
            service.add_done_callback(lambda done: self._serves(name, done))
        await fleet_host.failed

    def _serves(self, name: str, done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None and not isinstance(error, Violated):
            self.judge.violated(f"the pool of {name} broke: {error!r}", error)

    def connect(self, name: str, account: str = "users") -> Connection:
        return cast("Connection", self.bus.connect(name, account=account))

    def later(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        """A timer of the world's own, whoever's code sets it."""
        asyncio.get_running_loop().call_later(seconds, callback, *args, context=self._outside)

    async def _take_snapshot(self, _: Command) -> SnapshotTaken | None:
        """What the follower process does, in the leader's own."""
        jetstream = JetStream(self.connect("follower", account="ledger"))
        ledger, snapshots = Ledger(jetstream, SUBJECTS, 0), Snapshots(jetstream, SUBJECTS)
        try:
            state = await recover(ledger, snapshots)
            await ledger.follow(state)
            return SnapshotTaken(*await snapshots.write(state))
        except (BusError, MoorageError, LedgerBroken, BadSnapshot):
            return None

    # --------------------------------------------------------------------------------------------- healing

    def come_back(self) -> None:
        """Who is dead comes back, who is stopped goes on."""
        for name, process in list(self.processes.items()):
            if process.is_stopped:
                process.go_on()
            if process.is_dead:
                self._restart(name, process)

    def ask_admin(self, verb: str, body: dict[str, Any]) -> None:
        """Until it is answered."""
        self.callers.asked.append(asyncio.create_task(self.callers.ask(SUBJECTS.admin(verb), body)))

    async def _until_over(self) -> None:
        """Everything ends: jobs that fit this fleet are over, nothing runs, every GPU is free."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + HEALED_S
        while (waits := self._waits_for()) is not None:
            if loop.time() > ends_s:
                self.judge.violated(f"{HEALED_S:g} s after the last fault: {waits}")
            self._open_avoided()
            if loop.time() > ends_s - HEALED_S / 2:
                self._open_flapping()
            await asyncio.sleep(2)

    def _open_avoided(self) -> None:
        """What an operator does for a job that waits for another device than this fleet has, by what `explain` says."""
        state = self.judge.state
        for job in state.jobs.values():
            for num, mask in () if job.over or job.state != "QUEUED" else job.avoid:
                if (job.num, num, mask) not in self._opened:
                    self._opened.add((job.num, num, mask))
                    worker, slots = state.worker_by_num[num].id, [slot for slot in range(64) if mask >> slot & 1]
                    self.ask_admin("release", {"worker": worker, "slots": slots, "by": "sim"})

    def _open_flapping(self) -> None:
        """What an operator does for a device that failed so often that its probation outlasts this world."""
        for worker in self.judge.state.workers.values():
            slots = [slot for slot, (kind, *_) in worker.unwell.items() if kind == "probation"]
            if slots and worker.num not in self._flapping:
                self._flapping.add(worker.num)
                self.ask_admin("release", {"worker": worker.id, "slots": slots, "by": "sim"})

    def _waits_for(self) -> str | None:
        terms = [leader.term for leader in self.leaders.values() if leader.term is not None]
        if not terms:
            return "nobody leads"
        engine = max((term.engine for term in terms), key=lambda engine: engine.state.epoch)
        unread = self.judge.missing()
        if unread:
            return f"accepted and in no ledger: {unread[:5]}"
        waiting = [
            f"{job.tenant}/{job.name} is {job.state}"
            for job in engine.state.jobs.values()
            if not job.over and (job.held or _could_end(engine, job))
        ]
        if waiting:
            return ", ".join(waiting[:5])
        attempts = [str(attempt.name) for attempt in engine.state.attempts()]
        if attempts:
            return f"attempts {attempts[:5]} linger"
        away = [worker.id for worker in engine.state.workers.values() if not worker.session]
        if away or len(engine.state.worker_by_num) < len(self.hosts):
            return f"workers have not joined: {away or 'some never did'}"
        living = [ran.key for machine in self.machines.values() for ran in machine.living]
        if living:
            return f"processes run that the ledger does not know: {living[:5]}"
        kept = [host.worker.id for host in engine.fleet.with_frozen.values()]
        frozen = [str(name) for machine in self.machines.values() for name in machine.frozen]
        waits = [str(name) for machine in self.machines.values() for name in machine.used_s]
        return f"{kept} wait for GPUs, {frozen} are frozen, calls of {waits} wait" if kept or frozen or waits else None


def _could_end(engine: Engine, job: Job) -> bool:
    """Whether the fleet could run it, and all that it waits for."""
    before = [engine.state.job(job.tenant, each.job) for each in decode_request(job.body).awaited]
    if any(other is not None and other.live and not _could_end(engine, other) for other in before):
        return False
    return engine.admission.could_ever(engine.reader.shape_of(job))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Logs of a thousand faults help nobody."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _collecting_seldom() -> Iterator[None]:
    """A world makes few cycles and many objects: it is a tenth of a run to look at these again and again."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
