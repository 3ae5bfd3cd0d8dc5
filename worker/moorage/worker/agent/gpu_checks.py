"""Run the operator's check on idle GPUs, and close a GPU whose check fails, until an operator releases it.

A check is a command of the worker's settings. It runs on one GPU that no job has: the worker claims that GPU from its
own pool meanwhile, and gives it back. Exit code 0 is well. With another code, or if the check does not end in time,
nothing new is placed on the GPU, and the check's last line says why. A check that cannot start closes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from moorage.schemas.errors import MoorageError, refuse
from moorage.schemas.frames import OTHERS
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.printable import in_one_line
from moorage.system.device_environment import apart_from_mps, device_environment
from moorage.system.parentage import die_with_parent
from moorage.worker.attempt.environment import PATH_DEFAULT, process_environment
from moorage.worker.devices.device_watch import DeviceWatch
from moorage.worker.devices.pool import GpuLease, GpuPool
from moorage.worker.drivers.policy import Policy
from moorage.worker.session.attempt_messages import Log
from moorage.worker.session.shell import Shell
from moorage.worker.settings import WorkerSettings
from moorage.worker.supervisor.child import StartRefused, resolve_user

#: the user of checks where the agent is root and the settings name no user of jobs
NOBODY: Final = "nobody"
#: seconds until a GPU whose check is due is tried again while a foreign process uses it
AGAIN_S: Final = 30.0
#: what is kept of the end of a check's output
_TAIL_BYTES: Final = 4096
#: `python` is the worker's own
_PATH: Final = f"{Path(sys.executable).parent}:{PATH_DEFAULT}"

log = logging.getLogger("moorage.worker")


def check_startable(settings: WorkerSettings) -> None:
    """Raise Refused if the settings name a check whose program or user this host does not have."""
    if not settings.check_command:
        return
    program = settings.check_command[0]
    if shutil.which(program, path=_PATH) is None:
        raise refuse(
            "failed-precondition",
            f"check_command names the program {program}, and this host has none of that name",
            field="$.check_command",
            found=program,
            next="give the program's full path, or remove check_command",
        )
    try:
        resolve_user(_user_of(settings) or str(os.geteuid()))
    except StartRefused as error:
        raise refuse(
            "failed-precondition",
            f"check_command cannot run: {error.message}",
            field="$.check_command",
            next="set run_as to the user that jobs and checks run as",
        ) from None


def _user_of(settings: WorkerSettings) -> str | None:
    """Return the user that checks run as: that of the jobs of all other tenants; None for the agent's own, not root."""
    user = Policy.of(settings).user_of(OTHERS)
    return NOBODY if user is None and os.geteuid() == 0 else user


class GpuChecks:
    """The checks of one worker's GPUs. `on_failed` is called once a GPU is closed.

    Without a command it does nothing. Call `open` before the worker joins, `woken` after each change of the pool, and
    `stop` before the worker leaves.
    """

    def __init__(
        self,
        shell: Shell,
        settings: WorkerSettings,
        pool: GpuPool,
        watch: DeviceWatch,
        on_failed: Callable[[], None],
        *,
        simulated: bool,
    ) -> None:
        self._shell = shell
        self._settings = settings
        self._pool = pool
        self._watch = watch
        self._on_failed = on_failed
        self._simulated = simulated
        self._due_s: dict[int, float] = {}
        self._closed: set[int] = set()
        self._leases: dict[int, GpuLease] = {}
        self._pids: set[int] = set()
        self._wake = asyncio.Event()
        self._is_over = not settings.check_command

    def open(self) -> None:
        """Begin: with `check_on_join` all idle GPUs are claimed, so that they are checked before a job can come."""
        if self._is_over:
            return
        self._closed = self._closed_slots()
        now, every_s, count = self._shell.now(), self._settings.check_every, self._pool.capacity()
        for slot in range(count):
            if self._settings.check_on_join and slot not in self._closed:
                self._begin(slot)
            if every_s:  # not all GPUs of a host at the same time
                self._due_s.setdefault(slot, now + every_s * (slot + 1) / count)
        self._shell.spawn(self._run())

    def woken(self) -> None:
        """Note that the pool has changed: a GPU may be idle, or in use again."""
        self._wake.set()

    def stop(self) -> None:
        """End the checks that run, without a verdict, and begin no more."""
        self._is_over = True
        for pid in self._pids:
            _kill(pid)
        for lease in list(self._leases.values()):
            lease.release()
        self._wake.set()

    async def _run(self) -> None:
        while not self._is_over:
            self._wake.clear()
            now, closed = self._shell.now(), self._closed_slots()
            if self._settings.check_after_fault:
                self._due_s |= dict.fromkeys(self._closed - closed, now)
            self._closed = closed
            for slot in [slot for slot, due_s in self._due_s.items() if due_s <= now and slot not in closed]:
                self._begin(slot)
            waits = [max(due_s - now, 0.0) or AGAIN_S for due_s in self._due_s.values()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(waits, default=None)):
                    await self._wake.wait()

    def _closed_slots(self) -> set[int]:
        return {state.slot for state in self._pool.slot_states() if state.quarantine}

    def _begin(self, slot: int) -> None:
        """Begin the check of a GPU; it stays due if a job, or a foreign process, has the GPU."""
        self._due_s[slot] = self._shell.now()
        try:
            self._watch.check_foreign([slot])
        except MoorageError:
            return
        if (lease := self._pool.try_claim([slot])) is not None:
            del self._due_s[slot]
            self._leases[slot] = lease
            self._shell.spawn(self._check(lease))

    async def _check(self, lease: GpuLease) -> None:
        slot = lease.slot
        try:
            await self._judge(lease)
        except (OSError, subprocess.SubprocessError) as error:
            why = f"the check of GPU {slot} cannot start, and closes nothing: {error}"
            self._shell.say(Log("error", "check-cannot-start", why))
        finally:
            del self._leases[slot]
            if self._settings.check_every:
                self._due_s.setdefault(slot, self._shell.now() + self._settings.check_every)
            lease.release()

    async def _judge(self, lease: GpuLease) -> None:
        """Run the check of a GPU and close the GPU if it fails. Raises what a check that cannot start raises."""
        settings, began_s = self._settings, self._shell.now()
        process = await asyncio.create_subprocess_exec(
            *settings.check_command,
            cwd="/",
            env=self._environment(lease),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_become(_user_of(settings)),
        )
        self._pids.add(process.pid)
        try:
            if self._is_over:  # `stop` did not see this process
                return
            async with asyncio.timeout(settings.check_timeout):
                line, code = await _last_line(process), await process.wait()
            ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
            why = "" if code == 0 else line or f"the check ended with {ended}, and said nothing"
        except TimeoutError:
            why = f"the check did not end within {settings.check_timeout:g} s"
        finally:
            _kill(process.pid)  # with what it has started
            self._pids.discard(process.pid)
        if self._is_over:
            return
        if not why:
            log.info("GPU %d passed its check in %.1f s", lease.slot, self._shell.now() - began_s)
        elif self._watch.check_failed(lease.slot, why, self._shell.now()):
            self._on_failed()
        await process.wait()  # one that the kernel holds keeps its GPU

    def _environment(self, lease: GpuLease) -> dict[str, str]:
        """Return the variables of a job that has this GPU alone."""
        devices, user = [lease.device], _user_of(self._settings)
        by_uuid = self._settings.shows_uuids(self._pool.devices)
        ours = device_environment(devices, "exclusive", GpuSpec(), simulated=self._simulated, by_uuid=by_uuid)
        ours |= apart_from_mps(devices, "exclusive", "/nonexistent")
        return dict(process_environment({"PATH": _PATH}, ours, user=user, cwd="/"))  # uvloop takes no other mapping


def _become(user: str | None) -> Callable[[], None]:
    """Return what makes a child this user's, and ends it with the agent. Raises OSError for an unknown user."""
    try:
        ids = resolve_user(user or str(os.geteuid()))
    except StartRefused as error:
        raise OSError(error.errno, error.message) from None
    die = die_with_parent()

    def become() -> None:
        if ids is not None:
            os.setgroups(ids[2])
            os.setgid(ids[1])
            os.setuid(ids[0])
        die()  # last: a change of the user clears it

    return become


async def _last_line(process: asyncio.subprocess.Process) -> str:
    """Read a process's output to its end; return its last line that is not blank, "" if there is none."""
    assert process.stdout is not None
    tail = b""
    while chunk := await process.stdout.read(_TAIL_BYTES):
        tail = (tail + chunk)[-_TAIL_BYTES:]
    lines = [line.strip() for line in tail.decode(errors="replace").splitlines()]
    return in_one_line(next((line for line in reversed(lines) if line), ""))


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
