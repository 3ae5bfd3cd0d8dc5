"""A job that takes all that its part of a GPU has room for, in every way, and gives some of it back, again and again.

churn.py FILE STEPS LIMIT_MIB     write what came of it to FILE, as JSON: how many calls were refused, and the most that
                                  it held by the driver's own count
It runs on the stub of this folder's cuda.c, and looks up what it holds in that stub's files.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
#: a process of a real job is not in the driver all of the time
PAUSE_STEPS: Final = 20
PAUSE_S: Final = 0.005


class Job:
    """What the job has, by the call that gives it back."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.random = random.Random(7)
        self.has: list[Callable[[], int]] = []
        context = ctypes.c_void_p()
        assert self.cuda.cuInit(0) == 0
        assert self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.cuda.cuCtxSetCurrent(context) == 0
        self.pool, own = ctypes.c_void_p(), (ctypes.c_int * 32)(1, 0, 1, 0)
        assert self.cuda.cuMemPoolCreate(ctypes.byref(self.pool), own) == 0
        keeps = ctypes.c_uint64(256 * MIB)
        assert self.cuda.cuMemPoolSetAttribute(self.pool, 4, ctypes.byref(keeps)) == 0

    def step(self) -> int:
        """Take something; with no room for it give back up to half of what there is. Returns the driver's answer."""
        takes = self.random.choice([self.memory, self.memory, self.of_pool, self.of_own_pool, self.graph, self.module])
        code = takes()
        if code:
            self.random.shuffle(self.has)
            for _ in range(self.random.randint(0, len(self.has) // 2)):
                assert self.has.pop()() == 0
        return code

    def kept(self, code: int, gives: Callable[[], int]) -> int:
        if code == 0:
            self.has.append(gives)
        return code

    def memory(self) -> int:
        pointer = ctypes.c_uint64()
        size = ctypes.c_size_t(self.random.randint(1, 200) * MIB)
        return self.kept(self.cuda.cuMemAlloc_v2(ctypes.byref(pointer), size), lambda: self.cuda.cuMemFree_v2(pointer))

    def of_pool(self) -> int:
        pointer = ctypes.c_uint64()
        size = ctypes.c_size_t(self.random.randint(1, 100) * MIB)
        code = self.cuda.cuMemAllocAsync(ctypes.byref(pointer), size, None)
        return self.kept(code, lambda: self.cuda.cuMemFreeAsync(pointer, None))

    def of_own_pool(self) -> int:
        pointer = ctypes.c_uint64()
        size = ctypes.c_size_t(self.random.randint(1, 100) * MIB)
        code = self.cuda.cuMemAllocFromPoolAsync(ctypes.byref(pointer), size, self.pool, None)
        return self.kept(code, lambda: self.cuda.cuMemFreeAsync(pointer, None))

    def graph(self) -> int:
        made, graph = ctypes.c_void_p(), ctypes.c_void_p(self.random.randint(1, 100) << 32 | 3)
        assert self.cuda.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, ctypes.c_uint64(0)) == 0
        code: int = self.cuda.cuGraphLaunch(made, None)
        assert self.cuda.cuGraphExecDestroy(made) == 0
        return code

    def module(self) -> int:
        made, image = ctypes.c_void_p(), b"/" * self.random.randint(1, 8 * MIB)
        code = self.cuda.cuModuleLoadData(ctypes.byref(made), image)
        return self.kept(code, lambda: self.cuda.cuModuleUnload(made))


def held_mib() -> float:
    """What the driver says that this process holds."""
    [file] = Path(os.environ["STUB_NVIDIA"], "held").glob(f"{os.getpid()}.*")
    return int(file.read_text().split()[0]) / MIB


def main() -> None:
    file, steps = Path(sys.argv[1]), int(sys.argv[2])
    job, refused, most, full = Job(), 0, 0.0, 0
    for step in range(steps):
        if job.step():
            refused += 1
        held = held_mib()
        most = max(most, held)
        full += held > 0.9 * int(sys.argv[3])
        if step % PAUSE_STEPS == 0:
            time.sleep(PAUSE_S)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps({"refused": refused, "most": most, "full": full}))
    part.rename(file)


if __name__ == "__main__":
    main()
