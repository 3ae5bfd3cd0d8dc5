"""What the findings about container engines share: an engine of one's own in a temporary folder, and its HTTP API.

It uses nothing of moorage. The image is a busybox of this machine; no registry is asked. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from findings.verdict import verdict

#: Bounds a start, a command of the engine and the wait for a state.
WAIT_S = 60.0
POLL_S = 0.05
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_MISSING = 77


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=WAIT_S)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Engine:
    """The Docker-compatible API of one engine."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self.version = ""
        self.image = ""

    def ask(self, method: str, path: str, body: object = None, *, api: str = "v1.41") -> tuple[int, bytes]:
        """Send one request; `body` is sent as it is if it is bytes, else as JSON. Return the status and the answer.

        `api` is the version of the API, or that of podman's own: "v4.0.0/libpod".
        """
        connection = _Unix(self._path)
        kind = "application/x-tar" if isinstance(body, bytes) else "application/json"
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        connection.request(method, f"/{api}{path}", data, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def create(self, *command: str, **words: Any) -> str:
        """Create a container and return its id. `host` are words of its HostConfig."""
        limits = [{"Name": name, "Soft": bound, "Hard": bound} for name, bound in (("nofile", 1024), ("nproc", 4096))]
        host = {"NetworkMode": "host", "Ulimits": limits, **words.pop("host", {})}
        status, answer = self.ask(
            "POST", "/containers/create", {"Image": self.image, "Cmd": command, "HostConfig": host, **words}
        )
        if status != 201:
            raise RuntimeError(f"{self.name} creates no container: {answer!r}")
        return str(json.loads(answer)["Id"])

    def run(self, *command: str, **words: Any) -> str:
        """Create and start a container; return its id."""
        made = self.create(*command, **words)
        status, answer = self.ask("POST", f"/containers/{made}/start")
        if status != 204:
            raise RuntimeError(f"{self.name} starts no container: {answer!r}")
        return made

    def state(self, container: str) -> dict[str, Any]:
        """Return the `State` of a container."""
        found: dict[str, Any] = json.loads(self.ask("GET", f"/containers/{container}/json")[1])["State"]
        return found

    def ended(self, container: str) -> dict[str, Any]:
        """Wait until a container has ended; return its `State`."""
        self.until(lambda: self.state(container)["Status"] in ("exited", "stopped"), "the container ends")
        return self.state(container)

    def output(self, container: str) -> dict[str, str]:
        """Return what a container wrote, by stream: "out" and "err"."""
        return streams(self.ask("GET", f"/containers/{container}/logs?stdout=1&stderr=1")[1])

    def execute(self, container: str, *command: str, detach: bool = False, **words: Any) -> tuple[str, int, bytes]:
        """Run a command in a container; return its id, the status of the start, and what it wrote, in frames."""
        asked = {"AttachStdout": True, "AttachStderr": True, "Cmd": command, **words}
        made = str(json.loads(self.ask("POST", f"/containers/{container}/exec", asked)[1])["Id"])
        return made, *self.ask("POST", f"/exec/{made}/start", {"Detach": detach, "Tty": False})

    def command(self, made: str) -> dict[str, Any]:
        """Return what the engine says of a command: Running, ExitCode, Pid."""
        found: dict[str, Any] = json.loads(self.ask("GET", f"/exec/{made}/json")[1])
        return found

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Wait until `true()` holds. Raises TimeoutError."""
        ends_s = time.monotonic() + WAIT_S
        while not true():
            if time.monotonic() > ends_s:
                raise TimeoutError(f"{self.name}: {what}")
            time.sleep(POLL_S)


def streams(frames: bytes) -> dict[str, str]:
    """Return the text of each stream of the engines' framed output."""
    found = {"out": b"", "err": b""}
    while frames:
        size = int.from_bytes(frames[4:8], "big")
        found["err" if frames[0] == 2 else "out"] += frames[8 : 8 + size]
        frames = frames[8 + size :]
    return {name: text.decode(errors="replace").strip() for name, text in found.items()}


def engines(look: Callable[[Engine], tuple[bool, dict[str, object]]], *, podman_alone: bool = False) -> None:
    """Look at Docker's engine and at podman, or at podman alone, each in a folder of its own; give the verdict of both.

    `look` returns whether it is as described, and what was seen. Without root, busybox or an engine it is skipped.
    """
    needed = ("podman", "runc", "busybox") if podman_alone else ("dockerd", "podman", "runc", "busybox")
    missing = [name for name in needed if shutil.which(name, path=_PATH) is None]
    if os.geteuid() != 0:
        missing.insert(0, "root")
    if missing:
        print(f"skipped: needs {', '.join(missing)}")
        sys.exit(_MISSING)
    seen: dict[str, object] = {}
    right = True
    for made in (_podman,) if podman_alone else (_docker, _podman):
        with made() as engine:
            engine.image = json.loads(engine.ask("POST", "/images/create?fromSrc=-", _image())[1].splitlines()[-1])[
                "status"
            ]
            is_right, found = look(engine)
            right = right and is_right
            seen |= {f"{engine.name} {engine.version}: {what}": value for what, value in found.items()}
    verdict(right, seen)


def _image() -> bytes:
    made = io.BytesIO()
    program = os.path.realpath(shutil.which("busybox", path=_PATH) or "")
    loaded = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout.split()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("bin", "tmp", "proc", "dev", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for source in {program, *(word for word in loaded if word.startswith("/"))}:
            tar.add(os.path.realpath(source), "bin/busybox" if source == program else source.lstrip("/"))
        for name in ("sh", "sleep", "id", "pwd", "stat", "seq", "cat"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "/bin/busybox"
            tar.addfile(link)
    return made.getvalue()


@contextlib.contextmanager
def _docker() -> Iterator[Engine]:
    with _folder() as folder:
        (folder / "daemon.json").write_text("{}")
        options = [
            f"--config-file={folder}/daemon.json", f"--host=unix://{folder}/engine.sock", f"--data-root={folder}/data",
            f"--exec-root={folder}/exec", f"--pidfile={folder}/pid", "--bridge=none", "--iptables=false",
            "--ip6tables=false", "--ip-forward=false", "--storage-driver=vfs",
        ]  # fmt: skip
        with _served("docker", folder, ["dockerd", *options]) as engine:
            yield engine


@contextlib.contextmanager
def _podman() -> Iterator[Engine]:
    with _folder() as folder:
        options = [
            f"--root={folder}/root", f"--runroot={folder}/run", f"--tmpdir={folder}/tmp", "--storage-driver=vfs",
            "--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=file",
        ]  # fmt: skip
        service = ["podman", *options, "system", "service", "--time=0", f"unix://{folder}/engine.sock"]
        with _served("podman", folder, service) as engine:
            yield engine


@contextlib.contextmanager
def _served(name: str, folder: Path, command: list[str]) -> Iterator[Engine]:
    engine = Engine(name, folder / "engine.sock")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=_environment()
        )

    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"{name} does not start here: {(folder / 'log').read_text()[-1000:]}")
        with contextlib.suppress(OSError):
            engine.version = str(json.loads(engine.ask("GET", "/version")[1])["Version"]).partition("+")[0]
        return bool(engine.version)

    try:
        engine.until(answers, "it answers")
        yield engine
    finally:
        with contextlib.suppress(OSError, ValueError):
            for container in json.loads(engine.ask("GET", "/containers/json?all=1")[1]):
                engine.ask("DELETE", f"/containers/{container['Id']}?force=1&v=1")
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(WAIT_S)
        process.kill()


def _environment() -> dict[str, str]:
    return os.environ | {"PATH": _PATH}


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder with a short name, as sockets have short ones; the mounts that an engine left in it are taken down.

    podman cleans up behind each container in a process of its own, which outlives the service. It would make its
    storage anew in a folder that is gone, so this waits for it. Behind a command it does so after five minutes: that
    process is ended.
    """
    folder = Path(tempfile.mkdtemp(prefix="finding-", dir="/tmp"))
    try:
        yield folder
    finally:
        ends_s = time.monotonic() + WAIT_S
        while (named := _named_by(folder)) and time.monotonic() < ends_s:
            for process, words in named.items():
                if b"--exec-process-spec" in words:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            time.sleep(POLL_S)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((each for each in mounts if each.startswith(f"{folder}/")), reverse=True):
            subprocess.run(["umount", mount], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def _named_by(folder: Path) -> dict[int, bytes]:
    """Return the words of each process that names the folder."""
    found = {}
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = line.read_bytes()
            if f"{folder}/".encode() in words:
                found[int(line.parent.name)] = words
    return found
