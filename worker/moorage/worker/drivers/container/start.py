"""Start a container: prepare image, folder and secrets, then create it, inform the supervisor, and start it.

The supervisor is informed before the start, so it knows every container that may run, whichever process dies. After the
start the container must have the device files of its lease (`missing_nodes`), else the start counts as failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from moorage.schemas.errors import MoorageError
from moorage.schemas.frames import CANNOT_RUN, Device
from moorage.schemas.job import Secret
from moorage.worker.attempt.attempt_files import AttemptFiles, brings
from moorage.worker.attempt.attempt_folders import AttemptFolders
from moorage.worker.attempt.environment import without_prefix
from moorage.worker.attempt.secret_files import resolve_secrets, secret_variables
from moorage.worker.devices.readers.cdi import Registry, read_registry
from moorage.worker.devices.readers.cdi_spec import CdiError
from moorage.worker.driver import Assignment
from moorage.worker.drivers.call_access import call_access, calls_of
from moorage.worker.drivers.container.config import (
    CALL_KEY_AT,
    MPS,
    ContainerSettings,
    Image,
    cdi_name,
    check_container_policy,
    check_network,
    config_of,
    ids_in,
    ids_of,
    ports_of,
    registry_of,
)
from moorage.worker.drivers.container.engine import About, EngineDown, EngineError
from moorage.worker.drivers.container.entry import Entries, NoEntry
from moorage.worker.drivers.container.faults import CannotStart, config_fault, fault_of, lacks, pull_fault
from moorage.worker.drivers.container.host import Attempt, ContainerHost
from moorage.worker.drivers.container.ports import Ports, ports_wanted
from moorage.worker.drivers.container.pull import PullProgress
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.output_frames import Notes
from moorage.worker.drivers.setups import give, until_deadline
from moorage.worker.sharing.limiter.limits import ContainerLimit, Limits
from moorage.worker.sharing.mps.control import daemon_of
from moorage.worker.start_codes import CODE_CANNOT_START
from moorage.worker.supervisor.client import SupervisorError, SupervisorGone
from moorage.worker.supervisor.containers import containers_of
from moorage.worker.supervisor.protocol import MpsDaemon, StartAttempt

#: containers that are created at the same time; an engine creates them one after the other anyway
STARTS_MAX: Final = 16
#: images that are pulled at the same time, and the time limit of each pull
PULLS_MAX: Final = 4
PULL_S_MAX: Final = 1800.0
#: a file of images whose C library is musl, and a file of images with glibc
MUSL: Final = f"/lib/ld-musl-{platform.machine()}.so.1"
GLIBC: Final = "/etc/ld.so.cache"
#: why an attempt did not start that was asked to end meanwhile
ENDED_FIRST: Final = "it was asked to end before its start"

#: the file of a whole NVIDIA GPU
_GPU: Final = re.compile(r"/dev/nvidia[0-9]+")

log = logging.getLogger("moorage.worker")


class Starter:
    """Starts the containers of one driver; see the module's docstring.

    Its methods raise CannotStart, EngineDown and EngineError, except `ask_engine`.
    """

    def __init__(
        self,
        host: ContainerHost,
        kit: Kit,
        *,
        folders: AttemptFolders,
        files: AttemptFiles,
        ports: Ports,
        notes: Notes,
        limits: Limits | None,
    ) -> None:
        self._host = host
        self._own: ContainerSettings = kit.own
        self._settings = kit.settings
        self._policy = kit.policy
        self._simulated = kit.simulated
        self._nodes = kit.nodes
        self._folders = folders
        self._files = files
        self._ports = ports
        self._notes = notes
        self._limits = limits
        self._mps = kit.mps
        self._calls = kit.calls
        self._entries: Entries | None = None
        self.about: About | None = None
        """The engine's description of itself when it was last asked; None before the first answer."""
        self._starts = asyncio.Semaphore(STARTS_MAX)
        self._pulls = asyncio.Semaphore(PULLS_MAX)

    @property
    def entries(self) -> Entries:
        if self._entries is None:
            self._entries = Entries(self._host.owner, self._host.mark)
        return self._entries

    async def ask_engine(self) -> About | None:
        """Return the engine's description of itself; None if it does not answer now."""
        try:
            self.about = await self._host.engine.about()
        except (EngineDown, EngineError) as error:
            log.warning("the container engine on %s failed: %s", self._host.engine.socket, error)
            return None
        return self.about

    async def start(self, attempt: Attempt, assignment: Assignment) -> None:
        """Start a container, and return once it runs.

        Once `attempt.is_known` is set, the supervisor may know it, and then the supervisor proves its end.
        """
        began_s, name = asyncio.get_running_loop().time(), attempt.name
        secrets = self._check(assignment)
        image = await self._image(attempt, assignment.request.image)
        mps = await self._join_daemon(assignment)
        try:
            async with self._starts:
                limit = self._limit(assignment)
                config, nodes = await self._config(assignment, image, secrets, limit, mps)
                await self._create(attempt, config)
            user = config["User"] or image.user
            if self._limits is not None and limit is not None:
                await self._give_limit(self._limits, attempt, user)
            await self._fill_folder(attempt, assignment, user)
            assignment = until_deadline(assignment, began_s)
            attempt.is_known = True
            daemon = None
            if assignment.mode == MPS and not self._simulated:
                daemon = daemon_of(dict(each.split("=", 1) for each in config["Env"]))
            await self._inform_supervisor(attempt, assignment, daemon)
            if attempt.is_ending:
                raise CannotStart(None, ENDED_FIRST)
            attempt.has_terminal = assignment.run.stdin == "stream"
            if attempt.has_terminal:  # after the supervisor knows it: podman makes a process for it
                attempt.terminal = self._host.terminal(attempt)
                await attempt.terminal.connect()
            async with self._starts:
                await self._host.engine.start(attempt.container)
                state = await self._host.engine.state(attempt.container)
            self._host.ran(attempt, state.pid if state is not None else 0)
            if missing := await asyncio.to_thread(missing_nodes, attempt.container, attempt.pid or 0, nodes):
                raise CannotStart(None, f"the engine has not given {', '.join(missing)} to the container")
        finally:
            if secrets:
                self.entries.remove(self._host.key(name))

    def _check(self, assignment: Assignment) -> dict[str, str]:
        """Return the values of the secrets by their variables.

        Raises CannotStart if the tenant may not run this container here, or a secret cannot be read.
        """
        tenant, run = assignment.name[0], assignment.run
        try:
            check_container_policy(tenant, assignment.request, self._own, self._policy)
            check_network(tenant, assignment.request, self._own)
            self._policy.check_secrets(tenant, run.env)
            return secret_variables(run.env, self._settings.secrets_dir)
        except MoorageError as error:
            raise fault_of(error) from None

    async def image_id(self, attempt: Attempt, assignment: Assignment) -> str:
        """Return the id of the image that a container would have now. Raises CannotStart, EngineDown, EngineError."""
        self._check(assignment)
        return (await self._image(attempt, assignment.request.image)).id

    async def _image(self, attempt: Attempt, name: str) -> Image:
        """Return the image, pulled first if the setting `pull` says so. Raises CannotStart if it cannot be had."""
        pull = self._own.pull
        if pull != "always" and (found := await self._host.engine.image(name)) is not None:
            return Image.of(found)
        if pull == "never":
            raise lacks(f"there is no image {name}, and this worker does not pull it")
        if self._pulls.locked():
            self._notes.publish_note(attempt.name, f"waiting to pull the image {name}")
        async with self._pulls:
            found = None if pull == "always" else await self._host.engine.image(name)  # another job may have pulled it
            if found is None:
                await self._pull(attempt, name)
                found = await self._host.engine.image(name)
        if found is None:
            raise CannotStart(None, f"image {name} was pulled, but the engine does not have it")
        return Image.of(found)

    async def _pull(self, attempt: Attempt, name: str) -> None:
        login = login_for(name, self._own, self._settings.secrets_dir)
        log.info("%s: pulling the image %s", attempt.name[1], name)
        progress = PullProgress(name)
        self._notes.publish_note(attempt.name, progress.text)
        try:
            async with asyncio.timeout(PULL_S_MAX):
                async for message in self._host.engine.pull(name, login):
                    progress.add(message)
                    self._notes.publish_note(attempt.name, progress.text)
        except TimeoutError:
            why = f"image {name} cannot be pulled: the pull did not end within {PULL_S_MAX / 60:g} minutes"
            raise CannotStart(None, why) from None
        except EngineError as error:
            raise pull_fault(name, error) from None

    async def _join_daemon(self, assignment: Assignment) -> dict[str, str] | None:
        """Return the variables of the worker's MPS daemon, once it is ready for this container.

        Return None if the container is no client of MPS, or the worker runs no daemon. Raises CannotStart.
        """
        if assignment.mode != MPS or self._simulated:
            return None
        about = self.about or await self.ask_engine()
        if about is None or about.maps_users:
            why = "the engine maps the containers' users to other users of the host (rootless, or userns-remap)"
            raise CannotStart(None, f"mps: {why if about else 'the container engine does not answer'}")
        try:
            return None if self._mps is None else await self._mps.join(assignment.name)
        except MoorageError as error:
            raise fault_of(error) from None

    def _limit(self, assignment: Assignment) -> ContainerLimit | None:
        if self._limits is None:
            return None
        try:
            return self._limits.of_container(assignment.name, *assignment.part)
        except MoorageError as error:
            raise fault_of(error) from None

    async def _give_limit(self, limits: Limits, attempt: Attempt, user: str) -> None:
        """Give the segment to the container's user. Raises CannotStart, also if the image cannot load the library."""
        engine = self._host.engine
        if await engine.read_file(attempt.container, MUSL) and not await engine.read_file(attempt.container, GLIBC):
            why = "limiter: the image's C library is musl, and a job with a share needs glibc here"
            raise CannotStart(CODE_CANNOT_START, why)
        try:
            limits.give(attempt.name, await self._ids(attempt, user), all_users=True)
        except MoorageError as error:
            raise fault_of(error) from None

    async def _ids(self, attempt: Attempt, user: str) -> tuple[int, int]:
        ids = ids_of(user) or ids_in(await self._host.engine.read_file(attempt.container, "/etc/passwd"), user)
        if ids is None:
            raise CannotStart(CODE_CANNOT_START, f"the image has no user {user}")
        return ids

    async def _config(
        self,
        assignment: Assignment,
        image: Image,
        secrets: dict[str, str],
        limit: ContainerLimit | None,
        mps: dict[str, str] | None,
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the configuration of the container, and the device files that it must have. Raises CannotStart.

        Make the folder and the file of secrets, and take the ports, that it names.
        """
        about = await self.ask_engine() if assignment.devices or self.about is None else self.about
        if about is None:
            raise CannotStart(None, "the container engine does not answer")
        specs, folders = None, about.cdi_folders
        if folders and not self._simulated and any(each.vendor == "nvidia" for each in assignment.devices):
            # the engine's own folders, which may be others than this host's usual ones
            specs = await asyncio.to_thread(read_registry, [Path(each) for each in folders])
        try:
            run = assignment.run
            folder = self._folders.make(
                assignment.name, run.grace_s, run.keep, run.checkpoint, assignment.accepted_ms, assignment.setup,
                goes_on=run.restart == "always", calls=calls_of(assignment.request),
                every_s=run.checkpoint_every_s, step=run.checkpoint_step or "", ranks=assignment.ranks,
                data=list(assignment.data.values()),
            )  # fmt: skip
            key, published = self._host.key(assignment.name), None
            variables = self.entries.write(key, secrets) if secrets else None
            if wanted := ports_wanted(assignment.request):
                published = self._ports.take(key, wanted, ports_of(assignment.name[0], self._own))
            nodes = [] if self._simulated else self._nodes_due(assignment.devices, specs)
            variables_of_calls, call_key = call_access(self._calls, self._folders, assignment, None, CALL_KEY_AT)
            config = config_of(
                assignment, self._own, self._policy, specs, image, published=published,
                folder=folder, variables=variables, limit=limit, labels=self._host.labels(assignment.name),
                log_bytes=self._settings.output_cap_bytes, interface=self._settings.interface,
                simulated=self._simulated, nodes=self._nodes, mps=mps,
                calls=variables_of_calls, key=call_key,
            )  # fmt: skip
        except NoEntry as error:
            raise CannotStart(None, str(error)) from None
        except MoorageError as error:
            raise config_fault(error) from None
        return config, [*nodes, *(each["PathInContainer"] for each in config["HostConfig"].get("Devices", ()))]

    def _nodes_due(self, devices: Sequence[Device], specs: Registry | None) -> list[str]:
        """Return the files of NVIDIA devices that the container must have: those of the specs, else of the hook.

        Raises CannotStart if the engine has no other way than CDI, and its specs lack a device.
        """
        nvidia = [each for each in devices if each.vendor == "nvidia"]
        known = specs if specs is not None else Registry()
        try:
            return [node.path for node in known.resolve(cdi_name(each, known) for each in nvidia)]
        except CdiError as error:
            if self._host.engine.only_cdi:
                mend = "run nvidia-ctk cdi generate on that host"
                raise CannotStart(None, "; ".join([str(error), *known.faults, mend])) from None
        return [node for each in nvidia for node in self._nodes.get(each.uuid, ()) if _GPU.fullmatch(node)]

    async def _create(self, attempt: Attempt, config: dict[str, Any]) -> None:
        try:
            attempt.container = await self._host.engine.create(config, self._host.container_name(attempt.name))
        except EngineError as error:
            if error.status == 400:  # an error in the request, such as a relative folder
                raise CannotStart(CODE_CANNOT_START, error.message) from None
            raise

    async def _fill_folder(self, attempt: Attempt, assignment: Assignment, user: str) -> None:
        name, cwd = assignment.name, assignment.run.cwd
        ids = None if self._host.engine.gives_folders else await self._ids(attempt, user)
        try:
            if brings(name, assignment.run):
                await self._files.bring(name, assignment.run, assignment.before, ids)
            # else the engine would make it, owned by root
            if cwd and not os.path.isabs(cwd) and not os.path.isdir(os.path.join(self._folders.path(name), cwd)):
                raise CannotStart(CODE_CANNOT_START, f"cwd: the job's files have no folder {cwd}", CANNOT_RUN)
            if ids is not None:
                self._folders.give_to_container(name, ids)
                if assignment.is_setup:
                    give(assignment.setup, ids)
        except MoorageError as error:
            raise fault_of(error) from None
        except OSError as error:
            raise CannotStart(None, f"{assignment.setup}: {error.strerror or error}") from None

    async def _inform_supervisor(self, attempt: Attempt, assignment: Assignment, mps: MpsDaemon | None) -> None:
        """Inform the supervisor of a created container, and of the MPS daemon that it is a client of.

        Raises CannotStart; `attempt.is_known` then says whether the supervisor may know the container all the same.
        """
        run = assignment.run
        start = StartAttempt(
            key=self._host.key(attempt.name),
            argv=(),
            env={},
            timeout_s=run.timeout_s,
            ends_in_s=assignment.ends_in_s,
            grace_s=run.grace_s,
            checkpoint_signal=run.checkpoint_signal,
            checkpoint_before_s=run.checkpoint_before_s if run.checkpoint_signal else None,
            on_partition=assignment.request.on_partition,
            mps=mps,
        )
        try:
            await self._host.link.contain(start, attempt.container)
        except SupervisorError as error:
            # a supervisor that died may have recorded it; then the next one reports its end
            attempt.is_known = isinstance(error, SupervisorGone)
            raise CannotStart(None, str(error)) from None


def missing_nodes(container: str, pid: int, nodes: Sequence[str]) -> list[str]:
    """Return which device files a container lacks, as its first process sees them; empty if it is over.

    A process that exits loses its root, and then its mounts, before it is a zombie: nothing is missing then.
    """
    missing = []
    for node in nodes if pid else ():
        try:
            is_there = stat.S_ISCHR(os.lstat(f"/proc/{pid}/root{node}").st_mode)
        except FileNotFoundError:
            is_there = False
        except OSError as error:
            return [f"{node} (it cannot be read back: {error.strerror or error})"]
        if not is_there:
            missing.append(node)
    runs = bool(missing) and os.path.exists(f"/proc/{pid}/root")
    return missing if runs and container in containers_of(pid) else []


def login_for(image: str, settings: ContainerSettings, secrets_dir: Path | None) -> tuple[str, str] | None:
    """Return user and password for the image's registry; None if the operator named no secret for it.

    Raises CannotStart if the secret cannot be read.
    """
    secret = settings.registry_secrets.get(registry_of(image))
    if secret is None:
        return None
    try:
        text = resolve_secrets({"login": Secret(secret)}, secrets_dir)["login"]
    except MoorageError as error:
        raise lacks(f"image {image} cannot be pulled: {without_prefix(error)}") from None
    user, _, password = text.partition(":")
    return user, password
