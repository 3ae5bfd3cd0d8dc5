"""Play faults on simulated devices from a control file, to show what an operator sees of a failing GPU.

The file is `faults.json` in the state folder of a simulated worker. It is read again whenever it changes::

    {"sim-0000": {"1": {"xid": 79}, "3": {"process": {"pid": 4242, "name": "python", "user": "bob"}}}}

The keys are worker and slot. `xid` happens once, when it appears in the file or changes; every other fault lasts while
it is in the file. A file that is there and cannot be read changes nothing, and the log says why. Removing the file ends
all faults.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from moorage.schemas.unreadable import UNREADABLE
from moorage.worker.devices.readers.base import DeviceProcess, SlotReading
from moorage.worker.devices.readers.faults import GPU_LOST, SLOWED_DOWN, Fault, of_rows

FILE_NAME: Final = "faults.json"
FILE_BYTES_MAX: Final = 1 << 20
LOOK_S: Final = 0.2

log = logging.getLogger("moorage.worker.devices.readers")


class _Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pid: Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
    name: str = ""
    user: str = ""
    memory_mib: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0


class Played(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The faults and the use to play on one device; the module `nvml` reads faults such as these from NVML."""

    xid: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    uncorrected_errors: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0
    rows: Literal["", "pending", "failed"] = ""
    missing: bool = False
    unresponsive: bool = False
    slowed_down: bool = False
    memory_mib: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    process: _Process | None = None
    #: what the device does: percent of its time and watts; null is not reported
    percent: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    power_w: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] | None = None
    power_limit_w: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] | None = None

    def reading(self, baseline_mib: int) -> SlotReading:
        if self.missing or self.unresponsive:
            return SlotReading(health="unresponsive", faults=(GPU_LOST,) if self.missing else ())
        faults: list[Fault] = [SLOWED_DOWN] if self.slowed_down else []
        rows = of_rows(self.rows == "pending", self.rows == "failed")
        faults += [rows] if rows is not None else []
        one = self.process
        processes = () if one is None else (DeviceProcess(one.pid, one.name[:64], one.memory_mib, one.user[:64]),)
        used_mib = baseline_mib + self.memory_mib + (one.memory_mib if one is not None else 0)
        return SlotReading(
            util_percent=self.percent,
            power_w=self.power_w,
            power_limit_w=self.power_limit_w,
            memory_used_mib=used_mib,
            temperature_c=95 if self.slowed_down else 30,
            health="thermal" if self.slowed_down else "ecc" if self.uncorrected_errors else "ok",
            processes=processes,
            faults=tuple(faults),
            uncorrected_errors=self.uncorrected_errors,
        )


_decode: Final = msgspec.json.Decoder(dict[str, dict[str, Played]]).decode


class FaultFile:
    """The file of one process's simulated workers; read a few times a second at most."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self.version = 0  # grows with every change of the faults
        self._played: dict[str, dict[str, Played]] = {}
        self._stamp: Any = None
        self._looked_s = -LOOK_S

    def of(self, worker: str) -> dict[int, Played]:
        """Return the faults of a worker's devices now, by slot."""
        self._look()
        return {int(slot): played for slot, played in self._played.get(worker, {}).items() if slot.isdecimal()}

    def look(self) -> int:
        """Return the version, after a check of the file if the last check is old enough."""
        self._look()
        return self.version

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            with open(self.path, "rb") as file:
                self._played = _decode(file.read(FILE_BYTES_MAX))
        except FileNotFoundError:
            if self._stamp is None:
                return
            self._stamp, self._played = None, {}
        except (OSError, *UNREADABLE) as error:
            log.error(
                "the file of simulated faults, %s, cannot be used, and the earlier faults stay: %s", self.path, error
            )
            return
        self.version += 1
