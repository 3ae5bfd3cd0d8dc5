"""Cgroups of version 2 for the members of one supervisor: create, kill, prove empty, remove.

The hierarchy is found by its file system type, so a hybrid layout works as well (version 1 beside it, version 2 without
controllers under `unified/`): killing and proving empty need no controller. Source: the kernel's
Documentation/admin-guide/cgroup-v2.rst; `cgroup.kill` exists since Linux 5.14.
"""

import contextlib
import errno
import os
import signal
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

CPU_PERIOD_US: Final = 100_000
CPU_QUOTA_US_MIN: Final = 1_000


def mount_of(text: str, kind: str, option: str = "") -> tuple[str, str] | None:
    """Return a /proc/PID/mountinfo's first mount of a file system type: (root inside the hierarchy, mount point).

    None without one. With `option`, only one that has this word among its options, such as a controller of version 1.
    """
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, of_system = left.split(), right.split()
        if not separator or of_system[0] != kind or len(fields) < 5:
            continue
        if not option or option in of_system[-1].split(","):
            return _unescape(fields[3]), _unescape(fields[4])
    return None


def _unescape(path: str) -> str:
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def parse_own_path(text: str, controller: str = "") -> str | None:
    """Return the path in a /proc/PID/cgroup of version 2 (the line `0::PATH`), or of this controller of version 1.

    None without one.
    """
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    return None


def own_path(pid: int) -> str | None:
    """Return the version 2 path of a process's cgroup as /proc shows it; None for no process or no such hierarchy."""
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            return parse_own_path(file.read())
    except OSError:
        return None


def cgroup_of(pid: int | None = None, controller: str = "") -> Path | None:
    """Return the folder of a process's cgroup, by default of this process's; None if no such hierarchy is visible.

    `controller` "" is version 2, else a controller of version 1.
    """
    found = _place_of(controller, pid, Path("/"))
    if found is None:
        return None
    folder = Path(f"{found[0]}{found[1]}")
    return folder if folder.is_dir() else None


def cgroup_levels(controller: str, pid: int | None = None, root: Path = Path("/")) -> list[Path]:
    """Return a process's cgroup and all above it, as cgroups(7) mounts them; [] where `cgroup_of` returns None.

    Every level limits, so all of them count. In a cgroup namespace the path may point above the mount: then only the
    mount's own top exists.
    """
    found = _place_of(controller, pid, root)
    if found is None:
        return []
    path = PurePosixPath(found[1].lstrip("/"))
    return [found[0] / level for level in (path, *path.parents) if ".." not in level.parts]


def _place_of(controller: str, pid: int | None, root: Path) -> tuple[Path, str] | None:
    """Return where the hierarchy is mounted, and the path of the process's cgroup below that, as `/a/b`."""
    try:
        mount = mount_of((root / "proc/self/mountinfo").read_text(), "cgroup" if controller else "cgroup2", controller)
        text = (root / "proc" / ("self" if pid is None else str(pid)) / "cgroup").read_text()
    except OSError:
        return None
    own = parse_own_path(text, controller)
    if mount is None or own is None:
        return None
    top, point = mount
    # A container without a cgroup namespace sees the host's path, but its mount shows only the part below `top`.
    if top != "/" and (own == top or own.startswith(f"{top}/")):
        own = own[len(top) :]
    return root / point.lstrip("/"), own if own != "/" else ""


class GroupMemory(NamedTuple):
    """What the kernel says of a group's memory since the group was made, with all groups below it."""

    oom_kills: int
    """Processes of it that were killed because memory had run out, whether its own limit or the host's."""
    at_limit: bool
    """Whether memory ran out at its own limit, or one below it."""
    peak_bytes: int
    """The most that it held at once; 0 where the kernel does not count that (before Linux 5.19)."""
    max_bytes: int
    """Its own limit; 0 for none."""


class CgroupFolder:
    """One cgroup by its path. Every method may raise `OSError` unless it says otherwise."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def is_empty(self) -> bool:
        """Return whether no live process is in the group or below it.

        True if the group is gone, because only empty groups can be removed.
        """
        try:
            text = _read(self.path + "/cgroup.events")
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno == errno.ENODEV:
                return True
            raise
        return "populated 0" in text

    def memory(self) -> GroupMemory | None:
        """Return what is known of its memory; None where it is not counted, and once the group is gone. Raises
        nothing."""
        try:
            events = dict(line.split() for line in _read(self.path + "/memory.events").splitlines())
            kills, at_limit = int(events.get("oom_kill", 0)), int(events.get("oom", 0)) > 0
        except (OSError, ValueError):
            return None
        return GroupMemory(kills, at_limit, self._bytes("memory.peak"), self._bytes("memory.max"))

    def memory_now(self) -> int:
        """Return how many bytes it holds now; 0 where that is not counted, and once it is gone. Raises nothing."""
        return self._bytes("memory.current")

    def cpu_ms(self) -> int | None:
        """Return the CPU time of all processes that were ever in it or below; None once it is gone. Raises nothing."""
        try:
            stat = dict(line.split() for line in _read(self.path + "/cpu.stat").splitlines())
            return int(stat["usage_usec"]) // 1000
        except (OSError, ValueError, KeyError):
            return None

    def _bytes(self, file: str) -> int:
        try:
            return int(_read(f"{self.path}/{file}"))
        except (OSError, ValueError):  # an older kernel, or `max`
            return 0

    def kill(self) -> None:
        """Send SIGKILL to every process in the group and below it; do nothing if the group is gone.

        Forks in progress are included. Before Linux 5.14 they are missed: repeat until the group is empty.
        """
        try:
            _write(self.path + "/cgroup.kill", "1")
        except FileNotFoundError:  # before Linux 5.14, or the group is gone
            pass
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
        if not self.is_empty():
            self._kill_one_by_one()

    def _kill_one_by_one(self) -> None:
        # cgroup.kill passes over a process whose first thread has ended by itself (seen on Linux 6.18)
        for pid in self.pids():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                if pid in self.pids():  # by now the pid could belong to another process
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            except ProcessLookupError:
                continue
            finally:
                os.close(descriptor)

    def pids(self) -> list[int]:
        """Return the pids of live processes in the group and below it, in no order; empty if the group is gone.

        A group that cannot be read is left out.
        """
        found: list[int] = []
        for folder, _, _ in os.walk(self.path):
            try:
                found.extend(int(line) for line in _read(folder + "/cgroup.procs").split())
            except OSError:
                continue
        return found

    def remove_empty(self) -> None:
        """Remove the group if it has neither processes nor sub-groups; else leave it. Raises nothing."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def remove(self) -> bool:
        """Remove the group and its sub-groups; return False if a process is left in one of them.

        True, also if the group was gone already, proves that no process is left in it.
        """
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise
        else:
            return True
        if not self.is_empty():
            return False
        for folder, _, _ in os.walk(self.path, topdown=False):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
                    return False
                raise
        return True


def controllers_below(folder: Path) -> tuple[str, ...]:
    """Return those of cpu and memory that groups below this one can be limited by, as it is now; changes nothing.

    The root of the hierarchy gives its groups every controller that it has, once a worker asks for it.
    """
    try:
        is_root = not (folder / "cgroup.type").exists()
        given = _read(str(folder / ("cgroup.controllers" if is_root else "cgroup.subtree_control"))).split()
    except OSError:
        return ()
    return tuple(name for name in ("cpu", "memory") if name in given)


class CgroupBase(CgroupFolder):
    """The supervisor's own group, below which each member gets one."""

    __slots__ = ("controllers",)

    def __init__(self, path: str, controllers: tuple[str, ...]) -> None:
        super().__init__(path)
        self.controllers = controllers
        """Those of cpu and memory that can be limited here."""

    @classmethod
    def open(cls, name: str, under: Path | None = None) -> "CgroupBase | None":
        """Make (or find) the group `name` under this process's own group, or under `under`.

        Return None if cgroup v2 is not mounted, or that group cannot be made or cannot take this user's processes. To
        start a process in a group, this user must be able to write `cgroup.procs` there and in the common ancestor.
        """
        parent = cgroup_of() if under is None else under
        if parent is None or not os.access(parent / "cgroup.procs", os.W_OK):
            return None
        path = str(parent / name)
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            pass
        except OSError:
            return None
        try:
            if _read(path + "/cgroup.type").strip() != "domain" or not os.access(path + "/cgroup.procs", os.W_OK):
                return None
        except OSError:
            return None
        return cls(path, _enable_controllers(str(parent), path))

    def kill_former(self) -> None:
        """Kill all processes that a former supervisor left in this group and below, and remove the sub-groups.

        A sub-group whose processes are not gone yet stays. Raises `OSError`.
        """
        self.kill()
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False):
                CgroupFolder(entry.path).remove()

    def create(self, name: str, cpu_milli: int | None, memory_bytes: int | None) -> tuple[CgroupFolder, list[str]]:
        """Return a new, empty group for one member, and the names of the limits that cannot be set here.

        Where this group itself is gone, it is made anew: it is empty between jobs, and any cleaner may remove it then.
        Raises `FileExistsError` if an older group of that name still has a process.
        """
        folder = CgroupFolder(f"{self.path}/{name}")
        try:
            os.mkdir(folder.path, 0o755)
        except FileNotFoundError:
            os.mkdir(self.path, 0o755)
            self.controllers = _enable_controllers(os.path.dirname(self.path), self.path)
            os.mkdir(folder.path, 0o755)
        except FileExistsError:
            if not folder.remove():
                raise
            os.mkdir(folder.path, 0o755)
        # out of memory, all processes of a member die: what waits for a killed one (a rank's peers) would wait for ever
        self._limit(folder, "memory", "memory.oom.group", "1")
        return folder, self.limit(folder, cpu_milli, memory_bytes)

    def limit(self, folder: CgroupFolder, cpu_milli: int | None, memory_bytes: int | None) -> list[str]:
        """Set limits on a member's group, None for no limit; return the names of the limits that cannot be set here."""
        ignored: list[str] = []
        if cpu_milli is not None and not self._limit(folder, "cpu", "cpu.max", _cpu_max(cpu_milli)):
            ignored.append("cpu_milli")
        if memory_bytes is not None and not self._limit_memory(folder, memory_bytes):
            ignored.append("memory_bytes")
        return ignored

    def _limit_memory(self, folder: CgroupFolder, memory_bytes: int) -> bool:
        """Limit a member's memory without swap: with swap a job beyond its limit would slow the whole host down."""
        if not self._limit(folder, "memory", "memory.max", str(memory_bytes)):
            return False
        # a kernel that does not count swap has no such file
        has_file = os.path.exists(f"{folder.path}/memory.swap.max")
        return not has_file or self._limit(folder, "memory", "memory.swap.max", "0")

    def _limit(self, folder: CgroupFolder, controller: str, file: str, value: str) -> bool:
        if controller not in self.controllers:
            return False
        try:
            _write(f"{folder.path}/{file}", value)
        except OSError:
            return False
        return True


def _cpu_max(cpu_milli: int) -> str:
    return f"{max(CPU_QUOTA_US_MIN, cpu_milli * CPU_PERIOD_US // 1000)} {CPU_PERIOD_US}"


def _enable_controllers(parent: str, path: str) -> tuple[str, ...]:
    enabled: list[str] = []
    for controller in ("cpu", "memory"):
        # The parent refuses while processes live in it (the rule against inner processes), unless it is the root.
        for folder in (parent, path):
            try:
                if controller in _read(folder + "/cgroup.controllers").split():
                    _write(folder + "/cgroup.subtree_control", "+" + controller)
            except OSError:
                continue
        try:
            if controller in _read(path + "/cgroup.subtree_control").split():
                enabled.append(controller)
        except OSError:
            continue
    return tuple(enabled)


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 20).decode()
    finally:
        os.close(descriptor)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
