"""Answer the calls of a member that has ended, whatever ended it: its callers wait for nobody else.

The member keeps the reply subjects of its calls in a file of its attempt's folder (see `schemas.held_calls`). A job may
write anything there, so a subject counts only if callers of the tenant may have named it, the words are fixed, and they
go out over a connection of their own, with the key of the tenant's members: it may answer nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moorage.schemas.codec import encode
from moorage.schemas.errors import MoorageError
from moorage.schemas.held_calls import HELD_FILE, HeldCall, file_bytes, held_in, last_words
from moorage.schemas.service import CALL_ERRORS, CONTENT_TYPE, ERROR, ERROR_CODE, CallErrorBody
from moorage.worker.attempt.call_keys import CallKeys

if TYPE_CHECKING:
    from moorage.bus.connection import Connection

#: how long a tenant's connection stays for the next end
KEPT_S: Final = 60.0
#: how long a server that is away is waited for: later, the time of most calls is over
CONNECT_S: Final = 30.0

log = logging.getLogger("moorage.worker")


class OrphanedCalls:
    """The last words of ended members, for one worker process. Used in one event loop."""

    def __init__(self, keys: CallKeys) -> None:
        self._keys = keys
        self._connections: dict[str, asyncio.Task[Connection]] = {}
        self._closing: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, tenant: str, folder: str, most: int) -> None:
        """Answer the calls that a member of the tenant's left in its attempt's folder, at most so many: what ran as
        `member-died`, what waited as `busy`. The file is gone then. Nothing of the attempt may run any more."""
        held = _taken(Path(folder) / HELD_FILE, most, self._keys.prefix, tenant)
        if not held:
            return
        task = asyncio.get_running_loop().create_task(self._answer(tenant, held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let out what is being said, for a moment, and close the connections."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for timer in self._closing.values():
            timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        connecting, self._connections = self._connections, {}
        for opening in connecting.values():
            await _closed(opening)

    async def _answer(self, tenant: str, held: Sequence[HeldCall]) -> None:
        log.info("a member of a service of %s has ended: its %d calls are told", tenant, len(held))
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._connection(tenant)
                for call in held:
                    body, headers = _words(call)
                    while not await connection.publish(call.reply, body, "", headers):
                        await connection.regained()
                await connection.flush()
        except (MoorageError, OSError, TimeoutError) as error:
            log.warning("the callers of a member that has ended cannot be told: %s", error or "the server is away")

    async def _connection(self, tenant: str) -> Connection:
        opening = self._connections.get(tenant)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            opening = self._connections[tenant] = asyncio.get_running_loop().create_task(self._connect(tenant))
        connection = await asyncio.shield(opening)
        if (timer := self._closing.pop(tenant, None)) is not None:
            timer.cancel()
        self._closing[tenant] = asyncio.get_running_loop().call_later(KEPT_S, self._let_go, tenant)
        return connection

    async def _connect(self, tenant: str) -> Connection:
        name = f"moorage worker, for ended members of {tenant}"
        from moorage.bus.connection import connect  # nats-py is slow to import, and few attempts need it

        return await connect(self._keys.context(tenant), name, give_up_after_s=CONNECT_S)

    def _let_go(self, tenant: str) -> None:
        del self._closing[tenant]
        task = asyncio.get_running_loop().create_task(_closed(self._connections.pop(tenant)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _closed(opening: asyncio.Task[Connection]) -> None:
    if not opening.done():
        opening.cancel()
    with contextlib.suppress(MoorageError, OSError, asyncio.CancelledError):
        await (await opening).close()


def _words(call: HeldCall) -> tuple[bytes, dict[str, str]]:
    error, message = last_words(call.ran)
    code, started, _ = CALL_ERRORS[error]
    headers = {ERROR_CODE: str(code), ERROR: error, CONTENT_TYPE: "application/json"}
    return encode(CallErrorBody(error, message, started)), headers


def _taken(path: Path, most: int, prefix: str, tenant: str) -> list[HeldCall]:
    """Read the file and remove it. A job may have put there what is no file, what has no end, or a link."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return []
        return list(held_in(os.pread(file, file_bytes(most), 0), most, prefix, tenant))
    except OSError as error:
        log.warning("%s cannot be read: %s", path, error.strerror)
        return []
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            path.unlink()
