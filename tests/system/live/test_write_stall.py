"""A leader whose ledger takes no record tells whoever asks, and never where another leader answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.contexts import Context
from moorage.bus.jetstream import JetStream
from moorage.client import AsyncClient, NoScheduler
from moorage.scheduler.core.config import Config
from moorage.schemas.subjects import Subjects
from tests.release.chaos.proxy import Proxy
from tests.servers import Server
from tests.system.live.stack import ANSWER_S, QUICK, TRY_S, Caller, caller, request, stack
from tests.system.live.test_queue_turns import queued
from tests.waiting import until


@asynccontextmanager
async def full_ledger(server: Server, subjects: Subjects) -> AsyncIterator[None]:
    """The ledger's stream takes no record more while this is open."""
    async with await connect(server.ledger_url, "test") as connection:
        info = await JetStream(connection).stream_info(subjects.ledger_stream)
        update = f"$JS.API.STREAM.UPDATE.{subjects.ledger_stream}"
        await connection.request(update, msgspec.json.encode({**info.config, "max_msgs": 1}), ANSWER_S)
        yield
        await connection.request(update, msgspec.json.encode(info.config), ANSWER_S)


@pytest.mark.slow
async def test_who_asks_while_the_ledger_takes_no_record_is_told_so(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        scheduler = await made.scheduler(config=QUICK)
        await acme.leader()
        await acme.submit("before")
        submit = made.subjects.api("acme", "submit")
        async with AsyncClient(nats_server.url, tenant="acme", prefix=unique, timeout="10s") as client:
            async with full_ledger(nats_server, made.subjects):
                # what is asked within the first second of it may be taken for the next record: it is not answered
                await until(lambda: _is_told(acme, made.subjects.api("acme", "ls")), what="whoever asks is told")
                assert scheduler.words().count("the ledger is full") == 1, "told once, and not at every try"
                refused = msgspec.json.decode((await acme.nc.request(submit, _body("refused"), timeout=ANSWER_S)).data)
                assert (refused["code"], refused["retry_after_s"]) == ("not-leading", 1.0)
                asked = client.submit(["true"], job="meanwhile"), client.ls(), client.fleet.show()
                for told in await asyncio.gather(*asked, return_exceptions=True):
                    assert isinstance(told, NoScheduler)
                    assert told.code == "not-leading"
                    assert "could not write its ledger for" in told.why
                    assert "the nats-server says: maximum messages exceeded" in told.why
                    assert f"asked at {Context(url=nats_server.url).safe_url}" in told.why
                    assert "look at the disk" in told.fixes[0]
            # it has room again: what was refused is in no record, and the same request is taken
            assert (await acme.api("show", {"job": "refused"}))["code"] == "not-found"
            async with AsyncClient(nats_server.url, tenant="acme", prefix=unique, timeout=ANSWER_S) as patient:
                assert (await patient.submit(["true"], job="meanwhile")).accepted is not None
            assert await acme.state("before") == "QUEUED"


@pytest.mark.slow
async def test_a_leader_cut_off_from_the_ledger_answers_nobody_whom_another_one_answers(
    nats_server: Server, unique: str
) -> None:
    ledger = urlsplit(nats_server.ledger_url)
    assert ledger.port is not None
    proxy = Proxy(ledger.port)
    await proxy.open()
    async with stack(nats_server, unique) as made, caller(made) as acme:
        direct, made.ledger_url = (
            made.ledger_url,
            ledger._replace(netloc=f"{ledger.netloc.rpartition(':')[0]}:{proxy.port}").geturl(),
        )
        first = await made.scheduler(config=QUICK)
        await acme.leader()
        made.ledger_url = direct
        await made.scheduler(config=QUICK)
        proxy.cut()
        await acme.leader(2)
        await until(lambda: "unclear" in first.words(), 90, "the first one knows that its append is stuck")
        submit = made.subjects.api("acme", "submit")  # not by the SDK, which asks again whoever does not lead
        answers = [await acme.nc.request(submit, _body(f"j{number}"), timeout=ANSWER_S) for number in range(20)]
        assert [msgspec.json.decode(answer.data)["kind"] for answer in answers] == ["accepted"] * 20
        proxy.heal()
        await until(
            lambda: "this scheduler no longer leads: " in first.words(), 90, "the first one hears of the second"
        )
    await proxy.close()


@pytest.mark.slow
async def test_what_nobody_waits_for_is_read_without_end_neither(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moorage.scheduler.pacing.write_stall.READ_MAX", 200)
    async with queued(nats_server, unique, msgspec.convert(QUICK, Config)) as made, made.leads() as state:
        term = made.scheduler.term
        assert term is not None
        subject = made.subjects.api("acme", "submit")
        async with await connect(nats_server.url, "test") as publisher, full_ledger(nats_server, made.subjects):
            since_s = made.scheduler.ledger.appending.for_s
            await until(lambda: since_s(time.monotonic()) > QUICK["takeover_s"], what="nothing is appended")
            for number in range(20):
                await publisher.send([(subject, _body(f"{number}-{each}"), "") for each in range(100)])
            await until(lambda: term.stalled.dropped >= 1_000, what="most are dropped")
            assert term.engine.waiting + term.intake.waiting <= 200
        await until(lambda: state.live, what="the first ones are in a record")
        assert state.live <= 200


async def _is_told(acme: Caller, asked: str) -> bool:
    """Whether a question is refused as nothing can be recorded; none is answered at the beginning."""
    with contextlib.suppress(TimeoutError):
        answer: dict[str, str] = msgspec.json.decode((await acme.nc.request(asked, b"{}", timeout=TRY_S)).data)
        return answer.get("code") == "not-leading"
    return False


def _body(job: str) -> bytes:
    return msgspec.json.encode(request(job))
