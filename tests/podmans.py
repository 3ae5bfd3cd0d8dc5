"""Podman with storage of a test's own, and an image that is made from this machine's own programs. No registry."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.engines import PATH, PROGRAMS, image_of, mount_disk

ASK_S: Final = 120.0
#: a user without rights and without numbers of its own in /etc/subuid
NOBODY: Final = 65534
RUNTIME_BYTES: Final = 64 << 20


@functools.cache
def why_no_podman() -> str:
    """Return "" where a test can run podman, else one line that says why not."""
    if os.geteuid() != 0:
        return "no podman of its own: it needs root"
    missing = [name for name in ("podman", "conmon", "runc") if shutil.which(name, path=PATH) is None]
    return f"no podman of its own: no {missing[0]}" if missing else ""


class PodmanHome:
    """Podman's storage and state in one folder, for root or for another user: then it is rootless."""

    def __init__(self, folder: Path, user: int = 0) -> None:
        self.folder = folder
        self.user = user
        self.service: subprocess.Popen[bytes] | None = None
        self.options = (
            f"--root={folder}/root", f"--runroot={folder}/run", f"--tmpdir={folder}/tmp", "--storage-driver=vfs",
            "--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=file",
        )  # fmt: skip

    def podman(self, *words: str, check: bool = True, stdin: bytes | None = None) -> str:
        """Run podman on this storage, and return what it wrote."""
        done = subprocess.run(
            [*self.as_user(), "podman", *self.options, "--log-level=fatal", *words], cwd="/",
            input=stdin, capture_output=True, check=False, timeout=ASK_S, env=self.environment(),
        )  # fmt: skip
        if check and done.returncode != 0:
            raise RuntimeError(f"podman {words[0]}: {done.stderr.decode()}")
        return done.stdout.decode()

    def as_user(self) -> list[str]:
        """Return what runs a command as this user. It may read what a clone of root's has, and dies with its parent."""
        if not self.user:
            return []
        may = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        return ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", *may, "--pdeathsig=KILL"]

    def environment(self) -> dict[str, str]:
        folder = {"HOME": f"{self.folder}/user", "XDG_RUNTIME_DIR": f"{self.folder}/user"} if self.user else {}
        return os.environ | {"PATH": PATH, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | folder

    def give(self, folder: Path) -> None:
        """Have a folder, with all that is in it, belong to this user."""
        for path in (folder, *folder.rglob("*")):
            os.chown(path, self.user, self.user, follow_symlinks=False)

    @property
    def socket(self) -> Path:
        """The socket of its service, in a folder of this user's."""
        return self.folder / "user" / "podman.sock" if self.user else self.folder / "podman.sock"

    def serve(self) -> None:
        """Start its service, as podman.socket does, and wait until it answers. Raises RuntimeError."""
        words = ("--log-level=error", "system", "service", "--time=0", f"unix://{self.socket}")
        with (self.folder / "service.log").open("ab") as log:
            self.service = subprocess.Popen(
                [*self.as_user(), "podman", *self.options, *words], cwd="/", env=self.environment(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        ends = time.monotonic() + ASK_S
        while self.service.poll() is None and time.monotonic() < ends:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
                asking.connect(str(self.socket))
                return
            time.sleep(0.02)
        raise RuntimeError(f"podman's service does not start: {(self.folder / 'service.log').read_text()[-2000:]}")

    def kill_service(self) -> None:
        """SIGKILL to the service; its containers live on."""
        if self.service is not None:
            self.service.kill()
            self.service.wait()
            self.service = None
        self.socket.unlink(missing_ok=True)

    def make_image(self, name: str, *programs: str) -> None:
        """Make an image of some programs of this machine."""
        self.podman("import", "-", name, stdin=image_of(programs or PROGRAMS))

    def configured(self) -> dict[str, str]:
        """Write the files that make these podman's own settings, and return the variables that name them."""
        self.folder.mkdir(exist_ok=True)
        storage, engine = self.folder / "storage.conf", self.folder / "containers.conf"
        folders = f'graphroot = "{self.folder}/root"\nrunroot = "{self.folder}/run"\n'
        storage.write_text(f'[storage]\ndriver = "vfs"\n{folders}')
        words = 'runtime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        engine.write_text(f'[engine]\n{words}tmp_dir = "{self.folder}/tmp"\n')
        return {"CONTAINERS_STORAGE_CONF": str(storage), "CONTAINERS_CONF": str(engine)}

    def containers(self) -> list[str]:
        """Return the ids of all containers that it has, running or not."""
        return self.podman("ps", "--all", "--quiet", "--no-trunc").split()

    def processes(self) -> list[int]:
        """Return podman's own processes of this storage: conmon, and podman where it runs."""
        found, mark = [], os.fsencode(self.folder)
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and mark in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """End all that it runs, and leave no mount behind."""
        self.kill_service()
        self.podman("rm", "--all", "--force", "--time=0", check=False)
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((self.folder / "tmp" / "pause.pid").read_text()), signal.SIGKILL)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((each for each in mounts if each.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", mount], check=False, capture_output=True)


@contextlib.contextmanager
def podman_home(user: int = 0, disk_bytes: int = 0) -> Iterator[PodmanHome]:
    """A home on a folder with a short name, since sockets have short ones; nothing of it is left.

    With `disk_bytes` its images are on a disk of their own of that size, in memory.
    """
    folder = Path(tempfile.mkdtemp(prefix="mp-", dir="/tmp"))
    if disk_bytes:
        mount_disk(folder / "root", disk_bytes)
    made = PodmanHome(folder, user)
    if user:
        mount_disk(folder / "user", RUNTIME_BYTES)  # as logind has a user's runtime folder
        (folder / "user").chmod(0o700)
    made.give(folder)
    try:
        made.serve()
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)
