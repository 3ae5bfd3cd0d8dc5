"""Run plain processes: the supervisor starts them, ends them, and proves that they are over."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
from collections.abc import Collection, Coroutine, Mapping, Sequence
from signal import SIGKILL
from typing import Annotated, Any, Final, Self

import msgspec

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.capabilities import COUNTED, KERNEL, KNOWN, LIVE, VARIABLE, Capabilities
from moorage.schemas.driver_config import ProcessBlock
from moorage.schemas.errors import refuse
from moorage.schemas.frames import (
    CANNOT_RUN,
    NOT_HERE,
    START_FAILED,
    UNKNOWN,
    Device,
    Exec,
    LogPage,
    Peaks,
    ReadLog,
    Rescue,
    Rescued,
    Terminal,
)
from moorage.schemas.gpu import Share
from moorage.schemas.handler import CHECKPOINT_NOW_FILE, CHECKPOINT_NOW_VARIABLE, REPORT_FILE, REPORT_VARIABLE
from moorage.schemas.held_calls import HELD_FILE, HELD_VARIABLE
from moorage.schemas.job import Request, data_variable
from moorage.schemas.service import READY_FILE, READY_VARIABLE
from moorage.schemas.settings import setting
from moorage.system.descriptors import trouble_with_descriptors
from moorage.system.device_environment import (
    MPS_MEMORY_LIMIT,
    HostAtFault,
    JobEnvironment,
    apart_from_mps,
    check_sharing,
)
from moorage.worker.attempt.attempt_files import AttemptFiles, brings
from moorage.worker.attempt.attempt_folders import DISK, owner_ids
from moorage.worker.attempt.environment import PATH_DEFAULT, process_environment
from moorage.worker.attempt.secret_files import resolve_secrets
from moorage.worker.devices.refused_nodes import GpuNodes, NodesUnknown
from moorage.worker.driver import (
    CODE_LOST,
    Assignment,
    Driver,
    DriverEvent,
    Living,
    ended_unstarted,
    kept_within,
    never_ran,
)
from moorage.worker.drivers.call_access import answer_orphans, call_access, calls_of
from moorage.worker.drivers.data import Data
from moorage.worker.drivers.execution import Execution, LocalExecution
from moorage.worker.drivers.kit import Kit, keep_to
from moorage.worker.drivers.output_frames import OutputFrames
from moorage.worker.drivers.setups import Setups
from moorage.worker.drivers.supervisor_link import UNASKED, SupervisorLink, key_of, name_of, owner_of
from moorage.worker.freezing.attempts import FreezableAttempts
from moorage.worker.session.attempt_messages import (
    Ended,
    MpsNotAsked,
    NotStarted,
    Replaced,
    Started,
    StartFailed,
    Stuck,
)
from moorage.worker.settings import WorkerSettings
from moorage.worker.sharing.attempt_processes import AttemptProcesses
from moorage.worker.sharing.mps.control import daemon_of
from moorage.worker.start_codes import CODE_CANNOT_START, code_of_start
from moorage.worker.supervisor.protocol import Ended as ChildEnded
from moorage.worker.supervisor.protocol import Event, MemoryAtEnd, MpsDaemon, Output, StartAttempt, Unproven
from moorage.worker.supervisor.protocol import Started as ChildStarted

log = logging.getLogger("moorage.worker")

#: the stage of a start that failed because the job's VM did not boot
STAGE_BOOT: Final = "boot"
_MIB: Final = 1024 * 1024
#: by stage of a start, the errors for which this host lacks room; a program's own memory limit makes its exec fail, too
_WANTS: Final = {
    "request": (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    "exec": (errno.EMFILE, errno.ENFILE),
}
#: the stages of a start that only this host can fail
_OF_HOST: Final = ("journal", "cgroup", "devices", "clone", STAGE_BOOT)
#: errors of exec that the request brings about on every host: its arguments are too long, its memory limit too low
_OF_REQUEST: Final = (errno.E2BIG, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOMEM)
#: errors of exec and chdir that say that the file or folder is not there, or not to be used
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EISDIR)


class ProcessSettings(msgspec.Struct, frozen=True):
    """Settings of the driver `process`."""

    gpu_enabled: Annotated[bool, setting("Whether its jobs may have GPUs.")] = True


class ProcessDriver(Driver):
    """The driver `process`.

    In a simulated worker, the directories of MPS and the file of time-slice are not checked.
    """

    name = "process"
    tells_processes = True
    joins_mps = True
    settings: type[msgspec.Struct] | None = ProcessSettings
    config: type[msgspec.Struct] | None = ProcessBlock
    capabilities = KNOWN[name]

    @classmethod
    def from_kit(cls, kit: Kit) -> Self:
        return cls(kit)

    def __init__(self, kit: Kit) -> None:
        """Make the driver of a worker, under its `name`, without connecting."""
        super().__init__()
        settings = kit.settings
        if trouble := trouble_with_descriptors(kit.devices, settings.modes_offered, settings.sharers_max):
            log.warning("%s: %s", kit.worker, trouble)
        self._link = kit.supervisor
        self._worker = kit.worker
        self._owner = owner_of(kit.worker, self.name)
        self._secrets_dir = settings.secrets_dir
        self._interface = settings.interface
        self._simulated = kit.simulated
        self._stream_output = settings.stream_output
        self._output_cap_bytes = settings.output_cap_bytes
        self._policy = kit.policy
        self._folders = kit.folders(self.name)
        self._mps = kit.mps
        self._gpu_nodes = kit.gpu_nodes
        self._must_fence = settings.device_fence == "require"
        self._calls = kit.calls
        self._orphans = kit.orphans
        self.limits = kit.limits(self.name)
        self._freezing: FreezableAttempts | None = None
        if kit.freezer is not None:
            self.capabilities = msgspec.structs.replace(self.capabilities, freezes=True)
            self._freezing = FreezableAttempts(kit.freezer, kit.gate(self.limits), self.report, self.attempts_of)
        self._is_fenced = False
        self._files = AttemptFiles(self._folders, kit.files, self.report)
        self._setups = Setups(self, kit, self._folders)
        self._data = Data(self, kit, self._folders)
        self._bringing: dict[AttemptName, asyncio.Task[None]] = {}
        self._storing: dict[AttemptName, asyncio.Task[None]] = {}
        self._look_after: list[asyncio.Task[None]] = []
        self._known: set[AttemptName] = set()
        self._started: list[AttemptName] = []
        self._ended: list[tuple[AttemptName, int, str]] = []
        self._peaks: dict[AttemptName, Peaks] = {}  # of those
        self._failed: list[tuple[AttemptName, int, str]] = []
        self._not_started: dict[int, list[tuple[AttemptName, str]]] = {}  # by exit code, 0 for none
        self._own_cwd: set[AttemptName] = set()  # attempts that start below their own folder
        self._own_program: set[AttemptName] = set()  # those whose program is there, too
        self._stuck: list[AttemptName] = []
        self._output = OutputFrames()
        self._processes = AttemptProcesses()

    async def open(self) -> list[Living]:
        listed = await self._link.open(self._owner, self)
        self.boot = self._link.boot
        self._is_fenced = fences_devices(self._link, self._gpu_nodes, must=self._must_fence)
        living: list[Living] = []
        self._folders.begin(name_of(key) for key, _, _ in listed)
        if self.limits is not None:
            self.limits.begin(name_of(key) for key, _, _ in listed)
        for key, state, event in listed:  # before the wait below: an attempt may end meanwhile
            if state != "ended":
                self._known.add(name_of(key))
                self._note_pid(name_of(key), event)
        frozen: set[AttemptName] = set()
        if self._freezing is not None:
            frozen = self._freezing.begin([name_of(key) for key, state, _ in listed if state != "ended"])
        for key, state, event in listed:
            name = name_of(key)
            if state == "ended" and isinstance(event, ChildEnded):
                event = self._reported_end(name, event)
                answer_orphans(self._orphans, self._folders, name)
                if self._store(name, event):
                    living.append(Living(name, "running"))
                    continue
                mark = self._mark_of(name, event)
                self._release([name])
                code, why = _verdict(event, mark)
                if mark or not _is_the_hosts(event):
                    living.append(Living(name, "refused" if mark else "exited", code, why))
                else:
                    living.append(Living(name, "refused", 0, why))
            else:
                if name in self._known:
                    self._taken_over(name)
                if state not in ("waiting", "unproven"):
                    self._files.watch(name)
                phase = {"waiting": "starting", "unproven": "stuck"}.get(state, "running")
                living.append(Living(name, phase, frozen=name in frozen))
        self._look_after.append(asyncio.get_running_loop().create_task(self._folders.run(self.end, self._sweep)))
        self._setups.begin()
        self._data.setups.begin()
        return living

    async def close(self) -> None:
        for task in self._look_after:
            task.cancel()
            await asyncio.wait((task,))
        # the next agent reports attempts that have not started, and stores the files of those that are over
        for task in [*self._bringing.values(), *self._storing.values()]:
            task.cancel()
            await asyncio.wait((task,))
        if self._freezing is not None:
            await self._freezing.close()
        await self._setups.close()
        await self._data.setups.close()
        await self._files.close()
        if self.limits is not None:
            self.limits.close()
        await self._link.close(self._owner)

    def report(self, event: DriverEvent) -> None:
        left = self._setups.take(event)
        if left is not None and (left := self._data.setups.take(left)) is not None:
            super().report(left)

    def publish(self, name: AttemptName, payload: bytes) -> None:
        if not (self._setups.takes(name, payload) or self._data.setups.takes(name, payload)):
            super().publish(name, payload)

    def held_data(self) -> list[str]:
        return self._data.held()

    def can(self) -> Capabilities:
        users = os.geteuid() == 0 and self._folders.lets_users()
        devices = "" if self._simulated else KERNEL if self._is_fenced else VARIABLE
        limits_memory = "memory" in self._link.controllers
        can = self._link.here(super().can())
        return msgspec.structs.replace(can, users=users, memory_limit=limits_memory, devices=devices)

    def check(self, request: Request) -> None:
        if not self._simulated and request.gpu is not None:
            check_sharing(request.gpu, has_own_mps=self._mps is not None)

    def start(self, assignments: list[Assignment]) -> None:
        attempts: list[StartAttempt] = []
        for assignment in map(self._setups.placed, assignments):
            try:
                assignment = self._data.placed(assignment)
                attempt = self._start_attempt(assignment)
                if self._is_ready(assignment):
                    self._known.add(assignment.name)
                    attempts.append(attempt)
                else:
                    self._bring(assignment, attempt)
            except Exception as error:
                self._release([assignment.name])
                self.report(never_ran(assignment.name, error))
        if attempts:
            self._link.start(attempts)

    async def _sweep(self) -> None:
        await self._setups.sweep()
        await self._data.setups.sweep()

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        if (bringing := self._bringing.pop(name, None)) is not None:  # none of its processes runs yet
            bringing.cancel()
            self._release([name])
            self.report(ended_unstarted(name, why))
            return
        if self._files.hurry(name, grace_s):  # its processes are over
            return
        self._link.end(self._key(name), grace_s, why)

    def end_with_notice(self, name: AttemptName, grace_s: float, why: str, notice_s: float) -> None:
        if name in self._bringing or name in self._storing:
            return self.end(name, grace_s, why)
        return self._link.end(self._key(name), grace_s, why, notice_s)

    def resizes(self, mode: str) -> str:
        return COUNTED if self.limits is None else LIVE

    def resize(self, name: AttemptName, share: Share) -> None:
        keep_to(self.limits, name, share)

    def relimit(self, name: AttemptName, timeout_s: float) -> None:
        self._link.relimit(self._key(name), timeout_s)

    def signal(self, name: AttemptName, signal: str) -> None:
        self._link.signal(self._key(name), signal)

    def freeze(self, name: AttemptName, slots: Sequence[int]) -> None:
        assert self._freezing is not None, "its capabilities do not say that it freezes"
        self._freezing.freeze(name, slots)

    def resume(self, name: AttemptName) -> None:
        assert self._freezing is not None, "its capabilities do not say that it freezes"
        self._freezing.resume(name)

    def wakes(self, name: AttemptName) -> bool:
        return self._freezing is not None and self._freezing.wakes(name)

    def forget(self, names: list[AttemptName]) -> None:
        self._link.forget([self._key(name) for name in names])
        self._files.forget(names)

    def sets_count(self, name: AttemptName, digests: Sequence[str], *, earlier: bool) -> None:
        self._files.sets_count(name, digests, earlier=earlier)

    def tell_sets(self) -> None:
        self._files.tell_sets()

    def checkpoints_noted(self, names: list[AttemptName]) -> None:
        self._files.noted(names)

    def set_fence(self, deadline_s: float, grace_s: float) -> None:
        self._link.set_fence(self._owner, deadline_s, grace_s)

    async def living(self, names: Collection[AttemptName]) -> Collection[AttemptName] | None:
        listed = await self._link.listed(self._owner)
        if listed is None:
            return None
        left = {name_of(key) for key, state, _ in listed if state != "ended"}
        return left | self._bringing.keys() | self._storing.keys()

    def give_up(self, name: AttemptName) -> None:
        self._known.discard(name)
        self._processes.ended(name)
        self._release([name])
        super().give_up(name)

    def keeps(self, settings: WorkerSettings) -> dict[str, float]:
        return kept_within(self._link.keeper.bounds, self._folders.bounds)

    async def read_log(self, ask: ReadLog) -> LogPage:
        name = name_in(ask)
        is_over = ask.ended_ms > 0 and name not in self._known
        return await self._link.keeper.page(self._key(name), ask, is_over, self._worker)

    def folder_of(self, name: AttemptName) -> str:
        return self._folders.path(name)

    async def rescue(self, ask: Rescue) -> Rescued:
        return await self._files.rescue(ask)

    async def execute(self, request: Request, asked: Exec, size: Terminal) -> Execution:
        name = name_in(asked)
        if not asked.argv:
            return await LocalExecution.attach(self._link.state, self._key(name), asked, size)
        self._policy.check_program(asked.tenant, msgspec.structs.replace(request.workload, argv=asked.argv))
        return await LocalExecution.begin(self._link.state, self._key(name), asked, size)

    # -- events of the supervisor (see `supervisor_link.Listener`)

    def on_event(self, key: str, event: Event) -> None:
        name = name_of(key)
        if isinstance(event, Output):
            self._output.add(name, event)
        elif isinstance(event, ChildStarted):
            self._note_pid(name, event)
            self._started.append(name)
            self._files.watch(name)
        elif isinstance(event, ChildEnded):
            event = self._reported_end(name, event)
            if event.mps_not_asked:
                self.report(MpsNotAsked([(name, event.mps_not_asked)]))
            self._known.discard(name)
            self._processes.ended(name)
            self._output.end(name, event)
            answer_orphans(self._orphans, self._folders, name)
            if self._store(name, event):
                return
            mark = self._mark_of(name, event)
            self._release([name])
            code, why = _verdict(event, mark)
            if mark or _is_the_hosts(event):
                self._not_started.setdefault(code if mark else 0, []).append((name, why))
                return
            if event.reason == "start-failed":
                self._failed.append((name, code, why))
            else:
                self._ended.append((name, code, why))
                self._peaks[name] = _peaks_of(event)
        elif isinstance(event, Unproven):
            self._stuck.append(name)

    def on_events_over(self) -> None:
        """Report the collected events by kind, an attempt's start before its end; then publish the collected output."""
        started, self._started = self._started, []
        ended, self._ended = self._ended, []
        failed, self._failed = self._failed, []
        stuck, self._stuck = self._stuck, []
        not_started, self._not_started = self._not_started, {}
        if started:
            self.report(Started(started, self._files.begun(started)))
        if stuck:
            self.report(Stuck(stuck))
        if failed:
            self.report(StartFailed(failed))
        for code, items in not_started.items():
            self.report(NotStarted(items, code))
        if ended:
            peaks, self._peaks = self._peaks, {}
            self.report(Ended(ended, peaks=peaks))
        for name, payload in self._output.take():
            self.publish(name, payload)

    def on_replaced(self) -> None:
        self.boot = self._link.boot
        self.report(Replaced(self.name))

    def on_listed(self, listed: Sequence[tuple[str, str, Event | None]]) -> None:
        missing = set(self._known)
        for key, _, event in listed:
            missing.discard(name_of(key))
            if event is not None:
                self.on_event(key, event)
        for name in missing:  # its start never reached a supervisor or its journal: nothing of it ever ran
            self._known.discard(name)
            self._release([name])
            self._processes.ended(name)
            self._ended.append((name, CODE_LOST, "lost"))
        self.on_events_over()

    def on_start_refused(self, keys: Sequence[str], why: str) -> None:
        names = [name_of(key) for key in keys]
        self._known.difference_update(names)
        self._release(names)
        self.report(NotStarted([(name, why) for name in names]))

    def uid_of(self, tenant: str, request: Request) -> int | None:
        ids = owner_ids(self._policy.user_of(tenant) or request.workload.user)
        return os.geteuid() if ids is None else ids[0]

    def attempts_of(self, pids: Collection[int]) -> dict[int, AttemptName | None]:
        return self._processes.attempts_of(pids, self._link.pid)

    # -- what the driver `vm` overrides

    def _is_ready(self, assignment: Assignment) -> bool:
        """Return whether the attempt can start at once; if not, `_made_ready` is awaited first."""
        is_set_up = assignment.run.setup is None and not assignment.run.data
        return is_set_up and not brings(assignment.name, assignment.run) and not self._shares_by_mps(assignment)

    def _shares_by_mps(self, assignment: Assignment) -> bool:
        """Return whether the attempt is a client of an MPS daemon that the worker runs."""
        return self._mps is not None and assignment.mode == "mps"

    async def _made_ready(self, assignment: Assignment, attempt: StartAttempt) -> StartAttempt:
        """Bring everything that the attempt needs, and return the attempt in the form to start.

        Raises HostAtFault, and other MoorageErrors if the job is at fault.
        """
        name = assignment.name
        user = None if attempt.user is None else str(attempt.user)
        if assignment.data:
            await self._data.ready(assignment)
        if assignment.run.setup is not None:
            await self._setups.ready(assignment)
        if brings(name, assignment.run):
            await self._files.bring(name, assignment.run, assignment.before, owner_ids(user))
            self._folders.give(name, user)
        if self._mps is not None and assignment.mode == "mps":
            joined = await self._mps.join(name)
            return msgspec.structs.replace(attempt, env=attempt.env | joined, mps=daemon_of(joined))
        return attempt

    def _taken_over(self, name: AttemptName) -> None:
        """Take note of an attempt that an earlier agent started and that is not over. This driver does nothing."""

    def _mark_of(self, name: AttemptName, event: ChildEnded) -> str:
        """Return whose fault a failed start is, as the mark of its refusal: NOT_HERE if this host lacks what the
        attempt needs, CANNOT_RUN if that is among its own files and so no host has it, else "".

        What an earlier agent has started counts as the first.
        """
        stage, number = event.stage, event.errno
        if event.reason != "start-failed" or number in _WANTS.get(stage, ()):
            return ""
        if number in _ABSENT and ((stage == "cwd" and name in self._own_cwd) or name in self._own_program):
            return CANNOT_RUN
        lacks = stage in ("user", "cwd") or (stage == "exec" and number not in _OF_REQUEST)
        return NOT_HERE if lacks else ""

    def _reported_end(self, name: AttemptName, event: ChildEnded) -> ChildEnded:
        """Return the end to report for an attempt whose first process ended so; the driver `vm` reads it otherwise."""
        return event

    # -- inside

    def _bring(self, assignment: Assignment, attempt: StartAttempt) -> None:
        """Begin to make an attempt ready, and start it then; report it if that fails."""
        name = assignment.name
        task = asyncio.get_running_loop().create_task(self._start_when_ready(assignment, attempt))
        self._bringing[name] = task

    async def _start_when_ready(self, assignment: Assignment, attempt: StartAttempt) -> None:
        name = assignment.name
        began_s = asyncio.get_running_loop().time()
        try:
            attempt = await self._made_ready(assignment, attempt)
        except Exception as error:
            del self._bringing[name]
            self._release([name])
            self.report(never_ran(name, error))
        else:
            del self._bringing[name]
            self._known.add(name)
            if attempt.ends_in_s is not None:
                passed_s = asyncio.get_running_loop().time() - began_s
                attempt = msgspec.structs.replace(attempt, ends_in_s=max(0.0, attempt.ends_in_s - passed_s))
            self._link.start([attempt])

    def _store(self, name: AttemptName, event: ChildEnded) -> bool:
        """Begin to store the files of an ended attempt; its end is reported once they are stored.

        Return False if there is nothing to store, or its program never ran: then the caller reports the end.
        """
        if name in self._storing:
            return True
        if not self._files.wants_store(name):
            return False
        if event.proof == "never-ran" or event.reason == "start-failed":
            return False  # it left no files, and the fault decides where it is tried next
        storing = self._files.store(name, *_verdict(event), event.reason != "exit")
        ending = self._store_then_end(name, storing, _peaks_of(event))
        self._storing[name] = asyncio.get_running_loop().create_task(ending)
        return True

    async def _store_then_end(
        self, name: AttemptName, storing: Coroutine[Any, Any, tuple[int, str]], peaks: Peaks
    ) -> None:
        try:
            code, why = await storing
        finally:
            del self._storing[name]
        self._release([name])
        self.report(Ended([(name, code, why)], self._files.told(name), {name: peaks}, self._files.reported(name)))

    def _release(self, names: Sequence[AttemptName]) -> None:
        """Release the folders and limiter segments of these attempts, of which nothing runs."""
        for name in names:
            self._own_cwd.discard(name)
            self._own_program.discard(name)
            self._files.unwatch(name)
            self._folders.attempt_ended(name)
            if self.limits is not None:
                self.limits.remove(name)
            if self._freezing is not None:
                self._freezing.over(name)

    def _note_pid(self, name: AttemptName, event: Event | None) -> None:
        if isinstance(event, ChildStarted):
            self._processes.started(name, event.pid)

    def _key(self, name: AttemptName) -> str:
        return key_of(self._owner, name)

    def _start_attempt(self, assignment: Assignment) -> StartAttempt:
        """Return the attempt to start. Raises HostAtFault, LacksHere, and Refused if the policy forbids it."""
        run, request = assignment.run, assignment.request
        tenant = assignment.name[0]
        self._policy.check_program(tenant, run)
        self._policy.check_root(tenant, run)
        self._policy.check_secrets(tenant, run.env)
        user = self._policy.user_of(tenant) or run.user
        ours = assignment.environment(
            interface=self._interface,
            simulated=self._simulated,
            has_own_mps=self._mps is not None,
            sees_only_its_own=self._is_fenced,
        )
        requested = resolve_secrets(run.env, self._secrets_dir)
        resources = request.resources
        folder = self._folders.make(
            assignment.name, run.grace_s, run.keep, run.checkpoint, assignment.accepted_ms, assignment.setup,
            goes_on=run.restart == "always", calls=calls_of(request),
            every_s=run.checkpoint_every_s, step=run.checkpoint_step or "", ranks=assignment.ranks,
            data=list(assignment.data.values()),
        )  # fmt: skip
        if not brings(assignment.name, run):
            self._folders.give(assignment.name, user)
        if not self._simulated:
            ours |= apart_from_mps(assignment.devices, assignment.mode, folder)
        cwd = os.path.join(folder, run.cwd or "")  # an absolute `cwd` replaces the folder
        if not os.path.isabs(run.cwd or ""):
            self._own_cwd.add(assignment.name)
            if run.argv and "/" in run.argv[0] and not os.path.isabs(run.argv[0]):
                self._own_program.add(assignment.name)
        ours |= call_access(self._calls, self._folders, assignment, user)[0]
        if run.ready is not None and run.ready.call:
            ours[READY_VARIABLE] = f"{folder}/{READY_FILE}"
        if run.checkpoint is not None and run.checkpoint_every_s:
            ours[CHECKPOINT_NOW_VARIABLE] = f"{folder}/{CHECKPOINT_NOW_FILE}"
        ours[REPORT_VARIABLE] = f"{folder}/{REPORT_FILE}"
        if request.service is not None:
            ours[HELD_VARIABLE] = f"{folder}/{HELD_FILE}"
        limit = self.limits and self.limits.of_process(assignment.name, *assignment.part, user)
        if limit and self._mps is None:
            ours.pop(MPS_MEMORY_LIMIT, None)  # the limiter's can be changed while the job runs
        ours |= {data_variable(name): path for name, path in assignment.data.items()}
        env = process_environment(requested, ours, user=user, cwd=cwd, folder=folder)
        env = assignment.with_setup(env, assignment.setup, PATH_DEFAULT)
        if limit:
            env = JobEnvironment(limit.laid_over(env))
        return StartAttempt(
            key=self._key(assignment.name),
            argv=tuple(run.argv),
            env=env,
            cwd=cwd,
            user=user,
            timeout_s=run.timeout_s,
            ends_in_s=assignment.ends_in_s,
            grace_s=run.grace_s,
            checkpoint_signal=run.checkpoint_signal,
            checkpoint_before_s=run.checkpoint_before_s if run.checkpoint_signal else None,
            on_partition=request.on_partition,
            output_cap_bytes=self._output_cap_bytes,
            stream_output=self._stream_output,
            terminal=run.stdin == "stream",
            refused_nodes=self._refused_nodes(assignment.devices),
            mps=self._operators_daemon(assignment, ours),
            cpu_milli=(resources.cpu_milli or None) if resources else None,
            memory_bytes=(resources.memory_mib * _MIB or None) if resources else None,
        )

    def _operators_daemon(self, assignment: Assignment, ours: Mapping[str, str]) -> MpsDaemon | None:
        is_client = assignment.mode == "mps" and assignment.devices and not self._simulated
        return daemon_of(ours) if is_client and self._mps is None else None

    def _refused_nodes(self, leased: Sequence[Device]) -> tuple[tuple[int, int, int], ...]:
        """Return the devices that the kernel is to refuse to an attempt with this lease. Raises HostAtFault."""
        if not self._is_fenced or self._gpu_nodes is None:
            return ()
        try:
            return self._gpu_nodes.refused_to(leased)
        except NodesUnknown as error:
            raise HostAtFault(f"the kernel cannot keep the job to its GPUs: {error}") from None


def fences_devices(link: SupervisorLink, gpu_nodes: GpuNodes | None, *, must: bool) -> bool:
    """Return whether the kernel keeps attempts to their GPUs; a link that is connected knows.

    Raises Refused if it does not and `must` be.
    """
    if gpu_nodes is None:
        return False
    why = link.no_device_fence if not link.device_fence else gpu_nodes.trouble()
    if not why:
        return True
    if must:
        raise refuse(
            "failed-precondition",
            f"the kernel cannot keep jobs to their GPUs here: {why}",
            field="$.device_fence",
            found="require",
            next="run the worker as root, with a writable cgroup v2 or the controller devices of v1; or set"
            " device_fence = auto",
        )
    log.info("a variable alone names the GPUs of a job, not the kernel: %s", why)
    return False


def _is_the_hosts(event: ChildEnded) -> bool:
    """Return whether a start failed by this host: it lacks processes or descriptors, or the engine or VM failed."""
    return event.reason == "start-failed" and (event.stage in _OF_HOST or event.errno in _WANTS.get(event.stage, ()))


def _verdict(event: ChildEnded, mark: str = "") -> tuple[int, str]:
    """Return the code and the reason to report for an attempt that ended so.

    `mark` says whose fault a failed start is, as the beginning of its reason.
    """
    if event.reason == "start-failed" and event.stage == "launcher":
        return CODE_LOST, "lost"  # it may have run
    if event.reason == "start-failed":
        says_all = event.stage in ("exec", "cwd")  # it names what was not found
        words = [event.message] if says_all else [event.stage, event.message]
        code = code_of_start(event.errno or 0) if event.stage == "exec" else CODE_CANNOT_START
        return code, f"{mark or f'{START_FAILED}: '}{': '.join(filter(None, words))}"
    code = event.exit_code if event.exit_code is not None else -event.signal if event.signal else CODE_LOST
    if event.reason == "end" and event.why in UNASKED:
        return code, UNASKED[event.why]
    if event.exit_code is None and event.signal is None:  # died with its supervisor, or never ran
        return code, "lost" if event.reason in ("exit", "supervisor-died") else event.reason
    if event.reason == "end" and event.why.startswith(DISK):
        return code, event.why
    if event.reason == "exit" and code != 0 and event.memory is not None and event.memory.oom_kills:
        return code, _out_of_memory(event.memory, event.signal == SIGKILL)
    return code, "lost" if event.reason == "supervisor-died" else event.reason


def _peaks_of(event: ChildEnded) -> Peaks:
    """Return what the supervisor knows of the memory and CPU time of an attempt that ended so."""
    held = event.memory.peak_bytes if event.memory is not None else 0
    return Peaks(
        memory_mib=_mib(held),
        largest_mib=_mib(event.largest_bytes),
        cpu_ms=UNKNOWN if event.cpu_ms is None else event.cpu_ms,
    )


def _mib(count: int) -> int:
    return math.ceil(count / (1 << 20)) if count else UNKNOWN


_GIB: Final = 1 << 30


def _out_of_memory(memory: MemoryAtEnd, is_main: bool) -> str:
    """Return the reason of an attempt that failed, of which the kernel has killed processes for want of memory."""
    who = "it was" if is_main else "a process of it was"
    held = f"{memory.peak_bytes / _GIB:.1f}" if memory.peak_bytes else ""
    if memory.at_limit and memory.max_bytes:
        most = memory.max_bytes / _GIB
        amount = f"{held} of {most:.1f} GiB" if held else f"its limit is {most:.1f} GiB"
        more = math.ceil(1.5 * most)
        return f"out of memory: {amount}, {who} killed by the kernel; fix: --memory {more}Gi"
    amount = f", and it held {held} GiB" if held else ""
    return f"out of memory: {who} killed by the kernel, as its host had none left{amount}; fix: say --memory"
