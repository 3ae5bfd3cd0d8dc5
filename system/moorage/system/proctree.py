"""Processes as /proc shows them: parents and children, marks in environments, and which of them live.

A process is named by (pid, start time), because a pid alone is used again. Sources: proc(5), prctl(2), pidfd_open(2).
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
ENVIRON_BYTES_MAX: Final = 4 * 1024 * 1024
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
MARK_NAMES: Final = ("MOORAGE_TENANT", "MOORAGE_JOB", "MOORAGE_REPLICA", "MOORAGE_ATTEMPT", "MOORAGE_FENCE")
"""The variables that together name a member in the environment of all its processes."""
STATE_MARK: Final = "MOORAGE_STATE_MARK"
"""The variable that names the supervisor's state folder: two deployments of one host may name their members alike."""

_MARK_ENTRIES: Final = tuple(os.fsencode(f"{name}=") for name in MARK_NAMES)
_STATE_MARK_ENTRY: Final = os.fsencode(f"{STATE_MARK}=")
#: as os.fsencode, which takes thrice as long over its arguments' types
_ENCODING: Final = sys.getfilesystemencoding()
_ENCODING_ERRORS: Final = sys.getfilesystemencodeerrors()
_PF_KTHREAD: Final = 0x00200000
_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Process:
    """The needed fields of /proc/PID/stat. `start_ticks` counts from boot in 1/`TICKS_PER_S` s."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    start_ticks: int
    kernel_thread: bool
    threads: int

    @property
    def dead(self) -> bool:
        """Whether it has ended and only waits to be reaped.

        A process whose first thread has ended by itself has that thread's state, and lives while another thread does.
        """
        return self.state in "ZX" and self.threads < 2


def become_subreaper() -> None:
    """Make this process a subreaper: descendants whose parent dies become its children. Raises `OSError`."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def boot_id(root: Path = Path("/")) -> str:
    """Return the kernel's random name of this boot (random(4)): one for all containers of a host."""
    return (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def boottime_s() -> float:
    """Return CLOCK_BOOTTIME: the seconds since boot, with the time in suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def sees_all_pids() -> bool:
    """Return whether this process is in the host's PID namespace, whose number Linux fixes (PROC_PID_INIT_INO)."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC
    except OSError:
        return False


def read_process(pid: int) -> Process | None:
    """Return one process, or None if no process has that pid."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses, and may itself hold spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        state=fields[0].decode("ascii"),
        start_ticks=int(fields[19]),
        kernel_thread=bool(int(fields[6]) & _PF_KTHREAD),
        threads=int(fields[17]),
    )


def all_processes() -> list[Process]:
    """Return every process that /proc shows now."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return [process for process in found if process is not None]


def stopped_pids() -> list[int]:
    """Return the processes that a signal such as SIGSTOP has stopped; a debugger's are not among them."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                    text = file.read()
                if text[text.rindex(b")") + 2 :][:1] == b"T":
                    found.append(int(name))
    return found


def children(pid: int) -> list[int]:
    """Return the direct children of one process, of all its threads, zombies included; empty if it is gone.

    The kernel may leave out a child if another one is reaped during the read (proc(5)). For the calling process's own
    children this cannot happen, because only it can reap them.
    """
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return found
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                found.extend(int(child) for child in _read_all(file.fileno()).split())
        except (FileNotFoundError, ProcessLookupError):
            if os.path.exists(f"/proc/{pid}/task/{task}"):
                # A kernel without CONFIG_PROC_CHILDREN.
                return [process.pid for process in all_processes() if process.parent == pid]
    return found


def descendants(roots: Iterable[int]) -> list[int]:
    """Return the roots and all of their descendants, parents before children."""
    found: list[int] = []
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in seen:
            continue
        seen.add(pid)
        found.append(pid)
        waiting.extend(children(pid))
    return found


def marks_of(environ: Mapping[str, str]) -> tuple[bytes, ...]:
    """Return the `NAME=value` entries by which processes of a member with this environment are known; may be empty.

    The mark of the state folder alone identifies no member.
    """
    names = [name for name in MARK_NAMES if name in environ]
    if names and STATE_MARK in environ:
        names.append(STATE_MARK)
    return tuple([f"{name}={environ[name]}".encode(_ENCODING, _ENCODING_ERRORS) for name in names])


def read_environ(pid: int) -> frozenset[bytes] | None:
    """Return the entries of a process's environment as they were at its exec; None if the process is gone.

    Raises `PermissionError` for a process of another user. Empty for kernel threads, and for a process that has
    overwritten its environment. A process whose first thread has ended shows it by its other threads alone.
    """
    try:
        return _environ_of(f"/proc/{pid}")
    except FileNotFoundError:
        return None
    except ProcessLookupError:
        return _environ_of_threads(pid)


def _environ_of_threads(pid: int) -> frozenset[bytes] | None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                return _environ_of(f"/proc/{pid}/task/{thread}")
    return None


def _environ_of(folder: str) -> frozenset[bytes]:
    with open(f"{folder}/environ", "rb", buffering=0) as file:
        return frozenset(entry for entry in _read_all(file.fileno()).split(b"\0") if entry)


def kill_process(process: Process, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal to exactly this process, never to a later one with its pid; return False if it was gone.

    Raises `OSError` if this user may not signal it, or no descriptor is left.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        now = read_process(process.pid)
        if now is None or now.start_ticks != process.start_ticks:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def kill_trees(roots: Iterable[int]) -> int:
    """Send SIGKILL to the roots and all their descendants; return how many got it. Raises as `kill_process`.

    First all of them are stopped, parents before children, because a parent that sees its child die could fork, or exit
    as if all were well. Then they are killed, children before parents, so that none loses its parent on the way. A
    process that is forked meanwhile is missed: repeat until nothing is left.
    """
    found = [read_process(pid) for pid in descendants(roots)]
    living = [process for process in found if process is not None and not process.dead]
    for process in living:
        kill_process(process, signal.SIGSTOP)
    return sum(kill_process(process) for process in reversed(living))


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of a scan of the environments of all processes."""

    marked: dict[str, list[Process]]
    """By the name of the marks that they carry."""
    others: list[Process]
    """All live user processes of users that matter, for a look at their sessions."""
    unreadable: list[Process]
    """Live processes whose environment cannot be judged: not readable, empty in a user process, or that of a launcher
    (a state folder's mark and no member's), which what it has forked shows until exec."""
    state_marks: dict[int, bytes]
    """By pid: the entry that names the state folder under which it was started."""


def state_mark_of(entries: Iterable[bytes]) -> bytes | None:
    """Return the entry that marks a state folder; None if there is none."""
    return next((entry for entry in entries if entry.startswith(_STATE_MARK_ENTRY)), None)


def scan_marks(marks: Mapping[str, tuple[bytes, ...]], own_uid: int) -> Scan:
    """Scan the environment of every process for these named sets of marks; a process that has all of a set matches it.

    A set without a state folder's mark does not match a process that has one, since that belongs to another supervisor.
    Unless `own_uid` is 0, processes of other users are left out: children of this process cannot become such, except by
    set-user-ID programs. This process itself is left out, too.
    """
    wanted = [(name, frozenset(entries)) for name, entries in marks.items() if entries]
    found = Scan(marked={}, others=[], unreadable=[], state_marks={})
    for process in all_processes():
        if process.dead or process.kernel_thread or process.pid == os.getpid():
            continue
        if own_uid != 0 and uid_of(process.pid) != own_uid:
            continue
        try:
            environ = read_environ(process.pid)
        except PermissionError:
            environ = frozenset()
        if environ is None:
            continue
        found.others.append(process)
        state_mark = state_mark_of(environ)
        if state_mark is not None:
            found.state_marks[process.pid] = state_mark
        if not environ or (state_mark is not None and not any(entry.startswith(_MARK_ENTRIES) for entry in environ)):
            found.unreadable.append(process)
        for name, entries in wanted:
            if entries <= environ and state_mark == state_mark_of(entries):
                found.marked.setdefault(name, []).append(process)
    return found


def uid_of(pid: int) -> int | None:
    """Return the effective uid of a process; None if it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _read_all(descriptor: int) -> bytes:
    pieces: list[bytes] = []
    length = 0
    while length < ENVIRON_BYTES_MAX and (piece := os.read(descriptor, 1 << 16)):
        pieces.append(piece)
        length += len(piece)
    return b"".join(pieces)
