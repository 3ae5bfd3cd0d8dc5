"""A program that a member has started, with all that it started: waited for, killed, said to be over."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from signal import SIGKILL
from typing import Final

#: what a program that is told to end may take before it is killed
END_S: Final = 2.0
#: how long the last frames of a program that has ended are waited for
LAST_WORDS_S: Final = 0.5

#: is awaited before a program is killed, with its pid and the seconds that this may take
BeforeKill = Callable[[int, float], Awaitable[None]]


class Child:
    """A program in a session of its own. `on_over` is called once, with what happened, when it has ended or broken the
    protocol."""

    def __init__(self, on_over: Callable[[str], None], before_kill: BeforeKill | None = None) -> None:
        self.pid = 0
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._on_over: Callable[[str], None] | None = on_over
        self._before_kill = before_kill

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return None if self._process is None else self._process.returncode

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def kill(self, announced_s: float = END_S) -> None:
        """Kill it and what it has started in its session, after at most `announced_s` of `before_kill`."""
        if self._process is None or self._process.returncode is not None:
            return
        try:
            if self._before_kill is not None:
                await self._before_kill(self.pid, announced_s)
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, SIGKILL)

    async def _ended(self, grace_s: float, last_words_s: float | None = None) -> int:
        """Wait for its end, kill it if that takes longer than `grace_s`, and return its exit code once it was said to
        be over; `last_words_s` bounds the wait for that."""
        assert self._process is not None
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill(grace_s)
            await self._process.wait()
        if self._watching is not None:
            await asyncio.wait((self._watching,), timeout=last_words_s)
        return self._process.returncode or 0

    def _over(self, why: str) -> None:
        on_over, self._on_over = self._on_over, None
        if on_over is not None:
            on_over(why)
