"""How long this machine's processors may take to wake while a job is about to start.

A processor that has nothing to do halts, and the longer it does, the deeper it sleeps. A job that comes alone passes
through half a dozen processes; each sleeps until the one before it wakes it, so that a sixth of its way is waking up.
Linux lets a program bound that: PM QoS, by a file that says so for as long as it is open, for all processors alike.
While the bound is 0 a processor without work spins instead of halting, so nothing is said but while there is work.

Source: "CPU Idle Time Management" of the kernel's admin guide, its part on Power Management Quality of Service.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from moorage.schemas.errors import refuse
from moorage.schemas.settings import setting

DEVICE: Final = Path("/dev/cpu_dma_latency")
LATENCY_US_MAX: Final = 10_000
#: the setting of whoever starts jobs
LatencyUs: TypeAlias = Annotated[
    int,
    setting(
        "Microseconds that a processor of this machine may take to wake while a job is about to start; 0: it spins."
        " Unset, the machine decides. Needs root.",
        ge=0,
        le=LATENCY_US_MAX,
    ),
]
#: after the last job: a job's way to its process takes 1.5 ms, and who submits one often submits another
LINGER_S: Final = 0.005
#: PM_QOS_CPU_LATENCY_DEFAULT_VALUE of the kernel's pm_qos.h: no bound, as while the file is closed
_NO_BOUND_US: Final = 2_000_000_000


class CpuLatency:
    """`hold` when work begins; `LINGER_S` after the last call the bound is lifted. The kernel lifts it of who dies."""

    def __init__(self, latency_us: int, device: Path = DEVICE) -> None:
        """`latency_us` is 0..LATENCY_US_MAX. Raises Refused where this user, or this machine, cannot say it."""
        try:
            self._descriptor = os.open(device, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise refuse(
                "failed-precondition",
                f"cpu_latency_us needs {device}: {error.strerror or error}",
                field="$.cpu_latency_us",
                found=str(device),
                next="run as root (in a container with --device), let this user write there by a udev rule, or leave it"
                " unset",
            ) from error
        self._bound = struct.pack("=i", latency_us)
        self._until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def holds(self) -> bool:
        return self._timer is not None

    def hold(self) -> None:
        """Bound it from now on. A first call wakes what sleeps, some 10 µs; the next ones cost a look at the clock."""
        loop = asyncio.get_running_loop()
        self._until_s = loop.time() + LINGER_S
        if self._timer is None and self._descriptor >= 0:
            self._say(self._bound)
            self._timer = loop.call_at(self._until_s, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._until_s:
            self._timer = loop.call_at(self._until_s, self._look)
        else:
            self._timer = None
            self._say(struct.pack("=i", _NO_BOUND_US))

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # without it a job starts later, and that is all
            os.write(self._descriptor, word)

    def close(self) -> None:
        """Lift it for good. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
