"""Run the supervisor's attempts: start them through the launcher, reap, end, and prove their process trees gone.

All of it runs in one event loop on the main thread, because the parent-death signal is bound to the thread.
"""

import asyncio
import contextlib
import errno
import functools
import os
import resource
import signal
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from moorage.system.backoff import Backoff
from moorage.system.cgroup import CgroupBase, own_path
from moorage.system.device_fence import DeviceFences
from moorage.system.proctree import (
    STATE_MARK,
    TICKS_PER_S,
    Process,
    boottime_s,
    children,
    descendants,
    kill_trees,
    marks_of,
    read_environ,
    read_process,
)
from moorage.worker.supervisor.attempt import Attempt, Command, Container, State
from moorage.worker.supervisor.attempt_resources import AttemptResources, pipe, read_exec_report
from moorage.worker.supervisor.capped_output import DRAIN_BYTES_MAX, OutputPump
from moorage.worker.supervisor.checkpoint import AGAIN_S, send_to_takers
from moorage.worker.supervisor.child import StartRefused, check_end, checked_child, signal_number
from moorage.worker.supervisor.containers import Containers, is_over, kill
from moorage.worker.supervisor.journal import Over, Record, Running, Starting
from moorage.worker.supervisor.launcher_client import Launcher, LauncherGone
from moorage.worker.supervisor.log import log
from moorage.worker.supervisor.mps_notice import NOTICE_S, MpsNotices
from moorage.worker.supervisor.protocol import Ended, Event, Output, Proof, Reason, StartAttempt, Started, Unproven
from moorage.worker.supervisor.sigterm import Sigterm, ended_by_it
from moorage.worker.supervisor.terminal import HeldTerminal

RUNNING_MAX: Final = 4096
HELD_MAX: Final = 16384
"""Most attempts running, waiting, and over but not forgotten."""
TURN_ATTEMPTS_MAX: Final = 16
"""Attempts started in one turn of the loop."""
COMMANDS_MAX: Final = 32
"""Commands that run in one attempt at once."""
CONFIRM_S: Final = 1.0
"""A process that is this long before its exec (its cwd may be on a dead network file system) is reported as started."""
UNPROVEN_AFTER_S: Final = 10.0
SIGNAL_TRIES: Final = 8
"""So often it is looked for processes that handle a signal, `AGAIN_S` after each other."""
CLEAR_DELAY_S_MIN: Final = 0.002
CLEAR_DELAY_S_MAX: Final = 0.1


class Jobs:
    """The attempts. `emit` gets events in order; `record` gets the journal's records before those events are sent."""

    def __init__(
        self,
        *,
        state: Path,
        state_mark: str,
        boot_id: str,
        cgroups: CgroupBase | None,
        fences: DeviceFences | None,
        descriptors: tuple[int, int],
        emit: Callable[[Event], None],
        record: Callable[[Record], None],
        write_ahead: Callable[[list[Record]], None],
        launcher: Launcher,
        notice_s: float = NOTICE_S,
    ) -> None:
        self.attempts: dict[str, Attempt] = {}
        self.ended: dict[str, Ended] = {}
        self.unproven: dict[str, Unproven] = {}
        self.fenced = False
        self.launcher = launcher
        self._resources = AttemptResources(state, cgroups, fences)
        self._waiting: deque[Attempt] = deque()
        self._turn: asyncio.Handle | None = None
        self._unresolved: set[Attempt] = set()
        self._descriptors = descriptors
        self._state_mark = state_mark
        self._cgroups = cgroups
        self._emit = emit
        self._record = record
        self._write_ahead = write_ahead
        self._boot_id = boot_id
        self._containers = Containers(self._container_runs, self._clear, self._container_over)
        self.notices = MpsNotices(notice_s)
        self._loop = asyncio.get_running_loop()
        self._by_pid: dict[int, Attempt] = {}
        self.commands: dict[int, Command] = {}  # by pid, which leads their session
        self._killed_sessions: set[int] = set()
        self._parting: dict[str, Attempt] = {}  # ENDING, and the main process is over
        self._clearing: dict[str, Attempt] = {}
        self._clear_backoff = Backoff(CLEAR_DELAY_S_MIN, CLEAR_DELAY_S_MAX)
        self._clear_timer: asyncio.TimerHandle | None = None
        self._spare = _spare()

    # -- starting

    def start(self, starts: tuple[StartAttempt, ...]) -> None:
        """Accept attempts. A known attempt is not started again: its `Started` or `Ended`, if any, is reported again.

        An attempt that cannot be started gets an `Ended`.
        """
        for start in starts:
            if start.key in self.ended:
                self._emit(self.ended[start.key])
            elif start.key in self.attempts:
                if self.attempts[start.key].confirmed:
                    self._emit(self.started(self.attempts[start.key]))
            else:
                self._accept(start)
        if self._turn is None:
            self._start_some()

    @property
    def has_news_due(self) -> bool:
        """Whether the outcome of a start will be reported in a moment."""
        return bool(self._unresolved or self._waiting)

    def _accept(self, start: StartAttempt) -> None:
        environ = {**start.env, STATE_MARK: self._state_mark}
        # `child` has its arguments until its exec; later they are not needed.
        bare = msgspec.structs.replace(start, argv=(), env={})
        attempt = Attempt(start=bare, child=None, marks=marks_of(environ), environ=environ)
        self.attempts[start.key] = attempt
        try:
            if len(self.attempts) > RUNNING_MAX:
                raise StartRefused(errno.EAGAIN, "request", f"the supervisor runs {RUNNING_MAX} attempts")
            if len(self.attempts) + len(self.ended) > HELD_MAX:
                raise StartRefused(errno.EAGAIN, "request", f"the supervisor holds {HELD_MAX} attempts")
            if self.fenced:
                attempt.cause = "fence"
                self._finish(attempt, "never-ran")
                return
            attempt.child = checked_child(start, environ, self._descriptors)
        except StartRefused as refused:
            self._refuse(attempt, refused)
            return
        self._waiting.append(attempt)

    def _start_some(self) -> None:
        """Start the first waiting attempts; the next ones start in a later turn of the loop, so that other work runs
        too.
        """
        asked = []
        for _ in range(min(len(self._waiting), TURN_ATTEMPTS_MAX)):
            attempt = self._waiting.popleft()
            try:
                asked.append((attempt, self._ask_launcher(attempt)))
            except StartRefused as refused:
                self._refuse(attempt, refused)
        for attempt, answer in asked:
            try:
                attempt.pid = self.launcher.answer(answer)
            except OSError as error:
                self._refuse(attempt, StartRefused(error.errno or errno.EIO, "clone", error.strerror or ""))
            except LauncherGone as gone:
                attempt.failure = (errno.ECHILD, "launcher", str(gone))
                self._clear(attempt)  # it may have left a tree
            else:
                self._runs(attempt, attempt.pid)
        self._turn = self._loop.call_soon(self._start_some) if self._waiting else None

    def _ask_launcher(self, attempt: Attempt) -> socket.socket | int:
        """Request an attempt's process; return what `Launcher.answer` needs.

        Raises `StartRefused` if no process will be made.
        """
        assert attempt.child is not None
        passed = self._resources.open(attempt)
        stage = "journal"
        try:
            now_s = boottime_s()
            cgroup = attempt.cgroup.path if attempt.cgroup is not None else ""
            starting = Starting(
                key=attempt.key, boot_id=self._boot_id, boottime_s=now_s, cgroup=cgroup, marks=attempt.marks
            )
            self._write_ahead([starting])
            attempt.started_boottime_s = now_s
            stage = "clone"
            return self.launcher.ask(attempt.child, *passed)
        except OSError as error:
            why = (error.strerror or "") if stage == "clone" else str(error)
            raise StartRefused(error.errno or errno.EIO, stage, why) from None
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def _refuse(self, attempt: Attempt, refused: StartRefused) -> None:
        """Report a start that failed before any of its processes existed."""
        attempt.failure = (refused.errno, refused.stage, refused.message)
        if attempt.cgroup is not None:
            with contextlib.suppress(OSError):
                attempt.cgroup.remove()
        self._finish(attempt, "never-ran")

    def _runs(self, attempt: Attempt, pid: int) -> None:
        attempt.go(State.RUNNING)
        self._record(Running(key=attempt.key, pid=pid))
        self._by_pid[pid] = attempt
        self._unresolved.add(attempt)
        self._loop.add_reader(attempt.confirm, self._on_exec_report, attempt)
        attempt.timers.append(self._loop.call_later(CONFIRM_S, self._resolve, attempt))
        self._set_timers(attempt)

    def _set_timers(self, attempt: Attempt) -> None:
        attempt.runs_from_s = self._loop.time()
        self._set_limit(attempt)

    def _set_limit(self, attempt: Attempt) -> None:
        """Set the timers of an attempt's time limit, and of its checkpoint signal before that or its deadline."""
        start, from_s = attempt.start, attempt.runs_from_s
        if start.timeout_s is not None:
            attempt.timeout_timer = self._loop.call_at(from_s + start.timeout_s, self._timed_out, attempt)
        ends_s = min((end for end in (start.timeout_s, start.ends_in_s) if end is not None), default=None)
        if start.checkpoint_signal is not None and start.checkpoint_before_s is not None and ends_s is not None:
            delay_s = max(0.0, ends_s - start.checkpoint_before_s)
            attempt.checkpoint_timer = self._loop.call_at(from_s + delay_s, self._checkpoint, attempt)

    def relimit(self, key: str, timeout_s: float) -> None:
        """Give a running attempt another time limit, in seconds from its start.

        The checkpoint signal is sent again before the new one, if the attempt got it before the old one. Unknown keys,
        and attempts that are ending, are ignored; one that has not started yet starts with the new limit.
        """
        attempt = self.attempts.get(key)
        if (
            attempt is None
            or timeout_s == attempt.start.timeout_s
            or attempt.state
            not in (
                State.WAITING,
                State.RUNNING,
            )
        ):
            return
        attempt.start = msgspec.structs.replace(attempt.start, timeout_s=timeout_s)
        if attempt.state is State.RUNNING:
            for timer in (attempt.timeout_timer, attempt.checkpoint_timer):
                if timer is not None:
                    timer.cancel()
            attempt.checkpoint_timer = None
            self._set_limit(attempt)

    def send_signal(self, key: str, number: signal.Signals, tries: int = SIGNAL_TRIES) -> None:
        """Send a signal to the topmost processes of a running attempt that handle it.

        While a process of it is just starting a program, that is tried again.
        """
        attempt = self.attempts.get(key)
        if attempt is None or attempt.state is not State.RUNNING or attempt.wait_status is not None:
            return
        assert attempt.pid is not None
        sent = 0
        with contextlib.suppress(OSError):
            sent = send_to_takers(attempt.pid, number) if attempt.confirmed else 0
        if not sent and tries > 1:
            attempt.timers.append(self._loop.call_later(AGAIN_S, self.send_signal, key, number, tries - 1))

    def _on_exec_report(self, attempt: Attempt) -> None:
        """Read the report of the attempt's process; once the process has ended, that pipe has ended too."""
        if attempt.confirm >= 0 and read_exec_report(attempt):
            self._loop.remove_reader(attempt.confirm)
            os.close(attempt.confirm)
            attempt.confirm = -1
            self._resolve(attempt)

    def _resolve(self, attempt: Attempt) -> None:
        """Report the outcome of a start: it runs its program, or failed, or has taken too long before its exec."""
        if attempt not in self._unresolved:
            return
        self._unresolved.remove(attempt)
        if attempt.failure is None:
            attempt.confirmed = True
            self._emit(self.started(attempt))
        if attempt.wait_status is None:
            for pump in attempt.pumps:
                self._loop.add_reader(pump.descriptor, self._pump, attempt, pump)
            if attempt.terminal is not None:
                attempt.terminal.begin(functools.partial(self._read_on, attempt))

    def started(self, attempt: Attempt) -> Started:
        """Return the event that says an attempt runs."""
        assert attempt.pid is not None
        assert attempt.started_boottime_s is not None
        return Started(
            key=attempt.key, pid=attempt.pid, started_boottime_s=attempt.started_boottime_s, ignored=attempt.ignored
        )

    # -- containers

    def contain(self, start: StartAttempt, container: str) -> None:
        """Take on a container that its engine is about to start. A known key is refused.

        Raises `StartRefused` if nothing may start now, or a time or signal is invalid, and `OSError` if the journal
        cannot be written.
        """
        check_end(start)
        if start.key in self.ended or start.key in self.attempts:
            raise StartRefused(errno.EEXIST, "known", f"the supervisor has started {start.key} before")
        if self.fenced:
            raise StartRefused(errno.EAGAIN, "fenced", "the fence deadline passed")
        if len(self.attempts) >= RUNNING_MAX or len(self.attempts) + len(self.ended) >= HELD_MAX:
            raise StartRefused(errno.EAGAIN, "full", f"the supervisor runs {RUNNING_MAX} attempts, or keeps {HELD_MAX}")
        starting = Starting(
            key=start.key, boot_id=self._boot_id, boottime_s=boottime_s(), cgroup="", marks=(), container=container
        )
        self._write_ahead([starting])
        attempt = Attempt(start=start, child=None, marks=(), container=Container(container))
        self.attempts[start.key] = attempt
        self._containers.add(attempt)

    def ran(self, key: str, pid: int) -> None:
        """Record that the engine has started this attempt's container, whose init it says is `pid`; 0 if it is over."""
        attempt = self.attempts.get(key)
        if attempt is None or attempt.container is None:
            return
        attempt.container.is_seen = True
        if attempt.state is State.WAITING and not self._containers.watch(attempt, pid):
            self._clear(attempt)
        self._containers.look_soon()

    def removed(self, key: str) -> None:
        """Record that the engine has removed this attempt's container: if it has not run yet, it never will."""
        attempt = self.attempts.get(key)
        if attempt is None or attempt.container is None:
            return
        attempt.container.is_removed = True
        if attempt.state is State.WAITING:
            self._clear(attempt)
        self._containers.look_soon()

    def _container_runs(self, attempt: Attempt, init: Process) -> None:
        attempt.pid, attempt.started_boottime_s = init.pid, init.start_ticks / TICKS_PER_S
        attempt.confirmed = True
        attempt.go(State.RUNNING)
        self._record(Running(key=attempt.key, pid=init.pid))
        self._emit(self.started(attempt))
        self._set_timers(attempt)

    def _container_over(self, attempt: Attempt) -> None:
        assert attempt.container is not None
        self._finish(attempt, "container" if attempt.container.is_seen else "never-ran")

    # -- commands in running attempts

    def run_command(
        self, key: str, argv: tuple[str, ...], term: str, streams: Sequence[int], ended: Callable[[int], None]
    ) -> tuple[Command, int]:
        """Start a command as one more process of a running attempt, with its environment and `term` as TERM.

        `streams` are its standard input, output and error; `ended` gets its wait status. Return the command and the
        reading end of the pipe on which a failure of its start is reported, which the caller closes. Raises
        `StartRefused`.
        """
        attempt = self.attempts.get(key)
        if attempt is None or attempt.container is not None:
            raise StartRefused(errno.ESRCH, "member", "the attempt does not run here")
        if attempt.state is not State.RUNNING or not attempt.confirmed or attempt.cause is not None:
            raise StartRefused(errno.ESRCH, "member", "the attempt is starting or ending")
        if sum(each.attempt is attempt for each in self.commands.values()) >= COMMANDS_MAX:
            raise StartRefused(errno.EAGAIN, "member", f"{COMMANDS_MAX} commands run in this attempt")
        environ = {**attempt.environ, "TERM": term} if term else attempt.environ
        child = checked_child(msgspec.structs.replace(attempt.start, argv=argv), environ, self._descriptors)
        passed: list[int] = []
        stage = "cgroup"
        try:
            confirm = pipe(passed)
            try:
                self._resources.open_groups(attempt, passed)
                stage = "clone"
                report, *groups = passed
                pid = self.launcher.answer(self.launcher.ask(child, report, *streams, *groups))
            except BaseException:
                os.close(confirm)
                raise
        except OSError as error:
            raise StartRefused(error.errno or errno.EIO, stage, error.strerror or str(error)) from None
        except LauncherGone as gone:
            raise StartRefused(errno.ECHILD, "launcher", str(gone)) from None
        finally:
            for descriptor in passed:
                os.close(descriptor)
        command = self.commands[pid] = Command(attempt, pid, child, ended)
        return command, confirm

    def hold(self, key: str, out: int, over: Callable[[int], None]) -> tuple[int, HeldTerminal]:
        """Have what a running attempt's terminal shows written to the pipe `out`, too; return its pid and terminal.

        `over` gets the attempt's wait status at its end. Raises `StartRefused`.
        """
        attempt = self.attempts.get(key)
        if attempt is None or attempt.terminal is None or attempt.pid is None:
            raise StartRefused(errno.ESRCH, "member", "the attempt does not run here, or has no terminal")
        if not attempt.confirmed or attempt.wait_status is not None:
            raise StartRefused(errno.ESRCH, "member", "the attempt is starting or ending")
        attempt.terminal.hold(out, over)
        return attempt.pid, attempt.terminal

    def end_command(self, command: Command) -> None:
        """Kill a command with the processes of its session, once its attempt's MPS daemon knows; its status follows."""
        if command.pid in self.commands:
            self._end_commands(command.attempt, [command])

    def _end_commands(self, attempt: Attempt, commands: Collection[Command]) -> None:
        ending = [command for command in commands if not command.is_ending]
        for command in ending:
            command.is_ending = True

        def processes() -> list[Process]:
            return [process for command in ending for process in self._processes_of(command)]

        def announced(why: str) -> None:
            if attempt.state is not State.RUNNING:
                attempt.mps_not_asked = attempt.mps_not_asked or why
            for command in ending:
                self._kill_command(command)

        if ending:
            self._announce_end(attempt, processes, announced)

    def end_guarded(self, container: str, pid: int, pidfd: int) -> None:
        """Kill a process that an engine started in a container, with those below it, once its MPS daemon knows.

        Then close its pidfd.
        """

        def processes() -> list[Process]:
            return [] if is_over(pidfd) else _living(descendants([pid]))

        def announced(why: str) -> None:
            with contextlib.suppress(OSError):
                if processes():
                    kill_trees([pid])
            os.close(pidfd)

        self._announce_end(self._containers.attempt_of(container), processes, announced)

    def _processes_of(self, command: Command) -> list[Process]:
        """Return the living processes of a command: those below it, and orphans of its session. Raises OSError."""
        found = [each for each in map(read_process, children(os.getpid())) if each is not None]
        return _living(descendants(each.pid for each in found if command.pid in (each.pid, each.session)))

    def _kill_command(self, command: Command) -> None:
        self._killed_sessions.add(command.pid)
        if command.pid in self.commands:
            with contextlib.suppress(OSError):  # out of descriptors: the next death of a child brings another try
                kill_trees([command.pid])
        self._kill_sessions()

    def _kill_sessions(self) -> None:
        """Kill what was left, or forked meanwhile, in the sessions of commands that were killed: orphans of ours.

        The death of each brings the next look, until none is left.
        """
        with contextlib.suppress(OSError):
            found = [each for each in map(read_process, children(os.getpid())) if each is not None and not each.dead]
            left = {each.pid: each.session for each in found if each.session in self._killed_sessions}
            kill_trees(left)
            self._killed_sessions.intersection_update({*left.values(), *self.commands})

    def _commands_of(self, attempt: Attempt) -> list[Command]:
        return [each for each in self.commands.values() if each.attempt is attempt]

    # -- output

    def _pump(self, attempt: Attempt, pump: OutputPump) -> bytes | None:
        data = pump.pump()
        if data == b"":
            self._loop.remove_reader(pump.descriptor)
        elif data and attempt.order is not None:
            attempt.order.note(pump.stream, len(data))
        if data and attempt.terminal is not None:
            attempt.terminal.seen(data)
        if data and attempt.start.stream_output:
            self._emit(Output(key=attempt.key, stream=pump.stream, offset=pump.seen_bytes - len(data), data=data))
        return data

    def _read_on(self, attempt: Attempt, is_on: bool) -> None:
        """Read a terminal on, or not while whoever holds it is slow."""
        for pump in attempt.pumps:
            if is_on and pump.descriptor >= 0:
                self._loop.add_reader(pump.descriptor, self._pump, attempt, pump)
            elif pump.descriptor >= 0:
                self._loop.remove_reader(pump.descriptor)

    # -- ending

    def end(self, key: str, reason: Reason, grace_s: float, why: str, notice_s: float = 0.0) -> None:
        """Send SIGTERM now and SIGKILL after the grace, or SIGKILL alone if the grace is 0.

        A later call can only shorten the grace. An attempt that waits is not started. Unknown keys, and attempts of
        which the rest is being killed, are ignored. Processes under an MPS daemon are announced to it before: those
        without a handler of SIGTERM before that signal, others before SIGKILL. That takes `NOTICE_S` at most, out of
        the grace; a process with a handler keeps half of a short one.

        With a notice, a running attempt that has a checkpoint signal gets it now, and SIGTERM after `notice_s` seconds.
        """
        self.reap()
        attempt = self.attempts.get(key)
        if attempt is None or attempt.state is State.CLEARING:
            return
        if attempt.cause is None:
            attempt.cause, attempt.why = reason, why
        if notice_s > 0 and attempt.state is State.RUNNING and attempt.start.checkpoint_signal is not None:
            self._give_notice(attempt, grace_s, notice_s)
            return
        if attempt.notice_timer is not None:
            attempt.notice_timer.cancel()
        if attempt.state is State.WAITING and attempt.container is not None:
            self._clear(attempt)  # its engine may be about to start it
        elif attempt.state is State.WAITING:
            self._waiting.remove(attempt)
            self._finish(attempt, "never-ran")
        elif attempt.state in (State.RUNNING, State.ENDING):
            self._ask_to_end(attempt, grace_s)

    def _give_notice(self, attempt: Attempt, grace_s: float, notice_s: float) -> None:
        """Send the checkpoint signal once; a second notice can only bring the end nearer."""
        ends_s = self._loop.time() + notice_s
        if attempt.notice_timer is not None:
            if attempt.notice_timer.when() <= ends_s:
                return
            attempt.notice_timer.cancel()
        elif not attempt.took_checkpoint:
            if attempt.checkpoint_timer is not None:
                attempt.checkpoint_timer.cancel()
            self._checkpoint(attempt)
        attempt.notice_timer = self._loop.call_at(ends_s, self._ask_to_end, attempt, grace_s)

    def _ask_to_end(self, attempt: Attempt, grace_s: float) -> None:
        deadline_s = self._loop.time() + grace_s
        if attempt.state is State.RUNNING and grace_s > 0:
            attempt.go(State.ENDING)
            self._announce(attempt, self._begin_to_ask, everyone=False)
        if attempt.kill_timer is not None:
            if attempt.kills_at_s <= deadline_s:
                return
            attempt.kill_timer.cancel()
        attempt.kills_at_s = deadline_s
        if grace_s > 0 and attempt.start.mps is None:
            attempt.kill_timer = self._loop.call_at(deadline_s, self._kill, attempt)
        elif grace_s > 0:
            # a process that handles SIGTERM has at least half of its grace before its work is stopped
            notice_s = min(self.notices.seconds, grace_s / 2)
            attempt.kill_timer = self._loop.call_at(deadline_s - notice_s, self._kill_announced, attempt)
        else:
            self._kill_announced(attempt)

    def _kill_announced(self, attempt: Attempt) -> None:
        """Kill an attempt at its deadline; if its end is announced, not before that is done."""

        def kill(attempt: Attempt) -> None:
            if attempt.kill_timer is not None:
                attempt.kill_timer.cancel()
            if self._loop.time() < attempt.kills_at_s:
                attempt.kill_timer = self._loop.call_at(attempt.kills_at_s, self._kill, attempt)
            else:
                self._kill(attempt)

        self._announce(attempt, kill, everyone=True)

    def _announce(self, attempt: Attempt, then: Callable[[Attempt], None], *, everyone: bool) -> None:
        """Announce to an attempt's MPS daemon that its processes end: those that SIGTERM ends, or with `everyone` all.

        Also those that a launcher may end with the SIGTERM that it gets: the neighbours would fail with each of them.
        Call `then` once that is done or has failed; at once for an attempt without a daemon. If all of them were
        announced a moment ago, or an announcement failed then, the daemon is not asked again.
        """

        def processes() -> list[Process]:
            found = self._rest(attempt, self._orphans())
            ending = {each.pid for each in found} if everyone else ended_by_it(found, attempt.pid or 0, passed_on=True)
            return [each for each in found if each.pid in ending]

        def again(_: object) -> None:
            if attempt.state is not State.OVER:
                self._announce(attempt, then, everyone=everyone)

        def announced(why: str) -> None:
            attempt.notice_failed = bool(why)
            attempt.mps_not_asked = attempt.mps_not_asked or why
            if attempt.state is not State.OVER:
                then(attempt)

        last, is_recent = attempt.notice, self._loop.time() < attempt.notice_began_s + 2 * self.notices.seconds
        if last is not None and not last.done() and _may_find(processes):
            last.add_done_callback(again)
        elif last is not None and is_recent and (attempt.notice_failed or attempt.notice_is_of_all):
            then(attempt)
        elif (notice := self._announce_end(attempt, processes, announced)) is not None:
            attempt.notice, attempt.notice_is_of_all, attempt.notice_began_s = notice, everyone, self._loop.time()

    def _announce_end(
        self, attempt: Attempt | None, processes: Callable[[], Collection[Process]], then: Callable[[str], None]
    ) -> asyncio.Task[None] | None:
        """Announce the end of some of an attempt's processes to its MPS daemon; call `then` with "" or why that failed.

        Return the task that does so; None if there was no daemon or no process, and `then` has been called.
        """
        if attempt is None or attempt.start.mps is None or not _may_find(processes):
            then("")
            return None

        def announced(why: str) -> None:
            if why:
                log(f"{attempt.key}: its MPS daemon could not be asked to stop its work: {why}")
            then(why)

        def own(clients: Collection[int]) -> set[int]:
            return {each.pid for each in processes()}.intersection(clients)

        return self.notices.announce(attempt.start.mps, own, announced)

    def _begin_to_ask(self, attempt: Attempt) -> None:
        if attempt.state is not State.ENDING:
            return
        assert attempt.pid is not None
        try:
            attempt.asking = Sigterm(attempt.pid, is_child=attempt.container is None and attempt.wait_status is None)
            attempt.asking.look(self._rest(attempt, self._orphans()))
        except OSError as error:
            log(f"{attempt.key}: cannot signal each process by itself: {error}")
            self._signal_group(attempt, signal.SIGTERM)
            self._signal_group(attempt, signal.SIGCONT)
        if attempt.container is not None:
            self._containers.look_soon()

    def _rest(self, attempt: Attempt, orphans: Mapping[str, Sequence[int]]) -> list[Process]:
        """Return the living processes of an attempt. Raises OSError."""
        if attempt.container is not None:
            return self._containers.processes(attempt)
        roots = [*orphans.get(attempt.key, ())]
        if attempt.wait_status is None and attempt.pid is not None:
            roots.append(attempt.pid)
        if attempt.cgroup is not None:
            roots += attempt.cgroup.pids()
        return _living(descendants(roots))

    def _signal_group(self, attempt: Attempt, number: signal.Signals) -> None:
        """Signal the main process's group.

        The main process is not reaped, so its pid cannot belong to another process.
        """
        assert attempt.pid is not None
        try:
            os.killpg(attempt.pid, number)
        except ProcessLookupError:
            # its session does not exist yet
            os.kill(attempt.pid, number)
        except OSError as error:
            log(f"{attempt.key}: cannot signal: {error}")

    def _kill(self, attempt: Attempt) -> None:
        if attempt.state not in (State.RUNNING, State.ENDING) or attempt.pid is None:
            return
        if attempt.wait_status is not None:
            self._clear(attempt)
            return
        attempt.go(State.KILLING)
        self._watch(attempt)
        self._kill_tree(attempt, [attempt.pid])
        if attempt.container is not None:
            self._containers.look_soon()

    def _kill_tree(self, attempt: Attempt, roots: list[int]) -> None:
        try:
            if attempt.container is not None:
                kill(self._containers.processes(attempt))
                return
            if attempt.cgroup is not None:
                attempt.cgroup.kill()
        except OSError as error:
            log(f"{attempt.key}: cannot kill its cgroup: {error}")
        # in a cgroup too: a privileged child may have left it
        try:
            kill_trees(roots)
        except OSError as error:
            log(f"{attempt.key}: cannot kill: {error}")
            if attempt.pid is not None and attempt.wait_status is None:
                # out of descriptors: signal without one; what is left is searched for until it is gone
                self._signal_group(attempt, signal.SIGKILL)

    def _timed_out(self, attempt: Attempt) -> None:
        self.end(attempt.key, "timeout", attempt.start.grace_s, f"ran for its {attempt.start.timeout_s} s")

    def _checkpoint(self, attempt: Attempt) -> None:
        """Send the checkpoint signal once; try again until the attempt runs its program and a process handles it."""
        self.reap()
        attempt.checkpoint_timer = None
        if attempt.state is not State.RUNNING or attempt.wait_status is not None:
            return
        assert attempt.pid is not None
        assert attempt.start.checkpoint_signal is not None
        number = signal_number(attempt.start.checkpoint_signal)
        with contextlib.suppress(OSError):
            attempt.took_checkpoint = attempt.confirmed and send_to_takers(attempt.pid, number) > 0
        if not attempt.took_checkpoint:
            attempt.checkpoint_timer = self._loop.call_later(AGAIN_S, self._checkpoint, attempt)

    def fence(self, grace_s: float) -> None:
        """End every attempt that may not outlive a partition, and start none while `fenced` is set."""
        self.fenced = True
        for attempt in list(self.attempts.values()):
            if attempt.start.on_partition == "kill":
                self.end(attempt.key, "fence", min(attempt.start.grace_s, grace_s), "the fence deadline passed")

    def fence_soon(self, grace_s: float) -> None:
        """Announce to MPS daemons the ends that the fence will bring within the time of a notice, `NOTICE_S` before it,
        so that these ends need not wait for the daemons.
        """
        for attempt in self.attempts.values():
            is_short = min(attempt.start.grace_s, grace_s) < self.notices.seconds
            is_there = attempt.state in (State.RUNNING, State.ENDING) or attempt.container is not None
            if is_short and is_there and attempt.start.on_partition == "kill":
                self._announce(attempt, lambda _: None, everyone=True)

    # -- reaping and proving

    def reap(self) -> None:
        """Take the status of every ended child, adopted orphans included. Called on SIGCHLD."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            command = self.commands.pop(pid, None)
            if command is not None:
                command.ended(status)
                continue
            if self.notices.reaped(pid, status):
                continue
            attempt = self._by_pid.pop(pid, None)
            if attempt is None:
                self.launcher.reaped(pid)
                continue
            attempt.wait_status = status
            attempt.cpu_ms = round(1000 * (usage.ru_utime + usage.ru_stime))
            if usage.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss:  # else perhaps before its exec
                attempt.largest_bytes = usage.ru_maxrss * 1024
            self._on_exec_report(attempt)
            self._resolve(attempt)
            if attempt.state is State.ENDING:
                self._parting[attempt.key] = attempt  # what it left keeps the rest of the grace, without its commands
                self._end_commands(attempt, self._commands_of(attempt))
            else:
                self._clear(attempt)
        if self._killed_sessions:
            self._kill_sessions()
        if self._clearing or self._parting:
            self._check_soon()

    def _clear(self, attempt: Attempt) -> None:
        """End what a dead main process left, and report the end once nothing is left."""
        self._parting.pop(attempt.key, None)
        attempt.go(State.CLEARING)
        if attempt.kill_timer is not None:
            attempt.kill_timer.cancel()
        self._watch(attempt)
        self._announce(attempt, self._begin_to_clear, everyone=True)

    def _begin_to_clear(self, attempt: Attempt) -> None:
        if attempt.container is not None:
            attempt.container.is_to_die = True
            self._containers.look_soon()
            return
        for command in self._commands_of(attempt):  # what runs beside its main process keeps no attempt alive
            self._kill_command(command)
        self._clearing[attempt.key] = attempt
        self._clear_backoff.reset()
        self._check_soon()

    def _check_soon(self) -> None:
        if self._clear_timer is not None:
            self._clear_timer.cancel()
        self._clear_timer = self._loop.call_later(0, self._check_left)

    def _check_left(self) -> None:
        """Check every attempt whose main process is over; check again, at growing intervals, while one is being
        cleared.

        What keeps the rest of its grace needs no interval: its topmost processes are orphans that this process has
        adopted, so their ends bring the next check.
        """
        if self._clear_timer is not None:
            self._clear_timer.cancel()
            self._clear_timer = None
        for descriptor in self._spare:
            os.close(descriptor)
        try:
            self._check_parting()
            self._check_clearing()
        except OSError as error:
            log(f"cannot see what is left of attempts: {error}")
            self._clear_timer = self._loop.call_later(CLEAR_DELAY_S_MAX, self._check_left)
            return
        finally:
            self._spare = _spare()
        if self._clearing:
            self._clear_timer = self._loop.call_later(self._clear_backoff.next_s(), self._check_left)

    def _check_parting(self) -> None:
        """Ask what a dead main process left to end, too; clear the attempt once nothing of it lives."""
        if not self._parting:
            return
        orphans = self._orphans()
        for attempt in list(self._parting.values()):
            rest = self._rest(attempt, orphans)
            if not rest:
                self._clear(attempt)
            elif attempt.asking is not None:
                self._ask_rest(attempt, attempt.asking, rest)

    def _ask_rest(self, attempt: Attempt, asking: Sigterm, rest: Collection[Process]) -> None:
        """Ask those to end that get SIGTERM only now, since the process above them, which handled it, is over."""

        def ask(attempt: Attempt) -> None:
            attempt.is_asking_rest = False
            if attempt.state is State.ENDING:
                with contextlib.suppress(OSError):  # out of descriptors: SIGKILL follows
                    asking.look(self._rest(attempt, self._orphans()))

        if attempt.start.mps is None or not asking.ends_more_of(rest):
            asking.look(rest)
        elif not attempt.is_asking_rest:
            attempt.is_asking_rest = True
            self._announce(attempt, ask, everyone=False)

    def _check_clearing(self) -> None:
        emptied: set[str] = set()
        for attempt in self._clearing.values():
            if attempt.cgroup is not None:
                try:
                    attempt.cgroup.kill()
                    attempt.memory = attempt.cgroup.memory() or attempt.memory
                    attempt.cpu_ms = max(attempt.cgroup.cpu_ms() or 0, attempt.cpu_ms or 0)
                    if attempt.cgroup.remove():
                        emptied.add(attempt.key)
                except OSError as error:
                    log(f"{attempt.key}: {error}")
        # After the cgroups: what has left one is an orphan of ours by the time at which the group is empty, or below a
        # process of the group that is dying and is our orphan itself.
        orphans = self._orphans() if self._clearing else {}
        for attempt in list(self._clearing.values()):
            if attempt.key in orphans:
                self._kill_tree(attempt, orphans[attempt.key])
            elif attempt.cgroup is None:
                self._finish(attempt, "walk")
            elif attempt.key in emptied:
                self._finish(attempt, "cgroup")

    def _orphans(self) -> dict[str, list[int]]:
        """Return the orphans that this process has adopted, by the attempt to which they belong or may belong.

        What a dead process left descends from one of them, also if it has left the attempt's cgroup. Raises OSError.
        """
        own = {*self._by_pid, *self.notices.pids, self.launcher.pid}
        orphans = [pid for pid in children(os.getpid()) if pid not in own]
        if not orphans:
            return {}
        sessions = {attempt.pid: attempt for attempt in self.attempts.values() if attempt.pid is not None}
        groups = {
            os.path.basename(each.cgroup.path): each for each in self.attempts.values() if each.cgroup is not None
        }
        found: dict[str, list[int]] = {}
        for orphan in orphans:
            command = self.commands.get(orphan)
            owners = self._owners(orphan, sessions, groups) if command is None else [command.attempt]
            for attempt in owners:
                found.setdefault(attempt.key, []).append(orphan)
        return found

    def _owners(self, orphan: int, sessions: Mapping[int, Attempt], groups: Mapping[str, Attempt]) -> list[Attempt]:
        """Return the attempts to which an orphan may belong; several only if all of them are being cleared.

        A process below the orphan tells it by its session or cgroup, else by its environment. An orphan that hides all
        of them (a new session, another cgroup, and a scrubbed environment) may belong to any attempt that started
        before it. It is then killed with the first of those attempts that ends. When in doubt the GPU is not reused,
        and a process that hides its origin may be ended with the wrong job.
        """
        process = read_process(orphan)
        if process is None:
            return []
        owner = sessions.get(process.session) or groups.get(self._resources.group_of(own_path(orphan) or ""))
        if owner is not None:
            return [owner]
        for pid in descendants([orphan]):
            below = read_process(pid)
            owner = sessions.get(below.session) if below is not None else None
            if owner is None:
                owner = groups.get(self._resources.group_of(own_path(pid) or "")) or self._marked(pid)
            if owner is not None:
                return [owner]
        age_limit_s = process.start_ticks / TICKS_PER_S + 1 / TICKS_PER_S
        return [attempt for attempt in self._clearing.values() if (attempt.started_boottime_s or 0.0) <= age_limit_s]

    def _marked(self, pid: int) -> Attempt | None:
        try:
            environ = read_environ(pid)
        except PermissionError:
            return None
        if environ:
            for attempt in self.attempts.values():
                if attempt.marks and environ.issuperset(attempt.marks):
                    return attempt
        return None

    def _watch(self, attempt: Attempt) -> None:
        attempt.timers.append(self._loop.call_later(UNPROVEN_AFTER_S, self._send_unproven, attempt))

    def _send_unproven(self, attempt: Attempt) -> None:
        if attempt.state is State.OVER or attempt.unproven:
            return
        attempt.unproven = True
        pids: list[int] = []
        with contextlib.suppress(OSError):
            roots = [attempt.pid] if attempt.pid is not None else []
            if attempt.container is not None:
                pids = [process.pid for process in self._containers.processes(attempt)]
            else:
                pids = attempt.cgroup.pids() if attempt.cgroup is not None else descendants(roots)
        event = Unproven(
            key=attempt.key,
            pids=tuple(sorted(pids)),
            message=f"not gone {UNPROVEN_AFTER_S:.0f} s after SIGKILL (a process stuck in the kernel cannot be ended)",
        )
        self.unproven[attempt.key] = event
        self._emit(event)

    def give_up(self, key: str) -> bool:
        """List an unproven attempt no more, as an operator says that it is over. Return False for any other key."""
        if self.unproven.pop(key, None) is None:
            return False
        self.attempts[key].given_up = True
        return True

    def _finish(self, attempt: Attempt, proof: Proof) -> None:
        attempt.go(State.OVER)
        if attempt.confirm >= 0:
            self._loop.remove_reader(attempt.confirm)
        for pump in attempt.pumps:
            if pump.descriptor >= 0:
                self._loop.remove_reader(pump.descriptor)
                # read what arrived before the last writer died; bounded, in case another process got the pipe
                limit_bytes = pump.seen_bytes + DRAIN_BYTES_MAX
                while self._pump(attempt, pump) and pump.seen_bytes < limit_bytes:
                    continue
        ended = attempt.ended(proof, boottime_s())
        if attempt.container is not None:
            self._containers.drop(attempt)
        attempt.release()
        del self.attempts[attempt.key]
        self._clearing.pop(attempt.key, None)
        self._parting.pop(attempt.key, None)
        self.unproven.pop(attempt.key, None)
        if not attempt.given_up:
            self.ended[attempt.key] = ended
            if proof != "never-ran" or attempt.started_boottime_s is not None or attempt.container is not None:
                self._record(Over(ended=ended))
        self._emit(ended)


def _may_find(processes: Callable[[], Collection[Process]]) -> bool:
    with contextlib.suppress(OSError):  # out of descriptors: who asks again says so
        return bool(processes())
    return True


def _living(pids: Collection[int]) -> list[Process]:
    return [process for process in map(read_process, pids) if process is not None and not process.dead]


def _spare() -> tuple[int, ...]:
    """Return two descriptors to be closed when some are needed: what is left can be seen also when all others are used.

    Otherwise attempts that ended could not be reported, and reporting them is what frees descriptors.
    """
    with contextlib.suppress(OSError):
        return os.pipe2(os.O_CLOEXEC)
    return ()
