"""Functions of a service called through the fleet: the SDK, a real scheduler, an embedded worker in this process.

How they are ended is in `tests/unit/worker/drivers/test_handler.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import BusError
from moorage.bus.jetstream import JetStream
from moorage.client import AsyncClient, JobFailed, Rejected
from moorage.client.events import Progress
from moorage.schemas.handler import INLINE_BYTES_MAX, result_bucket
from moorage.worker import EmbeddedWorker, HandlerContext, WorkerSettings
from tests.system.live.stack import QUICK, Stack, stack
from tests.waiting import until

LARGE = 5 * INLINE_BYTES_MAX


class Service:
    """Functions that a test steers, offered by an embedded worker with two simulated GPUs."""

    def __init__(self, made: Stack, state: Path) -> None:
        self.seen: list[HandlerContext] = []
        self.heard: list[str] = []
        settings = WorkerSettings(state, "service", made.subjects.prefix, simulate="2xL40S")
        self.worker = EmbeddedWorker(made.url, settings)
        for function in (self.echo, self.large, self.steps, self.nothing, self.broken):
            self.worker.handler(function.__name__)(function)

    async def echo(self, context: HandlerContext) -> Any:
        self.seen.append(context)
        return {"input": context.input, "gpus": list(context.uuids), "replica": context.replica}

    async def large(self, context: HandlerContext) -> bytes:
        return bytes(context.input)

    async def steps(self, context: HandlerContext) -> str:
        while "begun" not in self.heard:  # what was said before its caller listened is not said again
            context.progress(0.0, "begun")
            await asyncio.sleep(0.02)
        for step in range(3):
            context.progress((step + 1) / 4, text := f"step {step}")
            while text not in self.heard:  # noqa: ASYNC110 - progress is thinned out to some five a second
                await asyncio.sleep(0.02)
        return "done"

    async def nothing(self, context: HandlerContext) -> None:
        self.seen.append(context)

    def listener(self, told: list[Progress]) -> Callable[[Progress], None]:
        """Return what notes the progress of `steps`, which begins once somebody hears it."""

        def on_progress(progress: Progress) -> None:
            self.heard.append(progress.text)
            if progress.text != "begun":
                told.append(progress)

        return on_progress

    def broken(self, context: HandlerContext) -> None:
        raise LookupError(f"no input {context.input}")


@contextlib.asynccontextmanager
async def world(server: EmbeddedServer, prefix: str, tmp_path: Path) -> AsyncIterator[tuple[AsyncClient, Service]]:
    async with stack(server, prefix) as made:
        await made.scheduler(config=QUICK)
        service = Service(made, tmp_path / "service")
        async with service.worker, AsyncClient(made.url, tenant="acme", prefix=prefix) as moorage:
            try:
                await until(lambda: service.worker.is_live, 90, "the service has joined")
                yield moorage, service
            finally:
                with contextlib.suppress(BusError):  # a bucket has its bound set aside while it is there
                    await JetStream(moorage._wire.link).delete_stream(f"OBJ_{result_bucket(prefix, 'acme')}")


async def test_a_call_gives_what_the_function_returned_its_progress_and_why_it_failed(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with world(nats_server, unique, tmp_path) as (moorage, service):
        job = await moorage.submit_handler("echo", {"clip": "a.mp4", "size": [320, 240]}, gpu="1xL40S")
        result = await job.result("90s")
        placed = next(change for change in result.changes if change.state == "PLACED")
        assert result.value == {
            "input": {"clip": "a.mp4", "size": [320, 240]},
            "gpus": placed.gpus,
            "replica": 0,
        }
        assert service.seen[0].request.requires == {"handler.echo": ["1"]}
        # a handle from the id alone, later: nothing was heard, so it is read from the bucket
        assert (await moorage.job(job.job).result("60s")).value == result.value
        assert (await (await moorage.submit_handler("nothing")).result("90s")).value is None
        both = await (await moorage.submit_handler("echo", 7, gpu="2x1xL40S")).result("90s")
        assert [value["replica"] for value in both.value] == [0, 1]

        jobs = [await moorage.submit_handler("large", size) for size in (LARGE, 0, 1)]
        assert [result.value for result in await moorage.gather(*jobs, wait="90s")] == [bytes(LARGE), b"", b"\0"]

        told: list[Progress] = []
        job = await moorage.submit_handler("steps")
        assert (await job.result("90s", service.listener(told))).value == "done"
        assert told == [Progress((step + 1) / 4, f"step {step}") for step in range(3)]

        with pytest.raises(JobFailed) as failed:
            await (await moorage.submit_handler("broken", "in.mp4")).result("90s")
        assert failed.value.state == "FAILED"
        assert "LookupError: no input in.mp4" in failed.value.why
        assert failed.value.result.value is None
        wrong = {"driver_config": {"handler": {"inputs": 1}}, "run": {"driver": "handler", "argv": ["echo"]}}
        with pytest.raises(Rejected, match=r"the driver handler reads no driver_config\.handler\.inputs; .* is input"):
            await moorage.submit(wrong, requires={"handler.echo": ["1"]})


async def test_a_function_that_nobody_offers_waits_with_the_reason_and_runs_once_somebody_does(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with world(nats_server, unique, tmp_path) as (moorage, _):
        job = await moorage.submit_handler("paint", "a wall")
        assert job.accepted is not None
        assert any("no-match" in warning for warning in job.accepted.warnings)
        settings = WorkerSettings(tmp_path / "painter", "painter", unique, simulate="cpu")
        painter = EmbeddedWorker(nats_server.url, settings)
        painter.handler("paint")(lambda context: f"{context.input} is blue")
        async with painter:
            assert (await job.result("90s")).value == "a wall is blue"


@pytest.mark.parametrize(
    ("name", "input", "code"),
    [
        ("Trans Code", None, "invalid-argument"),
        ("x" * 49, None, "invalid-argument"),
        ("echo", b"raw", "invalid-argument"),
        ("echo", object(), "invalid-argument"),
        ("echo", float("inf"), "invalid-argument"),
        ("echo", "x" * 70_000, "too-large"),
    ],
)
async def test_a_call_is_checked_before_it_is_sent(name: str, input: Any, code: str) -> None:
    with pytest.raises(Rejected) as refused:
        await AsyncClient("nats://127.0.0.1:1").submit_handler(name, input)
    assert refused.value.code == code


async def test_an_input_that_would_arrive_as_null_is_refused_with_its_place() -> None:
    with pytest.raises(Rejected, match=r"input\['losses'\]\[1\] is NaN or infinity, which JSON cannot hold: send it"):
        await AsyncClient("nats://127.0.0.1:1").submit_handler("echo", {"losses": [None, float("nan")]})
