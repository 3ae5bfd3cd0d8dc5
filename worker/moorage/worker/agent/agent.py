"""Run one worker's agent: a thin loop around the state machine `attempts.Attempts`, which makes all decisions.

Its parts: `attempt_claims` claims devices in the pool, `leader_link` sends frames to the leader, `reporter` publishes
hello and load, `output_reader` answers requests for output, and `restoring` takes over from an earlier agent.

Message handlers and drivers only put events into a queue. A turn feeds these events to the state machine, executes its
commands, writes the journal once, and hands the frames to the host, which sends the frames of all its agents in one
write. A turn never awaits: work that takes time, such as reading devices, is a task that enqueues an event at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

from moorage.bus.transport import STATUS_HEADER, Delivery, Handler, Subscribed
from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import MoorageError, Problem, Refused, refuse
from moorage.schemas.frames import CANNOT_RUN, NOT_HERE, Joined, Output, Place, Renewed, ReportAck, Wanted
from moorage.schemas.items import Item, ItemsFile
from moorage.schemas.job import Request
from moorage.schemas.printable import carried
from moorage.schemas.subjects import Subjects
from moorage.schemas.units import many
from moorage.system.build import build
from moorage.worker.agent.attempt_claims import AttemptClaims
from moorage.worker.agent.command_streams import CommandStreams
from moorage.worker.agent.device_access_lost import CutOffWatch
from moorage.worker.agent.gpu_checks import GpuChecks
from moorage.worker.agent.item_starts import ItemStarts
from moorage.worker.agent.journal import MemoryJournal
from moorage.worker.agent.leader_link import STATE_GONE, LeaderLink
from moorage.worker.agent.lost_attempts import LostAttempts
from moorage.worker.agent.ready_watch import ReadyWatch
from moorage.worker.agent.reporter import Reporter
from moorage.worker.agent.state_disk import StateDisk
from moorage.worker.agent.throttled_log import ThrottledLog
from moorage.worker.attempt.environment import LacksHere, not_here
from moorage.worker.attempt.job_items import ItemRefused, JobItems, with_item
from moorage.worker.attempt.output_reader import OutputReader
from moorage.worker.attempt.rendezvous import Rendezvous
from moorage.worker.attempt.service_ports import ServicePorts
from moorage.worker.devices.device_watch import DeviceWatch
from moorage.worker.devices.pool import GpuPool, SlotsRefused
from moorage.worker.devices.readers.base import Inventory
from moorage.worker.devices.readers.host import HostFacts
from moorage.worker.driver import Assignment, Driver, Freezes, Living, never_ran
from moorage.worker.drivers.policy import ROOT_FIX, ROOT_OPEN, Policy
from moorage.worker.freezing.engines import Engines
from moorage.worker.lend.lender import LeaseServer
from moorage.worker.session.attempt_messages import (
    LEAVE_GRACE_S_MAX,
    UNCHECKED,
    AnswerRefused,
    AnswerVerb,
    Attempt,
    CheckpointsNoted,
    Claims,
    Command,
    Draining,
    EndAttempt,
    Ended,
    Event,
    Forget,
    FreezeAnswered,
    FreezeAttempt,
    GiveUp,
    HealthChanged,
    LeaseAnswered,
    Leave,
    Log,
    NoteKept,
    NotStarted,
    ProbeFree,
    Quarantine,
    Release,
    Replaced,
    ReportsAnswered,
    ResizeAttempts,
    Restored,
    RunCommands,
    SaidWell,
    SayHello,
    SendGoodbye,
    SendJoin,
    SendRenew,
    SendReports,
    SessionLive,
    SetFence,
    SetsCount,
    StartAttempts,
    StartFailed,
    StraysOver,
    Stuck,
    TellSets,
    Tick,
    TryClaim,
    TryLease,
    TurnOver,
    Unlease,
    WatchReady,
    Well,
)
from moorage.worker.session.attempts import Attempts
from moorage.worker.session.lease_session import NEVER_S
from moorage.worker.session.restoring import device_names, match, same_slots
from moorage.worker.settings import WorkerSettings
from moorage.worker.sharing.idle_watch import IdleWatch
from moorage.worker.sharing.limiter.feeder import Feeder
from moorage.worker.sharing.limiter.limits import limited
from moorage.worker.sharing.memory_guard import MemoryGuard
from moorage.worker.sharing.mps.clients import MpsClients
from moorage.worker.sharing.mps.managed import ManagedMps
from moorage.worker.sharing.mps.watched import OperatorsMps
from moorage.worker.start_codes import CODE_CANNOT_START

#: if the queue has more events than this, frames of the leader are dropped and counted; the leader sends them again
QUEUE_MAX: Final = 65_536
#: shown by `moorage run` for a job that asks for memory on a host that cannot limit it
MEMORY_COUNTED: Final = (
    "warning[memory]: the memory that the job asks for is counted, not enforced: its worker cannot limit memory"
)
_TICK: Final = Tick()

log = logging.getLogger("moorage.worker")
_TURN_OVER: Final = TurnOver()

_decode_wanted: Final = Decoder[Wanted](Wanted)
_NUMBER: Final = re.compile(r"[0-9]{1,15}")
_decode_answer: Final[dict[str, Callable[[bytes], Event | Problem]]] = {
    "join": Decoder[Joined | Problem](Joined | Problem),
    "renew": Decoder[Renewed | Problem](Renewed | Problem),
    "fact": Decoder[ReportAck | Problem](ReportAck | Problem),
}


class _Answer(NamedTuple):
    """The leader's answer to our frame `number`, not yet decoded."""

    verb: AnswerVerb
    number: int
    payload: bytes


class Host(Protocol):
    """The part of a process that its agents share; see `fleet_host`."""

    inbox: str
    ports: set[int]

    def post(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Queue a message for the write at the end of this turn of the loop."""

    async def subscribe(self, subject: str, handler: Handler) -> Subscribed:
        """Subscribe for an agent, which unsubscribes. Raises `BusError`."""

    def wake(self, agent: Agent) -> None:
        """Give the agent a turn soon."""

    def now(self) -> float:
        """Return the time in seconds of CLOCK_BOOTTIME."""

    def give_up(self, problem: Problem) -> None:
        """Handle that another worker has an agent's id, and keeps it."""


class Agent:
    """The agent of one worker id. Call `open`; then its host calls `run` and `finish` in turns, until `close`."""

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
        mps: ManagedMps | OperatorsMps | None = None,
        items: JobItems | None = None,
        disk: StateDisk | None = None,
        *,
        lends: bool = False,
    ) -> None:
        """Make the parts. With `lends`, processes of this host may borrow from the pool once the `lender` is open."""
        self.host = host
        self.worker = worker
        self.settings = settings
        self.facts = facts
        self.inventory = inventory
        self.drivers = {driver.name: driver for driver in drivers}
        self.journal = journal
        self.disk = disk
        self.policy = Policy.of(settings)
        self.subjects = Subjects(settings.prefix)
        self.devices = settings.kept_devices(inventory.devices())
        self.pool = GpuPool(
            self.devices,
            sharers_max=settings.sharers_max,
            lent=settings.lent_slots,
            on_change=self._pool_changed,
        )
        self.attempts = Attempts(
            worker,
            {driver.name: driver.capabilities for driver in drivers},
            join_n=journal.state.join_n,
            ledger=journal.state.ledger,
            free_wait_s=settings.free_wait_s,
        )
        self.say = ThrottledLog(worker, host.now)
        self.guard = MemoryGuard(
            self, self.attempts.held, inventory, self.drivers, settings.modes_offered,
            settings.guard_grace_s if settings.guard else None,
        )  # fmt: skip
        self.engines = Engines(self, self.attempts.held, self.drivers, inventory)
        self.items = items or JobItems()
        self._item_starts = ItemStarts(self.items, self._start_with_items, self.enqueue)
        self.watch = DeviceWatch(
            self.devices, facts.boot, self.pool, settings.probation, host.now(), health_file, self.guard.explained
        )
        self.lender = self._lender() if lends else None
        self.lost = LostAttempts(
            self, self.drivers, self.attempts.held, self.attempts.session, self._item_starts.waiting
        )
        self.reporter = Reporter(
            self, worker, settings, facts, inventory, self.drivers, self.pool, self.watch, self.policy, self.guard,
            self.attempts.held, self.lost, self.lender, disk,
        )  # fmt: skip
        self.checks = GpuChecks(
            self, settings, self.pool, self.watch, self.reporter.health_changed, simulated=inventory.simulated
        )
        self.clients = MpsClients(self, mps, self.drivers, self.pool)
        self.guard.announce = None if mps is None else mps.announce
        is_real = not all(driver.capabilities.simulated_only for driver in drivers)  # a job may listen on its ports
        self.claims = AttemptClaims(
            self, self.pool, inventory, self.engines, Rendezvous(host.ports, settings.address), self.clients,
            ServicePorts(
                settings.ports_lent, host.ports if is_real else set(), settings.address, probes=is_real
            ),
        )  # fmt: skip
        self.ready = ReadyWatch(self, self.drivers, self.attempts.held, settings.address)
        self.output = OutputReader(
            self,
            worker,
            self.attempts.session,
            self.drivers,
            lambda ask: self.reporter.usage.recent.page(ask, self.pool.devices),
        )
        self.streams = CommandStreams(self, host, worker, self.subjects, self.drivers, self.attempts.held)
        self.leader = LeaderLink(
            host.post, host.inbox, self.subjects, self.attempts.session, journal, self.reporter, self.pool, self.watch,
            self.claims,
        )  # fmt: skip
        self._cut_off = CutOffWatch(inventory, self.drivers, self.attempts.held, self.watch, self._publish)
        self.dropped: Counter[str] = Counter()
        self.scheduled_s = NEVER_S  # the time of the host's timer for this agent
        self.queue: deque[Event | Delivery | _Answer] = deque()
        self.left = asyncio.Event()
        self.where = ""  # the server's address without secrets, for the log
        self._strays: dict[AttemptName, Driver] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = False
        self._handlers = self._command_handlers()

    def _lender(self) -> LeaseServer:
        settings = self.settings
        return LeaseServer(
            self.worker,
            self.pool,
            self.inventory,
            modes=settings.modes_lent,
            uids=settings.lease_uids,
            gid=settings.lease_gid,
            free_wait_s=settings.free_wait_s,
            idle=IdleWatch(settings.idle_warn_s, settings.idle_reclaim_s),
            by_uuid=settings.shows_uuids(self.devices),
        )

    def _command_handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return the method that executes each kind of the state machine's commands."""
        return {
            TryClaim: self._try_claim,
            StartAttempts: self._start_attempts,
            EndAttempt: self._end_attempt,
            ResizeAttempts: self._resize_attempts,
            WatchReady: lambda command: self.ready.watch(command.attempt),
            NoteKept: lambda command: self._note_kept(command.attempt),
            FreezeAttempt: self._freeze_attempt,
            RunCommands: self._run_commands,
            Unlease: lambda command: self.claims.give_up(command.attempt),
            TryLease: self._try_lease,
            Release: lambda command: self.claims.release(command.attempts),
            ProbeFree: lambda command: self.claims.probe(command.attempts),
            Quarantine: lambda command: self.claims.quarantine(command.attempt, command.slots),
            Forget: self._forget,
            CheckpointsNoted: self._note_checkpoints,
            SetsCount: self._sets_count,
            TellSets: self._tell_sets,
            SendReports: self.leader.send_reports,
            ReportsAnswered: lambda command: self.journal.answered(command.no),
            SendRenew: self._send_renew,
            SendJoin: self.leader.send_join,
            SessionLive: self._on_session_live,
            SetFence: self._set_fence,
            SayHello: lambda command: self.reporter.publish_hello(),
            GiveUp: lambda command: self.host.give_up(command.problem),
            Draining: self._on_draining,
            Well: self._on_well,
            SendGoodbye: self.leader.send_goodbye,
            Log: self.say,
        }

    # ---------------------------------------------------------------------------------------------- life of an agent

    async def open(self) -> None:
        """Open the drivers, take over the attempts that they still run, and join. Raises a part's MoorageError."""
        living: dict[AttemptName, tuple[Driver, Living]] = {}
        for driver in self.drivers.values():
            driver.attach(self.enqueue, self._publish)
            living |= {each.name: (driver, each) for each in await driver.open()}
        self._restore(living)
        await self.clients.open()
        await self.guard.open()
        await self.reporter.open()
        self.checks.open()
        self._is_open = True
        self.spawn(self.guard.run())
        self.spawn(self.lost.run())
        self.spawn(self._cut_off.run())
        if any(driver.limits is not None for driver in self.drivers.values()) and not self.inventory.simulated:
            self.spawn(Feeder(self.drivers.values(), self.inventory).run())
        self.host.wake(self)

    async def close(self) -> None:
        """Release everything. Jobs run on if their driver can outlive this process."""
        self.checks.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with contextlib.AsyncExitStack() as closing:  # closes each part even if the close of another part raises
            closing.callback(self.journal.close)
            for driver in reversed(self.drivers.values()):
                closing.push_async_callback(driver.close)
            closing.push_async_callback(self._item_starts.close)
            closing.push_async_callback(self.clients.close)

    def leave(self, within_s: float = 0.0, grace_s_max: float = LEAVE_GRACE_S_MAX) -> None:
        """Begin to end all jobs, report their ends, and say goodbye. `left` is set at the end of it.

        Members of services go on for at most `within_s`, until others serve in their place. Then all that is left is
        ended, each with its grace or `grace_s_max`, whichever is shorter. Call it again for an earlier end.
        """
        self.checks.stop()
        self.enqueue(Leave(within_s, grace_s_max))

    @property
    def longest_grace_s(self) -> float:
        """How long what it holds may take to end, once this agent ends it as it leaves."""
        return min(self.attempts.table.longest_grace_s, LEAVE_GRACE_S_MAX)

    def leave_if_idle(self) -> None:
        """In a live session, say goodbye at once and set `left` if there is no job or lease here.

        It is one step, so a placement that arrives later is refused; it is never started only to be ended. With a job
        or lease, a last renewal says that nothing starts here until the next agent has joined.
        """
        if self._is_open:
            self.checks.stop()
            self.run()
            idle = not self.attempts.held and not self.pool.busy_slots()  # a lease of a local process counts as well
            if self.attempts.session.phase == "live":
                self.reporter.stops = not idle
                self.queue.append(Leave() if idle else HealthChanged())
                self.run()
                self.finish()

    @property
    def boot(self) -> str:
        """The machine's boot id, and when the supervisor started; without a supervisor, when this agent started."""
        return self.reporter.boot

    def _restore(self, living: dict[AttemptName, tuple[Driver, Living]]) -> None:
        """Match the attempts in the journal with the attempts that the drivers run, and claim their devices again."""
        state = self.journal.state
        same = same_slots(state.devices, device_names(self.devices))
        found = match(state.places, living, self.drivers, self.host.now(), same, state.quarantined, state.ended)
        for attempt, phase, *_ in found.held:
            if phase == "running" and attempt.sleeps_itself:
                attempt.frozen = self.engines.is_asleep(attempt)
        # of two on one slot the one that runs and is not preemptible has it
        held = sorted(found.held, key=lambda row: (row[0].frozen, row[0].request.preemptible))
        stuck: list[AttemptName] = []
        before = state.devices or device_names(self.devices)
        closed = [*state.left, *(before[slot] for slot in found.left if slot < len(before))]
        for at, (attempt, phase, code, reason) in enumerate(held):
            if (kept := state.kept.get(attempt.name)) is not None:
                attempt.ports, attempt.was_ready = tuple(kept.ports), kept.was_ready
            self.claims.take_again(attempt)
            if phase == "claimed":
                held[at] = (attempt, phase, 0, self.claims.address(attempt))
            if phase == "stuck":
                held[at] = (attempt, "running", code, reason)
                stuck.append(attempt.name)
        for name, (driver, stray) in found.strays.items():
            # the ledger knows that this attempt ended, or has no record of it: in both cases it must not run on
            # stuck and released: an operator said that it is over, and the agent of before died before the driver heard
            is_released = stray.phase == "stuck" and name in state.released
            if stray.phase in ("exited", "refused") or is_released:
                self.call_driver(driver, partial(driver.forget, [name]))
                continue
            self._strays[name] = driver
            why = found.must_end.get(name, "it is in no journal")
            self.say(Log("error", "stray", f"{name} runs, and {why}: ending it before joining"))
            if self.call_driver(driver, partial(driver.end, name, 0.0, "stray")):
                del self._strays[name]
                closed += device_names(self.devices)  # its end may never be reported, and its devices are unknown
        self.claims.close_until_free(closed, device_names(self.devices))
        if not self._strays:
            self.claims.look_for_free()
        # put first: what the drivers reported since they were opened is about these attempts
        self.queue.appendleft(Restored(held, state.unanswered + found.reports, found.withdrawn, bool(self._strays)))
        if stuck:
            self.queue.append(Stuck(stuck))

    # ------------------------------------------------------------------------------------------------ what comes in

    def enqueue(self, event: Event | Delivery | _Answer) -> None:
        self.queue.append(event)
        self.host.wake(self)

    def on_wanted(self, delivery: Delivery) -> None:
        if len(self.queue) >= QUEUE_MAX:
            self.dropped["queue-full"] += 1
            return
        self.enqueue(delivery)

    def on_answer(self, verb: str, join_n: str, number: str, delivery: Delivery) -> None:
        """Enqueue an answer to our frame `number`, if it belongs to the session of join `join_n`."""
        if delivery.headers is not None and STATUS_HEADER in delivery.headers:
            self.dropped["nobody-leads"] += 1  # status 503: a timer sends the frame again
        elif len(self.queue) >= QUEUE_MAX:
            self.dropped["queue-full"] += 1
        elif join_n != str(self.attempts.session.join_n):
            self.dropped["answer-of-another-session"] += 1
        elif verb not in _decode_answer or not _NUMBER.fullmatch(number):
            self.dropped["answer-to-nothing"] += 1  # a client that knows our inbox must not be able to crash the agent
        else:
            self.enqueue(_Answer(cast(AnswerVerb, verb), int(number), delivery.data))

    def _event_of(self, item: Event | Delivery | _Answer) -> Event | None:
        """Return the event of an item in the queue; None if it is no valid frame."""
        try:
            if isinstance(item, Delivery):
                return _decode_wanted(item.data)
            if isinstance(item, _Answer):
                answer = _decode_answer[item.verb](item.payload)
                return AnswerRefused(item.verb, item.number, answer) if isinstance(answer, Problem) else answer
        except Refused as refused:
            self.dropped[f"undecodable: {refused.code}"] += 1
            return None
        return item

    # ------------------------------------------------------------------------------------------------------ a turn

    def run(self) -> None:
        """Handle everything in the queue. Does nothing before `open` has returned, as `finish`."""
        if not self._is_open:
            return
        now = self.host.now()
        queue = self.queue
        handle = self.attempts.handle
        while queue:
            event = self._event_of(queue.popleft())
            if event is None:
                continue
            if self._strays and type(event) is Ended:
                self._forget_strays(event)
            if type(event) is Replaced:
                self.reporter.publish_hello()
            self._execute(handle(event, now))

    def finish(self) -> None:
        """End the turn: make one frame of reports, write the journal, publish the load if it is due."""
        if not self._is_open:
            return
        now = self.host.now()
        lends = self.attempts.leaving and self.lender is not None and bool(self.lender.holders)
        self._execute(self.attempts.handle(TurnOver(lends=True) if lends else _TURN_OVER, now))
        self.journal.flush()
        if self.attempts.session.phase == "left":
            self.left.set()
        self.reporter.publish_due()

    def next_deadline_s(self) -> float:
        return min(self.attempts.next_deadline_s(), self.reporter.due_s)

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens here except renewals and load frames."""
        return not self.queue and self.attempts.is_idle

    def slept(self, seconds: float) -> None:
        """Move all deadlines by the time that was skipped, see `FleetHost.slept`."""
        session = self.attempts.session
        session.slept(seconds)
        self.reporter.slept(seconds)
        self._set_fence(SetFence(session.over_at_s, session.grace_s))

    def on_timer(self) -> None:
        self.enqueue(_TICK)

    def _execute(self, commands: list[Command]) -> None:
        table = self._handlers
        for command in commands:
            table[type(command)](command)

    # -------------------------------------------------------------------------------------------- for its parts

    def now(self) -> float:
        return self.host.now()

    def _pool_changed(self) -> None:
        self.reporter.pool_changed()
        self.checks.woken()

    def post(self, subject: str, payload: bytes, reply: str = "") -> None:
        self.host.post(subject, payload, reply)

    def wake(self) -> None:
        self.host.wake(self)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ----------------------------------------------------------------------------------------- commands: the pool

    def _try_claim(self, command: TryClaim) -> None:
        granted: list[tuple[Attempt, str]] = []
        refused: list[tuple[Attempt, str]] = []
        lacking: list[tuple[Attempt, str]] = []
        places: list[Place] = []
        room = self._room_of_drivers(command.attempts)
        no_start = self._no_start()
        for attempt in command.attempts:
            if no_start:
                refused.append((attempt, no_start))
                continue
            try:
                if room and room.get(attempt.driver, 1) <= 0:
                    bound = self.drivers[attempt.driver].attempts_max
                    raise refuse("queue-full", f"the driver {attempt.driver} has {bound} attempts, which is its limit")
                self.policy.check_placement(attempt.name[0], attempt.request)
                self._check_driver(attempt)
                self.watch.check_foreign(attempt.slots)
                self.claims.take(attempt)
            except SlotsRefused as no:
                refused.append((attempt, f"{no.reason} {','.join(map(str, no.slots))}"))
                continue
            except LacksHere as no:
                lacking.append((attempt, not_here(no)))
                continue
            except MoorageError as no:
                refused.append((attempt, no.problem.message))
                continue
            if attempt.driver in room:
                room[attempt.driver] -= 1
            granted.append((attempt, self.claims.address(attempt) if attempt.place.hold else ""))
            if self.drivers[attempt.driver].capabilities.outlives_agent:
                places.append(attempt.place)
        if places:
            self.journal.placed(places)
            for attempt, _ in granted:
                if attempt.ports:
                    self._note_kept(attempt)
        self._execute(self.attempts.handle(Claims(granted, refused, lacking), self.host.now()))

    def _no_start(self) -> str:
        """Return why nothing is started now: a later agent would not know of it; "" if it is."""
        if not self.journal.is_in_place():
            return STATE_GONE
        return self.disk.why if self.disk is not None and (self.disk.is_full or self.journal.is_behind) else ""

    def _note_kept(self, attempt: Attempt) -> None:
        if self.drivers[attempt.driver].capabilities.outlives_agent:
            self.journal.keep(attempt.name, attempt.ports, was_ready=attempt.was_ready)

    def _room_of_drivers(self, asked: Sequence[Attempt]) -> dict[str, int]:
        """Return how many more attempts each driver with a limit may take, before it takes the `asked` ones."""
        room = {name: driver.attempts_max for name, driver in self.drivers.items() if driver.attempts_max is not None}
        if room:
            held = Counter(attempt.driver for attempt in self.attempts.held.values())
            held.subtract(attempt.driver for attempt in asked)
            room = {name: most - held[name] for name, most in room.items()}
        return room

    def _check_driver(self, attempt: Attempt) -> None:
        """Have the driver check the request. Raises `Refused`, saying whether another worker may run the request."""
        driver = self.drivers[attempt.driver]
        try:
            if driver.capabilities.needs_argv and not attempt.request.workload.argv:
                raise refuse("invalid-argument", f"the driver {driver.name} needs argv", field="$.run.argv")
            run = attempt.request.workload
            has_files = run.files is not None or run.files_of or run.keep or run.checkpoint is not None
            if has_files and not driver.capabilities.brings_files:
                message = f"the driver {driver.name} brings and keeps no files"
                raise refuse("failed-precondition", message, field="$.run.files")
            if run.setup is not None and not driver.capabilities.sets_up:
                message = f"jobs of the driver {driver.name} have no setup"
                raise refuse("failed-precondition", message, field="$.run.setup")
            if run.data and not driver.capabilities.sets_up:
                raise refuse(
                    "failed-precondition", f"jobs of the driver {driver.name} have no data", field="$.run.data"
                )
            self._check_reach(driver, attempt)
            driver.check_block(attempt.request)
            attempt.config = driver.read_config(attempt.request)
        except Refused as no:
            raise _marked(no) from None
        except Exception as error:  # any request may make any driver fail
            raise refuse("internal", NOT_HERE + self._log_broken(driver, error)) from None
        self._check_request(driver, attempt.request.active_alone)

    def _check_request(self, driver: Driver, request: Request) -> None:
        """Have the driver check a request. Raises `Refused`, saying whether another worker may run the request."""
        try:
            driver.check(request)
        except Refused as no:
            raise _marked(no) from None
        except Exception as error:  # any request may make any driver fail
            raise refuse("internal", NOT_HERE + self._log_broken(driver, error)) from None

    @staticmethod
    def _check_reach(driver: Driver, attempt: Attempt) -> None:
        """Raise Refused if this worker gives the job no ports, or cannot look whether it is ready."""
        run = attempt.request.workload
        if not run.ports and run.ready is None:
            return
        field = "$.run.ports" if run.ports else "$.run.ready"
        if not driver.can().reaches:
            message = f"jobs of the driver {driver.name} have no ports here, and nothing looks whether they are ready"
            raise refuse("failed-precondition", message, field=field)
        port = run.ready.port if run.ready is not None else ""
        if port.isdigit() and not driver.reaches_host_ports(attempt.tenant, attempt.request):
            message = f"the job has a network of its own, so port {port} of its worker is not the job's"
            raise refuse("failed-precondition", f"{message}: name one of its own ports, as PORT", field=field)

    def _send_renew(self, command: SendRenew) -> None:
        if self.disk is not None:
            self.disk.look()
        if not self.journal.is_in_place():
            self.say(Log("error", "state-gone", STATE_GONE))
        self.leader.send_renew(command)

    def _on_session_live(self, command: SessionLive) -> None:
        self.journal.live(command.ledger)
        asked_s, given_s = self.settings.lease_s, self.attempts.session.lease_s
        if asked_s not in (0, given_s):
            told = f"lease_s asks for {asked_s:g} s, and the scheduler gives {given_s:g} s"
            self.say(Log("warning", "other-lease", f"{told}: its lease_s and lease_most are the bounds"))
        if self.where:
            gpus = many(len(self.devices), "GPU")
            log.info("joined as %s, %s, at %s; moorage %s", self.worker, gpus, self.where, build())
            if self.policy.leaves_root_open and not self.inventory.simulated:
                log.warning("%s: %s; %s", self.worker, ROOT_OPEN, ROOT_FIX)

    def _on_draining(self, command: Draining) -> None:
        if self.lender is not None:
            self.lender.drain(command.draining, command.within_s)

    def _on_well(self, command: Well) -> None:
        slots = self.watch.well(command.slots, command.n, self.host.now())
        if not slots:
            return
        self.claims.open(slots)
        self.say(Log("warning", "said-well", f"slots {slots} are in use again because an operator said so"))
        self._execute(self.attempts.handle(SaidWell(slots), self.host.now()))

    # -------------------------------------------------------------------------------------- commands: the drivers

    def _start_attempts(self, command: StartAttempts) -> None:
        driver = self.drivers[command.driver]
        if driver.capabilities.outlives_agent:
            self.journal.flush()  # after a restart the journal must know every attempt of a driver that outlives us
            if self.journal.is_behind:
                why = self._no_start()
                self.enqueue(NotStarted([(attempt.name, why) for attempt in command.attempts]))
                return
        ready: list[tuple[Attempt, Item | None]] = []
        in_file: list[Attempt] = []
        for attempt in command.attempts:
            run = attempt.request.workload
            if isinstance(run.items, ItemsFile):
                in_file.append(attempt)
                continue
            try:
                ready.append((attempt, self.items.at_hand(run, attempt.replica)))
            except ItemRefused as no:
                self.enqueue(never_ran(attempt.name, no))
        self._start_ready(driver, ready)
        self._item_starts.begin(in_file)

    def _start_with_items(self, attempts: list[tuple[Attempt, Item]]) -> None:
        """Start attempts of one driver, each with its item, but for those that are over meanwhile."""
        held = self.attempts.held
        ready = [each for each in attempts if held.get(each[0].name) is each[0] and each[0].phase == "starting"]
        self._start_ready(self.drivers[attempts[0][0].driver], ready)

    def _start_ready(self, driver: Driver, ready: Sequence[tuple[Attempt, Item | None]]) -> None:
        """Have the driver start these attempts, each with its item if it has one."""
        assignments: list[Assignment] = []
        for attempt, item in ready:
            try:
                assignments.append(self._assignment(driver, attempt, item))
            except MoorageError as no:
                self.enqueue(never_ran(attempt.name, no))
            except Exception as error:  # an earlier agent accepted it, perhaps with other settings of the driver
                self.enqueue(StartFailed([(attempt.name, CODE_CANNOT_START, carried(str(error)))]))
        if not assignments:
            return
        # a foreign driver starts them one by one: if it raises, it is clear which start failed
        for part in [[each] for each in assignments] if driver.is_foreign else [assignments]:
            if broke := self.call_driver(driver, partial(driver.start, part)):
                failed = [(each.name, CODE_CANNOT_START, broke) for each in part]
                self.enqueue(StartFailed(failed))
        self._note_memory(driver, assignments)

    def _assignment(self, driver: Driver, attempt: Attempt, item: Item | None) -> Assignment:
        """Return what the driver needs to run an attempt. Raises what the driver does about its `config`, ItemRefused,
        and what `_check_request` raises of the command with the item in it."""
        request, devices = attempt.request.active_alone, self.devices
        if attempt.config is UNCHECKED:
            attempt.config = driver.read_config(attempt.request)
        if item is not None:
            request = with_item(request, item)
            self._check_request(driver, request)
        return Assignment(
            attempt.name,
            request,
            [devices[slot] for slot in attempt.slots],
            attempt.place.mode,
            attempt.start or self.claims.start_alone(attempt),
            attempt.place.traceparent,
            None if attempt.ends_at_s is None else max(0.0, attempt.ends_at_s - self.host.now()),
            attempt.config,
            self.settings.shows_uuids(devices),
            list(attempt.ports),
            item,
            self.worker,
            attempt.place.accepted_ms,
            checkpoints=attempt.place.checkpoints,
            untold=attempt.place.untold,
        )

    def _note_memory(self, driver: Driver, assignments: list[Assignment]) -> None:
        """Publish, for clients that follow these attempts, that their memory is no limit here, if it is none."""
        asked = [each for each in assignments if (part := each.request.resources) is not None and part.memory_mib]
        if not asked or not self.settings.stream_output or self.reporter.limits_memory(driver):
            return
        for each in asked:
            self._publish(each.name, encode(Output(each.name[3], "err", 0, "", note=MEMORY_COUNTED)))

    def _end_attempt(self, command: EndAttempt) -> None:
        driver, name = self.drivers[command.attempt.driver], command.attempt.name
        if self._item_starts.end(name, command.why):
            return
        end = partial(driver.end, name, command.grace_s, command.why)
        if command.notice_s > 0:
            end = partial(driver.end_with_notice, name, command.grace_s, command.why, command.notice_s)
        if self.call_driver(driver, end):
            self.enqueue(Stuck([name]))  # it is unknown whether the attempt will end

    def _resize_attempts(self, command: ResizeAttempts) -> None:
        for attempt in command.attempts:
            driver, gpu = self.drivers[attempt.driver], attempt.request.effective_gpu
            if driver.capabilities.outlives_agent:
                self.journal.placed([attempt.place])
            if gpu is not None and gpu.share is not None and attempt.phase != "claimed":  # a claimed one starts with it
                share = gpu.share if driver.limits is None else limited(gpu.share, attempt.place.mode)
                self.call_driver(driver, partial(driver.resize, attempt.name, share))
            limit_s = attempt.request.workload.timeout_s
            if limit_s is not None and attempt.phase != "claimed" and driver.can().relimits:
                self.call_driver(driver, partial(driver.relimit, attempt.name, limit_s))

    def _freeze_attempt(self, command: FreezeAttempt) -> None:
        attempt = command.attempt
        driver, name = self.drivers[attempt.driver], attempt.name
        if attempt.sleeps_itself:
            self.engines.ask(attempt, on=command.on)
            return

        def step() -> None:
            assert isinstance(driver, Freezes), "its capabilities say that it freezes"
            driver.freeze(name, attempt.slots) if command.on else driver.resume(name)

        if broke := self.call_driver(driver, step):
            self.enqueue(FreezeAnswered([(name, "frozen" if attempt.frozen else "running", broke)]))

    def _run_commands(self, command: RunCommands) -> None:
        for asked in command.execs:
            self.streams.open(asked)
        for signal in command.signals:
            attempt = self.attempts.held.get(name_in(signal))
            if attempt is not None and attempt.phase == "running":
                driver = self.drivers[attempt.driver]
                self.call_driver(driver, partial(driver.signal, attempt.name, signal.signal))

    def _try_lease(self, command: TryLease) -> None:
        why, attempt = "", command.attempt
        try:
            self.watch.check_foreign(attempt.slots)
            self.claims.take_back(attempt)
        except SlotsRefused as no:
            why = f"{no.reason} {','.join(map(str, no.slots))}"
        except MoorageError as no:
            why = no.problem.message
        self._execute(self.attempts.handle(LeaseAnswered(attempt, why), self.host.now()))

    def _forget(self, command: Forget) -> None:
        for driver in self.drivers.values():
            names = [attempt.name for attempt in command.attempts if attempt.driver == driver.name]
            if names:
                self.call_driver(driver, partial(driver.forget, names))

    def _note_checkpoints(self, command: CheckpointsNoted) -> None:
        for driver in self.drivers.values():
            names = [attempt.name for attempt in command.attempts if attempt.driver == driver.name]
            if names:
                self.call_driver(driver, partial(driver.checkpoints_noted, names))

    def _sets_count(self, command: SetsCount) -> None:
        held = self.attempts.held
        for each in command.items:
            if (attempt := held.get(name_in(each))) is not None:
                driver = self.drivers[attempt.driver]
                self.call_driver(driver, partial(driver.sets_count, attempt.name, each.digests, earlier=each.earlier))

    def _tell_sets(self, command: TellSets) -> None:
        for driver in self.drivers.values():
            self.call_driver(driver, driver.tell_sets)

    def _forget_strays(self, event: Ended) -> None:
        for name, _, _ in event.items:
            driver = self._strays.pop(name, None)
            if driver is not None:
                self.call_driver(driver, partial(driver.forget, [name]))
        if not self._strays:
            self.claims.look_for_free()
            self.queue.append(StraysOver())

    def _set_fence(self, command: SetFence) -> None:
        for driver in self.drivers.values():
            self.call_driver(driver, partial(driver.set_fence, command.deadline_s, command.grace_s))

    def call_driver(self, driver: Driver, step: Callable[[], object]) -> str:
        """Call a driver. If a foreign driver raises, return the error in one line, else "".

        A job that a foreign driver fails on must not end the worker and with it all other jobs. In a driver of moorage
        an exception is a defect, so it is raised.
        """
        try:
            step()
        except Exception as error:
            if not driver.is_foreign:
                raise
            return self._log_broken(driver, error)
        return ""

    def _log_broken(self, driver: Driver, error: Exception) -> str:
        """Log an exception of a driver; return it in one line, for the job's owner."""
        at = traceback.extract_tb(error.__traceback__)[-1]
        broke = carried(
            f"the driver {driver.name} broke: {type(error).__name__}: {error} ({at.name}, line {at.lineno})"
        )
        self.say(Log("error", "driver-broke", broke))
        return broke

    def _publish(self, name: AttemptName, payload: bytes) -> None:
        self.reporter.usage.stillness.note_output(name, self.host.now())
        tenant, job, replica = name[:3]
        self.host.post(self.subjects.log(tenant, job, replica), payload)


def _marked(no: Refused) -> Refused:
    """Return a driver's refusal of a request with its mark: whether another worker may run the request."""
    if isinstance(no, LacksHere) or no.problem.fault != "caller":
        return no
    mark = CANNOT_RUN if no.problem.code == "invalid-argument" else NOT_HERE
    return refuse(no.problem.code, mark + no.problem.message)
