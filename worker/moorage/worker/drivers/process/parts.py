"""Run a driver's jobs as processes: the parts for a driver of another package whose attempts are processes of the host.

`Processes` starts them, ends them, fences them and proves that nothing of them is left, by the supervisor, which
outlives the agent. Its `folders` are the folders of their attempts, its `output` is what they wrote. The driver says
for each attempt which command runs, and hands on what the agent asks of it. This module is public: its names stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames import Exec, LogPage, ReadLog, Terminal
from moorage.schemas.job import Request
from moorage.worker.driver import Assignment, Driver, DriverEvent, Living
from moorage.worker.drivers.execution import Execution
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.process.driver import ProcessDriver
from moorage.worker.session.attempt_messages import Replaced
from moorage.worker.supervisor.protocol import StartAttempt


class Command(msgspec.Struct, frozen=True):
    """What runs as an attempt.

    `argv` is the command line; its first word is a program, found on the attempt's PATH. `env` are variables that the
    process gets beside those of its request, its lease and its gang.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = {}


#: says which command an attempt runs, in this folder of its own. What it raises is reported: `HostAtFault` as
#: `NotStarted`, any other `MoorageError` as `StartFailed`
CommandOf = Callable[[Assignment, str], Command]


class Folders:
    """The folders of a driver's attempts: each is made before the start, and removed some time after the end."""

    def __init__(self, process: ProcessDriver) -> None:
        self._process = process

    def path(self, name: AttemptName) -> str:
        """Return the path of an attempt's folder, whether it exists or not."""
        return self._process.folder_of(name)


class Output:
    """What a driver's attempts write to stdout and stderr: it is published while they run, and kept for some time."""

    def __init__(self, process: ProcessDriver) -> None:
        self._process = process

    async def page(self, ask: ReadLog) -> LogPage:
        """Return the page of an attempt's output that is asked for. Raises Refused (`not-kept`) if it is gone."""
        return await self._process.read_log(ask)


class Processes:
    """The processes of one driver's attempts. Its methods are those of `Driver`, with the same meaning."""

    #: what a driver can do that hands all of its methods on
    CAPABILITIES: Final[Capabilities] = msgspec.structs.replace(
        ProcessDriver.capabilities, relimits=False, signals=False
    )

    def __init__(self, driver: Driver, kit: Kit, command: CommandOf) -> None:
        """Make the parts for this driver of the worker of `kit`, without connecting."""
        self._driver = driver
        self._inner = _Process(driver.name, kit, command)
        driver.limits = self._inner.limits
        self.folders = Folders(self._inner)
        self.output = Output(self._inner)

    async def open(self) -> list[Living]:
        """Return the attempts that an earlier agent has left. Raises Refused if there is no supervisor."""

        def report(event: DriverEvent) -> None:
            if isinstance(event, Replaced):
                self._driver.boot = self._inner.boot
            self._driver.report(event)

        self._inner.attach(report, self._driver.publish)
        living = await self._inner.open()
        self._driver.boot = self._inner.boot
        return living

    async def close(self) -> None:
        """Disconnect: the attempts run on, and the next agent takes them over."""
        await self._inner.close()

    def can(self) -> Capabilities:
        """Return the driver's capabilities, with those that depend on what the supervisor can do on this host."""
        here = self._inner.can()
        own = Driver.can(self._driver)
        return msgspec.structs.replace(
            own,
            users=here.users,
            memory_limit=here.memory_limit,
            devices=here.devices,
            relimits=own.relimits and here.relimits,
            signals=own.signals and here.signals,
        )

    def start(self, assignments: list[Assignment]) -> None:
        """Start attempts, each with a folder of its own, its secrets, and the files that its request brings along."""
        self._inner.start(assignments)

    def end(self, name: AttemptName, grace_s: float, why: str, notice_s: float = 0.0) -> None:
        """End an attempt within `grace_s` seconds; with `notice_s`, send its checkpoint signal that long before."""
        self._inner.end_with_notice(name, grace_s, why, notice_s)

    def relimit(self, name: AttemptName, timeout_s: float) -> None:
        """Give a running attempt another time limit; a driver that hands this on says `relimits`."""
        self._inner.relimit(name, timeout_s)

    def signal(self, name: AttemptName, signal: str) -> None:
        """Send a signal to processes of an attempt that handle it; a driver that hands this on says `signals`."""
        self._inner.signal(name, signal)

    def forget(self, names: list[AttemptName]) -> None:
        """Forget attempts whose ends are in the ledger."""
        self._inner.forget(names)

    def set_fence(self, deadline_s: float, grace_s: float) -> None:
        """Have all attempts end at `deadline_s` (CLOCK_BOOTTIME seconds), unless a later call moves it."""
        self._inner.set_fence(deadline_s, grace_s)

    async def living(self, names: Collection[AttemptName]) -> Collection[AttemptName] | None:
        """Return those of these attempts of which something is left; None if the supervisor does not answer now."""
        return await self._inner.living(names)

    async def execute(self, request: Request, asked: Exec, size: Terminal) -> Execution:
        """Run a command in a running attempt, or hold its terminal."""
        return await self._inner.execute(request, asked, size)

    def attempts_of(self, pids: Collection[int]) -> dict[int, AttemptName | None]:
        """Return the attempt of each of these processes; others are left out."""
        return self._inner.attempts_of(pids)


class _Process(ProcessDriver):
    """The driver of processes with another name, and with commands that another driver makes."""

    def __init__(self, name: str, kit: Kit, command: CommandOf) -> None:
        self.name = name
        super().__init__(kit._replace(freezer=None))
        self._command = command

    def _start_attempt(self, assignment: Assignment) -> StartAttempt:
        attempt = super()._start_attempt(assignment)
        command = self._command(assignment, self.folder_of(assignment.name))
        return msgspec.structs.replace(attempt, argv=tuple(command.argv), env=attempt.env | dict(command.env))
