"""docs/examples/transcoder.py as a user runs it: real scheduler, real NATS, the service in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import moorage
from moorage.bus.embedded import EmbeddedServer
from moorage.client import AsyncClient, JobFailed
from moorage.client.events import Progress
from moorage.schemas.handler import result_bucket
from tests.system.live.stack import Stack, caller, stack

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "transcoder.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transcoder", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["transcoder"] = module  # where a dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


@contextlib.asynccontextmanager
async def service(made: Stack, worker: str, simulate: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The example, ended by SIGTERM as an operator would."""
    options = {"nats": made.url, "prefix": made.subjects.prefix, "worker": worker, "simulate": simulate, "own": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLE),
        *(word for name, value in options.items() for word in (f"--{name}", value)),
        "--state",
        str(made.folder / worker),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(root).parent) for root in moorage.__path__)},
    )
    try:
        yield process
        process.terminate()
        async with asyncio.timeout(120):
            assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def own_clip(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(90):
        return (await process.stdout.readline()).decode()


def job(name: str, gpu: bool) -> dict[str, Any]:
    return {
        "job": name,
        **({"gpu": {}} if gpu else {}),
        "requires": {"handler.transcode": ["1"]},
        "run": {"driver": "handler", "argv": ["transcode"]},
        "driver_config": {"handler": {"input": {"frames": 6, "width": 64, "height": 48, "level": 9}}},
    }


@pytest.mark.slow
async def test_it_transcodes_for_the_fleet_and_for_itself(nats_server: EmbeddedServer, unique: str) -> None:
    module = example()
    expected = asdict(module.transcode(module.Clip(6, 64, 48, 9), "cpu"))
    async with stack(nats_server, unique) as made, caller(made) as ann:
        await made.scheduler()
        await ann.leader()
        async with service(made, "cpu-1", "cpu") as on_cpu:
            assert "own clip 0 on cpu" in await own_clip(on_cpu)
            await ann.api("submit", job("on-cpu", gpu=False))
            await ann.reaches("on-cpu", "SUCCEEDED")
            assert await result_of(made, "on-cpu") == expected
        async with service(made, "gpu-1", "1xL40S") as on_gpu:
            assert "own clip 0 on SIM-" in await own_clip(on_gpu)
            await ann.api("submit", job("on-gpu", gpu=True))
            shown = await ann.reaches("on-gpu", "SUCCEEDED")
            found = await result_of(made, "on-gpu")
            [placed] = [change for change in shown["changes"] if change["state"] == "PLACED"]
            assert found == expected | {"device": placed["gpus"][0]}
            async with AsyncClient(made.url, tenant="acme", prefix=unique) as moorage:
                asked = {"frames": 200, "width": 64, "height": 48, "level": 9}
                longer = asdict(module.transcode(module.Clip(**asked), placed["gpus"][0]))
                told: list[Progress] = []
                for _ in range(9):  # it may be over before its progress is listened for
                    called = await moorage.submit_handler("transcode", asked, gpu=1)
                    assert (await called.result("90s", told.append)).value == longer
                    if told:
                        break
                assert told[-1] == Progress(1.0, "frame 200 of 200")
                with pytest.raises(JobFailed, match="a clip has 1"):
                    await (await moorage.submit_handler("transcode", {"frames": 0}, gpu=1)).result("90s")
        jetstream = ann.nc.jetstream()
        await jetstream.delete_object_store(result_bucket(unique, "acme"))


async def result_of(made: Stack, name: str) -> Any:
    """As a caller in another process reads it."""
    async with AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix) as moorage:
        return (await moorage.job(name).result("90s")).value
