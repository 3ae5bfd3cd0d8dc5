"""End the processes that a former supervisor's attempts left, and prove that it is gone.

The main processes died with that supervisor (parent-death signal); processes that they had started may live on, and so
may containers.
"""

import contextlib
import os
import signal
from dataclasses import dataclass, field
from typing import Final

from moorage.system.cgroup import CgroupFolder
from moorage.system.proctree import (
    TICKS_PER_S,
    Process,
    Scan,
    descendants,
    kill_process,
    read_process,
    scan_marks,
    state_mark_of,
    uid_of,
)
from moorage.worker.supervisor.containers import kill, processes_of
from moorage.worker.supervisor.journal import Left, Starting
from moorage.worker.supervisor.protocol import Ended, Proof, Unproven

START_SLACK_S: Final = 1.0
"""A process of an attempt started no earlier than the attempt's record minus this."""
_NO_SCAN: Final = Scan(marked={}, others=[], unreadable=[], state_marks={})


@dataclass(slots=True)
class FormerAttempts:
    """The attempts of which processes may be left, by key. Call `clear` again and again until `waiting` is empty."""

    boot_id: str
    waiting: dict[str, Left]
    found: dict[str, Unproven] = field(init=False)
    """Why processes of each waiting attempt may be left, as of the last pass."""
    removed: set[str] = field(default_factory=set)
    """The attempts whose container the engine has removed."""
    _seen: set[str] = field(default_factory=set)
    """The attempts of whose container a process was seen here."""

    def __post_init__(self) -> None:
        self.found = {key: Unproven(key=key, pids=(), message="not searched for yet") for key in self.waiting}

    def clear(self, now_boottime_s: float) -> list[Ended]:
        """Make one pass: kill what is left, and return the ends that are proven now. Does not block.

        Raises `OSError`, with nothing done, if the processes cannot be listed: call it again.
        """
        ended: list[Ended] = []
        scan = self._scan()
        lefts = self.waiting.values()
        contained = processes_of(
            {left.starting.container for left in lefts if left.starting and left.starting.container}
        )
        for key, left in list(self.waiting.items()):
            starting = left.starting
            if starting is None:
                self._not_proven(key, (), "the journal has no start of it")
                continue
            proof: Proof | None = None
            try:
                if starting.container and starting.boot_id == self.boot_id:
                    proof = self._clear_container(key, left.pid, contained.get(starting.container, []))
                else:
                    proof = self._prove(key, starting, left.pid, scan)
            except OSError as error:  # the ends of other attempts are returned all the same
                self._not_proven(key, (), f"its processes cannot be read: {error.strerror or error}")
            if proof is None:
                continue
            del self.waiting[key]
            self.found.pop(key, None)
            self.removed.discard(key)
            self._seen.discard(key)
            ended.append(
                Ended(
                    key=key,
                    reason="supervisor-died",
                    proof=proof,
                    pid=left.pid,
                    started_boottime_s=starting.boottime_s,
                    ended_boottime_s=now_boottime_s,
                )
            )
        return ended

    def _scan(self) -> Scan:
        """Scan every process's environment for all attempts without a cgroup; return an empty scan if no attempt needs
        it.
        """
        starts = {key: left.starting for key, left in self.waiting.items()}
        marks = {
            key: starting.marks
            for key, starting in starts.items()
            if starting is not None and starting.boot_id == self.boot_id and not (starting.cgroup or starting.container)
        }
        return scan_marks(marks, os.geteuid()) if marks else _NO_SCAN

    def _prove(self, key: str, starting: Starting, pid: int | None, scan: Scan) -> Proof | None:
        if starting.boot_id != self.boot_id:
            return "reboot"
        if starting.cgroup:
            return self._clear_cgroup(key, starting.cgroup)
        return self._clear_marked(key, starting, pid, scan)

    def drop(self, key: str) -> bool:
        """Give up an attempt because an operator says so. Return False for a key that does not wait."""
        self.found.pop(key, None)
        self.removed.discard(key)
        self._seen.discard(key)
        return self.waiting.pop(key, None) is not None

    def _not_proven(self, key: str, pids: tuple[int, ...], message: str) -> None:
        self.found[key] = Unproven(key=key, pids=pids, message=message)

    def _clear_container(self, key: str, init: int | None, processes: list[Process]) -> Proof | None:
        if processes:
            self._seen.add(key)
            kill(processes)
            self._not_proven(key, tuple(sorted(each.pid for each in processes)), "its container still runs")
            return None
        if init is not None or key in self._seen:
            return "container"
        if key in self.removed:
            return "never-ran"
        self._not_proven(key, (), "its container may still be started: the engine has not removed it")
        return None

    def _clear_cgroup(self, key: str, path: str) -> Proof | None:
        folder = CgroupFolder(path)
        try:
            folder.kill()
            if folder.remove():
                return "cgroup"
            self._not_proven(key, tuple(sorted(folder.pids())), "its cgroup is not empty yet")
        except OSError as error:
            self._not_proven(key, (), f"its cgroup cannot be cleared: {error}")
        return None

    def _clear_marked(self, key: str, starting: Starting, main_pid: int | None, scan: Scan) -> Proof | None:
        found = {process.pid: process for process in scan.marked.get(key, [])}
        own = state_mark_of(starting.marks)
        others = {pid for pid, mark in scan.state_marks.items() if mark != own}  # processes of another deployment
        if main_pid is not None:
            for process in scan.others:
                if process.session == main_pid and process.pid not in others and not _is_older(process, starting):
                    found[process.pid] = process
        for pid in descendants(found):  # a process without both marks is known by its parent while the parent lives
            below = read_process(pid)
            if below is not None and not below.dead and pid not in others:
                found.setdefault(pid, below)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stop all first: no parent may react to the death of its child
            for process in reversed(found.values()):
                with contextlib.suppress(OSError):  # the next pass finds it again
                    kill_process(process, number)
        if found:
            self._not_proven(key, tuple(sorted(found)), "processes of it are still there")
            return None
        if not starting.marks:
            self._not_proven(key, (), "its environment contained no mark to search for")
            return None
        doubtful = tuple(
            sorted(
                process.pid
                for process in scan.unreadable
                if process.parent != os.getpid()
                and process.pid not in others
                and not _is_older(process, starting)
                and not _is_of_another_session(process, starting)
            )
        )
        if doubtful:
            self._not_proven(key, doubtful, "the environment of these processes cannot be read")
            return None
        return "scan"


def _is_of_another_session(process: Process, starting: Starting) -> bool:
    """Return whether a process is in a session that no process of the attempt can have begun.

    A process stays in the session of its parent or begins its own, so an attempt's processes are in sessions that the
    attempt began: none has a leader from before the attempt, or of another user (sshd's). The number of a session is no
    other process's pid while the session has a process.
    """
    leader = read_process(process.session)
    if leader is None:
        return False
    of_another_user = os.geteuid() != 0 and uid_of(leader.pid) not in (None, os.geteuid())
    return of_another_user or _is_older(leader, starting)


def _is_older(process: Process, starting: Starting) -> bool:
    return process.start_ticks / TICKS_PER_S < starting.boottime_s - START_SLACK_S
