"""Slow consumers, key-value buckets and object stores: the same scenes on the simulated bus and on nats-server.

Buckets and object stores are streams, laid out as NATS's clients lay them out (ADR-8 and ADR-20 of NATS), with nothing
of their own at the server: what is compared is what a client of one would meet.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from moorage.bus.errors import JetStreamRefused
from moorage.bus.jetstream import ERR_WRONG_LAST_SEQUENCE, EXPECTED_LAST_SUBJECT_SEQUENCE, Ack, JetStream, JsError
from moorage.bus.transport import Delivery
from moorage.testing.bus.bus import SimulatedBus, SimulatedClock
from moorage.testing.bus.processes import Process
from tests.unit.bus.both_buses import Connect, all_heard, on_both, world
from tests.waiting import until

__all__ = ["world"]  # the fixture that makes each scene two tests

BURST: Final = 5_000
OPERATION: Final = "KV-Operation"
ROLLUP: Final = "Nats-Rollup"


# -------------------------------------------------------------------------------------------------- slow consumers


@on_both
async def test_a_burst_is_delivered_whole_and_in_order(connect: Connect, unique: str) -> None:
    """No queue before a handler overflows. The order is that of a subscription, which may have many subjects."""
    reader, sender = await connect("reader"), await connect("sender")
    heard: list[Delivery] = []
    await reader.subscribe(f"{unique}.*", heard.append)
    await sender.send([(f"{unique}.{'xy'[number % 2]}", b"%d" % number, "") for number in range(BURST)])
    await until(lambda: len(heard) == BURST, what="the burst")
    assert [int(delivery.data) for delivery in heard] == list(range(BURST))


@on_both
async def test_a_slow_handler_holds_up_its_own_connection_alone(connect: Connect, unique: str) -> None:
    """One that takes its time with each message, and one that breaks, lose nothing of theirs or of another client."""
    reader, other, sender = await connect("reader"), await connect("other"), await connect("sender")
    slow: list[int] = []
    quick: list[int] = []

    def take(delivery: Delivery) -> None:
        number = int(delivery.data)
        slow.append(sum(range(2_000)) and number)
        if number % 100 == 0:
            raise RuntimeError("a defect of the handler's own")

    await reader.subscribe(unique, take)
    await other.subscribe(unique, lambda delivery: quick.append(int(delivery.data)))
    await all_heard(sender, reader, other)
    await sender.send([(unique, b"%d" % number, "") for number in range(1_000)])
    await until(lambda: len(slow) == len(quick) == 1_000, what="both readers'")
    assert slow == quick == list(range(1_000))


def test_a_stopped_process_hears_all_that_waited_in_its_order() -> None:
    bus, clock = SimulatedBus(), SimulatedClock()

    async def scene() -> list[bytes]:
        process = Process("reader")
        heard: list[bytes] = []

        async def read() -> Any:
            return await bus.connect("reader").subscribe("s", lambda message: heard.append(message.data))

        await process.run(read())
        process.stop()
        sender = bus.connect("sender")
        await sender.send([("s", b"%d" % number, "") for number in range(10)])
        await all_heard(sender, bus.connect("another"))
        assert heard == []
        process.go_on()
        await until(lambda: len(heard) == 10)
        return heard

    assert clock.run(scene()) == [b"%d" % number for number in range(10)]


# ------------------------------------------------------------------------------------------------ key-value buckets


class Bucket:
    """A key-value bucket with one revision a key, as clients make it."""

    def __init__(self, js: JetStream, name: str) -> None:
        self.js = js
        self.name = name
        self.stream = f"KV_{name}"

    async def create(self) -> None:
        await self.js.ensure_stream(
            {
                "name": self.stream,
                "subjects": [f"$KV.{self.name}.>"],
                "storage": "file",
                "max_msgs_per_subject": 1,
                "discard": "new",
                "allow_rollup_hdrs": True,
                "deny_delete": True,
                "allow_direct": True,
            }
        )

    async def put(self, key: str, value: bytes, revision: int | None = None, **headers: str) -> Any:
        """With `revision` only if that is the key's last; 0: if there is none."""
        expected = {} if revision is None else {EXPECTED_LAST_SUBJECT_SEQUENCE: str(revision)}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.js.append(f"$KV.{self.name}.{key}", value, {**expected, **named} or None)

    async def get(self, key: str) -> tuple[int, bytes, str] | None:
        """Its revision, its value, and the operation that put it there: empty for a plain one."""
        found = await self.js.get_last(self.stream, f"$KV.{self.name}.{key}")
        return None if found is None else (found.seq, found.data, (found.headers or {}).get(OPERATION, ""))

    async def keys(self) -> set[str]:
        info = await self.js.stream_info(self.stream, f"$KV.{self.name}.>")
        return {subject.removeprefix(f"$KV.{self.name}.") for subject in info.subjects}


def _refused(answer: Any) -> int:
    assert isinstance(answer, JsError)
    return answer.err_code


@on_both
async def test_a_bucket_keeps_the_newest_of_each_key(connect: Connect, unique: str) -> None:
    bucket = Bucket(JetStream(await connect("kv")), unique)
    await bucket.create()
    assert await bucket.get("a") is None
    assert [await bucket.put(key, value) for key, value in (("a", b"1"), ("b.c", b"2"), ("a", b"3"))] == [
        Ack(bucket.stream, seq) for seq in (1, 2, 3)
    ]
    assert await bucket.get("a") == (3, b"3", "")
    assert await bucket.keys() == {"a", "b.c"}
    assert (await bucket.js.stream_info(bucket.stream)).messages == 2
    [newest] = await bucket.js.direct_get_batch(bucket.stream, seq=1, next_by_subject=f"$KV.{unique}.a")
    assert (newest.seq, newest.data) == (3, b"3")
    assert await bucket.js.get_message(bucket.stream, 1) is None
    with pytest.raises(JetStreamRefused, match="not permitted"):
        await bucket.js.delete_message(bucket.stream, 3)


@on_both
async def test_a_key_is_created_once_and_updated_from_the_revision_that_was_read(connect: Connect, unique: str) -> None:
    bucket = Bucket(JetStream(await connect("kv")), unique)
    await bucket.create()
    assert await bucket.put("a", b"1", revision=0) == Ack(bucket.stream, 1)
    assert _refused(await bucket.put("a", b"2", revision=0)) == ERR_WRONG_LAST_SEQUENCE
    assert await bucket.put("b", b"other") == Ack(bucket.stream, 2)
    assert await bucket.put("a", b"2", revision=1) == Ack(bucket.stream, 3)
    assert _refused(await bucket.put("a", b"3", revision=1)) == ERR_WRONG_LAST_SEQUENCE
    assert _refused(await bucket.put("a", b"3", revision=9)) == ERR_WRONG_LAST_SEQUENCE
    assert await bucket.get("a") == (3, b"2", "")


@on_both
async def test_a_deleted_key_leaves_a_marker_and_a_purged_one_nothing_else(connect: Connect, unique: str) -> None:
    bucket = Bucket(JetStream(await connect("kv")), unique)
    await bucket.create()
    await bucket.put("a", b"1")
    assert await bucket.put("a", b"", KV_Operation="DEL") == Ack(bucket.stream, 2)
    assert await bucket.get("a") == (2, b"", "DEL")
    assert _refused(await bucket.put("a", b"2", revision=0)) == ERR_WRONG_LAST_SEQUENCE
    assert await bucket.put("a", b"2", revision=2) == Ack(bucket.stream, 3)
    assert await bucket.put("a", b"", KV_Operation="PURGE", Nats_Rollup="sub") == Ack(bucket.stream, 4)
    assert await bucket.get("a") == (4, b"", "PURGE")
    assert (await bucket.js.stream_info(bucket.stream)).messages == 1
    assert await bucket.js.purge(bucket.stream, subject=f"$KV.{unique}.a") == 1
    assert await bucket.get("a") is None
    assert await bucket.put("a", b"new", revision=0) == Ack(bucket.stream, 5)


@on_both
async def test_who_watches_a_bucket_hears_every_change_in_order(connect: Connect, unique: str) -> None:
    link, watcher = await connect("kv"), await connect("watcher")
    bucket = Bucket(JetStream(link), unique)
    await bucket.create()
    heard: list[Delivery] = []
    await watcher.subscribe(f"$KV.{unique}.>", heard.append)
    await all_heard(link, watcher)
    for number in range(20):
        await bucket.put(f"k{number % 3}", b"%d" % number)
    await until(lambda: len(heard) == 20, what="every change")
    assert [(each.subject.rpartition(".")[2], int(each.data)) for each in heard] == [
        (f"k{n % 3}", n) for n in range(20)
    ]


# --------------------------------------------------------------------------------------------------- object stores


class Objects:
    """An object store: chunks under a random name, and one record of each object that names them."""

    def __init__(self, js: JetStream, name: str) -> None:
        self.js = js
        self.name = name
        self.stream = f"OBJ_{name}"

    async def create(self) -> None:
        subjects = [f"$O.{self.name}.C.>", f"$O.{self.name}.M.>"]
        settings = {"discard": "new", "allow_rollup_hdrs": True, "allow_direct": True, "storage": "file"}
        await self.js.ensure_stream({"name": self.stream, "subjects": subjects, **settings})

    async def put(self, name: str, chunks: list[bytes], where: str, before: str = "") -> None:
        """The chunks first, then the record that counts, then what was there before goes."""
        for chunk in chunks:
            assert isinstance(await self.js.append(f"$O.{self.name}.C.{where}", chunk), Ack)
        meta = await self.js.append(f"$O.{self.name}.M.{name}", where.encode(), {ROLLUP: "sub"})
        assert isinstance(meta, Ack)
        if before:
            await self.js.purge(self.stream, subject=f"$O.{self.name}.C.{before}")

    async def get(self, name: str) -> bytes | None:
        meta = await self.js.get_last(self.stream, f"$O.{self.name}.M.{name}")
        if meta is None or not meta.data:
            return None
        chunks = f"$O.{self.name}.C.{meta.data.decode()}"
        return b"".join([message.data async for message in self.js.read_range(self.stream, chunks)])

    async def delete(self, name: str, where: str) -> None:
        await self.js.append(f"$O.{self.name}.M.{name}", b"", {ROLLUP: "sub"})
        await self.js.purge(self.stream, subject=f"$O.{self.name}.C.{where}")


@on_both
async def test_an_object_is_whole_replaced_and_gone(connect: Connect, unique: str) -> None:
    store = Objects(JetStream(await connect("objects")), unique)
    await store.create()
    assert await store.get("model") is None
    first = [bytes([number]) * 40_000 for number in range(5)]
    await store.put("model", first, "one")
    await store.put("other", [b"x"], "two")
    assert await store.get("model") == b"".join(first)
    await store.put("model", [b"smaller"], "three", before="one")
    assert await store.get("model") == b"smaller"
    info = await store.js.stream_info(store.stream, f"$O.{unique}.>")
    assert {subject.removeprefix(f"$O.{unique}."): count for subject, count in info.subjects.items()} == {
        "C.two": 1, "C.three": 1, "M.model": 1, "M.other": 1,
    }  # fmt: skip
    await store.delete("model", "three")
    assert await store.get("model") is None
    assert await store.get("other") == b"x"
    assert (await store.js.stream_info(store.stream)).messages == 3


@on_both
async def test_chunks_without_their_record_are_no_object(connect: Connect, unique: str) -> None:
    """Whoever died between the chunks and the record has left nothing that anybody reads."""
    store = Objects(JetStream(await connect("objects")), unique)
    await store.create()
    await store.put("model", [b"old"], "one")
    for chunk in (b"half", b"of it"):
        await store.js.append(f"$O.{unique}.C.two", chunk)
    assert await store.get("model") == b"old"
