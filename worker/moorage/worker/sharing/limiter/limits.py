"""Keep the limiter's segments of one driver's attempts: made before a start, changed with a share, removed after the
end.

They are in /dev/shm, because pages of a file on a disk would have to be written back, and launches would wait for that.
The agent writes tokens and heartbeats into them (feeder.py); only the first heartbeat comes from here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import refuse
from moorage.schemas.frames import Device
from moorage.schemas.gpu import SHARERS_MAX, Share
from moorage.schemas.job import Request
from moorage.system.device_environment import HostAtFault
from moorage.system.private_files import replace_private
from moorage.worker.attempt.attempt_folders import let_pass, owner_ids
from moorage.worker.settings import WorkerSettings
from moorage.worker.sharing.limiter.controller import RATE
from moorage.worker.sharing.limiter.owners import Owners
from moorage.worker.sharing.limiter.segment import Part, Segment, SegmentError
from moorage.worker.supervisor.capped_output import key_digest

#: where the build hook (worker/build_hook.py) puts the library, compiled from limiter.c
LIBRARY: Final = Path(__file__).with_name("limiter.bin")  # no .so: Python would take it for a module
#: paths in a container
LIBRARY_AT: Final = "/run/moorage/limiter.so"
SEGMENT_AT: Final = "/run/moorage/limiter"
#: the variable that names the segment
VARIABLE: Final = "MOORAGE_LIMITER"
PRELOAD: Final = "LD_PRELOAD"
MEMORY: Final = Path("/dev/shm")
#: in the state folder: what the names of folder and segments in /dev/shm are made from, so that no other user can guess
SECRET_NAME: Final = "limiter.secret"
_MIB: Final = 1 << 20
_PASSAGE: Final = 0o711

NeedsGate = Callable[[Request, Sequence[Device], str], bool]

log = logging.getLogger("moorage.worker")


class LimiterUnavailable(HostAtFault):
    """This host cannot limit an attempt."""

    def __init__(self, why: str) -> None:
        super().__init__(f"limiter: {why}")


@dataclass(frozen=True)
class Limit:
    """What limits an attempt: its segment and the library, with the paths that its processes use."""

    segment: str
    library: str

    def laid_over(self, environment: Mapping[str, str], of_image: str = "") -> dict[str, str]:
        """Return the environment with this limit's `LD_PRELOAD` and `MOORAGE_LIMITER`.

        The library comes after those that `LD_PRELOAD` names in `environment` or, if it is not set there, `of_image`.
        """
        own = [part for part in environment.get(PRELOAD, of_image).replace(" ", ":").split(":") if part]
        own = [part for part in own if part != self.library]
        return {**environment, PRELOAD: ":".join([*own, self.library]), VARIABLE: self.segment}


@dataclass(frozen=True)
class ContainerLimit(Limit):
    """The limit of a container, with the paths on this host as well."""

    segment_here: Path
    library_here: Path

    @property
    def mounts(self) -> list[dict[str, Any]]:
        """Return the mounts of the library (read-only) and the segment (writable), in the form of an engine's API."""
        return [
            {"Type": "bind", "Source": str(self.library_here), "Target": self.library, "ReadOnly": True},
            {"Type": "bind", "Source": str(self.segment_here), "Target": self.segment},
        ]


class Limits:
    """The limits of the attempts of one driver of a worker: of memory, and but under mps of compute.

    `owner` is the driver's name from `supervisor_link.owner_of`. Call `begin` with the living attempts.
    """

    def __init__(self, settings: WorkerSettings, owner: str, needs_gate: NeedsGate | None = None) -> None:
        """Find the library. Raises Refused if this host cannot limit.

        `needs_gate` says which attempts get a segment without a limit, since they may be frozen.
        """
        if platform.libc_ver()[0] != "glibc":
            raise _cannot("this host's C library is not glibc (musl?)", "remove limiter from the settings")
        if not LIBRARY.is_file():
            raise _cannot(f"there is no {LIBRARY}", "install a C compiler, and moorage again")
        if not MEMORY.is_dir():
            raise _cannot(f"there is no {MEMORY}", "mount a tmpfs there")
        self._context = settings.limiter_context
        self._own = (settings.folder_dir or settings.state_dir) / "limiter"
        self._library = LIBRARY
        self._folder = folder_of(settings.state_dir)
        self._secret = _secret_of(settings.state_dir)
        self._mark = f"{key_digest(owner)[:16]}."
        #: the attempts' segments; feeder.py fills them
        self.segments: dict[AttemptName, Segment] = {}
        self.owners = Owners()
        self._needs_gate = needs_gate

    # -- an attempt

    def _make(
        self, name: AttemptName, request: Request, devices: Sequence[Device], mode: str, *, waits: bool = False
    ) -> Path | None:
        """Make the segment of an attempt that has a part of a device, or with `waits` of one that may be frozen.

        Return the segment's path; None, without a segment, for other attempts, and if a device is not NVIDIA's. Raises
        HostAtFault.
        """
        gpu = request.effective_gpu
        if gpu is None or any(one.vendor != "nvidia" for one in devices):
            return None
        if gpu.share is not None and mode in SHARERS_MAX:
            share = limited(gpu.share, mode)
            parts = [Part(one.uuid, share.memory_mib * _MIB, self._context, rate_of(share)) for one in devices]
        elif self._needs_gate is not None and waits and self._needs_gate(request, devices, mode):
            parts = [Part(one.uuid) for one in devices]
        else:
            return None
        path = self._path(name)
        try:
            self._check_folder()
            path.unlink(missing_ok=True)  # left by an agent that died before the start
            made = Segment.create(path, parts)
            self.segments[name] = made
            made.beat()  # the first; launches wait for their tokens
        except (OSError, ValueError) as error:
            self.remove(name)
            raise LimiterUnavailable(f"its segment {path}: {error}") from None
        return path

    def give(self, name: AttemptName, ids: tuple[int, int] | None, *, all_users: bool = False) -> None:
        """Let the user that runs the attempt, `ids` (uid, gid), write its segment. Raises HostAtFault.

        If the agent is root and has `ids`, the file becomes that user's. Otherwise `all_users` lets every user write;
        without it nothing changes.
        """
        try:
            if ids is not None and os.geteuid() == 0:
                self.segments[name].give(*ids)
            elif all_users:
                self.segments[name].let_all_write()
        except OSError as error:
            raise LimiterUnavailable(f"its segment: {error.strerror or error}") from None

    def of_process(
        self, name: AttemptName, request: Request, devices: Sequence[Device], mode: str, user: str | None
    ) -> Limit | None:
        """Make what limits an attempt of plain processes, and give it to the user; return it. Raises HostAtFault.

        Return None for an attempt that shares no device and is never frozen, and if a device is not NVIDIA's.
        """
        path = self._make(name, request, devices, mode, waits=True)
        if path is None:
            return None
        ids = owner_ids(user)
        self.give(name, ids)
        return Limit(str(path), str(self._library_for(ids is not None)))

    def of_container(
        self, name: AttemptName, request: Request, devices: Sequence[Device], mode: str
    ) -> ContainerLimit | None:
        """Make what limits an attempt in a container; return it. Raises HostAtFault.

        Return None for an attempt that shares no device, and if a device is not NVIDIA's. Call `give` once the
        container's user is known: until then only the agent's user can write the segment.
        """
        path = self._make(name, request, devices, mode)
        return None if path is None else ContainerLimit(SEGMENT_AT, LIBRARY_AT, path, self._library)

    def _library_for(self, another_user: bool) -> Path:
        """Return a path of the library that the attempt's user can reach.

        It is the installed file, or, if another user than the agent's cannot reach that, a copy next to the jobs'
        folders. Raises HostAtFault.
        """
        if not another_user or _is_reachable(self._library):
            return self._library
        copy = self._own / self._library.name
        try:
            if not copy.exists() or copy.read_bytes() != self._library.read_bytes():
                self._own.mkdir(mode=_PASSAGE, parents=True, exist_ok=True)
                fresh = copy.with_suffix(".new")
                shutil.copyfile(self._library, fresh)
                fresh.chmod(0o755)
                fresh.rename(copy)
            let_pass(self._own, self._own.parent)
        except OSError as error:
            raise LimiterUnavailable(f"its library {copy}: {error.strerror or error}") from None
        return copy

    def change(self, name: AttemptName, share: Share) -> bool:
        """Change a running attempt's share. Return False, and change nothing, if the attempt has no segment.

        `share` is what `limited` returns. The next allocation and the next launch obey it. Memory beyond a smaller
        limit stays with the attempt, but it gets no more. Raises OSError.
        """
        segment = self.segments.get(name)
        if segment is None:
            return False
        for device in range(segment.devices):
            segment.set_limit(device, share.memory_mib * _MIB)
            segment.set_rate(device, rate_of(share))
        return True

    def spare_mib(self, name: AttemptName, pids: Collection[int]) -> int:
        """Return how many MiB beyond its part an attempt may hold on a device, where these processes use it.

        That is 0 unless all of them obey the limiter. It gives them no more memory then, but before NVML has told it
        their driver may have taken some by itself: as much as a context at most.
        """
        segment = self.segments.get(name)
        try:
            known = {self.owners.pid_of(slot) for slot in segment.slots()} if segment is not None else set()
        except OSError:
            return 0
        return self._context // _MIB if known.issuperset(pids) else 0

    def remove(self, name: AttemptName) -> None:
        """Remove the segment, if there is one, of an attempt of which nothing runs any more."""
        found = self.segments.pop(name, None)
        if found is None:
            return
        found.close()
        with contextlib.suppress(OSError):
            found.path.unlink(missing_ok=True)

    def _path(self, name: AttemptName) -> Path:
        # not to be guessed: where every user may write a segment, only those who know its name can
        return self._folder / (self._mark + key_digest("/".join((self._secret, *map(str, name)))))

    def _check_folder(self) -> None:
        """Make the folder, or check that it is ours. Raises OSError: another user may have made it in /dev/shm."""
        if not _make_own(self._folder):
            raise PermissionError(f"{self._folder} is not the agent's own folder")

    # -- the worker's side, while attempts run

    def begin(self, living: Iterable[AttemptName]) -> None:
        """Take over the segments of these living attempts, and remove this driver's other segments.

        Log a warning for each segment that cannot be used; the others are not affected.
        """
        ours = {self._path(name): name for name in living}
        try:
            self._check_folder()
            for path in self._folder.iterdir():
                if path not in ours and path.name.startswith(self._mark):
                    path.unlink()
            for path, name in ours.items():
                try:
                    self.segments[name] = Segment.adopt(path)
                except FileNotFoundError:
                    pass
                except (OSError, SegmentError) as error:
                    log.warning("job %s: the limiter cannot use the segment of an earlier agent: %s", name[1], error)
        except OSError as error:
            log.warning("the limiter: shared memory of an earlier agent cannot be used: %s", error)

    def close(self) -> None:
        """Close the segments, but keep their files: the attempts run on, and the next agent takes the segments over."""
        for one in self.segments.values():
            one.close()
        self.segments.clear()
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # unless there are others


def folder_of(state: Path) -> Path:
    """Return the folder, in shared memory, of the segments of the worker with this state folder; make it.

    Every user can make folders there. So its name is random, and a new one if another user has taken it while no agent
    ran. Raises OSError.
    """
    folder = _folder_by(_secret_of(state))
    if not _make_own(folder):
        (state / SECRET_NAME).unlink()
        folder = _folder_by(_secret_of(state))
        _make_own(folder)
    return folder


def _folder_by(secret: str) -> Path:
    return MEMORY / f"moorage-limits-{key_digest(f'folder/{secret}')}"


def _secret_of(state: Path) -> str:
    """Return the state folder's secret, from which the names of the segments follow; make it if there is none."""
    file = state / SECRET_NAME
    if not file.exists():
        replace_private(file, secrets.token_hex(16))
    return file.read_text(encoding="ascii")


def _make_own(folder: Path) -> bool:
    """Make the folder if it is not there; return whether it is a folder of this user's with the right mode."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=_PASSAGE)
        folder.chmod(_PASSAGE)
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and stat.S_IMODE(about.st_mode) == _PASSAGE


def limited(share: Share, mode: str) -> Share:
    """Return the part that the limiter keeps an attempt to: under mps without its compute.

    The daemon gives a client its part of the threads, and launches that wait as well would halve what the GPU does.
    """
    return msgspec.structs.replace(share, compute_percent=100) if mode == "mps" else share


def rate_of(share: Share) -> float:
    """Return a share's tokens per second by its percentage of the compute; 0 (no throttling) for 100 percent."""
    return RATE * share.compute_percent / 100 if share.compute_percent < 100 else 0


def _is_reachable(path: Path) -> bool:
    """Return whether every user may load this library."""
    folders = all(each.stat().st_mode & stat.S_IXOTH for each in path.resolve().parents)
    return folders and bool(path.stat().st_mode & stat.S_IROTH)


def _cannot(why: str, next_step: str) -> Exception:
    return refuse("failed-precondition", f"limiter: {why}", field="$.limiter", next=next_step)
