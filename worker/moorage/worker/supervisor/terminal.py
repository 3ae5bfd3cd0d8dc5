"""The terminal of an attempt whose standard input a caller holds: its newest output, who holds it, and its end of
input.

The supervisor alone keeps the outer end open, so the terminal outlives callers and agents. Its output goes into the
attempt's file as any output does, and to whoever holds the terminal. A holder that reads too slowly stops the output,
as a terminal does. Input never passes here: the holder has the outer end, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable
from typing import Final

from moorage.worker.supervisor.child import StartRefused

#: of what the terminal has shown, a new holder gets so much
RECENT_BYTES: Final = 64 * 1024
#: bytes that wait for a slow holder before no more are read
PENDING_BYTES_MAX: Final = 256 * 1024
#: after so many seconds without a holder the end of input follows
LOST_S: Final = 60.0
#: a program may read several ends of input, as nested shells do: it gets one a second, at most so many
ENDS_MAX: Final = 64
#: the end of standard input, written to a terminal
CTRL_D: Final = b"\x04"


class HeldTerminal:
    """The outer end of one attempt's terminal, which its owner reads and closes; `seen` gets what was read."""

    def __init__(self, descriptor: int, *, lost_s: float = LOST_S) -> None:
        self.descriptor = descriptor
        self._lost_s = lost_s
        self._loop = asyncio.get_running_loop()
        self._recent = bytearray()
        self._pending = bytearray()
        self._out = -1
        self._over: Callable[[int], None] | None = None
        self._read: Callable[[bool], None] | None = None
        self._is_full = False
        self._status: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, read: Callable[[bool], None]) -> None:
        """The attempt runs, and its terminal has no holder yet. `read` gets whether more is to be read from it."""
        self._read = read
        self._is_lost()

    def hold(self, out: int, over: Callable[[int], None]) -> None:
        """Give the terminal to a holder: what it shows goes to a copy of the pipe `out`, the newest bytes first.

        `over` gets the attempt's wait status once the attempt is over and all of its output is written. Raises
        `StartRefused` if another one holds it.
        """
        if self._over is not None:
            raise StartRefused(errno.EBUSY, "member", "another caller holds the terminal of this job")
        self._out, self._over = os.dup(out), over
        os.set_blocking(self._out, False)
        self._cancel()
        self._pending += self._recent
        self._flush()

    def leave(self, *, lost: bool) -> None:
        """The holder is gone; if it was lost, the end of input follows after `LOST_S`."""
        self._drop()
        if lost and self._status is None:
            self._is_lost()

    def seen(self, data: bytes) -> None:
        """Take what was read from the terminal."""
        self._recent += data
        del self._recent[:-RECENT_BYTES]
        if self._over is not None:
            self._pending += data
            self._flush()

    def end(self, status: int | None) -> None:
        """The attempt is over: notify its holder once that one has all of the output."""
        self._cancel()
        self._read = None
        self._status = status or 0
        if self._over is not None:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._pending:
                del self._pending[: os.write(self._out, self._pending)]
        except BlockingIOError:
            self._loop.add_writer(self._out, self._flush)
        except OSError:  # it reads no more; the end of its connection follows
            self._pending.clear()
        if not self._pending:
            self._loop.remove_writer(self._out)
        self._set_full(len(self._pending) >= PENDING_BYTES_MAX)
        if self._status is not None and not self._pending:
            over = self._over
            self._drop()
            assert over is not None
            over(self._status)

    def _set_full(self, is_full: bool) -> None:
        if is_full != self._is_full:
            self._is_full = is_full
            if self._read is not None:
                self._read(not is_full)

    def _drop(self) -> None:
        if self._over is None:
            return
        self._over = None
        self._loop.remove_writer(self._out)
        os.close(self._out)
        self._out = -1
        self._pending.clear()
        self._set_full(False)

    def _is_lost(self) -> None:
        self._cancel()
        self._timer = self._loop.call_later(self._lost_s, self._end_input, ENDS_MAX)

    def _end_input(self, left: int) -> None:
        with contextlib.suppress(OSError):  # its buffer is full of them
            os.write(self.descriptor, CTRL_D)
        self._timer = self._loop.call_later(1.0, self._end_input, left - 1) if left > 1 else None

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
