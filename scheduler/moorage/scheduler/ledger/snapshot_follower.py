"""Starts the process that reads the ledger beside the leader and writes a snapshot of it (decision 0003)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import NamedTuple

from moorage.scheduler.core.events import SnapshotTaken
from moorage.scheduler.ledger.snapshots import EXIT_GONE, FOLLOWER_TIMEOUT_S

log = logging.getLogger("moorage.scheduler")


class SnapshotsGone(Exception):
    """The follower cannot read the ledger, because the snapshot before its first record was deleted."""


class Command(NamedTuple):
    """How to start the follower, the process that writes a snapshot of the ledger: arguments, which every user of the
    machine can read, and additions to its environment."""

    argv: list[str]
    env: dict[str, str]


async def take_snapshot(command: Command) -> SnapshotTaken | None:
    """Run the follower and return its snapshot; None if it failed, which is logged. Raises `SnapshotsGone`."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            env={**os.environ, **command.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:  # no room for a process, or an upgrade replaced Python: the term continues
        log.warning("no snapshot of the ledger was written: its process cannot be started: %s", error)
        return None
    try:
        async with asyncio.timeout(FOLLOWER_TIMEOUT_S):
            out, err = await process.communicate()
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            log.warning(
                "no snapshot of the ledger was written: its process took more than %g s and was ended",
                FOLLOWER_TIMEOUT_S,
            )
            return None
        raise
    if process.returncode == EXIT_GONE:
        raise SnapshotsGone
    words = out.decode(errors="replace").split()
    if process.returncode != 0 or len(words) != 3 or not words[1].isdecimal():
        log.warning(
            "no snapshot of the ledger was written: %s",
            err.decode(errors="replace").strip()[-500:] or "its process ended without a message",
        )
        return None
    return SnapshotTaken(words[0], int(words[1]), words[2])
