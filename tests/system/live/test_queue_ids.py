"""The durable queue of several tenants: ids of messages are nobody's to take, and it says when it fills."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client

from moorage.bus.connection import connect
from moorage.bus.jetstream import Ack, JetStream, JsError
from moorage.scheduler.core.config import Config
from moorage.scheduler.durable import queue_reader, queue_streams
from moorage.scheduler.durable.queue_streams import DUPLICATES_NS, QueueStreams, stream_config
from moorage.schemas.codec import REQUEST_BYTES_MAX
from moorage.schemas.subjects import Subjects
from tests.servers import Server
from tests.system.live.stack import ANSWER_S, caller, request, stack
from tests.system.live.test_queue_turns import queued
from tests.waiting import until

pytestmark = pytest.mark.any_server
ID = {"Nats-Msg-Id": "train-1"}
#: for which the server keeps ids unless a stream says otherwise
DEFAULT_WINDOW_S = 120


async def published(nc: Client, subject: str, body: dict[str, Any]) -> dict[str, Any]:
    """The PubAck, after as many tries as the server takes the message for one that it has."""

    async def stored() -> dict[str, Any] | None:
        answer = await nc.request(subject, msgspec.json.encode(body), timeout=ANSWER_S, headers=ID)
        ack: dict[str, Any] = msgspec.json.decode(answer.data)
        return None if ack.get("duplicate") else ack

    found = await until(stored, ANSWER_S, "the server forgets the id")
    return dict(found)


@pytest.mark.slow
async def test_a_message_id_keeps_no_other_request_away(nats_server: Server, unique: str) -> None:
    """Of another tenant, and of a cancel with its submit's id: both were acknowledged and never taken up."""
    async with stack(nats_server, unique) as made, caller(made, "ta") as one, caller(made, "tb") as other:
        await made.scheduler()
        await one.leader()
        submit = made.subjects.request("ta", "submit")
        await published(one.nc, submit, request("train-1", gpu={"model": "none"}))
        await published(other.nc, made.subjects.request("tb", "submit"), request("train-1", gpu={"model": "none"}))
        await one.reaches("train-1", "QUEUED")
        await other.reaches("train-1", "QUEUED")
        await published(one.nc, made.subjects.request("ta", "cancel"), {"job": "train-1"})
        await one.reaches("train-1", "CANCELLED")
        assert await other.state("train-1") == "QUEUED"


@pytest.mark.slow
async def test_a_queue_that_was_made_with_another_window_keeps_its_messages_and_gets_the_window(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made, "ta") as one:
        old = stream_config(made.subjects, 1)
        del old["duplicate_window"]
        async with await connect(made.url, "test") as users:
            js = JetStream(users)
            assert (await js.ensure_stream(old)).config["duplicate_window"] == DEFAULT_WINDOW_S * 10**9
            await published(one.nc, made.subjects.request("ta", "submit"), request("waits", gpu={"model": "none"}))
            await made.scheduler()
            await one.leader()
            assert (await js.stream_info(old["name"])).config["duplicate_window"] == DUPLICATES_NS
        await one.reaches("waits", "QUEUED")


async def test_the_largest_request_is_taken_with_its_headers(nats_server: Server, unique: str) -> None:
    """The server counts headers in the stream's bound: a request of 64 KiB with a trace was refused."""
    subjects = Subjects(unique)
    async with await connect(nats_server.url, "test") as users:
        js = JetStream(users)
        old = {**stream_config(subjects, 1), "max_msg_size": REQUEST_BYTES_MAX}
        await js.ensure_stream(old)
        await QueueStreams(js, subjects, 1).ensure(lambda: asyncio.sleep(0, 1))
        trace = {"traceparent": f"00-{16 * '0a'}-{8 * '0b'}-01", "Nats-Msg-Id": 64 * "i"}
        assert isinstance(await js.append(subjects.request("ta", "submit"), bytes(REQUEST_BYTES_MAX), trace), Ack)
        too_large = await js.append(subjects.request("ta", "submit"), bytes(2 * REQUEST_BYTES_MAX))
        assert isinstance(too_large, JsError)


async def test_a_queue_that_fills_is_told_once_and_who_fills_it(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queue_streams, "BYTES_MAX", 1024**2)
    monkeypatch.setattr(queue_reader, "SWEEP_EVERY_S", 0.05)
    async with queued(nats_server, unique, Config(jobs_max=1)) as made:
        body = b'{"job":"j%d","gpu":{"model":"none"},"labels":{"x":"%s"},"run":{"argv":["true"]}}'
        for number in range(90):
            await made.jetstream.append(made.subjects.request("ta", "submit"), body % (number, b"x" * 10_000))
        with caplog.at_level(logging.WARNING, "moorage.queue"):
            async with made.leads():
                term = made.scheduler.term
                assert term is not None
                await until(lambda: term.queue_reader.figures() is not None, what="a count")
                await until(lambda: "of tenant ta" in caplog.text, what="a warning")
                queue = term.queue_reader.figures()
                assert queue is not None
                assert queue.bytes_max == 1024**2 > queue.bytes > 0.8 * 1024**2
        assert caplog.text.count("the durable queue is") == 1
