"""One worker's agent: the thin loop around `members.Members`, which decides everything.

Handlers and drivers only enqueue. A turn takes what has gathered, feeds it to the state machine, carries its
commands out, writes the journal once and hands the frames to the host, which sends those of all its agents in one
write. Nothing of a turn awaits: what takes time (reading devices) is a task that enqueues an event at its end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast

from msgspec.structs import replace

from moorage.bus.transport import STATUS_HEADER, Delivery
from moorage.schemas.codec import Decoder, decode_request, encode
from moorage.schemas.errors import MoorageError, Problem, Refused, problem, refuse
from moorage.schemas.frames import (
    FactAck,
    Goodbye,
    Hello,
    Join,
    Joined,
    Load,
    LogPage,
    Look,
    Looked,
    Place,
    ReadLog,
    Renew,
    Renewed,
    SlotLoad,
    Wanted,
)
from moorage.schemas.gpu import Sharing
from moorage.schemas.names import is_job, is_tenant
from moorage.schemas.release import RELEASE
from moorage.schemas.subjects import Subjects
from moorage.worker.device_watch import DeviceWatch
from moorage.worker.drivers.base import Assignment, Driver, DriverEvent, Living
from moorage.worker.inspection import inspect
from moorage.worker.inventory.base import Inventory, SlotReading
from moorage.worker.inventory.faults import Fault, Gravity
from moorage.worker.inventory.host import HostFacts
from moorage.worker.journal import MemoryJournal
from moorage.worker.leases.session import NEVER_S
from moorage.worker.member_messages import (
    AnswerRefused,
    Claims,
    Command,
    Draining,
    Ended,
    EndMember,
    FactsAnswered,
    Forget,
    HealthChanged,
    Leave,
    Log,
    Member,
    MemberName,
    NotFree,
    ProbeFree,
    Quarantine,
    Release,
    Restored,
    SaidWell,
    SayHello,
    SeenFree,
    SendFacts,
    SendGoodbye,
    SendJoin,
    SendRenew,
    SessionLive,
    SetFence,
    StartMembers,
    StraysOver,
    Stuck,
    SupervisorReplaced,
    Tick,
    TryClaim,
    TurnOver,
    Well,
)
from moorage.worker.members import Members
from moorage.worker.policy import Policy
from moorage.worker.pool import GpuPool, PoolLease, SlotsRefused
from moorage.worker.settings import LOADS_ON_CHANGE_PER_S_MAX, WorkerSettings

#: events that wait for a turn; beyond it what the leader says is dropped and counted (it says it again)
QUEUE_MAX: Final = 65_536
#: pages of output that are read at once; the leader asks again
LOG_READS_MAX: Final = 16
PORT_TRIES_MAX: Final = 256
#: who keeps a slot of the pool closed
MEMORY_KEPT: Final = "memory"
LOG_AGAIN_S: Final = 30.0
_TICK: Final = Tick()
_TURN_OVER: Final = TurnOver()

_decode_read_log: Final = Decoder[ReadLog](ReadLog)
_decode_wanted: Final = Decoder[Wanted](Wanted)
_decode_answer: Final[dict[str, Callable[[bytes], object]]] = {
    "join": Decoder[Joined | Problem](Joined | Problem),
    "renew": Decoder[Renewed | Problem](Renewed | Problem),
    "fact": Decoder[FactAck | Problem](FactAck | Problem),
}

log = logging.getLogger("moorage.worker")


class Host(Protocol):
    """What agents of one process share; see `fleet_host`."""

    inbox: str
    ports: set[int]

    def post(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Queue a message for the write at the end of this turn of the loop."""

    def wake(self, agent: Agent) -> None:
        """Give the agent a turn soon."""

    def now(self) -> float:
        """Seconds of CLOCK_BOOTTIME."""


class Agent:
    """One worker id. `open` first; then the host gives it turns until `close`."""

    def __init__(
        self,
        host: Host,
        worker: str,
        settings: WorkerSettings,
        facts: HostFacts,
        inventory: Inventory,
        drivers: Sequence[Driver],
        journal: MemoryJournal,
        health_file: Path | None = None,
    ) -> None:
        self.host = host
        self.worker = worker
        self.settings = settings
        self.facts = facts
        self.inventory = inventory
        self.drivers = {driver.name: driver for driver in drivers}
        self.journal = journal
        self.policy = Policy.of(settings)
        self.subjects = Subjects(settings.prefix)
        self.devices = inventory.devices()
        self.pool = GpuPool(
            self.devices,
            sharers_max=settings.sharers_max,
            lent=settings.lent_slots,
            on_change=self._pool_changed,
        )
        self.members = Members(
            worker,
            {driver.name: driver.traits for driver in drivers},
            join_n=journal.state.join_n,
            ledger=journal.state.ledger,
            free_wait_s=settings.free_wait_s,
        )
        self.watch = DeviceWatch(self.devices, facts.boot, self.pool, settings.probation, host.now(), health_file)
        self.dropped: Counter[str] = Counter()
        self.scheduled_s = NEVER_S  # the host's: when it has a timer for this agent
        self.queue: deque[object] = deque()
        self.left = asyncio.Event()
        self._leases: dict[MemberName, PoolLease] = {}
        self._quarantined: dict[int, set[MemberName]] = {}
        self._ports: dict[MemberName, int] = {}
        self._strays: dict[MemberName, Driver] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = False
        self._log_reads = 0
        self._sampling = False
        self._looking = False
        self._readings = [SlotReading() for _ in self.devices]
        self._load_n = 0
        self._load_at_s = NEVER_S
        self._load_sent_s = 0.0
        self._sample_at_s = NEVER_S
        self._join_payload = b""
        self._logged: dict[str, float] = {}
        #: told when an operator drains this worker, and when it is taken back
        self.on_draining: Callable[[bool], None] = lambda draining: None
        self._started = str(time.monotonic_ns())
        self._wanted_subject = self.subjects.worker(worker, "wanted")
        self._verb_subjects = {verb: self.subjects.worker(worker, verb) for verb in ("join", "renew", "fact")}
        self._log_subjects: dict[tuple[str, str, int], str] = {}
        self._table: dict[type, Callable[[Any], None]] = {
            TryClaim: self._try_claim,
            StartMembers: self._start_members,
            EndMember: self._end_member,
            Release: self._release,
            ProbeFree: self._probe_free,
            Quarantine: self._quarantine,
            Forget: self._forget,
            SendFacts: self._send_facts,
            FactsAnswered: lambda command: self.journal.answered(command.no),
            SendRenew: self._send_renew,
            SendJoin: self._send_join,
            SessionLive: lambda command: self.journal.live(command.ledger),
            SetFence: self._set_fence,
            SayHello: lambda command: self.say_hello(),
            Draining: lambda command: self.on_draining(command.draining),
            Well: self._well,
            SendGoodbye: self._send_goodbye,
            Log: self._log,
        }

    # ---------------------------------------------------------------------------------------------- life of an agent

    async def open(self) -> None:
        """Open the drivers, take up what lives from before, and ask to join. Raises MoorageError of a driver."""
        living: dict[MemberName, tuple[Driver, Living]] = {}
        for driver in self.drivers.values():
            driver.attach(self.enqueue, self._publish)
            living |= {each.name: (driver, each) for each in await driver.open()}
        self._restore(living)
        self.inventory.watch(self._on_fault)
        self._seen(await self.inventory.sample())
        self._load_at_s = self._sample_at_s = self.host.now()
        self.say_hello()
        self._is_open = True
        self.host.wake(self)

    async def close(self) -> None:
        """Let go of everything; what the drivers run goes on where it can outlive us."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for driver in self.drivers.values():
            await driver.close()
        self.journal.close()

    def leave(self) -> None:
        """End what runs, tell it, say goodbye: `left` is set once that is done."""
        self.enqueue(Leave())

    @property
    def boot(self) -> str:
        """The machine's boot and the start of what its members depend on: a supervisor, else this agent."""
        started = next((driver.boot for driver in self.drivers.values() if driver.boot), self._started)
        return f"{self.facts.boot}.{started}"

    def _restore(self, living: dict[MemberName, tuple[Driver, Living]]) -> None:
        """Match the journal's members with the drivers', and claim again what they hold."""
        held: list[tuple[Member, str, int, str]] = []
        withdrawn: list[MemberName] = []
        for name, place in self.journal.state.places.items():
            member = _member_of(name, place, self.host.now())
            _, found = living.pop(name, (None, None))
            if member is None or member.driver not in self.drivers:
                withdrawn.append(name)
            elif found is not None:
                held.append((member, found.phase, found.code, found.reason))
            elif place.hold:
                held.append((member, "claimed", 0, ""))  # held for a gang: START has not come, or comes again
            else:
                withdrawn.append(name)  # the driver never heard of it
        stuck: list[MemberName] = []
        for at, (member, phase, code, reason) in enumerate(held):
            self._claim_again(member)
            if phase == "claimed":
                held[at] = (member, phase, 0, self._reserve_address(member))
            if phase == "stuck":
                held[at] = (member, "running", code, reason)
                stuck.append(member.name)
        for name, (driver, stray) in living.items():
            # the ledger has the end of it, or never heard of it: either way it must not run on
            if stray.phase == "exited":
                driver.forget([name])
            else:
                self._strays[name] = driver
                self._log(Log("error", "stray", f"{name} runs and is in no journal: ending it before joining"))
                driver.end(name, 0.0, "stray")
        # before whatever the drivers reported since they were opened: it is about these
        self.queue.appendleft(Restored(held, self.journal.state.unanswered, withdrawn, bool(self._strays)))
        if stuck:
            self.queue.append(Stuck(stuck))

    def _claim_again(self, member: Member) -> None:
        try:
            lease = self.pool.try_claim_slots(member.slots, cast(Sharing, member.place.mode), member.job)
        except SlotsRefused as refused:
            self._log(Log("error", "pool-differs", f"{member.name} holds slots that the pool refuses: {refused}"))
            return
        self._leases[member.name] = lease

    # ------------------------------------------------------------------------------------------------ what comes in

    def enqueue(self, event: DriverEvent | object) -> None:
        self.queue.append(event)
        self.host.wake(self)

    def on_wanted(self, delivery: Delivery) -> None:
        if len(self.queue) >= QUEUE_MAX:
            self.dropped["queue-full"] += 1
            return
        self.enqueue(delivery)

    def on_read_log(self, delivery: Delivery) -> None:
        """The leader asks for a page of output: read beside the turns, a few at a time."""
        if not delivery.reply:
            self.dropped["no-reply"] += 1
        elif self._log_reads >= LOG_READS_MAX:
            busy = problem("overloaded", f"{LOG_READS_MAX} pages are being read", retry_after_s=0.2)
            self.host.post(delivery.reply, encode(busy, json=False))
        else:
            self._log_reads += 1
            self._spawn(self._read_log(delivery))

    async def _read_log(self, delivery: Delivery) -> None:
        answer: LogPage | Problem
        try:
            answer = await self._page(_decode_read_log(delivery.data))
        except Refused as refused:
            answer = refused.problem
        finally:
            self._log_reads -= 1
        self.host.post(delivery.reply, encode(answer, json=False))

    async def _page(self, ask: ReadLog) -> LogPage:
        """Raises Refused: only the leader of this session is answered, and only for what can name a member."""
        session = self.members.session
        if session.phase != "live" or ask.session != session.session:
            raise refuse("session-over", f"{self.worker} is in another lease session")
        if not (is_tenant(ask.tenant) and is_job(ask.job)):
            raise refuse("invalid-argument", "this names no member", found=f"{ask.tenant}/{ask.job}")
        if ask.driver:
            driver = self.drivers.get(ask.driver)
            if driver is None:
                raise refuse("not-kept", f"{self.worker} has the driver {ask.driver} no longer", job=ask.job)
            return await driver.read_log(ask)
        nothing = refuse("not-kept", f"{self.worker} keeps nothing of this job", job=ask.job)
        for driver in self.drivers.values():  # the leader does not know it any more: whoever has it
            try:
                return await driver.read_log(ask)
            except Refused as refused:
                nothing = refused
        raise nothing

    def on_answer(self, verb: str, join_n: str, number: str, delivery: Delivery) -> None:
        """An answer to our frame `number` of the session that join `join_n` began (or asked for)."""
        if delivery.headers is not None and STATUS_HEADER in delivery.headers:
            self.dropped["nobody-leads"] += 1  # 503: the timers send it again
        elif len(self.queue) >= QUEUE_MAX:
            self.dropped["queue-full"] += 1
        elif join_n != str(self.members.session.join_n):
            self.dropped["answer-of-another-session"] += 1
        else:
            self.enqueue((verb, number, delivery.data))

    def _event_of(self, item: object) -> object | None:
        """Decode at the edge; None for what is no frame of ours."""
        try:
            if type(item) is Delivery:
                return _decode_wanted(item.data)
            if type(item) is tuple:
                verb, number, data = item
                answer: object = _decode_answer[verb](data)
                return AnswerRefused(verb, int(number), answer) if type(answer) is Problem else answer
        except Refused as refused:
            self.dropped[f"undecodable: {refused.code}"] += 1
            return None
        return item

    # ------------------------------------------------------------------------------------------------------ a turn

    def run(self) -> None:
        """Take everything that has gathered."""
        if not self._is_open:
            return
        now = self.host.now()
        queue = self.queue
        handle = self.members.handle
        while queue:
            event = self._event_of(queue.popleft())
            if event is None:
                continue
            if self._strays and type(event) is Ended:
                self._forget_strays(event)
            if type(event) is SupervisorReplaced:
                self.say_hello()
            self._do(handle(event, now))

    def finish(self) -> None:
        """End the turn: facts leave in one frame, the journal is written, loads that are due are said."""
        if not self._is_open:
            return
        now = self.host.now()
        self._do(self.members.handle(_TURN_OVER, now))
        self.journal.flush()
        if self.members.session.phase == "left":
            self.left.set()
        if now >= self._sample_at_s:
            self._sample_at_s = now + self.settings.load_s
            self._spawn(self._sample_and_say_load())
        elif now >= self._load_at_s:
            self._say_load()

    def next_deadline_s(self) -> float:
        return min(self.members.next_deadline_s(), self._load_at_s, self._sample_at_s)

    def on_timer(self) -> None:
        self.enqueue(_TICK)

    def _do(self, commands: list[Command]) -> None:
        table = self._table
        for command in commands:
            table[type(command)](command)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ----------------------------------------------------------------------------------------- commands: the pool

    def _try_claim(self, command: TryClaim) -> None:
        granted: list[tuple[Member, str]] = []
        refused: list[tuple[Member, str]] = []
        places: list[Place] = []
        for member in command.members:
            try:
                self.policy.check_placement(member.name[0], member.request)
                self.drivers[member.driver].check(member.request)
                self.watch.check_foreign(member.slots)
                lease = self.pool.try_claim_slots(member.slots, cast(Sharing, member.place.mode), member.job)
            except SlotsRefused as no:
                refused.append((member, f"{no.reason} {','.join(map(str, no.slots))}"))
                continue
            except MoorageError as no:
                refused.append((member, no.problem.message))
                continue
            self._leases[member.name] = lease
            granted.append((member, self._reserve_address(member) if member.place.hold else ""))
            if self.drivers[member.driver].traits.remembers:
                places.append(member.place)
        if places:
            self.journal.placed(places)
        self._do(self.members.handle(Claims(granted, refused), self.host.now()))

    def _reserve_address(self, member: Member) -> str:
        wanted = member.master_port_wanted
        if not wanted:
            return ""
        address = self.settings.address or own_address()
        for port in range(wanted, min(wanted + PORT_TRIES_MAX, 65536)):
            if port not in self.host.ports and _is_free_port(port):
                self._ports[member.name] = port
                self.host.ports.add(port)
                return f"{address}:{port}"
        return f"{address}:{wanted}"  # all are taken: the job's own bind tells it better than we could

    def _release(self, command: Release) -> None:
        for member in command.members:
            name = member.name
            lease = self._leases.pop(name, None)
            if lease is not None:
                lease.release()
            if self._ports:
                self.host.ports.discard(self._ports.pop(name, 0))
            for slot in member.quarantined:
                holders = self._quarantined.get(slot, set())
                holders.discard(name)
                if not holders:
                    self._quarantined.pop(slot, None)
                    self.pool.unquarantine(slot, MEMORY_KEPT)

    def _quarantine(self, command: Quarantine) -> None:
        member = command.member
        for slot in command.slots:
            self._quarantined.setdefault(slot, set()).add(member.name)
            why = f"memory kept after {member.job}" if not member.stuck else "cannot be ended"
            self.pool.quarantine(slot, why, MEMORY_KEPT)
        lease = self._leases.get(member.name)
        if lease is not None and not member.stuck:
            lease.release()  # its other devices are free; those in quarantine stay out of use
        text = f"slots {list(command.slots)} of {member.name} are in quarantine"
        self._log(Log("error", "quarantined", text))

    def _probe_free(self, command: ProbeFree) -> None:
        for member in command.members:
            lease = self._leases.get(member.name)
            if lease is not None and lease.phase == "held":
                lease.ended()
        self._spawn(self._probe(command.members))

    async def _probe(self, members: list[Member]) -> None:
        free: list[MemberName] = []
        taken: list[tuple[MemberName, tuple[int, ...]]] = []
        readings: list[SlotReading] | None = None
        for member in members:
            slots = member.quarantined or member.slots
            if member.place.mode == "exclusive":
                not_free = tuple([slot for slot in slots if not await self.inventory.memory_is_free(slot)])
            else:
                if readings is None:
                    readings = await self.inventory.sample()
                not_free = tuple(slot for slot in slots if not _pids_are_alive(readings[slot]))
            if not_free:
                taken.append((member.name, not_free))
            else:
                free.append(member.name)
        if free:
            self.enqueue(SeenFree(free))
        if taken:
            self.enqueue(NotFree(taken))

    # -------------------------------------------------------------------------------------- commands: the drivers

    def _start_members(self, command: StartMembers) -> None:
        driver = self.drivers[command.driver]
        if driver.traits.remembers:
            self.journal.flush()  # a driver that outlives us must not know more than the journal
        devices, now = self.devices, self.host.now()
        driver.start(
            [
                Assignment(
                    member.name,
                    member.request,
                    [devices[slot] for slot in member.slots],
                    member.place.mode,
                    member.start,
                    member.place.traceparent,
                    None if member.ends_at_s is None else max(0.0, member.ends_at_s - now),
                )
                for member in command.members
            ]
        )

    def _end_member(self, command: EndMember) -> None:
        driver, name = self.drivers[command.member.driver], command.member.name
        if command.notice_s > 0:
            driver.end_with_notice(name, command.grace_s, command.why, command.notice_s)
        else:
            driver.end(name, command.grace_s, command.why)

    def _forget(self, command: Forget) -> None:
        for driver in self.drivers.values():
            names = [member.name for member in command.members if member.driver == driver.name]
            if names:
                driver.forget(names)

    def _forget_strays(self, event: Ended) -> None:
        for name, _, _ in event.items:
            driver = self._strays.pop(name, None)
            if driver is not None:
                driver.forget([name])
        if not self._strays:
            self.queue.append(StraysOver())

    def _set_fence(self, command: SetFence) -> None:
        for driver in self.drivers.values():
            driver.set_fence(command.deadline_s, command.grace_s)

    def _publish(self, name: MemberName, payload: bytes) -> None:
        base = name[:3]
        subject = self._log_subjects.get(base)
        if subject is None:
            if len(self._log_subjects) > 4096:
                self._log_subjects.clear()
            subject = self._log_subjects[base] = self.subjects.log(*base)
        self.host.post(subject, payload)

    # --------------------------------------------------------------------------------------- commands: the leader

    def _ask(self, verb: str, number: int, payload: bytes) -> None:
        join_n = self.members.session.join_n
        self.host.post(self._verb_subjects[verb], payload, f"{self.host.inbox}.{self.worker}.{verb}.{join_n}.{number}")

    def _send_facts(self, command: SendFacts) -> None:
        if not command.again:
            self.journal.facts(command.frame)
        self._ask("fact", command.frame.no, encode(command.frame, json=False))

    def _send_renew(self, command: SendRenew) -> None:
        pool = self.pool
        renew = Renew(
            command.session,
            command.n,
            command.no,
            pool.generation,
            command.held,
            pool.busy_slots(),
            pool.pending_claimers() > 0,
            unwell=self.watch.told,
            well_n=self.watch.health.well_n,
            reign=self.members.session.reign,
        )
        self._ask("renew", command.n, encode(renew, json=False))

    def _send_join(self, command: SendJoin) -> None:
        if not command.again:
            session = self.members.session
            join = Join(
                self.facts.machine,
                self.boot,
                command.n,
                replace(self.hello(), drivers_for=self.policy.told()),
                facts=command.facts,
                holding=command.holding,
                reign=session.reign,
                ledger=session.ledger,
            )
            self.journal.join(command.n, command.facts)
            self._join_payload = encode(join, json=False)
        self._ask("join", command.n, self._join_payload)

    def _send_goodbye(self, command: SendGoodbye) -> None:
        self._ask("join", 0, encode(Goodbye(command.session), json=False))

    def _log(self, command: Log) -> None:
        now = self.host.now()
        key = f"{command.code} {command.text}"
        if now < self._logged.get(key, -LOG_AGAIN_S) + LOG_AGAIN_S:
            return
        if len(self._logged) > 1024:
            self._logged.clear()
        self._logged[key] = now
        level = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}[command.level]
        log.log(level, "%s: %s: %s", self.worker, command.code, command.text)

    # ------------------------------------------------------------------------------------------------- what is public

    def hello(self) -> Hello:
        settings, facts = self.settings, self.facts
        return Hello(
            self.worker,
            self.boot,
            release=RELEASE,
            hostname=facts.hostname,
            drivers=list(self.drivers),
            modes=list(settings.modes),
            sharers_max=settings.sharers_max,
            labels=settings.labels,
            cpu_milli=facts.cpu_milli,
            memory_mib=facts.memory_mib,
            gpu_pool=self.devices,
            interface=settings.interface,
            address=settings.address or "",
            simulated=self.inventory.simulated,
            lent_slots=None if settings.lent_slots is None else list(settings.lent_slots),
            keeps={key: value for driver in self.drivers.values() for key, value in driver.keeps(settings).items()},
        )

    def say_hello(self) -> None:
        self.host.post(self.subjects.hello(self.worker), encode(self.hello()))

    def look(self, frame: Look) -> None:
        """Look at the devices against the leases and tell the leader; one look at a time, since a device may hang."""
        if self._looking or not self._is_open:
            self.dropped["look"] += 1
            return
        self._looking = True
        self._spawn(self._look(frame))

    async def _look(self, frame: Look) -> None:
        try:
            before = self.pool.slot_states()
            readings = await self.inventory.sample()
            baselines = [self.inventory.memory_baseline_mib(slot) for slot in range(len(self.devices))]
            findings, more = inspect(self.devices, before, self.pool.slot_states(), readings, baselines)
        finally:
            self._looking = False
        looked = Looked(self.worker, frame.ask, findings=findings, more=more)
        self.host.post(self.subjects.worker(self.worker, "looked"), encode(looked, json=False))

    def _pool_changed(self) -> None:
        """Say it, but at most LOADS_ON_CHANGE_PER_S_MAX times a second."""
        if self._load_at_s == NEVER_S:
            self._load_at_s = self._load_sent_s + 1 / LOADS_ON_CHANGE_PER_S_MAX
            self.host.wake(self)

    async def _sample_and_say_load(self) -> None:
        if self._sampling:
            return  # the driver of the devices is slow: its answer is awaited still
        self._sampling = True
        try:
            self._seen(await self.inventory.sample())
        finally:
            self._sampling = False
        self._say_load()

    # ------------------------------------------------------------------------------------------- the devices' health

    def _seen(self, readings: list[SlotReading]) -> None:
        self._readings = readings
        if self.watch.seen(readings, self.host.now()):
            self._health_changed()

    def _on_fault(self, slot: int, fault: Fault) -> None:
        """A device says by itself that something happened to it."""
        level: Literal["info", "error"] = "info" if fault.gravity == Gravity.NOTE else "error"
        self._log(Log(level, "device-fault", f"GPU {slot} ({self.devices[slot].uuid}): {fault.detail}"))
        if self.watch.happened(slot, fault, self.host.now()):
            self._health_changed()

    def _health_changed(self) -> None:
        for each in self.watch.told:
            self._log(Log("error", "device-unwell", f"GPU {each.slot} is out of use: {each.kind}: {each.detail}"))
        self.enqueue(HealthChanged())
        self._pool_changed()

    def _well(self, command: Well) -> None:
        slots = self.watch.well(command.slots, command.n, self.host.now())
        if not slots:
            return
        self._log(Log("warning", "said-well", f"slots {slots} are in use again by an operator's word"))
        self._do(self.members.handle(SaidWell(slots), self.host.now()))

    def _say_load(self) -> None:
        self._load_at_s = NEVER_S
        now = self._load_sent_s = self.host.now()
        self._load_n += 1
        frame = Load(
            self.worker,
            self.boot,
            self._load_n,
            self.pool.generation,
            pending_claimers=self.pool.pending_claimers(),
            gpu_pool=[
                SlotLoad(
                    device.index,
                    state.sharers > 0,
                    state.sharers,
                    state.mode or "",
                    reading.util_percent,
                    reading.memory_used_mib,
                    reading.temperature_c,
                    *self.watch.shown(state, reading, now),
                )
                for device, state, reading in zip(self.devices, self.pool.slot_states(), self._readings, strict=True)
            ],
            simulated=self.inventory.simulated,
        )
        self.host.post(self.subjects.load(self.worker), encode(frame))


def _member_of(name: MemberName, place: Place, now: float) -> Member | None:
    try:
        return Member(name, place, decode_request(place.body), now)
    except Refused:
        return None


def _pids_are_alive(reading: SlotReading) -> bool:
    """Whether no process of the device is a dead one that the driver has not yet cleared away.

    The member's tree is proven gone, so its pids are dead: as long as the device lists a dead pid, it may be ours.
    """
    if reading.health == "unresponsive":
        return False
    return all(_is_alive(process.pid) for process in reading.processes)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return b") Z" not in file.read(512)
    except OSError:
        return False


def _is_free_port(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def own_address() -> str:
    """The address from which this host reaches others; 127.0.0.1 where it reaches none. Sends nothing.

    Connecting a datagram socket only looks up the route (udp(7)); 192.0.2.1 is for documentation (RFC 5737).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
