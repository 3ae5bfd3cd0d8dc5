"""Run one state folder: its attempts, the agents connected to it, and the journal that outlives both."""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

from moorage.system.boottime_timer import BoottimeTimer
from moorage.system.cgroup import CgroupBase
from moorage.system.device_fence import ControllerFences, fences_here
from moorage.system.proctree import boot_id, boottime_s, read_process
from moorage.worker.supervisor.child import StartRefused, signal_number
from moorage.worker.supervisor.containers import ID
from moorage.worker.supervisor.former_attempts import FormerAttempts
from moorage.worker.supervisor.jobs import CLEAR_DELAY_S_MAX, CLEAR_DELAY_S_MIN, UNPROVEN_AFTER_S, Jobs
from moorage.worker.supervisor.journal import (
    Forgotten,
    Over,
    Record,
    encoded,
    open_journal,
    read_journal,
    records_of,
)
from moorage.worker.supervisor.launcher_client import Launcher
from moorage.worker.supervisor.log import log
from moorage.worker.supervisor.mps_notice import NOTICE_S
from moorage.worker.supervisor.protocol import (
    JOURNAL_NAME,
    KEY_CHARS_MAX,
    PROTOCOL,
    SHUTS_DOWN,
    TAKES,
    Contain,
    Done,
    End,
    Ended,
    Event,
    Fence,
    Forget,
    Hello,
    List,
    Listed,
    Message,
    Ping,
    Ran,
    Refused,
    Relimit,
    Removed,
    Request,
    Shutdown,
    Signal,
    Start,
)
from moorage.worker.supervisor.server import Connection
from moorage.worker.supervisor.state_folder import state_mark

CONNECTIONS_MAX: Final = 8
LINGER_S: Final = 30.0
"""A supervisor without agents and attempts waits this long for its agent, then ends."""


class Supervisor:
    """The supervisor of one state folder. Make it inside the running loop."""

    def __init__(
        self,
        state: Path,
        cgroups: CgroupBase | None,
        descriptors: tuple[int, int],
        linger_s: float = LINGER_S,
        program: int = -1,
        notice_s: float = NOTICE_S,
    ) -> None:
        """Read the journal, and begin to end what a former supervisor left.

        `program` is the compiled launcher's descriptor, or -1; `notice_s` is how long an end waits for an MPS daemon.
        Raises `OSError`, `NotThisForm`.
        """
        self.finished = asyncio.Event()
        self._linger_s = linger_s
        self._linger_timer: asyncio.TimerHandle | None = None
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._cgroups = cgroups
        self._connections: list[Connection] = []
        self._records: list[Record] = []
        self._flushing = False
        self._shutdowns: list[tuple[Connection, int]] = []
        self._shutting_down = False
        machine_boot = boot_id()
        left = read_journal(state / JOURNAL_NAME)
        self._former = FormerAttempts(machine_boot, {key: entry for key, entry in left.items() if entry.ended is None})
        self._former_since_s = self._loop.time()
        self._former_told = False
        self._journal = open_journal(state / JOURNAL_NAME, records_of(left))
        mark = state_mark(state)
        self._fences, no_fence = fences_here(f"moorage-{mark}", cgroups)
        self.jobs = Jobs(
            state=state,
            state_mark=mark,
            boot_id=machine_boot,
            cgroups=cgroups,
            fences=self._fences,
            descriptors=descriptors,
            emit=self._emit,
            record=self._records.append,
            write_ahead=self._write_ahead,
            launcher=Launcher(program, mark),
            notice_s=notice_s,
        )
        self.jobs.ended.update((key, entry.ended) for key, entry in left.items() if entry.ended is not None)
        me = read_process(os.getpid())
        assert me is not None
        self._hello = Hello(
            protocol=PROTOCOL,
            pid=me.pid,
            boot_id=machine_boot,
            start_ticks=me.start_ticks,
            cgroup=cgroups.path if cgroups is not None else None,
            controllers=cgroups.controllers if cgroups is not None else (),
            device_fence=self._fences.kind if self._fences is not None else "",
            no_device_fence=no_fence,
            takes=TAKES,
        )
        if cgroups is not None:
            cgroups.kill_former()
        self._fence_grace_s = 0.0
        self._fence_timer = BoottimeTimer(self._loop, self._fence_passed)
        self._notice_timer = BoottimeTimer(self._loop, self._fence_is_near)
        self._clear_former(CLEAR_DELAY_S_MIN)
        self._linger()

    # -- messages, and the records of the journal

    def _emit(self, event: Event) -> None:
        for connection in self._connections:
            connection.send(event)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write the journal, then send this turn's messages: nothing that was sent may be lost with this process."""
        self._flushing = False
        if self.finished.is_set():
            return
        self._journal_records()
        for connection in list(self._connections):
            connection.flush()
        if not self._connections and self._linger_timer is None:
            self._linger()  # the last attempt may have ended
        if self._shutting_down and not self.jobs.attempts:
            self._finish()

    def _journal_records(self) -> None:
        if not self._records:
            return
        records = list(self._records)
        self._records.clear()
        try:
            self._journal.append(encoded(records))
            if self._journal.is_large:
                self._journal.replace(encoded(records_of(read_journal(self._state / JOURNAL_NAME))))
        except OSError as error:
            # the next supervisor reports an end that is not in the journal as `supervisor-died`
            log(f"journal: {error}")

    def _write_ahead(self, records: list[Record]) -> None:
        self._journal_records()
        self._journal.append(encoded(records))

    # -- the former supervisor's attempts

    def _clear_former(self, delay_s: float) -> None:
        proven: list[Ended] = []
        try:
            proven = self._former.clear(boottime_s())
        except OSError as error:  # out of descriptors: try again later
            log(f"cannot see what the last supervisor left: {error}")
        for ended in proven:
            self.jobs.ended[ended.key] = ended
            self._records.append(Over(ended=ended))
            self._emit(ended)
        if not self._former.waiting or self.finished.is_set():
            return
        if not self._former_told and self._loop.time() - self._former_since_s >= UNPROVEN_AFTER_S:
            self._former_told = True
            for unproven in self._former.found.values():
                self._emit(unproven)
        later_s = min(2 * delay_s, 10 * CLEAR_DELAY_S_MAX)
        self._loop.call_later(delay_s, self._clear_former, later_s)

    # -- connections

    def opened(self, connection: Connection) -> bool:
        """Add a new connection and greet it; return False, and do nothing, if there are too many."""
        if len(self._connections) >= CONNECTIONS_MAX:
            return False
        self._connections.append(connection)
        self._linger()
        connection.send(self._hello)
        self._flush_soon()
        return True

    def closed(self, connection: Connection) -> None:
        """Remove an ended connection; attempts and deadlines stay as they are."""
        if connection in self._connections:
            self._connections.remove(connection)
        self._linger()

    def asked(self, connection: Connection, request: Request) -> None:
        """Carry out one request. The answer is sent after the events that the request causes immediately."""
        answer: Message = Done(n=request.n)
        match request:
            case Start():
                answer = self._start(request)
            case Contain():
                answer = self._contain(request)
            case Ran():
                self.jobs.ran(request.key, request.pid)
            case Removed():
                for key in request.keys:
                    self.jobs.removed(key)
                self._former.removed.update(self._former.waiting.keys() & set(request.keys))
            case End():
                for attempt in request.attempts:
                    grace_s, notice_s = max(0.0, attempt.grace_s), max(0.0, attempt.notice_s)
                    self.jobs.end(attempt.key, "end", grace_s, attempt.why, notice_s)
            case Relimit():
                self.jobs.relimit(request.key, request.timeout_s)
            case Signal():
                answer = self._signal(request)
            case Fence():
                answer = self._fence(request)
            case List():
                answer = self._listed(request.n)
            case Forget():
                self._forget(request)
            case Ping():
                pass
            case Shutdown() if request.idle_only and not self._idle:
                answer = Refused(n=request.n, code="busy", message="it has attempts")
            case Shutdown():
                self._shutdowns.append((connection, request.n))
                self.shut_down(max(0.0, request.grace_s), request.why)
                return
        connection.send(answer)
        # An accepted start is answered together with its outcome, which comes in a moment: an answer at once would wake
        # the agent and take this process's time while the launcher needs a processor.
        if not (isinstance(request, Start) and self.jobs.has_news_due):
            self._flush_soon()

    def _start(self, request: Start) -> Message:
        if self._shutting_down:
            return Refused(n=request.n, code="shutting-down", message="the supervisor is shutting down")
        former = [attempt.key for attempt in request.attempts if attempt.key in self._former.waiting]
        if former:
            return Refused(n=request.n, code="unproven", message=f"not proven over yet: {former[0]}")
        self.jobs.start(request.attempts)
        return Done(n=request.n)

    def _contain(self, request: Contain) -> Message:
        key, code, message = request.attempt.key, "", ""
        if self._shutting_down:
            code, message = "shutting-down", "the supervisor is shutting down"
        elif key in self._former.waiting:
            code, message = "unproven", f"not proven over yet: {key}"
        elif not 0 < len(key) <= KEY_CHARS_MAX or not ID.fullmatch(request.container):
            code, message = "invalid-argument", "no key, or no id of a container"
        else:
            try:
                self.jobs.contain(request.attempt, request.container)
                return Done(n=request.n)
            except StartRefused as refused:
                code, message = refused.stage, refused.message
            except OSError as error:
                code, message = "journal", error.strerror or str(error)
        return Refused(n=request.n, code=code, message=message)

    def _signal(self, request: Signal) -> Message:
        try:
            self.jobs.send_signal(request.key, signal_number(request.signal))
        except StartRefused as refused:
            return Refused(n=request.n, code="invalid-argument", message=refused.message)
        return Done(n=request.n)

    def _fence(self, request: Fence) -> Message:
        deadline_s = request.deadline_boottime_s
        if not (request.grace_s >= 0 and (deadline_s is None or 0 <= deadline_s < 1e9)):
            return Refused(n=request.n, code="invalid-argument", message="deadline or grace out of bounds")
        self._fence_grace_s = request.grace_s
        if deadline_s is None or deadline_s > boottime_s():
            self.jobs.fenced = False
            self._fence_timer.arm(deadline_s)
            self._notice_timer.arm(None if deadline_s is None else deadline_s - self.jobs.notices.seconds)
        else:
            self._fence_timer.arm(None)
            self._notice_timer.arm(None)
            self._fence_passed()
        return Done(n=request.n)

    def _fence_is_near(self) -> None:
        self.jobs.fence_soon(self._fence_grace_s)

    def _fence_passed(self) -> None:
        log("the fence deadline passed")
        self.jobs.fence(self._fence_grace_s)

    def _listed(self, n: int) -> Listed:
        attempts = self.jobs.attempts.values()
        return Listed(
            n=n,
            waiting=tuple(attempt.key for attempt in attempts if not (attempt.confirmed or attempt.given_up)),
            running=tuple(
                self.jobs.started(attempt) for attempt in attempts if attempt.confirmed and not attempt.given_up
            ),
            ended=tuple(self.jobs.ended.values()),
            unproven=(*self.jobs.unproven.values(), *self._former.found.values()),
        )

    def _forget(self, request: Forget) -> None:
        jobs, drop = self.jobs, self._former.drop
        keys = [key for key in request.keys if jobs.ended.pop(key, None) is not None or jobs.give_up(key) or drop(key)]
        if keys:
            self._records.append(Forgotten(keys=tuple(keys)))

    # -- the end

    @property
    def _idle(self) -> bool:
        return not self.jobs.attempts and not self._former.waiting

    def _linger(self) -> None:
        """Finish in `linger_s` from now unless an agent or an attempt is there; each call begins that wait again.

        Ends that no agent has taken stay in the journal, where the next supervisor finds them.
        """
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        if not self._connections and self._idle and not self._shutting_down:
            self._linger_timer = self._loop.call_later(self._linger_s, self._lingered)

    def _lingered(self) -> None:
        self._linger_timer = None
        if not self._connections and self._idle:
            log(f"no agent and no attempt for {self._linger_s:g} s: ending")
            self._finish()

    def shut_down(self, grace_s: float, why: str = SHUTS_DOWN) -> None:
        """End every attempt with its own grace, at most this, then finish.

        With attempts left, finish `UNPROVEN_AFTER_S` after the longest grace. A second call can shorten a grace, but
        not the wait for attempts that are left.
        """
        graces = {key: min(grace_s, attempt.start.grace_s) for key, attempt in self.jobs.attempts.items()}
        if not self._shutting_down:
            self._shutting_down = True
            self._loop.call_later(max(graces.values(), default=0.0) + UNPROVEN_AFTER_S, self._finish)
        for key, own_s in graces.items():
            self.jobs.end(key, "end", own_s, why)
        self._flush_soon()

    def _finish(self) -> None:
        if self.finished.is_set():
            return
        self.finished.set()
        self._journal_records()
        for connection, n in self._shutdowns:
            connection.send(Done(n=n))
        for connection in list(self._connections):
            connection.flush()
            connection.close()
        self._fence_timer.close()
        self._notice_timer.close()
        self.jobs.launcher.close()
        self._journal.close()
        if self._cgroups is not None:
            with contextlib.suppress(OSError):
                self._cgroups.remove()
        if isinstance(self._fences, ControllerFences):
            self._fences.remove()
