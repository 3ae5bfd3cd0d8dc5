"""A Docker engine of a test's own, which it may kill, and an image that is made from this machine's own programs.

The engine needs dockerd, root and no registry. It has no bridge and changes nothing of the machine's network.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

START_S: Final = 120.0
PROGRAMS: Final = ("sh", "sleep", "cat", "id", "env", "ls", "seq", "head", "dd", "echo", "setsid", "touch", "stty")
#: what dockerd and what it starts look for
PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/local/sbin"


@functools.cache
def why_no_dockerd() -> str:
    """Return "" where a test can have an engine of its own, else one line that says why not."""
    if os.geteuid() != 0:
        return "no Docker engine of its own: it needs root"
    missing = [name for name in ("dockerd", "docker", "containerd", "runc") if shutil.which(name, path=PATH) is None]
    return f"no Docker engine of its own: no {missing[0]}" if missing else ""


def docker_26() -> Path:
    """Return where Debian 13's engine is unpacked, if it is: the folder of DOCKER_26, else one of the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("DOCKER_26") or f"{cache}/moorage-tests/docker-26")


def path_26() -> str:
    """Return the PATH on which dockerd is Debian 13's. Its runc needs a newer libc, so the machine's own is taken."""
    return f"{docker_26()}/usr/sbin:{docker_26()}/usr/bin:{PATH}"


@functools.cache
def why_no_docker_26() -> str:
    """Return "" where a test can have an engine of Debian 13, else one line that says why not."""
    if why := why_no_dockerd():
        return why
    missing = [name for name in ("sbin/dockerd", "bin/containerd") if not (docker_26() / "usr" / name).exists()]
    return f"no Docker engine of Debian 13: no {docker_26()}, unpacked from its packages" if missing else ""


class DockerEngine:
    """dockerd on a folder of its own. Its containers outlive `kill`, as they do for any engine that crashes."""

    def __init__(self, folder: Path, *options: str, config: dict[str, Any] | None = None, path: str = PATH) -> None:
        self.folder = folder
        self.socket = folder / "docker.sock"
        self._path = path
        (folder / "daemon.json").write_text(json.dumps(config or {}))
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers. Raises RuntimeError."""
        for storage in ((), ("--storage-driver=vfs",)):
            command = [
                "dockerd", f"--config-file={self.folder}/daemon.json", f"--host=unix://{self.socket}",
                f"--data-root={self.folder}/data", f"--exec-root={self.folder}/exec", f"--pidfile={self.folder}/pid",
                "--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", *storage,
                *self._options,
            ]  # fmt: skip
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"PATH": self._path}
                )
            ends = time.monotonic() + START_S
            while self._process.poll() is None and time.monotonic() < ends:
                if self.docker("version", check=False).returncode == 0:
                    return
                time.sleep(0.05)
            self.kill()
        raise RuntimeError(f"dockerd does not start here: {(self.folder / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """SIGKILL to the engine and to its containerd; containers and their shims live on."""
        pids = []
        with contextlib.suppress(FileNotFoundError, ValueError):
            pids.append(int((self.folder / "exec/containerd/containerd.pid").read_text()))
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in ("pid", "exec/containerd/containerd.pid"):
            (self.folder / name).unlink(missing_ok=True)

    def docker(self, *words: str, check: bool = True, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
        """Run the docker command on this engine."""
        done = subprocess.run(
            ["docker", "--host", f"unix://{self.socket}", *words], input=stdin, capture_output=True, check=False
        )
        found = subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
        if check and found.returncode != 0:
            raise RuntimeError(f"docker {words[0]}: {found.stderr}")
        return found

    def containers(self) -> list[str]:
        """Return the ids of all containers that it has, running or not."""
        return self.docker("ps", "--all", "--quiet", "--no-trunc").stdout.split()

    def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.docker("inspect", container).stdout)[0]
        return found

    def make_image(self, name: str, *says: str, programs: Sequence[str] = PROGRAMS) -> str:
        """Make an image of some programs of this machine, with these lines of a Dockerfile, and return its name."""
        changes = [word for line in says for word in ("--change", line)]
        self.docker("import", *changes, "-", name, stdin=image_of(programs))
        return name

    @contextlib.contextmanager
    def network(self) -> Iterator[str]:
        """Make a network whose containers this host reaches; all containers on it must be gone when it is removed."""
        name = f"moorage-test-{os.path.basename(self.folder)}"
        self.docker("network", "create", name)
        try:
            yield name
        finally:
            if left := self.containers():
                self.docker("rm", "--force", *left, check=False)
            self.docker("network", "rm", name)

    def close(self) -> None:
        """End all that it runs, and the engine; leave no mount behind."""
        with contextlib.suppress(RuntimeError):
            if self._process is not None and (left := self.containers()):
                self.docker("rm", "--force", *left, check=False)
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        self._end_shims()
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((each for each in mounts if each.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", mount], check=False, capture_output=True)

    def _end_shims(self) -> None:
        """A shim whose engine was killed lives on; its command line names this engine's folder."""
        mark = f"{self.folder}/exec".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and mark in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)


def mount_disk(folder: Path, size_bytes: int) -> None:
    """Make a folder that is a disk of its own of that size, in memory. An engine's `close` takes it down."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "moorage-test", folder], check=True)


@functools.cache
def image_of(programs: Sequence[str]) -> bytes:
    """Return a tar of these programs with the libraries that they load."""
    files: dict[str, str] = {}
    for name in programs:
        program = os.path.realpath(shutil.which(name) or f"/bin/{name}")
        files[f"bin/{name}"] = program
        loaded = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        files |= {word.lstrip("/"): word for line in loaded.splitlines() for word in line.split() if word[0] == "/"}
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for target, source in files.items():
            info = tar.gettarinfo(os.path.realpath(source), target)
            info.uid = info.gid = 0
            with open(os.path.realpath(source), "rb") as file:
                tar.addfile(info, file)
        users = b"root:x:0:0::/:/bin/sh\nworker:x:4321:4321::/:/bin/sh\n"
        info = tarfile.TarInfo("etc/passwd")
        info.size = len(users)
        tar.addfile(info, io.BytesIO(users))
        for folder in ("tmp", "proc", "dev", "etc"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(info)
    return made.getvalue()


@contextlib.contextmanager
def engine(
    *options: str, config: dict[str, Any] | None = None, path: str = PATH, disk_bytes: int = 0
) -> Iterator[DockerEngine]:
    """An engine on a folder with a short name, since sockets have short ones; nothing of it is left.

    With `disk_bytes` it has a disk of its own of that size, in memory.
    """
    folder = Path(tempfile.mkdtemp(prefix="me-", dir="/tmp"))
    if disk_bytes:
        mount_disk(folder / "data", disk_bytes)
    made = DockerEngine(folder, *options, config=config, path=path)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)
