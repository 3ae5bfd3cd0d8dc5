"""`moorage serve --http`: a server of HTTP as a member, with its own ideas of when it is ready and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.connection import connect
from moorage.bus.contexts import Context
from moorage.client import CallFailed
from moorage.client.services import AsyncService
from moorage.schemas.codec import Decoder
from moorage.schemas.http_service import ASLEEP_FILE, SLEEP_BY_VARIABLE, SLEEP_SOCKET
from moorage.schemas.service import MemberLoad
from moorage.system.proctree import MARK_NAMES
from tests.system.services.members import MemberProcess, error_of, member
from tests.system.services.test_calling import client
from tests.waiting import until

decode_load = Decoder[MemberLoad](MemberLoad)
ENGINE = (sys.executable, "-m", "moorage.testing.fake_engine")
GET = {"Http-Method": "GET", "Http-Path": "/v1/stat"}
PATHS = ("--paths", "/v1/*", "--paths", "/stat")


@contextlib.asynccontextmanager
async def engine(
    url: str,
    prefix: str,
    folder: Path,
    *words: str,
    options: tuple[str, ...] = ("--http", "/health"),
    env: dict[str, str] | None = None,
) -> AsyncIterator[tuple[MemberProcess, AsyncService]]:
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})}
    serving = member(
        url, folder, *options, *PATHS, "--name", "chat", "--concurrency", "4", "--", *ENGINE, "{port}", *words,
        prefix=prefix, env=env,
    )  # fmt: skip
    async with serving as one, client(url, prefix) as moorage:
        await one.ready()
        yield one, moorage.service("chat")


async def stat(service: AsyncService) -> dict[str, Any]:
    asked = service._client, service._calls, "chat"
    answers = AsyncService(*asked, headers={"Http-Method": "GET", "Http-Path": "/stat"}).answers(raw=True)
    found: dict[str, Any] = json.loads(b"".join([each.value async for each in answers]))
    return found


async def test_a_call_is_one_request_and_what_the_server_says_is_its_answer(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with engine(nats_url, unique, tmp_path, "--load", "1", "--version", "7") as (_, chat):
        whole = await chat.answer({"max_tokens": 3})
        assert whole.value["usage"]["completion_tokens"] == 3
        parts = [each async for each in chat.stream({"max_tokens": 3, "stream": True})]
        assert "".join(parts).count("data: ") == 5
        assert "".join(parts).endswith("data: [DONE]\n\n")
        with pytest.raises(CallFailed, match="does not exist") as unknown:
            await chat.call({"model": "nosuch"})
        assert unknown.value.status == 404

        def raw(method: str, path: str, **more: str) -> AsyncService:
            headers = {"Http-Method": method, "Http-Path": path, **more}
            return AsyncService(chat._client, chat._calls, "chat", headers=headers)

        first, *rest = [
            each async for each in raw("PUT", "/v1/echo/a%2Fb?x=1", **{"X-Own": "1"}).answers(b"ab", raw=True)
        ]
        assert first.headers["Http-Status"] == "200"
        assert [value for name, value in json.loads(first.headers["Http-Headers"]) if name == "Set-Cookie"] == [
            "a=1",
            "b=2",
        ]
        heard = json.loads(b"".join([first.value, *(each.value for each in rest)]))
        assert (heard["method"], heard["target"], heard["bytes"]) == ("PUT", "/v1/echo/a%2Fb?x=1", 2)
        assert ["X-Own", "1"] in heard["headers"]
        for refused in ("/sleep", "/v1/../sleep", "/v1/%2e%2e/sleep"):
            with pytest.raises(CallFailed) as shut:
                await raw("POST", refused).call(b"")
            assert shut.value.status == 403
        blob = b"".join([each.value async for each in raw("GET", "/v1/blob?kib=3000").answers(raw=True, timeout=60)])
        assert len(blob) == 3000 * 1024
        large = [each async for each in raw("POST", "/v1/echo").answers(bytes(3_000_000), raw=True, timeout=60)]
        assert json.loads(large[0].value)["bytes"] == 3_000_000
        async with await connect(nats_url, "bare") as bare:
            answer = await bare.request(f"{unique}.call.default.chat", b'{"max_tokens": 1}', 60)
            assert error_of(answer) == ""
            assert (answer.headers or {})["Content-Type"].startswith("application/json")
            answer = await bare.request(f"{unique}.call.default.chat.embeddings", b'{"input": "a"}', 60)
            assert json.loads(answer.data)["data"][0]["index"] == 0


async def test_who_leaves_closes_the_servers_connection(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with engine(nats_url, unique, tmp_path) as (_, chat):
        stream = chat.stream({"max_tokens": 10_000, "stream": True})
        reading = asyncio.create_task(_read(stream))
        plain = asyncio.create_task(chat.call({"max_tokens": 10_000, "delay_ms": 100}, timeout=600))
        await until(lambda: _runs(chat, 2), what="both run")
        reading.cancel()
        plain.cancel()
        await asyncio.wait((plain, reading))
        await until(lambda: _runs(chat, 0), what="the server has heard it")
        assert (await stat(chat))["aborted"] == 2


async def _read(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        continue


async def _runs(chat: AsyncService, number: int) -> bool:
    return bool((await stat(chat))["running"] == number)


async def test_a_server_that_dies_is_told_as_such_and_one_that_breaks_off_goes_on(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with engine(nats_url, unique, tmp_path) as (one, chat):
        with pytest.raises(CallFailed, match="broke its answer off") as broke:
            _ = [each async for each in chat.stream({"max_tokens": 9, "stream": True, "break_at": 2})]
        assert broke.value.status == 502
        assert "TransferEncoding" not in broke.value.why
        calls = [asyncio.create_task(chat.call({"max_tokens": 9000, "delay_ms": 100}, timeout=600)) for _ in range(3)]
        await until(lambda: _runs(chat, 3), what="they run")
        os.kill((await stat(chat))["pid"], signal.SIGKILL)
        for told in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(told, CallFailed)
            assert told.code == "member-died"
        assert await one.ended() == 137
        assert "the server ended by signal 9 (SIGKILL)" in one.said


async def test_one_that_loads_late_is_warmed_before_calls_come(nats_url: str, unique: str, tmp_path: Path) -> None:
    options = ("--http", "/api/version", "--warm", '/api/chat {"max_tokens": 1}')
    async with engine(nats_url, unique, tmp_path, "--like", "ollama", "--load", "0.5", options=options) as (_, chat):
        assert (await stat(chat))["done"] == 1, "the request that warms it"
        await chat.call({"max_tokens": 1})


async def test_one_that_is_healthy_no_longer_is_not_ready_unless_an_answer_goes_on(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    options, env = ("--http", "/health", "--idle", "1s"), {"MOORAGE_READY": str(ready)}
    async with engine(nats_url, unique, tmp_path, options=options, env=env) as (one, chat):
        await until(ready.exists, what="it is ready")

        async def say(status: int) -> None:
            headers = {"Http-Method": "POST", "Http-Path": f"/v1/health?status={status}"}
            await AsyncService(chat._client, chat._calls, "chat", headers=headers).call(b"")

        await say(503)
        await until(lambda: not ready.exists(), what="it is not ready")
        await say(200)
        await until(ready.exists, what="it is ready again")
        assert "the server is healthy again" in one.said
        stream = asyncio.create_task(_read(chat.stream({"max_tokens": 10_000, "stream": True}, timeout=600)))
        await until(lambda: _runs(chat, 1), what="a stream goes on")
        await say(503)
        asked = (await stat(chat))["unhealthy"]

        async def has_asked_again() -> bool:
            return bool((await stat(chat))["unhealthy"] >= asked + 4)

        await until(has_asked_again, what="it was unhealthy four times")
        assert ready.exists(), "it works"
        stream.cancel()
        await asyncio.wait((stream,))
        await until(lambda: not ready.exists(), what="it does nothing, and is unhealthy")


async def test_a_server_that_cannot_start_ends_the_member(nats_url: str, unique: str, tmp_path: Path) -> None:
    words = ("--http", "/health", "--name", "chat", "--", sys.executable, "-c", "import sys; sys.exit(3)")
    async with member(nats_url, tmp_path, *words, prefix=unique) as one:
        assert await one.ended() == 3
        assert "the server ended with code 3 before it was ready" in one.said


async def test_a_health_path_that_the_server_does_not_have_is_logged_once(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    words = ("--http", "/nosuch", "--name", "chat", "--", *ENGINE, "{port}")
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    async with member(nats_url, tmp_path, *words, prefix=unique, env=env) as one:

        async def is_told() -> bool:
            return "answers /nosuch with 404: it takes no calls until that is 200 to 399" in one.said

        await until(is_told, 60, "its log has it")
        assert one.said.count("/nosuch") == 1


async def test_calls_that_wait_in_an_engine_are_told_as_such(nats_url: str, unique: str, tmp_path: Path) -> None:
    """They ran, so that a service whose engines were full got no further member."""
    options, loads = ("--http", "/health", "--metrics", "vllm"), list[MemberLoad]()
    async with (
        await connect(Context(url=nats_url), "test") as hears,
        engine(nats_url, unique, tmp_path, "--places", "1", options=options) as (_, chat),
    ):
        await hears.subscribe(f"{unique}.calls.default.chat.load", lambda told: loads.append(decode_load(told.data)))
        streams = [
            asyncio.create_task(_read(chat.stream({"max_tokens": 100_000, "stream": True}, timeout=600)))
            for _ in range(3)
        ]
        await until(
            lambda: any((each.places, each.running, each.waiting) == (1, 1, 2) for each in loads), 30,
            "one runs, and two wait in the engine",
        )  # fmt: skip
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)


async def test_a_worker_has_an_engine_sleep_once_its_calls_have_ended_and_wakes_it(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    by = '{"sleep": {"path": "/sleep?level=1"}, "wake": {"path": "/wake_up"}}'
    marks = dict(zip(MARK_NAMES, ("default", "j", "0", "1", "7"), strict=True))
    env = marks | {"HOME": str(tmp_path), SLEEP_BY_VARIABLE: by}
    async with engine(nats_url, unique, tmp_path, env=env) as (one, chat):

        async def ask(word: bytes) -> str:
            reader, writer = await asyncio.open_unix_connection(tmp_path / SLEEP_SOCKET)
            writer.write(word + b"\n")
            said = await reader.readline()
            writer.close()
            return said.decode().strip()

        runs = asyncio.create_task(chat.call({"max_tokens": 10, "delay_ms": 100}, timeout=600))
        await until(lambda: _runs(chat, 1), what="a call runs")
        assert await ask(b"sleep") == "frozen"
        assert (await runs)["usage"]["completion_tokens"] == 10, "it has ended first"
        assert (tmp_path / ASLEEP_FILE).exists()
        assert await ask(b"sleep") == "frozen", "the next agent asks again"
        waits = asyncio.create_task(chat.call({"max_tokens": 1}, timeout=600))
        assert await ask(b"dance") == "running it is asked for nothing that it knows"
        assert await ask(b"wake") == "running"
        assert (await waits)["usage"]["completion_tokens"] == 1
        assert not (tmp_path / ASLEEP_FILE).exists()
        assert (await stat(chat))["slept"] == 1
        assert one.process.returncode is None
