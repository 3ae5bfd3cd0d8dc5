"""Turn a member into a process: its pipes, cgroup and journal record, the launcher, the confirmation of its exec."""

import errno
import itertools
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moorage.system.cgroup import CgroupBase
from moorage.system.device_fence import DeviceFences, NodeRange
from moorage.system.disk_room import DiskRoom
from moorage.system.proctree import boottime_s
from moorage.worker.supervisor.child import StartRefused, why_not
from moorage.worker.supervisor.journal import Record, Starting
from moorage.worker.supervisor.launcher_client import Launcher
from moorage.worker.supervisor.member import Member
from moorage.worker.supervisor.output import ArrivalOrder, OutputPump, order_path, output_paths


@dataclass(slots=True)
class Launches:
    """Starts members of one state folder. `write_ahead` puts records into the journal."""

    state: Path
    boot_id: str
    cgroups: CgroupBase | None
    fences: DeviceFences | None
    launcher: Launcher
    write_ahead: Callable[[list[Record]], None]
    _room: DiskRoom = field(init=False)
    # A cgroup must not reuse a name of a former supervisor: what that one left is killed by cgroup name.
    _prefix: str = field(default_factory=lambda: f"m-{secrets.token_hex(6)}")
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._room = DiskRoom(self.state)

    def ask(self, member: Member) -> socket.socket | int:
        """Request a member's process from the launcher; return what `Launcher.answer` needs.

        Raises `StartRefused` if no process will be made.
        """
        assert member.child is not None
        passed: list[int] = []
        stage = "cgroup"
        try:
            self._open(member, passed)
            stage = "devices"
            self._refuse_devices(member, passed)
            stage = "journal"
            now_s = boottime_s()
            group, marks = member.cgroup.path if member.cgroup is not None else "", member.marks
            record = Starting(key=member.key, boot_id=self.boot_id, boottime_s=now_s, cgroup=group, marks=marks)
            self.write_ahead([record])
            member.started_boottime_s = now_s
            stage = "clone"
            return self.launcher.ask(member.child, *passed)
        except OSError as error:
            why = (error.strerror or "") if stage == "clone" else str(error)
            raise StartRefused(error.errno or errno.EIO, stage, why) from None
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def _open(self, member: Member, passed: list[int]) -> None:
        """Make the member's pipes and cgroup, and append to `passed` the descriptors that its process gets.

        Raises `OSError`.
        """
        start = member.start
        member.confirm = _pipe(passed)
        stdout, stderr = output_paths(self.state, start.key)
        member.pumps.append(OutputPump(_pipe(passed), stdout, start.output_cap_bytes, "stdout", self._room))
        member.pumps.append(OutputPump(_pipe(passed), stderr, start.output_cap_bytes, "stderr", self._room))
        member.order = ArrivalOrder(order_path(self.state, start.key), self._room)
        if self.cgroups is None or start.leaves_cgroup:
            member.ignored = tuple(name for name in ("cpu_milli", "memory_bytes") if getattr(start, name) is not None)
            return
        member.cgroup, ignored = self.cgroups.create(
            f"{self._prefix}-{next(self._numbers)}", start.cpu_milli, start.memory_bytes
        )
        member.ignored = tuple(ignored)
        passed.append(os.open(member.cgroup.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def _refuse_devices(self, member: Member, passed: list[int]) -> None:
        """Have the kernel refuse devices to the member, which has no process yet. Raises `OSError`."""
        refused = [NodeRange(*each) for each in member.start.refused_nodes]
        if not refused:
            return
        if self.fences is None:
            raise OSError(errno.EPERM, "this supervisor cannot have the kernel refuse devices")
        name = f"{self._prefix}-{next(self._numbers)}"
        member.fence = self.fences.close(member.cgroup, name, refused)
        if member.fence is not None:
            passed.append(os.open(member.fence.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def group_of(self, cgroup: str) -> str:
        """Return the name of the member's group that a cgroup, by its path in /proc/PID/cgroup, is or is below.

        Empty if it is no member's.
        """
        names = cgroup.removesuffix(" (deleted)").split("/")
        return next((name for name in names if name.startswith(f"{self._prefix}-")), "")

    def hear(self, member: Member) -> bool:
        """Return whether it is known by now that the process runs its program, or that it cannot.

        If it cannot, `member.failure` says why.
        """
        try:
            said = os.read(member.confirm, 64)  # a stage and an error number
        except BlockingIOError:
            return False
        child, member.child = member.child, None
        if said:
            assert child is not None
            stage, number = said.decode("ascii").split()
            member.failure = (int(number), stage, why_not(child, stage, int(number)))
        return True


def _pipe(passed: list[int]) -> int:
    read, write = os.pipe2(os.O_CLOEXEC)
    passed.append(write)
    os.set_blocking(read, False)
    return read
