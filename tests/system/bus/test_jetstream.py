"""Raw JetStream against a real server: fences, reads through the leader, batches, replay, settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moorage.bus.connection import connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import Disconnected, JetStreamRefused, RequestTimeout, StreamGap, StreamMismatch
from moorage.bus.jetstream import (
    ERR_STREAM_FULL,
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
from moorage.bus.object_store import BUCKET_BYTES_MIN, FILES_BUCKET_BYTES, files_store
from moorage.schemas.subjects import Subjects

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


def test_another_number_of_copies_is_mended_by_the_command_that_comes_first() -> None:
    """Of two streams each advised the number of the other, for ever."""
    told = StreamMismatch("MOORAGE_LEDGER", {"num_replicas": (1, 3)}).problem
    assert told.message == "stream MOORAGE_LEDGER exists with other settings: num_replicas is 1, must be 3"
    assert told.next.startswith("moorage scheduler --replicas 1, as MOORAGE_LEDGER has it")
    assert told.next.endswith("moorage admin restore FILE --replace --replicas 3")


@pytest.mark.parametrize("size", [BUCKET_BYTES_MIN, FILES_BUCKET_BYTES + BUCKET_BYTES_MIN, -1])
async def test_an_existing_bucket_keeps_the_size_that_an_operator_gave_it(
    nats_url: str, unique: str, size: int
) -> None:
    async with await connect(nats_url, "test") as connection:
        js, subjects = JetStream(connection), Subjects(unique)
        store = files_store(js, subjects, "acme")
        await store.make()
        name = f"OBJ_{subjects.files_bucket('acme')}"
        await js.ensure_stream({"name": name, "max_bytes": size}, frozenset({"max_bytes"}))
        await store.make()
        assert (await js.stream_info(name)).config["max_bytes"] == size
