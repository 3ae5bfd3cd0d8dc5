"""Share the agent process's one connection to its supervisor among all drivers of all its workers.

The link reconnects by itself. If the supervisor closed the socket but lives, its jobs live on. If there is another
supervisor, all jobs of the former one are dead, and the new one reports those of which no process is left. A supervisor
that falls silent is killed together with its jobs (parent-death signal and cgroup), because a job that cannot be ended
must not outlive its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import DRIVER_DEFAULT, Capabilities
from moorage.schemas.errors import UPGRADED, MoorageError, problem, refuse
from moorage.system.framing import FrameTooLarge
from moorage.worker.attempt.output_cleaner import OutputBounds, OutputCleaner
from moorage.worker.supervisor.client import (
    Answer,
    Supervised,
    SupervisorError,
    SupervisorGone,
    SupervisorRefused,
)
from moorage.worker.supervisor.protocol import (
    JOURNAL_NAME,
    SHUTS_DOWN,
    EndAttempt,
    Ended,
    Event,
    Listed,
    Output,
    StartAttempt,
    Started,
)

RETRY_S: Final = 1.0
#: how long to wait for jobs that no worker of this process can end; a process stuck in the kernel may take for ever
END_S_MAX: Final = 15.0
#: the reason for a job that ended with its whole worker, by `moorage up` or a service manager
WORKER_STOPPED: Final = "its worker was stopped"
#: the reason to report for attempts whose end no leader has asked for, by the `why` of their ends
UNASKED: Final = {SHUTS_DOWN: WORKER_STOPPED, UPGRADED: UPGRADED, "fence": "fence"}
#: attempts in one frame of a longer start
START_ATTEMPTS_MAX: Final = 512
#: attempts that wait for a supervisor to come back; further starts fail at once
PENDING_MAX: Final = 4096
#: requests that wait for it: several of each of the attempts that a supervisor has; the oldest is dropped first
AGAIN_MAX: Final = 65536

#: sends a request
_Ask: TypeAlias = Callable[[Supervised], "asyncio.Future[Answer]"]

log = logging.getLogger("moorage.worker")


class SupervisorMissing(MoorageError):
    """The supervisor on the state folder cannot be started, reached, or used."""

    def __init__(self, state: Path, why: str) -> None:
        super().__init__(
            problem(
                "failed-precondition",
                f"the supervisor on {state} cannot be used: {why}",
                found=str(state),
                next="see supervisor.log in that folder",
            )
        )


class Listener(Protocol):
    """Gets the events of one owner, a driver of a worker. Keys are without the prefix of their owner."""

    def on_event(self, key: str, event: Event) -> None: ...

    def on_events_over(self) -> None:
        """Act on the events since the last call: `on_event` got all that came together."""

    def on_replaced(self) -> None:
        """Take note that there is another supervisor than before; `on_listed` follows."""

    def on_listed(self, listed: Sequence[tuple[str, str, Event | None]]) -> None:
        """Take all that the supervisor has of this owner after the link has reconnected: key, state, event of each.

        The state is waiting, running, ended or unproven; the event is the one that reported it, None for waiting.
        """

    def on_start_refused(self, keys: Sequence[str], why: str) -> None: ...


def owner_of(worker: str, driver: str) -> str:
    """Return the name that a driver of a worker has at the supervisor, for its attempts and its fence."""
    return worker if driver == DRIVER_DEFAULT else f"{worker}@{driver}"


def key_of(owner: str, name: AttemptName) -> str:
    """Return the key of an attempt at the supervisor; `owner` is from `owner_of`."""
    tenant, job, replica, attempt, fence = name
    return f"{owner}|{tenant}/{job}/{replica}/{attempt}/{fence}"


def name_of(key: str) -> AttemptName:
    """Return the attempt of a key with or without its owner."""
    tenant, job, replica, attempt, fence = key.rpartition("|")[2].split("/")
    return (tenant, job, int(replica), int(attempt), int(fence))


class SupervisorLink:
    """The connection to the supervisor, shared by its owners: drivers of workers, named by `owner_of`.

    Each `open` needs its `close`. A request made while the supervisor is away is made again once it is back, for it may
    be the same one; an attempt to start is then refused, or missing in `on_listed`.
    """

    def __init__(
        self,
        state: Path,
        arguments: Sequence[str] = (),
        bounds: OutputBounds | None = None,
        on_broken: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Set the link up, without connecting. `arguments` are those of a supervisor that the link starts.

        `on_broken` gets an exception that ends the reading of events: then no end of a job would be known.
        """
        self.state = state
        self._on_broken = on_broken
        self.boot = ""
        self.keeper = OutputCleaner(state, bounds or OutputBounds())
        self._arguments = arguments
        self._supervised: Supervised | None = None
        self._listeners: dict[str, Listener] = {}
        self._unheard: set[str] = set()  # owners whose attempts had events while they had no listener
        self._fences: dict[str, tuple[float, float]] = {}
        self._fence: tuple[float, float] | None = None
        self._pending: list[StartAttempt] = []
        #: what to call if each is refused, and the request to make again if the supervisor is lost first
        self._unanswered: dict[asyncio.Future[Answer], tuple[Callable[[str], None], _Ask | None]] = {}
        self._again: deque[_Ask] = deque(maxlen=AGAIN_MAX)
        self._pump: asyncio.Task[None] | None = None
        self._sweeps: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    @property
    def pid(self) -> int:
        """The supervisor's pid; 0 while the link is not connected."""
        return self._supervised.identity.pid if self._supervised is not None else 0

    @property
    def controllers(self) -> tuple[str, ...]:
        """The cgroup controllers that limit attempts here; empty while the link is not connected."""
        return self._supervised.controllers if self._supervised is not None else ()

    @property
    def device_fence(self) -> str:
        """How the kernel can refuse devices to attempts: `cgroup2`, `cgroup1`; empty if not, or not connected."""
        return self._supervised.device_fence if self._supervised is not None else ""

    @property
    def no_device_fence(self) -> str:
        """Why the kernel cannot refuse devices to attempts; empty if it can."""
        return self._supervised.no_device_fence if self._supervised is not None else "the supervisor is away"

    @property
    def takes(self) -> tuple[str, ...]:
        """Which later requests the supervisor takes, as its hello says; empty while the link is not connected."""
        return self._supervised.takes if self._supervised is not None else ()

    def here(self, can: Capabilities) -> Capabilities:
        """Return a driver's capabilities without those that the supervisor here, of an earlier release, does not
        take."""
        takes = self.takes
        return msgspec.structs.replace(
            can, relimits=can.relimits and "relimit" in takes, signals=can.signals and "signal" in takes
        )

    async def open(self, owner: str, listener: Listener) -> list[tuple[str, str, Event | None]]:
        """Join an owner; return key, state and event of each of its attempts, as `Listener.on_listed` gets them.

        Connect first if no owner has joined, to a new supervisor if none runs. Raises SupervisorMissing if that fails,
        and SupervisorError if the supervisor is lost meanwhile. Wait while the link reconnects.
        """
        async with self._opening:
            if self._pump is None:
                self._supervised = await self._connect()
                self.boot = self._supervised.identity.boot
                await self._look_at_output(self._supervised)
                self._pump = asyncio.get_running_loop().create_task(self._pump_events())
                self._sweeps = asyncio.get_running_loop().create_task(self.keeper.run())
                self._pump.add_done_callback(self._over)
                self._sweeps.add_done_callback(self._over)
            if self._supervised is None:
                raise SupervisorGone("the supervisor is away")
            while True:
                self._unheard.discard(owner)
                listed = await self._supervised.list()
                if owner not in self._unheard:  # else the list may be from before that event
                    break
            self._listeners[owner] = listener
            return _of_owner(owner, listed)

    async def listed(self, owner: str) -> list[tuple[str, str, Event | None]] | None:
        """Return what the supervisor has of this owner, as `open` does; None if it does not answer now."""
        if self._supervised is None:
            return None
        try:
            return _of_owner(owner, await self._supervised.list())
        except SupervisorError:
            return None

    async def end_others(self, spared: Callable[[str], bool]) -> None:
        """End and forget jobs that an agent with other settings left, except those of owners that are `spared`.

        Call it before any worker of this process joins: no worker would report the ends of those jobs, or end them when
        their lease is over. A supervisor that speaks another protocol is replaced first, and all its jobs end. Raises
        SupervisorMissing, and Refused if one has not ended after `END_S_MAX` seconds.
        """
        if not (self.state / JOURNAL_NAME).exists():
            return
        supervised = await self._connect(replaces_other=True)
        try:
            listed = await supervised.list()
            ended = {event.key for event in listed.ended}
            others = {key for key in {*listed.living, *ended} if not spared(key.partition("|")[0])}
            if not others:
                return
            if left := others - ended:
                log.error(
                    "%d jobs run for a worker or driver that this agent does not have: the agent ends them "
                    "before it joins",
                    len(left),
                )
                await supervised.end([EndAttempt(key=key, grace_s=0.0, why="stray") for key in left])
                async with asyncio.timeout(END_S_MAX):
                    while left:
                        left -= {event.key for event in await supervised.next_events() if isinstance(event, Ended)}
            await supervised.forget(others)
        except TimeoutError:
            raise refuse(
                "failed-precondition",
                f"{len(left)} jobs of an agent with other settings cannot be ended",
                found=min(left),
                next="start the agent with those settings again, or end the jobs' processes",
            ) from None
        except SupervisorError as error:
            raise SupervisorMissing(self.state, str(error)) from error
        finally:
            supervised.close()

    async def close(self, owner: str) -> None:
        """Remove an owner; after the last one, disconnect.

        The attempts live on, and so does the supervisor; only a supervisor without attempts then ends.
        """
        self._listeners.pop(owner, None)
        self._fences.pop(owner, None)
        if self._listeners:
            self._send_fence()
            return
        if self._unanswered:
            await asyncio.wait(self._unanswered, timeout=RETRY_S)
        for task in (self._pump, self._sweeps):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,))  # its exception was passed on already
        self._pump = self._sweeps = None
        self._again.clear()
        if self._supervised is not None:
            with contextlib.suppress(SupervisorError, TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._supervised.shutdown_if_idle()
            self._supervised.close()
            self._supervised = None

    # -- requests: each is written at once, in order; its outcome comes as an event

    def start(self, attempts: list[StartAttempt]) -> None:
        if self._supervised is None:
            room = PENDING_MAX - len(self._pending)
            self._pending += attempts[:room]
            self._start_refused(attempts[room:], "the supervisor is away")
            return
        for at in range(0, len(attempts), START_ATTEMPTS_MAX):
            self._start(self._supervised, attempts[at : at + START_ATTEMPTS_MAX])

    def _start(self, supervised: Supervised, attempts: list[StartAttempt]) -> None:
        """Send these attempts in one frame, or in several if they are too large for one."""
        try:
            self._heed(supervised.start(attempts), partial(self._start_refused, attempts))
        except FrameTooLarge as error:
            half = len(attempts) // 2
            if not half:
                self._start_refused(attempts, str(error))
                return
            self._start(supervised, attempts[:half])
            self._start(supervised, attempts[half:])
        except SupervisorRefused as error:
            self._start_refused(attempts, str(error))
        except SupervisorGone:
            pass  # the next supervisor's list says what became of them

    async def contain(self, attempt: StartAttempt, container: str) -> None:
        """Have the supervisor take on a container; once this returns, start the container.

        Raises SupervisorError, also while the supervisor is away.
        """
        if self._supervised is None:
            raise SupervisorGone("the supervisor is away")
        await self._supervised.contain(attempt, container)

    def ran(self, key: str, pid: int) -> None:
        """Inform the supervisor that the engine has started this attempt's container; `pid` 0 if it is over already."""
        self._begin(lambda supervised: supervised.ran(key, pid))

    def removed(self, key: str) -> None:
        """Inform the supervisor that the engine has removed the container of this attempt, so it cannot start."""
        self._begin(lambda supervised: supervised.removed([key]))

    def end(self, key: str, grace_s: float, why: str, notice_s: float = 0.0) -> None:
        self._pending = [attempt for attempt in self._pending if attempt.key != key]
        attempt = EndAttempt(key=key, grace_s=grace_s, why=why, notice_s=notice_s)
        self._begin(lambda supervised: supervised.end([attempt]))

    def relimit(self, key: str, timeout_s: float) -> None:
        """Give a running attempt another time limit, in seconds from its start."""
        self._begin(lambda supervised: supervised.relimit(key, timeout_s))

    def signal(self, key: str, signal: str) -> None:
        """Send a signal to processes of an attempt that handle it, once: it is not sent to a later supervisor."""
        self._begin(lambda supervised: supervised.send_signal(key, signal), is_lasting=False)

    def forget(self, keys: list[str]) -> None:
        """Forget attempts whose ends are dealt with; their output stays as long as the keeper's limits allow."""
        self._begin(lambda supervised: supervised.forget(keys))

    def set_fence(self, owner: str, deadline_s: float, grace_s: float) -> None:
        """Set an owner's deadline. The earliest deadline of all owners holds, so a partition of one fences all.

        The next supervisor gets it when this one is away.
        """
        self._fences[owner] = (deadline_s, grace_s)
        self._send_fence()

    # -- inside

    async def _connect(self, *, replaces_other: bool = False) -> Supervised:
        # only a start replaces one: two agents of one folder and two releases would end each other's jobs for ever
        try:
            return await Supervised.connect(self.state, arguments=self._arguments, replaces_other=replaces_other)
        except (SupervisorError, OSError) as error:  # no process or descriptor left, or a full disk
            raise SupervisorMissing(self.state, str(error)) from error

    async def _look_at_output(self, supervised: Supervised) -> None:
        """Scan the output folder first, then list the attempts: an attempt that starts in between must not be cleared.

        Raises SupervisorMissing if the folder cannot be read, and SupervisorError.
        """
        try:
            scanned = await asyncio.to_thread(self.keeper.scan)
        except OSError as error:
            raise SupervisorMissing(self.state, str(error)) from error
        listed = await supervised.list()
        self.keeper.begin(scanned, listed.living)

    def _send_fence(self) -> None:
        """Send the earliest deadline, if there is one and this supervisor does not have it yet."""
        fence = min(self._fences.values(), default=None)
        if fence is not None and fence != self._fence and self._supervised is not None:
            self._fence = fence
            self._begin(lambda supervised: supervised.fence(*fence), is_lasting=False)

    def _start_refused(self, attempts: Sequence[StartAttempt], why: str) -> None:
        keys: dict[str, list[str]] = {}
        for attempt in attempts:
            owner, _, key = attempt.key.partition("|")
            keys.setdefault(owner, []).append(key)
        for owner, of_owner in keys.items():
            if owner in self._listeners:
                self._listeners[owner].on_start_refused(of_owner, why)

    def _begin(self, ask: _Ask, *, is_lasting: bool = True) -> None:
        """Send a request, in the order of the calls. A refusal is only logged.

        One that `is_lasting` is sent again if the supervisor, or the connection to it, is lost before the answer: the
        same one may go on, and does nothing about a request that it has carried out.
        """
        if self._supervised is None:
            if is_lasting:
                self._again.append(ask)
            return
        try:
            answer = ask(self._supervised)
        except SupervisorGone:
            if is_lasting:
                self._again.append(ask)
        except FrameTooLarge as error:
            log.error("the supervisor cannot be reached: %s", error)
        else:
            self._heed(answer, partial(log.error, "the supervisor refused: %s"), ask if is_lasting else None)

    def _heed(self, answer: asyncio.Future[Answer], refused: Callable[[str], None], again: _Ask | None = None) -> None:
        """Call `refused` with the reason if the supervisor refuses. A callback does it: a task would delay a start."""
        self._unanswered[answer] = refused, again
        answer.add_done_callback(self._on_answer)

    def _on_answer(self, answer: asyncio.Future[Answer]) -> None:
        refused, again = self._unanswered.pop(answer)
        error = answer.exception()
        if isinstance(error, SupervisorRefused):
            refused(str(error))
        elif error is not None and again is not None:  # for a start, the next supervisor's list says what became of it
            self._again.append(again)

    def _over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the agent can no longer read the events of the supervisor", exc_info=error)
            if self._on_broken is not None:
                self._on_broken(error)

    async def _pump_events(self) -> None:
        while True:
            supervised = self._supervised
            assert supervised is not None
            try:
                self._dispatch(await supervised.next_events())
            except SupervisorGone as gone:
                log.error("the connection to the supervisor is lost: %s", gone)
                self._supervised = None
                if gone.silent:
                    supervised.kill()
                supervised.close()
                async with self._opening:
                    await self._reconnect()

    def _dispatch(self, events: Sequence[Event]) -> None:
        heard: dict[str, Listener] = {}
        for event in events:
            if isinstance(event, Ended):
                self.keeper.ended(event.key)
            elif isinstance(event, Started):
                self.keeper.started(event.key)
            owner, _, key = event.key.partition("|")
            listener = self._listeners.get(owner)
            if listener is not None:
                heard[owner] = listener
                listener.on_event(key, event)
            elif not isinstance(event, Output):
                self._unheard.add(owner)
        for listener in heard.values():
            listener.on_events_over()

    async def _reconnect(self) -> None:
        while True:
            supervised: Supervised | None = None
            try:
                supervised = await self._connect()
                await self._look_at_output(supervised)
                listed = await supervised.list()
                break
            except (MoorageError, SupervisorError) as error:
                if supervised is not None:
                    supervised.close()  # a supervisor takes few connections
                log.error("%s", error)
                pending, self._pending = self._pending, []
                self._start_refused(pending, "the supervisor is away")
                await asyncio.sleep(RETRY_S)
        boot = supervised.identity.boot
        replaced, self.boot = boot != self.boot, boot
        self._supervised = supervised
        self._fence = None
        self._send_fence()
        asks, self._again = self._again, deque(maxlen=AGAIN_MAX)
        for ask in asks:
            self._begin(ask)
        # attempts requested meanwhile are in no list, so their listeners report them as lost: they must not start later
        self._pending.clear()
        for owner, listener in list(self._listeners.items()):
            if replaced:
                listener.on_replaced()
            listener.on_listed(_of_owner(owner, listed))


def _of_owner(owner: str, listed: Listed) -> list[tuple[str, str, Event | None]]:
    prefix = f"{owner}|"
    every: list[tuple[str, str, Event | None]] = [
        *((key, "waiting", None) for key in listed.waiting),
        *((event.key, "running", event) for event in listed.running),
        *((event.key, "ended", event) for event in listed.ended),
        *((event.key, "unproven", event) for event in listed.unproven),
    ]
    return [(key[len(prefix) :], state, event) for key, state, event in every if key.startswith(prefix)]
