"""Find the attempt that a process of this host belongs to: by its cgroup, session, ancestors and environment."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.system.cgroup import own_path
from moorage.system.proctree import MARK_NAMES, read_environ, read_process, uid_of

#: a longer chain of parents can only come from pids that were reused meanwhile
ANCESTORS_MAX: Final = 4096


class AttemptProcesses:
    """The processes that one driver's supervisor has started, by attempt."""

    def __init__(self) -> None:
        self._names: dict[int, AttemptName] = {}  # by the pid of the first process, which leads a session
        self._groups: dict[AttemptName, str] = {}  # paths of cgroups of version 2, as /proc shows them; "" for none
        self._pids: dict[AttemptName, int] = {}

    def started(self, name: AttemptName, pid: int) -> None:
        """Record the pid of an attempt's first process."""
        self._names[pid] = name
        self._pids[name] = pid

    def ended(self, name: AttemptName) -> None:
        """Forget an attempt: all of its processes have ended."""
        pid = self._pids.pop(name, None)
        if pid is not None:
            if self._names.get(pid) == name:  # otherwise the pid belongs to another attempt by now
                del self._names[pid]
            self._groups.pop(name, None)

    def attempts_of(self, pids: Collection[int], supervisor: int) -> dict[int, AttemptName | None]:
        """Return the attempt of each process; None if the process belongs to an unknown attempt.

        Such a process descends from the supervisor and hides its session and environment. Processes that belong to no
        attempt are left out.
        """
        found: dict[int, AttemptName | None] = {}
        if not pids or not self._names:
            return found
        groups = self._own_groups(supervisor)
        for pid in pids:
            name = _by_group(pid, groups) or self._by_ancestors(pid)
            # what attempts leave descends from the supervisor; any process can have marks, so they prove nothing alone
            if name is None and supervisor in _ancestors(pid)[1:]:
                found[pid] = self._by_marks(pid)
            elif name is not None:
                found[pid] = name
        return found

    def _own_groups(self, supervisor: int) -> dict[str, AttemptName]:
        """Return the attempts by their cgroups.

        A cgroup belongs to an attempt if neither supervisor nor agent is in it.
        """
        for name, pid in self._pids.items():  # read only when needed: most attempts end before that
            if name not in self._groups:
                self._groups[name] = _group(pid)
        shared = {"", _group(supervisor), _group(os.getpid())}
        return {group: name for name, group in self._groups.items() if group not in shared}

    def _by_ancestors(self, pid: int) -> AttemptName | None:
        process = read_process(pid)
        if process is not None and process.session in self._names:
            return self._names[process.session]
        return next((self._names[above] for above in _ancestors(pid) if above in self._names), None)

    def _by_marks(self, pid: int) -> AttemptName | None:
        try:
            environ = dict(entry.split(b"=", 1) for entry in read_environ(pid) or () if b"=" in entry)
            tenant, job, *numbers = (environ[os.fsencode(mark)].decode() for mark in MARK_NAMES)
            replica, attempt, fence = map(int, numbers)
        except (PermissionError, KeyError, ValueError):  # another user's process, no marks, or no numbers in them
            return None
        name = (tenant, job, replica, attempt, fence)
        if name not in self._pids:
            return None
        # any process can carry the marks of another user's attempt, and that attempt would pay for what it uses
        return name if uid_of(pid) == uid_of(self._pids[name]) is not None else None


def _by_group(pid: int, groups: Mapping[str, AttemptName]) -> AttemptName | None:
    path = _group(pid) if groups else ""
    while path.strip("/"):
        if path in groups:
            return groups[path]
        path = path.rpartition("/")[0]
    return None


def _ancestors(pid: int) -> list[int]:
    """Return the process and its ancestors, nearest first, without pid 1, as far as this PID namespace shows them."""
    found: list[int] = []
    while pid > 1 and len(found) < ANCESTORS_MAX:
        found.append(pid)
        process = read_process(pid)
        if process is None:
            break
        pid = process.parent
    return found


def _group(pid: int) -> str:
    return own_path(pid) or ""
