"""Reading as nats-py's own parser reads, however the socket cuts what the server says; and writing in the same turn."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from moorage.bus.connection import connect
from moorage.bus.direct import DirectClient, DirectParser, callback_of
from moorage.bus.errors import NoResponders
from moorage.bus.transport import Delivery
from tests.waiting import until

HEADERS = b"NATS/1.0\r\nStatus: 503\r\n\r\n"


class Heard(DirectClient):
    """Subscription 1 has a handler of ours, 2 is nats-py's own, 3 has ended."""

    def __init__(self, parser: type[Parser]) -> None:
        super().__init__()
        self._ps = parser(self)
        self._error_cb = self.on_error
        self.heard: list[Any] = []

        class Ours:
            _cb = staticmethod(callback_of(self.on_delivery))

        self._subs[1] = Ours()  # type: ignore[assignment]

    def on_delivery(self, delivery: Delivery) -> None:
        if delivery.data == b"a defect":
            raise ValueError("a defect")
        self.heard.append((delivery.subject, delivery.reply, delivery.data, delivery.headers))

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if self.handler_of(sid) is None:
            self.heard.append((sid, subject, reply, data, headers or b""))
            return
        await super()._process_msg(sid, subject, reply, data, headers)

    async def _process_ping(self) -> None:
        self.heard.append("ping")

    async def _process_err(self, err_msg: str) -> None:
        self.heard.append(err_msg)

    async def on_error(self, error: Exception) -> None:
        self.heard.append(str(error))


def said(large: int = 10_000) -> bytes:
    """What a server may say: plain messages, with and without a reply subject, and everything else between them."""
    return b"".join(
        (
            b"MSG a.b 1 5\r\nhello\r\n",
            b"MSG a.b 1 _INBOX.x.1 0\r\n\r\n",
            b"PING\r\n",
            b"HMSG a.c 1 %d %d\r\n%s\r\n" % (len(HEADERS), len(HEADERS), HEADERS),
            b"MSG a.d 2 back 9\r\nMSG x 1 5\r\n",
            b"MSG a.d 3 2\r\n\r\n\r\n",
            b"-ERR 'Permissions Violation'\r\n",
            b"MSG a.b 1 8\r\na defect\r\n",
            b"MSG large 1 %d\r\n" % (10 * large) + b"0123456789" * large + b"\r\n",
            "MSG gr\u00fc\u00df 1 3\r\n".encode() + b"\xff\x00\n\r\n",
            b"MSG\ta.b  1   1\r\nx\r\n",
            b"+OK\r\nMSG a.b 1 5\r\nworld\r\n",
        )
    )


async def parsed(parser: type[Parser], parts: list[bytes]) -> list[Any]:
    client = Heard(parser)
    for part in parts:
        await client._ps.parse(part)
    assert not client._ps.buf
    return client.heard


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 64, 1000, 40_000, 10**6])
async def test_however_it_is_cut_the_same_is_heard_as_by_nats_py(size: int) -> None:
    text = said()
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    expected = await parsed(Parser, [text])
    assert len(expected) == 12
    assert await parsed(DirectParser, parts) == expected


async def test_cut_anywhere_and_said_twice() -> None:
    text, chance = said() * 2, random.Random(7)
    expected = await parsed(Parser, [text])
    for _ in range(50):
        cuts = sorted(chance.sample(range(len(text)), 9))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert await parsed(DirectParser, parts) == expected


class Read:
    """A `Heard` whose socket is a reader that is fed by hand; its task reads as nats-py's does."""

    def __init__(self) -> None:
        self.client = Heard(DirectParser)
        self.reader = asyncio.StreamReader()
        self.client._transport = transport = TcpTransport()  # type: ignore[no-untyped-call]
        transport._io_reader = self.reader
        self.client.read_at_once()
        self.task = asyncio.create_task(self.read())

    async def read(self) -> None:
        while data := await self.reader.read(32_768):
            await self.client._ps.parse(data)

    async def end(self) -> list[Any]:
        self.reader.feed_eof()
        await self.task
        await asyncio.gather(*self.client._tasks)
        return self.client.heard


async def test_what_is_read_is_heard_in_the_same_turn() -> None:
    read = Read()
    await asyncio.sleep(0)  # its task waits for the first byte
    read.reader.feed_data(b"MSG a.b 1 5\r\nhello\r\nMSG a.b 1 5\r\nwor")
    read.reader.feed_data(b"ld\r\n")
    assert [data for _, _, data, _ in read.client.heard] == [b"hello", b"world"]
    await read.end()


async def test_what_waits_for_the_end_of_a_read_comes_behind_all_of_it_and_before_the_loops_next_turn() -> None:
    read, seen = Read(), list[bytes]()

    def handler(delivery: Delivery) -> None:
        seen.append(delivery.data)
        if delivery.data == b"first":
            read.client.after_read(lambda: seen.append(b"behind"))

    read.client._subs[1]._cb = callback_of(handler)
    await asyncio.sleep(0)  # its task waits for the first byte
    read.reader.feed_data(b"MSG a 1 5\r\nfirst\r\nMSG a 1 6\r\nsecond\r\nMSG a 1 5\r\nthi")
    assert seen == [b"first", b"second", b"behind"]
    read.reader.feed_data(b"rd\r\n")
    read.client.after_read(lambda: seen.append(b"later"))
    assert seen[3:] == [b"third"]
    await asyncio.sleep(0)
    assert seen[4:] == [b"later"]
    await read.end()


async def test_what_is_heard_at_once_overtakes_nothing_that_its_task_has_still_to_read() -> None:
    text, chance = said(large=1) * 2, random.Random(11)
    expected = await parsed(Parser, [text])
    for _ in range(100):
        cuts = sorted(chance.sample(range(len(text)), 12))
        read = Read()
        for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
            read.reader.feed_data(text[a:b])
            for _ in range(chance.choice((0, 0, 1, 2, 3))):
                await asyncio.sleep(0)
        heard = await read.end()
        # that a handler failed is told by a task of its own, so a little later
        assert [each for each in heard if each != "a defect"] == [each for each in expected if each != "a defect"]
        assert heard.count("a defect") == expected.count("a defect")


async def test_a_message_that_never_ends_is_held_once_and_bounded_by_what_nats_py_takes() -> None:
    client = Heard(DirectParser)
    await client._ps.parse(b"MSG large 1 10000000\r\n")
    await client._ps.parse(b"x")
    held = client._ps.buf
    for _ in range(300):
        await client._ps.parse(b"x" * 32_768)
    assert client._ps.buf is held, "put together anew for each read it would be gigabytes that are copied"
    assert len(held) == 300 * 32_768 + 1
    assert not client.heard


async def test_what_is_sent_leaves_in_the_turn_that_sends_it(nats_url: str, unique: str) -> None:
    async with await connect(nats_url, "a") as a, await connect(nats_url, "b") as b:
        heard: list[bytes] = []
        await b.subscribe(unique, lambda delivery: heard.append(delivery.data))
        sent = a._client.stats["out_msgs"]
        await a.send([(unique, b"one", ""), (unique, b"two", "")])
        assert a._client.stats["out_msgs"] == sent + 2
        assert not a._client._pending  # handed to the socket, in no later turn
        await a.flush()
        await b.flush()
        assert heard == [b"one", b"two"]


async def test_an_append_leaves_in_the_turn_that_sends_it_with_its_headers(nats_url: str, unique: str) -> None:
    async with await connect(nats_url, "a") as a, await connect(nats_url, "b") as b:
        heard: list[Delivery] = []
        await b.subscribe(unique, heard.append)
        headers = {"One": "1", "Two": "zwei \u00fc"}
        asking = asyncio.create_task(a.request(unique, b"body", 5, headers))
        await asyncio.sleep(0)
        assert a._client.stats["out_msgs"]
        assert not a._client._pending
        await a.flush()
        await b.flush()
        asking.cancel()
        assert [(each.data, each.headers) for each in heard] == [(b"body", headers)]


async def test_a_headers_value_is_no_door_for_another_header(nats_url: str, unique: str) -> None:
    async with await connect(nats_url, "a") as a, await connect(nats_url, "b") as b:
        heard: list[Delivery] = []
        await b.subscribe(f"{unique}.>", heard.append)
        odd = {"One": "1\r\nTwo: 2"}
        asking = asyncio.create_task(a.request(f"{unique}.x", b"body", 5, odd))
        await asyncio.sleep(0)
        await a.flush()
        await b.flush()
        asking.cancel()
        assert [(each.data, list(each.headers or ())) for each in heard] == [(b"body", ["One"])]


async def test_requests_of_one_turn_leave_in_one_write(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them that left ahead of the others would have a record of the ledger to itself."""
    async with await connect(nats_url, "a") as a, await connect(nats_url, "b") as b:

        def on_question(delivery: Delivery) -> None:
            answering.append(asyncio.ensure_future(b.send([(delivery.reply, delivery.data, "")])))

        answering: list[asyncio.Future[int]] = []
        await b.subscribe(unique, on_question)
        writes: list[int] = []
        stream = a._client._transport._io_writer.transport  # type: ignore[union-attr]
        write = stream.writelines

        def noted(pending: list[bytes]) -> None:
            writes.append(len(pending))
            write(pending)

        monkeypatch.setattr(stream, "writelines", noted)
        answers = await asyncio.gather(*(a.request(unique, b"%d" % number, 5) for number in range(100)))
        assert [answer.data for answer in answers] == [b"%d" % number for number in range(100)]
        assert writes == [100]


async def test_a_subscription_of_ours_has_no_task_and_leaves_nothing(nats_url: str, unique: str) -> None:
    async with await connect(nats_url, "a") as a:
        tasks = len(asyncio.all_tasks())
        heard: list[str] = []
        many = [await a.subscribe_ahead(f"{unique}.{at}", lambda each: heard.append(each.subject)) for at in range(100)]
        assert len(asyncio.all_tasks()) == tasks
        await a.send([(f"{unique}.{at}", b"", "") for at in range(100)])
        await a.flush()
        assert heard == [each.subject for each in many]
        for each in many[1:]:
            await each.unsubscribe()
        await a.send([(f"{unique}.{at}", b"", "") for at in range(100)])
        await a.flush()
        assert heard[100:] == [many[0].subject]
        with pytest.raises(NoResponders):
            await a.request(f"{unique}.99", b"", 5)
        assert (len(a._client._subs), len(a._subscriptions)) == (2, 2)  # and the inbox


async def test_what_the_socket_has_no_room_for_follows(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By nats-py's task, and at once: the next ping would take it, too."""
    async with await connect(nats_url, "a") as a, await connect(nats_url, "b") as b:
        heard: list[bytes] = []
        await b.subscribe(unique, lambda delivery: heard.append(delivery.data))
        client, rests = a._client, 0
        flush = client._flush_pending
        stream = client._transport._io_writer.transport  # type: ignore[union-attr]

        async def noted(force_flush: bool = False) -> None:
            nonlocal rests
            rests += 1
            await flush(force_flush)

        monkeypatch.setattr(client, "_flush_pending", noted)
        monkeypatch.setattr(stream, "get_write_buffer_size", lambda: 1)
        asking = [asyncio.create_task(a.request(unique, b"%d" % number, 60)) for number in range(3)]
        for _ in range(4):
            await asyncio.sleep(0)
        assert rests == 1
        await until(lambda: heard == [b"0", b"1", b"2"])
        for each in asking:
            each.cancel()


async def test_what_is_pending_on_a_lost_socket_ends_the_connection_without_an_error(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `writelines` of asyncio raises TypeError then, in Python 3.12 and until 3.13.6."""
    a = await connect(nats_url, "a")
    client = a._client
    assert isinstance(client._transport, TcpTransport)
    assert client._transport._io_writer is not None
    stream = client._transport._io_writer.transport

    def raises(_: object) -> None:
        raise TypeError("'NoneType' object is not callable")

    monkeypatch.setattr(stream, "writelines", raises)
    stream.abort()
    client.put(unique, b"x", "")
    with pytest.raises(ConnectionResetError):
        await client.close()
    assert not client._pending
    await a.close()


async def test_the_hooks_are_where_they_are_looked_for() -> None:
    """A release of nats-py without them would be slower, and nobody would see why."""
    client = Client()
    assert {"_ps", "_pending", "_pending_data_size", "_transport", "_flush_queue"} <= vars(client).keys()
    assert all(map(callable, (client._process_msg, client._flush_pending)))
    reader = asyncio.StreamReader()
    assert {"_buffer", "_waiter"} <= vars(reader).keys()
    assert {"_io_reader", "_io_writer"} <= vars(TcpTransport()).keys()  # type: ignore[no-untyped-call]
