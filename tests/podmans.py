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
from collections.abc import Iterator, Sequence
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


def podman_5() -> Path:
    """Return where Debian 13's podman is unpacked, if it is: the folder of PODMAN_5, else one of the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("PODMAN_5") or f"{cache}/moorage-tests/podman-5")


@functools.cache
def why_no_podman_5() -> str:
    """Return "" where a test can run Debian 13's podman, else one line that says why not."""
    if why := why_no_podman():
        return why
    return "" if (podman_5() / "usr/bin/podman").exists() else f"no podman of Debian 13: no {podman_5()}"


def as_podman_5() -> list[str]:
    """Return what runs a command with podman 5 in the place of this machine's, in a mount namespace of its own.

    It needs a newer libc, which takes the place of the machine's there; conmon and runc stay the machine's.
    """
    libraries = "/usr/lib/$(uname -m)-linux-gnu"
    steps = (
        f"mount -t overlay overlay -o lowerdir={podman_5()}{libraries}:{libraries} {libraries}",
        f"mount -t overlay overlay -o lowerdir={podman_5()}/usr/lib:/usr/libexec /usr/libexec",  # for its netavark
        f"mount --bind {podman_5()}/usr/bin/podman $(command -v podman)",
    )
    return in_namespace(*steps)


def in_namespace(*steps: str) -> list[str]:
    """Return what runs a command after these steps of a shell, which may mount, and leave the machine as it is."""
    return ["unshare", "--mount", "--propagation=private", "sh", "-euc", "\n".join((*steps, 'exec "$@"')), "sh"]


class PodmanHome:
    """Podman's storage and state in one folder, for root or for another user: then it is rootless.

    `within` is what its commands are run with, such as `as_podman_5()`.
    """

    def __init__(self, folder: Path, user: int = 0, within: Sequence[str] = ()) -> None:
        self.folder = folder
        self.user = user
        self.within = within
        self.service: subprocess.Popen[bytes] | None = None
        self.options = (
            f"--root={folder}/root", f"--runroot={folder}/run", f"--tmpdir={folder}/tmp", "--storage-driver=vfs",
            "--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=file",
        )  # fmt: skip

    def podman(self, *words: str, check: bool = True, stdin: bytes | None = None) -> str:
        """Run podman on this storage, and return what it wrote."""
        done = subprocess.run(
            [*self.within, *self.as_user(), "podman", *self.options, "--log-level=fatal", *words], cwd="/",
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
                [*self.within, *self.as_user(), "podman", *self.options, *words], cwd="/", env=self.environment(),
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
def podman_home(user: int = 0, disk_bytes: int = 0, within: Sequence[str] = ()) -> Iterator[PodmanHome]:
    """A home on a folder with a short name, since sockets have short ones; nothing of it is left.

    With `disk_bytes` its images are on a disk of their own of that size, in memory.
    """
    folder = Path(tempfile.mkdtemp(prefix="mp-", dir="/tmp"))
    if disk_bytes:
        mount_disk(folder / "root", disk_bytes)
    made = PodmanHome(folder, user, within)
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
