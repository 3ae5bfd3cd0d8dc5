"""What a training job of PyTorch does in these tests; it needs torch, and writes JSON.

train.py fill FILE           allocate until there is no memory left, wait, and write what fitted of what was told
train.py steps FILE SECONDS  train for this time; write how many steps, and ms a step
train.py spin FILE SECONDS MIB  hold so much, and have one kernel run for so long; write once it runs
train.py on FILE             train without end; after each SIGUSR1 write the steps, and whether the loss is a number
train.py serve FILE          train a step, then another one after each SIGUSR1, and nothing between; write the same
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

MIB: Final = 1024**2
PIECE_MIB: Final = 64
#: longer than the guard of the worker looks at what is held
WAIT_S: Final = 5.0
LOOK_S: Final = 0.05
WIDTH: Final = 2048
WARM_STEPS: Final = 20
#: of the GPU's clock, somewhat less than there are
CYCLES_A_S: Final = 1.7e9


class Training:
    """A few layers of a transformer in bfloat16, trained on one batch of noise."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True, dropout=0.0)
        self.model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda().bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(8, 256, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.steps = 0

    def step(self) -> float:
        """Make one step to its end, and return its loss."""
        self.optimizer.zero_grad()
        loss = (self.model(self.batch) - self.batch).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return float(loss)


def fill() -> dict[str, Any]:
    told = torch.cuda.mem_get_info()
    held: list[Any] = []
    error = ""
    try:
        while True:
            held.append(torch.zeros(PIECE_MIB * MIB, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError as full:
        error = str(full).splitlines()[0]
    torch.cuda.synchronize()
    time.sleep(WAIT_S)
    return {"free": told[0], "total": told[1], "held_mib": len(held) * PIECE_MIB, "error": error[:200]}


def steps(seconds: float) -> dict[str, Any]:
    training = Training()
    for _ in range(WARM_STEPS):
        training.step()
    began_s, times = time.monotonic(), list[float]()
    while time.monotonic() < began_s + seconds:
        at_s = time.perf_counter()
        training.step()
        times.append(1000 * (time.perf_counter() - at_s))
    return {
        "steps": len(times),
        "ms": statistics.median(times),
        "peak_mib": torch.cuda.max_memory_reserved() // MIB,
        "began": began_s,
    }


def spin(file: Path, seconds: float, mib: int) -> None:
    """SIGTERM keeps its default action."""
    held = torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
    held.fill_(7)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(seconds * CYCLES_A_S))
    put(file, {"pid": os.getpid()})
    torch.cuda.synchronize()


def on(file: Path, *, waits: bool) -> None:
    training, looks, asked = Training(), 0, list[int]()
    # a handler, and no mask: threads that numpy and torch have begun would take the signal, and die of it
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    training.step()
    put(file, {"pid": os.getpid(), "looks": looks})
    while True:
        while waits and not asked:
            time.sleep(LOOK_S)
        loss = training.step()
        if asked:
            looks += len(asked)
            asked.clear()
            put(file, {"pid": os.getpid(), "looks": looks, "steps": training.steps, "same": math.isfinite(loss)})


def put(file: Path, found: dict[str, Any]) -> None:
    """Written whole or not there: the test waits for the file."""
    beside = file.with_name(f"{file.name}.part")
    beside.write_text(json.dumps(found))
    beside.rename(file)


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "fill":
        put(where, fill())
    elif what == "spin":
        spin(where, float(sys.argv[3]), int(sys.argv[4]))
    elif what == "steps":
        put(where, steps(float(sys.argv[3])))
    else:
        on(where, waits=what == "serve")
