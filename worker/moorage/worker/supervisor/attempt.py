"""Keep one attempt's state inside the supervisor, and the table of legal transitions."""

import asyncio
import enum
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from moorage.system.cgroup import CgroupFolder, GroupMemory
from moorage.worker.supervisor.capped_output import ArrivalOrder, OutputPump
from moorage.worker.supervisor.child import Child
from moorage.worker.supervisor.protocol import Ended, MemoryAtEnd, Proof, Reason, StartAttempt
from moorage.worker.supervisor.sigterm import Sigterm
from moorage.worker.supervisor.terminal import HeldTerminal


class State(enum.Enum):
    WAITING = "waiting"
    """Accepted; no process exists."""
    RUNNING = "running"
    ENDING = "ending"
    """SIGTERM was sent; the grace runs, also for what a main process that is over has left."""
    KILLING = "killing"
    """SIGKILL sent to the tree; the main process is not reaped yet."""
    CLEARING = "clearing"
    """The main process is over; what it left behind is being ended."""
    OVER = "over"


LEGAL: Final[dict[State, frozenset[State]]] = {
    State.WAITING: frozenset({State.RUNNING, State.CLEARING, State.OVER}),
    State.RUNNING: frozenset({State.ENDING, State.KILLING, State.CLEARING}),
    State.ENDING: frozenset({State.KILLING, State.CLEARING}),
    State.KILLING: frozenset({State.CLEARING}),
    State.CLEARING: frozenset({State.OVER}),
    State.OVER: frozenset(),
}


class IllegalTransition(Exception):
    """A change of state that `LEGAL` does not allow: a defect of the supervisor itself."""


@dataclass(slots=True, eq=False)
class Container:
    """The container of an attempt: an engine starts it, the supervisor ends it."""

    id: str
    is_seen: bool = False
    """Whether a process of it was seen: once none is left, none will come."""
    is_removed: bool = False
    """Whether the engine has removed it, so that it can no longer start."""
    is_to_die: bool = False
    """Whether what is left of it is killed, as its MPS daemon knows."""
    pidfd: int = -1
    """A pidfd of its init, while the init lives."""


@dataclass(slots=True, eq=False)
class Attempt:
    """What the supervisor keeps of one attempt until its end is reported; its argv only until its exec."""

    start: StartAttempt
    child: Child | None
    marks: tuple[bytes, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    """Its whole environment, for commands that are run in it."""
    state: State = State.WAITING
    pid: int | None = None
    started_boottime_s: float | None = None
    cgroup: CgroupFolder | None = None
    fence: CgroupFolder | None = None
    """Its group of version 1, if devices are refused to it there."""
    memory: GroupMemory | None = None
    """What its cgroup last said of its memory, once its main process is gone."""
    cpu_ms: int | None = None
    """The CPU time of its processes by its cgroup; without one, of its main process and those it has waited for."""
    largest_bytes: int = 0
    """The most memory that one of the latter had."""
    ignored: tuple[str, ...] = ()
    confirmed: bool = False
    """Whether `Started` was reported: exec succeeded, or did not fail for a while."""
    confirm: int = -1
    """The pipe that reports whether exec succeeded, until it has."""
    failure: tuple[int, str, str] | None = None
    """(error number, stage, message) of a start that failed."""
    cause: Reason | None = None
    """What first asked it to end; null if it ended by itself."""
    why: str = ""
    wait_status: int | None = None
    pumps: list[OutputPump] = field(default_factory=list)
    order: ArrivalOrder | None = None
    terminal: HeldTerminal | None = None
    """The terminal that its streams are, if it has one."""
    asking: Sigterm | None = None
    """Which of its processes have got SIGTERM, once it was asked to end."""
    is_asking_rest: bool = False
    """Whether the rest of them gets it once that is announced to its MPS daemon."""
    kills_at_s: float = 0.0
    """When its processes get SIGKILL, in the loop's time, if it was asked to end."""
    kill_timer: asyncio.TimerHandle | None = None
    """Until then, or until that is announced to its MPS daemon."""
    runs_from_s: float = 0.0
    """Since when its time limit counts, in the loop's time."""
    timeout_timer: asyncio.TimerHandle | None = None
    checkpoint_timer: asyncio.TimerHandle | None = None
    notice_timer: asyncio.TimerHandle | None = None
    took_checkpoint: bool = False
    """Whether a process of it has received the checkpoint signal."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    notice: asyncio.Task[None] | None = None
    """The newest announcement to its MPS daemon that processes of it end."""
    notice_began_s: float = 0.0
    notice_is_of_all: bool = False
    """Whether it is about all of its processes, and not only about those that SIGTERM ends."""
    notice_failed: bool = False
    mps_not_asked: str = ""
    """Why an end could not be announced, at first."""
    unproven: bool = False
    given_up: bool = False
    """Whether an operator said that it counts as over, though it is unproven: it is listed no more."""
    container: Container | None = None

    @property
    def key(self) -> str:
        return self.start.key

    def go(self, state: State) -> None:
        """Change the state. Raises `IllegalTransition`."""
        if state not in LEGAL[self.state]:
            raise IllegalTransition(f"{self.key}: {self.state.value} to {state.value}")
        self.state = state

    def release(self) -> None:
        """Cancel the timers, and close the pipes, the output files and the container's pidfd."""
        for timer in (self.kill_timer, self.checkpoint_timer, self.notice_timer):
            if timer is not None:
                timer.cancel()
        for timer in (*self.timers, *filter(None, (self.timeout_timer,))):
            timer.cancel()
        if self.terminal is not None:
            self.terminal.end(self.wait_status)
        for pump in self.pumps:
            pump.close()
        if self.order is not None:
            self.order.close()
        for descriptor in (self.confirm, self.container.pidfd if self.container is not None else -1):
            if descriptor >= 0:
                os.close(descriptor)
        if self.fence is not None:
            self.fence.remove_empty()

    def ended(self, proof: Proof, now_boottime_s: float) -> Ended:
        """Return the event that reports the end. `proof` says how it is known that none of its processes is left."""
        exit_code, signal_number, number, stage, message = None, None, None, "", ""
        reason: Reason = self.cause or "exit"
        if self.failure is not None:
            reason = "start-failed"
            number, stage, message = self.failure
        elif self.wait_status is not None:
            if os.WIFSIGNALED(self.wait_status):
                signal_number = os.WTERMSIG(self.wait_status)
            else:
                exit_code = os.waitstatus_to_exitcode(self.wait_status)
        seen = {pump.stream: pump.seen_bytes for pump in self.pumps}
        return Ended(
            key=self.key,
            reason=reason,
            proof=proof,
            exit_code=exit_code,
            signal=signal_number,
            errno=number,
            stage=stage,
            message=message,
            why=self.why,
            mps_not_asked=self.mps_not_asked,
            pid=self.pid,
            started_boottime_s=self.started_boottime_s,
            ended_boottime_s=now_boottime_s,
            stdout_bytes=seen.get("stdout", 0),
            stderr_bytes=seen.get("stderr", 0),
            dropped_bytes=sum(pump.dropped_bytes for pump in self.pumps),
            memory=None if self.memory is None else MemoryAtEnd(**self.memory._asdict()),
            cpu_ms=self.cpu_ms,
            largest_bytes=self.largest_bytes,
        )


@dataclass(slots=True, eq=False)
class Command:
    """A process that was started in a running attempt besides its main one."""

    attempt: Attempt
    pid: int
    child: Child
    ended: Callable[[int], None]
    """Gets its wait status."""
    is_ending: bool = False
    """Whether it is killed once that is announced to its attempt's MPS daemon."""
