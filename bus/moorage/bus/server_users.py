"""The users of a site's nats-servers as the servers see them: who is connected, since when, and who was.

The servers' system account answers that, on whatever reply subject the asker names, and there it is an order where
JetStream's own API hears it. So `SYSTEM` is no user of that account. It is alone in one of its own, which imports what
it may ask, to list connections and to end them, and nothing else. There the answers arrive, wherever they were to go.

A server that reads its configuration again cuts off the clients whose keys are gone, and no leaf nodes: those have to
be ended, and are refused when they come again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from moorage.bus.connection import Connection
from moorage.bus.framing import new_inbox
from moorage.bus.transport import Delivery
from moorage.schemas.roles import Rights

SYSTEM_ACCOUNT: Final = "$SYS"
#: what that exports, and how each is called where it is imported: by its own name, every account has another CONNZ
EXPORTS: Final = {
    "$SYS.REQ.SERVER.*.CONNZ": "moorage.servers.*.CONNZ",
    "$SYS.REQ.SERVER.*.KICK": "moorage.servers.*.KICK",
}
#: the key of the user, and its inbox
SYSTEM: Final = "system.main"
SYSTEM_INBOX: Final = f"_INBOX.{SYSTEM}"
RIGHTS: Final = Rights(publish=tuple(EXPORTS.values()), subscribe=(f"{SYSTEM_INBOX}.>",))
#: how long servers are waited for that do not answer, in seconds
ANSWER_S: Final = 2.0
#: connections in one answer of a server
_PAGE: Final = 500
_ALL_STATES: Final = 2
LEAF: Final = "Leafnode"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A connection to a server, now or before. `user` is a public key, the subject of a certificate, or a name; times
    are texts of RFC 3339, `stop` is "" while it lasts, `tls_version` is "" without TLS."""

    cid: int
    kind: str
    ip: str
    user: str = msgspec.field(name="authorized_user", default="")
    nkey: str = ""
    account: str = ""
    name: str = ""
    start: str = ""
    last_activity: str = ""
    stop: str = ""
    tls_version: str = ""
    server: str = ""  # the server's id, which is not in its answer's rows
    server_name: str = ""

    @property
    def who(self) -> str:
        return self.nkey or self.user


class _Server(msgspec.Struct, frozen=True):
    id: str
    name: str


class _Page(msgspec.Struct, frozen=True):
    total: int
    connections: list[Seen] = []
    now: str = ""


class _Answer(msgspec.Struct, frozen=True):
    server: _Server
    data: _Page


async def connections(connection: Connection, servers: int) -> tuple[list[Seen], int]:
    """Return the connections of every server that answers, those that have ended too, and how many servers answered.

    `servers` is how many are expected: with fewer, this takes ANSWER_S.
    """
    found: list[Seen] = []
    first = await _asked(connection, "PING", 0, servers)
    for answer in first:
        rows = list(answer.data.connections)
        while len(rows) < answer.data.total:
            more = await _asked(connection, answer.server.id, len(rows), 1)
            if not more or not more[0].data.connections:
                break
            rows += more[0].data.connections
        found += [
            msgspec.structs.replace(each, server=answer.server.id, server_name=answer.server.name) for each in rows
        ]
    return found, len(first)


async def cut(connection: Connection, seen: Sequence[Seen]) -> None:
    """End connections; whoever is still allowed to comes back by itself."""
    for each in seen:
        await _ask(connection, f"moorage.servers.{each.server}.KICK", {"cid": each.cid}, 1)


async def _asked(connection: Connection, server: str, offset: int, count: int) -> list[_Answer]:
    asked = {"auth": True, "state": _ALL_STATES, "limit": _PAGE, "offset": offset}
    answers = await _ask(connection, f"moorage.servers.{server}.CONNZ", asked, count)
    return [msgspec.json.decode(answer, type=_Answer) for answer in answers]


async def _ask(connection: Connection, subject: str, asked: Mapping[str, object], count: int) -> list[bytes]:
    """Return the answers of `count` servers, or of those that answer within ANSWER_S."""
    answers: asyncio.Queue[bytes] = asyncio.Queue()

    def on_answer(delivery: Delivery) -> None:
        if delivery.data:  # else the server says that there are no responders
            answers.put_nowait(delivery.data)

    inbox = new_inbox(SYSTEM_INBOX)
    subscription = await connection.subscribe(inbox, on_answer)
    try:
        await connection.publish(subject, msgspec.json.encode(asked), inbox, {})
        found: list[bytes] = []
        until_s = time.monotonic() + ANSWER_S
        while len(found) < count:
            try:
                found.append(await asyncio.wait_for(answers.get(), until_s - time.monotonic()))
            except TimeoutError:
                break
        return found
    finally:
        await subscription.unsubscribe()
