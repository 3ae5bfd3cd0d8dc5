"""Track the processes of containers: the agent starts containers through an engine, the supervisor ends them without
it.

A container is known by its id, which an engine writes into the path of the container's cgroup. So the host's processes
of a container are those with the id in /proc/PID/cgroup, under cgroup v1 and v2 alike. Rootless podman makes no cgroup
under v1: there they are what descends from its monitor, whose command line has the id. Its init is the process that is
number 1 in its PID namespace: when it dies, the kernel kills all others of that namespace (pid_namespaces(7)). A
container has such a namespace of its own and no restart policy, so it is over when its init has died.

The engine says which process the init is, after the start. That counts once the process was seen in the container
while a pidfd of it was open, so that no other process can have its number. The host is searched for a container's
processes only to end it.
"""

import asyncio
import contextlib
import os
import re
import select
import signal
from collections.abc import Callable, Collection
from typing import Final

from moorage.system.backoff import Backoff
from moorage.system.proctree import Process, descendants, kill_process, read_process
from moorage.worker.supervisor.attempt import Attempt, State
from moorage.worker.supervisor.checkpoint import takes
from moorage.worker.supervisor.log import log

LOOK_S_MIN: Final = 0.02
#: a scan reads one file of each process of the host
LOOK_S_MAX: Final = 1.0
#: the id of a container in a cgroup's path; podman's monitor has a scope of its own with the id of its container
_ID: Final = re.compile(rb"(?<!conmon-)(?<![0-9a-f])[0-9a-f]{64}")
_MONITOR: Final = re.compile(rb"\0-c\0([0-9a-f]{64})\0")
_PARENTS_MAX: Final = 1000
ID: Final = re.compile(r"[0-9a-f]{64}")


def processes_of(ids: Collection[str]) -> dict[str, list[Process]]:
    """Return the living processes of these containers, by container; a container without a process is left out."""
    wanted = {each.encode() for each in ids}
    pids: dict[str, set[int]] = {}
    for name in os.listdir("/proc") if wanted else ():
        if not name.isdecimal():
            continue
        for each in wanted.intersection(_ids_of(int(name))):
            pids.setdefault(each.decode(), set()).add(int(name))
        if (monitored := _monitored_by(int(name))) in wanted:
            # the monitor itself, and podman's command that it runs at the end, are in our own PID namespace
            below = (pid for pid in descendants([int(name)]) if len(_numbers_of(pid)) > 1)
            pids.setdefault(monitored.decode(), set()).update(below)
    living = {
        each: [process for process in map(read_process, sorted(some)) if process is not None and not process.dead]
        for each, some in pids.items()
    }
    return {each: some for each, some in living.items() if some}


def containers_of(pid: int) -> list[str]:
    """Return the ids of the containers that a process is in, the outermost first; empty if the process is gone."""
    found, parents = _ids_of(pid), 0
    while not found and pid > 1 and parents < _PARENTS_MAX:
        process = read_process(pid)
        pid, parents = (0 if process is None else process.parent), parents + 1
        found = [monitored] if (monitored := _monitored_by(pid)) else []
    return [each.decode() for each in found]


def _monitored_by(pid: int) -> bytes:
    """Return the id of the container whose monitor a process is, podman's conmon; b"" for any other process.

    A process in a PID namespace of its own is none: it may be a job's.
    """
    try:
        with open(f"/proc/{pid}/comm", "rb", buffering=0) as file:
            if file.read() != b"conmon\n" or len(_numbers_of(pid)) != 1:
                return b""
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            found = _MONITOR.search(file.read(1 << 16))
    except (FileNotFoundError, ProcessLookupError):
        return b""
    return found[1] if found else b""


def _ids_of(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/cgroup", "rb", buffering=0) as file:
            return _ID.findall(file.read(1 << 16))
    except (FileNotFoundError, ProcessLookupError):
        return []


def init_of(processes: Collection[Process]) -> Process | None:
    """Return the process that is number 1 in the container's own PID namespace; None if it does not exist yet."""
    depths = {process: depth for process in processes if (depth := _depth_of_init(process.pid))}
    return min(depths, key=lambda process: depths[process]) if depths else None


def _depth_of_init(pid: int) -> int:
    """Return how many PID namespaces below ours a process is number 1; 0 if it is not number 1 in its own."""
    numbers = _numbers_of(pid)
    return len(numbers) - 1 if len(numbers) > 1 and numbers[-1] == b"1" else 0


def _numbers_of(pid: int) -> list[bytes]:
    """Return a process's number in each PID namespace from ours to its own; none if it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            return next((line.split()[1:] for line in file.read().splitlines() if line.startswith(b"NSpid:")), [])
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_over(pidfd: int) -> bool:
    """Return whether the process of a pidfd has ended."""
    dead = select.poll()
    dead.register(pidfd, select.POLLIN)
    return bool(dead.poll(0))


def kill(processes: Collection[Process]) -> None:
    """Send SIGKILL to the init and all other processes: a container that is being set up has no init yet."""
    init = init_of(processes)
    for process in sorted(processes, key=lambda each: each is not init):
        with contextlib.suppress(OSError):  # the next look finds it again
            kill_process(process)


class Containers:
    """The attempts that are containers. Watches the init of each; scans for the processes of one that is to end.

    The callback `seen` gets an attempt and its init; `init_died` an attempt whose init is dead; `none_left` an attempt
    of which no process is left.
    """

    def __init__(
        self,
        seen: Callable[[Attempt, Process], None],
        init_died: Callable[[Attempt], None],
        none_left: Callable[[Attempt], None],
    ) -> None:
        self._seen = seen
        self._init_died = init_died
        self._none_left = none_left
        self._attempts: dict[str, Attempt] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._backoff = Backoff(LOOK_S_MIN, LOOK_S_MAX)

    def add(self, attempt: Attempt) -> None:
        """Take on a container that is about to start."""
        assert attempt.container is not None
        self._attempts[attempt.container.id] = attempt

    def drop(self, attempt: Attempt) -> None:
        """Forget an ended attempt, and watch its init no longer."""
        assert attempt.container is not None
        self._attempts.pop(attempt.container.id, None)
        if attempt.container.pidfd >= 0:
            self._loop.remove_reader(attempt.container.pidfd)

    def attempt_of(self, container: str) -> Attempt | None:
        """Return the attempt that is this container; None if there is none now."""
        return self._attempts.get(container)

    def look_soon(self) -> None:
        """Scan now, because something has changed, and then at growing intervals."""
        self._backoff.reset()
        self._look_after(0)

    def _look_after(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        ending = (State.ENDING, State.KILLING, State.CLEARING)
        sought = {each: attempt for each, attempt in self._attempts.items() if attempt.state in ending}
        try:
            found = processes_of(sought)
            for each, attempt in sought.items():
                self._judge(attempt, found.get(each, []))
        except OSError as error:  # out of descriptors: scan again later
            log(f"cannot look for the processes of containers: {error}")
        if sought:
            self._look_after(self._backoff.next_s())

    def _judge(self, attempt: Attempt, processes: list[Process]) -> None:
        container = attempt.container
        assert container is not None
        if attempt.state is State.CLEARING:
            if processes:
                container.is_seen = True
                if container.is_to_die:
                    kill(processes)
            elif container.is_seen or container.is_removed:
                self._none_left(attempt)
        elif attempt.state is State.KILLING:  # there was no descriptor to kill it with
            kill(processes)
        elif len(processes) == 1 and init_of(processes) and takes(processes[0].pid, signal.SIGTERM) is False:
            # The kernel hides unhandled signals from an init; any other process would have ended by SIGTERM.
            kill(processes)

    def watch(self, attempt: Attempt, pid: int) -> bool:
        """Watch this process as the init of an attempt's container; return False if it is not, or is dead."""
        container = attempt.container
        assert container is not None
        if pid <= 0:
            return False
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return False
        init = read_process(pid)
        is_init = init is not None and bool(_depth_of_init(pid)) and container.id in containers_of(pid)
        if init is None or not is_init or is_over(pidfd):  # the last: all that was read was read of the same process
            os.close(pidfd)
            return False
        container.pidfd = pidfd
        self._loop.add_reader(pidfd, self._died, attempt)
        self._seen(attempt, init)
        return True

    def _died(self, attempt: Attempt) -> None:
        assert attempt.container is not None
        self._loop.remove_reader(attempt.container.pidfd)
        os.close(attempt.container.pidfd)
        attempt.container.pidfd = -1
        self._init_died(attempt)

    def processes(self, attempt: Attempt) -> list[Process]:
        """Return the living processes of an attempt's container. Raises `OSError` if they cannot be read."""
        assert attempt.container is not None
        return processes_of((attempt.container.id,)).get(attempt.container.id, [])
