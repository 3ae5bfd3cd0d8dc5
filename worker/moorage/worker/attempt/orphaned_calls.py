"""Answer the calls of a member that has ended, whatever ended it: its callers wait for nobody else.

The member keeps the reply subjects of its calls in a file of its attempt's folder (see `schemas.held_calls`). A job may
write anything there, so a subject counts only if callers of the tenant may have named it, the words are fixed, and they
go out over a connection of their own, with the key of the tenant's members: it may answer nobody else.

Calls that the member had not read are in no file. Their callers ask for them, and hear for a minute that it has ended.
Those whose inboxes are in the file are told that they had better ask now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import MoorageError, Refused
from moorage.schemas.held_calls import (
    HELD_FILE,
    HeldCall,
    Holder,
    file_bytes,
    held_in,
    holder_in,
    inboxes_in,
    last_words,
)
from moorage.schemas.roles import IMPORTED_REPLY, may_answer
from moorage.schemas.service import (
    CALL_ERRORS,
    CONTENT_TYPE,
    ENDED,
    ERROR,
    ERROR_CODE,
    CallErrorBody,
    Found,
    Sought,
)
from moorage.schemas.subjects import Subjects, asked_of
from moorage.worker.attempt.call_keys import CallKeys

if TYPE_CHECKING:
    from moorage.bus.connection import Connection
    from moorage.bus.transport import Delivery

#: how long a tenant's connection stays for the next end
KEPT_S: Final = 60.0
#: how long a server that is away is waited for: later, the time of most calls is over
CONNECT_S: Final = 30.0
#: of a tenant, services whose callers are told of ended members; and members of each, the newest
SERVICES_MAX: Final = 64
MEMBERS_MAX: Final = 16

_decode_sought: Final = Decoder[Sought](Sought)

log = logging.getLogger("moorage.worker")


class _Left(NamedTuple):
    """What a member has left: calls, the inboxes of its callers, and who it was."""

    calls: list[HeldCall]
    inboxes: set[str]
    holder: Holder | None


class _Voice(NamedTuple):
    """A tenant's connection, and over it the ended members by the subject of their service's calls."""

    connection: Connection
    ended: dict[str, list[str]]


class OrphanedCalls:
    """The last words of ended members, for one worker process. Used in one event loop."""

    def __init__(self, keys: CallKeys) -> None:
        self._keys = keys
        self._voices: dict[str, asyncio.Task[_Voice]] = {}
        self._closing: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, tenant: str, folder: str, most: int) -> None:
        """Answer the calls that a member of the tenant's left in its attempt's folder, at most so many: what ran as
        `member-died`, what waited as `busy`. Tell who may have lost others that it has ended. The file is gone then.
        Nothing of the attempt may run any more."""
        left = _taken(Path(folder) / HELD_FILE, most, self._keys.prefix, tenant)
        if left is not None and (left.calls or left.holder):
            self._begin(self._answer(tenant, left))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
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
        connecting, self._voices = self._voices, {}
        for opening in connecting.values():
            await _closed(opening)

    async def _answer(self, tenant: str, left: _Left) -> None:
        log.info("a member of a service of %s has ended: its %d calls are told", tenant, len(left.calls))
        try:
            async with asyncio.timeout(CONNECT_S):
                voice = await self._voice(tenant)
                connection, subject = voice.connection, await self._take_over(voice, tenant, left.holder)
                for call in left.calls:
                    body, headers = _words(call)
                    while not await connection.publish(call.reply, body, "", headers):
                        await connection.regained()
                if subject:
                    await connection.send([(f"{inbox}.{ENDED}", subject.encode(), "") for inbox in left.inboxes])
                await connection.flush()
        except (MoorageError, OSError, TimeoutError) as error:
            log.warning("the callers of a member that has ended cannot be told: %s", error or "the server is away")

    async def _take_over(self, voice: _Voice, tenant: str, holder: Holder | None) -> str:
        """Hear what callers ask of the service, to say that this member has ended; return the subject of its calls, ""
        where nothing is said."""
        if holder is None:
            return ""
        subject = Subjects(self._keys.prefix).call(tenant, holder.service)
        members = voice.ended.get(subject)
        if members is None:
            if len(voice.ended) >= SERVICES_MAX:
                return ""
            members = voice.ended[subject] = []

            def on_asked(delivery: Delivery) -> None:
                if self._is_question(subject, delivery):
                    self._begin(_say_ended(voice.connection, members, delivery.reply))

            await voice.connection.subscribe(asked_of(subject), on_asked)
        members.append(holder.member)
        del members[:-MEMBERS_MAX]
        return subject

    def _is_question(self, subject: str, delivery: Delivery) -> bool:
        """Return whether a caller asks for calls, which may be told here."""
        reply = delivery.reply
        if not reply or reply.startswith(f"{IMPORTED_REPLY}.") or not may_answer(self._keys.prefix, subject, reply):
            return False
        try:
            return bool(_decode_sought(delivery.data).calls)
        except Refused:
            return False

    async def _voice(self, tenant: str) -> _Voice:
        opening = self._voices.get(tenant)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            opening = self._voices[tenant] = asyncio.get_running_loop().create_task(self._connect(tenant))
        voice = await asyncio.shield(opening)
        if (timer := self._closing.pop(tenant, None)) is not None:
            timer.cancel()
        self._closing[tenant] = asyncio.get_running_loop().call_later(KEPT_S, self._let_go, tenant)
        return voice

    async def _connect(self, tenant: str) -> _Voice:
        name = f"moorage worker, for ended members of {tenant}"
        from moorage.bus.connection import connect  # nats-py is slow to import, and few attempts need it

        return _Voice(await connect(self._keys.context(tenant), name, give_up_after_s=CONNECT_S), {})

    def _let_go(self, tenant: str) -> None:
        del self._closing[tenant]
        self._begin(_closed(self._voices.pop(tenant)))


async def _say_ended(connection: Connection, members: list[str], reply: str) -> None:
    with contextlib.suppress(MoorageError, RuntimeError):
        await connection.send([(reply, encode(Found(member, ended=True)), "") for member in members])


async def _closed(opening: asyncio.Task[_Voice]) -> None:
    if not opening.done():
        opening.cancel()
    with contextlib.suppress(MoorageError, OSError, asyncio.CancelledError):
        await (await opening).connection.close()


def _words(call: HeldCall) -> tuple[bytes, dict[str, str]]:
    error, message = last_words(call.ran)
    code, started, _ = CALL_ERRORS[error]
    headers = {ERROR_CODE: str(code), ERROR: error, CONTENT_TYPE: "application/json"}
    return encode(CallErrorBody(error, message, started)), headers


def _taken(path: Path, most: int, prefix: str, tenant: str) -> _Left | None:
    """Read the file and remove it. A job may have put there what is no file, what has no end, or a link."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        data = os.pread(file, file_bytes(most), 0)
        calls = list(held_in(data, most, prefix, tenant))
        return _Left(calls, inboxes_in(data, most, prefix, tenant), holder_in(data, most))
    except OSError as error:
        log.warning("%s cannot be read: %s", path, error.strerror)
        return None
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            path.unlink()
