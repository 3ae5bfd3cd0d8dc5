"""A whole moorage in virtual time under faults: schedulers, workers, callers, and what must hold whatever happens.

Production code throughout: `Scheduler` with its ledger code, `Agent` with `ProcessDriver`, `SupervisorLink` and the
journal as a file. Simulated are NATS (`bus.simulated`), the clock, and the machines (`machine.py`). One seed decides
everything: `World(seed).run()` raises `Violated` at the first moment at which a promise does not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import json
import logging
import os
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError
from moorage.bus.jetstream import Ack, JetStream
from moorage.bus.simulated import SERVER, FaultyNetwork, SimulatedBus
from moorage.bus.simulated_clock import SimulatedClock, Stalled
from moorage.bus.simulated_network import Faults
from moorage.bus.simulated_processes import Process
from moorage.scheduler import service
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import SnapshotTaken
from moorage.scheduler.ledger import Ledger, LedgerBroken
from moorage.scheduler.service import Scheduler
from moorage.scheduler.snapshots import Snapshots, recover
from moorage.schemas.errors import MoorageError
from moorage.schemas.subjects import Subjects
from moorage.worker.agent import Agent
from moorage.worker.drivers.process import ProcessDriver
from moorage.worker.fleet_host import FleetHost
from moorage.worker.inventory.host import HostFacts
from moorage.worker.inventory.simulated import SimulatedInventory, simulated_hosts
from moorage.worker.journal import JOURNAL_NAME, Journal
from moorage.worker.settings import WorkerSettings
from tests.sim.judge import Judge, Violated
from tests.sim.machine import Machine, SimulatedLink

SUBJECTS: Final = Subjects()
TENANTS: Final = ("red", "blue")
FLEETS: Final = ("4xH100+2xL40S", "2xH100+2xH100+1xL40S", "8xH100+2xL40S+cpu", "1xH100+1xH100")
CONFIG: Final = Config(ended_max=20, jobs_max=80, tombstones_max=30)
#: virtual seconds of faults, and after them until everything must be over
FAULTY_S: Final = 120.0
HEALED_S: Final = 900.0
SNAPSHOT_RECORDS: Final = 60
FLEET_FRAME_S: Final = 10.0
STANDBY_LOOK_S: Final = 0.5
ANSWER_S: Final = 2.0
#: after the last fault every question is answered within this
UNANSWERED_S_MAX: Final = 120.0


class World:
    """`run` once. `faults` scales how much goes wrong, 0 for nothing."""

    def __init__(self, seed: int, *, faults: float = 1.0, schedulers: int = 2, jobs: int = 40) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults = faults
        self.jobs = jobs
        self.network = FaultyNetwork(self.rng.randrange(2**32), delay_ms=(0.1, 2))
        self.bus = SimulatedBus(self.network)
        self.clock = SimulatedClock()
        self.judge = Judge()
        self.did: Counter[str] = Counter()
        self.schedulers = [f"scheduler-{n}" for n in range(schedulers)]
        self._hosts = {host.name: host for host in simulated_hosts(self.rng.choice(FLEETS), name="w")}
        self._machines: dict[str, Machine] = {}
        self._processes: dict[str, Process] = {}
        self._leaders: dict[str, Scheduler] = {}
        self._asked: list[asyncio.Task[None]] = []
        self._healed_s = float("inf")

    def run(self) -> None:
        """Raises `Violated`."""
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with (
            tempfile.TemporaryDirectory(dir=memory) as folder,
            _quietly(),
            _collecting_seldom(),
            contextlib.ExitStack() as patches,
        ):
            for name in self._hosts:
                machine = self._machines[name] = Machine(name, Path(folder) / name, random.Random(self.rng.random()))
                machine.state.mkdir()
                machine.on_start = self.judge.started
            self.judge.machines = list(self._machines.values())
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
        patches.enter_context(mock.patch.object(service, "take_snapshot", self._take_snapshot))
        patches.enter_context(mock.patch.object(service, "gc"))  # a process's own tuning
        # as often as production does it is most of what happens when nothing does
        patches.enter_context(mock.patch.object(service, "FLEET_FRAME_S", FLEET_FRAME_S))
        patches.enter_context(mock.patch.object(service, "STANDBY_LOOK_S", STANDBY_LOOK_S))
        patches.enter_context(mock.patch.object(os, "urandom", rng.randbytes))
        patches.enter_context(mock.patch.object(secrets, "randbits", rng.getrandbits))
        patches.enter_context(mock.patch.object(secrets, "token_hex", lambda size: rng.randbytes(size).hex()))
        patches.enter_context(mock.patch.object(secrets, "token_urlsafe", lambda size: rng.randbytes(size).hex()))

    async def _live(self) -> None:
        self._outside = contextvars.copy_context()
        for name in (*self.schedulers, *self._hosts):
            self._start(name)
        scene = asyncio.create_task(self._scene())
        self.judge.on_violated = scene.cancel
        try:
            await asyncio.gather(scene, return_exceptions=True)
        finally:
            for task in self._asked:
                task.cancel()
            await asyncio.gather(*self._asked, return_exceptions=True)
            for process in self._processes.values():
                await asyncio.gather(*process.kill(), return_exceptions=True)
            for machine in self._machines.values():
                machine.kill_supervisor()
        self.judge.finish()
        scene.result()

    async def _scene(self) -> None:
        accidents = asyncio.create_task(self._accidents())
        try:
            await self._callers()
        finally:
            accidents.cancel()
        await asyncio.gather(accidents, return_exceptions=True)
        self._heal()
        await asyncio.gather(*self._asked)
        await self._until_over()

    # ------------------------------------------------------------------------------------------ processes

    def _start(self, name: str) -> None:
        process = self._processes[name] = Process(name)
        main = self._worker(name, process) if name in self._hosts else self._scheduler(name)
        process.run(self._kept_up(name, process, main))

    async def _kept_up(self, name: str, process: Process, main: Coroutine[Any, Any, None]) -> None:
        """What an init system does: a process that ends by itself is started again."""
        try:
            await main
        except LedgerBroken as broken:
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
            self._later(1.0, self._restart, name, process)

    def _restart(self, name: str, process: Process) -> None:
        if self._processes[name] is process:
            self._start(name)

    async def _scheduler(self, name: str) -> None:
        world, ledger = self._connect(name), self._connect(name, account="ledger")
        scheduler = self._leaders[name] = Scheduler(
            world,
            ledger,
            config=CONFIG,
            name=name,
            snapshot_command=["in this process"],
            snapshot_records=SNAPSHOT_RECORDS,
        )
        await scheduler.run()

    async def _worker(self, name: str, process: Process) -> None:
        host, machine = self._hosts[name], self._machines[name]
        journal = Journal(machine.state / JOURNAL_NAME)
        process.on_kill.append(lambda: _cut(journal))
        fleet_host = FleetHost(self._connect(name))
        settings = WorkerSettings(machine.state, name, modes=("exclusive", "mps", "time-slice"))
        facts = HostFacts(name, name, f"machine-{name}", machine.boot, host.cpu_milli, host.memory_mib)
        driver = ProcessDriver(SimulatedLink(machine, process), name, simulated=True, stream_output=False)
        agent = Agent(fleet_host, name, settings, facts, SimulatedInventory(host), [driver], journal)
        await fleet_host.open()
        await fleet_host.add(agent)
        await fleet_host.failed

    def _connect(self, name: str, account: str = "users") -> Connection:
        return cast("Connection", self.bus.connect(name, account=account))

    def _later(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        """A timer of the world's own, whoever's code sets it."""
        asyncio.get_running_loop().call_later(seconds, callback, *args, context=self._outside)

    async def _take_snapshot(self, _: list[str]) -> SnapshotTaken | None:
        """What the follower process does, in the leader's own."""
        jetstream = JetStream(self._connect("follower", account="ledger"))
        ledger, snapshots = Ledger(jetstream, SUBJECTS, 0), Snapshots(jetstream, SUBJECTS)
        try:
            state = await recover(ledger, snapshots)
            await ledger.follow(state)
            return SnapshotTaken(*await snapshots.write(state))
        except (BusError, MoorageError, LedgerBroken):
            return None

    # -------------------------------------------------------------------------------------------- callers

    async def _callers(self) -> None:
        """Jobs come for `FAULTY_S`; each is asked for until it is answered, under the same id."""
        rng, link = self.rng, self._connect("callers")
        for number in range(self.jobs):
            await asyncio.sleep(rng.expovariate(self.jobs / FAULTY_S))
            tenant, job = rng.choice(TENANTS), f"j{number}"
            body = self._request(job)
            ask = self._submit_durably if rng.random() < 0.3 else self._submit
            self._asked.append(asyncio.create_task(ask(link, tenant, job, body)))
            if rng.random() < 0.15:
                of = f"j{rng.randrange(number + 2)}"
                self._asked.append(asyncio.create_task(self._cancel(link, rng.choice(TENANTS), of)))

    def _request(self, job: str) -> dict[str, Any]:
        rng = self.rng
        gpu = rng.choice(
            (
                None,
                {},
                {},
                {"count": 2},
                {"model": "L40S"},
                {"scheduling": "gang"},
                {"scheduling": "gang", "count": 2},
                {"scheduling": "spread"},
                {"sharing": "mps", "share": {"memory_mib": 15_000, "compute_percent": 40}},
                {"sharing": "time-slice"},
            )
        )
        body: dict[str, Any] = {
            "job": job,
            "replicas": rng.choice((1, 1, 1, 2, 3)),
            "priority": rng.choice((50, 50, 60)),
            "retries": rng.choice((0, 1, 2)),
            "retries_on_lost": 10,
            "run": {
                "argv": [
                    "stubborn" if rng.random() < 0.2 else "sleep",
                    str(round(rng.choice((0.0, 0.5, 3.0, 20.0, 45.0, 120.0)) * rng.random(), 3)),
                    str(int(rng.random() < 0.15)),
                ],
                "grace_s": rng.choice((0.5, 5)),
            },
        }
        if gpu is not None:
            body["gpu"] = gpu
            if gpu.get("scheduling") != "gang" and rng.random() < 0.2:
                body["on_partition"] = "keep"
        if rng.random() < 0.1:
            body["run"]["timeout_s"] = 5
        if rng.random() < 0.1:
            body["deadline_s"] = rng.choice((5, 60))
        if rng.random() < 0.1:
            body["start_within_s"] = rng.choice((1, 20))
        return body

    async def _submit(self, link: Connection, tenant: str, job: str, body: dict[str, Any]) -> None:
        answer = await self._ask(link, SUBJECTS.api(tenant, "submit"), body)
        self.judge.answered(tenant, job, body, answer)

    async def _submit_durably(self, link: Connection, tenant: str, job: str, body: dict[str, Any]) -> None:
        stream, payload = JetStream(link), json.dumps(body).encode()
        while self._is_patient():
            with contextlib.suppress(BusError):
                stored = await stream.append(SUBJECTS.request(tenant, "submit"), payload)
                if isinstance(stored, Ack):
                    self.judge.stored(tenant, job, body)
                    return
            await asyncio.sleep(ANSWER_S)
        self.judge.violated(f"the queue took no submit of {tenant}/{job} {UNANSWERED_S_MAX:g} s after the last fault")

    async def _cancel(self, link: Connection, tenant: str, job: str) -> None:
        await self._ask(link, SUBJECTS.api(tenant, "cancel"), {"job": job})

    async def _ask(self, link: Connection, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        payload = json.dumps(body).encode()
        while self._is_patient():
            with contextlib.suppress(BusError):
                answer = json.loads((await link.request(subject, payload, ANSWER_S)).data)
                if answer.get("code") not in ("not-leading", "queue-full"):
                    return cast("dict[str, Any]", answer)
            await asyncio.sleep(self.rng.uniform(0.1, 2 * ANSWER_S))
        self.judge.violated(f"{subject} gave no answer {UNANSWERED_S_MAX:g} s after the last fault")
        return {}

    def _is_patient(self) -> bool:
        return asyncio.get_running_loop().time() < self._healed_s + UNANSWERED_S_MAX

    # ------------------------------------------------------------------------------------------ accidents

    async def _accidents(self) -> None:
        """One thing after another goes wrong, until cancelled."""
        if not self.faults:
            return
        rng = self.rng
        self.network.faults = Faults(
            drop=rng.choice((0, 0, 0.01, 0.05)) * self.faults,
            duplicate=rng.choice((0, 0.02, 0.1)) * self.faults,
            reorder=rng.choice((0, 0.02, 0.1)) * self.faults,
            reorder_ms=rng.choice((20, 500, 4_000)),
            delay_ms=(0.1, rng.choice((1, 20, 300))),
            lose_ack=rng.choice((0, 0.02, 0.1)) * self.faults,
        )
        acts = (
            self._kill_scheduler,
            self._kill_scheduler,
            self._stop_somebody,
            self._stop_somebody,
            self._kill_agent,
            self._kill_agent,
            self._kill_supervisor,
            self._reboot,
            self._partition,
            self._partition,
            self._server_gap,
            self._reconnect,
            self._lose_ack,
            self._operate,
            self._wall_clock_jumps,
            self._junk,
        )
        while True:
            await asyncio.sleep(rng.expovariate(self.faults / 4.0))
            act = rng.choice(acts)
            self.did[act.__name__.strip("_")] += 1
            act()

    def _kill(self, name: str, back_s: float) -> None:
        process = self._processes[name]
        process.kill()
        self._later(back_s, self._restart, name, process)

    def _kill_scheduler(self) -> None:
        self._kill(self.rng.choice(self.schedulers), self.rng.choice((0.2, 3.0, 15.0)))

    def _kill_agent(self) -> None:
        self._kill(self._a_worker(), self.rng.choice((0.2, 3.0, 20.0, 45.0)))

    def _kill_supervisor(self) -> None:
        self._machines[self._a_worker()].kill_supervisor()

    def _reboot(self) -> None:
        name = self._a_worker()
        self._machines[name].reboot()
        self._kill(name, self.rng.uniform(2, 40))

    def _stop_somebody(self) -> None:
        """SIGSTOP: from the blink of an eye to more than any lease."""
        process = self._processes[self.rng.choice((*self.schedulers, *self.schedulers, *self._hosts))]
        if not process.is_dead and not process.is_stopped:
            process.stop()
            self._later(self.rng.choice((0.1, 2.0, 6.0, 30.0, 60.0)), process.go_on)

    def _partition(self) -> None:
        rng = self.rng
        cut = [name for name in (*self.schedulers, *self._hosts) if rng.random() < 0.3]
        rest = [name for name in (*self.schedulers, *self._hosts, "callers") if name not in cut]
        self.network.partition(cut, [*rest, SERVER])
        self._later(rng.choice((1.0, 8.0, 40.0)), self.network.partition)

    def _server_gap(self) -> None:
        """No JetStream for a while, as in a change of its leader; core messages go on."""
        self.network.partition([SERVER], [*self.schedulers, *self._hosts, "callers"])
        self._later(self.rng.uniform(0.5, 8), self.network.partition)

    def _reconnect(self) -> None:
        """The server restarts: every connection is lost, and back a little later."""
        for link in self.bus.connections:
            link.lose()
            self._later(self.rng.uniform(0.1, 3), link.restore)

    def _lose_ack(self) -> None:
        self.network.lose_next_ack(self.rng.choice(self.schedulers), self.rng.choice((1, 1, 3)))

    def _operate(self) -> None:
        verb, worker = self.rng.choice(("cordon", "drain", "uncordon", "uncordon")), self._a_worker()
        link = self._connect("operator")
        self._asked.append(
            asyncio.create_task(self._operated(link, SUBJECTS.admin(verb), {"worker": worker, "by": "sim"}))
        )

    async def _operated(self, link: Connection, subject: str, body: dict[str, Any]) -> None:
        with contextlib.suppress(BusError):
            await link.request(subject, json.dumps(body).encode(), ANSWER_S)

    def _wall_clock_jumps(self) -> None:
        self.clock.jump_wall(self.rng.choice((-3600, -5, 5, 3600)))

    def _junk(self) -> None:
        """Somebody without accounts writes into the ledger (H37)."""
        link = self.bus.connect("junk", account="ledger")
        subject = self.rng.choice((SUBJECTS.ledger_record, SUBJECTS.ledger_epoch, SUBJECTS.ledger_snapshot))
        self._asked.append(asyncio.create_task(_quiet(link.send([(subject, self.rng.randbytes(40), "")]))))

    def _a_worker(self) -> str:
        return self.rng.choice(list(self._hosts))

    # --------------------------------------------------------------------------------------------- healing

    def _heal(self) -> None:
        """Faults stop; who is dead comes back, who is stopped goes on, no worker stays drained."""
        self._healed_s = asyncio.get_running_loop().time()
        self.network.heal()
        self.network.faults = Faults(delay_ms=(0.1, 2))
        for name, process in list(self._processes.items()):
            if process.is_stopped:
                process.go_on()
            if process.is_dead:
                self._restart(name, process)
        for link in self.bus.connections:
            link.restore()
        self._asked += [asyncio.create_task(self._uncordon(name)) for name in self._hosts]

    async def _uncordon(self, worker: str) -> None:
        """A worker that never joined is not known, and not cordoned."""
        await self._ask(self._connect("operator"), SUBJECTS.admin("uncordon"), {"worker": worker, "by": "sim"})

    async def _until_over(self) -> None:
        """Everything ends: jobs that fit this fleet are over, nothing runs, every GPU is free."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + HEALED_S
        while (waits := self._waits_for()) is not None:
            if loop.time() > ends_s:
                self.judge.violated(f"{HEALED_S:g} s after the last fault: {waits}")
            await asyncio.sleep(2)

    def _waits_for(self) -> str | None:
        reigns = [leader.reign for leader in self._leaders.values() if leader.reign is not None]
        if not reigns:
            return "nobody leads"
        engine = max((reign.engine for reign in reigns), key=lambda engine: engine.state.epoch)
        unread = self.judge.missing()
        if unread:
            return f"accepted and in no ledger: {unread[:5]}"
        waiting = [
            f"{job.tenant}/{job.name} is {job.state}"
            for job in engine.state.jobs.values()
            if not job.over and (job.held or engine.admission.could_ever(engine.shape_of(job)))
        ]
        if waiting:
            return ", ".join(waiting[:5])
        members = [str(member.key) for member in engine.state.members()]
        if members:
            return f"members {members[:5]} linger"
        away = [worker.id for worker in engine.state.worker_by_num if not worker.session]
        if away or len(engine.state.worker_by_num) < len(self._hosts):
            return f"workers have not joined: {away or 'some never did'}"
        living = [ran.key for machine in self._machines.values() for ran in machine.living]
        return f"processes run that the ledger does not know: {living[:5]}" if living else None


async def _quiet(work: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(BusError):
        await work


def _cut(journal: Journal) -> None:
    """What the killed agent had not handed to the kernel is gone, and nothing is written after."""
    os.close(journal._lock)
    os.close(journal._file)
    journal._pending.clear()
    for name in ("flush", "close"):
        setattr(journal, name, lambda: None)
    setattr(journal, "join", lambda n, facts: None)  # noqa: B010


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
