"""A machine with NVIDIA GPUs that are not there: `libnvidia-ml.so.1` and `libcuda.so.1`, built from the C beside this.

A worker uses them through the real pynvml, and jobs through the real loader, by `LD_LIBRARY_PATH`: see `environment`.
What the devices are stands in a file that `write` makes; what processes hold of them is counted by the processes
themselves. `load` has the libraries used in this very process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

FOLDER_VARIABLE: Final = "STUB_NVIDIA"
SHUT_DOWN_S_MAX: Final = 10.0
_SOURCES: Final = {"libnvidia-ml.so.1": "nvml.c", "libcuda.so.1": "cuda.c"}
_KEPT: Final = tempfile.TemporaryDirectory(prefix="moorage-stub-")


@functools.cache
def libraries() -> Path:
    """Return the folder with the libraries, built once a process; skips where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) to build the stub of NVIDIA's libraries")
    folder = Path(_KEPT.name)
    for library, source in _SOURCES.items():
        # the loader takes it for the driver's, once it is loaded, and as there its functions call each other
        name = f"-Wl,-Bsymbolic-functions,-soname,{library}"
        command = [
            compiler,
            "-O1",
            "-std=gnu11",
            "-Wall",
            "-Werror",
            "-Wno-format-truncation",
            "-shared",
            "-fPIC",
            name,
        ]
        done = subprocess.run(
            [*command, "-o", str(folder / library), str(Path(__file__).with_name(source))],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    return folder


#: calls by what they tell of a device, in the errors of a board
CALLS: Final = {
    "handle": ("nvmlDeviceGetHandleByIndex_v2",),
    "uuid": ("nvmlDeviceGetUUID",),
    "compute": ("nvmlDeviceGetCudaComputeCapability",),
    "mig": ("nvmlDeviceGetMigMode",),
    "compute_mode": ("nvmlDeviceGetComputeMode",),
    "set_compute_mode": ("nvmlDeviceSetComputeMode",),
    "memory": ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"),
    "memory_v2": ("nvmlDeviceGetMemoryInfo_v2",),
    "temperature": ("nvmlDeviceGetTemperature",),
    "ecc": ("nvmlDeviceGetTotalEccErrors",),
    "util": ("nvmlDeviceGetUtilizationRates",),
    "fabric": ("nvmlDeviceGetGpuFabricInfoV",),
    "samples": ("nvmlDeviceGetSamples",),
    "encoder": ("nvmlDeviceGetEncoderUtilization",),
    "worked": ("nvmlDeviceGetProcessUtilization",),
    "processes": ("nvmlDeviceGetComputeRunningProcesses_v3",),
    "graphics": ("nvmlDeviceGetGraphicsRunningProcesses_v3",),
    "rows": ("nvmlDeviceGetRemappedRows",),
    "events": ("nvmlDeviceGetSupportedEventTypes",),
    "process_util": ("nvmlDeviceGetProcessUtilization",),
    "p2p": ("nvmlDeviceGetP2PStatus",),
}


@dataclass
class Board:
    """One device. `errors` are codes by what is asked (see `CALLS`), `hangs` what does not come back.

    `pids` are processes with MiB, None for a size that the driver does not tell; `more` are further words of the line.
    """

    uuid: str
    pci: str = "00000000:17:00.0"
    used_mib: int = 1
    total_mib: int = 81559
    more: dict[str, int | str] = field(default_factory=dict)
    pids: dict[int, int | None] = field(default_factory=dict)
    mps_pids: list[int] = field(default_factory=list)
    graphics_pids: dict[int, int | None] = field(default_factory=dict)
    #: percent of the device's time by pid, or percent and how many seconds ago that was
    works: dict[int, int | tuple[int, int]] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    hangs: set[str] = field(default_factory=set)
    slices: list[Slice] = field(default_factory=list)
    stub: Stub | None = None

    def set(self, **values: object) -> None:
        """Change some of it, on the machine that has it."""
        for name, value in values.items():
            setattr(self, name, value)
        if self.stub is not None:
            self.stub.write()

    def lines(self) -> Iterator[str]:
        more: dict[str, int | str] = {
            "uuid": self.uuid,
            "pci": self.pci,
            "used": self.used_mib,
            "total": self.total_mib,
            **self.more,
        }
        if self.slices:
            more["mig"] = 1
        yield _line("device", more)
        for what, code in self.errors.items():
            for call in CALLS[what]:
                yield _line("fail", {"call": call, "uuid": self.uuid, "code": int(code)})
        for what in self.hangs:
            for call in CALLS[what]:
                yield _line("hang", {"call": call, "uuid": self.uuid})
        for pid, mib in self.pids.items():
            yield _line("process", {"uuid": self.uuid, "pid": pid, "mib": -1 if mib is None else mib})
        for pid, mib in self.graphics_pids.items():
            yield _line("process", {"uuid": self.uuid, "pid": pid, "mib": -1 if mib is None else mib, "kind": "G"})
        for pid in self.mps_pids:
            yield _line("process", {"uuid": self.uuid, "pid": pid, "mib": -1, "kind": "M"})
        for pid, work in self.works.items():
            percent, age_s = work if isinstance(work, tuple) else (work, 0)
            yield _line("work", {"uuid": self.uuid, "pid": pid, "percent": percent, "age_s": age_s})
        for each in self.slices:
            name = each.name.replace(" ", "_")
            words: dict[str, int | str] = {
                "uuid": each.uuid,
                "parent": self.uuid,
                "index": each.index,
                "total": each.total_mib,
                "name": name,
            }
            yield _line("slice", words | {"used": 0})


def load() -> None:
    """Load the stub of NVML into this process: pynvml finds what is loaded already. Skips where there is a driver."""
    if Path("/proc/driver/nvidia/version").exists():  # NVIDIA's library makes /dev/nvidiactl without a driver, too
        pytest.skip("this host has a driver, which this process may have loaded")
    ctypes.CDLL(str(libraries() / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)


@dataclass
class Slice:
    """A MIG device of a board, `index` as NVML counts them there."""

    uuid: str
    index: int = 0
    total_mib: int = 9856
    name: str = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


def _line(kind: str, words: dict[str, int | str]) -> str:
    return f"{kind} " + " ".join(f"{key}={value}" for key, value in words.items())


class Stub:
    """The machine of one test. `extra` are lines of the state beside those of boards, see `nvml.c` and `cuda.c`."""

    def __init__(self, folder: Path, *boards: Board, extra: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.boards = boards
        self.extra = extra
        self.libraries = libraries()
        for board in boards:
            board.stub = self
        for written in ("held", "busy"):  # by jobs, of any user
            (folder / written).mkdir(parents=True, exist_ok=True)
            (folder / written).chmod(0o777)
        (folder / "away").mkdir(exist_ok=True)
        (folder / "calls").touch()
        self.write()

    def write(self) -> None:
        """Have the devices be as the boards say from now on."""
        lines = [*self.extra, *(line for board in self.boards for line in board.lines())]
        fresh = self.folder / "state.new"
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.rename(self.folder / "state")

    def event(self, *words: object) -> None:
        """Add an event: a uuid, its type and data, or `error` and a code."""
        with (self.folder / "events").open("a") as events:
            events.write(" ".join(map(str, words)) + "\n")

    def busy_us(self, uuid: str) -> int:
        """Return for how long processes had a device in all, by what each of their kernels takes."""
        return sum(
            int.from_bytes(each.read_bytes(), sys.byteorder) for each in (self.folder / "busy").glob(f"*.{uuid}")
        )

    def compute_mode(self, uuid: str) -> int:
        """Return the compute mode that a device is in."""
        file = self.folder / f"mode.{uuid}"
        return int(file.read_text() or 0) if file.exists() else 0

    def calls(self, call: str, uuid: str = "") -> int:
        """Return how often a call was made for a device."""
        return (self.folder / "calls").read_text().splitlines().count(f"{call} {uuid}")

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which a process uses these devices."""
        return {"LD_LIBRARY_PATH": str(self.libraries), FOLDER_VARIABLE: str(self.folder)}

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Have this process use these devices meanwhile: pynvml finds the library that is loaded already."""
        load()
        os.environ[FOLDER_VARIABLE] = str(self.folder)
        try:
            yield
        finally:
            for thread in threading.enumerate():
                if thread.name == "nvml-shutdown":  # of an inventory that was closed: its call belongs to this folder
                    thread.join(SHUT_DOWN_S_MAX)
            os.environ.pop(FOLDER_VARIABLE, None)
