"""Run the MPS daemons of one worker: one for each GPU that its jobs share by mps, from the first sharer to the last.

A daemon is an attempt of the supervisor, so it outlives the agent and its end is proven like that of a job. The agent
starts it before the first sharer, checks it every few seconds, and ends it after the last sharer: only then is the GPU
free again. Meanwhile the GPU is in the compute mode EXCLUSIVE_PROCESS, if NVML lets the worker set that.

A daemon serves the clients of one user at a time and makes those of other users wait. So all sharers of a GPU must run
as one user here, and placements of other users are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import MoorageError, refuse
from moorage.schemas.frames import NOT_HERE, Device
from moorage.schemas.gpu import GpuSpec, Share
from moorage.system.device_environment import SharingUnavailable
from moorage.system.proctree import boottime_s
from moorage.worker.attempt.environment import PATH_DEFAULT
from moorage.worker.devices.refused_nodes import GpuNodes, NodesUnknown
from moorage.worker.drivers.supervisor_link import SupervisorLink, owner_of
from moorage.worker.session.attempt_messages import Attempt
from moorage.worker.sharing.compute_modes import ComputeModes, ModeFault
from moorage.worker.sharing.mps.control import PROGRAM, SERVER_LOG, Limits, MpsControl, MpsFault
from moorage.worker.sharing.mps.watched import FAILED_MAX, MPS, Watched, WatchedDaemons
from moorage.worker.supervisor.protocol import Ended, Event, StartAttempt

START_S: Final = 10.0
QUIT_S: Final = 2.0
END_S: Final = 15.0
#: most bytes of a socket's path (unix(7)), minus the daemon's longest socket name
_PATH_BYTES_MAX: Final = 107 - len("/control_privileged")
_LOG_BYTES_MAX: Final = 1 << 20
_POLL_S: Final = 0.05

log = logging.getLogger("moorage.worker")


@dataclass(slots=True)
class _Sharer:
    """An attempt that shares a GPU by mps. `joined` is set once a daemon is ready for it, until that fails."""

    slot: int
    uid: int | None
    limits: Limits
    joined: bool = False
    over: bool = False


@dataclass(slots=True, kw_only=True)
class _Gpu(Watched):
    """One GPU and its daemon. `key` is the daemon's key at the supervisor; "" if there surely is no daemon."""

    slot: int
    device: Device
    folder: Path
    key: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    limits: Limits | None = None
    told: str = ""  # the last logged reason why the GPU is not free


class ManagedMps(WatchedDaemons):
    """The MPS daemons of one worker; see the module's docstring. `folder` gets the daemons' directories."""

    def __init__(
        self,
        worker: str,
        link: SupervisorLink,
        devices: Sequence[Device],
        folder: Path,
        modes: ComputeModes,
        gpu_nodes: GpuNodes | None = None,
    ) -> None:
        """With `gpu_nodes` the kernel refuses to a daemon the other GPUs, where the supervisor can have it do so."""
        super().__init__()
        self.owner: Final = owner_of(worker, MPS)
        self._link = link
        self._folder = folder
        self._modes = modes
        self._gpu_nodes = gpu_nodes
        program = shutil.which(PROGRAM) or PROGRAM
        self._gpus = {
            slot: _Gpu(
                slot=slot,
                device=device,
                folder=home,
                control=MpsControl(program, home / "pipe", home / "log"),
                where=f"of GPU {device.index}",
            )
            for slot, device in enumerate(devices)
            if device.vendor == "nvidia" and not device.profile
            for home in (folder / str(slot),)
        }
        self._sharers: dict[AttemptName, _Sharer] = {}

    # --------------------------------------------------------------------------------------------- life of the worker

    async def open(self) -> None:
        """Take over the daemons of an earlier agent. Raises SupervisorMissing."""
        self.on_listed(await self._link.open(self.owner, self))
        if shutil.which(PROGRAM) is None:
            log.warning("mps: %s is not on the PATH, so jobs that share by mps are refused", PROGRAM)
        self._spawn(self._watch())

    async def close(self) -> None:
        """Release the daemons: those with sharers run on, the others are ended, in at most `END_S` seconds in all."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                for slot in self.left_over:
                    async with self._gpus[slot].lock:
                        await self._stop(self._gpus[slot])
        await self._end_tasks()
        await self._link.close(self.owner)

    # -------------------------------------------------------------------------------------------- attempts come and go

    def admit(self, attempt: Attempt, uid: int | None) -> None:
        """Accept an attempt as a sharer of its GPU. Raises Refused if it cannot share by mps here, or not now.

        Does nothing for an attempt that does not share by mps. `uid` is the user that it will run as; None if its
        driver cannot tell, and then it is refused.
        """
        if attempt.place.mode != MPS:
            return
        spec = attempt.request.effective_gpu or GpuSpec()
        if spec.mps_pipe_dir is not None or spec.mps_log_dir is not None:
            raise _not_here("the worker runs the MPS daemons, so a request must not name a daemon's directory")
        if len(attempt.slots) != 1:
            raise _not_here("a daemon serves one GPU, so a job that shares by mps gets one GPU")
        gpu = self._gpus.get(attempt.slots[0])
        if gpu is None:
            raise _not_here("this device does not support MPS")
        if uid is None:
            why = "do not share by mps, or their user is not known before they start"
            raise _not_here(f"jobs of the driver {attempt.driver} {why}")
        if shutil.which(PROGRAM) is None:
            raise _not_here(f"{PROGRAM} is not installed")
        sharer = _Sharer(gpu.slot, uid, _limits_of(spec, gpu.device))
        for other in self._on(gpu.slot):
            if other.uid != uid:
                message = f"jobs of another user share GPU {gpu.device.index} by mps"
                raise refuse("failed-precondition", message)
        self._sharers[attempt.name] = sharer

    def admit_again(self, attempt: Attempt, uid: int | None) -> None:
        """Accept as a sharer an attempt that an earlier agent started. Do nothing if it does not share by mps."""
        if attempt.place.mode == MPS and len(attempt.slots) == 1 and (gpu := self._gpus.get(attempt.slots[0])):
            limits = _limits_of(attempt.request.effective_gpu or GpuSpec(), gpu.device)
            self._sharers[attempt.name] = _Sharer(gpu.slot, uid, limits, joined=True)

    async def join(self, name: AttemptName) -> dict[str, str]:
        """Prepare a daemon with the right limits for this attempt, and return the variables that lead the attempt to
        it.

        Raises SharingUnavailable if no daemon with these limits can be made ready, or if the attempt was withdrawn.
        """
        sharer = self._sharers.get(name)
        if sharer is None:
            raise SharingUnavailable("mps", "the job was withdrawn")
        # shielded: a preparation that one sharer began is finished, because the next one needs it too
        await asyncio.shield(self._spawn(self._make_ready(self._gpus[sharer.slot], sharer)))
        return self._gpus[sharer.slot].control.environment | sharer.limits.environment

    async def leave(self, name: AttemptName) -> bool:
        """Record that an attempt is over, and end the daemon if it was the last sharer.

        Return whether the attempt's GPU may be freed: False if the daemon was to end and has not, or if the GPU's
        compute mode is not restored.
        """
        sharer = self._sharers.get(name)
        if sharer is None:
            return True
        sharer.over = True
        gpu = self._gpus[sharer.slot]
        async with gpu.lock:
            return any(not other.over for other in self._on(gpu.slot)) or await self._stop(gpu)

    def forget(self, name: AttemptName) -> int | None:
        """Drop an attempt that uses nothing any more.

        Return the slot that must stay closed until its daemon has ended, None for no slot.
        """
        sharer = self._sharers.pop(name, None)
        if sharer is None or self._on(sharer.slot) or self._is_down(self._gpus[sharer.slot]):
            return None
        self._news.set()
        return sharer.slot

    @property
    def left_over(self) -> list[int]:
        """The slots that have a daemon, or a daemon's compute mode, and no sharer."""
        return [gpu.slot for gpu in self._gpus.values() if not self._is_down(gpu) and not self._on(gpu.slot)]

    def _on(self, slot: int) -> list[_Sharer]:
        return [sharer for sharer in self._sharers.values() if sharer.slot == slot]

    # --------------------------------------------------------------------------------------------------- the daemons

    def _is_down(self, gpu: _Gpu) -> bool:
        return not gpu.key and gpu.device.uuid not in self._modes.of_mps

    async def _make_ready(self, gpu: _Gpu, sharer: _Sharer) -> None:
        async with gpu.lock:
            try:
                if gpu.ended.is_set() and not await self._stop(gpu):
                    raise MpsFault("the former daemon cannot be cleared away")
                if not gpu.key:
                    await self._start(gpu, sharer.uid)
                if (limits := self._limits(gpu)) is not None and limits != gpu.limits:
                    gpu.limits = None
                    await gpu.control.limit(limits)
                    gpu.limits = limits
                sharer.joined = True
            except (MpsFault, OSError) as fault:
                if not any(other.joined and not other.over for other in self._on(gpu.slot)):
                    await self._stop(gpu)
                raise SharingUnavailable("mps", str(fault)) from None

    def _refused_nodes(self, device: Device) -> tuple[tuple[int, int, int], ...]:
        """Return the devices that the kernel is to refuse to a daemon of this GPU. Raises MpsFault."""
        if self._gpu_nodes is None or not self._link.device_fence:
            return ()
        try:
            return self._gpu_nodes.refused_to([device])
        except NodesUnknown as error:
            raise MpsFault(f"the kernel cannot keep the daemon to its GPU: {error}") from None

    def _limits(self, gpu: _Gpu) -> Limits | None:
        """Return the greatest limits among the GPU's sharers; None if all of them are over meanwhile.

        A daemon has one limit for all clients, and each client lowers its own.
        """
        own = [sharer.limits for sharer in self._on(gpu.slot) if not sharer.over]
        return Limits(max(each.memory_mib for each in own), max(each.percent for each in own)) if own else None

    async def _start(self, gpu: _Gpu, uid: int | None) -> None:
        """Start a daemon for this user's clients, and wait until it answers. Raises MpsFault and OSError."""
        if len(os.fsencode(gpu.control.pipe)) > _PATH_BYTES_MAX:
            raise MpsFault(f"{gpu.control.pipe} is too long for sockets: set mps_dir")
        _make_folders(self._folder, gpu, uid)
        try:
            await self._modes.take(gpu.device.uuid)
        except ModeFault as fault:
            log.warning("mps: processes can use GPU %d without its MPS daemon: %s", gpu.device.index, fault)
        gpu.ended, gpu.why, gpu.failed = asyncio.Event(), "", 0
        gpu.key = f"{gpu.device.uuid}/{int(boottime_s() * 1000)}"
        daemon = StartAttempt(
            key=f"{self.owner}|{gpu.key}",
            argv=(gpu.control.program, "-f"),
            env={"PATH": PATH_DEFAULT, "CUDA_VISIBLE_DEVICES": gpu.device.uuid, **gpu.control.environment},
            on_partition="keep",
            output_cap_bytes=_LOG_BYTES_MAX,
            refused_nodes=self._refused_nodes(gpu.device),
        )
        self._link.start([daemon])
        ends_s = asyncio.get_running_loop().time() + START_S
        while True:
            await asyncio.sleep(_POLL_S)
            if gpu.ended.is_set():
                raise MpsFault(f"the daemon ended: {gpu.why}")
            try:
                await gpu.control.servers()
                return
            except MpsFault as fault:
                if asyncio.get_running_loop().time() >= ends_s:
                    raise MpsFault(f"the daemon is not ready: {fault}") from None

    async def _stop(self, gpu: _Gpu) -> bool:
        """End the daemon if there is one, and restore the GPU's compute mode. Return whether both succeeded."""
        if gpu.key:
            key = f"{self.owner}|{gpu.key}"
            if not gpu.ended.is_set():
                if not gpu.failed:
                    with contextlib.suppress(MpsFault):
                        await gpu.control.quit(QUIT_S)
                self._link.end(key, 0.5, "end")
                try:
                    async with asyncio.timeout(END_S):
                        await gpu.ended.wait()
                except TimeoutError:
                    return _log_once(gpu, "its daemon does not end")
            self._link.forget([key])
            gpu.key, gpu.ended, gpu.limits = "", asyncio.Event(), None
        try:
            await self._modes.give_back(gpu.device.uuid)
        except ModeFault as fault:
            return _log_once(gpu, f"its compute mode is not restored: {fault}")
        gpu.told = ""
        shutil.rmtree(gpu.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        self._on_down(gpu.slot)
        return True

    # ------------------------------------------------------------------------------------------------- their health

    def _watched(self) -> Iterable[Watched]:
        return [gpu for gpu in self._gpus.values() if not self._is_down(gpu) or self._on(gpu.slot)]

    async def _check(self, daemon: Watched) -> None:
        """Check a daemon with sharers, and end one without."""
        assert isinstance(daemon, _Gpu)
        gpu = daemon
        joined = [name for name, one in self._sharers.items() if one.slot == gpu.slot and one.joined and not one.over]
        if not self._on(gpu.slot):
            await self._stop(gpu)
            return
        if not joined:
            return
        _bound_log(gpu)
        is_gone = not gpu.key or gpu.ended.is_set()
        why = (gpu.why or "it is not there") if is_gone else await self._why_unwell(gpu.control)
        gpu.failed = gpu.failed + 1 if why else 0
        if not why or (gpu.failed < FAILED_MAX and not gpu.ended.is_set() and gpu.key):
            return
        for name in joined:
            self._sharers[name].joined = False
        self._lose(gpu, joined, why)
        await self._stop(gpu)

    # -- events of the supervisor (see `supervisor_link.Listener`)

    def on_event(self, key: str, event: Event) -> None:
        if not isinstance(event, Ended):
            return
        gpu = next((gpu for gpu in self._gpus.values() if gpu.key == key), None)
        if gpu is None:
            self._link.forget([f"{self.owner}|{key}"])
            return
        gpu.why = event.message or f"exit status {event.exit_code}, signal {event.signal}"
        gpu.ended.set()
        self._news.set()

    def on_events_over(self) -> None:
        """Do nothing: events are handled one by one."""

    def on_replaced(self) -> None:
        """Do nothing: `on_listed` follows and reports that all daemons have ended."""

    def on_listed(self, listed: Sequence[tuple[str, str, Event | None]]) -> None:
        """Take over the listed daemons that run, and end those that no GPU needs.

        A daemon that is not listed has ended.
        """
        states = {key: event for key, _, event in listed}
        for gpu in self._gpus.values():
            known = [key for key in states if key.rpartition("/")[0] == gpu.device.uuid]
            if not gpu.key and known:
                gpu.key = max(known, key=lambda key: int(key.rpartition("/")[2]))
            if gpu.key and (gpu.key not in states or isinstance(states[gpu.key], Ended)):
                gpu.why = gpu.why or "it ended with its supervisor"
                gpu.ended.set()
        ours = {gpu.key for gpu in self._gpus.values()}
        for key, event in states.items():
            if key not in ours and not isinstance(event, Ended):
                self._link.end(f"{self.owner}|{key}", 0.0, "stray")
        self._link.forget([f"{self.owner}|{key}" for key in states.keys() - ours if isinstance(states[key], Ended)])
        self._news.set()

    def on_start_refused(self, keys: Sequence[str], why: str) -> None:
        for gpu in self._gpus.values():
            if gpu.key in keys:
                gpu.why = why
                gpu.ended.set()


def _limits_of(spec: GpuSpec, device: Device) -> Limits:
    share = spec.share or Share()
    return Limits(share.memory_mib or device.memory_mib, share.compute_percent)


def _log_once(gpu: _Gpu, why: str) -> bool:
    """Log once why a GPU cannot be freed, and return False."""
    if why != gpu.told:
        gpu.told = why
        log.error("mps: GPU %d stays out of use: %s", gpu.device.index, why)
    return False


def _bound_log(gpu: _Gpu) -> None:
    """Empty the server's log if it has grown large, because a daemon may run for months."""
    with contextlib.suppress(OSError):
        if (gpu.control.log / SERVER_LOG).stat().st_size > _LOG_BYTES_MAX:
            os.truncate(gpu.control.log / SERVER_LOG, 0)


def _make_folders(root: Path, gpu: _Gpu, uid: int | None) -> None:
    """Make the daemon's directories, without old files. Its clients can use the sockets; others can put no files there.

    A server runs as its clients' user, so its log belongs to that user, in a folder that does not.
    Raises MpsFault if `root` exists and is not this user's own folder, and OSError.
    """
    if not root.exists():
        root.mkdir(parents=True)
        root.chmod(0o755)  # whatever the umask is
    about = root.lstat()
    if root.is_symlink() or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise MpsFault(f"{root} is not this user's own folder: set mps_dir")
    shutil.rmtree(gpu.folder, ignore_errors=True)
    for folder in (gpu.folder, gpu.control.pipe, gpu.control.log):
        folder.mkdir()
        folder.chmod(0o755)
    (gpu.control.log / SERVER_LOG).touch(0o644)
    if uid is not None and os.geteuid() == 0:
        os.chown(gpu.control.log / SERVER_LOG, uid, -1)


def _not_here(why: str) -> MoorageError:
    return refuse("failed-precondition", f"{NOT_HERE}{why}")
