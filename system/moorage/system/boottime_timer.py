"""A timer on CLOCK_BOOTTIME, for the deadline of the fence.

asyncio's timers run on CLOCK_MONOTONIC, which stands still while the machine is suspended. A deadline that passes
meanwhile would be met too late by the time of the suspension. Source: timerfd_create(2).
"""

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Final

_CLOCK_BOOTTIME: Final = 7
_TFD_TIMER_ABSTIME: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class BoottimeTimer:
    """A timer with one deadline at a time. `callback` is called in the loop once it has passed."""

    __slots__ = ("_callback", "_descriptor", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Make the timer without a deadline. Raises `OSError`."""
        self._descriptor = _libc.timerfd_create(_CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._loop = loop
        self._callback = callback
        loop.add_reader(self._descriptor, self._fired)

    def arm(self, deadline_boottime_s: float | None) -> None:
        """Replace the deadline; None removes it. A passed deadline fires in the loop's next turn. Raises `OSError`."""
        value = _TimerSpec()
        if deadline_boottime_s is not None:
            total_ns = max(1, int(deadline_boottime_s * 1e9))  # all zero would disarm it
            value.value_s, value.value_ns = divmod(total_ns, 1_000_000_000)
        if _libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(value), None) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _fired(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 8)
            self._callback()

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
