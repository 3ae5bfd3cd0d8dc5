"""Ends processes that are not children of this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Final

from moorage.system.pidfds import until_ended

#: between SIGTERM and SIGKILL for jobs that run when all of it ends
JOBS_GRACE_S: Final = 3.0
#: for a supervisor that is just starting, or ending by itself; then it is killed
STARTING_S_MAX: Final = 10.0
STARTING_LOOK_S: Final = 0.05


async def until_gone(pid: int) -> None:
    """Wait until the process has ended; it need not be a child of this one."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await until_ended(pidfd)
    finally:
        os.close(pidfd)


async def end_jobs(state: Path, hard: asyncio.Event) -> None:
    """End the worker's supervisor, which runs on when its agent ends, and its jobs; without grace if `hard` is set."""
    from moorage.worker.agent.run import SUPERVISOR_FOLDER
    from moorage.worker.supervisor.client import Supervised, SupervisorError

    folder = state / SUPERVISOR_FOLDER
    if not folder.exists():
        return
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + STARTING_S_MAX
    while True:
        try:
            supervised = await Supervised.connect(folder, spawn_if_absent=False)
            break
        except (SupervisorError, OSError):
            # its agent may have ended while it was starting: it does not listen yet, and nobody else would end it
            found = supervisors_of(folder)
            if not found:
                return
            if loop.time() > ends_s:
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(STARTING_LOOK_S)
    gone = asyncio.create_task(until_gone(supervised.identity.pid))  # the socket closes a little earlier
    await asyncio.sleep(0)  # its pidfd is open before anything ends
    asks = [asyncio.create_task(supervised.shutdown(JOBS_GRACE_S)), asyncio.create_task(hard.wait())]
    await asyncio.wait({gone, asks[1]}, timeout=2 * JOBS_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
    if not gone.done():  # again, without grace: a supervisor that is killed itself leaves its jobs' children behind
        asks.append(asyncio.create_task(supervised.shutdown(0.0)))
        await asyncio.wait({gone}, timeout=JOBS_GRACE_S)
    if not gone.done():
        supervised.kill()
        await asyncio.wait({gone}, timeout=JOBS_GRACE_S)
    for task in (gone, *asks):
        task.cancel()
    await asyncio.gather(gone, *asks, return_exceptions=True)
    supervised.close()


async def end_jobs_now(state: Path) -> None:
    """End the supervisor and its jobs as `end_jobs` does, without grace."""
    at_once = asyncio.Event()
    at_once.set()
    await end_jobs(state, at_once)


def supervisors_of(folder: Path) -> list[int]:
    """Return the pids of the supervisors of this folder, those that do not listen yet or no longer included."""
    wanted = (b"moorage.worker.supervisor", b"--state", os.fsencode(folder))
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if any(tuple(words[at : at + 3]) == wanted for at in range(len(words) - 2)):
                found.append(int(entry.name))
    return found
