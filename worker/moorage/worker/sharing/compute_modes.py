"""Set the compute modes of a worker's GPUs.

Processes can share a GPU by time-slice only in the mode DEFAULT, so a worker that offers time-slice sets that mode.
While an MPS daemon uses a GPU, the GPU is in the mode EXCLUSIVE_PROCESS: in the mode DEFAULT a client that does not
find the daemon would silently run without it and without limits; in EXCLUSIVE_PROCESS it fails.

The worker restores everything at its end. Each change is written to a file first, so that the next agent restores it if
this one is killed. A mode that a driver cannot read or set stays as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from moorage.schemas.unreadable import UNREADABLE
from moorage.system.daemon_threads import in_thread
from moorage.system.private_files import replace_private
from moorage.worker.devices.readers.nvml import import_pynvml

FILE_NAME: Final = "compute-modes.json"
#: nvml.h: NVML_COMPUTEMODE_DEFAULT and NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
DEFAULT: Final = 0
EXCLUSIVE_PROCESS: Final = 3
#: time limits for one GPU, and for all of them: NVML may hang in the kernel
ASK_S: Final = 10.0
CHANGE_S: Final = 60.0

log = logging.getLogger("moorage.worker")

T = TypeVar("T")


class ModeFault(Exception):
    """A compute mode cannot be read, set or recorded; its text is one line."""


class _Changed(msgspec.Struct):
    """The changes since this boot: the former mode of each GPU.

    GPUs in `of_mps` are in EXCLUSIVE_PROCESS for an MPS daemon, the others in DEFAULT.
    """

    boot: str
    modes: dict[str, int] = {}
    of_mps: list[str] = []


class ComputeModes:
    """Sets the compute modes of one worker's GPUs, by uuid, and restores them.

    `shares`: the worker offers time-slice. `file` keeps the former values, so that the next agent can restore them.
    Values of another `boot` are ignored, because a reboot resets the modes.
    """

    def __init__(self, file: Path, boot: str, *, shares: bool) -> None:
        self._file = file
        self._shares = shares
        self._shared: frozenset[str] = frozenset()
        past = _read(file)
        self._changed = past if past is not None and past.boot == boot else _Changed(boot)

    async def open(self, uuids: Sequence[str], *, has_mps: bool) -> None:
        """Set the mode of these GPUs if the worker offers time-slice.

        Otherwise restore what an earlier agent set. Without `has_mps` the worker runs no MPS daemons any more: GPUs
        that such a daemon used are restored. Faults are logged and not raised.
        """
        self._shared = frozenset(uuids if self._shares else ())
        await self._in_time(self._open(uuids, has_mps))

    async def close(self) -> None:
        """Restore everything, except GPUs of MPS daemons. Faults are logged and not raised.

        Do not call it while jobs share by time-slice.
        """
        await self._in_time(self._restore())

    @property
    def of_mps(self) -> list[str]:
        """The uuids of the GPUs that an MPS daemon uses."""
        return list(self._changed.of_mps)

    async def take(self, uuid: str) -> None:
        """Set the mode EXCLUSIVE_PROCESS on a GPU for an MPS daemon, until `give_back`. Raises ModeFault.

        After a ModeFault, too, call `give_back` when the daemon has ended.
        """
        if uuid not in self._changed.of_mps:
            if uuid not in self._changed.modes:
                self._changed.modes[uuid] = await _of_gpu(uuid, _mode)
            self._changed.of_mps.append(uuid)
            self._write()
        await _of_gpu(uuid, partial(_set, mode=EXCLUSIVE_PROCESS))

    async def give_back(self, uuid: str) -> None:
        """Restore a GPU once its daemon has ended; do nothing if it was not taken. Raises ModeFault."""
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
            log.error("the compute modes of the GPUs are unknown: the driver did not answer within %g s", CHANGE_S)

    async def _open(self, uuids: Sequence[str], has_mps: bool) -> None:
        for uuid in () if has_mps else self.of_mps:
            with _logged(f"the compute mode of GPU {uuid} is not restored"):
                await self.give_back(uuid)
        if not self._shares:
            await self._restore()
            return
        for uuid in uuids:
            if uuid not in self._changed.of_mps:
                await self._share(uuid)

    async def _share(self, uuid: str) -> None:
        mode = DEFAULT
        with contextlib.suppress(ModeFault):  # a driver that cannot report its mode
            mode = await _of_gpu(uuid, _mode)
        if mode == DEFAULT:
            return
        with _logged(f"the compute mode of {uuid} stays unchanged, and its jobs may be unable to share it"):
            self._changed.modes[uuid] = mode
            self._write()
            await _of_gpu(uuid, partial(_set, mode=DEFAULT))

    async def _restore(self) -> None:
        for uuid in self._changed.modes.keys() - self._changed.of_mps:
            with _logged(f"the compute mode of GPU {uuid} is not restored"):
                await self._put_back(uuid, DEFAULT)

    async def _put_back(self, uuid: str, ours: int) -> None:
        """Restore a GPU's former mode, unless an operator has replaced `ours` by another one since.

        Raises ModeFault.
        """
        if await _of_gpu(uuid, _mode) == ours:
            await _of_gpu(uuid, partial(_set, mode=self._changed.modes.get(uuid, DEFAULT)))
        self._changed.modes.pop(uuid, None)
        self._write()

    def _write(self) -> None:
        """Write the changes to the file. Raises ModeFault: then the change must not be made."""
        try:
            if self._changed.modes or self._changed.of_mps:
                replace_private(self._file, msgspec.json.encode(self._changed))
            else:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            raise ModeFault(f"{self._file} cannot be written: {error.strerror or error}") from None


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log a ModeFault of the block, and go on after the block."""
    try:
        yield
    except ModeFault as fault:
        log.warning("%s: %s", what, fault)


async def _of_gpu(uuid: str, ask: Callable[[Any, Any], T]) -> T:
    """Call `ask` with NVML and the GPU, and return its result. Raises ModeFault.

    It runs in a thread of its own, because NVML can hang.
    """
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
        return  # already set, so no permission is needed
    api.nvmlDeviceSetComputeMode(gpu, mode)
    if (found := _mode(api, gpu)) != mode:
        raise ModeFault(f"the mode is {found} after {mode} was set")


def _read(file: Path) -> _Changed | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Changed)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        log.error("the record of compute modes, %s, cannot be read: %s", file, error)
        return None
