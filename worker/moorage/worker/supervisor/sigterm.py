"""Ask a job to end: decide which of its processes get SIGTERM, and when.

- Every process of the main process's group gets it, as with a terminal's Ctrl-C.
- A process of another group or session gets it unless a process above it handles SIGTERM. A launcher such as `timeout`
  or `torchrun` passes the signal on itself, and two signals could interrupt the saving that the first one began. If
  that launcher ends before them, the processes below it get the signal then.
- A process that does not handle SIGTERM and reads its input from one that does (`train.py | tee log`) does not get it:
  it ends by itself at the end of its input, after the last line.
- A process that started after the first signal does not get it: it belongs to the saving.
"""

import contextlib
import os
import signal
import stat
from collections.abc import Collection, Mapping
from typing import Final

from moorage.schemas.service import FD_VARIABLE
from moorage.system.proctree import TICKS_PER_S, Process, boottime_s, kill_process, read_environ
from moorage.worker.supervisor.checkpoint import ignores, takes

#: most descriptors of one process that are searched for the pipe that feeds another
DESCRIPTORS_MAX: Final = 4096
_SERVED: Final = f"{FD_VARIABLE}=".encode()


class Sigterm:
    """The SIGTERM of one job that is asked to end now. Call `look` at once, and again when a process has ended."""

    __slots__ = ("_group", "_is_child", "_known", "_since_ticks")

    def __init__(self, group: int, is_child: bool) -> None:
        """`group` is the process group of the job's main process: its pid.

        `is_child`: it is an unreaped child of the caller, so that the group's number cannot mean another group.
        """
        self._group = group
        self._is_child = is_child
        self._since_ticks = int(boottime_s() * TICKS_PER_S)
        self._known: set[tuple[int, int]] = set()

    def look(self, processes: Collection[Process]) -> None:
        """Send SIGTERM to those of the job's living processes that should get it now.

        A stopped process gets it once it continues, so SIGCONT follows. Raises OSError if no descriptor is left.
        """
        fresh = [
            each
            for each in processes
            if each.start_ticks <= self._since_ticks and (each.pid, each.start_ticks) not in self._known
        ]
        if not fresh:
            return
        # None is a process that is just starting a program: what it will handle is not known yet
        takers = {each.pid for each in processes if takes(each.pid, signal.SIGTERM) is not False}
        parents = {each.pid: each.parent for each in processes}
        above = {each.pid: _above(each.pid, parents) for each in fresh}
        readers = _readers(processes, takers)
        if self._is_child and not self._known and not readers:
            self._signal_group()
            self._known.update((each.pid, each.start_ticks) for each in fresh if each.group == self._group)
            fresh = [each for each in fresh if each.group != self._group]
        # parents first: a shell whose child dies before it gets the signal goes on with its next command
        for process in sorted(fresh, key=lambda each: len(above[each.pid])):
            if process.pid in readers:
                self._known.add((process.pid, process.start_ticks))
            elif process.group == self._group or takers.isdisjoint(above[process.pid]):
                self._known.add((process.pid, process.start_ticks))
                with contextlib.suppress(PermissionError):  # a set-user-ID program
                    kill_process(process, signal.SIGTERM)
                    kill_process(process, signal.SIGCONT)

    def ends_more_of(self, processes: Collection[Process]) -> bool:
        """Return whether one of the job's living processes has not got SIGTERM, and would now, which ends it."""
        ended = ended_by_it(processes, self._group) - {pid for pid, _ in self._known}
        return any(each.pid in ended and each.start_ticks <= self._since_ticks for each in processes)

    def _signal_group(self) -> None:
        """Signal the main process's group at once: a process that it forks meanwhile is not missed."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            try:
                os.killpg(self._group, number)
            except ProcessLookupError:
                os.kill(self._group, number)  # its session does not exist yet


def ended_by_it(processes: Collection[Process], group: int, *, passed_on: bool = False) -> set[int]:
    """Return the pids of those of a job's processes that SIGTERM ends: they get it, and do not handle or ignore it.

    With `passed_on` also those to which a launcher above them may pass it on. A program of `moorage serve` is none of
    these: that lets it finish.
    """
    takers = {each.pid for each in processes if takes(each.pid, signal.SIGTERM) is not False}
    parents = {each.pid: each.parent for each in processes}
    readers = _readers(processes, takers)
    found: set[int] = set()
    for process in processes:
        if process.pid in takers or ignores(process.pid, signal.SIGTERM):
            continue
        above = _above(process.pid, parents)
        if process.group == group or takers.isdisjoint(above):
            gets = process.pid not in readers
        else:
            gets = passed_on and not any(_is_served_with(pid) for pid in (process.pid, *above))
        if gets:
            found.add(process.pid)
    return found


def _is_served_with(pid: int) -> bool:
    """Return whether `moorage serve` has started a process, or one above it."""
    with contextlib.suppress(PermissionError):  # a set-user-ID program
        return any(entry.startswith(_SERVED) for entry in read_environ(pid) or ())
    return False


def _above(pid: int, parents: Mapping[int, int]) -> list[int]:
    """Return the ancestors of a process that belong to the job, nearest first."""
    found: list[int] = []
    # bounded: the pids were read one after the other, and a pid that was reused meanwhile could close a circle
    while (pid := parents.get(pid, 0)) in parents and len(found) < len(parents):
        found.append(pid)
    return found


def _readers(processes: Collection[Process], takers: Collection[int]) -> set[int]:
    """Return the processes without a handler whose standard input is written by one that handles SIGTERM.

    Also those that read from such a reader: `train.py | grep step | tee log`.
    """
    inputs = {each.pid: pipe for each in processes if each.pid not in takers and (pipe := _input_of(each.pid))}
    found: set[int] = set()
    writers = list(takers) if inputs else []
    while writers:
        written = _outputs_of(writers.pop(), set(inputs.values()))
        fed = {pid for pid, pipe in inputs.items() if pipe in written} - found
        found |= fed
        writers += fed
    return found


def _input_of(pid: int) -> str:
    """Return the pipe that is a process's standard input; empty if it is no pipe, or cannot be read."""
    with contextlib.suppress(OSError):
        target = os.readlink(f"/proc/{pid}/fd/0")
        return target if target.startswith("pipe:") else ""
    return ""


def _outputs_of(pid: int, pipes: Collection[str]) -> set[str]:
    """Return those of `pipes` that a process may write to; empty if its descriptors cannot be read."""
    found: set[str] = set()
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder)[:DESCRIPTORS_MAX]:
            with contextlib.suppress(OSError):  # closed meanwhile
                path = f"{folder}/{name}"
                # the link's own mode says how the descriptor was opened (proc_pid_fd(5))
                if (pipe := os.readlink(path)) in pipes and os.lstat(path).st_mode & stat.S_IWUSR:
                    found.add(pipe)
    return found
