"""What a reload of the server takes away and gives back, and when a subscription counts as standing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from moorage.bus import connection, subscription
from moorage.bus.connection import Connection, connect
from moorage.bus.contexts import Context
from moorage.bus.embedded import HOST, EmbeddedServer
from moorage.bus.errors import BusError, PermissionRefused
from moorage.bus.transport import Delivery
from tests.waiting import until

USERS: Final = "users: [ { user: moorage"
#: of each message that fills the socket
BYTES: Final = 500_000


class Reloaded:
    """A server with a user `limited`, who may publish anything, and subscribe to its inbox and what `may` says."""

    def __init__(self, server: EmbeddedServer, config: Path) -> None:
        self.server = server
        self._config = config
        self._plain = config.read_text()
        self.context = Context(url=server.url, user="limited", password="p")

    def may(self, *subjects: str) -> None:
        heard = ", ".join(f'"{subject}"' for subject in ("_INBOX.>", *subjects))
        user = f'{{ user: "limited", password: "p", permissions: {{ publish: ">", subscribe: [{heard}] }} }}'
        self._config.write_text(self._plain.replace(USERS, USERS.replace("{", f"{user}, {{", 1), 1))
        os.kill(self.server.pid, signal.SIGHUP)

    @contextlib.asynccontextmanager
    async def with_rights(self, *subjects: str) -> AsyncIterator[None]:
        """`may`, and the server has read it: a new connection of the user may subscribe to the first of them."""
        self.may(*subjects)

        async def is_in() -> bool:
            with contextlib.suppress(BusError):
                async with await connect(self.context, "probe") as probe:
                    await probe.subscribe(subjects[0], lambda _: None)
                    return True
            return False

        await until(is_in)
        yield


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused subscription is tried again soon."""
    monkeypatch.setattr(connection, "WATCH_INTERVAL_S", 0.02)
    monkeypatch.setattr(subscription, "AGAIN_S_MIN", 0.02)
    monkeypatch.setattr(subscription, "AGAIN_S_MAX", 0.2)


@contextlib.asynccontextmanager
async def server_of(folder: Path) -> AsyncIterator[Reloaded]:
    server = await EmbeddedServer.start(folder / "nats")
    try:
        yield Reloaded(server, folder / "nats" / "nats.conf")
    finally:
        await server.stop()


async def test_who_was_refused_is_told_once_that_it_holds_again_each_time(tmp_path: Path) -> None:
    """What was said meanwhile is lost, so whoever listens has to ask for it."""
    told: list[BusError] = []
    regained: list[list[str]] = []
    async with (
        server_of(tmp_path) as reloaded,
        reloaded.with_rights("open.>", "jobs.>"),
        await connect(reloaded.context, "limited", on_error=told.append, on_regained=regained.append) as limited,
        await connect(reloaded.server.url, "sender") as sender,
    ):
        heard: list[bytes] = []
        standing = await limited.subscribe("jobs.A", lambda delivery: heard.append(delivery.data))
        await sender.send([("jobs.A", b"before", "")])
        await until(lambda: heard == [b"before"])
        for times in (1, 2):  # what is refused once more is told once more
            heard.clear()
            reloaded.may("open.>")
            refused = await until(lambda: standing.refused, what="the server has refused it")
            await until(lambda first=refused: standing.refused is not first, what="it was tried again, and refused")
            assert [str(error) for error in told] == ["this NATS user may not subscribe to jobs.a"] * times
            assert isinstance(told[-1], PermissionRefused)
            assert len(regained) == times - 1
            reloaded.may("open.>", "jobs.>")
            await until(lambda n=times: len(regained) == n, what="it holds again")
            assert (regained[-1], standing.refused) == (["jobs.A"], None)
            await sender.send([("jobs.A", b"after", ""), ("jobs.A", b"last", "")])
            await until(lambda: b"last" in heard, what="a message arrives")
            assert heard == [b"after", b"last"], "once each"
        assert limited.reconnects == 0
        assert len(limited._client._subs) == len(limited._subscriptions), "nats-py lists no dead ones"


async def test_answers_come_again_when_the_inbox_may_be_heard_again(tmp_path: Path) -> None:
    regained: list[list[str]] = []
    async with (
        server_of(tmp_path) as reloaded,
        reloaded.with_rights("open.>"),
        await connect(reloaded.context, "asker", inbox_prefix="open.inbox", on_regained=regained.append) as asker,
        await connect(reloaded.server.url, "answers") as answers,
    ):

        def answer(delivery: Delivery) -> None:
            sending.append(asyncio.create_task(answers.send([(delivery.reply, b"yes", "")])))

        sending: list[asyncio.Task[Any]] = []
        await answers.subscribe("asked", answer)
        assert (await asker.request("asked", b"", 20)).data == b"yes"
        reloaded.may("other.>")
        await until(lambda: any(each.refused for each in asker._subscriptions), what="the inbox is refused")
        reloaded.may("open.>")
        await until(lambda: regained, what="the inbox holds again")
        assert (await asker.request("asked", b"", 20)).data == b"yes"
        await asyncio.gather(*sending)


async def test_a_refused_subscription_that_was_ended_is_not_tried_again(tmp_path: Path) -> None:
    regained: list[list[str]] = []
    async with (
        server_of(tmp_path) as reloaded,
        reloaded.with_rights("open.>", "jobs.>"),
        await connect(reloaded.context, "limited", on_regained=regained.append) as limited,
    ):
        ended = await limited.subscribe("jobs.a", lambda _: None)
        kept = await limited.subscribe("jobs.b", lambda _: None)
        reloaded.may("open.>")
        await until(lambda: ended.refused and kept.refused, what="the server has refused both")
        await ended.unsubscribe()
        reloaded.may("open.>", "jobs.>")
        await until(lambda: regained, what="the other one holds again")
        assert (regained, ended.client) == ([["jobs.b"]], None)


@contextlib.asynccontextmanager
async def relay(url: str) -> AsyncIterator[tuple[str, asyncio.Event, bytearray]]:
    """A way to the server of which the bytes of the client are kept, and stand still while the event is not set."""
    there, flows, sent = urlsplit(url), asyncio.Event(), bytearray()
    flows.set()
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(65536):
                if kept is not None:
                    await flows.wait()
                    kept += part
                writer.write(part)
                await writer.drain()
        writer.close()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server, of_server = await asyncio.open_connection(there.hostname, there.port)
        for one in (pump(reader, of_server, sent), pump(to_server, writer, None)):
            tasks.add(asyncio.create_task(one))

    server = await asyncio.start_server(take, HOST, 0)
    try:
        yield f"nats://{HOST}:{server.sockets[0].getsockname()[1]}", flows, sent
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def backed_up(a: Connection, flows: asyncio.Event) -> AsyncIterator[None]:
    """What is sent now waits in nats-py for the socket, which is full; it flows at the end."""
    flows.clear()
    await a.send([("flood", bytes(BYTES), "")] * 14)
    writer: Any = a._client._transport
    await until(lambda: writer._io_writer.transport.get_write_buffer_size() > BYTES, what="the socket is full")
    pings = len(a._client._pongs)
    yield
    await until(lambda: len(a._client._pongs) > pings, what="it waits for the server")
    flows.set()


async def test_a_subscription_stands_only_when_the_server_has_answered_behind_it(nats_url: str, unique: str) -> None:
    """nats-py sends the PING of its `flush` ahead of what waits for the socket, so its PONG says nothing of that."""
    async with relay(nats_url) as (url, flows, sent), await connect(url, "a") as a:
        async with backed_up(a, flows):
            making = asyncio.create_task(a.subscribe(unique, lambda _: None))
        await making
        assert 0 < sent.find(b"SUB %s" % unique.encode()) < sent.rfind(b"PING\r\n")


async def test_a_subscription_has_ended_only_when_the_server_has_answered_behind_that(
    nats_url: str, unique: str
) -> None:
    """What the server sent in between was dropped: a call, for one, of a member that left its group."""
    async with relay(nats_url) as (url, flows, sent), await connect(url, "a") as a:
        standing = await a.subscribe(unique, lambda _: None)
        async with backed_up(a, flows):
            ending = asyncio.create_task(standing.drain())
        await ending
        assert 0 < sent.find(b"UNSUB ") < sent.rfind(b"PING\r\n")
