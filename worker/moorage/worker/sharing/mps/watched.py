"""Watch MPS daemons for as long as attempts share GPUs by them: an operator's here, the worker's own in managed.py.

If a daemon's server has a fault, no client of it can go on: its attempts end as lost, and the one that the server's log
blames by its own fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import MPS_NOT_ASKED, refuse
from moorage.schemas.gpu import GpuSpec
from moorage.system.device_environment import MPS_LOG_DIRECTORY, MPS_PIPE_DIRECTORY
from moorage.worker.session.attempt_messages import Attempt
from moorage.worker.sharing.mps.control import PROGRAM, MpsControl, MpsFault
from moorage.worker.supervisor.mps_notice import NOTICE_S

#: the mode; also the daemons' part of an owner's name at the supervisor: no driver has this name
MPS: Final = "mps"
#: between two checks of a daemon
CHECK_S: Final = 5.0
#: checks in a row that fail before a daemon counts as failed
FAILED_MAX: Final = 2
#: an operator's daemon that failed is watched on for so long after a job wanted to share by it
WANTED_S: Final = 600.0

log = logging.getLogger("moorage.worker")


@dataclass(slots=True, kw_only=True)
class Watched:
    """A daemon, which `where` names in logs, and what its checks have shown."""

    control: MpsControl
    where: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    failed: int = 0


class WatchedDaemons:
    """The checks of some daemons, and of the attempts that share by them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._on_lost: Callable[[Sequence[AttemptName], Sequence[int]], None] = lambda names, pids: None
        self._on_down: Callable[[int], None] = lambda slot: None

    def attach(
        self, on_lost: Callable[[Sequence[AttemptName], Sequence[int]], None], on_down: Callable[[int], None]
    ) -> None:
        """Set the callbacks for attempts whose daemon failed, and for slots whose daemon has ended.

        `on_lost` gets the pids of the clients that the daemon's server blames for its failure as well.
        """
        self._on_lost = on_lost
        self._on_down = on_down

    async def announce(self, pid: int) -> None:
        """Stop the work of a process, if it is a client, before it is killed. Wait for the daemons at most `NOTICE_S`.

        They are asked at the same time: one that hangs must not keep the word from the process's own.
        """
        await asyncio.gather(*(self._announce_to(daemon, pid) for daemon in list(self._watched())))

    async def _announce_to(self, daemon: Watched, pid: int) -> None:
        try:
            async with asyncio.timeout(NOTICE_S):
                await daemon.control.terminate((pid,))
        except (MpsFault, TimeoutError) as fault:
            why = str(fault) or f"no answer within {NOTICE_S:g} s"
            log.warning("mps: the daemon %s, process %d: %s: %s", daemon.where, pid, MPS_NOT_ASKED, why)

    def _watched(self) -> Iterable[Watched]:
        """Return the daemons to be checked now."""
        raise NotImplementedError

    async def _check(self, daemon: Watched) -> None:
        raise NotImplementedError

    async def _watch(self) -> None:
        """Check each daemon every `CHECK_S` seconds, and sooner if there is news."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._news.wait()
            self._news.clear()
            for daemon in list(self._watched()):
                if not daemon.lock.locked():
                    self._spawn(self._look_at(daemon))  # a slow check must not delay the others

    async def _look_at(self, daemon: Watched) -> None:
        async with daemon.lock:
            try:
                await self._check(daemon)
            except Exception:  # a defect of moorage: the next check may succeed
                log.exception("mps: the daemon %s could not be checked", daemon.where)

    async def _why_unwell(self, control: MpsControl) -> str:
        """Return why a daemon cannot serve; "" if it can."""
        try:
            for server in await control.servers():
                if await control.is_faulty(server):
                    return f"server {server} has a fault"
        except MpsFault as fault:
            return fault.reason
        return ""

    def _lose(self, daemon: Watched, names: Sequence[AttemptName], why: str) -> None:
        jobs = " ".join(name[1] for name in names)
        log.error("mps: the daemon %s failed (%s): ending its jobs: %s", daemon.where, why, jobs)
        self._on_lost(names, daemon.control.blamed())

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved here, in case its sharer's start was cancelled

    async def _end_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(slots=True, kw_only=True)
class _Operators(Watched):
    """`why` is what is wrong with it, as jobs are refused by; `has_answered` whether it ever answered.

    `wanted_s` is when a job wanted to share by it last, in the loop's time.
    """

    why: str = ""
    has_answered: bool = False
    wanted_s: float = 0.0


class OperatorsMps(WatchedDaemons):
    """The daemons that operators run: those that the requests of this worker's attempts name, or the default one.

    They are watched, and not started, stopped or limited. One that never answered this agent is not judged: its
    directories alone are there, and CUDA runs without MPS.
    """

    def __init__(self) -> None:
        super().__init__()
        self._daemons: dict[tuple[str, str], _Operators] = {}
        self._sharers: dict[AttemptName, _Operators] = {}
        #: they keep no GPU from others
        self.left_over: Sequence[int] = ()

    async def open(self) -> None:
        """Begin to watch."""
        self._spawn(self._watch())

    async def close(self) -> None:
        """Watch no more."""
        await self._end_tasks()

    def admit(self, attempt: Attempt, uid: int | None) -> None:
        """Record an attempt as a sharer, if it shares by mps. Raises Refused while its daemon's server has a fault."""
        if attempt.place.mode != MPS:
            return
        daemon = self._daemon_of(attempt)
        if daemon.why:
            raise refuse("failed-precondition", f"the MPS daemon {daemon.where} cannot serve: {daemon.why}")
        self._sharers[attempt.name] = daemon
        self._news.set()

    def admit_again(self, attempt: Attempt, uid: int | None) -> None:
        """Record an attempt that an earlier agent started as a sharer, if it shares by mps."""
        if attempt.place.mode == MPS:
            self._sharers[attempt.name] = self._daemon_of(attempt)

    async def leave(self, name: AttemptName) -> bool:
        """Do nothing: the daemon goes on, and keeps no GPU from others."""
        return True

    def forget(self, name: AttemptName) -> None:
        """Drop an attempt that uses nothing any more."""
        self._sharers.pop(name, None)

    def _daemon_of(self, attempt: Attempt) -> _Operators:
        spec = attempt.request.effective_gpu or GpuSpec()
        pipe, logs = spec.mps_pipe_dir or MPS_PIPE_DIRECTORY, spec.mps_log_dir or MPS_LOG_DIRECTORY
        control = MpsControl(shutil.which(PROGRAM) or PROGRAM, Path(pipe), Path(logs))
        daemon = self._daemons.setdefault((pipe, logs), _Operators(control=control, where=f"at {pipe}"))
        daemon.wanted_s = asyncio.get_running_loop().time()
        return daemon

    def _watched(self) -> Iterable[Watched]:
        used = {id(daemon) for daemon in self._sharers.values()}
        since_s = asyncio.get_running_loop().time() - WANTED_S
        # one that has answered is judged from then on, also if it is gone by the time that a job wants it again
        self._daemons = {key: each for key, each in self._daemons.items() if each.has_answered or id(each) in used}
        return [each for each in self._daemons.values() if id(each) in used or (each.why and each.wanted_s > since_s)]

    async def _check(self, daemon: Watched) -> None:
        assert isinstance(daemon, _Operators)
        why = await self._why_unwell(daemon.control)
        daemon.has_answered = daemon.has_answered or not why or why.startswith("server ")
        daemon.failed = daemon.failed + 1 if why and daemon.has_answered else 0
        if daemon.failed < FAILED_MAX:
            daemon.why = daemon.why if why else ""
            return
        daemon.why = why
        if names := [name for name, its in self._sharers.items() if its is daemon]:
            for name in names:
                del self._sharers[name]
            self._lose(daemon, names, why)
