"""Make what a member's process gets: pipes, a cgroup, devices refused to it; and read the report of its exec."""

import errno
import itertools
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moorage.system.cgroup import CgroupBase, CgroupFolder
from moorage.system.device_fence import DeviceFences, NodeRange
from moorage.system.disk_room import DiskRoom
from moorage.worker.supervisor.capped_output import ArrivalOrder, OutputPump, order_path, output_paths
from moorage.worker.supervisor.child import StartRefused, reported_failure
from moorage.worker.supervisor.member import Member
from moorage.worker.supervisor.terminal import HeldTerminal


@dataclass(slots=True)
class MemberResources:
    """Makes the resources of the members of one state folder."""

    state: Path
    cgroups: CgroupBase | None
    fences: DeviceFences | None
    _room: DiskRoom = field(init=False)
    # A cgroup must not reuse a name of a former supervisor: what that one left is killed by cgroup name.
    _prefix: str = field(default_factory=lambda: f"m-{secrets.token_hex(6)}")
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._room = DiskRoom(self.state)

    def open(self, member: Member) -> list[int]:
        """Make them; return the descriptors that the member's process gets, which the caller closes.

        Raises `StartRefused`.
        """
        passed: list[int] = []
        stage = "cgroup"
        try:
            self._open(member, passed)
            stage = "devices"
            self._refuse_devices(member, passed)
        except OSError as error:
            for descriptor in passed:
                os.close(descriptor)
            raise StartRefused(error.errno or errno.EIO, stage, str(error)) from None
        return passed

    def _open(self, member: Member, passed: list[int]) -> None:
        """Make the member's pipes and cgroup, and append to `passed` the descriptors that its process gets.

        Raises `OSError`.
        """
        start = member.start
        member.confirm = pipe(passed)
        stdout, stderr = output_paths(self.state, start.key)
        if start.terminal:
            outer = terminal(passed)
            member.pumps.append(OutputPump(outer, stdout, start.output_cap_bytes, "stdout", self._room))
            member.terminal = HeldTerminal(outer)
        else:
            self._open_pipes(member, passed, stdout, stderr)
        if self.cgroups is None:
            member.ignored = tuple(name for name in ("cpu_milli", "memory_bytes") if getattr(start, name) is not None)
            return
        member.cgroup, ignored = self.cgroups.create(
            f"{self._prefix}-{next(self._numbers)}", start.cpu_milli, start.memory_bytes
        )
        member.ignored = tuple(ignored)
        _open_group(member.cgroup, passed)

    def _open_pipes(self, member: Member, passed: list[int], stdout: str, stderr: str) -> None:
        passed.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        cap_bytes = member.start.output_cap_bytes
        member.pumps.append(OutputPump(pipe(passed), stdout, cap_bytes, "stdout", self._room))
        member.pumps.append(OutputPump(pipe(passed), stderr, cap_bytes, "stderr", self._room))
        member.order = ArrivalOrder(order_path(self.state, member.start.key), self._room)

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
            _open_group(member.fence, passed)

    @staticmethod
    def open_groups(member: Member, passed: list[int]) -> None:
        """Append descriptors of the groups that a further process of a running member begins in. Raises `OSError`."""
        for group in (member.cgroup, member.fence):
            if group is not None:
                _open_group(group, passed)

    def group_of(self, cgroup: str) -> str:
        """Return the name of the member's group that a cgroup, by its path in /proc/PID/cgroup, is or is below.

        Empty if it is no member's.
        """
        names = cgroup.removesuffix(" (deleted)").split("/")
        return next((name for name in names if name.startswith(f"{self._prefix}-")), "")


def _open_group(group: CgroupFolder, passed: list[int]) -> None:
    passed.append(os.open(group.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def read_exec_report(member: Member) -> bool:
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
        failure = reported_failure(child, said)
        member.failure = (failure.errno, failure.stage, failure.message)
    return True


def terminal(passed: list[int]) -> int:
    """Append the inner end of a new terminal to `passed` three times, as standard input, output and error; return its
    outer end, which does not block."""
    outer, inner = os.openpty()
    passed.append(inner)
    try:
        for _ in range(2):
            passed.append(os.dup(inner))
    except OSError:  # no descriptor left
        os.close(outer)
        raise
    os.set_blocking(outer, False)
    return outer


def pipe(passed: list[int]) -> int:
    """Append the writing end of a new pipe to `passed`; return its reading end, which does not block."""
    read, write = os.pipe2(os.O_CLOEXEC)
    passed.append(write)
    os.set_blocking(read, False)
    return read
