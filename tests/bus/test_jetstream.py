"""Raw JetStream against a real server: fences, reads through the leader, batches, replay, settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import Disconnected, JetStreamRefused, RequestTimeout, StreamGap, StreamMismatch
from moorage.bus.jetstream import (
    ERR_STREAM_FULL,
    ERR_WRONG_LAST_SEQUENCE,
    EXPECTED_LAST_SEQUENCE,
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT,
    FORBIDDEN_HEADER,
    MESSAGE_ID,
    Ack,
    JetStream,
    JsError,
    StoredMessage,
)
from moorage.bus.jetstream_answers import read_ack
from tests.servers import Server

pytestmark = pytest.mark.any_server


def settings(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": [f"{name}.>"],
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "allow_direct": True,
        **more,
    }


@asynccontextmanager
async def a_stream(url: str, name: str, **more: Any) -> AsyncIterator[JetStream]:
    async with await connect(url, "test") as connection:
        js = JetStream(connection)
        await js.ensure_stream(settings(name, **more))
        yield js
        if not more.get("deny_delete"):
            await js.delete_stream(name)


async def fill(js: JetStream, subjects: list[str]) -> None:
    for number, subject in enumerate(subjects, 1):
        assert isinstance(await js.append(subject, b"%d" % number), Ack)


def fence(last: int, epoch: int, subject: str) -> dict[str, str]:
    return {
        EXPECTED_LAST_SEQUENCE: str(last),
        EXPECTED_LAST_SUBJECT_SEQUENCE: str(epoch),
        EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT: subject,
    }


async def test_both_fences_are_enforced_each_alone(nats_url: str, unique: str) -> None:
    epoch, record = f"{unique}.epoch", f"{unique}.record"
    async with a_stream(nats_url, unique) as js:
        assert await js.append(epoch, b"1", {EXPECTED_LAST_SEQUENCE: "0"}) == Ack(unique, 1)
        assert await js.append(record, b"a", fence(1, 1, epoch)) == Ack(unique, 2)
        # The right last sequence, but a newer reign than we know of.
        assert await js.append(epoch, b"2", {EXPECTED_LAST_SEQUENCE: "2"}) == Ack(unique, 3)
        stale = await js.append(record, b"old reign", fence(3, 1, epoch))
        assert isinstance(stale, JsError)
        assert stale.err_code == ERR_WRONG_LAST_SEQUENCE
        # The right reign, but not the last sequence.
        behind = await js.append(record, b"behind", fence(2, 3, epoch))
        assert isinstance(behind, JsError)
        assert behind.err_code == ERR_WRONG_LAST_SEQUENCE
        assert await js.append(record, b"b", fence(3, 3, epoch)) == Ack(unique, 4)
        assert (await js.stream_info(unique)).last_seq == 4


async def test_the_guard_survives_a_purge_of_the_records(nats_url: str, unique: str) -> None:
    epoch, record = f"{unique}.epoch", f"{unique}.record"
    async with a_stream(nats_url, unique) as js:
        await fill(js, [epoch, record, record, record])
        assert await js.purge(unique, subject=record, below_seq=4) == 2
        assert await js.append(record, b"on", fence(4, 1, epoch)) == Ack(unique, 5)
        kept = await js.get_last(unique, epoch)
        assert kept is not None
        assert kept.seq == 1


async def test_answers_other_than_ok_are_values(nats_url: str, unique: str) -> None:
    async with a_stream(nats_url, unique, max_msgs=2) as js:
        assert await js.append(f"{unique}.a", b"x", {MESSAGE_ID: "1"}) == Ack(unique, 1)
        assert await js.append(f"{unique}.a", b"x", {MESSAGE_ID: "1"}) == Ack(unique, 1, duplicate=True)
        await js.append(f"{unique}.a", b"x")
        full = await js.append(f"{unique}.a", b"x")
        assert isinstance(full, JsError)
        assert full.err_code == ERR_STREAM_FULL
        nowhere = await js.append(f"none-{unique}", b"x")
        assert nowhere == JsError(503, 0, f"nobody answers on none-{unique}")
        with pytest.raises(ValueError, match=FORBIDDEN_HEADER):
            await js.append(f"{unique}.a", b"x", {FORBIDDEN_HEADER.upper(): "1"})


@pytest.mark.parametrize("data", [b"", b"{}", b"+ACK", b"[]", b'{"seq": 1}', b'{"stream": "S", "seq": 0}', b"\xff"])
def test_what_is_no_ack_is_never_taken_for_one(data: bytes) -> None:
    assert isinstance(read_ack(data), JsError)


async def test_an_append_without_an_answer_is_typed(fresh_server: EmbeddedServer, unique: str) -> None:
    async with await connect(fresh_server.url, "test") as connection:
        js = JetStream(connection)
        await js.ensure_stream(settings(unique))
        await fresh_server.kill()
        with pytest.raises((RequestTimeout, Disconnected)):
            await js.append(f"{unique}.a", b"x", timeout_s=0.1)


async def test_reads_through_the_leader(nats_url: str, unique: str) -> None:
    async with a_stream(nats_url, unique) as js:
        await js.append(f"{unique}.a", b"\x00\xff", {"traceparent": "00-ä", MESSAGE_ID: "m1"})
        await js.append(f"{unique}.a", b"")
        found = await js.get_message(unique, 1)
        assert found is not None
        assert (found.subject, found.seq, found.data) == (f"{unique}.a", 1, b"\x00\xff")
        assert found.headers == {"traceparent": "00-ä", MESSAGE_ID: "m1"}
        assert found.stored_at.endswith("Z")
        last = await js.get_last(unique, f"{unique}.a")
        assert last is not None
        assert (last.seq, last.data, last.headers) == (2, b"", None)
        assert await js.get_message(unique, 3) is None
        assert await js.get_last(unique, f"{unique}.b") is None
        with pytest.raises(JetStreamRefused) as missing:
            await js.get_message(f"{unique}x", 1)
        assert missing.value.status == 404


async def test_direct_get_in_batches(nats_url: str, unique: str) -> None:
    a, b = f"{unique}.a", f"{unique}.b"
    async with a_stream(nats_url, unique) as js:
        await fill(js, [a, b, a, b, a])
        everything = await js.direct_get_batch(unique, seq=1)
        assert [(m.seq, m.subject, m.data) for m in everything] == [
            (1, a, b"1"), (2, b, b"2"), (3, a, b"3"), (4, b, b"4"), (5, a, b"5")
        ]  # fmt: skip
        assert everything[0].headers is None
        assert [m.seq for m in await js.direct_get_batch(unique, seq=2, next_by_subject=a)] == [3, 5]
        assert [m.seq for m in await js.direct_get_batch(unique, seq=0, batch=2)] == [1, 2]
        assert [m.seq for m in await js.direct_get_batch(unique, seq=1, batch=1)] == [1]
        assert await js.direct_get_batch(unique, seq=6) == []
        assert await js.direct_get_batch(unique, seq=1, next_by_subject=f"{unique}.none") == []
        first = await js.get_message(unique, 1)
        assert first is not None
        assert everything[0].data == first.data


async def test_a_batch_is_bounded_by_bytes_but_always_moves(nats_url: str, unique: str) -> None:
    async with a_stream(nats_url, unique) as js:
        for _ in range(10):
            await js.append(f"{unique}.a", bytes(100_000))
        batch = await js.direct_get_batch(unique, seq=1, max_bytes=250_000)
        assert 2 <= len(batch) <= 4
        assert len(await js.direct_get_batch(unique, seq=1, max_bytes=10)) == 1


async def test_a_publisher_cannot_fake_the_end_or_the_sequence(nats_url: str, unique: str) -> None:
    async with a_stream(nats_url, unique) as js:
        await js.append(f"{unique}.a", b"1")
        await js.append(
            f"{unique}.a",
            b"",
            {
                "Status": "204",
                "Description": "EOB",
                "Nats-Sequence": "999",
                "Nats-Subject": "other",
                "Nats-Stream": "S",
            },
        )
        await js.append(f"{unique}.a", b"3")
        found = await js.direct_get_batch(unique, seq=1)
        assert [(m.seq, m.subject, m.stream) for m in found] == [(i, f"{unique}.a", unique) for i in (1, 2, 3)]


async def test_direct_get_refusals(nats_url: str, unique: str) -> None:
    async with a_stream(nats_url, unique, allow_direct=False) as js:
        with pytest.raises(JetStreamRefused, match="allow_direct") as raised:
            await js.direct_get_batch(unique, seq=1)
        assert raised.value.status == 503
        for batch in (-1, 0, 1001):
            with pytest.raises(ValueError, match="batch"):
                await js.direct_get_batch(unique, seq=1, batch=batch)
        for name in ("a.b", "a b", "", "*", ">", "a/b"):
            with pytest.raises(ValueError, match="stream name"):
                await js.direct_get_batch(name, seq=1)


async def collect(messages: AsyncIterator[StoredMessage]) -> list[int]:
    return [message.seq async for message in messages]


async def test_replay_reads_all_in_order_over_many_batches(nats_url: str, unique: str) -> None:
    async with a_stream(nats_url, unique) as js:
        await fill(js, [f"{unique}.{'ab'[i % 2]}" for i in range(60)])
        assert await collect(js.read_range(unique, batch_bytes=200)) == list(range(1, 61))
        assert await collect(js.read_range(unique, from_seq=30, to_seq=40)) == list(range(30, 41))
        assert await collect(js.read_range(unique, f"{unique}.b", 31)) == list(range(32, 61, 2))
        assert await collect(js.read_range(unique, from_seq=61)) == []
        # Leaving early leaves no task behind.
        async for message in js.read_range(unique, batch_bytes=200):
            if message.seq == 5:
                break


async def test_replay_sees_every_gap(nats_url: str, unique: str) -> None:
    async with a_stream(nats_url, unique) as js:
        await fill(js, [f"{unique}.a"] * 6)
        await js.delete_message(unique, 3)
        with pytest.raises(StreamGap) as inside:
            await collect(js.read_range(unique))
        assert (inside.value.expected, inside.value.found) == (3, 4)
        await js.purge(unique, below_seq=6)
        with pytest.raises(StreamGap) as front:
            await collect(js.read_range(unique, from_seq=4))
        assert (front.value.expected, front.value.found) == (4, 6)
        await js.purge(unique)
        with pytest.raises(StreamGap) as gone:
            await collect(js.read_range(unique, from_seq=6))
        assert (gone.value.expected, gone.value.found) == (6, 0)


async def test_settings_are_checked_and_never_changed_silently(nats_url: str, unique: str) -> None:
    async with a_stream(nats_url, unique, max_msgs=100) as js:
        same = await js.ensure_stream(settings(unique, max_msgs=100))
        assert same.config["max_msgs"] == 100
        with pytest.raises(StreamMismatch) as raised:
            await js.ensure_stream(settings(unique, retention="workqueue", max_msgs=50), frozenset({"max_msgs"}))
        assert raised.value.differences == {"retention": ("limits", "workqueue")}
        assert (await js.stream_info(unique)).config["max_msgs"] == 100
        raised_bound = await js.ensure_stream(settings(unique, max_msgs=200), frozenset({"max_msgs"}))
        assert raised_bound.config["max_msgs"] == 200
        assert raised_bound.config["discard"] == "new"
        with pytest.raises(JetStreamRefused):
            await js.ensure_stream(settings(f"{unique}-2", subjects=[f"{unique}.>"]))


async def test_subjects_with_their_counts_over_all_pages(nats_url: str, unique: str, nats_server: Server) -> None:
    async with a_stream(nats_url, unique) as js:
        await fill(js, [f"{unique}.a", f"{unique}.a", f"{unique}.b.c"])
        info = await js.stream_info(unique, f"{unique}.>")
        assert info.subjects == {f"{unique}.a": 2, f"{unique}.b.c": 1}
        assert (info.messages, info.first_seq, info.last_seq, info.replicas) == (3, 1, 3, 1)
        assert (await js.stream_info(unique)).subjects == {}


async def test_deny_delete_holds(fresh_data_dir: Path, fresh_server: EmbeddedServer, unique: str) -> None:
    async with a_stream(fresh_server.url, unique, deny_delete=True) as js:
        await fill(js, [f"{unique}.a"] * 3)
        with pytest.raises(JetStreamRefused):
            await js.delete_message(unique, 1)
        assert await js.purge(unique, subject=f"{unique}.a", below_seq=3) == 2


async def test_the_ledgers_stream_is_not_seen_from_the_users_account(fresh_server: EmbeddedServer, unique: str) -> None:
    async with (
        await connect(fresh_server.ledger_url, "scheduler") as ledger,
        a_stream(fresh_server.url, unique) as users,
    ):
        await JetStream(ledger).ensure_stream(settings("LEDGER"))
        with pytest.raises(JetStreamRefused) as raised:
            await users.stream_info("LEDGER")
        assert raised.value.status == 404
        assert await _streams(ledger) == 1


async def _streams(connection: Connection) -> int:
    answer = await connection.request("$JS.API.STREAM.NAMES", b"", 5)
    return answer.data.count(b'"LEDGER"')
