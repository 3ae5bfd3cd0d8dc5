"""Give each attempt a folder of its own: its start folder and HOME, limited in size, removed some time after its end.

The path is `<root>/<tenant>.<job>.<replica>.<attempt>.<fence>`, mode 0700, owned by the job's user. A driver of
containers has a root of its own that other users cannot enter, because its engine mounts the folder. An empty folder is
removed as soon as its attempt is over. The others stay for `keep_s`, so that a person can read what a job left; the
oldest are removed earlier if there are too many, and all of them if the disk is full.

Size is measured by du(1) and folders are removed by rm(1): a job may leave a million files, or a tree that is deeper
than Python can walk, and neither may block the agent's loop or its interpreter lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import stat
import subprocess
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.system.device_environment import HostAtFault
from moorage.system.disk_room import spare_bytes
from moorage.system.proctree import boottime_s
from moorage.worker.attempt.call_keys import write_key
from moorage.worker.attempt.environment import LacksHere
from moorage.worker.settings import FOLDER_BYTES_DEFAULT, FOLDER_KEEP_DEFAULT, WorkerSettings
from moorage.worker.supervisor.child import StartRefused, resolve_user

#: below the state folder
FOLDERS: Final = "folders"
#: seconds between two measurements, and the largest part of all time that they may take
MEASURE_S: Final = 10.0
MEASURE_PART: Final = 0.1
#: most folders of finished attempts that stay
KEPT_MAX: Final = 1000
#: folders in one call of du(1) or rm(1)
AT_ONCE: Final = 500
#: prefix of the `why` of an attempt that was ended because of its folder's size
DISK: Final = "disk"
_GRACE_S: Final = 10.0
#: errors for which a folder cannot be made now, and may be later
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EMLINK)
#: suffix of a file next to a folder, with what is to be stored of it
_KEEP: Final = ".keep"
#: suffix of a file next to a folder, with the key of an attempt that answers calls
_KEY: Final = ".key"
_KIB: Final = 1024
_MODE: Final = 0o700
#: mode of the parent folders: other users can pass through and cannot list them
_PASSAGE: Final = 0o711

log = logging.getLogger("moorage.worker")


class FolderBounds(NamedTuple):
    """`bytes_max` limits one attempt's folder; `keep_s` is how long it stays after the attempt's end."""

    bytes_max: int = FOLDER_BYTES_DEFAULT
    keep_s: float = FOLDER_KEEP_DEFAULT


class _Stored(msgspec.Struct):
    """What is stored of an attempt's folder at its end: files that match the patterns, and a folder."""

    keep: list[str] = []
    checkpoint: str = ""
    accepted_ms: int = 0
    setup: str = ""  # the folder of its setup, which it uses
    goes_on: bool = True  # whether another attempt follows an end with code 0, and needs the checkpoint
    grace_s: float = _GRACE_S  # what storing may take once it was asked to end, at most
    calls: int = 0  # how many calls it holds at most, as a member of a service
    every_s: float = 0.0  # how often its checkpoint is stored while it runs; 0: never
    data: list[str] = []  # the folders of its data, which it uses
    ranks: int = 0  # those of the gang of which it is one, whose checkpoints count only together; 0 for none
    step: str = ""  # the pattern that finds its step among the names in its checkpoint


class FolderUnavailable(HostAtFault):
    """This host cannot make the folder of an attempt."""

    def __init__(self, why: str, next_step: str = "") -> None:
        super().__init__(f"no folder for the job: {why}", next_step=next_step)


class NoFolder(LacksHere):
    """This host cannot give a user, or any job, a folder."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no folder for the job: {why}", next_step="see folder_dir")


def _no_folder(path: str, error: OSError) -> FolderUnavailable | NoFolder:
    """Return the fault for a folder that could not be made or given: want of room passes, anything else stays."""
    why = f"{path}: {error.strerror or error}"
    return FolderUnavailable(why, "see folder_dir") if error.errno in _NO_ROOM else NoFolder(why)


class AttemptFolders:
    """The folders of one driver's attempts, below a folder named `owner`.

    Call `begin` with the living attempts, then `run`. `is_mounted`: containers get the folders by a mount, so users of
    the host need not reach them.
    """

    def __init__(self, settings: WorkerSettings, owner: str, *, is_mounted: bool = False) -> None:
        self.bounds = FolderBounds(settings.folder_bytes, settings.folder_keep)
        self._state = settings.state_dir
        self._own = settings.folder_dir is None  # then it is below the state folder, whose mode we may change
        self.root = (settings.folder_dir or settings.state_dir / FOLDERS) / owner
        self._root_mode = _MODE if is_mounted else _PASSAGE
        self._living: dict[AttemptName, float] = {}  # with the grace of each, should it have to end
        self._over: list[str] = []  # folders of ended attempts that are removed if they are empty
        self._emptying: asyncio.Task[None] | None = None
        self._ended: OrderedDict[str, float] = OrderedDict()  # CLOCK_BOOTTIME of the end, oldest first
        self._read: set[str] = set()  # those among them that are being read, and so stay
        self._is_passable = False
        self._stored: dict[AttemptName, _Stored] = {}
        #: of living attempts: which checkpoint was not brought, and why
        self.refused: dict[AttemptName, str] = {}
        self._keys: set[AttemptName] = set()  # those with a key next to their folder
        #: the folders that setups fill now, each with the attempt that does: they are measured as its own folder is
        self.filled: dict[str, AttemptName] = {}

    def path(self, name: AttemptName) -> str:
        """Return the path of an attempt's folder, whether it exists or not."""
        return f"{self.root}/{_folder_of(name)}"

    def keep(self, name: AttemptName) -> list[str]:
        """Return the patterns of the files to store before the attempt is over; [] for none."""
        stored = self._stored.get(name)
        return [] if stored is None else stored.keep

    def checkpoint(self, name: AttemptName) -> str:
        """Return the folder below the attempt's that its next attempt is to have; "" for none."""
        stored = self._stored.get(name)
        return "" if stored is None else stored.checkpoint

    def every_s(self, name: AttemptName) -> float:
        """Return how often the attempt's checkpoint is stored while it runs, in seconds; 0 for never."""
        stored = self._stored.get(name)
        return 0.0 if stored is None else stored.every_s

    def step(self, name: AttemptName) -> str:
        """Return the pattern that finds the attempt's step among the names in its checkpoint; "" for none."""
        stored = self._stored.get(name)
        return "" if stored is None else stored.step

    def ranks(self, name: AttemptName) -> int:
        """Return how many ranks the gang of this attempt has, whose checkpoints count only together; 0 for none."""
        stored = self._stored.get(name)
        return 0 if stored is None else stored.ranks

    def goes_on(self, name: AttemptName) -> bool:
        """Return whether the attempt's checkpoint may be needed after an end with code 0."""
        stored = self._stored.get(name)
        return stored is not None and stored.goes_on

    def calls(self, name: AttemptName) -> int:
        """Return how many calls the attempt holds at most; 0 for one that answers none."""
        stored = self._stored.get(name)
        return 0 if stored is None else stored.calls

    def setups(self) -> set[str]:
        """Return the folders of the setups and data that living attempts use."""
        return {folder for stored in self._stored.values() for folder in (stored.setup, *stored.data)}

    def accepted_ms(self, name: AttemptName) -> int:
        """Return when the attempt's job was accepted; 0 if nothing of the attempt is stored."""
        stored = self._stored.get(name)
        return 0 if stored is None else stored.accepted_ms

    def grace_s(self, name: AttemptName) -> float:
        """Return the grace in seconds that an attempt gets if it must end; a default for an unknown attempt."""
        return self._living.get(name, _GRACE_S)

    def make(
        self,
        name: AttemptName,
        grace_s: float,
        keep: Sequence[str] = (),
        checkpoint: str | None = None,
        accepted_ms: int = 0,
        setup: str = "",
        *,
        goes_on: bool = True,
        calls: int = 0,
        every_s: float = 0.0,
        step: str = "",
        ranks: int = 0,
        data: Sequence[str] = (),
    ) -> str:
        """Make the folder of an attempt, in place of an earlier one of that name, and return its path.

        The agent owns it until `give`. `keep` are the patterns of the files to store, `checkpoint` is the folder below
        it that the next attempt is to have, `accepted_ms` is when its job was accepted, `setup` is the folder of its
        setup. `goes_on`: another attempt follows an end with code 0, too. `calls` is how many calls it holds at most.
        `every_s` is how often the checkpoint is stored while the attempt runs, `step` finds its step. `ranks`: its
        checkpoints count only together with those of so many ranks. `data` are the paths of what it reads.

        Raises FolderUnavailable, NoFolder.
        """
        path = self.path(name)
        for left in (_folder_of(name), _folder_of(name) + _KEEP):  # of an agent that died: they would be removed
            self._ended.pop(left, None)
        try:
            self._mkdir(path)
            self._living[name] = grace_s  # before what may fail: an attempt without a start has its folder removed, too
            if keep or checkpoint or setup or calls or data:  # written for the next agent
                stored = self._stored[name] = _Stored(
                    list(keep),
                    checkpoint or "",
                    accepted_ms,
                    setup,
                    goes_on,
                    grace_s,
                    calls,
                    every_s,
                    list(data),
                    ranks,
                    step,
                )
                Path(path + _KEEP).write_bytes(msgspec.json.encode(stored))
        except OSError as error:
            raise _no_folder(path, error) from None
        return path

    def _mkdir(self, path: str) -> None:
        try:
            os.mkdir(path, _MODE)
        except FileNotFoundError:
            os.makedirs(self.root, self._root_mode, exist_ok=True)
            os.mkdir(path, _MODE)
        except FileExistsError:  # an agent died between this call and the start
            remove([path])
            os.mkdir(path, _MODE)

    def lets_users(self) -> bool:
        """Return whether jobs of other users than the agent's own can reach their folders, or can be let do so."""
        ours = self._state if self._own else self.root
        above = [each for each in (self.root, *self.root.parents) if not each.is_relative_to(ours)]
        try:
            return all(each.stat().st_mode & stat.S_IXOTH for each in above)
        except OSError:
            return False

    def give(self, name: AttemptName, user: str | None) -> None:
        """Give the folder to the user that runs the attempt, and let that user reach it.

        Raises FolderUnavailable, NoFolder.

        Does nothing for the agent's own user (None, too) and for an unknown user.
        """
        ids = owner_ids(user)
        if ids is None:
            return
        try:
            os.chown(self.path(name), *ids)
            if not self._is_passable:
                let_pass(self.root, self._state if self._own else self.root)
                self._is_passable = True
        except OSError as error:
            raise _no_folder(self.path(name), error) from None

    def give_key(self, name: AttemptName, key: bytes, user: str | None) -> str:
        """Write the key with which an attempt answers calls next to its folder, for its user alone; return the path.

        It is gone with the attempt's end. Raises FolderUnavailable, NoFolder.
        """
        path = self.path(name) + _KEY
        try:
            write_key(path, key, owner_ids(user))
        except OSError as error:
            raise _no_folder(path, error) from None
        self._keys.add(name)
        return path

    def give_to_container(self, name: AttemptName, ids: tuple[int, int]) -> None:
        """Give the folder, and the key beside it, to this user of a container. Raises FolderUnavailable, NoFolder.

        If the agent is not root, its engine is rootless and maps users to other numbers: then every user may write.
        """
        path = self.path(name)
        try:
            if os.geteuid() == 0:
                os.chown(path, *ids)
                if name in self._keys:
                    os.chown(path + _KEY, *ids)
            else:
                os.chmod(path, 0o777)
                if name in self._keys:
                    os.chmod(path + _KEY, 0o644)  # others do not come as far as this folder
        except OSError as error:
            raise _no_folder(path, error) from None

    def attempt_ended(self, name: AttemptName) -> None:
        """Record that nothing of this attempt runs any more: its folder is removed now if it is empty, else later.

        Does nothing for an attempt that does not live.
        """
        if self._living.pop(name, None) is None:
            return
        self.refused.pop(name, None)
        if self._stored.pop(name, None) is not None:
            Path(self.path(name) + _KEEP).unlink(missing_ok=True)
        if name in self._keys:
            self._keys.discard(name)
            Path(self.path(name) + _KEY).unlink(missing_ok=True)
        self._over.append(_folder_of(name))
        if self._emptying is None:
            self._emptying = asyncio.get_running_loop().create_task(self._remove_empty())

    async def emptied(self) -> None:
        """Wait until it is known of all ended attempts whether their folders are empty."""
        if self._emptying is not None:
            await asyncio.shield(self._emptying)

    def read(self, name: AttemptName) -> str | None:
        """Return the path of an ended attempt's folder, which stays until `read_whole`; None if there is none, or that
        is not known before `emptied`."""
        folder = _folder_of(name)
        if name in self._living or folder not in self._ended:
            return None
        self._read.add(folder)
        return self.path(name)

    def read_whole(self, name: AttemptName) -> None:
        """Let the folder of `read` go again."""
        self._read.discard(_folder_of(name))

    async def _remove_empty(self) -> None:
        """Remove empty folders in a thread: rmdir(2) is slow on ext4, and ends are waiting to be reported."""
        while self._over:
            over, self._over = self._over, []
            try:
                left = await asyncio.to_thread(_left_of, self.root, over)
            except RuntimeError:  # no thread can be started
                left = over
            self._ended.update(dict.fromkeys(left, boottime_s()))
        self._emptying = None

    def begin(self, living: Iterable[AttemptName]) -> None:
        """Take over the folders that an earlier agent left.

        The attempt of a folder that is not among the `living` is taken to have ended at the folder's last change.
        """
        self._living = dict.fromkeys(living, _GRACE_S)
        own = set(map(_folder_of, self._living))
        now, wall = boottime_s(), time.time()
        try:
            entries = [(entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in os.scandir(self.root)]
        except FileNotFoundError:
            return
        there = {entry for _, entry in entries}
        self._keys = {name for name in self._living if _folder_of(name) + _KEY in there}
        for mtime_s, folder in sorted(entries):
            if folder.endswith(_KEY):
                if folder.removesuffix(_KEY) not in own:  # its attempt ended without an agent
                    (self.root / folder).unlink(missing_ok=True)
                continue
            if folder.removesuffix(_KEEP) not in own:
                self._ended[folder] = now - max(wall - mtime_s, 0.0)
        for name in self._living:
            with contextlib.suppress(FileNotFoundError):
                stored = self._stored[name] = _read_stored(Path(self.path(name) + _KEEP))
                self._living[name] = stored.grace_s

    async def run(
        self,
        on_full: Callable[[AttemptName, float, str], None],
        and_sweep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Remove and measure folders until cancelled. `on_full` gets an attempt that must end, its grace, and why.

        `and_sweep` removes others that share the disk, once these are removed.
        """
        while True:
            began_s = boottime_s()
            try:
                await self.sweep()
                if and_sweep is not None:
                    await and_sweep()
                for name, grace_s, why in await self.measure():
                    on_full(name, grace_s, why)
            # no process, thread or descriptor left: try again later
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                log.warning("the sizes of the jobs' folders cannot be measured now: %s", error)
            await asyncio.sleep(max(MEASURE_S, (boottime_s() - began_s) / MEASURE_PART))

    async def sweep(self) -> int:
        """Remove the folders that have stayed long enough, the oldest beyond `KEPT_MAX`, and all if the disk is full.

        Return how many entries were to be removed: folders that were not empty, and files with patterns next to them.
        """
        await self.emptied()
        now, doomed = boottime_s(), list[str]()
        is_full = bool(self._ended) and spare_bytes(self.root) <= 0
        for folder, ended_s in self._ended.items():
            if folder in self._read:
                continue
            is_kept = len(self._ended) - len(doomed) <= KEPT_MAX and now - ended_s < self.bounds.keep_s
            if not is_full and is_kept:
                break
            doomed.append(folder)
        removed: list[str] = []
        for at in range(0, len(doomed), AT_ONCE):
            # those that are left in the list: an attempt that starts again meanwhile has its folder taken off it
            some = [folder for folder in doomed[at : at + AT_ONCE] if folder in self._ended]
            await asyncio.to_thread(remove, [f"{self.root}/{folder}" for folder in some])
            for folder in some:  # only now: where no process can be made, the next sweep must find them again
                self._ended.pop(folder, None)
            removed += some
        for folder in removed:
            if os.path.lexists(path := f"{self.root}/{folder}"):
                log.error("the folder of a finished job cannot be removed: %s", path)
        return len(removed)

    async def measure(self) -> list[tuple[AttemptName, float, str]]:
        """Return the attempts whose folders are too large, each with its grace and the reason for its end."""
        paths = {self.path(name): name for name in self._living} | self.filled
        found: list[tuple[AttemptName, float, str]] = []
        for path, used in (await asyncio.to_thread(bytes_used, list(paths))).items():
            name = paths.get(path)
            if used > self.bounds.bytes_max and name in self._living:
                mib = 1 << 20
                why = f"{DISK}: its folder takes {used // mib} MiB, folder_bytes is {self.bounds.bytes_max // mib} MiB"
                found.append((name, self._living[name], why))
        return found


def let_pass(folder: Path, ours: Path) -> None:
    """Let other users reach a folder. Only folders at or below `ours` may be changed.

    Raises NoFolder, OSError.
    """
    for each in (folder, *folder.parents):
        about = each.stat()
        if about.st_mode & stat.S_IXOTH:
            continue
        if not each.is_relative_to(ours) or about.st_uid != os.geteuid():
            raise NoFolder(f"{each} lets no other user enter: name another folder_dir, or let users enter (chmod o+x)")
        os.chmod(each, stat.S_IMODE(about.st_mode) | (_PASSAGE & ~_MODE))


def clear_unknown(root: Path, is_known: Callable[[str], bool]) -> None:
    """Remove the entries of `root` whose names are not known: folders of workers that are not configured any more."""
    try:
        unknown = [entry.path for entry in os.scandir(root) if not is_known(entry.name)]
    except FileNotFoundError:
        return
    remove(unknown)


def owner_ids(user: str | None) -> tuple[int, int] | None:
    """Return uid and gid of the user that runs a job; None for the agent's own user and for an unknown user.

    `user` None is the agent's own.
    """
    try:
        ids = None if user is None else resolve_user(user)
    except StartRefused:
        return None  # the supervisor reports the unknown user
    return None if ids is None or ids[0] == os.geteuid() else ids[:2]


def _read_stored(path: Path) -> _Stored:
    """Return what the agent before wrote of an attempt: nothing if it cannot be read. Raises FileNotFoundError."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=list[str] | _Stored)
    except msgspec.DecodeError as error:
        log.error("the files that a job keeps will not be stored: %s: %s", path, error)
        return _Stored()
    return _Stored(stored) if isinstance(stored, list) else stored  # of an earlier build


def _folder_of(name: AttemptName) -> str:
    return ".".join(map(str, name))


def _left_of(root: Path, over: Sequence[str]) -> list[str]:
    """Remove the empty ones of these folders, and return those that are not empty."""
    left: list[str] = []
    for folder in over:
        try:
            os.rmdir(root / folder)
        except FileNotFoundError:
            continue
        except OSError:  # it is not empty
            left.append(folder)
    return left


def bytes_used(paths: Sequence[str]) -> dict[str, int]:
    """Return the bytes on disk below each folder, with hard links counted once.

    A folder that disappears is left out.
    """
    used: dict[str, int] = {}
    for at in range(0, len(paths), AT_ONCE):
        command = ["du", "-skx", "--", *paths[at : at + AT_ONCE]]
        told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        for line in told.stdout.splitlines():
            size, _, path = line.partition(b"\t")
            used[os.fsdecode(path)] = int(size) * _KIB
    return used


def remove(paths: Sequence[str | Path]) -> None:
    """Remove these folders, including those without permissions for their owner. Some may be left, without an error."""
    if not paths:
        return
    command = ["rm", "-rf", "--one-file-system", "--", *paths]
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    if left := [path for path in paths if os.path.lexists(path)]:
        subprocess.run(["chmod", "-R", "u+rwX", "--", *left], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", "--one-file-system", "--", *left], stderr=subprocess.DEVNULL, check=False)
