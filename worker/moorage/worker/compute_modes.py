"""The compute modes that a worker gives to its GPUs, and the length of their time slices.

Processes share a GPU by time-slice only in the mode DEFAULT, so a worker that offers it takes its GPUs there, and has
the driver's scheduler use the length of a slice that an operator names. While an MPS daemon has a GPU it is in the mode
EXCLUSIVE_PROCESS: a client that misses the daemon runs without it and without limits, silently, and in this mode it
fails.

The worker leaves all as it was. What it changed is in a file before it is changed, so that the next agent takes it back
if this one is killed. A driver that cannot say or set something is left as it is: NVML has no call for the length of a
slice, nvidia-smi has, on some boards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from moorage.schemas.unreadable import UNREADABLE
from moorage.system.private_files import replace_private
from moorage.worker.inventory.nvml import import_pynvml
from moorage.worker.inventory.threads import in_thread

FILE_NAME: Final = "compute-modes.json"
#: nvml.h: NVML_COMPUTEMODE_DEFAULT and NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
DEFAULT: Final = 0
EXCLUSIVE_PROCESS: Final = 3
Length = Literal["default", "short", "medium", "long"]
#: as `nvidia-smi compute-policy --set-timeslice` numbers them
_LENGTHS: Final[dict[str, int]] = {"default": 0, "short": 1, "medium": 2, "long": 3}
NVIDIA_SMI: Final = "nvidia-smi"
#: for one GPU, and for all of them: NVML and nvidia-smi may hang in the kernel
ASK_S: Final = 10.0
CHANGE_S: Final = 60.0

log = logging.getLogger("moorage.worker")

T = TypeVar("T")


class ModeFault(Exception):
    """A compute mode cannot be told, set or written down; `str` of it is one line."""


class _Changed(msgspec.Struct):
    """What was changed since this boot: the mode that each GPU had, and the GPUs whose slices have a length.

    Those of `of_mps` are in EXCLUSIVE_PROCESS for an MPS daemon, and the others in DEFAULT.
    """

    boot: str
    modes: dict[str, int] = {}
    lengths: list[str] = []
    of_mps: list[str] = []


class ComputeModes:
    """Those of one worker, by the GPUs' uuids; `shares`: it offers time-slice. `file` outlives the agent."""

    def __init__(self, file: Path, boot: str, *, shares: bool, length: Length | None = None) -> None:
        self._file = file
        self._shares = shares
        self._length = length
        self._shared: frozenset[str] = frozenset()
        past = _read(file)
        self._changed = past if past is not None and past.boot == boot else _Changed(boot)

    async def open(self, uuids: Sequence[str], *, has_mps: bool) -> None:
        """Take these GPUs to the mode in which they can be shared, or undo what an earlier agent has left.

        Without `has_mps` the worker runs no MPS daemons any more.
        """
        self._shared = frozenset(uuids if self._shares else ())
        await self._in_time(self._open(uuids, has_mps))

    async def close(self) -> None:
        """Leave everything as it was, but for GPUs of MPS daemons. Do not call it while jobs share by time-slice."""
        await self._in_time(self._restore())

    @property
    def of_mps(self) -> list[str]:
        """The uuids of the GPUs that an MPS daemon has."""
        return list(self._changed.of_mps)

    async def take(self, uuid: str) -> None:
        """Have an MPS daemon's server alone use a GPU. Raises ModeFault."""
        if uuid not in self._changed.of_mps:
            if uuid not in self._changed.modes:
                self._changed.modes[uuid] = await _of_gpu(uuid, _mode)
            self._changed.of_mps.append(uuid)
            self._write()
        await _of_gpu(uuid, partial(_set, mode=EXCLUSIVE_PROCESS))

    async def give_back(self, uuid: str) -> None:
        """Put a GPU back once its daemon has ended; nothing where no daemon has it. Raises ModeFault."""
        if uuid not in self._changed.of_mps:
            return
        await self._put_back(uuid, EXCLUSIVE_PROCESS)
        self._changed.of_mps.remove(uuid)
        self._write()
        if uuid in self._shared:
            await self._share(uuid)

    async def _in_time(self, work: Coroutine[None, None, None]) -> None:
        try:
            async with asyncio.timeout(CHANGE_S):
                await work
        except TimeoutError:
            log.error("compute modes: the driver did not answer within %g s", CHANGE_S)
        except ModeFault as fault:
            log.error("compute modes stay as they are: %s", fault)

    async def _open(self, uuids: Sequence[str], has_mps: bool) -> None:
        for uuid in () if has_mps else self.of_mps:
            with _logged(f"GPU {uuid} is not back in its compute mode"):
                await self.give_back(uuid)
        if not self._shares:
            await self._restore()
            return
        for uuid in uuids:
            if uuid not in self._changed.of_mps:
                await self._share(uuid)
        if self._length is None:
            await self._restore_lengths()
        else:
            for uuid in uuids:
                await self._lengthen(uuid, self._length)

    async def _share(self, uuid: str) -> None:
        mode = DEFAULT
        with contextlib.suppress(ModeFault):  # a driver that cannot tell
            mode = await _of_gpu(uuid, _mode)
        if mode == DEFAULT:
            return
        with _logged(f"the compute mode of {uuid} stays as it is, and its jobs may not share it"):
            self._changed.modes[uuid] = mode
            self._write()
            await _of_gpu(uuid, partial(_set, mode=DEFAULT))

    async def _lengthen(self, uuid: str, length: Length) -> None:
        if uuid not in self._changed.lengths:
            self._changed.lengths.append(uuid)
            self._write()
        if not await in_thread("compute-policy", partial(_set_length, uuid, length)):
            self._changed.lengths.remove(uuid)
            self._write()

    async def _restore(self) -> None:
        for uuid in self._changed.modes.keys() - self._changed.of_mps:
            with _logged(f"GPU {uuid} is not back in its compute mode"):
                await self._put_back(uuid, DEFAULT)
        await self._restore_lengths()

    async def _restore_lengths(self) -> None:
        for uuid in list(self._changed.lengths):
            if await in_thread("compute-policy", partial(_set_length, uuid, "default")):
                self._changed.lengths.remove(uuid)
                self._write()

    async def _put_back(self, uuid: str, ours: int) -> None:
        """Give a GPU the mode of before; one that somebody chose since, in place of `ours`, stays. Raises ModeFault."""
        if await _of_gpu(uuid, _mode) == ours:
            await _of_gpu(uuid, partial(_set, mode=self._changed.modes.get(uuid, DEFAULT)))
        self._changed.modes.pop(uuid, None)
        self._write()

    def _write(self) -> None:
        """Raises ModeFault: what cannot be written down is not changed."""
        try:
            if self._changed.modes or self._changed.lengths or self._changed.of_mps:
                replace_private(self._file, msgspec.json.encode(self._changed).decode())
            else:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            raise ModeFault(f"{self._file} cannot be written: {error.strerror or error}") from None


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log a fault, and go on behind it."""
    try:
        yield
    except ModeFault as fault:
        log.warning("%s: %s", what, fault)


async def _of_gpu(uuid: str, ask: Callable[[Any, Any], T]) -> T:
    """Ask NVML in a thread of its own, as it can hang. Raises ModeFault."""
    api = import_pynvml()

    def asked() -> T:
        api.nvmlInit()
        try:
            return ask(api, api.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            api.nvmlShutdown()

    try:
        async with asyncio.timeout(ASK_S):
            return await in_thread("nvml-compute-mode", asked)
    except TimeoutError:
        raise ModeFault("NVML does not answer") from None
    except (api.NVMLError, AttributeError) as error:
        raise ModeFault(str(error)) from None


def _mode(api: Any, gpu: Any) -> int:
    return int(api.nvmlDeviceGetComputeMode(gpu))


def _set(api: Any, gpu: Any, mode: int) -> None:
    if _mode(api, gpu) == mode:
        return  # there is nothing that a right is needed for
    api.nvmlDeviceSetComputeMode(gpu, mode)
    if (found := _mode(api, gpu)) != mode:
        raise ModeFault(f"the mode is {found} where {mode} was set")


def _set_length(uuid: str, length: Length) -> bool:
    command = [NVIDIA_SMI, "compute-policy", "-i", uuid, f"--set-timeslice={_LENGTHS[length]}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("the time slices of %s stay as they are: %s", uuid, error)
        return False
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())[:200]
        log.warning("the time slices of %s stay as they are: %s", uuid, said or f"exit code {done.returncode}")
    return not done.returncode


def _read(file: Path) -> _Changed | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Changed)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        log.error("%s tells nothing of compute modes: %s", file, error)
        return None
