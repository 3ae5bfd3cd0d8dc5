"""Measure through NVML how much of a GPU each process uses."""

from __future__ import annotations

import os
import time
from typing import Any, Final

#: a GPU without a new sample for this long is idle; drivers take a sample at least once a second
HELD_S: Final = 1.0
#: seconds between two calls for a GPU that reports nothing
RETRY_S: Final = 10.0
#: a sample from further ahead than this is not one: some drivers fill their buffer with such (NVIDIA/go-nvml issue 11)
AHEAD_S_MAX: Final = 1.0
#: Linux gives no greater number to a process (PID_MAX_LIMIT)
PID_MAX: Final = 1 << 22
_PERCENT: Final = 100


class Unmeasured(Exception):
    """NVML reports nothing about the processes on this GPU now. Its text says why."""


class Meter:
    """Measures by calls of NVML, in the thread that calls `used`. The first call opens NVML."""

    def __init__(self, api: Any, sees_all_pids: bool) -> None:
        """`api` is the module pynvml. `sees_all_pids`: this process sees every process of the host in its /proc."""
        self._api = api
        self._sees_all_pids = sees_all_pids
        self._is_open = False
        self._handles: dict[str, Any] = {}
        self._seen_us: dict[str, int] = {}  # by GPU: when its newest sample was taken, in its driver's time
        self._held: dict[str, tuple[float, dict[int, float]]] = {}
        self._why_not: dict[str, tuple[float, str]] = {}

    def used(self, uuid: str, now_s: float) -> dict[int, float]:
        """Return the part of a GPU that each process has used recently, 0..1 by pid: the greatest of compute, encoder
        and decoder.

        A process without an entry has used nothing; the result is empty if NVML had no new sample for `HELD_S` seconds.
        Raises Unmeasured if NVML fails, for the next `RETRY_S` seconds without asking it again, and if NVML names a
        process that this one does not see.
        """
        failed_s, why = self._why_not.get(uuid, (0.0, ""))
        if why and now_s < failed_s + RETRY_S:
            raise Unmeasured(why)
        try:
            found = self._fresh(uuid)
        except (self._api.NVMLError, AttributeError) as error:  # AttributeError: a library older than the call
            self._handles.pop(uuid, None)
            self._why_not[uuid] = (now_s, str(error))
            raise Unmeasured(str(error)) from None
        self._why_not.pop(uuid, None)
        if found is not None:
            self._held[uuid] = (now_s, found)
        held_s, held = self._held.get(uuid, (now_s, {}))
        if now_s > held_s + HELD_S:
            return {}
        if not self._sees_all_pids and (absent := [pid for pid in held if not os.path.exists(f"/proc/{pid}")]):
            raise Unmeasured(f"NVML names pid {absent[0]}, which is not in the worker's PID namespace")
        return held

    def _fresh(self, uuid: str) -> dict[int, float] | None:
        """Return each process's newest sample since the last call; None if there is no new one. Raises NVMLError."""
        if not self._is_open:
            self._api.nvmlInit()
            self._is_open = True
        if uuid not in self._handles:
            self._handles[uuid] = self._api.nvmlDeviceGetHandleByUUID(uuid)
        now_us = time.time_ns() // 1000
        # no later than now: the host's clock may have been set back
        seen_us = min(self._seen_us.get(uuid, now_us - round(HELD_S * 1e6)), now_us)
        try:
            samples = self._api.nvmlDeviceGetProcessUtilization(self._handles[uuid], seen_us)
        except self._api.NVMLError as error:
            # the bindings raise NVML_SUCCESS where there are no samples
            if getattr(error, "value", None) in (self._api.NVML_SUCCESS, self._api.NVML_ERROR_NOT_FOUND):
                return None
            raise
        found: dict[int, float] = {}
        newest: dict[int, int] = {}
        for sample in samples:
            pid, taken_us = int(sample.pid), int(sample.timeStamp)
            if not 0 < pid <= PID_MAX or taken_us > now_us + round(AHEAD_S_MAX * 1e6):
                continue
            if taken_us > max(seen_us, newest.get(pid, 0)):
                percent = max(int(each) for each in (sample.smUtil, sample.encUtil, sample.decUtil))
                newest[pid], found[pid] = taken_us, min(percent, _PERCENT) / _PERCENT
        self._seen_us[uuid] = max([seen_us, *newest.values()])
        return found or None
