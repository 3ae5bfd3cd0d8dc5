"""Run the command `podman` for the agent and the supervisor: its options, variables, arguments and errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from moorage.schemas.errors import refuse
from moorage.schemas.settings import setting
from moorage.system.cgroup import own_cgroup
from moorage.worker.drivers.base import CODE_CANNOT_START, CODE_NOT_FOUND
from moorage.worker.drivers.container.config import ContainerSettings
from moorage.worker.drivers.container.engine import EngineError
from moorage.worker.drivers.container.faults import CannotStart, start_fault

#: time limit for commands that podman answers at once; on a busy host they take longer
ASK_S: Final = 120.0
#: podman's exit codes for failures of podman, of the runtime, and for a missing program
CODES: Final = (125, CODE_CANNOT_START, CODE_NOT_FOUND)
#: the agent's variables that podman gets: they say where a user's podman keeps its files
_VARIABLES: Final = (
    "PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "DBUS_SESSION_BUS_ADDRESS", "TMPDIR",
    "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "CONTAINERS_REGISTRIES_CONF", "REGISTRY_AUTH_FILE",
)  # fmt: skip
#: upper bounds of a container's limits; the agent's own limits count if they are lower
_ULIMITS: Final = (("nofile", resource.RLIMIT_NOFILE, 1 << 20), ("nproc", resource.RLIMIT_NPROC, 32768))
_ERROR_BYTES_MAX: Final = 4096
#: messages of podman for a fault of the job, beside those that all engines have
_THE_JOBS: Final = ("workdir ", "unable to find user ", "unable to find group ")
_NOT_FOUND: Final = "attempted to invoke a command that was not found"


class PodmanSettings(ContainerSettings, frozen=True):
    """Settings of the driver `podman`: those of all container drivers, and podman's own options."""

    user: Annotated[
        str,
        setting(
            "User of the processes in a container, as UID or UID:GID; image is the image's own, maybe root. Empty: "
            "65534:65534, or rootless 0:0, which is the agent's user on the host."
        ),
    ] = ""
    options: Annotated[
        tuple[str, ...],
        setting("Options of podman itself, before its command: --runtime=runc, --root=/data."),
    ] = ()

    def __post_init__(self) -> None:
        if self.user:
            super().__post_init__()
        else:
            msgspec.structs.replace(self, user=default_user())  # this checks all other settings
        for option in self.options:
            if not option.startswith("--"):
                raise ValueError(f"options must look like --name=value, found {option!r}")


def default_user() -> str:
    """Return the default user of containers: 65534:65534; rootless, the agent's own user as its containers see it."""
    return "0:0" if os.geteuid() else "65534:65534"


class Done(msgspec.Struct, frozen=True):
    """The result of a command: exit code, standard output, and podman's last error as `last_error` returns it."""

    code: int
    out: str
    error: str


class Podman:
    """The command podman with the operator's options."""

    def __init__(self, options: Sequence[str]) -> None:
        """Keep the options. Raises Refused if the agent's PATH has no podman."""
        self._options = tuple(options)
        if shutil.which("podman") is None:
            raise refuse(
                "failed-precondition",
                "the driver podman needs the command podman on the agent's PATH",
                next="install podman, or remove podman from drivers",
            )

    def words(self, *words: str) -> tuple[str, ...]:
        """Return podman's command line for a command. Its warnings are off: they would be in the output of a job."""
        return ("podman", *self._options, "--log-level=fatal", *words)

    @staticmethod
    def environment() -> dict[str, str]:
        """Return the whole environment of podman: those of the agent's variables that it needs, and none of a job."""
        return {name: os.environ[name] for name in _VARIABLES if name in os.environ}

    async def ask(self, *words: str, limit_s: float = ASK_S, heard: Callable[[str], None] | None = None) -> Done:
        """Run a command to its end; `heard` gets the last whole line of its standard error whenever it writes there.

        Raises TimeoutError after `limit_s` seconds, when the command is killed, and OSError if it cannot be run.
        """
        process = await asyncio.create_subprocess_exec(
            *self.words(*words),
            env=self.environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
        )
        try:
            async with asyncio.timeout(limit_s):
                assert process.stdout is not None
                assert process.stderr is not None
                out, error = await asyncio.gather(process.stdout.read(), _last_of(process.stderr, heard))
                await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        assert process.returncode is not None
        return Done(process.returncode, out.decode(errors="replace"), last_error(error))


async def _last_of(stream: asyncio.StreamReader, heard: Callable[[str], None] | None) -> bytes:
    """Read a stream to its end, and return its last bytes."""
    last = b""
    while piece := await stream.read(_ERROR_BYTES_MAX):
        last = (last + piece)[-_ERROR_BYTES_MAX:]
        if heard is not None and (lines := last.decode(errors="replace").split("\n")[:-1]):  # whole ones
            heard(lines[-1])
    return last


def words_of(config: Mapping[str, Any], limits: frozenset[str]) -> list[str]:
    """Return the arguments of `podman run` for a container in the form of an engine's API, its image and command last.

    `limits` are the limits that this host can set for its containers: cpu, memory and pids.
    """
    host = config["HostConfig"]
    words = [
        "--rm", "--pull=never", "--log-driver=none", "--pid=private", f"--network={host['NetworkMode']}",
        f"--ipc={host['IpcMode']}", *(f"--shm-size={host[each]}" for each in ("ShmSize",) if each in host),
        *(f"--cap-drop={each}" for each in host["CapDrop"]),
        *(f"--security-opt={each}" for each in host["SecurityOpt"]),
        *(f"--volume={each}" for each in host["Binds"]),
        *(f"--mount={_mount(each)}" for each in host["Mounts"]),
        *(f"--label={name}={value}" for name, value in config["Labels"].items()),
        *(f"--env={each}" for each in config["Env"]),
        *(f"--ulimit={each}" for each in ulimits_here()),
        *(f"--ulimit={each['Name']}={each['Soft']}:{each['Hard']}" for each in host.get("Ulimits", ())),
        *(f"--publish={words}" for words in _published(host.get("PortBindings", {}))),
        *(f"--device={name}" for each in host.get("DeviceRequests", ()) for name in each["DeviceIDs"]),
        *(f"--device={each['PathOnHost']}" for each in host.get("Devices", ())),
    ]  # fmt: skip
    if config["User"]:
        words.append(f"--user={config['User']}")
    if "pids" in limits:
        words.append(f"--pids-limit={host['PidsLimit']}")
    if "cpu" in limits and "NanoCpus" in host:
        words.append(f"--cpus={host['NanoCpus'] / 1e9:g}")
    if "memory" in limits and "Memory" in host:
        words += [f"--memory={host['Memory']}b", f"--memory-swap={host['MemorySwap']}b"]
    if "WorkingDir" in config:
        words.append(f"--workdir={config['WorkingDir']}")
    if "Entrypoint" in config:
        words.append(f"--entrypoint={msgspec.json.encode(config['Entrypoint']).decode()}")
    return [*words, "--", config["Image"], *config.get("Cmd", ())]


def _published(bindings: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    """Return the port bindings in podman's form: address, port of the host, port of the container."""
    return [
        f"{each['HostIp']}:{each['HostPort']}:{own}" if each["HostIp"] else f"{each['HostPort']}:{own}"
        for own, places in bindings.items()
        for each in places
    ]


def _mount(mount: Mapping[str, Any]) -> str:
    """Return the option of a mount.

    A writable one is given to the container's user: only podman knows its uid on the host.
    """
    words = [f"type=bind,source={mount['Source']},destination={mount['Target']}"]
    words.append("ro=true" if mount.get("ReadOnly") else "U=true")
    return ",".join(words)


def limits_here() -> frozenset[str]:
    """Return the limits that podman can set: all for root; for other users those that their cgroup v2 was given."""
    if os.geteuid() == 0:
        return frozenset({"cpu", "memory", "pids"})
    folder = own_cgroup()
    try:
        if folder is None or not Path("/sys/fs/cgroup/cgroup.controllers").exists():  # as podman itself looks for it
            return frozenset()
        return frozenset((folder / "cgroup.controllers").read_text().split())
    except OSError:
        return frozenset()


def ulimits_here() -> list[str]:
    """Return the limits of a container in podman's form: the agent's own, up to the bounds of `_ULIMITS`.

    An agent without CAP_SYS_RESOURCE cannot set podman's defaults.
    """
    words = []
    for name, kind, most in _ULIMITS:
        soft, hard = (most if each == resource.RLIM_INFINITY else min(each, most) for each in resource.getrlimit(kind))
        words.append(f"{name}={soft}:{hard}")
    return words


def last_error(text: bytes) -> str:
    """Return podman's last error message without its prefix, else the last line; "" if there is no text."""
    lines = text[-_ERROR_BYTES_MAX:].decode(errors="replace").strip().splitlines()
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return "".join((errors or lines)[-1:])


def run_fault(message: str) -> CannotStart:
    """Return the fault, by podman's message, if `podman run` started nothing."""
    if _NOT_FOUND in message:
        return CannotStart(CODE_NOT_FOUND, message)
    if message.startswith(_THE_JOBS):
        return CannotStart(CODE_CANNOT_START, message)
    return start_fault(EngineError(500, message), is_created=True)
