"""Services that sleep and take turns on one GPU: real scheduler, worker and members, over NVML and CUDA as stubs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.client import AsyncClient, CallRefused
from moorage.worker.agent.run import start
from moorage.worker.freezing import cuda
from moorage.worker.settings import WorkerSettings
from tests.nvidia.stub import Board, Stub, libraries
from tests.system.live.stack import ANSWER_S, QUICK, Caller, caller, stack, unique_prefix
from tests.system.worker.agent.test_agent_process import state_folder
from tests.system.worker.sharing.test_memory_guard import GPU
from tests.waiting import until

#: takes memory of the GPU as it starts, and once more for each call; what it keeps is in its own memory
MODEL = """
import ctypes, os
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer, weight = ctypes.c_void_p(), ctypes.c_ulonglong(), int(os.environ["WEIGHT"])
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64 << 20)) == 0


def times(data):
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)) == 0
    return str(int(data) * weight).encode()
"""


def service(folder: Path, weight: int, environment: dict[str, str], **sleeps: int) -> dict[str, Any]:
    name = f"times-{weight}"
    argv = [sys.executable, "-m", "moorage.cli", "serve", "model:times"]
    env = environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "WEIGHT": str(weight)}
    run = {"argv": argv, "cwd": str(folder), "env": env, "grace_s": 5}
    return {"job": name, "run": run, "gpu": {}, "service": {"name": name, "sleep_after_s": 1} | sleeps}


async def state(one: Caller, job: str) -> str:
    (row,) = (await one.show(job))["replica_states"]
    return str(row["state"])


@contextlib.asynccontextmanager
async def fleet(
    nats_server: EmbeddedServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Caller, AsyncClient, Stub]]:
    """A scheduler and a worker with one GPU."""
    monkeypatch.setattr(cuda, "LIBRARY", str(libraries() / "libcuda.so.1"))
    (folder / "model.py").write_text(MODEL)
    stub = Stub(folder / "stub", Board(GPU))
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one, state_folder() as state:
        await made.scheduler(config=QUICK)
        with stub.load():
            settings = WorkerSettings(
                state, "w", made.subjects.prefix, load_s=0.2, leases=False, device_fence="off", idle_warn_s=0
            )
            worker = await start(settings, made.url)
            try:
                await one.workers_up("w")
                async with AsyncClient(
                    made.url, tenant="acme", prefix=made.subjects.prefix, timeout=ANSWER_S
                ) as client:
                    yield one, client, stub
            finally:
                await worker.stop()


@pytest.mark.long
@pytest.mark.slow
async def test_three_models_take_turns_on_one_gpu_and_each_call_wakes_its_model(
    nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(nats_server, tmp_path, monkeypatch) as (one, client, stub):
        for weight in (2, 3, 5):
            answer = await one.api("submit", service(tmp_path, weight, stub.environment, awake_s=1))
            assert answer["kind"] == "accepted", answer
            await until_state(one, f"times-{weight}", "FROZEN")
        assert len(list((stub.folder / "away").iterdir())) == 3
        began_s = time.monotonic()
        assert await client.call("times-2", b"7") == b"14"
        print(f"a call to a model that slept took {time.monotonic() - began_s:.2f} s")
        for turn in range(3):  # all at once: each has to wait for the others
            numbers = [(weight, turn * 10 + each) for weight in (2, 3, 5) for each in range(4)]
            began_s = time.monotonic()
            calls = [client.call(f"times-{weight}", str(each).encode()) for weight, each in numbers]
            assert await asyncio.gather(*calls) == [b"%d" % (weight * each) for weight, each in numbers]
            print(f"three models in turns took {time.monotonic() - began_s:.2f} s")
        for weight in (2, 3, 5):
            await until_state(one, f"times-{weight}", "FROZEN")
            (row,) = (await one.show(f"times-{weight}"))["replica_states"]
            assert row["attempt"] == 1, "none of them was started anew"


@pytest.mark.slow
async def test_a_call_that_cannot_wait_for_its_turn_hears_at_once_how_long_it_takes(
    nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(nats_server, tmp_path, monkeypatch) as (one, client, stub):
        for weight, awake_s in ((2, 1), (3, 3600)):
            await one.api("submit", service(tmp_path, weight, stub.environment, awake_s=awake_s))
            await until_state(one, f"times-{weight}", "FROZEN")
        why = (await one.api("explain", {"job": "times-2"}))["data"]["why"]
        assert why.startswith("it is frozen until it is called; waking: ")
        assert await client.call("times-3", b"7") == b"21"
        with pytest.raises(CallRefused) as refused:
            await client.call("times-2", b"7")
        assert refused.value.code == "service-busy"
        assert refused.value.retry_after_s
        assert refused.value.retry_after_s > ANSWER_S
        assert "the service sleeps, in about 3" in str(refused.value)
        assert "waits for its turn on its GPUs" in str(refused.value)


async def until_state(one: Caller, job: str, wanted: str) -> None:
    async def reached() -> bool:
        return await state(one, job) == wanted

    await until(reached, what=f"{job} is {wanted}")


def engine(name: str, **sleeps: float) -> dict[str, Any]:
    """A service of an engine that sleeps by a request, and dies of a call while it does."""
    serve = [sys.executable, "-m", "moorage.cli", "serve", "--", sys.executable, "-m", "moorage.testing.fake_engine"]
    by = {"sleep": {"path": "/sleep?level=1"}, "wake": {"path": "/wake_up"}}
    return {
        "job": name,
        "run": {
            "argv": [*serve, "{port}"],
            "env": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": "/tmp"},
            "grace_s": 1,
        },
        "gpu": {},
        "service": {"name": name, "concurrency": 8, "sleep_after_s": 1, "sleep_by": by, "http": {"health": "/health"}}
        | sleeps,
    }


async def test_engines_that_sleep_by_a_request_take_turns_where_no_driver_freezes(nats_server: EmbeddedServer) -> None:
    names = ("chat-a", "chat-b")
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        await made.scheduler(config=QUICK)
        await made.agent("a", "1xH100", worker="w", drivers=["process"])
        await one.workers_up("w")
        async with AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix, timeout=ANSWER_S) as client:
            for name in names:
                await client.submit(engine(name, awake_s=0))
                await client.call(name, {"max_tokens": 1})  # its member says at once that it has nothing to do then
                await until_state(one, name, "FROZEN")
            for _ in range(2):
                calls = [client.call(name, {"max_tokens": 3}) for name in names for _ in range(10)]
                began_s = time.monotonic()
                answers = await asyncio.gather(*calls)
                print(f"a turn of each took {time.monotonic() - began_s:.2f} s")
                assert [each["usage"]["completion_tokens"] for each in answers] == [3] * 20
            for name in names:
                (row,) = (await one.show(name))["replica_states"]
                assert row["attempt"] == 1, "it has not died of a call"


@pytest.mark.long
async def test_three_small_engines_share_a_gpu_by_memory_of_which_two_are_awake(nats_server: EmbeddedServer) -> None:
    names = ("small-a", "small-b", "small-c")
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        await made.scheduler(config=QUICK)
        await made.agent("a", "1xL40S", worker="w", drivers=["process"])
        await one.workers_up("w")
        async with AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix, timeout=ANSWER_S) as client:
            for name in names:  # of 46,068 MiB
                request = engine(name, awake_s=0) | {"gpu": {"sharing": "time-slice", "share": {"memory_mib": 20_000}}}
                await client.submit(request)
                await client.call(name, {"max_tokens": 1})
                await until_state(one, name, "FROZEN")
            calls = [client.call(name, {"max_tokens": 3}) for name in names for _ in range(10)]
            answers = await asyncio.gather(*calls)
            assert [each["usage"]["completion_tokens"] for each in answers] == [3] * 30
            for name in names:
                (row,) = (await one.show(name))["replica_states"]
                assert row["attempt"] == 1, "it has not died of a call"


@pytest.mark.parametrize(
    "gpu", [{}, {"sharing": "time-slice", "share": {"memory_mib": 50_000}}], ids=["alone", "by memory"]
)
async def test_models_take_turns_on_a_simulated_gpu_where_freezing_is_played(
    nats_server: EmbeddedServer, tmp_path: Path, gpu: dict[str, Any]
) -> None:
    (tmp_path / "model.py").write_text("def times(data):\n    return str(2 * int(data)).encode()\n")
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        await made.scheduler(config=QUICK)
        await made.agent("a", "1xH100", worker="w", drivers=["process"], play_freezing=True)
        await one.workers_up("w")
        async with AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix, timeout=ANSWER_S) as client:
            for weight in (2, 3):
                await client.submit(service(tmp_path, weight, {}, awake_s=0) | {"gpu": gpu})
                assert await client.call(f"times-{weight}", b"7") == b"14"
                await until_state(one, f"times-{weight}", "FROZEN")
            assert await client.call("times-2", b"8") == b"16"
            (row,) = (await one.show("times-2"))["replica_states"]
            assert row["attempt"] == 1
