"""Run containers through an engine, which starts them; the supervisor ends them and proves that they are over.

First a container is created, then the supervisor gets its id, then it is started (start.py). Its output is stored while
it runs (follow.py). After its end the engine removes it (removal.py). The attempt's end is reported once the supervisor
has seen that no process of the container is left. `docker.py` and `podman.py` are the two drivers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, ClassVar, Final, Self

import msgspec

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.capabilities import COUNTED, KERNEL, LIVE, Capabilities
from moorage.schemas.errors import MoorageError, refuse
from moorage.schemas.frames import Exec, LogPage, ReadLog, Rescue, Rescued, Terminal
from moorage.schemas.gpu import Share
from moorage.schemas.job import Request, Secret
from moorage.worker.attempt.attempt_files import AttemptFiles
from moorage.worker.attempt.attempt_folders import AttemptFolders
from moorage.worker.driver import CODE_LOST, LOST, Assignment, Driver, DriverEvent, Living, kept_within
from moorage.worker.drivers.call_access import answer_orphans
from moorage.worker.drivers.container.config import (
    MPS,
    ContainerSettings,
    check_host_ipc,
    check_request,
    has_network,
    network_of,
    uid_of,
)
from moorage.worker.drivers.container.engine import Engine, EngineDown, EngineError
from moorage.worker.drivers.container.entry import PROGRAM_AT, VARIABLES_AT
from moorage.worker.drivers.container.exec_command import ContainerExecution
from moorage.worker.drivers.container.faults import CannotStart, fault_of, start_fault
from moorage.worker.drivers.container.follow import CODE_S_MAX, Follower
from moorage.worker.drivers.container.host import ENGINE_S, RETRY_S, Attempt, ContainerHost
from moorage.worker.drivers.container.measured import Measured
from moorage.worker.drivers.container.output import LiveOutput, clear_marks
from moorage.worker.drivers.container.ports import Ports
from moorage.worker.drivers.container.removal import Removal
from moorage.worker.drivers.container.start import ENDED_FIRST, Starter
from moorage.worker.drivers.data import Data
from moorage.worker.drivers.engine_watch import EngineWatch
from moorage.worker.drivers.execution import Execution
from moorage.worker.drivers.kit import Kit, keep_to
from moorage.worker.drivers.output_frames import Notes
from moorage.worker.drivers.setups import Setups, until_deadline
from moorage.worker.drivers.supervisor_link import name_of, owner_of
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
from moorage.worker.supervisor.containers import containers_of
from moorage.worker.supervisor.protocol import Ended as ChildEnded
from moorage.worker.supervisor.protocol import Event, Unproven

log = logging.getLogger("moorage.worker")

#: how long the attempts' tasks have to finish at a close: a task that starts a container may first have to end it
CLOSE_S_MAX: Final = 10.0


class ContainerDriver(Driver):
    """A driver of containers; see the module's docstring. `api` is the client of its engine."""

    api: ClassVar[type[Engine]]
    tells_processes = True
    capabilities = Capabilities(
        keeps_output=True,
        ends_streams=True,
        brings_files=True,
        sets_up=True,
        outlives_agent=True,
        sleeps_engines=True,
        execs=True,
        relimits=True,
        signals=True,
        holds_stdin=True,
        fence="supervisor",
        devices=KERNEL,  # by the engine's own filter
    )

    @classmethod
    async def ask_engine(cls, own: Any) -> str:
        engine = cls.api(own.engine)
        try:
            await engine.about()
        except (EngineDown, EngineError) as error:
            raise refuse(
                "failed-precondition",
                f"the engine of the driver {cls.name} does not answer at {own.engine}: {error}",
                field=f"$.driver.{cls.name}.socket",
                next=cls.api.starts,
            ) from None
        finally:
            await engine.close()
        return f"{cls.name} answers at {own.engine}"

    @classmethod
    def from_kit(cls, kit: Kit) -> Self:
        return cls(kit)

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        own = kit.own
        self._own: ContainerSettings = own
        self._host = ContainerHost(self.api(own.engine), kit.supervisor, kit.worker, self.name)
        self._folders = AttemptFolders(kit.settings, owner_of(kit.worker, self.name), is_mounted=True)
        self._files = AttemptFiles(self._folders, kit.files, self.report)
        self._setups = Setups(self, kit, self._folders, is_mounted=True)
        self._data = Data(self, kit, self._folders, is_mounted=True)
        self._ports = Ports(kit.supervisor.state, self._host.owner, kit.settings.address)
        streams = kit.settings.stream_output
        self._notes = Notes(self.publish if streams else None)
        self._policy = kit.policy
        self._orphans = kit.orphans
        self.joins_mps = own.mps_host_ipc
        self.modes_refused = () if own.mps_host_ipc else (MPS,)
        self.limits = kit.limits(self.name)
        check_host_ipc(own, has_limiter=self.limits is not None)
        self._removal = Removal(self._host)
        self._look_after: list[asyncio.Task[None]] = []
        self._watch = EngineWatch(self._host.engine.ping, (EngineDown, EngineError), f"{kit.worker}: {self.name}")
        live = LiveOutput(self.publish, streams=streams)
        self._follower = Follower(self._host, self._removal, kit.settings.output_cap_bytes, live)
        self._starter = Starter(
            self._host,
            kit,
            folders=self._folders,
            files=self._files,
            ports=self._ports,
            notes=self._notes,
            limits=self.limits,
        )

    async def open(self) -> list[Living]:
        host = self._host
        about = await self._starter.ask_engine()
        if os.geteuid() != 0 and about is not None and not about.is_rootless:
            raise refuse(
                "failed-precondition",
                "the engine runs containers as root, but this agent is not root, so it could not end them",
                found=f"uid {os.geteuid()}",
                next="run the agent as root, or a rootless engine as its user",
            )
        self._look_after.append(asyncio.get_running_loop().create_task(self._watch.run()))
        # awaited last: an end that comes between this list and the attempts below would reach no attempt
        listed = await host.link.open(host.owner, self)
        self.boot = host.link.boot
        living: list[Living] = []
        for key, state, event in listed:
            attempt = Attempt(name_of(key))
            attempt.is_known = True
            host.attempts[attempt.name] = attempt
            if isinstance(event, ChildEnded):
                attempt.over.set_result(event)
            # an end is reported once its output and exit code are known: until then the attempt counts as running
            living.append(Living(attempt.name, {"waiting": "starting", "unproven": "stuck"}.get(state, "running")))
        known = list(host.attempts.values())
        clear_marks(host.link.state, host.owner, [host.key(each.name) for each in known])
        self._starter.entries.clear()
        self._ports.begin(host.key(each.name) for each in known)
        self._folders.begin(each.name for each in known)
        self._look_after.append(asyncio.get_running_loop().create_task(self._folders.run(self.end, self._sweep)))
        if self.limits is not None:
            self.limits.begin(each.name for each in known)
        self._setups.begin()
        self._data.setups.begin()
        self._removal.begin(self._removal.sweep())
        self._look_after.append(asyncio.get_running_loop().create_task(self._removal.sweep_again()))
        for attempt in known:
            self._run(attempt, self._adopt(attempt))
        return living

    async def close(self) -> None:
        if self._removal.later:
            await asyncio.wait(
                self._removal.later, timeout=RETRY_S
            )  # else the next agent has to remove these containers
        tasks = {each.task for each in self._host.attempts.values() if each.task is not None} | self._removal.later
        tasks |= {*self._look_after, *self._host.tasks}
        ends_s = asyncio.get_running_loop().time() + CLOSE_S_MAX
        while tasks and asyncio.get_running_loop().time() < ends_s:
            for task in tasks:
                task.cancel()  # a task cancelled in a start may go on to end the container: cancel it again
            _, tasks = await asyncio.wait(tasks, timeout=RETRY_S)
        if self.limits is not None:
            self.limits.close()
        await self._setups.close()
        await self._data.setups.close()
        self._host.close_terminals()
        await self._files.close()
        await self._host.engine.close()
        await self._host.link.close(self._host.owner)

    def held_data(self) -> list[str]:
        return self._data.held()

    def can(self) -> Capabilities:
        about = self._starter.about
        limits = about is None or "memory" in about.limits
        network = has_network(self._own)
        can = self._host.link.here(super().can())
        return msgspec.structs.replace(can, memory_limit=limits, answers_calls=network, reaches=network)

    def report(self, event: DriverEvent) -> None:
        left = self._setups.take(event)
        if left is not None and (left := self._data.setups.take(left)) is not None:
            super().report(left)

    def publish(self, name: AttemptName, payload: bytes) -> None:
        if not (self._setups.takes(name, payload) or self._data.setups.takes(name, payload)):
            super().publish(name, payload)

    def folder_of(self, name: AttemptName) -> str:
        return self._folders.path(name)

    def reaches_host_ports(self, tenant: str, request: Request) -> bool:
        return network_of(tenant, request, self._own) == "host"

    def engine_down(self) -> tuple[str, float] | None:
        return (self._watch.why, self._watch.since_s) if self._watch.why else None

    def check(self, request: Request) -> None:
        check_request(request, self._own)

    def start(self, assignments: list[Assignment]) -> None:
        for assignment in assignments:
            attempt = self._host.attempts[assignment.name] = Attempt(assignment.name)
            self._run(attempt, self._start(attempt, assignment))

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        self.end_with_notice(name, grace_s, why, 0.0)

    def end_with_notice(self, name: AttemptName, grace_s: float, why: str, notice_s: float) -> None:
        attempt = self._host.attempts.get(name)
        if attempt is None or self._files.hurry(name, grace_s):
            return
        attempt.is_ending = True
        if attempt.is_known:
            self._host.link.end(self._host.key(name), grace_s, why, notice_s)
        elif attempt.task is not None and attempt.has_begun:
            attempt.task.cancel()  # a task that has not begun would not see this; `_start` checks `is_ending` first

    def resizes(self, mode: str) -> str:
        return COUNTED if self.limits is None else LIVE

    def resize(self, name: AttemptName, share: Share) -> None:
        keep_to(self.limits, name, share)

    def relimit(self, name: AttemptName, timeout_s: float) -> None:
        self._host.link.relimit(self._host.key(name), timeout_s)

    def signal(self, name: AttemptName, signal: str) -> None:
        self._host.link.signal(self._host.key(name), signal)

    def forget(self, names: list[AttemptName]) -> None:
        self._host.link.forget([self._host.key(name) for name in names])
        self._files.forget(names)

    def sets_count(self, name: AttemptName, digests: Sequence[str], *, earlier: bool) -> None:
        self._files.sets_count(name, digests, earlier=earlier)

    def tell_sets(self) -> None:
        self._files.tell_sets()

    def checkpoints_noted(self, names: list[AttemptName]) -> None:
        self._files.noted(names)

    def uid_of(self, tenant: str, request: Request) -> int | None:
        return uid_of(tenant, request, self._own, self._policy)

    def can_measure(self) -> bool:
        # an earlier agent may have started a container whose id the engine has not reported yet
        return all(attempt.container for attempt in self._host.attempts.values() if attempt.is_known)

    def attempts_of(self, pids: Collection[int]) -> dict[int, AttemptName | None]:
        attempts = {attempt.container: name for name, attempt in self._host.attempts.items() if attempt.container}
        found: dict[int, AttemptName | None] = {}
        for pid in pids if attempts else ():
            for container in containers_of(pid):
                if container in attempts:
                    found[pid] = attempts[container]
        return found

    def set_fence(self, deadline_s: float, grace_s: float) -> None:
        self._host.link.set_fence(self._host.owner, deadline_s, grace_s)

    async def living(self, names: Collection[AttemptName]) -> Collection[AttemptName] | None:
        host = self._host
        listed = await host.link.listed(host.owner)
        if listed is None:
            return None
        there = {name_of(key) for key, state, _ in listed if state != "ended"}
        missing: list[AttemptName] = []
        for name in names:
            attempt = host.attempts.get(name)
            works = attempt is not None and (not attempt.is_known or attempt.over.done())
            if works and attempt is not None and attempt.task is not None and not attempt.task.done():
                there.add(name)  # it pulls an image, say, or reads the output of an ended container
            elif name not in there:
                missing.append(name)
        try:  # the supervisor does not have them: does the engine?
            for name in missing:
                container = await host.container_of(name)
                state = await host.engine.state(container) if container else None
                if state is not None and not (state.is_new or state.is_over):
                    there.add(name)
        except (EngineDown, EngineError):
            return None
        return there

    def give_up(self, name: AttemptName) -> None:
        attempt = self._host.attempts.get(name)
        if attempt is None:
            super().give_up(name)
            return
        if attempt.task is not None:
            attempt.task.cancel()
        self._release(attempt, Ended([(name, CODE_LOST, LOST)]))
        self._removal.begin(self._removal.remove_unknown(name))

    def keeps(self, settings: WorkerSettings) -> dict[str, float]:
        return kept_within(self._host.link.keeper.bounds, self._folders.bounds)

    async def read_log(self, ask: ReadLog) -> LogPage:
        name = name_in(ask)
        is_over = ask.ended_ms > 0 and name not in self._host.attempts
        page = await self._host.link.keeper.page(self._host.key(name), ask, is_over, self._host.worker)
        return msgspec.structs.replace(page, ports=self._ports.of(self._host.key(name)))

    async def rescue(self, ask: Rescue) -> Rescued:
        return await self._files.rescue(ask)

    async def execute(self, request: Request, asked: Exec, size: Terminal) -> Execution:
        name = name_in(asked)
        attempt = self._host.attempts.get(name)
        if not asked.argv:
            if attempt is None or attempt.terminal is None:
                raise refuse("failed-precondition", "the attempt is starting or over", job=asked.job)
            return attempt.terminal.hold(asked.job, size)
        if attempt is None or not attempt.container or attempt.is_ending:
            raise refuse("failed-precondition", "the attempt is starting or ending", job=asked.job)
        self._policy.check_program(asked.tenant, msgspec.structs.replace(request.workload, argv=asked.argv))
        if any(isinstance(value, Secret) for value in request.workload.env.values()):  # as the container's own program
            asked = msgspec.structs.replace(asked, argv=[PROGRAM_AT, VARIABLES_AT, *asked.argv])
        return await ContainerExecution.begin(self._host, attempt.container, asked, size)

    # -- events of the supervisor (see `supervisor_link.Listener`)

    def on_event(self, key: str, event: Event) -> None:
        attempt = self._host.attempts.get(name_of(key))
        if attempt is None:
            return
        if isinstance(event, ChildEnded) and not attempt.over.done():
            if event.mps_not_asked:
                self.report(MpsNotAsked([(attempt.name, event.mps_not_asked)]))
            attempt.over.set_result(event)
        elif isinstance(event, Unproven):
            self.report(Stuck([attempt.name]))

    def on_events_over(self) -> None:
        """Do nothing: `on_event` handles each event by itself."""

    def on_replaced(self) -> None:
        self.boot = self._host.link.boot
        self.report(Replaced(self.name))

    def on_listed(self, listed: Sequence[tuple[str, str, Event | None]]) -> None:
        attempts = self._host.attempts
        missing = {name for name, attempt in attempts.items() if attempt.is_known and not attempt.over.done()}
        for key, state, event in listed:
            missing.discard(name_of(key))
            if event is not None:
                self.on_event(key, event)
            attempt = attempts.get(name_of(key))
            if state == "waiting" and attempt is not None and attempt.pid is not None:
                self._host.ran(attempt, attempt.pid)
            if attempt is not None and attempt.is_removed and not attempt.over.done():
                self._removal.removed(attempt)
        for name in missing:  # the next supervisor does not know it, so it never reached a journal
            key = self._host.key(name)
            attempts[name].over.set_result(ChildEnded(key=key, reason="supervisor-died", proof="never-ran"))

    def on_start_refused(self, keys: Sequence[str], why: str) -> None:
        """Do nothing: it is never called, because this driver starts attempts by `contain`."""

    # -- inside: the life of one attempt

    def _run(self, attempt: Attempt, way: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await way
            except Exception:  # a defect of moorage: the attempt's devices stay quarantined, other attempts run on
                log.exception("the state of the container of job %s is lost", attempt.name[1])
                self.report(Stuck([attempt.name]))

        attempt.task = asyncio.get_running_loop().create_task(run())

    async def _start(self, attempt: Attempt, assignment: Assignment) -> None:
        name = attempt.name
        attempt.has_begun = True
        try:
            if attempt.is_ending:
                raise CannotStart(None, ENDED_FIRST)
            if assignment.run.setup is not None or assignment.run.data:
                assignment = await self._set_up(attempt, assignment)
            await self._starter.start(attempt, assignment)
        except asyncio.CancelledError:
            if not attempt.is_ending:
                raise  # the agent stops: the next agent finds what is left
            await self._not_started(attempt, CannotStart(None, ENDED_FIRST))
        except CannotStart as refused:
            await self._not_started(attempt, refused)
        except EngineError as error:
            await self._not_started(attempt, start_fault(error, attempt.is_known))
        except EngineDown as error:
            if not attempt.is_known:
                await self._not_started(attempt, CannotStart(None, f"the container engine does not answer: {error}"))
                return
            log.warning("job %s: the container engine ended while the job started: %s", name[1], error)
            self._host.link.end(self._host.key(name), 0.0, "its engine went away during its start")
            await self._removal.remove(attempt)  # until then it may still be started
            await attempt.over
            self._release(attempt, Ended([(name, CODE_LOST, "end" if attempt.is_ending else "lost")]))
        else:
            self.report(Started([name], self._files.begun([name])))
            self._notes.started(name, self._ports.of(self._host.key(name)))
            await self._follow(attempt)

    async def _sweep(self) -> None:
        await self._setups.sweep()
        await self._data.setups.sweep()

    async def _set_up(self, attempt: Attempt, assignment: Assignment) -> Assignment:
        """Wait until the job's setup has run here, in its image as it is now. Raises as the start does."""
        began_s = asyncio.get_running_loop().time()
        image_id = await self._starter.image_id(attempt, assignment)
        assignment = until_deadline(assignment, began_s)
        try:
            assignment = await self._data.ready(self._data.placed(assignment))
            if assignment.run.setup is None:
                return assignment
            return await self._setups.ready(self._setups.placed(assignment, image_id))
        except MoorageError as error:
            raise fault_of(error) from None

    async def _not_started(self, attempt: Attempt, refused: CannotStart) -> None:
        """Report a start that failed, and remove its container.

        If the supervisor may know the container, wait for the proof of its end first; else remove it in the background.
        """
        name, code, why, reason = attempt.name, refused.code, refused.why, "exit"
        if attempt.is_known:
            await self._removal.remove(attempt)
            reason = (await attempt.over).reason
        elif attempt.container:
            self._removal.begin(
                self._removal.remove(attempt)
            )  # it was never started, so its removal need not be awaited
        elif code is None:
            self._removal.begin(self._removal.remove_unknown(name))
        if attempt.is_ending or reason in ("timeout", "fence"):
            self._release(attempt, Ended([(name, CODE_LOST, "end" if reason == "exit" else reason)]))
        elif code is None or refused.mark:
            self._release(attempt, NotStarted([(name, why)], code or 0))
        else:
            self._release(attempt, StartFailed([(name, code, why)]))

    async def _adopt(self, attempt: Attempt) -> None:
        """Follow a container of an earlier agent to its end; remove it if it was created but never started.

        One that is over waits for an engine that is down as one of this agent does: it alone knows the exit code.
        """
        loop, until_s = asyncio.get_running_loop(), math.inf
        while True:
            try:
                attempt.container = await self._host.container_of(attempt.name)
                state = await self._host.engine.state(attempt.container) if attempt.container else None
                break
            except (EngineDown, EngineError) as error:
                log.warning("job %s: the container engine failed: %s", attempt.name[1], error)
                if attempt.over.done() and until_s == math.inf:
                    until_s = loop.time() + (CODE_S_MAX if attempt.over.result().reason == "exit" else ENGINE_S)
                if loop.time() >= until_s:
                    await self._follow(attempt)
                    return
                if attempt.over.done():
                    await asyncio.sleep(RETRY_S)
                else:
                    await asyncio.wait((attempt.over,), timeout=RETRY_S)
        if state is not None and state.is_new:
            await self._not_started(attempt, CannotStart(None, "its agent ended before its start"))
            return
        if state is None:
            self._removal.removed(attempt)
        else:
            self._host.ran(attempt, state.pid)
            attempt.has_terminal = state.has_terminal
            if state.has_terminal and not state.is_over:
                attempt.terminal = self._host.terminal(attempt)
                await attempt.terminal.resume()
        await self._follow(attempt)

    async def _follow(self, attempt: Attempt) -> None:
        """Follow a container until it is over, store the files to be kept of its folder, and report its end."""
        name = attempt.name
        attempt.over.add_done_callback(lambda _: answer_orphans(self._orphans, self._folders, name))
        self._files.watch(name)
        measured = Measured()
        measuring = asyncio.get_running_loop().create_task(measured.watch(attempt.pid or 0, attempt.over))
        try:
            ended, code, why = await self._follower.follow(attempt)
        finally:
            measuring.cancel()
        if attempt.terminal is not None:
            attempt.terminal.end(code)
        if self._files.wants_store(name) and ended.proof != "never-ran":
            code, why = await self._files.store(name, code, why, ended.reason != "exit")
        told, reported = self._files.told(name), self._files.reported(name)
        peaks = {name: measured.peaks} if measured.peaks.is_known else {}
        self._release(attempt, Ended([(name, code, why)], told, peaks, reported=reported))

    def _release(self, attempt: Attempt, event: Ended | NotStarted | StartFailed) -> None:
        """Report the end of an attempt of which only its folder is left, and release its ports, folder and limit."""
        if self._host.attempts.pop(attempt.name, None) is None:
            return  # given up meanwhile
        self._notes.forget(attempt.name)
        if attempt.terminal is not None:
            attempt.terminal.end(CODE_LOST)
        self._ports.give_back(self._host.key(attempt.name))
        self._files.unwatch(attempt.name)
        with contextlib.suppress(OSError):
            self._folders.attempt_ended(attempt.name)
        if self.limits is not None:
            self.limits.remove(attempt.name)
        self.report(event)
