"""Make folders in memory that only the agent can enter and no container has, for secrets on their way into a container.

They are not in /dev/shm, because a container with the host's IPC namespace (a client of an MPS daemon) has /dev/shm
too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from pathlib import Path
from typing import Final

#: the parent of root's folders; containers have no use for its other content
RUN: Final = Path("/run")
#: memory that containers may share with the host
SHARED: Final = Path("/dev/shm")
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_MOUNTED_BYTES: Final = 64 << 20
#: mount(2): MS_NOSUID, MS_NODEV, MS_NOEXEC; umount2(2): MNT_DETACH
_FLAGS: Final = 2 | 4 | 8
_DETACH: Final = 2
_libc: Final = ctypes.CDLL(None, use_errno=True)


class NoMemory(Exception):
    """This host cannot have a folder in memory for secrets."""


class MemoryFolder:
    """A folder in memory with this name, once `open` has made it.

    Root's is in /run, on a tmpfs of its own if /run is on a disk; another user's is in its runtime folder.

    One process at a time may use it.
    """

    def __init__(self, name: str) -> None:
        self.path: Final = _base() / name

    def open(self) -> Path:
        """Make the folder if it does not exist, and return it. Raises NoMemory."""
        try:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            if (why := self._fault()) and os.geteuid() == 0:
                _mount(self.path)
                why = self._fault()
        except OSError as error:
            why = f"{self.path}: {error.strerror or error}"
        if why:
            linger = "; set XDG_RUNTIME_DIR to a folder on a tmpfs: loginctl enable-linger makes one"
            next_step = "" if os.geteuid() == 0 else linger
            raise NoMemory(f"{why}{next_step}")
        return self.path

    def close(self) -> None:
        """Remove the folder, unless something is in it."""
        with contextlib.suppress(OSError):
            if any(self.path.iterdir()):
                return
            if self.path.is_mount():
                _libc.umount2(os.fsencode(self.path), _DETACH)
            self.path.rmdir()

    def _fault(self) -> str:
        """Return why the folder must not have secrets, "" if it may.

        Raises OSError, and NoMemory if it is not a folder of this user with mode 0700.
        """
        about = self.path.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) != 0o700:
            raise NoMemory(f"{self.path} is not the agent's own folder")
        if about.st_dev == SHARED.stat().st_dev:
            return f"{self.path} is on the file system of {SHARED}, which containers may have"
        return "" if _kind_of(about.st_dev) in _IN_MEMORY else f"{self.path} is on no tmpfs"


def _base() -> Path:
    if os.geteuid() == 0:
        return RUN
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}")


def _kind_of(device: int) -> str:
    """Return the kind of the file system with this device number; "" if it is not mounted. Raises OSError."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        if words[2] == number:
            return words[words.index("-") + 1]
    return ""


def _mount(folder: Path) -> None:
    """Mount a tmpfs on a folder. Raises OSError."""
    options = f"mode=0700,size={_MOUNTED_BYTES}".encode()
    if _libc.mount(b"moorage", os.fsencode(folder), b"tmpfs", _FLAGS, options) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"it is on no tmpfs, and none can be mounted there: {os.strerror(number)}")
