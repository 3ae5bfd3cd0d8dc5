"""Wait for the end of a process that need not be a child of this one."""

from __future__ import annotations

import asyncio


async def until_ended(pidfd: int) -> None:
    """Wait until the process of a pidfd has ended, which makes the pidfd readable (pidfd_open(2))."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
