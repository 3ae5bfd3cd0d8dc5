"""GPUs that are shared by time-slice: their compute mode, and the length of their time slices.

Processes share a GPU only in the compute mode DEFAULT, so a worker that offers time-slice takes its GPUs there, and has
the driver's scheduler use the length of a slice that an operator names. It leaves both as they were. What it changed
is in a file before it is changed, so that the next agent takes it back if this one is killed. A driver that cannot say
or set something is left as it is: NVML has no call for the length of a slice, nvidia-smi has, on some boards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from moorage.schemas.unreadable import UNREADABLE
from moorage.worker.inventory.threads import in_thread

FILE_NAME: Final = "compute-modes.json"
Length = Literal["default", "short", "medium", "long"]
#: as `nvidia-smi compute-policy --set-timeslice` numbers them
_LENGTHS: Final[dict[str, int]] = {"default": 0, "short": 1, "medium": 2, "long": 3}
NVIDIA_SMI: Final = "nvidia-smi"
COMMAND_S: Final = 10.0
#: for all of it: NVML and nvidia-smi may hang in the kernel
CHANGE_S: Final = 60.0

log = logging.getLogger("moorage.worker")


class _Changed(msgspec.Struct):
    """What was changed since this boot: the compute mode that each GPU had, and the GPUs whose slices have a length."""

    boot: str
    modes: dict[str, int] = {}
    lengths: list[str] = []


class ComputeModes:
    """Those of one worker's whole NVIDIA GPUs, by uuid; `shares`: it offers time-slice. `file` outlives the agent."""

    def __init__(
        self, uuids: Sequence[str], file: Path, boot: str, *, shares: bool, length: Length | None = None
    ) -> None:
        self._uuids = uuids
        self._file = file
        self._shares = shares
        self._length = length
        past = _read(file)
        self._changed = past if past is not None and past.boot == boot else _Changed(boot)

    async def open(self) -> None:
        """Take the GPUs to the mode in which they can be shared, or undo what an earlier agent has left."""
        if self._uuids and (self._shares or self._changed.modes or self._changed.lengths):
            await self._in_time(self._open)

    async def close(self) -> None:
        """Leave everything as it was. Do not call it while jobs share the GPUs."""
        if self._changed.modes or self._changed.lengths:
            await self._in_time(self._restore)

    async def _in_time(self, work: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(CHANGE_S):
                await in_thread("compute-modes", work)
        except TimeoutError:
            log.error("compute modes: the driver did not answer within %g s", CHANGE_S)
        except OSError as error:
            log.error("compute modes stay as they are: %s", error)

    # ----------------------------------------------------------------------- in the thread: NVML, a command, a file

    def _open(self) -> None:
        if not self._shares:
            self._restore()
            return
        import pynvml

        for uuid in self._uuids:
            self._to_default(pynvml, uuid)
        if self._length is None:
            self._restore_lengths()
        else:
            for uuid in self._uuids:
                self._lengthen(uuid, self._length)

    def _to_default(self, api: Any, uuid: str) -> None:
        mode = _mode_of(api, uuid)
        if mode is None or mode == api.NVML_COMPUTEMODE_DEFAULT:
            return
        self._changed.modes[uuid] = mode
        self._write()
        if not _set_mode(api, uuid, api.NVML_COMPUTEMODE_DEFAULT):
            del self._changed.modes[uuid]
            self._write()

    def _lengthen(self, uuid: str, length: Length) -> None:
        if uuid not in self._changed.lengths:
            self._changed.lengths.append(uuid)
            self._write()
        if not _set_length(uuid, length):
            self._changed.lengths.remove(uuid)
            self._write()

    def _restore(self) -> None:
        import pynvml

        for uuid, mode in list(self._changed.modes.items()):
            # another mode than the one that was set: somebody chose it since
            if _mode_of(pynvml, uuid) != pynvml.NVML_COMPUTEMODE_DEFAULT or _set_mode(pynvml, uuid, mode):
                del self._changed.modes[uuid]
        self._restore_lengths()
        self._write()

    def _restore_lengths(self) -> None:
        for uuid in list(self._changed.lengths):
            if _set_length(uuid, "default"):
                self._changed.lengths.remove(uuid)
        self._write()

    def _write(self) -> None:
        """Raises OSError: what cannot be taken down is not changed."""
        if not (self._changed.modes or self._changed.lengths):
            with contextlib.suppress(FileNotFoundError):
                self._file.unlink()
            return
        fresh = self._file.with_name(self._file.name + ".new")
        fresh.write_bytes(msgspec.json.encode(self._changed))
        os.rename(fresh, self._file)


def _mode_of(api: Any, uuid: str) -> int | None:
    """The compute mode; None where the driver does not tell."""
    try:
        return int(api.nvmlDeviceGetComputeMode(api.nvmlDeviceGetHandleByUUID(uuid)))
    except api.NVMLError:
        return None


def _set_mode(api: Any, uuid: str, mode: int) -> bool:
    try:
        api.nvmlDeviceSetComputeMode(api.nvmlDeviceGetHandleByUUID(uuid), mode)
    except api.NVMLError as error:
        log.warning("the compute mode of %s stays as it is, and its jobs may not share it: %s", uuid, error)
        return False
    return True


def _set_length(uuid: str, length: Length) -> bool:
    command = [NVIDIA_SMI, "compute-policy", "-i", uuid, f"--set-timeslice={_LENGTHS[length]}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
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
