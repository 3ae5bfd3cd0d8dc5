"""The SDK's calls, to real members: values, errors, what is tried again, and what is not."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from moorage.bus.connection import connect
from moorage.bus.transport import Delivery
from moorage.client import AsyncClient, CallFailed, CallRefused, Client, Rejected, TimedOut, services
from moorage.schemas.service import INPUT_VARIABLE, MEMBER, OUTPUT_VARIABLE
from tests.release.chaos.proxy import Proxy
from tests.servers import MortalServer, Server
from tests.system.services.members import Gate, error_of, member, waiting
from tests.waiting import skip_time, until


def client(url: str, prefix: str, **more: Any) -> AsyncClient:
    return AsyncClient(url, tenant="default", prefix=prefix, timeout="30s", **more)


async def test_call_and_map_take_bytes_text_or_json_and_a_failed_item_of_a_map_costs_no_other(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with (
        client(nats_url, unique) as moorage,
        member(nats_url, tmp_path, "functions:echo", "--name", "echo", prefix=unique) as one,
        member(nats_url, tmp_path, "functions:count", "--name", "count", prefix=unique) as two,
        member(nats_url, tmp_path, "functions:wrong", "--name", "wrong", prefix=unique) as three,
    ):
        await asyncio.gather(one.ready(), two.ready(), three.ready())
        values: tuple[Any, ...] = (b"\x00\xff", "zwölf", {"a": [1, 2.5, None]}, [], 7, True)
        for value in values:
            assert await moorage.call("echo", value) == value
        assert await moorage.call("echo") == b""
        echo = moorage.service("echo")
        assert [each async for each in echo.map(range(500), at_once=16)] == list(range(500))
        assert [each async for each in moorage.service("count").stream(b"4")] == [0, 1, 2, 3]
        assert [each async for each in echo.stream("whole")] == ["whole"]
        assert await moorage.call("count", b"3") == [0, 1, 2]
        assert await moorage.call("count", b"0") == []
        assert [each async for each in moorage.service("count").stream(b"0")] == []
        with pytest.raises(CallFailed, match=r"^ValueError: no such thing: 'x'") as failed:
            await moorage.call("wrong", "x", idempotent=True)
        assert (failed.value.code, failed.value.kind) == ("call-failed", "ValueError")
        with pytest.raises(CallFailed):
            [each async for each in moorage.service("wrong").stream("x")]
        with pytest.raises(CallFailed):
            [each async for each in moorage.service("wrong").map("abc")]
        got = [each async for each in moorage.service("count").map([b"2", b"x", b"1"], return_exceptions=True)]
        assert (got[0], type(got[1]), got[2]) == ([0, 1], CallFailed, [0]), "one bad item costs no other answer"
        for what, said in (
            (object(), "type object"),
            ("\ud800", "surrogates"),
            ({"x": [1.0, math.inf]}, r"data\['x'\]\[1\] is NaN or infinity"),
        ):
            with pytest.raises(Rejected, match=f"neither bytes nor text nor JSON: .*{said}"):
                await moorage.call("echo", what)
        with pytest.raises(Rejected, match="not the name of a service"):
            moorage.service("a.b.c")
        with pytest.raises(Rejected, match=r"'a\.cancel' is not the name of a service, or of one and a method"):
            moorage.service("a.cancel")
        with pytest.raises(Rejected, match="'7' is not the name of a service"):
            moorage.service(7)  # type: ignore[arg-type]


async def test_data_larger_than_a_message_come_in_parts_as_large_as_the_service_takes(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    large, home = os.urandom(30_000_000), tmp_path / "home"
    home.mkdir()
    job = {"MOORAGE_JOB": "j", "MOORAGE_REPLICA": "0", "MOORAGE_ATTEMPT": "1", "MOORAGE_FENCE": "1"}
    env = {"HOME": str(home), "MOORAGE_TENANT": "default", INPUT_VARIABLE: "30000000", **job}
    async with (
        client(nats_url, unique) as moorage,
        member(nats_url, tmp_path, "functions:digest", "--name", "digest", prefix=unique, env=env) as one,
    ):
        await one.ready()
        told = [len(large), hashlib.sha256(large).hexdigest()]
        size, digest, files = await moorage.call("digest", large)
        assert ([size, digest], len(files)) == (told, 1), "its data are a file in the attempt's folder while it runs"
        assert [each[:2] async for each in moorage.service("digest").stream(large)] == [told]
        both = await asyncio.gather(*(moorage.call("digest", large[number:]) for number in range(2)))
        assert [each[0] for each in both] == [30_000_000, 29_999_999]
        assert (await moorage.call("digest", b"small"))[2] == [], "no file is left"
        with pytest.raises(Rejected, match="30000001 bytes, allowed are 30000000") as refused:
            await moorage.call("digest", large + b"x")
        assert refused.value.code == "too-large"


async def test_a_call_ends_in_its_time_however_many_parts_come(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        client(nats_url, unique) as moorage,
        member(nats_url, tmp_path, "functions:endless", "--name", "endless", prefix=unique) as one,
        member(nats_url, tmp_path, "functions:count", "--name", "count", prefix=unique) as two,
    ):
        await asyncio.gather(one.ready(), two.ready())
        with pytest.raises(TimedOut):  # parts that began its time again would come for ever
            await asyncio.wait_for(moorage.call("endless", b"10", timeout=0.5), 60)
        monkeypatch.setattr("moorage.bus.inbox.REPLIES_MAX", 100)  # no answer of so many parts is taken for a whole one
        with pytest.raises(CallFailed, match=r"more than .* parts"):
            await moorage.call("count", b"1000")
        assert [each async for each in moorage.service("count").stream(b"1000")] == list(range(1000))


def test_the_twin_without_await(nats_server: Any, unique: str, tmp_path: Path) -> None:
    async def serving(called: Any) -> None:
        async with member(nats_server.url, tmp_path, "functions:echo", "--name", "echo", prefix=unique) as one:
            await one.ready()
            await asyncio.to_thread(called)

    def call() -> None:
        with Client(nats_server.url, tenant="default", prefix=unique) as moorage:
            assert moorage.call("echo", {"a": 1}) == {"a": 1}
            echo = moorage.service("echo")
            assert list(echo.map("abc")) == ["a", "b", "c"]
            assert list(echo.map(echo.map("abc"), at_once=2)) == ["a", "b", "c"], "read here, and not in the loop"
            assert list(echo.map(moorage.call("echo", each) for each in range(3))) == [0, 1, 2]
            with pytest.raises(Rejected, match="at_once must be at least 1"):
                next(echo.map(iter("abc"), at_once=0))
            left, kept = (echo.map(iter("abcdef"), at_once=2) for _ in range(2))
            assert (next(left), next(kept)) == ("a", "a")
            left.close()  # type: ignore[attr-defined]
            assert list(moorage.service("echo").stream("abc")) == ["abc"]
        with pytest.raises(RuntimeError, match="closed while this was iterated over"):
            next(kept)

    asyncio.run(serving(call))


async def test_nobody_serves_and_then_somebody_does(nats_url: str, unique: str, tmp_path: Path) -> None:
    """It is tried again within its time-out: a service that starts meanwhile answers."""
    async with client(nats_url, unique) as moorage:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(services, "AGAIN_S_MIN", 3600.0)  # the next try would come behind its time-out
            with pytest.raises(CallRefused, match="nobody serves it") as refused:
                await moorage.call("echo", "x")
        assert refused.value.code == "no-service"
        assert refused.value.__suppress_context__, "its traceback is of one error"
        early = asyncio.create_task(moorage.call("echo", "early"))
        async with member(nats_url, tmp_path, "functions:echo", "--name", "echo", prefix=unique) as one:
            await one.ready()
            assert await early == "early"


async def test_what_is_refused_as_busy_is_tried_again_until_a_place_is_free(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with (
        client(nats_url, unique) as moorage,
        member(nats_url, tmp_path, "functions:nap", "--name", "nap", prefix=unique) as one,
        member(nats_url, tmp_path, "functions:aheld", "--name", "aheld", prefix=unique) as two,
    ):
        await asyncio.gather(one.ready(), two.ready())
        answers = await asyncio.gather(*(moorage.call("nap", 100) for _ in range(12)))
        assert answers == [100] * 12, "3 find room at a time, 9 are told to come again"
        gate = Gate(tmp_path)
        running = asyncio.create_task(moorage.call("aheld", gate.data))
        await gate.runs()
        outcomes = await asyncio.gather(*(moorage.call("aheld", timeout=0.5) for _ in range(8)), return_exceptions=True)
        codes = Counter(each.code for each in outcomes if isinstance(each, CallRefused | TimedOut))
        assert codes.total() == 8, outcomes
        assert set(codes) <= {"service-busy", "call-expired", "timed-out"}, codes
        gate.open()
        assert await running == gate.data


async def test_a_call_that_may_have_run_is_tried_again_only_if_it_says_that_it_may(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    words = ("functions:die", "--name", "die")
    async with (
        client(nats_url, unique) as moorage,
        await connect(nats_url, "witness") as witness,
        member(nats_url, tmp_path, *words, prefix=unique) as one,
    ):
        await one.ready()
        gate, waits = Gate(tmp_path), await waiting(witness, unique, "die")
        running = asyncio.create_task(moorage.call("die", gate.data))
        await gate.runs()
        again = asyncio.create_task(moorage.call("die", b"", idempotent=True))
        await asyncio.wait_for(waits.wait(), 60)
        os.kill(one.program(), signal.SIGKILL)
        with pytest.raises(CallFailed) as died:
            await running
        assert died.value.code == "member-died"
        async with member(nats_url, tmp_path, *words, prefix=unique) as other:
            await other.ready()
            assert await again == b""
            with pytest.raises(CallFailed):
                await moorage.call("die", b"die")


async def test_who_gives_up_says_so_and_the_place_is_free(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        client(nats_url, unique) as moorage,
        await connect(nats_url, "witness") as witness,
        member(nats_url, tmp_path, "functions:aheld", "--name", "aheld", prefix=unique) as one,
    ):
        await one.ready()
        gate, cancels = Gate(tmp_path), list[Delivery]()  # it stays closed: only a cancel frees the place of a call
        await witness.subscribe(f"{unique}.call.default.aheld.cancel", cancels.append)
        giving_up = asyncio.create_task(moorage.call("aheld", gate.data, timeout=3600))
        await gate.runs()
        skip_time(monkeypatch, 3600)
        with pytest.raises(TimedOut, match="may have run"):
            await giving_up
        await until(lambda: len(cancels) == 1)
        assert await moorage.call("aheld") == b""
        gate = Gate(tmp_path)
        calling = asyncio.create_task(moorage.call("aheld", gate.data))
        await gate.runs()
        calling.cancel()
        await asyncio.wait([calling])
        assert await moorage.call("aheld") == b""
        await until(lambda: len(cancels) == 2)
        mapping = moorage.service("aheld").map([b"", gate.data, gate.data])
        assert await anext(mapping) == b""
        await mapping.aclose()  # type: ignore[attr-defined]
        assert await moorage.call("aheld") == b""
        await until(lambda: len(cancels) == 4)


async def test_calls_go_on_behind_a_restart_of_the_server(
    mortal_server: MortalServer, unique: str, tmp_path: Path
) -> None:
    async with (
        client(mortal_server.url, unique) as moorage,
        member(mortal_server.url, tmp_path, "functions:echo", "--name", "echo", prefix=unique) as one,
    ):
        await one.ready()
        assert await moorage.call("echo", "before") == "before"
        await mortal_server.kill()
        behind = asyncio.create_task(moorage.call("echo", "behind", idempotent=True))
        await mortal_server.start()
        assert await behind == "behind"


async def test_a_call_that_ends_while_its_member_is_cut_off_is_answered_once_that_is_back(
    nats_server: Server, unique: str, tmp_path: Path
) -> None:
    """Its caller ran into its time-out, though the work was done; an endless one, which it gave up, ran for ever."""
    proxy = Proxy(urlsplit(nats_server.url).port or 0)
    await proxy.open()
    url, gate = f"nats://127.0.0.1:{proxy.port}", Gate(tmp_path)

    async def away() -> None:
        """Wait until both members have seen that their connections are gone, and have tried twice to get new ones."""
        tried = proxy.taken
        await until(lambda: proxy.taken >= tried + 4, what="the members try to connect")

    try:
        async with (
            client(nats_server.url, unique) as moorage,
            member(url, tmp_path, "functions:held", "--name", "held", prefix=unique) as one,
            member(url, tmp_path, "functions:endless", "--name", "endless", prefix=unique) as two,
        ):
            await asyncio.gather(one.ready(), two.ready())
            call, stream = asyncio.create_task(moorage.call("held", gate.data)), moorage.service("endless").stream(b"9")
            await gate.runs()
            await anext(stream)
            proxy.reset()
            gate.open()
            await stream.aclose()  # type: ignore[attr-defined]
            await away()
            proxy.heal()
            assert await call == gate.data
            await until(lambda: "closed" in two.said, what="the endless call is over")
    finally:
        await proxy.close()


async def test_an_answer_larger_than_a_message_is_one_value_and_who_takes_no_parts_is_told(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    env = {OUTPUT_VARIABLE: "30000000"}
    async with (
        client(nats_url, unique) as moorage,
        member(nats_url, tmp_path, "functions:echo", "--name", "echo", prefix=unique, env=env) as one,
        await connect(nats_url, "bare") as bare,
    ):
        await one.ready()
        data = random.Random(3).randbytes(20_000_000)
        echo = moorage.service("echo")
        assert await echo.call(data, timeout=60) == data, "more than 16 parts"
        assert [each async for each in echo.stream(data[:3_000_000], timeout=60)] == [data[:3_000_000]]
        raw = [each async for each in echo.answers(data[:3_000_000], timeout=60, raw=True)]
        assert b"".join(each.value for each in raw) == data[:3_000_000]
        assert raw[0].headers[MEMBER]
        text = "ü" * 1_000_000
        assert await echo.call(text, timeout=60) == text
        with pytest.raises(CallFailed, match="the answer has 31000000 bytes, the service gives at most 30000000"):
            await echo.call(bytes(31_000_000), timeout=60)
        whole = bytes(bare.max_payload_bytes - 60)  # with its headers it is too large
        answered = await bare.request(f"{unique}.call.default.echo", whole, 60, {"Moorage-Output": "0"})
        assert error_of(answered) == "too-large"
        parts = await bare.request_many(f"{unique}.call.default.echo", whole, 60, is_last=lambda each: not each.data)
        assert b"".join(each.data for each in parts) == whole
