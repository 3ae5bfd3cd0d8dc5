"""Members on their way into a process: a kit and a record first, then the launcher, then exec's confirmation.

Members go to the launcher in slices, one slice at a time, so that the loop does its other work between two. A slice
shares one confirm pipe, which every child holds until exec: its end of file says that all have exec'd or failed.
"""

import asyncio
import contextlib
import errno
import os
import resource
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from moorage.worker.cgroup import CgroupBase
from moorage.worker.disk_room import DiskRoom
from moorage.worker.proctree import boottime_s
from moorage.worker.supervisor.child import Child, Request, why_not
from moorage.worker.supervisor.journal import Record, Starting
from moorage.worker.supervisor.kit_pool import Kit, KitPool
from moorage.worker.supervisor.launcher_client import CONFIRMATION, STAGES, Launcher, LauncherGone
from moorage.worker.supervisor.log import log
from moorage.worker.supervisor.member import Member, State
from moorage.worker.supervisor.output import OutputPump, output_paths
from moorage.worker.supervisor.spare import ERR, OUT, Spare, await_readable

SLICE_MEMBERS_MAX: Final = 16
CONFIRM_S: Final = 1.0
"""A child still before its exec after so long (a dead network file system under its cwd) is told as started."""
LAUNCHER_SILENT_MAX: Final = 10
"""So many times `CONFIRM_S` the launcher may take for its answer; it is then killed and replaced."""
RETRY_S: Final = 0.1
SPARE_AFTER_S: Final = 0.001
"""A spare is made once no member has ended for so long."""

_PASSING: Final = (errno.EAGAIN, errno.ENOMEM, errno.ENODEV)
"""No room for one more process now, or its cgroup was removed: the next spare may be made."""

Usage = resource.struct_rusage


class Owner(Protocol):
    """Who is told what becomes of a member."""

    def refused(self, member: Member, number: int, stage: str, message: str) -> None:
        """No process of it was created."""

    def known(self, member: Member, pid: int) -> None:
        """Its process exists."""

    def resolved(self, member: Member) -> None:
        """It has run exec, or `member.failure` says why not."""

    def lost(self, member: Member) -> None:
        """It may have a process or not, whose pid is not known and will not be."""

    def settled(self) -> None:
        """For a moment every child of this process is known."""


@dataclass(slots=True, eq=False)
class Slice:
    """The members of one packet to the launcher, until each has either run exec or failed."""

    members: list[Member]
    children: list[Child]
    """What each was to become: for the words where one does not."""
    confirm: int
    answered: bool = False
    resolved: bool = False
    late: int = 0
    timer: asyncio.TimerHandle | None = None
    spare: Spare | None = None
    """Asked for by this packet, which has no member."""


class Launches:
    """The queue of members to start, and the launcher."""

    def __init__(
        self,
        owner: Owner,
        *,
        state: Path,
        state_mark: str,
        boot_id: str,
        cgroups: CgroupBase | None,
        descriptors: tuple[int, int],
        write_ahead: Callable[[list[Record]], None],
        program: str | None = None,
    ) -> None:
        self._owner = owner
        self._room = DiskRoom(state)
        self._state = state
        self._state_mark = state_mark
        self._boot_id = boot_id
        self._cgroups = cgroups
        self._descriptors = descriptors
        self._write_ahead = write_ahead
        self._program = program
        self._loop = asyncio.get_running_loop()
        self.kits = KitPool(cgroups)
        self._waiting: deque[Member] = deque()
        self._early: dict[int, tuple[int, Usage]] = {}
        self._launcher: Launcher | None = None
        self._outstanding: Slice | None = None
        self._late: set[Slice] = set()
        self._unresolved: set[Slice] = set()
        self._spare: Spare | None = None
        self._spare_timer: asyncio.TimerHandle | None = None
        self._makes_spares = cgroups is not None and program is not None

    @property
    def has_news_due(self) -> bool:
        """Whether what becomes of a start will be told in a moment."""
        return bool(self._unresolved or self._waiting)

    @property
    def busy(self) -> bool:
        """Whether this process may have children whose pids are not known yet."""
        return self._outstanding is not None

    @property
    def pid(self) -> int | None:
        """The launcher's."""
        return self._launcher.pid if self._launcher is not None else None

    def add(self, member: Member) -> None:
        """Queue a member that is `WAITING`; `go` starts the queue."""
        self._waiting.append(member)

    def withdraw(self, member: Member) -> None:
        """Take a member that is `WAITING` out of the queue."""
        self._waiting.remove(member)

    def exited(self, pid: int, status: int, usage: Usage) -> None:
        """A child of unknown pid was reaped: perhaps one whose pid is about to be told."""
        if self._spare is not None and pid == self._spare.pid:
            self._spare.pid = 0
            self._drop_spare()
            self._make_spare_later(RETRY_S)
        elif self._outstanding is not None:
            self._early[pid] = status, usage

    def read_late(self) -> None:
        """Hear of starts that failed late; they said so before they exited."""
        for launched in list(self._late):
            self._confirm(launched)

    def go(self) -> None:
        """Send the next slice to the launcher, unless one is out."""
        while self._waiting and self._outstanding is None:
            if len(self._waiting) == 1 and self._give_spare(self._waiting[0]):
                self._waiting.popleft()
                return
            members = [self._waiting.popleft() for _ in range(min(len(self._waiting), SLICE_MEMBERS_MAX))]
            try:
                confirm, write_end = os.pipe2(os.O_CLOEXEC)
            except OSError as error:
                self._refuse(members, error, "request")
                continue
            passed = [write_end]
            try:
                ready = self._prepare(members, passed)
                if not ready:
                    os.close(confirm)
                    continue
                launched = Slice([each[0] for each in ready], [each[1] for each in ready], confirm)
                self._outstanding = launched
                self._unresolved.add(launched)
                self._send([request for _, _, request in ready], passed)
                # what they wait for comes first: nothing is read before the loop's next turn
                os.set_blocking(confirm, False)
                self._loop.add_reader(confirm, self._confirm, launched)
                launched.timer = self._loop.call_later(CONFIRM_S, self._too_late, launched)
            finally:
                for descriptor in passed:
                    os.close(descriptor)

    def _refuse(self, members: list[Member], error: OSError, stage: str) -> None:
        for member in members:
            self._owner.refused(member, error.errno or errno.EIO, stage, str(error))

    def _prepare(self, members: list[Member], passed: list[int]) -> list[tuple[Member, Child, Request]]:
        """Kit and record of each. `passed` grows by the descriptors that go to the launcher."""
        ready: list[tuple[Member, Child, Request]] = []
        for member in members:
            # One more than here: the launcher's list has the memory file in its second place.
            first = len(passed) + 1
            try:
                self._open(member, passed)
            except OSError as error:
                self._refuse([member], error, "cgroup")
                continue
            child = member.child
            assert child is not None
            cgroup = first + 2 if member.cgroup is not None else -1
            ready.append((member, child, child.request(len(ready), first, first + 1, cgroup)))
        now_s = boottime_s()
        try:
            self._write_ahead([self._starting(each[0], now_s) for each in ready])
        except OSError as error:
            self._refuse([each[0] for each in ready], error, "journal")
            return []
        for member, _, _ in ready:
            member.child = None
            member.started_boottime_s = now_s
            member.go(State.LAUNCHING)
        return ready

    def _starting(self, member: Member, now_s: float) -> Starting:
        return Starting(
            key=member.key,
            boot_id=self._boot_id,
            boottime_s=now_s,
            cgroup=member.cgroup.path if member.cgroup is not None else "",
            marks=member.marks,
        )

    def _open(self, member: Member, passed: list[int]) -> None:
        kit = self.kits.take()
        self._limit(member, kit)
        self._take_output(member, kit)
        passed += (kit.stdout[1], kit.stderr[1])
        if kit.cgroup is not None:
            passed.append(kit.folder)

    def _limit(self, member: Member, kit: Kit) -> None:
        """Its cgroup is the member's."""
        start = member.start
        member.cgroup = kit.cgroup
        if self._cgroups is None or kit.cgroup is None:
            member.ignored = tuple(name for name in ("cpu_milli", "memory_bytes") if getattr(start, name) is not None)
        else:
            member.ignored = tuple(self._cgroups.limit(kit.cgroup, start.cpu_milli, start.memory_bytes))

    def _take_output(self, member: Member, kit: Kit) -> None:
        """Its pipes' read ends are the member's."""
        start = member.start
        stdout, stderr = output_paths(self._state, start.key)
        member.pumps.append(OutputPump(kit.stdout[0], stdout, start.output_cap_bytes, "stdout", self._room))
        member.pumps.append(OutputPump(kit.stderr[0], stderr, start.output_cap_bytes, "stderr", self._room))

    # -- the spare

    def member_over(self) -> None:
        """A member has ended: make what the next one needs, behind what tells the end."""
        self.kits.add()
        self._make_spare_later()

    def _make_spare_later(self, after_s: float = SPARE_AFTER_S) -> None:
        """Once no member has ended for a moment: where many are started the launcher's ways cost less."""
        if self._spare_timer is not None:
            self._spare_timer.cancel()
        if self._makes_spares and self._spare is None:
            self._spare_timer = self._loop.call_later(after_s, self.make_spare)

    def make_spare(self) -> None:
        """Have a process wait for the next start, unless one does, or there is something else to do."""
        if not self._makes_spares or self._spare is not None:
            return
        if self._waiting or self.busy:
            self._make_spare_later(RETRY_S)
            return
        try:
            spare = Spare(self.kits.take())
        except OSError:
            return  # a start will say what there is no room for
        launched = self._outstanding = Slice([], [], -1, spare=spare)
        launched.timer = self._loop.call_later(CONFIRM_S, self._too_late, launched)
        try:
            self.start_launcher().send_for_spare(spare.descriptors())
        except (LauncherGone, OSError) as error:
            log(f"launcher: {error!r}")
            self._gone()
        finally:
            spare.passed()

    def _made(self, spare: Spare, pid: int) -> None:
        if pid < 0:
            self._makes_spares = -pid in _PASSING
            spare.close()
            return
        if pid in self._early:  # it died at once
            spare.close()
            self._make_spare_later(RETRY_S)
            return
        spare.pid = pid
        self._spare = spare
        self._loop.add_reader(spare.channel, self._hear_spare, spare)

    def _hear_spare(self, spare: Spare) -> None:
        if isinstance(spare.launched, Slice):
            self._confirm(spare.launched)
        else:  # it says nothing before it is asked: it is gone
            self._drop_spare()
            self._make_spare_later(RETRY_S)

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            self._loop.remove_reader(spare.channel)
            spare.close()

    def _give_spare(self, member: Member) -> bool:
        """Have the spare become this member; False where it cannot."""
        spare, child = self._spare, member.child
        if spare is None or child is None:
            return False
        request = child.request(0, OUT, ERR, -1)
        if not spare.takes(child, request):
            return False
        self._limit(member, spare.kit)
        now_s = boottime_s()
        try:
            self._write_ahead([self._starting(member, now_s)])
        except OSError as error:
            member.cgroup = None  # the spare's still
            self._refuse([member], error, "journal")
            return True
        try:
            spare.become(request)
        except OSError:
            member.cgroup = None
            self._drop_spare()
            return False
        self._spare = None
        self._take_output(member, spare.kit)
        spare.launched = launched = Slice([member], [child], spare.channel, answered=True)
        self._unresolved.add(launched)
        member.child = None
        member.started_boottime_s = now_s
        member.go(State.LAUNCHING)
        member.pid = spare.pid
        self._owner.known(member, spare.pid)
        launched.timer = self._loop.call_later(CONFIRM_S, self._too_late, launched)
        return True

    # -- the launcher

    def start_launcher(self) -> Launcher:
        """The launcher, started if there is none. Raises `OSError`."""
        if self._launcher is None:
            try:
                self._launcher = Launcher.start(*self._descriptors, self._state_mark, self._program)
            except OSError:
                if self._program is None:
                    raise
                # It ran when this process began: its file has gone since. The next starts cost a little more.
                self._program = None
                self._makes_spares = False
                self._launcher = Launcher.start(*self._descriptors, self._state_mark)
            self._loop.add_reader(self._launcher.fileno(), self._answered)
        return self._launcher

    def close(self) -> None:
        """Let the launcher go, and what was made for members that will not come."""
        self._makes_spares = False
        if self._spare_timer is not None:
            self._spare_timer.cancel()
        if self._outstanding is not None and self._outstanding.spare is not None and self._launcher is not None:
            await_readable(self._launcher.fileno(), CONFIRM_S)  # a process whose pid nobody knows stays behind
            self._answered()
        self._drop_spare()
        self.kits.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._launcher is not None:
            self._loop.remove_reader(self._launcher.fileno())
            self._launcher.close()
            self._launcher = None

    def _send(self, requests: list[Request], passed: list[int]) -> None:
        try:
            self.start_launcher().send(requests, passed)
        except (LauncherGone, OSError) as error:
            log(f"launcher: {error!r}")
            self._gone()

    def _answered(self) -> None:
        assert self._launcher is not None
        try:
            pids = self._launcher.receive()
        except LauncherGone:
            self._gone()
            return
        launched = self._outstanding
        if pids is None or launched is None:
            return
        self._outstanding = None
        launched.answered = True
        if launched.spare is not None:
            self._resolve(launched)
            self._made(launched.spare, pids.pop())
        for member, pid in zip(launched.members, pids, strict=True):
            if pid < 0:
                self._owner.refused(member, -pid, "clone", os.strerror(-pid))
                continue
            if pid in self._early:
                member.wait_status, member.usage = self._early.pop(pid)
            member.pid = pid
            self._owner.known(member, pid)
        self._early.clear()
        self._owner.settled()
        self.go()
        self.kits.fill_later()

    def _gone(self) -> None:
        """The launcher has ended. What it was asked last may have happened."""
        self._let_go()
        launched, self._outstanding = self._outstanding, None
        self._early.clear()
        if launched is not None:
            launched.answered = True
            self._unresolved.discard(launched)
            if launched.spare is not None:
                self._resolve(launched)
                launched.spare.close()
            for member in launched.members:
                member.failure = (errno.ECHILD, "launcher", "the launcher process ended")
                self._owner.lost(member)
        # Not at once: a launcher that cannot live must not make the loop spin.
        self._loop.call_later(RETRY_S, self.go)

    # -- confirmation

    def _confirm(self, launched: Slice) -> None:
        """Read the confirm pipe: a message from each child that failed, and at last the end of file."""
        while True:
            try:
                data = os.read(launched.confirm, CONFIRMATION.size)
            except BlockingIOError:
                return
            except ConnectionResetError:  # a spare that was ended before it had read what to be
                break
            if not data:
                break
            slot, stage, number = CONFIRMATION.unpack(data)
            why = why_not(launched.children[slot], STAGES[stage], number)
            launched.members[slot].failure = (number, STAGES[stage], why)
        self._loop.remove_reader(launched.confirm)
        os.close(launched.confirm)
        self._late.discard(launched)
        if not launched.answered and self._launcher is not None:
            # The launcher answers before it closes its own end of the pipe.
            self._answered()
        self._resolve(launched)

    def _too_late(self, launched: Slice) -> None:
        if launched.answered:
            self._late.add(launched)
            self._resolve(launched)
            return
        launched.late += 1
        if launched.late >= LAUNCHER_SILENT_MAX and self._launcher is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._launcher.pid, signal.SIGKILL)
        launched.timer = self._loop.call_later(CONFIRM_S, self._too_late, launched)

    def _resolve(self, launched: Slice) -> None:
        if launched.resolved:
            return
        launched.resolved = True
        self._unresolved.discard(launched)
        if launched.timer is not None:
            launched.timer.cancel()
        for member in launched.members:
            if member.pid is not None:
                member.resolved = True
                self._owner.resolved(member)
