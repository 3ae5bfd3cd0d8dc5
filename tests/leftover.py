"""Processes that a test begins end with it, also where it fails before it has waited for them."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from typing import Final

#: that a process which is asked to end may take for it; a node has children to end
ENDED_S_MAX: Final = 60.0

_begun: list[Process] = []


def ends_with_the_test(process: Process) -> Process:
    """Remember it for `end_processes`, which `tests/conftest.py` calls behind each `async def` test."""
    _begun.append(process)
    return process


async def end_processes() -> list[int]:
    """End what still runs: asked first, and killed when that is not enough. Returns the pids."""
    left = [process for process in _begun if process.returncode is None]
    _begun.clear()
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(ENDED_S_MAX):
                await process.communicate()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
    return [process.pid for process in left]
