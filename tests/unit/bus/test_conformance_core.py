"""Subjects, requests and inboxes: the same scenes on the simulated bus and on nats-server."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter
from typing import Final
from urllib.parse import urlsplit

import pytest

from moorage.bus.connection import connect as connect_to
from moorage.bus.errors import BadSubject, ConnectionClosed, NoResponders, PayloadTooLarge, RequestTimeout
from moorage.bus.inbox import Mux
from moorage.bus.transport import Delivery, Wanted
from tests.unit.bus.both_buses import Connect, all_heard, answering, on_both, world
from tests.waiting import until

__all__ = ["world"]  # the fixture that makes each scene two tests

#: a request that nobody answers is given up after this; in the simulation it costs nothing
SILENCE_S: Final = 0.3


@on_both
async def test_wildcards(connect: Connect, unique: str) -> None:
    a, b = await connect("a"), await connect("b")
    heard: dict[str, list[str]] = {}
    for pattern in ("x", "*", "x.*", "x.>", "*.y", "x.*.z", "*.*", ">", "x.y.z"):
        names = heard[pattern] = []
        await b.subscribe(f"{unique}.{pattern}", lambda d, names=names: names.append(d.subject[len(unique) + 1 :]))
    await a.send([(f"{unique}.{subject}", b"", "") for subject in ("x", "x.y", "x.y.z", "w.y", "x.y.z.v", "w")])
    await all_heard(a, b)
    assert heard == {
        "x": ["x"],
        "*": ["x", "w"],
        "x.*": ["x.y"],
        "x.>": ["x.y", "x.y.z", "x.y.z.v"],
        "*.y": ["x.y", "w.y"],
        "x.*.z": ["x.y.z"],
        "*.*": ["x.y", "w.y"],
        ">": ["x", "x.y", "x.y.z", "w.y", "x.y.z.v", "w"],
        "x.y.z": ["x.y.z"],
    }


@on_both
async def test_order_replies_and_ones_own_messages(connect: Connect, unique: str) -> None:
    a = await connect("a")
    heard: list[Delivery] = []
    await a.subscribe(f"{unique}.*", heard.append)
    assert await a.send((f"{unique}.{n % 3}", b"%d" % n, f"reply.{n}") for n in range(300)) == 300
    await until(lambda: len(heard) == 300)
    assert [(d.subject, d.data, d.reply, d.headers) for d in heard] == [
        (f"{unique}.{n % 3}", b"%d" % n, f"reply.{n}", None) for n in range(300)
    ]
    assert all(one.received_monotonic_s <= two.received_monotonic_s for one, two in itertools.pairwise(heard))


@on_both
async def test_a_message_with_headers_and_a_reply(connect: Connect, unique: str) -> None:
    a = await connect("a")
    heard: list[Delivery] = []
    await a.subscribe(unique, heard.append)
    assert await a.publish(unique, b"1", "reply.x", {"Key": "value"})
    await until(lambda: heard)
    assert (heard[0].data, heard[0].reply, heard[0].headers) == (b"1", "reply.x", {"Key": "value"})
    with pytest.raises(PayloadTooLarge):
        await a.publish(unique, bytes(a.max_payload_bytes - 20), "", {"Key": "x" * 40})
    with pytest.raises(BadSubject):
        await a.publish("a b", b"", "", {"Key": "value"})


@on_both
async def test_what_a_handler_wants_after_its_read_follows_once(connect: Connect, unique: str) -> None:
    a, b = await connect("a"), await connect("b")
    seen: list[str] = []

    def handler(delivery: Delivery) -> None:
        if not seen:
            b.after_read(lambda: seen.append("after"))
        seen.append("heard")

    await b.subscribe(unique, handler)
    await a.send((unique, b"", "") for _ in range(3))
    await until(lambda: len(seen) == 4)
    assert seen[0] == "heard"
    assert sorted(seen) == ["after", "heard", "heard", "heard"]


async def test_what_is_sent_is_with_the_server_when_what_comes_after_the_write_is_called(
    nats_url: str, unique: str
) -> None:
    """The function that is called holds up the loop until another client has the message."""
    address = urlsplit(nats_url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as other:
        lines = other.makefile("rb")
        other.sendall(b'CONNECT {"verbose":false}\r\nSUB %b 1\r\nPING\r\n' % unique.encode())
        while lines.readline() != b"PONG\r\n":
            pass
        async with await connect_to(nats_url, "a") as a:
            heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            a.after_write(lambda: heard.set_result(lines.readline()))
            await a.send([(unique, b"1", "")])
            assert (await heard).startswith(b"MSG")
            await a.send([(unique, b"2", "")])
            await a.written()
            assert [lines.readline() for _ in range(3)][1].startswith(b"MSG")


@on_both
async def test_a_queue_group_shares_and_a_plain_subscription_hears_all(connect: Connect, unique: str) -> None:
    a, b, c = await connect("a"), await connect("b"), await connect("c")
    heard: Counter[str] = Counter()
    for name, connection, queue in (("b", b, "q"), ("c", c, "q"), ("other", c, "r"), ("plain", b, "")):
        await connection.subscribe(unique, lambda _, name=name: heard.update([name]), queue)
    await a.send([(unique, b"", "")] * 200)
    await all_heard(a, b, c)
    await until(lambda: heard["b"] + heard["c"] == heard["other"] == heard["plain"] == 200)
    assert heard["b"] > 0
    assert heard["c"] > 0


@on_both
async def test_requests_answers_silence_and_nobody(connect: Connect, unique: str) -> None:
    a, b = await connect("a"), await connect("b")
    with pytest.raises(NoResponders):
        await a.request(unique, b"x", 30)
    subscription = await b.subscribe(unique, answering(b))
    assert (await a.request(unique, b"x", 5)).data == b"x"
    many = await asyncio.gather(*(a.request(unique, b"%d" % n, 5) for n in range(100)))
    assert [each.data for each in many] == [b"%d" % n for n in range(100)]
    await subscription.unsubscribe()
    await b.flush()
    with pytest.raises(NoResponders):
        await a.request(unique, b"x", 30)
    seen: list[Delivery] = []
    await b.subscribe(unique, seen.append)
    with pytest.raises(RequestTimeout) as silence:
        await a.request(unique, b"late", SILENCE_S, {"traceparent": "00-ä"})
    assert (silence.value.subject, silence.value.timeout_s) == (unique, SILENCE_S)
    await until(lambda: seen, what="the question")
    assert (seen[0].data, seen[0].headers) == (b"late", {"traceparent": "00-ä"})
    await b.send([(seen[0].reply, b"too late", "")])
    await until(lambda: a.late_answers == 1)


@on_both
async def test_what_may_not_leave(connect: Connect, unique: str) -> None:
    a = await connect("a")
    heard: list[Delivery] = []
    await a.subscribe(unique, heard.append)
    large = bytes(a.max_payload_bytes + 1)
    injects = f"{unique}.x 0\r\nPUB {unique} 0\r\n"
    bad = [
        (unique, large, ""),
        ("a b", b"", ""),
        ("", b"", ""),
        (unique, b"1", "r r"),
        (injects, b"", ""),
        (unique, b"", injects),
        # the server would cut the connection
        (unique, b"", "x" * 4080),
        ("x" * 2000, b"", "é" * 1100),
    ]
    assert await a.send([*bad, (unique, b"2", "")]) == 1
    with pytest.raises(PayloadTooLarge):
        await a.request(unique, bytes(a.max_payload_bytes), 1, {"a": "b"})
    with pytest.raises(BadSubject):
        await a.request("a b", b"", 1)
    with pytest.raises(BadSubject):
        await a.request("x" * 4080, b"", 1)
    with pytest.raises(BadSubject):
        await a.publish(unique, b"", "x" * 4080, {"a": "b"})
    for subject in ("a b", "a..b", ".a", "a.", ">.a", "a.>.b", "a.b>", "a*", "", "x" * 2000, injects):
        with pytest.raises(BadSubject):
            await a.subscribe(subject, heard.append)
    await until(lambda: heard)
    assert [each.data for each in heard] == [b"2"]
    await a.close()
    assert a.closed.is_set()
    for use in (a.send([(unique, b"", "")]), a.request(unique, b"", 1), a.subscribe(unique, heard.append), a.flush()):
        with pytest.raises(ConnectionClosed):
            await use


@on_both
async def test_a_close_ends_what_is_awaited(connect: Connect, unique: str) -> None:
    a, b = await connect("a"), await connect("b")
    await b.subscribe(unique, lambda _: None)
    waiting = asyncio.ensure_future(a.request(unique, b"", 30))
    await asyncio.sleep(0)
    await a.close()
    with pytest.raises(ConnectionClosed):
        await waiting


@on_both
async def test_the_sdks_inbox(connect: Connect, unique: str) -> None:
    a, b = await connect("a"), await connect("b")
    await b.subscribe(unique, answering(b))
    mux = await Mux.open(a)
    answers = await asyncio.gather(*(mux.request(unique, b"%d" % n, 5) for n in range(20)))
    assert answers == [b"%d" % n for n in range(20)]
    with pytest.raises(NoResponders):
        await mux.request(f"{unique}.none", b"", 5)
    await mux.close()


@on_both
async def test_a_member_of_a_group_that_is_drained_gets_its_last_message_and_none_later(
    connect: Connect, unique: str
) -> None:
    a, b, c = await connect("a"), await connect("b"), await connect("c")
    leaves: list[bytes] = []
    stays: list[bytes] = []
    leaving = await b.subscribe(unique, lambda d: leaves.append(d.data), "group")
    await c.send([(unique, b"before", "")])
    await c.flush()
    await leaving.drain()
    assert leaves == [b"before"]
    await a.subscribe(unique, lambda d: stays.append(d.data), "group")
    await c.send([(unique, b"behind", "")])
    await until(lambda: stays)
    assert (leaves, stays) == ([b"before"], [b"behind"])


@on_both
async def test_subscriptions_that_are_swapped_get_each_message_once(connect: Connect, unique: str) -> None:
    a, b = await connect("a"), await connect("b")
    wide: list[str] = []
    own: list[str] = []
    former = [await b.subscribe(f"{unique}.*", lambda d: wide.append(d.data.decode()))]
    await a.send([(f"{unique}.x", b"before", "")])
    await all_heard(a, b)
    made = await b.swap(former, [Wanted(f"{unique}.x", lambda d: own.append(d.data.decode()))])
    await b.flush()
    await a.send([(f"{unique}.x", b"behind", ""), (f"{unique}.y", b"of no one", "")])
    await all_heard(a, b)
    assert (wide, own) == (["before"], ["behind"])
    await b.swap(made, [])
    await b.flush()
    await a.send([(f"{unique}.x", b"ended", "")])
    await all_heard(a, b)
    assert own == ["behind"]


@on_both
async def test_the_server_ends_a_subscription_after_the_most_messages_that_it_takes(
    connect: Connect, unique: str
) -> None:
    a, b = await connect("a"), await connect("b")
    heard: list[bytes] = []
    made = await b.swap([], [Wanted(unique, lambda d: heard.append(d.data), 2)])
    await b.flush()
    await a.send([(unique, b"%d" % number, "") for number in range(5)])
    await all_heard(a, b)
    assert heard == [b"0", b"1"]
    with pytest.raises(NoResponders):
        await a.request(unique, b"", 5)
    await b.swap(made, [Wanted(unique, lambda d: heard.append(d.data), 1)])
    await b.flush()
    await a.send([(unique, b"%d" % number, "") for number in range(5, 9)])
    await all_heard(a, b)
    assert heard == [b"0", b"1", b"5"]


@on_both
async def test_a_connection_that_is_made_again_has_all_its_subscriptions(connect: Connect, unique: str) -> None:
    a, b = await connect("a"), await connect("b")
    heard: list[bytes] = []
    await b.subscribe(f"{unique}.standing", lambda d: heard.append(d.data))
    await b.swap([], [Wanted(f"{unique}.swapped", lambda d: heard.append(d.data), 10)])
    await b.reconnect()
    await until(lambda: b.reconnects == 1)
    await b.flush()
    await a.send([(f"{unique}.standing", b"1", ""), (f"{unique}.swapped", b"2", "")])
    await until(lambda: sorted(heard) == [b"1", b"2"])
