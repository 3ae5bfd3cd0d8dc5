"""A simulated machine: its boot, its supervisor, its jobs' processes, and what survives the death of each.

It stands under the production `ProcessDriver` and `SupervisorLink`: `SimulatedLink` connects to the machine's simulated
supervisor in place of a socket, and everything above it is what runs in production. The supervisor does what
`worker/supervisor/` does, told by the same frames. `ran` is the machine's own record of what ran when, by which the
history is judged.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from moorage.schemas.attempt import AttemptName
from moorage.testing.bus.processes import Process
from moorage.worker.attempt.attempt_folders import AttemptFolders
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.supervisor_link import SupervisorLink, owner_of
from moorage.worker.freezing.cuda import Outcome
from moorage.worker.freezing.freezer import AttemptsOf, Freezer
from moorage.worker.freezing.gate import Gate
from moorage.worker.sharing.limiter.limits import Limits
from moorage.worker.supervisor.client import Supervised, SupervisorGone, SupervisorIdentity, SupervisorUnavailable
from moorage.worker.supervisor.protocol import EndAttempt, Ended, Event, Listed, Reason, StartAttempt, Started
from tests.release.sim.devices import LocalHold, MachineInventory, Memory, Ran

#: what a start takes at most, and a death by SIGKILL
SPAWN_S: Final = 0.03
#: how long a job takes at most once the faults are over: what is to be seen then is that everything ends
HURRIED_S: Final = 2.0
#: with what those exit that listen to SIGTERM and do not die of it
TOLD_CODES: Final = {"graceful": 0, "fragile": 3}
#: seconds until a job whose calls are stopped makes its next one, on average
USED_AFTER_S: Final = 6.0
#: seconds until a new supervisor of a machine answers
SUPERVISOR_START_S: Final = 0.1


class Machine:
    """`rng` decides how long things take. Times are seconds of the loop."""

    def __init__(self, name: str, state: Path, rng: random.Random, *, faults: float) -> None:
        self.name = name
        self.state = state
        self.rng = rng
        self.boots = 1
        self.identity = f"machine-{name}"
        self.ran: list[Ran] = []
        self.living: list[Ran] = []
        self.local: list[LocalHold] = []  # what its agent's own process holds
        self.memory = Memory(random.Random(rng.random()), is_late=faults > 0)
        self.disk_is_full = False
        self.hurries = False
        self.inventory: MachineInventory | None = None  # of the agent that started last
        self.on_start: Callable[[Ran], None] = lambda _: None
        self.on_resume: Callable[[Machine, Ran], None] = lambda *_: None
        self.supervisor: Supervisor | None = None
        self.used_s: dict[AttemptName, float] = {}  # when an attempt whose calls wait makes its next one
        self.frozen: dict[AttemptName, bool] = {}  # whether it is, and not just being frozen
        self._supervisors = 0
        self._left: dict[str, Ended] = {}  # ends in the supervisors' journal, not forgotten yet

    @property
    def boot(self) -> str:
        return f"{self.name}-boot-{self.boots}"

    def connect(self) -> SimulatedSupervised:
        """To the supervisor, which is started where there is none."""
        if self.supervisor is None:
            self._supervisors += 1
            self.supervisor = Supervisor(self, self._supervisors, self._left)
        return self.supervisor.accept()

    def kill_supervisor(self) -> None:
        """SIGKILL: its jobs die with it, by the parent-death signal; the next one tells so."""
        if self.supervisor is not None:
            self.supervisor.die()
            self.supervisor = None

    def reboot(self) -> None:
        """Everything on it is gone, but for its disk; the boot id is another one."""
        self.kill_supervisor()
        self.memory.rebooted()
        self.boots += 1

    def reinstall(self) -> None:
        """As `reboot`, on an empty disk: its agent is that of another machine, and remembers nothing."""
        self.reboot()
        shutil.rmtree(self.state)
        self.state.mkdir()
        self._left.clear()
        self.used_s.clear()  # the segments of jobs were files of that disk
        self.frozen.clear()
        self.identity += "+"

    def hurry(self) -> None:
        """From now on jobs and kept memory take `HURRIED_S` at most: the rest of long waits shows nothing new."""
        self.hurries = True
        self.memory.hurry(HURRIED_S)
        if self.supervisor is not None:
            self.supervisor.hurry()

    def began(self, ran: Ran) -> None:
        self.ran.append(ran)
        self.living.append(ran)
        self.on_start(ran)

    def ended(self, ran: Ran, code: int | None) -> None:
        ran.end_s, ran.code = asyncio.get_running_loop().time(), code
        self.living.remove(ran)
        if not self.is_frozen(ran):  # else its memory is away from its devices, and goes with it
            self.memory.ended(ran)

    def living_of(self, name: AttemptName) -> list[Ran]:
        """The processes of an attempt that live."""
        return [ran for ran in self.living if ran.key.partition("|")[2] == named(name)]

    def is_frozen(self, ran: Ran) -> bool:
        """Whether the memory of a process is away from its devices."""
        return any(done and named(name) == ran.key.partition("|")[2] for name, done in self.frozen.items())


def named(name: AttemptName) -> str:
    """The name of an attempt as it ends the key of its process."""
    return "/".join(map(str, name))


class MachineFreezer(Freezer):
    """Freezes what runs on a machine: that takes its time, and sometimes fails. What is frozen outlives the agent."""

    def __init__(self, machine: Machine, faults: float) -> None:
        self.machine = machine
        self._faults = faults

    def begin(self, living: Collection[AttemptName]) -> set[AttemptName]:
        frozen = self.machine.frozen = {name: True for name, done in self.machine.frozen.items() if done}
        for name in frozen.keys() - set(living):
            del frozen[name]
        return set(frozen)

    @property
    def unsettled(self) -> list[AttemptName]:
        return list(self.machine.frozen)

    async def settle(self, name: AttemptName) -> tuple[Outcome, str]:
        await asyncio.sleep(self.machine.rng.uniform(0.0, 1.0))
        return ("frozen" if name in self.machine.frozen else "running"), ""

    async def freeze(self, name: AttemptName, slots: Sequence[int], attempts_of: AttemptsOf) -> tuple[Outcome, str]:
        self.machine.frozen[name] = False
        outcome = await self._done("running")
        if outcome == "frozen" and name in self.machine.frozen:
            self.machine.frozen[name] = True
            for ran in self.machine.living_of(name):
                self.machine.memory.ended(ran)
        else:
            self.over(name)
        return outcome, "" if outcome == "frozen" else "the machine does not like it"

    async def resume(self, name: AttemptName) -> tuple[Outcome, str]:
        for ran in self.machine.living_of(name) if self.machine.frozen.get(name) else ():
            self.machine.memory.came_back(ran)
            self.machine.on_resume(self.machine, ran)
        self.machine.frozen[name] = False  # its memory is on its way
        outcome = await self._done("broken")
        self.over(name)
        return ("running" if outcome == "frozen" else outcome), ""

    def over(self, name: AttemptName) -> None:
        self.machine.frozen.pop(name, None)

    async def _done(self, fault: Outcome) -> Outcome:
        """Return `frozen` after a while, or what becomes of an attempt where it fails."""
        rng = self.machine.rng
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        return rng.choice((fault, "broken")) if rng.random() < self._faults else "frozen"


class MachineGate(Gate):
    """The gates of what runs on a machine: where one is closed, the first call comes at a time of its own.

    As a segment does, this outlives the agent.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__({})
        self._machine = machine

    def close(self, name: AttemptName) -> None:
        now_s = asyncio.get_running_loop().time()
        self._machine.used_s.setdefault(name, now_s + self._machine.rng.expovariate(1 / USED_AFTER_S))

    def open(self, name: AttemptName) -> None:
        self.forget(name)

    def wanted(self) -> list[AttemptName]:
        now_s = asyncio.get_running_loop().time()
        return [name for name, at_s in self._machine.used_s.items() if at_s <= now_s]

    def wakes(self, name: AttemptName) -> bool:
        return True

    def forget(self, name: AttemptName) -> None:
        self._machine.used_s.pop(name, None)


class MachineFolders(AttemptFolders):
    """Folders on a disk that is not simulated: nothing is made, and nothing has to be looked after."""

    def begin(self, living: Iterable[AttemptName]) -> None:
        """Find none."""

    async def run(
        self,
        on_full: Callable[[AttemptName, float, str], None],
        and_sweep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Measure none."""

    def lets_users(self) -> bool:
        return True

    def make(
        self,
        name: AttemptName,
        grace_s: float,
        keep: Sequence[str] = (),
        checkpoint: str | None = None,
        accepted_ms: int = 0,
        setup: str = "",
        *,
        goes_on: bool = True,
        calls: int = 0,
        every_s: float = 0.0,
        step: str = "",
        ranks: int = 0,
        data: Sequence[str] = (),
    ) -> str:
        return self.path(name)

    def give(self, name: AttemptName, user: str | None) -> None:
        """Belong to nobody."""

    def attempt_ended(self, name: AttemptName) -> None:
        """Leave nothing."""


class MachineKit(Kit):
    """The parts of a worker on a machine."""

    def folders(self, driver: str) -> MachineFolders:
        return MachineFolders(self.settings, owner_of(self.worker, driver))

    def gate(self, limits: Limits | None) -> Gate | None:
        assert isinstance(self.freezer, MachineFreezer)
        return MachineGate(self.freezer.machine) if self.settings.auto_freeze else None


@dataclass(slots=True)
class Child:
    start: StartAttempt
    ran: Ran | None = None
    event: Started | None = None
    over: asyncio.TimerHandle | None = None
    code: int = 0  # with which it exits by itself
    cause: Reason = "exit"
    why: str = ""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class Supervisor:
    """The simulated supervisor process, and the processes of its jobs.

    A job's argv says how it goes: `sleep SECONDS`, then it exits with the code `CODE` of `sleep SECONDS CODE`. At
    SIGTERM a `sleep` dies, a `stubborn` does not listen, a `graceful` finishes and exits with 0, a `fragile` breaks.
    """

    def __init__(self, machine: Machine, number: int, left: dict[str, Ended]) -> None:
        self.machine = machine
        self.process = Process(f"{machine.name}-supervisor-{number}")
        self.identity = SupervisorIdentity(machine.boot, number, number)
        self.children: dict[str, Child] = {}
        self.ended = left
        self.fenced = False
        self.clients: list[SimulatedSupervised] = []
        self._loop = asyncio.get_running_loop()
        self._fence: asyncio.TimerHandle | None = None
        self._fence_grace_s = 0.0

    def accept(self) -> SimulatedSupervised:
        client = SimulatedSupervised(self)
        self.clients.append(client)
        return client

    def die(self) -> None:
        now = self._loop.time()
        if self._fence is not None:
            self._fence.cancel()
        for key, child in self.children.items():
            self._cancel(child)
            if child.ran is not None:
                self.machine.ended(child.ran, None)
            self.ended[key] = Ended(key=key, reason="supervisor-died", proof="cgroup", ended_boottime_s=now)
        self.children = {}
        for client in self.clients:
            client.lost("the supervisor closed the connection")
        self.process.kill()

    # -- what is asked

    def start(self, attempts: Iterable[StartAttempt]) -> None:
        for start in attempts:
            key = start.key
            if key in self.ended:
                self._emit(self.ended[key])
            elif key in self.children:
                event = self.children[key].event
                if event is not None:
                    self._emit(event)
            elif self.fenced:
                self._over(key, Ended(key=key, reason="fence", proof="never-ran"))
            else:
                child = self.children[key] = Child(start)
                delay_s = self.machine.rng.uniform(0, SPAWN_S)
                child.timers.append(self._loop.call_later(delay_s, self._started, child))

    def end(self, key: str, reason: Reason, grace_s: float, notice_s: float = 0.0, why: str = "") -> None:
        child = self.children.get(key)
        if child is None:
            return
        if child.ran is None:
            self._cancel(child)
            del self.children[key]
            self._over(key, Ended(key=key, reason=reason, proof="never-ran", why=why))
            return
        if child.cause == "exit":
            child.cause, child.why = reason, why
        rng, how = self.machine.rng, child.start.argv[0]
        grace_s = min(grace_s, child.start.grace_s)
        late_s = grace_s if how == "stubborn" else rng.uniform(0, grace_s)
        if child.start.checkpoint_signal is not None:
            late_s += notice_s
        when_s = self._loop.time() + late_s + rng.uniform(0, SPAWN_S)
        if child.over is not None:
            if child.over.when() <= when_s:
                return  # it ends by itself before, or was told to earlier
            child.over.cancel()
        child.over = self._loop.call_at(when_s, self._exited, child, TOLD_CODES.get(how))

    def fence(self, deadline_s: float | None, grace_s: float) -> None:
        self._fence_grace_s = grace_s
        if self._fence is not None:
            self._fence.cancel()
            self._fence = None
        if deadline_s is None or deadline_s > self._loop.time():
            self.fenced = False
            if deadline_s is not None:
                self._fence = self._loop.call_at(deadline_s, self._fence_passed)
        else:
            self._fence_passed()

    def hurry(self) -> None:
        soon_s = self._loop.time() + HURRIED_S
        for child in self.children.values():
            if child.over is not None and child.cause == "exit" and child.over.when() > soon_s:
                child.over.cancel()
                child.over = self._loop.call_at(soon_s, self._exited, child, child.code)

    def listed(self) -> Listed:
        return Listed(
            n=0,
            waiting=tuple(key for key, child in self.children.items() if child.event is None),
            running=tuple(child.event for child in self.children.values() if child.event is not None),
            ended=tuple(self.ended.values()),
            unproven=(),
        )

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.ended.pop(key, None)

    # -- what happens

    def _fence_passed(self) -> None:
        self.fenced = True
        for key, child in list(self.children.items()):
            if child.start.on_partition == "kill":
                self.end(key, "fence", self._fence_grace_s)

    def _started(self, child: Child) -> None:
        start, now = child.start, self._loop.time()
        uuids = tuple(filter(None, start.env.get("MOORAGE_GPU_UUIDS", "").split(",")))
        child.ran = Ran(self.machine.name, start.key, uuids, now)
        self.machine.began(child.ran)
        child.event = Started(key=start.key, pid=len(self.machine.ran), started_boottime_s=now)
        self._emit(child.event)
        seconds = float(start.argv[1])
        child.code = int(start.argv[2]) if len(start.argv) > 2 else 0
        if self.machine.hurries:
            seconds = min(seconds, HURRIED_S)
        child.over = self._loop.call_later(seconds, self._exited, child, child.code)
        if start.timeout_s is not None:
            child.timers.append(self._loop.call_later(start.timeout_s, self.end, start.key, "timeout", start.grace_s))

    def _exited(self, child: Child, code: int | None) -> None:
        now, key = self._loop.time(), child.start.key
        assert child.ran is not None
        self.machine.ended(child.ran, code)
        self._cancel(child)
        del self.children[key]
        self._over(
            key,
            Ended(
                key=key,
                reason=child.cause,
                proof="cgroup",
                exit_code=code,
                signal=9 if code is None else None,
                ended_boottime_s=now,
                why=child.why,
            ),
        )

    def _cancel(self, child: Child) -> None:
        for timer in child.timers:
            timer.cancel()
        if child.over is not None:
            child.over.cancel()

    def _over(self, key: str, ended: Ended) -> None:
        self.ended[key] = ended
        self._emit(ended)

    def _emit(self, event: Event) -> None:
        for client in self.clients:
            client.heard(event)


class SimulatedSupervised:
    """The agent's connection to the simulated supervisor: what `Supervised` is, without a socket."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.identity = supervisor.identity
        self.controllers: tuple[str, ...] = ()
        self.takes: tuple[str, ...] = ()  # no request that came after its hello
        self._process: Process | None = None
        self._events: list[Event] = []
        self._some = asyncio.Event()
        self._gone: SupervisorGone | None = None

    def owned_by(self, process: Process) -> None:
        """The process whose connection it is: what comes waits while that one is stopped, and ends with it."""
        self._process = process
        process.on_kill.append(self.close)

    # -- the supervisor's side

    def heard(self, event: Event) -> None:
        if self._process is not None:
            self._process.call(self._hear, event)

    def lost(self, why: str) -> None:
        if self._process is not None:
            self._process.call(self._lose, why)

    def _hear(self, event: Event) -> None:
        if self._gone is None:
            self._events.append(event)
            self._some.set()

    def _lose(self, why: str) -> None:
        if self._gone is None:
            self._gone = SupervisorGone(why)
            self._some.set()

    # -- the agent's side

    def start(self, attempts: Sequence[StartAttempt]) -> asyncio.Future[None]:
        return self._begin(self.supervisor.start, list(attempts))

    def end(self, attempts: Iterable[EndAttempt]) -> asyncio.Future[None]:
        (attempt,) = attempts
        return self._begin(self.supervisor.end, attempt.key, "end", attempt.grace_s, attempt.notice_s, attempt.why)

    def fence(self, deadline_boottime_s: float | None, grace_s: float) -> asyncio.Future[None]:
        return self._begin(self.supervisor.fence, deadline_boottime_s, grace_s)

    def forget(self, keys: Iterable[str], **_: Any) -> asyncio.Future[None]:
        return self._begin(self.supervisor.forget, list(keys))

    async def list(self) -> Listed:
        await self._begin(lambda: None)
        return self.supervisor.listed()

    async def shutdown_if_idle(self) -> bool:
        """A simulated supervisor costs nothing: it waits for its next agent."""
        return False

    async def next_events(self) -> Sequence[Event]:
        while not self._events:
            if self._gone is not None:
                raise SupervisorGone(str(self._gone), silent=self._gone.silent)
            self._some.clear()
            await self._some.wait()
        events, self._events = self._events, []
        return events

    def _begin(self, what: Callable[..., object], *args: Any) -> asyncio.Future[None]:
        """In the supervisor's process, at once; the answer takes a turn. Raises `SupervisorGone`."""
        if self._process is not None:
            self._process.acts()
        if self._gone is not None or self.supervisor.process.is_dead:
            raise SupervisorGone("the supervisor is gone")
        self.supervisor.process.call(what, *args)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        loop.call_soon(self._answer, answer)
        return answer

    def _answer(self, answer: asyncio.Future[None]) -> None:
        if answer.done():
            return
        if self._gone is not None:
            answer.set_exception(SupervisorGone("the supervisor is gone"))
            answer.exception()  # who asked may be gone, too: not to be reported as never retrieved
        else:
            answer.set_result(None)

    def kill(self) -> None:
        self.supervisor.machine.kill_supervisor()

    def close(self) -> None:
        self._lose("closed here")
        if self in self.supervisor.clients:
            self.supervisor.clients.remove(self)


class SimulatedLink(SupervisorLink):
    """The production link over a machine's simulated supervisor."""

    def __init__(self, machine: Machine, process: Process) -> None:
        super().__init__(machine.state)
        self._machine = machine
        self._process = process

    async def _connect(self, *, replaces_other: bool = False) -> Supervised:
        await asyncio.sleep(self._machine.rng.uniform(0, SUPERVISOR_START_S))
        if self._process.is_dead:
            raise SupervisorUnavailable("the agent is dead")
        client = self._machine.connect()
        client.owned_by(self._process)
        return cast(Supervised, client)
