"""Streams deleted, made anew or filled up behind a leader's back: what they acknowledged is read, by and by."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import nats.errors
import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream
from moorage.scheduler.durable.dead_letters import LETTERS_MAX
from moorage.scheduler.durable.queue_reader import AHEAD_MAX, BATCH, UNBURIED_MAX
from moorage.scheduler.durable.queue_streams import stream_config
from moorage.schemas.codec import encode
from moorage.schemas.errors import problem
from moorage.schemas.operate import DeadLetter
from tests.servers import Server
from tests.system.live.stack import ANSWER_S, QUICK, TRY_S, Caller, caller, request, stack
from tests.system.live.test_queue_turns import queued
from tests.waiting import until

READ = 20


async def have_some_read(acme: Caller) -> None:
    """So many requests through the queue, from `before-0` on, until they wait."""
    for number in range(READ):
        await acme.queue("submit", request(f"before-{number}"))
    await acme.reaches(f"before-{READ - 1}", "QUEUED")


@pytest.mark.slow
async def test_a_request_queue_that_was_deleted_is_made_again_behind_what_was_read(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme, await connect(made.url, "test") as connection:
        scheduler = await made.scheduler(config=QUICK)
        await acme.leader()
        await have_some_read(acme)
        jetstream = JetStream(connection)
        await jetstream.delete_stream(made.subjects.request_stream)
        assert await acme.queue("submit", request("after")) == READ + 1  # nobody acknowledges it before
        await acme.reaches("after", "QUEUED")
        assert "the durable queue was deleted" in scheduler.words()

        await scheduler.kill()  # the same where no scheduler lives: the next one to start makes it
        await jetstream.delete_stream(made.subjects.request_stream)
        await made.scheduler(config=QUICK)
        assert await acme.queue("submit", request("last")) == READ + 2
        await acme.reaches("last", "QUEUED")


@pytest.mark.slow
async def test_a_request_queue_of_somebody_elses_making_is_read_from_its_beginning(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme, await connect(made.url, "test") as connection:
        scheduler = await made.scheduler(config=QUICK)
        await acme.leader()
        await have_some_read(acme)
        await acme.queue("cancel", {"job": "before-0"})
        await acme.reaches("before-0", "CANCELLED")
        await scheduler.kill()
        jetstream = JetStream(connection)
        await jetstream.delete_stream(made.subjects.request_stream)
        await jetstream.ensure_stream(stream_config(made.subjects, 1))
        assert await acme.queue("submit", request("after")) == 1, "acknowledged below the cursor"
        await acme.queue("cancel", {"job": "before-1"})
        second = await made.scheduler(config=QUICK)
        await acme.reaches("after", "QUEUED")
        await acme.reaches("before-1", "CANCELLED")
        assert "the queue was created anew, and is read from its beginning" in second.words()
        await acme.queue("submit", request("last"))
        await acme.reaches("last", "QUEUED")
        assert await acme.state("before-2") == "QUEUED"


@pytest.mark.slow
async def test_dead_letters_that_were_deleted_are_made_again(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme, await connect(made.url, "test") as connection:
        await made.scheduler(config=QUICK)
        await acme.leader()
        jetstream = JetStream(connection)
        await jetstream.delete_stream(made.subjects.dead_letter_stream)
        await acme.queue("submit", b"\xff\xff")
        await acme.queue("submit", request("behind"))
        await acme.reaches("behind", "QUEUED")
        assert (await jetstream.stream_info(made.subjects.dead_letter_stream)).messages == 1


@pytest.mark.slow
async def test_dead_letters_that_take_nothing_stop_nobody_elses_queue(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme, caller(made, "zeta") as zeta:
        await made.scheduler(config=QUICK)
        await acme.leader()
        async with await connect(made.url, "test") as connection:
            await _refill(JetStream(connection), made.subjects.dead_letter_stream, max_msgs=1, discard="new")
            await acme.queue("submit", request("good"))
            for _ in range(2):
                await acme.queue("submit", b"\xff\xff")
            await acme.queue("submit", request("behind"))
            await zeta.queue("submit", request("alone"))
            await zeta.reaches("alone", "QUEUED")
            await acme.reaches("good", "QUEUED")
            assert await acme.state("behind") == "", "the cursor does not pass what is kept nowhere"
            await _refill(JetStream(connection), made.subjects.dead_letter_stream, max_msgs=LETTERS_MAX, discard="old")
            await acme.reaches("behind", "QUEUED")
            assert (await JetStream(connection).stream_info(made.subjects.dead_letter_stream)).messages == 2


@pytest.mark.slow
async def test_refused_requests_wait_in_the_queue_and_not_in_memory(nats_server: Server, unique: str) -> None:
    async with queued(nats_server, unique) as made, made.leads() as state:
        assert made.scheduler.term is not None
        reader = made.scheduler.term.queue_reader
        await _refill(made.jetstream, made.subjects.dead_letter_stream, max_msgs=1, discard="new")
        await made.publish("acme", "known")
        await until(lambda: state.job("acme", "known"), 90, "it is accepted")
        other = b'{"job":"known","run":{"argv":["false"]}}'  # other content under the id: refused once it is read
        subject, count = made.subjects.request("acme", "submit"), AHEAD_MAX + 3 * BATCH
        for start in range(0, count, 500):
            await asyncio.gather(
                *(made.jetstream.append(subject, other, timeout_s=60) for _ in range(start, start + 500))
            )
        await until(lambda: reader.unburied("acme") >= UNBURIED_MAX, 90, "many of them are refused")
        await made.publish("zeta", "alone")
        await until(lambda: state.job("zeta", "alone"), 90, "a neighbour's is read")
        assert reader.unburied("acme") <= AHEAD_MAX + BATCH
        assert state.tenants["acme"].submit_cursor < count, "the others wait where they are"
        await _refill(made.jetstream, made.subjects.dead_letter_stream, max_msgs=LETTERS_MAX, discard="old")
        await until(lambda: state.tenants["acme"].submit_cursor > count, 90, "all are read once they are kept again")
        await until(lambda: not reader.unburied("acme"), 90, "and kept")
        info = await made.jetstream.stream_info(made.subjects.dead_letter_stream)
        assert info.messages == count


@pytest.mark.slow
@pytest.mark.parametrize("how", ["purged", "deleted"])
async def test_a_ledger_that_is_gone_is_said_to_be_with_what_to_do(nats_server: Server, unique: str, how: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        scheduler = await made.scheduler(config=QUICK)
        await acme.leader()
        await acme.submit("before")
        async with await connect(made.ledger_url, "test") as connection:
            jetstream = JetStream(connection)
            if how == "purged":
                await jetstream.purge(made.subjects.ledger_stream)
            else:
                await jetstream.delete_stream(made.subjects.ledger_stream)
            submit, body = made.subjects.api("acme", "submit"), msgspec.json.encode(request("after"))

            async def refused() -> dict[str, str] | None:
                with contextlib.suppress(nats.errors.TimeoutError):  # asked before the append was known to be stuck
                    told = msgspec.json.decode((await acme.nc.request(submit, body, timeout=TRY_S)).data)
                    return dict(told) if "admin restore" in told.get("next", "") else None
                return None

            told = await until(refused, 90, "who asks is told")
            assert (told["code"], "nothing that was accepted is lost" in told["message"]) == ("not-leading", False)
            assert "moorage admin restore FILE --replace" in scheduler.words()
            if how == "purged":
                await scheduler.kill()
                second = await made.set_scheduler("second", QUICK, made.url, made.ledger_url)
                assert await second.process.wait() == 1
                assert "moorage admin restore FILE --replace" in second.words()
                assert "Traceback" not in second.words()


@pytest.mark.slow
async def test_no_leader_writes_into_a_ledger_that_was_made_in_the_place_of_its_own(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        first = await made.scheduler(config=QUICK)
        await acme.leader()
        async with await connect(made.ledger_url, "test") as connection:
            jetstream, stream = JetStream(connection), made.subjects.ledger_stream
            await until(_has(jetstream, stream, 100), 90, "records")
            await jetstream.delete_stream(stream)
            await until(lambda: "stream not found" in first.words(), 90, "it finds none")
            second = await made.scheduler(config={**QUICK, "heartbeat_s": 0.25, "renewal_append_s": 0.25})
            await until(lambda: "has replaced" in first.words(), 90, "the first one hears of the second's")
            assert (await jetstream.stream_info(stream)).last_seq < 100, "before its own would follow there"
            await until(lambda: "leading epoch 1" in second.words(), 90, "the second one leads")
        await acme.submit("after")
        third = await made.scheduler(config=QUICK)
        await until(lambda: "folded" in third.words(), 90, "whoever comes can read it")


def _has(jetstream: JetStream, stream: str, records: int) -> Callable[[], Awaitable[bool]]:
    async def there() -> bool:
        return (await jetstream.stream_info(stream)).last_seq >= records

    return there


@pytest.mark.long
@pytest.mark.slow
async def test_snapshots_that_were_deleted_under_a_leader_are_written_again_by_itself(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        settings = {**QUICK, "snapshot_records": 100.0}
        hasty = {"moorage.scheduler.leader.term.SNAPSHOT_LOOK_S": 0.5}
        first = await made.set_scheduler("first", settings, made.url, made.ledger_url, hasty)
        await acme.leader()
        await acme.submit("before")
        counts = "counts; the ledger begins behind"
        await until(lambda: first.words().count(counts) >= 1, 90, "the ledger's beginning is cut away")
        async with await connect(made.ledger_url, "test") as connection:
            await JetStream(connection).delete_stream(made.subjects.snapshot_stream)
        await until(
            lambda: ("the leader writes a new snapshot of its state") in first.words(), 90, "it is due, and found out"
        )
        named = first.words().count(counts)
        await until(lambda: first.words().count(counts) > named, 90, "a new one counts")
        await first.kill()
        await made.set_scheduler("second", settings, made.url, made.ledger_url)
        await acme.leader(2)
        assert await acme.state("before") == "QUEUED"
        assert "Traceback" not in first.words()


async def test_what_is_no_dead_letter_is_listed_and_dropped(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme, await connect(made.url, "test") as connection:
        scheduler = await made.scheduler(config=QUICK)
        await acme.leader()
        letter = DeadLetter("x", 7, problem("internal", "made up"), b"{}")
        for junk in (b"junk", encode(letter)):
            await JetStream(connection).append(made.subjects.dead_letter("acme"), junk)
        await acme.queue("submit", b"\xff\xff")

        async def listed() -> list[dict[str, Any]] | None:
            rows = (await acme.admin("dlq", {"act": "list"}))["data"]["letters"]
            return rows if len(rows) == 3 else None

        rows = await until(listed, 60, "all three are listed")
        assert [(row["sequence"], row["queued"], row["tenant"]) for row in rows] == [
            (1, 0, "acme"), (2, 0, "acme"), (3, 1, "acme"),
        ]  # fmt: skip
        for sequence in (1, 2):
            assert (await acme.admin("dlq", {"act": "show", "sequence": sequence}))["kind"] == "error"
            assert (await acme.admin("dlq", {"act": "drop", "sequence": sequence}))["data"]["dropped"]
        assert len((await acme.admin("dlq", {"act": "list"}))["data"]["letters"]) == 1
        assert "never retrieved" not in scheduler.words()


async def _refill(jetstream: JetStream, stream: str, **settings: object) -> None:
    """Change a stream's settings as an operator may."""
    config = {**(await jetstream.stream_info(stream)).config, **settings}
    update = f"$JS.API.STREAM.UPDATE.{stream}"
    answer = await jetstream._connection.request(update, msgspec.json.encode(config), ANSWER_S)
    assert "error" not in msgspec.json.decode(answer.data), answer


@pytest.mark.slow
async def test_a_request_whose_dead_letter_is_not_stored_yet_outlives_its_leader(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme, await connect(made.url, "test") as connection:
        first = await made.scheduler(config=QUICK)
        await acme.leader()
        await acme.submit("taken")
        await _refill(JetStream(connection), made.subjects.dead_letter_stream, max_msgs=1, discard="new")
        for _ in range(2):  # the first one fills the stream
            await acme.queue("submit", request("taken", "false"))
        await until(lambda: "cannot be stored as a dead letter now" in first.words(), ANSWER_S, "it is refused")
        await acme.queue("submit", request("behind"))
        await acme.reaches("behind", "QUEUED")

        async def purged() -> bool:
            return (await JetStream(connection).stream_info(made.subjects.request_stream)).first_seq > 1

        await until(purged, ANSWER_S, "what has its dead letter is purged")
        await first.kill()
        await _refill(JetStream(connection), made.subjects.dead_letter_stream, max_msgs=LETTERS_MAX, discard="old")
        await made.scheduler(config=QUICK)

        async def letters() -> bool:
            return (await JetStream(connection).stream_info(made.subjects.dead_letter_stream)).messages == 2

        await until(letters, 30, "its dead letter")
        rows = (await acme.admin("dlq", {"act": "list"}))["data"]["letters"]
        assert [(row["queued"], row["job"], row["code"]) for row in rows] == [
            (1, "taken", "conflict"), (2, "taken", "conflict"),
        ]  # fmt: skip

        async def empty() -> bool:
            return not (await JetStream(connection).stream_info(made.subjects.request_stream)).messages

        await until(empty, ANSWER_S, "the queue is purged")
