"""Have the calls of attempts wait that are frozen, and see their first use: the worker's side of the limiter's gate.

The gate itself stands where the calls pass: in the library that the attempt's processes load, sharing/limiter/limiter.c
(`gate`, `GATED`). It reads a word of the attempt's segment, which this module writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Device
from moorage.schemas.job import Qos, Request
from moorage.worker.sharing.limiter.segment import DEVICES_MAX, Segment


def needs_gate(after_s: Callable[[Qos], int], request: Request, devices: Sequence[Device], mode: str) -> bool:
    """Return whether an attempt may be frozen for want of use: it needs a segment then, to be resumed by its next use.

    `after_s` says after how many seconds without use, by `qos`, 0 for never.
    """
    if mode != "exclusive" or not 0 < len(devices) <= DEVICES_MAX:
        return False
    gpu = request.effective_gpu
    is_gang = gpu is not None and gpu.effective_scheduling == "gang"
    return not is_gang and after_s(request.qos) > 0


class Gate:
    """The gates of one driver's attempts, those that have `segments`. For an attempt without one nothing happens."""

    def __init__(self, segments: Mapping[AttemptName, Segment]) -> None:
        self._segments = segments
        self._closed: set[AttemptName] = set()

    def close(self, name: AttemptName) -> None:
        """Have an attempt's calls of the CUDA driver wait, as it is about to be frozen.

        Nothing happens if its segment cannot be written.
        """
        if (segment := self._segments.get(name)) is not None:
            with contextlib.suppress(OSError):
                segment.hold_calls()
                self._closed.add(name)

    def open(self, name: AttemptName) -> None:
        """Have an attempt's calls of the CUDA driver pass again."""
        self._closed.discard(name)
        if (segment := self._segments.get(name)) is not None:
            with contextlib.suppress(OSError):
                segment.let_calls_pass()

    def wanted(self) -> list[AttemptName]:
        """Return the attempts to which a call has come since their `close`."""
        found = []
        for name in self._closed:
            with contextlib.suppress(OSError, KeyError):
                if self._segments[name].is_wanted():
                    found.append(name)
        return found

    def wakes(self, name: AttemptName) -> bool:
        """Return whether a process of an attempt uses a device through the library."""
        segment = self._segments.get(name)
        try:
            return segment is not None and bool(segment.slots())
        except OSError:
            return False

    def forget(self, name: AttemptName) -> None:
        """Forget an attempt of which nothing runs any more."""
        self._closed.discard(name)
