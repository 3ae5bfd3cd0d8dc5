"""Prepare this worker for jobs (`run.setup`): once for each key, before the first attempt that needs it starts.

A setup is an attempt of its driver, as attempts are: the supervisor fences it, bounds it and proves its end, and it has
the job's user, image, files and resources. It has no devices, and a name that no job can have; the agent never hears of
it. It writes into a folder that stays, and a file beside that says that the folder is complete, and its size.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import ENDED_AS_ASKED, MoorageError, Refused, problem
from moorage.schemas.frames import ABOUT_THE_JOB, SETUP_FAILED, START_FAILED, Output, ReadLog
from moorage.schemas.job import Request
from moorage.system.device_environment import HostAtFault
from moorage.system.disk_room import spare_bytes
from moorage.system.private_files import replace_private
from moorage.worker.attempt.attempt_folders import DISK, AttemptFolders, bytes_used, let_pass, owner_ids, remove
from moorage.worker.attempt.environment import LacksHere, SetupFailed
from moorage.worker.driver import Assignment, Driver, DriverEvent, KeepsOutput
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.output_frames import Notes
from moorage.worker.drivers.supervisor_link import SupervisorLink, key_of, owner_of
from moorage.worker.session.attempt_messages import Ended, MpsNotAsked, NotStarted, Started, StartFailed, Stuck

#: below the folder of the attempts' folders
SETUPS: Final = ".setups"
#: exit code of a setup that may succeed elsewhere, or later: EX_TEMPFAIL of sysexits.h
TRY_ELSEWHERE: Final = 75
#: a shell's exit codes for a command that a signal ended
SHELL_SIGNALS: Final = range(129, 193)
#: seconds for which a folder stays after its last use, however full the folders are: its attempt may be starting
PIN_S: Final = 600.0
#: attempts that are told what a setup writes
TOLD_MAX: Final = 8
#: characters of the command, and of the last line of output, in notes and reasons
WORDS_MAX: Final = 200
#: suffixes beside a folder: of the file that says that it is complete, and of one that is being removed
_DONE: Final = ".done"
_GONE: Final = ".gone"
#: the exit code of a job whose setup took too long, as of timeout(1)
CODE_TIMED_OUT: Final = 124

log = logging.getLogger("moorage.worker")


class _Setup:
    """A setup under way, for the attempts that wait for it."""

    def __init__(self, name: AttemptName, assignment: Assignment) -> None:
        self.name = name
        self.assignment = assignment
        self.waiting: list[AttemptName] = []
        self.over: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[bool] | None = None


class Setups:
    """The setups of one driver. `is_mounted`: its attempts are containers, which have the folders by a mount. They lie
    `below` the folder of the attempts' folders."""

    def __init__(
        self,
        driver: Driver,
        kit: Kit,
        folders: AttemptFolders,
        *,
        is_mounted: bool = False,
        below: str = SETUPS,
        bytes_max: int | None = None,
    ) -> None:
        settings = kit.settings
        self._driver = driver
        self._link: SupervisorLink = kit.supervisor
        self._owner = owner_of(kit.worker, driver.name)
        self._policy = kit.policy
        self._folders = folders
        self._is_mounted = is_mounted
        self._ours = settings.state_dir if settings.folder_dir is None else settings.folder_dir / below
        self.root = (settings.folder_dir or settings.state_dir) / below / self._owner
        self._bytes_max = settings.setup_bytes if bytes_max is None else bytes_max
        self._is_data = bytes_max is not None
        self._setting = "data_bytes" if self._is_data else "setup_bytes"
        self._notes = Notes(driver.publish if settings.stream_output else None)
        self._running: dict[str, _Setup] = {}  # by folder
        self._own: dict[AttemptName, _Setup] = {}  # until the end of each is heard
        self._clearing: asyncio.Task[None] | None = None
        self._listed: tuple[int, list[str]] = (0, [])  # when a folder came or went, and those there

    def begin(self) -> None:
        """Remove, in the background, what earlier agents left incomplete."""
        with contextlib.suppress(FileNotFoundError):
            left = [each for each in self.root.iterdir() if each.suffix != _DONE]
            gone = [self._set_aside(each) for each in left if each.suffix == _GONE or not _mark_of(each).exists()]
            self._clearing = asyncio.get_running_loop().create_task(asyncio.to_thread(remove, gone))

    async def close(self) -> None:
        """Stop what is under way; the setups themselves end with the attempts that waited for them."""
        for task in (self._clearing, *(each.task for each in list(self._running.values()))):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,))

    def placed(self, assignment: Assignment, image_id: str = "") -> Assignment:
        """Return the assignment with the path of its setup's folder, which need not be there yet; without a setup, the
        assignment itself.

        `image_id` is what its image's name stands for here. Secrets count by no part: a new one needs no new setup.
        """
        run, tenant = assignment.run, assignment.name[0]
        if run.setup is None:
            return assignment
        user = self._policy.user_of(tenant) or run.user or ""
        variables = sorted((name, value) for name, value in run.env.items() if isinstance(value, str))
        words = (
            self._driver.name, assignment.request.image, image_id, user, run.files or "", run.setup,
            *(word for pair in variables for word in pair),
        )  # fmt: skip
        key = hashlib.sha256("\0".join(words).encode(errors="surrogatepass")).hexdigest()[:32]
        return msgspec.structs.replace(assignment, setup=f"{self.root}/{tenant}.{key}")

    async def ready(self, assignment: Assignment) -> Assignment:
        """Wait until the setup of an assignment has run, and return the assignment with the time that is left.

        Raises SetupFailed if the job is at fault, LacksHere and HostAtFault if this host is. If it is cancelled and no
        other attempt waits for the setup, the setup ends.
        """
        began_s, name, folder = asyncio.get_running_loop().time(), assignment.name, assignment.setup
        while not self._is_there(folder):
            setup = self._running.get(folder) or self._begin(assignment)
            assert setup.task is not None
            setup.waiting.append(name)
            self._notes.publish_note(name, f"setting up: {_first_line(assignment.run.setup or '')}")
            try:
                if not await asyncio.shield(setup.task):
                    continue  # those that waited for it were gone, and it was ended
            finally:
                self._notes.forget(name)
                setup.waiting.remove(name)
                if not setup.waiting and not setup.task.done():
                    self._driver.end(setup.name, assignment.run.grace_s, "nothing waits for it")
        return until_deadline(assignment, began_s)

    def take(self, event: DriverEvent) -> DriverEvent | None:
        """Take what an event of the driver reports of setups; return what is left for the agent, None for nothing."""
        if not self._own:
            return event
        match event:
            case Started(names, begun):
                rest: list[Any] = [name for name in names if name not in self._own]
                return event if len(rest) == len(names) else Started(rest, begun) if rest else None
            case Stuck(names):
                rest = [name for name in names if name not in self._own]
                for name in names:
                    if name in self._own:
                        self._over(name, 0, "its processes cannot be ended", is_gone=False)
                return event if len(rest) == len(names) else Stuck(rest) if rest else None
            case Ended(items) | StartFailed(items):
                rest = [item for item in items if item[0] not in self._own]
                for name, code, why in items:
                    self._over(name, code, why if isinstance(event, Ended) else f"{SETUP_FAILED}{why}")
                return type(event)(rest) if rest else None
            case NotStarted(items, code):
                left = [item for item in items if item[0] not in self._own]
                for name, why in items:
                    self._over(name, code, why)
                return NotStarted(left, code) if left else None
            case MpsNotAsked(told):
                rest = [item for item in told if item[0] not in self._own]
                return MpsNotAsked(rest) if rest else None
        return event

    def takes(self, name: AttemptName, payload: bytes) -> bool:
        """Return whether a piece of output is of a setup; then those that wait for it are told of its last line."""
        setup = self._own.get(name)
        if setup is None:
            return False
        lines = msgspec.json.decode(payload, type=Output).text.split("\n")
        if line := next((each.strip() for each in reversed(lines) if each.strip()), ""):
            for waiting in setup.waiting[:TOLD_MAX]:
                self._notes.publish_note(waiting, f"setting up: {line[:WORDS_MAX]}")
        return True

    def complete(self) -> list[str]:
        """Return the names of the folders that are complete, the last used first as far as that was looked up since one
        came or went."""
        try:
            changed_ns = self.root.stat().st_mtime_ns
        except OSError:
            return []
        if changed_ns != self._listed[0]:
            found: list[tuple[float, str]] = []
            for mark in self.root.glob(f"*{_DONE}"):
                with contextlib.suppress(OSError):
                    found.append((mark.stat().st_mtime, mark.with_suffix("").name))
            self._listed = changed_ns, [name for _, name in sorted(found, reverse=True)]
        return self._listed[1]

    # -- inside

    def _is_there(self, folder: str) -> bool:
        """Return whether the setup of this folder is complete; it counts as used now."""
        try:
            os.utime(_mark_of(folder))
        except OSError:
            return False
        return os.path.isdir(folder)

    def _begin(self, assignment: Assignment) -> _Setup:
        tenant, _, *numbers = assignment.name
        replica, attempt, fence = numbers
        name = (tenant, f"setup.{assignment.setup[-16:]}", replica, attempt, fence)
        request = _request_of(assignment.request)
        if not self._is_data:  # which bring a job's kept files by this
            run = msgspec.structs.replace(request.workload, files_of=[])
            request = msgspec.structs.replace(request, run=run)
        of_setup = msgspec.structs.replace(
            assignment,
            name=name,
            request=request,
            devices=[],
            mode="none",
            start=None,
            ends_in_s=None,
            ports=[],
            item=None,
        )
        setup = self._running[assignment.setup] = _Setup(name, of_setup)
        setup.task = asyncio.get_running_loop().create_task(self._run(setup, assignment))
        setup.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its attempts may be gone
        return setup

    async def _run(self, setup: _Setup, assignment: Assignment) -> bool:
        """Run a setup, and return whether its folder is complete; False if it was ended as asked. Raises as `ready`."""
        folder = assignment.setup
        try:
            try:
                await self._make(folder, assignment)
            except OSError as error:
                raise HostAtFault(f"no folder for the setup: {folder}: {error.strerror or error}") from None
            self._own[setup.name] = setup
            self._folders.filled[folder] = setup.name
            log.info("job %s: setting up: %s", assignment.name[1], _first_line(assignment.run.setup or ""))
            self._driver.start([setup.assignment])
            code, why = await setup.over
            if (code, why) != (0, "exit"):
                if why == ENDED_AS_ASKED:
                    return False
                raise await self._fault(setup, assignment, code, why)
            if os.path.islink(folder) or not os.path.isdir(folder):
                raise SetupFailed(1, "it removed its folder $MOORAGE_SETUP, or put a link in its place")
            await self._complete(folder, assignment)
            return True
        finally:
            del self._running[folder]
            self._folders.filled.pop(folder, None)
            if not _mark_of(folder).exists() and os.path.lexists(folder):
                gone = self._set_aside(Path(folder))
                with contextlib.suppress(RuntimeError):  # no thread, or the agent stops: the next one removes it
                    await asyncio.shield(asyncio.to_thread(remove, [gone]))

    async def _make(self, folder: str, assignment: Assignment) -> None:
        """Make the empty folder of a setup, for its user. Raises OSError, HostAtFault, NoFolder."""
        await self.sweep()
        if os.path.lexists(folder):  # its file was removed by hand
            await asyncio.to_thread(remove, [self._set_aside(Path(folder))])
        os.makedirs(self.root, 0o700 if self._is_mounted else 0o711, exist_ok=True)
        os.mkdir(folder, 0o700)
        if self._is_mounted:
            return  # only the engine knows the user
        if (ids := self._ids(assignment)) is not None:
            os.chown(folder, *ids)
            let_pass(self.root, self._ours)

    def _ids(self, assignment: Assignment) -> tuple[int, int] | None:
        """Return uid and gid of a setup of processes; None for the agent's own."""
        return owner_ids(self._policy.user_of(assignment.name[0]) or assignment.run.user)

    async def _complete(self, folder: str, assignment: Assignment) -> None:
        """Record that a folder is complete, and remove others until all are within their bound. Raises LacksHere.

        From now on its user may only read it; a container has it by a mount that is read-only.
        """
        if not self._is_mounted:
            await asyncio.to_thread(_seal, folder, self._ids(assignment))
        size = (await asyncio.to_thread(bytes_used, [folder])).get(folder, 0)
        if size > self._bytes_max:
            raise LacksHere(f"the setup takes {size >> 20} MiB, {self._setting} is {self._bytes_max >> 20} MiB")
        await asyncio.to_thread(_record, folder, size)
        with contextlib.suppress(OSError, RuntimeError):  # the next sweep removes them
            await self.sweep()

    async def sweep(self) -> None:
        """Remove folders until all are within their bound and the disk has room, or none is left that may go."""
        while gone := self._surplus():
            await asyncio.to_thread(remove, gone)

    def _surplus(self) -> list[Path]:
        """Set aside the folders beyond the bound, the least recently used first, and none that may be in use.

        On a full disk the first is set aside in any case. Raises OSError.
        """
        in_use, found = self._folders.setups(), list[tuple[float, int, Path]]()
        for mark in self.root.glob(f"*{_DONE}"):
            with contextlib.suppress(OSError, ValueError):
                found.append((mark.stat().st_mtime, int(mark.read_text()), mark))
        left, gone = sum(size for _, size, _ in found), list[Path]()
        is_full = bool(found) and spare_bytes(self.root) <= 0
        for used_s, size, mark in sorted(found):
            folder = mark.with_suffix("")
            if left <= self._bytes_max and not (is_full and not gone):
                break
            if str(folder) in in_use or time.time() - used_s < PIN_S:
                continue
            left -= size
            mark.unlink(missing_ok=True)
            gone.append(self._set_aside(folder))
        return gone

    async def _fault(self, setup: _Setup, assignment: Assignment, code: int, why: str) -> Refused:
        """Return what to raise for a setup that ended so; its output then counts as that of the attempts that waited.

        The host is at fault for code 75, a signal and want of room.
        """
        line = await self._last_line(setup)
        for name in {assignment.name, *setup.waiting}:
            self._link.keeper.share(key_of(self._owner, setup.name), key_of(self._owner, name))
        said = f": {line}" if line else ""
        if why.startswith(SETUP_FAILED):  # it did not start
            return SetupFailed(code, why.removeprefix(SETUP_FAILED))
        if why.startswith(ABOUT_THE_JOB):
            return Refused(problem("failed-precondition", why))
        if why == "timeout":
            return SetupFailed(CODE_TIMED_OUT, f"it did not end within {assignment.run.setup_s:g} s{said}")
        if why.startswith(DISK):
            return LacksHere(f"setup: {why}")
        if why != "exit":
            return HostAtFault(f"setup: {why.removeprefix(f'{START_FAILED}: ')}")
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        if code == TRY_ELSEWHERE or code < 0 or code in SHELL_SIGNALS or spare_bytes(self.root) <= 0:
            return LacksHere(f"setup: {ended}{said}")
        return SetupFailed(code, f"{ended}{said}")

    async def _last_line(self, setup: _Setup) -> str:
        """Return the last line that a setup wrote to stderr, else to stdout; "" if it wrote none."""
        tenant, job, replica, attempt, fence = setup.name
        if not isinstance(self._driver, KeepsOutput):
            return ""
        for stream in ("err", "out"):
            ask = ReadLog("", tenant, job, replica, attempt, fence, "", stream, -WORDS_MAX * 4, WORDS_MAX * 4, 0)
            with contextlib.suppress(MoorageError):
                text = (await self._driver.read_log(ask)).text
                if line := next((each.strip() for each in reversed(text.split("\n")) if each.strip()), ""):
                    return line[:WORDS_MAX]
        return ""

    def _over(self, name: AttemptName, code: int, why: str, *, is_gone: bool = True) -> None:
        setup = self._own.get(name)
        if setup is None:
            return
        if not setup.over.done():
            setup.over.set_result((code, why))
        if is_gone:
            del self._own[name]
            self._driver.forget([name])

    def _set_aside(self, folder: Path) -> Path:
        """Return the path of a folder under a name with which it is in nobody's way, and is removed."""
        if folder.suffix == _GONE:
            return folder
        gone = folder.with_name(f"{folder.name}.{time.time_ns()}{_GONE}")
        with contextlib.suppress(OSError):
            folder.rename(gone)
        return gone


def give(folder: str, ids: tuple[int, int]) -> None:
    """Give a setup's folder to this user of a container. Raises OSError.

    If the agent is not root, its engine is rootless and maps users to other numbers: then every user may write.
    """
    if os.geteuid() == 0:
        os.chown(folder, *ids)
    else:
        os.chmod(folder, 0o777)


def until_deadline(assignment: Assignment, began_s: float) -> Assignment:
    """Return an assignment of this time of the loop's clock, with the time that is left of it now."""
    if assignment.ends_in_s is None:
        return assignment
    left_s = assignment.ends_in_s - (asyncio.get_running_loop().time() - began_s)
    return msgspec.structs.replace(assignment, ends_in_s=max(0.0, left_s))


def _request_of(request: Request) -> Request:
    """Return the request of a job's setup: its command has nothing of the job that is for one attempt alone."""
    run = msgspec.structs.replace(
        request.workload, argv=["/bin/sh", "-c", request.workload.setup or ""], setup=None,
        timeout_s=request.workload.setup_s, checkpoint_signal=None, checkpoint=None, keep=[], items=None,
        ready=None, ports=0, stdin="none", restart="never", max_restarts=None, stall_s=None, on_stall="warn",
        restart_unready_s=None, calls=False, data={},
    )  # fmt: skip
    blocks = {
        name: {key: value for key, value in block.items() if key != "gpu_device_ids"}
        if isinstance(block, dict)
        else block
        for name, block in request.blocks.items()
    }
    return msgspec.structs.replace(
        request, run=run, gpu=None, resource_requirements=None, template=None, driver_config=blocks, service=None,
        instead_of=None, on_partition="kill", replicas=1, indices=None,
    )  # fmt: skip


def _seal(folder: str, ids: tuple[int, int] | None) -> None:
    """Let the user of a complete folder read it and not change it; the agent's own user can undo that. Raises OSError.

    What is opened to readers is so with the user's own rights: a hard link there may be to a file of somebody else's.
    """
    words = ["chmod", "-R", "a-w" if ids is None else "a+rX,go-w", "--", folder]
    if ids is None:
        subprocess.run(words, stderr=subprocess.DEVNULL, check=False)
        return
    uid, gid = ids
    subprocess.run(words, stderr=subprocess.DEVNULL, check=False, user=uid, group=gid, extra_groups=[])
    ours = ["chown", "-hR", f"--from={uid}", str(os.geteuid()), "--", folder]
    subprocess.run(ours, stderr=subprocess.DEVNULL, check=False)
    os.chmod(folder, 0o750)  # no other user comes in


def _record(folder: str, size: int) -> None:
    """Record that a folder is complete; both are on the disk by then, so that a crash leaves no half of one."""
    subprocess.run(["sync", "-f", "--", folder], stderr=subprocess.DEVNULL, check=False)
    replace_private(_mark_of(folder), str(size))


def _mark_of(folder: str | Path) -> Path:
    return Path(f"{folder}{_DONE}")


def _first_line(command: str) -> str:
    return command.strip().split("\n")[0][:WORDS_MAX]
