"""What a job does to its devices in these tests, over the CUDA driver alone: libcuda by ctypes (CUDA Driver API).

hold_memory.py see FILE           write what this process may see of devices, as JSON
hold_memory.py hold FILE MIB      take MIB on the first visible device, write the pid, and wait for ever
hold_memory.py below FILE MIB     the same in a grandchild with a session of its own, and wait for it
hold_memory.py launch FILE        launch kernels of 100,000 threads on the first visible device without end (stub only)
hold_memory.py nodes FILE NODE…   write how each file in /dev answers an open: 0, or the error number
hold_memory.py limit FILE         write what is told of memory, and the answers at the limit and a byte beyond
hold_memory.py cost FILE N        write the ns of a launch of an empty kernel and of an allocation, by N and N / 20
hold_memory.py keep FILE MIB      fill MIB with a pattern; after each SIGUSR1 write whether it is still there
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Final

LIBRARY: Final = "libcuda.so.1"
#: CUDA_ERROR_NO_DEVICE: the driver is there, and this process may see none of its devices
NO_DEVICE: Final = 100
#: bytes of the pieces in which the driver gives out memory, at least
GRANULE: Final = 2 * 1024**2
SETTLED_S: Final = 2.5
PATTERN: Final = 0x6D6F6F72
EMPTY_KERNEL: Final = b".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry empty() { ret; }\n"


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
        self.use(ordinal)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return (total.value - free.value) // 1024**2

    def take(self, ordinal: int, mib: int) -> None:
        self.use(ordinal)
        self.call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(mib * 1024**2))

    def launch(self) -> None:
        """Launch kernels without end. There is no function: only a stub of the driver takes that."""
        self.use(0)
        launch, shape = self._library.cuLaunchKernel, [ctypes.c_uint(each) for each in (100, 1, 1, 1000, 1, 1, 0)]
        while launch(None, *shape, None, None, None) == 0:
            pass

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function of the driver, and return its answer."""
        return int(getattr(self._library, name)(*arguments))

    def has(self, name: str) -> bool:
        return hasattr(self._library, name)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the current device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> tuple[int, ctypes.c_uint64]:
        """What the driver answers to an allocation, and where it is."""
        at = ctypes.c_uint64()
        return self.code("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size)), at

    def free(self, at: ctypes.c_uint64) -> None:
        self.call("cuMemFree_v2", at)

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device

    def use(self, ordinal: int) -> None:
        """Work on this device from now on, in its primary context."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(ordinal))
        self.call("cuCtxSetCurrent", context)


def see() -> dict[str, Any]:
    """What a process may see: its variables, and what CUDA shows it."""
    seen: dict[str, Any] = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "MOORAGE_GPU_UUIDS")}
    cuda = Cuda()
    seen["uuids"] = [cuda.uuid(ordinal) for ordinal in range(cuda.count())]
    seen["used_mib"] = [cuda.memory_used_mib(ordinal) for ordinal in range(cuda.count())]
    return seen


def opened(nodes: list[str]) -> dict[str, int]:
    """How the kernel answers to an open of each of these files: 0, or the error number."""
    found = {}
    for node in nodes:
        try:
            os.close(os.open(node, os.O_RDWR | os.O_NONBLOCK))
            found[node] = 0
        except OSError as error:
            found[node] = error.errno or -1
    return found


def settled(cuda: Cuda) -> int:
    """Free bytes once they stay the same: each second the worker tells what the driver took by itself."""
    free, since_s = cuda.memory()[0], time.monotonic()
    while time.monotonic() < since_s + SETTLED_S:
        time.sleep(0.1)
        if (now := cuda.memory()[0]) != free:
            free, since_s = now, time.monotonic()
    return free


def at_the_limit() -> dict[str, Any]:
    """What a process is told of memory before and after its first allocation, and whether its limit is exact."""
    cuda = Cuda()
    cuda.use(0)
    before, total = cuda.memory()
    _, first = cuda.allocate(1)
    after, _ = cuda.memory()
    cuda.free(first)
    free = settled(cuda)
    beyond, _ = cuda.allocate(free + 1)
    whole = free // GRANULE * GRANULE  # the driver gives out memory in pieces
    fits, at = cuda.allocate(whole)
    more = cuda.allocate(GRANULE)[0] if not fits else -1
    if not fits:
        cuda.free(at)
    return {
        "total": total, "free_before": before, "free_after": after, "free": free,
        "beyond": beyond, "fits": fits, "more": more,
    }  # fmt: skip


def cost(count: int) -> dict[str, float]:
    """Nanoseconds of a launch of an empty kernel, and of an allocation with its free."""
    cuda = Cuda()
    cuda.use(0)
    function = ctypes.c_void_p()
    if cuda.has("cuModuleGetFunction"):
        module = ctypes.c_void_p()
        cuda.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(EMPTY_KERNEL))
        cuda.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"empty"))
    shape = [ctypes.c_uint(each) for each in (1, 1, 1, 1, 1, 1, 0)]
    found = {}
    for name, times in (("launch", count), ("alloc", max(1, count // 20))):
        began_ns = time.perf_counter_ns()
        for _ in range(times):
            if name == "launch":
                cuda.call("cuLaunchKernel", function, *shape, None, None, None)
            else:
                cuda.free(cuda.allocate(GRANULE)[1])
        found[name] = (time.perf_counter_ns() - began_ns) / times
        if cuda.has("cuCtxSynchronize"):
            cuda.call("cuCtxSynchronize")
    return found


def keep(file: Path, mib: int) -> None:
    """Hold memory with a pattern; after each SIGUSR1 write how often it was looked at, and whether it is there."""
    cuda = Cuda()
    cuda.use(0)
    code, at = cuda.allocate(mib * 1024**2)
    if code:
        raise CudaError(f"cuMemAlloc_v2 answers {code}")
    words = mib * 1024**2 // 4
    if cuda.has("cuMemsetD32_v2"):
        cuda.call("cuMemsetD32_v2", at, ctypes.c_uint(PATTERN), ctypes.c_size_t(words))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    looks = 0
    put(file, json.dumps({"pid": os.getpid(), "looks": looks}))
    while True:
        signal.sigwait([signal.SIGUSR1])
        looks += 1
        cuda.free(cuda.allocate(GRANULE)[1])  # a call that the stub has, too
        word = ctypes.c_uint(PATTERN)
        if cuda.has("cuMemcpyDtoH_v2"):
            last = ctypes.c_uint64(at.value + 4 * (words - 1))
            cuda.call("cuMemcpyDtoH_v2", ctypes.byref(word), last, ctypes.c_size_t(4))
        put(file, json.dumps({"pid": os.getpid(), "looks": looks, "same": word.value == PATTERN}))


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
    elif what == "nodes":
        put(file, json.dumps(opened(sys.argv[3:])))
    elif what == "limit":
        put(file, json.dumps(at_the_limit()))
    elif what == "cost":
        put(file, json.dumps(cost(int(sys.argv[3]))))
    elif what == "keep":
        keep(file, int(sys.argv[3]))
    elif what == "launch":
        put(file, str(os.getpid()))
        Cuda().launch()
    else:
        subprocess.run([sys.executable, __file__, "hold", *sys.argv[2:]], start_new_session=True)


if __name__ == "__main__":
    main()
