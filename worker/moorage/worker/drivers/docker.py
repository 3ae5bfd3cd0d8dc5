"""The driver of containers: an engine starts them, the supervisor ends them and proves that they are over.

A container is created, then the supervisor is told its id, then it is started: whatever dies in between, what runs is
known to the supervisor. When a container has ended, its output is read to the end, the engine removes it, and the
supervisor's proof that nothing of it is left is the member's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from moorage.schemas.capabilities import Capabilities
from moorage.schemas.driver_config import DockerBlock
from moorage.schemas.errors import MoorageError, refuse
from moorage.schemas.frames import LogPage, ReadLog
from moorage.schemas.job import Request, Secret
from moorage.schemas.settings import setting
from moorage.worker.drivers.base import CODE_CANNOT_START, CODE_LOST, Assignment, Driver, Living
from moorage.worker.drivers.container_config import ContainerSettings, check_policy, check_request, config_of
from moorage.worker.drivers.container_engine import Engine, EngineDown, EngineError
from moorage.worker.drivers.container_faults import CannotStart, pull_fault, start_fault
from moorage.worker.drivers.container_output import ContainerOutput, clear_marks
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.output_frames import OutputFrames
from moorage.worker.drivers.process import WORKER_STOPPED, key_of, name_of, read_output
from moorage.worker.drivers.supervisor_link import SupervisorLink, owner_of
from moorage.worker.environment import START_FAILED, SharingUnavailable
from moorage.worker.member_messages import Ended, MemberName, NotStarted, Replaced, Started, StartFailed, Stuck
from moorage.worker.policy import Policy
from moorage.worker.settings import WorkerSettings
from moorage.worker.supervisor.client import SupervisorError, SupervisorGone
from moorage.worker.supervisor.output import member_digest
from moorage.worker.supervisor.protocol import MARK_NAME, SHUTS_DOWN, Event, StartMember, Unproven
from moorage.worker.supervisor.protocol import Ended as ChildEnded

log = logging.getLogger("moorage.worker")

#: how long a container that is over waits for its engine to tell exit code and output
ENGINE_S: Final = 10.0
#: how long its output is read after its end, as long as some comes within `ENGINE_S`
OUTPUT_S_MAX: Final = 600.0
RETRY_S: Final = 0.5
#: containers that are made at once; an engine makes them one after the other anyway
STARTS_MAX: Final = 16
#: images that are pulled at once, each within a time
PULLS_MAX: Final = 4
PULL_S_MAX: Final = 1800.0
#: pieces of output that are kept before other work has its turn
TURN_PIECES_MAX: Final = 64
#: how long pieces wait for others, to be told in one frame
FLUSH_S: Final = 0.02
LABEL: Final = "moorage.member"
LABEL_STATE: Final = "moorage.state"


class _Member:
    """A container that is here, from the placement until its end is reported."""

    def __init__(self, name: MemberName) -> None:
        self.name = name
        self.container = ""
        self.is_told = False
        """Whether the supervisor knows it, or may."""
        self.is_removed = False
        """Whether the engine has it no more. Told to each supervisor, since none may have been there to hear it."""
        self.is_ending = False
        self.over: asyncio.Future[ChildEnded] = asyncio.get_running_loop().create_future()
        """What the supervisor says of its end."""
        self.task: asyncio.Task[None] | None = None


class DockerSettings(ContainerSettings, frozen=True):
    """Settings of the driver `docker`: those of all containers, and where its engine is."""

    socket: Annotated[
        Path | None, setting("UNIX socket of the engine on this host; else DOCKER_HOST's, else /var/run/docker.sock.")
    ] = None

    @property
    def engine(self) -> Path:
        """The socket of the engine. A container is ended by this host's kernel, so no other host's engine will do."""
        scheme, _, path = os.environ.get("DOCKER_HOST", "").partition("://")
        return self.socket or Path(path if scheme == "unix" else "/var/run/docker.sock")


class DockerDriver(Driver):
    """See the module's text. `simulated`: devices exist only in name, so no container gets any."""

    name = "docker"
    settings = DockerSettings
    config = DockerBlock
    capabilities = Capabilities(keeps_output=True, ends_streams=True, outlives_agent=True, fence="supervisor")

    @classmethod
    def from_kit(cls, kit: Kit) -> DockerDriver:
        return cls(
            kit.supervisor,
            kit.worker,
            kit.own,
            interface=kit.settings.interface,
            simulated=kit.simulated,
            stream_output=kit.settings.stream_output,
            output_cap_bytes=kit.settings.output_cap_bytes,
            policy=kit.policy,
        )

    def __init__(
        self,
        link: SupervisorLink,
        worker: str,
        own: DockerSettings,
        *,
        interface: str | None,
        simulated: bool,
        stream_output: bool,
        output_cap_bytes: int,
        policy: Policy,
    ) -> None:
        super().__init__()
        self._link = link
        self._worker = worker
        self._owner = owner_of(worker, self.name)
        self._own = own
        self._interface = interface
        self._simulated = simulated
        self._stream_output = stream_output
        self._output_cap_bytes = output_cap_bytes
        self._policy = policy
        self._engine = Engine(own.engine)
        self._state_mark = ""
        self._info: dict[str, Any] | None = None
        self._members: dict[MemberName, _Member] = {}
        self._starts = asyncio.Semaphore(STARTS_MAX)
        self._pulls = asyncio.Semaphore(PULLS_MAX)
        self._cleaning: set[asyncio.Task[None]] = set()
        self._output = OutputFrames()
        self._fresh: set[ContainerOutput] = set()
        self._flush: asyncio.TimerHandle | None = None

    async def open(self) -> list[Living]:
        listed = await self._link.open(self._owner, self)
        self.boot = self._link.boot
        self._state_mark = (self._link.state / MARK_NAME).read_text()
        info = await self._ask_info()
        if os.geteuid() != 0 and info is not None and not any("rootless" in each for each in info["SecurityOptions"]):
            raise refuse(
                "failed-precondition",
                "the engine runs containers as root, and this agent is not root: it could not end them",
                found=f"uid {os.geteuid()}",
                next="run the agent as root, or a rootless engine as its user",
            )
        living: list[Living] = []
        for key, state, event in listed:
            member = _Member(name_of(key))
            member.is_told = True
            self._members[member.name] = member
            if isinstance(event, ChildEnded):
                member.over.set_result(event)
            # an end is told once its output and its exit code are known: until then it is as if it ran
            living.append(Living(member.name, {"waiting": "starting", "unproven": "stuck"}.get(state, "running")))
        known = set(self._members)
        clear_marks(self._link.state, self._owner, [self._key(name) for name in known])
        self._clean(self._sweep())
        for name in known:
            self._run(self._members[name], self._adopt(self._members[name]))
        return living

    async def close(self) -> None:
        tasks = [each.task for each in self._members.values() if each.task is not None] + list(self._cleaning)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._engine.close()
        await self._link.close(self._owner)

    def check(self, request: Request) -> None:
        check_request(request, self._own)
        for name, value in request.workload.env.items():
            if isinstance(value, Secret):
                raise refuse(
                    "invalid-argument",
                    "the driver docker gives no secrets to jobs yet: the engine would show them to its users",
                    field=f"$.run.env.{name}",
                    allowed="plain values; or the driver process for a job with secrets",
                )

    def start(self, assignments: list[Assignment]) -> None:
        for assignment in assignments:
            member = self._members[assignment.name] = _Member(assignment.name)
            self._run(member, self._start(member, assignment))

    def end(self, name: MemberName, grace_s: float, why: str) -> None:
        self.end_with_notice(name, grace_s, why, 0.0)

    def end_with_notice(self, name: MemberName, grace_s: float, why: str, notice_s: float) -> None:
        member = self._members.get(name)
        if member is None:
            return
        member.is_ending = True
        if member.is_told:
            self._link.end(self._key(name), grace_s, why, notice_s)
        elif member.task is not None:
            member.task.cancel()

    def forget(self, names: list[MemberName]) -> None:
        self._link.forget([self._key(name) for name in names])

    def set_fence(self, deadline_s: float, grace_s: float) -> None:
        self._link.set_fence(self._owner, deadline_s, grace_s)

    def keeps(self, settings: WorkerSettings) -> dict[str, float]:
        bounds = self._link.keeper.bounds
        return {"output_s": bounds.keep_s, "output_bytes": bounds.bytes_max}

    async def read_log(self, ask: ReadLog) -> LogPage:
        name = (ask.tenant, ask.job, ask.replica, ask.attempt, ask.fence)
        is_over = ask.ended_ms > 0 and name not in self._members
        return await read_output(self._link, self._key(name), ask, is_over, self._worker)

    # -- what the supervisor says (see `supervisor_link.Listener`)

    def on_event(self, key: str, event: Event) -> None:
        member = self._members.get(name_of(key))
        if member is None:
            return
        if isinstance(event, ChildEnded) and not member.over.done():
            member.over.set_result(event)
        elif isinstance(event, Unproven):
            self.report(Stuck([member.name]))

    def on_events_over(self) -> None:
        """Each event was dealt with by itself."""

    def on_replaced(self) -> None:
        self.boot = self._link.boot
        self.report(Replaced(self.name))

    def on_listed(self, listed: Sequence[tuple[str, str, Event | None]]) -> None:
        missing = {name for name, member in self._members.items() if member.is_told and not member.over.done()}
        for key, _, event in listed:
            missing.discard(name_of(key))
            if event is not None:
                self.on_event(key, event)
            member = self._members.get(name_of(key))
            if member is not None and member.is_removed and not member.over.done():
                self._link.removed(self._key(member.name))
        for name in missing:  # the next supervisor does not know it: its word never reached a journal
            self._members[name].over.set_result(
                ChildEnded(key=self._key(name), reason="supervisor-died", proof="never-ran")
            )

    def on_start_refused(self, keys: Sequence[str], why: str) -> None:
        """Never called: what it starts it asks for by `contain`."""

    # -- inside: the way of one member

    def _key(self, name: MemberName) -> str:
        return key_of(self._owner, name)

    def _run(self, member: _Member, way: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await way
            except Exception:  # a defect of ours: its devices stay quarantined, and other members run on
                log.exception("lost track of the container of %s", member.name[1])
                self.report(Stuck([member.name]))

        member.task = asyncio.get_running_loop().create_task(run())

    def _clean(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _ask_info(self) -> dict[str, Any] | None:
        try:
            self._info = await self._engine.info()
        except (EngineDown, EngineError) as error:
            log.warning("the container engine on %s: %s", self._own.engine, error)
            return None
        return self._info

    async def _start(self, member: _Member, assignment: Assignment) -> None:
        name, key = member.name, self._key(member.name)
        try:
            async with self._starts:
                config = await self._config(member, assignment)
            await self._pull(member, assignment.request.image)
            async with self._starts:
                await self._create(member, config)
            # from here on the supervisor may know it: then its end is the supervisor's to prove
            member.is_told = True
            await self._tell(member, assignment)
            if member.is_ending:
                raise CannotStart(None, "it was asked to end before its start")
            async with self._starts:
                await self._engine.start(member.container)
        except asyncio.CancelledError:
            if not member.is_ending:
                raise  # the agent goes: the next one finds what is left
            await self._not_started(member, CannotStart(None, "it was asked to end before its start"))
        except CannotStart as refused:
            await self._not_started(member, refused)
        except EngineError as error:
            await self._not_started(member, start_fault(error, member.is_told))
        except EngineDown as error:
            if not member.is_told:
                await self._not_started(member, CannotStart(None, f"the container engine does not answer: {error}"))
                return
            log.warning("%s: the engine went away during its start: %s", name[1], error)
            self._link.end(key, 0.0, "its engine went away during its start")
            await self._remove(member)  # until then it may still be started
            await member.over
            self._members.pop(name, None)
            self.report(Ended([(name, CODE_LOST, "end" if member.is_ending else "lost")]))
        else:
            self.report(Started([name]))
            await self._follow(member)

    async def _config(self, member: _Member, assignment: Assignment) -> dict[str, Any]:
        """What the engine is to create, if this worker lets the tenant run it. Raises CannotStart."""
        request, own = assignment.request, self._own
        try:
            check_policy(member.name[0], request, own, self._policy)
            info = await self._ask_info() if assignment.devices or self._info is None else self._info
            if info is None:
                raise CannotStart(None, "the container engine does not answer")
            return config_of(
                assignment, own, self._policy, info,
                labels=self._labels(member.name), log_bytes=self._output_cap_bytes,
                interface=self._interface, simulated=self._simulated,
            )  # fmt: skip
        except SharingUnavailable as error:
            raise CannotStart(None, error.problem.message.removeprefix(f"{START_FAILED}: ")) from None
        except MoorageError as error:
            code = None if error.code == "failed-precondition" else CODE_CANNOT_START
            raise CannotStart(code, error.problem.message.removeprefix(f"{START_FAILED}: ")) from None

    async def _create(self, member: _Member, config: dict[str, Any]) -> None:
        """Raises CannotStart, EngineDown, EngineError."""
        digest = member_digest(f"{self._state_mark}|{self._key(member.name)}")
        try:
            member.container = await self._engine.create(config, f"moorage-{digest}")
        except EngineError as error:
            if error.status == 400:  # what it cannot read is the request's, as a folder that is not absolute
                raise CannotStart(CODE_CANNOT_START, error.message) from None
            raise

    async def _pull(self, member: _Member, image: str) -> None:
        """Have the image here, as the settings say. Raises as `_create`."""
        if await self._has_image(image):
            return
        async with self._pulls:
            if await self._has_image(image):  # another pulled it meanwhile
                return
            log.info("%s: pulling the image %s", member.name[1], image)
            before = ""
            try:
                async with asyncio.timeout(PULL_S_MAX):
                    async for told in self._engine.pull(image):
                        if told != before:
                            log.debug("%s: image %s: %s", member.name[1], image, told)
                        before = told
            except TimeoutError:
                why = f"image {image} cannot be pulled: it is not here after {PULL_S_MAX / 60:g} minutes"
                raise CannotStart(None, why) from None
            except EngineError as error:
                raise pull_fault(image, error) from None

    async def _has_image(self, image: str) -> bool:
        """Whether there is nothing to pull."""
        pull = self._own.pull
        return pull == "never" or (pull == "missing" and await self._engine.has_image(image))

    async def _tell(self, member: _Member, assignment: Assignment) -> None:
        """Tell the supervisor of a created container. Raises CannotStart."""
        run = assignment.run
        start = StartMember(
            key=self._key(member.name),
            argv=(),
            env={},
            timeout_s=run.timeout_s,
            ends_in_s=assignment.ends_in_s,
            grace_s=run.grace_s,
            checkpoint_signal=run.checkpoint_signal,
            checkpoint_before_s=run.checkpoint_before_s if run.checkpoint_signal else None,
            on_partition=assignment.request.on_partition,
        )
        try:
            await self._link.contain(start, member.container)
        except SupervisorError as error:
            # a supervisor that died may have written it down, and the next one says what became of it
            member.is_told = isinstance(error, SupervisorGone)
            raise CannotStart(None, str(error)) from None

    async def _not_started(self, member: _Member, refused: CannotStart) -> None:
        """A start that did not happen: nothing of it is left in the engine, then it is told."""
        code, why, reason = refused.code, f"{START_FAILED}: {refused}", "exit"
        if member.is_told:
            await self._remove(member)
            reason = (await member.over).reason
        elif member.container:
            self._clean(self._remove(member))  # what nobody starts is not waited for
        elif code is None:
            self._clean(self._remove_unknown(member.name))
        self._members.pop(member.name, None)
        if member.is_ending or reason in ("timeout", "fence"):
            self.report(Ended([(member.name, CODE_LOST, "end" if reason == "exit" else reason)]))
            return
        self.report(NotStarted([(member.name, why)]) if code is None else StartFailed([(member.name, code, why)]))

    async def _adopt(self, member: _Member) -> None:
        """Go on with a container of the agent before; what was created and never started is removed."""
        while True:
            try:
                member.container = await self._container_of(member.name)
                state = await self._engine.state(member.container) if member.container else None
                break
            except (EngineDown, EngineError) as error:
                log.warning("%s: the container engine: %s", member.name[1], error)
                if member.over.done():
                    state = {"Status": "unknown"}
                    break
                await asyncio.wait((member.over,), timeout=RETRY_S)
        if state is not None and state["Status"] == "created":
            await self._not_started(member, CannotStart(None, "its agent ended before its start"))
            return
        if state is None:
            self._removed(member)
        await self._follow(member)

    async def _container_of(self, name: MemberName) -> str:
        label = f"{LABEL}={self._key(name)}"
        found = await self._engine.labelled(label)
        return next((each for each, labels in found if labels.get(LABEL_STATE) == self._state_mark), "")

    async def _follow(self, member: _Member) -> None:
        """Keep its output until it is over, then report how it ended."""
        name, key = member.name, self._key(member.name)
        output = ContainerOutput(self._link.state, key, self._output_cap_bytes)
        loop = asyncio.get_running_loop()
        reading = loop.create_task(self._read(member, output))
        outcome = loop.create_task(self._outcome(member))
        state: dict[str, Any] | None = None
        try:
            await asyncio.wait((outcome, member.over), return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait((outcome,), timeout=ENGINE_S)
            if done:
                state = outcome.result()
                await _read_out(reading, output)
            is_whole = reading.done() and reading.exception() is None
        except asyncio.CancelledError:
            self._publish_output()
            output.close(is_over=False)
            raise
        finally:
            for task in (reading, outcome):
                task.cancel()
            await asyncio.wait((reading, outcome))
        await self._remove(member)
        ended = await member.over
        self._publish_output()  # the rest first: both ends come last
        out, err = output.sizes
        self._output.end(name, msgspec.structs.replace(ended, stdout_bytes=out, stderr_bytes=err))
        self._publish_output()
        if not is_whole:
            log.warning("%s: its output is cut: the engine did not bring the rest", name[1])
            output.cut()
        output.close(is_over=True)
        self._members.pop(name, None)
        self.report(Ended([(name, *_verdict(ended, state))]))

    async def _outcome(self, member: _Member) -> dict[str, Any] | None:
        """Its last state, once it is over; None where the engine has it no more."""
        while member.container:
            with contextlib.suppress(EngineDown, EngineError):
                await self._engine.wait(member.container)
                state = await self._engine.state(member.container)
                if state is None or state["Status"] in ("exited", "dead"):
                    return state
            await asyncio.sleep(RETRY_S)
        return None

    async def _read(self, member: _Member, output: ContainerOutput) -> None:
        """Keep its output as it comes, to the end; from where it was before whenever the engine comes back."""
        while member.container:
            try:
                await self._read_on(member, output, follow=True)
                state = await self._engine.state(member.container)
                if state is None or state["Status"] in ("exited", "dead"):
                    await self._read_on(member, output, follow=False)  # a stream that follows may end a moment early
                    return
            except (EngineDown, EngineError) as error:
                log.debug("%s: its output: %s", member.name[1], error)
            await asyncio.sleep(RETRY_S)

    async def _read_on(self, member: _Member, output: ContainerOutput, follow: bool) -> None:
        pieces = 0
        async for piece in self._engine.output(member.container, output.since, follow):
            event = output.add(piece)
            if event is not None and self._stream_output:
                self._output.add(member.name, event)
            pieces += 1
            if pieces % TURN_PIECES_MAX == 0:
                await asyncio.sleep(0)
            self._fresh.add(output)
            if self._flush is None:
                self._flush = asyncio.get_running_loop().call_later(FLUSH_S, self._publish_output)

    def _publish_output(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        fresh, self._fresh = self._fresh, set()
        for output in fresh:
            output.mark()
        for name, payload in self._output.take():
            self.publish(name, payload)

    async def _remove(self, member: _Member) -> None:
        """Have the engine remove it, until it has or the supervisor has proven the end; then the supervisor knows."""
        delay_s = RETRY_S
        while member.container:
            try:
                await self._engine.remove(member.container)
                break
            except (EngineDown, EngineError) as error:
                log.warning("%s: its container cannot be removed yet: %s", member.name[1], error)
                if member.over.done():
                    self._clean(self._remove_later(member.container))
                    return
                await asyncio.wait((member.over,), timeout=delay_s)
                delay_s = min(2 * delay_s, ENGINE_S)
        self._removed(member)

    def _removed(self, member: _Member) -> None:
        member.is_removed = True
        self._link.removed(self._key(member.name))

    async def _remove_unknown(self, name: MemberName) -> None:
        """The engine may have created a container of which nothing was heard: remove it."""
        while True:
            await asyncio.sleep(ENGINE_S)
            with contextlib.suppress(EngineDown, EngineError):
                if container := await self._container_of(name):
                    await self._engine.remove(container)
                return

    async def _remove_later(self, container: str) -> None:
        """Nothing of it runs; the engine is to drop what it knows of it, once it answers."""
        while True:
            await asyncio.sleep(ENGINE_S)
            with contextlib.suppress(EngineDown, EngineError):
                await self._engine.remove(container)
                return

    async def _sweep(self) -> None:
        """Remove what an agent before created without telling the supervisor, or did not come to remove."""
        while True:
            try:
                found = await self._engine.labelled(f"{LABEL_STATE}={self._state_mark}")
                break
            except (EngineDown, EngineError):
                await asyncio.sleep(ENGINE_S)
        for container, labels in found:
            key = labels.get(LABEL, "")
            is_here = any(self._key(name) == key for name in self._members)  # it sees to its container itself
            if key.partition("|")[0] == self._owner and not is_here:
                log.info("removing the container %s, which an agent before this one left", container[:12])
                await self._remove_now_or_later(container)

    async def _remove_now_or_later(self, container: str) -> None:
        try:
            await self._engine.remove(container)
        except (EngineDown, EngineError):
            self._clean(self._remove_later(container))

    def _labels(self, name: MemberName) -> dict[str, str]:
        tenant, job, replica, attempt, _ = name
        return {
            LABEL: self._key(name),
            LABEL_STATE: self._state_mark,
            "moorage.tenant": tenant,
            "moorage.job": job,
            "moorage.replica": str(replica),
            "moorage.attempt": str(attempt),
        }


async def _read_out(reading: asyncio.Task[None], output: ContainerOutput) -> None:
    """Wait for the rest of an output as long as the engine brings some, whatever that is: pieces come again, too."""
    seen = -1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(OUTPUT_S_MAX):
            while not reading.done() and output.pieces != seen:
                seen = output.pieces
                await asyncio.wait((reading,), timeout=ENGINE_S)


def _verdict(ended: ChildEnded, state: dict[str, Any] | None) -> tuple[int, str]:
    """(code, reason) for the fact `exited`."""
    reason = ended.reason
    if reason == "end" and ended.why == SHUTS_DOWN:
        why = WORKER_STOPPED
    else:
        why = "lost" if reason == "supervisor-died" else reason
    if state is None or state.get("Status") not in ("exited", "dead"):
        return CODE_LOST, "lost" if why == "exit" else why
    code = int(state.get("ExitCode", CODE_LOST))
    if state.get("OOMKilled"):
        return CODE_LOST, "out of memory: it was killed at its limit"
    if reason != "exit" and code in (137, 143):
        code = 128 - code  # by the supervisor's signal, which an engine tells as a shell does
    return code, why
