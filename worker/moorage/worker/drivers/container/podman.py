"""Run containers through podman: the supervisor runs `podman run`, and ends it with everything that descends from it.

`podman run` is the member's process; it passes on the container's output and exit code. Conmon, the container's
monitor, is the parent of the container's init, and becomes a child of the supervisor. Both are in cgroups that podman
chooses, so the end is proven by the process tree. The runtime writes a file once the container is made: until that file
exists, podman's error message is the reason why nothing started.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import logging
import os
import tempfile
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.schemas.capabilities import KERNEL, Capabilities
from moorage.schemas.driver_config import PodmanBlock
from moorage.schemas.errors import MoorageError, refuse
from moorage.schemas.frames import NOT_HERE, LogPage, ReadLog
from moorage.schemas.job import Request
from moorage.system.device_environment import HostAtFault, names_tf_paths
from moorage.system.proctree import MARK_NAMES, STATE_MARK
from moorage.worker.devices.readers.cdi import CdiError, Registry, folders, read_registry
from moorage.worker.drivers.base import CODE_NOT_FOUND, Assignment, Driver, Living
from moorage.worker.drivers.container.config import (
    MPS,
    Image,
    cdi_name,
    check_container_policy,
    check_host_ipc,
    check_network,
    check_request,
    config_of,
    ports_of,
    registry_of,
    uid_of,
)
from moorage.worker.drivers.container.engine import EngineError
from moorage.worker.drivers.container.entry import Entries, NoEntry
from moorage.worker.drivers.container.faults import CannotStart, config_fault, lacks, pull_fault
from moorage.worker.drivers.container.podman_command import (
    CODES,
    Podman,
    PodmanSettings,
    default_user,
    last_error,
    limits_here,
    run_fault,
    words_of,
)
from moorage.worker.drivers.container.ports import Ports, ports_wanted
from moorage.worker.drivers.container.start import login_for
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.output_frames import Notes
from moorage.worker.drivers.process.driver import ENGINE, LACKS, ProcessDriver
from moorage.worker.drivers.supervisor_link import name_of, owner_of
from moorage.worker.job.attempt_folders import AttemptFolders
from moorage.worker.job.environment import LacksHere
from moorage.worker.job.memory_folder import NoMemory
from moorage.worker.job.secret_files import secret_variables
from moorage.worker.session.member_messages import MemberName, Started
from moorage.worker.supervisor.output import member_digest, output_path
from moorage.worker.supervisor.protocol import MARK_NAME, Event, StartMember
from moorage.worker.supervisor.protocol import Ended as ChildEnded

log = logging.getLogger("moorage.worker")

#: below the supervisor's state folder: a file for each container that was made, a file once its start was reported, and
#: a file with the device nodes that CDI is to inject
FOLDER: Final = "podman"
_MADE: Final = ".pid"
_TOLD: Final = ".told"
_NODES: Final = ".nodes"
LABEL: Final = "moorage.member"
LABEL_STATE: Final = "moorage.state"
#: prefix of an end's `why` if a device was missing
NO_DEVICE: Final = "devices"
LOOK_S_MIN: Final = 0.02
LOOK_S_MAX: Final = 0.25
#: images that are pulled at the same time, and the time limit of each pull
PULLS_MAX: Final = 4
PULL_S_MAX: Final = 1800.0
#: images known to be present: asking podman costs a process for each container
IMAGES_MAX: Final = 256
#: how long after a forced end podman's data of containers is removed, together with other containers that end then
CLEAN_S: Final = 0.2
#: how long until the next try if podman failed
RETRY_S: Final = 10.0
#: containers in one command
AT_ONCE: Final = 100
#: podman reports a signal as a shell does
_SIGNALS: Final = (137, 143)


#: identifies a file's content: its time, inode and size
_Stamp = tuple[int, int, int]


class PodmanDriver(ProcessDriver):
    """The driver `podman`; see the module's docstring."""

    name = "podman"
    joins_mps = False
    settings = PodmanSettings
    config = PodmanBlock
    capabilities = Capabilities(
        keeps_output=True,
        ends_streams=True,
        brings_files=True,
        outlives_agent=True,
        fence="supervisor",
        devices=KERNEL,  # by the engine's own filter
    )

    @classmethod
    def from_kit(cls, kit: Kit) -> PodmanDriver:
        settings = kit.settings
        made = cls(
            kit.supervisor,
            kit.worker,
            secrets_dir=settings.secrets_dir,
            interface=settings.interface,
            simulated=kit.simulated,
            stream_output=settings.stream_output,
            output_cap_bytes=settings.output_cap_bytes,
            policy=kit.policy,
            folders=AttemptFolders(settings, owner_of(kit.worker, cls.name), is_mounted=True),
            files=kit.files,
            limits=kit.limits(cls.name),
            mps=kit.mps if kit.own.mps_host_ipc else None,
        )
        check_host_ipc(kit.own, has_limiter=made.limits is not None)
        made.joins_mps = kit.own.mps_host_ipc
        made.modes_refused = () if made.joins_mps else (MPS,)
        made.own = msgspec.structs.replace(kit.own, user=kit.own.user or default_user())
        made.podman = Podman(made.own.options)
        made.nodes = kit.nodes
        made.ports = Ports(kit.supervisor.state, made._owner, settings.address)
        return made

    own: PodmanSettings
    podman: Podman
    ports: Ports
    #: the files in /dev of each device, from the kit
    nodes: Mapping[str, Sequence[str]]

    def __init__(self, *words: Any, **fields: Any) -> None:
        super().__init__(*words, **fields)
        self._folder = self._link.state / FOLDER
        self._prefix = f"{member_digest(self._owner)[:16]}-"  # of this driver's files: other workers have theirs there
        self._mark = ""
        self._entries = Entries(self._owner, "")
        self._notes = Notes(publishes=self._stream_output)
        self._pulls = asyncio.Semaphore(PULLS_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: dict[MemberName, asyncio.Task[None]] = {}
        self._to_remove: set[MemberName] = set()
        self._orphans: set[MemberName] = set()  # their supervisor died, and podman has not removed their containers yet
        self._images_file: Path | None = None  # podman rewrites it when an image comes, goes or is renamed
        self._found: dict[str, _Stamp] = {}  # images that were present at that stamp; emptied when a start fails
        self._cleans: asyncio.Task[None] | None = None

    async def open(self) -> list[Living]:
        living = await super().open()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._mark = (self._link.state / MARK_NAME).read_text()
        self._entries = Entries(self._owner, self._mark)
        self._entries.clear()
        self._notes.publish = self.publish
        living = [self._as_it_is(each) for each in living]
        self.ports.begin(self._key(each.name) for each in living)
        # awaited: an unprivileged user's first podman command leaves a process behind, which must not belong to a
        # member
        try:
            await self._sweep([each.name for each in living if each.phase != "stuck"])
        except (OSError, TimeoutError, ValueError) as error:
            log.warning("podman: containers of an earlier agent are not removed: %s", error or "no answer")
        with contextlib.suppress(OSError, TimeoutError, ValueError):  # on failure podman is asked for each container
            where = await self.podman.ask("info", "--format={{.Store.GraphDriverName}} {{.Store.GraphRoot}}")
            kind, root = where.out.strip().split(" ", 1)
            self._images_file = Path(root) / f"{kind}-images" / "images.json"
        return living

    async def close(self) -> None:
        for task in [*self._tasks, *self._starting.values()]:
            task.cancel()
            await asyncio.wait((task,))
        await super().close()

    def can(self) -> Capabilities:
        return msgspec.structs.replace(Driver.can(self), memory_limit="memory" in limits_here())

    async def living(self, names: Collection[MemberName]) -> Collection[MemberName] | None:
        """Return also the members whose containers podman still runs, whatever the supervisor knows of them."""
        supervised = await super().living(names)
        if supervised is None:
            return None
        found = {*supervised, *self._orphans}
        if found.issuperset(names):
            return found
        try:
            there = {name_of(key) for _, key in await self._containers() if key.partition("|")[0] == self._owner}
        except (OSError, TimeoutError, ValueError):
            return None
        return found | there

    def check(self, request: Request) -> None:
        check_request(request, self.own)

    def uid_of(self, tenant: str, request: Request) -> int | None:
        uid = uid_of(tenant, request, self.own, self._policy)
        if not os.geteuid():
            return uid
        return os.geteuid() if uid == 0 else None  # rootless, a container's other users have other uids on the host

    async def read_log(self, ask: ReadLog) -> LogPage:
        key = self._key((ask.tenant, ask.job, ask.replica, ask.attempt, ask.fence))
        return msgspec.structs.replace(await super().read_log(ask), ports=self.ports.of(key))

    # -- differences from the driver of processes

    def _start_member(self, assignment: Assignment) -> StartMember:
        """Return the member to start. Raises Refused if this worker forbids it, HostAtFault, SecretRefused."""
        name, request, run = assignment.name, assignment.request, assignment.run
        check_container_policy(name[0], request, self.own, self._policy)
        self._policy.check_secrets(name[0], run.env)
        check_network(name[0], request, self.own)
        secret_variables(run.env, self._secrets_dir)  # a missing secret is reported now
        marks = assignment.environment(
            interface=self._interface, simulated=self._simulated, has_own_mps=self._mps is not None
        )
        if self._folders is not None:
            self._folders.make(name, run.grace_s, run.keep)
        return StartMember(
            key=self._key(name),
            argv=(),
            env=self.podman.environment() | {mark: marks[mark] for mark in MARK_NAMES},
            timeout_s=run.timeout_s,
            ends_in_s=assignment.ends_in_s,
            grace_s=run.grace_s,
            checkpoint_signal=run.checkpoint_signal,
            checkpoint_before_s=run.checkpoint_before_s if run.checkpoint_signal else None,
            on_partition=request.on_partition,
            output_cap_bytes=self._output_cap_bytes,
            stream_output=self._stream_output,
            leaves_cgroup=True,
        )

    def _is_ready(self, assignment: Assignment) -> bool:
        return False

    async def _made_ready(self, assignment: Assignment, member: StartMember) -> StartMember:
        joined = await super()._made_ready(assignment, member)
        # the MPS daemon's client is the container, not podman
        mps = {each: value for each, value in joined.env.items() if each not in member.env}
        name, request = assignment.name, assignment.request
        try:
            await self._have_image(name, request.image)
            specs = Registry()
            if not self._simulated and any(each.vendor == "nvidia" for each in assignment.devices):
                specs = await asyncio.to_thread(read_registry, folders())
            if nodes := self._nodes(assignment, specs):
                self._file(name, _NODES).write_text("\n".join(nodes))
            return msgspec.structs.replace(member, argv=await self._words(assignment, specs, mps or None))
        except CannotStart as refused:
            if refused.code is None:
                raise HostAtFault(str(refused)) from None
            if refused.mark:
                raise LacksHere(str(refused)) from None
            raise refuse("failed-precondition", str(refused)) from None
        except (OSError, TimeoutError) as error:
            raise HostAtFault(f"podman: {error or 'it does not answer'}") from None

    def _begun(self, name: MemberName) -> None:
        """Begin to look for the container, so that its start is reported: podman runs, the container may not yet."""
        self._look_for(name)

    def _taken_over(self, name: MemberName) -> None:
        if not self._file(name, _TOLD).exists():
            self._look_for(name)

    def on_event(self, key: str, event: Event) -> None:
        if isinstance(event, ChildEnded):
            name = name_of(key)
            if event.reason == "supervisor-died" and name in self._known:
                self._known.discard(name)
                self._orphans.add(name)
                self._do(self._end_by_podman(key, event))
                return
            looking = self._starting.pop(name, None)
            if looking is not None:
                looking.cancel()
                if self._file(name, _MADE).exists() and not event.why.startswith(NO_DEVICE):
                    self._started.append(name)  # it ended before the look for it saw it
        super().on_event(key, event)

    def on_replaced(self) -> None:
        """Remove the containers: podman died with the supervisor, and only podman knows what hides in a container."""
        super().on_replaced()
        self._remove(self._known)

    def _mark_of(self, name: MemberName, event: ChildEnded) -> str:
        # programs, users and folders are those of the image, the same on every host
        return NOT_HERE if event.reason == "start-failed" and event.stage == LACKS else ""

    def _end_of(self, name: MemberName, event: ChildEnded) -> ChildEnded:
        """Tell the container's own end from a start that failed, by what `podman run` ended with."""
        change = msgspec.structs.replace
        if event.reason != "exit" or event.exit_code is None or event.exit_code in CODES:
            self._to_remove.add(name)  # otherwise podman has removed it itself
        if event.reason == "start-failed":
            return change(event, stage=ENGINE) if event.stage in ("exec", "cwd") else event  # podman is missing
        if event.reason == "end" and event.why.startswith(NO_DEVICE):
            return change(event, reason="start-failed", stage=ENGINE, message=event.why)
        if event.reason == "exit" and event.exit_code in CODES and not self._file(name, _MADE).exists():
            self._found.clear()  # the image may have been removed
            fault = run_fault(self._said(name))
            number = errno.ENOENT if fault.code == CODE_NOT_FOUND else errno.EACCES
            stage = LACKS if fault.mark else ENGINE if fault.code is None else "exec"
            return change(event, reason="start-failed", stage=stage, errno=number, message=str(fault))
        if event.reason != "exit" and event.exit_code in _SIGNALS:
            return change(event, exit_code=None, signal=event.exit_code - 128)
        return event

    def _over(self, names: Sequence[MemberName]) -> None:
        super()._over(names)
        for name in names:
            for suffix in (_MADE, _TOLD, _NODES):
                self._file(name, suffix).unlink(missing_ok=True)
            self._entries.remove(self._key(name))
            self.ports.give_back(self._key(name))
            self._notes.over(name)
        self._remove(())

    # -- inside

    def _file(self, name: MemberName, suffix: str) -> Path:
        return self._folder / f"{self._prefix}{member_digest(self._key(name))}{suffix}"

    def _container(self, name: MemberName) -> str:
        return f"moorage-{member_digest(f'{self._mark}|{self._key(name)}')}"

    def _as_it_is(self, living: Living) -> Living:
        """Return a running member as starting if its start was not reported yet; any other as it is."""
        is_told = living.phase != "running" or self._file(living.name, _TOLD).exists()
        return living if is_told else msgspec.structs.replace(living, phase="starting")

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _said(self, name: MemberName) -> str:
        """Return podman's last error line, from its standard error, which it shares with the job."""
        with contextlib.suppress(OSError), open(output_path(self._link.state, self._key(name), "stderr"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            return last_error(file.read())
        return "podman printed no error"

    async def _have_image(self, name: MemberName, image: str) -> None:
        """Make sure that the image is here, as the setting `pull` says. Raises CannotStart."""
        pull, words, head = self.own.pull, ["pull"], f"pulling the image {image}"
        if pull != "always":
            stamp = self._stamp()
            if stamp is not None and self._found.get(image) == stamp:
                return
            found = await self.podman.ask("image", "exists", "--", image)
            if found.code == 0:
                if len(self._found) >= IMAGES_MAX:
                    self._found.clear()
                if stamp is not None:
                    self._found[image] = stamp
                return
            if found.code != 1:
                raise CannotStart(None, found.error)
            if pull == "never":
                raise lacks(f"there is no image {image}, and this worker does not pull it")
        if self._pulls.locked():
            self._notes.say(name, f"waiting to pull the image {image}")
        async with self._pulls:
            log.info("%s", head)
            self._notes.say(name, head)
            with self._login_words(image) as login:
                try:
                    done = await self.podman.ask(
                        *words, *login, "--", image,
                        limit_s=PULL_S_MAX, heard=lambda line: self._notes.say(name, f"{head}: {line}"),
                    )  # fmt: skip
                except TimeoutError:
                    why = f"image {image} cannot be pulled: the pull did not end within {PULL_S_MAX / 60:g} minutes"
                    raise CannotStart(None, why) from None
            if done.code != 0:
                raise pull_fault(image, EngineError(500, done.error))

    def _stamp(self) -> _Stamp | None:
        """Return the stamp of podman's present list of images; None if it is unknown."""
        with contextlib.suppress(OSError):
            if self._images_file is not None:
                found = self._images_file.stat()
                return found.st_mtime_ns, found.st_ino, found.st_size
        return None

    @contextlib.contextmanager
    def _login_words(self, image: str) -> Iterator[list[str]]:
        """Give podman's arguments for the login at the image's registry; none without a login. Raises CannotStart.

        The file that they name exists while the context lasts.
        """
        login = login_for(image, self.own, self._secrets_dir)
        if login is None:
            yield []
            return
        auth = base64.b64encode(":".join(login).encode()).decode()
        try:
            with tempfile.NamedTemporaryFile(dir=self._entries.folder.open(), prefix="login-") as file:  # of mode 0600
                file.write(msgspec.json.encode({"auths": {registry_of(image): {"auth": auth}}}))
                file.flush()
                yield [f"--authfile={file.name}"]
        except NoMemory as error:
            raise CannotStart(None, f"a login for a registry needs a folder in memory: {error}") from None
        finally:
            self._entries.folder.close()

    async def _image(self, name: str) -> Image:
        """Return an image's own program and variables. Raises CannotStart."""
        done = await self.podman.ask("image", "inspect", "--", name)
        if done.code != 0:
            raise CannotStart(None, done.error)
        [inspected] = msgspec.json.decode(done.out)
        return Image.of(inspected)

    def _nodes(self, assignment: Assignment, specs: Registry) -> list[str]:
        """Return the device nodes that CDI must inject for the NVIDIA devices; empty if simulated.

        Raises CannotStart for a device that no spec has: podman has no other way to give it to a container.
        """
        names = [cdi_name(each, specs) for each in assignment.devices if each.vendor == "nvidia"]
        if self._simulated or not names:
            return []
        try:
            return [node.path for node in specs.resolve(names).device_nodes]
        except CdiError as error:
            mend = "run nvidia-ctk cdi generate on that host"
            raise CannotStart(None, "; ".join([str(error), *specs.faults, mend])) from None

    async def _words(self, assignment: Assignment, specs: Registry, mps: Mapping[str, str] | None) -> tuple[str, ...]:
        """Return the command line of `podman run`. Raises CannotStart, HostAtFault.

        Make the limiter's segment and the file of secrets, and take the ports, that it names.
        """
        name, run = assignment.name, assignment.run
        secrets = secret_variables(run.env, self._secrets_dir)
        limit = None if self.limits is None else self.limits.of_container(name, *assignment.part)
        needs_image = secrets or limit or names_tf_paths(run.env)
        image = await self._image(assignment.request.image) if needs_image else Image()
        wanted = ports_wanted(assignment.request)
        try:
            variables = self._entries.write(self._key(name), secrets) if secrets else None
            published = self.ports.take(self._key(name), wanted, ports_of(name[0], self.own)) if wanted else None
            config = config_of(
                assignment, self.own, self._policy, specs, image, published=published,
                labels={LABEL: self._key(name), LABEL_STATE: self._mark}, log_bytes=0, variables=variables, limit=limit,
                folder=self._folders.path(name) if self._folders is not None else "",
                interface=self._interface, simulated=self._simulated, nodes=self.nodes, mps=mps,
            )  # fmt: skip
        except NoEntry as error:
            raise CannotStart(None, str(error)) from None
        except MoorageError as error:
            raise config_fault(error) from None
        own = (f"--name={self._container(name)}", f"--pidfile={self._file(name, _MADE)}", f"--env={STATE_MARK}")
        return self.podman.words("run", *own, *words_of(config, limits_here()))

    def _look_for(self, name: MemberName) -> None:
        if name in self._starting:  # started here, and found again after a supervisor came back
            return
        self._starting[name] = asyncio.get_running_loop().create_task(self._look(name))

    async def _look(self, name: MemberName) -> None:
        """Report the start once the container is made and has its devices; end it if devices are missing."""
        delay_s = LOOK_S_MIN
        while not self._file(name, _MADE).exists():
            await asyncio.sleep(delay_s)
            delay_s = min(LOOK_S_MAX, 1.5 * delay_s)
        if missing := await self._missing(name):
            self._link.end(self._key(name), 0.0, f"{NO_DEVICE}: {missing}")
            return
        del self._starting[name]
        self._file(name, _TOLD).touch()
        self._entries.remove(self._key(name))  # the container has read it
        self.report(Started([name]))
        self._notes.started(name, self.ports.of(self._key(name)))

    async def _missing(self, name: MemberName) -> str:
        """Return which devices CDI should have injected and did not, or why that cannot be found out.

        Return "" if none is missing, or the container is over.
        """
        try:
            wanted = self._file(name, _NODES).read_text().split("\n")
        except FileNotFoundError:
            return ""
        form = "{{json .HostConfig.Devices}}"
        try:
            done = await self.podman.ask("container", "inspect", "--format", form, self._container(name))
            found = {each["PathInContainer"] for each in msgspec.json.decode(done.out)} if done.code == 0 else {*wanted}
        except (OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
            return f"podman inspect: {error or 'no answer'}"
        missing = [each for each in wanted if each not in found]
        return f"podman did not inject {', '.join(missing)}" if missing else ""

    # -- containers that podman keeps

    def _remove(self, names: Collection[MemberName]) -> None:
        """Begin to remove podman's data of these members, and of all others that wait for it."""
        self._to_remove.update(names)
        if self._cleans is None and self._to_remove:
            self._cleans = self._do(self._clean())

    async def _clean(self) -> None:
        """Remove podman's data of ended members, and try again until it is removed or the agent stops."""
        delay_s = CLEAN_S
        while self._to_remove:
            await asyncio.sleep(delay_s)
            names = list(self._to_remove)[:AT_ONCE]
            try:
                done = await self.podman.ask("rm", "--force", "--ignore", "--time=0", *map(self._container, names))
                trouble = done.error if done.code else ""
            except (OSError, TimeoutError) as error:
                trouble = str(error) or "no answer"
            if trouble:
                log.warning("podman: %d ended containers cannot be removed yet: %s", len(names), trouble)
                delay_s = RETRY_S
            else:
                self._to_remove.difference_update(names)
        self._cleans = None

    async def _end_by_podman(self, key: str, event: ChildEnded) -> None:
        """Report an end that a dead supervisor caused, once podman has removed the container."""
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                words = ("rm", "--force", "--ignore", "--time=0", self._container(name_of(key)))
                if (await self.podman.ask(*words)).code == 0:
                    break
            await asyncio.sleep(RETRY_S)
        self._orphans.discard(name_of(key))
        self.on_event(key, event)
        self.on_events_over()

    async def _containers(self, *options: str) -> list[list[str]]:
        """Return id and member's key of each running container of this state folder; of all of them with `--all`.

        Raises OSError, TimeoutError, ValueError.
        """
        form = f'--format={{{{.ID}}}} {{{{index .Labels "{LABEL}"}}}}'
        ours = f"--filter=label={LABEL_STATE}={self._mark}"
        listed = await self.podman.ask("ps", *options, "--no-trunc", ours, form)
        if listed.code:
            raise OSError(listed.error)
        return [line.split(" ", 1) for line in listed.out.splitlines()]

    async def _sweep(self, living: Sequence[MemberName]) -> None:
        """Remove this driver's containers, and its files in `FOLDER`, except those of these members.

        Log a warning for containers that podman does not remove. Raises OSError, TimeoutError, ValueError.
        """
        known = {self._key(name) for name in living}
        pairs = await self._containers("--all")
        left = [each for each, key in pairs if key.partition("|")[0] == self._owner and key not in known]
        for at in range(0, len(left), AT_ONCE):
            done = await self.podman.ask("rm", "--force", "--ignore", "--time=0", *left[at : at + AT_ONCE])
            if done.code:
                log.warning("podman: containers of an earlier agent are not removed: %s", done.error)
        kept = {self._prefix + member_digest(key) for key in known}
        for path in self._folder.glob(f"{self._prefix}*"):
            if path.stem not in kept:
                path.unlink()
