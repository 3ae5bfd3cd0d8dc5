"""What a job does to its devices in these tests, over the CUDA driver alone: libcuda by ctypes (CUDA Driver API).

hold_memory.py see FILE           write what this process may see of devices, as JSON
hold_memory.py hold FILE MIB      take MIB on the first visible device, write the pid, and wait for ever
hold_memory.py below FILE MIB     the same in a grandchild with a session of its own, and wait for it
hold_memory.py launch FILE        launch kernels of 100,000 threads on the first visible device without end (stub only)
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Final

LIBRARY: Final = "libcuda.so.1"
#: CUDA_ERROR_NO_DEVICE: the driver is there, and this process may see none of its devices
NO_DEVICE: Final = 100


class CudaError(Exception):
    pass


class Cuda:
    """The few calls of the driver that are needed. Raises OSError where the library cannot be loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self.has_devices = self._library.cuInit(0) != NO_DEVICE
        if self.has_devices:
            self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise CudaError(f"{name} answers {code}")

    def count(self) -> int:
        found = ctypes.c_int()
        if self.has_devices:
            self.call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def uuid(self, ordinal: int) -> str:
        """As nvidia-smi writes it."""
        raw = (ctypes.c_char * 16)()
        self.call("cuDeviceGetUuid", ctypes.byref(raw), self._device(ordinal))
        return f"GPU-{uuid.UUID(bytes=raw.raw)}"

    def memory_used_mib(self, ordinal: int) -> int:
        """Of the whole device, by everybody, with this process's own context in it."""
        self._use(ordinal)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return (total.value - free.value) // 1024**2

    def take(self, ordinal: int, mib: int) -> None:
        self._use(ordinal)
        self.call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(mib * 1024**2))

    def launch(self) -> None:
        """Launch kernels without end. There is no function: only a stub of the driver takes that."""
        self._use(0)
        launch, shape = self._library.cuLaunchKernel, [ctypes.c_uint(each) for each in (100, 1, 1, 1000, 1, 1, 0)]
        while launch(None, *shape, None, None, None) == 0:
            pass

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device

    def _use(self, ordinal: int) -> None:
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(ordinal))
        self.call("cuCtxSetCurrent", context)


def see() -> dict[str, Any]:
    """What a process may see: its variables, what CUDA shows it, and what nvidia-smi says of the machine."""
    seen: dict[str, Any] = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "MOORAGE_GPU_UUIDS")}
    cuda = Cuda()
    seen["uuids"] = [cuda.uuid(ordinal) for ordinal in range(cuda.count())]
    seen["used_mib"] = [cuda.memory_used_mib(ordinal) for ordinal in range(cuda.count())]
    seen["nvidia_smi"] = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    return seen


def put(file: Path, text: str) -> None:
    """Written whole or not there: the test waits for the file."""
    beside = file.with_name(f"{file.name}.part")
    beside.write_text(text)
    beside.rename(file)


def main() -> None:
    what, file = sys.argv[1], Path(sys.argv[2])
    if what == "see":
        put(file, json.dumps(see()))
    elif what == "hold":
        Cuda().take(0, int(sys.argv[3]))
        put(file, str(os.getpid()))
        while True:
            signal.pause()
    elif what == "launch":
        put(file, str(os.getpid()))
        Cuda().launch()
    else:
        subprocess.run([sys.executable, __file__, "hold", *sys.argv[2:]], start_new_session=True)


if __name__ == "__main__":
    main()
