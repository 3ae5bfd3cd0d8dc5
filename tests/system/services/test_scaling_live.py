"""A service with as many members as its calls need: real scheduler, worker, members and callers."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from typing import Any, Final

import pytest

from moorage.bus.connection import connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import NoResponders
from moorage.client import AsyncClient, CallRefused, JobFailed
from moorage.client.services import AsyncService
from tests.system.live.stack import ANSWER_S, QUICK, Caller, caller, stack, unique_prefix
from tests.system.services.members import FUNCTIONS, error_of
from tests.waiting import until

SCALING: Final = QUICK | {"scale_up_s": 0.5, "scale_down_s": 3.0}


def service(function: str, **fields: Any) -> dict[str, Any]:
    """A job that serves with a function of the tests."""
    argv = [sys.executable, "-m", "moorage.cli", "serve", f"functions:{function}"]
    env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    run = {"argv": argv, "cwd": str(FUNCTIONS.parent), "env": env, "grace_s": 10}
    return {"job": f"s-{function}", "run": run, "service": {"name": function}, **fields}


async def running(one: Caller, job: str) -> int:
    states = Counter(row["state"] for row in (await one.show(job))["replica_states"])
    return states["RUNNING"]


@pytest.mark.long
@pytest.mark.slow
async def test_a_service_follows_its_calls_from_none_to_many_and_back_and_loses_none(
    nats_server: EmbeddedServer,
) -> None:
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        await made.scheduler(config=SCALING)
        await made.agent("a", "8xH100", worker="w", drivers=["process"])
        await one.workers_up("w")
        answer = await one.api("submit", service("nap", replicas={"min": 0, "max": 3, "wait_target_ms": 100}, gpu={}))
        assert answer["kind"] == "accepted", answer
        prefix = made.subjects.prefix
        subject = made.subjects.call("acme", "nap")
        async with (
            AsyncClient(made.url, tenant="acme", prefix=prefix, timeout=ANSWER_S) as client,
            await connect(made.url, "bare") as bare,
        ):
            with pytest.raises(NoResponders):
                await bare.request(subject, b"1", 5.0)
            assert (await one.show("s-nap"))["scaled"]["wanted"] == 0
            began_s = time.monotonic()
            assert await client.call("nap", b"1") == b"1"
            print(f"the first call took {time.monotonic() - began_s:.2f} s")
            assert (await one.show("s-nap"))["scaled"]["wanted"] == 1

            told, stop = Counter[str](), asyncio.Event()

            async def calls() -> None:
                while not stop.is_set():
                    told[error_of(await bare.request(subject, b"100", ANSWER_S))] += 1

            callers = [asyncio.create_task(calls()) for _ in range(3)]
            await until(lambda: _is(one, 3), ANSWER_S, "three members")
            explained = (await one.api("explain", {"job": "s-nap"}))["data"]
            assert (explained["scaled"]["wanted"], explained["scaled"]["max"]) == (3, 3)
            stop.set()
            await asyncio.gather(*callers)
            # less, and none of the calls that go on is lost while the members end one by one
            stop.clear()

            async def few() -> None:
                while not stop.is_set():
                    told[error_of(await bare.request(subject, b"1", ANSWER_S))] += 1
                    await asyncio.sleep(0.05)

            calling = asyncio.create_task(few())
            await until(lambda: _is(one, 1), ANSWER_S, "one member")
            stop.set()
            await calling
            assert set(told) == {""}, told
            await until(lambda: _is(one, 0), ANSWER_S, "no member")
            explained = (await one.api("explain", {"job": "s-nap"}))["data"]
            assert explained["reason"] == "scaled"
            assert [each async for each in client.service("nap").stream(b"2")] == [b"2"]


async def _is(one: Caller, members: int) -> bool:
    return await running(one, "s-nap") == members


async def test_a_call_that_nobody_will_answer_is_told_so_at_once_and_one_that_a_job_will_waits(
    nats_server: EmbeddedServer,
) -> None:
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        await made.scheduler(config=SCALING)
        await made.agent("a", "8xH100", worker="w", drivers=["process"])
        await one.workers_up("w")
        async with AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix, timeout=ANSWER_S) as client:
            early = asyncio.create_task(client.call("echo", b"early"))
            await asyncio.wait((early,))
            assert "no job of tenant acme has the service echo" in str(early.exception())
            await client.submit(service("echo"), job="s-echo")
            assert await client.call("echo", b"1") == b"1", "right after the submit"
            failing = {**service("nap"), "run": {"argv": ["sh", "-c", "exit 3"]}}
            with pytest.raises(JobFailed):
                await (await client.submit(failing, job="s-nap")).result()
            # each of these would be tried again for an hour
            with pytest.raises(CallRefused, match="job s-nap FAILED with code 3") as ended:
                await client.call("nap", b"1", timeout="1h")
            with pytest.raises(CallRefused, match="has the service ecko") as mistyped:
                await client.call("ecko", b"1", timeout="1h")
            with pytest.raises(CallRefused, match="has the service ecko"):
                _ = [each async for each in client.service("ecko").stream(b"1", timeout="1h")]
            assert (ended.value.code, ended.value.problem.next) == ("no-service", "moorage logs s-nap")
            waits = {**service("count"), "gpu": {"count": 8, "model": "H200"}, "on_no_match": "wait"}
            loops = {**service("wrong"), "run": {**failing["run"], "restart": "always"}}
            for request, why in ((waits, "has a GPU of the model"), (loops, "begins after a pause: .*with code 3")):
                job, name = request["job"], request["service"]["name"]
                await client.submit(request)
                with pytest.raises(CallRefused, match=f"nobody serves it yet; of its job {job}: .*{why}") as waiting:
                    await client.call(name, b"1", timeout="5s")
                assert (waiting.value.code, waiting.value.problem.next) == ("no-member", f"moorage explain {job}")
            assert (mistyped.value.code, mistyped.value.problem.allowed) == ("no-service", "echo")


async def test_calls_that_wait_in_an_engine_raise_a_member_beside_it(nats_server: EmbeddedServer) -> None:
    """Its engine runs one at a time, while the request says eight: by its places the service would have room."""
    serve = [sys.executable, "-m", "moorage.cli", "serve", "--", sys.executable, "-m", "moorage.testing.fake_engine"]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    request = {
        "run": {"argv": [*serve, "{port}", "--places", "1"], "env": env, "grace_s": 1},
        "service": {"name": "chat", "concurrency": 8, "http": {"health": "/health", "metrics": "vllm"}},
        "replicas": {"min": 1, "max": 2},
        "gpu": {},
    }
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        await made.scheduler(config=SCALING)
        await made.agent("a", "2xH100", worker="w", drivers=["process"])
        await one.workers_up("w")
        async with AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix, timeout=ANSWER_S) as client:
            await client.submit(request, job="s-chat")
            chat = client.service("chat")
            streams = [asyncio.create_task(_read(chat, {"max_tokens": 100_000, "stream": True})) for _ in range(3)]
            try:

                async def two() -> bool:
                    return await running(one, "s-chat") == 2

                await until(two, ANSWER_S, "a second member")
            finally:
                for stream in streams:
                    stream.cancel()
                await asyncio.wait(streams)
        explained = (await one.api("explain", {"job": "s-chat"}))["data"]["scaled"]
        assert (explained["wanted"], explained["why"].endswith("a member runs 1")) == (2, True), explained


async def _read(service: AsyncService, body: dict[str, Any]) -> None:
    async for _ in service.stream(body, timeout=600):
        continue
