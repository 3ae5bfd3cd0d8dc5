"""Make what an attempt's process gets: pipes, a cgroup, devices refused to it; and read the report of its exec."""

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
from moorage.worker.supervisor.attempt import Attempt
from moorage.worker.supervisor.capped_output import ArrivalOrder, OutputPump, order_path, output_paths
from moorage.worker.supervisor.child import StartRefused, reported_failure
from moorage.worker.supervisor.terminal import HeldTerminal


@dataclass(slots=True)
class AttemptResources:
    """Makes the resources of the attempts of one state folder."""

    state: Path
    cgroups: CgroupBase | None
    fences: DeviceFences | None
    _room: DiskRoom = field(init=False)
    # A cgroup must not reuse a name of a former supervisor: what that one left is killed by cgroup name.
    _prefix: str = field(default_factory=lambda: f"m-{secrets.token_hex(6)}")
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._room = DiskRoom(self.state)

    def open(self, attempt: Attempt) -> list[int]:
        """Make them; return the descriptors that the attempt's process gets, which the caller closes.

        Raises `StartRefused`.
        """
        passed: list[int] = []
        stage = "cgroup"
        try:
            self._open(attempt, passed)
            stage = "devices"
            self._refuse_devices(attempt, passed)
        except OSError as error:
            for descriptor in passed:
                os.close(descriptor)
            raise StartRefused(error.errno or errno.EIO, stage, str(error)) from None
        return passed

    def _open(self, attempt: Attempt, passed: list[int]) -> None:
        """Make the attempt's pipes and cgroup, and append to `passed` the descriptors that its process gets.

        Raises `OSError`.
        """
        start = attempt.start
        attempt.confirm = pipe(passed)
        stdout, stderr = output_paths(self.state, start.key)
        if start.terminal:
            outer = terminal(passed)
            attempt.pumps.append(OutputPump(outer, stdout, start.output_cap_bytes, "stdout", self._room))
            attempt.terminal = HeldTerminal(outer)
        else:
            self._open_pipes(attempt, passed, stdout, stderr)
        if self.cgroups is None:
            attempt.ignored = tuple(name for name in ("cpu_milli", "memory_bytes") if getattr(start, name) is not None)
            return
        attempt.cgroup, ignored = self.cgroups.create(
            f"{self._prefix}-{next(self._numbers)}", start.cpu_milli, start.memory_bytes
        )
        attempt.ignored = tuple(ignored)
        _open_group(attempt.cgroup, passed)

    def _open_pipes(self, attempt: Attempt, passed: list[int], stdout: str, stderr: str) -> None:
        passed.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        cap_bytes = attempt.start.output_cap_bytes
        attempt.pumps.append(OutputPump(pipe(passed), stdout, cap_bytes, "stdout", self._room))
        attempt.pumps.append(OutputPump(pipe(passed), stderr, cap_bytes, "stderr", self._room))
        attempt.order = ArrivalOrder(order_path(self.state, attempt.start.key), self._room)

    def _refuse_devices(self, attempt: Attempt, passed: list[int]) -> None:
        """Have the kernel refuse devices to the attempt, which has no process yet. Raises `OSError`."""
        refused = [NodeRange(*each) for each in attempt.start.refused_nodes]
        if not refused:
            return
        if self.fences is None:
            raise OSError(errno.EPERM, "this supervisor cannot have the kernel refuse devices")
        name = f"{self._prefix}-{next(self._numbers)}"
        attempt.fence = self.fences.close(attempt.cgroup, name, refused)
        if attempt.fence is not None:
            _open_group(attempt.fence, passed)

    @staticmethod
    def open_groups(attempt: Attempt, passed: list[int]) -> None:
        """Append descriptors of the groups that a further process of a running attempt begins in. Raises `OSError`."""
        for group in (attempt.cgroup, attempt.fence):
            if group is not None:
                _open_group(group, passed)

    def group_of(self, cgroup: str) -> str:
        """Return the name of the attempt's group that a cgroup, by its path in /proc/PID/cgroup, is or is below.

        Empty if it is no attempt's.
        """
        names = cgroup.removesuffix(" (deleted)").split("/")
        return next((name for name in names if name.startswith(f"{self._prefix}-")), "")


def _open_group(group: CgroupFolder, passed: list[int]) -> None:
    passed.append(os.open(group.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def read_exec_report(attempt: Attempt) -> bool:
    """Return whether it is known by now that the process runs its program, or that it cannot.

    If it cannot, `attempt.failure` says why.
    """
    try:
        said = os.read(attempt.confirm, 64)  # a stage and an error number
    except BlockingIOError:
        return False
    child, attempt.child = attempt.child, None
    if said:
        assert child is not None
        failure = reported_failure(child, said)
        attempt.failure = (failure.errno, failure.stage, failure.message)
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
