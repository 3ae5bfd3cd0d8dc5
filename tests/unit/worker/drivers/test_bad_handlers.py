"""Functions of a service that end in every bad way: each ends its own job, once, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import nats
import pytest

from moorage.schemas.handler import result_bucket
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker import EmbeddedWorker, HandlerContext, WorkerSettings
from tests.unit.worker.drivers.test_handler import body, name_of, place
from tests.waiting import until

#: what `os.listdir` gives for a file name that is no UTF-8
NO_UTF8 = "in-\udcff.mp4"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unwritable:
    """Some library's result, which breaks as it is written."""

    __slots__ = ("__dict__",)


def endless() -> Any:
    ring: list[Any] = []
    ring.append(ring)
    return ring


def deep() -> Any:
    found: Any = None
    for _ in range(100_000):
        found = [found]
    return found


def throws(error: BaseException) -> Callable[[HandlerContext], Any]:
    def handler(context: HandlerContext) -> Any:
        raise error

    return handler


def gives(value: Callable[[], Any]) -> Callable[[HandlerContext], Any]:
    return lambda context: value()


def says(fraction: Any, text: str) -> Callable[[HandlerContext], Any]:
    def handler(context: HandlerContext) -> Any:
        context.progress(fraction, text)

    return handler


#: by name: a function, then the code and a part of the detail with which its job must end
BAD: dict[str, tuple[Callable[[HandlerContext], Any], int, str]] = {
    "raises-no-utf8": (throws(FileNotFoundError(NO_UTF8)), 1, "FileNotFoundError"),
    "raises-unspeakable": (throws(Unspeakable()), 1, "Unspeakable"),
    "raises-group": (throws(ExceptionGroup("many", [ValueError(str(n)) for n in range(50)])), 1, "ExceptionGroup"),
    "raises-stop-iteration": (throws(StopIteration(3)), 1, "StopIteration"),
    "raises-stop-async-iteration": (throws(StopAsyncIteration()), 1, "StopAsyncIteration"),
    "raises-cancelled": (throws(asyncio.CancelledError()), -15, "cancelled by itself"),
    "raises-generator-exit": (throws(GeneratorExit()), 1, "GeneratorExit"),
    "raises-timeout": (throws(TimeoutError()), 1, "TimeoutError"),
    "raises-huge": (throws(ValueError("x" * 10_000_000)), 1, "ValueError"),
    "exits": (throws(SystemExit(2)), 1, "SystemExit: 2"),
    "interrupts": (throws(KeyboardInterrupt()), 1, "KeyboardInterrupt"),
    "gives-no-utf8": (gives(lambda: NO_UTF8), 1, "the result could not be kept"),
    "gives-no-utf8-inside": (gives(lambda: {"name": NO_UTF8}), 1, "the result could not be kept"),
    "gives-endless": (gives(endless), 1, "the result could not be kept"),
    "gives-deep": (gives(deep), 1, "the result could not be kept"),
    "gives-large-number": (gives(lambda: 1 << 100_000), 1, "the result could not be kept"),
    "gives-type": (gives(lambda: Unwritable), 1, "the result could not be kept"),
    "gives-keys": (gives(lambda: {(1, 2): 3}), 1, "the result could not be kept"),
    "gives-nan": (gives(lambda: {"loss": [0.5, float("nan")]}), 1, "result['loss'][1] is NaN or infinity, which JSON"),
    "gives-infinity": (gives(lambda: float("-inf")), 1, "result is NaN or infinity, which JSON"),
    "gives-too-much": (gives(lambda: bytes(65 << 20)), 1, "the result could not be kept"),
    "says-no-utf8": (says(0.5, NO_UTF8), 0, "result:0"),
    "says-a-number-of-its-own": (says(Fraction(1, 2), "half"), 0, "result:0"),
}


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_end_of_a_function_ends_its_job_alone(
    nats_url: str, unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str, kind: str
) -> None:
    handler, code, detail = BAD[bad]
    worker = EmbeddedWorker(nats_url, WorkerSettings(tmp_path, "w1", unique, simulate="2xH100", load_s=60))

    async def coroutine(context: HandlerContext) -> Any:
        return handler(context)

    worker.handler("bad")(coroutine if kind == "coroutine" else handler)

    @worker.handler("good")
    async def good(context: HandlerContext) -> None:
        return None

    caplog.set_level(logging.WARNING)
    async with ScriptedLeader(nats_url, unique) as leader:
        async with worker:
            await leader.joined("w1")
            await leader.want("w1", place(name_of(), body("bad")))
            exited = await leader.await_report("w1", "exited", name_of())
            assert exited.code == code
            if kind == "thread" or not bad.startswith("raises-stop"):  # Python makes another error of it
                assert detail in exited.detail
            await leader.await_report("w1", "freed", name_of())
            assert not worker.running
            await leader.want("w1", place(name_of("b", 11), body("good")))
            assert (await leader.await_report("w1", "exited", name_of("b", 11))).code == 0
            await until(lambda: worker.pool.slot_states()[0].sharers == 0, what="its GPU is free")
        store = await nats.connect(nats_url)
        try:
            await store.jetstream().delete_object_store(result_bucket(unique, "acme"))
        except nats.js.errors.NotFoundError:
            pass
        await store.close()
    assert not [record for record in caplog.records if record.name == "asyncio"], caplog.text[-2000:]
